"""Every way of the fused products in groups of three, four and eight: what ranks run, interpreted or compiled."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from interlace.collectives import Group
from interlace.kernels import workspace
from interlace.kernels.candidate import OPS, Candidate, Options, Problem, Tile, candidates, forced
from interlace.kernels.gather_matmul import gather_matmul
from interlace.layout import split
from interlace.world import World
from scatter_calls import close, factors, group_of, rows_of, seeded

GATHER = OPS[0]
SMALL = Tile(16, 16, 16, 2, 4, 2)
SHAPES = ((19, 24, 9), (3, 8, 16))  # M, N, K a rank; three rows: on eight ranks most have none


def values(
    world: World, tile: Tile | None = SMALL, scale: int = 1, mesh: str = "", members: Collection[int] = ()
) -> list[str]:
    """Each way twice on each shape against the sum or the whole product in fp32: right, and the same bits; its names.

    scale: times the shapes.  mesh: the group is along its dp.  members: the ranks that do it, () = all.
    """
    group, done = group_of(world, mesh), list[str]()
    assert not mesh or group.ranks in ((0, 2), (1, 3)), group.ranks
    if members and world.rank not in members:
        return done
    for op in OPS:
        for name, candidate in candidates(op).items():
            for M, N, K in SHAPES:
                sizes = (scale * M, scale * N, scale * K)
                if candidate.refuses(Problem(op, *sizes, torch.float32, group.size), group.device) is None:
                    first, expected = one(op, candidate, group, *sizes, tile)
                    again, _ = one(op, candidate, group, *sizes, tile)
                    close(first, expected, (op, name, sizes))
                    assert torch.equal(first, again), (op, name, sizes)
                    done.append(f"{op} {name}")
    workspace.check(group)
    workspace.release(group)
    return sorted(set(done))


def one(
    op: str, candidate: Candidate, group: Group, M: int, N: int, K: int, tile: Tile | None
) -> tuple[Tensor, Tensor]:
    """What a way makes, without a bias, from NaN; and what it should."""
    options, rows = Options(tile, None), slice(*split(M, group.size, group.rank))
    if op == GATHER:
        x = seeded((M, K), 1, group, torch.float32)
        weight = seeded((N + group.rank, K), 2 + group.rank, group, torch.float32)
        out = x.new_full((M, len(weight)), torch.nan)
        candidate.run(x[rows].clone(), [weight], [None], group, M, [out], None, options=options)
        return out, F.linear(x, weight)
    every = [factors(rank, M, N, K, 3, group, torch.float32) for rank in range(group.size)]
    kept = rows_of(op, M, group)
    out = torch.full((kept.stop - kept.start, N), torch.nan, device=group.device)
    candidate.run(*every[group.rank], None, group, out, options=options)
    return out, sum((a @ b.t() for a, b in every), torch.zeros(M, N, device=group.device))[kept]


def gradients(world: World, pairs: list[tuple[str, str]], scale: int = 1, mesh: str = "") -> int:
    """`gather_matmul` of two weights, whose features ranks split unevenly, against the whole product on this rank."""
    group, count, D = group_of(world, mesh), 19 * scale, 12 * scale
    sizes, rows = (13 * scale, 9 * scale), slice(*split(count, group.size, group.rank))
    for forward, backward in pairs:
        x = seeded((count, D), 1, group, torch.float32).requires_grad_()
        whole = [seeded((n, D), n, group, torch.float32).requires_grad_() for n in sizes]
        targets = [seeded((count, n), 5 + n, group, torch.float32) for n in sizes]
        sum((F.linear(x, w) * t).sum() for w, t in zip(whole, targets, strict=True)).backward()  # type: ignore[union-attr]
        places = [slice(*split(n, group.size, group.rank)) for n in sizes]
        own = x.detach()[rows].clone().requires_grad_()
        parts = [w.detach()[at].clone().requires_grad_() for w, at in zip(whole, places, strict=True)]
        with forced(forward), forced(backward):
            made = gather_matmul(own, parts, [None, None], group, count, columns=sum(sizes))
            sum((y * t[:, at]).sum() for y, t, at in zip(made, targets, places, strict=True)).backward()  # type: ignore[union-attr]
        pairs_of = [(own, x, rows), *zip(parts, whole, places, strict=True)]
        for mine, theirs, at in pairs_of:
            assert mine.grad is not None
            assert theirs.grad is not None
            close(mine.grad, theirs.grad[at], (forward, backward, mine.shape))
    workspace.release(group)
    return len(pairs)
