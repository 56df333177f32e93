"""Weights that are read where their unit does not run: a neighbour's matrix, a decoder tied to its encoder.

A unit's weights are gathered for the run of its module.  Elsewhere they are absent, and read as NaN.  So the graph of a
forward pass is looked at: a node that takes a parameter of a unit, and was made while the unit's module did not run,
has read it elsewhere.  Nodes are numbered in the order in which they are made, so that the numbers at the beginning and
the end of a run tell.  Nothing stands around the pass itself, and functions in it may be compiled.

Not seen: what is read without a gradient, and what a later pass reads that the first ones do not: both read NaN where
the unit has not run yet.  Not refused: a `torch.autograd.Function`, which may run the unit inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from interlace.errors import ConfigError
from interlace.parallel.units import Unit


class Reads:
    """`begin` and `look` stand around a forward pass; `found` are the units of all passes."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.found: set[Unit] = set()
        self._units = units
        self._homes = {
            id(member.parameter): (unit, member.name, flat.is_passing)
            for unit in units
            for flat in unit.trainable
            if flat.slot is not None
            for member in flat.members
        }
        self._hooks: list[Any] = []
        self._start = 0
        self._runs: dict[Unit, list[tuple[float, float]]] = {}  # first node's number, and the one behind the last

    def begin(self) -> None:
        self._end()
        self._start = _number()
        self._runs = {unit: [] for unit in self._units}
        for unit in self._units:
            runs = self._runs[unit]
            self._hooks += [
                unit.module.register_forward_pre_hook(lambda *_, runs=runs: eagerly(_open, runs)),
                unit.module.register_forward_hook(lambda *_, runs=runs: eagerly(_close, runs)),
            ]

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def look(self, outputs: Iterable[torch.Tensor]) -> None:
        """Finds units, or says `ConfigError` for one whose weights are absent where they were read."""
        self._end()
        runs, self._runs = self._runs, {}
        waiting: list[Any] = [tensor.grad_fn for tensor in outputs if runs]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node._sequence_nr() < self._start:
                continue
            seen.add(node)
            for above, _ in node.next_functions:
                unit, name, passes = self._homes.get(id(getattr(above, "variable", None)), (None, "", False))
                if unit is None:
                    waiting.append(above)
                elif not any(start <= node._sequence_nr() < stop for start, stop in runs[unit]):
                    self.found.add(unit)
                    if passes and not isinstance(node, torch.autograd.function.BackwardCFunction):
                        raise ConfigError(
                            f"{name} was read while {unit.name} did not run, where zero=3 has no weights of it; use "
                            f"zero=2, or name all units but {unit.name} in `units`, or read it inside of {unit.name}."
                        )


class Look:
    """A hook of a module that no unit holds: calls `look(name)` before it runs.

    That of its copy, or of what is read from its pickle, looks at nothing, and none keeps the wrapped module alive.
    """

    def __init__(self, name: str, look: Callable[[], Callable[[str], None] | None] | None = None) -> None:
        self.name, self.look = name, look

    def __call__(self, *_: Any) -> None:
        if self.look is not None and (look := self.look()) is not None:
            eagerly(look, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Look, (self.name,)


def _number() -> int:
    """Of the node that is made next."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


@torch._disable_dynamo  # type: ignore[attr-defined]
def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Calls it where its caller is compiled, too: outside of the graph."""
    return function(*args)


def _open(runs: list[tuple[float, float]]) -> None:
    runs.append((_number(), math.inf))


def _close(runs: list[tuple[float, float]]) -> None:
    runs[-1] = runs[-1][0], _number()
