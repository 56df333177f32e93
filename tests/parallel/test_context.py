"""The context axis: every exchange against attention of the whole, what it sends, computes and keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interlace import launch
from interlace.collectives import Group, Meter
from interlace.models.attention import Pattern
from interlace.parallel import blocks
from interlace.parallel.blocks import Tiling
from interlace.parallel.circulate import Blocks
from interlace.parallel.sequence import SequenceAxis
from interlace.plan import context as plan

Run = Callable[..., list[Any]]
OURS = "rank_functions_context"
CROSSING = [0] * 3 + [1] * 9 + [2] * 4  # 3/9/4 of 16
SHORT = [[3] * 5 + [4] * 2 + [7] * 12, list(range(19))]
FALLING = [[0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 0, 2, 2], [5] * 13]
MASKS: list[dict[str, Any]] = [
    {"length": 16, "documents": [CROSSING, [0] * 8 + [1] * 8]},
    {"length": 19, "documents": SHORT, "window": 3},
    {"length": 13, "documents": FALLING},
    {"length": 13, "documents": FALLING, "window": 2},
    {"length": 17, "window": 5},
    {"length": 17, "window": 1},
    {"length": 8},
    {"length": 331, "window": 70},
    {"length": 331, "window": 3, "documents": [[0] * 100 + [1] * 231]},
]
SUNK: list[dict[str, Any]] = [
    {"length": 19, "sinks": True},
    {"length": 19, "documents": SHORT, "sinks": True},
    {"length": 17, "window": 3, "sink_tokens": 1},
    {"length": 19, "documents": SHORT, "window": 2, "sink_tokens": 3, "sinks": True},
    {"length": 13, "documents": FALLING, "window": 1, "sink_tokens": 2, "sinks": True},
    {"length": 16, "documents": [CROSSING, [0] * 8 + [1] * 8], "window": 2, "sink_tokens": 2},
    {"length": 331, "window": 3, "documents": [[0] * 40 + [1] * 291], "sink_tokens": 50, "sinks": True},
    {"length": 331, "window": 70, "sink_tokens": 5, "sinks": True},
]


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_every_exchange_is_attention(run_ranks: Run, ways: int) -> None:
    """Odd lengths, fewer key heads than ranks, documents across ranks and in several pieces, windows."""
    heads = {2: (6, 2), 3: (12, 3), 4: (12, 2)}[ways]
    cases = [*MASKS, *({**case, "heads": heads} for case in [*MASKS, *SUNK])]
    run_ranks(f"{OURS}:attend", ways, {"cases": cases})


@pytest.mark.parametrize("ways", [2, 3])
def test_lines_that_copy_carry_every_exchange(run_ranks: Run, ways: int) -> None:
    """Messages through one slot, which grows with them: `collectives.boxes`."""
    heads = {2: (6, 2), 3: (12, 3)}[ways]
    cases = [{**case, "heads": heads} for case in [{"length": 7}, *MASKS[:4], *SUNK[1:4], MASKS[7]]]
    run_ranks(f"{OURS}:attend", ways, {"cases": cases, "copies": True})


def test_lengths_that_do_not_divide_by_twice_the_ranks(run_ranks: Run) -> None:
    """NVIDIA/TransformerEngine#1930, NVIDIA/Megatron-LM#1669: 7 positions, and 7 and 5 packed, lose none."""
    packed = {"length": 12, "documents": [[0] * 7 + [1] * 5]}
    run_ranks(f"{OURS}:attend", 2, {"cases": [{"length": 7, "heads": (2, 2)}, packed]})


@pytest.mark.parametrize("ways", [2, 4])
def test_documents_do_not_see_each_other(run_ranks: Run, ways: int) -> None:
    """huggingface/trl#6843, huggingface/accelerate#4177: a change of token 0 shows in its document and window alone."""
    cases = [
        {"length": 16, "documents": [0] * 8 + [1] * 8, "layers": 2},
        {"length": 16, "documents": CROSSING, "layers": 2},
        {"length": 16, "documents": None, "window": 4},
        {"length": 16, "documents": None, "window": 4, "layers": 2, "window_layers": [0]},
        {"length": 16, "documents": CROSSING, "window": 2, "sink_tokens": 1, "sinks": True},
        {"length": 16, "documents": None, "window": 2, "sink_tokens": 1},
    ]
    expected = [range(8), range(3), range(4), range(16), range(3), range(16)]
    for rank in run_ranks(f"{OURS}:changed", ways, {"cases": cases}):
        for positions, by_exchange in zip(expected, rank, strict=True):
            for exchange, (alone, split) in by_exchange.items():
                assert alone == split == list(positions), exchange


def test_empty_blocks_are_neither_sent_nor_computed(run_ranks: Run) -> None:
    """Bytes as `plan.context` counts them, and every pair that is seen in exactly one tile."""
    cases: list[dict[str, Any]] = [
        {"length": 16, "window": None, "documents": None},
        {"length": 16, "window": None, "documents": [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4},  # as the pieces
        {"length": 16, "window": None, "documents": CROSSING},
        {"length": 15, "window": 3, "documents": None},
        {"length": 15, "window": 1, "documents": None},
        {"length": 1024, "window": 5, "documents": None},
        {"length": 15, "window": 2, "documents": None, "sink_tokens": 3},
        {"length": 16, "window": 2, "documents": CROSSING, "sink_tokens": 2},
        {"length": 16, "window": 1, "documents": [0] * 9 + [1] * 7, "sink_tokens": 4},
    ]
    found = run_ranks(f"{OURS}:work", 2, {"cases": cases})
    for number, case in enumerate(cases):
        length, documents, window = case["length"], case["documents"], case["window"]
        sink_tokens, numbers = case.get("sink_tokens", 0), documents or [0] * length
        pairs = sum(
            numbers[t] == numbers[s] and (t - s < (window or length) or s - numbers.index(numbers[s]) < sink_tokens)
            for t in range(length)
            for s in range(t + 1)
        )
        starts = documents and [[t for t in range(length) if t == 0 or documents[t] != documents[t - 1]]]
        needed = plan.seen(length, 2, window, starts, sink_tokens)
        cut = plan.pieces(length, 2)
        exact = {
            (a, b) for a in range(4) for b in range(a + 1)
            if any(numbers[t] == numbers[s] and s <= t
                   and (t - s < (window or length) or s - numbers.index(numbers[s]) < sink_tokens)
                   for t in range(*cut[a]) for s in range(*cut[b]))
        } if length < 100 else needed  # fmt: skip
        assert needed == exact, case
        for exchange in range(2):
            counts = [rank[number][exchange] for rank in found]
            if exchange == 0:  # gather sees others' keys a head at a time
                assert sum(seen for _, seen, _, _ in counts) == pairs
            for rank, (*_, sent) in enumerate(counts):
                give, take = plan.wanted(needed, 2, 1 - rank, rank), plan.wanted(needed, 2, rank, 1 - rank)
                positions = [sum(cut[b][1] - cut[b][0] for b in those) for those in (give, take)]
                assert sent == 2 * 2 * 3 * 8 * (2 * positions[0] + positions[1])
    assert [rank[1][0] for rank in found] == [[2, 20, 32, 0]] * 2  # two triangles a rank
    assert [rank[4][0][3] for rank in found] == [0, 0]
    for _, seen, computed, _ in (rank[5][0] for rank in found):
        assert computed < 16 * seen, "bands as wide as the window, not whole blocks"


@pytest.mark.parametrize("ways", [2, 3])
def test_what_kernels_make_in_half_precision_is_rounded_once(run_ranks: Run, ways: int) -> None:
    """Bit for bit as sums in fp32; gradients travel in bf16 where one tile made them, else in fp32."""
    cases: list[dict[str, Any]] = [{"length": 37}, {"length": 19, "documents": SHORT}, {"length": 17, "window": 5}]
    found = run_ranks(f"{OURS}:halves", ways, {"cases": cases})
    for number, case in enumerate(cases):
        starts = [[0, 5, 7], [0, *range(1, 19)]] if "documents" in case else None
        seen, cut = plan.seen(case["length"], ways, case.get("window"), starts), plan.pieces(case["length"], ways)
        for rank, sent in enumerate(found):
            given, taken = (
                sum(cut[b][1] - cut[b][0] for peer in range(ways) if peer != rank
                    for b in plan.wanted(seen, ways, *((peer, rank) if gives else (rank, peer))))
                for gives in (True, False)
            )  # fmt: skip
            assert sent[number] == 2 * 2 * 2 * 8 * (2 * 2 * given + (2 if number == 0 else 4) * taken)


def test_two_other_blocks_are_here_at_most(run_ranks: Run) -> None:
    for rank in run_ranks(f"{OURS}:resident", 4, {"length": 1 << 16}):
        assert rank["one"] == 2 * (1 << 14) * 2 * 4 * 4
        assert rank["one"] <= rank["most"] <= 2 * rank["one"]


def test_parts_of_a_stage_wait_for_the_own_tile_as_counted(run_ranks: Run) -> None:
    """Of the last rank, whose queries see all keys of the others."""
    cases = [("ring", 6, 2), ("gather", 6, 2), ("gather", 3, 1), ("gather", 12, 6)]
    found = run_ranks(f"{OURS}:waiting", 3, {"cases": cases})
    counted = [plan.widest(exchange, 3, kv_heads) * heads // kv_heads for exchange, heads, kv_heads in cases]
    assert found[-1] == counted == [6, 6, 6, 8]
    assert all(a <= b for rank in found for a, b in zip(rank, counted, strict=True))


def test_a_block_keeps_what_is_counted(run_ranks: Run) -> None:
    for rank in run_ranks(f"{OURS}:kept", 2, {"length": 12}):
        assert [saved for saved, _ in rank] == [counted for _, counted in rank]


def test_scores_are_held_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result when the limit cuts a tile into pieces of one query."""
    q, k, v = (torch.randn(2, 7, n, 3, dtype=torch.float64) for n in (4, 2, 2))
    grad = torch.randn_like(q)
    whole = Tiling(7, 1, Pattern(2, 7, torch.device("cpu"), torch.tensor([[0] * 4 + [1] * 3] * 2), 3))
    tile = blocks.Tile(slice(0, 2), (0, 7), (0, 7), "mask")
    expected = blocks.forward(q, k, v, whole.mask(tile))
    delta = (grad * expected[0]).sum(-1).transpose(1, 2)
    made = blocks.backward(grad, q, k, v, *expected, delta, whole.mask(tile))
    monkeypatch.setattr(blocks, "SCORES", {"cpu": 2})
    assert len(list(blocks._pieces(q, k))) == 7
    for a, b in zip(blocks.forward(q, k, v, whole.mask(tile)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    again = blocks.backward(grad, q, k, v, *expected, delta, whole.mask(tile))
    for a, b in zip(again, made, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_merging_nothing_changes_nothing_and_nan_is_kept() -> None:
    out, logs = torch.tensor([[[[2.0]], [[0.0]]]]), torch.tensor([[[0.5, -torch.inf]]])
    blocks.merge(out, logs, torch.zeros(1, 2, 1, 1), torch.full((1, 1, 2), -torch.inf))
    assert out.flatten().tolist() == [2.0, 0.0]
    assert logs.flatten().tolist() == [0.5, -torch.inf]
    blocks.merge(out, logs, torch.full((1, 2, 1, 1), torch.nan), torch.full((1, 1, 2), torch.nan))
    assert out.isnan().all()


@pytest.mark.parametrize("length", [16, 37])
@pytest.mark.parametrize("ways", [2, 3, 4])
def test_plain_causal_is_one_kernel_for_each_rank_whose_keys_are_seen(ways: int, length: int) -> None:
    """A triangle over all that a rank holds, and a full rectangle over what each other one sends."""
    pairs = 0
    for rank in range(ways):
        group = Group("cp", tuple(range(ways)), rank, torch.device("cpu"), Meter(record=False))
        axis = SequenceAxis(group, length, "ring")
        work = Blocks(axis, Tiling(length, ways, Pattern(1, length, torch.device("cpu"))))
        own = len(axis.columns())
        (piece,) = work.tiles(None, 1, 1, fused=True)
        assert (piece.tile.kind, piece.queries, piece.keys) == ("causal", slice(0, own), slice(0, own))
        pairs += own * (own + 1) // 2
        assert len(work.tiles(None, 1, 1, fused=False)) == 3
        for stage in work.stages(1):
            (piece,) = work.tiles(stage, 1, 1, fused=False)
            assert piece.tile.kind == "full"
            pairs += (piece.queries.stop - piece.queries.start) * (piece.keys.stop - piece.keys.start)
    assert pairs == length * (length + 1) // 2


@pytest.mark.gpu2
def test_layers_on_two_gpus_while_their_memory_changes_hands() -> None:
    """Tiles on two streams, keys by copy engines: what is read too early, or written too early, shows."""
    for worst in launch.run_local(f"{OURS}:chained", 2, {"repeats": 12}, device="cuda", timeout=100.0):
        assert worst < 2e-2
