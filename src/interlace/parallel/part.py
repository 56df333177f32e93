"""What this rank holds of a parameter that the tensor axis splits, or repeats: a slice of one dimension."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from interlace.collectives import Group, Groups, all_gather, neighbours
from interlace.plan.expert import held
from interlace.plan.tensor import Slicing

Values = Callable[[int, int], torch.Tensor]  # (start, stop) -> those elements of something flattened

BLOCK = 1 << 22  # elements of a whole parameter that are looked at at a time, to take columns out of them


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's slice of a parameter over the ranks of `group`.

    owed: the ranks that hold the same slice.  Each has seen some of the rows, or of the heads: their gradients have to
    be added up.  Or all have seen the same (alike): then their mean is taken, since products of the same numbers need
    not have the same bits on two ranks, and weights must.

    experts: the ranks that have the other experts.  Of the slice, whose first dimension is theirs, this rank then holds
    a range, which is one range of elements too.

    Elements of the whole parameter are counted slice by slice, so that a slice is one range of them; for slices of the
    first dimension that is the usual row-major order.
    """

    slicing: Slicing
    group: Group
    owed: Group | None = None
    alike: bool = False
    experts: Group | None = None

    @property
    def dims(self) -> str:
        """The layout of the slice."""
        dims = self.slicing.dims
        return dims if self.experts is None else dims.replace("X", f"X/{self.experts.axis}", 1)

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(self.slicing.shape)

    @property
    def slices(self) -> tuple[int, tuple[int, ...]]:
        """How elements of the whole parameter are counted, as a checkpoint has it: (0, ()) is row-major."""
        return (self.slicing.dim, self.slicing.bounds) if self.slicing.dim > 0 else (0, ())

    @property
    def bound(self) -> tuple[int, int]:
        return self.slicing.bound(self.group.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank stands for all that hold the slice: it counts, and saves, its elements."""
        return self.group.rank % self.slicing.copies == 0

    @property
    def own_experts(self) -> tuple[int, int]:
        """[start, stop) of the experts that are here."""
        X = self.shape[0]
        return (0, X) if self.experts is None else held(X, self.experts.size, self.experts.rank)

    @property
    def each(self) -> int:
        """Elements of one expert in the slice."""
        return self.slicing.numel(self.group.rank) // self.shape[0]

    @property
    def largest(self) -> int:
        """Elements of the largest slice, of the rank with the most experts."""
        whole = self.slicing.numel(0)
        if self.experts is None:
            return whole
        return whole // self.shape[0] * held(self.shape[0], self.experts.size, 0)[1]

    @property
    def begin(self) -> int:
        """The first element that is here, counted slice by slice."""
        return self.bound[0] * self.slicing.around + self._before

    @property
    def _before(self) -> int:
        """Elements of the slice that lie before those that are here."""
        return 0 if self.experts is None else self.own_experts[0] * self.each

    def cut(self, parameter: nn.Parameter) -> nn.Parameter:
        """The slice of a whole parameter, as one of its own; also on the meta device."""
        local = parameter.detach()
        if self.slicing.copies < self.group.size:
            start, stop = self.bound
            local = local.narrow(self.slicing.dim, start, stop - start)
        if self.experts is not None:
            local = local[slice(*self.own_experts)]
        return nn.Parameter(local.clone(memory_format=torch.contiguous_format), parameter.requires_grad)

    def reader(self, values: Values) -> Values:
        """What is here, flattened, from the flattened whole parameter in row-major order."""
        dim, shape = self.slicing.dim, self.shape
        if dim == 0:
            offset = self.begin
            return lambda start, stop: values(offset + start, offset + stop)
        before = self._before
        (low, high), width, inner = self.bound, shape[dim], shape[dim + 1 :].numel()
        own, full = (high - low) * inner, width * inner

        def read(start: int, stop: int) -> torch.Tensor:
            parts, step = [values(0, 0)], max(1, BLOCK // full)
            start, stop = before + start, before + stop
            for row in range(start // max(own, 1), math.ceil(stop / max(own, 1)), step):
                last = min(row + step, math.ceil(stop / own))
                block = values(row * full, last * full).view(last - row, width, inner)
                parts.append(block[:, low:high].reshape(-1)[max(start - row * own, 0) : stop - row * own])
            return torch.cat(parts)

        return read

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole parameter from every rank's slice.  Collective over `experts` and `group`."""
        copies, dim, size = self.slicing.copies, self.slicing.dim, self.group.size
        if self.experts is not None:
            X, ways = self.shape[0], self.experts.size
            sizes = [self.each * (stop - start) for start, stop in (held(X, ways, rank) for rank in range(ways))]
            flat = all_gather(local.reshape(-1).contiguous(), self.experts, sizes=sizes, name="collect experts").wait()
            local = flat.view(X, *local.shape[1:])
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
