"""Transfers between gloo processes against results made without any; groups of one, and sums, without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interlace import launch
from interlace.collectives import Group, Meter, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from interlace.collectives.handle import Record, start
from interlace.collectives.ordered import add_in_order, ordered_sum

Run = Callable[..., list[Any]]
RANKS = "rank_functions_collectives"


def test_a_group_of_one_is_the_identity_and_sends_nothing() -> None:
    group = Group("dp", (0,), 0, torch.device("cpu"), Meter())
    x = torch.randn(6)
    assert torch.equal(all_gather(x, group).wait(), x)
    assert torch.equal(all_gather(x.bfloat16(), group, source=2 * x).wait(), (2 * x).bfloat16())
    assert torch.equal(all_to_all(x, group, send_sizes=[6], receive_sizes=[6]).wait(), x)
    assert torch.equal(reduce_scatter(x, group, scale=0.5).wait(), 0.5 * x)
    assert torch.equal(all_reduce(x.clone(), group, scale=0.5, wire=torch.bfloat16).wait(), 0.5 * x)
    assert broadcast(x, group).wait() is x
    assert not group.meter.sent


def test_an_ordered_sum_adds_left_to_right_in_the_dtype_of_its_target() -> None:
    parts = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])[:, None]
    assert ordered_sum(parts, torch.empty(1)).item() == 0.0
    assert ordered_sum(parts.flip(0), torch.empty(1)).item() == 2.0
    assert ordered_sum(parts, torch.empty(1, dtype=torch.float64)).item() == 2.0
    narrow = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)[:, None]
    assert ordered_sum(narrow, torch.empty(1), 2.0).item() == 518.0
    assert ordered_sum(narrow, torch.empty(1, dtype=torch.bfloat16)).item() == 256.0
    assert ordered_sum(narrow[:2], torch.empty(1), 2.0).item() == 514.0
    assert ordered_sum(parts[:1], torch.empty(1), 0.5).item() == 2.0**23


def test_parts_go_on_from_where_the_sum_stands() -> None:
    parts = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])[:, None]
    total = torch.full((1,), torch.nan)
    for first, some in ((True, parts[:1]), (False, parts[1:3]), (False, parts[3:])):
        assert add_in_order(some, total, first) is total
    assert total.item() == 0.0
    assert add_in_order(parts[1:3], add_in_order(parts[:1], total, True), False).item() == 2.0**24
    assert add_in_order(parts[:1], add_in_order(parts[1:3], total, True), False).item() == 2.0**24 + 2


def test_a_sum_in_rounds_has_the_same_bits_for_every_number_of_ranks(run_ranks: Run) -> None:
    assert min(run_ranks(f"{RANKS}:rounds", 4)) >= 24


def test_moves_equal_what_they_moved(run_ranks: Run) -> None:
    assert min(run_ranks(f"{RANKS}:moves", 4)) > 100


def test_sums_have_the_bits_of_a_sequential_sum_however_the_message_is_cut(run_ranks: Run) -> None:
    assert min(run_ranks(f"{RANKS}:sums", 4)) > 100


def test_transfers_in_flight_may_be_awaited_in_any_order(run_ranks: Run) -> None:
    run_ranks(f"{RANKS}:several_in_flight", 4)


@pytest.mark.parametrize("mesh", ["dp=4", "tp=2 dp=2"])
def test_bytes_sent_are_those_of_the_layouts(run_ranks: Run, mesh: str) -> None:
    steps = [
        ["N/dp M", "N M"],
        ["N M +dp", "N/dp M"],
        ["N M +dp", "N M"],
        ["N/dp M", "N M/dp"],
        ["(N M)/dp:8", "(N M)"],
        ["(N M)/dp:8@1/12", "(N M)"],
        ["(N M) +dp", "(N M)/dp:8@3/16"],
    ]
    shape = [7, 12]
    for rank, found in enumerate(run_ranks(f"{RANKS}:sent", 4, {"mesh": mesh, "steps": steps, "shape": shape})):
        for (before, after), pair in zip([step for step in steps for _ in range(2)], found, strict=True):
            assert pair[0] == pair[1], (rank, before, after, pair)
        assert any(pair[0] for pair in found)


def test_a_late_peer_is_waited_for_and_the_wait_is_recorded(run_ranks: Run) -> None:
    first, late, last = run_ranks(f"{RANKS}:late_peer", 3)
    for rank in (first, last):
        assert 0.2 < rank["waited"]["dp"] < 5.0
    assert late["waited"]["dp"] < 0.2
    for rank in (first, late, last):
        (wait, transfer) = rank["events"]
        assert wait[:3] == ["compute", "wait", "gather blocks.7"]
        assert transfer[:3] == ["comm.dp", "comm", "gather blocks.7"]
        assert transfer[5] == 4 * 4 * 2
        assert 0.0 <= transfer[3] <= wait[3] <= wait[4] <= transfer[4] + 1e-6
        assert wait[4] - wait[3] == pytest.approx(rank["waited"]["dp"])
        assert rank["last"] == "gather blocks.7"


def test_a_wait_counts_while_bytes_are_on_their_way() -> None:
    """Seconds from 0: waits 1-5 and 8-9; transfers 0-2, 3-4 (of the folded axis) and 6-7: of five seconds, two."""
    transfers = (("dp", "a", 0.0, 2.0, 1), ("shard", "b", 3.0, 4.0, 1), ("dp", "c", 6.0, 7.0, 1))
    stalls = (("dp", "a", 1.0, 5.0), ("dp", "c", 8.0, 9.0), ("tp", "d", 3.0, 4.0))
    record = Record(stalls, transfers)
    assert record.waited() == {"dp": 2.0}
    pieces = [(e.kind, e.name, e.begin, e.end) for e in record.events(0, 0.0, 10.0) if e.lane == "compute"]
    own = "beside transfers"
    assert pieces == [
        ("wait", "a", 11.0, 12.0), ("compute", own, 12.0, 13.0), ("wait", "a", 13.0, 14.0),
        ("compute", own, 14.0, 15.0), ("compute", own, 18.0, 19.0), ("compute", own, 13.0, 14.0),
    ]  # fmt: skip
    assert Record((), ()).waited() == {}


def test_a_transfer_that_fails_is_named() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("timed out")

    handle = start(Meter(), "dp", "collect head", 0, None, None, lambda: [Broken()], lambda: None)
    with pytest.raises(RuntimeError, match="timed out") as caught:
        handle.wait()
    assert caught.value.__notes__[0].startswith('"collect head" along dp needs all its ranks')


@pytest.mark.gpu2
def test_two_gpus_add_up_as_in_rank_order() -> None:
    assert launch.run_local(f"{RANKS}:pairs", 2, {}, device="cuda", timeout=110.0) == [16, 16]
