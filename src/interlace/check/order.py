"""Who knows what: vector clocks with scopes, and what is known of every element of memory.

A fiber is a program of a kernel, a rank's host program, or one item of a stream.  It has three components in every
clock, for the three kinds of memory operation that a release treats differently:

    LANE    one thread's (atomics, stores of a scalar): a release by that thread covers them
    BLOCK   all threads' (blocks, loads of a scalar): covered by a release only after a barrier of the program
    PROXY   descriptor (TMA) stores: covered only after their full wait, and a barrier

Two accesses of one element, one of them a write, are ordered if the later one's clock has reached the earlier one's
component; unless both are atomics whose scopes include each other, anything else is a race, whatever values were seen.
The order is FastTrack's (Flanagan and Freund, PLDI 2009) with several reader slots an element, vectorised over the
elements of a block; the scopes are PTX's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LANE, BLOCK, PROXY = 0, 1, 2
PLAIN, CTA, GPU, SYS = 0, 1, 2, 3  # how strong an access is: not atomic, or atomic at a scope
CONCURRENT = 2  # reader slots an element has before more are added
FALSE, TRUE = b"\0", b"\1"  # an element of a NumPy array of truth values; bytes are searched quicker than arrays

Clock = np.ndarray[Any, np.dtype[np.int32]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


class Knowledge:
    """One fiber's clock: `first` its first component, `now` all it knows, `proxy` what descriptor loads rely on."""

    __slots__ = ("barred", "first", "flushed", "now", "proxy", "released")

    def __init__(self, first: int, now: Clock) -> None:
        self.first, self.now = first, now
        now[first : first + 3] = 1
        self.proxy = now.copy()
        self.proxy[first : first + 3] = 0
        self.released: dict[int, Clock] = {}  # by scope: what the last fence lets relaxed atomics publish
        self.barred = [0, 0, 0]  # by component: how far a release by another thread reaches
        self.flushed = 0

    def barrier(self) -> None:
        """All threads of the program have met."""
        first, now = self.first, self.now
        self.barred = [int(now[first]), int(now[first + BLOCK]), self.flushed]
        now[first] += 1
        now[first + BLOCK] += 1

    def flush(self) -> None:
        """Descriptor stores are complete, and seen by all loads of this program, those of descriptors too."""
        mine = self.first + PROXY
        self.flushed = self.proxy[mine] = int(self.now[mine])
        self.now[mine] += 1

    def admit(self) -> None:
        """Descriptor loads may rely on what is known now."""
        self.proxy = self.now.copy()
        self.now[self.first] += 1
        self.now[self.first + BLOCK] += 1

    def published(self, single: bool) -> Clock:
        """What a release by one thread (`single`) or by each of a block's threads publishes; then time goes on."""
        first, made = self.first, self.now.copy()
        made[first + BLOCK], made[first + PROXY] = self.barred[BLOCK], self.barred[PROXY]
        if not single:
            made[first] = self.barred[LANE]
        self.now[first] += 1
        return made

    def complete(self) -> Clock:
        """What the end of a kernel publishes: everything."""
        return self.now

    def learn(self, other: Clock) -> None:
        np.maximum(self.now, other, out=self.now)


@dataclass(frozen=True)
class Conflict:
    """An access that is not ordered after an earlier one.  `event` is the earlier one's number."""

    index: int
    component: int
    event: int
    earlier_is_write: bool
    earlier_kind: int  # how strong it is
    scopes: bool  # both are atomics, but a scope is too narrow
    proxy: bool = False  # ordered for ordinary loads, not for a descriptor's


class Slots:
    """An access of each element: who (a component; 0 is the beginning of time), when, in which event, how strong."""

    __slots__ = ("event", "kind", "time", "who")

    def __init__(self, count: int) -> None:
        self.who = np.zeros(count, np.int32)
        self.time = np.zeros(count, np.int32)
        self.event = np.zeros(count, np.int32)
        self.kind = np.zeros(count, np.int8)

    def take(self, at: Any, component: int, time: int, event: int, kind: int) -> None:
        self.who[at] = component
        self.time[at] = time
        self.event[at] = event
        self.kind[at] = kind

    def refine(self, times: int) -> None:
        for name in self.__slots__:
            setattr(self, name, np.repeat(getattr(self, name), times))

    def late(self, at: Any, knows: Clock) -> Any:
        """Which of some elements' accesses a clock has not reached; None if it has reached them all."""
        if type(at) is int:
            return True if knows.item(self.who.item(at)) < self.time.item(at) else None
        found = knows[self.who[at]] < self.time[at]
        return found if TRUE in found.tobytes() else None


class Shadow:
    """What is known of `count` elements: their last write and the reads since.

    Elements are given as an array of their numbers, or one as an int, which is quicker.
    """

    def __init__(self, count: int, written: bool) -> None:
        self.count, self.is_whole = count, written  # whether somebody has written every element
        self.writes = Slots(count)
        self.writes.event.fill(-1)
        self.befores = np.full(count, -1, np.int32)  # the event of the write before the last, -1 if there was none
        self.reads = [Slots(count) for _ in range(CONCURRENT)]
        self.written = np.full(count, written)

    def refine(self, times: int) -> None:
        """Every element becomes `times` smaller ones."""
        self.count *= times
        for slots in (self.writes, *self.reads):
            slots.refine(times)
        self.written, self.befores = np.repeat(self.written, times), np.repeat(self.befores, times)

    def check(
        self, at: Indices | int, knows: Clock, write: bool, kind: int, rank: int, rank_of: np.ndarray[Any, Any]
    ) -> Conflict | None:
        """The first earlier access that a new one conflicts with.  `kind`: PLAIN or the scope of an atomic."""
        found = self._conflict(self.writes, True, at, knows, kind, rank, rank_of)
        if found is None and write:
            for slots in self.reads:
                read = self._conflict(slots, False, at, knows, kind, rank, rank_of)
                if read is not None and (found is None or read.index < found.index):
                    found = read
        return found

    @staticmethod
    def _conflict(
        slots: Slots, is_write: bool, at: Any, knows: Clock, kind: int, rank: int, rank_of: np.ndarray[Any, Any]
    ) -> Conflict | None:
        late = slots.late(at, knows)
        if late is None:
            return None
        if kind >= GPU:  # no conflict of two atomics whose scopes include each other
            kinds, same = slots.kind[at], rank_of[slots.who[at]] == rank
            late = late & ~((kinds == SYS) & (kind == SYS) | same & (kinds >= GPU))
            if not np.any(late):
                return None
        index = int(np.argmax(late))
        one = at if type(at) is int else int(at[index])
        earlier = slots.kind.item(one)
        both = bool(earlier and kind)
        return Conflict(index, slots.who.item(one), slots.event.item(one), is_write, earlier, both)

    def unwritten(self, at: Indices | int) -> int | None:
        """The first of some elements that nobody has written."""
        if self.is_whole:
            return None
        if type(at) is int:
            return None if self.written.item(at) else at
        first = self.written[at].tobytes().find(FALSE)
        return None if first < 0 else int(at[first])  # type: ignore[index]

    def note_write(self, at: Indices | int, component: int, time: int, event: int, kind: int) -> None:
        self.befores[at] = self.writes.event[at]
        self.writes.take(at, component, time, event, kind)
        for slots in self.reads:
            slots.time[at] = 0
        if not self.is_whole:
            self.written[at] = True

    def note_read(self, at: Indices | int, component: int, time: int, event: int, kind: int, knows: Clock) -> None:
        """Takes a slot whose read is ordered before this one, or adds a slot."""
        rest: Any = at
        for slots in self.reads:
            rest = self._take_free(slots, rest, component, time, event, kind, knows)
            if rest is None:
                return
        self.reads.append(Slots(self.count))
        self.reads[-1].take(rest, component, time, event, kind)

    @staticmethod
    def _take_free(slots: Slots, at: Any, component: int, time: int, event: int, kind: int, knows: Clock) -> Any:
        """Takes the slots that are free, and returns the elements whose are not, None if all were."""
        if type(at) is int:
            before = slots.time.item(at)
            if before and (knows.item(slots.who.item(at)) < before or slots.kind.item(at) < kind):
                return at
            slots.take(at, component, time, event, kind)
            return None
        times = slots.time[at]
        free = knows[slots.who[at]] >= times
        if kind > PLAIN:  # a weaker one may yet conflict where this does not
            free &= (times == 0) | (slots.kind[at] >= kind)
        if FALSE not in free.tobytes():
            slots.take(at, component, time, event, kind)
            return None
        slots.take(at[free], component, time, event, kind)
        return at[~free]
