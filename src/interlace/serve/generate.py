"""Tokens and text from trained weights, on one device: a batch of one, keys and values of what was read kept.

    model, tokenizer, cfg = load("runs/demo", "cpu")
    for piece in sample_text(model, tokenizer, "def ", 200, temperature=0.8, context=cfg.data.sequence_length):
        print(piece, end="", flush=True)

The token at place i of the sequence is chosen by numbers that depend on (seed, i) alone, so a seed repeats its text,
and a text cut anywhere and continued from there under the same seed is the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from interlace import random, spec
from interlace.checkpoint import Reader, configuration, newest
from interlace.config import Config, ModelConfig
from interlace.errors import CheckpointError, ConfigError, DataError, NumericsError, nearest
from interlace.models.decoder import Decoder
from interlace.serve.cache import Cache
from interlace.tokenizer import Tokenizer, stream, tokenizer


def load(run_or_checkpoint: str | Path, device: torch.device | str) -> tuple[Decoder, Tokenizer, Config]:
    """The fp32 main weights of a run folder's newest checkpoint, or of one checkpoint, in a model on one device.

    The model is in evaluation.  CheckpointError: no checkpoint, a damaged one, or one whose weights are not, by name
    and shape, those of its own configuration.  DataError: the tokenizer's file has gone.
    """
    reader = Reader(newest(run_or_checkpoint))
    cfg, model_cfg = configuration(reader)
    _check_weights(reader, model_cfg)
    words = tokenizer(cfg.data.tokenizer)
    model = Decoder(model_cfg, device, torch.float32).eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        tensor.copy_(reader.read(f"main/{name}").view(tensor.shape))
    for name, buffer in model.named_buffers():
        buffer.copy_(reader.read(f"buffer/{name}").view(buffer.shape))
    return model, words, cfg


def generate(
    model: Decoder,
    tokens: list[int],
    max_new: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: int | None = None,
    context: int,
) -> Iterator[int]:
    """At most `max_new` tokens after `tokens`, each as soon as it is chosen; ends before the token `stop`.

    temperature: 0 takes the likeliest token (the lowest of equals); else the logits are divided by it.
    top_k: only the k likeliest tokens are drawn from; 0 = all of them.
    context: the model sees that many last tokens, as one document that begins there.
    """
    for name, value, form, least in (
        ("max_new", max_new, "0 or more", 0),
        ("temperature", temperature, "a finite number from 0 on", 0),
        ("top_k", top_k, "0 (all tokens) or more", 0),
        ("context", context, "at least 1 token", 1),
    ):
        if not least <= value < math.inf:
            raise ConfigError(f"{name} must be {form}, found {value}")
    vocab_size = model.cfg.vocab_size
    if not tokens:
        raise DataError("there is no token to continue from; give a prompt, or the id that ends a document")
    if bad := [token for token in tokens if not 0 <= token < vocab_size]:
        raise DataError(f"the prompt holds token id {bad[0]}, outside the model's vocabulary of {vocab_size} ids")
    return _generate(model, list(tokens), max_new, temperature, top_k, random.key(seed, "generate"), stop, context)


def sample_text(
    model: Decoder,
    words: Tokenizer,
    prompt: str,
    max_new: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    context: int,
) -> Iterator[str]:
    """What the model writes after the prompt, in pieces of whole characters, up to the end of the document or `max_new`
    tokens; see `generate`.  An empty prompt begins after the end of another document."""
    tokens = words.encode(prompt) or [words.end]
    ids = generate(
        model, tokens, max_new, temperature=temperature, top_k=top_k, seed=seed, stop=words.end, context=context
    )
    return stream(words, ids)


def _generate(
    model: Decoder,
    tokens: list[int],
    max_new: int,
    temperature: float,
    top_k: int,
    key: int,
    stop: int | None,
    context: int,
) -> Iterator[int]:
    cache, read = Cache(model), 0
    for _ in range(max_new):
        if len(tokens) > context:  # the window begins at another token, so every position is another one
            cache, read = Cache(model), len(tokens) - context
        logits_V = cache.logits(tokens[read:]).double().cpu()
        read = len(tokens)
        if not bool(logits_V.isfinite().all()):
            raise NumericsError("the model's logits are not finite; use a checkpoint from before its run diverged")
        token = _choose(logits_V, temperature, top_k, key, len(tokens))
        if token == stop:
            return
        tokens.append(token)
        yield token


def _choose(logits_V: Tensor, temperature: float, top_k: int, key: int, place: int) -> int:
    """The token for a place of the sequence: inversion of the cumulative distribution by one number on [0, 1)."""
    if temperature == 0:
        return int(logits_V.argmax())
    values, ids = logits_V.sort(descending=True, stable=True)
    if top_k:
        values, ids = values[:top_k], ids[:top_k]
    cumulative = ((values - values[0]) / temperature).exp().cumsum(0)
    high, low = random.bits(key, 2 * place, 2).tolist()
    drawn = ((high << 32 | low) >> 11) * 2.0**-53
    return int(ids[int((cumulative <= drawn * cumulative[-1]).sum().clamp(max=len(ids) - 1))])


def _check_weights(reader: Reader, cfg: ModelConfig) -> None:
    """The main weights are exactly the model's parameters, each in its shape; so are buffers."""
    shapes = {f"main/{parameter.name}": parameter.shape for parameter in spec.parameters(cfg)}
    shapes |= {f"buffer/{parameter.name}": parameter.shape for parameter in spec.buffers(cfg)}
    for name, shape in shapes.items():
        if name not in reader.names:
            raise CheckpointError(f"{reader.folder} lacks {name}, which its configuration asks for")
        if (found := reader.shape(name)) != shape:
            raise CheckpointError(
                f"{reader.folder}: {name} has shape {list(found)}, its configuration makes it {list(shape)}"
            )
    for name in reader.names:
        if name.startswith(("main/", "buffer/")) and name not in shapes:
            near = nearest(name, shapes)
            hint = f"; the nearest it has is {near}" if near else ""
            raise CheckpointError(f"{reader.folder} holds {name}, which the model of its configuration lacks{hint}")
