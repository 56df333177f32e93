"""Launches of the fused all-gather and product for the checker: one rank's program, given a heap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from interlace.collectives import Group, Meter
from interlace.kernels import workspace
from interlace.kernels.candidate import Options, Tile, candidates
from interlace.layout import split
from interlace.symmetric import SymmetricHeap

SMALL = Tile(16, 16, 16, 2, 4, 2)


def launch(
    name: str,
    count: int = 7,
    N: int = 18,
    K: int = 16,
    calls: int = 3,
    chunks: int | Sequence[int] = 1,
    in_memory: bool = False,
    keep: bool = False,
) -> Callable[[SymmetricHeap], Callable[[], None]]:
    """A few calls of a candidate with changing rows; in_memory: calls are counted there, as under a graph.

    chunks: of every call, or of one after another.
    """

    def program(heap: SymmetricHeap) -> Callable[[], None]:
        group = Group("tp", tuple(range(heap.size)), heap.rank, heap.device, Meter(record=False))
        candidate: Any = candidates("all_gather_matmul")[name]
        start, stop = split(count, heap.size, heap.rank)
        generator = torch.Generator().manual_seed(heap.rank)
        weight, bias = torch.randn(N, K, generator=generator), torch.randn(N, generator=generator)
        whole = [torch.randn(count, K, generator=torch.Generator().manual_seed(call)) for call in range(calls)]
        x, out = torch.empty(stop - start, K), torch.empty(count, N)
        gathered = torch.empty(count, K) if keep else None
        with workspace.on(heap, group):
            if in_memory:
                workspace.count_in_memory(group)
            for call, rows in enumerate(whole):
                x.copy_(rows[start:stop])
                options = Options(SMALL, chunks if isinstance(chunks, int) else chunks[call % len(chunks)])
                candidate.run(x, [weight], [bias], group, count, [out], gathered, options=options)

        def check() -> None:
            torch.testing.assert_close(out, F.linear(whole[-1], weight, bias), rtol=1e-5, atol=1e-5)
            if gathered is not None:
                assert torch.equal(gathered, whole[-1])

        return check

    return program


# For `interlace check tests/check/gather_launches.py:persistent --ranks 2,3,4 --schedules 1000`.
chunks, chained, persistent, put, push = (
    launch(name, count=5, N=8, K=8) for name in ("chunks", "chained", "persistent", "put", "push")
)
