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
    assert found.note(37, 1.0, 0.05, hertz=1.5e9) == pytest.approx(0.05), "the others' clocks are not known"
    assert not any(Contention(0).is_serial(step) for step in range(400))


def test_a_serial_step_counts_at_the_clock_of_the_others() -> None:
    """At its limit of power a GPU computes quicker in steps that pause."""
    found = Contention(every=10)
    found.note(FIRST, 1.2, 0.3, hertz=1.8e9)
    assert found.note(6, 1.1, 0.0, hertz=1.62e9) == pytest.approx(0.1), "0.9 s are 1.0 at nine tenths of the clock"
    assert found.note(7, 1.1, 0.0, hertz=1.8e9) == pytest.approx(0.2)


PLANS = {
    2: ["tp=2", "cp=2 exchange=ring zero=2 micro_batches=2", "dp=2 ep=2"],
    4: ["dp=4 shard=2 zero=3"],
}
EXPERTS = ["model.num_experts=4", "model.expert_ffn_size=12"]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_serial_steps_change_no_number(run_ranks: Callable[..., list[Any]], tmp_path: Path, ranks: int) -> None:
    """Every axis, with transfers that are asked for early, late and in halves."""
    words = ["train.steps=9", "model.num_layers=2"]
    jobs = [
        runs.config(tmp_path, plan, [*words, *more, *(EXPERTS if "ep=" in plan else [])], out=f"{number}-{len(more)}")
        for number, plan in enumerate(PLANS[ranks])
        for more in ([], ["run.contention_every=2"])
    ]
    for counts in run_ranks("rank_functions_train:serial_steps", ranks, {"configs": [job.to_toml() for job in jobs]}):
        rare, often = counts[::2], counts[1::2]
        assert min(rare) > 0, "step 6 is serial with every 100 too"
        assert often == [2 * count for count in rare]
    for rare, often in zip(jobs[::2], jobs[1::2], strict=True):
        assert runs.losses(rare) == runs.losses(often), rare.plan
        told = [row["step"] for row in runs.metrics(often) if "contention" in row]
        assert told == [7, 9], "not of serial steps, nor before the first"
        assert all(row.get("contention", 0.0) >= 0 for row in runs.metrics(often))
