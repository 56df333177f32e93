"""Prices of products beside their transfers, against measured ones, the layout's bytes and what nothing can beat."""

from __future__ import annotations

import math

import pytest

from interlace.errors import ConfigError
from interlace.layout import Layout, transition
from interlace.mesh import Mesh
from interlace.plan.fused import OPS, predict, product_seconds, wire_bytes
from interlace.topology import Topology

H200 = Topology.load("h200")

# cuBLAS in bf16 on an H200 under sustained load, ms; medians of interleaved rounds, 29 November 2026.
MEASURED = [
    ((8192, 14336, 8192), 2.839),
    ((8192, 7168, 8192), 1.390),
    ((16384, 3584, 8192), 1.409),
    ((8192, 3584, 8192), 0.695),
    ((4096, 7168, 4096), 0.323),
    ((2048, 3584, 8192), 0.175),
    ((8192, 1280, 8192), 0.227),
    ((8192, 1024, 8192), 0.178),
    ((512, 3584, 8192), 0.045),
    ((8192, 8192, 1280), 0.242),
    ((4096, 4096, 7168), 0.319),
    ((2048, 8192, 3584), 0.164),
    ((512, 8192, 3584), 0.045),
]


@pytest.mark.parametrize(("shape", "ms"), MEASURED)
def test_products_cost_what_they_were_measured_to(shape: tuple[int, int, int], ms: float) -> None:
    assert 1e3 * product_seconds(H200, *shape) == pytest.approx(ms, rel=0.15)


def test_tiles_come_in_whole_waves() -> None:
    """132 tiles of 256 x 128 take one wave; a twelfth more work takes far more time, and half a wave no less."""
    one, more = (product_seconds(H200, 256 * rows, 128 * 12, 8192) for rows in (11, 12))
    assert more > 1.2 * one
    assert product_seconds(H200, 128, 64 * 66, 8192) == product_seconds(H200, 128, 64 * 60, 8192)
    assert product_seconds(H200, 0, 5, 5) == 0.0
    small = product_seconds(H200, 1, 8192, 8192)
    assert small == pytest.approx(8192 * 8192 * 2 / H200.hbm_bandwidth + H200.kernel_latency, rel=0.01)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(("M", "N", "K"), [(48, 7, 5), (24, 16, 64)])
def test_bytes_are_those_of_the_layouts(world: int, M: int, N: int, K: int) -> None:
    mesh = Mesh((("tp", world),))
    changes = {
        "all_gather_matmul": ("M/tp K", "M K", (M, K)),
        "matmul_reduce_scatter": ("M N +tp", "M/tp N", (M, N)),
        "matmul_all_reduce": ("M N +tp", "M N", (M, N)),
    }
    assert set(changes) == set(OPS)
    for op, (before, after, shape) in changes.items():
        moved = transition(Layout.parse(before), Layout.parse(after), shape, mesh, 2)
        assert wire_bytes(op, M, N, K, 2, world) == pytest.approx(sum(sum(t.bytes_by_rank) for t in moved) / world)


SHAPES = [(8192, 14336, 8192), (8192, 1280, 8192), (8192, 8192, 3584), (512, 3584, 8192), (16, 8192, 3584)]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_beats_the_product_or_the_wire(shape: tuple[int, int, int], op: str, world: int) -> None:
    M, N, K = shape
    found = predict(H200, op, M, N, K, "bf16", world)
    wire = wire_bytes(op, M, N, K, 2, world) / H200.links[0].bandwidth
    product = 2.0 * M * N * K / (H200.flops_per_second("bf16") * H200.matmul_efficiency["bf16"])
    assert "plain" in found
    for name, seconds in found.items():
        assert seconds >= 0.999 * product, name
        whole = 1 if op != "matmul_all_reduce" else 0.5  # one-shot and two-shot have one half under the product
        assert seconds >= 0.999 * whole * wire, name


def test_what_was_seen_to_win_is_priced_so() -> None:
    """Much arithmetic: waiting by tile hides the transfer; little: cuts along K help; few rows: copies by programs."""
    wide = predict(H200, "all_gather_matmul", 8192, 7168, 8192)
    assert wide["persistent"] < wide["plain"]
    narrow = predict(H200, "matmul_reduce_scatter", 8192, 8192, 1280)
    assert narrow["tiles"] < narrow["chunks"] < narrow["plain"]
    few = predict(H200, "matmul_all_reduce", 16, 8192, 3584)
    assert few["one-shot"] < few["two-shot"] < few["plain"]


def test_one_rank_has_only_a_product_and_words_are_checked() -> None:
    assert predict(H200, OPS[0], 64, 64, 64, world=1) == {"plain": product_seconds(H200, 64, 64, 64)}
    with pytest.raises(ConfigError, match="there is no product 'gather'"):
        wire_bytes("gather", 1, 1, 1, 2, 2)
    assert math.isfinite(predict(Topology.load("cpu"), OPS[1], 64, 64, 64, "fp32", 2, 1)["tiles"])
