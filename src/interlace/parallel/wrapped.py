"""A wrapped module between passes: what this rank holds of it, and what a user reads, saves, counts and is refused.

Equals `nn.Module`'s methods of the module before it was wrapped, and `torch.nn.utils.clip_grad_norm_` of all of it in
one process.  Main weights are flat (`parallel.run`), a rank may hold a part of each, and an update may wait until its
weights are gathered next: so whole tensors are collected, sums are taken over ranks, each element once, and what would
train or save other numbers without a word is refused.  `parallel.data` runs the passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from interlace.collectives import Boxes, Group, Window, all_gather, sum_scalars
from interlace.errors import CheckpointError, ConfigError, NumericsError
from interlace.parallel import norm as norms
from interlace.parallel import owed
from interlace.parallel.flat import Flat, Update
from interlace.parallel.meeting import Meeting
from interlace.parallel.optimizer_state import load_optimizer_state, whole_optimizer_state
from interlace.parallel.run import Placement
from interlace.parallel.state import combined, digests, load_state, outline, whole_state
from interlace.parallel.units import Hybrid, Unit, windows_of

Versions = tuple[tuple[int, int], ...]  # of a run's gradients: which tensors, and how often they were written to


def _versions(flat: Flat) -> Versions:
    return tuple((id(leaf.grad), 0 if leaf.grad is None else leaf.grad._version) for leaf in flat.leaves)


class Wrapped(nn.Module):
    """`module` and the runs of its units that this rank holds.  Arguments: see `DataParallel`."""

    def __init__(
        self, module: nn.Module, group: Group, hybrid: Hybrid, tensor: Group | None, zero: int, all_units: list[Unit]
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.inner = hybrid[0] if hybrid else group
        self.outer = hybrid[1] if hybrid else None
        self.zero = zero
        self.tensor = tensor if tensor is not None and tensor.size > 1 else None
        self.all_units = all_units  # in the order of forward, the root last
        self.units, self.root = all_units[:-1], all_units[-1]
        self.boxes: list[Boxes] = []  # of lines over copy engines, whose slots peers write to
        self.meeting: Meeting | None = None  # returns when every rank has called it
        self.tells_state = False  # while `state_dict` or `load_state_dict` of this object runs
        self._squares: dict[Flat, tuple[Versions, torch.Tensor]] = {}  # of gradients, found while others travelled
        self._known = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}

    # -- what is here ------------------------------------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of the main weights."""
        return self.zero > 0 and self.inner.size > 1

    @property
    def axes(self) -> list[Group]:
        """The groups over which a sum of every rank's own part is a sum over the whole module and batch."""
        return [self.group] if self.tensor is None else [self.group, self.tensor]

    @property
    def holds_part(self) -> bool:
        """Whether this rank holds other main weights, and so other gradients, than some other one."""
        return self.sharded or self.tensor is not None

    @property
    def stands_first(self) -> bool:
        """Whether this rank is the one of its tensor group that speaks for what all of them have alike: the loss."""
        return self.tensor is None or self.tensor.rank == 0

    @property
    def counted(self) -> list[Flat]:
        """The flat runs of gradients that this rank has to count: of what several hold, the first of them does."""
        return [flat for flat in self._trainable if flat.is_counted]

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.all_units for flat in unit.flats]

    @property
    def parameter_ids(self) -> set[int]:
        """Of the module's own parameters."""
        return set(self._known.values())

    @property
    def _trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    def leaves(self) -> list[nn.Parameter]:
        """The flat main weights that this rank holds, in a fixed order; `.decay` says whether weight decay applies."""
        self.settle()
        return [leaf for flat in self.flats for leaf in flat.leaves]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((leaf.label, leaf) for leaf in self.leaves())  # type: ignore[attr-defined]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self.leaves())

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The leaves as two groups for `torch.optim`: matrices with weight decay, norms and biases without."""
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for leaf in self.leaves():
            kinds[leaf.decay].append(leaf)  # type: ignore[attr-defined]
        return [{"params": kinds[kind], "weight_decay": weight_decay if kind else 0.0} for kind in kinds if kinds[kind]]

    def placements(self, *, owned: bool) -> Iterator[Placement]:
        """Where every parameter's elements lie in the leaves (trainable) on this rank."""
        self.settle()
        for flat in self.flats:
            yield from flat.placements(owned)

    # -- whole tensors -----------------------------------------------------------------------------------------------

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in full, from the main weights, unit by unit.  Collective; use each before the next."""
        self._meet("whole_parameters")
        self.settle()
        for flat in self.flats:
            yield from flat.whole(flat.main)

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trainable parameter's reduced gradient in full, after a backward pass.  Collective."""
        self._meet("whole_gradients")
        for flat in self._trainable:
            trained = {member.name for member in flat.members if member.parameter.requires_grad}
            yield from (named for named in flat.whole(flat.gradient()) if named[0] in trained)

    # -- updates -----------------------------------------------------------------------------------------------------

    def postpone(self, update: Update) -> None:
        """Runs `update(leaves, copies)` for one flat run after another, each before its weights are gathered next.

        So updates run in the order of the next forward pass, beside its compute.  `update` must take the gradients off
        the leaves and, where copies are given, write each leaf's new values to its copy too.  Whatever reads main
        weights through this object (a forward pass, `leaves`, `placements`, `state_dict`, ...) finds them updated.
        """
        for flat in self._trainable:
            flat.postpone(update)

    def settle(self) -> None:
        """Runs the updates that were postponed and did not run yet."""
        for flat in self._trainable:
            flat.update()

    def refresh(self) -> None:
        """Takes the parameters from the main weights again, after these were changed by hand.  Collective."""
        self.settle()
        for flat in self.flats:
            flat.forget()
            flat.note_versions()
            if self.zero < 3:
                flat.gather()
                flat.show()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def square_sum(self) -> torch.Tensor:
        """Sum of squares of the gradient elements that this rank has to count: fp64, [1].

        What several ranks hold is counted by the first of them.
        """
        known, self._squares = self._squares, {}
        total = torch.zeros(1, dtype=torch.float64, device=self.group.device)
        for flat in self.counted:
            versions, squares = known.get(flat, (None, None))
            total += self._square_sum(flat) if squares is None or versions != _versions(flat) else squares
        return total

    def _square_sum(self, flat: Flat) -> torch.Tensor:
        return norms.square_sum(owed.counted(flat), self.group.device)

    def _square_early(self, travelling: set[Flat]) -> None:
        """Of gradients that are in place, while others travel; counts as long as nobody writes to them."""
        self._squares = {
            flat: (_versions(flat), self._square_sum(flat)) for flat in self.counted if flat not in travelling
        }

    def chunk_squares(self) -> torch.Tensor:
        """Sum of squares of every chunk of gradients that this rank owns: fp64, [chunks].  Every rank has as many."""
        return norms.own_chunks(self._trainable)

    def add_chunks(self, everyone: torch.Tensor) -> torch.Tensor:
        """The sum of what `chunk_squares` gives on each rank, [ranks, chunks], in the order of chunks in the model.

        fp64, 0-d, the same bits for every number of ranks: padding, which depends on it, is left out.
        """
        return norms.tree_sum(torch.cat(self._chunks(everyone)))

    def _chunks(self, everyone: torch.Tensor) -> list[torch.Tensor]:
        """Of each flat run in the order of the model, what `chunk_squares` gave for its chunks: fp64, [chunks]."""
        if self.outer is not None:  # rows of ranks in the order of what they own
            everyone = everyone.view(self.outer.size, self.inner.size, -1).transpose(0, 1).flatten(0, 1)
        return norms.in_order(self._trainable, everyone)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients so that their norm over the whole model is at most `max_norm`.  Collective.

        norm_type: above 0, or inf, the largest size of an element.  Returns the norm before, fp64, 0-d, the same on
        every rank.  NumericsError, with error_if_nonfinite, for a norm that is inf or NaN; nothing is scaled then.
        """
        p = float(norm_type)
        if not float(max_norm) >= 0:
            raise ConfigError(f"clip_grad_norm_ takes a max_norm of at least 0, found {float(max_norm):g}.")
        if not p > 0:
            raise ConfigError(f"clip_grad_norm_ takes a norm_type above 0, or inf, found {p:g}.")
        self.refuse_unreduced("clip_grad_norm_")
        norm = self._norm(p)
        if error_if_nonfinite and not norm.isfinite():
            raise NumericsError(
                f"the norm of the gradients is {norm.item():g}; find the loss or the layer that made it"
            )
        norms.scale([leaf.grad for leaf in self.leaves() if leaf.grad is not None], norms.factor(norm, max_norm))
        return norm

    def _norm(self, p: float) -> torch.Tensor:
        if p == 2:
            return sum_scalars(self.square_sum(), self.axes, name="gradient norm").sqrt()[0]
        gradients = (part for flat in self.counted for part in owed.counted(flat))
        own = norms.power_sum(gradients, p, self.group.device)
        if p < math.inf:
            return (sum_scalars(own, self.axes, name="gradient norm") ** (1 / p))[0]
        for group in self.axes:
            own = all_gather(own, group, name="largest gradient").wait().amax(dim=0, keepdim=True)
        return own[0]

    # -- refusals ----------------------------------------------------------------------------------------------------

    def refuse_unreduced(self, what: str) -> None:
        """`ConfigError` where the gradients at hand are this rank's alone."""
        if any(flat.is_unreduced and flat.is_summed for flat in self._trainable):
            raise ConfigError(
                f"{what} found gradients that were not added up over ranks, since the last backward pass ran inside "
                "no_sync(); run a step's last one outside of it, the last of a shorter accumulation too."
            )

    def refuse_changed(self) -> None:
        """`ConfigError` for a parameter that the module has since it was wrapped: nothing would train or save it."""
        ids = self.parameter_ids
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if self._known.get(name, id(parameter)) != id(parameter) or id(parameter) not in ids:
                raise ConfigError(
                    f"{name} was set after the module was wrapped, and would be neither trained nor saved; add, "
                    "replace and tie parameters before parallelize."
                )

    def refuse_written(self) -> None:
        """`ConfigError` for a parameter of the module itself that was written to: the next gather would undo it."""
        for flat in self.flats:
            for member in [] if flat.slot is None else flat.members:
                if member.parameter._version != member.version:
                    raise ConfigError(
                        f"{member.name} of the module itself was written to, a copy that the next weights replace; do "
                        "it before parallelize, or to the parameters() of what that returned, or by its "
                        "load_state_dict()."
                    )

    @property
    def is_module_itself(self) -> bool:
        """Whether the module's own parameters are, whole and in place, the weights that are trained."""
        return self.tensor is None and all(flat.slot is None for flat in self.flats)

    # -- state -------------------------------------------------------------------------------------------------------

    def digest(self, everywhere: bool = False) -> str:
        """Of names and main weights, the same for every plan, on rank 0, or `everywhere`; else "".  Collective."""
        self._meet("digest")
        self.settle()
        here = everywhere or (self.group.rank == 0 and self.stands_first)
        lines = digests(self.flats, here)  # also where nobody asks: the others gather with this rank
        return self._digest_of(lines) if here else ""

    def _digest_of(self, lines: list[str]) -> str:
        return combined(lines)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The module's own `state_dict`, its parameters whole, from the main weights, in CPU memory.  Collective."""
        self.refuse_changed()
        self.refuse_written()
        self._meet("state_dict")
        self.settle()
        destination = {} if destination is None else destination
        with self._telling_state():
            state = whole_state(self.module, self.flats)
        for name, value in state.items():
            destination[prefix + name] = value
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes what `state_dict`, or the plain module's, returns; the same on every rank.  Collective.

        Errors: `CheckpointError`, before anything changes, for a missing or unknown name (when `strict`), another
        shape, and two values of one parameter that has two names.
        """
        self.refuse_changed()
        self._agree("load_state_dict", state_dict)
        self.settle()
        with self._telling_state():
            found = load_state(self.module, self.flats, state_dict, strict)
        self.refresh()
        return found

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer of `parameters()` as whole tensors by the module's names, in CPU memory.
        Collective.

        It loads under every mesh and zero, into a plain module's optimizer by
        `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`, and what that module's
        `get_optimizer_state_dict` gives, with `full_state_dict`, loads here.
        """
        self.refuse_unreduced("optimizer_state_dict")
        self._meet("optimizer_state_dict")
        self.settle()
        found: dict[str, Any] = whole_optimizer_state(self.flats, self.axes, optimizer)
        return found

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Takes what `optimizer_state_dict` returns, the same on every rank; before the first step, or in its place.

        Errors: `CheckpointError` and `ConfigError`, before anything changes, for a state of other parameters.
        """
        self._agree("load_optimizer_state_dict", state_dict.get("state", {}))
        if lacking := [key for key in ("state", "param_groups") if key not in state_dict]:
            raise CheckpointError(
                f'the optimizer\'s state has no "{lacking[0]}"; give what optimizer_state_dict returns.'
            )
        self.settle()
        load_optimizer_state(self.module, self.flats, optimizer, state_dict)

    @contextmanager
    def _telling_state(self) -> Iterator[None]:
        self.tells_state = True
        try:
            yield
        finally:
            self.tells_state = False

    def _meet(self, name: str) -> None:
        """Before a call that every rank has to make, where it gathers."""
        if self.meeting is not None and self.holds_part:
            self.meeting(name)

    def _agree(self, name: str, state: Mapping[str, Any]) -> None:
        """Before every rank loads a state: all have the same names and sizes."""
        if self.meeting is not None:
            self.meeting.agree(name, outline(state))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Of `.to()`, `.cuda()`, `.half()` and the like: nothing, or a refusal."""
        for flat in self.flats:
            probe = flat.main.new_empty(0, dtype=flat.compute_dtype)
            made = fn(probe)
            if (made.dtype, made.device) != (probe.dtype, probe.device):
                raise ConfigError(
                    "a wrapped module cannot be moved or cast; do it before parallelize, or give compute_dtype."
                )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Of the module's parameters.  Those frozen now get no gradient and stay what they are until they are thawed;
        those that were frozen when the module was wrapped have to stay so."""
        self.module.requires_grad_(requires_grad)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of `copy`, `deepcopy` and `torch.save`: a refusal, as hooks and memory are this object's."""
        raise ConfigError(
            "a wrapped module cannot be copied or pickled; take its state_dict(), or copy it before parallelize."
        )

    def resident_tensors(self) -> dict[str, list[torch.Tensor]]:
        """What this rank keeps between steps: main weights, copies that compute, gradients."""
        slots = dict.fromkeys(flat.slot for flat in self.flats if flat.slot is not None)
        return {
            "main": [flat.main for flat in self.flats],
            "copies": [slot.buffer for slot in slots if slot.buffer is not None],
            "gradients": [grad for flat in self.flats for grad in flat.gradients()],
        }

    @property
    def window_bytes(self) -> int:
        """Bytes of the memory that peers read, which torch's own allocator does not count."""
        return sum(window.own.numel() for window in self._windows) + sum(boxes.own_bytes for boxes in self.boxes)

    @property
    def _windows(self) -> list[Window]:
        return windows_of(slot for flat in self.flats for slot in (flat.slot, flat.outbox))

    def own_windows(self) -> list[torch.Tensor]:
        """The memory of this rank that peers read, a tensor a window; several lie in one storage."""
        return [window.own for window in self._windows]

    def peer_tensors(self) -> list[torch.Tensor]:
        """What this rank sees of its peers' memory."""
        own = {window: window.peers[window.group.rank] for window in self._windows}
        found = [peer for window in own for peer in window.peers if peer is not own[window]]
        return found + [tensor for boxes in self.boxes for tensor in boxes.tensors()]

    def check_transfers(self) -> None:
        """Raises Hang if a stream waited for a peer longer than it may: what was computed since means nothing."""
        for boxes in self.boxes:
            boxes.check()
