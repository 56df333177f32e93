"""The tensor and sequence axis of a decoder: every layer's products split over `tp`, the residual stream with them.

Equals, in plain collectives (Shoeybi et al., arXiv 1909.08053), weights split as their roles say,

    x --copy--> column products --> heads, gated features --> row product --all-reduce--> + bias, dropout, residual

and with `sequence` (Korthikanti et al., arXiv 2205.05198), where every rank holds some rows of the residual stream, of
its norms and of its dropout,

    x --all-gather--> column products --> ... --> row product --reduce-scatter--> + bias, dropout, residual

which moves the same bytes and keeps 1/tp of what lies between the products.  Rows are positions of the micro-batch, all
sequences flattened: "(B T)/tp D".  So a gather is one run of memory whatever B is, and no number has to divide: "B T/tp
D" would cost a copy of x at every gather and scatter.

Before the heads of latent attention stand a few features of each position, which every rank makes of its own rows, and
only they travel, in one run (`Spread`); their gradients, the shared key's among them, add up on the way back.

Products that read one input share its gather.  Gradients of weights that every rank holds but uses on a part of the
rows or heads are owed over `tp`; the engine around the module pays them with the data axis's sum (`Part.owed`).  Row
biases are added once, after the sum.

The module keeps its names; its own modules stay where they are, apart from those without parameters that stand at the
borders (`SharedInput`, `Spread`, `Vocabulary`, `Enter`, `Leave`), the row-split linears and the embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.collectives import Group
from interlace.collectives.autograd import agree, columns, copy, gather, reduce, scatter, whole
from interlace.errors import DataError
from interlace.kernels.gather_matmul import gather_matmul
from interlace.kernels.matmul_scatter import matmul_reduce, matmul_scatter
from interlace.layout import split
from interlace.parallel.part import Part, replace_parameters
from interlace.parallel.spread import Spread
from interlace.parallel.vocabulary import vocabulary_loss
from interlace.plan.tensor import is_alike, reads, slices
from interlace.spec import Parameter, Role


@dataclass(frozen=True, eq=False)
class Axis:
    """The tensor axis: its ranks, whether the residual stream is split, how transfers run beside products.

    overlap: "auto", "plain", "fused" or "off", as `kernels.tune.lookup` has it; "off" is every transfer by itself.
    reruns: whole blocks are run again in backward.  A run that ends early, as torch's checkpoint does once everything
    saved is back, leaves out the last transfer of a block only if it stands by itself, outside of compiled graphs too.
    """

    group: Group
    sequence: bool = True
    overlap: str = "auto"
    reruns: bool = False

    def count(self, context: Any) -> int | None:
        """Rows of all ranks together where each holds some of them; None where each holds all."""
        return context.num_rows if self.sequence else None

    def gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], context: Any, columns: int
    ) -> list[Tensor]:
        """The products of all rows.  columns: the outputs of all ranks' weights together."""
        beside = self.overlap != "off"
        made: list[Tensor] = gather_matmul(
            x, weights, biases, self.group, self.count(context), beside, columns=columns, policy=self.overlap
        )
        return made

    def rows(self, count: int) -> tuple[int, int]:
        """The rows of the residual stream that this rank holds."""
        return split(count, self.group.size, self.group.rank)


def split_decoder(
    decoder: nn.Module,
    parameters: Sequence[Parameter],
    axis: Axis,
    holders: Callable[[int], Group],
    experts: Group | None = None,
) -> dict[str, Part]:
    """Splits a decoder in place, by the roles of its `parameters`, and returns every parameter's part.

    decoder: any with the modules that this file's docstring names; on the meta device, or with values.  holders: how
    many neighbours -> their group, for key and value heads that several ranks hold.  experts: the ranks that hold the
    other experts, if there are any; they split what this axis leaves of each.
    """
    group = axis.group
    parts = {}
    for parameter in parameters:
        sliced = slices(parameter, group.size)
        owed = holders(sliced.copies) if sliced.copies > 1 else None
        others = experts if parameter.role is Role.EXPERT else None
        parts[parameter.name] = Part(sliced, group, owed, is_alike(parameter, axis.sequence), others)
    replace_parameters(decoder, parts)
    heads = {parameter.name: parameter.shape[0] // parameter.chunk for parameter in parameters}
    mixtures = {parameter.name.rsplit(".", 2)[0] for parameter in parameters if parameter.role is Role.EXPERT}

    def is_chained(parent: str) -> bool:  # shared experts work beside the others
        return not any(f"{parent}.".startswith(f"{mixture}.") for mixture in mixtures)

    for parameter in parameters:
        owner = parameter.name.rpartition(".")[0]
        parent, _, name = owner.rpartition(".")
        above = decoder.get_submodule(parent)
        if parameter.role is Role.LATENT:
            above.spread = Spread(axis)
        if parameter.role is Role.COLUMN and hasattr(above, "project"):
            above.project = SharedColumns(axis, is_chained(parent))
        if parameter.role is Role.ROW:
            ends = not hasattr(above, "core")  # attention is followed by more of its block
            stays = is_chained(parent) and not (ends and axis.reruns)
            setattr(above, name, Row(decoder.get_submodule(owner), axis, parts[parameter.name].shape[1], stays))
        if parameter.role is Role.EXPERT:
            above.enter, above.leave = Enter(axis, bool(above.reads_logits)), Leave(axis)
        if parameter.name.endswith(".q.weight"):
            core: Any = above.core
            core.first_head = parts[parameter.name].bound[0] // parameter.chunk
            if f"{parent}.k.weight" in heads:
                attention: Any = above
                attention.reads = reads(heads[parameter.name], heads[f"{parent}.k.weight"], group.size, group.rank)
        if parameter.role is Role.VOCAB and (owner == "embedding" or parameter.tied_to):
            decoder.embedding = VocabularyEmbedding(decoder.get_submodule("embedding"), axis, parts[parameter.name])
        if parameter.role is Role.VOCAB and (owner == "head.output" or parameter.tied_to):
            decoder.get_submodule("head").vocabulary = SplitVocabulary(axis, parts[parameter.name])
    if axis.sequence:
        decoder.rows = axis.rows  # type: ignore[assignment]
    return parts


class SharedColumns(nn.Module):
    """In the place of `SharedInput`: column-split products of one input, gathered once.  stays: as of `Row`."""

    def __init__(self, axis: Axis, stays: bool = False) -> None:
        super().__init__()
        self.axis, self.stays = axis, stays

    def forward(self, x: Tensor, linears: Sequence[nn.Linear], context: Any) -> list[Tensor]:
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        columns = sum(linear.out_features for linear in linears)  # of all ranks: a linear keeps its whole size
        call = self.axis.gather_matmul if self.stays else functools.partial(by_itself, self.axis.gather_matmul)
        return call(x, weights, biases, context, columns)


class Row(nn.Module):
    """A row-split linear: x_.M/tp -> x_.N, or this rank's rows of it, [1 rows N]; the bias is added after the sum.

    stays: its transfer is part of the graph where the block is compiled.  That is right where every transfer of the
    block reads what another has made, which alone gives them an order there, and unless it ends a block that is run
    again: a run of what is compiled leaves out nothing at its end.
    """

    def __init__(self, linear: Any, axis: Axis, inner: int | None = None, stays: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.axis, self.inner, self.stays = axis, inner, stays

    def forward(self, x: Tensor) -> Tensor:
        group, policy = self.axis.group, self.axis.overlap
        overlap = policy != "off" and not self.axis.reruns
        product = matmul_scatter if self.axis.sequence else matmul_reduce
        call = product if self.stays else functools.partial(by_itself, product)
        made = call(x, self.weight, group, overlap, self.inner, policy)
        made = made[None] if self.axis.sequence else made
        return made if self.bias is None else made + self.bias


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_itself(transfer: Callable[..., Any], *arguments: Any) -> Any:
    """A transfer that no graph of the compiler takes in."""
    return transfer(*arguments)


class VocabularyEmbedding(nn.Module):
    """Look-up in a slice of the vocabulary's rows, added up over ranks: tokens_BT -> x_BTD, or its rows [1 rows D].

    looks: whether tokens may be outside of the vocabulary, which is refused.
    """

    rereads = False  # its backward reads no weight

    def __init__(self, embedding: Any, axis: Axis, part: Part, looks: bool = False) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.size = part.shape[0]
        self.looks = looks
        self.axis = axis
        self.bound = part.bound
        pad = embedding.padding_idx  # a row that takes no gradient
        self.pad = None if pad is None or not part.bound[0] <= pad < part.bound[1] else pad - part.bound[0]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        first, end = self.bound
        if self.looks:
            self._look(tokens_BT)
        elsewhere = (tokens_BT < first) | (tokens_BT >= end)
        x_BTD = F.embedding((tokens_BT - first).masked_fill(elsewhere, 0), self.weight, self.pad)
        x_BTD = x_BTD.masked_fill(elsewhere[..., None], 0.0)
        made: Tensor = _added_up(x_BTD, self.axis)
        return made

    def _look(self, tokens_BT: Tensor) -> None:
        """As a whole embedding does: a token of no rank's slice would be a row of zeros."""
        known = ((tokens_BT >= 0) & (tokens_BT < self.size)).all()
        if tokens_BT.is_cuda:  # where the host does not wait
            torch._assert_async(known, f"a token is not in 0 to {self.size - 1}")
        elif not known:
            low, high = tokens_BT.min().item(), tokens_BT.max().item()
            raise DataError(
                f"a token is {low if low < 0 else high}, and the embedding has rows 0 to {self.size - 1}; give tokens "
                "of its vocabulary."
            )


class SplitVocabulary(nn.Module):
    """In the place of `Vocabulary`: the loss of a split vocabulary, which never gathers logits; without labels they are
    gathered, for whoever wants to see them."""

    def __init__(self, axis: Axis, part: Part) -> None:
        super().__init__()
        self.axis = axis
        self.first = part.bound[0]
        self.size = part.shape[0]

    def forward(self, x: Tensor, output: nn.Linear, labels_BT: Tensor | None, context: Any, rows: Any) -> Tensor:
        group = self.axis.group
        if labels_BT is None:
            (logits,) = self.axis.gather_matmul(x, [output.weight], [None], context, self.size)
            whole_NV: Tensor = columns(logits, group, self.size)
            return whole_NV.view(len(context.samples_B), -1, self.size)
        x_ND, labels_N, is_split = x.flatten(0, -2), labels_BT.flatten(), self.axis.sequence
        loss: Tensor = vocabulary_loss(x_ND, output.weight, labels_N, group, self.size, sequence=is_split)
        return loss


class Enter(nn.Module):
    """Tokens reach experts of which every rank holds a slice: all rows, whose gradients add up over ranks.

    The router has run on this rank's rows; its logits travel beside x.  Its losses are the same on every rank, so the
    gradient of the logits that they read is not added up.  Where every rank has run it on all rows, they agree on
    its bits, so that a token between two experts goes to the same one on all of them.
    """

    def __init__(self, axis: Axis, has_losses: bool) -> None:
        super().__init__()
        self.axis = axis
        self.has_losses = has_losses

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, logits: Tensor, context: Any) -> tuple[Tensor, Tensor, Tensor]:
        group, count = self.axis.group, self.axis.count(context)
        if count is None:
            logits = agree(logits, group)
            return copy(x, group), copy(logits, group), logits
        batch = len(context.samples_B)
        all_x, all_logits = gather(x, group, count), gather(logits, group, count)
        own = whole(logits, group, count) if self.has_losses else all_logits
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
        made: Tensor = _added_up(x_BTD, self.axis)
        return made


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _added_up(x_BTD: Tensor, axis: Axis) -> Tensor:
    return scatter(x_BTD, axis.group)[None] if axis.sequence else reduce(x_BTD, axis.group)
