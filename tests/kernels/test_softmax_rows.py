"""The row kernel against the plain composition: in Triton's interpreter here, compiled where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from interlace.models.vocabulary import softmax_rows as plain
from interlace.parallel import vocabulary

CASES = [(1, 3), (5, 4096), (7, 4097), (3, 10001)]


def compare(rows: int, vocab: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    from interlace.kernels.softmax_rows import softmax_rows

    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab + 3, generator=generator) * 6).to(device, dtype)[:, :vocab]  # a wider stride
    labels = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    labels[0] = -100 if rows > 1 else vocab - 1
    logits[-1, 0] = 100.0  # one number holds nearly all of the sum
    ours, theirs = logits.clone(), logits.clone()
    found, expected = softmax_rows(ours, labels), plain(theirs, labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
    assert ours[0].count_nonzero() == 0 or rows == 1


def compare_split(rows: int, vocab: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Statistics and gradients of rows whose columns are a slice; labels inside and outside of it, and none."""
    from interlace.kernels.softmax_rows import row_gradients, row_statistics

    generator = torch.Generator().manual_seed(vocab + 1)
    logits = (torch.randn(rows, vocab + 3, generator=generator) * 6).to(device, dtype)[:, :vocab]
    labels = torch.randint(-vocab, 2 * vocab, (rows,), generator=generator).to(device)
    labels[0], labels[-1] = (-1, vocab - 1)
    found, expected = row_statistics(logits, labels), vocabulary.row_statistics(logits, labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    lse = expected[0] + expected[1].log() + 0.5  # more columns lie elsewhere
    factor = torch.linspace(0.5, 1.5, rows, device=device)
    factor[0] = 0.0
    ours, theirs = logits.clone(), logits.clone()
    row_gradients(ours, labels, lse, factor, 0.9, 0.01)
    vocabulary.row_gradients(theirs, labels, lse, factor, 0.9, 0.01)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
    assert ours[0].count_nonzero() == 0


def test_equals_the_plain_composition_in_the_interpreter() -> None:
    script = """
        import sys
        sys.path[:0] = ["tests/kernels"]
        import torch
        from test_softmax_rows import CASES, compare, compare_split
        for rows, vocab in CASES:
            compare(rows, vocab, torch.float32, "cpu", 1e-6)
            compare_split(rows, vocab, torch.float32, "cpu", 1e-6)
        compare(4, 1000, torch.float16, "cpu", 1e-3)
        print("equal")
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": "src"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [*CASES, (64, 128256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_plain_composition_on_a_gpu(rows: int, vocab: int, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    compare(rows, vocab, dtype, "cuda", tolerance)
    compare_split(rows, vocab, dtype, "cuda", tolerance)
