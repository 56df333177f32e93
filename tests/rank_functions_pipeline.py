"""What the ranks of tests/parallel/test_pipeline.py run."""

from __future__ import annotations

import time
from typing import Any

import torch

from interlace.collectives import Meter, make_lines
from interlace.collectives.handle import between, now
from interlace.mesh import Mesh
from interlace.parallel.pipeline import Pipeline, pairs_of
from interlace.schedule import generate, lower
from interlace.world import World


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


def sleeping(world: World, jobs: list[tuple[str, int, int, tuple[float, float, float]]]) -> list[float]:
    """Seconds of a step of each (name, micro-batches, chunks, seconds of a stage), the best of two after a warm-up."""
    found = []
    for name, micro_batches, chunks, seconds in jobs:
        table = lower(generate(name, world.size, micro_batches, chunks))
        mesh, device, meter = Mesh((("pp", world.size),)), torch.device("cpu"), Meter(record=False)
        lines = make_lines(mesh, world.rank, "pp", pairs_of(table), device, 60.0, meter)
        pipeline = Pipeline(table, world.rank, lines, device, meter)
        shapes, best = [(1, 2, 3)] * micro_batches, float("inf")
        for scale in (0.01, 1.0, 1.0):
            works = {stage: Sleeping(*(scale * s for s in seconds)) for stage in table.stages_of(world.rank)}
            world.barrier("begin")
            begin = now(device)
            pipeline.run(works, shapes, torch.float32)
            world.barrier("end")
            best = min(best, between(begin, now(device))) if scale == 1.0 else best
        found.append(best)
    return found
