"""The fused products whose sums travel, in many orders: no race, no deadlock, the right sum."""

from __future__ import annotations

import pytest
from scatter_launches import COPIED, HALVES, WAYS, launch

from interlace.check import explore
from interlace.kernels import ordered_tiles

SPACE = 1 << 18


@pytest.mark.parametrize(("op", "name"), WAYS)
def test_one_kernel(op: str, name: str) -> None:
    """Two programs a rank; replays of what a graph would hold."""
    verdict = explore(launch(op, name), ranks=2, schedules=5, replays=1, nbytes=SPACE)
    assert verdict.ok, verdict


@pytest.mark.parametrize(("op", "name"), WAYS)
def test_sizes_that_change(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller and larger calls in turn over the same memory, of three ranks, some without rows, tiles in halves."""
    monkeypatch.setattr(ordered_tiles, "LARGE", HALVES.block_m * HALVES.block_n)
    sizes = ((33, 40), (2, 16), (5, 40), (1, 8))
    verdict = explore(launch(op, name, sizes, tile=HALVES), ranks=3, schedules=4, nbytes=SPACE)
    assert verdict.ok, verdict


@pytest.mark.parametrize(("op", "name"), COPIED)
@pytest.mark.parametrize("in_memory", [False, True])
def test_copy_engines(op: str, name: str, in_memory: bool) -> None:
    sizes = ((21, 24), (3, 8), (1, 40), (21, 24))
    verdict = explore(launch(op, name, sizes, in_memory=in_memory), ranks=2, schedules=5, nbytes=SPACE)
    assert verdict.ok, verdict


@pytest.mark.parametrize(("op", "name"), WAYS)
def test_one_program_at_a_time(op: str, name: str) -> None:
    """No program waits for one that has found no room."""
    verdict = explore(launch(op, name, ((70, 16),)), ranks=2, schedules=4, resident=1, nbytes=SPACE)
    assert verdict.ok, verdict


@pytest.mark.parametrize(("op", "name"), WAYS)
def test_every_wait_ends_when_a_rank_stops(op: str, name: str) -> None:
    verdict = explore(launch(op, name), ranks=3, schedules=3, stop=True, nbytes=SPACE)
    assert verdict.ok, verdict
