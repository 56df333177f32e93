"""Every rank's elements move to the next rank, several rounds in one launch: put, signal, wait, and word back."""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import my_rank, next_epoch, put_signal, signal, wait_until, world


@triton.jit
def ring_shift(x, inbox, out, arrived, taken, epochs, count, heap, BLOCK: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    after, before = (me + 1) % ranks, (me + ranks - 1) % ranks
    program = tl.program_id(0)
    epoch = next_epoch(epochs)
    at = program * count
    put_signal(inbox + at, x + at, count, arrived + program, epoch, after, heap, BLOCK)
    wait_until(arrived + program, epoch, before, heap, "ring_shift")
    for start in range(0, count, BLOCK):
        element = start + tl.arange(0, BLOCK)
        tl.store(out + at + element, tl.load(inbox + at + element, mask=element < count), mask=element < count)
    signal(taken + program, epoch, before, heap)  # the inbox may be filled again
    wait_until(taken + program, epoch, after, heap, "ring_shift")


def launch(heap, rounds=3, programs=2, count=5, block=4):
    inbox = heap.empty((programs, count), name="inbox")
    arrived, taken = heap.signals(programs, "arrived"), heap.signals(programs, "taken")
    epochs = heap.signals(programs, "epochs")
    x = torch.arange(programs * count, dtype=torch.float32, device=heap.device) + 100 * heap.rank
    out = torch.zeros_like(x)
    for _ in range(rounds):
        ring_shift[(programs,)](
            x, inbox.local, out, arrived.local, taken.local, epochs.local, count, heap.context, block
        )

    def check():
        source = (heap.rank + heap.size - 1) % heap.size
        expected = torch.arange(programs * count, dtype=torch.float32, device=heap.device) + 100 * source
        torch.testing.assert_close(out, expected)

    return check
