"""Text -> ids and back, for a prompt and its continuation; the ids are those that training gives the same text.

Training packs whole documents into tensors and never looks back (`train.text`); here single strings go both ways.  The
tests hold the two to the same ids and the same end of a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.errors import DataError

BYTES_END = 256  # the byte tokenizer's end-of-document id

# Ends of a document under their usual names, most specific first; used when no tokenizer_config.json says it.
END_NAMES = (
    "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end|>", "<|eot_id|>", "<|im_end|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`encode` gives a text's ids without the end of the document, `decode` the text of ids; bytes that are no UTF-8
    become U+FFFD, and ids that stand for no text (the end, other special tokens) nothing."""

    name: str
    end: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a run file: "bytes", or the path of a `tokenizer.json` or of the folder that holds one."""
    if spec == "bytes":
        return Tokenizer("bytes", BYTES_END, lambda text: list(text.encode(errors="replace")), _decode_bytes)
    return _file_tokenizer(Path(spec).expanduser())


def stream(words: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of ids as it grows: pieces that together are `words.decode` of them all.

    A character of several ids comes once it is whole, so nothing that was given out has to be taken back.
    """
    seen: list[int] = []
    given = ""
    for number in ids:
        seen.append(number)
        whole = words.decode(seen).rstrip("\ufffd")  # what ends so may still become a character
        if len(whole) > len(given):
            yield whole[len(given) :]
            given = whole
    rest = words.decode(seen)[len(given) :]
    if rest:
        yield rest


def _decode_bytes(ids: list[int]) -> str:
    return bytes(number for number in ids if number < BYTES_END).decode(errors="replace")


def _file_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        library = Library.from_buffer(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"the tokenizer {path}, with which the run was trained, cannot be read ({error.strerror}); put it back.",
            file=str(path),
        ) from error
    except Exception as error:  # the library raises bare Exception and ValueError
        raise DataError(
            f"{path} is not a tokenizer.json that the tokenizers library reads ({error}).", file=str(path)
        ) from error
    library.no_truncation()
    library.no_padding()

    def encode(text: str) -> list[int]:
        return list(library.encode(text, add_special_tokens=False).ids)

    return Tokenizer(str(path), _end(library, path), encode, lambda ids: library.decode(ids, skip_special_tokens=True))


def _end(library: Any, path: Path) -> int:
    """The id that ends a document: the eos_token of the tokenizer_config.json next door, else the first usual name."""
    beside = path.with_name("tokenizer_config.json")
    try:
        stated = json.loads(beside.read_bytes())["eos_token"]
        stated = stated["content"] if isinstance(stated, dict) else stated
    except (OSError, ValueError, TypeError, KeyError):
        stated = None  # no statement: the usual names decide
    if isinstance(stated, str):
        ids = [library.token_to_id(stated)]
    else:
        special = {
            token.content: number for number, token in library.get_added_tokens_decoder().items() if token.special
        }
        ids = [special.get(name) for name in END_NAMES]
    for number in ids:
        if number is not None:
            return int(number)
    raise DataError(
        f"{path} has no token that ends a document{f' named {stated}' if stated else ''}; state it as eos_token in "
        f"{beside}.",
        file=str(path),
    )
