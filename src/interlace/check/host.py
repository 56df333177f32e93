"""A rank's host program under the checker: what the heap, a launch or a torch operation asks of its world.

Kernels, copies and flags are enqueued on the rank's streams and done later, as on a GPU.  So are torch operations in
place on memory the machine knows; one whose result the program needs makes it wait for its stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from interlace.check.fiber import Fiber, Item, Stream
from interlace.check.machine import Machine
from interlace.check.memory import peek
from interlace.check.order import BLOCK, LANE, PLAIN, Clock
from interlace.check.place import line
from interlace.errors import Hang
from interlace.symmetric.fabric import Event, Fabric
from interlace.symmetric.interpreter import Atomic, Launch
from interlace.symmetric.record import ABORT

PIECES = 3  # a copy is done in so many steps

# Functions that look at a tensor without touching its elements.
LOOKS = """
__get__ __getitem__ __len__ __hash__ size stride dim ndim numel nelement element_size data_ptr storage_offset
is_contiguous untyped_storage view view_as narrow unbind chunk split expand expand_as permute transpose t squeeze
unsqueeze unflatten select as_strided detach is_floating_point is_complex is_signed swapaxes movedim unfold diagonal
requires_grad_ pin_memory is_pinned is_shared get_device ndimension type
"""
VIEWS = frozenset(LOOKS.split())


class Operations(TorchFunctionMode):
    """Hands torch operations of host programs on known memory to their rank."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in VIEWS:
            return function(*args, **(kwargs or {}))
        return self._handle(name, function, args, kwargs or {})


@dataclasses.dataclass(eq=False)
class Mark(Event):
    """A moment of one of a rank's streams; each replay of a graph has its own."""

    host: Host
    knows: list[Clock] = dataclasses.field(default_factory=list)

    def reach(self, stream: Stream) -> bool:
        self.knows.append(stream.knows.copy())
        return True

    def wait(self) -> None:
        waited = 0

        def passed(stream: Stream) -> bool:
            nonlocal waited
            if len(self.knows) <= waited:
                return False
            np.maximum(stream.knows, self.knows[waited], out=stream.knows)
            waited += 1
            return True

        self.host.mark_item("event wait", passed)

    @property
    def is_done(self) -> bool:
        return bool(self.knows)


class Host(Fabric):
    """One rank of a machine."""

    def __init__(self, machine: Machine, rank: int, origin: int) -> None:
        self.machine, self.rank, self.size, self.origin = machine, rank, machine.size, origin
        self.device = torch.device("cpu")
        self.arenas = machine.arenas
        self.name = ""  # of the current stream
        self.recorded: list[Callable[[], None]] = []  # what was enqueued since the last collective
        self.fiber: Fiber | None = None
        self.waiting: Callable[[], bool] | None = None
        self.offered: list[int] | None = None
        self.answer: list[list[int]] | None = None

    # --- collectives -------------------------------------------------------------------------------------------------

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        self.offered = list(values)
        self.recorded = []
        self.block("a collective of the heap", lambda: self.answer is not None)
        if self.answer is None:
            raise Hang(f"rank {self.machine.dead} did not come to a collective of the heap; it has stopped.")
        answer, self.answer = self.answer, None
        return answer

    def synchronize(self) -> None:
        self.block("its streams to run dry", self.dry)
        fiber = self.me
        for stream in self.machine.streams[self.rank].values():
            fiber.knows.learn(stream.knows)

    def dry(self) -> bool:
        return not any(stream.items for stream in self.machine.streams[self.rank].values())

    @property
    def me(self) -> Fiber:
        assert self.fiber is not None
        return self.fiber

    def block(self, why: str, until: Callable[[], bool]) -> None:
        """The host program stands until a condition holds."""
        fiber = self.me
        if not until():
            fiber.blocked, self.waiting = f"{why} ({self.machine.place()})", until
            self.machine.dirty = True
            self.machine.hub.switch()

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocated(self, offset: int, nbytes: int, tensor: torch.Tensor, name: str, written: bool) -> None:
        with torch._C.DisableTorchFunction():
            self.machine.allocated(tensor, name, self.rank, written)

    def freed(self, offset: int) -> None:
        self.machine.freed(self.arenas[self.rank].data_ptr() + offset)

    def constant(self, tensor: torch.Tensor) -> None:
        self.machine.register(tensor, "addresses of all ranks", self.rank, constant=True)

    def abort(self) -> None:
        self.arenas[self.rank][ABORT : ABORT + 4].view(torch.int32).fill_(1)

    def abort_address(self) -> int:
        return self.arenas[self.rank].data_ptr() + ABORT

    def close(self) -> None:
        self.machine.closed(self.rank)
        self.arenas = []

    # --- streams -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before

    def item(
        self, label: str, bodies: list[Callable[[], None]], launch: Launch | None = None, event: Any = None
    ) -> Item:
        """Enqueues work on the current stream, and remembers how to enqueue it again."""
        machine, stream, place = self.machine, self.machine.stream(self.rank, self.name), line()

        def enqueue() -> Item:
            fiber = self.me
            number = machine.launches[self.rank, label] = machine.launches[self.rank, label] + 1
            item = Item(self.rank, stream, label, launch, bodies, fiber.knows.now.copy(), number, event, place)
            fiber.knows.barrier()
            machine.enqueue(item)
            return item

        self.recorded.append(enqueue)  # type: ignore[arg-type]
        return enqueue()

    def mark_item(self, label: str, event: Callable[[Stream], bool]) -> None:
        self.item(label, [], event=event)

    def launch(self, launch: Launch) -> None:
        with torch._C.DisableTorchFunction():
            for name, tensor in launch.tensors.items():
                self.machine.register(tensor, name, self.rank)
        width, height, depth = launch.grid
        bodies: list[Callable[[], None]] = [
            lambda: launch.body(**launch.arguments) for _ in range(width * height * depth)
        ]
        self.item(launch.name, bodies, launch)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.machine.register(target, "copy target", self.rank)
        self.machine.register(source, "copy source", self.rank)
        self.item("copy", [lambda: self._copy(target, source)])

    def write(self, flag: torch.Tensor, value: int | torch.Tensor) -> None:
        self.machine.register(flag, "flag", self.rank)
        self.item("flag write", [lambda: self._write(flag, value)])

    def wait(self, flag: torch.Tensor, value: int | torch.Tensor, peer: int, context: torch.Tensor) -> None:
        self.machine.register(flag, "flag", self.rank)
        self.item("flag wait", [lambda: self._wait(flag, value)])

    def event(self) -> Event:
        mark = Mark(self)
        self.mark_item("event", mark.reach)
        return mark

    def graph(self, function: Callable[[], None]) -> Callable[[], None]:
        before, self.recorded = self.recorded, []
        function()
        made, self.recorded = self.recorded, [*before, *self.recorded]

        def replay() -> None:
            for enqueue in made:
                self.recorded.append(enqueue)
                enqueue()

        return replay

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        machine, fiber = self.machine, self.machine.current
        assert fiber is not None
        target, source = target.reshape(-1), source.reshape(-1)
        pieces = list(zip(target.tensor_split(PIECES), source.tensor_split(PIECES), strict=True))
        for to, of in pieces:
            if to.numel():
                machine.pause(fiber)
                self._touch(of, write=False, what="copy from", kind=PLAIN)
                written = self._touch(to, write=True, what="copy to", kind=PLAIN)
                to.copy_(of)
                written()

    def _touch(self, tensor: torch.Tensor, write: bool, what: str, kind: int) -> Callable[[], None]:
        """An access of a whole tensor by the fiber that runs; what is returned is called when it has been written."""
        machine, fiber = self.machine, self.machine.current
        assert fiber is not None
        event = machine.event(fiber, what)
        addresses, size = _addresses(tensor), tensor.element_size()
        parts = machine.locate(addresses, size, write)
        for region, at in parts:
            component = LANE if fiber.kind == "item" else BLOCK
            machine.touch(fiber, region, at, write, component, kind, event)
        befores = machine._befores(addresses, size, parts) if write else {}

        def written() -> None:
            machine.changed(fiber, parts, event)
            for address, before in befores.items():
                machine._signalled(fiber, address, event, before, peek(address, size), "relaxed", "", what)

        return written

    def _word(self, flag: torch.Tensor, changes: bool, sem: str, operation: str) -> Atomic:
        return Atomic(np.array([flag.data_ptr()], np.uint64), 4, sem, "sys", changes, operation)

    def _number(self, value: int | torch.Tensor) -> int:
        if not isinstance(value, torch.Tensor):
            return value
        machine = self.machine
        assert machine.current is not None
        machine.pause(machine.current)
        if machine.find(value.data_ptr()) is not None:
            self._touch(value, write=False, what="read of a flag's value", kind=PLAIN)
        return int(value)

    def _write(self, flag: torch.Tensor, value: int | torch.Tensor) -> None:
        number = self._number(value)

        def do() -> _Data:
            flag.fill_(number)
            return _Data(np.array([int(flag)], np.int32))

        self.machine.atomic(self._word(flag, True, "release", "flag write"), do)

    def _wait(self, flag: torch.Tensor, value: int | torch.Tensor) -> None:
        want = self._number(value)

        def do() -> _Data:
            return _Data(np.array([int(flag)], np.int32))

        while True:
            found = self.machine.atomic(self._word(flag, False, "acquire", "flag wait"), do)
            fiber = self.machine.current
            assert fiber is not None
            if fiber.polls:
                self.machine.wants(fiber, "-", want)
            if (int(found.data[0]) - want) % (1 << 32) < 1 << 31:
                return
            if self.machine.clock > self.limit * 1e9:
                return

    # --- torch operations of the host program ------------------------------------------------------------------------

    def operation(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Called for every torch function of a host program but those that only look."""
        machine = self.machine
        touched = [tensor for tensor in _tensors((args, kwargs)) if self._known(tensor)]
        if not touched:
            return function(*args, **kwargs)
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__isub__")
        written = [*args[:1]] if in_place else []
        written += [*_tensors(kwargs.get("out", ()))]
        for tensor in written:  # from now on known: what is done with it later comes after this
            machine.register(tensor, f"torch {name}", self.rank)
        touched = [tensor for tensor in _tensors((args, kwargs)) if self._known(tensor)]
        made: list[Any] = []

        def body() -> None:
            fiber = machine.current
            assert fiber is not None
            machine.pause(fiber)
            for tensor in touched:
                if not any(tensor is each for each in written):
                    self._touch(tensor, False, f"torch {name}", PLAIN)
            done = []
            for tensor in touched:
                if any(tensor is each for each in written):
                    if name not in ("copy_", "fill_", "zero_", "__setitem__"):
                        self._touch(tensor, False, f"torch {name}", PLAIN)
                    done.append(self._touch(tensor, True, f"torch {name}", PLAIN))
            made.append(function(*args, **kwargs))
            for tell in done:
                tell()

        item = self.item(f"torch {name}", [body])
        if written and kwargs.get("out") is None:
            return args[0]
        self.block(f"torch {name}", lambda: item.ended)
        return made[0]

    def _known(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return False
        region = self.machine.find(tensor.data_ptr())
        return region is not None and not region.quiet and not region.constant


@dataclasses.dataclass(frozen=True)
class _Data:
    data: Any


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _addresses(tensor: torch.Tensor) -> Any:
    """Of every element, flat."""
    offsets = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride)
    return (offsets.ravel() * tensor.element_size() + tensor.data_ptr()).astype(np.uint64)
