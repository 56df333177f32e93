"""Runs under the tensor axis: resume in every direction, the norm, compiled blocks, plans drawn at random."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import runs
from interlace import spec
from interlace.checkpoint import Reader
from interlace.cli import app
from interlace.config import Config, loads
from interlace.launch import run_local
from interlace.plan import fit
from interlace.plan.memory import estimate
from interlace.plan.overlap import GATHER, SCATTER, Way
from interlace.plan.share import share
from interlace.schedule import FORMS
from interlace.train import loop, verify

Run = Callable[..., list[Any]]
ODD = ["model.vocab_size=265", "model.ffn_size=23", "train.steps=4", "run.save_every=2", "train.weight_decay=0.3"]
FEW = ["model.num_layers=1", "data.sequence_length=5", "train.global_batch=1"]
TINY = {
    2: [*FEW, "model.activation=gelu"],
    3: [*FEW, "model.num_heads=3", "model.num_kv_heads=3", "model.ffn_size=23"],
    4: FEW,
}
MIXTURE = ["model.num_experts=3", "model.expert_ffn_size=5", "model.router_aux_loss=0.1"]


def job(cfg: Config, resume: Path | None = None) -> dict[str, str]:
    return {"config": cfg.to_toml(), "resume": str(resume or "")}


@pytest.mark.parametrize("overrides", [ODD, [*ODD, *MIXTURE]], ids=["dense", "experts"])
def test_a_checkpoint_goes_on_under_every_other_split(run_ranks: Run, tmp_path: Path, overrides: list[str]) -> None:
    """huggingface/nanotron#106, NVIDIA/Megatron-LM#1517: AdamW's moments follow the slices of their weights."""

    def config(plan: str, out: str) -> Config:
        return runs.config(tmp_path, plan, overrides, out=out)

    def half(out: str) -> Path:
        return tmp_path / out / "checkpoints" / "step-2"

    one = config("dp=1", "one")
    loop.run(runs.alone(), **job(one))
    made = [config("dp=2 tp=2 zero=2", "split"), config("tp=4 zero=1", "four"), config("dp=2 tp=2 zero=3", "from-one")]
    sources = [None, half("split"), half("one")]
    run_ranks("rank_functions_train:train_all", 4, {"jobs": list(map(job, made, sources))})
    back = config("dp=1", "back")
    loop.run(runs.alone(), **job(back, half("split")))
    expected = runs.losses(one)
    assert runs.losses(made[0]) == pytest.approx(expected, rel=1e-5)
    for cfg in (*made[1:], back):
        assert runs.losses(cfg) == pytest.approx(expected[2:], rel=1e-5), cfg.plan
    readers = [Reader(tmp_path / out / "checkpoints" / "step-4") for out in ("one", "split", "four", "back")]
    for name in readers[0].names:
        whole = readers[0].read(name)
        for reader in readers[1:]:
            assert (reader.read(name) - whole).abs().max() <= 1e-4 * whole.abs().max() + 1e-9, (name, reader.folder)


def test_every_element_counts_once_in_the_norm(run_ranks: Run, tmp_path: Path) -> None:
    """pytorch/pytorch#88955, ROCm/TransformerEngine#715: norms, biases, router and replicated heads too."""
    more = [*MIXTURE, "model.norm=layernorm", "model.qk_norm=true", "model.qkv_bias=true", "model.out_bias=true"]
    plans = ["tp=4", "dp=2 tp=2 zero=1", "dp=2 tp=2 zero=3 sequence=off", "tp=4 sequence=off"]
    cfgs = [runs.config(tmp_path, plan, more) for plan in plans]
    expected = math.sqrt(spec.total_parameters(cfgs[0].model_config()))
    for rank in run_ranks("rank_functions_train:norms_of_ones", 4, {"configs": [cfg.to_toml() for cfg in cfgs]}):
        for norm, largest in rank:
            assert norm == pytest.approx(expected, rel=1e-12)
            assert largest == pytest.approx(0.5, rel=1e-5)


def test_plans_drawn_at_random_are_valid_and_repeat(tmp_path: Path) -> None:
    cfg = runs.config(tmp_path)
    axes = ("dp", "shard", "tp")
    plans = fit.random_plans(cfg, 40, 3, available_axes=axes)
    assert len(set(plans)) == 40
    assert plans == fit.random_plans(cfg, 40, 3, available_axes=axes)
    assert plans != fit.random_plans(cfg, 40, 4, available_axes=axes)
    assert {plan.tp for plan in plans} >= {1, 2, 4}
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    assert {plan.sequence for plan in plans} == {"on", "off"}
    assert {plan.tp for plan in plans if plan.overlap == "fused"} == {2, 4}
    for plan in plans:
        assert 2 <= plan.world <= 8
        fit.check(runs.config(tmp_path, str(plan)), plan.world, available_axes=axes)


def test_pipelines_and_batchings_are_drawn_at_random(tmp_path: Path) -> None:
    """Every schedule, several chunks, layers given or not, micro-batches by number and by size; for a seed the same."""
    cfg = runs.config(tmp_path, "dp=1", ["model.num_layers=8"])
    axes = ("dp", "shard", "tp", "cp", "pp")
    plans = fit.random_plans(cfg, 120, 3, available_axes=axes)
    assert plans == fit.random_plans(cfg, 120, 3, available_axes=axes)
    assert plans[:9] == fit.random_plans(cfg, 9, 3, available_axes=axes)
    piped = [plan for plan in plans if plan.pp > 1]
    assert {plan.schedule for plan in piped} == set(FORMS)
    assert {plan.chunks for plan in piped if plan.schedule == "interleaved"} >= {1, 2}
    assert {bool(plan.layers) for plan in piped} == {True, False}
    assert {plan.micro_batches for plan in plans} >= {1, 2, 3}
    assert {plan.micro_batch_size for plan in plans} >= {0, 1, 2}
    for plan in plans:
        assert plan.pp > 1 or (plan.schedule, plan.chunks, plan.layers) == ("1f1b", 1, "")
        fit.check(runs.config(tmp_path, str(plan), ["model.num_layers=8"]), plan.world, available_axes=axes)
    fixed = runs.config(tmp_path, "dp=1", ["run.reproducible=plan", "model.num_layers=8"])
    for plan in fit.random_plans(fixed, 20, 3, available_axes=axes):
        assert plan.micro_batches == 1


@pytest.mark.ranks
def test_the_command_sweeps(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(runs.toml(tmp_path))
    words = ["verify", str(tmp_path / "run.toml"), "--sweep", "2", "--seed", "765", "--steps", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["equal", "equal", "verify:"]
    assert lines[-1] == "verify: 2 of 2 plans drawn with --seed 765 equal one process"
    refused = CliRunner().invoke(app, [*words, "--parallel", "tp=2"])
    assert refused.exit_code == 2


def test_a_run_names_the_table_that_its_products_are_chosen_by(run_ranks: Run, tmp_path: Path) -> None:
    """In run.toml, which stays readable, and in the checkpoint; a run that chooses nothing names none."""
    made = {overlap: runs.config(tmp_path, f"tp=2 overlap={overlap}", out=overlap) for overlap in ("auto", "plain")}
    run_ranks("rank_functions_train:train_all", 2, {"jobs": [job(cfg) for cfg in made.values()]})
    for overlap, cfg in made.items():
        text = (tmp_path / overlap / "run.toml").read_text()
        assert loads(text) == cfg
        assert text.startswith("# products chosen by the table cpu none\n") == (overlap == "auto")
        meta = Reader(tmp_path / overlap / "checkpoints" / "step-3").meta
        assert meta["table"] == ("cpu none" if overlap == "auto" else "")
    assert runs.losses(made["auto"]) == runs.losses(made["plain"])


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sequence", ["on", "off"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_fused_products_are_proven_and_accounted(
    tp: int, sequence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their FLOPs count like those of plain ones, their bytes as the ways say that run, and the memory that peers write
    to is no weight.  Odd rows; an MLP of one product; for three ranks uneven features."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    cfg = runs.config(tmp_path, f"tp={tp} overlap=fused sequence={sequence}", TINY[tp])
    report = verify.verify(cfg, 2)
    assert report.passed, "\n".join(verify.lines(report))
    plain = [share(cfg, rank, 1).sent for rank in range(tp)]
    sent = [{a.what: a.found for a in report.accounts if a.rank == rank} for rank in range(tp)]
    apart = [
        found["bytes sent by reduce_scatter"] - own["reduce_scatter"] for found, own in zip(sent, plain, strict=True)
    ]
    if sequence == "off":  # what is taken for scattered rows, unmeasured, sends as much as plain
        assert all(apart), "the ways that ran send what plain ones do: another choice would not have been noticed"


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "sequence", "wrong"), [("a_row_twice", "on", "reduce_scatter"), ("half_is_told", "off", "all_gather")]
)
def test_wrong_bytes_of_fused_products_are_found(
    fault: str, sequence: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are right all the same."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(verify, "UNDER_PLAN", f"rank_functions_wire:{fault}")
    report = verify.verify(runs.config(tmp_path, f"tp=3 overlap=fused sequence={sequence}", TINY[3]), 2)
    assert report.first_beyond is None
    assert {(a.rank, a.what) for a in report.accounts if not a.holds and "sent" in a.what} == {
        (rank, f"bytes sent by {wrong}") for rank in range(3)
    }


HELD = {
    "tp=2 overlap=fused": [],
    "tp=2 overlap=fused micro_batches=2": ["model.activation=gelu"],
    "tp=2 overlap=fused sequence=off zero=3": [],
    "tp=2 overlap=fused recompute=full": ["model.hidden_size=260", "data.sequence_length=600"],
    "tp=2 overlap=plain": [],
}
ODD_ROWS = ["model.num_layers=1", "data.sequence_length=7", "train.global_batch=3", "model.ffn_size=23"]
ODD_ROWS += ["model.max_positions=600"]


def held(tmp_path: Path, device: str, more: list[str]) -> list[list[list[int]]]:
    """By rank and plan of `HELD`."""
    cfgs = [runs.config(tmp_path, plan, [*ODD_ROWS, *sizes, *more]) for plan, sizes in HELD.items()]
    texts = [cfg.to_toml() for cfg in cfgs]
    return run_local("rank_functions_memory:step", 2, {"configs": texts}, device=device, timeout=200.0)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_memory_of_fused_products_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the arenas hold after a step, to the byte; where nobody says which ways run, no less.  Odd rows and sizes,
    micro-batches of two sizes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    for rank in held(tmp_path, "cpu", []):
        for (has, counted, most), plan in zip(rank, HELD, strict=True):
            assert has == counted <= most, plan
            assert (has > 0) == ("fused" in plan)


def test_the_memory_of_fused_products_is_a_row_of_the_figure(tmp_path: Path) -> None:
    """16384 rows of 4096 in bf16 for 4 ranks, by hand: copies of all the peers' rows twice, parts from all likewise.

    Nothing where nobody asked for them, and a device without a table runs plain ones.
    """
    sizes = ["model.hidden_size=4096", "model.head_dim=1024", "model.ffn_size=14336", "model.max_positions=16384"]
    more = [*sizes, "data.sequence_length=16384", "train.global_batch=1", "train.precision=bf16"]
    plain, auto, fused = (
        estimate(cfg, cfg.plan)
        for cfg in (runs.config(tmp_path, f"tp=4 overlap={how}", more) for how in ("plain", "auto", "fused"))
    )
    assert plain == auto
    assert plain.symmetric == 0
    cfg = runs.config(tmp_path, "tp=4 overlap=fused", more)
    rows, MiB = 16384 * 4096 * 2, 1 << 20
    names = {GATHER: "chunks", SCATTER: "tiles"}
    known = estimate(cfg, cfg.plan, "cuda", lambda product, ranks: Way(names[product.op], 128, 256)).symmetric
    assert known == 2 * (2 * rows * 3 // 4 + 2 * MiB)  # and a unit of each arena for its words
    assert known <= fused.symmetric <= 1.4 * known
    assert replace(fused, symmetric=0) == plain
    assert fused.total == plain.total + fused.symmetric


@pytest.mark.gpu2
def test_the_memory_of_fused_products_on_two_gpus(tmp_path: Path) -> None:
    wide = ["model.hidden_size=512", "model.head_dim=128", "data.sequence_length=599", "train.precision=bf16"]
    for rank in held(tmp_path, "cuda", wide):
        for (has, counted, most), plan in zip(rank, HELD, strict=True):
            assert has == counted <= most, plan
            assert (has > 0) == ("fused" in plan)


@pytest.mark.gpu2
@pytest.mark.parametrize(
    "plan",
    [
        "tp=2",
        "tp=2 sequence=off",
        "tp=2 overlap=off recompute=full",
        "tp=2 overlap=fused",
        "tp=2 overlap=fused sequence=off",
    ],
)
def test_two_gpus_equal_one(plan: str, tmp_path: Path) -> None:
    """Uneven vocabulary and features, odd rows, both forms."""
    uneven = ["model.vocab_size=265", "model.ffn_size=23", "data.sequence_length=13", "train.global_batch=3"]
    report = verify.verify(runs.config(tmp_path, plan, uneven), 2, "cuda")
    assert report.passed, "\n".join(verify.lines(report))
