"""A checkpoint: names, layouts and tensors in files, saved under one mesh and read under any other with equal values.

    checkpoints/step-50/manifest.json         names, shapes, layouts, pieces, sizes, digests, step, the caller's meta
    checkpoints/step-50/rank-R.safetensors    the pieces rank R held: 1-D ranges of the unsharded, flattened tensors
    checkpoints/writer.lock                   which process writes here

A piece is `[start, stop)` of a flattened tensor, so a reader needs no mesh: it asks for the flat ranges its own layout
gives it.  The pieces of a name must tile its tensor exactly once; a replicated tensor is saved by one of its holders.

Publishing.  Every rank writes, syncs and describes its shard (`part-R.json`, by rename) in `step-50.TOKEN-K.tmp`, where
TOKEN is new in every run and K counts this run's saves of that step, so that no file of another run or attempt can be
taken up.  Rank 0 waits for all parts, checks them as a reader would, writes the manifest and renames the folder to
`step-50`.  A killed process leaves the old checkpoint or the new one.  A step saved again stands as `step-50.old`
between two renames; `find` knows that name.  Nothing older is pruned before the new folder has been read back.

Digests.  Pieces and headers carry CRC-32, which finds every single flipped bit, every burst of up to 32 bits and all
else but one case in 4e9; the manifest carries the BLAKE2b of its own bytes.  They find damage, not forgery.  Measured,
64 MiB, one core of a 2-core Xeon (model 167): zlib.crc32 1.9 GB/s, zlib.adler32 1.4, hashlib.sha256 0.9,
hashlib.blake2b 0.7; CRC-32 lets go of the interpreter lock meanwhile.

No pickle: the only decoder here is `json`, on files of limited size whose digest matched, strictly (no duplicate keys,
no NaN, limited depth).  File names in a manifest are `rank-N.safetensors` and nothing else; links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
import weakref
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interlace.errors import CheckpointError, InterlaceError, ResourceError, SecurityError, nearest

FORMAT = "interlace-checkpoint-1"
MANIFEST = "manifest.json"
LOCK = "writer.lock"
MAX_JSON = 64 << 20  # bytes of a manifest: about 1.4 million pieces
CHUNK = 8 << 20  # bytes digested and written, or read, at once
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SAME = ("shape", "dtype", "layout")  # of all pieces of a name
_SHARD = re.compile(r"rank-(?:0|[1-9][0-9]{0,6})\.safetensors")
_STEP = re.compile(r"step-([0-9]{1,18})(\.old)?")
_SEAL = (b'{"blake2b":"', 32, b'",\n"body":')  # then the body's JSON and b"}\n"; the digest covers all after itself


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one tensor: elements [start, stop) of it, flattened and unsharded."""

    name: str  # "main/blocks.0.mlp.up.weight"
    shape: tuple[int, ...]  # of the unsharded tensor
    layout: str  # the Layout it is held in: recorded, the same on every rank
    start: int
    stop: int
    tensor: torch.Tensor  # [stop - start], any device


class Writer:
    """Saves in the background, one checkpoint at a time.  Every rank has one and calls `save` with the same steps.

    `root` is the checkpoints folder, `timeout` the seconds without any file growing after which a peer counts as
    missing, `keep` how many checkpoints to leave (0 = all), `token` a word of this run alone, equal on all its ranks
    and new after every restart; one rank alone draws its own.  Rank 0 locks the folder until `close`.
    """

    def __init__(self, root: Path, rank: int, world: int, timeout: float, keep: int = 0, token: str = "") -> None:
        assert 0 <= rank < world and timeout > 0 and keep >= 0, (rank, world, timeout, keep)
        token = token or (secrets.token_hex(8) if world == 1 else "")
        if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", token):
            raise CheckpointError(
                f"checkpoint writer of rank {rank} of {world} has run token {token!r}; give all ranks one word of "
                "letters, digits and _ that no other run uses"
            )
        self.root, self.rank, self.world = Path(root), rank, world
        self.timeout, self.keep, self.token = timeout, keep, token
        self._attempts: Counter[int] = Counter()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failed: list[Path] = []  # rank 0: folders of saves that failed
        self._release: Callable[[], object] = lambda: None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                _lock(self.root, token)
                self._release = weakref.finalize(self, _unlock, self.root, os.getpid(), token)
                self._sweep()
        except OSError as error:
            raise ResourceError(f"cannot write checkpoints under {self.root}: {error.strerror or error}") from error

    def save(self, step: int, pieces: Iterable[Piece], meta: dict[str, Any]) -> None:
        """Copy the pieces to host memory and return; a thread writes and publishes them.

        Waits for the save before, and raises its error if it failed.  `meta` is plain JSON; rank 0's is stored.  A rank
        may pass no pieces; an empty piece only counts for a tensor that has no elements.
        """
        self.finish()
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step {step!r} cannot be saved; a step is a number from 0 on")
        try:
            meta = json.loads(json.dumps(meta, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"meta of step {step} must be plain JSON with finite numbers: {error}") from None
        held: dict[str, Piece] = {}
        for piece in pieces:
            _check_piece(piece)
            if piece.start == piece.stop and 0 not in piece.shape:
                continue
            copy = torch.empty(piece.stop - piece.start, dtype=piece.tensor.dtype).copy_(piece.tensor.detach())
            key = f"{piece.name}@{piece.start}"
            if key in held:
                raise CheckpointError(f"rank {self.rank} saves {key} twice; every piece is saved once")
            held[key] = Piece(piece.name, tuple(piece.shape), piece.layout, piece.start, piece.stop, copy)
        tmp = self.root / f"step-{step}.{self.token}-{self._attempts[step]}.tmp"
        self._attempts[step] += 1
        name, arguments = f"checkpoint-{step}", (step, tmp, held, meta)
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last `save` is published; raise its CheckpointError or ResourceError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """`finish`, and let go of the folder's lock."""
        try:
            self.finish()
        finally:
            self._release()

    # -- in the background

    def _run(self, step: int, tmp: Path, held: dict[str, Piece], meta: dict[str, Any]) -> None:
        part = tmp / f"part-{self.rank}.json"
        needed = sum(piece.tensor.nbytes for piece in held.values())
        try:
            tmp.mkdir(exist_ok=True)
            _write_json(part, _write_shard(tmp / f"rank-{self.rank}.safetensors", held))
            held.clear()
            if self.rank == 0:
                self._publish(step, tmp, meta)
            else:
                self._await_rank_0(step, tmp)
        except BaseException as error:
            self._error = self._explain(error, step, tmp, needed)
            self._give_up(tmp, part.exists())

    def _give_up(self, tmp: Path, described: bool) -> None:
        """Tell the other ranks why, and make room: a shard that rank 0 may still publish stays."""
        with contextlib.suppress(OSError):
            if self.world == 1:
                shutil.rmtree(tmp)
                return
            if self.rank == 0 or not described or (tmp / "failed-0.json").exists():
                (tmp / f"rank-{self.rank}.safetensors").unlink(missing_ok=True)
            _write_json(tmp / f"failed-{self.rank}.json", {"error": str(self._error)})
            if self.rank == 0:  # those described so far; a rank that comes later sees the line above
                self._failed.append(tmp)
                for shard in tmp.glob("rank-*.safetensors"):
                    shard.unlink()

    def _explain(self, error: BaseException, step: int, tmp: Path, needed: int) -> BaseException:
        if not isinstance(error, OSError):
            return error
        if self.rank and not tmp.exists():
            return CheckpointError(f"rank {self.rank}: rank 0 gave up on step {step}; its folder is gone")
        free = shutil.disk_usage(self.root).free if self.root.exists() else 0
        return ResourceError(
            f"rank {self.rank} could not write step {step} under {self.root}: {error.strerror or error} "
            f"({needed:,} bytes needed, {free:,} free); earlier checkpoints are intact: make room or change [run] out"
        )

    def _wait(self, step: int, tmp: Path, done: Callable[[], bool]) -> None:
        """Poll until done(), at most `timeout` seconds of the monotonic clock after the folder last changed."""
        seen: list[tuple[str, int]] = []
        deadline, pause = time.monotonic() + self.timeout, 0.002
        while not done():
            with contextlib.suppress(OSError), os.scandir(tmp) as entries:
                now = sorted((entry.name, entry.stat().st_size) for entry in entries)
                for name, _ in now:
                    if re.fullmatch(r"failed-[0-9]+\.json", name):
                        raise CheckpointError(str(_read_json(tmp / name)["error"]))
                if now != seen:
                    seen, deadline = now, time.monotonic() + self.timeout
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self.world) if not (tmp / f"part-{rank}.json").exists()]
                who = f"ranks {missing} did not save" if missing else "rank 0 did not publish"
                raise CheckpointError(
                    f"step {step}: {who} within {self.timeout:g} s; every rank must call save(), not rank 0 alone",
                    missing=missing,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _await_rank_0(self, step: int, tmp: Path) -> None:
        self._wait(step, tmp, lambda: not tmp.exists())
        with contextlib.suppress(CheckpointError):
            if _read_json(self.root / f"step-{step}" / MANIFEST).get("attempt") == tmp.name:
                return
        raise FileNotFoundError(tmp)  # _explain: rank 0 gave up

    def _publish(self, step: int, tmp: Path, meta: dict[str, Any]) -> None:
        parts: dict[int, dict[str, Any]] = {}

        def complete() -> bool:
            for rank in range(self.world):
                path = tmp / f"part-{rank}.json"
                if rank not in parts and path.exists():
                    parts[rank] = _read_json(path)
            return len(parts) == self.world

        self._wait(step, tmp, complete)
        manifest = {"format": FORMAT, "step": step, "attempt": tmp.name, "meta": meta} | _merge(parts)
        _write_json(tmp / MANIFEST, manifest)
        for rank in range(self.world):
            (tmp / f"part-{rank}.json").unlink()
        _sync_folder(tmp)
        Reader(tmp)
        final, old = self.root / f"step-{step}", self.root / f"step-{step}.old"
        if final.exists():
            self._discard(old)
            os.rename(final, old)
        os.rename(tmp, final)
        _sync_folder(self.root)
        Reader(final)
        self._discard(old)
        while self._failed:
            shutil.rmtree(self._failed.pop(), ignore_errors=True)
        if self.keep:
            steps = sorted(int(m[1]) for m in map(_STEP.fullmatch, os.listdir(self.root)) if m and not m[2])
            for earlier in [s for s in dict.fromkeys(steps) if s <= step][: -self.keep]:
                self._discard(self.root / f"step-{earlier}")

    def _discard(self, folder: Path) -> None:
        """Delete a checkpoint; a kill half-way leaves no folder that looks like a checkpoint."""
        if folder.is_dir() and not folder.is_symlink():
            doomed = self.root / f"{folder.name}.{self.token}-{secrets.token_hex(4)}.tmp"
            os.rename(folder, doomed)
            shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """Remove what killed runs left unfinished; only rank 0, with the lock."""
        for path in self.root.glob("step-*.tmp"):
            if f".{self.token}-" not in path.name and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        for old in self.root.glob("step-*.old"):
            with contextlib.suppress(InterlaceError):
                Reader(old.with_suffix(""))
                self._discard(old)


_Piece = tuple[int, int, int, int, int]  # file, start, stop, offset in the file, CRC-32


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    pieces: list[_Piece]  # by start


_HEADER = _Tensor((), torch.uint8, "", [])


@dataclass(frozen=True, slots=True)
class _Manifest:
    step: int
    meta: dict[str, Any]
    files: list[tuple[str, int, int, int]]  # name, bytes, bytes before the data, CRC-32 of those
    tensors: dict[str, _Tensor]


class Reader:
    """A published checkpoint.  Opening it checks the manifest and every file's presence and size; reading, the digests.

    `step`, `meta`, `names`; `strays`, files of the folder that the manifest does not name and nobody opens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._file: tuple[int, int] | None = None  # index and descriptor of the file open now
        self._verified: set[_Piece] = set()
        where = f"{self.folder.name}/{MANIFEST}"
        manifest = _parse(_read_json(self.folder / MANIFEST), where)
        self._files, self._tensors = manifest.files, manifest.tensors
        self.step, self.meta, self.names = manifest.step, manifest.meta, tuple(manifest.tensors)
        for name, size, _, _ in self._files:
            have = _regular(self.folder / name).st_size
            if have != size:
                raise CheckpointError(f"{self.folder / name} has {have:,} bytes, its manifest says {size:,}")
        known = {MANIFEST, *(name for name, *_ in self._files)}
        self.strays = tuple(sorted(set(os.listdir(self.folder)) - known))

    def __del__(self) -> None:
        if getattr(self, "_file", None):
            self._close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the unsharded tensor."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def layout(self, name: str) -> str:
        """The Layout string it was held in when it was saved."""
        return self._tensor(name).layout

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor -> [stop - start] on the CPU, in its saved dtype.

        The digest of every piece touched is verified, once per reader; a damaged one is refused by file and name.
        """
        tensor = self._tensor(name)
        total = math.prod(tensor.shape)
        stop = total if stop is None else stop
        if not 0 <= start <= stop <= total:
            raise CheckpointError(f"elements [{start}, {stop}) of {name!r} were asked for; it has [0, {total})")
        out = torch.empty(stop - start, dtype=tensor.dtype)
        view, size = _memory(out), out.element_size()
        first = bisect_right(tensor.pieces, start, key=lambda piece: piece[1]) - 1
        for piece in tensor.pieces[max(first, 0) :] if stop > start else []:
            file, left, right, offset, _ = piece
            low, high = max(left, start), min(right, stop)
            if low >= high:
                break
            into = view[(low - start) * size : (high - start) * size]
            if (low, high) == (left, right):  # the whole piece: digest what was read
                self._check(repr(name), tensor, piece, into)
            else:
                self._check(repr(name), tensor, piece)
                self._fill(file, offset + (low - left) * size, into)
        return out

    def verify(self) -> None:
        """Read every byte of every file and compare all digests; the manifest makes sure none is left out."""
        for index in range(len(self._files)):
            self._check_header(index)
        for name, tensor in self._tensors.items():
            for piece in tensor.pieces:
                self._check(repr(name), tensor, piece)

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            close = nearest(name, self.names)
            hint = f"; nearest: {close!r}" if close else ""
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}{hint}")
        return self._tensors[name]

    def _check_header(self, index: int) -> None:
        _, _, size, digest = self._files[index]
        self._check("its header", _HEADER, (index, 0, size, 0, digest))

    def _check(self, name: str, tensor: _Tensor, piece: _Piece, into: memoryview | None = None) -> None:
        file, start, stop, offset, want = piece
        if offset:  # a piece; a file's header is digested like one, at offset 0
            self._check_header(file)
        if into is None and piece in self._verified:
            return
        size = (stop - start) * tensor.dtype.itemsize
        spare = memoryview(bytearray(min(size, CHUNK))) if into is None else into
        have = 0
        for at in range(0, size, CHUNK):
            length = min(CHUNK, size - at)
            chunk = spare[:length] if into is None else spare[at : at + length]
            self._fill(file, offset + at, chunk)
            have = zlib.crc32(chunk, have)
        if have != want:
            raise CheckpointError(
                f"{self.folder / self._files[file][0]} is damaged or another file: {name} [{start}, {stop}) has CRC-32 "
                f"{have:08x}, the manifest says {want:08x}"
            )
        self._verified.add(piece)

    def _fill(self, index: int, offset: int, into: memoryview) -> None:
        path = self.folder / self._files[index][0]
        if self._file is None or self._file[0] != index:
            self._close()
            _regular(path)
            self._file = (index, _open(path))
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._file[1], [into[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{path} ends at byte {offset + done:,}, before its data")
            done += count

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file[1])
            self._file = None


def find(root: Path, resume: str | Path = "auto", verify: bool = False) -> tuple[Path | None, tuple[str, ...]]:
    """The checkpoint to resume from, and notes on what was passed over and why.

    "auto": the newest valid one under `root`; None when there is none at all.  When there are some and none is valid,
    that is a CheckpointError: starting anew would write over them.  A path must be valid itself.  Valid means manifest
    and sizes; `verify` reads every byte too.
    """
    if resume != "auto":
        reader = Reader(Path(resume))
        if verify:
            reader.verify()
        return Path(resume), ()
    names = sorted(os.listdir(root)) if Path(root).is_dir() else []
    notes = [f"{name} was never published; ignored" for name in names if name.endswith(".tmp")]
    found = [(int(match[1]), not match[2], match[0]) for match in map(_STEP.fullmatch, names) if match]
    for step, _, name in sorted(found, reverse=True):
        try:
            reader = Reader(Path(root) / name)
            if reader.step != step:
                raise CheckpointError(f"{name} holds step {reader.step}: the folder was renamed")
            if verify:
                reader.verify()
            return Path(root) / name, tuple(notes)
        except CheckpointError as error:
            notes.append(f"{name} passed over: {error}")
    if found:
        raise CheckpointError(f"no checkpoint under {root} is valid ({'; '.join(notes)}); give [run] out a new folder")
    return None, tuple(notes)


# -- what is written


def _check_piece(piece: Piece) -> None:
    name, total = piece.name, math.prod(piece.shape)
    if not name or len(name) > 1000 or not name.isprintable():
        raise CheckpointError(f"{name[:100]!r} cannot name a tensor; use 1 to 1000 printable characters")
    if piece.tensor.dtype not in _DTYPE_NAMES:
        raise CheckpointError(f"{name!r} is {piece.tensor.dtype}; a checkpoint holds {', '.join(DTYPES)}")
    if not 0 <= piece.start <= piece.stop <= total or tuple(piece.tensor.shape) != (piece.stop - piece.start,):
        raise CheckpointError(
            f"piece [{piece.start}, {piece.stop}) of {name!r} {tuple(piece.shape)} comes with a tensor of shape "
            f"{tuple(piece.tensor.shape)}; it must be 1-D, of that length, and inside [0, {total})"
        )


def _write_shard(path: Path, held: dict[str, Piece]) -> dict[str, Any]:
    """Write the pieces as one safetensors file and sync it; -> this rank's part of the manifest."""
    order = sorted(held.items(), key=lambda item: (-item[1].tensor.element_size(), item[0]))  # keeps data aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, piece in order:
        begin, end = end, end + piece.tensor.numel() * piece.tensor.element_size()
        dtype = _DTYPE_NAMES[piece.tensor.dtype]
        header[key] = {"dtype": dtype, "shape": [piece.tensor.numel()], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    tensors: dict[str, Any] = {}
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write(handle, memoryview(head))
        for label, piece in order:
            digest = _write(handle, _memory(piece.tensor))
            offset = len(head) + header[label]["data_offsets"][0]
            kind = {"shape": list(piece.shape), "dtype": header[label]["dtype"], "layout": piece.layout, "pieces": []}
            entry = tensors.setdefault(piece.name, kind)
            if any(entry[key] != kind[key] for key in _SAME):
                raise CheckpointError(f"pieces of {piece.name!r} on one rank differ in shape, dtype or layout")
            entry["pieces"].append([piece.start, piece.stop, offset, digest])
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"file": [path.name, len(head) + end, len(head), zlib.crc32(head)], "tensors": tensors}


def _write(handle: int, data: memoryview) -> int:
    """Write all of it; -> its CRC-32."""
    digest = 0
    for at in range(0, len(data), CHUNK):
        rest = data[at : at + CHUNK]
        digest = zlib.crc32(rest, digest)
        while rest:
            rest = rest[os.write(handle, rest) :]
    return digest


def _write_json(path: Path, body: dict[str, Any]) -> None:
    """Write a sealed JSON file so that it appears whole, synced, under its name."""
    rest = _SEAL[2] + json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
    if len(rest) > MAX_JSON:
        raise CheckpointError(f"{path.name} would have {len(rest):,} bytes, more than {MAX_JSON:,}; save fewer pieces")
    handle = os.open(path.with_suffix(".part"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(handle, memoryview(_SEAL[0] + _digest(rest) + rest))
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(path.with_suffix(".part"), path)
    _sync_folder(path.parent)


def _merge(parts: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """All ranks' parts -> the manifest's files and tensors."""
    tensors: dict[str, Any] = {}
    for rank in sorted(parts):
        for name, part in parts[rank]["tensors"].items():
            entry = tensors.setdefault(name, {**part, "pieces": []})
            differs = [f"{key} {part[key]!r}, not {entry[key]!r}" for key in _SAME if part[key] != entry[key]]
            if differs:
                raise CheckpointError(f"rank {rank} saves {name!r} with {differs[0]} as the ranks before it")
            entry["pieces"] += [[rank, *piece] for piece in part["pieces"]]
    for entry in tensors.values():
        entry["pieces"].sort(key=lambda piece: (piece[1], piece[2]))
    return {"files": [parts[rank]["file"] for rank in sorted(parts)], "tensors": tensors}


# -- what is believed


def _parse(body: dict[str, Any], where: str) -> _Manifest:
    """Check a manifest's every value; CheckpointError (or SecurityError for a file name) names the first wrong one."""
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{where} has format {str(body.get('format'))[:50]!r}; this version reads {FORMAT!r}")
    manifest = _Manifest(_typed(body, "step", int, where), _typed(body, "meta", dict, where), [], {})
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
        manifest.tensors[name] = _Tensor(shape, DTYPES[dtype], layout, pieces)
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


def _read_json(path: Path) -> dict[str, Any]:
    """A sealed JSON file's body: size, then digest, then strict JSON."""
    where = f"{path.parent.name}/{path.name}"
    size = _regular(path).st_size
    if size > MAX_JSON + 100:
        raise CheckpointError(f"{where} has {size:,} bytes; at most {MAX_JSON:,} are read")
    lead = len(_SEAL[0]) + _SEAL[1]
    with open(_open(path), "rb") as file:
        data = file.read(MAX_JSON + 100)
    if data[:lead] != _SEAL[0] + _digest(data[lead:]):
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


# -- files, memory, processes


def _regular(path: Path) -> os.stat_result:
    try:
        status = os.lstat(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing ({error})") from None
    if not stat.S_ISREG(status.st_mode):
        raise SecurityError(f"{path} is a link or no regular file; a checkpoint's files are never followed elsewhere")
    return status


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        kind = SecurityError if error.errno == errno.ELOOP else CheckpointError
        raise kind(f"{path} cannot be opened: {error.strerror}") from error


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SEAL[1] // 2).hexdigest().encode()


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, in place."""
    return tensor.view(torch.uint8).numpy().data


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _started(pid: int) -> str | None:
    """When a live process began ("?" where the system does not say); None for a dead one."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?"
    return None if fields[0] in "ZX" else fields[19]


def _lock(root: Path, token: str) -> None:
    """Take the folder for this process, or say who has it; a dead owner's lock is taken over."""
    me = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid()), "token": token}
    with open(root / LOCK, "a+", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o666)) as file:
        with contextlib.suppress(OSError):  # held only while this block reads and writes; some file systems have none
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            owner = json.loads(file.read(4096))
            pid, host, started = int(owner["pid"]), str(owner["host"]), owner["started"]
        except (ValueError, TypeError, KeyError):  # empty: free, or its owner died while writing it
            pid, host, started = 0, "", None
        if pid > 0 and (host != me["host"] or _started(pid) == started):
            raise CheckpointError(
                f"{root} is being written by process {pid} on {host}; give this run another [run] out, or, if that "
                f"process is gone, delete {root / LOCK}"
            )
        file.truncate(0)
        file.write(json.dumps(me))


def _unlock(root: Path, pid: int, token: str) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((root / LOCK).read_text())
        if os.getpid() == pid and (owner["pid"], owner["token"]) == (pid, token):
            os.truncate(root / LOCK, 0)
