"""What the records of `fused_matmul.py` say: figures of a row, the table of all rows, and which targets hold.

A record holds every sample, in microseconds, by column and round: "gemm"; "serial default", "serial window", "serial
zero-cta"; "async-tp"; "one-shot torch"; and "own NAME" for each right candidate.  Rounds are paired, so two columns are
compared by the median of their ratios, with a 95 % interval from 2,000 resamplings of the rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused import shapes

RESAMPLES = 2000
SLOWER = 1.02  # a ratio whose interval begins above this is a loss
HELD_OUT = 1.03
Record = Mapping[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of resampled `values`; the same for the same values."""
    found = torch.tensor(values, dtype=torch.float64)
    picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))
    medians = found[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


@dataclass(frozen=True)
class Figures:
    """Of one row, in microseconds: medians of the rounds that count (for a choice picked from the even rounds of this
    very measurement, the odd ones).  plain: the fastest serial way; wire: bytes over the measured rate of a copy
    engine; limit: what no overlap can beat."""

    record: Record
    medians: Mapping[str, float]
    plain_name: str
    chosen: str

    @classmethod
    def of(cls, record: Record) -> Figures:
        medians = {name: statistics.median(_counted(record, name)) for name in record["samples"]}
        serial = {name: median for name, median in medians.items() if name.startswith("serial ")}
        return cls(record, medians, min(serial, key=serial.__getitem__), f"own {record['chosen']}")

    @property
    def gemm(self) -> float:
        return self.medians["gemm"]

    @property
    def wire(self) -> float:
        return float(self.record["wire"])

    @property
    def limit(self) -> float:
        return max(self.gemm, self.wire)

    @property
    def plain(self) -> float:
        return self.medians[self.plain_name]

    @property
    def time(self) -> float:
        return self.medians[self.chosen]

    @property
    def hidden(self) -> float:
        """E: the share of what serial takes over the product that is gone; nan where serial takes nothing over it."""
        return 1 - (self.time - self.gemm) / (self.plain - self.gemm) if self.plain > self.gemm else math.nan

    def ratio(self, other: str) -> tuple[float, float, float]:
        """(low, median, high) of the chosen one over another column, round by round."""
        pairs = zip(_counted(self.record, self.chosen), _counted(self.record, other), strict=True)
        ratios = [own / theirs for own, theirs in pairs]
        low, high = interval(ratios)
        return low, statistics.median(ratios), high

    @property
    def best_own(self) -> str:
        own = [name for name in self.medians if name.startswith("own ")]
        return min(own, key=self.medians.__getitem__)


def _counted(record: Record, name: str) -> list[float]:
    samples: list[float] = record["samples"][name]
    return samples[1::2] if record["source"] == "picked" else samples


# --- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """text: the target; rows: how many it is about; failures: a sentence for each row that misses it."""

    text: str
    rows: int
    failures: Sequence[str]

    @property
    def word(self) -> str:
        return "no rows" if not self.rows else "FAIL" if self.failures else "pass"


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    rows = [Figures.of(record) for record in records]
    measured = [row for row in rows if row.record["kind"] != "held-out"]
    ratio = {id(row): row.wire / row.gemm for row in rows}
    big = [row for row in measured if row.record["M"] >= 4096 and 0.1 <= ratio[id(row)] <= 0.8]
    reduces = [row for row in measured if row.record["op"] == "matmul_all_reduce" and row.record["graph"]]
    few = [row for row in reduces if row.record["M"] <= 64]
    return [
        _each(
            "1 chosen never slower than plain or async-TP (interval of the ratio above 1.02)", measured, _never_slower
        ),
        _each("2 M >= 4096, wire 0.1 to 0.8 of gemm: t - gemm <= max(4 % of plain - gemm, 12 us)", big, _exposed),
        _median(big, "all_gather_matmul", 0.96),
        _median(big, "matmul_reduce_scatter", 0.95),
        _each("3 wire above 0.8 of gemm: limit / t >= 0.85", [r for r in measured if ratio[id(r)] > 0.8], _near_limit),
        _each("4 all-reduce M <= 64 in a CUDA graph: t - gemm <= 8 us", few, _few),
        _each("4 all-reduce M <= 64: never slower than cuBLAS and torch's one-shot sum", few, _one_shot),
        _each("4 all-reduce M <= 256: plain / t >= min(1.3, 0.85 plain / limit)", reduces, _gain),
        _each(
            "6 shapes that the table lacks: within 3 % of the best own candidate",
            [row for row in rows if row.record["kind"] == "held-out"],
            _held_out,
        ),
    ]


def _each(text: str, rows: Sequence[Figures], why: Callable[[Figures], str]) -> Verdict:
    failures = [f"{row.record['key']}: {said}" for row in rows if (said := why(row))]
    return Verdict(text, len(rows), failures)


def _median(big: Sequence[Figures], op: str, least: float) -> Verdict:
    rows = [row for row in big if row.record["op"] == op and row.plain > row.gemm]
    text = f"2 the same rows: median E >= {least} ({op})"
    if not rows:
        return Verdict(text, 0, ())
    found = statistics.median(row.hidden for row in rows)
    return Verdict(text, len(rows), () if found >= least else (f"median E {found:.3f}",))


def _never_slower(row: Figures) -> str:
    for other in (row.plain_name, "async-tp"):
        if other in row.medians and (found := row.ratio(other))[0] > SLOWER:
            return f"{row.chosen} takes {found[1]:.3f} of {other} ({found[0]:.3f} to {found[2]:.3f})"
    return ""


def _exposed(row: Figures) -> str:
    over, allowed = row.time - row.gemm, max(0.04 * (row.plain - row.gemm), 12.0)
    return f"{over:.1f} us over the product, allowed {allowed:.1f} (E {row.hidden:.3f})" if over > allowed else ""


def _near_limit(row: Figures) -> str:
    share = row.limit / row.time
    return f"limit / t {share:.3f} (limit {row.limit:.1f} us, t {row.time:.1f})" if share < 0.85 else ""


def _few(row: Figures) -> str:
    over = row.time - row.gemm
    return f"{over:.1f} us over the product" if over > 8.0 else ""


def _one_shot(row: Figures) -> str:
    if "one-shot torch" not in row.medians:
        return f"torch's one-shot sum did not run ({row.record['missing'].get('one-shot torch', 'no reason')})"
    low, middle, high = row.ratio("one-shot torch")
    return f"{middle:.3f} of torch's one-shot ({low:.3f} to {high:.3f})" if low > SLOWER else ""


def _gain(row: Figures) -> str:
    gain, least = row.plain / row.time, min(1.3, 0.85 * row.plain / row.limit)
    return f"{gain:.3f} x plain, wanted {least:.3f}" if gain < least else ""


def _held_out(row: Figures) -> str:
    low, middle, high = row.ratio(row.best_own)
    said = f"{row.chosen} takes {middle:.3f} of {row.best_own} ({low:.3f} to {high:.3f})"
    return said if low > HELD_OUT else ""


# --- text ------------------------------------------------------------------------------------------------------------


def report(records: Sequence[Record]) -> Iterator[str]:
    """Markdown: what was measured where, the targets, and a row each."""
    machines = sorted({f"{r['machine']}, {r['versions']}, commit {r['commit']}, {r['date']}" for r in records})
    yield f"# Fused products, {len(records)} rows"
    yield ""
    yield from machines
    yield ""
    yield (
        "Medians in us of the slowest rank, interleaved, the host ahead of the device; [95 % interval]; "
        "E = 1 - (t - gemm) / (plain - gemm); host: what a call of the chosen one / of the plain one takes of the host."
    )
    yield ""
    for verdict in verdicts(records):
        yield f"- {verdict.word}: {verdict.text} ({verdict.rows} rows)"
        yield from (f"  - {failure}" for failure in verdict.failures)
    wrong = [(record["key"], name, why) for record in records for name, why in record["wrong"].items()]
    if wrong:
        yield ""
        yield from (f"- WRONG: {key}: {name}: {why}" for key, name, why in wrong)
    own = sorted({name for record in records for name in record["samples"] if name.startswith("own ")})
    heads = [
        "product",
        "kind",
        "wire",
        "gemm",
        "plain",
        "by",
        "async-TP",
        "one-shot",
        *own,
        "chosen",
        "t",
        "E",
        "limit/t",
        "host",
    ]
    published = any(_published(record) for record in records)
    heads += ["plain / t", "published, 8 x H800: Triton-distributed, FLUX"] if published else []
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for record in records:
        row = Figures.of(record)
        cells = [*_cells(row, own), f"{row.plain / row.time:.2f}", _published(record) or "-"]
        yield f"| {' | '.join(cells if published else cells[:-2])} |"


def _published(record: Record) -> str:
    """Their ratios to PyTorch's product and NCCL, for a row that others have published and that ran on four or more."""
    found = shapes.PUBLISHED.get((record["op"], record["M"], record["N"], record["K"]))
    return "" if found is None or record["world"] < 4 else f"{found[0]:.2f}, {found[1]:.2f}"


def _cells(row: Figures, own: Sequence[str]) -> Iterator[str]:
    record = row.record
    yield f"{record['key']}{' (graph)' if record['graph'] else ''}"
    yield record["kind"]
    yield f"{row.wire:.1f}"
    yield f"{row.gemm:.1f}"
    yield f"{row.plain:.1f}"
    yield row.plain_name.removeprefix("serial ")
    for name in ("async-tp", "one-shot torch", *own):
        yield f"{row.medians[name]:.1f}" if name in row.medians else "-"
    yield f"{record['chosen']} ({record['source']})"
    low, high = interval(_counted(record, row.chosen))
    yield f"{row.time:.1f} [{low:.1f} {high:.1f}]"
    yield f"{row.hidden:.3f}" if row.plain > row.gemm else "-"
    yield f"{row.limit / row.time:.3f}"
    hosts = record.get("hosts", {})
    yield " / ".join(f"{hosts[name]:.0f}" if name in hosts else "-" for name in (row.chosen, row.plain_name))
