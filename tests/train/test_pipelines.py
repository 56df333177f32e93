"""Pipelines in training: numbers, bits and checkpoints of one process, for schedules, ZeRO and tied weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_verify import explain, prove

import runs
from interlace import spec
from interlace.checkpoint import Reader
from interlace.config import loads
from interlace.schedule import generate, lower
from interlace.train import loop, verify

Run = Callable[..., list[Any]]
FUNCTIONS = "rank_functions_train"
TIED = ["model.tie_embeddings=true"]
MIXED = ["model.num_experts=4", "model.expert_ffn_size=8", "model.router_aux_loss=0.1", "model.dropout=0.1"]
FIVE = ["model.num_layers=5"]
PLANS: dict[int, list[tuple[str, list[str], str]]] = {  # by ranks: plan, what else, fault
    2: [
        ("pp=2 schedule=interleaved chunks=2 micro_batches=3", [*FIVE, "train.global_batch=7"], "none"),
        ("pp=2 schedule=zbv micro_batches=4", ["model.num_layers=4", *MIXED, *TIED], "none"),
        ("pp=2 schedule=gpipe micro_batches=2 layers=2/1 overlap=off", TIED, "none"),
        ("pp=2 micro_batches=2", TIED, "tie_left_out"),
        ("pp=2 micro_batches=2", [], "counted_by_every_stage"),
    ],
    3: [
        ("pp=3 schedule=zb-h1 micro_batches=2 recompute=full", [*TIED, *FIVE, "model.dropout=0.1"], "none"),
        ("pp=3 micro_batch_size=3", [*FIVE, "train.global_batch=8"], "none"),
    ],
    4: [
        ("dp=2 pp=2 zero=3 schedule=dualpipev micro_batches=2", ["model.num_layers=4", *TIED], "none"),
        ("dp=2 pp=2 zero=2 micro_batches=3", [*TIED, "train.global_batch=7"], "none"),
        ("dp=2 pp=2 zero=1 schedule=v-half micro_batches=2", ["model.num_layers=4", "model.mlp_bias=true"], "none"),
        ("dp=2 pp=2 zero=3 micro_batches=2", [], "never_freed"),
        ("dp=2 pp=2 zero=3 schedule=zbv micro_batches=3", ["model.num_layers=4", *TIED, *MIXED], "one_stage_at_a_time"),
        ("dp=2 pp=2 zero=3 schedule=OWN micro_batches=3", ["model.num_layers=4", "train.global_batch=7"], "none"),
        ("dp=2 pp=2 zero=3 schedule=interleaved chunks=2 micro_batches=3 unsharded=1", [*FIVE, *TIED], "none"),
        ("tp=2 pp=2 micro_batches=3", [*TIED, *MIXED], "none"),
        ("tp=2 pp=2 sequence=off schedule=zbv micro_batches=2 recompute=full", ["model.num_layers=4"], "none"),
        ("dp=2 pp=2 zero=0", [*TIED, *MIXED, "run.reproducible=plan"], "none"),
        ("dp=2 pp=2 zero=2 schedule=zb-h1", [*TIED, "run.reproducible=plan"], "none"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ranks", PLANS)
def test_pipelines_equal_one_process(ranks: int, run_ranks: Run, tmp_path: Path) -> None:
    own = tmp_path / "own.csv"  # gathers a stage each time that it comes back to it
    own.write_text(lower(generate("zbv", 2, 3), 3, keep=1).to_csv())
    plans = [(plan.replace("OWN", str(own)), words, fault) for plan, words, fault in PLANS[ranks]]
    jobs = [(runs.config(tmp_path, plan, words), fault) for plan, words, fault in plans]
    for (cfg, fault), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed == (fault == "none"), f"{cfg.plan} {fault}\n{explain(report)}"
        if fault in ("never_freed", "one_stage_at_a_time"):
            assert report.first_beyond is None, explain(report)  # the accounts alone tell
            what = "bytes of copies" if fault == "never_freed" else "bytes sent by all_gather"
            off = [a for a in report.accounts if not a.holds and a.what == what]
            assert off
            assert all(a.found > a.expected for a in off)
        elif fault != "none":
            assert report.first_beyond is not None


BOXED: dict[int, list[tuple[str, list[str], str]]] = {  # plan, what else, slots of a box
    2: [
        ("pp=2 schedule=zbv micro_batches=4", ["model.num_layers=4", *MIXED, *TIED], "1"),
        ("pp=2 micro_batches=3 recompute=full", [*FIVE, "train.global_batch=7"], "3"),
    ],
    3: [("pp=3 schedule=interleaved chunks=2 micro_batches=4", ["model.num_layers=7", *TIED], "2")],
}  # fmt: skip


@pytest.mark.parametrize("ranks", BOXED)
def test_pipelines_over_boxes_equal_one_process(
    ranks: int, run_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_verify.FUNCTIONS", "rank_functions_boxes")
    jobs = [(runs.config(tmp_path, plan, words), slots) for plan, words, slots in BOXED[ranks]]
    for report in prove(run_ranks, jobs, tmp_path):
        assert report.passed, explain(report)


FIXED = ["run.reproducible=plan", "train.global_batch=7", "model.num_layers=4", "train.warmup=2", *MIXED]
SAME: dict[int, list[tuple[str, str]]] = {  # by ranks: plan and kind of model
    1: [("dp=1", "plain"), ("dp=1", "tied"), ("dp=1", "bf16"), ("dp=1 micro_batch_size=7", "in one")],
    2: [
        ("pp=2 schedule=zbv", "tied"),
        ("pp=2 schedule=dualpipev", "plain"),
        ("pp=2 schedule=interleaved chunks=2 recompute=full", "plain"),
    ],
    4: [
        ("dp=2 pp=2 zero=3 schedule=zb-h1", "bf16"),
        ("dp=2 pp=2 zero=1 schedule=v-half", "plain"),
        ("pp=4", "tied"),
        ("pp=4 schedule=gpipe", "tied"),
        ("dp=2 pp=2 micro_batch_size=7", "in one"),
    ],
}
KINDS = {"plain": [], "in one": [], "tied": TIED, "bf16": ["train.precision=bf16", *TIED]}


def test_every_pipeline_has_the_bits_of_one_process(run_ranks: Run, tmp_path: Path) -> None:
    """Losses, norms and weights over 3 steps of AdamW; 7 micro-batches on 2 data ranks leave one of them idle."""
    found: dict[int, list[Any]] = {}
    for ranks, pairs in SAME.items():
        cfgs = [runs.config(tmp_path, plan, [*FIXED, *KINDS[kind]]) for plan, kind in pairs]
        jobs = [{"config": cfg.to_toml(), "steps": 3, "fault": "none"} for cfg in cfgs]
        if ranks == 1:
            found[1] = [[verify.bits(runs.alone(), job["config"], 3) for job in jobs]]
        else:
            found[ranks] = run_ranks(f"{FUNCTIONS}:bits_all", ranks, {"jobs": jobs})
    alone = {kind: found[1][0][number] for number, (_, kind) in enumerate(SAME[1])}
    for ranks, pairs in SAME.items():
        for number, (plan, kind) in enumerate(pairs):
            for rank in found[ranks]:
                assert rank[number] == alone[kind], f"{plan} {kind}\n{rank[number]}\n{alone[kind]}"


def test_checkpoints_go_on_under_any_pipeline(run_ranks: Run, tmp_path: Path) -> None:
    """4 steps under one plan, 4 under another: losses, norms and the final state of 8 steps of one process."""
    words = ["train.steps=8", "train.lr_schedule=constant", "run.save_every=4", "model.num_layers=4", *TIED]
    alone = runs.config(tmp_path, "dp=1", words, out="alone")
    loop.run(runs.alone(), alone.to_toml())
    first = runs.config(tmp_path, "dp=2 pp=2 zero=3 schedule=zbv micro_batches=2", [*words, "train.steps=4"], out="a")
    (tmp_path / "own.csv").write_text("# one of our own\n" + generate("1f1b", 4, 3).to_csv())
    then = [
        runs.config(tmp_path, f"pp=4 micro_batches=3 schedule={tmp_path}/own.csv", words, out="b"),
        runs.config(tmp_path, "dp=2 pp=2 zero=2 schedule=zb-h1 micro_batches=2", words, out="c"),
    ]
    jobs = [{"config": first.to_toml()}, *({"config": cfg.to_toml(), "resume": first.run.out} for cfg in then)]
    run_ranks(f"{FUNCTIONS}:train_all", 4, {"jobs": jobs})
    then.append(runs.config(tmp_path, "dp=1", words, out="d"))
    loop.run(runs.alone(), then[-1].to_toml(), first.run.out)
    whole = runs.metrics(alone)
    rows = runs.metrics(first)
    assert len(rows) == 4  # one line a step, whatever the stages
    for number, row in enumerate(rows):
        assert row["loss"] == pytest.approx(whole[number]["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(whole[number]["grad_norm"], rel=1e-5)
    kept = [(Path(cfg.run.out) / "schedule.csv") for cfg in then]
    assert [file.exists() for file in kept] == [True, False, False]
    assert kept[0].read_text() == (tmp_path / "own.csv").read_text()
    recorded = loads((Path(then[0].run.out) / "run.toml").read_text())
    assert recorded == replace(then[0], plan=replace(then[0].plan, schedule=str(kept[0]))), "goes on without the first"
    expected = Reader(Path(alone.run.out) / "checkpoints" / "step-8")
    for cfg in then:
        assert [row["loss"] for row in runs.metrics(cfg)] == pytest.approx([r["loss"] for r in whole[4:]], rel=1e-5)
        made = Reader(Path(cfg.run.out) / "checkpoints" / "step-8")
        assert set(made.names) == set(expected.names)
        for name in expected.names:
            apart = (made.read(name) - expected.read(name)).abs().max()
            assert apart <= 2e-4 * expected.read(name).abs().max(), name  # AdamW amplifies rounding


def test_every_stage_names_the_first_gradient_that_is_no_number(run_ranks: Run, tmp_path: Path) -> None:
    words = ["train.optimizer=sgd", "train.warmup=0", "train.clip=0", "train.learning_rate=1e12", "run.save_every=1"]
    cfg = runs.config(tmp_path, "pp=2 micro_batches=2", [*words, "train.weight_decay=1e12"])
    first, second = run_ranks(f"{FUNCTIONS}:refused", 2, {"config": cfg.to_toml()})
    assert first == second
    assert "and the gradient norm nan, in the gradient of " in first


def test_fewer_micro_batches_than_stages(run_ranks: Run, tmp_path: Path) -> None:
    """Every schedule, with less to do than would fill it (pytorch/torchtitan#775: 1f1b hung)."""
    schedules = ("gpipe", "1f1b", "interleaved chunks=2", "zb-h1", "zbv", "v-half", "dualpipev")
    plans = [f"pp=4 schedule={schedule} micro_batches={count}" for schedule in schedules for count in (1, 2, 3)]
    jobs = [(runs.config(tmp_path, plan, ["model.num_layers=8"]), "none") for plan in plans]
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"


def test_ranks_without_a_loss_log_the_loss_of_all(run_ranks: Run, tmp_path: Path) -> None:
    """One row a step, that of one process, also where a stage has no loss (huggingface/nanotron#405)."""
    plans = ("dp=2 pp=2 zero=1", "dp=2 pp=2 schedule=zbv micro_batches=2", "pp=4 micro_batches=3", "tp=2 pp=2")
    cfgs = [runs.config(tmp_path, plan, ["model.num_layers=4"], out=f"run-{i}") for i, plan in enumerate(plans)]
    run_ranks(f"{FUNCTIONS}:train_all", 4, {"jobs": [{"config": cfg.to_toml()} for cfg in cfgs]})
    alone = runs.config(tmp_path, "dp=1", ["model.num_layers=4"], out="alone")
    loop.run(runs.alone(), alone.to_toml())
    for cfg in cfgs:
        rows = runs.metrics(cfg)
        assert [row["step"] for row in rows] == [1, 2, 3], cfg.plan
        assert [row["loss"] for row in rows] == pytest.approx(runs.losses(alone), rel=1e-5), cfg.plan
        text = (Path(cfg.run.out) / "metrics.jsonl").read_text()
        assert "NaN" not in text, cfg.plan


def test_the_norm_counts_every_element_once(run_ranks: Run, tmp_path: Path) -> None:
    plans = [
        ("dp=2 pp=2 zero=1", TIED),
        ("dp=2 pp=2 zero=3 schedule=zbv", [*TIED, "model.num_layers=4"]),
        ("pp=4", FIVE),
        ("tp=2 pp=2", TIED),
    ]
    cfgs = [runs.config(tmp_path, plan, words) for plan, words in plans]
    for rank in run_ranks(f"{FUNCTIONS}:norms_of_ones", 4, {"configs": [cfg.to_toml() for cfg in cfgs]}):
        for cfg, (norm, clipped) in zip(cfgs, rank, strict=True):
            count = spec.total_parameters(cfg.model_config())  # norms of parts are squared again: some last bits
            assert norm == pytest.approx(count**0.5, rel=1e-15)
            assert clipped == pytest.approx(0.5, rel=1e-4)
