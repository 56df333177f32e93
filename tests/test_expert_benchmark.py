"""The benchmark of the expert exchange runs from end to end on CPU ranks, and joins what it finds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("expert_parallel", ROOT / "benchmarks" / "expert_parallel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["expert_parallel"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.ranks
def test_every_variant_runs_on_cpu_ranks_and_is_right(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/expert_parallel.py", "--smoke", "--rounds", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "left: rows" not in done.stdout
    records = json.loads(out.read_text(encoding="utf-8"))
    assert records["tiny rows"]["samples"].keys() == {"ours", "torch"}
    assert records["tiny layer"]["samples"].keys() == {"overlapped", "apart", "by need", "exchange", "torch"}
    for record in records.values():
        assert max(record["apart"].values()) < 1e-5
    assert "kraken" not in out.with_suffix(".md").read_text(encoding="utf-8")


def test_results_join_and_say_which_targets_hold(tmp_path: Path) -> None:
    module, out = benchmark(), tmp_path / "found.json"

    def record(row: Any, **samples: list[list[float]]) -> dict[str, Any]:
        return {"row": asdict(row), "apart": dict.fromkeys(samples, 0.0), "samples": samples, "wire": 16e6}

    module.join(out, [record(module.ROWS[0], ours=[[59.0, 66.0, 50.0], [58.0, 70.0, 50.0]])], "here", "python")
    torch_rows = record(module.ROWS[0], torch=[[100.0, 120.0]])
    torch_rows["apart"]["other"] = 0.5
    layer = record(
        module.ROWS[2], overlapped=[[1e3, 2e3]], apart=[[1.5e3, 2.4e3]], exchange=[[5e2, 5e2]], torch=[[3e3, 3e3]]
    )
    module.join(out, [torch_rows, layer], "there", "python")
    said = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "| ours | 58.50 (58.00-59.00) | 274 | 68.00 (66.00-70.00) | 235 | 50.00 (50.00-50.00) |" in said
    assert "| torch | 100.00 (100.00-100.00) | 160 | 120.00 (120.00-120.00) | 133 | - |" in said
    assert "Left out, other differs from the reference by 0.5." in said
    assert "- dispatch <= 60 us: met (58.5)" in said
    assert "- combine <= 65 us: missed (68.0)" in said
    assert "- hidden 0.90 (0.90-0.90), exposed 0.10 of the exchange; target >= 0.80: met" in said
    assert "- torch / overlapped 2.00 (2.00-2.00)" in said
