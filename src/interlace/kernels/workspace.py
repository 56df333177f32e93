"""Symmetric memory that a group's fused products share: buffers, signal words, and the number of the call.

    space = workspace.of(group, "all_gather_matmul")
    space.require({"rows": nbytes}, {"arrived": group.size})     # collective where it grows, else nothing
    turn = space.turn()                                          # one call
    space.buffer("rows", peer, shape, dtype, turn.half * nbytes // 2); turn.words("arrived", peer); turn.number

Equals a heap made for every call, without the cost: memory only grows, so a changing number of rows rebuilds nothing.
Words only grow too, so none is ever reset.  All calls on a device follow each other, of whatever operation, group and
stream: a call on another stream than the last waits for that one.  Kernels that wait for peers may fill a device, and
two of them that ranks run in different orders would wait for ever.

A call's number is counted by the host, and streams raise words to it themselves, without a multiprocessor.  A CUDA
graph would raise the old number again; so from the first captured call on, numbers are counted in memory: a small
kernel advances the word and lets all ranks meet (`_meet`), copies of that word raise the others, and calls on the host
do the same.  `half` alternates while the host counts: a rank at call e + 1 has seen everybody's signals of e, so
everybody has left call e - 1, and what that one read may be overwritten.  With `_meet` before every call one half does.

Every rank makes the same calls with the same sizes, in the same order, as with collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import triton

from interlace.collectives import Group, reach
from interlace.errors import ConfigError
from interlace.plan import overlap
from interlace.streams import current, expect_graphs, lasting
from interlace.symmetric import SymmetricHeap, SymmetricTensor
from interlace.symmetric.device import barrier, next_epoch
from interlace.symmetric.record import GAVE_UP

T = TypeVar("T")
TIMEOUT = 60.0  # seconds of every wait; ranks may compile at different moments
LOOK = 64  # calls between two looks at whether a wait gave up
ROUTES = 256  # that are kept: a changing number of rows makes new ones


@triton.jit
def _meet(epochs, flags, heap):
    """One program: counts the call, and ends when every rank has come to it."""
    epoch = next_epoch(epochs)
    barrier(flags, epoch, heap, "meet")


@dataclass(frozen=True)
class Turn:
    """One call: its number (an int, or the word that holds it), and which half of the buffers is its own."""

    space: Workspace
    number: int | torch.Tensor
    half: int

    @property
    def in_memory(self) -> bool:
        return isinstance(self.number, torch.Tensor)

    def words(self, name: str, rank: int | None = None) -> torch.Tensor:
        """int32 words of a rank (None: this one), as this rank addresses them."""
        tensor = self.space.tensors[name]
        count = tensor.shape[0] // 2
        whole = tensor.local if rank is None else tensor.peer(rank)
        return whole[count:] if self.in_memory else whole[:count]


@dataclass
class Order:
    """The stream on which a rank made its last call."""

    stream: torch.cuda.Stream | None = None


class Workspace:
    """See the module.  `heap`: the one to take memory from; None makes an own one, and larger ones as needed."""

    def __init__(self, group: Group, op: str, order: Order, heap: SymmetricHeap | None = None) -> None:
        self.op = op
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.tensors: dict[str, SymmetricTensor] = {}
        self._routes: dict[Hashable, Any] = {}
        self.counts_in_memory = False  # from the first captured call on
        self._process_group = group.process_group
        self._given, self._heap = heap is not None, heap
        self._kept: list[SymmetricHeap] = []  # older ones that graphs may replay on
        self._bytes: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._number = 0
        self._order = order
        self._calls = 0
        self._look: tuple[torch.Tensor, torch.cuda.Event] | None = None  # at whether a wait gave up

    @property
    def heap(self) -> SymmetricHeap:
        assert self._heap is not None, "require() first"
        return self._heap

    # --- memory ------------------------------------------------------------------------------------------------------

    def require(self, buffers: Mapping[str, int], words: Mapping[str, int]) -> None:
        """Makes sure of so many bytes and words by name, the same on every rank.

        Collective, and words begin anew, when something is larger than before.  ConfigError inside a graph's capture.
        """
        words = overlap.every_word(words, self.size)
        if self._has(buffers, words):
            return
        if self._is_captured():
            raise ConfigError(
                f"{self.op} needs more symmetric memory than before while a graph is captured; make one call with "
                "these sizes before the capture."
            )
        for name, nbytes in buffers.items():
            self._bytes[name] = overlap.grown(self._bytes.get(name, 0), nbytes)
        for name, count in words.items():
            self._words[name] = max(count, self._words.get(name, 0))
        self._renew()

    def _has(self, buffers: Mapping[str, int], words: Mapping[str, int]) -> bool:
        return (
            self._heap is not None
            and bool(self.tensors)
            and all(self._bytes.get(name, -1) >= nbytes for name, nbytes in buffers.items())
            and all(self._words.get(name, -1) >= count for name, count in words.items())
        )

    def _renew(self) -> None:
        """All tensors anew; every rank has finished with the old ones."""
        self._routes.clear()
        if self._given:
            for tensor in self.tensors.values():
                self.heap.free(tensor)
        else:
            self._replace_heap()
        self._look = None
        heap, prefix = self.heap, f"{self.op}."
        self.tensors = {
            name: heap.zeros(nbytes, torch.uint8, prefix + name) for name, nbytes in self._bytes.items()
        } | {name: heap.signals(2 * count, prefix + name) for name, count in self._words.items()}
        self._number = heap.origin

    def _replace_heap(self) -> None:
        if self._heap is not None:
            self._heap.barrier()
            if self.counts_in_memory:
                self._kept.append(self._heap)
            else:
                self._heap.close()
        nbytes = overlap.arena(self._bytes, self._words)
        self._heap = lasting(
            self.device, lambda: SymmetricHeap(nbytes, self._process_group, self.device, TIMEOUT)
        )  # a call that warms a graph up may be the first

    def buffer(
        self, name: str, rank: int | None, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """A view of a rank's bytes (None: this one's) from byte `offset` on, as this rank addresses them."""
        tensor = self.tensors[name]
        whole = tensor.local if rank is None else tensor.peer(rank)
        count = dtype.itemsize
        for size in shape:
            count *= size
        return whole[offset : offset + count].view(dtype).view(shape)

    def route(self, key: Hashable, make: Callable[[], T]) -> T:
        """What calls of one kind have made of the tensors, or their sizes; made anew when those are."""
        found: T | None = self._routes.get(key)
        if found is None:
            if len(self._routes) >= ROUTES:
                self._routes.clear()
            found = self._routes[key] = make()
        return found

    def places(self, programs: int) -> int:
        """How many programs of a kernel that waits: `programs`, but no more than fit on the device together.

        Calls counted in memory leave one multiprocessor to the small kernels and copies that graphs may make of words.
        """
        if self.device.type == "cuda":
            most = torch.cuda.get_device_properties(self.device).multi_processor_count - self.counts_in_memory
            sharing = 1 if self._heap is None else self._heap.fabric.sharing
            return max(1, min(programs, most if sharing == 1 else most // (2 * sharing)))  # copies there need some too
        return max(1, min(programs, 2))

    # --- calls -------------------------------------------------------------------------------------------------------

    def turn(self) -> Turn:
        """Begins a call, in order after the last one of this operation and group."""
        self.follow()
        self.counts_in_memory = self.counts_in_memory or self._is_captured()
        if self.counts_in_memory:
            turn = Turn(self, self.tensors["epoch"].local[1:], 0)
            meet: Any = _meet[(1,)]
            meet(turn.number, turn.words("meet"), self.heap.context, num_warps=1)
            return turn
        self._number += 1
        number = (self._number + (1 << 31)) % (1 << 32) - (1 << 31)  # as a word holds it
        return Turn(self, number, self._number % 2)

    def follow(self) -> None:
        """The current stream goes on after the last call; for kernels that count their calls themselves."""
        if self.device.type != "cuda":
            return
        if self._is_captured():  # a capture orders its own calls, and may not wait for what is outside
            self.counts_in_memory = True  # replays need this heap as long as the graph lives
            return
        stream, last = current(self.device), self._order.stream
        if last is not None and last != stream:
            stream.wait_stream(last)
        self._order.stream = stream
        self._calls += 1
        if self._calls % LOOK == 0:
            self.look_back()

    def look_back(self) -> None:
        """Raises Hang if a wait of a kernel gave up some calls ago; neither the host nor the device stops for it."""
        if self._look is not None and self._look[1].query():
            if int(self._look[0]):
                self.heap.check()
            self._look = None
        if self._look is None:
            word = self.heap.fabric.arenas[self.rank][GAVE_UP : GAVE_UP + 4].view(torch.int32)
            seen = torch.empty(1, dtype=torch.int32, pin_memory=True)
            seen.copy_(word, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._look = seen, event

    def _is_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        """Collective."""
        if self._given:
            for tensor in self.tensors.values():
                self.heap.free(tensor)
        elif self._heap is not None:
            for heap in (self._heap, *self._kept):
                heap.barrier()
                heap.close()
        self.tensors, self._heap, self._kept = {}, None, []
        self._routes.clear()


@dataclass
class _Held:
    """What a group has."""

    order: Order
    given: SymmetricHeap | None = None
    reachable: bool | None = None
    spaces: dict[str, Workspace] = field(default_factory=dict)
    counts_in_memory: bool = False


_GROUPS: WeakKeyDictionary[Group, _Held] = WeakKeyDictionary()
_ORDERS: dict[torch.device, Order] = {}


def _held(group: Group) -> _Held:
    found = _GROUPS.get(group)
    if found is None:
        found = _GROUPS[group] = _Held(_ORDERS.setdefault(group.device, Order()))
    return found


def reachable(group: Group) -> bool:
    """Whether all ranks of the group address each other's memory.  Collective at its first call for a group."""
    held = _held(group)
    if held.reachable is None:
        held.reachable = group.size == 1 or reach(group)
    return held.reachable


def of(group: Group, op: str) -> Workspace:
    """The workspace of an operation of a group; made at its first use, when it is collective."""
    held = _held(group)
    if op not in held.spaces:
        held.spaces[op] = Workspace(group, op, held.order, held.given)
        held.spaces[op].counts_in_memory = held.counts_in_memory
    return held.spaces[op]


def count_in_memory(group: Group) -> None:
    """From here on calls of the group are counted in memory, as in graphs.

    Before a capture: then one call of every shape compiles and allocates what the captured one uses.
    """
    expect_graphs()
    held = _held(group)
    held.counts_in_memory = True
    for space in held.spaces.values():
        space.counts_in_memory = True


def check(group: Group) -> None:
    """Raises Hang, naming the peer, if a wait of the group's kernels gave up.  Waits for the device.

    Calls find out by themselves, `LOOK` calls later or more; those that graphs replay do not.
    """
    for space in _held(group).spaces.values():
        if space._heap is not None:
            space._heap.synchronize()


def look(group: Group) -> None:
    """The same without waiting, of what the device had come to at the look before."""
    for space in _held(group).spaces.values():
        if space._heap is not None:
            space.look_back()


def arenas(group: Group) -> list[torch.Tensor]:
    """The memory of all ranks, as this one addresses it, that the group's operations hold."""
    return [arena for heap in _heaps(group) for arena in heap.fabric.arenas]


def contexts(group: Group) -> list[torch.Tensor]:
    """The few words on this rank that tell its kernels where those arenas are."""
    return [heap.context for heap in _heaps(group)]


def _heaps(group: Group) -> list[SymmetricHeap]:
    spaces = _held(group).spaces.values()
    return [heap for space in spaces for heap in (space._heap, *space._kept) if heap is not None]


def release(group: Group) -> None:
    """Collective: gives back all memory of the group's operations.  Graphs that hold calls of them are void."""
    held = _GROUPS.pop(group, None)
    for _, space in sorted(held.spaces.items()) if held is not None else ():
        space.close()


@contextmanager
def on(heap: SymmetricHeap, group: Group) -> Iterator[None]:
    """Inside the block the group's workspaces take their memory from `heap`, whose ranks are the group's.

    For ranks that share a process: on one GPU, or under the checker.
    """
    assert (heap.rank, heap.size) == (group.rank, group.size)
    _GROUPS[group] = _Held(Order(), heap, reachable=True)
    try:
        yield
    finally:
        del _GROUPS[group]
