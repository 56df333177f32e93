"""Rows to the experts of another GPU and back: the exchange by itself, and under the products of real layers.

    python benchmarks/expert_parallel.py --out FILE.json [--rows A:B] [--budget SECONDS] [--rounds 9] [--nproc 2]
        [--variants ours,torch] [--movers N] [--piece N]
    python benchmarks/expert_parallel.py --variants vdev --out FILE.json    PyTorch's, sizes on the device (NVSHMEM)
    python benchmarks/expert_parallel.py --smoke                             tiny rows, on CPU ranks too

Starts its own ranks.  Every variant is held against a reference first, then all run in turn, `--rounds` times; the
slowest rank of a round counts, medians are printed with their range.  Results join those of `--out` (a row measured
again replaces the older), and FILE.md beside it holds them all.

Rows of kind "rows" send tokens and return them, without products: `dispatch` counts, exchanges the counts and sends,
`known` sends where the counts are known (as backward does), `combine` returns, weighs and adds; "graph" replays them as
CUDA graphs.  Rows of kind "layer" are one mixture forward and backward: `overlapped`; `apart`, the same kernels with
rows that travel by themselves (the off row); `by need`, overlapped, with slots for 1.5 times the even rows, so that the
host looks in forward; `exchange`, only the rows of it; `torch`, all-to-all and grouped products.

    hidden = (apart - overlapped) / exchange;   exposed = 1 - hidden

"published" is what kraken's authors give for two H100s (80 us dispatch, 83 us combine); it was not run here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PUBLISHED = {"dispatch": 80.0, "combine": 83.0}
TARGETS = {"dispatch": 60.0, "combine": 65.0}  # microseconds, of the first row
HIDDEN = {"qwen3-30b-a3b": 0.80, "mixtral-8x7b": 0.75}
QUIET = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Row:
    """tokens: of each rank.  ffn 0: rows alone."""

    name: str
    tokens: int
    hidden: int
    ffn: int
    experts: int
    k: int

    @property
    def kind(self) -> str:
        return "layer" if self.ffn else "rows"


ROWS = (
    Row("4096 x 4096", 4096, 4096, 0, 8, 1),
    Row("8192 x 2048 top-8", 8192, 2048, 0, 128, 8),
    Row("qwen3-30b-a3b", 8192, 2048, 768, 128, 8),
    Row("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
)
SMOKE = (Row("tiny rows", 3, 8, 0, 2, 1), Row("tiny layer", 2, 8, 6, 2, 1))


# --- on a rank -------------------------------------------------------------------------------------------------------


class Bench:
    """One row on one rank: tensors, and the variants as functions that call `mark()` between their parts."""

    def __init__(self, world: Any, row: Row, given: dict[str, Any]) -> None:
        import torch

        from interlace.collectives import Group, Meter
        from interlace.kernels.expert_exchange import ExpertExchange, default_tuning

        self.torch, self.row, self.world, self.device = torch, row, world, world.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        group = torch.distributed.group.WORLD
        self.group = Group("ep", tuple(range(world.size)), world.rank, world.device, Meter(), group, self.stream)
        self.owners = [row.experts // world.size] * world.size
        tuning = default_tuning(self.dtype, row.hidden)
        wanted = {key: given[key] for key in ("movers", "piece") if given[key]}
        tuning = replace(tuning, **wanted, **({"piece": 16} if row.kind == "rows" and not wanted.get("piece") else {}))
        tuning = replace(tuning, piece=min(tuning.piece, tuning.block))
        self.exchange = ExpertExchange(self.group, self.owners, tuning=tuning)
        self.apart = ExpertExchange(self.group, self.owners, tuning=replace(tuning, overlap=False))
        self.by_need = ExpertExchange(self.group, self.owners, room=1.5, tuning=tuning)
        made = torch.Generator(self.device).manual_seed(world.rank)

        def random(*shape: int) -> Any:
            return torch.randn(shape, generator=made, device=self.device)

        N, D, F, X, local = row.tokens, row.hidden, row.ffn, row.experts, self.owners[world.rank]
        self.x, self.dy = (random(N, D).to(self.dtype) for _ in range(2))
        self.weights, self.experts = random(N, X).softmax(dim=1).topk(row.k, dim=1)
        self.weights, self.experts = self.weights.contiguous(), self.experts.contiguous()
        shapes = ((local, F, D), (local, F, D), (local, D, F)) if F else ()
        self.factors = [(random(*shape) / shape[2] ** 0.5).to(self.dtype) for shape in shapes]
        owner = self.experts // self.owners[0]
        self.hosts: dict[Any, float] = {}  # seconds that a run took of the host, last time
        self.wire = int((owner != world.rank).sum()) * D * self.dtype.itemsize  # bytes that leave this GPU, one way

    # --- rows alone

    def steps(self) -> Any:
        from interlace.kernels.expert_exchange import Steps

        return Steps(self.exchange, self.x, self.row.tokens, self.row.k)

    def expected(self) -> Any:
        return (self.x.float() * self.weights.sum(dim=1, keepdim=True)).to(self.dtype)

    def ours(self) -> Callable[[Callable[[], None]], Any]:
        steps = self.steps()

        def run(mark: Callable[[], None]) -> Any:
            mark()
            call = steps.route(self.experts)
            slots = steps.send(self.x, call)
            mark()
            steps.give_back(slots, call)
            y, _ = steps.sum(call, self.weights, shared=False)
            mark()
            call = steps.again(call)
            steps.send(self.x, call)
            mark()
            steps.give_back(slots, call)
            steps.sum(call, None, shared=False)
            return y

        return run

    def graph(self) -> Callable[[Callable[[], None]], Any]:
        torch, steps = self.torch, self.steps()
        side = torch.cuda.Stream()

        def out() -> Any:
            call = steps.route(self.experts)
            return steps.send(self.x, call), call

        def back(slots: Any, call: Any) -> Any:
            steps.give_back(slots, call)
            return steps.sum(call, self.weights, shared=False)[0]

        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            steps.space.follow()
            back(*out())  # compiles
        torch.cuda.synchronize()
        there, here = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(there, capture_error_mode="thread_local"):
            steps.space.follow()
            kept = out()
        with torch.cuda.graph(here, capture_error_mode="thread_local"):
            y = back(*kept)

        def run(mark: Callable[[], None]) -> Any:
            mark()
            there.replay()
            mark()
            here.replay()
            mark()
            return y, kept

        return lambda mark: run(mark)[0]

    def peer(self, name: str) -> Callable[[Callable[[], None]], Any]:
        import peers.torch_experts as peers

        made: Any = (
            peers.Nccl(self.x, self.row.experts)
            if name == "torch"
            else peers.OnDevice(self.x, self.row.experts, self.row.k)
        )

        def run(mark: Callable[[], None]) -> Any:
            mark()
            made.dispatch(self.x, self.experts)
            mark()
            y = made.combine(self.weights)
            mark()
            return y

        return run

    # --- a layer

    def layer(self, forward: Callable[..., Any]) -> Callable[[Callable[[], None]], Any]:
        leaves = [each.clone().requires_grad_() for each in (self.x, self.weights, *self.factors)]

        def run(mark: Callable[[], None]) -> Any:
            mark()
            y = forward(*leaves[:2], self.experts, *leaves[2:])
            mark()
            grads = self.torch.autograd.grad(y, leaves, self.dy)
            mark()
            return y.detach(), *grads

        return run

    def alone(self) -> Callable[[Callable[[], None]], Any]:
        steps = self.steps()
        partial = self.torch.zeros(1, steps.capacity, device=self.device)

        def run(mark: Callable[[], None]) -> Any:
            mark()
            call = steps.route(self.experts)
            steps.give_back(steps.send(self.x, call), call)
            y, _ = steps.sum(call, self.weights, shared=False)
            mark()
            call = steps.again(call)
            steps.give_back(steps.send(self.dy, call, self.weights), call, partial)
            steps.sum(call, None, shared=True)
            mark()
            return y

        return run

    # --- all of a row

    def variants(self, names: Sequence[str]) -> dict[str, Callable[[Callable[[], None]], Any]]:
        from interlace.kernels.expert_plain import plain

        if "vdev" in names:
            return {"vdev": self.peer("vdev")} if self.row.kind == "rows" else {}
        made: dict[str, Callable[[Callable[[], None]], Any]] = {}
        if self.row.kind == "rows":
            if "ours" in names:
                made["ours"] = self.ours()
                if self.device.type == "cuda":
                    made["graph"] = self.graph()
            if "torch" in names:
                made["torch"] = self.peer("torch")
            return made
        if "ours" in names:
            ways = {"overlapped": self.exchange, "apart": self.apart, "by need": self.by_need}
            made |= {name: self.layer(way) for name, way in ways.items()} | {"exchange": self.alone()}
        made["torch"] = self.layer(lambda *given: plain(*given, self.group, self.owners))
        return made

    def gate(self, variants: dict[str, Callable[[Callable[[], None]], Any]]) -> dict[str, float]:
        """The largest difference of each variant, of the largest value; more than allowed leaves it out."""
        limit = 2e-2 if self.dtype == self.torch.bfloat16 else 1e-5
        reference = None if self.row.kind == "rows" else variants["torch"](lambda: None)
        apart: dict[str, float] = {}
        for name, run in list(variants.items()):
            found = run(lambda: None)
            if name == "exchange" or self.row.kind == "rows":
                pairs = [(found, self.expected())]
            else:
                pairs = list(zip(found, reference, strict=True))
            worst = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
            apart[name] = self.most(worst if worst == worst else 1e9)
            if apart[name] > limit:
                del variants[name]
        return apart

    def most(self, value: float) -> float:
        """Over the ranks."""
        found = self.torch.tensor([value], dtype=self.torch.float64, device=self.device)
        self.torch.distributed.all_reduce(found, op=self.torch.distributed.ReduceOp.MAX)
        return float(found)

    def timed(self, run: Callable[[Callable[[], None]], Any], inner: int) -> list[float]:
        """Microseconds of each part, the mean of `inner` runs, on the slowest rank; the device begins when the host, by
        what it took before, is done with handing them out."""
        from interlace.kernels.measure import begin_together

        torch, marks = self.torch, []

        def mark() -> None:
            if self.device.type == "cuda":
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(time.perf_counter())

        torch.distributed.barrier()
        begin_together(1.5 * self.hosts.get(run, 0.0) * inner, self.device, torch.distributed.group.WORLD)
        began = time.perf_counter()
        for _ in range(inner):
            run(mark)
        self.hosts[run] = (time.perf_counter() - began) / inner
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        each, parts = len(marks) // inner, []
        for part in range(each - 1):
            total = 0.0
            for call in range(inner):
                begin, end = marks[call * each + part], marks[call * each + part + 1]
                total += begin.elapsed_time(end) * 1e3 if self.device.type == "cuda" else (end - begin) * 1e6
            parts.append(self.most(total / inner))
        return parts

    def measure(self, rounds: int, names: Sequence[str]) -> dict[str, Any]:
        variants = self.variants(names)
        apart = self.gate(variants)
        inner = 1 if self.device.type == "cpu" else 20 if self.row.kind == "rows" else 3
        for run in variants.values() if self.device.type == "cuda" else ():
            self.timed(run, min(3, inner))
        samples: dict[str, list[list[float]]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, run in variants.items():
                samples[name].append(self.timed(run, inner))
        return {"row": asdict(self.row), "apart": apart, "samples": samples, "wire": self.most(self.wire)}


def ranks(world: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows until the budget ends, at least one; every rank decides alike, by the slowest clock."""
    import torch

    if "vdev" in given["variants"]:
        import peers.torch_experts as peers

        reason = peers.why_not_on_device()
        if reason:
            return [{"left out": f"vdev: {reason}"}]
    from interlace.kernels import workspace

    began, longest, found = time.monotonic(), 0.0, []
    for number in given["numbers"]:
        row = (SMOKE if given["smoke"] else ROWS)[number]
        flag = torch.tensor([time.monotonic() - began + 1.5 * longest], device=world.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        if found and given["budget"] and float(flag) > given["budget"]:
            break
        start = time.monotonic()
        world.status(operation=f"row {number}")
        bench = Bench(world, row, given)
        found.append(bench.measure(given["rounds"], given["variants"]))
        if world.rank == 0:
            join(Path(given["out"]), found[-1:], where(), given["command"])
            print(f"{row.name}: {time.monotonic() - start:.0f} s", flush=True)
        workspace.release(bench.group)
        del bench
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - start)
    return found if world.rank == 0 else []


# --- what is written -------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    low, middle, high = (value * scale for value in (min(values), statistics.median(values), max(values)))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def report(records: dict[str, Any]) -> list[str]:
    lines = ["# Rows to the experts of another GPU, and back", ""]
    for name, record in records.items():
        row, samples = record["row"], record["samples"]
        size = f"{row['tokens']} tokens a rank, hidden {row['hidden']}, {row['experts']} experts, top-{row['k']}"
        lines += [f"## {name}", "", f"{size}; {record['where']}; `{record['command']}`", ""]
        wrong = {key: value for key, value in record["apart"].items() if key not in samples}
        lines += [f"Left out, {key} differs from the reference by {value:.2g}." for key, value in wrong.items()]
        lines += rows_table(record) if not row["ffn"] else layer_table(name, record)
        lines.append("")
    return lines


def rows_table(record: dict[str, Any]) -> list[str]:
    lines = ["| variant | dispatch, us | on the wire, GB/s | combine, us | on the wire, GB/s | known, us |"]
    lines.append("|---" * 6 + "|")
    for name, rounds in record["samples"].items():
        parts = list(zip(*rounds, strict=True))
        cells = []
        for part in parts[:2]:
            cells += [spread(part), f"{record['wire'] / statistics.median(part) / 1e3:.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {spread(parts[2]) if len(parts) > 2 else '-'} |")
    if record["row"]["tokens"] == 4096:
        dispatch, combine = (f"{PUBLISHED[key]:.0f}" for key in ("dispatch", "combine"))
        lines.append(f"| kraken, two H100 (published) | {dispatch} | - | {combine} | - | - |")
        best = {
            key: min((statistics.median(r[at] for r in rounds) for n, rounds in record["samples"].items()
                      if n in ("ours", "graph")), default=float("inf"))
            for at, key in enumerate(TARGETS)
        }  # fmt: skip
        lines += [""] + [
            f"- {key} <= {limit:.0f} us: {'met' if best[key] <= limit else 'missed'} ({best[key]:.1f})"
            for key, limit in TARGETS.items()
        ]
    return lines


def layer_table(name: str, record: dict[str, Any]) -> list[str]:
    lines = ["| variant | forward, ms | backward, ms | both, ms |", "|---|---|---|---|"]
    totals = {}
    for variant, rounds in record["samples"].items():
        forward, backward = zip(*rounds, strict=True)
        totals[variant] = [a + b for a, b in rounds]
        lines.append(
            f"| {variant} | {spread(forward, 1e-3)} | {spread(backward, 1e-3)} | {spread(totals[variant], 1e-3)} |"
        )
    if {"overlapped", "apart", "exchange"} <= totals.keys():
        rounds = zip(totals["overlapped"], totals["apart"], totals["exchange"], strict=True)
        hidden = [(off - on) / alone for on, off, alone in rounds]
        middle = statistics.median(hidden)
        target = HIDDEN.get(name)
        verdict = "" if target is None else f"; target >= {target:.2f}: {'met' if middle >= target else 'missed'}"
        lines += ["", f"- hidden {spread(hidden)}, exposed {1 - middle:.2f} of the exchange{verdict}"]
    if {"overlapped", "torch"} <= totals.keys():
        ratios = [theirs / ours for ours, theirs in zip(totals["overlapped"], totals["torch"], strict=True)]
        lines.append(f"- torch / overlapped {spread(ratios)}")
    return lines


def join(path: Path, found: list[dict[str, Any]], where: str, command: str) -> None:
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for record in found:
        name = record["row"]["name"]
        before = records.get(name, {"samples": {}, "apart": {}})
        for key in ("samples", "apart"):  # of another run's variants
            record[key] = {**before[key], **record[key]}
        records[name] = {**record, "where": where, "command": command}
    path.write_text(json.dumps(records) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(report(records)) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default=":")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds, the start of the ranks aside; 0 = no end")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--variants", default="ours,torch")
    parser.add_argument("--movers", type=int, default=0)
    parser.add_argument("--piece", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    every = SMOKE if options.smoke else ROWS
    first, _, last = options.rows.partition(":")
    numbers = list(range(len(every)))[int(first or 0) : int(last) if last else None]
    given = {key: getattr(options, key) for key in ("budget", "rounds", "movers", "piece", "smoke")}
    path = options.out or Path("expert_parallel.json")
    given |= {
        "out": str(path),
        "command": " ".join(["python", *sys.argv]),
        "numbers": numbers,
        "variants": options.variants.split(","),
    }
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.update(QUIET)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
    from interlace import launch

    device = "cpu" if options.smoke else "cuda"
    found = launch.run_local("expert_parallel:ranks", options.nproc, {"given": given}, device=device, timeout=300.0)[0]
    print("\n".join(record["left out"] for record in found if "left out" in record) or "", end="\n" * (not found))
    found = [record for record in found if "row" in record]
    if found:
        print(path.with_suffix(".md").read_text(encoding="utf-8"))
    left = numbers[len(found) :]
    if left:
        print(f"left: rows {left}; go on with --rows {left[0]}:{left[-1] + 1}")


def where() -> str:
    import torch
    import triton

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        commit = "unknown"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return f"{machine}, {versions}, commit {commit}, {datetime.date.today()}"


if __name__ == "__main__":
    main()
