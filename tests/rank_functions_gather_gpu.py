"""What ranks on GPUs run for the tests of the fused all-gather and product; kernels are compiled."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from interlace.collectives import Group, Meter, make_groups
from interlace.kernels import workspace
from interlace.kernels.candidate import Candidate, Options, Tile, candidates, forced
from interlace.kernels.gather_matmul import gather_matmul
from interlace.layout import split
from interlace.mesh import Mesh
from interlace.symmetric import SymmetricHeap
from interlace.world import World

OP = "all_gather_matmul"
LOOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}  # of the largest value: one rounding
SHAPES = ((1, 512, 256), (64, 1024, 512), (1000, 520, 264), (4091, 1280, 1032))
ODD = ((3, 5, 9), (301, 129, 77))  # rows of neither factor begin at 16 bytes
SHORT = ((1, 8, 16), (500, 264, 136))
TILES = (
    Tile(128, 256, 64, 8, 8, 4, True, 2),
    Tile(128, 128, 64, 8, 8, 5),
    Tile(64, 256, 64, 8, 4, 4),
    Tile(64, 64, 64, 4, 4, 4, False),
)


def group_of(world: World) -> Group:
    assert world.device is not None
    meter = Meter(world.waiting, record=False)
    return make_groups(Mesh.parse(f"tp={world.size}"), world.rank, world.device, 60.0, meter)["tp"]


class Case:
    """One shape: this rank's factors, `sets` different contents of the rows, and what each should give, in fp32."""

    def __init__(self, group: Group, M: int, N: int, K: int, dtype: torch.dtype, sets: int = 2, bias: bool = True):
        self.group, self.M = group, M
        made = [torch.randn(M, K, generator=torch.Generator().manual_seed(number)) for number in range(sets)]
        self.whole = [x.to(dtype).to(group.device) for x in made]
        start, stop = split(M, group.size, group.rank)
        self.own = [x[start:stop].clone() for x in self.whole]
        generator = torch.Generator().manual_seed(100 + group.rank)
        self.weight = torch.randn(N + 8 * group.rank, K, generator=generator).to(dtype).to(group.device)
        self.bias = torch.randn(len(self.weight), generator=generator).to(dtype).to(group.device) if bias else None
        wide = None if self.bias is None else self.bias.float()
        self.expected = [F.linear(x.float(), self.weight.float(), wide) for x in self.whole]
        self.x = torch.empty_like(self.own[0])
        self.out = torch.empty(M, len(self.weight), dtype=dtype, device=group.device)
        self.gathered = torch.empty(M, K, dtype=dtype, device=group.device)
        self.worst = torch.zeros((), device=group.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=group.device)

    def call(self, candidate: Candidate, options: Options, keep: bool) -> None:
        gathered = self.gathered if keep else None
        candidate.run(self.x, [self.weight], [self.bias], self.group, self.M, [self.out], gathered, options=options)

    def run(self, candidate: Candidate, number: int = 0, options: Options | None = None, keep: bool = True) -> None:
        """One call with poisoned outputs; its error is kept on the device."""
        self.x.copy_(self.own[number])
        self.out.fill_(float("nan"))
        self.gathered.fill_(float("nan"))
        self.call(candidate, options or Options(), keep)
        self.judge(number, keep)

    def judge(self, number: int, keep: bool) -> None:
        expected = self.expected[number]
        apart = ((self.out.float() - expected).abs().max() / expected.abs().max()).nan_to_num(nan=1e9)
        self.worst.copy_(torch.maximum(self.worst, apart))
        if keep:
            self.wrong += (self.gathered != self.whole[number]).sum()

    def check(self, what: object) -> None:
        assert self.worst.item() <= LOOSE[self.out.dtype], (what, self.worst.item())
        assert self.wrong.item() == 0, (what, "gathered")


def values(world: World) -> int:
    """Every candidate on even and odd shapes, in three types, and the tiles that a table may name."""
    group = group_of(world)
    done = 0
    for dtype, shapes in ((torch.bfloat16, (*SHAPES, *ODD)), (torch.float16, SHORT), (torch.float32, (*SHORT, *ODD))):
        for shape in shapes:
            case = Case(group, *shape, dtype)
            for name in ("plain", "chunks", "chained", "persistent", "put", "push"):
                for number, chunks in enumerate((None, 3)):
                    case.run(candidates(OP)[name], number, Options(chunks=chunks), keep=number == 0)
                case.check((name, shape, dtype))
                done += 1
    case = Case(group, 1500, 1000, 520, torch.bfloat16)
    for tile in TILES:
        for number in range(2):
            case.run(candidates(OP)["persistent"], number, Options(tile, 2))
        case.check(tile)
        done += 1
    workspace.check(group)
    workspace.release(group)
    return done


def sharing_a_gpu(heap: SymmetricHeap) -> int:
    """The same where ranks are threads of one GPU.  Errors are looked at once all kernels have been compiled."""
    group = Group("tp", tuple(range(heap.size)), heap.rank, heap.device, Meter(record=False))
    made: list[tuple[str, Case]] = []
    with workspace.on(heap, group):
        for M, N, K in (*SHAPES, *ODD):
            for name in ("chunks", "chained", "persistent", "put", "push"):
                case = Case(group, M, N, K, torch.bfloat16)
                for number in (0, 1, 0):
                    case.run(candidates(OP)[name], number, Options(chunks=2))
                made.append((name, case))
        heap.synchronize()
    for name, case in made:
        case.check((name, case.M))
    return len(made)


def thousand(world: World, names: list[str]) -> int:
    """1,000 calls of each with changing rows on two groups and two streams, ranks late now and then."""
    group = group_of(world)
    other = group.like(process_group=dist.new_group(list(range(world.size))))
    cases = [Case(each, 520, 264, 128, torch.bfloat16, sets=4) for each in (group, other)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    streams[1].wait_stream(streams[0])
    late = torch.Generator().manual_seed(world.rank)
    for name in names:
        for number in range(1000):
            for case, stream in zip(cases, streams, strict=True):
                with torch.cuda.stream(stream):
                    if torch.rand((), generator=late).item() < 0.02:
                        torch.cuda._sleep(int(4e6 * torch.rand((), generator=late).item()))  # up to some 2 ms
                    case.run(candidates(OP)[name], number % 4, Options(chunks=1 + number % 2), keep=number % 3 == 0)
        torch.cuda.synchronize()
        for case in cases:
            case.check(name)
            workspace.check(case.group)
    for each in (group, other):
        workspace.release(each)
    return 1000 * len(names)


def interleaved_streams(world: World) -> int:
    """One operation of one group from two streams in turn: calls follow each other."""
    group = group_of(world)
    cases = [Case(group, 300 + 100 * number, 264, 128, torch.bfloat16) for number in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for number in range(100):
        for case, stream, name in zip(cases, streams, ("persistent", "push"), strict=True):
            with torch.cuda.stream(stream):
                case.run(candidates(OP)[name], number % 2)
    torch.cuda.synchronize()
    for case in cases:
        case.check("streams")
    workspace.release(group)
    return 100


def replays(world: World, names: list[str]) -> int:
    """Two calls captured in a graph, replayed with new rows, and calls of the host between; graphs of each in turn."""
    group = group_of(world)
    cases = [Case(group, M, 520, 256, torch.bfloat16, sets=4) for M in (520, 300)]
    workspace.count_in_memory(group)
    graphs = {name: captured(cases, candidates(OP)[name]) for name in names}
    workspace.check(group)
    for number in range(50):
        for name, graph in graphs.items():
            for case in cases:
                case.x.copy_(case.own[number % 4])
                case.out.fill_(float("nan"))
                case.gathered.fill_(float("nan"))
            graph.replay()
            for case in cases:
                case.judge(number % 4, keep=True)
            if number % 10 == 9:
                cases[0].run(candidates(OP)[name], 1)
    torch.cuda.synchronize()
    for case in cases:
        case.check("replays")
    workspace.check(group)
    graphs.clear()
    workspace.release(group)
    return 50 * len(names)


def captured(cases: list[Case], candidate: Candidate) -> torch.cuda.CUDAGraph:
    def calls() -> None:
        for case in cases:
            case.call(candidate, Options(chunks=2), keep=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    return graph


def gradients(world: World, pairs: list[list[str]]) -> int:
    """`gather_matmul` with fused candidates against the plain composition: results and gradients in fp32 and bf16."""
    group = group_of(world)
    done = 0
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for sizes, keep in (((264,), True), ((264,), False), ((512, 256), True)):
            found = [one_pass(group, names, sizes, keep, dtype) for names in (["plain", "plain"], *pairs)]
            for other in found[1:]:
                for a, b in zip(found[0], other, strict=True):
                    apart = (a.float() - b.float()).abs().max() / a.float().abs().max()
                    assert apart.item() <= limit, (dtype, sizes, keep, apart.item())
                done += 1
    workspace.release(group)
    return done


def one_pass(group: Group, names: list[str], sizes: tuple[int, ...], keep: bool, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of one forward and backward."""
    M, K = 520, 264
    start, stop = split(M, group.size, group.rank)

    def made(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(group.device)

    x = made(M, K, seed=0)[start:stop].clone().requires_grad_()
    weights = [made(n, K, seed=n + group.rank).requires_grad_() for n in sizes]
    biases = [made(n, seed=9 * n + group.rank).requires_grad_() for n in sizes]
    with forced(names[0]), forced(names[1]):
        out = gather_matmul(x, weights, biases, group, M, keep=keep)
        torch.autograd.backward(out, [made(M, n, seed=5 * n) for n in sizes])
    return [*(y.detach() for y in out), *(each.grad for each in (x, *weights, *biases) if each.grad is not None)]
