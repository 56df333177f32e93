"""Who knows what: vector clocks with scopes, and what is known of every element of memory.

A fiber is a program of a kernel, a rank's host program, or one item of a stream.  It has three components in every
clock, for the three kinds of memory operation that a release treats differently:

    LANE    one thread's (atomics, stores of a scalar): a release by that thread covers them
    BLOCK   all threads' (blocks, loads of a scalar): covered by a release only after a barrier of the program
    PROXY   descriptor (TMA) stores: covered only after their full wait and proxy fence, and a barrier

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
        """Descriptor stores are complete; the proxy fence goes both ways."""
        self.flushed = int(self.now[self.first + PROXY])
        self.now[self.first + PROXY] += 1
        self.admit()

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


class Shadow:
    """What is known of `count` elements: their last write and the reads since."""

    def __init__(self, count: int, written: bool) -> None:
        self.writer = np.zeros(count, np.int32)  # component; 0 is the beginning of time
        self.write_time = np.zeros(count, np.int32)
        self.write_event = np.zeros(count, np.int32)
        self.write_kind = np.zeros(count, np.int8)
        self.reader = np.zeros((count, CONCURRENT), np.int32)
        self.read_time = np.zeros((count, CONCURRENT), np.int32)
        self.read_event = np.zeros((count, CONCURRENT), np.int32)
        self.read_kind = np.zeros((count, CONCURRENT), np.int8)
        self.written = np.full(count, written)

    def refine(self, times: int) -> None:
        """Every element becomes `times` smaller ones."""
        for name, array in vars(self).items():
            setattr(self, name, np.repeat(array, times, axis=0))

    def check(
        self, at: Indices, knows: Clock, write: bool, kind: int, rank: int, rank_of: np.ndarray[Any, Any]
    ) -> Conflict | None:
        """The first earlier access that a new one conflicts with.  `kind`: PLAIN or the scope of an atomic."""
        if len(at) == 1 and self._is_ordered(int(at[0]), knows, write):
            return None
        component = self.writer[at]
        late = knows[component] < self.write_time[at]
        if late.any():
            late = self._weak(late, self.write_kind[at], component, kind, rank, rank_of)
            if late.any():
                index = int(late.argmax())
                earlier = self.write_kind[at][index]
                event = int(self.write_event[at][index])
                return Conflict(index, int(component[index]), event, True, int(earlier), bool(earlier and kind))
        if write:
            component = self.reader[at]
            late = knows[component] < self.read_time[at]
            if late.any():
                late = self._weak(late, self.read_kind[at], component, kind, rank, rank_of)
                if late.any():
                    index, slot = (int(i) for i in np.unravel_index(late.argmax(), late.shape))
                    earlier = self.read_kind[at][index, slot]
                    event = int(self.read_event[at][index, slot])
                    return Conflict(
                        index, int(component[index, slot]), event, False, int(earlier), bool(earlier and kind)
                    )
        return None

    def _is_ordered(self, index: int, knows: Clock, write: bool) -> bool:
        """Whether all earlier accesses of one element that can conflict are known, as those of most scalars are."""
        if knows[self.writer[index]] < self.write_time[index]:
            return False
        return not write or not (knows[self.reader[index]] < self.read_time[index]).any()

    @staticmethod
    def _weak(late: Any, kinds: Any, component: Any, kind: int, rank: int, rank_of: Any) -> Any:
        """Of unordered pairs those that are not two atomics whose scopes include each other."""
        if kind < GPU:
            return late
        same = rank_of[component] == rank
        strong = (kinds == SYS) & (kind == SYS) | same & (kinds >= GPU)
        return late & ~strong

    def note_write(self, at: Indices, component: int, time: int, event: int, kind: int) -> None:
        if len(at) == 1:
            at = at[0]
        self.writer[at] = component
        self.write_time[at] = time
        self.write_event[at] = event
        self.write_kind[at] = kind
        self.read_time[at] = 0
        self.written[at] = True

    def note_read(self, at: Indices, component: int, time: int, event: int, kind: int, knows: Clock) -> None:
        """Takes a slot whose read is ordered before this one, or adds a slot."""
        if len(at) == 1 and self._note_one(int(at[0]), component, time, event, kind, knows):
            return
        reader = self.reader[at]
        free = knows[reader] >= self.read_time[at]
        free &= (self.read_time[at] == 0) | (
            self.read_kind[at] >= kind
        )  # a weaker one may yet conflict where this does not
        slot = free.argmax(axis=1)
        if not free[np.arange(len(slot)), slot].all():
            for name in ("reader", "read_time", "read_event", "read_kind"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)], axis=1))
            self.note_read(at, component, time, event, kind, knows)
            return
        self._take(at, slot, component, time, event, kind)

    def _take(self, at: Any, slot: Any, component: int, time: int, event: int, kind: int) -> None:
        self.reader[at, slot] = component
        self.read_time[at, slot] = time
        self.read_event[at, slot] = event
        self.read_kind[at, slot] = kind

    def _note_one(self, index: int, component: int, time: int, event: int, kind: int, knows: Clock) -> bool:
        """`note_read` of one element, if a slot of it is free."""
        times, kinds = self.read_time[index].tolist(), self.read_kind[index].tolist()
        for slot, reader in enumerate(self.reader[index].tolist()):
            if knows[reader] >= times[slot] and (times[slot] == 0 or kinds[slot] >= kind):
                self._take(index, slot, component, time, event, kind)
                return True
        return False
