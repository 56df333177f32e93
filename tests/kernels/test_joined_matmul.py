"""One product over neighbouring weights against one product for each: values, gradients, and when compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from interlace.kernels.joined_matmul import joined_matmul, neighbours

SIZES = (6, 2, 3)


def weights_of(apart: bool) -> list[torch.Tensor]:
    run = torch.randn(100 * sum(SIZES) + 7, generator=torch.Generator().manual_seed(0))
    found, at = [], 3
    for size in SIZES:
        found.append(run[at : at + size * 5].view(size, 5).detach().requires_grad_())
        at += size * 5 + apart
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_equals_separate_products(apart: bool) -> None:
    weights = weights_of(apart)
    assert neighbours(weights) is not apart
    x = torch.randn(2, 7, 5, requires_grad=True)
    grads = [torch.randn(2, 7, size) for size in SIZES]
    found = joined_matmul(x, weights)
    expected = [F.linear(x, weight) for weight in weights]
    ours = torch.autograd.grad(found, [x, *weights], grads)
    theirs = torch.autograd.grad(expected, [x, *weights], grads)
    for a, b in zip([*found, *ours], [*expected, *theirs], strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_neighbours_are_in_order_in_one_storage_and_whole() -> None:
    first, second, third = weights_of(False)
    assert neighbours([first])
    assert not neighbours([second, first])
    assert not neighbours([first, third])
    assert not neighbours([first, second.clone()])
    assert not neighbours([first, second.detach().T])


def test_the_graph_is_that_of_the_operator() -> None:
    """What `torch.compile` traces: one forward and one backward operator, whatever lies where."""
    x, weights = torch.randn(4, 5, requires_grad=True), weights_of(False)
    torch.library.opcheck(torch.ops.interlace.joined_matmul.default, (x, weights))


@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
def test_compiled(backend: str) -> None:
    weights, x = weights_of(False), torch.randn(4, 5, requires_grad=True)

    def made(x: torch.Tensor) -> torch.Tensor:
        q, k, v = joined_matmul(x, weights)
        return (q.sin().sum(dim=-1) * k.sum(dim=-1) + v.cos().sum(dim=-1)).sum()

    plain = torch.autograd.grad(made(x), [x, *weights])
    compiled = torch.autograd.grad(torch.compile(made, backend=backend, fullgraph=True)(x), [x, *weights])
    for a, b in zip(compiled, plain, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
