"""Importing this makes every tensor that torch hands out uninitialised hold values nobody can mistake for a result.

Floats and complex numbers start as NaN, integers as the largest of their type, booleans as True, so that an output
element that was never written shows in any comparison, on every run, instead of once in a while.  The parent's tests
get this by the fixture in conftest.py, the rank processes because their fork server imports this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def poisoned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`create`, its result filled."""

    @functools.wraps(create)
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = create(*args, **kwargs)
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
            return tensor
        with torch.no_grad():
            return tensor.fill_(worst(tensor.dtype))

    filled.is_poisoned = True  # type: ignore[attr-defined]
    return filled


def worst(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def replacements() -> Iterator[tuple[Any, str, Callable[..., torch.Tensor]]]:
    """(owner, attribute, poisoned function) of each way to get uninitialised memory that is not yet poisoned."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        create = getattr(owner, name)
        if not hasattr(create, "is_poisoned"):
            yield owner, name, poisoned(create)


def install() -> None:
    """Poisons this process for good; for the fork server of the ranks."""
    torch.set_num_threads(1)
    for owner, name, function in replacements():
        setattr(owner, name, function)
