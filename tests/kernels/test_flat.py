"""Kernels over flat runs against plain operations: in Triton's interpreter here, compiled where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from interlace.collectives.ordered import add_in_order, ordered_sum


def compare_sums(device: str) -> None:
    from interlace.kernels.ordered_rows import sum_rows

    generator = torch.Generator().manual_seed(0)
    for ranks, count, dtype in (
        (2, 1, torch.float16),
        (2, 5000, torch.float16),
        (3, 4096, torch.float32),
        (8, 33, torch.float32),
    ):
        parts = (torch.randn(ranks, count, generator=generator) * 10).to(device, dtype)
        for rank in range(ranks):
            received = parts.clone()
            received[rank] = torch.nan
            target = torch.full((count,), torch.nan, device=device)
            found = sum_rows(parts[rank].clone(), received, rank, target, 0.5)
            expected = ordered_sum(parts, torch.empty(count, device=device), 0.5)
            assert torch.equal(found, expected), (ranks, count, rank)
            for rows in range(1, ranks + 1):  # the last round of a step may have fewer
                begun = torch.randn(count, generator=generator).to(device)
                found = sum_rows(parts[rank].clone(), received[:rows], rank, begun.clone(), onto=True)
                assert torch.equal(found, add_in_order(parts[:rows], begun, first=False)), (ranks, count, rank, rows)


def compare_squares(device: str) -> None:
    from interlace.kernels.chunk_squares import chunk_squares
    from interlace.parallel.norm import tree_sum

    generator = torch.Generator().manual_seed(2)
    for chunk, count in ((1, 5), (32, 7), (1024, 3), (4096, 2), (64, 0)):
        gradient = torch.randn(chunk * count, generator=generator).to(device)
        expected = tree_sum(gradient.view(-1, chunk).square())
        assert torch.equal(chunk_squares(gradient, chunk), expected), (chunk, count)


def compare_adamw(device: str) -> None:
    from interlace.kernels.adamw import adamw

    generator = torch.Generator().manual_seed(1)
    for count in (1, 2048, 5001):
        start = torch.randn(count, generator=generator)
        plain = torch.nn.Parameter(start.to(device, torch.float64))
        reference = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        main = start.to(device)
        first, second = torch.zeros_like(main), torch.zeros_like(main)
        for step in range(1, 5):
            gradient = torch.randn(count, generator=generator).to(device) * 1e-2
            factor = torch.tensor(0.3, dtype=torch.float64, device=device) if step % 2 else None
            copy = torch.full((count,), torch.nan, dtype=torch.float16, device=device) if step > 1 else None
            before = gradient.clone()
            adamw(
                main, first, second, gradient, step=step, rate=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1,
                factor=factor, copy=copy,
            )  # fmt: skip
            plain.grad = gradient.double() * (1.0 if factor is None else factor)
            reference.step()
            assert torch.equal(gradient, before)
            assert copy is None or torch.equal(copy, main.half())
        state = reference.state[plain]
        for ours, theirs in ((main, plain.detach()), (first, state["exp_avg"]), (second, state["exp_avg_sq"])):
            assert (ours.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max(), count


def test_equal_plain_operations_in_the_interpreter() -> None:
    script = (
        "import sys; sys.path[:0] = ['tests/kernels']\n"
        "from test_flat import compare_adamw, compare_squares, compare_sums\n"
        "compare_sums('cpu'); compare_squares('cpu'); compare_adamw('cpu'); print('equal')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": "src"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.gpu
def test_equal_plain_operations_on_a_gpu() -> None:
    compare_sums("cuda")
    compare_squares("cuda")
    compare_adamw("cuda")
