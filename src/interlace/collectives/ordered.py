"""Sums over ranks in a fixed order: one rounding per addition, rank 0 first, whatever the message size.

`reduce_scatter` equals `torch.distributed.reduce_scatter_tensor` with a sum and `all_reduce` equals `all_reduce`, up to
rounding.  Each rank sends every other rank that rank's slice (all-to-all) and the owner adds the slices in rank order:
the bytes of a ring, one hop instead of n - 1, the same bits in every run, and the same bits for every split of the
message.  Parts may travel in a narrower dtype than the sum's: bf16 gradients added up in fp32 are the sum of the same
numbers in half the bytes.  NCCL chooses algorithm, protocol and channel count per message size and the order of its
sums with them (NVIDIA/nccl#457, #1055, #157).  `add_parts` goes on adding to what earlier calls have summed up, so that
a sum over parts 1, 2, 3, ... does not depend on how many ranks brought them.  Tried and dropped on gloo: its own
reduce-scatter, 46 against 19 ms for a 4 MiB shard on 4 ranks of one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from interlace.collectives.groups import Group
from interlace.collectives.handle import Handle, Work, start
from interlace.collectives.ops import all_gather, exchange_parts
from interlace.collectives.window import Window
from interlace.layout import split
from interlace.streams import On

# As of `all_gather_single` in ops.py.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Add(Protocol):
    """Sums in the order of ranks; the row of the own rank is not among the parts, or nothing that may be read.

    own: [count]; parts: [ranks, count]; onto: the sum goes on from what `target` holds.
    """

    def __call__(
        self,
        own: torch.Tensor,
        parts: torch.Tensor,
        rank: int,
        target: torch.Tensor,
        scale: float = 1.0,
        /,
        *,
        onto: bool = False,
    ) -> torch.Tensor: ...


def reduce_scatter(
    flat: torch.Tensor,
    group: Group,
    *,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    wire: torch.dtype | None = None,
    scale: float = 1.0,
    window: Window | None = None,
    add: Add | None = None,
    name: str = "reduce_scatter",
) -> Handle[torch.Tensor]:
    """This rank's slice of the sum over ranks of `flat`, times `scale`.

    flat: 1-D, contiguous, sum(sizes) elements (equal slices when `sizes` is None).  `out`: where the slice goes
    (`flat`'s own part is allowed); the sum is taken in its dtype, which may be wider than `flat`'s.  `wire`: the dtype
    that travels, `flat`'s when None.  `window`: the one that begins with `flat`, whose parts are equal.
    `add`: what adds the parts up then, instead of plain operations.
    """
    if sizes is None:
        assert flat.numel() % group.size == 0, (flat.numel(), group.size)
        sizes = [flat.numel() // group.size] * group.size
    sizes = list(sizes)
    assert flat.numel() == sum(sizes)
    count = sizes[group.rank]
    target = flat.new_empty(count) if out is None else out
    if group.process_group is None:
        target.copy_(flat)
        return Handle.done(target.mul_(scale) if scale != 1.0 else target)
    wire = wire or flat.dtype
    if _is_pair(group, flat, target, wire) and sizes[0] == sizes[1] and window is None:
        return _part_of_a_pair(flat, group, target, scale, name)
    travelling = flat if wire == flat.dtype else torch.empty_like(flat, dtype=wire)
    received = travelling.new_empty(count * group.size)
    got = received.view(group.size, count)
    even = len(set(sizes)) == 1
    nbytes = (flat.numel() - count) * travelling.element_size()
    group.meter.count("reduce_scatter", group.axis, nbytes)

    def prepare() -> None:
        if travelling is not flat:
            travelling.copy_(flat)

    def launch() -> Sequence[Work]:
        if even:
            return exchange_parts(group, travelling, received, window=window, takes_own=add is None)
        return exchange_parts(group, travelling, received, sizes, [count] * group.size)

    def finish() -> torch.Tensor:
        if add is not None and window is not None:
            return add(flat.split(count)[group.rank], got, group.rank, target, scale)
        return ordered_sum(got, target, scale)

    return start(
        group.meter, group.axis, name, nbytes, group.stream, prepare, launch, finish, what=("reduce_scatter", flat)
    )


def add_parts(
    flat: torch.Tensor,
    accumulator: torch.Tensor,
    group: Group,
    *,
    valid: int,
    first: bool,
    window: Window | None = None,
    add: Add | None = None,
    name: str = "add_parts",
) -> Handle[torch.Tensor]:
    """Adds this rank's slices of `flat` of ranks 0, 1, ... valid - 1, in this order, to `accumulator`.

    Equals ((accumulator + part 0) + part 1) + ...; `first`: the accumulator begins as a copy of part 0.  So calls with
    parts 0 to w - 1, w to 2 w - 1, ... of one sum give the same bits for every number w of ranks.  Ranks from `valid`
    on only take part.  flat: 1-D, contiguous, equal slices; accumulator: one slice, not in `flat`, its dtype that of
    the sum.  `window` and `add`: see `reduce_scatter`.  Counted as a reduce-scatter.
    """
    assert group.process_group is not None and 1 <= valid <= group.size
    assert flat.numel() == accumulator.numel() * group.size
    received = torch.empty_like(flat)
    parts = received.view(group.size, -1)[:valid]
    nbytes = (flat.numel() - accumulator.numel()) * flat.element_size()
    group.meter.count("reduce_scatter", group.axis, nbytes)

    def launch() -> Sequence[Work]:
        return exchange_parts(group, flat, received, window=window, takes_own=add is None or window is None)

    def finish() -> torch.Tensor:
        if add is not None and window is not None:
            return add(flat.split(accumulator.numel())[group.rank], parts, group.rank, accumulator, onto=not first)
        return add_in_order(parts, accumulator, first)

    return start(
        group.meter, group.axis, name, nbytes, group.stream, None, launch, finish, what=("reduce_scatter", flat)
    )


def add_in_order(parts: torch.Tensor, accumulator: torch.Tensor, first: bool) -> torch.Tensor:
    """accumulator + parts[0] + parts[1] + ... in place, in this order; `first`: it begins as parts[0]."""
    if first:
        return ordered_sum(parts, accumulator)
    for part in parts:
        accumulator.add_(part)
    return accumulator


def all_reduce(
    flat: torch.Tensor,
    group: Group,
    *,
    out: torch.Tensor | None = None,
    wire: torch.dtype | None = None,
    scale: float = 1.0,
    name: str = "all_reduce",
) -> Handle[torch.Tensor]:
    """The sum over ranks of `flat`, times `scale`, on every rank: reduce-scatter, then all-gather.

    flat: 1-D, contiguous.  `out`: where the sum goes and whose dtype it is taken in; `flat` itself when None.  Counted
    as its two halves, also where the library does both in one step (`_of_a_pair`).  On a CPU the second half starts at
    `wait`, since a collective started from another thread would break the order that all ranks share.
    """
    out = flat if out is None else out
    if group.process_group is None:
        return (
            reduce_scatter(flat, group, out=out, scale=scale) if out is not flat or scale != 1.0 else Handle.done(flat)
        )
    sizes = balanced(flat.numel(), group.size)
    if _is_pair(group, flat, out, wire or flat.dtype):
        return _of_a_pair(flat, group, sizes, out, scale, name)
    own = out.split(sizes)[group.rank]
    first = reduce_scatter(flat, group, sizes=sizes, out=own, wire=wire, scale=scale, name=name)
    return then(first, group, lambda: all_gather(own, group, sizes=sizes, out=out, name=name))


def _is_pair(group: Group, flat: torch.Tensor, out: torch.Tensor, wire: torch.dtype) -> bool:
    """Whether the library's own sum will do: that of two numbers, rounded once, has the same bits in either order."""
    return group.size == 2 and group.stream is not None and flat.dtype == out.dtype == wire


def _part_of_a_pair(
    flat: torch.Tensor, group: Group, target: torch.Tensor, scale: float, name: str
) -> Handle[torch.Tensor]:
    process_group = group.process_group
    assert process_group is not None
    nbytes = target.numel() * flat.element_size()
    group.meter.count("reduce_scatter", group.axis, nbytes)

    def launch() -> Sequence[Work]:
        _reduce_scatter_single(target, flat, group=process_group)  # on the transfer's stream, which is current
        return []

    def finish() -> torch.Tensor:
        return target.mul_(scale) if scale != 1.0 else target

    return start(
        group.meter, group.axis, name, nbytes, group.stream, None, launch, finish, what=("reduce_scatter", flat)
    )


def _of_a_pair(
    flat: torch.Tensor, group: Group, sizes: Sequence[int], out: torch.Tensor, scale: float, name: str
) -> Handle[torch.Tensor]:
    """Both halves in one launch."""
    item, process_group = flat.element_size(), group.process_group
    assert process_group is not None
    own, rest = sizes[group.rank] * item, sizes[1 - group.rank] * item
    group.meter.count("reduce_scatter", group.axis, rest)
    group.meter.count("all_gather", group.axis, own)

    def prepare() -> None:
        if out is not flat:
            out.copy_(flat)

    def launch() -> Sequence[Work]:
        dist.all_reduce(out, group=process_group)  # on the transfer's stream, which is current
        return []

    def finish() -> torch.Tensor:
        return out.mul_(scale) if scale != 1.0 else out

    return start(
        group.meter, group.axis, name, own + rest, group.stream, prepare, launch, finish, what=("all_reduce", flat)
    )


def balanced(count: int, ways: int) -> list[int]:
    """Sizes of the slices of `count` things, the first ones one larger: `layout.split`."""
    return [stop - start for start, stop in (split(count, ways, index) for index in range(ways))]


def pass_on(
    part: torch.Tensor,
    out: torch.Tensor,
    group: Group,
    to: int,
    source: int,
    *,
    is_first: bool,
    name: str = "pass on",
) -> Handle[torch.Tensor]:
    """One of the n - 1 exchanges that a reduce-scatter in parts is made of: `part` goes to rank `to` of the group, and
    `out` comes from `source`, each rank's by as many places.

    Contiguous.  Counted as a reduce-scatter, `is_first` once for all of them.
    """
    nbytes = part.numel() * part.element_size()
    group.meter.count("reduce_scatter", group.axis, nbytes, calls=int(is_first))
    sizes = [part.numel() if peer == to else 0 for peer in range(group.size)]
    arriving = [out.numel() if peer == source else 0 for peer in range(group.size)]

    def launch() -> Sequence[Work]:
        return exchange_parts(group, part.view(-1), out.view(-1), sizes, arriving)

    return start(
        group.meter, group.axis, name, nbytes, group.stream, None, launch, lambda: out, what=("reduce_scatter", part)
    )


def then(first: Handle[torch.Tensor], group: Group, follow: Callable[[], Handle[torch.Tensor]]) -> Handle[torch.Tensor]:
    """`first`, which runs on `group`'s stream, and what `follow` starts on its result, as one transfer."""
    if group.stream is None:
        return Handle(lambda: (first.wait(), follow().wait())[1])
    with On(group.stream):  # both are ordered on the side stream itself
        second = follow()
    return both(first, second)


def both(first: Handle[torch.Tensor], second: Handle[torch.Tensor]) -> Handle[torch.Tensor]:
    """Two transfers as one, whose result is the second's."""
    return Handle(lambda: (first.wait(), second.wait())[1])


def ordered_sum(parts: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """parts[0] + parts[1] + ... in this order, in `target`'s dtype, times `scale`.

    parts: [n, count], none of them in `target`'s memory; their dtype may be narrower.
    """
    if len(parts) == 2 and parts.dtype != target.dtype:
        torch.sum(parts, dim=0, dtype=target.dtype, out=target)  # one pass, and two numbers have one order
        rest = parts[2:]
    elif len(parts) == 1 or parts.dtype != target.dtype:
        target.copy_(parts[0])
        rest = parts[1:]
    else:
        torch.add(parts[0], parts[1], out=target)
        rest = parts[2:]
    for part in rest:
        target.add_(part)
    return target.mul_(scale) if scale != 1.0 else target


def sum_scalars(values: torch.Tensor, groups: Sequence[Group], *, name: str = "sum") -> torch.Tensor:
    """Sums a few numbers over one group after another, in rank order; returns the same bits on every rank.

    values: 1-D, any dtype.  For counts, losses and norms; waits at once.
    """
    for group in groups:
        if group.size > 1:
            everyone = all_gather(values.contiguous(), group, name=name).wait().view(group.size, -1)
            values = ordered_sum(everyone, torch.empty_like(values))
    return values
