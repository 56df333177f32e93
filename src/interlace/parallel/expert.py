"""The expert axis: experts split over `ep`, tokens sent to the ranks that hold theirs.

Equals, in plain collectives, on every rank with X/ep of the experts (Lepikhin et al., arXiv 2006.16668)

    rows of own tokens, sorted by expert --all-to-all--> rows of own experts, from all ranks of the group
    --sorted by expert, one grouped product--> --all-to-all--> back at their tokens, weighted, added up over k

`ep` folds the ranks that see different tokens, those of dp x cp (`plan.expert`).  No token is dropped and nothing is
padded: numbers of rows go ahead, then exactly those rows.  An expert, or a rank, without rows takes part with none, and
its gradients are exactly zero.  The k contributions of a token are added in the order of its choices, in fp32, at home,
where the router's weights are: so their gradient needs no transfer.

Under `tp` every expert is split as an MLP is; the ranks of a tp group have the same rows (gathered when `sequence` is
on) and route alike, bit for bit, so each sends all of them to the rank at its own place of the other tp groups.  Rows
cross tp times that way, but each group of ep is by itself and no count has to agree over tp.

Quicker because a shared expert, where the model has one, runs while rows are on their way, and because the bytes of one
half may travel while the other half is multiplied (`halves`), in backward too: an `Exchange` is started and waited for
at different places.  `kernels.expert_exchange` is taken if asked for (`overlap="fused"`), and on GPUs of one host where
it pays (`plan.exchange`): peers write rows into each other's memory, and products start as their rows come.

On CUDA the library's all-to-all takes its sizes from the host, so `exchange` waits there for the numbers of rows, once
for each layer and pass, and the device with it.  The fused exchange asks the host in forward alone, behind the layer's
launches, whether rows have found room.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from interlace.collectives import Group, all_to_all
from interlace.collectives.autograd import Exchange
from interlace.parallel.part import Part, replace_parameters
from interlace.permute import by_key, inverse, permuted, repeated
from interlace.plan import expert as plan
from interlace.plan.tensor import slices
from interlace.spec import Parameter, Role

# (x_ND, weights_Nk, experts_Nk, and the three weights of the experts that are here) -> [N D]
Fused = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# (rows_RD in the order of experts, how many each has, gate_XFD, up_XFD, down_XDF) -> what the experts make of them
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ExpertAxis:
    """The expert axis: the ranks that hold all experts between them, and the model's product of rows with experts.

    halves: the rows of a layer go in two halves, one on its way while the other is multiplied.  fuse: the fused
    exchange, which has no halves, is taken where it runs; "asked": and it is said where it does not.  room: of its
    slots at first (`ExpertExchange`).  most_tokens: the most that any rank brings at once, the same number on every
    rank.
    """

    group: Group
    experts: Experts
    halves: bool = False
    fuse: Literal["no", "yes", "asked"] = "no"
    room: float | None = None
    most_tokens: int | None = None

    def bounds(self, num_experts: int) -> list[tuple[int, int]]:
        """[start, stop) of the experts of each rank."""
        return [plan.held(num_experts, self.group.size, rank) for rank in range(self.group.size)]

    def fused(self, num_experts: int) -> Fused | None:
        """The fused exchange; None where it is not to be taken, or does not run.  Collective."""
        if self.fuse == "no" or self.group.size == 1:
            return None
        from interlace.kernels.expert_exchange import ExpertExchange  # needs Triton

        owners = [stop - start for start, stop in self.bounds(num_experts)]
        made = ExpertExchange(self.group, owners, most_tokens=self.most_tokens, room=self.room)
        if (reason := made.refuses()) is None:
            return made
        if self.fuse == "asked":
            warnings.warn(f"rows to experts along {self.group.axis}: plain all-to-all, since {reason}", stacklevel=3)
        return None


def split_experts(
    decoder: nn.Module, parameters: Sequence[Parameter], axis: ExpertAxis, tensor: Group, parts: dict[str, Part]
) -> dict[str, Part]:
    """Splits the experts of a decoder in place; returns `parts` with theirs.  Collective.

    parts: those of the tensor axis, which has cut experts for both axes (`tensor.split_decoder`); empty without one.
    """
    theirs = [parameter for parameter in parameters if parameter.role is Role.EXPERT]
    made = {p.name: Part(slices(p, tensor.size), tensor, experts=axis.group) for p in theirs if p.name not in parts}
    replace_parameters(decoder, made)
    fused = axis.fused(theirs[0].shape[0]) if theirs else None  # a stage may have none
    for parameter in theirs:
        moe: Any = decoder.get_submodule(parameter.name.removesuffix(".weight").rpartition(".")[0])
        moe.dispatch = SplitDispatch(axis, parameter.shape[0], fused)
    return {**parts, **made}


def is_fused(decoder: nn.Module) -> bool:
    """Whether rows go by the fused exchange; of a decoder without layers of experts they do not."""
    return any(isinstance(module, SplitDispatch) and module.fused is not None for module in decoder.modules())


class SplitDispatch(nn.Module):
    """In the place of `Dispatch`: weights are those of the experts that are here, [X/ep ..].

    fused: of `axis.fused`, one for all layers.
    """

    def __init__(self, axis: ExpertAxis, num_experts: int, fused: Fused | None = None) -> None:
        super().__init__()
        self.axis = axis
        self.num_experts = num_experts
        self.fused = fused

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        x_ND: Tensor,
        weights_Nk: Tensor,
        experts_Nk: Tensor,
        gate_XFD: Tensor,
        up_XFD: Tensor,
        down_XDF: Tensor,
    ) -> Callable[[], Tensor]:
        if self.fused is not None:
            return _Mixed(self.fused(x_ND, weights_Nk, experts_Nk, gate_XFD, up_XFD, down_XDF))
        cut = [(len(x_ND) + 1) // 2, len(x_ND) // 2] if self.axis.halves else [len(x_ND)]
        pairs = zip(x_ND.split(cut), experts_Nk.split(cut), strict=True)
        halves = [Rows.of(x, chosen, self.num_experts) for x, chosen in pairs]
        matrices = gate_XFD, up_XFD, down_XDF
        return _Mixing(self.axis, halves, exchange(halves, self.axis), weights_Nk.split(cut), matrices, x_ND.dtype)


@dataclass(frozen=True, eq=False)
class _Mixing:
    """Rows that are on their way: called, what becomes of them, [N D]."""

    axis: ExpertAxis
    halves: Sequence[Rows]
    leaving: Sequence[tuple[Exchange, Tensor]]
    weights: Sequence[Tensor]
    matrices: tuple[Tensor, Tensor, Tensor]
    dtype: torch.dtype

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self) -> Tensor:
        returning = []
        for moving, taken in self.leaving:
            rows_RD, order_R, inverse_R, counts_X = _by_expert(moving.rows(), taken)
            made_RD = self.axis.experts(rows_RD, counts_X, *self.matrices)
            back_RD = permuted(made_RD, inverse_R, order_R)
            returning.append(Exchange(back_RD, self.axis.group, moving.taken, moving.given, "combine"))
        mixed = [
            combine(moving.rows(), half.order_R, half.inverse_R, weights_Nk).to(self.dtype)
            for moving, half, weights_Nk in zip(returning, self.halves, self.weights, strict=True)
        ]
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


@dataclass(frozen=True, eq=False)
class _Mixed:
    """What has become of rows that nobody waits for."""

    mixed_ND: Tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self) -> Tensor:
        return self.mixed_ND


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of tokens, each k times, sorted by expert: `rows_RD`, by an order; `counts_X` of each expert.

    Choices of no expert, whose number is X, stand last and are not counted: they stay at home.
    """

    rows_RD: Tensor
    order_R: Tensor
    inverse_R: Tensor
    counts_X: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, experts_Nk: Tensor, num_experts: int) -> Rows:
        chosen_R = experts_Nk.flatten()
        order_R, counts_X = by_key(chosen_R, num_experts)
        inverse_R = inverse(order_R)
        return cls(repeated(x_ND, experts_Nk.shape[1], order_R, inverse_R), order_R, inverse_R, counts_X)


def exchange(halves: Sequence[Rows], axis: ExpertAxis) -> list[tuple[Exchange, Tensor]]:
    """Starts sending the rows of every half to the ranks of their experts, after one exchange of all numbers.

    Returns of each half its transfer, and how many rows of each own expert come from each rank, [ranks experts].
    """
    group, counts = axis.group, torch.stack([half.counts_X for half in halves])
    bounds, num = axis.bounds(counts.shape[1]), len(halves)
    given = [counts[:, start:stop] for start, stop in bounds]
    moving = all_to_all(
        torch.cat([part.reshape(-1) for part in given]),
        group,
        send_sizes=[part.numel() for part in given],
        receive_sizes=[given[group.rank].numel()] * group.size,
        name="numbers of rows",
    )
    leaving = torch.stack([part.sum(dim=1) for part in given], dim=1)
    taken = moving.wait().view(group.size, num, -1).transpose(0, 1)
    known = torch.stack([leaving, taken.sum(dim=2)], dim=1).tolist()  # on the host: by half, of both ways, by rank
    return [
        (Exchange(half.rows_RD[: sum(there)], group, there, here, "dispatch"), each)
        for half, (there, here), each in zip(halves, known, taken, strict=True)
    ]


def _by_expert(rows_RD: Tensor, taken: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that stand by rank, then expert, by expert, then rank; the order, its inverse, and how many each expert has.

    taken: rows from each rank for each expert.
    """
    experts_R = torch.arange(taken.shape[1], device=taken.device).repeat(taken.shape[0])
    keys_R = experts_R.repeat_interleave(taken.flatten(), output_size=len(rows_RD))
    order_R, counts_X = by_key(keys_R, taken.shape[1])
    inverse_R = inverse(order_R)
    return permuted(rows_RD, order_R, inverse_R), order_R, inverse_R, counts_X


def combine(made_RD: Tensor, order_R: Tensor, inverse_R: Tensor, weights_Nk: Tensor) -> Tensor:
    """The weighted sum of what its k experts made of each token, added in the order of its choices: fp32 [N D].

    order_R: the order in which `made_RD` lies, of rows that stood token by token; those of no expert are left out at
    its end, and add nothing.
    """
    without = len(order_R) - len(made_RD)
    if without:
        made_RD = torch.cat([made_RD, made_RD.new_zeros(without, made_RD.shape[1])])
    made_NkD = permuted(made_RD, inverse_R, order_R).unflatten(0, weights_Nk.shape)
    weighted_NkD = made_NkD * weights_Nk[..., None]
    total_ND: Tensor = weighted_NkD[:, 0]
    for choice in range(1, weighted_NkD.shape[1]):
        total_ND = total_ND + weighted_NkD[:, choice]
    return total_ND
