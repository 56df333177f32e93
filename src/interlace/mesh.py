"""The mesh: every rank is a point with one coordinate per axis.

A mesh is an ordered list of axes, INNER to OUTER: neighbours along the first axis are neighbours in rank number, so
that the axis which talks most (`tp`) stays inside the fast domain.  With `tp=2 dp=3` rank 4 is `tp=0 dp=2`:

    rank       0  1  2  3  4  5
    tp         0  1  0  1  0  1
    dp         0  0  1  1  2  2

Two pairs of further axes are no factors of the world size.  They *fold* axes that exist, seen as one joint index:

    fold       over     inner axis   outer axis   unset means
    ep         dp, cp   ep           edp          ep = 1
    shard      dp       shard        replica      shard = dp

`ep=4` on `cp=2 dp=4` makes 4 consecutive ranks of the joint (dp, cp) index an expert group; the ranks that hold the
same experts are peers along `edp`.  `shard=2` on `dp=4` splits state over 2 ranks and repeats it over 2 replicas.

Wherever several axes are given, the first varies slowest: `peers(rank, ("cp", "tp"))[i]` holds slice i of `T/cp/tp`.
An axis that a mesh leaves out has size 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from interlace.errors import PlanError, nearest

ORDER = ("tp", "cp", "dp", "pp")
FOLDS = {"ep": ("edp", ("dp", "cp")), "shard": ("replica", ("dp",))}  # inner: (outer, over), first of `over` slowest
_FOLD_OF = {name: inner for inner, (outer, _) in FOLDS.items() for name in (inner, outer)}


class SupportsPlan(Protocol):
    """What `Mesh.of` reads from a parallel plan."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def shard(self) -> int: ...


def overlap(left: str, right: str) -> bool:
    """Whether two axis names move along the same ranks: `dp` with `ep`, but not `ep` with `edp`."""
    if left == right:
        return True
    if left in _FOLD_OF and _FOLD_OF[left] == _FOLD_OF.get(right):
        return False
    return not set(_over(left)).isdisjoint(_over(right))


@dataclass(frozen=True)
class Mesh:
    """`Mesh((("tp", 2), ("dp", 4)))`, axes inner to outer; `folds` sizes `ep` and `shard`, e.g. `(("ep", 2),)`."""

    axes: tuple[tuple[str, int], ...]
    folds: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes + self.folds]
        for name, size in self.axes + self.folds:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise PlanError(f"mesh axis {name!r} is no name: use letters, digits and underscores")
            if names.count(name) > 1:
                raise PlanError(f"mesh axis {name!r} is given {names.count(name)} times: give it once")
            if size < 1:
                raise PlanError(f"mesh axis {name!r} has size {size}: use 1 or more")
        for name, _ in self.axes:
            if name in _FOLD_OF:
                raise PlanError(f"{name!r} folds {' x '.join(_over(name))} and is no axis: give it in `folds`")
        for name, size in self.folds:
            if name not in FOLDS:
                raise PlanError(f"{name!r} is no fold of a mesh: use {' or '.join(FOLDS)}")
            over = FOLDS[name][1]
            whole = self.size(over)
            if whole % size:
                divisors = ", ".join(str(d) for d in range(1, whole + 1) if whole % d == 0)
                raise PlanError(f"{name}={size} does not divide {' x '.join(over)} = {whole}: use one of {divisors}")

    @classmethod
    def of(cls, plan: SupportsPlan) -> Mesh:
        """The mesh of a parallel plan: tp, cp, dp, pp from inner to outer, with its `ep` and `shard` as folds."""
        folds = ([("ep", plan.ep)] if plan.ep > 1 else []) + ([("shard", plan.shard)] if plan.shard else [])
        return cls((("tp", plan.tp), ("cp", plan.cp), ("dp", plan.dp), ("pp", plan.pp)), tuple(folds))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The inverse of `str`: `"tp=2 dp=4 ep=2"`; axes inner to outer, `ep` and `shard` anywhere."""
        axes: list[tuple[str, int]] = []
        folds: list[tuple[str, int]] = []
        for word in text.split():
            name, equals, size = word.partition("=")
            if not equals or not re.fullmatch(r"[0-9]+", size):
                raise PlanError(f"mesh {text!r} is malformed at {word!r}: expected axis=size, as in 'tp=2 dp=4'")
            (folds if name in FOLDS else axes).append((name, int(size)))
        return cls(tuple(axes), tuple(folds))

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes + self.folds)

    @property
    def world(self) -> int:
        """Number of ranks: the product of the axes (folds do not count)."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str | Iterable[str]) -> int:
        """Ranks along one axis, or along several jointly; PlanError for a name that is no axis."""
        if not isinstance(axis, str):
            return math.prod(self.size(name) for name in axis)
        if axis in _FOLD_OF:
            inner = _FOLD_OF[axis]
            whole = self.size(FOLDS[inner][1])
            part = dict(self.folds).get(inner, 1 if inner == "ep" else whole)
            return part if axis == inner else whole // part
        sizes = dict(self.axes)
        if axis not in sizes and axis not in ORDER:
            known = tuple(dict.fromkeys((*sizes, *ORDER, *_FOLD_OF)))
            close = nearest(axis, known)
            raise PlanError(f"mesh '{self}' has no axis {axis!r}: use {close or ', '.join(known)}")
        return sizes.get(axis, 1)

    def index(self, rank: int, axis: str | Iterable[str]) -> int:
        """Position of `rank` along an axis, or in the joint order of several (the first varies slowest)."""
        if not isinstance(axis, str):
            joint = 0
            for name in axis:
                joint = joint * self.size(name) + self.index(rank, name)
            return joint
        self._check(rank)
        size = self.size(axis)
        if axis in _FOLD_OF:
            inner = _FOLD_OF[axis]
            joint = self.index(rank, FOLDS[inner][1])
            return joint % size if axis == inner else joint // self.size(inner)
        return rank // self._stride(axis) % size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on each axis of the mesh; `mesh.rank(**mesh.coordinates(r)) == r`."""
        return {name: self.index(rank, name) for name, _ in self.axes}

    def rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates; axes left out count as 0."""
        rank = 0
        for name, index in coordinates.items():
            if name in _FOLD_OF:
                raise PlanError(f"{name!r} is a fold and places no rank: give {' and '.join(_over(name))} instead")
            if not 0 <= index < self.size(name):
                raise PlanError(f"{name}={index} is outside mesh '{self}': use 0 to {self.size(name) - 1}")
            rank += index * self._stride(name)
        return rank

    def peers(self, rank: int, axis: str | Iterable[str]) -> tuple[int, ...]:
        """Ranks along an axis through `rank` (itself included), in axis order; several axes jointly, first slowest.

        Axes that overlap, such as ("dp", "ep"), stand for everything they fold.
        """
        self._check(rank)
        ranks = [rank]
        for name in _disjoint((axis,) if isinstance(axis, str) else tuple(axis)):
            ranks = [self._moved(r, name, index) for r in ranks for index in range(self.size(name))]
        return tuple(ranks)

    def groups(self, axis: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of peers along an axis: every rank stands in exactly one, groups ordered by their first rank."""
        return _groups(self, (axis,) if isinstance(axis, str) else tuple(axis))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise PlanError(f"rank {rank} is outside mesh '{self}' of {self.world} ranks: use 0 to {self.world - 1}")

    def _stride(self, axis: str) -> int:
        stride = 1
        for name, size in self.axes:
            if name == axis:
                break
            stride *= size
        return stride

    def _moved(self, rank: int, axis: str, index: int) -> int:
        """The rank reached from `rank` by setting its position along `axis`."""
        if axis not in _FOLD_OF:
            return rank + (index - self.index(rank, axis)) * self._stride(axis)
        inner = _FOLD_OF[axis]
        outer, over = FOLDS[inner]
        at = {inner: self.index(rank, inner), outer: self.index(rank, outer), axis: index}
        joint = at[outer] * self.size(inner) + at[inner]
        for name in reversed(over):
            joint, position = divmod(joint, self.size(name))
            rank = self._moved(rank, name, position)
        return rank


def _over(axis: str) -> tuple[str, ...]:
    return FOLDS[_FOLD_OF[axis]][1] if axis in _FOLD_OF else (axis,)


def _disjoint(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The same axes, or what they fold where two of them overlap."""
    axes = tuple(dict.fromkeys(axes))
    if any(overlap(a, b) for i, a in enumerate(axes) for b in axes[:i]):
        return tuple(dict.fromkeys(name for axis in axes for name in _over(axis)))
    return axes


@lru_cache(maxsize=1024)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for rank in range(mesh.world):
        if rank not in seen:
            found.append(mesh.peers(rank, axes))
            seen.update(found[-1])
    return tuple(found)
