"""The command line: parses, checks before any process starts, and says failures in one sentence.

    interlace train [RUN.toml] [--parallel "dp=4 zero=3"] [--set train.steps=50 ...] [--resume auto|DIR]
    interlace verify [RUN.toml] --parallel "dp=4 zero=3" [--steps N] [--exact]
    interlace verify [RUN.toml] --sweep N [--seed S]
    interlace data [RUN.toml] --steps A:B
    interlace export RUN FOLDER
    interlace generate RUN --prompt "..."
    interlace plan [RUN.toml] --gpus 64 --gpu h100 [--parallel "tp=2"]
    interlace report RUN | TRACE.json[.gz] ... [--against OTHER] [--steps A:B]
    interlace schedule NAME|FILE.csv ... [--ranks 4] [--micro-batches 8] [--costs "F=1 I=1 W=1 transfer=0.05"]
    interlace check MODULE.py:LAUNCH [--ranks 2,3,4] [--schedules 1000]
    interlace tune M N K [--op all_gather_matmul] [--dtype bf16] [--nproc 2] [--table FILE]

One file for each group of commands.  Everything heavy is imported inside a command.  Exit codes are those of
`interlace.errors`.
"""

from interlace.cli import train, verify, plan, report, schedule, check, tune  # isort: skip - commands are listed in this order
from interlace.cli.options import app

__all__ = ["app", "check", "main", "plan", "report", "schedule", "train", "tune", "verify"]


def main() -> None:
    app()
