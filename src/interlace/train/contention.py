"""How much slower a rank computes while its transfers run: the part of their cost that no wait shows.

A step stands still for transfers (`waited`) and computes for the rest of its time, more slowly while bytes move beside
it: they share memory, clocks and, with a library's kernels, multiprocessors.  Nothing in one step tells how long its
products take alone.  So one step in `every` waits for each transfer as soon as it has begun (`Meter.at_once`): it is
longer by what overlap hides, and what it computes, it computes alone.

    contention = (step - waited) - (serial step - its waited) * its clock / the step's clock     in seconds of this rank

The clocks are means over the two steps (`kernels/clock.py`): a GPU at its limit of power runs quicker in a step that
pauses for each transfer, and without them the 8B preset over two H200s told 16 ms too many of 388.  Work that memory
bounds does not follow the clock, so of such a GPU a part of the contention goes untold, up to the share of that work.

Own work on the side stream (an update under a gather) is computed in both, hidden in one: contention is at least this.
Numbers do not change: the same operations run in the same order.
"""

from __future__ import annotations

import statistics
from collections import deque

FIRST = 5  # a step by which kernels are compiled, and what is allocated once is there
KEPT = 3  # serial steps, of which the median counts


class Contention:
    """One rank's.  every: steps; 0: no step is serial, and nothing is known."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._alone: deque[tuple[float, float | None]] = deque(maxlen=KEPT)  # seconds, and the clock

    def is_serial(self, step: int) -> bool:
        """Whether a step, counted from 0, waits for each transfer at once; the same on every rank."""
        return self.every > 0 and step >= FIRST and (step - FIRST) % self.every == 0

    def note(self, step: int, seconds: float, waited: float, hertz: float | None = None) -> float | None:
        """Of a step that took so long: its contention in seconds; None of a serial one, and before the first.

        hertz: the mean clock over the step, None if nobody knows.
        """
        if self.is_serial(step):
            self._alone.append((seconds - waited, hertz))
            return None
        alone = [took * at / hertz if at and hertz else took for took, at in self._alone]
        return seconds - waited - statistics.median(alone) if alone else None
