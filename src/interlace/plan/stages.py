"""Which units of a model stand on which stage of a pipeline, and the table that a plan runs.

    stages_of(cfg, 4, length)  ->  (("embedding", "blocks.0", ...), ..., ("blocks.30", "blocks.31", "head"))

A stage is a run of neighbouring layers, at least one; embedding and head stand beside the first and the last.  The cut
makes the slowest stage as quick as it can be, by the FLOPs of `spec` (the head of a small model with a large vocabulary
weighs as much as several layers), and among such cuts the most even one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from interlace.config import ModelConfig, ParallelPlan
from interlace.errors import PlanError
from interlace.schedule import FORMS, Action, Kind, Table, chunks_of, generate, lower, read_csv, validate
from interlace.spec import operations, units


def table_of(plan: ParallelPlan, micro_batches: int, fixed: bool = False) -> Table:
    """The lowered, valid table of a plan for so many micro-batches a replica.

    fixed: gradients are summed in the order of micro-batches.  Errors: PlanError for a file that cannot run, is of
    another number of ranks or of fewer micro-batches, or contradicts the plan (`contradiction`).
    """
    if plan.schedule in FORMS:
        table = generate(plan.schedule, plan.pp, micro_batches, plan.chunks)
    else:
        table = read_csv(plan.schedule)
        if table.ranks != plan.pp:
            raise PlanError(f"{plan.schedule} is of {table.ranks} ranks, found pp={plan.pp}: use pp={table.ranks}")
        if table.micro_batches != micro_batches:
            validate(table)
            table = table.first(micro_batches)
        if fault := contradiction(table, plan, fixed):
            raise PlanError(f"{table.where} {fault}")
    ahead = 0 if plan.overlap == "off" else 1
    table = lower(table, plan.zero, keep=plan.unsharded or None, each=_reduces_each(plan, fixed), ahead=ahead)
    validate(table)
    return table


def _reduces_each(plan: ParallelPlan, fixed: bool) -> bool:
    return fixed or plan.reduce == "micro_batch"


def contradiction(table: Table, plan: ParallelPlan, fixed: bool) -> str | None:
    """What the order of a file, or the ZeRO actions that it brings, gets wrong under a plan; None if nothing.

    The end of a sentence that begins with the file.  fixed: as in `table_of`.
    """
    for row in table.rows:
        for stage in sorted({action.stage for action in row}):
            own = [action for action in row if action.stage == stage]
            if found := (_disorder(own) if fixed else None) or _wrong_zero(own, plan, fixed):
                action, fault = found
                place = table.cell(action)
                return f"{fault} ({place})" if place else fault
    return None


def _disorder(actions: Sequence[Action]) -> tuple[Action, str] | None:
    """Gradients of a stage that come before those of an earlier micro-batch: of the weights, and in I of all others."""
    for kind in (Kind.INPUT, Kind.WEIGHT):
        made = [action for action in actions if action.kind in (Kind.BACKWARD, kind)]
        for one, following in itertools.pairwise(made):
            if (one.micro_batch or 0) > (following.micro_batch or 0):
                return (
                    one,
                    f'runs {one} before {following}, and run.reproducible = "plan" adds micro-batches in their order',
                )
    return None


def _wrong_zero(actions: Sequence[Action], plan: ParallelPlan, fixed: bool) -> tuple[Action, str] | None:
    """ZeRO actions of a stage, where the file brings any, that do not do what the plan says."""
    for action in actions:
        if action.kind is Kind.REDUCE and (action.micro_batch is not None) != _reduces_each(plan, fixed):
            asked = 'run.reproducible = "plan"' if fixed else f"reduce={plan.reduce}"
            often = "every micro-batch" if _reduces_each(plan, fixed) else "once a step"
            return action, f"runs {action}, and {asked} reduces {often}"
    whole = sum((action.kind is Kind.UNSHARD) - (action.kind is Kind.RESHARD) for action in actions)
    if plan.zero == 3 and whole:
        last = next(action for action in reversed(actions) if action.kind is Kind.UNSHARD)
        return last, f"leaves stage {last.stage} whole with zero=3, without a RESHARD behind its last use"
    return None


def placement_of(plan: ParallelPlan) -> tuple[int, ...]:
    """The rank of every stage of a plan; PlanError as of `table_of`."""
    if plan.schedule in FORMS:
        return generate(plan.schedule, plan.pp, 1, plan.chunks).placement
    return read_csv(plan.schedule).placement


def splits_backward(plan: ParallelPlan) -> bool:
    """Whether a plan's table has backward in two parts somewhere; PlanError as of `table_of`."""
    if plan.pp == 1:
        return False
    if plan.schedule in FORMS:
        return generate(plan.schedule, plan.pp, 2 * plan.pp, plan.chunks).splits_backward
    return read_csv(plan.schedule).splits_backward


def num_stages(plan: ParallelPlan) -> int:
    """Stages of all ranks together."""
    if plan.pp == 1:
        return 1
    if plan.schedule in FORMS:
        return plan.pp * chunks_of(plan.schedule, plan.chunks)
    return len(placement_of(plan))


def layers_given(plan: ParallelPlan) -> tuple[int, ...] | None:
    """Layers of each stage where the plan gives them, `layers=8/8/7/7`; None: they are chosen."""
    return tuple(map(int, plan.layers.split("/"))) if plan.layers else None


@functools.lru_cache(maxsize=256)
def stages_of(
    cfg: ModelConfig, stages: int, length: int, layers: tuple[int, ...] | None = None
) -> tuple[tuple[str, ...], ...]:
    """The units of every stage, each unit on one.  layers: how many each stage has; None = by cost, for sequences of
    `length` positions.

    Errors: PlanError for more stages than layers, and for `layers` that are not as many as the model has.
    """
    if layers is None:
        layers = _balanced(cfg, stages, length)
    elif len(layers) != stages or sum(layers) != cfg.num_layers or min(layers) < 1:
        nearest = "/".join(map(str, _balanced(cfg, stages, length)))
        given = "/".join(map(str, layers))
        raise PlanError(
            f"layers={given}, found {stages} stages of a layer or more and {cfg.num_layers} layers: nearest is "
            f"layers={nearest}"
        )
    embedding, *blocks, head = units(cfg)
    ends = [0, *itertools.accumulate(layers)]
    cut = [blocks[a:b] for a, b in itertools.pairwise(ends)]
    cut[0].insert(0, embedding)
    cut[-1].append(head)
    return tuple(map(tuple, cut))


def unit_costs(cfg: ModelConfig, length: int) -> dict[str, float]:
    """FLOPs per token of each unit's forward; an embedding multiplies nothing and counts as a pass over its output."""
    costs = dict.fromkeys(units(cfg), 0.0)
    costs["embedding"] = 2.0 * cfg.hidden_size
    for operation in operations(cfg, length):
        costs[operation.unit] += operation.causal
    return costs


def _balanced(cfg: ModelConfig, stages: int, length: int) -> tuple[int, ...]:
    """Layers of each stage: the least slowest stage, then the least sum of squares; the first such cut.

    best[n] is that of the first n layers over the stages so far: (slowest, squares, layers of each).
    """
    if stages > cfg.num_layers:
        raise PlanError(f"{stages} stages need as many layers, found {cfg.num_layers}: use {cfg.num_layers} stages")
    embedding, *blocks, head = unit_costs(cfg, length).values()
    sums = [0.0, *itertools.accumulate(blocks)]
    count = len(blocks)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in (n for n in best if n < stop):
                cost = sums[stop] - sums[start]
                cost += embedding * (stage == 0) + head * (stage == stages - 1)
                slowest, squares, layers = best[start]
                candidate = (max(slowest, cost), squares + cost * cost, (*layers, stop - start))
                if stop not in found or candidate[:2] < found[stop][:2]:
                    found[stop] = candidate
        best = found
    return best[count][2]
