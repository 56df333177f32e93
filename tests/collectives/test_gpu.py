"""The side-stream half of `Handle` and the collectives through NCCL, as far as one GPU goes (a group of one)."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from interlace.collectives import Group, Meter, all_gather, all_reduce, reduce_scatter
from interlace.collectives.handle import between, now
from interlace.collectives.ordered import then

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    device = torch.device("cuda", 0)
    yield Group("dp", (0,), 0, device, Meter(), dist.group.WORLD, torch.cuda.Stream(device))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transfers_see_what_the_compute_stream_held_and_are_seen_after_wait(group: Group, dtype: torch.dtype) -> None:
    x = torch.randn(1 << 20, device=group.device, dtype=dtype)
    for _ in range(20):  # keeps the compute stream busy, so that a missing wait would read old values
        x = torch.sin(x) + 1
    gathered = all_gather(x, group)
    reduced = reduce_scatter(x.float(), group, wire=dtype, scale=0.5)
    total = all_reduce(x.float(), group)
    assert torch.equal(gathered.wait(), x)
    assert torch.equal(reduced.wait(), x.float() * 0.5)
    assert torch.equal(total.wait(), x.float())


def test_source_is_cast_on_the_way(group: Group) -> None:
    main = torch.randn(4096, device=group.device)
    whole = torch.full((4096,), float("nan"), device=group.device, dtype=torch.bfloat16)
    all_gather(whole, group, out=whole, source=main).wait()
    assert torch.equal(whole, main.bfloat16())


def test_a_sum_that_is_two_transfers_is_seen_after_wait(group: Group) -> None:
    """The second half follows on the side stream, where the compute stream must wait for it too."""
    x = torch.randn(1 << 26, device=group.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(group.stream):
        torch.cuda._sleep(20_000_000)
    total = then(
        reduce_scatter(x, group, out=torch.empty_like(x)),
        group,
        lambda: all_gather(torch.empty_like(x), group, source=x, out=torch.full_like(x, torch.nan)),
    )
    assert torch.equal(total.wait().clone(), x)


def test_what_only_the_preparation_reads_lives_until_wait(group: Group) -> None:
    """An update that runs before a gather reads a factor that its caller has let go by then."""
    whole = torch.ones(1 << 20, device=group.device)
    with torch.cuda.stream(group.stream):
        torch.cuda._sleep(50_000_000)
    update = functools.partial(whole.mul_, torch.full((1,), 2.0, device=group.device))
    gathered = all_gather(whole, group, out=whole, before=update)
    del update
    others = [torch.full((1,), 1e9, device=group.device) for _ in range(64)]
    assert len(others) == 64
    assert torch.equal(gathered.wait(), torch.full_like(whole, 2.0))


def test_waits_are_timed_on_the_device(group: Group) -> None:
    group.meter.cut()
    begin = now(group.device)
    x = torch.randn(1 << 28, device=group.device)  # long enough on its way for the host to come to its wait
    all_gather(x, group, name="slow").wait()
    end = now(group.device)
    torch.cuda.synchronize()
    record = group.meter.cut()
    assert 0 <= record.waited()["dp"] <= between(begin, end)
    *waits, move = record.events(0, begin, 5.0)
    assert {event.kind for event in waits} <= {"wait", "compute"}  # before and after the bytes moved: own work
    assert (move.kind, move.name) == ("comm", "slow")
    assert 5.0 <= move.begin <= move.end <= waits[-1].end
