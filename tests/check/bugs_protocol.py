"""Flags that are old, shared, wiped or never sent; buffers reused too early; programs and ranks that wait for ever."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from bug import bug

from interlace.symmetric.device import my_rank, remote, signal, wait_until, world

N = 4


@triton.jit
def raise_and_wait(flag, value, after, heap, EQUAL: tl.constexpr):
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), value, sem="release", scope="sys")
    if EQUAL:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != value:
            pass
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < value:
            pass
    tl.debug_barrier()


@triton.jit
def round_of_the_host(x, inbox, flag, taken, out, after, before, number, heap, N: tl.constexpr, EQUAL: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    raise_and_wait(flag, number, after, heap, EQUAL)
    tl.store(out + at, tl.load(inbox + at))
    raise_and_wait(taken, number, before, heap, EQUAL)


def rounds(heap, numbers, equal):
    x, inbox = torch.arange(N, dtype=torch.float32), heap.zeros(N, name="inbox")
    flag, taken = heap.zeros(1, torch.int32, name="flag"), heap.zeros(1, torch.int32, name="taken")
    out = torch.zeros(N)
    after, before = (heap.rank + 1) % heap.size, (heap.rank - 1) % heap.size
    for number in numbers:
        round_of_the_host[(1,)](
            x, inbox.local, flag.local, taken.local, out, after, before, number, heap.context, N, equal
        )
    return lambda: torch.equal(out, x)


@bug(
    "ROCm/aiter#3928, vllm-project/vllm#46913",
    "reused signal",
    "launch 1 of round_of_the_host, not of launch 2",
    replays=4,
)
def round_number_baked_into_a_graph(heap):
    return rounds(heap, [1], equal=True)


@bug("NVIDIA/TensorRT-LLM#4344", "reused signal", "let the value grow", replays=4)
def parity_with_an_odd_number_of_rounds_in_a_graph(heap):
    return rounds(heap, [1, 0, 1], equal=True)


@triton.jit
def all_reduce(x, slots, flags, counter, out, heap, N: tl.constexpr, SHOTS: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    at = tl.arange(0, N)
    first = tl.load(counter)
    tl.debug_barrier()
    tl.store(counter, first + SHOTS)
    for peer in range(ranks):
        tl.store(remote(slots, peer, heap) + me * N + at, tl.load(x + at))
        signal(flags + me, first + 1, peer, heap)
    total = tl.zeros([N], tl.float32)
    for peer in range(ranks):
        wait_until(flags + peer, first + 1, peer, heap)
        total += tl.load(slots + peer * N + at)
    tl.store(out + at, total)
    for peer in range(ranks):
        signal(flags + ranks + me, first + SHOTS, peer, heap)
    for peer in range(ranks):
        wait_until(flags + ranks + peer, first + SHOTS, peer, heap)


@bug("tokenspeed#351 (one- and two-shot share a counter)", ("reused signal", "data race", "deadlock"), "")
def two_algorithms_share_a_counter(heap):
    x, out = torch.ones(N), torch.zeros(N)
    slots, flags = heap.zeros(heap.size * N, name="slots"), heap.signals(2 * heap.size, "flags")
    counter = heap.signals(1, "counter")
    # ranks choose by their own size of message: one moves the shared counter by one, the other by two
    for shots in (1, 2) if heap.rank == 0 else (2, 1):
        all_reduce[(1,)](x, slots.local, flags.local, counter.local, out, heap.context, N, shots)
    return lambda: torch.equal(out, heap.size * x)


@triton.jit
def read_peer(x, flag, out, after, before, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, before, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.debug_barrier()
    tl.store(out + at, tl.load(remote(x, after, heap) + at))


@bug("ROCm/aiter#3514, #3515", "buffer reused", "may still (read it|be read)")
def input_reused_while_a_peer_reads(heap):
    x, flag, out = heap.empty(N, name="x"), heap.signals(1, "flag"), torch.zeros(N)
    after, before = (heap.rank + 1) % heap.size, (heap.rank - 1) % heap.size
    flag.local.fill_(0)
    heap.barrier()
    x.local.fill_(float(heap.rank))
    read_peer[(1,)](x.local, flag.local, out, after, before, heap.context, N)
    x.local.fill_(-1.0)  # the allocator has given it to somebody else


@triton.jit
def one_word(flag, peer, heap):
    signal(flag, 1, peer, heap)
    wait_until(flag, 1, peer, heap)


@bug("pytorch/pytorch#196546", "lost signal", "may wipe a signal|replaces an earlier signal|goes past")
def pad_zeroed_after_the_collective(heap):
    flag = heap.empty(1, torch.int32, name="pad")
    flag.local.fill_(0)  # a peer may have signalled by now
    one_word[(1,)](flag.local, 1 - heap.rank, heap.context)


@triton.jit
def count_in(counter, heap, FIRST: tl.constexpr):
    if FIRST:
        tl.debug_barrier()
        tl.atomic_xchg(counter, 0, sem="release", scope="sys")  # makes the word ready, while others add already
    ranks = world(heap)
    tl.debug_barrier()
    tl.atomic_add(remote(counter, 0, heap), 1, sem="release", scope="sys")
    if FIRST:
        while tl.atomic_add(counter, 0, sem="acquire", scope="sys") < ranks:
            pass


@bug("NVIDIA/cutlass#3143", "lost signal", "")
def first_use_before_everybody_is_ready(heap):
    counter = heap.zeros(1, torch.int32, name="counter")
    count_in[(1,)](counter.local, heap.context, heap.rank == 0)


@triton.jit
def barrier_by_set(flag, heap):
    ranks = world(heap)
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, 0, heap), 1, sem="release", scope="sys")
    if my_rank(heap) == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < ranks:
            pass


@bug("NVIDIA/nvshmem#36", "lost signal", "atomic_add")
def barrier_sets_instead_of_adding(heap):
    flag = heap.signals(1, "arrived") if heap.origin == 0 else heap.zeros(1, torch.int32, name="arrived")
    barrier_by_set[(1,)](flag.local, heap.context)


@triton.jit
def push_a(x, inbox, pad, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    signal(pad, 1, after, heap)
    wait_until(pad, 1, after, heap)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def push_b(x, inbox, pad, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    signal(pad, 1, after, heap)
    wait_until(pad, 1, after, heap)
    tl.store(out + at, tl.load(inbox + at))


def two_users(heap, names):
    """Two operations at once over one pad."""
    x, pad = torch.ones(N), heap.zeros(1, torch.int32, name="pad")
    outs = []
    for name, kernel in zip(names, (push_a, push_b), strict=True):
        inbox, out = heap.zeros(N, name=f"inbox {name}"), torch.zeros(N)
        outs.append(out)
        with heap.stream(name):
            kernel[(1,)](x, inbox.local, pad.local, out, (heap.rank + 1) % heap.size, heap.context, N)
    return lambda: all(torch.equal(out, x) for out in outs)


@bug("pytorch/pytorch#192581", "reused signal", "give every operation, stream and group its own words")
def two_groups_share_a_pad(heap):
    return two_users(heap, ("tp", "dp"))


@bug("pytorch/pytorch#188005", "reused signal", "give every operation, stream and group its own words")
def one_channel_on_two_streams(heap):
    return two_users(heap, ("", "side"))


@triton.jit
def many_channels(pad, channels, heap):
    me, ranks = my_rank(heap), world(heap)
    for channel in range(channels):
        tl.debug_barrier()
        tl.atomic_xchg(remote(pad + channel * ranks + me, (me + 1) % ranks, heap), 1, sem="release", scope="sys")


@bug("pytorch/pytorch#191618", "out of bounds", "behind the end of its 8 elements")
def capacity_check_multiplies(heap):
    pad = heap.zeros(8, torch.int32, name="pad")
    heap.zeros(64, name="data of a peer")
    channels = 8 * heap.size  # the check compared with capacity * world where it should divide
    many_channels[(1,)](pad.local, channels, heap.context)


@triton.jit
def staged(x, workspace, slot, after, heap, N: tl.constexpr):
    flags, staging = workspace, workspace + 4
    at = tl.arange(0, N)
    tl.store(remote(staging, after, heap) + slot * N + at, tl.load(x + at))
    signal(flags, 1, after, heap)
    wait_until(flags, 1, after, heap)


@bug("b12x#97", ("lost signal", "data race", "wrong order"), "workspace")
def negative_slot_aliases_the_flags(heap):
    workspace = heap.zeros(16, torch.int32, name="workspace")
    staged[(1,)](torch.zeros(N, dtype=torch.int32), workspace.local, -1, (heap.rank + 1) % heap.size, heap.context, N)


@triton.jit
def dispatcher(state, first, heap):
    ranks = world(heap)
    tl.debug_barrier()
    for peer in range(ranks):
        tl.atomic_add(remote(state, peer, heap), 1, sem="acq_rel", scope="sys")
    while tl.atomic_add(state, 0, sem="acquire", scope="sys") != first + ranks:
        pass


@bug("uccl-project/uccl#986", ("deadlock", "lost signal"), "dispatcher")
def two_dispatchers_share_one_state(heap):
    state = heap.zeros(1, torch.int32, name="state")
    for name in ("micro-batch 0", "micro-batch 1"):
        with heap.stream(name):
            dispatcher[(1,)](state.local, 0, heap.context)


@triton.jit
def stub_barrier(flag, heap):
    pass


@triton.jit
def stubbed(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    stub_barrier(flag, heap)
    tl.store(out + at, tl.load(inbox + at))


@bug("pytorch/pytorch#191858", "data race", "without waiting for")
def barrier_is_an_empty_stub(heap):
    x, inbox, flag, out = torch.ones(N), heap.zeros(N, name="inbox"), heap.signals(1), torch.zeros(N)
    stubbed[(1,)](x, inbox.local, flag.local, out, (heap.rank + 1) % heap.size, heap.context, N)


@triton.jit
def add_and_equal(flag, after, heap):
    tl.debug_barrier()
    tl.atomic_add(remote(flag, after, heap), 2, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass


@bug("pytorch/pytorch#158167", "deadlock", r"found 2, wanted 1\b")
def signal_adds_where_the_wait_wants_a_value(heap):
    add_and_equal[(1,)](heap.zeros(1, torch.int32, name="flag").local, (heap.rank + 1) % heap.size, heap.context)


@triton.jit
def local_pointer(flag, after, heap, FIXED: tl.constexpr):
    tl.debug_barrier()
    tl.atomic_xchg(flag + 1, 1, sem="release", scope="sys")  # should be the peer's
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass


@bug("pytorch/pytorch#163194", "deadlock", r"flag\[0\] was never signalled")
def signal_to_the_own_address(heap):
    local_pointer[(1,)](heap.zeros(2, torch.int32, name="flag").local, (heap.rank + 1) % heap.size, heap.context, 0)


@triton.jit
def only_with_work(x, flag, count, after, heap, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(remote(x, after, heap) + at, at.to(tl.float32), mask=at < count)
        signal(flag, 1, after, heap)
    wait_until(flag, 1, after, heap, "dispatch")


@bug("sgl-project/sgl-kernel-npu#69, tenstorrent/tt-metal#55091", "deadlock", r"flag\[0\] was never signalled")
def a_rank_without_tokens_never_signals(heap):
    x, flag = heap.zeros(8, name="x"), heap.signals(1, "flag")
    only_with_work[(1,)](x.local, flag.local, 0 if heap.rank else 5, (heap.rank + 1) % heap.size, heap.context, 4)


@triton.jit
def chunks(data, head, tail, total, peer, heap, EVERY: tl.constexpr, SLOTS: tl.constexpr):
    """Rank 0 sends through a ring of SLOTS; rank 1 tells how far it is only after EVERY chunks."""
    if my_rank(heap) == 0:
        for sent in range(total):
            wait_until(head, sent + 1 - SLOTS, peer, heap, "chunks")
            tl.store(remote(data + sent % SLOTS, peer, heap), sent)
            signal(tail, sent + 1, peer, heap)
    else:
        for taken in range(total):
            wait_until(tail, taken + 1, peer, heap, "chunks")
            if (taken + 1) % EVERY == 0:
                signal(head, taken + 1, peer, heap)


@bug("deepseek-ai/DeepEP#317, #353", "deadlock", r"rank 0 head\[0\]")
def head_told_less_often_than_the_ring_is_long(heap):
    data, head, tail = (heap.zeros(8, torch.int32, name=name) for name in ("data", "head", "tail"))
    chunks[(1,)](data.local, head.local, tail.local, 8, 1 - heap.rank, heap.context, EVERY=4, SLOTS=2)


@triton.jit
def consumers_first(x, flags, out, heap, WORKERS: tl.constexpr):
    program = tl.program_id(0)
    if program < WORKERS:
        wait_until(flags + program, 1, my_rank(heap), heap, "workers")
        tl.store(out + program, tl.load(x + program))
    else:
        tl.store(x + program - WORKERS, program)
        signal(flags + program - WORKERS, 1, my_rank(heap), heap)


@bug("mirage-project/mirage#761, #775; NVIDIA/cutlass#1938", "deadlock", "not resident", resident=4, schedules=60)
def consumers_hold_the_places_producers_need(heap):
    x, flags, out = heap.zeros(4, torch.int32, name="x"), heap.zeros(4, torch.int32, name="flags"), heap.zeros(4)
    consumers_first[(8,)](x.local, flags.local, out.local, heap.context, 4)


@triton.jit
def produce(x, flag, after, heap):
    tl.store(remote(x, after, heap), 1.0)
    signal(flag, 1, after, heap)


@triton.jit
def consume(x, flag, out, before, heap):
    wait_until(flag, 1, before, heap, "consume")
    tl.store(out, tl.load(x))


@bug("NVIDIA/Megatron-LM#533, NVIDIA/nccl#613", "deadlock", "wait for signals that nobody will send")
def consumer_launched_before_the_producer(heap):
    x, flag, out = heap.zeros(1, name="x"), heap.signals(1, "flag"), torch.zeros(1)
    other = (heap.rank + 1) % heap.size
    # one hardware queue: what was launched later begins later
    consume[(1,)](x.local, flag.local, out, other, heap.context)
    produce[(1,)](x.local, flag.local, other, heap.context)


@triton.jit
def sentinel(x, inbox, out, after, heap, N: tl.constexpr):
    """Lamport's way: the data is its own flag, and an int view of -0.0 means not there yet."""
    for index in range(N):
        value = tl.load(x + index)
        tl.atomic_xchg(remote(inbox, after, heap) + index, value, sem="relaxed", scope="sys")
    for index in range(N):
        value = tl.load(inbox + index, volatile=True)
        while value == -2147483648:
            value = tl.load(inbox + index, volatile=True)
        tl.store(out + index, value)


@bug("flashinfer-ai/flashinfer#3053, #3304", "deadlock", r"inbox\[2\], found -2147483648")
def data_that_looks_like_the_sentinel(heap):
    x = torch.tensor([1.0, 2.0, -0.0, 3.0]).view(torch.int32)
    inbox, out = heap.empty(N, torch.int32, name="inbox"), torch.zeros(N, dtype=torch.int32)
    inbox.local.fill_(-2147483648)
    heap.barrier()
    sentinel[(1,)](x, inbox.local, out, (heap.rank + 1) % heap.size, heap.context, N)


@bug("pytorch/pytorch#195501", "deadlock", "a collective of the heap")
def allocation_on_one_rank_only(heap):
    heap.zeros(4, name="x")
    if heap.rank == 0:
        heap.zeros(4, name="workspace")  # the first use, on this rank only


@triton.jit
def lamport_without_limit(flag, after, heap):
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass


@bug("sgl-project/sglang#30209", "no exit", "never leave their wait", stop=True)
def spinner_without_a_limit(heap):
    flag = heap.zeros(1, torch.int32, name="flag")
    lamport_without_limit[(1,)](flag.local, (heap.rank + 1) % heap.size, heap.context)


@triton.jit
def forgets_its_own(x, slots, flags, out, heap, N: tl.constexpr):
    me, ranks = my_rank(heap), world(heap)
    at = tl.arange(0, N)
    for step in range(1, ranks):
        peer = (me + step) % ranks
        tl.store(remote(slots, peer, heap) + me * N + at, tl.load(x + at))
        signal(flags + me, 1, peer, heap)
    total = tl.zeros([N], tl.float32)
    for step in range(1, ranks):
        peer = (me + step) % ranks
        wait_until(flags + peer, 1, peer, heap)
        total += tl.load(slots + peer * N + at)
    tl.store(out + at, total)


@bug("pytorch/pytorch#153595 (a path no test ran)", "wrong result", "rank 0")
def sum_without_the_own_part(heap):
    x, slots = torch.ones(N), heap.zeros(heap.size * N, name="slots")
    flags, out = heap.zeros(heap.size, torch.int32, name="flags"), torch.zeros(N)
    forgets_its_own[(1,)](x, slots.local, flags.local, out, heap.context, N)
    return lambda: torch.testing.assert_close(out, heap.size * x)


@triton.jit
def eight_ranks(flags, heap):
    me, ranks = my_rank(heap), world(heap)
    for peer in range(ranks):
        signal(flags + me, 1, peer, heap)
    for peer in range(8):
        wait_until(flags + peer, 1, peer, heap, "eight")


@bug("ByteDance-Seed/Triton-distributed#79", "deadlock", r"flags\[2\] was never signalled")
def eight_ranks_assumed(heap):
    eight_ranks[(1,)](heap.zeros(8, torch.int32, name="flags").local, heap.context)


@triton.jit
def reads_fresh(workspace, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(workspace + at))


@bug("DeepSeek and others: workspaces used before they are zeroed", "read of unwritten memory", r"workspace\[0\]")
def workspace_never_written(heap):
    reads_fresh[(1,)](heap.empty(N, name="workspace").local, torch.zeros(N), N)
