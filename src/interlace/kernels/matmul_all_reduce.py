"""x_MK @ weight_NK.T summed over ranks, on every rank: ways to let the sums travel under the product.

Every candidate equals, with `wire` the rounding to the type that travels,

    out_MN = wire(x_0 @ w_0.T) + wire(x_1 @ w_1.T) + ... + bias        in rank order, fp32, rounded once

with the same bits on every rank, repeated bit for bit.  What travels is of the input's type, but fp32 in "one-shot".

    plain     the library's product, then the collectives
    put       the library's product, then one kernel that stores it to all ranks and adds up (`kernels/put.py`)
    one-shot  one kernel for few rows: a tile goes to all ranks as fp32 as soon as it is made; each adds all of them up
    two-shot  one kernel: a tile goes to its owner while the next one is computed, comes back as a sum, likewise

One-shot moves W - 1 times the product and waits once; two-shot 2 (W - 1) / W times and waits twice.  Both count their
calls in memory, and may be captured in a CUDA graph.  How tiles travel and why nothing is overwritten: `ordered_tiles`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interlace.collectives import Group
from interlace.collectives.autograd import start_reduce
from interlace.collectives.ordered import all_reduce
from interlace.kernels.candidate import Candidate, Options, Tile, register
from interlace.kernels.ordered_tiles import (
    Need,
    add_up,
    await_tile,
    begin,
    cannot,
    claim,
    corner,
    elements,
    enter,
    halves,
    launch,
    leave,
    make_room,
    open_places,
    owned,
    part_of,
    send,
    slot,
    tile_for,
)
from interlace.kernels.put import cannot_put, sums_after
from interlace.kernels.tile import ROWS, load_bias, multiply, operand, place, store_part, widens
from interlace.plan.overlap import FEW_SUMS, Way, num_tiles, sent
from interlace.symmetric.device import flush_descriptors, my_rank, next_epoch, remote, signal, wait_until

OP = "matmul_all_reduce"
NO_OPTIONS = Options()


@triton.jit(do_not_specialize=["M"])
def _one_shot(
    a, b, c, bias, out, slots, arrived, entered, epochs, claims,
    M, N, K, a_row, a_column, b_row, b_column, out_row, out_column, spread, region, words, heap,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A place for every rank, this one among them.  A program adds up the tiles that it has made, so that only others
    have to be told of them; when it has taken several shares, each says which came before."""
    epoch = next_epoch(epochs)
    enter(entered, epoch, heap, WORLD)
    me, programs = my_rank(heap), tl.num_programs(0)
    half = slots + (epoch & 1).to(tl.int64) * spread
    mine = half + me.to(tl.int64) * region
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    counters = begin(claims, epoch)
    before = claims + 4
    last = -1
    taken = claim(counters)
    while taken < programs:
        for tile in tl.range(taken, rows * columns, programs):
            down, across = place(tile, rows, columns, GROUP)
            row, column = down * BM, across * BN
            made = multiply(a, b, row, M, column, N, K, a_row, a_column, b_row, b_column, A, B, BM, BN, BK, WIDE)
            at, kept = elements(tile, row, M, column, N, 0, BN, BM, BN)
            rounded = made.to(slots.dtype.element_ty)
            for step in tl.static_range(1, WORLD):
                tl.store(remote(mine, (me + step) % WORLD, heap) + at, rounded, mask=kept)
            for step in range(1, WORLD):
                signal(arrived + me * words + tile, epoch, (me + step) % WORLD, heap)
            tl.store(mine + at, rounded, mask=kept)
        tl.store(before + taken, last)
        last = taken
        taken = claim(counters)
    tl.debug_barrier()  # what this program's threads have stored for itself
    while last >= 0:
        for tile in tl.range(last, rows * columns, programs):
            down, across = place(tile, rows, columns, GROUP)
            row, column = down * BM, across * BN
            for step in range(1, WORLD):
                peer = (me + WORLD - step) % WORLD
                wait_until(arrived + peer * words + tile, epoch, peer, heap, "one_shot_ar")
            at, kept = elements(tile, row, M, column, N, 0, BN, BM, BN)
            total = tl.load(half + at, mask=kept, other=0.0).to(tl.float32)
            for rank in tl.static_range(1, WORLD):
                total += tl.load(half + tl.cast(rank, tl.int64) * region + at, mask=kept, other=0.0).to(tl.float32)
            if BIAS:
                total += load_bias(bias, column, N, BN)
            store_part(c, out, total, row, M, column, N, out_row, out_column, C, BM, BN)
        last = tl.load(before + last)
    leave(entered, epoch, heap, WORLD, "one_shot_ar")


@triton.jit
def say_all(word, epoch, heap, WORLD: tl.constexpr):
    """Raises a word at all others."""
    me = my_rank(heap)
    for step in range(1, WORLD):
        signal(word, epoch, (me + step) % WORLD, heap)


@triton.jit
def targets_of(
    sums, tiles, region, heap,
    WORLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Descriptors of the places that the others keep for this rank's sums, the next rank's first."""
    me = my_rank(heap)
    made = ()
    for step in tl.static_range(1, WORLD):
        peer = (me + step) % WORLD
        there = remote(sums + slot(me, peer).to(tl.int64) * region, peer, heap)
        made += (tl.make_tensor_descriptor(there, [tl.maximum(tiles, 1) * BM, BN], [BN, 1], [BM, WIDTH]),)  # type: ignore[assignment]
    return made


@triton.jit(do_not_specialize=["M"])
def _two_shot(
    a, b, c, bias, out, slots, arrived, sums, reduced, entered, epochs, claims,
    M, N, K, a_row, a_column, b_row, b_column, out_row, out_column,
    spread, region, words, sums_region, sums_words, heap,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, WORLD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Tiles are owned in equal shares, whatever the rows.  slots, arrived: for parts; sums, reduced: for sums.

    Sums need no second half: an owner has a sum of call e + 1 when all have sent parts of it, so have left e.
    """
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
            A, B, WORLD, False, True, BM, BN, BK, GROUP, PARTS, WIDE,
        )  # fmt: skip
        taken = claim(counters)
    source = open_places(half, region, WORLD, True, BM, BN, WIDTH)
    tiles = owned(me, M, N, WORLD, False, BM, BN)
    targets = targets_of(sums, tiles, sums_region, heap, WORLD, BM, BN, WIDTH)
    said = reduced + me * sums_words
    taken = claim(counters + 1)
    while taken < programs:
        unsaid = -1
        for tile in tl.range(taken, tiles, programs):
            row, last, column = corner(me, tile, M, N, WORLD, False, BM, BN, GROUP)
            made = multiply(a, b, row, last, column, N, K, a_row, a_column, b_row, b_column, A, B, BM, BN, BK, WIDE)
            if unsaid >= 0:
                flush_descriptors()
                say_all(said + unsaid, epoch, heap, WORLD)
            unsaid = tile
            await_tile(tile, arrived, epoch, words, heap, WORLD, True, "two_shot_ar")
            for part in tl.static_range(SUMS):
                left = column + part * WIDTH
                total = add_up(
                    part_of(made, part, SUMS, BM, BN), source, tile, row, last, column, N, half, region, heap,
                    WORLD, True, part * WIDTH, WIDTH, BM, BN,
                )  # fmt: skip
                if BIAS:
                    total += load_bias(bias, left, N, WIDTH)
                rounded = total.to(out.dtype.element_ty)
                store_part(c, out, rounded, row, last, left, N, out_row, out_column, C, BM, WIDTH)
                for peer in tl.static_range(WORLD - 1):
                    targets[peer].store([tile * BM, part * WIDTH], rounded)
        if unsaid >= 0:
            flush_descriptors()
            say_all(said + unsaid, epoch, heap, WORLD)
        taken = claim(counters + 1)
    for step in range(1, WORLD):
        owner = (me + WORLD - step) % WORLD
        there = sums + slot(owner, me).to(tl.int64) * sums_region
        for tile in range(tl.program_id(0), owned(owner, M, N, WORLD, False, BM, BN), programs):
            row, last, column = corner(owner, tile, M, N, WORLD, False, BM, BN, GROUP)
            wait_until(reduced + owner * sums_words + tile, epoch, owner, heap, "two_shot_ar")
            for part in tl.static_range(SUMS):
                at, kept = elements(tile, row, last, column, N, part * WIDTH, WIDTH, BM, BN)
                found = tl.load(there + at, mask=kept, other=0.0)
                store_part(c, out, found, row, last, column + part * WIDTH, N, out_row, out_column, C, BM, WIDTH)
    leave(entered, epoch, heap, WORLD, "two_shot_ar")


# --- on the host -----------------------------------------------------------------------------------------------------


def _one_shot_run(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_MN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    (M, K), N = _sizes(x_MK, weight_NK, out_MN)
    if M == 0 or N == 0:
        return
    tile = tile_for(OP, M, N, x_MK.dtype, group, options.tile)
    tiles = num_tiles(M, N, (tile.block_m, tile.block_n))
    room = make_room(group, OP, tile, {"all": Need(group.size, tiles, torch.float32)})
    _count(group, "one-shot", tile, M, N, K, x_MK)
    a, b = operand(x_MK, (tile.block_m, tile.block_k)), operand(weight_NK, (tile.block_n, tile.block_k))
    c, parts = operand(out_MN, (tile.block_m, tile.block_n), ROWS), room.buffers["all"]
    kernel: Any = _one_shot[(room.programs,)]
    kernel(
        a.argument, b.argument, c.argument, bias_N, out_MN,
        parts.slots, parts.arrived, room.entered, room.epochs, room.claims,
        M, N, K, a.row, a.column, b.row, b.column, out_MN.stride(0), out_MN.stride(1),
        parts.spread, parts.region, parts.words, room.context,
        A=a.how, B=b.how, C=c.how, BIAS=bias_N is not None, WORLD=group.size,
        BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group, WIDE=widens(x_MK.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _two_shot_run(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_MN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    (M, K), N = _sizes(x_MK, weight_NK, out_MN)
    if M == 0 or N == 0:
        return
    tile = tile_for(OP, M, N, x_MK.dtype, group, options.tile)
    tiles = triton.cdiv(num_tiles(M, N, (tile.block_m, tile.block_n)), group.size)
    need = Need(group.size - 1, tiles, x_MK.dtype)
    room = make_room(group, OP, tile, {"parts": need, "sums": replace(need, calls=1)})
    _count(group, "two-shot", tile, M, N, K, x_MK)
    a, b = operand(x_MK, (tile.block_m, tile.block_k)), operand(weight_NK, (tile.block_n, tile.block_k))
    c = operand(out_MN, (tile.block_m, tile.block_n // halves(tile)), ROWS)
    parts, sums = room.buffers["parts"], room.buffers["sums"]
    kernel: Any = _two_shot[(room.programs,)]
    launch(
        x_MK.device,
        lambda: kernel(
            a.argument, b.argument, c.argument, bias_N, out_MN,
            parts.slots, parts.arrived, sums.slots, sums.arrived,
            room.entered, room.epochs, room.claims,
            M, N, K, a.row, a.column, b.row, b.column, out_MN.stride(0), out_MN.stride(1),
            parts.spread, parts.region, parts.words, sums.region, sums.words, room.context,
            A=a.how, B=b.how, C=c.how, BIAS=bias_N is not None, WORLD=group.size,
            BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group,
            PARTS=tile.parts, SUMS=halves(tile), WIDE=widens(x_MK.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        ),
    )  # fmt: skip


def _plain(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_MN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    _sizes(x_MK, weight_NK, out_MN)
    if bias_N is None and out_MN.is_contiguous():
        torch.mm(x_MK, weight_NK.t(), out=out_MN)
        start_reduce(out_MN, group.in_order()).wait()
        return
    made = torch.mm(x_MK, weight_NK.t())
    if bias_N is None:
        out_MN.copy_(start_reduce(made, group).wait())
        return
    wide = torch.float32 if made.dtype.itemsize == 2 else made.dtype
    total = torch.empty_like(made, dtype=wide)
    all_reduce(made.view(-1), group, out=total.view(-1)).wait()
    out_MN.copy_(total.add_(bias_N))


def _put(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    group: Group,
    out_MN: Tensor,
    options: Options = NO_OPTIONS,
) -> None:
    sums_after(x_MK, weight_NK, bias_N, group, out_MN, OP)


def _sizes(x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor) -> tuple[tuple[int, int], int]:
    (M, K), N = x_MK.shape, len(weight_NK)
    assert weight_NK.shape == (N, K) and x_MK.dtype == weight_NK.dtype == out_MN.dtype
    assert out_MN.shape == (M, N), out_MN.shape
    return (M, K), N


def _count(group: Group, name: str, tile: Tile, M: int, N: int, K: int, x_MK: Tensor) -> None:
    """Tells the meter what this rank sends."""
    way = Way(name, tile.block_m, tile.block_n)
    for collective, nbytes in sent(OP, way, M, N, K, x_MK.element_size(), group.size, group.rank):
        group.meter.count(collective, group.axis, nbytes)


PLAIN = register(Candidate("plain", OP, False, lambda problem, device: None, _plain))
ONE_SHOT = register(
    Candidate("one-shot", OP, True, lambda problem, device: cannot(problem, device, most=FEW_SUMS), _one_shot_run)
)
TWO_SHOT = register(
    Candidate("two-shot", OP, True, lambda problem, device: cannot(problem, device, late=True), _two_shot_run)
)
PUT = register(Candidate("put", OP, False, cannot_put, _put))
