"""What the interpreter has recorded of a builtin gives, with other numbers, what the builtin itself would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from interlace.check import explore
from interlace.check.machine import Machine
from interlace.symmetric import shortcuts
from interlace.symmetric.recorded import key_of

B, TURNS = 4, 8  # recorded are the second and the third call, and those after them are quick


@triton.jit
def twice_the_same(x, out, start, TURNS: tl.constexpr):
    """`a + a` first, with the same types and then with other operands."""
    for turn in range(TURNS):
        a = tl.load(x + turn)
        b = a
        if turn >= start:
            b = tl.load(x + turn + 1)
        tl.store(out + turn, a + b)


@triton.jit
def of_a_constant(x, out, start, TURNS: tl.constexpr):
    """`value + 1` with a value that is a 1 of the program first."""
    for turn in range(TURNS):
        value = 1
        if turn >= start:
            value = tl.load(x + turn)
        tl.store(out + turn, value + 1)


@triton.jit
def instead(x, out, start, TURNS: tl.constexpr):
    """What a masked load gives instead is 0 at first: the interpreter asks a number whether there is any."""
    for turn in range(TURNS):
        other = tl.load(x + turn)
        if turn < start:
            other = other * 0
        tl.store(out + turn, tl.load(x + turn, mask=turn < 0, other=other))


@pytest.mark.parametrize("kernel", [twice_the_same, of_a_constant, instead])
@pytest.mark.parametrize("start", range(1, 6))
def test_what_was_alike_when_it_was_recorded_may_differ_later(kernel: Any, start: int) -> None:
    x = torch.arange(1, TURNS + 2, dtype=torch.int32) ** 2
    early = torch.arange(TURNS) < start
    expected = {
        twice_the_same: torch.where(early, 2 * x[:-1], x[:-1] + x[1:]),
        of_a_constant: torch.where(early, 2, x[:-1] + 1),
        instead: torch.where(early, 0, x[:-1]),
    }[kernel]

    def launch(heap: Any) -> Any:
        out = torch.zeros(TURNS, dtype=torch.int32)
        kernel[(1,)](x, out, start, TURNS)
        return lambda: torch.equal(out, expected.int())

    shortcuts._patches.cache_clear()  # nothing is recorded yet
    try:
        for _ in range(2):
            verdict = explore(launch, ranks=1, schedules=2)
            assert verdict.ok, verdict
    finally:
        shortcuts._patches.cache_clear()


@triton.jit
def spread(x, y, out, turn, B: tl.constexpr):
    at = tl.arange(0, B)
    one, two, row = tl.load(x + turn), tl.load(y + turn), tl.load(x + at)
    kind = row.dtype
    whole = out + turn * 8 * B * B + at[:, None] * B + at[None, :]
    tl.store(whole, row[:, None] * row[None, :] + one)
    tl.store(whole + B * B, one - row[:, None] + row[None, :])
    tl.store(whole + 2 * B * B, tl.full([B, B], 3, tl.int32).to(kind) * (row - two)[None, :])
    tl.store(whole + 3 * B * B, (one < row)[:, None].to(kind) + (row >= two)[None, :].to(kind))
    both = tl.broadcast_to(one, [B, B]) + tl.broadcast_to(two, [B, B])
    tl.store(whole + 4 * B * B, both)
    tl.store(whole + 5 * B * B, tl.where(at[:, None] > at[None, :], one, row[None, :]))
    tl.store(whole + 6 * B * B, tl.maximum(row[:, None], two) + tl.sum(both, 0)[None, :])
    tl.store(whole + 7 * B * B, tl.load(x + at[:, None] + at[None, :], mask=(at < B - turn)[:, None], other=two))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16])
def test_scalars_and_rows_are_spread_as_the_interpreter_spreads_them(kind: torch.dtype) -> None:
    x = (torch.arange(1, 2 * B) * 3 % 7).to(kind)
    y = x.flip(0).contiguous()

    def expected(turn: int) -> torch.Tensor:
        one, two, row, at = x[turn], y[turn], x[:B], torch.arange(B)
        both = (one + two).expand(B, B)
        sums = ((one < row).to(kind)[:, None], (row >= two).to(kind)[None])
        return torch.stack(
            [
                row[:, None] * row + one,
                one - row[:, None] + row,
                (3 * (row - two)).expand(B, B),
                sums[0] + sums[1],
                both,
                torch.where(at[:, None] > at, one, row),
                torch.maximum(row, two)[:, None] + both.sum(0, dtype=kind),
                torch.where((at < B - turn)[:, None], x[at[:, None] + at], two),
            ]
        )

    def launch(heap: Any) -> Any:
        out = torch.zeros(B, 8, B, B, dtype=kind)
        for turn in range(B):
            spread[(1,)](x, y, out, turn, B)
        return lambda: torch.testing.assert_close(out, torch.stack([expected(turn) for turn in range(B)]))

    verdict = explore(launch, ranks=1, schedules=2)
    assert verdict.ok, verdict


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def reductions(x, out, B: tl.constexpr):
    at = tl.arange(0, B)
    value = tl.load(x + at)
    tl.store(out + at, tl.cumsum(value, 0))
    tl.store(out + B + at, tl.sort(value))
    tl.store(out + 2 * B, tl.sum(value, 0))
    tl.store(out + 2 * B + 1, tl.max(value, 0))
    tl.store(out + 2 * B + 2, tl.reduce(value, 0, larger))
    tl.store(out + 2 * B + 3, tl.argmin(value, 0).to(value.dtype))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_reductions_and_scans_are_of_numbers_not_of_their_bits(kind: torch.dtype) -> None:
    x = torch.tensor([1.5, -2.0, 3.0, 0.25], dtype=kind)
    rest = torch.tensor([2.75, 3.0, 3.0, 1.0], dtype=kind)

    def launch(heap: Any) -> Any:
        out = torch.zeros(3 * B, dtype=kind)
        reductions[(1,)](x, out, B)
        return lambda: torch.equal(out, torch.cat([x.float().cumsum(0).to(kind), x.sort().values, rest]))

    verdict = explore(launch, ranks=1, schedules=1)
    assert verdict.ok, verdict


@triton.jit
def counts(words, out, count, B: tl.constexpr):
    at = tl.arange(0, B)
    old = tl.atomic_add(words + at, 1, mask=at < count, sem="acq_rel", scope="sys")
    tl.store(out + tl.program_id(0) * B + at, old)


def test_a_seed_repeats_its_schedule_whatever_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of an atomic without a mask give 0, so that a poll of the others knows its values again."""
    traces: list[Any] = []
    close = Machine.close

    def closed(self: Machine) -> None:
        traces.append([(fiber.number, *what) for fiber, *what in self.events])
        close(self)

    def launch(heap: Any) -> Any:
        words, out = heap.zeros(B, torch.int32, name="words"), torch.full((2, B), -1, dtype=torch.int32)
        counts[(2,)](words.local, out, B - 1, B)
        return lambda: torch.equal(out.sort(0).values, torch.tensor([[0] * B, [1] * (B - 1) + [0]]))

    monkeypatch.setattr(Machine, "close", closed)
    for trash in (0, 77):
        kept = [torch.full((size,), trash, dtype=torch.int32) for size in range(1, 64)]
        del kept
        verdict = explore(launch, ranks=2, schedules=4, residency=False)
        assert verdict.ok, verdict
    assert traces[:4] == traces[4:]
    assert len({str(each) for each in traces}) > 1


def test_keys_tell_constants_of_different_types_apart() -> None:
    alike = [1, True, 1.0, tl.constexpr(1), "1", [1], (1,), 0.0, -0.0, None, slice(None), tl.int32, tl.float32]
    alike += [tl.pointer_type(tl.int32), tl.pointer_type(tl.int32, const=True), tl.block_type(tl.int32, [4])]
    assert len({key_of(each) for each in alike}) == len(alike)
