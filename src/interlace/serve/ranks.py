"""What `interlace generate` writes, on one process or on the ranks that it starts, the first of which writes it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.errors import DataError
from interlace.models.decoder import Decoder
from interlace.serve.generate import load_split, sample_text, sample_texts
from interlace.serve.served import Served
from interlace.tokenizer import Tokenizer
from interlace.world import World


@dataclass(frozen=True)
class Asked:
    """in_lines: a JSON object for every prompt, in their order; else the one prompt and what follows it, as it grows.

    batch: prompts at a time.
    """

    prompts: list[str]
    in_lines: bool
    tokens: int
    temperature: float
    top_k: int
    seed: int
    batch: int


def pieces(model: Decoder | Served, words: Tokenizer, asked: Asked, context: int) -> Iterator[str]:
    """The output, piece by piece."""
    how: dict[str, Any] = {
        "temperature": asked.temperature, "top_k": asked.top_k, "seed": asked.seed, "context": context,
    }  # fmt: skip
    if not asked.in_lines:
        (prompt,) = asked.prompts
        yield prompt
        yield from sample_text(model, words, prompt, asked.tokens, **how)
        yield "\n"
        return
    for first in range(0, len(asked.prompts), asked.batch):
        prompts = asked.prompts[first : first + asked.batch]
        texts = sample_texts(model, words, prompts, asked.tokens, **how)
        for prompt, text in zip(prompts, texts, strict=True):
            yield json.dumps({"prompt": prompt, "text": text}) + "\n"


def run(world: World, checkpoint: str, plan: str, asked: dict[str, Any], timeout: float) -> None:
    """One rank of several."""
    model, words, cfg = load_split(world, checkpoint, plan, timeout)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for piece in pieces(model, words, Asked(**asked), cfg.data.sequence_length):
        if world.rank == 0:
            _say(piece)


def _say(piece: str) -> None:
    try:
        sys.stdout.write(piece)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on; the other ranks still wait for this one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one {"prompt": "..."} a line.  DataError by file and line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text, found byte {error.object[error.start]:#x}") from None
    except OSError as error:
        raise DataError(f"cannot read the prompts in {path}: {(error.strerror or str(error)).lower()}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise DataError(f'{path}, line {number}: must be {{"prompt": "..."}}, found {line.strip()[:60]}')
        found.append(row["prompt"])
    if not found:
        raise DataError(f'{path} holds no prompt; give a line of {{"prompt": "..."}} for each')
    return found
