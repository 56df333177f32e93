"""All rows times a weight, while the rows still travel: out_i = all_gather(x) @ weight_i.T + bias_i.

    plain        the library's all-gather, then the product; of a long one the own rows are multiplied meanwhile
    chunks       copy engines push; the library's product of each chunk as it lands
    chained      the same in slices of K, added up in fp32: every product has all the peers' rows
    persistent   copy engines push; one Triton product that begins with the own rows and waits for each chunk
    put          one kernel stores the own rows to all peers, then the library's product (`kernels/put.py`)
    push         one kernel for few rows: its first programs store the own rows to all peers, then all multiply

How rows travel is told in `kernels/arrival.py`.  A rank multiplies its own rows, in place, while the first chunk is on
its way, and then chunks in the order in which they come.  Sums are in fp32 and rounded once, whatever the chunks.

Every call waits for all of its peers, also where it has nothing to multiply, and ends when its own rows have left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interlace.collectives import Group, all_gather, balanced
from interlace.kernels import workspace
from interlace.kernels.arrival import Arrival, Chunks, Slices
from interlace.kernels.candidate import Candidate, Options, Problem, Tile, pays_to_cut, register
from interlace.kernels.gather_matmul import fill
from interlace.kernels.put import cannot_put, put_rows
from interlace.kernels.tile import (
    DTYPES,
    POINTERS,
    ROWS,
    Operand,
    default_tile,
    is_interpreted,
    load_bias,
    multiply,
    onward,
    operand,
    place,
    store_rows,
    store_tile,
    widens,
)
from interlace.layout import split
from interlace.plan.overlap import FEW_ROWS, SLOT, few_rows
from interlace.symmetric.device import admit_descriptors, my_rank, next_epoch, put, signal, wait_until, world

OP = "all_gather_matmul"
PUSHERS = 64  # programs that store, at most
BLOCK = 2048  # elements that one of them moves at a time
NO_OPTIONS = Options()
_ROWS: tl.constexpr = tl.constexpr(ROWS)
_POINTERS: tl.constexpr = tl.constexpr(POINTERS)
_PUSHERS: tl.constexpr = tl.constexpr(PUSHERS)
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


# --- candidates ------------------------------------------------------------------------------------------------------


def plain(
    x_mK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int,
    out: Sequence[Tensor],
    gathered: Tensor | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    """x_mK: this rank's of `count` rows; weights: [N_i K]; out: [count N_i]; gathered: [count K], filled if given."""
    K = x_mK.shape[1]
    start, stop = split(count, group.size, group.rank)
    whole = x_mK.new_empty(count, K) if gathered is None else gathered
    sizes = [rows * K for rows in balanced(count, group.size)]
    own = x_mK.contiguous().view(-1)
    if not pays_to_cut(2.0 * x_mK.numel() * sum(len(weight) for weight in weights), x_mK.device):
        all_gather(own, group.in_order(), sizes=sizes, out=whole.view(-1), name="gather for matmul").wait()
        fill(whole, weights, biases, out, 0, count)
        return
    arriving = all_gather(own, group, sizes=sizes, out=whole.view(-1), name="gather for matmul")
    fill(x_mK, weights, biases, out, start, stop)
    arriving.wait()
    for first, last in ((0, start), (stop, count)):
        fill(whole[first:last], weights, biases, out, first, last)


def chunks(
    x_mK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int,
    out: Sequence[Tensor],
    gathered: Tensor | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    arrival = _begin(x_mK, group, count, options, gathered)
    start, stop = split(count, group.size, group.rank)
    fill(x_mK, weights, biases, out, start, stop)
    for chunk in arrival.arriving():
        fill(chunk.rows, weights, biases, out, chunk.first, chunk.last)
    arrival.end()


def chained(
    x_mK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int,
    out: Sequence[Tensor],
    gathered: Tensor | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    """options.chunks: the number of slices."""
    plan = Slices(count, x_mK.shape[1], x_mK.dtype, group.size, options.chunks or 2)
    arrival = Arrival(plan.pack(x_mK), group, OP, plan)
    start, stop = split(count, group.size, group.rank)
    others = count - (stop - start)
    fill(x_mK, weights, biases, out, start, stop)
    sums = [x_mK.new_empty(others, len(weight), dtype=torch.float32) for weight in weights]
    if gathered is not None:
        gathered[start:stop].copy_(x_mK)
    for number in range(plan.slices):
        first, last = plan.columns(number)
        for step in range(1, group.size):
            arrival.wait((group.rank - step) % group.size, number)
        rows = arrival.view(plan.offset(number), (others, last - first))
        for total, weight in zip(sums, weights, strict=True):
            _add(total, rows, weight[:, first:last], anew=number == 0)
        if gathered is not None:
            gathered[:start, first:last].copy_(rows[:start])
            gathered[stop:, first:last].copy_(rows[start:])
    for y, total, bias in zip(out, sums, biases, strict=True):
        if bias is not None:
            total += bias
        y[:start].copy_(total[:start])
        y[stop:].copy_(total[start:])
    arrival.end()


def _add(total_RN: Tensor, x_RK: Tensor, weight_NK: Tensor, anew: bool) -> None:
    """total += x @ weight.T, or total = ..., with fp32 sums of what may be 16-bit factors."""
    if x_RK.dtype != torch.float32 and x_RK.device.type != "cuda":
        x_RK, weight_NK = x_RK.float(), weight_NK.float()
    wide: Any = {} if x_RK.dtype == torch.float32 else {"out_dtype": torch.float32}
    if anew:
        torch.mm(x_RK, weight_NK.t(), out=total_RN, **wide)
    else:
        torch.addmm(total_RN, x_RK, weight_NK.t(), out=total_RN, **wide)


def persistent(
    x_mK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int,
    out: Sequence[Tensor],
    gathered: Tensor | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    arrival = _begin(x_mK, group, count, options, gathered)
    order = sorted(range(len(weights)), key=lambda i: -len(weights[i]))  # the longest meets the waits
    for number, i in enumerate(order):
        if len(weights[i]) or not number:  # one launch at least: it waits for the peers
            _launch(arrival, weights[i], biases[i], out[i], options.tile)
    arrival.end()


def _begin(x_mK: Tensor, group: Group, count: int, options: Options, gathered: Tensor | None) -> Arrival:
    plan = Chunks(count, x_mK.shape[1], x_mK.dtype, group.size, options.chunks or 1)
    arrival = Arrival(x_mK.contiguous(), group, OP, plan)
    if gathered is not None:
        arrival.keep(gathered)
    return arrival


# --- one kernel that waits -------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count", "epoch", "stride", "chunks", "slot_rows"])
def _persistent(
    x, slots, b, own_c, c, bias, out, arrived, epoch, stride, count, N, K, chunks, slot_rows,
    x_row, x_column, slot_row, b_row, b_column, out_row, out_column, heap,
    X: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, IN_MEMORY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    me, ranks, programs = my_rank(heap), world(heap), tl.num_programs(0)
    now = tl.load(epoch) if IN_MEMORY else epoch
    columns, base, more = tl.cdiv(N, BN), count // ranks, count % ranks

    # The own rows, read where they are.
    first, rows = me * base + tl.minimum(me, more), base + (me < more).to(tl.int32)
    blocks = tl.cdiv(rows, BM)
    at = tl.program_id(0)
    for tile in tl.range(at, blocks * columns, programs, flatten=FLATTEN):
        down, across = place(tile, blocks, columns, GROUP)
        row, column = down * BM, across * BN
        total = multiply(x, b, row, rows, column, N, K, x_row, x_column, b_row, b_column, X, B, BM, BN, BK, WIDE)
        if BIAS:
            total += load_bias(bias, column, N, BN)
        own = out + first.to(tl.int64) * out_row
        store_tile(own_c, own, total, row, rows, column, N, out_row, out_column, C, BM, BN, PARTS)
    at = onward(at, blocks * columns, programs)

    # Chunk by chunk in the order of arrival.
    for slot in range(0, (ranks - 1) * chunks):
        source, chunk = (me + ranks - 1 - slot // chunks) % ranks, slot % chunks
        first, rows = source * base + tl.minimum(source, more), base + (source < more).to(tl.int32)
        first += chunk * (rows // chunks) + tl.minimum(chunk, rows % chunks)
        rows = rows // chunks + (chunk < rows % chunks).to(tl.int32)
        full = rows // BM if C == _ROWS else tl.cdiv(rows, BM)
        tiles = tl.cdiv(rows, BM) * columns
        if (at < tiles) | (tl.program_id(0) == 0):  # program 0 waits for all, so that the call does
            wait_until(arrived + source * stride + chunk, now, source, heap, "gather_matmul")
            if A == _ROWS:
                admit_descriptors()
        top, left = slot * slot_rows, out + first.to(tl.int64) * out_row
        for tile in tl.range(at, full * columns, programs, flatten=FLATTEN):
            down, across = place(tile, full, columns, GROUP)
            row, column = down * BM, across * BN
            total = multiply(
                slots, b, top + row, top + rows, column, N, K, slot_row, 1, b_row, b_column, A, B, BM, BN, BK, WIDE
            )
            if BIAS:
                total += load_bias(bias, column, N, BN)
            store_tile(c, out, total, first + row, first + rows, column, N, out_row, out_column, C, BM, BN, PARTS)
        if C == _ROWS:
            # The last, short block row: descriptors would store into the next chunk's rows.
            for tile in range(onward(at, full * columns, programs) + full * columns, tiles, programs):
                row, column = full * BM, (tile - full * columns) * BN
                total = multiply(
                    slots, b, top + row, top + rows, column, N, K, slot_row, 1, b_row, b_column, A, B, BM, BN, BK, WIDE
                )
                if BIAS:
                    total += load_bias(bias, column, N, BN)
                rounded = total.to(out.dtype.element_ty)
                store_rows(left, rounded, row, rows, column, N, out_row, out_column, BM, BN)
        at = onward(at, tiles, programs)


def _launch(arrival: Arrival, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor, tile: Tile | None) -> None:
    """One weight's product."""
    space, plan, turn = arrival.space, arrival.plan, arrival.turn
    assert isinstance(plan, Chunks)
    x_mK, N, K = arrival.x_mK, len(weight_NK), plan.K
    tile = tile or default_tile(Problem(OP, plan.count, N, K, plan.dtype, plan.ranks, bias_N is not None))
    assert SLOT % tile.block_m == 0, tile
    start, stop = split(plan.count, plan.ranks, space.rank)
    a_block, c_block = (tile.block_m, tile.block_k), (tile.block_m, tile.block_n // tile.parts)
    a, tiles = arrival.route.made.get((tile, N), (None, 0))
    if a is None:
        whole = arrival.view(0, (plan.slots * plan.slot, K)) if plan.slots else x_mK
        pieces = [stop - start, *(chunk.last - chunk.first for chunk in arrival.route.chunks)]
        tiles = sum(triton.cdiv(rows, tile.block_m) for rows in pieces) * triton.cdiv(N, tile.block_n)
        a = operand(whole, a_block, ROWS)
        arrival.route.made[tile, N] = a, tiles
    x = operand(x_mK, a_block)
    b = operand(weight_NK, (tile.block_n, tile.block_k))
    own_c, c = operand(out_MN[start:stop], c_block, ROWS), operand(out_MN, c_block, ROWS)
    if c.how == POINTERS or own_c.how == POINTERS:  # one of them has no rows: all by pointers
        own_c = c = Operand(out_MN, POINTERS, out_MN.stride(0), out_MN.stride(1))
    kernel: Any = _persistent[(space.places(tiles),)]
    kernel(
        x.argument, a.argument, b.argument, own_c.argument, c.argument, bias_N, out_MN,
        turn.words("arrived"), turn.number, arrival.stride, plan.count, N, K, plan.chunks, plan.slot,
        x.row, x.column, K, b.row, b.column, out_MN.stride(0), out_MN.stride(1), space.heap.context,
        X=x.how, A=a.how, B=b.how, C=c.how, BIAS=bias_N is not None, IN_MEMORY=turn.in_memory,
        BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group,
        FLATTEN=tile.flatten, PARTS=tile.parts, WIDE=widens(plan.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


# --- one kernel that also sends --------------------------------------------------------------------------------------


def push(
    x_mK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int,
    out: Sequence[Tensor],
    gathered: Tensor | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    group.meter.count("all_gather", group.axis, x_mK.numel() * x_mK.element_size() * (group.size - 1))
    space, K, x_mK = workspace.of(group, OP), x_mK.shape[1], x_mK.contiguous()
    space.require(*few_rows(count, K, x_mK.element_size(), group.size, space.places(1 << 30)))
    space.follow()
    for number, (weight, bias, y) in enumerate(zip(weights, biases, out, strict=True)):
        if len(weight) or not number:
            _launch_push(space, x_mK, weight, bias, y, count, options.tile, None if number else gathered, not number)


@triton.jit(do_not_specialize=["count", "origin", "share"])
def _push(
    x, slots, b, c, bias, out, gathered, counts, calls, count, N, K, half, origin, share,
    b_row, b_column, out_row, out_column, heap,
    B: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """slots: [2 halves of `half` elements]; a call uses one, all rows in order.  share: programs that store."""
    me, ranks, program, programs = my_rank(heap), world(heap), tl.program_id(0), tl.num_programs(0)
    call = next_epoch(calls) if FIRST else tl.load(calls + program)
    rows = slots + (call & 1).to(tl.int64) * half
    if FIRST:
        mine = count // ranks + (me < count % ranks).to(tl.int32)
        first = me * (count // ranks) + tl.minimum(me, count % ranks)
        part = tl.cdiv(tl.cdiv(mine * K, share), _BLOCK) * _BLOCK
        begin = program * part
        length = tl.maximum(tl.minimum(part, mine * K - begin), 0)
        if program < share:
            for step in range(0, ranks):
                peer = (me + step) % ranks
                put(rows + first * K + begin, x + begin, length, peer, heap, _BLOCK)
                signal(counts + me, _PUSHERS // share, peer, heap, ADD=True)
        for step in range(0, ranks):
            peer = (me + ranks - step) % ranks
            wait_until(counts + peer, call * _PUSHERS + origin, peer, heap, "push_matmul")
        if KEEP:
            piece = tl.cdiv(tl.cdiv(count * K, programs), _BLOCK) * _BLOCK
            begin = program * piece
            put(gathered + begin, rows + begin, tl.maximum(tl.minimum(piece, count * K - begin), 0), me, heap, _BLOCK)
    blocks, columns = tl.cdiv(count, BM), tl.cdiv(N, BN)
    for tile in tl.range(program, blocks * columns, programs, flatten=FLATTEN):
        down, across = place(tile, blocks, columns, GROUP)
        row, column = down * BM, across * BN
        total = multiply(rows, b, row, count, column, N, K, K, 1, b_row, b_column, _POINTERS, B, BM, BN, BK, WIDE)
        if BIAS:
            total += load_bias(bias, column, N, BN)
        store_tile(c, out, total, row, count, column, N, out_row, out_column, C, BM, BN, PARTS)


def _launch_push(
    space: workspace.Workspace, x_mK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor, count: int,
    tile: Tile | None, gathered: Tensor | None, is_first: bool,
) -> None:  # fmt: skip
    N, K, dtype = len(weight_NK), x_mK.shape[1], x_mK.dtype
    tile = tile or default_tile(Problem(OP, count, N, K, dtype, space.size, bias_N is not None))
    b = operand(weight_NK, (tile.block_n, tile.block_k))
    c = operand(out_MN, (tile.block_m, tile.block_n // tile.parts), ROWS)
    places = space.places(1 << 30)  # always as many: each counts the calls
    most = 1 if is_interpreted() else min(PUSHERS, places)  # all wait for those, and there run one after another
    share = 1 << (min(most, max(1, count * K // space.size // BLOCK)).bit_length() - 1)
    origin = space.heap.origin * (1 - PUSHERS)
    half = space.tensors["few"].nbytes // 2 // x_mK.element_size()
    slots = space.buffer("few", None, (2 * half,), dtype)
    kernel: Any = _push[(places,)]
    kernel(
        x_mK, slots, b.argument, c.argument, bias_N, out_MN, gathered, space.tensors["counts"].local,
        space.tensors["calls"].local, count, N, K, half, (origin + (1 << 31)) % (1 << 32) - (1 << 31), share,
        b.row, b.column, out_MN.stride(0), out_MN.stride(1), space.heap.context,
        B=b.how, C=c.how, BIAS=bias_N is not None, KEEP=gathered is not None, FIRST=is_first,
        BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group,
        FLATTEN=tile.flatten, PARTS=tile.parts, WIDE=widens(dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


# --- one kernel before the product -----------------------------------------------------------------------------------


def put_first(
    x_mK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    count: int,
    out: Sequence[Tensor],
    gathered: Tensor | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    whole = x_mK.new_empty(count, x_mK.shape[1]) if gathered is None else gathered
    put_rows(x_mK, group, count, whole)
    fill(whole, weights, biases, out, 0, count)


# --- what can run ----------------------------------------------------------------------------------------------------


def _needs_symmetric(problem: Problem, device: torch.device) -> str | None:
    if device.type == "cuda" or (device.type == "cpu" and is_interpreted()):
        return None
    return f"kernels do not run on {device.type}; on a CPU set TRITON_INTERPRET=1 before the start"


def _needs_kernel(problem: Problem, device: torch.device) -> str | None:
    if problem.dtype not in DTYPES:
        return f"no kernel for {problem.dtype}"
    return _needs_symmetric(problem, device)


def _needs_few(problem: Problem, device: torch.device) -> str | None:
    nbytes = problem.M * problem.K * problem.dtype.itemsize
    if nbytes > FEW_ROWS:
        return f"{nbytes} bytes of rows, more than the {FEW_ROWS} that programs send themselves"
    return _needs_kernel(problem, device)


def _always(problem: Problem, device: torch.device) -> str | None:
    return None


def _among_several(run: Callable[..., None]) -> Callable[..., None]:
    """A group of one has nothing to gather."""

    @functools.wraps(run)
    def either(
        x_mK: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        group: Group,
        count: int,
        out: Sequence[Tensor],
        gathered: Tensor | None = None,
        options: Options = NO_OPTIONS,
    ) -> None:
        (plain if group.size == 1 else run)(x_mK, weights, biases, group, count, out, gathered, options)

    return either


register(Candidate("plain", OP, False, _always, plain))
register(Candidate("chunks", OP, False, _needs_symmetric, _among_several(chunks), cuts=True))
register(Candidate("chained", OP, False, _needs_kernel, _among_several(chained)))
register(Candidate("persistent", OP, True, _needs_kernel, _among_several(persistent), cuts=True))
register(Candidate("put", OP, False, cannot_put, put_first))
register(Candidate("push", OP, True, _needs_few, _among_several(push)))
