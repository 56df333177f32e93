"""The same kinds of protocols with one fault each: the kind of the report, its words, and the line it must name."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from small_kernels import N
from styles_right import hierarchy, ring, some_swapped

from interlace.symmetric.device import fence, my_rank, next_epoch, put, remote, signal, wait_until, world

WRONG = {}


def wrong(kind, words, line="", **options):
    def register(launch):
        WRONG[launch.__name__] = (launch, kind, words, line, options)
        return launch

    return register


def exchange(heap, kernel, *more, calls=1):
    x, out = torch.arange(N) + 10.0 * heap.rank, torch.zeros(N)
    inbox, flag = heap.zeros(N, name="inbox"), heap.zeros(2, torch.int32, name="flag")
    for n in range(1, calls + 1):
        kernel[(1,)](x, inbox.local, flag.local, out, n, heap.context, N, *more)


@triton.jit
def fenced_late(x, inbox, flag, out, n, heap, N: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), n, sem="relaxed", scope="sys")  # LATE FENCE
    fence()
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < n:
        pass
    tl.store(out + at, tl.load(inbox + at))


@wrong("wrong order", "the signal at line .* has no release order", "# LATE FENCE")
def late_fence(heap):
    exchange(heap, fenced_late)


@triton.jit
def fence_before_data(x, inbox, flag, out, n, heap, N: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    fence()
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))  # AFTER THE FENCE
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), n, sem="relaxed", scope="sys")  # EARLY FENCE
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < n:
        pass
    tl.store(out + at, tl.load(inbox + at))


@wrong("wrong order", "covers only what came before the fence at line", "# EARLY FENCE")
def early_fence(heap):
    exchange(heap, fence_before_data)


@triton.jit
def early_signal(x, inbox, flag, out, n, heap, N: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    signal(flag, n, after, heap)  # EARLY SIGNAL
    put(inbox, x, N, after, heap, N)
    wait_until(flag, n, after, heap)
    tl.store(out + at, tl.load(inbox + at))


@wrong("wrong order", "signals before the element is written", "put(inbox, x, N, after, heap, N)")
def signal_before_put(heap):
    exchange(heap, early_signal)


@triton.jit
def resets(x, inbox, flag, out, n, heap, N: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    tl.atomic_xchg(flag, 0, sem="relaxed", scope="sys")  # TOO LATE A RESET
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@wrong("lost signal", r"\(1 to 0\) undoes the signal it waits for", "# TOO LATE A RESET", schedules=20)
def reset_at_the_beginning(heap):
    exchange(heap, resets)


@triton.jit
def resets_too_early(x, inbox, flag, out, n, heap, N: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    before = (my_rank(heap) + world(heap) - 1) % world(heap)
    while tl.atomic_add(flag + 1, 0, sem="acquire", scope="sys") != 0:
        pass
    tl.atomic_xchg(flag + 1, 1, sem="relaxed", scope="sys")
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))  # STORE AGAIN
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.atomic_xchg(flag, 0, sem="relaxed", scope="sys")
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag + 1, before, heap), 0, sem="release", scope="sys")  # says free
    tl.store(out + at, tl.load(inbox + at))  # READ LATE


@wrong("wrong order", "signals before the element is read", "# READ LATE", schedules=40)
def flag_reset_before_the_read(heap):
    exchange(heap, resets_too_early, calls=2)


@wrong("wrong scope", "scope", "# counts")
def counter_at_cta_scope(heap):
    return hierarchy(heap, "cta")


@triton.jit
def relaxed_poll(x, inbox, flag, out, n, heap, N: tl.constexpr, LATE: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    signal(flag, n, after, heap)
    while tl.atomic_or(flag, 0, sem="relaxed", scope="sys") < n:  # RELAXED POLL
        pass
    v = tl.load(inbox + at)
    if LATE:
        fence()
    tl.store(out + at, v)


@wrong("wrong order", "the wait at line .* has no acquire", "# RELAXED POLL")
def poll_relaxed(heap):
    exchange(heap, relaxed_poll, False)


@wrong("wrong order", "the wait at line .* has no acquire", "# RELAXED POLL")
def poll_relaxed_fence_after_load(heap):
    exchange(heap, relaxed_poll, True)


@triton.jit
def two_add(flag, want, heap):
    signal(flag, 1, 0, heap, True)  # ADDS
    if my_rank(heap) == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != want:  # WANTS ONE
            pass


@wrong("lost signal", "goes past the 1 it waits for", "# WANTS ONE", ranks=2)
def adds_where_it_should_set(heap):
    two_add[(1,)](heap.zeros(1, torch.int32, name="flag").local, 1, heap.context)


@triton.jit
def runs_ahead(flag, out, heap):
    if my_rank(heap) == 0:
        for number in range(1, 4):
            signal(flag, number, 1, heap)  # RUNS AHEAD
    else:
        for number in range(1, 4):
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != number:  # WANTS EACH
                pass
            tl.store(out, number)


@wrong("lost signal", r"goes past the \d it waits for", "# RUNS AHEAD", ranks=2)
def equal_where_it_should_be_at_least(heap):
    runs_ahead[(1,)](heap.zeros(1, torch.int32, name="flag").local, torch.zeros(1, dtype=torch.int32), heap.context)


@triton.jit
def naive_wrap(x, inbox, flag, out, n, epochs, heap, N: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    before = (my_rank(heap) + world(heap) - 1) % world(heap)
    epoch = next_epoch(epochs)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    signal(flag, epoch, after, heap)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:  # NAIVE
        pass
    tl.store(out + at, tl.load(inbox + at))
    signal(flag + 1, epoch, before, heap)
    wait_until(flag + 1, epoch, after, heap)


@wrong("reused signal", "as numbers that do not wrap", "# NAIVE", replays=3, schedules=7)
def compares_without_regard_to_wrap(heap):
    x, inbox, flag, out = torch.arange(N) + 1.0, heap.zeros(N, name="inbox"), heap.signals(2, "flag"), torch.zeros(N)
    naive_wrap[(1,)](x, inbox.local, flag.local, out, 1, heap.signals(1, "epochs").local, heap.context, N)


@wrong("buffer reused", "may still", "# into the ring", ranks=2)
def ring_with_a_credit_too_many(heap):
    return ring(heap, 1)


@triton.jit
def ticket_plain(tickets, total, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    turns, there = remote(tickets, 0, heap), remote(total, 0, heap)
    mine = tl.atomic_add(turns, 1, sem="relaxed", scope="sys")
    while tl.atomic_add(turns + 1, 0, sem="relaxed", scope="sys") != mine:  # TICKET
        pass
    tl.store(there + at, tl.load(there + at) + 1.0)
    tl.debug_barrier()
    tl.atomic_add(turns + 1, 1, sem="release", scope="sys")


@wrong("wrong order", "the wait at line .* has no acquire", "# TICKET")
def ticket_lock_relaxed(heap):
    tickets, total = heap.zeros(2, torch.int32, name="tickets"), heap.zeros(N, name="total")
    ticket_plain[(2,)](tickets.local, total.local, heap.context, N)


@triton.jit
def seq_plain(words, data, out, heap):
    there, d = remote(words, 0, heap), remote(data, 0, heap)
    if my_rank(heap) == 0:
        tl.atomic_xchg(there, 1, sem="relaxed", scope="sys")
        fence()
        tl.store(d, 5)  # PLAIN DATA
        tl.atomic_xchg(there, 2, sem="release", scope="sys")
    else:
        v, a = 1, 0
        one = 0
        while (v != a) | (v % 2 == 1):
            v = tl.atomic_add(there, 0, sem="acquire", scope="sys")
            one = tl.load(d)
            fence()
            a = tl.atomic_add(there, 0, sem="relaxed", scope="sys")
        tl.store(out, one)


@wrong("wrong order", "no release order", "# PLAIN DATA")
def seqlock_of_plain_data(heap):
    words, data = (heap.zeros(1, torch.int32, name=name).local for name in ("words", "data"))
    seq_plain[(1,)](words, data, torch.zeros(1, dtype=torch.int32), heap.context)


@triton.jit
def tree_early(x, flag, heap, N: tl.constexpr):
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    if me > 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            pass
    for child in tl.static_range(1, 3):
        peer = 2 * me + child
        if peer < ranks:
            signal(flag, 1, peer, heap)
            tl.store(remote(x, peer, heap) + at, tl.load(x + at))  # AFTER THE CHILD IS TOLD
    tl.store(x + N + at, tl.load(x + at))


@wrong("wrong order", "signals before the element is written", "# AFTER THE CHILD IS TOLD")
def tree_tells_first(heap):
    x, flag = heap.zeros(2 * N, name="x"), heap.zeros(1, torch.int32, name="flag")
    tree_early[(1,)](x.local, flag.local, heap.context, N)


@triton.jit
def meet_wrong(count, sense, heap):
    before = tl.atomic_add(sense, 0, sem="relaxed", scope="sys")
    tl.debug_barrier()
    if tl.atomic_add(remote(count, 0, heap), 1, sem="acq_rel", scope="sys") == world(heap) - 1:
        for peer in range(world(heap)):
            tl.atomic_xor(remote(sense, peer, heap), 1, sem="release", scope="sys")
        tl.atomic_xchg(remote(count, 0, heap), 0, sem="relaxed", scope="sys")  # RESET AFTER THE TURN
    while tl.atomic_add(sense, 0, sem="acquire", scope="sys") == before:
        pass
    tl.debug_barrier()


@triton.jit
def meets_twice(count, sense, heap):
    for _ in range(3):
        meet_wrong(count, sense, heap)


@wrong("deadlock", r"\(3 to 0\) replaces the signal of line", "", schedules=60)
def sense_barrier_resets_late(heap):
    count, sense = (heap.zeros(1, torch.int32, name=name).local for name in ("count", "sense"))
    meets_twice[(1,)](count, sense, heap.context)


@triton.jit
def parity_of_the_host(x, slots, flags, out, number, heap, N: tl.constexpr):
    me, ranks, at = my_rank(heap), world(heap), tl.arange(0, N)
    half = number % 2 * ranks * N
    for peer in range(ranks):
        tl.store(remote(slots, peer, heap) + half + me * N + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_add(remote(flags, peer, heap) + me, 1, sem="release", scope="sys")
    for peer in range(ranks):
        while tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys") < number:  # SAME NUMBERS
            pass
        tl.store(out + peer * N + at, tl.load(slots + half + peer * N + at))


@wrong("reused signal", "stale flag, the signal of launch 2", "# SAME NUMBERS", replays=3, ranks=2)
def graph_with_the_same_scalars(heap):
    x, slots = torch.arange(N) + 10.0 * heap.rank, heap.empty(2 * heap.size * N, name="slots")
    flags, out = heap.zeros(heap.size, torch.int32, name="flags"), torch.zeros(heap.size * N)
    for number in (1, 2):
        parity_of_the_host[(1,)](x, slots.local, flags.local, out, number, heap.context, N)


@triton.jit
def min_reset(flag, heap):
    other = 1 - my_rank(heap)
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, other, heap), 1, sem="release", scope="sys")
    tl.atomic_min(flag, 0, sem="relaxed", scope="sys")  # LOSES
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass


@wrong("lost signal", r"\(1 to 0\) undoes the signal it waits for", "# LOSES", ranks=2)
def reset_by_minimum(heap):
    min_reset[(1,)](heap.zeros(1, torch.int32, name="flag").local, heap.context)


@triton.jit
def min_races(word, out):
    if tl.program_id(0) == 0:
        tl.atomic_min(word, 0, sem="relaxed", scope="gpu")  # A WRITE
    else:
        tl.store(out, tl.load(word))


@wrong(("data race", "wrong order"), "reads it without waiting|plain load", "# A WRITE", ranks=1)
def minimum_is_a_write(heap):
    word = heap.zeros(1, torch.int32, name="word")
    word.local.fill_(5)
    min_races[(2,)](word.local, torch.zeros(1, dtype=torch.int32))


@triton.jit
def swaps_race(word, out, N: tl.constexpr):
    if tl.program_id(0) == 0:
        zero = tl.full((), 2.0, tl.float32)
        tl.atomic_cas(word, zero, zero + 1, sem="relaxed", scope="gpu")  # SWAPS
    else:
        tl.store(out, tl.load(word))


@wrong(("data race", "wrong order"), "reads it without waiting|plain load", "# SWAPS", ranks=1)
def swap_of_floats_is_a_write(heap):
    word = heap.zeros(1, name="word")
    word.local.fill_(2.0)
    swaps_race[(2,)](word.local, torch.zeros(1), N)


@wrong(("data race", "wrong order"), r"words\[2\]", "# swaps some", ranks=1)
def some_lanes_of_a_swap(heap):
    some_swapped(heap, 2)


@triton.jit
def both_phases(x, inbox, flag, out, n, heap, N: tl.constexpr):
    """The same word for 'it is there' and 'it was read'."""
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    before = (my_rank(heap) + world(heap) - 1) % world(heap)
    for number in range(2):
        tl.store(remote(inbox, after, heap) + at, tl.load(x + at) + number)  # ONE WORD
        signal(flag, 1, after, heap, True)
        wait_until(flag, 2 * number + 1, before, heap)
        tl.store(out + at, tl.load(inbox + at))
        signal(flag, 1, before, heap, True)
        wait_until(flag, 2 * number + 2, after, heap)


@wrong("data race", "reads it without waiting", "# ONE WORD", ranks=3)
def one_word_for_two_phases(heap):
    exchange(heap, both_phases)


@triton.jit
def host_zeroes(flag, heap):
    signal(flag, 1, (my_rank(heap) + 1) % world(heap), heap)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass


@wrong("lost signal", "may wipe|replaces|undoes", "# WIPES")
def zeroed_between_launches(heap):
    flag = heap.zeros(1, torch.int32, name="flag")
    for _ in range(2):
        host_zeroes[(1,)](flag.local, heap.context)
        flag.local.zero_()  # WIPES


@triton.jit
def get_early(x, flag, out, heap, N: tl.constexpr):
    at, after = tl.arange(0, N), (my_rank(heap) + 1) % world(heap)
    tl.store(x + at, at + 1.0)  # THE PUT
    tl.store(out + at, tl.load(remote(x, after, heap) + at))  # THE GET
    signal(flag, 1, after, heap)
    wait_until(flag, 1, after, heap)


@wrong("data race", "reads it without waiting", "# THE GET")
def get_before_the_wait(heap):
    x, flag = heap.empty(N, name="x"), heap.zeros(1, torch.int32, name="flag")
    get_early[(1,)](x.local, flag.local, torch.zeros(N), heap.context, N)
