"""What a ZeRO step cuts, gathers, reduces and keeps, as integers: run by the engine, priced by the planner.

The parameters of a unit (a decoder block, say) lie one after another in one flat run, each on a chunk boundary; the
run is padded until its chunks divide by the ranks (`cut`).  Runs that are never needed at the same time share a buffer
(`slots`).  Gathers and reductions are static lists (`forward_list`, `backward_list`), and so is what is still in a
buffer when it is asked for again (`gathers_per_step`).

    cut((4, 40, 1), ranks=2)  ->  chunk 32, offsets (0, 32, 96), total 128
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cut:
    """A flat run of `total` elements in whole chunks; member i begins at `offsets[i]`.  Each rank has total / ranks."""

    chunk: int
    offsets: tuple[int, ...]
    total: int


@dataclass(frozen=True)
class Item:
    """One entry of a static list: gather or reduce unit number `unit`."""

    kind: Literal["gather", "reduce"]
    unit: int


def chunk_elements(numel: int) -> int:
    """Elements in a chunk of a run of `numel`: a power of two, about 1/4096 of the run, within 32 and 4096.

    It depends on the run alone, never on the number of ranks, so that sums over chunks are the same for every plan.  32
    elements are the widest loop of vectors (two of 16 fp32 numbers), so that no shard ends in a scalar rest, which
    fused optimizers round differently; and at least 64 bytes, the alignment that BLAS kernels want.
    """
    return min(4096, max(32, 1 << max(0, (max(numel, 1) // 4096).bit_length() - 1)))


def cut(sizes: Sequence[int], ranks: int) -> Cut:
    """Places members of the given element counts one after another and cuts the run for `ranks`."""
    chunk = chunk_elements(sum(sizes))
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += math.ceil(size / chunk) * chunk
    block = chunk * ranks
    return Cut(chunk, tuple(offsets), max(1, math.ceil(end / block)) * block)


def member_layout(dims: str, run: Cut, member: int, axis: str = "dp") -> str:
    """The layout string of member number `member`, held in shards: `(N M)/dp:32@1/4`."""
    return f"({dims})/{axis}:{run.chunk}@{run.offsets[member] // run.chunk}/{run.total // run.chunk}"


def slots(totals: Sequence[int], positions: Sequence[int], distance: int) -> tuple[int, ...]:
    """The number of the buffer that each run is gathered into.

    totals: elements per run, in order of execution; positions: the place of its unit in that order.  Runs share a
    buffer when their units stand `distance` or more apart and their sizes lie within the same power of two.  The
    buffer is as large as its largest run.
    """
    last: list[tuple[int, int]] = []  # per buffer: last position, size class
    chosen = []
    for total, position in zip(totals, positions, strict=True):
        fitting = [
            number
            for number, (before, size) in enumerate(last)
            if before + distance <= position and size == total.bit_length()
        ]
        number = fitting[0] if fitting else len(last)
        if number == len(last):
            last.append((position, total.bit_length()))
        last[number] = (position, total.bit_length())
        chosen.append(number)
    return tuple(chosen)


def slot_sizes(totals: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Elements of each buffer."""
    sizes = [0] * (max(chosen, default=-1) + 1)
    for total, number in zip(totals, chosen, strict=True):
        sizes[number] = max(sizes[number], total)
    return tuple(sizes)


def forward_list(units: int) -> tuple[Item, ...]:
    """The gathers of a forward pass."""
    return tuple(Item("gather", unit) for unit in range(units))


def backward_list(regather: Sequence[bool], ahead: int) -> tuple[Item, ...]:
    """The gathers and reductions of a backward pass over units n-1 .. 0; the root's reduction follows as unit n.

    `regather[unit]`: whether its weights are gathered again.  Unit u asks for the gather of unit u - ahead when its
    backward begins.  A reduction stands behind the gather that the next unit asks for, so that nothing forces it before
    the next but one begins, and a unit whose last gradients come late is not cut short.  With ahead=1:

        gather n-1, gather n-2, gather n-3, reduce n-1, gather n-4, reduce n-2, ... reduce 0, reduce n
    """
    units = len(regather)
    gathers = [Item("gather", unit) for unit in reversed(range(units)) if regather[unit]]
    reductions = [Item("reduce", unit) for unit in reversed(range(units))]
    items, gathers = gathers[:ahead], gathers[ahead:]
    if gathers:
        items.append(gathers.pop(0))
    for reduction in reductions:
        if gathers:
            items.append(gathers.pop(0))
        items.append(reduction)
    return (*items, *gathers, Item("reduce", units))


def gathers_per_step(
    chosen: Sequence[int], regather: Sequence[bool], ahead: int, micro_batches: int
) -> tuple[int, ...]:
    """How often each unit is gathered in a step of `micro_batches` forward and backward passes (zero=3).

    A unit that is still in its buffer is not gathered again: the last ones when backward begins, the first ones when
    the next micro-batch does.  At the start of a step nothing is: the optimizer has changed the weights.
    """
    content: dict[int, int] = {}
    counts = [0] * len(chosen)
    backward = [item.unit for item in backward_list(regather, ahead) if item.kind == "gather"]
    for _ in range(micro_batches):
        for unit in [*range(len(chosen)), *backward]:
            if content.get(chosen[unit]) != unit:
                content[chosen[unit]] = unit
                counts[unit] += 1
    return tuple(counts)
