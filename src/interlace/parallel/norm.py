"""The global 2-norm of gradients, and clipping by it; every element counts once, whatever its layout.

Equals `torch.nn.utils.clip_grad_norm_` in one process, which called on one rank would see that rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

CHUNK = 4096


def square_sum(leaves: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Sum of squares of the gradients of `leaves`: fp64, [1].

    Fixed chunks have their norm in fp32, one read of memory and no copy; their squares are added in fp64, so that the
    sum does not lose small elements beside large ones.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for leaf in leaves:
        if leaf.grad is None:
            continue
        whole = leaf.grad.numel() // CHUNK * CHUNK
        chunks, rest = leaf.grad[:whole].view(-1, CHUNK), leaf.grad[whole:]
        total += torch.linalg.vector_norm(chunks, dim=1).double().square().sum()
        total += torch.linalg.vector_norm(rest, dtype=torch.promote_types(rest.dtype, torch.float64)).square().real
    return total


def scale(leaves: Iterable[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Multiplies all gradients by min(1, limit / norm); `norm` stays on the device, nothing waits for it."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
    torch._foreach_mul_([leaf.grad for leaf in leaves if leaf.grad is not None], factor)
