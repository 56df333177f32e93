"""The fused products in groups of four and eight ranks: between processes, interpreted, and on as many GPUs."""

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


@pytest.mark.parametrize("ranks", [4, 8])
def test_values_and_bits(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("rank_functions_wide:values", ranks, timeout=200.0) == [WAYS] * ranks


@pytest.mark.parametrize("ranks", [4, 8])
def test_gradients(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("rank_functions_wide:gradients", ranks, {"pairs": PAIRS}, timeout=200.0) == [3] * ranks


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
