"""Ways to do one product whose rows or sums travel, and which of them is taken.

Every way of an operation ("candidate") fills the same output from the same input, so they can be swapped per shape:
`choose(problem, device)` equals looking the shape up, and "plain", the composition of a collective and a product, is
always among them.

    all_gather_matmul       run(x_mK, weights, biases, group, count, out, gathered=None, options=Options())
    matmul_reduce_scatter   run(x_MK, weight_NK, bias, group, out_nN, options=Options())
    matmul_all_reduce       run(x_MK, weight_NK, bias, group, out_MN, options=Options())

`kernels/<op>.py` registers its own.  All ranks of a group take the same candidate, or they wait for each other in vain:
a `Problem` therefore holds the same numbers on every rank, also where their slices differ by some rows or columns.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from interlace.collectives import Group
from interlace.errors import ConfigError, nearest
from interlace.layout import split
from interlace.plan.overlap import PLAIN, WHOLE_ROWS, Chooser, Product, Way

CUT = 2.0**38  # FLOPs of a GPU's product, from which on cutting it pays for running it beside the library's transfer
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True)
class Tile:
    """Sizes of one program's piece of a product, and how it is compiled.

    group: block rows that are taken together, so that their columns of the other factor are read once from memory.
    warps, stages: of Triton.  flatten: the loops over tiles and over K as one, so that the next tile's loads begin
    under the last one's stores.  parts: pieces in which a finished tile is stored; more need less shared memory.
    split: pieces along K of each tile of the last round, where that has fewer tiles than the GPU has multiprocessors;
    0: as many pieces as multiprocessors in all, of equal length.  Of `tile.matmul` alone, other kernels do not look at
    it.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3
    flatten: bool = True
    parts: int = 1
    split: int = 1


@dataclass(frozen=True)
class Options:
    """What a candidate may be told: its tile, and in how many chunks a rank's rows travel.  None: its own choice."""

    tile: Tile | None = None
    chunks: int | None = None


@dataclass(frozen=True)
class Problem:
    """M: rows of the whole product; N: columns a rank computes; K: inner size on a rank.  The same on every rank: where
    slices differ, N (all-gather) or K (the others) is the whole number over the ranks, rounded up."""

    op: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    world: int
    bias: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.M * self.N * self.K


@dataclass(frozen=True)
class Candidate:
    """One way.  single_kernel: bytes move inside the product's kernel, or it waits for them tile by tile.

    refuses: (problem, device) -> why it cannot run, None if it can; the same answer on every rank.  cuts: rows travel
    in as many chunks as it is told, with no other kernel for another number.
    """

    name: str
    op: str
    single_kernel: bool
    refuses: Callable[[Problem, torch.device], str | None]
    run: Callable[..., None]
    options: Options = field(default_factory=Options)
    cuts: bool = False

    def __call__(self, *args: Any, **named: Any) -> None:
        """`run` with this candidate's options; the group's meter is told a kernel's FLOPs, which nobody else sees."""
        self.run(*args, options=self.options, **named)
        if self.single_kernel and self.op == "all_gather_matmul":
            x, weights, _, group, count = args[:5]
            group.meter.flops += 2 * count * x.shape[1] * sum(len(weight) for weight in weights)
        elif self.single_kernel:
            x, weight, _, group = args[:4]
            group.meter.flops += 2 * x.numel() * len(weight)


def refuse_misfits(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: Group, count: int | None = None
) -> None:
    """`ConfigError` for operands that a kernel would read beyond their ends, or as another type.

    count: rows of all ranks together where `x` is this rank's part of them.
    """
    K, place = x.shape[-1], (x.dtype, x.device)
    for weight, bias in zip(weights, biases, strict=True):
        if weight.dim() != 2 or weight.shape[1] != K or (bias is not None and bias.shape != weight.shape[:1]):
            added = "" if bias is None else f" and a bias {list(bias.shape)}"
            raise ConfigError(
                f"x {list(x.shape)} times a weight {list(weight.shape)}{added}; give the weight as [out, {K}], the "
                "bias as [out]."
            )
        others = [tensor for tensor in (weight, bias) if tensor is not None and (tensor.dtype, tensor.device) != place]
        if others:
            raise ConfigError(
                f"x of {x.dtype} on {x.device} times a weight or bias of {others[0].dtype} on {others[0].device}; give "
                "all in one type, on one device."
            )
    if x.device.type != group.device.type:
        raise ConfigError(f"x is on {x.device}, and the group's ranks meet on {group.device}; move x there.")
    if count is not None:
        start, stop = split(count, group.size, group.rank)
        if x.shape[:-1].numel() != stop - start:
            raise ConfigError(
                f"x has {x.shape[:-1].numel()} rows on rank {group.rank} of {group.size}, whose share of {count} is "
                f"{stop - start}; rows are split evenly, the first ranks having one more."
            )


CALM = ("plain", "off")  # policies that never take another
CANDIDATES: dict[str, dict[str, Candidate]] = {op: {} for op in OPS}
_FORCED: list[tuple[str, Options]] = []  # of the whole process: backward runs in threads of its own


def pays_to_cut(flops: float, device: torch.device) -> bool:
    """Whether "plain" cuts a product, so that a part of it runs beside the library's transfer.

    On GPUs only a long one: the transfer takes multiprocessors, parts fill the last round of tiles worse, and streams
    wait for each other (two H200s: 20 to 40 us slower than one after the other up to 0.1 ms; above 1 ms between 1 %
    slower and 4 % quicker).
    """
    return device.type != "cuda" or flops >= CUT


def register(candidate: Candidate) -> Candidate:
    """Called where an op's module is imported."""
    CANDIDATES[candidate.op][candidate.name] = candidate
    return candidate


def candidates(op: str) -> dict[str, Candidate]:
    """All of an operation, by name."""
    if not CANDIDATES[op]:
        importlib.import_module(f"interlace.kernels.{op}")
    return CANDIDATES[op]


@contextmanager
def forced(name: str, options: Options | None = None) -> Iterator[None]:
    """Inside the block, operations that have a candidate of that name take it; the innermost block counts.

    Not per thread.  `choose` raises ConfigError where the candidate refuses.
    """
    known = {each for op in OPS for each in candidates(op)}
    if name not in known:
        close = nearest(name, known) or "plain"
        raise ConfigError(f'no operation has a candidate "{name}"; did you mean "{close}"?')
    _FORCED.append((name, options or Options()))
    try:
        yield
    finally:
        _FORCED.pop()


def choose(problem: Problem, device: torch.device, policy: str = "auto") -> Candidate:
    """The candidate for a problem: forced, or as the table says by a policy (see `kernels.tune.lookup`), or "plain"."""
    known = candidates(problem.op)
    for name, options in reversed(_FORCED):
        if name in known:
            reason = known[name].refuses(problem, device)
            if reason is not None:
                raise ConfigError(f'"{name}" for {problem.op}: {reason}; take "plain".')
            return replace(known[name], options=options)
    if problem.world > 1:
        from interlace.kernels import tune  # it measures what registers here

        name, options = tune.lookup(problem, device, policy)
        return known[name] if options == known[name].options else replace(known[name], options=options)
    return known["plain"]


def pick(problem: Problem, group: Group, policy: str = "auto", terms: int = 1) -> Candidate | None:
    """`choose` for a group; None for "plain", as it is for a group of one and where memory of peers is out of reach.

    terms: products that the problem is the sum of; several are plain but for candidates that move whole rows.
    Collective at its first call for a group that does not take "plain".  On a CPU nothing but an explicit choice, which
    loads Triton, is other than plain.
    """
    asked = policy == "fused" or group.device.type != "cpu"
    if group.size == 1 or (not asked and "triton" not in sys.modules) or (policy in CALM and not _FORCED):
        return None
    chosen = choose(problem, group.device, policy)
    if chosen.name == "plain" or (terms > 1 and chosen.name not in WHOLE_ROWS):
        return None
    from interlace.kernels import workspace  # needs Triton

    if not workspace.reachable(group):
        warnings.warn(
            f"{problem.op} along {group.axis}: plain, since ranks cannot address each other's memory", stacklevel=2
        )
        return None
    return chosen


def way_of(name: str, options: Options) -> Way:
    """A candidate with its options, as the planner counts it."""
    tile = options.tile
    return Way(name, tile.block_m if tile else 0, tile.block_n if tile else 0, options.chunks or 0)


def problem_of(product: Product, dtype: torch.dtype, ranks: int) -> Problem:
    """A product of the planner's."""
    return Problem(product.op, product.M, product.N, product.K, dtype, ranks, product.has_bias)


def ways(group: Group, dtype: torch.dtype, policy: str) -> Chooser:
    """How the products of a plan run along a group, for `plan.share` and `plan.memory`."""

    def way(product: Product, ranks: int) -> Way:
        assert ranks == group.size
        chosen = pick(problem_of(product, dtype, ranks), group, policy, product.terms)
        return PLAIN if chosen is None else way_of(chosen.name, chosen.options)

    return way
