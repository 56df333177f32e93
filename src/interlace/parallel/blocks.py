"""Attention of a tile: some queries on some keys, with the logarithm of its sum, so that tiles can be joined.

`forward` equals softmax(q k^T / sqrt(E) + mask) v over the keys of the tile alone, `merge` joins two such results as
if all keys had been there at once, and `backward` is the tile's part of the gradients, given the log-sum over all keys
(Dao, arXiv 2307.08691).  Everything is in fp32 (fp64 for fp64).

A block between two pieces is cut into tiles document by document and where nothing is seen is left out, so that most
tiles are full or a plain causal triangle.  Those run PyTorch's flash attention where it can: half precision on CUDA.
Others, and every tile on a CPU, are written out, a few queries at a time: never the scores of a whole sequence.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from interlace.plan import context as plan
from interlace.plan.context import Range

aten = torch.ops.aten
SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # of a tile that are in memory at a time
BAND = 64  # queries that a window's tiles have at least


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys, [start, stop) in their sequence, of some rows of the batch; kind "full", "causal", "mask"."""

    rows: slice
    queries: Range
    keys: Range
    kind: str


@dataclass(frozen=True, eq=False)
class Mask:
    """Which pairs of a tile see each other: a causal triangle, or [rows queries keys] booleans made when needed."""

    kind: str
    queries: Range
    keys: Range
    window: int | None
    documents_RT: Tensor | None
    leading_RT: Tensor | None  # where positions are that a window does not hide
    device: torch.device

    def of(self, start: int, stop: int) -> Tensor | None:
        """Of some queries, counted from the tile's first: bool [rows or 1, queries, keys]; None: all is seen."""
        if self.kind == "full":
            return None
        first = self.queries[0]
        t = torch.arange(first + start, first + stop, device=self.device)
        s = torch.arange(*self.keys, device=self.device)
        back = t[:, None] - s[None, :]
        found = (back >= 0)[None]
        if self.kind == "mask" and self.window is not None:
            near = back < self.window
            found = found & (near if self.leading_RT is None else near | self.leading_RT[:, None, slice(*self.keys)])
        if self.kind == "mask" and self.documents_RT is not None:
            theirs = self.documents_RT
            found = found & (theirs[:, first + start : first + stop, None] == theirs[:, None, slice(*self.keys)])
        return found


class Tiling:
    """The blocks of a micro-batch that are not empty, cut into tiles.  `pattern`: that of the whole sequences."""

    def __init__(self, length: int, ways: int, pattern: Any) -> None:
        self.length = length
        self.cut = plan.pieces(length, ways)
        self.batch: int = pattern.batch
        self.window: int | None = pattern.window
        self.device: torch.device = pattern.device
        self.documents_BT: Tensor | None = pattern.documents_BT
        self.sink_tokens: int = pattern.sink_tokens
        self.leading_BT: Tensor | None = pattern.leading_BT  # of one row where rows do not differ
        self.starts = None if self.documents_BT is None else _starts(self.documents_BT)
        self.blocks = plan.seen(length, ways, self.window, self.starts, self.sink_tokens)
        self._tiles: dict[Range, list[Tile]] = {}

    def tiles(self, a: int, b: int) -> list[Tile]:
        """Tiles of the block of queries `a` and keys `b`."""
        if (a, b) not in self.blocks:
            return []
        if (a, b) not in self._tiles:
            self._tiles[a, b] = list(self._make(self.cut[a], self.cut[b]))
        return self._tiles[a, b]

    def mask(self, tile: Tile) -> Mask:
        if tile.kind != "mask":
            return Mask(tile.kind, tile.queries, tile.keys, None, None, None, self.device)
        documents_RT = None if self._on_device is None else self._on_device[tile.rows]
        leading_RT = self.leading_BT
        if leading_RT is not None and len(leading_RT) > 1:
            leading_RT = leading_RT[tile.rows]
        return Mask(tile.kind, tile.queries, tile.keys, self.window, documents_RT, leading_RT, self.device)

    @cached_property
    def _on_device(self) -> Tensor | None:
        return None if self.documents_BT is None else self.documents_BT.to(self.device)

    def _make(self, queries: Range, keys: Range) -> Iterator[Tile]:
        if self.starts is None:
            yield from self._of_run(slice(0, self.batch), queries, keys, 0)
            return
        for row, starts in enumerate(self.starts):
            rows = slice(row, row + 1)
            if starts is None:  # a document in several pieces: only its numbers tell
                yield Tile(rows, queries, keys, "mask")
                continue
            low = max(bisect_right(starts, max(queries[0], keys[0])) - 1, 0)
            for number in range(low, bisect_left(starts, min(queries[1], max(keys[1], queries[0] + 1)))):
                stop = starts[number + 1] if number + 1 < len(starts) else self.length
                run = starts[number], stop
                yield from self._of_run(rows, _common(queries, run), _common(keys, run), run[0])

    def _of_run(self, rows: slice, queries: Range, keys: Range, start: int) -> Iterator[Tile]:
        """The tiles of pairs inside one document, which begins at `start`: its first keys have no window."""
        sunk = start + self.sink_tokens
        yield from self._cut(rows, queries, _common(keys, (start, sunk)), None)
        yield from self._cut(rows, queries, _common(keys, (sunk, self.length)), self.window)

    def _cut(self, rows: slice, queries: Range, keys: Range, window: int | None) -> Iterator[Tile]:
        """The tile, without queries and keys that see nothing, or none."""
        (q0, q1), (k0, k1) = queries, keys
        q0, k1 = max(q0, k0), min(k1, q1)
        if window is not None:
            k0, q1 = max(k0, q0 - window + 1), min(q1, k1 - 1 + window)
        if q0 >= q1 or k0 >= k1:
            return
        narrow = window is not None and q1 - 1 - k0 >= window
        step = max(window or 0, BAND)
        if narrow and q1 - q0 > step:  # in bands, each of which leaves out the keys that none of it sees
            for start in range(q0, q1, step):
                yield from self._cut(rows, (start, min(start + step, q1)), (k0, k1), window)
        elif not narrow and k1 - 1 <= q0:
            yield Tile(rows, (q0, q1), (k0, k1), "full")
        elif not narrow and (q0, q1) == (k0, k1):
            yield Tile(rows, (q0, q1), (k0, k1), "causal")
        else:
            yield Tile(rows, (q0, q1), (k0, k1), "mask")


def _common(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), min(a[1], b[1])


def _starts(documents_BT: Tensor) -> list[list[int] | None]:
    """Of each row the first positions of its documents; None where a document may lie in several pieces."""
    step = documents_BT.diff(dim=1).cpu()
    return [None if bool((row < 0).any()) else [0, *(row.nonzero().flatten() + 1).tolist()] for row in step]


# --- one tile --------------------------------------------------------------------------------------------------------


def forward(
    q_BTHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Mask, kept_BHTS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tile's output [B T H E], fp32 or as a kernel made it, and its log-sum [B H T], fp32; 0 and -inf for a query
    that sees none of the keys.

    kept_BHTS: factors of the probabilities (dropout).
    """
    if is_one_kernel(q_BTHE, mask, kept_BHTS):
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BSKE, v_BSKE))
        is_causal = mask.kind == "causal"
        if _cudnn_runs(q_BTHE):
            made = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
            return made[0].transpose(1, 2), made[1].squeeze(-1)
        made = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
        return made[0].transpose(1, 2), made[1]
    wide = torch.promote_types(q_BTHE.dtype, torch.float32)
    k, v = (x.transpose(1, 2).to(wide) for x in (k_BSKE, v_BSKE))
    outs, logs = [], []
    for start, stop in _pieces(q_BTHE, k_BSKE):
        scores = _scores(q_BTHE[:, start:stop].to(wide), k, mask.of(start, stop))
        most = scores.amax(dim=-1, keepdim=True)
        most = most.masked_fill(most == float("-inf"), 0.0)
        weights = (scores - most).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        logs.append((total.log() + most).squeeze(-1))
        weights = weights / total.masked_fill(total == 0.0, 1.0)
        if kept_BHTS is not None:
            weights = weights * kept_BHTS[:, :, start:stop]
        outs.append(_ungrouped(_grouped(weights, k.shape[1]) @ v, q_BTHE.shape[2]))
    return torch.cat(outs, dim=2).transpose(1, 2), torch.cat(logs, dim=2)


def merge(out_BTHE: Tensor, logs_BHT: Tensor, other_BTHE: Tensor, their_logs_BHT: Tensor) -> None:
    """Joins the results of other keys to `out` and `logs`, in place."""
    if out_BTHE.is_cuda and logs_BHT.dtype == torch.float32:
        from interlace.kernels.join import join  # needs Triton

        join(out_BTHE, logs_BHT, other_BTHE, their_logs_BHT)
        return
    both = torch.logaddexp(logs_BHT, their_logs_BHT)
    nothing = both == float("-inf")
    own, theirs = (
        (logs - both).exp().masked_fill(nothing, 0.0).transpose(1, 2)[..., None] for logs in (logs_BHT, their_logs_BHT)
    )
    out_BTHE.copy_(out_BTHE * own + other_BTHE * theirs)
    logs_BHT.copy_(both)


Index = tuple[slice, ...]


class Joined:
    """The results of tiles as they come, joined by `merge`: output [B T H E] and log-sums [B H T].

    In fp32, but where the first tile has all queries and at most one more follows: then what the first one's kernel
    made is joined in place, and rounded once as it would be at the end.  later: joins that follow the first tile.
    """

    def __init__(self, q_BTHE: Tensor, later: int) -> None:
        self._like, self._later = q_BTHE, later
        self._made: tuple[Tensor, Tensor] | None = None

    def add(self, index: Index, out_BTHE: Tensor, logs_BHT: Tensor) -> None:
        """index: the queries and heads, into [B T H ..]."""
        wide = logs_BHT.dtype
        if self._made is None and _is_all(index, self._like):
            self._made = out_BTHE if self._later <= 1 else out_BTHE.to(wide), logs_BHT
            return
        out, logs = self.result(wide)
        rows, queries, heads = index
        merge(out[index], logs[rows, heads, queries], out_BTHE, logs_BHT)

    def result(self, wide: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """As it is now; queries without a tile see nothing."""
        if self._made is None:
            wide = wide or torch.promote_types(self._like.dtype, torch.float32)
            out = torch.zeros_like(self._like, dtype=wide, memory_format=torch.contiguous_format)
            self._made = out, out.new_full((out.shape[0], out.shape[2], out.shape[1]), float("-inf"))
        return self._made


class Total:
    """A sum of parts as they come, each of some of the elements.

    In fp32 (`wide`), but where the first part is all and at most one more is added to any element: then that part is
    kept as its kernel made it, and the other added in place, which rounds once, as it would at the end.
    later: parts that any element gets after the first.
    """

    def __init__(self, like: Tensor, wide: torch.dtype, later: int) -> None:
        self._like, self._wide, self._later = like, wide, later
        self._sum: Tensor | None = None

    def add(self, index: Index, part: Tensor) -> None:
        if self._sum is None and _is_all(index, self._like):
            self._sum = part if self._later <= 1 else part.to(self._wide)
            return
        self.result()[index] += part

    def result(self) -> Tensor:
        """As it is now."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=self._wide, memory_format=torch.contiguous_format)
        return self._sum


def _is_all(index: Index, x: Tensor) -> bool:
    return all(part.indices(size) == (0, size, 1) for part, size in zip(index, x.shape, strict=False))


def sink(out_BTHE: Tensor, logs_BHT: Tensor, sinks_H: Tensor) -> None:
    """Joins a logit of each head that has no value (`models.sinks`) to `out` and `logs`, in place."""
    both = torch.logaddexp(logs_BHT, sinks_H.to(logs_BHT.dtype)[:, None])
    out_BTHE.mul_((logs_BHT - both).exp().transpose(1, 2)[..., None])
    logs_BHT.copy_(both)


def sink_gradient(logs_BHT: Tensor, delta_BHT: Tensor, sinks_H: Tensor) -> Tensor:
    """The sinks' gradient by these queries, [H].  logs: with the sink; delta: the sum over E of grad x out."""
    made = (sinks_H.to(logs_BHT.dtype)[:, None] - logs_BHT).exp() * delta_BHT
    return -made.sum(dim=(0, 2)).to(sinks_H.dtype)


def backward(
    grad_BTHE: Tensor,
    q_BTHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    out_BTHE: Tensor,
    logs_BHT: Tensor,
    delta_BHT: Tensor | None,
    mask: Mask,
    kept_BHTS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's part of the gradients of q, k and v, fp32 or as a kernel made them.

    out, logs: over all keys.  delta: the sum over E of grad x out, which a kernel makes by itself.
    """
    if is_one_kernel(q_BTHE, mask, kept_BHTS):
        return _fused_backward(grad_BTHE, q_BTHE, k_BSKE, v_BSKE, out_BTHE, logs_BHT, mask.kind == "causal")
    assert delta_BHT is not None
    wide, shared, num_heads = logs_BHT.dtype, k_BSKE.shape[2], q_BTHE.shape[2]
    k, v = (x.transpose(1, 2).to(wide) for x in (k_BSKE, v_BSKE))
    of_k, of_v, of_q = torch.zeros_like(k), torch.zeros_like(v), []
    for start, stop in _pieces(q_BTHE, k_BSKE):
        q, grad = (x[:, start:stop].to(wide) for x in (q_BTHE, grad_BTHE))
        scores = _scores(q, k, mask.of(start, stop))
        weights = (scores - logs_BHT[:, :, start:stop, None]).exp_()
        grouped = _grouped(grad.transpose(1, 2), shared)
        of_weights = _ungrouped(grouped @ v.mT, num_heads)
        dropped = weights
        if kept_BHTS is not None:
            kept = kept_BHTS[:, :, start:stop]
            of_weights, dropped = of_weights * kept, weights * kept
        of_v += _grouped(dropped, shared).mT @ grouped
        of_scores = weights * (of_weights - delta_BHT[:, :, start:stop, None]) * q.shape[-1] ** -0.5
        of_q.append(_ungrouped(_grouped(of_scores, shared) @ k, num_heads))
        of_k += _grouped(of_scores, shared).mT @ _grouped(q.transpose(1, 2), shared)
    return torch.cat(of_q, dim=2).transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2)


def _pieces(q_BTHE: Tensor, k_BSKE: Tensor) -> Iterator[Range]:
    """Ranges of queries whose scores are held at a time."""
    batch, length, num_heads = q_BTHE.shape[:3]
    step = max(1, SCORES[q_BTHE.device.type] // max(1, batch * num_heads * k_BSKE.shape[1]))
    for start in range(0, length, step):
        yield start, min(start + step, length)


def _scores(q_BTHE: Tensor, k_BKSE: Tensor, seen: Tensor | None) -> Tensor:
    """[B H T S], -inf where nothing is seen."""
    num_heads, head_dim = q_BTHE.shape[2:]
    grouped = _grouped(q_BTHE.transpose(1, 2), k_BKSE.shape[1])
    scores: Tensor = _ungrouped(grouped @ k_BKSE.mT, num_heads) * head_dim**-0.5
    return scores if seen is None else scores.masked_fill(~seen[:, None], float("-inf"))


def _grouped(x_BHTE: Tensor, shared: int) -> Tensor:
    """[B H T ..] -> [B K (H/K T) ..]: the rows that read one key-value head stand together."""
    batch, num_heads, length, width = x_BHTE.shape
    return x_BHTE.reshape(batch, shared, num_heads // shared * length, width)


def _ungrouped(x_BKTE: Tensor, num_heads: int) -> Tensor:
    batch, shared, rows, width = x_BKTE.shape
    return x_BKTE.reshape(batch, num_heads, rows * shared // num_heads, width)


# --- PyTorch's kernels -----------------------------------------------------------------------------------------------


def is_fused(q_BTHE: Tensor) -> bool:
    """Whether a kernel takes full and causal tiles of these queries: half precision on CUDA, head size 8 n."""
    if not q_BTHE.is_cuda or q_BTHE.dtype not in (torch.float16, torch.bfloat16):
        return False
    head_dim = q_BTHE.shape[3]
    return _capability(q_BTHE.device) >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256


def is_one_kernel(q_BTHE: Tensor, mask: Mask, kept_BHTS: Tensor | None) -> bool:
    """Whether it takes the tile."""
    return kept_BHTS is None and mask.kind != "mask" and is_fused(q_BTHE)


def _cudnn_runs(q_BTHE: Tensor) -> bool:
    """Whether it is cuDNN's, whose backward adds in no fixed order."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return enabled and _capability(q_BTHE.device) == (9, 0) and q_BTHE.shape[3] <= 128


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _fused_backward(
    grad_BTHE: Tensor,
    q_BTHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    out_BTHE: Tensor,
    logs_BHT: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a tile from the output and log-sum over all keys, as flash attention defines them."""
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BTHE, q_BTHE, k_BSKE, v_BSKE, out_BTHE))
    grad, logs_BHT = grad.to(q.dtype), logs_BHT.contiguous()
    sizes = None, None, q.shape[2], k.shape[2]
    if _cudnn_runs(q_BTHE):
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # read with dropout alone
        made = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, logs_BHT[..., None], unused, unused, None, *sizes, 0.0, is_causal
        )
    else:
        random = torch.empty(2, dtype=torch.uint64, device=q.device)  # likewise
        made = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logs_BHT, *sizes, 0.0, is_causal, random, random[:0]
        )
    of_q, of_k, of_v = (x.transpose(1, 2) for x in made[:3])
    return of_q, of_k, of_v
