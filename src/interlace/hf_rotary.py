"""The rotary positions of a Hugging Face `config.json`: from `rope_scaling` or `rope_parameters`, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from interlace.errors import ConfigError
from interlace.model_config import ModelConfig, RopeScaling

LARGEST = 10**8
KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
# Keys of any rotary table that say nothing about the frequencies, or are read elsewhere.
OTHER = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "max_position_embeddings")


def integer(value: Any, name: str, where: str) -> None:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ConfigError(f"{where}: {name} must be an integer from 0 to {LARGEST:,}, found {json.dumps(value)}")


def rope(kind: str, given: Mapping[str, Any], where: str, head_dim: int) -> dict[str, Any]:
    """rope_theta, rope_scaling and rotary_dim, from `rope_scaling` (keys "rope_type" or the older "type") or
    `rope_parameters`, which must agree where both are there; a base that one leaves out is the other's."""
    tables = [given[name] for name in ("rope_scaling", "rope_parameters") if isinstance(given.get(name), Mapping)]
    bases = [table["rope_theta"] for table in tables if table.get("rope_theta") is not None]
    given = {"rope_theta": bases[0], **given} if bases else given
    found = [_rotary(name, given, where, head_dim) for name in ("rope_scaling", "rope_parameters") if given.get(name)]
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigError(
            f"{where}: rope_scaling and rope_parameters say different things, found "
            f"{json.dumps(given['rope_scaling'])} and {json.dumps(given['rope_parameters'])}: remove the one that the "
            "weights were not trained with"
        )
    dims = found[0] if found else _rotary("rope_scaling", given, where, head_dim)
    if "rotary_dim" in dims and kind != "glm4_moe":
        raise ConfigError(
            f"{where}: partial_rotary_factor turns {dims['rotary_dim']} of {head_dim} features, where model_type "
            f"{kind} turns all of them: remove it, or take model_type glm4_moe if the weights were trained so"
        )
    return dims


def _rotary(name: str, given: Mapping[str, Any], where: str, head_dim: int) -> dict[str, Any]:
    """The same of one of the two keys."""
    table = given.get(name) or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {name} must be an object, found {json.dumps(table)}")
    if any(isinstance(value, Mapping) for value in table.values()):
        raise ConfigError(f"{where}: {name} must hold one rotary table for all layers, found one per layer type")
    table = {key: value for key, value in table.items() if value is not None}
    kind = table.get("rope_type", table.get("type", "default"))
    if not isinstance(kind, str) or kind not in KEYS:
        raise ConfigError(f"{where}: {name} type must be one of {', '.join(KEYS)}, found {json.dumps(kind)}")
    if table.get("type", kind) != kind:
        raise ConfigError(f"{where}: {name} has rope_type {json.dumps(kind)} and type {json.dumps(table['type'])}")
    if unknown := [key for key in table if key not in (*KEYS[kind], *OTHER)]:
        raise ConfigError(f"{where}: {name} of type {kind} has a key that it does not know, {unknown[0]}")
    dims = {"rope_theta": table.get("rope_theta", given.get("rope_theta", 10000.0))}
    dims |= _rotary_dim(table.get("partial_rotary_factor", given.get("partial_rotary_factor", 1)), head_dim, where)
    if kind == "default":
        return dims
    scaling = {key: table[key] for key in KEYS[kind] if key in table}
    integer(scaling.get("original_max_position_embeddings", 0), f"{name}.original_max_position_embeddings", where)
    if kind in ("llama3", "yarn"):
        trained = given.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
        scaling["original_max_position_embeddings"] = trained or given["max_position_embeddings"]
    if kind == "yarn" and "factor" not in scaling:
        scaling["factor"] = given["max_position_embeddings"] / scaling["original_max_position_embeddings"]
    required = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if missing := [key for key in required if key not in scaling]:
        raise ConfigError(f"{where}: {name} of type {kind} lacks {', '.join(missing)}")
    return {**dims, "rope_scaling": {"type": kind, **scaling}}


def _rotary_dim(factor: Any, head_dim: int, where: str) -> dict[str, Any]:
    """How many features of a head turn, where not all do."""
    if factor is None:
        return {}
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ConfigError(f"{where}: partial_rotary_factor must be above 0 and at most 1, found {json.dumps(factor)}")
    turning = int(head_dim * factor)
    if turning % 2 or turning == 0:
        raise ConfigError(
            f"{where}: partial_rotary_factor {factor:g} turns {turning} of {head_dim} features, which must be an even "
            "number above 0"
        )
    return {"rotary_dim": turning} if turning < head_dim else {}


def partial(cfg: ModelConfig) -> float:
    """The share of a head's features that turn; times head_dim, and cut to an integer, it is their number."""
    turning = cfg.rotary_dim or cfg.head_dim
    share = turning / cfg.head_dim
    return share if int(cfg.head_dim * share) == turning else math.nextafter(share, 1.0)


def table_of(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = {key: getattr(scaling, key) for key in KEYS[scaling.type]}
    return {"rope_type": scaling.type} | {key: value for key, value in values.items() if value is not None}
