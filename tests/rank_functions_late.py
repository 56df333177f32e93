"""Transfers as late as a GPU's side stream may be: what they read is read when they are waited for, or a later one is.

On a GPU a transfer runs at some time between its start and its wait; on a CPU it begins at its start, so that a buffer
which compute writes to meanwhile, or an update that overtakes a gather, would go unseen.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

from interlace.collectives import Handle, handle, ops, ordered
from interlace.parallel.flat import Flat
from interlace.train import verify
from interlace.world import World


class Late:
    """A transfer that begins when it must; those started before it begin first, as on one stream."""

    queue: ClassVar[deque[Late]] = deque()
    begun: ClassVar[int] = 0

    def __init__(self, begin: Callable[[], Handle[Any]]) -> None:
        self.begin, self.moving = begin, None
        self.queue.append(self)

    def wait(self) -> Any:
        while self.moving is None:
            first = self.queue.popleft()
            first.moving = first.begin()
            Late.begun += 1
        return self.moving.wait()


@contextlib.contextmanager
def late(rank: int) -> Iterator[None]:
    """Nothing moves before it is waited for."""

    def start(meter: Any, axis: str, name: str, *rest: Any, **options: Any) -> Handle[Any]:
        if axis == "world":  # of hosts, which have no streams
            return handle.start(meter, axis, name, *rest, **options)
        return Handle(Late(lambda: handle.start(meter, axis, name, *rest, **options)).wait)

    with mock.patch.object(ops, "start", start), mock.patch.object(ordered, "start", start):
        yield
    while Late.queue:  # what nobody waited for
        Late.queue[-1].wait()


@contextlib.contextmanager
def overtaken(rank: int) -> Iterator[None]:
    """(late) Gathers read main weights that the next line of the program has changed."""
    plain = Flat.gather

    def gather(self: Flat) -> None:
        begins = self.slot is not None and self.slot.content is not self and self.sharded
        before = self.main.clone() if begins else None
        plain(self)
        if before is not None:
            self.main.mul_(1.5)
            Late(lambda: Handle(lambda: self.main.copy_(before)))

    with late(rank), mock.patch.object(Flat, "gather", gather):
        yield


FAULTS = {"late": late, "overtaken": overtaken}


def verify_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`verify.under_plan` for each job in turn, late."""
    found = []
    for job in jobs:
        Late.begun = 0
        with FAULTS[job.pop("fault")](world.rank):
            found.append(verify.under_plan(world, **job))
        assert Late.begun > 0
    return found
