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
    "dense": {"tp=2": [], "cp=2": []},
    "experts": {
        "dp=2 ep=2 recompute=full expert_halves=on": EXPERTS,
        "dp=2 ep=2 overlap=fused": EXPERTS,
        "tp=2 recompute=full": EXPERTS,
    },
}


@pytest.mark.parametrize("model", PLANS)
def test_traced_blocks_give_the_same_losses(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """In one start of ranks for each model: what the tracer imports takes longer than a run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    plans = PLANS[model]
    traced = {
        plan: runs.config(tmp_path, plan, [*SHORT, *words, "train.compile=true"], out=f"traced-{number}")
        for number, (plan, words) in enumerate(plans.items())
    }
    jobs = [{"config": cfg.to_toml(), "resume": ""} for cfg in traced.values()]
    run_ranks("rank_functions_train:traced_all", 2, {"jobs": jobs, "words": model == "dense"}, 150.0)
    (words,) = {tuple(words) for words in plans.values()}
    plain = runs.config(tmp_path, "dp=1", [*SHORT, *words], out="plain")
    loop.run(runs.alone(), plain.to_toml(), "")
    for plan, cfg in traced.items():
        for row, other in zip(runs.metrics(cfg), runs.metrics(plain), strict=True):
            for key in ("loss", "grad_norm", *(("busiest", "idle", "dropped") if words else ())):
                assert row[key] == pytest.approx(other[key], rel=1e-5), (plan, key)
        assert not words or row["dropped"] > 0
