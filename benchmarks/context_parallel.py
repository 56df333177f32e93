"""Attention over the context axis, forward and backward, beside the ideal and other libraries' context parallelism.

    torchrun --nproc-per-node N benchmarks/context_parallel.py [--lengths 4096,8192,...] [--heads 32/8x128]
        [--variants ring,gather,ulysses,torch-alltoall,torch-allgather,torch-alltoall-cudnn,torch-allgather-cudnn,
                    ringmaster-zigzag,ringmaster-ulysses]
        [--documents] [--library] [--rounds 9] [--out FILE]

One sequence of each length, N ranks.  The ideal is 1/N of what one device takes for the whole, by the quickest of
PyTorch's kernels (flash and cuDNN on a GPU; with --documents flash over runs): no transfer, no uneven work.  Shown are
ms, TFLOP/s a rank (4 H E a pair that is seen, 3.5 times that forward and backward), and the ideal's share of our time.
--documents packs documents as long as the files of Python's standard library, 4 bytes a token.  Before it is timed
each of ours is held against the whole on one device: exactly on a CPU, within bf16's rounding on a GPU.  Variants run
in turn, `--rounds` times; the median counts, of the rank that takes longest.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from interlace.collectives import Boxes, Group, Meter, between_all, make_groups, reach
from interlace.collectives.handle import between, now
from interlace.kernels.measure import SLACK, begin_together
from interlace.mesh import Mesh
from interlace.models.attention import AttentionCore, Pattern, attention
from interlace.models.layers import Context
from interlace.parallel.context import SplitCore, SplitPattern
from interlace.parallel.sequence import SequenceAxis

sys.path.append(str(Path(__file__).parent))

Run = Callable[[], None]
BYTES_PER_TOKEN = 4
VARIANTS = "ring,gather,ulysses,torch-alltoall,torch-allgather,torch-alltoall-cudnn,torch-allgather-cudnn"


def documents_of(length: int) -> Tensor:
    """A row of document numbers, [1 T] on the CPU: lengths as the files of the standard library, the last one cut."""
    root, sizes = Path(sysconfig.get_paths()["stdlib"]), list[int]()
    for path in sorted(root.glob("*.py")):
        sizes.append(max(1, path.stat().st_size // BYTES_PER_TOKEN))
        if sum(sizes) >= length:
            break
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[:length]
    return torch.nn.functional.pad(numbers, (0, length - len(numbers)), value=len(sizes))[None]


def seen_pairs(length: int, documents_BT: Tensor | None) -> int:
    """Pairs of a query and a key that it sees."""
    runs = torch.tensor([length]) if documents_BT is None else torch.bincount(documents_BT[0])
    return int((runs * (runs + 1) // 2).sum())


def split(axis: SequenceAxis, whole: Pattern, tensors: list[Tensor]) -> tuple[Run, list[Tensor]]:
    """Ours: a function that runs forward and backward once, and what it leaves (output and gradients)."""
    pattern = SplitPattern(axis, whole)
    pattern.prepare(tensors[0].dtype, tensors[0].shape[-1])
    core, at = SplitCore(AttentionCore(None, 0.0, "core"), axis), axis.columns().to(whole.device)
    none = torch.empty(0)
    context = Context(torch.zeros(1, dtype=torch.int64, device=whole.device), at, (none, none), {None: pattern})
    q, k, v, grad = (x[:, at].contiguous() for x in tensors)
    inputs, left = [x.requires_grad_() for x in (q, k, v)], list[Tensor]()

    def run() -> None:
        for x in inputs:
            x.grad = None
        out = core(*inputs, context)
        out.backward(grad)
        left[:] = [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    return run, left


def alone(whole: Pattern, tensors: list[Tensor], backend: SDPBackend | None) -> tuple[Run, list[Tensor]]:
    """The same of the whole sequence on one device."""
    inputs, left = [x.clone().requires_grad_() for x in tensors[:3]], list[Tensor]()

    def run() -> None:
        for x in inputs:
            x.grad = None
        with ExitStack() as stack:
            if backend is not None:
                stack.enter_context(sdpa_kernel(backend))
            out = attention(*inputs, whole)
            out.backward(tensors[3])
        left[:] = [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    return run, left


def timed(runs: dict[str, Run], group: Group, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of each: the median round of the rank that takes longest, and what the host took to enqueue it.

    The device stands still until the host is done with that, as it is in a step whose other layers come before.
    """
    device, times = group.device, {name: list[tuple[float, float]]() for name in runs}
    ahead = dict.fromkeys(runs, 0.0)
    gc.collect()
    gc.freeze()
    for number in range(rounds + 2):
        for name, run in runs.items():
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                begin_together(ahead[name], device, group.process_group)
            began, clock = now(device), time.perf_counter()
            run()
            enqueued = time.perf_counter() - clock
            ended = now(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken = between(began, ended) if device.type == "cuda" else time.perf_counter() - clock
            slowest = torch.tensor([taken, enqueued], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            ahead[name] = 1.5 * float(slowest[1]) + SLACK
            if number >= 2:
                times[name].append((float(slowest[0]), float(slowest[1])))
    first, second = ({name: statistics.median(v[i] for v in values) for name, values in times.items()} for i in (0, 1))
    return {name: (first[name], second[name]) for name in times}


def timed_native(name: str, tensors: list[Tensor], group: Group, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of one of PyTorch's own; none if it does not take these tensors."""
    import peers.torch_context as peer
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(group.device.type, (group.size,), mesh_dim_names=("cp",))
    _, rotate, kernel, *_ = [*name.split("-"), "flash"]
    with peer.attention(mesh, *tensors, rotate, kernel) as run:
        try:
            run()
        except RuntimeError as error:  # on any rank alike
            say(f"{name}: {str(error).splitlines()[0]}", group)
            return {}
        return timed({name: run}, group, rounds)


def say(line: str, group: Group) -> None:
    if group.rank == 0:
        print(line, file=sys.stderr, flush=True)


def check(name: str, found: list[Tensor], expected: list[Tensor], at: Tensor) -> None:
    """Raises unless both are equal, as far as their dtype goes."""
    limit = 1e-5 if found[0].dtype == torch.float32 else 2e-2
    for what, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v"), found, expected, strict=True):
        apart = ((a - b[:, at]).abs().max() / b.abs().max()).item()
        if not apart <= limit:
            raise SystemExit(f"{name}: the {what} is {apart:.1e} off, more than {limit:.0e}")


def measure(length: int, options: argparse.Namespace, group: Group, boxes: Boxes | None) -> list[str]:
    """Lines of the table for one length."""
    device = group.device
    heads, kv_heads, head_dim = (int(n) for n in options.heads.replace("x", "/").split("/"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn(1, length, n, head_dim, generator=made, device=device, dtype=torch.float32).to(dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    documents_BT = documents_of(length) if options.documents else None
    whole = Pattern(1, length, device, documents_BT)
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION] if device.type == "cuda" else [None]
    single = {
        f"one device{'' if backend is None else ' ' + backend.name.split('_')[0].lower()}": alone(
            whole, tensors, backend
        )
        for backend in (backends[:1] if options.documents else backends)
    }
    for name, (run, _) in list(single.items()):
        try:
            run()
        except RuntimeError:  # a kernel that does not take these tensors, on any rank alike
            del single[name]
    alone_times = timed({name: run for name, (run, _) in single.items()}, group, options.rounds)
    ideal = min(seconds for seconds, _ in alone_times.values()) / group.size
    expected = next(iter(single.values()))[1]
    runs: dict[str, Run] = {}
    native = []
    for name in options.variants.split(","):
        if name.startswith("torch"):
            if device.type == "cuda" and not options.documents:
                native.append(name)  # plain causal, by kernels of CUDA
            continue
        if name.startswith("ringmaster"):
            if options.documents or (device.type != "cuda" and "ulysses" not in name):
                continue  # packed documents are a dense mask there; its ring needs flash on CUDA
            import peers.ringmaster as ringmaster

            runs[name], left, at = ringmaster.attention(name.partition("-")[2], tensors)
            runs[name]()
            check(name, left, expected, at)
            continue
        axis = SequenceAxis(group, length, name, boxes)
        runs[name], left = split(axis, whole, tensors)
        runs[name]()
        check(name, left, expected, axis.columns().to(device))
    times = timed(runs, group, options.rounds)
    for name in native:  # by itself: what else runs meanwhile would be part of its ring
        times |= timed_native(name, tensors, group, options.rounds)
    flops = 3.5 * 4 * heads * head_dim * seen_pairs(length, documents_BT) / group.size
    lines = [f"| {length} | ideal | {1e3 * ideal:.3f} | - | {flops / ideal / 1e12:.1f} | 100.0 % |"]
    return lines + [
        f"| {length} | {name} | {1e3 * seconds:.3f} | {1e3 * host:.3f} | {flops / seconds / 1e12:.1f} | "
        f"{100 * ideal / seconds:.1f} % |"
        for name, (seconds, host) in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,16384,32768,131072")
    parser.add_argument("--heads", default="32/8x128", help="query heads / key-value heads x head size")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--documents", action="store_true")
    parser.add_argument("--library", action="store_true", help="exchange by NCCL also where copy engines can")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=120))
    group = make_groups(Mesh((("cp", size), ("dp", 1))), rank, device, 120.0, Meter(record=False))["cp"]
    boxes = between_all(group, 120.0) if cuda and not options.library and reach(group) else None
    kind = "packed documents" if options.documents else "plain causal"
    lines = [
        f"{size} ranks, {torch.cuda.get_device_name(device) if cuda else 'cpu'}, torch {torch.__version__}, "
        f"heads {options.heads}, {kind}, {' '.join(sys.argv[1:])}",
        "| length | variant | ms | host ms | TFLOP/s a rank | of the ideal |",
        "|---|---|---|---|---|---|",
    ]
    if rank == 0:
        print(*lines, sep="\n", flush=True)
    for length in (int(n) for n in options.lengths.split(",")):
        found = measure(length, options, group, boxes)
        lines += found
        if rank == 0:
            print(*found, sep="\n", flush=True)
    if options.out and rank == 0:
        Path(options.out).write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
