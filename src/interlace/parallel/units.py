"""Which submodules of a module are gathered and reduced together, and which of them each parameter belongs to."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from interlace.errors import ConfigError, nearest
from interlace.parallel.flat import Flat

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


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers and dataclasses."""
    leaves = tree_leaves(value)
    inside = [vars(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)]
    return [leaf for leaf in leaves + tree_leaves(inside) if isinstance(leaf, torch.Tensor)]


def when_ready(parameter: nn.Parameter, method: Callable[..., None], part: object, *rest: int) -> None:
    """Calls `method(part, *rest)` whenever the parameter's gradient is there.

    PyTorch keeps such hooks where the garbage collector does not look: what they hold would never go, and that is the
    whole engine.  So they hold nothing; the hooks of modules hold the engine as long as there is a module.
    """
    found, of = weakref.WeakMethod(method), weakref.ref(part)

    def hook(parameter: object) -> None:
        call, alive = found(), of()
        if call is not None and alive is not None:
            call(alive, *rest)

    parameter.register_post_accumulate_grad_hook(hook)
