"""Fused products on random data: whether they are right, and what they take.

Everything here is collective: every rank calls it alike.  `Operands` are one rank's inputs of a `Problem` and what the
product must equal, from plain collectives and an fp32 product; `error` is how far a run is off; `interleaved` times
several calls in turn, so that clocks and neighbours weigh on all of them alike, and counts the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.collectives import Group
from interlace.collectives.autograd import start_gather, start_reduce, start_scatter
from interlace.kernels.candidate import Candidate, Problem
from interlace.layout import split
from interlace.streams import On, current

IN_GRAPH = 8  # calls in one
SAMPLE = 4e-4  # seconds that one sample lasts, or one call if that takes longer
SLACK = 50e-6  # seconds that the device waits for the host beside what the host took before
MEETING = 300e-6  # that it waits beside, while the host hands out what lets ranks begin together
LONGEST = 20e-3  # that it waits
CLOCK = 2e9  # cycles/s of the multiprocessors, about; it scales how long the device waits, and nothing that is measured

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(eq=False)
class Operands:
    """One rank's part of a product.  x: [m K] of `split(M)` rows, or [M K]; weight [N K]; bias [N] or None.

    out: [M N], or [n N] of a reduce-scatter; gathered: [M K], where the rows of all ranks go, or None.
    """

    problem: Problem
    group: Group
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    gathered: Tensor | None

    @classmethod
    def random(cls, problem: Problem, group: Group, seed: int) -> Operands:
        """Normal numbers, other ones for every seed and rank; weights so that sums stay about 1."""
        M, N, K, device = problem.M, problem.N, problem.K, group.device
        generator = torch.Generator(device).manual_seed(seed * 1024 + group.rank)
        start, stop = split(M, group.size, group.rank)
        gathers, scatters = problem.op == "all_gather_matmul", problem.op == "matmul_reduce_scatter"

        def normal(*shape: int) -> Tensor:
            made = torch.zeros(shape, dtype=problem.dtype, device=device)
            return made.normal_(generator=generator)

        weight = normal(N, K).mul_(K**-0.5)
        out = torch.empty(stop - start if scatters else M, N, dtype=problem.dtype, device=device)
        gathered = torch.empty(M, K, dtype=problem.dtype, device=device) if gathers else None
        x = normal(stop - start if gathers else M, K)
        return cls(problem, group, x, weight, normal(N) if problem.bias else None, out, gathered)

    def without_rows(self) -> Operands:
        """The same, of which no way keeps the gathered rows."""
        return replace(self, gathered=None)

    def run(self, candidate: Candidate) -> None:
        """Once, into `out` and `gathered`."""
        if self.problem.op == "all_gather_matmul":
            weights, biases = [self.weight], [self.bias]
            candidate(self.x, weights, biases, self.group, self.problem.M, [self.out], self.gathered)
        else:
            candidate(self.x, self.weight, self.bias, self.group, self.out)

    def expected(self) -> tuple[Tensor, Tensor | None]:
        """(out, gathered) in fp32, by plain collectives and a product with fp32 sums."""
        group, gathered = self.group, None
        if self.problem.op == "all_gather_matmul":
            gathered = start_gather(self.x, group, self.problem.M).wait()
            out = _wide(gathered, self.weight)
        else:
            part = _wide(self.x, self.weight)
            start = start_scatter if self.problem.op == "matmul_reduce_scatter" else start_reduce
            out = start(part, group).wait()
        return out if self.bias is None else out + self.bias.float(), gathered

    def error(self, call: Call, expected: tuple[Tensor, Tensor | None]) -> float:
        """This rank's largest difference after `call()`, in units of the largest value; inf where not written."""
        results = [(self.out, expected[0])]
        if self.gathered is not None and expected[1] is not None:
            results.append((self.gathered, expected[1]))
        for got, _ in results:
            got.fill_(float("nan"))
        call()
        return max(difference(got, wanted) for got, wanted in results)


def _wide(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """The product of the same numbers in fp32, [M N]; on a GPU by the units that read 16 bits, which is far quicker."""
    if x_MK.device.type == "cuda" and x_MK.dtype.itemsize == 2:
        return torch.mm(x_MK, weight_NK.t(), out_dtype=torch.float32)
    return x_MK.float() @ weight_NK.float().t()


def tolerance(dtype: torch.dtype, world: int) -> float:
    """How far a right result may be off: 1e-5 in fp32; else a rounding of the result, and one of each rank's part."""
    return 1e-5 if dtype == torch.float32 else (world + 1) * torch.finfo(dtype).eps / 2


def difference(got: Tensor, wanted: Tensor) -> float:
    """The largest difference in units of the largest value; inf where `got` holds a NaN."""
    if got.numel() == 0:
        return 0.0
    off = (got.float() - wanted).abs().max().item()
    largest = wanted.abs().max().item()
    return off / max(largest, 1e-30) if off == off else float("inf")


# --- over ranks ------------------------------------------------------------------------------------------------------


def everyone(value: object, group: Group) -> list[object]:
    """What every rank of the group gives, by rank."""
    if group.process_group is None:
        return [value]
    found: list[object] = [None] * group.size
    with group.meter.waiting("numbers of a measurement", ""):
        dist.all_gather_object(found, value, group=group.process_group)
    return found


def worst(values: Sequence[float], group: Group) -> float:
    """The largest of all values of all ranks."""
    return max(max(rank) for rank in everyone(list(values), group))  # type: ignore[call-overload]


def attempt(call: Callable[[], T], group: Group) -> T | str:
    """What `call`, which meets no other rank, returns; or, on all alike, the first rank's sentence of why it failed."""
    said, value = "", None
    try:
        value = call()
    except Exception as error:
        lines = str(error).strip().splitlines()
        said = f"rank {group.ranks[group.rank]}: {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    reasons = [reason for reason in everyone(said, group) if reason]
    return str(reasons[0]) if reasons else value  # type: ignore[return-value]


# --- time ------------------------------------------------------------------------------------------------------------


def captured(call: Call, group: Group, times: int = IN_GRAPH) -> Call | str:
    """`times` calls as one CUDA graph, to be replayed; or, on every rank alike, the reason why there is none.

    Warmed up on the stream that it is captured on, where a candidate's workspace belongs.
    """
    device = group.device
    stream = torch.cuda.Stream(device)

    def capture() -> Call:
        stream.wait_stream(current(device))
        with On(stream):
            for _ in range(2):
                call()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with On(stream):  # torch.cuda.graph would collect garbage first, which takes longer than a row
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(times):
                    call()
            finally:
                graph.capture_end()
        current(device).wait_stream(stream)
        return graph.replay

    return attempt(capture, group)


@dataclass(frozen=True)
class Sample:
    """Seconds a call: of the device, and of the host that hands it out."""

    device: float
    host: float


def sample(call: Call, times: int, group: Group, ahead: float = 0.0) -> Sample:
    """One of `times` calls on this rank, begun when all ranks are there.

    ahead: seconds that the device first stands still on a GPU, so that the host has handed out what is timed before it
    begins, as in a training step; with less, what is timed of a short call is the host.
    """
    device = group.device
    if device.type != "cuda":
        everyone(None, group)
        began = time.perf_counter()
        for _ in range(times):
            call()
        took = (time.perf_counter() - began) / times
        return Sample(took, took)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin_together(ahead, device, group.process_group)
    begin.record()
    began = time.perf_counter()
    for _ in range(times):
        call()
    host = (time.perf_counter() - began) / times
    end.record()
    end.synchronize()
    return Sample(begin.elapsed_time(end) * 1e-3 / times, host)


def stand_still(seconds: float, device: torch.device) -> None:
    """What the current stream is given next begins about so much later; nothing on a CPU."""
    if device.type == "cuda" and seconds > 0:
        torch.cuda._sleep(int(min(seconds, LONGEST) * CLOCK))


def begin_together(seconds: float, device: torch.device, process_group: dist.ProcessGroup | None) -> None:
    """The same, at one moment on all ranks of a GPU each: how long a device stands still is its own clock's matter."""
    stand_still(seconds + (0.0 if process_group is None else MEETING), device)
    if device.type == "cuda" and process_group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=process_group)


def interleaved(
    calls: Mapping[str, Call], group: Group, rounds: int, batch: Mapping[str, int] | None = None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds a call, by name and round, and of the host (median), by name, each of the slowest rank.

    Every round runs all of them, each round from another on.  batch: calls that one of `calls` stands for (a graph of
    several); 1 when left out.
    """
    names, batch = list(calls), batch or {}
    times, ahead = {}, {}
    for name in names:
        warm = [sample(calls[name], 1, group) for _ in range(2)]  # the first may have more to do
        device, host = warm[1].device, min(each.host for each in warm)
        device, host = (worst([value], group) for value in (device, host))
        times[name] = min(100, max(1, round(SAMPLE / max(device, 1e-7))))
        ahead[name] = 1.5 * host * times[name] + SLACK
    own: dict[str, list[float]] = {name: [] for name in names}
    hosts: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = sample(calls[name], times[name], group, ahead[name])
            own[name].append(found.device / batch.get(name, 1))
            hosts[name].append(found.host / batch.get(name, 1))
    ranks: list[Any] = everyone((own, {name: statistics.median(values) for name, values in hosts.items()}), group)
    slowest = {name: [max(device[name][i] for device, _ in ranks) for i in range(rounds)] for name in names}
    return slowest, {name: max(host[name] for _, host in ranks) for name in names}
