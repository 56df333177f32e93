"""The fused all-gather and product under the checker, a few orders each, and the faults that it must find in them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from gather_launches import launch

from interlace.check import explore
from interlace.kernels import arrival
from interlace.kernels.workspace import Turn, Workspace


@pytest.mark.parametrize("name", ["chunks", "chained", "persistent", "put", "push"])
def test_no_report(name: str) -> None:
    verdict = explore(launch(name, count=5, chunks=2, keep=True), ranks=2, schedules=4)
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", ["chunks", "put", "push"])
def test_no_report_when_repeated_as_a_graph(name: str) -> None:
    verdict = explore(launch(name, count=3, calls=1, in_memory=True), ranks=2, schedules=3, replays=2)
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", ["chunks", "persistent"])
def test_no_report_when_calls_cut_their_rows_otherwise(name: str) -> None:
    verdict = explore(launch(name, count=5, chunks=(3, 1, 2)), ranks=3, schedules=3)
    assert verdict.ok, verdict


def test_three_ranks_of_which_one_has_no_rows() -> None:
    verdict = explore(launch("persistent", count=2), ranks=3, schedules=2)
    assert verdict.ok, verdict


def test_a_word_has_one_sender_however_calls_cut_their_rows() -> None:
    """Of three ranks one may be a call ahead of another that is still sending; its words would be set back."""
    senders: dict[int, set[int]] = {}
    plain = arrival.Arrival.word

    def word(self: arrival.Arrival, sender: int, number: int, rank: int | None = None) -> torch.Tensor:
        made = plain(self, sender, number, rank)
        if rank is not None:
            senders.setdefault(made.data_ptr(), set()).add(self.space.rank)
        return made

    with mock.patch.object(arrival.Arrival, "word", word):
        verdict = explore(launch("chunks", count=5, chunks=(3, 1, 2)), ranks=3, schedules=1)
    assert verdict.ok, verdict
    assert len(senders) == 3 * 2 * 3
    assert {len(those) for those in senders.values()} == {1}


def found(**how: Any) -> set[str]:
    return {report.kind for report in explore(launch(**how), ranks=2, schedules=6).reports}


def test_one_half_for_every_call_is_found() -> None:
    def turn(self: Workspace) -> Turn:
        self._number += 1
        return Turn(self, self._number, 0)

    with mock.patch.object(Workspace, "turn", turn):
        assert found(name="chunks", count=5) & {"data race", "buffer reused"}


def test_a_word_before_its_rows_is_found() -> None:
    def push(self: arrival.Arrival) -> int:
        heap = self.space.heap
        ready = heap.event()
        with heap.stream("push"):
            ready.wait()
            for piece, target, word in self.route.sends:
                heap.write(word, self.turn.number)
                heap.copy(target, piece.of(self.x_mK))
            self._sent = heap.event()
        return 0

    with mock.patch.object(arrival.Arrival, "_push", push):
        assert found(name="persistent", count=5, calls=1) & {"wrong order", "data race", "buffer reused"}


def test_rows_that_leave_after_the_call_are_found() -> None:
    with mock.patch.object(arrival.Arrival, "end", return_value=None):
        assert found(name="chunks", count=5) & {"data race", "buffer reused", "wrong result"}
