"""Right kernels are not reported: other people's styles, and the library's own examples."""

from __future__ import annotations

import pytest
from right_kernels import RIGHT

from example_files import NAMES, load
from interlace.check import explore


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_not_reported(name: str) -> None:
    verdict = explore(RIGHT[name], ranks=(2, 3), schedules=7, nbytes=1 << 16)
    assert verdict.ok, verdict
    assert verdict.schedules >= 14


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_not_reported(name: str) -> None:
    verdict = explore(load(name).launch, ranks=3, schedules=5, nbytes=1 << 16)
    assert verdict.ok, verdict
    replayed = explore(load(name).launch, ranks=2, schedules=2, replays=2, nbytes=1 << 16)
    assert replayed.ok or name == "ping_pong", replayed  # its turn is an argument, as a report of it says


@pytest.mark.parametrize("name", NAMES)
def test_every_wait_of_an_example_ends_when_a_rank_stops(name: str) -> None:
    verdict = explore(load(name).launch, ranks=3, schedules=5, stop=True, nbytes=1 << 16)
    assert verdict.ok, verdict
