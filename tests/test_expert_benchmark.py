"""The benchmark of the expert exchange runs from end to end on CPU ranks, and joins what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(out: Path, *words: str) -> str:
    command = [sys.executable, "benchmarks/expert_parallel.py", "--smoke", "--rounds", "1", "--out", str(out), *words]
    environment = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_rows_are_measured_and_join_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert "left: rows [1]; go on with --rows 1:2" in run(out, "--budget", "0.000001")
    run(out, "--rows", "1:")
    records = json.loads(out.read_text(encoding="utf-8"))
    assert records.keys() == {"tiny rows", "tiny layer"}
    assert records["tiny rows"]["samples"].keys() == {"ours", "torch"}
    assert records["tiny layer"]["samples"].keys() == {"overlapped", "apart", "exchange", "torch"}
    for record in records.values():
        assert max(record["apart"].values()) < 1e-5
    said = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "| ours | " in said
    assert "- hidden " in said
    assert "kraken" not in said
