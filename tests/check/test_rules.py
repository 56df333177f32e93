"""One planted fault for every rule of the checker itself, and what a report must hold."""

from __future__ import annotations

import re
from pathlib import Path

import bugs_order  # noqa: F401 - registers
import bugs_protocol  # noqa: F401
import numpy as np
import pytest
import small_kernels
import torch
import triton
import triton.language as tl
from bug import BUGS
from right_kernels import RIGHT
from small_kernels import N, fill
from typer.testing import CliRunner

import interlace
from example_files import FOLDER
from interlace.check import explore, explore_all
from interlace.check.fiber import reached
from interlace.check.machine import Machine
from interlace.check.place import shown
from interlace.cli import app
from interlace.errors import ConfigError
from interlace.symmetric.device import my_rank, next_epoch, put_signal, remote, signal, wait_until, world

FILE = str(Path(__file__).resolve())


def line_of(text: str) -> int:
    return small_kernels.line_of(text, FILE)


# --- what reports hold -----------------------------------------------------------------------------------------------


@triton.jit
def racing(x, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(x, after, heap) + at, at.to(tl.float32))  # the write
    tl.store(out + at, tl.load(x + at))  # the read


def race(heap):
    x, out = heap.zeros((2, N), name="buffer"), torch.zeros(N)
    racing[(1,)](x.local[1], out, (heap.rank + 1) % heap.size, heap.context, N)


def test_a_race_names_buffer_index_ranks_programs_and_both_lines_and_its_seed_repeats_it() -> None:
    (report,) = explore(race, ranks=3, schedules=9, seed=5).reports
    assert report.kind == "data race"
    assert re.match(
        r"rank \d buffer\[1, 0\]: rank \d racing program 0 reads it without waiting for rank \d", report.message
    )
    assert {(step.file, step.line) for step in report.steps} == {
        (FILE, line_of("# the write")),
        (FILE, line_of("# the read")),
    }
    assert "store of rank" in str(report)
    again = explore(race, ranks=report.ranks, schedules=1, seed=report.seed).reports
    assert again == (report,)
    assert len({str(explore(race, ranks=3, schedules=9, seed=5).reports[0]) for _ in range(5)}) == 1


@triton.jit
def waits(flag, heap):
    wait_until(flag + 2, 3, 1 - my_rank(heap), heap, "waits")  # the wait


def test_a_deadlock_tells_who_waits_for_what_and_who_could_help() -> None:
    def launch(heap):
        flag = heap.zeros(4, torch.int32, name="flag")
        if heap.rank == 0:
            waits[(1,)](flag.local, heap.context)

    (report,) = explore(launch, ranks=2, schedules=3).reports
    assert report.kind == "deadlock"
    text = str(report)
    assert "rank 0 flag[2], found 0, wanted at least 3" in text
    assert "rank 0 flag[2] was never signalled; nobody is left who could" in text
    assert f"{shown(FILE)}:{line_of('# the wait')}:" in text


def test_a_wait_that_gave_up_is_a_report() -> None:
    def launch(heap):
        flag = heap.zeros(4, torch.int32, name="flag")
        heap.abort()
        waits[(1,)](flag.local, heap.context)

    (report,) = explore(launch, ranks=2, schedules=2).reports
    assert (report.kind, "has not signalled" in report.message) == ("error", True)


def test_words_are_compared_beyond_the_wrap_of_32_bits() -> None:
    low, high = -(1 << 31), (1 << 31) - 1
    assert [reached(*each, "<") for each in ((low, high), (high, low), (high, high))] == [True, False, True]
    assert [reached(*each, "<=") for each in ((low, high), (high, high))] == [True, False]


@triton.jit
def beyond(x, count, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, at.to(tl.float32), mask=at < count)


@pytest.mark.parametrize("count", [3, 4])
def test_out_of_bounds_by_one(count: int) -> None:
    def launch(heap):
        beyond[(1,)](heap.empty(3, name="short").local, count, N)

    verdict = explore(launch, ranks=1, schedules=1)
    assert verdict.ok is (count == 3)
    if count == 4:
        (report,) = verdict.reports
        assert "rank 0 short[3], behind the end of its 3 elements" in report.message
        assert str(report.steps[0]).endswith(": tl.store(x + at, at.to(tl.float32), mask=at < count)")


@pytest.mark.parametrize("shape", [(3, 1), (1, 3, 1), (3,)])
@pytest.mark.parametrize("is_heap", [True, False])
def test_beyond_a_tensor_of_several_dimensions(is_heap: bool, shape: tuple[int, ...]) -> None:
    """What lies there has no index in it."""

    def launch(heap):
        short = heap.empty(shape, name="short").local if is_heap else torch.empty(shape)
        beyond[(1,)](short, 4, N)

    (report,) = explore(launch, ranks=1, schedules=1).reports
    name = "short" if is_heap else "x"
    said = f"rank 0 {name}[3], behind the end of its 3 elements" in report.message
    assert (report.kind, said) == ("out of bounds", True), report.message


@pytest.mark.parametrize("back", [1, 60, 100])
def test_before_the_first_tensor_lie_the_heaps_own_words_which_no_kernel_may_touch(back: int) -> None:
    def launch(heap):
        x = heap.zeros(4, name="first")
        before[(1,)](x.local, back)

    (report,) = explore(launch, ranks=1, schedules=1).reports
    assert (report.kind, "bytes before rank 0 first[0]" in report.message) == ("out of bounds", True)


@triton.jit
def before(x, back):
    tl.store(x - back, 1.0)


def test_stream_flags_wrap_too() -> None:
    def launch(heap):
        flag, x, y = heap.signals(1, "flag"), heap.zeros(N, name="x"), heap.zeros(N, name="y")
        fill[(1,)](x.local, 1.0, N)
        heap.write(flag.local, heap.origin + 4)
        with heap.stream("side"):
            heap.wait(flag.local, heap.origin + 3, heap.rank)
            heap.copy(y.local, x.local)

    assert explore(launch, ranks=1, schedules=9).ok


def test_freed_memory_is_out_of_bounds() -> None:
    def launch(heap):
        x = heap.zeros(N, name="x")
        kept = x.local
        heap.free(x)
        beyond[(1,)](kept, N, N)

    (report,) = explore(launch, ranks=2, schedules=1).reports
    assert report.kind == "out of bounds"
    assert "x[0], which was freed" in report.message


def test_memory_nobody_wrote_is_told_from_memory_the_host_wrote() -> None:
    def launch(heap, written=False):
        x, out = heap.empty(N, name="x"), heap.empty(N, name="out")
        if written:
            x.local.fill_(1.0)
        heap.copy(out.local, x.local)

    (report,) = explore(launch, ranks=1, schedules=1).reports
    assert (report.kind, report.message[:26]) == ("read of unwritten memory", "rank 0 copy reads rank 0 x")
    assert explore(lambda heap: launch(heap, True), ranks=1, schedules=1).ok


def test_a_wrong_result_and_a_failing_program_are_reports() -> None:
    def wrong(heap):
        return lambda: torch.testing.assert_close(heap.zeros, 1) if False else False

    assert [r.kind for r in explore(wrong, ranks=2, schedules=1).reports] == ["wrong result"]

    def fails(heap):
        heap.zeros(1 << 24, name="huge")

    (report,) = explore(fails, ranks=2, schedules=1).reports
    assert report.kind == "error"
    assert "huge needs 67108864 bytes" in report.message


@pytest.mark.parametrize("stop", [False, True])
def test_whatever_the_users_program_raises_is_a_report_with_its_line(stop: bool) -> None:
    def fails(heap):
        raise ValueError("boom")

    def leaves(heap):
        raise SystemExit(3)

    for launch, said in ((fails, "ValueError: boom"), (leaves, "SystemExit: 3")):
        (report,) = explore(launch, ranks=2, schedules=1, stop=stop).reports
        assert (report.kind, report.message) == ("error", said)
    assert explore(fails, ranks=1, schedules=1).reports[0].steps[0].line == line_of('ValueError("boom")')
    (report,) = explore_all(fails).reports
    assert report.schedule.endswith("again with --exhaustive --schedules 1")


@triton.jit
def told_too_early(inbox, ready, taken, out, after, before, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    while tl.atomic_add(taken, 0, sem="acquire", scope="sys") != 0:
        pass
    tl.debug_barrier()
    tl.atomic_xchg(taken, 1, sem="relaxed", scope="sys")  # sets the word back, after it has waited for it
    tl.store(remote(inbox, after, heap) + at, at.to(tl.float32))
    tl.debug_barrier()
    tl.atomic_xchg(remote(ready, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(ready, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()
    tl.atomic_xchg(ready, 0, sem="relaxed", scope="sys")
    tl.atomic_xchg(remote(taken, before, heap), 0, sem="release", scope="sys")
    tl.store(out + at, tl.load(inbox + at))  # too late


def test_setting_a_word_back_does_not_hide_the_wait_before_it() -> None:
    def launch(heap):
        inbox, out = heap.empty(N, name="inbox"), torch.zeros(N)
        ready, taken = heap.zeros(1, torch.int32, name="ready"), heap.zeros(1, torch.int32, name="taken")
        after, before = (heap.rank + 1) % heap.size, (heap.rank - 1) % heap.size
        for _ in range(2):
            told_too_early[(1,)](inbox.local, ready.local, taken.local, out, after, before, heap.context, N)

    (report,) = explore(launch, ranks=2, schedules=20).reports
    assert report.kind == "wrong order"
    assert "signals before the element is read; signal after it" in report.message
    assert report.steps[0].line == line_of("# too late")


# --- participants other than kernels ---------------------------------------------------------------------------------


def streams(heap, with_event, with_flag):
    x, y = heap.zeros(N, name="x"), heap.zeros(N, name="y")
    flag = heap.zeros(1, torch.int32, name="flag")
    fill[(1,)](x.local, 1.0, N)
    if with_event:
        filled = heap.event()
    if with_flag:
        heap.write(flag.local, 1)
    with heap.stream("side"):
        if with_event:
            filled.wait()
        if with_flag:
            heap.wait(flag.local, 1, heap.rank)
        heap.copy(y.local, x.local)


@pytest.mark.parametrize(("event", "flag"), [(True, False), (False, True), (False, False)])
def test_a_copy_on_another_stream_needs_an_event_or_a_flag(event: bool, flag: bool) -> None:
    verdict = explore(lambda heap: streams(heap, event, flag), ranks=1, schedules=20)
    assert verdict.ok is (event or flag)
    if not verdict.ok:
        (report,) = verdict.reports
        assert report.kind in ("data race", "buffer reused")
        assert "copy from of rank 0 x[0]" in str(report)


def test_kernels_of_one_stream_are_ordered_and_host_barriers_order_ranks() -> None:
    def launch(heap, barrier=True):
        x, out = heap.zeros(N, name="x"), torch.zeros(N)
        fill[(1,)](x.local, 1.0, N)
        fill[(1,)](x.local, 2.0, N)
        if barrier:
            heap.barrier()
        heap.copy(out, x.peer((heap.rank + 1) % heap.size))
        return lambda: torch.equal(out, torch.full((N,), 2.0))

    assert explore(launch, ranks=3, schedules=10).ok
    assert not explore(lambda heap: launch(heap, False), ranks=3, schedules=10).ok


# --- schedules -------------------------------------------------------------------------------------------------------


@triton.jit
def rare(words, out):
    """Goes wrong only if program 1 looks between the two writes of program 0."""
    if tl.program_id(0) == 0:
        tl.atomic_xchg(words, 1, sem="release", scope="sys")
        tl.atomic_xchg(words + 1, 1, sem="release", scope="sys")
    else:
        first = tl.atomic_add(words, 0, sem="acquire", scope="sys")
        second = tl.atomic_add(words + 1, 0, sem="acquire", scope="sys")
        tl.store(out, first * 2 + second)


def rarely(heap):
    words, out = heap.zeros(2, torch.int32, name="words"), torch.zeros(1, dtype=torch.int32)
    rare[(2,)](words.local, out)
    return lambda: int(out) in (0, 3)


def test_the_exhaustive_search_finds_what_needs_a_preemption_and_ends() -> None:
    verdict = explore_all(rarely, preemptions=1, most_schedules=400)
    assert [report.kind for report in verdict.reports] == ["wrong result"]

    def fine(heap):
        check = rarely(heap)
        return lambda: check() or True

    whole = explore_all(fine, preemptions=0, most_schedules=2000)
    assert whole.ok
    assert whole.schedules > 10
    assert "all schedules with at most 0 preemptions" in str(whole)
    assert "the first schedules" in str(explore_all(fine, preemptions=1, most_schedules=3))


def test_residency_is_a_limit_when_given_and_a_note_when_not() -> None:
    launch, bug = BUGS["consumers_hold_the_places_producers_need"]
    verdict = explore(launch, ranks=1, schedules=10, nbytes=1 << 16)
    assert verdict.ok
    assert "1 ranks: " in str(verdict)
    assert "of 8 programs of a rank at once" in str(verdict) or "needs all 8" in str(verdict)
    assert not explore(launch, ranks=1, **bug.options).ok


@triton.jit
def epochs_of_device_memory(x, inbox, flag, taken, out, epochs, heap, N: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    after, before = (me + 1) % ranks, (me + ranks - 1) % ranks
    epoch = next_epoch(epochs)
    put_signal(inbox, x, N, flag, epoch, after, heap, N)
    wait_until(flag, epoch, before, heap)
    tl.store(out + tl.arange(0, N), tl.load(inbox + tl.arange(0, N)))
    signal(taken, epoch, before, heap)
    wait_until(taken, epoch, after, heap)


def test_epochs_in_memory_survive_replays_and_the_wrap_of_32_bits() -> None:
    origins = set()

    def launch(heap):
        origins.add(heap.origin)
        x, inbox, out = heap.zeros(N, name="x"), heap.zeros(N, name="inbox"), torch.zeros(N)
        flag, taken, epochs = (heap.signals(1, name) for name in ("flag", "taken", "epochs"))
        epochs_of_device_memory[(1,)](x.local, inbox.local, flag.local, taken.local, out, epochs.local, heap.context, N)

    assert explore(launch, ranks=2, schedules=8, replays=5).ok
    assert origins == {0, (1 << 31) - 2}


def test_arguments_are_checked() -> None:
    for options in ({"ranks": 0}, {"schedules": 0}, {"resident": 0}):
        with pytest.raises(ConfigError, match="must be at least 1"):
            explore(race, **options)
    assert interlace.explore is explore


def test_a_launch_that_touches_nothing_proves_nothing() -> None:
    for explored in (lambda: explore(lambda heap: None, schedules=3), lambda: explore_all(lambda heap: None)):
        with pytest.raises(ConfigError, match=r"touched no memory in .* schedules, so nothing was checked"):
            explored()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_exits_with_5_and_prints_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def k(bufs, out, rank, world):\n"
        "    p = tl.load(bufs + (rank + 1) % world).to(tl.pointer_type(tl.float32))\n"
        "    tl.store(p, 1.0)\n"
        "    mine = tl.load(bufs + rank).to(tl.pointer_type(tl.float32))\n"
        "    tl.store(out, tl.load(mine))\n"
        "def launch(heap):\n"
        "    buf, out = heap.zeros(1, name='buf'), torch.zeros(1)\n"
        "    k[(1,)](buf.addresses, out, heap.rank, heap.size)\n"
        "def two(heap, more): pass\n"
    )
    leaves = tmp_path / "leaves.py"
    leaves.write_text("raise SystemExit(3)\n")
    done = CliRunner().invoke(app, ["check", f"{path}:launch", "--ranks", "2", "--schedules", "5"])
    assert done.exit_code == 5, done.output
    assert f"{path}:5: tl.store(p, 1.0)" in done.stdout
    assert f"{path}:7: tl.store(out, tl.load(mine))" in done.stdout
    assert "not seen:" in done.stdout
    every = CliRunner().invoke(app, ["check", f"{path}:launch", "--exhaustive", "--schedules", "5"])
    assert (every.exit_code, every.stdout.startswith("mine.py:launch: 1 reports")) == (5, True)
    fine = CliRunner().invoke(app, ["check", f"{FOLDER / 'ring_shift.py'}:launch", "--ranks", "2", "--schedules", "2"])
    assert (fine.exit_code, "0 reports" in fine.stdout) == (0, True)
    for words, said in (
        ([f"{path}:lunch"], 'has no function lunch; did you mean "launch"?'),
        (["nowhere.py:launch"], "nowhere.py: no such file"),
        ([str(path)], "write FILE.py:LAUNCH"),
        ([f"{path}:launch", "--ranks", "two"], "write numbers from 1 to 16 with commas"),
        ([f"{path}:launch", "--exhaustive", "--ranks", "3"], "--exhaustive runs 2 ranks without --ranks"),
        ([f"{path}:launch", "--exhaustive", "--replays", "2"], "--exhaustive runs 2 ranks without --replays"),
        ([f"{path}:torch"], "has no function torch"),
        ([f"{path}:two"], "write def two(heap)"),
        ([f"{leaves}:launch"], "raised SystemExit: 3"),
    ):
        refused = CliRunner().invoke(app, ["check", *words])
        assert refused.exit_code == 2
        assert said in refused.stderr


def test_a_right_kernel_stays_right_without_the_rule_of_barriers() -> None:
    assert explore(RIGHT["polled_by_adding_nothing"], ranks=2, schedules=4, barriers=False).ok
    launch, _ = BUGS["release_by_one_thread_only"]
    assert explore(launch, ranks=2, schedules=10, barriers=False).ok


@triton.autotune(configs=[triton.Config({"B": 16}), triton.Config({"B": 32})], key=["K"])
@triton.jit
def product(a, b, out, K, B: tl.constexpr):
    rows, inner = tl.arange(0, B), tl.arange(0, B)
    left = tl.load(a + rows[:, None] * K + inner[None, :], mask=inner[None, :] < K, other=0.0)
    right = tl.load(b + inner[:, None] * B + rows[None, :], mask=inner[:, None] < K, other=0.0)
    tl.store(out + rows[:, None] * B + rows[None, :], tl.dot(left, right))


def test_products_of_bfloat16_and_tuned_kernels_give_numbers() -> None:
    a, b = torch.randn(16, 9).bfloat16(), torch.randn(9, 16).bfloat16()

    def launch(heap):
        out = torch.zeros(16, 16)
        product[(1,)](a, b, out, 9)
        return lambda: torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)

    assert explore(launch, ranks=1, schedules=1).ok


def test_after_a_rank_stops_a_record_that_names_a_wrong_peer_is_a_report() -> None:
    @triton.jit
    def names_itself(flag, heap):
        wait_until(flag, 1, my_rank(heap), heap, "mistaken")

    def launch(heap):
        flag = heap.signals(1, "flag")
        names_itself[(1,)](flag.local, heap.context)

    (report,) = explore(launch, ranks=3, schedules=8, stop=True).reports
    assert (report.kind, report.message.count("names rank")) == ("no exit", 1)


@triton.jit
def reads_a_scalar(x, out, read, filled, heap, BARRIER: tl.constexpr):
    other = 1 - my_rank(heap)
    if my_rank(heap) == 0:
        wait_until(filled, 1, other, heap)
        value = tl.load(x)
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(remote(read, other, heap), 1, sem="release", scope="sys")
        tl.store(out, value)
    else:
        tl.store(remote(x, other, heap), 1.0)
        signal(filled, 1, other, heap)
        wait_until(read, 1, other, heap)
        tl.store(remote(x, other, heap), 2.0)


@pytest.mark.parametrize("barrier", [True, False])
def test_all_threads_load_a_scalar_but_one_thread_releases(barrier: bool) -> None:
    def launch(heap):
        x, out = heap.empty(1, name="x"), heap.zeros(1, name="out")
        read, filled = heap.zeros(1, torch.int32, name="read"), heap.zeros(1, torch.int32, name="filled")
        reads_a_scalar[(1,)](x.local, out.local, read.local, filled.local, heap.context, barrier)

    verdict = explore(launch, ranks=2, schedules=5)
    assert [report.kind for report in verdict.reports] == ([] if barrier else ["missing barrier"])


@triton.jit
def fenced(inbox, flag, out, heap, PTX: tl.constexpr, BARRIER: tl.constexpr, N: tl.constexpr):
    other, at = 1 - my_rank(heap), tl.arange(0, N)
    tl.store(remote(inbox, other, heap) + at, at.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.inline_asm_elementwise(PTX, "=r", [], tl.int32, is_pure=False, pack=1)
    tl.atomic_xchg(remote(flag, other, heap), 1, sem="relaxed", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@pytest.mark.parametrize(
    ("scope", "barrier", "kinds"),
    [("gpu", True, ["wrong scope"]), ("sys", True, []), ("sys", False, ["missing barrier"])],
)
def test_a_signal_reaches_no_further_than_the_fence_before_it(scope: str, barrier: bool, kinds: list[str]) -> None:
    def launch(heap):
        inbox, flag, out = heap.zeros(N, name="inbox"), heap.zeros(1, torch.int32, name="flag"), torch.zeros(N)
        fenced[(1,)](inbox.local, flag.local, out, heap.context, f"fence.acq_rel.{scope}; mov.u32 $0, 0;", barrier, N)

    assert [report.kind for report in explore(launch, ranks=2, schedules=5).reports] == kinds


@triton.jit
def passed_on(x, flag, out, heap, STORE: tl.constexpr):
    program = tl.program_id(0)
    if program == 0:
        tl.store(x, 1.0)
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    elif program == 1:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:
            pass
        if STORE:
            signal(flag, 2, my_rank(heap), heap)
        else:
            tl.atomic_add(flag, 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 2:
            pass
        tl.debug_barrier()
        tl.store(out, tl.load(x))


@pytest.mark.parametrize("store", [False, True])
def test_only_what_has_read_a_word_passes_on_the_releases_before_it(store: bool) -> None:
    def launch(heap):
        x, flag, out = torch.zeros(1), heap.zeros(1, torch.int32, name="flag"), torch.zeros(1)
        passed_on[(3,)](x, flag.local, out, heap.context, store)

    reports = explore(launch, ranks=1, schedules=5, residency=False).reports
    assert [report.steps[-1].what.split()[0] for report in reports] == (["load"] if store else [])


@triton.jit
def eight_bytes(x, at):
    tl.store((x + at).to(tl.pointer_type(tl.int64)), 7)


@pytest.mark.parametrize(("at", "ok"), [(2, True), (4, False)])
def test_half_of_an_element_beyond_the_end_is_out_of_bounds(at: int, ok: bool) -> None:
    def launch(heap):
        eight_bytes[(1,)](heap.empty(5, torch.int32, name="x").local, at)

    assert [report.kind for report in explore(launch, ranks=1, schedules=1).reports] == (
        [] if ok else ["out of bounds"]
    )


def test_every_schedule_begins_with_the_same_random_numbers() -> None:
    drawn = set()

    def launch(heap):
        drawn.add((float(torch.rand(())), float(np.random.rand())))
        fill[(1,)](heap.zeros(N, name="x").local, 1.0, N)

    explore(launch, ranks=1, schedules=3)
    assert len(drawn) == 1


def test_nothing_of_a_rank_that_has_stopped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, later = [], []
    kill, close = Machine.kill, Machine.close

    def killed(self: Machine, rank: int) -> None:
        stopped.append((rank, len(self.events)))
        kill(self, rank)

    def closed(self: Machine) -> None:
        if self.dead is not None:
            rank, begin = stopped[-1]
            later.extend(fiber.rank == rank for fiber, *_ in self.events[begin:])
        close(self)

    monkeypatch.setattr(Machine, "kill", killed)
    monkeypatch.setattr(Machine, "close", closed)
    explore(RIGHT["ring_all_reduce"], ranks=3, schedules=20, stop=True, most=20, nbytes=1 << 16)
    assert len(stopped) > 10
    assert len(later) > 100
    assert not any(later)
