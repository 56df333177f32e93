"""Ledgers as text and as plain values: what the terminal, the page and `--json` show.

table(chosen, all)          rows of words: label, a column a rank (or mean, least, most), share, range over steps
differences(one, other)     label, one, other, difference: of means over ranks
to_json(chosen, all)        everything in seconds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from interlace.report.kernels import short_name
from interlace.report.ledger import SECOND, Account, Ledger, Row

MOST_RANKS = 8  # with a column of their own
MOST_LATE = 4  # waited for, by name, on an axis


@dataclass(frozen=True)
class Table:
    """Words: `lines` have as many as `heads`; the last `sums` of them are totals, not parts of the step."""

    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    sums: int


def table(chosen: Ledger, everything: Sequence[Ledger] = ()) -> Table:
    """The ledger of one step, with the range of each row's mean over all steps where there are several."""
    chosen, everything = chosen.merged(MOST_LATE), [ledger.merged(MOST_LATE) for ledger in everything]
    size, unit = scale(chosen.seconds)
    accounts = chosen.accounts
    few = len(accounts) <= MOST_RANKS
    columns = [f"rank {account.rank}" for account in accounts] if few else ["mean", "least", "most"]
    several = len(everything) > 1

    def words(values: Sequence[float], digits: int = 2) -> list[str]:
        """One rank's each, or their mean and ends with the ranks there."""
        if few:
            return [f"{value / size:.{digits}f}" if value else "·" for value in values]
        least, most = min(values), max(values)
        ends = [f"{n / size:.{digits}f} ({accounts[list(values).index(n)].rank})" for n in (least, most)]
        return [f"{sum(values) / len(values) / size:.{digits}f}", *ends]

    def line(label: str, values: list[float], ranges: Sequence[float]) -> tuple[str, ...]:
        share = 100 * sum(values) / max(sum(account.span for account in accounts) / SECOND, 1e-30)
        over = [f"{min(ranges) / size:.2f} to {max(ranges) / size:.2f}"] if several else []
        return (label, *words(values), f"{share:.1f} %", *over)

    lines = [
        line(
            row.label, [account.rows.get(row, 0) / SECOND for account in accounts], [_mean(e, row) for e in everything]
        )
        for row in chosen.rows
    ]
    spans = [account.span / SECOND for account in accounts]
    lines.append(line("step", spans, [sum(a.span for a in e.accounts) / len(e.accounts) / SECOND for e in everything]))
    heads = ("", *(f"{column}, {unit}" for column in columns), "share", *(["all steps"] if several else []))
    return Table(heads, tuple(lines), 1)


def _mean(ledger: Ledger, row: Row) -> float:
    return ledger.mean(row)


def transfer_lines(chosen: Ledger) -> list[str]:
    """What transfers did beside the rows: under way, of that hidden, one after another."""
    lines = []
    for account in chosen.accounts[:MOST_RANKS]:
        if account.busy:
            size, unit = scale(account.busy / SECOND)
            hidden = 100 * account.hidden / account.busy
            lines.append(
                f"rank {account.rank}: transfers under way {account.busy / SECOND / size:.2f} {unit}, {hidden:.0f} % "
                f"of it hidden; one after another they would take {account.total / SECOND / size:.2f} {unit}"
            )
    return lines


def named_lines(chosen: Ledger, kinds: Sequence[str], most: int = 5) -> list[str]:
    """The names that took most of some kinds of time, over ranks."""
    total: Counter[str] = Counter()
    for account in chosen.accounts:
        for (kind, name), ticks in account.names.items():
            if kind in kinds:
                total[short_name(name)] += ticks
    size, unit = scale(chosen.seconds)
    ranks = len(chosen.accounts)
    return [f"{ticks / ranks / SECOND / size:.2f} {unit}  {name}" for name, ticks in total.most_common(most)]


def differences(one: Ledger, other: Ledger) -> Table:
    """Two ledgers row by row: means over ranks, without the names of late ranks; the differences sum up too."""
    first, second = one.merged(), other.merged()
    size, unit = scale(max(one.seconds, other.seconds))
    rows = sorted({*first.rows, *second.rows}, key=lambda row: row.order)
    whole = _span(first)

    def line(label: str, a: float, b: float) -> tuple[str, ...]:
        change = 100 * (b - a) / whole if whole else 0.0
        shown = [f"{a / size:.2f}" if a else "·", f"{b / size:.2f}" if b else "·"]
        return (label, *shown, f"{(b - a) / size:+.2f}", f"{change:+.1f} %")

    lines = [line(row.label, first.mean(row), second.mean(row)) for row in rows]
    lines.append(line("step", whole, _span(second)))
    return Table(("", f"this, {unit}", f"other, {unit}", f"other - this, {unit}", "of this step"), tuple(lines), 1)


def to_json(chosen: Ledger, everything: Sequence[Ledger]) -> dict[str, Any]:
    """Plain values, in seconds."""
    return {
        "step": chosen.step,
        "steps": [{"step": ledger.step, "seconds": ledger.seconds} for ledger in everything],
        "ranks": [_account_json(account) for account in chosen.accounts],
    }


def differences_json(one: Ledger, other: Ledger) -> list[dict[str, Any]]:
    first, second = one.merged(), other.merged()
    return [
        {
            "row": row.label, "kind": row.kind, "axis": row.axis, "this": first.mean(row), "other": second.mean(row),
            "difference": second.mean(row) - first.mean(row),
        }
        for row in sorted({*first.rows, *second.rows}, key=lambda row: row.order)
    ]  # fmt: skip


def _account_json(account: Account) -> dict[str, Any]:
    rows = sorted(account.rows, key=lambda row: row.order)
    named: dict[str, dict[str, float]] = {}
    for (kind, name), ticks in sorted(account.names.items(), key=lambda item: -item[1]):
        if len(named.setdefault(kind, {})) < 20:
            named[kind][name] = ticks / SECOND
    return {
        "rank": account.rank,
        "begin": account.begin,
        "seconds": account.span / SECOND,
        "rows": [
            {
                "row": row.label, "kind": row.kind, "axis": row.axis, "late": row.late,
                "seconds": account.rows[row] / SECOND,
            }
            for row in rows
        ],
        "transfers": {
            "under_way": account.busy / SECOND, "hidden": account.hidden / SECOND, "sum": account.total / SECOND,
            "exposed": (account.busy - account.hidden) / SECOND,
        },
        "names": named,
    }  # fmt: skip


def _span(ledger: Ledger) -> float:
    return sum(account.span for account in ledger.accounts) / len(ledger.accounts) / SECOND


def scale(seconds: float) -> tuple[float, str]:
    """The unit in which a time has one to four digits before the point."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 10 * size or (unit == "ms" and seconds >= 1e-3):
            return size, unit
    return 1e-6, "µs"
