"""Runs a rank's row of a schedule's table over the stages that it holds.

Equals each micro-batch through all stages in one process, forward and back: the same numbers, whatever the order.  The
one loop below does what the row says, action by action, and knows no schedule.  Sends are not waited for; receives are
posted where the row has them, ahead of their use, into buffers of known shapes; only a computation waits, for what it
takes in.  What is in flight is counted, and never more than `schedule.validate` has said.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from interlace.collectives import Boxes, Handle, Line, Meter, Sending, receive, send
from interlace.collectives.lines import has_host
from interlace.parallel.split import Switch, Tape
from interlace.schedule import Action, Kind, Table, validate
from interlace.schedule.lower import receive_of, send_of
from interlace.schedule.table import RECEIVES, SENDS, ZERO

LOADING = 2  # steps of new shapes: forward and backward come with the first, the optimizer's update with the second


class Work(Protocol):
    """What a stage does with a micro-batch.  Tensors between stages are [B T D], contiguous, without a graph."""

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """The stage's output; `x` is None for the first stage, the output for the last."""

    def backward(self, micro_batch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        """The gradient of the input from that of the output; with `split` the weights' are left to `weights`."""

    def weights(self, micro_batch: int) -> None:
        """The gradients of the weights, behind a split backward."""


class Weights(Protocol):
    """How stages' weights become whole, and their gradients sums over data ranks."""

    def unshard(self, stage: int) -> None: ...

    def reshard(self, stage: int) -> None: ...

    def reduce(self, stage: int, micro_batch: int | None) -> None: ...


class Pipeline:
    """One rank's part of a table.

    Args:
        table: lowered and valid.
        rank: this rank's place along the pipeline.
        lines: to and from the ranks whose stages are neighbours (`pairs_of`).  In boxes they are the same on all ranks.
        device, meter: of this rank; computations, waits and transfers are recorded there.
    """

    def __init__(
        self, table: Table, rank: int, lines: Mapping[tuple[int, int], Line], device: torch.device, meter: Meter
    ) -> None:
        self.table, self.rank, self.lines, self.device, self.meter = table, rank, lines, device, meter
        self.peaks = validate(table)
        self.row = table.rows[rank]
        self.last = table.stages - 1
        self._runs: Counter[tuple[tuple[int, ...], ...]] = Counter()

    def run(
        self,
        works: Mapping[int, Work],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        weights: Weights | None = None,
    ) -> None:
        """One step: every micro-batch forward and back.

        works: by stage, those of this rank.  shapes: of what passes between stages, by micro-batch.  weights: None if
        they are whole all the time, and nothing is to be reduced.
        """
        assert len(shapes) == self.table.micro_batches, (len(shapes), self.table.micro_batches)
        if isinstance(self.lines, Boxes):
            self.lines.require(dtype.itemsize * max(math.prod(shape) for shape in shapes))
        step = _Step(self, works, shapes, dtype, weights, self._loads(shapes))
        for action in self.row:
            step.do(action)
        step.end()

    def _loads(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether kernels may be launched for the first time, the same on every rank; see `collectives.lines`."""
        key = tuple(tuple(shape) for shape in shapes)
        self._runs[key] += 1
        is_early = self.device.type == "cuda" and self._runs[key] <= LOADING
        return is_early and all(has_host(line) for line in self.lines.values())


class _Step:
    """The values under way in one step.  loads: see `Pipeline._loads`."""

    def __init__(
        self,
        pipeline: Pipeline,
        works: Mapping[int, Work],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        weights: Weights | None,
        loads: bool,
    ) -> None:
        self.pipeline, self.works, self.shapes, self.dtype, self.weights = pipeline, works, shapes, dtype, weights
        self.loads = loads
        self.made: dict[Action, Tensor] = {}  # by send: results for other stages, those of the same rank too
        self.coming: dict[Action, Handle[Tensor]] = {}
        self.going: dict[Action, Sending] = {}
        self.held: Counter[int] = Counter()

    def do(self, action: Action) -> None:
        if action.is_compute:
            self._compute(action)
        elif action.kind in SENDS:
            made, line = self.made.pop(action), self._line(action, action.other)
            self.going[action] = send(made, line, name=str(action), through_host=self.loads)
        elif action.kind in RECEIVES:
            assert action.micro_batch is not None
            shape = self.shapes[action.micro_batch]
            line = self._line(action.other, action)
            self.coming[action] = receive(shape, self.dtype, line, name=str(action), through_host=self.loads)
        elif action.kind in ZERO and self.weights is not None:
            if action.kind is Kind.UNSHARD:
                self.weights.unshard(action.stage)
            elif action.kind is Kind.RESHARD:
                self.weights.reshard(action.stage)
            else:
                self.weights.reduce(action.stage, action.micro_batch)
        for done in [sent for sent, sending in self.going.items() if sending.is_done]:
            del self.going[done]

    def end(self) -> None:
        """Every send has been taken."""
        assert not self.made and not self.coming, (self.made.keys(), self.coming.keys())
        for sending in self.going.values():
            sending.wait()
        self.going.clear()

    def _line(self, send: Action, receive: Action):  # type: ignore[no-untyped-def]
        home = self.pipeline.table.placement
        return self.pipeline.lines[home[send.stage], home[receive.stage]]

    def _compute(self, action: Action) -> None:
        stage, j = action.stage, action.micro_batch
        assert j is not None
        work, last = self.works[stage], self.pipeline.last
        taken = self._take(receive_of(action, last))
        result = None
        with self.pipeline.meter.work("compute", str(action), self.pipeline.device):
            if action.kind is Kind.FORWARD:
                self._count(stage, 1)
                result = work.forward(j, taken)
            elif action.kind is Kind.WEIGHT:
                work.weights(j)
            else:
                result = work.backward(j, taken, split=action.kind is Kind.INPUT)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            self._count(stage, -1)
        sent = send_of(action, last)
        if sent is not None:
            assert result is not None, f"{action} made nothing to send"
            self.made[sent] = result

    def _take(self, receive: Action | None) -> Tensor | None:
        """What a computation takes in: from the same rank, or received."""
        if receive is None:
            return None
        if receive not in self.coming:
            return self.made.pop(receive.other)
        value = self.coming.pop(receive).wait()
        if receive.kind is Kind.RECV_B:  # its input has long been taken
            sending = self.going.pop(Action(receive.stage, Kind.SEND_F, receive.micro_batch), None)
            if sending is not None:
                sending.wait()
        return value

    def _count(self, stage: int, change: int) -> None:
        self.held[stage] += change
        peaks, rank = self.pipeline.peaks, self.pipeline.rank
        assert self.held[stage] <= peaks.stages[stage], f"stage {stage} holds {self.held[stage]} activations"
        assert self.held.total() <= peaks.ranks[rank], f"rank {rank} holds {self.held.total()} activations"


class Stage:
    """A stage of autograd: `compute(micro_batch, x)` -> (output or None, this stage's part of the loss or None).

    With a `switch`, its products defer their weights' gradients (`parallel.split`).  `before_backward` is told whose
    gradients come next: a micro-batch's, or None for what a first part has put aside.
    """

    def __init__(
        self,
        compute: Callable[[int, Tensor | None], tuple[Tensor | None, Tensor | None]],
        switch: Switch | None = None,
        before_backward: Callable[[int | None], None] = lambda micro_batch: None,
    ) -> None:
        self.compute = compute
        self.switch = switch
        self.before_backward = before_backward
        self.losses: dict[int, Tensor] = {}
        self._graphs: dict[int, tuple[Tensor | None, GradientEdge | None, Tensor | None, Tape]] = {}
        self._tapes: dict[int, Tape] = {}

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor | None:
        tape = self._begin(Tape())
        given = x.detach().requires_grad_() if x is not None else None
        with torch.enable_grad():
            output, loss = self.compute(micro_batch, given)
        self._begin(None)
        edge = get_gradient_edge(output) if output is not None and output.requires_grad else None
        self._graphs[micro_batch] = given, edge, loss, tape or Tape()
        if loss is not None:
            self.losses[micro_batch] = loss.detach()
        return output.detach().contiguous() if output is not None else None

    def backward(self, micro_batch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        given, edge, loss, tape = self._graphs.pop(micro_batch)
        roots: list[Tensor | GradientEdge] = []
        gradients: list[Tensor | None] = []
        if edge is not None:
            roots.append(edge)
            gradients.append(gradient)
        if loss is not None and loss.requires_grad:
            roots.append(loss)
            gradients.append(None)
        self.before_backward(micro_batch)
        self._begin(tape, tape if split else None)  # for what runs again
        if roots:
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        self._begin(None)
        if split:
            self._tapes[micro_batch] = tape
        else:
            tape.weights()
        if given is None:
            return None
        return given.grad.contiguous() if given.grad is not None else torch.zeros_like(given)

    def weights(self, micro_batch: int) -> None:
        self.before_backward(None)
        self._tapes.pop(micro_batch).weights()

    def take_losses(self) -> list[Tensor]:
        """Parts of the loss by micro-batch, detached; empty for a stage without any."""
        losses, self.losses = self.losses, {}
        return [losses[number] for number in sorted(losses)]

    def _begin(self, tape: Tape | None, first_part: Tape | None = None) -> Tape | None:
        if self.switch is not None:
            self.switch.tape, self.switch.first_part = tape, first_part
        return tape


def pairs_of(placement: Sequence[int]) -> set[tuple[int, int]]:
    """(from, to): every direction in which stages, placed so, send to another rank."""
    neighbours = [(a, b) for a, b in itertools.pairwise(placement) if a != b]
    return {*neighbours, *((b, a) for a, b in neighbours)}
