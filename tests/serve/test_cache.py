"""Kept keys and values: the logits of a model that reads everything at once, whatever its layers see."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from interlace import config
from interlace.models.decoder import Decoder, initialise
from interlace.models.moe import MoE
from interlace.serve.cache import Cache
from interlace.serve.generate import generate

torch.set_num_threads(1)

SIZES = """
[model]
vocab_size = 61
hidden_size = 24
num_layers = 3
num_heads = 6
num_kv_heads = 2
head_dim = 4
ffn_size = 20
init_std = 0.5
dropout = 0.4
max_positions = 64
"""
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "window": {"sliding_window": 5},
    "window of some layers, with its first tokens": {"sliding_window": 3, "window_layers": (0, 2), "sink_tokens": 2},
    "sinks": {"attention_sinks": True},
    "sinks in a window": {"attention_sinks": True, "sliding_window": 4},
    "norms of heads, biases, half of the features turn": {"qk_norm": True, "qkv_bias": True, "rotary_dim": 2},
    "latents": {"num_kv_heads": 6, "kv_rank": 7, "q_rank": 5, "rotary_dim": 2, "value_dim": 3},
    "latents in a window, with sinks": {
        "num_kv_heads": 6, "kv_rank": 7, "rotary_dim": 2, "sliding_window": 5, "attention_sinks": True,
    },
    "experts": {"num_experts": 5, "expert_ffn_size": 12, "experts_per_token": 2},
    "experts with limits, which evaluation has not": {
        "num_experts": 5, "expert_ffn_size": 12, "experts_per_token": 2, "capacity_factor": 0.5,
    },
}  # fmt: skip


def made(**dims: Any) -> Decoder:
    known = {field.name for field in dataclasses.fields(config.ModelConfig)}
    assert set(dims) <= known, set(dims) - known
    cfg = dataclasses.replace(config.loads(SIZES).model_config(), **dims)
    model = Decoder(cfg)
    initialise(model, cfg, 1)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return model.double()  # rounding hides nothing


@pytest.mark.parametrize("parts", [(1,) * 19, (7, *(1,) * 12), (3, 4, 1, 11)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_whole(name: str, parts: tuple[int, ...]) -> None:
    model = made(**MODELS[name])
    tokens = torch.randint(61, (19,), generator=torch.Generator().manual_seed(0)).tolist()
    cores = [block.attention.core for block in model.blocks if block is not None]
    cache, at = Cache(model), 0
    for count in parts:
        model.train()
        found = cache.logits([tokens[at : at + count]])[0]
        assert model.training
        at += count
        with torch.no_grad():
            expected = model.eval()(torch.tensor([tokens[:at]]))[0, -1]
        assert (found - expected).abs().max() <= 1e-10 * expected.abs().max(), at
    assert cache.lengths == [19]
    assert [block.attention.core for block in model.blocks if block is not None] == cores


def test_a_token_costs_one_position() -> None:
    model, read = made(), list[int]()
    model.embedding.register_forward_hook(lambda module, args, out: read.append(args[0].shape[1]))
    found = list(generate(model, [1, 2, 3, 4, 5], 8, temperature=0, context=9))
    assert len(found) == 8
    assert read == [5, 1, 1, 1, 1, 9, 9, 9]  # beyond the window every position is another one


def test_two_texts_of_one_model_do_not_meet() -> None:
    model = made(sliding_window=5)
    prompts = [1, 2, 3], [9, 8, 7, 6]
    alone = [list(generate(model, prompt, 12, temperature=0, context=40)) for prompt in prompts]
    both = [generate(model, prompt, 12, temperature=0, context=40) for prompt in prompts]
    together = list(zip(*both, strict=True))
    assert [list(text) for text in zip(*together, strict=True)] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_any_lengths_do_not_meet(name: str) -> None:
    """Three rows read at their own pace, one of them leaves, one begins anew: each has the logits of it alone."""
    model = made(**MODELS[name]).eval()
    draw = torch.Generator().manual_seed(4)
    rows = [torch.randint(61, (30,), generator=draw).tolist() for _ in range(3)]
    cache, at, live = Cache(model, 3), [0, 0, 0], [0, 1, 2]
    for counts in ([9, 1, 4], [1, 3, 1], [1, 1, 1], "leave", [6, 1], "anew", [2, 1], [1, 1]):
        if counts == "leave":
            cache.keep([0, 2])
            live = [0, 2]
        elif counts == "anew":
            cache.forget(1)
            rows[2], at[2] = rows[2][at[2] :], 0
        else:
            new = [rows[row][at[row] : at[row] + count] for row, count in zip(live, counts, strict=True)]
            found = cache.logits(new)
            for number, (row, count) in enumerate(zip(live, counts, strict=True)):
                at[row] += count
                with torch.no_grad():
                    expected = model(torch.tensor([rows[row][: at[row]]]))[0, -1]
                assert (found[number] - expected).abs().max() <= 1e-10 * expected.abs().max(), (row, at[row])


def test_experts_are_told_of_the_given_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 7, 1 and 3 tokens are 11 tokens, each of which chooses two experts in each of three layers."""
    told = list[int]()
    monkeypatch.setattr(MoE, "tell", lambda self, context, load_Y, losses: told.append(int(load_Y.sum())))
    cache = Cache(made(**MODELS["experts with limits, which evaluation has not"]), 3)
    cache.logits([[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]])
    cache.logits([[1], [2], [3]])
    assert told == [22, 22, 22, 6, 6, 6]
