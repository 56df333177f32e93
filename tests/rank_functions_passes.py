"""What the ranks of tests/parallel run: every order of forward, backward, evaluation and update, and optimizers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interlace.launch import World
from interlace.parallel.data import DataParallel
from rank_functions_data import (
    Descent,
    Odd,
    agreed,
    batch,
    check,
    compare_steps,
    different,
    gradients,
    mean_loss,
    reference_step,
    seeded,
    split_step,
    trained,
    whole_group,
)  # fmt: skip

# --- the order of calls ---------------------------------------------------------------------------------------------


def passes(world: World) -> None:
    """Every way of calling forward and backward gives what plain PyTorch gives."""
    group = whole_group(world)
    for zero in range(4):
        for scenario in (
            twice_without_zero_grad, zero_grad_in_between, discarded, evaluated_in_between, dropped_forward,
            failed_forward, failed_backward, evaluated_before_backward, two_forwards, changed_by_hand, inference_first,
            frozen_for_a_step,
        ):  # fmt: skip
            reference = seeded(0, lambda: Odd(3))
            model = DataParallel(seeded(0, lambda: Odd(3)), group, zero=zero)
            scenario(model, reference)
            check(different(model.whole_gradients(), gradients(reference)), scenario.__name__, zero)
            for optimizer in (Descent(m.parameters()) for m in (model, reference)):
                optimizer.step()
                optimizer.zero_grad()
            check(compare_steps(model, trained(reference, group.size, 1)), scenario.__name__, zero)
            assert agreed(model)


def twice_without_zero_grad(model: DataParallel, reference: nn.Module) -> None:
    """Gradients add up over reductions, also when the caller has put a tensor of its own in their place."""
    for step in range(3):
        reference_step(reference, step, model.group.size, 1)
        split_step(model, step, 1)
    for m in (model, reference):
        for parameter in m.parameters():
            if parameter.grad is not None:
                parameter.grad = 0.5 * parameter.grad
    reference_step(reference, 5, model.group.size, 2)
    split_step(model, 5, 2)


def zero_grad_in_between(model: DataParallel, reference: nn.Module) -> None:
    split_step(model, 7, 2)
    model.zero_grad(set_to_none=False)
    reference_step(reference, 0, model.group.size, 1)
    split_step(model, 0, 1)


def discarded(model: DataParallel, reference: nn.Module) -> None:
    """A micro-batch with a bad loss is dropped by zero_grad, as in PyTorch."""
    with model.no_sync():
        tokens, labels = batch(7, model.group.rank)
        mean_loss(model(tokens), labels).backward()
    Descent(model.leaves()).zero_grad()
    reference_step(reference, 0, model.group.size, 2)
    split_step(model, 0, 2)


class Unseen(Descent):
    """Leaves version counters alone, as torch's fused optimizers do."""

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data.sub_(self.lr * parameter.grad)


def evaluated_in_between(model: DataParallel, reference: nn.Module) -> None:
    """Between backward and the update, and after it: with new weights."""
    for m, step in ((model, split_step), (reference, reference_step)):
        step(m, 0, *((1,) if m is model else (model.group.size, 1)))
    for make in (Descent, Unseen):
        tokens, _ = batch(8, 0)
        outputs = []
        for m in (model, reference):
            m.eval()
            optimizer = make(m.parameters(), lr=0.01)
            with torch.no_grad():
                outputs.append(m(tokens))
            optimizer.step()
            with torch.inference_mode():
                outputs.append(m(tokens).clone())
            m.train()
        for ours, theirs in zip(outputs[:2], outputs[2:], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
        assert not torch.allclose(outputs[0], outputs[1], atol=1e-4)
    model.zero_grad()
    reference.zero_grad()
    reference_step(reference, 1, model.group.size, 1)
    split_step(model, 1, 1)


def dropped_forward(model: DataParallel, reference: nn.Module) -> None:
    model(batch(5, model.group.rank)[0])
    kept = model(batch(6, model.group.rank)[0])
    reference_step(reference, 0, model.group.size, 1)
    split_step(model, 0, 1)
    del kept


class Broken(Exception):
    pass


@contextmanager
def broken(module: nn.Module, in_backward: bool) -> Iterator[None]:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if not in_backward:
                raise Broken
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise Broken

    hook = module.register_forward_hook(lambda module, args, output: Fail.apply(output))
    try:
        yield
        raise AssertionError("nothing broke")
    except Broken:
        pass
    finally:
        hook.remove()


def failed_forward(model: DataParallel, reference: nn.Module) -> None:
    with broken(model.module.blocks[1].down, False):
        split_step(model, 5, 1)
    reference_step(reference, 0, model.group.size, 2)
    split_step(model, 0, 2)


def failed_backward(model: DataParallel, reference: nn.Module) -> None:
    with broken(model.module.blocks[1].down, True):
        split_step(model, 5, 2)
    reference_step(reference, 0, model.group.size, 2)
    split_step(model, 0, 2)


def evaluated_before_backward(model: DataParallel, reference: nn.Module) -> None:
    tokens, labels = batch(0, model.group.rank)
    loss = mean_loss(model(tokens, model.group.rank == 0), labels)
    with torch.no_grad():
        model(batch(1, 0)[0])
    loss.backward()
    reference_step(reference, 0, model.group.size, 1)


def two_forwards(model: DataParallel, reference: nn.Module) -> None:
    """Two graphs, then two backward passes, the later graph first."""
    losses = []
    for part in range(2):
        tokens, labels = batch(0, model.group.rank, part)
        losses.append(mean_loss(model(tokens, model.group.rank == 0), labels) / 2)
    losses[1].backward()
    losses[0].backward()
    reference_step(reference, 0, model.group.size, 2)


def changed_by_hand(model: DataParallel, reference: nn.Module) -> None:
    split_step(model, 0, 1)
    model.zero_grad()
    model(batch(0, 0)[0])
    with torch.no_grad():
        for m in (model, reference):
            for parameter in m.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.25)
    reference_step(reference, 0, model.group.size, 1)
    split_step(model, 0, 1)
    model.zero_grad()
    reference.zero_grad()
    for m in (model, reference):
        for parameter in m.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(0.75)
    model.refresh()
    reference_step(reference, 0, model.group.size, 1)
    split_step(model, 0, 1)


def inference_first(model: DataParallel, reference: nn.Module) -> None:
    tokens, _ = batch(1, 0)
    with torch.inference_mode():
        assert torch.allclose(model(tokens), reference(tokens), atol=1e-10)
    reference_step(reference, 0, model.group.size, 1)
    split_step(model, 0, 1)


def frozen_for_a_step(model: DataParallel, reference: nn.Module) -> None:
    """A block's leaves take no gradient for a while: an optimizer leaves them alone, with its decay and momentum."""
    frozen = [
        [p for name, p in m.named_parameters() if name.startswith("blocks.1.") and p.requires_grad]
        for m in (model, reference)
    ]
    assert all(frozen)
    for parameter in itertools.chain(*frozen):
        parameter.requires_grad_(False)
    for parts in (1, 2):
        reference_step(reference, 4, model.group.size, parts)
        split_step(model, 4, parts)
    assert all(parameter.grad is None for parameter in itertools.chain(*frozen))
    for parameter in itertools.chain(*frozen):
        parameter.requires_grad_(True)


def optimizers(world: World) -> None:
    group = whole_group(world)
    for kind, options in (
        (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "foreach": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "foreach": False}),
    ):
        make = functools.partial(kind, **options)
        expected = trained(seeded(0, lambda: Used(2)), group.size, make=make)
        for zero in (0, 3):
            model = DataParallel(seeded(0, lambda: Used(2)), group, zero=zero)
            check(compare_steps(model, expected), zero, kind, options)
            leaves = model.leaves()
            assert list(model.parameters()) == leaves
            assert [leaf for _, leaf in model.named_parameters()] == leaves
            assert len({name for name, _ in model.named_parameters()}) == len(leaves)
            assert sum(len(group["params"]) for group in model.parameter_groups(0.1)) == len(leaves)


class Used(Odd):
    """`Odd` with every layer used, since an optimizer with decay moves flat parameters that have no gradient."""

    def forward(self, tokens: Tensor, first: bool = False) -> Tensor:
        out = super().forward(tokens, True)
        extra = self.unused.weight.sum() + self.unused.bias.sum()
        return out * (1.0 + 0.01 * extra)

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        for block in self.blocks:
            del block.unused
