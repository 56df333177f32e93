"""Which way of running a product beside its transfer is quickest here: from a table of measurements, never by trying.

`lookup(problem, device)` equals reading one line of `tuned/DEVICE.json` (`kernels.table` has its form); it allocates
nothing, runs nothing and asks no other rank, so that it may stand in a step, and gives every rank the same answer to
the same question.

A shape class that was not measured is priced by `plan.fused`, each candidate by the factor that its nearest measured
shapes of the same product, dtype and ranks show over their own prices.  Where there are none, `auto` is "plain": a
guess is no reason to leave the composition that always works.  Both are said once.

`tune(problem, group)` measures: every candidate that does not refuse, of long products in several numbers of chunks,
first against the reference on fresh data, then in interleaved rounds; the median of the slowest rank counts.  Gathered
rows are compared, but not kept while the time is taken.  A candidate with wrong numbers is named and left out.  Ties
within 1 % go to "plain".
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from interlace.collectives import Group, Meter, make_groups
from interlace.errors import ConfigError, NumericsError
from interlace.kernels import measure
from interlace.kernels.candidate import Candidate, Options, Problem, Tile, candidates, problem_of, way_of
from interlace.kernels.measure import Operands
from interlace.kernels.table import DTYPES, LAUNCHED, NAMES, Entry, Table, options_to, path_of
from interlace.mesh import Mesh
from interlace.plan import overlap
from interlace.plan.fused import predict
from interlace.topology import Topology
from interlace.world import World

POLICIES = ("auto", "plain", "fused", "off")
PLAIN = "plain"
TIE = 0.01  # of the time of "plain", that another must be quicker by

# What a search tries beside a candidate's own choice: chunks in which a rank's rows travel, and tiles, of which an H200
# ran its products fastest in bf16 with one or another of these.
CHUNKS = (1, 2, 4)
LONG = 2048  # rows, from which on the number of chunks is measured without being asked for
TILES = (
    Tile(128, 256, 64, 8, 8, 4, True, 2),
    Tile(128, 256, 64, 8, 8, 3, True, 1),
    Tile(128, 128, 64, 8, 8, 5, True, 1),
    Tile(64, 256, 64, 8, 4, 4, True, 1),
)


# --- choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """source: "table", "model" (priced, beside measured neighbours where there are any), or "default"; seconds: what it
    was chosen by."""

    name: str
    source: str
    options: Options = field(default_factory=Options)
    seconds: Mapping[str, float] = field(default_factory=dict)


def lookup(problem: Problem, device: torch.device, policy: str = "auto") -> tuple[str, Options]:
    """The name of the candidate to run, and its options.

    policy: "auto" takes a fused one where the device's table, or shapes near by in it, say that it wins; "fused" the
    best that is not "plain", by the model where nothing is measured; "plain" and "off" are "plain".
    """
    choice = _choice(problem, device, policy)
    return choice.name, choice.options


@functools.cache
def shipped(device: str) -> Table:
    """The package's table of a device, read once; an empty one for a device that has none."""
    return Table.load(path_of(device), device)


@functools.lru_cache(maxsize=1 << 14)
def _choice(problem: Problem, device: torch.device, policy: str) -> Choice:
    name = device_name(device)
    made = choose_from(shipped(name), problem, device, policy)
    asked = policy in ("auto", "fused") and problem.world > 1
    if asked and device.type == "cuda" and made.source != "table":
        _say(name, problem.op, NAMES.get(problem.dtype, str(problem.dtype)), problem.world, made.source)
    return made


@functools.cache
def _say(device: str, op: str, dtype: str, world: int, source: str) -> None:
    how = "are chosen by the cost model" if source == "model" else 'run "plain"'
    warnings.warn(
        f"shapes that the table of {device} lacks ({op}, {dtype}, {world} ranks) {how}; interlace tune measures one.",
        stacklevel=4,
    )


def choose_from(table: Table, problem: Problem, device: torch.device, policy: str = "auto") -> Choice:
    """`lookup` in any table."""
    if policy not in POLICIES:
        raise ConfigError(f"overlap must be one of {', '.join(POLICIES)}, found {policy}")
    names = [name for name, it in candidates(problem.op).items() if it.refuses(problem, device) is None]
    others = [name for name in names if name != PLAIN]
    if policy in ("plain", "off") or problem.world == 1 or not others or 0 in (problem.M, problem.N, problem.K):
        return Choice(PLAIN, "default")
    entry, near = table.find(problem), table.around(problem)
    if entry is not None:
        seconds, source, near = dict(entry.seconds), "table", [(0.0, entry)]
    elif near or policy == "fused":
        seconds, source = estimates(near, problem, device), "model"
    else:
        return Choice(PLAIN, "default")
    known = {name: seconds[name] for name in names if name in seconds}
    if policy == "fused":
        known.pop(PLAIN, None)
    name = quickest(known, problem.op) if known else (others[0] if policy == "fused" else PLAIN)
    options = next((entry.options_of(name) for _, entry in near if name in entry.seconds), Options())
    return Choice(name, source, options, seconds)


def quickest(seconds: Mapping[str, float], op: str) -> str:
    """The name with the least; within a tie "plain", or else one whose kernels do not wait for peers."""
    best = min(seconds, key=seconds.__getitem__)
    if PLAIN in seconds and seconds[best] > (1 - TIE) * seconds[PLAIN]:
        return PLAIN
    others = _without_waits(seconds, op)
    other = min(others, key=others.__getitem__, default=best)
    return other if seconds[best] > (1 - TIE) * seconds[other] else best


def _without_waits(seconds: Mapping[str, float], op: str) -> dict[str, float]:
    """Those candidates whose products hold no multiprocessor while they wait for a peer."""
    known = candidates(op)
    return {name: value for name, value in seconds.items() if name in known and not known[name].single_kernel}


def estimates(near: Sequence[tuple[float, Entry]], problem: Problem, device: torch.device) -> dict[str, float]:
    """Seconds by candidate: the model's, times what it was off by at the nearest measured shapes.

    near: (octaves away, entry).  Candidates that the model does not know grow with the product.
    """
    topology = Topology.from_device_name(device_name(device))
    dtype = NAMES.get(problem.dtype, "")
    places = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def prices(M: int, N: int, K: int) -> dict[str, float]:
        if topology is None or dtype not in topology.peak_flops:
            return {}
        return predict(topology, problem.op, M, N, K, dtype, problem.world, places)

    own = prices(problem.M, problem.N, problem.K)
    if not near:
        return own
    offs: dict[str, list[tuple[float, float]]] = {}
    for octaves, entry in near:
        there = prices(entry.M, entry.N, entry.K)
        for name, seconds in entry.seconds.items():
            price = there.get(name) or entry.M * entry.N * entry.K
            offs.setdefault(name, []).append((2.0**-octaves, math.log(seconds / price)))
    volume = problem.M * problem.N * problem.K
    return {
        name: (own.get(name) or volume) * math.exp(sum(w * off for w, off in found) / sum(w for w, _ in found))
        for name, found in offs.items()
    }


def planned(device: str, dtype: str) -> overlap.Chooser:
    """What "auto" takes on a device of that name, by its table alone, where the device itself is not at hand: a shape
    that was not measured is taken for the nearest that was.  dtype: "fp32", "fp16" or "bf16"."""
    table = shipped(device)

    def way(product: overlap.Product, ranks: int) -> overlap.Way:
        problem = problem_of(product, DTYPES[dtype], ranks)
        entry = table.find(problem) or next((entry for _, entry in table.around(problem)), None)
        if entry is None:
            return overlap.PLAIN
        name = quickest(entry.seconds, product.op)
        if product.terms > 1 and name not in overlap.WHOLE_ROWS:
            return overlap.PLAIN
        return way_of(name, entry.options_of(name))

    return way


def device_name(device: torch.device) -> str:
    """As its driver names it; "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def num_gpus() -> int:
    """GPUs of this machine; 0 without any."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def identity(device: torch.device) -> str:
    """The table that choices on this device come from, for a run's records: the device's name and a digest."""
    name = device_name(device)
    return f"{name} {shipped(name).digest}"


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """samples: seconds a call, by candidate and round, of the slowest rank; errors: how far each is off, of the largest
    value; wrong: why one that ran was left out; refused: why one cannot run this problem."""

    problem: Problem
    device: str
    samples: Mapping[str, Sequence[float]]
    options: Mapping[str, Options]
    errors: Mapping[str, float]
    wrong: Mapping[str, str]
    refused: Mapping[str, str]

    @property
    def seconds(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.samples.items()}

    @property
    def best(self) -> str:
        return quickest(self.seconds, self.problem.op)

    @property
    def entry(self) -> Entry:
        problem, made = self.problem, f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
        seconds = {name: float(f"{value:.4g}") for name, value in self.seconds.items()}
        options = {name: given for name in seconds if (given := options_to(self.options[name]))}
        shape = (problem.M, problem.N, problem.K)
        return Entry(problem.op, NAMES[problem.dtype], problem.world, *shape, seconds, options, dict(self.wrong), made)

    def lines(self) -> Iterator[str]:
        """The measurement as text, the quickest first."""
        seconds, best = self.seconds, self.best
        for name in sorted(seconds, key=seconds.__getitem__):
            low, middle, high = (1e6 * pick(self.samples[name]) for pick in (min, statistics.median, max))
            yield (
                f"{name:<12}{middle:>12.1f} us   ({low:.1f} to {high:.1f})   "
                f"{seconds[PLAIN] / seconds[name]:.3f} x plain   error {self.errors[name]:.1e}"
                f"{'   ' + said if (said := _said(self.options[name])) else ''}{'   <- chosen' if name == best else ''}"
            )
        yield from (f"{name:<12}WRONG: {why}" for name, why in self.wrong.items())
        yield from (f"{name:<12}cannot run this: {why}" for name, why in self.refused.items())


def _said(options: Options) -> str:
    words = [] if options.chunks is None else [f"chunks={options.chunks}"]
    if (tile := options.tile) is not None:
        words.append(f"tile={tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.warps} warps, {tile.stages} stages")
    return " ".join(words)


def able(problem: Problem, device: torch.device) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The candidates that can run a problem, and why the others cannot."""
    reasons = {name: it.refuses(problem, device) for name, it in candidates(problem.op).items()}
    can = {name: it for name, it in candidates(problem.op).items() if reasons[name] is None}
    return can, {name: reason for name, reason in reasons.items() if reason is not None}


def verify(
    ways: Mapping[str, Candidate],
    group: Group,
    operands: Sequence[Operands],
    expected: Sequence[tuple[Tensor, Tensor | None]],
) -> tuple[dict[str, float], dict[str, str]]:
    """The error of each right candidate, and the reason against each wrong one, on all of `operands`.

    They hold different numbers, so that what an earlier run left behind shows.  expected: of each.
    """
    right, wrong = {}, {}
    limit = measure.tolerance(operands[0].problem.dtype, group.size)

    def error(candidate: Candidate) -> float:
        pairs = zip(operands, expected, strict=True)
        return max(given.error(functools.partial(given.run, candidate), wanted) for given, wanted in pairs)

    for name, candidate in ways.items():
        found = measure.attempt(functools.partial(error, candidate), group)
        if isinstance(found, str):
            wrong[name] = found
            continue
        most = measure.worst([found], group)
        if most <= limit:
            right[name] = most
        else:
            wrong[name] = f"off by {most:.2g} of the largest value, allowed is {limit:.2g}"
    return right, wrong


def cuts(candidate: Candidate, problem: Problem) -> list[Candidate]:
    """The candidate as it is, and of a long product in the other numbers of chunks that need no kernel of their own."""
    counts = CHUNKS if candidate.cuts and problem.M >= LONG and candidate.options == Options() else ()
    return [candidate, *(replace(candidate, options=Options(chunks=count)) for count in counts)]


def variants(candidate: Candidate, device: torch.device) -> list[Candidate]:
    """The candidate with the options that a search tries: its own choice, then chunks, and tiles on a GPU."""
    tiles = TILES if candidate.single_kernel and device.type == "cuda" else ()
    options = [Options(), *(Options(chunks=count) for count in CHUNKS), *(Options(tile=tile) for tile in tiles)]
    return [replace(candidate, options=each) for each in options]


def tune(problem: Problem, group: Group, rounds: int = 11, search: bool = False, seed: int = 0) -> Measured:
    """Measures the candidates of a problem.  Collective over `group`, on whose device they run.

    search: also other chunks and tiles than each candidate's own choice; on a GPU every tile is compiled first.
    Errors: `NumericsError` when "plain" is wrong, beside which nothing can be judged.
    """
    in_graphs = group.device.type == "cuda" and problem.M <= LAUNCHED
    if in_graphs:
        group = group.like()  # a group of its own: what a graph has captured changes how a workspace counts its calls
    can, refused = able(problem, group.device)
    ways = {name: cuts(candidate, problem) for name, candidate in can.items()}
    if search:
        ways = {name: variants(it, group.device) if name != PLAIN else [it] for name, it in can.items()}
    flat = {f"{name} {number}": way for name, found in ways.items() for number, way in enumerate(found)}
    operands = [Operands.random(problem, group, 2 * seed + number) for number in range(2)]
    right, wrong = verify(flat, group, operands, [given.expected() for given in operands])
    calls: dict[str, measure.Call] = {}
    batch: dict[str, int] = {}
    for label in right:
        call: measure.Call = Turns([given.without_rows() for given in operands], flat[label])
        if in_graphs:
            graphed = measure.captured(call, group)
            if not isinstance(graphed, str):
                call, batch[label] = graphed, measure.IN_GRAPH
            elif flat[label].name != PLAIN:  # which is judged as it is
                wrong[label] = f"no CUDA graph can hold it ({graphed})"
                continue
        calls[label] = call
    if f"{PLAIN} 0" not in calls:
        reason = wrong[f"{PLAIN} 0"]
        raise NumericsError(f'{problem.op}: "plain" failed ({reason}); see whether this machine works as it should.')
    samples, _ = measure.interleaved(calls, group, rounds, batch)
    if in_graphs:
        from interlace.kernels import workspace  # needs Triton

        calls.clear()
        workspace.release(group)
    return _best_of_each(problem, group, flat, samples, right, wrong, refused)


def _best_of_each(
    problem: Problem,
    group: Group,
    flat: Mapping[str, Candidate],
    samples: Mapping[str, Sequence[float]],
    errors: Mapping[str, float],
    wrong: Mapping[str, str],
    refused: Mapping[str, str],
) -> Measured:
    """The quickest variant of each candidate; one counts as wrong when none of its variants is right."""
    chosen = quickest_variants(samples, flat)
    against: dict[str, str] = {}
    for label, why in wrong.items():
        name, said = flat[label].name, _said(flat[label].options)
        if name not in chosen or said:
            against.setdefault(f"{name} ({said})" if said and name in chosen else name, why)
    return Measured(
        problem,
        device_name(group.device),
        {name: list(samples[label]) for name, label in chosen.items()},
        {name: flat[label].options for name, label in chosen.items()},
        {name: errors[label] for name, label in chosen.items()},
        against,
        refused,
    )


def quickest_variants(samples: Mapping[str, Sequence[float]], flat: Mapping[str, Candidate]) -> dict[str, str]:
    """The label of each candidate's quickest variant; a candidate's own choice of options within a tie."""

    def cost(label: str) -> float:
        return statistics.median(samples[label]) * (1.0 if flat[label].options == Options() else 1 / (1 - TIE))

    found: dict[str, str] = {}
    for label in sorted(samples, key=cost):
        found.setdefault(flat[label].name, label)
    return found


class Turns:
    """A call that takes the next operands each time, so that no cache holds them all."""

    def __init__(self, operands: Sequence[Operands], candidate: Candidate) -> None:
        self.operands, self.candidate, self.number = operands, candidate, 0

    def __call__(self) -> None:
        self.number += 1
        self.operands[self.number % len(self.operands)].run(self.candidate)


def run(
    world: World, ops: Sequence[str], M: int, N: int, K: int, dtype: str, bias: bool, rounds: int, search: bool
) -> list[dict[str, Any]]:
    """What a rank of `interlace tune` does: {"title", "device", "entry", "lines"} of each product."""
    meter = Meter(world.waiting, record=False)
    group = make_groups(Mesh((("tp", world.size),)), world.rank, world.device, world.timeout, meter)["tp"]
    found = []
    for op in ops:
        world.status(operation=f"measuring {op}")
        problem = Problem(op, M, N, K, DTYPES[dtype], world.size, bias)
        title = f"{op} {M} x {N} x {K} {dtype} on {world.size} ranks"
        if world.rank == 0:
            print(f"tune: {title}", file=sys.stderr, flush=True)
        measured = tune(problem, group, rounds, search)
        found.append(
            {"title": f"{title} of {measured.device}", "device": measured.device, "entry": asdict(measured.entry)}
            | {"lines": list(measured.lines())}
        )
    return found
