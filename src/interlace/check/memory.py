"""What lies where: memory with names, the words atomics use, and what is known of each element.

Addresses are those of this process.  Tensors of the heap are told by name when they are allocated, others when a kernel
or a copy is given them; what lies outside is out of bounds.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from interlace.check.order import Clock, Shadow
from interlace.check.place import line
from interlace.symmetric.record import HEAD

if TYPE_CHECKING:
    from interlace.check.fiber import Fiber


@dataclass(eq=False, slots=True)
class Region:
    """Memory with a name: bytes [begin, end), elements of `size` bytes.  `rank` owns it."""

    begin: int
    end: int
    name: str
    size: int
    rank: int
    shape: tuple[int, ...]
    keep: Any
    shadow: Shadow
    constant: bool = False  # never changes: reading is no event
    quiet: bool = False  # the heap's own words: no event either
    freed: bool = False
    words: bool = False  # atomics use some of its elements
    waiting: dict[int, list[Fiber]] = field(default_factory=dict)  # by address
    values: dict[Any, Any] = field(default_factory=dict)  # of what never changes: what was read, by address and type

    def element(self, address: int, size: int | None = None) -> str:
        index = (address - self.begin) // self.size
        where = [str(index)]
        count = math.prod(self.shape)
        if len(self.shape) > 1 and count * self.size == self.end - self.begin and 0 <= index < count:
            where = [str(int(i)) for i in np.unravel_index(index, self.shape)]
        return f"rank {self.rank} {self.name}[{', '.join(where)}]"


@dataclass(eq=False, slots=True)
class Signal:
    """One write of a word by an atomic, or by anything else to a word atomics use."""

    fiber: Fiber
    event: int
    before: int
    after: int
    sem: str
    scope: str
    operation: str
    seen: bool = False  # somebody has read it since
    fence: tuple[int, tuple[str, int]] | None = None  # of a relaxed one: the fence that makes it a release


@dataclass(eq=False, slots=True)
class Word:
    """A word that atomics use.  `messages`: what releases have published, by rank and scope."""

    messages: dict[tuple[int, int], Clock] = field(default_factory=dict)
    history: list[Signal] = field(default_factory=list)


class Found(Exception):
    """What a schedule found; `interlace.check.report` makes a report of it."""

    def __init__(self, kind: str, **facts: Any) -> None:
        super().__init__(kind)
        self.kind, self.facts = kind, facts


class Memory:
    """All regions of one schedule."""

    def __init__(self, arenas: list[torch.Tensor]) -> None:
        self.arenas = arenas
        self.starts: list[int] = []
        self.regions: list[Region] = []
        self.graves: list[Region] = []  # freed
        self.words: dict[int, Word] = {}
        for rank, arena in enumerate(arenas):
            self._add(Region(*_span(arena[:HEAD]), "heap head", 8, rank, (32,), arena, Shadow(1, True), quiet=True))

    def _add(self, region: Region) -> None:
        at = bisect.bisect_left(self.starts, region.begin)
        self.starts.insert(at, region.begin)
        self.regions.insert(at, region)

    def register(
        self, tensor: torch.Tensor, name: str, rank: int, written: bool = True, constant: bool = False
    ) -> None:
        """Gives a tensor's storage a name, unless its memory has one."""
        if self.find(tensor.data_ptr()) is not None:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return
        begin = storage.data_ptr()
        if any(begin <= arena.data_ptr() < begin + storage.nbytes() for arena in self.arenas):
            return  # of the heap: its tensors have names, what lies between them has none
        count = storage.nbytes() // tensor.element_size()
        region = Region(
            begin, begin + storage.nbytes(), name, tensor.element_size(), rank, tuple(tensor.shape), storage,
            Shadow(1 if constant else count, written), constant,
        )  # fmt: skip
        self._add(region)

    def allocated(self, tensor: torch.Tensor, name: str, rank: int, written: bool) -> None:
        """Names a tensor of the heap."""
        if tensor.numel():
            begin, end = _span(tensor)
            shadow = Shadow(tensor.numel(), written)
            self._add(Region(begin, end, name, tensor.element_size(), rank, tuple(tensor.shape), tensor, shadow))

    def freed(self, begin: int) -> None:
        region = self.find(begin)
        if region is not None and region.begin == begin:
            self._bury(region)

    def closed(self, rank: int) -> None:
        """A rank's arena is gone, and with it all that lies there."""
        begin, end = _span(self.arenas[rank])
        for region in [each for each in self.regions if begin <= each.begin < end and not each.quiet]:
            self._bury(region)

    def _bury(self, region: Region) -> None:
        at = self.regions.index(region)
        del self.regions[at], self.starts[at]
        region.freed = True
        self.graves.append(region)
        for address in [word for word in self.words if region.begin <= word < region.end]:
            del self.words[address]

    def find(self, address: int) -> Region | None:
        at = bisect.bisect_right(self.starts, address) - 1
        if at >= 0 and address < self.regions[at].end:
            return self.regions[at]
        return None

    def locate(self, addresses: Any, size: int, write: bool) -> list[tuple[Region, Any]]:
        """The regions addresses lie in, with the elements' numbers; of one address, one number."""
        if len(addresses) == 1:
            lowest = highest = addresses.item()
        else:
            lowest, highest = int(addresses.min()), int(addresses.max())
        first = self.find(lowest)
        if first is not None and highest + size <= first.end:
            return [(first, self._elements(first, addresses, size))]
        parts: dict[int, tuple[Region, list[int]]] = {}
        for address in (int(a) for a in addresses):
            region = self.find(address)
            if region is None or address + size > region.end:
                raise Found("out of bounds", address=address, write=write, place=line())
            parts.setdefault(region.begin, (region, []))[1].append(address)
        return [(r, self._elements(r, np.array(found, np.uint64), size)) for r, found in parts.values()]

    @staticmethod
    def _elements(region: Region, addresses: Any, size: int) -> Any:
        if len(addresses) == 1 and size == region.size:
            return (addresses.item() - region.begin) // size
        if size < region.size and not (region.constant or region.quiet):
            region.shadow.refine(region.size // size)
            region.size = size
        at = ((addresses - np.uint64(region.begin)) // np.uint64(region.size)).astype(np.int64)
        if size > region.size:
            at = (at[:, None] + np.arange(size // region.size)).ravel()
        return at


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


WORDS = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


def peek(address: int, size: int) -> int:
    """The word at an address, signed."""
    if size in WORDS:
        return WORDS[size].from_address(address).value
    return int.from_bytes(ctypes.string_at(address, size), "little", signed=True)
