"""Tensors of a plan beside those of one process: when two are equal, and what a tensor that should be zero tells.

    max |a - b|  <=  1e-5 * max |reference|

is equal.  An elementwise relative error would not do: sums that cancel lose digits in any order.

A sum may cancel whole: gradients of q and k where a query sees one key, whose softmax is 1 whatever the score, are zero
in theory and rounding noise in practice, other noise in each order of additions.  A difference of noises says nothing,
and no scale of the tensor's own does: its reference and all summands that reach it are noise too.  So a tensor that
differs is asked for once more in fp64, by the same one process.  There noise is 1e-9 of what it is in fp32: a tensor
whose largest value in fp64 is below 1e-12 of the largest gradient of its unit (its layer) is zero in theory, and one
whose true gradient is merely small is not.  What it is zero of is products of the sizes that the other gradients of the
unit have, and those sizes are its scale:

    max |a - b|  <=  1e-5 * max |gradients of the unit|

Both a and b then are noise, far below it; a fault that leaves anything of the size of its summands (a term of the
softmax's backward lost on one rank, a part added twice before it cancels) is far above it.  For a weight that began as
zero and moved by such gradients alone, the scale is that times the rates of all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

TOLERANCE = 1e-5
ZERO = 1e-12  # of the unit's largest gradient, in fp64


@dataclass(frozen=True)
class Difference:
    """The largest difference of a tensor, in units of the reference's largest value.

    of_unit: the tensor is zero in theory, and the unit is the largest gradient of its layer.
    """

    name: str
    error: float
    of_unit: bool = False

    @property
    def equal(self) -> bool:
        return self.error <= TOLERANCE  # not-a-number is not


@dataclass(frozen=True)
class Zeros:
    """Which tensors are zero in theory.

    exactly: runs the reference in fp64, which leaves `gradient-exact` and `weight-exact`; called when it is needed.
    units: parameter -> its unit.  moved: by how much of its gradients a weight moves in all steps.
    """

    folder: Path
    exactly: Callable[[], bool]
    units: Mapping[str, str]
    moved: float

    def scale(self, what: str, name: str) -> float:
        """The scale of a tensor that is zero in theory; 0.0 for any other, and where fp64 could not run."""
        if name not in self.units or not self.exactly():
            return 0.0
        with safe_open(self.folder / "gradient-exact", "pt") as exact:
            near = [other for other in exact.keys() if self.units.get(other) == self.units[name]]  # noqa: SIM118
            largest = max(_largest(exact.get_tensor(other)) for other in near)
        scale = largest * (self.moved if what == "weight" else 1.0)
        with safe_open(self.folder / f"{what}-exact", "pt") as exact:
            return scale if _largest(exact.get_tensor(name)) <= ZERO * scale else 0.0


def compare(
    plan: Sequence[Path], reference: Path, what: str, zeros: Zeros, order: Sequence[str]
) -> Iterator[Difference]:
    """The tensors of all stages with the reference's, in an order of names, others behind; what two stages hold must
    have the same bits on both."""
    places = {name: place for place, name in enumerate(order)}
    with ExitStack() as stack:
        stages = [stack.enter_context(safe_open(path, "pt")) for path in plan]
        theirs = stack.enter_context(safe_open(reference, "pt"))
        names = sorted(theirs.keys(), key=lambda name: (places.get(name, len(places)), name))
        holders = {name: [stage for stage in stages if name in set(stage.keys())] for name in names}
        missing = [name for name in names if not holders[name]]
        yield from (Difference(f"{what} of {name} (missing)", math.inf) for name in missing)
        for name in names:
            if name in missing:
                continue
            a, b = holders[name][0].get_tensor(name), theirs.get_tensor(name)
            if not all(torch.equal(a, other.get_tensor(name)) for other in holders[name][1:]):
                yield Difference(f"{what} of {name}, which stages hold differently", math.inf)
            apart = _largest(a - b)
            found = Difference(f"{what} of {name}", relative(apart, _largest(b)))
            if not found.equal and (scale := zeros.scale(what, name)):
                found = Difference(f"{what} of {name}, which is 0 but for rounding", relative(apart, scale), True)
            yield found


def relative(apart: float, scale: float) -> float:
    return apart / scale if scale > 0 else (0.0 if apart == 0 else math.inf)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
