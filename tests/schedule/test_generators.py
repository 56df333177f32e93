"""Tables by name: what they take with published formulae, what they hold, and that every one of them is valid."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import SCHEDULES
from interlace.errors import PlanError
from interlace.plan.simulate import Costs, bubbles, makespan, simulate
from interlace.schedule import FORMS, Kind, Table, chunks_of, generate, lower, validate

SIZES = [(2, 4), (3, 7), (4, 8), (5, 23), (8, 16)]


def beyond_work(table: Table, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> float:
    """Seconds of the step in which a rank does not compute."""
    chunks = table.stages // table.ranks
    work = table.micro_batches * chunks * (forward + input + weight)
    return makespan(simulate(table, Costs.even(table.stages, forward, input, weight))) - work


def test_every_name_of_the_configuration_is_made() -> None:
    assert tuple(FORMS) == SCHEDULES


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_published_bubbles(p: int, m: int) -> None:
    """F, B = I + W with unequal times where the formula holds for them; a chunk's times are those of a rank over v."""
    f, i, w = 3.0, 4.0, 2.0
    for name in ("gpipe", "1f1b"):
        table = generate(name, p, m)
        assert beyond_work(table, f, i, w) == pytest.approx((p - 1) * (f + i + w))
        (share,) = {round(bubble, 9) for bubble in bubbles(simulate(table, Costs.even(p, f, i, w)))}
        assert share == pytest.approx((p - 1) / (m + p - 1))
    for v in (1, 2, 3):
        table = generate("interleaved", p, m, v)
        share = max(bubbles(simulate(table, Costs.even(p * v, f, i, w))))
        assert share == pytest.approx((p - 1) / (v * m + p - 1))  # also where p does not divide m
    assert beyond_work(generate("zb-h1", p, m)) == pytest.approx((p - 1) * (1 + 1 - 1))
    if m >= 2 * p - 1:
        zbv = generate("zbv", p, m)
        assert beyond_work(zbv) == pytest.approx(p - 1)  # the last rank cannot begin before, nor do less
        for rank in range(p):
            times = [e for e in simulate(zbv, Costs.even(2 * p, 1, 1, 1)) if e.rank == rank and e.kind == "compute"]
            assert times[-1].end - times[0].begin == 6 * m  # once begun, it never stands still
    if m >= 2 * p:
        assert beyond_work(generate("dualpipev", p, m)) <= p - 1
    half, plain = beyond_work(generate("v-half", p, m)), 2 * beyond_work(generate("1f1b", p, m))
    assert half <= plain / 2


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 2), (6, 1)])
def test_activations_in_flight(p: int, m: int) -> None:
    assert validate(generate("gpipe", p, m)).ranks == (m,) * p
    plain = validate(generate("1f1b", p, m))
    assert plain.ranks == tuple(min(m, p - rank) for rank in range(p))
    assert plain.stages == plain.ranks
    assert max(validate(generate("zb-h1", p, m)).ranks) == min(m, p)
    assert max(validate(generate("zbv", p, m)).ranks) <= 2 * min(m, p)  # chunks are half a rank
    assert max(validate(generate("v-half", p, m)).ranks) <= p + 2
    assert max(validate(generate("dualpipev", p, m)).ranks) <= 2 * p + 1
    for v in (2, 3):
        if m >= p:
            most = validate(generate("interleaved", p, m, v)).ranks[0]
            group = -(-m // (m // p))  # the largest group
            assert most == min(m * v, (v - 1) * group + 2 * (p - 1) + 1)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    v=st.integers(1, 4),
    zero=st.sampled_from([0, 3]),
    keep=st.sampled_from([None, 1, 2]),
    fixed=st.booleans(),
    ahead=st.integers(0, 4),
)
def test_every_table_is_valid_also_when_lowered(
    name: str, p: int, m: int, v: int, zero: int, keep: int | None, fixed: bool, ahead: int
) -> None:
    table = generate(name, p, m, v if name == "interleaved" else 1)
    lowered = lower(table, zero, keep=keep, each=fixed, ahead=ahead)
    plain, peaks = validate(table), validate(lowered)
    assert (plain.stages, plain.ranks, plain.whole) == (peaks.stages, peaks.ranks, peaks.whole)
    compute = tuple(tuple(action for action in row if action.is_compute) for row in lowered.rows)
    assert compute == table.rows
    chunks = table.stages // p
    if zero == 3:
        assert max(peaks.unsharded) <= (keep or chunks)
    if keep is None or keep >= chunks:  # no gather repeats
        for rank, row in enumerate(lowered.rows):
            gathers = [action.stage for action in row if action.kind is Kind.UNSHARD]
            assert sorted(gathers) == list(table.stages_of(rank))
    reductions = sum(action.kind is Kind.REDUCE for row in lowered.rows for action in row)
    assert reductions == table.stages * (m if fixed else 1)
    order: dict[int, list[int]] = {}  # weight gradients are added up in the order of micro-batches
    for row in table.rows:
        for action in row:
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT) and action.micro_batch is not None:
                order.setdefault(action.stage, []).append(action.micro_batch)
    assert all(numbers == list(range(m)) for numbers in order.values())
    ends = max(event.end for event in simulate(lowered, Costs.even(table.stages, 1, 1, 1)))
    assert ends >= 3 * m * chunks


def test_stages_a_rank() -> None:
    assert [chunks_of(name) for name in SCHEDULES] == [1, 1, 1, 1, 2, 2, 2]
    assert chunks_of("interleaved", 5) == 5
    for name, chunks, nearest in (("1f1b", 2, 1), ("zbv", 3, 2), ("gpipe", 4, 1)):
        with pytest.raises(PlanError, match=f"use chunks={nearest}$"):
            generate(name, 2, 4, chunks)
    with pytest.raises(PlanError, match="nearest is zb-h1"):
        generate("zb-h2", 2, 4)
    with pytest.raises(PlanError, match="1 or more ranks, found 0"):
        generate("1f1b", 0, 4)


def test_the_text_of_a_small_table() -> None:
    assert str(lower(generate("1f1b", 2, 2), 3)) == (
        "rank 0: 0UNSHARD 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0RESHARD 0REDUCE\n"
        "rank 1: 1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE"
    )
