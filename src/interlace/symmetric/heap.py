"""Memory at the same place on every rank, and what moves between ranks in stream order.

Equals a tensor per rank plus the right to address everybody's: `tensor.local` is this rank's, `tensor.peer(r)` rank
r's, and inside a kernel the address of an element here and a rank number give its address there
(`interlace.symmetric.device`).  Quicker than a collective because nobody has to meet for a transfer: the writer puts
and signals, the reader waits for its own word.

Rules the heap keeps, each for a public bug it prevents: allocating and freeing are collectives, named so, and compared
over the ranks; words for signals are at their origin on every rank before any rank is given them; a word belongs to
one heap, so two groups never share one; signals only grow and are compared with `>=` safe at wrap-around.
"""

from __future__ import annotations

import contextlib
import math
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from interlace.errors import ConfigError, Hang, ResourceError
from interlace.streams import lasting
from interlace.symmetric.fabric import Event, Fabric
from interlace.symmetric.record import CLOCK, CONTEXT, GAVE_UP, HEAD, RECORD, Record

ALIGNMENT = 256  # bytes; every tensor begins at a multiple
GAP = 256  # bytes between two tensors that belong to none
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


class SymmetricTensor:
    """`shape` elements on every rank of a heap, contiguous, at the same offset everywhere."""

    def __init__(self, heap: SymmetricHeap, offset: int, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
        self._heap: SymmetricHeap | None = heap
        self._views: dict[int, torch.Tensor] = {}
        self.offset, self.shape, self.dtype, self.name = offset, shape, dtype, name
        self.nbytes = math.prod(shape) * dtype.itemsize

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements."""
        return self.peer(self._alive().rank)

    def peer(self, rank: int) -> torch.Tensor:
        """Rank `rank`'s elements, as this rank addresses them."""
        heap = self._alive()
        if not 0 <= rank < heap.size:
            raise ConfigError(f"{self.name}.peer({rank}): the heap has {heap.size} ranks; give 0 to {heap.size - 1}.")
        if rank not in self._views:
            arena = heap.fabric.arenas[rank]
            self._views[rank] = arena[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)
        return self._views[rank]

    @property
    def addresses(self) -> torch.Tensor:
        """int64 [ranks] on this rank's device: where the tensor begins at each rank, for kernels with own pointers."""
        heap = self._alive()
        return heap.constant([arena.data_ptr() + self.offset for arena in heap.fabric.arenas])

    def data_ptr(self) -> int:
        """Kernels and copies, which ask for it, are to be told whose elements."""
        raise ConfigError(
            f"{self.name} lies on every rank; give {self.name}.local, {self.name}.peer(rank), or {self.name}.addresses."
        )

    def _alive(self) -> SymmetricHeap:
        if self._heap is None:
            raise ConfigError(f"{self.name} was freed; allocate another, or free it after its last use.")
        return self._heap

    def _end(self) -> None:
        self._heap = None
        self._views.clear()


class SymmetricHeap:
    """An arena of `nbytes` on each rank of a group, addressable by all of them.

    SymmetricHeap(nbytes, group=None, device=None, timeout=10.0): collective over the group (None: all ranks; one
    process without torch.distributed is a world of one).  On "cuda" the arena is torch symmetric memory, without
    multicast; on "cpu" host memory shared by the processes of this machine, for kernels in Triton's interpreter.
    `timeout` is the limit in seconds of every wait inside kernels.  Raises ConfigError where ranks disagree,
    ResourceError without memory.
    """

    def __init__(
        self,
        nbytes: int = 1 << 24,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout: float = 10.0,
        fabric: Fabric | None = None,
    ) -> None:
        if nbytes < 1 or timeout <= 0:
            raise ConfigError(f"a heap of {nbytes} bytes with a timeout of {timeout} s; both must be above 0.")
        if fabric is None:
            fabric = _fabric(nbytes, group, torch.device(device or "cpu"))
        self.fabric, self.rank, self.size, self.device = fabric, fabric.rank, fabric.size, fabric.device
        self.capacity, self.timeout = fabric.arenas[0].numel(), timeout
        fabric.limit = timeout
        self._tensors: dict[int, SymmetricTensor] = {}
        self._constants: list[torch.Tensor] = []
        head = fabric.arenas[self.rank][:HEAD]
        head.zero_()
        self.fabric.synchronize()
        # Nobody is given an address before all are zeroed.
        self._agree("SymmetricHeap", {"bytes": nbytes, "ns of timeout": int(timeout * 1e9)})
        self.context = self.constant(self._context(head.data_ptr()))

    def _context(self, head: int) -> list[int]:
        bases = [arena.data_ptr() for arena in self.fabric.arenas]
        words = {
            "rank": self.rank,
            "world": self.size,
            "limit": int(self.timeout * 1e9),
            "record": head + RECORD,
            "abort": self.fabric.abort_address(),
            "clock": head + CLOCK,
            "gave_up": head + GAVE_UP,
            "base": bases[self.rank],
        }
        return [words[name] for name in CONTEXT] + [base - bases[self.rank] for base in bases]

    # --- memory ------------------------------------------------------------------------------------------------------

    def empty(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, name: str = "tensor"
    ) -> SymmetricTensor:
        """Collective: a tensor on every rank, its elements not initialised.  All ranks ask for the same."""
        return self._allocate(shape, dtype, name, None)

    def zeros(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, name: str = "tensor"
    ) -> SymmetricTensor:
        """Collective: the same, zero on every rank before any rank is given it."""
        return self._allocate(shape, dtype, name, 0)

    def signals(self, count: int, name: str = "signals") -> SymmetricTensor:
        """Collective: `count` int32 words for signals or epochs, at the heap's origin on every rank.

        One set serves one operation on one stream; another stream or group takes its own.
        """
        return self._allocate(count, torch.int32, name, self.fabric.origin)

    @property
    def origin(self) -> int:
        """Where signals and epochs begin: 0, or what the checker chose."""
        return self.fabric.origin

    def _allocate(self, shape: int | Sequence[int], dtype: torch.dtype, name: str, fill: int | None) -> SymmetricTensor:
        if not self.fabric.arenas:
            raise ConfigError(f"allocating {name}: the heap is closed; allocate before close(), or make another heap.")
        try:
            sizes = tuple(operator.index(size) for size in (shape if isinstance(shape, Sequence) else (shape,)))
        except TypeError:
            sizes = (-1,)
        if dtype not in DTYPES or min(sizes, default=0) < 0:
            asked = (shape,) if isinstance(shape, int) else shape
            raise ConfigError(
                f"{name}: shape {asked} of {dtype}; sizes are whole numbers, at least 0, and types {_names()}."
            )
        shape, nbytes = sizes, math.prod(sizes) * dtype.itemsize
        kind = zlib.crc32(repr((shape, str(dtype))).encode())
        self._agree(f"allocating {name}", {"bytes": nbytes, "another shape or type": kind})
        offset = self._place(nbytes, name)
        tensor = SymmetricTensor(self, offset, shape, dtype, name)
        self._tensors[offset] = tensor
        if fill is not None:
            tensor.local.fill_(fill)
        elif self.fabric.poison and nbytes:
            tensor.local.view(torch.uint8).fill_(0xFF)
        self.fabric.allocated(offset, nbytes, tensor.local, name, fill is not None)
        self.fabric.synchronize()
        self.fabric.exchange([0])  # filled everywhere before anybody can signal
        return tensor

    def _place(self, nbytes: int, name: str) -> int:
        """The lowest free offset: the same on every rank, since all allocate and free the same in one order."""
        offset = HEAD + GAP
        for begin, tensor in sorted(self._tensors.items()):
            if offset + nbytes + GAP <= begin:
                break
            offset = -(-(begin + tensor.nbytes + GAP) // ALIGNMENT) * ALIGNMENT
        if offset + nbytes + GAP > self.capacity:
            raise ResourceError(
                f"{name} needs {nbytes} bytes, found {max(0, self.capacity - offset - GAP)} free of the heap's "
                f"{self.capacity}; make the heap larger, or free tensors."
            )
        return offset

    def free(self, tensor: SymmetricTensor) -> None:
        """Collective: gives the memory back once every rank is done with it."""
        if not isinstance(tensor, SymmetricTensor):
            raise ConfigError(
                f"free({type(tensor).__name__}): give what empty(), zeros() or signals() returned, whole."
            )
        tensor._alive()
        if self._tensors.get(tensor.offset) is not tensor:
            raise ConfigError(f"{tensor.name} belongs to another heap; free it there.")
        self._agree(f"freeing {tensor.name}", {"another tensor": tensor.offset, "bytes": tensor.nbytes})
        self.barrier()
        self.fabric.freed(tensor.offset)
        if self.fabric.poison and tensor.nbytes:
            tensor.local.view(torch.uint8).fill_(0xFF)
        del self._tensors[tensor.offset]
        tensor._end()
        self.fabric.exchange([0])

    def constant(self, values: list[int]) -> torch.Tensor:
        """int64 values on this rank's device that live as long as the heap and never change."""
        made = lasting(self.device, lambda: torch.tensor(values, dtype=torch.int64, device=self.device))
        self.fabric.constant(made)
        self._constants.append(made)
        return made

    def _agree(self, what: str, values: dict[str, int]) -> None:
        """Raises on every rank alike when ranks do not ask for the same."""
        found = self.fabric.exchange([zlib.crc32(what.encode()), *values.values()])
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                said = _difference(rank, theirs, found[0], [*values])
                raise ConfigError(
                    f"{what}: {said}; every rank must make the same calls of the heap, of the same sizes, in the same "
                    "order."
                )

    # --- meeting -----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Returns when this rank's streams have run dry; raises Hang if a wait in a kernel gave up."""
        self.fabric.synchronize()
        self.check()

    def barrier(self) -> None:
        """Collective: returns when what every rank enqueued before is done."""
        self.synchronize()
        self.fabric.exchange([0])

    def record(self) -> Record | None:
        """What this rank's first wait that gave up has left, None if none did.  Reads memory: synchronise first."""
        head = self.fabric.arenas[self.rank][:HEAD].cpu()
        return Record.read(self.rank, bytes(head.tolist()))

    def check(self) -> None:
        """Raises Hang, naming the peer, if a wait in a kernel of this rank gave up."""
        record = self.record()
        if record is not None and not self.fabric.loading:
            raise Hang(record.sentence(self.name_of(record.flag)), peer=record.peer, rank=self.rank)

    def name_of(self, offset: int) -> str:
        """What lies at an offset of the arena, such as "signals[3]"."""
        for begin, tensor in self._tensors.items():
            if begin <= offset < begin + tensor.nbytes:
                return f"{tensor.name}[{(offset - begin) // tensor.dtype.itemsize}]"
        return f"the word at byte {offset} of the heap"

    def abort(self) -> None:
        """Asks the spinners of this rank's kernels to leave; for a watchdog that knows of a lost peer."""
        self.fabric.abort()

    # --- transports in stream order ----------------------------------------------------------------------------------

    def stream(self, name: str) -> AbstractContextManager[object]:
        """Inside the block, kernels, copies and flags go to this rank's stream of that name."""
        return self.fabric.stream(name)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy engine: `source` to `target`, contiguous and alike; a pull or a push by whose they are."""
        for given in (target, source):
            if not isinstance(given, torch.Tensor):
                raise ConfigError(f"copy was given {_kind(given)}; give tensors, of the heap's .local or .peer(rank).")
        same = target.shape == source.shape and target.dtype == source.dtype
        if not same or not (target.is_contiguous() and source.is_contiguous()):
            raise ConfigError(
                f"a copy engine moves bytes as they lie: target {tuple(target.shape)} {target.dtype}, source "
                f"{tuple(source.shape)} {source.dtype}; give contiguous tensors of one shape and type."
            )
        self.fabric.copy(target, source)

    def write(self, flag: torch.Tensor, value: int | torch.Tensor) -> None:
        """Raises one int32 word, here or at a peer, after what came before on this stream.

        An int is written by the stream itself and must not be captured in a graph, whose replays would raise the old
        value again; a tensor of one int32 is read when its turn comes.
        """
        self.fabric.write(_word(flag), _number(value))

    def wait(self, flag: torch.Tensor, value: int | torch.Tensor, peer: int) -> None:
        """Later work on this stream begins when this rank's word, which `peer` raises, has reached `value`."""
        if not 0 <= peer < self.size:
            raise ConfigError(f"a wait for rank {peer}: the heap has {self.size} ranks; give 0 to {self.size - 1}.")
        self.fabric.wait(_word(flag), _number(value), peer, self.context)

    def event(self) -> Event:
        """A mark in the current stream; `event.wait()` makes another stream wait for it."""
        return self.fabric.event()

    def graph(self, function: Callable[[], None]) -> Callable[[], None]:
        """Calls `function`, records what it enqueues, and returns a call that enqueues the same again.

        On GPUs a CUDA graph; the checker repeats the recorded launches with their recorded scalars; between processes
        the function is called again.
        """
        return self.fabric.graph(function)

    def close(self) -> None:
        """Collective: gives the arena back.  Tensors of the heap must not be used afterwards."""
        self.fabric.synchronize()
        for tensor in self._tensors.values():
            tensor._end()
        self._tensors.clear()
        self.fabric.exchange([0])
        self.fabric.close()

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls,
        nbytes: int = 1 << 24,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout: float = 10.0,
    ) -> Iterator[SymmetricHeap]:
        """`with SymmetricHeap.opened(...) as heap:`; closed at the end unless the block failed."""
        heap = cls(nbytes, group, device, timeout)
        yield heap
        heap.close()


def _fabric(nbytes: int, group: dist.ProcessGroup | None, device: torch.device) -> Fabric:
    nbytes = -(-nbytes // 4096) * 4096
    if device.type == "cuda":
        from interlace.symmetric.cuda import Cuda

        return Cuda(nbytes, group, device)
    if device.type == "cpu":
        from interlace.symmetric.shm import Shm

        return Shm(nbytes, group)
    raise ConfigError(f"a symmetric heap on {device.type}; give cuda or cpu.")


def _difference(rank: int, theirs: list[int], first: list[int], labels: list[str]) -> str:
    """How a rank's call differs from that of rank 0."""
    if theirs[0] != first[0]:
        return f"rank {rank} and rank 0 make different calls of the heap"
    label, one, other = next(each for each in zip(labels, theirs[1:], first[1:], strict=True) if each[1] != each[2])
    if label.startswith("another"):
        return f"rank {rank} asks for {label} than rank 0"
    return f"rank {rank} asks for {one} {label}, rank 0 for {other}"


def _word(flag: torch.Tensor) -> torch.Tensor:
    if not isinstance(flag, torch.Tensor):
        raise ConfigError(f"a flag is one int32 word, found {_kind(flag)}; give one word of .local or .peer(rank).")
    if flag.numel() != 1 or flag.dtype != torch.int32:
        raise ConfigError(f"a flag is one int32 word, found {tuple(flag.shape)} of {flag.dtype}; index one word.")
    return flag


def _number(value: int | torch.Tensor) -> int | torch.Tensor:
    """An int wrapped into 32 bits, as words do."""
    if isinstance(value, torch.Tensor):
        return _word(value)
    try:
        return (operator.index(value) + (1 << 31)) % (1 << 32) - (1 << 31)
    except TypeError:
        raise ConfigError(f"a flag's value is {value!r}; give a whole number, or a tensor of one int32.") from None


def _kind(value: object) -> str:
    return f"all of {value.name}" if isinstance(value, SymmetricTensor) else type(value).__name__


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
