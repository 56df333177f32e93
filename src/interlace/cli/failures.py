"""Failures become one message, an exit code, and an `error.json` in the folder of a run."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from interlace import errors

if TYPE_CHECKING:
    from interlace.config import Config
    from interlace.world import Place

SPEAK = 1.0  # seconds by which rank 0 may come to a refusal later than the others


@contextlib.contextmanager
def said_once(place: Place | None) -> Iterator[None]:
    """What every rank refuses alike before they meet, rank 0 alone says.

    The others give it time, for a launcher ends all ranks when one has ended.
    """
    try:
        yield
    except errors.InterlaceError as error:
        if place is not None and place.rank > 0:
            time.sleep(SPEAK)
            raise typer.Exit(error.exit_code) from None
        raise


@contextlib.contextmanager
def error_file(cfg: Config, enabled: bool) -> Iterator[None]:
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
def told_how_to_go_on(cfg: Config) -> Iterator[None]:
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


def guarded(work: Callable[[], None], debug: bool) -> None:
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
        quiet_stdout()
        raise typer.Exit(0) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and isinstance(error.filename, str):
            name = f"{error.filename[:40]}... ({len(error.filename)} characters)"
            _fail(errors.ConfigError(f"{name} is too long for the name of a file here; choose a shorter one."), debug)
        if error.filename is not None:
            raise
        quiet_stdout()
        reason = error.strerror or str(error)
        _fail(errors.ResourceError(f"cannot write the output ({reason}); make room, or send it elsewhere."), debug)


def quiet_stdout() -> None:
    """Nobody reads on: what is left in the buffer must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: errors.InterlaceError, debug: bool) -> NoReturn:
    if debug and "traceback" in error.details:
        print(error.details["traceback"], file=sys.stderr)
    print(f"interlace: {error} [{error.code}]", file=sys.stderr)
    raise typer.Exit(error.exit_code)
