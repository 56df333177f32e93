"""A split module's state as whole tensors under the module's own names, and back.

Equals `state_dict` and `load_state_dict` of the module before it was wrapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from interlace.errors import CheckpointError, ConfigError
from interlace.parallel.run import Run, slice_of


def whole_state(module: nn.Module, flats: Sequence[Run]) -> dict[str, Any]:
    """The module's own `state_dict`, its parameters whole, from the main weights, in CPU memory.  Collective."""
    whole = {name: tensor.to("cpu", copy=True) for flat in flats for name, tensor in flat.whole(flat.main)}
    state: dict[str, Any] = module.state_dict()
    return {**state, **{name: whole[first] for name, first in first_names(module, flats).items()}}


def guard(module: nn.Module, serves: Callable[[], bool]) -> None:
    """Lets `state_dict` and `load_state_dict` of the module itself, and of modules inside it that have parameters, go
    on only while `serves()`: else they see gathered copies, which the next weights are not in, or parts of them."""
    for inner in module.modules():
        if next(inner.parameters(), None) is not None:
            inner.register_state_dict_pre_hook(_Guard("state_dict", serves))
            inner.register_load_state_dict_pre_hook(_Guard("load_state_dict", serves))


class _Guard:
    """A hook of a module.  That of its copy, or of what is read from its pickle, refuses nothing: such a module holds
    weights of its own."""

    def __init__(self, call: str, serves: Callable[[], bool] | None = None) -> None:
        self.call, self.serves = call, serves

    def __call__(self, *_: Any) -> None:
        if self.serves is not None and not self.serves():
            raise ConfigError(
                f"{self.call} of the wrapped module itself sees copies or parts of its weights, not those that are "
                f"trained; call {self.call} of what parallelize returned."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Guard, (self.call,)


def digests(flats: Sequence[Run], here: bool) -> list[str]:
    """A line for every parameter, its name and the blake2b of its main weights; none unless `here`.  Collective."""
    found = []
    for flat in flats:
        for name, tensor in flat.whole(flat.main):
            if here:
                values = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
                found.append(f"{name} {hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()}")
    return found


def outline(state: Mapping[str, Any]) -> list[str]:
    """What has to be the same on all ranks of a state that is loaded: names and sizes, without values."""
    return [
        f'"{name}" of {list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}'
        if not isinstance(value, Mapping)
        else f'"{name}" of {", ".join(map(str, value)) or "nothing"}'
        for name, value in sorted(state.items(), key=lambda entry: str(entry[0]))
    ]


def combined(lines: Iterable[str]) -> str:
    """The digest of the lines, each once, in their order."""
    return hashlib.blake2b("\n".join(sorted(set(lines))).encode(), digest_size=16).hexdigest()


def load_state(module: nn.Module, flats: Sequence[Run], state: Mapping[str, Any], strict: bool) -> Any:
    """Sets main weights and buffers from what `whole_state` returns.  Nothing is sent; gathered copies are now stale.

    Errors: `CheckpointError`, before anything changes, for a missing or unknown name (when `strict`), another shape,
    and two values of one parameter that has two names.  Returns missing and unexpected names, as torch does.
    """
    held = {member.name: (flat, member) for flat in flats for member in flat.members}
    first = first_names(module, flats)
    known = module.state_dict()
    missing = [name for name in known if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and missing:
        raise CheckpointError(f'the state lacks "{missing[0]}", which the module has; give strict=False to keep it.')
    if strict and unexpected:
        raise CheckpointError(f'the state has "{unexpected[0]}", which the module lacks; give strict=False to skip it.')
    for name, value in state.items():
        part = held[first[name]][1].part if name in first else None
        if isinstance(known.get(name), torch.Tensor):
            shape = known[name].shape if part is None else part.shape
            if value.shape != shape:
                raise CheckpointError(
                    f'"{name}" is {list(value.shape)} in the state and {list(shape)} in the module; load the state of '
                    "a module of the same sizes."
                )
    for name, held_as in first.items():
        one, other = state.get(name), state.get(held_as)
        if one is not None and other is not None and one is not other and not torch.equal(one.to(other), other):
            raise CheckpointError(
                f'"{name}" and "{held_as}" differ in the state and are one parameter of the module; untie them in the '
                "module, or leave one out of the state with strict=False."
            )
    rest = {name: value for name, value in state.items() if name in known and name not in first}
    found = module.load_state_dict(rest, strict=False)
    for name, held_as in first.items():
        if name in state:
            flat, member = held[held_as]
            flat.fill_whole(member, slice_of(state[name]))
    return found._replace(missing_keys=missing, unexpected_keys=unexpected)


def first_names(module: nn.Module, flats: Sequence[Run]) -> dict[str, str]:
    """Every name of every parameter -> the name under which it is held (another one if it is tied)."""
    held = {id(member.parameter): member.name for flat in flats for member in flat.members}
    return {name: held[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
