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
start of forward to the end of backward.  The weights of another unit may be read only while its module runs.  Units
that are still in their buffers are not gathered again (the last ones before backward, the first ones before the next
micro-batch): a static property too.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from interlace.collectives import Boxes, Group, Handle, Window, broadcast, make_windows, memory_of, reach, sum_scalars
from interlace.errors import ConfigError, ResourceError
from interlace.parallel import frozen, owed
from interlace.parallel import norm as norms
from interlace.parallel.flat import Flat, Materialise, Member, Placement, Round, Slot, Update, choose_slots, leave_meta
from interlace.parallel.part import Part
from interlace.parallel.state import digest, load_state, whole_state
from interlace.parallel.units import Unit, find_units, homes, tensors_of, when_ready
from interlace.plan.zero import backward_list

IN_FLIGHT = 2  # units whose gradients travel at the same time
Versions = tuple[tuple[int, int], ...]  # of a flat run's gradients: which tensors, and how often they were written to


def _versions(flat: Flat) -> Versions:
    return tuple((id(leaf.grad), 0 if leaf.grad is None else leaf.grad._version) for leaf in flat.leaves)


class DataParallel(nn.Module):
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
    optimizer; their `.grad` is set when `backward` returns, zeros for parameters that no rank used.  Parameters frozen
    since the module was wrapped keep their values, whatever the optimizer does.  The module's own parameters are views
    that read as NaN where they are not gathered; `state_dict` and `whole_parameters` give whole ones.  Buffers are rank
    0's at the start and each rank's own from then on.  What float16 computes may be scaled by `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        zero: int = 0,
        hybrid: tuple[Group, Group] | None = None,
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
        experts: tuple[Group, tuple[Group, Group] | None] | None = None,
    ) -> None:
        super().__init__()
        if zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero={zero} is not a ZeRO stage; choose 0, 1, 2 or 3.")
        if gradients not in ("mean", "sum"):
            raise ConfigError(f'gradients="{gradients}" is neither "mean" nor "sum".')
        self.module = module
        self.group = group
        if hybrid is not None and zero == 0:
            raise ConfigError(f"zero=0 repeats everything on every rank of shard={hybrid[0].size}; use zero 1, 2 or 3.")
        self.inner = hybrid[0] if hybrid else group
        self.outer = hybrid[1] if hybrid else None
        self._experts = experts
        self.zero = zero
        self.overlap = overlap
        self.ahead = ahead if overlap else 0
        self.sync = True
        self.tensor = tensor if tensor is not None and tensor.size > 1 else None
        self._compared = self.tensor is None
        self._apart: owed.Apart = []
        self._scale = 1.0 / group.size if gradients == "mean" else 1.0
        self._wire = wire_dtype
        self._phase = "rest"  # "rest" | "forward" | "backward"
        self._stale = False
        self._adding = False  # gradients of earlier passes wait for this one
        self.meeting: Callable[[str], None] | None = None  # returns when every rank has called it
        self.tells_state = False  # while `state_dict` or `load_state_dict` of this object runs
        self._autocasts = False  # to float16, in the last forward pass
        self._next_gather = 0
        self._next_item = 0
        self._round: Round | None = None
        self._reductions: deque[tuple[Unit, list[Handle[torch.Tensor]], bool]] = deque()
        self.early_squares = False  # set by who asks for `square_sum` right after backward
        self._squares: dict[Flat, tuple[Versions, torch.Tensor]] = {}  # what that found
        self.units, self.root = find_units(module, units)
        self._fill_units(compute_dtype, dims or {}, decay or {}, parts or {})
        if materialise is None:
            assert experts is None, "experts are filled range by range"
            if any(parameter.is_meta for parameter in module.parameters()):
                raise ConfigError("the module is on the meta device; give materialise, or build it on a real device.")
            self._agree_on_values()
        for flat in self.flats:
            flat.build(group.device, materialise)
        if materialise is not None:
            leave_meta(module, self.flats, group.device)
        self.slots = self._make_slots(distance=ahead + 1)
        self.boxes: list[Boxes] = []  # of lines over copy engines, whose slots peers write to
        self._make_windows(transport)
        regather = [zero == 3 and unit.regather for unit in self.units]
        everyone = [*self.units, self.root]
        self._items = [(item.kind, everyone[item.unit]) for item in backward_list(regather, self.ahead)]
        self._register_hooks()
        self._known = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
        frozen.keep(self._trainable)
        for flat in self.flats:
            flat.note_versions()
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
        """Calls `module.<method>` with its weights gathered as they are needed; `forward` runs the module's hooks.

        Without gradients the method may run units again, on every rank as often: to write token after token, say.
        """
        self._begin_forward()
        output = self.module(*args, **kwargs) if method == "forward" else getattr(self.module, method)(*args, **kwargs)
        self._end_forward(output)
        return output

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
        round = Round.of(number, self.group.size, micro_batches)
        if self.group.size == 1:  # gradients add up where they arise, in the same order
            with nullcontext() if round.last else self.no_sync():
                yield
            return
        self._round = round
        try:
            yield
        finally:
            self._round = None

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
    def shares_overflow(self) -> bool:
        """Whether the last forward pass computed in float16: a gradient that overflows on one rank then does on all.

        So a loss scaler, which looks at its own rank's gradients, skips the same steps everywhere.
        """
        return self.holds_part and (self._autocasts or any(flat.compute_dtype == torch.float16 for flat in self.flats))

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
        return [flat for unit in [*self.units, self.root] for flat in unit.flats]

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
        leaves = self.leaves()
        groups = [
            {"params": [leaf for leaf in leaves if leaf.decay], "weight_decay": weight_decay},  # type: ignore[attr-defined]
            {"params": [leaf for leaf in leaves if not leaf.decay], "weight_decay": 0.0},  # type: ignore[attr-defined]
        ]
        return [group for group in groups if group["params"]]

    def placements(self, *, owned: bool) -> Iterator[Placement]:
        """Where every parameter's elements lie in the leaves (trainable) on this rank."""
        self.settle()
        for flat in self.flats:
            yield from flat.placements(owned)

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

    def _square_early(self) -> None:
        """Of gradients that are in place, while the last reductions travel; counts as long as nobody writes to them."""
        travelling = {flat for unit, *_ in self._reductions for flat in unit.trainable}
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

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their 2-norm over the whole model is at most `max_norm`.  Collective.

        Returns the norm before, fp64, 0-d, the same on every rank.
        """
        self.refuse_unreduced("clip_grad_norm_")
        norm = sum_scalars(self.square_sum(), self.axes, name="gradient norm").sqrt()[0]
        norms.scale([leaf.grad for leaf in self.leaves() if leaf.grad is not None], norms.factor(norm, max_norm))
        return norm

    def refuse_unreduced(self, what: str) -> None:
        """`ConfigError` where the gradients at hand are this rank's alone."""
        if self.group.size > 1 and any(flat.is_unreduced for flat in self._trainable):
            raise ConfigError(
                f"{what} found gradients that were not added up over ranks, since the last backward pass ran inside "
                "no_sync(); run a step's last one outside of it, the last of a shorter accumulation too."
            )

    def refuse_changed(self) -> None:
        """`ConfigError` for a parameter that the module has since it was wrapped: nothing would train or save it."""
        ids = set(self._known.values())
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

    def digest(self, everywhere: bool = False) -> str:
        """Of names and main weights, the same for every plan, on rank 0, or `everywhere`; else "".  Collective."""
        self._meet("digest")
        self.settle()
        return digest(self.flats, everywhere or (self.group.rank == 0 and self.stands_first))

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

        Errors: `CheckpointError`, before anything changes, for a missing or unknown name (when `strict`) and for
        another shape.
        """
        self.refuse_changed()
        self._meet("load_state_dict", always=True)
        self.settle()
        with self._telling_state():
            found = load_state(self.module, self.flats, state_dict, strict)
        self.refresh()
        return found

    @contextmanager
    def _telling_state(self) -> Iterator[None]:
        self.tells_state = True
        try:
            yield
        finally:
            self.tells_state = False

    def _meet(self, name: str, always: bool = False) -> None:
        """Before a call that every rank has to make: where it gathers, or `always`."""
        if self.meeting is not None and (always or self.holds_part):
            self.meeting(name)

    def _apply(self, fn: Any, recurse: bool = True) -> DataParallel:
        """Of `.to()`, `.cuda()`, `.half()` and the like: nothing, or a refusal."""
        for flat in self.flats:
            probe = flat.main.new_empty(0, dtype=flat.compute_dtype)
            made = fn(probe)
            if (made.dtype, made.device) != (probe.dtype, probe.device):
                raise ConfigError(
                    "a wrapped module cannot be moved or cast; do it before parallelize, or give compute_dtype."
                )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> DataParallel:
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
        return {
            "main": [flat.main for flat in self.flats],
            "copies": [slot.buffer for slot in self.slots if slot.buffer is not None],
            "gradients": [grad for flat in self.flats for grad in flat.gradients()],
        }

    @property
    def window_bytes(self) -> int:
        """Bytes of the memory that peers read, which torch's own allocator does not count."""
        return sum(window.own.numel() for window in self._windows) + sum(boxes.own_bytes for boxes in self.boxes)

    def peer_tensors(self) -> list[torch.Tensor]:
        """What this rank sees of its peers' memory."""
        found = [
            peer for window in self._windows for peer in window.peers if peer is not window.peers[window.group.rank]
        ]
        return found + [tensor for boxes in self.boxes for tensor in boxes.tensors()]

    def check_transfers(self) -> None:
        """Raises Hang if a stream waited for a peer longer than it may: what was computed since means nothing."""
        for boxes in self.boxes:
            boxes.check()

    def spare_memory(self) -> torch.Tensor | None:
        """Memory that holds nothing until the next backward pass begins, where gradients will leave from: uint8, 1-D.

        None if there is none, or if the gradients of a round are still being fetched from there.
        """
        outboxes = [flat.outbox.window for flat in self.flats if flat.outbox is not None]
        windows = list({id(window): window for window in outboxes if window is not None}.values())
        if not windows or self._reductions:
            return None
        for window in windows:
            window.claim()
        return memory_of(windows)

    @property
    def _windows(self) -> list[Window]:
        slots = [slot for flat in self.flats for slot in (flat.slot, flat.outbox) if slot is not None]
        return list({id(slot.window): slot.window for slot in slots if slot.window is not None}.values())

    # -- construction --------------------------------------------------------------------------------------------------

    def _fill_units(
        self, compute_dtype: torch.dtype | None, dims: dict[str, str], decay: dict[str, bool], parts: Mapping[str, Part]
    ) -> None:
        home = homes(self.module, self.units, self.root)
        members: dict[tuple[str, torch.dtype, bool, bool], tuple[Unit, list[Member]]] = {}
        for name, parameter in self.module.named_parameters():
            unit = home[id(parameter)]
            part = parts.get(name)
            is_expert = part is not None and part.experts is not None
            key = (unit.name, parameter.dtype, parameter.requires_grad, is_expert)
            letters = dims.get(name) or " ".join(f"d{i}" for i in range(parameter.dim())) or "one"
            decays = decay.get(name, parameter.dim() >= 2)
            member = Member(name, parameter, part.dims if part else letters, decays, parameter.shape, part=part)
            members.setdefault(key, (unit, []))[1].append(member)
        for (_, dtype, trainable, is_expert), (unit, found) in members.items():
            computing = compute_dtype if compute_dtype is not None and dtype.is_floating_point else dtype
            main = torch.promote_types(dtype, torch.float32) if trainable else computing
            label = unit.name + ("" if trainable else ".frozen") + ("" if not unit.flats else f".{len(unit.flats)}")
            group, inner, outer = self._sharers(is_expert)
            unit.flats.append(Flat(label, found, group, inner, outer, self.zero, trainable, computing, main))
        self.units = [unit for unit in self.units if unit.flats]
        for position, unit in enumerate(self.units):
            unit.position = position

    def _sharers(self, is_expert: bool) -> tuple[Group, Group, Group | None]:
        """The ranks that hold a parameter, those of them that share one copy, and those with the same shard."""
        if not is_expert:
            return self.group, self.inner, self.outer
        assert self._experts is not None
        group, hybrid = self._experts
        return group, *(hybrid or (group, None))

    def _agree_on_values(self) -> None:
        """Rank 0's parameters and buffers are everyone's."""
        state = [p.detach() for p in self.module.parameters()] + list(self.module.buffers())
        for tensor in state:
            tensor.copy_(broadcast(tensor.contiguous(), self.group, name="initial values").wait())

    def _make_slots(self, distance: int) -> list[Slot]:
        """Gives each run that needs one a buffer to be gathered into: shared ones under zero=3, the root's its own."""
        placed = [(flat, unit.position) for unit in self.units for flat in unit.flats if flat.casts]
        kinds = [[pair for pair in placed if pair[0].inner is inner] for inner in self._inners]
        root = [(flat, 0) for flat in self.root.flats if flat.casts]
        found: list[Slot] = []
        for pairs, shared in (*((kind, self.zero == 3) for kind in kinds), (root, False)):
            flats, positions = [flat for flat, _ in pairs], [position for _, position in pairs]
            apart = distance if shared and flats and flats[0].sharded else 0
            for flat, slot in zip(flats, choose_slots(flats, positions, apart), strict=True):
                flat.slot = slot
                found += [] if slot in found else [slot]
        return found

    @property
    def _inners(self) -> list[Group]:
        """The groups whose ranks share copies: one, or two with experts of which others hold the rest."""
        return list(dict.fromkeys(flat.inner for flat in self.flats))

    def _make_windows(self, transport: str) -> None:
        """Puts what peers read into memory that they reach: gathered copies, and gradients that travel as they arose.

        As many units' gradients as are on their way, and the one being written, have a place.
        """
        if transport not in ("auto", "library", "copy"):
            raise ConfigError(f'transport="{transport}" is none of "auto", "library" and "copy".')
        if transport == "library":
            return
        for inner in self._inners:
            flats = [flat for flat in self.flats if flat.inner is inner and flat.sharded]
            if flats and (transport == "copy" or inner.device.type == "cuda"):
                self._make_windows_over(inner, flats, transport)

    def _make_windows_over(self, inner: Group, flats: Sequence[Flat], transport: str) -> None:
        if not reach(inner):
            if transport == "copy":
                raise ConfigError(
                    f'transport="copy" needs ranks of one host that reach each other\'s memory, and those along '
                    f'{inner.axis} do not; use transport="auto".'
                )
            return
        place = {id(flat): unit.position for unit in [*self.units, self.root] for flat in unit.flats}
        leaving = [flat for flat in flats if flat.trainable and flat.compute_dtype != flat.main_dtype]
        outboxes = choose_slots(leaving, [place[id(flat)] for flat in leaving], IN_FLIGHT + 1)
        for flat, slot in zip(leaving, outboxes, strict=True):
            flat.outbox = slot
            if self.group.device.type == "cuda" and flat.main_dtype == torch.float32:
                from interlace.kernels.ordered_rows import sum_rows  # needs Triton

                flat.add = sum_rows
        arriving = [flat.slot for flat in flats if flat.slot is not None]
        try:
            for found in (arriving, outboxes):
                slots = [slot for number, slot in enumerate(found) if slot not in found[:number]]
                for slot, window in zip(slots, make_windows(inner, [slot.nbytes for slot in slots]), strict=True):
                    slot.window = window
        except ResourceError as error:  # of every rank alike
            if transport == "copy":
                raise
            warnings.warn(f"gradients and weights travel by the library: {error}", stacklevel=2)
            for flat in flats:
                flat.outbox = flat.add = None
                if flat.slot is not None:
                    flat.slot.window = None

    def _register_hooks(self) -> None:
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda module, args, unit=unit: self._before_unit(unit), prepend=True)
            unit.module.register_forward_hook(
                lambda module, args, kwargs, output, unit=unit: self._after_unit(unit, (args, kwargs), output),
                with_kwargs=True,
            )
        for unit in [*self.units, self.root]:
            for number, flat in enumerate(unit.flats):
                for index, member in enumerate(flat.members if flat.trainable else []):
                    when_ready(member.parameter, self._gradient_ready, unit, number, index)

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
        self._refuse_thawed()
        if torch.is_grad_enabled() and (self._round is None or self._round.first):
            for flat in self._trainable:
                flat.release()
        device = self.group.device.type
        self._autocasts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        self._phase = "forward"
        self._next_gather = 0
        for flat in self.root.flats:
            flat.gather()
        self._gather_through(self.ahead - 1)
        for flat in self.root.flats:
            flat.show()

    def _refuse_thawed(self) -> None:
        """Frozen parameters have neither main weights nor gradients: what was thawed since would not be trained."""
        for flat in self.flats:
            for member in [] if flat.trainable else flat.members:
                if member.parameter.requires_grad:
                    raise ConfigError(
                        f"{member.name} was frozen when its module was wrapped and is not now; freeze it again, or let "
                        "it require gradients before parallelize and freeze it after."
                    )

    def _drop_stale(self) -> None:
        """Forgets gathered weights that an optimizer may have changed since.

        Version counters tell on their own, but not of fused optimizers.  So after a reduction copies are stale until a
        forward pass that is going to be trained on; one in between for evaluation may come before the update.
        """
        for flat in self.flats:
            if self._stale or flat.changed:
                flat.forget()
        if torch.is_grad_enabled():
            self._stale = False

    def _gather_through(self, position: int) -> None:
        while self._next_gather <= min(position, len(self.units) - 1):
            for flat in self.units[self._next_gather].flats:
                flat.gather()
            self._next_gather += 1

    def _before_unit(self, unit: Unit) -> None:
        if self._phase == "rest":
            raise ConfigError(
                f"{unit.name} was called outside the wrapped module; call the object that parallelize returned "
                "(its run() for a method other than forward)."
            )
        if self._phase == "forward":
            if not torch.is_grad_enabled() and not all(flat.gathered for flat in unit.flats):
                self._next_gather = min(self._next_gather, unit.position)  # once more, for the next token, say
            self._gather_through(unit.position + self.ahead)
        elif self.zero == 3 and unit.regather:  # recomputed before any gradient reached its output
            self._issue_through_gather(unit.position)
        for flat in unit.flats:
            if not flat.gathered:
                raise ConfigError(
                    f"{unit.name} ran after a unit that stands behind it in the list of units; list units in the order "
                    "in which they run, and leave out those that run twice, out of order, or recomputed with others."
                )
            flat.show()

    def _after_unit(self, unit: Unit, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            passed_on = {id(tensor) for tensor in tensors_of(inputs)}
            for tensor in tensors_of(output):
                if tensor.requires_grad and id(tensor) not in passed_on:
                    tensor.register_hook(lambda grad, unit=unit: self._before_backward(unit))
        if self._phase == "forward":  # in a recomputation the weights are still needed
            self._hide(unit)

    def _hide(self, unit: Unit) -> None:
        if self.zero == 3:
            for flat in unit.flats:
                if flat.sharded:
                    flat.hide()

    def _end_forward(self, output: Any) -> None:
        self._gather_through(len(self.units) - 1)
        with_graph = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
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
        if self.zero == 3 and torch.is_grad_enabled():
            raise ConfigError("zero=3 cannot keep a graph of the backward pass (create_graph); use zero 0, 1 or 2.")
        self._phase = "backward"
        self._next_item = 0
        self._squares = {}
        while self._reductions:  # of the round before: their buffers are written again now
            self._deliver()
        for flat in self.root.flats:  # there already, unless a pass without gradients came in between
            flat.gather()
            flat.show()
        for flat in self._trainable:
            flat.begin(alone=self.sync and not self._adding)
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
                if not flat.gathered:
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
        if self.zero == 3 and unit.regather and not flat.gathered:
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
            while len(self._reductions) >= IN_FLIGHT:
                self._deliver()
            self._reductions.append((unit, [self._reduce(flat) for flat in unit.trainable], self._is_last))
            while self._reductions and not self.overlap:
                self._deliver()

    def _reduce(self, flat: Flat) -> Handle[torch.Tensor]:
        if self._round is None:
            return owed.pay(flat, flat.reduce(self._scale, self._wire), None if self._compared else self._apart)
        assert self.tensor is None, "sums in a fixed order are over the data axis alone"
        return flat.reduce_round(self._round)

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
                self._square_early()
            while self._reductions:
                self._deliver()
            self._stale = self._stale or self.sync
            self._adding = not self.sync
            for flat in [] if self.sync else self._trainable:
                flat.deliver_unreduced()
        self._rest()
        if self.sync:
            self._refuse_apart()
            if self.shares_overflow:
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

    def _refuse_apart(self) -> None:
        """After the first reduction: gradients that differ over the tensor axis and should not."""
        if not self._compared:
            self._compared, apart, self._apart = True, self._apart, []
            owed.refuse(apart)
