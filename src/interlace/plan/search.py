"""The layouts of a run on so many GPUs, the quickest first, and why the others are left out: arithmetic, no torch.

Every mesh that the model and the batch allow is tried, with the schedules of pipelines and micro-batches by powers of
two; what could run and is left out all the same, `_unwise` says.  Of ZeRO 1 to 3 and the policies of recompute the
first that fits counts, since each costs more time than the one before: no recompute with ZeRO 1, 2, 3, of which 2 and
3 also with gradients that travel after each micro-batch, then selective, then full; once over all data ranks and, where
these are of several machines, once within each machine (hybrid).  `fit` refuses what does not divide, `memory` what
does not fit, `cost` prices the rest: all of them by formulae, the best ones again with their pipeline's table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from interlace.config import Config, ParallelPlan
from interlace.errors import PlanError
from interlace.plan.cost import Cost, price
from interlace.plan.fit import RECOMPUTE, meshes_of, refused
from interlace.plan.memory import Memory, apart, estimate
from interlace.plan.stages import layers_given, num_stages, placement_of, stages_of
from interlace.schedule import FORMS, read_csv
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
    lacks_memory: bool = False


@dataclass(frozen=True)
class Found:
    """`choices`: the best of every mesh, the quickest first.  tried: layouts looked at, ZeRO and recompute aside."""

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
    `config.plan` has them; the others are as if it did not name them.  advance: told of (layouts looked at, all).
    Errors: PlanError when no mesh of so many GPUs has the axes that are held.
    """
    room = max(0, topology.memory_bytes - RESERVED) if memory_bytes is None else memory_bytes
    cfg = config.model_config()
    best: dict[tuple[object, ...], Choice] = {}
    known: dict[Any, Any] = {}
    reasons: dict[str, list[ParallelPlan]] = {}
    least: tuple[int, ParallelPlan] | None = None
    layouts = list(_layouts(config, world, held))
    if not layouts:
        raise PlanError(_no_mesh(config, world, held))
    for number, layout in enumerate(layouts):
        if advance is not None:
            advance(number, len(layouts))
        inside = 0 if "shard" in held else _inside(layout, topology.links[0].domain or world)
        for shard in (layout.shard, inside) if inside else (layout.shard,):
            for plan in _states(replace(layout, shard=shard), held):
                reason = _unwise(config, topology, world, plan, held) or refused(config, cfg, plan, world, AXES)
                if reason:
                    if shard == layout.shard:
                        reasons.setdefault(re.sub(r"=\S+|\d+", "", reason), []).append(plan)
                    break  # no stage of ZeRO and no recompute divides what this one does not
                memory = _memory(config, plan, room)
                if memory.total <= room:
                    _keep(best, Choice(plan, memory, price(config, plan, topology, False, known)))
                    break
                if least is None or memory.total < least[0]:
                    least = memory.total, plan
            else:
                if shard == layout.shard:
                    reasons.setdefault("", []).append(layout)
    first = [replace(one, memory=estimate(config, one.plan)) for one in sorted(best.values(), key=_rank)[:AGAIN]]
    fit = [one for one in first if one.memory.total <= room]
    for one in first:
        if one.memory.total > room:
            reasons.setdefault("", []).append(one.plan)
            least = min(least or (one.memory.total, one.plan), (one.memory.total, one.plan), key=lambda pair: pair[0])
    again = [replace(one, cost=price(config, one.plan, topology, known=known, complete=False)) for one in fit]
    choices: dict[tuple[int, ...], Choice] = {}
    for choice in sorted(again, key=lambda choice: choice.cost.seconds):
        plan = choice.plan
        choices.setdefault((plan.dp, plan.tp, plan.pp, plan.cp, plan.ep), choice)
    told = _refusals(config, topology, world, held, reasons, least, room)
    return Found(tuple(choices.values()), tuple(told), len(layouts))


def _memory(config: Config, plan: ParallelPlan, room: int) -> Memory:
    """Of the fullest rank, or of the first one found that has no room."""
    found: list[Memory] = []
    for place in _fullest(config, plan):
        found.append(estimate(config, plan, places=[place]))
        if found[-1].total > room:
            break
    return max(found, key=lambda memory: memory.total)


def _fullest(config: Config, plan: ParallelPlan) -> list[int]:
    """Places of a pipeline of which one needs most memory: both ends, the second, the first with most layers."""
    if plan.pp <= 3:
        return list(range(plan.pp))
    cut = stages_of(config.model_config(), num_stages(plan), config.data.sequence_length, layers_given(plan))
    layers = [0] * plan.pp
    for place, units in zip(placement_of(plan), cut, strict=True):
        layers[place] += len(units)
    return sorted({0, 1, layers.index(max(layers[1:-1]), 1), plan.pp - 1})


def _keep(best: dict[tuple[object, ...], Choice], choice: Choice) -> None:
    """As the best of its mesh and schedule, if it is."""
    plan = choice.plan
    mesh = (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.shard, plan.schedule, plan.chunks)
    if mesh not in best or _rank(choice) < _rank(best[mesh]):
        best[mesh] = choice


def _rank(choice: Choice) -> tuple[float, int, str]:
    """Seconds to a part in a thousand, then memory."""
    return float(f"{choice.cost.seconds:.3g}"), choice.memory.total, str(choice.plan)


def _refusals(
    config: Config,
    topology: Topology,
    world: int,
    held: Collection[str],
    reasons: dict[str, list[ParallelPlan]],
    least: tuple[int, ParallelPlan] | None,
    room: int,
) -> Iterator[Refusal]:
    """The most frequent first; those that do not fit are one, told by the one that needs least."""
    cfg = config.model_config()
    for key, plans in sorted(reasons.items(), key=lambda item: -len(item[1])):
        if key:
            reason = _unwise(config, topology, world, plans[0], held) or refused(config, cfg, plans[0], world, AXES)
            yield Refusal(reason or "", len(plans), plans[0])
        elif least is not None:
            needed, found = apart(estimate(config, least[1]).total, room)
            yield Refusal(f"needs {needed} a GPU or more, found {found}", len(plans), least[1], True)


def _unwise(config: Config, topology: Topology, world: int, plan: ParallelPlan, held: Collection[str]) -> str | None:
    """Why a layout that could run is not looked at, unless it is asked for."""
    domain = topology.links[0].domain or world
    if "tp" not in held and plan.tp > domain:  # its transfers wait in every layer
        return f"splits layers over tp={plan.tp} GPUs, found {domain} that the innermost link joins"
    length = config.data.sequence_length
    if "cp" not in held and plan.cp > 1 and length < SLICE * 2 * plan.cp:
        return f"splits {length} positions over cp={plan.cp}, in slices of less than {SLICE}"
    return None


def _layouts(config: Config, world: int, held: Collection[str]) -> Iterator[ParallelPlan]:
    """Meshes, schedules and micro-batches."""
    asked = ParallelPlan(**{key: getattr(config.plan, key) for key in held})
    for dp, tp, pp, cp, ep in _meshes(config, world, held):
        for plan in _pipelines(replace(asked, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep), held):
            for count, size in _batchings(config, plan, held):
                yield replace(plan, micro_batches=count, micro_batch_size=size)


def _meshes(config: Config, world: int, held: Collection[str]) -> Iterator[tuple[int, int, int, int, int]]:
    """(dp, tp, pp, cp, ep), those that are held as they are; without experts, none over which they are split."""
    asked, has_experts = config.plan, config.model_config().num_experts > 0
    for mesh in meshes_of(world, AXES):
        pairs = zip(("dp", "tp", "pp", "cp", "ep"), mesh, strict=True)
        wanted = all(getattr(asked, axis) == size for axis, size in pairs if axis in held)
        if wanted and (mesh[-1] == 1 or has_experts or "ep" in held):
            yield mesh


def _no_mesh(config: Config, world: int, held: Collection[str]) -> str:
    """The sentence when no mesh has the axes that are held, with the number of GPUs that is nearest."""
    asked = " ".join(f"{axis}={getattr(config.plan, axis)}" for axis in AXES if axis in held and axis != "shard")
    rule = "dp x tp x pp x cp is the number of GPUs, and ep divides dp x cp"
    for change in range(1, world + config.plan.world * config.plan.ep):
        for near in (world - change, world + change):
            if near > 0 and any(_meshes(config, near, held)):
                return f'no mesh of {world} GPUs has "{asked}": {rule}; nearest is {near} GPUs'
    return f'no mesh has "{asked}": {rule}'


def _states(layout: ParallelPlan, held: Collection[str]) -> Iterator[ParallelPlan]:
    """Stages of ZeRO and policies of recompute, the quickest first."""
    stages = (1, 2, 3) if layout.dp * layout.cp > 1 else (0,)
    if "zero" in held or layout.unsharded:  # which ZeRO-3 alone has
        stages = (layout.zero if "zero" in held else 3,)
    for policy in (layout.recompute,) if "recompute" in held else RECOMPUTE:
        for zero in stages:
            yield replace(layout, zero=zero, recompute=policy)
            if zero >= 2 and layout.pp == 1 and layout.micro_batches > 1 and "reduce" not in held:
                yield replace(layout, zero=zero, recompute=policy, reduce="micro_batch")


def _inside(plan: ParallelPlan, domain: int) -> int:
    """The most data ranks that a copy may be split over so that none spans two domains, where the data axis does; or
    0."""
    if plan.dp * plan.cp * plan.tp <= domain:
        return 0
    sizes = range(2, min(plan.dp + 1, plan.dp * plan.cp))
    return max((n for n in sizes if plan.dp % n == 0 and domain % (n * plan.tp) == 0), default=0)


def _pipelines(mesh: ParallelPlan, held: Collection[str]) -> Iterator[ParallelPlan]:
    """With every schedule and number of chunks that is not held."""
    if mesh.pp == 1:
        yield mesh
        return
    for name in (mesh.schedule,) if "schedule" in held else FORMS:
        form = FORMS.get(name)
        if "chunks" not in held and form is not None and form.chunks is None:
            yield from (replace(mesh, schedule=name, chunks=chunks) for chunks in CHUNKS)
        elif name != "gpipe" or "schedule" in held:  # 1f1b takes as long and holds less
            yield replace(mesh, schedule=name)


def _batchings(config: Config, plan: ParallelPlan, held: Collection[str]) -> list[tuple[int, int]]:
    """(micro_batches, micro_batch_size): all sequences at once, halves, quarters, ... down to one each.

    Under `run.reproducible = "plan"` as they are, since sums follow from them, and as many as a file has.
    """
    if "micro_batches" in held or "micro_batch_size" in held:
        return [(plan.micro_batches, plan.micro_batch_size)]
    if config.run.reproducible == "plan":
        return [(1, config.plan.micro_batch_size)]
    if plan.pp > 1 and plan.schedule not in FORMS:
        return [(read_csv(plan.schedule).micro_batches, 0)]
    least = max(1, config.train.global_batch // plan.dp)
    return [(count, 0) for count in sorted({min(least, 1 << power) for power in range(least.bit_length() + 1)})]
