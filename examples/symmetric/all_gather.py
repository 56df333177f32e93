"""Every rank's shard on every rank: each program pushes its part of the own shard to all peers, nearest first."""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import barrier, my_rank, next_epoch, put, put_signal, wait_until, world


@triton.jit
def all_gather(shard, gathered, out, arrived, done, epochs, count, heap, BLOCK: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(epochs)
    part = tl.cdiv(count, programs)
    first = program * part
    length = tl.minimum(part, count - first)
    put(gathered + me * count + first, shard + first, length, me, heap, BLOCK)
    for step in range(1, ranks):
        peer = (me + step) % ranks
        flag = arrived + me * programs + program
        put_signal(gathered + me * count + first, shard + first, length, flag, epoch, peer, heap, BLOCK)
    for step in range(0, ranks):
        peer = (me + step) % ranks
        if step > 0:
            wait_until(arrived + peer * programs + program, epoch, peer, heap, "all_gather")
        put(out + peer * count + first, gathered + peer * count + first, length, me, heap, BLOCK)
    barrier(done + program * ranks, epoch, heap, "all_gather")  # the next call may overwrite `gathered`


def launch(heap, programs=2, count=7, calls=2, block=4):
    shard, gathered = heap.empty(count, name="shard"), heap.empty((heap.size, count), name="gathered")
    out = heap.empty((heap.size, count), name="out")
    arrived = heap.signals(heap.size * programs, "arrived")
    done, epochs = heap.signals(heap.size * programs, "done"), heap.signals(programs, "epochs")
    for call in range(calls):
        shard.local.copy_(torch.arange(count, device=heap.device) + 100.0 * heap.rank + call)
        all_gather[(programs,)](
            shard.local, gathered.local, out.local, arrived.local, done.local, epochs.local, count, heap.context, block
        )

    def check():
        ranks, elements = torch.arange(heap.size)[:, None], torch.arange(count)
        torch.testing.assert_close(out.local.cpu(), 100.0 * ranks + elements + calls - 1)

    return check
