"""One training step over the tensor axis, beside PyTorch's tensor parallelism: ms, waiting, peak memory.

    torchrun --nproc-per-node N benchmarks/tensor_parallel.py [--model 1.2b] [--variants ours,ours-serial,torch,...]
        [--data D] [--sequences 4] [--length 4096] [--rounds 7] [--steps 3] [--alone] [--profile ours,torch]
        [--set model.KEY=VALUE] [--out FILE]

All variants hold the same model and take the same random tokens, `--sequences` x `--length` on all ranks together, or
with `--data D` on each of D groups of N / D ranks, over which weights and optimizer are split (zero=3, FSDP2).  They
run in turn, `--steps` steps each, `--rounds` times, and the median round counts.  `--alone` builds, times and drops one
after another, for models of which only one fits.  First, step 1 of each is checked against one device in fp32.
Variants, with the suffix -eager without compilation of the blocks:

    ours            tp=N with sequence parallel; transfers beside products
    ours-serial     the same, every transfer by itself (overlap=off); -plain, -fused: those values of overlap
    ours-whole      without sequence parallel (sequence=off)
    ours-graphs     blocks as CUDA graphs (train.graphs); waits inside them are not seen
    torch           DTensor plans, sequence parallel, loss_parallel (peers/torch_tensor.py)
    torch-async     the same with async-TP (needs compilation and GPUs)
    megatron        megatron-core with sequence parallel, where it is installed (peers/megatron.py)

"waited" is the time in which ours stood still for transfers, a step, on the rank that waited most; "host" the time that
rank 0 took to enqueue a step: near the step's own, it is the host that binds, or a full queue that held it up.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))
import peers.megatron as megatron
import peers.torch_tensor as native
from data_parallel import CLIP, SEED, Variant, allocated, decoder, profile, random_batch, reference, timed, wait

from interlace import spec
from interlace.collectives import Groups, Meter, make_groups
from interlace.config import ModelConfig, TrainSection, load
from interlace.mesh import Mesh
from interlace.models.decoder import initial_value, initialise
from interlace.parallel.data import DataParallel
from interlace.parallel.part import holding
from interlace.parallel.tensor import Axis, split_decoder
from interlace.topology import Topology
from interlace.train import optimizer as optimizers
from interlace.train.data import Batch
from interlace.train.step import train_step


def _policy(name: str) -> str:
    """Of `overlap`, by a suffix; auto without one."""
    named = {"-serial": "off", "-plain": "plain", "-fused": "fused"}
    return next((policy for suffix, policy in named.items() if suffix in name), "auto")


def ours(name: str, cfg: ModelConfig, groups: Groups, device: torch.device) -> Variant:
    table = {parameter.name: parameter for parameter in spec.parameters(cfg)}
    made = decoder(cfg, "meta", "-eager" not in name, "-graphs" in name)
    if made.replays:
        from interlace.kernels import workspace  # needs Triton

        workspace.count_in_memory(groups["tp"])
    axis = Axis(groups["tp"], sequence="-whole" not in name, overlap=_policy(name))
    parts = split_decoder(made, spec.parameters(cfg), axis, holding(groups, "tp", 90.0))
    model = DataParallel(
        made,
        groups["dp"],
        units=("embedding", "blocks.*", "head"),
        gradients="sum",
        compute_dtype=torch.bfloat16,
        zero=3 if groups["dp"].size > 1 else 0,
        overlap=axis.overlap != "off",
        materialise=lambda n, start, stop: initial_value(table[n], SEED, start, stop - start, device, torch.float32),
        decay={n: p.decay for n, p in table.items()},
        parts=parts,
        tensor=groups["tp"],
    )
    optimizer = optimizers.build(TrainSection(clip=CLIP, weight_decay=0.1), model)

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        result = train_step(model, optimizer, [batch], groups.host, clip_norm=CLIP)
        variant.record = groups["tp"].meter.cut()
        return result.loss, result.grad_norm

    variant = Variant(name, step, outside=model.window_bytes, graphs=made.replays)
    return variant


def peer(name: str, cfg: ModelConfig, device: torch.device, ranks: int, data: int) -> Variant:
    compiled = "-eager" not in name
    plain = decoder(cfg, device, compiled=False)
    initialise(plain, cfg, SEED)
    if name == "megatron":
        if data > 1:
            raise NotImplementedError("peers/megatron.py has no data axis")
        return Variant(name, megatron.tensor(plain, device, ranks, cfg.max_positions, CLIP))
    decays = {parameter.name: parameter.decay for parameter in spec.parameters(cfg)}
    model = native.tensor(plain, device, ranks, compiled, "-async" in name, data)
    named = dict(model.named_parameters())
    decayed = [p for n, p in named.items() if decays[n]]
    rest = [p for n, p in named.items() if not decays[n]]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels, positions, documents, samples = batch.to(device)
        with native.losses_are_split():
            total, _ = model.loss(tokens, labels, positions, documents, samples)
            loss = total / labels.numel()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in (loss.detach(), norm)]
        return whole[0], whole[1]

    return Variant(name, step)


def build(name: str, cfg: ModelConfig, groups: Groups, device: torch.device, batch: Batch, expected: object) -> Variant:
    """A variant that has made a few steps, the first of them checked."""
    before = allocated(device)
    ranks, data = groups["tp"].size, groups["dp"].size
    made = ours(name, cfg, groups, device) if name.startswith("ours") else peer(name, cfg, device, ranks, data)
    loss, norm = (value.item() for value in made.step(batch))
    if not name.startswith("ours"):  # theirs is that of a data rank
        of_all = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(of_all)
        loss = of_all.item() / dist.get_world_size()
    if groups.rank == 0:
        print(f"{name}: step 1 loss {loss:.5f} norm {norm:.4f}, fp32 reference {expected}", flush=True)
    if isinstance(expected, tuple):
        assert abs(loss - expected[0]) < 2e-3 * expected[0], (name, loss, expected)
        assert abs(norm - expected[1]) < 2e-2 * expected[1], (name, norm, expected)
    for _ in range(2):
        made.step(batch)
    wait(device)
    made.resident = allocated(device) - before
    return made


def attempt(name: str, *rest: Any) -> Variant | None:
    """`build`; None, said in a line, where another library cannot, on every rank alike."""
    try:
        return build(name, *rest)
    except AssertionError:
        raise
    except Exception as error:
        if name.startswith("ours"):
            raise
        said = str(error).strip().splitlines()
        print(f"{name}: left out, {type(error).__name__}: {said[0] if said else ''}", file=sys.stderr, flush=True)
        return None


def waited(variant: Variant) -> float:
    """ms that the last step stood still, on the rank that waited most; nothing where nobody measures."""
    own = 1e3 * sum(variant.record.waited().values()) if variant.record is not None else 0.0
    most = torch.tensor([own])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.2b")
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--variants", default="ours,ours-serial,ours-whole,torch,torch-async")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--profile", default="")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="model.KEY=VALUE")
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
    overrides = [f"model.max_positions={max(given.length, 2048)}", *given.set]
    cfg = load(None, overrides, preset=given.model).model_config()
    tp = ranks // given.data
    if tp * given.data != ranks or tp < 2:
        parser.error(f"--data {given.data} of {ranks} ranks leaves no whole group of two or more for tp")
    groups = make_groups(Mesh((("tp", tp), ("dp", given.data))), rank, device, 90, Meter())
    batches = [random_batch(cfg, given.sequences, given.length, number) for number in range(given.data)]
    batch = batches[rank // tp]
    expected = None if given.no_reference else reference(cfg, batches, device)
    rounds: dict[str, list[float]] = {name: [] for name in given.variants.split(",")}
    rows: list[tuple[str, float, float, float]] = []
    turns = [[name] for name in rounds] if given.alone else [list(rounds)]
    for names in turns:
        _free(device)
        rows += _turn(given, names, rounds, cfg, groups, device, batch, expected)
    if rank == 0:
        table(given, cfg, rows, rounds, ranks)
    _free(device)  # graphs hold the library's communicators
    dist.destroy_process_group()


def _turn(
    given: argparse.Namespace, names: list[str], rounds: dict[str, list[float]], cfg: ModelConfig, groups: Groups,
    device: torch.device, batch: Batch, expected: object
) -> list[tuple[str, float, float, float]]:  # fmt: skip
    """Builds and times `names` in turn; nothing of them is left afterwards."""
    rows = []
    tried = [attempt(name, cfg, groups, device, batch, expected) for name in names]
    variants = [variant for variant in tried if variant is not None]
    for _ in range(given.rounds):
        for variant in variants:
            rounds[variant.name].append(timed(variant, batch, given.steps, device))
    for variant in variants:
        peak = (variant.peak + variant.outside) / 2**30
        rows.append((variant.name, waited(variant), statistics.median(variant.host), peak))
        if variant.name in given.profile.split(","):
            profile(variant, batch, groups.rank)
    return rows


def _free(device: torch.device) -> None:
    torch._dynamo.reset()  # the graphs of variants that are gone too
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table(
    given: argparse.Namespace,
    cfg: ModelConfig,
    rows: list[tuple[str, float, float, float]],
    rounds: dict[str, list[float]],
    ranks: int,
) -> None:
    tokens, flops = given.data * given.sequences * given.length, spec.flops_per_token(cfg, given.length).total
    on_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if on_gpu else "CPU"
    library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if on_gpu else "gloo"
    topology = Topology.from_device_name(machine)
    medians = {name: statistics.median(ms) for name, ms in rounds.items() if ms}
    best = min((ms for name, ms in medians.items() if not name.startswith("ours")), default=None)
    serial = next((ms for name, ms in medians.items() if name.startswith("ours-serial")), None)
    plan = f"tp={ranks // given.data}" + (f" dp={given.data}" if given.data > 1 else "")
    lines = [
        f"# Tensor parallel step, {given.model}, {datetime.date.today()}, {plan}, {ranks} x {machine}",
        "",
        f"torch {torch.__version__}, {library}, {tokens // given.length} x {given.length} tokens, {given.rounds} "
        f"rounds of {given.steps} steps, `{' '.join(sys.argv)}`",
        "",
        "| variant | ms | spread | tokens/s/GPU | MFU % (causal) | waited ms | host ms | peak GiB | serial / it "
        "| peer / it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, stood, host, peak in rows:
        ms = medians[name]
        rate = tokens / ranks / ms * 1e3
        mfu = f"{100 * rate * flops / topology.flops_per_second('bf16'):.1f}" if topology else "-"
        spread = max(rounds[name]) - min(rounds[name])
        stood_text = f"{stood:.1f}" if name.startswith("ours") else "-"
        ratios = " | ".join(f"{other / ms:.3f}" if other else "-" for other in (serial, best))
        figures = f"{ms:.1f} | {spread:.1f} | {rate:,.0f} | {mfu} | {stood_text} | {host:.1f} | {peak:.1f}"
        lines.append(f"| {name} | {figures} | {ratios} |")
    text = "\n".join(lines)
    print(text, flush=True)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
