"""The product that all fused kernels are made of: x_MK @ weight_NK.T + bias_N, tile by tile, in Triton.

`matmul(x, weight, bias)` equals `torch.nn.functional.linear`: sums in fp32, one rounding.  Its pieces are device
functions, so that a kernel can put a wait before a tile, send one that is done, or order them its own way:

    place       number of a tile -> its block row and column, in groups that share columns
    multiply    the sum over K of one tile, fp32; `multiply_steps` of a run of its steps
    load_bias, store_tile
                what is added, and the rounding to the output, rows past the end left alone

A program takes tiles number p, p + programs, ... (persistent), so that the loads of a tile begin under the stores of
the last one.  On a GPU factors are read and tiles written by descriptors (TMA) where rows begin at multiples of 16
bytes, and by pointers elsewhere; `operand` decides.  A factor may be transposed or have any strides.

Where the last round of tiles leaves multiprocessors idle, `Tile.split` cuts its tiles along K (`take_shares`): pieces
lay down their fp32 sums, and whichever program is the last at a tile adds them up, always in the order of K, so that
calls repeat to the bit.  Nobody waits for anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from interlace.kernels.candidate import Problem, Tile
from interlace.plan.overlap import default_blocks

POINTERS, ROWS, COLUMNS = 0, 1, 2  # how a matrix is addressed: by pointers, by descriptors of it or of its transpose
_POINTERS: tl.constexpr = tl.constexpr(POINTERS)
_ROWS: tl.constexpr = tl.constexpr(ROWS)
_COLUMNS: tl.constexpr = tl.constexpr(COLUMNS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = 1 << 31  # descriptors count in int32
MOST_PIECES = 16  # of a tile that is cut along K
PIECE = 128  # columns of K; see `splits`
BY_SIZE = {  # of 16-bit numbers
    (tile.block_m, tile.block_n): tile
    for tile in (
        Tile(16, 32, 128, 8, 4, 6, False),
        Tile(16, 64, 128, 8, 4, 4, False),
        Tile(16, 128, 128, 8, 4, 4, False),
        Tile(64, 32, 128, 8, 4, 5, False),
        Tile(64, 64, 128, 8, 4, 4, False),
        Tile(64, 128, 128, 8, 4, 4, False),
        Tile(128, 64, 64, 8, 4, 5),
        Tile(128, 256, 64, 8, 8, 4, True, 2),
        Tile(128, 128, 64, 8, 8, 5),
    )
}


# --- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def place(tile, rows, columns, GROUP: tl.constexpr):
    """Tile number -> (block row, block column) of `rows` x `columns`: GROUP block rows at a time, down each column."""
    together = GROUP * columns
    first = tile // together * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = tile % together
    return first + within % height, within // height


@triton.jit
def onward(at, tiles, programs):
    """A program's first tile of the following piece, when it took at, at + programs, ... of `tiles` tiles."""
    return at + tl.cdiv(tl.maximum(tiles - at, 0), programs) * programs - tiles


@triton.jit
def load_factor(x, row, last, start, K, x_row, x_column, HOW: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr):
    """[BLOCK BK] of x [.. K] from row `row`, column `start` on; 0 from row `last` and column K on (with pointers)."""
    if HOW == _ROWS:
        return x.load([row, start])
    elif HOW == _COLUMNS:
        return tl.trans(x.load([start, row]))
    else:
        rows, inner = row + tl.arange(0, BLOCK), start + tl.arange(0, BK)
        at = rows[:, None].to(tl.int64) * x_row + inner[None, :].to(tl.int64) * x_column
        return tl.load(x + at, mask=(rows < last)[:, None] & (inner < K)[None, :], other=0.0)


@triton.jit
def multiply(
    a, b, row, last, column, N, K, a_row, a_column, b_row, b_column,
    A: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """fp32 [BM BN]: rows from `row` (to `last`) of a [.. K] times rows from `column` (to N) of b [N K].

    With descriptors, rows past `last` are whatever lies there: the caller does not keep them.  WIDE: factors are made
    fp32 first, since the interpreter multiplies the bits of a bfloat16.
    """
    return multiply_steps(
        a, b, row, last, column, N, K, a_row, a_column, b_row, b_column, 0, tl.cdiv(K, BK), A, B, BM, BN, BK, WIDE
    )


@triton.jit
def multiply_steps(
    a, b, row, last, column, N, K, a_row, a_column, b_row, b_column, begin, end,
    A: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The part of `multiply` that steps `begin` to `end` of BK columns make."""
    total = tl.zeros([BM, BN], tl.float32)
    for step in range(begin, end):
        start = step * BK
        left = load_factor(a, row, last, start, K, a_row, a_column, A, BM, BK)
        right = load_factor(b, column, N, start, K, b_row, b_column, B, BN, BK)
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit
def load_bias(bias, column, N, BN: tl.constexpr):
    """fp32 [1 BN], to be added to a sum."""
    columns = column + tl.arange(0, BN)
    return tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_tile(
    c, out, total, row, last, column, N, out_row, out_column,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Rounds a tile and stores it at rows from `row` (to `last`), columns from `column` (to N).

    out: pointer; c: with C == ROWS a descriptor of the same memory in blocks [BM BN/PARTS], which stores every row of
    the tile that it has: for tiles that end before `last`, or where the descriptor ends there.  (A branch here keeps
    Triton 3.6 from flattening the loop around it.)
    """
    if PARTS == 2:
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        store_part(c, out, left, row, last, column, N, out_row, out_column, C, BM, BN // 2)
        store_part(c, out, right, row, last, column + BN // 2, N, out_row, out_column, C, BM, BN // 2)
    else:
        store_part(c, out, total, row, last, column, N, out_row, out_column, C, BM, BN)


@triton.jit
def store_part(
    c, out, total, row, last, column, N, out_row, out_column, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    rounded = total.to(out.dtype.element_ty)
    if C == _ROWS:
        c.store([row, column], rounded)
    else:
        store_rows(out, rounded, row, last, column, N, out_row, out_column, BM, BN)


@triton.jit
def store_rows(out, value, row, last, column, N, out_row, out_column, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    at = rows[:, None].to(tl.int64) * out_row + columns[None, :].to(tl.int64) * out_column
    tl.store(out + at, value, mask=(rows < last)[:, None] & (columns < N)[None, :])


# --- tiles cut along K -----------------------------------------------------------------------------------------------


@triton.jit
def take_shares(
    a, b, bias, out, sums, arrived, M, N, K, a_row, a_column, b_row, b_column, out_row, out_column, whole, shares,
    A: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, JOIN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The tiles from number `whole` on.  Their steps along K, one tile after the other, are cut into `shares` runs.

    sums: fp32 [shares + tiles, BM BN], where a share lays down what it has of a tile.  arrived: int32 [tiles] of zeros,
    and zeros again when the kernel has ended.
    """
    rows, columns, steps = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    every = (rows * columns - whole).to(tl.int64) * steps
    for share in tl.range(tl.program_id(0), shares, tl.num_programs(0)):
        begin, end = share * every // shares, (share + 1) * every // shares
        for tile in tl.range((begin // steps).to(tl.int32), tl.cdiv(end, steps).to(tl.int32)):
            base = tile * steps.to(tl.int64)
            first, stop = tl.maximum(begin - base, 0).to(tl.int32), tl.minimum(end - base, steps).to(tl.int32)
            down, across = place(whole + tile, rows, columns, GROUP)
            row, column = down * BM, across * BN
            total = multiply_steps(
                a, b, row, M, column, N, K, a_row, a_column, b_row, b_column, first, stop, A, B, BM, BN, BK, WIDE
            )
            tl.store(_sum_at(sums, share + tile, 0, BM, BM, BN), total)
            # The shares that hold the first and the last step of this tile.
            leader = (((base + 1) * shares - 1) // every).to(tl.int32)
            pieces = (((base + steps) * shares - 1) // every).to(tl.int32) - leader + 1
            tl.debug_barrier()
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                tl.debug_barrier()
                join(bias, out, sums, leader + tile, pieces, row, M, column, N, out_row, out_column, BIAS, BM, BN, JOIN)
                tl.store(arrived + tile, 0)


@triton.jit
def join(
    bias, out, sums, first, pieces, row, last, column, N, out_row, out_column,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Adds up the `pieces` of a tile that lie from place `first` on, JOIN rows at a time; rounds and stores them."""
    for below in tl.range(0, BM, JOIN):
        total = tl.zeros([JOIN, BN], tl.float32)
        for piece in tl.range(pieces, num_stages=3):
            total += tl.load(_sum_at(sums, first + piece, below, JOIN, BM, BN), cache_modifier=".cg")
        if BIAS:
            total += load_bias(bias, column, N, BN)
        rounded = total.to(out.dtype.element_ty)
        store_rows(out, rounded, row + below, last, column, N, out_row, out_column, JOIN, BN)


@triton.jit
def _sum_at(sums, place, below, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Where ROWS rows of a piece lie, from its row `below` on."""
    rows, columns = below + tl.arange(0, ROWS), tl.arange(0, BN)
    return sums + place * tl.full([1, 1], BM * BN, tl.int64) + rows[:, None] * BN + columns[None, :]


# --- the kernel ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M", "whole", "shares"])
def _matmul(
    a, b, c, bias, out, sums, arrived, M, N, K, a_row, a_column, b_row, b_column, out_row, out_column, whole, shares,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, PARTS: tl.constexpr, JOIN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """JOIN: 0 if all tiles are taken whole; sums, arrived, whole and shares are None then."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), whole if JOIN else rows * columns, tl.num_programs(0), flatten=FLATTEN):
        down, across = place(tile, rows, columns, GROUP)
        row, column = down * BM, across * BN
        total = multiply(a, b, row, M, column, N, K, a_row, a_column, b_row, b_column, A, B, BM, BN, BK, WIDE)
        if BIAS:
            total += load_bias(bias, column, N, BN)
        store_tile(c, out, total, row, M, column, N, out_row, out_column, C, BM, BN, PARTS)
    if JOIN:
        take_shares(
            a, b, bias, out, sums, arrived, M, N, K, a_row, a_column, b_row, b_column, out_row, out_column,
            whole, shares, A, B, BIAS, BM, BN, BK, GROUP, JOIN, WIDE,
        )  # fmt: skip


# --- on the host -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A matrix as a kernel is given it: `how` is POINTERS, ROWS or COLUMNS; strides are in elements."""

    argument: torch.Tensor | TensorDescriptor
    how: int
    row: int
    column: int


def operand(x_RC: torch.Tensor, block: tuple[int, int], only: int | None = None) -> Operand:
    """How a kernel addresses a matrix in blocks of [rows columns]; only=POINTERS leaves descriptors out.

    Descriptors need columns (or rows, of a transposed matrix) that lie together, starts and rows at multiples of 16
    bytes, and at least one element.
    """
    row, column = x_RC.stride()
    if only != POINTERS and _aligned(x_RC):
        return Operand(TensorDescriptor(x_RC, list(x_RC.shape), [row, 1], list(block)), ROWS, row, 1)
    if only is None and _aligned(x_RC.t()):
        turned = x_RC.t()
        made = TensorDescriptor(turned, list(turned.shape), [column, 1], [block[1], block[0]])
        return Operand(made, COLUMNS, 1, column)
    return Operand(x_RC, POINTERS, row, column)


def _aligned(x_RC: torch.Tensor) -> bool:
    row, column = x_RC.stride()
    lines_up = x_RC.data_ptr() % 16 == 0 and row * x_RC.element_size() % 16 == 0 and row >= x_RC.shape[1]
    return column == 1 and x_RC.numel() > 0 and lines_up and max(x_RC.shape) < MOST


def is_interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def widens(dtype: torch.dtype) -> bool:
    """WIDE of the kernels."""
    return is_interpreted() and dtype == torch.bfloat16


def programs(device: torch.device, tiles: int) -> int:
    """How many programs take `tiles` tiles in turn: one a multiprocessor, at most; few where they are interpreted."""
    if device.type == "cuda":
        return max(1, min(tiles, torch.cuda.get_device_properties(device).multi_processor_count))
    return max(1, min(tiles, 2))


def default_tile(problem: Problem) -> Tile:
    """A tile for a shape that nobody has tuned, of `default_blocks`.

    The tiles are those that won most often on one H200 (docs/notes/0012-fused-gather.md).
    """
    if problem.dtype == torch.float32:
        return Tile(64, 64, 32, 8, 8, 2, False)
    return BY_SIZE[default_blocks(problem.M, problem.N, problem.dtype.itemsize)]


def cut(tiles: int, places: int, steps: int, split: int) -> tuple[int, int]:
    """How many of `tiles` tiles of `steps` steps are taken whole by `places` programs, and into how many shares the
    steps of the others are cut: of the last round if that is not full, by `Tile.split`."""
    rest = tiles % places
    shares = min(places, rest * steps) if split == 0 else rest * min(split, steps)
    return (tiles - rest, shares) if shares > rest else (tiles, 0)


def splits(tile: Tile, M: int, N: int, K: int, places: int, most: int = 3) -> list[int]:
    """Values of `Tile.split` that may save 1 % of a product's time, the most promising first, none like another.

    Lengths are counted in columns of K.  Laying a piece down takes as long as PIECE of them, and adding one up too: L2
    passes 64 bytes a cycle to a multiprocessor, whose tensor cores make 2048 products a cycle of 16-bit numbers.
    """
    tiles, steps = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n), triton.cdiv(K, tile.block_k)
    full, rest = divmod(tiles, places)

    def length(split: int) -> float:
        _, shares = cut(tiles, places, steps, split)
        if not shares:
            return float(full + (rest > 0)) * K
        within = int(shares % rest > 0)  # shares end within tiles: more pieces, and two of some shares
        rounds, pieces = triton.cdiv(shares, places), triton.cdiv(shares, rest) + within
        return full * K + rounds * (K * rest / shares + (1 + within) * PIECE) + pieces * PIECE

    worth = [split for split in (0, *range(2, MOST_PIECES + 1)) if length(split) < 0.99 * length(1)]
    found: list[int] = []
    for split in sorted(worth, key=length):
        if all(2 * max(split, other) >= 3 * min(split, other) for other in found):
            found.append(split)
    return found[:most]


@cache
def _counters(device: torch.device, stream: int, places: int) -> torch.Tensor:
    """Zeros between kernels: each sets back what it has counted, and those of a stream follow each other."""
    return torch.zeros(places, dtype=torch.int32, device=device)


def counters(device: torch.device, places: int) -> torch.Tensor:
    """`arrived` of `take_shares`.  A graph that is captured has its own for each product, since it may be replayed on
    any stream, beside others."""
    if device.type != "cuda":
        return _counters(device, 0, places)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(places, dtype=torch.int32, device=device)
    return _counters(device, torch.cuda.current_stream(device).cuda_stream, places)


def matmul(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x_MK @ weight_NK.T + bias_N in fp32, rounded once, as out [M N].

    Of one of `DTYPES`, on a GPU or, interpreted, on a CPU; any sizes and strides.
    """
    (M, K), N = x_MK.shape, len(weight_NK)
    assert weight_NK.shape[1] == K and x_MK.dtype == weight_NK.dtype and x_MK.dtype in DTYPES
    out = x_MK.new_empty(M, N) if out is None else out
    assert out.shape == (M, N)
    if M and N:
        tile = tile or default_tile(Problem("matmul", M, N, K, x_MK.dtype, 1, bias_N is not None))
        a, b = operand(x_MK, (tile.block_m, tile.block_k)), operand(weight_NK, (tile.block_n, tile.block_k))
        c = operand(out, (tile.block_m, tile.block_n // tile.parts), ROWS)
        tiles, places = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n), programs(x_MK.device, MOST)
        whole, shares = cut(tiles, places, triton.cdiv(K, tile.block_k), tile.split)
        sums = arrived = None
        if shares:
            sums = x_MK.new_empty(shares + tiles - whole, tile.block_m * tile.block_n, dtype=torch.float32)
            arrived = counters(x_MK.device, places)
        kernel: Any = _matmul[(min(places, max(whole, shares)),)]
        kernel(
            a.argument, b.argument, c.argument, bias_N, out, sums, arrived, M, N, K,
            a.row, a.column, b.row, b.column, out.stride(0), out.stride(1),
            *((whole, shares) if shares else (None, None)),
            A=a.how, B=b.how, C=c.how, BIAS=bias_N is not None,
            BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group,
            FLATTEN=tile.flatten, PARTS=tile.parts, JOIN=joined(tile) if shares else 0, WIDE=widens(x_MK.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def joined(tile: Tile) -> int:
    """JOIN of the kernel: rows of 64 numbers a thread and 64 KiB at most, of which three loads are under way."""
    return max(1, min(tile.block_m, min(tile.warps * 32 * 64, 1 << 14) // tile.block_n))
