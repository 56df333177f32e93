"""Which plans a model can write text under: its own layers and what is inside of them over ranks, `tp` and `pp`.

Nothing else of a plan has a meaning there.  Ranks of `dp` would each want prompts of their own; there are no gradients
that ZeRO could split, and one position a step has nothing for `cp`; experts are split inside over `tp`, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from interlace.config import ModelConfig, ParallelPlan
from interlace.errors import PlanError
from interlace.plan.stages import layers_given, stages_of

KEYS = ("tp", "pp", "layers")


def check(cfg: ModelConfig, plan: ParallelPlan, length: int) -> None:
    """PlanError unless a model can write text under the plan.  length: positions of its window."""
    if reason := refused(cfg, plan, length):
        near = min(_candidates(cfg, plan, length), key=lambda other: _distance(plan, other))
        raise PlanError(f'the parallel plan "{plan}" {reason}: the nearest that works is "{near}"')


def stages(cfg: ModelConfig, plan: ParallelPlan, length: int) -> tuple[tuple[str, ...], ...]:
    """The units of every rank of `pp`."""
    return stages_of(cfg, plan.pp, length, layers_given(plan))


def refused(cfg: ModelConfig, plan: ParallelPlan, length: int) -> str | None:
    """Why text cannot be written under the plan, as the end of a sentence that begins with it; None if it can."""
    for key in fields(plan):
        if key.name not in KEYS and (value := getattr(plan, key.name)) != key.default:
            return f"asks for {key.name}={value}, and text is written over tp (each expert too) and pp alone"
    if cfg.num_heads % plan.tp:
        return f"asks for tp={plan.tp}, which does not divide the model's {cfg.num_heads} heads"
    if plan.pp > cfg.num_layers:
        return f"asks for pp={plan.pp}, found {cfg.num_layers} layers"
    try:
        stages(cfg, plan, length)
    except PlanError as error:
        return f"asks for {str(error).partition(': nearest')[0]}"
    return None


def _candidates(cfg: ModelConfig, plan: ParallelPlan, length: int) -> Iterator[ParallelPlan]:
    for tp in (n for n in range(1, plan.world + 1) if cfg.num_heads % n == 0):
        for pp in range(1, min(plan.world // tp, cfg.num_layers) + 1):
            for layers in {plan.layers, ""}:
                other = ParallelPlan(tp=tp, pp=pp, layers=layers)
                if refused(cfg, other, length) is None:
                    yield other


def _distance(plan: ParallelPlan, other: ParallelPlan) -> tuple[float, float, bool]:
    """The ranks that are there, then the split that was asked for, more of it inside of layers first."""
    ranks = math.log2(plan.world / other.world)
    axes = abs(math.log2(other.pp / plan.pp)) + abs(math.log2(other.tp / plan.tp)) / 2
    return ranks, axes, other.layers != plan.layers
