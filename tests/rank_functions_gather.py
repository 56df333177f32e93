"""What rank processes run for the tests of fused all-gather and product; kernels are interpreted."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import interlace.kernels.gather_matmul as module
from interlace.collectives import Group, Meter, make_groups
from interlace.errors import ConfigError, Hang
from interlace.kernels import tile as tiles_of
from interlace.kernels import workspace
from interlace.kernels.all_gather_matmul import OP
from interlace.kernels.candidate import Candidate, Options, Tile, candidates, forced
from interlace.kernels.gather_matmul import gather_matmul
from interlace.kernels.matmul_scatter import matmul_reduce, matmul_scatter
from interlace.kernels.tile import matmul
from interlace.kernels.workspace import Workspace
from interlace.layout import split
from interlace.mesh import Mesh
from interlace.world import World

SMALL = Tile(16, 16, 16, 2, 4, 2)
LOOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value; one rounding


def group_of(world: World) -> Group:
    return make_groups(Mesh.parse(f"tp={world.size}"), world.rank, torch.device("cpu"), 60.0, Meter(world.waiting))[
        "tp"
    ]


def rows_of(count: int, K: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one(candidate: Candidate, group: Group, count: int, sizes: tuple[int, ...], K: int, **how: Any) -> None:
    """One call against the whole product in fp32.  sizes: N of each weight, a little more on later ranks."""
    seed, dtype, chunks = how.get("seed", 0), how.get("dtype", torch.float32), how.get("chunks")
    x = rows_of(count, K, seed, dtype)
    start, stop = split(count, group.size, group.rank)
    sizes = tuple(n + group.rank if n else 0 for n in sizes)
    turned = how.get("turned", False)
    weights = [rows_of(K, n, 7 + n, dtype).t() if turned else rows_of(n, K, 7 + n, dtype) for n in sizes]
    biases = [rows_of(1, n, 9 + n, dtype)[0] if number % 2 == 0 else None for number, n in enumerate(sizes)]
    own = x[start:stop].t().contiguous().t() if turned else x[start:stop].clone()
    out = [torch.empty(count, n, dtype=dtype) for n in sizes]
    gathered = torch.empty(count, K, dtype=dtype) if how.get("keep", True) else None
    candidate.run(own, weights, biases, group, count, out, gathered, options=Options(how.get("tile", SMALL), chunks))
    for y, weight, bias in zip(out, weights, biases, strict=True):
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert y.shape == expected.shape
        if y.numel():
            apart = (y.float() - expected).abs().max().item()
            assert apart <= LOOSE[dtype] * expected.abs().max().item(), (candidate.name, how, apart)
    assert gathered is None or torch.equal(gathered, x), (candidate.name, "gathered")


def values(world: World, names: list[str]) -> int:
    """Every candidate, odd shapes, types, strides, numbers of chunks; M = 1, M < ranks, columns that differ by rank."""
    group, done = group_of(world), 0
    for name in names:
        candidate = candidates("all_gather_matmul")[name]
        one(candidate, group, 7, (5, 18), 9, chunks=2)
        one(candidate, group, 1, (4,), 24, dtype=torch.float16)
        one(candidate, group, world.size - 1, (16,), 16, keep=False)
        one(candidate, group, 37, (17, 0), 40, dtype=torch.float16, chunks=3, seed=1)
        one(candidate, group, 12, (0,), 8)
        one(candidate, group, 8 * world.size, (3,), 600, dtype=torch.float16)  # as much as several programs would send
        one(candidate, group, 19, (20,), 23, turned=True)
        one(candidate, group, 40, (24,), 64, dtype=torch.bfloat16, chunks=2, tile=Tile(16, 32, 32, 2, 4, 2, True, 2))
        done += 8
    workspace.release(group)
    return done


def repeated(world: World, names: list[str], rounds: int) -> int:
    """Changing rows and sizes on two groups in turn, ranks that come late, buffers that begin as NaN."""
    groups = [group_of(world), group_of(world)]
    groups[1] = groups[1].like(process_group=dist.new_group(list(range(world.size))))
    late = random.Random(world.rank)
    for group in groups:
        one(candidates(OP)["chunks"], group, 40, (8,), 24, chunks=2)
        one(candidates(OP)["push"], group, 40, (8,), 24)
        space = workspace.of(group, OP)
        space.heap.barrier()
        for name in ("rows", "few"):
            space.buffer(name, None, (space.tensors[name].nbytes // 4,), torch.float32).fill_(float("nan"))
        space.heap.barrier()
    heaps = [workspace.of(group, OP).heap for group in groups]
    for number in range(rounds):
        for place, name in enumerate(names):
            if late.random() < 0.3:
                time.sleep(0.03 * late.random())
            group, count = groups[(number + place) % 2], 20 - 3 * (number % 5)
            one(candidates(OP)[name], group, count, (9,), 24, seed=number, chunks=1 + number % 2, keep=False)
    for group, heap in zip(groups, heaps, strict=True):
        assert workspace.of(group, OP).heap is heap, "smaller sizes have made a new heap"
        workspace.check(group)
        workspace.release(group)
    return rounds


def counted_in_memory(world: World, names: list[str]) -> None:
    """Calls as a graph makes them, and calls of the host after it; then more memory while graphs hold the old."""
    group = group_of(world)
    one(candidates(OP)["chunks"], group, 7, (5,), 9)
    space = workspace.of(group, OP)
    workspace.count_in_memory(group)
    for number in range(3):
        for name in names:
            one(candidates(OP)[name], group, 7, (5,), 9, seed=number)
    before = space.heap
    one(candidates(OP)["chunks"], group, 2000, (5,), 9)
    assert space.heap is not before
    assert before.fabric.arenas, "a graph may still use it"
    workspace.release(group)
    assert not before.fabric.arenas


def joined(world: World, pairs: list[tuple[str, str]]) -> int:
    """The same with weights that are multiplied as one; some of them have no bias."""
    with mock.patch.object(module, "joins", mock.Mock(return_value=True)) as asked:
        done = gradients(world, pairs, with_bias=1)
        assert asked.call_count >= 2 * len(pairs)
    return done


def gradients(world: World, pairs: list[tuple[str, str]], with_bias: int = 2) -> int:
    """`gather_matmul` and its gradients by fused candidates against plain products, kept rows or gathered again.

    with_bias: how many of the weights have one.
    """
    group, done = group_of(world), 0
    count, D = 7, 10
    start, stop = split(count, world.size, world.rank)
    for forward, backward in pairs:
        for sizes, keep in (((6,), True), ((7,), False), ((4, 9), False)):
            x = rows_of(count, D, 3, torch.float32).requires_grad_()
            whole = [rows_of(n, D, n, torch.float32).requires_grad_() for n in sizes]
            biases = [rows_of(1, n, 20 + n, torch.float32)[0].requires_grad_() for n in sizes]
            biases = [each if number < with_bias else None for number, each in enumerate(biases)]
            targets = [rows_of(count, n, 30 + n, torch.float32) for n in sizes]
            sum((F.linear(x, w, b) * t).sum() for w, b, t in zip(whole, biases, targets, strict=True)).backward()
            places = [split(n, world.size, world.rank) for n in sizes]
            part = x.detach()[start:stop].clone().requires_grad_()
            w = [each.detach()[a:b].clone().requires_grad_() for each, (a, b) in zip(whole, places, strict=True)]
            bias = [
                None if each is None else each.detach()[a:b].clone().requires_grad_()
                for each, (a, b) in zip(biases, places, strict=True)
            ]
            with forced(forward, Options(SMALL)), forced(backward, Options(SMALL)):
                made = gather_matmul(part, w, bias, group, count, keep=keep, columns=sum(sizes))
                for y, each, b, (first, last) in zip(made, whole, biases, places, strict=True):
                    close(y.detach(), F.linear(x, each, b)[:, first:last], f"{forward} {sizes}")
                pieces = zip(made, targets, places, strict=True)
                sum((y * t[:, first:last]).sum() for y, t, (first, last) in pieces).backward()
            close(part.grad, x.grad[start:stop], f"{forward} {backward} {sizes} {keep} gradient of x")
            for mine, theirs in ((w, whole), (bias, biases)):
                for each, all_of_it, (first, last) in zip(mine, theirs, places, strict=True):
                    if each is not None:
                        close(each.grad, all_of_it.grad[first:last], f"{forward} {sizes} {keep} parameters")
            with torch.no_grad(), forced(forward, Options(SMALL)):
                again = gather_matmul(part, w, bias, group, count, columns=sum(sizes))
            assert all(map(torch.equal, again, made))
            done += 1
    workspace.release(group)
    return done


def close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    if found.numel():
        apart = (found - expected).abs().max().item()
        assert apart <= 1e-5 * expected.abs().max().item(), (what, apart)


def late(world: World, name: str) -> str:
    """Rank 1 does not come to a call: the others' wait ends, and says whom it waited for."""
    group, said = group_of(world), ""
    with mock.patch.object(workspace, "TIMEOUT", 0.5):
        one(candidates(OP)[name], group, 7, (5,), 9)
    if world.rank != 1:
        try:
            one(candidates(OP)[name], group, 7, (5,), 9, seed=1, keep=False)
        except AssertionError:  # wrong numbers, as is to be expected
            try:
                workspace.check(group)
            except Hang as error:
                said = str(error)
    dist.barrier()
    return said


def refusals(world: World) -> list[str]:
    """Growth inside a capture, and what a kernel cannot run."""
    group = group_of(world)
    space = workspace.of(group, OP)
    said = []
    with mock.patch.object(Workspace, "_is_captured", return_value=True):
        try:
            space.require({"rows": 100}, {"arrived": 1})
        except ConfigError as error:
            said.append(str(error))
    wide = torch.zeros(2, 4, dtype=torch.float64)
    try:
        with forced("persistent"):
            gather_matmul(wide, [wide], [None], group, 2 * world.size)
    except ConfigError as error:
        said.append(str(error))
    workspace.release(group)
    return said


def core(world: World) -> int:
    """The product alone: types, strides, tails, tiles, bias; every element written once."""
    done = 0
    tiles = (Tile(16, 16, 16, 2, 4, 2), Tile(32, 64, 32, 2, 4, 2, True, 2))
    for dtype in LOOSE:
        for M, N, K in ((5, 7, 9), (33, 72, 24)):
            for turned in (0, 1, 2, 3):
                for tile in tiles:
                    x = rows_of(K, M, 1, dtype).t() if turned & 1 else rows_of(M, K, 1, dtype)
                    w = rows_of(K, N, 2, dtype).t() if turned & 2 else rows_of(N, K, 2, dtype)
                    bias = rows_of(1, N, 3, dtype)[0] if turned != 1 else None
                    found = matmul(x, w, bias, tile=tile)
                    expected = F.linear(x.float(), w.float(), None if bias is None else bias.float())
                    apart = (found.float() - expected).abs().max().item()
                    assert apart <= LOOSE[dtype] * expected.abs().max().item(), (dtype, M, N, K, turned, tile)
                    done += 1
    return done


def core_in_pieces(world: World) -> int:
    """The last round cut along K: as with whole tiles, to the same bits twice, and all counters zero again."""
    done, base = 0, Tile(16, 16, 16, 2, 4, 2)
    shapes = ((33, 40, 80), (5, 7, 200), (50, 36, 23), (1, 1, 1), (16, 130, 33), (48, 48, 0))
    for places, pieces in ((2, 3), (3, 2), (4, 0), (5, 3), (7, 0), (7, 5), (40, 0), (40, 2)):
        with (
            mock.patch.object(tiles_of, "programs", lambda device, tiles, places=places: min(places, tiles)),
            mock.patch.object(tiles_of, "joined", return_value=8),
        ):
            for dtype in LOOSE:
                for number, (M, N, K) in enumerate(shapes):
                    tile = replace(base, split=pieces, block_m=32 if number == 0 else 16)
                    x, w = rows_of(M, K, 1, dtype), rows_of(N, K, 2, dtype)
                    x, w = (x.t().contiguous().t(), w) if number % 2 else (x, w.t().contiguous().t())
                    bias = rows_of(1, N, 3, dtype)[0] if number != 1 else None
                    found, again = (matmul(x, w, bias, torch.full((M, N), torch.nan, dtype=dtype), tile) for _ in "ab")
                    assert torch.equal(found, again), (places, pieces, dtype, M, N, K)
                    expected = F.linear(x.float(), w.float(), None if bias is None else bias.float())
                    apart = (found.float() - expected).abs().max().item()
                    assert apart <= LOOSE[dtype] * expected.abs().max().item(), (places, pieces, dtype, M, N, K, apart)
                    assert not tiles_of.counters(x.device, places).any(), (places, pieces, M, N, K)
                    done += 1
    return done


def misfits(world: World) -> dict[str, str]:
    """Operands that do not belong together, which kernels would read beyond their ends."""
    group, said = group_of(world), {}
    x, weight = torch.ones(3, 8), torch.ones(5, 8)

    def gathered(policy: str, weight: Tensor, bias: Tensor | None = None, count: int = 3 * world.size) -> Any:
        return gather_matmul(x, [weight], [bias], group, count, True, columns=10, policy=policy)

    attempts: dict[str, Callable[[str], Any]] = {
        "width": lambda policy: gathered(policy, torch.ones(5, 7)),
        "bias": lambda policy: gathered(policy, weight, torch.ones(4)),
        "type": lambda policy: gathered(policy, weight.bfloat16()),
        "rows": lambda policy: gathered(policy, weight, count=3 * world.size + 2),
        "scattered": lambda policy: matmul_scatter(torch.ones(6, 8), torch.ones(5, 7), group, True, 16, policy),
        "summed": lambda policy: matmul_reduce(torch.ones(6, 8), weight.double(), group, True, 16, policy),
    }
    for policy in ("plain", "fused"):
        for name, attempt in attempts.items():
            if (name, policy) == ("summed", "plain"):
                continue  # the library's product, which tells its types
            try:
                attempt(policy)
                said[f"{name} {policy}"] = "nothing"
            except ConfigError as error:
                said[f"{name} {policy}"] = str(error)
    return said
