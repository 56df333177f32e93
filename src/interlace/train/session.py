"""What one rank of a run holds: mesh, data, split model and optimizer, built from the run file alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from interlace import hf_config, random, spec, tokenizer
from interlace.collectives import (
    Boxes,
    Group,
    Groups,
    Meter,
    all_gather,
    between_all,
    make_groups,
    neighbours,
    reach,
    strided,
)
from interlace.config import Config, ModelConfig
from interlace.errors import ConfigError, DataError
from interlace.kernels import tune
from interlace.mesh import Mesh
from interlace.models import weights
from interlace.models.decoder import Decoder, Vocabulary, initial_value
from interlace.models.moe import experts
from interlace.parallel.context import split_sequences
from interlace.parallel.data import DataParallel
from interlace.parallel.expert import ExpertAxis, is_fused, split_experts
from interlace.parallel.part import Part, holding
from interlace.parallel.sequence import SequenceAxis
from interlace.parallel.stages import StagedParallel
from interlace.parallel.tensor import Axis, split_decoder
from interlace.plan import context, exchange, expert
from interlace.plan.memory import micro_batching
from interlace.plan.share import computed_sequences, micro_batch_count
from interlace.plan.share import leaves as fixed_leaves
from interlace.plan.tensor import across_hosts
from interlace.topology import Topology
from interlace.train import optimizer as optimizers
from interlace.train import recompute, stages
from interlace.train.data import IGNORED, Batch, Cursor, Dataset, Span, micro_batches, shard
from interlace.world import World

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")
UNITS = ("embedding", "blocks.*", "head")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Session:
    """`steps`: of the whole run; `cursor`: the next global batch; `spans`: the sizes of batches so far; `columns_T`:
    positions of each sequence that are here, None = all.  `groups["dp"]` are all ranks that share weights, cp's
    neighbours among them.  `table`: device and digest of the measurements that products of the tensor axis are chosen
    by, "" where nothing is."""

    world: World
    cfg: Config
    model_cfg: ModelConfig
    mesh: Mesh
    groups: Groups
    meter: Meter
    dataset: Dataset
    model: DataParallel
    optimizer: torch.optim.Optimizer
    steps: int
    cursor: Cursor
    spans: list[Span]
    notes: list[str] = field(default_factory=list)
    columns_T: torch.Tensor | None = None
    table: str = ""

    def batches(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch.  A rank without a share gets one without labels."""
        indices = self.dataset.indices(self.cursor, self.cfg.train.global_batch)
        dp = self.groups["dp"]  # with run.reproducible="plan" there is no cp
        if self.is_fixed:
            dealt = fixed_leaves(self.cfg.plan, len(indices))[dp.rank :: dp.size]
            idle = micro_batch_count(self.cfg.plan, len(indices), fixed=True) - len(dealt)
            return [self._batch([indices[i] for i in leaf], indices[0]) for leaf in [*dealt, *[range(0)] * idle]]
        own = shard(indices, self.cfg.plan.dp, dp.rank // self.cfg.plan.cp)
        count = micro_batch_count(self.cfg.plan, len(indices))
        return [self._batch(part, indices[0]) for part in micro_batches(own, count)]

    def _batch(self, part: list[int], stand_in: int) -> Batch:
        batch = self.dataset.sequences(self.cursor.epoch, part or [stand_in])
        if not part:
            batch.labels_BT.fill_(IGNORED)
        return batch if self.columns_T is None else batch.at(self.columns_T)

    @property
    def is_fixed(self) -> bool:
        """Whether sums are the same for every plan."""
        return self.cfg.run.reproducible == "plan"

    @property
    def leaves(self) -> int:
        """Micro-batches of the next global batch on all ranks together, when their sum has a fixed order; else 0."""
        if not self.is_fixed:
            return 0
        return len(fixed_leaves(self.cfg.plan, len(self.dataset.indices(self.cursor, self.cfg.train.global_batch))))

    def advance(self) -> None:
        self.cursor = self.dataset.advance(self.cursor, self.cfg.train.global_batch)

    def dropout_key(self, step: int) -> int:
        return dropout_key(self.cfg, step)


def build(world: World, cfg: Config) -> Session:
    """Collective: every rank calls it with the same configuration."""
    if cfg.run.deterministic or cfg.run.reproducible == "plan":
        _pin(cfg, world.device)
    model_cfg = cfg.model_config()
    dataset = Dataset.open(cfg.data, model_cfg.vocab_size, cfg.run.seed)
    mesh = Mesh.of(cfg.plan)
    meter = Meter(world.waiting)
    groups = make_groups(Mesh.of(context.as_data(cfg.plan)), world.rank, world.device, cfg.run.timeout, meter)
    _agree(groups, dataset)
    decoder = Decoder(model_cfg, device="meta", dtype=torch.float32)
    units: Sequence[str] = UNITS
    wrap: Callable[..., DataParallel] = DataParallel
    if cfg.plan.pp > 1:
        units, wrap = stages.prepare(cfg, model_cfg, decoder, groups)
    if world.device.type == "cuda" and decoder.head is not None:
        from interlace.kernels.softmax_rows import softmax_rows  # needs Triton

        decoder.head.softmax_rows = softmax_rows
    values = initial_values(cfg, model_cfg, world.device)
    fill_buffers(decoder, values, world.device)
    axis_of_cp = None
    if cfg.plan.cp > 1:
        ranks = neighbours(groups, "dp", cfg.plan.cp, cfg.run.timeout, name="cp")
        exchange = context.choose(cfg, cfg.plan)
        axis_of_cp = SequenceAxis(ranks, cfg.data.sequence_length, exchange, _lines(cfg, ranks))
        split_sequences(decoder, axis_of_cp)
    no_graphs = _no_graphs(cfg, world.device)
    recompute.apply(decoder, cfg.plan.recompute, cfg.train.compile, cfg.train.graphs and not no_graphs)
    here = {name for name, _ in decoder.named_parameters()}
    parameters = [parameter for parameter in spec.parameters(model_cfg) if parameter.name in here]
    parts: dict[str, Part] = {}
    others = groups.by_axis.get("ep")
    if mesh.size("tp") > 1:
        plan = cfg.plan
        axis = Axis(groups["tp"], plan.sequence == "on", plan.overlap, reruns=plan.recompute == "full")
        parts = split_decoder(decoder, parameters, axis, holding(groups, "tp", cfg.run.timeout), others)
    if others is not None:
        axis_of_ep = _expert_axis(cfg, others)
        parts = split_experts(decoder, parameters, axis_of_ep, groups["tp"], parts)
    model = wrap(
        decoder,
        groups["dp"],
        zero=cfg.plan.zero,
        hybrid=(groups["shard"], groups["replica"]) if "shard" in groups.by_axis else None,
        units=units,
        gradients="sum",
        compute_dtype=DTYPES[cfg.train.precision],
        wire_dtype=DTYPES[cfg.train.reduce_dtype],
        overlap=cfg.plan.overlap != "off",
        transport=cfg.plan.transport,
        materialise=values,
        dims={parameter.name: parameter.dims for parameter in parameters},
        decay={parameter.name: parameter.decay for parameter in parameters},
        parts=parts,
        tensor=groups["tp"],
        experts=_same_experts(cfg, groups) if others is not None else None,
    )
    model.reduces_each = cfg.plan.reduce == "micro_batch"
    if isinstance(model, StagedParallel):
        stages.attach(cfg, model_cfg, model, groups, meter)
    elif cfg.run.reproducible != "plan" and isinstance(decoder.head.vocabulary, Vocabulary):
        decoder.head.vocabulary.scratch = model.spare_memory
    optimizer = optimizers.build(cfg.train, model)
    steps = cfg.train.steps
    if cfg.train.epochs:
        steps = cfg.train.epochs * dataset.steps_per_epoch(cfg.train.global_batch)
    cursor = dataset.cursor_at(0, cfg.train.global_batch)
    spans = [Span(0, 0, 0, cfg.train.global_batch)]
    made = Session(world, cfg, model_cfg, mesh, groups, meter, dataset, model, optimizer, steps, cursor, spans)
    if axis_of_cp is not None:
        made.columns_T = axis_of_cp.columns()
        model.boxes += [] if axis_of_cp.boxes is None else [axis_of_cp.boxes]
    if mesh.size("tp") > 1 and cfg.plan.overlap in ("auto", "fused"):
        made.table = _one_table(groups)
    if decoder.replays and groups["tp"].size > 1:
        from interlace.kernels import workspace  # needs Triton

        workspace.count_in_memory(groups["tp"])
    if cfg.train.graphs and no_graphs:
        made.notes.append(f"train.graphs is left out, since {no_graphs}")
    if mesh.size("tp") > 1 and (line := _across_hosts(made)):
        made.notes.append(line)
    if is_fused(decoder):
        made.notes.append(
            f"rows to experts: fused exchange, room for {cfg.plan.expert_room:g} times the even rows at first"
        )
    if cfg.model.from_ and not holds_weights(Path(cfg.model.from_)):
        made.notes.append(f"no weights in {cfg.model.from_}: the model starts from random ones")
    elif cfg.model.from_ and _has_other_tokenizer(cfg):
        made.notes.append(
            f"{cfg.model.from_} has a {tokenizer.FILE}, and the data are read with another (data.tokenizer = "
            f'"{cfg.data.tokenizer}"): its weights know other ids; data.tokenizer={cfg.model.from_} takes its own'
        )
    return made


def _has_other_tokenizer(cfg: Config) -> bool:
    """Whether the folder that the run begins from has a tokenizer, and it is not the run's."""
    theirs, ours = Path(cfg.model.from_, tokenizer.FILE), tokenizer.file_of(cfg.data.tokenizer)
    return theirs.is_file() and (ours is None or ours.read_bytes() != theirs.read_bytes())


def _no_graphs(cfg: Config, device: torch.device) -> str:
    """Why blocks cannot be replayed as CUDA graphs; "" if they can."""
    if device.type != "cuda":
        return "there is no GPU"
    if cfg.plan.pp > 1:
        return "a stage of a pipeline has several micro-batches under way"
    if cfg.model_config().num_experts:
        return "the host reads how many rows go to each expert"
    if cfg.plan.cp > 1:
        return "attention over the context axis takes turns that the host counts"
    if cfg.plan.recompute == "full":
        return "recompute=full runs blocks again amid the backward pass"
    if cfg.data.documents != "joined":
        return "documents apart have other lengths in each step (data.documents=joined joins them)"
    return ""


def most_tokens(cfg: Config) -> int:
    """The most tokens that any rank has in a micro-batch."""
    _, sequences = micro_batching(cfg, cfg.plan)
    length, ways = cfg.data.sequence_length, cfg.plan.cp
    return sequences * max(context.held(length, ways, rank) for rank in range(ways))


def _expert_axis(cfg: Config, group: Group) -> ExpertAxis:
    plan, itemsize = cfg.plan, DTYPES[cfg.train.precision].itemsize
    taken = exchange.taken(cfg.model_config(), plan, itemsize, group.device.type)
    fuse: Literal["no", "yes", "asked"] = "no" if not taken else "asked" if plan.overlap == "fused" else "yes"
    return ExpertAxis(group, experts, plan.expert_halves == "on", fuse, plan.expert_room, most_tokens(cfg))


def _lines(cfg: Config, ranks: Group) -> Boxes | None:
    """Over copy engines between every two ranks of cp, on GPUs that address each other's memory.  Collective."""
    if cfg.plan.transport == "library" or ranks.device.type != "cuda" or not reach(ranks):
        return None
    return between_all(ranks, cfg.run.timeout)


def _same_experts(cfg: Config, groups: Groups) -> tuple[Group, tuple[Group, Group] | None]:
    """The ranks that hold this one's experts; where a copy is shared by some of them, these, and those with the same
    shard.  Collective."""
    count = expert.inner(context.as_data(cfg.plan))
    if not 1 < count < groups["edp"].size:
        return groups["edp"], None
    given = (groups, "edp", count, cfg.run.timeout)
    return groups["edp"], (neighbours(*given), strided(*given))


def _across_hosts(session: Session) -> str | None:
    """What it costs that a tensor group has ranks on several hosts, if one has.  Collective."""
    world, cfg = session.world, session.cfg
    own = random.key(0, socket.gethostname()) >> 1
    hosts = all_gather(torch.tensor([own]), session.groups.host, name="hosts").wait().tolist()
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    counts = computed_sequences(cfg.plan, session.mesh, world.rank, cfg.train.global_batch)
    return across_hosts(cfg, counts, hosts, Topology.from_device_name(name))


def _pin(cfg: Config, device: torch.device) -> None:
    """Makes operators deterministic, for this process; for the same bits under every plan, also what else they hang on.

    One thread on a CPU, whatever the environment says, since the usual number depends on the ranks beside it; fp32
    products in fp32; fixed shapes when compiled.  Nothing reads memory that nobody wrote, so filling it is left out.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if device.type == "cuda":
        _pin_products(device)
    if cfg.run.reproducible == "plan":
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward has no deterministic form
    if cfg.run.reproducible == "plan" and cfg.train.compile:
        import torch._dynamo.config as compiling  # slow to import

        compiling.automatic_dynamic_shapes = False  # one rank may see a shape that another does not


def _pin_products(device: torch.device) -> None:
    """Lets products be made with deterministic algorithms, which PyTorch refuses without CUBLAS_WORKSPACE_CONFIG.

    It looks for that once.  As long as the variable is set it also matches it against a regular expression for every
    product, 50 us of the host, for the size of the memory that it hands to the library with or without it, which is
    what fixes the order of sums.  So the variable is there for the first product; if a second is refused, it stays.
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    if name in os.environ:
        return
    one = torch.ones(8, 8, device=device)
    os.environ[name] = ":4096:8"
    torch.mm(one, one)
    del os.environ[name]
    try:
        torch.mm(one, one)
    except RuntimeError:
        os.environ[name] = ":4096:8"


def initial_values(
    cfg: Config, model_cfg: ModelConfig, device: torch.device
) -> Callable[[str, int, int], torch.Tensor]:
    """(name, start, stop) -> that range of a parameter's or buffer's first values: a Hugging Face folder's, or ours.

    A folder with a `config.json` and no weights in any form gives the sizes only.
    """
    table = {parameter.name: parameter for parameter in (*spec.parameters(model_cfg), *spec.buffers(model_cfg))}
    if cfg.model.from_ and holds_weights(Path(cfg.model.from_)):
        stored_cfg, stored = weights.load_hf(cfg.model.from_)
        training = {key: getattr(model_cfg, key) for key in (*hf_config.TRAINING, "attention_dropout")}
        if replace(stored_cfg, **training) != model_cfg:
            raise ConfigError(
                f"[model] changes sizes of {cfg.model.from_}, whose weights would not fit; remove the other keys of "
                "[model], or point `from` at a folder without weights."
            )
        tensors = dict(stored)
        return lambda name, start, stop: tensors[name].reshape(-1)[start:stop]
    seed = cfg.run.seed
    return lambda name, start, stop: initial_value(table[name], seed, start, stop - start, device, torch.float32)


def fill_buffers(decoder: Decoder, values: Callable[[str, int, int], torch.Tensor], device: torch.device) -> None:
    """Puts buffers with their first values in the place of those of a decoder."""
    for name, buffer in list(decoder.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        value = values(name, 0, buffer.numel()).to(device, torch.float32, copy=True)
        decoder.get_submodule(owner)._buffers[attribute] = value.view(buffer.shape)


def holds_weights(folder: Path) -> bool:
    """Whether a Hugging Face folder has, names or once had weights: then they must all be there and readable."""
    return any(path.match(pattern) for path in folder.iterdir() for pattern in WEIGHTS)


def _agree(groups: Groups, dataset: Dataset) -> None:
    """Refuses ranks that see different data (another Python's library, say): exact order would be an illusion."""
    own = random.key(0, dataset.digest) >> 1  # a signed 64-bit number
    everyone = (
        all_gather(torch.tensor([own], dtype=torch.int64), groups.host, name="digest of the data").wait().tolist()
    )
    if len(set(everyone)) > 1:
        odd = [rank for rank, digest in enumerate(everyone) if digest != everyone[0]]
        raise DataError(
            f"rank {odd[0]} reads other data than rank 0 ({dataset.digest} on rank {groups.rank}); give all hosts the "
            "same files.",
            ranks=odd,
        )


def _one_table(groups: Groups) -> str:
    """The table that every rank chooses products by.  Refuses ranks that have different ones: each would wait for
    another kernel than its peer runs."""
    own = tune.identity(groups["tp"].device)
    key = torch.tensor([random.key(0, own) >> 1], dtype=torch.int64)
    everyone = all_gather(key, groups.host, name="table of products").wait().tolist()
    if odd := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
        raise ConfigError(
            f"rank {odd[0]} would choose products by another table than rank 0 ({own} on rank {groups.rank}); give all "
            "hosts the same files and GPUs, or use overlap=plain."
        )
    return own


def dropout_key(cfg: Config, step: int) -> int:
    """What the dropout masks of a step are drawn from."""
    return random.key(cfg.run.seed, "dropout", step)
