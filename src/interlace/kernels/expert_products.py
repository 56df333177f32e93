"""The experts' products, tile by tile as their rows arrive, and the way back of what they make.

Over the slots of `expert_route`, for the rows of each expert, with F.silu as silu:

    send_and_open       g = x @ gate.T, u = x @ up.T, h = silu(g) * u                  while x arrives
    multiply_and_return returned = h @ down.T            or, backward, dg @ gate + du @ up; while it leaves
    send_and_close      t = dy @ down; share = sum(t * h); from w * t the gradients of g and u; w * h   while dy arrives
    weight_gradient     sum over an expert's rows of a.T @ b

The gradient of a routing weight, <dy, h @ down.T>, is taken as <dy @ down, h>: then what the experts made is kept by
nobody and crosses once.  Tiles come from a queue; a few programs move rows first (sending) or instead (returning) and
a tile waits for its own rows alone.  Sums in fp32, one rounding; the order of tiles changes no number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.expert_route import END, REGION, START
from interlace.kernels.expert_rows import await_rows, clear_ends, expert_of, return_rows, send_rows
from interlace.kernels.tile import POINTERS, load_factor, place, store_rows
from interlace.symmetric.device import admit_descriptors, my_rank, signal, world

_POINTERS: tl.constexpr = tl.constexpr(POINTERS)


@triton.jit
def _locate(tile, table, first_expert, L, X, columns, BM: tl.constexpr, GROUP: tl.constexpr, LP: tl.constexpr):
    """Number of a tile -> its expert, first slot, the end of the expert's rows, and its block column."""
    expert = expert_of(tile // columns * BM, table, first_expert, L, X, LP)
    start, end = tl.load(table + START * X + expert), tl.load(table + END * X + expert)
    down, across = place(tile - start // BM * columns, tl.cdiv(end - start, BM), columns, GROUP)
    return expert, start + down * BM, end, across


@triton.jit
def _add_product(
    total, a, b, row, last, a_start, column, N, b_start, K, a_row, a_column, b_row, b_column,
    A: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """total + rows from `row` of a [.. a_start + K] times rows from `column` of b [N b_start + K], transposed."""
    for step in range(tl.cdiv(K, BK)):
        at = step * BK
        left = load_factor(a, row, last, a_start + at, a_start + K, a_row, a_column, A, BM, BK)
        right = load_factor(b, column, N, b_start + at, b_start + K, b_row, b_column, B, BN, BK)
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit
def send_and_open(
    x, order, slots, choices, arrived, ready, epochs, table, owners, sequence, queue,
    rows, gate, up, gates, ups, hidden, k, D, F, X, first_expert, L, heap,
    A: tl.constexpr, B: tl.constexpr, KEPT: tl.constexpr, SENDERS: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, XP: tl.constexpr, LP: tl.constexpr, WP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """rows: the slots again, as the product addresses them.  KEPT: gates and ups are stored for backward."""
    epoch = tl.load(epochs)
    if tl.program_id(0) < SENDERS:
        send_rows(
            x, x, order, slots, choices, choices, arrived, ready, table, owners, sequence, epoch, k, D, X,
            tl.program_id(0), SENDERS, heap,
            WEIGHTED=False, PIECE=PIECE, ROWS=ROWS, COLUMNS=COLUMNS, XP=XP,
        )  # fmt: skip
    columns = tl.cdiv(F, BN)
    total = tl.load(table + (REGION + world(heap) + 1) * X + 1) * columns
    tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    while tile < total:
        expert, row, end, across = _locate(tile, table, first_expert, L, X, columns, BM, GROUP, LP)
        await_rows(arrived, table, expert, row, end, epoch, X, heap, LENGTH=BM, PIECE=PIECE, WP=WP)
        if A != _POINTERS:
            admit_descriptors()
        top, column = (expert - first_expert) * F, across * BN
        g, u = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for step in range(tl.cdiv(D, BK)):
            at = step * BK
            left = load_factor(rows, row, end, at, D, D, 1, A, BM, BK)
            one = load_factor(gate, top + column, top + F, at, D, D, 1, B, BN, BK)
            two = load_factor(up, top + column, top + F, at, D, D, 1, B, BN, BK)
            if WIDE:
                left, one, two = left.to(tl.float32), one.to(tl.float32), two.to(tl.float32)
            g = tl.dot(left, tl.trans(one), g, input_precision="ieee")
            u = tl.dot(left, tl.trans(two), u, input_precision="ieee")
        gated, upped = g.to(hidden.dtype.element_ty), u.to(hidden.dtype.element_ty)
        if KEPT:
            store_rows(gates, gated, row, end, column, F, F, 1, BM, BN)
            store_rows(ups, upped, row, end, column, F, F, 1, BM, BN)
        g, u = gated.to(tl.float32), upped.to(tl.float32)
        made = (g / (1.0 + tl.exp(-g)) * u).to(hidden.dtype.element_ty)
        store_rows(hidden, made, row, end, column, F, F, 1, BM, BN)
        tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")


@triton.jit
def multiply_and_return(
    a, b, a2, b2, made, partial, returned, shares, choices, done, queue, returns, back, table,
    K, D, X, b_row, b_column, b_rows, b_inner, partials, capacity, first_expert, L, heap,
    A: tl.constexpr, B: tl.constexpr, TWO: tl.constexpr, RETURNED: tl.constexpr, RETURNERS: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """made [slots D] = a [slots K] @ b.T, with TWO plus a2 @ b2.T; rows go back to where their tokens are.

    Expert e's part of b begins at row e * b_rows and column e * b_inner.  Rows are returned with RETURNED alone; the
    last RETURNERS programs do only that.  With TWO a number a row goes along: the sum of its `partials` in partial
    [.. capacity].
    """
    me = my_rank(heap)
    columns = tl.cdiv(D, BN)
    if tl.program_id(0) < tl.num_programs(0) - RETURNERS:
        total = tl.load(table + (REGION + world(heap) + 1) * X + 1) * columns
        tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
        while tile < total:
            expert, row, end, across = _locate(tile, table, first_expert, L, X, columns, BM, GROUP, LP)
            local, column = expert - first_expert, across * BN
            top, inner = local * b_rows, local * b_inner
            sums = tl.zeros([BM, BN], tl.float32)
            sums = _add_product(
                sums, a, b, row, end, 0, top + column, top + D, inner, K, K, 1, b_row, b_column, A, B, BM, BN, BK, WIDE
            )
            if TWO:
                sums = _add_product(
                    sums, a2, b2, row, end, 0, top + column, top + D, inner, K, K, 1, b_row, b_column, A, B, BM, BN, BK,
                    WIDE,
                )  # fmt: skip
            store_rows(made, sums.to(made.dtype.element_ty), row, end, column, D, D, 1, BM, BN)
            signal(done + row // BM, 1, me, heap, ADD=True)
            tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    if RETURNED:
        return_rows(
            made, partial, returned, shares, choices, done, returns, back, table, columns, partials, D, X, capacity,
            first_expert, L, heap,
            AWAITED=True, SHARED=TWO, PIECE=PIECE, BLOCK=BM, ROWS=ROWS, COLUMNS=COLUMNS, LP=LP,
        )  # fmt: skip


@triton.jit
def _close_part(t, w_BM, gates, ups, dgates, dups, weighted, row, end, column, F, BM: tl.constexpr, BN: tl.constexpr):
    """Stores what follows from a tile of dy @ down; the sums over its columns of t * h."""
    slot, inner = row + tl.arange(0, BM), column + tl.arange(0, BN)
    at = slot.to(tl.int64)[:, None] * F + inner[None, :]
    mask = (slot < end)[:, None] & (inner < F)[None, :]
    g = tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(ups + at, mask=mask, other=0.0).to(tl.float32)
    t, w = tl.where(mask, t, 0.0), w_BM[:, None]
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    h = g * sigmoid * u
    share = tl.sum(t * h, axis=1)
    kind: tl.constexpr = dgates.dtype.element_ty
    store_rows(weighted, (w * h).to(kind), row, row + BM, column, F, F, 1, BM, BN)
    t *= w
    store_rows(dups, (t * g * sigmoid).to(kind), row, row + BM, column, F, F, 1, BM, BN)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    store_rows(dgates, (t * u * slope).to(kind), row, row + BM, column, F, F, 1, BM, BN)
    return share


@triton.jit
def send_and_close(
    dy, weights, order, slots, choices, factors, arrived, ready, epochs, table, owners, sequence, queue,
    rows, down, gates, ups, dgates, dups, weighted, partial, k, D, F, X, b_row, b_column, capacity, first_expert, L,
    heap,
    A: tl.constexpr, B: tl.constexpr, SENDERS: tl.constexpr, CLEARED: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, XP: tl.constexpr, LP: tl.constexpr, WP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sends rows of dy with their weights; stores gradients of gates and ups, and h times the weight, [slots F].

    partial: fp32 [block columns, capacity], each tile's part of the gradient of a row's weight.  Behind an expert's
    last row all three have zeros, and with CLEARED the slots too.
    """
    epoch = tl.load(epochs)
    if tl.program_id(0) < SENDERS:
        send_rows(
            dy, weights, order, slots, choices, factors, arrived, ready, table, owners, sequence, epoch, k, D, X,
            tl.program_id(0), SENDERS, heap,
            WEIGHTED=True, PIECE=PIECE, ROWS=ROWS, COLUMNS=COLUMNS, XP=XP,
        )  # fmt: skip
        if CLEARED:
            clear_ends(slots, table, D, first_expert, L, X, tl.program_id(0), SENDERS, BLOCK=BM, COLUMNS=COLUMNS)
    columns = tl.cdiv(F, BN)
    total = tl.load(table + (REGION + world(heap) + 1) * X + 1) * columns
    tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    while tile < total:
        expert, row, end, across = _locate(tile, table, first_expert, L, X, columns, BM, GROUP, LP)
        await_rows(arrived, table, expert, row, end, epoch, X, heap, LENGTH=BM, PIECE=PIECE, WP=WP)
        if A != _POINTERS:
            admit_descriptors()
        column = across * BN
        t = tl.zeros([BM, BN], tl.float32)
        t = _add_product(
            t, rows, down, row, end, 0, column, F, (expert - first_expert) * D, D, D, 1, b_row, b_column,
            A, B, BM, BN, BK, WIDE,
        )  # fmt: skip
        slot = row + tl.arange(0, BM)
        w = tl.load(factors + slot, mask=slot < end, other=0.0)
        # In halves: a thread has no room for six of these tiles.
        one, two = tl.split(tl.permute(tl.reshape(t, (BM, 2, BN // 2)), (0, 2, 1)))
        share = _close_part(one, w, gates, ups, dgates, dups, weighted, row, end, column, F, BM, BN // 2)
        share += _close_part(two, w, gates, ups, dgates, dups, weighted, row, end, column + BN // 2, F, BM, BN // 2)
        tl.store(partial + across * capacity + slot, share, mask=slot < end)
        tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")


@triton.jit
def weight_gradient(
    a, b, out, table, M, N, a_stride, b_stride, X, first_expert, columns,
    A: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """out [experts M N] = sum over an expert's rows r of a [r, M] * b [r, N]; zeros where it has none.  A program a
    tile; with descriptors rows up to the next multiple of BK are read and have to be zero."""
    local = tl.program_id(1)
    down, across = place(tl.program_id(0), tl.num_programs(0) // columns, columns, GROUP)
    start = tl.load(table + START * X + first_expert + local)
    rows = tl.load(table + END * X + first_expert + local) - start
    row, column = down * BM, across * BN
    sums = tl.zeros([BM, BN], tl.float32)
    sums = _add_product(
        sums, a, b, row, M, start, column, N, start, rows, 1, a_stride, 1, b_stride, A, B, BM, BN, BK, WIDE
    )
    into = out + local.to(tl.int64) * M * N
    store_rows(into, sums.to(out.dtype.element_ty), row, M, column, N, N, 1, BM, BN)
