"""Runs under the context axis: plans against one process, faults that are found, resume, norms, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_verify import BIASES, FEATURES, UNEVEN, explain, prove

import rank_functions_train as functions
import runs
from interlace.collectives import Handle
from interlace.config import Config
from interlace.errors import PlanError
from interlace.parallel.context import _Deal
from interlace.parallel.sequence import SequenceAxis
from interlace.plan import context, fit
from interlace.plan.activations import _exchanged
from interlace.plan.memory import estimate
from interlace.train import loop, verify

Run = Callable[..., list[Any]]
AXES = ("dp", "shard", "tp", "cp", "pp")
SMALL = ["model.num_layers=2"]
ODD = ["data.sequence_length=13", "train.global_batch=3"]
WINDOW = ["model.sliding_window=5", "model.window_layers=[0]"]
DROPOUT = ["model.dropout=0.1", "model.attention_dropout=0.1"]
THREE = ["model.num_heads=3", "model.num_kv_heads=3", "model.hidden_size=12"]
SINKS = ["model.attention_sinks=true", "model.init_std=0.5"]
SINK_TOKENS = [*WINDOW, "model.sliding_window=2", "model.sink_tokens=3"]
ROPE = ["model.rope_scaling={type = 'yarn', factor = 4.0, original_max_position_embeddings = 8}"]
PLANS: dict[int, list[tuple[str, list[str]]]] = {
    2: [
        ("cp=2 exchange=ring micro_batches=2 zero=2", [*ODD, *WINDOW]),
        ("cp=2 exchange=gather recompute=selective", [*ODD, *DROPOUT]),
        ("cp=2 exchange=ulysses recompute=selective zero=1", [*ODD, *DROPOUT]),
        ("cp=2 exchange=ring recompute=full zero=3", [*FEATURES["experts"], *WINDOW]),
        ("cp=2 exchange=gather micro_batch_size=1 overlap=off", ["data.documents=joined", *ODD, *ROPE]),
        ("cp=2 exchange=ring recompute=selective zero=3", [*ODD, *SINKS, *SINK_TOKENS, *DROPOUT]),
        ("cp=2 exchange=ulysses recompute=full zero=2", [*ODD, *SINKS, *SINK_TOKENS]),
        ("cp=2", [*BIASES, "model.qk_norm=true", "model.tie_embeddings=true", "train.global_batch=100"]),
    ],
    3: [
        ("cp=3 exchange=ulysses zero=2", [*THREE, *ODD]),
        ("cp=3 exchange=ring zero=3", [*THREE, *WINDOW, *ODD, "data.sequence_length=7"]),
        ("cp=3 exchange=gather zero=1", [*THREE, *ODD, *SINKS, *SINK_TOKENS]),
        ("cp=3 exchange=gather", [*DROPOUT, "data.sequence_length=6"]),
    ],
    4: [
        ("cp=4 exchange=ulysses zero=1", ODD),  # 2 key-value heads
        ("cp=4 exchange=ring", [*WINDOW, "data.sequence_length=11"]),
        ("cp=2 dp=2 exchange=gather zero=1", FEATURES["experts"]),
        ("cp=2 dp=2 exchange=ring zero=3 micro_batch_size=1", ODD),
        ("cp=2 dp=2 exchange=ulysses zero=2 shard=2", ODD),
        ("cp=2 tp=2 exchange=ring", UNEVEN),
        ("cp=2 tp=2 exchange=gather zero=2", [*UNEVEN, *SINKS, *SINK_TOKENS]),
        ("cp=2 tp=2 exchange=ulysses sequence=off", [*UNEVEN, *SINKS]),
        ("tp=2 pp=2 schedule=zbv micro_batches=2", [*UNEVEN, *SINKS, "model.num_layers=4"]),
        (
            "cp=2 pp=2 micro_batches=3 schedule=interleaved chunks=2 zero=2",
            [*FEATURES["experts"], *ODD, "model.num_layers=4"],
        ),
        ("cp=2 tp=2 exchange=ulysses sequence=off zero=2", [*UNEVEN, *BIASES]),
        ("cp=2 tp=2 exchange=gather zero=3 recompute=full", [*UNEVEN, *DROPOUT]),
    ],
}


@pytest.fixture(autouse=True)
def _our_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prove` runs the function that knows the faults of this axis."""
    monkeypatch.setattr("test_verify.FUNCTIONS", "rank_functions_context")


@pytest.mark.filterwarnings("ignore:attention dropout")
@pytest.mark.parametrize("world", PLANS)
def test_the_context_axis_equals_one_process(run_ranks: Run, tmp_path: Path, world: int) -> None:
    jobs = [(runs.config(tmp_path, plan, [*SMALL, *overrides]), "none") for plan, overrides in PLANS[world]]
    for (cfg, _), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed, f"{cfg.plan}\n{explain(report)}"


def test_planted_faults_of_the_context_axis(run_ranks: Run, tmp_path: Path) -> None:
    """Each is found by the tensor, or the account, that it makes wrong."""
    faults = {
        "block_skipped": "gradient of blocks.0.attention.v.weight",
        "keys_paid_twice": "gradient of blocks.0.attention.k.weight",
        "swapped_pieces": "loss of step 1",
        "causal_alone": "loss of step 2",
        "mean_of_means": "loss of step 2",
        "needless_sends": "bytes sent by all_to_all",
    }
    jobs = [(runs.config(tmp_path, "cp=2 exchange=ring", SMALL), fault) for fault in faults]
    faults |= {
        "sink_twice": "loss of step 1",
        "gradient_of_own_sinks": "gradient of blocks.0.attention.sinks",
        "sinks_of_the_first_heads": "loss of step 1",
    }
    plans = {fault: "exchange=ulysses" if "heads" in fault else "exchange=ring" for fault in list(faults)[len(jobs) :]}
    jobs += [(runs.config(tmp_path, f"cp=2 {plan}", [*SMALL, *SINKS]), fault) for fault, plan in plans.items()]
    for (_, fault), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert not report.passed, fault
        wrong = [d.name for d in report.differences if not d.equal] + [a.what for a in report.accounts if not a.holds]
        assert faults[fault] in wrong, (fault, wrong)
        if fault == "needless_sends":
            assert report.first_beyond is None


ONE_KEY = ["model.sliding_window=1", "model.qk_norm=true"]


def test_a_gradient_that_is_zero_in_theory_is_no_difference_and_a_fault_in_it_is(
    run_ranks: Run, tmp_path: Path
) -> None:
    """A window of one key: what reaches q, k and their norms cancels, in another order under each plan."""
    plans = {
        "cp=2 exchange=ring": "none",
        "cp=2 exchange=ulysses": "none",
        "tp=2 cp=1": "none",
        "cp=2 exchange=gather zero=2": "delta_a_little_off",
        "cp=2 exchange=gather": "delta_forgotten",
        "cp=1 dp=2": "none",
    }
    jobs = [(runs.config(tmp_path, plan, [*SMALL, *ONE_KEY, *ODD]), fault) for plan, fault in plans.items()]
    zero = {
        f"gradient of blocks.{i}.attention.{n}.weight, which is 0 but for rounding"
        for i in range(2) for n in ("q", "k", "q_norm", "k_norm")
    }  # fmt: skip
    seen = set()
    for (cfg, fault), report in zip(jobs, prove(run_ranks, jobs, tmp_path), strict=True):
        assert report.passed == (fault == "none"), f"{cfg.plan}\n{explain(report)}"
        told = {d.name for d in report.differences if d.of_unit}
        seen |= told
        if fault == "none":
            assert told <= zero
            assert all(d.error < 1e-6 for d in report.differences if d.of_unit)
        else:
            wrong = {d.name for d in report.differences if not d.equal}
            assert wrong & zero, (fault, wrong)
    assert seen, "no tensor was zero in theory"


def test_loss_and_norm_are_those_of_every_split_and_checkpoints_pass_between_them(
    run_ranks: Run, tmp_path: Path
) -> None:
    """NVIDIA/Megatron-LM#673, #906, #1676: dp=4, dp=2 cp=2 and cp=4, even and uneven counts of labels."""
    steps = [
        "model.num_layers=1",
        "train.steps=4",
        "run.save_every=2",
        "train.optimizer=sgd",
        "train.learning_rate=0.1",
    ]

    def job(cfg: Config, resume: Path | None = None) -> dict[str, str]:
        return {"config": cfg.to_toml(), "resume": str(resume or "")}

    kinds = {"even": [*steps, "data.documents=joined"], "uneven": [*steps, "train.global_batch=5"]}
    plans = {"four": "dp=4", "mixed": "dp=2 cp=2 zero=2", "ring": "cp=4 exchange=ring"}
    for kind, overrides in kinds.items():
        one = runs.config(tmp_path, "dp=1", overrides, out=f"one-{kind}")
        loop.run(runs.alone(), **job(one))
        cfgs = [runs.config(tmp_path, plan, overrides, out=f"{out}-{kind}") for out, plan in plans.items()]
        back = [
            runs.config(tmp_path, "cp=2 dp=2 zero=3", overrides, out=f"from-dp-{kind}"),
            runs.config(tmp_path, "dp=4 zero=1", overrides, out=f"from-cp-{kind}"),
        ]
        halves = [tmp_path / f"{out}-{kind}" / "checkpoints" / "step-2" for out in ("four", "mixed")]
        jobs = [*map(job, cfgs), *map(job, back, halves)]
        run_ranks("rank_functions_train:train_all", 4, {"jobs": jobs})
        for key in ("loss", "grad_norm"):
            expected = [row[key] for row in runs.metrics(one)]
            for cfg in cfgs:
                assert [row[key] for row in runs.metrics(cfg)] == pytest.approx(expected, rel=1e-5), (cfg.plan, key)
            for cfg in back:
                assert [row[key] for row in runs.metrics(cfg)] == pytest.approx(expected[2:], rel=1e-5), (cfg.plan, key)


@pytest.mark.parametrize(
    ("plan", "overrides", "reason", "near"),
    [
        ("cp=4 exchange=ulysses", ["model.num_heads=6", "model.num_kv_heads=2"],
         "asks for exchange=ulysses, which cannot deal out 6 query and 2 kv heads over cp=4 (ring and gather can)",
         '"cp=4"'),
        ("cp=2 tp=4 exchange=ulysses", [], "cannot deal out 1 query and 1 kv heads over cp=2", '"tp=4 cp=2"'),
        ("cp=2", ["run.reproducible=plan"], 'splits over cp with run.reproducible = "plan"', '"dp=2"'),
        ("cp=4", ["data.sequence_length=7"], "asks for cp=4, found 7 positions for 8 slices", '"dp=2 cp=2"'),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, plan: str, overrides: list[str], reason: str, near: str) -> None:
    cfg = runs.config(tmp_path, plan, overrides)
    with pytest.raises(PlanError) as refused:
        fit.check(cfg, cfg.plan.world, available_axes=AXES)
    assert reason in str(refused.value)
    assert str(refused.value).endswith(f"the nearest that works is {near}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("cp=2 exchange=ring micro_batches=2 zero=2", [*ODD, *WINDOW]),
        ("cp=2 exchange=gather recompute=full overlap=off", ["data.documents=joined", *ODD]),
        ("cp=2 pp=2 micro_batches=3 exchange=ulysses", [*ODD, "model.num_layers=4"]),
    ],
)
def test_lines_that_copy_carry_whole_steps(
    plan: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "UNDER_PLAN", "rank_functions_context:under_copying_lines")
    config = runs.config(tmp_path, plan, [*SMALL, *words])
    report = verify.verify(config, config.plan.world)
    assert report.passed, explain(report)


def test_bytes_of_steps_in_half_precision_are_those_of_the_plan(run_ranks: Run, tmp_path: Path) -> None:
    """`verify` runs in fp32.  A window as long as the sequence hides nothing: gradients travel as without one."""
    half, joined = ["train.precision=bf16", *SMALL], ["data.documents=joined", "data.sequence_length=13"]
    words = {
        "cp=2 exchange=ring": [joined, [*joined, "model.sliding_window=13"], [*joined, "model.sliding_window=12"]],
        "cp=2 exchange=ring recompute=full": [[*WINDOW, *ODD], [*joined, *WINDOW], [*joined, *DROPOUT]],
        "cp=2 exchange=gather micro_batches=2": [[*joined, "model.sliding_window=64"], ODD],
        "cp=2 exchange=ulysses recompute=selective": [joined, [*joined, "model.sliding_window=64"]],
    }
    cfgs = [runs.config(tmp_path, plan, [*half, *more]) for plan, cases in words.items() for more in cases]
    argument = {"configs": [cfg.to_toml() for cfg in cfgs]}
    for rank in run_ranks("rank_functions_context:moved_in_halves", 2, argument):
        for cfg, (sent, told) in zip(cfgs, rank, strict=True):
            assert 0 < sent == told, (cfg.plan, cfg.model_config().sliding_window, sent, told)
    plain, hides = (estimate(cfgs[number], cfgs[number].plan) for number in (0, 1))
    assert plain == hides


def test_auto_takes_what_sends_least(tmp_path: Path) -> None:
    """Few key-value heads or a window: ring; as many as query heads on many ranks: heads dealt out, if they can be."""
    long = ["data.sequence_length=256", "model.num_heads=16", "model.max_positions=4096"]
    few = runs.config(tmp_path, "cp=2", [*long, "model.num_kv_heads=2"])
    many = runs.config(tmp_path, "cp=8", [*long, "model.num_kv_heads=16"])
    narrow = runs.config(tmp_path, "cp=8", [*long, "model.num_kv_heads=16", "model.sliding_window=16"])
    odd = runs.config(tmp_path, "cp=6", [*long, "model.num_kv_heads=16"])
    assert [context.choose(c, c.plan) for c in (few, many, narrow, odd)] == ["ring", "ulysses", "ring", "ring"]
    for recompute, best in (("none", "ring"), ("selective", "ulysses"), ("full", "ring")):  # what is sent again
        close = runs.config(tmp_path, f"cp=4 recompute={recompute}", [*long, "model.num_kv_heads=4"])
        assert context.choose(close, close.plan) == best, recompute


@pytest.mark.parametrize(("length", "best"), [(4095, "ulysses"), (4096, "ring")])
def test_auto_takes_ring_where_a_rank_has_positions_enough_to_hide_it(length: int, best: str, tmp_path: Path) -> None:
    sizes = [
        "model.num_heads=16",
        "model.num_kv_heads=16",
        "model.max_positions=4096",
        f"data.sequence_length={length}",
    ]
    cfg = runs.config(tmp_path, "cp=2", sizes)
    assert context.choose(cfg, cfg.plan) == best


def test_plans_drawn_at_random_split_sequences_too(tmp_path: Path) -> None:
    plans = fit.random_plans(runs.config(tmp_path), 40, 3, available_axes=AXES)
    assert {plan.cp for plan in plans} >= {1, 2, 4}
    assert {plan.exchange for plan in plans} == {"auto", *context.EXCHANGES}
    for plan in plans:
        fit.check(runs.config(tmp_path, str(plan)), plan.world, available_axes=AXES)


def test_memory_of_long_sequences_falls_with_cp(tmp_path: Path) -> None:
    """Activations of 64k positions, which masks do not add to, halve with every doubling of cp."""
    long = ["data.sequence_length=65536", "model.max_positions=65536", "train.precision=bf16", "train.global_batch=1"]
    sizes = []
    for cp in (1, 2, 4):
        cfg = runs.config(tmp_path, f"cp={cp} exchange=ring", long)
        sizes.append(estimate(cfg, cfg.plan).activations)
    assert 1.5 < sizes[0] / sizes[1] <= 2.0
    assert 1.8 < sizes[1] / sizes[2] <= 2.0


@pytest.mark.parametrize(("kv_heads", "nbytes"), [(8, 1024), (1, 640)])
def test_memory_of_gather_has_a_stage_of_all_ranks(kv_heads: int, nbytes: int, tmp_path: Path) -> None:
    """bf16, 8 heads of 4: two key-value heads or the one of three ranks at a time, and what tiles make for q."""
    sizes = ["model.num_heads=8", f"model.num_kv_heads={kv_heads}", "model.hidden_size=32"]
    cfg = runs.config(tmp_path, "cp=4 exchange=gather", sizes)
    assert _exchanged(cfg.model_config(), cfg.plan, "gather", 100, 2, True) == 100 * nbytes


@pytest.mark.parametrize(("ways", "kv_heads"), [(2, 4), (2, 1), (4, 2), (3, 3)])
def test_memory_of_heads_dealt_out_has_lines_for_all_of_a_message(ways: int, kv_heads: int, tmp_path: Path) -> None:
    """Queries, keys and values travel in one, which is what lines are opened for."""
    sizes = ["model.num_heads=12", f"model.num_kv_heads={kv_heads}", "model.hidden_size=48"]
    cfg = runs.config(tmp_path, f"cp={ways} exchange=ulysses", [*sizes, "data.sequence_length=24"])
    asked = []

    class Alone(SequenceAxis):
        def exchange_parts(self, leaving: Any, arriving: Any, dtype: Any, *, most: int, name: str) -> Any:
            asked.append(most)
            return Handle(lambda: [torch.zeros(count, dtype=dtype) for count in arriving])

    axis = Alone(SimpleNamespace(rank=0, size=ways), 24, "ulysses")  # type: ignore[arg-type]
    tokens = axis.counts()[0]
    ranges = [context.heads_of(12, kv_heads, ways, rank) for rank in range(ways)]
    q, k, v = (torch.ones(1, tokens, heads, 4) for heads in (12, kv_heads, kv_heads))
    _Deal.apply(q, k, v, axis, ranges)  # type: ignore[no-untyped-call]
    assert asked == [context.largest(cfg, cfg.plan, tokens, 4)]


@pytest.mark.gpu2
@pytest.mark.parametrize("exchange", context.EXCHANGES)
def test_sinks_over_two_gpus(exchange: str, tmp_path: Path) -> None:
    """Scores near each other: where they are not, terms of a sink's gradient that nearly cancel differ by 1.04e-5."""
    words = [*ODD, *SINKS, *SINK_TOKENS, "model.init_std=0.2"]
    report = verify.verify(runs.config(tmp_path, f"cp=2 exchange={exchange}", words), 2, "cuda")
    assert report.passed, explain(report)


def test_the_faults_of_all_axes_have_different_names() -> None:
    import rank_functions_context as ours

    assert functions.FAULTS.keys().isdisjoint(ours.FAULTS)
