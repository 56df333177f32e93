"""Random numbers that are a pure function of (key, index): no generator, no state, no order of drawing.

Every number is a word of Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011): a 64-bit key and a 128-bit counter give four 32-bit words.  A rank that holds elements 1000..1999 of a tensor
draws exactly those, and gets what one process that draws all of them gets; a layer that is recomputed gets its dropout
mask again.

    flat draws      word i of (key) is word i mod 4 of the block at counter i div 4
    dropout         word j of (key, sample, row) is word j mod 4 of the block at counter (j div 4, row, sample)

Normal numbers come from the Box-Muller transform with logarithm, sine and cosine written out in +, *, / and square
root, in float64.  Those four are correctly rounded wherever they run, so a value has the same bits on a CPU and a GPU
and wherever it stands in a range; library functions promise neither (a vectorised body and its tail may differ).

Words are held in int64 tensors because torch has no arithmetic on unsigned integers; products wrap modulo 2**64, which
leaves both 32-bit halves exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after every round
_ROUNDS = 10


def key(seed: int, *names: str | int) -> int:
    """The 64-bit key of a stream: a hash of a seed and the names that tell it from its neighbours.

    Stable over processes, machines and Python versions; `"1"` and `1` are different names.
    """
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in (int(seed), *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def philox(key: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four 32-bit words for each counter.

    `counter` holds the four 32-bit words of the counter, least significant first: int64 tensors of shapes that
    broadcast together, or integers; at least one is a tensor.  Returns four int64 tensors with values in [0, 2**32).
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(_ROUNDS):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (p1 >> 32 & _LOW) ^ x1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ x3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    words = tuple(x for x in (x0, x1, x2, x3) if isinstance(x, Tensor))
    assert len(words) == 4, "one word of the counter has to be a tensor"
    return words


def bits(key: int, start: int, count: int, device: torch.device | str | None = None) -> Tensor:
    """Words `start` .. `start + count - 1` of the stream `key`: int64 [count], values in [0, 2**32)."""
    return _fill(start, count, torch.int64, device, lambda first, blocks: _words(key, first, blocks, device))


def uniform(
    key: int, start: int, count: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Elements `start` .. of a uniform stream on [0, 1): [count], multiples of 2**-24."""
    return _fill(
        start,
        count,
        dtype,
        device,
        lambda first, blocks: (_words(key, first, blocks, device) >> 8).to(torch.float32) * 2.0**-24,
    )


def normal(
    key: int,
    start: int,
    count: int,
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Elements `start` .. of a normal stream with mean 0 and deviation `std`: [count].

    A narrow dtype gets the float32 value rounded, so a bf16 copy equals its fp32 main weight cast down.
    """

    def draw(first: int, blocks: int) -> Tensor:
        return (_box_muller(_words(key, first, blocks, device)) * std).to(torch.float32)

    return _fill(start, count, dtype, device, draw)


def permutation(key: int, n: int) -> Tensor:
    """A uniformly random order of 0 .. n-1: int64 [n], on the CPU."""
    words = bits(key, 0, 2 * n).view(n, 2)
    return torch.sort(words[:, 0] << 31 | words[:, 1] >> 1, stable=True).indices


def dropout_mask(key: int, sample: Tensor, row: Tensor, count: int, p: float, start: int = 0) -> Tensor:
    """Which elements `start` .. of a row dropout keeps: bool [..., count], True with probability 1 - p.

    `sample` and `row` are int64 of shapes that broadcast to [...]; element j of an output row depends on nothing but
    (key, its sample modulo 2**32, its row modulo 2**64, j).  `row` counts inside the sample: a position, or a head and
    a position.
    """
    sample, row = torch.broadcast_tensors(sample, row)
    block = torch.arange(start // 4, (start + count + 3) // 4, device=row.device)
    row = row.unsqueeze(-1)
    words = torch.stack(philox(key, (block, row & _LOW, row >> 32 & _LOW, sample.unsqueeze(-1) & _LOW)), -1)
    return words.flatten(-2)[..., start % 4 :][..., :count] >= round(p * 2.0**32)


def _words(key: int, first: int, blocks: int, device: torch.device | str | None) -> Tensor:
    """The words of blocks `first` .. `first + blocks - 1`, in order: int64 [4 * blocks]."""
    block = torch.arange(first, first + blocks, device=device)
    return torch.stack(philox(key, (block & _LOW, block >> 32, 0, 0)), -1).flatten()


def _fill(
    start: int,
    count: int,
    dtype: torch.dtype,
    device: torch.device | str | None,
    draw: Callable[[int, int], Tensor],
) -> Tensor:
    """Elements start .. start + count - 1 of the stream whose blocks of four come from draw(first block, blocks).

    Works in pieces, so that the int64 and float64 intermediates stay in the cache of a CPU and small on a GPU.
    """
    out = torch.empty(count, dtype=dtype, device=device)
    piece = 1 << 14 if out.device.type == "cpu" else 1 << 22  # blocks
    stop = start + count
    for first in range(start // 4, (stop + 3) // 4, piece):
        blocks = min(piece, (stop + 3) // 4 - first)
        begin, end = max(start, 4 * first), min(stop, 4 * (first + blocks))
        out[begin - start : end - start] = draw(first, blocks)[begin - 4 * first : end - 4 * first]
    return out


def _box_muller(words: Tensor) -> Tensor:
    """Two normal numbers from two words: sqrt(-2 ln u) (cos a, sin a), u = (2 w0 + 1) / 2**33, a uniform from w1.

    `words` int64 [2n] -> float64 [2n].  The two top bits of w1 choose a quarter of the circle, the rest an angle in it.
    """
    w0, w1 = words.view(-1, 2).unbind(-1)
    radius = torch.sqrt(_log(((w0 << 1) + 1).to(torch.float64) * 2.0**-33) * -2.0)
    quarter = w1 >> 30
    angle = ((w1 & 0x3FFFFFFF).to(torch.float64) * 2.0**-30 - 0.5) * (math.pi / 2)
    square = angle * angle
    cosine = _polynomial([(-1) ** k / math.factorial(2 * k) for k in range(8)], square)
    sine = _polynomial([(-1) ** k / math.factorial(2 * k + 1) for k in range(8)], square) * angle
    odd = (quarter & 1).bool()  # turned by a quarter: (cos, sin) -> (-sin, cos); by a half: both signs change
    x = torch.where(odd, -sine, cosine)
    y = torch.where(odd, cosine, sine)
    radius = torch.where(quarter >= 2, -radius, radius)
    return torch.stack((x * radius, y * radius), -1).flatten()


def _log(u: Tensor) -> Tensor:
    """ln u for u in (0, 1), float64: u = m 2**e, ln m = 2 artanh z with z = (m - 1) / (m + 1) in [-1/3, 0]."""
    mantissa, exponent = torch.frexp(u)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    return _polynomial([2.0 / (2 * k + 1) for k in range(14)], z * z) * z + exponent.to(torch.float64) * math.log(2.0)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    """c0 + c1 x + c2 x**2 + ..., by Horner; product and sum are rounded apart (no fused multiply-add)."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
