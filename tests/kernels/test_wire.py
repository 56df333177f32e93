"""What fused products send, tell the meter and hold, for every way of them: between processes, interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NAMES = {
    "all_gather_matmul": {"chunks", "chained", "persistent", "put", "push"},
    "matmul_reduce_scatter": {"chunks", "chained", "persistent", "put", "tiles", "push"},
    "matmul_all_reduce": {"put", "one-shot", "two-shot"},
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_and_memory_of_every_way(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    """Odd shapes, one row for all ranks; memory that grows, and that several ways share."""
    names = {op: found - ({"chained"} if ranks > 2 and "scatter" in op else set()) for op, found in NAMES.items()}
    for rank in run_ranks("rank_functions_wire:every_way", ranks, timeout=200.0):
        assert len(rank) == 3 * sum(map(len, names.values()))
        for op, name, shape, crossed, told, due, has, needs in rank:
            assert name in names[op]
            assert told == due, (op, name, shape)
            assert crossed == sum(due.values()), (op, name, shape)
            assert has == needs, (op, name, shape)
