"""The fused products in groups of four and eight ranks, and in parts of the world that do not begin with rank 0:
between processes, interpreted, and on as many GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

WAYS = [  # "chained" of scattered sums is of two ranks
    *(f"all_gather_matmul {name}" for name in ("chained", "chunks", "persistent", "plain", "push", "put")),
    *(f"matmul_all_reduce {name}" for name in ("one-shot", "plain", "put", "two-shot")),
    *(f"matmul_reduce_scatter {name}" for name in ("chunks", "persistent", "plain", "push", "put", "tiles")),
]
PAIRS = [["chunks", "chunks"], ["persistent", "tiles"], ["put", "put"]]


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_values_and_bits(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("rank_functions_wide:values", ranks, timeout=200.0) == [WAYS] * ranks


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_gradients(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("rank_functions_wide:gradients", ranks, {"pairs": PAIRS}, timeout=200.0) == [3] * ranks


@pytest.mark.parametrize("members", [[], [1, 3]], ids=["0 2 and 1 3", "1 3 alone"])
def test_values_in_groups_that_are_not_the_world(members: list[int], run_ranks: Callable[..., list[Any]]) -> None:
    """No way waits for ranks that are not of its group (ByteDance-Seed/Triton-distributed#79: a world of 8)."""
    arguments = {"mesh": "tp=2 dp=2", "members": members}
    found = run_ranks("rank_functions_wide:values", 4, arguments, timeout=60.0)
    ways = sorted([*WAYS, "matmul_reduce_scatter chained"])
    assert found == [ways if rank in members or not members else [] for rank in range(4)]


def test_gradients_in_groups_that_are_not_the_world(run_ranks: Callable[..., list[Any]]) -> None:
    arguments = {"pairs": PAIRS, "mesh": "tp=2 dp=2"}
    assert run_ranks("rank_functions_wide:gradients", 4, arguments, timeout=60.0) == [3] * 4


def on_gpus(function: str, ranks: int, argument: dict[str, Any]) -> list[Any]:
    import torch

    from interlace import launch

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices here")
    return launch.run_local(f"wide_calls:{function}", ranks, argument, device="cuda", timeout=300.0)


@pytest.mark.gpu4
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_values_and_bits_on_gpus(ranks: int) -> None:
    assert on_gpus("values", ranks, {"tile": None, "scale": 16}) == [WAYS] * ranks


@pytest.mark.gpu4
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_gradients_on_gpus(ranks: int) -> None:
    assert on_gpus("gradients", ranks, {"pairs": PAIRS, "scale": 16}) == [3] * ranks
