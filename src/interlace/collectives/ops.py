"""Transfers that only move: all-gather, all-to-all, broadcast.  Sizes may differ between ranks.

Each equals the function of the same name in `torch.distributed`, on gloo and on NCCL.  Element types a back end does
not know travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from interlace.collectives.groups import Group
from interlace.collectives.handle import Handle, Work, start
from interlace.collectives.window import Window

# torch 2.13 renamed `all_gather_into_tensor` and warns at the old name; 2.11 has only that.  Nothing else decides.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(
    shard: torch.Tensor,
    group: Group,
    *,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    before: Callable[[], None] | None = None,
    window: Window | None = None,
    name: str = "all_gather",
) -> Handle[torch.Tensor]:
    """Every rank's `shard`, one after another in group order.

    shard: 1-D, contiguous, `sizes[rank]` elements.  `sizes` per rank when they differ (all equal when None).  `out`:
    1-D of sum(sizes), written in place; `shard` may be its own part of it.  `source`, when given, is copied (and cast)
    into `shard` as part of the transfer, on the side stream; `before` runs there first and may write `shard` itself.
    `window`: the one that begins with `out`, of which `shard` is a part; then nothing is sent, the peers fetch it.
    Sends `shard`'s bytes to every other rank.
    """
    count = shard.numel()
    sizes = [count] * group.size if sizes is None else list(sizes)
    assert sizes[group.rank] == count, (sizes, group.rank, count)
    if out is None:
        out = shard.new_empty(sum(sizes))
    parts = list(out.split(sizes))
    own = parts[group.rank]
    aliased = own.data_ptr() == shard.data_ptr() or count == 0

    def prepare() -> None:
        if window is not None:
            window.claim()
        if before is not None:
            before()
        if source is not None:
            shard.copy_(source)
        if not aliased and (uneven or group.size == 1):
            own.copy_(shard)

    uneven = len(set(sizes)) > 1
    if group.process_group is None:
        prepare()
        return Handle.done(out)
    result, process_group = out, group.process_group
    nbytes = count * shard.element_size() * (group.size - 1)
    group.meter.count("all_gather", group.axis, nbytes)

    def launch() -> Sequence[Work]:
        if window is not None:
            assert window.own.data_ptr() == result.data_ptr() and aliased and not uneven
            size = count * shard.element_size()
            return window.exchange([(_bytes(parts[peer]), peer, peer * size) for peer in range(group.size)])
        if uneven:
            return _send_to_all(group, shard, parts)
        given = shard
        if aliased and group.stream is None:  # gloo reads and writes the buffers at the same time
            given = shard.clone()
        return _under_way(
            _all_gather_single(_bytes(result), _bytes(given), group=process_group, async_op=_is_async(group))
        )

    return start(
        group.meter, group.axis, name, nbytes, group.stream, prepare, launch, lambda: result, what=("all_gather", shard)
    )


def all_to_all(
    flat: torch.Tensor,
    group: Group,
    *,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    name: str = "all_to_all",
) -> Handle[torch.Tensor]:
    """Part i of `flat` goes to rank i; the result holds, in group order, what every rank sent here.

    flat: 1-D, contiguous, sum(send_sizes) elements.  Sends all parts but the own one.
    """
    assert flat.numel() == sum(send_sizes) and send_sizes[group.rank] == receive_sizes[group.rank]
    if group.process_group is None:
        return Handle.done(flat.clone())
    received = flat.new_empty(sum(receive_sizes))
    nbytes = (flat.numel() - send_sizes[group.rank]) * flat.element_size()
    group.meter.count("all_to_all", group.axis, nbytes)

    def launch() -> Sequence[Work]:
        return exchange_parts(group, flat, received, send_sizes, receive_sizes)

    return start(
        group.meter, group.axis, name, nbytes, group.stream, None, launch, lambda: received, what=("all_to_all", flat)
    )


def broadcast(tensor: torch.Tensor, group: Group, *, root: int = 0, name: str = "broadcast") -> Handle[torch.Tensor]:
    """`tensor` of group rank `root`, in place on every rank.  Any shape; contiguous."""
    if group.process_group is None or tensor.numel() == 0:
        return Handle.done(tensor)
    process_group, source = group.process_group, group.ranks[root]
    flat = tensor.view(-1)
    nbytes = flat.numel() * flat.element_size() * (group.size - 1) if group.rank == root else 0
    group.meter.count("broadcast", group.axis, nbytes)

    def launch() -> Sequence[Work]:
        return _under_way(dist.broadcast(_bytes(flat), source, group=process_group, async_op=_is_async(group)))

    return start(
        group.meter, group.axis, name, nbytes, group.stream, None, launch, lambda: tensor, what=("broadcast", tensor)
    )


def gather_bytes(data: bytes, group: Group, *, name: str = "gather_bytes") -> list[bytes]:
    """Every rank's bytes, any number each, in group order; waits at once."""
    if group.process_group is None:
        return [data]
    own = torch.tensor(list(data), dtype=torch.uint8, device=group.device)
    sizes = all_gather(torch.tensor([len(data)], device=group.device), group, name=name).wait().tolist()
    parts = all_gather(own, group, sizes=sizes, name=name).wait().cpu().split(sizes)
    return [bytes(part.tolist()) for part in parts]


def exchange_parts(
    group: Group,
    flat: torch.Tensor,
    received: torch.Tensor,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    window: Window | None = None,
    takes_own: bool = True,
) -> Sequence[Work]:
    """The works of an all-to-all, in elements; all parts are equal, on every rank, when no sizes are given.

    window: the one that begins with `flat`, for equal parts; with takes_own=False the own part is not copied.

    A rank must not conclude from its own sizes that all are equal: gloo runs another exchange then, and another rank,
    whose sizes differ, would not take part in it.
    """
    if window is not None:
        assert window.own.data_ptr() == flat.data_ptr() and send_sizes is None
        own, size = group.rank, received.numel() // group.size * received.element_size()
        parts = _bytes(received).view(group.size, size)
        if takes_own:
            parts[own].copy_(window.own[own * size : (own + 1) * size])
        return window.exchange([(parts[peer], peer, own * size) for peer in range(group.size) if peer != own])
    into, out = ([n * flat.element_size() for n in sizes or ()] or None for sizes in (receive_sizes, send_sizes))
    given, is_async = _bytes(flat), _is_async(group)
    return _under_way(
        dist.all_to_all_single(_bytes(received), given, into, out, group=group.process_group, async_op=is_async)
    )


def _send_to_all(group: Group, shard: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[dist.Work]:
    """The works of an uneven all-gather, point to point; empty messages are not sent."""
    operations = []
    for peer, rank in enumerate(group.ranks):
        if peer != group.rank and shard.numel():
            operations.append(dist.P2POp(dist.isend, _bytes(shard), rank, group.process_group))
        if peer != group.rank and parts[peer].numel():
            operations.append(dist.P2POp(dist.irecv, _bytes(parts[peer]), rank, group.process_group))
    return list(dist.batch_isend_irecv(operations)) if operations else []


def _is_async(group: Group) -> bool:
    """Whether the library is to run it on a stream, or in threads, of its own.

    Transfers have a side stream already: there NCCL enqueues a kernel like any other, without a stream of its own and
    the events between the two, a fifth of what a small transfer costs the host.
    """
    return group.stream is None


def _under_way(work: Work | None) -> Sequence[Work]:
    return [work] if work is not None else []


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous 1-D tensor as plain bytes: a move needs no element type.

    A slice of one element may keep any stride, and be contiguous; as bytes it must not.
    """
    return tensor.as_strided(tensor.shape, (1,)).view(torch.uint8)
