"""Rows in another order: against index_select and bincount, and which operators a layer of experts runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.models.moe import mix
from interlace.permute import by_key, inverse, permuted


@pytest.mark.parametrize("rows", [0, 1, 7, 130])
def test_permuted_is_index_select(rows: int) -> None:
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, generator=made, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(rows, generator=made)
    weight = torch.randn(rows, 3, generator=made, dtype=torch.float64)
    found, right = permuted(x, order, inverse(order)), x.index_select(0, order)
    assert torch.equal(found, right)
    assert torch.equal(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, right)))
    assert torch.equal(inverse(order)[order], torch.arange(rows))


def test_permuted_has_second_derivatives() -> None:
    order = torch.randperm(5)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: permuted(x, order, inverse(order)) ** 3, x)


@pytest.mark.parametrize(("rows", "most"), [(0, 3), (1, 1), (50, 4), (50, 200), (300, 40_000)])
def test_by_key_is_a_stable_order_with_counts(rows: int, most: int) -> None:
    keys = torch.randint(0, most + 1, (rows,), generator=torch.Generator().manual_seed(rows + most))  # `most` is none
    order, counts = by_key(keys, most)
    assert torch.equal(order, keys.argsort(stable=True))
    assert torch.equal(counts, keys.bincount(minlength=most + 1)[:most])
    assert order.dtype == counts.dtype == torch.int64


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drops", [False, True])
def test_a_layer_of_experts_adds_no_row_into_place_and_counts_on_the_device(drops: bool) -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(9, 4, generator=made, requires_grad=True)
    experts = torch.randint(0, 3 + drops, (9, 2), generator=made)
    weights = torch.rand(9, 2, generator=made, requires_grad=True)
    gate, up, down = (torch.randn(3, *shape, generator=made, requires_grad=True) for shape in ((6, 4), (6, 4), (4, 6)))
    with Operators() as seen:
        mix(x, weights, experts, gate, up, down, drops).sum().backward()
    assert "index_select" in seen.names
    assert not {"index_add", "index_add_", "index_put", "_index_put_impl_", "bincount"} & seen.names
