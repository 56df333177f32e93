"""Products whose sums are scattered, every way of it: between processes in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OP = "matmul_reduce_scatter"
ALL = ["plain", "chunks", "persistent", "put", "tiles", "push"]
RANKS = "rank_functions_scatter:several"


def test_two_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    """Values of odd shapes, and many calls with changing data and sizes on two groups, either rank late."""
    checks = {"values": {"op": OP, "names": [*ALL, "chained"]}, "repeated": {"op": OP, "names": ALL[1:], "rounds": 4}}
    for found in run_ranks(RANKS, 2, {"checks": checks}, timeout=300.0):
        assert found == [4 * (len(ALL) + 1), 4]


def test_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    """Values, among them rows for two of three only; and the sum in the order of ranks, to the bit."""
    checks = {name: {"op": OP, "names": ALL} for name in ("values", "exact")}
    for values, exact in run_ranks(RANKS, 3, {"checks": checks}, timeout=300.0):
        assert values == 4 * len(ALL)
        assert exact == [f"{name} {dtype}" for name in ALL for dtype in ("float32", "float16")]


def test_gradients_of_both_seams(run_ranks: Callable[..., list[Any]]) -> None:
    ways = [
        ("tiles", "two-shot", "persistent"),
        ("chained", "one-shot", "chunks"),
        ("persistent", "two-shot", "push"),
        ("put",),
    ]
    checks = {"gradients": {"ways": ways}}
    assert run_ranks(RANKS, 2, {"checks": checks}, timeout=300.0) == [[24], [24]]
