"""PyTorch's ways to run a product beside its transfer: one after the other with NCCL at its best, async-TP, and the
one-shot sum of symmetric memory.

    serial      a collective and a cuBLAS product, over NCCL as it is (`default`), over buffers in a symmetric window
                (`window`), with copy engines in the place of multiprocessors (`zero-cta`, all-gathers only)
    async-tp    torch.ops.symm_mem.fused_all_gather_matmul, fused_matmul_reduce_scatter
    one-shot    cuBLAS and torch.ops.symm_mem.one_shot_all_reduce

Every way leaves its result where `result` finds it, so that it can be held against the reference like a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.collectives import Group
from interlace.collectives.ops import _all_gather_single
from interlace.kernels.measure import Operands
from interlace.layout import split

_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SLAB = 1 << 31  # bytes registered once for all rows, on a GPU
SMALL_SLAB = 1 << 25  # of the one-shot sum


@dataclass(eq=False)
class Way:
    """One library's way for one rank's operands."""

    call: Callable[[], object]
    result: Callable[[], Tensor]


@dataclass(eq=False)
class Memory:
    """Bytes that rows take their buffers from, one after another; with none, fresh tensors."""

    slab: Tensor | None
    group: dist.ProcessGroup | None
    used: int = field(default=0)

    def begin(self) -> None:
        self.used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if self.slab is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        if self.used + nbytes > self.slab.numel():
            raise RuntimeError(f"the registered {self.slab.numel() >> 20} MiB are too few for this row")
        start, self.used = self.used, self.used + -(-nbytes // 512) * 512
        return self.slab[start : start + nbytes].view(dtype).view(shape)


def serial(given: Operands, memory: Memory) -> Way:
    """The collective and the product, one after the other.  Rows that do not divide travel padded."""
    problem, group, device = given.problem, memory.group, given.x.device
    M, N, K, world, dtype = problem.M, problem.N, problem.K, problem.world, problem.dtype
    most = -(-M // world)
    if problem.op == "all_gather_matmul":
        sent, every = memory.take((most, K), dtype, device), memory.take((most * world, K), dtype, device)
        sent[: len(given.x)].copy_(given.x)
        used = _packer(every, M, world)

        def gathers() -> None:
            _all_gather_single(every, sent, group=group)
            _product(used(), given, given.out)

        return Way(gathers, lambda: given.out)
    if problem.op == "matmul_reduce_scatter":
        part, own = memory.take((most * world, N), dtype, device), memory.take((most, N), dtype, device)
        place = _packer(part, M, world)
        rows = len(given.out)

        def scatters() -> None:
            if most * world == M:
                _product(given.x, given, part)
            else:
                place(given.x @ given.weight.t())
            _reduce_scatter_single(own, part, group=group)

        return Way(scatters, lambda: own[:rows])
    whole = memory.take((M, N), dtype, device)

    def reduces() -> None:
        _product(given.x, given, whole)
        dist.all_reduce(whole, group=group)

    return Way(reduces, lambda: whole)


def _product(x_MK: Tensor, given: Operands, out: Tensor) -> None:
    torch.mm(x_MK, given.weight.t(), out=out)


def _packer(padded: Tensor, count: int, world: int) -> Callable[..., Tensor]:
    """() -> the rows of a padded buffer that count, or (rows) -> the buffer with them in their places."""
    most = len(padded) // world
    bounds = [split(count, world, rank) for rank in range(world)]

    def pack(rows: Tensor | None = None) -> Tensor:
        if rows is None:
            if count == len(padded):
                return padded
            parts = [padded[rank * most : rank * most + stop - start] for rank, (start, stop) in enumerate(bounds)]
            return torch.cat(parts)
        for rank, (start, stop) in enumerate(bounds):
            padded[rank * most : rank * most + stop - start].copy_(rows[start:stop])
        return padded

    return pack


def async_tp(given: Operands, group: Group) -> Way:
    """PyTorch's decomposed products; rows must divide."""
    problem = given.problem
    if problem.M % problem.world:
        raise RuntimeError(f"{problem.M} rows do not divide by {problem.world}")
    assert group.process_group is not None
    name, made = group.process_group.group_name, list[Tensor]()
    ops = torch.ops.symm_mem

    def call() -> None:
        if problem.op == "all_gather_matmul":
            _, found = ops.fused_all_gather_matmul(given.x, [given.weight.t()], 0, name)
            made[:] = [found[0]]
        else:
            made[:] = [ops.fused_matmul_reduce_scatter(given.x, given.weight.t(), "sum", 0, name)]

    return Way(call, lambda: made[0])


def one_shot(given: Operands, memory: Memory, group: Group) -> Way:
    """cuBLAS into symmetric memory, then every rank reads all parts and adds them up."""
    assert group.process_group is not None
    name, made = group.process_group.group_name, list[Tensor]()
    memory.begin()  # always at the start of the slab, which is what was rendezvoused
    part = memory.take((given.problem.M, given.problem.N), given.problem.dtype, given.x.device)

    def call() -> None:
        _product(given.x, given, part)
        made[:] = [torch.ops.symm_mem.one_shot_all_reduce(part, "sum", name)]

    return Way(call, lambda: made[0])


# --- set up once -----------------------------------------------------------------------------------------------------


def window(group: Group) -> Memory:
    """Memory in a symmetric window of the group's own communicator."""
    assert group.process_group is not None
    return _registered(group.process_group, group.device)


def zero_cta(group: Group) -> Memory:
    """The same of a communicator whose policy is to take no multiprocessor."""
    library = dist.ProcessGroupNCCL
    options = library.Options()
    options.config.cta_policy = library.NCCL_CTA_POLICY_ZERO
    made = dist.new_group(list(group.ranks), backend="nccl", pg_options=options)
    return _registered(made, group.device)


def _registered(process_group: dist.ProcessGroup, device: torch.device) -> Memory:
    dist.all_reduce(torch.zeros(1, device=device), group=process_group)  # a communicator is made at its first use
    torch.cuda.synchronize(device)
    backend = process_group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        slab = torch.empty(SLAB, dtype=torch.uint8, device=device)
    backend.register_mem_pool(pool, symm=True)
    memory = Memory(slab, process_group)
    memory.pool = pool  # type: ignore[attr-defined]
    return memory


def shared(group: Group) -> Memory:
    """Symmetric memory of torch, for the one-shot sum."""
    import torch.distributed._symmetric_memory as symmetric

    assert group.process_group is not None
    slab = symmetric.empty(SMALL_SLAB, dtype=torch.uint8, device=group.device)
    symmetric.rendezvous(slab, group.process_group.group_name)
    return Memory(slab, group.process_group)
