"""One step: the loss is divided once, by the global number of labels, however the batch is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import runs
from interlace.models.decoder import Decoder, initialise
from interlace.train import session as sessions
from interlace.train.data import IGNORED, Batch
from interlace.train.step import StepResult, forward_backward, train_step

LABELS = (15, 9, 3, 1)  # pytorch/torchtitan#1842: unlike numbers of labels per sequence


def cut(batch: Batch, *parts: list[int]) -> list[Batch]:
    fields = ("tokens_BT", "labels_BT", "positions_BT", "documents_BT", "samples_B")
    return [replace(batch, **{field: getattr(batch, field)[rows] for field in fields}) for rows in parts]


def unlike(session: sessions.Session) -> Batch:
    batch = session.dataset.sequences(0, [5, 2, 9, 7])
    for row, count in enumerate(LABELS):
        batch.labels_BT[row] = batch.tokens_BT[row]
        batch.labels_BT[row, count:] = IGNORED
    return batch


@pytest.mark.parametrize("parts", [([0, 1, 2, 3],), ([0], [1], [2], [3]), ([3, 0], [2], [1]), ([0, 1, 2], [3])])
def test_loss_and_gradients_of_any_cut(parts: tuple[list[int], ...], tmp_path: Path) -> None:
    session = sessions.build(runs.alone(), runs.config(tmp_path))
    batch = unlike(session)
    loss, labels = forward_backward(session.model, cut(batch, *parts), session.groups.host)

    decoder = Decoder(session.model_cfg)
    initialise(decoder, session.model_cfg, seed=0)
    total, count = decoder.loss(*batch.to(torch.device("cpu")))
    (total / sum(LABELS)).backward()

    assert labels == count.item() == sum(LABELS)
    assert loss.item() == pytest.approx(total.item() / sum(LABELS), rel=1e-6)
    expected = dict(decoder.named_parameters())
    for name, gradient in session.model.whole_gradients():
        reference = expected[name].grad
        assert reference is not None
        assert (gradient - reference).abs().max() <= 1e-5 * reference.abs().max(), name


def test_a_part_without_labels_adds_nothing(tmp_path: Path) -> None:
    session = sessions.build(runs.alone(), runs.config(tmp_path, "dp=1", ["model.num_experts=4",
                             "model.expert_ffn_size=8", "model.router_aux_loss=0.5"]))  # fmt: skip
    whole, empty = cut(unlike(session), [0, 1], [2, 3])
    empty.labels_BT.fill_(IGNORED)
    found = []
    for parts in ([whole], [whole, empty], [empty, whole]):
        loss, labels = forward_backward(session.model, parts, session.groups.host)
        found.append((loss.item(), labels, torch.cat([g.flatten() for _, g in session.model.whole_gradients()])))
        session.optimizer.zero_grad()
    for loss, labels, gradient in found[1:]:
        assert (loss, labels) == found[0][:2]
        assert torch.equal(gradient, found[0][2])


def test_no_label_at_all_is_a_loss_of_zero(tmp_path: Path) -> None:
    session = sessions.build(runs.alone(), runs.config(tmp_path, "dp=1", ["train.weight_decay=0"]))
    before = [leaf.detach().clone() for leaf in session.model.leaves()]
    batch = unlike(session)
    batch.labels_BT.fill_(IGNORED)
    result = train_step(session.model, session.optimizer, [batch], session.groups.host, clip_norm=1.0)
    assert (result.loss.item(), result.grad_norm.item(), result.labels) == (0.0, 0.0, 0)
    assert all(torch.equal(leaf, was) for leaf, was in zip(session.model.leaves(), before, strict=True))


def test_clipping_bounds_the_update_and_the_norm_is_the_one_before(tmp_path: Path) -> None:
    overrides = ["train.optimizer=sgd", "train.weight_decay=0", "train.learning_rate=1.0"]
    norms = []
    for limit in (0.0, 0.25):
        session = sessions.build(runs.alone(), runs.config(tmp_path, "dp=1", overrides))
        before = torch.cat([leaf.detach().clone() for leaf in session.model.leaves()]).double()
        result: StepResult = train_step(
            session.model, session.optimizer, session.batches(), session.groups.host, clip_norm=limit
        )
        moved = (torch.cat([leaf.detach() for leaf in session.model.leaves()]).double() - before).norm().item()
        norms.append(result.grad_norm.item())
        assert moved == pytest.approx(limit or result.grad_norm.item(), rel=1e-4)
        assert result.part.item() == result.loss.item()
        assert all(leaf.grad is None for leaf in session.model.leaves())
    assert norms[0] == norms[1] > 0.25
