"""Rows in another order, and the order that puts those of one key together.

`permuted(x, order, inverse)` equals `x.index_select(0, order)` for an order that has every row once, and so do its
gradients.  Quicker because its backward pass reads rows by the inverse order; that of `index_select`, which may not
assume that no row comes twice, adds each into its place: 596 us for 32,768 rows of 2,048 bf16 numbers on one H200.
`repeated(x, k, order, inverse)` is `permuted` of every row k times, and `total` the way back.

Where the compiler traces, rows that a product reads are taken by an operator of its own, `interlace::rows`, whose
result is contiguous.  PyTorch's grouped product stops the device where the rows of an expert are the inner dimension
and not a multiple of 16 bytes; it did so once with gathers in the graph (torch 2.11, one H200), of which the compiler
chooses the order in memory.  That this was the cause is inferred: on CPUs the same graph kept its rows together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("interlace", "FRAGMENT")
LIBRARY.define("rows(Tensor x, Tensor order) -> Tensor")
LIBRARY.impl("rows", lambda x, order: x.index_select(0, order), "CompositeExplicitAutograd")
LIBRARY.impl("rows", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("interlace::rows", lambda x, order: x.new_empty(len(order), x.shape[1]), lib=LIBRARY)


def _rows(x_ND: Tensor, order_R: Tensor) -> Tensor:
    """x_ND[order_R], contiguous, without a gradient."""
    if torch.compiler.is_compiling():
        made_RD: Tensor = torch.ops.interlace.rows(x_ND, order_R)
        return made_RD
    return x_ND.index_select(0, order_R)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return _rows(dy_RD, inverse_R), None, None


def permuted(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """x_RD[order_R]; inverse_R: the order's `inverse`."""
    made_RD: Tensor = _Permuted.apply(x_RD, order_R, inverse_R)  # type: ignore[no-untyped-call]
    return made_RD


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, k: int, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.k = k
        return _rows(x_ND, order_R // k)

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return total(dy_RD.index_select(0, inverse_R).unflatten(0, (-1, ctx.k))), None, None, None


def repeated(x_ND: Tensor, k: int, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Every row k times, one after the other, in an order of all of these: [R D], R = N k."""
    made_RD: Tensor = _Repeated.apply(x_ND, k, order_R, inverse_R)  # type: ignore[no-untyped-call]
    return made_RD


def total(x_NkD: Tensor) -> Tensor:
    """The sum over k, in fp32 or wider, rounded once: [N D].

    The compiler makes of a sum of eight a reduction of its own, which took 744 us where additions inside of the kernel
    that gathers took 265 (16,384 tokens of 2,048 bf16 numbers, one H200).
    """
    if not torch.compiler.is_compiling():
        return x_NkD.sum(dim=1)
    made_ND: Tensor = _Total.apply(x_NkD)  # type: ignore[no-untyped-call]
    return made_ND


class _Total(torch.autograd.Function):
    """Since the gradient of each addition's slice would be a whole [N k D] of zeros."""

    @staticmethod
    def forward(ctx: Any, x_NkD: Tensor) -> Tensor:
        ctx.k = x_NkD.shape[1]
        wide = torch.promote_types(x_NkD.dtype, torch.float32)
        made_ND = x_NkD[:, 0].to(wide)
        for choice in range(1, ctx.k):
            made_ND = made_ND + x_NkD[:, choice].to(wide)
        return made_ND.to(x_NkD.dtype)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> Tensor:
        return dy_ND[:, None].expand(-1, ctx.k, -1)


def inverse(order_R: Tensor) -> Tensor:
    """Where each row has gone: inverse(order)[order] is 0, 1, 2, ..."""
    places_R = torch.arange(len(order_R), device=order_R.device)
    return torch.zeros_like(order_R).scatter(0, order_R, places_R)


def by_key(keys_R: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The stable order of rows by their keys, int64 [R], and how many rows have each key from 0 to most - 1, int64.

    Rows whose key is `most` stand last and are not counted.  No host waits for the counts, as one does in `bincount`.
    """
    narrow = torch.int16 if most < 1 << 15 else torch.int64  # a sort by radix makes a pass for each byte of a key
    sorted_R, order_R = keys_R.to(narrow).sort(stable=True)
    ends_X = torch.searchsorted(sorted_R, torch.arange(most, device=keys_R.device, dtype=narrow), right=True)
    return order_R, ends_X.diff(prepend=ends_X.new_zeros(1))
