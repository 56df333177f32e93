"""Fused products whose sums travel, compiled: ranks that share one GPU, and a GPU a rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest

RANKS = "rank_functions_scatter_gpu"
NAMES = ["chunks", "chained", "persistent", "tiles", "push", "one-shot", "two-shot"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "calls"), [(2, 9), (3, 4)])
def test_values_on_one_gpu(ranks: int, calls: int, name: str) -> None:
    from interlace.symmetric.cuda import on_one_gpu
    from rank_functions_scatter_gpu import WAYS, on_a_share

    (op,) = (op for op, names in WAYS.items() if name in names)
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
    scatter, reduce = "matmul_reduce_scatter", "matmul_all_reduce"
    ways = [("tiles", "two-shot", "persistent"), ("chained", "one-shot", "chunks"), ("persistent", "two-shot", "push")]
    checks = {
        "values": {"op": scatter, "names": ["plain", "chunks", "chained", "persistent", "tiles", "push"]},
        "exact": {"op": scatter, "names": ["tiles", "push"]},
        "gradients": {"ways": ways},
    }
    for found in run("several", {"checks": checks}):
        assert found == [24, ["tiles float32", "tiles float16", "push float32", "push float16"], 18]
    names = ["one-shot", "two-shot"]
    checks = {"values": {"op": reduce, "names": ["plain", *names]}, "exact": {"op": reduce, "names": names}}
    for found in run("several", {"checks": checks}):
        assert found == [12, [f"{name} {dtype}" for name in names for dtype in ("float32", "float16")]]


@pytest.mark.gpu2
@pytest.mark.timeout(600)
def test_a_thousand_calls() -> None:
    assert run("stress", {"rounds": 1000}) == [NAMES] * 2


@pytest.mark.gpu2
@pytest.mark.timeout(600)
def test_captured_and_replayed() -> None:
    assert run("graphs", {"replays": 12}) == [NAMES] * 2
