"""The data axis: replicated parameters and ZeRO 1, 2, 3, as one engine around any `nn.Module`.

Equals, in plain collectives: every rank runs the module on its own part of the batch; gradients are summed over ranks
(and divided by their number for `gradients="mean"`); every rank ends with the same weights.  ZeRO stages change where
things live, never what is computed:

    zero 0   all-reduce of gradients                                     (Li et al., arXiv 2006.15704)
    zero 1   reduce-scatter of gradients, all-gather of updated weights  (Rajbhandari et al., arXiv 1910.02054)
    zero 2   the same, and only the own shard of the gradients stays
    zero 3   weights are gathered unit by unit, in forward and again in backward, one unit ahead

Quicker than that sequence because transfers run beside compute: a unit's weights are under way while the unit before
computes, and its gradients leave as soon as its backward is done.

All gathers and reductions of a step are one static list, the same on every rank.  Hooks only say how far the list may
go, and the end of backward issues what is left, so that a branch taken by one rank, or a layer used by none, can
neither hang nor mix transfers up.  The lists themselves are `interlace.plan.zero`.

Parameters used by several units, and those outside every unit, belong to the root unit, which stays gathered from the
start of forward to the end of backward.  Units whose weights are read where their module does not run, too, are
gathered at the start of forward as well (`parallel.reads`); under zero=3 that is refused.  Units that are still in
their buffers are not gathered again (the last ones before backward, the first ones before the next micro-batch): a
static property too.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from interlace.collectives import Group, Handle, broadcast, memory_of, sum_scalars
from interlace.errors import ConfigError
from interlace.parallel import frozen, hooks, owed
from interlace.parallel.flat import Flat, Round
from interlace.parallel.part import Part
from interlace.parallel.reads import Look, Reads, eagerly
from interlace.parallel.run import Materialise
from interlace.parallel.units import (
    IN_FLIGHT,
    Hybrid,
    Unit,
    leave_meta,
    make_units,
    open_windows,
    share,
    tensors_of,
    when_ready,
    windows_of,
)
from interlace.parallel.wrapped import Wrapped
from interlace.plan.zero import backward_list

OUTSIDE = (
    "was called outside the wrapped module; call the object that parallelize returned (its run() for a method other "
    "than forward)."
)


class DataParallel(Wrapped):
    """Wraps `module` so that every rank of `group` holds and updates its part of it.

    Args:
        module: any module; on the meta device when `materialise` is given.  Changed in place.
        group: the ranks of the data axis.
        hybrid: the ranks that share one copy, neighbours in `group`, and those that hold the same shard (Zhao et al.,
            arXiv 2304.11277): gathers stay inside the first, and 1/n of the gradients crosses between the second.
        zero: 0, 1, 2 or 3.
        units: names or patterns ("blocks.*") of the submodules gathered together, in the order in which they run; by
            default the children of every outermost `nn.ModuleList`.
        gradients: "mean" over ranks, as data-parallel users expect, or "sum", for a loss that is already divided by a
            global count.
        compute_dtype: dtype of the parameters that compute, or None to keep each one's own.  Main weights and their
            gradients are fp32 (fp64 for fp64 parameters).
        wire_dtype: dtype in which gradients travel; None = that of the main gradients.
        ahead: units gathered ahead of the one that computes.
        overlap: False runs every transfer by itself, for comparison: nothing is gathered ahead, nothing waits later.
        transport: "library" (NCCL, gloo), "copy" (`collectives.window`: ranks of one host read each other's memory, on
            GPUs by copy engines), or "auto": "copy" on GPUs that reach each other.
        materialise: gives initial values range by range, so that no rank ever holds the whole model.
        parts, tensor: of a module that the tensor axis has split: every parameter's part, and that axis's ranks.
        experts: the ranks that hold the same experts, as those parts say, and `hybrid` of them: their gradients are
            summed over these ranks alone (and divided by the number of all), and ZeRO splits them over these.

    `parameters()` and `named_parameters()` are the main weights, one or two flat tensors a unit, for any elementwise
    optimizer; their `.grad` is set when `backward` returns, zeros for parameters that no rank used, and what arises for
    them by themselves (a penalty) is added, once for all ranks.  Parameters frozen since the module was wrapped keep
    their values, whatever the optimizer does.  The module's own parameters are views that read as NaN where they are
    not gathered, and where they are copies as before the last step; `state_dict` and `whole_parameters` give whole
    ones.  Buffers are rank 0's at the start and each rank's own from then on.  What float16 computes may be scaled by
    `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        zero: int = 0,
        hybrid: Hybrid = None,
        units: Sequence[str] | None = None,
        gradients: str = "mean",
        compute_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        ahead: int = 1,
        overlap: bool = True,
        transport: str = "auto",
        materialise: Materialise | None = None,
        dims: dict[str, str] | None = None,
        decay: dict[str, bool] | None = None,
        parts: Mapping[str, Part] | None = None,
        tensor: Group | None = None,
        experts: tuple[Group, Hybrid] | None = None,
    ) -> None:
        if zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero={zero} is not a ZeRO stage; choose 0, 1, 2 or 3.")
        if gradients not in ("mean", "sum"):
            raise ConfigError(f'gradients="{gradients}" is neither "mean" nor "sum".')
        if hybrid is not None and zero == 0:
            raise ConfigError(f"zero=0 repeats everything on every rank of shard={hybrid[0].size}; use zero 1, 2 or 3.")
        all_units = make_units(
            module, units, group=group, hybrid=hybrid, experts=experts, zero=zero, compute_dtype=compute_dtype,
            dims=dims or {}, decay=decay or {}, parts=parts or {},
        )  # fmt: skip
        if materialise is None:
            assert experts is None, "experts are filled range by range"
            if any(parameter.is_meta for parameter in module.parameters()):
                raise ConfigError("the module is on the meta device; give materialise, or build it on a real device.")
            _agree_on_values(module, group)
        flats = [flat for unit in all_units for flat in unit.flats]
        for flat in flats:
            flat.build(group.device, materialise)
        if materialise is not None:
            leave_meta(module, flats, group.device)
        super().__init__(module, group, hybrid, tensor, zero, all_units)
        self.overlap = overlap
        self.ahead = ahead if overlap else 0
        self.sync = True
        self._compared = self.tensor is None
        self._apart: owed.Apart = []
        self._scale = 1.0 / group.size if gradients == "mean" else 1.0
        self._wire = wire_dtype
        self._phase = "rest"  # "rest" | "forward" | "backward"
        self._stale = False
        self._of_user = False  # weights may be written to without torch's noticing, and read anywhere
        self._adding = False  # gradients of earlier passes wait for this one
        self._autocasts = False  # to float16, in the last forward pass
        self._next_gather = 0
        self._next_item = 0
        self._round: Round | None = None
        self._reductions: deque[tuple[Unit, list[Handle[torch.Tensor]], bool]] = deque()
        self._reads: Reads | None = None  # looks at passes until the first reduction
        self._early: list[Unit] = []  # gathered with the root
        self.early_squares = False  # set by who asks for `square_sum` right after backward
        self.reduces_each = False  # set by who runs steps of several passes: each pass is reduced as it finishes
        self._make_room(ahead + 1, transport)
        items = backward_list([unit.regather for unit in self.units], self.ahead)
        self._items = [(item.kind, self.all_units[item.unit]) for item in items]
        self._register_hooks()
        frozen.keep(self._trainable)
        for flat in self._trainable:
            flat.watch_leaves()
        for flat in self.flats:
            flat.note_versions()
            if flat.slot is None:
                flat.point(flat.main)
            elif flat.is_passing:
                flat.hide()
            else:
                flat.gather()
                flat.show()

    # -- what the caller uses ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run("forward", *args, **kwargs)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls `module.<method>` with its weights gathered as they are needed; `forward` runs the module's hooks.

        Without gradients the method may run units again, on every rank as often: to write token after token, say.
        """
        self._begin_forward()
        output = self.module(*args, **kwargs) if method == "forward" else getattr(self.module, method)(*args, **kwargs)
        self._end_forward(output)
        return output

    def look_for_reads(self) -> None:
        """In passes with gradients up to the first reduction, finds units whose weights are read where they do not run.

        Until then copies that stay after their unit's run are all made at the start of forward; those that a rank makes
        without the others always are, which costs nothing.  A copy that may be out of date reads as NaN until it is
        gathered, and what makes copies stays out of the graphs of a compiled module.
        """
        self._of_user = self._stale = True
        if any(flat.slot is not None for flat in self.flats):
            for name in ("_begin_forward", "_before_unit", "_after_unit", "_end_forward"):
                setattr(self, name, functools.partial(eagerly, getattr(self, name)))
        if self.sharded:
            self._reads = Reads(self.units)
        self._early = [unit for unit in self.units if not any(flat.is_passing for flat in unit.flats)]
        self._watch_root()

    def _watch_root(self) -> None:
        """Modules outside of every unit, too, are told from where they run."""
        of_units = {inner for unit in self.units for inner in unit.module.modules()}
        copies = {id(member.parameter) for flat in self.root.flats if flat.slot is not None for member in flat.members}
        refuse = weakref.WeakMethod(self._refuse_outside)
        for name, inner in self.module.named_modules():
            if inner not in of_units and any(id(each) in copies for each in inner.parameters(recurse=False)):
                inner.register_forward_pre_hook(Look(name, refuse), prepend=True)

    def _refuse_outside(self, name: str) -> None:
        away = torch.is_grad_enabled() or not all(flat.is_shown for flat in self.root.flats)
        if self._phase == "rest" and away:
            raise ConfigError(f"{name or 'the module itself'} {OUTSIDE}")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes run inside only add to the local gradients; the first one after reduces the sum, once.

        Gradients that `zero_grad` takes away in between are dropped.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextmanager
    def round(self, number: int, micro_batches: int) -> Iterator[None]:
        """The backward pass inside is number `number` of a step whose sum has the same bits for every number of ranks.

        Micro-batch i of all `micro_batches` is rank i mod w's in pass i div w; a rank without one runs any other, whose
        gradient is not added.  Every pass is reduced as it finishes, and its gradients are added in order of i.  The
        sum is in place after the last pass.
        """
        assert self._scale == 1.0 and self._wire in (None, torch.float32), "a sum in fp32 is asked for"
        with self._in_round(Round.of(number, self.group.size, micro_batches)):
            yield

    @contextmanager
    def reduced(self, number: int, passes: int) -> Iterator[None]:
        """The backward pass inside is number `number` of the `passes` of a step, each reduced as it finishes.

        Weights stay as they are until the last one, after which the sum is in place.
        """
        with self._in_round(Round(None, number == 0, number == passes - 1)):
            yield

    @contextmanager
    def _in_round(self, round: Round) -> Iterator[None]:
        if self.group.size == 1:  # gradients add up where they arise, in the same order
            with nullcontext() if round.last else self.no_sync():
                yield
            return
        self._round = round
        try:
            yield
        finally:
            self._round = None

    @property
    def shares_overflow(self) -> bool:
        """Whether the last forward pass computed in float16: a gradient that overflows on one rank then does on all.

        So a loss scaler, which looks at its own rank's gradients, skips the same steps everywhere.
        """
        return self.holds_part and (self._autocasts or any(flat.compute_dtype == torch.float16 for flat in self.flats))

    def spare_memory(self) -> torch.Tensor | None:
        """Memory that holds nothing until the next backward pass begins, where gradients will leave from: uint8, 1-D.

        None if there is none, or if the gradients of a round are still being fetched from there.
        """
        windows = windows_of(flat.outbox for flat in self.flats)
        if not windows or self._reductions:
            return None
        for window in windows:
            window.claim()
        return memory_of(windows)

    # -- construction --------------------------------------------------------------------------------------------------

    def _make_room(self, distance: int, transport: str) -> None:
        """Buffers that units pass through: under zero=3 those `distance` apart in order share one."""
        share(self.units, self.root, distance if self.zero == 3 else 0)
        open_windows(self.all_units, transport)

    def _register_hooks(self) -> None:
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda module, args, unit=unit: self._before_unit(unit), prepend=True)
            unit.module.register_forward_hook(
                lambda module, args, kwargs, output, unit=unit: self._after_unit(unit, (args, kwargs), output),
                with_kwargs=True,
            )
        for unit in self.all_units:
            for number, flat in enumerate(unit.flats):
                for index, member in enumerate(flat.members if flat.trainable else []):
                    member.ready = when_ready(member.parameter, self._gradient_ready, unit, number, index)
                    unit.gradients.add((number, index))

    # -- forward -------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        if self._phase == "backward" and torch._C._current_graph_task_id() != -1:
            raise ConfigError("the wrapped module ran inside its own backward; recompute parts of it, not the whole.")
        if self._phase == "backward":  # an exception ended it: nothing of it is left
            while self._reductions:
                for handle in self._reductions.popleft()[1]:
                    handle.wait()
            for flat in self._trainable:
                flat.drop()
            self._adding = False
            self._rest()
        self._drop_stale()
        frozen.refuse_thawed(self.flats)
        if self._of_user and torch.is_grad_enabled():
            hooks.refuse_missed(self._trainable)
        if torch.is_grad_enabled() and (self._round is None or self._round.first):
            for flat in self._trainable:
                flat.release()
        device = self.group.device.type
        self._autocasts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        self._phase = "forward"
        self._next_gather = 0
        self.root.gather()
        for unit in self._early:
            unit.gather()
        self._gather_through(self.ahead - 1)
        for unit in (self.root, *self._early):
            unit.show()
        if self._reads is not None:
            self._reads.begin()

    def _drop_stale(self) -> None:
        """Forgets gathered weights that an optimizer may have changed since.

        Version counters tell on their own, but not of fused optimizers or of writes to `.data`.  So after a reduction
        copies are stale until a forward pass that is going to be trained on; one in between for evaluation may come
        before the update.  Users' may be on until its backward pass begins.
        """
        for flat in self.flats:
            if self._stale or flat.changed:
                flat.forget()
                if self._of_user:
                    flat.hide_copy()
        self._stale = self._of_user or (self._stale and not torch.is_grad_enabled())

    def hide_old(self) -> None:
        """After an optimizer's step: copies of the weights as they were before read as NaN until they are gathered."""
        for flat in self._trainable:
            if self._stale or flat.changed:
                flat.hide_copy()

    def _gather_through(self, position: int) -> None:
        while self._next_gather <= min(position, len(self.units) - 1):
            self.units[self._next_gather].gather()
            self._next_gather += 1

    def _before_unit(self, unit: Unit) -> None:
        if self._phase == "rest":
            raise ConfigError(f"{unit.name} {OUTSIDE}")
        if self._phase == "forward":
            if not torch.is_grad_enabled() and not unit.gathered:
                self._next_gather = min(self._next_gather, unit.position)  # once more, for the next token, say
            self._gather_through(unit.position + self.ahead)
        elif unit.regather:  # recomputed before any gradient reached its output
            self._issue_through_gather(unit.position)
        if not unit.gathered:
            raise ConfigError(
                f"{unit.name} ran after a unit that stands behind it in the list of units; list units in the order in "
                "which they run, and leave out those that run twice, out of order, or recomputed with others."
            )
        unit.show()

    def _after_unit(self, unit: Unit, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            passed_on = {id(tensor) for tensor in tensors_of(inputs)}
            for tensor in tensors_of(output):
                if tensor.requires_grad and id(tensor) not in passed_on:
                    tensor.register_hook(lambda grad, unit=unit: self._before_backward(unit))
        if self._phase == "forward":  # in a recomputation the weights are still needed
            unit.hide()

    def _end_forward(self, output: Any) -> None:
        self._gather_through(len(self.units) - 1)
        for flat in self.flats if self._of_user else []:
            if not flat.is_passing:
                flat.show()  # of units that did not run, too
        with_graph = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if self._reads is not None:
            self._reads.look(with_graph)
        if torch.is_grad_enabled() and with_graph:
            for tensor in with_graph:
                tensor.register_hook(lambda grad: self._begin_backward())
        else:
            self._rest()

    def _rest(self) -> None:
        self._phase = "rest"
        for unit in self.all_units:
            unit.hide()

    # -- backward ------------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self._phase == "backward":
            return
        if self.zero == 3 and torch.is_grad_enabled():
            raise ConfigError("zero=3 cannot keep a graph of the backward pass (create_graph); use zero 0, 1 or 2.")
        self._phase = "backward"
        self._stale = self._stale and not self._of_user
        self._next_item = 0
        self._squares = {}
        while self._reductions:  # of the round before: their buffers are written again now
            self._deliver()
        self.root.gather()  # there already, unless a pass without gradients came in between
        self.root.show()
        for flat in self._trainable:
            flat.begin(alone=self.sync and not self._adding)
        for unit in self.all_units:
            unit.reduced = False
            unit.waiting_for = set(unit.gradients)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: Unit) -> None:
        self._begin_backward()
        if unit.regather:
            self._issue_through_gather(unit.position - self.ahead)
            if not unit.gathered:
                raise ConfigError(
                    f"the backward of {unit.name} began twice in one pass; run one forward per backward under zero=3, "
                    "or leave this unit out of `units`."
                )
            unit.show()
        self._issue_ready()

    def _gradient_ready(self, unit: Unit, number: int, index: int) -> None:
        self._begin_backward()
        flat = unit.flats[number]
        if unit.reduced or (unit.regather and not flat.gathered):
            when = f"after {unit.name} had been reduced" if unit.reduced else f"while {unit.name} was not gathered"
            raise ConfigError(
                f"{flat.members[index].name} got a gradient {when}; leave {unit.name} out of `units`, or, of a "
                "penalty, compute it from the parameters() of what parallelize returned."
            )
        flat.accumulate(index)
        unit.waiting_for.discard((number, index))
        if not unit.waiting_for:
            self._issue_ready()

    def _issue_through_gather(self, position: int) -> None:
        """Issues the list up to the gather of the unit at `position` or, if it has none, the next one before it."""
        wanted = [
            place for place, (kind, unit) in enumerate(self._items) if kind == "gather" and unit.position >= position
        ]
        while wanted and self._next_item <= wanted[-1]:
            self._issue()

    def _issue_ready(self) -> None:
        """Issues reductions that are next in the list and complete."""
        while self._next_item < len(self._items):
            kind, unit = self._items[self._next_item]
            if kind == "gather" or unit.waiting_for or not self.sync:
                return
            self._issue()

    def _issue(self) -> None:
        kind, unit = self._items[self._next_item]
        self._next_item += 1
        if kind == "gather":
            unit.gather()
        elif self.sync and unit.trainable:
            unit.reduced = True
            while len(self._reductions) >= IN_FLIGHT:
                self._deliver()
            ends = self._is_last or not self._is_ordered
            self._reductions.append((unit, [self._reduce(flat) for flat in unit.trainable], ends))
            while self._reductions and not self.overlap:
                self._deliver()

    def _reduce(self, flat: Flat) -> Handle[torch.Tensor]:
        if not self._is_ordered:
            return owed.pay(flat, flat.reduce(self._scale, self._wire), None if self._compared else self._apart)
        assert self.tensor is None and self._round is not None, "sums in a fixed order are over the data axis alone"
        return flat.reduce_round(self._round)

    @property
    def _is_ordered(self) -> bool:
        """Whether this backward pass is one of a sum in a fixed order."""
        return self._round is not None and self._round.valid is not None

    @property
    def _is_last(self) -> bool:
        """Whether this backward pass is a step's last."""
        return self._round is None or self._round.last

    def _deliver(self) -> None:
        unit, handles, last = self._reductions.popleft()
        for flat, handle in zip(unit.trainable, handles, strict=True):
            handle.wait()
            flat.deliver(last)

    def _end_backward(self) -> None:
        """What is left of the list; then every gradient is in place, in the order of the compute stream.

        The last reductions of a round that others follow travel on, under the next forward.
        """
        while self._next_item < len(self._items):
            self._issue()
        if self._is_last:
            if self.early_squares and self._reductions:
                self._square_early({flat for unit, *_ in self._reductions for flat in unit.trainable})
            while self._reductions:
                self._deliver()
            self._stale = self._stale or self.sync
            self._adding = not self.sync
            for flat in [] if self.sync else self._trainable:
                flat.deliver_unreduced()
        self._rest()
        if self.sync:
            self._end_reads()
            self._refuse_apart()
            if self.shares_overflow and self._is_last:
                self._share_overflow()

    def _share_overflow(self) -> None:
        """Makes a gradient infinite here if one of any rank is not finite."""
        gradients = [leaf.grad for flat in self._trainable for leaf in flat.leaves if leaf.grad is not None]
        own = torch.zeros(1, dtype=torch.float64, device=self.group.device)
        for gradient in gradients:
            own += ~gradient.isfinite().all()
        found = sum_scalars(own, self.axes, name="overflow") > 0
        for gradient in gradients:
            gradient[:1] += torch.where(found, math.inf, 0.0).to(gradient.dtype)

    def _end_reads(self) -> None:
        """After the first reduction: ranks agree on the units whose weights are read elsewhere, too."""
        if self._reads is not None and self.sharded and self._early:
            own = [float(unit in self._reads.found) for unit in self._early]
            found = sum_scalars(torch.tensor(own, device=self.group.device), self.axes, name="reads").tolist()
            self._early = [unit for unit, count in zip(self._early, found, strict=True) if count]
        self._reads = None

    def _refuse_apart(self) -> None:
        """After the first reduction: gradients that differ over the tensor axis and should not."""
        if not self._compared:
            self._compared, apart, self._apart = True, self._apart, []
            owed.refuse(apart)


def _agree_on_values(module: nn.Module, group: Group) -> None:
    """Rank 0's parameters and buffers are everyone's."""
    for tensor in (*(parameter.detach() for parameter in module.parameters()), *module.buffers()):
        tensor.copy_(broadcast(tensor.contiguous(), group, name="initial values").wait())
