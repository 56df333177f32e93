"""Parameters that travel together: one flat run of elements, cut over the data axis in whole chunks.

The parameters of a unit (a decoder block, say) that share a dtype and are all trainable, or all frozen, lie one after
another in one flat run, cut as `interlace.plan.zero` says, those with weight decay first.  So one all-gather, in place
and without a copy, makes every parameter of the unit a view of one buffer, and one reduce-scatter takes their
gradients.  Each parameter's layout is `(N M)/dp:c@s/t`: it starts at chunk s of a unit of t chunks of c elements
(`interlace.layout`).

What a rank holds of a run of n elements in w ranks, in elements (ZeRO, arXiv 1910.02054):

    zero            0      1      2      3
    main weights    n     n/w    n/w    n/w     fp32, what the optimizer updates
    parameters      n*     n      n     two units at a time, in shared buffers
    gradients       n      n**   n/w    n/w     fp32, after the reduction (with fixed order, n/w more under 0 and 1)
    *  no second copy when the parameters compute in the dtype of the main weights
    ** n/w when they compute in a narrower dtype and the reduced pass is the step's only one

Gradients of such a pass travel as they arose, in bf16 say, and are added up in fp32: the sum of the same numbers as if
each had been widened first, with half the bytes on the wire and in memory.  Several passes add up in fp32 first.

Frozen parameters have no main weights and no gradients: they are whole on every rank, and sharded under zero=3.  Those
that were frozen later keep their place in the run; `parallel.frozen` keeps their values.

Tried and dropped: one shard per parameter (as FSDP2).  It needs a copy out of the gathered buffer for each gather, an
extra read and write of every weight, twice a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from interlace.collectives import (
    Add,
    Group,
    Handle,
    Window,
    add_parts,
    all_gather,
    all_reduce,
    reduce_scatter,
    then,
)
from interlace.errors import ConfigError
from interlace.parallel.part import Part
from interlace.plan.zero import Cut, cut, member_layout, slots

# (parameter name, first element, one past the last) -> that range of the flattened initial values
Materialise = Callable[[str, int, int], torch.Tensor]

# (leaves, copies): updates leaves, takes their gradients off, and writes what they are now to the copies, if given.
Update = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor] | None], None]


@dataclass
class Member:
    """One parameter of a run.  `dims` are its layout letters, `offset` its first element in the run.

    part: which slice of it the tensor axis has left here, if there is such an axis.  version: torch's count of writes
    to the parameter, as it was when its module was wrapped; gathers do not add to it.
    """

    name: str
    parameter: nn.Parameter
    dims: str
    decay: bool
    shape: torch.Size
    offset: int = 0
    part: Part | None = None
    version: int = 0

    @property
    def numel(self) -> int:
        return self.shape.numel()

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


@dataclass(eq=False)
class Slot:
    """A buffer for whole runs, one after another: what they are gathered into, or what their gradients leave from.

    `content` is the run that it holds now.  `window`: its memory, when the peers read it directly.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    buffer: torch.Tensor | None = None
    content: Flat | None = None
    arriving: Handle[torch.Tensor] | None = None
    window: Window | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def reserve(self) -> torch.Tensor:
        if self.buffer is None:
            with torch.inference_mode(False):  # it outlives the pass that first needs it
                if self.window is not None:
                    self.buffer = self.window.own.view(self.dtype)
                else:
                    self.buffer = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        return self.buffer


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


@dataclass(frozen=True)
class Round:
    """One backward pass of a step whose micro-batches are added in their order: `valid` ranks have one.

    Round j of w ranks holds micro-batches j w, j w + 1, ..., one on each rank.
    """

    valid: int
    first: bool
    last: bool

    @classmethod
    def of(cls, number: int, ranks: int, micro_batches: int) -> Round:
        """Round `number` of a step of `micro_batches` in all."""
        left = micro_batches - number * ranks
        assert left > 0, (number, ranks, micro_batches)
        return cls(min(ranks, left), number == 0, left <= ranks)


@dataclass(eq=False)
class Flat:
    """A run of parameters, its main weights, its place to be gathered in, and its gradients.

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
    slot: Slot | None = None
    outbox: Slot | None = None
    add: Add | None = None
    grad: torch.Tensor | None = None
    _shard_grad: torch.Tensor | None = None
    _sum: torch.Tensor | None = None
    _carried: list[torch.Tensor | None] = field(default_factory=list)
    _written: set[int] = field(default_factory=set)
    _unreduced: bool = False
    _narrow: bool = False
    _result: torch.Tensor | None = None
    _due: Update | None = None
    _used: list[torch.Tensor] = field(default_factory=list)
    _leaf_starts: list[int] = field(default_factory=list)
    _absent: torch.Tensor | None = None
    _shown: bool = False
    _version: int = -1

    def __post_init__(self) -> None:
        # Decayed first, then by what is owed, else in the module's order: what is treated alike is one range.
        self.members.sort(key=lambda m: (not m.decay, m.kind))
        self.cut = cut([member.room for member in self.members], self.group.size)
        for member, offset in zip(self.members, self.cut.offsets, strict=True):
            member.offset = offset

    # -- what this rank holds ----------------------------------------------------------------------------------------

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

    def fill(self, member: Member, values: Callable[[int, int], torch.Tensor]) -> None:
        """Sets the main weights of `member` held here, say its elements [start, stop), to values(start, stop)."""
        begin, end = self.held
        start, stop = max(begin, member.offset), min(end, member.offset + member.numel)
        if start < stop:
            self.main[start - begin : stop - begin].copy_(values(start - member.offset, stop - member.offset))

    def fill_whole(self, member: Member, values: Callable[[int, int], torch.Tensor]) -> None:
        """`fill` from the values of the parameter that the tensor axis has not cut."""
        self.fill(member, values if member.part is None else member.part.reader(values))

    def _make_leaves(self) -> None:
        begin, end = self.held
        decayed = max((m.offset + m.numel for m in self.members if m.decay), default=0)
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

    def placements(self, owned: bool) -> Iterator[Placement]:
        """Where each parameter's elements lie in the leaves: only the owned ones, or all that this rank holds."""
        begin, end = self.own if owned else self.held
        for index, member in enumerate(self.members):
            if owned and not member.is_first:
                continue
            part = member.part
            shape, before = (member.shape, 0) if part is None else (part.shape, part.begin)
            cut: tuple[int, tuple[int, ...]] = (0, ())
            if part is not None and part.slicing.dim > 0:
                cut = part.slicing.dim, part.slicing.bounds
            for leaf, leaf_start in zip(self.leaves, self._leaf_starts, strict=True):
                start = max(begin, member.offset, leaf_start)
                stop = min(end, member.offset + member.numel, leaf_start + leaf.numel())
                if start < stop or (member.numel == 0 and leaf is self.leaves[0] and self.group.rank == 0):
                    yield Placement(
                        member.name,
                        tuple(shape) or (1,),
                        self.layout(index),
                        leaf,
                        start - leaf_start,
                        max(stop, start) - leaf_start,
                        before + start - member.offset,
                        before + max(stop, start) - member.offset,
                        cut,
                    )

    # -- parameters --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Starts making the whole run available in its slot, unless it is there already; first what is due for it."""
        slot = self.slot
        if slot is None or slot.content is self:
            self.update()
            return
        if slot.arriving is not None:  # a unit that nobody used was on its way into this buffer
            slot.arriving.wait()
        whole = slot.reserve()[: self.numel]
        update: Callable[[], None] | None = None
        due, self._due = self._due, None
        if due is not None:
            self._used = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
            starts = zip(self.leaves, self._leaf_starts, strict=True)
            copies = [whole[start : start + leaf.numel()] for leaf, start in starts]
            update = functools.partial(due, self.leaves, copies)
        if self.sharded:
            begin, end = self.held
            slot.arriving = all_gather(
                whole[begin:end],
                self.inner,
                out=whole,
                source=self.main if update is None else None,
                before=update,
                window=slot.window,
                name=f"gather {self.name}",
            )
        elif update is not None:
            update()
        else:
            whole.copy_(self.main)
        slot.content = self
        self._version = self.main._version

    def show(self) -> None:
        """Waits for the gather and lets the parameters point at it."""
        slot = self.slot
        if slot is None:
            return
        assert self.gathered, f"{self.name} is not gathered"
        if slot.arriving is not None:
            slot.arriving.wait()
            slot.arriving = None
        if self._used:  # by an update on the side stream, which is over now
            self._used = []
            self.release()
        if not self._shown:
            self.point(slot.reserve())

    def postpone(self, update: Update) -> None:
        """Runs `update` when the weights are gathered next, on the stream of the gather."""
        self.forget()
        self._due = update

    def update(self) -> None:
        """Runs a postponed update now."""
        due, self._due = self._due, None
        if due is not None:
            due(self.leaves, None)
            self.forget()
            self.release()

    def point(self, whole: torch.Tensor) -> None:
        """Makes every parameter a view of `whole`."""
        self._shown = True
        for member in self.members:
            member.parameter.data = whole[member.offset : member.offset + member.numel].view(member.shape)

    def hide(self) -> None:
        """Parameters whose buffer will hold another unit read as NaN, in the right shape, and take no memory."""
        self._shown = False
        if self._absent is None:
            value = math.nan if self.compute_dtype.is_floating_point or self.compute_dtype.is_complex else 0
            with torch.inference_mode(False):
                self._absent = torch.full((), value, dtype=self.compute_dtype, device=self.main.device)
        for member in self.members:
            member.parameter.data = self._absent.expand(member.shape)

    def note_versions(self) -> None:
        """From now on a write to a parameter is told from none."""
        for member in self.members:
            member.version = member.parameter._version

    @property
    def gathered(self) -> bool:
        """Whether the parameters can be read, once what is on its way has arrived."""
        return self.slot is None or self.slot.content is self

    @property
    def changed(self) -> bool:
        """Whether the main weights were written to since they were gathered, as far as torch can tell."""
        return self.main._version != self._version

    def forget(self) -> None:
        """The gathered copy is out of date."""
        if self.slot is not None and self.slot.content is self:
            if self.slot.arriving is not None:
                self.slot.arriving.wait()
                self.slot.arriving = None
            self.slot.content = None

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin(self, alone: bool) -> None:
        """A backward pass begins; `alone`: its gradients are reduced without those of any other.  What earlier ones
        left unreduced is dropped if the caller has taken it away."""
        if self._unreduced and all(leaf.grad is None for leaf in self.leaves):
            self.drop()
        self._unreduced = False
        self._narrow = alone and self.group.size > 1

    def release(self) -> None:
        """Lets gradient buffers go that hold nothing: under the activations of the next forward nobody needs them."""
        if not self._written and all(leaf.grad is None for leaf in self.leaves):
            self.grad = self._shard_grad = self._sum = self._result = None

    def drop(self) -> None:
        """Forgets the gradients that have not been reduced."""
        self._written.clear()
        self._carried = []
        self._leave_outbox()

    def accumulate(self, index: int) -> None:
        """Adds the gradient of member `index` to the run, and takes it off the parameter."""
        member = self.members[index]
        grad = member.parameter.grad
        assert grad is not None
        if not self._written:
            self._begin_gradients()
        assert self.grad is not None
        if index in self._written and self.grad.dtype != self.main_dtype:
            self.grad = self.grad.to(self.main_dtype)
        place = self.grad[member.offset : member.offset + member.numel].view(member.shape)
        if grad.is_sparse:
            grad = grad.to_dense()
        if index in self._written:
            place.add_(grad)
        elif grad.is_cuda and grad.dtype == place.dtype:
            torch.mul(
                grad.detach(), 1, out=place
            )  # what `copy_` hands to the driver here runs at half the memory's speed
            self._written.add(index)
        else:
            place.copy_(grad)
            self._written.add(index)
        member.parameter.grad = None

    def _begin_gradients(self) -> None:
        """Makes room; gradients that the leaves still have are added to the coming reduction's."""
        self._carried = [None if leaf.grad is None else leaf.grad.clone() for leaf in self.leaves]
        dtype = self.compute_dtype if self._narrow else self.main_dtype
        if self._narrow and self.outbox is not None and self.outbox.content is None:
            self.grad = self._enter_outbox()
        elif self.grad is None or self.grad.dtype != dtype:
            self.grad = torch.empty(self.numel, dtype=dtype, device=self.main.device)
        ends = [member.offset + member.numel for member in self.members]
        for end, following in zip(ends, [*self.cut.offsets[1:], self.numel], strict=True):
            if end < following:
                self.grad[end:following].zero_()

    def _enter_outbox(self) -> torch.Tensor:
        """The run's place in the memory that its peers read."""
        assert self.outbox is not None and self.outbox.window is not None and self.outbox.content is None
        self.outbox.window.claim()
        self.outbox.content = self
        return self.outbox.reserve()[: self.numel]

    def _leave_outbox(self) -> None:
        if self.outbox is not None and self.outbox.content is self:
            self.outbox.content = self.grad = None

    def _leaving(self) -> tuple[torch.Tensor, Window | None]:
        """The complete run in the dtype in which it travels, the same on every rank, and the window in which it lies.

        Two things may have kept it from being written there: a gradient that came in parts, which add up in fp32, and
        a unit before it whose gradients came late.
        """
        grad = self._complete()
        if self._narrow and grad.dtype != self.compute_dtype:
            grad = self.grad = grad.to(self.compute_dtype)
        if not self._narrow or self.outbox is None:
            return grad, None
        if self.outbox.content is not self:
            grad = self.grad = self._enter_outbox().copy_(grad)
        elif grad.data_ptr() != self.outbox.reserve().data_ptr():
            grad = self.grad = self.outbox.reserve()[: self.numel].copy_(grad)
        return grad, self.outbox.window

    def _place_for_sum(self) -> torch.Tensor:
        """Where the reduced gradient of the held elements goes: into the run itself where all of it stays."""
        if self.zero < 2 and self.grad is not None and self.grad.dtype == self.main_dtype:
            return self.grad[self.held[0] : self.held[1]]
        if self._shard_grad is None:
            self._shard_grad = torch.empty_like(self.main)
        return self._shard_grad

    def _accumulator(self) -> torch.Tensor:
        """Where rounds add up, for the elements that this rank owns."""
        if self._sum is None:
            begin, end = self.own
            self._sum = torch.empty(end - begin, dtype=self.main_dtype, device=self.main.device)
        return self._sum

    def _complete(self) -> torch.Tensor:
        """The gradient of this rank; members without one count as zero."""
        if not self._written:
            self._begin_gradients()
        assert self.grad is not None
        for index, member in enumerate(self.members):
            if index not in self._written:
                self.grad[member.offset : member.offset + member.numel].zero_()
        self._written.clear()
        return self.grad

    def reduce(self, scale: float, wire: torch.dtype | None) -> Handle[torch.Tensor]:
        """Starts the sum over ranks."""
        (grad, window), name, outer = self._leaving(), f"reduce {self.name}", self.outer
        result = self._result = self._place_for_sum()
        wire = wire if self.main_dtype.is_floating_point and grad.dtype == self.main_dtype else None
        if not self.sharded:
            return all_reduce(grad, self.group, out=result, wire=wire, scale=scale, name=name)
        inside = reduce_scatter(
            grad, self.inner, out=result, wire=wire, scale=scale, window=window, add=self.add, name=name
        )
        if outer is None:
            return inside
        return then(inside, self.inner, lambda: all_reduce(result, outer, wire=wire, name=name))

    @property
    def result(self) -> torch.Tensor:
        """Where the last reduction's sum for the held elements goes."""
        assert self._result is not None
        return self._result

    @property
    def leaves_from(self) -> Iterator[tuple[nn.Parameter, int]]:
        """The leaves with their first elements in the run."""
        return zip(self.leaves, self._leaf_starts, strict=True)

    def reduce_round(self, round: Round) -> Handle[torch.Tensor]:
        """Starts adding the gradients of a round to the accumulator, a part on each rank; after the last round all
        that hold an element have it."""
        (sent, window), name, accumulator = self._leaving(), f"reduce {self.name}", self._accumulator()
        if self.outer is not None:  # owners stand in the run by shard, then replica; ranks by replica, then shard
            sent, window = sent.view(self.inner.size, self.outer.size, -1).transpose(0, 1).reshape(-1), None
        added = add_parts(
            sent, accumulator, self.group, valid=round.valid, first=round.first, window=window, add=self.add, name=name
        )
        holders = self.outer if self.sharded else self.group
        if not round.last or holders is None:
            self._result = accumulator
            return added
        held = self._result = self._place_for_sum()
        return then(added, self.group, lambda: all_gather(accumulator, holders, out=held, name=name))

    def deliver(self, last: bool = True) -> None:
        """After a reduction: lets the whole run go where it is not the result; after the last one of a step, hands the
        gradient to the leaves."""
        assert self._result is not None
        self._leave_outbox()
        if self.grad is not None and self._result.untyped_storage() is not self.grad.untyped_storage():
            self.grad = None
        if not last:
            return
        self._hand_out(self._result)
        for leaf, carried in zip(self.leaves, self._carried, strict=True):
            if carried is not None and leaf.grad is not None:
                leaf.grad.add_(carried)
        self._carried = []

    def deliver_unreduced(self) -> None:
        """After a backward pass without a reduction: the leaves show what this rank alone has added up."""
        if self._written:
            assert self.grad is not None
            self._unreduced = True
            self._hand_out(self.grad[self.held[0] : self.held[1]])

    @property
    def is_unreduced(self) -> bool:
        """Whether the leaves show what this rank alone has added up."""
        return self._unreduced and any(leaf.grad is not None for leaf in self.leaves)

    def _hand_out(self, held: torch.Tensor) -> None:
        begin = self.held[0]
        for leaf, start in zip(self.leaves, self._leaf_starts, strict=True):
            trained = leaf.requires_grad and not self.frozen(leaf, start)[1]
            leaf.grad = held[start - begin : start - begin + leaf.numel()] if trained else None

    def frozen(self, leaf: nn.Parameter, start: int) -> tuple[list[slice], bool]:
        """Which elements of a leaf, the run's from `start` on, are of parameters that were frozen after the run was
        built, and whether nothing but padding is left."""
        found, whole = [], True
        for member in self.members:
            low, high = max(member.offset - start, 0), min(member.offset + member.numel - start, leaf.numel())
            if low < high and not member.parameter.requires_grad:
                found.append(slice(low, high))
            elif low < high:
                whole = False
        return found, whole and bool(found)

    def adopt(self, reduced: torch.Tensor) -> None:
        """Takes a gradient of the held elements that was reduced elsewhere, and hands it to the leaves."""
        self._result = self._shard_grad = reduced
        self._hand_out(reduced)

    # -- whole tensors, for checks and export --------------------------------------------------------------------------

    def whole(self, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in full, from `values` laid out as the main weights.  Collective when sharded."""
        if self.sharded:
            values = all_gather(values.contiguous(), self.inner, name=f"collect {self.name}").wait()
        for member in self.members:
            local = values[member.offset : member.offset + member.numel].view(member.shape)
            yield member.name, local if member.part is None else member.part.whole(local)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient tensors that are held now."""
        return [grad for grad in (self.grad, self._shard_grad, self._sum) if grad is not None]

    def own_gradient(self) -> torch.Tensor:
        """The reduced gradient of the elements that this rank owns: 1-D, whole chunks, zero between parameters."""
        (begin, end), start = self.own, self.held[0]
        assert self._result is not None
        return self._result[begin - start : end - start]

    @property
    def chunks(self) -> int:
        """Chunks that hold elements of parameters; what follows pads the run for its ranks."""
        return math.ceil(max(member.offset + member.numel for member in self.members) / self.cut.chunk)

    def gradient(self) -> torch.Tensor:
        """The gradient of the held elements, after a backward pass."""
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        return torch.cat([grad.detach() for grad in grads])


def slice_of(tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    """(start, stop) -> that range of the flattened tensor."""
    flat = tensor.detach().reshape(-1)
    return lambda start, stop: flat[start:stop]


def choose_slots(flats: Sequence[Flat], positions: Sequence[int], distance: int) -> list[Slot]:
    """A buffer for each run, in the dtype in which it computes, some shared as `plan.zero.slots` says (0 = none)."""
    totals = [flat.numel for flat in flats]
    chosen = slots(totals, positions, distance) if distance else range(len(flats))
    made: dict[tuple[int, torch.dtype], Slot] = {}
    found = []
    for flat, number in zip(flats, chosen, strict=True):
        slot = made.setdefault((number, flat.compute_dtype), Slot(0, flat.compute_dtype, flat.main.device))
        slot.numel = max(slot.numel, flat.numel)
        found.append(slot)
    return found


def leave_meta(module: nn.Module, flats: Iterable[Flat], device: torch.device) -> None:
    """Replaces meta parameters by real ones (a parameter cannot change its kind of device), tied ones by one."""
    replaced = {}
    for flat in flats:
        for member in flat.members:
            empty = torch.empty(0, dtype=flat.compute_dtype, device=device)
            made = nn.Parameter(empty, requires_grad=flat.trainable)
            replaced[id(member.parameter)] = made
            member.parameter = made
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                owner._parameters[name] = replaced[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise ConfigError(f"buffer {name} is on the meta device; give it values before the module is wrapped.")
