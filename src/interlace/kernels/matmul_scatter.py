"""Multiply, then add up over ranks: the product at the exit of a split layer.

`matmul_scatter(x, weight, group)` equals `reduce_scatter(x_NM @ weight.T)` over rows, and `matmul_reduce` the same with
an all-reduce; weights hold a slice of their columns (inputs).  Backward gathers the gradient once, or has it whole.

Fused kernels of the same contract may take the place of the compositions here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from interlace.collectives import Group
from interlace.collectives.autograd import reduce, scatter


@torch.compiler.disable
def matmul_scatter(x: Tensor, weight_NM: Tensor, group: Group) -> Tensor:
    """[.. M/tp] -> this rank's rows of the sum, [n N]."""
    return scatter(F.linear(x, weight_NM), group)


@torch.compiler.disable
def matmul_reduce(x: Tensor, weight_NM: Tensor, group: Group) -> Tensor:
    """[.. M/tp] -> [.. N], the sum, on every rank."""
    return reduce(F.linear(x, weight_NM), group)
