"""What a world owes the heap: arenas that all ranks can address, one collective, and work in stream order.

Three worlds implement it: `cuda` (a GPU a rank, or several ranks as threads on one GPU), `shm` (processes on one
machine, kernels in Triton's interpreter) and `interlace.check.host` (all ranks as fibers of one process, under the
checker).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from interlace.symmetric.record import Record


class Event(ABC):
    """A moment in a stream."""

    @abstractmethod
    def wait(self) -> None:
        """What the current stream is given from now on begins after that moment."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the moment has come; does not wait."""


class Fabric(ABC):
    """One rank's part of a world.  `arenas[r]` are rank r's bytes, uint8, as this rank addresses them."""

    rank: int
    size: int
    device: torch.device
    arenas: list[torch.Tensor]
    origin: int = 0  # where signals and epochs begin
    poison: bool = True  # whether fresh memory is filled with a value nobody can mistake for a result
    sharing: int = 1  # ranks on this rank's device: their programs that wait must fit on it together
    loading: bool = False  # kernels are only being loaded: no wait waits, and none that left has failed
    limit: float = 10.0  # seconds a wait may take; the heap sets it
    late: Record | None = None  # the first wait of a stream that was let go, as far as this host knows

    @abstractmethod
    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Collective: everybody's integers, by rank.  All ranks give equally many."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when this rank's streams have run dry."""

    @abstractmethod
    def stream(self, name: str) -> AbstractContextManager[object]:
        """Inside the block, work is enqueued on this rank's stream of that name ("" is the default one)."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Stream order: contiguous bytes, moved by a copy engine."""

    @abstractmethod
    def write(self, flag: torch.Tensor, value: int | torch.Tensor) -> None:
        """Stream order: raises a word after all that came before."""

    @abstractmethod
    def wait(self, flag: torch.Tensor, value: int | torch.Tensor, peer: int, context: torch.Tensor) -> None:
        """Stream order: later work begins when this rank's word has reached the value."""

    @abstractmethod
    def event(self) -> Event:
        """A mark behind what the current stream was given so far."""

    @abstractmethod
    def graph(self, function: Callable[[], None]) -> Callable[[], None]:
        """Calls `function` once, records what it enqueues, and returns what enqueues the same again."""

    def watch(self) -> None:  # noqa: B027 - waits of most worlds look at the clock themselves
        """From now on a stream's wait past its limit is let go also while nobody synchronises, and `late` tells."""

    def succeed(self, other: Fabric) -> None:  # noqa: B027 - most worlds have as many streams as anybody asks for
        """Takes over the streams of one that was closed: a device has few, and beyond them two names share one."""

    @abstractmethod
    def abort(self) -> None:
        """Asks this rank's spinners to leave."""

    @abstractmethod
    def abort_address(self) -> int:
        """Address of the int32 that `abort` raises."""

    def allocated(self, offset: int, nbytes: int, tensor: torch.Tensor, name: str, written: bool) -> None:  # noqa: B027 - of interest to a checker only
        """Tells the world of a new tensor of this rank; for reports."""

    def freed(self, offset: int) -> None:  # noqa: B027 - of interest to a checker only
        """Tells the world that a tensor of this rank is gone."""

    def constant(self, tensor: torch.Tensor) -> None:  # noqa: B027 - of interest to a checker only
        """Tells the world of a tensor that never changes."""

    @abstractmethod
    def close(self) -> None:
        """Gives the arenas back; collective."""
