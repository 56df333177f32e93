"""Launches of fused products whose sums travel, for the checker: one rank's program, given a heap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interlace.collectives import Group, Meter
from interlace.kernels import workspace
from interlace.kernels.candidate import Options, Tile, candidates
from interlace.layout import split
from interlace.symmetric import SymmetricHeap

WHOLE, HALVES = Tile(16, 16, 16, 2, 4, 2), Tile(16, 32, 16, 1, 4, 2, parts=2)
SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
WAYS = (
    (SCATTER, "put"), (SCATTER, "tiles"), (SCATTER, "push"),
    (REDUCE, "put"), (REDUCE, "one-shot"), (REDUCE, "two-shot"),
)  # fmt: skip
COPIED = ((SCATTER, "chunks"), (SCATTER, "chained"), (SCATTER, "persistent"))


def launch(
    op: str,
    name: str,
    sizes: tuple[tuple[int, int], ...] = ((21, 24), (21, 24), (21, 24)),
    K: int = 5,
    tile: Tile = WHOLE,
    chunks: int = 2,
    in_memory: bool = False,
) -> Callable[[SymmetricHeap], Callable[[], None]]:
    """A call of a candidate for each of `sizes` (M, N); in_memory: copies count calls there, as under a graph."""

    def factors(rank: int, call: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * call + rank)
        M, N = sizes[call]
        return torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator)

    def program(heap: SymmetricHeap) -> Callable[[], None]:
        group = Group("tp", tuple(range(heap.size)), heap.rank, heap.device, Meter(record=False))
        candidate = candidates(op)[name]
        rows = [slice(0, M) if op == REDUCE else slice(*split(M, heap.size, heap.rank)) for M, _ in sizes]
        made = [torch.empty(r.stop - r.start, N) for r, (_, N) in zip(rows, sizes, strict=True)]
        biases = [torch.arange(float(N)) if name != "chained" else None for _, N in sizes]
        with workspace.on(heap, group):
            space = workspace.of(group, f"{op}.chunks")
            space.counts_in_memory = in_memory
            for call, (out, bias) in enumerate(zip(made, biases, strict=True)):
                candidate.run(*factors(heap.rank, call), bias, group, out, options=Options(tile, chunks))

        def check() -> None:
            for call, (out, bias, kept) in enumerate(zip(made, biases, rows, strict=True)):
                expected = torch.zeros(sizes[call]) if bias is None else bias.expand(sizes[call]).clone()
                for x, weight in (factors(rank, call) for rank in range(heap.size)):
                    expected += x @ weight.t()
                torch.testing.assert_close(out, expected[kept], rtol=1e-5, atol=1e-5)

        return check

    return program
