"""Rows to the experts of other ranks and back: against the plain composition, and against one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from interlace import launch
from interlace.collectives import Group, Meter
from interlace.errors import ConfigError
from interlace.kernels import expert_rows
from interlace.kernels.expert_exchange import ExpertExchange
from interlace.symmetric import SymmetricHeap

Run = Callable[..., list[Any]]
RANKS = "rank_functions_exchange"


def test_three_ranks_with_uneven_experts_and_tokens(run_ranks: Run) -> None:
    """The second rank has no experts, and on one call no tokens; on the second call all rows go to one rank."""
    argument = {"owners": [2, 0, 3], "k": 2, "D": 13, "F": 7, "counts": [[5, 0, 4], [2, 6, 3], [1, 1, 0]]}
    assert run_ranks(f"{RANKS}:against_one_process", 3, argument) == [["0", "1", "2"]] * 3


def test_two_ranks_with_several_blocks_of_an_expert(run_ranks: Run) -> None:
    argument = {"owners": [1, 2], "k": 1, "D": 34, "F": 35, "counts": [[18, 15]]}
    assert run_ranks(f"{RANKS}:against_one_process", 2, argument) == [["0"]] * 2


def test_half_precision(run_ranks: Run) -> None:
    argument = {"D": 20, "F": 12, "tokens": 5, "owners": [2, 1], "k": 2}
    assert run_ranks(f"{RANKS}:half_precision", 2, argument) == [True, True]


def test_two_groups_in_turn(run_ranks: Run) -> None:
    assert run_ranks(f"{RANKS}:interleaved", 2) == [True] * 2


# Of some ranks: experts of each, then call by call how tokens choose, the tokens of each, and whether more slots are
# wanted than are there at first, which is for the even rows, in blocks of 4.
BEYOND: dict[int, tuple[list[int], list[tuple[str, list[int], bool]]]] = {
    2: ([2, 1], [("any", [20, 20], False), ("first", [20, 0], False), ("last", [20, 20], True),
                 ("any", [3, 20], False), ("first", [20, 20], True)]),
    3: ([1, 2, 1], [("last", [17, 17, 0], True), ("any", [17, 16, 0], False), ("first", [17, 17, 17], True)]),
    4: ([1, 1, 0, 2], [("any", [0, 12, 12, 12], False), ("last", [12, 12, 12, 12], True),
                       ("first", [12, 0, 0, 12], False)]),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_more_rows_than_there_is_room_for_go_again_and_have_the_same_bits(ranks: int, run_ranks: Run) -> None:
    owners, calls = BEYOND[ranks]
    given = {"owners": owners, "calls": [call[:2] for call in calls], "block": 4}
    assert run_ranks(f"{RANKS}:beyond_its_room", ranks, given) == [[call[2] for call in calls]] * ranks


def test_what_does_not_fit_is_refused() -> None:
    group = Group("ep", (0,), 0, torch.device("cpu"), Meter())
    with pytest.raises(ConfigError, match=r"experts \[2, 2\] for 1 ranks"):
        ExpertExchange(group, [2, 2])
    for room in (0.5, float("nan")):
        with pytest.raises(ConfigError, match=f"room for {room} times the even rows; give at least 1, or None"):
            ExpertExchange(group, [2], room=room)
    exchange = ExpertExchange(group, [2], most_tokens=3)
    x, weights, experts = torch.ones(3, 4), torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64)
    gate, up, down = torch.ones(2, 5, 4), torch.ones(2, 5, 4), torch.ones(2, 4, 5)
    assert exchange(x, weights, experts, gate, up, down).shape == (3, 4)
    for given, said in (
        ((x, weights, experts, gate, up, gate), r"experts of shapes .* have \(\(2, 5, 4\), \(2, 5, 4\), \(2, 4, 5\)\)"),
        ((x, weights, experts.float(), gate, up, down), r"weights \(3, 1\) and experts \(3, 1\) of torch.float32"),
        ((x, weights[:2], experts[:2], gate, up, down), "for 3 tokens"),
        ((x.half(), weights, experts, gate, up, down), "tokens and experts of torch.float16, torch.float32"),
        ((torch.ones(4, 4), torch.ones(4, 1), torch.zeros(4, 1).long(), gate, up, down), "4 tokens where most_tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            exchange(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(5, 6), (96, 72)])
def test_ranks_that_share_a_gpu(sizes: tuple[int, int]) -> None:
    from exchange_launches import forward_and_backward

    from interlace.symmetric.cuda import on_one_gpu

    def run(heap: SymmetricHeap) -> bool:
        check = forward_and_backward(heap, sizes=sizes, tuning=None)
        heap.barrier()
        check()
        return True

    assert on_one_gpu(run, 2, nbytes=1 << 22) == [True, True]


def test_rows_move_16_bytes_at_a_time_and_are_released_after_a_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dispatch compiles to for a Hopper GPU, on any machine."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = expert_rows.send_only
    constants = {"WEIGHTED": False, "CLEARED": False, "PIECE": 32, "BLOCK": 128, "ROWS": 8, "COLUMNS": 1024}
    constants |= {"XP": 8, "LP": 4, "WP": 2}
    kinds = {"x": "*bf16", "slots": "*bf16", "weights": "*fp32", "factors": "*fp32", "heap": "*i64"}
    numbers = ("k", "D", "X", "first_expert", "L")
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32" if name in numbers else "*i32")
        for name in kernel.arg_names
    }
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if name in (*kinds, "D")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    lines = [line.strip() for line in made.asm["ptx"].splitlines()]
    moves = [line for line in lines if re.search(r"(ld|st)\.global\.v4|bar\.sync|st\.release", line)]
    release = next(at for at, line in enumerate(moves) if "st.release" in line)
    assert "bar.sync" in moves[release - 1]
    assert sum("ld.global.v4" in line for line in moves) >= 4  # 64 bytes a thread on their way at once
    assert sum("st.global.v4" in line for line in moves) >= 4


def two_gpus(function: str, argument: dict[str, Any] | None = None) -> list[Any]:
    return launch.run_local(f"{RANKS}:{function}", 2, argument or {}, device="cuda", timeout=110.0)


@pytest.mark.gpu2
def test_many_experts_many_times_on_two_gpus() -> None:
    """Tiles that look for their rows while they arrive: warps of a program may not see different flags."""
    argument = {"owners": [32, 32], "k": 8, "D": 512, "F": 256, "counts": [[2048, 2048]] * 10}
    assert two_gpus("against_one_process", argument) == [[str(number) for number in range(10)]] * 2


@pytest.mark.gpu2
def test_on_two_gpus_in_single_precision() -> None:
    argument = {"owners": [3, 2], "k": 2, "D": 264, "F": 136, "counts": [[300, 0], [257, 511], [64, 1]]}
    assert two_gpus("against_one_process", argument) == [["0", "1", "2"]] * 2


@pytest.mark.gpu2
@pytest.mark.parametrize(("D", "F"), [(512, 384), (250, 99)])
def test_on_two_gpus_in_half_precision(D: int, F: int) -> None:
    """With descriptors, and with sizes that descriptors cannot address."""
    argument = {"D": D, "F": F, "tokens": 777, "owners": [5, 3], "k": 3}
    assert two_gpus("half_precision", argument) == [True, True]


@pytest.mark.gpu2
def test_two_groups_and_too_little_room_on_two_gpus() -> None:
    assert two_gpus("interleaved") == [True, True]
    calls = [(kind, [500, 500]) for kind in ("any", "last", "any", "first")]
    given = {"owners": [2, 1], "calls": calls, "block": 64}
    assert two_gpus("beyond_its_room", given) == [[False, True, False, True]] * 2
    assert two_gpus("room_in_a_graph") == [True, True]


@pytest.mark.gpu2
def test_graphs_on_two_gpus_replay_with_other_tokens() -> None:
    argument = {"D": 96, "F": 72, "owners": [3, 2], "k": 2, "tokens": 130}
    assert two_gpus("graphs", argument) == [True, True]
