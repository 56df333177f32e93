"""What is known of each element, and what clocks say of it, without any kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interlace.check.order import BLOCK, CTA, GPU, LANE, PLAIN, PROXY, SYS, Knowledge, Shadow


def fiber(number: int, now: np.ndarray | None = None) -> Knowledge:
    return Knowledge(3 * number, np.zeros(12, np.int32) if now is None else now.copy())


RANK_OF = np.array([-1] * 3 + [0] * 3 + [1] * 3 + [1] * 3)
ONE = pytest.mark.parametrize("at", [0, np.array([0]), np.array([1, 0])], ids=["int", "one", "block"])


def write(shadow: Shadow, by: Knowledge, component: int = LANE, kind: int = PLAIN, at: Any = 0) -> None:
    mine = by.first + component
    shadow.note_write(at, mine, int(by.now[mine]), 7, kind)


def read(shadow: Shadow, by: Knowledge, kind: int = PLAIN, at: Any = 0, component: int = LANE) -> None:
    mine = by.first + component
    shadow.note_read(at, mine, int(by.now[mine]), 5, kind, by.now)


def checked(shadow: Shadow, by: Knowledge, is_write: bool = False, kind: int = PLAIN, rank: int = 1, at: Any = 0):
    return shadow.check(at, by.now, is_write, kind, rank, RANK_OF)


@ONE
def test_a_write_is_ordered_by_what_was_published_and_by_nothing_else(at: Any) -> None:
    shadow, writer, reader = Shadow(2, True), fiber(1), fiber(2)
    write(shadow, writer, at=at)
    conflict = checked(shadow, reader, at=at)
    assert (conflict.event, conflict.earlier_is_write, conflict.component) == (7, True, 3)
    reader.learn(writer.published(True))
    assert checked(shadow, reader, at=at) is None
    write(shadow, writer, at=at)  # after the release
    assert checked(shadow, reader, at=at) is not None


def test_a_block_is_covered_only_after_a_barrier() -> None:
    shadow, writer, reader = Shadow(1, True), fiber(1), fiber(2)
    write(shadow, writer, BLOCK)
    reader.learn(writer.published(True))
    assert checked(shadow, reader) is not None
    writer.barrier()
    reader.learn(writer.published(True))
    assert checked(shadow, reader) is None
    write(shadow, writer, BLOCK)  # after the barrier
    reader.learn(writer.published(True))
    assert checked(shadow, reader) is not None


def test_a_release_by_every_thread_covers_what_one_did_only_after_a_barrier() -> None:
    shadow, writer, reader = Shadow(1, True), fiber(1), fiber(2)
    write(shadow, writer, LANE)
    reader.learn(writer.published(False))
    assert checked(shadow, reader) is not None
    writer.barrier()
    write(shadow, writer, LANE)  # after the barrier, before a release that follows it
    reader.learn(writer.published(False))
    assert checked(shadow, reader) is not None
    writer.barrier()
    reader.learn(writer.published(False))
    assert checked(shadow, reader) is None


def test_a_descriptor_store_is_covered_only_after_its_wait_and_a_barrier() -> None:
    shadow, writer, reader = Shadow(1, True), fiber(1), fiber(2)
    for steps in ([writer.barrier], [writer.flush], [writer.barrier, writer.flush]):
        write(shadow, writer, PROXY)
        for step in steps:
            step()
        reader.learn(writer.published(True))
        assert checked(shadow, reader) is not None
    writer.flush()
    write(shadow, writer, PROXY)  # after the wait
    writer.barrier()
    reader.learn(writer.published(True))
    assert checked(shadow, reader) is not None
    writer.flush()
    writer.barrier()
    reader.learn(writer.published(True))
    assert checked(shadow, reader) is None


@ONE
@pytest.mark.parametrize("count", [2, 3])
def test_every_concurrent_reader_is_remembered(count: int, at: Any) -> None:
    shadow, readers = Shadow(2, True), [fiber(1), fiber(2), fiber(3)][:count]
    for reader in readers * 2:
        read(shadow, reader, at=at)
    for unknown in readers:  # all but one are known: that one alone must be missed
        writer = Knowledge(12, np.zeros(15, np.int32))
        for reader in readers:
            if reader is not unknown:
                writer.now[reader.first] = reader.now[reader.first]
        conflict = checked(shadow, writer, is_write=True, at=at)
        assert not conflict.earlier_is_write
        assert conflict.component == unknown.first
        assert checked(shadow, writer, at=at) is None  # a read does not mind
        writer.now[unknown.first] = unknown.now[unknown.first]
        assert checked(shadow, writer, is_write=True, at=at) is None


@ONE
def test_a_read_takes_the_place_only_of_one_it_conflicts_with_no_less_than(at: Any) -> None:
    shadow, reader, writer = Shadow(2, True), fiber(1), fiber(2)
    read(shadow, reader, at=at)
    read(shadow, reader, SYS, at=at)  # an atomic write may come between it and nothing, but before the plain one
    conflict = checked(shadow, writer, is_write=True, kind=SYS, at=at)
    assert (conflict.earlier_kind, conflict.scopes) == (PLAIN, False)
    again = Shadow(2, True)
    read(again, reader, SYS, at=at)
    assert checked(again, writer, is_write=True, kind=SYS, at=at) is None


@pytest.mark.parametrize(
    ("earlier", "later", "rank", "races"),
    [
        (SYS, SYS, 1, False),
        (GPU, SYS, 1, True),
        (SYS, GPU, 1, True),
        (GPU, GPU, 0, False),
        (GPU, SYS, 0, False),
        (PLAIN, SYS, 0, True),
        (SYS, PLAIN, 0, True),
        (CTA, GPU, 0, True),
        (GPU, CTA, 0, True),
        (CTA, CTA, 0, True),
    ],
)
def test_atomics_race_unless_their_scopes_include_each_other(earlier: int, later: int, rank: int, races: bool) -> None:
    for at in (0, np.array([0])):
        shadow, writer = Shadow(1, True), fiber(1)
        write(shadow, writer, LANE, earlier)
        conflict = checked(shadow, fiber(2), is_write=True, kind=later, rank=rank, at=at)
        assert (conflict is not None) is races
        shadow = Shadow(1, True)
        read(shadow, writer, earlier)
        conflict = checked(shadow, fiber(2), is_write=True, kind=later, rank=rank, at=at)
        assert (conflict is not None) is races


def test_an_element_that_is_accessed_in_parts_keeps_its_history() -> None:
    shadow, writer = Shadow(2, False), fiber(1)
    write(shadow, writer)
    shadow.refine(4)
    assert checked(shadow, fiber(2), at=3) is not None
    assert shadow.written.tolist() == [True] * 4 + [False] * 4
    shadow = Shadow(2, True)
    read(shadow, writer, at=1)
    shadow.refine(2)
    assert [checked(shadow, fiber(2), is_write=True, at=at) is None for at in range(4)] == [True, True, False, False]


def test_the_first_element_that_nobody_has_written_is_told() -> None:
    shadow, writer = Shadow(4, False), fiber(1)
    assert (shadow.unwritten(2), shadow.unwritten(np.array([3, 1]))) == (2, 3)
    write(shadow, writer, at=2)
    write(shadow, writer, at=np.array([0, 3]))
    assert [shadow.unwritten(at) for at in (2, 1, np.array([0, 2]), np.array([0, 1, 3]))] == [None, 1, None, 1]
    assert Shadow(1, True).unwritten(0) is None
