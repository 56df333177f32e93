"""What a user's own kernels and host programs get wrong, or only seem to: a sentence with their line, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

from interlace import SymmetricHeap
from interlace.check import Report, explore
from interlace.cli import app
from interlace.symmetric.device import my_rank, next_epoch, put_signal, remote, signal, wait_until, world

N = 4
FILE = str(Path(__file__).resolve())


def the_report(launch, **options) -> Report:
    (report,) = explore(launch, **{"ranks": 2, "schedules": 1, "nbytes": 1 << 16, **options}).reports
    return report


# --- what repeats a report -------------------------------------------------------------------------------------------


BROKEN = """
import torch, triton, triton.language as tl
from interlace.symmetric.device import my_rank, signal, wait_until
@triton.jit
def stale(x, flag, heap):
    tl.store(x, tl.load(x) + 1.0)
    signal(flag, 1, 1 - my_rank(heap), heap)
    wait_until(flag, 1, 1 - my_rank(heap), heap)
@triton.jit
def spin(flag, heap):
    signal(flag, 1, 1 - my_rank(heap), heap)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
def rounds(heap):
    x, flag, out = heap.zeros(1, name="x"), heap.zeros(1, torch.int32, name="flag"), torch.zeros(1)
    stale[(1,)](x.local, flag.local, heap.context)
    heap.copy(out, x.peer(1 - heap.rank))
def endless(heap):
    flag = heap.zeros(1, torch.int32, name="flag")
    spin[(1,)](flag.local, heap.context)
"""


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        ("rounds", ["--replays", "2"]),
        ("rounds", ["--replays", "2", "--resident", "1", "--loose"]),
        ("endless", ["--stop"]),
        ("endless", ["--stop", "--seed", "3"]),
    ],
)
def test_the_options_after_again_with_give_the_same_report(launch: str, options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    call = ["check", f"{path}:{launch}", "--ranks", "2", "--schedules", "12"]
    first = CliRunner().invoke(app, [*call, *options])
    assert first.exit_code == 5, first.output
    again = re.findall(r"again with (.*)", first.stdout)[0].split()
    for option in (each for each in options if each.startswith("--") and each != "--seed"):
        assert option in again
    second = CliRunner().invoke(app, ["check", f"{path}:{launch}", *again])
    reports = [re.findall(r"(?s)\n(.*)\nexplored:", done.stdout) for done in (first, second)]
    assert reports[0] == reports[1] != []


def test_a_verdict_tells_of_what_was_run_and_nothing_else() -> None:
    one = str(explore(right, ranks=2, schedules=1))
    assert "explored: seed 0 as random; signals from 0; all programs of a rank at once\n" in one
    near = str(explore(right, ranks=2, schedules=2, seed=3, barriers=False))
    assert "seeds 3 to 4 as one rank ahead, slowest rank; signals from 0 and from just below the wrap" in near
    assert "a release taken as covering the whole program" in near
    assert "not all of these: a report ended it" in str(explore(beyond, ranks=2, schedules=9))
    assert "only the ends of waits are judged" in str(explore(right, ranks=2, schedules=2, stop=True))


# --- right kernels that look like waits ------------------------------------------------------------------------------


@triton.jit
def exchanged(x, inbox, flag, epochs, out, heap, B: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    epoch = next_epoch(epochs)
    put_signal(inbox, x, B, flag, epoch, (me + 1) % ranks, heap, B)
    wait_until(flag, epoch, (me + ranks - 1) % ranks, heap)
    tl.store(out + tl.arange(0, B), tl.load(inbox + tl.arange(0, B)))


def right(heap):
    x, inbox, out = torch.ones(N), heap.zeros(N, name="inbox"), torch.zeros(N)
    exchanged[(1,)](
        x, inbox.local, heap.signals(1).local, heap.signals(1, "epochs").local, out, heap.context, N
    )  # fmt: skip


@triton.jit
def many_steps(x, flag, out, heap, MOVES: tl.constexpr, STEPS: tl.constexpr, B: tl.constexpr):
    """Asks for the same flag before every step, though it was raised long ago."""
    at, total = tl.arange(0, B), tl.zeros([B], tl.float32)
    signal(flag, 1, (my_rank(heap) + 1) % world(heap), heap)
    for step in range(STEPS):
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
            pass
        total += tl.load(x + step * B * MOVES + at)
    tl.store(out + at, total)


@pytest.mark.parametrize(("moves", "width"), [(1, 64), (0, 64), (0, 1)])
def test_a_long_loop_that_reads_the_same_again_is_no_deadlock(moves: int, width: int) -> None:
    def launch(heap):
        x, out = torch.ones(150 * width), torch.zeros(width)
        many_steps[(1,)](x, heap.zeros(1, torch.int32, name="flag").local, out, heap.context, moves, 150, width)
        return lambda: torch.equal(out, torch.full((width,), 150.0))

    assert explore(launch, ranks=2, schedules=3).ok
    assert explore(launch, ranks=2, schedules=3, stop=True).ok is True


@triton.jit
def until_it_changes(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        pass


@triton.jit
def until_bit(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") & 2 == 0:
        pass


@pytest.mark.parametrize(("kernel", "said"), [(until_it_changes, "found 0, wanted other than 0"), (until_bit, "")])
def test_a_real_wait_is_a_deadlock_whatever_it_compares(kernel, said: str) -> None:
    report = the_report(lambda heap: kernel[(1,)](heap.zeros(1, torch.int32, name="flag").local))
    assert (report.kind, said in str(report), "flag[0]" in str(report)) == ("deadlock", True, True)


@triton.jit
def computes_for_ever(x):
    number = 1.0
    while tl.cast(number, tl.float32) > 0.5:  # for ever
        number = tl.cast(number, tl.float32) * 1.0
    tl.store(x, number)


def test_a_loop_without_memory_that_does_not_end_is_a_deadlock_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.check.watch.MOST_COMPARISONS", 2000)
    report = the_report(lambda heap: computes_for_ever[(1,)](heap.zeros(1, name="x").local))
    assert (report.kind, report.message.startswith("2000 comparisons without a memory event")) == ("deadlock", True)
    assert str(report.steps[0]).endswith("# for ever")


# --- host programs ---------------------------------------------------------------------------------------------------


@triton.jit
def fill(x, value, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.zeros([B], tl.float32) + value)


def beyond(heap):
    fill[(1,)](heap.zeros(3, name="x").local, 1.0, N)


def filled(heap):
    x = heap.zeros(N, name="x")
    fill[(1,)](x.local, 1.0, N)
    return x


def touching(then):
    """A launch that does something right, then something else."""
    return lambda heap: then(heap, filled(heap))


MISTAKES = {
    "no grid": (lambda heap, x: fill(x.local, 1.0, N), r"fill\(\.\.\.\) has no grid.*write fill\[\(programs,\)\]"),
    "a number as grid": (lambda heap, x: fill[1](x.local, 1.0, N), r"fill\[1\]: a grid is 1 to 3 whole numbers"),
    "half a program": (lambda heap, x: fill[(0.5,)](x.local, 1.0, N), r"fill\[\(0\.5,\)\]: a grid is 1 to 3"),
    "four dimensions": (lambda heap, x: fill[(1, 1, 1, 1)](x.local, 1.0, N), "a grid is 1 to 3 whole numbers"),
    "too few": (lambda heap, x: fill[(1,)](x.local, 1.0), "fill missing 1 .* 'B'; its parameters are x, value, B"),
    "too many": (lambda heap, x: fill[(1,)](x.local, 1.0, N, N), "fill takes 3 positional arguments but 4"),
    "unknown": (lambda heap, x: fill[(1,)](x.local, 1.0, N, num_wraps=4), 'num_wraps.*did you mean "num_warps"'),
    "the heap's": (lambda heap, x: fill[(1,)](x, 1.0, N), r"x lies on every rank; give x\.local, x\.peer\(rank\)"),
    "own heap": (lambda heap, x: SymmetricHeap(1 << 16), "made a SymmetricHeap of its own, which has one rank here"),
    "no GPU": (lambda heap, x: torch.zeros(1, device="cuda"), "CUDA|NVIDIA"),
    "freed twice": (lambda heap, x: (heap.free(x), heap.free(x)), "x was freed"),
    "a view freed": (lambda heap, x: heap.free(x.local), r"free\(Tensor\): give what empty\(\), zeros\(\) or signals"),
    "closed": (lambda heap, x: (heap.close(), heap.zeros(N)), r"the heap is closed; allocate before close\(\)"),
    "half a size": (lambda heap, x: heap.zeros(0.5, name="y"), r"y: shape 0\.5 of .*whole numbers"),
    "other sizes": (lambda heap, x: heap.zeros(3 + heap.rank, name="y"), "rank 1 asks for 16 bytes, rank 0 for 12;"),
    "other shapes": (lambda heap, x: heap.zeros((2, 3) if heap.rank else 6), "rank 1 asks for another shape or type"),
    "another call": (lambda heap, x: heap.zeros(1, name=f"y{heap.rank}"), "rank 1 and rank 0 make different calls"),
    "a list copied": (lambda heap, x: heap.copy(x.local, [1.0] * N), "copy was given list; give tensors"),
    "all copied": (lambda heap, x: heap.copy(x, torch.zeros(N)), "copy was given all of x; give tensors"),
    "all of a flag": (lambda heap, x: heap.write(heap.signals(1, "flag"), 1), "one int32 word, found all of flag"),
    "half a value": (lambda heap, x: heap.write(heap.signals(1).local, 1.5), r"value is 1\.5; give a whole number"),
    "int64": (
        lambda heap, x: heap.write(heap.signals(1).local, torch.tensor(1)),
        "int32 word, found .* of torch.int64",
    ),
    "no such peer": (lambda heap, x: heap.wait(heap.signals(1).local, 0, 2), "a wait for rank 2: the heap has 2 ranks"),
    "a number back": (lambda heap, x: 3, "returned 3; return a function without arguments that checks"),
    "a check of the heap": (lambda heap, x: lambda heap: True, "takes arguments; return a function without arguments"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_the_users_line(name: str) -> None:
    then, said = MISTAKES[name]
    report = the_report(touching(then))
    assert report.kind == "error"
    assert re.search(said, report.message), report
    if not said.startswith(("returned", "takes")):
        assert [(step.file, ") -> " in str(step)) for step in report.steps] == [(FILE, False)]


@pytest.mark.parametrize("no", [torch.tensor(False), np.bool_(False), torch.tensor([True, False]), False])
def test_no_in_any_type_is_a_wrong_result(no: object) -> None:
    report = the_report(touching(lambda heap, x: lambda: no))
    assert (report.kind, "its check returned" in report.message) == ("wrong result", True)
    assert explore(touching(lambda heap, x: lambda: torch.tensor([True])), ranks=1, schedules=1).ok


def test_a_tensor_kept_beyond_close_is_out_of_bounds() -> None:
    def launch(heap):
        kept = filled(heap).local
        heap.close()
        fill[(1,)](kept, 2.0, N)

    report = the_report(launch)
    assert (report.kind, "x[0], which was freed" in report.message) == ("out of bounds", True)


def test_copies_and_torch_operations_have_lines_too() -> None:
    def launch(heap):
        x = heap.zeros(N, name="x")
        x.peer(1 - heap.rank).add_(1.0)  # the addition
        heap.copy(torch.empty(N), x.local)  # the copy

    text = str(the_report(launch, schedules=9))
    assert "?:0" not in text
    assert "# the addition" in text
    assert "# the copy" in text or text.count("# the addition") == 2


def test_an_address_from_nowhere_is_no_element() -> None:
    def launch(heap):
        fill[(1,)](filled(heap).local[:0], 1.0, N)  # an empty tensor's address is 0

    report = the_report(launch)
    assert (report.kind, "far from every tensor" in report.message) == ("out of bounds", True)


@triton.jit
def given_a_number(x, heap):
    tl.store(remote(x, 0, heap), 1.0)  # no pointer


def test_a_primitive_given_the_wrong_thing_is_a_report_with_the_kernels_line() -> None:
    report = the_report(lambda heap: given_a_number[(1,)](3, heap.context))
    assert (report.kind, str(report.steps[0]).endswith("# no pointer")) == ("error", True)


# --- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def of_a_kind(x, y, out, B: tl.constexpr):
    at = tl.arange(0, B)
    left, right = tl.load(x + at), tl.load(y + at)
    chosen = tl.where(left > 0.25, left, -right)
    three = tl.full([B], 3, tl.int32).to(chosen.dtype)
    tl.store(out + at, tl.maximum(left * 2 + right, left * three) - chosen + 1.0)
    tl.store(out + B + at, tl.exp(left.to(tl.float32)).to(chosen.dtype))
    tl.store(out + 2 * B + at, (tl.sum(left.to(tl.float32), 0) + tl.max(tl.abs(left), 0)).to(chosen.dtype))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_calculate_with_every_kind_of_number(kind: torch.dtype) -> None:
    x, y = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)).to(kind)
    three = torch.tensor(3, dtype=kind)
    first = torch.maximum(x * 2 + y, x * three) - torch.where(x > 0.25, x, -y) + 1.0
    total = (x.float().sum() + x.abs().max()).to(kind).expand(16)
    expected = torch.stack([first, x.float().exp().to(kind), total])

    def launch(heap):
        out = torch.zeros(3, 16, dtype=kind)
        of_a_kind[(1,)](x, y, out, 16)
        return lambda: torch.testing.assert_close(out, expected)

    verdict = explore(launch, ranks=1, schedules=1)
    assert verdict.ok, verdict


@triton.jit
def beyond_the_world(x, heap):
    tl.store(remote(x, world(heap), heap), 1.0)


def test_a_peer_that_is_no_rank_is_said_to_be_none() -> None:
    report = the_report(lambda heap: beyond_the_world[(1,)](heap.zeros(1).local, heap.context))
    assert report.kind == "out of bounds"
    assert "its peer is no rank from 0 to world - 1" in report.message
