"""Latent attention, and the router of DeepSeek-V2, in a Hugging Face `config.json`: deepseek_v2, deepseek_v3, kimi_k2.

A folder that says kimi_k2 holds the keys and weights of deepseek_v3, and is written as such.  Scores and choices of
other routers than the type's own, which the keys could name, are refused, and so are biases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from interlace.errors import ConfigError
from interlace.hf_rotary import integer
from interlace.model_config import ModelConfig

TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_ATTENTION = {
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3 = _ATTENTION | {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _ATTENTION
    | {
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "topk_method": "greedy",
    },
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
}


def attention(kind: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The sizes of heads, and what they are made of."""
    is_v2 = kind == "deepseek_v2"
    scores, ways = ("softmax", ("greedy", "gready", "group_limited_greedy")) if is_v2 else ("sigmoid", ("noaux_tc",))
    for key, allowed in (
        ("attention_bias", (False,)),
        ("mlp_bias", (False,)),
        ("scoring_func", (scores,)),
        ("topk_method", ways),
        ("norm_topk_prob", (False,) if is_v2 else (False, True)),
    ):
        if key in given and given[key] not in allowed:
            raise ConfigError(
                f"{where}: {key} of model_type {kind} must be {' or '.join(map(json.dumps, allowed))}, found "
                f"{json.dumps(given[key])}"
            )
    for key in SIZES:
        if given[key] is not None:
            integer(given[key], key, where)
    nope, turning = given["qk_nope_head_dim"], given["qk_rope_head_dim"]
    if turning % 2 or not turning:
        raise ConfigError(f"{where}: qk_rope_head_dim must be an even number above 0, found {turning}")
    return {
        "head_dim": nope + turning,
        "rotary_dim": turning,
        "kv_rank": given["kv_lora_rank"],
        "q_rank": given["q_lora_rank"] or 0,
        "value_dim": given["v_head_dim"] if given["v_head_dim"] != nope + turning else 0,
    }


def experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of deepseek_v2, which open groups by their best expert and never make weights sum to one."""
    grouped = given["topk_method"] == "group_limited_greedy"
    return {
        "num_experts": given["n_routed_experts"],
        "experts_per_token": given["num_experts_per_tok"],
        "expert_ffn_size": given["moe_intermediate_size"],
        "norm_topk": False,
        "router_groups": given.get("n_group", 1) if grouped else 1,
        "router_top_groups": given.get("topk_group", 1) if grouped else 1,
        "router_scale": given.get("routed_scaling_factor", 1.0),
        "router_fp32": True,
        "shared_ffn_size": given["n_shared_experts"] * given["moe_intermediate_size"],
    }


def keys(cfg: ModelConfig, kind: str) -> dict[str, Any]:
    """The way back, of attention, router and experts.

    A model without experts is one of deepseek_v3 all of whose layers are the dense first ones.
    """
    is_v2, routed = kind == "deepseek_v2", cfg.num_experts > 0
    grouped = cfg.router_groups > 1
    found: dict[str, Any] = {
        "head_dim": cfg.rotary_dim,
        "kv_lora_rank": cfg.kv_rank,
        "q_lora_rank": cfg.q_rank or None,
        "qk_nope_head_dim": cfg.head_dim - cfg.rotary_dim,
        "qk_rope_head_dim": cfg.rotary_dim,
        "v_head_dim": cfg.value_size,
        "attention_bias": False,
        "n_routed_experts": cfg.num_experts if routed else 1,
        "num_experts_per_tok": cfg.experts_per_token if routed else 1,
        "moe_intermediate_size": cfg.expert_ffn_size if routed else cfg.ffn_size,
        "n_shared_experts": cfg.shared_ffn_size // cfg.expert_ffn_size if routed else 1,
        "first_k_dense_replace": len(cfg.dense_layers) if routed else cfg.num_layers,
        "moe_layer_freq": 1,
        "norm_topk_prob": cfg.norm_topk and not is_v2,
        "routed_scaling_factor": cfg.router_scale,
        "n_group": cfg.router_groups,
        "topk_group": cfg.router_top_groups,
        "num_nextn_predict_layers": 0,
    }
    if is_v2:
        return found | {"scoring_func": "softmax", "topk_method": "group_limited_greedy" if grouped else "greedy"}
    return found | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True, "num_mtp_layers": 0}


def turned_rows(cfg: ModelConfig, name: str, pairs_neighbours: bool) -> list[int] | None:
    """Where the rows of a parameter of latent attention lie in Hugging Face weights, in our order; None: as here.

    There the features that turn stand last in a head, and neighbours are a pair unless `rope_interleave` is false.
    """
    E, R = cfg.head_dim, cfg.rotary_dim
    pairs = [*range(0, R, 2), *range(1, R, 2)] if pairs_neighbours else list(range(R))
    if cfg.kv_rank and name.endswith(".attention.q.weight"):
        head = [*(E - R + row for row in pairs), *range(E - R)]
        return [E * number + row for number in range(cfg.num_heads) for row in head]
    if cfg.kv_rank and name.endswith(".attention.kv_a.weight"):
        return [*range(cfg.kv_rank), *(cfg.kv_rank + row for row in pairs)]
    return None
