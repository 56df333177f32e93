"""Which experts a token visits and with what weight, what a router's losses are made of, and how full an expert gets.

    scores = softmax(logits) or sigmoid(logits);  chosen = the k largest of scores + bias
    weights = scores of the chosen [/ their sum] * scale

The bias only chooses; no gradient reaches it (arXiv 2412.19437, section 2.1.2).  Everything here is fp32 (fp64 of
fp64 logits) and counts tokens alike wherever they are: sums over sequences and over tokens do not depend on how a batch
is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from interlace.config import ModelConfig


@dataclass(frozen=True)
class Rule:
    """How k experts are chosen.  normalise: the weights of a token sum to `scale`; groups: experts are so many runs of
    neighbours, of which the best `top_groups` are open to a token."""

    k: int
    normalise: bool = True
    scores: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    @classmethod
    def of(cls, cfg: ModelConfig) -> Rule:
        return cls(
            cfg.experts_per_token,
            cfg.norm_topk,
            cfg.router_scores,
            cfg.router_groups,
            cfg.router_top_groups,
            cfg.router_scale,
        )


def route(logits_BTX: Tensor, rule: Rule, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [B T k] of the chosen experts, their numbers [B T k], and all scores [B T X]; fp32."""
    scores_BTX = scores(logits_BTX, rule)
    experts_BTk = choose(scores_BTX, rule, bias_X)
    weights_BTk = scores_BTX.gather(-1, experts_BTk)
    if rule.normalise:
        total_BT1 = weights_BTk.sum(dim=-1, keepdim=True)
        weights_BTk = weights_BTk / (total_BT1 + 1e-20 if rule.scores == "sigmoid" else total_BT1)  # all may be 0
    return weights_BTk * rule.scale if rule.scale != 1.0 else weights_BTk, experts_BTk, scores_BTX


def scores(logits_BTX: Tensor, rule: Rule) -> Tensor:
    """Between 0 and 1, fp32 or wider [B T X]."""
    wide = torch.promote_types(logits_BTX.dtype, torch.float32)
    if rule.scores == "sigmoid":
        return logits_BTX.to(wide).sigmoid()
    return logits_BTX.softmax(dim=-1, dtype=wide)


@torch.no_grad()
def choose(scores_BTX: Tensor, rule: Rule, bias_X: Tensor | None = None) -> Tensor:
    """The k largest of scores + bias inside the best groups: [B T k], the largest first.

    A group is worth its two largest together for sigmoid scores, its largest for softmax (arXiv 2405.04434, section
    2.2.2, and 2412.19437).  What is closed is minus infinity, not 0: biased scores may lie below 0, and a closed expert
    at 0 would be chosen before them.
    """
    biased_BTX = scores_BTX if bias_X is None else scores_BTX + bias_X
    if rule.top_groups < rule.groups:
        grouped_BTGX = biased_BTX.unflatten(-1, (rule.groups, -1))
        best = min(2, grouped_BTGX.shape[-1]) if rule.scores == "sigmoid" else 1
        worth_BTG = grouped_BTGX.topk(best, dim=-1).values.sum(dim=-1)
        closed_BTG = torch.ones_like(worth_BTG, dtype=torch.bool)
        closed_BTG.scatter_(-1, worth_BTG.topk(rule.top_groups, dim=-1).indices, False)
        biased_BTX = grouped_BTGX.masked_fill(closed_BTG[..., None], float("-inf")).flatten(-2)
    return biased_BTX.topk(rule.k, dim=-1).indices


def load(experts_BTk: Tensor, num_experts: int, counted_BT: Tensor | None = None) -> Tensor:
    """How many tokens of each sequence chose each expert: fp32 [B X].  counted_BT: 1 for those that count, else 0."""
    chosen_BN = experts_BTk.flatten(1)
    ones_BN = torch.ones_like(chosen_BN, dtype=torch.float32)
    if counted_BT is not None:
        ones_BN = counted_BT.repeat_interleave(experts_BTk.shape[2], dim=1)
    return ones_BN.new_zeros(len(chosen_BN), num_experts).scatter_add_(1, chosen_BN, ones_BN)


def mass(scores_BTX: Tensor, rule: Rule, counted_BT: Tensor | None = None) -> Tensor:
    """Sum over the counted tokens of each sequence of the scores, made to sum to one for each token: fp32 [B X]."""
    if rule.scores == "sigmoid":
        scores_BTX = scores_BTX / (scores_BTX.sum(dim=-1, keepdim=True) + 1e-20)
    if counted_BT is None:
        return scores_BTX.sum(dim=1)
    return torch.matmul(counted_BT[:, None].to(scores_BTX.dtype), scores_BTX)[:, 0]


def balance_loss(load_BX: Tensor, mass_BX: Tensor, k: int) -> Tensor:
    """X * sum over experts of (share of the choices) * (mean probability), for each sequence: fp32 [B].

    1 where both are even (Fedus et al., arXiv 2101.03961, eq. 4-6, the share divided by k; for sigmoid scores arXiv
    2412.19437, eq. 17-20).  `load_BX` counts choices and `mass_BX` sums probabilities over the counted tokens of a
    sequence, k choices each; 0 without any.  It is taken per sequence, not per batch: then a sum over sequences is the
    same however they are cut into micro-batches and ranks.
    """
    choices_B = load_BX.sum(dim=1).clamp(min=1)
    return load_BX.shape[1] * k * (load_BX / choices_B[:, None] * (mass_BX / choices_B[:, None])).sum(dim=1)


def z_loss(logits_BTX: Tensor, counted_BT: Tensor | None = None) -> Tensor:
    """Sum over the counted tokens of each sequence of (log sum exp(logits))^2: fp32 [B] (arXiv 2202.08906, eq. 5)."""
    wide = torch.promote_types(logits_BTX.dtype, torch.float32)
    squares_BT = logits_BTX.to(wide).logsumexp(dim=-1).square()
    return (squares_BT if counted_BT is None else squares_BT * counted_BT).sum(dim=1)


class Balance(nn.Module):
    """`balance_loss`; replaced where not every position of a sequence is here."""

    def forward(self, load_BX: Tensor, mass_BX: Tensor, k: int) -> Tensor:
        return balance_loss(load_BX, mass_BX, k)


class Room(nn.Module):
    """Which choices find room: of each sequence an expert takes the first ceil(factor * T * k / X) that choose it.

    experts_BTk -> bool [B T k].  Counted per sequence, so that no cut of the batch changes what is dropped, and by
    position, so that no token is dropped for what comes after it.  Replaced where not every position is here.
    """

    def __init__(self, k: int, num_experts: int, factor: float) -> None:
        super().__init__()
        self.k, self.num_experts, self.factor = k, num_experts, factor

    def limit(self, length: int) -> int:
        """Choices that an expert takes of a sequence of `length` tokens."""
        return max(1, math.ceil(self.factor * length * self.k / self.num_experts - 1e-9))  # 1.1 * 10 is above 11

    def turns(self, experts_BTk: Tensor) -> Tensor:
        """How many tokens before it chose the same expert, for each choice: int64 [B T k]."""
        chosen_BN = experts_BTk.flatten(1)
        order_BN = chosen_BN.argsort(dim=1, stable=True)
        counts_BX = self.counts(experts_BTk)
        begins_BX = counts_BX.cumsum(dim=1) - counts_BX
        places_N = torch.arange(chosen_BN.shape[1], device=chosen_BN.device)
        turns_BN = places_N - begins_BX.gather(1, chosen_BN.gather(1, order_BN))
        return chosen_BN.scatter(1, order_BN, turns_BN).view_as(experts_BTk)  # every place is written

    def counts(self, experts_BTk: Tensor) -> Tensor:
        """Tokens of each sequence that chose each expert: int64 [B X]."""
        return load(experts_BTk, self.num_experts).long()

    def forward(self, experts_BTk: Tensor) -> Tensor:
        return self.turns(experts_BTk) < self.limit(experts_BTk.shape[1])
