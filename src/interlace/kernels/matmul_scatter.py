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

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group, Handle
from interlace.collectives.autograd import reduce, scatter, start_gather, start_parts, start_reduce, start_scatter
from interlace.collectives.operator import Operator, entry
from interlace.kernels.candidate import Candidate, Problem, pays_to_cut, pick, refuse_misfits
from interlace.layout import split


def matmul_scatter(
    x: Tensor, weight_NM: Tensor, group: Group, overlap: bool = False, inner: int | None = None, policy: str = "auto"
) -> Tensor:
    """[.. M/tp] -> this rank's rows of the sum, [n N].

    inner: M of all ranks together, so that ranks whose slices differ take the same way; None: no slices differ.
    policy: by which a candidate is chosen (`kernels.tune.lookup`).
    """
    if overlap and torch.compiler.is_compiling():
        made: Tensor = _TRACED_SCATTER(group.key, x, weight_NM, inner, policy)
        return made
    if overlap:
        return _apply_scatter(group, x, weight_NM, inner, policy, traced=False)
    return scatter(F.linear(x, weight_NM), group)


def matmul_reduce(
    x: Tensor, weight_NM: Tensor, group: Group, overlap: bool = False, inner: int | None = None, policy: str = "auto"
) -> Tensor:
    """[.. M/tp] -> [.. N], the sum, on every rank.  inner, policy: see `matmul_scatter`."""
    if overlap and torch.compiler.is_compiling():
        made: Tensor = _TRACED_REDUCE(group.key, x, weight_NM, inner, policy)
        return made
    if overlap and _choice("matmul_all_reduce", x, weight_NM, group, inner, policy) is not None:
        return _apply_reduce(group, x, weight_NM, inner, policy, traced=False)
    return reduce(F.linear(x, weight_NM), group)


def _choice(op: str, x: Tensor, weight_NM: Tensor, group: Group, inner: int | None, policy: str) -> Candidate | None:
    """The candidate that all ranks take; None for plain.  x: what has as many rows as the whole product."""
    count, N, M = x.shape[:-1].numel(), *weight_NM.shape
    M = M if inner is None else -(-inner // group.size)
    sizes = (count, M, N) if op == "all_gather_matmul" else (count, N, M)
    return pick(Problem(op, *sizes, x.dtype, group.size), group, policy)


# --- rows of the sum -------------------------------------------------------------------------------------------------


def _apply_scatter(
    group: Group, x: Tensor, weight_NM: Tensor, inner: int | None, policy: str, traced: bool = True
) -> Tensor:
    made: Tensor = _MatmulScatter.apply(x, weight_NM, group, inner, policy, traced)  # type: ignore[no-untyped-call]
    return made


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NM: Tensor, group: Group, inner: int | None, policy: str, traced: bool
    ) -> Tensor:
        x_RM = x.flatten(0, -2)
        ctx.save_for_backward(x_RM, weight_NM)
        ctx.group, ctx.traced, ctx.shape, ctx.way = group, traced, x.shape, (inner, policy)
        made: Tensor = _ROWS(group, traced, x_RM, weight_NM, inner, policy)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rN: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:2])
        made = iter(_ROWS_GRADIENTS(ctx.group, ctx.traced, grad_rN, *ctx.saved_tensors, wanted, *ctx.way))
        dx_RM, dweight = (next(made) if each else None for each in wanted)
        return None if dx_RM is None else dx_RM.view(ctx.shape), dweight, None, None, None, None


def _rows(group: Group, x_RM: Tensor, weight_NM: Tensor, inner: int | None, policy: str) -> Tensor:
    refuse_misfits(x_RM, [weight_NM], [None], group)
    rows = [slice(*split(len(x_RM), group.size, rank)) for rank in range(group.size)]
    shape = (rows[group.rank].stop - rows[group.rank].start, len(weight_NM))
    chosen = _choice("matmul_reduce_scatter", x_RM, weight_NM, group, inner, policy)
    if chosen is not None:
        made_rN = x_RM.new_empty(shape)
        chosen(x_RM, weight_NM, None, group, made_rN)
        return made_rN

    if not pays_to_cut(2.0 * x_RM.numel() * len(weight_NM) / group.size, x_RM.device):
        return start_scatter(torch.mm(x_RM, weight_NM.t()), group.in_order(), "scatter").wait()

    def product(rank: int, out: Tensor | None) -> Tensor:
        return torch.mm(x_RM[rows[rank]], weight_NM.t(), out=out)

    return start_parts(product, shape, x_RM.dtype, group, "scatter").wait()


def _like_rows(group: Group, x_RM: Tensor, weight_NM: Tensor, inner: int | None, policy: str) -> Tensor:
    start, stop = split(len(x_RM), group.size, group.rank)
    return x_RM.new_empty(stop - start, len(weight_NM))


def _rows_gradients(
    group: Group,
    grad_rN: Tensor,
    x_RM: Tensor,
    weight_NM: Tensor,
    wanted: Sequence[bool],
    inner: int | None,
    policy: str,
) -> list[Tensor]:
    """Those that are `wanted` of x [R M] and of the weight."""
    wants_x, wants_weight = wanted
    dx_RM, grad_RN = _gather_product(grad_rN, x_RM, weight_NM, group, inner, policy, wants_x)
    return [*([dx_RM] if wants_x else []), *([grad_RN.t() @ x_RM] if wants_weight else [])]


def _like_gradients(
    group: Group, grad: Tensor, x: Tensor, weight_NM: Tensor, wanted: Sequence[bool], *way: Any
) -> list[Tensor]:
    return [made.new_empty(made.shape) for made, each in zip((x, weight_NM), wanted, strict=True) if each]


def _gather_product(
    grad_rN: Tensor, x_RM: Tensor, weight_NM: Tensor, group: Group, inner: int | None, policy: str, wants_x: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x, if wanted, and all rows of the one that it is made of."""
    count = len(x_RM)
    dx_RM = x_RM.new_empty(x_RM.shape)
    chosen = _choice("all_gather_matmul", x_RM, weight_NM, group, inner, policy) if wants_x else None
    if chosen is not None:
        grad_RN = grad_rN.new_empty(count, len(weight_NM))
        chosen(grad_rN, [weight_NM.t()], [None], group, count, [dx_RM], grad_RN)
        return dx_RM, grad_RN
    if not wants_x or not pays_to_cut(2.0 * grad_rN.numel() * x_RM.shape[1], x_RM.device):
        grad_RN = start_gather(grad_rN, group.in_order(), count, "gather gradient").wait()
        if wants_x:
            torch.mm(grad_RN, weight_NM, out=dx_RM)
        return dx_RM, grad_RN
    arriving: Handle[Tensor] = start_gather(grad_rN, group, count, "gather gradient")
    start, stop = split(count, group.size, group.rank)
    torch.mm(grad_rN, weight_NM, out=dx_RM[start:stop])
    grad_RN = arriving.wait()
    for low, high in ((0, start), (stop, count)):
        if low < high:
            torch.mm(grad_RN[low:high], weight_NM, out=dx_RM[low:high])
    return dx_RM, grad_RN


_OPTIONS = "int? inner, str policy)"
_FORWARD = f"(Tensor x, Tensor weight, {_OPTIONS} -> Tensor"
_ROWS = Operator(f"matmul_scatter_rows{_FORWARD}", _rows, _like_rows)
_ROWS_GRADIENTS = Operator(
    f"matmul_scatter_gradients(Tensor grad, Tensor x, Tensor weight, bool[] wanted, {_OPTIONS} -> Tensor[]",
    _rows_gradients,
    _like_gradients,
)
_TRACED_SCATTER = entry(f"matmul_scatter{_FORWARD}", _apply_scatter)

# --- the whole sum ---------------------------------------------------------------------------------------------------


def _apply_reduce(
    group: Group, x: Tensor, weight_NM: Tensor, inner: int | None, policy: str, traced: bool = True
) -> Tensor:
    made: Tensor = _MatmulReduce.apply(x, weight_NM, group, inner, policy, traced)  # type: ignore[no-untyped-call]
    return made


class _MatmulReduce(torch.autograd.Function):
    """Backward has no transfer: what the compiler sees of it are plain products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NM: Tensor, group: Group, inner: int | None, policy: str, traced: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight_NM)
        made: Tensor = _SUM(group, traced, x, weight_NM, inner, policy)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NM = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if wants_weight else None
        return grad @ weight_NM if wants_x else None, dweight, None, None, None, None


def _sum(group: Group, x: Tensor, weight_NM: Tensor, inner: int | None, policy: str) -> Tensor:
    refuse_misfits(x, [weight_NM], [None], group)
    chosen = _choice("matmul_all_reduce", x, weight_NM, group, inner, policy)
    if chosen is None:
        made_RN = x.flatten(0, -2) @ weight_NM.t()
        return start_reduce(made_RN, group).wait().view(*x.shape[:-1], len(weight_NM))
    made = x.new_empty(*x.shape[:-1], len(weight_NM))
    chosen(x.flatten(0, -2), weight_NM, None, group, made.view(-1, len(weight_NM)))
    return made


_SUM = Operator(
    f"matmul_reduce_sum{_FORWARD}",
    _sum,
    lambda group, x, weight_NM, inner, policy: x.new_empty(*x.shape[:-1], len(weight_NM)),
)
_TRACED_REDUCE = entry(f"matmul_reduce{_FORWARD}", _apply_reduce)
