"""Generation: equal to a plain loop over the model, repeatable, and only from weights that are the model's own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import save_values
from interlace import config, random
from interlace.config import Config, ModelConfig
from interlace.errors import CheckpointError, ConfigError, DataError, NumericsError
from interlace.models.decoder import Decoder, initialise
from interlace.serve.generate import _choose, generate, load, sample_text
from interlace.tokenizer import tokenizer
from tokenizer_files import byte_level

torch.set_num_threads(1)

CONFIG = """
[model]
vocab_size = 257
hidden_size = 12
num_layers = 3
num_heads = 3
num_kv_heads = 1
head_dim = 4
ffn_size = 20
init_std = 0.5
dropout = 0.4
[data]
sequence_length = 16
"""
PROMPT = [100, 101, 102, 32]


def run_config(more: str = "") -> Config:
    return config.loads(CONFIG + more)


def small(seed: int = 3, **dims: Any) -> Decoder:
    cfg = dataclasses.replace(run_config().model_config(), **dims)
    model = Decoder(cfg)
    initialise(model, cfg, seed)
    return model


def logits_after(model: Decoder, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens]))[0, -1]


def save_run(out: Path, model: Decoder, step: int = 7, **change: torch.Tensor | None) -> Path:
    tensors: dict[str, Any] = {f"main/{name}": tensor for name, tensor in model.named_parameters()}
    tensors |= {"exp_avg/embedding.weight": torch.zeros(257, 12)} | change
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    meta = {"config": run_config().to_toml(), "model": dataclasses.asdict(model.cfg)}
    save_values(out / "checkpoints", step, present, meta)
    return out


# --- choosing tokens


@pytest.mark.parametrize("context", [1, 5, 100])
def test_greedy_equals_a_plain_loop_over_a_window(context: int) -> None:
    model = small()
    tokens = list(PROMPT)
    for _ in range(12):
        tokens.append(int(logits_after(model, tokens[-context:]).argmax()))
    found = list(generate(model, list(PROMPT), 12, temperature=0, context=context))
    assert found == tokens[len(PROMPT) :]
    assert len(set(found)) > 3  # the model is not stuck on one token, which any window would give


def test_the_window_matters() -> None:
    model = small()
    narrow = list(generate(model, PROMPT, 12, temperature=0, context=2))
    assert narrow != list(generate(model, PROMPT, 12, temperature=0, context=16))


def test_a_seed_repeats_and_another_differs() -> None:
    model = small()

    def drawn(seed: int) -> list[int]:
        return list(generate(model, PROMPT, 20, temperature=1.0, seed=seed, context=8))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_continuation_is_the_same_text() -> None:
    model = small()
    whole = list(generate(model, PROMPT, 20, seed=5, context=8))
    rest = list(generate(model, PROMPT + whole[:7], 13, seed=5, context=8))
    assert rest == whole[7:]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 4), (2.5, 9), (1.0, 1000)])
def test_tokens_are_drawn_with_the_softmax_of_the_logits(temperature: float, top_k: int) -> None:
    logits = torch.randn(11, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 1.5
    scaled = logits / temperature
    if 0 < top_k < 11:
        scaled[scaled < scaled.sort(descending=True).values[top_k - 1]] = float("-inf")
    expected, count = scaled.softmax(-1), 1500
    drawn = Counter(_choose(logits, temperature, top_k, 77, place) for place in range(count))
    found = torch.tensor([drawn[token] / count for token in range(11)], dtype=torch.float64)
    assert torch.all((found - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt())  # four deviations


def test_a_drawn_token_is_that_of_the_models_logits_and_its_place() -> None:
    model, key = small(), random.key(9, "generate")
    tokens = list(PROMPT)
    for _ in range(6):
        tokens.append(_choose(logits_after(model, tokens[-3:]).double(), 0.9, 20, key, len(tokens)))
    assert list(generate(model, PROMPT, 6, temperature=0.9, top_k=20, seed=9, context=3)) == tokens[len(PROMPT) :]


def test_the_least_temperature_is_greedy_and_top_1_too() -> None:
    model = small()
    greedy = list(generate(model, PROMPT, 9, temperature=0, context=8))
    assert list(generate(model, PROMPT, 9, temperature=1e-300, context=8)) == greedy
    assert list(generate(model, PROMPT, 9, temperature=5.0, top_k=1, context=8)) == greedy


def test_stop_is_not_given_out() -> None:
    model = small()
    free = list(generate(model, PROMPT, 12, temperature=0, context=8))
    stop = free[5]
    assert list(generate(model, PROMPT, 12, temperature=0, context=8, stop=stop)) == free[: free.index(stop)]


def test_the_callers_list_mode_and_gradients_stay() -> None:
    model, tokens = small().train(), list(PROMPT)
    dropped = list(generate(model, tokens, 8, temperature=0, context=8))
    assert tokens == PROMPT
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert dropped == list(generate(model.eval(), tokens, 8, temperature=0, context=8))  # without dropout


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"temperature": -1.0}, ConfigError, "temperature must be a finite number from 0 on, found -1.0"),
        ({"temperature": float("nan")}, ConfigError, "temperature must be a finite number from 0 on, found nan"),
        ({"top_k": -2}, ConfigError, "top_k must be 0 (all tokens) or more, found -2"),
        ({"context": 0}, ConfigError, "context must be at least 1 token, found 0"),
        ({"max_new": -1}, ConfigError, "max_new must be 0 or more, found -1"),
        ({"tokens": []}, DataError, "there is no token to continue from"),
        ({"tokens": [1, 300]}, DataError, "token id 300, outside the model's vocabulary of 257 ids"),
    ],
)
def test_wrong_arguments_are_refused_at_once(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        generate(small(), **{"tokens": PROMPT, "max_new": 3, "context": 8} | change)
    assert sentence in str(caught.value)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = small()
    with torch.no_grad():
        model.head.norm.weight[2] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        next(generate(model, PROMPT, 3, context=8))


# --- loading


def test_a_run_folder_gives_the_newest_weights(tmp_path: Path) -> None:
    old, new = small(seed=1), small(seed=2)
    save_run(tmp_path, old, step=5)
    save_run(tmp_path, new, step=10)
    for path, source in (
        (tmp_path, new),
        (tmp_path / "checkpoints", new),
        (tmp_path / "checkpoints" / "step-5", old),
    ):
        model, words, cfg = load(path, "cpu")
        assert cfg == run_config()
        assert words.name == "bytes"
        assert not model.training
        for (name, found), (expected_name, expected) in zip(
            model.named_parameters(), source.named_parameters(), strict=True
        ):
            assert name == expected_name
            assert torch.equal(found, expected)
        assert torch.equal(logits_after(model, PROMPT), logits_after(source, PROMPT))


def test_tied_weights_are_loaded_once(tmp_path: Path) -> None:
    source = small(tie_embeddings=True)
    model, _, _ = load(save_run(tmp_path, source), "cpu")
    assert model.head.output.weight is model.embedding.weight
    assert torch.equal(logits_after(model, PROMPT), logits_after(source, PROMPT))


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(tmp_path: Path) -> None:
    save_run(tmp_path, small(seed=1), step=5)
    save_run(tmp_path, small(seed=2), step=10)
    (tmp_path / "checkpoints" / "step-10" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="step-10 passed over"):
        model, _, _ = load(tmp_path, "cpu")
    assert torch.equal(model.embedding.weight, small(seed=1).embedding.weight)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"main/blocks.1.mlp.up.weight": torch.zeros(21, 12)},
            "main/blocks.1.mlp.up.weight has shape [21, 12], its configuration makes it [20, 12]",
        ),
        ({"main/blocks.2.attention.q.weight": None}, "lacks main/blocks.2.attention.q.weight"),
        (
            {"main/blocks.3.mlp.up.weight": torch.zeros(20, 12)},
            "holds main/blocks.3.mlp.up.weight, which the model of its configuration lacks",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], sentence: str
) -> None:
    save_run(tmp_path, small(), 7, **change)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, "cpu")
    assert sentence in str(caught.value)


def test_folders_without_a_usable_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path, "cpu")
    save_values(tmp_path, 3, {"main/embedding.weight": torch.zeros(4, 3)}, {})
    with pytest.raises(CheckpointError, match="does not hold its run file"):
        load(tmp_path, "cpu")


# --- text


def test_text_ends_before_the_end_of_a_document(tmp_path: Path) -> None:
    model, words, cfg = load(save_run(tmp_path, small()), "cpu")
    ids = list(generate(model, list(b"def "), 30, seed=2, stop=256, context=16))
    pieces = list(sample_text(model, words, "def ", 30, seed=2, context=cfg.data.sequence_length))
    assert "".join(pieces) == bytes(ids).decode(errors="replace")


def test_an_empty_prompt_begins_a_document_and_the_end_gives_no_text() -> None:
    model, words = small(), tokenizer("bytes")
    ids = list(generate(model, [256], 9, seed=1, stop=256, context=8))
    assert "".join(sample_text(model, words, "", 9, seed=1, context=8)) == bytes(ids).decode(errors="replace")
    with torch.no_grad():
        model.head.output.weight.zero_()  # equal logits: the lowest id
    assert "".join(sample_text(model, words, "", 3, temperature=0, context=8)) == "\0\0\0"
    assert list(sample_text(model, dataclasses.replace(words, end=0), "", 3, temperature=0, context=8)) == []


def test_a_run_with_a_tokenizer_file(tmp_path: Path) -> None:
    spec = byte_level(tmp_path, ["</s>"])
    cfg = config.loads(CONFIG.replace("257", "270"), [f"data.tokenizer={spec}"])
    model = Decoder(cfg.model_config())
    initialise(model, cfg.model_config(), 1)
    tensors = {f"main/{name}": tensor for name, tensor in model.named_parameters()}
    save_values(tmp_path / "checkpoints", 1, tensors, {"config": cfg.to_toml()})  # without the resolved dimensions
    loaded, words, _ = load(tmp_path, "cpu")
    assert isinstance(loaded.cfg, ModelConfig)
    assert loaded.cfg.vocab_size == 270
    pieces = list(sample_text(loaded, words, "def", 12, seed=4, context=16))
    ids = list(generate(model, words.encode("def"), 12, seed=4, stop=words.end, context=16))
    assert "".join(pieces) == words.decode(ids)
