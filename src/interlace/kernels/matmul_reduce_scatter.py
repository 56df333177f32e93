"""x_MK @ weight_NK.T summed over ranks, each rank keeping its rows: ways to let the sums travel under the product.

Every candidate equals, with `wire` the rounding to the type that travels,

    out_nN = own rows of  wire(x_0 @ w_0.T) + wire(x_1 @ w_1.T) + ... + bias        in rank order, fp32, rounded once

so results repeat bit for bit.  What travels is of the input's type, as with NCCL; with "push" it is fp32.

    plain     the library's product, then the collectives; of a long one one rank's rows travel while others are made
    chunks, chained, persistent
              the same with copy engines, which take no multiprocessor from the product (`scatter_parts`)
    tiles     one kernel: a tile goes to its owner while the next one is computed; own rows last
    put       the library's product, then one kernel that stores parts to their owners and adds up (`kernels/put.py`)
    push      one kernel for few rows: tiles go at once, as fp32, by ordinary stores

Quicker than a product followed by a reduce-scatter because, of what has to travel, only the last tiles' share is left
when the product ends.  How tiles travel and why nothing is overwritten: `ordered_tiles`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interlace.collectives import Group
from interlace.collectives.autograd import start_parts, start_scatter
from interlace.collectives.ordered import balanced, reduce_scatter
from interlace.kernels import scatter_parts
from interlace.kernels.candidate import Candidate, Options, Problem, Tile, pays_to_cut, register
from interlace.kernels.ordered_tiles import (
    Need,
    add_up,
    await_tile,
    begin,
    cannot,
    claim,
    corner,
    enter,
    halves,
    launch,
    leave,
    make_room,
    open_places,
    owned,
    part_of,
    send,
    share,
    tile_for,
)
from interlace.kernels.put import cannot_put, sums_after
from interlace.kernels.tile import ROWS, load_bias, multiply, operand, store_part, widens
from interlace.layout import split
from interlace.plan.overlap import FEW_SUMS, Way, sent, tiles_of_rows
from interlace.symmetric.device import my_rank, next_epoch

OP = "matmul_reduce_scatter"
NO_OPTIONS = Options()


# --- one kernel ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _reduce_scatter(
    a, b, c, bias, out, slots, arrived, entered, epochs, claims,
    M, N, K, a_row, a_column, b_row, b_column, out_row, out_column, spread, region, words, heap,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, WORLD: tl.constexpr, LATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = BN // SUMS
    epoch = next_epoch(epochs)
    enter(entered, epoch, heap, WORLD)
    me, programs = my_rank(heap), tl.num_programs(0)
    half = slots + (epoch & 1).to(tl.int64) * spread
    counters = begin(claims, epoch)
    taken = claim(counters)
    while taken < programs:
        send(
            a, b, half, arrived, epoch, taken, M, N, K, a_row, a_column, b_row, b_column, region, words, heap,
            A, B, WORLD, True, LATE, BM, BN, BK, GROUP, PARTS, WIDE,
        )  # fmt: skip
        taken = claim(counters)
    source = open_places(half, region, WORLD, LATE, BM, BN, WIDTH)
    first, _ = share(M, me, WORLD)
    tiles = owned(me, M, N, WORLD, True, BM, BN)
    taken = claim(counters + 1)
    while taken < programs:
        for tile in tl.range(taken, tiles, programs):
            row, last, column = corner(me, tile, M, N, WORLD, True, BM, BN, GROUP)
            made = multiply(a, b, row, last, column, N, K, a_row, a_column, b_row, b_column, A, B, BM, BN, BK, WIDE)
            await_tile(tile, arrived, epoch, words, heap, WORLD, LATE, "matmul_rs")
            for part in tl.static_range(SUMS):
                total = add_up(
                    part_of(made, part, SUMS, BM, BN), source, tile, row, last, column, N, half, region, heap,
                    WORLD, LATE, part * WIDTH, WIDTH, BM, BN,
                )  # fmt: skip
                left = column + part * WIDTH
                if BIAS:
                    total += load_bias(bias, left, N, WIDTH)
                store_part(c, out, total, row - first, last - first, left, N, out_row, out_column, C, BM, WIDTH)
        taken = claim(counters + 1)
    leave(entered, epoch, heap, WORLD, "matmul_rs")


def _one_kernel(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, group: Group, out_nN: Tensor, tile: Tile | None, late: bool
) -> None:
    (M, K), N = _sizes(x_MK, weight_NK, group, out_nN)
    if M == 0 or N == 0:
        return
    tile = tile_for(OP, M, N, x_MK.dtype, group, tile)
    wire = x_MK.dtype if late else torch.float32
    most = tiles_of_rows(M, N, (tile.block_m, tile.block_n), group.size, 0)
    room = make_room(group, OP, tile, {"parts": Need(group.size - 1, most, wire)})
    parts = room.buffers["parts"]
    way = Way("tiles" if late else "push", tile.block_m, tile.block_n)
    for collective, nbytes in sent(OP, way, M, N, K, x_MK.element_size(), group.size, group.rank):
        group.meter.count(collective, group.axis, nbytes)
    a, b = operand(x_MK, (tile.block_m, tile.block_k)), operand(weight_NK, (tile.block_n, tile.block_k))
    c = operand(out_nN, (tile.block_m, tile.block_n // halves(tile)), ROWS)
    kernel: Any = _reduce_scatter[(room.programs,)]
    launch(
        x_MK.device,
        lambda: kernel(
            a.argument, b.argument, c.argument, bias_N, out_nN,
            parts.slots, parts.arrived, room.entered, room.epochs, room.claims,
            M, N, K, a.row, a.column, b.row, b.column, out_nN.stride(0), out_nN.stride(1),
            parts.spread, parts.region, parts.words, room.context,
            A=a.how, B=b.how, C=c.how, BIAS=bias_N is not None, WORLD=group.size, LATE=late,
            BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group,
            PARTS=tile.parts, SUMS=halves(tile), WIDE=widens(x_MK.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        ),
    )  # fmt: skip


# --- plain, and what all share ---------------------------------------------------------------------------------------


def _plain(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_nN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    (M, _), N = _sizes(x_MK, weight_NK, group, out_nN)
    if bias_N is None and not pays_to_cut(2.0 * x_MK.numel() * N / group.size, x_MK.device):
        start_scatter(torch.mm(x_MK, weight_NK.t()), group.in_order(), "scatter", out_nN).wait()
        return
    if bias_N is None:
        rows = [slice(*split(M, group.size, rank)) for rank in range(group.size)]

        def product(rank: int, out: Tensor | None) -> Tensor:
            return torch.mm(x_MK[rows[rank]], weight_NK.t(), out=out)

        out_nN.copy_(start_parts(product, (len(out_nN), N), x_MK.dtype, group, "scatter").wait())
        return
    made = torch.mm(x_MK, weight_NK.t()).view(-1)
    wide = torch.float32 if made.dtype.itemsize == 2 else made.dtype
    sizes = [rows * N for rows in balanced(M, group.size)]
    total = made.new_empty(out_nN.shape, dtype=wide)
    reduce_scatter(made, group, sizes=sizes, out=total.view(-1), name="scatter").wait()
    out_nN.copy_(total.add_(bias_N))


def _tiles(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_nN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    _one_kernel(x_MK, weight_NK, bias_N, group, out_nN, options.tile, late=True)


def _push(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_nN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    _one_kernel(x_MK, weight_NK, bias_N, group, out_nN, options.tile, late=False)


def _put(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_nN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    sums_after(x_MK, weight_NK, bias_N, group, out_nN, OP)


def _sizes(x_MK: Tensor, weight_NK: Tensor, group: Group, out_nN: Tensor) -> tuple[tuple[int, int], int]:
    (M, K), N = x_MK.shape, len(weight_NK)
    assert weight_NK.shape == (N, K) and x_MK.dtype == weight_NK.dtype == out_nN.dtype
    assert out_nN.shape == (len(range(*split(M, group.size, group.rank))), N), out_nN.shape
    return (M, K), N


def _not_chained(problem: Problem, device: torch.device) -> str | None:
    if problem.world > 2:
        return f"it adds the own product last, which is the order of 2 ranks, not of {problem.world}"
    if problem.bias:
        return "the library's product has one term to add, and that is what has arrived"
    return cannot(problem, device)


PLAIN = register(Candidate("plain", OP, False, lambda problem, device: None, _plain))
CHUNKS = register(Candidate("chunks", OP, False, cannot, scatter_parts.chunks, cuts=True))
CHAINED = register(Candidate("chained", OP, False, _not_chained, scatter_parts.chained))
PERSISTENT = register(Candidate("persistent", OP, True, cannot, scatter_parts.persistent, cuts=True))
PUT = register(Candidate("put", OP, False, cannot_put, _put))
TILES = register(Candidate("tiles", OP, True, lambda problem, device: cannot(problem, device, late=True), _tiles))
PUSH = register(Candidate("push", OP, True, lambda problem, device: cannot(problem, device, most=FEW_SUMS), _push))
