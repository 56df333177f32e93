"""The Triton product against torch's, interpreted in a process of its own and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.kernels.candidate import Tile
from interlace.kernels.tile import cut, joined, splits

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
TILES += [replace(tile, split=split) for tile, split in zip(TILES, (0, 2, 3, 4, 0, 8, 5), strict=True)]


def test_interpreted(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("rank_functions_gather:core", 1, {}, timeout=100.0) == [48]


def test_interpreted_in_pieces(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks("rank_functions_gather:core_in_pieces", 1, {}, timeout=100.0) == [144]


def test_what_is_cut() -> None:
    """Of the last round alone, into pieces of a step at least; shapes of one H200."""
    assert cut(288, 132, 192, 5) == (264, 120)
    assert cut(288, 132, 192, 0) == (264, 132)
    assert cut(264, 132, 192, 5) == (264, 0)
    assert cut(288, 132, 192, 1) == (288, 0)
    assert cut(10, 132, 3, 16) == (0, 30)
    assert cut(10, 132, 3, 0) == (0, 30)
    assert cut(10, 132, 1, 4) == cut(10, 132, 1, 0) == (10, 0)
    assert cut(10, 132, 0, 4) == cut(10, 132, 0, 0) == (10, 0)


def test_which_cuts_are_worth_a_try() -> None:
    tile = Tile(128, 256, 64, 8, 8, 3)
    assert splits(tile, 2048, 4608, 12288, 132, 2) == [5, 0]  # 24 tiles in the third round: a fifth of them each
    assert splits(tile, 2048, 4096, 12288, 132) == []  # 256 tiles, 8 places empty in the second round
    assert splits(tile, 1024, 1280, 8192, 132, 1) == [3]  # 40 tiles in all
    assert splits(tile, 4096, 6400, 5120, 132) == [6, 9, 4]  # 8 tiles: between neighbours there is little to choose
    assert splits(tile, 128, 256, 64, 132) == []
    assert len(splits(tile, 2048, 7168, 8192, 132)) == 3


def compiled(tile: Tile, join: int) -> Any:
    """The kernel of bf16 factors by descriptors, with a bias, for a Hopper GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from interlace.kernels.tile import _matmul

    kernel: Any = _matmul
    names = [parameter.name for parameter in kernel.params]
    constants = {"A": 1, "B": 1, "C": 1, "BIAS": True, "BM": tile.block_m, "BN": tile.block_n, "BK": tile.block_k}
    constants |= {"GROUP": tile.group, "FLATTEN": tile.flatten, "PARTS": tile.parts, "JOIN": join, "WIDE": False}
    constants |= {"a_column": 1, "b_column": 1, "out_column": 1}
    if not join:
        constants |= dict.fromkeys(("sums", "arrived", "whole", "shares"))
    types = {"a": f"tensordesc<bf16[{tile.block_m},{tile.block_k}]>"}
    types |= {"b": f"tensordesc<bf16[{tile.block_n},{tile.block_k}]>"}
    types |= {"c": f"tensordesc<bf16[{tile.block_m},{tile.block_n // tile.parts}]>"}
    types |= {"out": "*bf16", "bias": "*bf16", "sums": "*fp32", "arrived": "*i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    numbers = ["bias", "out", "N", "K", "a_row", "b_row", "out_row", *(["sums", "arrived"] if join else [])]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in numbers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("tile", [Tile(128, 256, 64, 8, 8, 4, True, 2), Tile(128, 128, 64, 8, 4, 4)])
def test_pieces_are_loaded_in_stages_and_told_of_when_they_lie_there(
    tile: Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    whole, pieces = compiled(tile, 0), compiled(tile, joined(tile))
    assert whole.metadata.shared <= pieces.metadata.shared <= 227 * 1024
    before, after = whole.asm["ptx"], pieces.asm["ptx"]
    assert "atom." not in before
    assert after.count("wgmma.mma_async") == 2 * before.count("wgmma.mma_async")
    loop = after[after.rindex("mbarrier.try_wait") : after.index("atom.global.gpu.acq_rel.add")]
    steps = re.findall(
        r"wgmma\.mma_async|wgmma\.wait_group\.\S+ \t?1|tensor\.2d\.shared::cluster|bar\.sync|st\.global", loop
    )
    first_store, last_store = steps.index("st.global"), len(steps) - 1 - steps[::-1].index("st.global")
    within = steps[:first_store]
    assert any("wait_group" in step for step in within)  # one step's products are under way while the next loads begin
    assert within.count("tensor.2d.shared::cluster") == 2
    assert "bar.sync" in steps[last_store:]  # before the one thread that counts
    assert "cp.async.cg.shared.global" in after[after.index("atom.global.gpu.acq_rel.add") :]


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
        tile = Tile(min(64, tile.block_m), 32, 32, tile.group, 4, 2, tile.flatten, tile.parts, tile.split)
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


@pytest.mark.gpu
@pytest.mark.parametrize("split", [0, 2, 3])
def test_pieces_give_the_same_bits_in_any_order_and_in_graphs(split: int) -> None:
    """Shapes in turn, on two streams, and replayed: counters are zero again after each."""
    from interlace.kernels.tile import counters, matmul, programs

    tile, places = Tile(128, 128, 64, 8, 4, 4, split=split), programs(torch.device("cuda"), 1 << 20)
    shapes = ((1000, 1400, 2048), (130, 200, 4096), (2048, 2304, 1024))
    factors = [(torch.randn(M, K, device="cuda").half(), torch.randn(N, K, device="cuda").half()) for M, N, K in shapes]
    first = [matmul(x, w, tile=tile) for x, w in factors]
    for (x, w), found in zip(factors, first, strict=True):
        expected = x.float() @ w.float().t()
        assert (found.float() - expected).abs().max() <= 2e-3 * expected.abs().max()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                again = [matmul(x, w, tile=tile) for x, w in factors]
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [matmul(x, w, tile=tile) for x, w in factors]
    for _ in range(3):
        for out in again:
            out.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.cuda.synchronize()
    assert not counters(torch.device("cuda", torch.cuda.current_device()), places).any()


def test_the_benchmark_checks_times_and_keeps_rows_of_earlier_calls(tmp_path: Path) -> None:
    out = tmp_path / "core.md"
    out.write_text("| 33 x 16 x 40 | old |\n| 1 x 2 x 3 | kept |\n\n- `an earlier call`\n")
    command = [sys.executable, str(BENCHMARK), "--smoke", "--search", "--rounds", "1", "--out", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    assert len(re.findall(r"^    whole .* us \(16 .* 1\), .* cut .* us \(16 .* 2\), ", done.stdout, re.MULTILINE)) == 2
    text = out.read_text()
    assert text.count("| 33 x 16 x 40 |") == text.count("| 5 x 18 x 24 |") == 1
    assert "| 1 x 2 x 3 | kept |" in text
    assert "old" not in text
    assert "- `an earlier call`\n- `benchmarks/gemm_core.py" in text
