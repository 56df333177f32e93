"""What rank processes run for the tests of fused all-gather and product; kernels are interpreted."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

import torch
import torch.nn.functional as F
from torch import Tensor

from interlace.collectives import Group, Meter, make_groups
from interlace.kernels import workspace
from interlace.kernels.candidate import Candidate, Options, Tile, candidates
from interlace.layout import split
from interlace.mesh import Mesh
from interlace.world import World

SMALL = Tile(16, 16, 16, 2, 4, 2)
LOOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value; one rounding


def group_of(world: World) -> Group:
    return make_groups(Mesh.parse(f"tp={world.size}"), world.rank, torch.device("cpu"), 60.0, Meter(world.waiting))[
        "tp"
    ]


def rows_of(count: int, K: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one(candidate: Candidate, group: Group, count: int, sizes: tuple[int, ...], K: int, **how: Any) -> None:
    """One call against the whole product in fp32.  sizes: N of each weight, a little more on later ranks."""
    seed, dtype, chunks = how.get("seed", 0), how.get("dtype", torch.float32), how.get("chunks")
    x = rows_of(count, K, seed, dtype)
    start, stop = split(count, group.size, group.rank)
    sizes = tuple(n + group.rank if n else 0 for n in sizes)
    turned = how.get("turned", False)
    weights = [rows_of(K, n, 7 + n, dtype).t() if turned else rows_of(n, K, 7 + n, dtype) for n in sizes]
    biases = [rows_of(1, n, 9 + n, dtype)[0] if number % 2 == 0 else None for number, n in enumerate(sizes)]
    own = x[start:stop].t().contiguous().t() if turned else x[start:stop].clone()
    out = [torch.empty(count, n, dtype=dtype) for n in sizes]
    gathered = torch.empty(count, K, dtype=dtype) if how.get("keep", True) else None
    candidate.run(own, weights, biases, group, count, out, gathered, options=Options(how.get("tile", SMALL), chunks))
    for y, weight, bias in zip(out, weights, biases, strict=True):
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        apart = (y.float() - expected).abs().max().item() if y.numel() else 0.0
        assert apart <= LOOSE[dtype] * expected.abs().max().item() if y.numel() else True, (candidate.name, how, apart)
    assert gathered is None or torch.equal(gathered, x), (candidate.name, "gathered")


def values(world: World, names: list[str]) -> int:
    """Every candidate, odd shapes, types, strides, numbers of chunks; M = 1, M < ranks, columns that differ by rank."""
    group, done = group_of(world), 0
    for name in names:
        candidate = candidates("all_gather_matmul")[name]
        for number, (count, sizes, K) in enumerate(
            [(7, (5, 18), 9), (1, (4,), 24), (world.size - 1, (16,), 16), (35, (17, 0, 33), 40), (12, (0,), 8)]
        ):
            for dtype in (torch.float32, torch.float16):
                one(
                    candidate, group, count, sizes, K, seed=number, dtype=dtype, chunks=1 + number % 3, keep=number != 1
                )
                done += 1
        one(candidate, group, 19, (20,), 23, turned=True)
        one(candidate, group, 70, (48,), 64, dtype=torch.bfloat16, chunks=2)
        one(candidate, group, 70, (48,), 64, tile=Tile(32, 32, 32, 4, 4, 2, True, 2))
    workspace.release(group)
    return done
