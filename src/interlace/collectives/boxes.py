"""Lines whose messages lie in symmetric memory: a box of slots at the receiver, for each direction of a pair.

Equals `isend` and `irecv` (`collectives.lines`).  Quicker beside products, because what waits holds no multiprocessor:
bytes move by copy engines, and streams themselves write and await the two words of a box.  Message n, counted from 1,
lies in slot (n - 1) % S:

    sender    wait until it is made . wait TAKEN >= n - S . copy to the receiver's slot . ARRIVED = n, there
    receiver  wait ARRIVED >= n . copy from the slot to a tensor of its own . TAKEN = n, at the sender

A direction has a stream at either end, so that one that waits holds up no other, and the host never waits: a send that
finds no free slot stands in its stream, as it would in a library's queue, so no number of slots makes ranks wait in a
circle.  Numbers only grow and are compared so that they may wrap.  Slots grow on all ranks of the group at once, a
pipeline's at the beginning of a step, the context axis's before the first message that is larger; nothing else is
agreed on.

On a CPU the streams are threads (`symmetric.shm`) that do the same in the same order, which is how this is tested: a
receive that is posted early waits in its thread, and the host waits in `Handle.wait`.

Loading a kernel waits for streams that await a word, as it does for kernels that spin; so lines of the library lie
`beneath`, for the steps in which kernels may be loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from interlace.collectives.groups import Group
from interlace.collectives.handle import Handle, Sending, start
from interlace.collectives.window import reach
from interlace.errors import Hang
from interlace.plan import boxes as plan
from interlace.plan import overlap
from interlace.streams import current
from interlace.symmetric import Event, SymmetricHeap, SymmetricTensor

Pair = tuple[int, int]  # from, to: places along the group


class Boxes(Mapping[Pair, "Box"]):
    """The boxes of the lines that begin or end at this rank.

    Args:
        group: the ranks between which the lines run; all of them address each other's memory (`reach`).
        pairs: the lines, the same on every rank.
        beneath: the library's lines (`make_lines`).
        timeout: seconds that bound every wait.
        slots: messages that a box holds.
    """

    def __init__(
        self,
        group: Group,
        pairs: Iterable[Pair],
        beneath: Mapping[Pair, Group],
        timeout: float,
        slots: int = plan.SLOTS,
    ) -> None:
        self.group, self.timeout, self.slots = group, timeout, slots
        self.pairs = sorted(set(pairs))
        self.nbytes = 0  # of a slot
        self._heap: SymmetricHeap | None = None
        self._boxes = {pair: Box(self, *pair, beneath[pair]) for pair in self.pairs if group.rank in pair}

    def __getitem__(self, pair: Pair) -> Box:
        return self._boxes[pair]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)

    @property
    def heap(self) -> SymmetricHeap:
        assert self._heap is not None, "require() first"
        return self._heap

    def require(self, nbytes: int) -> None:
        """Makes sure that messages of so many bytes fit, the same on every rank.

        Collective, and waits for all messages under way, where they did not fit before.  Hang as `check`.
        """
        self.check()
        if self._heap is not None and nbytes <= self.nbytes:
            return
        before = self._heap
        self.close()
        self.nbytes = overlap.grown(self.nbytes, plan.slot(nbytes))
        group, lines = self.group, plan.incoming(self.pairs)
        room = plan.arena(lines, self.nbytes, group.size, self.slots)
        self._heap = heap = SymmetricHeap(room, group.process_group, group.device, self.timeout)
        if before is not None:
            heap.fabric.succeed(before.fabric)
        contents = heap.empty((lines, self.slots, self.nbytes), torch.uint8, "slots")
        arrived, taken = heap.signals(group.size, "arrived"), heap.signals(group.size, "taken")
        for (_, target), box in self._boxes.items():
            senders = [a for a, b in self.pairs if b == target]
            box.place(contents.peer(target)[senders.index(box.source)], arrived, taken)
        heap.fabric.watch()

    def check(self) -> None:
        """Raises Hang, naming the peer, if a wait was past its limit; what has come since then means nothing."""
        if self._heap is None or (late := self._heap.fabric.late) is None:
            return
        own, peer = self.group.ranks[self.group.rank], self.group.ranks[late.peer]
        does = "send" if self._heap.name_of(late.flag).startswith("arrived") else "take"
        raise Hang(
            f"rank {own} waited {late.elapsed:.3f} s for rank {peer} to {does} message {late.want} along "
            f"{self.group.axis}, found {late.have}; look at what rank {peer} does, or raise the timeout if it is only "
            "late.",
            peer=peer,
            rank=own,
        )

    @property
    def own_bytes(self) -> int:
        """Of this rank's memory that peers write to."""
        return 0 if self._heap is None else self._heap.capacity

    def tensors(self) -> list[torch.Tensor]:
        """The memory of all ranks as this one addresses it, and the few words that say where it is."""
        return [] if self._heap is None else [*self._heap.fabric.arenas, self._heap.context]

    def close(self) -> None:
        """Collective: gives the memory back when every message has been taken."""
        if self._heap is not None:
            self._heap.fabric.synchronize()
            self.check()
            self._heap.close()  # every rank has come
            self._heap = None


class Box:
    """One direction of a pair, at one of its ends.  `beneath` is the same line by the library."""

    def __init__(self, boxes: Boxes, source: int, target: int, beneath: Group) -> None:
        self.boxes, self.source, self.target, self.beneath = boxes, source, target, beneath
        group = boxes.group
        self.axis, self.device, self.meter = group.axis, group.device, group.meter
        self.ranks = group.ranks[source], group.ranks[target]
        self._sends = group.rank == source
        self._name = f"to {target}" if self._sends else f"from {source}"
        self._stream: torch.cuda.Stream | None = None

    def place(self, slots: torch.Tensor, arrived: SymmetricTensor, taken: SymmetricTensor) -> None:
        """Where the box is from here on, empty: uint8 [slots, bytes], and the words of all boxes."""
        source, target = self.source, self.target
        self._slots = slots
        self._arrived = arrived.peer(target)[source : source + 1]
        self._taken = taken.peer(source)[target : target + 1]
        self._count, heap = 0, self.boxes.heap
        if self.device.type == "cuda":
            with heap.stream(self._name):
                self._stream = current(heap.device)

    def send(self, tensor: torch.Tensor, *more: torch.Tensor, name: str, kind: str = "send") -> Sending:
        """Starts sending contiguous tensors of any shape and type, one after another in one message.

        kind: the collective as which it is counted.
        """
        given = [each.view(-1).view(torch.uint8) for each in (tensor, *more)]
        assert self._sends and all(each.is_contiguous() for each in (tensor, *more))
        nbytes = sum(content.numel() for content in given)
        heap, slot, number = self._next(nbytes)
        self.meter.count(kind, self.axis, nbytes)
        left: list[Event] = []

        def launch() -> list[_Moved]:
            with heap.stream(self._name):
                if self._count > len(self._slots):
                    heap.wait(self._taken, number - len(self._slots), self.target)
                for place, content in zip(slot.split([each.numel() for each in given]), given, strict=True):
                    heap.copy(place, content)
                heap.write(self._arrived, number)
                left.append(heap.event())
            return self._moved(left)

        peer = f" to rank {self.ranks[1]}"
        handle = start(
            self.meter,
            self.axis,
            name,
            nbytes,
            self._stream,
            None,
            launch,
            lambda: None,
            peer,
            True,
            what=("send", tensor),
        )
        timed = (
            self._stream is not None
        )  # a host takes the time of a send when it waits for it, so it is not done before
        return Sending((tensor, *more), handle, lambda: timed and left[0].is_done)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> Handle[torch.Tensor]:
        """Starts receiving the next tensor, which has this shape and type.

        Its memory is the waiting stream's: what used it before is done when the copy begins.
        """
        assert not self._sends
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        content = tensor.view(-1).view(torch.uint8)
        heap, slot, number = self._next(content.numel())

        def launch() -> list[_Moved]:
            with heap.stream(self._name):
                heap.wait(self._arrived, number, self.source)
                heap.copy(content, slot)
                heap.write(self._taken, number)
                return self._moved([heap.event()] if self._stream is None else [])

        peer = f" from rank {self.ranks[0]}"
        return start(
            self.meter,
            self.axis,
            name,
            0,
            self._stream,
            None,
            launch,
            lambda: tensor,
            peer,
            True,
            what=("receive", tensor),
        )

    def _next(self, nbytes: int) -> tuple[SymmetricHeap, torch.Tensor, int]:
        """Of the next message: the heap, its place, and its number."""
        boxes = self.boxes
        boxes.check()
        assert nbytes <= boxes.nbytes, f"a message of {nbytes} bytes in a box for {boxes.nbytes}; require() it first"
        slot = self._slots[self._count % len(self._slots)][:nbytes]
        self._count += 1
        return boxes.heap, slot, boxes.heap.origin + self._count

    def _moved(self, events: Sequence[Event]) -> list[_Moved]:
        """What a host waits for; a side stream is behind it by itself."""
        return [_Moved(self.boxes, event) for event in events] if self._stream is None else []


class _Moved:
    def __init__(self, boxes: Boxes, event: Event) -> None:
        self._boxes, self._event = boxes, event

    def wait(self) -> None:
        self._event.wait()
        self._boxes.check()


def in_boxes(
    group: Group, pairs: Iterable[Pair], lines: Mapping[Pair, Group], timeout: float
) -> Boxes | Mapping[Pair, Group]:
    """The lines of a group over copy engines on GPUs that address each other's memory, else as they are.

    Collective over the group.  lines: `make_lines` of the pairs.
    """
    if group.device.type != "cuda" or not reach(group):
        return lines
    return Boxes(group, pairs, lines, timeout)


def between_all(group: Group, timeout: float, slots: int = 1) -> Boxes:
    """Boxes between every two ranks of a group, with the group's library beneath."""
    pairs = list(itertools.permutations(range(group.size), 2))
    return Boxes(group, pairs, dict.fromkeys(pairs, group), timeout, slots)
