"""Tokens and text from trained weights, of one prompt or of several at once; keys and values of what was read are kept.

    model, tokenizer, cfg = load("runs/demo", "cpu")
    for piece in sample_text(model, tokenizer, "def ", 200, temperature=0.8, context=cfg.data.sequence_length):
        print(piece, end="", flush=True)

Over ranks, each of which makes the same calls (`launch.run_local` starts them, `launch.join` takes those of torchrun):

    model, tokenizer, cfg = load_split(world, "runs/demo", "tp=2 pp=2")
    texts = sample_texts(model, tokenizer, ["def ", "class "], 200, context=cfg.data.sequence_length)

The token at place i of a sequence is chosen by numbers that depend on (seed, i) alone, so a seed repeats its text,
whatever stands beside it in the batch and whatever ranks the model is split over, and a text cut anywhere and continued
from there under the same seed is the same text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from interlace import random, spec
from interlace.checkpoint import Reader, configuration, newest
from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.errors import CheckpointError, ConfigError, DataError, NumericsError, PlanError, nearest
from interlace.models.decoder import Decoder
from interlace.plan import serving
from interlace.serve.cache import Cache
from interlace.serve.served import Served, fill, split
from interlace.tokenizer import Tokenizer, stream, tokenizer
from interlace.world import World

NOT_FINITE = -1  # told in the place of a token


class Chosen(NamedTuple):
    """A token, and the logarithm of its probability by the model (temperature and top_k left out)."""

    token: int
    log_probability: float


def load(run_or_checkpoint: str | Path, device: torch.device | str) -> tuple[Decoder, Tokenizer, Config]:
    """The fp32 main weights of a run folder's newest checkpoint, or of one checkpoint, in a model on one device.

    The model is in evaluation.  CheckpointError: no checkpoint, a damaged one, or one whose weights are not, by name
    and shape, those of its own configuration.  DataError: the tokenizer's file has gone.
    """
    reader, words, cfg, model_cfg = opened(run_or_checkpoint)
    model = Decoder(model_cfg, "meta", torch.float32)
    fill(model, reader, torch.device(device))
    return model, words, cfg


def load_split(
    world: World, run_or_checkpoint: str | Path, plan: ParallelPlan | str, timeout: float | None = None
) -> tuple[Served, Tokenizer, Config]:
    """As `load`, this rank's part under a plan of `tp` and `pp`, whatever plan saved the checkpoint.  Collective.

    timeout: seconds, the limit of every wait; None = that of the run.  Errors besides: PlanError for a plan that text
    cannot be written under, or that has not as many ranks as there are; CheckpointError for ranks that find different
    checkpoints.
    """
    plan = ParallelPlan.parse(plan) if isinstance(plan, str) else plan
    reader, words, cfg, model_cfg = opened(run_or_checkpoint)
    serving.check(model_cfg, plan, cfg.data.sequence_length)
    if plan.world != world.size:
        raise PlanError(f'the parallel plan "{plan}" needs {plan.world} ranks, found {world.size}; start as many.')
    model = split(world, reader, model_cfg, plan, cfg.data.sequence_length, timeout or cfg.run.timeout)
    told = json.dumps([reader.step, reader.meta], sort_keys=True, default=str)
    model.agree("checkpoint", f"{reader.folder.name} {told}", CheckpointError)
    return model, words, cfg


def opened(run_or_checkpoint: str | Path) -> tuple[Reader, Tokenizer, Config, ModelConfig]:
    """What there is before any weight is read: errors as of `load`."""
    reader = Reader(newest(run_or_checkpoint))
    cfg, model_cfg = configuration(reader)
    _check_weights(reader, model_cfg)
    return reader, tokenizer(cfg.data.tokenizer), cfg, model_cfg


def generate(
    model: Decoder | Served,
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
    steps = generate_batch(
        model, [tokens], max_new, temperature=temperature, top_k=top_k, seed=seed, stop=stop, context=context
    )
    return (chosen.token for (chosen,) in steps if chosen is not None)


def generate_batch(
    model: Decoder | Served,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: int | None = None,
    context: int,
) -> Iterator[list[Chosen | None]]:
    """`generate` for several sequences at once: a step at a time, what was chosen for each; None once it has ended.

    Each is what it would be alone under the same seed, but for the rounding of sums.  Over ranks, collective: every
    rank is given the same arguments, and takes the same number of steps.
    """
    for name, value, form, least in (
        ("max_new", max_new, "0 or more", 0),
        ("temperature", temperature, "a finite number from 0 on", 0),
        ("top_k", top_k, "0 (all tokens) or more", 0),
        ("context", context, "at least 1 token", 1),
    ):
        if not least <= value < math.inf:
            raise ConfigError(f"{name} must be {form}, found {value}")
    served = model if isinstance(model, Served) else Served(model)
    vocab_size = served.decoder.cfg.vocab_size
    for tokens in prompts:
        if not tokens:
            raise DataError("there is no token to continue from; give a prompt, or the id that ends a document")
        if bad := [token for token in tokens if not 0 <= token < vocab_size]:
            raise DataError(f"the prompt holds token id {bad[0]}, outside the model's vocabulary of {vocab_size} ids")
    texts = [list(tokens) for tokens in prompts]
    served.agree("prompts or options", f"{texts} {max_new} {temperature} {top_k} {seed} {stop} {context}", ConfigError)
    return _generate(served, texts, max_new, temperature, top_k, random.key(seed, "generate"), stop, context)


def sample_text(
    model: Decoder | Served,
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


def sample_texts(
    model: Decoder | Served,
    words: Tokenizer,
    prompts: Sequence[str],
    max_new: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    context: int,
) -> list[str]:
    """What the model writes after each prompt, all of them in one batch; see `sample_text`."""
    tokens = [words.encode(prompt) or [words.end] for prompt in prompts]
    written: list[list[int]] = [[] for _ in prompts]
    for step in generate_batch(
        model, tokens, max_new, temperature=temperature, top_k=top_k, seed=seed, stop=words.end, context=context
    ):
        for ids, chosen in zip(written, step, strict=True):
            if chosen is not None:
                ids.append(chosen.token)
    return [words.decode(ids) for ids in written]


def _generate(
    served: Served,
    texts: list[list[int]],
    max_new: int,
    temperature: float,
    top_k: int,
    key: int,
    stop: int | None,
    context: int,
) -> Iterator[list[Chosen | None]]:
    cache, live = Cache(served, len(texts)), list(range(len(texts)))  # row of the cache -> number of the sequence
    new = [text[-context:] for text in texts]
    for _ in range(max_new if texts else 0):
        logits_BV, made = cache.logits(new), torch.empty(len(live), 2, dtype=torch.float64)
        if logits_BV is not None and served.chooses:
            rows = zip(live, logits_BV.double().cpu(), strict=True)
            chosen = [_chosen(row_V, temperature, top_k, key, len(texts[number])) for number, row_V in rows]
            made = torch.tensor(chosen, dtype=torch.float64)
        step: list[Chosen | None] = [None] * len(texts)
        for number, (token, log_probability) in zip(live, served.told(made).tolist(), strict=True):
            if token == NOT_FINITE:
                raise NumericsError("the model's logits are not finite; use a checkpoint from before its run diverged")
            if token != stop:
                step[number] = Chosen(int(token), log_probability)
                texts[number].append(int(token))
        kept = [row for row, number in enumerate(live) if step[number] is not None]
        if not kept:
            return
        yield step
        if len(kept) < len(live):
            cache.keep(kept)
            live = [live[row] for row in kept]
        new = [texts[number][-1:] for number in live]
        for row, number in enumerate(live):
            if len(texts[number]) > context:  # the window begins at another token, so every position is another one
                cache.forget(row)
                new[row] = texts[number][-context:]


def _chosen(logits_V: Tensor, temperature: float, top_k: int, key: int, place: int) -> Chosen:
    """The token for a place of the sequence."""
    if not bool(logits_V.isfinite().all()):
        return Chosen(NOT_FINITE, 0.0)
    token = _choose(logits_V, temperature, top_k, key, place)
    return Chosen(token, float(logits_V.log_softmax(0)[token]))


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
