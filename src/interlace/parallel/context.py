"""The context axis of a decoder: each sequence split over `cp`, attention to keys that other ranks hold.

Equals, in plain collectives, an all-gather of keys and values before attention and a reduce-scatter of their gradients
behind it.  Sequences lie in the layout "T/cp~", so that causal attention is even.  Three exchanges:

    ring      keys and values of one other rank at a time, straight from their owner, while those of the one before are
              attended to; at most two ranks' are here at once                     (Liu et al., arXiv 2310.01889)
    gather    those of all other ranks, some key-value heads at a time, while the heads before are attended to
    ulysses   heads are dealt out: every rank attends to the whole sequence with some of them
                                                                                   (Jacobs et al., arXiv 2309.14509)

Ring and gather go block by block (`parallel.circulate`).  Ulysses runs the model's own attention in between, whatever
its mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from interlace import random
from interlace.collectives import all_gather, sum_scalars
from interlace.parallel.blocks import Tile, Tiling
from interlace.parallel.circulate import Attend, Blocks
from interlace.parallel.sequence import SequenceAxis
from interlace.plan import context as plan


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

    @cached_property
    def blocks(self) -> Blocks:
        """Of every layer without dropout."""
        assert self.tiling is not None, "prepare() first"
        return Blocks(self.axis, self.tiling)

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
        work = Blocks(self.axis, pattern.tiling, self._keep(context), self.inner.dropout) if drops else pattern.blocks
        attended: Tensor = Attend.apply(q_BTHE, k_BTKE, v_BTKE, sinks_H, work)  # type: ignore[no-untyped-call]
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


# --- heads dealt out -------------------------------------------------------------------------------------------------


Heads = Sequence[plan.Range]  # of each rank


def deal(xs_BTHE: Sequence[Tensor], axis: SequenceAxis, heads: Sequence[Heads]) -> list[Tensor]:
    """Own positions of all heads -> all positions, in order, of this rank's heads: of each tensor [B T H E].

    heads: of each tensor.
    """
    own, counts = axis.group.rank, axis.counts()
    pairs = list(zip(xs_BTHE, heads, strict=True))
    leaving = [[x[:, :, slice(*of[rank])] for x, of in pairs] if rank != own else [] for rank in range(len(counts))]
    rows = _rows(pairs, own)
    arriving = [sum(rows) * count if rank != own else 0 for rank, count in enumerate(counts)]
    parts = _exchange(pairs, axis, leaving, arriving, "deal heads")
    found = [x.new_empty(x.shape[0], axis.length, of[own][1] - of[own][0], x.shape[3]) for x, of in pairs]
    for rank, count in enumerate(counts):
        flat = parts[rank].split([row * count for row in rows]) if rank != own else None
        for number, (made, (x, of)) in enumerate(zip(found, pairs, strict=True)):
            part = x[:, :, slice(*of[own])] if flat is None else flat[number].view(len(x), count, *made.shape[2:])
            at = 0
            for start, stop in axis.spans(rank):
                made[:, start:stop] = part[:, at : at + stop - start]
                at += stop - start
    return found


def collect(
    xs_BTHE: Sequence[Tensor], axis: SequenceAxis, heads: Sequence[Heads], num_heads: Sequence[int]
) -> list[Tensor]:
    """The way back: a head that several ranks had is the sum of theirs, in fp32, in the order of ranks.

    heads, num_heads: of each tensor.
    """
    own, counts, spans = axis.group.rank, axis.counts(), axis.spans()
    pairs = list(zip(xs_BTHE, heads, strict=True))
    held = [[x[:, slice(*span)] for x in xs_BTHE for span in axis.spans(rank)] for rank in range(len(counts))]
    leaving = [parts if rank != own else [] for rank, parts in enumerate(held)]
    rows = [_rows(pairs, rank) for rank in range(len(counts))]
    arriving = [sum(each) * counts[own] if rank != own else 0 for rank, each in enumerate(rows)]
    parts = _exchange(pairs, axis, leaving, arriving, "collect heads")
    found, sums = [], []
    for (x, of), whole in zip(pairs, num_heads, strict=True):
        shape, wide = (len(x), counts[own], whole, x.shape[3]), torch.promote_types(x.dtype, torch.float32)
        sums.append(sum(high - low for low, high in of) > whole)  # some head was at two ranks
        found.append(x.new_zeros(shape, dtype=wide) if sums[-1] else x.new_empty(shape))
    for rank, flat in enumerate(parts):
        sizes = [row * (stop - start) for row in rows[rank] for start, stop in spans]
        each = iter(held[own] if rank == own else flat.split(sizes))
        for made, is_sum, (_, of) in zip(found, sums, pairs, strict=True):
            at = 0
            for start, stop in spans:
                into = made[:, at : at + stop - start, slice(*of[rank])]
                part = next(each).view(into.shape)
                into.add_(part) if is_sum else into.copy_(part)
                at += stop - start
    return [made.to(x.dtype) for made, x in zip(found, xs_BTHE, strict=True)]


Pairs = Sequence[tuple[Tensor, Heads]]


def _rows(pairs: Pairs, rank: int) -> list[int]:
    """Of each tensor the elements of one position of all sequences, heads of that rank."""
    return [len(x) * (of[rank][1] - of[rank][0]) * x.shape[3] for x, of in pairs]


def _exchange(
    pairs: Pairs, axis: SequenceAxis, leaving: Sequence[Sequence[Tensor]], arriving: Sequence[int], name: str
) -> list[Tensor]:
    first, counts = pairs[0][0], axis.counts()
    most = max(counts) * max(sum(_rows(pairs, rank)) for rank in range(len(counts))) * first.itemsize
    return axis.exchange_parts(leaving, arriving, first.dtype, most=most, name=name).wait()


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: SequenceAxis, ranges: Any) -> tuple[Tensor, ...]:
        queries, keys = [own for own, _ in ranges], [shared for _, shared in ranges]
        ctx.axis, ctx.heads, ctx.num_heads = axis, (queries, keys, keys), [x.shape[2] for x in (q, k, v)]
        return tuple(deal((q, k, v), axis, ctx.heads))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *collect(grads, ctx.axis, ctx.heads, ctx.num_heads), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, axis: SequenceAxis, ranges: Any) -> Tensor:
        ctx.axis, ctx.ranges = axis, ranges
        return collect([out], axis, [ranges], [ranges[-1][1]])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return deal([grad], ctx.axis, [ctx.ranges])[0], None, None
