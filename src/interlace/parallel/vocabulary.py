"""The projection to a vocabulary split over ranks and its loss as one function: logits are never gathered, nor held.

`vocabulary_loss` equals, with z = x @ weight.T over the whole vocabulary of V words and lse = logsumexp(z),

    sum over labels of  (1 - s) (lse - z[label]) + s (lse - mean(z)) + c lse^2

with s the label smoothing of `torch.nn.functional.cross_entropy` and c the weight of the z-loss (Chowdhery et al.,
arXiv 2204.02311), and its gradients.  Each rank has some of the words.  A piece of rows at a time, it finds the
maximum, the sum of exponentials, the label's logit and the sum of its own logits; these four numbers a row are what
travels.  Then every rank knows lse and can finish its own part of the gradient.  So the gradient of x is a sum owed
over ranks, paid once for all pieces.

Rounding: the four numbers travel in fp32 (fp64 for fp64), and are combined in rank order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group, all_gather, balanced
from interlace.collectives.autograd import start_gather, start_reduce, start_scatter

IGNORED = -100  # the label of a position that has none
PIECE = 1 << 29  # logits at a time, 1 GiB in bf16


@torch.compiler.disable  # type: ignore[untyped-decorator]
def vocabulary_loss(
    x: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    group: Group,
    vocab: int,
    *,
    sequence: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Sum of the losses of all labels that are not -100: a scalar, fp32 (fp64 for fp64), the same on every rank.

    x: [N D], or with `sequence` this rank's rows of it.  weight_VD: this rank's slice of `vocab` rows, balanced.
    labels_N: int64, of the whole vocabulary.  Every rank passes its gradient of 1 alike.
    """
    learns = torch.is_grad_enabled()
    options = (group, vocab, sequence, label_smoothing, z_loss, learns)
    return _SplitVocabularyLoss.apply(x, weight_VD, labels_N, *options)  # type: ignore[no-any-return, no-untyped-call]


def row_statistics(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """[4 N], fp32 or wider: maximum, sum of exp(z - maximum), z of the label or 0 where it is not here, sum of z.

    labels_N: column of this slice, anything outside of it where the label is not here.
    """
    z_NV = logits_NV.to(_wide(logits_NV.dtype))
    if z_NV.shape[1] == 0:
        return torch.stack([z_NV.new_full(labels_N.shape, -torch.inf), *(z_NV.new_zeros(3, len(z_NV)))])
    top_N = z_NV.amax(dim=1)
    here_N = (labels_N >= 0) & (labels_N < z_NV.shape[1])
    picked_N = z_NV.gather(1, labels_N.clamp(0, z_NV.shape[1] - 1)[:, None])[:, 0]
    sums_N = (z_NV - top_N[:, None]).exp_().sum(dim=1)
    return torch.stack([top_N, sums_N, picked_N.where(here_N, 0.0), z_NV.sum(dim=1)])


def row_gradients(
    logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, factor_N: Tensor, target: float, spread: float
) -> None:
    """Writes factor * exp(z - lse) - target * onehot - spread over the logits, 0 where factor is 0 (no label)."""
    gradient_NV = torch.sub(logits_NV.to(lse_N.dtype), lse_N[:, None]).exp_().mul_(factor_N[:, None])
    rows = torch.nonzero((labels_N >= 0) & (labels_N < logits_NV.shape[1]))[:, 0]
    gradient_NV[rows, labels_N[rows]] -= target
    gradient_NV -= spread
    logits_NV.copy_(gradient_NV.masked_fill_(factor_N[:, None] == 0, 0.0))


class _SplitVocabularyLoss(torch.autograd.Function):
    """forward   x, weight_VD, labels_N -> loss; keeps dx, dweight_VD (those of a gradient of 1)
    backward  dloss -> dloss * dx, dloss * dweight_VD
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_VD: Tensor, labels_N: Tensor, group: Group, vocab: int, sequence: bool, s: float,
        c: float, learns: bool,
    ) -> Tensor:  # fmt: skip
        wants_x, wants_weight = (learns and wanted for wanted in ctx.needs_input_grad[:2])
        count = len(labels_N)
        x_ND = start_gather(x, group, count, "gather for the loss").wait() if sequence else x
        wide = _wide(x.dtype)
        loss = torch.zeros((), dtype=wide, device=x.device)
        dx_ND = torch.empty_like(x_ND) if wants_x else None
        sums_VD = torch.zeros_like(weight_VD, dtype=wide) if wants_weight else None
        first = sum(balanced(vocab, group.size)[: group.rank])
        statistics, gradients = _row_functions(x)
        step = rows_at_a_time(balanced(vocab, group.size)[0], count)
        for start in range(0, count, step):
            piece = slice(start, start + step)
            labels = labels_N[piece]
            ignored, here = labels == IGNORED, torch.where(labels == IGNORED, -1, labels - first)
            logits_NV = x_ND[piece] @ weight_VD.T
            lse, picked, total = _combined(statistics(logits_NV, here), group)
            losses = (1 - s) * (lse - picked) + s * (lse - total / vocab) + c * lse.square()
            loss += losses.masked_fill(ignored, 0.0).sum()
            if dx_ND is None and sums_VD is None:
                continue
            gradients(logits_NV, here, lse, (1 + 2 * c * lse).masked_fill(ignored, 0.0), 1 - s, s / vocab)
            if dx_ND is not None:
                torch.mm(logits_NV, weight_VD, out=dx_ND[piece])
            if sums_VD is not None:
                _add_product(sums_VD, logits_NV.T, x_ND[piece])
        dx = dweight_VD = arriving = None
        if dx_ND is not None:
            arriving = (start_scatter if sequence else start_reduce)(dx_ND, group, "gradient of the loss")
        if sums_VD is not None:
            dweight_VD = sums_VD.to(weight_VD.dtype)
        if arriving is not None:
            dx = arriving.wait()
        ctx.save_for_backward(dx, dweight_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight_VD = ctx.saved_tensors
        scaled = (None if made is None else made * dloss.to(made.dtype) for made in (dx, dweight_VD))
        return (*scaled, *(None,) * 7)


def _combined(own: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """logsumexp, the label's logit and the sum of logits of every row, over all ranks' words."""
    everyone = all_gather(own.contiguous().view(-1), group, name="statistics of the loss").wait().view(-1, *own.shape)
    top = everyone[:, 0].amax(dim=0)
    sums = (everyone[:, 1] * (everyone[:, 0] - top).exp()).sum(dim=0)
    return top + sums.log(), everyone[:, 2].sum(dim=0), everyone[:, 3].sum(dim=0)


def _row_functions(x: Tensor) -> Any:
    """`row_statistics` and `row_gradients`, or the kernels with the same contract."""
    if x.is_cuda:
        from interlace.kernels import softmax_rows as kernels  # needs Triton

        return kernels.row_statistics, kernels.row_gradients
    return row_statistics, row_gradients


def rows_at_a_time(vocab: int, count: int) -> int:
    """Rows in a piece: a power of two within `PIECE`, or all."""
    return min(max(count, 1), 1 << max(0, (PIECE // max(vocab, 1)).bit_length() - 1))


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
