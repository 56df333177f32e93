"""Traces by `torch.profiler` of any program -> events, one file a rank.

    read([Path("rank0.json.gz"), Path("rank1.json.gz")])

Device events become events of their kind (`report/kernels.py`), on the lane "stream N", transfers on "comm.AXIS" with
the axis of their process group; `ProfilerStep#N` becomes step N, from its first moment on the device to that of the
next step.  Clocks of several ranks are laid together so that the transfers they share end together (the median over
transfers): a collective's kernels leave together, however long ago each came.

What a trace cannot tell is said in `notes`: a rank that is missing, kernels without a name, clocks that share nothing.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from interlace.errors import DataError
from interlace.events import Event
from interlace.report import kernels
from interlace.report.file import load
from interlace.report.ledger import ALL, STEP, matched

DEVICE = {"kernel": "kernel", "gpu_memcpy": "gpu_memcpy", "gpu_memset": "gpu_memset", "concurrent_kernel": "kernel",
          "memcpy": "gpu_memcpy", "memset": "gpu_memset"}  # fmt: skip
LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime", "driver")
OPERATORS = ("cpu_op", "operator", "user_annotation")
NAME_LENGTH = 300
STRAY = 0.01  # of a file's events on the device, that may be on GPUs which are not the rank's own
DAY = 86_400e6  # no trace is as long
Memory = dict[int, list[tuple[float, float]]]  # rank -> (seconds, bytes allocated)


@dataclass
class Traced:
    """What traces hold: events on one clock that begins at 0, the ranks of each axis's groups, memory, and remarks."""

    events: list[Event]
    groups: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read(paths: Sequence[str | Path]) -> Traced:
    """The traces of one run, a file a rank; DataError says in one sentence what is wrong with a file."""
    return from_traces([(str(path), load(path)) for path in paths])


def from_traces(traces: Sequence[tuple[str, Mapping[str, Any]]]) -> Traced:
    """The same from (where it is from, JSON)."""
    files = [_File(where, trace) for where, trace in traces]
    strays = [note for file in files if len(files) > 1 and (note := file.leave_strays())]
    ranks = _ranks(files)
    if all(file.base for file in files):  # nanoseconds since 1970, where the times of each file begin
        for file in files:
            file.offset = (file.base - min(other.base for other in files)) / 1e3
    origin = min(file.device[0]["ts"] + file.offset for file in files)
    found = Traced([])
    labels = _Axes()
    for file, rank in zip(files, ranks, strict=True):
        found.events += file.events(rank, origin, labels)
        if points := file.memory(origin):
            found.memory[rank] = points
    found.groups = labels.groups()
    if len(files) > 1:
        _align(found)
    found.notes += strays + _remarks(files, found, labels)
    return found


# --- one file --------------------------------------------------------------------------------------------------------


class _File:
    """One trace: its device events, and what was known on the host when they were launched.  Times in microseconds."""

    def __init__(self, where: str, trace: Mapping[str, Any]) -> None:
        self.where = where
        info = trace.get("distributedInfo")
        self.info: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
        self.rank = self.info["rank"] if _is_count(self.info.get("rank")) else None
        base = trace.get("baseTimeNanoseconds")
        self.base = base if _is_count(base) else 0
        self.offset = 0.0  # of this file's times from those of the first
        entries = [entry for entry in trace["traceEvents"] if _is_timed(entry)]
        self.device = _together([entry for entry in entries if _is_device(entry)])
        self.broken = sum(map(_is_device, trace["traceEvents"])) - len(self.device)
        if self.broken and not self.device:
            raise DataError(
                f"{where}: none of its {self.broken} GPU events has a usable begin and length: record the trace again",
                file=where,
            )
        if not self.device:
            raise DataError(
                f"{where}: no GPU events among its {len(trace['traceEvents'])}: profile on a GPU, with "
                "ProfilerActivity.CUDA",
                file=where,
            )
        self.device.sort(key=lambda entry: (entry["ts"], entry["ts"] + entry["dur"]))
        self.devices = sorted({_device(entry) for entry in self.device})
        self.launched = _by(entries, "correlation", LAUNCHES)
        self.operators = _by(entries, "External id", OPERATORS)
        marks = [entry for entry in entries if "annotation" in str(entry.get("cat"))]
        self.updates = _joined(entry for entry in marks if str(entry.get("name")).startswith("Optimizer.step"))
        self.steps = [entry for entry in marks if re.fullmatch(r"ProfilerStep#\d+", str(entry.get("name")))]
        self.points = [entry for entry in trace["traceEvents"] if _is_memory(entry)]

    def leave_strays(self) -> str:
        """Leaves out what a rank does on GPUs that are not its own, as a context on the first one makes; says so."""
        counts = Counter(map(_device, self.device))
        (main, _), *others = counts.most_common()
        strays = sum(count for _, count in others)
        if not strays or strays > STRAY * len(self.device):
            return ""
        self.device = [entry for entry in self.device if _device(entry) == main]
        self.devices = [main]
        away = ", ".join(str(device) for device, _ in others)
        return f"{self.where}: {strays} events on GPU {away} are left out, the others are on GPU {main}"

    def events(self, rank: int, origin: float, labels: _Axes) -> list[Event]:
        """Device events of a rank, or of every device of a file that has several, each a rank then."""
        found = []
        for number, device in enumerate(self.devices):
            own = [entry for entry in self.device if _device(entry) == device]
            where = rank if len(self.devices) == 1 else number
            found += [self._event(entry, where, origin, labels) for entry in own]
            found += self._step_events(own, where, origin)
        return found

    def _seconds(self, moment: float, origin: float) -> float:
        return (moment + self.offset - origin) / 1e6

    def _event(self, entry: Mapping[str, Any], rank: int, origin: float, labels: _Axes) -> Event:
        args, name = _args(entry), str(entry.get("name"))
        launch = self.launched.get(_number(args, "correlation"))
        external = _number(args, "External id") or _number(_args(launch), "External id")
        operated = self.operators.get(external)
        operator = str(operated.get("name")) if operated else ""
        updates = launch is not None and _inside(launch["ts"], self.updates)
        category = DEVICE[str(entry["cat"]).lower()]
        kind = kernels.kind_of(name, category, args, operator, updates)
        begin = self._seconds(entry["ts"], origin)
        end = max(begin, self._seconds(entry["ts"] + entry["dur"], origin))
        nbytes, flops, lane = 0, 0, f"stream {args.get('stream', entry.get('tid', 0))}"
        if kind == "comm":
            lane = "comm" + (f".{axis}" if (axis := labels.of(name, category, args, self.info)) else "")
            nbytes, name = _transfer(name, args)
        elif kind in ("compute", "optimizer"):
            flops = _flops(operator, _args(operated).get("Input Dims"))
            name = f"{name[:NAME_LENGTH]} {args['grid']}" if args.get("grid") else name[:NAME_LENGTH]
        return Event(rank, lane, kind, name[: NAME_LENGTH + 40], begin, end, nbytes, flops)

    def _step_events(self, own: Sequence[Mapping[str, Any]], rank: int, origin: float) -> list[Event]:
        """Steps on the device: by the profiler's marks there, else by what each launched or held; else one."""
        last = max(entry["ts"] + entry["dur"] for entry in own)
        there = [entry for entry in self.steps if "gpu" in str(entry.get("cat")) and _device(entry) == _device(own[0])]
        begins: dict[str, float] = {}
        ends: dict[str, float] = {}
        for entry in there:
            name = f"step {str(entry['name']).partition('#')[2]}"
            begins[name] = min(begins.get(name, entry["ts"]), entry["ts"])
            ends[name] = max(ends.get(name, 0.0), entry["ts"] + entry["dur"])
        if not there:
            for entry in self.steps:
                name = f"step {str(entry['name']).partition('#')[2]}"
                kernels_ = [each for each in own if self._launched_in(each, entry)]
                if kernels_:
                    begins[name] = min(each["ts"] for each in kernels_)
                    ends[name] = max(each["ts"] + each["dur"] for each in kernels_)
        if not begins:
            begins, ends = {ALL: own[0]["ts"]}, {ALL: last}
        order = sorted(begins, key=lambda name: begins[name])
        found = []
        for name, following in zip(order, [*order[1:], None], strict=True):
            end = ends[name] if following is None else begins[following]
            low, high = self._seconds(begins[name], origin), self._seconds(end, origin)
            found.append(Event(rank, STEP, "compute", name, low, max(low, high)))
        return found

    def _launched_in(self, entry: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
        """Where no launch is recorded, what began on the device within the step's mark."""
        launch = self.launched.get(_number(_args(entry), "correlation")) if self.launched else entry
        return launch is not None and bool(step["ts"] <= launch["ts"] < step["ts"] + step["dur"])

    def memory(self, origin: float) -> list[tuple[float, float]]:
        """Bytes allocated on the device over time, where the trace was made with profile_memory."""
        return [(self._seconds(entry["ts"], origin), float(entry["args"]["Total Allocated"])) for entry in self.points]


class _Axes:
    """Names of process groups: the axis that a group's description speaks of, told apart where two would be one."""

    def __init__(self) -> None:
        self.members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self.known: dict[tuple[Any, ...], str] = {}
        self.nameless = 0

    def groups(self) -> dict[str, list[tuple[int, ...]]]:
        return {axis: sorted(members) for axis, members in self.members.items()}

    def of(self, name: str, category: str, args: Mapping[str, Any], info: Mapping[str, Any]) -> str:
        said = [str(args.get(key)) for key in kernels.GROUP]
        key = (id(info), category, name if said == ["None"] * len(said) else "", *said)
        if key not in self.known:
            self.known[key] = self._named(name, category, args, info)
        self.nameless += not self.known[key]
        return self.known[key]

    def _named(self, name: str, category: str, args: Mapping[str, Any], info: Mapping[str, Any]) -> str:
        group, ranks, description = _group(args, info)
        if group is None and not ranks:
            if category != "kernel":
                return "peer copy"
            large = [each for each in _config(info) if len(_numbers(each.get("ranks"))) > 1]
            if kernels.SYMMETRIC.search(name):
                return "symmetric"
            if len(large) != 1:
                return ""
            ranks, description = _numbers(large[0].get("ranks")), str(large[0].get("pg_desc", ""))
            group = str(large[0].get("pg_name", ""))
        axis = kernels.axis_name(description)
        if not axis:
            whole = _is_count(info.get("world_size")) and len(ranks) == info["world_size"]
            axis = "world" if whole or description == "default_pg" else f"group {group or list(ranks)}"
        if ranks:
            clash = any(other != ranks and set(other) & set(ranks) for other in self.members[axis])
            if clash:  # two groups of one description through one rank
                axis = f"{axis} of {len(ranks)}"
                clash = any(other != ranks and set(other) & set(ranks) for other in self.members[axis])
            if clash:
                axis = f"{axis} ({group})"
            self.members[axis].add(ranks)
        return axis


def _group(args: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[str | None, tuple[int, ...], str]:
    """The name, ranks and description of an event's process group, from its arguments or the trace's list of groups."""
    name = args.get("Process Group Name")
    if name is None and "Process Group Ranks" not in args:
        return None, (), ""
    listed = next((each for each in _config(info) if str(each.get("pg_name")) == str(name)), {})
    ranks = _numbers(listed.get("ranks")) or _numbers(args.get("Process Group Ranks"))
    description = args.get("Process Group Description") or listed.get("pg_desc") or ""
    return (None if name is None else str(name)), ranks, str(description)


def _config(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = info.get("pg_config")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _numbers(value: Any) -> tuple[int, ...]:
    """Ranks as a list, or as the text of one; a text that was cut short ("[0, 1, ...") says nothing."""
    if isinstance(value, str):
        if "..." in value or not value.strip().startswith("["):
            return ()
        return tuple(int(each) for each in re.findall(r"\d+", value))
    if isinstance(value, list) and all(_is_count(each) for each in value):
        return tuple(value)
    return ()


def _transfer(name: str, args: Mapping[str, Any]) -> tuple[int, str]:
    """Bytes (of the larger of what goes in and comes out) and a name that is the same on every rank that takes part."""
    collective = str(args.get("Collective name") or "")
    if not collective:
        nbytes = args.get("bytes")
        return (nbytes if _is_count(nbytes) else 0), kernels.short_name(name)
    counts = [n for key in ("In msg nelems", "Out msg nelems") if _is_count(n := args.get(key))]
    size = {"float": 4, "double": 8, "long": 8, "int": 4, "half": 2, "bfloat16": 2}.get(
        str(args.get("dtype", "")).lower().replace("float32", "float"), 1
    )
    ends = [args.get("Src Rank"), args.get("Dst Rank")]
    parts = [collective, str(max(counts, default=0))]
    if collective.lower() in ("send", "recv") and all(_is_count(end) for end in ends):
        parts.append(f"{ends[0]} to {ends[1]}")
    if _is_count(args.get("Seq")):
        parts.append(f"seq {args['Seq']}")
    return max(counts, default=0) * size, " ".join(parts)


def _flops(operator: str, dims: Any) -> int:
    """2MNK of a matrix product by its operands' shapes; 0 for anything else."""
    first = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}.get(operator)
    if first is None or not isinstance(dims, list) or len(dims) < first + 2:
        return 0
    left, right = dims[first], dims[first + 1]
    good = all(isinstance(each, list) and len(each) >= 2 and all(map(_is_count, each)) for each in (left, right))
    if not good:
        return 0
    batch = left[0] if len(left) == 3 else 1
    return int(2 * batch * left[-2] * left[-1] * right[-1])


# --- several files ---------------------------------------------------------------------------------------------------


def _ranks(files: Sequence[_File]) -> list[int]:
    if len(files) == 1:
        return [files[0].rank or 0]
    for file in files:
        if file.rank is None:
            what = "distributedInfo names no rank" if file.info else "it has no distributedInfo"
            raise DataError(
                f"{file.where}: {what}, so it cannot be laid beside the others: give it alone, or record it after "
                "torch.distributed was initialised",
                file=file.where,
            )
        if len(file.devices) > 1:
            raise DataError(
                f"{file.where}: holds {len(file.devices)} devices, where several files must hold one rank each: "
                "give it alone",
                file=file.where,
            )
    worlds = {size: file.where for file in files if _is_count(size := file.info.get("world_size"))}
    if len(worlds) > 1:
        found = " and ".join(f"{size} ({where})" for size, where in worlds.items())
        raise DataError(f"the traces are of worlds of different sizes, {found}: give those of one run")
    first: dict[int | None, str] = {}
    for file in files:
        if file.rank in first:
            raise DataError(
                f"{file.where} and {first[file.rank]} are both of rank {file.rank}: give one file a rank",
                file=file.where,
            )
        first[file.rank] = file.where
    return [file.rank for file in files if file.rank is not None]


def _align(found: Traced) -> None:
    """Shifts the clock of each rank so that the transfers it shares with those before it end together."""
    transfers: dict[int, list[Event]] = {event.rank: [] for event in found.events}
    for event in found.events:
        if event.kind == "comm":
            transfers[event.rank].append(event)
    shared = matched(transfers, found.groups)
    shift = {min(transfers): 0.0}
    while len(shift) < len(transfers):
        apart: dict[int, list[float]] = defaultdict(list)
        for each in shared:
            known = [event.end + shift[rank] for rank, event in each.items() if rank in shift]
            for rank, event in each.items():
                if rank not in shift and known:
                    apart[rank].append(statistics.median(known) - event.end)
        if not apart:
            lost = sorted(set(transfers) - set(shift))
            found.notes.append(
                f"rank {_list(lost)} shares no transfer with rank {_list(sorted(shift))}: its clock is as recorded"
            )
            shift |= dict.fromkeys(lost, 0.0)
            break
        rank = max(apart, key=lambda rank: (len(apart[rank]), -rank))
        shift[rank] = statistics.median(apart[rank])
    earliest = min(event.begin + shift[event.rank] for event in found.events)
    found.events = [
        replace(event, begin=event.begin + shift[event.rank] - earliest, end=event.end + shift[event.rank] - earliest)
        for event in found.events
    ]
    found.memory = {
        rank: [(at + shift[rank] - earliest, nbytes) for at, nbytes in points] for rank, points in found.memory.items()
    }


def _remarks(files: Sequence[_File], found: Traced, labels: _Axes) -> list[str]:
    notes = []
    ranks = sorted({event.rank for event in found.events})
    if len(files) == 1 and files[0].rank is None and len(files[0].devices) == 1:
        notes.append("the trace names no rank: taken as rank 0")
    if len(files[0].devices) > 1:
        notes.append(f"the trace holds {len(files[0].devices)} devices: each is shown as a rank")
    if broken := sum(file.broken for file in files):
        notes.append(f"{broken} GPU events without a usable begin or length are left out")
    expected = {rank for members in labels.members.values() for group in members for rank in group}
    world = files[0].info.get("world_size")
    expected |= set(range(world)) if _is_count(world) else set()
    missing = sorted(expected - set(ranks))
    if missing and len(files[0].devices) == 1:
        notes.append(
            f"no trace of rank {_list(missing)}: what a transfer takes is at most what is shown, the rest is waiting"
        )
    kinds = Counter(event.kind for event in found.events)
    if not kinds["comm"] and not kinds["fused"]:
        notes.append("no communication found")
    if labels.nameless:
        notes.append(f"{labels.nameless} transfers name no process group, so their axis is not known")
    unknown: Counter[str] = Counter()
    for event in found.events:
        if event.kind == "unknown":
            unknown[kernels.short_name(event.name)] += 1
    if unknown:
        most = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(3))
        notes.append(f"{len(unknown)} names of kernels are unknown, first {most}")
    return notes


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


# --- entries ---------------------------------------------------------------------------------------------------------


def _args(entry: Mapping[str, Any] | None) -> Mapping[str, Any]:
    args = entry.get("args") if entry else None
    return args if isinstance(args, Mapping) else {}


def _number(args: Mapping[str, Any], key: str) -> int | None:
    value = args.get(key)
    return value if _is_count(value) else None


def _by(
    entries: Iterable[Mapping[str, Any]], key: str, categories: Sequence[str]
) -> dict[int | None, Mapping[str, Any]]:
    """Entries of some categories by a number among their arguments; of several the first, which is the outermost."""
    found: dict[int | None, Mapping[str, Any]] = {}
    for entry in entries:
        if str(entry.get("cat")).lower() in categories and (number := _number(_args(entry), key)) is not None:
            found.setdefault(number, entry)
    return found


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _is_timed(entry: Any) -> TypeGuard[dict[str, Any]]:
    """A complete event with a beginning and a length that can be one."""
    return (
        isinstance(entry, dict)
        and entry.get("ph") == "X"
        and _is_time(entry.get("ts"))
        and _is_time(entry.get("dur"))
        and 0 <= entry["dur"] < DAY
    )


def _together(device: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that begin days away from the others, as at 0, where the driver gave no time."""
    middle = statistics.median_low([entry["ts"] for entry in device]) if device else 0.0
    return [entry for entry in device if abs(entry["ts"] - middle) < DAY]


def _is_device(entry: Any) -> bool:
    """A complete event of a GPU, whether or not its times are good."""
    return isinstance(entry, dict) and entry.get("ph") == "X" and str(entry.get("cat")).lower() in DEVICE


def _is_memory(entry: Any) -> bool:
    """A line of the allocator, of a device that is no CPU."""
    if not isinstance(entry, dict) or entry.get("name") != "[memory]" or not _is_time(entry.get("ts")):
        return False
    args = _args(entry)
    return args.get("Device Type") not in (0, None) and _is_time(args.get("Total Allocated"))


def _device(entry: Mapping[str, Any]) -> int:
    device = _args(entry).get("device", entry.get("pid"))
    return device if _is_count(device) else 0


def _joined(entries: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Stretches of host time, in order."""
    spans = sorted((entry["ts"], entry["ts"] + entry["dur"]) for entry in entries if "gpu" not in str(entry.get("cat")))
    joined: list[tuple[float, float]] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _inside(moment: float, spans: Sequence[tuple[float, float]]) -> bool:
    i = bisect_right(spans, (moment, float("inf"))) - 1
    return i >= 0 and moment < spans[i][1]
