"""Products whose sums are scattered, every way of it, between processes in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RANKS = "rank_functions_scatter"
OP = "matmul_reduce_scatter"
ALL = ["plain", "chunks", "tiles", "push"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_values(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    names = [*ALL, "chained"] if ranks == 2 else ALL
    assert run_ranks(f"{RANKS}:values", ranks, {"op": OP, "names": names}, timeout=300.0) == [8 * len(names)] * ranks


def test_the_sum_in_rank_order_to_the_bit(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(f"{RANKS}:exact", 3, {"op": OP, "names": ALL}, timeout=300.0):
        assert len(found) == 8


def test_many_calls_on_two_groups(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(f"{RANKS}:repeated", 2, {"op": OP, "names": ["chunks", "tiles", "push"], "rounds": 6}, timeout=300.0)
