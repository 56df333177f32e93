"""The Triton product of the fused kernels beside cuBLAS, on one GPU: no ranks, no transfers.

    python benchmarks/gemm_core.py --out FILE.md [--rows A:B | --only MxNxK,...] [--rounds 7] [--budget SECONDS]
                                   [--search] [--list]

Rows: M of the whole batch by the products of a layer of five models on one rank of tp=2 and tp=8, bf16 on random data;
`--rows A:B` takes some of them by number, `--only` by shape, `--list` prints them all.  Each is first compared with the
product in fp32 (one rounding, or twice as far as cuBLAS is), then timed: cuBLAS and the product in turn, `--rounds`
times, each time so many calls that the GPU works for some milliseconds, handed out before it begins; medians, and the
range of the ratio over the rounds.  Factors alternate between copies that together outgrow the L2 cache.  Weights are
[N K], as in layers.

`--search` times a short list of tiles instead of the default one, and some of them with their last round cut along K
where that may pay (`Tile.split`); it names the quickest of all, and the quickest with and without a cut.  The list of
winners by shape class is what `default_tile` and the tuned tables start from.  FILE.md keeps one line a row: later
calls replace the rows that they measure and leave the others.  `--budget` ends after so many seconds and says which
rows are left.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
import triton

from interlace.kernels.candidate import Problem, Tile
from interlace.kernels.measure import stand_still
from interlace.kernels.tile import MOST as ALL
from interlace.kernels.tile import default_tile, is_interpreted, matmul, programs, splits

M_ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BUSY = 4e-3  # seconds that one timing lasts, where MOST calls do
MOST, AHEAD = 64, 200e-6  # calls of a timing; seconds of the host that one takes at most
CACHE = 120 << 20  # bytes of factors that calls alternate between, at least
RATE = 600e12  # FLOP/s, and
READ = 4e12  # bytes/s, for the number of calls of a timing

LARGE = (
    Tile(128, 256, 64, 8, 8, 4, True, 2),
    Tile(128, 256, 64, 8, 8, 3, True, 1),
    Tile(128, 256, 64, 16, 8, 3, True, 1),
    Tile(128, 256, 64, 8, 8, 3, False, 1),
    Tile(128, 128, 64, 8, 8, 5, True, 1),
    Tile(128, 128, 64, 8, 4, 4, True, 1),
    Tile(64, 256, 64, 8, 4, 4, True, 1),
)
SMALL = (
    Tile(16, 32, 256, 8, 4, 4, False),
    Tile(16, 64, 128, 8, 4, 5, False),
    Tile(16, 128, 128, 8, 4, 4, False),
    Tile(64, 64, 128, 8, 4, 4, False),
    Tile(64, 128, 64, 8, 4, 5, True),
    Tile(128, 64, 64, 8, 4, 5, True),
    Tile(128, 128, 64, 8, 8, 5, True),
)
CUT = (LARGE[0], LARGE[1], LARGE[5])  # of the large ones, whose last round is also tried in pieces


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gates: int = 2
    head: int = 128


MODELS = {
    "Llama-3 8B": Model(4096, 32, 8, 14336),
    "Llama-3 70B": Model(8192, 64, 8, 28672),
    "Llama-3 405B": Model(16384, 128, 8, 53248),
    "GPT-3 175B": Model(12288, 96, 96, 49152, gates=1),
    "Qwen3-32B": Model(5120, 64, 8, 25600),
}


@dataclass(frozen=True)
class Row:
    M: int
    N: int
    K: int
    names: str

    @property
    def key(self) -> str:
        return f"{self.M} x {self.N} x {self.K}"


def products(model: Model, tp: int) -> Iterator[tuple[str, int, int]]:
    """(what, N, K) on one rank."""
    query, keys = model.heads * model.head, model.kv_heads * model.head
    yield "qkv", (query + 2 * keys) // tp, model.hidden
    yield "out", model.hidden, query // tp
    yield "up", model.gates * model.ffn // tp, model.hidden
    yield "down", model.hidden, model.ffn // tp


def rows() -> list[Row]:
    """Every shape once, tp=8 first, few rows last."""
    named: dict[tuple[int, int], list[str]] = {}
    for tp in (8, 2):
        for name, model in MODELS.items():
            for what, N, K in products(model, tp):
                named.setdefault((N, K), []).append(f"{name} tp={tp} {what}")
    return [Row(M, N, K, ", ".join(names)) for M in reversed(M_ROWS) for (N, K), names in named.items()]


# --- one row ---------------------------------------------------------------------------------------------------------


@dataclass
class Factors:
    """Copies of x and weight that calls take in turn."""

    x: list[torch.Tensor]
    weight: list[torch.Tensor]
    out: torch.Tensor
    at: int = 0

    @classmethod
    def of(cls, row: Row, device: torch.device) -> Factors:
        nbytes = 2 * (row.M * row.K + row.N * row.K)
        copies = 1 if device.type == "cpu" else max(1, min(16, -(-CACHE // nbytes)))
        x = [torch.randn(row.M, row.K, device=device).bfloat16() for _ in range(copies)]
        weight = [(torch.randn(row.N, row.K, device=device) / row.K**0.5).bfloat16() for _ in range(copies)]
        return cls(x, weight, torch.empty(row.M, row.N, dtype=torch.bfloat16, device=device))

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.at = (self.at + 1) % len(self.x)
        return self.x[self.at], self.weight[self.at]


def wrong(factors: Factors, tile: Tile | None) -> str:
    """Why the product may not be timed; nothing if it may.  Bands of rows keep the fp32 reference small."""
    x, weight = factors.x[0], factors.weight[0]
    factors.out.fill_(float("nan"))
    matmul(x, weight, out=factors.out, tile=tile)
    library = torch.matmul(x, weight.t())
    ours = theirs = most = 0.0
    for first in range(0, len(x), 2048):
        exact = x[first : first + 2048].float() @ weight.float().t()
        most = max(most, exact.abs().max().item())
        ours = max(ours, (factors.out[first : first + 2048].float() - exact).abs().max().nan_to_num(nan=1e9).item())
        theirs = max(theirs, (library[first : first + 2048].float() - exact).abs().max().item())
    if ours <= max(2 * theirs, most / 128):  # the interpreter rounds towards 0, GPUs at most half as far
        return ""
    return f"off by {ours / most:.1e} of the largest, cuBLAS by {theirs / most:.1e}"


def seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Of one call.  A GPU begins when the host has handed out all of them: a short product takes it less than that."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stand_still(AHEAD * times, device)
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def searched(row: Row, default: Tile, places: int) -> list[Tile]:
    """The tiles of a search: whole ones, then those whose last round is cut along K."""
    whole, in_pieces, most = (LARGE, CUT, 2) if row.M > 256 else (SMALL, SMALL, 1)
    more = [replace(t, split=split) for t in in_pieces for split in splits(t, row.M, row.N, row.K, places, most)]
    return list(dict.fromkeys([default, *whole, *more]))


def shown(tile: Tile) -> str:
    return " ".join(str(int(value)) for value in astuple(tile))


def measure(row: Row, tiles: list[Tile], rounds: int, device: torch.device) -> tuple[Tile, str, str] | str:
    """The quickest tile, the line of the table, and the quickest with and without a cut; or why there is none."""
    factors = Factors.of(row, device)
    calls: dict[Tile | None, Callable[[], object]] = {}

    def library() -> None:
        x, weight = factors.next()
        torch.mm(x, weight.t(), out=factors.out)

    def product(tile: Tile) -> Callable[[], object]:
        def call() -> None:
            x, weight = factors.next()
            matmul(x, weight, out=factors.out, tile=tile)

        return call

    refused = []
    for tile in tiles:
        try:
            why = wrong(factors, tile)
        except triton.runtime.errors.OutOfResources as error:
            why = str(error).split(".")[0]
        if why:
            refused.append(f"{astuple(tile)}: {why}")
        else:
            calls[tile] = product(tile)
    if not calls:
        return "; ".join(refused)
    calls[None] = library
    estimate = max(2.0 * row.M * row.N * row.K / RATE, 2 * (row.N + row.M) * row.K / READ, 5e-6)
    times = 1 if device.type == "cpu" else max(1, min(MOST, round(BUSY / estimate)))
    for call in calls.values():
        call()
    taken: dict[Tile | None, list[float]] = {tile: [] for tile in calls}
    for _ in range(rounds):
        for tile, call in calls.items():
            taken[tile].append(seconds(call, times, device))
    medians = {tile: statistics.median(taken[tile]) for tile in calls if tile is not None}
    best = min(medians, key=medians.__getitem__)
    kinds = {
        "whole": [tile for tile in medians if tile.split == 1],
        "cut": [tile for tile in medians if tile.split != 1],
    }
    firsts = {kind: min(some, key=medians.__getitem__) for kind, some in kinds.items() if some}
    apart = ", ".join(
        f"{kind} {medians[tile] * 1e6:.1f} us ({shown(tile)}), "
        f"{statistics.median(a / b for a, b in zip(taken[None], taken[tile], strict=True)):.3f} of cuBLAS"
        for kind, tile in firsts.items()
    )
    ratios = [a / b for a, b in zip(taken[None], taken[best], strict=True)]
    cublas, ours = statistics.median(taken[None]), medians[best]
    rate = 2.0 * row.M * row.N * row.K / ours / 1e12
    line = (
        f"| {row.key} | {cublas * 1e6:.1f} | {ours * 1e6:.1f} | {statistics.median(ratios):.3f} | "
        f"{min(ratios):.3f} to {max(ratios):.3f} | {rate:.0f} | {shown(best)} | {row.names} |"
    )
    return best, line + (f" {'; '.join(refused)}" if refused else ""), apart


# --- the table -------------------------------------------------------------------------------------------------------

HEAD = "| M x N x K | cuBLAS us | product us | ratio | range | TFLOP/s | tile | where |\n" + "|---" * 8 + "|\n"


def merge(path: Path, lines: dict[str, str], command: str, device: torch.device) -> None:
    """One file for all calls: its rows, those measured now in place of older ones, in the order of `rows`."""
    old = path.read_text().splitlines() if path.exists() else []
    kept = {found[1]: line for line in old if (found := re.match(r"\| (\d+ x \d+ x \d+) \|", line))}
    runs = [line for line in old if line.startswith("- ")]
    kept |= lines
    order = [key for key in (row.key for row in rows()) if key in kept]
    order += [key for key in kept if key not in order]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    runs.append(
        f"- `{command}`: {len(lines)} rows, commit {commit}, torch {torch.__version__}, Triton {triton.__version__}"
    )
    path.write_text(
        f"# The Triton product beside cuBLAS, {name}\n\nbf16, weights [N K], random data.  Ratio: cuBLAS time over the "
        "product's, median and range of the rounds; above 1 the product is quicker.  Tile: block M, N, K, group, "
        "warps, stages, flatten, parts, and pieces along K of each tile of the last round (0: as many in all as there "
        "are multiprocessors).\n\n" + HEAD + "\n".join(kept[key] for key in order) + "\n\n" + "\n".join(runs) + "\n"
    )


def winners(best: dict[Row, Tile]) -> str:
    """The commonest winner by M and by how many tiles of 128 x 256 there are a multiprocessor of 132."""
    classes: dict[tuple[int, str], Counter[Tile]] = {}
    for row, tile in best.items():
        waves = -(-row.M // 128) * -(-row.N // 256) / 132
        size = "< 1" if waves < 1 else "1 to 4" if waves < 4 else "> 4"
        classes.setdefault((row.M, size), Counter())[tile] += 1
    lines = []
    for (M, size), found in sorted(classes.items(), key=lambda item: (item[0][0], item[0][1])):
        ranked = ", ".join(f"{tile} x{count}" for tile, count in found.most_common(3))
        lines.append(f"M = {M}, {size} rounds: {ranked}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=":")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    every = [Row(5, 18, 24, "tiny"), Row(33, 16, 40, "tiny")] if given.smoke else rows()
    if given.list:
        for number, row in enumerate(every):
            print(number, row.key, row.names)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert device.type == "cuda" or is_interpreted(), "no GPU: set TRITON_INTERPRET=1, and --smoke"
    first, _, last = given.rows.partition(":")
    chosen = list(enumerate(every))[int(first or 0) : int(last) if last else len(every)]
    if given.only:
        wanted = {key.replace("x", " x ") for key in given.only.replace(" ", "").split(",")}
        chosen = [(number, row) for number, row in enumerate(every) if row.key in wanted]
        assert len(chosen) == len(wanted), f"no such rows: {wanted - {row.key for _, row in chosen}}; see --list"
    places = programs(device, ALL)
    lines: dict[str, str] = {}
    best: dict[Row, Tile] = {}
    began, left = time.monotonic(), []
    for number, row in chosen:
        if time.monotonic() - began > given.budget:
            left.append(number)
            continue
        tiles = [default_tile(Problem("matmul", row.M, row.N, row.K, torch.bfloat16, 1))]
        if given.smoke:
            tiles = [Tile(16, 16, 16, 2, 4, 2), Tile(16, 16, 16, 2, 4, 2, split=2)]
        elif given.search:
            tiles = searched(row, tiles[0], places)
        found = measure(row, tiles, given.rounds, device)
        if isinstance(found, str):
            print(f"{number} {row.key} WRONG: {found}", flush=True)
            continue
        best[row], lines[row.key], apart = found
        print(number, lines[row.key], flush=True)
        if given.search:
            print(f"    {apart}", flush=True)
    if given.search:
        print(winners(best))
    if left:
        print(f"left: rows {left[0]}:{left[-1] + 1}")
    if given.out is not None:
        words = (f"--only {given.only}" if given.only else f"--rows {given.rows}") + f" --rounds {given.rounds}"
        words += " --search" if given.search else ""
        merge(given.out, lines, f"benchmarks/gemm_core.py {words}", device)


if __name__ == "__main__":
    main()
