"""What one rank of a plan holds between steps, computes and sends in a step: exact, from `layout`, `spec` and `zero`.

`verify` holds a running plan against these figures, so that a plan that is not really split cannot pass.  The padding
of a flat run, less than a chunk for each parameter and each rank, counts: it lies in memory, and it travels.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.layout import Layout, split, transition
from interlace.mesh import Mesh
from interlace.plan import context, expert, overlap, tensor
from interlace.plan import zero as engine
from interlace.plan.stages import layers_given, num_stages, placement_of, stages_of, table_of
from interlace.schedule.table import SENDS, Kind
from interlace.spec import Parameter, Role, parameters, units

FP32, FP64, INT64 = 4, 8, 8
SCALARS = 16  # bytes: loss and norm, fp64, exchanged once a step
STATES = {"adamw": 2, "sgd": 0}  # elements of optimizer state per parameter, without momentum


@dataclass(frozen=True)
class Run:
    """The parameters of a unit in the order of its flat run; `unit` is "root" for those that several use.

    largest: elements of the largest.  position: the place of the unit among those that the rank holds.  is_expert: they
    are experts, and the axis of which others have the rest runs.
    """

    unit: str
    members: tuple[Parameter, ...]
    cut: engine.Cut
    largest: int
    position: int
    is_expert: bool = False

    def over(self, axis: str) -> Layout:
        """The layout of its elements, one after another, split over `axis`."""
        return Layout.parse(f"U/{axis}:{self.cut.chunk}")


@dataclass(frozen=True)
class Share:
    """One rank's part.  Bytes, except `flops`: those of matrix products in one step.

    sent: by collective; along: the same by axis, those of experts' data axis under "edp"; with hybrid sharding what
    crosses all ranks of the data axis under "dp", what stays in a group under "shard", the rest under "replica".
    """

    main: int
    copies: int
    gradients: int
    optimizer: int
    flops: int
    sent: dict[str, int]
    along: dict[str, dict[str, int]] = field(default_factory=dict)


def runs(
    cfg: ModelConfig, ranks: int, tp: int = 1, sequence: bool = True, held: Collection[str] | None = None, ep: int = 1
) -> tuple[Run, ...]:
    """The flat runs of a model in order of execution, the root's last; alike on every rank of the tensor and expert
    axis.

    held: the units of a rank; None = all.  ep: over how many of the `ranks` experts are split, in runs of their own.
    """
    found: dict[tuple[str, bool], list[Parameter]] = {(unit, False): [] for unit in units(cfg)}
    root: list[Parameter] = []
    for parameter in parameters(cfg):
        users = {parameter.unit, "head"} if parameter.tied_to else {parameter.unit}
        if held is None or not users.isdisjoint(held):
            key = parameter.unit, ep > 1 and parameter.role is Role.EXPERT
            (root if parameter.tied_to else found.setdefault(key, [])).append(parameter)
    order = {unit: place for place, unit in enumerate(units(cfg))}
    keys = sorted(found, key=lambda key: (order[key[0]], key[1]))
    made: list[Run] = []
    places: dict[str, int] = {}
    for unit, is_expert, unsorted in (*((*key, found[key]) for key in keys), ("root", False, root)):
        members = sorted(unsorted, key=lambda member: (not member.decay, tensor.kind(member, tp, sequence)))
        most = expert.held(cfg.num_experts, ep, 0)[1] if is_expert else 1
        each = cfg.num_experts if is_expert else 1
        sizes = [tensor.slices(member, tp).numel(0) // each * most for member in members]
        if members:
            cut = engine.cut(sizes, ranks // ep if is_expert else ranks)
            position = places.setdefault(unit, len(places))
            made.append(Run(unit, tuple(members), cut, max(sizes), position, is_expert))
    return tuple(made)


def is_hybrid(plan: ParallelPlan) -> bool:
    """Whether several groups of `shard` ranks hold a copy each."""
    return 1 < plan.shard < plan.dp


def leaves(plan: ParallelPlan, batch: int) -> list[range]:
    """The micro-batches of `run.reproducible = "plan"`: micro_batch_size sequences each (1 when not given), for any dp.

    Number i is replica i mod dp's.
    """
    size = plan.micro_batch_size or 1
    return [range(start, min(start + size, batch)) for start in range(0, batch, size)]


def micro_batch_count(plan: ParallelPlan, batch: int, fixed: bool = False) -> int:
    """Micro-batches that every replica makes of a global batch of `batch` sequences, also the one with fewest.

    fixed: as `leaves`, one of them a round.
    """
    if fixed:
        return math.ceil(len(leaves(plan, batch)) / plan.dp)
    if not plan.micro_batch_size:
        return plan.micro_batches
    return math.ceil(math.ceil(batch / plan.dp) / plan.micro_batch_size)


def held_units(config: Config, rank: int) -> tuple[str, ...]:
    """The units of a rank: all, or those of its stages."""
    cfg, plan = config.model_config(), config.plan
    if plan.pp == 1:
        return units(cfg)
    place = Mesh.of(plan).index(rank, "pp")
    cut = stages_of(cfg, num_stages(plan), config.data.sequence_length, layers_given(plan))
    return tuple(unit for home, part in zip(placement_of(plan), cut, strict=True) if home == place for unit in part)


def reductions(config: Config, batch: int) -> int:
    """How often a step sums gradients over data ranks: once, or after each micro-batch."""
    fixed = config.run.reproducible == "plan"
    each = fixed or config.plan.reduce == "micro_batch"
    return micro_batch_count(config.plan, batch, fixed) if each else 1


def travels_narrow(config: Config, batch: int) -> bool:
    """Whether gradients travel in the dtype in which they arise, bf16: nothing is added up before."""
    if config.plan.pp > 1 or config.train.precision != "bf16":
        return False
    return reductions(config, batch) == micro_batch_count(config.plan, batch, config.run.reproducible == "plan")


def share(
    config: Config,
    rank: int,
    batch: int,
    documents: context.Documents | None = None,
    visits: expert.Visits | None = None,
    ways: overlap.Ways | None = None,
) -> Share:
    """The part of `rank` in a step on a global batch of `batch` sequences.

    documents: where documents begin in each sequence, which decides what travels along cp; None = attention does not
    care.  visits: how often each expert is chosen, which decides what travels along ep; None = all alike.  ways: how
    each of `overlapped`'s products runs, which decides what travels along tp; None = plain.
    """
    given = config
    if given.plan.cp > 1 or given.plan.ep > 1:
        count = micro_batch_count(given.plan, batch)
        merged = replace(context.as_data(given.plan), micro_batches=count, micro_batch_size=0)
        config = replace(config, plan=merged)
    cfg, plan = config.model_config(), config.plan
    mesh = Mesh.of(plan)
    compute = config.train.itemsize
    held_here = held_units(config, rank)
    everything = runs(cfg, plan.dp, plan.tp, plan.sequence == "on", held_here, plan.ep)
    found = tuple(run for run in everything if not run.is_expert)
    kept = _resident(config, mesh, rank, batch, found)
    fixed = config.run.reproducible == "plan"
    states = STATES[config.train.optimizer] + (config.train.optimizer == "sgd" and config.train.momentum > 0)
    whole_mesh, place = Mesh.of(given.plan), mesh.index(rank, "tp")
    parts = computed_parts(given.plan, whole_mesh, rank, batch, fixed)
    counts = [len(part) for part in parts]
    position = whole_mesh.index(rank, "cp")
    length = context.held(config.data.sequence_length, given.plan.cp, position)
    along: dict[str, Counter[str]] = {}
    if plan.dp > 1:
        along |= _sent(config, mesh, rank, batch, compute, found)
    rows = None
    if plan.ep > 1:
        theirs = tuple(run for run in everything if run.is_expert)
        for_experts = replace(config, plan=expert.as_data(plan))
        ours, there = expert.place(plan, rank)
        more = _resident(for_experts, ours, there, batch, theirs)
        kept = tuple(a + b for a, b in zip(kept, more, strict=True))
        if for_experts.plan.dp > 1:
            apart = _sent(for_experts, ours, there, batch, compute, theirs, scalars=0)
            along["edp"] = sum(apart.values(), Counter())
        rows, moved = _work_of_experts(given, config, rank, batch, visits, compute)
        along["ep"] = Counter(all_to_all=moved)
    main, copies, gradients = kept
    if plan.tp > 1:
        along["tp"] = Counter(tensor.sent(cfg, plan, place, counts, length, compute, held_here))
        if ways is not None:
            overlap.beyond(overlapped(given, rank, batch), ways, compute, plan.tp, place, along["tp"])
        along["tp"].update(_paid(config, mesh, rank, batch, found))
        along["tp"]["all_gather"] += SCALARS * (plan.tp - 1)
    if plan.pp > 1:
        along["pp"] = Counter(_sent_between_stages(config, mesh, rank, batch, compute, found, counts, length))
    if given.plan.cp > 1:
        those = [None if documents is None else [documents[i] for i in part] for part in parts]
        cut = stages_of(cfg, num_stages(plan), config.data.sequence_length, layers_given(plan))
        home, stage = placement_of(plan), mesh.index(rank, "pp")
        own = [part for at, part in zip(home, cut, strict=True) if at == stage] if plan.pp > 1 else [units(cfg)]
        along["cp"] = Counter(context.sent(given, position, counts, those, compute, own))
    sent: Counter[str] = Counter()
    for moved_along in along.values():
        sent.update(moved_along)
    return Share(
        main=FP32 * main,
        copies=copies,
        gradients=FP32 * gradients,
        optimizer=FP32 * states * main,
        flops=tensor.products(cfg, plan, place, counts, length, held_here, rows),
        sent=dict(sent),
        along={axis: dict(moved) for axis, moved in along.items()},
    )


def overlapped(config: Config, rank: int, batch: int) -> Counter[overlap.Product]:
    """The products of a rank in a step whose transfers may be fused, and how often each runs."""
    plan, mesh = config.plan, Mesh.of(config.plan)
    length = context.held(config.data.sequence_length, plan.cp, mesh.index(rank, "cp"))
    held_here = held_units(config, rank)
    found: Counter[overlap.Product] = Counter()
    for count in computed_sequences(plan, mesh, rank, batch, config.run.reproducible == "plan"):
        found.update(overlap.products(config.model_config(), plan, count * length, held_here))
    return found


def _resident(config: Config, mesh: Mesh, rank: int, batch: int, found: tuple[Run, ...]) -> tuple[int, ...]:
    """Of these runs on a rank: elements of main weights, bytes of copies, elements of gradients."""
    plan, compute = config.plan, config.train.itemsize
    axis = "shard" if is_hybrid(plan) else "dp"
    is_split = plan.zero > 0 and plan.dp > 1
    held = whole = sum(run.cut.total for run in found)
    if is_split:
        held = sum(run.over(axis).local_numel((run.cut.total,), mesh, rank) for run in found)
    copies = compute * whole if is_split or compute != FP32 else 0
    if is_split and plan.zero == 3:  # those of a pipeline are freed when the step ends
        copies = 0 if plan.pp > 1 else compute * sum(_gathered(found))
    fixed = config.run.reproducible == "plan"
    in_place = not is_split or (plan.zero == 1 and not travels_narrow(config, batch))  # whole runs stay, with the sum
    if fixed and is_split and not is_hybrid(plan):
        in_place = False
    gradients = whole if in_place else held
    if fixed and plan.dp > 1 and (plan.zero == 0 or is_hybrid(plan)):
        adding = sum(run.cut.total for run in found if not _is_summed_elsewhere(plan, mesh, rank, run, fixed))
        gradients += adding // plan.dp  # what rounds add up in
    return held, copies, gradients


def _work_of_experts(
    given: Config, config: Config, rank: int, batch: int, visits: expert.Visits | None, compute: int
) -> tuple[dict[str, int], int]:
    """Rows that the experts of a rank multiply, by unit, and bytes that it sends along ep.

    config: with ranks of cp as further ranks of dp; given: the run's.
    """
    cfg, mesh, plan = config.model_config(), Mesh.of(config.plan), given.plan
    whole = Mesh.of(plan)
    everyone = []
    for peer in mesh.peers(rank, "ep"):
        at = whole.index(peer, "cp")
        positions = context.held(config.data.sequence_length, plan.cp, at)
        parts = computed_parts(plan, whole, peer, batch)
        everyone.append([(sequence, at, positions) for part in parts for sequence in part])
    layers = expert.layers(cfg, held_units(config, rank))
    done = expert.work(cfg, config.plan, mesh.index(rank, "ep"), everyone, visits, layers, compute)
    return {f"blocks.{layer}": count for layer, count in done.rows.items()}, done.sent


def computed_sequences(plan: ParallelPlan, mesh: Mesh, rank: int, batch: int, fixed: bool = False) -> list[int]:
    """Sequences of each micro-batch that a rank computes of a global batch; an empty one has one without labels."""
    return [len(part) for part in computed_parts(plan, mesh, rank, batch, fixed)]


def computed_parts(plan: ParallelPlan, mesh: Mesh, rank: int, batch: int, fixed: bool = False) -> list[range]:
    """The sequences of each micro-batch of a rank, by their place in the global batch; in an empty one stands the first
    of all, without labels."""
    count, index = micro_batch_count(plan, batch, fixed), mesh.index(rank, "dp")
    if fixed:
        own = leaves(plan, batch)[index :: plan.dp]
        return own + [range(1)] * (count - len(own))
    start, stop = split(batch, plan.dp, index)
    parts = (split(stop - start, count, number) for number in range(count))
    return [range(start + first, start + last) if first < last else range(1) for first, last in parts]


def _is_summed_elsewhere(plan: ParallelPlan, mesh: Mesh, rank: int, run: Run, fixed: bool) -> bool:
    """Whether another stage adds up the gradients of a run: in fixed order, the first those of a tied weight."""
    if not fixed or plan.pp == 1 or run.unit != "root":
        return False
    home = placement_of(plan)
    return home[0] != home[-1] and mesh.index(rank, "pp") == home[-1]


def _sent_between_stages(
    config: Config,
    mesh: Mesh,
    rank: int,
    batch: int,
    compute: int,
    found: tuple[Run, ...],
    counts: list[int],
    length: int,
) -> Counter[str]:
    """Bytes that a rank of a pipeline sends to its neighbours, and for what is added up over all stages.

    length: positions of each sequence that it holds.
    """
    plan, cfg = config.plan, config.model_config()
    fixed = config.run.reproducible == "plan"
    place = mesh.index(rank, "pp")
    table = table_of(plan, len(counts), fixed)
    row = cfg.hidden_size * compute
    sends = [counts[action.micro_batch or 0] * length for action in table.rows[place]
             if action.kind in SENDS]  # fmt: skip
    if plan.tp > 1 and plan.sequence == "on":  # a rank sends the rows that it holds
        bounds = (split(rows, plan.tp, mesh.index(rank, "tp")) for rows in sends)
        sends = [stop - start for start, stop in bounds]
    sent = Counter(send=row * sum(sends))
    numbers = SCALARS
    if fixed:  # a loss a micro-batch, a square sum a chunk that holds parameters
        counted = [run for run in found if not _is_summed_elsewhere(plan, mesh, rank, run, fixed)]
        ends = [run.cut.offsets[-1] + run.members[-1].numel for run in counted]
        chunks = sum(math.ceil(end / run.cut.chunk) for end, run in zip(ends, counted, strict=True))
        numbers = FP64 * (len(leaves(plan, batch)) + chunks)
    if fixed and cfg.has_router_losses:
        layers = expert.layers(cfg, [run.unit for run in found])
        numbers += 2 * FP32 * len(layers) * sum(counts)  # two losses a layer and sequence
    sent["all_gather"] = numbers * (plan.pp - 1)
    home = placement_of(plan)
    for run in found:
        if run.unit == "root" and home[0] != home[-1]:  # each of two ranks sends half, and gets the sum's other half
            shards = mesh.size("shard" if is_hybrid(plan) else "dp") if plan.zero else 1
            half = FP32 * run.cut.total // shards // 2
            if not fixed:
                sent.update({"reduce_scatter": half, "all_gather": half})
            elif place == home[0]:
                sent["broadcast"] += 2 * half
            else:
                sent["send"] += compute * run.members[0].numel * len(counts)
    return sent


def _paid(config: Config, mesh: Mesh, rank: int, batch: int, found: tuple[Run, ...]) -> Counter[str]:
    """Bytes of gradients added up over the tensor axis, behind each sum over data ranks: of what a rank holds, the
    ranges that several ranks hold."""
    paid: Counter[str] = Counter()
    plan = config.plan
    axis = "shard" if is_hybrid(plan) else "dp"
    place, index = mesh.index(rank, "tp"), mesh.index(rank, axis)
    sequence = plan.sequence == "on"
    for run in found:
        size = run.cut.total // mesh.size(axis) if plan.zero and plan.dp > 1 else run.cut.total
        low, high = (index * size, (index + 1) * size) if size < run.cut.total else (0, size)
        placed = zip(run.members, run.cut.offsets, strict=True)
        for (_, (holders, _)), members in itertools.groupby(
            placed, lambda pair: (pair[0].decay, tensor.kind(pair[0], plan.tp, sequence))
        ):
            ranges = [(offset, offset + tensor.slices(member, plan.tp).numel(0)) for member, offset in members]
            elements = min(ranges[-1][1], high) - max(ranges[0][0], low)
            for _ in range(_sums(config, mesh, batch, run) if holders > 1 and elements > 0 else 0):
                paid.update(tensor.paid(elements, holders, place % holders))
    return paid


def _sums(config: Config, mesh: Mesh, batch: int, run: Run) -> int:
    """How often the gradients of a run are summed in a step."""
    plan = config.plan
    whole_step = plan.pp > 1 and run.unit == "root"  # read by two stages
    return 1 if whole_step or (plan.pp == 1 and mesh.size("dp") == 1) else reductions(config, batch)


def _gathered(found: tuple[Run, ...]) -> Iterator[int]:
    """Elements of the buffers that hold gathered units under zero=3; the root has its own."""
    inner = [run for run in found if run.unit != "root"]
    totals = [run.cut.total for run in inner]
    chosen = engine.slots(totals, [run.position for run in inner], distance=2)
    yield from engine.slot_sizes(totals, chosen)
    yield from (run.cut.total for run in found if run.unit == "root")


def _gathers(config: Config, place: int, count: int, fixed: bool) -> dict[str, int]:
    """How often the table of a pipeline gathers each unit of a rank: once, but where a file of one's own says more."""
    plan = config.plan
    table = table_of(plan, count, fixed)
    cut = stages_of(config.model_config(), num_stages(plan), config.data.sequence_length, layers_given(plan))
    times = Counter(action.stage for action in table.rows[place] if action.kind is Kind.UNSHARD)
    return {unit: times[stage] for stage in table.stages_of(place) for unit in cut[stage]}


def _sent(
    config: Config, mesh: Mesh, rank: int, batch: int, compute: int, found: tuple[Run, ...], scalars: int = SCALARS
) -> dict[str, Counter[str]]:
    """Bytes that this rank sends in a step by axis and collective: each unit's transitions, as often as they happen.

    scalars: bytes of what is exchanged once a step.
    """
    plan = config.plan
    narrow = travels_narrow(config, batch)
    wire = 2 if config.train.reduce_dtype == "bf16" or narrow else FP32
    fixed = config.run.reproducible == "plan"
    count = micro_batch_count(plan, batch, fixed)
    if fixed:  # a loss a round, a square sum a chunk
        scalars = FP64 * (count + sum(run.cut.total // run.cut.chunk for run in found) // plan.dp)
    if scalars:
        layers = expert.layers(config.model_config(), [run.unit for run in found])
        scalars += INT64 * len(layers) * (config.model_config().num_experts + 1)  # how often each was chosen
    sent = {"dp": Counter(all_gather=scalars * (plan.dp - 1))}
    units_run = [run for run in found if run.unit != "root"]
    times = dict.fromkeys((run.unit for run in found), 1)
    if plan.zero == 3 and plan.pp == 1:
        totals, positions = [run.cut.total for run in units_run], [run.position for run in units_run]
        chosen = engine.slots(totals, positions, distance=2)
        regather = [run.unit != "embedding" for run in units_run]
        ahead = 0 if plan.overlap == "off" else 1
        counts = engine.gathers_per_step(chosen, regather, ahead, count)
        times |= dict(zip((run.unit for run in units_run), counts, strict=True))
    elif plan.zero == 3:
        times |= _gathers(config, mesh.index(rank, "pp"), count, fixed)

    def add(axis: str, summed: bool, run: Run, elements: int, itemsize: int, often: int) -> None:
        split = f"U/{axis}:{run.cut.chunk}"
        have, want = (Layout.parse(text) for text in ((f"U +{axis}", split) if summed else (split, "U")))
        for transfer in transition(have, want, (elements,), mesh, itemsize):
            sent.setdefault(axis, Counter())[transfer.collective] += transfer.bytes_by_rank[rank] * often

    hybrid = is_hybrid(plan)
    inner = "shard" if hybrid else "dp"
    for run in found:
        whole = run.cut.total
        shard = whole // mesh.size(inner)
        if _is_summed_elsewhere(plan, mesh, rank, run, fixed):
            if plan.zero:
                add(inner, False, run, whole, compute, 1)
            continue
        often = _sums(config, mesh, batch, run)
        if fixed:
            add("dp", True, run, whole, wire, count)
        else:
            add(inner, True, run, whole, wire, often)
        if hybrid:
            if not fixed:
                add("replica", True, run, shard, FP32 if narrow else wire, often)  # sums of a shard are in fp32
            add("replica", False, run, shard, FP32, 1 if fixed else often)
        if plan.zero == 0:
            add(inner, False, run, whole, FP32, 1 if fixed else often)
        else:
            add(inner, False, run, whole, compute, times[run.unit])
    return sent
