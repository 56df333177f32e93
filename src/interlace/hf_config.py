"""Hugging Face `config.json` <-> ModelConfig: llama, mistral, qwen2 and qwen3, and with experts mixtral, qwen2_moe,
qwen3_moe, dots1, glm4_moe, deepseek_v2, deepseek_v3 and kimi_k2.

dots1 and glm4_moe have the router of DeepSeek-V3 (sigmoid scores, bias, groups, shared experts) on plain attention; the
last three have latent attention (`hf_latent`).  Dense layers among layers of experts are the first so many there
(`first_k_dense_replace`), any in the qwen types (`mlp_only_layers`, and all but every n-th by `decoder_sparse_step`).

What a configuration says and this decoder does not do is refused by name, never dropped: an unknown rotary type, a
key inside the rotary table that changes its meaning, quantised weights other than fp8 by blocks.  Absent keys take the
model type's own defaults.  The auxiliary router loss is on only where `output_router_logits` is, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace import hf_latent
from interlace.errors import ConfigError
from interlace.hf_rotary import integer, partial, rope, table_of
from interlace.model_config import EXPERTS_ONLY, ModelConfig

LATENT = hf_latent.TYPES
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "dots1", "glm4_moe", *LATENT)
DENSE = ("llama", "mistral", "qwen2", "qwen3")
QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
PER_LAYER = ("qwen2", "qwen3", "qwen2_moe", "dots1")  # whose layers have windows of their own
BIASED = ("dots1", "glm4_moe", "deepseek_v3", "kimi_k2")  # with the router of DeepSeek-V3
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

# Absent key -> value, where the model types differ from one another.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
    },
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "dots1": {
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1408,
    },
    "glm4_moe": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
} | hf_latent.DEFAULTS
# Where null is not as good as absent: no window, as many heads of keys as of queries, all features of a head turn,
# queries of all features.
NULL = ("sliding_window", "num_key_value_heads", "partial_rotary_factor", "q_lora_rank")
# Keys that change training alone, and that no config.json holds for every model type.
TRAINING = ("dropout", "router_aux_loss", "router_z_loss", "router_bias_rate", "router_fp32", "capacity_factor")
OF_EXPERTS = ("num_experts", "experts_per_token", "expert_ffn_size", "norm_topk", *EXPERTS_ONLY)
# Those that are reckoned with before ModelConfig sees them.
INTEGERS = (
    "num_hidden_layers",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "max_window_layers",
    "moe_intermediate_size",
    "n_shared_experts",
)
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def read(folder: str | Path) -> ModelConfig:
    """The configuration of a Hugging Face folder (or of a config.json given itself)."""
    path = _file(folder)
    return from_hf(_parsed(path), str(path))


def left_out(folder: str | Path) -> int:
    """Layers behind the last one that a folder may hold and nobody loads: those that guess further tokens."""
    raw = _parsed(_file(folder))
    found = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers"))
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def pairs_neighbours(folder: str | Path) -> bool:
    """Whether the features that turn are neighbours in a folder's weights of latent attention, not two halves."""
    return bool(_parsed(_file(folder)).get("rope_interleave", True))


def block(folder: str | Path) -> tuple[int, int] | None:
    """Rows and columns of a weight in fp8 that share a scale, as DeepSeek-V3 is published; None of other folders."""
    path = _file(folder)
    return _block(_parsed(path), str(path))


def _file(folder: str | Path) -> Path:
    path = Path(folder)
    return path / "config.json" if path.is_dir() else path


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg.lower()}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} must be UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"{path}: values are nested too deeply for a configuration") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}; model.from takes a folder with config.json"
        ) from None


def from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """ModelConfig of a parsed config.json; ConfigError names the file and the key."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} must hold a JSON object, found {type(config).__name__}")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{where}: model_type must be one of {', '.join(MODEL_TYPES)}, found {json.dumps(kind)}: take a folder of "
            "one of these, since another type computes something else, also where its name is near"
        )
    given = _DEFAULTS[kind] | {key: value for key, value in config.items() if value is not None or key in NULL}
    more = {"dots1": ("n_routed_experts", "num_experts_per_tok"), "deepseek_v2": ("num_experts_per_tok",)}
    required: tuple[str, ...] = (*_REQUIRED, *more.get(kind, ()))
    if "num_local_experts" in given:  # another name
        required = tuple(key for key in required if key != "n_routed_experts")
    if missing := [key for key in required if key not in given]:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    _refuse(given, where)
    try:
        return ModelConfig.of(_dims(kind, given, where))
    except ConfigError as error:
        prefix = "" if error.message.startswith(where) else f"{where}: "
        raise ConfigError(prefix + error.message) from None


def _refuse(given: Mapping[str, Any], where: str) -> None:
    """Keys whose value would change the model, and which this decoder does not do."""
    for key, allowed in (
        ("hidden_act", ("silu", "swish")),
        ("moe_layer_freq", (1,)),
        ("router_jitter_noise", (0, 0.0)),
        ("is_causal", (True,)),
        ("use_bidirectional_attention", (False,)),
        ("use_mrope", (False,)),
    ):
        if key in given and given[key] not in allowed:
            raise ConfigError(
                f"{where}: {key} must be {json.dumps(allowed[0])} or absent, found {json.dumps(given[key])}"
            )
    _block(given, where)
    for key in INTEGERS:
        integer(given.get(key, 0), key, where)


def _block(given: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of a weight that share a scale; None of weights that are not quantised."""
    how = given.get("quantization_config")
    if not how:
        return None
    found = how.get("weight_block_size") if isinstance(how, Mapping) else None
    sizes = found if isinstance(found, list) else []
    whole = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    if not whole or how.get("quant_method") != "fp8" or how.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"{where}: the weights are quantised (quantization_config is {json.dumps(how)}), and of such weights only "
            "those in fp8 (e4m3) with a scale for each block are read: take a folder of bf16, fp16 or fp32 weights, or "
            "convert this one to it"
        )
    return sizes[0], sizes[1]


def _dims(kind: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    heads, hidden = given["num_attention_heads"], given["hidden_size"]
    dims: dict[str, Any] = {
        "vocab_size": given["vocab_size"],
        "hidden_size": hidden,
        "num_layers": given["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads if given.get("num_key_value_heads") is None else given["num_key_value_heads"],
        "ffn_size": given["intermediate_size"],
        "norm_eps": given["rms_norm_eps"],
        "max_positions": given["max_position_embeddings"],
        "tie_embeddings": given.get("tie_word_embeddings", False),
        "attention_dropout": given.get("attention_dropout", 0.0),
        "init_std": given.get("initializer_range", 0.02),
    }
    if kind in LATENT:
        dims |= hf_latent.attention(kind, given, where)
    else:
        dims["head_dim"] = given["head_dim"] if "head_dim" in given else _head_dim(hidden, heads, where)
    if kind == "qwen2_moe":
        dims["qkv_bias"] = given.get("qkv_bias", True)
    elif kind == "qwen2":
        dims["qkv_bias"] = True
    elif kind == "glm4_moe":
        dims["qkv_bias"] = given.get("attention_bias", False)
    elif kind not in ("mistral", "mixtral", *LATENT):
        dims["qkv_bias"] = dims["out_bias"] = given.get("attention_bias", False)
    if kind == "llama":
        dims["mlp_bias"] = given.get("mlp_bias", False)
    dims |= _window(kind, given, where)
    if kind in ("qwen3", "qwen3_moe", "dots1"):
        dims["qk_norm"] = True
    if kind == "glm4_moe":
        dims["qk_norm"] = given.get("use_qk_norm", False)
    if kind == "deepseek_v2":
        dims |= hf_latent.experts(given)
    elif kind in BIASED:
        dims |= _biased_experts(given)
    elif kind not in DENSE:
        dims |= _experts(kind, given)
    if dims.get("num_experts") == 0:
        raise ConfigError(
            f"{where}: model_type {kind} needs at least 1 expert, found 0; one without is {', '.join(DENSE)}"
        )
    if "num_experts" in dims:
        dims["dense_layers"] = _dense_layers(kind, given, where)
    if kind in LATENT and len(dims["dense_layers"]) == dims["num_layers"]:
        dims = {key: value for key, value in dims.items() if key not in OF_EXPERTS}
    return rope(kind, given, where, dims.get("rotary_dim", dims["head_dim"])) | dims


def _head_dim(hidden: Any, heads: Any, where: str) -> int:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ConfigError(
            f"{where}: hidden_size must be a multiple of num_attention_heads where head_dim is absent, "
            f"found {json.dumps(hidden)} and {json.dumps(heads)}"
        )
    return hidden // heads


def _experts(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    is_mixtral = kind == "mixtral"
    names = ("num_local_experts", "num_experts") if is_mixtral else ("num_experts", "num_local_experts")
    has_shared = kind == "qwen2_moe"
    shared = {"shared_ffn_size": given["shared_expert_intermediate_size"], "shared_gate": True} if has_shared else {}
    return shared | {
        # both names occur for both types, and only the first has a default: a second one was written down
        "num_experts": given[names[1]] if names[1] in given else given[names[0]],
        "experts_per_token": given["num_experts_per_tok"],
        "expert_ffn_size": given["intermediate_size" if is_mixtral else "moe_intermediate_size"],
        "norm_topk": True if is_mixtral else given.get("norm_topk_prob", False),
        "router_aux_loss": given.get("router_aux_loss_coef", 0.001) if given.get("output_router_logits") else 0.0,
    }


def _biased_experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Experts behind the router of DeepSeek-V3."""
    return {
        "num_experts": given.get("num_local_experts", given.get("n_routed_experts")),
        "experts_per_token": given["num_experts_per_tok"],
        "expert_ffn_size": given["moe_intermediate_size"],
        "norm_topk": given.get("norm_topk_prob", False),
        "router_scores": "sigmoid",
        "router_bias": True,
        "router_groups": given.get("n_group", 1),
        "router_top_groups": given.get("topk_group", 1),
        "router_scale": given.get("routed_scaling_factor", 1.0),
        "router_fp32": True,
        "shared_ffn_size": given.get("n_shared_experts", 0) * given["moe_intermediate_size"],
    }


def _dense_layers(kind: str, given: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The layers without experts; keys of other model types say nothing, as in `transformers`."""
    count = given["num_hidden_layers"]
    first, step = given.get("first_k_dense_replace", 0), given.get("decoder_sparse_step", 1)
    named = given.get("mlp_only_layers", [])
    for key, value, low in (("first_k_dense_replace", first, 0), ("decoder_sparse_step", step, 1)):
        if not isinstance(value, int) or value < low:
            raise ConfigError(f"{where}: {key} must be an integer of at least {low}, found {json.dumps(value)}")
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        raise ConfigError(f"{where}: mlp_only_layers must be a list of layer numbers, found {json.dumps(named)}")
    if not isinstance(count, int):  # refused as num_layers
        return ()
    if kind in BIASED or kind in LATENT:
        return tuple(range(min(first, count)))
    if kind == "mixtral":
        return ()
    return tuple(layer for layer in range(count) if layer in named or (layer + 1) % step)


def _window(kind: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sliding window: mistral and mixtral by its size alone, qwen types behind `use_sliding_window`, per layer in
    qwen2, qwen3 and dots1, and by layer types alone in qwen2_moe.

    In `transformers` other types than these four never look at layer types: where they say otherwise than the window,
    nobody knows what the weights were trained with.
    """
    is_on = kind in ("mistral", "mixtral", "dots1") or (kind in QWEN and given.get("use_sliding_window", False))
    size = given.get("sliding_window", None if kind == "mixtral" else 4096) if is_on else None
    layers, count = given.get("layer_types"), given["num_hidden_layers"]
    if layers is None:
        if size is not None and kind == "qwen2_moe":
            raise ConfigError(f"{where}: use_sliding_window of model_type qwen2_moe needs layer_types, found none")
        if size is None or kind not in ("qwen2", "qwen3", "dots1") or not isinstance(count, int):
            return {"sliding_window": size}
        first = given.get("max_window_layers", 62 if kind == "dots1" else 28)
        windowed = tuple(range(first, count))
    else:
        windowed = _windowed(layers, count, where)
        if kind not in PER_LAYER and len(windowed) != (count if size is not None else 0):
            form = f"a window of {json.dumps(size)}" if size is not None else "no window"
            raise ConfigError(
                f"{where}: layer_types names sliding_attention for {len(windowed)} of {count} layers, where model_type "
                f"{kind} has {form} in every layer: remove layer_types, or take a model_type that reads it "
                f"({', '.join(PER_LAYER)})"
            )
        if windowed and size is None:
            raise ConfigError(f"{where}: layer_types names sliding_attention, but sliding_window is off")
    if not windowed or size is None:
        return {"sliding_window": None}
    return {"sliding_window": size, "window_layers": None if len(windowed) == count else windowed}


def _windowed(layers: Any, count: Any, where: str) -> tuple[int, ...]:
    """The layers that `layer_types` gives a window."""
    if not isinstance(layers, list):
        raise ConfigError(f"{where}: layer_types must be a list, found {json.dumps(layers)}")
    if bad := [name for name in layers if name not in ("full_attention", "sliding_attention")]:
        raise ConfigError(
            f"{where}: layer_types may hold full_attention and sliding_attention, found {json.dumps(bad[0])}"
        )
    if len(layers) != count:
        raise ConfigError(f"{where}: layer_types must name {json.dumps(count)} layers, found {len(layers)}")
    return tuple(i for i, name in enumerate(layers) if name == "sliding_attention")


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The config.json of a model; `from_hf(to_hf(cfg)) == cfg` but for what no exported weight depends on (TRAINING).

    ConfigError when no Hugging Face model type computes the same.
    """
    kind = _model_type(cfg)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.expert_ffn_size if kind == "mixtral" else cfg.ffn_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_positions,
        "initializer_range": cfg.init_std,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": table_of(cfg.rope_scaling),
        "attention_dropout": cfg.attention_dropout,
        "tie_word_embeddings": cfg.tie_embeddings,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind not in ("mistral", "mixtral", "qwen2", "qwen2_moe"):
        config["attention_bias"] = cfg.qkv_bias
    if kind == "llama":
        config["mlp_bias"] = cfg.mlp_bias
    if kind == "mixtral":
        config["num_local_experts"] = cfg.num_experts
    if kind in ("mistral", "mixtral"):
        config["sliding_window"] = cfg.sliding_window
    if kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "dots1"):
        config |= {"use_sliding_window": cfg.sliding_window is not None, "sliding_window": cfg.sliding_window}
    if kind in PER_LAYER:
        windowed = [cfg.window(layer) is not None for layer in range(cfg.num_layers)]
        config["max_window_layers"] = windowed.index(True) if any(windowed) else cfg.num_layers
        config["layer_types"] = ["sliding_attention" if on else "full_attention" for on in windowed]
    if kind in ("qwen2_moe", "qwen3_moe"):
        config |= {
            "num_experts": cfg.num_experts,
            "moe_intermediate_size": cfg.expert_ffn_size,
            "norm_topk_prob": cfg.norm_topk,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(cfg.dense_layers),
        }
    if kind == "qwen2_moe":
        config |= {"qkv_bias": cfg.qkv_bias, "shared_expert_intermediate_size": cfg.shared_ffn_size}
    if kind == "glm4_moe":
        config |= {"use_qk_norm": cfg.qk_norm, "partial_rotary_factor": partial(cfg)}
    if kind in LATENT:
        config |= hf_latent.keys(cfg, kind)
    elif kind in BIASED:
        config |= {
            "n_routed_experts": cfg.num_experts,
            "num_experts_per_tok": cfg.experts_per_token,
            "n_shared_experts": cfg.shared_ffn_size // cfg.expert_ffn_size,
            "moe_intermediate_size": cfg.expert_ffn_size,
            "norm_topk_prob": cfg.norm_topk,
            "n_group": cfg.router_groups,
            "topk_group": cfg.router_top_groups,
            "routed_scaling_factor": cfg.router_scale,
            "first_k_dense_replace": len(cfg.dense_layers),
        }
    elif cfg.num_experts:
        config |= {
            "num_experts_per_tok": cfg.experts_per_token,
            "router_aux_loss_coef": cfg.router_aux_loss,
            "output_router_logits": cfg.router_aux_loss > 0,
        }
    return config


def nearest_type(cfg: ModelConfig) -> str:
    """The model type whose names the weights of `cfg` take."""
    if cfg.kv_rank:
        biased = not cfg.num_experts or cfg.router_scores == "sigmoid" or cfg.router_bias
        return "deepseek_v3" if biased else "deepseek_v2"
    if not cfg.num_experts:
        if cfg.qk_norm:
            return "qwen3"
        if cfg.qkv_bias and not cfg.out_bias:
            return "qwen2"
        return "llama" if cfg.sliding_window is None else "mistral"
    if cfg.router_scores == "sigmoid" or cfg.router_bias or cfg.router_groups > 1:
        is_glm = cfg.rotary_dim > 0 or not cfg.qk_norm or (cfg.qkv_bias and not cfg.out_bias)
        return "glm4_moe" if is_glm and cfg.sliding_window is None else "dots1"
    if cfg.shared_ffn_size:
        return "qwen2_moe"
    return "qwen3_moe" if cfg.qk_norm else "mixtral"


def _model_type(cfg: ModelConfig) -> str:
    """The one model type that computes what `cfg` does, or the first reason why there is none."""
    kind = nearest_type(cfg)
    size, is_v3 = cfg.expert_ffn_size, kind in BIASED and cfg.num_experts > 0
    deep = is_v3 or kind == "deepseek_v2"
    reasons: tuple[tuple[bool, str], ...] = (
        (kind == "dots1" and not cfg.qk_norm, "qk_norm = False"),
        (is_v3 and cfg.router_scores != "sigmoid", f"router_scores = {cfg.router_scores}"),
        (is_v3 and not cfg.router_bias, "router_bias = False"),
        (is_v3 and cfg.num_experts < 2 * cfg.router_groups, f"router_groups = {cfg.router_groups}"),
        (deep and cfg.shared_gate, "shared_gate = True"),
        (
            deep and (cfg.shared_ffn_size == 0 or cfg.shared_ffn_size % size > 0),
            f"shared_ffn_size = {cfg.shared_ffn_size} with expert_ffn_size = {size}",
        ),
        (kind == "qwen2_moe" and not cfg.shared_gate, "shared_gate = False"),
        (kind == "qwen2_moe" and cfg.qk_norm, "qk_norm = True with shared_gate = True"),
        (kind == "qwen2_moe" and cfg.out_bias, "out_bias = True"),
        (
            deep and cfg.dense_layers != tuple(range(len(cfg.dense_layers))),
            f"dense_layers = {list(cfg.dense_layers)}, which are not its first",
        ),
        (kind == "mixtral" and len(cfg.dense_layers) > 0, f"dense_layers = {list(cfg.dense_layers)}"),
        (kind not in ("glm4_moe", *LATENT) and cfg.rotary_dim > 0, f"rotary_dim = {cfg.rotary_dim}"),
        (kind == "glm4_moe" and cfg.out_bias, "out_bias = True"),
        (kind == "deepseek_v2" and cfg.norm_topk, "norm_topk = True"),
        (kind not in (*BIASED, *LATENT) and cfg.router_scale != 1.0, f"router_scale = {cfg.router_scale:g}"),
        (cfg.norm != "rmsnorm", f"norm = {cfg.norm}"),
        (cfg.activation != "swiglu", f"activation = {cfg.activation}"),
        (
            kind not in ("qwen2", "qwen2_moe", "glm4_moe") and cfg.qkv_bias != cfg.out_bias,
            f"qkv_bias = {cfg.qkv_bias} with out_bias = {cfg.out_bias}",
        ),
        (kind in ("mistral", "mixtral") and cfg.qkv_bias, "qkv_bias = True"),
        (kind == "mixtral" and not cfg.norm_topk, "norm_topk = False"),
        (kind != "llama" and cfg.mlp_bias, "mlp_bias = True"),
        (kind in LATENT and cfg.sliding_window is not None, f"sliding_window = {cfg.sliding_window}"),
        (kind in ("mistral", "mixtral", "qwen3_moe") and cfg.window_layers is not None, "window_layers"),
        (cfg.attention_sinks, "attention_sinks = True"),
        (cfg.sink_tokens > 0, f"sink_tokens = {cfg.sink_tokens}"),
    )
    for holds, found in reasons:
        if holds:
            raise ConfigError(f"cannot write a config.json: the nearest model type, {kind}, has no {found.lower()}")
    return kind
