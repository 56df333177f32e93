"""Faults of kernels, without a GPU: `check`."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from interlace import errors
from interlace.cli.failures import guarded, quiet_stdout
from interlace.cli.options import Debug, app

RANKS = "2,3,4"


@app.command()
def check(
    target: Annotated[str, typer.Argument(metavar="MODULE.py:LAUNCH", help="A file, and a function launch(heap).")],
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Numbers of ranks to try.")] = RANKS,
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

        given = {"--seed": seed, "--resident": resident, "--replays": replays, "--stop": stop}
        unused = [name for name, value in given.items() if value] + ["--ranks"] * (ranks not in ("2", RANKS))
        if exhaustive and unused:
            raise errors.ConfigError(f"--exhaustive runs 2 ranks without {unused[0]}; leave one of the two out.")
        launch, name = checker.load(target)
        if exhaustive:
            verdict = checker.explore_all(launch, most_schedules=schedules, barriers=not loose, name=name)
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
            quiet_stdout()
            raise typer.Exit(errors.NumericsError.exit_code)

    guarded(work, debug)
