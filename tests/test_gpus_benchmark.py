"""benchmarks/gpus.py: rows in order, each within its limit and with all it started, the rest left for another call."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpus.py"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location("gpus_benchmark", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "gpus_benchmark", module)
    found.loader.exec_module(module)
    monkeypatch.setattr(module, "gpus", lambda: 2)
    return module


def call(gpus: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpus.py", "--folder", str(folder), *arguments])
    with pytest.raises(SystemExit) as ended:
        gpus.main()
    return int(ended.value.code or 0)


def test_rows_run_within_their_limits_and_go_on_later(
    gpus: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    rows = (
        gpus.Row("said", 1, 20.0, f"echo x >> {ran}; echo a figure"),
        gpus.Row("written", 2, 20.0, "echo $WORD > {out}", environment=(("WORD", "a_table"),)),
        gpus.Row("wrong", 1, 20.0, "echo because; exit 3"),
        gpus.Row("late", 1, 0.2, f"(sleep 1; echo x > {tmp_path}/alive) & sleep 30"),
        gpus.Row("wide", 4, 20.0, "exit 1"),
        gpus.Row("without", 1, 20.0, "exit 1", "no_such_package"),
        gpus.Row("long", 1, 900.0, "echo late"),
    )
    monkeypatch.setattr(gpus, "ROWS", rows)
    assert call(gpus, monkeypatch, tmp_path, "--budget", "300") == 1
    said = capsys.readouterr().out
    for line in (
        "said: done",
        "written: done",
        "wrong: exit code 3",
        "late: not done within 0 s",
        "wide: left out, it needs 4 GPUs and 2 are here",
        "without: left out, no package no_such_package is here",
        "left for another call: long",
    ):
        assert line in said
    assert "because" in said
    assert "a figure" in (tmp_path / "said.md").read_text()
    assert "`WORD=a_table echo $WORD > {out}`, 2 GPUs" in (tmp_path / "written.md").read_text()
    assert not (tmp_path / "alive").exists()
    assert call(gpus, monkeypatch, tmp_path, "--only", "said,long") == 0
    assert ran.read_text() == "x\n"  # its table was there
    whole = (tmp_path / "all.md").read_text()
    assert [line for line in whole.splitlines() if line.startswith("## ")] == ["## said", "## written", "## long"]


def test_an_unknown_row_is_named(gpus: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpus.py", "--folder", str(tmp_path), "--only", "contexts"])
    with pytest.raises(SystemExit, match="no row is called contexts; there are tests-axes, "):
        gpus.main()
