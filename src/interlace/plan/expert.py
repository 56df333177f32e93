"""The expert axis as integers: which experts a rank holds, who holds the same, what it sends and multiplies.  Exact.

`ep` folds the ranks that see different tokens, those of dp x cp: `ep` neighbours of their joint order hold all experts
between them, each X/ep (balanced: X need not divide).  The ranks at the same place of every such group, `edp`, hold the
same experts, add their gradients up, and are what ZeRO splits experts over.  Everything else is split over dp x cp.
Run by the engine, priced by the planner, and held against a running plan by `verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from interlace.config import ModelConfig, ParallelPlan
from interlace.layout import split
from interlace.mesh import Mesh
from interlace.plan import exchange

# Of every layer, sequence and place along cp: how often the tokens there choose each expert; nothing of dense layers.
Visits = Sequence[Sequence[Sequence[Sequence[int]]]]
Tokens = Sequence[tuple[int, int, int]]  # of what a rank computes: a sequence, the place along cp, its positions there
COUNT = 8  # bytes of a number of rows, int64


def held(num_experts: int, ways: int, rank: int) -> tuple[int, int]:
    """[start, stop) of the experts that a rank of the axis holds; rank 0 has the most."""
    return split(num_experts, ways, rank)


def layers(cfg: ModelConfig, held_units: Sequence[str]) -> list[int]:
    """The layers with experts among these units of a model."""
    numbers = [int(unit[7:]) for unit in held_units if unit.startswith("blocks.")]
    return [layer for layer in numbers if cfg.has_experts(layer)]


def inner(plan: ParallelPlan) -> int:
    """How many neighbours along `edp` share one copy of their experts: what of `shard` is left, 0 = all of them.

    plan: as the data axis's engine sees it.  Of `shard` neighbours every ep-th holds the same experts.  Where that is
    one alone, or does not come out even, experts are split over all of `edp`.
    """
    return plan.shard // plan.ep if plan.shard % plan.ep == 0 and plan.shard // plan.ep > 1 else 0


def as_data(plan: ParallelPlan) -> ParallelPlan:
    """The plan as the data axis's engine sees it for experts: its ranks of dp are those that hold the same ones.

    plan: as that engine sees it for everything else (`context.as_data`).
    """
    return replace(plan, dp=plan.dp // plan.ep, shard=inner(plan), ep=1)


def place(plan: ParallelPlan, rank: int) -> tuple[Mesh, int]:
    """The mesh of `as_data(plan)`, and where in it a rank of the whole mesh stands."""
    mesh, ours = Mesh.of(plan), Mesh.of(as_data(plan))
    return ours, ours.rank(tp=mesh.index(rank, "tp"), pp=mesh.index(rank, "pp"), dp=mesh.index(rank, "edp"))


def rows(cfg: ModelConfig, everyone: Sequence[Tokens], visits: Visits | None, layer: int) -> list[list[int]]:
    """Rows that each rank of an ep group sends to each in a pass over all tokens of a step: [from][to].

    everyone: what each rank computes.  visits: None = as if all experts were chosen equally often.
    """
    ways, X = len(everyone), cfg.num_experts
    found = []
    for own in everyone:
        counts = [0] * X
        for sequence, at, positions in own:
            if visits is None:
                bounds = (split(positions * cfg.experts_per_token, X, expert) for expert in range(X))
                chosen: Sequence[int] = [stop - start for start, stop in bounds]
            else:
                chosen = visits[layer][sequence][at]
            counts = [a + b for a, b in zip(counts, chosen, strict=True)]
        found.append([sum(counts[slice(*held(X, ways, to))]) for to in range(ways)])
    return found


@dataclass(frozen=True)
class Work:
    """Of one rank in a step: rows that its experts multiply in one pass, by layer, and bytes that it sends."""

    rows: dict[int, int]
    sent: int


def work(
    cfg: ModelConfig,
    plan: ParallelPlan,
    rank: int,
    everyone: Sequence[Tokens],
    visits: Visits | None,
    layers: Sequence[int],
    itemsize: int,
) -> Work:
    """What place `rank` of an ep group does in its layers.

    A row goes to its expert and back, and so do their gradients.  Numbers of rows go ahead of each forward pass, for
    every micro-batch and half of one, of which the fused exchange has none.  itemsize: bytes of an element of a row.
    """
    X, D, ways = cfg.num_experts, cfg.hidden_size, len(everyone)
    start, stop = held(X, ways, rank)
    forward = 2 if plan.recompute == "full" else 1
    is_fused = plan.overlap == "fused"
    numbers = COUNT * (X - (stop - start)) * (2 if plan.expert_halves == "on" else 1)
    numbers = plan.micro_batches * (exchange.counts(X, ways) if is_fused else numbers)
    here, sent = {}, 0
    for layer in layers:
        table = rows(cfg, everyone, visits, layer)
        here[layer] = sum(row[rank] for row in table)
        own = table[rank][rank]
        there, back = sum(table[rank]) - own, here[layer] - own  # to the experts and, once multiplied, back
        sent += numbers * forward
        if is_fused:
            passes = (exchange.sent(there, back, D, itemsize, backward) for backward in (False, True))
            sent += sum(times * nbytes for times, nbytes in zip((forward, 1), passes, strict=True))
        else:
            sent += (there + back) * D * itemsize * (forward + 1)
    return Work(here, sent)
