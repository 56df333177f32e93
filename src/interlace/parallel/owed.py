"""What is owed over the tensor axis: gradients of slices that several of its ranks hold, added up once a step.

Equals an all-reduce of those gradients over their holders after the data axis's reduction; their mean where every
holder has computed the same (`Part`).  One transfer for each kind of range of a unit's flat run, behind the unit's
reduction.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import torch

from interlace.collectives import Handle, all_gather, all_reduce, both, then
from interlace.errors import NumericsError
from interlace.parallel.flat import Flat
from interlace.parallel.part import Part
from interlace.parallel.run import Member

APART = 1e-3  # of the largest, or 4 units in the last place: gradients of the same numbers differ by rounding alone

Apart = list[tuple[Flat, str, torch.Tensor]]  # run, parameter, largest difference in units of its largest gradient


def pay(flat: Flat, reduced: Handle[torch.Tensor], apart: Apart | None = None) -> Handle[torch.Tensor]:
    """Starts the sum over the tensor axis; `reduced` is that over the data axis, under way.

    Ranges of the run are the same on all ranks of the tensor axis, and so is the order in which they come here.  apart:
    takes how far those lie apart that should be alike.
    """
    held, first = flat.result, flat.held[0]
    for members, part in owed(flat):
        start = max(members[0].offset - first, 0)
        place = held[start : max(members[-1].offset + members[-1].room - first, 0)]
        if place.numel():
            paid = functools.partial(_paid, flat, members, part, place, start + first, apart)
            reduced = both(reduced, paid()) if flat.group.size == 1 else then(reduced, flat.inner, paid)
    return reduced


def owed(flat: Flat) -> Iterator[tuple[list[Member], Part]]:
    """Neighbours in the run that are owed in one way."""
    for _, run in itertools.groupby(flat.members, lambda m: (m.kind, m.decay)):
        members = list(run)
        part = members[0].part
        if part is not None and part.owed is not None:
            yield members, part


def counted(flat: Flat) -> Iterator[torch.Tensor]:
    """The gradients of the held elements that no rank of the tensor axis before this one holds too."""
    for leaf, start in flat.leaves_from:
        if leaf.grad is None:
            continue
        at = 0
        for member in flat.members:
            if not member.is_first:
                low = min(max(member.offset - start, at), leaf.numel())
                yield leaf.grad[at:low]
                at = min(max(member.end - start, at), leaf.numel())
        yield leaf.grad[at:]


def refuse(apart: Iterable[tuple[Flat, str, torch.Tensor]]) -> None:
    """`NumericsError` for the first parameter whose gradient should be alike on all ranks of the axis and is not."""
    for flat, name, difference in apart:
        if (share := difference.item()) > max(APART, 4 * torch.finfo(flat.compute_dtype).eps):
            raise NumericsError(
                f"the gradient of {name} is not the same on all ranks of tp ({100 * share:.2g} % apart), so what it "
                "works on must be split; give the module around it the role SPLIT, or, if it is random (functional "
                "dropout), the same seed to all ranks of tp."
            )


def _paid(
    flat: Flat, members: list[Member], part: Part, place: torch.Tensor, start: int, apart: Apart | None
) -> Handle[torch.Tensor]:
    """place: the range of these members in the held gradient, from element `start` of the run on."""
    assert part.owed is not None
    if apart is not None and part.alike:
        everyone = all_gather(place.clone(), part.owed, name="compare gradients").wait()
        apart += _compare(flat, members, start, everyone.view(part.owed.size, -1))
    scale = 1.0 / part.owed.size if part.alike else 1.0
    return all_reduce(place, part.owed, scale=scale, name=f"pay {flat.name}")


def _compare(flat: Flat, members: list[Member], start: int, everyone: torch.Tensor) -> Apart:
    """everyone: [ranks, elements], from element `start` of the run on."""
    size = everyone.abs().amax(dim=0)
    least = size.amax() * torch.finfo(flat.compute_dtype).eps ** 0.5  # below it all may be rounding
    found: Apart = []
    for member in members:
        low, high = max(member.offset - start, 0), min(member.offset - start + member.numel, len(size))
        if low < high:
            largest = torch.maximum(size[low:high].amax(), least).clamp(min=1e-30)
            apart = (everyone[:, low:high] - everyone[0, low:high]).abs().amax()
            found.append((flat, member.name, apart / largest))
    return found
