"""Which CUDA stream work goes to.

Equals `torch.cuda.stream` and `torch.cuda.current_stream`, in a third of the host's time: a transfer changes streams
twice, and a training step of a split model has hundreds (docs/notes/0017-host-time.md).
"""

from __future__ import annotations

from types import TracebackType

import torch


def current(device: torch.device) -> torch.cuda.Stream:
    """The stream that work for `device` goes to now."""
    return torch.cuda.current_stream(device.index)


class On:
    """`with On(stream) as before:` sends what follows to `stream`, of this process's device; `before` was current."""

    __slots__ = ("before", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> torch.cuda.Stream:
        self.before = torch.cuda.current_stream(self.stream.device_index)
        if self.before != self.stream:
            torch.cuda.set_stream(self.stream)
        return self.before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before != self.stream:
            torch.cuda.set_stream(self.before)
