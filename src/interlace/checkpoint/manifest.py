"""What a checkpoint says of itself: sealed JSON, merged from all ranks' parts, and believed only after every check."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interlace.checkpoint.files import open_file, regular, sync_folder, write
from interlace.errors import CheckpointError, SecurityError

FORMAT = "interlace-checkpoint-1"
MANIFEST = "manifest.json"
MAX_JSON = 64 << 20  # bytes of a manifest: about 1.4 million pieces
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAME = ("shape", "dtype", "layout", "cut")  # of all pieces of a name
STEP = re.compile(r"step-([0-9]{1,18})(\.old)?")  # a published folder's name
_SHARD = re.compile(r"rank-(?:0|[1-9][0-9]{0,6})\.safetensors")
_SEAL = (b'{"blake2b":"', 32, b'",\n"body":')  # then the body's JSON and b"}\n"; the digest covers all after itself

PieceEntry = tuple[int, int, int, int, int]  # file, start, stop, offset in the file, CRC-32
Slices = tuple[int, tuple[int, ...]]  # a dimension and the borders of its slices: elements count slice by slice
PLAIN: Slices = (0, ())  # row-major


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the manifest describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    pieces: list[PieceEntry]  # by start
    cut: Slices = PLAIN


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest every value of which has been checked."""

    step: int
    meta: dict[str, Any]
    files: list[tuple[str, int, int, int]]  # name, bytes, bytes before the data, CRC-32 of those
    tensors: dict[str, TensorEntry]


def merge(parts: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """All ranks' parts -> the manifest's files and tensors."""
    tensors: dict[str, Any] = {}
    for rank in sorted(parts):
        for name, part in parts[rank]["tensors"].items():
            entry = tensors.setdefault(name, {**part, "pieces": []})
            differs = [
                f"{key} {part.get(key)!r}, not {entry.get(key)!r}" for key in SAME if part.get(key) != entry.get(key)
            ]
            if differs:
                raise CheckpointError(f"rank {rank} saves {name!r} with {differs[0]} as the ranks before it")
            entry["pieces"] += [[rank, *piece] for piece in part["pieces"]]
    for entry in tensors.values():
        entry["pieces"].sort(key=lambda piece: (piece[1], piece[2]))
    return {"files": [parts[rank]["file"] for rank in sorted(parts)], "tensors": tensors}


def parse(body: dict[str, Any], where: str) -> Manifest:
    """Check a manifest's every value; CheckpointError (or SecurityError for a file name) names the first wrong one."""
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{where} has format {str(body.get('format'))[:50]!r}; this version reads {FORMAT!r}")
    manifest = Manifest(_typed(body, "step", int, where), _typed(body, "meta", dict, where), [], {})
    spans: list[list[tuple[int, int]]] = []
    for entry in _typed(body, "files", list, where):
        name, size, header, digest = _row(entry, (str, int, int, int), f"{where}: files")
        if not _SHARD.fullmatch(name):
            raise SecurityError(f"{where} names the file {name[:100]!r}; only rank-N.safetensors beside it is opened")
        if not 8 <= header <= size or any(name == other for other, *_ in manifest.files):
            raise CheckpointError(f"{where}: {name} is listed twice or has a header of {header} bytes")
        manifest.files.append((name, size, header, digest))
        spans.append([(header, header)])
    for name, entry in _typed(body, "tensors", dict, where).items():
        here = f"{where}: tensor {name[:200]!r}"
        shape = tuple(_typed(entry, "shape", list, here))
        dtype, layout = _typed(entry, "dtype", str, here), _typed(entry, "layout", str, here)
        if dtype not in DTYPES or len(shape) > 16 or any(type(n) is not int or not 0 <= n < 2**48 for n in shape):
            raise CheckpointError(f"{here} has dtype {dtype[:20]!r} and shape {str(shape)[:100]}")
        pieces = [_row(piece, (int,) * 5, here) for piece in _typed(entry, "pieces", list, here)]
        _check_tiling(pieces, math.prod(shape), here)
        for file, start, stop, offset, _ in pieces:
            if file >= len(spans):
                raise CheckpointError(f"{here} lies in file {file} of {len(spans)}")
            spans[file].append((offset, offset + (stop - start) * DTYPES[dtype].itemsize))
        manifest.tensors[name] = TensorEntry(shape, DTYPES[dtype], layout, pieces, _cut(entry, shape, here))
    for (file_name, size, *_), covered in zip(manifest.files, spans, strict=True):
        covered.sort()
        ends = [stop for _, stop in covered]
        if [start for start, _ in covered[1:]] != ends[:-1] or ends[-1] != size:
            raise CheckpointError(f"{where}: the pieces in {file_name} do not cover its {size:,} bytes exactly once")
    return manifest


def _check_tiling(pieces: list[Any], total: int, here: str) -> None:
    at = 0
    for file, start, stop, _, _ in pieces:
        if start > at:
            raise CheckpointError(f"{here} has no elements [{at}, {start}) of [0, {total}): no rank saved them")
        if start < at or (stop <= start and total):
            raise CheckpointError(f"{here} has elements [{start}, {min(at, stop)}) twice or empty (file {file})")
        at = stop
    if at != total:
        raise CheckpointError(f"{here} has elements [0, {at}) of [0, {total}): no rank saved the rest")


def _cut(entry: dict[str, Any], shape: tuple[int, ...], here: str) -> Slices:
    """How a tensor's elements count: absent for row-major; else [dimension, [0, ..., its length]]."""
    if "cut" not in entry:
        return PLAIN
    value = _typed(entry, "cut", list, here)
    right = len(value) == 2 and type(value[0]) is int and type(value[1]) is list and 0 < value[0] < len(shape)
    borders = value[1] if right else []
    right = right and all(type(n) is int for n in borders) and borders == sorted(borders)
    if not right or len(borders) < 2 or (borders[0], borders[-1]) != (0, shape[value[0]]):
        raise CheckpointError(f"{here} has the cut {str(value)[:100]}, which is none of its shape {list(shape)}")
    return value[0], tuple(borders)


def _typed(body: Any, key: str, kind: type, where: str) -> Any:
    value = body.get(key) if isinstance(body, dict) else None
    if type(value) is not kind or (type(value) is int and value < 0):
        raise CheckpointError(f"{where}: {key} is {str(value)[:50]!r}, not a {kind.__name__} as it must be")
    return value


def _row(value: Any, kinds: tuple[type, ...], where: str) -> Any:
    """A list of exactly these types, whole numbers within 0 .. 2**62."""
    right = type(value) is list and [type(item) for item in value] == list(kinds)
    if right and all(0 <= item < 2**62 for item in value if type(item) is int):
        return tuple(value)
    raise CheckpointError(f"{where} has the entry {str(value)[:100]}, not {[kind.__name__ for kind in kinds]}")


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write a sealed JSON file so that it appears whole, synced, under its name."""
    rest = _SEAL[2] + json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
    if len(rest) > MAX_JSON:
        raise CheckpointError(f"{path.name} would have {len(rest):,} bytes, more than {MAX_JSON:,}; save fewer pieces")
    handle = os.open(path.with_suffix(".part"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write(handle, memoryview(_SEAL[0] + blake2b(rest) + rest))
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(path.with_suffix(".part"), path)
    sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """A sealed JSON file's body: size, then digest, then strict JSON."""
    where = f"{path.parent.name}/{path.name}"
    size = regular(path).st_size
    if size > MAX_JSON + 100:
        raise CheckpointError(f"{where} has {size:,} bytes; at most {MAX_JSON:,} are read")
    lead = len(_SEAL[0]) + _SEAL[1]
    with open(open_file(path), "rb") as file:
        data = file.read(MAX_JSON + 100)
    if data[:lead] != _SEAL[0] + blake2b(data[lead:]):
        raise CheckpointError(f"{where} is damaged: its {size:,} bytes do not match the digest in them")
    try:
        loaded = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not strict JSON: {str(error)[:200]}") from None
    return dict(_typed(loaded, "body", dict, where))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {key[:100]!r} stands twice")
    return result


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:50]} is not a number")
    return float(text)


def blake2b(data: bytes) -> bytes:
    """The digest that seals a JSON file, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=_SEAL[1] // 2).hexdigest().encode()
