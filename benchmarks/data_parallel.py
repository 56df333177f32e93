"""One training step over the data axis, beside PyTorch's DDP and FSDP2: ms, tokens/s/GPU, MFU, peak memory.

    torchrun --nproc-per-node N benchmarks/data_parallel.py [--model 1.2b] [--variants ours-zero3,fsdp2,...]
        [--rounds 7] [--steps 3] [--profile] [--out FILE]

All variants hold the same model and take the same random tokens; they run in turn, `--steps` steps each, `--rounds`
times, and the median round counts.  First, step 1 of each is checked against one GPU in fp32: loss and gradient norm.
A peak is what a variant adds to what the others keep.  Variants: ours-zeroZ, fsdp2 (ZeRO-3), fsdp2-keep (ZeRO-2), ddp;
with the suffix -eager without compilation of the blocks, -bf16 with gradients reduced in bf16, -off (ours) with every
transfer waited for at once, -nccl (ours) with NCCL's kernels where copy engines would do.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from interlace import spec
from interlace.collectives import Groups, Meter, make_groups
from interlace.collectives.handle import Record, between, now
from interlace.config import ModelConfig, TrainSection, load
from interlace.mesh import Mesh
from interlace.models.decoder import Decoder, initial_value, initialise
from interlace.parallel.data import DataParallel
from interlace.streams import kept_by_graphs
from interlace.topology import Topology
from interlace.train import optimizer as optimizers
from interlace.train import recompute
from interlace.train.data import Batch
from interlace.train.step import train_step

sys.path.append(str(Path(__file__).parent))
import peers.torch_native as native

SEED = 0
CLIP = 1.0


@dataclass
class Variant:
    name: str
    step: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]  # loss and gradient norm of one step
    resident: int = 0
    peak: int = 0
    outside: int = 0  # bytes that torch's allocator does not count
    graphs: bool = False  # replays CUDA graphs, whose memory all such variants of a process share
    host: list[float] = field(default_factory=list)  # ms that the host took to hand a step out
    record: Record | None = None  # of the last step's waits and transfers


def random_batch(cfg: ModelConfig, sequences: int, length: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randint(0, cfg.vocab_size, (sequences, length + 1), generator=generator)
    positions = torch.arange(length).repeat(sequences, 1)
    numbers = torch.arange(sequences) + rank * sequences
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, positions * 0, numbers, False)


def decoder(cfg: ModelConfig, device: torch.device | str, compiled: bool, replayed: bool = False) -> Decoder:
    made = Decoder(cfg, device=device, dtype=torch.float32)
    if torch.cuda.is_available():
        from interlace.kernels.softmax_rows import softmax_rows

        made.head.softmax_rows = softmax_rows
    recompute.apply(made, "none", compiled, replayed)
    return made


def ours(name: str, cfg: ModelConfig, groups: Groups, device: torch.device) -> Variant:
    train = TrainSection(clip=CLIP, weight_decay=0.1)
    table = {parameter.name: parameter for parameter in spec.parameters(cfg)}
    model = DataParallel(
        decoder(cfg, "meta", "-eager" not in name, "-graphs" in name),
        groups["dp"],
        zero=int(name.split("-")[1].removeprefix("zero")),
        units=("embedding", "blocks.*", "head"),
        gradients="sum",
        compute_dtype=torch.bfloat16,
        wire_dtype=torch.bfloat16 if "-bf16" in name else None,
        overlap="-off" not in name,
        transport="library" if "-nccl" in name else "auto",
        materialise=lambda n, start, stop: initial_value(table[n], SEED, start, stop - start, device, torch.float32),
        decay={n: p.decay for n, p in table.items()},
    )
    model.module.head.vocabulary.scratch = model.spare_memory
    optimizer = optimizers.build(train, model)

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        made = train_step(model, optimizer, [batch], groups.host, clip_norm=CLIP)
        variant.record = groups["dp"].meter.cut()
        return made.loss, made.grad_norm

    variant = Variant(name, step, outside=model.window_bytes)
    return variant


def peer(name: str, cfg: ModelConfig, device: torch.device, ranks: int) -> Variant:
    plain = decoder(cfg, device, "-eager" not in name)
    initialise(plain, cfg, SEED)
    decays = {parameter.name: parameter.decay for parameter in spec.parameters(cfg)}
    named = dict(plain.named_parameters())
    if name.startswith("ddp"):
        model: nn.Module = native.ddp(plain, device)
    else:
        reduce_dtype = torch.bfloat16 if "-bf16" in name else torch.float32
        model = native.fsdp2(plain, device, ranks, "keep" not in name, reduce_dtype)
        named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decays[n]], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if not decays[n]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    run = model if name.startswith("ddp") else model.loss

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels, positions, documents, samples = batch.to(device)
        count = labels.numel() * ranks
        total, _ = run(tokens, labels, positions, documents, samples)
        (total * ranks / count).backward()  # both average over ranks
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = total.detach() / count
        if ranks > 1:
            dist.all_reduce(loss)
        return loss, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    return Variant(name, step)


def reference(cfg: ModelConfig, batches: list[Batch], device: torch.device) -> tuple[float, float]:
    """Loss and gradient norm of the global batch on one GPU, fp32, a sequence at a time."""
    model = decoder(cfg, device, False)
    initialise(model, cfg, SEED)
    count = sum(batch.labels_BT.numel() for batch in batches)
    loss = 0.0
    for batch in batches:
        for row in range(len(batch.tokens_BT)):
            one = Batch(*(t[row : row + 1] for t in (batch.tokens_BT, batch.labels_BT, batch.positions_BT)),
                        batch.documents_BT[row : row + 1], batch.samples_B[row : row + 1], False)  # fmt: skip
            total, _ = model.loss(*one.to(device))
            (total / count).backward()
            loss += total.item() / count
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    return loss, norm


def timed(variant: Variant, batch: Batch, steps: int, device: torch.device) -> float:
    """ms a step, the slowest rank's, without the garbage collector's pauses, as in `interlace train`."""
    gc.collect()
    gc.freeze()
    wait(device)
    dist.barrier()
    others = allocated(device) - variant.resident
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = now(device)
    enqueuing = time.perf_counter()
    for _ in range(steps):
        variant.step(batch)
    variant.host.append(1e3 * (time.perf_counter() - enqueuing) / steps)
    end = now(device)
    wait(device)
    if device.type == "cuda":
        own = kept_by_graphs(device) if variant.graphs else 0
        variant.peak = max(variant.peak, torch.cuda.max_memory_allocated() - others + own)
    took = torch.tensor([1e3 * between(begin, end) / steps])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def profile(variant: Variant, batch: Batch, rank: int) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as made:
        variant.step(batch)
        torch.cuda.synchronize()
    if rank == 0:
        print(f"--- {variant.name}")
        print(made.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1.2b")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--variants", default="ours-zero1,ours-zero3,fsdp2,fsdp2-keep")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", default="")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    limit = datetime.timedelta(seconds=90)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=limit)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit)
    overrides = [f"model.max_positions={max(given.length, 2048)}"]
    cfg = load(None, overrides, preset=given.model).model_config()
    groups = make_groups(Mesh((("dp", ranks),)), rank, device, 90, Meter())
    batches = [random_batch(cfg, given.sequences, given.length, r) for r in range(ranks)]
    batch = batches[rank]
    expected = None
    if not given.no_reference:
        expected = reference(cfg, batches, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    variants = []
    for name in given.variants.split(","):
        before = allocated(device)
        made = ours(name, cfg, groups, device) if name.startswith("ours") else peer(name, cfg, device, ranks)
        loss, norm = (value.item() for value in made.step(batch))
        if rank == 0:
            print(f"{name}: step 1 loss {loss:.5f} norm {norm:.4f}, fp32 reference {expected}", flush=True)
        if expected is not None:
            assert abs(loss - expected[0]) < 2e-3 * expected[0], (name, loss, expected)
            assert abs(norm - expected[1]) < 2e-2 * expected[1], (name, norm, expected)
        for _ in range(2):
            made.step(batch)
        wait(device)
        made.resident = allocated(device) - before
        variants.append(made)
    rounds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(given.rounds):
        for variant in variants:
            rounds[variant.name].append(timed(variant, batch, given.steps, device))
    if rank == 0:
        table(given, cfg, variants, rounds, ranks)
    for variant in variants:
        if variant.name in given.profile.split(","):
            profile(variant, batch, rank)
    dist.destroy_process_group()


def table(
    given: argparse.Namespace, cfg: ModelConfig, variants: list[Variant], rounds: dict[str, list[float]], ranks: int
) -> None:
    tokens = given.sequences * given.length
    flops = spec.flops_per_token(cfg, given.length).total
    on_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if on_gpu else "CPU"
    library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if on_gpu else "gloo"
    topology = Topology.from_device_name(machine)
    best = min((statistics.median(ms) for name, ms in rounds.items() if not name.startswith("ours")), default=None)
    lines = [
        f"# Data parallel step, {given.model}, {datetime.date.today()}, {ranks} x {machine}",
        "",
        f"torch {torch.__version__}, {library}, "
        f"{given.sequences} x {given.length} tokens a rank, {given.rounds} rounds of {given.steps} steps, "
        f"`{' '.join(sys.argv)}`",
        "",
        "| variant | ms | spread | tokens/s/GPU | MFU % (causal) | peak GiB | host ms | best peer / this |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        ms = statistics.median(rounds[variant.name])
        rate = tokens / ms * 1e3
        mfu = f"{100 * rate * flops / topology.flops_per_second('bf16'):.1f}" if topology else "-"
        spread = max(rounds[variant.name]) - min(rounds[variant.name])
        ratio = f"{best / ms:.3f}" if best else "-"
        peak, host = (variant.peak + variant.outside) / 2**30, statistics.median(variant.host)
        lines.append(
            f"| {variant.name} | {ms:.1f} | {spread:.1f} | {rate:,.0f} | {mfu} | {peak:.1f} | {host:.0f} | {ratio} |"
        )
    text = "\n".join(lines)
    print(text, flush=True)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
