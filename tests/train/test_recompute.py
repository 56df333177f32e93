"""Recomputation changes what is kept, not what is computed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import runs
from interlace.models.decoder import Decoder, initialise
from interlace.train import recompute
from interlace.train.data import Dataset

POLICIES = ("none", "selective", "full")


@pytest.mark.parametrize("overrides", [["model.dropout=0.3"], ["model.dropout=0.3", "model.attention_dropout=0.3"]])
@pytest.mark.filterwarnings("ignore:attention dropout")
def test_gradients_are_equal_and_hooks_fire_once(overrides: list[str], tmp_path: Path) -> None:
    cfg = runs.config(tmp_path, "dp=1", overrides)
    batch = Dataset.open(cfg.data, 257, 0).sequences(0, [3, 1, 4])
    gradients, saved = {}, {}
    for policy in POLICIES:
        decoder = Decoder(cfg.model_config())
        initialise(decoder, cfg.model_config(), seed=1)
        recompute.apply(decoder, policy)
        calls: Counter[str] = Counter()
        for number, block in enumerate(decoder.blocks):
            block.register_forward_pre_hook(lambda *_, n=number, calls=calls: calls.update([f"before {n}"]))
            block.register_forward_hook(lambda *_, n=number, calls=calls: calls.update([f"after {n}"]))
        kept = [0]

        def pack(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = decoder.loss(*batch.to(torch.device("cpu")), dropout_key=7)
        loss.backward()
        assert set(calls.values()) == {1}
        assert len(calls) == 2 * cfg.model_config().num_layers
        gradients[policy] = {name: p.grad for name, p in decoder.named_parameters()}
        saved[policy] = kept[0]
    assert saved["full"] < saved["selective"] < saved["none"]
    for policy in POLICIES[1:]:
        for name, gradient in gradients["none"].items():
            assert gradient is not None
            torch.testing.assert_close(gradients[policy][name], gradient, rtol=0, atol=0, msg=f"{policy} {name}")
    different = decoder.loss(*batch.to(torch.device("cpu")), dropout_key=8)[0]
    assert different.item() != loss.item()  # dropout was on


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.timeout(300)  # the first that a C++ compiler is asked for on a machine takes it minutes
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_layers_share_one_graph(policy: str, tmp_path: Path) -> None:
    """Of more layers than the compiler would compile one by one."""
    cfg = runs.config(tmp_path, "dp=1", ["model.num_layers=10"])
    assert cfg.model_config().num_layers > torch._dynamo.config.recompile_limit
    batch = Dataset.open(cfg.data, 257, 0).sequences(0, [3, 1])
    decoder = Decoder(cfg.model_config())
    initialise(decoder, cfg.model_config(), seed=1)
    torch._dynamo.reset()
    counters.clear()
    recompute.apply(decoder, policy, compiled=True)
    loss, _ = decoder.loss(*batch.to(torch.device("cpu")))
    loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
