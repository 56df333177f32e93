"""Attention whose softmax has one more term in its denominator: a logit for each head, learned, that has no value.

    out = softmax([q k^T / sqrt(E) + mask, sink])[.., all but the last] v            (gpt-oss, arXiv 2508.10925)

equals plain attention times exp(log-sum - total), total = log(exp(log-sum) + exp(sink)), with the log-sum of the scores
that the fused kernels give anyway.  Their backward takes an output and a log-sum as they are; given those of the whole
denominator it makes the gradients of the whole, since the sink adds nothing to the sum of probability x its gradient.
The sink's own is -exp(sink - total) times the sum over E of gradient x output, summed over positions.  So a sink costs
two elementwise passes over the output, and keeps what attention without one keeps.

`with_null_key` says the same with one key more, whose score is the sink, for kernels that give no log-sum to outsiders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


class Kernel(Protocol):
    """Fused attention: q_BTHE, k_BSKE, v_BSKE -> out_BTHE and its log-sums [B T H], fp32 (fp64 for fp64)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Host:
    """The kernel of CPUs: plain causal, or a mask [B or 1, 1, T, S]."""

    mask_B1TS: Tensor | None

    def _bias(self, q: Tensor) -> Tensor | None:
        mask = self.mask_B1TS
        return None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        made = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, self.mask_B1TS is None, attn_mask=self._bias(q)
        )
        return made[0].transpose(1, 2), made[1].transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, logs = (x.transpose(1, 2) for x in (grad, q, k, v, out, logs))
        of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logs, 0.0, self.mask_B1TS is None, attn_mask=self._bias(q)
        )
        return of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Flash:
    """Flash attention of CUDA, half precision: runs of the flattened batch, as `Pattern.runs` gives them, and a
    window."""

    offsets: Tensor
    longest: int
    window: int | None

    def _rest(self) -> tuple[Any, ...]:
        return self.offsets, self.offsets, self.longest, self.longest, 0.0, self.window is None

    def _reach(self) -> dict[str, int]:
        return {"window_size_left": -1 if self.window is None else self.window - 1, "window_size_right": 0}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out_NHE, logs_HN = aten._flash_attention_forward(*flat, *self._rest(), False, **self._reach())[:2]
        return out_NHE.view_as(q), logs_HN.t().unflatten(0, q.shape[:2])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = (x.flatten(0, 1).contiguous() for x in (grad, q, k, v, out))
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read with dropout alone
        unused = torch.empty(0, device=q.device)
        logs_HN = logs.flatten(0, 1).t().contiguous()
        made = aten._flash_attention_backward(*flat, logs_HN, *self._rest(), random, unused, **self._reach())
        return made[0].view_as(q), made[1].view_as(k), made[2].view_as(v)


def attend(q_BTHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, sinks_H: Tensor, kernel: Kernel) -> Tensor:
    """[B T H E], by a kernel that gives log-sums."""
    made: Tensor = _Attend.apply(q_BTHE, k_BSKE, v_BSKE, sinks_H, kernel)  # type: ignore[no-untyped-call]
    return made


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, kernel: Kernel) -> Tensor:
        out, logs_BTH = kernel.forward(q, k, v)
        total_BTH = torch.logaddexp(logs_BTH, sinks_H.to(logs_BTH.dtype))
        out = (out * (logs_BTH - total_BTH).exp()[..., None]).to(q.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, sinks_H, out, total_BTH)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out, total_BTH = ctx.saved_tensors
        made = ctx.kernel.backward(grad, q, k, v, out, total_BTH)
        return *made, gradient(sinks_H, total_BTH, delta(grad, out, total_BTH.dtype)), None


def delta(grad_BTHE: Tensor, out_BTHE: Tensor, wide: torch.dtype) -> Tensor:
    """The sum over E of gradient x output: [B T H]."""
    return (grad_BTHE.to(wide) * out_BTHE.to(wide)).sum(dim=-1)


def gradient(sinks_H: Tensor, total_BTH: Tensor, delta_BTH: Tensor) -> Tensor:
    """The sinks' gradient, [H]: total_BTH the log-sums with the sink, delta_BTH as `delta` gives it."""
    made = (sinks_H.to(total_BTH.dtype) - total_BTH).exp() * delta_BTH
    return -made.sum(dim=(0, 1)).to(sinks_H.dtype)


def with_null_key(q_BTHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, sinks_H: Tensor, mask_B1TS: Tensor) -> Tensor:
    """[B T H E], by one key more that every query sees: its value is 0, its score the sink.

    Eight features more make that score: they hold sink sqrt(E) in each query, 1 in the null key, 0 in the others.
    """
    batch, length, num_heads, head_dim = q_BTHE.shape
    wide = (batch, length, num_heads, 1)
    sink = (sinks_H * head_dim**0.5).to(q_BTHE.dtype)[:, None].expand(wide)
    q = F.pad(torch.cat((q_BTHE, sink), dim=3), (0, 7))
    k, v = (F.pad(x, (0, 8, 0, 0, 0, 1)) for x in (k_BSHE, v_BSHE))
    null = torch.zeros_like(k[:1, :, :1])
    null[:, -1, :, head_dim] = 1.0
    seen = F.pad(mask_B1TS, (0, 1), value=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k + null, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=head_dim**-0.5)
    return out.transpose(1, 2)[..., :head_dim]
