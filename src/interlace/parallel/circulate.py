"""Attention to keys that other ranks of the context axis hold: ring and gather, stage by stage.

Equals the model's attention over the keys of all ranks.  It goes block by block (`parallel.blocks`): outputs and
log-sums are joined in fp32; gradients of keys and values travel to their owner and are added there, in fp32 and in one
order.  Blocks that the mask leaves empty are not sent and not computed; every rank knows all documents, so all agree on
them without a word.  Tiles side by side are one call of a kernel: of plain causal attention one for what a rank sends,
and one for its own.  Keys and values are fetched again in backward, not kept.

Two results of kernels are one join or one addition, rounded once: no buffer of zeros, none in fp32 before them
(`blocks.Joined`, `blocks.Total`).  Gradients of plain causal attention in half precision, where one tile makes all that
goes to an owner, travel as the tile made them (`plan.context.returned`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Handle, Meter
from interlace.parallel.blocks import (
    Joined,
    Tile,
    Tiling,
    Total,
    backward,
    forward,
    is_fused,
    is_one_kernel,
    sink,
    sink_gradient,
)
from interlace.parallel.sequence import SequenceAxis
from interlace.plan import context as plan
from interlace.plan.context import Stage
from interlace.streams import On, current

Pair = Sequence[Tensor] | Tensor  # keys and values, each [B n K E]
Arrived = list[tuple[tuple[int, ...], Pair]]  # of some pieces, one after another
KV = tuple[Tensor, Tensor]
Behind = Callable[[Callable[[], None]], None]  # runs a call now, or behind what was computed before
Compute = Callable[[Stage | None, Arrived, Behind], None]


class Beside:
    """`with beside:` runs what follows on a side stream, and the compute stream waits for its end.

    The side stream begins where the compute stream was at `begin`.  Tiles on it fill multiprocessors that those of the
    compute stream leave idle at their end, and by its greater priority they are done first, so that what they make can
    leave while others run.
    """

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter, self._compute, self._side = meter, current(device), _side_stream(device)

    def begin(self) -> None:
        self._since = torch.cuda.Event()
        self._since.record(self._compute)

    def __enter__(self) -> None:
        self._side.wait_event(self._since)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._meter.beside(self._compute))
        self._stack.enter_context(On(self._side))

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._compute.wait_stream(self._side)


def _at_once(call: Callable[[], None]) -> None:
    call()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


class Blocks:
    """Attention by blocks, of layers with one mask: what travels when, and which tiles are computed."""

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
        self._stages: dict[int, list[Stage]] = {}
        self._moves: dict[tuple[tuple[int, ...], bool], list[tuple[int, ...]]] = {}
        self._tiles: dict[tuple[Stage | None, int, int, bool], list[_Piece]] = {}

    def size(self, piece: int) -> int:
        return self.cut[piece][1] - self.cut[piece][0]

    def wanted(self, receiver: int, source: int) -> tuple[int, ...]:
        return plan.wanted(self.tiling.blocks, self.axis.group.size, receiver, source)

    def stages(self, kv_heads: int) -> list[Stage]:
        """Those in which anything travels: the same on every rank."""
        if kv_heads not in self._stages:
            ways = self.axis.group.size
            self._stages[kv_heads] = [
                stage
                for stage in plan.stages(self.axis.exchange, ways, kv_heads)
                if any(self.wanted((rank + d) % ways, rank) for rank in range(ways) for d in stage.distances)
            ]
        return self._stages[kv_heads]

    def here(self, pieces: Sequence[int]) -> slice:
        """Where pieces that are held here and lie side by side stand."""
        return slice(self.offsets[pieces[0]], self.offsets[pieces[-1]] + self.size(pieces[-1]))

    def given(self, stage: Stage) -> list[tuple[int, ...]]:
        """For every rank the own pieces that it takes in this stage."""
        return self._moved(stage.distances, True)

    def taken(self, stage: Stage) -> list[tuple[int, ...]]:
        """For every rank its pieces that come here in this stage."""
        return self._moved(stage.distances, False)

    def _moved(self, distances: tuple[int, ...], gives: bool) -> list[tuple[int, ...]]:
        if (distances, gives) not in self._moves:
            group, found = self.axis.group, list[tuple[int, ...]]()
            near = {(group.rank + (distance if gives else -distance)) % group.size for distance in distances}
            for peer in range(group.size):
                pair = (peer, group.rank) if gives else (group.rank, peer)
                found.append(self.wanted(*pair) if peer in near else ())
            self._moves[distances, gives] = found
        return self._moves[distances, gives]

    @cached_property
    def receivers(self) -> int:
        """Ranks that take any of the own pieces."""
        group = self.axis.group
        return sum(bool(self.wanted(peer, group.rank)) for peer in range(group.size) if peer != group.rank)

    @property
    def is_plain(self) -> bool:
        """Whether one tile makes all gradients that go to an owner in a stage."""
        tiling = self.tiling
        return plan.is_plain(tiling.length, tiling.window, tiling.documents_BT is not None, self.keep is not None)

    def beside(self, q_BTHE: Tensor, kv_heads: int) -> Beside | None:
        """A side stream for others' pieces where all tiles are kernels and transfers may run beside them."""
        meter, num_heads = self.axis.group.meter, q_BTHE.shape[2]
        if meter.at_once or self.keep is not None or not (q_BTHE.is_cuda and is_fused(q_BTHE)):
            return None
        stages = [None, *self.stages(kv_heads)]
        tiles = (piece.tile for stage in stages for piece in self.tiles(stage, kv_heads, num_heads, True))
        return None if any(tile.kind == "mask" for tile in tiles) else Beside(meter, q_BTHE.device)

    def circulate(self, kv: KV, compute: Compute, beside: Beside | None = None) -> None:
        """Calls `compute` for the own pieces (None), then for those of each stage, the next being under way meanwhile.

        kv: keys and values, this rank's, [B T K E].  No more than two stages' are here at once.  beside: others' pieces
        run there; what `compute` gives to its last argument runs behind all that was computed before.
        """
        stages = self.stages(kv[0].shape[2])
        moving = self._fetch(stages[0], kv) if stages else None
        if beside is not None:
            beside.begin()
        compute(None, [(self.axis.places, kv)], _at_once)
        for number, stage in enumerate(stages):
            assert moving is not None
            behind: list[Callable[[], None]] = []
            with beside or contextlib.nullcontext():
                arrived = moving.wait()
                moving = self._fetch(stages[number + 1], kv) if number + 1 < len(stages) else None
                compute(stage, arrived, _at_once if beside is None else behind.append)
            while behind:  # none is kept, nor what it reads, while the next stage runs
                behind.pop(0)()
            del arrived
            if beside is not None:
                beside.begin()

    def _fetch(self, stage: Stage, kv: KV) -> Handle[Arrived]:
        heads, given = slice(*stage.heads), self.given(stage)
        leaving = [[x[:, self.here(pieces), heads] for x in kv] if pieces else [] for pieces in given]
        return self._exchange(stage, leaving, self.taken(stage), kv[0].shape, kv[0].dtype, "keys and values")

    def give_back(
        self,
        stage: Stage,
        made: Sequence[Sequence[Tensor]],
        shape: torch.Size,
        dtype: torch.dtype,
        add: Callable[[Stage, Arrived], None],
    ) -> Callable[[], None]:
        """Starts sending gradients of a stage's pieces to their owners; the result waits, and `add`s what came here.

        made: of each rank whose pieces are here, in order, those of keys and of values, [B n heads E] of `dtype`.
        shape: of own keys.
        """
        each = iter(made)
        leaving = [next(each) if pieces else [] for pieces in self.taken(stage)]
        moving = self._exchange(stage, leaving, self.given(stage), shape, dtype, "their gradients")
        return lambda: add(stage, moving.wait())

    def _exchange(
        self,
        stage: Stage,
        leaving: Sequence[Sequence[Tensor]],
        arriving: Sequence[tuple[int, ...]],
        shape: torch.Size,
        dtype: torch.dtype,
        name: str,
    ) -> Handle[Arrived]:
        batch, heads, head_dim = shape[0], stage.heads[1] - stage.heads[0], shape[3]
        held, row = [sum(map(self.size, those)) for those in arriving], 2 * batch * heads * head_dim
        widest = max(dtype.itemsize, plan.returned(dtype.itemsize, self.is_plain))  # in both directions
        most = row * max(self.axis.counts()) * widest
        moving = self.axis.exchange_parts(leaving, [row * n for n in held], dtype, most=most, name=name)

        def views() -> Arrived:
            found = zip(arriving, held, moving.wait(), strict=True)
            return [(those, flat.view(2, batch, n, heads, head_dim)) for those, n, flat in found if those]

        return Handle(views)

    def tiles(self, stage: Stage | None, kv_heads: int, num_heads: int, fused: bool) -> list[_Piece]:
        """Every tile between own queries and the pieces of a stage (None: the own), with what it reads.

        fused: a causal tile costs half of what a full one does, so that triangles may grow.
        """
        key = stage, kv_heads, num_heads, fused
        if key not in self._tiles:
            arriving = [self.axis.places] if stage is None else [those for those in self.taken(stage) if those]
            heads = stage.heads if stage is not None else (0, kv_heads)
            shared = num_heads // kv_heads
            found = list(self._of_pieces(arriving, slice(heads[0] * shared, heads[1] * shared)))
            self._tiles[key] = found if self.keep is not None else _joined(found, fused)
        return self._tiles[key]

    def count(self, kv_heads: int, num_heads: int, fused: bool) -> int:
        """Tiles of all stages."""
        stages = [None, *self.stages(kv_heads)]
        return sum(len(self.tiles(stage, kv_heads, num_heads, fused)) for stage in stages)

    def _of_pieces(self, arriving: Sequence[tuple[int, ...]], heads: slice) -> Iterator[_Piece]:
        for number, pieces in enumerate(arriving):
            begin = 0
            for b in pieces:
                for a, at in self.offsets.items():
                    for tile in self.tiling.tiles(a, b):
                        queries = slice(tile.queries[0] - self.cut[a][0] + at, tile.queries[1] - self.cut[a][0] + at)
                        keys = slice(tile.keys[0] - self.cut[b][0] + begin, tile.keys[1] - self.cut[b][0] + begin)
                        yield _Piece(tile, number, queries, keys, heads)
                begin += self.size(b)

    def kept(self, piece: _Piece, num_heads: int) -> Tensor | None:
        """What dropout leaves of a tile's probabilities: 0 or 1 / (1 - p), [rows heads queries keys]."""
        if self.keep is None:
            return None
        return self.keep(piece.tile, num_heads)[:, piece.heads] * (1.0 / (1.0 - self.dropout))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tile and where its operands lie: the number of what arrived, slices, query heads."""

    tile: Tile
    number: int
    queries: slice
    keys: slice
    heads: slice

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


class Attend(torch.autograd.Function):
    """(q_BTHE, k_BTKE, v_BTKE) of the positions held here, and sinks_H or None -> [B T H E], by ring or gather.

    A sink joins the others' result as keys do, once, after them; its gradient is that of the queries held here.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: Blocks) -> Tensor:
        num_heads, kv_heads, fused = q.shape[2], k.shape[2], is_fused(q)
        joined = Joined(q, work.count(kv_heads, num_heads, fused) - (sinks is None))

        def compute(stage: Stage | None, arrived: Arrived, behind: Behind) -> None:
            for piece in work.tiles(stage, kv_heads, num_heads, fused):
                keys, values = (x[piece.key_index] for x in arrived[piece.number][1])
                keep = work.kept(piece, num_heads)
                made = forward(q[piece.query_index], keys, values, work.tiling.mask(piece.tile), keep)
                behind(functools.partial(joined.add, piece.query_index, *made))

        work.circulate((k, v), compute, work.beside(q, kv_heads))
        out, logs = joined.result()
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
        work, num_heads, kv_heads, fused = ctx.work, q.shape[2], k.shape[2], is_fused(q)
        wide, travelling = logs.dtype, plan.returned(q.dtype.itemsize, work.is_plain)
        grad_q = Total(q, wide, work.count(kv_heads, num_heads, fused) - 1)
        later = len(work.tiles(None, kv_heads, num_heads, fused)) - 1 + work.receivers
        grad_kv = [Total(x, wide, later) for x in (k, v)]
        returning: list[Callable[[], None]] = []

        @functools.cache
        def delta() -> Tensor:
            product: Tensor = grad.to(wide) * out.to(wide)
            return product.sum(dim=-1).transpose(1, 2)  # [B H T]

        def add(stage: Stage, arrived: Arrived) -> None:
            for pieces, grads in arrived:
                index = slice(None), work.here(pieces), slice(*stage.heads)
                for total, x in zip(grad_kv, grads, strict=True):
                    total.add(index, x)

        def compute(stage: Stage | None, arrived: Arrived, behind: Behind) -> None:
            pieces = work.tiles(stage, kv_heads, num_heads, fused)
            leaving = [grad_kv]
            if stage is not None:  # what several tiles make is rounded by the owner alone
                later = 0 if len(pieces) == 1 else 2
                leaving = [[Total(x, wide, later) for x in pair] for _, pair in arrived]
            for piece in pieces:
                keys, values = (x[piece.key_index] for x in arrived[piece.number][1])
                index, log_index = piece.query_index, piece.log_index
                mask, keep = work.tiling.mask(piece.tile), work.kept(piece, num_heads)
                rest = None if is_one_kernel(q, mask, keep) else delta()[log_index]
                made = backward(grad[index], q[index], keys, values, out[index], logs[log_index], rest, mask, keep)
                behind(functools.partial(grad_q.add, index, made[0]))
                for total, x in zip(leaving[piece.number], made[1:], strict=True):
                    total.add(piece.key_index, x)
            for finish in returning:
                behind(finish)
            returning.clear()
            if stage is not None:
                kind = wide if travelling > q.dtype.itemsize else q.dtype
                made_here = [[total.result().to(kind) for total in pair] for pair in leaving]
                returning.append(work.give_back(stage, made_here, k.shape, kind, add))

        work.circulate((k, v), compute, work.beside(q, kv_heads))
        for finish in returning:
            finish()
        of_sinks = None if sinks is None else sink_gradient(logs, delta(), sinks)
        return grad_q.result().to(q.dtype), *(x.result().to(k.dtype) for x in grad_kv), of_sinks, None
