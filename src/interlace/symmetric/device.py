"""One-sided communication inside Triton kernels, in OpenSHMEM's words.

Every primitive takes `heap`, the pointer `SymmetricHeap.context`, and works alike on GPUs and in Triton's interpreter
(TRITON_INTERPRET=1, ranks as processes).  Equal, in plain operations, to stores and loads through a peer's pointer
plus atomics whose order and scope are written out:

    put, get          loads and stores; complete for nobody else until a signal, `fence` or `quiet`
    signal            barrier of the program's threads, then one release at system scope
    wait_until        one thread polls, then reads with acquire at system scope, then all threads go on; `>=`, safe at
                      wrap-around
    fence             everything before it, by any thread of the program, comes before everything after it
    quiet             fence, and descriptor (TMA) stores are complete
    flush_descriptors, admit_descriptors
                      the two proxy fences descriptors need: after their stores, and between a wait and their loads

Why a barrier before each release: a block's store is made by all threads, a scalar atomic by one, and Triton puts no
barrier between them.  Why `atomic_add(flag, 0)`: Triton compiles it to a plain acquire load whose value is
broadcast to the program, while an `atomic_cas` poll costs NVLink traffic, and a loop over `tl.load` orders nothing.

What a wait may not do while others signal: with every program signalling the peer's word and waiting for its own, on
two H200s, a round took 3.7, 5.7, 11.6 and 124 us for 1, 8, 32 and 128 programs when a wait looked at the clock and at
the host's abort word (over PCIe) as soon as its first poll failed; 3.9, 5.2, 5.7 and 5.8 where one thread polls by
itself for up to 50 us before that (`_linger`); 2.5, 2.4, 2.6 and 2.8 with a store besides, in place of an exchange,
and words a line apart, which those of the fused kernels are not.

No wait is for ever: after the heap's timeout, or when the host asks, a wait writes a record (kernel, rank, program,
peer, flag, want, have, elapsed), returns False, and every later wait of the rank leaves at once; the host raises the
record as `Hang` (`SymmetricHeap.check`).  Times are compared through one word of memory (`_now`), so that all threads
of a program see the same time and leave together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from interlace.symmetric.ptx import LINGER, STORE_RELEASE
from interlace.symmetric.record import DISTANCES, name_word

_DISTANCES: tl.constexpr = tl.constexpr(DISTANCES)
_POLLS: tl.constexpr = tl.constexpr(32)  # between two looks at the clock and at the abort word
_LINGER: tl.constexpr = tl.constexpr(LINGER)
_STORE_RELEASE: tl.constexpr = tl.constexpr(STORE_RELEASE)
_name_word = triton.constexpr_function(name_word)

if triton.knobs.runtime.interpret:
    from interlace.symmetric import interpreter

    interpreter.install()


@triton.jit
def my_rank(heap):
    """This rank's number, int32."""
    return tl.load(heap).to(tl.int32)


@triton.jit
def world(heap):
    """How many ranks there are, int32."""
    return tl.load(heap + 1).to(tl.int32)


@triton.jit
def remote(pointer, peer, heap):
    """Where `pointer`, one or a block of addresses in this rank's heap, lies at `peer`.  Alignment is kept."""
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    return pointer + tl.multiple_of(tl.load(heap + _DISTANCES + peer) // SIZE, 16)


@triton.jit
def _copy(target, source, count, BLOCK: tl.constexpr):
    """Whole blocks without a mask, since a mask whose bound is not known to be aligned makes accesses narrow."""
    lanes = tl.arange(0, BLOCK)
    whole = count // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tl.store(target + start + lanes, tl.load(source + start + lanes))
    if whole < count:
        at = whole + lanes
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def put(target, source, count, peer, heap, BLOCK: tl.constexpr):
    """Copies `count` elements from this rank's `source` to `peer`'s `target`, both addresses of this rank."""
    _copy(remote(target, peer, heap), source, count, BLOCK)


@triton.jit
def get(target, source, count, peer, heap, BLOCK: tl.constexpr):
    """Copies `count` elements from `peer`'s `source` to this rank's `target`, both addresses of this rank."""
    _copy(target, remote(source, peer, heap), count, BLOCK)


@triton.jit
def signal(flag, value, peer, heap, ADD: tl.constexpr = False):
    """Sets `peer`'s word `flag` (int32) to `value`, or adds to it, after all this program has read and written."""
    there = remote(flag, peer, heap)
    tl.debug_barrier()
    if ADD:
        tl.atomic_add(there, value, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(_STORE_RELEASE, "=r,l,r", [there, value], tl.int32, is_pure=False, pack=1)


@triton.jit
def put_signal(target, source, count, flag, value, peer, heap, BLOCK: tl.constexpr, ADD: tl.constexpr = False):
    """`put`, then `signal`: who has waited for the flag may read the elements."""
    put(target, source, count, peer, heap, BLOCK)
    signal(flag, value, peer, heap, ADD)


@triton.jit
def wait_until(flag, value, peer, heap, KERNEL: tl.constexpr = ""):
    """Returns when this rank's word `flag` has reached `value`, which `peer` signals; False if it gave up.

    What the signaller wrote before may then be read.  KERNEL (16 characters) names the kernel in a record.
    """
    want = tl.cast(value, tl.int32)
    have = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if have - want < 0:
        have = _spin(flag, want, peer, heap, KERNEL)
    tl.debug_barrier()
    return have - want >= 0


@triton.jit
def fence():
    """What this program has read and written comes before what it writes later, for every rank."""
    tl.debug_barrier()
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def flush_descriptors():
    """Descriptor (TMA) stores of this program are complete, and a signal may publish them.

    Triton itself waits only until their source may be overwritten.
    """
    ptx: tl.constexpr = "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(ptx, "=r", [], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def admit_descriptors():
    """After a wait: descriptor (TMA) loads see what ordinary loads would see now."""
    tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def quiet():
    """All puts and descriptor stores of this program are complete for every rank."""
    flush_descriptors()
    fence()


@triton.jit
def barrier(flags, value, heap, KERNEL: tl.constexpr = ""):
    """Returns when the same program of every rank has come here.  flags: `world` words of this rank, one a peer."""
    me, ranks = my_rank(heap), world(heap)
    for step in range(1, ranks):
        signal(flags + me, value, (me + step) % ranks, heap)
    for step in range(1, ranks):
        peer = (me + ranks - step) % ranks
        wait_until(flags + peer, value, peer, heap, KERNEL)


@triton.jit
def next_epoch(epochs):
    """The number of this call, from this program's own word of `epochs`: it lives in memory, so graphs may replay it.

    Call it once in a program.  Every launch over the same epochs has the same grid.
    """
    word = epochs + tl.program_id(0)
    epoch = tl.load(word) + 1
    tl.debug_barrier()
    tl.store(word, epoch)
    return epoch


@triton.jit
def _now(clock):
    """The newest time in nanoseconds that a spinner of this rank had read before: one number for all threads."""
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1)
    return tl.atomic_max(clock, now, sem="relaxed", scope="gpu")


@triton.jit
def _linger(flag, value):
    """Returns when the word may have reached `value`, or after some 50 us; only a poll tells."""
    tl.inline_asm_elementwise(_LINGER, "=r,l,r", [flag, value], tl.int32, is_pure=False, pack=1)


@triton.jit
def _spin(flag, value, peer, heap, KERNEL: tl.constexpr):
    _linger(flag, value)
    have = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if have - value < 0:
        have = _spin_on(flag, value, peer, heap, KERNEL)
    return have


@triton.jit
def _spin_on(flag, value, peer, heap, KERNEL: tl.constexpr):
    limit = tl.load(heap + 2)
    abort = tl.load(heap + 4).to(tl.pointer_type(tl.int32))
    clock = tl.load(heap + 5).to(tl.pointer_type(tl.int64))
    gave_up = tl.load(heap + 6).to(tl.pointer_type(tl.int32))
    begin = _now(clock)
    begin = _now(clock)  # the first may be old
    polls = 0
    leave = 0
    have = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (have - value < 0) & (leave == 0):
        polls += 1
        if polls % _POLLS == 0:
            tl.inline_asm_elementwise("nanosleep.u32 100; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
            elapsed = _now(clock) - begin
            leave = tl.atomic_add(gave_up, 0, sem="relaxed", scope="gpu")
            asked = tl.atomic_add(abort, 0, sem="relaxed", scope="sys")
            if (leave == 0) & ((elapsed > limit) | (asked != 0)):
                leave = 1
                if tl.atomic_cas(gave_up, 0, 1, sem="relaxed", scope="gpu") == 0:
                    _leave_record(flag, value, have, peer, elapsed, heap, KERNEL)
        _linger(flag, value)
        have = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    return have


@triton.jit
def _leave_record(flag, value, have, peer, elapsed, heap, KERNEL: tl.constexpr):
    record = tl.load(heap + 3).to(tl.pointer_type(tl.int64))
    tl.store(record, _name_word(KERNEL, 0))
    tl.store(record + 1, _name_word(KERNEL, 1))
    tl.store(record + 2, peer)
    tl.store(record + 3, flag.to(tl.int64) - tl.load(heap + 7))
    tl.store(record + 4, value)
    tl.store(record + 5, have)
    tl.store(record + 6, elapsed)
    tl.store(record + 7, tl.program_id(0))


@triton.jit(do_not_specialize=["value"])
def raise_flag(flag, value, VALUE_IN_MEMORY: tl.constexpr):
    """One program: sets a word, here or at a peer, after all that came before on this stream."""
    number = value
    if VALUE_IN_MEMORY:
        number = tl.load(value)
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["value", "peer"])
def await_flag(flag, value, peer, heap, VALUE_IN_MEMORY: tl.constexpr, KERNEL: tl.constexpr):
    """One program: ends when this rank's word has reached a value."""
    number = value
    if VALUE_IN_MEMORY:
        number = tl.load(value)
    wait_until(flag, number, peer, heap, KERNEL)
