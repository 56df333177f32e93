"""Calls of fused products whose sums travel, with their references: what ranks run, kernels interpreted or compiled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.collectives import Group, Meter, make_groups
from interlace.kernels import ordered_tiles, workspace
from interlace.kernels.candidate import Options, Tile, candidates, forced
from interlace.kernels.matmul_scatter import matmul_reduce, matmul_scatter
from interlace.layout import split
from interlace.mesh import Mesh
from interlace.world import World

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
SMALL = Tile(16, 16, 16, 2, 4, 2)
HALVES = Tile(16, 32, 16, 2, 4, 2, parts=2)
LOOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value
SHAPES = ((21, 24, 9), (1, 8, 16), (2, 40, 5), (19, 33, 17))  # M, N, K a rank
AS_FP32 = ("push", "one-shot")


def group_of(world: World, mesh: str = "") -> Group:
    """All ranks, or those of this one along the mesh's dp."""
    parsed = Mesh.parse(mesh or f"tp={world.size}")
    return make_groups(parsed, world.rank, world.device, 60.0, Meter(world.waiting))["dp" if mesh else "tp"]


def seeded(shape: tuple[int, ...], seed: int, like: Group, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, dtype)


def factors(rank: int, M: int, N: int, K: int, seed: int, group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of one rank: later ranks have some more columns."""
    K += 3 * rank
    return seeded((M, K), seed + 100 * rank, group, dtype), seeded((N, K), seed + 100 * rank + 50, group, dtype)


def one_column(rank: int, M: int, N: int, K: int, seed: int, group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of one rank, whose products are one multiplication each: the same bits however a library cuts them."""
    return seeded((M, 1), seed + 100 * rank, group, dtype), seeded((N, 1), seed + 100 * rank + 50, group, dtype)


def rows_of(op: str, M: int, group: Group) -> slice:
    return slice(0, M) if op == REDUCE else slice(*split(M, group.size, group.rank))


def call(op: str, name: str, group: Group, M: int, N: int, K: int, seed: int = 0, **how: Any) -> tuple[Tensor, Tensor]:
    """What a candidate makes, and the whole sum, in fp32.

    how: dtype, tile, chunks, bias, turned, late, into, factors.
    """
    dtype = how.get("dtype", torch.float32)
    every = [how.get("factors", factors)(rank, M, N, K, seed, group, dtype) for rank in range(group.size)]
    bias = seeded((N,), seed + 7, group, dtype) if how.get("bias") else None
    x, weight = every[group.rank]
    if how.get("turned"):
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    rows = rows_of(op, M, group)
    out = how.get("into", lambda *size: x.new_empty(size))(rows.stop - rows.start, N)
    time.sleep(how.get("late", 0.0))
    candidate = candidates(op)[name]
    candidate.run(x, weight, bias, group, out, options=Options(how.get("tile", SMALL), how.get("chunks")))
    expected = sum(a.float() @ b.float().t() for a, b in every)[rows]
    return out, expected if bias is None else expected + bias.float()


def close(found: Tensor, expected: Tensor, what: object) -> None:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if found.numel():
        apart = (found.float() - expected).abs().max().item()
        assert apart <= LOOSE[found.dtype] * expected.abs().max().item(), (what, apart)


def values(world: World, op: str, names: list[str]) -> int:
    """The number of calls."""
    group = group_of(world)
    done = sum(check(group, op, name) for name in names)
    workspace.release(group)
    return done


def check(group: Group, op: str, name: str, close: Callable[..., None] = close) -> int:
    """A candidate against the sum in fp32: odd shapes, M = 1, M < ranks, types, strides, biases, chunks."""
    bias = name != "chained"
    for number, (M, N, K) in enumerate(SHAPES):
        how = {"dtype": (torch.float32, torch.float16)[(number + group.size) % 2], "bias": bias and number != 1}
        how |= {"chunks": 1 + number % 3, "tile": HALVES if number == 3 else SMALL}
        with mock.patch.object(ordered_tiles, "LARGE", 16 * 32):  # as sums of large tiles are made, in halves
            close(*call(op, name, group, M, N, K, number, **how), (op, name, M, N, K, how))
    close(*call(op, name, group, 19, 20, 11, 5, turned=True), (op, name, "turned"))
    into = lambda rows, N: torch.full((rows, N + 5), torch.nan, device=group.device)[:, 2 : N + 2]  # noqa: E731
    close(*call(op, name, group, 23, 21, 11, 6, into=into), (op, name, "into columns"))
    assert call(op, name, group, 0, 8, 8)[0].shape == (0, 8)
    return len(SHAPES)


def exact(world: World, op: str, names: list[str]) -> list[str]:
    """The sum of all ranks' own products in their order, bit for bit, of whole rows of every rank's."""
    group, equal = group_of(world), []
    for name in names:
        for dtype in (torch.float32, torch.float16):
            M, N, K = 19, 21, 1
            x, weight = one_column(group.rank, M, N, K, 3, group, dtype)
            wire = torch.float32 if name in AS_FP32 else dtype
            alone = (x.float() @ weight.float().t()).to(wire)
            every = [torch.empty_like(alone) for _ in range(group.size)]
            dist.all_gather(every, alone, group=group.process_group)
            total = every[0].float()
            for part in every[1:]:
                total = total + part.float()
            bias = seeded((N,), 3 + 7, group, dtype)
            expected = (total + bias.float()).to(dtype)[rows_of(op, M, group)]
            how = {"dtype": dtype, "bias": True, "factors": one_column}
            found, _ = call(op, name, group, M, N, K, 3, **how)
            assert torch.equal(found, expected), (op, name, dtype)
            again, _ = call(op, name, group, M, N, K, 3, **how)
            assert torch.equal(found, again), (op, name, dtype, "again")
            equal.append(f"{name} {str(dtype).removeprefix('torch.')}")
    workspace.release(group)
    return equal


def repeated(world: World, op: str, names: list[str], rounds: int) -> int:
    """Calls with changing data and sizes on two groups in turn, a different rank late in each; the memory that is
    received into holds NaN from the start."""
    groups = [group_of(world), group_of(world)]
    for name in names:
        for number in range(rounds):
            M, N, K = SHAPES[number % 3] if number % 2 else (33, 16, 9)
            late = 0.02 if number % world.size == world.rank else 0.0
            for which, group in enumerate(groups):
                found, expected = call(op, name, group, M, N, K, 10 * number + which, late=late)
                poison(group)
                close(found, expected, (op, name, number, which))
    for group in groups:
        workspace.release(group)
    return rounds


def poison(group: Group) -> None:
    """NaN into all that calls receive into, while no rank is in one."""
    dist.barrier(group.process_group)
    for space in workspace._GROUPS[group].spaces.values():
        for name, tensor in space.tensors.items():
            if tensor.dtype == torch.uint8 and name != "claims":  # those are counters
                tensor.local.fill_(0xFF)
    dist.barrier(group.process_group)


def several(world: World, checks: dict[str, dict[str, Any]]) -> list[Any]:
    """Some of these functions, one after the other, in one world."""
    return [globals()[name](world, **argument) for name, argument in checks.items()]


def gradients(world: World, ways: list[tuple[str, str, str]]) -> int:
    """Both seams with their gradients, each way of the three operations, against the plain seams; the number of
    tensors compared.  ways: names of scatters, reductions, gathers."""
    group, M, N, K = group_of(world), 19, 12, 11
    low, high = split(K, group.size, group.rank)

    def results(overlap: bool) -> list[Tensor]:
        made = []
        for function, rows in ((matmul_scatter, rows_of(SCATTER, M, group)), (matmul_reduce, slice(0, M))):
            x = seeded((1, M, K), 1, group, torch.float32)[..., low:high].clone().requires_grad_()
            weight = seeded((N, K), 2, group, torch.float32)[:, low:high].clone().requires_grad_()
            y = function(x, weight, group, overlap, K)
            (y * seeded((M, N), 3, group, torch.float32)[rows]).sum().backward()
            assert x.grad is not None
            assert weight.grad is not None
            made += [y.detach(), x.grad, weight.grad]
        return made

    plain, compared = results(False), 0
    for way in ways:
        with contextlib.ExitStack() as stack:
            for name in way:
                stack.enter_context(forced(name))
            counted = dict(group.meter.calls)
            for number, (found, expected) in enumerate(zip(results(True), plain, strict=True)):
                close(found, expected, (way, number))
                compared += 1
            assert group.meter.calls != counted
    spaces = workspace._GROUPS[group].spaces
    assert {"all_gather_matmul", SCATTER, REDUCE, f"{SCATTER}.chunks"} <= set(spaces), "a fused way was not taken"
    workspace.release(group)
    return compared
