"""`interlace schedule`: the same table, simulator and picture as a run's, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interlace.cli import app
from interlace.events import read_jsonl
from interlace.plan.simulate import Costs, makespan, simulate
from interlace.schedule import FORMS, generate, read_csv, validate


def run(folder: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["schedule", *words, "--out", str(folder / "picture.svg")])


def test_every_schedule_is_told_and_drawn(tmp_path: Path) -> None:
    told = run(tmp_path, "all", "--micro-batches", "6", "--json")
    found = json.loads(told.stdout)
    assert [each["schedule"] for each in found] == list(FORMS)
    picture = (tmp_path / "picture.svg").read_text()
    assert all(f"{name}: 4 ranks" in picture for name in FORMS)
    assert "http" not in picture.replace("http://www.w3.org", "")
    by_name = {each["schedule"]: each for each in found}
    assert by_name["1f1b"]["seconds"] == pytest.approx((6 + 3) * 3e-3)  # (m + p - 1) (F + I + W)
    assert by_name["1f1b"]["bubble"] == pytest.approx([3 / 9] * 4)
    assert max(by_name["gpipe"]["held"]) == 6
    assert max(by_name["1f1b"]["held"]) == 4
    assert by_name["zbv"]["seconds"] < by_name["zb-h1"]["seconds"] < by_name["1f1b"]["seconds"]


def test_a_rank_s_stages_share_its_costs_and_what_is_written_is_read(tmp_path: Path) -> None:
    table, events = tmp_path / "own.csv", tmp_path / "own.jsonl"
    words = ("--ranks", "3", "--micro-batches", "5", "--costs", "F=2 W=0.5 transfer=0.25")
    told = run(tmp_path, "zbv", *words, "--csv", str(table), "--events", str(events))
    assert told.exit_code == 0, told.output
    expected = generate("zbv", 3, 5)
    assert read_csv(table).rows == expected.rows
    simulated = simulate(expected, Costs.even(6, 1e-3, 0.5e-3, 0.25e-3, 0.25e-3))
    assert makespan(read_jsonl(events)) == pytest.approx(makespan(simulated))
    again = run(tmp_path, str(table), *words[4:], "--json")
    known = json.loads(again.stdout)[0]
    assert known["seconds"] == pytest.approx(makespan(simulated))
    assert known["held"] == [count / 2 for count in validate(expected).ranks]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["zvb"], "nearest is zbv"),
        (["1f1b", "--costs", "F=x"], '--costs has "F=x"; write F, I, W and transfer in ms'),
        (["1f1b", "--costs", "B=2"], '--costs has "B=2"'),
        (["1f1b", "--costs", "F=0"], '--costs has "F=0"'),
        (["1f1b", "--costs", "F=1 F=2"], "--costs gives F twice"),
        (["1f1b", "--costs", "F=nan"], '--costs has "F=nan"'),
        (["1f1b", "gpipe", "--csv", "x.csv"], "write one schedule, found 1f1b, gpipe"),
        (["none.csv"], "cannot read the schedule none.csv"),
        (["1f1b", "--csv", "/nowhere/x.csv"], "choose another file with --csv FILE"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    told = run(tmp_path, *words)
    assert told.exit_code != 0
    assert sentence in told.stderr
    assert "Traceback" not in told.output


def test_a_table_that_cannot_run_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "circle.csv"
    for text, fault in [
        ("0F0,0B0\n1B0,1F0\n", "line 2, column 1"),
        ("0UNSHARD,0RESHARD,0REDUCE\n", "computes nothing"),
    ]:
        path.write_text(text)
        told = run(tmp_path, str(path))
        assert told.exit_code != 0
        assert f"{path}" in told.stderr
        assert fault in told.stderr
    assert not (tmp_path / "picture.svg").exists()
