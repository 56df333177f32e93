"""The exchange of rows with experts under the checker: every launch of it, over few schedules."""

from __future__ import annotations

import exchange_launches
import pytest

from interlace.check import explore


@pytest.mark.parametrize(("launch", "replays"), [("forward_and_backward", 0), ("goes_again", 0), ("rows_alone", 1)])
def test_the_exchange_is_not_reported(launch: str, replays: int) -> None:
    verdict = explore(getattr(exchange_launches, launch), ranks=2, schedules=3, replays=replays, nbytes=1 << 16)
    assert verdict.ok, verdict
