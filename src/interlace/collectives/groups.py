"""Which ranks talk to each other along each axis of the mesh, and through which process group."""

from __future__ import annotations

import datetime
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from interlace.collectives.handle import FOLDED, Meter
from interlace.errors import InterlaceError
from interlace.mesh import Mesh
from interlace.streams import current

_NUMBERS = itertools.count()
_BY_KEY: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


class Group:
    """The ranks along one axis through this rank.

    `ranks` in axis order, `rank` this rank's place among them.  `process_group` is None for a group of one, for which
    every collective is the identity.  `stream` is the side stream transfers run on (None on a CPU).  `key` names it in
    compiled graphs (`by_key`) and tells its size and rank, by which shapes differ: graphs that other processes have
    compiled are found again on disk by what stands in them.

    PyTorch alone keeps the process group alive, so that leaving the world ends its threads whoever still holds this
    object: gloo's would otherwise give back tensors while the interpreter ends, which aborts the process
    (pytorch/pytorch#190489).
    """

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        rank: int,
        device: torch.device,
        meter: Meter,
        process_group: dist.ProcessGroup | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.axis, self.ranks, self.rank = axis, ranks, rank
        self.device, self.meter, self.stream = device, meter, stream
        self.key = f"{axis} {rank} of {len(ranks)}, {next(_NUMBERS)}"
        _BY_KEY[self.key] = self
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self._in_order: dict[int, Group] = {}

    @property
    def size(self) -> int:
        return len(self.ranks)

    def like(self, **changes: Any) -> Group:
        """Another group, the same but for `changes`."""
        names = ("axis", "ranks", "rank", "device", "meter", "process_group", "stream")
        return Group(**{name: getattr(self, name) for name in names} | changes)

    def in_order(self) -> Group:
        """The same ranks, whose transfers run on the stream that is current now: nothing runs beside them, and no
        stream waits for another.  Itself on a CPU."""
        if self.stream is None:
            return self
        stream = current(self.device)
        found = self._in_order.get(stream.cuda_stream)
        if found is None:
            found = self._in_order[stream.cuda_stream] = self.like(stream=stream)
        return found

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        if self._process_group is None:
            return None
        found = self._process_group()
        if found is None:
            raise InterlaceError(f"the process group of axis {self.axis} is gone: this process has left its world")
        return found


def by_key(key: str) -> Group:
    """The group of this process that has the key, while somebody holds it."""
    found = _BY_KEY.get(key)
    if found is None:
        raise InterlaceError(
            f"a compiled graph transfers along {key}, a group that is gone; compile again in this world"
        )
    return found


@dataclass(frozen=True, eq=False)
class Groups:
    """One `Group` per axis of the mesh, `groups["dp"]`, and per part of a folded one, sharing one meter.

    `host` joins all ranks for small CPU tensors (counts, timings); its traffic is not metered with the axes'.
    """

    mesh: Mesh
    rank: int
    host: Group
    by_axis: dict[str, Group] = field(default_factory=dict)

    def __getitem__(self, axis: str) -> Group:
        return self.by_axis[axis]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_axis.values())


def make_groups(mesh: Mesh, rank: int, device: torch.device, timeout: float, meter: Meter | None = None) -> Groups:
    """Collective over the whole world: every rank calls it once with the same mesh.

    A fold that splits its axis, as `shard` and `replica` split `dp`, has groups of its own, on the axis's stream, so
    that their transfers keep one order; but `ep`, whose rows travel beside gradients, has its own stream.  Axes of size
    one get no process group.  An axis that spans the world uses the world's own group, so that no second communicator
    is made, `ep` aside, unless that waits longer, as a user's does with PyTorch's half an hour.  `timeout` in seconds
    bounds every transfer of a group.
    """
    meter = meter or Meter()
    world = tuple(range(mesh.world))
    host = Group(
        "world",
        world,
        rank,
        torch.device("cpu"),
        Meter(meter.waiting, False),
        dist.group.WORLD if len(world) > 1 else None,
    )
    groups = Groups(mesh, rank, host)
    limit = datetime.timedelta(seconds=timeout)
    for axis, size in _axes(mesh):
        ranks = mesh.peers(rank, axis)
        process_group: dist.ProcessGroup | None = None
        if size == mesh.world and size > 1 and axis != "ep" and _waits_no_longer(limit, device):
            process_group = dist.group.WORLD
        elif size > 1:
            for members in mesh.groups(axis):  # every rank makes every group, in the same order
                made = dist.new_group(list(members), timeout=limit)
                if members == ranks:
                    process_group = made
        folded = FOLDED.get(axis)
        if folded is not None:
            stream = groups[folded].stream
        else:
            stream = torch.cuda.Stream(device) if device.type == "cuda" and size > 1 else None
        groups.by_axis[axis] = Group(axis, ranks, ranks.index(rank), device, meter, process_group, stream)
    return groups


def _waits_no_longer(limit: datetime.timedelta, device: torch.device) -> bool:
    """Whether transfers of the world's own group end within `limit`, as far as its backend tells."""
    backend = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    own: datetime.timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return own is not None and own <= limit


def neighbours(groups: Groups, axis: str, count: int, timeout: float, name: str = "") -> Group:
    """The `count` neighbours along `axis`, this rank among them, as a group of the same axis, stream and meter.

    name: makes it an axis of its own, with its own stream, that `groups` knows.  Collective over the whole world;
    `count` divides the axis.
    """
    whole, mine = groups[axis], None
    assert whole.size % count == 0, (whole.size, count)
    if count == whole.size and not name:
        return whole
    stream = torch.cuda.Stream(whole.device) if name and whole.device.type == "cuda" else whole.stream
    for ranks in groups.mesh.groups(axis):
        for first in range(0, len(ranks), count):
            members = ranks[first : first + count]
            made = dist.new_group(list(members), timeout=datetime.timedelta(seconds=timeout)) if count > 1 else None
            if groups.rank in members:
                place = members.index(groups.rank)
                mine = Group(name or axis, members, place, whole.device, whole.meter, made, stream)
    assert mine is not None
    if name:
        groups.by_axis[name] = mine
    return mine


def strided(groups: Groups, axis: str, count: int, timeout: float) -> Group:
    """The ranks that stand at this one's place among their `count` neighbours along `axis`, as `neighbours` gives them.

    Collective over the whole world; `count` divides the axis.
    """
    whole, mine = groups[axis], None
    assert whole.size % count == 0, (whole.size, count)
    for ranks in groups.mesh.groups(axis):
        for first in range(count):
            members = ranks[first::count]
            limit = datetime.timedelta(seconds=timeout)
            made = dist.new_group(list(members), timeout=limit) if len(members) > 1 else None
            if groups.rank in members:
                place = members.index(groups.rank)
                mine = Group(axis, members, place, whole.device, whole.meter, made, whole.stream)
    assert mine is not None
    return mine


def _axes(mesh: Mesh) -> Iterator[tuple[str, int]]:
    """The axes of the mesh, and both parts of the data axis where hybrid sharding, or the expert axis, splits it."""
    yield from mesh.axes
    if mesh.size("shard") > 1 and mesh.size("replica") > 1:
        yield from ((axis, mesh.size(axis)) for axis in ("shard", "replica"))
    if mesh.size("ep") > 1:
        yield from ((axis, mesh.size(axis)) for axis in ("ep", "edp"))
