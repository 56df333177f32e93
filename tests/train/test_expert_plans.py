"""Runs under the expert axis: plans against one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_verify import explain, prove

import runs

Run = Callable[..., list[Any]]
SMALL = ["model.num_layers=2", "model.num_experts=4", "model.expert_ffn_size=8", "model.router_aux_loss=0.1"]
PLANS: dict[int, list[tuple[str, list[str]]]] = {
    2: [
        ("dp=2 ep=2", []),
        ("dp=2 ep=2 zero=3 expert_halves=on recompute=full micro_batches=2", []),
        ("cp=2 ep=2 zero=1", ["model.num_experts=3"]),
    ],
}


@pytest.mark.parametrize("world", PLANS)
def test_the_expert_axis_equals_one_process(run_ranks: Run, tmp_path: Path, world: int) -> None:
    jobs = [(runs.config(tmp_path, plan, [*SMALL, *overrides]), "none") for plan, overrides in PLANS[world]]
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"
