"""Gather rows, then multiply: the products at the entrance of a split layer.

`gather_matmul(x, weights, biases, group, count)` equals

    x_ND = all_gather(x_nD);  y_i = x_ND @ weight_i.T + bias_i      for every weight, after one gather
    backward: dx_nD = reduce_scatter(sum over i of dy_i @ weight_i);  dweight_i = dy_i.T @ x_ND

and with count = None, where every rank has all rows, the same without the gather, its gradient all-reduced.  Weights
hold a slice of their rows (outputs).  Quicker than that because the own rows are multiplied while the others arrive,
and the gradient of x travels while the weights' gradients are computed.  The gathered rows are kept for backward, so
that they travel once.

A fused kernel of the same contract may take the place of the composition here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group
from interlace.collectives.autograd import start_gather, start_reduce, start_scatter
from interlace.layout import split


@torch.compiler.disable
def gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int | None,
    overlap: bool = True,
) -> list[Tensor]:
    """One [count N] for every weight [N D].

    x: this rank's rows [.. n D] of `count`, or all of them with count None, and then the results have its leading
    dimensions.  overlap: False lets every transfer run by itself.
    """
    made = _GatherMatmul.apply(x, group, count, overlap, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return list(made)


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, count: int | None, overlap: bool, number: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:number], parameters[number:]
        pairs = list(zip(weights, biases, strict=True))
        ctx.group, ctx.count, ctx.overlap, ctx.shape = group, count, overlap, x.shape
        if count is None:
            x_ND = x.flatten(0, -2)
            made = [_product(x_ND, *pair) for pair in pairs]
        else:
            arriving = start_gather(x, group, count, "gather for matmul")
            if overlap:
                made = [x.new_empty(count, len(weight)) for weight in weights]
                start, stop = split(count, group.size, group.rank)
                _fill(made, x.flatten(0, -2), pairs, start, stop)
                x_ND = arriving.wait()
                for first, last in ((0, start), (stop, count)):
                    _fill(made, x_ND[first:last], pairs, first, last)
            else:
                x_ND = arriving.wait()
                made = [_product(x_ND, *pair) for pair in pairs]
        ctx.save_for_backward(x_ND, *weights)
        shape = x.shape[:-1] if count is None else torch.Size((count,))
        return tuple(y_NM.view(*shape, y_NM.shape[-1]) for y_NM in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, *weights = ctx.saved_tensors
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        flat = [grad.flatten(0, -2) for grad in grads]
        dx = arriving = None
        if wants_x:
            dx_ND = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                dx_ND.addmm_(grad, weight)
            if ctx.count is None:
                arriving = start_reduce(dx_ND, ctx.group, "reduce gradient")
            else:
                arriving = start_scatter(dx_ND, ctx.group, "scatter gradient")
            if not ctx.overlap:
                arriving.wait()
        dweights = [grad.t() @ x_ND if wanted else None for grad, wanted in zip(flat, wants, strict=False)]
        dbiases = [grad.sum(0) if wanted else None for grad, wanted in zip(flat, wants[len(flat) :], strict=True)]
        if arriving is not None:
            dx = arriving.wait().view(ctx.shape)
        return dx, None, None, None, None, *dweights, *dbiases


def _product(x_ND: Tensor, weight_MD: Tensor, bias_M: Tensor | None) -> Tensor:
    return x_ND @ weight_MD.t() if bias_M is None else torch.addmm(bias_M, x_ND, weight_MD.t())


def _fill(
    made: Sequence[Tensor], x: Tensor, pairs: Sequence[tuple[Tensor, Tensor | None]], low: int, high: int
) -> None:
    """Rows [low, high) of every result."""
    if low == high:
        return
    for y, (weight, bias) in zip(made, pairs, strict=True):
        if bias is None:
            torch.mm(x, weight.t(), out=y[low:high])
        else:
            torch.addmm(bias, x, weight.t(), out=y[low:high])
