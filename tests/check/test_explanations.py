"""What a report says the cause is: kernels that differ in one line, and each explanation where it is the right one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from small_kernels import N, awaits, fill, line_of, sets

from interlace.check import Report, explore
from interlace.symmetric.device import fence, my_rank, remote, signal, wait_until, world


def the_report(launch: Any, **options: Any) -> Report:
    (report,) = explore(launch, **{"ranks": 2, "schedules": 20, "residency": False, **options}).reports
    return report


def here(text: str) -> int:
    return line_of(f"# {text}", __file__)


def words(heap: Any, *names: str) -> list[torch.Tensor]:
    return [heap.zeros(1, torch.int32, name=name).local for name in names]


# --- a buffer reused by a later write --------------------------------------------------------------------------------


@triton.jit
def sends(x, inbox, told, peer, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, peer, heap) + at, tl.load(x + at))  # sends
    signal(told, 1, peer, heap)


@triton.jit
def takes(inbox, told, out, heap, N: tl.constexpr):
    wait_until(told, 1, 1 - my_rank(heap), heap)
    tl.store(out + tl.arange(0, N), tl.load(inbox + tl.arange(0, N)))  # takes


@triton.jit
def clears(inbox, peer, heap, N: tl.constexpr):
    tl.store(remote(inbox, peer, heap) + tl.arange(0, N), tl.zeros([N], tl.float32))  # clears


def test_a_later_kernel_of_the_writer_overwrites_what_is_being_read() -> None:
    """Both orders of the two accesses: the read that comes late, and the write over a read."""

    def launch(heap):
        x, inbox, out, (told,) = torch.ones(N), heap.zeros(N, name="inbox"), torch.zeros(N), words(heap, "told")
        if heap.rank == 0:
            sends[(1,)](x, inbox.local, told, 1, heap.context, N)
            clears[(1,)](inbox.local, 1, heap.context, N)
        else:
            takes[(1,)](inbox.local, told, out, heap.context, N)

    said = set()
    for seed in range(8):
        report = the_report(launch, schedules=1, seed=seed)
        assert report.kind == "buffer reused"
        assert {step.line for step in report.steps} == {here("takes"), here("clears")}
        said.add(report.message.partition("; ")[0])
    assert said == {
        "rank 1 inbox[0]: rank 1 takes program 0 was told by rank 0 that the element is there, but rank 0 clears "
        "program 0 has overwritten it while it may still be read",
        "rank 1 inbox[0]: rank 0 clears program 0 overwrites the element while rank 1 takes program 0 may still read "
        "it",
    }


def test_a_read_that_waited_for_nobody_is_no_reuse() -> None:
    def launch(heap):
        inbox, out, (told,) = heap.zeros(N, name="inbox"), torch.zeros(N), words(heap, "told")
        if heap.rank == 0:
            clears[(1,)](inbox.local, 1, heap.context, N)
        else:
            told.fill_(1)
            takes[(1,)](inbox.local, told, out, heap.context, N)

    orders = set()
    for seed in range(10):
        report = the_report(launch, schedules=1, seed=seed)
        assert report.kind == "data race"
        assert "rank 1 takes program 0 reads it without waiting for rank 0 clears program 0" in report.message
        orders.add(report.steps[0].line)
    assert orders == {here("takes"), here("clears")}


@triton.jit
def ring(x, slots, filled, credit, out, total, heap, SLOTS: tl.constexpr, AHEAD: tl.constexpr, N: tl.constexpr):
    at, peer = tl.arange(0, N), 1 - my_rank(heap)
    for turn in range(total):
        slot = turn % SLOTS * N + at
        if my_rank(heap) == 0:
            if AHEAD == 0:  # waits for the first credit of a round only
                wait_until(credit, (turn // SLOTS - 1) * SLOTS + 1, peer, heap)
            elif turn >= AHEAD:
                wait_until(credit, turn + 1 - AHEAD, peer, heap)
            tl.store(remote(slots, peer, heap) + slot, tl.load(x + turn * N + at))  # fills
            signal(filled, turn + 1, peer, heap)
        else:
            wait_until(filled, turn + 1, peer, heap)
            tl.store(out + turn * N + at, tl.load(slots + slot))  # empties
            signal(credit, turn + 1, peer, heap)


@pytest.mark.parametrize("ahead", [0, 2, 3, 4])
def test_a_ring_with_too_many_credits_reuses_a_slot_within_one_kernel(ahead: int) -> None:
    def launch(heap):
        x, slots, out = torch.arange(6.0 * N), heap.zeros(2 * N, name="slots"), torch.zeros(6 * N)
        ring[(1,)](x, slots.local, *words(heap, "filled", "credit"), out, 6, heap.context, 2, ahead, N)
        return lambda: heap.rank == 0 or torch.equal(out, x)

    if ahead == 2:
        assert explore(launch, ranks=2, schedules=8, residency=False).ok
        return
    orders = set()
    verdicts = [explore(launch, ranks=2, schedules=1, seed=seed, residency=False) for seed in range(15)]
    for report in [report for verdict in verdicts for report in verdict.reports]:
        if report.kind != "wrong result":  # of a sender so far ahead that all reads come after all writes
            assert report.kind == "buffer reused", report
            lines = [step.line for step in report.steps[:2]]
            assert sorted(lines) == sorted([here("fills"), here("empties")])
            orders.add(lines[0])
    assert orders == {here("fills"), here("empties")}


@triton.jit
def announces(x, inbox, told, out, heap, FIRST: tl.constexpr, N: tl.constexpr):
    """Signals every round before the round's elements are written."""
    at, ranks = tl.arange(0, N), world(heap)
    for step in range(ranks):
        peer = (my_rank(heap) + step) % ranks
        if FIRST:
            signal(told + my_rank(heap), 1, peer, heap)
        tl.store(remote(inbox, peer, heap) + my_rank(heap) * N + at, tl.load(x + at))  # announced
        if not FIRST:
            signal(told + my_rank(heap), 1, peer, heap)
    for peer in range(ranks):
        wait_until(told + peer, 1, peer, heap)
        tl.store(out + peer * N + at, tl.load(inbox + peer * N + at))  # believed


@pytest.mark.parametrize("first", [True, False])
def test_a_signal_before_the_data_is_no_reuse_also_in_a_loop(first: bool) -> None:
    def launch(heap):
        x, inbox, out = torch.ones(N), heap.zeros(3 * N, name="inbox"), torch.zeros(3 * N)
        announces[(1,)](x, inbox.local, heap.zeros(3, torch.int32).local, out, heap.context, first, N)

    if not first:
        assert explore(launch, ranks=3, schedules=4, residency=False).ok
        return
    for seed in range(8):
        report = the_report(launch, ranks=3, schedules=1, seed=seed)
        assert (report.kind, "reused" in str(report)) in (("wrong order", False), ("data race", False))
        assert here("announced") in [step.line for step in report.steps]


# --- fences ----------------------------------------------------------------------------------------------------------


@triton.jit
def fenced(x, inbox, told, out, heap, EARLY: tl.constexpr, N: tl.constexpr):
    at, peer = tl.arange(0, N), 1 - my_rank(heap)
    if EARLY:
        fence()  # too early
    tl.store(remote(inbox, peer, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    if not EARLY:
        fence()
    tl.atomic_xchg(remote(told, peer, heap), 1, sem="relaxed", scope="sys")  # relaxed
    while tl.atomic_add(told, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@pytest.mark.parametrize("early", [True, False])
def test_a_fence_before_the_data_does_not_cover_it(early: bool) -> None:
    def launch(heap):
        fenced[(1,)](torch.ones(N), heap.zeros(N).local, *words(heap, "told"), torch.zeros(N), heap.context, early, N)

    if not early:
        assert explore(launch, ranks=2, schedules=4, residency=False).ok
        return
    report = the_report(launch)
    assert report.kind == "wrong order"
    said = f"signal at line {here('relaxed')} covers only what came before the fence at line {here('too early')}"
    assert said in report.message


# --- signals that are lost -------------------------------------------------------------------------------------------


@triton.jit
def loses(word, heap, WAY: tl.constexpr, WANT: tl.constexpr):
    """Programs 0 and 1 signal, program 2 waits."""
    program = tl.program_id(0)
    if program == 2:
        if WAY == "past":
            while tl.atomic_add(word, 0, sem="acquire", scope="gpu") != WANT:  # waits
                pass
        else:
            while tl.atomic_add(word, 0, sem="acquire", scope="gpu") < WANT:
                pass
    elif WAY == "past":
        tl.atomic_add(word, 1, sem="release", scope="gpu")  # counts
    elif WAY == "set":
        tl.atomic_xchg(word, 1, sem="release", scope="gpu")  # sets
    elif WAY == "undone":
        if program == 0:
            tl.atomic_xchg(word, WANT, sem="release", scope="gpu")  # raises
        else:
            tl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")  # resets
    elif WAY == "minimum":
        if program == 0:
            tl.atomic_xchg(word, WANT, sem="release", scope="gpu")  # raised
        else:
            tl.atomic_min(word, 0, sem="relaxed", scope="gpu")  # lowers
    elif WAY == "replaced":
        tl.atomic_xchg(word, program + 1, sem="release", scope="gpu")  # replaces
    else:
        tl.atomic_add(word, 1, sem="release", scope="gpu")
        tl.atomic_add(word, 1, sem="release", scope="gpu")


LOST = {
    "past": (1, "(1 to 2) goes past the 1 it waits for (line {0}, 0 to 1)", "counts", "counts"),
    "set": (2, "(1 to 1) sets what an earlier signal has set (line {0}, 0 to 1)", "sets", "sets"),
    "undone": (1, "(1 to 0) undoes the signal it waits for (line {0}, 0 to 1)", "raises", "resets"),
    "minimum": (1, "(1 to 0) undoes the signal it waits for (line {0}, 0 to 1)", "raised", "lowers"),
    "replaced": (3, " replaces an earlier signal (line {0}, 0 to ", "replaces", "replaces"),
}


@pytest.mark.parametrize("way", LOST)
def test_the_ways_in_which_a_signal_is_lost(way: str) -> None:
    want, said, first, second = LOST[way]
    report = the_report(lambda heap: loses[(3,)](*words(heap, "word"), heap.context, way, want), ranks=1)
    assert report.kind == "lost signal", report
    assert f"program 2 waits for rank 0 word[0] for ever: the write at line {here(second)} " in report.message
    assert said.format(here(first)) in report.message
    assert [step.line for step in report.steps[:2]] == [here(first), here(second)]


@triton.jit
def long_words(word, WANT: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.atomic_xchg(word, WANT, sem="release", scope="gpu")
    elif tl.program_id(0) == 1:
        tl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")
    else:
        while tl.atomic_add(word, 0, sem="acquire", scope="gpu") < WANT:
            pass


@triton.jit
def unsigned_words(word, want):
    word, want = word.to(tl.pointer_type(tl.uint32)), want.to(tl.uint32)
    if tl.program_id(0) < 2:
        tl.atomic_xchg(word, want * (1 - tl.program_id(0)).to(tl.uint32), sem="release", scope="gpu")
    else:
        while tl.atomic_add(word, 0, sem="acquire", scope="gpu") != want:
            pass


def test_unsigned_words_are_compared_as_such() -> None:
    report = the_report(lambda heap: unsigned_words[(3,)](*words(heap, "word"), (1 << 32) - 7), ranks=1)
    assert (report.kind, "(-7 to 0) goes past the -7 it waits for" in report.message) == ("lost signal", True), report


def test_a_signal_that_nobody_has_read_is_lost_also_to_a_larger_one() -> None:
    def launch(heap):
        (word,) = words(heap, "word")
        for value in (1, 2):
            sets[(1,)](word, value, False)
        awaits[(1,)](word, 3)

    report = the_report(launch, ranks=1, schedules=1)
    assert (report.kind, "(1 to 2) replaces an earlier signal" in report.message) == ("lost signal", True)


def test_words_of_64_bits_are_compared_as_such() -> None:
    launch = lambda heap: long_words[(3,)](heap.zeros(1, torch.int64, name="word").local, 1 << 40)  # noqa: E731
    report = the_report(launch, ranks=1)
    assert report.kind == "lost signal", report
    assert f"({1 << 40} to 0) undoes the signal it waits for" in report.message


def test_signals_that_do_not_suffice_are_not_lost() -> None:
    report = the_report(lambda heap: loses[(3,)](*words(heap, "word"), heap.context, "", 5), ranks=1)
    assert (report.kind, "found 4, wanted at least 5" in str(report)) == ("deadlock", True)


@triton.jit
def toggles(word, heap, TURNS: tl.constexpr, WAITS: tl.constexpr):
    """Program 1 waits for every turn of a word, once more than program 0 turns it."""
    if tl.program_id(0) == 0:
        for turn in range(TURNS):
            while tl.atomic_add(word + 1, 0, sem="acquire", scope="gpu") < turn:
                pass
            tl.atomic_xor(word, 1, sem="release", scope="gpu")
    else:
        for turn in range(WAITS):
            while tl.atomic_add(word, 0, sem="acquire", scope="gpu") != (turn + 1) % 2:  # turned
                pass
            tl.atomic_add(word + 1, 1, sem="release", scope="gpu")


@pytest.mark.parametrize("launches", [1, 2])
def test_a_signal_that_was_seen_and_taken_back_is_not_lost(launches: int) -> None:
    def launch(heap):
        word = heap.zeros(2, torch.int32, name="word")
        for at in range(launches):
            if at:
                heap.copy(word.local, torch.zeros(2, dtype=torch.int32))
            toggles[(2,)](word.local, heap.context, 2, 2 if at + 1 < launches else 3)

    report = the_report(launch, ranks=1)
    assert report.kind == "deadlock", report
    assert "rank 0 word[0], found 0, wanted 1" in str(report)


@triton.jit
def takes_back(word):
    """Program 1 sets the word back that it has waited for, and waits for it again."""
    if tl.program_id(0) == 0:
        tl.atomic_xchg(word, 1, sem="release", scope="gpu")
    else:
        for _ in range(2):
            while tl.atomic_add(word, 0, sem="acquire", scope="gpu") != 1:
                pass
            tl.atomic_xchg(word, 0, sem="release", scope="gpu")


def test_a_signal_that_its_waiter_took_back_is_not_lost() -> None:
    report = the_report(lambda heap: takes_back[(2,)](*words(heap, "word")), ranks=1)
    assert (report.kind, "rank 0 word[0], found 0, wanted 1" in str(report)) == ("deadlock", True)


@triton.jit
def meets(count, sense, heap):
    before = tl.atomic_add(sense, 0, sem="relaxed", scope="sys")
    if tl.atomic_add(remote(count, 0, heap), 1, sem="acq_rel", scope="sys") == world(heap) - 1:  # arrives
        for peer in range(world(heap)):
            tl.atomic_xor(remote(sense, peer, heap), 1, sem="release", scope="sys")
        tl.atomic_xchg(remote(count, 0, heap), 0, sem="relaxed", scope="sys")  # after the turn
    while tl.atomic_add(sense, 0, sem="acquire", scope="sys") == before:
        pass


def test_a_counter_that_nobody_waits_for_and_that_lost_a_signal_is_named_beside_a_deadlock() -> None:
    def launch(heap):
        count, sense = words(heap, "count", "sense")
        for _ in range(3):
            meets[(1,)](count, sense, heap.context)

    report = the_report(launch, schedules=40)
    assert report.kind == "deadlock", report
    late, arrives = here("after the turn"), here("arrives")
    note = f"rank 0 count[0]: the write at line {late} (3 to 0) replaces the signal of line {arrives} (2 to 3), which"
    assert any(each.startswith(note) for each in report.notes)


# --- memory nobody wrote ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
def test_a_wait_for_a_word_nobody_has_written_is_a_read_of_it(fresh: bool) -> None:
    def launch(heap):
        word = (heap.empty if fresh else heap.zeros)(1, torch.int32, name="word").local
        awaits[(1,)](word, 1)

    report = the_report(launch, ranks=1)
    assert report.kind == ("read of unwritten memory" if fresh else "deadlock")
    assert ("rank 0 word[0], which nobody has written" in report.message) is fresh


@triton.jit
def reads_then_waits(x, word, out):
    tl.store(out, tl.load(x))
    while tl.atomic_add(word, 0, sem="acquire", scope="sys") != 1:
        pass


def test_a_deadlock_on_a_word_that_was_written_is_one_though_other_memory_was_not() -> None:
    def launch(heap):
        reads_then_waits[(1,)](heap.empty(1, name="x").local, *words(heap, "word"), torch.zeros(1))

    report = the_report(launch, ranks=1)
    assert (report.kind, "word[0] was never signalled" in str(report)) == ("deadlock", True)


# --- what a reader has waited for ------------------------------------------------------------------------------------


@triton.jit
def waits_for_another(x, inbox, told, out, heap, N: tl.constexpr):
    """Every rank tells the two others, but each waits for one and reads what the other has sent."""
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    for step in range(1, ranks):
        tl.store(remote(inbox, (me + step) % ranks, heap) + me * N + at, tl.load(x + at))
        signal(told + me, 1, (me + step) % ranks, heap)  # tells
    wait_until(told + (me + 1) % ranks, 1, (me + 1) % ranks, heap)  # waits for one
    tl.store(out + at, tl.load(inbox + (me + 2) % ranks * N + at))  # and reads the other


def test_a_race_tells_what_the_reader_has_waited_for_instead() -> None:
    def launch(heap):
        inbox, told = heap.zeros(3 * N, name="inbox"), heap.zeros(3, torch.int32, name="told")
        waits_for_another[(1,)](torch.ones(N), inbox.local, told.local, torch.zeros(N), heap.context, N)

    for seed in range(4):
        report = the_report(launch, ranks=3, schedules=1, seed=seed)
        assert report.kind == "data race"
        reader = next(step.by for step in report.steps if step.line == here("and reads the other"))
        me = int(reader.split()[1])
        one, other = (me + 1) % 3, (me + 2) % 3
        assert f"without waiting for rank {other}" in report.message
        assert report.notes == (
            f"{reader} has waited for rank {me} told[{one}] (line {here('waits for one')}), signalled by rank {one} "
            f"waits_for_another program 0 (line {here('tells')})",
        )


def test_a_race_of_somebody_who_waited_for_nothing_has_no_note() -> None:
    def launch(heap):
        x = heap.zeros(N, name="x")
        fill[(1,)](x.peer(0), 1.0, N)

    report = the_report(launch)
    assert (report.kind, report.notes) == ("data race", ())


# --- words that wrap -------------------------------------------------------------------------------------------------


@triton.jit
def compares(x, inbox, told, epochs, out, heap, NAIVE: tl.constexpr, N: tl.constexpr):
    at, peer = tl.arange(0, N), 1 - my_rank(heap)
    epoch = tl.load(epochs) + 1
    tl.debug_barrier()
    tl.store(epochs, epoch)
    half = (epoch & 1) * N
    tl.store(remote(inbox, peer, heap) + half + at, tl.load(x + at))
    signal(told, epoch, peer, heap)
    if NAIVE:
        while tl.atomic_add(told, 0, sem="acquire", scope="sys") < epoch:  # naive
            pass
    else:
        while tl.atomic_add(told, 0, sem="acquire", scope="sys") - epoch < 0:
            pass
    tl.store(out + at, tl.load(inbox + half + at))


@pytest.mark.parametrize("naive", [True, False])
def test_words_compared_as_if_they_did_not_wrap_are_named(naive: bool) -> None:
    def launch(heap):
        inbox, told, epochs = heap.zeros(2 * N, name="inbox"), heap.signals(1, "told"), heap.signals(1, "epochs")
        for _ in range(4):
            compares[(1,)](
                torch.ones(N), inbox.local, told.local, epochs.local, torch.zeros(N), heap.context, naive, N
            )  # fmt: skip

    if not naive:
        assert explore(launch, ranks=2, schedules=7, residency=False).ok
        return
    for seed in (3, 10, 17):  # words begin just below the wrap
        report = the_report(launch, schedules=1, seed=seed)
        assert any(
            "compared 2147483647 with -2147483648 as numbers that do not wrap" in note
            and f"test_explanations.py:{here('naive')})" in note
            for note in report.notes
        ), report
