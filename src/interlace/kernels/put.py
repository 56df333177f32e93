"""Rows and parts that one small kernel puts where they are wanted, before the library's product or after it.

    put_rows(x_mK, group, count, out_MK)          out = all_gather(x)
    put_sums(parts_MN, bias_N, group, out)        out = own rows of parts_0 + parts_1 + ... + bias, or all rows where
                                                  out has them: in rank order, fp32, rounded once

Equal to the library's collectives.  Quicker for some hundreds of rows, where a product is too short to hide anything
and what counts is how soon the first byte leaves and how few steps follow the last: every program of a rank stores its
piece of what a peer wants into the peer's memory, raises one word there, waits for the words of the same program of
its peers, and copies or adds up what they put.  The product stays the library's.

Nothing is overwritten, since calls are counted in memory and take two halves in turn: a program in call e has seen
every peer's word of e - 1, which that peer raised after its own call e - 2 had ended, and so had read the half that is
written now.  Results end outside of the halves, at addresses that no call changes: CUDA graphs replay as they are.

A program waits for nobody but the same program of its peers, which has put its piece before it waits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interlace.collectives import Group
from interlace.kernels import workspace
from interlace.kernels.candidate import Options, Problem
from interlace.kernels.ordered_tiles import cannot, share
from interlace.plan import overlap
from interlace.plan.overlap import MOST_PUT, PROGRAMS
from interlace.symmetric.device import my_rank, next_epoch, put, signal, wait_until, world

BLOCK = 8192  # elements that a program moves at a time
WARPS = 8
NO_OPTIONS = Options()
_PROGRAMS: tl.constexpr = tl.constexpr(PROGRAMS)


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _piece(count, pieces, BLOCK: tl.constexpr):
    """This program's first of `count` elements and how many it has, in whole blocks but for the last."""
    each = tl.cdiv(tl.cdiv(count, pieces), BLOCK) * BLOCK
    first = tl.program_id(0) * each
    return first, tl.maximum(tl.minimum(each, count - first), 0)


@triton.jit(do_not_specialize=["count", "pieces"])
def _put_rows(x, slots, out, arrived, epochs, count, K, half, pieces, heap, BLOCK: tl.constexpr):
    """slots: [2 halves of `half` elements]; a call uses one, all rows in order.  pieces: programs that have work."""
    call = next_epoch(epochs)
    me, ranks, program = my_rank(heap), world(heap), tl.program_id(0)
    if program < pieces:
        slots += (call & 1).to(tl.int64) * half
        top, rows = share(count, me, ranks)
        first, length = _piece(rows * K, pieces, BLOCK)
        for step in range(1, ranks):
            peer = (me + step) % ranks
            put(slots + top * K + first, x + first, length, peer, heap, BLOCK)
            signal(arrived + me * _PROGRAMS + program, call, peer, heap)
        put(out + top * K + first, x + first, length, me, heap, BLOCK)
        for step in range(1, ranks):
            peer = (me + ranks - step) % ranks
            wait_until(arrived + peer * _PROGRAMS + program, call, peer, heap, "put_rows")
            top, rows = share(count, peer, ranks)
            first, length = _piece(rows * K, pieces, BLOCK)
            put(out + top * K + first, slots + top * K + first, length, me, heap, BLOCK)


@triton.jit(do_not_specialize=["M", "pieces"])
def _put_sums(
    parts, slots, out, bias, arrived, epochs, M, N, half, region, pieces, heap,
    WORLD: tl.constexpr, BY_ROWS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """slots: [2 halves of `half` elements], in which every rank has a region.  BY_ROWS: ranks want their own rows."""
    call = next_epoch(epochs)
    me, program = my_rank(heap), tl.program_id(0)
    if program < pieces:
        slots += (call & 1).to(tl.int64) * half
        for step in range(1, WORLD):
            peer = (me + step) % WORLD
            top, rows = share(M, peer, WORLD) if BY_ROWS else (0, M)
            first, length = _piece(rows * N, pieces, BLOCK)
            put(slots + me.to(tl.int64) * region + first, parts + top * N + first, length, peer, heap, BLOCK)
            signal(arrived + me * _PROGRAMS + program, call, peer, heap)
        for step in range(1, WORLD):
            peer = (me + WORLD - step) % WORLD
            wait_until(arrived + peer * _PROGRAMS + program, call, peer, heap, "put_sums")
        top, rows = share(M, me, WORLD) if BY_ROWS else (0, M)
        first, length = _piece(rows * N, pieces, BLOCK)
        own, whole = parts + top * N, length // BLOCK * BLOCK
        for at in range(first, first + whole, BLOCK):
            _add(own, slots, out, bias, me, at, at + BLOCK, N, region, WORLD, BIAS, False, BLOCK)
        if whole < length:
            _add(own, slots, out, bias, me, first + whole, first + length, N, region, WORLD, BIAS, True, BLOCK)


@triton.jit
def _add(
    own, slots, out, bias, me, first, last, N, region,
    WORLD: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements [first, last) of the sum.  Of two ranks the order does not matter; of more a neighbour's place is read
    in the place of the own one, and not used.  A mask makes accesses narrow, so whole blocks have none."""
    at = first + tl.arange(0, BLOCK)
    mask = at < last if MASKED else None
    mine = tl.load(own + at, mask=mask).to(tl.float32)
    if WORLD == 2:
        total = mine + tl.load(slots + (1 - me).to(tl.int64) * region + at, mask=mask).to(tl.float32)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            instead = tl.where(me == rank, (rank + 1) % WORLD, rank).to(tl.int64)
            other = tl.load(slots + instead * region + at, mask=mask).to(tl.float32)
            total += tl.where(me == rank, mine, other)
    if BIAS:
        total += tl.load(bias + at % N, mask=mask).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


# --- on the host -----------------------------------------------------------------------------------------------------


def put_rows(x_mK: Tensor, group: Group, count: int, out_MK: Tensor) -> None:
    """x_mK: this rank's of `count` rows (`layout.split`); out_MK: all of them, contiguous."""
    assert out_MK.is_contiguous()
    K, item = x_mK.shape[1], x_mK.element_size()
    space = workspace.of(group, f"{overlap.GATHER}.put")
    space.require(*overlap.put_rows(count, K, item, group.size))
    space.follow()
    group.meter.count("all_gather", group.axis, x_mK.numel() * item * (group.size - 1))
    slots, half = space.tensors["put"].local.view(x_mK.dtype), space.tensors["put"].nbytes // 2 // item
    programs = space.places(PROGRAMS)
    kernel: Any = _put_rows[(programs,)]
    kernel(
        x_mK.contiguous(), slots, out_MK, space.tensors["arrived"].local, space.tensors["epochs"].local,
        count, K, half, _pieces(-(-count // group.size) * K, programs), space.heap.context,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def put_sums(parts_MN: Tensor, bias_N: Tensor | None, group: Group, out: Tensor, op: str) -> None:
    """parts_MN: this rank's, contiguous; out: the own rows of the sum, or all, by `op`."""
    (M, N), item, by_rows = parts_MN.shape, parts_MN.element_size(), op == overlap.SCATTER
    space = workspace.of(group, f"{op}.put")
    space.require(*overlap.put_sums(op, M, N, item, group.size))
    space.follow()
    for collective, nbytes in overlap.sent(op, overlap.Way("put"), M, N, 0, item, group.size, group.rank):
        group.meter.count(collective, group.axis, nbytes)
    half = space.tensors["put"].nbytes // 2
    region = half // group.size // overlap.ALIGNMENT * overlap.ALIGNMENT
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    programs, most = space.places(PROGRAMS), -(-M // group.size) if by_rows else M
    kernel: Any = _put_sums[(programs,)]
    kernel(
        parts_MN, space.tensors["put"].local.view(parts_MN.dtype), target, bias_N,
        space.tensors["arrived"].local, space.tensors["epochs"].local,
        M, N, half // item, region // item, _pieces(most * N, programs), space.heap.context,
        WORLD=group.size, BY_ROWS=by_rows, BIAS=bias_N is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


def _pieces(count: int, programs: int) -> int:
    """Programs that have work where the fullest rank has so many elements; one at least, which waits for the peers."""
    return max(1, min(programs, -(-count // BLOCK)))


def sums_after(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, group: Group, out: Tensor, op: str) -> None:
    """The library's product, then its sums over ranks: `run` of "put" for both operations that have them."""
    M, N = len(x_MK), len(weight_NK)
    if M and N:
        put_sums(torch.mm(x_MK, weight_NK.t()), bias_N, group, out, op)


def cannot_put(problem: Problem, device: torch.device) -> str | None:
    """Why a problem cannot take "put"."""
    sizes = (problem.op, problem.M, problem.N, problem.K, problem.dtype.itemsize, problem.world)
    nbytes = overlap.put_bytes(*sizes)
    if problem.world > 1 and nbytes > MOST_PUT:
        return f"{nbytes} bytes to be put into a rank's memory at once, more than {MOST_PUT}"
    return cannot(problem, device)
