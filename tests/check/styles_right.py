"""Protocols as other people write them, that are right: locks, barriers, rings, trees, counters, words of any type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from small_kernels import N

from interlace.symmetric.device import fence, my_rank, next_epoch, remote, signal, wait_until, world

RIGHT = {}


def right(**options):
    def register(launch):
        RIGHT[launch.__name__] = (launch, options)
        return launch

    return register


def everybodys(heap):
    """The inputs of all ranks, one after another."""
    return torch.cat([torch.arange(N) + 10.0 * rank for rank in range(heap.size)])


@triton.jit
def meet(count, sense, heap):
    """A barrier: the last who comes turns everybody's sense."""
    before = tl.atomic_add(sense, 0, sem="relaxed", scope="sys")
    tl.debug_barrier()
    if tl.atomic_add(remote(count, 0, heap), 1, sem="acq_rel", scope="sys") == world(heap) - 1:
        tl.atomic_xchg(remote(count, 0, heap), 0, sem="relaxed", scope="sys")
        for peer in range(world(heap)):
            tl.atomic_xor(remote(sense, peer, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(sense, 0, sem="acquire", scope="sys") == before:
        pass
    tl.debug_barrier()


@triton.jit
def sensed(x, inbox, count, sense, out, heap, ROUNDS: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    for number in range(ROUNDS):
        tl.store(remote(inbox, (my_rank(heap) + 1) % world(heap), heap) + at, tl.load(x + at) + number)
        meet(count, sense, heap)
        tl.store(out + at, tl.load(inbox + at))
        meet(count, sense, heap)


@right()
def sense_reversing_barrier(heap):
    x, inbox, out = torch.arange(N) + 10.0 * heap.rank, heap.empty(N, name="inbox"), torch.zeros(N)
    count, sense = (heap.zeros(1, torch.int32, name=n) for n in ("count", "sense"))
    for _ in range(2):
        sensed[(1,)](x, inbox.local, count.local, sense.local, out, heap.context, 3, N)
    return lambda: torch.equal(out, torch.arange(N) + 10.0 * ((heap.rank - 1) % heap.size) + 2)


@triton.jit
def ticketed(tickets, total, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    turns, there = remote(tickets, 0, heap), remote(total, 0, heap)
    mine = tl.atomic_add(turns, 1, sem="relaxed", scope="sys")
    while tl.atomic_add(turns + 1, 0, sem="acquire", scope="sys") != mine:
        pass
    tl.store(there + at, tl.load(there + at) + 1.0)
    tl.debug_barrier()
    tl.atomic_add(turns + 1, 1, sem="release", scope="sys")


@right()
def ticket_lock(heap):
    tickets, total = heap.zeros(2, torch.int32, name="tickets"), heap.zeros(N, name="total")
    ticketed[(2,)](tickets.local, total.local, heap.context, N)
    return lambda: heap.rank > 0 or torch.equal(total.local, torch.full((N,), 2.0 * heap.size))


@triton.jit
def versioned(words, out, heap, ROUNDS: tl.constexpr):
    """words: version, one, two.  Rank 0 writes both numbers, others read till the version stays the same."""
    there = remote(words, 0, heap)
    if my_rank(heap) == 0:
        for number in range(1, ROUNDS + 1):
            tl.atomic_xchg(there, 2 * number - 1, sem="relaxed", scope="sys")
            fence()
            tl.atomic_xchg(there + 1, number, sem="relaxed", scope="sys")
            tl.atomic_xchg(there + 2, 10 * number, sem="relaxed", scope="sys")
            tl.atomic_xchg(there, 2 * number, sem="release", scope="sys")
    else:
        version, again = 1, 0
        one, two = 0, 0
        while (version != again) | (version % 2 == 1):
            version = tl.atomic_add(there, 0, sem="acquire", scope="sys")
            one = tl.atomic_add(there + 1, 0, sem="relaxed", scope="sys")
            two = tl.atomic_add(there + 2, 0, sem="relaxed", scope="sys")
            fence()
            again = tl.atomic_add(there, 0, sem="relaxed", scope="sys")
        tl.store(out, one)
        tl.store(out + 1, two)


@right()
def seqlock_of_atomics(heap):
    words, out = heap.zeros(3, torch.int32, name="words"), torch.zeros(2, dtype=torch.int32)
    versioned[(1,)](words.local, out, heap.context, 2)
    return lambda: int(out[1]) == 10 * int(out[0])


@triton.jit
def credited(x, ring, filled, credit, out, total, heap, SLOTS: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr):
    at, other = tl.arange(0, N), 1 - my_rank(heap)
    if my_rank(heap) == 0:
        for sent in range(total):
            if sent >= SLOTS + EXTRA:
                while tl.atomic_add(credit, 0, sem="acquire", scope="sys") == 0:
                    pass
                tl.atomic_add(credit, -1, sem="relaxed", scope="sys")
            tl.store(remote(ring, other, heap) + sent % SLOTS * N + at, tl.load(x + sent * N + at))  # into the ring
            tl.debug_barrier()
            tl.atomic_add(remote(filled, other, heap), 1, sem="release", scope="sys")
    else:
        for taken in range(total):
            while tl.atomic_add(filled, 0, sem="acquire", scope="sys") <= taken:
                pass
            tl.store(out + taken * N + at, tl.load(ring + taken % SLOTS * N + at))
            tl.debug_barrier()
            tl.atomic_add(remote(credit, other, heap), 1, sem="release", scope="sys")  # a credit back


def ring(heap, extra=0):
    x, buffer, out = torch.arange(6.0 * N), heap.empty(2 * N, name="ring"), torch.zeros(6 * N)
    filled, credit = (heap.zeros(1, torch.int32, name=n) for n in ("filled", "credit"))
    credited[(1,)](x, buffer.local, filled.local, credit.local, out, 6, heap.context, 2, N, extra)
    return lambda: heap.rank == 0 or torch.equal(out, x)


@right(ranks=2)
def ring_of_credits(heap):
    return ring(heap)


@triton.jit
def mailbox(x, box, full, out, total, heap, N: tl.constexpr):
    """One word: the sender sets it, the receiver sets it back at its own rank, and the sender polls it there."""
    at = tl.arange(0, N)
    if my_rank(heap) == 0:
        word = remote(full, 1, heap)
        for number in range(total):
            while tl.atomic_cas(word, 0, 0, sem="acquire", scope="sys") != 0:
                pass
            tl.store(remote(box, 1, heap) + at, tl.load(x + number * N + at))
            tl.debug_barrier()
            tl.atomic_xchg(word, 1, sem="release", scope="sys")
    else:
        for number in range(total):
            while tl.atomic_cas(full, 1, 1, sem="acquire", scope="sys") != 1:
                pass
            tl.store(out + number * N + at, tl.load(box + at))
            tl.debug_barrier()
            tl.atomic_xchg(full, 0, sem="release", scope="sys")


@right(ranks=2)
def mailbox_of_one_word(heap):
    x, box, out = torch.arange(4.0 * N), heap.empty(N, name="box"), torch.zeros(4 * N)
    full = heap.zeros(1, torch.int32, name="full")
    mailbox[(1,)](x, box.local, full.local, out, 4, heap.context, N)
    return lambda: heap.rank == 0 or torch.equal(out, x)


@triton.jit
def gathered(x, slots, flags, epochs, out, heap, N: tl.constexpr):
    """All-gather in two halves by the parity of an epoch in memory; the flags wrap."""
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    epoch = next_epoch(epochs)
    half = (epoch & 1) * ranks * N
    for peer in range(ranks):
        tl.store(remote(slots, peer, heap) + half + me * N + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(remote(flags, peer, heap) + me, epoch, sem="release", scope="sys")
    for peer in range(ranks):
        while tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys") - epoch < 0:
            pass
        tl.store(out + peer * N + at, tl.load(slots + half + peer * N + at))


@right(replays=3, schedules=5)
def all_gather_by_parity(heap):
    x, slots = torch.arange(N) + 10.0 * heap.rank, heap.empty(2 * heap.size * N, name="slots")
    flags, epochs, out = heap.signals(heap.size, "flags"), heap.signals(1, "epochs"), torch.zeros(heap.size * N)
    gathered[(1,)](x, slots.local, flags.local, epochs.local, out, heap.context, N)
    return lambda: torch.equal(out, everybodys(heap))


@triton.jit
def down_the_tree(x, flag, heap, N: tl.constexpr):
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    if me > 0:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") == 0:
            pass
        fence()
    for child in tl.static_range(1, 3):
        peer = 2 * me + child
        if peer < ranks:
            tl.store(remote(x, peer, heap) + at, tl.load(x + at))
            fence()
            tl.atomic_or(remote(flag, peer, heap), 1, sem="relaxed", scope="sys")


@right(ranks=(2, 5), schedules=5)
def tree_broadcast_with_fences(heap):
    x, flag = heap.zeros(N, name="x"), heap.zeros(1, torch.int32, name="flag")
    if heap.rank == 0:
        x.local.fill_(7.0)
    down_the_tree[(1,)](x.local, flag.local, heap.context, N)
    return lambda: torch.equal(x.local, torch.full((N,), 7.0))


@triton.jit
def rounds_of_log(x, slots, flags, out, heap, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Dissemination barrier, after which what everybody wrote is read at its owner."""
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    tl.store(slots + at, tl.load(x + at))
    for number in tl.static_range(ROUNDS):
        tl.debug_barrier()
        tl.atomic_add(remote(flags + number, (me + (1 << number)) % ranks, heap), 1, sem="release", scope="sys")
        while tl.atomic_add(flags + number, 0, sem="acquire", scope="sys") < 1:
            pass
    for peer in range(ranks):
        tl.store(out + peer * N + at, tl.load(remote(slots, peer, heap) + at))


@right(ranks=(3, 4), schedules=5)
def dissemination_barrier(heap):
    x, slots, out = torch.arange(N) + 10.0 * heap.rank, heap.empty(N, name="slots"), torch.zeros(heap.size * N)
    rounds_of_log[(1,)](x, slots.local, heap.zeros(2, torch.int32, name="flags").local, out, heap.context, N, 2)
    return lambda: torch.equal(out, everybodys(heap))


@triton.jit
def told_on(x, flag, out, heap, N: tl.constexpr):
    """Everybody reads what rank 0 wrote, told only by the rank before."""
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    if me == 0:
        tl.store(x + at, at + 1.0)
        tl.debug_barrier()
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < me:
            pass
    if me + 1 < ranks:
        tl.atomic_xchg(remote(flag, me + 1, heap), me + 1, sem="release", scope="sys")
    tl.store(out + at, tl.load(remote(x, 0, heap) + at))


@right(ranks=(2, 4), schedules=5)
def hearsay(heap):
    x, flag, out = heap.empty(N, name="x"), heap.zeros(1, torch.int32, name="flag"), torch.zeros(N)
    told_on[(1,)](x.local, flag.local, out, heap.context, N)
    return lambda: torch.equal(out, torch.arange(N) + 1.0)


@triton.jit
def once(state, table, out, N: tl.constexpr):
    at = tl.arange(0, N)
    if tl.atomic_cas(state, 0, 1, sem="relaxed", scope="gpu") == 0:
        tl.store(table + at, at * 3)
        tl.debug_barrier()
        tl.atomic_xchg(state, 2, sem="release", scope="gpu")
    while tl.atomic_add(state, 0, sem="acquire", scope="gpu") != 2:
        pass
    tl.store(out + tl.program_id(0) * N + at, tl.load(table + at))


@right(ranks=1)
def made_once(heap):
    state, table = torch.zeros(1, dtype=torch.int32), heap.empty(N, torch.int32, name="table")
    out = torch.zeros(3 * N, dtype=torch.int32)
    once[(3,)](state, table.local, out, N)
    return lambda: torch.equal(out, (3 * torch.arange(N)).repeat(3).int())


@triton.jit
def packed(words, out, heap):
    """A number travels in the upper half of its own 64-bit flag."""
    me, ranks = my_rank(heap), world(heap)
    number = ((me + 5).to(tl.int64) << 32) | 1
    tl.atomic_xchg(remote(words, (me + 1) % ranks, heap), number, sem="relaxed", scope="sys")
    have = tl.atomic_add(words, 0, sem="relaxed", scope="sys")
    while (have & 1) == 0:
        have = tl.atomic_add(words, 0, sem="relaxed", scope="sys")
    tl.store(out, (have >> 32).to(tl.int32))


@right()
def number_inside_its_flag(heap):
    words, out = heap.zeros(1, torch.int64, name="words"), torch.zeros(1, dtype=torch.int32)
    packed[(1,)](words.local, out, heap.context)
    return lambda: int(out) == (heap.rank - 1) % heap.size + 5


@triton.jit
def levels(x, inbox, count, flag, out, heap, N: tl.constexpr, SCOPE: tl.constexpr):
    """Programs count at the scope of their GPU; the last one signals the peer for all of them."""
    at, program, programs = tl.arange(0, N), tl.program_id(0), tl.num_programs(0)
    after = (my_rank(heap) + 1) % world(heap)
    tl.store(remote(inbox, after, heap) + program * N + at, tl.load(x + program * N + at))
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope=SCOPE) == programs - 1:  # counts
        tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            pass
        for other in range(programs):
            tl.store(out + other * N + at, tl.load(inbox + other * N + at))


def hierarchy(heap, scope):
    x, inbox, out = torch.arange(2 * N) + 10.0 * heap.rank, heap.empty(2 * N, name="inbox"), torch.zeros(2 * N)
    count, flag = torch.zeros(1, dtype=torch.int32), heap.zeros(1, torch.int32, name="flag")
    levels[(2,)](x, inbox.local, count, flag.local, out, heap.context, N, scope)
    return lambda: torch.equal(out, torch.arange(2 * N) + 10.0 * ((heap.rank - 1) % heap.size))


@right()
def last_program_signals_for_all(heap):
    return hierarchy(heap, "gpu")


@triton.jit
def bits(x, slots, mask, out, heap, ROUNDS: tl.constexpr, N: tl.constexpr):
    """Everybody sets a bit of its own; who has seen all bits takes them away again, then tells in the upper bits."""
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    everybody = (1 << ranks) - 1
    for number in range(ROUNDS):
        for peer in range(ranks):
            tl.store(remote(slots, peer, heap) + me * N + at, tl.load(x + at) + number)
            tl.debug_barrier()
            tl.atomic_or(remote(mask, peer, heap), 1 << me, sem="release", scope="sys")
        while (tl.atomic_or(mask, 0, sem="acquire", scope="sys") & everybody) != everybody:
            pass
        for peer in range(ranks):
            tl.store(out + peer * N + at, tl.load(slots + peer * N + at))
        tl.debug_barrier()
        tl.atomic_and(mask, ~everybody, sem="relaxed", scope="sys")
        for peer in range(ranks):
            tl.atomic_or(remote(mask + 1, peer, heap), 1 << me, sem="release", scope="sys")
        while tl.atomic_or(mask + 1, 0, sem="acquire", scope="sys") != everybody:
            pass
        tl.debug_barrier()
        tl.atomic_and(mask + 1, 0, sem="relaxed", scope="sys")
        for peer in range(ranks):
            tl.atomic_or(remote(mask + 2, peer, heap), 1 << me, sem="release", scope="sys")
        while tl.atomic_or(mask + 2, 0, sem="acquire", scope="sys") != everybody:
            pass
        tl.debug_barrier()
        tl.atomic_and(mask + 2, 0, sem="relaxed", scope="sys")


@right(schedules=5)
def bits_of_a_mask(heap):
    x, out = torch.arange(N) + 10.0 * heap.rank, torch.zeros(heap.size * N)
    slots = heap.empty(heap.size * N, name="slots")
    bits[(1,)](x, slots.local, heap.zeros(3, torch.int32, name="mask").local, out, heap.context, 2, N)
    return lambda: torch.equal(out, everybodys(heap) + 1)


@triton.jit
def by_max(x, inbox, flag, out, heap, ROUNDS: tl.constexpr, N: tl.constexpr):
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    after, before = (me + 1) % ranks, (me + ranks - 1) % ranks
    for number in range(1, ROUNDS + 1):
        tl.store(remote(inbox, after, heap) + at, tl.load(x + at) + number)
        tl.debug_barrier()
        tl.atomic_max(remote(flag, after, heap), number, sem="release", scope="sys")
        while tl.atomic_max(flag, 0, sem="acq_rel", scope="sys") < number:
            pass
        tl.store(out + at, tl.load(inbox + at))
        tl.debug_barrier()
        tl.atomic_max(remote(flag + 1, before, heap), number, sem="release", scope="sys")
        while tl.atomic_max(flag + 1, number - 1, sem="acq_rel", scope="sys") < number:
            pass


@right()
def signals_by_max(heap):
    x, inbox, out = torch.arange(N) + 10.0 * heap.rank, heap.empty(N, name="inbox"), torch.zeros(N)
    by_max[(1,)](x, inbox.local, heap.zeros(2, torch.int32, name="flag").local, out, heap.context, 3, N)
    return lambda: torch.equal(out, torch.arange(N) + 10.0 * ((heap.rank - 1) % heap.size) + 3)


@triton.jit
def swapped(x, inbox, flag, out, value, heap, KIND: tl.constexpr, N: tl.constexpr):
    """Signals by compare and swap, of words whose highest bit is set, or which are no integers."""
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    after = (me + 1) % ranks
    word = flag.to(tl.pointer_type(KIND))
    zero, want = tl.full((), 0, KIND), tl.load(value.to(tl.pointer_type(KIND)))
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_cas(remote(word, after, heap), want, zero, sem="release", scope="sys")  # is `want` at first
    while tl.atomic_cas(word, zero, zero, sem="acquire", scope="sys") != zero:
        pass
    tl.store(out + at, tl.load(inbox + at))


def swap(heap, kind, number, seen_as):
    x, inbox, out = torch.arange(N) + 10.0 * heap.rank, heap.empty(N, name="inbox"), torch.zeros(N)
    flag, value = heap.zeros(1, kind, name="flag"), torch.tensor([number], dtype=kind)
    flag.local.fill_(number)
    heap.barrier()
    swapped[(1,)](x, inbox.local, flag.local, out, value, heap.context, seen_as, N)
    return lambda: torch.equal(out, torch.arange(N) + 10.0 * ((heap.rank - 1) % heap.size))


@right()
def swaps_of_negative_words(heap):
    return swap(heap, torch.int32, -7, tl.int32)


@right()
def swaps_of_unsigned_words(heap):
    return swap(heap, torch.int32, -7, tl.uint32)


@right()
def swaps_of_long_unsigned_words(heap):
    return swap(heap, torch.int64, -7, tl.uint64)


@right()
def swaps_of_words_that_differ_beyond_32_bits(heap):
    return swap(heap, torch.int64, 1 << 40, tl.int64)


@right()
def swaps_of_floats(heap):
    return swap(heap, torch.float32, 2.5, tl.float32)


@triton.jit
def swaps_lanes(words, out, SWAPPED: tl.constexpr, N: tl.constexpr):
    """Program 0 swaps the lanes that are 0, program 1 reads one."""
    lanes = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.atomic_cas(words + lanes, lanes * 0, lanes + 7, sem="relaxed", scope="gpu")  # swaps some
    else:
        tl.store(out, tl.load(words + SWAPPED))


def some_swapped(heap, read):
    words, out = torch.tensor([1, 1, 0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    swaps_lanes[(2,)](words, out, read, N)
    return lambda: (words.tolist(), int(out)) == ([1, 1, 9, 1], 1)


@right(ranks=1)
def lanes_that_are_not_swapped(heap):
    return some_swapped(heap, 1)


@triton.jit
def looks_at_one_lane(words, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(out, tl.sum(tl.atomic_add(words + lanes, lanes, mask=lanes == 0, sem="relaxed", scope="gpu"), 0))
    else:
        tl.store(out + 1, tl.load(words))


@right(ranks=1)
def nothing_added_to_the_only_lane(heap):
    words, out = torch.full((N,), 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    looks_at_one_lane[(2,)](words, out, N)
    return lambda: out.tolist() == [5, 5]


@triton.jit
def of_three_dimensions(x, flags, inbox, out, heap, N: tl.constexpr):
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    at, after = program * N + tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    signal(flags + program, 1, after, heap)
    wait_until(flags + program, 1, after, heap)
    tl.store(out + at, tl.load(inbox + at))


@right(ranks=2, schedules=3)
def programs_in_three_dimensions(heap):
    x, inbox, out = torch.arange(8 * N) + 100.0 * heap.rank, heap.empty(8 * N, name="inbox"), torch.zeros(8 * N)
    of_three_dimensions[(2, 2, 2)](x, heap.zeros(8, torch.int32, name="flags").local, inbox.local, out, heap.context, N)
    return lambda: torch.equal(out, torch.arange(8 * N) + 100.0 * ((heap.rank - 1) % heap.size))


@triton.jit
def readers_and_a_writer(lock, x, out, heap, N: tl.constexpr):
    at, there, word = tl.arange(0, N), remote(x, 0, heap), remote(lock, 0, heap)
    if my_rank(heap) == 0:
        while tl.atomic_cas(word, 0, -1, sem="acquire", scope="sys") != 0:
            pass
        tl.store(there + at, tl.zeros([N], tl.float32) + 5.0)
        tl.debug_barrier()
        tl.atomic_xchg(word, 0, sem="release", scope="sys")
    else:
        have = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
        while (have < 0) or (tl.atomic_cas(word, have, have + 1, sem="acquire", scope="sys") != have):
            have = tl.atomic_add(word, 0, sem="relaxed", scope="sys")
        tl.store(out + at, tl.load(there + at))
        tl.debug_barrier()
        tl.atomic_add(word, -1, sem="release", scope="sys")


@right(ranks=3)
def lock_of_readers(heap):
    lock, x, out = heap.zeros(1, torch.int32, name="lock"), heap.zeros(N, name="x"), torch.zeros(N)
    readers_and_a_writer[(1,)](lock.local, x.local, out, heap.context, N)
    return lambda: len(set(out.tolist())) == 1


@right(ranks=2, schedules=5)
def graph_with_epochs(heap):
    x, slots = torch.arange(N) + 10.0 * heap.rank, heap.empty(2 * heap.size * N, name="slots")
    flags, epochs, out = heap.signals(heap.size, "flags"), heap.signals(1, "epochs"), torch.zeros(heap.size * N)
    again = heap.graph(lambda: gathered[(1,)](x, slots.local, flags.local, epochs.local, out, heap.context, N))
    for _ in range(3):
        again()
    return lambda: torch.equal(out, everybodys(heap))
