"""Lines over copy engines: what comes, in which order, in which memory, and what is said of a peer that does not come.

Pipelines over them are in tests/parallel/test_boxed_pipelines.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from interlace import launch
from interlace.plan import boxes as plan

Run = Callable[..., list[Any]]
RANKS = "rank_functions_boxes"


@pytest.mark.parametrize(("ranks", "slots"), [(2, 1), (3, 2)])
def test_messages_of_every_size_and_type_come_as_they_were_sent(run_ranks: Run, ranks: int, slots: int) -> None:
    found = run_ranks(f"{RANKS}:messages", ranks, {"slots": slots, "count": 30})
    assert found == [30 * (ranks - 1)] * ranks


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_sends_beyond_the_slots_neither_block_nor_overwrite(run_ranks: Run, slots: int) -> None:
    for found in run_ranks(f"{RANKS}:bursts", 2, {"slots": slots}):
        assert found == [float(n) for n in range(7)]


def test_slots_grow_with_the_largest_message(run_ranks: Run) -> None:
    assert run_ranks(f"{RANKS}:grows", 2) == [[True] * 21] * 2


def test_words_may_wrap(run_ranks: Run) -> None:
    assert run_ranks(f"{RANKS}:wraps", 2) == [14, 14]


def test_a_peer_that_takes_nothing_is_named(run_ranks: Run) -> None:
    said, nothing = run_ranks(f"{RANKS}:never_taken", 2)
    assert nothing == ""
    assert re.match(r"rank 0 waited 0\.[5-9]\d* s for rank 1 to take message 2 along pp, found 1; look at", said)


def test_a_rank_has_slots_for_the_lines_that_come_to_it() -> None:
    assert plan.incoming([(0, 1), (1, 0), (1, 2), (2, 1)]) == 2
    assert plan.arriving([0, 1]) == 1
    assert plan.arriving([0, 1, 2, 0, 1, 2]) == 2  # from before and from behind, around the ring
    assert plan.arriving([0, 1, 1, 0]) == 1
    assert (plan.slot(0), plan.slot(256), plan.slot(257)) == (256, 256, 512)
    whole = plan.arena(2, plan.slot(1 << 24), 4)
    assert 6 << 24 <= whole <= (6 << 24) + (1 << 21)


# --- two GPUs --------------------------------------------------------------------------------------------------------


def on_gpus(function: str, **argument: Any) -> list[Any]:
    return launch.run_local(f"{RANKS}:{function}", 2, argument, device="cuda", timeout=100.0)


@pytest.mark.gpu2
@pytest.mark.parametrize("slots", [1, 3])
def test_messages_between_two_gpus(slots: int) -> None:
    assert on_gpus("messages", slots=slots, count=200) == [200, 200]


@pytest.mark.gpu2
def test_a_gpu_that_stays_away_is_named() -> None:
    said, nothing = on_gpus("a_gpu_that_stays_away")
    assert nothing == ""
    assert re.match(r"rank 0 waited [1-9]\.\d* s for rank 1 to send message 1 along pp, found 0; look at", said)
