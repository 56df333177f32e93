"""Runs of models with latent attention: every axis against one process, and gradients of what all heads share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_verify import explain, prove

import runs
from interlace.train import verify

Run = Callable[..., list[Any]]
SHAPES = ["model.num_kv_heads=4", "model.head_dim=6", "model.rotary_dim=2", "model.num_layers=2"]
LATENT = [*SHAPES, "model.kv_rank=5", "model.q_rank=7", "model.value_dim=3"]
WHOLE = [*SHAPES, "model.kv_rank=5"]  # queries of all features, values as wide as keys
ODD = ["data.sequence_length=13", "train.global_batch=3", "model.vocab_size=265", "model.ffn_size=23"]
EXPERTS = ["model.num_experts=4", "model.expert_ffn_size=8", "model.router_scores=sigmoid", "model.router_bias=true"]
EXPERTS += ["model.shared_ffn_size=10", "model.dense_layers=[0]", "model.router_fp32=true"]
PLANS: dict[int, list[tuple[str, list[str]]]] = {
    2: [
        ("tp=2", [*LATENT, *ODD]),
        ("tp=2 sequence=off recompute=full", [*WHOLE, *ODD]),
        ("tp=2 recompute=selective", [*WHOLE, "model.dropout=0.1", "model.attention_dropout=0.1"]),
        ("dp=2 zero=3 recompute=full", LATENT),
        ("cp=2 exchange=ring", [*LATENT, *ODD]),
        ("cp=2 exchange=gather zero=2", [*WHOLE, *ODD, "model.sliding_window=5"]),
        ("cp=2 exchange=ulysses recompute=full", [*LATENT, *ODD]),
        ("pp=2 schedule=zb-h1 micro_batches=3", LATENT),
    ],
    4: [
        ("tp=4", [*LATENT, *ODD, "model.out_bias=true"]),
        ("tp=4 sequence=off", [*LATENT, "model.attention_sinks=true"]),
        ("dp=2 tp=2 ep=2 zero=3 recompute=full", [*LATENT, *EXPERTS, *ODD]),
        ("tp=2 cp=2 zero=1 exchange=ulysses", [*LATENT, *ODD]),
        ("pp=2 tp=2 micro_batches=2", [*WHOLE, *EXPERTS]),
        ("dp=4 shard=2 zero=2", LATENT),
    ],
}


@pytest.mark.filterwarnings("ignore:attention dropout")
@pytest.mark.parametrize("world", PLANS)
def test_every_axis_equals_one_process(run_ranks: Run, tmp_path: Path, world: int) -> None:
    jobs = [(runs.config(tmp_path, plan, overrides), "none") for plan, overrides in PLANS[world]]
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"


@pytest.mark.gpu2
@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        "tp=2 sequence=off recompute=full",
        "dp=2 zero=3 recompute=selective",
        "cp=2 exchange=ring",
        "cp=2 exchange=ulysses",
        "pp=2 micro_batches=2",
    ],
)
def test_two_gpus_equal_one(plan: str, tmp_path: Path) -> None:
    report = verify.verify(runs.config(tmp_path, plan, [*LATENT, *ODD]), 2, "cuda")
    assert report.passed, explain(report)
