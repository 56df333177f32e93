"""Reading: any elements of a published checkpoint, each piece verified; and which checkpoint to read."""

from __future__ import annotations

import math
import os
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from interlace import config
from interlace.checkpoint import files
from interlace.checkpoint.manifest import MANIFEST, PLAIN, STEP, PieceEntry, Slices, TensorEntry, parse, read_json
from interlace.config import Config, ModelConfig
from interlace.errors import CheckpointError, nearest

_HEADER = TensorEntry((), torch.uint8, "", [])


class Reader:
    """A published checkpoint.  Opening it checks the manifest and every file's presence and size; reading, the digests.

    `step`, `meta`, `names`; `strays`, files of the folder that the manifest does not name and nobody opens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._file: tuple[int, int] | None = None  # index and descriptor of the file open now
        self._verified: set[PieceEntry] = set()
        where = f"{self.folder.name}/{MANIFEST}"
        manifest = parse(read_json(self.folder / MANIFEST), where)
        self._files, self._tensors = manifest.files, manifest.tensors
        self.step, self.meta, self.names = manifest.step, manifest.meta, tuple(manifest.tensors)
        for name, size, _, _ in self._files:
            have = files.regular(self.folder / name).st_size
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

    def cut(self, name: str) -> Slices:
        """The cut it was saved in."""
        return self._tensor(name).cut

    def layout(self, name: str) -> str:
        """The Layout string it was held in when it was saved."""
        return self._tensor(name).layout

    def read(self, name: str, start: int = 0, stop: int | None = None, cut: Slices = PLAIN) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor -> [stop - start] on the CPU, in its saved dtype.

        cut: how elements are counted, row-major or slice by slice of a dimension, whatever the cut they were saved in.
        The digest of every piece touched is verified, once per reader; a damaged one is refused by file and name.
        """
        tensor = self._tensor(name)
        total = math.prod(tensor.shape)
        stop = total if stop is None else stop
        if not 0 <= start <= stop <= total:
            raise CheckpointError(f"elements [{start}, {stop}) of {name!r} were asked for; it has [0, {total})")
        if cut[0] == 0:
            cut = PLAIN
        if cut == tensor.cut:
            return self._read(name, tensor, start, stop)
        if cut[0] and tensor.cut[0] and cut[0] != tensor.cut[0]:  # by way of the whole tensor
            plain = self.read(name)
            return recut(tensor.shape, PLAIN, cut, start, stop, lambda low, high: plain[low:high])
        return recut(tensor.shape, tensor.cut, cut, start, stop, lambda low, high: self._read(name, tensor, low, high))

    def _read(self, name: str, tensor: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) as they are counted in the file."""
        out = torch.empty(stop - start, dtype=tensor.dtype)
        view, size = files.memory(out), out.element_size()
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

    def _tensor(self, name: str) -> TensorEntry:
        if name not in self._tensors:
            close = nearest(name, self.names)
            hint = f"; nearest: {close!r}" if close else ""
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}{hint}")
        return self._tensors[name]

    def _check_header(self, index: int) -> None:
        _, _, size, digest = self._files[index]
        self._check("its header", _HEADER, (index, 0, size, 0, digest))

    def _check(self, name: str, tensor: TensorEntry, piece: PieceEntry, into: memoryview | None = None) -> None:
        file, start, stop, offset, want = piece
        if offset:  # a piece; a file's header is digested like one, at offset 0
            self._check_header(file)
        if into is None and piece in self._verified:
            return
        size = (stop - start) * tensor.dtype.itemsize
        spare = memoryview(bytearray(min(size, files.CHUNK))) if into is None else into
        have = 0
        for at in range(0, size, files.CHUNK):
            length = min(files.CHUNK, size - at)
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
            files.regular(path)
            self._file = (index, files.open_file(path))
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
    found = [(int(match[1]), not match[2], match[0]) for match in map(STEP.fullmatch, names) if match]
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


def newest(path: str | Path) -> Path:
    """The checkpoint at a path: itself, or the newest valid one of a run folder (or of its `checkpoints`)."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    folder, notes = find(root)
    if folder is None:
        raise CheckpointError(f"{path} holds no checkpoint: name a run folder, or a step-N folder in its checkpoints")
    for note in notes:
        if "passed over" in note:
            warnings.warn(f"{root}: {note}", stacklevel=3)
    return folder


def recut(
    shape: Sequence[int],
    held: Slices,
    asked: Slices,
    start: int,
    stop: int,
    read: Callable[[int, int], torch.Tensor],
) -> torch.Tensor:
    """Elements [start, stop), counted as in `asked`, of a tensor whose elements `read` gives as counted in `held`.

    Both cut the same dimension, or one of them none.  Reads, of every slice that is touched, whole rows: the indices
    before that dimension.
    """
    dim = held[0] or asked[0]
    length, inner = shape[dim], math.prod(shape[dim + 1 :])
    rows = math.prod(shape[:dim])
    sources = held[1] or (0, length)
    parts = [read(0, 0)]
    for low, high in pairwise(asked[1] or (0, length)):
        width = (high - low) * inner
        first, last = max(start - low * rows * inner, 0), min(stop - low * rows * inner, width * rows)
        if first >= last:
            continue
        top, bottom = first // width, -(-last // width)
        taken = []
        for begin, end in pairwise(sources):
            a, b = max(begin, low), min(end, high)
            if a < b:
                across, offset = (end - begin) * inner, begin * rows * inner
                block = read(offset + top * across, offset + bottom * across).view(bottom - top, end - begin, inner)
                taken.append(block[:, a - begin : b - begin])
        parts.append(torch.cat(taken, dim=1).reshape(-1)[first - top * width : last - top * width])
    return torch.cat(parts)


def configuration(reader: Reader) -> tuple[Config, ModelConfig]:
    """The run file that a run's checkpoint holds, and the dimensions it was saved with."""
    text = reader.meta.get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{reader.folder} does not hold its run file: use a checkpoint that a run has saved")
    cfg = config.loads(text, where=f"the run file in {reader.folder}")
    saved = reader.meta.get("model")  # the dimensions themselves: a preset or folder may have changed since
    return cfg, cfg.model_config() if saved is None else ModelConfig.of(saved)
