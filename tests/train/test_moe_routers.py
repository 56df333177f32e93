"""Routers under every axis: losses, loads, biases and drops are those of one process, whatever the cut of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_verify import explain, prove

import runs

Run = Callable[..., list[Any]]
SMALL = ["model.num_layers=2", "model.num_experts=8", "model.expert_ffn_size=6", "train.global_batch=4"]
DEEPSEEK = [
    *SMALL,
    "model.router_scores=sigmoid",
    "model.router_bias=true",
    "model.router_bias_rate=0.05",
    "model.router_groups=4",
    "model.router_top_groups=2",
    "model.router_scale=2.5",
    "model.router_fp32=true",
    "model.router_aux_loss=0.1",
    "model.router_z_loss=0.1",
    "model.shared_ffn_size=10",
    "model.shared_gate=true",
]
CAPACITY = [*SMALL, "model.capacity_factor=0.6", "model.router_z_loss=0.1", "model.shared_ffn_size=7"]
ODD = ["data.sequence_length=13", "train.global_batch=5"]
PLANS: dict[int, list[tuple[str, list[str]]]] = {
    2: [
        ("dp=2 micro_batches=2 zero=1", DEEPSEEK),
        ("dp=2 zero=3 recompute=full", [*DEEPSEEK, "train.global_batch=1"]),
        ("cp=2 exchange=gather", [*DEEPSEEK, *ODD]),
        ("tp=2 zero=1", [*DEEPSEEK, *ODD]),
        ("pp=2 micro_batches=2 recompute=full", DEEPSEEK),
        ("tp=2 sequence=off recompute=full", [*DEEPSEEK, "model.dropout=0.1"]),
        ("dp=2 micro_batch_size=1 zero=2", [*CAPACITY, *ODD]),
        ("cp=2 exchange=ring recompute=full", [*CAPACITY, *ODD]),
        ("tp=2 recompute=full", CAPACITY),
        ("pp=2 micro_batches=2 schedule=zb-h1", CAPACITY),
    ],
}


@pytest.mark.parametrize("world", PLANS)
def test_every_axis_gives_the_bias_of_one_process_after_three_steps(run_ranks: Run, tmp_path: Path, world: int) -> None:
    """Weights, biases among them, gradients and losses of three SGD steps; FLOPs and bytes as `plan` says."""
    jobs = [(runs.config(tmp_path, plan, overrides), "none") for plan, overrides in PLANS[world]]
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path, steps=3), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"
        names = {difference.name for difference in report.differences}
        assert ("weight of blocks.1.moe.bias" in names) == cfg.model_config().router_bias
