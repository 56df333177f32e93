"""What orders kernels, copies, flags and torch operations of one rank's streams, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from small_kernels import N, fill, sets

from interlace.check import explore


def beside(then: Any, *, event: bool = False) -> Any:
    """A launch that fills x on a side stream and does something on the default one, after an event or not."""

    def launch(heap):
        x, y = heap.zeros(N, name="x"), heap.zeros(N, name="y")
        word, flag = heap.zeros(1, torch.int32, name="word"), heap.zeros(1, torch.int32, name="flag")
        with heap.stream("side"):
            fill[(1,)](x.local, 1.0, N)
            sets[(1,)](word.local, 1, True)
            done = heap.event()
        if event:
            done.wait()
        then(heap, x.local, y.local, word.local, flag.local)

    return launch


BESIDE = {
    "a torch operation that reads": lambda heap, x, y, word, flag: x + 1,
    "a torch operation that writes": lambda heap, x, y, word, flag: x.fill_(2.0),
    "a torch operation that reads and writes another": lambda heap, x, y, word, flag: y.add_(x),
    "a torch operation with out": lambda heap, x, y, word, flag: torch.add(y, y, out=x),
    "a number taken out": lambda heap, x, y, word, flag: float(x[0]),
    "a copy from": lambda heap, x, y, word, flag: heap.copy(y, x),
    "a copy to": lambda heap, x, y, word, flag: heap.copy(x, y),
    "the value of a flag": lambda heap, x, y, word, flag: heap.write(flag, word),
    "a kernel": lambda heap, x, y, word, flag: fill[(1,)](x, 2.0, N),
}


@pytest.mark.parametrize("name", BESIDE)
def test_work_of_two_streams_races_without_an_event(name: str) -> None:
    reports = explore(beside(BESIDE[name]), ranks=1, schedules=9).reports
    assert [report.kind in ("data race", "buffer reused", "wrong order") for report in reports] == [True]
    assert explore(beside(BESIDE[name], event=True), ranks=1, schedules=5).ok


def test_an_event_says_nothing_of_what_came_after_it() -> None:
    def launch(heap, late=True):
        x, y = heap.zeros(N, name="x"), heap.zeros(N, name="y")
        with heap.stream("side"):
            early = heap.event()
            fill[(1,)](x.local, 1.0, N)
            done = early if late else heap.event()
        for _ in range(4):  # the other stream may be far ahead
            fill[(1,)](y.local, 1.0, N)
        done.wait()
        heap.copy(y.local, x.local)

    assert explore(lambda heap: launch(heap, late=False), ranks=1, schedules=9).ok
    assert not any(explore(launch, ranks=1, schedules=1, seed=seed).ok for seed in range(9))


def test_the_end_of_a_kernel_is_the_end_of_all_its_programs() -> None:
    def launch(heap):
        x, y = heap.empty(2 * N, name="x"), heap.empty(2 * N, name="y")
        halves[(2,)](x.local, N)
        heap.copy(y.local, x.local)
        return lambda: torch.equal(y.local, torch.arange(2.0 * N))

    verdict = explore(launch, ranks=1, schedules=10)
    assert verdict.ok, verdict


@triton.jit
def halves(x, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(x + at, at.to(tl.float32))


@pytest.mark.parametrize("synchronize", [True, False])
def test_who_has_synchronized_knows_what_its_streams_did(synchronize: bool) -> None:
    def launch(heap):
        x, y = heap.zeros(N, name="x"), heap.zeros(N, name="y")
        fill[(1,)](x.local, 1.0, N)
        if synchronize:
            heap.synchronize()
        with heap.stream("side"):
            heap.copy(y.local, x.local)

    assert explore(launch, ranks=1, schedules=9).ok is synchronize


def test_an_in_place_operation_reads_what_it_changes() -> None:
    def launch(heap, fills=False):
        x = heap.empty(N, name="x").local
        x.fill_(1.0) if fills else x.add_(1.0)

    assert [report.kind for report in explore(launch, ranks=1, schedules=1).reports] == ["read of unwritten memory"]
    assert explore(lambda heap: launch(heap, fills=True), ranks=1, schedules=1).ok


def test_an_out_argument_is_written() -> None:
    def launch(heap):
        x, y, z = (heap.zeros(N, name=name) for name in "xyz")
        with heap.stream("side"):
            heap.copy(y.local, x.local)
        torch.add(z.local, z.local, out=x.local)

    assert not explore(launch, ranks=1, schedules=9).ok


def test_a_result_of_torch_is_there_when_the_program_has_it() -> None:
    def launch(heap):
        x = heap.zeros(N, name="x")
        fill[(1,)](x.local, 1.0, N)
        more = x.local + 1
        return lambda: torch.equal(more, torch.full((N,), 2.0))

    verdict = explore(launch, ranks=1, schedules=5)
    assert verdict.ok, verdict


@triton.jit
def adds_one(word):
    tl.store(word, tl.load(word) + 1)


def test_replays_begin_after_the_last_collective() -> None:
    def launch(heap):
        first, second = (heap.zeros(1, torch.int32, name=name) for name in ("first", "second"))
        adds_one[(1,)](first.local)
        heap.barrier()
        adds_one[(1,)](second.local)
        return lambda: (int(first.local), int(second.local)) == (1, 3)

    verdict = explore(launch, ranks=2, schedules=3, replays=2)
    assert verdict.ok, verdict
