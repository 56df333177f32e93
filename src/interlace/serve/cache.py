"""Keys and values of the positions that a model has seen, so that a token costs one position and not the whole window.

`Cache(model, rows).logits(tokens)` equals, for every row by itself, the model's last logits of all tokens that the row
was given, up to the order of sums: attention of a position reads what earlier ones of its row have left, after their
rotation, whatever the mask (windows, their first tokens, sinks).

Of latent attention the latent and the key that all heads share are kept, not keys and values of heads.

Rows are of any lengths, and none is padded: outside of attention a pass reads its tokens one row behind the other, one
sequence of N, so that experts, their counts and every product see the given tokens alone.  In attention a key stands
at the place of its position; what lies behind a row's last one is masked by that: no query looks ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interlace.models.attention import Attention, AttentionCore, Pattern, attention
from interlace.models.decoder import Decoder
from interlace.models.latent import LatentAttention
from interlace.serve.served import Served

BLOCK = 64  # positions by which memory for keys and values grows


class Reading:
    """The tokens of one pass: `counts[b]` of row b, from position `starts[b]` on.  T: the most of a row."""

    def __init__(self, starts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self.rows, self.longest = len(counts), max(counts)
        self.end = max(start + count for start, count in zip(starts, counts, strict=True))
        self.is_first = not any(starts)
        self.starts_B = torch.tensor(starts, device=device)
        counts_B = torch.tensor(counts, device=device)
        self.row_N = torch.arange(self.rows, device=device).repeat_interleave(counts_B, output_size=sum(counts))
        self.column_N = torch.cat([torch.arange(count, device=device) for count in counts])
        self.position_N = self.column_N + self.starts_B[self.row_N]
        self.last_B = torch.tensor(list(itertools.accumulate(counts)), device=device) - 1

    def apart(self, x_1NHE: Tensor) -> Tensor:
        """Each row by itself: [B T H E], zeros behind the shorter ones."""
        if self.rows * self.longest == x_1NHE.shape[1]:
            return x_1NHE.view(self.rows, self.longest, *x_1NHE.shape[2:])
        x_BTHE = x_1NHE.new_zeros(self.rows, self.longest, *x_1NHE.shape[2:])
        x_BTHE[self.row_N, self.column_N] = x_1NHE[0]
        return x_BTHE

    def joined(self, x_BTHE: Tensor) -> Tensor:
        """The way back: [1 N H E]."""
        return x_BTHE[self.row_N, self.column_N][None]


class Tail(Pattern):
    """What the positions of a pass see of all that are kept: those of their row, not after their own."""

    def __init__(self, reading: Reading, device: torch.device, window: int | None, sink_tokens: int) -> None:
        super().__init__(reading.rows, reading.end, device, None, window, sink_tokens)
        self.reading = reading

    @property
    def plain(self) -> bool:
        return False

    @property
    def runs(self) -> None:
        """Queries and keys are not the same positions."""
        return None

    @functools.cached_property
    def mask_B1TS(self) -> Tensor:
        """True where query t of the pass sees key s: bool [B 1 T S]."""
        own_T = torch.arange(self.reading.longest, device=self.device)
        own_BT1 = self.reading.starts_B[:, None, None] + own_T[:, None]
        back_BTS = own_BT1 - torch.arange(self.length, device=self.device)
        seen_BTS = back_BTS >= 0
        if self.window is not None:
            near_BTS = back_BTS < self.window
            seen_BTS = seen_BTS & (near_BTS if self.leading_BT is None else near_BTS | self.leading_BT)
        return seen_BTS[:, None]


class Cache:
    """Of `rows` sequences that `model` reads; of a model that ranks hold parts of, what this rank's layers and heads
    keep.  `lengths`: positions that are kept, by row."""

    def __init__(self, model: Decoder | Served, rows: int = 1) -> None:
        self.served = model if isinstance(model, Served) else Served(model)
        self.lengths = [0] * rows
        # by layer: keys and values, [B S K E], position s in place s; or what latent attention makes them of, [B S 1 M]
        self.kept: dict[str, tuple[Tensor, ...]] = {}

    @torch.no_grad()
    def logits(self, tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """Takes further tokens of every row, one or more, and gives the logits [B V] of what follows them; without
        dropout.  None on ranks without the head."""
        decoder, device = self.served.decoder, self.served.device
        counts = [len(own) for own in tokens]
        reading = Reading(self.lengths, counts, device)
        flat_1N = torch.tensor([list(itertools.chain(*tokens))], device=device)
        context = decoder.context((1, sum(counts)), device, positions_BT=reading.position_N[None])
        context = dataclasses.replace(context, patterns={w: self._pattern(reading, w) for w in context.patterns})
        was_training = decoder.training
        decoder.eval()
        try:
            with self._in_place(reading):
                logits_BV = self.served.logits(flat_1N, context, reading.last_B)
        finally:
            decoder.train(was_training)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits_BV

    def forget(self, row: int) -> None:
        """A row begins anew, its next token at position 0."""
        self.lengths[row] = 0  # nobody looks behind it

    def keep(self, rows: Sequence[int]) -> None:
        """These rows alone stay, and are numbered from 0."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer, all_kept in self.kept.items():
            self.kept[layer] = tuple(kept[torch.tensor(rows, device=kept.device)] for kept in all_kept)

    def add(self, layer: str, reading: Reading, *new: Tensor) -> list[Tensor]:
        """Keeps a layer's keys and values of a pass, [1 N K E] -> all that it reads, [B S K E]."""
        if layer not in self.kept or self.kept[layer][0].shape[1] < reading.end:
            self.kept[layer] = tuple(self._grown(layer, reading, one, which) for which, one in enumerate(new))
        for kept, one in zip(self.kept[layer], new, strict=True):
            kept[reading.row_N, reading.position_N] = one[0]
        return [kept[:, : reading.end] for kept in self.kept[layer]]

    def _grown(self, layer: str, reading: Reading, new_1NKE: Tensor, which: int) -> Tensor:
        """Room for all positions, with what is kept; zeros elsewhere, since a mask does not stop what is no number."""
        room = new_1NKE.new_zeros(reading.rows, -(-reading.end // BLOCK) * BLOCK, *new_1NKE.shape[2:])
        if layer in self.kept:
            old = self.kept[layer][which]
            room[:, : old.shape[1]] = old
        return room

    def _pattern(self, reading: Reading, window: int | None) -> Pattern:
        device, sink_tokens = self.served.device, self.served.decoder.cfg.sink_tokens
        if reading.is_first:  # keys are those of the pass, behind one another as usual
            return Pattern(reading.rows, reading.longest, device, None, window, sink_tokens)
        return Tail(reading, device, window, sink_tokens)

    @contextmanager
    def _in_place(self, reading: Reading) -> Iterator[None]:
        """The model's attention reads and fills the cache."""
        found = [module for module in self.served.decoder.modules() if isinstance(module, Attention)]
        latent = [module for module in self.served.decoder.modules() if isinstance(module, LatentAttention)]
        cores = [module.core for module in found]
        try:
            for owner in latent:
                owner.attend = CachedLatents(owner, self, reading)  # type: ignore[method-assign, assignment]
            for module, core in zip(found, cores, strict=True):
                module.core = CachedCore(core, self, reading)  # type: ignore[assignment]
            yield
        finally:
            for module, core in zip(found, cores, strict=True):
                module.core = core
            for owner in latent:
                vars(owner).pop("attend", None)


class CachedCore(nn.Module):
    """In the place of an `AttentionCore`, with the same arguments -> [1 N H E] of the new positions."""

    def __init__(self, core: AttentionCore, cache: Cache, reading: Reading) -> None:
        super().__init__()
        self.window, self.layer, self.cache, self.reading = core.window, core.layer, cache, reading

    def forward(
        self, q_1NHE: Tensor, k_1NKE: Tensor, v_1NKE: Tensor, context: Any, sinks_H: Tensor | None = None
    ) -> Tensor:
        reading = self.reading
        k_BSKE, v_BSKE = self.cache.add(self.layer, reading, k_1NKE, v_1NKE)
        pattern = context.patterns[self.window]
        return reading.joined(attention(reading.apart(q_1NHE), k_BSKE, v_BSKE, pattern, sinks_H=sinks_H))


class CachedLatents:
    """In the place of `LatentAttention.attend`: [1 N H V] of the new positions."""

    def __init__(self, owner: LatentAttention, cache: Cache, reading: Reading) -> None:
        self.owner, self.cache, self.reading = owner, cache, reading

    def __call__(self, q_1NHE: Tensor, latent_1NC: Tensor, shared_1N1R: Tensor, context: Any) -> Tensor:
        owner, reading = self.owner, self.reading
        pattern = context.patterns[owner.core.window]
        new_1N1M = torch.cat((shared_1N1R, latent_1NC[:, :, None]), dim=-1)
        (kept_BS1M,) = self.cache.add(owner.core.layer, reading, new_1N1M)
        q_BTHE = reading.apart(q_1NHE)
        if reading.longest == 1:
            return reading.joined(owner.attend_to_latents(q_BTHE, kept_BS1M[:, :, 0], pattern.mask_B1TS))
        shared, latent = kept_BS1M.split((owner.turning, owner.kv_rank), dim=-1)
        k_BSHE, v_BSHE = owner.keys_and_values(latent[:, :, 0], shared)  # of many positions at once that is less work
        out_BTHE = attention(q_BTHE, k_BSHE, v_BSHE, pattern, sinks_H=owner.sinks)
        return reading.joined(out_BTHE[..., : owner.value_dim])
