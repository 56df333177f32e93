"""Parameters frozen after their module was wrapped: no step of an optimizer changes them, or its state of them.

Equals, in plain PyTorch, a parameter whose gradient is None.  But here it shares a flat main weight with others that
are trained, and an optimizer that sees zeros as its gradient still lets it decay and go on by its momentum.  So its
elements, and those of the optimizer's state, are put back after the step.  A flat main weight that is frozen as a whole
gets no gradient in the first place (`Flat.frozen`), and costs nothing.

One thing differs: the optimizer counts its steps for the whole flat main weight.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from interlace.errors import ConfigError
from interlace.parallel.flat import Flat


@dataclass
class _Kept:
    """Elements `place` of a leaf and of the state that an optimizer has for it, as they were before its step."""

    leaf: nn.Parameter
    place: slice
    values: torch.Tensor
    state: dict[str, torch.Tensor]
    decays: bool


_RUNS: weakref.WeakSet[Flat] = weakref.WeakSet()
_KEPT: dict[int, list[_Kept]] = {}  # by optimizer, while it makes a step


def keep(flats: Iterable[Flat]) -> None:
    """Watches every optimizer's steps for the leaves of these runs, as long as the runs live."""
    _watch()
    _RUNS.update(flats)


def refuse_thawed(flats: Iterable[Flat]) -> None:
    """Parameters frozen before have neither main weights nor gradients: what was thawed since would not be trained."""
    for flat in flats:
        for member in [] if flat.trainable else flat.members:
            if member.parameter.requires_grad:
                raise ConfigError(
                    f"{member.name} was frozen when its module was wrapped and is not now; freeze it again, or let "
                    "it require gradients before parallelize and freeze it after."
                )


@functools.cache
def _watch() -> None:
    """Once, and for good: PyTorch goes over its hooks while a collection of garbage might take one away."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    places = {id(leaf): (flat, start) for flat in list(_RUNS) for leaf, start in flat.leaves_from}
    kept = _KEPT[id(optimizer)] = []
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            if id(leaf) not in places:
                continue
            flat, start = places[id(leaf)]
            slices, whole = flat.frozen(leaf, start)
            for place in [] if whole and leaf.grad is None else slices:
                state = {name: value[place].clone() for name, value in _state(optimizer, leaf).items()}
                values, decays = leaf.detach()[place].clone(), bool(group.get("weight_decay"))
                kept.append(_Kept(leaf, place, values, state, decays))


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for each in _KEPT.pop(id(optimizer), ()):
        each.leaf.detach()[each.place].copy_(each.values)
        for name, value in _state(optimizer, each.leaf).items():
            if name in each.state:
                value[each.place].copy_(each.state[name])
            elif each.decays:  # made in this step, of no gradient but perhaps of weight decay
                value[each.place].zero_()


def _state(optimizer: torch.optim.Optimizer, leaf: nn.Parameter) -> dict[str, torch.Tensor]:
    """What an optimizer keeps for every element of a leaf."""
    state = optimizer.state.get(leaf, {})
    return {
        name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == leaf.shape
    }
