"""Where each row goes: counts, their exchange, and places, all on the device.

`route(...)` equals

    order = experts.flatten().argsort(stable=True);   counts_X = bincount(experts);   counts_WX = all_gather(counts_X)
    rows_e = counts_WX.sum(0);   start_e = sum over the experts before e of its owner of rows_e rounded up to `block`
    base_es = start_e + sum over ranks s' < s of counts_WX[s', e]

A rank's rows lie at their expert's owner in slots base_es, base_es + 1, ...: by expert, then by the rank they come
from, then by (token, choice).  A choice of number X is of no expert, and has no place.  An expert begins at a whole
block, so that no tile of a product and no flag has rows of two.  What follows from the counts is the table, one per
call, which backward uses again.

Quicker than a sort and a collective because the host is never asked: two launches, the counts travel between them.
Counts lie in two halves in turn: a peer may be one call ahead, and no more, since every call waits for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from interlace.symmetric.device import my_rank, put_signal, signal, wait_until, world

# Rows of a table, X words each; the rows from REGION on are one a rank and one more.
START: tl.constexpr = tl.constexpr(0)  # of an expert at its owner, in slots
BASE: tl.constexpr = tl.constexpr(1)  # of this rank's rows of it there
KEPT: tl.constexpr = tl.constexpr(2)  # how many these are
ITEMS: tl.constexpr = tl.constexpr(3)  # pieces to send, summed up in the order of sending
END: tl.constexpr = tl.constexpr(4)  # of an expert's rows at its owner
BEGIN: tl.constexpr = tl.constexpr(5)  # of this rank's rows of it in `order`
REGION: tl.constexpr = tl.constexpr(6)  # + s: where rank s's rows of it begin at its owner
# Behind the rows: pieces to send, blocks to multiply, slots wanted on the rank that wants most.  Where that is more
# than the capacity, no rank sends or multiplies anything: KEPT and the first two are zero.


def table_words(experts: int, ranks: int) -> int:
    """How many int32 a table has."""
    return (7 + ranks) * experts + 3


@triton.jit(do_not_specialize=["choices", "loops"])
def count_choices(
    experts, places, tallies, begins, arrivals, counts, ready, epochs, choices, loops, X, heap,
    SUB: tl.constexpr, ROWS: tl.constexpr, XP: tl.constexpr,
):  # fmt: skip
    """Places of choices among those of one expert in this program; the last program adds up and tells all ranks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    ids = tl.arange(0, XP)
    here = ids < X
    run = tl.zeros([XP], tl.int32)
    for step in range(loops):
        at = (program * loops + step) * SUB + tl.arange(0, SUB)
        expert = tl.load(experts + at, mask=at < choices, other=-1).to(tl.int32)
        hit = (expert[:, None] == ids[None, :]).to(tl.int32)
        place = tl.sum(hit * (tl.cumsum(hit, axis=0) - 1 + run[None, :]), axis=1)
        tl.store(places + at, place, mask=at < choices)
        run += tl.sum(hit, axis=0)
    tl.store(tallies + program * X + ids, run, mask=here)
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.debug_barrier()
        total = tl.zeros([XP], tl.int32)
        for first in range(0, programs, ROWS):
            row = first + tl.arange(0, ROWS)
            at = tallies + row[:, None] * X + ids[None, :]
            inside = (row < programs)[:, None] & here[None, :]
            tally = tl.load(at, mask=inside, other=0)
            tl.store(at, tl.cumsum(tally, axis=0) - tally + total[None, :], mask=inside)
            total += tl.sum(tally, axis=0)
        tl.store(begins + ids, tl.cumsum(total, axis=0) - total, mask=here)
        tl.store(arrivals, 0)
        epoch = tl.load(epochs) + 1
        me, ranks = my_rank(heap), world(heap)
        mine = counts + ((epoch & 1) * ranks + me) * X
        tl.store(mine + ids, total, mask=here)
        tl.debug_barrier()
        tl.store(epochs, epoch)
        for step in range(ranks):
            put_signal(mine, mine, X, ready + me, epoch, (me + 1 + step) % ranks, heap, XP)


@triton.jit(do_not_specialize=["choices", "loops"])
def place_choices(
    experts, places, tallies, begins, order, table, words, counts, ready, epochs, due, owners, origins, sequence,
    choices, loops, X, capacity, blocks, heap,
    SUB: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, XP: tl.constexpr,
):  # fmt: skip
    """Program 0 makes the table of what the ranks have counted; the others write the choices in order of experts."""
    program = tl.program_id(0) - 1
    if program < 0:
        _clear(words, blocks)
        _plan(
            begins, table, counts, ready, epochs, due, owners, origins, sequence, X, capacity, heap,
            PIECE=PIECE, BLOCK=BLOCK, XP=XP,
        )  # fmt: skip
    else:
        for step in range(loops):
            at = (program * loops + step) * SUB + tl.arange(0, SUB)
            expert = tl.load(experts + at, mask=at < choices, other=-1).to(tl.int32)
            inside = (expert >= 0) & (expert < X)
            first = tl.load(begins + expert, mask=inside, other=0)
            first += tl.load(tallies + program * X + expert, mask=inside, other=0)
            tl.store(order + first + tl.load(places + at, mask=inside, other=0), at, mask=inside)


@triton.jit
def announce(table, words, ready, epochs, due, owners, X, blocks, heap, XP: tl.constexpr):
    """One program, instead of counting: this rank comes to another exchange of the rows that `table` knows."""
    _clear(words, blocks)
    me, ranks = my_rank(heap), world(heap)
    epoch = tl.load(epochs) + 1
    tl.debug_barrier()
    tl.store(epochs, epoch)
    ids = tl.arange(0, XP)
    kept = tl.load(table + KEPT * X + ids, mask=ids < X, other=0)
    _owe(kept, due, owners, X, ranks, XP)
    for step in range(ranks):
        signal(ready + me, epoch, (me + 1 + step) % ranks, heap)


@triton.jit
def _clear(words, blocks):
    """Words of this rank alone: three queues, then how many tiles of each block are made."""
    for first in range(0, blocks + 3, 256):
        at = first + tl.arange(0, 256)
        tl.store(words + at, tl.zeros([256], tl.int32), mask=at < blocks + 3)


@triton.jit
def _owe(kept, due, owners, X, ranks, XP: tl.constexpr):
    """Adds to how many rows each owner has to give back since the words were made."""
    ids = tl.arange(0, XP)
    owner = tl.load(owners + ids, mask=ids < X, other=-1)
    for rank in range(ranks):
        more = tl.sum(tl.where(owner == rank, kept, 0), axis=0)
        before = tl.load(due + rank)
        tl.debug_barrier()
        tl.store(due + rank, before + more)


@triton.jit
def _plan(
    begins, table, counts, ready, epochs, due, owners, origins, sequence, X, capacity, heap,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, XP: tl.constexpr,
):  # fmt: skip
    me, ranks = my_rank(heap), world(heap)
    epoch = tl.load(epochs)
    for rank in range(ranks):
        wait_until(ready + rank, epoch, rank, heap, "expert_counts")
    ids = tl.arange(0, XP)
    here = ids < X
    theirs = counts + (epoch & 1) * ranks * X + ids
    rows, before, mine = tl.zeros([XP], tl.int32), tl.zeros([XP], tl.int32), tl.zeros([XP], tl.int32)
    for rank in range(ranks):
        count = tl.load(theirs + rank * X, mask=here, other=0)
        rows += count
        before += tl.where(rank < me, count, 0)
        mine += tl.where(rank == me, count, 0)
    padded = tl.cdiv(rows, BLOCK) * BLOCK
    ahead = tl.cumsum(padded, axis=0) - padded  # of all experts; those of other owners are taken off
    tl.store(table + START * X + ids, ahead, mask=here)
    tl.debug_barrier()
    origin = tl.load(origins + ids, mask=here, other=0)
    start = ahead - tl.load(table + START * X + origin, mask=here, other=0)
    base = start + before
    wanted = tl.max(tl.where(here, start + padded, 0), axis=0)
    fits = wanted <= capacity
    kept = tl.where(fits, mine, 0)
    pieces = tl.where(kept > 0, (base + kept - 1) // PIECE - base // PIECE + 1, 0)
    tl.store(table + ITEMS * X + ids, pieces, mask=here)
    tl.debug_barrier()
    sent = tl.load(table + ITEMS * X + tl.load(sequence + ids, mask=here, other=0), mask=here, other=0)
    tl.debug_barrier()
    tl.store(table + START * X + ids, start, mask=here)
    tl.store(table + BASE * X + ids, base, mask=here)
    tl.store(table + KEPT * X + ids, kept, mask=here)
    tl.store(table + ITEMS * X + ids, tl.cumsum(sent, axis=0), mask=here)
    tl.store(table + END * X + ids, start + rows, mask=here)
    tl.store(table + BEGIN * X + ids, tl.load(begins + ids, mask=here, other=0), mask=here)
    region = start
    for rank in range(ranks):
        tl.store(table + (REGION + rank) * X + ids, region, mask=here)
        region += tl.load(theirs + rank * X, mask=here, other=0)
    tl.store(table + (REGION + ranks) * X + ids, region, mask=here)
    owner = tl.load(owners + ids, mask=here, other=-1)
    held = tl.sum(tl.where(owner == me, padded, 0), axis=0)
    totals = table + (REGION + ranks + 1) * X
    tl.store(totals, tl.sum(pieces, axis=0))
    tl.store(totals + 1, tl.where(fits, held // BLOCK, 0))
    tl.store(totals + 2, wanted)
    _owe(kept, due, owners, X, ranks, XP)
