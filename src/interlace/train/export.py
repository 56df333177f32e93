"""A checkpoint -> a Hugging Face folder that `transformers` loads: config.json, safetensors, and the run's tokenizer.

The fp32 main weights are read tensor by tensor, whatever plan saved them, and written in the dtype asked for; at most
one shard of the result is in memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from interlace import hf_config, tokenizer
from interlace.checkpoint import Reader, configuration, newest
from interlace.config import Config
from interlace.errors import ConfigError, DataError, ResourceError, nearest
from interlace.model_config import ModelConfig
from interlace.models.weights import save_hf

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")  # of a tokenizer.json, copied where they exist


def export(run_or_checkpoint: str | Path, destination: str | Path, dtype: str = "bf16") -> None:
    """Write the newest checkpoint of a run folder, or one checkpoint, as a new folder `destination`.

    dtype: "bf16" or "fp32". A run on bytes has no tokenizer.json to copy. `eos_token_id` of config.json is the id
    that ended the run's documents, beside those of the folder that the run began from. The folder appears once all
    weights are in it. ConfigError when no Hugging Face model computes what this configuration does; CheckpointError
    for a missing, damaged or foreign checkpoint, or a destination with something in it; DataError when the
    tokenizer's file has gone; ResourceError when the disk refuses.
    """
    if dtype not in DTYPES:
        near = nearest(dtype, DTYPES)
        raise ConfigError(f"export writes bf16 or fp32, found {dtype}" + (f"; nearest is {near}" if near else ""))
    reader = Reader(newest(run_or_checkpoint))
    cfg, model_cfg = configuration(reader)
    hf_config.to_hf(model_cfg)  # refuses before anything is read
    words = _tokenizer_file(cfg.data.tokenizer)
    end = _ends(cfg, model_cfg, words)
    destination = Path(destination)
    try:
        save_hf(destination, model_cfg, _weights(reader, DTYPES[dtype]), end=end)
        if words is not None:
            shutil.copyfile(words, destination / tokenizer.FILE)
            for name in BESIDE:
                if words.with_name(name).is_file():
                    shutil.copyfile(words.with_name(name), destination / name)
    except OSError as error:
        raise ResourceError(
            f"cannot write {destination}: {error.strerror or error}; make room or name another"
        ) from error


def _weights(reader: Reader, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every main weight, and every buffer in fp32; `save_hf` holds them against the
    configuration, by name and shape."""
    for name in reader.names:
        kind, _, own_name = name.partition("/")
        if kind in ("main", "buffer"):
            whole = reader.read(name).view(reader.shape(name))
            yield own_name, whole.to(dtype) if kind == "main" else whole


def _ends(cfg: Config, model_cfg: ModelConfig, words: Path | None) -> int | list[int] | None:
    """Where whoever generates with the folder is to stop: at the id that ended the run's documents, and at those of the
    folder that the run began from, as the end of a turn, if it has the same tokenizer."""
    ids = [tokenizer.tokenizer(cfg.data.tokenizer).end]
    begun = Path(cfg.model.from_) if cfg.model.from_ else None
    theirs = begun / tokenizer.FILE if begun and begun.is_dir() else None
    if words is not None and theirs is not None and theirs.is_file() and theirs.read_bytes() == words.read_bytes():
        for name in ("config.json", "generation_config.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # absent, or of no form that is known
                stated = json.loads(theirs.with_name(name).read_bytes()).get("eos_token_id")
                ids += [end for end in (stated if isinstance(stated, list) else [stated]) if type(end) is int]
    ids = [end for end in dict.fromkeys(ids) if 0 <= end < model_cfg.vocab_size]
    return ids if len(ids) > 1 else ids[0] if ids else None


def _tokenizer_file(spec: str) -> Path | None:
    """The run's tokenizer.json; None for bytes."""
    path = tokenizer.file_of(spec)
    if path is not None and not path.is_file():
        raise DataError(
            f"the tokenizer {path}, with which the run was trained, is not there; put it back", file=str(path)
        )
    return path
