"""Products of rows that are gathered meanwhile, every way of it, between processes in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interlace.errors import ConfigError
from interlace.kernels.arrival import Chunks, Slices
from interlace.kernels.candidate import Problem, choose, forced

RANKS = "rank_functions_gather"
ALL = ["plain", "chunks", "chained", "persistent", "put", "push"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_values(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(f"{RANKS}:values", ranks, {"names": ALL}, timeout=110.0) == [8 * len(ALL)] * ranks


def test_repeated_on_two_groups_with_late_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    argument = {"names": ["chunks", "persistent", "put", "push"], "rounds": 20}
    assert run_ranks(f"{RANKS}:repeated", 2, argument, timeout=110.0) == [20, 20]


def test_calls_counted_in_memory(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(
        f"{RANKS}:counted_in_memory", 2, {"names": ["chunks", "chained", "persistent", "put", "push"]}, timeout=110.0
    )


def test_gradients(run_ranks: Callable[..., list[Any]]) -> None:
    pairs = [["plain", "plain"], ["chunks", "chunks"], ["persistent", "tiles"], ["put", "put"]]
    assert run_ranks(f"{RANKS}:gradients", 3, {"pairs": pairs}, timeout=110.0) == [12] * 3


def test_weights_that_are_multiplied_as_one(run_ranks: Callable[..., list[Any]]) -> None:
    pairs = [["chunks", "chunks"], ["persistent", "tiles"]]
    assert run_ranks(f"{RANKS}:joined", 2, {"pairs": pairs}, timeout=110.0) == [6] * 2


def test_a_rank_that_does_not_come_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(f"{RANKS}:late", 2, {"name": "persistent"}, timeout=110.0)
    assert "in gather_matmul, program 0, for all_gather_matmul.arrived[16] to reach 2, found 1: rank 1 has not" in first
    assert second == ""


def test_operands_that_do_not_belong_together_are_told(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, said in enumerate(run_ranks(f"{RANKS}:misfits", 2, timeout=110.0)):
        assert len(said) == 11
        for name, sentence in said.items():
            assert {
                "width": "x [3, 8] times a weight [5, 7]; give the weight as [out, 8]",
                "bias": "times a weight [5, 8] and a bias [4]; give",
                "type": "x of torch.float32 on cpu times a weight or bias of torch.bfloat16 on cpu; give all in one",
                "rows": f"x has 3 rows on rank {rank} of 2, whose share of 8 is 4; rows are split evenly",
                "scattered": "x [6, 8] times a weight [5, 7]; give the weight as [out, 8]",
                "summed": "times a weight or bias of torch.float64",
            }[name.split()[0]] in sentence, name


def test_what_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    for growth, type_ in run_ranks(f"{RANKS}:refusals", 2, {}, timeout=110.0):
        assert "make one call with these sizes before the capture" in growth
        assert type_ == '"persistent" for all_gather_matmul: no kernel for torch.float64; take "plain".'


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_row_has_one_slot_and_what_is_sent_is_what_arrives(ranks: int, count: int, chunks: int) -> None:
    plan = Chunks(count, 24, torch.float32, ranks, chunks)
    rows = [torch.arange(count * 24.0).view(count, 24)[slice(*_whole(plan, rank))] for rank in range(ranks)]
    for rank in range(ranks):
        coming = list(plan.arriving(rank))
        assert len(coming) == plan.slots
        seen = [row for _, _, first, last in coming for row in range(first, last)]
        assert sorted([*seen, *range(*_whole(plan, rank))]) == list(range(count))
        for slot, (source, chunk, first, last) in enumerate(coming):
            (piece,) = [p for p in plan.sent(source) if p.peer == rank and p.number == chunk]
            sent = piece.of(rows[source])
            assert piece.offset == plan.offset(slot)
            assert torch.equal(sent, torch.arange(count * 24.0).view(count, 24)[first:last])
            assert piece.offset + sent.numel() * 4 <= plan.nbytes


def _whole(plan: Chunks, rank: int) -> tuple[int, int]:
    return plan.rows(rank, 0)[0], plan.rows(rank, plan.chunks - 1)[1]


@pytest.mark.parametrize("K", [1, 64, 200, 513])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_fill_their_memory_without_gaps(K: int, slices: int) -> None:
    ranks, count = 3, 8
    plan = Slices(count, K, torch.float32, ranks, slices)
    x = torch.arange(float(count * K)).view(count, K)
    shares = [x[0:3], x[3:6], x[6:8]]
    for rank in range(ranks):
        memory = torch.full((plan.nbytes // 4,), float("nan"))
        words = set()
        for source in {*range(ranks)} - {rank}:
            for piece in plan.sent(source):
                if piece.peer == rank:
                    rows = piece.of(plan.pack(shares[source])).reshape(-1)
                    begin = piece.offset // 4
                    memory[begin : begin + rows.numel()] = rows
                    words.add((source, piece.number))
        assert len(words) == 2 * plan.pieces
        others = torch.cat([share for source, share in enumerate(shares) if source != rank])
        for number in range(slices):
            first, last = plan.columns(number)
            begin = plan.offset(number) // 4
            found = memory[begin : begin + others[:, first:last].numel()].view(len(others), last - first)
            assert torch.equal(found, others[:, first:last])


def test_a_choice_on_a_cpu_is_plain_and_a_wrong_name_is_said() -> None:
    problem = Problem("all_gather_matmul", 8, 8, 8, torch.float32, 2)
    assert choose(problem, torch.device("cpu")).name == "plain"
    with pytest.raises(ConfigError, match='no operation has a candidate "persistant"; did you mean "persistent"'):
        forced("persistant").__enter__()
    with forced("chunks"), forced("tiles"):  # another operation's: the outer one counts
        with pytest.raises(
            ConfigError, match=r'"chunks" for all_gather_matmul: .* TRITON_INTERPRET=1 .*; take "plain"'
        ):
            choose(problem, torch.device("cpu"))
        with forced("plain"):
            assert choose(problem, torch.device("cpu")).name == "plain"


def on_gpus(function: str, argument: dict[str, Any] | None = None, ranks: int = 2) -> list[Any]:
    from interlace import launch

    return launch.run_local(f"{RANKS}_gpu:{function}", ranks, argument or {}, device="cuda", timeout=110.0)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu(ranks: int) -> None:
    from interlace.symmetric.cuda import on_one_gpu
    from rank_functions_gather_gpu import sharing_a_gpu

    assert on_one_gpu(sharing_a_gpu, ranks, nbytes=1 << 26, timeout=20.0) == [30] * ranks


@pytest.mark.gpu2
def test_values_on_two_gpus() -> None:
    first, second = on_gpus("values")
    assert first == second == 76


@pytest.mark.gpu2
def test_a_thousand_calls_of_each_on_two_gpus() -> None:
    """Changing rows and chunks, two groups on two streams, late ranks; then two streams of one group."""
    assert on_gpus("thousand", {"names": ["chunks", "chained", "persistent", "put", "push"]}) == [5000, 5000]
    assert on_gpus("interleaved_streams") == [100, 100]


@pytest.mark.gpu2
def test_graphs_replay_on_two_gpus() -> None:
    assert on_gpus("replays", {"names": ["chunks", "chained", "persistent", "put", "push"]}) == [250, 250]


@pytest.mark.gpu2
def test_gradients_on_two_gpus() -> None:
    pairs = [["persistent", "tiles"], ["chunks", "chunks"], ["push", "push"], ["put", "put"]]
    assert on_gpus("gradients", {"pairs": pairs}) == [24, 24]
