"""A run's progress for people: one live line on a terminal, now and then a plain line anywhere else.

    progress = Progress(total_steps=200)
    progress.note("plan: dp=4 zero=3 on 4 ranks")
    progress.step({"step": 1, "loss": 5.54, "tokens_per_s": 12400.0, "waited": {"dp": 0.041}, "step_s": 0.27, ...})
    progress.finish("run folder runs/demo")

On a terminal the line is drawn over itself and never wraps: what does not fit is left out, the least wanted first.
Nothing is hidden, redirected or run in a thread, so a run that dies leaves the terminal as it was.  Into a pipe or a
file go whole lines without control codes: the first step, the last, and one about every five seconds.

A stream whose reader has gone is dropped; training goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

LINE_SECONDS = 5.0  # between plain lines
DRAW_SECONDS = 0.1  # between drawings of the live line
RECENT = 50  # steps whose pace gives the remaining time
BAR = (8, 30)  # least and most columns

Row = Mapping[str, Any]


class Progress:
    """Shows rows of metrics as they come; `stream` None is sys.stderr, `resumed_from` the steps made before this run.

    No method raises for what the stream does.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None, resumed_from: int = 0) -> None:
        self.total = total_steps
        self.resumed_from = resumed_from
        self._out = _Output(sys.stderr if stream is None else stream)
        self._line = _LiveLine(self._out) if self._out.is_terminal() else None
        self._shown_at: float | None = None
        self._waiting: Row | None = None  # the last row, while it has not been shown
        self._paces: deque[tuple[float, int]] = deque(maxlen=RECENT)  # when a step ended, and which

    def step(self, row: Row) -> None:
        """A step has been made.  Keys: step, loss, grad_norm, learning_rate, tokens_per_s, mfu, memory (bytes), step_s,
        dropped (share of choices of experts), waited (axis -> seconds); a missing one, or None, is left out."""
        now = time.monotonic()
        self._paces.append((now, int(row["step"])))
        self._waiting = row
        pause = LINE_SECONDS if self._line is None else DRAW_SECONDS
        if self._shown_at is None or now - self._shown_at >= pause or row["step"] >= self.total:
            self._show(now)

    def note(self, text: str) -> None:
        """Lines of text of their own, above the live one."""
        if self._line is None:
            self._out.write(text + "\n")
        else:
            self._line.above(text)

    def finish(self, text: str = "") -> None:
        """The end: the last row is shown and stays; then the text."""
        if self._waiting is not None:
            self._show(time.monotonic())
        if self._line is not None:
            self._line.leave()
        if text:
            self.note(text)

    def _show(self, now: float) -> None:
        row, self._waiting, self._shown_at = self._waiting, None, now
        assert row is not None
        remaining = self._remaining(row)
        if self._line is None:
            words = [field.full for field in _fields(row, remaining)]
            self._out.write("  ".join([f"step {row['step']}/{self.total}", *words]) + "\n")
        else:
            self._line.draw(row, self.total, self.resumed_from, remaining)

    def _remaining(self, row: Row) -> float | None:
        """Seconds to the last step at the recent pace; None where it is not known, or over."""
        (then, first), (now, last) = self._paces[0], self._paces[-1]
        if last >= self.total:
            return None
        pace = (now - then) / (last - first) if last > first else row.get("step_s")
        return None if pace is None else (self.total - last) * float(pace)


# --- words ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    """One number of the line, in short and in full, each wanted by rank: the lowest first."""

    rank: int
    full: str
    short: str
    full_rank: int = 9


_BAR_RANK = 4


def _fields(row: Row, remaining: float | None) -> list[_Field]:
    """Each known number, in the order of the line."""
    known = {key: value for key, value in row.items() if value is not None}
    found: list[_Field] = []
    if "loss" in known:
        loss = known["loss"]
        is_long = abs(loss) >= 1e4
        found.append(_Field(0, f"loss {loss:.4g}" if is_long else f"loss {loss:.4f}", f"loss {loss:.4g}"))
    if "grad_norm" in known:
        found.append(_Field(5, f"grad norm {known['grad_norm']:.3g}", f"grad {known['grad_norm']:.2g}"))
    if "learning_rate" in known:
        found.append(_Field(9, f"lr {known['learning_rate']:.3g}", f"lr {known['learning_rate']:.2g}"))
    if "tokens_per_s" in known:
        rate = _si(known["tokens_per_s"])
        found.append(_Field(1, f"{rate} tokens/s", f"{rate} tok/s"))
    if "mfu" in known:
        found.append(_Field(6, f"MFU {100 * known['mfu']:.1f} %", f"MFU {100 * known['mfu']:.0f} %"))
    if "memory" in known:
        found.append(_Field(8, _bytes(known["memory"]), _bytes(known["memory"])))
    if known.get("dropped"):
        found.append(_Field(7, f"dropped {100 * known['dropped']:.2g} %", f"drop {100 * known['dropped']:.1g} %"))
    if known.get("waited"):
        found.append(_waited(known["waited"], known.get("step_s")))
    if known.get("contention"):
        found.append(_contention(known["contention"], known.get("step_s")))
    if remaining is not None:
        found.append(_Field(3, f"ETA {_clock(remaining)}", f"ETA {_clock(remaining)}"))
    return found


def _contention(seconds: float, step_s: float | None) -> _Field:
    """How much longer a step computed beside its transfers than alone."""
    share = f" {100 * seconds / step_s:.0f} %" if step_s else ""
    return _Field(10, f"slowed {_time(seconds)}{share}", f"slowed{share or ' ' + _time(seconds)}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def _waited(waited: Mapping[str, float], step_s: float | None) -> _Field:
    """Time stood still, by axis, in milliseconds and as a share of the step; in short the sum of all axes."""

    def share_of(seconds: float) -> str:
        return f"{100 * seconds / step_s:.0f} %" if step_s else ""

    whole = sum(waited.values())
    by_axis = ", ".join(f"{axis} {_time(each)} {share_of(each)}".rstrip() for axis, each in waited.items())
    return _Field(2, f"waited {by_axis}", f"waited {share_of(whole) or _time(whole)}", full_rank=7)


def _si(value: float) -> str:
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


def _bytes(value: float) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value / 1024:.3g} KiB"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


# --- the live line -------------------------------------------------------------------------------------------------


class _LiveLine:
    """The last line of a terminal, drawn over itself."""

    def __init__(self, out: _Output) -> None:
        from rich.console import Console

        self._out = out
        self._console = Console(file=out, force_terminal=True, force_jupyter=False, highlight=False, markup=False)  # type: ignore[arg-type]
        self._drawn: Any = None  # the line that stands there

    def draw(self, row: Row, total: int, resumed_from: int, remaining: float | None) -> None:
        from rich.text import Text

        width = self._out.columns() - 1  # a character in the last column would make some terminals wrap
        done = f"{row['step']}/{total}"
        words, bar = _fitting(_fields(row, remaining), width - len(done))
        line = Text(no_wrap=True, end="")
        if bar:
            full, empty = ("━", "─") if self._out.can_write("━─") else ("#", "-")
            until = [min(bar, bar * steps // max(1, total)) for steps in (resumed_from, int(row["step"]))]
            line.append(full * until[0], "dim green").append(full * (until[1] - until[0]), "green")
            line.append(empty * (bar - until[1]), "bright_black").append(" ")
        line.append(done, "bold")
        for word in words:
            line.append("  ").append(word, "bold cyan" if word.startswith("loss") else "")
        line.truncate(max(1, width))
        self._drawn = line
        self._redraw()

    def above(self, text: str) -> None:
        """Text that stays, above the line."""
        self._erase()
        for line in text.split("\n"):
            self._out.write(line + "\n")
        if self._drawn is not None:
            self._redraw()

    def leave(self) -> None:
        """End the line; it stays where it is."""
        if self._drawn is not None:
            self._out.write("\n")
            self._drawn = None

    def _redraw(self) -> None:
        self._erase()
        self._console.width = max(1, self._out.columns())
        self._console.print(self._drawn, end="", crop=True, soft_wrap=False)

    def _erase(self) -> None:
        if self._drawn is not None:
            self._out.write("\r\x1b[2K")


def _fitting(fields: list[_Field], columns: int) -> tuple[list[str], int]:
    """The words that fit together, in the order given, and the columns left for a bar (0: none)."""
    offers = [(field.rank, place, field.short) for place, field in enumerate(fields)]
    offers += [(field.full_rank, place, field.full) for place, field in enumerate(fields)]
    offers.append((_BAR_RANK, -1, " " * (BAR[0] - 1)))  # a bar and its blank take as much as these and two blanks
    chosen: dict[int, str] = {}
    for _, place, text in sorted(offers, key=lambda offer: offer[0]):
        more = len(text) - len(chosen[place]) if place in chosen else 2 + len(text)
        if more <= columns:
            chosen[place] = text
            columns -= more
    bar = min(BAR[1], BAR[0] + columns) if chosen.pop(-1, "") else 0
    return [chosen[place] for place in sorted(chosen)], bar


# --- the stream ----------------------------------------------------------------------------------------------------


class _Output:
    """A text stream that is written at once and given up, without a word, when it cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text if self.can_write(text) else self._replaced(text))
                self._stream.flush()
            except OSError as error:
                self._give_up(error)
            except ValueError:  # closed
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def can_write(self, text: str) -> bool:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return False
        return True

    def is_terminal(self) -> bool:
        """A terminal that moves its cursor.  Nothing in the environment makes one of a pipe."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        return False

    def columns(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80

    def _replaced(self, text: str) -> str:
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def _give_up(self, error: OSError) -> None:
        """Drop the stream; if its reader has gone, let what it still holds go to nowhere, or Python's last flush of it
        would turn the exit code of a good run into 120."""
        stream, self._stream = self._stream, None
        if error.errno in (errno.EPIPE, errno.EIO) and stream is not None:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
