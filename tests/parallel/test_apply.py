"""`interlace.parallelize` in a user's own loop."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
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
def test_a_module_without_shapes_is_told() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet \(a lazy module\); run the module once"):
        interlace.parallelize(nn.Sequential(nn.LazyLinear(3)))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [0, 2])
def test_frozen_later_is_left_alone_as_in_plain_pytorch(name: str, first: int) -> None:
    """A matrix beside others in one flat weight, and all biases; from step `first` on, whose momentum is not zero then.

    Thawed again they go on as in plain PyTorch, but for Adam's, which counts steps of the whole.
    """
    torch.manual_seed(0)  # of some weights Rprop keeps a whole bias for a step, where all its signs turn
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))
    model = interlace.parallelize(copy.deepcopy(plain), zero=2)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, plain)]
    chosen = ("2.weight", "0.bias", "2.bias", "4.bias")
    for step in range(7 if "adam" not in name else 5):
        for module in (model.module, plain):
            for key, parameter in module.named_parameters():
                parameter.requires_grad_(key not in chosen or not first <= step < 5)
        frozen = {key: model.state_dict()[key] for key in chosen}
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m(x).square().mean().backward()
            if m is model:
                assert len(dict(m.whole_gradients())) == (2 if first <= step < 5 else 6)
            optimizer.step()
            optimizer.zero_grad()
        found = model.state_dict()
        for key, value in plain.state_dict().items():
            assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6), (step, key)
            assert key not in frozen or torch.equal(found[key], frozen[key]) == (first <= step < 5), (step, key)


@pytest.mark.usefixtures("_alone")
def test_frozen_between_backward_and_step() -> None:
    """In plain PyTorch, too, a gradient that is there already is applied; here frozen is frozen from now on."""
    model = interlace.parallelize(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    before = model.state_dict()
    model(torch.ones(2, 5)).sum().backward()
    model.module[1].requires_grad_(False)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "0.bias"}


@pytest.mark.usefixtures("_alone")
def test_a_wrapped_module_is_let_go() -> None:
    from torch.optim import optimizer as of

    interlace.parallelize(nn.Linear(3, 2))  # the first one's hooks stay, for all
    hooks = len(of._global_optimizer_pre_hooks), len(of._global_optimizer_post_hooks)
    model = interlace.parallelize(nn.Linear(3, 2))
    model.postpone(functools.partial(lambda model, leaves, copies: model.settle(), model))  # holds the model
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert (len(of._global_optimizer_pre_hooks), len(of._global_optimizer_post_hooks)) == hooks


@pytest.mark.usefixtures("_alone")
def test_a_wrapped_module_may_go_during_the_step_of_another_s_optimizer() -> None:
    """Whenever garbage is collected: PyTorch is going over its hooks then."""
    from torch.optim import optimizer as of

    models = [interlace.parallelize(nn.Linear(3, 2)) for _ in range(2)]
    optimizer, gone = torch.optim.SGD(models[0].parameters()), weakref.ref(models[1])

    def collect(*_: Any) -> None:
        del models[1:]
        gc.collect()

    hook = of.register_optimizer_step_pre_hook(collect)
    of._global_optimizer_pre_hooks.move_to_end(hook.id, last=False)
    try:
        optimizer.step()
    finally:
        hook.remove()
    assert gone() is None


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
