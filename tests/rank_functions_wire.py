"""What rank processes run for the tests of bytes: what fused products send, tell and hold; kernels are interpreted."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import wire
from interlace.collectives import Group
from interlace.kernels import matmul_all_reduce, scatter_parts, workspace
from interlace.kernels.candidate import OPS, Options, Problem, Tile, candidates, forced, way_of
from interlace.plan import overlap
from interlace.plan.overlap import GATHER, REDUCE, Product, Way
from interlace.train import verify
from interlace.world import World
from scatter_calls import group_of, rows_of

TILE = Tile(16, 32, 16, 2, 4, 2)
SHAPES = ((19, 24, 9), (1, 8, 16), (21, 33, 70))  # M, N, K
DTYPES = (torch.float32, torch.float16)


def run(op: str, way: Any, group: Group, M: int, N: int, K: int, dtype: torch.dtype) -> None:
    """One call; of a gather with two weights."""
    x, weight = torch.ones(M, K, dtype=dtype), torch.ones(N, K, dtype=dtype)
    own = rows_of("", M, group)
    if op == GATHER:
        out = [torch.empty(M, N, dtype=dtype) for _ in range(2)]
        way(x[own], [weight, weight], [None, None], group, M, out, torch.empty(M, K, dtype=dtype))
        return
    rows = M if op == REDUCE else own.stop - own.start
    way(x, weight, None, group, torch.empty(rows, N, dtype=dtype))


def every_way(world: World) -> list[list[Any]]:
    """Each fused candidate that takes so many ranks, in turn, with growing and with shrinking shapes:

    (operation, its name, shape, bytes that crossed the wire, by collective what the meter was told and what is
    expected, bytes of this rank's arenas and what is expected).
    """
    group, found = group_of(world), []
    dtype = DTYPES[world.size % 2]
    calls: list[tuple[Product, Way]] = []
    with mock.patch.object(overlap, "UNIT", 4096):  # or every arena is of one size
        for op in OPS:
            for number, (M, N, K) in enumerate(SHAPES):
                for name, candidate in candidates(op).items():
                    if name == "plain" or candidate.refuses(Problem(op, M, N, K, dtype, world.size), group.device):
                        continue
                    way = replace(candidate, options=Options(TILE, 1 + number))
                    group.meter.reset_counts()
                    with wire.watched(group) as seen:
                        run(op, way, group, M, N, K, dtype)
                    counted = way_of(name, way.options)
                    calls.append((Product(op, M, N, K), counted))
                    told = {collective: nbytes for (collective, _), nbytes in group.meter.sent.items()}
                    due = dict(overlap.sent(op, counted, M, N, K, dtype.itemsize, world.size, world.rank))
                    has = sum(arena.nbytes for arena in workspace.arenas(group)) / world.size
                    needs = overlap.held(calls, dtype.itemsize, world.size, overlap.MULTIPROCESSORS["cpu"])
                    found.append([op, name, [M, N, K], seen.nbytes, told, due, has, needs])
    workspace.release(group)
    return found


# --- faults: `verify.under_plan` with a way that is wrong about its bytes --------------------------------------------


def a_row_twice(world: World, **argument: Any) -> dict[str, Any]:
    """Copies send the first row of each other rank once more."""
    chunks = scatter_parts.Parts.chunks

    def more(self: Any, owner: int) -> list[slice]:
        found = chunks(self, owner)
        return [*found, slice(found[0].start, found[0].start + 1)]

    with forced("chunks"), mock.patch.object(scatter_parts.Parts, "chunks", more):
        return verify.under_plan(world, **argument)


def half_is_told(world: World, **argument: Any) -> dict[str, Any]:
    """A kernel tells the meter half of what it sends."""

    def sent(*given: Any) -> Any:
        return tuple((collective, nbytes // 2) for collective, nbytes in overlap.sent(*given))

    with forced("one-shot"), mock.patch.object(matmul_all_reduce, "sent", sent):
        return verify.under_plan(world, **argument)
