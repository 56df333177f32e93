"""A table with seconds becomes the events of a step: by hand, by formula, and conserved to the last bit of a step."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import SCHEDULES
from interlace.plan.simulate import Costs, bubbles, makespan, simulate
from interlace.schedule import generate, lower, parse_csv


def spans(events: list, rank: int, lane: str = "compute") -> list[tuple[str, str, float, float]]:
    return [(e.kind, e.name, e.begin, e.end) for e in events if e.rank == rank and e.lane == lane]


def test_two_stages_by_hand() -> None:
    """F 2 and 3, B 4 and 5 seconds, transfers of 1: what each rank does and what it stands still for."""
    table = generate("1f1b", 2, 2)
    events = simulate(table, Costs([2, 3], [3, 1], [1, 4], transfer=1, nbytes=7))
    assert spans(events, 0) == [
        ("compute", "0F0", 0, 2),
        ("compute", "0F1", 2, 4),
        ("bubble", "0RECV_B0", 4, 11),
        ("wait", "0RECV_B0", 11, 12),
        ("compute", "0B0", 12, 16),
        ("bubble", "0RECV_B1", 16, 19),
        ("wait", "0RECV_B1", 19, 20),
        ("compute", "0B1", 20, 24),
    ]
    assert spans(events, 1) == [
        ("bubble", "1RECV_F0", 0, 2),
        ("wait", "1RECV_F0", 2, 3),
        ("compute", "1F0", 3, 6),
        ("compute", "1B0", 6, 11),
        ("compute", "1F1", 11, 14),
        ("compute", "1B1", 14, 19),
        ("bubble", "end of the step", 19, 24),
    ]
    assert spans(events, 0, "comm.pp") == [("comm", "0SEND_F0", 2, 3), ("comm", "0SEND_F1", 6, 7)]
    assert {event.bytes for event in events if event.lane == "comm.pp"} == {7}
    assert makespan(events) == 24
    assert bubbles(events) == pytest.approx((12 / 24, 8 / 24))


def test_a_transfer_waits_for_its_receive_and_its_line() -> None:
    early = parse_csv("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n"
                      "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1")  # fmt: skip
    late = parse_csv(early.to_csv().replace("1RECV_F1,1F0", "1F0,1RECV_F1"))
    costs = Costs([1, 5], [1, 1], [1, 1], transfer=4)
    moved = [spans(simulate(table, costs), 0, "comm.pp") for table in (early, late)]
    assert moved[0] == [("comm", "0SEND_F0", 1, 5), ("comm", "0SEND_F1", 5, 9)]  # the line is busy until 5
    assert moved[1] == [("comm", "0SEND_F0", 1, 5), ("comm", "0SEND_F1", 10, 14)]  # nobody takes it before 10


def test_gathers_run_beside_compute_and_reductions_to_the_end() -> None:
    table = lower(generate("interleaved", 2, 2, 2), zero=3)
    costs = Costs([1] * 4, [1] * 4, [1] * 4, unshard=[3] * 4, reduce=[10] * 4)
    events = simulate(table, costs)
    assert spans(events, 0)[0] == ("wait", "0UNSHARD", 0, 3)
    assert spans(events, 0, "comm.dp")[0] == ("comm", "0UNSHARD", 0, 3)
    reductions = [e for e in events if e.name.endswith("REDUCE")]
    assert len(reductions) == 4
    assert makespan(events) == max(event.end for event in reductions)
    assert [e[0] for e in spans(events, 0)][-1] == "wait"


def test_an_uneven_stage_sets_the_pace() -> None:
    """A slow last stage works without a pause: m (F + B) of it, and the way there and back; one that fills its time
    with more forwards hides part of that way."""
    for slow in range(4):
        forward, backward = [1.0] * 4, [2.0] * 4
        forward[slow], backward[slow] = 2.0, 4.0
        costs = Costs(forward, backward, [0.0] * 4)
        way = sum(forward) + sum(backward)
        hidden = 2.0 * (3 - slow)
        assert makespan(simulate(generate("1f1b", 4, 16), costs)) == pytest.approx(way + 15 * 6.0 - hidden)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    costs=st.tuples(*[st.floats(0.01, 3) for _ in range(3)]),
    transfer=st.floats(0, 2),
)
def test_every_second_of_every_rank_is_accounted(
    name: str, p: int, m: int, costs: tuple[float, float, float], transfer: float
) -> None:
    table = generate(name, p, m, 3 if name == "interleaved" else 1)
    events = simulate(table, Costs.even(table.stages, *costs, transfer))
    whole = makespan(events)
    for rank in range(p):
        own = spans(events, rank)
        assert (own[0][2], own[-1][3]) == (0, whole)
        assert all(a[3] == b[2] for a, b in itertools.pairwise(own))  # no gap, no overlap
        assert math.isclose(1 - bubbles(events)[rank], sum(costs) * m * (table.stages // p) / whole)
