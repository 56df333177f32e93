"""N ranks x P programs as fibers of one process, and every memory operation an event.

A fiber is a greenlet: a rank's host program, a program of a kernel, or one item of a stream (a copy, a flag, a torch
operation).  Before each load, store and atomic it hands control to the hub, which lets a schedule choose who goes on;
only one runs at a time, so a schedule is a sequence of choices and repeats exactly.

Streams are queues: the next item begins when the last has ended and knows all that one knew.  A polling loop is a read
that gives the same value twice with nothing in between; its fiber sleeps until somebody writes there.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import triton
from greenlet import greenlet
from torch.overrides import TorchFunctionMode

from interlace.check.order import BLOCK, CTA, GPU, LANE, PLAIN, PROXY, SYS, Clock, Knowledge, Shadow
from interlace.symmetric.interpreter import Access, Atomic, Launch

SCOPES = {"cta": CTA, "gpu": GPU, "sys": SYS}
MOST_EVENTS = 400_000  # of one schedule
TICK = 1000  # nanoseconds of the machine's clock an event takes
LARGEST_POLL = 32  # elements; a longer read is no poll
HERE = Path(__file__).parent
OWN = tuple(
    f"{folder}{os.sep}"
    for folder in (HERE, HERE.parent / "symmetric", *(Path(str(each.__file__)).parent for each in (triton, torch, np)))
)


class Grow(Exception):
    """More fibers than clocks have components: the schedule is to be repeated with longer ones."""


class Strategy(Protocol):
    """Chooses who goes on."""

    def choose(self, ready: list[Fiber], current: Fiber | None) -> Fiber: ...

    def order(self, programs: list[int]) -> list[int]:
        """In which order a kernel's programs become resident."""
        ...


@dataclass(eq=False)
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
    waiting: dict[int, list[Fiber]] = field(default_factory=dict)  # by address

    def element(self, address: int, size: int | None = None) -> str:
        index = (address - self.begin) // self.size
        where = [str(index)]
        if len(self.shape) > 1 and math.prod(self.shape) * self.size == self.end - self.begin and index >= 0:
            where = [str(int(i)) for i in np.unravel_index(index, self.shape)]
        return f"rank {self.rank} {self.name}[{', '.join(where)}]"


@dataclass(eq=False)
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


@dataclass(eq=False)
class Word:
    """A word that atomics use.  `messages`: what releases have published, by rank and scope."""

    messages: dict[tuple[int, int], Clock] = field(default_factory=dict)
    history: list[Signal] = field(default_factory=list)


@dataclass(eq=False)
class Seen:
    """What a fiber saw of another's signal: whether it learned from it, and the two events."""

    learned: bool
    why: str
    read: int
    signal: Signal


@dataclass(eq=False)
class Poll:
    """The reads a sleeping fiber repeats."""

    region: Region
    address: int
    value: int
    event: int
    wanted: tuple[str, int] | None = None


@dataclass(eq=False)
class Item:
    """Work of a stream.  `bodies` are its programs; they begin when the item before has ended."""

    rank: int
    stream: Stream
    label: str
    launch: Launch | None
    bodies: list[Callable[[], None]]
    start: Clock  # what the host knew when it enqueued it
    number: int  # which launch of this kernel it is on this rank
    event: Any = None  # a Mark to set or to wait for, for items without bodies
    pending: list[int] = field(default_factory=list)
    left: int = 0
    collected: Clock | None = None  # what its programs knew when they ended
    begun: bool = False
    ended: bool = False


@dataclass(eq=False)
class Stream:
    rank: int
    name: str
    knows: Clock
    items: collections.deque[Item] = field(default_factory=collections.deque)


@dataclass(eq=False)
class Fiber:
    number: int
    rank: int
    kind: str  # host, program, item
    label: str
    program: int
    item: Item | None
    knows: Knowledge
    run: Any = None
    asleep: bool = False
    polls: list[Poll] = field(default_factory=list)
    known: set[Any] = field(default_factory=set)  # what it has read since it last wrote
    repeats: int = 0  # reads since, that told it nothing new
    patience: int = 2  # reads it may repeat before it sleeps
    seen: dict[int, Seen] = field(default_factory=dict)
    waits: dict[int, Seen] = field(default_factory=dict)  # by word: the last signal it read there
    fenced: Clock | None = None  # what relaxed reads have seen, for the next fence
    handle: Any = None  # what the last poll returned
    blocked: str = ""  # why a host program does not go on

    def __str__(self) -> str:
        if self.kind == "host":
            return f"rank {self.rank} host program"
        if self.kind == "program":
            return f"rank {self.rank} {self.label} program {self.program}"
        return f"rank {self.rank} {self.label}"


class Found(Exception):
    """What a schedule found; `explain` makes a report of it."""

    def __init__(self, kind: str, **facts: Any) -> None:
        super().__init__(kind)
        self.kind, self.facts = kind, facts


class Machine:
    """One schedule of one launch.

    `resident`: programs of a rank that run at once; `stop`: a rank, and the event at which it stops.
    """

    def __init__(
        self,
        size: int,
        strategy: Strategy,
        arenas: list[torch.Tensor],
        capacity: int,
        resident: int | None = None,
        stop: tuple[int, int] | None = None,
        barriers: bool = True,
    ) -> None:
        self.size, self.strategy, self.arenas, self.capacity = size, strategy, arenas, capacity
        self.resident, self.stop, self.barriers = resident, stop, barriers
        self.fibers: list[Fiber] = []
        self.rank_of = np.full(capacity, -1, np.int32)
        self.fiber_of: list[Fiber | None] = [None] * capacity
        self.ready: list[Fiber] = []
        self.current: Fiber | None = None
        self.hub = greenlet.getcurrent()
        self.streams: list[dict[str, Stream]] = [{} for _ in range(size)]
        self.running: list[int] = [0] * size  # resident programs
        self.events: list[tuple[Fiber, str, str, int]] = []
        self.memory_events = 0
        self.starts: list[int] = []
        self.regions: list[Region] = []
        self.graves: list[Region] = []  # freed
        self.words: dict[int, Word] = {}
        self.launches: collections.Counter[tuple[int, str]] = collections.Counter()
        self.clock = 0
        self.dead: int | None = None
        self.died_at = ""
        self.dirty = True
        self.internal = 0
        self.unwritten: list[tuple[Fiber, int, Region, int]] = []
        self.chances = 0
        self.hosts: list[Any] = []  # the ranks, `interlace.check.host.Host`
        self.mode_inside: Any = None  # the mode of torch operations, while a host program is inside one
        for rank, arena in enumerate(arenas):
            self._add(Region(*_span(arena[:256]), "heap head", 8, rank, (32,), arena, Shadow(1, True), quiet=True))

    # --- memory ------------------------------------------------------------------------------------------------------

    def _add(self, region: Region) -> None:
        at = bisect.bisect_left(self.starts, region.begin)
        self.starts.insert(at, region.begin)
        self.regions.insert(at, region)

    def register(
        self, tensor: torch.Tensor, name: str, rank: int, written: bool = True, constant: bool = False
    ) -> None:
        """Gives a tensor's storage a name, unless its memory has one."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or self.find(tensor.data_ptr()) is not None:
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
        """The regions addresses lie in, with the elements' numbers."""
        lowest = highest = int(addresses[0])
        if len(addresses) > 1:
            lowest, highest = int(addresses.min()), int(addresses.max())
        first = self.find(lowest)
        if first is not None and highest + size <= first.end:
            return [(first, self._elements(first, addresses, size))]
        parts: dict[int, tuple[Region, list[int]]] = {}
        for address in (int(a) for a in addresses):
            region = self.find(address)
            if region is None or address + size > region.end:
                raise Found("out of bounds", address=address, write=write, place=_line())
            parts.setdefault(region.begin, (region, []))[1].append(address)
        return [(r, self._elements(r, np.array(found, np.uint64), size)) for r, found in parts.values()]

    @staticmethod
    def _elements(region: Region, addresses: Any, size: int) -> Any:
        if size < region.size and not (region.constant or region.quiet):
            region.shadow.refine(region.size // size)
            region.size = size
        at = ((addresses - np.uint64(region.begin)) // np.uint64(region.size)).astype(np.int64)
        if size > region.size:
            at = (at[:, None] + np.arange(size // region.size)).ravel()
        return at

    # --- what the interpreter tells ----------------------------------------------------------------------------------

    def access(self, what: Access, do: Callable[[], Any]) -> Any:
        """A load or store of a program."""
        if not len(what.addresses):
            return do()
        fiber = self.current
        assert fiber is not None
        parts = self.locate(what.addresses, what.size, what.write)
        if parts[0][0].constant or parts[0][0].quiet:
            return do()
        self.pause(fiber)
        single = len(what.addresses) == 1
        component = PROXY if what.proxy and what.write else LANE if single else BLOCK
        kind = SYS if what.volatile else PLAIN
        verb = f"{'descriptor ' if what.proxy else ''}{'store' if what.write else 'load'}"
        event = self.event(fiber, ("volatile " if what.volatile else "") + verb)
        for region, at in parts:
            self.touch(fiber, region, at, what.write, component, kind, event, proxy=what.proxy and not what.write)
        befores = self._befores(what.addresses, what.size) if what.write else {}
        made = do()
        if what.write:
            self.changed(fiber, parts, event)
            for address, before in befores.items():
                after = peek(address, what.size)
                self._signalled(fiber, address, event, before, after, "relaxed", "", "store")
            return made
        if what.volatile and len(what.addresses) <= LARGEST_POLL:
            for address in what.addresses:
                self._observe(fiber, int(address), event, "relaxed", SYS)
        if len(what.addresses) <= LARGEST_POLL:
            self.polled(fiber, parts[0][0], what.addresses, made, event)
        return made

    def _befores(self, addresses: Any, size: int) -> dict[int, int]:
        """Values of those words among the addresses that atomics use."""
        if not self.words or len(addresses) > 4096:
            return {}
        return {int(a): peek(int(a), size) for a in addresses if int(a) in self.words}

    def atomic(self, what: Atomic, do: Callable[[], Any]) -> Any:
        if not len(what.addresses):
            return do()
        fiber = self.current
        assert fiber is not None
        parts = self.locate(what.addresses, what.size, what.changes)
        if parts[0][0].quiet:
            return do()
        self.pause(fiber)
        scope = SCOPES[what.scope]
        event = self.event(fiber, f"atomic_{what.operation}({what.sem}, {what.scope})")
        befores = [peek(int(a), what.size) for a in what.addresses]
        made = do()
        afters = [peek(int(a), what.size) for a in what.addresses]
        swapped = what.operation == "cas" and befores == [int(w) for w in np.asarray(what.wanted).ravel()]
        write = what.changes and (what.operation != "cas" or swapped)
        for region, at in parts:
            self.touch(fiber, region, at, write, LANE, scope, event, read=True)
        for address in what.addresses:
            self._observe(fiber, int(address), event, what.sem, scope, write)
        if write:
            self._publish(fiber, what, event, befores, afters)
        if write and befores != afters:
            self.changed(fiber, parts, event)
        else:
            fiber.handle = made
            self.polled(fiber, parts[0][0], what.addresses, made, event)
            if what.operation == "cas" and fiber.polls:
                fiber.polls[-1].wanted = ("==", int(np.asarray(what.wanted).ravel()[0]))
        return made

    def _observe(self, fiber: Fiber, address: int, event: int, sem: str, scope: int, write: bool = False) -> None:
        """What reading a word teaches a fiber."""
        word = self.words.get(address)
        if word is None:
            return
        acquires = sem in ("acquire", "acq_rel")
        reached = False
        for (rank, reach), clock in word.messages.items():
            if (rank == fiber.rank and min(reach, scope) >= GPU) or (reach == SYS and scope == SYS):
                if acquires:
                    fiber.knows.learn(clock)
                    reached = True
                else:
                    fiber.fenced = clock.copy() if fiber.fenced is None else np.maximum(fiber.fenced, clock)
        if word.history:
            last = word.history[-1]
            last.seen = last.seen or (last.fiber is not fiber and not write)
            why = "" if reached else self._why_not(last, fiber, acquires, scope)
            fiber.seen[last.fiber.number] = fiber.waits[address] = Seen(reached, why, event, last)

    def _why_not(self, last: Signal, fiber: Fiber, acquires: bool, scope: int) -> str:
        if last.sem not in ("release", "acq_rel"):
            return "relaxed signal"
        if not acquires:
            return "relaxed wait"
        narrow = min(SCOPES.get(last.scope, SYS), scope)
        return "scope" if (narrow < SYS and last.fiber.rank != fiber.rank) or narrow < GPU else ""

    def _publish(self, fiber: Fiber, what: Atomic, event: int, befores: list[int], afters: list[int]) -> None:
        scope = SCOPES[what.scope]
        releases = what.sem in ("release", "acq_rel")
        made: Clock | None = None
        if releases:
            made = self._published(fiber, len(what.addresses) == 1)
        else:
            for reach, clock in fiber.knows.released.items():
                made = clock if made is None else np.maximum(made, clock)
                scope = min(scope, reach)
        for address, before, after in zip((int(a) for a in what.addresses), befores, afters, strict=True):
            word = self.words.setdefault(address, Word())
            if made is not None:
                key = (fiber.rank, scope)
                old = word.messages.get(key)
                word.messages[key] = made.copy() if old is None else np.maximum(old, made)
            sem = what.sem if releases or made is None else "release"
            self._signalled(fiber, address, event, before, after, sem, what.scope, what.operation, keep=True)

    def _published(self, fiber: Fiber, single: bool) -> Clock:
        if fiber.kind != "program" or not self.barriers:
            fiber.knows.barrier()
        return fiber.knows.published(single)

    def _signalled(
        self, fiber: Fiber, address: int, event: int, before: int, after: int, sem: str, scope: str, operation: str,
        keep: bool = False,
    ) -> None:  # fmt: skip
        word = self.words[address]
        if not keep:
            word.messages.clear()  # a store that is no atomic ends the releases before it
        word.history.append(Signal(fiber, event, before, after, sem, scope, operation))

    def barrier(self) -> None:
        if self.current is not None:
            self.current.knows.barrier()

    def ptx(self, word: str) -> int:
        fiber = self.current
        assert fiber is not None
        if "globaltimer" in word:
            return self.clock + len(self.events) * TICK
        if word.startswith("cp.async.bulk.wait_group"):
            fiber.knows.flush()
        elif word.startswith("fence.proxy"):
            fiber.knows.admit()
        elif word.startswith(("fence", "membar")):
            self.fence(fiber, {"gl": "gpu"}.get(word.rsplit(".", 1)[-1], word.rsplit(".", 1)[-1]))
        return 0

    def fence(self, fiber: Fiber, scope: str) -> None:
        if fiber.fenced is not None:
            fiber.knows.learn(fiber.fenced)
            fiber.fenced = None
        fiber.knows.released[SCOPES[scope]] = fiber.knows.published(True)

    def compared(self, left: Any, right: Any, how: str) -> None:
        """The interpreter compares two values: what a poll returned is one side, what is wanted the other."""
        fiber = self.current
        if fiber is None or fiber.handle is None or left is not fiber.handle or not fiber.polls:
            return
        fiber.polls[-1].wanted = (how, int(np.asarray(right.data).ravel()[0]))

    # --- happens-before ----------------------------------------------------------------------------------------------

    def event(self, fiber: Fiber, what: str) -> int:
        """Notes who does what where; returns its number."""
        file, line = _line()
        self.events.append((fiber, what, file, line))
        self.memory_events += 1
        if len(self.events) > MOST_EVENTS:
            raise Found("no end", events=len(self.events))
        if self.stop is not None and self.dead is None and len(self.events) >= self.stop[1]:
            self.kill(self.stop[0])
        return len(self.events) - 1

    def touch(
        self, fiber: Fiber, region: Region, at: Any, write: bool, component: int, kind: int, event: int,
        proxy: bool = False, read: bool = False,
    ) -> None:  # fmt: skip
        """Checks an access against what is known of the elements, and notes it."""
        shadow, knows = region.shadow, fiber.knows
        clock = knows.proxy if proxy else knows.now
        conflict = shadow.check(at, clock, write, kind, fiber.rank, self.rank_of)
        if conflict is not None and self.dead is None:  # after a rank has stopped only ends of waits are judged
            if proxy and shadow.check(at, knows.now, write, kind, fiber.rank, self.rank_of) is None:
                conflict = replace(conflict, scopes=False, proxy=True)
            raise Found(
                "race",
                region=region,
                index=int(at[conflict.index]),
                conflict=conflict,
                event=event,
                write=write,
                strength=kind,
            )
        mine = knows.first + component
        if (not write or read) and not shadow.written[at].all() and not region.freed:
            index = int(at[int((~shadow.written[at]).argmax())])
            self.unwritten.append((fiber, event, region, index))
        if write:
            shadow.note_write(at, mine, int(knows.now[mine]), event, kind)
        else:
            shadow.note_read(at, mine, int(knows.now[mine]), event, kind, knows.now)

    # --- polling -----------------------------------------------------------------------------------------------------

    def polled(self, fiber: Fiber, region: Region, addresses: Any, made: Any, event: int) -> None:
        """Puts a fiber to sleep that reads the same again with nothing in between."""
        data = np.asarray(made.data)
        key = (self.events[event][3], int(addresses[0]), len(addresses), data.tobytes())
        if key in fiber.known:
            fiber.repeats += 1
        else:
            fiber.known.add(key)
            fiber.repeats, fiber.patience, self.chances = 0, 2, 0
        fiber.handle = made
        poll = Poll(region, int(addresses[0]), int(data.ravel()[0]) if data.dtype.kind in "iub" else 0, event)
        wanted = [each.wanted for each in fiber.polls if each.address == poll.address]
        poll.wanted = wanted[-1] if wanted else None
        fiber.polls = [*[each for each in fiber.polls if each.address != poll.address][-3:], poll]
        if fiber.repeats < fiber.patience:
            return
        fiber.asleep = True
        for each in fiber.polls:
            each.region.waiting.setdefault(each.address, []).append(fiber)
        if len(addresses) > 1:
            for address in addresses[1:]:
                region.waiting.setdefault(int(address), []).append(fiber)

    def changed(self, fiber: Fiber, parts: list[tuple[Region, Any]], event: int) -> None:
        """Something was written: it is progress, and who waits there looks again."""
        fiber.known.clear()
        fiber.polls, fiber.handle, self.chances = [], None, 0
        for region, at in parts:
            if region.waiting:
                size = region.size
                written = {region.begin + int(index) * size for index in at}
                for address in [a for a in region.waiting if a - (a - region.begin) % size in written]:
                    for sleeper in region.waiting.pop(address):
                        self.wake(sleeper)

    def wake(self, fiber: Fiber) -> None:
        if fiber.asleep and fiber.rank != self.dead:
            fiber.asleep, fiber.repeats = False, 0
            self.ready.append(fiber)

    # --- fibers ------------------------------------------------------------------------------------------------------

    def pause(self, fiber: Fiber) -> None:
        """Lets the schedule choose who goes on."""
        self.hub.switch()

    def start(
        self, rank: int, kind: str, label: str, body: Callable[[], None], knows: Clock, program: int = 0,
        item: Item | None = None,
    ) -> Fiber:  # fmt: skip
        first = 3 * (len(self.fibers) + 1)
        if first + 3 > self.capacity:
            raise Grow
        fiber = Fiber(len(self.fibers), rank, kind, label, program, item, Knowledge(first, knows.copy()))
        self.rank_of[first : first + 3] = rank
        self.fiber_of[first : first + 3] = [fiber] * 3
        fiber.run = greenlet(body, self.hub)
        self.fibers.append(fiber)
        self.ready.append(fiber)
        return fiber

    def stream(self, rank: int, name: str) -> Stream:
        found = self.streams[rank].get(name)
        if found is None:
            found = self.streams[rank][name] = Stream(rank, name, np.zeros(self.capacity, np.int32))
        return found

    def enqueue(self, item: Item) -> None:
        item.left = len(item.bodies)
        programs = list(range(item.left))
        item.pending = self.strategy.order(programs) if item.launch is not None else programs
        item.stream.items.append(item)
        self.dirty = True

    def advance(self) -> None:
        """Begins what can begin: heads of streams, then programs as far as they find room."""
        progress = True
        while progress:
            progress = self.dirty = False
            for streams in self.streams:
                for stream in list(streams.values()):
                    progress |= self._advance(stream)
        self.hosts_go_on()

    def _advance(self, stream: Stream) -> bool:
        if not stream.items or stream.rank == self.dead:
            return False
        item = stream.items[0]
        if not item.begun:
            if item.event is not None and not item.bodies:
                if not item.event(stream):
                    return False
                stream.items.popleft()
                item.ended = True
                return True
            item.begun = True
            np.maximum(stream.knows, item.start, out=stream.knows)
            if not item.bodies:  # a grid of none
                stream.items.popleft()
                item.ended = True
                return True
        while item.pending:
            if item.launch is not None:
                if self.resident is not None and self.running[item.rank] >= self.resident:
                    break
                self.running[item.rank] += 1
            program = item.pending.pop(0)
            kind = "item" if item.launch is None else "program"
            self.start(item.rank, kind, item.label, item.bodies[program], item.stream.knows, program, item)
        return False

    def ended(self, fiber: Fiber) -> None:
        item = fiber.item
        if item is None:
            return
        fiber.knows.barrier()
        fiber.knows.flush()
        done = fiber.knows.complete()
        item.left -= 1
        if item.launch is not None:
            self.running[fiber.rank] -= 1
        item.collected = done.copy() if item.collected is None else np.maximum(item.collected, done)
        if item.left == 0:
            np.maximum(item.stream.knows, item.collected, out=item.stream.knows)
            item.stream.items.popleft()
            item.ended = True
        self.dirty = True
        self.chances = 0

    def hosts_go_on(self) -> None:
        """Lets host programs go on whose condition holds; a collective needs all ranks."""
        if self.hosts and all(host.offered is not None for host in self.hosts):
            knows = np.maximum.reduce([host.me.knows.now for host in self.hosts])
            answer = [host.offered for host in self.hosts]
            for host in self.hosts:
                host.answer, host.offered = answer, None
                host.me.knows.learn(knows)
                host.me.knows.barrier()
        for host in self.hosts:
            if host.waiting is not None and host.rank != self.dead and host.waiting():
                host.waiting, host.me.blocked = None, ""
                self.ready.append(host.me)
                self.chances = 0

    @staticmethod
    def place() -> str:
        """File and line of the user's program, for a message."""
        file, line = _line()
        return f"{file}:{line}"

    def kill(self, rank: int) -> None:
        """The rank stops: nothing of it goes on."""
        self.dead = rank
        doomed = self.current
        self.died_at = str(self.events[-1][0]) if self.events else "its start"
        self.ready = [fiber for fiber in self.ready if fiber.rank != rank]
        for stream in self.streams[rank].values():
            stream.items.clear()
        if doomed is not None and doomed.rank == rank:
            self.hub.switch()  # for good

    def run(self) -> None:
        """Until nothing is left to do; raises Found."""
        while True:
            if self.dirty:
                self.advance()
            if not self.ready:
                if not [fiber for fiber in self.fibers if self.unfinished(fiber)]:
                    return
                if not self.stalled():
                    return
                continue
            fiber = self.strategy.choose(self.ready, self.current)
            self.current = fiber
            item = fiber.item
            if item is not None and item.launch is not None:
                width, height, _ = item.launch.grid
                index = fiber.program
                item.launch.place((index % width, index // width % height, index // (width * height)))
            fiber.run.switch()
            if fiber.run.dead:
                if fiber in self.ready:
                    self.ready.remove(fiber)
                if fiber.rank != self.dead:
                    self.ended(fiber)
            elif (fiber.asleep or fiber.blocked) and fiber in self.ready:
                self.ready.remove(fiber)

    def unfinished(self, fiber: Fiber) -> bool:
        return not fiber.run.dead and fiber.rank != self.dead

    def stalled(self) -> bool:
        """Nobody goes on: sleepers look again a few times; after a rank has stopped, time passes; else a deadlock."""
        sleepers = [fiber for fiber in self.fibers if fiber.asleep and self.unfinished(fiber)]
        self.chances += 1
        if self.dead is not None:
            if sleepers and self.chances > 3:
                raise Found("no exit", sleepers=sleepers)
            if not sleepers:
                return self._release_hosts()
            self.clock += 1 << 40  # about 1100 s
            patience = 200
        else:
            if self.chances > 2 or not sleepers:
                raise Found("deadlock", sleepers=sleepers)
            patience = 5 if self.chances == 1 else 100
        for fiber in sleepers:
            fiber.patience = patience
            self.wake(fiber)
        for region in self.regions:
            region.waiting.clear()
        return True

    def _release_hosts(self) -> bool:
        """After a rank has stopped: host programs that wait for it give up."""
        blocked = [host for host in self.hosts if host.waiting is not None and host.rank != self.dead]
        for host in blocked:
            host.waiting = lambda: True
        self.hosts_go_on()
        return bool(blocked)

    def close(self) -> None:
        """Ends what is unfinished."""
        self.internal += 1
        self.current = None
        for fiber in self.fibers:
            if fiber.run is not None and not fiber.run.dead:
                with contextlib.suppress(BaseException):
                    fiber.run.throw()

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Torch operations inside are the checker's own."""
        self.internal += 1
        try:
            yield
        finally:
            self.internal -= 1


class Operations(TorchFunctionMode):
    """Hands torch operations of host programs on known memory to their rank."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(self, function, args, kwargs or {})


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def peek(address: int, size: int) -> int:
    """The word at an address, signed."""
    return int.from_bytes(ctypes.string_at(address, size), "little", signed=True)


_own: dict[str, bool] = {}


def _line() -> tuple[str, int]:
    """File and line of the innermost frame that is the user's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        own = _own.get(file)
        if own is None:
            own = _own[file] = file.startswith(OWN)
        if not own:
            return file, frame.f_lineno
        frame = frame.f_back
    return "?", 0
