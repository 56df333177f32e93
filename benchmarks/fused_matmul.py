"""Products of the tensor axis beside their transfers: every candidate, PyTorch's ways, what is chosen, and the targets.

    python benchmarks/fused_matmul.py --out FILE.json [--rows A:B] [--only bulk,llama-70b,tp=8] [--budget SECONDS]
        [--table FILE.json] [--search] [--nproc N] [--rounds 12]
    python benchmarks/fused_matmul.py --list [--only ...]        the rows, with their numbers
    python benchmarks/fused_matmul.py --report FILE.json         what earlier runs have found
    python benchmarks/fused_matmul.py --smoke                    tiny rows, on CPU ranks too

Starts its own ranks.  A row: every way is held against a reference first (what is wrong is named and left out), then
all run in turn, `--rounds` times; up to 256 rows as replayed CUDA graphs.  The slowest rank counts.  Results join those
in `--out` (a row measured again replaces the older), and FILE.md beside it holds the table and the targets of all.

`--table` is a table of measurements (`kernels.table`): rows whose class it holds are judged by what it chooses; for
others the choice is made from the even rounds and judged by the odd ones, and then joins the table.  Held-out rows
never join it: what is chosen for them comes from their neighbours.  Without --table it is the package's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
import peers.torch_fused as torch_ways
from fused import shapes, targets
from fused.shapes import Row

from interlace import launch
from interlace.collectives import Group, Meter, make_groups
from interlace.collectives.autograd import start_gather
from interlace.collectives.window import make_windows
from interlace.kernels import measure, table, tune
from interlace.kernels.candidate import Candidate, Problem
from interlace.kernels.measure import Operands
from interlace.kernels.table import Entry, Table
from interlace.mesh import Mesh
from interlace.plan.fused import wire_bytes
from interlace.world import World

LONG = 0.6  # seconds that the rounds of one row may take together; long rows have fewer
FEWEST = 5
KEYS = ("rows", "only", "budget", "rounds", "dtype")
GIVE_UP = 3  # rows in a row that fail
NO_MULTICAST = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE")  # which not every machine has


@dataclass
class Setup:
    """What rows share: the ranks (twice, since what a graph has captured changes a group's workspace), the peers'
    memory, why some are missing, and the rate of a copy engine in bytes/s."""

    group: Group
    captured: Group
    memories: dict[str, torch_ways.Memory]
    missing: dict[str, str]
    rate: float
    found: Table
    rounds: int
    search: bool
    seed: int = 0
    entries: list[Entry] = field(default_factory=list)


def set_up(world: World, given: dict[str, Any]) -> Setup:
    meter = Meter(world.waiting, record=False)
    group = make_groups(Mesh((("tp", world.size),)), world.rank, world.device, world.timeout, meter)["tp"]
    memories, missing = {"serial default": torch_ways.Memory(None, group.process_group)}, {}
    others: dict[str, Callable[[Group], torch_ways.Memory]] = {}
    if world.device.type == "cuda":
        others = {
            "serial window": torch_ways.window,
            "serial zero-cta": torch_ways.zero_cta,
            "one-shot torch": torch_ways.shared,
        }
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        assert group.process_group is not None
        with contextlib.suppress(RuntimeError):  # newer ones need no call
            enable_symm_mem_for_group(group.process_group.group_name)
    for name, make in others.items():
        made = measure.attempt(functools.partial(make, group), group)
        if isinstance(made, str):
            missing[name] = made
        else:
            memories[name] = made
    name = tune.device_name(world.device)
    found = Table.load(Path(given["table"]), name) if given["table"] else tune.shipped(name)
    return Setup(group, group.like(), memories, missing, copy_rate(group), found, given["rounds"], given["search"])


def copy_rate(group: Group) -> float:
    """Bytes/s at which a rank fetches from the next one's memory while that does the same."""
    size = 1 << 28 if group.device.type == "cuda" else 1 << 20
    (window,) = make_windows(group, [size])
    source, target = window.peers[(group.rank + 1) % group.size], torch.empty_like(window.own)
    samples = measure.interleaved({"copy": lambda: target.copy_(source)}, group, 5)[0]["copy"]
    return size / statistics.median(samples)


# --- one row ---------------------------------------------------------------------------------------------------------


def ways(
    row: Row, setup: Setup, operands: Sequence[Operands]
) -> tuple[dict[str, list[torch_ways.Way]], dict[str, str]]:
    """PyTorch's ways for all operands, by column, and why others are missing."""
    made: dict[str, list[torch_ways.Way]] = {}
    missing = dict(setup.missing)

    def add(name: str, build: Callable[[Operands], torch_ways.Way]) -> None:
        found = measure.attempt(lambda: [build(given) for given in operands], setup.group)
        if isinstance(found, str):
            missing[name] = found
        else:
            made[name] = found

    for name, memory in setup.memories.items():
        memory.begin()
        if name.startswith("serial ") and (name != "serial zero-cta" or row.op == "all_gather_matmul"):
            add(name, functools.partial(torch_ways.serial, memory=memory))
    if row.op == "matmul_all_reduce" and "one-shot torch" in setup.memories:
        memory = setup.memories["one-shot torch"]
        add("one-shot torch", functools.partial(torch_ways.one_shot, memory=memory, group=setup.group))
    if row.op != "matmul_all_reduce" and setup.group.device.type == "cuda":
        add("async-tp", functools.partial(torch_ways.async_tp, group=setup.group))
    return made, missing


def check(
    made: dict[str, list[torch_ways.Way]], expected: Sequence[torch.Tensor], dtype: torch.dtype, group: Group
) -> tuple[dict[str, list[torch_ways.Way]], dict[str, str], dict[str, str]]:
    """Those whose results equal the reference on the first operands, and why others are wrong or did not run."""
    right, wrong, failed = {}, dict[str, str](), dict[str, str]()
    limit = measure.tolerance(dtype, group.size)

    def error(found: Sequence[torch_ways.Way]) -> float:
        worst = 0.0
        for way, wanted in zip(found, expected, strict=False):
            way.call()
            worst = max(worst, measure.difference(way.result(), wanted))
        return worst

    for name, found in made.items():
        got = measure.attempt(functools.partial(error, found), group)
        if isinstance(got, str):
            failed[name] = got
        elif (most := measure.worst([float(got)], group)) > limit:
            wrong[name] = f"off by {most:.2g} of the largest value, allowed is {limit:.2g}"
        else:
            right[name] = found
    return right, wrong, failed


class InTurn:
    """Calls the next of several each time."""

    def __init__(self, calls: Sequence[measure.Call]) -> None:
        self.calls, self.number = calls, 0

    def __call__(self) -> None:
        self.number += 1
        self.calls[self.number % len(self.calls)]()


def measure_row(row: Row, setup: Setup, dtype: str) -> dict[str, Any]:
    """The record of one row.  Collective."""
    graph = setup.group.device.type == "cuda" and row.M <= table.LAUNCHED
    group = setup.captured if graph else setup.group
    problem = Problem(row.op, row.M, row.N, row.K, table.DTYPES[dtype], group.size)
    setup.seed += 10
    operands = [Operands.random(problem, group, setup.seed + number) for number in range(_sets(problem, group))]
    can, refused = tune.able(problem, group.device)
    choice = chosen_by_table(row, problem, setup)
    own = own_ways(problem, setup, can, choice)
    expected = [one.expected() for one in operands[:2]]
    right, wrong = tune.verify(own, group, operands[:2], expected)
    theirs, missing = ways(row, setup, operands)
    theirs, unlike, failed = check(theirs, [out for out, _ in expected], problem.dtype, group)
    missing |= failed
    del expected
    timed = [given.without_rows() for given in operands]
    calls: dict[str, measure.Call] = {"gemm": InTurn([_product(given, group) for given in operands])}
    calls |= {name: InTurn([way.call for way in found]) for name, found in theirs.items()}
    calls |= {f"own {label}": tune.Turns(timed, own[label]) for label in right}
    batch: dict[str, int] = {}
    if graph:
        calls.pop("serial zero-cta", None)  # copy engines by the host's command, for large messages
        calls, batch, uncaught = in_graphs(calls, group)
        wrong |= {name[4:]: why for name, why in uncaught.items() if name not in calls}
        missing |= {f"{name} in a graph": why for name, why in uncaught.items() if name in calls}
    samples, hosts = measure.interleaved(calls, group, _rounds(setup, calls, group), batch)
    samples, options = best_variants(samples, own)
    even = {name[4:]: statistics.median(v[::2]) for name, v in samples.items() if name.startswith("own ")}
    chosen, source = (choice.name, choice.source) if choice is not None else (tune.quickest(even, row.op), "picked")
    if f"own {tune.PLAIN}" not in samples or f"own {chosen}" not in samples:
        raise RuntimeError(f"{chosen}, or plain, did not run ({wrong})")
    if row.kind != "held-out":
        setup.entries.append(_entry(problem, samples, options, wrong))
    wire = wire_bytes(row.op, row.M, row.N, row.K, problem.dtype.itemsize, group.size) / setup.rate
    return {
        "key": row.key, "op": row.op, "M": row.M, "N": row.N, "K": row.K, "dtype": dtype, "world": group.size,
        "kind": row.kind, "names": list(row.names), "graph": graph, "wire": round(1e6 * wire, 3),
        "samples": {name: [round(1e6 * value, 3) for value in values] for name, values in samples.items()},
        "hosts": {name: round(1e6 * value, 1) for name, value in hosts.items()},
        "options": options, "wrong": {**wrong, **unlike}, "refused": refused, "missing": missing, "chosen": chosen,
        "source": source, "rate": setup.rate, "table": setup.found.digest,
    }  # fmt: skip


def chosen_by_table(row: Row, problem: Problem, setup: Setup) -> tune.Choice | None:
    """What the table says; None for a class that it lacks, but will have."""
    if row.kind == "held-out":  # its neighbours may be of this very run
        return tune.choose_from(setup.found.joined(setup.entries), problem, setup.group.device)
    if setup.found.find(problem) is None:
        return None
    return tune.choose_from(setup.found, problem, setup.group.device)


def own_ways(
    problem: Problem, setup: Setup, can: dict[str, Candidate], choice: tune.Choice | None
) -> dict[str, Candidate]:
    """Every candidate with the options that the table has for it, and, as "NAME #1", with other numbers of chunks; with
    --search all other options."""
    entry = setup.found.find(problem)
    found = {
        name: replace(way, options=entry.options_of(name)) if entry is not None else way for name, way in can.items()
    }
    if choice is not None:
        found[choice.name] = replace(can[choice.name], options=choice.options)
    for name, way in list(found.items()):
        others = tune.variants(way, setup.group.device) if setup.search else tune.cuts(way, problem)
        others = [other for other in others if other.options != way.options and name != tune.PLAIN]
        found |= {f"{name} #{number}": other for number, other in enumerate(others, 1)}
    return found


def in_graphs(
    calls: dict[str, measure.Call], group: Group
) -> tuple[dict[str, measure.Call], dict[str, int], dict[str, str]]:
    """Calls as graphs, how many each graph holds, and why some cannot be: own ones are dropped, others stay as is."""
    made: dict[str, measure.Call] = {}
    batch, uncaught = {}, {}
    for name, call in calls.items():
        graph = measure.captured(call, group)
        if not isinstance(graph, str):
            made[name], batch[name] = graph, measure.IN_GRAPH
            continue
        uncaught[name] = graph
        if not name.startswith("own ") or name == f"own {tune.PLAIN}":
            made[name] = call
    return made, batch, uncaught


def best_variants(
    samples: dict[str, list[float]], own: dict[str, Candidate]
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """One column for each candidate, its quickest, and the options that it had."""
    kept = {name: values for name, values in samples.items() if not name.startswith("own ")}
    best = tune.quickest_variants({name[4:]: v for name, v in samples.items() if name.startswith("own ")}, own)
    kept |= {f"own {name}": samples[f"own {label}"] for name, label in sorted(best.items())}
    options = {name: given for name, label in best.items() if (given := table.options_to(own[label].options))}
    return kept, options


def _entry(
    problem: Problem, samples: dict[str, list[float]], options: dict[str, dict[str, Any]], wrong: dict[str, str]
) -> Entry:
    own = {name[4:]: statistics.median(values) for name, values in samples.items() if name.startswith("own ")}
    seconds = {name: float(f"{value:.4g}") for name, value in own.items()}
    shape = (problem.M, problem.N, problem.K)
    made = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
    return Entry(problem.op, table.NAMES[problem.dtype], problem.world, *shape, seconds, options, dict(wrong), made)


def _product(given: Operands, group: Group) -> Callable[[], object]:
    """cuBLAS alone, unsplit, on all rows."""
    M = given.problem.M
    whole = start_gather(given.x, group, M).wait() if given.problem.op == "all_gather_matmul" else given.x
    out = given.out if len(given.out) == M else given.out.new_empty(M, given.problem.N)
    return lambda: torch.mm(whole, given.weight.t(), out=out)


def _sets(problem: Problem, group: Group) -> int:
    """How many operands take turns, so that no cache holds the weights of all."""
    if group.device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(group.device).L2_cache_size
    return min(4, max(2, math.ceil(2 * cache / (problem.N * problem.K * problem.dtype.itemsize))))


def _rounds(setup: Setup, calls: dict[str, measure.Call], group: Group) -> int:
    """As asked, fewer for long calls; even, so that both halves are alike."""
    one = measure.worst([measure.sample(calls["gemm"], 1, group).device], group)
    fits = int(LONG / max(one * len(calls), 1e-9))
    return 2 * max((FEWEST + 1) // 2, min(setup.rounds, fits) // 2) if setup.rounds > FEWEST else setup.rounds


# --- all rows --------------------------------------------------------------------------------------------------------


def rank_main(world: World, **given: Any) -> dict[str, Any]:
    """What each rank does; rank 0 keeps the records."""
    began = time.monotonic()
    every = shapes.smoke() if given["smoke"] else shapes.rows(world.size)
    todo = shapes.selected(every, given["rows"], given["only"])
    setup = set_up(world, given)
    book = Book(Path(given["out"]), given) if world.rank == 0 else None
    if world.rank == 0:
        print(f"copies between ranks: {setup.rate / 2**30:.1f} GiB/s; table {setup.found.digest}; not here: "
              f"{setup.missing or 'nothing'}", flush=True)  # fmt: skip
    try:
        done = _rows(world, setup, todo, given, book, began)
    finally:
        if book is not None:
            book.close(setup, todo)
    return {"done": done, "left": len(todo) - done}


def _rows(
    world: World, setup: Setup, todo: Sequence[tuple[int, Row]], given: dict[str, Any], book: Book | None, began: float
) -> int:
    """Measures until the budget ends; how many."""
    longest, done, failed = 0.0, 0, 0
    for number, row in todo:
        left = given["budget"] - (time.monotonic() - began) - 1.5 * longest if given["budget"] else math.inf
        if measure.everyone(left, setup.group)[0] < 0:  # type: ignore[operator]
            break
        start = time.monotonic()
        world.status(operation=row.key)
        dtype = "fp32" if given["smoke"] else given["dtype"]
        record = measure.attempt(functools.partial(_told, row, setup, dtype), setup.group)
        took = time.monotonic() - start
        longest, done = max(0.7 * longest, took), done + 1
        failed = failed + 1 if isinstance(record, str) else 0
        if book is not None:
            book.add(number, row, record, took)
        if failed == GIVE_UP:
            break
    return done


def _told(row: Row, setup: Setup, dtype: str) -> dict[str, Any]:
    """`measure_row`, which says where it failed: a row that fails on all ranks alike is left out, the next goes on."""
    try:
        return measure_row(row, setup, dtype)
    except Exception:
        traceback.print_exc()
        raise


class Book:
    """The records of all runs, in a file that is whole at every moment, and the lines that rank 0 prints."""

    def __init__(self, path: Path, given: dict[str, Any]) -> None:
        self.path, self.given = path, given
        self.records = read(path)
        self.numbers: set[int] = set()
        self.mark = {
            "machine": given["machine"], "versions": given["versions"], "commit": given["commit"],
            "date": str(datetime.date.today()),
        }  # fmt: skip

    def add(self, number: int, row: Row, record: dict[str, Any] | str, took: float) -> None:
        if isinstance(record, str):
            print(f"{number:4d} {row.key} [{row.kind}] FAILED: {record} ({took:.1f} s)", flush=True)
            return
        record |= self.mark
        self.numbers.add(number)
        self.records[f"{record['key']} {record['dtype']} {record['world']}"] = record
        made = targets.Figures.of(record)
        own = sorted((us, name[4:]) for name, us in made.medians.items() if name.startswith("own "))
        others = [f"{name} {us:.1f}" for name, us in made.medians.items() if not name.startswith("own ")]
        print(
            f"{number:4d} {row.key} [{row.kind}] wire {made.wire:.1f}  {'  '.join(others)} | "
            f"{'  '.join(f'{name} {us:.1f}' for us, name in own)} | {record['chosen']} ({record['source']}) "
            f"E {made.hidden:.3f} ({took:.1f} s)" + (f"  WRONG {record['wrong']}" if record["wrong"] else ""),
            flush=True,
        )
        self.save()

    def save(self) -> None:
        lines = [f"{json.dumps(key)}: {json.dumps(record)}" for key, record in sorted(self.records.items())]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        new = self.path.with_suffix(".tmp")
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.path)

    def close(self, setup: Setup, todo: Sequence[tuple[int, Row]]) -> None:
        left = [number for number, _ in todo if number not in self.numbers]
        if self.given["table"] and setup.entries:
            path = Path(self.given["table"])
            whole = table.store(path, setup.found.device, setup.entries)
            print(f"wrote {path}: {len(whole.entries)} shapes, digest {whole.digest}")
        print("\n".join(show(self.path)))
        if left:
            print(f"left: {len(left)} rows, {spans(left)}; go on with --rows {left[0]}:")
        sys.stdout.flush()


def read(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def show(path: Path) -> Iterator[str]:
    """Writes FILE.md, and gives its head: the targets."""
    lines = list(targets.report(list(read(path).values())))
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    yield from (line for line in lines if line.startswith(("- ", "  - ")))
    yield f"wrote {path} and {path.with_suffix('.md')}"


def spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0:3 5:6"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return " ".join(f"{first}:{last}" for first, last in found)


def commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=":")
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds, the start of the ranks aside; 0 = no end")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", default="bf16", choices=tuple(table.DTYPES))
    parser.add_argument("--nproc", type=int, default=0)
    parser.add_argument("--table", default="")
    parser.add_argument("--out", default="fused_matmul.json")
    parser.add_argument("--report", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--search", action="store_true", help="other chunks and tiles too; compiles for long")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if given.report:
        print("\n".join(show(Path(given.report))))
        return
    if given.list:
        for number, row in shapes.selected(shapes.rows(given.nproc or max(2, tune.num_gpus())), given.rows, given.only):
            print(f"{number:4d} {row.key} [{row.kind}] {'; '.join(row.names)}")
        return
    gpus = tune.num_gpus()
    device = "cuda" if gpus > 1 and not given.smoke else "cpu"
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in NO_MULTICAST:
        os.environ.setdefault(name, "1" if name.startswith("TORCH") else "0")
    ranks = given.nproc or (gpus if device == "cuda" else 2)
    argument = {key: getattr(given, key) for key in (*KEYS, "table", "out", "search", "smoke")}
    argument |= {
        "machine": f"{ranks} x {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}",
        "versions": f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
        + (f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device == "cuda" else ""),
        "commit": commit(),
    }
    launch.run_local("fused_matmul:rank_main", ranks, argument, device=device, timeout=300.0)


if __name__ == "__main__":
    main()
