"""What a failure is called: causes and consequences, details that survive the way, and the rank that is the odd one."""

from __future__ import annotations

import json
import time

import pytest

from interlace.errors import ConfigError, DataError, Hang, PeerLost
from interlace.failure import Failure, Position, compose, describe, hang


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Connection closed by peer"), "cause"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"), "consequence"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "timeout"),
        (RuntimeError("my own request timed out"), "cause"),
        (RuntimeError("CUDA out of memory in NCCL"), "cause"),
        (ConnectionResetError(), "consequence"),
        (PeerLost("rank 3 is gone"), "consequence"),
        (Hang("nobody came"), "timeout"),
        (DataError("line 1"), "cause"),
    ],
)
def test_causes_and_consequences(error: Exception, kind: str) -> None:
    assert describe(error, 0, Position()).kind == kind
    outer, handled = KeyError("raised from it"), KeyError("raised while it was handled")
    outer.__cause__, handled.__context__ = error, error
    assert describe(outer, 0, Position()).kind == describe(handled, 0, Position()).kind == kind


def test_details_of_any_name_survive() -> None:
    given = ConfigError("no")
    given.details = {"message": "kept", "cls": [7]}
    failure = describe(given, 1, Position(2, "load"))
    error = compose(Failure(**json.loads(json.dumps(failure.__dict__))))
    assert type(error) is ConfigError
    assert error.details["message"] == "kept"
    assert error.details["step"] == 2


@pytest.mark.parametrize(
    ("places", "stopped", "odd", "head"),
    [
        ([("a", 1, True), ("a", 1, True), ("b", 1, True)], (), [2], "rank 2 did not come where ranks 0, 1 waited"),
        ([("a", 5, True), ("a", 4, True), ("a", 5, True)], (), [1], "rank 1 did not come where ranks 0, 2 waited"),
        ([("a", 1, True), ("b", 1, True)], (), [], "the ranks waited longer than 3 s for each other in different"),
        ([(op, 1, True) for op in "abcc"], (), [0, 1], "ranks 0, 1 did not come where ranks 2, 3 waited"),
        ([(op, 1, True) for op in "aabb"], (), [], "the ranks waited longer than 3 s for each other in different"),
        ([(op, 1, True) for op in "aabcd"], (), [], "the ranks waited longer than 3 s for each other in different"),
        ([("a", 1, True), ("a", 1, True)], (), [], "every rank waited longer than 3 s in the same operation"),
        ([("a", 1, True), ("a", 1, True)], (1,), [1], "rank 1 is stopped by a signal; rank 0 waited"),
        ([("a", 1, True), ("a", 1, True)], (0, 1), [0, 1], "ranks 0, 1 are stopped by a signal for longer"),
        ([("a", 1, False), ("a", 1, True), ("c", 0, False)], (), [0, 2], "ranks 0, 2 did not come where rank 1"),
        ([("a", 1, False), ("a", 1, True), ("c", 0, False)], (2,), [2], "rank 2 is stopped by a signal; rank 1"),
    ],
)
def test_the_odd_one_out(
    places: list[tuple[str, int, bool]], stopped: tuple[int, ...], odd: list[int], head: str
) -> None:
    now = time.monotonic()
    at = {rank: Position(9, op, now - 3, waits, count) for rank, (op, count, waits) in enumerate(places)}
    error = hang(at, 3.0, stopped)
    assert error.details["odd"] == odd
    assert str(error).startswith(head)
    assert len(str(error).splitlines()) == 1 + len(places)
