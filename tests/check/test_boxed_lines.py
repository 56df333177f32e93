"""Lines over copy engines under the checker: messages both ways, through fewer slots than there are of them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from interlace.check import explore
from interlace.collectives import Group, Meter, boxes
from interlace.symmetric import SymmetricHeap

SIZES = (5, 3, 5, 1, 4)


def content(source: int, number: int) -> torch.Tensor:
    return torch.arange(SIZES[number], dtype=torch.int32) + 100 * source + 10 * number


def launch(slots: int, fault: str = "") -> Callable[[SymmetricHeap], Callable[[], None]]:
    """Every rank sends to the next one and to the one before.

    fault: "full" sends without waiting for a free slot, "early" writes each word before the copy that it tells of.
    """

    def program(heap: SymmetricHeap) -> Callable[[], None]:
        ranks, me = heap.size, heap.rank
        pairs = sorted({(a, (a + step) % ranks) for a in range(ranks) for step in (1, ranks - 1)})
        group = Group("pp", tuple(range(ranks)), me, heap.device, Meter(record=False))
        with mock.patch.object(boxes, "SymmetricHeap", return_value=heap):
            made = boxes.Boxes(group, pairs, dict.fromkeys(pairs, group), 10.0, slots)
            made.require(4 * max(SIZES))
        if fault:
            plant(fault, heap, [line for line in made.values() if line.source == me])
        coming, going = {}, []
        for number in range(len(SIZES)):
            for source, target in pairs:
                if target == me:
                    line = made[source, target]
                    coming[source, number] = line.receive((SIZES[number],), torch.int32, "tensor")
                if source == me:
                    going.append(made[source, target].send(content(me, number), name="tensor"))
        found = {key: handle.wait() for key, handle in coming.items()}
        for sending in going:
            sending.wait()

        def check() -> None:
            for (source, number), tensor in found.items():
                torch.testing.assert_close(tensor, content(source, number), rtol=0, atol=0)

        return check

    return program


def plant(fault: str, heap: SymmetricHeap, lines: list[boxes.Box]) -> None:
    copy, write, wait, later = heap.copy, heap.write, heap.wait, []

    def not_for_slots(flag: torch.Tensor, *rest: int) -> None:
        if not any(flag is line._taken for line in lines):
            wait(flag, *rest)

    def and_then_copy(*given: object) -> None:
        write(*given)
        copy(*later.pop())

    if fault == "full":
        heap.wait = not_for_slots
    else:
        heap.copy, heap.write = lambda *given: later.append(given), and_then_copy


@pytest.mark.parametrize(("ranks", "slots"), [(2, 1), (2, 3), (3, 2)])
def test_messages_are_not_reported(ranks: int, slots: int) -> None:
    verdict = explore(launch(slots), ranks=ranks, schedules=20, nbytes=1 << 16)
    assert verdict.ok, verdict


@pytest.mark.parametrize(("fault", "kinds"), [("full", {"buffer reused", "data race"}), ("early", {"data race"})])
def test_planted_faults_are(fault: str, kinds: set[str]) -> None:
    verdict = explore(launch(1, fault), ranks=2, schedules=20, nbytes=1 << 16)
    assert {report.kind for report in verdict.reports} <= kinds
    assert verdict.reports
