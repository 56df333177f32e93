"""Symmetric memory on GPUs: torch's, one rank a GPU, or one allocation that ranks as threads of a process share.

Addresses of peers are mapped by torch.distributed._symmetric_memory (CUDA's virtual memory, a stock install);
multicast is never used, nor torch's signal pads, whose slots all groups share.  Copies between contiguous tensors go
to the copy engines.  A flag with a number known on the host is written, here or at a peer, and awaited by the stream
itself (cuStreamWriteValue32, cuStreamWaitValue32: no SM, and a full barrier before the write).  One with its number in
memory, as graphs need it, is raised at a peer by a copy engine, and raised or awaited here by a kernel of one program.

A stream's own wait has no limit, so `synchronize` watches: past the heap's timeout it leaves the record a kernel would
have left, and lets the stream go on by raising the word itself.  For those who never synchronise a thread looks
(`watch`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from interlace.errors import ConfigError, Hang, ResourceError
from interlace.streams import On, current, handle
from interlace.symmetric.fabric import Event, Fabric
from interlace.symmetric.record import GAVE_UP, RECORD, WORDS, Record, stream_record

if TYPE_CHECKING:
    from interlace.symmetric.heap import SymmetricHeap

T = TypeVar("T")
POLL = 50e-6  # seconds between two looks at a stream
WATCH = 0.5  # the same of the thread that watches
LOADING = 1.0  # limit of waits, in seconds, while kernels are loaded
RESCUE = -3  # priority of the stream that lets others go
STREAM, ADDRESS = ctypes.c_void_p, ctypes.c_uint64
# Of the driver: what a failure means, and the types of the arguments.
CALLS = {
    "cuStreamWriteValue32_v2": ("it lacks stream memory operations", (STREAM, ADDRESS, ctypes.c_uint32, ctypes.c_uint)),
    "cuStreamWaitValue32_v2": ("it lacks stream memory operations", (STREAM, ADDRESS, ctypes.c_uint32, ctypes.c_uint)),
    "cuMemcpyDtoDAsync_v2": ("see whether both are device memory", (ADDRESS, ADDRESS, ctypes.c_size_t, STREAM)),
}
WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32) (word - value) >= 0


class Mark(Event):
    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()
        self._event.record(current(device))

    def wait(self) -> None:
        current(self._device).wait_event(self._event)

    @property
    def is_done(self) -> bool:
        return self._event.query()


class Waiting(NamedTuple):
    """The last wait for a word that a stream itself does; those before it wanted less."""

    flag: torch.Tensor
    value: int
    peer: int
    since: float


class OnGpu(Fabric):
    """Streams, copies and flags of one rank on one GPU; the arenas are a subclass's."""

    poison = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._waiting: dict[int, Waiting] = {}  # by the address of the word
        self._abort = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._driver = ctypes.CDLL("libcuda.so.1")
        for name, (_, arguments) in CALLS.items():
            getattr(self._driver, name).argtypes = arguments
        # What lets a stream go must not queue behind it: no kernel, and memory that is pinned by now.
        self._rescue = torch.cuda.Stream(device, priority=RESCUE)
        self._said = torch.zeros(len(WORDS), dtype=torch.int64).pin_memory()
        self._raised = torch.zeros(2, dtype=torch.int32).pin_memory()
        self._letting_go = threading.Lock()

    def synchronize(self) -> None:
        """Ends when the current and all named streams have; a stream's own wait past its limit is let go."""
        streams = [current(self.device), *self._streams.values()]
        ends = []
        for stream in streams:
            end = torch.cuda.Event()
            end.record(stream)
            ends.append(end)
        while self._waiting and not all(end.query() for end in ends):
            self._look()
            time.sleep(POLL)
        for end in ends:
            end.synchronize()
        self._waiting.clear()

    def succeed(self, other: Fabric) -> None:
        assert isinstance(other, OnGpu)
        self._streams = other._streams

    def watch(self) -> None:
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    def _look(self) -> None:
        """Lets those go that have waited too long; those that have not waited any more are forgotten."""
        now = time.monotonic()
        for address, each in list(self._waiting.items()):
            if now - each.since > self.limit:
                with self._letting_go:
                    if self._waiting.get(address) is each:
                        self._let_go(each, now)
                    if self._waiting.get(address) is each:  # no newer one has taken its place
                        self._waiting.pop(address, None)

    def _let_go(self, late: Waiting, now: float) -> None:
        head = self.arenas[self.rank]
        with On(self._rescue):
            have = int(late.flag.item())
            if (have - late.value) % (1 << 32) < 1 << 31:
                return  # it has come by now
            gave_up = head[GAVE_UP : GAVE_UP + 4].view(torch.int32)
            offset = late.flag.data_ptr() - head.data_ptr()
            if self.late is None:
                self.late = Record("a stream", self.rank, 0, late.peer, offset, late.value, have, now - late.since)
            if not int(gave_up.item()):
                words = stream_record(late.peer, offset, late.value, have, now - late.since)
                self._said.copy_(torch.tensor(words))
                self._raised[0] = 1
                head[RECORD : RECORD + self._said.nbytes].view(torch.int64).copy_(self._said, non_blocking=True)
                gave_up.copy_(self._raised[:1], non_blocking=True)
            self._raised[1] = late.value
            late.flag.view(1).copy_(self._raised[1:], non_blocking=True)
            self._rescue.synchronize()

    def stream(self, name: str) -> AbstractContextManager[object]:
        if not name:
            return contextlib.nullcontext()
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device, priority=-1)
        return On(self._streams[name])

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """By the driver itself: `copy_` ends in the same call, after 5 to 15 us of the host."""
        nbytes = target.nbytes
        if nbytes:
            self._check("cuMemcpyDtoDAsync_v2", target.data_ptr(), source.data_ptr(), nbytes, handle(self.device))

    def write(self, flag: torch.Tensor, value: int | torch.Tensor) -> None:
        """Without a multiprocessor where it can: a kernel that spins may hold them all until this word is raised."""
        from interlace.symmetric import device

        self._refuse_in_graph(value)
        if not isinstance(value, torch.Tensor):
            self._call("cuStreamWriteValue32_v2", flag, value, 0)
        elif self._is_own(flag):
            device.raise_flag[(1,)](flag, value, VALUE_IN_MEMORY=True, num_warps=1)
        else:
            flag.view(1).copy_(
                value.view(1), non_blocking=True
            )  # copy engine; begins when what came before on this stream is done

    def wait(self, flag: torch.Tensor, value: int | torch.Tensor, peer: int, context: torch.Tensor) -> None:
        from interlace.symmetric import device

        if isinstance(value, torch.Tensor):
            await_flag: Any = device.await_flag[(1,)]
            await_flag(flag, value, peer, context, VALUE_IN_MEMORY=True, KERNEL="a stream", num_warps=1)
            return
        self._refuse_in_graph(value)
        self._call("cuStreamWaitValue32_v2", flag, value, WAIT_GEQ)
        self._waiting[flag.data_ptr()] = Waiting(flag, value, peer, time.monotonic())

    def _is_own(self, flag: torch.Tensor) -> bool:
        own = self.arenas[self.rank]
        return own.data_ptr() <= flag.data_ptr() < own.data_ptr() + own.numel()

    def _refuse_in_graph(self, value: int | torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor) and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"flag value {value} inside a graph, whose replays would use it again; give a one-element int32 tensor "
                "that a kernel of the graph advances."
            )

    def _call(self, name: str, flag: torch.Tensor, value: int, flags: int) -> None:
        self._check(name, handle(self.device), flag.data_ptr(), value & 0xFFFFFFFF, flags)

    def _check(self, name: str, *arguments: int) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise ResourceError(f"{name} failed with CUDA error {code}: {CALLS[name][0]}.")

    def event(self) -> Event:
        return Mark(self.device)

    def graph(self, function: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(current(self.device))
        with On(side):
            function()  # compiles what it launches
        current(self.device).wait_stream(side)
        self.synchronize()
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, capture_error_mode="thread_local"):
            function()
        return made.replay

    def abort(self) -> None:
        self._abort.fill_(1)

    def abort_address(self) -> int:
        return self._abort.data_ptr()  # pinned: the device addresses it as the host does

    def close(self) -> None:
        self.arenas = []


def _watch(fabric: weakref.ref[OnGpu]) -> None:
    while (own := fabric()) is not None and own.arenas:
        own._look()
        del own
        time.sleep(WATCH)


class Cuda(OnGpu):
    """A GPU a rank, all on one NVLink or PCIe domain."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        super().__init__(torch.device("cuda", index))
        alone = group is None and not dist.is_initialized()
        self._group = None if alone else (group or dist.group.WORLD)
        self.rank = 0 if alone else dist.get_rank(self._group)
        self.size = 1 if alone else dist.get_world_size(self._group)
        if self._group is None:
            self.arenas = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device)]
            return
        sizes = [size for (size,) in self.exchange([nbytes])]
        if len(set(sizes)) > 1:
            raise ConfigError(f"a heap of {sizes} bytes on the ranks; give every rank the same size.")
        import torch.distributed._symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle: Any = symmetric_memory.rendezvous(own, self._group.group_name)
        # Buffers of a handle begin where the allocation does, which a pool may have placed before this tensor.
        inside = own.data_ptr() - handle.get_buffer(self.rank, (1,), torch.uint8).data_ptr()
        offsets = [offset for (offset,) in self.exchange([inside])]
        self._keep: Any = (own, handle)
        self.arenas = [
            own if rank == self.rank else handle.get_buffer(rank, (nbytes,), torch.uint8, offsets[rank])
            for rank in range(self.size)
        ]

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        if self._group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return [theirs.tolist() for theirs in found]

    def close(self) -> None:
        super().close()
        self._keep = None  # unmaps, after a device-wide synchronisation; every rank has come here


@dataclass
class Meeting:
    """Where threads that are ranks of one GPU meet."""

    size: int
    timeout: float
    said: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.said = [[] for _ in range(self.size)]
        self.all = threading.Barrier(self.size, timeout=self.timeout)

    def exchange(self, rank: int, values: Sequence[int]) -> list[list[int]]:
        try:
            self.all.wait()
            self.said[rank] = list(values)
            self.all.wait()
            return [list(theirs) for theirs in self.said]
        except threading.BrokenBarrierError:
            raise Hang("a rank on this GPU did not come to a collective of the heap; its own error says why.") from None


class OneGpu(OnGpu):
    """One of several ranks on one GPU: a thread, a stream, and a share of one allocation."""

    def __init__(self, rank: int, whole: torch.Tensor, meeting: Meeting, loading: bool) -> None:
        super().__init__(whole.device)
        self.rank, self.size, self._meeting, self.loading = rank, meeting.size, meeting, loading
        self.sharing = meeting.size
        self.arenas = list(whole.view(meeting.size, -1))
        if loading:
            self.abort()

    def wait(self, flag: torch.Tensor, value: int | torch.Tensor, peer: int, context: torch.Tensor) -> None:
        if not self.loading or isinstance(value, torch.Tensor):
            super().wait(flag, value, peer, context)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        return self._meeting.exchange(self.rank, values)


def on_one_gpu(
    function: Callable[[SymmetricHeap], T],
    ranks: int,
    nbytes: int = 1 << 24,
    timeout: float = 10.0,
    device: int = 0,
) -> list[T]:
    """`function(heap)` for each of several ranks that share one GPU, each a thread with a stream; results by rank.

    Real fences and real concurrency where only one GPU is at hand.  All ranks' programs together must fit on it.  A
    first pass, in which no wait waits, compiles and loads the kernels, since the driver may load one only once every
    stream of the GPU is idle, those of ranks included that wait for this one; its results and failures are dropped.
    Streams share CUDA_DEVICE_MAX_CONNECTIONS queues (8 unless it is set before CUDA starts; 32 at most), in which a
    waiting one holds up those behind it: set it above the number of streams that the ranks make.
    """
    with contextlib.suppress(Exception):
        _threads(function, ranks, nbytes, LOADING, device, loading=True)
    return _threads(function, ranks, nbytes, timeout, device, loading=False)


def _threads(
    function: Callable[[SymmetricHeap], T], ranks: int, nbytes: int, timeout: float, device: int, loading: bool
) -> list[T]:
    from interlace.symmetric.heap import SymmetricHeap

    where = torch.device("cuda", device)
    whole = torch.zeros(ranks * (-(-nbytes // 4096) * 4096), dtype=torch.uint8, device=where)
    torch.cuda.synchronize(where)
    meeting = Meeting(ranks, 60.0 + 2 * timeout)
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def work(rank: int) -> None:
        try:
            with torch.cuda.device(where), torch.cuda.stream(torch.cuda.Stream(where)):
                heap = SymmetricHeap(nbytes, timeout=timeout, fabric=OneGpu(rank, whole, meeting, loading))
                results[rank] = function(heap)
                heap.synchronize()
        except Exception as error:
            errors.append(error)
            meeting.all.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize(where)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]
