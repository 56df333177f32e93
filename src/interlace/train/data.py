"""Which tokens step s sees: packing, order, cursor and batches, the same for every parallel plan.

Packing.  The documents stand one after another in ONE stream s of N tokens.  Sequence k of length T has the inputs
s[kT .. kT+T) and the labels s[kT+1 .. kT+T], so that every token but the first is predicted once in an epoch;
there are ceil((N - 1) / T) sequences and the last one is padded (labels IGNORED).

    documents = "separate"   positions restart at 0 where a document (or the sequence) begins, `documents` tells which
                             document of the source a token belongs to, and a label that lies in another document
                             than its input is IGNORED: nothing is predicted from the document before
    documents = "joined"     positions 0 .. T-1, one document 0, every label counts

Order.  Epoch e visits the sequences in a permutation that is a function of (seed, e) alone, so no number of ranks,
restart or batch size changes it.  A `Cursor` counts sequences, not steps or batches.  A batch never crosses an epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interlace import random
from interlace.config import DataSection
from interlace.errors import DataError
from interlace.layout import split
from interlace.train import text as texts

IGNORED = -100  # the label that the loss does not count (torch's own ignore_index)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch begins: `offset` sequences into `epoch`'s order, of the data that `digest` names."""

    epoch: int
    offset: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """The cursor as plain values for a checkpoint's manifest; `Dataset.resume` takes them back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Span:
    """A run's steps from `step` on: batches of `global_batch` sequences, the first at this place of the data."""

    step: int
    epoch: int
    offset: int
    global_batch: int


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, int64 on the CPU; B may be 0 (a rank without a share of a short batch).

    samples_B = epoch * num_sequences + sequence number: unique in a run, the key of dropout.  columns_T: where the
    columns stand in their sequences, if these are some of them; documents_BT still tells of all.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    samples_B: Tensor
    separate: bool = True
    columns_T: Tensor | None = None

    def at(self, columns_T: Tensor) -> Batch:
        """Some columns of the batch, in the order given."""
        tokens, labels, positions = (x[:, columns_T] for x in (self.tokens_BT, self.labels_BT, self.positions_BT))
        return replace(self, tokens_BT=tokens, labels_BT=labels, positions_BT=positions, columns_T=columns_T)

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Tokens, labels, positions, documents and samples on `device`, in the order that `Decoder.loss` takes them.

        Joined documents are none for the model.
        """
        documents_BT = self.documents_BT if self.separate else None
        if device.type == "cpu":
            return self.tokens_BT, self.labels_BT, self.positions_BT, documents_BT, self.samples_B
        return (
            self.tokens_BT.pin_memory().to(device, non_blocking=True),
            self.labels_BT.pin_memory().to(device, non_blocking=True),
            self.positions_BT.pin_memory().to(device, non_blocking=True),
            documents_BT,  # attention makes its offsets from these on the host
            self.samples_B.pin_memory().to(device, non_blocking=True),
        )


class Dataset:
    """A tokenised source and its order.  Holds N tokens in 2 (or 4) bytes each and one epoch's permutation."""

    def __init__(self, text: texts.Text, section: DataSection, seed: int) -> None:
        self.text = text
        self.seed = seed
        self.sequence_length = section.sequence_length
        self.shuffle = section.shuffle
        self.drop_last = section.drop_last
        self.separate = section.documents == "separate"
        self.num_tokens = text.tokens.numel()
        self.num_sequences = -(-(self.num_tokens - 1) // section.sequence_length)
        self.files = list(text.files)
        self.skipped = list(text.skipped)
        self.digest = " ".join(
            f"{name}={value}"
            for name, value in (
                ("source", text.digest),
                ("tokenizer", text.tokenizer.digest),
                ("sequence_length", self.sequence_length),
                ("seed", seed),
                ("shuffle", str(section.shuffle).lower()),
                ("documents", section.documents),
                ("drop_last", str(section.drop_last).lower()),
            )
        )
        self._order: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    @classmethod
    def open(cls, section: DataSection, vocab_size: int, seed: int) -> Dataset:
        """Read and tokenise `section.source` for a model of `vocab_size` ids; a DataError says what is wrong where."""
        text = texts.read(section.source, section.field, section.tokenizer, vocab_size, section.skip_bad_lines)
        return cls(text, section, seed)

    def describe(self, global_batch: int = 0) -> str:
        """One line for the log; with `global_batch` also what becomes of an epoch's last, smaller batch."""
        text, words = self.text, self.text.tokenizer
        parts = [
            f"data {text.name}: {_count(len(self.files), 'file')}",
            _count(text.starts.numel() - 1, "document"),
            f"{_count(self.num_tokens, 'token')} (tokenizer {words.name}, a document ends with {words.end_name})",
            f"{_count(self.num_sequences, 'sequence')} of {self.sequence_length}",
        ]
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped (first: {self.skipped[0]})")
        rest = self.num_sequences % global_batch if global_batch else 0
        if rest and self.drop_last:
            parts.append(f"the last {_count(rest, 'sequence')} of each epoch dropped (drop_last)")
        elif rest:
            parts.append(f"the last batch of each epoch has {_count(rest, 'sequence')}")
        return ", ".join(parts)

    def record(self) -> dict[str, Any]:
        """What a run folder keeps of its data."""
        return {"digest": self.digest, "files": self.files, "skipped": self.skipped}

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the data set keeps in memory."""
        return self.text.tokens, self.text.starts, self._order[1]

    # ------------------------------------------------------------------------------------------------- order

    def steps_per_epoch(self, global_batch: int) -> int:
        """Batches in an epoch; DataError when `drop_last` would leave none."""
        assert global_batch >= 1, global_batch
        if self.drop_last and self.num_sequences < global_batch:
            raise DataError(
                f"data.drop_last = true leaves no batch: train.global_batch is {global_batch} and the source has "
                f"{_count(self.num_sequences, 'sequence')}; use a global_batch of at most {self.num_sequences} or "
                "drop_last = false."
            )
        return self._batches_left(0, global_batch)

    def cursor_at(self, step: int, global_batch: int) -> Cursor:
        """The cursor before step `step` (from 0) of a run that began at the start with this batch size."""
        return self.cursor_in([Span(0, 0, 0, global_batch)], step)

    def cursor_in(self, spans: Sequence[Span], step: int) -> Cursor:
        """The cursor before step `step` of a run whose batches had these sizes; spans in order, one at or before it."""
        span = [span for span in spans if span.step <= step][-1]
        made, first = step - span.step, self._batches_left(span.offset, span.global_batch)
        if made < first:
            return Cursor(span.epoch, span.offset + made * span.global_batch, self.digest)
        epochs, batch = divmod(made - first, self.steps_per_epoch(span.global_batch))
        return Cursor(span.epoch + 1 + epochs, batch * span.global_batch, self.digest)

    def steps_until(self, cursor: Cursor, epochs: int, global_batch: int) -> int:
        """Batches from the cursor to the end of the first `epochs` epochs."""
        if cursor.epoch >= epochs:
            return 0
        whole = (epochs - cursor.epoch - 1) * self.steps_per_epoch(global_batch)
        return whole + self._batches_left(cursor.offset, global_batch)

    def _batches_left(self, offset: int, global_batch: int) -> int:
        """Batches of an epoch from `offset` on."""
        left = self.num_sequences - offset
        return left // global_batch if self.drop_last else -(-left // global_batch)

    def advance(self, cursor: Cursor, global_batch: int) -> Cursor:
        """The cursor after the batch at `cursor`; the end of an epoch is the beginning of the next."""
        return self._settle(cursor.epoch, cursor.offset + global_batch, global_batch)

    def resume(self, state: dict[str, Any], global_batch: int) -> Cursor:
        """The cursor of a checkpoint (`Cursor.to_json`), also under another batch size.

        Raises DataError when the data differ from those of the checkpoint, naming what differs.
        """
        epoch, offset, digest = (state.get(name, -1) for name in ("epoch", "offset", "digest"))
        whole = all(type(number) is int and number >= 0 for number in (epoch, offset))
        if not whole or not isinstance(digest, str) or (digest == self.digest and offset > self.num_sequences):
            raise DataError(f"the data cursor {state!r} of the checkpoint is damaged; use another one.", cursor=state)
        if digest != self.digest:
            raise DataError(
                f"the run cannot resume exactly, since its data differ from the checkpoint's in "
                f"{_difference(digest, self.digest)}; restore them, or begin a new run from the weights alone.",
                checkpoint=digest,
                run=self.digest,
            )
        return self._settle(epoch, offset, global_batch)

    def indices(self, cursor: Cursor, global_batch: int) -> list[int]:
        """Sequence numbers of the global batch at `cursor`, in order; fewer than `global_batch` at an epoch's end."""
        assert cursor == self._settle(cursor.epoch, cursor.offset, global_batch), cursor
        return self._permutation(cursor.epoch)[cursor.offset : cursor.offset + global_batch].tolist()

    def _settle(self, epoch: int, offset: int, global_batch: int) -> Cursor:
        self.steps_per_epoch(global_batch)  # refuses an epoch without a batch
        left = self.num_sequences - offset
        if left <= 0 or (self.drop_last and left < global_batch):
            epoch, offset = epoch + 1, 0
        return Cursor(epoch, offset, self.digest)

    def _permutation(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            if self.shuffle:
                order = random.permutation(random.key(self.seed, "data", "order", epoch), self.num_sequences)
            else:
                order = torch.arange(self.num_sequences)
            self._order = (epoch, order)
        return self._order[1]

    # ----------------------------------------------------------------------------------------------- batches

    def sequences(self, epoch: int, indices: Sequence[int]) -> Batch:
        """The sequences of these numbers in this order, as a Batch of [len(indices), sequence_length].

        Beyond the stream's end the inputs are end-of-document ids, in a document of their own, without labels.
        """
        length, total = self.sequence_length, self.num_tokens
        numbers_B = torch.tensor(list(indices), dtype=torch.int64)
        assert not numbers_B.numel() or (numbers_B.min() >= 0 and numbers_B.max() < self.num_sequences), indices
        begin_B1 = (numbers_B * length)[:, None]
        at_BS = begin_B1 + torch.arange(length + 1)  # S = T + 1: the inputs and one label more
        inside_BS = at_BS < total
        stream_BS = self.text.tokens[at_BS.clamp(max=total - 1)].to(torch.int64)
        stream_BS = stream_BS.where(inside_BS, self.text.tokenizer.end)
        counted_BT = inside_BS[:, 1:]
        if self.separate:
            document_BS = torch.searchsorted(self.text.starts, at_BS, right=True) - 1
            positions_BS = at_BS - torch.maximum(self.text.starts[document_BS], begin_B1)
            counted_BT = counted_BT & (document_BS[:, 1:] == document_BS[:, :-1])
        else:
            document_BS = torch.zeros_like(at_BS)
            positions_BS = at_BS - begin_B1
        return Batch(
            tokens_BT=stream_BS[:, :-1].contiguous(),
            labels_BT=stream_BS[:, 1:].where(counted_BT, IGNORED),
            positions_BT=positions_BS[:, :-1].contiguous(),
            documents_BT=document_BS[:, :-1].contiguous(),
            samples_B=epoch * self.num_sequences + numbers_B,
            separate=self.separate,
        )


def shard(indices: Sequence[int], dp: int, dp_rank: int) -> list[int]:
    """The part of a global batch for one data rank: contiguous, balanced (the first n mod dp ranks hold one more)."""
    start, stop = split(len(indices), dp, dp_rank)
    return list(indices[start:stop])


def micro_batches(indices: Sequence[int], m: int) -> list[list[int]]:
    """A rank's sequences as exactly `m` contiguous, balanced micro-batches; some are empty when there are fewer."""
    return [shard(indices, m, i) for i in range(m)]


def spans_of(run_file: str, digest: str, global_batch: int) -> list[Span]:
    """The spans that the folder of a `run.toml` tells of: of these data, and up to this batch size; else none."""
    record = Path(run_file).with_name("data.json") if run_file else None
    if record is None or not record.is_file():
        return []
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        spans = [Span(**span) for span in kept["spans"]] if kept["digest"] == digest else []
    except (OSError, ValueError, TypeError, KeyError):  # no run's
        return []
    return spans if spans and spans[-1].global_batch == global_batch else []


def rows(dataset: Dataset, steps: range, global_batch: int, spans: Sequence[Span] = ()) -> Iterator[dict[str, Any]]:
    """What the model sees in `steps`, one dict a sequence: the content of `interlace data`, the same for every plan.

    spans: of a run that went on with other batch sizes; else all have `global_batch`.
    """
    spans = spans or [Span(0, 0, 0, global_batch)]
    for step in steps:
        cursor, size = dataset.cursor_in(spans, step), [span.global_batch for span in spans if span.step <= step][-1]
        batch = dataset.sequences(cursor.epoch, dataset.indices(cursor, size))
        for index in range(batch.samples_B.numel()):
            yield {
                "step": step,
                "index": index,
                "tokens": batch.tokens_BT[index].tolist(),
                "labels": batch.labels_BT[index].tolist(),
                "positions": batch.positions_BT[index].tolist(),
                "documents": batch.documents_BT[index].tolist(),
            }


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _difference(saved: str, own: str) -> str:
    """The parts of two digests that differ, as "seed (1, now 2)"."""
    before = dict(part.partition("=")[::2] for part in saved.split())
    now = dict(part.partition("=")[::2] for part in own.split())
    return ", ".join(f"{k} ({before.get(k, 'absent')}, now {v})" for k, v in now.items() if before.get(k) != v) or saved
