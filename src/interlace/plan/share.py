"""What one rank of a plan holds between steps, computes and sends in a step: exact, from `layout`, `spec` and `zero`.

`verify` holds a running plan against these figures, so that a plan that is not really split cannot pass.  Padding of
flat runs is not in `resident` (a part in a thousand); it is in `sent`, since it travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.layout import Layout, split, transition
from interlace.mesh import Mesh
from interlace.plan import zero as engine
from interlace.plan.memory import micro_batching
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


def share(config: Config, rank: int, sequences: int) -> Share:
    """The part of `rank` in a step in which it computes `sequences` sequences (a stand-in without labels counts)."""
    cfg, plan = config.model_config(), config.plan
    mesh = Mesh.of(plan)
    compute = 2 if config.train.precision == "bf16" else FP32
    found = runs(cfg, plan.dp)
    is_split = plan.zero > 0 and plan.dp > 1
    whole = sum(member.numel for run in found for member in run.members)
    held = sum(_held(run, mesh, rank, is_split) for run in found)
    copies = 0
    if is_split and plan.zero == 3:
        copies = compute * sum(_gathered(cfg, found))
    elif is_split or compute != FP32:
        copies = compute * whole
    states = STATES[config.train.optimizer] + (config.train.optimizer == "sgd" and config.train.momentum > 0)
    work = executed_matmul_flops(cfg, sequences, config.data.sequence_length, plan.recompute)
    return Share(
        main=FP32 * held,
        copies=copies,
        gradients=FP32 * (held if is_split and plan.zero >= 2 else whole),
        optimizer=FP32 * states * held,
        flops=work["matmul"],
        sent=_sent(config, cfg, plan, mesh, rank, compute, found) if plan.dp > 1 else {},
    )


def sequences_of(config: Config, rank: int, batch: int) -> int:
    """Sequences that a data rank computes of a global batch of `batch`, stand-ins of empty micro-batches included."""
    start, stop = split(batch, config.plan.dp, Mesh.of(config.plan).coordinates(rank)["dp"])
    count, _ = micro_batching(config, config.plan)
    parts = (split(stop - start, count, number) for number in range(count))
    return sum(max(1, last - first) for first, last in parts)


def _held(run: Run, mesh: Mesh, rank: int, is_split: bool) -> int:
    """Elements of the main weights on this rank, parameter by parameter, from their layout strings."""
    return sum(
        Layout.parse(engine.member_layout(member.dims, run.cut, index) if is_split else member.dims).local_numel(
            member.shape, mesh, rank
        )
        for index, member in enumerate(run.members)
    )


def _gathered(cfg: ModelConfig, found: tuple[Run, ...]) -> Iterator[int]:
    """Elements of the buffers that hold gathered units under zero=3; the root has its own."""
    inner = [run for run in found if run.unit != "root"]
    totals = [run.cut.total for run in inner]
    chosen = engine.slots(totals, range(len(inner)), distance=2)
    yield from engine.slot_sizes(totals, chosen)
    yield from (run.cut.total for run in found if run.unit == "root")


def _sent(
    config: Config, cfg: ModelConfig, plan: ParallelPlan, mesh: Mesh, rank: int, compute: int, found: tuple[Run, ...]
) -> dict[str, int]:
    """Bytes that this rank sends in a step, by collective: each unit's transitions times how often they happen."""
    wire = 2 if config.train.reduce_dtype == "bf16" else FP32
    sent = {"all_gather": SCALARS * (plan.dp - 1), "reduce_scatter": 0}
    count, _ = micro_batching(config, plan)
    inner = [run for run in found if run.unit != "root"]
    times = dict.fromkeys((run.unit for run in found), 1)
    if plan.zero == 3:
        chosen = engine.slots([run.cut.total for run in inner], range(len(inner)), distance=2)
        regather = [run.unit != "embedding" for run in inner]
        counts = engine.gathers_per_step(chosen, regather, ahead=1, micro_batches=count)
        times |= dict(zip((run.unit for run in inner), counts, strict=True))
    for run in found:
        shard, whole = Layout.parse(f"U/dp:{run.cut.chunk}"), Layout.parse("U")
        partial = Layout.parse("U +dp")
        for transfer in transition(partial, shard, (run.cut.total,), mesh, wire):
            sent[transfer.collective] += transfer.bytes_by_rank[rank]
        gathered = FP32 if plan.zero == 0 else compute
        for transfer in transition(shard, whole, (run.cut.total,), mesh, gathered):
            sent[transfer.collective] += transfer.bytes_by_rank[rank] * times[run.unit]
    return sent
