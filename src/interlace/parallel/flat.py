"""A run's weights and gradients on their way: gathered, added up, reduced, and handed to the optimizer.

Equals one all-gather into a buffer of which every parameter is a view, and one reduce-scatter (all-reduce under zero=0)
of a buffer into which every gradient is copied as it arises.  What a rank holds of a run of n elements in w ranks, in
elements (ZeRO, arXiv 1910.02054):

    zero            0      1      2      3
    main weights    n     n/w    n/w    n/w     fp32, what the optimizer updates
    parameters      n*     n      n     two units at a time, in shared buffers
    gradients       n      n**   n/w    n/w     fp32, after the reduction (with fixed order, n/w more under 0 and 1)
    *  no second copy when the parameters compute in the dtype of the main weights
    ** n/w when they compute in a narrower dtype and the reduced pass is the step's only one

Gradients of such a pass travel as they arose, in bf16 say, and are added up in fp32: the sum of the same numbers as if
each had been widened first, with half the bytes on the wire and in memory.  Several passes add up in fp32 first.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from interlace.collectives import Add, Handle, Window, add_parts, all_gather, all_reduce, reduce_scatter, then
from interlace.errors import ConfigError
from interlace.parallel.run import Run

# (leaves, copies): updates leaves, takes their gradients off, and writes what they are now to the copies, if given.
Update = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor] | None], None]


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

    def arrive(self) -> None:
        """Waits for what is on its way into the buffer."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None


@dataclass(frozen=True)
class Round:
    """One backward pass of a step that reduces each.

    valid: micro-batches are added in their order, and so many ranks have one: round j of w ranks holds micro-batches
    j w, j w + 1, ..., one on each rank.  None: sums have no order.
    """

    valid: int | None
    first: bool
    last: bool

    @classmethod
    def of(cls, number: int, ranks: int, micro_batches: int) -> Round:
        """Round `number` of a step of `micro_batches` in all."""
        left = micro_batches - number * ranks
        assert left > 0, (number, ranks, micro_batches)
        return cls(min(ranks, left), number == 0, left <= ranks)


@dataclass(eq=False)
class Flat(Run):
    """A run with its place to be gathered in, and its gradients."""

    slot: Slot | None = None
    outbox: Slot | None = None
    add: Add | None = None
    grad: torch.Tensor | None = None
    _shard_grad: torch.Tensor | None = None
    _sum: torch.Tensor | None = None
    _aside: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by leaf, while it shows `grad` unreduced
    _written: set[int] = field(default_factory=set)
    _unreduced: bool = False
    _shown_version: int = -1  # of `grad`, when leaves began to show it
    _narrow: bool = False
    _result: torch.Tensor | None = None
    _due: Update | None = None
    _used: list[torch.Tensor] = field(default_factory=list)
    _absent: torch.Tensor | None = None
    _shown: bool = False
    _version: int = -1

    # -- parameters --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Starts making the whole run available in its slot, unless it is there already; first what is due for it."""
        slot = self.slot
        if slot is None or slot.content is self:
            self.update()
            return
        slot.arrive()  # a unit that nobody used, perhaps
        whole = slot.reserve()[: self.numel]
        update: Callable[[], None] | None = None
        due, self._due = self._due, None
        if due is not None:
            self._used = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
            copies = [whole[start : start + leaf.numel()] for leaf, start in self.leaves_from]
            update = functools.partial(due, self.leaves, copies)
        if self.sharded:
            slot.arriving = all_gather(
                whole[slice(*self.held)],
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
        slot.arrive()
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
            member.parameter.data = member.of(whole)

    def hide(self) -> None:
        """Parameters whose buffer will hold another unit read as NaN, in the right shape, and take no memory."""
        self._shown = False
        if self._absent is None:
            value = math.nan if self.compute_dtype.is_floating_point or self.compute_dtype.is_complex else 0
            with torch.inference_mode(False):
                self._absent = torch.full((), value, dtype=self.compute_dtype, device=self.main.device)
        for member in self.members:
            member.parameter.data = self._absent.expand(member.shape)

    def hide_copy(self) -> None:
        """`hide`, where parameters are copies, which are out of date."""
        if self.slot is not None:
            self.slot.arrive()
            self.slot.content = None if self.slot.content is self else self.slot.content
            self.hide()

    def note_versions(self) -> None:
        """From now on a write to a parameter is told from none."""
        for member in self.members:
            member.version = member.parameter._version

    @property
    def gathered(self) -> bool:
        """Whether the parameters can be read, once what is on its way has arrived."""
        return self.slot is None or self.slot.content is self

    @property
    def is_shown(self) -> bool:
        """Whether the parameters point at what was gathered."""
        return self.slot is None or self._shown

    @property
    def changed(self) -> bool:
        """Whether the main weights were written to since they were gathered, as far as torch can tell."""
        return self.main._version != self._version

    def forget(self) -> None:
        """The gathered copy is out of date."""
        if self.slot is not None and self.slot.content is self:
            self.slot.arrive()
            self.slot.content = None

    # -- gradients ---------------------------------------------------------------------------------------------------

    def watch_leaves(self) -> None:
        """What arises for a leaf itself (a penalty on the main weights) is kept apart from what is not reduced yet.

        PyTorch keeps such hooks where the garbage collector does not look, so they do not hold this run.
        """
        for number, leaf in enumerate(self.leaves):
            found = weakref.WeakMethod(self._before_own)
            leaf.register_hook(lambda _, number=number, found=found: (call := found()) and call(number))

    def _before_own(self, number: int) -> None:
        self._drop_taken()
        if self.is_summed and number in self._aside:
            self._take_back(number)
            leaf = self.leaves[number]
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)  # also where nothing is added: None says that it was taken away

    def _drop_taken(self) -> None:
        """What earlier passes left unreduced is dropped if the caller has taken it away."""
        if self._unreduced and all(leaf.grad is None for leaf in self.leaves):
            self.drop()

    def _take_back(self, number: int) -> None:
        """The leaf shows what is added to the reduction's result, in place of what this rank alone has added up."""
        own = self._aside.pop(number)
        assert self.grad is not None
        if (self.sharded or own is not None) and self.grad._version != self._shown_version:
            raise ConfigError(
                f"the gradients of {self.name} were written to after a backward pass inside no_sync(), where they are "
                "a part of what this rank alone has added up; change them after the step's last pass, and take them "
                "away by zero_grad(set_to_none=True)."
            )
        self.leaves[number].grad = own

    def begin(self, alone: bool) -> None:
        """A backward pass begins; `alone`: its gradients are reduced without those of any other."""
        self._drop_taken()
        for number in [*self._aside]:
            self._take_back(number)
        self._unreduced = False
        self._narrow = alone and self.group.size > 1

    def release(self) -> None:
        """Lets gradient buffers go that hold nothing: under the activations of the next forward nobody needs them."""
        if not self._written and all(leaf.grad is None for leaf in self.leaves):
            self.grad = self._shard_grad = self._sum = self._result = None

    def drop(self) -> None:
        """Forgets the gradients that have not been reduced."""
        self._written.clear()
        self._aside.clear()
        self._unreduced = False
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
        place = member.of(self.grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        if index in self._written:
            place.add_(grad)
        elif grad.is_cuda and grad.dtype == place.dtype:  # `copy_` hands it to the driver, at half the memory's speed
            torch.mul(grad.detach(), 1, out=place)
        else:
            place.copy_(grad)
        self._written.add(index)
        member.parameter.grad = None

    def _begin_gradients(self) -> None:
        """Makes room; gradients that the leaves still have, or get until then, are added to the coming reduction's."""
        for leaf in self.leaves:
            leaf.grad = None if leaf.grad is None else leaf.grad.clone()
        dtype = self.compute_dtype if self._narrow else self.main_dtype
        if self._narrow and self.outbox is not None and self.outbox.content is None:
            self.grad = self._enter_outbox()
        elif self.grad is None or self.grad.dtype != dtype:
            self.grad = torch.empty(self.numel, dtype=dtype, device=self.main.device)
        for member, following in zip(self.members, [*self.cut.offsets[1:], self.numel], strict=True):
            if member.end < following:
                self.grad[member.end : following].zero_()

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
            return self.grad[slice(*self.held)]
        if self._shard_grad is None:
            self._shard_grad = torch.empty_like(self.main)
        return self._shard_grad

    def _complete(self) -> torch.Tensor:
        """The gradient of this rank; members without one count as zero."""
        if not self._written:
            self._begin_gradients()
        assert self.grad is not None
        for index, member in enumerate(self.members):
            if index not in self._written:
                member.of(self.grad).zero_()
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

    def reduce_round(self, round: Round) -> Handle[torch.Tensor]:
        """Starts adding the gradients of a round to the accumulator, a part on each rank; after the last round all
        that hold an element have it."""
        (sent, window), name = self._leaving(), f"reduce {self.name}"
        if self._sum is None:  # of the elements that this rank owns
            self._sum = torch.empty(self.numel // self.group.size, dtype=self.main_dtype, device=self.main.device)
        accumulator = self._sum
        assert round.valid is not None
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
        self._leave_outbox()
        if self.grad is not None and self.result.untyped_storage() is not self.grad.untyped_storage():
            self.grad = None
        if not last:
            return
        self._add_own(self._hand_out(self.result))

    def deliver_unreduced(self) -> None:
        """After a backward pass without a reduction: the leaves show what this rank alone has added up."""
        if not self._written:
            return
        assert self.grad is not None
        self._unreduced = True
        own = self._hand_out(self.grad[slice(*self.held)])
        if not self.is_summed:
            self._add_own(own)
            own = [None] * len(own)
        self._aside, self._shown_version = dict(enumerate(own)), self.grad._version

    @property
    def is_summed(self) -> bool:
        """Whether gradients are added up over ranks, of the data axis or of the tensor axis."""
        return self.group.size > 1 or any(m.part is not None and m.part.owed is not None for m in self.members)

    @property
    def is_unreduced(self) -> bool:
        """Whether the leaves show what this rank alone has added up."""
        return self._unreduced and any(leaf.grad is not None for leaf in self.leaves)

    def _hand_out(self, held: torch.Tensor) -> list[torch.Tensor | None]:
        """Gives the leaves a gradient; returns those that they had."""
        before, begin = [leaf.grad for leaf in self.leaves], self.held[0]
        for leaf, start in self.leaves_from:
            trained = leaf.requires_grad and not self.frozen(leaf, start)[1]
            leaf.grad = held[start - begin : start - begin + leaf.numel()] if trained else None
        return before

    def _add_own(self, own: Sequence[torch.Tensor | None]) -> None:
        for leaf, added in zip(self.leaves, own, strict=True):
            if added is not None and leaf.grad is not None:
                leaf.grad.add_(added)

    def adopt(self, reduced: torch.Tensor) -> None:
        """Takes a gradient of the held elements that was reduced elsewhere, and hands it to the leaves."""
        self._result = self._shard_grad = reduced
        self._hand_out(reduced)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient tensors that are held now."""
        return [grad for grad in (self.grad, self._shard_grad, self._sum) if grad is not None]

    def own_gradient(self) -> torch.Tensor:
        """The reduced gradient of the elements that this rank owns: 1-D, whole chunks, zero between parameters."""
        (begin, end), start = self.own, self.held[0]
        return self.result[begin - start : end - start]

    def gradient(self) -> torch.Tensor:
        """The gradient of the held elements, after a backward pass."""
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        return torch.cat([grad.detach() for grad in grads])
