"""Bytes that a plan needs on its most loaded rank, counted as the engine holds them.

Per run of n padded elements (the parameters of a unit, flat; over ep its experts by themselves), shared by w ranks (dp,
or shard; for experts those of them that hold the same), c bytes per element in the compute dtype:

    zero              0         1        2               3
    main weights      4 n       4 n/w    4 n/w           4 n/w         fp32
    computing copy    c n *     c n      c n             buffers that units at least two apart share
    gradients         4 n       4 n **   4 n/w + units   4 n/w + units    fp32
    AdamW             8 n       8 n/w    8 n/w           8 n/w
    *  none in fp32, where the main weights compute
    ** 4 n/w + units when one pass in bf16 is reduced by itself

"+ units" are three whole units (two that travel, one that is written); all of them while gradients add up over
micro-batches and are reduced once a step; and those of a stage of a pipeline until it reduces them.  A reduction that
travels holds a second buffer of its unit.  Whole units are in the dtype in which gradients travel; where peers read
them (`collectives.window`) their memory stays.  Buffers of gradients come as backward needs them and go when the
optimizer has read them.  So three moments may be the worst: the end of forward, when activations and the work of the
loss are there; the beginning of backward; its end.

Activations are counted in `plan.activations`; logits are a piece of rows, its fp32 work, and the gradients of hidden
states and output weight that the loss makes in forward.  Fused products of tp hold symmetric memory, an arena for each
operation, whatever the number of layers (`plan.overlap`), and lines of a pipeline slots for messages (`plan.boxes`).
Not counted: what the device's own runtime and communication library take (1-2 GB on a GPU), and the allocator's
fragments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.plan import boxes, overlap
from interlace.plan import zero as engine
from interlace.plan.activations import Stage, rows
from interlace.plan.activations import held as held_activations
from interlace.plan.context import as_data, largest
from interlace.plan.expert import as_data as as_data_of_experts
from interlace.plan.share import is_hybrid, micro_batch_count, overlapped, reductions
from interlace.plan.share import runs as flat_runs
from interlace.plan.stages import layers_given, num_stages, placement_of, stages_of
from interlace.schedule import generate, read_csv, validate
from interlace.spec import buffers

LOSS_PIECE = 1 << 29  # logits that the loss holds at a time


@dataclass(frozen=True)
class Memory:
    """Bytes on the most loaded rank at the worst moment: the end of forward, or the beginning or end of backward.

    gather: units whose weights are whole for a while (zero 3).  transfer: receive buffers of the two gradient
    reductions that may be under way.  symmetric: what peers write to in fused products of tp, and between stages.
    """

    parameters: int
    gradients: int
    optimizer: int
    gather: int
    activations: int
    logits: int
    transfer: int = 0
    symmetric: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        parts = sorted(((getattr(self, f.name), f.name) for f in fields(self)), reverse=True)
        return ", ".join(f"{name} {gib(size)}" for size, name in parts[:3] if size)


def gib(size: int) -> str:
    """Bytes as text: "12.3 GiB", "45.6 MiB" below one GiB, "7.8 KiB" below one MiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"


def apart(needed: int, found: int) -> tuple[str, str]:
    """Both as text, in bytes where the first is more and would read the same."""
    words = gib(needed), gib(found)
    return words if words[0] != words[1] else (f"{needed:,} bytes", f"{found:,} bytes")


def micro_batching(config: Config, plan: ParallelPlan) -> tuple[int, int]:
    """(micro-batches per step, sequences in the largest) on the replica that has most of the global batch."""
    batch, fixed = config.train.global_batch, config.run.reproducible == "plan"
    count, sequences = micro_batch_count(plan, batch, fixed), math.ceil(batch / plan.dp)
    if fixed:
        return count, min(plan.micro_batch_size or 1, batch)
    return count, min(plan.micro_batch_size, sequences) if plan.micro_batch_size else math.ceil(sequences / count)


def estimate(
    config: Config,
    plan: ParallelPlan,
    device: str = "cuda",
    ways: overlap.Chooser | None = None,
    places: Sequence[int] | None = None,
) -> Memory:
    """Memory of the most loaded rank.  device: "cuda" (fused norms, attention without masks in bf16) or "cpu".

    places: along the pipeline, those that are looked at; None = all.
    ways: how each product of tp runs whose transfers may be fused.  None: with overlap=fused as holds most memory,
    otherwise plain, as on a device without a table.
    """
    ranks = (_rank(config, plan, device, rank, ways) for rank in (range(plan.pp) if places is None else places))
    return max(ranks, key=lambda memory: memory.total)


def _rank(config: Config, plan: ParallelPlan, device: str, rank: int, ways: overlap.Chooser | None) -> Memory:
    """Of the ranks at place `rank` along the pipeline."""
    cfg, compute = config.model_config(), config.train.itemsize
    count, sequences = micro_batching(config, plan)
    own = _own_stages(config, plan, rank, count)
    names = [name for _, part in own for name in part]
    layers = sum(name.startswith("blocks") for name in names)

    merged = replace(as_data(plan), micro_batches=count, micro_batch_size=0)  # whose ranks share the weights
    runs = runs_of(cfg, merged.dp, plan.shard, plan.tp, plan.ep, tuple(names))
    held = sum(run.held(plan.zero) for run in runs)
    whole_step = plan.pp > 1  # under ZeRO-3 a stage stays whole while it has micro-batches, or makes room for others
    copied = sum(run.numel for run in runs if (run.is_split(plan.zero) or compute == 2) and not run.shares(plan.zero))
    stages = [runs_of(cfg, merged.dp, plan.shard, plan.tp, plan.ep, part) for _, part in own] if whole_step else []
    if whole_step:
        shared = sorted((sum(run.numel for run in stage if run.shares(plan.zero)) for stage in stages), reverse=True)
        copied += sum(shared[: plan.unsharded or None])
    state = {"adamw": 8, "sgd": 4 if config.train.momentum else 0}[config.train.optimizer]

    activations = held_activations(config, plan, device, own, sequences)
    tokens = sequences * math.ceil(config.data.sequence_length / plan.cp)
    vocab = math.ceil(cfg.vocab_size / plan.tp)
    sums = reductions(replace(config, plan=merged), config.train.global_batch)
    lends = plan.tp == 1 and config.run.reproducible != "plan" and sums == 1
    lent = _windows(config, merged, runs, device) if lends else 0
    logits = _logits(tokens, vocab, cfg.hidden_size, compute, device, lent) if "head" in names else 0
    if logits and plan.tp > 1 and plan.sequence == "on":
        logits += tokens * cfg.hidden_size * compute  # the rows of all ranks, gathered
    moments = _moments(config, merged, runs, stages, device, activations, logits, layers, rows(tokens, plan))
    gradients, activations, logits, transfer = max(moments, key=sum)
    return Memory(
        parameters=4 * held + compute * copied + 4 * sum(b.numel for b in buffers(cfg) if b.unit in names),
        gradients=gradients,
        optimizer=state * held,
        gather=0 if whole_step else compute * _buffers([run for run in runs if run.shares(plan.zero)], 2),
        activations=activations,
        logits=logits,
        transfer=transfer,
        symmetric=_symmetric(config, plan, device, rank, ways) + _boxes(config, plan, device, tokens),
    )


def _symmetric(config: Config, plan: ParallelPlan, device: str, rank: int, ways: overlap.Chooser | None) -> int:
    """What the fused products of a step hold on every rank of tp."""
    if ways is None and plan.overlap != "fused":
        return 0
    sizes = (config.train.itemsize, plan.tp, overlap.MULTIPROCESSORS[device])
    first = rank * plan.world // plan.pp  # which has as many sequences as any at this place
    found = overlapped(replace(config, plan=plan), first, config.train.global_batch)
    chosen = [ways(each, plan.tp) if ways else overlap.roomiest(each, *sizes) for each in found]
    return overlap.held(zip(found, chosen, strict=True), *sizes)


def _boxes(config: Config, plan: ParallelPlan, device: str, tokens: int) -> int:
    """What lines over copy engines hold on every rank, between stages and along cp, on GPUs that reach each other."""
    if device != "cuda" or plan.transport == "library":
        return 0
    cfg, itemsize = config.model_config(), config.train.itemsize
    total = 0
    if plan.pp > 1:
        message = boxes.slot(rows(tokens, plan) * cfg.hidden_size * itemsize)
        total += boxes.arena(boxes.arriving(placement_of(plan)), message, plan.pp)
    if plan.cp > 1:
        message = boxes.slot(largest(config, plan, tokens, itemsize))
        total += boxes.arena(plan.cp - 1, message, plan.cp, slots=1)
    return total


def _own_stages(config: Config, plan: ParallelPlan, rank: int, count: int) -> list[Stage]:
    cut = stages_of(config.model_config(), num_stages(plan), config.data.sequence_length, layers_given(plan))
    if plan.pp == 1:
        return [(1, cut[0])]
    enough = count if plan.schedule == "gpipe" else min(count, 4 * plan.pp)
    home, peaks = placement_of(plan), _peaks(plan.schedule, plan.pp, enough, plan.chunks)
    return [(peaks[stage], cut[stage]) for stage, place in enumerate(home) if place == rank]


@functools.lru_cache(maxsize=256)
def _peaks(schedule: str, pp: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    table = read_csv(schedule) if schedule.endswith(".csv") else generate(schedule, pp, micro_batches, chunks)
    return validate(table).stages


def _moments(
    config: Config,
    plan: ParallelPlan,
    runs: Sequence[_Run],
    stages: Sequence[Sequence[_Run]],
    device: str,
    activations: int,
    logits: int,
    layers: int,
    tokens: int,
) -> Iterator[tuple[int, int, int, int]]:
    """(gradients, activations, logits, transfer) when the last forward pass of a step ends, when its backward begins,
    and when that ends.  stages: those of a pipeline, whose gradients are whole until the stage is reduced."""
    cfg = config.model_config()
    compute = config.train.itemsize
    count, _ = micro_batching(config, plan)
    fixed, hybrid = config.run.reproducible == "plan", 1 < plan.shard < plan.dp
    each = not fixed and reductions(replace(config, plan=plan), config.train.global_batch) > 1
    narrow = config.train.precision == "bf16" and plan.dp > 1 and plan.pp == 1 and (fixed or each or count == 1)
    size = compute if narrow else 4
    whole, shards = 4 * sum(run.numel for run in runs), 4 * sum(run.held(plan.zero) for run in runs)
    sums = 4 * sum(run.numel // plan.dp for run in runs if run.ways > 1) if fixed else 0
    windows = _windows(config, plan, runs, device)
    some = windows if windows and narrow else size * _adjacent(runs, 3)
    if stages and (fixed or each):
        some = max(some, size * max(sum(run.numel for run in stage) for stage in stages))
    stays = windows
    in_place = plan.zero == 0 or (plan.zero == 1 and not narrow and not (fixed and not hybrid))
    if count > 1:
        stays += sums if fixed and plan.dp > 1 else shards if each and not in_place else whole
    received = size * _adjacent([run for run in runs if run.ways > 1], 2)
    largest = compute * max(run.largest for run in runs)  # a gradient as autograd made it
    yield stays, activations, logits, 0
    kept = compute * (tokens + math.ceil(cfg.vocab_size / plan.tp)) * cfg.hidden_size if logits else 0
    there = (windows and narrow) or (count > 1 and not fixed and (in_place or not each))  # room for what is written now
    yield stays + (0 if there else some) + largest, activations, kept, received
    last = (whole if in_place else shards) + (sums if plan.zero == 0 or hybrid else 0)
    yield last + some + largest, activations // max(1, layers), 0, received


def _windows(config: Config, plan: ParallelPlan, runs: Sequence[_Run], device: str) -> int:
    """Bytes of the memory that bf16 gradients leave from, three units at a time, on GPUs that reach each other."""
    if config.train.precision != "bf16" or plan.dp == 1 or plan.zero == 0 or plan.pp > 1:
        return 0
    return 2 * _buffers(runs, 3) if device == "cuda" and plan.transport != "library" else 0


# --- weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Parameters that travel together: padded elements, the ranks that share a copy, and where the unit runs.

    position -1 is the root: used by several units (a tied embedding), gathered for the whole step.  is_expert: of which
    other ranks hold the rest.
    """

    position: int
    numel: int
    largest: int
    ways: int
    is_expert: bool = False

    def is_split(self, zero: int) -> bool:
        return zero > 0 and self.ways > 1

    def held(self, zero: int) -> int:
        return self.numel // self.ways if self.is_split(zero) else self.numel

    def shares(self, zero: int) -> bool:
        """Whether its whole weights only pass through a shared buffer."""
        return zero == 3 and self.ways > 1 and self.position >= 0


@functools.lru_cache(maxsize=1024)
def runs_of(cfg: ModelConfig, dp: int, shard: int, tp: int, ep: int, names: tuple[str, ...]) -> tuple[_Run, ...]:
    """The runs of the units `names`, in order of execution, on the rank with the largest slices.

    dp: the ranks that share weights, those of cp among them.
    """
    merged = ParallelPlan(dp=dp, shard=shard, ep=ep)
    found = []
    for run in flat_runs(cfg, dp, tp, held=names, ep=ep):
        plan = as_data_of_experts(merged) if run.is_expert else merged
        ways, position = plan.shard if is_hybrid(plan) else plan.dp, -1 if run.unit == "root" else run.position
        found.append(_Run(position, run.cut.total, run.largest, ways, run.is_expert))
    return tuple(sorted(found, key=lambda run: run.position))


def _buffers(runs: Sequence[_Run], distance: int) -> int:
    """Elements of the buffers that whole runs pass through, units so far apart sharing one; experts have their own."""
    found = 0
    for kind in ([run for run in runs if not run.is_expert], [run for run in runs if run.is_expert]):
        totals = [run.numel for run in kind]
        chosen = engine.slots(totals, [run.position for run in kind], distance)
        found += sum(engine.slot_sizes(totals, chosen))
    return found


def _adjacent(runs: Sequence[_Run], count: int) -> int:
    """Elements of the `count` neighbouring units that are largest together."""
    sizes: dict[int, int] = {}
    for run in runs:
        sizes[run.position] = sizes.get(run.position, 0) + run.numel
    order = [sizes[position] for position in sorted(sizes)]
    return max((sum(order[i : i + count]) for i in range(len(order))), default=0)


def _logits(tokens: int, vocab: int, hidden: int, compute: int, device: str, lent: int) -> int:
    """A piece of logits (on a CPU with its fp32 copy and gradient), unless it fits in the memory that is lent; then the
    gradient of the weight rounded; beside either that gradient in fp32, and that of the hidden states."""
    rows = min(tokens, 1 << max(0, (LOSS_PIECE // vocab).bit_length() - 1))
    piece = rows * vocab * (compute if device == "cuda" else compute + 8)
    if lent >= min(1024, tokens) * vocab * compute:
        piece = 0
    rounded = vocab * hidden * compute if compute < 4 else 0
    return max(piece, rounded) + tokens * hidden * compute + vocab * hidden * 4
