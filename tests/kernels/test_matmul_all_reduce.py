"""Products whose sums are wanted everywhere, every way of it: between processes in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OP = "matmul_all_reduce"
ALL = ["plain", "put", "one-shot", "two-shot"]
RANKS = "rank_functions_scatter:several"


def test_two_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    """Values of odd shapes, and many calls with changing data and sizes on two groups, either rank late."""
    checks = {"values": {"op": OP, "names": ALL}, "repeated": {"op": OP, "names": ALL[1:], "rounds": 4}}
    for found in run_ranks(RANKS, 2, {"checks": checks}, timeout=300.0):
        assert found == [4 * len(ALL), 4]


def test_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    """Values, among them rows for two of three only; and the sum in the order of ranks, to the bit."""
    checks = {name: {"op": OP, "names": ALL} for name in ("values", "exact")}
    for values, exact in run_ranks(RANKS, 3, {"checks": checks}, timeout=300.0):
        assert values == 4 * len(ALL)
        assert exact == [f"{name} {dtype}" for name in ALL for dtype in ("float32", "float16")]
