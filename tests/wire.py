"""What really crosses the wire in emulation: bytes that this rank's kernels and copies write into others' memory.

Words that say so (atomics, flags) are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from interlace.collectives import Group
from interlace.kernels import workspace
from interlace.symmetric import SymmetricHeap
from interlace.symmetric.shortcuts import element_sizes


class Wire:
    """nbytes: so far."""

    def __init__(self, group: Group) -> None:
        self.group, self.nbytes = group, 0

    def count(self, addresses: Any, size: int) -> None:
        arenas = workspace.arenas(self.group)  # those of all ranks, heap by heap
        for number, arena in enumerate(arenas):
            if number % self.group.size != self.group.rank:
                begin = np.uint64(arena.data_ptr())
                inside = (addresses >= begin) & (addresses < begin + np.uint64(arena.nbytes))
                self.nbytes += size * int(inside.sum())


@contextlib.contextmanager
def watched(group: Group) -> Iterator[Wire]:
    """Inside the block, writes into the memory of the group's fused products at other ranks are counted."""
    wire, size_of, copy = Wire(group), element_sizes(), SymmetricHeap.copy
    builder = interpreter.interpreter_builder
    store = builder.create_masked_store

    def counted(pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
        chosen = np.broadcast_to(np.asarray(mask.data, dtype=bool), pointers.data.shape)
        wire.count(pointers.data[chosen], size_of(pointers.dtype))
        return store(pointers, value, mask, *how)

    def copied(self: SymmetricHeap, target: torch.Tensor, source: torch.Tensor) -> None:
        wire.count(np.uint64(target.data_ptr())[None], target.nbytes)
        copy(self, target, source)

    with (
        mock.patch.dict(vars(builder), create_masked_store=counted),
        mock.patch.object(SymmetricHeap, "copy", copied),
    ):
        yield wire
