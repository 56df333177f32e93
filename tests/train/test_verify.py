"""The proof itself: it holds for every plan and kind of model, and every fault planted in our own code fails it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import rank_functions_train as functions
import runs
from interlace.cli import app
from interlace.config import Config, ParallelPlan
from interlace.plan.share import runs as share_runs
from interlace.plan.share import share
from interlace.train import verify
from interlace.train.difference import Truth
from interlace.train.verify import Account, Difference, Report, judge, lines

FUNCTIONS = "rank_functions_train"
FEATURES = {
    "plain": [],
    "micro batches": ["parallel.plan=dp=3 zero=3 micro_batches=2"],
    "micro batches of one": ["parallel.plan=dp=3 zero=2 micro_batch_size=1", "train.global_batch=7"],
    "selective": ["parallel.plan=dp=3 zero=3 recompute=selective", "model.attention_dropout=0.1"],
    "full": ["parallel.plan=dp=3 zero=3 recompute=full", "model.dropout=0.1"],
    "tied": ["model.tie_embeddings=true"],
    "biases": ["model.norm=layernorm", "model.activation=gelu", "model.qkv_bias=true", "model.out_bias=true",
               "model.mlp_bias=true", "model.qk_norm=true"],
    "dropout": ["model.dropout=0.1", "model.attention_dropout=0.1"],
    "experts": ["model.num_experts=4", "model.expert_ffn_size=8", "model.router_aux_loss=0.1", "train.global_batch=2"],
    "joined": ["data.documents=joined"],
    "window": ["model.sliding_window=5", "model.window_layers=[0, 2]"],
    "uneven": ["train.global_batch=5", "train.clip=0"],
    "decay": ["train.weight_decay=0.5"],
    "fixed order": ["run.reproducible=plan", "train.global_batch=7"],
    "fixed order, zero 0": ["parallel.plan=dp=3 zero=0 micro_batch_size=2", "run.reproducible=plan"],
    "fixed order, zero 1": ["parallel.plan=dp=3 zero=1 micro_batch_size=3", "run.reproducible=plan"],
    "fixed order, zero 2": ["parallel.plan=dp=3 zero=2 overlap=off", "run.reproducible=plan", "train.global_batch=2"],
    "end of an epoch": ["parallel.plan=dp=3 zero=3 micro_batch_size=8", "train.global_batch=100"],
}  # fmt: skip


def prove(run: Callable[..., Any], jobs: list[tuple[Config, str]], folder: Path, steps: int = 2) -> list[Report]:
    """Reports of several configurations of one world: its ranks start once, the references run in this process.

    So does that in fp64, where tensors differ.
    """
    jobs = [(verify.checked(cfg), fault) for cfg, fault in jobs]
    argued, references, known = [], [], dict[str, tuple[Path, Any]]()
    for number, (cfg, fault) in enumerate(jobs):
        place = folder / f"job-{number}"
        place.mkdir()
        text = cfg.to_toml().replace(f'plan = "{cfg.plan}"', "")
        if text not in known:
            known[text] = place, verify.reference(runs.alone(), cfg.to_toml(), steps, str(place))
        source, alone = known[text]
        for file in source.glob("*-reference") if source != place else ():
            (place / file.name).hardlink_to(file)
        references.append(alone)
        argued.append({"config": cfg.to_toml(), "steps": steps, "folder": str(place), "fault": fault})
    world = jobs[0][0].plan.world
    if world == 1:
        found = [functions.verify_all(runs.alone(), argued)]
    else:
        found = run(f"{FUNCTIONS}:verify_all", world, {"jobs": argued})

    def judged(number: int) -> Report:
        cfg, place = jobs[number][0], folder / f"job-{number}"

        @functools.cache
        def exactly() -> bool:
            verify.truth(runs.alone(), replace(cfg, plan=ParallelPlan()).to_toml(), steps, str(place))
            return True

        return judge(cfg, place, references[number], [rank[number] for rank in found], exactly)

    return [judged(number) for number in range(len(jobs))]


def explain(report: Report) -> str:
    return "\n".join(lines(report))


def zeros(folder: Path, dp: int) -> list[tuple[Config, str]]:
    return [(runs.config(folder, f"dp={dp} zero={zero}", ["train.global_batch=7"]), "none") for zero in range(4)]


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_every_zero_stage_equals_one_process(dp: int, run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    for report in prove(run_ranks, zeros(tmp_path, dp), tmp_path):
        assert report.passed, explain(report)
        assert len(report.accounts) == dp * 8


def test_hybrid_sharding_equals_one_process(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Shards over 2 neighbours, repeated over 2 such groups; and the same of 2 and 3, and of 3 and 2, in 6 ranks."""
    plans = ["dp=4 shard=2 zero=1", "dp=4 shard=2 zero=2 micro_batches=2"]
    plans += ["dp=4 shard=2 zero=3 overlap=off transport=copy"]
    jobs = [(runs.config(tmp_path, plan), "none") for plan in plans]
    fixed = ["run.reproducible=plan", "train.global_batch=7", "model.tie_embeddings=true"]
    jobs += [(runs.config(tmp_path, f"dp=4 shard=2 zero={zero}", fixed), "none") for zero in (1, 2, 3)]
    jobs += [(runs.config(tmp_path, plan), "replicas_apart") for plan in plans]
    for (cfg, fault), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed == (fault == "none"), f"{cfg.plan}\n{explain(report)}"
    six = tmp_path / "six"
    six.mkdir()
    jobs = [(runs.config(six, "dp=6 shard=3 zero=3"), "none"), (runs.config(six, "dp=6 shard=2 zero=1"), "none")]
    for report in prove(run_ranks, jobs, six):
        assert report.passed, explain(report)


def test_only_a_shard_crosses_between_the_groups(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Along `replica` travel the gradients of a shard, there and back; weights and the rest stay inside `shard`."""
    plans = [(4, 2), (6, 3), (6, 2)]
    for dp in (4, 6):
        cfgs = [runs.config(tmp_path, f"dp={dp} shard={s} zero={z}") for n, s in plans if n == dp for z in (1, 2, 3)]
        found = run_ranks(f"{FUNCTIONS}:sent_by_axis", dp, {"configs": [cfg.to_toml() for cfg in cfgs]})
        for rank in found:
            for cfg, sent in zip(cfgs, rank, strict=True):
                inner, outer = cfg.plan.shard, dp // cfg.plan.shard
                whole = 4 * sum(run.cut.total for run in share_runs(cfg.model_config(), dp))
                assert sent["replica"] == 2 * whole // inner * (outer - 1) // outer
                once = 2 * whole // inner * (inner - 1)
                assert sent["shard"] > once if cfg.plan.zero == 3 else sent["shard"] == once
                assert sent["dp"] == 16 * (dp - 1)  # loss and norm


def test_bytes_sent_in_bf16(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Gradients travel in bf16 when a step has one pass or a fixed order, in fp32 when several add up before."""
    words = ("", "micro_batches=2"), ("run.reproducible=none", "run.reproducible=plan")
    cfgs = [
        runs.config(tmp_path, f"dp=2 zero={zero} {passes}", ["train.precision=bf16", "model.dropout=0", order])
        for zero in range(4) for passes in words[0] for order in words[1]
    ]  # fmt: skip
    found = run_ranks(f"{FUNCTIONS}:sent_by_axis", 2, {"configs": [cfg.to_toml() for cfg in cfgs]})
    for rank, sent in enumerate(found):
        for cfg, by_axis in zip(cfgs, sent, strict=True):
            expected = share(cfg, rank, cfg.train.global_batch).sent
            assert sum(by_axis.values()) == sum(expected.values()), f"{cfg.plan} {cfg.run.reproducible}"


def test_every_zero_stage_of_one_rank(tmp_path: Path) -> None:
    for report in prove(pytest.fail, zeros(tmp_path, 1), tmp_path, steps=3):
        assert report.passed, explain(report)


@pytest.mark.filterwarnings("ignore:attention dropout")
def test_every_kind_of_model_and_batch(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    jobs = [(runs.config(tmp_path, "dp=3 zero=3", overrides), "none") for overrides in FEATURES.values()]
    for name, report in zip(FEATURES, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{name}\n{explain(report)}"


BIASES = ["model.norm=layernorm", "model.out_bias=true", "model.mlp_bias=true", "model.qkv_bias=true"]
UNEVEN = ["model.vocab_size=265", "model.ffn_size=23", "data.sequence_length=13", "train.global_batch=3"]
TENSOR = {
    "tp=4": UNEVEN,  # 2 key-value heads
    "tp=4 sequence=off": [*UNEVEN, "model.qk_norm=true", *BIASES],
    "tp=2 dp=2 zero=3 recompute=full": ["model.dropout=0.1", "model.tie_embeddings=true", *UNEVEN],
    "tp=2 dp=2 zero=2 micro_batches=2 recompute=selective": [*BIASES, "model.qk_norm=true"],
    "tp=2 dp=2 zero=1 overlap=off": FEATURES["experts"],
    "tp=2 dp=2 zero=0 sequence=off": FEATURES["experts"],
    "tp=2 dp=2 shard=0 zero=3 sequence=off": ["model.dropout=0.1", "model.attention_dropout=0.1"],
    "tp=2 dp=2 zero=3": ["model.num_heads=6", "model.num_kv_heads=3", "model.qk_norm=true", *BIASES],  # 3 over 2
    "tp=2 cp=2 zero=1": ["model.num_heads=6", "model.num_kv_heads=3", "model.attention_dropout=0.1", *UNEVEN],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:attention dropout")
def test_the_tensor_axis_equals_one_process(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    jobs = [(runs.config(tmp_path, plan, overrides), "none") for plan, overrides in TENSOR.items()]
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"
    three = tmp_path / "three"
    three.mkdir()
    heads = ["model.num_heads=3", "model.num_kv_heads=3", "model.hidden_size=14", *UNEVEN]
    jobs = [(runs.config(three, plan, heads), "none") for plan in ("tp=3 dp=1", "tp=3 sequence=off")]
    for report in prove(run_ranks, jobs, three):
        assert report.passed, explain(report)


def test_planted_faults_of_the_tensor_axis(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Each is found by the tensor that it makes wrong."""
    faults = {
        ("unpaid", "tp=4"): "gradient of blocks.0.attention_norm.weight",
        ("paid_twice", "tp=4"): "gradient of blocks.0.attention_norm.weight",
        ("replicas_unpaid", "tp=4"): "gradient of blocks.0.attention.k.weight",
        ("bias_on_every_rank", "dp=2 tp=2"): "loss of step 2",
        ("masks_of_the_first_rows", "dp=2 tp=2 zero=1"): "loss of step 1",
    }
    more = ["model.dropout=0.1", *BIASES]
    jobs = [(runs.config(tmp_path, plan, more), fault) for fault, plan in faults]
    for (fault, _), report in zip(faults, prove(run_ranks, jobs, tmp_path), strict=True):
        assert not report.passed, fault
        names = [difference.name for difference in report.differences if not difference.equal]
        assert faults[fault, _] in names, (fault, names)


def test_planted_faults(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    def job(fault: str, zero: int) -> tuple[Config, str]:
        return runs.config(tmp_path, f"dp=2 zero={zero}"), fault

    jobs = [
        job("none", 3),
        *(job("scaled_on_one_rank", zero) for zero in range(4)),
        *(job("left_out", zero) for zero in range(4)),
        job("own_buffers", 3),
        job("hidden_clones", 3),
        job("mean_of_means", 0),
        job("stale_weights", 1),
        job("drifting_replica", 0),
        job("none", 0),
    ]
    reports = prove(run_ranks, jobs, tmp_path)
    for (cfg, fault), report in zip(jobs, reports, strict=True):
        assert report.passed == (fault == "none"), f"{fault} {cfg.plan}\n{explain(report)}"
        if fault == "left_out":
            assert report.first_beyond is not None
            assert "blocks.1.mlp.up.weight" in report.first_beyond.name
        if fault in ("own_buffers", "hidden_clones"):  # right numbers, kept by all: the accounts alone tell
            assert report.first_beyond is None
            assert "gives the right numbers but is not split" in explain(report)
            what = "bytes of copies" if fault == "own_buffers" else "bytes of all tensors"
            assert [a.rank for a in report.accounts if not a.holds and a.what == what] == [0, 1]
        elif fault != "none":
            assert "does NOT equal one process" in explain(report)


NOISY = ["model.num_layers=2", "model.hidden_size=32", "model.head_dim=2", "model.num_heads=4", "model.num_kv_heads=4",
         "model.ffn_size=16", "model.qkv_bias=true", "model.mlp_bias=true", "model.qk_norm=true", "model.init_std=0.5",
         "model.rope_theta=1e6", "model.vocab_size=300", "data.sequence_length=24", "train.global_batch=2",
         "data.documents=joined"]  # fmt: skip
MIXED = ["model.num_layers=3", "model.hidden_size=32", "model.head_dim=8", "model.num_heads=2", "model.num_kv_heads=2",
         "model.ffn_size=8", "model.qkv_bias=true", "model.init_std=0.5", "model.num_experts=3",
         "model.expert_ffn_size=8", "data.sequence_length=13", "train.global_batch=3"]  # fmt: skip
KEYS = "gradient of blocks.1.attention.k.bias"


def test_what_rounding_does_in_one_process_too_is_no_difference(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Models whose biases hardly move the loss: rounding is more than 1e-5 of their gradients, also in one process."""
    jobs = [(runs.config(tmp_path, "tp=4", NOISY), "none"), (runs.config(tmp_path, "tp=2 cp=2", MIXED), "none")]
    noisy = []
    for report in prove(run_ranks, jobs, tmp_path):
        assert report.passed, explain(report)
        found = [difference for difference in report.differences if difference.error > verify.TOLERANCE]
        assert ("but no more than rounding in one process may be" in explain(report)) == bool(found)
        noisy += [difference.name for difference in found]
    assert any(name.endswith("attention.k.bias") for name in noisy), "all were equal anyway"


@pytest.mark.parametrize("factor", [2.0, 1.01, 0.0, float("nan")])
def test_a_factor_on_such_a_gradient_is_a_difference(tmp_path: Path, factor: float) -> None:
    cfg = verify.checked(runs.config(tmp_path, "dp=1", NOISY))
    alone = verify.reference(runs.alone(), cfg.to_toml(), 2, str(tmp_path))
    found = functions.verify_all(runs.alone(), [{"config": cfg.to_toml(), "steps": 2, "folder": str(tmp_path)}])
    gradients = load_file(tmp_path / "gradient-plan-0")
    key = KEYS.removeprefix("gradient of ")
    assert gradients[key].abs().max() < 0.05 * max(g.abs().max() for g in gradients.values())
    save_file(gradients | {key: factor * gradients[key]}, tmp_path / "gradient-plan-0")

    def exactly() -> bool:
        verify.truth(runs.alone(), cfg.to_toml(), 2, str(tmp_path))
        return True

    report = judge(cfg, tmp_path, alone, found, exactly)
    assert [d.name for d in report.differences if not d.equal] == [KEYS], explain(report)


def test_how_much_rounding_may_come_to(tmp_path: Path) -> None:
    """Four times the worst of three runs, but neither a thousandth of the tensor nor 1e-5 of its unit's gradients."""

    def judged(name: str, values: list[float], apart: float) -> Difference:
        for run, value in zip(("exact", "reference", "nudged-0", "nudged-1"), values, strict=True):
            double = torch.float64 if run == "exact" else torch.float32
            tensors = {"near.bias": torch.tensor([value]), "near.weight": torch.tensor([100.0])}
            save_file({key: tensor.to(double) for key, tensor in tensors.items()}, tmp_path / f"gradient-{run}")
        truth = Truth(tmp_path, lambda: True, {"near.bias": "near", "near.weight": "near"}, 0.1)
        return truth.judged(Difference("found", apart / values[1]), "gradient", name, apart)

    small = [0.25, 0.25, 0.25 + 2**-14, 0.25]  # off by 6.1e-5, of a unit of 100
    assert judged("near.bias", small, 4 * 2**-14).equal
    assert not judged("near.bias", small, 4.1 * 2**-14).equal
    moved = [0.25, 0.25, 0.5, 0.25]  # no rounding: 1e-5 of the unit and no more
    assert judged("near.bias", moved, 0.99e-3).equal
    assert not judged("near.bias", moved, 1.01e-3).equal
    large = [8.0, 8.0, 9.0, 8.0]  # a thousandth of its own
    assert judged("near.bias", large, 0.0079).equal
    assert not judged("near.bias", large, 0.0081).equal
    assert not judged("near.bias", small, float("nan")).equal
    assert not judged("far.bias", small, 2**-14).equal  # of no unit
    zero = judged("near.bias", [1e-11, 1e-6, 1e-6, 1e-6], 9e-4)
    assert zero.equal
    assert zero.of_unit
    assert zero.name.endswith("which is 0 but for rounding")
    assert not judged("near.bias", [1e-11, 1e-6, 1e-6, 1e-6], 1.1e-3).equal


TINY = ["model.num_layers=2", "model.hidden_size=2", "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=2",
        "model.ffn_size=4", "model.tie_embeddings=true"]  # fmt: skip
COUNTERS = ["model.num_experts=5", "model.expert_ffn_size=3", "model.router_scores=sigmoid", "model.router_bias=true"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_of_a_tiny_model_are_counted_to_the_byte(
    world: int, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Losses, counters, positions and the words of windows are no part of a model, and would be 1 % of this one."""
    plans = ["dp=2 zero=3", "cp=2", "pp=2 micro_batches=2", "dp=2 ep=2", "dp=3 zero=2 transport=copy", "tp=2 dp=2",
             "dp=2 pp=2 zero=3 micro_batches=3", "cp=2 ep=2 dp=2"]  # fmt: skip
    jobs = [(runs.config(tmp_path, plan, [*TINY, *more]), "none")
            for plan in plans for more in ([], COUNTERS) if more or "ep=" not in plan]  # fmt: skip
    jobs = [(cfg, fault) for cfg, fault in jobs if cfg.plan.world == world]
    apart: dict[str, list[int]] = {}
    for report in prove(run_ranks, jobs, tmp_path):
        assert report.passed, explain(report)
        for account in report.accounts:
            if account.what == "bytes of all tensors":  # with messages that gloo's threads may still hold
                apart.setdefault(str(report.plan), []).append(account.found - account.expected)
            elif account.what.startswith("bytes of"):
                assert account.found == account.expected, explain(report)
    assert all(0 in each for each in apart.values()), apart


@pytest.mark.ranks
def test_the_command_says_the_first_difference_and_exits_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command and processes of its own, as a user meets it."""
    monkeypatch.setattr(verify, "UNDER_PLAN", f"{FUNCTIONS}:faulty")
    (tmp_path / "run.toml").write_text(runs.toml(tmp_path, "dp=2 zero=2"))
    for fault, code in (("left_out", 5), ("none", 0)):
        monkeypatch.setenv("INTERLACE_FAULT", fault)
        done = CliRunner().invoke(app, ["verify", str(tmp_path / "run.toml"), "--steps", "2"])
        assert done.exit_code == code, done.output
        said = done.stdout.splitlines()
        assert ("first beyond 1e-05: gradient of blocks.1.mlp.up.weight" in done.stdout) == (code == 5)
        assert said[-1].startswith(
            'verify: "dp=2 zero=2" ' + ("does NOT equal one process" if code else "equals one process (")
        )


@pytest.mark.ranks
def test_a_sweep_forgets_the_stages_of_the_plan_before(tmp_path: Path) -> None:
    plans = [ParallelPlan.parse(text) for text in ("pp=2", "dp=1")]
    for report in verify.sweep(runs.config(tmp_path, "dp=1", ["model.num_layers=2"]), plans, 2):
        assert report.passed, explain(report)


def test_products_are_counted_as_torch_counts_them() -> None:
    """Forward and backward, into other memory and in place; the values are the same, and later ones are not counted."""
    x_NK, w_KM, b_M = (torch.randn(size, requires_grad=True) for size in ((3, 5), (5, 7), (7,)))

    def step() -> list[torch.Tensor]:
        y_NM = torch.addmm(b_M, x_NK, w_KM).tanh() + x_NK @ w_KM
        made = torch.autograd.grad(y_NM.sum(), (x_NK, w_KM, b_M))
        with torch.no_grad():
            out_NM = torch.mm(x_NK, w_KM, out=torch.empty(3, 7))
            torch.addmm(out_NM, x_NK, w_KM, beta=2, out=out_NM)
            return [*made, y_NM, out_NM.addmm_(x_NK, w_KM, alpha=0.5)]

    plain = step()
    with FlopCounterMode(display=False) as torchs:
        step()
    assert isinstance(verify.products(torch.device("cpu")), verify.ProductsOnCpu)
    assert isinstance(verify.products(torch.device("cuda")), verify.Products)
    for each in (verify.Products(), verify.ProductsOnCpu()):
        with each as counter:
            counted = step()
        step()
        assert counter.flops == torchs.get_total_flops() + 2 * 3 * 5 * 7 == 9 * 2 * 3 * 5 * 7  # torch leaves out addmm_
        assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))


def test_equality_and_accounts_have_an_edge() -> None:
    assert Difference("x", 1e-5).equal
    assert not Difference("x", 1.01e-5).equal
    assert not Difference("x", float("nan")).equal
    assert Account(0, "bytes", 101, 100).holds
    assert not Account(0, "bytes", 102, 100).holds
    assert not Account(0, "bytes", 98, 100).holds
    assert not Account(0, "bytes", 4, 0).holds
