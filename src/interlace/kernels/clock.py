"""The clock that a GPU's multiprocessors ran at over a stretch of work, counted on the device.

Equals what the driver tells of it at one moment (`nvidia-smi`), but as the mean over the stretch, without asking the
driver and in the order of the stream: `read` notes each multiprocessor's count of cycles beside the device's own time;
two notes of the same multiprocessor give cycles per second.

A GPU at its limit of power runs slower the more of its time it computes, so times taken with and without pauses differ
for that alone: the 8B preset over two H200s computed 363 ms a step where it paused for each transfer, and 380 where
nothing moved at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

EVERY = 4  # programs a multiprocessor, so that each has one though other work runs


@triton.jit
def _read(notes_S2):
    at = notes_S2 + tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1) * 2
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    moment = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(at, cycles)
    tl.store(at + 1, moment)


def read(device: torch.device) -> torch.Tensor | None:
    """Notes of this moment on the current stream: [multiprocessors, 2] cycles and nanoseconds; None without a GPU."""
    if device.type != "cuda":
        return None
    count = torch.cuda.get_device_properties(device).multi_processor_count
    notes_S2 = torch.zeros(count, 2, dtype=torch.int64, device=device)
    _read[(EVERY * count,)](notes_S2, num_warps=1)
    return notes_S2


def hertz(begin: torch.Tensor | None, end: torch.Tensor | None) -> float | None:
    """Mean clock between two notes, of the multiprocessor in the middle; None if nothing was noted.  Waits for both."""
    if begin is None or end is None:
        return None
    both = torch.stack([begin, end]).cpu()
    both = both[:, (both > 0).all(dim=2).all(dim=0)]
    cycles_S, nanoseconds_S = (both[1] - both[0]).double().unbind(dim=1)
    rates = 1e9 * cycles_S[nanoseconds_S > 0] / nanoseconds_S[nanoseconds_S > 0]
    return rates.median().item() if rates.numel() else None
