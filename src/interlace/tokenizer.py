"""Text -> token ids and back: bytes, or a `tokenizer.json`; the same for training and for what a model writes.

    words = tokenizer("bytes")            or the path of a tokenizer.json, or of the folder that holds one
    words.encode("def ")                  [100, 101, 102, 32]
    words.pack(["a", "bc"])               (array of 97, 256, 98, 99, 256; [1, 2])     whole documents, each with its end
    "".join(stream(words, ids))           words.decode(ids), in pieces of whole characters

The byte tokenizer's ids 0 to 255 are the bytes of UTF-8, 256 ends a document.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

BYTES_END = 256  # the byte tokenizer's end-of-document id
FILE = "tokenizer.json"

# Ends of a document under their usual names, most specific first; used when no tokenizer_config.json says it.
END_NAMES = (
    "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end|>", "<|eot_id|>", "<|im_end|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """
    name, digest      what it is, and a hash of all that its ids depend on
    end, end_name     the id that ends a document, in numbers and in words
    size              one more than the largest id
    pack              documents -> their ids (32 bits each), every one with its end, and each one's number without it
    decode            ids -> text; bytes that are no UTF-8 become U+FFFD, the end and other special tokens nothing
    """

    name: str
    digest: str
    end: int
    end_name: str
    size: int
    pack: Callable[[Sequence[str]], tuple[array[int], list[int]]]
    decode: Callable[[list[int]], str]

    def encode(self, text: str) -> list[int]:
        """A text's ids without the end of the document; half a surrogate pair becomes "?"."""
        ids, _ = self.pack([text.encode(errors="replace").decode()])
        return ids[:-1].tolist()


def tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a run file: "bytes", or the path of a `tokenizer.json` or of the folder that holds one."""
    path = file_of(spec)
    return _file_tokenizer(path) if path else _byte_tokenizer()


def file_of(spec: str) -> Path | None:
    """The `tokenizer.json` that a run file's word means; None for "bytes"."""
    if spec == "bytes":
        return None
    path = Path(spec).expanduser()
    return path / FILE if path.is_dir() else path


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


def _byte_tokenizer() -> Tokenizer:
    codec = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"

    def pack(texts: Sequence[str]) -> tuple[array[int], list[int]]:
        # Character number b for byte b, so that a codec widens bytes to the 32 bits of an id.
        raw = [text.encode().decode("latin-1") for text in texts]
        wide = "".join(one + chr(BYTES_END) for one in raw)
        return array("i", wide.encode(codec)), [len(one) for one in raw]

    def decode(ids: list[int]) -> str:
        return bytes(number for number in ids if number < BYTES_END).decode(errors="replace")

    return Tokenizer("bytes", "bytes", BYTES_END, f"id {BYTES_END}", BYTES_END + 1, pack, decode)


def _file_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f'the tokenizer {path} cannot be read ({error.strerror}); data.tokenizer is "bytes" or the path of a '
            f"{FILE}.",
            file=str(path),
        ) from error
    try:
        library = Library.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception and ValueError
        raise DataError(
            f"{path} is not a {FILE} that the tokenizers library reads ({error}).", file=str(path)
        ) from error
    library.no_truncation()  # both may be stored in the file, and would silently cut or lengthen documents
    library.no_padding()
    size = max(library.get_vocab(with_added_tokens=True).values()) + 1
    end = _end_of_document(library, path)
    end_name = f"id {size}, one past the tokenizer's own" if end is None else f'"{library.id_to_token(end)}" (id {end})'
    if end is None:
        end, size = size, size + 1

    def pack(texts: Sequence[str]) -> tuple[array[int], list[int]]:
        ids, lengths = array("i"), []
        for encoding in library.encode_batch_fast(list(texts), add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(end)
            lengths.append(len(encoding.ids))
        return ids, lengths

    def decode(ids: list[int]) -> str:
        return str(library.decode([number for number in ids if number != end], skip_special_tokens=True))

    digest = hashlib.sha256(raw + str(end).encode()).hexdigest()[:16]  # the end may come from the file next door
    return Tokenizer(str(path), digest, end, end_name, size, pack, decode)


def _end_of_document(library: Library, path: Path) -> int | None:
    """The id of the token that ends a document: what the file next door says, else the first usual name, else None."""
    config = path.with_name("tokenizer_config.json")
    special = {token.content: number for number, token in library.get_added_tokens_decoder().items() if token.special}
    if config.is_file():
        try:
            stated = json.loads(config.read_bytes())["eos_token"]
        except (ValueError, TypeError, KeyError, OSError):
            stated = None  # no statement: the usual names decide
        name = stated["content"] if isinstance(stated, dict) and "content" in stated else stated
        if isinstance(name, str):
            number = library.token_to_id(name)
            if number is None:
                raise DataError(f'{config} names the eos_token "{name}", which {path} does not hold.', file=str(config))
            return int(number)
    return next((int(special[name]) for name in END_NAMES if name in special), None)
