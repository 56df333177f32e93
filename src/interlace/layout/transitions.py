"""Changes of layout: the collectives that turn one layout of a tensor into another, and the bytes each rank sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from interlace.errors import PlanError
from interlace.layout.language import Entry, Layout, Range, Ranges, Split, length, split, splits_of
from interlace.mesh import FOLDS, Mesh, overlap


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


# --- steps -----------------------------------------------------------------------------------------------------------
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
            sources, goals = ([part.axis for part in splits_of((entry,))] for entry in (mine, wanted))
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


def _at(entries: tuple[Entry, ...], site: _Site) -> Entry:
    entry = entries[site[0]]
    return entry if site[1] < 0 else entry.group[site[1]]


def _with(layout: Layout, site: _Site, entry: Entry) -> Layout:
    i, j = site
    if j >= 0:
        group = layout.entries[i].group
        entry = replace(layout.entries[i], group=(*group[:j], entry, *group[j + 1 :]))
    return Layout((*layout.entries[:i], entry, *layout.entries[i + 1 :]), layout.owed)


# --- bytes -----------------------------------------------------------------------------------------------------------


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
    sizes = [length([split(n, w, index)]) for index in range(w)]
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
    return math.prod(length(entry) for entry in ranges)


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
