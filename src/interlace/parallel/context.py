"""The context axis of a decoder: each sequence split over `cp`, attention to keys that other ranks hold.

Equals, in plain collectives, an all-gather of keys and values before attention and a reduce-scatter of their gradients
behind it.  Sequences lie in the layout "T/cp~", so that causal attention is even.  Three exchanges:

    ring      keys and values of one other rank at a time, straight from their owner, while those of the one before are
              attended to; at most two ranks' are here at once                     (Liu et al., arXiv 2310.01889)
    gather    those of all other ranks, some key-value heads at a time, while the heads before are attended to
    ulysses   heads are dealt out: every rank attends to the whole sequence with some of them
                                                                                   (Jacobs et al., arXiv 2309.14509)

Ring and gather go block by block (`parallel.blocks`): outputs and log-sums are joined in fp32, gradients of keys and
values are fp32, travel to their owner and are added there in one order.  Blocks that the mask leaves empty are neither
sent nor computed; every rank knows all documents, so all agree on them without a word.  Tiles side by side
are one call of a kernel: of plain causal attention one for what a rank sends, and one for its own.  Keys and values are
fetched again in backward, not kept.  Ulysses runs the model's own attention in between, whatever its mask.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from interlace import random
from interlace.collectives import Group, Handle, all_gather, all_to_all, sum_scalars
from interlace.parallel.blocks import (
    Tile,
    Tiling,
    backward,
    forward,
    is_fused,
    is_one_kernel,
    merge,
    sink,
    sink_gradient,
)
from interlace.plan import context as plan
from interlace.plan.context import Stage


@dataclass(frozen=True, eq=False)
class SequenceAxis:
    """The context axis: its ranks, the length of every sequence, and the exchange ("ring", "gather", "ulysses")."""

    group: Group
    length: int
    exchange: str

    @property
    def places(self) -> tuple[int, int]:
        """The pieces that this rank holds."""
        return plan.places(self.group.size, self.group.rank)

    def columns(self, rank: int | None = None) -> Tensor:
        """Positions that a rank (this one when None) holds, in the order in which it holds them: int64, on the CPU."""
        cut = plan.pieces(self.length, self.group.size)
        held = plan.places(self.group.size, self.group.rank if rank is None else rank)
        return torch.cat([torch.arange(*cut[place]) for place in held])

    @cached_property
    def all_columns(self) -> list[Tensor]:
        """`columns` of every rank, on the device."""
        return [self.columns(rank).to(self.group.device) for rank in range(self.group.size)]

    def counts(self) -> list[int]:
        """Positions that each rank holds."""
        return [plan.held(self.length, self.group.size, rank) for rank in range(self.group.size)]


def split_sequences(decoder: Any, axis: SequenceAxis) -> None:
    """Puts what knows the axis in the place of every attention core, pattern and balance loss of a decoder."""
    whole = decoder.pattern

    def pattern(batch: int, length: int, *rest: Any) -> SplitPattern:
        return SplitPattern(axis, whole(batch, axis.length, *rest))

    decoder.pattern = pattern
    for module in list(decoder.modules()):
        if hasattr(module, "core"):
            module.core = SplitCore(module.core, axis)
        if hasattr(module, "balance") and getattr(module, "balanced", False):
            module.balance = SplitBalance(module.balance, axis)
            decoder.all_labels = lambda counts_B: sum_scalars(counts_B, [axis.group], name="labels of each sequence")
        if getattr(module, "room", None) is not None:
            module.room = SplitRoom(module.room, axis)


class SplitPattern:
    """What queries see of whole sequences, cut into blocks.  `whole` is the pattern of one device."""

    def __init__(self, axis: SequenceAxis, whole: Any) -> None:
        self.axis = axis
        self.whole = whole
        self.tiling: Tiling | None = None

    def prepare(self, dtype: torch.dtype, head_dim: int, sunk: bool = False) -> None:
        """Makes what the layers read, ahead of them.  sunk: their softmax has a sink."""
        if self.axis.exchange == "ulysses":
            self.whole.prepare(dtype, head_dim, sunk)
        elif self.tiling is None:
            self.tiling = Tiling(self.axis.length, self.axis.group.size, self.whole)


class SplitCore(nn.Module):
    """In the place of `AttentionCore`, with the same arguments -> [B T H E], T those positions held here."""

    def __init__(self, core: Any, axis: SequenceAxis) -> None:
        super().__init__()
        self.inner = core
        self.axis = axis
        self.first_head = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, context: Any, sinks_H: Tensor | None = None
    ) -> Tensor:
        pattern = context.patterns[self.inner.window]
        if self.axis.exchange == "ulysses":
            return self._deal(q_BTHE, k_BTKE, v_BTKE, context, sinks_H)
        drops = self.training and self.inner.dropout > 0.0
        work = Blocks(self.axis, pattern.tiling, self._keep(context) if drops else None, self.inner.dropout)
        attended: Tensor = _Attend.apply(q_BTHE, k_BTKE, v_BTKE, sinks_H, work)  # type: ignore[no-untyped-call]
        return attended

    def _deal(self, q: Tensor, k: Tensor, v: Tensor, context: Any, sinks_H: Tensor | None) -> Tensor:
        axis, group = self.axis, self.axis.group
        ranges = [plan.heads_of(q.shape[2], k.shape[2], group.size, rank) for rank in range(group.size)]
        q, k, v = _Deal.apply(q, k, v, axis, ranges)  # type: ignore[no-untyped-call]
        patterns = {window: split.whole for window, split in context.patterns.items()}
        columns_T = torch.arange(axis.length, device=q.device)
        own = slice(*ranges[group.rank][0])
        self.inner.first_head = self.first_head + own.start
        whole = dataclasses.replace(context, columns_T=columns_T, patterns=patterns)
        out = self.inner(q, k, v, whole, None if sinks_H is None else sinks_H[own])
        collected: Tensor = _Collect.apply(out, axis, [own for own, _ in ranges])  # type: ignore[no-untyped-call]
        return collected

    def _keep(self, context: Any) -> Callable[[Tile, int], Tensor]:
        """(tile, heads) -> the probabilities of the tile that dropout keeps, bool [rows H queries keys]."""
        key = random.key(context.dropout_key, self.inner.layer)

        def keep(tile: Tile, num_heads: int) -> Tensor:
            device = context.samples_B.device
            heads_H = self.first_head + torch.arange(num_heads, device=device)
            columns_T = torch.arange(*tile.queries, device=device)
            rows_1HT = ((heads_H[:, None] << 32) + columns_T[None, :])[None]
            samples = context.samples_B[tile.rows][:, None, None]
            start, stop = tile.keys
            return random.dropout_mask(key, samples, rows_1HT, stop - start, self.inner.dropout, start)

        return keep

    def extra_repr(self) -> str:
        return f"exchange={self.axis.exchange}"


class SplitBalance(nn.Module):
    """In the place of `Balance`: this rank's part of each sequence's balance loss, which is linear in `mass_BX`."""

    def __init__(self, inner: Any, axis: SequenceAxis) -> None:
        super().__init__()
        self.inner = inner
        self.axis = axis

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, load_BX: Tensor, mass_BX: Tensor, k: int) -> Tensor:
        everywhere = sum_scalars(load_BX.flatten(), [self.axis.group], name="load of experts").view_as(load_BX)
        loss_B: Tensor = self.inner(everywhere, mass_BX, k)
        return loss_B


class SplitRoom(nn.Module):
    """In the place of `Room`: a choice's turn in the whole sequence, counted on from the pieces before."""

    def __init__(self, inner: Any, axis: SequenceAxis) -> None:
        super().__init__()
        self.inner = inner
        self.axis = axis

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, experts_BTk: Tensor) -> Tensor:
        axis, cut = self.axis, plan.pieces(self.axis.length, self.axis.group.size)
        own = experts_BTk.split([stop - start for start, stop in (cut[place] for place in axis.places)], dim=1)
        counts_2BX = torch.stack([self.inner.counts(part_BTk) for part_BTk in own]).int()
        everyone = all_gather(counts_2BX.flatten(), axis.group, name="choices of each piece").wait()
        counts = everyone.view(-1, *counts_2BX.shape[1:])
        order = [place for rank in range(axis.group.size) for place in plan.places(axis.group.size, rank)]
        turns = []
        for place, part_BTk in zip(axis.places, own, strict=True):
            before = [at for at, other in enumerate(order) if other < place]
            before_BX = counts[before].sum(dim=0)
            later_BN = before_BX.gather(1, part_BTk.flatten(1))
            turns.append(self.inner.turns(part_BTk) + later_BN.view_as(part_BTk))
        kept_BTk: Tensor = torch.cat(turns, dim=1) < self.inner.limit(axis.length)
        return kept_BTk


# --- block by block --------------------------------------------------------------------------------------------------

Arrived = list[tuple[tuple[int, ...], Tensor]]  # keys and values of some pieces, one after another: [2 B n K E]


class Blocks:
    """One layer's attention by blocks: what travels when, and which tiles are computed."""

    def __init__(
        self,
        axis: SequenceAxis,
        tiling: Tiling,
        keep: Callable[[Tile, int], Tensor] | None = None,
        dropout: float = 0.0,
    ) -> None:
        self.axis = axis
        self.tiling = tiling
        self.keep = keep
        self.dropout = dropout
        self.cut = plan.pieces(axis.length, axis.group.size)
        self.offsets: dict[int, int] = {}  # piece held here -> where it begins locally
        at = 0
        for place in axis.places:
            self.offsets[place] = at
            at += self.size(place)

    def size(self, piece: int) -> int:
        return self.cut[piece][1] - self.cut[piece][0]

    def wanted(self, receiver: int, source: int) -> tuple[int, ...]:
        return plan.wanted(self.tiling.blocks, self.axis.group.size, receiver, source)

    def stages(self, kv_heads: int) -> list[Stage]:
        """Those in which anything travels: the same on every rank."""
        ways = self.axis.group.size
        return [
            stage
            for stage in plan.stages(self.axis.exchange, ways, kv_heads)
            if any(self.wanted((rank + d) % ways, rank) for rank in range(ways) for d in stage.distances)
        ]

    def own(self, kv: Tensor) -> Arrived:
        """The pieces that are held here."""
        return [(self.axis.places, kv)]

    def here(self, pieces: Sequence[int]) -> slice:
        """Where pieces that are held here and lie side by side stand."""
        return slice(self.offsets[pieces[0]], self.offsets[pieces[-1]] + self.size(pieces[-1]))

    def given(self, stage: Stage) -> list[tuple[int, ...]]:
        """For every rank the own pieces that it takes in this stage."""
        group = self.axis.group
        near = {(group.rank + distance) % group.size for distance in stage.distances}
        return [self.wanted(peer, group.rank) if peer in near else () for peer in range(group.size)]

    def taken(self, stage: Stage) -> list[tuple[int, ...]]:
        """For every rank its pieces that come here in this stage."""
        group = self.axis.group
        near = {(group.rank - distance) % group.size for distance in stage.distances}
        return [self.wanted(group.rank, peer) if peer in near else () for peer in range(group.size)]

    def circulate(self, kv: Tensor, compute: Callable[[Stage | None, Arrived], None]) -> None:
        """Calls `compute` for the own pieces (None), then for those of each stage, the next being under way meanwhile.

        kv: [2 B T K E], this rank's.  No more than two stages' keys and values are here at once.
        """
        stages = self.stages(kv.shape[3])
        moving = self._fetch(stages[0], kv) if stages else None
        compute(None, self.own(kv))
        for number, stage in enumerate(stages):
            assert moving is not None
            arrived = moving.wait()
            moving = self._fetch(stages[number + 1], kv) if number + 1 < len(stages) else None
            compute(stage, arrived)
            del arrived

    def _fetch(self, stage: Stage, kv: Tensor) -> Handle[Arrived]:
        heads = slice(*stage.heads)
        given, taken = self.given(stage), self.taken(stage)
        row = 2 * kv.shape[1] * (stage.heads[1] - stage.heads[0]) * kv.shape[4]
        parts = [kv[:, :, self.here(pieces), heads].reshape(-1) for pieces in given if pieces]
        flat = torch.cat(parts) if parts else kv.new_empty(0)
        sizes, arriving = self._sizes(given, row), self._sizes(taken, row)
        moving = all_to_all(flat, self.axis.group, send_sizes=sizes, receive_sizes=arriving, name="keys and values")
        return Handle(lambda: self.views(moving.wait(), taken, kv.shape, stage))

    def give_back(self, stage: Stage, flat: Tensor, kv: Tensor) -> Callable[[], None]:
        """Starts sending gradients of a stage's pieces to their owner; the result waits, and adds what came to `kv`.

        flat: those gradients as `views` lays them out.  kv: gradients of the own keys and values.
        """
        given, taken = self.given(stage), self.taken(stage)
        row = 2 * kv.shape[1] * (stage.heads[1] - stage.heads[0]) * kv.shape[4]
        sizes, arriving = self._sizes(taken, row), self._sizes(given, row)
        moving = all_to_all(flat, self.axis.group, send_sizes=sizes, receive_sizes=arriving, name="their gradients")

        def add() -> None:
            for pieces, grads in self.views(moving.wait(), given, kv.shape, stage):
                kv[:, :, self.here(pieces), slice(*stage.heads)] += grads

        return add

    def views(self, flat: Tensor, pieces: Sequence[tuple[int, ...]], shape: torch.Size, stage: Stage) -> Arrived:
        """What ranks send, one after another, each [2 B n heads E]."""
        batch, heads, head_dim = shape[1], stage.heads[1] - stage.heads[0], shape[4]
        found, at = [], 0
        for those in filter(None, pieces):
            made = (2, batch, sum(map(self.size, those)), heads, head_dim)
            count = math.prod(made)
            found.append((those, flat[at : at + count].view(made)))
            at += count
        return found

    def total(self, stage: Stage, shape: torch.Size) -> int:
        """Elements that come here in a stage."""
        row = 2 * shape[1] * (stage.heads[1] - stage.heads[0]) * shape[4]
        return sum(self._sizes(self.taken(stage), row))

    def _sizes(self, pieces: Sequence[tuple[int, ...]], row: int) -> list[int]:
        return [row * sum(self.size(piece) for piece in those) for those in pieces]

    def tiles(self, arrived: Arrived, stage: Stage | None, kv_heads: int, num_heads: int, fused: bool) -> list[_Piece]:
        """Every tile between own queries and the pieces that are here, with what it reads.

        fused: a causal tile costs half of what a full one does, so that triangles may grow.
        """
        found: list[_Piece] = []
        heads = stage.heads if stage is not None else (0, kv_heads)
        shared = num_heads // kv_heads
        own = slice(heads[0] * shared, heads[1] * shared)
        for number, (pieces, kv) in enumerate(arrived):
            begin = 0
            for b in pieces:
                for a, at in self.offsets.items():
                    for tile in self.tiling.tiles(a, b):
                        queries = slice(tile.queries[0] - self.cut[a][0] + at, tile.queries[1] - self.cut[a][0] + at)
                        keys = slice(tile.keys[0] - self.cut[b][0] + begin, tile.keys[1] - self.cut[b][0] + begin)
                        found.append(_Piece(tile, number, kv, queries, keys, own))
                begin += self.size(b)
        return found if self.keep is not None else _joined(found, fused)

    def kept(self, piece: _Piece, num_heads: int) -> Tensor | None:
        """What dropout leaves of a tile's probabilities: 0 or 1 / (1 - p), [rows heads queries keys]."""
        if self.keep is None:
            return None
        return self.keep(piece.tile, num_heads)[:, piece.heads] * (1.0 / (1.0 - self.dropout))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tile and where its operands lie: number and tensor of the piece of keys and values, slices, query heads."""

    tile: Tile
    number: int
    kv: Tensor
    queries: slice
    keys: slice
    heads: slice

    def is_all(self, q_BTHE: Tensor) -> bool:
        """Whether these are all queries."""
        batch, length, num_heads = q_BTHE.shape[:3]
        return self.query_index == (slice(0, batch), slice(0, length), slice(0, num_heads))

    @property
    def query_index(self) -> tuple[slice, slice, slice]:
        """Into [B T H ..]."""
        return self.tile.rows, self.queries, self.heads

    @property
    def log_index(self) -> tuple[slice, slice, slice]:
        """Into [B H T]."""
        return self.tile.rows, self.heads, self.queries

    @property
    def key_index(self) -> tuple[slice, slice]:
        """Into [B n K E]."""
        return self.tile.rows, self.keys


def _joined(pieces: Sequence[_Piece], fused: bool) -> list[_Piece]:
    """The same pairs in fewer tiles: full ones side by side, and with `fused` two triangles and what lies under both.

    The ranges of such a tile begin where its first one's do, and are as long as what it reads.
    """
    found: list[_Piece] = []
    for piece in pieces:
        while found and (both := _side_by_side(found[-1], piece)) is not None:
            found.pop()
            piece = both
        found.append(piece)
        if fused and len(found) >= 3 and _is_triangle(*found[-3:]):
            first, _, last = found[-3:]
            found[-3:] = [
                _grown(first, slice(first.queries.start, last.queries.stop), slice(first.keys.start, last.keys.stop))
            ]
    return found


def _grown(piece: _Piece, queries: slice, keys: slice) -> _Piece:
    (t, _), (s, _) = piece.tile.queries, piece.tile.keys
    ranges = (t, t + queries.stop - queries.start), (s, s + keys.stop - keys.start)
    tile = replace(piece.tile, queries=ranges[0], keys=ranges[1])
    return replace(piece, tile=tile, queries=queries, keys=keys)


def _side_by_side(a: _Piece, b: _Piece) -> _Piece | None:
    """One full tile that is two, along queries or along keys; or None."""
    if not _is_alike(a, b) or {a.tile.kind, b.tile.kind} != {"full"}:
        return None
    if a.keys == b.keys and a.queries.stop == b.queries.start:
        return _grown(a, slice(a.queries.start, b.queries.stop), a.keys)
    if a.queries == b.queries and a.keys.stop == b.keys.start:
        return _grown(a, a.queries, slice(a.keys.start, b.keys.stop))
    return None


def _is_triangle(a: _Piece, b: _Piece, c: _Piece) -> bool:
    """Whether they are a triangle, all pairs of the queries after it with its keys, and the next triangle."""
    kinds = [piece.tile.kind for piece in (a, b, c)]
    under = b.keys == a.keys and b.queries == c.queries
    after = a.queries.stop == c.queries.start and a.keys.stop == c.keys.start
    return kinds == ["causal", "full", "causal"] and _is_alike(a, b) and _is_alike(b, c) and under and after


def _is_alike(a: _Piece, b: _Piece) -> bool:
    """Whether they are of the same rows and heads, and of keys that lie together."""
    return (a.number, a.heads, a.tile.rows) == (b.number, b.heads, b.tile.rows)


class _Attend(torch.autograd.Function):
    """(q_BTHE, k_BTKE, v_BTKE) of the positions held here, and sinks_H or None -> [B T H E], by ring or gather.

    A sink joins the others' result as keys do, once, after them; its gradient is that of the queries held here.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: Blocks) -> Tensor:
        num_heads, kv_heads = q.shape[2], k.shape[2]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = logs = torch.empty(0)

        def compute(stage: Stage | None, arrived: Arrived) -> None:
            nonlocal out, logs
            pieces = work.tiles(arrived, stage, kv_heads, num_heads, is_fused(q))
            alone = stage is None and len(pieces) == 1 and pieces[0].is_all(q)
            if stage is None and not alone:
                out = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
                logs = out.new_full((q.shape[0], num_heads, q.shape[1]), float("-inf"))
            for piece in pieces:
                keys, values = piece.kv[0][piece.key_index], piece.kv[1][piece.key_index]
                keep = work.kept(piece, num_heads)
                made, log = forward(q[piece.query_index], keys, values, work.tiling.mask(piece.tile), keep)
                if alone:
                    out, logs = made.to(wide), log
                else:
                    merge(out[piece.query_index], logs[piece.log_index], made, log)

        work.circulate(torch.stack((k, v)), compute)
        if sinks is not None:
            sink(out, logs, sinks)
        ctx.work = work
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, logs, sinks)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs, sinks = ctx.saved_tensors
        work, num_heads, kv_heads = ctx.work, q.shape[2], k.shape[2]
        kv = torch.stack((k, v))
        grad_q = torch.zeros_like(q, dtype=logs.dtype, memory_format=torch.contiguous_format)
        grad_kv = torch.zeros_like(kv, dtype=logs.dtype)
        returning: list[Callable[[], None]] = []

        @functools.cache
        def delta() -> Tensor:
            product: Tensor = grad.to(logs.dtype) * out.to(logs.dtype)
            return product.sum(dim=-1).transpose(1, 2)  # [B H T]

        def compute(stage: Stage | None, arrived: Arrived) -> None:
            if stage is None:
                places = work.own(grad_kv)
            else:
                flat = grad_kv.new_zeros(work.total(stage, kv.shape))
                places = work.views(flat, work.taken(stage), kv.shape, stage)
            for piece in work.tiles(arrived, stage, kv_heads, num_heads, is_fused(q)):
                keys, values = piece.kv[0][piece.key_index], piece.kv[1][piece.key_index]
                index, log_index, place = piece.query_index, piece.log_index, places[piece.number][1]
                mask, keep = work.tiling.mask(piece.tile), work.kept(piece, num_heads)
                rest = None if is_one_kernel(q, mask, keep) else delta()[log_index]
                made = backward(grad[index], q[index], keys, values, out[index], logs[log_index], rest, mask, keep)
                grad_q[index] += made[0]
                place[0][piece.key_index] += made[1]
                place[1][piece.key_index] += made[2]
            for add in returning:
                add()
            returning[:] = [work.give_back(stage, flat, grad_kv)] if stage is not None else []

        work.circulate(kv, compute)
        for add in returning:
            add()
        of_sinks = None if sinks is None else sink_gradient(logs, delta(), sinks)
        return grad_q.to(q.dtype), grad_kv[0].to(k.dtype), grad_kv[1].to(v.dtype), of_sinks, None


# --- heads dealt out -------------------------------------------------------------------------------------------------


def deal(x_BTHE: Tensor, axis: SequenceAxis, ranges: Sequence[plan.Range]) -> Tensor:
    """Own positions of all heads -> all positions, in order, of this rank's range of heads: [B T H E]."""
    group, counts = axis.group, axis.counts()
    own = slice(*ranges[group.rank])
    batch, head_dim = x_BTHE.shape[0], x_BTHE.shape[3]
    parts = [x_BTHE[:, :, slice(*there)].reshape(-1) for there in ranges]
    sizes, width = [part.numel() for part in parts], batch * (own.stop - own.start) * head_dim
    arriving = [count * width for count in counts]
    flat = all_to_all(torch.cat(parts), group, send_sizes=sizes, receive_sizes=arriving, name="deal heads").wait()
    made = x_BTHE.new_empty(batch, axis.length, own.stop - own.start, head_dim)
    for rank, part in enumerate(flat.split(arriving)):
        made[:, axis.all_columns[rank]] = part.view(batch, counts[rank], -1, head_dim)
    return made


def collect(x_BTHE: Tensor, axis: SequenceAxis, ranges: Sequence[plan.Range], num_heads: int) -> Tensor:
    """The way back: a head that several ranks had is the sum of theirs, in fp32, in the order of ranks."""
    group, counts = axis.group, axis.counts()
    batch, head_dim, here = x_BTHE.shape[0], x_BTHE.shape[3], counts[group.rank]
    parts = [x_BTHE[:, columns_T].reshape(-1) for columns_T in axis.all_columns]
    sizes = [part.numel() for part in parts]
    arriving = [batch * here * (high - low) * head_dim for low, high in ranges]
    flat = all_to_all(torch.cat(parts), group, send_sizes=sizes, receive_sizes=arriving, name="collect heads").wait()
    wide = torch.promote_types(x_BTHE.dtype, torch.float32)
    made = x_BTHE.new_zeros(batch, here, num_heads, head_dim, dtype=wide)
    for heads, part in zip(ranges, flat.split(arriving), strict=True):
        made[:, :, slice(*heads)] += part.view(batch, here, -1, head_dim)
    return made.to(x_BTHE.dtype)


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: SequenceAxis, ranges: Any) -> tuple[Tensor, ...]:
        ctx.axis, ctx.ranges, ctx.heads = axis, ranges, (q.shape[2], k.shape[2])
        queries, keys = [own for own, _ in ranges], [shared for _, shared in ranges]
        return deal(q, axis, queries), deal(k, axis, keys), deal(v, axis, keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys = [own for own, _ in ctx.ranges], [shared for _, shared in ctx.ranges]
        num_heads, kv_heads = ctx.heads
        of_q = collect(q, ctx.axis, queries, num_heads)
        return of_q, *(collect(x, ctx.axis, keys, kv_heads) for x in (k, v)), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, axis: SequenceAxis, ranges: Any) -> Tensor:
        ctx.axis, ctx.ranges = axis, ranges
        return collect(out, axis, ranges, ranges[-1][1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return deal(grad, ctx.axis, ctx.ranges), None, None
