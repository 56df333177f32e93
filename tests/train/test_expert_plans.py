"""Runs under the expert axis: plans against one process, norms, resume under other plans, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_verify import explain, prove

import runs
from interlace import spec
from interlace.config import Config
from interlace.errors import PlanError
from interlace.launch import run_local
from interlace.plan import fit
from interlace.plan.memory import estimate
from interlace.plan.share import share
from interlace.train import loop, verify

Run = Callable[..., list[Any]]
AXES = ("dp", "shard", "tp", "cp", "ep", "pp")
SMALL = ["model.num_layers=2", "model.num_experts=4", "model.expert_ffn_size=8", "model.router_aux_loss=0.1"]
ODD = ["data.sequence_length=13", "train.global_batch=3"]
UNEVEN = ["model.expert_ffn_size=7", "model.vocab_size=265", *ODD]
FOUR = ["model.num_layers=4"]
SHARED = ["model.shared_ffn_size=10", "model.shared_gate=true"]
ROUTER = [
    "model.router_scores=sigmoid",
    "model.router_bias=true",
    "model.router_bias_rate=0.01",
    "model.router_z_loss=0.01",
]
ROOM = ["model.capacity_factor=1.0"]
FIRST = ["model.num_layers=3", "model.dense_layers=[0]", "model.rotary_dim=2"]
OTHERS = ["model.num_layers=5", "model.dense_layers=[0,2,4]"]  # two layers of experts, never side by side
PLANS: dict[int, list[tuple[str, list[str]]]] = {
    2: [
        ("dp=2 ep=2", []),
        ("dp=2 ep=2 zero=3 expert_halves=on recompute=full micro_batches=2", [*SHARED, *ROUTER]),
        ("dp=2 ep=2 zero=2 recompute=selective", [*ODD, *ROOM, "model.dropout=0.1"]),
        ("cp=2 ep=2 zero=1", ["model.num_experts=3", *ODD]),
        ("dp=2 ep=2 zero=3 recompute=full micro_batches=2", [*OTHERS, *SHARED]),
        ("cp=2 ep=2 zero=3", [*FIRST, *ROUTER, *ROOM]),
        ("tp=2 recompute=full", [*FIRST, *SHARED, "model.dropout=0.1"]),
        ("tp=2 sequence=off", [*OTHERS, *UNEVEN]),
        ("dp=2 zero=3", [*OTHERS, *SHARED]),
        ("pp=2 layers=1/2 micro_batches=2", [*FIRST, *ROUTER]),  # a stage without experts
    ],
    3: [
        ("dp=3 ep=3 zero=3 expert_halves=on", ["model.num_experts=5", "train.global_batch=2"]),
        ("cp=3 ep=3 zero=2", ["model.num_experts=4", "data.sequence_length=7"]),
    ],
    4: [
        ("dp=4 ep=4 zero=1", ["model.num_experts=6", "model.experts_per_token=3"]),
        ("dp=4 ep=2", ODD),
        ("dp=4 ep=2 zero=2 micro_batches=2", []),
        ("dp=4 ep=2 zero=3 expert_halves=on overlap=off transport=copy", ["model.num_experts=5"]),
        ("dp=4 ep=2 zero=3 shard=2", []),
        ("dp=4 ep=4 zero=3 expert_halves=on", ["model.experts_per_token=1", "train.global_batch=2"]),
        ("dp=2 ep=2 tp=2 recompute=full", [*UNEVEN, *SHARED, *ROOM]),
        ("dp=2 ep=2 tp=2 zero=3 sequence=off recompute=full expert_halves=on", [*UNEVEN, "model.num_experts=3"]),
        ("cp=2 dp=2 ep=4 zero=3", [*ODD, "model.num_experts=6"]),
        ("pp=2 ep=2 dp=2 zero=3 micro_batches=3", []),
        ("pp=2 ep=2 dp=2 zero=2 schedule=zb-h1 micro_batches=3 expert_halves=on", [*SHARED, *ROUTER]),
        ("dp=4 ep=2 zero=3 micro_batches=2", OTHERS),
        ("dp=2 ep=2 tp=2 zero=3 recompute=full", [*FIRST, *SHARED, *ROOM]),
        ("pp=2 ep=2 dp=2 zero=3 layers=1/2 micro_batches=2", FIRST),
        ("pp=2 ep=2 cp=2 schedule=zb-h1 micro_batches=2 recompute=full", [*OTHERS, *SHARED, *ROUTER]),
        ("pp=2 ep=2 cp=2 zero=1 schedule=zbv micro_batches=2", FOUR),
        ("pp=2 ep=2 dp=2 schedule=interleaved chunks=2 micro_batches=2 recompute=full", FOUR),
    ],
    8: [
        ("dp=8 ep=2 zero=3 shard=4", []),
        ("pp=2 cp=2 tp=2 ep=2 zero=2 micro_batches=2", UNEVEN),
        ("dp=2 cp=2 tp=2 ep=4 zero=3 expert_halves=on", []),
    ],
}


@pytest.mark.parametrize("world", PLANS)
def test_the_expert_axis_equals_one_process(run_ranks: Run, tmp_path: Path, world: int) -> None:
    jobs = [(runs.config(tmp_path, plan, [*SMALL, *overrides]), "none") for plan, overrides in PLANS[world]]
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"


def test_every_expert_counts_once_in_the_norm(run_ranks: Run, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed PR#8478: 4 experts on 2 ranks, squares 20 and 100; and every element 1, in every layout."""
    uneven = [*SMALL, "model.num_experts=5"]
    plans = ["dp=4 ep=2", "dp=4 ep=4 zero=3", "dp=2 tp=2 ep=2 zero=1", "cp=2 dp=2 ep=2 zero=2", "pp=2 dp=2 ep=2 zero=3"]
    cfgs = [runs.config(tmp_path, plan, uneven) for plan in plans]
    expected = spec.total_parameters(cfgs[0].model_config()) ** 0.5
    found = run_ranks("rank_functions_train:norms_of_ones", 4, {"configs": [cfg.to_toml() for cfg in cfgs]})
    for rank in found:
        for cfg, (norm, largest) in zip(cfgs, rank, strict=True):
            assert norm == pytest.approx(expected, rel=1e-12), cfg.plan
            assert largest == pytest.approx(0.5, rel=1e-5), cfg.plan
    two = [runs.config(tmp_path, plan, SMALL).to_toml() for plan in ("dp=2 ep=2", "dp=2 ep=2 zero=3", "dp=2")]
    for rank in run_ranks("rank_functions_expert:norms_of_squares", 2, {"configs": two}):
        assert rank == pytest.approx([120**0.5] * 3, rel=1e-7)


def test_checkpoints_pass_between_every_split_of_experts(run_ranks: Run, tmp_path: Path) -> None:
    """AdamW with weight decay: saved after 2 of 4 steps under one plan, gone on with under others."""
    steps = [*SMALL, "model.num_experts=5", "train.steps=4", "run.save_every=2", "train.weight_decay=0.1"]

    def job(cfg: Config, resume: Path | None = None) -> dict[str, str]:
        return {"config": cfg.to_toml(), "resume": str(resume or "")}

    one = runs.config(tmp_path, "dp=1", steps, out="one")
    loop.run(runs.alone(), **job(one))
    saved = {"a": "dp=2 tp=2 ep=2 zero=3", "b": "dp=4 ep=4 zero=1", "c": "pp=2 dp=2 ep=2 expert_halves=on"}
    cfgs = [runs.config(tmp_path, plan, steps, out=out) for out, plan in saved.items()]
    ways = [
        ("a", "dp=4 ep=2 zero=2"),
        ("b", "dp=2 tp=2"),
        ("c", "dp=2 tp=2 ep=2 sequence=off"),
        ("one", "cp=2 dp=2 ep=4"),
    ]
    back = [runs.config(tmp_path, plan, steps, out=f"from-{source}") for source, plan in ways]
    halves = [tmp_path / source / "checkpoints" / "step-2" for source, _ in ways]
    run_ranks("rank_functions_train:train_all", 4, {"jobs": [*map(job, cfgs), *map(job, back, halves)]}, 120.0)
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in runs.metrics(one)]
        for cfg in cfgs:
            assert [row[key] for row in runs.metrics(cfg)] == pytest.approx(expected, rel=1e-5), (cfg.plan, key)
        for cfg in back:
            assert [row[key] for row in runs.metrics(cfg)] == pytest.approx(expected[2:], rel=1e-5), (cfg.plan, key)
    assert any("ep" in row["waited"] for row in runs.metrics(cfgs[1])), "waits for rows are told by their axis"


def test_bytes_of_weights_and_gradients_in_bf16(run_ranks: Run, tmp_path: Path) -> None:
    """Along the data axis experts travel among those that hold the same; a group of one sends nothing."""
    plans = [f"dp=4 ep={ep} zero={zero} {passes}" for ep, zero, passes in [
        (2, 0, ""), (2, 2, "micro_batches=2"), (2, 3, ""), (4, 1, ""), (4, 3, "micro_batches=2")]]  # fmt: skip
    cfgs = [runs.config(tmp_path, plan, [*SMALL, "train.precision=bf16"]) for plan in plans]
    found = run_ranks("rank_functions_train:sent_by_axis", 4, {"configs": [cfg.to_toml() for cfg in cfgs]})
    for rank, sent in enumerate(found):
        for cfg, by_axis in zip(cfgs, sent, strict=True):
            expected = share(cfg, rank, cfg.train.global_batch).sent
            data = sum(nbytes for axis, nbytes in by_axis.items() if axis in ("dp", "edp"))
            assert data == sum(nbytes for way, nbytes in expected.items() if way != "all_to_all"), cfg.plan
            assert by_axis["ep"] > 0
            assert ("edp" in by_axis) == (cfg.plan.ep == 2)


FEW = ["model.num_layers=1", "data.sequence_length=6", "train.global_batch=2"]
FUSED = {
    "dp=2 ep=2 overlap=fused": [*FEW, *SHARED, *ROUTER, *ROOM, "model.num_experts=5"],
    "cp=2 ep=2 overlap=fused zero=3 recompute=full": [*FEW, "data.sequence_length=7", "model.num_experts=3"],
    "pp=2 dp=2 ep=2 overlap=fused zero=3 micro_batches=2": [*FEW, "model.num_layers=2", "train.global_batch=4"],
    "tp=2 dp=2 ep=2 overlap=fused": [*FEW, *ROOM, "model.expert_ffn_size=7"],
    "dp=3 ep=3 overlap=fused zero=2": [*FEW, "model.num_layers=2", "model.dense_layers=[0]"],  # a rank has no sequence
    "pp=2 dp=2 ep=2 overlap=fused zero=2 schedule=zb-h1 micro_batches=2": [
        *FEW, "model.num_layers=2", "train.global_batch=4"
    ],
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", FUSED)
def test_the_fused_exchange_is_proven_and_accounted(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its FLOPs and bytes are what its table counted on the device; the memory that peers write to is no weight."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    monkeypatch.setattr(verify, "UNDER_PLAN", "rank_functions_expert:under_a_fused_plan")
    report = verify.verify(runs.config(tmp_path, plan, [*SMALL, *FUSED[plan]]), 2)
    assert report.passed, explain(report)


@pytest.mark.ranks
@pytest.mark.parametrize(("word", "room"), [("overlap=fused", "2"), ("overlap=fused expert_room=1.5", "1.5"), ("", "")])
def test_a_run_says_that_it_takes_the_fused_exchange(
    word: str, room: str, run_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    said = [f"rows to experts: fused exchange, room for {room} times the even rows at first"] if room else []
    config = runs.config(tmp_path, f"dp=2 ep=2 {word}", [*SMALL, *FEW]).to_toml()
    found = run_ranks("rank_functions_expert:notes", 2, {"config": config})
    assert found == [[said, float(room) if room else None]] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("under", ["under_a_plan_on_gpus", "under_a_plan_on_cpus"])
def test_auto_takes_the_fused_exchange_on_gpus(under: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    monkeypatch.setattr(verify, "UNDER_PLAN", f"rank_functions_expert:{under}")
    report = verify.verify(runs.config(tmp_path, "dp=2 ep=2", [*SMALL, *FEW]), 2)
    assert report.passed, explain(report)


@pytest.mark.ranks
def test_where_the_fused_exchange_does_not_run_it_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(verify, "UNDER_PLAN", "rank_functions_expert:under_a_plan_that_falls_back")
    report = verify.verify(runs.config(tmp_path, "dp=2 ep=2 overlap=fused expert_halves=on", [*SMALL, *FEW]), 2)
    assert report.passed, explain(report)


@pytest.mark.gpu2
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 ep=2",
        "cp=2 ep=2 zero=3 expert_halves=on",
        "dp=2 ep=2 recompute=full zero=2",
        "dp=2 ep=2 overlap=fused",
        "cp=2 ep=2 overlap=fused zero=3",
        "dp=2 ep=2 overlap=fused recompute=full zero=2",
    ],
)
def test_two_gpus_equal_one(plan: str, tmp_path: Path) -> None:
    """Odd rows, experts that 2 does not divide, a shared one, choices that are dropped."""
    cfg = runs.config(tmp_path, plan, [*SMALL, *ODD, *SHARED, *ROOM, "model.num_experts=5"])
    report = verify.verify(cfg, 2, "cuda")
    assert report.passed, explain(report)


@pytest.mark.gpu2
@pytest.mark.timeout(300)
def test_two_gpus_fuse_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks and pieces, a dense layer before them, a rank's tokens not those of the other."""
    sizes = ["model.hidden_size=64", "model.expert_ffn_size=48", "model.num_layers=3", "model.dense_layers=[0]"]
    sizes += ["data.sequence_length=301", "train.global_batch=3", "model.max_positions=301", "model.num_experts=5"]
    monkeypatch.setattr(verify, "UNDER_PLAN", "rank_functions_expert:under_a_fused_plan")
    report = verify.verify(
        runs.config(tmp_path, "dp=2 ep=2 overlap=fused zero=3", [*SMALL, *sizes, *SHARED]), 2, "cuda"
    )
    assert report.passed, explain(report)


@pytest.mark.gpu2
@pytest.mark.timeout(300)
def test_two_gpus_train_in_bf16(tmp_path: Path) -> None:
    """Grouped products, experts whole on their rank and copies that compute: losses near those of one GPU."""
    sizes = ["model.hidden_size=64", "model.expert_ffn_size=64", "train.precision=bf16", "train.steps=3"]
    found = []
    for plan in (
        "dp=1",
        "dp=2 ep=2 zero=3 expert_halves=on",
        "dp=2 ep=2 zero=3 overlap=fused",
        "dp=2 ep=2 expert_room=1",
    ):
        cfg = runs.config(tmp_path, plan, [*SMALL, *sizes], out=plan.replace(" ", "-"))
        run_local("interlace.train.loop:run", cfg.plan.world, {"config": cfg.to_toml(), "resume": ""}, device="cuda")
        found.append(runs.losses(cfg))
    assert found[1:] == [pytest.approx(found[0], rel=5e-3)] * 3


@pytest.mark.parametrize(
    ("plan", "overrides", "reason", "near"),
    [
        ("dp=2 ep=2", ["model.num_experts=0"], "asks for ep=2, and the model has no experts", '"dp=2"'),
        ("dp=4 ep=8", [], "asks for ep=8, found 4 experts", '"dp=4 ep=4"'),
        ("dp=2 tp=2 ep=4", [], "asks for ep=4, which does not divide dp x cp = 2, whose ranks it folds",
         '"dp=2 tp=2 ep=2"'),
        ("dp=6 ep=4", [], "asks for ep=4, which does not divide dp x cp = 6", '"dp=6 ep=3"'),
        ("dp=2 ep=2", ["run.reproducible=plan"], 'splits over ep with run.reproducible = "plan"', '"dp=2"'),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, plan: str, overrides: list[str], reason: str, near: str) -> None:
    cfg = runs.config(tmp_path, plan, [*SMALL, *overrides])
    with pytest.raises(PlanError) as refused:
        fit.check(cfg, cfg.plan.world, available_axes=AXES)
    assert reason in str(refused.value)
    assert str(refused.value).endswith(f"the nearest that works is {near}")


@pytest.mark.parametrize(("given", "room"), [("", 2), (" expert_room=1.25", 1.25), (" expert_room=9", 2)])
def test_the_fused_exchange_needs_room_for_more_than_the_even_rows(given: str, room: float, tmp_path: Path) -> None:
    """At most for both ranks' choices, in whole blocks of 64 for each of two experts: in every layer, and once on their
    way."""
    words = [*SMALL, "model.expert_ffn_size=200", "data.sequence_length=512", "model.max_positions=512"]
    plain, fused = (
        estimate(cfg, cfg.plan, "cpu")
        for plan in ("dp=2 ep=2", f"dp=2 ep=2 overlap=fused{given}")
        for cfg in [runs.config(tmp_path, plan, words)]
    )
    D, F, choices = 16, 200, 4 * 512 * 2
    slots = int(room * choices) + 2 * 63 + 2  # rounded up to blocks
    assert slots % 64 == 0
    kept = slots * (D + 2 * F) * 4 - choices * ((2 * D + 4 * F) * 4 + 8 + 16)
    peers = slots * (D * 4 + 8) + choices * (D * 4 + 4) + 2 * 2 * 4 * 4 + 4
    moving = peers + slots * (D + 3 * F) * 4 - 2 * choices * D * 4
    assert fused.activations - plain.activations == 2 * kept + moving
    assert fused.parameters == plain.parameters


def test_auto_counts_the_way_of_experts_that_needs_more(tmp_path: Path) -> None:
    """Whether ranks address each other's memory, nobody knows before they run; on CPUs it is the all-to-all."""
    words = [*SMALL, "model.expert_ffn_size=200", "data.sequence_length=512", "model.max_positions=512"]
    words += ["train.precision=bf16"]

    def needed(plan: str, device: str = "cuda", *more: str) -> int:
        cfg = runs.config(tmp_path, f"dp=2 ep=2 expert_room=1.5 {plan}", [*words, *more])
        return estimate(cfg, cfg.plan, device).activations

    many = "cuda", "model.num_layers=12"  # each keeps less than with the all-to-all, and one has more in its hands
    assert needed("", *many) == needed("overlap=plain", *many) > needed("overlap=fused", *many)
    assert needed("") == needed("overlap=fused") > needed("overlap=plain")
    for same in ((" ", "cpu"), ("expert_halves=on",), ("", "cuda", "model.expert_ffn_size=201")):
        assert needed(same[0], *same[1:]) == needed(f"{same[0]} overlap=plain", *same[1:])


def test_a_rank_needs_less_memory_for_fewer_experts(tmp_path: Path) -> None:
    needs = [
        estimate(cfg, cfg.plan, "cpu")
        for plan in ("dp=4", "dp=4 ep=2", "dp=4 ep=4")
        for cfg in [runs.config(tmp_path, plan, [*SMALL, "model.expert_ffn_size=200"])]
    ]
    assert needs[0].parameters > needs[1].parameters > needs[2].parameters
    whole = 3 * 4 * 2 * 16 * 200 * 4  # matrices x experts x layers x D x F x bytes
    assert needs[0].parameters - needs[2].parameters == pytest.approx(whole * 3 / 4, rel=0.02)
    split = [runs.config(tmp_path, f"dp=4 ep={ep} zero=3", SMALL) for ep in (1, 2, 4)]
    held = [estimate(cfg, cfg.plan, "cpu").optimizer for cfg in split]
    assert held == pytest.approx([held[0]] * 3, rel=0.05), "ZeRO splits what ep leaves"


def test_plans_drawn_for_a_sweep_fold_experts(tmp_path: Path) -> None:
    cfg = runs.config(tmp_path, "dp=1", SMALL)
    drawn = fit.random_plans(cfg, 40, seed=0, available_axes=AXES)
    assert {plan.ep for plan in drawn} >= {1, 2, 4}
    assert {plan.expert_halves for plan in drawn} == {"on", "off"}
