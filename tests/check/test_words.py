"""Kernels with exactly one fault in how they use elements, words and descriptors, and the same without it."""

from __future__ import annotations

import pytest
import small_kernels
import torch
import triton
import triton.language as tl
from small_kernels import N, awaits, fill, line_of, sets

from interlace.check import explore
from interlace.symmetric.device import my_rank, remote

# --- descriptors -----------------------------------------------------------------------------------------------------


@triton.jit
def ptx(TEXT: tl.constexpr):
    tl.inline_asm_elementwise(TEXT, "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def own_descriptors(x, out, ORDER: tl.constexpr, N: tl.constexpr):
    """An element through both proxies of one program; ORDER is s(tore), S(tore), f(ence), w(ait) and L(oad)."""
    at = tl.arange(0, N)
    box = tl.make_tensor_descriptor(x, [N], [1], [N])
    for step in tl.static_range(len(ORDER)):
        if ORDER[step] == "s":
            tl.store(x + at, at.to(tl.float32))
        elif ORDER[step] == "S":
            box.store([0], at.to(tl.float32))
        elif ORDER[step] == "f":
            ptx("fence.proxy.async; mov.u32 $0, 0;")
        elif ORDER[step] == "w":
            ptx("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
        else:
            tl.store(out + at, box.load([0]))


@pytest.mark.parametrize(
    ("order", "ok"),
    [("sL", False), ("sfL", True), ("fsL", False), ("swL", False), ("SL", False), ("SwL", True), ("wSL", False)],
)
def test_descriptor_loads_rely_on_a_fence_after_stores_and_on_a_wait_after_their_own(order: str, ok: bool) -> None:
    def launch(heap):
        x, out = heap.empty(N, name="x"), torch.zeros(N)
        own_descriptors[(1,)](x.local, out, order, N)
        return lambda: torch.equal(out, torch.arange(N).float())

    reports = explore(launch, ranks=1, schedules=1).reports
    assert [report.kind for report in reports] == ([] if ok else ["missing proxy fence"])


@triton.jit
def two_boxes(inbox, flag, out, heap, ORDER: tl.constexpr, N: tl.constexpr):
    """A descriptor store that is published; ORDER is S(tore), w(ait), b(arrier), f(ence), s(tore) before the signal."""
    other, at = 1 - my_rank(heap), tl.arange(0, N)
    there = remote(inbox, other, heap)
    box = tl.make_tensor_descriptor(there, [N], [1], [N])
    for step in tl.static_range(len(ORDER)):
        if ORDER[step] == "S":
            box.store([0], at.to(tl.float32))
        elif ORDER[step] == "w":
            ptx("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
        elif ORDER[step] == "f":
            ptx("fence.proxy.async; mov.u32 $0, 0;")
        elif ORDER[step] == "s":
            tl.store(there + at, at.to(tl.float32))
        else:
            tl.debug_barrier()
    tl.atomic_xchg(remote(flag, other, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@pytest.mark.parametrize(
    ("order", "ok"),
    [("Swb", True), ("Swsb", True), ("Sbf", False), ("Sb", False), ("Sw", False), ("Sbw", False), ("SwSb", False)],
)
def test_a_descriptor_store_is_published_after_its_wait_then_a_barrier(order: str, ok: bool) -> None:
    def launch(heap):
        inbox, flag, out = heap.zeros(N, name="inbox"), heap.zeros(1, torch.int32, name="flag"), torch.zeros(N)
        two_boxes[(1,)](inbox.local, flag.local, out, heap.context, order, N)

    reports = explore(launch, ranks=2, schedules=3).reports
    assert [report.kind for report in reports] == ([] if ok else ["missing proxy fence"])


@triton.jit
def waits_for_nothing(inbox, out, heap, N: tl.constexpr):
    tl.store(remote(inbox, 1 - my_rank(heap), heap) + tl.arange(0, N), 1.0)
    tl.store(out + tl.arange(0, N), tl.make_tensor_descriptor(inbox, [N], [1], [N]).load([0]))


def test_a_descriptor_load_that_nothing_orders_is_a_race_like_another() -> None:
    def launch(heap):
        waits_for_nothing[(1,)](heap.zeros(N, name="inbox").local, torch.zeros(N), heap.context, N)

    assert [report.kind for report in explore(launch, ranks=2, schedules=3).reports] == ["data race"]


@triton.jit
def stores_by_descriptor(x, N: tl.constexpr):
    tl.make_tensor_descriptor(x, [N], [1], [N]).store([0], tl.arange(0, N).to(tl.float32))


@triton.jit
def loads_by_descriptor(x, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.make_tensor_descriptor(x, [N], [1], [N]).load([0]))


def test_a_kernels_end_completes_its_descriptors_and_its_beginning_admits_them() -> None:
    def launch(heap):
        x, y, out = heap.empty(N, name="x"), heap.empty(N, name="y"), torch.zeros(N)
        stores_by_descriptor[(1,)](x.local, N)
        heap.copy(y.local, x.local)
        loads_by_descriptor[(1,)](y.local, out, N)
        return lambda: torch.equal(out, torch.arange(N).float())

    verdict = explore(launch, ranks=1, schedules=2)
    assert verdict.ok, verdict


@triton.jit
def counted(word, SCOPE: tl.constexpr):
    tl.atomic_add(word, 1, sem="relaxed", scope=SCOPE)


@pytest.mark.parametrize(("scope", "kinds"), [("cta", ["wrong scope"]), ("gpu", []), ("sys", [])])
def test_programs_of_one_rank_need_the_scope_of_a_gpu(scope: str, kinds: list[str]) -> None:
    launch = lambda heap: counted[(2,)](heap.zeros(1, torch.int32, name="word").local, scope)  # noqa: E731
    reports = explore(launch, ranks=1, schedules=2, residency=False).reports
    assert [report.kind for report in reports] == kinds


@triton.jit
def moves_one(x, out):
    tl.store(out, tl.load(x))


@pytest.mark.parametrize("written", [True, False])
def test_one_element_nobody_has_written(written: bool) -> None:
    def launch(heap):
        x, out = heap.empty(2, name="x"), torch.zeros(1)
        if written:
            fill[(1,)](x.local, 1.0, 1)
        moves_one[(1,)](x.local, out)

    reports = explore(launch, ranks=1, schedules=1).reports
    assert [report.kind for report in reports] == ([] if written else ["read of unwritten memory"])


# --- elements and words ----------------------------------------------------------------------------------------------


@triton.jit
def of_different_widths(x, out, WIDE: tl.constexpr, PART: tl.constexpr):
    """Program 0 writes eight bytes or the first two of a word, program 1 reads a word or writes two other bytes."""
    if WIDE:
        if tl.program_id(0) == 0:
            tl.store(x.to(tl.pointer_type(tl.int64)), 7)
        else:
            tl.store(out, tl.load(x + 1))
    elif tl.program_id(0) == 0:
        tl.store(x.to(tl.pointer_type(tl.int16)), 7)
    else:
        tl.store(x.to(tl.pointer_type(tl.int16)) + PART, 7)


@pytest.mark.parametrize(("wide", "part", "races"), [(True, 0, True), (False, 1, False), (False, 0, True)])
def test_accesses_wider_or_narrower_than_elements_race_where_they_overlap(wide: bool, part: int, races: bool) -> None:
    def launch(heap):
        x, out = heap.zeros(4, torch.int32, name="x"), torch.zeros(1, dtype=torch.int32)
        of_different_widths[(2,)](x.local, out, wide, part)

    reports = explore(launch, ranks=1, schedules=2, residency=False).reports
    assert [report.kind for report in reports] == (["data race"] if races else [])


@pytest.mark.parametrize("how", ["a plain one", "the fill", "the copy"])
def test_a_signal_that_is_overwritten_by_anything_is_lost(how: str) -> None:
    def launch(heap):
        flag, other = heap.zeros(1, torch.int32, name="flag"), heap.zeros(1, torch.int32, name="other")
        sets[(1,)](flag.local, 1, False)
        if how == "a plain one":
            sets[(1,)](flag.local, 0, True)
        elif how == "the fill":
            flag.local.fill_(0)  # the fill
        else:
            heap.copy(flag.local, other.local)  # the copy
        awaits[(1,)](flag.local, 1)

    (report,) = explore(launch, ranks=1, schedules=1).reports
    assert report.kind == "lost signal"
    assert report.steps[1].line == line_of(f"# {how}", __file__, small_kernels.__file__)


@triton.jit
def polls_with_many_lanes(flag, LANES: tl.constexpr):
    while tl.max(tl.load(flag + tl.zeros([LANES], tl.int32), volatile=True), 0) != 1:
        pass


def test_a_poll_of_one_word_by_many_lanes_is_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.check.machine.LONG_LOOP", 100)
    launch = lambda heap: polls_with_many_lanes[(1,)](heap.zeros(1, torch.int32, name="flag").local, 64)  # noqa: E731
    verdict = explore(launch, ranks=1, schedules=1)
    assert [report.kind for report in verdict.reports] == ["deadlock"]
    assert verdict.events < 500


@triton.jit
def swaps(word, out, OLD: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.atomic_cas(word, OLD, 6, sem="relaxed", scope="sys")
    else:
        tl.store(out, tl.load(word))


@pytest.mark.parametrize(("old", "races"), [(5, False), (0, True)])
def test_a_swap_that_fails_is_no_write(old: int, races: bool) -> None:
    def launch(heap):
        swaps[(2,)](heap.zeros(1, torch.int32, name="word").local, torch.zeros(1, dtype=torch.int32), old)

    assert explore(launch, ranks=1, schedules=2, residency=False).ok is not races


@triton.jit
def counts_up(word):
    tl.atomic_add(word, 1, sem="relaxed", scope="sys")


def test_an_atomic_reads_what_it_changes() -> None:
    launch = lambda heap: counts_up[(1,)](heap.empty(1, torch.int32, name="word").local)  # noqa: E731
    (report,) = explore(launch, ranks=1, schedules=1).reports
    assert (report.kind, report.message.count("word[0]")) == ("read of unwritten memory", 1)


@triton.jit
def ordered_by(x, flag, out, SIGNAL: tl.constexpr, WAIT: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(x, 1.0)
        tl.atomic_add(flag, 1, sem=SIGNAL, scope="gpu")
    else:
        while tl.atomic_or(flag, 0, sem=WAIT, scope="gpu") != 1:
            pass
        tl.store(out, tl.load(x))


SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")


@pytest.mark.parametrize("signals", SEMANTICS)
@pytest.mark.parametrize("waits", SEMANTICS)
def test_a_signal_releases_and_a_wait_acquires(signals: str, waits: str) -> None:
    def launch(heap):
        x, flag, out = heap.zeros(1, name="x"), heap.zeros(1, torch.int32, name="flag"), torch.zeros(1)
        ordered_by[(2,)](x.local, flag.local, out, signals, waits)

    reports = explore(launch, ranks=1, schedules=3, residency=False).reports
    ok = signals in ("release", "acq_rel") and waits in ("acquire", "acq_rel")
    assert [report.kind for report in reports] == ([] if ok else ["wrong order"])
    side = "signal" if signals in ("relaxed", "acquire") else "wait"
    assert ok or f"the {side} at line" in reports[0].message


def test_a_word_where_another_was_has_no_history() -> None:
    def launch(heap):
        old = heap.zeros(1, torch.int32, name="old")
        sets[(1,)](old.local, 1, False)
        sets[(1,)](old.local, 0, False)
        heap.free(old)
        awaits[(1,)](heap.zeros(1, torch.int32, name="new").local, 1)

    (report,) = explore(launch, ranks=1, schedules=1).reports
    assert (report.kind, "new[0] was never signalled" in str(report)) == ("deadlock", True)


@triton.jit
def never_ends(x):
    while tl.load(x) >= 0:
        tl.store(x, tl.load(x) + 1)  # for ever


def test_a_loop_that_writes_for_ever_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.check.watch.MOST_EVENTS", 300)
    launch = lambda heap: never_ends[(1,)](heap.zeros(1, torch.int32, name="x").local)  # noqa: E731
    (report,) = explore(launch, ranks=1, schedules=1).reports
    assert (report.kind, report.message[:28]) == ("deadlock", "301 memory events and no end")


@triton.jit
def polls_uncached(x, flag, out, ACQUIRE: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(x, 1.0)
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.load(flag, cache_modifier=".cv") != 1:
            pass
        if ACQUIRE:
            tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        tl.store(out, tl.load(x))


@pytest.mark.parametrize(("acquire", "kinds"), [(True, []), (False, ["wrong order"])])
def test_a_load_past_the_caches_is_a_wait_without_order(acquire: bool, kinds: list[str]) -> None:
    def launch(heap):
        x, flag, out = heap.zeros(1, name="x"), heap.zeros(1, torch.int32, name="flag"), torch.zeros(1)
        polls_uncached[(2,)](x.local, flag.local, out, acquire)

    reports = explore(launch, ranks=1, schedules=3, residency=False).reports
    assert [report.kind for report in reports] == kinds
