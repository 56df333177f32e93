"""Layouts: which slice of a tensor a rank holds, and which collective turns one layout into another, in bytes.

A layout is one entry per dimension, in order, and then what is still owed:

    "B T D"              every rank holds everything
    "B/dp T/cp D"        B is split over axis dp, T over cp, D is whole
    "T/cp/tp"            T is split over cp, and each of those slices over tp
    "T/cp~"              zigzag: T is cut in 2w pieces and rank r holds pieces r and 2w-1-r (even causal work)
    "K/tp*2"             every slice is held by 2 neighbours along tp (4 key-value heads on 8 ranks)
    "V/tp:64"            split in whole chunks of 64 elements; only the last chunk may be short
    "(N M)/dp"           N and M flattened, row-major, into one dimension, which is split
    "(N/tp M)/dp:4096"   the same, of the slice of N that tp left here: ZeRO inside tensor parallelism
    "(N M)/dp:4096@3/252"  this tensor begins at chunk 3 of a flat unit of 252 chunks, and the unit is what is split
    "T D +tp +cp"        every rank holds all of it, as a partial sum still owed over tp and over cp
    ""                   a scalar

Grammar (entries are separated by spaces; nothing inside an entry is):

    layout = { entry } { "+" axis }
    entry  = ( NAME | "(" part { part } ")" ) split [ "@" START "/" TOTAL ]
    part   = NAME split
    split  = { "/" axis [ "~" ] [ "*" COPIES ] } [ ":" CHUNK ]

NAME is a word or a number, and a label only.  An axis is one of the mesh's; it appears once in a layout.

Every split is balanced: of n things over w slices the first n mod w slices hold one more (`split`).  Nothing has to
divide, and a slice may be empty.  `Layout.local_ranges` alone says who holds what; local shapes, local bytes and the
bytes of every `transition` are derived from it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NoReturn

from interlace.errors import PlanError
from interlace.mesh import FOLDS, Mesh, overlap

Range = tuple[int, int]  # [start, stop)
Ranges = tuple[Range, ...]


def split(n: int, w: int, index: int) -> Range:
    """Range [start, stop) of slice `index` when n things go to w slices: the first n mod w hold one more."""
    assert w >= 1 and 0 <= index < w, f"slice {index} of {w}"
    base, more = divmod(n, w)
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
            m = _length(held)
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
        return tuple(part.axis for part in _splits(self.entries))

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
        return tuple(_length(ranges) for ranges in self.local_ranges(shape, mesh, rank))

    def local_numel(self, shape: Sequence[int], mesh: Mesh, rank: int) -> int:
        """Number of elements `rank` holds."""
        return math.prod(self.local_shape(shape, mesh, rank))

    def local_bytes(self, shape: Sequence[int], mesh: Mesh, rank: int, itemsize: int) -> int:
        """Bytes `rank` holds at `itemsize` bytes an element."""
        return self.local_numel(shape, mesh, rank) * itemsize

    def replicas(self, mesh: Mesh) -> int:
        """Ranks that hold each element; weight 1/replicas counts every element of the tensor once over the world."""
        return mesh.world // math.prod(mesh.size(part.axis) // part.copies for part in _splits(self.entries))


@dataclass(frozen=True)
class Transfer:
    """One collective of a transition.

    collective: all_gather, reduce_scatter, all_reduce, all_to_all, slice (nothing is sent) or none (nothing changes).
    axis: the mesh axis, or several joined by "/" ("cp/tp"): the groups are `mesh.groups(axis.split("/"))`.
    bytes: bytes SENT by the rank that sends most.
    bytes_by_rank: bytes sent by every rank.
    """

    collective: str
    axis: str
    bytes: int
    bytes_by_rank: tuple[int, ...]


def transition(a: Layout, b: Layout, shape: Sequence[int], mesh: Mesh, itemsize: int) -> tuple[Transfer, ...]:
    """The transfers, in order, that turn layout `a` of a tensor into layout `b`.

        whole -> split                    slice             nothing is sent
        split -> whole                    all_gather        each rank sends its slice to every peer that lacks it
        owed -> whole                     all_reduce        a direct reduce_scatter of balanced slices, an all_gather
        owed -> split over the same axis  reduce_scatter    each rank sends every peer that peer's slice
        split here -> split there         all_to_all        each rank sends every peer what that peer lacks
        same                              none

    Sums come first, gathers last, so that few bytes move.  Where a slice has several holders in a group, peer j is
    served by holder j mod (their number).  The result is never empty.

    Raises PlanError when the dimensions differ, or when `b` owes a sum that `a` does not.
    """
    return _transition(a, b, tuple(shape), mesh, itemsize)


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


def _length(ranges: Iterable[Range]) -> int:
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


def _common(left: tuple[Ranges, ...], right: tuple[Ranges, ...]) -> int:
    """Number of elements two ranks' ranges of the same entries have in common."""
    total = 1
    for p, q in zip(left, right, strict=True):
        total *= _common_length(sorted(p), sorted(q))
        if not total:
            break
    return total


def _common_length(p: list[Range], q: list[Range]) -> int:
    i = j = found = 0
    while i < len(p) and j < len(q):
        found += max(0, min(p[i][1], q[j][1]) - max(p[i][0], q[j][0]))
        if p[i][1] < q[j][1]:
            i += 1
        else:
            j += 1
    return found


# --- transitions -----------------------------------------------------------------------------------------------------
# Both layouts are first brought to the same entries (a plain "N M" beside "(N M)/dp" becomes "(N M)").  Then one split
# is moved at a time, from the state reached so far towards the target, until they are the same.  A site is (entry,
# part of its group or -1), and its splits are peeled from the minor end and added there.

_Site = tuple[int, int]


@lru_cache(maxsize=4096)
def _transition(a: Layout, b: Layout, shape: tuple[int, ...], mesh: Mesh, itemsize: int) -> tuple[Transfer, ...]:
    if a.names != b.names:
        raise PlanError(f"layouts '{a}' and '{b}' name different dimensions: a transition keeps them")
    for layout in (a, b):
        layout.local_ranges(shape, mesh, 0)
    now, target = _aligned(a, b)
    now = Layout(now.entries, _refolded(now.owed, target))
    unowed = [axis for axis in b.owed if axis not in now.owed]
    if unowed:
        raise PlanError(
            f"layout '{a}' cannot become '{b}': it owes no sum over {unowed[0]}, and a transition only pays sums"
        )
    transfers: list[Transfer] = []
    while now.entries != target.entries or set(now.owed) != set(target.owed):
        collective, axes, then = _next_step(now, target)
        if mesh.size(axes) > 1:
            transfer = _priced(collective, axes, now, then, shape, mesh, itemsize)
            if transfer.collective != "none":
                transfers.append(transfer)
        now = then
    return tuple(transfers) or (Transfer("none", "", 0, (0,) * mesh.world),)


def _aligned(a: Layout, b: Layout) -> tuple[Layout, Layout]:
    """Both layouts over the same entries: plain dimensions that the other side flattens become a group."""
    left, right = list(a.entries), list(b.entries)
    i = 0
    while i < len(left):
        for here, there in ((left, right), (right, left)):
            size = len(there[i].names)
            parts = tuple(here[i : i + size])
            if there[i].group and not here[i].group:
                if any(part.group or part.unit for part in parts):
                    raise PlanError(f"layouts '{a}' and '{b}' flatten different dimensions: flatten the same ones")
                here[i : i + size] = [Entry("", (), there[i].chunk, there[i].unit, parts)]
        if left[i].names != right[i].names:
            raise PlanError(f"layouts '{a}' and '{b}' flatten different dimensions: flatten the same ones")
        i += 1
    target = Layout(tuple(right), b.owed)
    return _adopted(Layout(tuple(left), a.owed), target), target


def _refolded(owed: tuple[str, ...], target: Layout) -> tuple[str, ...]:
    """A sum over dp is a sum over shard and over replica, which is how "(N M)/shard" wants it paid."""
    for inner, (outer, over) in FOLDS.items():
        if set(over) <= set(owed) and not {inner, outer}.isdisjoint((*target.axes, *target.owed)):
            owed = (*(axis for axis in owed if axis not in over), inner, outer)
    return owed


def _adopted(now: Layout, target: Layout) -> Layout:
    """The same holdings, with the target's chunk and unit wherever nothing is split, so that they mean nothing."""
    for site in _sites(now.entries):
        mine, wanted = _at(now.entries, site), _at(target.entries, site)
        if not mine.splits:
            now = _with(now, site, replace(mine, chunk=wanted.chunk, unit=wanted.unit))
    return now


def _next_step(now: Layout, target: Layout) -> tuple[str, tuple[str, ...], Layout]:
    """The collective to do next, its axes, and the layout it leads to."""
    for candidates in (_reduce_scatters, _moves, _slices, _replacements, _all_reduces, _all_gathers):
        for collective, axes, then in candidates(now, target):
            return collective, axes, _adopted(then, target)
    raise AssertionError(f"no step leads from '{now}' to '{target}'")


_Steps = Iterator[tuple[str, tuple[str, ...], Layout]]


def _reduce_scatters(now: Layout, target: Layout) -> _Steps:
    for site, part in _addable(now, target):
        if part.axis in now.owed:
            paid = Layout(now.entries, tuple(axis for axis in now.owed if axis != part.axis))
            yield "reduce_scatter", (part.axis,), _added(paid, target, site, part)


def _moves(now: Layout, target: Layout) -> _Steps:
    for site, part in _addable(now, target):
        for source, last in _peelable(now, target):
            if last.axis == part.axis and source != site:
                yield "all_to_all", (part.axis,), _added(_peeled(now, source), target, site, part)


def _slices(now: Layout, target: Layout) -> _Steps:
    for site, part in _addable(now, target):
        if not any(overlap(part.axis, axis) for axis in (*now.axes, *now.owed)):
            yield "slice", (part.axis,), _added(now, target, site, part)


def _replacements(now: Layout, target: Layout) -> _Steps:
    """Sites whose splits differ in form or order are rearranged in one exchange; so is a group split in both ways."""
    for site in _sites(now.entries):
        mine, wanted = _at(now.entries, site), _at(target.entries, site)
        if site[1] >= 0 and now.entries[site[0]].splits:
            continue
        if mine.group == wanted.group:
            kept = _kept(mine, wanted)
            sources, goals = ([part.axis for part in entry.splits[kept:]] for entry in (mine, wanted))
        else:
            kept = 0
            sources, goals = ([part.axis for part in _splits((entry,))] for entry in (mine, wanted))
        if len(mine.splits) > kept and len(wanted.splits) > kept:
            others = [axis for axis in (*now.axes, *now.owed) if axis not in sources]
            if not any(overlap(goal, other) for goal in goals for other in others):
                yield "all_to_all", tuple(dict.fromkeys((*sources, *goals))), _with(now, site, wanted)


def _all_reduces(now: Layout, target: Layout) -> _Steps:
    for axis in now.owed:
        if axis not in (*target.owed, *target.axes):
            yield "all_reduce", (axis,), Layout(now.entries, tuple(other for other in now.owed if other != axis))


def _all_gathers(now: Layout, target: Layout) -> _Steps:
    for site, part in _peelable(now, target):
        yield "all_gather", (part.axis,), _peeled(now, site)


def _kept(mine: Entry, wanted: Entry) -> int:
    """Number of leading splits that are already as wanted."""
    if (mine.chunk, mine.unit) != (wanted.chunk, wanted.unit):
        return 0
    same = 0
    while same < min(len(mine.splits), len(wanted.splits)) and mine.splits[same] == wanted.splits[same]:
        same += 1
    return same


def _addable(now: Layout, target: Layout) -> Iterator[tuple[_Site, Split]]:
    """Sites where the target's next split can be added, with that split."""
    for site in _sites(now.entries):
        mine, wanted = _at(now.entries, site), _at(target.entries, site)
        settled = mine.group == wanted.group if site[1] < 0 else not now.entries[site[0]].splits
        if settled and _kept(mine, wanted) == len(mine.splits) < len(wanted.splits):
            yield site, wanted.splits[len(mine.splits)]


def _peelable(now: Layout, target: Layout) -> Iterator[tuple[_Site, Split]]:
    """Sites whose last split is not the target's, with that split."""
    for site in _sites(now.entries):
        mine, wanted = _at(now.entries, site), _at(target.entries, site)
        free = site[1] < 0 or not now.entries[site[0]].splits
        if free and mine.splits and (mine.group != wanted.group or _kept(mine, wanted) < len(mine.splits)):
            yield site, mine.splits[-1]


def _added(layout: Layout, target: Layout, site: _Site, part: Split) -> Layout:
    mine, wanted = _at(layout.entries, site), _at(target.entries, site)
    return _with(layout, site, replace(mine, splits=(*mine.splits, part), chunk=wanted.chunk, unit=wanted.unit))


def _peeled(layout: Layout, site: _Site) -> Layout:
    mine = _at(layout.entries, site)
    return _with(layout, site, replace(mine, splits=mine.splits[:-1]))


def _sites(entries: tuple[Entry, ...]) -> Iterator[_Site]:
    for i, entry in enumerate(entries):
        for j in range(len(entry.group)):
            yield i, j
        yield i, -1


def _splits(entries: tuple[Entry, ...]) -> list[Split]:
    return [part for site in _sites(entries) for part in _at(entries, site).splits]


def _at(entries: tuple[Entry, ...], site: _Site) -> Entry:
    entry = entries[site[0]]
    return entry if site[1] < 0 else entry.group[site[1]]


def _with(layout: Layout, site: _Site, entry: Entry) -> Layout:
    i, j = site
    if j >= 0:
        group = layout.entries[i].group
        entry = replace(layout.entries[i], group=(*group[:j], entry, *group[j + 1 :]))
    return Layout((*layout.entries[:i], entry, *layout.entries[i + 1 :]), layout.owed)


def _priced(
    collective: str, axes: tuple[str, ...], now: Layout, then: Layout, shape: tuple[int, ...], mesh: Mesh, itemsize: int
) -> Transfer:
    """One step with its bytes: counted once per group, and once for all groups that hold the same slices."""
    count: Callable[[list[tuple[Ranges, ...]], list[tuple[Ranges, ...]]], list[int]] = {
        "reduce_scatter": _sent_to_scatter,
        "all_reduce": _sent_to_reduce,
        "slice": lambda before, after: [0] * len(before),
    }.get(collective, _sent_to_supply)
    used = tuple(dict.fromkeys((*now.axes, *then.axes)))
    known: dict[tuple[int, ...], list[int]] = {}
    sent = [0] * mesh.world
    changed = False
    for group in mesh.groups(axes):
        key = tuple(mesh.index(rank, axis) for rank in group for axis in used)
        if key not in known:
            before = [now.local_ranges(shape, mesh, rank) for rank in group]
            after = [then.local_ranges(shape, mesh, rank) for rank in group]
            changed = changed or list(map(_numel, before)) != list(map(_numel, after))
            known[key] = count(before, after)
        for rank, elements in zip(group, known[key], strict=True):
            sent[rank] = elements * itemsize
    if collective == "all_to_all" and not any(sent):
        collective = "slice" if changed else "none"  # every rank had what it needs
    return Transfer(collective, "/".join(axes), max(sent), tuple(sent))


def _sent_to_scatter(before: list[tuple[Ranges, ...]], after: list[tuple[Ranges, ...]]) -> list[int]:
    """Each rank sends every peer that peer's slice."""
    sizes = [_numel(ranges) for ranges in after]
    return [sum(sizes) - size for size in sizes]


def _sent_to_reduce(before: list[tuple[Ranges, ...]], after: list[tuple[Ranges, ...]]) -> list[int]:
    """The flat local tensor is scattered in balanced slices, summed, and gathered."""
    n, w = _numel(before[0]), len(before)
    sizes = [_length([split(n, w, index)]) for index in range(w)]
    return [n - size + (w - 1) * size for size in sizes]


def _sent_to_supply(before: list[tuple[Ranges, ...]], after: list[tuple[Ranges, ...]]) -> list[int]:
    """Every rank gets what it lacks of `after`; holders of one slice share the peers they serve."""
    holders: dict[tuple[Ranges, ...], list[int]] = {}
    for i, ranges in enumerate(before):
        holders.setdefault(ranges, []).append(i)
    needs: dict[tuple[Ranges, ...], list[int]] = {}
    for j, ranges in enumerate(after):
        needs.setdefault(ranges, []).append(j)
    sent = [0] * len(before)
    for held, sources in holders.items():
        for need, peers in needs.items():
            elements = _common(held, need)
            for j in peers if elements else ():
                if j not in sources:
                    sent[sources[j % len(sources)]] += elements
    return sent


def _numel(ranges: tuple[Ranges, ...]) -> int:
    return math.prod(_length(entry) for entry in ranges)
