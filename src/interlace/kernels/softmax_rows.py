"""Loss and gradient of rows of logits in two passes over memory.

`softmax_rows(logits_NV, labels_N)` equals, row by row in fp32,

    loss = logsumexp(z) - z[label];   z <- softmax(z) - onehot(label);   both 0 where the label is -100

and takes the place of the plain composition of `interlace.models.vocabulary`, which reads and writes a piece of logits
about ten times: one H200, 16,384 rows of 128,256 bf16 numbers, forward and backward of the loss alone took 37 ms so.
Here a program keeps one row: a pass for its running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867), a pass
that writes the gradient, mostly from cache.

Where the columns are split over ranks, the same two passes are `row_statistics`, whose numbers the ranks exchange, and
`row_gradients`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

IGNORED = -100
BLOCK = 4096  # columns at a time


@triton.jit
def _rows(logits, labels, losses, stride, vocab, BLOCK: tl.constexpr):
    """One program, one row."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    if label == -100:
        for start in range(0, vocab, BLOCK):
            at = start + columns
            tl.store(z + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < vocab)
        tl.store(losses + row, 0.0)
    else:
        picked = tl.load(z + label).to(tl.float32)
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + columns
            value = tl.load(z + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(highest, value)
            # a lane that has seen nothing yet has -inf twice; its sum stays 0
            kept = tl.where(highest == higher, 1.0, tl.exp(highest - higher))
            added = tl.where(value == -float("inf"), 0.0, tl.exp(value - higher))
            total = total * kept + added
            highest = higher
        top = tl.max(highest, axis=0)
        whole = tl.sum(tl.where(highest == -float("inf"), 0.0, total * tl.exp(highest - top)), axis=0)
        normaliser = top + tl.log(whole)
        tl.store(losses + row, normaliser - picked)
        for start in range(0, vocab, BLOCK):
            at = start + columns
            value = tl.load(z + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(value - normaliser) - tl.where(at == label, 1.0, 0.0)
            tl.store(z + at, gradient.to(logits.dtype.element_ty), mask=at < vocab)


def softmax_rows(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Losses of rows, fp32 [N]; writes softmax - onehot over the logits.  Both 0 where the label is -100.

    logits_NV: fp32, fp16 or bf16, columns adjacent; labels_N: int64.
    """
    rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1
    assert labels_N.shape == (rows,)
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _rows[(rows,)](logits_NV, labels_N, losses_N, logits_NV.stride(0), vocab, BLOCK=BLOCK, num_warps=8)
    return losses_N


# --- where every rank has some of the columns ------------------------------------------------------------------------


@triton.jit
def _statistics(logits, labels, out, rows, stride, vocab, BLOCK: tl.constexpr):
    """One program, one row: maximum, sum of exp(z - maximum), z of the label (0 elsewhere), sum of z."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + columns
        value = tl.load(z + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        plain += tl.where(at < vocab, value, 0.0)
        higher = tl.maximum(highest, value)
        kept = tl.where(highest == higher, 1.0, tl.exp(highest - higher))
        added = tl.where(value == -float("inf"), 0.0, tl.exp(value - higher))
        total = total * kept + added
        highest = higher
    top = tl.max(highest, axis=0)
    whole = tl.sum(tl.where(highest == -float("inf"), 0.0, total * tl.exp(highest - top)), axis=0)
    here = (label >= 0) & (label < vocab)
    picked = tl.load(z + tl.where(here, label, 0), mask=here, other=0.0).to(tl.float32)
    tl.store(out + row, top)
    tl.store(out + rows + row, whole)
    tl.store(out + 2 * rows + row, picked)
    tl.store(out + 3 * rows + row, tl.sum(plain, axis=0))


@triton.jit
def _gradients(logits, labels, lse, factors, target, spread, stride, vocab, BLOCK: tl.constexpr):
    """One program, one row."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * stride
    label = tl.load(labels + row)
    normaliser = tl.load(lse + row)
    factor = tl.load(factors + row)
    columns = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        at = start + columns
        value = tl.load(z + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        gradient = factor * tl.exp(value - normaliser) - tl.where(at == label, target, 0.0) - spread
        gradient = tl.where(factor == 0.0, 0.0, gradient)
        tl.store(z + at, gradient.to(logits.dtype.element_ty), mask=at < vocab)


def row_statistics(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """[4 N], fp32: maximum, sum of exp(z - maximum), z of the label or 0 where it is not here, sum of z.

    logits_NV: fp32, fp16 or bf16, columns adjacent, at least one; labels_N: int64, columns of this slice.  Equals
    `interlace.parallel.vocabulary.row_statistics`.
    """
    rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1
    out = torch.empty(4, rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _statistics[(rows,)](logits_NV, labels_N, out, rows, logits_NV.stride(0), vocab, BLOCK=BLOCK, num_warps=8)
    return out


def row_gradients(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    lse_N: torch.Tensor,
    factors_N: torch.Tensor,
    target: float,
    spread: float,
) -> None:
    """Writes factor * exp(z - lse) - target * onehot - spread over the logits, 0 where the factor is 0.

    Equals `interlace.parallel.vocabulary.row_gradients`.
    """
    rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1
    if rows:
        _gradients[(rows,)](
            logits_NV, labels_N, lse_N, factors_N, target, spread, logits_NV.stride(0), vocab, BLOCK=BLOCK, num_warps=8
        )
