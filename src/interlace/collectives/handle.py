"""A transfer in flight is a value.

Equals the plain collective followed by using its result.  Quicker because the result is asked for (`wait`) only where
it is used, so that compute enqueued between the start and the `wait` runs under the transfer.

On a GPU the transfer runs on the group's side stream: it begins when everything the compute stream held at the start
is done, its follow-up arithmetic (`finish`) runs on the side stream too, and `wait` makes the compute stream, not the
host, wait.  On a CPU gloo's own threads move the bytes and `finish` runs inside `wait`.

Tried and dropped: `Tensor.record_stream` for the buffers (memory comes back late and at a time nobody can predict);
the handle keeps them alive until `wait` instead, after which the compute stream is ordered behind the transfer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from interlace.events import BESIDE, Event
from interlace.streams import On, current, handle

T = TypeVar("T")

DEFAULT = 0  # what CUDA calls its default stream
FOLDED = {"shard": "dp", "replica": "dp", "edp": "dp"}  # parts of an axis, on its stream

# A moment: seconds on this host's monotonic clock, or a CUDA event that will say when the stream came past.
Moment = float | torch.cuda.Event


class Meter:
    """What one rank sent, by collective and axis, and how long it stood still, by axis.

    `sent` counts bytes that left this rank, `calls` the transfers, and `flops` the products of kernels that transfer
    too, all since the last `reset_counts`.
    Kernels that count on the device tell what they sent and multiplied `later`, to a meter that was told to `listen`,
    when it is settled.
    `waiting` is called with the name of an operation, and with what is known of the transfer, around every wait of the
    host, so that a supervisor can tell where a rank hangs; by default it does nothing.  With `record` the moments of
    waits, transfers and work are kept until `cut` takes them; a caller who never cuts turns it off.  What a CUDA graph
    captures is counted once, not when it is replayed, and its moments, which the graph would own, are not kept.  While
    `at_once` is set, every transfer but those of lines, whose other side may come later, is waited for as soon as it
    has begun.
    """

    def __init__(
        self, waiting: Callable[[str, str], AbstractContextManager[Any]] | None = None, record: bool = True
    ) -> None:
        self.begun: Counter[str] = Counter()  # collectives by axis, since the start
        self.sent: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.flops = 0
        self._later: list[Callable[[], None]] | None = None
        self.waiting: Callable[[str, str], AbstractContextManager[Any]] = waiting or (
            lambda name, detail: nullcontext()
        )
        self.record = record
        self.at_once = False
        self._compute: torch.cuda.Stream | None = None
        self._stalls: list[tuple[str, str, Moment, Moment]] = []
        self._transfers: list[tuple[str, str, Moment, Moment, int]] = []
        self._work: list[tuple[str, str, str, Moment, Moment]] = []

    def count(self, collective: str, axis: str, nbytes: int, calls: int = 1) -> None:
        self.sent[collective, axis] += nbytes
        self.calls[collective, axis] += calls

    def reset_counts(self) -> None:
        self.sent.clear()
        self.calls.clear()
        self.flops = 0

    def listen(self) -> None:
        """From here on keeps what is told later, until `settle`."""
        self._later = []

    def later(self, tell: Callable[[], None]) -> None:
        if self._later is not None:
            self._later.append(tell)

    def settle(self) -> None:
        """Lets those who told later count; waits for the device."""
        found, self._later = self._later or [], None
        for tell in found:
            tell()

    @property
    def records(self) -> bool:
        """Whether moments are kept here and now."""
        return self.record and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

    def standing(self, waiting: torch.cuda.Stream) -> torch.cuda.Stream:
        """The stream that stands still when `waiting` does."""
        return waiting if self._compute is None else self._compute

    def stalled(self, axis: str, name: str, begin: Moment, end: Moment) -> None:
        if self.records:
            self._stalls.append((axis, name, begin, end))

    def transferred(self, axis: str, name: str, begin: Moment, end: Moment, nbytes: int) -> None:
        if self.records:
            self._transfers.append((axis, name, begin, end, nbytes))

    @contextmanager
    def beside(self, compute: torch.cuda.Stream) -> Iterator[None]:
        """Around waits of another stream that `compute` will wait for: it stands still from where it is now."""
        self._compute = compute
        try:
            yield
        finally:
            self._compute = None

    @contextmanager
    def work(self, kind: str, name: str, device: torch.device) -> Iterator[None]:
        """Around what this rank does, its waits included: an event of that kind, as in `interlace.events`.

        On a GPU it is what the current stream does; one that is not the compute stream has a lane of its own.
        """
        if not self.records:
            yield
            return
        on_side = device.type == "cuda" and handle(device) != DEFAULT
        begin = now(device)
        yield
        self._work.append(("side stream" if on_side else "compute", kind, name, begin, now(device)))

    def cut(self) -> Record:
        """What happened since the last cut; its times can be read once the compute stream has come past."""
        record = Record(tuple(self._stalls), tuple(self._transfers), tuple(self._work))
        self._stalls.clear()
        self._transfers.clear()
        self._work.clear()
        return record


@dataclass(frozen=True)
class Record:
    """The waits, transfers and work of a stretch of time, as moments."""

    stalls: tuple[tuple[str, str, Moment, Moment], ...]
    transfers: tuple[tuple[str, str, Moment, Moment, int], ...]
    work: tuple[tuple[str, str, str, Moment, Moment], ...] = ()

    def waited(self) -> dict[str, float]:
        """Seconds that this rank's compute stood still for a transfer, by axis.

        Of a wait, the part during which bytes of its axis were on their way.  The rest is this rank's own work on the
        side stream (an update before a gather, the sum after an exchange) and would be there without any transfer.
        """
        seconds: dict[str, float] = {}
        for axis, name, begin, end in self._waits(self._origin):
            if name:
                seconds[axis] = seconds.get(axis, 0.0) + end - begin
        return seconds

    def events(self, rank: int, origin: Moment, at: float) -> list[Event]:
        """The same as events; `at` is the time of `origin` in seconds."""
        waits = [
            Event(rank, "compute", "wait" if name else "compute", name or BESIDE, at + begin, at + end)
            for _, name, begin, end in self._waits(origin)
        ]
        moves = [
            Event(rank, f"comm.{axis}", "comm", name, at + between(origin, begin), at + between(origin, end), nbytes)
            for axis, name, begin, end, nbytes in self.transfers
        ]
        done = [
            Event(rank, lane, kind, name, at + between(origin, begin), at + between(origin, end))
            for lane, kind, name, begin, end in self.work
        ]
        return done + waits + moves

    @property
    def _origin(self) -> Moment:
        return next((begin for *_, begin, _ in self.stalls), 0.0)

    def _waits(self, origin: Moment) -> Iterator[tuple[str, str, float, float]]:
        """Every wait in pieces, (axis, name, begin, end) in seconds from `origin`; own work has no name."""
        moving: dict[str, list[tuple[float, float]]] = {}
        for axis, _, begin, end, _ in self.transfers:
            moving.setdefault(FOLDED.get(axis, axis), []).append((between(origin, begin), between(origin, end)))
        for spans in moving.values():
            spans.sort()
        for axis, name, stood, moved in self.stalls:
            at = between(origin, stood)
            until = max(at, between(origin, moved))  # it may have come before it was waited for
            for begin, end in moving.get(FOLDED.get(axis, axis), []):
                begin, end = max(begin, at), min(end, until)
                if begin < end:
                    if at < begin:
                        yield axis, "", at, begin
                    yield axis, name, begin, end
                    at = end
            if at < until:
                yield axis, "", at, until


class Work(Protocol):
    """What a library or a window is still doing."""

    def wait(self) -> object: ...


class Handle(Generic[T]):
    """A started transfer.  `wait()` returns its result and may be called again; the buffers live until then."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._result: T | None = None

    @classmethod
    def done(cls, result: T) -> Handle[T]:
        """A transfer that had nothing to move (a group of one)."""
        return cls(lambda: result)

    def wait(self) -> T:
        if self._wait is not None:
            self._result, self._wait = self._wait(), None
        return self._result  # type: ignore[return-value]


class Sending:
    """A send under way.  It holds its tensors; let it go when it `is_done`, which gloo never says, or after `wait`."""

    def __init__(self, tensors: Sequence[torch.Tensor], handle: Handle[None], is_done: Callable[[], bool]) -> None:
        self._tensors, self._handle, self._is_done = tensors, handle, is_done

    @property
    def is_done(self) -> bool:
        return self._is_done()

    def wait(self) -> None:
        self._handle.wait()


def start(
    meter: Meter,
    axis: str,
    name: str,
    nbytes: int,
    stream: torch.cuda.Stream | None,
    prepare: Callable[[], None] | None,
    launch: Callable[[], Sequence[Work]],
    finish: Callable[[], T],
    peer: str = "",
    is_early: bool = False,
    what: tuple[str, torch.Tensor] | None = None,
) -> Handle[T]:
    """Starts `prepare`, then `launch`, and hands back a handle whose result is `finish()` once the works are done.

    `stream` is the side stream (None on a CPU).  `nbytes` is what this rank sends.  `peer`, as in " from rank 3", is
    said of a wait that does not end, and so is `what`: the collective, and what this rank gives to it.  is_early: the
    other side need not have come to it.  The closures hold every buffer.
    """
    made = _start(meter, axis, name, nbytes, stream, prepare, launch, finish, peer, what)
    if meter.at_once and not is_early:
        made.wait()
    return made


def _start(
    meter: Meter,
    axis: str,
    name: str,
    nbytes: int,
    stream: torch.cuda.Stream | None,
    prepare: Callable[[], None] | None,
    launch: Callable[[], Sequence[Work]],
    finish: Callable[[], T],
    peer: str,
    what: tuple[str, torch.Tensor] | None,
) -> Handle[T]:
    if stream is None:
        meter.begun[axis] += 1
        collective, dtype, shape, number = "transfer", None, None, meter.begun[axis]
        if what is not None:
            collective, dtype, shape = what[0], what[1].dtype, what[1].shape
        if prepare is not None:
            prepare()
        begin = time.perf_counter()
        works = launch()

        def wait_on_host() -> T:
            stood = time.perf_counter()
            given = f", {str(dtype).removeprefix('torch.')} {list(shape)}" if shape is not None else ""
            with meter.waiting(name + peer, f"{collective} {number} along {axis}{given}"), _named(axis, name):
                for work in works:
                    work.wait()
            moved = time.perf_counter()
            meter.stalled(axis, name, stood, moved)
            meter.transferred(axis, name, begin, moved, nbytes)
            return finish()

        return Handle(wait_on_host)

    timed = meter.records
    began: Moment = 0.0
    ended: Moment = 0.0
    with On(stream) as compute:
        in_order = compute == stream
        if not in_order:
            stream.wait_stream(compute)
        if prepare is not None:
            prepare()
        if timed:
            began = _mark(stream)
        for work in launch():
            work.wait()  # the side stream waits, the host goes on
        if timed:
            ended = _mark(stream)
        result = finish()
        ready = _mark(stream, timed)
    meter.transferred(axis, name, began, ended, nbytes)
    keep = (prepare, launch, finish)  # a tensor that only `prepare` reads may not have been read yet either

    def wait_on_stream() -> T:
        nonlocal keep
        waiting = current(stream.device)  # not always the one that the transfer began on
        if in_order and waiting == stream:  # nothing else ran meanwhile
            meter.stalled(axis, name, began, ended)
        else:
            if timed:
                meter.stalled(axis, name, _mark(meter.standing(waiting)), ready)
            waiting.wait_event(ready)
        del keep
        return result

    return Handle(wait_on_stream)


@contextmanager
def _named(axis: str, name: str) -> Iterator[None]:
    """The library's errors name neither the transfer nor its remedy: a note of the exception does."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(f'"{name}" along {axis} needs all its ranks: see which of them ended, or does not come to it.')
        raise


def now(device: torch.device) -> Moment:
    """This moment on the compute stream of `device`, or on the host's clock."""
    return _mark(current(device)) if device.type == "cuda" else time.perf_counter()


def _mark(stream: torch.cuda.Stream, timed: bool = True) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def between(origin: Moment, moment: Moment) -> float:
    """Seconds from one moment to another on the same device."""
    if isinstance(moment, torch.cuda.Event):
        assert isinstance(origin, torch.cuda.Event)
        return float(origin.elapsed_time(moment)) / 1e3
    assert not isinstance(origin, torch.cuda.Event)
    return moment - origin
