"""What a signal and a put cost over symmetric memory, beside NCCL and the copy engine.

    torchrun --nproc-per-node 2 benchmarks/symmetric.py [--rounds 9] [--out FILE]
    python benchmarks/symmetric.py                       # two ranks as threads on one GPU: signals and local puts only

Between ranks 0 and 1: microseconds of a signal one way (half of a ping-pong in one kernel), of a put of some bytes with
its signal one way (the same, with a payload), and by size the microseconds and GiB/s of a push by SMs (a kernel of
`--programs` programs that ends with a signal to the peer and waits for the peer's), by the copy engine, and by NCCL
send and receive, all in both directions at once, handed out before the first begins.  Every transfer is compared with
its source before it is timed; the variants run in turn, `--rounds` times, and the median round counts, with the range
of all rounds behind it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from interlace.kernels.measure import stand_still
from interlace.symmetric import SymmetricHeap
from interlace.symmetric.cuda import on_one_gpu
from interlace.symmetric.device import my_rank, next_epoch, put, put_signal, wait_until

SMALL = (4, 64, 256, 1024, 4096, 16384, 65536)
LARGE = tuple(1 << power for power in range(16, 29, 2))  # 64 KiB to 256 MiB
INNER = 10  # transfers a timing
AHEAD = 200e-6  # seconds of the host that one takes at most


@triton.jit
def ping_pong(payload, turn, epochs, rounds, count, heap, BLOCK: tl.constexpr):
    """Rank 0 and 1 in turn send `count` elements and a signal, or a signal alone."""
    me = my_rank(heap)
    call = next_epoch(epochs)
    start = (call - 1) * rounds
    for step in range(rounds):
        if me == 0:
            put_signal(payload, payload, count, turn, start + step + 1, 1 - me, heap, BLOCK)
            wait_until(turn, start + step + 1, 1 - me, heap, "ping_pong")
        else:
            wait_until(turn, start + step + 1, 1 - me, heap, "ping_pong")
            put_signal(payload, payload, count, turn, start + step + 1, 1 - me, heap, BLOCK)


@triton.jit
def push(target, source, sent, epochs, part, count, heap, BLOCK: tl.constexpr):
    """Each program pushes its part to the other rank, signals, and waits for the other's."""
    program, peer = tl.program_id(0), 1 - my_rank(heap)
    epoch = next_epoch(epochs)
    first = tl.multiple_of(program.to(tl.int64) * part, 4)
    length = tl.minimum(part, count - first)
    put(target + first, source + first, length, peer, heap, BLOCK)
    tl.debug_barrier()
    put_signal(target, source, 0, sent + program, epoch, peer, heap, BLOCK)
    wait_until(sent + program, epoch, peer, heap, "push")


def seconds(run: Callable[[], None], inner: int) -> float:
    """Of one call, by the device's clock, the host having handed out all calls before the first begins."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stand_still(AHEAD * inner, torch.device("cuda"))
    begin.record()
    for _ in range(inner):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / inner


class Latency:
    """Ping-pong of one program: a signal alone (0 bytes), or with a payload."""

    def __init__(self, heap: SymmetricHeap, nbytes: int, rounds: int = 200) -> None:
        self.heap, self.count, self.rounds = heap, nbytes // 4, rounds
        self.payload = heap.zeros(max(1, self.count), torch.int32, name="payload")
        self.turn, self.epochs = heap.signals(1, "turn"), heap.signals(1, "epochs")
        self.block = min(4096, triton.next_power_of_2(max(1, self.count)))

    def __call__(self) -> None:
        ping_pong[(1,)](
            self.payload.local, self.turn.local, self.epochs.local, self.rounds, self.count, self.heap.context,
            self.block, num_warps=4 if self.count > 32 else 1,
        )  # fmt: skip

    def check(self) -> None:
        if self.count:
            self.payload.local.fill_(self.heap.rank + 1)
            self.heap.barrier()
            self()
            self.heap.barrier()
            assert int((self.payload.local != 1).sum()) == 0  # rank 0's came, and went back

    def free(self) -> None:
        for tensor in (self.payload, self.turn, self.epochs):
            self.heap.free(tensor)


class Transfer:
    """`nbytes` to the other rank, from both at once: by SMs, the copy engine, or NCCL."""

    def __init__(self, heap: SymmetricHeap, nbytes: int, how: str, programs: int) -> None:
        self.heap, self.how, self.programs = heap, how, programs
        self.count, self.peer = nbytes // 4, 1 - heap.rank
        self.source, self.target = heap.empty(self.count, name="source"), heap.empty(self.count, name="target")
        self.sent, self.epochs = heap.signals(programs, "sent"), heap.signals(programs, "epochs")
        self.source.local.copy_(torch.randn(self.count, generator=torch.Generator().manual_seed(heap.rank)))

    def __call__(self) -> None:
        if self.how == "push":
            part = -(-self.count // self.programs // 4) * 4
            part = max(4, part)
            push[(self.programs,)](
                self.target.local, self.source.local, self.sent.local, self.epochs.local, part, self.count,
                self.heap.context, 4096, num_warps=16,
            )  # fmt: skip
        elif self.how == "copy engine":
            self.heap.copy(self.target.peer(self.peer), self.source.local)
        else:
            send = dist.P2POp(dist.isend, self.source.local, self.peer)
            receive = dist.P2POp(dist.irecv, self.target.local, self.peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()

    def check(self) -> None:
        self.heap.barrier()
        self()
        self.heap.barrier()
        expected = torch.randn(self.count, generator=torch.Generator().manual_seed(self.peer))
        assert torch.equal(self.target.local.cpu(), expected), self.how

    def free(self) -> None:
        for tensor in (self.source, self.target, self.sent, self.epochs):
            self.heap.free(tensor)


def measure(heap: SymmetricHeap, variants: dict[str, Latency | Transfer], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call, by variant: the slower rank's of every round."""
    for variant in variants.values():
        variant.check()
        variant()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            heap.barrier()
            took = seconds(variant, 1 if isinstance(variant, Latency) else INNER)
            heap.barrier()
            times[name].append(max(row[0] for row in heap.fabric.exchange([int(took * 1e9)])) * 1e-9)
    for variant in variants.values():
        variant.free()
    return times


def spread(values: list[float], scale: float, digits: int = 2) -> str:
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def report(heap: SymmetricHeap, rounds: int, programs: int, nccl: bool) -> list[str]:
    lines = ["| put + signal one way, bytes | us |", "|---|---|"]
    for nbytes in (0, *SMALL):
        latency = Latency(heap, nbytes)
        times = measure(heap, {"latency": latency}, rounds)["latency"]
        lines.append(f"| {nbytes or 'signal alone'} | {spread(times, 1e6 / (2 * latency.rounds))} |")
    ways = ["push", "copy engine", *(["NCCL"] if nccl else [])]
    lines += ["", f"| bytes, both ways at once | {' | '.join(f'{way}, us | GiB/s' for way in ways)} |"]
    lines.append("|---" * (1 + 2 * len(ways)) + "|")
    for nbytes in LARGE:
        made = {way: Transfer(heap, nbytes, way, programs) for way in ways}
        times = measure(heap, made, rounds)
        cells = []
        for way in ways:
            rate = nbytes / statistics.median(times[way]) / (1 << 30)
            cells.append(f"{spread(times[way], 1e6, 1)} | {rate:.1f}")
        lines.append(f"| {nbytes} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--programs", type=int, default=32, help="of the push by SMs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    size = 3 * 2 * max(LARGE) + (1 << 22)  # three variants of a size live together
    if "RANK" not in os.environ:
        lines = on_one_gpu(
            lambda heap: report(heap, options.rounds, options.programs, nccl=False), 2, nbytes=size, timeout=20.0
        )[0]
        where = "two ranks on one GPU"
    else:
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=device)
        heap = SymmetricHeap(size, device=device, timeout=20.0)
        lines = report(heap, options.rounds, options.programs, nccl=True)
        heap.close()
        dist.destroy_process_group()
        if rank:
            return
        where = f"{os.environ['WORLD_SIZE']} GPUs"
    head = (
        f"{torch.cuda.get_device_name()}, {where}, torch {torch.__version__}, triton {triton.__version__}, "
        f"{datetime.date.today()}; median of {options.rounds} rounds (range), {options.programs} programs push"
    )
    text = "\n".join([head, "", *lines])
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
