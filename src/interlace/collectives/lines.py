"""Sends from one rank to another, each direction of a pair a line of its own.

Equals `torch.distributed.isend` and `irecv`.  What a line carries arrives in the order in which it is sent, so the
other side posts its receives in that order, early, into buffers whose shapes it knows; nothing is agreed on before.  A
direction has its own process group, because on NCCL the transfers of one run one after another, and a send that waits
for its peer would hold up what comes the other way (on gloo it costs two sockets).

Where ranks address each other's memory a line may be a box (`collectives.boxes`), which holds no multiprocessor.

`through_host` sends by way of the host's memory, with gloo.  NCCL's kernels spin on the device until the other side
comes, and CUDA loads a kernel at its first launch, which waits for those that run: ranks with different work to do
would each wait for the other's (on two H200s every pipeline did, in its first step).  So what may launch a kernel for
the first time keeps none spinning.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from interlace.collectives.boxes import Box
from interlace.collectives.groups import Group
from interlace.collectives.handle import Handle, Meter, Sending, start
from interlace.mesh import Mesh

Lines = Mapping[tuple[int, int], Group]  # (from, to), places along the axis -> a group of these two
Line = Group | Box


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


def send(tensor: torch.Tensor, line: Line, *, name: str, through_host: bool = False) -> Sending:
    """Starts sending a contiguous tensor down the line."""
    if isinstance(line, Box):
        if not through_host:
            return line.send(tensor, name=name)
        line = line.beneath
    assert line.rank == 0 and line.process_group is not None and tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    line.meter.count("send", line.axis, nbytes)
    if through_host:
        tensor, line = tensor.cpu(), _on_host(line)
    works: list[dist.Work] = []

    def launch() -> list[dist.Work]:
        work = dist.isend(tensor.view(-1).view(torch.uint8), line.ranks[1], group=line.process_group)
        assert work is not None
        works.append(work)
        return works

    peer = f" to rank {line.ranks[1]}"
    handle = start(
        line.meter,
        line.axis,
        name,
        nbytes,
        line.stream,
        None,
        launch,
        lambda: None,
        peer,
        is_early=True,
        what=("send", tensor),
    )
    return Sending([tensor], handle, works[0].is_completed)


def receive(
    shape: Sequence[int], dtype: torch.dtype, line: Line, *, name: str, through_host: bool = False
) -> Handle[torch.Tensor]:
    """Starts receiving the next tensor of the line, which has this shape and dtype, and is sent in the same way."""
    if isinstance(line, Box):
        if not through_host:
            return line.receive(shape, dtype, name)
        line = line.beneath
    assert line.rank == 1 and line.process_group is not None
    if through_host:
        coming, device = receive(shape, dtype, _on_host(line), name=name), line.device
        return Handle(lambda: coming.wait().to(device))
    tensor = torch.empty(tuple(shape), dtype=dtype, device=line.device)

    def launch() -> list[dist.Work]:
        work = dist.irecv(tensor.view(-1).view(torch.uint8), line.ranks[0], group=line.process_group)
        assert work is not None
        return [work]

    peer = f" from rank {line.ranks[0]}"
    return start(
        line.meter,
        line.axis,
        name,
        0,
        line.stream,
        None,
        launch,
        lambda: tensor,
        peer,
        is_early=True,
        what=("receive", tensor),
    )


def has_host(line: Line) -> bool:
    """Whether the line's process group carries tensors of the host too."""
    line = line.beneath if isinstance(line, Box) else line
    return "cpu:" in dist.get_backend_config(line.process_group)


def _on_host(line: Group) -> Group:
    """The same line, for tensors of the host; nothing is timed, since its clock is not the device's."""
    return line.like(device=torch.device("cpu"), stream=None, meter=Meter(line.meter.waiting, record=False))
