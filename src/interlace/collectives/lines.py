"""Sends from one rank to another, each direction of a pair a line of its own.

Equals `torch.distributed.isend` and `irecv`.  What a line carries arrives in the order in which it is sent, so the
other side posts its receives in that order, early, into buffers whose shapes it knows; nothing is agreed on before.  A
direction has its own process group, because on NCCL the transfers of one run one after another, and a send that waits
for its peer would hold up what comes the other way (on gloo it costs two sockets).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from interlace.collectives.groups import Group
from interlace.collectives.handle import Handle, Meter, start
from interlace.mesh import Mesh

Lines = Mapping[tuple[int, int], Group]  # (from, to), places along the axis -> a group of these two


def make_lines(
    mesh: Mesh,
    rank: int,
    axis: str,
    pairs: Iterable[tuple[int, int]],
    device: torch.device,
    timeout: float,
    meter: Meter,
) -> Lines:
    """The lines of this rank.  Collective over the whole world: every rank calls it with the same `pairs`.

    pairs: (from, to), places along `axis`.  `timeout` in seconds bounds every wait.
    """
    own, limit = mesh.peers(rank, axis), datetime.timedelta(seconds=timeout)
    lines = {}
    for members in mesh.groups(axis):
        for source, target in sorted(set(pairs)):
            ranks = (members[source], members[target])
            made = dist.new_group(sorted(ranks), timeout=limit)
            if members == own and rank in ranks:
                stream = torch.cuda.Stream(device) if device.type == "cuda" else None
                lines[source, target] = Group(axis, ranks, ranks.index(rank), device, meter, made, stream)
    return lines


class Sending:
    """A send under way.  It holds its tensor; let it go when it `is_done`, which gloo never says, or after `wait`."""

    def __init__(self, tensor: torch.Tensor, handle: Handle[None], work: dist.Work) -> None:
        self._tensor, self._handle, self._work = tensor, handle, work

    @property
    def is_done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._handle.wait()


def send(tensor: torch.Tensor, line: Group, *, name: str) -> Sending:
    """Starts sending a contiguous tensor down the line."""
    assert line.rank == 0 and line.process_group is not None and tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    line.meter.count("send", line.axis, nbytes)
    works: list[dist.Work] = []

    def launch() -> list[dist.Work]:
        work = dist.isend(tensor.view(-1).view(torch.uint8), line.ranks[1], group=line.process_group)
        assert work is not None
        works.append(work)
        return works

    peer = f" to rank {line.ranks[1]}"
    handle = start(line.meter, line.axis, name, nbytes, line.stream, None, launch, lambda: None, peer)
    return Sending(tensor, handle, works[0])


def receive(shape: Sequence[int], dtype: torch.dtype, line: Group, *, name: str) -> Handle[torch.Tensor]:
    """Starts receiving the next tensor of the line, which has this shape and dtype."""
    assert line.rank == 1 and line.process_group is not None
    tensor = torch.empty(tuple(shape), dtype=dtype, device=line.device)

    def launch() -> list[dist.Work]:
        work = dist.irecv(tensor.view(-1).view(torch.uint8), line.ranks[0], group=line.process_group)
        assert work is not None
        return [work]

    peer = f" from rank {line.ranks[0]}"
    return start(line.meter, line.axis, name, 0, line.stream, None, launch, lambda: tensor, peer)
