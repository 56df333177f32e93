"""The figures that `verify` holds a running plan against."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace import spec
from interlace.config import Config, ParallelPlan, loads
from interlace.mesh import Mesh
from interlace.plan import tensor
from interlace.plan.share import computed_sequences, leaves, micro_batch_count, runs, share

TINY = '[model]\npreset = "tiny"\n'


def config(plan: str, *overrides: str) -> Config:
    return loads(TINY, ["train.optimizer=sgd", *overrides], plan)


def total(cfg: Config) -> int:
    return spec.total_parameters(cfg.model_config())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_runs_hold_every_parameter_once_and_little_else(ranks: int, tied: str) -> None:
    cfg = config("dp=1", f"model.tie_embeddings={tied}").model_config()
    found = runs(cfg, ranks)
    names = [member.name for run in found for member in run.members]
    assert sorted(names) == sorted(parameter.name for parameter in spec.parameters(cfg))
    assert ("root" in [run.unit for run in found]) == (tied == "true")
    for run in found:
        padding = run.cut.total - sum(member.numel for member in run.members)
        assert 0 <= padding < run.cut.chunk * (len(run.members) + ranks)
        assert [member.decay for member in run.members] == sorted((m.decay for m in run.members), reverse=True)


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_split_adds_up_over_the_ranks(dp: int, zero: int) -> None:
    cfg = config(f"dp={dp} zero={zero}", "train.optimizer=adamw")
    shares = [share(cfg, rank, 12) for rank in range(dp)]
    whole = 4 * total(cfg)

    def times(held: int) -> float:  # how often the model is held, padding allowed for
        assert held >= whole
        return held // whole

    copies_of = {0: (dp, dp, dp), 1: (1, dp, 1), 2: (1, 1, 1), 3: (1, 1, 1)}[zero]
    assert times(sum(s.main for s in shares)) == copies_of[0]
    assert times(sum(s.gradients for s in shares)) == copies_of[1]
    assert times(sum(s.optimizer for s in shares) // 2) == copies_of[2]
    for s in shares:
        assert s.copies == 0 if zero == 0 else s.copies > 0
        assert (s.copies < whole) == (zero in (0, 3))  # two units at a time, or all of them


@pytest.mark.parametrize(("sequence", "passes"), [("on", 2), ("off", 3)])  # a gather and a scatter; and an all-reduce
def test_logits_of_a_router_in_fp32_travel_in_fp32(sequence: str, passes: int) -> None:
    """Two ranks, two sequences of eight, one layer, bf16: half of the logits, and as much of their gradient."""
    found = []
    for asked in ("false", "true"):
        words = ["model.num_layers=1", "model.num_experts=6", "model.expert_ffn_size=8", f"model.router_fp32={asked}"]
        cfg = config(f"tp=2 sequence={sequence}", *words)
        found.append(sum(tensor.sent(cfg.model_config(), cfg.plan, 0, [2], 8, 2).values()))
    assert found[1] - found[0] == passes * 8 * 6 * (4 - 2)


def test_a_step_of_zero_3_by_hand() -> None:
    """Two ranks, one layer: embedding, block and head; gathered again for backward unless still in their buffers."""
    cfg = config("dp=2 zero=3", "model.num_layers=1")
    sizes = {run.unit: run.cut.total for run in runs(cfg.model_config(), 2)}
    found = share(cfg, 0, 2)
    # No two of three neighbours are two apart in the same size class but embedding and head.
    assert found.copies == 4 * (sizes["blocks.0"] + max(sizes["embedding"], sizes["head"]))
    # Forward: all three; backward: head and block are in their buffers, the embedding is not read.
    assert found.sent["all_gather"] == 16 + 4 * sum(sizes.values()) // 2
    assert found.sent["reduce_scatter"] == 4 * sum(sizes.values()) // 2
    bf16 = share(config("dp=2 zero=3", "model.num_layers=1", "train.precision=bf16"), 0, 2)
    assert bf16.copies == found.copies // 2
    assert bf16.sent == {"all_gather": 16 + sum(sizes.values()), "reduce_scatter": sum(sizes.values())}
    several = share(config("dp=2 zero=3 micro_batches=2", "model.num_layers=1", "train.precision=bf16"), 0, 2)
    assert several.sent["reduce_scatter"] == found.sent["reduce_scatter"]  # they add up in fp32 before


def test_all_stages_below_3_send_the_same() -> None:
    sent = [share(config(f"dp=3 zero={zero}"), 1, 12).sent for zero in range(3)]
    assert sent[0] == sent[1] == sent[2]
    assert share(config("dp=1 zero=3"), 0, 12).sent == {}


@pytest.mark.parametrize(
    ("plan", "batch", "count", "computed"),
    [
        ("dp=1", 8, 1, [8]),
        ("dp=4", 10, 1, [3, 3, 2, 2]),
        ("dp=4", 2, 1, [1, 1, 1, 1]),  # ranks 2 and 3 compute a stand-in
        ("dp=2 micro_batches=3", 5, 3, [3, 3]),
        ("dp=4 micro_batch_size=1", 10, 3, [3, 3, 3, 3]),
        ("dp=2 micro_batch_size=4", 2, 1, [1, 1]),
    ],
)
def test_sequences_that_a_rank_computes(plan: str, batch: int, count: int, computed: list[int]) -> None:
    parsed = ParallelPlan.parse(plan)
    assert micro_batch_count(parsed, batch) == count
    mesh = Mesh.of(parsed)
    assert [sum(computed_sequences(parsed, mesh, rank, batch)) for rank in range(parsed.dp)] == computed


def test_fixed_leaves_are_dealt_out_in_turn() -> None:
    plan = ParallelPlan.parse("dp=3 micro_batch_size=2")
    assert [list(leaf) for leaf in leaves(plan, 7)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert leaves(ParallelPlan(dp=2), 7) == leaves(ParallelPlan(dp=4), 7) == [range(i, i + 1) for i in range(7)]
    assert micro_batch_count(plan, 7, fixed=True) == 2
    found = [computed_sequences(plan, Mesh.of(plan), rank, 7, fixed=True) for rank in range(3)]
    assert found == [[2, 1], [2, 1], [2, 1]]  # 2 and the last one; 2 and a stand-in


def test_what_a_fixed_order_costs() -> None:
    """A reduction a round, a square sum a chunk; an accumulator beside whole gradients, or in their place (zero=1)."""
    for zero in range(4):
        plain, fixed = (
            share(config(f"dp=2 zero={zero} micro_batch_size=4", *more), 0, 16)
            for more in ((), ["run.reproducible=plan"])
        )
        assert fixed.flops == plain.flops
        assert (fixed.main, fixed.copies, fixed.optimizer) == (plain.main, plain.copies, plain.optimizer)
        assert fixed.sent["reduce_scatter"] == 2 * plain.sent["reduce_scatter"]
        sizes = runs(config("dp=2").model_config(), 2)
        chunks = sum(run.cut.total // run.cut.chunk for run in sizes) // 2
        assert fixed.sent["all_gather"] - plain.sent["all_gather"] == 8 * (2 + chunks) - 16
        whole = 4 * sum(run.cut.total for run in sizes)
        assert fixed.gradients - plain.gradients == {0: whole // 2, 1: -whole // 2}.get(zero, 0)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_by_hand(zero: int) -> None:
    """Six ranks, two copies of three parts: gradients inside, a shard of them outside, weights inside only."""
    cfg = config(f"dp=6 shard=3 zero={zero}", "model.num_layers=1")
    total = sum(run.cut.total for run in runs(cfg.model_config(), 6))
    found = share(cfg, 4, 12)
    assert found.main == 4 * total // 3
    assert found.gradients == (4 * total if zero == 1 else 4 * total // 3)
    assert found.sent["reduce_scatter"] == 4 * (total * 2 // 3 + total // 3 // 2)
    assert found.sent["all_gather"] == 16 * 5 + 4 * (total * 2 // 3 + total // 3 // 2)
    inside, outside = 4 * (total * 2 // 3), 4 * (total // 3 // 2)
    assert found.along == {
        "dp": {"all_gather": 16 * 5},
        "shard": {"reduce_scatter": inside, "all_gather": inside},
        "replica": {"reduce_scatter": outside, "all_gather": outside},
    }


def test_flops_count_recomputation_and_stand_ins() -> None:
    plain = share(config("dp=2"), 0, 8).flops
    assert share(config("dp=2"), 0, 16).flops == 2 * plain
    assert share(config("dp=4"), 3, 2).flops == plain // 4
    assert 1.2 < share(config("dp=2 recompute=full"), 0, 8).flops / plain < 1.34


def test_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import interlace.plan.share, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
