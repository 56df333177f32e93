"""The vocabulary loss against plain PyTorch: values, both gradients, pieces of rows, edges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from interlace.models import vocabulary
from interlace.models.vocabulary import softmax_rows, vocabulary_loss


def inputs(rows: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[: rows // 5] = -100
    return x, weight, labels


@pytest.mark.parametrize("piece", [1, 23 * 4 + 5, 1 << 20])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (14, 23), (17, 65)])
def test_equals_the_plain_composition(piece: int, rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "PIECE", piece)
    x, weight, labels = inputs(rows, 6, vocab, torch.float32)
    found = vocabulary_loss(x, weight, labels)
    plain = F.cross_entropy(x @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-5)
    ours = torch.autograd.grad(found * 0.25, (x, weight))
    theirs = torch.autograd.grad(plain * 0.25, (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_bf16_adds_the_weight_gradient_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "PIECE", 31 * 2)  # two rows at a time: 128 additions
    x, weight, labels = inputs(256, 8, 31, torch.bfloat16)
    (found,) = torch.autograd.grad(vocabulary_loss(x, weight, labels), weight)
    wide, wide_weight = x.detach().float(), weight.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(wide @ wide_weight.T, labels, reduction="sum"), wide_weight)
    assert found.dtype == torch.bfloat16
    assert ((found.float() - exact).abs().max() / exact.abs().max()).item() < 1e-2


def test_large_logits_are_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [3e4, -3e4, 0.0]])
    assert softmax_rows(logits, torch.tensor([1, 0])).tolist() == [6e4, 0.0]
    assert logits.tolist() == [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]


def test_without_labels_everything_is_zero() -> None:
    x, weight, labels = inputs(9, 4, 7, torch.float32)
    loss = vocabulary_loss(x, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_only_wanted_gradients_are_made() -> None:
    x, weight, labels = inputs(9, 4, 7, torch.float32)
    with torch.no_grad():
        quiet = vocabulary_loss(x, weight, labels)
    assert not quiet.requires_grad
    vocabulary_loss(x, weight.detach(), labels).backward()
    assert x.grad is not None
    assert weight.grad is None


def test_logits_may_lie_in_memory_that_is_lent() -> None:
    """Also in too little of it, which is left alone."""
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(2500, 5, generator=generator), torch.randn(7, 5, generator=generator)
    labels = torch.randint(0, 7, (2500,), generator=generator)
    x.requires_grad_(), weight.requires_grad_()
    plain = vocabulary_loss(x, weight, labels)
    expected = [plain, *torch.autograd.grad(plain, [x, weight])]
    for size in (40 * 7, 4 * 7 * 1023, 4 * 7 * 1100, 4 * 7 * 9000):
        scratch = torch.full((size,), 7, dtype=torch.uint8)
        loss = vocabulary_loss(x, weight, labels, scratch=scratch)
        for found, value in zip([loss, *torch.autograd.grad(loss, [x, weight])], expected, strict=True):
            assert (found - value).abs().max() <= 1e-6 * value.abs().max()
        assert bool((scratch == 7).all()) is (size < 4 * 7 * 1024)
