"""What a pipeline's schedule costs and holds, before anything runs: `schedule`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace import errors
from interlace.cli.failures import guarded
from interlace.cli.options import Debug, app
from interlace.cli.report import print_table, write

if TYPE_CHECKING:
    from interlace.events import Event
    from interlace.schedule import Table
    from interlace.schedule.validate import Peaks

COSTS = ("F", "I", "W", "transfer")


@app.command()
def schedule(
    names: Annotated[list[str], typer.Argument(metavar="NAME|FILE.csv ...", help='"all" for every schedule by name.')],
    ranks: Annotated[int, typer.Option(min=1, help="Of the pipeline; a file says its own.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a step; a file says its own.")] = 8,
    chunks: Annotated[int, typer.Option(min=1, help="Stages a rank, of interleaved.")] = 2,
    costs: Annotated[
        str, typer.Option(metavar='"F=1 I=1 W=1 transfer=0"', help="ms of a rank's layers and a micro-batch.")
    ] = "F=1 I=1 W=1 transfer=0",
    out: Annotated[str, typer.Option(metavar="FILE.svg", help="The picture.")] = "schedule.svg",
    csv: Annotated[
        str, typer.Option(metavar="FILE.csv", help="Write the table of actions, for schedule=FILE.csv.")
    ] = "",
    events: Annotated[str, typer.Option(metavar="FILE.jsonl", help="Write the events, for report --against.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds, instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Prove that schedules of a pipeline can run, say what they cost and hold, and draw them, before anything runs.

    F, I and W are ms of a forward pass, the gradient of its input and that of its weights; a rank's stages share them.
    """

    def work() -> None:
        from interlace.events import to_jsonl
        from interlace.report.ledger import ledgers, median
        from interlace.report.timeline import Scene, timeline

        asked = _costs(costs)
        wanted = _names(names)
        if len(wanted) > 1 and (csv or events):
            raise errors.ConfigError(f"--csv and --events write one schedule, found {', '.join(wanted)}: name one.")
        found = [_Found.of(name, ranks, micro_batches, chunks, asked) for name in wanted]
        scenes = [Scene.of(each.title, each.events, median(ledgers(each.events))) for each in found]
        write(Path(out), timeline(scenes, "Schedules" if len(found) > 1 else ""))
        written = [out]
        if csv:
            write(Path(csv), found[0].table.to_csv(), "--csv FILE")
            written.append(csv)
        if events:
            write(Path(events), to_jsonl(found[0].events).decode(), "--events FILE")
            written.append(events)
        if as_json:
            print(json.dumps([each.to_json() for each in found], indent=1))
        else:
            _print(found)
        print(f"wrote {' and '.join(written)}", file=sys.stderr)

    guarded(work, debug)


@dataclass(frozen=True)
class _Found:
    """A schedule that can run, with the events of a step that begins at 0."""

    name: str
    table: Table
    peaks: Peaks
    events: list[Event]

    @classmethod
    def of(cls, name: str, ranks: int, micro_batches: int, chunks: int, costs: dict[str, float]) -> _Found:
        from interlace.plan.simulate import Costs, simulate
        from interlace.schedule import chunks_of, generate, read_csv, validate

        if name.endswith(".csv"):
            table = read_csv(name)
        else:
            table = generate(name, ranks, micro_batches, chunks if name == "interleaved" else chunks_of(name))
        peaks = validate(table)
        share = table.stages / table.ranks
        stage = {kind: 1e-3 * costs[kind] / share for kind in COSTS[:3]}
        even = Costs.even(table.stages, stage["F"], stage["I"], stage["W"], 1e-3 * costs["transfer"])
        return cls(name, table, peaks, simulate(table, even))

    @property
    def title(self) -> str:
        table = self.table
        return f"{self.name}: {table.ranks} ranks, {table.stages} stages, {table.micro_batches} micro-batches"

    def to_json(self) -> dict[str, Any]:
        from interlace.plan.simulate import bubbles, makespan

        stages = self.table.stages / self.table.ranks  # activations are counted in those of a rank's whole share
        return {
            "schedule": self.name,
            "ranks": self.table.ranks,
            "stages": self.table.stages,
            "micro_batches": self.table.micro_batches,
            "seconds": makespan(self.events),
            "bubble": list(bubbles(self.events)),
            "held": [count / stages for count in self.peaks.ranks],
            "held_whole": [count / stages for count in self.peaks.whole],
        }


def _names(names: list[str]) -> list[str]:
    from interlace.schedule import FORMS

    return [each for name in names for each in (FORMS if name == "all" else [name])]


def _costs(text: str) -> dict[str, float]:
    """Of every kind, 1 ms of compute and no transfer where it is not given."""
    found = {"F": 1.0, "I": 1.0, "W": 1.0, "transfer": 0.0}
    words = text.split()
    for word in words:
        name, _, number = word.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in COSTS or not 0 <= value < 1e9 or (name == "F" and value == 0):
            raise errors.ConfigError(
                f'--costs has "{word}"; write F, I, W and transfer in ms, as in "F=1 I=1 W=1 transfer=0.05".'
            )
        if sum(other.startswith(f"{name}=") for other in words) > 1:
            raise errors.ConfigError(f'--costs gives {name} twice, found "{text}"; give it once.')
        found[name] = value
    return found


def _print(found: list[_Found]) -> None:
    from interlace.report.table import Table as Shown

    heads = ("schedule", "ranks", "stages", "micro-batches", "step, ms", "bubble, %", "held at most", "of them whole")
    lines = []
    for each in found:
        known = each.to_json()
        mean = 100 * sum(known["bubble"]) / len(known["bubble"])
        counts = [str(known[key]) for key in ("ranks", "stages", "micro_batches")]
        held = [f"{max(known[key]):g}" for key in ("held", "held_whole")]
        lines.append((each.name, *counts, f"{1e3 * known['seconds']:.2f}", f"{mean:.1f}", *held))
    print_table(Shown(heads, tuple(lines), 0))
    print(
        "held: micro-batches whose activations of a whole rank are kept; whole: before their input's gradient is made"
    )
