"""`interlace report`: what a user types, reads and gets."""

from __future__ import annotations

import gzip
import io
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runs
from interlace.cli.report import print_table
from interlace.events import Event, read_chrome, write_chrome, write_jsonl
from interlace.report.ledger import SECOND, Ledger, Row, ledgers
from interlace.report.source import Source
from interlace.report.table import Table, differences, table
from test_cli import interlace, sentence
from traces import GEMM, collective, kernel, ranked, trace

RUN = """
[model]
preset = "tiny"
[parallel]
plan = "dp=2 pp=2"
[run]
out = "runs/x"
"""


def steps(count: int = 5, slow: float = 1.0) -> list[Event]:
    """Four ranks, dp inner; in step n a rank computes and waits for its pair, of which the odd one is late."""
    found = []
    for number in range(count):
        at = 10.0 * number
        for rank in range(4):
            work = (1.0 + 0.5 * (rank % 2) + 0.1 * number) * slow
            found += [
                Event(rank, "step", "compute", f"step {number + 1}", at, at + 3 * slow + 0.1 * number),
                Event(rank, "compute", "compute", "0F0", at, at + work),
                Event(rank, "comm.dp", "comm", "gather", at + work, at + 2.5 * slow),
                Event(rank, "compute", "wait", "gather", at + work, at + 2.5 * slow),
            ]
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(RUN)
    write_jsonl(folder / "events.jsonl", steps())
    rows = [{"step": n, "step_s": 3.0 + n, "tokens_per_s": 100.0, "mfu": 0.5} for n in range(5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"st')
    return folder


def shown(output: str) -> dict[str, list[str]]:
    """The table's lines by label."""
    found = {}
    for line in output.splitlines():
        cells = re.split(r"  +", line.strip())
        if len(cells) > 2:
            found[cells[0]] = cells[1:]
    return found


def test_a_run_folder_is_printed_and_drawn(run: Path) -> None:
    result = interlace("report", str(run))
    assert result.exit_code == 0, result.output
    assert "run: step 3, the median of 5 steps" in result.output
    assert "4 ranks, plan dp=2 pp=2, 5 steps, median 5 s, 100 tokens/s, MFU 50.0%" in result.output
    lines = shown(result.stdout)
    assert lines["compute"][:4] == ["1200.00", "1700.00", "1200.00", "1700.00"]
    assert lines["exposed transfer dp"][:4] == ["800.00"] * 4
    assert lines["waiting dp for rank 1"][:2] == ["500.00", "·"]
    assert lines["waiting dp for rank 3"][:4] == ["·", "·", "500.00", "·"]
    assert lines["step"] == ["3200.00"] * 4 + ["100.0 %", "3000.00 to 3400.00"]
    page = (run / "report.html").read_text()
    assert "<svg" in page
    assert "waiting dp for rank 1" in page
    assert page.count("http") == 1  # the name space of SVG: nothing is fetched
    assert "prefers-color-scheme" in page
    assert "wrote" in result.stderr


def test_json_sums_to_the_step(run: Path, tmp_path: Path) -> None:
    result = interlace("report", str(run), "--json", "--steps", "2:5", "--out", str(tmp_path / "x.html"))
    found = json.loads(result.stdout)
    assert found["step"] == "step 3"
    assert [each["step"] for each in found["steps"]] == ["step 2", "step 3", "step 4"]
    for rank in found["ranks"]:
        assert sum(row["seconds"] for row in rank["rows"]) == pytest.approx(rank["seconds"], abs=1e-12)
    assert found["ranks"][2]["transfers"]["exposed"] == pytest.approx(1.3)
    assert {"row": "waiting dp for rank 3", "kind": "waiting", "axis": "dp", "late": 3, "seconds": 0.5} in found[
        "ranks"
    ][2]["rows"]
    assert (tmp_path / "x.html").exists()


def test_steps_that_are_not_there(run: Path) -> None:
    assert "no events of steps 7:9: it holds steps 1 to 5" in sentence(
        interlace("report", str(run), "--steps", "7:9"), 2
    )
    assert "write A:B" in sentence(interlace("report", str(run), "--steps", "5:2"), 2)
    write_jsonl("flat.jsonl", [Event(0, "s", "compute", "k", 0, 1)])
    assert "one stretch without steps" in sentence(interlace("report", "flat.jsonl", "--steps", "1:2"), 2)


def test_a_run_that_goes_on_may_be_read(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"rank": 0, "la')
    result = interlace("report", str(run))
    assert "note: the last line of events.jsonl is cut off and left out" in result.output
    assert result.exit_code == 0


def test_traces_in_a_run_folder_are_told_of(run: Path) -> None:
    """Its events are read; the note's own command reads the others, and them alone."""
    assert "was left" not in interlace("report", str(run)).output
    for rank in (0, 1):
        Path(run, f"rank{rank}.trace.json").write_text(json.dumps(ranked(rank, kernel(GEMM, 0, 60))))
        said = interlace("report", str(run), "--json")
        assert json.loads(said.stdout)["step"] == "step 3"
        (note,) = json.loads(said.stdout)["notes"]
        left = ("rank0.trace.json was", "rank0.trace.json and 1 more were")[rank]
        assert note.startswith(f"events.jsonl was read, {left} left: ")
        command = note.partition(": interlace ")[2].removesuffix(" reads traces").split()
        paths = [str(path) for path in sorted(Path().glob(str(Path(command[1]).relative_to(Path.cwd()))))]
        assert len(json.loads(interlace(command[0], *paths, "--json").stdout)["ranks"]) == rank + 1
    assert interlace("report", str(run)).output.count("note: events.jsonl was read, rank0.trace.json and 1 more") == 1
    Path(run, "events.jsonl").write_text("")
    line = sentence(interlace("report", str(run)), 2)
    assert "holds no events yet: wait for the first step, or read the traces beside it with interlace report" in line


def test_a_run_without_its_file_or_with_few_ranks_still_has_a_ledger(run: Path) -> None:
    events = [event for event in steps() if event.rank == 0]
    write_jsonl(run / "events.jsonl", events)
    assert "note: events of 1 of 4 ranks" in interlace("report", str(run)).output
    (run / "run.toml").write_text("[parallel]\nplan = 3")
    assert "note: run.toml is not read" in interlace("report", str(run)).output
    (run / "run.toml").unlink()
    (run / "metrics.jsonl").unlink()
    result = interlace("report", str(run))
    assert shown(result.output)["exposed transfer dp"][0] == "1300.00"


def test_against_another(run: Path) -> None:
    write_jsonl("plan.jsonl", steps(1, slow=2.0))
    result = interlace("report", str(run), "--against", "plan.jsonl", "--out", "both.html")
    assert result.exit_code == 0, result.output
    lines = shown(result.stdout.partition("against ")[2])
    assert lines["compute"] == ["1450.00", "2500.00", "+1050.00", "+32.8 %"]
    assert lines["waiting dp"][:2] == ["250.00", "500.00"]
    assert lines["step"] == ["3200.00", "6000.00", "+2800.00", "+87.5 %"]
    page = Path("both.html").read_text()
    assert page.index("plan.jsonl: step 1") < page.index("run: step 3, the median of 5 steps</text>")
    as_json = json.loads(interlace("report", str(run), "--against", "plan.jsonl", "--json").stdout)
    changes = {each["row"]: each["difference"] for each in as_json["differences"]}
    assert sum(changes.values()) == pytest.approx(2.8)


def test_the_chrome_trace_opens_in_perfetto(run: Path) -> None:
    """Numbers for processes and threads, names in metadata, complete events in order, in microseconds."""
    assert interlace("report", str(run), "--chrome", "t.json").exit_code == 0
    entries = json.loads(Path("t.json").read_text())["traceEvents"]
    drawn = [entry for entry in entries if entry["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert [entry["ts"] for entry in drawn] == sorted(entry["ts"] for entry in drawn)
    assert all({"pid", "tid", "ts", "dur", "name", "cat"} <= set(entry) for entry in drawn)
    assert {names[entry["pid"], entry["tid"]] for entry in drawn} == {"step", "compute", "comm.dp"}
    gather = next(entry for entry in drawn if entry["cat"] == "comm" and entry["pid"] == 1)
    assert (gather["ts"], gather["dur"]) == pytest.approx((1.5e6, 1e6))
    assert sorted(map(str, read_chrome("t.json"))) == sorted(map(str, steps()))
    again = interlace("report", "t.json", "--json")  # and we read it ourselves
    assert json.loads(again.stdout)["step"] == "step 3"


def test_traces_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = ranked(0, kernel(GEMM, 0, 60), collective(60, 40))
    second = ranked(1, kernel(GEMM, 500, 80), collective(580, 20), kernel("magic", 600, 5))
    Path("a.trace.json.gz").write_bytes(gzip.compress(json.dumps(first).encode()))
    Path("b.trace.json").write_text(json.dumps(second))
    result = interlace("report", "a.trace.json.gz", "b.trace.json")
    assert result.exit_code == 0, result.output
    lines = shown(result.stdout)
    assert lines["waiting dp for rank 1"][:2] == ["20.00", "·"]
    assert lines["exposed transfer dp"][:2] == ["20.00", "20.00"]
    assert lines["unknown"][:2] == ["·", "5.00"]
    assert "unknown: 2.50 µs  magic" in result.stdout
    assert Path("report.html").exists()
    whole = interlace("report", str(tmp_path), "--json")  # the folder that a trace handler fills
    assert [each["rank"] for each in json.loads(whole.stdout)["ranks"]] == [0, 1]
    for form in ("rank{}_trace.json", "{}.json"):  # as programs name them that write traces themselves
        folder = tmp_path / form.partition(".")[0]
        folder.mkdir()
        for rank, found in enumerate((first, second)):
            (folder / form.format(rank)).write_text(json.dumps(found))
        whole = interlace("report", str(folder), "--json")
        assert [each["rank"] for each in json.loads(whole.stdout)["ranks"]] == [0, 1], whole.output


def test_no_communication_is_zero_not_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.json").write_text(json.dumps(trace(kernel(GEMM, 0, 10))))
    result = interlace("report", "t.json", "--json")
    found = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(word))
    assert found["ranks"][0]["transfers"] == {"under_way": 0, "hidden": 0, "sum": 0, "exposed": 0}
    assert "no communication found" in found["notes"]
    assert "note: no communication found" in interlace("report", "t.json").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "none: no such file or folder"),
        (["empty"], "neither events.jsonl nor traces"),
        (["bare"], "events.jsonl: holds no events yet"),
        (["bad.jsonl"], "bad.jsonl, line 1: not a JSON object"),
        (["cut.json.gz"], "cut.json.gz: the gzip file is cut off or damaged"),
        (["nothing.json"], "nothing.json: the file is empty"),
        (["host.json"], "host.json: no GPU events"),
        (["ours.json"], "ours.json, traceEvents"),
        (["good.json", "empty"], "empty stands beside 1 other paths"),
        (["good.json", "bad.jsonl"], "bad.jsonl stands beside"),
        (["good.json", "good.json"], "are both of rank 0"),
        (["good.json", "--against", "none"], "none: no such file"),
    ],
)
def test_each_fault_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good = json.dumps(ranked(0, kernel(GEMM, 0, 1))).encode()
    write_chrome("ours.json", [Event(0, "s", "compute", "k", 0, 1)])
    Path("ours.json").write_text(Path("ours.json").read_text().replace('"cat": "compute"', '"cat": "cooking"'))
    files: dict[str, bytes] = {
        "good.json": good, "cut.json.gz": gzip.compress(good)[:-9], "nothing.json": b"", "bad.jsonl": b"{}x\n",
        "host.json": b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]}',
    }  # fmt: skip
    for name, data in files.items():
        Path(name).write_bytes(data)
    Path("empty").mkdir()
    Path("bare").mkdir()
    Path("bare/events.jsonl").touch()
    assert said in sentence(interlace("report", *words), 2)


def test_a_place_that_cannot_be_written(run: Path) -> None:
    line = sentence(interlace("report", str(run), "--out", "no/such/folder.html"), 7)
    assert "cannot write no/such/folder.html" in line


# --- real ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_late_rank_is_named(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Rank 1 makes its batches 250 ms late: the other waits so long for it, under every plan, and it for no one."""
    late = 0.25
    plans = {"zero0": "dp=2", "zero3": "dp=2 zero=3 micro_batches=2"}
    cfgs = {name: runs.config(tmp_path, plan, out=name) for name, plan in plans.items()}
    jobs = [{"config": cfg.to_toml()} for cfg in cfgs.values()]
    run_ranks("rank_functions_train:late_data", 2, {"jobs": jobs, "seconds": late})
    for name in cfgs:
        steps = [ledger.accounts for ledger in Source.open([tmp_path / name]).ledgers()]
        named = [sum(n for row, n in early.rows.items() if row.late == 1) / SECOND for early, _ in steps]
        assert 0.6 * late < statistics.median(named) < 2 * late, (name, named)
        assert statistics.median(tardy.seconds("waiting") for _, tardy in steps) < 0.5 * late
        assert statistics.median(tardy.seconds("data") for _, tardy in steps) > 0.9 * late
        assert statistics.median(early.seconds("host") for early, _ in steps) < 0.3 * late


# --- tables ----------------------------------------------------------------------------------------------------------


def ledger(ranks: int, **more: Any) -> Ledger:
    events = []
    for rank in range(ranks):
        late = 0.1 * (rank % 7)
        events += [Event(rank, "s", "compute", "k", 0, 1 + late), Event(rank, "comm.dp", "comm", "g", 1 + late, 2)]
    (found,) = ledgers(events, **more)
    return found


def test_many_ranks_are_a_mean_and_its_ends() -> None:
    heads, lines = table(ledger(21)).heads, table(ledger(21)).lines
    assert heads == ("", "mean, ms", "least, ms", "most, ms", "share")
    assert lines[0] == ("compute", "1300.00", "1000.00 (0)", "1600.00 (6)", "65.0 %")
    assert lines[-1][1] == "2000.00"


def test_many_late_ranks_are_taken_together() -> None:
    groups = {"dp": [(2 * n, 2 * n + 1) for n in range(7)]}
    labels = [line[0] for line in table(ledger(14, groups=groups)).lines]
    assert sum(label.startswith("waiting dp for rank") for label in labels) == 3
    assert "waiting dp for others" in labels
    shown = table(ledger(14, groups=groups)).lines
    assert sum(float(line[1]) for line in shown[:-1]) == pytest.approx(float(shown[-1][1]), abs=0.05)


def test_differences_are_of_rows_in_common() -> None:
    one, two = ledger(2), ledger(3)
    assert set(one.merged().rows) == {Row("compute"), Row("transfer", "dp"), Row("waiting", "dp")}
    lines = differences(one, two).lines
    assert sum(float(line[3]) for line in lines[:-1]) == pytest.approx(float(lines[-1][3]), abs=0.02)


def test_help_names_the_command() -> None:
    assert "report" in interlace("--help").output


def test_a_table_is_never_cut_and_goes_without_spare_columns_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Table(("layout", "seconds", "share", "notes"), (("dp=8 zero=1 [b]", "1381.00", "57.9 %", "n" * 300),), 0)
    print_table(shown, (3, 2))
    assert "n" * 300 in capsys.readouterr().out  # no terminal: whole, however wide
    monkeypatch.setenv("FORCE_COLOR", "1")
    for columns, there, gone in [
        (400, ["notes", "share"], []),
        (60, ["share"], ["notes"]),
        (29, [], ["notes", "share"]),
    ]:
        monkeypatch.setenv("COLUMNS", str(columns))
        print_table(shown, (3, 2))
        told = capsys.readouterr().out
        assert all(word in told for word in ["dp=8 zero=1 [b]", "1381.00", *there])
        assert not any(word in told for word in [*gone, "…"])


def test_a_reader_that_left_ends_a_table_as_it_ends_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, words: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):  # which `guarded` takes for no failure
        print_table(Table(("a",), (("b",),), 0))
