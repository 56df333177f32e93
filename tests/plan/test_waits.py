"""When products that wait for their rows hide more of an exchange than they lose."""

from __future__ import annotations

from interlace.plan.exchange import waits_pay


def test_small_experts_wait_for_their_rows_and_large_ones_do_not() -> None:
    assert waits_pay(768, 2), "measured: 5.5 ms a layer with waits, 6.1 without"
    assert not waits_pay(14336, 2), "measured: 30.3 and 28.2"
    assert not waits_pay(16, 1), "nothing moves"


def test_more_bytes_on_the_wire_are_worth_more_waits() -> None:
    largest = [max(inner for inner in range(1, 40000, 7) if waits_pay(inner, ways)) for ways in (2, 4, 8)]
    assert largest == sorted(set(largest))
    assert max(inner for inner in range(1, 40000, 7) if waits_pay(inner, 2, itemsize=4)) > largest[0]
