"""The global norm of gradients, and clipping by it; every element counts once, whatever its layout.

Equals `torch.nn.utils.clip_grad_norm_` in one process, which called on one rank would see that rank's shard.

`square_sum` is the quick one.  `chunk_squares` and `tree_sum` add in an order that a shape alone decides: elementwise
additions, halves onto halves, whose bits do not depend on what else lies in memory or how much is added at a time, as
those of a reduction kernel may.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from interlace.parallel.flat import Flat

CHUNK = 4096
BLOCKS = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements whose squares are held at a time; CHUNK divides it


def square_sum(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of 1-D `gradients`: fp64, [1].

    Fixed chunks have their norm in fp32, one read of memory and no copy; their squares are added in fp64, so that the
    sum does not lose small elements beside large ones.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        whole = gradient.numel() // CHUNK * CHUNK
        chunks, rest = gradient[:whole].view(-1, CHUNK), gradient[whole:]
        total += torch.linalg.vector_norm(chunks, dim=1).double().square().sum()
        total += torch.linalg.vector_norm(rest, dtype=torch.promote_types(rest.dtype, torch.float64)).square().real
    return total


def power_sum(gradients: Iterable[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Sum of the p-th powers of the sizes of all elements, their largest size for p = inf: fp64, [1]."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        if gradient.numel():
            size = torch.linalg.vector_norm(gradient, p, dtype=torch.promote_types(gradient.dtype, torch.float64)).real
            total = torch.maximum(total, size) if p == math.inf else total + size**p
    return total


def chunk_squares(gradient: torch.Tensor, chunk: int) -> torch.Tensor:
    """Sum of squares of every chunk of `gradient`: fp64, [numel / chunk]; the same bits for a chunk wherever it lies.

    gradient: 1-D, whole chunks, a power of two of elements each.  Squares and sums of a chunk are in fp32.
    """
    assert chunk & (chunk - 1) == 0 and gradient.numel() % chunk == 0, (gradient.numel(), chunk)
    if gradient.is_cuda and gradient.dtype == torch.float32:
        from interlace.kernels.chunk_squares import chunk_squares as in_one_pass  # needs Triton

        return in_one_pass(gradient, chunk).double()
    block = max(chunk, BLOCKS[gradient.device.type])
    sums = [tree_sum(part.view(-1, chunk).square()).double() for part in gradient.split(block)]
    return torch.cat(sums) if sums else gradient.new_zeros(0, dtype=torch.float64)


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, which must not be empty: second half onto the first until one is left.

    Takes `values` over as work space.
    """
    count = values.shape[-1]
    assert count > 0
    while count > 1:
        half = (count + 1) // 2
        values[..., : count - half] += values[..., half:count]
        count = half
    return values[..., 0]


def own_chunks(flats: Sequence[Flat]) -> torch.Tensor:
    """`chunk_squares` of every chunk of gradients that this rank owns, run after run: [chunks]."""
    return torch.cat([chunk_squares(flat.own_gradient(), flat.cut.chunk) for flat in flats])


def in_order(flats: Sequence[Flat], everyone: torch.Tensor) -> list[torch.Tensor]:
    """Of each run, its chunks in order, without padding: [chunks].  everyone: what `own_chunks` gives on each rank,
    [ranks, chunks], ranks in the order of what they own."""
    counts = [flat.numel // flat.cut.chunk // everyone.shape[0] for flat in flats]
    parts = zip(flats, everyone.split(counts, dim=1), strict=True)
    return [part.reshape(-1)[: flat.chunks] for flat, part in parts]


def factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """min(1, limit / norm), on the device: nothing waits for it."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies all gradients by `factor`, 0-d."""
    for dtype in {grad.dtype for grad in gradients}:
        torch._foreach_mul_([grad for grad in gradients if grad.dtype == dtype], factor.to(dtype))
