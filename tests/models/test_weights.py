"""Weights from and to Hugging Face folders: logits equal `transformers` at every position, faults are refused first."""

import json
import os
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from interlace import hf_config
from interlace.config import ModelConfig, RopeScaling
from interlace.errors import CheckpointError, ConfigError, SecurityError
from interlace.models.decoder import Decoder, initialise
from interlace.models.weights import INDEX, SINGLE, hf_names, load_hf, save_hf

transformers = pytest.importorskip("transformers")
LENGTH = 64

SIZES = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DOTS1 = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "sliding_window": 5,
    "max_window_layers": 1,
}
GLM4 = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 7,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
MSCALE = YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.1}
KINDS = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 1e4}}),
    "llama, yarn with its own factor": (
        "llama",
        {"rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 0.5}},
    ),
    "llama, yarn with mscale": (
        "llama",
        {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window, tied": ("mistral", {"sliding_window": 5, "tie_word_embeddings": True}),
    "mistral, one head of keys, yarn": (
        "mistral",
        {"num_key_value_heads": 1, "head_dim": 6, "rope_parameters": YARN | {"rope_theta": 1e6}, "sliding_window": 100},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN | {"rope_theta": 1e6}}),
    "qwen2, window in the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2, window in every layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "num_key_value_heads": 4},
    ),
    "qwen2, window off": ("qwen2", {"sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3, tied, yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN | {"rope_theta": 1e4}}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "mixtral, window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
    ),
    "qwen3_moe, not normalised": (
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": False},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "dots1": ("dots1", DOTS1),
    "dots1, groups": (
        "dots1",
        DOTS1 | {"n_group": 3, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "dots1, the first layer dense": ("dots1", DOTS1 | {"first_k_dense_replace": 1}),
    "qwen3_moe, dense layers": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "num_hidden_layers": 5,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
        },
    ),
    "qwen2_moe, a dense layer": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": ("glm4_moe", GLM4 | {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe, yarn": (
        "glm4_moe",
        GLM4
        | {
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
}


KINDS |= {
    "deepseek_v2": ("deepseek_v2", LATENT),
    "deepseek_v2, whole queries, groups, mscale": (
        "deepseek_v2",
        LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": MSCALE,
        },
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3, yarn, whole queries, no dense layer": (
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "v_head_dim": 10,
            "rope_parameters": MSCALE | {"mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3, halves, no experts": (
        "deepseek_v3",
        LATENT | {"rope_interleave": False, "first_k_dense_replace": 2, "q_lora_rank": None},
    ),
}


def theirs(name):
    kind, extra = KINDS[name]
    config = transformers.AutoConfig.for_model(kind, **SIZES | extra)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, where mixing them up would not show
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            assert parameter.isfinite().all(), parameter_name
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer))  # enough to change what is chosen, and to be negative
    return model


def save_theirs(model, folder, shard_bytes=None):
    """Their own writer where it shards as wanted; its progress bar stays silent."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))


def ours(folder):
    cfg, tensors = load_hf(folder)
    decoder = Decoder(cfg)
    fill(decoder, tensors)
    return decoder


def fill(decoder, tensors):
    """Copy every tensor into the parameter or buffer of its name; all have to come."""
    parameters = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors:
            parameters.pop(name).copy_(tensor)
    assert not parameters


def tokens():
    return torch.randint(0, 43, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def assert_same_logits(found_BTV, expected_BTV):
    worst_T = (found_BTV - expected_BTV).abs().amax(dim=(0, 2))
    scale = expected_BTV.abs().max()
    assert scale > 0.5, "logits near zero prove nothing"
    assert worst_T.max() <= 1e-5 * max(1.0, scale.item()), (
        f"position {worst_T.argmax()}: {worst_T.max():.2e} of {scale:.1f}"
    )


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", KINDS)
def test_logits_of_a_loaded_folder_equal_transformers(name, sharded, tmp_path):
    model = theirs(name)
    save_theirs(model, tmp_path, 8000 if sharded else None)
    assert (tmp_path / INDEX).exists() == sharded
    with torch.no_grad():
        assert_same_logits(ours(tmp_path)(tokens()), model(tokens()).logits)


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", KINDS)
def test_transformers_loads_a_saved_folder_with_equal_logits(name, sharded, tmp_path):
    save_theirs(theirs(name), tmp_path / "theirs")
    decoder = ours(tmp_path / "theirs")
    folder = tmp_path / "ours"
    named = [*decoder.named_parameters(), *decoder.named_buffers()]
    save_hf(folder, decoder.cfg, named, 8000 if sharded else 1 << 30)
    assert (folder / INDEX).exists() == sharded
    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert model.dtype == torch.float32
    with torch.no_grad():
        assert_same_logits(model.eval()(tokens()).logits, decoder(tokens()))
    assert hf_config.read(folder) == decoder.cfg
    again = ours(folder)
    for (key, a), (_, b) in zip(again.state_dict().items(), decoder.state_dict().items(), strict=True):
        assert torch.equal(a, b), key


def test_layers_that_guess_further_tokens_are_left_out(tmp_path):
    """GLM-4.5 is published with such a layer behind its last; one that config.json does not tell of is refused."""
    model = theirs("glm4_moe")
    save_theirs(model, tmp_path)
    file = tmp_path / SINGLE
    tensors = load_file(file) | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.3\.eh_proj\.weight, which the model"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.warns(UserWarning, match=r"model\.layers\.3\.eh_proj\.weight ignored"), torch.no_grad():
        assert_same_logits(ours(tmp_path)(tokens()), model(tokens()).logits)


def test_rope_scaling_shows_in_the_logits():
    """swiss-ai/Megatron-LM#85: scaling dropped by a converter gives equal logits at position 0 and drifts after it."""
    decoders = {}
    for name, scaling in (
        ("none", None),
        ("linear", RopeScaling("linear", 4.0)),
        ("llama3", RopeScaling("llama3", 8.0, original_max_position_embeddings=16)),
        ("yarn", RopeScaling("yarn", 4.0, original_max_position_embeddings=16)),
    ):
        cfg = ModelConfig(43, 24, 2, 4, 2, 8, 40, rope_theta=500.0, rope_scaling=scaling, init_std=0.3)
        decoders[name] = Decoder(cfg)
        initialise(decoders[name], cfg, seed=0)
    with torch.no_grad():
        logits = {name: decoder(tokens()) for name, decoder in decoders.items()}
    for name in ("linear", "llama3", "yarn"):
        difference_T = (logits[name] - logits["none"]).abs().amax(dim=(0, 2))
        assert difference_T[0] < 1e-5
        assert difference_T[-8:].min() > 1e-2, name


# --- what a folder says about its dtype and names ------------------------------------------------------------------


CFG = ModelConfig(
    vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=12, qk_norm=True
)


def saved(folder, cfg=CFG, dtype=torch.float32, max_shard_bytes=700):
    decoder = Decoder(cfg, dtype=dtype)
    initialise(decoder, cfg, seed=0)
    save_hf(folder, cfg, decoder.named_parameters(), max_shard_bytes)
    return decoder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_stored_dtype_is_kept(dtype, tmp_path):
    decoder = saved(tmp_path / "m", dtype=dtype)
    loaded = dict(load_hf(tmp_path / "m")[1])
    for name, parameter in decoder.named_parameters():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], parameter), name
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_shards_stay_below_their_limit_and_the_index_adds_up(tmp_path):
    decoder = saved(tmp_path / "m")
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    total = 0
    for file in files:
        tensors = load_file(tmp_path / "m" / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 700 or len(tensors) == 1
        total += size
        assert all(index["weight_map"][name] == file for name in tensors)
        with safe_open(tmp_path / "m" / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
    assert total == index["metadata"]["total_size"] == sum(p.nbytes for p in decoder.parameters())
    assert set(index["weight_map"]) == {part for parts in hf_names(CFG).values() for part in parts}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_tensors_come_in_the_order_of_the_model_whatever_the_order_saved(tmp_path):
    decoder = Decoder(CFG)
    initialise(decoder, CFG, seed=0)
    save_hf(tmp_path / "m", CFG, reversed(list(decoder.named_parameters())), 700)
    assert [name for name, _ in load_hf(tmp_path / "m")[1]] == [name for name, _ in decoder.named_parameters()]


# --- weights in fp8 ------------------------------------------------------------------------------------------------


def in_fp8(folder, block, change=lambda tensors: None, config=True):
    """Turns the matrices of a folder's layers into fp8 with a scale for each block; what they stand for, by name."""
    rows, columns = block
    path, tensors, stands_for = folder / "model.safetensors", load_file(folder / "model.safetensors"), {}
    for name, whole in list(tensors.items()):
        if whole.dim() != 2 or ".layers." not in name or ".mlp.gate." in name:
            continue
        tall, wide = -(-whole.shape[0] // rows), -(-whole.shape[1] // columns)
        scale, made = torch.empty(tall, wide), torch.empty(whole.shape, dtype=torch.float8_e4m3fn)
        stands_for[name] = torch.empty(whole.shape)
        for a in range(tall):
            for b in range(wide):
                place = slice(a * rows, (a + 1) * rows), slice(b * columns, (b + 1) * columns)
                scale[a, b] = whole[place].abs().max() / 448.0
                made[place] = (whole[place] / scale[a, b]).to(torch.float8_e4m3fn)
                stands_for[name][place] = made[place].float() * scale[a, b]
        tensors |= {name: made, f"{name}_scale_inv": scale}
    change(tensors)
    save_file(tensors, path)
    if config:
        known = json.loads((folder / "config.json").read_text())
        how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
        (folder / "config.json").write_text(json.dumps(known | {"quantization_config": how}))
    return stands_for


@pytest.mark.parametrize("block", [(128, 128), (5, 3), (1, 4)])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_weights_in_fp8_come_as_what_they_stand_for(name, block, tmp_path):
    """DeepSeek-V3 as it is published; without their scales such weights are noise."""
    if name == "llama":
        saved(tmp_path / "m", max_shard_bytes=1 << 30)
    else:
        save_theirs(theirs(name), tmp_path / "m")
    plain = dict(load_hf(tmp_path / "m")[1])
    stands_for = in_fp8(tmp_path / "m", block)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    found = dict(load_hf(tmp_path / "m")[1])
    assert len(stands_for) > 10
    again = {part: stands_for.get(part, tensors[part]) for part in tensors if not part.endswith("_scale_inv")}
    save_file(again, tmp_path / "m" / "model.safetensors")
    known = json.loads((tmp_path / "m" / "config.json").read_text())
    del known["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(known))
    for part, expected in load_hf(tmp_path / "m")[1]:
        assert torch.equal(found[part], expected), part
        assert (found[part].float() - plain[part].float()).abs().max() <= 0.07 * plain[part].float().abs().max(), part
    assert set(found) == set(plain)


def without_its_scale(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]


def with_a_scale_too_few(tensors):
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(3, 2)


def with_a_scale_of_nothing(tensors):
    tensors["model.norm.weight_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (without_its_scale, True, r"no file model\.layers\.1\.mlp\.up_proj\.weight_scale_inv"),
        (with_a_scale_too_few, True, r"weight_scale_inv has shape \[3, 2\], config\.json makes it \[3, 3\]"),
        (
            with_a_scale_of_nothing,
            True,
            r"model\.norm\.weight_scale_inv, which the model of config\.json does not have",
        ),
        (lambda tensors: None, False, r"_scale_inv"),
    ],
    ids=["no scale", "shape", "foreign", "not said"],
)
def test_scales_that_do_not_fit_are_named(change, config, said, tmp_path):
    saved(tmp_path / "m", max_shard_bytes=1 << 30)
    in_fp8(tmp_path / "m", (5, 3), change, config)
    with pytest.raises(CheckpointError, match=said):
        load_hf(tmp_path / "m")


# --- faults --------------------------------------------------------------------------------------------------------


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rewrite(folder, file, change):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def second(folder):
    return sorted(folder.glob("model-*.safetensors"))[1]


def remove_shard(folder):
    second(folder).unlink()
    return second(folder).name.replace("00003", "00002"), "model.layers.0"


def cut_shard(folder):
    path = second(folder)
    path.write_bytes(path.read_bytes()[:-10])
    return path.name, "model.layers.0"


def cut_header(folder):
    path = second(folder)
    path.write_bytes(path.read_bytes()[:5])
    return path.name, "model.layers.0"


def index_lists_what_the_shard_lacks(folder):
    file = second(folder).name
    name = next(iter(load_file(second(folder))))
    rewrite(folder, file, lambda tensors: tensors.pop(name))
    return file, name


def shard_holds_what_the_index_lacks(folder):
    file = second(folder).name
    rewrite(folder, file, lambda tensors: tensors.update({"model.extra": torch.zeros(2)}))
    return file, "model.extra"


def missing_tensor(folder):
    name = "model.layers.1.self_attn.k_norm.weight"
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    edit_index(folder, lambda weight_map: weight_map.pop(name))
    rewrite(folder, file, lambda tensors: tensors.pop(name))
    return INDEX, name


def tensors_of_other_names(folder):
    """As transformers 5 holds experts, and older programs whole models, in memory."""
    for file in {path.name for path in folder.glob("*.safetensors")}:
        rewrite(
            folder, file, lambda tensors: [tensors.update({f"my.{key}": tensors.pop(key)}) for key in list(tensors)]
        )
    edit_index(folder, lambda weight_map: [weight_map.update({f"my.{k}": weight_map.pop(k)}) for k in list(weight_map)])
    return (
        INDEX,
        "lacks lm_head.weight, ",
        "config.json asks for, and holds my.lm_head.weight, my.model.",
        "more instead",
    )


def no_head(folder):
    file = json.loads((folder / INDEX).read_text())["weight_map"]["lm_head.weight"]
    edit_index(folder, lambda weight_map: weight_map.pop("lm_head.weight"))
    (folder / file).unlink()  # of its own
    return INDEX, "lacks lm_head.weight, which", "set tie_word_embeddings to true if the embedding is the head"


def foreign_tensor(folder):
    file = second(folder).name
    edit_index(folder, lambda weight_map: weight_map.update({"model.layers.2.mlp.up_proj.weight": file}))
    rewrite(folder, file, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(12, 8)}))
    return file, "model.layers.2.mlp.up_proj.weight"


def wrong_shape(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    rewrite(folder, file, lambda tensors: tensors.update({name: torch.zeros(12, 8)}))
    return file, name


def wrong_dtype(folder):
    name = "model.norm.weight"
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    rewrite(folder, file, lambda tensors: tensors.update({name: torch.zeros(8, dtype=torch.int8)}))
    return file, name


def broken_index(folder):
    (folder / INDEX).write_text('{"weight_map": ')
    return (INDEX,)


def index_without_map(folder):
    (folder / INDEX).write_text('{"weight_map": {"a": 3}}')
    return (INDEX,)


def no_index(folder):
    (folder / INDEX).unlink()
    return (INDEX,)


def no_config(folder):
    (folder / "config.json").unlink()
    return ("config.json",)


FAULTS = [
    remove_shard,
    cut_shard,
    cut_header,
    index_lists_what_the_shard_lacks,
    shard_holds_what_the_index_lacks,
    missing_tensor,
    tensors_of_other_names,
    no_head,
    foreign_tensor,
    wrong_shape,
    wrong_dtype,
    broken_index,
    index_without_map,
    no_index,
    no_config,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_before_any_parameter_changes(fault, tmp_path):
    """sgl-project/sglang#32279, vllm-project/vllm#34859: a folder with a fault is refused whole, by file and tensor."""
    folder = tmp_path / "m"
    saved(folder)
    assert ours(folder)
    named = fault(folder)
    with pytest.raises(CheckpointError) as error:
        load_hf(folder)  # nothing was handed out yet
    for word in named:
        assert word in str(error.value), (word, str(error.value))


def test_an_empty_folder_or_none_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_hf(folder)
    (tmp_path / "config.json").write_text(json.dumps(hf_config.to_hf(CFG)))
    with pytest.raises(CheckpointError, match="no weights"):
        load_hf(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config.to_hf(CFG)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(SecurityError, match=r"pytorch_model\.bin"):
        load_hf(tmp_path)
    saved(tmp_path / "m")
    edit_index(tmp_path / "m", lambda weight_map: weight_map.update({"model.norm.weight": "pytorch_model.bin"}))
    with pytest.raises(SecurityError, match=r"pytorch_model\.bin"):
        load_hf(tmp_path / "m")


@pytest.mark.parametrize(
    "way", ["../other.safetensors", "/{}/other.safetensors", "..\\other.safetensors", "a/b.safetensors"]
)
def test_a_name_that_leaves_the_folder_is_refused(way, tmp_path):
    saved(tmp_path / "m")
    shard = next((tmp_path / "m").glob("model-00001*"))
    (tmp_path / "other.safetensors").write_bytes(shard.read_bytes())
    name = way.format(tmp_path)
    edit_index(
        tmp_path / "m",
        lambda weight_map: weight_map.update({key: name for key, file in weight_map.items() if file == shard.name}),
    )
    with pytest.raises(SecurityError, match="not a plain name"):
        load_hf(tmp_path / "m")


@pytest.mark.parametrize("file", ["model-00001", "config", INDEX])
def test_a_link_that_leaves_the_folder_is_refused(file, tmp_path):
    saved(tmp_path / "m")
    path = next((tmp_path / "m").glob(f"{file}*"))
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    with pytest.raises(SecurityError, match="link"):
        load_hf(tmp_path / "m")


def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    decoder = saved(snapshot)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        os.rename(path, blobs / str(number))
        path.symlink_to(os.path.join("..", "..", "blobs", str(number)))
    for a, b in zip(ours(snapshot).parameters(), decoder.parameters(), strict=True):
        assert torch.equal(a, b)
    path.unlink()
    path.symlink_to(tmp_path / "models--x" / "elsewhere")
    with pytest.raises(SecurityError):
        load_hf(snapshot)


def test_a_stray_file_is_ignored_with_a_note(tmp_path):
    decoder = saved(tmp_path / "m")
    save_file({"model.norm.weight": torch.full((8,), 7.0)}, tmp_path / "m" / SINGLE)
    with pytest.warns(UserWarning, match=r"model\.safetensors ignored"):
        loaded = dict(load_hf(tmp_path / "m")[1])
    assert torch.equal(loaded["head.norm.weight"], decoder.head.norm.weight)


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(tmp_path):
    tied = ModelConfig(11, 8, 1, 2, 1, 4, 12, tie_embeddings=True, rope_scaling=RopeScaling("linear", 2.0))
    decoder = saved(tmp_path / "m", tied, max_shard_bytes=1 << 20)
    embedding = decoder.embedding.weight.detach()
    rewrite(tmp_path / "m", SINGLE, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(ours(tmp_path / "m").head.output.weight, embedding)
    rewrite(tmp_path / "m", SINGLE, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_hf(tmp_path / "m")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((float("nan"),), "1 are not finite (1 NaN)"),
        ((float("-inf"), float("inf")), "2 are not finite (2 infinite)"),
        ((float("inf"), float("nan"), float("nan")), "3 are not finite (2 NaN and 1 infinite)"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_refused_by_tensor_and_count(dtype, values, said, tmp_path):
    """In a weight, a norm, an expert's matrix that is not the first, and a buffer; the largest number is one."""
    save_theirs(theirs("dots1").to(dtype), tmp_path)
    largest = torch.finfo(dtype).max
    rewrite(tmp_path, SINGLE, lambda tensors: tensors["model.norm.weight"].fill_(largest))
    good = load_file(tmp_path / SINGLE)
    assert dict(load_hf(tmp_path)[1])["head.norm.weight"].eq(largest).all()
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.mlp.experts.4.down_proj.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
    ):
        bad = {name: tensor.clone() for name, tensor in good.items()}
        bad[name].view(-1)[-len(values) :] = torch.tensor(values)
        save_file(bad, tmp_path / SINGLE)
        with pytest.raises(CheckpointError) as error:
            dict(load_hf(tmp_path)[1])
        assert f"{tmp_path / SINGLE}: of the {good[name].numel():,} elements of {name}, {said}: " in str(error.value)
        assert error.value.details == {"tensor": name, "not_finite": len(values)}


def test_a_tied_head_that_is_not_finite_is_no_different_head(tmp_path):
    saved(tmp_path / "m", ModelConfig(11, 8, 1, 2, 1, 4, 12, tie_embeddings=True), max_shard_bytes=1 << 20)

    def break_both(tensors):
        tensors["model.embed_tokens.weight"][3, 5] = float("nan")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path / "m", SINGLE, break_both)
    with pytest.raises(CheckpointError, match=r"of the 88 elements of model\.embed_tokens\.weight, 1 are not finite"):
        load_hf(tmp_path / "m")


def test_buffers_of_old_writers_are_let_pass(tmp_path):
    saved(tmp_path / "m", max_shard_bytes=1 << 20)
    rewrite(
        tmp_path / "m",
        SINGLE,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours(tmp_path / "m")


def test_saving_refuses_what_is_not_the_model_and_leaves_nothing(tmp_path):
    decoder = Decoder(CFG)
    initialise(decoder, CFG, seed=0)
    named = dict(decoder.named_parameters())
    wrong = {
        "did not come": {key: value for key, value in named.items() if key != "head.norm.weight"},
        "no parameter": named | {"head.extra": torch.zeros(2)},
        "has shape": named | {"head.norm.weight": torch.zeros(9)},
        "has dtype": named | {"head.norm.weight": torch.zeros(8, dtype=torch.int32)},
    }
    for message, tensors in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            save_hf(tmp_path / "m", CFG, tensors.items())
    with pytest.raises(CheckpointError, match="twice"):
        save_hf(tmp_path / "m", CFG, [*named.items(), *named.items()])
    with pytest.raises(ConfigError):
        save_hf(tmp_path / "m", ModelConfig(11, 8, 1, 2, 1, 4, 12, activation="gelu"), [])
    assert list(tmp_path.iterdir()) == []
    save_hf(tmp_path / "m", CFG, named.items())
    with pytest.raises(CheckpointError, match="not empty"):
        save_hf(tmp_path / "m", CFG, named.items())
