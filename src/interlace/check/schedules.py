"""Ways to choose who goes on, each a function of one seed.

Seeded random; priorities with change points (PCT, Burckhardt and others, ASPLOS 2010: finds a fault that needs d
ordering constraints with a known probability); round robin; one rank far ahead; one rank far behind; and for small
launches all schedules with at most two preemptions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from interlace.check.fiber import Fiber

NAMES = ("random", "priorities", "round robin", "one rank ahead", "slowest rank")


@dataclass
class Random:
    """Any of those that can, each time anew; `stay` is the chance that the same goes on."""

    rng: random.Random
    stay: float = 0.0
    blocks: str = ""  # "in order": programs become resident in the order of their numbers

    def choose(self, ready: list[Fiber], current: Fiber | None) -> Fiber:
        if self.stay and current in ready and self.rng.random() < self.stay:
            assert current is not None
            return current
        return ready[int(self.rng.random() * len(ready))]

    def order(self, programs: list[int]) -> list[int]:
        if self.rng.random() < 0.5 and not self.blocks:
            self.rng.shuffle(programs)
        return programs


@dataclass
class Priorities(Random):
    """The highest priority of those that can; at a few steps the one that runs falls to the lowest."""

    changes: frozenset[int] = frozenset()
    step: int = 0
    lowest: float = 0.0
    of: dict[int, float] = field(default_factory=dict)

    def choose(self, ready: list[Fiber], current: Fiber | None) -> Fiber:
        self.step += 1
        if self.step in self.changes and current is not None:
            self.lowest -= 1
            self.of[current.number] = self.lowest
        for fiber in ready:
            if fiber.number not in self.of:
                self.of[fiber.number] = self.rng.random()
        return max(ready, key=lambda fiber: self.of[fiber.number])


@dataclass
class RoundRobin(Random):
    """One after the other, `quantum` steps each."""

    quantum: int = 1
    left: int = 0

    def choose(self, ready: list[Fiber], current: Fiber | None) -> Fiber:
        if self.left > 0 and current in ready:
            assert current is not None
            self.left -= 1
            return current
        self.left = self.quantum - 1
        after = [fiber for fiber in ready if current is not None and fiber.number > current.number]
        return min(after or ready, key=lambda fiber: fiber.number)


@dataclass
class Skewed(Random):
    """One rank goes whenever it can (`ahead`), or only when nobody else can."""

    rank: int = 0
    ahead: bool = True

    def choose(self, ready: list[Fiber], current: Fiber | None) -> Fiber:
        preferred = [fiber for fiber in ready if (fiber.rank == self.rank) == self.ahead]
        return super().choose(preferred or ready, current)


def seeded(seed: int, ranks: int) -> Random:
    """The strategy of a seed."""
    rng = random.Random(f"schedule {seed}")
    kind = NAMES[seed % len(NAMES)]
    if kind == "random":
        return Random(rng, rng.choice((0.0, 0.0, 0.5, 0.9)))
    if kind == "priorities":
        length = rng.choice((100, 400, 1600))
        return Priorities(rng, changes=frozenset(rng.randrange(1, length) for _ in range(rng.randrange(1, 5))))
    if kind == "round robin":
        return RoundRobin(rng, quantum=rng.choice((1, 1, 2, 3, 5)))
    return Skewed(rng, rank=rng.randrange(ranks), ahead=kind == "one rank ahead")


@dataclass
class Replayed:
    """Follows given choices, then lets the same go on as long as it can; notes where it might have chosen otherwise."""

    prefix: list[int]
    taken: list[int] = field(default_factory=list)
    options: list[tuple[int, bool]] = field(default_factory=list)  # how many, and whether going on was one of them

    def choose(self, ready: list[Fiber], current: Fiber | None) -> Fiber:
        step = len(self.taken)
        ordered = sorted(ready, key=lambda fiber: (fiber is not current, fiber.number))
        choice = self.prefix[step] if step < len(self.prefix) else 0
        self.taken.append(choice)
        self.options.append((len(ordered), ordered[0] is current))
        return ordered[min(choice, len(ordered) - 1)]

    def order(self, programs: list[int]) -> list[int]:
        return programs


def exhaustive(preemptions: int = 2) -> Iterator[Replayed]:
    """All schedules with at most so many preemptions, deviations as early as possible last.

    The caller runs each before it asks for the next.
    """
    stack: list[tuple[list[int], int]] = [([], 0)]
    while stack:
        prefix, used = stack.pop()
        made = Replayed(prefix)
        yield made
        for step in range(len(prefix), len(made.taken)):
            count, could_go_on = made.options[step]
            cost = used + could_go_on
            if cost <= preemptions:
                stack.extend(([*made.taken[:step], other], cost) for other in range(1, count))
