"""The data axis under a pipeline: weights of a stage are gathered, freed and reduced when a schedule's table says so.

Equals `DataParallel` around each stage.  There the units of one pass are gathered one ahead of the other, again for
every micro-batch; here several passes run through each other, so a stage's weights become whole once and stay until the
table frees them, and its gradients add up until the table reduces them.  Memory follows the table: with ZeRO-3 a stage
that is not whole holds no more than its shards.

A tensor that two stages on different ranks use (a tied embedding) is a root parameter of both: each rank sums its own
gradients over its data ranks, then the two add theirs over `tie`, once, so that both make the same update.  In a sum of
fixed order the two uses of a micro-batch are added first, as autograd adds them in one process: the last stage hands
its part of each micro-batch to the first, which alone sums, and gives the sum back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from interlace.collectives import Group, Handle, Sending, all_gather, all_reduce, broadcast, gather_bytes, receive, send
from interlace.errors import ConfigError
from interlace.parallel.data import DataParallel
from interlace.parallel.flat import Flat, Round
from interlace.parallel.run import Placement
from interlace.parallel.split import Switch
from interlace.parallel.state import combined
from interlace.parallel.units import IN_FLIGHT, ROOT, Unit, share, when_ready


class StagedParallel(DataParallel):
    """Wraps a module whose units belong to stages of a pipeline; `parallel.pipeline` runs it.

    Args: those of `DataParallel`, and
        stages: stage -> names of its units.
        order: the units of all stages, in order of execution.
        pipeline: the ranks of the pipeline.
        ends: of the whole pipeline, the first and the last stage, if both read the root parameters.
        tie: the ranks of these two, if they are two and this is one of them; the first counts and stores them.
        upwards: from the last of them to the first.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        stages: Mapping[int, Sequence[str]],
        order: Sequence[str],
        pipeline: Group,
        ends: tuple[int, int] | None = None,
        tie: Group | None = None,
        upwards: Group | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module, group, **options)
        self._order = {name: number for number, name in enumerate([*order, ROOT])}
        self._layout: list[list[tuple[int, int]]] | None = None
        self.switch: Switch | None = None
        self.through: Callable[..., tuple[torch.Tensor, int]] | None = None
        self._stages = {stage: set(names) for stage, names in stages.items()}
        self.pipeline = pipeline
        self.tie, self.upwards = tie, upwards
        self._ends = ends
        self._now: tuple[int, int] | None = None  # the stage and micro-batch in backward
        self._last_uses: dict[int, torch.Tensor] = {}
        self._sendings: list[Sending] = []
        self.leaves_in_step = 0
        self._travelling: dict[Flat, tuple[Handle[torch.Tensor], bool]] = {}  # in order of their start

    @property
    def counts_root(self) -> bool:
        """Whether the root parameters are this rank's to count and to store."""
        return self.tie is None or self.tie.rank == 0

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("a module cut into stages runs through its pipeline alone.")

    @property
    def axes(self) -> list[Group]:
        return [*super().axes, self.pipeline]

    @property
    def computing_dtype(self) -> torch.dtype:
        """Of what passes between stages."""
        return next(flat.compute_dtype for flat in self.flats if flat.compute_dtype.is_floating_point)

    @property
    def counted(self) -> list[Flat]:
        return [flat for flat in super().counted if self.counts_root or flat not in self.root.flats]

    def placements(self, *, owned: bool) -> Iterator[Placement]:
        tied = {member.name for flat in self.root.flats for member in flat.members}
        for place in super().placements(owned=owned):
            if not owned or self.counts_root or place.name not in tied:
                yield place

    def _digest_of(self, lines: list[str]) -> str:
        everyone = gather_bytes("\n".join(lines).encode(), self.pipeline, name="digests of all stages")
        return combined(line for part in everyone for line in part.decode().splitlines())

    def _chunks(self, everyone: torch.Tensor) -> list[torch.Tensor]:
        """Those of all stages, of a tied tensor once, in the order of the model."""
        places = [self._order[unit.name] for unit in self.all_units for _ in unit.trainable]
        own = [
            (place, chunks)
            for place, chunks in zip(places, super()._chunks(everyone), strict=True)
            if self.counts_root or place < self._order[ROOT]
        ]
        if self._layout is None:  # by rank: place and chunks of every run
            text = json.dumps([(place, len(chunks)) for place, chunks in own]).encode()
            self._layout = [json.loads(part) for part in gather_bytes(text, self.pipeline, name="runs of all stages")]
        sizes = [sum(count for _, count in part) for part in self._layout]
        values = torch.cat([chunks for _, chunks in own]) if own else everyone.new_zeros(0)
        whole = all_gather(values, self.pipeline, sizes=sizes, name="squares of all stages").wait()
        runs = [run for part in self._layout for run in part]
        parts = zip(runs, whole.split([count for _, count in runs]), strict=True)
        return [chunks for _, chunks in sorted(parts, key=lambda pair: pair[0][0])]

    # -- by word of the table ----------------------------------------------------------------------------------------

    def begin(self, leaves: int = 0) -> None:
        """A step begins.  leaves: micro-batches on all data ranks, when their sum has a fixed order; else 0."""
        self.leaves_in_step = leaves
        self._drop_stale()
        for flat in self._trainable:
            flat.release()
            flat.begin(alone=False)
        self._whole(self.root)
        self.root.show()

    def before_backward(self, stage: int, micro_batch: int | None) -> None:
        """Whose gradients come next, which need the weights; None: those that a first part has put aside."""
        if micro_batch is not None:
            self.ready(stage)
        self._now = None if micro_batch is None else (stage, micro_batch)

    @property
    def _adds_uses_first(self) -> bool:
        return self._ends is not None and self.leaves_in_step > 0

    def unshard(self, stage: int) -> None:
        """Starts making the weights of a stage whole; each unit waits for its own when it first runs."""
        for unit in self._units_of(stage):
            self._whole(unit)

    def reshard(self, stage: int) -> None:
        """Frees the whole weights of a stage that other ranks hold too."""
        for unit in self._units_of(stage):
            self._free(unit)

    def ready(self, stage: int) -> None:
        """Waits for the weights of a stage, before a pass reads them."""
        for unit in self._units_of(stage):
            unit.show()

    def reduce(self, stage: int, micro_batch: int | None) -> None:
        """Starts summing the gradients of a stage over data ranks: of the step, or of one micro-batch."""
        for unit in reversed(self._units_of(stage)):
            self._reduce_all(unit.trainable, micro_batch)
        if self._adds_uses_first and self._ends is not None and stage == self._ends[0]:
            self._reduce_all(self.root.trainable, micro_batch)

    def finish(self) -> None:
        """The step ends: root gradients are summed, everything has arrived, and weights that were whole are freed."""
        if not self._adds_uses_first:
            self._reduce_all(self.root.trainable, None)
        self._arrive(0)
        for sending in self._sendings:
            sending.wait()
        self._sendings.clear()
        if self.tie is not None:
            self._tie(self.tie)
        self._free(self.root)
        self._now = None
        self._stale = True
        self._refuse_apart()

    def _tie(self, tie: Group) -> None:
        """Both ends get the same gradient of the root parameters."""
        for flat in self.root.trainable:
            if not self._adds_uses_first:
                all_reduce(flat.result, tie, name=f"tied {flat.name}").wait()
            elif tie.rank == 0:
                broadcast(flat.result, tie, name=f"tied {flat.name}").wait()
            else:
                flat.adopt(broadcast(torch.empty_like(flat.main), tie, name=f"tied {flat.name}").wait())

    def _both_uses(self, parameter: nn.Parameter) -> bool:
        """Adds the use of a root parameter in the last stage to that in the first; False: it is not yet time."""
        assert self._now is not None and self._ends is not None
        stage, micro_batch = self._now
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        name = f"tied gradient of micro-batch {micro_batch}"
        if stage == self._ends[1]:
            if self.upwards is None:
                self._last_uses[micro_batch] = gradient
            else:
                self._sendings.append(send(gradient.contiguous(), self.upwards, name=name))
            return False
        if self.upwards is None:
            other = self._last_uses.pop(micro_batch)
        else:
            other = receive(gradient.shape, gradient.dtype, self.upwards, name=name).wait()
        parameter.grad = other.add_(gradient)
        return True

    def _units_of(self, stage: int) -> list[Unit]:
        return [unit for unit in self.units if unit.name in self._stages[stage]]

    def _whole(self, unit: Unit) -> None:
        for flat in unit.flats:
            if flat.slot is not None and flat.slot.buffer is not None:
                _resize(flat.slot.buffer, flat.slot.numel)
            flat.gather()

    def _free(self, unit: Unit) -> None:
        for flat in unit.flats:
            if flat.is_passing:
                flat.forget()
                flat.hide()
                if flat.slot is not None and flat.slot.buffer is not None:
                    _resize(flat.slot.buffer, 0)

    def _reduce_all(self, flats: Sequence[Flat], micro_batch: int | None) -> None:
        for flat in flats:
            if flat in self._travelling:  # of the micro-batch before, after which no gradient came
                self._deliver_run(flat)
            if micro_batch is None or not self.leaves_in_step:
                handle, last = super()._reduce(flat), True
            else:
                round = Round.of(micro_batch, self.group.size, self.leaves_in_step)
                if self.group.size == 1 and not round.last:  # they add up where they arise, in the same order
                    continue
                last = round.last
                handle = flat.reduce_round(round) if self.group.size > 1 else flat.reduce(self._scale, self._wire)
            self._travelling[flat] = handle, last
            self._arrive(IN_FLIGHT * len(flats) if self.overlap else 0)

    def _arrive(self, most: int) -> None:
        """Takes delivery of the oldest reductions, until `most` are under way."""
        while len(self._travelling) > most:
            self._deliver_run(next(iter(self._travelling)))

    def _deliver_run(self, flat: Flat) -> None:
        handle, last = self._travelling.pop(flat)
        handle.wait()
        flat.deliver(last)

    def _accumulate(self, flat: Flat, index: int) -> None:
        uses = self._adds_uses_first and self._now is not None and flat in self.root.flats
        if uses and not self._both_uses(flat.members[index].parameter):
            return
        first_part = self.switch.first_part if self.switch is not None else None
        if first_part is not None and self.leaves_in_step and self.group.size > 1:
            parameter = flat.members[index].parameter  # its turn is with the micro-batch's products
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            first_part.keep(parameter, lambda made=gradient: made)  # type: ignore[misc]
            return
        if flat in self._travelling:  # of the micro-batch before: its buffer is written again now
            self._deliver_run(flat)
        flat.accumulate(index)

    # -- instead of the hooks of one pass ------------------------------------------------------------------------------

    def _make_room(self, distance: int, transport: str) -> None:
        """Nothing is shared, and there are no windows: peers must not read memory that stages give back."""
        if transport == "copy":
            raise ConfigError('transport="copy" is not for stages of a pipeline; use transport="auto".')
        share(self.units, self.root, 0)

    def _register_hooks(self) -> None:
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda module, args, unit=unit: unit.show(), prepend=True)
        for flat in self._trainable:
            for index, member in enumerate(flat.members):
                when_ready(member.parameter, self._accumulate, flat, index)


def _resize(buffer: torch.Tensor, numel: int) -> None:
    """Gives the memory of a buffer back, or takes it again; views of it, saved for backward, stay views of it."""
    nbytes = numel * buffer.element_size()
    if buffer.untyped_storage().nbytes() != nbytes:
        buffer.untyped_storage().resize_(nbytes)
