"""What a step of a plan takes on a topology, before any GPU is used: seconds by what they go to.

    step = products + attention + memory + optimizer + bubble + exposed transfers of each axis

Every operation of `spec` is priced by its shape on a rank (`fused.product_seconds`), attention by its FLOPs at a share
of the peak, everything between the products by its bytes at the memory's bandwidth; transfers by the bytes of
`plan.share` on the innermost link that joins their ranks.  What hides a transfer:

    dp      gradients under the backward pass of the last micro-batch, all but one unit's; weights under the passes that
            read them, all but the first unit's; with hybrid sharding the sums of the copies as gradients
    tp      the best way of each product (`fused.predict`); otherwise nothing
    cp      the attention that runs meanwhile; nothing where heads are dealt out
    ep      a fifth with the own exchange, nothing else
    pp      what the table says: `plan.simulate`, with the exposed transfers of the other axes in its passes

overlap=off hides nothing.  Not seen: the host's time, ranks that differ.  How near the figures are to measured steps:
benchmarks/results/2026-11-30-planned-steps.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.events import Event
from interlace.mesh import Mesh
from interlace.plan import context, exchange, fused, memory, overlap
from interlace.plan.expert import held as held_experts
from interlace.plan.memory import micro_batching
from interlace.plan.planned import planned, with_transfers
from interlace.plan.share import Share, is_hybrid, reductions, share
from interlace.plan.simulate import makespan
from interlace.plan.stages import layers_given, num_stages, placement_of, stages_of, table_of
from interlace.plan.tensor import seconds as tensor_seconds
from interlace.plan.tensor import split_dimension
from interlace.schedule import FORMS, generate
from interlace.spec import Operation, Parameter, Role, operations, parameters, units
from interlace.topology import Topology

# Of two H200s, bf16, compiled blocks, from a profile of steps of 1.2b (16 layers of 2048) and of attention alone.
ATTENTION = {64: 0.48, 128: 0.62}  # share of the peak, by head size, of long sequences
SHORT = 1400  # positions at which a sequence reaches half of it
WIDE, EAGER = 56, 1.7  # times the residual stream is read or written in a block, both passes; times that, not compiled
INNER = 8  # the same of what lies between the two halves of an MLP
ROUTED = 10  # the same of a row for each expert that a token visits, there and back (1.2b with 8 experts, one H200)
ROWS = 4  # of logits
ADDED = 20  # bytes an element of gradients that are added up, read and written, at half of the bandwidth
UPDATED = 34  # bytes an element of an update and of the norm before it
HIDDEN_ROWS = 0.2  # of the exchange with experts, by the own kernels
FORWARD = 0.4  # of what is read and written between products
DATA = ("dp", "shard", "replica")  # axes along which weights and gradients travel
ROUNDS = 6  # micro-batches a rank of a pipeline, after which a step goes on as it did
LONGER = 1.07  # all of it in a step, at the limit of power and beside transfers, over each by itself


@dataclass(frozen=True)
class Cost:
    """Seconds of a step on the rank with most work.  `bubble`: what a pipeline stands still for, its transfers too.

    exposed: by axis, what transfers add to the step.  flops: of the model, of all ranks (MFU's).
    """

    products: float
    attention: float
    memory: float
    optimizer: float
    bubble: float
    exposed: Mapping[str, float]
    tokens: int
    flops: float
    events: list[Event] = field(default_factory=list, repr=False, compare=False)

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.memory

    @property
    def seconds(self) -> float:
        return self.compute + self.optimizer + self.bubble + sum(self.exposed.values())

    def mfu(self, topology: Topology, world: int, dtype: str) -> float:
        """Share of the peak of all ranks that the model's FLOPs, causal, without recompute, are."""
        return self.flops / (self.seconds * world * topology.flops_per_second(dtype))


@dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch on a stage: forward, gradient of the input, gradient of the weights, by kind."""

    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    attention: tuple[float, float, float] = (0.0, 0.0, 0.0)
    memory: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __add__(self, other: _Pass) -> _Pass:
        def both(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
            return a[0] + b[0], a[1] + b[1], a[2] + b[2]

        return _Pass(
            both(self.products, other.products),
            both(self.attention, other.attention),
            both(self.memory, other.memory),
        )

    def longer(self, times: float) -> _Pass:
        def each(a: tuple[float, float, float]) -> tuple[float, float, float]:
            return times * a[0], times * a[1], times * a[2]

        return _Pass(each(self.products), each(self.attention), each(self.memory))

    @property
    def parts(self) -> tuple[float, float, float]:
        return tuple(map(sum, zip(self.products, self.attention, self.memory, strict=True)))  # type: ignore[return-value]


def price(
    config: Config,
    plan: ParallelPlan,
    topology: Topology,
    exact: bool = True,
    known: dict[Any, _Pass] | None = None,
    complete: bool = True,
) -> Cost:
    """Of a plan that `fit.check` lets pass.

    exact=False: bytes and a pipeline's bubble by formulae, without the plan's tables.  known: what was priced before,
    of the same configuration but for its plan, and topology.  complete=False: a step of many micro-batches is simulated
    for some of them, whose events are given; every further round adds to the bubble what the last of those did.
    """
    kinds: dict[Any, _Pass] = {} if known is None else known
    config = replace(config, plan=plan)
    cfg = config.model_config()
    batch, length = config.train.global_batch, config.data.sequence_length
    count, sequences = micro_batching(config, plan)
    cut = stages_of(cfg, num_stages(plan), length, layers_given(plan))
    experts = frozenset(cfg.expert_layers)
    passes = []
    for names in cut:
        whole = _Pass()
        for name in names:
            layer = int(name.removeprefix("blocks.")) if name.startswith("blocks.") else None
            windowed = layer is not None and bool(cfg.window(layer))
            kind = (name == "head", layer is None, layer in experts, windowed)
            key = (kind, sequences, plan.tp, plan.cp, plan.ep, plan.sequence, plan.recompute)
            if key not in kinds:
                kinds[key] = _unit(config, cfg, plan, topology, name, sequences)
            whole += kinds[key]
        passes.append(whole.longer(LONGER))
    home = placement_of(plan) if plan.pp > 1 else (0,)
    work = [sum((one for at, one in zip(home, passes, strict=True) if at == rank), _Pass()) for rank in range(plan.pp)]
    busiest = max(range(plan.pp), key=lambda rank: sum(work[rank].parts))
    own, first = work[busiest], busiest * plan.world // plan.pp
    names = tuple(name for at, part in zip(home, cut, strict=True) if at == busiest for name in part)
    mine = _share(config, first, count) if exact else _roughly(config, cfg, names)
    computed, held = count * sum(own.parts), mine.main // 4
    adding = ADDED * mine.gradients / 4 / topology.hbm_bandwidth * (count - 1) / count  # a micro-batch, of gradients
    update = UPDATED * held / topology.hbm_bandwidth
    exposed = _exposed(config, cfg, plan, topology, mine, own, count, first, names)
    inside = {axis: seconds / count for axis, seconds in exposed.items() if axis != "dp"}
    events: list[Event] = []
    if exact:
        parts = [one.parts for one in passes]
        events, bubble = _simulated(config, cfg, topology, cut, parts, adding, exposed, update, first, complete)
    else:
        bubble = (computed + count * sum(inside.values())) * _bubble(plan, count) if plan.pp > 1 else 0.0
    return Cost(
        products=count * sum(own.products),
        attention=count * sum(own.attention),
        memory=count * (sum(own.memory) + adding),
        optimizer=update,
        bubble=bubble if plan.pp > 1 else 0.0,
        exposed=exposed,
        tokens=batch * length,
        flops=3 * batch * length * sum(operation.causal for operation in operations(cfg, length)),
        events=events,
    )


def _simulated(
    config: Config,
    cfg: ModelConfig,
    topology: Topology,
    cut: Sequence[tuple[str, ...]],
    parts: Sequence[tuple[float, float, float]],
    adding: float,
    exposed: Mapping[str, float],
    update: float,
    first: int,
    complete: bool,
) -> tuple[list[Event], float]:
    """Events of the step, and its bubble on the busiest rank, `first`.

    parts: F, I and W of each stage.  adding: seconds in which a micro-batch's gradients are added up.
    """
    plan = config.plan
    count, sequences = micro_batching(config, plan)
    inside = {axis: seconds / count for axis, seconds in exposed.items() if axis != "dp"}
    nbytes = _message(config, cfg, plan, sequences) if plan.pp > 1 else 0
    apart, stages = plan.world // plan.pp, len(cut) // plan.pp
    links = (topology.link((place * apart, (place + 1) * apart)) for place in range(plan.pp - 1))
    message = max((link.transfer_seconds(nbytes) for link in links), default=0.0)  # some may leave a machine
    whole = [(f, i, w + adding / stages) for f, i, w in parts]
    costs = with_transfers(whole, sum(inside.values()), 1 / stages, message, nbytes)
    if plan.unsharded:
        costs = replace(costs, unshard=[_unshard(config, cfg, topology, first, names) for names in cut])
    home = placement_of(plan) if plan.pp > 1 else (0,)
    busy = sum(sum(part) for at, part in zip(home, parts, strict=True) if at == first * plan.pp // plan.world)
    some = count if complete or plan.schedule not in FORMS else min(count, ROUNDS * plan.pp + count % plan.pp)
    events: list[Event] = []
    bubbles = []
    for number in (some, some - plan.pp) if some < count else (some,):
        table = table_of(plan, number) if plan.pp > 1 else generate("1f1b", 1, number)
        made = planned(table, costs, inside, 1 / stages, exposed.get("dp", 0.0), update)
        events = events or made
        ended = makespan(made) - exposed.get("dp", 0.0) - update
        bubbles.append(ended - number * (busy + adding + sum(inside.values())))
    return events, max(0.0, bubbles[0] + (count - some) / plan.pp * (bubbles[0] - bubbles[-1]))


def _share(config: Config, rank: int, count: int) -> Share:
    """`share` of a rank that runs `count` micro-batches, without their table.

    A pipeline sends weights once a step, and gradients as often as `reductions` says.  Gathers of stages that take
    turns are not counted: `_unshard` prices them, where the table has them.
    """
    plan, batch = config.plan, config.train.global_batch
    if plan.pp == 1:
        return share(config, rank, batch)
    fixed = config.run.reproducible == "plan"
    if fixed:
        found = share(config, rank, min(batch, plan.dp * (plan.micro_batch_size or 1)))
    else:
        found = share(replace(config, plan=replace(plan, micro_batches=1, micro_batch_size=0)), rank, batch)
    sums = reductions(config, batch)
    times = {"reduce_scatter": sums, "all_gather": 0 if plan.unsharded else 1}
    if not fixed and plan.zero == 0:
        times["all_gather"] = sums  # the other half of an all-reduce
    weights = {
        axis: {name: nbytes * times.get(name, 1) for name, nbytes in found.along[axis].items()}
        for axis in (*DATA, "edp")
        if axis in found.along
    }
    return replace(found, along=found.along | weights)


def _roughly(config: Config, cfg: ModelConfig, names: tuple[str, ...]) -> Share:
    """What `share` counts, to some percent: gradients in the compute's type, weights once, thrice under ZeRO-3."""
    plan, itemsize = config.plan, config.train.itemsize
    merged, tokens = context.as_data(plan), math.ceil(config.train.global_batch / plan.dp) * config.data.sequence_length
    found = memory.runs_of(cfg, merged.dp, plan.shard, plan.tp, plan.ep, names)
    whole, held = sum(run.numel for run in found), sum(run.held(plan.zero) for run in found)
    count, _ = micro_batching(config, plan)
    gathers = 0 if plan.zero == 0 else 2 * count if plan.zero == 3 and plan.pp == 1 else 1
    if plan.unsharded and plan.unsharded < num_stages(plan) // plan.pp:  # they take turns
        gathers = 2 * count
    axis, ways = ("shard", plan.shard) if is_hybrid(merged) else ("dp", merged.dp)
    sums = reductions(config, config.train.global_batch)
    moved, wire = whole * (ways - 1) / ways, sums * (itemsize if sums == count and plan.pp == 1 else 4)
    along = {axis: {"reduce_scatter": moved * wire, "all_gather": moved * itemsize * gathers}}
    if plan.zero == 0:
        along["dp"] = {"all_reduce": 2 * moved * wire}
    if is_hybrid(merged):
        across = whole / plan.shard * (1 - plan.shard / merged.dp)
        along["replica"] = {"reduce_scatter": across * wire, "all_gather": 4 * across * sums}
    layers = len(names)
    keys = 2 * cfg.num_kv_heads * cfg.head_dim / plan.tp
    along["cp"] = {"all_to_all": 3 * layers * tokens / plan.cp * keys * itemsize * (plan.cp - 1)}
    rows = tokens / plan.cp * cfg.experts_per_token * cfg.hidden_size
    along["ep"] = {"all_to_all": 4 * layers * rows * itemsize * (plan.ep - 1) / plan.ep}
    return Share(main=4 * held, copies=0, gradients=4 * whole, optimizer=0, flops=0, sent={}, along=along)  # type: ignore[arg-type]


def _bubble(plan: ParallelPlan, count: int) -> float:
    """Of the compute of a rank, all stages alike: 1f1b's (p - 1) / m (arXiv 2104.04473, 2401.10241, 2405.15362)."""
    plain = (plan.pp - 1) / count
    if plan.schedule == "interleaved":
        return plain / plan.chunks
    return plain * {"zb-h1": 1 / 3, "zbv": 1 / 6, "dualpipev": 1 / 6, "v-half": 1 / 2}.get(plan.schedule, 1.0)


# --- compute ---------------------------------------------------------------------------------------------------------


def _unit(config: Config, cfg: ModelConfig, plan: ParallelPlan, topology: Topology, name: str, sequences: int) -> _Pass:
    """Of one unit on a rank, for a micro-batch of so many sequences."""
    dtype, length = config.train.precision, config.data.sequence_length
    rows = math.ceil(sequences * length / plan.cp)
    table = {parameter.name: parameter for parameter in parameters(cfg)}
    tied = table.get("head.output.weight") or table["embedding.weight"]
    found = _Pass()
    for operation in operations(cfg, length):
        if operation.unit != name:
            continue
        if operation.kind == "attention":
            padded = 2 * cfg.head_dim / (cfg.head_dim + cfg.value_size)  # zeros behind values are multiplied too
            found += _attention(topology, plan, operation, dtype, length, rows).longer(padded)
        else:
            parameter = table.get(f"{operation.name}.weight") or table.get(operation.name) or tied
            found += _product(topology, plan, cfg, operation, parameter, dtype, rows)
    itemsize, eager = config.train.itemsize, 1.0 if config.train.compile else EAGER
    if name == "head":
        logits = ROWS * itemsize * rows * math.ceil(cfg.vocab_size / plan.tp) / topology.hbm_bandwidth
        return replace(found, products=(sum(found.products), 0.0, 0.0), memory=(logits, 0.0, 0.0))  # loss and gradient
    if name == "embedding":
        return _Pass(memory=_between(topology, itemsize * rows * cfg.hidden_size * 4))
    stream = rows * cfg.hidden_size / (plan.tp if plan.sequence == "on" else 1)
    inner = rows * _inner(cfg, name) / plan.tp
    routed = rows * cfg.hidden_size * _choices(cfg, name)
    found += _Pass(memory=_between(topology, itemsize * eager * (WIDE * stream + INNER * inner + ROUTED * routed)))
    if plan.recompute == "full":
        again = [sum(kind[0] for kind in (found.products, found.attention, found.memory))]
        return found + _Pass(memory=(0.0, again[0], 0.0))
    if plan.recompute == "selective":
        return found + _Pass(attention=(0.0, found.attention[0], 0.0))
    return found


def _between(topology: Topology, nbytes: float) -> tuple[float, float, float]:
    seconds = nbytes / topology.hbm_bandwidth
    return FORWARD * seconds, (1 - FORWARD) * seconds, 0.0


def _choices(cfg: ModelConfig, name: str) -> int:
    """Experts that a token visits in a block."""
    return cfg.experts_per_token if int(name.removeprefix("blocks.")) in cfg.expert_layers else 0


def _inner(cfg: ModelConfig, name: str) -> int:
    """Features between the halves of a block's MLP, of all experts that a token visits."""
    choices = _choices(cfg, name)
    return choices * cfg.expert_ffn_size + cfg.shared_ffn_size if choices else cfg.ffn_size


def _product(
    topology: Topology,
    plan: ParallelPlan,
    cfg: ModelConfig,
    operation: Operation,
    parameter: Parameter,
    dtype: str,
    rows: int,
) -> _Pass:
    """Forward, both gradients; experts one after another, all alike."""
    N, M = operation.shape
    if plan.tp > 1:
        dim = split_dimension(parameter.role, parameter.dims)
        if parameter.role is Role.EXPERT:
            N, M = (-(-N // plan.tp), M) if operation.shape[0] == cfg.expert_ffn_size else (N, -(-M // plan.tp))
        elif dim is not None:
            N, M = (-(-N // plan.tp), M) if dim == 0 else (N, -(-M // plan.tp))
    if parameter.role is Role.LATENT and plan.sequence == "on":
        rows = math.ceil(rows / plan.tp)
    times = 1
    if parameter.role is Role.EXPERT:
        times = held_experts(cfg.num_experts, plan.ep, 0)[1]
        rows = math.ceil(rows * plan.ep * operation.copies / cfg.num_experts)

    def seconds(M: int, N: int, K: int) -> float:
        alone = fused.product_seconds(topology, M, N, K, dtype)
        return alone + (times - 1) * max(0.0, alone - topology.kernel_latency)  # one launch for all experts

    return _Pass(products=(seconds(rows, N, M), seconds(rows, M, N), seconds(N, M, rows)))


def _attention(
    topology: Topology, plan: ParallelPlan, operation: Operation, dtype: str, length: int, rows: int
) -> _Pass:
    """Visible pairs only; backward takes 2.5 times the FLOPs."""
    near = min(ATTENTION, key=lambda size: abs(size - operation.shape[1]))
    rate = topology.flops_per_second(dtype) * ATTENTION[near] / (1 + SHORT / length)
    forward = operation.causal * rows / plan.tp / rate
    return _Pass(attention=(forward, 2.5 * forward, 0.0))


# --- transfers -------------------------------------------------------------------------------------------------------


def _exposed(
    config: Config,
    cfg: ModelConfig,
    plan: ParallelPlan,
    topology: Topology,
    mine: Share,
    own: _Pass,
    count: int,
    first: int,
    names: tuple[str, ...],
) -> dict[str, float]:
    """By axis, of the rank `first`."""
    hides = plan.overlap != "off"
    mesh = Mesh.of(plan)
    layers = max(1, len(units(cfg)) // plan.pp)
    found = {}
    rounds = reductions(replace(config, plan=plan), config.train.global_batch)
    weights = _weights(plan, topology, mine, own, count, layers, first, hides, rounds)
    if weights:
        found["dp"] = weights
    if plan.tp > 1:
        found["tp"] = _tensor(config, cfg, plan, topology, first, names)
    if plan.cp > 1:
        link, moved = topology.link(mesh.peers(first, "cp")), sum(mine.along["cp"].values())
        whole = moved / link.bandwidth + count * layers * 4 * link.latency
        dealt = context.choose(config, plan) == "ulysses" or not hides
        found["cp"] = (
            whole if dealt else whole / plan.cp + max(0.0, whole - whole / plan.cp - count * sum(own.attention))
        )
    if plan.ep > 1:
        link = topology.link(mesh.peers(first, "ep"))
        whole = sum(mine.along["ep"].values()) / link.bandwidth + count * layers * 4 * link.latency
        near = link == topology.links[0]  # whose ranks reach each other's memory
        is_fused = near and exchange.taken(cfg, plan, config.train.itemsize, "cuda")
        found["ep"] = whole * (1 - HIDDEN_ROWS if is_fused else 1.0)
    return found


def _weights(
    plan: ParallelPlan,
    topology: Topology,
    mine: Share,
    own: _Pass,
    count: int,
    layers: int,
    first: int,
    hides: bool,
    rounds: int,
) -> float:
    """Gradients and weights of the data axis, those of experts among them; of hybrid sharding on the links of its
    groups, and of the copies of one part.  rounds: how often gradients travel."""
    mesh = Mesh.of(context.as_data(plan))
    moved = {axis: Counter(mine.along.get(axis, {})) for axis in DATA}
    moved["dp"].update(mine.along.get("edp", {}))
    times = count if plan.zero == 3 and plan.pp == 1 else 1

    def seconds(name: str, calls: int, *axes: str) -> float:
        return sum(
            calls * topology.collective_seconds(name, moved[axis][name] / calls, mesh.peers(first, axis))
            for axis in axes
            if moved[axis][name]
        )

    reduce = seconds("reduce_scatter", layers * rounds, *DATA) + seconds("all_reduce", layers * rounds, "dp")
    reduce += seconds("all_gather", layers, "replica")  # of sums
    gather = seconds("all_gather", layers * (2 * times if plan.zero == 3 else 1), "dp", "shard")
    if not hides:
        return reduce + gather
    forward, backward = own.parts[0], own.parts[1] + own.parts[2]
    under_reduce = rounds * backward  # of the last micro-batch, or of each
    under_gather = times * (forward + backward) if plan.zero == 3 else forward
    if plan.unsharded:
        under_gather = 0.0  # the one before it is still read
    ends = (
        reduce / rounds + gather / (2 * times if plan.zero == 3 else 1)
    ) / layers  # the last unit's, the first one's
    return ends + max(0.0, reduce - under_reduce) + max(0.0, gather - under_gather)


def _unshard(config: Config, cfg: ModelConfig, topology: Topology, first: int, names: tuple[str, ...]) -> float:
    """Seconds in which the units of a stage are gathered, one after another."""
    plan = config.plan
    merged = context.as_data(plan)
    ranks = Mesh.of(merged).peers(first, "shard" if is_hybrid(merged) else "dp")
    found = 0.0
    for run in memory.runs_of(cfg, merged.dp, plan.shard, plan.tp, plan.ep, names):
        if run.shares(plan.zero):
            nbytes = run.numel * (run.ways - 1) / run.ways * config.train.itemsize
            found += topology.collective_seconds("all_gather", nbytes, ranks)
    return found


def _tensor(
    config: Config, cfg: ModelConfig, plan: ParallelPlan, topology: Topology, first: int, names: tuple[str, ...]
) -> float:
    """What the axis adds to the products of a step."""
    itemsize, dtype = config.train.itemsize, config.train.precision
    count, sequences = micro_batching(config, plan)
    link = topology.link(Mesh.of(plan).peers(first, "tp"))
    length = math.ceil(config.data.sequence_length / plan.cp)
    plain = count * tensor_seconds(cfg, plan, [sequences], length, itemsize, link, names)
    if plan.overlap not in ("auto", "fused"):
        return plain
    better, rows = 0.0, sequences * length
    for product, times in overlap.products(cfg, plan, rows, names).items():
        if product.terms > 1:  # travels beside gradients of weights in either way: steps of 8b took as long with both
            continue
        sizes = (product.op, product.M, product.N, product.K)
        by_way = fused.predict(topology, *sizes, dtype, plan.tp)
        nbytes = fused.wire_bytes(*sizes, itemsize, plan.tp)
        alone = fused.product_seconds(topology, product.M, product.N, product.K, dtype) + link.phase_seconds(nbytes)
        better += count * times * max(0.0, alone - min(by_way.values()))
    return max(0.0, plain - better)


def _message(config: Config, cfg: ModelConfig, plan: ParallelPlan, sequences: int) -> int:
    """Bytes that a stage sends to the next for a micro-batch."""
    rows = math.ceil(sequences * config.data.sequence_length / plan.cp)
    rows = math.ceil(rows / plan.tp) if plan.sequence == "on" else rows
    return rows * cfg.hidden_size * config.train.itemsize
