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
start of forward to the end of backward.  Units that are still in their buffers are not gathered again (the last ones
before backward, the first ones before the next micro-batch): a static property too.
"""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from interlace.collectives import Group, Handle, broadcast
from interlace.errors import ConfigError
from interlace.parallel.flat import Flat, Materialise, Member, Placement, Slot, assign_slots
from interlace.plan.zero import backward_list

ROOT = "root"


@dataclass(eq=False)
class Unit:
    """A submodule whose parameters are gathered and reduced together.  `position` is its place in forward order."""

    name: str
    module: nn.Module
    position: int
    flats: list[Flat] = field(default_factory=list)
    regather: bool = True  # whether backward reads the weights
    waiting_for: set[tuple[int, int]] = field(default_factory=set)
    reduced: bool = False

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]


class DataParallel(nn.Module):
    """Wraps `module` so that every rank of `group` holds and updates its part of it.

    Args:
        module: any module; on the meta device when `materialise` is given.  Changed in place.
        group: the ranks of the data axis.
        zero: 0, 1, 2 or 3.
        units: names or patterns ("blocks.*") of the submodules gathered together, in the order in which they run; by
            default the children of every outermost `nn.ModuleList`.
        gradients: "mean" over ranks, as data-parallel users expect, or "sum", for a loss that is already divided by a
            global count.
        compute_dtype: dtype of the parameters that compute, or None to keep each one's own.  Main weights and their
            gradients are fp32 (fp64 for fp64 parameters).
        wire_dtype: dtype in which gradients travel; None = that of the main gradients.
        ahead: units gathered ahead of the one that computes.
        materialise: gives initial values range by range, so that no rank ever holds the whole model.

    `parameters()` and `named_parameters()` are the main weights, one or two flat tensors a unit, for any elementwise
    optimizer; their `.grad` is set when `backward` returns.  The module's own parameters are views that read as NaN
    where they are not gathered.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        zero: int = 0,
        units: Sequence[str] | None = None,
        gradients: str = "mean",
        compute_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        ahead: int = 1,
        materialise: Materialise | None = None,
        dims: dict[str, str] | None = None,
        decay: dict[str, bool] | None = None,
    ) -> None:
        super().__init__()
        if zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero={zero} is not a ZeRO stage; choose 0, 1, 2 or 3.")
        if gradients not in ("mean", "sum"):
            raise ConfigError(f'gradients="{gradients}" is neither "mean" nor "sum".')
        self.module = module
        self.group = group
        self.zero = zero
        self.ahead = ahead
        self.sync = True
        self._scale = 1.0 / group.size if gradients == "mean" else 1.0
        self._wire = wire_dtype
        self._phase = "rest"  # "rest" | "forward" | "backward"
        self._stale = False
        self._next_gather = 0
        self._next_item = 0
        self._reductions: deque[tuple[Unit, list[Handle[torch.Tensor]]]] = deque()
        self._late: list[Unit] = []
        self.units, self.root = _find_units(module, units)
        self._fill_units(compute_dtype, dims or {}, decay or {})
        if materialise is None:
            self._agree_on_values()
        for flat in self.flats:
            flat.build(group.device, materialise)
        if materialise is not None:
            _leave_meta(module, self.flats, group.device)
        self.slots = self._make_slots()
        regather = [zero == 3 and unit.regather for unit in self.units]
        everyone = [*self.units, self.root]
        self._items = [(item.kind, everyone[item.unit]) for item in backward_list(regather, ahead)]
        self._register_hooks()
        for flat in self.flats:
            if flat.slot is None:
                flat.point(flat.main)
            elif zero < 3 or not flat.sharded:
                flat.gather()
                flat.show()
            else:
                flat.hide()

    # -- what the caller uses ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run("forward", *args, **kwargs)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls `module.<method>` with its weights gathered as they are needed; `forward` runs the module's hooks."""
        self._begin_forward()
        output = self.module(*args, **kwargs) if method == "forward" else getattr(self.module, method)(*args, **kwargs)
        self._end_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes begun inside only add to the local gradients; the first one after reduces the sum, once."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def refresh(self) -> None:
        """Says that main weights were changed by hand: the parameters are taken from them again at the next use.

        Collective under zero=1 and 2.
        """
        self._stale = True
        if self.zero < 3:
            self._drop_stale()
            for flat in self.flats:
                flat.gather()
                if flat.slot is not None:
                    flat.show()

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of the main weights."""
        return self.zero > 0 and self.group.size > 1

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in [*self.units, self.root] for flat in unit.flats]

    def leaves(self) -> list[nn.Parameter]:
        """The flat main weights that this rank holds, in a fixed order; `.decay` says whether weight decay applies."""
        return [leaf for flat in self.flats for leaf in flat.leaves]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((leaf.label, leaf) for leaf in self.leaves())  # type: ignore[attr-defined]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self.leaves())

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The leaves as two groups for `torch.optim`: matrices with weight decay, norms and biases without."""
        leaves = self.leaves()
        groups = [
            {"params": [leaf for leaf in leaves if leaf.decay], "weight_decay": weight_decay},  # type: ignore[attr-defined]
            {"params": [leaf for leaf in leaves if not leaf.decay], "weight_decay": 0.0},  # type: ignore[attr-defined]
        ]
        return [group for group in groups if group["params"]]

    def placements(self, *, owned: bool) -> Iterator[Placement]:
        """Where every parameter's elements lie in the leaves (trainable) on this rank."""
        for flat in self.flats:
            yield from flat.placements(owned)

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in full, from the main weights, unit by unit.  Collective; use each before the next."""
        for flat in self.flats:
            yield from flat.whole(flat.main)

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trainable parameter's reduced gradient in full, after a backward pass.  Collective."""
        for flat in self.flats:
            if flat.trainable:
                yield from flat.whole(flat.reduced_gradient())

    def resident_tensors(self) -> dict[str, list[torch.Tensor]]:
        """What this rank keeps between steps: main weights, copies that compute, gradients."""
        return {
            "main": [flat.main for flat in self.flats],
            "copies": [slot.buffer for slot in self.slots if slot.buffer is not None],
            "gradients": [grad for flat in self.flats for grad in flat.gradients()],
        }

    # -- construction --------------------------------------------------------------------------------------------------

    def _fill_units(self, compute_dtype: torch.dtype | None, dims: dict[str, str], decay: dict[str, bool]) -> None:
        homes: dict[int, set[str]] = {}  # the units, or the root, in which each parameter is used
        for path, owner in self.module.named_modules():
            at = next((u.name for u in self.units if path == u.name or path.startswith(u.name + ".")), ROOT)
            for parameter in owner.parameters(recurse=False):
                homes.setdefault(id(parameter), set()).add(at)
        by_name = {unit.name: unit for unit in self.units}
        members: dict[tuple[str, torch.dtype, bool], tuple[Unit, list[Member]]] = {}
        for name, parameter in self.module.named_parameters():
            home = homes[id(parameter)]
            unit = by_name.get(next(iter(home)), self.root) if len(home) == 1 else self.root
            key = (unit.name, parameter.dtype, parameter.requires_grad)
            letters = dims.get(name) or " ".join(f"d{i}" for i in range(parameter.dim())) or "one"
            decays = decay.get(name, parameter.dim() >= 2)
            member = Member(name, parameter, letters, decays, parameter.shape)
            members.setdefault(key, (unit, []))[1].append(member)
        for (_, dtype, trainable), (unit, found) in members.items():
            computing = compute_dtype if compute_dtype is not None and dtype.is_floating_point else dtype
            main = torch.promote_types(dtype, torch.float32) if trainable else computing
            label = unit.name + ("" if trainable else ".frozen") + ("" if not unit.flats else f".{len(unit.flats)}")
            unit.flats.append(Flat(label, found, self.group, self.zero, trainable, computing, main))
        self.units = [unit for unit in self.units if unit.flats]
        for position, unit in enumerate(self.units):
            unit.position = position

    def _agree_on_values(self) -> None:
        """Rank 0's parameters and buffers are everyone's."""
        state = [p.detach() for p in self.module.parameters()] + list(self.module.buffers())
        for tensor in state:
            whole = tensor.contiguous()
            broadcast(whole.view(1) if whole.dim() == 0 else whole, self.group, name="initial values").wait()
            tensor.copy_(whole)

    def _make_slots(self) -> list[Slot]:
        flats = [flat for unit in self.units for flat in unit.flats]
        positions = [unit.position for unit in self.units for _ in unit.flats]
        shared = assign_slots(flats, positions, self.ahead + 1, share=self.zero == 3)
        return shared + assign_slots(self.root.flats, [0] * len(self.root.flats), 1, share=False)

    def _register_hooks(self) -> None:
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda module, args, unit=unit: self._before_unit(unit))
            unit.module.register_forward_hook(lambda module, args, output, unit=unit: self._after_unit(unit, output))
        for unit in [*self.units, self.root]:
            for number, flat in enumerate(unit.flats):
                for index, member in enumerate(flat.members if flat.trainable else []):
                    member.parameter.register_post_accumulate_grad_hook(
                        lambda p, unit=unit, number=number, index=index: self._gradient_ready(unit, number, index)
                    )

    # -- forward -------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        if self._phase == "backward":
            self._rest()
        self._drop_stale()
        self._phase = "forward"
        self._next_gather = 0
        for flat in self.root.flats:
            flat.gather()
        self._gather_through(self.ahead - 1)
        for flat in self.root.flats:
            flat.show()

    def _drop_stale(self) -> None:
        if self._stale:
            for flat in self.flats:
                flat.forget()
            self._stale = False

    def _gather_through(self, position: int) -> None:
        while self._next_gather <= min(position, len(self.units) - 1):
            for flat in self.units[self._next_gather].flats:
                flat.gather()
            self._next_gather += 1

    def _before_unit(self, unit: Unit) -> None:
        if self._phase == "forward":
            self._gather_through(unit.position + self.ahead)
        elif self._phase == "rest":
            raise ConfigError(
                f"{unit.name} was called outside the wrapped module; call the object that parallelize returned "
                "(its run() for a method other than forward)."
            )
        for flat in unit.flats:
            if flat.slot is not None and flat.slot.content is not flat:
                raise ConfigError(
                    f"{unit.name} ran after a unit that stands behind it in the list of units; list units in the order "
                    "in which they run, or leave out those that run twice or out of order."
                )
            flat.show()

    def _after_unit(self, unit: Unit, output: Any) -> None:
        if self._phase != "forward":
            return  # recomputed inside backward: its weights are still needed
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad, unit=unit: self._before_backward(unit))
        self._hide(unit)

    def _hide(self, unit: Unit) -> None:
        if self.zero == 3:
            for flat in unit.flats:
                if flat.slot is not None and flat.sharded:
                    flat.hide()

    def _end_forward(self, output: Any) -> None:
        self._gather_through(len(self.units) - 1)
        with_graph = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if torch.is_grad_enabled() and with_graph:
            for tensor in with_graph:
                tensor.register_hook(lambda grad: self._begin_backward())
        else:
            self._rest()

    def _rest(self) -> None:
        self._phase = "rest"
        for unit in [*self.units, self.root]:
            self._hide(unit)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self._phase == "backward":
            return
        self._phase = "backward"
        self._next_item = 0
        for unit in [*self.units, self.root]:
            unit.reduced = False
            unit.waiting_for = {
                (number, index)
                for number, flat in enumerate(unit.flats)
                if flat.trainable
                for index in range(len(flat.members))
            }
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _before_backward(self, unit: Unit) -> None:
        self._begin_backward()
        if self.zero == 3 and unit.regather:
            self._issue_through_gather(unit.position - self.ahead)
            for flat in unit.flats:
                if flat.slot is not None and flat.slot.content is not flat:
                    raise ConfigError(
                        f"the backward of {unit.name} began twice in one pass; run one forward per backward under "
                        "zero=3, or leave this unit out of `units`."
                    )
                flat.show()
        self._issue_ready()

    def _gradient_ready(self, unit: Unit, number: int, index: int) -> None:
        self._begin_backward()
        if unit.reduced:
            raise ConfigError(
                f"{unit.flats[number].members[index].name} got a gradient after {unit.name} had been reduced; leave "
                "this unit out of `units`, so that its parameters are reduced at the end."
            )
        flat = unit.flats[number]
        if self.zero == 3 and unit.regather and flat.slot is not None and flat.slot.content is not flat:
            raise ConfigError(
                f"the backward of {unit.name} was still running when that of the next unit began; leave it out of "
                "`units`."
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
            for flat in unit.flats:
                flat.gather()
        elif self.sync and unit.trainable:
            unit.reduced = True
            if self.zero >= 2:  # bounds the gradients in flight to two units
                while len(self._reductions) >= 2:
                    self._deliver()
            self._reductions.append((unit, [flat.reduce(self._scale, self._wire) for flat in unit.trainable]))

    def _deliver(self) -> None:
        unit, handles = self._reductions.popleft()
        for flat, handle in zip(unit.trainable, handles, strict=True):
            handle.wait()
            flat.deliver()

    def _end_backward(self) -> None:
        """What is left of the list; then every gradient is in place, in the order of the compute stream."""
        while self._next_item < len(self._items):
            self._issue()
        while self._reductions:
            self._deliver()
        self._stale = self._stale or self.sync
        self._rest()


def _find_units(module: nn.Module, patterns: Sequence[str] | None) -> tuple[list[Unit], Unit]:
    names = dict(module.named_modules())
    if patterns is None:
        lists = [name for name, m in names.items() if isinstance(m, nn.ModuleList)]
        outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists if other != name)]
        chosen = [child for child in names if child.rpartition(".")[0] in outer and child not in outer]
    else:
        chosen = []
        for pattern in patterns:
            found = [
                name
                for name in names
                if name and fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
            ]
            if not found:
                raise ConfigError(f'units names "{pattern}", but the module has no submodule of that name.')
            chosen += [name for name in found if name not in chosen]
    units = [Unit(name, names[name], position) for position, name in enumerate(chosen)]
    for unit in units:
        inner = [m for m in unit.module.modules() if any(True for _ in m.parameters(recurse=False))]
        unit.regather = not all(isinstance(m, nn.Embedding) for m in inner)
    return units, Unit(ROOT, module, len(units))


def _leave_meta(module: nn.Module, flats: Iterable[Flat], device: torch.device) -> None:
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
            assert buffer is None or not buffer.is_meta, f"buffer {name} of a meta module has no values"
