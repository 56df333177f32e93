"""Layers on stages: each once, in order, the slowest stage as quick as can be; and the table that a plan runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from interlace.config import ModelConfig, ParallelPlan, loads
from interlace.errors import PlanError
from interlace.plan.share import held_units, runs, share
from interlace.plan.stages import num_stages, placement_of, stages_of, table_of, unit_costs
from interlace.schedule import Kind, validate
from interlace.spec import units

MODEL = """
[model]
vocab_size = {vocab}
hidden_size = 32
num_layers = {layers}
num_heads = 4
num_kv_heads = 2
head_dim = 8
ffn_size = 64
"""


def model(layers: int, vocab: int = 257) -> ModelConfig:
    return loads(MODEL.format(layers=layers, vocab=vocab)).model_config()


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (10, 3), (7, 2), (61, 16), (5, 5), (5, 1), (8, 8)])
@pytest.mark.parametrize("vocab", [257, 8000])
def test_every_unit_is_on_one_stage_in_order(layers: int, stages: int, vocab: int) -> None:
    cfg = model(layers, vocab)
    cut = stages_of(cfg, stages, 16)
    assert len(cut) == stages
    assert [name for part in cut for name in part] == list(units(cfg))
    assert all(any(name.startswith("blocks.") for name in part) for part in cut)


@pytest.mark.parametrize("vocab", [257, 3000, 20000])
def test_the_slowest_stage_is_as_quick_as_can_be(vocab: int) -> None:
    """Against every cut of 9 layers in 1 to 4 stages; the head weighs 1, 8 and 50 layers."""
    cfg = model(9, vocab)
    costs = unit_costs(cfg, 16)

    def slowest(parts: tuple[tuple[str, ...], ...]) -> float:
        return max(sum(costs[name] for name in part) for part in parts)

    for stages in range(1, 5):
        best = min(
            slowest(stages_of(cfg, stages, 16, tuple(b - a for a, b in itertools.pairwise((0, *ends, 9)))))
            for ends in itertools.combinations(range(1, 9), stages - 1)
        )
        assert slowest(stages_of(cfg, stages, 16)) == pytest.approx(best)


def test_dense_layers_weigh_what_they_cost() -> None:
    """A dense layer three times as dear as one of experts: it stands alone beside three of those."""
    words = ["model.num_experts=8", "model.experts_per_token=1", "model.expert_ffn_size=16", "model.vocab_size=5"]
    words += ["model.ffn_size=700", "model.dense_layers=[0]"]
    cfg = loads(MODEL.format(layers=5, vocab=257), words).model_config()
    costs = unit_costs(cfg, 16)
    assert costs["blocks.0"] > 3 * costs["blocks.1"] == 3 * costs["blocks.4"]
    assert [len(part) for part in stages_of(cfg, 2, 16)] == [2, 5]


def test_cuts_that_are_given_or_impossible() -> None:
    cfg = model(7)
    assert [len(part) for part in stages_of(cfg, 3, 16, (1, 5, 1))] == [2, 5, 2]
    for layers in ((3, 5), (7, 0, 0), (1, 2, 3)):
        with pytest.raises(
            PlanError, match=r"found 3 stages of a layer or more and 7 layers: nearest is layers=\d/\d/\d"
        ):
            stages_of(cfg, 3, 16, layers)
    with pytest.raises(PlanError, match="8 stages need as many layers, found 5: use 5 stages"):
        stages_of(model(5), num_stages(ParallelPlan.parse("pp=4 schedule=zbv")), 16)
    with pytest.raises(PlanError, match="layers must be a number for each stage, as in layers=8/8/7/7, found 3,4"):
        ParallelPlan.parse("pp=2 layers=3,4")


def test_the_table_of_a_plan(tmp_path: Path) -> None:
    table = table_of(ParallelPlan.parse("dp=2 pp=2 zero=3 schedule=zbv"), 5, fixed=True)
    assert table.placement == placement_of(ParallelPlan.parse("pp=2 schedule=zbv")) == (0, 1, 1, 0)
    kinds = [action.kind for row in table.rows for action in row]
    assert kinds.count(Kind.REDUCE) == 4 * 5  # one for each micro-batch
    assert kinds.count(Kind.UNSHARD) == kinds.count(Kind.RESHARD) == 4
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    own = ParallelPlan.parse(f"pp=2 schedule={file} micro_batches=3")
    assert validate(table_of(own, 3)).stages == (3, 1)
    assert validate(table_of(own, 2)).stages == (2, 1)  # the last batch of an epoch may have fewer
    with pytest.raises(PlanError, match=r"has 3 micro-batches, found 4 to run: .* use micro_batches=3"):
        table_of(own, 4)
    with pytest.raises(PlanError, match="is of 2 ranks, found pp=3: use pp=2"):
        table_of(ParallelPlan.parse(f"pp=3 schedule={file}"), 3)
    file.write_text("# own\n0UNSHARD,0F0,0B0,0REDUCE0\n1UNSHARD,1F0,1B0,1REDUCE0\n")
    with pytest.raises(PlanError, match=r"runs 0REDUCE0, and reduce=step reduces once a step \(line 2, column 4\)"):
        table_of(replace(own, micro_batches=1), 1)


@pytest.mark.parametrize(
    "plan", ["dp=2 pp=2 zero=1 schedule=v-half", "tp=2 pp=3 schedule=interleaved chunks=2", "pp=4"]
)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_ranks_hold_the_model_once_between_them(plan: str, tied: str) -> None:
    """Parameters, FLOPs and what is sent add up over the stages; a tied weight is on both ends."""
    words = [f"model.tie_embeddings={tied}", "train.optimizer=sgd"]
    split = loads(MODEL.format(layers=7, vocab=257), words, f"{plan} micro_batches=3")
    whole = loads(MODEL.format(layers=7, vocab=257), words, "micro_batches=3")
    size = split.plan.world // split.plan.pp
    places = [held_units(split, place * size) for place in range(split.plan.pp)]
    assert sorted(name for place in places for name in place) == sorted(units(split.model_config()))
    home = placement_of(split.plan)
    twice = tied == "true" and home[0] != home[-1]
    found = [run for place in places for run in runs(split.model_config(), 1, held=place)]
    expected = runs(whole.model_config(), 1)
    root = sum(run.cut.total for run in expected if run.unit == "root")
    assert sum(run.cut.total for run in found) == sum(run.cut.total for run in expected) + twice * root
    flops = sum(share(split, rank, 12).flops for rank in range(split.plan.world))
    assert flops == share(whole, 0, 12).flops
