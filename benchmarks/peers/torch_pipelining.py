"""`torch.distributed.pipelining` over the same stages: its schedules by our names, at their own settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

NAMES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class Part(nn.Module):
    """A stage as a module: `compute(micro_batch, x)` of our own stages; micro-batches come in order."""

    def __init__(self, decoder: nn.Module, compute: Callable[[int, Tensor | None], Any], is_first: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.compute = compute
        self.is_first = is_first
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        output, loss = self.compute(self.number, None if self.is_first else x)
        self.number += 1
        return loss if output is None else output


def build(
    name: str,
    parts: Mapping[int, Part],
    stages: int,
    micro_batches: int,
    example: tuple[Tensor, Tensor],
    device: torch.device,
) -> Callable[[Tensor], Sequence[Tensor]]:
    """A function of all tokens [m B T] that runs a step and returns the losses of the micro-batches, where they are.

    example: tokens of a micro-batch, and what passes between stages.
    """
    tokens, hidden = example
    made = [
        PipelineStage(
            part, stage, stages, device,
            input_args=(tokens if stage == 0 else hidden,),
            output_args=(hidden if stage < stages - 1 else torch.zeros((), device=device),),
        )
        for stage, part in parts.items()
    ]  # fmt: skip
    kind = getattr(schedules, NAMES[name])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(made[0] if single else made, micro_batches, loss_fn=lambda loss, target: loss, scale_grads=False)

    def step(tokens: Tensor) -> Sequence[Tensor]:
        for part in parts.values():
            part.number = 0
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": tokens, "losses": losses} if stages - 1 in parts else {}
        schedule.step(*((tokens,) if 0 in parts else ()), return_outputs=False, **options)
        return losses

    return step
