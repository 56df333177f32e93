"""Partial products of whole rows that copy engines take to their owner, and three ways to add the own ones to them.

    chunks      the library's product of the own rows, then one pass that adds up what has arrived
    chained     for 2 ranks: the library adds the own product to what has arrived, and rounds once
    persistent  one Triton product of the own rows; a tile adds what has arrived for it before it is rounded

All send alike: the library's product of each other rank's rows, the next rank's first, in chunks that leave by a side
stream while the next is computed.  The sum is that of `matmul_reduce_scatter`.

Persistent saves the pass over memory, (ranks + 1) times the own rows, and the read of the output that chained costs: to
take its addend from other memory than its output, PyTorch's addmm copies it there first.  It waits for a chunk where
its first tile begins, so chunks are cut between tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interlace.collectives import Group
from interlace.kernels import workspace
from interlace.kernels.candidate import Options, Problem, Tile
from interlace.kernels.ordered_rows import sum_rows
from interlace.kernels.ordered_tiles import SHARED, halves, part_of, share
from interlace.kernels.tile import (
    ROWS,
    default_tile,
    load_bias,
    multiply,
    onward,
    operand,
    place,
    store_part,
    widens,
)
from interlace.layout import split
from interlace.plan.overlap import MOST_CHUNKS, whole_parts
from interlace.symmetric.device import admit_descriptors, my_rank, wait_until

OP = "matmul_reduce_scatter"
NO_OPTIONS = Options()
CHUNK = 16 << 20  # bytes of one rank's rows from which on 2 ranks send them in two chunks
_ROWS: tl.constexpr = tl.constexpr(ROWS)
_STRIDE: tl.constexpr = tl.constexpr(MOST_CHUNKS)


# --- what all share --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """What all calls of one shape and half share.  here: [ranks n N], what each rank sends to this one; sends: (rows of
    x, where their product goes, the word behind it), the next rank's first; words: by chunk, (word, sender)."""

    here: Tensor
    sends: list[tuple[slice, Tensor, Tensor]]
    words: list[list[tuple[Tensor, int]]]


@dataclass(frozen=True)
class Parts:
    """One call of the candidates that move whole rows: where the parts of all ranks arrive, and what says so."""

    group: Group
    turn: workspace.Turn
    M: int
    N: int
    dtype: torch.dtype
    count: int  # chunks of a rank's rows
    unit: int = 1  # rows, at multiples of which they are cut

    @classmethod
    def begin(cls, x_MK: Tensor, N: int, group: Group, chunks: int | None, unit: int = 1) -> Parts:
        M, item = len(x_MK), x_MK.element_size()
        most = triton.cdiv(M, group.size) * N * item
        space = workspace.of(group, f"{OP}.chunks")
        space.require(*whole_parts(M, N, item, group.size))
        count = chunks or (2 if group.size == 2 and most >= CHUNK else 1)
        assert count <= MOST_CHUNKS
        return cls(group, space.turn(), M, N, x_MK.dtype, count, unit)

    @property
    def route(self) -> Route:
        key = (self.M, self.N, self.dtype, self.count, self.unit, self.turn.half, self.turn.in_memory)
        return self.turn.space.route(key, self._route)

    def _route(self) -> Route:
        group, sends = self.group, []
        for step in range(1, group.size):
            owner = (group.rank + step) % group.size
            begin, target = split(self.M, group.size, owner)[0], self.at(owner)[group.rank]
            for chunk, rows in enumerate(self.chunks(owner)):
                word = self.word(owner, group.rank, chunk)
                sends.append((rows, target[rows.start - begin : rows.stop - begin], word))
        others = [(group.rank + group.size - step) % group.size for step in range(1, group.size)]
        words = [[(self.word(group.rank, peer, chunk), peer) for peer in others] for chunk in range(self.count)]
        return Route(self.at(group.rank), sends, words)

    def at(self, owner: int) -> Tensor:
        """[ranks n N]: what each rank sends to an owner of n rows."""
        space = self.turn.space
        half = self.turn.half * (space.tensors["parts"].nbytes // 2)
        rows = len(range(*split(self.M, self.group.size, owner)))
        return space.buffer("parts", owner, (self.group.size, rows, self.N), self.dtype, half)

    def chunks(self, owner: int) -> list[slice]:
        """An owner's rows, of all, in pieces."""
        low, high = split(self.M, self.group.size, owner)
        units = -(-(high - low) // self.unit)
        edges = [min(high, low + self.unit * split(units, self.count, chunk)[0]) for chunk in range(self.count)]
        return [slice(first, last) for first, last in pairwise([*edges, high])]

    def word(self, owner: int, sender: int, chunk: int) -> Tensor:
        return self.turn.words("arrived", owner)[sender * MOST_CHUNKS + chunk]

    def send(self, *pairs: tuple[Tensor, Tensor]) -> list[Tensor]:
        """The others' rows of the sum of x_MK @ weight_NK.T over the pairs, the next rank's first; a side stream takes
        pieces away.  Keep the result until `end`."""
        group, heap, number, kept = self.group, self.turn.space.heap, self.turn.number, list[Tensor]()
        for rows, target, word in self.route.sends:
            made = _product(pairs, rows, None)
            kept.append(made)
            ready = heap.event()
            with heap.stream("scatter"):
                ready.wait()
                if made.numel():
                    heap.copy(target, made)
                heap.write(word, number)
        group.meter.count("reduce_scatter", group.axis, sum(made.nbytes for made in kept))
        return kept

    def wait(self, chunk: int) -> None:
        """For this chunk, and so for the ones before it, of the own rows from all others."""
        for word, peer in self.route.words[chunk]:
            self.turn.space.heap.wait(word, self.turn.number, peer)

    def end(self) -> None:
        """What the side stream reads may change."""
        heap = self.turn.space.heap
        with heap.stream("scatter"):
            done = heap.event()
        done.wait()


def chunks(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_nN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    sum_of_several([(x_MK, weight_NK)], bias_N, group, out_nN, options.chunks)


def sum_of_several(
    pairs: Sequence[tuple[Tensor, Tensor]], bias_N: Tensor | None, group: Group, out_nN: Tensor, chunks: int | None
) -> None:
    """The sum of x_MK @ weight_NK.T over the pairs, in chunks; each is added to the ones before in the type of x."""
    (x_MK, weight_NK), *_ = pairs
    M, N = len(x_MK), len(weight_NK)
    if M == 0 or N == 0:
        return
    parts = Parts.begin(x_MK, N, group, chunks)
    kept = parts.send(*pairs)
    here = parts.route.here
    own = here[group.rank]
    _product(pairs, slice(*split(M, group.size, group.rank)), own)
    parts.wait(parts.count - 1)
    target = out_nN if out_nN.is_contiguous() else torch.empty_like(own)
    sum_rows(own.view(-1), here.view(group.size, -1), group.rank, target.view(-1), bias=bias_N)
    if target is not out_nN:
        out_nN.copy_(target)
    parts.end()
    del kept


def _product(pairs: Sequence[tuple[Tensor, Tensor]], rows: slice, out: Tensor | None) -> Tensor:
    (x_MK, weight_NK), *others = pairs
    made = torch.mm(x_MK[rows], weight_NK.t(), out=out)
    for x, weight in others:
        made.addmm_(x[rows], weight.t())
    return made


def chained(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_nN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    (M, _), N = x_MK.shape, len(weight_NK)
    if M == 0 or N == 0:
        return
    parts = Parts.begin(x_MK, N, group, options.chunks)
    kept = parts.send((x_MK, weight_NK))
    first = split(M, group.size, group.rank)[0]
    received = parts.route.here[1 - group.rank]
    for chunk, rows in enumerate(parts.chunks(group.rank)):
        parts.wait(chunk)
        here = slice(rows.start - first, rows.stop - first)
        if rows.start < rows.stop:
            torch.addmm(received[here], x_MK[rows], weight_NK.t(), out=out_nN[here])
    parts.end()
    del kept


# --- the own rows in one kernel --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "number", "chunks"])
def _add_own(
    a, b, c, bias, out, here, received, arrived, number, n, N, K, chunks,
    a_row, a_column, b_row, b_column, here_row, out_row, out_column, heap,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr, IN_MEMORY: tl.constexpr,
    WORLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out [n N] = the sum over ranks of here [ranks n N], with this rank's product in the place of its own."""
    WIDTH: tl.constexpr = BN // SUMS
    me, programs = my_rank(heap), tl.num_programs(0)
    now = tl.load(number) if IN_MEMORY else number
    blocks, columns = tl.cdiv(n, BM), tl.cdiv(N, BN)
    at = tl.program_id(0)
    for chunk in range(0, chunks):
        first, count = share(blocks, chunk, chunks)
        tiles = count * columns
        if (at < tiles) | (tl.program_id(0) == 0):  # program 0 waits for all, so that the call does
            for step in range(1, WORLD):
                peer = (me + WORLD - step) % WORLD
                wait_until(arrived + peer * _STRIDE + chunk, now, peer, heap, "scatter_own")
            if R == _ROWS:
                admit_descriptors()
        for tile in tl.range(at, tiles, programs, flatten=FLATTEN):
            down, across = place(tile, count, columns, GROUP)
            row, column = (first + down) * BM, across * BN
            made = multiply(a, b, row, n, column, N, K, a_row, a_column, b_row, b_column, A, B, BM, BN, BK, WIDE)
            for part in tl.static_range(SUMS):
                left = column + part * WIDTH
                own = part_of(made, part, SUMS, BM, BN).to(here.dtype.element_ty).to(tl.float32)
                total = _sum(own, here, received, me, row, n, left, N, here_row, R, WORLD, BM, WIDTH)
                if BIAS:
                    total += load_bias(bias, left, N, WIDTH)
                store_part(c, out, total, row, n, left, N, out_row, out_column, C, BM, WIDTH)
        at = onward(at, tiles, programs)


@triton.jit
def _sum(
    own, here, received, me, row, n, left, N, here_row,
    R: tl.constexpr, WORLD: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """In the order of ranks.  Without a branch, which would keep the loop around it from being flattened: of two the
    order does not matter, of more the place of the own one is read from a neighbour and not used."""
    if WORLD == 2:
        return own + _part(here, received, 1 - me, row, n, left, N, here_row, R, BM, WIDTH)
    else:
        total = tl.zeros([BM, WIDTH], tl.float32)
        for rank in tl.static_range(WORLD):
            instead = tl.where(me == rank, (rank + 1) % WORLD, rank)
            other = _part(here, received, instead, row, n, left, N, here_row, R, BM, WIDTH)
            total += tl.where(me == rank, own, other)
        return total


@triton.jit
def _part(here, received, rank, row, n, left, N, here_row, R: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr):
    """[BM WIDTH] of what a rank has sent, fp32; rows from n on are whatever lies there, and are not kept."""
    if R == _ROWS:
        return received.load([rank * n + row, left]).to(tl.float32)
    else:
        rows, columns = row + tl.arange(0, BM), left + tl.arange(0, WIDTH)
        at = (rank * n + rows).to(tl.int64)[:, None] * here_row + columns[None, :]
        return tl.load(here + at, mask=(rows < n)[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)


def persistent(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_nN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    (M, K), N = x_MK.shape, len(weight_NK)
    if M == 0 or N == 0:
        return
    tile = own_tile(M, N, x_MK.dtype, group.size, options.tile)
    parts = Parts.begin(x_MK, N, group, options.chunks, tile.block_m)
    kept = parts.send((x_MK, weight_NK))
    start, stop = split(M, group.size, group.rank)
    x_nK, turn, here = x_MK[start:stop], parts.turn, parts.route.here.view(-1, N)
    a, b = operand(x_nK, (tile.block_m, tile.block_k)), operand(weight_NK, (tile.block_n, tile.block_k))
    piece = (tile.block_m, tile.block_n // halves(tile))
    c, received = operand(out_nN, piece, ROWS), operand(here, piece, ROWS)
    tiles = triton.cdiv(stop - start, tile.block_m) * triton.cdiv(N, tile.block_n)
    kernel: Any = _add_own[(turn.space.places(tiles),)]
    kernel(
        a.argument, b.argument, c.argument, bias_N, out_nN, here, received.argument, turn.words("arrived"),
        turn.number, stop - start, N, K, parts.count,
        a.row, a.column, b.row, b.column, N, out_nN.stride(0), out_nN.stride(1), turn.space.heap.context,
        A=a.how, B=b.how, C=c.how, R=received.how, BIAS=bias_N is not None, IN_MEMORY=turn.in_memory,
        WORLD=group.size, BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group,
        FLATTEN=tile.flatten, SUMS=halves(tile), WIDE=widens(x_MK.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    parts.end()
    del kept


def own_tile(M: int, N: int, dtype: torch.dtype, ranks: int, tile: Tile | None) -> Tile:
    """`tile`, or the default for one rank's rows; with as many stages as fit beside a piece that is added or stored.

    The same on every rank, since chunks are cut between tiles.
    """
    tile = tile or default_tile(Problem(OP, triton.cdiv(M, ranks), N, N, dtype, ranks))
    piece = tile.block_m * tile.block_n // halves(tile) * dtype.itemsize
    stage = (tile.block_m + tile.block_n) * tile.block_k * dtype.itemsize
    return replace(tile, stages=max(1, min(tile.stages, (SHARED - piece) // stage)))
