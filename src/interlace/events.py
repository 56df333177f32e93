"""Events: something that took time.  The only currency between simulator, run and report.

An event says that `rank`, on `lane` ("compute", "tp", "dp", ... whatever runs one thing at a time), did `name` from
`begin` to `end`, in seconds on a clock that all ranks of one file share, and moved `bytes` or worked `flops` in it.

    kind        what the time went to
    compute     matmuls, attention and everything else on the device
    comm        a transfer on its way, whether or not anyone waits for it
    wait        the compute stream stood still for a transfer
    optimizer   the parameter update
    data        making the next batch
    save        a checkpoint
    bubble      nothing to do in the pipeline's schedule
    fused       one kernel that both computes and transfers
    other       copies to and from the host, memory filled
    unknown     a kernel of another program that nobody could name

The lane "step" holds one event a step, around all others of its rank: it says when the step began and ended.  Transfers
of an axis run on the lane "comm.AXIS".  An action of a pipeline is named as in its schedule: stage, F, B, I or W,
micro-batch ("0F3").

Two files hold events: JSON lines, one event a line, which a run appends to; and Chrome's trace format (a process a
rank, a thread a lane), which chrome://tracing and Perfetto draw.  Both give back exactly the events that were written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from interlace.errors import DataError, nearest

KINDS = ("compute", "comm", "wait", "optimizer", "data", "save", "bubble", "fused", "other", "unknown")
BESIDE = "beside transfers"  # the name of own work on the side stream for which the compute stream stood still


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that took time: seconds, bytes sent, floating point operations."""

    rank: int
    lane: str
    kind: str
    name: str
    begin: float
    end: float
    bytes: int = 0
    flops: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.begin <= self.end, self

    @property
    def seconds(self) -> float:
        return self.end - self.begin


_FIELDS = tuple(field.name for field in fields(Event))
_STRINGS = ("lane", "kind", "name")
_TIMES = ("begin", "end")


def write_jsonl(path: str | Path, events: Iterable[Event], append: bool = False) -> None:
    """Write one JSON object a line; `append` adds to the file instead of replacing it."""
    with open(path, "ab" if append else "wb") as file:
        file.write(to_jsonl(events))


def to_jsonl(events: Iterable[Event]) -> bytes:
    """Events as a file holds them."""
    lines = (json.dumps(asdict(event), ensure_ascii=False, allow_nan=False) + "\n" for event in events)
    return "".join(lines).encode()


def read_jsonl(path: str | Path) -> list[Event]:
    """The events of a file, in file order; DataError with file and line for a line that is no event."""
    with _opened(path) as file:
        return from_jsonl(file, str(path))


def from_jsonl(lines: Iterable[bytes], where: str) -> list[Event]:
    """The same from lines."""
    events = []
    for number, line in enumerate(lines, 1):
        here = f"{where}, line {number}"
        try:
            record = json.loads(line.decode())
        except ValueError as error:
            cut = "" if line.endswith(b"\n") else ", and the line is cut off"
            raise DataError(
                f"{here}: not a JSON object ({error}{cut}): remove or repair the line", file=where, line=number
            ) from None
        events.append(_event(record, here))
    return events


def to_chrome(events: Iterable[Event]) -> dict[str, Any]:
    """Chrome trace of events: complete ("X") events in microseconds, with the exact seconds among their `args`.

    Perfetto wants numbers for processes and threads; their names, "rank 0" and the lane, are in metadata ("M").
    """
    threads: dict[tuple[int, str], int] = {}
    drawn: list[dict[str, Any]] = []
    for event in events:
        exact = {
            "lane": event.lane, "begin": event.begin, "end": event.end, "bytes": event.bytes, "flops": event.flops
        }  # fmt: skip
        drawn.append(
            {
                "ph": "X",
                "pid": event.rank,
                "tid": threads.setdefault((event.rank, event.lane), len(threads)),
                "cat": event.kind,
                "name": event.name,
                "ts": event.begin * 1e6,
                "dur": event.seconds * 1e6,
                "args": exact,
            }
        )
    ranks = sorted({rank for rank, _ in threads})
    names = [{"ph": "M", "pid": r, "name": "process_name", "args": {"name": f"rank {r}"}} for r in ranks]
    names += [{"ph": "M", "pid": r, "name": "process_sort_index", "args": {"sort_index": r}} for r in ranks]
    names += [
        {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": lane}}
        for (rank, lane), thread in threads.items()
    ]
    return {"traceEvents": [*names, *drawn], "displayTimeUnit": "ms"}


def from_chrome(trace: Any, where: str = "trace") -> list[Event]:
    """The inverse of `to_chrome`; DataError names the entry of `traceEvents` that another program wrote or damaged."""
    entries = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(entries, list):
        raise DataError(f"{where}: no list 'traceEvents': expected a Chrome trace written by interlace", file=where)
    events = []
    for position, entry in enumerate(entries):
        here = f"{where}, traceEvents[{position}]"
        phase = entry.get("ph") if isinstance(entry, dict) else None
        if phase == "M":  # names of processes and threads, for the drawing only
            continue
        if phase != "X" or not isinstance(entry.get("args"), dict):
            raise DataError(f"{here}: not a complete event ('ph': 'X' with 'args'): expected a trace by interlace")
        renamed = {"rank": "pid", "kind": "cat", "name": "name"}
        record = {ours: entry[theirs] for ours, theirs in renamed.items() if theirs in entry}
        events.append(_event({**entry["args"], **record}, here))
    return events


def write_chrome(path: str | Path, events: Iterable[Event]) -> None:
    """Write a Chrome trace, one entry a line."""
    trace = to_chrome(events)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False, allow_nan=False) for entry in trace["traceEvents"])
    unit = json.dumps(trace["displayTimeUnit"])
    Path(path).write_text(f'{{"displayTimeUnit": {unit}, "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")


def read_chrome(path: str | Path) -> list[Event]:
    """The events of a Chrome trace by `write_chrome`; DataError names the file and the line or entry at fault."""
    with _opened(path) as file:
        text = file.read()
    try:
        trace = json.loads(text.decode())
    except ValueError as error:
        line = text.count(b"\n", 0, getattr(error, "pos", getattr(error, "start", 0))) + 1
        raise DataError(
            f"{path}, line {line}: not JSON ({error}): write the trace again", file=str(path), line=line
        ) from None
    return from_chrome(trace, str(path))


def _opened(path: str | Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): give a file of events", file=str(path)) from None


def _event(record: Any, where: str) -> Event:
    """A checked event from plain JSON values."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: found {type(record).__name__}, expected an object with {', '.join(_FIELDS)}")
    missing = [name for name in _FIELDS if name not in record and name not in ("bytes", "flops")]
    if missing:
        raise DataError(f"{where}: the event has no {missing[0]!r}: expected {', '.join(_FIELDS)}")
    for name, value in record.items():
        if name not in _FIELDS:
            close = nearest(name, _FIELDS)
            raise DataError(f"{where}: unknown key {name!r} of an event: use {close or ', '.join(_FIELDS)}")
        if name in _STRINGS:
            wanted, good = "a string", isinstance(value, str)
        elif name in _TIMES:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            wanted, good = "a finite number of seconds", number and abs(value) <= sys.float_info.max
        else:  # rank, bytes, flops
            wanted, good = "a whole number of 0 or more", type(value) is int and value >= 0
        if not good:
            raise DataError(f"{where}: {name!r} is {value!r}: expected {wanted}")
    if record["kind"] not in KINDS:
        close = nearest(record["kind"], KINDS)
        raise DataError(f"{where}: unknown kind {record['kind']!r} of an event: use {close or ', '.join(KINDS)}")
    begin, end = float(record["begin"]), float(record["end"])
    if end < begin:
        raise DataError(f"{where}: the event ends at {end} before it begins at {begin}: swap or remove them")
    return Event(**{**record, "begin": begin, "end": end})
