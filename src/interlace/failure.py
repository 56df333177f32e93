"""Where a rank is, and what to say when one fails.

A failure is told as JSON and never unpickled; of several, the first *cause* is the one to show, not the connections
that broke or the waits that ended because of it.
"""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from interlace.errors import ConfigError, DataError, Hang, InterlaceError, PeerLost

# What gloo, NCCL and the stores say in a RuntimeError when a peer is gone, and when they waited too long.
_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|gloo/transport|connectFullMesh|NCCL", re.I
)
_TIMEOUT = re.compile(r"timed out waiting \d+|wait timeout|operation timeout|pair closure|monitoredBarrier", re.I)
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory", re.I)


@dataclass(frozen=True)
class Position:
    """Where a rank is: its step, operation, since when (monotonic seconds), whether that is a wait, waits so far.

    detail: of a wait, which transfer of its group it is for, what this rank gives to it, and the line of the source.
    """

    step: int | None = None
    operation: str = ""
    since: float = 0.0
    waiting: bool = False
    waits: int = 0
    detail: str = ""

    def where(self) -> str:
        """As a phrase: "at step 12 during all_gather(blocks.3)"."""
        step = "before the first step" if self.step is None else f"at step {self.step}"
        return f"{step} during {self.operation}" if self.operation else step


@dataclass(frozen=True)
class Failure:
    """What a failing rank says of itself, in JSON values."""

    rank: int
    kind: str  # "cause", or "timeout", or "consequence": a connection that broke because a peer is gone
    time: float
    message: str
    step: int | None
    operation: str
    since: float
    classes: list[str] = field(default_factory=list)  # of an InterlaceError, most special first
    details: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    detail: str = ""  # of its position


def _kind(error: BaseException | None) -> str:
    """Read the chain of an exception: a wait that ended or a connection that broke in it is a consequence."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        said = str(error) if isinstance(error, RuntimeError) else ""
        if _NO_MEMORY.search(said):
            return "cause"
        if isinstance(error, Hang) or _TIMEOUT.search(said):
            return "timeout"
        if isinstance(error, PeerLost | ConnectionError) or _CONNECTION.search(said):
            return "consequence"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "cause"


def describe(error: Exception, rank: int, at: Position) -> Failure:
    """The failure that an exception of this rank at this position amounts to."""
    message, classes, details = f"{type(error).__name__}: {error}", list[str](), dict[str, Any]()
    if isinstance(error, InterlaceError):
        message, details = error.message, error.to_json()["details"]
        classes = [cls.__name__ for cls in type(error).__mro__ if issubclass(cls, InterlaceError)]
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        message = f"out of memory{f': {error}' if str(error) else ''}; try a smaller micro-batch or more ranks"
        classes = ["ResourceError"]
    trace = "".join(traceback.format_exception(error))
    return Failure(
        rank,
        _kind(error),
        time.monotonic(),
        message,
        at.step,
        at.operation,
        at.since,
        classes,
        details,
        trace,
        at.detail,
    )


def _known(cls: type[InterlaceError]) -> dict[str, type[InterlaceError]]:
    return {cls.__name__: cls} | {name: sub for child in cls.__subclasses__() for name, sub in _known(child).items()}


def compose(failure: Failure) -> InterlaceError:
    """The error to raise for a failure: its own class, with rank, step and operation; PeerLost for foreign classes."""
    known = _known(InterlaceError)
    cls = next((known[name] for name in failure.classes if name in known), PeerLost)
    where = Position(failure.step, failure.operation).where()
    if issubclass(cls, ConfigError | DataError):
        message = failure.message
    elif failure.classes:
        message = f"{failure.message} (rank {failure.rank} {where})"
    elif failure.traceback:
        message = f"rank {failure.rank} failed {where}: {failure.message}"
    else:
        message = failure.message
    place = {"rank": failure.rank, "step": failure.step, "operation": failure.operation}
    trace = {"traceback": failure.traceback} if failure.traceback else {}
    error = cls.__new__(cls)  # a subclass may want other arguments than a message
    InterlaceError.__init__(error, message)
    error.details = {**place, **failure.details, **trace}
    return error


def names(ranks: Sequence[int]) -> str:
    """ "rank 1" or "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def hang(places: Mapping[int, Position], limit: float, stopped: Sequence[int] = (), reported: str = "") -> Hang:
    """The error for a wait beyond `limit` seconds: who is the odd one out, then a line for every rank."""
    waits = [rank for rank, at in places.items() if at.waiting and rank not in stopped]
    absent = [rank for rank in places if rank not in waits]
    odd = [rank for rank in absent if rank in stopped] or absent or _minority({rank: places[rank] for rank in waits})
    those = f"{names([rank for rank in waits if rank not in odd])} waited longer than {limit:g} s"
    if odd and odd[0] in stopped:
        verb = "is" if len(odd) == 1 else "are"
        head = f"{names(odd)} {verb} stopped by a signal{f'; {those}' if waits else f' for longer than {limit:g} s'}"
    elif odd:
        head = f"{names(odd)} did not come where {those}"
    elif len({at.operation for at in places.values()}) > 1:
        head = f"the ranks waited longer than {limit:g} s for each other in different operations"
    else:
        head = f"every rank waited longer than {limit:g} s in the same operation"
    lines, table = _told(places, stopped)
    if reported:
        lines.append(f"  {reported}")
    return Hang("\n".join([head, *lines]), rank=odd[0] if len(odd) == 1 else None, odd=odd, ranks=table)


def aborted(places: Mapping[int, Position], first: Failure) -> InterlaceError:
    """The error for a rank that aborted.  While ranks wait in a transfer that may be the library's doing, to which they
    gave different sizes or element types: then with what each gave to it, and where."""
    gave = {rank: at.detail.rpartition(", ")[0] for rank, at in places.items() if at.waiting and at.detail}
    if not any(gave.values()):
        return compose(first)
    odd = _fewest(gave)
    differing = "ranks gave different things to one transfer"
    head = f"{first.message}, {'since' if odd else 'perhaps since'} {differing}"
    if odd:
        head += f": {names(odd)} not what {names([rank for rank in gave if rank not in odd])} gave"
    lines, table = _told(places, ended=[first.rank])
    return PeerLost("\n".join([head, *lines]), rank=odd[0] if len(odd) == 1 else first.rank, odd=odd, ranks=table)


def _told(
    places: Mapping[int, Position], stopped: Sequence[int] = (), ended: Sequence[int] = ()
) -> tuple[list[str], list[dict[str, Any]]]:
    """A line for every rank, and the same as a table."""
    now, lines, table = time.monotonic(), [], []
    for rank, at in sorted(places.items()):
        age = now - at.since if at.since else None
        state = "waits" if at.waiting else "does not wait"
        state = "stopped by a signal" if rank in stopped else "aborted" if rank in ended else state
        detail = f" ({at.detail})" if at.detail else ""
        lines.append(f"  rank {rank}: {at.where()}{detail}{f' for {age:.1f} s' if age is not None else ''}, {state}")
        place = {"step": at.step, "operation": at.operation, "detail": at.detail}
        table.append({"rank": rank, **place, "seconds": age, "state": state})
    return lines, table


def _minority(waits: Mapping[int, Position]) -> list[int]:
    """The ranks that wait in another operation, or at another count of waits, than half of all or more."""
    for feature in ("operation", "waits"):
        values = {rank: getattr(at, feature) for rank, at in waits.items()}
        if len(set(values.values())) > 1:
            return _fewest(values)
    return []


def _fewest(values: Mapping[int, Any]) -> list[int]:
    """The ranks whose value is not that of half of all or more; none where there is no such value, or no other."""
    (common, count), *others = Counter(values.values()).most_common(2)
    if 2 * count < len(values) or any(other == count for _, other in others):
        return []
    return [rank for rank, value in values.items() if value != common]
