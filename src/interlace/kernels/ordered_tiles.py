"""Tiles of a partial product: sent to their owner as they are made, added up there in the order of ranks.

What the fused reduce-scatter and all-reduce share inside their kernels.  Equal, for every tile, to

    total = wire(tile of rank 0) + wire(tile of rank 1) + ...        in fp32, one rounding at the end

where `wire` rounds to the type that travels; the owner's own tile is rounded alike, so that the sum does not depend on
who owns it.  A tile travels as a block of [BM BN] neighbouring elements into a place that its owner keeps for the
sender, twice: call number e uses half e % 2.

Why nobody overwrites what another still reads: a call begins by telling all ranks so (`enter`), and ends when all have
told so (`leave`).  Whoever is in call e + 1 knows that all have entered e, hence left e - 1, which used the same half.
Words only grow, and each has one writer, so that calls of other sizes, whose tiles lie elsewhere, cannot mistake them.

Programs need not be resident together, as they are not when another kernel holds multiprocessors: a share of the tiles
is taken (`claim`) by whoever runs, all that others wait for before anything that waits.  So a program that spins never
waits for one that has found no room, neither here nor at a peer.

With LATE a tile is stored by the multiprocessor's copy unit (TMA) while the next one is computed, and told of after
that.  Dropped (docs/notes/0013-fused-scatter.md): ordinary stores to the peer in large products, which hold up the
tensor cores; loops over tiles and K as one (`Tile.flatten`), which lose the pipeline of loads where tiles are told of.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from interlace.collectives import Group
from interlace.kernels import workspace
from interlace.kernels.candidate import Problem, Tile
from interlace.kernels.tile import DTYPES, MOST, default_tile, is_interpreted, multiply, place
from interlace.plan.overlap import tile_places
from interlace.symmetric.device import admit_descriptors, flush_descriptors, my_rank, remote, signal, wait_until

LARGE = 128 * 256  # elements of a tile whose sum is made in two halves: more do not fit in registers
SHARED = 227 * 1024 - 1024  # bytes of a multiprocessor's memory for stages and a tile on its way


@triton.jit
def enter(entered, epoch, heap, WORLD: tl.constexpr):
    """Tells all ranks that this one is in call `epoch`.  entered: a word a rank."""
    if tl.program_id(0) == 0:
        me = my_rank(heap)
        for step in range(1, WORLD):
            signal(entered + me, epoch, (me + step) % WORLD, heap)


@triton.jit
def leave(entered, epoch, heap, WORLD: tl.constexpr, KERNEL: tl.constexpr):
    """Returns, in program 0, when all ranks are in call `epoch`."""
    if tl.program_id(0) == 0:
        me = my_rank(heap)
        for step in range(1, WORLD):
            peer = (me + step) % WORLD
            wait_until(entered + peer, epoch, peer, heap, KERNEL)


@triton.jit
def begin(claims, epoch):
    """This call's two counters of taken shares; makes ready those of the next call."""
    if tl.program_id(0) == 0:
        later = claims + ((epoch + 1) & 1) * 2
        tl.store(later, 0)
        tl.store(later + 1, 0)
    return claims + (epoch & 1) * 2


@triton.jit
def claim(counter):
    """The next share that no program has taken: of as many as there are programs."""
    return tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@triton.jit
def share(count, rank, ranks):
    """First of `rank`'s things and how many it has, of `count`: `layout.split`."""
    whole, more = count // ranks, count % ranks
    return rank * whole + tl.minimum(rank, more), whole + (rank < more).to(tl.int32)


@triton.jit
def owned(owner, M, N, WORLD: tl.constexpr, BY_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """How many tiles a rank owns: those of its rows, or an even share of all."""
    across = tl.cdiv(N, BN)
    if BY_ROWS:
        _, rows = share(M, owner, WORLD)
        return tl.cdiv(rows, BM) * across
    else:
        _, tiles = share(tl.cdiv(M, BM) * across, owner, WORLD)
        return tiles


@triton.jit
def corner(
    owner, tile, M, N,
    WORLD: tl.constexpr, BY_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of tile number `tile` of an owner: first row, end of the rows that count, first column."""
    across = tl.cdiv(N, BN)
    if BY_ROWS:
        first, rows = share(M, owner, WORLD)
        down, right = place(tile, tl.cdiv(rows, BM), across, GROUP)
        return first + down * BM, first + rows, right * BN
    else:
        first, _ = share(tl.cdiv(M, BM) * across, owner, WORLD)
        down, right = place(first + tile, tl.cdiv(M, BM), across, GROUP)
        return down * BM, M, right * BN


@triton.jit
def slot(of, at):
    """The place that rank `at` keeps for rank `of`, among those for its peers."""
    return of - (of > at).to(tl.int32)


@triton.jit
def part_of(tile, PART: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Columns PART of PARTS, 1 or 2, of a tile."""
    if PARTS == 1:
        return tile
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))
        if PART == 0:
            return left
        else:
            return right


@triton.jit
def elements(tile, row, last, column, N, FROM: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Where a tile's columns [FROM, FROM + WIDTH) lie in its place, and which of its elements are of the product."""
    rows, columns = tl.arange(0, BM), FROM + tl.arange(0, WIDTH)
    at = tl.cast(tile, tl.int64) * (BM * BN) + rows[:, None] * BN + columns[None, :]
    return at, (row + rows < last)[:, None] & (column + columns < N)[None, :]


@triton.jit
def send(
    a, b, half, arrived, epoch, taken, M, N, K, a_row, a_column, b_row, b_column, region, words, heap,
    A: tl.constexpr, B: tl.constexpr, WORLD: tl.constexpr, BY_ROWS: tl.constexpr, LATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Computes the tiles that others own, the next rank's first, and sends them: share `taken` of as many as there are
    programs.

    half: this call's places, `region` elements each, as they lie at every rank; arrived: `words` words for each sender.
    """
    me, programs = my_rank(heap), tl.num_programs(0)
    start = taken
    for step in range(1, WORLD):
        owner = (me + step) % WORLD
        tiles = owned(owner, M, N, WORLD, BY_ROWS, BM, BN)
        there = remote(half + slot(me, owner).to(tl.int64) * region, owner, heap)
        flags = arrived + me * words
        if LATE:
            target = tl.make_tensor_descriptor(there, [tl.maximum(tiles, 1) * BM, BN], [BN, 1], [BM, BN // PARTS])
        unsaid = -1
        for tile in tl.range(start, tiles, programs):
            row, last, column = corner(owner, tile, M, N, WORLD, BY_ROWS, BM, BN, GROUP)
            made = multiply(a, b, row, last, column, N, K, a_row, a_column, b_row, b_column, A, B, BM, BN, BK, WIDE)
            if LATE:
                if unsaid >= 0:
                    flush_descriptors()
                    signal(flags + unsaid, epoch, owner, heap)
                unsaid = tile
                for part in tl.static_range(PARTS):
                    piece = part_of(made, part, PARTS, BM, BN).to(half.dtype.element_ty)
                    target.store([tile * BM, part * (BN // PARTS)], piece)
            else:
                at, kept = elements(tile, row, last, column, N, 0, BN, BM, BN)
                tl.store(there + at, made.to(half.dtype.element_ty), mask=kept)
                signal(flags + tile, epoch, owner, heap)
        if unsaid >= 0:
            flush_descriptors()
            signal(flags + unsaid, epoch, owner, heap)
        start += tl.cdiv(tl.maximum(tiles - start, 0), programs) * programs - tiles  # so that all have as much to do


@triton.jit
def await_tile(tile, arrived, epoch, words, heap, WORLD: tl.constexpr, LATE: tl.constexpr, KERNEL: tl.constexpr):
    """Returns when all others have sent this rank's tile number `tile`."""
    me = my_rank(heap)
    for step in range(1, WORLD):  # in the order in which it comes
        peer = (me + WORLD - step) % WORLD
        wait_until(arrived + peer * words + tile, epoch, peer, heap, KERNEL)
    if LATE:
        admit_descriptors()


@triton.jit
def open_places(
    half, region, WORLD: tl.constexpr, LATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr
):
    """What `add_up` reads: with LATE a descriptor of all places of this call, in pieces of WIDTH columns."""
    if LATE:
        return tl.make_tensor_descriptor(half, [(WORLD - 1) * (region // BN), BN], [BN, 1], [BM, WIDTH])
    else:
        return half


@triton.jit
def add_up(
    made, source, tile, row, last, column, N, half, region, heap,
    WORLD: tl.constexpr, LATE: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns [FROM, FROM + WIDTH) of the own tile and of those received, added in the order of ranks, fp32."""
    me = my_rank(heap)
    own = made.to(half.dtype.element_ty)
    at, kept = elements(tile, row, last, column, N, FROM, WIDTH, BM, BN)
    if me == 0:
        total = own.to(tl.float32)
    else:
        total = received(source, 0, tile, at, kept, region, LATE, FROM, BM, BN)
    for rank in tl.static_range(1, WORLD):
        if rank == me:
            total += own.to(tl.float32)
        else:
            total += received(source, slot(rank, me), tile, at, kept, region, LATE, FROM, BM, BN)
    return total


@triton.jit
def received(
    source, sender, tile, at, kept, region, LATE: tl.constexpr, FROM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """What lies in the place of a sender, fp32."""
    if LATE:
        return source.load([sender * (region // BN) + tile * BM, FROM]).to(tl.float32)
    else:
        return tl.load(source + tl.cast(sender, tl.int64) * region + at, mask=kept, other=0.0).to(tl.float32)


# --- on the host -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Room for `tiles` tiles from each of `senders` ranks, in the type that travels, for `calls` calls at once."""

    senders: int
    tiles: int
    wire: torch.dtype
    calls: int = 2


@dataclass(frozen=True)
class Places:
    """Where tiles arrive, as kernels are given it.

    slots: this rank's elements, `spread` of them for a call and `region` of those for a sender; arrived: `words` words
    for each sender.
    """

    slots: torch.Tensor
    arrived: torch.Tensor
    spread: int
    region: int
    words: int


@dataclass(frozen=True)
class Room:
    """What an operation's kernels share.  entered: a word a rank; epochs: a word a program; claims: four
    counters, and a word a share.

    programs: of every launch, since each counts its calls: one a multiprocessor.
    """

    buffers: dict[str, Places]
    entered: torch.Tensor
    epochs: torch.Tensor
    claims: torch.Tensor
    context: torch.Tensor
    programs: int


def make_room(group: Group, op: str, tile: Tile, needs: Mapping[str, Need]) -> Room:
    """Collective where more is needed than before.  The calls of an operation share `entered` and `epochs`."""
    space = workspace.of(group, op)
    size, most = tile.block_m * tile.block_n, _places(group.device)
    places = {
        name: (need.tiles * size * need.wire.itemsize, need.tiles, need.calls * need.senders)
        for name, need in needs.items()
    }
    space.require(*tile_places(places, group.size, most))
    space.follow()
    buffers = {}
    for name, need in needs.items():
        slots, arrived = space.tensors[name].local.view(need.wire), space.tensors[f"{name} arrived"].local
        buffers[name] = Places(slots, arrived, len(slots) // need.calls, need.tiles * size, len(arrived) // group.size)
    entered, epochs = space.tensors["entered"].local, space.tensors["epochs"].local
    claims = space.buffer("claims", None, (4 + most,), torch.int32)
    sharing = space.heap.fabric.sharing
    programs = most if sharing == 1 else most // (2 * sharing)  # ranks on one device, and copies between them
    return Room(buffers, entered, epochs, claims, space.heap.context, programs)


def _places(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tile_for(op: str, M: int, N: int, dtype: torch.dtype, group: Group, tile: Tile | None) -> Tile:
    """`tile`, or the default for a shape; sent in two parts (`parts`) only if it does not fit beside the stages.

    The same on every rank, whose inner sizes may differ: it does not look at them.
    """
    tile = tile or replace(default_tile(Problem(op, M, N, N, dtype, group.size)), parts=1)
    staged = tile.stages * (tile.block_m + tile.block_n) * tile.block_k
    fits = (staged + tile.block_m * tile.block_n) * dtype.itemsize <= SHARED
    return tile if fits else replace(tile, parts=2)


def halves(tile: Tile) -> int:
    """In how many parts the sum of a tile is made."""
    return 2 if tile.block_m * tile.block_n >= LARGE else 1


def cannot(problem: Problem, device: torch.device, late: bool = False, most: int | None = None) -> str | None:
    """Why kernels that move tiles cannot run.  late: they store by descriptor; most: bytes of fp32 sums."""
    if problem.world == 1:
        return "one rank has nobody to send to"
    if problem.dtype not in DTYPES:
        return f"{str(problem.dtype).removeprefix('torch.')} numbers; of float32, float16 and bfloat16 it knows"
    if problem.M * problem.N >= MOST:
        return f"{problem.M} rows of {problem.N} sums; its tiles are counted in 32 bits"
    nbytes = 4 * problem.M * problem.N
    if most is not None and nbytes > most:
        return f"{nbytes} bytes of sums, more than the {most} that are sent at once"
    if device.type != "cuda" and not is_interpreted():
        return "its kernels run on GPUs, or with TRITON_INTERPRET=1 on a CPU"
    if late and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        return "tiles that leave while the next is computed need a GPU of the Hopper generation or later"
    return None


def launch(device: torch.device, kernel: Callable[[], object]) -> None:
    """Launches a kernel that makes descriptors, whose memory Triton asks for, and leaves Triton's own setting alone."""

    def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    def run() -> None:
        triton.set_allocator(scratch)
        kernel()

    contextvars.copy_context().run(run)
