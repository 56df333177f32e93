"""Sums of squares of chunks in an order that the chunk's size alone decides, in one pass over memory.

`chunk_squares(gradient, chunk)` equals, bit for bit, in fp32:

    values = gradient.view(-1, chunk).square()
    while values has columns: values = first half of the columns + second half

One launch a run in place of two for each halving: with 18 runs of half a billion elements the host handed out 540
kernels at the end of a step, 15 ms in which the device had nothing else to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _squares(gradient, out, CHUNK: tl.constexpr, HALVINGS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(gradient + row * CHUNK + tl.arange(0, CHUNK))
    values = values * values
    for level in tl.static_range(HALVINGS):
        values = tl.sum(tl.reshape(values, [2, CHUNK >> (level + 1)]), axis=0)
    tl.store(out + row + tl.arange(0, 1), values)


def chunk_squares(gradient: torch.Tensor, chunk: int) -> torch.Tensor:
    """gradient: 1-D, contiguous, fp32, whole chunks of a power of two of elements -> fp32, [numel / chunk]."""
    assert gradient.dtype == torch.float32
    assert gradient.is_contiguous()
    count = gradient.numel() // chunk
    out = gradient.new_empty(count)
    if count:
        _squares[(count,)](
            gradient, out, CHUNK=chunk, HALVINGS=chunk.bit_length() - 1, num_warps=4,
            enable_fp_fusion=False,  # a product rounds before it is added, as in plain operations
        )  # fmt: skip
    return out
