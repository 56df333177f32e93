"""Can this plan run: does it divide, does it fit, and what is the nearest plan that does.

Called before any process starts.  `check` returns nothing or raises one sentence: what was asked, what was found, and
the nearest plan that works.  The same rules that refuse a plan filter the search for its neighbours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.errors import ConfigError, PlanError
from interlace.plan.context import EXCHANGES, splits_heads
from interlace.plan.memory import apart, estimate, micro_batching
from interlace.plan.overlap import Chooser
from interlace.plan.share import micro_batch_count
from interlace.plan.stages import contradiction, layers_given, num_stages, splits_backward, stages_of
from interlace.plan.tensor import local_heads
from interlace.schedule import FORMS, chunks_of, read_csv, validate
from interlace.schedule.table import ZERO

RECOMPUTE = ("none", "selective", "full")
BYTES_VOCABULARY = 257  # 256 bytes and the end of a document


def check(
    config: Config,
    world: int,
    memory_bytes: int | None = None,
    available_axes: Sequence[str] = ("dp",),
    device: str = "cuda",
    ways: Chooser | None = None,
) -> None:
    """PlanError unless `config.plan` can run on `world` ranks of `memory_bytes` each (None = do not ask).

    available_axes: axes that can be executed, of dp, tp, pp, cp, ep and shard; any other must be 1 (shard 0 or 1).
    ways: how products of tp run (`memory.estimate`).
    """
    if world < 1:
        raise PlanError(f"a run needs at least 1 rank, found {world}")
    cfg = config.model_config()
    _check_data(config, cfg)
    _check_fixed(config)
    plan = config.plan
    if plan.pp > 1 and plan.schedule.endswith(".csv"):
        validate(read_csv(plan.schedule))
    reason = refused(config, cfg, plan, world, available_axes)
    if reason is None and memory_bytes is not None:
        memory = estimate(config, plan, device, ways)
        if memory.total > memory_bytes:
            needed, found = apart(memory.total, memory_bytes)
            reason = f"needs {needed} a rank ({memory}), found {found}"
    if reason is not None:
        near = _suggestion(config, world, memory_bytes, available_axes, device, ways)
        raise PlanError(f'the parallel plan "{plan}" {reason}: {near}')


def nearest_plans(
    config: Config,
    world: int,
    memory_bytes: int | None = None,
    available_axes: Sequence[str] = ("dp",),
    device: str = "cuda",
    count: int = 3,
    ways: Chooser | None = None,
) -> tuple[ParallelPlan, ...]:
    """Up to `count` plans for `world` ranks that divide and fit, nearest to `config.plan` first; empty if none does.

    Near means few and cheap changes: a higher ZeRO stage before more micro-batches before recompute before other axes.
    """
    cfg = config.model_config()
    asked = config.plan
    candidates = {
        plan
        for plan in _candidates(config, world, available_axes)
        if refused(config, cfg, plan, world, available_axes) is None
    }
    found: list[ParallelPlan] = []
    for plan in sorted(candidates, key=lambda plan: (_distance(asked, plan), str(plan))):
        if memory_bytes is None or estimate(config, plan, device, ways).total <= memory_bytes:
            found.append(plan)
            if len(found) == count:
                break
    return tuple(found)


def random_plans(
    config: Config, count: int, seed: int, most: int = 8, available_axes: Sequence[str] = ("dp",)
) -> tuple[ParallelPlan, ...]:
    """`count` different plans of 2 to `most` ranks that `check` lets pass, drawn at random; the same for the same seed.

    Fewer when there are no more.  Drawn are the axes at hand, ZeRO, its inner group, recompute, micro-batches by number
    or by size, whether each is reduced, overlap, sequence, exchange, schedule, chunks, layers of a stage, how many are
    whole, and halves of experts; transport is as in `config.plan`.
    """
    cfg, draw = config.model_config(), random.Random(seed)
    worlds = [mesh for world in range(2, most + 1) for mesh in meshes_of(world, available_axes)]
    found: dict[ParallelPlan, None] = {}
    for _ in range(200 * count):
        dp, tp, pp, cp, ep = draw.choice(worlds)
        zero = draw.randrange(4)
        shards = [0, *(n for n in range(2, dp) if dp % n == 0 and zero and "shard" in available_axes)]
        plan = replace(
            _draw_pipeline(_draw_batching(config, draw), cfg, pp, draw),
            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep,
            zero=zero,
            shard=draw.choice(shards),
            recompute=draw.choice(RECOMPUTE),
            overlap=draw.choice(("auto", "plain", "off", *(["fused"] if tp > 1 else []))),
            sequence=draw.choice(("on", "off")) if tp > 1 else "on",
            exchange=draw.choice(("auto", *EXCHANGES)) if cp > 1 else "auto",
            expert_halves=draw.choice(("on", "off")) if ep > 1 else "off",
            unsharded=draw.choice((0, 1)) if pp > 1 and zero == 3 else 0,
            reduce=draw.choice(("step", "micro_batch")),
        )  # fmt: skip
        if refused(config, cfg, plan, plan.world, available_axes) is None:
            found.setdefault(plan)
        if len(found) == count:
            break
    return tuple(found)


def _draw_batching(config: Config, draw: random.Random) -> ParallelPlan:
    count, size = draw.choice((1, 1, 2, 3, 5)), draw.choice((0, 0, 0, 1, 2, 3))
    by_size = size > 0 or _is_fixed(config)
    return replace(config.plan, micro_batches=1 if by_size else count, micro_batch_size=size)


def _draw_pipeline(plan: ParallelPlan, cfg: ModelConfig, pp: int, draw: random.Random) -> ParallelPlan:
    """Schedule, chunks and, every second time, layers of each stage, one at least."""
    if pp == 1:
        return replace(plan, schedule="1f1b", chunks=1, layers="")
    schedule = draw.choice(tuple(FORMS))
    chunks = draw.choice((1, 2, 3)) if FORMS[schedule].chunks is None else 1
    stages = pp * chunks_of(schedule, chunks)
    layers = ""
    if draw.choice((True, False)) and stages <= cfg.num_layers:
        ends = [0, *sorted(draw.sample(range(1, cfg.num_layers), stages - 1)), cfg.num_layers]
        layers = "/".join(str(stop - start) for start, stop in pairwise(ends))
    return replace(plan, schedule=schedule, chunks=chunks, layers=layers)


# --- rules ---------------------------------------------------------------------------------------------------------


def _check_data(config: Config, cfg: ModelConfig) -> None:
    """What no plan can mend: sizes of data and model that contradict each other."""
    if config.data.sequence_length > cfg.max_positions:
        raise PlanError(
            f"data.sequence_length {config.data.sequence_length} is above model.max_positions {cfg.max_positions}: "
            f"nearest is data.sequence_length={cfg.max_positions}"
        )
    if config.data.tokenizer == "bytes" and cfg.vocab_size < BYTES_VOCABULARY:
        raise PlanError(
            f'data.tokenizer "bytes" has {BYTES_VOCABULARY} tokens, found model.vocab_size {cfg.vocab_size}: '
            f"nearest is model.vocab_size={BYTES_VOCABULARY}"
        )


def _check_fixed(config: Config) -> None:
    """What contradicts sums that are the same for every plan."""
    if _is_fixed(config) and config.train.reduce_dtype != "fp32":
        raise PlanError(
            f'train.reduce_dtype "{config.train.reduce_dtype}" rounds what travels, so that sums depend on the plan, '
            'and run.reproducible is "plan": nearest is train.reduce_dtype="fp32"'
        )


def refused(
    config: Config, cfg: ModelConfig, plan: ParallelPlan, world: int, available_axes: Sequence[str]
) -> str | None:
    """Why this plan cannot run, as the end of a sentence that begins with the plan; None if it can."""
    for rule in (_axes, _ranks, _divides_model, _fixed_batch if _is_fixed(config) else _divides_batch):
        if reason := rule(config, cfg, plan, world, available_axes):
            return reason
    return None


def _axes(config: Config, cfg: ModelConfig, plan: ParallelPlan, world: int, available: Sequence[str]) -> str | None:
    for axis in ("tp", "pp", "cp", "ep", "shard"):
        size = getattr(plan, axis)
        if size > 1 and axis not in available:
            return f"splits over {axis}, which this release does not execute (it executes {', '.join(available)})"
    unfixed = [axis for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1]
    if _is_fixed(config) and unfixed:
        return f'splits over {unfixed[0]} with run.reproducible = "plan", whose sums are fixed only over dp and pp'
    return None


def _ranks(config: Config, cfg: ModelConfig, plan: ParallelPlan, world: int, available: Sequence[str]) -> str | None:
    if plan.world != world:
        return f"needs {_ranks_text(plan.world)}, found {world}"
    if plan.shard > 1 and plan.dp % plan.shard:
        return f"asks for shard={plan.shard}, which does not divide dp={plan.dp}"
    if plan.shard > 1 and not plan.zero:
        return f"asks for shard={plan.shard} with zero=0, which repeats everything on every rank"
    if plan.overlap == "fused" and plan.tp == plan.ep == 1:
        return "asks for overlap=fused with tp=1 and ep=1, which leave no product or exchange to fuse"
    if plan.ep > 1:
        if not cfg.num_experts:
            return f"asks for ep={plan.ep}, and the model has no experts"
        if plan.ep > cfg.num_experts:
            return f"asks for ep={plan.ep}, found {cfg.num_experts} experts"
        if plan.dp * plan.cp % plan.ep:
            return f"asks for ep={plan.ep}, which does not divide dp x cp = {plan.dp * plan.cp}, whose ranks it folds"
    return None


def _divides_model(
    config: Config, cfg: ModelConfig, plan: ParallelPlan, world: int, available: Sequence[str]
) -> str | None:
    if cfg.num_heads % plan.tp:
        return (
            f"asks for tp={plan.tp}, which does not divide the model's {cfg.num_heads} heads (tp is {_legal_tp(cfg)})"
        )
    if reason := _pipeline(config, cfg, plan):
        return reason
    if plan.cp > 1 and config.data.sequence_length < 2 * plan.cp:
        return f"asks for cp={plan.cp}, found {config.data.sequence_length} positions for {2 * plan.cp} slices"
    if plan.cp > 1 and plan.exchange == "ulysses" and not splits_heads(*local_heads(cfg, plan.tp), plan.cp):
        heads, kv_heads = local_heads(cfg, plan.tp)
        return (
            f"asks for exchange=ulysses, which cannot deal out {heads} query and {kv_heads} kv heads over "
            f"cp={plan.cp} (ring and gather can)"
        )
    return None


def _pipeline(config: Config, cfg: ModelConfig, plan: ParallelPlan) -> str | None:
    if plan.pp == 1:
        if plan.chunks > 1:
            return f"asks for chunks={plan.chunks} without a pipeline (pp=1)"
        if plan.layers:
            return f"asks for layers={plan.layers} without a pipeline (pp=1)"
        if plan.unsharded:
            return f"asks for unsharded={plan.unsharded} without a pipeline (pp=1)"
        default = ParallelPlan().schedule
        return f"asks for schedule={plan.schedule} without a pipeline (pp=1)" if plan.schedule != default else None
    if plan.transport == "copy":
        return "asks for transport=copy with a pipeline, whose stages give back the memory that peers would read"
    form = FORMS.get(plan.schedule)
    if form is not None and form.chunks is not None and plan.chunks not in (1, form.chunks):
        return f"asks for chunks={plan.chunks}, found schedule={plan.schedule}, which has {form.chunks} stages a rank"
    if form is None:
        table = read_csv(plan.schedule)
        count = micro_batch_count(plan, config.train.global_batch, _is_fixed(config))
        sizes = [("pp", plan.pp, table.ranks), ("micro_batches", count, table.micro_batches)]
        sizes += [("chunks", plan.chunks, table.stages // table.ranks)] if plan.chunks > 1 else []
        for what, asked, found in sizes:
            if asked != found:
                return f"asks for {what}={asked}, found {what}={found} in {plan.schedule}"
        if fault := contradiction(table, plan, _is_fixed(config)):
            return f"asks for schedule={plan.schedule}, which {fault}"
        if plan.unsharded and any(action.kind in ZERO for row in table.rows for action in row):
            return f"asks for unsharded={plan.unsharded}, found gathers in {plan.schedule}"
    stages = num_stages(plan)
    if plan.unsharded and plan.zero != 3:
        return f"asks for unsharded={plan.unsharded} without zero=3, which alone frees what is whole"
    if plan.unsharded > stages // plan.pp:
        return f"asks for unsharded={plan.unsharded}, found {stages // plan.pp} stages a rank"
    if cfg.num_layers < stages:
        words = f"pp={plan.pp}" + (f" chunks={stages // plan.pp}" if stages > plan.pp else "")
        return f"asks for {words}, found {cfg.num_layers} layers for {stages} stages"
    try:
        stages_of(cfg, stages, config.data.sequence_length, layers_given(plan))
    except PlanError as error:
        return f"asks for {str(error).partition(': nearest')[0]}"
    if config.train.compile and splits_backward(plan):
        return (
            f"asks for schedule={plan.schedule}, which runs backward in two parts, with train.compile=true, whose "
            "compiled blocks run it in one"
        )
    return None


def _legal_tp(cfg: ModelConfig) -> str:
    """The sizes of the tensor axis that heads allow, in words."""
    sizes = [n for n in range(1, cfg.num_heads + 1) if cfg.num_heads % n == 0]
    return " or ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))


def _divides_batch(
    config: Config, cfg: ModelConfig, plan: ParallelPlan, world: int, available: Sequence[str]
) -> str | None:
    """An uneven split over dp is balanced; a micro-batch that some replica has no sequence for is refused."""
    least, most = max(1, config.train.global_batch // plan.dp), math.ceil(config.train.global_batch / plan.dp)
    where = f"(train.global_batch {config.train.global_batch} over dp {plan.dp})"
    if plan.micro_batch_size > most:
        return f"asks for micro_batch_size={plan.micro_batch_size}, found {most} sequences a replica {where}"
    if plan.micro_batches > least:
        return f"asks for {plan.micro_batches} micro-batches, found {least} sequences a replica {where}"
    count, _ = micro_batching(config, plan)
    if plan.micro_batches > 1 and count != plan.micro_batches:
        return (
            f"asks for {plan.micro_batches} micro-batches of {plan.micro_batch_size}, "
            f"found {most} sequences a replica {where}"
        )
    return None


def _is_fixed(config: Config) -> bool:
    return config.run.reproducible == "plan"


def _fixed_batch(
    config: Config, cfg: ModelConfig, plan: ParallelPlan, world: int, available: Sequence[str]
) -> str | None:
    """With `run.reproducible = "plan"` a micro-batch is the same sequences whatever dp is; any number will do."""
    if plan.micro_batches > 1:
        return (
            f'asks for micro_batches={plan.micro_batches} with run.reproducible = "plan", where their number follows '
            "from micro_batch_size (sequences, 1 when left out); give that instead"
        )
    if plan.micro_batch_size > config.train.global_batch:
        return (
            f"asks for micro_batch_size={plan.micro_batch_size}, found train.global_batch {config.train.global_batch}"
        )
    return None


def _ranks_text(count: int) -> str:
    return f"{count} rank" + ("s" if count != 1 else "")


# --- neighbours ----------------------------------------------------------------------------------------------------


def _candidates(config: Config, world: int, available_axes: Sequence[str]) -> Iterator[ParallelPlan]:
    """Plans of `world` ranks around `config.plan`: meshes, ZeRO stages, recompute policies, micro-batch counts."""
    asked = config.plan
    for dp, tp, pp, cp, ep in meshes_of(world, available_axes):
        shard = asked.shard if "shard" in available_axes and asked.shard and dp % asked.shard == 0 else 0
        mesh = replace(asked, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, shard=shard, chunks=1, layers="", unsharded=0)
        if tp == ep == 1 and asked.overlap == "fused":
            mesh = replace(mesh, overlap="auto")
        if pp > 1 and asked.transport == "copy":
            mesh = replace(mesh, transport="auto")
        pipelines = {("1f1b", 1, "")}
        if pp > 1 and asked.pp > 1:  # else its schedule is none that a pipeline was asked to run by
            pipelines |= {(asked.schedule, asked.chunks, asked.layers), (asked.schedule, 1, "")}
            fewer = min(asked.chunks, config.model_config().num_layers // pp)
            pipelines |= {(name, fewer, "") for name in (asked.schedule, "interleaved") if fewer > 1}
        meshes = [replace(mesh, schedule=s, chunks=c, layers=n) for s, c, n in sorted(pipelines)]
        exchanges = {asked.exchange, "auto"} if cp > 1 else {asked.exchange}
        meshes = [replace(mesh, exchange=exchange) for mesh in meshes for exchange in sorted(exchanges)]
        for mesh, zero, recompute, (count, size) in product(meshes, range(4), RECOMPUTE, _batchings(config, dp)):
            found = replace(mesh, zero=zero, recompute=recompute, micro_batches=count, micro_batch_size=size)
            yield found
            if zero >= 2 if pp == 1 else mesh.schedule not in FORMS:  # where it spares memory, or a file says so
                yield replace(found, reduce="step" if asked.reduce == "micro_batch" else "micro_batch")
            if pp > 1 and zero == 3:
                yield from (replace(found, unsharded=number) for number in {1, asked.unsharded or 1})


def meshes_of(world: int, available_axes: Sequence[str]) -> Iterator[tuple[int, int, int, int, int]]:
    """(dp, tp, pp, cp, ep) whose product, ep aside, is `world`; axes that cannot be executed are 1."""

    def sizes(axis: str, limit: int) -> list[int]:
        return [n for n in range(1, limit + 1) if limit % n == 0] if axis in available_axes else [1]

    for tp in sizes("tp", world):
        for pp in sizes("pp", world // tp):
            for cp in sizes("cp", world // tp // pp):
                dp = world // tp // pp // cp
                for ep in sizes("ep", dp * cp):
                    yield dp, tp, pp, cp, ep


def _batchings(config: Config, dp: int) -> set[tuple[int, int]]:
    """(micro_batches, micro_batch_size) worth trying: as asked, one, powers of two, and as many as there are."""
    asked = config.plan
    if _is_fixed(config):
        return {(1, size) for size in (asked.micro_batch_size, min(asked.micro_batch_size, config.train.global_batch))}
    least = max(1, config.train.global_batch // dp)
    counts = {1, least, min(asked.micro_batches, least)} | {1 << i for i in range(least.bit_length())}
    if asked.pp > 1 and asked.schedule not in FORMS:
        counts.add(read_csv(asked.schedule).micro_batches)
    return {(count, 0) for count in counts if count <= least} | {(asked.micro_batches, asked.micro_batch_size)}


def _distance(asked: ParallelPlan, plan: ParallelPlan) -> float:
    """How far a plan is from the asked one; a ZeRO stage is cheapest, another mesh dearest."""
    axes = sum(abs(math.log2(getattr(plan, axis) / getattr(asked, axis))) for axis in ("tp", "pp", "cp", "ep"))
    axes += abs(math.log2(plan.dp / asked.dp)) / 2  # dp follows from the others and the world
    recompute = abs(RECOMPUTE.index(plan.recompute) - RECOMPUTE.index(asked.recompute))
    micro_batches = abs(math.log2(plan.micro_batches / asked.micro_batches))
    return (
        100 * axes
        + 4 * recompute
        + 2 * micro_batches
        + (plan.micro_batch_size != asked.micro_batch_size)
        + (plan.exchange != asked.exchange)
        + (plan.overlap != asked.overlap)
        + 8 * (plan.schedule != asked.schedule)
        + 9 * abs(math.log2(plan.chunks / asked.chunks))
        + (plan.layers != asked.layers)
        + 3 * (plan.unsharded != asked.unsharded)
        + abs(plan.zero - asked.zero) * (1 if plan.zero > asked.zero else 3)
    )


def _suggestion(
    config: Config,
    world: int,
    memory_bytes: int | None,
    available_axes: Sequence[str],
    device: str,
    ways: Chooser | None,
) -> str:
    """The end of a refusal: the nearest plan that works, on these ranks or on more of them."""
    if found := nearest_plans(config, world, memory_bytes, available_axes, device, 1, ways):
        return f'the nearest that works is "{found[0]}"'
    for more in (world * 2**doublings for doublings in range(1, 8)):
        if found := nearest_plans(config, more, memory_bytes, available_axes, device, 1, ways):
            return f'none fits {_ranks_text(world)}, the nearest that works is "{found[0]}" on {more}'
    if memory_bytes is not None:
        return f"none fits up to {world * 128} ranks, so take a smaller model or sequence_length"
    raise ConfigError(f"no plan of {', '.join(available_axes)} divides this run")
