"""Steps that wait for each transfer at once, and what they tell of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runs
from interlace.train.contention import FIRST, Contention


def test_what_a_step_computed_longer_than_a_serial_one() -> None:
    found = Contention(every=10)
    assert [step for step in range(40) if found.is_serial(step)] == [5, 15, 25, 35]
    assert found.note(4, 1.0, 0.1) is None, "nothing to compare with yet"
    assert found.note(FIRST, 1.1, 0.3) is None
    assert found.note(6, 1.0, 0.1) == pytest.approx(0.1)
    for step, seconds in ((15, 1.4), (25, 1.15), (35, 1.2)):  # one was held up by something else
        found.note(step, seconds, 0.3)
    assert found.note(36, 1.0, 0.05) == pytest.approx(0.05)
    assert not any(Contention(0).is_serial(step) for step in range(400))


@pytest.mark.ranks
def test_serial_steps_change_no_number(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    words = ["train.steps=9", "model.num_layers=2"]
    plans = ["dp=2 zero=3", "tp=2"]
    every = [[], ["run.contention_every=2"]]
    jobs = [
        runs.config(tmp_path, plan, [*words, *more], out=f"{plan[:2]}-{len(more)}") for plan in plans for more in every
    ]
    for counts in run_ranks("rank_functions_train:serial_steps", 2, {"configs": [job.to_toml() for job in jobs]}):
        assert counts[0] > 0, "step 6 is serial with every 100 too"
        assert (counts[1], counts[3]) == (2 * counts[0], 2 * counts[2])
    for first in (0, 2):
        assert runs.losses(jobs[first]) == runs.losses(jobs[first + 1])
    rows = runs.metrics(jobs[1])
    told = [row["step"] for row in rows if "contention" in row]
    assert told == [7, 9], "not of serial steps, nor before the first"
    assert all(row["contention"] >= 0 for row in rows if "contention" in row)
