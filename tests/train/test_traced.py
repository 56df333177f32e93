"""Blocks are traced as for the compiler, transfers stay outside; without its slow back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runs
from interlace.train import loop

SHORT = ["model.num_layers=1", "train.steps=2"]
EXPERTS = [
    "model.num_experts=4",
    "model.expert_ffn_size=8",
    "model.router_aux_loss=0.1",
    "model.shared_ffn_size=10",
    "model.shared_gate=true",
    "model.capacity_factor=0.8",
]
PLANS = {
    "tp=2": [],
    "cp=2": [],
    "dp=2 ep=2 recompute=full expert_halves=on": EXPERTS,
    "dp=2 ep=2 overlap=fused": EXPERTS,
    "tp=2 recompute=full": EXPERTS,
}


def test_traced_blocks_give_the_same_losses(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one start of ranks: what the tracer imports takes longer than a run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    traced = {
        plan: runs.config(tmp_path, plan, [*SHORT, *words, "train.compile=true"], out=f"traced-{number}")
        for number, (plan, words) in enumerate(PLANS.items())
    }
    jobs = [{"config": cfg.to_toml(), "resume": ""} for cfg in traced.values()]
    run_ranks("rank_functions_train:traced_all", 2, {"jobs": jobs}, 150.0)
    for number, words in enumerate(({tuple(words): words for words in PLANS.values()}).values()):
        plain = runs.config(tmp_path, "dp=1", [*SHORT, *words], out=f"plain-{number}")
        loop.run(runs.alone(), plain.to_toml(), "")
        for plan, cfg in traced.items():
            if PLANS[plan] != words:
                continue
            for row, other in zip(runs.metrics(cfg), runs.metrics(plain), strict=True):
                for key in ("loss", "grad_norm", *(("busiest", "idle", "dropped") if words else ())):
                    assert row[key] == pytest.approx(other[key], rel=1e-5), (plan, key)
            assert not words or row["dropped"] > 0
