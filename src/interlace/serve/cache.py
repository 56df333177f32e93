"""Keys and values of the positions that a model has seen, so that a token costs one position and not the whole window.

`Cache(model).logits(tokens)` equals the model's last logits of all tokens it was given since it was made, up to the
order of sums: attention of a position reads what earlier ones have left, after their rotation, whatever the mask
(windows, their first tokens, sinks).  The first call is the model's own pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interlace.models.attention import Attention, AttentionCore, Pattern, attention
from interlace.models.decoder import Decoder


class Tail(Pattern):
    """What the last `count` of `length` positions see, one row of a batch."""

    def __init__(self, count: int, length: int, device: torch.device, window: int | None, sink_tokens: int) -> None:
        super().__init__(1, length, device, None, window, sink_tokens)
        self.count = count

    @property
    def plain(self) -> bool:
        return False

    @property
    def runs(self) -> None:
        """Queries and keys are not the same positions."""
        return None

    @functools.cached_property
    def mask_B1TS(self) -> Tensor:
        """True where query t of the last sees key s: bool [1 1 T S]."""
        column = torch.arange(self.length, device=self.device)
        back_TS = column[-self.count :, None] - column[None, :]
        seen_TS = back_TS >= 0
        if self.window is not None:
            near_TS = back_TS < self.window
            seen_TS = seen_TS & (near_TS if self.leading_BT is None else near_TS | self.leading_BT)
        return seen_TS[None, None]


class Cache:
    """Of one sequence that `model` reads.  `length`: positions that are kept."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.length = 0
        self.kept: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: keys and values, [1 S K E]

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Takes further tokens, one or more, and gives the logits [V] of what follows them; without dropout."""
        model, device = self.model, self.model.embedding.weight.device
        columns_T = torch.arange(self.length, self.length + len(tokens), device=device)
        context = model.context((1, len(tokens)), device, positions_BT=columns_T[None], columns_T=columns_T)
        was_training = model.training
        model.eval()
        try:
            with self._in_place():
                x_BTD = model.hidden(torch.tensor([list(tokens)], device=device), context)
                logits_V: Tensor = model.head(x_BTD[:, -1:])[0, 0]  # only the last position meets the head
        finally:
            model.train(was_training)
        self.length += len(tokens)
        return logits_V

    def add(self, layer: str, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with these behind."""
        if layer in self.kept:
            k_BTKE, v_BTKE = (torch.cat(pair, dim=1) for pair in zip(self.kept[layer], (k_BTKE, v_BTKE), strict=True))
        self.kept[layer] = k_BTKE, v_BTKE
        return k_BTKE, v_BTKE

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The model's attention reads and fills the cache."""
        found = [module for module in self.model.modules() if isinstance(module, Attention)]
        cores = [module.core for module in found]
        try:
            for module, core in zip(found, cores, strict=True):
                module.core = CachedCore(core, self)  # type: ignore[assignment]
            yield
        finally:
            for module, core in zip(found, cores, strict=True):
                module.core = core


class CachedCore(nn.Module):
    """In the place of an `AttentionCore`, with the same arguments -> [B T H E] of the new positions."""

    def __init__(self, core: AttentionCore, cache: Cache) -> None:
        super().__init__()
        self.inner, self.cache = core, cache

    def forward(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, context: Any, sinks_H: Tensor | None = None
    ) -> Tensor:
        k, v = self.cache.add(self.inner.layer, k_BTKE, v_BTKE)
        if k is k_BTKE:  # the first positions
            made: Tensor = self.inner(q_BTHE, k, v, context, sinks_H)
            return made
        window, sink_tokens = self.inner.window, self.cache.model.cfg.sink_tokens
        pattern = Tail(q_BTHE.shape[1], k.shape[1], k.device, window, sink_tokens)
        return attention(q_BTHE, k, v, pattern, sinks_H=sinks_H)
