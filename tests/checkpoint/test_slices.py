"""Tensors saved slice by slice of a dimension read back in any other cut, row-major too."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.checkpoint import MANIFEST, PLAIN, Piece, Reader, Slices, Writer
from interlace.checkpoint.manifest import blake2b
from interlace.errors import CheckpointError

CUTS: tuple[Slices, ...] = (PLAIN, (1, (0, 4, 7)), (1, (0, 3, 5, 7)), (1, (0, 7, 7)), (2, (0, 1, 5)), (2, (0, 2, 3, 5)))


def counted(value: torch.Tensor, cut: Slices) -> torch.Tensor:
    """All elements in the order of a cut, by plain slicing."""
    dim, bounds = cut
    return torch.cat([value.narrow(dim, a, b - a).reshape(-1) for a, b in pairwise(bounds or (0, value.shape[dim]))])


@pytest.mark.parametrize("saved", CUTS)
def test_what_was_saved_in_one_cut_reads_in_another(saved: Slices, tmp_path: Path) -> None:
    """Three ranks save uneven ranges; ranges of every kind are read."""
    value = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    flat, draw = counted(value, saved), random.Random(0)
    bounds = [0, *sorted(draw.randint(0, 105) for _ in range(2)), 105]
    writers = [Writer(tmp_path, rank, 3, 20, token="t") for rank in range(3)]
    for writer, (a, b) in zip(writers, pairwise(bounds), strict=True):
        writer.save(1, [Piece("w", (3, 7, 5), "N M/tp K", a, b, flat[a:b], saved)], {})
    for writer in writers:
        writer.close()
    reader = Reader(tmp_path / "step-1")
    assert reader.cut("w") == saved
    assert torch.equal(reader.read("w").view(3, 7, 5), value)
    for cut in CUTS:
        expected = counted(value, cut)
        for _ in range(20):
            start, stop = sorted((draw.randint(0, 105), draw.randint(0, 105)))
            assert torch.equal(reader.read("w", start, stop, cut), expected[start:stop]), (cut, start, stop)
    reader.verify()


def test_a_column_slice_is_one_piece(tmp_path: Path) -> None:
    """However many rows it has, so that a manifest does not grow with them."""
    writer = Writer(tmp_path, 0, 1, 20)
    pieces = [
        Piece("w", (1000, 4), "N M/tp", k * 2000, k * 2000 + 2000, torch.ones(2000), (1, (0, 2, 4))) for k in (0, 1)
    ]
    writer.save(1, pieces, {})
    writer.close()
    body = json.loads((tmp_path / "step-1" / MANIFEST).read_bytes())["body"]
    assert len(body["tensors"]["w"]["pieces"]) == 2
    assert body["tensors"]["w"]["cut"] == [1, [0, 2, 4]]


WRONG = [[0, [0, 3]], [2, [0, 4]], [1, [0, 3]], [1, [1, 4]], [1, [0, 3, 2, 4]], [1, [0, 2.0, 4]], [1, []], [1], "1"]


@pytest.mark.parametrize("cut", [*WRONG, [True, [0, 4]]])
def test_a_cut_that_is_none_of_the_tensor_is_refused(cut: Any, tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, 1, 20)
    writer.save(1, [Piece("w", (3, 4), "N M/tp", 0, 12, torch.ones(12), (1, (0, 2, 4)))], {})
    writer.close()
    path = tmp_path / "step-1" / MANIFEST
    body = json.loads(path.read_bytes())["body"]
    body["tensors"]["w"]["cut"] = cut
    rest = b'",\n"body":' + json.dumps(body).encode() + b"}\n"
    path.write_bytes(b'{"blake2b":"' + blake2b(rest) + rest)
    with pytest.raises(CheckpointError, match="cut"):
        Reader(tmp_path / "step-1")


def test_ranks_that_cut_differently_are_refused(tmp_path: Path) -> None:
    writers = [Writer(tmp_path, rank, 2, 20, token="t") for rank in range(2)]
    for writer, (a, b), cut in zip(writers, ((0, 6), (6, 12)), ((1, (0, 2, 4)), (1, (0, 1, 4))), strict=True):
        writer.save(1, [Piece("w", (3, 4), "N M/tp", a, b, torch.ones(6), cut)], {})
    with pytest.raises(CheckpointError, match="rank 1 saves 'w' with cut"):
        writers[0].finish()
    with pytest.raises(CheckpointError):
        writers[1].finish()
