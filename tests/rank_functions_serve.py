"""What the ranks of the tests of generation run, and the models and texts that they and one process share."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from checkpoints import save_values
from interlace import config
from interlace.checkpoint import Reader
from interlace.models.decoder import Decoder
from interlace.serve import generate
from interlace.world import World

FIRST = "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "joker"
SECOND = "reads a layout and", "sends its rows and", "waits for peers and", "keeps the keys and"
THIRD = "then writes", "never drops", "counts twice", "then splits"
LAST = "what the next rank has asked for", "every token of the longest row", "one head of all that it holds"
LINES = [
    f"{first} {second} {THIRD[(i + j) % 4]} {LAST[(2 * i + j) % 3]}."
    for i, first in enumerate(FIRST)
    for j, second in enumerate(SECOND)
]
CONTEXT = 64

RUN = """
[model]
vocab_size = 257
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
ffn_size = 64
init_std = 0.08
[data]
sequence_length = 64
[run]
timeout = 30.0
"""


def run_config(**dims: Any) -> config.Config:
    return config.loads(RUN, [f"model.{name}={_word(value)}" for name, value in dims.items()])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def save(out: Path, cfg: config.Config, model: Decoder) -> Path:
    tensors = {f"main/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    tensors |= {f"buffer/{name}": tensor for name, tensor in model.named_buffers()}
    meta = {"config": cfg.to_toml(), "model": dataclasses.asdict(model.cfg)}
    return save_values(out / "checkpoints", 200, tensors, meta)


def learn(model: Decoder, steps: int) -> float:
    """Half of the lines in every step; the last loss a byte."""
    rows = [torch.tensor([*line.encode(), 256]) for line in LINES]
    tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.1)
    loss = torch.zeros(())
    for step in range(steps):
        part_BT = tokens_BT[step % 2 :: 2]
        logits = model(part_BT[:, :-1].clamp(min=0))
        loss = F.cross_entropy(logits.flatten(0, 1), part_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def written(model: Any, prompts: list[list[int]], batch: int, options: dict[str, Any]) -> list[list[list[float]]]:
    """Token and log-probability at every step, by prompt."""
    found: list[list[list[float]]] = [[] for _ in prompts]
    for first in range(0, len(prompts), batch):
        for step in generate.generate_batch(model, prompts[first : first + batch], **options):
            for number, chosen in enumerate(step, start=first):
                if chosen is not None:
                    found[number].append(list(chosen))
    return found


def write_all(world: World, jobs: list[dict[str, Any]]) -> list[list[list[list[float]]]]:
    """By job: what `written` gives under a plan, for each size of batch."""
    made = []
    for job in jobs:
        model, _, _ = generate.load_split(world, job["run"], job["plan"])
        made.append([written(model, job["prompts"], batch, job["options"]) for batch in job["batches"]])
    return made


def elements_read(world: World, run: str, plan: str) -> int:
    read = []
    original = Reader.read

    def counted(self: Reader, name: str, *place: Any) -> torch.Tensor:
        values = original(self, name, *place)
        read.append(values.numel())
        return values

    with mock.patch.object(Reader, "read", counted):
        generate.load_split(world, run, plan)
    return sum(read)


def write_and_die(world: World, job: dict[str, Any], rank: int) -> None:
    """One rank is killed amid the text."""
    model, _, _ = generate.load_split(world, job["run"], job["plan"])
    for number, _ in enumerate(generate.generate_batch(model, job["prompts"], **job["options"])):
        if number == 3 and world.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)


def write_apart(world: World, job: dict[str, Any], rank: int) -> None:
    """One rank is given another prompt."""
    model, _, _ = generate.load_split(world, job["run"], job["plan"])
    prompts = [[1, 2, 3], *job["prompts"][1:]] if world.rank == rank else job["prompts"]
    list(generate.generate_batch(model, prompts, **job["options"]))
