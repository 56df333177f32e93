"""Joins two results of attention over different keys, with their log-sums, in one pass over memory.

`join(out, logs, other, their_logs)` equals, in place and in fp32 (rounded once if `out` is of less),

    both = log(exp(logs) + exp(their_logs))
    out, logs = out * exp(logs - both) + other * exp(their_logs - both), both        0 and -inf where neither saw a key

whatever the types of `out` and `other`.  The plain composition (`parallel.blocks.merge`) is a dozen launches and
several passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 4096  # of a program


@triton.jit(do_not_specialize=["rows", "T"])
def _join(
    out, logs, other, theirs, rows, T, H, E,
    out_b, out_t, out_h, other_b, other_t, other_h, logs_b, logs_h, logs_t, theirs_b, theirs_h, theirs_t,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept = row < rows
    b, t, h = row // H // T, row // H % T, row % H
    place = logs + b * logs_b + h * logs_h + t * logs_t
    own = tl.load(place, mask=kept, other=float("-inf"))
    other_log = tl.load(theirs + b * theirs_b + h * theirs_h + t * theirs_t, mask=kept, other=float("-inf"))
    most = tl.maximum(own, other_log)
    nothing = most == float("-inf")
    most = tl.where(nothing, 0.0, most)
    own_part, their_part = tl.exp(own - most), tl.exp(other_log - most)
    total = own_part + their_part
    one = tl.where(nothing, 1.0, total)
    element = tl.arange(0, WIDTH)
    inside = kept[:, None] & (element < E)[None, :]
    at = (b * out_b + t * out_t + h * out_h)[:, None] + element[None, :]
    there = (b * other_b + t * other_t + h * other_h)[:, None] + element[None, :]
    made = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) * (own_part / one)[:, None]
    made += tl.load(other + there, mask=inside, other=0.0).to(tl.float32) * (their_part / one)[:, None]
    tl.store(out + at, made, mask=inside)
    tl.store(place, tl.where(nothing, float("-inf"), most + tl.log(one)), mask=kept)


def join(
    out_BTHE: torch.Tensor, logs_BHT: torch.Tensor, other_BTHE: torch.Tensor, their_logs_BHT: torch.Tensor
) -> None:
    """out, logs: views of any strides but that of E, changed in place.  out, other: any type; both logs: fp32."""
    B, T, H, E = out_BTHE.shape
    assert other_BTHE.shape == out_BTHE.shape and logs_BHT.shape == their_logs_BHT.shape == (B, H, T)
    assert logs_BHT.dtype == their_logs_BHT.dtype == torch.float32
    assert out_BTHE.stride(3) == other_BTHE.stride(3) == 1
    rows, width = B * T * H, triton.next_power_of_2(E)
    if rows:
        block = max(1, ELEMENTS // width)
        _join[(triton.cdiv(rows, block),)](
            out_BTHE, logs_BHT, other_BTHE, their_logs_BHT, rows, T, H, E,
            *out_BTHE.stride()[:3], *other_BTHE.stride()[:3], *logs_BHT.stride(), *their_logs_BHT.stride(),
            ROWS=block, WIDTH=width, num_warps=4,
        )  # fmt: skip
