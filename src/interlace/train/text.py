"""Sources of text -> ONE stream of token ids with the places where its documents begin.

    corpus | file | folder | glob  --pieces-->  documents or faults  --tokenizer-->  Text(tokens, starts)

Everything here is a pure function of the files, so every process that reads the same files holds the same stream;
`Text.digest` is the proof.  A document is a whole text file or one line of a `.jsonl` file, and is followed by one
end-of-document id.  What cannot be a document is refused with file and physical line number, or, with
`skip_bad_lines`, left out and listed.  Documents are known by their place, not by looking for the end id: text that
spells a special token gets that token's id from the tokenizer and still ends nothing.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from interlace.errors import DataError, nearest
from interlace.tokenizer import Tokenizer, tokenizer

CHUNK = 4 << 20  # characters tokenised at a time
SUFFIXES = (".txt", ".jsonl")  # what a folder is searched for, in whatever case
JSON = (".json", ".ndjson", ".jsonlines")  # which are no text, and may or may not have an object a line
NO_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One document, or, when `fault` is not empty, why there is none.  `line` 0 means the file as a whole."""

    file: str
    line: int
    text: str = ""
    fault: str = ""
    cause: Exception | None = None

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Text:
    """A whole source as tokens.

    tokens  [N] ids in source order, uint16 (or int32 for a vocabulary beyond 65536)
    starts  [documents + 1] int64: where each document begins; the last entry is N
    digest  of the documents' text, whatever the tokenizer
    """

    name: str
    tokens: Tensor
    starts: Tensor
    tokenizer: Tokenizer
    files: tuple[str, ...]
    skipped: tuple[str, ...]
    characters: int
    digest: str


# --------------------------------------------------------------------------------------------------------- sources


def read(source: str, field: str, spec: str, vocab_size: int, skip_bad_lines: bool) -> Text:
    """Read and tokenise a whole source (see `DataSection` for the words).

    Raises DataError for a source without files or tokens, for the first fault (unless `skip_bad_lines`; the corpus
    always skips), and for a token id that the model's vocabulary does not hold.
    """
    words = tokenizer(spec)
    if words.end >= vocab_size:
        raise DataError(
            f"the end-of-document id {words.end} of tokenizer {words.name} lies outside the model's vocabulary of "
            f"{vocab_size} ids; set model.vocab_size to at least {words.size}.",
            token=words.end,
            vocab_size=vocab_size,
        )
    if source == "corpus":
        name = f"corpus (standard library of Python {platform.python_version()})"
        files, pieces = _corpus()
        skip_bad_lines = True
    else:
        name = source
        files = _find(source)
        pieces = (piece for file in files for piece in _file_pieces(file, field))
    return _gather(name, tuple(files), pieces, words, vocab_size, skip_bad_lines)


def _gather(
    name: str, files: tuple[str, ...], pieces: Iterator[Piece], words: Tokenizer, vocab_size: int, skip: bool
) -> Text:
    dtype = torch.uint16 if vocab_size <= 1 << 16 else torch.int32
    seen = hashlib.sha256()
    tokens: list[Tensor] = []
    lengths: list[Tensor] = []
    skipped: list[str] = []
    characters = 0

    def refuse(piece: Piece, fault: str) -> None:
        if not skip:
            raise DataError(
                f"{piece.where}: {fault}; repair it, or set data.skip_bad_lines = true to leave such places out and "
                "list them.",
                file=piece.file,
                line=piece.line,
            ) from piece.cause
        skipped.append(f"{piece.where}: {fault}")

    for chunk in _chunks(pieces):
        good = [piece for piece in chunk if not piece.fault]
        ids, counts = _encode(good, words) if good else (torch.empty(0), torch.empty(0))
        sizes = iter(counts.tolist())
        keep = []
        for piece in chunk:
            if piece.fault:
                refuse(piece, piece.fault)
                continue
            keep.append(next(sizes) > 0)
            if not keep[-1]:
                refuse(piece, "an empty document")
                continue
            raw = piece.text.encode()
            seen.update(len(raw).to_bytes(8, "little") + raw)
            characters += len(piece.text)
        if not any(keep):
            continue
        _check_vocabulary(good, ids, counts, vocab_size, words)
        kept = torch.tensor(keep)
        tokens.append(ids[kept.repeat_interleave(counts + 1)].to(dtype))
        lengths.append(counts[kept] + 1)

    if not tokens:
        left_out = f" ({len(skipped)} skipped, the first: {skipped[0]})" if skipped else ""
        raise DataError(f"data.source {name} holds no tokens{left_out}; name a source with text in it.")
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    digest = seen.hexdigest()[:16]
    return Text(name, torch.cat(tokens), starts, words, files, tuple(skipped), characters, digest)


def _chunks(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces of about CHUNK characters; a fault that will be raised is not delayed past its chunk."""
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text) + 64
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(good: list[Piece], words: Tokenizer) -> tuple[Tensor, Tensor]:
    """Ids (int32, every document with its end) and each document's number of ids without it."""
    try:
        ids, lengths = words.pack([piece.text for piece in good])
    except Exception as error:  # the library raises bare Exception and does not say for which document
        if len(good) > 1:
            for piece in good:
                _encode([piece], words)
        raise DataError(
            f"{good[0].where}: the tokenizer {words.name} refuses the document that begins here ({error}).",
            file=good[0].file,
            line=good[0].line,
        ) from error
    return torch.frombuffer(ids, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int64)


def _check_vocabulary(good: list[Piece], ids: Tensor, counts: Tensor, vocab_size: int, words: Tokenizer) -> None:
    if int(ids.max()) < vocab_size:
        return
    at = int((ids >= vocab_size).nonzero()[0])
    piece = good[int(torch.searchsorted((counts + 1).cumsum(0), at, right=True))]
    raise DataError(
        f"{piece.where}: the document that begins here holds token id {int(ids[at])}, outside the model's vocabulary "
        f"of {vocab_size} ids; set model.vocab_size to at least {words.size} or use the model's own tokenizer.",
        file=piece.file,
        line=piece.line,
        token=int(ids[at]),
        vocab_size=vocab_size,
    )


def _find(source: str) -> list[str]:
    """The files of a source in their order: one file, a folder's .txt and .jsonl by relative path, or a sorted glob."""
    path = Path(source).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        return [str(path / file) for file in _walk(path, SUFFIXES, set())]
    if any(letter in source for letter in "*?["):
        files = sorted(name for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
        if not files:
            raise DataError(f"data.source {source} matches no file; correct the pattern.", source=source)
        return files
    if path.exists():
        raise DataError(
            f"data.source {source} is neither a file nor a folder; write what it gives to a file first.", source=source
        )
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, ["corpus", *beside])
    hint = f' (did you mean "{near if near == "corpus" else path.with_name(near)}"?)' if near else ""
    raise DataError(
        f'data.source {source} does not exist{hint}; name "corpus", a file, a folder or a glob.', source=source
    )


def _walk(folder: Path, suffixes: tuple[str, ...], without: set[str]) -> list[str]:
    """Sorted relative paths of the files below `folder` with one of `suffixes`; links to folders are not followed."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"the folder {error.filename} cannot be read ({error.strerror}).", file=str(error.filename))

    found = []
    for where, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if name not in without]
        found += [Path(where, name).relative_to(folder).as_posix() for name in files if name.lower().endswith(suffixes)]
    if not found:
        raise DataError(f"the folder {folder} holds no {' or '.join(suffixes)} file.", file=str(folder))
    return sorted(found)


def _corpus() -> tuple[list[str], Iterator[Piece]]:
    """The standard library's own source: names relative to it, and one document per file.

    Left out: its tests, installed packages, and the two places that a build generates for its machine
    (`_sysconfigdata*.py`, `config-*/`), so that one release of Python gives one text wherever it was built.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise DataError(f"this Python has no source text of its standard library at {root}; set data.source to a text.")
    files = [name for name in _walk(root, (".py",), NO_CORPUS) if not name.startswith(("_sysconfigdata", "config-"))]
    return files, (_text_piece(root / name, name) for name in files)


# ------------------------------------------------------------------------------------------------- files -> pieces


def _file_pieces(file: str, field: str) -> Iterator[Piece]:
    if file.lower().endswith(".jsonl"):
        yield from _records(file, field)
    elif file.lower().endswith(JSON):
        yield Piece(file, 0, fault="JSON would be read as plain text (name it .jsonl if each line is an object)")
    else:
        yield _text_piece(Path(file), file)


def _text_piece(path: Path, name: str) -> Piece:
    """A whole file as one document, kept as it is (line ends too) but for a byte-order mark."""
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        return Piece(name, 0, fault=f"cannot be read ({error.strerror})", cause=error)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return Piece(name, line, fault=f"not UTF-8 (byte 0x{raw[error.start]:02x})", cause=error)
    return Piece(name, 1, text) if text else Piece(name, 1, fault="an empty document")


def _records(file: str, field: str) -> Iterator[Piece]:
    """One piece for each line of a .jsonl file that is not blank; lines end at a line feed and blank ones count."""
    try:
        with open(file, "rb") as lines:
            for number, raw in enumerate(lines, 1):
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    yield _record(file, number, line, field)
    except OSError as error:
        yield Piece(file, 0, fault=f"cannot be read ({error.strerror})", cause=error)


def _record(file: str, number: int, line: bytes, field: str) -> Piece:
    def bad(fault: str, cause: Exception | None = None) -> Piece:
        return Piece(file, number, fault=fault, cause=cause)

    try:
        record = json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        return bad(f"not UTF-8 (byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line)", error)
    except json.JSONDecodeError as error:
        return bad(f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})", error)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets nested by the thousand
        return bad(f"JSON that Python does not read ({error})", error)
    if not isinstance(record, dict):
        return bad(f'a JSON {_json_type(record)} where an object with the field "{field}" is expected')
    if field not in record:
        has = ", ".join(f'"{name}"' for name in list(record)[:8]) or "no field at all"
        return bad(f'no field "{field}" (data.field; the line has {has})')
    text = record[field]
    if not isinstance(text, str):
        return bad(f'the field "{field}" is a JSON {_json_type(text)}, not a string')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return bad(f'the field "{field}" holds half a surrogate pair (\\u{ord(text[error.start]):04x})', error)
    return Piece(file, number, text) if text else bad("an empty document")


def _json_type(value: object) -> str:
    for kind, name in ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"
