"""The exchange of rows with experts elsewhere, composed of collectives and grouped products.

`plain(...)` is the reference of `expert_exchange`, with its contract, and takes its place where ranks do not address
each other's memory.  Rows travel by all-to-all in true numbers, for which the host waits once; the way back of a
gradient is the way there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group, all_gather, all_to_all
from interlace.permute import by_key, inverse, permuted, repeated


def plain(
    x_ND: Tensor,
    weights_Nk: Tensor,
    experts_Nk: Tensor,
    gate_LFD: Tensor,
    up_LFD: Tensor,
    down_LDF: Tensor,
    group: Group,
    owners: Sequence[int],
) -> Tensor:
    """The weighted sum of what its k experts make of each token, added in their order in fp32, rounded once: [N D].

    owners: how many experts each rank of the group holds, in order; gate, up and down are those of this rank.  A choice
    of number X (of all experts) is of no expert: it stays here and adds nothing.
    """
    k, X, ranks = experts_Nk.shape[1], sum(owners), group.size
    chosen_R = experts_Nk.flatten()
    order_R, counts_X = by_key(chosen_R, X)
    inverse_R = inverse(order_R)
    counts_WX = all_gather(counts_X, group, name="expert counts").wait().view(ranks, X)
    sent = [int(part.sum()) for part in counts_X.split(list(owners))]
    first = sum(owners[: group.rank])
    taken_WL = counts_WX[:, first : first + owners[group.rank]]
    taken = taken_WL.sum(dim=1).tolist()
    rows_RD = repeated(x_ND, k, order_R, inverse_R)[: sum(sent)]
    theirs_SD = swap(rows_RD, group, sent, taken, "dispatch")
    local_S = torch.arange(taken_WL.shape[1], device=x_ND.device).repeat(ranks)
    keys_S = local_S.repeat_interleave(taken_WL.flatten(), output_size=sum(taken))
    order_S, counts_L = by_key(keys_S, taken_WL.shape[1])
    inverse_S = inverse(order_S)
    made_SD = gated(permuted(theirs_SD, order_S, inverse_S), counts_L, gate_LFD, up_LFD, down_LDF)
    back_RD = swap(permuted(made_SD, inverse_S, order_S), group, taken, sent, "combine")
    back_RD = torch.cat([back_RD, back_RD.new_zeros(len(order_R) - sum(sent), x_ND.shape[1])])
    made_NkD = permuted(back_RD, inverse_R, order_R).view(len(x_ND), k, x_ND.shape[1])
    total_ND = made_NkD[:, 0].float() * weights_Nk[:, 0, None]
    for choice in range(1, k):
        total_ND = total_ND + made_NkD[:, choice].float() * weights_Nk[:, choice, None]
    return total_ND.to(x_ND.dtype)


def gated(rows_RD: Tensor, counts_L: Tensor, gate_LFD: Tensor, up_LFD: Tensor, down_LDF: Tensor) -> Tensor:
    """Each expert's gated MLP over its own rows, which stand together: [R D]."""
    D, F_ = rows_RD.shape[1], gate_LFD.shape[1]
    if rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and D % 8 == 0 and F_ % 8 == 0 and len(gate_LFD):
        ends_L = counts_L.cumsum(0).to(torch.int32)
        gate_RF = F.silu(F.grouped_mm(rows_RD, gate_LFD.mT, offs=ends_L))
        return F.grouped_mm(gate_RF * F.grouped_mm(rows_RD, up_LFD.mT, offs=ends_L), down_LDF.mT, offs=ends_L)
    pieces = rows_RD.split(counts_L.tolist()) if len(gate_LFD) else ()
    parts = zip(pieces, gate_LFD.unbind(), up_LFD.unbind(), down_LDF.unbind(), strict=True)
    made = [F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts]
    nothing = gate_LFD.sum() + up_LFD.sum() + down_LDF.sum()  # of no experts: they take part, with no elements
    return torch.cat(made) if made else rows_RD + nothing


def swap(rows_RD: Tensor, group: Group, given: Sequence[int], taken: Sequence[int], name: str) -> Tensor:
    """The first given[0] rows to rank 0, the next to rank 1, ...; what all ranks sent here, in their order."""
    return _Swap.apply(rows_RD, group, list(given), list(taken), name)  # type: ignore[no-untyped-call]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, group: Group, given: list[int], taken: list[int], name: str) -> Tensor:
        ctx.group, ctx.given, ctx.taken, ctx.name = group, given, taken, name
        return _move(rows_RD, group, given, taken, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        return _move(grad_RD, ctx.group, ctx.taken, ctx.given, f"{ctx.name} gradient"), None, None, None, None


def _move(rows_RD: Tensor, group: Group, given: list[int], taken: list[int], name: str) -> Tensor:
    D = rows_RD.shape[1]
    sizes = {"send_sizes": [n * D for n in given], "receive_sizes": [n * D for n in taken]}
    return all_to_all(rows_RD.contiguous().view(-1), group, name=name, **sizes).wait().view(-1, D)
