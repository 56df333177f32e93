"""What ranks with a GPU each run for the tests of symmetric memory; kernels are compiled."""

from __future__ import annotations

from typing import Any

import torch

from example_files import LARGE, load
from interlace import errors
from interlace.launch import World
from interlace.symmetric import SymmetricHeap, device


def examples(world: World, large: bool) -> list[str]:
    """Every example; its own check compares with the reference."""
    for name, sizes in LARGE.items():
        with SymmetricHeap.opened(1 << 24, device=world.device) as heap:
            check = load(name).launch(heap, **(sizes if large else {}))
            heap.barrier()
            check()
    return list(LARGE)


def replays(world: World) -> list[float]:
    """A captured all-reduce, replayed with new input each time: the largest difference of each."""
    reduce = load("one_shot_all_reduce").one_shot_all_reduce
    count, block = 3001, 512
    programs = -(-count // block)
    heap = SymmetricHeap(1 << 22, device=world.device)
    x, out = heap.empty(count, name="x"), heap.empty(count, name="out")
    slots = heap.empty((heap.size, count), name="slots")
    arrived, done = (heap.signals(heap.size * programs, name) for name in ("arrived", "done"))
    epochs = heap.signals(programs, "epochs")
    x.local.zero_()
    heap.barrier()

    def step() -> None:
        reduce[(programs,)](
            x.local, slots.local, out.local, arrived.local, done.local, epochs.local, count, heap.context, block
        )

    replay = heap.graph(step)
    found = []
    elements = torch.arange(count, device=heap.device, dtype=torch.float32)
    for call in range(5):
        x.local.copy_(elements * (heap.rank + 1) + call)
        replay()
        heap.synchronize()
        expected = elements * (heap.size * (heap.size + 1) / 2) + heap.size * call
        found.append(float((out.local - expected).abs().max()))
    heap.barrier()
    heap.close()
    return found


def graph_of_transports(world: World) -> list[float]:
    """All-gather + matmul with its copies and flags on a side stream, captured and replayed with new rows."""
    module = load("all_gather_matmul")
    M, N, K = 33, 40, 24
    heap = SymmetricHeap(1 << 22, device=world.device)
    x, gathered = heap.zeros((M, K), name="x"), heap.empty((heap.size, M, K), name="gathered")
    ready, arrived, taken = (heap.signals(heap.size, name) for name in ("ready", "arrived", "taken"))
    epoch = heap.signals(1, "epoch")
    w = torch.randn((K, N), generator=torch.Generator().manual_seed(heap.rank)).to(heap.device)
    out, rows = torch.zeros((heap.size * M, N), device=heap.device), torch.zeros((M, K), device=heap.device)

    def step() -> None:
        epoch.local.add_(1)
        x.local.copy_(rows)
        module.gather(heap, x, gathered, ready, arrived, taken, epoch)
        module.all_gather_matmul[(-(-N // 16),)](
            x.local, gathered.local, w, out, arrived.local, epoch.local, M, N, K, heap.context, B=16
        )
        with heap.stream("gather"):
            pulled = heap.event()
        pulled.wait()
        for peer in range(heap.size):
            if peer != heap.rank:
                heap.wait(taken.local[peer], epoch.local, peer)

    replay = heap.graph(step)
    found = []
    for call in range(5):
        made = [torch.randn((M, K), generator=torch.Generator().manual_seed(100 * call + r)) for r in range(heap.size)]
        rows.copy_(made[heap.rank])
        replay()
        heap.synchronize()
        found.append(float((out.cpu() - torch.cat(made) @ w.cpu()).abs().max()))
    heap.barrier()
    heap.close()
    return found


def memory(world: World) -> dict[str, Any]:
    """Peers' elements, reuse of space, refusal, and that many launches leave words at the same value everywhere."""
    heap = SymmetricHeap(1 << 20, device=world.device)
    x = heap.zeros((3, 5), name="x")
    x.local.fill_(float(heap.rank + 1))
    heap.barrier()
    seen = [float(x.peer(rank).sum()) for rank in range(heap.size)]
    heap.barrier()
    heap.copy(x.peer((heap.rank + 1) % heap.size), torch.full((3, 5), 7.0 + heap.rank, device=heap.device))
    heap.barrier()
    pushed = x.local.unique().tolist()
    try:
        heap.empty(3 + heap.rank, name="y")
        said = ""
    except errors.ConfigError as error:
        said = str(error)
    heap.free(x)
    heap.close()
    return {"seen": seen, "pushed": pushed, "said": said}


def late(world: World) -> str:
    """Rank 1 never signals; rank 0's kernel ends, and its host names rank 1."""
    heap = SymmetricHeap(1 << 20, device=world.device, timeout=0.5)
    words = heap.signals(4, "words")
    said = ""
    if heap.rank == 0:
        device.await_flag[(1,)](words.local[3:], 5, 1, heap.context, VALUE_IN_MEMORY=False, KERNEL="late")
        try:
            heap.synchronize()
        except errors.Hang as error:
            said = str(error)
    heap.fabric.exchange([0])
    return said
