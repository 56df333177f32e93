"""x @ w summed over ranks, each rank keeping its rows: tiles go to the owner of their rows as they are made.

The rows of the next rank come first and the own last, so that the last tiles need no wire; owners add in rank order.
"""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import barrier, my_rank, next_epoch, remote, signal, wait_until, world


@triton.jit
def product(x, w, top, left, M, N, K, B: tl.constexpr):
    rows, columns = top + tl.arange(0, B), left + tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    for start in range(0, K, B):
        inner = start + tl.arange(0, B)
        a = tl.load(x + rows[:, None] * K + inner[None, :], mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0)
        b = tl.load(
            w + inner[:, None] * N + columns[None, :], mask=(inner < K)[:, None] & (columns < N)[None, :], other=0.0
        )
        total += tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def matmul_reduce_scatter(x, w, slots, out, arrived, done, epochs, M, N, K, heap, B: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(epochs)
    top, left = program // tl.cdiv(N, B) * B, program % tl.cdiv(N, B) * B
    rows, columns = top + tl.arange(0, B), left + tl.arange(0, B)
    at = rows[:, None] * N + columns[None, :]
    kept = (rows < M)[:, None] & (columns < N)[None, :]
    for step in range(0, ranks):
        owner = (me + 1 + step) % ranks
        tile = product(x + owner * M * K, w, top, left, M, N, K, B)
        tl.store(remote(slots + me * M * N + at, owner, heap), tile, mask=kept)
        signal(arrived + me * programs + program, epoch, owner, heap)
    total = tl.zeros([B, B], tl.float32)
    for peer in range(ranks):
        wait_until(arrived + peer * programs + program, epoch, peer, heap, "matmul_rs")
        total += tl.load(slots + peer * M * N + at, mask=kept, other=0.0)
    tl.store(out + at, total, mask=kept)
    barrier(done + program * ranks, epoch, heap, "matmul_rs")


def launch(heap, M=5, N=18, K=9, calls=2):
    programs = -(-M // 16) * -(-N // 16)
    slots = heap.empty((heap.size, M, N), name="slots")
    arrived = heap.signals(heap.size * programs, "arrived")
    done, epochs = heap.signals(heap.size * programs, "done"), heap.signals(programs, "epochs")
    out = torch.zeros((M, N), device=heap.device)

    def factors(rank):
        generator = torch.Generator().manual_seed(rank)
        return torch.randn((heap.size * M, K), generator=generator), torch.randn((K, N), generator=generator)

    x, w = (factor.to(heap.device) for factor in factors(heap.rank))
    for _ in range(calls):
        matmul_reduce_scatter[(programs,)](
            x, w, slots.local, out, arrived.local, done.local, epochs.local, M, N, K, heap.context, B=16
        )

    def check():
        whole = sum(a @ b for a, b in map(factors, range(heap.size)))
        torch.testing.assert_close(out.cpu(), whole[heap.rank * M : (heap.rank + 1) * M], rtol=1e-5, atol=1e-5)

    return check
