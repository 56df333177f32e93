"""One optimizer step: (model, micro-batches, optimizer) -> loss and norm.  No input, no output, no clock.

The loss of a step is the sum over all valid labels of the global batch, divided once by their global number, however
the batch is cut: a mean over ranks or micro-batches of means would weigh labels by where they happen to lie
(pytorch/torchtitan#1842, huggingface/transformers#34191).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from interlace.collectives import Group, all_gather, sum_scalars
from interlace.parallel import norm as norms
from interlace.parallel.data import DataParallel
from interlace.train.data import IGNORED, Batch


@dataclass(frozen=True)
class StepResult:
    """`loss`: mean over the step's `labels` valid labels, `part` this rank's share of it; `grad_norm`: before clipping.

    0-d tensors on the device.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    labels: int
    part: torch.Tensor


def forward_backward(
    model: DataParallel, micro_batches: Sequence[Batch], host: Group, dropout_key: int = 0
) -> tuple[torch.Tensor, int]:
    """Gradients of the step's loss into the leaves of `model`, reduced once.

    Returns this rank's part of the loss, on the device, and the global number of valid labels.  Every rank passes as
    many micro-batches, in CPU memory; `host` joins all ranks that hold different samples.
    """
    own = sum(int((batch.labels_BT != IGNORED).sum()) for batch in micro_batches)
    counting = all_gather(torch.tensor([own]), host, name="count of labels")
    labels = 0
    loss = torch.zeros(1, dtype=torch.float64, device=model.group.device)
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with nullcontext() if last else model.no_sync():
            part, _ = model.run("loss", *batch.to(model.group.device), dropout_key=dropout_key)
            labels = labels or int(counting.wait().sum())
            part = part / max(labels, 1)
            part.backward()
            loss += part.detach()
    return loss, labels


def update(
    model: DataParallel, optimizer: torch.optim.Optimizer, loss: torch.Tensor, *, clip_norm: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips by the global norm (0 = does not) and updates.  `loss` [1] is this rank's part.

    Returns the loss of the step and the norm before clipping, 0-d on the device, the same on every rank.
    """
    totals = sum_scalars(torch.cat([loss, model.square_sum()]), [model.group], name="loss and norm")
    norm = totals[1].sqrt()
    if clip_norm > 0:
        norms.scale(model.leaves(), norm, clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return totals[0], norm


def train_step(
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    host: Group,
    *,
    clip_norm: float = 0.0,
    dropout_key: int = 0,
) -> StepResult:
    """Forward, backward, clip and update."""
    loss, labels = forward_backward(model, micro_batches, host, dropout_key)
    return StepResult(*update(model, optimizer, loss, clip_norm=clip_norm), labels, loss[0])
