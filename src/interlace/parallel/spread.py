"""What all heads of latent attention read, handed to those of every rank: a few features of each position.

`spread(x, group, count)` equals

    all_gather(x_nM)   backward: reduce_scatter of dx_NM     each rank has made its rows, n of `count`
    x_NM               backward: all_reduce of dx_NM         count = None: each has made all of them

since a rank's backward pass sees what is shared through its own heads alone.  Where the compiler traces, both stay in
the graph: everything in a block that travels before or after hangs on them, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from interlace.collectives import Group
from interlace.collectives.autograd import GATHERED, REDUCED, SCATTERED
from interlace.collectives.operator import entry


def spread(x: Tensor, group: Group, count: int | None) -> Tensor:
    """[.. n M] -> [count M], or x itself."""
    if torch.compiler.is_compiling():
        traced: Tensor = _TRACED(group.key, x, count)
        return traced
    made: Tensor = _Spread.apply(x, group, count, False)  # type: ignore[no-untyped-call]
    return made


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int | None, traced: bool) -> Tensor:
        ctx.group, ctx.is_whole, ctx.traced, ctx.shape = group, count is None, traced, x.shape
        if count is None:
            return x.clone() if traced else x.view_as(x)
        made: Tensor = GATHERED(group, traced, x, count)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made: Tensor = (REDUCED if ctx.is_whole else SCATTERED)(ctx.group, ctx.traced, grad)
        return made.view(ctx.shape), None, None, None


_TRACED = entry(
    "spread(Tensor x, SymInt? count) -> Tensor",
    lambda group, x, count: _Spread.apply(x, group, count, True),  # type: ignore[no-untyped-call]
)


class Spread(nn.Module):
    """In the place of the model's own: what several tensors hold of a position, in one transfer.

    axis: of the decoder's tensor axis; `count` says how many rows all its ranks have together.
    """

    def __init__(self, axis: Any) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, parts: Sequence[Tensor], context: Any) -> Sequence[Tensor]:
        joined = torch.cat(list(parts), dim=-1)
        made = spread(joined, self.axis.group, self.axis.count(context))
        apart: Sequence[Tensor] = made.split([part.shape[-1] for part in parts], dim=-1)
        return apart
