"""One optimizer step: (model, micro-batches, optimizer) -> loss and norm.  No input, no output, no clock.

The loss of a step is the sum over all valid labels of the global batch, divided once by their global number, however
the batch is cut: a mean over ranks or micro-batches of means would weigh labels by where they happen to lie
(pytorch/torchtitan#1842, huggingface/transformers#34191).

After the update, the biases of routers move as the load of the whole global batch asks for (`steer`).

With `leaves`, every sum over micro-batches has a fixed order, the same whatever ranks they run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from interlace.collectives import Group, all_gather, sum_scalars
from interlace.collectives.handle import now
from interlace.models.decoder import Decoder
from interlace.parallel import norm as norms
from interlace.parallel.data import DataParallel
from interlace.parallel.stages import StagedParallel
from interlace.train import optimizer as optimizers
from interlace.train.data import IGNORED, Batch
from interlace.train.recompute import begin_pass


@dataclass(frozen=True)
class StepResult:
    """`loss`: mean over the step's `labels` valid labels, `part` this rank's share of it; `grad_norm`: before clipping.

    0-d tensors on the device.  `loads`: of every layer of experts here, how often each was chosen in the global batch,
    and how many of these choices were dropped, int64 [L X+1]; None where there is no such layer.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    labels: int
    part: torch.Tensor
    loads: torch.Tensor | None = None


def forward_backward(
    model: DataParallel, micro_batches: Sequence[Batch], host: Group, dropout_key: int = 0, leaves: int = 0
) -> tuple[torch.Tensor, int]:
    """Gradients of the step's loss into the leaves of `model`, reduced once, or once a micro-batch: with `leaves`, and
    where the model says `reduces_each`.

    Returns this rank's part of the loss, fp64 [1] on the device ([micro-batches] with `leaves`), and the global number
    of valid labels.  Every rank passes as many micro-batches, in CPU memory; `host` joins all ranks that hold
    different samples.  leaves: micro-batches of the step on all ranks, dealt out in turn (`DataParallel.round`).
    """
    if isinstance(model.module, Decoder):
        model.module.loads.clear()  # of passes that no step came from
    if isinstance(model, StagedParallel):
        assert model.through is not None
        return model.through(micro_batches, host, dropout_key, leaves)
    model.early_squares = not leaves  # `update` asks for them; where the order of sums is fixed, it adds others
    own = sum(int((batch.labels_BT != IGNORED).sum()) for batch in micro_batches) if model.stands_first else 0
    meter, device = model.group.meter, model.group.device
    began = now(device)
    counting = all_gather(torch.tensor([own]), host, name="count of labels")
    labels = 0
    losses = []
    for number, batch in enumerate(micro_batches):
        begin_pass(model.module)
        with _summing(model, number, len(micro_batches), leaves):
            with meter.work("compute", f"0F{number}", device):
                columns_T = None if batch.columns_T is None else batch.columns_T.to(device)
                part, _ = model.run("loss", *batch.to(device), dropout_key=dropout_key, columns_T=columns_T)
            if number == 0:
                stood = now(device)
                labels = int(counting.wait().sum())
                if host.size > 1:
                    meter.stalled("world", "count of labels", stood, now(device))
                    meter.transferred("world", "count of labels", began, now(device), 0)
            part = part / max(labels, 1)
            with meter.work("compute", f"0B{number}", device):
                part.backward()
            losses.append(part.detach().double())
    parts = torch.stack(losses)
    return parts if leaves else parts.sum(dim=0, keepdim=True), labels


def _summing(model: DataParallel, number: int, count: int, leaves: int) -> AbstractContextManager[None]:
    """How the gradients of pass `number` of `count` join those of the others and of other ranks."""
    if leaves:
        return model.round(number, leaves)
    if model.reduces_each:
        return model.reduced(number, count)
    return nullcontext() if number == count - 1 else model.no_sync()


def update(
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    *,
    clip_norm: float = 0.0,
    leaves: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips by the global norm (0 = does not) and updates.  `loss` is what `forward_backward` returned.

    The updates run when the weights are read next: unit by unit, each before its gather, under the forward pass of the
    next step.  Returns the loss of the step and the norm before clipping, 0-d on the device, the same on every rank.
    """
    if leaves:
        total, squares = _fixed_totals(model, loss, leaves)
    else:
        own = loss if model.stands_first else torch.zeros_like(loss)
        total, squares = sum_scalars(torch.cat([own, model.square_sum()]), model.axes, name="loss and norm")
    norm = squares.sqrt()
    factor = norms.factor(norm, clip_norm) if clip_norm > 0 else None
    rates = [group["lr"] for group in optimizer.param_groups]

    def postponed(leaves: Sequence[torch.nn.Parameter], copies: Sequence[torch.Tensor] | None) -> None:
        with model.group.meter.work("optimizer", "update", model.group.device):
            optimizers.update(optimizer, leaves, copies, rates, factor)

    model.postpone(postponed)
    return total, norm


def steer(model: DataParallel) -> torch.Tensor | None:
    """Moves the biases of routers, once a step, after its backward passes; `loads` of `StepResult`.  Collective.

    Every data rank, those of a split sequence among them, has counted other tokens; ranks of the tensor axis have all
    counted the same, and those of a pipeline have other layers.  Integers add up to the same in any order.
    """
    decoder = model.module
    if not isinstance(decoder, Decoder) or (loads_LY := decoder.take_loads()) is None:
        return None
    loads_LY = sum_scalars(loads_LY.flatten(), [model.group], name="loads of experts").view_as(loads_LY)
    decoder.steer(loads_LY)
    return loads_LY


def _fixed_totals(model: DataParallel, losses: torch.Tensor, leaves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the sum of squares, added in an order that the number of ranks has no part in."""
    rounds, size = losses.numel(), model.group.size
    own = torch.cat([losses, model.chunk_squares()])
    everyone = all_gather(own, model.group, name="loss and norm").wait().view(size, -1)
    in_order = everyone[:, :rounds].t().reshape(-1)[:leaves].clone()
    in_order = sum_scalars(in_order, model.axes[1:], name="loss of all stages")  # one of them has it, the others 0
    return norms.tree_sum(in_order), model.add_chunks(everyone[:, rounds:])


def train_step(
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    host: Group,
    *,
    clip_norm: float = 0.0,
    dropout_key: int = 0,
    leaves: int = 0,
) -> StepResult:
    """Forward, backward, clip and update."""
    loss, labels = forward_backward(model, micro_batches, host, dropout_key, leaves)
    with model.group.meter.work("optimizer", "norm", model.group.device):
        total, norm = update(model, optimizer, loss, clip_norm=clip_norm, leaves=leaves)
        loads = steer(model)
    return StepResult(total, norm, labels, loss.sum(), loads)
