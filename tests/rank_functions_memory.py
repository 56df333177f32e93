"""What rank processes run for the test of what fused products hold, on GPUs or with interpreted kernels."""

from __future__ import annotations

from unittest import mock

import torch

from interlace.config import loads
from interlace.kernels import workspace
from interlace.kernels.candidate import ways
from interlace.plan import overlap
from interlace.plan.memory import estimate
from interlace.train import session as sessions
from interlace.train.step import forward_backward
from interlace.world import World

UNITS = {"cpu": 4096, "cuda": overlap.UNIT}  # small ones show more, and a GPU's memory comes in large ones


def step(world: World, configs: list[str]) -> list[list[int]]:
    """Of each configuration, after a step: bytes of this rank's arenas along tp, the row of the planner's figure, and
    that figure when nobody says which ways run."""
    found, kind = [], world.device.type
    with mock.patch.object(overlap, "UNIT", UNITS[kind]):
        for text in configs:
            session = sessions.build(world, loads(text))
            forward_backward(session.model, session.batches(), session.groups.host, session.dropout_key(0))
            group, cfg = session.groups["tp"], session.cfg
            way = ways(group, torch.bfloat16 if cfg.train.precision == "bf16" else torch.float32, cfg.plan.overlap)
            has = sum(arena.nbytes for arena in workspace.arenas(group)) // group.size
            found.append([has, *(estimate(cfg, cfg.plan, kind, given).symmetric for given in (way, None))])
            workspace.release(group)
    return found
