"""Which CUDA stream work goes to, and which memory.

Equals `torch.cuda.current_stream` and `torch.cuda.stream`, in a tenth of the host's time (1 us and 2 us for 6 and 20,
docs/notes/0017-host-time.md), by the calls beneath them, which Triton and PyTorch's compiler use too.  A transfer asks
several times and changes streams twice, and a training step of a split model has hundreds of transfers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch

T = TypeVar("T")

_KNOWN: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current(device: torch.device) -> torch.cuda.Stream:
    """The stream that work for `device` goes to now."""
    key = torch._C._cuda_getCurrentStream(torch.cuda.current_device() if device.index is None else device.index)
    found = _KNOWN.get(key)
    if found is None:
        stream, index, kind = key
        found = _KNOWN[key] = torch.cuda.Stream(stream_id=stream, device_index=index, device_type=kind)
    return found


def handle(device: torch.device) -> int:
    """The same, as the driver knows it."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)


class On:
    """`with On(stream) as before:` sends what follows to `stream`, of this process's device; `before` was current."""

    __slots__ = ("before", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> torch.cuda.Stream:
        self.before = current(self.stream.device)
        _set(self.stream)
        return self.before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set(self.before)


_graphs_own_memory = False


def expect_graphs() -> None:
    """From here on this process may capture CUDA graphs that own memory, such as those of PyTorch's compiler."""
    global _graphs_own_memory
    _graphs_own_memory = True


def kept_by_graphs(device: torch.device) -> int:
    """Bytes that CUDA graphs hold for themselves beyond what counts as allocated: no other tensor may lie there."""
    if device.type != "cuda" or not _graphs_own_memory:
        return 0
    return _kept(device.index, torch.cuda.memory_reserved(device))


@functools.lru_cache(maxsize=8)
def _kept(index: int, reserved: int) -> int:
    """Looks at all segments, which takes milliseconds, only when their sum has changed."""
    own = [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in own if each["device"] == index)


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """`make()`, whose tensors on `device` may outlive any CUDA graph.

    A thread that warms up or captures a graph allocates from the graph's own memory, which is written anew with each
    replay; another thread does not.
    """
    if device.type != "cuda" or not _graphs_own_memory:
        return make()
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                found.append(make())
        except BaseException as error:  # handed on below
            raised.append(error)

    thread = threading.Thread(target=run, name="lasting")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def _set(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
