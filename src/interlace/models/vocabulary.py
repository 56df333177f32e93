"""The projection to the vocabulary and its loss as one function that never holds the logits.

`vocabulary_loss(x, weight, labels)` equals `sum over labels of -log softmax(x @ weight.T)[label]` and its gradients.
Rows are taken a piece at a time: logits of the piece, loss and gradient of its rows, then both products of backward at
once, while the piece is still there.  Nothing is computed twice: three products, as in the plain composition, which
holds the logits of all rows and their gradient (twice 4.2 GB for 16,384 rows of 128,256 bf16 numbers).  Backward only
multiplies by the incoming gradient, so it reads no weight.

`softmax_rows` is the elementwise part in plain PyTorch; a kernel with the same contract may take its place
(`Head.softmax_rows`), since it reads and writes a piece about ten times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # the label of a position that has none
PIECE = 1 << 29  # logits at a time, 1 GiB in bf16

# (logits_NV, labels_N) -> losses_N, fp32 or wider; leaves d(sum of losses)/d logits in place of the logits
SoftmaxRows = Callable[[Tensor, Tensor], Tensor]


def softmax_rows(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Losses of rows [N], fp32 or wider; writes softmax - onehot over the logits.  Both 0 where the label is -100."""
    z_NV = logits_NV.to(_wide(logits_NV.dtype))
    normalisers_N = z_NV.logsumexp(dim=-1)
    ignored_N, picked_N1 = labels_N == IGNORED, labels_N.clamp(min=0)[:, None]
    losses_N = (normalisers_N - z_NV.gather(1, picked_N1)[:, 0]).masked_fill(ignored_N, 0.0)
    gradient_NV = torch.sub(z_NV, normalisers_N[:, None]).exp_()
    gradient_NV.scatter_add_(1, picked_N1, torch.full_like(z_NV[:, :1], -1.0))
    logits_NV.copy_(gradient_NV.masked_fill_(ignored_N[:, None], 0.0))
    return losses_N


def rows_at_a_time(vocab: int, count: int) -> int:
    """Rows in a piece: a power of two within `PIECE`, or all."""
    return min(max(count, 1), 1 << max(0, (PIECE // vocab).bit_length() - 1))


def vocabulary_loss(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, rows: SoftmaxRows = softmax_rows, scratch: Tensor | None = None
) -> Tensor:
    """Sum of the cross-entropies of all labels that are not -100: a scalar, fp32 (fp64 for fp64).

    x_ND and weight_VD in one floating dtype, labels_N int64.  The gradient of the weight is added up in fp32 over the
    pieces and rounded once.  scratch: uint8 memory that the logits may take while this runs; how much there is decides
    the size of a piece, and with it the last bits of the weight's gradient.
    """
    learns = torch.is_grad_enabled()  # inside `forward` it never is, and weights always ask for gradients
    return _VocabularyLoss.apply(x_ND, weight_VD, labels_N, rows, learns, scratch)  # type: ignore[no-untyped-call]


class _VocabularyLoss(torch.autograd.Function):
    """forward   x_ND, weight_VD, labels_N -> loss; keeps dx_ND, dweight_VD (those of a gradient of 1)
    backward  dloss -> dloss * dx_ND, dloss * dweight_VD
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        rows: SoftmaxRows,
        learns: bool,
        scratch: Tensor | None,
    ) -> Tensor:
        wants_x, wants_weight = (learns and wanted for wanted in ctx.needs_input_grad[:2])
        loss = torch.zeros((), dtype=_wide(x_ND.dtype), device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if wants_x else None
        sums_VD = torch.zeros_like(weight_VD, dtype=_wide(weight_VD.dtype)) if wants_weight else None
        step, work_NV = _work(x_ND, len(weight_VD), scratch)
        for first in range(0, len(x_ND), step):
            piece = slice(first, first + step)
            logits_NV = torch.mm(x_ND[piece], weight_VD.T, out=work_NV[: len(x_ND[piece])])
            loss += rows(logits_NV, labels_N[piece]).sum()
            if dx_ND is not None:
                torch.mm(logits_NV, weight_VD, out=dx_ND[piece])
            if sums_VD is not None:
                _add_product(sums_VD, logits_NV.T, x_ND[piece])
            del logits_NV
        del work_NV  # before the weight's gradient is there twice
        dweight_VD = sums_VD.to(weight_VD.dtype) if sums_VD is not None else None
        ctx.save_for_backward(dx_ND, dweight_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx_ND, dweight_VD = ctx.saved_tensors
        return (
            None if dx_ND is None else dx_ND * dloss.to(dx_ND.dtype),
            None if dweight_VD is None else dweight_VD * dloss.to(dweight_VD.dtype),
            None,
            None,
            None,
            None,
        )


def _work(x_ND: Tensor, vocab: int, scratch: Tensor | None) -> tuple[int, Tensor]:
    """Rows in a piece, all or a power of two, and memory for its logits: of `scratch` if 1024 rows, or all, fit there.

    A power of two fills whole waves of a GPU's product; as many rows as fit, 3328 of 16,384, took 43.5 instead of 40.0
    ms of loss (4096 rows at a time) on an H200.
    """
    size = vocab * x_ND.element_size()
    fitting = 0 if scratch is None else scratch.numel() // size
    if scratch is not None and fitting >= min(1024, len(x_ND)):
        step = max(len(x_ND), 1) if fitting >= len(x_ND) else 1 << (fitting.bit_length() - 1)
        return step, scratch[: step * size].view(x_ND.dtype).view(step, vocab)
    step = rows_at_a_time(vocab, len(x_ND))
    return step, x_ND.new_empty(step, vocab)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the product rounded no further than `total` is."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)
