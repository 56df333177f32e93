"""What every access may rely on, and what it tells others: the model of memory.

Before each load, store and atomic the fiber that makes it hands control over (`pause`); then the access is held against
what is known of its elements, done, and noted.  Atomics teach and publish; fences and barriers decide how much.  A
polling loop is a read that tells nothing new with nothing written in between; its fiber sleeps until somebody writes
there.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from interlace.check.fiber import Fiber, Poll, Seen
from interlace.check.memory import Found, Memory, Region, Signal, Word, peek
from interlace.check.order import BLOCK, CTA, GPU, LANE, PLAIN, PROXY, SYS, Clock
from interlace.check.place import by_a_primitive, line, shown
from interlace.symmetric.interpreter import Access, Atomic

SCOPES = {"cta": CTA, "gpu": GPU, "sys": SYS}
NAMES = {number: name for name, number in SCOPES.items()}
MOST_EVENTS = 400_000  # of one schedule
MOST_COMPARISONS = 200_000  # of numbers between two events
TICK = 1000  # nanoseconds of the machine's clock an event takes
VERBS = {  # by volatile, proxy, write
    (volatile, proxy, write): f"{'volatile ' * volatile}{'descriptor ' * proxy}{'store' if write else 'load'}"
    for volatile in (False, True)
    for proxy in (False, True)
    for write in (False, True)
}
ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
SMALL = 1 << 30  # words nearer to 0 do not wrap soon
LARGEST_POLL = 32  # elements; a longer read is no poll


class Watch(Memory, ABC):
    """The memory operations of one schedule; who runs when is a subclass's."""

    def __init__(self, arenas: list[torch.Tensor], capacity: int, barriers: bool) -> None:
        super().__init__(arenas)
        self.barriers = barriers
        self.rank_of = np.full(capacity, -1, np.int32)
        self.ready: list[Fiber] = []
        self.current: Fiber | None = None
        self.events: list[tuple[Fiber, str, str, int]] = []
        self.unwritten: list[tuple[Fiber, int, Region, int]] = []  # reads of memory nobody had written
        self.passed: dict[tuple[int, str, int, int], int] = {}  # by program and word: the read that ended its last wait
        self.clock = 0  # nanoseconds that time has leapt
        self.comparisons = 0  # since the last event
        self.chances = 0  # looks that all sleepers have been given since there was progress
        self.dead: int | None = None  # the rank that has stopped

    @abstractmethod
    def pause(self, fiber: Fiber) -> None:
        """Lets the schedule choose who goes on."""

    @abstractmethod
    def happened(self) -> None:
        """Called after each event."""

    # --- what the interpreter tells ----------------------------------------------------------------------------------

    def access(self, what: Access, do: Callable[[], Any]) -> Any:
        """A load or store of a program."""
        addresses, size, write = what.addresses, what.size, what.write
        if not len(addresses):
            return do()
        fiber = self.current
        assert fiber is not None
        parts = self.locate(addresses, size, write)
        region = parts[0][0]
        if region.constant:
            return self._constant(region, what, do)
        if region.quiet and self._own_words(region, addresses, write):
            return do()
        self.pause(fiber)
        single = len(addresses) == 1
        component = PROXY if what.proxy and write else LANE if single and write else BLOCK
        kind = SYS if what.volatile else PLAIN
        event = self.event(fiber, VERBS[what.volatile, what.proxy, write])
        for region, at in parts:
            self.touch(fiber, region, at, write, component, kind, event, proxy=what.proxy and not write)
        if write:
            befores = self._befores(addresses, size, parts)
            made = do()
            self.changed(fiber, parts, event)
            for address, before in befores.items():
                self._signalled(fiber, address, event, before, peek(address, size), "relaxed", "", "store")
            return made
        made = do()
        words = np.unique(addresses) if what.volatile else addresses  # a word that many lanes read is one
        if what.volatile and len(words) <= LARGEST_POLL:
            for address in words.tolist():
                self._observe(fiber, address, event, "relaxed", SYS)
        if len(words) <= LARGEST_POLL:
            self.polled(fiber, parts[0][0], words, made, event)
        else:
            self._is_known(fiber, words, made, event)
        return made

    @staticmethod
    def _constant(region: Region, what: Access, do: Callable[[], Any]) -> Any:
        """What never changes, which is no event."""
        if what.write or len(what.addresses) > 1:
            return do()
        key = what.addresses.item(), what.kind
        made = region.values.get(key)
        if made is None:
            made = region.values[key] = do()
        return made

    @staticmethod
    def _own_words(region: Region, addresses: Any, write: bool) -> bool:
        """That a primitive uses the words at the head of a heap, which is no event; nobody else may."""
        if not by_a_primitive():
            raise Found("out of bounds", address=int(addresses[0]), write=write, place=line())
        return True

    def _befores(self, addresses: Any, size: int, parts: list[tuple[Region, Any]]) -> dict[int, int]:
        """Values of those words among the addresses that atomics use."""
        for region, _ in parts:
            if region.words:
                return {a: peek(a, size) for a in addresses.tolist() if a in self.words}
        return {}

    def atomic(self, what: Atomic, do: Callable[[], Any]) -> Any:
        if not len(what.addresses):
            return do()
        fiber = self.current
        assert fiber is not None
        parts = self.locate(what.addresses, what.size, what.changes)
        if parts[0][0].quiet and self._own_words(parts[0][0], what.addresses, what.changes):
            return do()
        self.pause(fiber)
        scope = SCOPES[what.scope]
        event = self.event(fiber, f"atomic_{what.operation}({what.sem}, {what.scope})")
        addresses = what.addresses.tolist()
        befores = [peek(a, what.size) for a in addresses]
        made = do()
        afters = [peek(a, what.size) for a in addresses]
        write = what.changes or befores != afters
        lanes = [*zip(addresses, befores, afters, strict=True)] if write else []
        if what.wanted is not None and write:  # only what was as wanted is written
            lanes = [lane for lane, want in zip(lanes, what.wanted.tolist(), strict=True) if lane[1] == want]
            write = bool(lanes)
        if write and len(lanes) < len(addresses):
            swapped = np.array(befores) == what.wanted
            for chosen, writes in ((swapped, True), (~swapped, False)):
                for region, at in self.locate(what.addresses[chosen], what.size, writes):
                    self.touch(fiber, region, at, writes, LANE, scope, event, read=True)
        else:
            for region, at in parts:
                self.touch(fiber, region, at, write, LANE, scope, event, read=what.reads)
        if what.reads:
            for address in addresses:
                self._observe(fiber, address, event, what.sem, scope, write)
        if write:
            self._publish(fiber, what, event, lanes)
            for region, _ in parts:
                region.words = True
        if write and befores != afters:
            self.changed(fiber, parts, event)
        else:
            fiber.handle = made
            self.polled(fiber, parts[0][0], what.addresses, made, event)
            if what.wanted is not None and fiber.polls and made.data.dtype.kind in "iu":
                self.wants(fiber, "!=", what.wanted.item(0))
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
            before = fiber.waits.get(address)
            if before is not None and before.signal is last and before.learned and not reached:
                return  # a second look, as of who sets a word back, takes nothing away
            why = "" if reached else self._why_not(last, fiber, acquires, scope)
            fiber.seen[last.fiber.number] = fiber.waits[address] = Seen(reached, why, event, last)

    def _why_not(self, last: Signal, fiber: Fiber, acquires: bool, scope: int) -> str:
        if last.sem not in ("release", "acq_rel"):
            return "relaxed signal"
        if not acquires:
            return "relaxed wait"
        narrow = min(SCOPES.get(last.scope, SYS), scope)
        return "scope" if (narrow < SYS and last.fiber.rank != fiber.rank) or narrow < GPU else ""

    def _publish(self, fiber: Fiber, what: Atomic, event: int, written: list[tuple[int, int, int]]) -> None:
        """What an atomic tells by the words it has written; of each its address, and what it held before and after."""
        scope = SCOPES[what.scope]
        releases = what.sem in ("release", "acq_rel")
        made: Clock | None = None
        if releases:
            made = self._published(fiber, len(what.addresses) == 1)
        else:
            for reach, clock in fiber.knows.released.items():
                made = clock if made is None else np.maximum(made, clock)
                scope = min(scope, reach)
        for address, before, after in written:
            word = self.words.setdefault(address, Word())
            if not what.reads:
                word.messages.clear()  # only what has read a word goes on with the releases before it
            if made is not None:
                key = (fiber.rank, scope)
                old = word.messages.get(key)
                word.messages[key] = made.copy() if old is None else np.maximum(old, made)
            sem = what.sem if releases or made is None else "release"
            # A relaxed one reaches no further than the fence before it.
            self._signalled(fiber, address, event, before, after, sem, NAMES[scope], what.operation, keep=True)
            if sem != what.sem:
                word.history[-1].fence = fiber.last_fence

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
        fiber.last_fence = len(self.events), line()

    def compared(self, left: Any, right: Any, how: str) -> None:
        """The interpreter compares two values: what a poll returned is one side, what is wanted the other."""
        self.comparisons += 1
        if self.comparisons > MOST_COMPARISONS:
            raise Found("no end", how_many=f"{MOST_COMPARISONS} comparisons without a memory event", place=line())
        fiber = self.current
        if not how or fiber is None or fiber.handle is None or left is not fiber.handle or not fiber.polls:
            return
        self.wants(fiber, how, _signed(right.data))
        poll, holds = fiber.polls[-1], ORDERS.get(how)
        if holds is not None and abs(poll.value) > SMALL:
            found, want = left.data.item(0), right.data.item(0)
            if holds(found, want) is (poll.is_met(poll.value) is how.startswith("<")):
                fiber.wrapped = (found, want, line())

    def wants(self, fiber: Fiber, how: str, want: int) -> None:
        """What a fiber has just read is compared so: the loop that reads goes on as long as it holds."""
        poll = fiber.polls[-1]
        poll.wanted = (how, want)
        if poll.is_met(poll.value):
            self.passed[fiber.rank, fiber.label, fiber.program, poll.address] = poll.event

    # --- happens-before ----------------------------------------------------------------------------------------------

    def event(self, fiber: Fiber, what: str) -> int:
        """Notes who does what where; returns its number."""
        where = line()
        if not where[1] and fiber.item is not None:  # a copy, a flag, a torch operation: who enqueued it
            where = fiber.item.place
        number = len(self.events)
        self.events.append((fiber, what, *where))
        self.comparisons = 0
        if number >= MOST_EVENTS:
            raise Found("no end", how_many=f"{number + 1} memory events", place=where)
        self.happened()
        return number

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
                index=at if type(at) is int else int(at[conflict.index]),
                conflict=conflict,
                event=event,
                write=write,
                strength=kind,
            )
        mine = knows.first + component
        time = knows.now.item(mine)
        if (not write or read) and not region.freed:
            index = shadow.unwritten(at)
            if index is not None:
                self.unwritten.append((fiber, event, region, index))
        if write:
            shadow.note_write(at, mine, time, event, kind)
        else:
            shadow.note_read(at, mine, time, event, kind, knows.now)

    # --- polling -----------------------------------------------------------------------------------------------------

    def polled(self, fiber: Fiber, region: Region, addresses: Any, made: Any, event: int) -> None:
        """Puts a fiber to sleep that reads the same again with nothing in between."""
        data = made.data
        if self._is_known(fiber, addresses, made, event):
            fiber.repeats += 1
        fiber.handle = made
        address = addresses.item(0)
        poll = Poll(region, address, _signed(data) if data.dtype.kind in "iub" else 0, event, 8 * data.itemsize)
        polls = fiber.polls
        for at, each in enumerate(polls):
            if each.address == address:
                poll.wanted = each.wanted
                del polls[at]
                break
        if len(polls) > 3:
            del polls[0]
        polls.append(poll)
        if fiber.repeats < fiber.patience:
            return
        fiber.asleep = True
        for each in polls:
            each.region.waiting.setdefault(each.address, []).append(fiber)
        for word in addresses[1:].tolist():
            region.waiting.setdefault(word, []).append(fiber)

    def _is_known(self, fiber: Fiber, addresses: Any, made: Any, event: int) -> bool:
        """Whether a read tells what the fiber has read before; anything else is progress."""
        key = (self.events[event][3], addresses.item(0), len(addresses), hash(made.data.tobytes()))
        if key in fiber.known:
            return True
        fiber.known.add(key)
        fiber.progress = event
        fiber.repeats, fiber.patience, fiber.doubt, self.chances = 0, 2, False, 0
        return False

    def changed(self, fiber: Fiber, parts: list[tuple[Region, Any]], event: int) -> None:
        """Something was written: it is progress, and who waits there looks again."""
        fiber.known.clear()
        fiber.polls, fiber.handle, fiber.doubt, self.chances = [], None, False, 0
        for region, at in parts:
            if region.waiting:
                size = region.size
                written = {region.begin + index * size for index in ([at] if type(at) is int else at.tolist())}
                for address in [a for a in region.waiting if a - (a - region.begin) % size in written]:
                    for sleeper in region.waiting.pop(address):
                        self.wake(sleeper)

    def wake(self, fiber: Fiber) -> None:
        if fiber.asleep and fiber.rank != self.dead:
            fiber.asleep, fiber.repeats = False, 0
            self.ready.append(fiber)

    @staticmethod
    def place() -> str:
        """File and line of the user's program, for a message."""
        file, number = line()
        return f"{shown(file)}:{number}"


def _signed(data: Any) -> int:
    """The first of some whole numbers, with the sign that its bits would give a signed one."""
    number = int(data.item(0))
    return number - (1 << 8 * data.itemsize) if number >> (8 * data.itemsize - 1) > 0 else number
