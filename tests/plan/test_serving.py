"""Plans that text can be written under, and refusals that name one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from interlace.config import ModelConfig, ParallelPlan, loads
from interlace.errors import PlanError
from interlace.plan import serving

LENGTH = 64


def model(**dims: int) -> ModelConfig:
    cfg = loads("[model]\nvocab_size = 257\nhidden_size = 24\nnum_layers = 5\nnum_heads = 6\nffn_size = 20\n")
    return replace(cfg.model_config(), **dims)


@pytest.mark.parametrize("plan", ["tp=1", "tp=2", "tp=6", "pp=5", "tp=3 pp=2", "pp=2 layers=1/4", "dp=1 zero=0"])
def test_plans_that_work(plan: str) -> None:
    cfg, read = model(), ParallelPlan.parse(plan)
    serving.check(cfg, read, LENGTH)
    cut = serving.stages(cfg, read, LENGTH)
    assert len(cut) == read.pp
    assert sum(cut, ()) == ("embedding", *(f"blocks.{layer}" for layer in range(5)), "head")
    assert plan != "pp=2 layers=1/4" or cut[0] == ("embedding", "blocks.0")


@pytest.mark.parametrize(
    ("plan", "said", "near"),
    [
        ("dp=2", "asks for dp=2, and text is written over tp (each expert too) and pp alone", "tp=2"),
        ("dp=2 ep=2", "asks for dp=2, and", "tp=2"),
        ("cp=3", "asks for cp=3, and", "tp=3"),
        ("tp=2 zero=3", "asks for zero=3, and", "tp=2"),
        ("tp=2 dp=2", "asks for dp=2, and", "tp=2 pp=2"),
        ("pp=2 schedule=zbv", "asks for schedule=zbv, and", "pp=2"),
        ("pp=2 layers=1/4 micro_batches=2", "asks for micro_batches=2, and", "pp=2 layers=1/4"),
        ("tp=4", "asks for tp=4, which does not divide the model's 6 heads", "tp=2 pp=2"),
        ("tp=7", "asks for tp=7, which does not divide the model's 6 heads", "tp=6"),
        ("pp=6", "asks for pp=6, found 5 layers", "tp=2 pp=3"),
        ("tp=2 pp=2 layers=2/2", "asks for layers=2/2, found 2 stages of a layer or more and 5 layers", "tp=2 pp=2"),
    ],
)
def test_a_refusal_names_the_nearest_plan(plan: str, said: str, near: str) -> None:
    with pytest.raises(PlanError) as caught:
        serving.check(model(), ParallelPlan.parse(plan), LENGTH)
    found = re.fullmatch(r'the parallel plan "(.+)" (asks .+): the nearest that works is "(.+)"', str(caught.value))
    assert found is not None, caught.value
    assert found[2].startswith(said)
    assert found[3] == near
    serving.check(model(), ParallelPlan.parse(near), LENGTH)
