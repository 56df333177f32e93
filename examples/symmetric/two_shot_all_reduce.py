"""The sum over ranks, everywhere, in two shots: the owner of a chunk adds it in rank order, then sends it to all.

Moves 2 (W-1)/W of the elements a rank instead of W-1 times all of them, and waits twice.
"""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import my_rank, next_epoch, put_signal, remote, signal, wait_until, world


@triton.jit
def two_shot_all_reduce(x, slots, out, arrived, reduced, epochs, count, heap, BLOCK: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(epochs)
    chunk = tl.cdiv(count, ranks)
    at = program * BLOCK + tl.arange(0, BLOCK)
    flag = arrived + me * programs + program
    for step in range(0, ranks):
        peer = (me + step) % ranks
        first = peer * chunk + program * BLOCK
        length = tl.maximum(0, tl.minimum(BLOCK, tl.minimum(chunk - program * BLOCK, count - first)))
        put_signal(slots + me * chunk + program * BLOCK, x + first, length, flag, epoch, peer, heap, BLOCK)
    mine = (at < chunk) & (me * chunk + at < count)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(ranks):
        wait_until(arrived + peer * programs + program, epoch, peer, heap, "two_shot")
        total += tl.load(slots + peer * chunk + at, mask=mine, other=0.0)
    for step in range(0, ranks):
        peer = (me + step) % ranks
        tl.store(remote(out + me * chunk + at, peer, heap), total, mask=mine)
        signal(reduced + me * programs + program, epoch, peer, heap)
    for peer in range(ranks):
        wait_until(reduced + peer * programs + program, epoch, peer, heap, "two_shot")  # so it has read its slots, too


def launch(heap, count=10, block=4, calls=2):
    chunk = -(-count // heap.size)
    programs = -(-chunk // block)
    x, out = heap.empty(count, name="x"), heap.empty(count, name="out")
    slots = heap.empty((heap.size, chunk), name="slots")
    arrived, reduced = (heap.signals(heap.size * programs, name) for name in ("arrived", "reduced"))
    epochs = heap.signals(programs, "epochs")
    elements = torch.arange(count, device=heap.device)
    for call in range(calls):
        x.local.copy_((heap.rank + 1.0) * elements + call)
        two_shot_all_reduce[(programs,)](
            x.local, slots.local, out.local, arrived.local, reduced.local, epochs.local, count,
            heap.context, block,
        )  # fmt: skip

    def check():
        torch.testing.assert_close(out.local, heap.size * ((heap.size + 1) / 2 * elements + calls - 1))

    return check
