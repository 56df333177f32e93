"""Weights from and to a Hugging Face folder, of every model type that `hf_config` knows; safetensors only.

A folder holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`.  Everything
that can be wrong with its files, names, shapes and dtypes is found before the first tensor is handed out; values that
are not finite as their tensor is read.  Both are named by file and tensor.  Pickled files (`.bin`, `.pt`) are never
opened.

Our names and theirs differ; shapes differ only for experts, one matrix each there and stacked [X N M] here.  Rotary
features are in the order of Hugging Face on both sides, but in latent attention, whose rows are put in ours.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interlace import hf_config, spec
from interlace.config import ModelConfig
from interlace.errors import CheckpointError, SecurityError
from interlace.hf_latent import turned_rows

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTISED = "F8_E4M3"
SCALE = "_scale_inv"  # behind the name of a weight in fp8: what its blocks are multiplied by
FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LATENT = {
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
}
_MIXTRAL = {
    "moe.router": "block_sparse_moe.gate",
    "moe.gate": "block_sparse_moe.experts.{}.w1",
    "moe.up": "block_sparse_moe.experts.{}.w3",
    "moe.down": "block_sparse_moe.experts.{}.w2",
}
_QWEN3_MOE = {
    "moe.router": "mlp.gate",
    "moe.gate": "mlp.experts.{}.gate_proj",
    "moe.up": "mlp.experts.{}.up_proj",
    "moe.down": "mlp.experts.{}.down_proj",
}
_QWEN2_MOE = _QWEN3_MOE | {
    "moe.shared.gate": "mlp.shared_expert.gate_proj",
    "moe.shared.up": "mlp.shared_expert.up_proj",
    "moe.shared.down": "mlp.shared_expert.down_proj",
    "moe.shared_gate": "mlp.shared_expert_gate",
}
_DOTS1 = _QWEN3_MOE | {
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}
_EXPERTS = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _QWEN3_MOE,
    "dots1": _DOTS1,
    "glm4_moe": _DOTS1,
    "deepseek_v2": _DOTS1,
    "deepseek_v3": _DOTS1,
}


def hf_names(cfg: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter's or buffer's name -> the Hugging Face names of its parts: one, or one per expert; in the model's
    order, buffers last."""
    modules = _MODULES | _EXPERTS.get(hf_config.nearest_type(cfg), {})
    if cfg.kv_rank:
        modules |= _LATENT | ({"attention.q": "self_attn.q_b_proj"} if cfg.q_rank else {})
    outer = {"embedding": "model.embed_tokens", "head.norm": "model.norm", "head.output": "lm_head"}
    names = {}
    for parameter in spec.parameters(cfg):
        module, _, kind = parameter.name.rpartition(".")
        if module in outer:
            theirs = outer[module]
        else:
            _, layer, inner = module.split(".", 2)
            theirs = f"model.layers.{layer}.{modules[inner]}"
        stacked = parameter.role is spec.Role.EXPERT
        parts = [theirs.format(expert) for expert in range(cfg.num_experts)] if stacked else [theirs]
        names[parameter.name] = tuple(f"{part}.{kind}" for part in parts)
    for buffer in spec.buffers(cfg):
        layer = buffer.name.split(".")[1]
        names[buffer.name] = (f"model.layers.{layer}.mlp.gate.e_score_correction_bias",)
    return names


# --- reading -------------------------------------------------------------------------------------------------------


def load_hf(folder: str | Path) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """The configuration, and (our name, tensor on the CPU in its stored dtype) in the model's order.

    Weights in fp8 with a scale for each block (DeepSeek-V3, arXiv 2412.19437, section 3.3) come as the fp32 numbers
    that they stand for.

    All of the folder but the values is checked before this returns.  The iterator refuses a tensor with an element that
    is NaN or infinite; else only a failing disk can stop it.  A tied head is not among the tensors.  A `.safetensors`
    file that the index does not name is left alone, with a warning.
    CheckpointError: a missing, damaged or cut file, a missing, foreign or wrongly shaped tensor, or one that is not
    finite.  SecurityError: a path that leaves the folder, or nothing but pickled files.
    """
    folder = Path(folder)
    if not _inside(folder, "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json: name a Hugging Face model folder")
    cfg = hf_config.read(folder)
    shards, place = _open(folder)
    block = hf_config.block(folder)
    _check_tensors(folder, cfg, shards, place, block)

    stacked = {parameter.name for parameter in spec.parameters(cfg) if parameter.role is spec.Role.EXPERT}
    pairs_neighbours = hf_config.pairs_neighbours(folder)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parts in hf_names(cfg).items():
            loaded = [_values(folder, part, shards, place, block) for part in parts]
            rows = turned_rows(cfg, name, pairs_neighbours)
            yield name, torch.stack(loaded) if name in stacked else loaded[0] if rows is None else loaded[0][rows]

    return cfg, tensors()


def _inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder; SecurityError when the name or a symbolic link leads out of it.

    One way out is allowed, since it is how the Hugging Face cache stores a model: from `X/snapshots/REVISION` into
    `X/blobs`.
    """
    if name != Path(name).name or "\\" in name or name in ("", "..") or "\0" in name:
        raise SecurityError(f"{folder / INDEX} names the file {name!r}, which is not a plain name inside the folder")
    path, root = folder / name, folder.resolve()
    target = path.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not target.is_relative_to(root) and target.parent != blobs:
        raise SecurityError(f"{path} is a link to {target}, outside its folder: copy the file instead")
    return path


def _open(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Open shards by file name, and tensor name -> file name.  The index wins over whatever else lies there."""
    present = {path.name for path in folder.glob("*.safetensors")}
    if _inside(folder, INDEX).is_file():
        place = _read_index(folder)
    elif SINGLE in present:
        place = {}
    elif present:
        raise CheckpointError(f"{folder} holds {_some(present)} but neither {INDEX} nor {SINGLE}: restore the index")
    elif pickled := sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)):
        raise SecurityError(
            f"{folder} holds only {_some(pickled)}, which can run code when it is opened: convert it to safetensors"
        )
    else:
        raise CheckpointError(f"{folder} holds no weights: neither {INDEX} nor {SINGLE}")
    files = sorted(set(place.values())) or [SINGLE]
    if strays := present - set(files):
        warnings.warn(f"{folder}: {_some(strays)} ignored, the model is in {_some(files)}", stacklevel=3)
    shards = {}
    for file in files:
        wanted = [tensor for tensor, where in place.items() if where == file]
        shards[file] = _open_shard(_inside(folder, file), wanted)
    return shards, place or dict.fromkeys(shards[SINGLE].keys(), SINGLE)


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        place = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is no index of safetensors shards: {error!r}") from None
    if not isinstance(place, dict) or not place or not all(isinstance(file, str) for file in place.values()):
        raise CheckpointError(f"{path}: weight_map must name a file for each tensor")
    for file in sorted(set(place.values())):
        if not file.endswith(".safetensors"):
            raise SecurityError(f"{path} names {file!r}: only .safetensors files are opened")
        if not _inside(folder, file).is_file():
            wanted = [tensor for tensor, where in place.items() if where == file]
            raise CheckpointError(f"{folder / file} is missing; {INDEX} puts {_some(wanted)} into it")
    return place


def _open_shard(path: Path, wanted: list[str]) -> Any:
    """An open file whose header, size and tensor names agree with each other and, where there is one, the index."""
    try:
        shard: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        holds = f"; it should hold {_some(wanted)}" if wanted else ""
        raise CheckpointError(f"{path} is damaged or cut short ({error}){holds}: fetch it again") from None
    if wanted:
        found = set(shard.keys())
        if lacking := [tensor for tensor in wanted if tensor not in found]:
            raise CheckpointError(f"{path} lacks {_some(lacking)}, which {INDEX} puts there")
        if unlisted := found - set(wanted):
            raise CheckpointError(f"{path} holds {_some(unlisted)}, which {INDEX} does not put there")
    return shard


def _check_tensors(
    folder: Path, cfg: ModelConfig, shards: dict[str, Any], place: dict[str, str], block: tuple[int, int] | None
) -> None:
    """Every part of every parameter is there, in its shape and a float dtype, and nothing else is."""
    expected: dict[str, tuple[int, ...]] = {}
    for parameter in (*spec.parameters(cfg), *spec.buffers(cfg)):
        shape = parameter.shape[1:] if parameter.role is spec.Role.EXPERT else parameter.shape
        expected |= dict.fromkeys(hf_names(cfg)[parameter.name], shape)
    if missing := [name for name in expected if name not in place]:
        where = folder / (INDEX if (folder / INDEX).is_file() else SINGLE)
        instead = [name for name in place if name not in expected]
        rest = f", and holds {_some(instead)} instead" if instead else ""
        if missing == ["lm_head.weight"]:
            rest = ": set tie_word_embeddings to true if the embedding is the head, else restore the tensor"
        raise CheckpointError(f"{where} lacks {_some(missing)}, which config.json asks for{rest}")
    if cfg.tie_embeddings and "lm_head.weight" in place:
        embedding, head = (
            _finite(folder / place[name], name, shards[place[name]].get_tensor(name))
            for name in ("model.embed_tokens.weight", "lm_head.weight")
        )
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{folder / place['lm_head.weight']}: lm_head.weight differs from model.embed_tokens.weight, but "
                "config.json ties them: set tie_word_embeddings to false if the head is its own"
            )
        expected["lm_head.weight"] = tuple(embedding.shape)
    known_spare = [name for name in place if name.endswith(".rotary_emb.inv_freq")]  # computed, stored by old versions
    behind = range(cfg.num_layers, cfg.num_layers + hf_config.left_out(folder))
    if further := [name for name in place if any(name.startswith(f"model.layers.{layer}.") for layer in behind)]:
        warnings.warn(f"{folder}: {_some(further)} ignored, which guess further tokens", stacklevel=3)
        known_spare += further
    scales = _scales(folder, expected, shards, place, block) if block else {}
    known = {*expected, *known_spare, *scales}
    if foreign := [name for name in place if name not in known]:
        raise CheckpointError(
            f"{folder / place[foreign[0]]} holds {_some(foreign)}, which the model of config.json does not have"
        )
    for name, shape in (expected | scales).items():
        view = shards[place[name]].get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise CheckpointError(
                f"{folder / place[name]}: {name} has shape {view.get_shape()}, config.json makes it {list(shape)}"
            )
        if view.get_dtype() not in FLOATS and not (f"{name}{SCALE}" in scales and view.get_dtype() == QUANTISED):
            raise CheckpointError(
                f"{folder / place[name]}: {name} is stored as {view.get_dtype()}, known are {', '.join(FLOATS)}"
            )


def _scales(
    folder: Path,
    expected: dict[str, tuple[int, ...]],
    shards: dict[str, Any],
    place: dict[str, str],
    block: tuple[int, int],
) -> dict[str, tuple[int, ...]]:
    """The scales that stand beside weights in fp8, and their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in expected.items():
        if shards[place[name]].get_slice(name).get_dtype() != QUANTISED or len(shape) != 2:
            continue
        if f"{name}{SCALE}" not in place:
            raise CheckpointError(
                f"{folder / place[name]} holds {name} in fp8, and no file {name}{SCALE}, which its blocks are to be "
                "multiplied by: fetch the folder again"
            )
        found[f"{name}{SCALE}"] = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    return found


def _values(
    folder: Path, name: str, shards: dict[str, Any], place: dict[str, str], block: tuple[int, int] | None
) -> Tensor:
    """A tensor, times its scales where it has some."""
    stored: Tensor = shards[place[name]].get_tensor(name)
    if block is None or stored.dtype != torch.float8_e4m3fn:
        return _finite(folder / place[name], name, stored)
    beside = f"{name}{SCALE}"
    scale = _finite(folder / place[beside], beside, shards[place[beside]].get_tensor(beside)).float()
    for dim, each in enumerate(block):
        scale = scale.repeat_interleave(each, dim).narrow(dim, 0, stored.shape[dim])
    return _finite(folder / place[name], name, stored.float().mul_(scale))


def _finite(path: Path, name: str, tensor: Tensor) -> Tensor:
    """A tensor of a file, refused unless all of its elements are finite.

    NaN and infinity show in the least or the greatest element: one pass at the memory's speed, where `isfinite` takes
    twenty times as long.
    """
    if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
        nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        kinds = " and ".join(f"{count:,} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count)
        raise CheckpointError(
            f"{path}: of the {tensor.numel():,} elements of {name}, {nan + infinite:,} are not finite ({kinds}): fetch "
            "the file again, or take weights from before the run that wrote them diverged",
            tensor=name,
            not_finite=nan + infinite,
        )
    return tensor


def _some(names: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# --- writing -------------------------------------------------------------------------------------------------------


def save_hf(
    folder: str | Path,
    cfg: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 5 << 30,
    end: int | list[int] | None = None,
) -> None:
    """Write a folder that `transformers` loads: config.json and shards of at most `max_shard_bytes` (or one tensor).

    `tensors` are (our name, whole tensor) as `named_parameters()` and `named_buffers()` give them, in any order and
    dtype, each written in its own dtype; one shard at a time is held in memory.  The folder appears only when all of it
    is written.  end: the id, or ids, at which whoever generates with the folder is to stop.
    ConfigError when no Hugging Face model type is this model; CheckpointError when the folder holds something already
    or a tensor is missing, foreign or of another shape.
    """
    folder = Path(folder)
    config = hf_config.to_hf(cfg)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        dtype = _write_shards(partial, cfg, tensors, max_shard_bytes)
        config["eos_token_id"] = end
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(
    folder: Path, cfg: ModelConfig, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> torch.dtype:
    """Write shards and, if there are several, their index; the dtype of the embedding."""
    shards: list[list[str]] = []  # tensor names of each shard written
    held: dict[str, Tensor] = {}
    total = held_bytes = 0

    def flush() -> None:
        save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))

    for name, part in _parts(cfg, tensors):
        if held and held_bytes + part.nbytes > max_shard_bytes:
            flush()
            held, held_bytes = {}, 0
        held[name] = part
        held_bytes += part.nbytes
        total += part.nbytes
        if name == "model.embed_tokens.weight":
            dtype = part.dtype
    flush()
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / SINGLE)
        return dtype
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtype


def _parts(cfg: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, contiguous CPU tensor) of each part; every parameter exactly once, else CheckpointError."""
    names = hf_names(cfg)
    shapes = {parameter.name: parameter.shape for parameter in (*spec.parameters(cfg), *spec.buffers(cfg))}
    left = set(names)
    for name, tensor in tensors:
        if name not in left:
            reason = "comes twice" if name in names else "is no parameter of this model configuration"
            raise CheckpointError(f"cannot save: {name} {reason}")
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(f"cannot save: {name} has shape {list(tensor.shape)}, not {list(shapes[name])}")
        if tensor.dtype not in FLOATS.values():
            raise CheckpointError(f"cannot save: {name} has dtype {tensor.dtype}, known are {', '.join(FLOATS)}")
        left.remove(name)
        whole = tensor.detach().cpu()
        if rows := turned_rows(cfg, name, pairs_neighbours=True):
            whole = torch.empty_like(whole).index_copy_(0, torch.tensor(rows), whole)
        parts = whole.unbind() if len(names[name]) > 1 or whole.dim() == 3 else (whole,)
        yield from zip(names[name], (part.contiguous() for part in parts), strict=True)
    if left:
        raise CheckpointError(f"cannot save: {_some(left)} did not come")
