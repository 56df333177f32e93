"""Saving: every rank's pieces to its shard in the background, and rank 0's publishing of them as one checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from interlace.checkpoint.files import memory, sync_folder, write
from interlace.checkpoint.lock import lock, unlock
from interlace.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    FORMAT,
    MANIFEST,
    PLAIN,
    SAME,
    STEP,
    Slices,
    merge,
    read_json,
    write_json,
)
from interlace.checkpoint.reader import Reader
from interlace.errors import CheckpointError, InterlaceError, ResourceError


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one tensor: elements [start, stop) of it, flattened and unsharded."""

    name: str  # "main/blocks.0.mlp.up.weight"
    shape: tuple[int, ...]  # of the unsharded tensor
    layout: str  # the Layout it is held in: recorded, the same on every rank
    start: int
    stop: int
    tensor: torch.Tensor  # [stop - start], any device
    cut: Slices = PLAIN  # how elements are counted: row-major, or slice by slice of a dimension


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
                lock(self.root, token)
                self._release = weakref.finalize(self, unlock, self.root, os.getpid(), token)
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
            held[key] = replace(piece, shape=tuple(piece.shape), tensor=copy)
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
            write_json(part, _write_shard(tmp / f"rank-{self.rank}.safetensors", held))
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
            write_json(tmp / f"failed-{self.rank}.json", {"error": str(self._error)})
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
                        raise CheckpointError(str(read_json(tmp / name)["error"]))
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
            if read_json(self.root / f"step-{step}" / MANIFEST).get("attempt") == tmp.name:
                return
        raise FileNotFoundError(tmp)  # _explain: rank 0 gave up

    def _publish(self, step: int, tmp: Path, meta: dict[str, Any]) -> None:
        parts: dict[int, dict[str, Any]] = {}

        def complete() -> bool:
            for rank in range(self.world):
                path = tmp / f"part-{rank}.json"
                if rank not in parts and path.exists():
                    parts[rank] = read_json(path)
            return len(parts) == self.world

        self._wait(step, tmp, complete)
        manifest = {"format": FORMAT, "step": step, "attempt": tmp.name, "meta": meta} | merge(parts)
        write_json(tmp / MANIFEST, manifest)
        for rank in range(self.world):
            (tmp / f"part-{rank}.json").unlink()
        sync_folder(tmp)
        Reader(tmp)
        final, old = self.root / f"step-{step}", self.root / f"step-{step}.old"
        if final.exists():
            self._discard(old)
            os.rename(final, old)
        os.rename(tmp, final)
        sync_folder(self.root)
        Reader(final)
        self._discard(old)
        while self._failed:
            shutil.rmtree(self._failed.pop(), ignore_errors=True)
        if self.keep:
            steps = sorted(int(m[1]) for m in map(STEP.fullmatch, os.listdir(self.root)) if m and not m[2])
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


def _check_piece(piece: Piece) -> None:
    name, total = piece.name, math.prod(piece.shape)
    if not name or len(name) > 1000 or not name.isprintable():
        raise CheckpointError(f"{name[:100]!r} cannot name a tensor; use 1 to 1000 printable characters")
    if piece.tensor.dtype not in DTYPE_NAMES:
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
        dtype = DTYPE_NAMES[piece.tensor.dtype]
        header[key] = {"dtype": dtype, "shape": [piece.tensor.numel()], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    tensors: dict[str, Any] = {}
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write(handle, memoryview(head))
        for label, piece in order:
            digest = write(handle, memory(piece.tensor))
            offset = len(head) + header[label]["data_offsets"][0]
            kind = {"shape": list(piece.shape), "dtype": header[label]["dtype"], "layout": piece.layout, "pieces": []}
            if piece.cut[0]:
                kind["cut"] = [piece.cut[0], list(piece.cut[1])]
            entry = tensors.setdefault(piece.name, kind)
            if any(entry.get(key) != kind.get(key) for key in SAME):
                raise CheckpointError(f"pieces of {piece.name!r} on one rank differ in shape, dtype, layout or cut")
            entry["pieces"].append([piece.start, piece.stop, offset, digest])
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"file": [path.name, len(head) + end, len(head), zlib.crc32(head)], "tensors": tensors}
