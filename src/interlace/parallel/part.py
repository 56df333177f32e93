"""What this rank holds of a parameter that the tensor axis splits, or repeats: a slice of one dimension."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from interlace.collectives import Group, Groups, all_gather, neighbours
from interlace.plan.tensor import Slicing

Values = Callable[[int, int], torch.Tensor]  # (start, stop) -> those elements of something flattened

BLOCK = 1 << 22  # elements of a whole parameter that are looked at at a time, to take columns out of them


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's slice of a parameter over the ranks of `group`.

    owed: the ranks that hold the same slice.  Each has seen some of the rows, or of the heads: their gradients have to
    be added up.  Or all have seen the same (alike): then their mean is taken, since products of the same numbers need
    not have the same bits on two ranks, and weights must.

    Elements of the whole parameter are counted slice by slice, so that a slice is one range of them; for slices of the
    first dimension that is the usual row-major order.
    """

    slicing: Slicing
    group: Group
    owed: Group | None = None
    alike: bool = False

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(self.slicing.shape)

    @property
    def bound(self) -> tuple[int, int]:
        return self.slicing.bound(self.group.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank stands for all that hold the slice: it counts, and saves, its elements."""
        return self.group.rank % self.slicing.copies == 0

    @property
    def largest(self) -> int:
        """Elements of the largest slice."""
        return self.slicing.numel(0)

    @property
    def begin(self) -> int:
        """The first element of the slice, counted slice by slice."""
        return self.bound[0] * self.slicing.around

    def cut(self, parameter: nn.Parameter) -> nn.Parameter:
        """The slice of a whole parameter, as one of its own; also on the meta device."""
        local = parameter.detach()
        if self.slicing.copies < self.group.size:
            start, stop = self.bound
            local = local.narrow(self.slicing.dim, start, stop - start)
        return nn.Parameter(local.clone(memory_format=torch.contiguous_format), parameter.requires_grad)

    def reader(self, values: Values) -> Values:
        """The flattened slice, from the flattened whole parameter in row-major order."""
        dim, shape = self.slicing.dim, self.shape
        if dim == 0:
            offset = self.begin
            return lambda start, stop: values(offset + start, offset + stop)
        (low, high), width, inner = self.bound, shape[dim], shape[dim + 1 :].numel()
        own, full = (high - low) * inner, width * inner

        def read(start: int, stop: int) -> torch.Tensor:
            parts, step = [values(0, 0)], max(1, BLOCK // full)
            for row in range(start // max(own, 1), math.ceil(stop / max(own, 1)), step):
                last = min(row + step, math.ceil(stop / own))
                block = values(row * full, last * full).view(last - row, width, inner)
                parts.append(block[:, low:high].reshape(-1)[max(start - row * own, 0) : stop - row * own])
            return torch.cat(parts)

        return read

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole parameter from every rank's slice.  Collective over `group`."""
        copies, dim, size = self.slicing.copies, self.slicing.dim, self.group.size
        if copies == size:
            return local
        sizes = [self.slicing.numel(rank) for rank in range(size)]
        everyone = all_gather(local.reshape(-1).contiguous(), self.group, sizes=sizes, name="collect slices").wait()
        before, after = self.shape[:dim], self.shape[dim + 1 :]
        slices = everyone.split(sizes)[::copies]
        return torch.cat([s.view(*before, s.numel() // self.slicing.around, *after) for s in slices], dim=dim)


def holding(groups: Groups, axis: str, timeout: float) -> Callable[[int], Group]:
    """How many neighbours along `axis` hold a slice -> these as a group, made once for each number.

    Collective over the whole world, each time for a new number.
    """
    return functools.cache(lambda count: neighbours(groups, axis, count, timeout))


def replace_parameters(module: nn.Module, parts: Mapping[str, Part]) -> None:
    """Puts this rank's slice in the place of every parameter in `parts`; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    named = list(module.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if name in parts and id(parameter) not in made:
            made[id(parameter)] = parts[name].cut(parameter)
    for name, parameter in named:
        if id(parameter) in made:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._parameters[attribute] = made[id(parameter)]
