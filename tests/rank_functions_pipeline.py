"""What the ranks of tests/parallel/test_pipeline.py and benchmarks of schedules run."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch import nn

from interlace.collectives import Lines, Meter, make_lines
from interlace.collectives.handle import between, now
from interlace.mesh import Mesh
from interlace.parallel import pipeline as pipelines
from interlace.parallel.pipeline import Pipeline, Stage, pairs_of
from interlace.parallel.split import Switch, split
from interlace.schedule import Table, generate, lower, parse_csv
from interlace.train.verify import products
from interlace.world import World

CPU = torch.device("cpu")
FEATURES = 6


def lines_of(world: World, table: Table, meter: Meter) -> Lines:
    mesh = Mesh((("pp", world.size),))
    return make_lines(mesh, world.rank, "pp", pairs_of(table.placement), CPU, world.timeout, meter)


class Sleeping:
    """A stage that takes its time and computes nothing."""

    def __init__(self, forward: float, input: float, weight: float) -> None:
        self.seconds = forward, input, weight
        self.x = torch.zeros(1, 2, 3)

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        time.sleep(self.seconds[0])
        return self.x

    def backward(self, micro_batch: int, gradient: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        time.sleep(self.seconds[1] + (0.0 if split else self.seconds[2]))
        return self.x

    def weights(self, micro_batch: int) -> None:
        time.sleep(self.seconds[2])


def sleeping(
    world: World, jobs: list[tuple[str, int, int, tuple[float, float, float]]]
) -> list[tuple[float, dict[str, float], float]]:
    """Of each (name, micro-batches, chunks, seconds of a stage): the seconds of a step after a warm-up, those that each
    action really took, since a machine that is busy wakes sleepers late, and those of a step in which nobody sleeps."""
    found = []
    for name, micro_batches, chunks, seconds in jobs:
        table = lower(generate(name, world.size, micro_batches, chunks))
        meter = Meter()
        pipeline = Pipeline(table, world.rank, lines_of(world, table, meter), CPU, meter)
        steps = []
        for scale in (0.0, 0.0, 1.0):
            works = {stage: Sleeping(*(scale * s for s in seconds)) for stage in table.stages_of(world.rank)}
            world.barrier("begin")
            meter.cut()
            begin = now(CPU)
            pipeline.run(works, [(1, 2, 3)] * micro_batches, torch.float32)
            world.barrier("end")
            steps.append(between(begin, now(CPU)))
        taken = {name: between(a, b) for _, kind, name, a, b in meter.cut().work if kind == "compute"}
        found.append((steps[2], taken, steps[1]))
    return found


class Part(nn.Module):
    """A stage with a bias, a norm, and products in a row and side by side."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.gate = nn.Linear(FEATURES, 2 * FEATURES, bias=False)
        self.down = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        y_BTD = self.norm(x_BTD)
        return x_BTD + self.down(torch.tanh(self.up(y_BTD)) * self.gate(y_BTD))


def given(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(batch, length, FEATURES, generator=generator) for batch, length in shapes]


def serially(stages: int, inputs: list[torch.Tensor]) -> tuple[list[Part], float]:
    """One process: the parts with their gradients, and the loss."""
    parts, total = [Part(stage) for stage in range(stages)], 0.0
    for x_BTD in inputs:
        x_BTD = x_BTD.clone().requires_grad_()  # as an embedding's output does
        for part in parts:
            x_BTD = part(x_BTD)
        loss = x_BTD.square().sum()
        loss.backward()
        total += loss.item()
    return parts, total


def chains(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each job's table over parts; the largest relative error of a gradient, FLOPs, loss and what stayed for W."""
    return [chain(world, **job) for job in jobs]


def chain(
    world: World, table: str, name: str, chunks: int, shapes: list[tuple[int, int]], loads: bool = False
) -> dict[str, Any]:
    """loads: what passes between stages goes through the host, as in first steps on GPUs."""
    plain = parse_csv(table) if table else generate(name, world.size, len(shapes), chunks)
    lowered, meter = lower(plain), Meter()
    inputs, last = given(shapes), lowered.stages - 1
    switch = Switch()
    parts = {stage: Part(stage) for stage in lowered.stages_of(world.rank)}
    if lowered.splits_backward:
        for part in parts.values():
            split(part, switch)

    def work(stage: int) -> Stage:
        def compute(j: int, x: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            y_BTD = parts[stage](inputs[j].clone().requires_grad_() if x is None else x)
            return (None, y_BTD.square().sum()) if stage == last else (y_BTD, None)

        return Stage(compute, switch if lowered.splits_backward else None)

    works = {stage: work(stage) for stage in parts}
    pipeline = Pipeline(lowered, world.rank, lines_of(world, lowered, meter), CPU, meter)
    counter = products(CPU)
    with counter, mock.patch.object(pipeline, "_loads", return_value=loads):
        pipeline.run(works, [(*shape, FEATURES) for shape in shapes], torch.float32)
    reference, loss = serially(lowered.stages, inputs)
    error = 0.0
    for stage, part in parts.items():
        for ours, theirs in zip(part.parameters(), reference[stage].parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            error = max(error, ((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()).item())
    losses = [part.item() for work in works.values() for part in work.take_losses()]
    record = meter.cut()
    names = [name for _, kind, name, *_ in record.work if kind == "compute"]
    assert names == [str(action) for action in lowered.rows[world.rank] if action.is_compute]
    return {
        "error": error,
        "flops": counter.flops,
        "loss": sum(losses) / loss,
        "sent": meter.sent["send", "pp"],
        "timed": len(record.transfers),
    }


def one_stays_away(world: World) -> None:
    """Rank 1 never sends what rank 2 takes in."""
    table = lower(generate("1f1b", world.size, 2))
    meter = Meter(world.waiting)
    pipeline = Pipeline(table, world.rank, lines_of(world, table, meter), CPU, meter)
    works = {world.rank: Sleeping(0.0, 0.0, 0.0)}
    world.status(step=3, operation="step")
    if world.rank == 1:
        with mock.patch.object(pipelines, "send", side_effect=lambda *args, **kwargs: time.sleep(60)):
            pipeline.run(works, [(1, 2, 3)] * 2, torch.float32)
    pipeline.run(works, [(1, 2, 3)] * 2, torch.float32)
