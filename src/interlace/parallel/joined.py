"""Projections that share their input, as one product where their weights are neighbours in a ZeRO unit's flat run.

Equals `models.layers.SharedInput`, which it takes the place of.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from interlace.kernels.joined_matmul import joined_matmul


class Joined(nn.Module):
    """x_BTD -> the output of each of `linears`; those with a bias are computed one by one."""

    def forward(self, x_BTD: Tensor, linears: Sequence[nn.Linear], context: object) -> list[Tensor]:
        if any(linear.bias is not None for linear in linears):
            return [linear(x_BTD) for linear in linears]
        return joined_matmul(x_BTD, [linear.weight for linear in linears])
