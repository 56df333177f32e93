"""Rows in another order: against index_select and bincount, and which operators a layer of experts runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.models.moe import mix
from interlace.permute import by_key, inverse, permuted, repeated, total


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(0, 2), (5, 1), (9, 8)])
def test_rows_repeated_and_added_up_again(rows: int, k: int, compiled: bool) -> None:
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, generator=made, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(rows * k, generator=made)
    weight = torch.randn(rows * k, 3, generator=made, dtype=torch.float64)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        rows_RD = repeated(x, k, order, inverse(order)) * weight[order]
        return total(permuted(rows_RD, inverse(order), order).unflatten(0, (-1, k)))

    run = torch.compile(there_and_back, backend="aot_eager") if compiled else there_and_back
    found, right = run(x), (x.repeat_interleave(k, dim=0) * weight).unflatten(0, (-1, k)).sum(dim=1)
    torch.testing.assert_close(found, right, rtol=1e-13, atol=1e-13)
    own, theirs = (torch.autograd.grad((y**3).sum(), x)[0] for y in (found, right))
    torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_a_total_is_rounded_once() -> None:
    x = torch.tensor([[[256.0]] + [[1.0]] * 7]).view(1, 8, 1).bfloat16()  # bf16 has 8 bits: 256 + 1 is 256 each time
    for run in (total, torch.compile(total, backend="aot_eager")):
        assert run(x).item() == torch.tensor(263.0).bfloat16().item() == 264.0


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
