"""Signals that do not order what they should: no release or acquire, narrow scopes, descriptors, order of lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from bug import bug

from interlace.symmetric.device import remote

N = 4


def exchange(heap, kernel, *more, dtype=torch.float32, flags=torch.int32, programs=1):
    """Every rank sends `x` to the next and reads what came: the frame most of these faults fit in."""
    x = torch.arange(N * programs, dtype=dtype) + 10 * heap.rank
    inbox, flag = heap.zeros(N * programs, dtype, name="inbox"), heap.zeros(max(16, programs), flags, name="flag")
    out = torch.zeros_like(x)
    after = (heap.rank + 1) % heap.size
    kernel[(programs,)](x, inbox.local, flag.local, out, after, heap.context, N, *more)

    def check():
        assert torch.equal(out, torch.arange(N * programs, dtype=dtype) + 10 * ((heap.rank - 1) % heap.size))

    return check


@triton.jit
def byte_flags(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.store(remote(flag, after, heap), 1)
    while tl.load(flag, volatile=True) != 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("vllm-project/vllm#2760", "wrong order", "plain store .* is no signal")
def flags_are_plain_bytes(heap):
    return exchange(heap, byte_flags, flags=torch.int8)


@triton.jit
def two_stages(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="relaxed", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("vllm-project/vllm#8404", "wrong order", "the signal at line .* has no release order")
def second_stage_without_a_fence(heap):
    return exchange(heap, two_stages)


@triton.jit
def payload_at_gpu_scope(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="gpu")
    while tl.load(flag, volatile=True) < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("tokenspeed#351", "wrong scope", "scope")
def payload_published_at_gpu_scope(heap):
    return exchange(heap, payload_at_gpu_scope)


@triton.jit
def flag_first(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("ROCm/aiter#3290", ("wrong order", "data race"), "signals before the element is written|without waiting")
def ready_before_the_data(heap):
    return exchange(heap, flag_first)


@triton.jit
def descriptor_load(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    box = tl.make_tensor_descriptor(inbox, [N], [1], [N])
    tl.store(out + at, box.load([0]))


@bug("deepseek-ai/DeepEP#642", "missing proxy fence", r"admit_descriptors\(\)")
def descriptor_load_right_after_the_wait(heap):
    return exchange(heap, descriptor_load)


@triton.jit
def weak_acquire(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("deepseek-ai/DeepEP ffc39ba", "wrong scope", 'scope="sys"')
def acquire_scope_too_weak(heap):
    return exchange(heap, weak_acquire)


@triton.jit
def relaxed_acquire(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.load(flag, volatile=True) < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("deepseek-ai/DeepEP#304", "wrong order", "the wait at line .* has no acquire order")
def barrier_read_without_acquire(heap):
    return exchange(heap, relaxed_acquire)


@triton.jit
def descriptor_store(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    box = tl.make_tensor_descriptor(remote(inbox, after, heap), [N], [1], [N])
    box.store([0], tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("triton-lang/triton#10415", "missing proxy fence", r"flush_descriptors\(\)")
def descriptor_store_published_too_early(heap):
    return exchange(heap, descriptor_store)


@triton.jit
def stream_k(partial, lock, out, N: tl.constexpr):
    at = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(partial + at, at + 1.0)
        tl.debug_barrier()
        tl.atomic_xchg(lock, 1, sem="relaxed", scope="gpu")
    else:
        while tl.atomic_cas(lock, 1, 1, sem="relaxed", scope="gpu") != 1:
            pass
        tl.store(out + at, tl.load(partial + at))


@bug("ROCm/tritonBLAS#61", "wrong order", "has no release order", ranks=1)
def lock_of_stream_k_without_order(heap):
    partial, lock, out = torch.zeros(N), torch.zeros(1, dtype=torch.int32), torch.zeros(N)
    stream_k[(2,)](partial, lock, out, N)
    return lambda: torch.equal(out, torch.arange(N) + 1.0)


@triton.jit
def lock_reset(lock, total, N: tl.constexpr):
    at = tl.arange(0, N)
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") != 0:
        pass
    tl.debug_barrier()
    tl.store(total + at, tl.load(total + at) + 1.0)
    tl.debug_barrier()
    tl.store(lock, 0)


@bug("triton-lang/triton#10594", "wrong order", "plain store .* is no signal", ranks=1)
def lock_reset_by_a_plain_store(heap):
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(N)
    lock_reset[(2,)](lock, total, N)
    return lambda: torch.equal(total, torch.full((N,), 2.0))


@triton.jit
def remote_lock(lock, total, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    word = remote(lock, 0, heap)
    while tl.atomic_cas(word, 0, 1, sem="acquire", scope="sys") != 0:
        pass
    there = remote(total, 0, heap)
    tl.debug_barrier()
    tl.store(there + at, tl.load(there + at) + 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(word, 0, sem="release")  # the default scope is the GPU


@bug("ROCm/iris#462", "wrong scope", "scopes do not include each other")
def lock_released_at_the_default_scope(heap):
    lock, total = heap.zeros(1, torch.int32, name="lock"), heap.zeros(N, name="total")
    remote_lock[(1,)](lock.local, total.local, heap.context, N)
    return lambda: heap.rank > 0 or torch.equal(total.local, torch.full((N,), float(heap.size)))


@triton.jit
def no_barrier(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("Triton's lowering of a release after a block store", "missing barrier", r"tl\.debug_barrier\(\)")
def release_by_one_thread_only(heap):
    return exchange(heap, no_barrier)


@triton.jit
def late_wait(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    value = tl.load(inbox + at)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, value)


@bug("facebookexperimental/CUTracer#106", "data race", "without waiting")
def wait_after_the_load(heap):
    return exchange(heap, late_wait)


@triton.jit
def wrong_tile(x, inbox, flag, out, after, heap, N: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = program * N + tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap) + program, 1, sem="release", scope="sys")
    while tl.atomic_add(flag + programs - 1 - program, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("facebookexperimental/CUTracer#106 (flag of another tile)", "data race", "without waiting")
def wait_on_another_tiles_flag(heap):
    return exchange(heap, wrong_tile, programs=2)


@triton.jit
def plain_poll(x, inbox, flag, out, after, heap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(remote(inbox, after, heap) + at, tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(remote(flag, after, heap), 1, sem="release", scope="sys")
    while tl.load(flag) < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@bug("FlagTree#1051 (a scalar poll loop of plain loads)", "wrong order", "plain load .* is no wait")
def poll_by_plain_loads(heap):
    return exchange(heap, plain_poll)
