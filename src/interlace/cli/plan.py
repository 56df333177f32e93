"""What layouts of a run will cost, before any GPU is used: `plan`."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace import errors
from interlace.cli.failures import guarded
from interlace.cli.options import Debug, RunFile, Set, app
from interlace.cli.report import print_table, write

if TYPE_CHECKING:
    from interlace.config import Config
    from interlace.events import Event
    from interlace.plan.search import Choice, Found
    from interlace.topology import Topology


DRAWN = 4  # layouts in a picture
MOST_GIB = 1 << 20  # of a GPU


@app.command()
def plan(
    run: RunFile = "",
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs of the run.")] = 8,
    gpu: Annotated[
        str, typer.Option(metavar="NAME|FILE.json", help="a100, h100, h200, or a topology's JSON.")
    ] = "h200",
    preset: Annotated[str, typer.Option(metavar="NAME", help="Of the model, where no run file is given.")] = "8b",
    parallel: Annotated[
        str, typer.Option("--parallel", "-p", metavar="KEYS", help='What stays, as "tp=2 zero=3".')
    ] = "",
    memory: Annotated[float, typer.Option(min=0, metavar="GIB", help="A GPU's; its own, less 3 GiB, when 0.")] = 0.0,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 8,
    out: Annotated[str, typer.Option(metavar="FILE.svg", help="The picture of the best layouts' steps.")] = "",
    events: Annotated[str, typer.Option(metavar="FILE.jsonl", help="The best step, for report --against.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds and bytes.")] = False,
    set_: Set = [],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Rank the layouts of a run by what a step will take, and say why the others are left out; no GPU is used.

    Figures are computed (docs/planning.md says from what, and how near measured steps they are).
    """

    def work() -> None:
        from interlace.config import load
        from interlace.events import to_jsonl
        from interlace.plan.cost import price
        from interlace.plan.search import search
        from interlace.topology import Topology

        topology = Topology.load(gpu)
        given = run or None
        if not memory < MOST_GIB:
            raise errors.ConfigError(f"--memory is {memory}; write GiB of a GPU, less than {MOST_GIB}.")
        words = [*(() if given else ("train.precision=bf16", "train.compile=true")), *set_]
        cfg = load(given, words, parallel or None, preset=preset)
        held = frozenset(word.partition("=")[0] for word in parallel.split())
        room = math.ceil(memory * 2**30) if memory else None
        with _told() as advance:
            found = search(cfg, gpus, topology, room, held, advance)
        if as_json:
            print(json.dumps(_json(cfg, found, topology, gpus), indent=1))
        else:
            _print(cfg, found, topology, gpus, top)
            if found.choices:
                model = [given] if given else ["--set", f"model.preset={preset}"]
                command = ["interlace", "train", *model, *(part for word in words for part in ("--set", word))]
                print(f'{shlex.join(command)} --parallel "{found.choices[0].plan}"')
        if not found.choices:
            # of those that no GPU has room for, else of the plans with the fewest keys
            near = min(found.refusals, key=lambda one: (not one.lacks_memory, len(str(one.example).split())))
            nearest = f'nearest, "{near.example}" {near.reason}'
            raise errors.PlanError(f"none of {found.tried} layouts runs on {gpus} x {topology.name}: {nearest}")
        drawn = found.choices[: DRAWN if out else 1] if out or events else ()
        steps = [(str(choice.plan), price(cfg, choice.plan, topology).events) for choice in drawn]
        if out:
            _draw(steps, out)
        if events:
            write(Path(events), to_jsonl(steps[0][1]).decode(), "--events FILE")
            print(f"wrote {events}", file=sys.stderr)

    guarded(work, debug)


@contextlib.contextmanager
def _told() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("layouts")
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


def _print(cfg: Config, found: Found, topology: Topology, gpus: int, top: int) -> None:
    from interlace.plan.memory import gib
    from interlace.report.table import Table, scale

    train, length = cfg.train, cfg.data.sequence_length
    print(f"{gpus} x {topology.name}, {train.global_batch} sequences of {length} a step, {train.precision}; computed")
    size, unit = scale(found.choices[0].cost.seconds) if found.choices else (1.0, "s")
    digits = 3 if unit == "s" else 2
    first = ("layout", f"{unit} a step", "tokens/s/GPU", "MFU %", "memory")
    heads = (*first, "compute", "update", "bubble", f"exposed, {unit}", "slower %")
    lines = []
    for choice in found.choices[:top]:
        cost = choice.cost
        exposed = " ".join(f"{axis} {seconds / size:.{digits}f}" for axis, seconds in cost.exposed.items()) or "-"
        slower = 100 * (cost.seconds / found.choices[0].cost.seconds - 1)
        mfu = 100 * cost.mfu(topology, gpus, train.precision)
        figures = (f"{cost.seconds / size:.{digits}f}", f"{cost.tokens / gpus / cost.seconds:,.0f}", f"{mfu:.1f}")
        parts = tuple(f"{seconds / size:.{digits}f}" for seconds in (cost.compute, cost.optimizer, cost.bubble))
        lines.append((str(choice.plan), *figures, gib(choice.memory.total), *parts, exposed, f"{slower:.1f}"))
    if lines:
        print_table(Table(heads, tuple(lines), 0), (6, 7, 5, 3, 8, 2, 9))
    for refusal in found.refusals[:6]:
        print(f'left out, {refusal.count}: {refusal.reason}, such as "{refusal.example}"')


def _json(cfg: Config, found: Found, topology: Topology, gpus: int) -> dict[str, Any]:
    def one(choice: Choice) -> dict[str, Any]:
        cost = choice.cost
        parts = ("products", "attention", "memory", "optimizer", "bubble")
        return {
            "plan": str(choice.plan),
            "seconds": cost.seconds,
            "tokens_per_second_per_gpu": cost.tokens / gpus / cost.seconds,
            "mfu": cost.mfu(topology, gpus, cfg.train.precision),
            "bytes": choice.memory.total,
            **{part: getattr(cost, part) for part in parts},
            "exposed": dict(cost.exposed),
        }

    refusals = [{"reason": r.reason, "count": r.count, "example": str(r.example)} for r in found.refusals]
    choices = [one(choice) for choice in found.choices]
    return {"gpu": topology.name, "gpus": gpus, "tried": found.tried, "layouts": choices, "left_out": refusals}


def _draw(steps: list[tuple[str, list[Event]]], out: str) -> None:
    from interlace.report.ledger import ledgers, median
    from interlace.report.timeline import Scene, timeline

    write(Path(out), timeline([Scene.of(name, events, median(ledgers(events))) for name, events in steps], "Planned"))
    print(f"wrote {out}", file=sys.stderr)
