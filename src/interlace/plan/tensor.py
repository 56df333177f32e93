"""The tensor axis as integers: how it slices a parameter, and what it computes and sends in a step.  Exact.

Run by the engine, priced by the planner, and held against a running plan by `verify`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.errors import PlanError
from interlace.layout import Layout, split, transition
from interlace.mesh import Mesh
from interlace.spec import Parameter, Role, operations, parameters, passes, units
from interlace.topology import Link, Topology

STATISTICS = 4  # numbers a row that the loss of a split vocabulary exchanges


@dataclass(frozen=True)
class Slicing:
    """Slices of a tensor of `shape` along dimension `dim`, which begin at `bounds`, each on `copies` neighbours.

    dims: the layout.  A tensor that every rank holds whole is one slice.
    """

    shape: tuple[int, ...]
    dims: str
    dim: int
    bounds: tuple[int, ...]
    copies: int

    @property
    def around(self) -> int:
        """Elements for one index of `dim`."""
        return math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])

    def bound(self, rank: int) -> tuple[int, int]:
        """[start, stop) of what `rank` holds along `dim`."""
        return self.bounds[rank // self.copies], self.bounds[rank // self.copies + 1]

    def numel(self, rank: int) -> int:
        """Elements that `rank` holds; rank 0 has the most."""
        start, stop = self.bound(rank)
        return (stop - start) * self.around


def split_dimension(role: Role, dims: str) -> int | None:
    """The dimension that the tensor axis splits; None: the parameter is whole on every rank."""
    if role is Role.EXPERT:
        return dims.split().index("F")
    return {Role.COLUMN: 0, Role.HEAD: 0, Role.VOCAB: 0, Role.ROW: 1}.get(role)


def slicing(
    shape: Sequence[int], dims: str, dim: int | None, ways: int, chunk: int = 1, axis: str = "tp", name: str = "it"
) -> Slicing:
    """The slices over `ways` ranks of `axis`: balanced, in whole chunks of dimension `dim`; None: whole everywhere.

    Fewer chunks of several elements (heads) than ranks are held by as many neighbours each.  Errors: `PlanError` when
    that does not come out even.
    """
    if dim is None or ways == 1:
        return Slicing(tuple(shape), dims, 0, (0, shape[0] if shape else 1), ways)
    size, copies = shape[dim], 1
    chunks = math.ceil(size / chunk)
    if chunk > 1 and chunks < ways:
        if ways % chunks:
            raise PlanError(f"{name} has {chunks} heads for {axis}={ways}; use a divisor or a multiple of {chunks}.")
        ways, copies = chunks, ways // chunks
    letters = dims.split()
    letters[dim] += f"/{axis}" + (f"*{copies}" if copies > 1 else "") + (f":{chunk}" if chunk > 1 else "")
    starts = (split(chunks, ways, index)[0] * chunk for index in range(ways))
    return Slicing(tuple(shape), " ".join(letters), dim, (*starts, size), copies)


@lru_cache(maxsize=1 << 16)
def slices(parameter: Parameter, ways: int) -> Slicing:
    """How the tensor axis slices a parameter of a decoder.

    Key and value heads that neither divide over the ranks nor repeat evenly are whole on each; see `reads`.
    """
    dim = split_dimension(parameter.role, parameter.dims)
    if dim is not None and parameter.chunk > 1 and not _comes_out_even(parameter.shape[dim] // parameter.chunk, ways):
        dim = None
    return slicing(parameter.shape, parameter.dims, dim, ways, parameter.chunk, name=parameter.name)


def local_heads(cfg: ModelConfig, ways: int) -> tuple[int, int]:
    """Query heads, and key and value heads, that attention of one rank reads."""
    own = cfg.num_heads // ways
    return own, max(1, cfg.num_kv_heads // ways) if _comes_out_even(cfg.num_kv_heads, ways) else own


def reads(num_heads: int, kv_heads: int, ways: int, rank: int) -> list[int] | None:
    """Where every rank holds all key and value heads: the one that each of `rank`'s query heads reads."""
    if _comes_out_even(kv_heads, ways):
        return None
    own, shared = num_heads // ways, num_heads // kv_heads
    return [head // shared for head in range(rank * own, (rank + 1) * own)]


def _comes_out_even(heads: int, ways: int) -> bool:
    return heads % ways == 0 or ways % heads == 0


def holders(parameter: Parameter, ways: int) -> int:
    """Neighbours that hold the same slice of a parameter, and whose gradients therefore become one."""
    return slices(parameter, ways).copies


def is_alike(parameter: Parameter, sequence: bool) -> bool:
    """Whether each of them has the whole gradient, as far as rounding goes; else each has seen some rows or heads."""
    on_heads = parameter.role is Role.NORM and parameter.dims == "E"
    is_whole = split_dimension(parameter.role, parameter.dims) is None
    return is_whole and not sequence and not on_heads


def kind(parameter: Parameter, ways: int, sequence: bool) -> tuple[int, bool]:
    """What a unit's flat run sorts its members by, after weight decay: what is owed alike is one range."""
    return (1, False) if ways == 1 else (holders(parameter, ways), is_alike(parameter, sequence))


# --- a step ----------------------------------------------------------------------------------------------------------


def products(
    cfg: ModelConfig,
    plan: ParallelPlan,
    rank: int,
    micro_batches: Sequence[int],
    length: int,
    held: Collection[str] | None = None,
    expert_rows: Mapping[str, int] | None = None,
) -> int:
    """FLOPs of the matrix products that `rank` of the axis runs in a step.

    micro_batches: sequences of each, `length` positions a sequence.  held: the units that the rank has; None = all.
    expert_rows: by unit, rows that the experts of the rank multiply; None = those of its own tokens.
    """
    table = {parameter.name.removesuffix(".weight"): parameter for parameter in parameters(cfg)}
    if cfg.tie_embeddings:
        table["head.output"] = table["embedding"]
    found = 0
    for operation in operations(cfg, length):
        if operation.kind != "matmul" or (held is not None and operation.unit not in held):
            continue
        parameter = table[operation.name]
        on_rows = parameter.role in (Role.ROUTER, Role.LATENT) and plan.sequence == "on"
        rows = sum(_own(count * length, plan.tp, rank) if on_rows else count * length for count in micro_batches)
        elements = slices(parameter, plan.tp).numel(rank)
        if parameter.role is Role.EXPERT:
            elements //= cfg.num_experts
            rows = rows * cfg.experts_per_token if expert_rows is None else expert_rows[operation.unit]
        found += 2 * elements * rows * passes(cfg, operation, plan.recompute)
    return found


def sent(
    cfg: ModelConfig,
    plan: ParallelPlan,
    rank: int,
    micro_batches: Sequence[int],
    length: int,
    itemsize: int,
    held: Collection[str] | None = None,
) -> Counter[str]:
    """Bytes of activations and their gradients that `rank` of the axis sends in a step, by collective.

    itemsize: bytes of an element of x.  held: the units that the rank has; None = all.  Each collective is a change of
    layout of [rows width] over the axis; an all-reduce counts as its two halves.
    """
    found: Counter[str] = Counter()
    mesh = Mesh((("tp", plan.tp),))
    for count in micro_batches:
        rows = count * length
        for before, after, shape, size, times in _changes(
            cfg, plan, rows, itemsize, units(cfg) if held is None else held
        ):
            for transfer in transition(Layout.parse(before), Layout.parse(after), shape, mesh, size):
                if transfer.collective == "all_reduce":
                    found.update(_all_reduced(math.prod(shape), plan.tp, rank, size * times))
                else:
                    found[transfer.collective] += transfer.bytes_by_rank[rank] * times
    return found


def paid(elements: int, ways: int, rank: int) -> Counter[str]:
    """Bytes that `rank` of `ways` sends in an all-reduce of fp32 `elements`, by its halves."""
    return _all_reduced(elements, ways, rank, 4)


def _all_reduced(elements: int, ways: int, rank: int, itemsize: int) -> Counter[str]:
    own = _own(elements, ways, rank)
    return Counter(reduce_scatter=(elements - own) * itemsize, all_gather=own * (ways - 1) * itemsize)


def _own(count: int, ways: int, rank: int) -> int:
    start, stop = split(count, ways, rank)
    return stop - start


def _changes(
    cfg: ModelConfig, plan: ParallelPlan, rows: int, itemsize: int, held: Collection[str]
) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """(layout before, layout after, shape, bytes of an element, how often) of one micro-batch's collectives."""
    D, X = cfg.hidden_size, cfg.num_experts
    L, first, last = sum(unit.startswith("blocks.") for unit in held), "embedding" in held, "head" in held
    routers = sum(f"blocks.{layer}" in held for layer in cfg.expert_layers)
    again = plan.recompute == "full"
    shared = routers if cfg.shared_ffn_size else 0  # its own entrance and exit, which come first and are run again
    entrances = (2 * L + shared) * (2 if again else 1)
    exits = 2 * L + shared + (L * (2 if cfg.dropout else 1) + shared if again else 0)  # a block's last sum is not
    logits = routers * (2 if again else 1)
    wide, narrow, of_logits = (rows, D), (rows, X), 4 if cfg.router_fp32 else itemsize
    latents, latent = (L, (rows, cfg.latent_width)) if cfg.kv_rank else (0, wide)  # entrances of attention
    entrances -= latents * (2 if again else 1)
    returned = 2 * L + shared - latents  # gradients of entrances
    yield "S/tp", "S", (STATISTICS * rows * plan.tp,), 4, last
    if plan.sequence == "on":
        gather, scatter = ("N/tp W", "N W"), ("N W +tp", "N/tp W")
        yield (
            *gather,
            wide,
            itemsize,
            entrances + last + first + 2 * L + shared,
        )  # entrances, head; backward of embedding and exits
        yield (
            *scatter,
            wide,
            itemsize,
            first + exits + last + returned,
        )  # embedding, exits; gradients of head and entrances
        yield *gather, latent, itemsize, latents * (2 if again else 1)
        yield *scatter, latent, itemsize, latents
        if X:
            yield *gather, narrow, of_logits, logits * (2 if cfg.has_router_losses else 1)
            yield *scatter, narrow, of_logits, routers
        return
    reduce = ("S +tp", "S")
    yield *reduce, (rows * D,), itemsize, first + exits + last + returned
    yield *reduce, (math.prod(latent),), itemsize, latents
    if X:
        yield "N/tp W", "N W", narrow, of_logits, logits
        yield *reduce, (rows * X,), of_logits, routers


def seconds(
    cfg: ModelConfig,
    plan: ParallelPlan,
    micro_batches: Sequence[int],
    length: int,
    itemsize: int,
    link: Link,
    held: Collection[str] | None = None,
) -> float:
    """What the axis's transfers take in a step over `link`, one after another, on the rank that sends most.

    held: the units of a rank; None = all.
    """
    found, mesh = 0.0, Mesh((("tp", plan.tp),))
    for count in micro_batches:
        for before, after, shape, size, times in _changes(cfg, plan, count * length, itemsize, held or units(cfg)):
            for transfer in transition(Layout.parse(before), Layout.parse(after), shape, mesh, size):
                phases = 2 if transfer.collective == "all_reduce" else 1
                found += times * phases * link.phase_seconds(transfer.bytes / phases)
    return found


def across_hosts(
    config: Config, micro_batches: Sequence[int], hosts: Sequence[int], topology: Topology | None
) -> str | None:
    """A line for the log when a group of the axis has ranks on several hosts: what that costs; None when none has.

    hosts: a number for the host of every rank.  topology: the machine, whose first link joins ranks of one host and
    whose last joins all.
    """
    plan = config.plan
    groups = [hosts[first : first + plan.tp] for first in range(0, len(hosts), plan.tp)]  # neighbours, the inner axis
    most = max(len(set(group)) for group in groups)
    if most == 1:
        return None
    line = f"note: tp={plan.tp} spans {most} hosts"
    if topology is None:
        return f"{line}; its transfers leave the fast links between GPUs of one host"
    itemsize = config.train.itemsize
    given = (config.model_config(), plan, micro_batches, config.data.sequence_length, itemsize)
    outer, inner = (1e3 * seconds(*given, link) for link in (topology.links[-1], topology.links[0]))
    return (
        f"{line}: its transfers take about {outer:.3g} ms a step over {topology.links[-1].name}, {inner:.3g} ms over "
        f"{topology.links[0].name} inside one (topology {topology.name})"
    )
