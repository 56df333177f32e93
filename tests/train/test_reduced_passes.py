"""Gradients that travel after each micro-batch (reduce=micro_batch): the numbers of one process, and the bytes told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_verify import FUNCTIONS, explain, prove

import runs
from interlace.plan.share import share

EACH = "reduce=micro_batch"
EXPERTS = ["model.num_experts=4", "model.expert_ffn_size=8", "model.router_aux_loss=0.1"]
PLANS = {
    "dp=4 zero=0 micro_batches=2": ["train.global_batch=11"],
    "dp=4 zero=1 micro_batches=3": ["train.global_batch=13"],
    "dp=4 zero=2 micro_batches=2 overlap=off": ["model.tie_embeddings=true"],
    "dp=4 zero=2 micro_batch_size=1": ["train.global_batch=7"],
    "dp=4 zero=3 micro_batches=3 recompute=full": ["train.global_batch=13", "model.dropout=0.1"],
    "dp=4 shard=2 zero=2 micro_batches=2": [],
    "dp=4 shard=2 zero=3 micro_batches=2 transport=copy": [],
    "tp=2 dp=2 zero=0 micro_batches=2": ["model.qk_norm=true", "model.out_bias=true"],
    "tp=2 dp=2 zero=3 micro_batches=2": ["model.qkv_bias=true", "model.tie_embeddings=true"],
    "tp=4 dp=1 micro_batches=2 sequence=off": ["model.num_kv_heads=2"],
    "cp=2 dp=2 zero=2 micro_batches=2": [],
    "ep=2 dp=4 zero=2 micro_batches=2": EXPERTS,
    "ep=4 dp=2 cp=2 zero=1 micro_batches=2": EXPERTS,
    "pp=2 dp=2 zero=0 micro_batches=3": ["train.global_batch=7"],
    "pp=2 dp=2 zero=2 micro_batches=4 schedule=zb-h1": ["model.tie_embeddings=true"],
    "pp=2 dp=2 zero=3 micro_batches=4 schedule=interleaved chunks=2": ["model.num_layers=4"],
    "pp=2 tp=2 micro_batches=3 schedule=zbv": ["model.num_layers=4", "model.qk_norm=true"],
}


def test_every_axis_equals_one_process(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    jobs = [(runs.config(tmp_path, f"{plan} {EACH}", more), "none") for plan, more in PLANS.items()]
    reports = prove(run_ranks, jobs, tmp_path)
    wrong = [explain(report) for report in reports if not report.passed]
    assert not wrong, "\n\n".join(wrong)


def test_gradients_in_bf16_are_never_added_up_before_they_travel(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """So two micro-batches send as many bytes as the step that adds them up in fp32."""
    words = ["train.precision=bf16", "model.dropout=0"]
    sent = {}
    for each in ("", EACH):
        cfgs = [runs.config(tmp_path, f"dp=2 zero={zero} micro_batches=2 {each}", words) for zero in range(4)]
        found = run_ranks(f"{FUNCTIONS}:sent_by_axis", 2, {"configs": [cfg.to_toml() for cfg in cfgs]})
        for rank, by_plan in enumerate(found):
            for cfg, by_axis in zip(cfgs, by_plan, strict=True):
                assert sum(by_axis.values()) == sum(share(cfg, rank, cfg.train.global_batch).sent.values()), cfg.plan
        sent[each] = [by_axis["dp"] for by_axis in found[0]]
    assert sent[""][1:] == sent[EACH][1:]


def test_bytes_of_hybrid_sharding_in_bf16(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """What crosses between the groups are sums, in fp32."""
    passes, words = ("", "micro_batches=2", f"micro_batches=2 {EACH}"), ["train.precision=bf16", "model.dropout=0"]
    cfgs = [runs.config(tmp_path, f"dp=4 shard=2 zero={zero} {more}", words) for zero in (1, 3) for more in passes]
    cfgs.append(runs.config(tmp_path, "dp=4 shard=2 zero=2 micro_batches=2", [*words, "train.reduce_dtype=bf16"]))
    found = run_ranks(f"{FUNCTIONS}:sent_by_axis", 4, {"configs": [cfg.to_toml() for cfg in cfgs]})
    for rank, by_plan in enumerate(found):
        for cfg, by_axis in zip(cfgs, by_plan, strict=True):
            told = share(cfg, rank, cfg.train.global_batch).along
            assert by_axis == {axis: sum(moved.values()) for axis, moved in told.items()}, cfg.plan


def test_no_whole_gradient_stays_between_passes(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    plans = [f"dp=2 zero={zero} micro_batches=3 {each}" for zero in (2, 3) for each in ("", EACH)]
    cfgs = [runs.config(tmp_path, plan) for plan in plans]
    for rank, found in enumerate(
        run_ranks(f"{FUNCTIONS}:held_between_passes", 2, {"configs": [c.to_toml() for c in cfgs]})
    ):
        for cfg, held in zip(cfgs, found, strict=True):
            shard = share(cfg, rank, cfg.train.global_batch).gradients
            whole = 2 * shard
            assert held == [0, *[shard if cfg.plan.reduce == "micro_batch" else whole] * 2], cfg.plan
