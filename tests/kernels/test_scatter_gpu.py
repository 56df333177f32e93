"""Fused products whose sums travel, compiled: ranks that share one GPU, and a GPU a rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest

RANKS = "rank_functions_scatter_gpu"
SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
SCATTERED, REDUCED = ["chunks", "chained", "persistent", "put", "tiles", "push"], ["put", "one-shot", "two-shot"]
NAMES = [*SCATTERED, *REDUCED]
BOTH = [*((SCATTER, name) for name in SCATTERED), *((REDUCE, name) for name in REDUCED)]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("op", "name"), BOTH)
@pytest.mark.parametrize(("ranks", "calls"), [(2, 9), (3, 4)])
def test_values_on_one_gpu(ranks: int, calls: int, op: str, name: str) -> None:
    from interlace.symmetric.cuda import on_one_gpu
    from rank_functions_scatter_gpu import on_a_share

    if name != "chained" or ranks == 2:
        run = functools.partial(on_a_share, op=op, name=name)
        assert on_one_gpu(run, ranks, nbytes=1 << 28, timeout=60.0) == [calls] * ranks


def run(function: str, argument: dict[str, Any] | None = None) -> list[Any]:
    from interlace import launch

    return launch.run_local(f"{RANKS}:{function}", 2, argument or {}, device="cuda", timeout=500.0)


@pytest.mark.gpu2
@pytest.mark.timeout(600)
def test_values_on_two_gpus() -> None:
    assert run("values") == [5 * len(NAMES)] * 2


@pytest.mark.gpu2
@pytest.mark.timeout(600)
def test_odd_shapes_bits_and_gradients() -> None:
    ways = [
        ("tiles", "two-shot", "persistent"),
        ("chained", "one-shot", "chunks"),
        ("persistent", "two-shot", "push"),
        ("put",),
    ]
    checks = {
        "values": {"op": SCATTER, "names": ["plain", *SCATTERED]},
        "exact": {"op": SCATTER, "names": ["put", "tiles", "push"]},
        "gradients": {"ways": ways},
    }
    dtypes = ("float32", "float16")
    for found in run("several", {"checks": checks}):
        assert found == [28, [f"{name} {dtype}" for name in ("put", "tiles", "push") for dtype in dtypes], 24]
    checks = {"values": {"op": REDUCE, "names": ["plain", *REDUCED]}, "exact": {"op": REDUCE, "names": REDUCED}}
    for found in run("several", {"checks": checks}):
        assert found == [16, [f"{name} {dtype}" for name in REDUCED for dtype in dtypes]]


@pytest.mark.gpu2
@pytest.mark.timeout(600)
def test_a_thousand_calls() -> None:
    assert run("stress", {"rounds": 1000}) == [NAMES] * 2


@pytest.mark.gpu2
@pytest.mark.timeout(600)
def test_captured_and_replayed() -> None:
    assert run("graphs", {"replays": 12}) == [NAMES] * 2
