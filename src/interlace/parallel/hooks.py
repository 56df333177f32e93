"""Hooks on gradients that a wrapped module would never call, or would call without a gradient: refused by name.

In one process a hook of a parameter is called when autograd has its gradient.  Here that is so for the module's own
parameters, with this rank's part of the sum; the main weights that an optimizer sees get theirs from other ranks, after
autograd is through.  So what clips, logs or steps in a hook on `parameters()` would not, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from interlace.errors import ConfigError
from interlace.parallel.flat import Flat

OWN = 1  # hooks of a leaf that are its run's (`Flat.watch_leaves`)


def refuse_missed(flats: Iterable[Flat]) -> None:
    """`ConfigError` for a hook on main weights, or one on a parameter that comes after its gradient was taken."""
    for flat in flats:
        for leaf in flat.leaves:
            if len(leaf._backward_hooks or ()) > OWN or leaf._post_accumulate_grad_hooks:
                label: str = leaf.label  # type: ignore[attr-defined]
                raise ConfigError(
                    f"a hook on {label} of parameters() would never be called, since its gradient comes from the other "
                    "ranks and not from autograd; take it off, and use .grad after backward() has returned."
                )
        for member in flat.members:
            if next(reversed(member.parameter._post_accumulate_grad_hooks or ()), member.ready) != member.ready:
                raise ConfigError(
                    f"a hook on {member.name} of the module itself, set after it was wrapped, would find no gradient, "
                    "which has left for the other ranks by then; set it before parallelize, where it sees this rank's "
                    "part, or use .grad of parameters() after backward() has returned."
                )


def refuse_lost(module: nn.Module) -> None:
    """`ConfigError` for a hook on a parameter whose place a slice of it will take."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{name} has a hook, which its slice under tp would not have; take it off, and use .grad of the "
                "parameters() of what parallelize returns, after backward() has returned."
            )
