"""The language of layouts, read and printed, and what each rank holds of a tensor: local ranges, shapes and bytes."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NoReturn

from interlace.errors import PlanError
from interlace.mesh import Mesh, overlap

Range = tuple[int, int]  # [start, stop)
Ranges = tuple[Range, ...]


def split(n: int, w: int, index: int) -> Range:
    """Range [start, stop) of slice `index` when n things go to w slices: the first n mod w hold one more."""
    assert w >= 1 and 0 <= index < w, f"slice {index} of {w}"
    base, more = n // w, n % w  # not divmod, which symbolic sizes lack while PyTorch's compiler traces
    start = index * base + min(index, more)
    return start, start + base + (index < more)


@dataclass(frozen=True)
class Split:
    """One `/axis`: `zigzag` for `~`, `copies` for `*r`."""

    axis: str
    zigzag: bool = False
    copies: int = 1

    def __str__(self) -> str:
        return f"/{self.axis}{'~' * self.zigzag}{f'*{self.copies}' * (self.copies > 1)}"


@dataclass(frozen=True)
class Entry:
    """One dimension, or one flattened group of them.

    name: the dimension's label; "" for a group.
    group: the flattened dimensions, themselves plain entries.
    splits: major to minor.
    chunk: elements that are never separated.
    unit: (start, total) of `@start/total`, in chunks.
    """

    name: str
    splits: tuple[Split, ...] = ()
    chunk: int = 1
    unit: tuple[int, int] | None = None
    group: tuple[Entry, ...] = ()

    def __str__(self) -> str:
        head = f"({' '.join(map(str, self.group))})" if self.group else self.name
        chunk = f":{self.chunk}" if self.chunk != 1 else ""
        unit = "@{}/{}".format(*self.unit) if self.unit else ""
        return head + "".join(map(str, self.splits)) + chunk + unit

    @property
    def names(self) -> tuple[str, ...]:
        """Labels of the dimensions covered."""
        return tuple(part.name for part in self.group) or (self.name,)

    def ranges(self, sizes: Sequence[int], mesh: Mesh, rank: int) -> Ranges:
        """What `rank` holds of this entry, on its unsharded (flat) index, in local order; `sizes`: one per name."""
        if self.group:
            parts = (part.ranges((n,), mesh, rank) for part, n in zip(self.group, sizes, strict=True))
            base, ends = _flatten(tuple(parts), tuple(sizes))
        else:
            base, ends = ((0, sizes[0]),), (sizes[0],)
        if not self.splits:
            return base
        n = ends[-1]
        chunks = -(-n // self.chunk)
        start, total = self.unit or (0, chunks)
        if start + chunks > total:
            raise PlanError(
                f"layout entry '{self}' puts {n} elements, {chunks} chunks of {self.chunk}, at chunk {start} of a unit "
                f"of {total} chunks: make the unit {start + chunks} chunks or more"
            )
        held: Ranges = ((0, total),)
        for part in self.splits:
            size = mesh.size(part.axis)
            if size % part.copies:
                raise PlanError(
                    f"layout entry '{self}' holds every slice {part.copies} times, which does not divide "
                    f"{part.axis}={size}: use a number of copies that does"
                )
            slices, index = size // part.copies, mesh.index(rank, part.axis) // part.copies
            m = length(held)
            if part.zigzag:
                first, last = split(m, 2 * slices, index), split(m, 2 * slices, 2 * slices - 1 - index)
                held = _take(held, first) + _take(held, last)
            else:
                held = _take(held, split(m, slices, index))
        bounds = [[min(max((chunk - start) * self.chunk, 0), n) for chunk in piece] for piece in held]
        if len(base) == 1:
            return tuple((base[0][0] + a, base[0][0] + b) for a, b in bounds)
        local = ((a, b, bisect_right(ends, a), bisect_left(ends, b) + 1) for a, b in bounds if a < b)
        return tuple(r for a, b, i, j in local for r in _take(base[i:j], (a, b), ends[i - 1] if i else 0)) or ((0, 0),)


@dataclass(frozen=True)
class Layout:
    """How one tensor lies over a mesh: `Layout.parse("B/dp T/cp D +tp")`; `str` is the inverse."""

    entries: tuple[Entry, ...]
    owed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for entry in self.entries:
            _check_entry(entry)
        axes = (*self.axes, *self.owed)
        for i, axis in enumerate(axes):
            for other in axes[:i]:
                if axis == other:
                    raise PlanError(f"layout '{self}' uses axis {axis!r} more than once: use it once")
                if overlap(axis, other):
                    raise PlanError(f"layout '{self}' uses {other!r} and {axis!r}, which share ranks: use one of them")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout; PlanError with one sentence that shows where a malformed one goes wrong."""
        return _parse(text)

    @classmethod
    def whole(cls, names: Iterable[str]) -> Layout:
        """The layout in which every rank holds everything: `Layout.whole("BTD")`."""
        return cls(tuple(Entry(name) for name in names))

    def __str__(self) -> str:
        return " ".join([*map(str, self.entries), *(f"+{axis}" for axis in self.owed)])

    @property
    def names(self) -> tuple[str, ...]:
        """Labels of all dimensions, those inside groups included."""
        return tuple(name for entry in self.entries for name in entry.names)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes the tensor is split over, in order of appearance; what is owed is not among them."""
        return tuple(part.axis for part in splits_of(self.entries))

    def local_ranges(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[Ranges, ...]:
        """What `rank` holds of an unsharded tensor of `shape`: per entry, ranges [start, stop), in local order.

        A flattened group counts as one entry, its ranges being of the row-major flat index.  An entry gives one
        range (two per zigzag), which may be empty; only a group of split parts, "(N M/tp)", gives as many as it needs.
        """
        if len(self.names) != len(shape):
            raise PlanError(
                f"layout '{self}' has {len(self.names)} dimensions and the shape {tuple(shape)} has {len(shape)}: "
                "name every dimension once"
            )
        sizes = iter(shape)
        return tuple(entry.ranges([next(sizes) for _ in entry.names], mesh, rank) for entry in self.entries)

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Shape of what `rank` holds; a flattened group is one dimension."""
        return tuple(length(ranges) for ranges in self.local_ranges(shape, mesh, rank))

    def local_numel(self, shape: Sequence[int], mesh: Mesh, rank: int) -> int:
        """Number of elements `rank` holds."""
        return math.prod(self.local_shape(shape, mesh, rank))

    def local_bytes(self, shape: Sequence[int], mesh: Mesh, rank: int, itemsize: int) -> int:
        """Bytes `rank` holds at `itemsize` bytes an element."""
        return self.local_numel(shape, mesh, rank) * itemsize

    def replicas(self, mesh: Mesh) -> int:
        """Ranks that hold each element; weight 1/replicas counts every element of the tensor once over the world."""
        return mesh.world // math.prod(mesh.size(part.axis) // part.copies for part in splits_of(self.entries))


# --- parsing ---------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+", re.ASCII)
_AXIS = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_COUNT = re.compile(r"[0-9]+")


@lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    entries: list[Entry] = []
    owed: list[str] = []
    at = _Scanner(text)
    while at.skip_spaces():
        if at.accept("+"):
            owed.append(at.read(_AXIS, "the axis a sum is owed over"))
        elif owed:
            at.fail("only '+axis' after what is owed")
        elif at.accept("("):
            parts: list[Entry] = []
            while at.skip_spaces() and not at.accept(")"):
                parts.append(_read_splits(at, at.read(_NAME, "a dimension or ')'"), ()))
                at.expect_end("(" + "".join(map(str, parts[-1:])), " )")
            if at.previous != ")":
                at.fail("')' to close the group")
            if not parts:
                at.fail("a dimension inside '()'", back=1)
            entries.append(_read_unit(at, _read_splits(at, "", tuple(parts))))
        else:
            entries.append(_read_unit(at, _read_splits(at, at.read(_NAME, "a dimension, '(' or '+axis'"), ())))
        at.expect_end(str(entries[-1]) if entries and not owed else "", " ")
    return Layout(tuple(entries), tuple(owed))


def _read_splits(at: _Scanner, name: str, group: tuple[Entry, ...]) -> Entry:
    splits: list[Split] = []
    while at.accept("/"):
        axis = at.read(_AXIS, "a mesh axis after '/'")
        zigzag = at.accept("~")
        copies = at.count("a number of copies of 1 or more after '*'") if at.accept("*") else 1
        splits.append(Split(axis, zigzag, copies))
    chunk = at.count("a chunk of 1 or more elements after ':'") if at.accept(":") else 1
    return Entry(name, tuple(splits), chunk, None, group)


def _read_unit(at: _Scanner, entry: Entry) -> Entry:
    if not at.accept("@"):
        return entry
    start = int(at.read(_COUNT, "the first chunk after '@'"))
    if not at.accept("/"):
        at.fail("'/' and the unit's number of chunks")
    return replace(entry, unit=(start, at.count("the unit's number of chunks, 1 or more")))


class _Scanner:
    """A position in a layout string."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    @property
    def previous(self) -> str:
        return self.text[self.position - 1 : self.position]

    def skip_spaces(self) -> bool:
        """Move to the next character that is no space; False at the end."""
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1
        return self.position < len(self.text)

    def accept(self, character: str) -> bool:
        found = self.text.startswith(character, self.position)
        self.position += found
        return found

    def read(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self.text, self.position)
        if not match:
            self.fail(expected)
        self.position = match.end()
        return match.group()

    def count(self, expected: str) -> int:
        begin = self.position
        value = int(self.read(_COUNT, expected))
        if value < 1:
            self.fail(expected, back=self.position - begin)
        return value

    def expect_end(self, after: str, closers: str) -> None:
        """An entry ends here: at one of `closers`, at white space, or at the end."""
        character = self.text[self.position : self.position + 1]
        if character and character not in closers and not character.isspace():
            self.fail(f"a space after {after!r}" if after else "a space")

    def fail(self, expected: str, back: int = 0) -> NoReturn:
        position = self.position - back
        rest = self.text[position : position + 20]
        where = f"at {rest!r}, character {position + 1}" if rest else "at its end"
        raise PlanError(f"layout {self.text!r} is malformed {where}: expected {expected}")


def _check_entry(entry: Entry) -> None:
    assert bool(entry.name) != bool(entry.group) and entry.chunk >= 1, entry
    assert all(part.copies >= 1 for part in entry.splits), entry
    if entry.unit and not 0 <= entry.unit[0] <= entry.unit[1]:
        start, total = entry.unit
        raise PlanError(f"layout entry '{entry}' begins at chunk {start} of {total}: begin at 0 to {total}")
    for part in entry.group:
        assert not part.group, entry
        if part.unit:
            raise PlanError(f"layout entry '{entry}' has '@' inside a group: write it after the group")
        _check_entry(part)


# --- ranges ----------------------------------------------------------------------------------------------------------


def splits_of(entries: Iterable[Entry]) -> list[Split]:
    """All splits, those of a group's parts before the group's own."""
    return [part for entry in entries for one in (*entry.group, entry) for part in one.splits]


def length(ranges: Iterable[Range]) -> int:
    """Number of elements."""
    return sum(stop - start for start, stop in ranges)


def _take(ranges: Ranges, piece: Range, offset: int = 0) -> Ranges:
    """The part [start, stop) of the concatenation of `ranges`, which begins at `offset`; as many ranges as before."""
    taken: list[Range] = []
    for start, stop in ranges:
        a, b = (min(max(x - offset, 0), stop - start) + start for x in piece)
        taken.append((a, b))
        offset += stop - start
    return tuple(taken)


@lru_cache(maxsize=64)
def _flatten(parts: tuple[Ranges, ...], sizes: tuple[int, ...]) -> tuple[Ranges, tuple[int, ...]]:
    """Ranges of the row-major flat index of a box, the product of `parts`, and the elements up to each one's end.

    Touching ranges are joined, empty ones dropped; an empty box is one empty range.
    """
    flat: list[Range] = [(0, 1)]
    for ranges, n in zip(parts, sizes, strict=True):
        if ranges == ((0, n),):
            flat = [(start * n, stop * n) for start, stop in flat]
            continue
        flat = [(row * n + a, row * n + b) for start, stop in flat for row in range(start, stop) for a, b in ranges]
        joined: list[Range] = []
        for start, stop in flat:
            if start == stop:
                continue
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        flat = joined
    flat = flat or [(0, 0)]
    return tuple(flat), tuple(accumulate(stop - start for start, stop in flat))
