"""The poison of conftest.py works: a test that forgets to write an element would see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_floats_start_as_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 5, dtype=dtype)
    made = [
        torch.empty(3, 5, dtype=dtype),
        torch.empty_like(like),
        torch.empty_strided((3, 5), (1, 3), dtype=dtype),
        like.new_empty(3, 5),
        like.new_empty_strided((3, 5), (5, 1)),
    ]
    wide = torch.complex64 if dtype.is_complex else torch.float32
    assert all(tensor.dtype is dtype and tensor.to(wide).isnan().all() for tensor in made)
    assert not like.to(wide).isnan().any()


def test_integers_and_booleans_start_far_out() -> None:
    assert (torch.empty(7, dtype=torch.int64) == 2**63 - 1).all()
    assert (torch.empty(7, dtype=torch.uint8) == 255).all()
    assert torch.empty(7, dtype=torch.bool).all()


def test_parameters_and_meta_tensors_still_work() -> None:
    weight = torch.empty(2, 2, requires_grad=True)
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.empty(2, 2, device="meta").shape == (2, 2)
    assert not nn.Linear(3, 4).weight.isnan().any()


def test_ranks_are_poisoned_too(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("test_poison:fresh_memory", 2) == [["nan", "nan", "nan"]] * 2


def fresh_memory(world: Any) -> list[str]:
    return [str(value) for value in torch.empty(3).tolist()]
