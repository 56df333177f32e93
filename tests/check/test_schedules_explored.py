"""benchmarks/schedules_explored.py: pieces explore what one call explores, and another call goes on with the rest."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from right_kernels import RIGHT

from interlace.check import explore
from interlace.check.machine import Machine

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Where workers, who are given this path, find it too."""
    monkeypatch.syspath_prepend(FOLDER)
    import schedules_explored

    for name in schedules_explored.ENVIRONMENT:  # as before afterwards: what later tests import must not be interpreted
        before = os.environ.get(name)
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name) if before is None else monkeypatch.setenv(name, before)
    return schedules_explored


def ring(heap: Any) -> Any:
    """Sums once round; every seventh schedule, whose signals begin near the wrap, gives a wrong result."""
    check = RIGHT["ring_all_reduce"](heap)
    return lambda: check() or heap.fabric.origin == 0


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Of every schedule who did what in which line, one event after the other."""
    found: list[tuple[Any, ...]] = []
    close = Machine.close

    def closed(self: Machine) -> None:
        found.append(tuple((fiber.number, what, line) for fiber, what, _, line in self.events))
        close(self)

    monkeypatch.setattr(Machine, "close", closed)
    return found


def test_pieces_explore_the_schedules_of_one_call(runner: ModuleType, traces: list[tuple[Any, ...]]) -> None:
    whole = explore(ring, ranks=3, schedules=12, most=12, residency=False)
    one_call = traces[:]
    traces.clear()
    cell = runner.Cell("ring", 3)
    cut = runner.left([cell], [], 12, 5)
    assert [piece[1:] for piece in cut] == [(0, 5), (5, 10), (10, 12)]
    lines = [runner.explore_piece(piece, runner.Row(lambda: ring)) for piece in reversed(cut)][::-1]
    assert len(one_call) == 12
    assert len(set(one_call)) > 9
    assert sorted(traces) == sorted(one_call)
    assert traces[-5:] == one_call[:5]
    assert sum(line["events"] for line in lines) == whole.events
    assert [len(line["reports"]) for line in lines] == [1, 0, 1]
    assert [str(report) for report in whole.reports] == lines[0]["reports"]  # the second is the same fault
    assert "again with --ranks 3 --seed 10 --schedules 1" in lines[2]["reports"][0]


def test_no_schedule_begins_after_the_seconds() -> None:
    verdict = explore(ring, ranks=(2, 3), schedules=5, seconds=0.0)
    assert verdict.schedules == 0
    assert "not all of these" in str(verdict)


def test_only_seeds_that_no_line_has_are_left(runner: ModuleType) -> None:
    cells = [runner.Cell("a", 2), runner.Cell("a", 3)]
    lines = [
        {"launch": "a", "ranks": 2, "first": 0, "schedules": 5},
        {"launch": "a", "ranks": 2, "first": 5, "schedules": 2},  # stopped in the middle
        {"launch": "b", "ranks": 3, "first": 0, "schedules": 10},
        {"launch": "a", "ranks": 3, "first": 5, "schedules": 5},
    ]
    found = [(piece.cell.ranks, piece.first, piece.stop) for piece in runner.left(cells, lines, 12, 5)]
    assert found == [(2, 7, 10), (2, 10, 12), (3, 0, 5), (3, 10, 12)]


def test_workers_write_lines_and_another_call_goes_on(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    first = runner.explore_piece(
        runner.Piece(runner.Cell("example ping_pong", 2), 0, 2), runner.rows()["example ping_pong"]
    )
    out.write_text(runner.json.dumps({**first, "sources": runner.sources()}) + '\n{"launch": "exam')
    call = ["schedules_explored.py", "--out", str(out), "--schedules", "5", "--piece", "2", "--processes", "1"]
    call += ["--only", "example ping*", "--ranks", "2"]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 0
    lines = runner.read(out)
    assert [(line["first"], line["schedules"]) for line in lines] == [(0, 2), (2, 2), (4, 1)]
    assert "3 of 3 schedules, 0 reports; left are about 0 s" in capfd.readouterr().err
    monkeypatch.setattr(sys, "argv", [*call, "--table"])
    runner.main()
    said = capfd.readouterr().out
    events = sum(line["events"] for line in lines)
    assert events > 300
    assert f"| example ping_pong | 5 / {events} / 0 |" in said


@pytest.mark.alone
def test_a_call_whose_time_is_over_leaves_the_file_as_it_is(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    monkeypatch.setattr(sys, "argv", ["schedules_explored.py", "--out", str(out), "--seconds", "0"])
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 0
    assert time.monotonic() - began < 1.0
    assert not out.exists()
    assert " 0 of " in capsys.readouterr().err


def test_every_launch_is_in_the_list(runner: ModuleType) -> None:
    """Each candidate whose bytes move over symmetric memory, each example, each launch of the exchange."""
    from interlace.kernels.candidate import OPS, candidates

    names = {name.split(":")[0] for name in runner.rows()}
    of = dict(zip(OPS, ("gather", "scatter", "reduce"), strict=True))
    expected = {f"{of[op]} {name}" for op in OPS for name in candidates(op) if name != "plain"}
    expected |= {f"example {path.stem}" for path in runner.EXAMPLES.glob("*.py")}
    experts = {"experts both ways", "experts again, with room", "experts rows alone"}
    assert names == expected | experts
