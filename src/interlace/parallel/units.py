"""What is gathered and reduced together: submodules, the parameters of each, and the buffers they pass through.

Equals one submodule after another, each with its own parameters and buffers.  But what of a unit shares a dtype, and is
all trained or all frozen, is one flat run (`parallel.run`); runs that are never needed at the same time share a buffer;
and where ranks reach each other's memory, buffers lie in it, so that peers read a transfer from where it was written.
"""

from __future__ import annotations

import fnmatch
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from interlace.collectives import Group, Window, make_windows, reach
from interlace.errors import ConfigError, ResourceError, nearest
from interlace.parallel.flat import Flat, Slot
from interlace.parallel.part import Part
from interlace.parallel.run import Member
from interlace.plan.zero import slots

ROOT = "root"
IN_FLIGHT = 2  # units whose gradients travel at the same time
Hybrid = tuple[Group, Group] | None  # the ranks that share one copy, and those that hold the same shard


@dataclass(eq=False)
class Unit:
    """A submodule whose parameters are gathered and reduced together.  `position` is its place in forward order."""

    name: str
    module: nn.Module
    position: int
    flats: list[Flat] = field(default_factory=list)
    regather: bool = True  # whether backward gathers the weights again
    gradients: set[tuple[int, int]] = field(default_factory=set)  # that backward makes: run and member, by number
    waiting_for: set[tuple[int, int]] = field(default_factory=set)
    reduced: bool = False

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    @property
    def gathered(self) -> bool:
        return all(flat.gathered for flat in self.flats)

    def gather(self) -> None:
        for flat in self.flats:
            flat.gather()

    def show(self) -> None:
        for flat in self.flats:
            flat.show()

    def hide(self) -> None:
        for flat in self.flats:
            if flat.is_passing:
                flat.hide()


def find_units(module: nn.Module, patterns: Sequence[str] | None) -> tuple[list[Unit], Unit]:
    """The units that the patterns name, in their order, and the root unit for everything else.

    Without patterns: the children of every `nn.ModuleList` that is not inside a unit already.
    """
    names = dict(module.named_modules())
    chosen: list[str] = []
    if patterns is None:
        for name, child in names.items():  # parents come before their children
            listed = isinstance(names.get(name.rpartition(".")[0]), nn.ModuleList)
            if listed and _is_called(child) and not any(name.startswith(f"{other}.") for other in chosen):
                chosen.append(name)
    for pattern in patterns or ():
        depth = pattern.count(".")
        found = [name for name in names if name.count(".") == depth and fnmatch.fnmatchcase(name, pattern)]
        if not found or pattern == "":
            known = nearest(pattern, filter(None, names))
            raise ConfigError(
                f'units names "{pattern}", but the module has no submodule of that name'
                + (f'; did you mean "{known}"?' if known else ".")
            )
        for name in found:
            if not _is_called(names[name]):
                raise ConfigError(
                    f'units names "{name}", a {type(names[name]).__name__}, which is never called itself; name its '
                    f'children: "{name}.*".'
                )
        chosen += [name for name in found if name not in chosen]
    units = [Unit(name, names[name], position) for position, name in enumerate(chosen)]
    for unit in units:
        owners = [inner for inner in unit.module.modules() if inner._parameters]
        unit.regather = not all(
            type(owner).forward is nn.Embedding.forward or not getattr(owner, "rereads", True) for owner in owners
        )
    return units, Unit(ROOT, module, len(units))


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own; a `ModuleList` has none."""
    return type(module).forward is not nn.Module.forward


def homes(module: nn.Module, units: Sequence[Unit], root: Unit) -> dict[int, Unit]:
    """id(parameter) -> the unit that it belongs to: the only one in which it is used, else the root."""
    used: dict[int, set[int]] = {}
    everyone = [*units, root]
    for path, owner in module.named_modules(remove_duplicate=False):
        inside = (at for at, unit in enumerate(units) if path == unit.name or path.startswith(unit.name + "."))
        at = next(inside, len(units))
        for parameter in owner._parameters.values():
            if parameter is not None:
                used.setdefault(id(parameter), set()).add(at)
    return {key: everyone[ats.pop()] if len(ats) == 1 else root for key, ats in used.items()}


def make_units(
    module: nn.Module,
    patterns: Sequence[str] | None,
    *,
    group: Group,
    hybrid: Hybrid,
    experts: tuple[Group, Hybrid] | None,
    zero: int,
    compute_dtype: torch.dtype | None,
    dims: Mapping[str, str],
    decay: Mapping[str, bool],
    parts: Mapping[str, Part],
) -> list[Unit]:
    """The units that have parameters, with their flat runs, and the root; of the arguments of `DataParallel`."""
    units, root = find_units(module, patterns)
    home = homes(module, units, root)
    members: dict[tuple[str, torch.dtype, bool, bool], tuple[Unit, list[Member]]] = {}
    for name, parameter in module.named_parameters():
        unit, part = home[id(parameter)], parts.get(name)
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
        assert experts is not None or not is_expert
        holders, sharing = experts if is_expert and experts is not None else (group, hybrid)
        inner, outer = sharing or (holders, None)
        unit.flats.append(Flat(label, found, holders, inner, outer, zero, trainable, computing, main))
    filled = [unit for unit in units if unit.flats]
    for position, unit in enumerate(filled):
        unit.position = position
    for unit in (all_units := [*filled, root]):
        unit.regather = unit.regather and zero == 3
    return all_units


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


def share(units: Sequence[Unit], root: Unit, distance: int) -> None:
    """Gives each run that needs one a slot to be gathered into; units `distance` or more apart share it (0 = none).

    The root's are its own, and so are those of experts, of which others hold the rest.
    """
    kinds = [(pairs, distance if inner.size > 1 else 0) for inner, pairs in _by_inner(units).items()]
    for pairs, apart in [*kinds, ([(flat, 0) for flat in root.flats], 0)]:
        placed = [(flat, position) for flat, position in pairs if flat.casts]
        for (flat, _), slot in zip(placed, choose_slots(placed, apart), strict=True):
            flat.slot = slot


def choose_slots(placed: Sequence[tuple[Flat, int]], distance: int) -> list[Slot]:
    """A buffer for each run at its position, in the dtype in which it computes, some shared as `plan.zero.slots` says
    (0 = none)."""
    totals, positions = [flat.numel for flat, _ in placed], [position for _, position in placed]
    chosen = slots(totals, positions, distance) if distance else range(len(placed))
    made: dict[tuple[int, torch.dtype], Slot] = {}
    found = []
    for (flat, _), number in zip(placed, chosen, strict=True):
        slot = made.setdefault((number, flat.compute_dtype), Slot(0, flat.compute_dtype, flat.main.device))
        slot.numel = max(slot.numel, flat.numel)
        found.append(slot)
    return found


def _by_inner(units: Sequence[Unit]) -> dict[Group, list[tuple[Flat, int]]]:
    """Runs and their positions by the ranks that share a copy: one kind, or two with experts that others have not."""
    found: dict[Group, list[tuple[Flat, int]]] = {}
    for unit in units:
        for flat in unit.flats:
            found.setdefault(flat.inner, []).append((flat, unit.position))
    return found


def open_windows(units: Sequence[Unit], transport: str) -> None:
    """Puts what peers read into memory that they reach: gathered copies, and gradients that travel as they arose.

    As many units' gradients as are on their way, and the one being written, have a place.  transport: see
    `DataParallel`.
    """
    if transport not in ("auto", "library", "copy"):
        raise ConfigError(f'transport="{transport}" is none of "auto", "library" and "copy".')
    for inner, pairs in _by_inner(units).items():
        placed = [(flat, position) for flat, position in pairs if flat.sharded]
        if placed and (transport == "copy" or (transport == "auto" and inner.device.type == "cuda")):
            _open(inner, placed, transport)


def _open(inner: Group, placed: Sequence[tuple[Flat, int]], transport: str) -> None:
    if not reach(inner):
        if transport == "copy":
            raise ConfigError(
                f'transport="copy" needs ranks of one host that reach each other\'s memory, and those along '
                f'{inner.axis} do not; use transport="auto".'
            )
        return
    leaving = [(flat, at) for flat, at in placed if flat.trainable and flat.compute_dtype != flat.main_dtype]
    outboxes = choose_slots(leaving, IN_FLIGHT + 1)
    for (flat, _), slot in zip(leaving, outboxes, strict=True):
        flat.outbox = slot
        if inner.device.type == "cuda" and flat.main_dtype == torch.float32:
            from interlace.kernels.ordered_rows import sum_rows  # needs Triton

            flat.add = sum_rows
    arriving = [flat.slot for flat, _ in placed if flat.slot is not None]
    try:
        for found in (dict.fromkeys(arriving), dict.fromkeys(outboxes)):
            for slot, window in zip(found, make_windows(inner, [slot.nbytes for slot in found]), strict=True):
                slot.window = window
    except ResourceError as error:  # of every rank alike
        if transport == "copy":
            raise
        warnings.warn(f"gradients and weights travel by the library: {error}", stacklevel=2)
        for flat, _ in placed:
            flat.outbox = flat.add = None
            if flat.slot is not None:
                flat.slot.window = None


def windows_of(slots: Iterable[Slot | None]) -> list[Window]:
    """Each window once, in order."""
    return list(dict.fromkeys(slot.window for slot in slots if slot is not None and slot.window is not None))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers and dataclasses."""
    leaves = tree_leaves(value)
    inside = [vars(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)]
    return [leaf for leaf in leaves + tree_leaves(inside) if isinstance(leaf, torch.Tensor)]


def when_ready(parameter: nn.Parameter, method: Callable[..., None], part: object, *rest: int) -> int:
    """Calls `method(part, *rest)` whenever the parameter's gradient is there; returns the hook's number.

    PyTorch keeps such hooks where the garbage collector does not look: what they hold would never go, and that is the
    whole engine.  So they hold nothing; the hooks of modules hold the engine as long as there is a module.
    """
    found, of = weakref.WeakMethod(method), weakref.ref(part)

    def hook(parameter: object) -> None:
        call, alive = found(), of()
        if call is not None and alive is not None:
            call(alive, *rest)

    number: int = parameter.register_post_accumulate_grad_hook(hook).id
    return number
