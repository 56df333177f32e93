"""Tests that run beside each other, and those that must not."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from room import room


def test_one_that_is_alone_waits_for_the_others_and_is_not_overtaken(tmp_path: Path) -> None:
    seen: list[str] = []
    leave = threading.Event()

    def visit(name: str, alone: bool, until: threading.Event | None = None) -> None:
        with room(tmp_path, alone):
            seen.append(f"{name} comes")
            if until is not None:
                until.wait(10)
            seen.append(f"{name} goes")

    first = threading.Thread(target=visit, args=("first", False, leave))
    alone = threading.Thread(target=visit, args=("alone", True))
    late = threading.Thread(target=visit, args=("late", False))
    first.start()
    while not seen:
        time.sleep(0.01)
    visit("beside it", False)
    for thread in (alone, late):
        thread.start()
        time.sleep(0.1)
    assert seen == ["first comes", "beside it comes", "beside it goes"]
    leave.set()
    for thread in (first, alone, late):
        thread.join(10)
    assert seen[3:] == ["first goes", "alone comes", "alone goes", "late comes", "late goes"]
