"""Multiply, then add up over ranks: the product at the exit of a split layer.

`matmul_scatter(x, weight, group)` equals `reduce_scatter(x_NM @ weight.T)` over rows, and `matmul_reduce` the same with
an all-reduce; weights hold a slice of their columns (inputs).  Backward gathers the gradient once, or has it whole.

With `overlap`, `matmul_scatter` multiplies the rows of one peer after another, and each part travels while the next is
computed, the own one last; in backward the own rows of the gradient are multiplied while the others arrive.  The parts
are added in rank order, as everywhere.

Fused kernels of the same contract may take the place of the compositions here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group, Handle
from interlace.collectives.autograd import reduce, scatter, start_gather, start_parts
from interlace.layout import split


@torch.compiler.disable
def matmul_scatter(x: Tensor, weight_NM: Tensor, group: Group, overlap: bool = False) -> Tensor:
    """[.. M/tp] -> this rank's rows of the sum, [n N]."""
    if overlap:
        made: Tensor = _MatmulScatter.apply(x, weight_NM, group)  # type: ignore[no-untyped-call]
        return made
    return scatter(F.linear(x, weight_NM), group)


@torch.compiler.disable
def matmul_reduce(x: Tensor, weight_NM: Tensor, group: Group) -> Tensor:
    """[.. M/tp] -> [.. N], the sum, on every rank."""
    return reduce(F.linear(x, weight_NM), group)


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NM: Tensor, group: Group) -> Tensor:
        x_RM = x.flatten(0, -2)
        ctx.save_for_backward(x_RM, weight_NM)
        ctx.group, ctx.shape = group, x.shape
        rows = [slice(*split(len(x_RM), group.size, rank)) for rank in range(group.size)]

        def product(rank: int, out: Tensor | None) -> Tensor:
            return torch.mm(x_RM[rows[rank]], weight_NM.t(), out=out)

        shape = (rows[group.rank].stop - rows[group.rank].start, len(weight_NM))
        return start_parts(product, shape, x.dtype, group, "scatter").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rN: Tensor) -> tuple[Tensor | None, ...]:
        x_RM, weight_NM = ctx.saved_tensors
        group, count = ctx.group, len(x_RM)
        arriving: Handle[Tensor] = start_gather(grad_rN, group, count, "gather gradient")
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx_RM = torch.empty_like(x_RM)
        start, stop = split(count, group.size, group.rank)
        if wants_x:
            torch.mm(grad_rN, weight_NM, out=dx_RM[start:stop])
        grad_RN = arriving.wait()
        for low, high in ((0, start), (stop, count)) if wants_x else ():
            if low < high:
                torch.mm(grad_RN[low:high], weight_NM, out=dx_RM[low:high])
        dweight = grad_RN.t() @ x_RM if wants_weight else None
        return dx_RM.view(ctx.shape) if wants_x else None, dweight, None
