"""Checkpoints for the tests of saving and reading: tensors of odd sizes, split unevenly over the ranks of a run."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from interlace.checkpoint import Piece, Reader, Writer


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Odd sizes, every width, 0-d and empty."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "main/embedding.weight": torch.randn(257, 3, generator=draw),
        "main/blocks.0.mlp.up.weight": torch.randn(13, 7, generator=draw).bfloat16(),
        "exp_avg/blocks.0.mlp.up.weight": torch.randn(13, 7, generator=draw).double(),
        "scale": torch.randn((), generator=draw),
        "nothing": torch.empty(0, 5),
        "count": torch.randint(-(2**40), 2**40, (3,), generator=draw),
        "mask": torch.rand(11, generator=draw) < 0.5,
    }


def cuts(numel: int, world: int, seed: int) -> list[int]:
    """Uneven ranges, some of them empty: world + 1 bounds."""
    inner = random.Random(f"{numel} {world} {seed}")
    return [0, *sorted(inner.randint(0, numel) for _ in range(world - 1)), numel]


def pieces(values: Mapping[str, torch.Tensor], rank: int, world: int, seed: int = 0) -> Iterable[Piece]:
    for name, value in values.items():
        start, stop = cuts(value.numel(), world, seed)[rank : rank + 2]
        yield Piece(name, tuple(value.shape), "(N M)/dp", start, stop, value.reshape(-1)[start:stop])


def save(root: Path, step: int, world: int = 1, seed: int = 0, keep: int = 0) -> Path:
    """All ranks of one run, as threads; the values are those of `tensors(step + seed)`."""
    meta = {"config": "abc", "step": step}
    return save_values(root, step, tensors(step + seed), meta, world, keep, token=f"run{step}_{seed}")


def save_values(
    root: Path,
    step: int,
    values: Mapping[str, torch.Tensor],
    meta: dict[str, Any],
    world: int = 2,
    keep: int = 0,
    token: str = "run",
) -> Path:
    """Every rank holds a range of every tensor."""
    writers = [Writer(root, rank, world, 20, keep, token) for rank in range(world)]
    for rank, writer in enumerate(writers):
        writer.save(step, pieces(values, rank, world), meta)
    for writer in writers:
        writer.close()
    return root / f"step-{step}"


def assert_holds(folder: Path, values: dict[str, torch.Tensor]) -> None:
    reader = Reader(folder)
    assert sorted(reader.names) == sorted(values)
    for name, value in values.items():
        read = reader.read(name)
        assert read.dtype == value.dtype == reader.dtype(name)
        assert reader.shape(name) == tuple(value.shape)
        assert torch.equal(bits(read), bits(value.reshape(-1))), name
    reader.verify()


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its exit status (0 well, 1 an exception, negative a signal)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
