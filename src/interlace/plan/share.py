"""What one rank of a plan holds between steps, computes and sends in a step: exact, from `layout`, `spec` and `zero`.

`verify` holds a running plan against these figures, so that a plan that is not really split cannot pass.  The padding
of a flat run, less than a chunk for each parameter and each rank, counts: it lies in memory, and it travels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.layout import Layout, split, transition
from interlace.mesh import Mesh
from interlace.plan import zero as engine
from interlace.spec import Parameter, executed_matmul_flops, parameters, units

FP32 = 4
SCALARS = 16  # bytes: loss and norm, fp64, exchanged once a step
STATES = {"adamw": 2, "sgd": 0}  # elements of optimizer state per parameter, without momentum


@dataclass(frozen=True)
class Run:
    """The parameters of a unit in the order of its flat run; `unit` is "root" for those that several use."""

    unit: str
    members: tuple[Parameter, ...]
    cut: engine.Cut

    @property
    def layout(self) -> Layout:
        """Of its elements, one after another, over the data axis."""
        return Layout.parse(f"U/dp:{self.cut.chunk}")


@dataclass(frozen=True)
class Share:
    """One rank's part.  Bytes, except `flops`: those of matrix products in one step."""

    main: int
    copies: int
    gradients: int
    optimizer: int
    flops: int
    sent: dict[str, int]


def runs(cfg: ModelConfig, ranks: int) -> tuple[Run, ...]:
    """The flat runs of a model in order of execution, the root's last."""
    found: dict[str, list[Parameter]] = {unit: [] for unit in (*units(cfg), "root")}
    for parameter in parameters(cfg):
        found["root" if parameter.tied_to else parameter.unit].append(parameter)
    return tuple(
        Run(unit, tuple(members), engine.cut([member.numel for member in members], ranks))
        for unit, unsorted in found.items()
        if (members := sorted(unsorted, key=lambda member: not member.decay))
    )


def micro_batch_count(plan: ParallelPlan, batch: int) -> int:
    """Micro-batches that every replica makes of a global batch of `batch` sequences, also the one with fewest."""
    if not plan.micro_batch_size:
        return plan.micro_batches
    return math.ceil(math.ceil(batch / plan.dp) / plan.micro_batch_size)


def share(config: Config, rank: int, batch: int) -> Share:
    """The part of `rank` in a step on a global batch of `batch` sequences."""
    cfg, plan = config.model_config(), config.plan
    mesh = Mesh.of(plan)
    compute = 2 if config.train.precision == "bf16" else FP32
    found = runs(cfg, plan.dp)
    is_split = plan.zero > 0 and plan.dp > 1
    whole = sum(run.cut.total for run in found)
    held = whole
    if is_split:
        held = sum(run.layout.local_numel((run.cut.total,), mesh, rank) for run in found)
    copies = 0
    if is_split and plan.zero == 3:
        copies = compute * sum(_gathered(cfg, found))
    elif is_split or compute != FP32:
        copies = compute * whole
    states = STATES[config.train.optimizer] + (config.train.optimizer == "sgd" and config.train.momentum > 0)
    sequences = computed_sequences(plan, mesh, rank, batch)
    work = executed_matmul_flops(cfg, sequences, config.data.sequence_length, plan.recompute)
    return Share(
        main=FP32 * held,
        copies=copies,
        gradients=FP32 * (held if is_split and plan.zero >= 2 else whole),
        optimizer=FP32 * states * held,
        flops=work["matmul"],
        sent=_sent(config, mesh, rank, batch, compute, found) if plan.dp > 1 else {},
    )


def computed_sequences(plan: ParallelPlan, mesh: Mesh, rank: int, batch: int) -> int:
    """Sequences that a rank computes of a global batch, one without labels for each of its empty micro-batches."""
    start, stop = split(batch, plan.dp, mesh.coordinates(rank)["dp"])
    count = micro_batch_count(plan, batch)
    parts = (split(stop - start, count, number) for number in range(count))
    return sum(max(1, last - first) for first, last in parts)


def _gathered(cfg: ModelConfig, found: tuple[Run, ...]) -> Iterator[int]:
    """Elements of the buffers that hold gathered units under zero=3; the root has its own."""
    inner = [run for run in found if run.unit != "root"]
    totals = [run.cut.total for run in inner]
    chosen = engine.slots(totals, range(len(inner)), distance=2)
    yield from engine.slot_sizes(totals, chosen)
    yield from (run.cut.total for run in found if run.unit == "root")


def _sent(config: Config, mesh: Mesh, rank: int, batch: int, compute: int, found: tuple[Run, ...]) -> dict[str, int]:
    """Bytes that this rank sends in a step, by collective: each unit's transitions times how often they happen."""
    plan = config.plan
    wire = 2 if config.train.reduce_dtype == "bf16" else FP32
    sent = {"all_gather": SCALARS * (plan.dp - 1), "reduce_scatter": 0}
    inner = [run for run in found if run.unit != "root"]
    times = dict.fromkeys((run.unit for run in found), 1)
    if plan.zero == 3:
        chosen = engine.slots([run.cut.total for run in inner], range(len(inner)), distance=2)
        regather = [run.unit != "embedding" for run in inner]
        ahead = 1 if plan.overlap == "on" else 0
        counts = engine.gathers_per_step(chosen, regather, ahead, micro_batch_count(plan, batch))
        times |= dict(zip((run.unit for run in inner), counts, strict=True))
    for run in found:
        whole, partial = Layout.parse("U"), Layout.parse("U +dp")
        for transfer in transition(partial, run.layout, (run.cut.total,), mesh, wire):
            sent[transfer.collective] += transfer.bytes_by_rank[rank]
        gathered = FP32 if plan.zero == 0 else compute
        for transfer in transition(run.layout, whole, (run.cut.total,), mesh, gathered):
            sent[transfer.collective] += transfer.bytes_by_rank[rank] * times[run.unit]
    return sent
