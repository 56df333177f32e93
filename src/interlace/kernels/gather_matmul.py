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
from interlace.kernels import workspace
from interlace.kernels.candidate import Candidate, Problem, candidates, choose
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
    policy: str = "auto",
) -> list[Tensor]:
    """One [count N] for every weight [N D].

    x: this rank's rows [.. n D] of `count`, or all of them with count None, and then the results have its leading
    dimensions.  overlap: False lets every transfer run by itself.  keep: whether the gathered rows stay until backward.
    columns: the outputs of all ranks' weights together, needed where ranks hold different numbers of them.  policy: by
    which a candidate is chosen (`kernels.tune.lookup`).
    """
    keeps = keep and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    columns = sum(len(weight) for weight in weights) * group.size if columns is None else columns
    policy = policy if overlap else "off"
    made = _GatherMatmul.apply(x, group, count, policy, keeps, columns, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return list(made)


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        count: int | None,
        policy: str,
        keeps: bool,
        columns: int,
        number: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:number], parameters[number:]
        pairs = list(zip(weights, biases, strict=True))
        ctx.group, ctx.count, ctx.policy, ctx.shape, ctx.columns = group, count, policy, x.shape, columns
        ctx.is_whole = count is None or keeps or policy == "off"
        x_rows = x.flatten(0, -2)
        if count is None:
            made = [_product(x_rows, *pair) for pair in pairs]
        elif policy != "off":
            whole = x.new_empty(count, x.shape[-1]) if keeps else None
            made = [x.new_empty(count, len(weight)) for weight in weights]
            problem = _problem("all_gather_matmul", count, columns, x_rows, group, biases)
            _chosen(problem, group, policy)(x_rows, weights, biases, group, count, made, whole)
            x_rows = x_rows if whole is None else whole
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
        if arriving is not None and ctx.policy == "off":
            arriving.wait()
        dweights = [grad.t() @ whole.wait() if wanted else None for grad, wanted in zip(flat, wants, strict=False)]
        dbiases = [grad.sum(0) if wanted else None for grad, wanted in zip(flat, wants[len(flat) :], strict=True)]
        dx = None if arriving is None else arriving.wait().view(ctx.shape)
        return dx, *[None] * 6, *dweights, *dbiases


def _gradient(ctx: Any, flat: Sequence[Tensor], weights: Sequence[Tensor]) -> Handle[Tensor]:
    """The gradient of x, on its way."""
    group, count = ctx.group, ctx.count
    if count is not None and ctx.policy != "off" and len(flat) == 1:
        K = weights[0].shape[1]
        inner = -(-ctx.columns // group.size)
        problem = Problem("matmul_reduce_scatter", count, K, inner, flat[0].dtype, group.size)
        fused = _chosen(problem, group, ctx.policy)
        if fused.name != "plain":
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


def _problem(op: str, count: int, columns: int, x_nD: Tensor, group: Group, biases: Sequence[Tensor | None]) -> Problem:
    N = -(-columns // group.size)
    return Problem(op, count, N, x_nD.shape[1], x_nD.dtype, group.size, any(bias is not None for bias in biases))


def _chosen(problem: Problem, group: Group, policy: str) -> Candidate:
    """The same on every rank; where ranks cannot address each other's memory, the plain one."""
    found = choose(problem, group.device, policy)
    if found.name != "plain" and not workspace.reachable(group):
        return candidates(problem.op)["plain"]
    return found


def _product(x_ND: Tensor, weight_MD: Tensor, bias_M: Tensor | None) -> Tensor:
    return x_ND @ weight_MD.t() if bias_M is None else torch.addmm(bias_M, x_ND, weight_MD.t())
