"""The memory of a pipeline's lines over copy engines as integers.  Exact.

Run by `collectives.boxes`, counted by `plan.memory`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from interlace.plan import overlap

SLOTS = 3  # of a line: one is written, one read, one stands ready


def incoming(pairs: Iterable[tuple[int, int]]) -> int:
    """The most lines that come to one rank, of (from, to)."""
    return max(Counter(target for _, target in set(pairs)).values(), default=0)


def arriving(placement: Sequence[int]) -> int:
    """The same of a pipeline's stages, placed so."""
    neighbours = [(a, b) for a, b in itertools.pairwise(placement) if a != b]
    return incoming([*neighbours, *((b, a) for a, b in neighbours)])


def slot(nbytes: int) -> int:
    """Bytes of the place for a message of so many."""
    return overlap.up(max(nbytes, 1), overlap.ALIGNMENT)


def arena(lines: int, nbytes: int, ranks: int, slots: int = SLOTS) -> int:
    """Bytes of the arena of a rank to which so many lines come, with places of `nbytes`."""
    return overlap.arena({"slots": lines * slots * nbytes}, {"arrived": ranks, "taken": ranks})
