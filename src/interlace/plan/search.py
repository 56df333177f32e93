"""The layouts of a run on so many GPUs, the quickest first, and why the others are left out: arithmetic, no torch.

Every mesh that the model and the batch allow is tried, with the schedules of pipelines and micro-batches by powers of
two.  Of ZeRO 1 to 3 and the policies of recompute the first that fits counts, since each costs more time than the one
before: no recompute with ZeRO 1, 2, 3, then selective, then full.  `fit` refuses what does not divide, `memory` what
does not fit, `cost` prices the rest: all of them by formulae, the best ones again with their pipeline's table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from interlace.config import Config, ParallelPlan
from interlace.plan.cost import Cost, price
from interlace.plan.fit import RECOMPUTE, meshes_of, refused
from interlace.plan.memory import Memory, estimate, gib
from interlace.schedule import FORMS
from interlace.topology import Topology

AXES = ("dp", "shard", "tp", "cp", "ep", "pp")
RESERVED = 3 << 30  # bytes of a GPU: context, libraries, what the allocator cannot use (1 to 2 GiB and more are usual)
AGAIN = 24  # of the best by formulae, that are priced with their tables
SLICE = 512  # positions of a slice of the context axis, of which a rank has two: less hides no keys
CHUNKS = (2, 4)  # stages a rank, of interleaved


@dataclass(frozen=True)
class Choice:
    """A layout that fits, with its price."""

    plan: ParallelPlan
    memory: Memory
    cost: Cost


@dataclass(frozen=True)
class Refusal:
    """Why some layouts are left out: how many, and one of them."""

    reason: str
    count: int
    example: ParallelPlan


@dataclass(frozen=True)
class Found:
    """`choices`: the best of every mesh, the quickest first.  tried: layouts looked at."""

    choices: tuple[Choice, ...]
    refusals: tuple[Refusal, ...]
    tried: int


def search(
    config: Config,
    world: int,
    topology: Topology,
    memory_bytes: int | None = None,
    held: Collection[str] = (),
    advance: Callable[[int, int], None] | None = None,
) -> Found:
    """Of `config` on `world` GPUs of `topology`.

    memory_bytes: of a GPU; the topology's, less what is reserved, when None.  held: keys of the plan that stay as
    `config.plan` has them.  advance: told of (layouts looked at, all).
    """
    room = topology.memory_bytes - RESERVED if memory_bytes is None else memory_bytes
    cfg = config.model_config()
    best: dict[tuple[object, ...], Choice] = {}
    known: dict[Any, Any] = {}
    reasons: dict[str, list[ParallelPlan]] = {}
    least: tuple[int, ParallelPlan] | None = None
    tried, layouts = 0, list(_layouts(config, world, topology, held))
    for number, layout in enumerate(layouts):
        if advance is not None:
            advance(number, len(layouts))
        for plan in _states(layout, config.plan, held):
            tried += 1
            if reason := refused(config, cfg, plan, world, AXES):
                reasons.setdefault(re.sub(r"=\S+|\d+", "", reason), []).append(plan)
                break  # no stage of ZeRO and no recompute divides what this one does not
            memory = estimate(config, plan, places=sorted({0, min(1, plan.pp - 1), plan.pp - 1}))
            if memory.total <= room:
                _keep(best, Choice(plan, memory, price(config, plan, topology, False, known)))
                break
            reasons.setdefault("", []).append(plan)
            if least is None or memory.total < least[0]:
                least = memory.total, plan
    first = sorted(best.values(), key=_rank)
    again = []
    for choice in first[:AGAIN]:
        memory = estimate(config, choice.plan)
        if memory.total <= room:
            again.append(Choice(choice.plan, memory, price(config, choice.plan, topology, True, known)))
    choices: dict[tuple[int, ...], Choice] = {}
    for choice in sorted(again, key=lambda choice: choice.cost.seconds):
        plan = choice.plan
        choices.setdefault((plan.dp, plan.tp, plan.pp, plan.cp, plan.ep), choice)
    return Found(tuple(choices.values()), tuple(_refusals(config, world, reasons, least, room)), tried)


def _keep(best: dict[tuple[object, ...], Choice], choice: Choice) -> None:
    """As the best of its mesh and schedule, if it is."""
    plan = choice.plan
    mesh = (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.schedule, plan.chunks)
    if mesh not in best or _rank(choice) < _rank(best[mesh]):
        best[mesh] = choice


def _rank(choice: Choice) -> tuple[float, int, str]:
    """Seconds to a part in a thousand, then memory."""
    return float(f"{choice.cost.seconds:.3g}"), choice.memory.total, str(choice.plan)


def _refusals(
    config: Config,
    world: int,
    reasons: dict[str, list[ParallelPlan]],
    least: tuple[int, ParallelPlan] | None,
    room: int,
) -> Iterator[Refusal]:
    """The most frequent first; those that do not fit are one, told by the one that needs least."""
    cfg = config.model_config()
    for key, plans in sorted(reasons.items(), key=lambda item: -len(item[1])):
        if key:
            yield Refusal(refused(config, cfg, plans[0], world, AXES) or "", len(plans), plans[0])
        elif least is not None:
            yield Refusal(f"needs {gib(least[0])} a GPU or more, found {gib(room)}", len(plans), least[1])


def _layouts(config: Config, world: int, topology: Topology, held: Collection[str]) -> Iterator[ParallelPlan]:
    """Meshes, schedules and micro-batches."""
    asked, has_experts = config.plan, config.model_config().num_experts > 0
    domain = topology.links[0].domain or world
    for dp, tp, pp, cp, ep in meshes_of(world, AXES):
        mesh = replace(asked, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
        if any(getattr(asked, axis) != getattr(mesh, axis) for axis in ("dp", "tp", "pp", "cp", "ep") if axis in held):
            continue
        if ("tp" not in held and tp > domain) or (ep > 1 and not has_experts):  # tp's transfers wait in every layer
            continue
        if "cp" not in held and cp > 1 and config.data.sequence_length < SLICE * 2 * cp:
            continue
        plain = replace(mesh, schedule="1f1b", chunks=1, layers="", unsharded=0)
        for plan in _pipelines(plain, asked, held) if pp > 1 else [plain]:
            for count, size in _batchings(config, dp, held):
                yield replace(plan, micro_batches=count, micro_batch_size=size)


def _states(layout: ParallelPlan, asked: ParallelPlan, held: Collection[str]) -> Iterator[ParallelPlan]:
    """Stages of ZeRO and policies of recompute, the quickest first."""
    stages = (asked.zero,) if "zero" in held else (1, 2, 3) if layout.dp * layout.cp > 1 else (0,)
    for policy in (asked.recompute,) if "recompute" in held else RECOMPUTE:
        for zero in stages:
            yield replace(layout, zero=zero, recompute=policy)


def _pipelines(mesh: ParallelPlan, asked: ParallelPlan, held: Collection[str]) -> Iterator[ParallelPlan]:
    if "schedule" in held or "chunks" in held:
        yield replace(mesh, schedule=asked.schedule, chunks=asked.chunks, layers=asked.layers)
        return
    for name in FORMS:
        if name == "interleaved":
            yield from (replace(mesh, schedule=name, chunks=chunks) for chunks in CHUNKS)
        elif name != "gpipe":  # 1f1b takes as long and holds less
            yield replace(mesh, schedule=name)


def _batchings(config: Config, dp: int, held: Collection[str]) -> list[tuple[int, int]]:
    """(micro_batches, micro_batch_size): all sequences at once, halves, quarters, ... down to one each."""
    asked = config.plan
    if "micro_batches" in held or "micro_batch_size" in held or config.run.reproducible == "plan":
        return [(asked.micro_batches, asked.micro_batch_size)]
    least = max(1, config.train.global_batch // dp)
    return [(count, 0) for count in sorted({min(least, 1 << power) for power in range(least.bit_length() + 1)})]
