"""Multiply, then add up over ranks: the product at the exit of a split layer.

`matmul_scatter(x, weight, group)` equals `reduce_scatter(x_NM @ weight.T)` over rows, and `matmul_reduce` the same with
an all-reduce; weights hold a slice of their columns (inputs).  Backward gathers the gradient once, or has it whole.

With `overlap` the sums travel under the product, in the way that `candidate.choose` names for the shape
(`matmul_reduce_scatter`, `matmul_all_reduce`), and in backward the gradient's rows under its product with the weight
(`all_gather_matmul`).  "plain" multiplies the rows of one peer after another, and each part travels while the next is
computed, the own one last; in backward the own rows of the gradient are multiplied while the others arrive.  The parts
are added in rank order, as everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group, Handle
from interlace.collectives.autograd import reduce, scatter, start_gather, start_parts
from interlace.kernels.candidate import Candidate, Problem, pick
from interlace.layout import split


@torch.compiler.disable
def matmul_scatter(
    x: Tensor, weight_NM: Tensor, group: Group, overlap: bool = False, inner: int | None = None
) -> Tensor:
    """[.. M/tp] -> this rank's rows of the sum, [n N].

    inner: M of all ranks together, so that ranks whose slices differ take the same way; None: no slices differ.
    """
    if overlap:
        made: Tensor = _MatmulScatter.apply(x, weight_NM, group, inner)  # type: ignore[no-untyped-call]
        return made
    return scatter(F.linear(x, weight_NM), group)


@torch.compiler.disable
def matmul_reduce(
    x: Tensor, weight_NM: Tensor, group: Group, overlap: bool = False, inner: int | None = None
) -> Tensor:
    """[.. M/tp] -> [.. N], the sum, on every rank.  inner: see `matmul_scatter`."""
    chosen = _choice("matmul_all_reduce", x, weight_NM, group, inner) if overlap else None
    if chosen is not None:
        made: Tensor = _MatmulReduce.apply(x, weight_NM, group, chosen)  # type: ignore[no-untyped-call]
        return made
    return reduce(F.linear(x, weight_NM), group)


def _choice(op: str, x: Tensor, weight_NM: Tensor, group: Group, inner: int | None) -> Candidate | None:
    """The candidate that all ranks take; None for plain.  x: what has as many rows as the whole product."""
    count, N, M = x.shape[:-1].numel(), *weight_NM.shape
    M = M if inner is None else -(-inner // group.size)
    sizes = (count, M, N) if op == "all_gather_matmul" else (count, N, M)
    return pick(Problem(op, *sizes, x.dtype, group.size), group)


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NM: Tensor, group: Group, inner: int | None) -> Tensor:
        x_RM = x.flatten(0, -2)
        ctx.save_for_backward(x_RM, weight_NM)
        ctx.group, ctx.shape, ctx.inner = group, x.shape, inner
        rows = [slice(*split(len(x_RM), group.size, rank)) for rank in range(group.size)]
        shape = (rows[group.rank].stop - rows[group.rank].start, len(weight_NM))
        chosen = _choice("matmul_reduce_scatter", x_RM, weight_NM, group, inner)
        if chosen is not None:
            made_rN = x.new_empty(shape)
            chosen(x_RM, weight_NM, None, group, made_rN)
            return made_rN

        def product(rank: int, out: Tensor | None) -> Tensor:
            return torch.mm(x_RM[rows[rank]], weight_NM.t(), out=out)

        return start_parts(product, shape, x.dtype, group, "scatter").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rN: Tensor) -> tuple[Tensor | None, ...]:
        x_RM, weight_NM = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx_RM, grad_RN = _gather_product(grad_rN, x_RM, weight_NM, ctx.group, ctx.inner, wants_x)
        dweight = grad_RN.t() @ x_RM if wants_weight else None
        return dx_RM.view(ctx.shape) if wants_x else None, dweight, None, None


def _gather_product(
    grad_rN: Tensor, x_RM: Tensor, weight_NM: Tensor, group: Group, inner: int | None, wants_x: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x, if wanted, and all rows of the one that it is made of."""
    count = len(x_RM)
    dx_RM = torch.empty_like(x_RM)
    chosen = _choice("all_gather_matmul", x_RM, weight_NM, group, inner) if wants_x else None
    if chosen is not None:
        grad_RN = grad_rN.new_empty(count, len(weight_NM))
        chosen(grad_rN, [weight_NM.t()], [None], group, count, [dx_RM], grad_RN)
        return dx_RM, grad_RN
    arriving: Handle[Tensor] = start_gather(grad_rN, group, count, "gather gradient")
    start, stop = split(count, group.size, group.rank)
    if wants_x:
        torch.mm(grad_rN, weight_NM, out=dx_RM[start:stop])
    grad_RN = arriving.wait()
    for low, high in ((0, start), (stop, count)) if wants_x else ():
        if low < high:
            torch.mm(grad_RN[low:high], weight_NM, out=dx_RM[low:high])
    return dx_RM, grad_RN


class _MatmulReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NM: Tensor, group: Group, chosen: Candidate) -> Tensor:
        ctx.save_for_backward(x, weight_NM)
        made = x.new_empty(*x.shape[:-1], len(weight_NM))
        chosen(x.flatten(0, -2), weight_NM, None, group, made.view(-1, len(weight_NM)))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NM = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if wants_weight else None
        return grad @ weight_NM if wants_x else None, dweight, None, None
