"""What kernels use of the language gives under the checker what Triton's own interpreter gives, and what it cannot."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from interlace.check import Report, explore
from interlace.symmetric import shortcuts
from interlace.symmetric.device import wait_until

N = 8


def checked(launch: Any) -> None:
    verdict = explore(launch, ranks=1, schedules=1, nbytes=1 << 16)
    assert verdict.ok, verdict


def the_report(launch: Any) -> Report:
    (report,) = explore(launch, ranks=1, schedules=1, nbytes=1 << 16).reports
    return report


# --- numbers, bit for bit --------------------------------------------------------------------------------------------


@InterpretedFunction
def kept(out, at, value):
    """Stores a value of any type and shape; the next free place."""
    kind = tl.int8 if value.dtype.is_int1() else value.dtype
    place = (out + at).to(tl.pointer_type(kind))
    if value.shape:
        tl.store(place + tl.arange(0, value.numel), tl.reshape(value, (value.numel,)))
    else:
        tl.store(place, value)
    return at + value.numel * 8


@triton.jit
def everything(x, y, out, n, f, KIND: tl.constexpr, TURNS: tl.constexpr, N: tl.constexpr):
    lanes, at = tl.arange(0, N), 0
    for turn in range(TURNS):
        a, b, p, q = tl.load(x + turn + lanes), tl.load(y + turn + lanes), tl.load(x + turn), tl.load(y + turn)
        at = kept(out, at, a + b)
        at = kept(out, at, 3 - a)
        at = kept(out, at, (p + q) * n)
        at = kept(out, at, a[:, None] * 2 - b[None, :] + p)
        at = kept(out, at, (a < b) & (b < 7) | (b == 3))
        at = kept(out, at, (a < b) + (b < a))
        at = kept(out, at, tl.where(a < b, p, 1))
        at = kept(out, at, tl.where(p < q, a, 0))
        at = kept(out, at, tl.where(lanes < n, a.to(tl.float32), float("nan")))
        at = kept(out, at, tl.maximum(a, tl.minimum(p, b)))
        at = kept(out, at, a.to(tl.float16).to(tl.float32) * f)
        at = kept(out, at, a.to(tl.int64) * 3 + lanes)
        at = kept(out, at, a.to(tl.float32).to(tl.int32, bitcast=True))
        at = kept(out, at, tl.abs(a))
        at = kept(out, at, tl.exp(a.to(tl.float32) * 0.1))
        at = kept(out, at, tl.fma(a.to(tl.float32), f, b.to(tl.float32)))
        at = kept(out, at, tl.load(x + lanes, mask=lanes < n, other=p))
        at = kept(out, at, tl.load(x + lanes[:, None], mask=(lanes < n)[:, None] & (lanes > turn)[None, :], other=1))
        at = kept(out, at, tl.load(x + turn, mask=n < turn, other=7))
        at = kept(out, at, tl.load(tl.advance(tl.make_block_ptr(x, (2 * N,), (1,), (n,), (N,), (0,)), (turn,))))
        at = kept(out, at, tl.full([1], n, tl.int32) + tl.full([1], 2, tl.int32))
        at = kept(out, at, tl.join(a, b).permute(1, 0))
        at = kept(out, at, tl.reshape(a, (2, N // 2)).trans() + p)
        at = kept(out, at, tl.gather(a, (lanes + n) % N, 0))
        at = kept(
            out, at, tl.dot(a.to(tl.float32)[:, None] + lanes[None, :], b.to(tl.float32)[:, None] * lanes[None, :])
        )
        at = kept(out, at, tl.umulhi(a.to(tl.uint32) * 2654435769, 2246822519))
        at = kept(out, at, tl.program_id(0) + tl.num_programs(0) * 10 + p)
        if KIND == "int":
            at = kept(out, at, (a // 7) * 3 + a % 5 + (b >> 1 << 2))
            at = kept(out, at, (a ^ b) & 13 | 2)
        else:
            at = kept(out, at, a / 3 + 1.5 / (b * b + 1))
            at = kept(out, at, tl.floor(a.to(tl.float32) * f) + tl.ceil(b.to(tl.float32)))
            at = kept(out, at, tl.sqrt(tl.abs(a.to(tl.float32))))


@pytest.mark.parametrize("kinds", [(torch.int32, torch.int32), (torch.float32, torch.float32), (torch.float16,) * 2])
def test_recorded_builtins_are_those_of_tritons_own_interpreter(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    drawn = torch.randn(2, 3 * N, generator=torch.Generator().manual_seed(4)) * 9
    x, y = (each.to(kind) for each, kind in zip(drawn, kinds, strict=True))
    numbers = [(n, 0.25 * n) for n in (3, 1, 5)]
    kind = "float" if kinds[0].is_floating_point else "int"

    def run(n: int, f: float, out: torch.Tensor, runner: Any) -> None:
        runner(x, y, out, n, f, kind, 4, N, grid=(1,), warmup=False)

    own = [torch.zeros(1 << 15, dtype=torch.uint8) for _ in numbers]
    for (n, f), out in zip(numbers, own, strict=True):
        run(n, f, out, InterpretedFunction(everything.fn).run)
    shortcuts._patches.cache_clear()  # nothing is recorded yet

    def launch(heap: Any) -> Any:
        outs = [torch.zeros_like(out) for out in own]
        for (n, f), out in zip(numbers, outs, strict=True):
            run(n, f, out, everything.run)
        return lambda: [torch.equal(*each) for each in zip(outs, own, strict=True)]

    checked(launch)
    assert all(out.count_nonzero() > 1000 for out in own)


# --- beyond Triton's own interpreter, which fails or gives something else than GPUs ----------------------------------


@triton.jit
def of_integers(x, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    value = tl.load(x + lanes)
    tl.store(out + N + lanes, (~value.to(tl.uint8)).to(tl.int32))
    tl.store(out + 2 * N, tl.sum(value * 0 + 2147483647, 0))
    tl.store(out + lanes, tl.histogram((lanes % 3).to(tl.int64), N))


def test_integers_wrap_and_unsigned_ones_are_inverted() -> None:
    def launch(heap):
        x, out = torch.arange(N, dtype=torch.int32), torch.zeros(2 * N + 1, dtype=torch.int32)
        of_integers[(1,)](x, out, N)
        counts = torch.bincount(torch.arange(N) % 3, minlength=N)
        return lambda: torch.equal(out, torch.cat([counts, 255 - x, torch.tensor([-N])]).int())

    checked(launch)


@triton.jit
def exchanges(x, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.atomic_xchg(x + lanes, lanes + 0.5, mask=lanes < 3))
    tl.store(out + N, tl.atomic_xchg(x, 9.5))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_floats_are_exchanged(kind: torch.dtype) -> None:
    def launch(heap):
        x, out = 1 - torch.arange(N).to(kind), torch.zeros(N + 1, dtype=kind)
        exchanges[(1,)](x, out, N)
        swapped = [9.5, 1.5, 2.5, *x[3:].tolist()]
        return lambda: (out.tolist(), x.tolist()) == ([1, 0, -1, *[0] * (N - 3), 0.5], swapped)

    checked(launch)


@triton.jit
def by_methods(x, out, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    tl.store(out, value.sum(0) + value.max(axis=0))
    tl.store(out + 1, value.to(tl.int32).cdiv(3).sum())


def test_functions_of_the_language_are_methods_of_tensors() -> None:
    def launch(heap):
        out = torch.zeros(2)
        by_methods[(1,)](torch.arange(8.0), out, N)
        return lambda: out.tolist() == [28 + 7, 12]

    checked(launch)


def kernel_of(scale: Any) -> Any:
    @triton.jit
    def scaled(value):
        return value * scale

    @triton.jit
    def inside(x, out):
        tl.store(out, scaled(tl.load(x)) + scale)

    return inside


def test_kernels_use_names_of_the_function_that_makes_them() -> None:
    def launch(heap):
        x, out = torch.ones(1), torch.zeros(3)
        for at in range(3):
            kernel_of(tl.constexpr(at))[(1,)](x, out[at])
        return lambda: out.tolist() == [0, 2, 4]

    checked(launch)


@triton.jit
def of_a_tuple(pair, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(pair[0] + lanes) * pair[1][1] + tl.load(pair[1][0] + lanes))


def test_tensors_in_tuples_are_known_by_name() -> None:
    def launch(heap, short=0):
        x, y, out = torch.arange(N), torch.ones(N - short, dtype=torch.int64), torch.zeros(N, dtype=torch.int64)
        of_a_tuple[(1,)]((x, (y, 3)), out, N)
        return lambda: torch.equal(out, 3 * x + y)

    checked(launch)
    report = the_report(lambda heap: launch(heap, 1))
    assert (report.kind, f"pair[1][0][{N - 1}], behind the end" in report.message) == ("out of bounds", True)


def width_of_the_block(given: dict[str, Any]) -> None:
    given["box"].block_shape = [1, given["N"]]


@triton.autotune(
    configs=[triton.Config({"N": 2}), triton.Config({"N": 4}, pre_hook=width_of_the_block)],
    key=[],
    prune_configs_by={"early_config_prune": lambda configs, given, **more: [c for c in configs if c.kwargs["N"] > 2]},
)
@triton.jit
def tuned(box, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N)[None, :], box.load([1, 0]))


def test_of_candidates_the_first_that_fits_is_run_after_its_hook() -> None:
    def launch(heap):
        x, out = torch.arange(8.0).reshape(2, 4), torch.zeros(4)
        tuned[(1,)](TensorDescriptor(x, [2, 4], [4, 1], [1, 1]), out)
        return lambda: torch.equal(out, x[1])

    checked(launch)


# --- what is refused, with the user's line ---------------------------------------------------------------------------


@triton.jit
def misuses(x, y, WHAT: tl.constexpr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    if WHAT == "join":
        tl.store(x + lanes[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(tl.load(x + lanes), lanes))  # join
    elif WHAT == "cat":
        tl.store(x + tl.arange(0, 2 * N), tl.cat(tl.load(x + lanes), lanes, can_reorder=True))  # cat
    elif WHAT == "arguments":
        wait_until(y, 1, x)  # arguments
    elif WHAT == "assertion":
        tl.static_assert(N < 4, "too wide")  # assertion
    elif WHAT == "alignment":
        tl.make_tensor_descriptor(x + 1, [N], [1], [N]).store([0], lanes.to(tl.float32))  # alignment
    elif WHAT == "map":
        tl.store(x + lanes, tl.map_elementwise(kept, lanes, lanes))  # map
    tl.store(x, tl.load(y))


SAID = {
    "join": "tl.join was given fp32 and int32; cast one to the other's type",
    "cat": "tl.cat was given fp32 and int32",
    "arguments": r"wait_until\(\) missing 1 required positional argument: 'heap'; its parameters are flag, value, peer",
    "assertion": "too wide",
    "alignment": "base must be 16-byte aligned",
    "map": "Triton's interpreter has no block; keep it out",
}


@pytest.mark.parametrize("what", SAID)
def test_a_misuse_of_the_language_is_an_error_with_its_line(what: str) -> None:
    report = the_report(lambda heap: misuses[(1,)](heap.zeros(2 * N).local, heap.zeros(1).local, what, N))
    assert report.kind == "error"
    assert re.search(SAID[what], report.message), report
    assert str(report.steps[0]).endswith(f"# {what}")


def test_a_tensor_of_another_device_is_refused() -> None:
    report = the_report(lambda heap: misuses[(1,)](heap.zeros(N).local, torch.zeros(1, device="meta"), "", N))
    assert (report.kind, "y lies on meta, which cannot be interpreted" in report.message) == ("error", True)
