"""N ranks x P programs as fibers of one process.

A fiber is a greenlet: a rank's host program, a program of a kernel, or one item of a stream (a copy, a flag, a torch
operation).  Before each load, store and atomic it hands control to the hub, which lets a schedule choose who goes on;
only one runs at a time, so a schedule is a sequence of choices and repeats exactly.

Streams are queues: the next item begins when the last has ended and knows all that one knew.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from greenlet import greenlet
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from interlace.check.fiber import Fiber, Item, Strategy, Stream
from interlace.check.memory import Found
from interlace.check.order import Clock, Knowledge
from interlace.check.watch import Watch

LONG_LOOP = 4000  # reads that tell nothing new, after which a loop that compares with nothing is endless


class Grow(Exception):
    """More fibers than clocks have components: the schedule is to be repeated with longer ones."""


class Machine(Watch):
    """One schedule of one launch.

    `resident`: programs of a rank that run at once; `stop`: a rank, and the event at which it stops; `mode`: what
    torch operations of host programs go to.
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
        mode: TorchFunctionMode | None = None,
    ) -> None:
        super().__init__(arenas, capacity, barriers)
        self.size, self.strategy, self.capacity = size, strategy, capacity
        self.resident, self.stop = resident, stop
        self.fibers: list[Fiber] = []
        self.hub = greenlet.getcurrent()
        self.streams: list[dict[str, Stream]] = [{} for _ in range(size)]
        self.running: list[int] = [0] * size  # resident programs
        self.launches: collections.Counter[tuple[int, str]] = collections.Counter()
        self.hosts: list[Any] = []  # the ranks, `interlace.check.host.Host`
        self.mode = mode
        self.chosen: Fiber | None = None  # who is to go on, if that is known already
        self.died_at = ""
        self.dirty = True  # a stream may have something to begin

    def pause(self, fiber: Fiber) -> None:
        """Straight to the next, which may be the same, where nothing else is to be done in between."""
        if self.dirty or fiber.asleep:
            self.hub.switch()
            return
        chosen = self.strategy.choose(self.ready, fiber)
        if chosen.kind == "host":
            self.chosen = chosen
            self.hub.switch()
        elif chosen is not fiber:
            self.enter(chosen)
            chosen.run.switch()

    def enter(self, fiber: Fiber) -> None:
        """From now on this one runs."""
        self.current = fiber
        item = fiber.item
        if item is not None and item.launch is not None:
            item.launch.place(fiber.index)

    def happened(self) -> None:
        if self.stop is not None and self.dead is None and len(self.events) >= self.stop[1]:
            self.kill(self.stop[0])

    def start(
        self, rank: int, kind: str, label: str, body: Callable[[], None], knows: Clock, program: int = 0,
        item: Item | None = None,
    ) -> Fiber:  # fmt: skip
        first = 3 * (len(self.fibers) + 1)
        if first + 3 > self.capacity:
            raise Grow
        fiber = Fiber(len(self.fibers), rank, kind, label, program, item, Knowledge(first, knows.copy()))
        self.rank_of[first : first + 3] = rank
        if item is not None and item.launch is not None:
            width, height, _ = item.launch.grid
            fiber.index = program % width, program // width % height, program // (width * height)
        fiber.run = greenlet(body, self.hub)
        fiber.modes = [] if self.mode is None else [self.mode]
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
            fiber = self.chosen or self.strategy.choose(self.ready, self.current)
            self.chosen = None
            self.enter(fiber)
            self.go(fiber, fiber.run.switch)
            fiber = self.current or fiber  # others may have run since
            if fiber.run.dead:
                if fiber in self.ready:
                    self.ready.remove(fiber)
                if fiber.rank != self.dead:
                    self.ended(fiber)
            elif (fiber.asleep or fiber.blocked) and fiber in self.ready:
                self.ready.remove(fiber)

    def go(self, fiber: Fiber, act: Callable[[], Any]) -> None:
        """Each host program has its own modes of torch functions, the checker's first; the others have none."""
        if fiber.kind != "host":
            act()
            return
        before = _len_torch_function_stack()
        for mode in fiber.modes:
            _push_mode(mode)
        try:
            act()
        finally:
            fiber.modes = [_pop_mode() for _ in range(_len_torch_function_stack() - before)][::-1]

    def unfinished(self, fiber: Fiber) -> bool:
        return not fiber.run.dead and fiber.rank != self.dead

    def stalled(self) -> bool:
        """Nobody goes on: sleepers look again a few times; after a rank has stopped, time passes; else a deadlock."""
        sleepers = [fiber for fiber in self.fibers if fiber.asleep and self.unfinished(fiber)]
        self.chances += 1
        doubtful = [fiber for fiber in sleepers if not fiber.doubt and not fiber.is_waiting]
        if self.chances > 2 + (self.dead is not None) and doubtful:
            for fiber in doubtful:  # perhaps a long loop that reads the same again and again
                fiber.doubt, fiber.patience = True, LONG_LOOP
                self.wake(fiber)
            return True
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
        self.current = None
        for fiber in self.fibers:
            if fiber.run is not None and not fiber.run.dead:
                with contextlib.suppress(BaseException):
                    self.go(fiber, fiber.run.throw)
