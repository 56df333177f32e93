"""All tests and benchmarks that need GPUs, one after another, within a given time; another call goes on with the rest.

    python benchmarks/gpus.py [--only NAME,..] [--skip NAME,..] [--budget SECONDS] [--folder build/gpus] [--list]

A row is a command with a limit, after which it is killed with all that it started; none is begun that the budget would
not let end.  FOLDER/NAME.md holds a row's table, FOLDER/NAME.log all that it said, and a row whose table is there is
not run again.  FOLDER/all.md is all of them with commit, command and seconds.  Rows that need more GPUs than there
are, or a package that is not, are named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ONE = "python3"
TWO = "torchrun --standalone --nproc-per-node 2"


@dataclass(frozen=True)
class Row:
    """limit in seconds.  In `command` {out} is the file for its table; without it the end of what was said is it."""

    name: str
    gpus: int
    limit: float
    command: str
    needs: str = ""
    environment: tuple[tuple[str, str], ...] = ()


# Several at once, where the plugin is: most of their time is the compiler's.  A signal ends pytest with its summary.
PARALLEL = " -p no:benchmark -n 6" if importlib.util.find_spec("xdist") else ""


def tests(name: str, gpus: int, limit: float, paths: str) -> Row:
    pytest = f'{ONE} -m pytest -q -m "gpu or gpu2" -p no:cacheprovider{PARALLEL} {paths}'
    return Row(name, gpus, limit, f"timeout -s INT {limit - 10:.0f} {pytest}")


def step(name: str, limit: float, rest: str, script: str, **more: str) -> Row:
    needs, environment = more.pop("needs", ""), tuple(more.items())
    return Row(name, 2, limit, f"{TWO} benchmarks/{script}.py {rest} --out {{out}}", needs, environment)


MEGATRON = {"needs": "megatron", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
ROWS = (
    tests("tests-axes", 2, 300, "tests/parallel tests/train tests/models"),
    tests("tests-transfers", 2, 150, "tests/collectives tests/symmetric"),
    tests("tests-kernels", 2, 500, "tests/kernels"),
    tests("tests-fused", 2, 150, "tests/test_fused_benchmarks.py tests/test_tune_command.py"),
    Row("verify-exact", 2, 90, f'{ONE} -m interlace verify --device cuda --exact --parallel "dp=2 zero=3" --steps 4'),
    Row("verify-tensor", 2, 60, f'{ONE} -m interlace verify --device cuda --parallel "tp=2" --steps 2'),
    Row("symmetric", 2, 90, f"{TWO} benchmarks/symmetric.py --out {{out}}"),
    Row("gemm-core", 1, 240, f"{ONE} benchmarks/gemm_core.py --search --budget 200 --out {{out}}"),
    Row("fused-products", 2, 540, f"{ONE} benchmarks/fused_matmul.py --budget 480 --out build/gpus/fused.json "
        "--table src/interlace/kernels/tuned/nvidia-h200.json"),
    Row("decoder-layer", 2, 120, f"{ONE} benchmarks/decoder_layer.py --out build/gpus/layer.json"),
    Row("experts", 2, 180, f"{ONE} benchmarks/expert_parallel.py --budget 140 --out build/gpus/experts.json"),
    step("tensor-1.2b", 120, "--rounds 4", "tensor_parallel"),
    step("tensor-1.2b-graphs", 120, "--rounds 4 --variants ours-graphs,ours-serial-graphs,ours,ours-serial,torch",
         "tensor_parallel"),
    step("tensor-1.2b-megatron", 60, "--rounds 4 --variants megatron", "tensor_parallel", **MEGATRON),
    step("tensor-8b", 240, "--model 8b --sequences 1 --alone --no-reference --rounds 3 "
         "--variants ours-graphs,ours-serial-graphs,ours,ours-plain,ours-serial,torch,torch-async", "tensor_parallel"),
    step("tensor-8b-megatron", 90, "--model 8b --sequences 1 --no-reference --rounds 3 --variants megatron",
         "tensor_parallel", **MEGATRON),
    step("context", 120, "", "context_parallel"),
    step("context-ringmaster", 90, "--variants ring,ringmaster-zigzag,ringmaster-ulysses", "context_parallel",
         needs="ringmaster"),
    step("context-documents", 60, "--documents --variants ring,gather,ulysses", "context_parallel"),
    step("pipeline-8", 200, "--model 1.2b --length 4096 --micro-batches 8 --peers --rounds 3", "pipeline"),
    step("pipeline-16", 240, "--model 1.2b --length 4096 --micro-batches 16 --peers --rounds 3", "pipeline"),
    step("pipeline-8b-8", 300, "--model 8b --length 4096 --micro-batches 8 --peers --rounds 3", "pipeline"),
    step("pipeline-8b-16", 300, "--model 8b --length 4096 --micro-batches 16 --peers --rounds 3", "pipeline"),
    step("audit-1.2b", 120, "--rounds 3", "exposed_audit"),
    step("audit-8b", 120, "--model 8b --sequences 1 --zero 3 --rounds 3", "exposed_audit"),
    step("data-1.2b", 150, "--rounds 4", "data_parallel"),
    Row("plans", 2, 400, f"{ONE} benchmarks/plans.py --out {{out}}"),
)  # fmt: skip


def run(row: Row, folder: Path, count: int) -> str:
    """Runs a row and says how it went: "" if well."""
    table, log = folder / f"{row.name}.md", folder / f"{row.name}.log"
    command = row.command.replace("{out}", str(folder / "table"))
    (folder / "table").unlink(missing_ok=True)
    path = os.pathsep.join([*(str(ROOT / part) for part in ("src", "benchmarks", ".peers")),
                            *filter(None, [os.environ.get("PYTHONPATH")])])  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": path, **dict(row.environment)}
    began = time.monotonic()
    with log.open("w") as said:
        process = subprocess.Popen(
            command, shell=True, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code: int | None = process.wait(row.limit)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it started and left running would spin on the GPUs
        process.wait()
    took = time.monotonic() - began
    if code == 0:
        made = folder / "table"
        found = made.read_text() if made.exists() else "\n".join(log.read_text().splitlines()[-12:])
        words = " ".join(f"{name}={value}" for name, value in row.environment)
        table.write_text(f"## {row.name}\n\n`{' '.join([*filter(None, [words]), row.command])}`, {count} GPUs, "
                         f"{took:.0f} s\n\n{found.strip()}\n")  # fmt: skip
        return ""
    reason = f"not done within {row.limit:.0f} s" if code is None else f"exit code {code}"
    return f"{reason} after {took:.0f} s, see {log.name}:\n" + "\n".join(log.read_text().splitlines()[-15:])


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", default="")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpus")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    only, skip = ({*filter(None, names.split(","))} for names in (given.only, given.skip))
    if unknown := (only | skip) - {row.name for row in ROWS}:
        sys.exit(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}")
    if given.list:
        sys.exit("\n".join(f"{row.name:24} {row.gpus} GPUs  {row.limit:4.0f} s  {row.command}" for row in ROWS))
    folder, count, ends = given.folder.resolve(), gpus(), time.monotonic() + given.budget
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / ".peers"))
    failed, left = [], []
    for row in ROWS:
        if (only and row.name not in only) or row.name in skip or (folder / f"{row.name}.md").exists():
            continue
        if row.gpus > count:
            print(f"{row.name}: left out, it needs {row.gpus} GPUs and {count} are here", flush=True)
        elif row.needs and importlib.util.find_spec(row.needs) is None:
            print(f"{row.name}: left out, no package {row.needs} is here", flush=True)
        elif row.limit > ends - time.monotonic():
            left.append(row.name)
        else:
            said = run(row, folder, count)
            print(f"{row.name}: {said or 'done'}", flush=True)
            failed += [row.name] if said else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    tables = [folder / f"{row.name}.md" for row in ROWS]
    whole = [path.read_text() for path in tables if path.exists()]
    (folder / "all.md").write_text("\n".join([f"Commit {commit.strip() or 'unknown'}\n", *whole]))
    if left:
        print(f"left for another call: {','.join(left)}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
