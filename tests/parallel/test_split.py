"""Backward in two parts has the bits of backward in one, costs as many FLOPs, and keeps no more than it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from interlace.config import loads
from interlace.models.decoder import Decoder, initialise
from interlace.parallel.split import Switch, Tape, split
from interlace.train import recompute

KINDS = {
    "plain": [],
    "biases": ["model.norm=layernorm", "model.activation=gelu", "model.qkv_bias=true", "model.out_bias=true",
               "model.mlp_bias=true", "model.qk_norm=true"],
    "experts": ["model.num_experts=3", "model.expert_ffn_size=24", "model.router_aux_loss=0.1"],
    "routers": ["model.num_experts=4", "model.expert_ffn_size=24", "model.router_aux_loss=0.1",
                "model.router_z_loss=0.1", "model.router_scores=sigmoid", "model.router_bias=true",
                "model.router_fp32=true", "model.capacity_factor=0.8", "model.shared_ffn_size=24",
                "model.shared_gate=true"],
    "tied": ["model.tie_embeddings=true"],
    "dropout": ["model.dropout=0.1"],
}  # fmt: skip
MODEL = """
[model]
vocab_size = 67
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
ffn_size = 56
"""


def gradients(kind: str, policy: str, apart: bool) -> tuple[dict[str, torch.Tensor], int, Tape]:
    cfg = loads(MODEL, KINDS[kind]).model_config()
    decoder, switch, tape = Decoder(cfg), Switch(), Tape()
    initialise(decoder, cfg, 0)
    recompute.apply(decoder, policy)
    if apart:
        split(decoder, switch)
        switch.tape = tape
    generator = torch.Generator().manual_seed(1)
    tokens_BT, labels_BT = torch.randint(0, 67, (2, 3, 13), generator=generator)
    counter = FlopCounterMode(display=False)
    with counter:
        decoder.loss(tokens_BT, labels_BT)[0].backward()
        if apart:
            weights = [name for name, p in decoder.named_parameters() if p.grad is None]
            assert all(p.dim() >= 2 for name, p in decoder.named_parameters() if name in weights)
            assert len(weights) == sum(p.dim() >= 2 for p in decoder.blocks.parameters())  # none is made before
            tape.weights()
    return (
        {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None},
        counter.get_total_flops(),
        tape,
    )


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_have_the_bits_and_flops_of_one(kind: str, policy: str) -> None:
    plain, flops, _ = gradients(kind, policy, apart=False)
    apart, apart_flops, tape = gradients(kind, policy, apart=True)
    assert plain.keys() == apart.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, apart[name]), name
    assert flops == apart_flops
    assert not tape.owed


class Saved:
    """Bytes that autograd saves, each storage once, parameters left out."""

    def __init__(self, module: nn.Module) -> None:
        self.known = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.sizes: dict[int, int] = {}
        self.kept: list[Any] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self.kept.append(tensor)
        return tensor


@pytest.mark.parametrize("kind", ["plain", "biases"])
def test_between_the_parts_little_is_kept(kind: str) -> None:
    """At most 1.1 times what a block saves from forward to backward; everything else is gone."""
    cfg = loads(MODEL, ["model.num_layers=1", *KINDS[kind]]).model_config()
    decoder, switch = Decoder(cfg), Switch()
    initialise(decoder, cfg, 0)
    block = decoder.blocks[0]
    x_BTD = torch.randn(4, 32, 32)
    context = decoder.context((4, 32), x_BTD.device)
    decoder.hidden(torch.zeros(4, 32, dtype=torch.int64), context)  # prepares the patterns
    saved = Saved(block)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        block(x_BTD.requires_grad_(), context).sum()
    split(block, switch)
    tape = switch.tape = Tape()
    y_BTD = block(x_BTD, context)
    switch.tape = None
    alive = y_BTD.grad_fn
    y_BTD.backward(torch.randn_like(y_BTD))
    assert 0 < tape.nbytes <= 1.1 * sum(saved.sizes.values())
    assert alive is not None
    with pytest.raises(RuntimeError, match="second time"):  # the graph's tensors have been let go
        torch.autograd.backward([y_BTD], [torch.ones_like(y_BTD)])


def test_without_a_tape_nothing_changes_and_frozen_weights_stay() -> None:
    switch = Switch()
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))
    module[0].weight.requires_grad_(False)
    split(module, switch)
    x = torch.randn(7, 5, requires_grad=True)
    module(x).sum().backward()
    plain = module[2].weight.grad.clone()
    module.zero_grad()
    tape = switch.tape = Tape()
    module(x).sum().backward()
    assert module[2].weight.grad is None
    assert module[0].bias.grad is not None  # small gradients are made in the first part
    tape.weights()
    assert torch.equal(module[2].weight.grad, plain)
    assert module[0].weight.grad is None
    switch.tape = Tape()
    module(x.detach()).sum().backward()  # nobody asks for dx before the ReLU: the first product is frozen anyway
    assert switch.tape.owed
