"""Latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of a few features a position.

    q = q(q_a_norm(q_a(x)))                      [H E], or q(x) where queries have no rank of their own
    latent, r = kv_a(x);  k_h, v_h = kv(kv_a_norm(latent))                         for each head h
    out = out(attention([rotate(q_h: first R), rest], [rotate(r), k_h], v_h))

The R features that turn stand first in a head, and those of the key are one run for all heads.  In Hugging Face weights
they stand last and pair neighbours; `models.weights` puts their rows into this order.

A value has fewer features than a key.  It gets zeros behind it and the output is cut, which is exact, so that every
kernel and every exchange of `cp` sees heads of one size.  Scores are scaled by E^-0.5, and where `rope_scaling` has
`mscale_all_dim`, by the square of what that makes (arXiv 2309.00071, section 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.config import ModelConfig
from interlace.models.attention import AttentionCore
from interlace.models.layers import Context, Linear, rotate, score_scale

EPS = 1e-6  # of the norms of latents: in the published models, whatever the eps of their other norms


class Spread(nn.Module):
    """What every head reads, as it is.  A module of its own so that it can be replaced where heads are elsewhere."""

    def forward(self, parts: Sequence[Tensor], context: Context) -> Sequence[Tensor]:
        return parts


class LatentAttention(nn.Module):
    """Latent attention with its projections: x_BTD -> x_BTD.

    The number of heads is read from what the projections return, so a projection may hold only some of them.
    """

    def __init__(self, cfg: ModelConfig, layer: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        new = {"device": device, "dtype": dtype}
        hidden, heads = cfg.hidden_size, cfg.num_heads
        self.head_dim, self.turning, self.value_dim = cfg.head_dim, cfg.rotary_dim, cfg.value_size
        self.kv_rank, self.scale = cfg.kv_rank, score_scale(cfg)
        self.q_a = Linear(hidden, cfg.q_rank, bias=False, **new) if cfg.q_rank else None
        self.q_a_norm = nn.RMSNorm(cfg.q_rank, eps=EPS, **new) if cfg.q_rank else None
        self.q = Linear(cfg.q_rank or hidden, heads * cfg.head_dim, bias=False, **new)
        self.kv_a = Linear(hidden, cfg.kv_rank + cfg.rotary_dim, bias=False, **new)
        self.kv_a_norm = nn.RMSNorm(cfg.kv_rank, eps=EPS, **new)
        self.kv = Linear(cfg.kv_rank, heads * (cfg.head_dim - cfg.rotary_dim + cfg.value_size), bias=False, **new)
        self.sinks = nn.Parameter(torch.empty(heads, **new)) if cfg.attention_sinks else None
        self.spread = Spread()
        self.core = AttentionCore(cfg.window(layer), cfg.attention_dropout, f"blocks.{layer}.attention.core")
        self.out = Linear(heads * cfg.value_size, hidden, bias=cfg.out_bias, **new)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        batch = len(context.samples_B)
        latent, shared = self.kv_a(x_BTD).split((self.kv_rank, self.turning), dim=-1)
        narrow = x_BTD if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x_BTD))
        narrow, latent, shared = self.spread((narrow, self.kv_a_norm(latent), shared), context)
        q_BTHE = rotate(self._heads(self.q(narrow), batch, self.head_dim), context.rotary)
        if self.scale != 1.0:
            q_BTHE = q_BTHE * self.scale
        shared_BT1R = rotate(shared.reshape(batch, -1, 1, self.turning), context.rotary)
        out_BTHV = self.attend(q_BTHE, latent.reshape(batch, -1, self.kv_rank), shared_BT1R, context)
        return self.out(out_BTHV.flatten(2))

    def attend(self, q_BTHE: Tensor, latent_BTC: Tensor, shared_BT1R: Tensor, context: Context) -> Tensor:
        """Attention of turned and scaled queries: [B T H V].  Replaced where positions are kept."""
        k_BTHE, v_BTHE = self.keys_and_values(latent_BTC, shared_BT1R)
        out_BTHE = self.core(q_BTHE, k_BTHE, v_BTHE, context, self.sinks)
        return out_BTHE[..., : self.value_dim]

    def keys_and_values(self, latent_BTC: Tensor, shared_BT1R: Tensor) -> tuple[Tensor, Tensor]:
        """Of every head, both of E features."""
        own = self.head_dim - self.turning  # features of a key that are its head's
        made_BTHM = self._heads(self.kv(latent_BTC), len(latent_BTC), own + self.value_dim)
        k_BTHM, v_BTHV = made_BTHM.split((own, self.value_dim), dim=-1)
        k_BTHE = torch.cat((shared_BT1R.expand(-1, -1, k_BTHM.shape[2], -1), k_BTHM), dim=-1)
        return k_BTHE, F.pad(v_BTHV, (0, self.head_dim - self.value_dim))

    def attend_to_latents(self, q_BTHE: Tensor, kept_BSM: Tensor, mask_B1TS: Tensor) -> Tensor:
        """The same, of positions of which the R features of the key that turned, and the latent, are kept: [B T H V].

        No key and no value is made of them: what `kv` does to a latent is done to queries and outputs.  Scores are in
        memory, so it is for a few queries.
        """
        weight_HMC = self.kv.weight.view(-1, self.head_dim - self.turning + self.value_dim, self.kv_rank)
        of_k_HMC, of_v_HVC = weight_HMC.split((self.head_dim - self.turning, self.value_dim), dim=1)
        turned, rest = q_BTHE.split((self.turning, self.head_dim - self.turning), dim=-1)
        q_BTHM = torch.cat((turned, torch.einsum("bthm,hmc->bthc", rest, of_k_HMC)), dim=-1)
        scores_BHTS = torch.einsum("bthm,bsm->bhts", q_BTHM, kept_BSM) * self.head_dim**-0.5
        scores_BHTS = scores_BHTS.masked_fill(~mask_B1TS, float("-inf"))
        if self.sinks is not None:
            column = self.sinks[:, None, None].expand(*scores_BHTS.shape[:3], 1)
            scores_BHTS = torch.cat((scores_BHTS, column), dim=3)
        weights_BHTS = scores_BHTS.softmax(dim=-1)[..., : kept_BSM.shape[1]]
        seen_BTHC = torch.einsum("bhts,bsc->bthc", weights_BHTS, kept_BSM[..., self.turning :])
        return torch.einsum("bthc,hvc->bthv", seen_BTHC, of_v_HVC)

    def _heads(self, x: Tensor, batch: int, size: int) -> Tensor:
        return x.view(batch, -1, x.shape[-1] // size, size)
