"""Hooks on gradients: the module's own parameters show them this rank's part; those that nobody would call are told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interlace
from interlace.errors import ConfigError
from interlace.launch import leave


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    leave()


def half(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "of the tensor": lambda parameter: parameter.register_hook(lambda gradient: gradient * 0.5),
    "after its sum": lambda parameter: parameter.register_post_accumulate_grad_hook(half),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_hooks_set_before_are_called(way: Callable[[Tensor], Any], dtype: torch.dtype | None) -> None:
    plain = nn.Linear(3, 2, dtype=dtype)
    module = copy.deepcopy(plain)
    for each in (plain, module):
        way(each.weight)
    model = interlace.parallelize(module)
    for each in (plain, model):
        each(torch.ones(1, 3, dtype=dtype)).square().sum().backward()
    assert plain.weight.grad is not None
    assert torch.equal(dict(model.whole_gradients())["weight"], plain.weight.grad)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_hooks_on_what_an_optimizer_sees_are_refused(way: Callable[[Tensor], Any]) -> None:
    """An optimizer that steps in them would train nothing, and a clip would clip nothing."""
    model = interlace.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model(torch.ones(1, 3)).sum().backward()
    handle = way(next(iter(model.parameters())))
    with torch.no_grad():
        model(torch.ones(1, 3))
    with pytest.raises(
        ConfigError, match=r"^a hook on root\.decay of parameters\(\) would never be called.* use \.grad"
    ):
        model(torch.ones(1, 3))
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()


def test_hooks_set_after_wrapping_are_called_or_refused() -> None:
    model = interlace.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    seen = list[Tensor]()
    model.module[0].weight.register_hook(seen.append)
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(seen[0], dict(model.whole_gradients())["0.weight"])
    handle = WAYS["after its sum"](model.module[1].weight)
    with pytest.raises(ConfigError, match=r"^a hook on 1\.weight of the module itself, set after it was wrapped"):
        model(torch.ones(1, 3))
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()
