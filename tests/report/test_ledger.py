"""The ledger: known answers, and rows that sum to the step whatever the events."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.events import KINDS, Event
from interlace.report.ledger import (
    SECOND,
    Account,
    Ledger,
    Row,
    ledgers,
    median,
    step_number,
)
from interlace.report.spans import common, minus, union


def event(rank: int, lane: str, kind: str, begin: float, end: float, name: str = "x", **more: int) -> Event:
    return Event(rank, lane, kind, name, begin, end, **more)


def one(events: list[Event], **more: object) -> dict[int, Account]:
    """The accounts of the only step, by rank."""
    (ledger,) = ledgers(events, **more)  # type: ignore[arg-type]
    return {account.rank: account for account in ledger.accounts}


def rows(account: Account) -> dict[str, float]:
    assert sum(account.rows.values()) == account.span
    return {row.label: ticks / SECOND for row, ticks in account.rows.items()}


# --- known answers ---------------------------------------------------------------------------------------------------


def test_streams_that_run_together_count_once() -> None:
    account = one(
        [
            event(0, "comm.dp", "comm", 8, 16),
            event(0, "stream 1", "compute", 12, 20),
            event(0, "stream 1", "compute", 0, 10),
            event(0, "comm.dp", "comm", 5, 14),
            event(0, "comm.dp", "comm", 11, 11),
        ]
    )[0]
    assert rows(account) == {"compute": 18, "exposed transfer dp": 2}
    assert (account.busy, account.hidden, account.total) == (11 * SECOND, 9 * SECOND, 17 * SECOND)


def test_devices_are_accounted_apart() -> None:
    found = one([event(0, "s", "compute", 0, 10), event(1, "s", "compute", 2, 6), event(1, "comm.tp", "comm", 6, 7)])
    assert rows(found[0]) == {"compute": 10}
    assert rows(found[1]) == {"compute": 4, "exposed transfer tp": 1, "host gap": 5}


def test_a_transfer_takes_its_shortest_time_and_the_rest_waits_for_the_late_rank() -> None:
    found = one(
        [
            event(0, "comm.dp", "comm", 0, 10),
            event(1, "s", "compute", 0, 7),
            event(1, "comm.dp", "comm", 7, 10),
            event(2, "s", "compute", 0, 2),
            event(2, "comm.dp", "comm", 1, 10),
        ]
    )
    assert rows(found[0]) == {"waiting dp for rank 1": 7, "exposed transfer dp": 3}
    assert rows(found[1]) == {"compute": 7, "exposed transfer dp": 3}
    assert rows(found[2]) == {"compute": 2, "waiting dp for rank 1": 5, "exposed transfer dp": 3}


def test_groups_of_an_axis_wait_apart() -> None:
    """Two pairs: with the pairs known, the second pair's quick transfer says nothing about the first's."""
    events = [event(rank, "comm.dp", "comm", 0, 10 if rank < 2 else 2) for rank in range(4)]
    found = one(events, groups={"dp": [(0, 1), (2, 3)]})
    assert rows(found[0]) == {"exposed transfer dp": 10}
    assert rows(found[3]) == {"exposed transfer dp": 2, "host gap": 8}
    assert rows(one(events)[0]) == {"exposed transfer dp": 2, "waiting dp for rank 2": 8}


def test_the_kth_of_a_name_is_the_same_one_everywhere() -> None:
    """The second gather is matched with the second, though rank 1's first comes later than rank 0's second."""
    found = one(
        [
            event(0, "comm.dp", "comm", 0, 2, "gather"),
            event(0, "comm.dp", "comm", 4, 9, "gather"),
            event(0, "comm.dp", "comm", 9, 10, "loss"),
            event(1, "comm.dp", "comm", 1, 2, "gather"),
            event(1, "comm.dp", "comm", 7, 9, "gather"),
            event(1, "comm.dp", "comm", 9, 10, "loss"),
        ]
    )
    assert rows(found[0]) == {"waiting dp for rank 1": 1 + 3, "exposed transfer dp": 1 + 2 + 1, "host gap": 2}


def test_a_rank_that_recorded_fewer_is_laid_where_it_fits() -> None:
    """Rank 1's record begins with the third; its clock is 100 s ahead."""
    ends, lengths = [3.0, 7.0, 9.0, 16.0, 18.0], [1.0, 2.0, 1.5, 4.0, 1.0]
    events = [event(0, "comm.dp", "comm", end - long, end) for end, long in zip(ends, lengths, strict=True)]
    events += [event(1, "comm.dp", "comm", 100 + end - 0.5, 100 + end) for end in ends[2:]]
    events += [event(rank, "step", "compute", 100 * rank, 100 * rank + 20, "step 1") for rank in (0, 1)]
    assert rows(one(events)[0])["waiting dp for rank 1"] == 1.0 + 3.5 + 0.5
    alone = [events[1], event(1, "comm.dp", "comm", 6.5, 7.0), *events[:1]]
    assert rows(one(alone)[0])["waiting dp for rank 1"] == 1.5


def test_waits_inside_work_are_cut_out_of_it_and_split_by_their_transfer() -> None:
    """As a run records them: a forward pass that stands still from 3 to 8 for a gather its peer joined at 6."""
    found = one(
        [
            event(0, "compute", "compute", 0, 10, "0F0"),
            event(0, "comm.dp", "comm", 1, 8, "gather"),
            event(0, "compute", "wait", 3, 8, "gather"),
            event(1, "compute", "compute", 0, 10, "0F0"),
            event(1, "comm.dp", "comm", 6, 8, "gather"),
            event(1, "compute", "wait", 7, 8, "gather"),
        ]
    )
    assert rows(found[0]) == {"compute": 5, "waiting dp for rank 1": 3, "exposed transfer dp": 2}
    assert rows(found[1]) == {"compute": 9, "exposed transfer dp": 1}
    assert found[0].hidden == 2 * SECOND


def test_a_wait_behind_other_transfers_of_its_stream_is_exposed_transfer() -> None:
    account = one([event(0, "comm.dp", "comm", 5, 8, "b"), event(0, "compute", "wait", 0, 9, "b")])[0]
    assert rows(account) == {"exposed transfer dp": 9}


def test_a_transfer_nobody_waits_for_costs_nothing_where_waits_are_recorded() -> None:
    events = [event(0, "comm.dp", "comm", 0, 4, "a"), event(0, "comm.dp", "comm", 4, 6, "b")]
    account = one([*events, event(0, "compute", "wait", 5, 6, "b")])[0]
    assert rows(account) == {"host gap": 5, "exposed transfer dp": 1}
    assert rows(one(events)[0]) == {"exposed transfer dp": 6}


def test_pipeline() -> None:
    """Gaps of a schedule are bubble; a receive that waits for its sender is bubble too, its shortest time transfer."""
    planned = one(
        [
            event(0, "compute", "compute", 0, 1, "0F0"),
            event(1, "compute", "compute", 1.5, 2.5, "1F0"),
            event(0, "comm.pp", "comm", 1, 1.5, "send 0F0"),
            event(1, "compute", "compute", 2.5, 4.5, "1B0"),
        ]
    )
    assert rows(planned[0]) == {"compute": 1, "exposed transfer pp": 0.5, "pipeline bubble": 3}
    assert rows(planned[1]) == {"compute": 3, "pipeline bubble": 1.5}
    real = one(
        [
            event(0, "compute", "compute", 0, 3, "0F0"),
            event(0, "comm.pp", "comm", 3, 3.5, "send 0F0"),
            event(1, "comm.pp", "comm", 0, 3.5, "recv 0F0"),
            event(1, "compute", "wait", 0.25, 3.5, "recv 0F0"),
            event(1, "compute", "compute", 3.75, 4, "1F0"),
        ]
    )
    assert rows(real[1]) == {"pipeline bubble": 2.75, "exposed transfer pp": 0.5, "compute": 0.25, "host gap": 0.5}


def test_a_simulated_schedule() -> None:
    """As `plan.simulate` writes it: bubbles and waits of its own, transfers on the sender's side alone."""
    found = one(
        [
            event(0, "compute", "compute", 0, 2, "0F0"),
            event(0, "comm.pp", "comm", 2, 2.5, "0SEND_F0"),
            event(0, "compute", "bubble", 2, 6, "end of the step"),
            event(1, "compute", "bubble", 0, 2, "1RECV_F0"),
            event(1, "compute", "wait", 2, 2.5, "1RECV_F0"),
            event(1, "compute", "compute", 2.5, 3.5, "1F0"),
            event(1, "comm.dp", "comm", 3.5, 6, "1REDUCE"),
            event(1, "compute", "wait", 3.5, 6, "end of the step"),
        ]
    )
    assert rows(found[0]) == {"compute": 2, "pipeline bubble": 4}
    assert rows(found[1]) == {
        "pipeline bubble": 2, "exposed transfer pp": 0.5, "compute": 1, "exposed transfer dp": 2.5
    }  # fmt: skip


def test_both_ends_of_a_transfer_between_stages_are_matched() -> None:
    found = one(
        [
            event(0, "comm.pp", "comm", 3, 4, "0SEND_F1"),
            event(1, "comm.pp", "comm", 0, 4, "1RECV_F1"),
            event(1, "compute", "wait", 0, 4, "1RECV_F1"),
            event(1, "comm.pp", "comm", 6, 9, "1SEND_B1"),
            event(0, "comm.pp", "comm", 7, 9, "0RECV_B1"),
            event(0, "compute", "wait", 8, 9, "0RECV_B1"),
        ]
    )
    assert found[1].rows == {
        Row("bubble"): 3 * SECOND, Row("transfer", "pp"): SECOND, Row("host"): 5 * SECOND
    }  # fmt: skip
    assert found[0].seconds("transfer", "pp") == 1


def test_between_stages_bytes_move_at_most_while_both_ends_are_under_way() -> None:
    """As gloo has it: the receive stands long before, the send is done when somebody waits for it, long after."""
    found = one(
        [
            event(0, "compute", "compute", 0, 6, "0F1"),
            event(0, "comm.pp", "comm", 6, 13, "0SEND_F1"),
            event(1, "comm.pp", "comm", 1, 6.5, "1RECV_F1"),
            event(1, "compute", "wait", 2, 6.5, "1RECV_F1"),
            event(1, "compute", "compute", 6.5, 13, "1F1"),
        ]
    )
    assert rows(found[1]) == {"pipeline bubble": 4, "exposed transfer pp": 0.5, "compute": 6.5, "host gap": 2}


def test_receives_that_only_one_rank_saw_take_what_the_shortest_took() -> None:
    account = one(
        [event(0, "comm.pp", "comm", 0, 4, "recv", bytes=8), event(0, "comm.pp", "comm", 4, 5, "recv", bytes=8)]
    )
    assert rows(account[0]) == {"exposed transfer pp": 2, "pipeline bubble": 3}


def test_work_is_slowed_by_what_it_takes_longer_beside_a_transfer() -> None:
    events = [
        *(event(0, "s", "compute", at, at + 2, "gemm") for at in (0, 10, 20)),
        event(0, "s", "compute", 30, 33, "gemm"),
        event(0, "comm.dp", "comm", 29.5, 32),
        event(0, "s", "compute", 33, 34, "norm"),  # never ran alone nor beside one
    ]
    account = one(events)[0]
    assert rows(account) == {
        "compute": 9,
        "compute slowed by contention": 1,
        "exposed transfer dp": 0.5,
        "host gap": 34 - 10.5,
    }
    longer = [*events[:3], event(0, "s", "compute", 30, 39, "gemm"), *events[4:]]
    assert one(longer)[0].seconds("contention") == 2.0  # no more than they ran together (30 to 32)
    as_long = [replace(each, end=each.begin + 2.02) if each.begin == 30 else each for each in events]
    assert one(as_long)[0].seconds("contention") == 0.0
    other_size = [replace(each, flops=each.begin == 30) for each in events]
    assert one(other_size)[0].seconds("contention") == 0.0


def test_work_of_no_steady_length_is_not_called_slowed() -> None:
    """The long ones meet more transfers, whatever made them long."""
    events = [event(0, "s", "compute", 10 * n, 10 * n + long, "k") for n, long in enumerate((1, 2, 4, 1, 2, 4))]
    events += [event(0, "s", "compute", 100, 108, "k"), event(0, "comm.dp", "comm", 100, 108)]
    assert one(events)[0].seconds("contention") == 0
    steady = [event(0, "s", "compute", 10 * n, 10 * n + long, "k") for n, long in enumerate((2, 2, 4, 1, 2, 2, 2, 2))]
    assert one([*steady, *events[-2:]])[0].seconds("contention") == 6


def test_standing_still_is_no_slow_work() -> None:
    events = [event(0, "compute", "compute", 0, 2, "0F0"), event(0, "compute", "compute", 2, 7, "0F1")]
    events += [event(0, "comm.dp", "comm", 2, 5.5, "gather"), event(0, "compute", "wait", 2.5, 5.5, "gather")]
    account = one([*events, event(0, "comm.dp", "comm", 5.5, 7, "reduce")])[0]
    assert rows(account) == {"compute": 4, "exposed transfer dp": 3}


def test_micro_batches_of_a_stage_are_one_work() -> None:
    events = [event(0, "compute", "compute", at, at + 1, f"0F{at}") for at in range(3)]
    events += [event(0, "compute", "compute", 3, 4.5, "0F3"), event(0, "comm.dp", "comm", 3, 4.5, "gather")]
    assert one(events)[0].seconds("contention") == 0.5


def test_work_within_work_is_cut_out_of_it() -> None:
    """An update in the forward pass of a CPU; on a GPU beside it, or while the compute stream stood still for it."""
    forward = event(0, "compute", "compute", 0, 10, "0F0")
    assert rows(one([forward, event(0, "compute", "optimizer", 2, 5)])[0]) == {"compute": 7, "optimizer": 3}
    beside = event(0, "side stream", "optimizer", 2, 5)
    assert rows(one([forward, beside])[0]) == {"compute": 10}
    still = event(0, "compute", "compute", 3, 6, "beside transfers")
    assert rows(one([forward, beside, still])[0]) == {"compute": 8, "optimizer": 2}
    assert rows(one([forward, still])[0]) == {"compute": 10}


def test_what_nobody_could_name_stays_unknown_even_beside_a_transfer() -> None:
    account = one(
        [
            event(0, "s", "unknown", 0, 3, "magic"),
            event(0, "comm.dp", "comm", 1, 4),
            event(0, "c", "other", 3, 6, "copy"),
        ]
    )[0]
    assert rows(account) == {"unknown": 3, "exposed transfer dp": 1, "other": 2}
    assert account.names == {("unknown", "magic"): 3 * SECOND, ("transfer", "x"): SECOND}


def test_transfers_of_two_axes_at_once_count_for_the_inner_one() -> None:
    account = one([event(0, "comm.dp", "comm", 0, 4), event(0, "comm.tp", "comm", 2, 6)])[0]
    assert rows(account) == {"exposed transfer dp": 2, "exposed transfer tp": 4}


def test_steps_are_cut_at_their_events() -> None:
    events = []
    for step, (begin, end) in {"step 9": (0, 4), "step 10": (4, 10), "step 11": (11, 14)}.items():
        events.append(event(0, "step", "compute", begin, end, step))
    events += [event(0, "compute", "compute", 1, 6, "0F0"), event(0, "compute", "optimizer", 6, 12, "update")]
    found = ledgers(events)
    assert [(each.step, rows(each.accounts[0])) for each in found] == [
        ("step 9", {"host gap": 1, "compute": 3}),
        ("step 10", {"compute": 2, "optimizer": 4}),
        ("step 11", {"optimizer": 1, "host gap": 2}),
    ]
    assert median(found).step == "step 9"
    assert [step_number(each.step) for each in found] == [9, 10, 11]


def test_a_run_that_records_only_its_waits_has_compute_for_the_rest() -> None:
    account = one([event(0, "step", "compute", 0, 10, "step 1"), event(0, "compute", "wait", 2, 5, "gather"),
                   event(0, "comm.dp", "comm", 1, 5, "gather")])[0]  # fmt: skip
    assert rows(account) == {"compute": 7, "exposed transfer dp": 3}


def test_a_transfer_across_the_end_of_a_step_is_matched_by_its_end() -> None:
    events = [event(rank, "step", "compute", at, at + 10, f"step {at // 10}") for rank in (0, 1) for at in (0, 10)]
    events += [event(0, "comm.dp", "comm", 8, 12, "a"), event(1, "comm.dp", "comm", 11, 12, "a")]
    events += [event(rank, "comm.dp", "comm", 15, 16, "a") for rank in (0, 1)]
    first, second = ledgers(events)
    assert rows(first.accounts[0]) == {"host gap": 8, "waiting dp for rank 1": 2}
    assert rows(second.accounts[0])["waiting dp for rank 1"] == 1


def test_no_events() -> None:
    assert ledgers([]) == []


# --- whatever the events ---------------------------------------------------------------------------------------------

TIMES = st.integers(0, 40).map(lambda n: n / 7)
LANES = ("compute", "stream 2", "comm.dp", "comm.tp", "comm.pp")


@st.composite
def some_events(draw: st.DrawFn) -> list[Event]:
    found = []
    for _ in range(draw(st.integers(1, 14))):
        begin, end = sorted((draw(TIMES), draw(TIMES)))
        kind = draw(st.sampled_from(KINDS))
        lane = draw(st.sampled_from(LANES[2:] if kind == "comm" else LANES[:2]))
        found.append(Event(draw(st.integers(0, 2)), lane, kind, draw(st.sampled_from(["a", "b", "0F1"])), begin, end))
    if draw(st.booleans()):
        edges = sorted({draw(TIMES) for _ in range(3)})
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            found += [Event(rank, "step", "compute", f"step {number}", begin, end) for rank in range(3)]
    return found


@given(some_events())
def test_rows_sum_to_the_step_and_none_is_negative(events: list[Event]) -> None:
    for ledger in ledgers(events):
        for account in ledger.accounts:
            assert sum(account.rows.values()) == account.span
            assert all(ticks > 0 for ticks in account.rows.values())
            assert 0 <= account.hidden <= account.busy <= account.total


@given(some_events(), st.integers(0, 100), st.floats(0, 1), st.randoms(use_true_random=False))
def test_an_event_cut_in_two_changes_nothing(
    events: list[Event], which: int, where: float, chance: random.Random
) -> None:
    """Except what its length says: transfers (how long one takes) and waits keep theirs, and the two rows of compute
    are taken together; nor does the order of events matter."""
    lone = [replace(each, rank=0) for each in events]
    cuttable = [i for i, each in enumerate(lone) if each.lane != "step" and each.kind not in ("comm", "wait")]
    if not cuttable:
        return
    chosen = cuttable[which % len(cuttable)]
    whole = lone[chosen]
    middle = whole.begin + (whole.end - whole.begin) * where
    middle = min(max(middle, whole.begin), whole.end)
    parts = [replace(whole, end=middle), replace(whole, begin=middle)]
    cut = [*lone[:chosen], *parts, *lone[chosen + 1 :]]
    chance.shuffle(cut)
    assert together(ledgers(cut)) == together(ledgers(lone))


def together(found: list[Ledger]) -> list[tuple[str, list[dict[Row, int]]]]:
    def summed(account: Account) -> dict[Row, int]:
        total: Counter[Row] = Counter()
        for row, ticks in account.rows.items():
            total[Row("compute") if row.kind == "contention" else row] += ticks
        return dict(total)

    return [(ledger.step, [summed(account) for account in ledger.accounts]) for ledger in found]


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(spans, spans)
def test_spans_are_sets_of_moments(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def moments(some: list[tuple[int, int]]) -> set[int]:
        return {moment for begin, end in some for moment in range(begin, end)}

    a, b = union(left), union(right)
    assert moments(a) == moments(left)
    assert a == sorted(a)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(a))
    assert moments(common(a, b)) == moments(left) & moments(right)
    assert moments(minus(a, b)) == moments(left) - moments(right)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_median_step_is_a_real_one(count: int) -> None:
    events = [event(0, "step", "compute", 10 * i, 10 * i + 1 + (i * 3) % 5, f"step {i}") for i in range(count)]
    lengths = sorted(1 + (i * 3) % 5 for i in range(count))
    assert median(ledgers(events)).seconds == lengths[(count - 1) // 2]
