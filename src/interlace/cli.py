"""The command line: parses, checks before any process starts, and says failures in one sentence.

    interlace train [RUN.toml] [--parallel "dp=4 zero=3"] [--set train.steps=50 ...] [--resume auto|DIR]
    interlace verify [RUN.toml] --parallel "dp=4 zero=3" [--steps N] [--exact]
    interlace verify [RUN.toml] --sweep N [--seed S]
    interlace data [RUN.toml] --steps A:B
    interlace export RUN FOLDER
    interlace generate RUN --prompt "..."
    interlace report RUN | TRACE.json[.gz] ... [--against OTHER] [--steps A:B]
    interlace check MODULE.py:LAUNCH [--ranks 2,3,4] [--schedules 1000]
    interlace tune M N K [--op all_gather_matmul] [--dtype bf16] [--nproc 2] [--table FILE]

Everything heavy is imported inside a command.  Exit codes are those of `interlace.errors`.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from interlace import errors

if TYPE_CHECKING:
    from interlace.config import Config
    from interlace.report.ledger import Ledger
    from interlace.report.table import Table
    from interlace.world import Place

MOST_STEPS = 1 << 40
AXES = ("dp", "shard", "tp", "cp", "pp")  # the axes that can be executed

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Trains a transformer split over ranks, shows where the time goes, and proves that the split is right.",
)

RunFile = Annotated[str, typer.Argument(metavar="[RUN.toml]", help="The run file; a preset when left out.")]
Parallel = Annotated[str, typer.Option("--parallel", "-p", metavar="PLAN", help='For example "dp=4 zero=3".')]
Set = Annotated[list[str], typer.Option("--set", "-s", metavar="KEY=VALUE", help="For example train.steps=50.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where ranks compute.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


@app.command()
def train(
    run: RunFile = "",
    parallel: Parallel = "",
    set_: Set = [],  # noqa: B006 - typer copies it
    resume: Annotated[
        str, typer.Option(metavar="auto|DIR", help="Go on from the newest checkpoint of the run, or of a folder.")
    ] = "",
    device: Device = "auto",
    port: Annotated[int, typer.Option(help="Loopback port where local ranks meet; 0 = none is needed.")] = 0,
    debug: Debug = False,
) -> None:
    """Train: starts local ranks, or joins those of torchrun or SLURM."""

    def work() -> None:
        from interlace import launch
        from interlace.config import load
        from interlace.world import find_place

        place = find_place()
        with _said_once(place):
            cfg = _at_home(load(run or None, set_, parallel or None, place.size if place else None))
            where = _device(device, cfg.plan.world, place)
            _check(cfg, where, place)
            unnamed = place is None and not _names_folder(run, set_)
            if unnamed and resume == "auto":
                cfg = _newest(cfg)
            if unnamed and not resume:
                cfg = _claimed(cfg)
            else:
                _check_folder(cfg, resume)
        argument = {"config": cfg.to_toml(), "resume": resume}
        with _error_file(cfg, enabled=place is None or place.rank == 0):
            if place is not None:
                _join(cfg, where, argument)
            else:
                world, timeout = cfg.plan.world, cfg.run.timeout
                with _told_how_to_go_on(cfg):
                    launch.run_local(
                        "interlace.train.loop:run", world, argument, device=where, timeout=timeout, port=port or None
                    )

    _guarded(work, debug)


@app.command()
def verify(
    run: RunFile = "",
    parallel: Parallel = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare; at least 2 are made.")] = 3,
    exact: Annotated[bool, typer.Option("--exact", help='The same bits, as run.reproducible = "plan" gives.')] = False,
    sweep: Annotated[int, typer.Option(min=0, metavar="N", help="N plans of up to 8 ranks, drawn at random.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Which plans --sweep draws.")] = 0,
    set_: Set = [],  # noqa: B006
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Prove that a plan gives the numbers of one process, and that its work is really split."""

    def work() -> None:
        from interlace.config import load
        from interlace.train import verify as proof

        if sweep and (parallel or exact):
            other = "--parallel" if parallel else "--exact"
            raise errors.ConfigError(f"--sweep draws its own plans and compares numbers; leave {other} out.")
        cfg = load(run or None, set_, parallel or None, preset="tiny")
        if sweep:
            return _sweep(proof.checked(cfg), sweep, seed, max(steps, 2), device)
        cfg = proof.fixed(cfg) if exact else proof.checked(cfg)
        where = _device(device, cfg.plan.world)
        _check(cfg, where)
        report: proof.Exact | proof.Report
        if exact:
            report = proof.exact(cfg, max(steps, 2), where)
            text = proof.exact_lines(report)
        else:
            report = proof.verify(cfg, max(steps, 2), where)
            text = proof.lines(report)
        with contextlib.suppress(BrokenPipeError):  # whoever stops reading still gets the verdict
            for line in text:
                print(line)
            sys.stdout.flush()
        if not report.passed:
            _quiet_stdout()
            raise typer.Exit(errors.NumericsError.exit_code)

    _guarded(work, debug)


def _sweep(cfg: Config, count: int, seed: int, steps: int, device: str) -> None:
    from interlace.plan import fit
    from interlace.train import verify as proof

    plans = fit.random_plans(cfg, count, seed, available_axes=AXES)
    for plan in plans:
        _check(replace(cfg, plan=plan), device)
    wrong = 0
    for report in proof.sweep(cfg, plans, steps, device):
        wrong += not report.passed
        print(proof.verdict(report), flush=True)
    print(f"verify: {len(plans) - wrong} of {len(plans)} plans drawn with --seed {seed} equal one process")
    if wrong:
        raise typer.Exit(errors.NumericsError.exit_code)


@app.command()
def data(
    run: RunFile = "",
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B-1, from 0.")] = "0:1",
    parallel: Parallel = "",
    set_: Set = [],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Print what the model sees, one JSON line a sequence: the same for every plan."""

    def work() -> None:
        from interlace.config import load
        from interlace.train.data import Dataset, rows

        cfg = load(run or None, set_, parallel or None)
        wanted = _range(steps)
        dataset = Dataset.open(cfg.data, cfg.model_config().vocab_size, cfg.run.seed)
        print("\n".join([dataset.describe(cfg.train.global_batch), *dataset.skipped]), file=sys.stderr)
        for row in rows(dataset, wanted, cfg.train.global_batch):
            print(json.dumps(row))

    _guarded(work, debug)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="FOLDER", help="The Hugging Face folder to write.")],
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16", help="How weights are stored.")] = "fp32",
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder: config.json and safetensors."""

    def work() -> None:
        from interlace.train.export import export as write

        write(run, destination, dtype)
        print(f"wrote {destination}")

    _guarded(work, debug)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the k likeliest; 0 = among all.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Let a trained model write, on one process."""

    def work() -> None:
        from interlace.serve.generate import load, sample_text

        model, words, cfg = load(run, _device(device, 1))
        sys.stdout.write(prompt)
        for piece in sample_text(
            model,
            words,
            prompt,
            tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            context=cfg.data.sequence_length,
        ):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")

    _guarded(work, debug)


@app.command()
def report(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="RUN | TRACE.json[.gz] ...", help="A run folder, events, or traces, one a rank."),
    ],
    against: Annotated[str, typer.Option(metavar="OTHER", help="Another run, trace or simulated events.")] = "",
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B-1 by their own numbers.")] = "",
    out: Annotated[str, typer.Option(metavar="FILE.html", help="The picture; report.html when left out.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds, instead of a table.")] = False,
    chrome: Annotated[str, typer.Option(metavar="FILE.json", help="Write a trace that Perfetto opens.")] = "",
    debug: Debug = False,
) -> None:
    """Say where the time of a step went, rank by rank, and draw it: of a run, or of any program's profiler traces."""

    def work() -> None:
        from interlace.events import write_chrome
        from interlace.report import table as tables
        from interlace.report.ledger import median
        from interlace.report.page import page
        from interlace.report.source import Source
        from interlace.report.timeline import Scene

        source = Source.open(paths)
        everything = source.ledgers(_range(steps) if steps else None)
        chosen = median(everything)
        notes = list(source.notes)
        title = _titled(source.name, everything, chosen)
        scenes = [Scene.of(title, source.events, chosen, source.memory)]
        found: dict[str, Any] = {"source": source.name} | tables.to_json(chosen, everything)
        if against:
            other = Source.open([against])
            others = other.ledgers()
            compared = median(others)
            scenes.insert(0, Scene.of(_titled(other.name, others, compared), other.events, compared, other.memory))
            notes += [f"{other.name}: {note}" for note in other.notes]
            found["against"] = {"source": other.name} | tables.to_json(compared, others)
            found["differences"] = tables.differences_json(chosen, compared)
        place = Path(out or (Path(paths[0]) if (Path(paths[0]) / "events.jsonl").exists() else Path()) / "report.html")
        _write(place, page(title, source.summary, scenes, everything, notes))
        if chrome:
            with _writing(Path(chrome)):
                write_chrome(chrome, sorted(source.events, key=lambda event: event.begin))
        if as_json:
            print(json.dumps(found | {"notes": notes}, indent=1))
        else:
            _print_report(title, source.summary, chosen, everything, notes)
            if against:
                print(f"against {scenes[0].title}")
                _print_table(tables.differences(chosen, compared))
        print(f"wrote {place}" + (f" and {chrome}" if chrome else ""), file=sys.stderr)

    _guarded(work, debug)


@app.command()
def check(
    target: Annotated[str, typer.Argument(metavar="MODULE.py:LAUNCH", help="A file, and a function launch(heap).")],
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Numbers of ranks to try.")] = "2,3,4",
    schedules: Annotated[int, typer.Option(min=1, help="Orders of execution to try for each.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the first schedule; a report names its own.")] = 0,
    resident: Annotated[int, typer.Option(min=0, help="Programs of a rank that run at once; 0 = all.")] = 0,
    replays: Annotated[int, typer.Option(min=0, help="Repeat what was launched with the same scalars.")] = 0,
    stop: Annotated[bool, typer.Option("--stop", help="One rank stops at some event; every wait must end.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="All orders of 2 ranks with at most two preemptions.")
    ] = False,
    loose: Annotated[
        bool, typer.Option("--loose", help="Take a release as covering the whole program without a barrier.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Find races, deadlocks and lost signals in a multi-GPU Triton kernel, without a GPU."""

    def work() -> None:
        from interlace import check as checker

        launch, name = checker.load(target)
        if exhaustive:
            verdict = checker.explore_all(launch, most_schedules=schedules, barriers=not loose)
        else:
            verdict = checker.explore(
                launch,
                ranks=checker.numbers(ranks),
                schedules=schedules,
                seed=seed,
                resident=resident or None,
                replays=replays,
                stop=stop,
                barriers=not loose,
                name=name,
            )
        with contextlib.suppress(BrokenPipeError):
            print(verdict)
            sys.stdout.flush()
        if not verdict.ok:
            _quiet_stdout()
            raise typer.Exit(errors.NumericsError.exit_code)

    _guarded(work, debug)


@app.command()
def tune(
    rows: Annotated[int, typer.Argument(metavar="M", min=1, help="Rows of the whole product, of all ranks together.")],
    columns: Annotated[int, typer.Argument(metavar="N", min=1, help="Columns that one rank computes.")],
    inner: Annotated[int, typer.Argument(metavar="K", min=1, help="Inner size of one rank's product.")],
    op: Annotated[str, typer.Option(metavar="NAME", help="One product; all three when left out.")] = "all",
    dtype: Annotated[str, typer.Option(metavar="fp32|fp16|bf16")] = "bf16",
    nproc: Annotated[int, typer.Option(min=0, help="Ranks; 0 = all GPUs, or 2 on a CPU.")] = 0,
    bias: Annotated[bool, typer.Option("--bias", help="Products that add one.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of interleaved samples; the median counts.")] = 11,
    search: Annotated[
        bool, typer.Option("--search", help="Try other chunks and tiles too; compiles for long.")
    ] = False,
    table: Annotated[str, typer.Option(metavar="FILE", help="The table to add to; the package's when left out.")] = "",
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Measure how a product of the tensor axis is best run beside its transfer, and remember it.

    Every way is held against a reference first.  Timings of a CPU, where kernels are interpreted, are kept only with
    --table.
    """

    def work() -> None:
        from interlace import launch
        from interlace.kernels import table as tables
        from interlace.kernels.tune import shipped
        from interlace.plan.fused import OPS
        from interlace.world import find_place

        if find_place() is not None:
            raise errors.ConfigError("interlace tune starts its own ranks; run it without torchrun or SLURM's srun.")
        _one_of("--op", op, ("all", *OPS))
        _one_of("--dtype", dtype, tuple(tables.DTYPES))
        ranks, where = _tuned_ranks(nproc, device)
        argument = {"ops": list(OPS) if op == "all" else [op], "M": rows, "N": columns, "K": inner}
        argument |= {"dtype": dtype, "bias": bias, "rounds": rounds, "search": search}
        if where == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")  # for the ranks
        found = launch.run_local("interlace.kernels.tune:run", ranks, argument, device=where, timeout=300.0)[0]
        for measured in found:
            print(measured["title"])
            print("\n".join(f"  {line}" for line in measured["lines"]))
        name = found[0]["device"]
        if where == "cpu" and not table:
            print("not kept: this is a CPU; --table FILE keeps it", file=sys.stderr)
            return
        path = Path(table) if table else tables.path_of(name)
        whole = tables.store(path, name, [tables.Entry(**measured["entry"]) for measured in found])
        shipped.cache_clear()
        print(f"wrote {path}: {len(whole.entries)} shapes, digest {whole.digest}", file=sys.stderr)

    _guarded(work, debug)


def _one_of(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        near = errors.nearest(given, known)
        raise errors.ConfigError(
            f"{option} must be one of {', '.join(known)}, found {given}" + (f"; did you mean {near}?" if near else ".")
        )


def _tuned_ranks(nproc: int, device: str) -> tuple[int, str]:
    """How many ranks measure, and where: as many as asked, or all GPUs, or two processes."""
    from interlace.kernels.tune import num_gpus

    ranks = nproc or (max(2, num_gpus()) if device != "cpu" else 2)
    if ranks < 2:
        raise errors.ConfigError(f"--nproc must be at least 2, found {ranks}: one rank has nobody to wait for.")
    return ranks, _device(device, ranks)


def main() -> None:
    app()


# --- the report ------------------------------------------------------------------------------------------------------


def _titled(name: str, everything: Sequence[Ledger], chosen: Ledger) -> str:
    from interlace.report.ledger import ALL

    if chosen.step == ALL:
        return name
    return f"{name}: {chosen.step}" + (f", the median of {len(everything)} steps" if len(everything) > 1 else "")


def _print_report(title: str, summary: str, chosen: Ledger, everything: Sequence[Ledger], notes: Sequence[str]) -> None:
    from interlace.report import table as tables

    print(title)
    if summary:
        print(summary)
    _print_table(tables.table(chosen, everything))
    for line in tables.transfer_lines(chosen):
        print(line)
    for heading, kinds in (("longest exposed", ("transfer", "waiting", "bubble")), ("unknown", ("unknown",))):
        for line in tables.named_lines(chosen, kinds, 3):
            print(f"{heading}: {line}")
    for note in notes:
        print(f"note: {note}")


def _print_table(shown: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Drawn

    drawn = Drawn(box=SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(shown.heads):
        drawn.add_column(head, justify="left" if number == 0 else "right", no_wrap=True)
    for number, line in enumerate(shown.lines):
        last = number == len(shown.lines) - shown.sums - 1
        drawn.add_row(*line, end_section=last)
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    console.print(drawn)


def _write(place: Path, words: str) -> None:
    with _writing(place):
        place.write_text(words, encoding="utf-8")


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise errors.ResourceError(f"cannot write {place} ({reason}); choose another file with --out FILE.") from None


# --- before any process starts -------------------------------------------------------------------------------------


def _check(cfg: Config, device: str, place: Place | None = None) -> None:
    """Refuses what cannot run, in one sentence with the nearest that can.  `place`: where a launcher has put us."""
    from interlace.plan import fit

    if cfg.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise errors.ConfigError("run.tensorboard = true needs TensorBoard; install interlace[tensorboard].")
    if cfg.train.compile and device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise errors.ConfigError("train.compile = true needs a C++ compiler on the CPU; install g++, or leave it out.")
    ranks = place.size if place else cfg.plan.world
    local = (place.local_size or 1) if place else ranks
    fit.check(cfg, ranks, _memory_per_rank(device, local), AXES, device)


def _check_folder(cfg: Config, resume: str) -> None:
    """Refuses to mix a new run, or one that goes on from elsewhere, with the checkpoints of another."""
    from interlace.train import state

    out = Path(cfg.run.out)
    folder, _ = state.find_checkpoint(cfg, resume)
    own = folder is not None and state.is_own(cfg, folder)
    names = [path.name for path in (out / "checkpoints").glob("step-*")]
    made = [int(match[1]) for match in (re.fullmatch(r"step-(\d+)(\.old)?", name) for name in names) if match]
    if made and not own:
        raise errors.ConfigError(
            f"{out} already holds checkpoints (step-{max(made)}); go on with --resume auto, or choose another folder "
            f"with --set run.out={_free(out)}."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _cannot_write(out, error) from None


def _free(out: Path) -> Path:
    return next(place for place in _numbered(out) if not place.exists())


def _numbered(out: Path) -> Iterator[Path]:
    """runs/demo, runs/demo-2, runs/demo-3, ..."""
    yield out
    for number in itertools.count(2):
        yield out.with_name(f"{out.name}-{number}")


def _names_folder(run: str, set_: Sequence[str]) -> bool:
    """Whether the run file or an override says where the run goes."""
    if any(override.partition("=")[0].strip() == "run.out" for override in set_):
        return True
    return bool(run) and "out" in tomllib.loads(Path(run).read_text(encoding="utf-8")).get("run", {})


def _claimed(cfg: Config) -> Config:
    """The configuration with a folder that this run alone has made: the usual one, or the next number that is free.

    So two runs started at once with defaults do not meet in one folder.
    """
    out = Path(cfg.run.out)
    for place in _numbered(out):
        with contextlib.suppress(OSError):  # a run that failed before its first step leaves nothing to keep
            if os.listdir(place) == ["error.json"]:  # an empty one may just have been made by another run
                shutil.rmtree(place)
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_write(place, error) from None
        if place != out:
            print(f"{out} is another run's folder; this one writes to {place}", file=sys.stderr)
        return replace(cfg, run=replace(cfg.run, out=str(place)))
    raise AssertionError("numbers do not end")


def _newest(cfg: Config) -> Config:
    """The configuration with the folder, of those that runs without a name of their own have made, saved to last."""
    out = Path(cfg.run.out)
    saved = [
        (step.stat().st_mtime, place)
        for place in out.parent.glob(f"{glob.escape(out.name)}*")
        if re.fullmatch(rf"{re.escape(out.name)}(-\d+)?", place.name)
        for step in (place / "checkpoints").glob("step-*[0-9]")
    ]
    place = max(saved)[1] if saved else out
    if place != out:
        print(f"going on in {place}, the newest of the runs beside {out}", file=sys.stderr)
    return replace(cfg, run=replace(cfg.run, out=str(place)))


def _at_home(cfg: Config) -> Config:
    """The configuration with "~" at the head of run.out as the user's folder, as a shell would have it."""
    return replace(cfg, run=replace(cfg.run, out=str(Path(cfg.run.out).expanduser())))


def _cannot_write(out: Path, error: OSError) -> errors.ResourceError:
    reason = error.strerror or str(error)
    return errors.ResourceError(f"cannot write to {out} ({reason}); choose another folder with --set run.out=FOLDER.")


def _device(asked: str, ranks: int, place: Place | None = None) -> str:
    """ "cpu" or "cuda"; "auto" takes GPUs when there are enough for the ranks on this machine."""
    from interlace.world import choose_device

    rank, size = (place.local_rank, place.local_size) if place else (0, ranks)
    return choose_device(asked, rank, size).type


def _memory_per_rank(device: str, local_ranks: int) -> int | None:
    """Bytes that a rank may use, or None when it cannot be known."""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
            return min(int(value) for value in found) << 20
        except (OSError, subprocess.SubprocessError, ValueError):
            return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return (kib << 10) // local_ranks
    except (OSError, StopIteration, ValueError):
        return None


def _range(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        start, stop = int(first or 0), int(last) if colon else int(first) + 1
    except ValueError:
        start, stop = 1, 0
    if start < 0 or stop <= start or stop > MOST_STEPS:
        raise errors.ConfigError(f'--steps is "{text}"; write A:B with 0 <= A < B, as in 0:2.')
    return range(start, stop)


# --- failures --------------------------------------------------------------------------------------------------------


def _join(cfg: Config, device: str, argument: dict[str, Any]) -> None:
    """This process is a rank of torchrun or SLURM."""
    from interlace import launch
    from interlace.train.loop import run as rank_run

    world = launch.join(cfg.run.timeout, device)
    try:
        rank_run(world, **argument)
    except Exception as error:
        said = world.explain(error)
        if world.rank > 0 and "cause" in said.details:
            raise typer.Exit(said.details["cause"]["exit_code"]) from None  # the rank at fault speaks, and rank 0
        raise said from error
    finally:
        launch.leave()


@contextlib.contextmanager
def _said_once(place: Place | None) -> Iterator[None]:
    """What every rank refuses alike before they meet, rank 0 alone says."""
    try:
        yield
    except errors.InterlaceError as error:
        if place is not None and place.rank > 0:
            raise typer.Exit(error.exit_code) from None
        raise


@contextlib.contextmanager
def _error_file(cfg: Config, enabled: bool) -> Iterator[None]:
    """Writes `error.json` into the run folder when a started run fails, unless the run file or plan is at fault."""
    try:
        yield
    except errors.InterlaceError as error:
        out = Path(cfg.run.out)
        if enabled and isinstance(error, errors.ConfigError):
            with contextlib.suppress(OSError):
                out.rmdir()  # nothing began in it
        elif enabled:
            with contextlib.suppress(OSError):  # the message itself is on its way
                cause = error.details.get("cause", error.to_json())
                (out / "error.json").write_text(json.dumps(cause, indent=2) + "\n", encoding="utf-8")
        raise


@contextlib.contextmanager
def _told_how_to_go_on(cfg: Config) -> Iterator[None]:
    """A run that is asked to stop says so, and how to take it up again."""
    try:
        yield
    except SystemExit as stop:
        name = {143: "SIGTERM", 130: "SIGINT"}.get(stop.code if isinstance(stop.code, int) else 0)
        if name is not None:
            saved = any(Path(cfg.run.out, "checkpoints").glob("step-*"))
            more = "; go on with --resume auto" if saved else " before its first checkpoint"
            print(f"interlace: {cfg.run.out} was stopped by {name}{more}", file=sys.stderr)
        raise


def _guarded(work: Callable[[], None], debug: bool) -> None:
    """Runs a command; a failure becomes one message and its exit code."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        work()
        sys.stdout.flush()
    except errors.InterlaceError as error:
        _fail(error, debug)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        _quiet_stdout()
        raise typer.Exit(0) from None
    except OSError as error:
        if error.filename is not None:
            raise
        _quiet_stdout()
        reason = error.strerror or str(error)
        _fail(errors.ResourceError(f"cannot write the output ({reason}); make room, or send it elsewhere."), debug)


def _quiet_stdout() -> None:
    """Nobody reads on: what is left in the buffer must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: errors.InterlaceError, debug: bool) -> NoReturn:
    if debug and "traceback" in error.details:
        print(error.details["traceback"], file=sys.stderr)
    print(f"interlace: {error} [{error.code}]", file=sys.stderr)
    raise typer.Exit(error.exit_code)


if __name__ == "__main__":
    main()
