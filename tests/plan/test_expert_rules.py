"""When the fused exchange of experts is taken, when its products wait for their rows, and its slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interlace.config import ModelConfig, ParallelPlan
from interlace.plan.exchange import slots, taken, waits_pay


def test_small_experts_wait_for_their_rows_and_large_ones_do_not() -> None:
    assert waits_pay(768, 2), "measured: 5.5 ms a layer with waits, 6.1 without"
    assert not waits_pay(14336, 2), "measured: 30.3 and 28.2"
    assert not waits_pay(16, 1), "nothing moves"


def test_more_bytes_on_the_wire_are_worth_more_waits() -> None:
    largest = [max(inner for inner in range(1, 40000, 7) if waits_pay(inner, ways)) for ways in (2, 4, 8)]
    assert largest == sorted(set(largest))
    assert max(inner for inner in range(1, 40000, 7) if waits_pay(inner, 2, itemsize=4)) > largest[0]


MODEL = ModelConfig(vocab_size=29, hidden_size=2048, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=6, ffn_size=8,
                    num_experts=128, experts_per_token=8, expert_ffn_size=768)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "itemsize", "device", "expected"),
    [
        ("dp=2 ep=2", 2, "cuda", True),
        ("dp=2 ep=2 tp=2", 2, "cuda", True),
        ("dp=4 ep=4", 2, "cuda", False),  # not measured
        ("dp=2 ep=2 overlap=plain", 2, "cuda", False),
        ("dp=2 ep=2 overlap=off", 2, "cuda", False),
        ("dp=2 ep=2 expert_halves=on", 2, "cuda", False),
        ("dp=2 ep=2", 4, "cuda", False),
        ("dp=2 ep=2", 2, "cpu", False),
        ("dp=2 ep=2 overlap=fused expert_halves=on", 4, "cpu", True),
        ("dp=2 tp=2 overlap=fused", 2, "cuda", False),
    ],
)
def test_who_takes_the_fused_exchange(plan: str, itemsize: int, device: str, expected: bool) -> None:
    assert taken(MODEL, ParallelPlan.parse(plan), itemsize, device) == expected


def test_rows_of_no_whole_16_bytes_do_not_take_it() -> None:
    plan = ParallelPlan.parse("dp=2 ep=2")
    for sizes in ({"hidden_size": 2044}, {"expert_ffn_size": 772}):
        assert not taken(replace(MODEL, **sizes), plan, 2, "cuda")
    for inner, expected in ((48, True), (24, False), (17, False)):  # over two ranks of tp: 24, 12, 9 and 8
        assert taken(replace(MODEL, expert_ffn_size=inner), replace(plan, tp=2), 2, "cuda") == expected


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (None, 4 * 1000 + 2 * 63),  # all that any rank brings
        (9.0, 4 * 1000 + 2 * 63),
        (float("inf"), 4 * 1000 + 2 * 63),
        (1.0, 4000 * 2 / 7 + 2 * 63),  # two experts of seven
        (1.5, 1.5 * 4000 * 2 / 7 + 2 * 63),
    ],
)
def test_slots_for_the_rows_of_a_rank(room: float | None, expected: float) -> None:
    found = slots(1000, 4, 2, 7, 64, room)
    assert found % 64 == 0
    assert 0 <= found - expected < 64
