"""`interlace.parallelize` in a user's own loop."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import interlace
from interlace.errors import ConfigError
from interlace.launch import leave


@pytest.fixture
def _alone() -> Iterator[None]:
    yield
    leave()


@pytest.mark.usefixtures("_alone")
def test_without_a_launcher_it_is_a_world_of_one() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain.load_state_dict(module.state_dict())
    model = interlace.parallelize(module, zero=3)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=1e-6), name
    assert model.group.size == 1


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_before_and_after(zero: int) -> None:
    """Frozen after it was wrapped: no gradient; thawed after: a refusal, as it would stay what it was."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    module[0].requires_grad_(False)
    model = interlace.parallelize(module, zero=zero)
    x = torch.randn(4, 5)
    model.requires_grad_(False)
    assert not model(x).requires_grad
    model.module[1].requires_grad_(True)
    model(x).square().sum().backward()
    found = dict(model.whole_gradients())
    assert sorted(found) == ["1.bias", "1.weight"]
    assert all(gradient.any() for gradient in found.values())
    model.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"0\.weight was frozen when its module was wrapped"):
        model(x)


@pytest.mark.usefixtures("_alone")
def test_an_optimizer_of_the_modules_own_parameters_is_refused() -> None:
    """Made before or after: its parameters have no gradients, and it would train nothing without a word."""
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    before = torch.optim.SGD(module.parameters(), lr=0.1)
    model = interlace.parallelize(module)
    mixed = torch.optim.AdamW([*other.parameters(), *module.parameters()])
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in (before, mixed):
        with pytest.raises(ConfigError, match=r"holds weight of the module itself.*of what parallelize returned"):
            optimizer.step()
    right = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    right.step()
    del model, right
    gc.collect()
    before.step()  # nobody watches any more


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_wrapped_module_is_not_copied(how: Callable[[Any], Any]) -> None:
    """A copy's hooks would be the original's: its gradients would arrive there, or nowhere."""
    with pytest.raises(ConfigError, match="cannot be copied or pickled; take its state_dict"):
        how(interlace.parallelize(nn.Linear(3, 2)))


def test_a_users_loop_trains_as_in_one_process(run_ranks: Callable[..., list[Any]]) -> None:
    found = run_ranks("rank_functions_modules:own_loop", 3)
    assert found == [[3, rank, "cpu"] for rank in range(3)]


def test_hybrid_sharding_trains_as_in_one_process(run_ranks: Callable[..., list[Any]]) -> None:
    found = run_ranks("rank_functions_modules:hybrid_loop", 4)
    assert {said for said, _ in found} == {"zero=0 repeats everything on every rank of shard=2; use zero 1, 2 or 3."}
    end: dict[str, int] = {}
    sizes = {name: numel for _, owned in found for name, _, _, numel in owned}
    for name, start, stop, _ in sorted(tuple(piece) for _, owned in found for piece in owned):
        assert start == end.get(name, 0), f"{name}: not owned once"
        end[name] = stop
    assert end == sizes
