"""Symmetric memory between processes of one machine: a file in memory that all of them map.

Kernels run in Triton's interpreter, at once and in the caller's thread, after what their stream was given before.
Copies and flags on a named stream are done by that stream's own thread, so that a kernel may wait for a flag that a
later copy raises.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from interlace.errors import ConfigError, ResourceError
from interlace.symmetric import interpreter
from interlace.symmetric.fabric import Event, Fabric
from interlace.symmetric.record import ABORT, GAVE_UP, RECORD, Record, stream_record

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
POLL = 50e-6  # seconds between two looks at a flag


class Mark(Event):
    def __init__(self, fabric: Shm) -> None:
        self._fabric, self._done = fabric, threading.Event()
        fabric.enqueue(self._done.set)

    def wait(self) -> None:
        self._fabric.enqueue(lambda: self._done.wait())

    @property
    def is_done(self) -> bool:
        return self._done.is_set()


class Stream:
    """Work done one after the other by a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def drain(self) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        done.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:
                self.error = self.error or error


class Shm(Fabric):
    """See the module.  `group` is a gloo group whose ranks share this machine; None: all ranks, or this process."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup | None) -> None:
        alone = group is None and not dist.is_initialized()
        group = None if alone else (group or dist.group.WORLD)
        # Weakly: whoever leaves the world ends the group's threads, though this heap may live on.
        self._group = None if group is None else weakref.ref(group)
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        self.device = torch.device("cpu")
        self._streams: dict[str, Stream] = {}
        self._current = ""
        sizes = [size for (size,) in self.exchange([nbytes])]
        if len(set(sizes)) > 1:
            raise ConfigError(f"a heap of {sizes} bytes on the ranks; give every rank the same size.")
        tag = self.exchange([secrets.randbits(62)])[0][0]
        path = f"{FOLDER}/interlace-heap-{tag:x}"
        if self.rank == 0:
            self._reserve(path, nbytes * self.size)
        self.exchange([0])
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), nbytes * self.size)
        self.exchange([0])
        if self.rank == 0:
            os.unlink(path)  # all have mapped it; it ends with the last of them
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.arenas = list(whole.split(nbytes))

    def _reserve(self, path: str, nbytes: int) -> None:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(file, 0, nbytes)
            finally:
                os.close(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            reason = error.strerror or str(error)
            raise ResourceError(f"{nbytes} bytes of shared memory in {FOLDER}: {reason}; make room there.") from None

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        if self._group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group())
        return [theirs.tolist() for theirs in found]

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.drain()

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        if name and name not in self._streams:
            self._streams[name] = Stream()
        before, self._current = self._current, name
        try:
            with interpreter.before_launch(self._drain_current):
                yield
        finally:
            self._current = before

    def _drain_current(self) -> None:
        if self._current:
            self._streams[self._current].drain()

    def enqueue(self, work: Callable[[], object]) -> None:
        if self._current:
            self._streams[self._current].put(work)
        else:
            work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target, source = target.detach(), source.detach()  # bytes, to a thread in which gradients are on
        self.enqueue(lambda: target.copy_(source))

    def write(self, flag: torch.Tensor, value: int | torch.Tensor) -> None:
        self.enqueue(lambda: flag.fill_(int(value)))

    def wait(self, flag: torch.Tensor, value: int | torch.Tensor, peer: int, context: torch.Tensor) -> None:
        self.enqueue(lambda: self._await(flag, value, peer))

    def _await(self, flag: torch.Tensor, value: int | torch.Tensor, peer: int) -> None:
        begin, head, want = time.monotonic(), self.arenas[self.rank], int(value)
        gave_up, abort = (head[at : at + 4].view(torch.int32) for at in (GAVE_UP, ABORT))
        while (have := int(flag)) != want and (have - want) % (1 << 32) >= 1 << 31:
            if int(gave_up):
                return
            elapsed = time.monotonic() - begin
            if elapsed > self.limit or int(abort):
                offset = flag.data_ptr() - head.data_ptr()
                self.late = self.late or Record("a stream", self.rank, 0, peer, offset, want, have, elapsed)
                words = stream_record(peer, offset, want, have, elapsed)
                head[RECORD : RECORD + 8 * len(words)].view(torch.int64).copy_(torch.tensor(words))
                gave_up.fill_(1)
                return
            time.sleep(POLL)

    def event(self) -> Event:
        return Mark(self)

    def graph(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function

    def abort(self) -> None:
        self.arenas[self.rank][ABORT : ABORT + 4].view(torch.int32).fill_(1)

    def abort_address(self) -> int:
        return self.arenas[self.rank].data_ptr() + ABORT

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()
        self.arenas = []
