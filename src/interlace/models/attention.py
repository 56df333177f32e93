"""Grouped-query attention of one device: which keys a query sees, and the quickest exact way to compute it.

`attention` equals softmax(q k^T / sqrt(E) + mask) v; PyTorch's kernels do the work:

    what the queries see                      fp16 or bf16 on CUDA          elsewhere
    all before them (plain causal)            SDPA, is_causal               SDPA, is_causal
    ... with deterministic algorithms asked   FlexAttention (`models.ordered`)
    their document and/or a sliding window    varlen (flash) attention      SDPA with a boolean mask
    ... but the first of a window's document  SDPA with a boolean mask      SDPA with a boolean mask
    anything, with attention dropout          written out, scores in memory (said once)

A sink (`models.sinks`), one more term in the softmax's denominator, takes the same kernels by their log-sums; where it
is not flash attention on CUDA, it is SDPA with a key more.  Mask and document offsets are made once per forward and
shared by the layers, in a `Pattern`.  CPU has neither varlen nor a backward of FlexAttention, hence the mask there.  A
pattern that is not plain causal never takes the causal path: the choice is made by `Pattern.plain` alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from interlace import random
from interlace.config import ModelConfig
from interlace.models import ordered, sinks
from interlace.models.layers import Context, Linear, SharedInput, rotate


class Pattern:
    """Which keys a query sees: those of its document, not after its own column, `window` at most, itself included.

    `documents_BT` holds an integer per position; equal numbers in a row of the batch are one document; None = the row
    is one.  Every query sees itself, so no row of the mask is empty.  With a window, the first `sink_tokens` positions
    of its document stay visible however far back they are (Xiao et al., arXiv 2309.17453).
    """

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        documents_BT: Tensor | None = None,
        window: int | None = None,
        sink_tokens: int = 0,
    ) -> None:
        self.batch = batch
        self.length = length
        self.device = device
        self.documents_BT = documents_BT
        self.window = window if window is not None and window < length else None
        self.sink_tokens = sink_tokens if self.window is not None else 0

    @property
    def plain(self) -> bool:
        """Plain causal: nothing but "not after its own column"."""
        return self.documents_BT is None and self.window is None

    @functools.cached_property
    def leading_BT(self) -> Tensor | None:
        """Where the first `sink_tokens` positions of documents are: bool [B T], or [1 T] without documents; None: there
        are none."""
        if not self.sink_tokens:
            return None
        place = torch.arange(self.length, device=self.device)[None]
        if self.documents_BT is None:
            return place < self.sink_tokens
        ordered, order = self.documents_BT.sort(dim=1, stable=True)
        starts = ordered.diff(dim=1, prepend=ordered[:, :1] - 1) != 0
        place = place.to(order.device)
        among = place - (starts * place).cummax(dim=1).values
        return torch.zeros_like(starts).scatter(1, order, among < self.sink_tokens).to(self.device)

    @functools.cached_property
    def mask_B1TS(self) -> Tensor:
        """True where query t sees key s: bool [B 1 T S], or [1 1 T S] where the rows do not differ."""
        column = torch.arange(self.length, device=self.device)
        back_TS = column[:, None] - column[None, :]
        seen = back_TS >= 0
        if self.window is not None:
            near = back_TS < self.window
            seen = seen & (near if self.leading_BT is None else near | self.leading_BT[:, None, :])
        seen = seen.view(-1, self.length, self.length)
        if self.documents_BT is not None:
            documents_BT = self.documents_BT.to(self.device)
            seen = seen & (documents_BT[:, :, None] == documents_BT[:, None, :])
        return seen[:, None]

    @functools.cached_property
    def runs(self) -> tuple[Tensor, int] | None:
        """Documents as runs of the flattened batch: (int32 offsets [N+1], longest run).

        None when a document may lie in several pieces (numbers that fall along a row), or when its first positions are
        seen beyond the window: only a mask says that.
        Computed where `documents_BT` lies: on the CPU it costs the GPU no stop, on the GPU one.
        """
        if self.sink_tokens:
            return None
        rows = torch.arange(0, self.batch * self.length + 1, self.length)
        if self.documents_BT is None:
            return rows.to(self.device, torch.int32, non_blocking=True), self.length
        step = self.documents_BT.diff(dim=1)
        first = torch.ones_like(self.documents_BT, dtype=torch.bool)
        first[:, 1:] = step != 0
        starts = first.flatten().nonzero().flatten()
        offsets = F.pad(starts, (0, 1), value=self.batch * self.length)
        longest, falls = torch.stack((offsets.diff().max(), (step < 0).any().long())).tolist()
        return None if falls else (offsets.to(self.device, torch.int32, non_blocking=True), longest)

    @functools.cached_property
    def causal(self) -> BlockMask:
        """Of a plain pattern, as FlexAttention takes it."""
        return ordered.causal_blocks(self.length, self.device)

    def prepare(self, dtype: torch.dtype, head_dim: int, sunk: bool = False) -> None:
        """Make what the layers will read, ahead of them (outside of compiled or recomputed regions).

        sunk: their softmax has a sink.
        """
        varlen = _varlen_runs(self.device, dtype, head_dim)  # now: the compiler should find the answer, not look for it
        needs = not self.plain or (sunk and self.device.type == "cuda")
        if needs and not (varlen and self.runs is not None):
            _ = self.mask_B1TS
        if not needs and ordered.takes(self.device, dtype, head_dim):
            _ = self.causal


def attention(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    pattern: Pattern,
    dropout: float = 0.0,
    keep_BHTS: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(E) + mask) v: [B T H E].  H is a multiple of K; query head h reads kv head h // (H / K).

    With `keep_BHTS` (bool) the probabilities it leaves out are zero and the others grow by 1 / (1 - dropout).  With
    `sinks_H` a query of head h shares its probability with a logit sinks_H[h] that has no value.
    """
    if keep_BHTS is not None:
        return _written_out(q_BTHE, k_BTKE, v_BTKE, pattern, dropout, keep_BHTS, sinks_H)
    if sinks_H is not None:
        return _sunk(q_BTHE, k_BTKE, v_BTKE, pattern, sinks_H)
    half = _varlen_runs(q_BTHE.device, q_BTHE.dtype, q_BTHE.shape[-1])
    if half and not pattern.plain and pattern.runs is not None:
        return _varlen(q_BTHE, k_BTKE, v_BTKE, *pattern.runs, pattern.window)
    if pattern.plain and ordered.takes(q_BTHE.device, q_BTHE.dtype, q_BTHE.shape[-1]):
        return ordered.attend(q_BTHE, k_BTKE, v_BTKE, pattern.causal)
    q, k, v = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    # Flash (fp16, bf16, no mask) and the CPU kernels read kv heads in place; CUDA's memory-efficient kernel, which
    # takes masks and fp32, does not, and PyTorch would fall back to one that holds the scores.
    if q.is_cuda and not (half and pattern.plain):
        k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    grouped = k.shape[1] != q.shape[1]
    if pattern.plain:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=pattern.mask_B1TS, enable_gqa=grouped)
    return out.transpose(1, 2)


def _repeat(k_BKTE: Tensor, num_heads: int) -> Tensor:
    return k_BKTE.repeat_interleave(num_heads // k_BKTE.shape[1], dim=1)


def _sunk(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, pattern: Pattern, sinks_H: Tensor) -> Tensor:
    if not q_BTHE.is_cuda:
        kernel = sinks.Host(None if pattern.plain else pattern.mask_B1TS)
        return sinks.attend(q_BTHE, k_BTKE, v_BTKE, sinks_H, kernel)
    if _varlen_runs(q_BTHE.device, q_BTHE.dtype, q_BTHE.shape[-1]) and pattern.runs is not None:
        return sinks.attend(q_BTHE, k_BTKE, v_BTKE, sinks_H, sinks.Flash(*pattern.runs, pattern.window))
    k, v = (x.repeat_interleave(q_BTHE.shape[2] // x.shape[2], dim=2) for x in (k_BTKE, v_BTKE))
    return sinks.with_null_key(q_BTHE, k, v, sinks_H, pattern.mask_B1TS)


def _written_out(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    pattern: Pattern,
    dropout: float,
    keep_BHTS: Tensor,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention by its formula, softmax in fp32 or wider: the only path that can drop each probability by its index."""
    num_heads, head_dim = q_BTHE.shape[2:]
    q, k, v = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores_BHTS = (q @ _repeat(k, num_heads).mT).to(wide) * head_dim**-0.5
    scores_BHTS = scores_BHTS.masked_fill(~pattern.mask_B1TS, float("-inf"))
    if sinks_H is not None:
        column = sinks_H.to(scores_BHTS.dtype)[:, None, None].expand(*scores_BHTS.shape[:3], 1)
        scores_BHTS = torch.cat((scores_BHTS, column), dim=3)
    probabilities = scores_BHTS.softmax(dim=-1)[..., : k.shape[2]]
    probabilities = probabilities * keep_BHTS * (1.0 / (1.0 - dropout))
    return (probabilities.to(v.dtype) @ _repeat(v, num_heads)).transpose(1, 2)


def _varlen(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, offsets: Tensor, longest: int, window: int | None
) -> Tensor:
    """Flash attention over runs of the flattened batch; the window counts keys before the query, -1 = all."""
    reach = (-1 if window is None else window - 1, 0)
    q, k, v = q_BTHE.flatten(0, 1), k_BTKE.flatten(0, 1), v_BTKE.flatten(0, 1)
    kernel, options = _varlen_kernel()
    # torch 2.11 takes fewer kv heads as they are, later ones want it said
    grouped = {"enable_gqa": True} if "enable_gqa" in options else {}
    out: Tensor = kernel(q, k, v, offsets, offsets, longest, longest, window_size=reach, **grouped)
    return out.view_as(q_BTHE)


_varlen_found: tuple[Any, frozenset[str]] | None = None  # not a cached function: the compiler looks behind those


def _varlen_kernel() -> tuple[Any, frozenset[str]]:
    """PyTorch's `varlen_attn` and its options; found when a GPU needs it, since its module takes a second to import."""
    global _varlen_found
    if _varlen_found is None:
        try:
            found = importlib.import_module("torch.nn.attention.varlen").varlen_attn
            _varlen_found = found, frozenset(inspect.signature(found).parameters)
        except ImportError:
            _varlen_found = None, frozenset()
    return _varlen_found


def _varlen_runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention takes these tensors: half precision, compute capability 8, head size 8, 16, .. 256."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return False
    if "window_size" not in _varlen_kernel()[1]:
        say_once("this torch has no varlen_attn with a window: documents and windows attend through a mask")
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def say_once(message: str) -> None:
    """A warning the first time; silence afterwards."""
    warnings.warn(message, stacklevel=2)


class AttentionCore(nn.Module):
    """`attention` of one layer, without parameters: (q_BTHE, k_BTKE, v_BTKE, context, sinks_H) -> [B T H E].

    A module of its own so that it can be replaced where the keys of a query are not all here.  `first_head` is the
    index of its first query head in the whole layer, which keys attention dropout.
    """

    def __init__(self, window: int | None, dropout: float, layer: str) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout
        self.layer = layer
        self.first_head = 0

    def forward(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, context: Context, sinks_H: Tensor | None = None
    ) -> Tensor:
        pattern = context.patterns[self.window]
        if not self.training or self.dropout == 0.0:
            return attention(q_BTHE, k_BTKE, v_BTKE, pattern, sinks_H=sinks_H)
        keep_BHTS = self.keep(context, q_BTHE.shape[2], k_BTKE.shape[1])
        return attention(q_BTHE, k_BTKE, v_BTKE, pattern, self.dropout, keep_BHTS, sinks_H)

    def keep(self, context: Context, num_heads: int, keys: int) -> Tensor:
        """Which probabilities stay: bool [B num_heads T keys]."""
        say_once("attention dropout: attention is written out, with its scores in memory, instead of fused")
        heads_H = self.first_head + torch.arange(num_heads, device=context.columns_T.device)
        rows_1HT = ((heads_H[:, None] << 32) + context.columns_T[None, :])[None]
        key = random.key(context.dropout_key, self.layer)
        return random.dropout_mask(key, context.samples_B[:, None, None], rows_1HT, keys, self.dropout)

    def extra_repr(self) -> str:
        return f"window={self.window}, dropout={self.dropout}"


class Attention(nn.Module):
    """Attention with its projections: x_BTD -> x_BTD.

    The number of heads is read from what the projections return, so a projection may hold only some of them.
    """

    def __init__(self, cfg: ModelConfig, layer: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        new = {"device": device, "dtype": dtype}
        self.head_dim = cfg.head_dim
        width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.q = Linear(cfg.hidden_size, width, bias=cfg.qkv_bias, **new)
        self.k = Linear(cfg.hidden_size, kv_width, bias=cfg.qkv_bias, **new)
        self.v = Linear(cfg.hidden_size, kv_width, bias=cfg.qkv_bias, **new)
        self.q_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, **new) if cfg.qk_norm else None
        self.k_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, **new) if cfg.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(cfg.num_heads, **new)) if cfg.attention_sinks else None
        self.core = AttentionCore(cfg.window(layer), cfg.attention_dropout, f"blocks.{layer}.attention.core")
        self.out = Linear(width, cfg.hidden_size, bias=cfg.out_bias, **new)
        self.project = SharedInput()
        self.reads: list[int] | None = None  # the kv head of each query head, where they are not an even share

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        batch = len(context.samples_B)
        q_BTHE, k_BTKE, v_BTKE = (
            made.view(batch, -1, made.shape[-1] // self.head_dim, self.head_dim)
            for made in self.project(x_BTD, (self.q, self.k, self.v), context)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BTHE, k_BTKE = rotate(q_BTHE, context.rotary), rotate(k_BTKE, context.rotary)
        if self.reads is not None:
            k_BTKE, v_BTKE = (_as_read(made, self.reads) for made in (k_BTKE, v_BTKE))
        out_BTHE = self.core(q_BTHE, k_BTKE, v_BTKE, context, self.sinks)
        return self.out(out_BTHE.flatten(2))


def _as_read(x_BTKE: Tensor, heads: Sequence[int]) -> Tensor:
    """A key or value head for each query head, [B T H E]; gradients add up in the order of heads."""
    own = x_BTKE.unbind(2)
    return torch.stack([own[head] for head in heads], dim=2)
