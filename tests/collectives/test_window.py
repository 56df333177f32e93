"""Windows in shared memory: what peers read, in which order, and what happens when one does not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., list[Any]]
RANKS = "rank_functions_window"

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_equal_the_library_s_with_ranks_out_of_step(run_ranks: Run, ranks: int) -> None:
    assert run_ranks(f"{RANKS}:exchanges", ranks) == [40] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_rounds_out_of_a_window_add_up_in_one_order(run_ranks: Run, ranks: int) -> None:
    assert run_ranks(f"{RANKS}:rounds", ranks) == [1] * ranks


def test_a_window_is_not_written_before_everyone_has_read_it(run_ranks: Run) -> None:
    """And without the claim the late reader sees the next content: the test can fail."""
    for claimed, unclaimed in run_ranks(f"{RANKS}:late_reader", 2):
        assert claimed == 1.0
        assert unclaimed in (1.0, 2.0)
    assert run_ranks(f"{RANKS}:late_reader", 2)[1][1] == 2.0


def test_words_may_wrap(run_ranks: Run) -> None:
    assert run_ranks(f"{RANKS}:wraps", 2) == [6, 6]


def test_a_peer_that_does_not_come_is_named(run_ranks: Run) -> None:
    found = run_ranks(f"{RANKS}:missing_peer", 2)
    assert found[0] == "rank 0 waited 0.3 s for rank 1 to reach exchange 1 along dp (it is at 0)."


def test_memory_that_one_rank_lacks_is_refused_on_all(run_ranks: Run) -> None:
    reason = "rank 1: [Errno 28] No space left on device"
    said = f'no memory that peers read ({reason}); free some, or use transport="library".'
    assert run_ranks(f"{RANKS}:without_memory", 2) == [[said, "0", [1] * 4], [said, "0", [0] * 4]]
