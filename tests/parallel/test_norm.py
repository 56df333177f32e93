"""The global norm counts each element once, on every rank alike (pytorch/pytorch#88955)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import runs
from interlace import spec
from interlace.parallel import norm as norms
from interlace.train import session as sessions

ODD = ["model.tie_embeddings=true", "model.norm=layernorm", "model.qkv_bias=true"]


@pytest.mark.parametrize("dp", [1, 3])
def test_gradients_of_ones_have_the_root_of_their_number(
    dp: int, run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    cfgs = [runs.config(tmp_path, f"dp={dp} zero={zero}", ODD) for zero in (0, 1, 3)]
    number = spec.total_parameters(cfgs[0].model_config())
    argument = {"configs": [cfg.to_toml() for cfg in cfgs]}
    found = run_ranks("rank_functions_train:norms_of_ones", dp, argument)
    for rank in found:
        assert [norm for norm, _ in rank] == [number**0.5] * 3
        assert [largest for _, largest in rank] == pytest.approx([0.5] * 3, rel=1e-6)


def test_equals_torch_on_one_process(tmp_path: Path) -> None:
    """Gradients of very unlike sizes, so that a sum in fp32 over all of them would lose the small ones."""
    model = sessions.build(runs.alone(), runs.config(tmp_path)).model
    generator = torch.Generator().manual_seed(0)
    for number, leaf in enumerate(model.leaves()):
        leaf.grad = torch.randn(leaf.shape, generator=generator) * 10.0 ** (number % 5 - 2)
    plain = [leaf.grad.double().clone() for leaf in model.leaves() if leaf.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat(plain))
    found = model.square_sum()[0].sqrt()
    assert found.item() == pytest.approx(norm.item(), rel=1e-7)
    norms.scale(
        [leaf.grad for leaf in model.leaves() if leaf.grad is not None], norms.factor(found, 2 * norm.item())
    )  # below the limit nothing changes
    assert all(torch.equal(leaf.grad.double(), was) for leaf, was in zip(model.leaves(), plain, strict=True))
    norms.scale([leaf.grad for leaf in model.leaves() if leaf.grad is not None], norms.factor(found, 1.0))
    for leaf, was in zip(model.leaves(), plain, strict=True):
        torch.testing.assert_close(leaf.grad.double(), was / norm, rtol=1e-5, atol=0)


def test_chunks_have_the_same_bits_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(96 * 64, generator=generator) * 10.0 ** torch.randint(-3, 3, (96 * 64,), generator=generator)
    whole = norms.chunk_squares(values, 64)
    exact = values.view(-1, 64).double().square().sum(dim=1)
    assert (whole - exact).abs().max() <= 1e-6 * exact.max()
    for ranks in (2, 3, 32, 96):
        parts = [norms.chunk_squares(part.clone(), 64) for part in values.chunk(ranks)]
        assert torch.equal(torch.cat(parts), whole)
    shifted = torch.cat([torch.zeros(1), values])[1:]
    monkeypatch.setitem(norms.BLOCKS, "cpu", 3 * 64)
    assert torch.equal(norms.chunk_squares(shifted, 64), whole)
    assert norms.chunk_squares(values[:0], 64).shape == (0,)
    assert torch.equal(values, shifted)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_a_tree_adds_the_second_half_onto_the_first(count: int) -> None:
    def tree(numbers: list[float]) -> float:
        if len(numbers) == 1:
            return numbers[0]
        half = (len(numbers) + 1) // 2
        first, second = numbers[:half], [*numbers[half:], 0.0]
        return tree([a + b for a, b in zip(first, second[:half], strict=True)])

    numbers = (10.0 ** torch.arange(count, dtype=torch.float64) / 3).tolist()
    assert norms.tree_sum(torch.tensor([numbers, numbers], dtype=torch.float64)).tolist() == [tree(numbers)] * 2
