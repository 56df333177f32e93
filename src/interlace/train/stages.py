"""A decoder cut into the stages of a pipeline, and one step through them.

Equals `Decoder.loss` on every micro-batch and its backward.  A rank holds a decoder with the parts of the other ranks
left out, under their own names; a stage is that decoder with those of its other stages left out too.  The loss of a
router is added where its layers are; the last stage adds that of the vocabulary; both are divided by the global number
of labels before backward, so that the gradient of a step is the same for every cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from interlace import spec
from interlace.collectives import Boxes, Group, Groups, Handle, Line, Lines, Meter, all_gather, in_boxes, make_lines
from interlace.collectives.handle import Moment, now
from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.models.decoder import Decoder
from interlace.models.stage import keep, view
from interlace.parallel.pipeline import Pipeline, Stage, pairs_of
from interlace.parallel.split import Switch, split
from interlace.parallel.stages import StagedParallel
from interlace.plan.expert import layers
from interlace.plan.stages import layers_given, num_stages, placement_of, splits_backward, stages_of, table_of
from interlace.train.data import IGNORED, Batch


def cut_of(plan: ParallelPlan, cfg: ModelConfig, length: int) -> tuple[tuple[str, ...], ...]:
    """The units of every stage of a plan."""
    return stages_of(cfg, num_stages(plan), length, layers_given(plan))


def own_stages(plan: ParallelPlan, rank: int) -> tuple[int, ...]:
    """The stages of place `rank` along the pipeline."""
    return tuple(stage for stage, place in enumerate(placement_of(plan)) if place == rank)


class Staged:
    """What a rank of a pipeline runs: its stages, the tables for any number of micro-batches, and what they work on."""

    def __init__(
        self,
        cfg: Config,
        model: StagedParallel,
        cut: Sequence[Sequence[str]],
        group: Group,
        lines: Mapping[tuple[int, int], Line],
        meter: Meter,
    ) -> None:
        self.cfg, self.model, self.group, self.lines, self.meter = cfg, model, group, lines, meter
        self.routed: dict[tuple[int, int], list[Tensor]] = {}  # by stage and micro-batch: of each layer, [2 B]
        self.heads: dict[int, Tensor] = {}  # losses of the vocabulary
        self.given: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]] = []
        self.columns_T: Tensor | None = None
        self.dropout_key = 0
        self.labels: Callable[[], int] = lambda: 1
        self._pipelines: dict[tuple[int, bool], Pipeline] = {}
        decoder = model.module
        assert isinstance(decoder, Decoder)
        self.decoder = decoder
        self.hidden = decoder.cfg.hidden_size
        self.routers = [len(layers(decoder.cfg, names)) for names in cut]  # of each stage
        self.has_losses = decoder.cfg.num_experts > 0 and decoder.cfg.has_router_losses
        switch = Switch() if splits_backward(cfg.plan) else None
        model.switch = switch
        if switch is not None:
            split(decoder, switch)
        self.works = {}
        for stage in own_stages(cfg.plan, group.rank):
            part = view(decoder, cut[stage])
            compute = self._compute_of(stage, part, stage == len(cut) - 1)
            self.works[stage] = Stage(compute, switch, functools.partial(model.before_backward, stage))

    def _compute_of(
        self, stage: int, part: Decoder, is_last: bool
    ) -> Callable[[int, Tensor | None], tuple[Tensor | None, Tensor | None]]:
        def compute(micro_batch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            tokens_BT, labels_BT, positions_BT, documents_BT, samples_B = self.given[micro_batch]
            batch, length = tokens_BT.shape
            context = part.context(
                (batch, length),
                tokens_BT.device,
                positions_BT,
                documents_BT,
                samples_B,
                self.dropout_key,
                self.columns_T,
                labels_BT,
            )
            self.model.ready(stage)
            output = part.hidden(tokens_BT if x is None else x, context)
            losses = part.count(context)
            self.routed[stage, micro_batch] = [loss_2B.detach() for loss_2B in losses]
            if not is_last and not losses:
                return output, None
            counts_B = (labels_BT != IGNORED).sum(dim=1)
            loss = part.balance(losses, counts_B)
            if is_last:
                head = part.head(output, labels_BT, context)
                self.heads[micro_batch] = head.detach()
                loss = head + loss
            return (None if is_last else output), loss / max(self.labels(), 1)

        return compute

    def pipeline(self, micro_batches: int, fixed: bool) -> Pipeline:
        key = micro_batches, fixed
        if key not in self._pipelines:
            table = table_of(self.cfg.plan, micro_batches, fixed)
            self._pipelines[key] = Pipeline(table, self.group.rank, self.lines, self.group.device, self.meter)
        return self._pipelines[key]

    def forward_backward(
        self, batches: Sequence[Batch], host: Group, dropout_key: int, leaves: int
    ) -> tuple[Tensor, int]:
        """As `train.step.forward_backward`; this rank's part of the loss is that of its stages."""
        device = self.group.device
        speaks = self.group.rank == 0 and self.model.stands_first
        own = sum(int((batch.labels_BT != IGNORED).sum()) for batch in batches) if speaks else 0
        counting = all_gather(torch.tensor([own]), host, name="count of labels")
        self.labels = self._once(counting, now(device))
        self.dropout_key = dropout_key
        self.given = [batch.to(device) for batch in batches]
        columns_T = batches[0].columns_T  # alike in all
        self.columns_T = None if columns_T is None else columns_T.to(device)
        shapes = [self._shape(*given[0].shape) for given in self.given]
        self.model.begin(leaves)
        dtype = self.model.computing_dtype
        self.pipeline(len(batches), leaves > 0).run(self.works, shapes, dtype, self.model)
        self.model.finish()
        losses = self._losses_in_order() if leaves and self.has_losses else self._losses()
        self.given, self.routed, self.heads = [], {}, {}
        return (losses if leaves else losses.sum(dim=0, keepdim=True)), self.labels()

    def _once(self, counting: Handle[Tensor], began: Moment) -> Callable[[], int]:
        """The number of labels, waited for when it is first asked for."""
        found: list[int] = []

        def labels() -> int:
            if not found:
                stood = now(self.group.device)
                found.append(int(counting.wait().sum()))
                self.meter.stalled("world", "count of labels", stood, now(self.group.device))
                self.meter.transferred("world", "count of labels", began, now(self.group.device), 0)
            return found[0]

        return labels

    def _shape(self, batch: int, length: int) -> tuple[int, int, int]:
        """Of what passes between stages: all of [B T D], or this rank's rows of it."""
        rows = self.decoder.rows
        if rows is None:
            return batch, length, self.hidden
        start, stop = rows(batch * length)
        return 1, stop - start, self.hidden

    def _losses(self) -> Tensor:
        """This rank's part of the loss of every micro-batch: fp64 [m]."""
        zero = torch.zeros(len(self.given), dtype=torch.float64, device=self.group.device)
        parts = [stage.take_losses() for stage in self.works.values()]
        return sum((torch.stack(part).double() for part in parts if part), start=zero)

    def _losses_in_order(self) -> Tensor:
        """The loss of every micro-batch on the last stage, 0 elsewhere, layers in the model's order: fp64 [m]."""
        for work in self.works.values():
            work.take_losses()
        table = self.pipeline(len(self.given), True).table
        stages = self.routers
        lengths = [2 * len(given[0]) for given in self.given]  # of two losses each
        sizes = [sum(stages[stage] for stage in table.stages_of(rank)) * sum(lengths) for rank in range(table.ranks)]
        own = [loss.flatten() for stage in self.works for j in range(len(lengths)) for loss in self.routed[stage, j]]
        values = torch.cat(own) if own else torch.zeros(0, device=self.group.device)
        parts = all_gather(values, self.group, sizes=sizes, name="losses of routers").wait().split(sizes)
        found: dict[tuple[int, int], list[Tensor]] = {}
        for rank, part in enumerate(parts):
            order = [(stage, j) for stage in table.stages_of(rank) for j in range(len(lengths))]
            places = [place for place in order for _ in range(stages[place[0]])]
            for place, loss in zip(places, part.split([lengths[j] for _, j in places]), strict=True):
                found.setdefault(place, []).append(loss.view(2, -1))
        totals = []
        for j, given in enumerate(self.given):
            losses = [loss for stage in range(table.stages) for loss in found.get((stage, j), [])]
            counts_B = (given[1] != IGNORED).sum(dim=1)
            total = torch.zeros((), device=self.group.device)
            if j in self.heads:
                total = (self.heads[j] + self.decoder.balance(losses, counts_B)) / max(self.labels(), 1)
            totals.append(total.double())
        return torch.stack(totals)


def prepare(
    cfg: Config, model_cfg: ModelConfig, decoder: Decoder, groups: Groups
) -> tuple[list[str], Callable[..., StagedParallel]]:
    """Leaves out of `decoder` what other ranks hold; the names of its units, and what wraps it.  Collective."""
    cut = cut_of(cfg.plan, model_cfg, cfg.data.sequence_length)
    own = {stage: cut[stage] for stage in own_stages(cfg.plan, groups["pp"].rank)}
    order = spec.units(model_cfg)
    names = [name for name in order if any(name in part for part in own.values())]
    wrap = functools.partial(StagedParallel, stages=own, order=order, pipeline=groups["pp"])
    keep(decoder, names)
    if model_cfg.tie_embeddings:
        home = placement_of(cfg.plan)
        first, last = home[0], home[-1]
        wrap = functools.partial(wrap, ends=(0, len(home) - 1))
        if first != last:
            lines = _lines(cfg, groups, {(first, last), (last, first)})
            wrap = functools.partial(wrap, tie=lines.get((first, last)), upwards=lines.get((last, first)))
    return names, wrap


def attach(cfg: Config, model_cfg: ModelConfig, model: StagedParallel, groups: Groups, meter: Meter) -> None:
    """Lets `train.step` run the model through its pipeline.  Collective."""
    group, pairs = groups["pp"], pairs_of(placement_of(cfg.plan))
    made = _lines(cfg, groups, pairs)
    lines = made if cfg.plan.transport == "library" else in_boxes(group, pairs, made, cfg.run.timeout)
    if isinstance(lines, Boxes):
        model.boxes.append(lines)
    cut = cut_of(cfg.plan, model_cfg, cfg.data.sequence_length)
    model.through = Staged(cfg, model, cut, group, lines, meter).forward_backward


def _lines(cfg: Config, groups: Groups, pairs: set[tuple[int, int]]) -> Lines:
    group = groups["pp"]
    return make_lines(groups.mesh, groups.rank, "pp", pairs, group.device, cfg.run.timeout, group.meter)
