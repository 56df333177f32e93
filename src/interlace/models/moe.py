"""Mixture of experts on one device: a router picks k of X gated MLPs for each token, no token is dropped.

    probabilities = softmax(router(x));  y = sum over the k largest of weight_e * down_e(silu(gate_e(x)) * up_e(x))

Tokens are sorted by expert, so that each expert is one product over adjacent rows; the way back is a gather with the
inverse order and a sum over k, so that no two threads ever add to the same element and the result has the same bits
each time.  An expert without tokens gets gradients that are exactly zero, not none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.config import ModelConfig
from interlace.models.layers import Context, Linear


def route(logits_BTX: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [B T k] of the chosen experts, their numbers [B T k], and all probabilities [B T X]; fp32.

    `normalise` makes the k weights of a token sum to one.
    """
    probabilities_BTX = logits_BTX.softmax(dim=-1, dtype=torch.float32)
    weights_BTk, experts_BTk = probabilities_BTX.topk(k, dim=-1)
    if normalise:
        weights_BTk = weights_BTk / weights_BTk.sum(dim=-1, keepdim=True)
    return weights_BTk, experts_BTk, probabilities_BTX


def load(experts_BTk: Tensor, num_experts: int) -> Tensor:
    """How many tokens of each sequence chose each expert: fp32 [B X]."""
    chosen_BN = experts_BTk.flatten(1)
    ones = torch.ones_like(chosen_BN, dtype=torch.float32)
    return ones.new_zeros(len(chosen_BN), num_experts).scatter_add_(1, chosen_BN, ones)


def balance_loss(load_BX: Tensor, mass_BX: Tensor, length: int, k: int) -> Tensor:
    """X * sum over experts of (share of the choices) * (mean probability), for each sequence: fp32 [B].

    1 where both are even (Fedus et al., arXiv 2101.03961, eq. 4-6, the share divided by k).  `load_BX` counts choices
    and `mass_BX` sums probabilities over the `length` tokens of a sequence.  It is taken per sequence, not per batch:
    then a sum over sequences is the same however they are cut into micro-batches and ranks.
    """
    return load_BX.shape[1] * (load_BX / (length * k) * (mass_BX / length)).sum(dim=1)


class Stacked(nn.Module):
    """The same matrix of every expert: weight [X N M]."""

    def __init__(self, num_experts: int, out_size: int, in_size: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_size, in_size, device=device, dtype=dtype))


class Enter(nn.Module):
    """Where tokens reach the experts: (x_BTD, logits_BTX) -> x_BTD and logits_BTX that the experts and their weights
    read, and the logits_BTX that the balance loss reads.  Replaced where not every position, or only a slice of every
    expert, is here."""

    def forward(self, x_BTD: Tensor, logits_BTX: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        return x_BTD, logits_BTX, logits_BTX


class Leave(nn.Module):
    """Where they come back: x_BTD -> x_BTD."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD


class Balance(nn.Module):
    """`balance_loss`; replaced where not every position of a sequence is here."""

    def forward(self, load_BX: Tensor, mass_BX: Tensor, length: int, k: int) -> Tensor:
        return balance_loss(load_BX, mass_BX, length, k)


class Dispatch(nn.Module):
    """`mix`: rows x_ND, their weights_Nk and experts_Nk, and the three weights, all of every expert -> mixed_ND.
    Replaced where the experts are elsewhere."""

    def forward(
        self, x_ND: Tensor, weights_Nk: Tensor, experts_Nk: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        return mix(x_ND, weights_Nk, experts_Nk, gate_XFD, up_XFD, down_XDF)


class MoE(nn.Module):
    """x_BTD -> x_BTD; hands its balance loss to the context when the configuration gives it a coefficient."""

    def __init__(self, cfg: ModelConfig, layer: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        new = {"device": device, "dtype": dtype}
        X, D, F_ = cfg.num_experts, cfg.hidden_size, cfg.expert_ffn_size
        self.k = cfg.experts_per_token
        self.normalise = cfg.norm_topk
        self.balanced = cfg.router_aux_loss > 0.0
        self.layer = f"blocks.{layer}.moe"
        self.router = Linear(D, X, bias=False, **new)
        self.gate = Stacked(X, F_, D, **new)
        self.up = Stacked(X, F_, D, **new)
        self.down = Stacked(X, D, F_, **new)
        self.balance = Balance()
        self.enter = Enter()
        self.dispatch = Dispatch()
        self.leave = Leave()

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD, logits_BTX, own_BTX = self.enter(x_BTD, self.router(x_BTD), context)
        weights_BTk, experts_BTk, probabilities_BTX = route(logits_BTX, self.k, self.normalise)
        if self.balanced:
            if own_BTX is not logits_BTX:
                probabilities_BTX = own_BTX.softmax(dim=-1, dtype=torch.float32)
            load_BX = load(experts_BTk, probabilities_BTX.shape[-1])
            mass_BX = probabilities_BTX.sum(dim=1)
            context.add_router_loss(self.layer, self.balance(load_BX, mass_BX, x_BTD.shape[1], self.k))
        mixed_ND = self.dispatch(
            x_BTD.flatten(0, 1),
            weights_BTk.flatten(0, 1),
            experts_BTk.flatten(0, 1),
            self.gate.weight,
            self.up.weight,
            self.down.weight,
        )
        return self.leave(mixed_ND.view_as(x_BTD))


def mix(
    x_ND: Tensor, weights_Nk: Tensor, experts_Nk: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor
) -> Tensor:
    """The weighted sum of what its k experts make of each token: [N D], in the dtype of x."""
    k = experts_Nk.shape[1]
    order = experts_Nk.flatten().argsort(stable=True)
    counts_X = torch.bincount(experts_Nk.flatten(), minlength=len(gate_XFD))
    rows_RD = x_ND.repeat_interleave(k, dim=0).index_select(0, order)  # R = N k rows; each is read once
    made_RD = experts(rows_RD, counts_X, gate_XFD, up_XFD, down_XDF)
    made_NkD = made_RD.index_select(0, order.argsort()).unflatten(0, (-1, k))
    return (made_NkD * weights_Nk[..., None]).sum(dim=1).to(x_ND.dtype)


def experts(rows_RD: Tensor, counts_X: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """Each expert's gated MLP over its own rows, which stand together in the order of experts: [R D].

    bf16 on CUDA takes PyTorch's grouped product, which reads the counts where they are; otherwise a product per expert.
    """
    D, F_ = rows_RD.shape[1], gate_XFD.shape[1]
    if rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and D % 8 == 0 and F_ % 8 == 0:  # rows of 16 bytes
        ends_X = counts_X.cumsum(0).to(torch.int32)
        gated = F.silu(F.grouped_mm(rows_RD, gate_XFD.mT, offs=ends_X))
        return F.grouped_mm(gated * F.grouped_mm(rows_RD, up_XFD.mT, offs=ends_X), down_XDF.mT, offs=ends_X)
    parts = zip(rows_RD.split(counts_X.tolist()), gate_XFD.unbind(), up_XFD.unbind(), down_XDF.unbind(), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts])
