"""Gather rows, then multiply: the products at the entrance of a split layer.

`gather_matmul(x, weights, biases, group, count)` equals

    x_ND = all_gather(x_nD);  y_i = x_ND @ weight_i.T + bias_i      for every weight, after one gather
    backward: dx_nD = reduce_scatter(sum over i of dy_i @ weight_i);  dweight_i = dy_i.T @ x_ND

and with count = None, where every rank has all rows, the same without the gather, its gradient all-reduced.  Weights
hold a slice of their rows (outputs).  Quicker than that because products run while rows arrive, by the candidate that
`kernels/candidate.py` chooses for the shape.

Backward sends the gradient of x while the weights' gradients are computed.  With one weight, the product and the
scatter of that gradient may be one fused operation; with several, their sum is one product after another and the
scatter comes last, since putting their factors side by side costs more than the fusion gains
(docs/notes/0012-fused-gather.md).  The gathered rows are kept for backward, so that they travel once; with keep=False
only the own ones are, and the others travel again while the gradient of x is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group, Handle
from interlace.collectives.autograd import start_gather, start_reduce, start_scatter
from interlace.kernels.candidate import Problem, pick
from interlace.layout import split


@torch.compiler.disable
def gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int | None,
    overlap: bool = True,
    keep: bool = True,
    columns: int | None = None,
) -> list[Tensor]:
    """One [count N] for every weight [N D].

    x: this rank's rows [.. n D] of `count`, or all of them with count None, and then the results have its leading
    dimensions.  overlap: False lets every transfer run by itself.  keep: whether the gathered rows stay until backward.
    columns: the outputs of all ranks' weights together, needed where ranks hold different numbers of them.
    """
    keeps = keep and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    columns = sum(len(weight) for weight in weights) * group.size if columns is None else columns
    made = _GatherMatmul.apply(x, group, count, overlap, keeps, columns, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return list(made)


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        count: int | None,
        overlap: bool,
        keeps: bool,
        columns: int,
        number: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:number], parameters[number:]
        pairs = list(zip(weights, biases, strict=True))
        ctx.group, ctx.count, ctx.overlap, ctx.shape, ctx.columns = group, count, overlap, x.shape, columns
        ctx.is_whole = count is None or keeps or not overlap
        x_rows = x.flatten(0, -2)
        if count is None:
            made = [_product(x_rows, *pair) for pair in pairs]
        elif overlap:
            x_rows, made = _beside(x, pairs, group, count, keeps, columns)
        else:
            x_rows = start_gather(x, group, count, "gather for matmul").wait()
            made = [_product(x_rows, *pair) for pair in pairs]
        ctx.save_for_backward(x_rows, *weights)
        shape = x.shape[:-1] if count is None else torch.Size((count,))
        return tuple(y_NM.view(*shape, y_NM.shape[-1]) for y_NM in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_rows, *weights = ctx.saved_tensors
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
        flat = [grad.flatten(0, -2) for grad in grads]
        whole: Handle[Tensor] = Handle.done(x_rows)
        if not ctx.is_whole and any(wants[: len(flat)]):
            whole = start_gather(x_rows, ctx.group, ctx.count, "gather again")
        arriving = _gradient(ctx, flat, weights) if wants_x else None
        if arriving is not None and not ctx.overlap:
            arriving.wait()
        dweights = [grad.t() @ whole.wait() if wanted else None for grad, wanted in zip(flat, wants, strict=False)]
        dbiases = [grad.sum(0) if wanted else None for grad, wanted in zip(flat, wants[len(flat) :], strict=True)]
        dx = None if arriving is None else arriving.wait().view(ctx.shape)
        return dx, *[None] * 6, *dweights, *dbiases


def _gradient(ctx: Any, flat: Sequence[Tensor], weights: Sequence[Tensor]) -> Handle[Tensor]:
    """The gradient of x, on its way."""
    group, count = ctx.group, ctx.count
    if count is not None and ctx.overlap and len(flat) == 1:
        K = weights[0].shape[1]
        inner = -(-ctx.columns // group.size)
        fused = pick(Problem("matmul_reduce_scatter", count, K, inner, flat[0].dtype, group.size), group)
        if fused is not None:
            start, stop = split(count, group.size, group.rank)
            dx_nD = flat[0].new_empty(stop - start, K)
            fused(flat[0], weights[0].t(), None, group, dx_nD)
            return Handle.done(dx_nD)
    dx_ND = flat[0] @ weights[0]
    for grad, weight in zip(flat[1:], weights[1:], strict=True):
        dx_ND.addmm_(grad, weight)
    if count is None:
        return start_reduce(dx_ND, group, "reduce gradient")
    return start_scatter(dx_ND, group, "scatter gradient")


def _beside(
    x: Tensor, pairs: Sequence[tuple[Tensor, Tensor | None]], group: Group, count: int, keeps: bool, columns: int
) -> tuple[Tensor, list[Tensor]]:
    """What is saved, and the products, made while rows arrive."""
    x_nD, (weights, biases) = x.flatten(0, -2), zip(*pairs, strict=True)
    made = [x.new_empty(count, len(weight)) for weight in weights]
    N, D = -(-columns // group.size), x.shape[-1]
    has_bias = any(bias is not None for bias in biases)
    fused = pick(Problem("all_gather_matmul", count, N, D, x.dtype, group.size, has_bias), group)
    if fused is not None:
        x_ND = x.new_empty(count, D) if keeps else None
        fused(x_nD, weights, biases, group, count, made, x_ND)
        return x_nD if x_ND is None else x_ND, made
    arriving = start_gather(x, group, count, "gather for matmul")
    start, stop = split(count, group.size, group.rank)
    fill(x_nD, weights, biases, made, start, stop)
    x_ND = arriving.wait()
    for first, last in ((0, start), (stop, count)):
        fill(x_ND[first:last], weights, biases, made, first, last)
    return x_ND if keeps else x_nD, made


def fill(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], made: Sequence[Tensor], low: int, high: int
) -> None:
    """Rows [low, high) of every result, by the library's product of `x`, which are those rows."""
    if low == high:
        return
    for y, weight, bias in zip(made, weights, biases, strict=True):
        if bias is None:
            torch.mm(x, weight.t(), out=y[low:high])
        else:
            torch.addmm(bias, x, weight.t(), out=y[low:high])


def _product(x_ND: Tensor, weight_MD: Tensor, bias_M: Tensor | None) -> Tensor:
    return x_ND @ weight_MD.t() if bias_M is None else torch.addmm(bias_M, x_ND, weight_MD.t())
