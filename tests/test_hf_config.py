"""config.json of real models, the rotary table in its three spellings, refusals, and the way back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from interlace.config import ModelConfig, RopeScaling, load
from interlace.errors import ConfigError
from interlace.hf_config import from_hf, read, to_hf

CONFIGS = Path(__file__).parent / "data" / "configs"
NAMES = sorted(path.name for path in CONFIGS.glob("*.json"))

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 8}
REST = "qwen3, mixtral, qwen2_moe, qwen3_moe, dots1, glm4_moe, deepseek_v2, deepseek_v3, kimi_k2"
DOTS1 = {"model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
V2 = {"model_type": "deepseek_v2", "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
V3 = {"model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
EXPERTS = {"num_experts": 4, "expert_ffn_size": 8}
LATENT = {"num_kv_heads": 6, "kv_rank": 5, "rotary_dim": 2}
BIASED = EXPERTS | {
    "qk_norm": True,
    "router_scores": "sigmoid",
    "router_bias": True,
    "router_top_groups": 1,
    "experts_per_token": 1,
    "shared_ffn_size": 16,
}


def test_five_real_files_are_here() -> None:
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_real_files_survive_the_way_back(name: str) -> None:
    cfg = read(CONFIGS / name)
    assert from_hf(json.loads(json.dumps(to_hf(cfg)))) == cfg


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("llama-3.1-8b", "Meta-Llama-3.1-8B.json"),
        ("qwen3-0.6b", "Qwen3-0.6B.json"),
        ("qwen3-8b", "Qwen3-8B.json"),
    ],
)
def test_presets_equal_the_published_files(preset: str, name: str) -> None:
    assert load(None, preset=preset).model_config() == read(CONFIGS / name)


def test_the_preset_of_deepseek_v2_lite() -> None:
    """The keys of its config.json that say anything."""
    theirs: dict[str, Any] = {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048}
    theirs |= {"intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512}
    theirs |= {"num_key_value_heads": 16, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    theirs |= {"v_head_dim": 128, "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_routed_experts": 64}
    theirs |= {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False, "topk_method": "greedy"}
    theirs |= {"scoring_func": "softmax", "n_group": 1, "topk_group": 1, "moe_layer_freq": 1}
    theirs |= {"max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000}
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    theirs["rope_scaling"] = yarn | {"mscale": 0.707, "mscale_all_dim": 0.707}
    assert load(None, preset="deepseek-v2-lite").model_config() == from_hf(theirs)


def test_mixture_of_experts() -> None:
    mixtral = read(CONFIGS / "Mixtral-8x7B-v0.1.json")
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.expert_ffn_size) == (8, 2, 14336)
    assert mixtral.norm_topk
    assert not mixtral.qk_norm
    assert mixtral.router_aux_loss == 0.0  # output_router_logits is false
    qwen = read(CONFIGS / "Qwen3-30B-A3B.json")
    assert (qwen.num_experts, qwen.experts_per_token, qwen.expert_ffn_size, qwen.ffn_size) == (128, 8, 768, 6144)
    assert qwen.qk_norm
    renamed = json.loads((CONFIGS / "Qwen3-30B-A3B.json").read_text()) | {"output_router_logits": True}
    renamed["num_local_experts"] = renamed.pop("num_experts")  # what newer transformers write
    assert from_hf(renamed).num_experts == 128
    assert from_hf(renamed).router_aux_loss == 0.001


def test_absent_keys_take_the_defaults_of_the_type() -> None:
    cfg = from_hf(LLAMA)
    assert (cfg.head_dim, cfg.norm_eps, cfg.rope_theta, cfg.rope_scaling) == (4, 1e-6, 10000.0, None)
    assert from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 6
    mixtral = from_hf(LLAMA | {"model_type": "mixtral"})
    assert (mixtral.norm_eps, mixtral.rope_theta, mixtral.num_experts) == (1e-5, 1e6, 8)
    biased = from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.out_bias, biased.mlp_bias) == (True, True, True)


# --- rotary table --------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_old_and_new_key(key: str) -> None:
    cfg = from_hf(LLAMA | {"rope_scaling": {key: "llama3", **LLAMA3}})
    assert cfg.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
    linear = from_hf(LLAMA | {"rope_scaling": {key: "linear", "factor": 4}})
    assert linear.rope_scaling == RopeScaling("linear", 4.0)
    plain = from_hf(LLAMA | {"rope_scaling": {key: "default"}})
    assert plain.rope_scaling is None


def test_rope_parameters_hold_theta_too() -> None:
    table = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "attention_factor": 1.25, "truncate": False}
    cfg = from_hf(LLAMA | {"rope_theta": 1.0e4, "rope_parameters": table})
    assert cfg.rope_theta == 5e5
    assert cfg.rope_scaling == RopeScaling(
        "yarn", 4.0, original_max_position_embeddings=64, attention_factor=1.25, truncate=False
    )
    by_ratio = from_hf(LLAMA | {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}})
    assert by_ratio.rope_scaling == RopeScaling("yarn", 4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "type must be one of default, linear, llama3, yarn"),
        ({"type": "dynamic", "factor": 2.0}, 'found "dynamic"'),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, 'has rope_type "linear" and type "yarn"'),
        ({"rope_type": "linear"}, "of type linear lacks factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "of type llama3 lacks low_freq_factor, high_freq_factor"),
        (
            {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]},
            "has a key that it does not know, mrope_section",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0 and at most 1"),
        ({"full_attention": {"rope_type": "default"}}, "must hold one rotary table for all layers"),
        ({"rope_type": "linear", "factor": 0.5}, "model.rope_scaling.factor must be a number of at least 1"),
    ],
)
def test_rotary_tables_that_are_refused(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf(LLAMA | {"rope_scaling": table}, "x/config.json")
    assert caught.value.message.startswith("x/config.json")
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
        RopeScaling("yarn", 4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.1, beta_fast=16.0),
    ],
)
def test_rope_scaling_survives_the_way_back(scaling: RopeScaling) -> None:
    cfg = load(None, ["model.rope_theta=5e5"], preset="tiny").model_config()
    cfg = ModelConfig(**{**cfg.__dict__, "rope_scaling": scaling})
    assert from_hf(json.loads(json.dumps(to_hf(cfg)))) == cfg


# --- sliding window ------------------------------------------------------------------------------------------------


def test_mistral() -> None:
    """Llama's form with a window in every layer, also where the key is absent, unless it is null."""
    mistral = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    mistral |= {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 8}
    del mistral["num_key_value_heads"]
    cfg = from_hf(mistral)
    assert (cfg.num_kv_heads, cfg.max_positions, cfg.head_dim, cfg.norm_eps) == (8, 131072, 4, 1e-6)
    assert (cfg.sliding_window, cfg.window_layers, cfg.rope_theta) == (4096, None, 1e4)
    assert not any((cfg.qkv_bias, cfg.out_bias, cfg.mlp_bias, cfg.qk_norm, cfg.tie_embeddings))
    assert from_hf(mistral | {"sliding_window": 7, "head_dim": 12}).head_dim == 12
    assert from_hf(mistral | {"sliding_window": None}).sliding_window is None
    for change in ({}, {"sliding_window": 7, "tie_word_embeddings": True}, {"sliding_window": None}):
        made = from_hf(mistral | change)
        written = to_hf(made)
        assert written["model_type"] == ("llama" if made.sliding_window is None else "mistral")
        assert from_hf(json.loads(json.dumps(written))) == made


def test_qwen2() -> None:
    """q, k and v have biases, whatever is said of them; windows from a layer on, where they are on."""
    qwen2 = LLAMA | {"model_type": "qwen2"}
    cfg = from_hf(qwen2 | {"attention_bias": False, "sliding_window": 7, "max_window_layers": 0})
    assert (cfg.qkv_bias, cfg.out_bias, cfg.mlp_bias, cfg.qk_norm, cfg.sliding_window) == (
        True,
        False,
        False,
        False,
        None,
    )
    assert (
        from_hf({key: value for key, value in qwen2.items() if key != "max_position_embeddings"}).max_positions == 32768
    )
    windows = qwen2 | {"use_sliding_window": True}
    assert from_hf(windows).sliding_window is None  # from layer 28 on, of which there are 3
    last = from_hf(windows | {"num_hidden_layers": 30})
    assert (last.sliding_window, last.window_layers) == (4096, (28, 29))
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    some = from_hf(windows | {"sliding_window": 7, "layer_types": types, "max_window_layers": 3})
    assert (some.sliding_window, some.window_layers) == (7, (0, 2))
    every = from_hf(windows | {"sliding_window": 7, "max_window_layers": 0, "tie_word_embeddings": True})
    assert (every.sliding_window, every.window_layers, every.tie_embeddings) == (7, None, True)
    for made in (cfg, last, some, every):
        assert to_hf(made)["model_type"] == "qwen2"
        assert from_hf(json.loads(json.dumps(to_hf(made)))) == made


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "dots1"])
def test_heads_of_keys_where_they_are_left_out(kind: str) -> None:
    """32 of them, as in transformers, and not as many as there are of queries."""
    given = LLAMA | DOTS1 | {"model_type": kind, "num_attention_heads": 64, "head_dim": 8}
    assert from_hf({key: value for key, value in given.items() if key != "num_key_value_heads"}).num_kv_heads == 32
    assert from_hf(given | {"num_key_value_heads": None}).num_kv_heads == 64


def test_windows_of_qwen3() -> None:
    assert from_hf(QWEN | {"sliding_window": 7}).sliding_window is None  # off without use_sliding_window
    on = from_hf(QWEN | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1})
    assert (on.sliding_window, on.window_layers) == (7, (1, 2))
    none = from_hf(QWEN | {"use_sliding_window": True, "sliding_window": None})
    assert none.sliding_window is None
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    some = from_hf(QWEN | {"use_sliding_window": True, "sliding_window": 7, "layer_types": types})
    assert some.window_layers == (0, 2)
    assert from_hf(to_hf(some)) == some
    everywhere = from_hf(LLAMA | {"model_type": "mixtral", "sliding_window": 9})
    assert (everywhere.sliding_window, everywhere.window_layers) == (9, None)


def test_null_is_what_transformers_makes_of_it() -> None:
    """As many heads of keys as of queries, whatever the type has where the key is absent; and all features turn."""
    mixtral = LLAMA | {"model_type": "mixtral", "num_attention_heads": 12}
    assert from_hf(mixtral | {"num_key_value_heads": None}).num_kv_heads == 12
    glm = LLAMA | {"model_type": "glm4_moe", "head_dim": 12}
    assert from_hf(glm | {"partial_rotary_factor": None}).rotary_dim == 0
    assert from_hf(LLAMA | {"partial_rotary_factor": None}).rotary_dim == 0


def test_two_rotary_tables_that_agree_are_one() -> None:
    table = {"rope_type": "linear", "factor": 2.0}
    one = from_hf(LLAMA | {"rope_theta": 500.0, "rope_scaling": table})
    both = {"rope_theta": 500.0, "rope_scaling": table, "rope_parameters": table | {"rope_theta": 500.0}}
    assert from_hf(LLAMA | both) == one
    del both["rope_theta"]  # one table leaves it to the other
    assert from_hf(LLAMA | both) == one


def test_layer_types_that_say_what_the_window_says() -> None:
    for change in ({}, {"model_type": "mixtral"}, {"model_type": "glm4_moe"}, {"model_type": "qwen3_moe"}):
        plain = LLAMA | {"num_key_value_heads": 6} | change
        assert from_hf(plain | {"layer_types": ["full_attention"] * 3}) == from_hf(plain)
    windowed = LLAMA | {"model_type": "mixtral", "sliding_window": 9}
    assert from_hf(windowed | {"layer_types": ["sliding_attention"] * 3}) == from_hf(windowed)


def test_experts_by_their_other_name() -> None:
    renamed = LLAMA | DOTS1 | {"num_local_experts": DOTS1["n_routed_experts"]}
    del renamed["n_routed_experts"]
    assert from_hf(renamed) == from_hf(LLAMA | DOTS1)
    assert from_hf(LLAMA | {"model_type": "glm4_moe", "num_local_experts": 16}).num_experts == 16


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model_type": "gpt2"},
            f'model_type must be one of llama, mistral, qwen2, {REST}, found "gpt2": '
            "take a folder of one of these, since another type computes something else",
        ),
        *(
            ({"model_type": other}, f'model_type must be one of llama, mistral, qwen2, {REST}, found "{other}"')
            for other in ("phi3", "gemma", "gemma2", "gemma3_text", "olmo2", "qwen2_5_vl", "llama4", "mistral3")
        ),
        ({"model_type": ["llama"]}, 'found ["llama"]'),
        ({"model_type": "qwen2", "use_mrope": True}, "use_mrope must be false or absent, found true"),
        ({"model_type": None}, "found null"),
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu" or absent, found "gelu"'),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_attention_heads": 7}, "hidden_size must be a multiple of num_attention_heads"),
        ({"num_hidden_layers": "3"}, 'num_hidden_layers must be an integer from 0 to 100,000,000, found "3"'),
        ({"head_dim": "8"}, 'head_dim must be an integer from 0 to 100,000,000, found "8"'),
        ({"max_position_embeddings": 64.0}, "max_position_embeddings must be an integer from 0"),
        (DOTS1 | {"n_shared_experts": "1"}, "n_shared_experts must be an integer from 0"),
        (DOTS1 | {"max_window_layers": [1]}, "max_window_layers must be an integer from 0"),
        (
            {"rope_scaling": {"rope_type": ["yarn"]}},
            'type must be one of default, linear, llama3, yarn, found ["yarn"]',
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "16"}},
            "rope_scaling.original_max_position_embeddings must be an integer from 0",
        ),
        ({"model_type": "mixtral", "num_local_experts": 0}, "model_type mixtral needs at least 1 expert, found 0"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            '(quantization_config is {"quant_method": "gptq"}), and of such weights only those in fp8',
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers must be a list of layer numbers, found 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 1, 2]}, "model.dense_layers leaves none of 3 layers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1"),
        ({"model_type": "deepseek_v2"}, "lacks num_experts_per_tok"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, 'deepseek_v3 must be "sigmoid", found "softmax"'),
        (
            {"model_type": "kimi_k2", "topk_method": "greedy"},
            'topk_method of model_type kimi_k2 must be "noaux_tc", found',
        ),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob of model_type deepseek_v2 must be false, found true"),
        (V2 | {"attention_bias": True}, "attention_bias of model_type deepseek_v2 must be false, found true"),
        (V2 | {"qk_rope_head_dim": "64"}, 'qk_rope_head_dim must be an integer from 0 to 100,000,000, found "64"'),
        (V2 | {"qk_rope_head_dim": 0}, "qk_rope_head_dim must be an even number above 0, found 0"),
        (V2 | {"num_key_value_heads": 1}, "found num_kv_heads 1: set it to 4"),
        ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}, "the weights are quantised"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "the weights are quantised"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "the weights are quantised"),
        ({"quantization_config": ["fp8"]}, "the weights are quantised"),
        ({"model_type": "dots1"}, "lacks n_routed_experts, num_experts_per_tok"),
        (DOTS1 | {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of at least 0, found -1"),
        (DOTS1 | {"first_k_dense_replace": 7}, "model.dense_layers leaves none of 3 layers"),
        (DOTS1 | {"moe_layer_freq": 2}, "moe_layer_freq must be 1 or absent, found 2"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must be above 0 and at most 1, found 0"),
        ({"partial_rotary_factor": 0.75}, "turns 3 of 4 features, which must be an even number"),
        (DOTS1 | {"n_group": 3}, "model.router_groups must divide num_experts 8, found 3: nearest is 2"),
        (
            {"model_type": "qwen2_moe", "use_sliding_window": True},
            "use_sliding_window of model_type qwen2_moe needs layer_types, found none",
        ),
        (
            {"model_type": "mixtral", "router_jitter_noise": 0.1},
            "router_jitter_noise must be 0 or absent, found 0.1",
        ),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3}, 'found "chunked_attention"'),
        ({"layer_types": ["chunked_attention"] * 3}, 'found "chunked_attention"'),
        ({"layer_types": "full_attention"}, 'layer_types must be a list, found "full_attention"'),
        ({"layer_types": ["full_attention"] * 2}, "layer_types must name 3 layers, found 2"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "sliding_attention for 1 of 3 layers, where model_type llama has no window in every layer",
        ),
        (
            {"model_type": "mixtral", "sliding_window": 9, "layer_types": ["full_attention"] * 3},
            "for 0 of 3 layers, where model_type mixtral has a window of 9 in every layer: remove layer_types",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor turns 2 of 4 features, where model_type llama turns all of them",
        ),
        ({"is_causal": False}, "is_causal must be true or absent, found false"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 500.0}},
            "rope_scaling and rope_parameters say different things",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hf(LLAMA | change, "x/config.json")
    assert caught.value.message.startswith("x/config.json")
    assert sentence in caught.value.message


def test_routers_like_that_of_deepseek_v3() -> None:
    """Every key of it is read, and comes back; what only training reads is nobody's business."""
    theirs = LLAMA | DOTS1 | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    cfg = from_hf(theirs | {"sliding_window": None})
    expected = {
        "num_experts": 8,
        "experts_per_token": 3,
        "expert_ffn_size": 1408,
        "norm_topk": True,
        "router_scores": "sigmoid",
        "router_bias": True,
        "router_groups": 4,
        "router_top_groups": 2,
        "router_scale": 2.5,
        "router_fp32": True,
        "shared_ffn_size": 2816,
        "qk_norm": True,
    }
    assert {key: getattr(cfg, key) for key in expected} == expected
    assert from_hf(to_hf(cfg)) == cfg
    trained = dataclasses.replace(cfg, router_z_loss=0.1, router_aux_loss=0.1, router_bias_rate=0.5, capacity_factor=2)
    assert from_hf(to_hf(trained)) == cfg


def test_dense_layers_among_layers_of_experts() -> None:
    """The first of them, those that are named, and all but every n-th; they come back as they are."""
    dots1 = from_hf(LLAMA | DOTS1 | {"first_k_dense_replace": 2, "moe_layer_freq": 1, "mlp_only_layers": [2]})
    assert dots1.dense_layers == (0, 1)
    assert [dots1.has_experts(layer) for layer in range(3)] == [False, False, True]
    qwen = QWEN | {"model_type": "qwen3_moe", "num_hidden_layers": 7}
    for change, dense in (
        ({}, ()),
        ({"mlp_only_layers": [1, 4]}, (1, 4)),
        ({"decoder_sparse_step": 3}, (0, 1, 3, 4, 6)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [5], "first_k_dense_replace": 3}, (0, 2, 4, 5, 6)),
    ):
        cfg = from_hf(qwen | change)
        assert cfg.dense_layers == dense
        assert from_hf(json.loads(json.dumps(to_hf(cfg)))) == cfg
    assert from_hf(to_hf(dots1)) == dots1


def test_glm4_moe() -> None:
    """Half of a head's features turn unless it says otherwise; q, k and v alone have biases."""
    glm = LLAMA | {"model_type": "glm4_moe", "head_dim": 12, "attention_bias": True}
    cfg = from_hf(glm)
    assert (cfg.rotary_dim, cfg.qkv_bias, cfg.out_bias, cfg.qk_norm, cfg.dense_layers) == (6, True, False, False, (0,))
    assert (cfg.num_experts, cfg.router_scores, cfg.shared_ffn_size, cfg.norm_topk) == (128, "sigmoid", 1408, True)
    table = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.34}
    for change, turning in (({"partial_rotary_factor": 1.0}, 0), ({"rope_parameters": table}, 4), ({}, 6)):
        made = from_hf(glm | {"use_qk_norm": True} | change)
        assert (made.rotary_dim, made.qk_norm) == (turning, True)
        assert from_hf(json.loads(json.dumps(to_hf(made)))) == made
    for head_dim in (10, 14, 98):
        for turning in range(2, head_dim, 2):
            some = dataclasses.replace(cfg, head_dim=head_dim, rotary_dim=turning)
            assert int(head_dim * to_hf(some)["partial_rotary_factor"]) == turning


def test_latent_attention_and_its_routers() -> None:
    """Heads by their parts, null ranks, groups of either method; kimi_k2 comes back as deepseek_v3."""
    cfg = from_hf(LLAMA | V3 | {"head_dim": 64, "num_nextn_predict_layers": 1})
    expected = {"head_dim": 192, "rotary_dim": 64, "kv_rank": 512, "q_rank": 1536, "value_dim": 128, "num_kv_heads": 4}
    expected |= {"num_experts": 256, "router_groups": 8, "router_top_groups": 4, "dense_layers": (0,)}
    assert {key: getattr(cfg, key) for key in expected} == expected
    assert (cfg.router_scores, cfg.router_bias, cfg.router_scale, cfg.norm_topk) == ("sigmoid", True, 2.5, True)
    assert from_hf(json.loads(json.dumps(to_hf(cfg)))) == cfg
    assert from_hf(LLAMA | V3 | {"model_type": "kimi_k2"}) == cfg
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    for change, groups_of, q_rank in (({}, (1, 1), 1536), (groups, (8, 3), 1536), ({"q_lora_rank": None}, (1, 1), 0)):
        cfg = from_hf(LLAMA | V2 | change)
        assert (cfg.router_groups, cfg.router_top_groups, cfg.q_rank) == (*groups_of, q_rank)
        assert (cfg.router_scores, cfg.router_bias, cfg.norm_topk, cfg.shared_ffn_size) == (
            "softmax",
            False,
            False,
            2814,
        )
        assert from_hf(json.loads(json.dumps(to_hf(cfg)))) == cfg
    dense = from_hf(LLAMA | V3 | {"first_k_dense_replace": 3, "v_head_dim": 192})
    assert (dense.num_experts, dense.value_dim) == (0, 0)
    assert from_hf(json.loads(json.dumps(to_hf(dense)))) == dense


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*no such file"):
        read(tmp_path)
    (tmp_path / "config.json").write_text('{\n "a": 1,\n}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json, line \d, column \d"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold a JSON object, found list"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert read(tmp_path) == from_hf(LLAMA)
    from_folder = load(None, ["model.preset=", f"model.from={tmp_path}", "model.num_layers=2"])
    assert from_folder.model_config().num_layers == 2


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"norm": "layernorm"}, "norm = layernorm"),
        ({"activation": "gelu"}, "activation = gelu"),
        ({"out_bias": True}, "llama, has no qkv_bias = false with out_bias = true"),
        ({"qkv_bias": True, "mlp_bias": True}, "the nearest model type, qwen2, has no mlp_bias = true"),
        ({"sliding_window": 8, "window_layers": (1,)}, "the nearest model type, mistral, has no window_layers"),
        ({"sliding_window": 8, "qkv_bias": True, "out_bias": True}, "mistral, has no qkv_bias = true"),
        ({"attention_sinks": True}, "attention_sinks = true"),
        ({"qk_norm": True, "sliding_window": 8, "sink_tokens": 2}, "sink_tokens = 2"),
        ({"num_experts": 4, "expert_ffn_size": 8, "norm_topk": False}, "norm_topk = false"),
        ({"qk_norm": True, "mlp_bias": True}, "mlp_bias = true"),
        (EXPERTS | {"router_scale": 2.0}, "the nearest model type, mixtral, has no router_scale = 2"),
        (EXPERTS | {"shared_ffn_size": 8}, "the nearest model type, qwen2_moe, has no shared_gate = false"),
        (BIASED | {"qk_norm": False, "sliding_window": 4}, "the nearest model type, dots1, has no qk_norm = false"),
        (BIASED | {"qk_norm": False, "qkv_bias": True, "out_bias": True}, "glm4_moe, has no out_bias = true"),
        (BIASED | {"dense_layers": (1,)}, "dots1, has no dense_layers = [1], which are not its first"),
        (EXPERTS | {"dense_layers": (0,)}, "the nearest model type, mixtral, has no dense_layers = [0]"),
        ({"rotary_dim": 2}, "the nearest model type, llama, has no rotary_dim = 2"),
        (BIASED | {"router_scores": "softmax"}, "router_scores = softmax"),
        (BIASED | {"router_bias": False}, "router_bias = false"),
        (BIASED | {"router_groups": 4}, "router_groups = 4"),
        (BIASED | {"shared_ffn_size": 12}, "shared_ffn_size = 12 with expert_ffn_size = 8"),
        (BIASED | {"shared_ffn_size": 16, "shared_gate": True}, "shared_gate = true"),
        (LATENT | {"sliding_window": 4}, "the nearest model type, deepseek_v3, has no sliding_window = 4"),
        (LATENT | {"out_bias": True}, "deepseek_v3, has no qkv_bias = false with out_bias = true"),
        (LATENT | EXPERTS | {"shared_ffn_size": 8}, "deepseek_v2, has no norm_topk = true"),
        (LATENT | EXPERTS, "deepseek_v2, has no shared_ffn_size = 0"),
        (LATENT | EXPERTS | {"router_bias": True}, "deepseek_v3, has no router_scores = softmax"),
    ],
)
def test_models_without_a_hugging_face_type(change: dict[str, Any], found: str) -> None:
    cfg = ModelConfig(**(from_hf(LLAMA).__dict__ | change))
    with pytest.raises(ConfigError, match=r"cannot write a config\.json") as caught:
        to_hf(cfg)
    assert found in caught.value.message


def test_what_transformers_writes_is_read_back() -> None:
    transformers = pytest.importorskip("transformers")
    for name in NAMES:
        cfg = read(CONFIGS / name)
        theirs = to_hf(cfg)
        kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[theirs["model_type"]]
        written = json.loads(kind(**{k: v for k, v in theirs.items() if k != "model_type"}).to_json_string())
        assert from_hf(written) == cfg
