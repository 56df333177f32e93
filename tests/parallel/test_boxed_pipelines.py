"""Pipelines over boxes give the numbers, and the account, of those over the library's lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from interlace import launch
from interlace.errors import InterlaceError

Run = Callable[..., list[Any]]
RANKS = "rank_functions_boxes"
ODD = [(2, 8), (3, 16), (1, 11), (3, 5), (3, 4), (2, 3), (1, 1)]  # sequences and positions of each micro-batch
EVEN = [(2, 9)] * 6
STEPS = [ODD, EVEN, [(5, 13)] * 2, ODD]  # with more, and with fewer, than the box has had


def job(name: str, slots: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "slots": slots, "steps": STEPS, "chunks": 2 if name == "interleaved" else 1, **more}


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_equal_one_process_and_account_as_the_library_does(run_ranks: Run, ranks: int) -> None:
    jobs = [job(name, slots) for name in ("1f1b", "interleaved", "zbv") for slots in (1, 3, 0)]
    jobs[0]["delay"] = jobs[7]["delay"] = 4e-3
    for through_host in jobs[3:6]:
        through_host["loads"] = 2
    for found in run_ranks(f"{RANKS}:chains", ranks, {"jobs": jobs}):
        for number, (asked, got) in enumerate(zip(jobs, found, strict=True)):
            assert got["error"] < 1e-5, asked
            library = found[number // 3 * 3 + 2]
            assert {**got, "error": 0} == {**library, "error": 0}, asked
            assert got["calls"] > 0


@pytest.mark.alone
@pytest.mark.parametrize(("how", "says"), [("sleeps", ["2RECV_F0 from rank 1", "step 3"]), ("ends", ["rank 1 (pid "])])
def test_a_rank_that_fails_ends_the_run_with_one_message(run_ranks: Run, how: str, says: list[str]) -> None:
    with pytest.raises(InterlaceError) as caught:
        run_ranks(f"{RANKS}:one_fails", 3, {"how": how}, timeout=2.0)
    assert all(word in str(caught.value) for word in says), caught.value


@pytest.mark.gpu2
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_on_two_gpus(name: str) -> None:
    """The first two steps of each shape send through the host, the others by copy engines; one rank is late."""
    steps = [[(2, 9), (5, 13), (1, 1), (3, 7)]] * 50
    jobs = [job(name, slots, delay=delay) | {"steps": steps} for slots, delay in ((3, 0.0), (1, 2e-3), (0, 0.0))]
    jobs.append(job(name, 2) | {"steps": [*[EVEN] * 5, *[ODD] * 5, *[EVEN] * 5]})
    for found in launch.run_local(f"{RANKS}:chains", 2, {"jobs": jobs}, device="cuda", timeout=100.0):
        for asked, got in zip(jobs, found, strict=True):
            assert got["error"] < 1e-5, asked
        assert all(got[what] == found[2][what] for got in found[:2] for what in ("sent", "calls", "transfers"))
