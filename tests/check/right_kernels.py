"""Kernels that are right, in styles other than the library's: the checker must not report them.

Plain pointers and tl.atomic_* only, unless the style is about something else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlace.symmetric.device import admit_descriptors, fence, flush_descriptors, my_rank, remote, world

N = 4
RIGHT = {}


def right(launch):
    RIGHT[launch.__name__] = launch
    return launch


@triton.jit
def of(table, rank, kind: tl.constexpr):
    """The pointer in a table of addresses."""
    return tl.load(table + rank).to(tl.pointer_type(kind))


@triton.jit
def raised(word, value, HOW: tl.constexpr):
    """Polls a word in one of several styles until it holds `value`."""
    if HOW == "add":
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") != value:
            pass
    elif HOW == "cas":
        while tl.atomic_cas(word, value, value, sem="acquire", scope="sys") != value:
            pass
    elif HOW == "volatile":
        while tl.load(word, volatile=True) != value:
            pass
        tl.atomic_add(word, 0, sem="acquire", scope="sys")
    elif HOW == "fence":
        while tl.load(word, volatile=True) != value:
            pass
        fence()
    elif HOW == "or":
        while tl.atomic_or(word, 0, sem="acquire", scope="sys") != value:
            pass
    elif HOW == "max":
        while tl.atomic_max(word, 0, sem="acq_rel", scope="sys") != value:
            pass
    tl.debug_barrier()


@triton.jit
def push(x, inboxes, flags, out, me, after, before, number, N: tl.constexpr, HOW: tl.constexpr, FENCED: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(of(inboxes, after, tl.float32) + at, tl.load(x + at))
    word = of(flags, after, tl.int32) + program
    if FENCED:
        fence()
        tl.atomic_xchg(word, number, sem="relaxed", scope="sys")
    else:
        tl.debug_barrier()
        tl.atomic_xchg(word, number, sem="release", scope="sys")
    raised(of(flags, me, tl.int32) + program, number, HOW)
    tl.store(out + at, tl.load(of(inboxes, me, tl.float32) + at))
    tl.debug_barrier()
    tl.atomic_xchg(of(flags, before, tl.int32) + programs + program, number, sem="release", scope="sys")
    raised(of(flags, me, tl.int32) + programs + program, number, HOW)


def pushed(heap, how, fenced=False, programs=2, calls=2):
    inbox = heap.empty(programs * N, name="inbox")
    flags = heap.zeros(2 * programs, torch.int32, name="flags")
    out = torch.zeros(programs * N)
    after, before = (heap.rank + 1) % heap.size, (heap.rank - 1) % heap.size
    for number in range(1, calls + 1):
        x = torch.arange(programs * N) + 100.0 * heap.rank + number
        push[(programs,)](x, inbox.addresses, flags.addresses, out, heap.rank, after, before, number, N, how, fenced)
    return lambda: torch.testing.assert_close(out, torch.arange(programs * N) + 100.0 * before + calls)


@right
def polled_by_adding_nothing(heap):
    return pushed(heap, "add")


@right
def polled_by_compare_and_swap(heap):
    return pushed(heap, "cas")


@right
def polled_by_volatile_loads_then_acquire(heap):
    return pushed(heap, "volatile")


@right
def fences_around_relaxed_words(heap):
    return pushed(heap, "fence", fenced=True)


@right
def polled_by_or(heap):
    return pushed(heap, "or")


@right
def polled_by_max(heap):
    return pushed(heap, "max")


@triton.jit
def ring_sum(x, slots, flags, out, me, ranks, N: tl.constexpr):
    """Partial sums go round once, the whole sum once more; every step has a slot and a word of its own."""
    at = tl.arange(0, N)
    after = (me + 1) % ranks
    mine, there = of(slots, me, tl.float32), of(slots, after, tl.float32)
    word, word_there = of(flags, me, tl.int32), of(flags, after, tl.int32)
    total = tl.load(x + at)
    if me > 0:
        raised(word, 1, "add")
        total += tl.load(mine + at)
    if me < ranks - 1:
        tl.store(there + at, total)
        tl.debug_barrier()
        tl.atomic_xchg(word_there, 1, sem="release", scope="sys")
        raised(word + 1, 1, "add")
        total = tl.load(mine + N + at)
    if me != ranks - 2:
        tl.store(there + N + at, total)
        tl.debug_barrier()
        tl.atomic_xchg(word_there + 1, 1, sem="release", scope="sys")
    tl.store(out + at, total)


@right
def ring_all_reduce(heap):
    slots, flags = heap.empty(2 * N, name="slots"), heap.zeros(2, torch.int32, name="flags")
    x, out = torch.arange(N) + float(heap.rank), torch.zeros(N)
    ring_sum[(1,)](x, slots.addresses, flags.addresses, out, heap.rank, heap.size, N)
    return lambda: torch.testing.assert_close(out, sum(torch.arange(N) + float(r) for r in range(heap.size)))


@triton.jit
def tree_sum(x, slots, flags, out, me, ranks, N: tl.constexpr):
    """Children 2r+1 and 2r+2 send up; the root's sum comes down."""
    at = tl.arange(0, N)
    mine, word = of(slots, me, tl.float32), of(flags, me, tl.int32)
    total = tl.load(x + at)
    for child in range(0, 2):
        if 2 * me + 1 + child < ranks:
            raised(word + child, 1, "cas")
            total += tl.load(mine + child * N + at)
    if me > 0:
        parent, side = (me - 1) // 2, (me - 1) % 2
        tl.store(of(slots, parent, tl.float32) + side * N + at, total)
        tl.debug_barrier()
        tl.atomic_xchg(of(flags, parent, tl.int32) + side, 1, sem="release", scope="sys")
        raised(word + 2, 1, "add")
        total = tl.load(mine + 2 * N + at)
    for child in range(0, 2):
        peer = 2 * me + 1 + child
        if peer < ranks:
            tl.store(of(slots, peer, tl.float32) + 2 * N + at, total)
            tl.debug_barrier()
            tl.atomic_xchg(of(flags, peer, tl.int32) + 2, 1, sem="release", scope="sys")
    tl.store(out + at, total)


@right
def tree_all_reduce(heap):
    slots, flags = heap.empty(3 * N, name="slots"), heap.zeros(3, torch.int32, name="flags")
    x, out = torch.arange(N) + float(heap.rank), torch.zeros(N)
    tree_sum[(1,)](x, slots.addresses, flags.addresses, out, heap.rank, heap.size, N)
    return lambda: torch.testing.assert_close(out, sum(torch.arange(N) + float(r) for r in range(heap.size)))


@triton.jit
def two_halves(x, slots, flags, out, number, me, ranks, N: tl.constexpr):
    """One all-reduce into the half of a buffer the round's parity picks; the wait of round n frees the half of n-1."""
    at = tl.arange(0, N)
    half = number % 2 * ranks * N
    for peer in range(ranks):
        tl.store(of(slots, peer, tl.float32) + half + me * N + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(of(flags, peer, tl.int32) + me, number, sem="release", scope="sys")
    total = tl.zeros([N], tl.float32)
    for peer in range(ranks):
        while tl.atomic_add(of(flags, me, tl.int32) + peer, 0, sem="acquire", scope="sys") < number:
            pass
        total += tl.load(of(slots, me, tl.float32) + half + peer * N + at)
    tl.store(out + at, total)


@right
def double_buffer_without_an_exit_barrier(heap):
    slots, flags = heap.empty(2 * heap.size * N, name="slots"), heap.zeros(heap.size, torch.int32, name="flags")
    out = torch.zeros(N)
    for number in range(1, 6):
        x = torch.arange(N) + float(heap.rank * number)
        two_halves[(1,)](x, slots.addresses, flags.addresses, out, number, heap.rank, heap.size, N)
    return lambda: torch.testing.assert_close(out, sum(torch.arange(N) + 5.0 * r for r in range(heap.size)))


@triton.jit
def vector_of_flags(x, slots, flags, out, me, ranks, N: tl.constexpr, R: tl.constexpr):
    at, lanes = tl.arange(0, N), tl.arange(0, R)
    for peer in range(ranks):
        tl.store(of(slots, peer, tl.float32) + me * N + at, tl.load(x + at))
    tl.debug_barrier()
    words = tl.load(flags + lanes, mask=lanes < ranks, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(words + me, 1, mask=lanes < ranks, sem="release", scope="sys")  # a lane a peer
    mine = of(flags, me, tl.int32) + lanes
    here = tl.zeros([R], tl.int32)
    while tl.sum(here, axis=0) < ranks:
        found = tl.atomic_add(mine, 0, mask=lanes < ranks, sem="acquire", scope="sys")
        here = tl.where(lanes < ranks, found, 0)
    tl.debug_barrier()
    total = tl.zeros([N], tl.float32)
    for peer in range(ranks):
        total += tl.load(of(slots, me, tl.float32) + peer * N + at)
    tl.store(out + at, total)


@right
def flags_raised_and_polled_as_a_block(heap):
    slots, flags = heap.empty(heap.size * N, name="slots"), heap.zeros(heap.size, torch.int32, name="flags")
    x, out = torch.arange(N) + float(heap.rank), torch.zeros(N)
    vector_of_flags[(1,)](x, slots.addresses, flags.addresses, out, heap.rank, heap.size, N, R=4)
    return lambda: torch.testing.assert_close(out, sum(torch.arange(N) + float(r) for r in range(heap.size)))


@triton.jit
def last_adds_up(x, partial, counter, out, N: tl.constexpr):
    """The program that counts last adds up what all have stored: no program waits."""
    at = tl.arange(0, N)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(partial + program * N + at, tl.load(x + program * N + at))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.debug_barrier()
        total = tl.zeros([N], tl.float32)
        for other in range(programs):
            total += tl.load(partial + other * N + at)
        tl.store(out + at, total)


@right
def last_program_adds_up(heap):
    x, partial, counter = torch.ones(4 * N), torch.zeros(4 * N), torch.zeros(1, dtype=torch.int32)
    out = torch.zeros(N)
    last_adds_up[(4,)](x, partial, counter, out, N)
    return lambda: torch.testing.assert_close(out, torch.full((N,), 4.0))


@triton.jit
def under_a_lock(locks, totals, N: tl.constexpr, EXCHANGE: tl.constexpr):
    at = tl.arange(0, N)
    lock, total = of(locks, 0, tl.int32), of(totals, 0, tl.float32)
    if EXCHANGE:
        while tl.atomic_xchg(lock, 1, sem="acquire", scope="sys") == 1:
            pass
    else:
        while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="sys") == 1:
            pass
    tl.debug_barrier()
    tl.store(total + at, tl.load(total + at) + 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release", scope="sys")


def locked(heap, exchange):
    lock, total = heap.zeros(1, torch.int32, name="lock"), heap.zeros(N, name="total")
    under_a_lock[(2,)](lock.addresses, total.addresses, N, exchange)
    return lambda: heap.rank > 0 or torch.testing.assert_close(total.local, torch.full((N,), 2.0 * heap.size))


@right
def lock_by_compare_and_swap(heap):
    return locked(heap, exchange=False)


@right
def lock_by_exchange(heap):
    return locked(heap, exchange=True)


@triton.jit
def by_descriptors(x, inbox, flag, out, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    after = (my_rank(heap) + 1) % world(heap)
    there = tl.make_tensor_descriptor(remote(inbox, after, heap), [N], [1], [N])
    there.store([0], tl.load(x + at))
    flush_descriptors()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    admit_descriptors()
    here = tl.make_tensor_descriptor(inbox, [N], [1], [N])
    tl.store(out + at, here.load([0]))


@right
def descriptors_with_their_fences(heap):
    inbox, flag = heap.empty(N, name="inbox"), heap.zeros(1, torch.int32, name="flag")
    x, out = torch.arange(N) + 10.0 * heap.rank, torch.zeros(N)
    by_descriptors[(1,)](x, inbox.local, flag.local, out, heap.context, N)
    return lambda: torch.testing.assert_close(out, torch.arange(N) + 10.0 * ((heap.rank - 1) % heap.size))


@triton.jit
def double(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, 2 * tl.load(x + at))


@right
def copies_between_kernels_and_a_host_barrier(heap):
    x, y = heap.empty(N, name="x"), heap.empty(N, name="y")
    x.local.fill_(heap.rank + 1.0)
    double[(1,)](x.local, N)
    heap.barrier()
    with heap.stream("copies"):
        heap.copy(y.local, x.peer((heap.rank + 1) % heap.size))
        copied = heap.event()
    copied.wait()
    double[(1,)](y.local, N)
    heap.barrier()  # the peer has copied
    x.local.zero_()
    return lambda: torch.testing.assert_close(y.local, torch.full((N,), 4.0 * ((heap.rank + 1) % heap.size + 1)))


@triton.jit
def take_from_a_queue(queue, done, out, tiles, N: tl.constexpr):
    """Programs draw tiles from a shared counter; a tile may need the tile before it."""
    at = tl.arange(0, N)
    tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    while tile < tiles:
        if tile > 0:
            while tl.atomic_add(done + tile - 1, 0, sem="acquire", scope="gpu") == 0:
                pass
            tl.store(out + tile * N + at, tl.load(out + (tile - 1) * N + at) + 1.0)
        else:
            tl.store(out + at, tl.zeros([N], tl.float32))
        tl.debug_barrier()
        tl.atomic_xchg(done + tile, 1, sem="release", scope="gpu")
        tile = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")


@right
def work_queue_in_order(heap):
    queue, done = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    out = torch.zeros(6 * N)
    take_from_a_queue[(3,)](queue, done, out, 6, N)
    return lambda: torch.testing.assert_close(out, torch.arange(6.0).repeat_interleave(N))
