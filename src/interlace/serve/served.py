"""A model, or one rank's part of it over `tp` and `pp`: a pass through all ranks, and one choice of tokens for all.

Equals the whole decoder on one process, up to the order of sums.  The axes are the trainer's (`parallel.tensor`,
`models.stage`); the residual stream is whole on every rank of `tp`, since a step has few rows, and each stage of `pp`
waits for the one before.  A rank reads its own part of the checkpoint's main weights, whatever plan saved them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from interlace import random, spec
from interlace.checkpoint import PLAIN, Reader
from interlace.collectives import Groups, Lines, Meter, all_gather, broadcast, make_groups, make_lines, receive, send
from interlace.config import ModelConfig, ParallelPlan
from interlace.errors import InterlaceError
from interlace.mesh import Mesh
from interlace.models.decoder import Decoder
from interlace.models.layers import Context
from interlace.models.stage import keep, view
from interlace.parallel.part import Part
from interlace.parallel.tensor import Axis, split_decoder
from interlace.plan.serving import stages
from interlace.world import World


class Served:
    """`decoder`: the units that run here.  groups, lines: None where it is the whole model.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, decoder: Decoder, groups: Groups | None = None, lines: Lines | None = None) -> None:
        self.decoder, self.groups, self.lines = decoder, groups, lines or {}
        self.device = next(decoder.parameters()).device
        self.stage, self.stages = (0, 1) if groups is None else (groups["pp"].rank, groups["pp"].size)

    def logits(self, tokens_1N: Tensor, context: Context, last_B: Tensor) -> Tensor | None:
        """Logits [B V] behind the positions `last_B`, on the ranks of the last stage; None on the others."""
        here, x = self.stage, tokens_1N
        if here > 0:
            shape = (*tokens_1N.shape, self.decoder.cfg.hidden_size)
            dtype = next(self.decoder.parameters()).dtype
            x = receive(shape, dtype, self.lines[here - 1, here], name=f"hidden states of stage {here - 1}").wait()
        x = self.decoder.hidden(x, context)
        if here < self.stages - 1:
            send(x.contiguous(), self.lines[here, here + 1], name=f"hidden states of stage {here}").wait()
            return None
        made_1BV: Tensor = self.decoder.head(x[:, last_B], None, context)  # the last positions alone meet the head
        return made_1BV[0]

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses tokens for all: the first of those that have the logits."""
        return self.groups is None or self.groups.rank == self._chooser(self.groups)

    def told(self, chosen: Tensor) -> Tensor:
        """What the rank that chooses holds, on every rank; on the CPU."""
        if self.groups is None:
            return chosen
        return broadcast(chosen, self.groups.host, root=self._chooser(self.groups), name="chosen tokens").wait()

    def agree(self, what: str, value: str, error: type[InterlaceError]) -> None:
        """Refuses ranks that were not given the same `what`.  Collective."""
        if self.groups is not None:
            _alike(self.groups, what, value, error)

    def _chooser(self, groups: Groups) -> int:
        return groups.mesh.rank(pp=self.stages - 1)


def split(world: World, reader: Reader, cfg: ModelConfig, plan: ParallelPlan, length: int, timeout: float) -> Served:
    """This rank's part of a checkpoint's model.  Collective.  length: positions by which layers are dealt out."""
    meter = Meter(world.waiting, record=False)
    groups = make_groups(Mesh.of(plan), world.rank, world.device, timeout, meter)
    pp, tp = groups["pp"], groups["tp"]
    downwards = [(stage, stage + 1) for stage in range(pp.size - 1)]
    lines = make_lines(groups.mesh, world.rank, "pp", downwards, world.device, timeout, meter)
    own = stages(cfg, plan, length)[pp.rank]
    decoder = Decoder(cfg, "meta", torch.float32)
    keep(decoder, own)
    here = {name for name, _ in decoder.named_parameters()}
    parts: dict[str, Part] = {}
    if tp.size > 1:
        parameters = [parameter for parameter in spec.parameters(cfg) if parameter.name in here]
        axis = Axis(tp, sequence=False, overlap="off")
        parts = split_decoder(decoder, parameters, axis, lambda count: tp)  # holders owe gradients: none here
    fill(decoder, reader, world.device, parts)
    return Served(view(decoder, own), groups, lines)


@torch.no_grad()
def fill(decoder: Decoder, reader: Reader, device: torch.device, parts: Mapping[str, Part] | None = None) -> None:
    """Puts a checkpoint's fp32 main weights and its buffers into a decoder on the meta device; ready to evaluate.

    parts: of parameters that the tensor axis has split; of these, the slices that are here are read.
    """
    made: dict[int, nn.Parameter] = {}
    for name, parameter in decoder.named_parameters():
        part = (parts or {}).get(name)
        start, slices = (0, PLAIN) if part is None else (part.begin, part.slices)
        values = reader.read(f"main/{name}", start, start + parameter.numel(), slices)
        values = values.view(parameter.shape).to(device, torch.float32)
        made[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for module in decoder.modules():
        for name, old in module._parameters.items():
            if old is not None:
                module._parameters[name] = made[id(old)]
    for name, buffer in list(decoder.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        values = reader.read(f"buffer/{name}").view(buffer.shape).to(device)
        decoder.get_submodule(owner)._buffers[attribute] = values
    decoder.eval()


def _alike(groups: Groups, what: str, value: str, error: type[InterlaceError]) -> None:
    own = torch.tensor([random.key(0, value) >> 1], dtype=torch.int64)
    everyone = all_gather(own, groups.host, name=f"digest of {what}").wait().tolist()
    if odd := [rank for rank, digest in enumerate(everyone) if digest != everyone[0]]:
        raise error(f"rank {odd[0]} was given other {what} than rank 0; give every rank the same.", ranks=odd)
