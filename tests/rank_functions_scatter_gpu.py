"""What ranks with a GPU each, or a share of one, run for the tests of fused products whose sums travel."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import scatter_calls
from interlace.collectives import Group, Meter
from interlace.kernels import workspace
from interlace.kernels.candidate import Options, Tile, candidates
from interlace.symmetric import SymmetricHeap
from interlace.world import World
from scatter_calls import REDUCE, SCATTER, call, check, close, factors, group_of, rows_of

WIDE = Tile(128, 256, 64, 8, 8, 4)
SQUARE = Tile(128, 128, 64, 8, 8, 4)
LARGE = (
    (1024, 1280, 512, torch.bfloat16, WIDE),
    (640, 264, 200, torch.float16, SQUARE),
    (300, 520, 136, torch.float32, None),
    (1, 512, 256, torch.bfloat16, None),
    (77, 33, 50, torch.float16, None),
)
WAYS = {SCATTER: ["chunks", "chained", "persistent", "put", "tiles", "push"], REDUCE: ["put", "one-shot", "two-shot"]}


def several(world: World, checks: dict[str, dict[str, Any]]) -> list[Any]:
    return scatter_calls.several(world, checks)


def on_a_share(heap: SymmetricHeap, op: str, name: str) -> int:
    """A rank that shares its GPU: a candidate, small and large.

    The first pass is there to load every kernel; its numbers may be wrong.
    """
    group = Group("tp", tuple(range(heap.size)), heap.rank, heap.device, Meter(record=False))
    compare = close if not heap.fabric.loading else lambda *found: None
    with workspace.on(heap, group):
        done = check(group, op, name, compare)
        return done + (large(group, op, name, compare) if group.size == 2 else 0)


def values(world: World) -> int:
    """Every candidate with tiles of real sizes, in bf16, fp16 and fp32."""
    group = group_of(world)
    done = sum(large(group, op, name, close) for op, names in WAYS.items() for name in names)
    workspace.check(group)
    workspace.release(group)
    return done


def large(group: Group, op: str, name: str, close: Callable[..., None]) -> int:
    for number, (M, N, K, dtype, tile) in enumerate(LARGE):
        how = {"dtype": dtype, "bias": name != "chained" and number % 2 == 0, "tile": tile}
        close(*call(op, name, group, M, N, K, number, **how), (op, name, M, N, K, dtype))
    return len(LARGE)


def stress(world: World, rounds: int) -> list[str]:
    """Many calls without a stop, of two groups in turn, one rank or the other late, inputs and sizes changing: always
    the same bits for the same input."""
    groups, done = [group_of(world), group_of(world)], []
    sizes = [(256, 512, 256), (64, 512, 256), (250, 512, 256), (1, 512, 256), (256, 264, 256)]
    for op, names in WAYS.items():
        for name in names:
            known: dict[tuple[int, int], torch.Tensor] = {}
            differs = torch.zeros((), dtype=torch.int64, device=world.device)
            for number in range(rounds):
                which, at = number % 2, number * 7 % 5 if number % 3 else number % 5
                group, (M, N, K) = groups[which], sizes[at]
                x, weight = inputs(group, M, N, K, at)
                rows = rows_of(op, M, group)
                out = torch.full((rows.stop - rows.start, N), torch.nan, dtype=x.dtype, device=x.device)
                if number % 11 == world.rank:
                    torch.cuda._sleep(300_000)
                candidates(op)[name].run(x, weight, None, group, out, options=Options())
                if (which, at) not in known:
                    known[which, at] = out
                    expected = sum(a.float() @ b.float().t() for a, b in every(group, M, N, K, at))[rows]
                    close(out, expected, (op, name, at))
                else:
                    differs += (out != known[which, at]).any()
            torch.cuda.synchronize()
            assert int(differs) == 0, (op, name, int(differs))
            done.append(name)
    for group in groups:
        workspace.check(group)
        workspace.release(group)
    return done


def every(group: Group, M: int, N: int, K: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [factors(rank, M, N, K, seed, group, torch.bfloat16) for rank in range(group.size)]


_INPUTS: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}


def inputs(group: Group, M: int, N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = (group.rank, seed)
    if key not in _INPUTS:
        _INPUTS[key] = every(group, M, N, K, seed)[group.rank]
    return _INPUTS[key]


def graphs(world: World, replays: int) -> list[str]:
    """Captured once, replayed with new input, a call outside the graph between; one rank or the other late."""
    group, done = group_of(world), []
    M, N, K = 250, 512, 136
    for op, names in WAYS.items():
        for name in names:
            x, weight = (torch.empty_like(each) for each in factors(world.rank, M, N, K, 0, group, torch.bfloat16))
            rows = rows_of(op, M, group)
            out = torch.empty(rows.stop - rows.start, N, dtype=x.dtype, device=x.device)
            candidate = candidates(op)[name]

            def step() -> None:
                candidate.run(x, weight, None, group, out, options=Options())  # noqa: B023 - called in this round

            step()
            replay = workspace.of(group, space_of(op, name)).heap.graph(step)
            for number in range(replays):
                pairs = every(group, M, N, K, number)
                x.copy_(pairs[world.rank][0])
                weight.copy_(pairs[world.rank][1])
                out.fill_(torch.nan)
                if number % world.size == world.rank:
                    torch.cuda._sleep(300_000)
                replay() if number % 4 != 3 else step()
                close(out, sum(a.float() @ b.float().t() for a, b in pairs)[rows], (op, name, number))
            torch.cuda.synchronize()
            workspace.check(group)
            done.append(name)
            del replay
    gc.collect()
    workspace.release(group)
    return done


def space_of(op: str, name: str) -> str:
    ends = {"put": ".put"} | dict.fromkeys(("chunks", "chained", "persistent"), ".chunks")
    return op + ends.get(name, "")
