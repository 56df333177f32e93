"""The global norm of the gradients, and clipping by it; every element counts once, whatever its layout."""

from __future__ import annotations

import torch

from interlace.parallel.data import DataParallel

CHUNK = 4096


def square_sum(model: DataParallel) -> torch.Tensor:
    """Sum of squares of the gradient elements that this rank has to count: fp64, [1].

    Under zero=0 every rank holds all gradients, so only rank 0 of the data axis counts them.  Fixed chunks have their
    norm in fp32, one read of memory and no copy; their squares are added in fp64, so that the sum does not lose small
    elements beside large ones.
    """
    total = torch.zeros(1, dtype=torch.float64, device=model.group.device)
    if not model.sharded and model.group.rank != 0:
        return total
    for leaf in model.leaves():
        if leaf.grad is None:
            continue
        whole = leaf.grad.numel() // CHUNK * CHUNK
        chunks, rest = leaf.grad[:whole].view(-1, CHUNK), leaf.grad[whole:]
        total += torch.linalg.vector_norm(chunks, dim=1).double().square().sum()
        total += rest.double().square().sum()
    return total


def scale(model: DataParallel, norm: torch.Tensor, limit: float) -> None:
    """Multiplies all gradients by min(1, limit / norm); `norm` stays on the device, nothing waits for it."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
    torch._foreach_mul_([leaf.grad for leaf in model.leaves() if leaf.grad is not None], factor)
