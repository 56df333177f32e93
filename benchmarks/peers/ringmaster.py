"""axolotl-ringmaster's zigzag ring and Ulysses, `pip install --no-deps axolotl-ringmaster==0.2.7`.

Its ring takes Dao's flash attention, version 2, which PyTorch carries: handed over as it expects.  Ulysses wraps
a model's own attention: PyTorch's, by its own choice of kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def _forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, causal: bool, *rest: Any) -> Any:
    """[B T H E] -> the same, its log-sum-exp [B H T], and two results nobody reads."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout, causal, False, scale=scale
    )
    return out, lse, None, None


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout: float, scale: float, causal: bool, *rest: Any,
) -> None:  # fmt: skip
    none = torch.empty(0, dtype=torch.uint64, device=q.device)
    made = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], dropout, causal, none, none, scale=scale
    )
    for target, value in zip((dq, dk, dv), made, strict=True):
        target.copy_(value)


def attention(name: str, tensors: list[Tensor]) -> tuple[Callable[[], None], list[Tensor], Tensor]:
    """A function that runs forward and backward once, what it leaves (output and gradients) and the places it holds.

    tensors: whole q [B T H E], k and v [B T K E], and the output's gradient.  name: "zigzag" or "ulysses".
    """
    import ringmaster.ring.zigzag as zigzag
    from ringmaster.comm import seq_all_to_all

    group = dist.group.WORLD
    size, rank, length = dist.get_world_size(), dist.get_rank(), tensors[0].shape[1]
    device, left = tensors[0].device, list[Tensor]()
    if name == "zigzag":
        zigzag._flash_ops = lambda *given: (_forward, _backward)
        at = zigzag._zigzag_gidx(rank, length // (2 * size), size, device)
    else:
        at = torch.arange(length, device=device).chunk(size)[rank]
    q, k, v = (x[:, at].transpose(1, 2).contiguous().requires_grad_() for x in tensors[:3])
    grad = tensors[3][:, at].contiguous()

    def ulysses() -> Tensor:
        theirs = seq_all_to_all(q, 1, 2, group)
        both = seq_all_to_all(torch.stack((k, v)), 2, 3, group)
        out = F.scaled_dot_product_attention(theirs, both[0], both[1], is_causal=True, enable_gqa=True)
        made: Tensor = seq_all_to_all(out.transpose(1, 2).contiguous(), 1, 2, group)
        return made

    def run() -> None:
        q.grad = k.grad = v.grad = None
        if name == "zigzag":
            out = zigzag.zigzag_ring_attention(q, k, v, group=group, scaling=None)
        else:
            out = ulysses()
        out.backward(grad)
        left[:] = [out.detach(), *(x.grad.transpose(1, 2) for x in (q, k, v) if x.grad is not None)]

    return run, left, at
