"""The application that the commands join, and the options that several of them have."""

from __future__ import annotations

from typing import Annotated

import typer

from interlace import errors

MOST_STEPS = 1 << 40  # as the refusal says
AXES = ("dp", "shard", "tp", "cp", "ep", "pp")  # the axes that can be executed

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


def step_range(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        start, stop = int(first or 0), int(last) if colon else int(first) + 1
    except ValueError:
        start, stop = 1, 0
    if start < 0 or stop <= start or stop > MOST_STEPS:
        raise errors.ConfigError(f'--steps is "{text}"; write A:B with 0 <= A < B <= 2**40, as in 0:2.')
    return range(start, stop)
