"""What rank processes run for the tests of symmetric memory; kernels are interpreted."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

import torch

from example_files import load
from interlace import errors
from interlace.launch import World
from interlace.symmetric import SymmetricHeap, device


def examples(world: World, names: list[str]) -> int:
    """Every example, one after the other, in this rank's process."""
    for name in names:
        with SymmetricHeap.opened(1 << 20) as heap:
            check = load(name).launch(heap)
            heap.barrier()
            check()
    return len(names)


def refused(call: Any) -> str:
    try:
        call()
    except errors.InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")


def memory(world: World) -> dict[str, Any]:
    """Allocation, peers, reuse of space, and what is refused."""
    heap = SymmetricHeap(1 << 16)
    x = heap.empty((3, 5), name="x")
    fresh = bool(torch.isnan(x.local).all())
    x.local.copy_(torch.full((3, 5), float(heap.rank)))
    heap.barrier()
    seen = [float(x.peer(rank).sum()) for rank in range(heap.size)]
    addresses = x.addresses.tolist() == [x.peer(rank).data_ptr() for rank in range(heap.size)]
    words = heap.signals(4, "words")
    said = {
        "sizes": refused(lambda: heap.empty(3 + heap.rank, name="y")),
        "types": refused(lambda: heap.empty(2, dtype=torch.bool, name="b")),
        "full": refused(lambda: heap.empty(1 << 20, name="large")),
        "peer": refused(lambda: x.peer(heap.size)),
        "flag": refused(lambda: heap.write(words.local, 1)),
        "copy": refused(lambda: heap.copy(x.local, x.local[:, :2])),
    }
    offset = x.offset
    heap.free(x)
    said["freed"] = refused(lambda: x.local)
    again = heap.zeros((3, 5), name="again")
    zero = float(again.local.abs().sum())
    result = {"fresh": fresh, "seen": seen, "addresses": addresses, "reused": again.offset == offset, "zero": zero}
    heap.close()
    left = [path for path in os.listdir("/dev/shm") if path.startswith("interlace-heap-")]
    return {**result, "said": said, "left": left}


def transports(world: World) -> list[list[float]]:
    """A copy on a side stream, gated by a flag the other rank raises on its own side stream; then a graph."""
    heap = SymmetricHeap(1 << 16)
    x, y = heap.empty(6, name="x"), heap.empty(6, name="y")
    ready, done, epoch = heap.signals(1, "ready"), heap.signals(1, "done"), heap.signals(1, "epoch")
    after, before = (heap.rank + 1) % heap.size, (heap.rank - 1) % heap.size
    found = []

    def step() -> None:
        epoch.local.add_(1)
        x.local.add_(1)
        heap.write(ready.peer(before)[0], epoch.local)
        with heap.stream("copies"):
            heap.wait(ready.local[0], epoch.local, after)
            heap.copy(y.local, x.peer(after))
            heap.write(done.local[0], epoch.local)
        heap.wait(done.local[0], epoch.local, heap.rank)
        heap.barrier()
        found.append(y.local.tolist())

    x.local.fill_(10.0 * heap.rank)
    heap.barrier()
    heap.graph(step)()
    with heap.stream("copies"):
        copied = heap.event()
    copied.wait()
    heap.synchronize()
    heap.close()
    return found


def late(world: World) -> str:
    """Rank 1 never signals: the others' kernels end, and the host names it."""
    heap = SymmetricHeap(1 << 16, timeout=0.3)
    words = heap.signals(4, "words")
    said = ""
    if heap.rank != 1:
        device.await_flag[(1,)](words.local[3:], 5, 1, heap.context, VALUE_IN_MEMORY=False, KERNEL="late")
        said = refused(heap.synchronize)
    heap.fabric.exchange([0])
    return said


def late_stream(world: World) -> str:
    """The same where a stream waits."""
    heap = SymmetricHeap(1 << 16, timeout=0.2)
    words = heap.signals(4, "words")
    with heap.stream("side"):
        heap.wait(words.local[2], 7, 1 - heap.rank)
    said = refused(heap.synchronize)
    heap.fabric.exchange([0])
    return said


def aborted(world: World) -> str:
    """A watchdog asks the spinners of its rank to leave, long before their limit."""
    import threading

    heap = SymmetricHeap(1 << 16, timeout=100.0)
    words = heap.signals(1, "words")
    threading.Timer(0.2, heap.abort).start()
    device.await_flag[(1,)](words.local, 1, 0, heap.context, VALUE_IN_MEMORY=False, KERNEL="watched")
    return refused(heap.synchronize)


def subgroup(world: World) -> list[Any]:
    """A heap over ranks 1 and 3 of four, and one over all, at the same time."""
    import torch.distributed as dist

    group = dist.new_group([1, 3])
    found: list[Any] = []
    whole = SymmetricHeap(1 << 16)
    if world.rank in (1, 3):
        heap = SymmetricHeap(1 << 16, group=group)
        check = load("ring_shift").launch(heap)
        heap.barrier()
        check()
        found = [heap.rank, heap.size]
        heap.close()
    check = load("all_to_all").launch(whole)
    whole.barrier()
    check()
    whole.close()
    return found


def kernel_on_a_side_stream(world: World) -> list[float]:
    """A kernel of a named stream begins after what that stream was given before."""
    heap = SymmetricHeap(1 << 16)
    x, out = heap.zeros(4, name="x"), heap.zeros(4, name="out")
    flag = heap.signals(1, "flag")
    with heap.stream("side"):
        heap.wait(flag.local[0], 1, heap.rank)
        heap.copy(x.local, torch.full((4,), 3.0))
    heap.write(flag.local[0], 1)
    with heap.stream("side"):
        load("ring_shift")
        device.raise_flag[(1,)](flag.local, 2, VALUE_IN_MEMORY=False)
        heap.copy(out.local, x.local)
    heap.synchronize()
    found = [*out.local.tolist(), float(flag.local)]
    heap.close()
    return found


def without_warnings(world: World) -> bool:
    import warnings

    with warnings.catch_warnings(), SymmetricHeap.opened(1 << 16) as heap:
        warnings.simplefilter("error")
        load("one_shot_all_reduce").launch(heap)()
    return True
