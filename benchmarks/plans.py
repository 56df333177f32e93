"""Real steps of whole plans: peak memory beside what `plan/memory` says, and what determinism costs.

    PYTHONPATH=src:benchmarks python benchmarks/plans.py [--rows A:B] [--steps 6] [--ranks N] [--out FILE]

Each row is a session as `interlace train` builds it, on the default corpus, in processes of its own; ms are the median
of the steps after the first two, of the slowest rank; waited: ms of it that compute stood for each axis, on the rank
that stood longest; the peak is the largest rank's, windows included; the losses of the first three steps are alike for
all plans of a model and its batch.  On four and more ranks the rows are the splits of 8b over dp, tp and cp, with as
many sequences as ranks; on one they are policies of recompute and experts, for their memory.  Beside the measured ms of
a step stands what `plan/cost` computes for it on a GPU of that name.  No peer runs: PyTorch's FSDP2 with tensor
parallelism is in tensor_parallel.py (--data).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from interlace.collectives.handle import between, now
from interlace.config import load, loads
from interlace.kernels import tune
from interlace.launch import run_local
from interlace.plan.cost import price
from interlace.plan.memory import estimate
from interlace.topology import Topology
from interlace.train import session as sessions
from interlace.train.step import train_step
from interlace.world import World

COMPILED = ("train.compile=true",)
ROWS: tuple[
    tuple[str, str, int, int, tuple[str, ...]], ...
] = (  # model, plan (of `dp` too where that is not all ranks), sequences of each data rank, their length, settings
    ("1.2b", "zero=0", 4, 4096, COMPILED),
    ("1.2b", "zero=1", 4, 4096, COMPILED),
    ("1.2b", "zero=2", 4, 4096, COMPILED),
    ("1.2b", "zero=3", 4, 4096, COMPILED),
    ("1.2b", "zero=1", 4, 4096, ()),
    ("1.2b", "zero=1 recompute=selective", 4, 4096, ()),
    ("1.2b", "zero=1 recompute=full", 4, 4096, ()),
    ("1.2b", "zero=1 micro_batch_size=1", 4, 4096, COMPILED),
    ("1.2b", "zero=1", 4, 4096, (*COMPILED, "run.deterministic=true")),
    ("1.2b", "zero=1 micro_batch_size=1", 4, 4096, (*COMPILED, "run.reproducible=plan")),
    ("13b", "zero=3", 1, 4096, COMPILED),
    *(
        ("8b", f"dp=1 cp=2 zero=3 exchange={exchange}", 1, length, COMPILED)
        for length in (8192, 16384)
        for exchange in ("ring", "gather", "ulysses")
    ),
)

Row = tuple[str, str, int, int, tuple[str, ...]]

EXPERTS = ("model.num_experts=8", "model.experts_per_token=2", "model.expert_ffn_size=2048")
ONE: tuple[Row, ...] = (
    *(("1.2b", f"recompute={policy}", 4, 4096, COMPILED) for policy in ("none", "selective", "full")),
    *(("1.2b", f"recompute={policy}", 4, 4096, ()) for policy in ("none", "selective", "full")),
    ("1.2b", "recompute=full", 16, 4096, COMPILED),
    ("1.2b", "recompute=none micro_batches=4", 8, 4096, COMPILED),
    *(("1.2b", f"recompute={policy}", 4, 4096, (*COMPILED, *EXPERTS)) for policy in ("none", "selective", "full")),
    ("1.2b", "recompute=none", 4, 4096, EXPERTS),
    ("8b", "recompute=full", 2, 8192, (*COMPILED, "train.optimizer=sgd")),
    ("8b", "recompute=selective", 1, 8192, (*COMPILED, "train.optimizer=sgd")),
)


def splits(ranks: int, model: str, length: int, settings: tuple[str, ...]) -> list[Row]:
    """A model over data ranks, tensor and context axes; as many sequences in all as ranks."""
    shapes = [(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4) if ranks % (tp * cp) == 0 and tp * cp <= ranks]
    made = []
    for tp, cp in shapes:
        dp = ranks // (tp * cp)
        words = [f"dp={dp}"] + [f"{axis}={size}" for axis, size in (("tp", tp), ("cp", cp)) if size > 1]
        words += ["zero=3"] if dp * cp > 1 else []
        made.append((model, " ".join(words), ranks // dp, length, settings))
    return made


SMALL = (
    ("tiny", "zero=1", 4, 64, ()),
    ("tiny", "zero=3", 4, 64, ()),
    ("tiny", "zero=3", 4, 64, ("run.reproducible=plan",)),
    ("tiny", "dp=1 cp=2 exchange=ring", 2, 64, ()),
)


def measure(world: World, config: str, steps: int) -> dict[str, Any]:
    """What one rank sees: ms of each step, the losses of three, the peak."""
    session = sessions.build(world, loads(config))
    device, times, losses, stood = world.device, [], list[float](), list[dict[str, float]]()
    for step in range(steps):
        world.status(step=step, operation="step of the benchmark")
        begin = now(device)
        made = train_step(
            session.model,
            session.optimizer,
            session.batches(),
            session.groups.host,
            clip_norm=session.cfg.train.clip,
            dropout_key=session.dropout_key(step),
            leaves=session.leaves,
        )
        losses.append(made.loss.item())  # waits for the step
        times.append(1e3 * between(begin, now_after(device)))
        record = session.meter.cut()
        stood.append({} if record is None else {axis: 1e3 * s for axis, s in record.waited().items()})
        session.advance()
    peak = torch.cuda.max_memory_allocated() + session.model.window_bytes if device.type == "cuda" else 0
    return {"times": times, "losses": losses[:3], "peak": peak, "waited": stood}


def _waited(steps: list[dict[str, float]]) -> tuple[float, str]:
    """Of one rank: the sum over axes of the median of its steps, and each of them in words."""
    axes = sorted({axis for step in steps for axis in step})
    ms = {axis: statistics.median(step.get(axis, 0.0) for step in steps) for axis in axes}
    return sum(ms.values()), ", ".join(f"{axis} {value:.1f}" for axis, value in ms.items()) or "-"


def now_after(device: torch.device) -> Any:
    """A moment that has come past."""
    moment = now(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return moment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=":")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    ranks = given.ranks or (torch.cuda.device_count() if on_gpu else 2)
    first, _, last = given.rows.partition(":")
    of_two: Sequence[Row] = (ONE if ranks == 1 else ROWS) if on_gpu else SMALL[: 4 if ranks > 1 else 1]
    wide = splits(ranks, "8b", 4096, COMPILED) if on_gpu else splits(ranks, "tiny", 64, ())
    chosen = (wide if ranks >= 4 else of_two)[int(first or 0) : int(last) if last else None]
    machine = torch.cuda.get_device_name() if on_gpu else "CPU"
    topology = Topology.load("h200") if "H200" in machine else None
    lines = [
        f"# Steps of whole plans, {datetime.date.today()}, {ranks} x {machine}",
        "",
        f"torch {torch.__version__}, {given.steps} steps, `{' '.join(sys.argv)}`",
        "",
        "| model | plan | sequences x length | settings | ms | computed ms | waited ms | peak GiB | "
        "plan/memory GiB | off by % | losses |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for model, plan, sequences, length, settings in chosen:
        words = dict(word.split("=") for word in f"dp={ranks} {plan}".split())  # what is said later counts
        batch = sequences * int(words["dp"])
        overrides = [
            f"data.sequence_length={length}", "data.documents=joined", f"train.global_batch={batch}",
            f"model.max_positions={length}", "train.warmup=2", "run.timeout=120", *settings,
        ]  # fmt: skip
        overrides += ["train.precision=bf16"] if on_gpu else []
        cfg = load(None, overrides, " ".join(f"{key}={value}" for key, value in words.items()), preset=model)
        argument = {"config": cfg.to_toml(), "steps": given.steps}
        device = "cuda" if on_gpu else "cpu"
        found = run_local("plans:measure", ranks, argument, device=device, timeout=120.0)
        ms = statistics.median(max(times) for times in zip(*(rank["times"][2:] for rank in found), strict=True))
        waits = sorted(_waited(rank["waited"][2:]) for rank in found)[-1][1]
        ways = tune.planned(machine, "bf16") if on_gpu else None
        peak, planned = max(rank["peak"] for rank in found), estimate(cfg, cfg.plan, device, ways=ways).total
        computed = f"{1e3 * price(cfg, cfg.plan, topology).seconds:.1f}" if topology else "-"
        off = f"{100 * (planned / peak - 1):+.1f}" if peak else "-"
        said = " ".join(settings) or "-"
        lines.append(
            f"| {model} | {cfg.plan} | {sequences} x {length} | {said} | {ms:.1f} | {computed} | {waits} | "
            f"{peak / 2**30:.1f} | {planned / 2**30:.1f} | {off} | "
            f"{', '.join(f'{loss:.4f}' for loss in found[0]['losses'])} |"
        )
        print(lines[-1], flush=True)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
