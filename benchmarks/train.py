"""Real training runs through the command line: tokens/s, MFU, memory and time waited, per model and plan.

    python benchmarks/train.py [--ranks N] [--rows A:B] [--out FILE]

Each row is one `interlace train` in processes of its own, on the default corpus, bf16 on a GPU and fp32 on a CPU.  The
figures are medians over the steps after warm-up, from the run's own metrics.jsonl.  No peer runs here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 4


@dataclass(frozen=True)
class Row:
    model: str
    zero: int
    steps: int
    per_rank: int  # sequences
    length: int
    compile: bool = False


GPU_ROWS = (
    Row("tiny", 0, 20, 8, 64),
    Row("tiny", 3, 20, 8, 64),
    Row("1.2b", 0, 14, 4, 4096),
    Row("1.2b", 3, 14, 4, 4096),
    Row("1.2b", 0, 14, 4, 4096, compile=True),
    Row("1.2b", 3, 14, 4, 4096, compile=True),
)
CPU_ROWS = (Row("tiny", 0, 12, 4, 64), Row("tiny", 3, 12, 4, 64), Row("demo", 3, 8, 4, 256))


def run(row: Row, ranks: int, gpu: bool, out: Path) -> dict[str, float]:
    settings = {
        "run.out": out,
        "run.save_every": 0,
        "train.steps": row.steps,
        "train.global_batch": row.per_rank * ranks,
        "train.precision": "bf16" if gpu else "fp32",
        "train.warmup": 2,
        "train.compile": str(row.compile).lower(),
        "data.sequence_length": row.length,
        "data.documents": "joined",
        "model.preset": row.model,
        "model.max_positions": 4096,
    }
    command = [sys.executable, "-m", "interlace", "train", "--parallel", f"dp={ranks} zero={row.zero}"]
    command += ["--device", "cuda" if gpu else "cpu"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, timeout=400, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT)
    made = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = made[WARM_UP:]
    step = statistics.median(r["step_s"] for r in kept)
    return {
        "step_ms": 1e3 * step,
        "tokens_per_s_rank": statistics.median(r["tokens_per_s"] for r in kept) / ranks,
        "mfu": 100 * statistics.median(r["mfu"] or 0.0 for r in kept),
        "memory_gib": max(r["memory"] for r in made) / 2**30,
        "waited_ms": 1e3 * statistics.median(sum(r["waited"].values()) for r in kept),
        "first_loss": made[0]["loss"],
        "last_loss": made[-1]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--rows", default=":")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    ranks = given.ranks or (torch.cuda.device_count() if gpu else 2)
    machine = f"{ranks} x {torch.cuda.get_device_name()}" if gpu else f"{os.cpu_count()}-core {platform.machine()}"
    first, _, last = given.rows.partition(":")
    rows = (GPU_ROWS if gpu else CPU_ROWS)[int(first or 0) : int(last) if last else None]
    lines = [
        f"# Training runs, {datetime.date.today()}, {machine}",
        "",
        f"torch {torch.__version__}, commit {_commit()}, command `{' '.join(['python', *sys.argv])}`",
        "",
        "| model | plan | sequences x length per rank | compile | step ms | tokens/s/rank | MFU % (causal) | peak GiB "
        "| waited ms | loss first, last |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            found = run(row, ranks, gpu, Path(folder) / "run")
        compiled = "on" if row.compile else "off"
        lines.append(
            f"| {row.model} | dp={ranks} zero={row.zero} | {row.per_rank} x {row.length} | {compiled} "
            f"| {found['step_ms']:.1f} | {found['tokens_per_s_rank']:,.0f} | {found['mfu']:.1f} "
            f"| {found['memory_gib']:.1f} | {found['waited_ms']:.1f} "
            f"| {found['first_loss']:.3f}, {found['last_loss']:.3f} |"
        )
        print("\n".join(lines), flush=True)
        if given.out:
            given.out.write_text("\n".join(lines) + "\n")


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return found.stdout.strip() or os.environ.get("INTERLACE_COMMIT", "unknown")


if __name__ == "__main__":
    main()
