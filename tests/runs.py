"""Small runs for the tests of training: a source with documents of unequal lengths, a run file, a world of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from interlace.config import Config, loads
from interlace.world import World

RUN = """
[model]
vocab_size = 257
hidden_size = 16
num_layers = 3
num_heads = 4
num_kv_heads = 2
head_dim = 4
ffn_size = 24
[parallel]
plan = "{plan}"
[data]
source = "{folder}/text.jsonl"
sequence_length = 16
[train]
steps = 3
global_batch = 8
warmup = 0
learning_rate = 1e-2
[run]
out = "{folder}/{out}"
"""


def write_text(folder: Path) -> None:
    """111 sequences of 16; documents of 1 to 60 bytes, so that sequences have 6 to 16 labels."""
    words = "a rank owns the slice that its layout names and no other " * 2
    lengths = [1 if i % 24 < 14 else 1 + (i * 23) % 60 for i in range(135)]
    lines = [json.dumps({"text": words[i % 7 : i % 7 + length]}) for i, length in enumerate(lengths)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")


def toml(folder: Path, plan: str = "dp=1", out: str = "run") -> str:
    if not (folder / "text.jsonl").exists():
        write_text(folder)
    return RUN.format(plan=plan, folder=folder, out=out)


def config(folder: Path, plan: str = "dp=1", overrides: Sequence[str] = (), out: str = "run") -> Config:
    return loads(toml(folder, plan, out), overrides)


def alone() -> World:
    """A world of one, in this process."""
    return World(0, 1, 0, torch.device("cpu"), HashStore())


def metrics(cfg: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(cfg.run.out) / "metrics.jsonl").read_text().splitlines()]


def losses(cfg: Config) -> list[float]:
    return [row["loss"] for row in metrics(cfg)]
