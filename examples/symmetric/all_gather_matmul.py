"""gather(x) @ w in one kernel that starts on the own rows while a copy engine pulls the others' on a side stream."""

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import my_rank, wait_until, world


@triton.jit
def all_gather_matmul(x, gathered, w, out, arrived, epoch, M, N, K, heap, B: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    now = tl.load(epoch)
    rows, columns = tl.arange(0, B), tl.program_id(0) * B + tl.arange(0, B)
    for step in range(0, ranks):
        shard = (me + step) % ranks
        source = x
        if step > 0:
            wait_until(arrived + shard, now, shard, heap, "ag_matmul")
            source = gathered + shard * M * K
        for top in range(0, M, B):
            total = tl.zeros([B, B], tl.float32)
            for start in range(0, K, B):
                inner = start + tl.arange(0, B)
                left = (top + rows < M)[:, None] & (inner < K)[None, :]
                right = (inner < K)[:, None] & (columns < N)[None, :]
                a = tl.load(source + (top + rows)[:, None] * K + inner[None, :], mask=left, other=0.0)
                b = tl.load(w + inner[:, None] * N + columns[None, :], mask=right, other=0.0)
                total += tl.dot(a, b, input_precision="ieee")
            kept = (top + rows < M)[:, None] & (columns < N)[None, :]
            tl.store(out + (shard * M + top + rows)[:, None] * N + columns[None, :], total, mask=kept)


def gather(heap, x, gathered, ready, arrived, taken, epoch):
    """On a side stream: each peer's rows once they are there, nearest first, then a flag for the kernel."""
    peers = [(heap.rank + step) % heap.size for step in range(1, heap.size)]
    for peer in peers:
        heap.write(ready.peer(peer)[heap.rank], epoch.local)
    written = heap.event()
    with heap.stream("gather"):
        written.wait()
        for peer in peers:
            heap.wait(ready.local[peer], epoch.local, peer)
            heap.copy(gathered.local[peer], x.peer(peer))
            heap.write(arrived.local[peer], epoch.local)
            heap.write(taken.peer(peer)[heap.rank], epoch.local)


def launch(heap, M=5, N=18, K=9, calls=2):
    x, gathered = heap.empty((M, K), name="x"), heap.empty((heap.size, M, K), name="gathered")
    ready, arrived, taken = (heap.signals(heap.size, name) for name in ("ready", "arrived", "taken"))
    epoch = heap.signals(1, "epoch")
    w = torch.randn((K, N), generator=torch.Generator().manual_seed(heap.rank)).to(heap.device)
    out = torch.zeros((heap.size * M, N), device=heap.device)

    def rows(rank, call):
        return torch.randn((M, K), generator=torch.Generator().manual_seed(10 * call + rank))

    for call in range(calls):
        epoch.local.add_(1)
        x.local.copy_(rows(heap.rank, call))
        gather(heap, x, gathered, ready, arrived, taken, epoch)
        all_gather_matmul[(-(-N // 16),)](
            x.local, gathered.local, w, out, arrived.local, epoch.local, M, N, K, heap.context, B=16
        )
        with heap.stream("gather"):
            pulled = heap.event()
        pulled.wait()
        for peer in range(heap.size):
            if peer != heap.rank:
                heap.wait(taken.local[peer], epoch.local, peer)  # the peers have pulled x, it may change

    def check():
        whole = torch.cat([rows(rank, calls - 1) for rank in range(heap.size)])
        torch.testing.assert_close(out.cpu(), whole @ w.cpu(), rtol=1e-5, atol=1e-5)

    return check
