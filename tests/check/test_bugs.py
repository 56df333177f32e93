"""Public faults, made again, are found with the right cause; the seed in a report finds the same again."""

from __future__ import annotations

import re

import bugs_order  # noqa: F401 - registers
import bugs_protocol  # noqa: F401
import pytest
from bug import BUGS

from interlace.check import KINDS, explore


@pytest.mark.parametrize("name", BUGS)
def test_a_public_fault_is_reported_with_its_cause(name: str) -> None:
    launch, bug = BUGS[name]
    verdict = explore(launch, **{"ranks": 2, "schedules": 40, "nbytes": 1 << 16, **bug.options})
    assert not verdict.ok, f"{bug.public} was not found"
    (report,) = verdict.reports
    kinds = (bug.kind,) if isinstance(bug.kind, str) else bug.kind
    assert set(kinds) <= set(KINDS)
    assert report.kind in kinds, report
    assert re.search(bug.words, " ".join(str(report).split())), report
