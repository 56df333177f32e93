"""Rows of all ranks on their way into this rank's memory, chunk by chunk, beside a product that reads them.

`Arrival(x, group, chunks)` begins an all-gather whose chunks are used one after another as they come (`wait`, or the
word that a kernel waits for).  Equals an all-gather; quicker, since copy engines take no multiprocessor from the
product, and since it is the receiver that waits, for just the chunk that it needs.

They push out of x itself into the peers' buffers, nearest first: rank r sends to r + 1, r + 2, ..., so no two ranks
send to one at once, and a rank's rows come from r - 1, r - 2, ...  Behind each chunk goes a word, the number of the
call, raised by the stream.  A word has one sender for ever, however calls cut their rows: a rank may be a call ahead of
another that is still sending, and words of two senders could be set back.  Nobody waits before sending, since buffers
alternate (`kernels/workspace.py`); in turn every call waits for all words of all its peers.

Pulling (measured, docs/notes/0012-fused-gather.md) is 4 % slower, needs the rows in symmetric memory, and a word that
says so before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interlace.collectives import Group
from interlace.kernels import workspace
from interlace.layout import split
from interlace.plan import overlap
from interlace.plan.overlap import ALIGNMENT
from interlace.symmetric import Event


@dataclass(frozen=True)
class Piece:
    """What a rank sends at once: `number` of those to a peer, `offset` is where it goes, in bytes of a call's half.

    Of x, flattened, the elements from `begin` on that `shape` holds.
    """

    peer: int
    number: int
    offset: int
    begin: int
    shape: tuple[int, int]

    def of(self, x_mK: Tensor) -> Tensor:
        if self.shape == x_mK.shape:
            return x_mK
        return x_mK.view(-1)[self.begin : self.begin + self.shape[0] * self.shape[1]].view(self.shape)


@dataclass(frozen=True)
class Chunks:
    """How `count` rows of K elements travel: each rank's in `chunks` runs, each in a slot of the receiver's buffer.

    Slot (step - 1) * chunks + c holds chunk c of the rank `step` places before the receiver.
    """

    count: int
    K: int
    dtype: torch.dtype
    ranks: int
    chunks: int = 1

    @property
    def slot(self) -> int:
        """Rows of a slot."""
        return overlap.slot_rows(self.count, self.ranks, self.chunks)

    @property
    def pieces(self) -> int:
        """What one rank sends to another."""
        return self.chunks

    @property
    def slots(self) -> int:
        """Those of a rank."""
        return (self.ranks - 1) * self.chunks

    @property
    def nbytes(self) -> int:
        """Of all slots of a call."""
        return self.offset(self.slots)

    def offset(self, slot: int) -> int:
        return slot * self.slot * self.K * self.dtype.itemsize

    def rows(self, rank: int, chunk: int) -> tuple[int, int]:
        """Rows of the whole that are this chunk."""
        start, stop = split(self.count, self.ranks, rank)
        first, last = split(stop - start, self.chunks, chunk)
        return start + first, start + last

    def sent(self, rank: int) -> Iterator[Piece]:
        start, _ = split(self.count, self.ranks, rank)
        for step in range(1, self.ranks):
            for chunk in range(self.chunks):
                slot = (step - 1) * self.chunks + chunk
                first, last = self.rows(rank, chunk)
                begin, shape = (first - start) * self.K, (last - first, self.K)
                yield Piece((rank + step) % self.ranks, chunk, self.offset(slot), begin, shape)

    def arriving(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """(source, chunk, first row, end) in the order in which they come to a rank, and of their slots."""
        for step in range(1, self.ranks):
            source = (rank - step) % self.ranks
            for chunk in range(self.chunks):
                yield source, chunk, *self.rows(source, chunk)


@dataclass(frozen=True)
class Slices:
    """How they travel in slices of K: slice s of all the peers' rows lies together, [count - own, slice], by rank."""

    count: int
    K: int
    dtype: torch.dtype
    ranks: int
    slices: int = 2

    @property
    def pieces(self) -> int:
        return self.slices

    @property
    def nbytes(self) -> int:
        """Of a call: no rank has more than all rows."""
        return sum(self._size(number) for number in range(self.slices))

    def columns(self, number: int) -> tuple[int, int]:
        """Columns of a slice; all but the last begin at multiples of 64."""
        return overlap.slice_columns(self.K, self.slices, number)

    def offset(self, number: int) -> int:
        return sum(self._size(before) for before in range(number))

    def _size(self, number: int) -> int:
        return overlap.slice_bytes(self.count, self.K, self.dtype.itemsize, self.slices, number)

    def sent(self, rank: int) -> Iterator[Piece]:
        """Of x whose slices lie one after another, each [m slice]; see `pack`."""
        low, high = split(self.count, self.ranks, rank)
        m = high - low
        for number in range(self.slices):
            first, last = self.columns(number)
            for step in range(1, self.ranks):
                peer = (rank + step) % self.ranks
                before, _ = split(self.count, self.ranks, rank)
                if peer < rank:
                    start, stop = split(self.count, self.ranks, peer)
                    before -= stop - start
                offset = self.offset(number) + before * (last - first) * self.dtype.itemsize
                yield Piece(peer, number, offset, m * first, (m, last - first))

    def pack(self, x_mK: Tensor) -> Tensor:
        """The slices of some rows, one after another, in the shape of x."""
        flat = x_mK.new_empty(x_mK.numel())
        pieces = flat.split([len(x_mK) * (last - first) for first, last in map(self.columns, range(self.slices))])
        for number, piece in enumerate(pieces):
            first, last = self.columns(number)
            piece.view(len(x_mK), last - first).copy_(x_mK[:, first:last])
        return flat.view_as(x_mK)


class Arrival:
    """One call's transfer: begun when made; over for the compute stream after `end`.

    x_mK: this rank's rows, contiguous, unchanged until `end`.
    """

    def __init__(self, x_mK: Tensor, group: Group, op: str, plan: Chunks | Slices) -> None:
        assert x_mK.is_contiguous()
        self.space, self.plan, self.x_mK = workspace.of(group, op), plan, x_mK
        needs = self.space.route(plan, lambda: overlap.arriving(plan.nbytes, plan.ranks, plan.pieces))
        self.space.require(*needs)
        self.turn = self.space.turn()
        self.stride = self.space.tensors["arrived"].shape[0] // 2 // plan.ranks  # words of a sender
        self._begin = self.turn.half * (self.space.tensors["rows"].nbytes // 2 // ALIGNMENT * ALIGNMENT)
        self.route: Route = self.space.route((plan, self.turn.half, self.turn.in_memory), self._route)
        self._kept: Event | None = None
        group.meter.count("all_gather", group.axis, self._push())

    def _route(self) -> Route:
        rank, plan = self.space.rank, self.plan
        sends = [
            (piece, self.view(piece.offset, piece.shape, piece.peer), self.word(rank, piece.number, piece.peer))
            for piece in plan.sent(rank)
        ]
        senders = [peer for peer in range(plan.ranks) if peer != rank]
        words = {(peer, number): self.word(peer, number) for peer in senders for number in range(plan.pieces)}
        chunks = [
            Arrived(*at, self.view(plan.offset(slot), (at[3] - at[2], plan.K)))
            for slot, at in enumerate(plan.arriving(rank) if isinstance(plan, Chunks) else ())
        ]
        return Route(sends, words, chunks)

    def _push(self) -> int:
        """Bytes that are on their way."""
        heap, number, nbytes = self.space.heap, self.turn.number, 0
        ready = heap.event()
        with heap.stream("push"):
            ready.wait()
            for piece, target, word in self.route.sends:
                if target.numel():
                    heap.copy(target, piece.of(self.x_mK))
                    nbytes += target.nbytes
                heap.write(word, number)
            self._sent = heap.event()
        return nbytes

    def view(self, offset: int, shape: tuple[int, ...], rank: int | None = None) -> Tensor:
        """What lies at a byte of this call's half, at this rank or a peer."""
        return self.space.buffer("rows", rank, shape, self.plan.dtype, self._begin + offset)

    def word(self, sender: int, number: int, rank: int | None = None) -> Tensor:
        """What says at a rank (None: this one) that piece `number` of a sender is there."""
        at = sender * self.stride + number
        return self.turn.words("arrived", rank)[at : at + 1]

    def arriving(self) -> Iterator[Arrived]:
        """The chunks of `Chunks` in the order in which they come, each waited for by the current stream."""
        for chunk in self.route.chunks:
            self.wait(chunk.source, chunk.number)
            yield chunk

    def wait(self, source: int, number: int) -> None:
        """What the current stream does next begins when that piece has come."""
        self.space.heap.wait(self.route.words[source, number], self.turn.number, source)

    def keep(self, gathered_MK: Tensor) -> None:
        """Copies all rows of `Chunks` to `gathered_MK` beside the product, as they arrive."""
        assert isinstance(self.plan, Chunks)
        heap, rank = self.space.heap, self.space.rank
        start, stop = split(self.plan.count, self.plan.ranks, rank)
        ready = heap.event()
        with heap.stream("keep"):
            ready.wait()
            if start < stop:
                heap.copy(gathered_MK[start:stop], self.x_mK)
            for chunk in self.arriving():
                if chunk.first < chunk.last:
                    heap.copy(gathered_MK[chunk.first : chunk.last], chunk.rows)
            self._kept = heap.event()

    def end(self) -> None:
        """The compute stream goes on when x has left and all is kept."""
        self._sent.wait()
        if self._kept is not None:
            self._kept.wait()


@dataclass(frozen=True)
class Arrived:
    """Rows [first, last) of the whole, as they lie here when chunk `number` of rank `source` has come: [rows K]."""

    source: int
    number: int
    first: int
    last: int
    rows: Tensor


@dataclass(frozen=True)
class Route:
    """What all calls of one plan and half share, since views cost the host more than the copies between them.

    sends: (piece, where it goes, the word behind it); words: those here, by sender and number; made: what a product
    has made of the slots, by its sizes.
    """

    sends: list[tuple[Piece, Tensor, Tensor]]
    words: dict[tuple[int, int], Tensor]
    chunks: list[Arrived]
    made: dict[Hashable, Any] = field(default_factory=dict)
