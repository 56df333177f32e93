"""What `interlace report` is given -> events: a run folder, files of events, or traces of any program.

Source.open(["runs/demo"])                      a run folder: events.jsonl, run.toml, metrics.jsonl
Source.open(["rank0.json.gz", "rank1.json"])    torch.profiler traces, a file a rank; or a folder of them
Source.open(["events.jsonl"])                   events, of a run or of a simulated one; also as our Chrome trace
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlace.config import loads
from interlace.errors import ConfigError, DataError
from interlace.events import Event, from_chrome, from_jsonl
from interlace.mesh import Mesh
from interlace.report import trace
from interlace.report.file import load
from interlace.report.ledger import Groups, Ledger, ledgers, step_number


@dataclass
class Source:
    """Events with what is known about them.  `summary` is one line, `notes` are remarks; both for people."""

    name: str
    events: list[Event]
    groups: Groups = field(default_factory=dict)
    memory: trace.Memory = field(default_factory=dict)
    summary: str = ""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> Source:
        """DataError says in one sentence what is wrong with a path."""
        places = [Path(path) for path in paths]
        for place in places:
            if not place.exists():
                raise DataError(f"{place}: no such file or folder: give a run folder or traces", file=str(place))
            if len(places) > 1 and (place.is_dir() or place.suffix == ".jsonl"):
                raise DataError(
                    f"{place} stands beside {len(places) - 1} other paths: give one run folder, one file of events, "
                    "or the traces of all ranks",
                    file=str(place),
                )
        first = places[0]
        if first.is_dir() and (first / "events.jsonl").exists():
            return _run_folder(first)
        if first.is_dir():
            places = _traces_in(first) or _files(first, ".json", ".json.gz")
            if not places:
                raise DataError(
                    f"{first}: neither events.jsonl nor traces (*.json, *.json.gz) are in it: give a run folder or "
                    "traces",
                    file=str(first),
                )
        if first.suffix == ".jsonl":
            events, notes = _whole_lines(first)
            return cls(str(first), _some(events, first), notes=notes)
        return _traces(str(first) if len(paths) == 1 else f"{first} and {len(paths) - 1} more", places)

    def ledgers(self, steps: range | None = None) -> list[Ledger]:
        """One a step; of `steps` alone, by the numbers in their names.  DataError when there is none of them."""
        found = ledgers(self.events, self.groups)
        if steps is None:
            return found
        chosen = [ledger for ledger in found if (step_number(ledger.step) or 0) in steps]
        if not chosen:
            known = [number for ledger in found if (number := step_number(ledger.step)) is not None]
            have = f"steps {min(known)} to {max(known)}" if known else "one stretch without steps"
            raise DataError(f"{self.name}: no events of steps {steps.start}:{steps.stop}: it holds {have}")
        return chosen


def _traces_in(folder: Path) -> list[Path]:
    """Files that are named as traces: *.pt.trace.json of PyTorch's handler, rank0_trace.json of other programs."""
    return _files(folder, "trace.json", "trace.json.gz")


def _files(folder: Path, *ends: str) -> list[Path]:
    return sorted(path for end in ends for path in folder.glob(f"*{end}"))


def _run_folder(folder: Path) -> Source:
    """Of its events alone; traces beside them are told of, for they have another clock and other names of steps."""
    events, notes = _whole_lines(folder / "events.jsonl")
    if left := _traces_in(folder):
        those = f"{left[0].name} and {len(left) - 1} more were" if len(left) > 1 else f"{left[0].name} was"
        notes.insert(0, f"events.jsonl was read, {those} left: interlace report {folder}/*trace.json* reads traces")
    if not events and left:
        raise DataError(
            f"{folder / 'events.jsonl'}: holds no events yet: wait for the first step, or read the traces beside it "
            f"with interlace report {folder}/*trace.json*",
            file=str(folder / "events.jsonl"),
        )
    found = Source(str(folder), _some(events, folder / "events.jsonl"), notes=notes)
    parts = [f"{len({event.rank for event in events})} ranks"]
    with contextlib.suppress(OSError):
        try:
            plan = loads((folder / "run.toml").read_text(encoding="utf-8")).plan
        except ConfigError as error:
            found.notes.append(f"run.toml is not read ({error}), so the groups of ranks are not known")
        else:
            mesh = Mesh.of(plan)
            axes = [axis for axis, _ in mesh.axes] + [
                axis for axis in ("shard", "replica", "ep") if mesh.size(axis) > 1
            ]
            found.groups = {axis: mesh.groups(axis) for axis in axes}
            parts = [f"{mesh.world} ranks", f"plan {plan}"]
            if len({event.rank for event in events}) < mesh.world:
                shown = len({event.rank for event in events})
                found.notes.append(
                    f"events of {shown} of {mesh.world} ranks: waiting for the others is in the transfers"
                )
    found.summary = ", ".join([*parts, *_measured(folder / "metrics.jsonl")])
    return found


def _measured(path: Path) -> list[str]:
    """What metrics.jsonl says about all steps."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                rows.append(row)
    words = [f"{len(rows)} steps"]
    for key, form in (("step_s", "median {:.4g} s"), ("tokens_per_s", "{:.4g} tokens/s"), ("mfu", "MFU {:.1%}")):
        values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
        if values:
            words.append(form.format(statistics.median(values)))
    return words


def _whole_lines(path: Path) -> tuple[list[Event], list[str]]:
    """The events of a file to whose end a run may be writing."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): give a file of events", file=str(path)) from None
    notes = []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        notes.append(f"the last line of {path.name} is cut off and left out")
    return from_jsonl(lines, str(path)), notes


def _some(events: list[Event], path: Path) -> list[Event]:
    if not events:
        raise DataError(f"{path}: holds no events yet: wait for the first step, or give another run", file=str(path))
    return events


def _traces(name: str, places: Sequence[Path]) -> Source:
    traces = [(str(place), load(place)) for place in places]
    where, first = traces[0]
    if len(traces) == 1 and _is_ours(first):
        return Source(name, _some(from_chrome(first, where), places[0]))
    found = trace.from_traces(traces)
    ranks = len({event.rank for event in found.events})
    summary = f"{ranks} rank{'s' if ranks > 1 else ''}, {len(found.events):,} events on the device"
    return Source(name, found.events, found.groups, found.memory, summary, found.notes)


def _is_ours(found: dict[str, Any]) -> bool:
    """Whether `interlace.events` wrote it: the first complete event holds its lane."""
    entries = (entry for entry in found["traceEvents"] if isinstance(entry, dict) and entry.get("ph") == "X")
    args = next(entries, {}).get("args")
    return isinstance(args, dict) and {"lane", "begin", "end"} <= set(args)
