"""Changes of layout that gradients flow through: each collective beside its dual.

    forward                                  backward
    gather    "n/tp D" -> "n D"              scatter   "n D +tp" -> "n/tp D"
    scatter   "n D +tp" -> "n/tp D"          gather
    copy      "n D" -> "n D", untouched      reduce    "n D +tp" -> "n D"
    reduce    "n D +tp" -> "n D"             copy
    whole     "n/tp D" -> "n D"              slice     of a gradient that every rank has in full
    columns   "n V/tp" -> "n V"              slice     of the last dimension
    agree     "n D" -> "n D", same bits      copy      of what every rank has computed alike
    Exchange  rows to the ranks they ask for exchange  back

n are the rows: all dimensions but the last, flattened.  Which of `gather` and `whole` is right hangs on who reads the
result: ranks that each do a part of the work (their gradients add up), or all of them the same work (one is enough).
Splits are balanced, nothing has to divide.

`start_gather`, `start_scatter`, `start_reduce` are the transfers alone, as `Handle`s, for products that run meanwhile.

`scatter` and `reduce` stay in the graph where the compiler traces them (`operator.py`); the others end it, since two
gathers of one layer's experts would have no order there.  They keep the tracer out (`torch.compiler.disable`): it would
go on inside of them, piece by piece, and PyTorch (2.13) restores a result that is its argument's memory as bytes with
the bytes' count but the argument's element type, beyond its end, once sizes vary from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives.groups import Group
from interlace.collectives.handle import Handle
from interlace.collectives.operator import Operator, entry
from interlace.collectives.ops import all_gather, all_to_all
from interlace.collectives.ordered import all_reduce, balanced, ordered_sum, pass_on, reduce_scatter, then
from interlace.layout import split

# --- transfers -------------------------------------------------------------------------------------------------------


def start_gather(x_nD: Tensor, group: Group, count: int, name: str = "gather") -> Handle[Tensor]:
    """This rank's rows [.. D] -> all `count` of them, [count D]."""
    width = x_nD.shape[-1]
    sizes = [rows * width for rows in balanced(count, group.size)]
    moved = all_gather(x_nD.contiguous().view(-1), group, sizes=sizes, name=name)
    return Handle(lambda: moved.wait().view(count, width))


def start_scatter(x_ND: Tensor, group: Group, name: str = "scatter", out: Tensor | None = None) -> Handle[Tensor]:
    """This rank's part of a sum [.. D] -> its rows of the whole sum, [n D], in `out` if there is one."""
    width = x_ND.shape[-1]
    flat = x_ND.contiguous().view(-1)
    sizes = [rows * width for rows in balanced(flat.numel() // width, group.size)]
    total = _sum_of(flat, sizes[group.rank], group)
    if total is None and out is not None and out.is_contiguous():
        total = out.view(-1)
    moved = reduce_scatter(flat, group, sizes=sizes, out=total, name=name)

    def rows() -> Tensor:
        found = moved.wait().view(-1, width)
        if out is None:
            return found.to(x_ND.dtype)
        return out if found.data_ptr() == out.data_ptr() else out.copy_(found)

    return Handle(rows)


def start_reduce(x: Tensor, group: Group, name: str = "reduce") -> Handle[Tensor]:
    """This rank's part of a sum -> the sum, in the same shape; `x` itself is the place where it arrives."""
    assert x.is_contiguous()
    flat = x.view(-1)
    sizes = balanced(flat.numel(), group.size)
    total = _sum_of(flat, sizes[group.rank], group)
    if total is None:
        moved = all_reduce(flat, group, name=name)
        return Handle(lambda: moved.wait().view(x.shape))
    first = reduce_scatter(flat, group, sizes=sizes, out=total, name=name)
    own = flat.split(sizes)[group.rank]
    second = then(first, group, lambda: all_gather(own, group, sizes=sizes, out=flat, source=total, name=name))
    return Handle(lambda: second.wait().view(x.shape))


def start_parts(
    product: Callable[[int, Tensor | None], Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    group: Group,
    name: str = "scatter",
) -> Handle[Tensor]:
    """A reduce-scatter of parts that are made one after another: the sum over ranks of `product(this rank)`.

    product: (rank, where to, or None) -> this rank's part of that rank's rows, contiguous.  Those of the next peer are
    made first and travel while the others are made, the own ones last.  shape: of the own part.  One scatter in counts
    and bytes; the same sum, in rank order.
    """
    parts = torch.empty(group.size, *shape, dtype=dtype, device=group.device)
    moving = []
    for step in range(1, group.size):
        to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
        moving.append(pass_on(product(to, None), parts[source], group, to, source, is_first=step == 1, name=name))
    product(group.rank, parts[group.rank])

    def added() -> Tensor:
        for transfer in moving:
            transfer.wait()
        wide = dtype.itemsize == 2 and group.size > 2
        total = torch.empty(shape, dtype=torch.float32 if wide else dtype, device=group.device)
        return ordered_sum(parts, total).to(dtype)

    return Handle(added)


def _sum_of(flat: Tensor, count: int, group: Group) -> Tensor | None:
    """A place for a sum of more than two 16-bit numbers, which is taken in fp32 and rounded once; None for others."""
    wide = flat.dtype.itemsize == 2 and group.size > 2
    return flat.new_empty(count, dtype=torch.float32) if wide else None


# --- with gradients --------------------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather(x_nD: Tensor, group: Group, count: int) -> Tensor:
    """All `count` rows: [.. n D] -> [count D]; gradients of all ranks add up."""
    return _Gather.apply(x_nD, group, count)  # type: ignore[no-any-return, no-untyped-call]


def scatter(x_ND: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum over ranks: [.. D] -> [n D]."""
    if torch.compiler.is_compiling():
        return _TRACED_SCATTER(group.key, x_ND)  # type: ignore[no-any-return]
    return _Scatter.apply(x_ND, group, False)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def copy(x: Tensor, group: Group) -> Tensor:
    """x as it is; gradients of all ranks add up."""
    return _Copy.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which every rank then uses alike: any shape."""
    if torch.compiler.is_compiling():
        return _TRACED_REDUCE(group.key, x)  # type: ignore[no-any-return]
    return _Reduce.apply(x, group, False)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def whole(x_nD: Tensor, group: Group, count: int) -> Tensor:
    """All `count` rows, which every rank then uses alike: [.. n D] -> [count D]."""
    return _Whole.apply(x_nD, group, count)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def agree(x: Tensor, group: Group) -> Tensor:
    """What every rank has computed alike, with the same bits on all of them: a slice of rows from each."""
    return _Agree.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def columns(x_NV: Tensor, group: Group, count: int) -> Tensor:
    """All `count` columns, which every rank then uses alike: [.. V/tp] -> [.. V]."""
    rows = x_NV.shape[:-1]
    turned: Tensor = whole(x_NV.reshape(-1, x_NV.shape[-1]).t(), group, count)
    return turned.t().reshape(*rows, count)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        return start_gather(x, group, count).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return start_scatter(grad, ctx.group).wait().view(ctx.shape), None, None


def _gathered(group: Group, x_nD: Tensor, count: int) -> Tensor:
    made = start_gather(x_nD, group, count).wait()
    return made if group.size > 1 else made.clone()


def _scattered(group: Group, x_ND: Tensor) -> Tensor:
    made = start_scatter(x_ND, group).wait()
    return made if group.size > 1 else made.clone()


def _reduced(group: Group, x: Tensor) -> Tensor:
    return start_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def _like_scattered(group: Group, x_ND: Tensor) -> Tensor:
    start, stop = split(x_ND.shape[:-1].numel(), group.size, group.rank)
    return x_ND.new_empty(stop - start, x_ND.shape[-1])


GATHERED = Operator(
    "gathered(Tensor x, SymInt count) -> Tensor",
    _gathered,
    lambda group, x_nD, count: x_nD.new_empty(count, x_nD.shape[-1]),
)
SCATTERED = Operator("scattered(Tensor x) -> Tensor", _scattered, _like_scattered)
REDUCED = Operator("reduced(Tensor x) -> Tensor", _reduced, lambda group, x: x.new_empty(x.shape))


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, traced: bool) -> Tensor:
        ctx.group, ctx.traced, ctx.shape = group, traced, x.shape
        made: Tensor = SCATTERED(group, traced, x)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole: Tensor = GATHERED(ctx.group, ctx.traced, grad, ctx.shape[:-1].numel())
        return whole.view(ctx.shape), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return start_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group).wait(), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, traced: bool) -> Tensor:
        made: Tensor = REDUCED(group, traced, x)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


_TRACED_SCATTER = entry("scatter(Tensor x) -> Tensor", lambda group, x: _Scatter.apply(x, group, True))  # type: ignore[no-untyped-call]
_TRACED_REDUCE = entry("reduce(Tensor x) -> Tensor", lambda group, x: _Reduce.apply(x, group, True))  # type: ignore[no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        return start_gather(x, group, count).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.split(balanced(len(grad), ctx.group.size))[ctx.group.rank].reshape(ctx.shape), None, None


class _Agree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        own = rows.split(balanced(len(rows), group.size))[group.rank]
        return start_gather(own, group, len(rows)).wait().view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class Exchange:
    """Rows on their way to other ranks: `Exchange(x_RD, group, given, taken)` starts, `rows()` waits -> [sum(taken) D].

    given: rows for each rank, which stand together in x in their order; taken: rows from each.  Gradients travel back
    in the same way: they leave where backward reaches the result and are waited for where it reaches x, so that what
    forward computes in between, backward computes in between too.  `rows` is called once.
    """

    def __init__(
        self, x_RD: Tensor, group: Group, given: Sequence[int], taken: Sequence[int], name: str = "exchange"
    ) -> None:
        self.group, self.given, self.taken, self.name = group, list(given), list(taken), name
        self._under_way: Handle[Tensor] | None = None
        self._token: Tensor = _Depart.apply(x_RD, self)  # type: ignore[no-untyped-call]

    def rows(self) -> Tensor:
        return _Arrive.apply(self._token, self)  # type: ignore[no-any-return, no-untyped-call]

    def start(self, x_RD: Tensor, back: bool) -> None:
        width = x_RD.shape[1]
        send, receive = ([rows * width for rows in counts] for counts in (self.given, self.taken))
        if back:
            send, receive = receive, send
        moving = all_to_all(
            x_RD.contiguous().view(-1), self.group, send_sizes=send, receive_sizes=receive, name=self.name
        )
        self._under_way = Handle(lambda: moving.wait().view(-1, width))

    def finish(self) -> Tensor:
        moving, self._under_way = self._under_way, None
        assert moving is not None, f"{self.name} has not been started"
        return moving.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(x, back=False)
        return x.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.finish(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.start(grad, back=True)
        return grad.new_zeros(0), None
