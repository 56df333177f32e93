"""Chunk s of rank r becomes chunk r of rank s: one program a peer, a put and a signal each."""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import my_rank, next_epoch, put, put_signal, signal, wait_until, world


@triton.jit
def all_to_all(x, inbox, out, arrived, taken, epochs, count, heap, BLOCK: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    epoch = next_epoch(epochs)
    peer = (tl.program_id(0) + ranks - me) % ranks  # the same program of both meets, so one program at a time suffices
    put_signal(inbox + me * count, x + peer * count, count, arrived + me, epoch, peer, heap, BLOCK)
    wait_until(arrived + peer, epoch, peer, heap, "all_to_all")
    put(out + peer * count, inbox + peer * count, count, me, heap, BLOCK)
    signal(taken + me, epoch, peer, heap)
    wait_until(taken + peer, epoch, peer, heap, "all_to_all")  # my next call may overwrite the peer's inbox


def launch(heap, count=5, calls=2, block=4):
    x, inbox = heap.empty((heap.size, count), name="x"), heap.empty((heap.size, count), name="inbox")
    out = heap.empty((heap.size, count), name="out")
    arrived, taken = heap.signals(heap.size, "arrived"), heap.signals(heap.size, "taken")
    epochs = heap.signals(heap.size, "epochs")
    chunks = torch.arange(heap.size, device=heap.device)[:, None]
    elements = torch.arange(count, device=heap.device)
    for call in range(calls):
        x.local.copy_(100.0 * heap.rank + 10 * chunks + elements + call)
        all_to_all[(heap.size,)](
            x.local, inbox.local, out.local, arrived.local, taken.local, epochs.local, count, heap.context, block
        )

    def check():
        torch.testing.assert_close(out.local, 100.0 * chunks + 10 * heap.rank + elements + calls - 1)

    return check
