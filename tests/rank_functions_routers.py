"""What the ranks of the tests of routers run: `verify` with faults of routing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

import rank_functions_train as train
from interlace.models import router
from interlace.models.decoder import Decoder
from interlace.models.layers import Context
from interlace.parallel import context, tensor
from interlace.train import step, verify
from interlace.world import World


def loads_of_one_rank(rank: int) -> Any:
    """The bias moves as this rank's own tokens ask for."""
    return mock.patch.object(step, "sum_scalars", lambda values, groups, name="": values if "experts" in name else
                             train.sum_scalars(values, groups, name=name))  # fmt: skip


def moved_every_micro_batch(rank: int) -> Any:
    """The bias moves inside the step, by the load of one micro-batch."""
    plain = Decoder.count

    def count(self: Decoder, given: Context) -> list[Tensor]:
        found = plain(self, given)
        loads = self.take_loads()
        assert loads is not None
        self.steer(loads)
        return found

    return mock.patch.object(Decoder, "count", count)


def room_of_one_rank(rank: int) -> Any:
    """Choices of the pieces before, on other ranks, are forgotten."""

    def forward(self: context.SplitRoom, experts_BTk: Tensor) -> Tensor:
        kept: Tensor = self.inner.turns(experts_BTk) < self.inner.limit(self.axis.length)
        return kept

    return mock.patch.object(context.SplitRoom, "forward", forward)


def losses_on_every_rank(rank: int) -> Any:
    """The gradient of a router's losses is added up over ranks that have all computed the whole of it."""
    return mock.patch.object(tensor, "whole", tensor.gather)


def mean_over_tokens(rank: int) -> Any:
    """The z-loss is a mean over the tokens of the micro-batch (NVIDIA-NeMo/Automodel#3359)."""

    def z_loss(logits_BTX: Tensor, counted_BT: Tensor | None = None) -> Tensor:
        squares_BT = logits_BTX.float().logsumexp(dim=-1).square()
        return squares_BT.mean(dim=1) * 8

    return mock.patch.object(router, "z_loss", z_loss)


def padding_counts(rank: int) -> Any:
    """Tokens without a label are counted."""
    plain = Decoder.context

    def made(self: Decoder, *arguments: Any) -> Context:
        found = plain(self, *arguments)
        if found.counted_BT is not None:
            found.counted_BT = torch.ones_like(found.counted_BT)
        return found

    return mock.patch.object(Decoder, "context", made)


FAULTS = {
    f.__name__: f
    for f in (
        loads_of_one_rank,
        moved_every_micro_batch,
        room_of_one_rank,
        losses_on_every_rank,
        mean_over_tokens,
        padding_counts,
    )
}


def verify_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`verify.under_plan` for each job in turn, with a fault of these or of `rank_functions_train`."""
    found = []
    for job in jobs:
        with (train.FAULTS | FAULTS)[job.pop("fault", "none")](world.rank):
            found.append(verify.under_plan(world, **job))
    return found
