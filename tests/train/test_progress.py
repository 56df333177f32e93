"""Progress: plain lines in a pipe, one line that never wraps on a terminal, and no stream that stops the training."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest

from interlace.train import progress
from interlace.train.progress import Progress

CODES = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])")


def row(step: int, **other: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.54321 - step / 100,
        "grad_norm": 0.5312,
        "learning_rate": 3e-4,
        "tokens_per_s": 12412.0,
        "mfu": 0.4123,
        "memory": 1_300_000_000,
        "step_s": 0.25,
        "waited": {"dp": 0.04, "tp": 0.0025},
    } | other


class Clock:
    """time.monotonic under the test's hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A pseudo-terminal's stream, and a call that closes it and gives all it was sent."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    received: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(leader, 65536):
                received.append(chunk)
        except OSError:  # the follower is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    stream = open(follower, "w", encoding="utf-8")  # noqa: SIM115

    def finished() -> str:
        stream.close()
        reader.join()
        return b"".join(received).decode()

    try:
        yield stream, finished
    finally:
        stream.close()
        reader.join()
        os.close(leader)


def screen(sent: str, columns: int) -> list[str]:
    """What a terminal shows: it wraps at `columns`, returns at \\r, and erases the line at CSI 2K."""
    lines, at, x = [""], 0, 0
    while at < len(sent):
        code = CODES.match(sent, at)
        if code:
            at = code.end()
            if code[2] == "K":
                lines[-1] = ""
            assert code[2] in "Km", f"unexpected control code {code[0]!r}"
            continue
        letter, at = sent[at], at + 1
        if letter == "\r":
            x = 0
        elif letter == "\n":
            lines.append("")
            x = 0
        else:
            if x == columns:
                lines.append("")
                x = 0
            lines[-1] = lines[-1][:x].ljust(x) + letter + lines[-1][x + 1 :]
            x += 1
    return lines


def run(stream: TextIO, total: int = 40, **keywords: Any) -> None:
    shown = Progress(total, stream, **keywords)
    shown.note("plan: dp=4 [bold]zero=3[/bold]")
    for step in range(keywords.get("resumed_from", 0) + 1, total + 1):
        shown.step(row(step))
        if step == 20:
            shown.note("saved step-20")
    shown.finish("run folder runs/a")


# --- not a terminal


def test_a_pipe_gets_the_first_step_the_last_and_one_line_in_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    shown = Progress(100, stream)
    for step in range(1, 101):
        clock.now += 0.25
        shown.step(row(step))
    shown.finish("done")
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in stream.getvalue().splitlines()[:-1]]
    assert steps == [1, 21, 41, 61, 81, 100]
    assert stream.getvalue().endswith("\ndone\n")


def test_a_plain_line_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    shown = Progress(14410, stream)
    shown.step(row(10))
    clock.now += 10.0
    shown.step(row(30))  # 2 steps a second: 14380 steps are left
    assert stream.getvalue().splitlines()[1] == (
        "step 30/14410  loss 5.2432  grad norm 0.531  lr 0.0003  12.4k tokens/s  MFU 41.2 %  1.21 GiB  "
        "waited dp 40 ms 16 %, tp 2.5 ms 1 %  ETA 1:59:50"
    )


def test_what_is_unknown_is_left_out() -> None:
    stream = io.StringIO()
    Progress(9, stream).step({"step": 1, "loss": float("nan"), "mfu": None, "memory": 5 << 20, "waited": {}})
    assert stream.getvalue() == "step 1/9  loss nan  5 MiB\n"


def test_no_control_codes_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"):
        monkeypatch.setenv(name, "1")
    stream = io.StringIO()
    run(stream)
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert "plan: dp=4 [bold]zero=3[/bold]\n" in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal(80) as (stream, finished):
        run(stream)
        assert "\x1b" not in finished()


def test_an_early_end_still_shows_the_last_step() -> None:
    stream = io.StringIO()
    shown = Progress(100, stream)
    for step in range(1, 8):
        shown.step(row(step))
    shown.finish()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 1/100", "step 7/100"]


# --- a terminal


@pytest.fixture
def xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("xterm")
@pytest.mark.parametrize("columns", [7, 20, 40, 60, 61, 79, 80, 120, 200])
def test_one_line_that_never_wraps(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with terminal(columns) as (stream, finished):
        shown = Progress(4000, stream)
        for step in range(1, 4001, 111):
            clock.now += 1.0
            shown.step(row(step, loss=10 ** (step % 9), grad_norm=float(step)))
        shown.step(row(4000))
        shown.finish()
        sent = finished()
    assert all(len(CODES.sub("", part).rstrip("\n")) < columns for part in sent.split("\r"))
    last, end = screen(sent, columns)
    assert end == ""
    assert "4000/4000"[: columns - 2] in last


@pytest.mark.usefixtures("xterm")
def test_sixty_columns_show_what_matters_most() -> None:
    with terminal(60) as (stream, finished):
        run(stream)
        shown = screen(finished(), 60)
    assert shown == [
        "plan: dp=4 [bold]zero=3[/bold]",
        "saved step-20",
        "━━━━━━━━━━━ 40/40  loss 5.1432  12.4k tokens/s  waited 17 %",
        "run folder runs/a",
        "",
    ]


@pytest.mark.usefixtures("xterm")
def test_a_hundred_and_twenty_columns_show_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with terminal(120) as (stream, finished):
        shown = Progress(40, stream, resumed_from=10)
        for step in (11, 12, 20):
            clock.now += 1.0
            shown.step(row(step))
        shown.finish()
        (line, _) = screen(finished(), 120)
    bar, rest = line.split(" ", 1)
    assert (bar.count("━") / len(bar), set(bar)) == (pytest.approx(0.5, abs=0.06), {"━", "─"})
    assert rest == (
        "20/40  loss 5.3432  grad 0.53  12.4k tok/s  MFU 41 %  1.21 GiB  waited dp 40 ms 16 %, tp 2.5 ms 1 %  ETA 0:04"
    )


@pytest.mark.usefixtures("xterm")
def test_an_ascii_terminal_gets_an_ascii_bar() -> None:
    with terminal(100) as (stream, finished):
        stream.reconfigure(encoding="ascii", errors="strict")  # type: ignore[attr-defined]
        shown = Progress(4, stream)
        shown.note("naïve")
        shown.step(row(2))
        shown.finish()
        sent = screen(finished(), 100)
    assert sent[0] == "na?ve"
    assert re.match(r"#+-+ 2/4  loss", sent[1])


@pytest.mark.usefixtures("xterm")
def test_it_is_drawn_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with terminal(80) as (stream, finished):
        shown = Progress(1000, stream)
        for step in range(1, 1001):
            clock.now += 0.001
            shown.step(row(step))
        shown.finish()
        sent = finished()
    assert 8 <= sent.count("/1000") <= 13


# --- streams that fail


def test_a_closed_stream_is_dropped() -> None:
    stream = io.StringIO()
    shown = Progress(3, stream)
    shown.step(row(1))
    stream.close()
    shown.note("x")
    shown.step(row(3))
    shown.finish("y")
    run(stream)  # closed before it began


@pytest.mark.usefixtures("xterm")
def test_a_terminal_that_goes_away_is_dropped() -> None:
    leader, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8") as stream:
        shown = Progress(3, stream)
        shown.step(row(1))
        os.close(leader)
        shown.step(row(2))
        shown.step(row(3))
        shown.finish("end")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reader_that_leaves_does_not_end_the_process(name: str) -> None:
    code = (
        "import sys\n"
        "from interlace.train.progress import Progress\n"
        f"shown = Progress(3000, sys.{name})\n"
        "shown.note('first')\n"
        "sys.stdin.readline()\n"
        "for step in range(1, 3001):\n"
        "    shown.note('x' * 100)\n"
        "    shown.step({'step': step, 'loss': 1.0})\n"
        "shown.finish('end')\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, **{name: subprocess.PIPE})  # type: ignore[call-overload]
    pipe = getattr(child, name)
    assert pipe.readline() == b"first\n"
    pipe.close()
    child.stdin.write(b"go\n")
    child.stdin.close()
    assert child.wait(timeout=60) == 0


def test_a_full_disk_is_no_reason_to_stop() -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        shown = Progress(2, stream)
        shown.step(row(1))
        shown.step(row(2))
        shown.finish()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # so that closing it does not fail
