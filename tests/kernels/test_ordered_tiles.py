"""What the kernels that send tiles compile to for a Hopper GPU, on any machine; and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.errors import ConfigError
from interlace.kernels.candidate import Problem, Tile, candidates, choose, forced

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
CPU = torch.device("cpu")


def test_loads_stay_in_stages_and_a_tile_is_told_of_when_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from interlace.kernels.matmul_reduce_scatter import _reduce_scatter

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = _reduce_scatter
    names = [parameter.name for parameter in kernel.params]
    constants = {"A": 1, "B": 1, "C": 1, "BIAS": False, "WORLD": 2, "LATE": True, "BM": 128, "BN": 256, "BK": 64}
    constants |= {"GROUP": 8, "PARTS": 1, "SUMS": 2, "WIDE": False, "bias": None}
    constants |= {"a_column": 1, "b_column": 1, "out_column": 1}
    types = {"a": "tensordesc<bf16[128,64]>", "b": "tensordesc<bf16[256,64]>", "c": "tensordesc<bf16[128,128]>"}
    types |= dict.fromkeys(("out", "slots"), "*bf16") | {"heap": "*i64"}
    types |= dict.fromkeys(("arrived", "entered", "epochs", "claims"), "*i32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    numbers = ["out", "slots", "heap", "N", "K", "a_row", "b_row", "out_row", "spread", "region"]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in numbers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 3})
    stages, tile = 3 * (128 + 256) * 64 * 2, 128 * 256 * 2
    assert stages + tile <= made.metadata.shared <= 227 * 1024
    ptx = made.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 8  # the product for others, and the own one
    order = re.findall(
        r"(bulk\.tensor\.2d\.global|bulk\.wait_group\.read|bulk\.wait_group 0; fence\.proxy|bar\.sync"
        r"|st\.release\.sys|wgmma\.mma_async)",
        ptx,
    )
    sent = order.index("bulk.tensor.2d.global")
    assert order[sent + 1] != "bulk.wait_group.read"  # the next tile is computed first
    told = order.index("bulk.wait_group 0; fence.proxy")
    assert "st.release.sys" in order[told : told + 5]
    assert "bar.sync" in order[told : order.index("st.release.sys", told)]


def refusal(op: str, name: str, M: int = 64, N: int = 64, dtype: torch.dtype = torch.float16, world: int = 2) -> str:
    return str(candidates(op)[name].refuses(Problem(op, M, N, 64, dtype, world), torch.device("cuda")))


def test_what_is_refused() -> None:
    assert (
        refusal(SCATTER, "chained", world=3) == "it adds the own product last, which is the order of 2 ranks, not of 3"
    )
    assert refusal(SCATTER, "push", M=1 << 14, N=1 << 12).startswith("268435456 bytes of sums, more than the 67108864")
    assert refusal(REDUCE, "one-shot", M=1 << 14, N=1 << 12).startswith("268435456 bytes of sums")
    assert refusal(SCATTER, "push", dtype=torch.float64).startswith("float64 numbers; of float32, float16 and bfloat16")
    assert refusal(REDUCE, "one-shot", world=1) == "one rank has nobody to send to"
    assert refusal(SCATTER, "push", M=1 << 17, N=1 << 16).endswith("its tiles are counted in 32 bits")
    problem = Problem(SCATTER, 64, 64, 64, torch.float16, 2)
    with (
        forced("tiles"),
        pytest.raises(ConfigError, match=r'"tiles" for matmul_reduce_scatter: its kernels run on GPUs'),
    ):
        choose(problem, CPU)
    assert choose(problem, CPU).name == "plain"


def test_a_tile_that_does_not_fit_is_sent_in_halves() -> None:
    from interlace.collectives import Group, Meter
    from interlace.kernels.ordered_tiles import halves, tile_for

    group = Group("tp", (0, 1), 0, CPU, Meter())
    wide = Tile(128, 256, 64, 8, 8, 3)
    assert tile_for(SCATTER, 64, 64, torch.float16, group, wide).parts == 1
    assert tile_for(SCATTER, 64, 64, torch.float16, group, Tile(128, 256, 64, 8, 8, 4)).parts == 2
    assert halves(wide) == 2
    assert halves(Tile(128, 128, 64)) == 1
