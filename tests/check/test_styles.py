"""Protocols in styles of other people: none is reported that is right, and those with a fault for the right reason."""

from __future__ import annotations

import re

import pytest
from styles_right import RIGHT
from styles_wrong import WRONG

from interlace.check import explore


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_protocol_is_not_reported(name: str) -> None:
    launch, options = RIGHT[name]
    verdict = explore(launch, **{"ranks": (2, 3), "schedules": 7, "residency": False, "nbytes": 1 << 16, **options})
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_in_a_protocol_is_reported_with_its_cause_and_line(name: str) -> None:
    launch, kind, words, line, options = WRONG[name]
    (report,) = explore(
        launch, **{"ranks": (2, 3), "schedules": 10, "residency": False, "nbytes": 1 << 16, **options}
    ).reports
    assert report.kind in ((kind,) if isinstance(kind, str) else kind), report
    assert re.search(words, str(report)), report
    assert line in str(report), report
