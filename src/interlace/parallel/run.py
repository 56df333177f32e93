"""Parameters that travel together: one flat run of elements, cut over the data axis in whole chunks.

The parameters of a unit (a decoder block, say) that share a dtype and are all trainable, or all frozen, lie one after
another in one flat run, cut as `interlace.plan.zero` says, those with weight decay first.  So one all-gather, in place
and without a copy, makes every parameter of the unit a view of one buffer, and one reduce-scatter takes their
gradients (`parallel.flat`).  Each parameter's layout is `(N M)/dp:c@s/t`: it starts at chunk s of a unit of t chunks of
c elements (`interlace.layout`).

Frozen parameters have no main weights and no gradients: they are whole on every rank, and sharded under zero=3.  Those
that were frozen later keep their place in the run; `parallel.frozen` keeps their values.

Tried and dropped: one shard per parameter (as FSDP2).  It needs a copy out of the gathered buffer for each gather, an
extra read and write of every weight, twice a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from interlace.collectives import Group, all_gather
from interlace.parallel.part import Part, Values
from interlace.plan.zero import Cut, cut, member_layout

# (parameter name, first element, one past the last) -> that range of the flattened initial values
Materialise = Callable[[str, int, int], torch.Tensor]


@dataclass
class Member:
    """One parameter of a run.  `dims` are its layout letters, `offset` its first element in the run.

    part: which slice of it the tensor axis has left here, if there is such an axis.  version: torch's count of writes
    to the parameter, as it was when its module was wrapped; gathers do not add to it.  ready: the number of the hook
    that takes its gradient.
    """

    name: str
    parameter: nn.Parameter
    dims: str
    decay: bool
    shape: torch.Size
    offset: int = 0
    part: Part | None = None
    version: int = 0
    ready: int = -1

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def end(self) -> int:
        """One past its last element in the run."""
        return self.offset + self.numel

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """Its view of the whole run."""
        return run[self.offset : self.end].view(self.shape)

    @property
    def room(self) -> int:
        """Elements of the largest slice, so that runs are cut alike on every rank of the tensor axis."""
        return self.numel if self.part is None else self.part.largest

    @property
    def kind(self) -> tuple[int, bool]:
        """On how many ranks of the tensor axis its slice is held, and whether they see the same."""
        return (1, False) if self.part is None else (self.part.slicing.copies, self.part.alike)

    @property
    def is_first(self) -> bool:
        """Whether this rank stands for all those of the tensor axis that hold the same slice."""
        return self.part is None or self.part.is_first


@dataclass(frozen=True)
class Placement:
    """Elements [start, stop) of a parameter are elements [leaf_start, leaf_stop) of optimizer leaf `leaf`.

    A 0-d parameter has the shape (1,) here, since a layout needs a dimension to split.  Where the tensor axis cuts
    another dimension than the first, elements count slice by slice: `cut` is that dimension and where slices begin.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    leaf: nn.Parameter
    leaf_start: int
    leaf_stop: int
    start: int
    stop: int
    cut: tuple[int, tuple[int, ...]] = (0, ())


@dataclass(eq=False)
class Run:
    """A run of parameters and the main weights that this rank holds of it.

    group: all ranks of the data axis that hold it.  inner: those that share one copy, neighbours; outer: those that
    hold the same shard, None when `inner` are all.
    """

    name: str
    members: list[Member]
    group: Group
    inner: Group
    outer: Group | None
    zero: int
    trainable: bool
    compute_dtype: torch.dtype
    main_dtype: torch.dtype
    cut: Cut = field(init=False)
    main: torch.Tensor = field(init=False)
    leaves: list[nn.Parameter] = field(default_factory=list)
    _leaf_starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Decayed first, then by what is owed, else in the module's order: what is treated alike is one range.
        self.members.sort(key=lambda m: (not m.decay, m.kind))
        self.cut = cut([member.room for member in self.members], self.group.size)
        for member, offset in zip(self.members, self.cut.offsets, strict=True):
            member.offset = offset

    @property
    def numel(self) -> int:
        """Elements of the whole run, padding included."""
        return self.cut.total

    @property
    def sharded(self) -> bool:
        return self.inner.size > 1 and (self.zero == 3 or (self.zero > 0 and self.trainable))

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the gradients it holds: of what several hold, the first of them does."""
        return self.group.rank == 0 or (self.sharded and (self.outer is None or self.outer.rank == 0))

    @property
    def own(self) -> tuple[int, int]:
        """First and past-the-last element of the run that this rank owns (also under zero=0: what it writes out)."""
        size = self.numel // self.group.size
        place = self.group.rank if self.outer is None else self.inner.rank * self.outer.size + self.outer.rank
        return place * size, (place + 1) * size

    @property
    def held(self) -> tuple[int, int]:
        """The elements of the run whose main weights this rank holds."""
        if not self.sharded:
            return 0, self.numel
        size = self.numel // self.inner.size
        return self.inner.rank * size, (self.inner.rank + 1) * size

    @property
    def is_passing(self) -> bool:
        """Whether the whole weights are here only while they are needed."""
        return self.zero == 3 and self.sharded

    @property
    def casts(self) -> bool:
        """Whether the parameters are a second copy, in another dtype or place than the main weights."""
        return self.sharded or self.compute_dtype != self.main_dtype

    def layout(self, index: int) -> str:
        """The layout string of the main weights of member number `index`."""
        dims = self.members[index].dims
        return member_layout(dims, self.cut, index, self.inner.axis) if self.sharded else dims

    def build(self, device: torch.device, materialise: Materialise | None) -> None:
        """Allocates the main weights and fills them, from the parameters or from `materialise`, range by range."""
        begin, end = self.held
        self.main = torch.zeros(end - begin, dtype=self.main_dtype, device=device)
        for member in self.members:
            if materialise is None:
                self.fill(member, slice_of(member.parameter))
            else:
                self.fill_whole(member, functools.partial(materialise, member.name))
            member.parameter.grad = None
        if self.trainable:
            self._make_leaves()

    def fill(self, member: Member, values: Values, into: torch.Tensor | None = None) -> None:
        """Sets the elements of `member` held here, say [start, stop), to values(start, stop): in the main weights, or
        `into` what is laid out as they are."""
        begin, end = self.held
        start, stop = max(begin, member.offset), min(end, member.end)
        if start < stop:
            target = self.main if into is None else into
            target[start - begin : stop - begin].copy_(values(start - member.offset, stop - member.offset))

    def fill_whole(self, member: Member, values: Values, into: torch.Tensor | None = None) -> None:
        """`fill` from the values of the parameter that the tensor axis has not cut."""
        self.fill(member, values if member.part is None else member.part.reader(values), into)

    def _make_leaves(self) -> None:
        begin, end = self.held
        decayed = max((member.end for member in self.members if member.decay), default=0)
        decayed = math.ceil(decayed / self.cut.chunk) * self.cut.chunk
        border = min(max(decayed, begin), end)
        for start, stop, decay in ((begin, border, True), (border, end, False)):
            if start == stop:
                continue
            leaf = nn.Parameter(self.main[start - begin : stop - begin])
            leaf.decay = decay  # type: ignore[attr-defined]
            leaf.label = f"{self.name}.{'decay' if decay else 'no_decay'}"  # type: ignore[attr-defined]
            self.leaves.append(leaf)
            self._leaf_starts.append(start)

    @property
    def leaves_from(self) -> Iterator[tuple[nn.Parameter, int]]:
        """The leaves with their first elements in the run."""
        return zip(self.leaves, self._leaf_starts, strict=True)

    def placements(self, owned: bool) -> Iterator[Placement]:
        """Where each parameter's elements lie in the leaves: only the owned ones, or all that this rank holds."""
        begin, end = self.own if owned else self.held
        for index, member in enumerate(self.members):
            if owned and not member.is_first:
                continue
            part = member.part
            shape, before = (member.shape, 0) if part is None else (part.shape, part.begin)
            cut = (0, ()) if part is None else part.slices
            for leaf, leaf_start in self.leaves_from:
                start = max(begin, member.offset, leaf_start)
                stop = min(end, member.end, leaf_start + leaf.numel())
                if start < stop or (member.numel == 0 and leaf is self.leaves[0] and self.group.rank == 0):
                    here, own = start - leaf_start, before + start - member.offset
                    places = here, here + max(stop - start, 0), own, own + max(stop - start, 0)
                    yield Placement(member.name, tuple(shape) or (1,), self.layout(index), leaf, *places, cut)

    def frozen(self, leaf: nn.Parameter, start: int) -> tuple[list[slice], bool]:
        """Which elements of a leaf, the run's from `start` on, are of parameters that were frozen after the run was
        built, and whether nothing but padding is left."""
        found, whole = [], True
        for member in self.members:
            low, high = max(member.offset - start, 0), min(member.end - start, leaf.numel())
            if low < high and not member.parameter.requires_grad:
                found.append(slice(low, high))
            elif low < high:
                whole = False
        return found, whole and bool(found)

    def whole(self, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in full, from `values` laid out as the main weights.  Collective when sharded."""
        if self.sharded:
            values = all_gather(values.contiguous(), self.inner, name=f"collect {self.name}").wait()
        for member in self.members:
            local = member.of(values)
            yield member.name, local if member.part is None else member.part.whole(local)

    @property
    def chunks(self) -> int:
        """Chunks that hold elements of parameters; what follows pads the run for its ranks."""
        return math.ceil(max(member.end for member in self.members) / self.cut.chunk)


def slice_of(tensor: torch.Tensor) -> Values:
    """(start, stop) -> that range of the flattened tensor."""
    flat = tensor.detach().reshape(-1)
    return lambda start, stop: flat[start:stop]
