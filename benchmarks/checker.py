"""How many memory events a second the checker explores: loads, stores and atomics that may switch programs.

    python benchmarks/checker.py [--schedules 200] [--ranks 2]

A kernel with plain pointers and atomics, and the examples over the primitives, whose words of context cost time and are
no events.  Seconds are of processor time, so that a busy machine distorts little; each line's verdict is asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from interlace.check import explore

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "symmetric"


@triton.jit
def all_reduce(x, slots, flags, out, rank, world, number, N: tl.constexpr):
    """One shot over plain pointers; two halves of the slots in turn."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    width = tl.num_programs(0) * N
    half = number % 2 * world * width
    for peer in range(world):
        there = tl.load(slots + peer).to(tl.pointer_type(tl.float32))
        word = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
        tl.store(there + half + rank * width + at, tl.load(x + at))
        tl.debug_barrier()
        slot = rank * tl.num_programs(0) + tl.program_id(0)
        tl.atomic_xchg(word + slot, number, sem="release", scope="sys")
    mine = tl.load(slots + rank).to(tl.pointer_type(tl.float32))
    word = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    total = tl.zeros([N], tl.float32)
    for peer in range(world):
        slot = peer * tl.num_programs(0) + tl.program_id(0)
        while tl.atomic_add(word + slot, 0, sem="acquire", scope="sys") < number:
            pass
        total += tl.load(mine + half + peer * width + at)
    tl.store(out + at, total)


def plain(heap: Any, programs: int = 2, N: int = 8) -> Callable[[], object]:
    x, out = torch.arange(programs * N) + 1.0 * heap.rank, torch.zeros(programs * N)
    slots = heap.empty((2, heap.size, programs * N), name="slots")
    flags = heap.zeros(heap.size * programs, torch.int32, name="flags")
    for number in range(1, 5):
        all_reduce[(programs,)](x, slots.addresses, flags.addresses, out, heap.rank, heap.size, number, N)
    expected = sum(torch.arange(programs * N) + 1.0 * rank for rank in range(heap.size))
    return lambda: torch.equal(out, torch.as_tensor(expected))


def launches() -> dict[str, Any]:
    found: dict[str, Any] = {"plain pointers": plain}
    for path in sorted(EXAMPLES.glob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[path.stem] = module.launch
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"Python {platform.python_version()}, triton {triton.__version__}, {os.cpu_count()} cores, load {load:.1f} at "
        f"the start; {options.ranks} ranks, {options.schedules} schedules"
    )
    print("\n| kernel | events a schedule | ms a schedule | events a second |\n|---|---|---|---|")
    for name, launch in launches().items():
        explore(launch, ranks=options.ranks, schedules=1)  # rewrites the kernels
        verdict = explore(launch, ranks=options.ranks, schedules=options.schedules)
        assert verdict.ok, verdict
        each, rate = verdict.seconds / verdict.schedules, verdict.events / verdict.seconds
        print(f"| {name} | {verdict.events / verdict.schedules:.0f} | {each * 1e3:.1f} | {rate:.0f} |")


if __name__ == "__main__":
    main()
