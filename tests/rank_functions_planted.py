"""Faults planted in our own code along every axis, and what the ranks run with them.

Each is a function of the rank that gives a context in which the library is wrong; the docstring says what is wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import rank_functions_context as contexts
import rank_functions_train as train
from interlace.collectives import Handle
from interlace.collectives import autograd as dual
from interlace.parallel import context, data, expert, flat, pipeline, spread, stages, tensor
from interlace.parallel import split as splitting
from interlace.parallel.part import Part
from interlace.parallel.sequence import SequenceAxis
from interlace.train import verify
from interlace.train.data import Batch
from interlace.world import World


def second_pass_overwrites(rank: int) -> Any:
    """Gradients of a micro-batch take the place of those before it."""
    plain = flat.Flat.accumulate

    def accumulate(self: flat.Flat, index: int) -> None:
        self._written.discard(index)
        plain(self, index)

    return mock.patch.object(flat.Flat, "accumulate", accumulate)


def labels_of_every_pass(rank: int) -> Any:
    """The loss of a micro-batch is divided by its own labels, and by the number of micro-batches."""

    def forward_backward(model: Any, batches: Any, host: Any, *rest: Any) -> Any:
        plain = model.run

        def run(method: str, *arguments: Any, **options: Any) -> Any:
            loss, labels = plain(method, *arguments, **options)
            everyone = sum(int((batch.labels_BT != -100).sum()) for batch in batches)
            return loss * (everyone / (len(batches) * labels)), labels

        with mock.patch.object(model, "run", run):
            return real(model, batches, host, *rest)

    real = verify.forward_backward
    return mock.patch.object(verify, "forward_backward", forward_backward)


def norm_of_every_copy(rank: int) -> Any:
    """What several data ranks hold is counted by each of them in the norm."""
    return mock.patch.object(flat.Flat, "is_counted", True)


def norm_twice_over_tp(rank: int) -> Any:
    """What several ranks of the tensor axis hold is counted by each of them in the norm."""
    return mock.patch.object(Part, "is_first", True)


def vocabulary_off_by_one(rank: int) -> Any:
    """Every slice of the embedding is looked up as if it began one row later."""
    plain = tensor.VocabularyEmbedding.__init__

    def __init__(self: Any, embedding: Any, axis: Any, part: Part) -> None:
        plain(self, embedding, axis, part)
        self.bound = part.bound[0] + 1, part.bound[1] + 1

    return mock.patch.object(tensor.VocabularyEmbedding, "__init__", __init__)


def router_not_summed(rank: int) -> Any:
    """Over tp each rank's slice of the experts gives the router its own gradient alone."""
    plain = tensor.gather

    def gather(x: Tensor, group: Any, count: int) -> Tensor:
        is_logits = x.shape[-1] == 4  # experts
        return dual.whole(x, group, count) if is_logits else plain(x, group, count)

    return mock.patch.object(tensor, "gather", gather)


def latents_not_summed(rank: int) -> Any:
    """Over tp each rank's heads give what all of them share, a latent and a rotary key, their own gradient alone."""

    def own_rows(group: Any, traced: bool, grad: Tensor) -> Tensor:
        return grad.split(dual.balanced(len(grad), group.size))[group.rank]

    return mock.patch.object(spread, "SCATTERED", own_rows)


def local_positions(rank: int) -> Any:
    """Rotary positions count from 0 on every rank of cp."""
    plain = Batch.at

    def at(self: Batch, columns_T: Tensor) -> Batch:
        found = plain(self, columns_T)
        return replace(found, positions_BT=torch.arange(len(columns_T)).expand_as(found.positions_BT))

    return mock.patch.object(Batch, "at", at)


def pieces_half_off(rank: int) -> Any:
    """The second zigzag piece of a rank is taken half a piece too early."""
    plain = SequenceAxis.columns

    def columns(self: SequenceAxis, rank: int | None = None) -> Tensor:
        columns_T = plain(self, rank)
        if rank is None:
            half = len(columns_T) // 2
            columns_T[half:] -= len(columns_T) // 4
        return columns_T

    return mock.patch.object(SequenceAxis, "columns", columns)


def load_of_own_positions(rank: int) -> Any:
    """The balance loss takes the choices at this rank's positions for those of the whole sequence."""

    def forward(self: context.SplitBalance, load_BX: Tensor, mass_BX: Tensor, k: int) -> Any:
        return self.inner(load_BX * self.axis.group.size, mass_BX, k)

    return mock.patch.object(context.SplitBalance, "forward", forward)


@contextlib.contextmanager
def another_micro_batch(rank: int) -> Iterator[None]:
    """A stage computes a micro-batch with what came for the first one."""
    plain, kept = pipeline.Stage.forward, dict[Any, Tensor]()

    def forward(self: pipeline.Stage, micro_batch: int, x: Tensor | None) -> Tensor | None:
        if x is not None:
            if micro_batch == 0:
                kept[self] = x
            x = kept[self]
        return plain(self, micro_batch, x)

    with mock.patch.object(pipeline.Stage, "forward", forward):
        yield


def tie_paid_twice(rank: int) -> Any:
    """The gradient of a tied weight is added up over its two stages once more."""
    plain = stages.StagedParallel._tie

    def tie(self: stages.StagedParallel, group: Any) -> None:
        plain(self, group)
        plain(self, group)

    return mock.patch.object(stages.StagedParallel, "_tie", tie)


def last_products_forgotten(rank: int) -> Any:
    """Of what a split backward has put aside, the first product is left out."""
    plain = splitting.Tape.weights

    def weights(self: splitting.Tape) -> None:
        del self.owed[:1]
        plain(self)

    return mock.patch.object(splitting.Tape, "weights", weights)


def experts_averaged_over_ep(rank: int) -> Any:
    """Gradients of experts are divided by the ranks of ep."""
    plain = flat.Flat.reduce

    def reduce(self: flat.Flat, scale: float, wire: Any) -> Handle[Tensor]:
        part = self.members[0].part
        ways = part.experts.size if part is not None and part.experts is not None else 1
        return plain(self, scale / ways, wire)

    return mock.patch.object(flat.Flat, "reduce", reduce)


def experts_not_summed(rank: int) -> Any:
    """Ranks that hold the same experts keep the gradients of their own rows."""
    plain = data.make_units

    def make_units(*arguments: Any, experts: Any, **options: Any) -> Any:
        alone = experts and (experts[0].like(ranks=(rank,), rank=0, process_group=None), None)
        return plain(*arguments, experts=alone, **options)

    return mock.patch.object(data, "make_units", make_units)


def combine_unsorted(rank: int) -> Any:
    """Rows that come back are weighted in the order of experts, not of tokens."""
    plain = expert.combine

    def combine(made_RD: Tensor, order_R: Tensor, inverse_R: Tensor, weights_Nk: Tensor) -> Tensor:
        own_R = torch.arange(len(order_R))
        return plain(made_RD, own_R, own_R, weights_Nk)

    return mock.patch.object(expert, "combine", combine)


def rows_in_order_of_ranks(rank: int) -> Any:
    """Rows that arrive are handed to experts as if they stood by expert already."""
    plain = expert._by_expert

    def by_expert(rows_RD: Tensor, taken: Tensor) -> Any:
        *_, counts = plain(rows_RD, taken)
        own_R = torch.arange(len(rows_RD))
        return rows_RD, own_R, own_R, counts

    return mock.patch.object(expert, "_by_expert", by_expert)


def gradients_stay_with_the_experts(rank: int) -> Any:
    """Gradients of rows do not travel back from the second exchange: zeros do."""
    plain = dual.Exchange.start

    def start(self: dual.Exchange, x_RD: Tensor, back: bool) -> None:
        plain(self, torch.zeros_like(x_RD) if back and self.name == "combine" else x_RD, back)

    return mock.patch.object(dual.Exchange, "start", start)


def rows_twice(rank: int) -> Any:
    """Every row of an exchange travels twice: the numbers are right, the bytes are not."""
    plain = dual.Exchange.start

    def start(self: dual.Exchange, x_RD: Tensor, back: bool) -> None:
        plain(self, x_RD, back)
        self.finish()
        plain(self, x_RD, back)

    return mock.patch.object(dual.Exchange, "start", start)


OWN = (
    second_pass_overwrites,
    labels_of_every_pass,
    norm_of_every_copy,
    norm_twice_over_tp,
    vocabulary_off_by_one,
    router_not_summed,
    latents_not_summed,
    local_positions,
    pieces_half_off,
    load_of_own_positions,
    another_micro_batch,
    tie_paid_twice,
    last_products_forgotten,
    experts_averaged_over_ep,
    experts_not_summed,
    combine_unsorted,
    rows_in_order_of_ranks,
    gradients_stay_with_the_experts,
    rows_twice,
)
FAULTS: dict[str, Callable[[int], Any]] = {
    **train.FAULTS,
    **contexts.FAULTS,
    **{function.__name__: function for function in OWN},
}


def verify_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`verify.under_plan` for each job in turn, with its fault planted."""
    found = []
    for job in jobs:
        with FAULTS[job.pop("fault")](world.rank):
            found.append(verify.under_plan(world, **job))
    return found


def said(name: str) -> str:
    """What a fault does, in words."""
    function = FAULTS[name]
    function = function.func if isinstance(function, functools.partial) else function
    text = (function.__doc__ or "").strip()
    return text[4:] if text.startswith("(") else text
