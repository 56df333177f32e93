"""Where the time of a step went: `report`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace import errors
from interlace.cli.failures import guarded
from interlace.cli.options import Debug, app, step_range

if TYPE_CHECKING:
    from interlace.report.ledger import Ledger
    from interlace.report.table import Table


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
        everything = source.ledgers(step_range(steps) if steps else None)
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
        write(place, page(title, source.summary, scenes, everything, notes))
        if chrome:
            with _writing(Path(chrome), "--chrome FILE"):
                write_chrome(chrome, sorted(source.events, key=lambda event: event.begin))
        if as_json:
            print(json.dumps(found | {"notes": notes}, indent=1))
        else:
            _print_report(title, source.summary, chosen, everything, notes)
            if against:
                print(f"against {scenes[0].title}")
                print_table(tables.differences(chosen, compared))
        print(f"wrote {place}" + (f" and {chrome}" if chrome else ""), file=sys.stderr)

    guarded(work, debug)


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
    print_table(tables.table(chosen, everything))
    for line in tables.transfer_lines(chosen):
        print(line)
    for heading, kinds in (("longest exposed", ("transfer", "waiting", "bubble")), ("unknown", ("unknown",))):
        for line in tables.named_lines(chosen, kinds, 3):
            print(f"{heading}: {line}")
    for note in notes:
        print(f"note: {note}")


def print_table(shown: Table, spare: Sequence[int] = ()) -> None:
    """Nothing in a cell is cut.  spare: columns that go, one after another, where a terminal is too narrow for all."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Drawn

    widths = [max(map(len, column)) for column in zip(shown.heads, *shown.lines, strict=True)]
    kept = list(range(len(widths)))

    def width() -> int:
        return sum(widths[number] + 3 for number in kept) - 1

    place = Console(file=sys.stdout)
    for number in spare if place.is_terminal else ():
        if width() > place.width:
            kept.remove(number)
    drawn = Drawn(box=SIMPLE_HEAD, pad_edge=False)
    for number in kept:
        drawn.add_column(shown.heads[number], justify="left" if number == 0 else "right", no_wrap=True)
    for count, line in enumerate(shown.lines, 1):
        last = count == len(shown.lines) - shown.sums
        drawn.add_row(*(line[number] for number in kept), end_section=last)
    text = io.StringIO()  # rich would end the process at a closed pipe
    wide = max(place.width, width())
    Console(
        file=text, width=wide, force_terminal=place.is_terminal, highlight=False, markup=False, soft_wrap=True
    ).print(drawn)
    print(text.getvalue(), end="")


def write(place: Path, words: str, option: str = "--out FILE") -> None:
    """ResourceError, which names the option that says where, if it cannot."""
    with _writing(place, option):
        place.write_text(words, encoding="utf-8")


@contextlib.contextmanager
def _writing(place: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise errors.ResourceError(f"cannot write {place} ({reason}); choose another file with {option}.") from None
