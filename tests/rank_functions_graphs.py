"""Steps of several runs, one after another in the same processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from interlace.config import loads
from interlace.train import session as sessions
from interlace.train.step import train_step
from interlace.world import World


def steps(world: World, configs: list[str], count: int) -> list[dict[str, Any]]:
    """Of each run: losses and gradient norms of its steps, and how many graphs were replayed in the last of them."""
    found = []
    for config in configs:
        session = sessions.build(world, loads(config))
        rows, replayed = [], 0
        plain = torch.cuda.CUDAGraph.replay

        def replay(graph: Any, plain: Any = plain) -> Any:
            nonlocal replayed
            replayed += 1
            return plain(graph)

        with mock.patch.object(torch.cuda.CUDAGraph, "replay", replay):
            for step in range(count):
                replayed = 0
                made = train_step(
                    session.model,
                    session.optimizer,
                    session.batches(),
                    session.groups.host,
                    clip_norm=session.cfg.train.clip,
                    dropout_key=session.dropout_key(step),
                    leaves=session.leaves,
                )
                rows.append((made.loss.item(), made.grad_norm.item()))
                session.meter.cut()
                session.advance()
        found.append({"rows": rows, "replayed": replayed})
    return found
