"""Parameters against published totals and the built model; FLOPs against published figures and torch's counter."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from interlace import hf_config, spec
from interlace.config import ModelConfig, load
from interlace.errors import ConfigError
from interlace.models.decoder import Decoder
from interlace.spec import Role

CONFIGS = Path(__file__).parent / "data" / "configs"
SMALL = ModelConfig(
    vocab_size=61, hidden_size=24, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, ffn_size=40, max_positions=64
)


def changed(**fields: Any) -> ModelConfig:
    return ModelConfig(**(SMALL.__dict__ | fields))


VARIANTS = {
    "plain": SMALL,
    "tied": changed(tie_embeddings=True),
    "biases": changed(qkv_bias=True, out_bias=True, mlp_bias=True),
    "qk_norm": changed(qk_norm=True),
    "gelu": changed(norm="layernorm", activation="gelu", mlp_bias=True),
    "sinks": changed(attention_sinks=True, sliding_window=5, sink_tokens=2),
    "experts": changed(num_experts=4, experts_per_token=2, expert_ffn_size=12),
    "shared experts": changed(
        num_experts=4, experts_per_token=2, expert_ffn_size=12, router_bias=True, shared_ffn_size=20, shared_gate=True
    ),
    "latent": changed(num_kv_heads=6, kv_rank=10, rotary_dim=2, out_bias=True, attention_sinks=True),
    "latent, narrow values": changed(num_kv_heads=6, kv_rank=10, q_rank=7, rotary_dim=4, value_dim=5),
    "dense layers": changed(num_experts=4, expert_ffn_size=12, dense_layers=(0, 2), router_bias=True),
}


# --- parameters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Meta-Llama-3.1-8B.json", 8_030_261_248, 8_030_261_248),
        ("Qwen3-0.6B.json", 596_049_920, 596_049_920),
        ("Qwen3-8B.json", 8_190_735_360, 8_190_735_360),
        ("Mixtral-8x7B-v0.1.json", 46_702_792_704, 12_879_925_248),
        ("Qwen3-30B-A3B.json", 30_532_122_624, 3_353_032_704),
    ],
)
def test_published_totals(name: str, total: int, active: int) -> None:
    cfg = hf_config.read(CONFIGS / name)
    assert spec.total_parameters(cfg) == total
    assert spec.active_parameters(cfg) == active


def test_llama_70b() -> None:
    """jranaraki/vllm-fit#27, InternLM/xtuner PR#1466: an untied head and grouped kv heads counted as they are."""
    overrides = ["model.hidden_size=8192", "model.num_layers=80", "model.num_heads=64", "model.ffn_size=28672"]
    cfg = load(None, overrides, preset="llama-3.1-8b").model_config()
    assert spec.total_parameters(cfg) == 70_553_706_496


def test_qwen_moe_with_a_shared_expert() -> None:
    """Qwen1.5-MoE-A2.7B as published: 14.3 billion, of which a token meets 2.7."""
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 5632,
    }
    cfg = hf_config.from_hf({"model_type": "qwen2_moe"} | sizes)
    assert spec.total_parameters(cfg) == 14_315_784_192
    assert spec.active_parameters(cfg) == 2_689_173_504


def test_dots_llm1_and_glm_4_5_air() -> None:
    """As published: 142 billion, 14 of them active, and 106 billion; the first layer of both is dense."""
    sizes: dict[str, Any] = {"hidden_size": 4096, "head_dim": 128, "intermediate_size": 10944}
    sizes |= {"moe_intermediate_size": 1408, "n_routed_experts": 128, "first_k_dense_replace": 1}
    dots1 = {"vocab_size": 152064, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32}
    dots1 |= {"num_experts_per_tok": 6, "n_shared_experts": 2}
    glm = {"vocab_size": 151552, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8}
    glm |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "attention_bias": True}
    cfg = hf_config.from_hf(sizes | dots1 | {"model_type": "dots1"})
    assert (spec.total_parameters(cfg) // 10**9, spec.active_parameters(cfg) // 10**9) == (142, 14)
    cfg = hf_config.from_hf(sizes | glm | {"model_type": "glm4_moe"})
    assert spec.total_parameters(cfg) // 10**9 == 106


def test_deepseek_and_kimi() -> None:
    """As published: V2 236 billion with 21 active, V2-Lite 15.7, V3 671 with 37 active, Kimi K2 1 trillion with 32."""
    layers, sizes = "num_hidden_layers", {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
    v2: dict[str, Any] = {"model_type": "deepseek_v2", "vocab_size": 102400, "num_experts_per_tok": 6}
    v2 |= {"first_k_dense_replace": 1}
    large = {"hidden_size": 5120, "intermediate_size": 12288, layers: 60, "num_attention_heads": 128}
    large |= {"n_routed_experts": 160, "moe_intermediate_size": 1536}
    lite = {"hidden_size": 2048, "intermediate_size": 10944, layers: 27, "num_attention_heads": 16, "q_lora_rank": None}
    lite |= {"num_key_value_heads": 16, "moe_intermediate_size": 1408}
    v3 = sizes | {"model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128}
    kimi = sizes | {"model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384}
    kimi |= {"num_key_value_heads": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    for config, total, active in ((v2 | large, 236, 21), (v3, 671, 37), (kimi, 1026, 32)):
        cfg = hf_config.from_hf(config)
        assert (round(spec.total_parameters(cfg) / 1e9), active) == (total, spec.active_parameters(cfg) // 10**9)
    assert round(spec.total_parameters(hf_config.from_hf(v2 | lite)) / 1e9, 1) == 15.7


def test_dense_layers_cost_what_they_do() -> None:
    """Parameters and FLOPs of each layer are those of a model all of whose layers are of its kind."""
    mixed, kinds = VARIANTS["dense layers"], (SMALL, changed(num_experts=4, expert_ffn_size=12))
    for layer, other in enumerate([kinds[0], kinds[1], kinds[0]]):
        unit = f"blocks.{layer}"
        for count in (spec.parameters, lambda cfg: spec.operations(cfg, 16)):
            assert [x for x in count(mixed) if x.unit == unit] == [x for x in count(other) if x.unit == unit]
    for operation in spec.operations(mixed, 16):
        ends = operation.name in ("blocks.0.mlp.down", "blocks.2.mlp.down")
        again = operation.unit != "head" and not ends
        assert spec.passes(mixed, operation, "full") == (4 if again else 3), operation.name


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_built_model(name: str) -> None:
    cfg = VARIANTS[name]
    built = [(n, tuple(p.shape)) for n, p in Decoder(cfg, device="meta").named_parameters()]
    assert [(p.name, p.shape) for p in spec.parameters(cfg)] == built
    buffers = [(n, tuple(b.shape)) for n, b in Decoder(cfg, device="meta").named_buffers()]
    assert [(p.name, p.shape) for p in spec.buffers(cfg)] == buffers


@pytest.mark.parametrize("name", VARIANTS)
def test_roles_dims_and_units(name: str) -> None:
    cfg = VARIANTS[name]
    letters = {
        "V": cfg.vocab_size,
        "D": cfg.hidden_size,
        "E": cfg.head_dim,
        "H": cfg.num_heads,
        "X": cfg.num_experts,
        "F": cfg.expert_ffn_size if cfg.num_experts else cfg.ffn_size,
    }
    for parameter in spec.parameters(cfg):
        dims = parameter.dims.split()
        assert len(dims) == len(parameter.shape)
        known = letters | ({"F": cfg.shared_ffn_size} if ".shared." in parameter.name else {})
        known |= {"F": cfg.ffn_size} if ".mlp." in parameter.name else {}
        assert all(known.get(d, size) == size for d, size in zip(dims, parameter.shape, strict=True)), parameter
        assert parameter.unit in spec.units(cfg)
        assert parameter.name.startswith(parameter.unit + ".")
        assert parameter.decay == (len(parameter.shape) > 1)
        assert parameter.init == ("normal" if parameter.decay else parameter.init)
        assert letters["H"] == parameter.numel if parameter.role is Role.HEAD else True
    roles = {parameter.name: parameter.role for parameter in spec.parameters(cfg)}
    assert roles["embedding.weight"] is Role.VOCAB
    heads, narrow = ("q", "kv"), ("q_a", "kv_a")
    for name in heads if cfg.kv_rank else ("q", "k", "v"):
        assert roles[f"blocks.1.attention.{name}.weight"] is Role.COLUMN
    for name in narrow[not cfg.q_rank :] if cfg.kv_rank else ():
        assert roles[f"blocks.1.attention.{name}.weight"] is Role.LATENT
    assert roles["blocks.1.attention.out.weight"] is Role.ROW


def test_biases_follow_their_product() -> None:
    roles = {parameter.name: parameter.role for parameter in spec.parameters(VARIANTS["biases"])}
    assert roles["blocks.0.attention.q.bias"] is Role.COLUMN  # split with the rows
    assert roles["blocks.0.mlp.down.bias"] is Role.BIAS  # added once, after the sum


def test_tied_head_is_one_tensor() -> None:
    tied, untied = VARIANTS["tied"], SMALL
    assert spec.total_parameters(untied) - spec.total_parameters(tied) == 61 * 24
    assert spec.parameters(tied)[0].tied_to == "head.output.weight"
    assert spec.flops_per_token(tied, 16) == spec.flops_per_token(untied, 16)  # the product remains


# --- model FLOPs ---------------------------------------------------------------------------------------------------


def test_llama_8b_at_8k_is_the_published_figure() -> None:
    """NeMo 24.07 reports 57.91 GFLOP per token, full attention, for Llama-3-8B at 8192 positions."""
    cfg = hf_config.read(CONFIGS / "Meta-Llama-3.1-8B.json")
    full = spec.flops_per_token(cfg, 8192, "full")
    causal = spec.flops_per_token(cfg, 8192, "causal")
    assert round(full.total / 1e9, 2) == 57.91
    assert full.attention == 2 * causal.attention == 4 * 32 * 4096 * 8192
    assert full.matmul == causal.matmul == 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert (full.convention, causal.convention) == ("full", "causal")


def test_windows_and_documents() -> None:
    per_key = 4 * 6 * 8
    windowed = changed(sliding_window=4, window_layers=(1,))
    assert spec.flops_per_token(windowed, 16, "full").attention == per_key * (16 + 4 + 16)
    # the mean over positions of min(t, 4), each t counted at its middle: (16 - 4) * 4 + 4 * 4 / 2, over 16
    assert spec.flops_per_token(windowed, 16).attention == per_key * (8 + 56 / 16 + 8)
    assert spec.flops_per_token(changed(sliding_window=99), 16) == spec.flops_per_token(SMALL, 16)

    packed = spec.flops_per_token(SMALL, 16, "full", document_lengths=[9, 4, 3])
    assert packed.attention == 3 * per_key * (81 + 16 + 9) / 16
    assert spec.flops_per_token(SMALL, 16, document_lengths=[9, 4, 3]).attention == packed.attention / 2
    assert packed.matmul == spec.flops_per_token(SMALL, 16).matmul


def test_narrow_values_cost_less() -> None:
    """Scores take the features of keys, the weighted sum those of values; kernels multiply zeros behind values."""
    cfg = VARIANTS["latent, narrow values"]
    assert spec.flops_per_token(cfg, 16, "full").attention == 3 * 2 * 6 * (8 + 5) * 16
    assert spec.executed_matmul_flops(cfg, 2, 16, backward=False)["attention"] == 3 * 4 * 6 * 8 * 16 * 16 * 2
    causal = spec.executed_matmul_flops(cfg, 2, 16, backward=False, convention="causal")["attention"]
    assert causal == 3 * 4 * 6 * 8 * 16 * 16


def test_causal_area_is_the_mean_number_of_visible_keys() -> None:
    """Counting pairs one by one differs from the area by half a key per query: the diagonal."""
    for length, window in itertools.product((1, 5, 16), (1, 4, 30)):
        pairs = sum(min(t + 1, window) for t in range(length))
        area = spec.flops_per_token(changed(sliding_window=window), length).attention / (3 * 4 * 6 * 8) * length
        assert area <= pairs <= area + length / 2


def test_experts_count_those_that_a_token_visits() -> None:
    found = {operation.name: operation for operation in spec.operations(VARIANTS["experts"], 16)}
    assert found["blocks.0.moe.gate"].full == 2 * (2 * 12 * 24)
    assert found["blocks.0.moe.router"].full == 2 * 4 * 24
    assert "embedding" not in found


def test_operations_stand_in_order_of_execution() -> None:
    names = [operation.name for operation in spec.operations(SMALL, 16) if operation.unit == "blocks.1"]
    parts = [
        "attention.q",
        "attention.k",
        "attention.v",
        "attention",
        "attention.out",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    ]
    assert names == [f"blocks.1.{part}" for part in parts]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: spec.flops_per_token(SMALL, 16, "half"), "the FLOP convention must be causal or full, found half"),
        (lambda: spec.flops_per_token(SMALL, 16, document_lengths=[17]), "document_lengths must hold lengths from 1"),
        (lambda: spec.flops_per_token(SMALL, 0), "sequence_length must be at least 1, found 0"),
        (lambda: spec.executed_matmul_flops(SMALL, 1, 8, "some"), "recompute must be one of none, selective, full"),
    ],
)
def test_refusals(call: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()


# --- executed FLOPs ------------------------------------------------------------------------------------------------


def counted(
    cfg: ModelConfig, batch: int, length: int, recompute: str = "none", backward: bool = True
) -> dict[str, int]:
    """What torch's counter sees of a step: "matmul" (mm, addmm) and "attention" (bmm, written out by dropout)."""
    torch.manual_seed(0)
    model = Decoder(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for block in model.blocks:
        owner = {"none": None, "full": block, "selective": block.attention.core}[recompute]
        if owner is not None:
            plain = owner.forward
            owner.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
    tokens = torch.randint(0, cfg.vocab_size, (batch, length))
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        warnings.simplefilter("ignore")  # that dropout writes attention out
        with torch.set_grad_enabled(backward):  # the loss makes its gradients in forward
            loss, _ = model.loss(tokens, tokens)
        if backward:
            loss.backward()
    found = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for name, flops in found.items() if "bmm" in name)
    return {"matmul": sum(found.values()) - attention, "attention": attention}


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_products_equal_torchs_counter(name: str, backward: bool) -> None:
    seen = counted(VARIANTS[name], 2, 13, backward=backward)
    asked = spec.executed_matmul_flops(VARIANTS[name], 2, 13, backward=backward)
    assert asked["matmul"] == seen["matmul"]


@pytest.mark.parametrize("name", ["plain", "gelu", "experts"])
def test_recomputed_products_equal_torchs_counter(name: str) -> None:
    seen = counted(VARIANTS[name], 3, 9, "full")
    assert spec.executed_matmul_flops(VARIANTS[name], 3, 9, "full")["matmul"] == seen["matmul"]
    whole = spec.executed_matmul_flops(VARIANTS[name], 3, 9, "full", early_stop=False)
    assert whole["matmul"] - seen["matmul"] == (0 if name == "experts" else 3 * 2 * 24 * 40 * 27)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_written_out_attention_equals_torchs_counter(recompute: str) -> None:
    cfg = changed(attention_dropout=0.1, dropout=0.1)
    asked = spec.executed_matmul_flops(cfg, 2, 11, recompute, attention="math")
    assert asked == counted(cfg, 2, 11, recompute)


def test_flash_attention_runs_scores_again() -> None:
    forward = 3 * 4 * 6 * 8 * 13 * 13 * 2
    assert spec.executed_matmul_flops(SMALL, 2, 13)["attention"] == 3.5 * forward
    assert spec.executed_matmul_flops(SMALL, 2, 13, "selective")["attention"] == 4.5 * forward
    assert spec.executed_matmul_flops(SMALL, 2, 13, convention="causal")["attention"] == 3.5 * forward / 2
    assert spec.executed_matmul_flops(SMALL, 2, 13, backward=False)["attention"] == forward
