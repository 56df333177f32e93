"""Mixture of experts on one device: a router picks k of X gated MLPs for each token; one more may see every token.

    y = sum over the k chosen (`models.router`) of weight_e * down_e(silu(gate_e(x)) * up_e(x))
        [+ shared(x), or sigmoid(shared_gate(x)) * shared(x)]

Tokens are sorted by expert, so that each expert is one product over adjacent rows; the way back is a gather with the
inverse order and a sum over k, so that no two threads ever add to the same element and the result has the same bits
each time.  An expert without tokens gets gradients that are exactly zero, not none.

No choice is dropped, unless `capacity_factor` gives experts a limit; a dropped one adds nothing, and the weights of the
token's other choices stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace import permute
from interlace.config import ModelConfig
from interlace.models import router
from interlace.models.layers import MLP, Context, Linear


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


class Dispatch(nn.Module):
    """`mix`: rows x_ND, their weights_Nk and experts_Nk, and the three weights, all of every expert -> what gives
    mixed_ND when it is called, once.

    Replaced where the experts are elsewhere: rows are then on their way until that call.

    drops: choices may have been dropped; such a one has weight 0 and X, which is no expert, as its number.
    """

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.drops = drops

    def forward(
        self, x_ND: Tensor, weights_Nk: Tensor, experts_Nk: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor
    ) -> Callable[[], Tensor]:
        return lambda: mix(x_ND, weights_Nk, experts_Nk, gate_XFD, up_XFD, down_XDF, self.drops)


class MoE(nn.Module):
    """x_BTD -> x_BTD.

    Hands the context how often each expert was chosen, and the parts of its losses that the configuration gives a
    coefficient.  `bias`, where there is one, is moved by `steer`, never by an optimizer.  Choices are dropped in
    training only.
    """

    bias: Tensor | None

    def __init__(self, cfg: ModelConfig, layer: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        new = {"device": device, "dtype": dtype}
        X, D, F_ = cfg.num_experts, cfg.hidden_size, cfg.expert_ffn_size
        self.rule = router.Rule.of(cfg)
        self.balanced, self.bounded = cfg.router_aux_loss > 0.0, cfg.router_z_loss > 0.0
        self.rate, self.fp32 = cfg.router_bias_rate, cfg.router_fp32
        self.layer = f"blocks.{layer}.moe"
        self.router = Linear(D, X, bias=False, **new)
        self.register_buffer("bias", torch.zeros(X, device=device) if cfg.router_bias else None)
        self.gate = Stacked(X, F_, D, **new)
        self.up = Stacked(X, F_, D, **new)
        self.down = Stacked(X, D, F_, **new)
        self.shared = MLP(cfg, **new, size=cfg.shared_ffn_size) if cfg.shared_ffn_size else None
        self.shared_gate = Linear(D, 1, bias=False, **new) if cfg.shared_gate else None
        self.balance = router.Balance()
        self.room = router.Room(self.rule.k, X, cfg.capacity_factor) if cfg.capacity_factor else None
        self.enter = Enter()
        self.dispatch = Dispatch(drops=self.room is not None)
        self.leave = Leave()

    @property
    def reads_logits(self) -> bool:
        """Whether a loss is made of the router's logits."""
        return self.balanced or self.bounded

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        own_BTD = x_BTD
        x_BTD, logits_BTX, own_BTX = self.enter(x_BTD, self._logits(x_BTD), context)
        weights_BTk, experts_BTk, scores_BTX = router.route(logits_BTX, self.rule, self.bias)
        kept_BTk = self.room(experts_BTk) if self.room is not None and self.training else None
        load_BX = router.load(experts_BTk, logits_BTX.shape[-1], context.counted_BT)
        losses_2B = None
        if self.reads_logits:  # again when the block runs again: as many tensors are saved then
            own_scores_BTX = scores_BTX if own_BTX is logits_BTX else router.scores(own_BTX, self.rule)
            losses_2B = self._losses(load_BX, own_BTX, own_scores_BTX, context.counted_BT)
        self.tell(context, _with_dropped(load_BX, kept_BTk, context.counted_BT), losses_2B)
        if kept_BTk is not None:
            weights_BTk = weights_BTk.masked_fill(~kept_BTk, 0.0)
            experts_BTk = experts_BTk.masked_fill(~kept_BTk, logits_BTX.shape[-1])
        mixed = self.dispatch(
            x_BTD.flatten(0, 1),
            weights_BTk.flatten(0, 1),
            experts_BTk.flatten(0, 1),
            self.gate.weight,
            self.up.weight,
            self.down.weight,
        )
        beside_BTD = None if self.shared is None else self._shared(self.shared, own_BTD, context)
        mixed_BTD: Tensor = self.leave(mixed().view_as(x_BTD))
        return mixed_BTD if beside_BTD is None else mixed_BTD + beside_BTD

    def tell(self, context: Context, load_Y: Tensor, losses_2B: Tensor | None) -> None:
        """Hands on what `Routed` holds; outside of what is compiled, where a second run, from which nobody takes it,
        would be a graph without the losses, that saves fewer tensors than the first."""
        context.add_routed(self.layer, load_Y, losses_2B)

    def _logits(self, x_BTD: Tensor) -> Tensor:
        if not self.fp32:
            logits_BTX: Tensor = self.router(x_BTD)
            return logits_BTX
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        return F.linear(x_BTD.to(wide), self.router.weight.to(wide))

    def _shared(self, shared: nn.Module, x_BTD: Tensor, context: Context) -> Tensor:
        made_BTD: Tensor = shared(x_BTD, context)
        return made_BTD if self.shared_gate is None else made_BTD * self.shared_gate(x_BTD).sigmoid()

    def _losses(self, load_BX: Tensor, logits_BTX: Tensor, scores_BTX: Tensor, counted_BT: Tensor | None) -> Tensor:
        """Of each sequence the balance loss, of the choices that the scores alone would make, and the z-loss."""
        balance_B = z_B = load_BX.new_zeros(len(load_BX))
        if self.balanced:
            if self.bias is not None:
                load_BX = router.load(router.choose(scores_BTX, self.rule), load_BX.shape[1], counted_BT)
            balance_B = self.balance(load_BX, router.mass(scores_BTX, self.rule, counted_BT), self.rule.k)
        if self.bounded:
            z_B = router.z_loss(logits_BTX, counted_BT)
        return torch.stack([balance_B, z_B])

    @torch.no_grad()
    def steer(self, load_X: Tensor) -> None:
        """Moves the bias of each expert by a fixed step towards the mean load, once a step of the optimizer.

        load_X: how often each expert was chosen in the whole global batch, integers: so every cut of it, and every
        rank, makes the same bias.  Without a bias, or without any choice, nothing changes.
        """
        if self.bias is not None:
            above_X = load_X * len(load_X) - load_X.sum()
            self.bias.sub_(self.rate * above_X.sign().to(self.bias.dtype))


def _with_dropped(load_BX: Tensor, kept_BTk: Tensor | None, counted_BT: Tensor | None) -> Tensor:
    """Choices of each expert, and last how many of them all were dropped, of the tokens that count: int64 [X + 1]."""
    dropped_1 = load_BX.new_zeros(1)
    if kept_BTk is not None:
        dropped_BT = (~kept_BTk).sum(dim=-1)
        dropped_1 = (dropped_BT if counted_BT is None else dropped_BT * counted_BT).sum()[None]
    return torch.cat([load_BX.long().sum(dim=0), dropped_1.long()])


def mix(
    x_ND: Tensor,
    weights_Nk: Tensor,
    experts_Nk: Tensor,
    gate_XFD: Tensor,
    up_XFD: Tensor,
    down_XDF: Tensor,
    drops: bool = False,
) -> Tensor:
    """The weighted sum of what its k experts make of each token: [N D], in the dtype of x.

    drops: some choices are none, with weight 0 and the number X; no expert computes them.
    """
    k, X = experts_Nk.shape[1], len(gate_XFD)
    chosen_R = experts_Nk.flatten()  # R = N k
    order_R, counts_X = permute.by_key(chosen_R, X)
    inverse_R = permute.inverse(order_R)
    rows_RD = permute.repeated(x_ND, k, order_R, inverse_R)
    if not drops:
        made_RD = experts(rows_RD, counts_X, gate_XFD, up_XFD, down_XDF)
    else:  # they stand last, where a grouped product leaves output and gradient unwritten
        none_R1 = (chosen_R == X).index_select(0, order_R)[:, None]
        made_RD = experts(rows_RD.masked_fill(none_R1, 0.0), counts_X, gate_XFD, up_XFD, down_XDF)
        made_RD = made_RD.masked_fill(none_R1, 0.0)
    made_NkD = permute.permuted(made_RD, inverse_R, order_R).unflatten(0, (-1, k))
    return permute.total(made_NkD * weights_Nk[..., None]).to(x_ND.dtype)


def experts(rows_RD: Tensor, counts_X: Tensor, gate_XFD: Tensor, up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """Each expert's gated MLP over its own rows, which stand together in the order of experts: [R D].

    Rows beyond the sum of the counts belong to none, and what stands in their place is not to be read.  bf16 on CUDA
    takes PyTorch's grouped product, which reads the counts where they are; otherwise a product per expert.
    """
    D, F_ = rows_RD.shape[1], gate_XFD.shape[1]
    if rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and D % 8 == 0 and F_ % 8 == 0:  # rows of 16 bytes
        ends_X = counts_X.cumsum(0).to(torch.int32)
        gated = F.silu(F.grouped_mm(rows_RD, gate_XFD.mT, offs=ends_X))
        return F.grouped_mm(gated * F.grouped_mm(rows_RD, up_XFD.mT, offs=ends_X), down_XDF.mT, offs=ends_X)
    sizes = counts_X.tolist()
    *own, rest_RD = rows_RD.split([*sizes, len(rows_RD) - sum(sizes)])
    parts = zip(own, gate_XFD.unbind(), up_XFD.unbind(), down_XDF.unbind(), strict=True)
    made = [F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts]
    return torch.cat([*made, rest_RD] if len(rest_RD) else made)
