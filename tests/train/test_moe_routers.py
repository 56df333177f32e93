"""Routers under every axis: losses, loads, biases and drops are those of one process, whatever the cut of the batch."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_verify import explain, prove

import runs
from interlace.checkpoint import Reader
from interlace.config import loads
from interlace.errors import CheckpointError
from interlace.model_config import EXPERTS_ONLY
from interlace.models import router, weights
from interlace.models.decoder import Decoder, initialise
from interlace.serve import generate
from interlace.train import export, loop, recompute, state, verify
from interlace.train import session as sessions
from interlace.train.progress import Progress

Run = Callable[..., list[Any]]
SMALL = [
    "model.num_layers=2",
    "model.num_experts=8",
    "model.expert_ffn_size=6",
    "train.global_batch=4",
    "run.seed=11",  # 6, 15, 8 and 16 labels in the first step
]
DEEPSEEK = [
    *SMALL,
    "model.router_scores=sigmoid",
    "model.router_bias=true",
    "model.router_bias_rate=0.004",
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
MODEL = """
[model]
vocab_size = 67
hidden_size = 16
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 4
ffn_size = 24
"""
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


def test_a_router_whose_weights_are_one_whatever_it_says(run_ranks: Run, tmp_path: Path) -> None:
    """One choice made to sum to one: no gradient in theory, which the fp64 run of the proof tells from rounding."""
    one = [*SMALL, "model.experts_per_token=1"]
    jobs = [
        (runs.config(tmp_path, plan, [*one, *more]), "none")
        for plan, more in (
            ("dp=2 zero=1", []),
            ("cp=2", ["model.router_scores=sigmoid", "model.router_bias=true", "model.router_scale=2.5"]),
            ("dp=2 ep=2", ["model.num_experts=2", "model.router_aux_loss=0.1", "model.dense_layers=[0]"]),
        )
    ]
    told = set()
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"
        told |= {d.name for d in report.differences if d.of_unit}
    assert any("moe.router.weight, which is 0 but for rounding" in name for name in told), told


def test_scores_and_losses_of_a_router_are_as_exact_as_its_logits() -> None:
    """In fp64 as in fp64, from bf16 in fp32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator)
    counted = torch.tensor([[1.0, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
    for kind, exact in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        found = router.scores(logits, router.Rule(1, scores=kind))
        assert found.dtype == torch.float64
        assert (found - exact).abs().max() < 1e-15
        whole = exact / exact.sum(-1, keepdim=True)
        mass = router.mass(found, router.Rule(1, scores=kind), counted)
        assert (mass - (whole * counted.double()[..., None]).sum(1)).abs().max() < 1e-15
        assert router.scores(logits.bfloat16(), router.Rule(1, scores=kind)).dtype == torch.float32
    z = router.z_loss(logits, counted)
    assert (z - (logits.exp().sum(-1).log().square() * counted.double()).sum(1)).abs().max() < 1e-12


def test_planted_faults_of_routers(run_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is found by the tensor that it makes wrong, so that the test above can fail."""
    monkeypatch.setattr("test_verify.FUNCTIONS", "rank_functions_routers")
    faults = {
        ("loads_of_one_rank", "dp=2"): "weight of blocks.0.moe.bias",
        ("moved_every_micro_batch", "dp=2 micro_batches=2"): "weight of blocks.0.moe.bias",
        ("room_of_one_rank", "cp=2"): "gradient of blocks.0.moe.router.weight",
        ("losses_on_every_rank", "tp=2"): "gradient of blocks.0.moe.router.weight",
        ("mean_over_tokens", "dp=2 micro_batches=2"): "gradient of blocks.0.moe.router.weight",
        ("padding_counts", "pp=2"): "weight of blocks.0.moe.bias",
    }
    jobs = [
        (runs.config(tmp_path, plan, CAPACITY if fault == "room_of_one_rank" else DEEPSEEK), fault)
        for fault, plan in faults
    ]
    for (_, fault), wrong, report in zip(jobs, faults.values(), prove(run_ranks, jobs, tmp_path), strict=True):
        assert not report.passed, fault
        assert wrong in [d.name for d in report.differences if not d.equal], (fault, explain(report))


def test_runs_go_on_under_another_plan_with_their_biases(run_ranks: Run, tmp_path: Path) -> None:
    """A bias is in the checkpoint, once; losses, biases and what the log tells of experts are those of one process."""
    sgd = ["train.optimizer=sgd", "train.learning_rate=0.1", "train.lr_schedule=constant", "train.steps=4"]
    words = [*DEEPSEEK, *sgd, "run.save_every=2", "model.capacity_factor=1.0"]
    one = runs.config(tmp_path, "dp=1", words, out="one")
    loop.run(runs.alone(), one.to_toml())
    half = str(tmp_path / "one" / "checkpoints" / "step-2")
    plans = {"dp": "dp=2 zero=3", "tp": "tp=2", "cp": "cp=2", "pp": "pp=2 micro_batches=2"}
    cfgs = {name: runs.config(tmp_path, plan, words, out=name) for name, plan in plans.items()}
    jobs = [{"config": cfg.to_toml(), "resume": half} for cfg in cfgs.values()]
    run_ranks("rank_functions_train:train_all", 2, {"jobs": jobs})
    names = [f"buffer/blocks.{layer}.moe.bias" for layer in range(2)]
    expected = Reader(tmp_path / "one" / "checkpoints" / "step-4")
    assert any(not torch.equal(expected.read(name), Reader(Path(half)).read(name)) for name in names)
    for name, cfg in cfgs.items():
        found = Reader(tmp_path / name / "checkpoints" / "step-4")
        assert all(torch.equal(found.read(bias), expected.read(bias)) for bias in names), name
        for row, other in zip(runs.metrics(cfg), runs.metrics(one)[2:], strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-5), name
            for key in ("busiest", "idle", "dropped"):
                assert row[key] == pytest.approx(other[key]), (name, key)
    assert all(0 < row["dropped"] < 0.6 and 1 < row["busiest"] < 8 for row in runs.metrics(one))


def test_a_stage_without_experts_logs_those_of_the_others(run_ranks: Run, tmp_path: Path) -> None:
    words = [*DEEPSEEK, "model.num_layers=3", "model.dense_layers=[0]", "train.steps=2", "model.capacity_factor=1.0"]
    plans = {"one": "dp=1", "pp": "pp=2 layers=1/2 micro_batches=2"}
    cfgs = {name: runs.config(tmp_path, plan, words, out=name) for name, plan in plans.items()}
    loop.run(runs.alone(), cfgs["one"].to_toml())
    run_ranks("rank_functions_train:train_all", 2, {"jobs": [{"config": cfgs["pp"].to_toml(), "resume": ""}]})
    for row, other in zip(*map(runs.metrics, cfgs.values()), strict=True):
        for key in ("loss", "busiest", "idle", "dropped"):
            assert row[key] == pytest.approx(other[key], rel=1e-5), key


def test_dense_runs_log_nothing_of_experts_and_dropless_ones_no_drops(tmp_path: Path) -> None:
    for words, keys in ((["model.num_layers=1"], set()), (SMALL, {"busiest", "idle"})):
        cfg = runs.config(tmp_path, "dp=1", [*words, "train.steps=1"], out=f"run-{len(keys)}")
        loop.run(runs.alone(), cfg.to_toml())
        assert runs.metrics(cfg)[0].keys() & {"busiest", "idle", "dropped"} == keys


def test_the_line_of_a_run_tells_drops() -> None:
    stream = io.StringIO()
    Progress(1, stream).step({"step": 1, "loss": 2.0, "dropped": 0.031})
    assert "dropped 3.1 %" in stream.getvalue()


def test_checkpoints_from_before_these_keys_still_load(tmp_path: Path) -> None:
    """A key that a checkpoint does not know has its default; one that was set since is named."""
    cfg = runs.config(tmp_path, "dp=1", [*SMALL, "train.steps=2"])
    loop.run(runs.alone(), cfg.to_toml())
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    reader = Reader(folder)
    for key in (*EXPERTS_ONLY, "router_bias_rate"):
        del reader.meta["model"][key]
    state._check_meta(reader, cfg)
    for changed, word in ((["model.router_bias=true"], "router_bias"), (["model.router_scale=2"], "router_scale")):
        with pytest.raises(CheckpointError, match=f"holds another model: {word} "):
            state._check_meta(reader, runs.config(tmp_path, "dp=1", [*SMALL, *changed]))
    state._check_meta(reader, runs.config(tmp_path, "dp=1", [*SMALL, "model.capacity_factor=2"]))


def test_a_trained_bias_is_exported_and_served(tmp_path: Path) -> None:
    """The bias comes through a checkpoint into `transformers` and into `generate.load`; logits are equal."""
    words = [
        *DEEPSEEK[:-2],
        "model.qk_norm=true",
        "model.expert_ffn_size=8",
        "model.shared_ffn_size=16",
        "train.steps=2",
        "model.init_std=0.3",
    ]
    cfg = runs.config(tmp_path, "dp=1", words)
    loop.run(runs.alone(), cfg.to_toml())
    export.export(tmp_path / "run", tmp_path / "out", "fp32")
    stored = dict(weights.load_hf(tmp_path / "out")[1])
    served, _, _ = generate.load(tmp_path / "run", "cpu")
    bias = served.blocks[1].moe.bias
    assert bias.abs().max() == pytest.approx(0.008)
    assert torch.equal(stored["blocks.1.moe.bias"], bias)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens_BT = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = theirs(tokens_BT).logits, served(tokens_BT)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    again = ["model.router_bias_rate=0.2", "model.router_z_loss=0.3", f"model.from={tmp_path / 'out'}"]
    cfg = runs.config(tmp_path, "dp=1", [*words, *again], out="more")
    session = sessions.build(runs.alone(), cfg)
    assert torch.equal(session.model.module.blocks[1].moe.bias, bias)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it while it traces
@pytest.mark.xdist_group("traced blocks of experts")  # the second finds what the first has traced
@pytest.mark.parametrize("policy", ["none", "full"])
def test_compiled_blocks_tell_the_same(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by torch.compile and run as traced; the second run of a block saves as many tensors as the first."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    made = []
    for compiled in (False, True):
        cfg = loads(MODEL, [word for word in DEEPSEEK if word.startswith("model.")]).model_config()
        decoder = Decoder(cfg, dtype=torch.float64)
        initialise(decoder, cfg, 0)
        recompute.apply(decoder, policy, compiled)
        tokens_BT, labels_BT = torch.randint(67, (2, 3, 11), generator=torch.Generator().manual_seed(0))
        labels_BT[1, 4:] = -100
        loss = decoder.loss(tokens_BT, labels_BT)[0]
        loss.backward()
        made.append((loss.detach(), [p.grad for p in decoder.parameters()], decoder.take_loads()))
    plain, traced = made
    assert torch.equal(plain[2], traced[2])
    torch.testing.assert_close(traced[:2], plain[:2], rtol=0, atol=1e-9)


def test_the_same_bits_for_every_plan(run_ranks: Run, tmp_path: Path) -> None:
    """`run.reproducible = "plan"`: losses of routers are added in the order of micro-batches and layers, wherever."""
    words = [*DEEPSEEK, "run.reproducible=plan", "model.capacity_factor=1.0", "train.global_batch=5"]
    mixed = ["model.num_layers=3", "model.dense_layers=[0,2]"]  # the first stage of two has no router
    plans = {
        1: [("dp=1", []), ("dp=1", mixed)],
        2: [("dp=2 zero=3", []), ("pp=2 zero=2", []), ("pp=2 zero=2 layers=1/2", mixed)],
    }
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for world, asked in plans.items():
        cfgs = [runs.config(tmp_path, f"{plan} micro_batch_size=2", [*words, *more]) for plan, more in asked]
        jobs = [{"config": cfg.to_toml(), "steps": 3} for cfg in cfgs]
        for rank in run_ranks("rank_functions_train:bits_all", world, {"jobs": jobs}):
            for (_, more), made in zip(asked, rank, strict=True):
                found[more is mixed].append(made)
    for alike, count in ((found[False], 5), (found[True], 3)):
        assert len(alike) == count
        assert len(set(alike[0]["losses"])) == 3
        assert all(made == alike[0] for made in alike[1:])


@pytest.mark.gpu2
@pytest.mark.parametrize("plan", ["dp=2 zero=3 recompute=full", "tp=2", "cp=2", "pp=2 micro_batches=2"])
def test_two_gpus_equal_one(plan: str, tmp_path: Path) -> None:
    for words in (DEEPSEEK, CAPACITY):
        report = verify.verify(runs.config(tmp_path, plan, [*words, *ODD]), 3, "cuda")
        assert report.passed, explain(report)


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning", "ignore:TensorFloat32:UserWarning"
)  # said by the compiler
def test_a_compiled_model_in_bf16_on_a_gpu() -> None:
    """Grouped products with dropped rows behind their last end, compiled and run again in backward."""
    words = [word for word in DEEPSEEK if word.startswith("model.")]
    sizes = ["model.hidden_size=64", "model.head_dim=16", "model.expert_ffn_size=32", "model.capacity_factor=0.8"]
    cfg = loads(MODEL, [*words, *sizes]).model_config()
    tokens_BT, labels_BT = torch.randint(67, (2, 3, 64), generator=torch.Generator().manual_seed(0)).cuda()
    made = []
    for compiled in (False, True):
        decoder = Decoder(cfg, device="cuda", dtype=torch.bfloat16)
        initialise(decoder, cfg, 0)
        recompute.apply(decoder, "full", compiled)
        loss = decoder.loss(tokens_BT, labels_BT)[0]
        loss.backward()
        loads_LY = decoder.take_loads()
        assert loads_LY is not None
        assert loads_LY[:, :-1].sum(dim=1).tolist() == [2 * 3 * 64] * 2
        assert loads_LY[:, -1].min() > 0
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in decoder.parameters())
        made.append(loss.item())
    assert made[1] == pytest.approx(made[0], rel=1e-2)
