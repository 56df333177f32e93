"""Optimizers over the flat main weights, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from interlace.config import TrainSection
from interlace.parallel.data import DataParallel
from interlace.parallel.norm import scale


def build(cfg: TrainSection, model: DataParallel) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or SGD; weight decay on matrices, none on norms and biases."""
    groups = model.parameter_groups(cfg.weight_decay)
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=cfg.learning_rate, momentum=cfg.momentum)
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=cfg.betas, eps=cfg.eps)


def state_keys(cfg: TrainSection) -> tuple[str, ...]:
    """What the optimizer keeps per element, by torch's own names."""
    if cfg.optimizer == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if cfg.momentum > 0 else ()


def learning_rate(cfg: TrainSection, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warmup, then the schedule down to `min_learning_rate`.

    "cosine": half a cosine (arXiv 1608.03983); "wsd": constant, then linear over the last `decay` steps, a fifth of
    all when 0 (arXiv 2404.06395); "constant".
    """
    peak, low = cfg.learning_rate, cfg.min_learning_rate
    if step < cfg.warmup:
        return peak * (step + 1) / cfg.warmup
    if cfg.lr_schedule == "cosine":
        done = (step - cfg.warmup) / max(1, steps - cfg.warmup)
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    if cfg.lr_schedule == "wsd":
        left = (steps - step) / decay_steps(cfg, steps)
        return low + (peak - low) * min(1.0, max(0.0, left))
    return peak


def decay_steps(cfg: TrainSection, steps: int) -> int:
    """How many of the last steps the rate falls in a line; 0 where the schedule has no such part."""
    return (cfg.decay or max(1, steps // 5)) if cfg.lr_schedule == "wsd" else 0


def update(
    optimizer: torch.optim.Optimizer,
    leaves: Sequence[torch.nn.Parameter],
    copies: Sequence[torch.Tensor] | None,
    rates: Sequence[float],
    factor: torch.Tensor | None,
) -> None:
    """Multiplies the gradients of some leaves by `factor`, updates these leaves and takes their gradients off.

    copies: where each leaf's new values also go, in the copy's dtype.  rates: learning rate of each group.  factor:
    0-d, on the device, nothing waits for it; None = 1.  Equals scaling all gradients and `optimizer.step()`, a part at
    a time; on a GPU AdamW is one kernel (`kernels.adamw`), with the state where torch's has it.
    """
    chosen = {id(leaf): place for place, leaf in enumerate(leaves)}
    groups = [
        {**group, "lr": rate, "params": [leaf for leaf in group["params"] if id(leaf) in chosen]}
        for group, rate in zip(optimizer.param_groups, rates, strict=True)
    ]
    if isinstance(optimizer, torch.optim.AdamW) and all(_fits_kernel(leaf) for leaf in leaves):
        for group in groups:
            for leaf in group["params"]:
                copy = None if copies is None else copies[chosen[id(leaf)]]
                _adamw(optimizer.state[leaf], leaf, group, factor, copy)
    else:
        if factor is not None:
            scale([leaf.grad for leaf in leaves if leaf.grad is not None], factor)
        before, optimizer.param_groups = optimizer.param_groups, groups
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = before
        for copy, leaf in zip(copies or (), leaves, strict=copies is not None):
            copy.copy_(leaf.detach())
    for leaf in leaves:
        leaf.grad = None


def _fits_kernel(leaf: torch.nn.Parameter) -> bool:
    return leaf.is_cuda and leaf.dtype == torch.float32 and leaf.grad is not None


def _adamw(
    state: dict[str, Any],
    leaf: torch.nn.Parameter,
    group: dict[str, Any],
    factor: torch.Tensor | None,
    copy: torch.Tensor | None,
) -> None:
    from interlace.kernels.adamw import adamw  # needs Triton

    if not state:
        state["step"] = torch.tensor(0.0)
        state |= {key: torch.zeros_like(leaf, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
    state["step"] += 1
    assert leaf.grad is not None
    adamw(
        leaf.detach(),
        state["exp_avg"],
        state["exp_avg_sq"],
        leaf.grad,
        step=int(state["step"]),
        rate=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        decay=group["weight_decay"],
        factor=factor,
        copy=copy,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
