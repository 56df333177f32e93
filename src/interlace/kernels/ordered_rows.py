"""The sum of one row from every rank, in the order of ranks, in one pass over memory.

`sum_rows(own, received, rank, target, scale, bias)` equals, in fp32 and rounded once,

    rows = received with `own` as row number `rank`
    target = ((rows[0] + rows[1]) + rows[2] + ...) * scale + bias, repeated

With onto=True the sum goes on from what the target holds: ((target + rows[0]) + rows[1]) + ...

The plain composition copies the own row beside the others and reads and writes the target once for each of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit(do_not_specialize=["rank"])
def _sum(
    own, received, target, bias, rank, count, scale, width,
    ROWS: tl.constexpr, ONTO: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(own + at, mask=inside).to(tl.float32)
    if rank != 0:
        total = tl.load(received + at, mask=inside).to(tl.float32)
    if ONTO:
        total = tl.load(target + at, mask=inside) + total
    for row in range(1, ROWS):
        if row == rank:
            value = tl.load(own + at, mask=inside).to(tl.float32)
        else:
            value = tl.load(received + tl.full([], row, tl.int64) * count + at, mask=inside).to(tl.float32)
        total += value
    total = total * scale
    if BIAS:
        total += tl.load(bias + at % width, mask=inside).to(tl.float32)
    tl.store(target + at, total, mask=inside)


def sum_rows(
    own: torch.Tensor,
    received: torch.Tensor,
    rank: int,
    target: torch.Tensor,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    onto: bool = False,
) -> torch.Tensor:
    """own: [count]; received: [rows, count] in the same dtype, its row `rank` not read; target: [count].

    A rank that has no row (rank >= rows) adds only those of the others.
    """
    rows, count = received.shape
    assert not onto or target.dtype == torch.float32
    assert own.dtype == received.dtype
    assert own.numel() == target.numel() == count
    assert own.is_contiguous() and received.is_contiguous() and target.is_contiguous()
    if count:
        width = 1 if bias is None else bias.numel()
        _sum[(triton.cdiv(count, BLOCK),)](
            own, received, target, bias, rank, count, scale, width,
            ROWS=rows, ONTO=onto, BIAS=bias is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return target
