"""`interlace tune`: what it refuses, what it says, and the file it leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli import app
from interlace.kernels import table
from interlace.kernels.table import Table


def tune(*words: str) -> tuple[int, str, str]:
    made = CliRunner().invoke(app, ["tune", *words], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert "Traceback" not in made.output
    return made.exit_code, made.stdout, made.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["4", "4", "4", "--op", "gather_matmul"], "--op must be one of all, .*; did you mean all_gather_matmul?"),
        (["4", "4", "4", "--dtype", "fp61"], "--dtype must be one of fp32, fp16, bf16, found fp61; did you mean fp16?"),
        (["4", "4", "4", "--nproc", "1"], "--nproc must be at least 2, found 1: one rank has nobody to wait for"),
        (["4", "4", "4", "--device", "gpu"], "device 'gpu' is unknown; did you mean 'cpu'"),
    ],
)
def test_one_sentence_names_what_to_change(words: list[str], said: str) -> None:
    code, _, err = tune(*words)
    assert code == 2
    assert re.search(said.replace("?", r"\?"), err), err
    assert len(err.splitlines()) == 1


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = tune("4", "4", "4")
    assert code == 2
    assert "starts its own ranks" in err


@pytest.mark.ranks
def test_a_cpu_measures_and_keeps_only_what_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FOLDER", tmp_path / "package")
    words = ["6", "5", "8", "--op", "all_gather_matmul", "--dtype", "fp32", "--rounds", "3", "--device", "cpu"]
    code, out, err = tune(*words)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "all_gather_matmul 6 x 5 x 8 fp32 on 2 ranks of cpu"
    assert any(re.match(r"  plain +[\d.]+ us +\([\d.]+ to [\d.]+\) +1.000 x plain +error \d", line) for line in lines)
    assert sum("<- chosen" in line for line in lines) == 1
    assert "WRONG" not in out
    assert "not kept: this is a CPU; --table FILE keeps it" in err
    assert not (tmp_path / "package").exists()
    path = tmp_path / "own.json"
    code, out, err = tune(*words, "--table", str(path))
    assert code == 0, err
    held = Table.load(path, "cpu")
    assert re.search(rf"wrote .*own.json: 1 shapes, digest {held.digest}", err)
    (entry,) = held.entries.values()
    assert (entry.op, entry.M, entry.N, entry.K, entry.dtype, entry.world) == ("all_gather_matmul", 6, 5, 8, "fp32", 2)
    assert "plain" in entry.seconds
    assert len(entry.seconds) > 1
    assert not entry.wrong
    (tmp_path / "bad.json").write_text("{}")
    code, _, err = tune(*words, "--table", str(tmp_path / "bad.json"))
    assert code == 2
    assert "bad.json is no table of measurements" in err.splitlines()[-1]
