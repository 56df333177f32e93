"""The Triton product against torch's, interpreted in a process of its own and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.kernels.candidate import Tile

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gemm_core.py"
LLAMA = [  # (N, K) of one rank: 8B at tp=2 and 8, 70B at tp=2 and 8; qkv, attention output, gate and up, down
    (3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168), (768, 4096), (4096, 512), (3584, 4096), (4096, 1792),
    (5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336), (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584),
]  # fmt: skip
TILES = [
    Tile(128, 256, 64, 8, 8, 3),
    Tile(128, 256, 64, 8, 8, 4, True, 2),
    Tile(128, 128, 64, 8, 8, 5),
    Tile(64, 256, 64, 8, 4, 4),
    Tile(128, 128, 64, 4, 4, 4, False),
    Tile(16, 64, 128, 8, 4, 4, False),
    Tile(64, 64, 128, 8, 4, 4, False),
]


def test_interpreted(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("rank_functions_gather:core", 1, {}, timeout=100.0) == [48]


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), LLAMA)
def test_llama(N: int, K: int) -> None:
    """fp32 sums rounded once: no further from the sums in fp64 than torch's own product, at any M."""
    from interlace.kernels.tile import matmul

    generator = torch.Generator("cuda").manual_seed(N + K)
    weight = torch.randn(N, K, device="cuda", generator=generator).bfloat16()
    for M in (1, 17, 257, 1024):
        x = torch.randn(M, K, device="cuda", generator=generator).bfloat16()
        expected = x.float() @ weight.float().t()
        apart = (matmul(x, weight).float() - expected).abs().max() / expected.abs().max()
        assert apart < 6e-3, (M, apart)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", TILES)
def test_tiles_strides_and_tails(tile: Tile, dtype: torch.dtype) -> None:
    from interlace.kernels.tile import matmul

    if dtype is torch.float32:
        tile = Tile(min(64, tile.block_m), 32, 32, tile.group, 4, 2, tile.flatten, tile.parts)
    for M, N, K in ((300, 520, 264), (129, 257, 65), (1, 8, 8), (256, 256, 0)):
        for turned in (0, 1, 2, 3):
            x = torch.randn(K, M, device="cuda").t() if turned & 1 else torch.randn(M, K, device="cuda")
            w = torch.randn(K, N, device="cuda").t() if turned & 2 else torch.randn(N, K, device="cuda")
            x, w, bias = x.to(dtype), w.to(dtype), torch.randn(N, device="cuda").to(dtype)
            out = torch.full((M, N), float("nan"), device="cuda", dtype=dtype)
            matmul(x, w, bias, out, tile)
            expected = x.double() @ w.double().t() + bias.double()
            limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]
            assert (out.double() - expected).abs().max() <= limit * expected.abs().max(), (M, N, K, turned)


@pytest.mark.gpu
def test_the_same_bits_again() -> None:
    from interlace.kernels.tile import matmul

    x, w = torch.randn(1000, 512, device="cuda").half(), torch.randn(700, 512, device="cuda").half()
    assert torch.equal(matmul(x, w), matmul(x, w))


def test_the_benchmark_checks_times_and_keeps_rows_of_earlier_calls(tmp_path: Path) -> None:
    out = tmp_path / "core.md"
    out.write_text("| 33 x 16 x 40 | old |\n| 1 x 2 x 3 | kept |\n\n- `an earlier call`\n")
    command = [sys.executable, str(BENCHMARK), "--smoke", "--rounds", "1", "--out", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    text = out.read_text()
    assert text.count("| 33 x 16 x 40 |") == text.count("| 5 x 18 x 24 |") == 1
    assert "| 1 x 2 x 3 | kept |" in text
    assert "old" not in text
    assert "- `an earlier call`\n- `benchmarks/gemm_core.py" in text
