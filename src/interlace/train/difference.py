"""Tensors of a plan beside those of one process: when two are equal, and what a tensor that should be zero tells.

    max |a - b|  <=  1e-5 * max |reference|

is equal.  An elementwise relative error would not do: sums that cancel lose digits in any order.

A sum may cancel whole, or nearly.  Gradients of q and k where a query sees one key, whose softmax is 1 whatever the
score, are zero in theory and rounding noise in practice; a key's bias moves all scores of a query almost alike, which a
softmax does not see, and what is left of its gradient may be a thousandth of the summands.  Their own size is no scale
then.  So a tensor that differs is asked for once more by the same one process, in fp64, where noise is 1e-9 of what it
is in fp32, and in fp32 from weights whose last bit is another.

A tensor whose largest value in fp64 is below 1e-12 of the largest gradient of its unit (its layer) is zero in theory,
and one whose true gradient is merely small is not.  What it is zero of is products of the sizes that the other
gradients of the unit have, and those sizes are its scale:

    max |a - b|  <=  1e-5 * max |gradients of the unit|

Both a and b then are noise, far below it; a fault that leaves anything of the size of its summands (a term of the
softmax's backward lost on one rank, a part added twice before it cancels) is far above it.  For a weight that began as
zero and moved by such gradients alone, the scale is that times the rates of all steps.

Of any other tensor one process knows how far its own rounding goes:

    max |a - b|  <=  4 * max |b - fp64|,    b on the right: of one process in fp32, the largest of three runs

Three, since one of them may be near fp64 by luck: of tensors that differed in models drawn at random, a plan was off
from fp64 by up to 21 times as much as one process, and by up to 3 times as much as the worst of three.  A fault is a
difference of the tensor's own size and stays far above that, unless the tensor is nothing but noise.  Weights in their
last bit may also move a token to another expert, which is no rounding: more is never allowed than a thousandth of the
tensor's own largest value, or the 1e-5 of its unit's where that is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

TOLERANCE = 1e-5
ZERO = 1e-12  # of the unit's largest gradient, in fp64
AS_EXACT = 4  # times what one process is off by
MOST = 1e-3  # of a tensor's largest value: more is no rounding, whatever one process is off by
NUDGED = ("nudged-0", "nudged-1")  # runs of one process in fp32 from weights whose last bit is another


@dataclass(frozen=True)
class Difference:
    """The largest difference of a tensor, in units of the reference's largest value.

    of_unit: the tensor is zero in theory, and the unit is the largest gradient of its layer.
    rounding: what one process is off by itself leaves room for, in the same units; 0.0 where nobody asked.
    """

    name: str
    error: float
    of_unit: bool = False
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        return self.error <= self.allowed  # not-a-number is not

    @property
    def allowed(self) -> float:
        return max(TOLERANCE, self.rounding)


@dataclass(frozen=True)
class Truth:
    """What one process says in fp64, and how far from that one in fp32 is.

    run: leaves both in `folder`, and says whether there was room; called when it is needed.
    units: parameter -> its unit.  moved: by how much of its gradients a weight moves in all steps.
    """

    folder: Path
    run: Callable[[], bool]
    units: Mapping[str, str]
    moved: float

    def judged(self, found: Difference, what: str, name: str, apart: float) -> Difference:
        """A difference that is too large for the tensor's own size, beside that of its unit and rounding."""
        if name not in self.units or not self.run():
            return found
        with safe_open(self.folder / "gradient-exact", "pt") as exact:
            near = [other for other in exact.keys() if self.units.get(other) == self.units[name]]  # noqa: SIM118
            unit = max(_largest(exact.get_tensor(other)) for other in near)
        unit *= self.moved if what == "weight" else 1.0
        true, *others = (self._of(run, what, name) for run in ("exact", "reference", *NUDGED))
        own, scale = _largest(true), _largest(others[0])
        if own <= ZERO * unit:
            return Difference(f"{found.name}, which is 0 but for rounding", relative(apart, unit), of_unit=True)
        rounding = AS_EXACT * max(_largest(other - true) for other in others)
        room = min(rounding, max(MOST * own, TOLERANCE * unit))
        return replace(found, rounding=room / scale) if scale > 0 else found

    def _of(self, run: str, what: str, name: str) -> torch.Tensor:
        with safe_open(self.folder / f"{what}-{run}", "pt") as file:
            return file.get_tensor(name).double()


def compare(
    plan: Sequence[Path], reference: Path, what: str, truth: Truth, order: Sequence[str]
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
            yield found if found.equal else truth.judged(found, what, name, apart)


def relative(apart: float, scale: float) -> float:
    return apart / scale if scale > 0 else (0.0 if apart == 0 else math.inf)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
