"""Every example over symmetric memory and every fused launch under the checker, a thousand schedules at 2, 3, 4 ranks.

    python benchmarks/schedules_explored.py --out FILE [--processes N] [--seconds S] [--only "gather *,example *"]
    python benchmarks/schedules_explored.py --out FILE --table

Work is cut into pieces: a launch, a number of ranks and a range of seeds.  A piece that has ended is a line of FILE,
and another call goes on with the seeds that no line has, so what was stopped loses nothing.  Lines that other sources
made (checker, symmetric memory, kernels, launches) do not count; the table is of the sources of the last line.

Launches as they are come first; then those as a graph, enqueued again with calls counted in memory, and those whose
sizes or cuts change from call to call.  A way for two ranks is explored at two.  No GPU is used.  It ends with 1 if
something was reported or a worker died.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, LAUNCHES = ROOT / "examples" / "symmetric", ROOT / "tests" / "check"
PEERS = ROOT / ".peers"  # packages that a machine lacks
RANKS = (2, 3, 4)
GRACE = 30.0  # seconds after the end for the schedules that have begun
PIECES = 40  # after which a worker makes room for a new one: over many launches they grow, to 12 GB in 45 minutes
PERIOD = 10.0  # seconds between lines of progress
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")},
}


# --- what is explored ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """make: the launch, in a worker.  later: after the rows that are not.  halves: of each tile travel on their own."""

    make: Callable[[], Any]
    ranks: tuple[int, ...] = RANKS
    replays: int = 0
    later: bool = False
    halves: bool = False


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.launch


def gather(name: str, **how: Any) -> Any:
    return importlib.import_module("gather_launches").launch(name, **how)


def scatter(op: str, name: str, halves: bool = False, **how: Any) -> Any:
    launches = importlib.import_module("scatter_launches")
    return launches.launch(op, name, **how, **({"tile": launches.HALVES} if halves else {}))


def exchange(name: str) -> Any:
    return getattr(importlib.import_module("exchange_launches"), name)


def rows() -> dict[str, Row]:
    of = functools.partial
    made = {f"example {path.stem}": Row(of(example, path.stem)) for path in sorted(EXAMPLES.glob("*.py"))}
    for name in ("chunks", "chained", "persistent", "put", "push"):
        made[f"gather {name}"] = Row(of(gather, name, count=5, chunks=2, keep=True))
        graph = of(gather, name, count=3, calls=1, in_memory=True)
        made[f"gather {name}: as a graph"] = Row(graph, replays=2, later=True)
        made[f"gather {name}: cuts change"] = Row(of(gather, name, count=5, chunks=(3, 1, 2)), later=True)
    sizes = ((33, 40), (2, 16), (5, 40), (1, 8))
    ways = {"scatter": ("put", "tiles", "push"), "reduce": ("put", "one-shot", "two-shot")}
    for op, name in ((op, name) for op, names in ways.items() for name in names):
        way = of(scatter, "matmul_reduce_scatter" if op == "scatter" else "matmul_all_reduce", name)
        made[f"{op} {name}"] = Row(way)
        made[f"{op} {name}: as a graph"] = Row(way, replays=1, later=True)
        made[f"{op} {name}: sizes change"] = Row(of(way, halves=True, sizes=sizes), later=True, halves=True)
    sizes = ((21, 24), (3, 8), (1, 40), (21, 24))
    for name, ranks in (("chunks", RANKS), ("chained", (2,)), ("persistent", RANKS)):
        way = of(scatter, "matmul_reduce_scatter", name, sizes=sizes)
        made[f"scatter {name}"] = Row(way, ranks)
        made[f"scatter {name}: as a graph"] = Row(of(way, in_memory=True), ranks, replays=1, later=True)
    made["experts both ways"] = Row(of(exchange, "forward_and_backward"))
    made["experts again, with room"] = Row(of(exchange, "goes_again"))
    made["experts rows alone"] = Row(of(exchange, "rows_alone"))
    made["experts rows alone: as a graph"] = Row(of(exchange, "rows_alone"), replays=1, later=True)
    return made


def sources() -> str:
    """A word that changes with what is explored and with what explores it."""
    parts = [ROOT / "src" / "interlace" / name for name in ("check", "collectives", "kernels", "symmetric")]
    files = [path for part in parts for path in part.rglob("*.py")]
    files += [*EXAMPLES.glob("*.py"), *LAUNCHES.glob("*_launches.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:12]


# --- pieces ----------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    launch: str
    ranks: int


class Piece(NamedTuple):
    """Seeds first to stop - 1."""

    cell: Cell
    first: int
    stop: int


Line = dict[str, Any]


def explore_piece(piece: Piece, row: Row, seconds: float = 1e9) -> Line:
    """What one call of `explore` over all seeds finds in these; in fewer of them where the seconds end."""
    import torch
    import triton

    from interlace.check import explore
    from interlace.kernels import ordered_tiles

    (launch, ranks), count = piece.cell, piece.stop - piece.first
    with contextlib.ExitStack() as settings:
        if row.halves:
            tile = importlib.import_module("scatter_launches").HALVES
            settings.callback(setattr, ordered_tiles, "LARGE", ordered_tiles.LARGE)
            ordered_tiles.LARGE = tile.block_m * tile.block_n
        verdict = explore(
            row.make(), ranks=ranks, schedules=count, seed=piece.first, replays=row.replays, most=count,
            seconds=seconds, residency=False, name=launch,
        )  # fmt: skip
    return {
        "launch": launch,
        "ranks": ranks,
        "first": piece.first,
        "schedules": verdict.schedules,
        "events": verdict.events,
        "seconds": round(verdict.seconds, 3),
        "reports": [str(report) for report in verdict.reports],
        "with": f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}",
    }


def left(cells: Iterable[Cell], lines: list[Line], schedules: int, size: int) -> list[Piece]:
    """Seeds that no line has, in ranges that end at multiples of `size`."""
    missing = {cell: set(range(schedules)) for cell in cells}
    for line in lines:
        seeds = range(line["first"], line["first"] + line["schedules"])
        missing.get(Cell(line["launch"], line["ranks"]), set()).difference_update(seeds)
    made: list[Piece] = []
    for cell, seeds in missing.items():
        for seed in sorted(seeds):
            if made and made[-1].cell == cell and made[-1].stop == seed and seed % size:
                made[-1] = made[-1]._replace(stop=seed + 1)
            else:
                made.append(Piece(cell, seed, seed + 1))
    return made


def read(out: Path) -> list[Line]:
    """All lines but one that was cut off."""
    found = []
    for text in out.read_text().splitlines() if out.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return found


# --- workers ---------------------------------------------------------------------------------------------------------


def work(given: Connection) -> None:
    """A worker: takes a piece and when to stop, gives back its line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    known = rows()
    with contextlib.suppress(EOFError, OSError):  # the parent has gone
        while True:
            piece, ends = given.recv()
            try:
                given.send(explore_piece(piece, known[piece.cell.launch], ends - time.time()))
            except Exception:
                given.send(traceback.format_exc())


@dataclass
class Run:
    """One call: hands out pieces until none is left or the time is over."""

    out: Path
    waiting: list[Piece]
    ends: float  # by time.time
    processes: int
    size: int
    lines: list[Line]
    rows: dict[str, Row] = field(default_factory=rows)
    sources: str = field(default_factory=sources)
    spent: dict[Cell, list[float]] = field(default_factory=dict)  # schedules and their seconds of processor time
    workers: dict[Connection, tuple[Any, Piece | None]] = field(default_factory=dict)
    done: Counter[Connection] = field(default_factory=Counter)  # pieces of each worker
    failed: set[Cell] = field(default_factory=set)
    reports: int = 0

    def __post_init__(self) -> None:
        for line in self.lines:
            self.note(line)
        self.asked = sum(piece.stop - piece.first for piece in self.waiting)

    def note(self, line: Line) -> None:
        spent = self.spent.setdefault(Cell(line["launch"], line["ranks"]), [0, 0.0])
        spent[0] += line["schedules"]
        spent[1] += line["seconds"]

    def each(self, cell: Cell) -> float:
        """Seconds of a schedule: as measured so far, else the mean of what is."""
        of = [self.spent[cell]] if cell in self.spent else list(self.spent.values())
        return sum(spent[1] for spent in of) / max(1.0, sum(spent[0] for spent in of))

    def next(self) -> Piece | None:
        """All cells advance together, the dear ones first, so that the last pieces are short."""
        able = [piece for piece in self.waiting if piece.cell not in self.failed]
        if not able or time.time() >= self.ends:
            return None

        def order(piece: Piece) -> tuple[bool, int, float]:
            return self.rows[piece.cell.launch].later, piece.first // self.size, -self.each(piece.cell)

        taken = min(able, key=order)
        self.waiting.remove(taken)
        return taken

    def run(self) -> None:
        os.environ.update(ENVIRONMENT)
        self.started = told = time.time()
        try:
            for _ in range(min(self.processes, len(self.waiting))):
                self.hire()
            while busy := [given for given, (_, piece) in self.workers.items() if piece is not None]:
                if time.time() > self.ends + GRACE:
                    break
                for given in wait(busy, timeout=1.0):
                    self.hear(given)  # type: ignore[arg-type]
                if time.time() > told + PERIOD:
                    told = time.time()
                    self.tell()
        finally:
            for process, piece in self.workers.values():
                if piece is not None:
                    self.waiting.append(piece)
                process.kill()
            self.workers.clear()
            self.tell()

    def hire(self) -> None:
        if (piece := self.next()) is None:
            return
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        mine.send((piece, self.ends))
        self.workers[mine] = process, piece

    def hear(self, given: Connection) -> None:
        process, piece = self.workers[given]
        assert piece is not None
        try:
            line = given.recv()
        except (EOFError, OSError):
            del self.workers[given]
            process.join()
            self.lose(piece, f"the worker died, exit code {process.exitcode}")
            self.hire()
            return
        if isinstance(line, str):
            self.lose(piece, line)
        elif line["schedules"]:
            self.keep(line)
            if (first := piece.first + line["schedules"]) < piece.stop:
                self.waiting.append(piece._replace(first=first))
        else:
            self.waiting.append(piece)
        self.done[given] += 1
        if self.done[given] >= PIECES:
            del self.workers[given]
            given.close()
            process.join()
            self.hire()
            return
        piece = self.next()
        if piece is not None:
            given.send((piece, self.ends))
        self.workers[given] = process, piece

    def keep(self, line: Line) -> None:
        with self.out.open("a") as out:
            out.write(json.dumps({**line, "sources": self.sources}) + "\n")
        self.note(line)
        self.reports += len(line["reports"])
        for report in line["reports"]:
            print(f"{line['launch']}, {line['ranks']} ranks: {report}", file=sys.stderr, flush=True)

    def lose(self, piece: Piece, why: str) -> None:
        """Its cell is not tried again in this call."""
        self.failed.add(piece.cell)
        self.waiting.append(piece)
        launch, ranks = piece.cell
        print(f"{launch}, {ranks} ranks, seeds {piece.first} to {piece.stop - 1}: {why}", file=sys.stderr, flush=True)

    def tell(self) -> None:
        running = [piece for _, piece in self.workers.values() if piece is not None]
        unfinished = [*self.waiting, *running]
        remain = sum(piece.stop - piece.first for piece in unfinished)
        cost = sum((piece.stop - piece.first) * self.each(piece.cell) for piece in unfinished)
        passed = time.time() - self.started
        print(
            f"{passed:.0f} s: {self.asked - remain:,} of {self.asked:,} schedules, {self.reports} reports; left are "
            f"about {cost:,.0f} s of processor time, {cost / self.processes:,.0f} s with {self.processes} processes",
            file=sys.stderr,
            flush=True,
        )


# --- the table -------------------------------------------------------------------------------------------------------


def table(lines: list[Line], known: dict[str, Row]) -> str:
    """A row a launch, a column a number of ranks."""
    of = lines[-1]["sources"]
    lines = [line for line in lines if line["sources"] == of]
    cells: dict[Cell, list[int]] = {}
    for line in lines:
        counts = cells.setdefault(Cell(line["launch"], line["ranks"]), [0, 0, 0])
        for at, count in enumerate((line["schedules"], line["events"], len(line["reports"]))):
            counts[at] += count
    ranks = sorted({cell.ranks for cell in cells})
    launches = sorted({cell.launch for cell in cells}, key=[*known].index)
    made = [f"| schedules / memory events / reports | {' | '.join(f'{size} ranks' for size in ranks)} |"]
    made.append("|---" * (1 + len(ranks)) + "|")
    for launch in launches:
        counts = [cells.get(Cell(launch, size)) for size in ranks]
        texts = ["" if each is None else "{:,} / {:,} / {}".format(*each) for each in counts]
        made.append(f"| {launch} | {' | '.join(texts)} |")
    schedules, events, reports = (sum(column) for column in zip(*cells.values(), strict=True))
    seconds = sum(line["seconds"] for line in lines)
    versions = "; ".join(sorted({line["with"] for line in lines}))
    return (
        f"{schedules:,} schedules, {events:,} memory events, {reports} reports; {seconds:,.0f} s of processor time. "
        f"{versions}; sources {of}.\n\n" + "\n".join(made)
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--seconds", type=float, default=1e9, metavar="S", help="after which no schedule begins")
    parser.add_argument("--schedules", type=int, default=1000, help="of each launch on each number of ranks")
    parser.add_argument("--piece", type=int, default=25, help="seeds of a piece")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--only", default="*", help="patterns of launches, with commas; see --list")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def main() -> None:
    given, known, lines = options(), rows(), []
    chosen = [name for name in known if any(fnmatch.fnmatchcase(name, each) for each in given.only.split(","))]
    if not chosen:
        sys.exit(f'no launch is called "{given.only}"; there are {", ".join(known)}')
    if given.list:
        sys.exit("\n".join(chosen))
    lines = read(given.out)
    if given.table:
        print(table(lines, known) if lines else f"{given.out} has no lines")
        return
    sys.path[:] = [str(ROOT / "src"), str(LAUNCHES), *sys.path, str(PEERS)]  # workers get the same
    for package in ("torch", "triton", "greenlet"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{package} is not installed; pip install --no-deps --target {PEERS} {package}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = [int(size) for size in given.ranks.split(",")]
    now = sources()
    if others := sum(line["sources"] != now for line in lines):
        print(f"{others} lines of {given.out} are of other sources and do not count", file=sys.stderr)
    lines = [line for line in lines if line["sources"] == now]
    cells = [Cell(name, size) for name in chosen for size in sizes if size in known[name].ranks]
    waiting = left(cells, lines, given.schedules, given.piece)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if given.out.exists() and not given.out.read_bytes().endswith(b"\n"):  # a line was cut off
        given.out.write_text(given.out.read_text() + "\n")
    run = Run(given.out, waiting, time.time() + given.seconds, given.processes, given.piece, lines)
    run.run()
    sys.exit(1 if run.reports or run.failed else 0)


if __name__ == "__main__":
    main()
