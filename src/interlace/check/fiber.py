"""What runs: fibers, the items and streams they belong to, and what a fiber has seen and waits for."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from interlace.check.memory import Region, Signal
from interlace.check.order import Clock, Knowledge
from interlace.symmetric.interpreter import Launch


class Strategy(Protocol):
    """Chooses who goes on."""

    def choose(self, ready: list[Fiber], current: Fiber | None) -> Fiber: ...

    def order(self, programs: list[int]) -> list[int]:
        """In which order a kernel's programs become resident."""
        ...


@dataclass(eq=False, slots=True)
class Seen:
    """What a fiber saw of another's signal: whether it learned from it, and the two events."""

    learned: bool
    why: str
    read: int
    signal: Signal


@dataclass(eq=False, slots=True)
class Poll:
    """The reads a sleeping fiber repeats."""

    region: Region
    address: int
    value: int
    event: int
    bits: int
    wanted: tuple[str, int] | None = None  # how it was compared, and with what

    def is_met(self, value: int) -> bool:
        """Whether a value would have ended the wait, as far as the comparison tells; True without one."""
        if self.wanted is None:
            return True
        how, want = self.wanted
        if how in ("==", "!="):  # `while word != want`, `while word == want`
            return (value == want) is (how == "!=")
        return reached(value, want, how, self.bits)


def reached(value: int, want: int, how: str, bits: int = 32) -> bool:
    """Whether `value >= want`, or `> want`, in so many bits that wrap."""
    return (value - want - (how in ("<=", ">"))) % (1 << bits) < 1 << (bits - 1)


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
    place: tuple[str, int] = ("?", 0)  # file and line that enqueued it
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


@dataclass(eq=False, slots=True)
class Fiber:
    number: int
    rank: int
    kind: str  # host, program, item
    label: str
    program: int
    item: Item | None
    knows: Knowledge
    run: Any = None
    index: tuple[int, int, int] = (0, 0, 0)  # of a program in its grid
    modes: list[Any] = field(default_factory=list)  # of torch functions, while it stands
    asleep: bool = False
    polls: list[Poll] = field(default_factory=list)
    known: set[Any] = field(default_factory=set)  # what it has read since it last wrote
    progress: int = 0  # the event that last told it something new
    doubt: bool = False  # it has been given time for a long loop that only looks like a wait
    repeats: int = 0  # reads since, that told it nothing new
    patience: int = 2  # reads it may repeat before it sleeps
    seen: dict[int, Seen] = field(default_factory=dict)
    waits: dict[int, Seen] = field(default_factory=dict)  # by word: the last signal it read there
    fenced: Clock | None = None  # what relaxed reads have seen, for the next fence
    last_fence: tuple[int, tuple[str, int]] | None = None  # how many events came before it, and where it is
    wrapped: tuple[int, int, tuple[str, int]] | None = None  # two numbers it has compared as if they did not wrap
    handle: Any = None  # what the last poll returned
    blocked: str = ""  # why a host program does not go on

    @property
    def is_waiting(self) -> bool:
        """Whether all it reads again and again was compared with what it has not reached."""
        return all(not poll.is_met(poll.value) for poll in self.polls if poll.event > self.progress)

    def __str__(self) -> str:
        if self.kind == "host":
            return f"rank {self.rank} host program"
        if self.kind == "program":
            return f"rank {self.rank} {self.label} program {self.program}"
        return f"rank {self.rank} {self.label}"
