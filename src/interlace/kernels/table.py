"""Measurements of products on one device, as a file: which candidate took how long, with which options.

A table's lines are keyed by product, dtype, ranks and shape class:

    class     M to the nearest power of two; N and K to the nearest half power of two (..., 4096, 5793, 8192, ...)

`Table.load(path_of("NVIDIA H200"), "NVIDIA H200")` reads the one that comes with the package, `store` joins
measurements to a file, whole or not at all.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from interlace.errors import ConfigError, ResourceError
from interlace.kernels.candidate import Options, Problem, Tile

FOLDER = Path(__file__).parent / "tuned"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LAUNCHED = 256  # rows up to which a product is measured as it is replayed in a CUDA graph: by itself it is launches
NEIGHBOURS = 3

Key = tuple[str, str, int, float, float, float]


def shape_class(M: int, N: int, K: int) -> tuple[float, float, float]:
    """The class of a shape, as powers of two: log2 M to 1, log2 N and log2 K to 1/2."""
    rows, *others = (math.log2(max(size, 1)) for size in (M, N, K))
    halves = [round(2 * power) / 2 for power in others]
    return float(round(rows)), halves[0], halves[1]


def key_of(problem: Problem) -> Key:
    shape = shape_class(problem.M, problem.N, problem.K)
    return (problem.op, NAMES.get(problem.dtype, str(problem.dtype)), problem.world, *shape)


@dataclass(frozen=True)
class Entry:
    """One measured shape.

    seconds: the median of each right candidate; options: those it had then, where they are not its own choice; wrong:
    why others were left out; made: with which versions.
    """

    op: str
    dtype: str
    world: int
    M: int
    N: int
    K: int
    seconds: Mapping[str, float]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    @property
    def key(self) -> Key:
        return (self.op, self.dtype, self.world, *shape_class(self.M, self.N, self.K))

    def options_of(self, name: str) -> Options:
        return options_from(self.options.get(name, {}))


def options_from(given: Mapping[str, Any]) -> Options:
    """The form of an entry -> options; TypeError on keys that they do not have."""
    tile = given.get("tile")
    return Options(**{**given, "tile": Tile(**tile) if tile is not None else None})


def options_to(options: Options) -> dict[str, Any]:
    """Options as plain values, those left out that are its own choice."""
    return {key: value for key, value in asdict(options).items() if value is not None}


@dataclass(frozen=True)
class Table:
    """The measurements of one device."""

    device: str
    entries: Mapping[Key, Entry] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, device: str) -> Table:
        """The table in a file, an empty one where there is none.  Errors: `ConfigError` names what is wrong with it."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            entries = [Entry(**entry) for entry in raw["entries"]]
            for entry in entries:
                _check(entry)
            found = str(raw["device"])
        except FileNotFoundError:
            return cls(device)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no table of measurements ({type(error).__name__}: {error}); remove it, and measure again "
                "with interlace tune."
            ) from None
        if found != device:
            raise ConfigError(f"{path} holds measurements of {found}, found {device}; choose another file.")
        return cls(device, {entry.key: entry for entry in entries})

    def to_json(self) -> str:
        """An entry a line, in the order of keys, so that two tables differ where their measurements do."""
        lines = [json.dumps(_plain(self.entries[key])) for key in sorted(self.entries)]
        body = ",\n".join(f"  {line}" for line in lines)
        return f'{{\n "device": {json.dumps(self.device)},\n "entries": [\n{body}\n ]\n}}\n'

    @functools.cached_property
    def digest(self) -> str:
        """Of the measurements; "none" of an empty table."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16] if self.entries else "none"

    def joined(self, entries: Sequence[Entry]) -> Table:
        """With these, in the place of older ones of their classes."""
        return replace(self, entries={**self.entries, **{entry.key: entry for entry in entries}})

    def find(self, problem: Problem) -> Entry | None:
        """The entry of a problem's class."""
        return self.entries.get(key_of(problem))

    def around(self, problem: Problem) -> list[tuple[float, Entry]]:
        """(octaves away, entry) of the nearest measured shapes of the same product, dtype and ranks."""
        op, dtype, world, *_ = key_of(problem)
        alike = [e for e in self.entries.values() if (e.op, e.dtype, e.world) == (op, dtype, world)]
        return sorted(((_octaves(problem, e), e) for e in alike), key=lambda pair: pair[0])[:NEIGHBOURS]


def _check(entry: Entry) -> None:
    """ValueError or TypeError on an entry that no measurement has made."""
    if not entry.seconds or min(entry.seconds.values()) <= 0 or entry.dtype not in NAMES.values():
        raise ValueError(f"an entry of {entry.op} without times, or of dtype {entry.dtype}")
    if min(entry.M, entry.N, entry.K, entry.world) < 1:
        raise ValueError(f"{entry.op} of {entry.M} x {entry.N} x {entry.K} on {entry.world} ranks")
    for name in entry.options:
        entry.options_of(name)


def _plain(entry: Entry) -> dict[str, Any]:
    """The fields that say something."""
    values = {each.name: getattr(entry, each.name) for each in fields(entry)}
    return {name: value for name, value in values.items() if value not in ({}, "")}


def _octaves(problem: Problem, entry: Entry) -> float:
    pairs = ((problem.M, entry.M), (problem.N, entry.N), (problem.K, entry.K))
    apart = sum(abs(math.log2(max(a, 1) / b)) for a, b in pairs)
    otherwise = (problem.M <= LAUNCHED) != (entry.M <= LAUNCHED)  # timed another way
    return apart + 4 * otherwise


def path_of(device: str) -> Path:
    """Where the table of a device lies in the package: "NVIDIA H200" -> tuned/nvidia-h200.json."""
    return FOLDER / ("-".join("".join(c if c.isalnum() else " " for c in device.lower()).split()) + ".json")


def store(path: Path, device: str, entries: Sequence[Entry]) -> Table:
    """Joins entries to the table in a file: whole or not at all, and after whoever else is doing so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            table = Table.load(path, device).joined(entries)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as new:
                (Path(new) / path.name).write_text(table.to_json(), encoding="utf-8")
                os.replace(Path(new) / path.name, path)
        finally:
            os.close(folder)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path} ({error.strerror or error}); choose another file with --table FILE."
        ) from None
    return table
