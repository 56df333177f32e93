"""Learning rates against closed forms; which weights decay."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import runs
from interlace.config import TrainSection
from interlace.train import optimizer as optimizers
from interlace.train import session as sessions
from interlace.train.optimizer import learning_rate, state_keys


def rates(steps: int, **options: object) -> list[float]:
    cfg = TrainSection(learning_rate=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(cfg, step, steps) for step in range(steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_rises_evenly_to_the_peak(schedule: str) -> None:
    found = rates(100, lr_schedule=schedule, warmup=4, min_learning_rate=0.1)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert rates(10, lr_schedule=schedule, warmup=0)[0] == 1.0
    assert rates(2, lr_schedule=schedule, warmup=4) == [0.25, 0.5, 0.75]  # a run shorter than its warmup


def test_cosine_is_half_a_cosine_down_to_the_least_rate() -> None:
    found = rates(30, lr_schedule="cosine", warmup=10, min_learning_rate=0.2)
    for step in range(10, 31):
        assert found[step] == pytest.approx(0.6 + 0.4 * math.cos(math.pi * (step - 10) / 20))
    assert found[20] == pytest.approx(0.6)
    assert found[30] == pytest.approx(0.2)


def test_wsd_is_flat_then_a_line() -> None:
    found = rates(20, lr_schedule="wsd", warmup=2, decay=5, min_learning_rate=0.5)
    assert found[2:16] == [1.0] * 14
    assert found[16:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
    assert rates(20, lr_schedule="wsd", warmup=0)[15:] == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])  # a fifth


def test_constant_stays() -> None:
    assert rates(9, lr_schedule="constant", warmup=0) == [1.0] * 10


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_matrices_decay_and_norms_and_biases_do_not(kind: str, tmp_path: Path) -> None:
    """One step with zero gradients moves exactly the decayed weights, by rate x decay."""
    overrides = [f"train.optimizer={kind}", "train.weight_decay=0.5", "model.qkv_bias=true", "model.norm=layernorm"]
    model = sessions.build(runs.alone(), cfg := runs.config(tmp_path, "dp=1", overrides)).model
    optimizer = optimizers.build(cfg.train, model)
    optimizers.set_learning_rate(optimizer, 0.1)
    before = {name: tensor.clone() for name, tensor in model.whole_parameters()}
    for leaf in model.leaves():
        leaf.grad = torch.zeros_like(leaf)
    optimizer.step()
    for name, tensor in model.whole_parameters():
        factor = 1.0 if tensor.dim() < 2 else 0.95
        torch.testing.assert_close(tensor, before[name] * factor, rtol=1e-6, atol=0, msg=name)


def test_state_keys_are_what_torch_keeps() -> None:
    for section in (TrainSection(), TrainSection(optimizer="sgd"), TrainSection(optimizer="sgd", momentum=0.9)):
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight])
        if section.optimizer == "sgd":
            optimizer = torch.optim.SGD([weight], momentum=section.momentum)
        optimizer.step()
        kept = {key for key, value in optimizer.state[weight].items() if value is not None and value.dim()}
        assert set(state_keys(section)) == kept


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_has_the_same_bits_however_whole_chunks_are_shared_out(kind: str, fused: bool) -> None:
    """Vector loops may round their scalar rests in another way; no shard of whole chunks has a rest."""

    def updated(cuts: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(96 * 32, generator=generator)
        leaves = [torch.nn.Parameter(part.clone()) for part in whole.tensor_split(cuts)]
        if kind == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1, fused=fused)
        else:
            optimizer = torch.optim.SGD(leaves, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=fused)
        for _ in range(4):
            gradient = torch.randn(whole.shape, generator=generator) * 1e-2
            for leaf, part in zip(leaves, gradient.tensor_split(cuts), strict=True):
                leaf.grad = part.clone()
            optimizer.step()
        return torch.cat([leaf.detach() for leaf in leaves])

    reference = updated([])
    for ranks in (2, 3, 32, 96):
        assert torch.equal(updated([rank * 96 // ranks * 32 for rank in range(1, ranks)]), reference)
    assert torch.equal(updated([32, 96, 32 * 50]), reference)
