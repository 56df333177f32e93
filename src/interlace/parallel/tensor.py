"""The tensor and sequence axis of a decoder: every layer's products split over `tp`, the residual stream with them.

Equals, in plain collectives (Shoeybi et al., arXiv 1909.08053), weights split as their roles say,

    x --copy--> column products --> heads, gated features --> row product --all-reduce--> + bias, dropout, residual

and with `sequence` (Korthikanti et al., arXiv 2205.05198), where every rank holds some rows of the residual stream, of
its norms and of its dropout,

    x --all-gather--> column products --> ... --> row product --reduce-scatter--> + bias, dropout, residual

which moves the same bytes and keeps 1/tp of what lies between the products.  Rows are positions of the micro-batch, all
sequences flattened: "(B T)/tp D".  So a gather is one run of memory whatever B is, and no number has to divide: "B T/tp
D" would cost a copy of x at every gather and scatter.

Products that read one input share its gather.  Gradients of weights that every rank holds but uses on a part of the
rows or heads are owed over `tp`; the engine around the module pays them with the data axis's sum (`Part.owed`).  Row
biases are added once, after the sum.

The module keeps its names; its own modules stay where they are, apart from those without parameters that stand at the
borders (`SharedInput`, `Vocabulary`, `Enter`, `Leave`), the row-split linears and the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from interlace.collectives import Group
from interlace.collectives.autograd import agree, columns, copy, gather, reduce, scatter, whole
from interlace.kernels.gather_matmul import gather_matmul
from interlace.kernels.matmul_scatter import matmul_reduce, matmul_scatter
from interlace.layout import split
from interlace.parallel.part import Part, replace_parameters
from interlace.parallel.vocabulary import vocabulary_loss
from interlace.plan.tensor import is_alike, slices
from interlace.spec import Parameter, Role


@dataclass(frozen=True, eq=False)
class Axis:
    """The tensor axis: its ranks, whether the residual stream is split, whether transfers run beside products.

    reruns: whole blocks are run again in backward.  A run that ends early, as torch's checkpoint does once everything
    saved is back, leaves out the last product of a block only if it stands by itself.
    """

    group: Group
    sequence: bool = True
    overlap: bool = True
    reruns: bool = False

    def count(self, context: Any) -> int | None:
        """Rows of all ranks together where each holds some of them; None where each holds all."""
        return context.num_rows if self.sequence else None

    def rows(self, count: int) -> tuple[int, int]:
        """The rows of the residual stream that this rank holds."""
        return split(count, self.group.size, self.group.rank)


def split_decoder(
    decoder: nn.Module, parameters: Sequence[Parameter], axis: Axis, holders: Callable[[int], Group]
) -> dict[str, Part]:
    """Splits a decoder in place, by the roles of its `parameters`, and returns every parameter's part.

    decoder: any with the modules that this file's docstring names; on the meta device, or with values.  holders: how
    many neighbours -> their group, for key and value heads that several ranks hold.
    """
    group = axis.group
    parts = {}
    for parameter in parameters:
        sliced = slices(parameter, group.size)
        owed = holders(sliced.copies) if sliced.copies > 1 else None
        parts[parameter.name] = Part(sliced, group, owed, is_alike(parameter, axis.sequence))
    replace_parameters(decoder, parts)
    for parameter in parameters:
        owner = parameter.name.rpartition(".")[0]
        parent, _, name = owner.rpartition(".")
        above = decoder.get_submodule(parent)
        if parameter.role is Role.COLUMN:
            above.project = SharedColumns(axis)
        if parameter.role is Role.ROW:
            setattr(above, name, Row(decoder.get_submodule(owner), axis, parts[parameter.name].shape[1]))
        if parameter.role is Role.EXPERT:
            above.enter, above.leave = Enter(axis, bool(above.balanced)), Leave(axis)
        if parameter.name.endswith(".q.weight"):
            core: Any = above.core
            core.first_head = parts[parameter.name].bound[0] // parameter.chunk
        if parameter.role is Role.VOCAB and (owner == "embedding" or parameter.tied_to):
            decoder.embedding = VocabularyEmbedding(decoder.get_submodule("embedding"), axis, parts[parameter.name])
        if parameter.role is Role.VOCAB and (owner == "head.output" or parameter.tied_to):
            decoder.get_submodule("head").vocabulary = SplitVocabulary(axis, parts[parameter.name])
    if axis.sequence:
        decoder.rows = axis.rows  # type: ignore[assignment]
    return parts


class SharedColumns(nn.Module):
    """In the place of `SharedInput`: column-split products of one input, gathered once."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, linears: Sequence[nn.Linear], context: Any) -> list[Tensor]:
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        count = self.axis.count(context)
        columns = sum(linear.out_features for linear in linears)  # of all ranks: a linear keeps its whole size
        made: list[Tensor] = gather_matmul(
            x, weights, biases, self.axis.group, count, self.axis.overlap, columns=columns
        )
        return made


class Row(nn.Module):
    """A row-split linear: x_.M/tp -> x_.N, or this rank's rows of it, [1 rows N]; the bias is added after the sum."""

    def __init__(self, linear: Any, axis: Axis, inner: int | None = None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.axis, self.inner = axis, inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor
        overlap = self.axis.overlap and not self.axis.reruns
        if self.axis.sequence:
            made = matmul_scatter(x, self.weight, self.axis.group, overlap, self.inner)[None]
        else:
            made = matmul_reduce(x, self.weight, self.axis.group, overlap, self.inner)
        return made if self.bias is None else made + self.bias


class VocabularyEmbedding(nn.Module):
    """Look-up in a slice of the vocabulary's rows, added up over ranks: tokens_BT -> x_BTD, or its rows [1 rows D]."""

    rereads = False  # its backward reads no weight

    def __init__(self, embedding: Any, axis: Axis, part: Part) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.axis = axis
        self.bound = part.bound

    def forward(self, tokens_BT: Tensor) -> Tensor:
        first, end = self.bound
        elsewhere = (tokens_BT < first) | (tokens_BT >= end)
        x_BTD = F.embedding((tokens_BT - first).masked_fill(elsewhere, 0), self.weight)
        x_BTD = x_BTD.masked_fill(elsewhere[..., None], 0.0)
        return scatter(x_BTD, self.axis.group)[None] if self.axis.sequence else reduce(x_BTD, self.axis.group)


class SplitVocabulary(nn.Module):
    """In the place of `Vocabulary`: the loss of a split vocabulary, which never gathers logits; without labels they are
    gathered, for whoever wants to see them."""

    def __init__(self, axis: Axis, part: Part) -> None:
        super().__init__()
        self.axis = axis
        self.first = part.bound[0]
        self.size = part.shape[0]

    def forward(self, x: Tensor, output: nn.Linear, labels_BT: Tensor | None, context: Any, rows: Any) -> Tensor:
        group, count = self.axis.group, self.axis.count(context)
        if labels_BT is None:
            (logits,) = gather_matmul(x, [output.weight], [None], group, count, self.axis.overlap, columns=self.size)
            return columns(logits, group, self.size).view(len(context.samples_B), -1, self.size)
        labels_N = labels_BT.flatten()
        return vocabulary_loss(x.flatten(0, -2), output.weight, labels_N, group, self.size, sequence=self.axis.sequence)


class Enter(nn.Module):
    """Tokens reach experts of which every rank holds a slice: all rows, whose gradients add up over ranks.

    The router has run on this rank's rows; its logits travel beside x.  The balance loss is the same on every rank, so
    the gradient of the logits that it reads is not added up.  Where every rank has run it on all rows, they agree on
    its bits, so that a token between two experts goes to the same one on all of them.
    """

    def __init__(self, axis: Axis, balanced: bool) -> None:
        super().__init__()
        self.axis = axis
        self.balanced = balanced

    def forward(self, x: Tensor, logits: Tensor, context: Any) -> tuple[Tensor, Tensor, Tensor]:
        group, count = self.axis.group, self.axis.count(context)
        if count is None:
            logits = agree(logits, group)
            return copy(x, group), copy(logits, group), logits
        batch = len(context.samples_B)
        all_x, all_logits = gather(x, group, count), gather(logits, group, count)
        own = whole(logits, group, count) if self.balanced else all_logits
        return (
            all_x.view(batch, -1, x.shape[-1]),
            all_logits.view(batch, -1, logits.shape[-1]),
            own.view(batch, -1, logits.shape[-1]),
        )


class Leave(nn.Module):
    """The way back: x_BTD of this rank's slice of the experts -> its rows of the sum, or the sum."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x_BTD: Tensor) -> Tensor:
        return scatter(x_BTD, self.axis.group)[None] if self.axis.sequence else reduce(x_BTD, self.axis.group)
