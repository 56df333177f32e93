"""The sum over ranks, everywhere: every rank sends all it has to all, and all add in rank order: the same bits."""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import barrier, my_rank, next_epoch, put, put_signal, wait_until, world


@triton.jit
def one_shot_all_reduce(x, slots, out, arrived, done, epochs, count, heap, BLOCK: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(epochs)
    first = program * BLOCK
    length = tl.minimum(BLOCK, count - first)
    put(slots + me * count + first, x + first, length, me, heap, BLOCK)
    for step in range(1, ranks):
        peer = (me + step) % ranks
        flag = arrived + me * programs + program
        put_signal(slots + me * count + first, x + first, length, flag, epoch, peer, heap, BLOCK)
    for step in range(1, ranks):
        peer = (me + step) % ranks
        wait_until(arrived + peer * programs + program, epoch, peer, heap, "one_shot")
    at = first + tl.arange(0, BLOCK)
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(ranks):
        total += tl.load(slots + peer * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total, mask=at < count)
    barrier(done + program * ranks, epoch, heap, "one_shot")


def launch(heap, count=7, block=4, calls=2):
    programs = -(-count // block)
    x, out = heap.empty(count, name="x"), heap.empty(count, name="out")
    slots = heap.empty((heap.size, count), name="slots")
    arrived = heap.signals(heap.size * programs, "arrived")
    done, epochs = heap.signals(heap.size * programs, "done"), heap.signals(programs, "epochs")
    elements = torch.arange(count, device=heap.device)
    for call in range(calls):
        x.local.copy_((heap.rank + 1.0) * elements + call)
        one_shot_all_reduce[(programs,)](
            x.local, slots.local, out.local, arrived.local, done.local, epochs.local, count, heap.context, block
        )

    def check():
        torch.testing.assert_close(out.local, heap.size * ((heap.size + 1) / 2 * elements + calls - 1))

    return check
