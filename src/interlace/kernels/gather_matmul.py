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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group, Handle
from interlace.collectives.autograd import start_gather, start_reduce, start_scatter
from interlace.collectives.operator import Operator, entry
from interlace.kernels.candidate import CALM, Problem, pays_to_cut, pick, refuse_misfits
from interlace.layout import split
from interlace.plan.overlap import joins


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
    if torch.compiler.is_compiling():
        made: list[Tensor] = _TRACED(group.key, x, list(weights), list(biases), count, policy, keeps, columns)
        return made
    return _apply(group, x, weights, biases, count, policy, keeps, columns, traced=False)


def _apply(
    group: Group,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    count: int | None,
    policy: str,
    keeps: bool,
    columns: int,
    traced: bool = True,
) -> list[Tensor]:
    way = _Way(group, count, policy, keeps, columns, traced)
    made = _GatherMatmul.apply(x, way, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return list(made)


@dataclass(frozen=True, eq=False)
class _Way:
    """How one product is done, the same in both directions."""

    group: Group
    count: int | None
    policy: str
    keeps: bool
    columns: int
    traced: bool

    @property
    def is_whole(self) -> bool:
        """Whether backward finds all rows without a second gather."""
        return self.count is None or self.keeps or self.policy == "off"


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way, number: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:number], parameters[number:]
        options = (way.count, way.policy, way.keeps, way.columns)
        *made, x_rows = _PRODUCTS(way.group, way.traced, x, list(weights), list(biases), *options)
        ctx.way, ctx.shape = way, x.shape
        is_made = _holds_whole(way.group, way.count, way.policy, way.keeps)
        ctx.save_for_backward(x_rows if is_made else x.flatten(0, -2), *weights)
        shape = x.shape[:-1] if way.count is None else torch.Size((way.count,))
        return tuple(y_NM.view(*shape, y_NM.shape[-1]) for y_NM in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_rows, *weights = ctx.saved_tensors
        way, flat = ctx.way, [grad.flatten(0, -2) for grad in grads]
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        options = (way.count, way.policy, way.is_whole, way.columns)
        made = iter(_GRADIENTS(way.group, way.traced, flat, x_rows, weights, wanted, *options))
        dx, *others = (next(made) if each else None for each in wanted)
        return None if dx is None else dx.view(ctx.shape), None, None, *others


def _products(
    group: Group,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    count: int | None,
    policy: str,
    keeps: bool,
    columns: int,
) -> list[Tensor]:
    """The products [N M], and the rows that backward needs; none of them where those are x's own."""
    refuse_misfits(x, weights, biases, group, count)
    pairs = list(zip(weights, biases, strict=True))
    x_rows = x.flatten(0, -2)
    if count is None:
        return [*(_product(x_rows, *pair) for pair in pairs), x.new_empty(0)]
    if policy != "off":
        whole, made = _beside(x, pairs, group, count, keeps, columns, policy)
    else:
        whole = start_gather(x, group, count, "gather for matmul").wait()
        made = [_product(whole, *pair) for pair in pairs]
    return [*made, whole if _holds_whole(group, count, policy, keeps) else x.new_empty(0)]


def _like_products(
    group: Group,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    count: int | None,
    policy: str,
    keeps: bool,
    columns: int,
) -> list[Tensor]:
    rows = x.shape[:-1].numel() if count is None else count
    made = [x.new_empty(rows, len(weight)) for weight in weights]
    return [*made, x.new_empty(rows, x.shape[-1]) if _holds_whole(group, count, policy, keeps) else x.new_empty(0)]


def _holds_whole(group: Group, count: int | None, policy: str, keeps: bool) -> bool:
    """Whether forward makes rows that backward needs; a group of one has all in x."""
    return count is not None and group.size > 1 and (keeps or policy == "off")


def _gradients(
    group: Group,
    flat: Sequence[Tensor],
    x_rows: Tensor,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    count: int | None,
    policy: str,
    is_whole: bool,
    columns: int,
) -> list[Tensor]:
    """Those that are `wanted` of x [rows D], the weights and the biases, from those of the products."""
    wants_x, wants, wants_bias = wanted[0], wanted[1 : 1 + len(flat)], wanted[1 + len(flat) :]
    whole: Handle[Tensor] = Handle.done(x_rows)
    if not is_whole and any(wants):
        assert count is not None
        whole = start_gather(x_rows, group, count, "gather again")
    together, factors = flat, weights
    if _joins(weights, group, count, policy, columns):
        together, factors = [torch.cat(list(flat), 1)], [torch.cat(list(weights))]
    arriving = _gradient(group, together, factors, count, policy, columns) if wants_x else None
    if arriving is not None and policy == "off":
        arriving.wait()
    if together is not flat and all(wants):
        widths = [len(weight) for weight in weights]
        made = [part.clone() for part in (together[0].t() @ whole.wait()).split(widths)]
    else:
        made = [grad.t() @ whole.wait() for grad, wanted in zip(flat, wants, strict=True) if wanted]
    made += [grad.sum(0) for grad, wanted in zip(flat, wants_bias, strict=True) if wanted]
    return made if arriving is None else [arriving.wait(), *made]


def _like_gradients(
    group: Group,
    flat: Sequence[Tensor],
    x_rows: Tensor,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    count: int | None,
    policy: str,
    is_whole: bool,
    columns: int,
) -> list[Tensor]:
    wants_x, wants, wants_bias = wanted[0], wanted[1 : 1 + len(flat)], wanted[1 + len(flat) :]
    made = [x_rows.new_empty(weight.shape) for weight, wanted in zip(weights, wants, strict=True) if wanted]
    made += [grad.new_empty(grad.shape[1]) for grad, wanted in zip(flat, wants_bias, strict=True) if wanted]
    if not wants_x:
        return made
    start, stop = (0, len(flat[0])) if count is None else split(count, group.size, group.rank)
    return [x_rows.new_empty(stop - start, x_rows.shape[1]), *made]


_OPTIONS = "SymInt? count, str policy, bool {}, int columns) -> Tensor[]"
_FORWARD = "(Tensor x, Tensor[] weights, Tensor?[] biases, " + _OPTIONS.format("keeps")
_PRODUCTS = Operator(f"gather_matmul_products{_FORWARD}", _products, _like_products)
_GRADIENTS = Operator(
    "gather_matmul_gradients(Tensor[] grads, Tensor x, Tensor[] weights, bool[] wanted, " + _OPTIONS.format("is_whole"),
    _gradients,
    _like_gradients,
)
_TRACED = entry(f"gather_matmul{_FORWARD}", _apply)


def _gradient(
    group: Group, flat: Sequence[Tensor], weights: Sequence[Tensor], count: int | None, policy: str, columns: int
) -> Handle[Tensor]:
    """The gradient of x, on its way."""
    if count is not None and policy != "off":
        K = weights[0].shape[1]
        inner = -(-columns // group.size)
        problem = Problem("matmul_reduce_scatter", count, K, inner, flat[0].dtype, group.size)
        fused = pick(problem, group, policy, len(flat))
        if fused is not None:
            start, stop = split(count, group.size, group.rank)
            dx_nD = flat[0].new_empty(stop - start, K)
            if len(flat) == 1:
                fused(flat[0], weights[0].t(), None, group, dx_nD)
            else:
                from interlace.kernels.scatter_parts import sum_of_several  # needs Triton

                pairs = [(grad, weight.t()) for grad, weight in zip(flat, weights, strict=True)]
                sum_of_several(pairs, None, group, dx_nD, fused.options.chunks)
            return Handle.done(dx_nD)
    dx_ND = flat[0] @ weights[0]
    for grad, weight in zip(flat[1:], weights[1:], strict=True):
        dx_ND.addmm_(grad, weight)
    if count is None:
        return start_reduce(dx_ND, group, "reduce gradient")
    return start_scatter(dx_ND, group, "scatter gradient")


def _beside(
    x: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor | None]],
    group: Group,
    count: int,
    keeps: bool,
    columns: int,
    policy: str,
) -> tuple[Tensor, list[Tensor]]:
    """What is saved, and the products, made while rows arrive."""
    x_nD, (weights, biases) = x.flatten(0, -2), zip(*pairs, strict=True)
    made = [x.new_empty(count, len(weight)) for weight in weights]
    N, D = -(-columns // group.size), x.shape[-1]
    has_bias = any(bias is not None for bias in biases)
    fused = pick(Problem("all_gather_matmul", count, N, D, x.dtype, group.size, has_bias), group, policy)
    if fused is not None:
        x_ND = x.new_empty(count, D) if keeps else None
        if _joins(weights, group, count, policy, columns):
            widths = [len(weight) for weight in weights]
            joined = x.new_empty(count, sum(widths))
            bias = torch.cat([_or_zeros(*pair) for pair in pairs]) if has_bias else None
            fused(x_nD, [torch.cat(list(weights))], [bias], group, count, [joined], x_ND)
            for y, part in zip(made, joined.split(widths, 1), strict=True):
                y.copy_(part)
        else:
            fused(x_nD, weights, biases, group, count, made, x_ND)
        return x_nD if x_ND is None else x_ND, made
    if not pays_to_cut(2.0 * x_nD.numel() * sum(len(weight) for weight in weights), x.device):
        x_ND = start_gather(x, group.in_order(), count, "gather for matmul").wait()
        fill(x_ND, weights, biases, made, 0, count)
        return x_ND if keeps else x_nD, made
    arriving = start_gather(x, group, count, "gather for matmul")
    start, stop = split(count, group.size, group.rank)
    fill(x_nD, weights, biases, made, start, stop)
    x_ND = arriving.wait()
    for first, last in ((0, start), (stop, count)):
        fill(x_ND[first:last], weights, biases, made, first, last)
    return x_ND if keeps else x_nD, made


def _joins(weights: Sequence[Tensor], group: Group, count: int | None, policy: str, columns: int) -> bool:
    """The same on every rank, whose weights may differ in width."""
    if count is None or len(weights) == 1 or group.size == 1 or policy in CALM:
        return False
    return joins(count, -(-columns // group.size))


def _or_zeros(weight: Tensor, bias: Tensor | None) -> Tensor:
    return weight.new_zeros(len(weight)) if bias is None else bias


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
