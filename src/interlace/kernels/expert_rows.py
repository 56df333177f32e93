"""Rows on their way to the experts, and back.

In plain operations, with the slots of `expert_route`:

    send_rows       slots[slot of (token, choice) at its owner] = x[token], and a flag a piece of slots and rank
    await_rows      every row of a tile is here
    return_rows     returned[token, choice] at the token's rank = made[slot], and how many rows that was
    sum_rows        y[token] = sum over choices, in order, of weight * returned[token, choice], in fp32, rounded once

A piece is at most PIECE slots of one expert that come from one rank: one program writes it and raises its flag, so
that a flag has one writer and its value is the number of the exchange.  Peers' pieces and the own are sent in turn,
expert by expert in the order in which owners multiply them.  What comes back is counted: a word an owner, which grows
by the number of rows; `due` is the sum of what was owed.

A token whose choices have one owner is sent there once for each of them: rows of one expert then stand together, as a
product wants them, and the first experts' rows are all there while the last ones' travel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.expert_route import BASE, BEGIN, END, ITEMS, KEPT, REGION, START
from interlace.symmetric.device import fence, my_rank, remote, signal, wait_until, world
from interlace.symmetric.record import DISTANCES

_DISTANCES: tl.constexpr = tl.constexpr(DISTANCES)
_LANES: tl.constexpr = tl.constexpr(256)  # threads of a program, at most


@triton.jit
def send_rows(
    x, weights, order, slots, choices, factors, arrived, ready, table, owners, sequence, epoch, k, D, X, first, step,
    heap, WEIGHTED: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, XP: tl.constexpr,
):  # fmt: skip
    """Pieces first, first + step, ...: rows of x [tokens D], which choice each is, and with WEIGHTED its weight."""
    me, ranks = my_rank(heap), world(heap)
    for rank in range(ranks):
        wait_until(ready + rank, epoch, rank, heap, "expert_ready")  # nobody reads the slots any more
    ids = tl.arange(0, XP)
    ends = tl.load(table + ITEMS * X + ids, mask=ids < X, other=2147483647)
    total = tl.load(table + (REGION + ranks + 1) * X)
    piece = first
    while piece < total:
        place = tl.sum((ends <= piece).to(tl.int32), axis=0)
        ahead = tl.load(table + ITEMS * X + place - 1, mask=place > 0, other=0)
        expert = tl.load(sequence + place)
        owner = tl.load(owners + expert)
        base, kept = tl.load(table + BASE * X + expert), tl.load(table + KEPT * X + expert)
        mine = order + tl.load(table + BEGIN * X + expert) - base
        block = base // PIECE + piece - ahead
        for top in range(0, PIECE, ROWS):
            slot = block * PIECE + top + tl.arange(0, ROWS)
            inside = (slot >= base) & (slot < base + kept)
            choice = tl.load(mine + slot, mask=inside, other=0)
            tl.store(remote(choices + slot, owner, heap), choice, mask=inside)
            if WEIGHTED:
                tl.store(remote(factors + slot, owner, heap), tl.load(weights + choice, mask=inside), mask=inside)
            source = x + (choice // k).to(tl.int64)[:, None] * D
            target = remote(slots + slot.to(tl.int64)[:, None] * D, owner, heap)
            for left in range(0, D, COLUMNS):
                column = left + tl.arange(0, COLUMNS)[None, :]
                mask = inside[:, None] & (column < D)
                tl.store(target + column, tl.load(source + column, mask=mask), mask=mask)
        signal(arrived + block * ranks + me, epoch, owner, heap)
        piece += step


@triton.jit
def clear_ends(slots, table, D, first_expert, L, X, first, step, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros in the slots between an expert's last row and the end of its block, where sums over rows read them."""
    for local in range(first, L, step):
        expert = first_expert + local
        start, end = tl.load(table + START * X + expert), tl.load(table + END * X + expert)
        slot = start + tl.cdiv(end - start, BLOCK) * BLOCK - 1
        while slot >= end:
            for left in range(0, D, COLUMNS):
                column = left + tl.arange(0, COLUMNS)
                nothing = tl.zeros([COLUMNS], slots.dtype.element_ty)
                tl.store(slots + slot.to(tl.int64) * D + column, nothing, mask=column < D)
            slot -= 1


@triton.jit
def await_rows(
    arrived, table, expert, top, end, epoch, X, heap, LENGTH: tl.constexpr, PIECE: tl.constexpr, WP: tl.constexpr
):
    """Returns when the rows in slots [top, top + LENGTH), those of one expert, below `end`, are here.

    All flags are looked at at once; only if one is missing they are awaited one by one.  Each flag is read by many
    lanes, a lane a thread: warps that had read it for themselves could go different ways, to different barriers, while
    a sum over more lanes than a warp has is made by all of them together.
    """
    ranks = world(heap)
    PIECES: tl.constexpr = LENGTH // PIECE
    lanes = tl.arange(0, max(PIECES * WP, _LANES)) % (PIECES * WP)
    rank, low = lanes % WP, top + lanes // WP * PIECE
    region = table + (REGION + rank) * X + expert
    begin = tl.maximum(tl.load(region, mask=rank < ranks, other=0), low)
    stop = tl.minimum(tl.load(region + X, mask=rank < ranks, other=0), tl.minimum(low + PIECE, end))
    flag = arrived + low // PIECE * ranks + rank
    have = tl.load(flag, mask=begin < stop, other=epoch, volatile=True)
    if tl.sum((have - epoch < 0).to(tl.int32), axis=0) == 0:
        fence()
    else:
        for piece in range(PIECES):
            here = top + piece * PIECE
            for peer in range(ranks):
                row = table + (REGION + peer) * X + expert
                last = tl.minimum(tl.load(row + X), tl.minimum(here + PIECE, end))
                if tl.maximum(tl.load(row), here) < last:
                    wait_until(arrived + here // PIECE * ranks + peer, epoch, peer, heap, "expert_rows")


@triton.jit
def expert_of(slot, table, first_expert, L, X, LP: tl.constexpr):
    """Which expert of this rank (its number among all) a slot belongs to."""
    ids = tl.arange(0, LP)
    starts = tl.load(table + START * X + first_expert + ids, mask=ids < L, other=2147483647)
    return first_expert + tl.sum((starts <= slot).to(tl.int32), axis=0) - 1


@triton.jit
def return_rows(
    made, partial, returned, shares, choices, done, queue, back, table, made_of, partials, D, X, capacity,
    first_expert, L, heap,
    AWAITED: tl.constexpr, SHARED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Takes pieces of slots from a queue and returns their rows; with AWAITED, once `made_of` tiles of a block exist.

    With SHARED a number a row, the sum of `partials` rows of partial [.. capacity], comes along.
    """
    me, ranks = my_rank(heap), world(heap)
    total = tl.load(table + (REGION + ranks + 1) * X + 1) * (BLOCK // PIECE)
    piece = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    while piece < total:
        first = piece * PIECE
        expert = expert_of(first, table, first_expert, L, X, LP)
        end = tl.load(table + END * X + expert)
        if first < end:
            if AWAITED:
                wait_until(done + first // BLOCK, made_of, me, heap, "expert_made")
            for top in range(0, PIECE, ROWS):
                slot = first + top + tl.arange(0, ROWS)
                inside = slot < end
                peer = tl.zeros([ROWS], tl.int32)
                for rank in range(1, ranks):
                    peer += (slot >= tl.load(table + (REGION + rank) * X + expert)).to(tl.int32)
                far = tl.load(heap + _DISTANCES + peer)
                choice = tl.load(choices + slot, mask=inside, other=0)
                if SHARED:
                    share = tl.zeros([ROWS], tl.float32)
                    for each in range(partials):
                        share += tl.load(partial + each * capacity + slot, mask=inside, other=0.0)
                    tl.store(shares + choice + far // 4, share, mask=inside)
                SIZE: tl.constexpr = returned.dtype.element_ty.primitive_bitwidth // 8
                source = made + slot.to(tl.int64)[:, None] * D
                target = returned + (choice.to(tl.int64)[:, None] * D + tl.multiple_of(far // SIZE, 16)[:, None])
                for left in range(0, D, COLUMNS):
                    column = left + tl.arange(0, COLUMNS)[None, :]
                    mask = inside[:, None] & (column < D)
                    tl.store(target + column, tl.load(source + column, mask=mask), mask=mask)
            for rank in range(ranks):
                row = table + (REGION + rank) * X + expert
                stop = tl.minimum(tl.load(row + X), tl.minimum(first + PIECE, end))
                count = stop - tl.maximum(tl.load(row), first)
                if count > 0:
                    signal(back + me, count, rank, heap, ADD=True)
        piece = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["tokens"])
def sum_rows(
    returned, shares, weights, experts, y, shares_out, due, back, table, tokens, k, D, X, capacity, heap,
    WEIGHTED: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y [tokens D]; not a number where a rank has no room for all of its rows.  Choices of no expert add nothing."""
    ranks = world(heap)
    for rank in range(ranks):
        wait_until(back + rank, tl.load(due + rank), rank, heap, "expert_back")
    spoilt = tl.load(table + (REGION + ranks + 1) * X + 2) > capacity
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    if SHARED:
        for choice in range(k):
            chosen = inside & (tl.load(experts + token * k + choice, mask=inside, other=0) < X)
            share = tl.load(shares + token * k + choice, mask=chosen, other=0.0)
            tl.store(shares_out + token * k + choice, tl.where(spoilt, float("nan"), share), mask=inside)
    for left in range(0, D, COLUMNS):
        column = left + tl.arange(0, COLUMNS)[None, :]
        mask = inside[:, None] & (column < D)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for choice in range(k):
            row = (token.to(tl.int64) * k + choice)[:, None] * D
            chosen = tl.load(experts + token * k + choice, mask=inside, other=0) < X
            value = tl.load(returned + row + column, mask=mask & chosen[:, None], other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + token * k + choice, mask=inside, other=0.0).to(tl.float32)[:, None]
            total += value
        total = tl.where(spoilt, float("nan"), total)
        tl.store(y + token.to(tl.int64)[:, None] * D + column, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def send_only(
    x, weights, order, slots, choices, factors, arrived, ready, epochs, table, owners, sequence, k, D, X, first_expert,
    L, heap,
    WEIGHTED: tl.constexpr, CLEARED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, XP: tl.constexpr, LP: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """The dispatch by itself: ends when this rank's rows are all here; CLEARED: and zeros behind each expert's last."""
    epoch = tl.load(epochs)
    program, programs = tl.program_id(0), tl.num_programs(0)
    send_rows(
        x, weights, order, slots, choices, factors, arrived, ready, table, owners, sequence, epoch, k, D, X, program,
        programs, heap, WEIGHTED=WEIGHTED, PIECE=PIECE, ROWS=ROWS, COLUMNS=COLUMNS, XP=XP,
    )  # fmt: skip
    if CLEARED:
        clear_ends(slots, table, D, first_expert, L, X, program, programs, BLOCK=BLOCK, COLUMNS=COLUMNS)
    total = tl.load(table + (REGION + world(heap) + 1) * X + 1)
    for block in range(program, total, programs):
        expert = expert_of(block * BLOCK, table, first_expert, L, X, LP)
        end = tl.load(table + END * X + expert)
        await_rows(arrived, table, expert, block * BLOCK, end, epoch, X, heap, LENGTH=BLOCK, PIECE=PIECE, WP=WP)


@triton.jit
def return_only(
    made, partial, returned, shares, choices, queue, back, table, partials, D, X, capacity, first_expert, L, heap,
    SHARED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LP: tl.constexpr,
):  # fmt: skip
    """The way back by itself, of rows that an earlier launch made."""
    return_rows(
        made, partial, returned, shares, choices, queue, queue, back, table, 0, partials, D, X, capacity, first_expert,
        L, heap,
        AWAITED=False, SHARED=SHARED, PIECE=PIECE, BLOCK=BLOCK, ROWS=ROWS, COLUMNS=COLUMNS, LP=LP,
    )  # fmt: skip


@triton.jit
def keep_rows(slots, kept, table, D, X, first_expert, L, heap, BLOCK: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, LP: tl.constexpr):  # fmt: skip
    """A copy of the rows for backward, with zeros behind an expert's last row."""
    total = tl.load(table + (REGION + world(heap) + 1) * X + 1) * (BLOCK // ROWS)
    for each in range(tl.program_id(0), total, tl.num_programs(0)):
        slot = each * ROWS + tl.arange(0, ROWS)
        expert = expert_of(each * ROWS, table, first_expert, L, X, LP)
        inside = (slot < tl.load(table + END * X + expert))[:, None]
        for left in range(0, D, COLUMNS):
            column = left + tl.arange(0, COLUMNS)[None, :]
            at = slot.to(tl.int64)[:, None] * D + column
            value = tl.load(slots + at, mask=inside & (column < D), other=0.0)
            tl.store(kept + at, value, mask=column < D)
