"""Every plan gives the same numbers when its transfers run as late as they may: see `rank_functions_late`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_verify import explain, prove

import runs

Run = Callable[..., list[Any]]
SMALL = ["model.num_layers=2", "data.sequence_length=9"]
EXPERTS = [*SMALL, "model.num_experts=5", "model.expert_ffn_size=12", "model.router_aux_loss=0.1"]
PLANS: dict[int, list[tuple[str, list[str]]]] = {
    2: [
        ("dp=2", SMALL),
        ("dp=2 zero=2 micro_batches=2", SMALL),
        ("dp=2 zero=3 recompute=full", SMALL),
        ("tp=2", SMALL),
        ("tp=2 sequence=off", SMALL),
        ("cp=2 exchange=ring", SMALL),
        ("cp=2 exchange=ulysses zero=3", SMALL),
        ("dp=2 ep=2 zero=2 expert_halves=on recompute=full", EXPERTS),
    ],
    4: [
        ("dp=4 shard=2 zero=3", SMALL),
        ("pp=2 dp=2 zero=3 micro_batches=2", SMALL),
        ("dp=2 cp=2 ep=2 zero=3", EXPERTS),
    ],
}


@pytest.mark.parametrize("world", [2, 4])
def test_transfers_as_late_as_they_may_be(
    run_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr("test_verify.FUNCTIONS", "rank_functions_late")
    jobs = [(runs.config(tmp_path, plan, words), "late") for plan, words in PLANS[world]]
    for report in prove(run_ranks, jobs, tmp_path):
        # Accounts may be off: a late update bumps the version of weights that have been asked for, so they come again.
        assert report.first_beyond is None, explain(report)


def test_weights_that_change_before_they_are_sent_are_seen(
    run_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_verify.FUNCTIONS", "rank_functions_late")
    (report,) = prove(run_ranks, [(runs.config(tmp_path, "dp=2 zero=3", SMALL), "overtaken")], tmp_path)
    assert report.first_beyond is not None
    assert report.first_beyond.name == "loss of step 1"
