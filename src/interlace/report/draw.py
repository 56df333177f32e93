"""A run's metrics as one SVG: the loss against the step, below it the throughput and the share of time waited.

    loss_curve(rows)                  rows of metrics.jsonl -> the text of a picture that needs no other file
    write_loss_curve(metrics, svg)    the same from file to file

Faint lines are the values themselves, strong ones their centred mean.  Of many rows the lowest and the highest in each
slice of the width are drawn, so a spike stays visible and the picture small.  The picture brings its own background and
follows the reader's light or dark scheme.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.report.svg import round_up, rule, si, text, words

WIDTH, HEIGHT = 860, 490
LEFT, RIGHT = 64, 796  # of both panels
LOSS = (98, 334)  # top and bottom of a panel
RATE = (380, 442)
SLICES = 360  # of the width; each keeps two values of a line
LARGEST = 1e30  # a value beyond it counts as not finite: nothing else would be seen beside it
TITLE_LENGTH = 90

STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#59636e}
.title{font-size:16px;font-weight:600;fill:#1f2328}
.card{fill:#ffffff;stroke:#d1d9e0}
.grid{stroke:#e6eaef}.axis{stroke:#afb8c1}
.loss,.rate,.wait,.bad{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.loss{stroke:#0969da}.rate{stroke:#1a7f37}.wait{stroke:#bc4c00}.bad{stroke:#d1242f}
.raw{stroke-width:1;opacity:.45}
text.loss,text.rate,text.wait,text.bad{stroke:none}
text.loss{fill:#0969da;font-weight:600}text.rate{fill:#1a7f37}text.wait{fill:#bc4c00}text.bad{fill:#d1242f}
@media (prefers-color-scheme:dark){
text{fill:#9198a1}.title{fill:#f0f6fc}.card{fill:#0d1117;stroke:#30363d}.grid{stroke:#21262d}.axis{stroke:#59636e}
.loss{stroke:#58a6ff}.rate{stroke:#3fb950}.wait{stroke:#f0883e}.bad{stroke:#f85149}
text.loss{fill:#58a6ff}text.rate{fill:#3fb950}text.wait{fill:#f0883e}text.bad{fill:#f85149}}
"""

Point = tuple[float, float | None]  # step and value; None where there is no finite one


@dataclass(frozen=True)
class Scale:
    """Values `low` .. `high` -> pixels `begin` .. `end`, evenly or by logarithm, and the values that get a tick."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def loss_curve(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """The picture of a run, from the rows of its metrics.jsonl (keys step, loss, tokens_per_s, waited, step_s).

    A row without a whole, finite step is left out, and of two rows of one step (a run that was resumed) the later
    counts.  `waited` (seconds by axis) is drawn as a share of `step_s`.
    """
    by_step = {step: row for row in rows if (step := _number(row.get("step"))) is not None}
    steps = sorted(by_step)
    losses: list[Point] = [(step, _number(by_step[step].get("loss"))) for step in steps]
    rates: list[Point] = [(step, _number(by_step[step].get("tokens_per_s"))) for step in steps]
    shares: list[Point] = [(step, _share_waited(by_step[step])) for step in steps]
    across = _step_scale(steps)
    title = title or "Training loss"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img">',
        f"<title>{text(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        words(24, 32, title if len(title) <= TITLE_LENGTH else title[: TITLE_LENGTH - 1] + "…", "title"),
        words(24, 52, _summary(losses, rates, shares)),
        *_loss_panel(losses, across),
        *_rate_panel(rates, shares, across),
        *_step_ticks(across),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def write_loss_curve(metrics_path: str | Path, svg_path: str | Path, title: str = "") -> None:
    """Draw a metrics.jsonl, whose folder is the default title.  A line that is no JSON object, as a killed run may
    leave one, is left out; OSError where a file cannot be read or written."""
    rows = []
    for line in Path(metrics_path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    name = Path(metrics_path).resolve().parent.name
    Path(svg_path).write_text(loss_curve(rows, title or name), encoding="utf-8")


# --- values --------------------------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    """A finite number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value)


def _share_waited(row: Mapping[str, Any]) -> float | None:
    """Per cent of the step, over all axes; None where nothing is known or there is no axis."""
    waited, seconds = row.get("waited"), _number(row.get("step_s"))
    if not isinstance(waited, Mapping) or not waited or seconds is None or seconds <= 0:
        return None
    known = [value for item in waited.values() if (value := _number(item)) is not None]
    return min(100.0, 100.0 * sum(known) / seconds) if known else None


def _present(points: Sequence[Point]) -> list[float]:
    return [value for _, value in points if value is not None]


def _smooth(points: Sequence[Point]) -> list[Point]:
    """The mean of each value and its neighbours, across gaps, which stay; the first values, where a loss falls fast,
    have as many after them as before."""
    reach = max(1, len(points) // 60)
    sums = [0.0]
    for present in _present(points):
        sums.append(sums[-1] + present)
    smoothed: list[Point] = []
    i = 0  # of the values passed
    for step, value in points:
        if value is None:
            smoothed.append((step, None))
            continue
        before = min(reach, i)
        first, last = i - before, min(i + before, len(sums) - 2)
        smoothed.append((step, (sums[last + 1] - sums[first]) / (last + 1 - first)))
        i += 1
    return smoothed


def _segments(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Runs of points that have a value."""
    found: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is not None:
            found[-1].append((step, value))
        elif found[-1]:
            found.append([])
    return [segment for segment in found if segment]


def _thin(points: Sequence[Point], across: Scale) -> list[Point]:
    """At most the first, lowest, highest and last value, and one gap, of each slice of the width; short lines whole."""
    if len(points) <= 2 * SLICES:
        return list(points)
    slices: dict[int, list[Point]] = {}
    for point in points:
        slices.setdefault(int((point[0] - across.low) / (across.high - across.low) * SLICES), []).append(point)
    kept: list[Point] = []
    for each in slices.values():
        there = [point for point in each if point[1] is not None]
        if there:
            low, high = min(there, key=_value), max(there, key=_value)
            edges = ([there[0]] if not kept else []) + ([there[-1]] if each[-1] is points[-1] else [])
            kept += sorted({*edges, low, high})
        if len(there) < len(each):
            kept.append((each[-1][0], None))
    return kept


def _value(point: Point) -> float:
    assert point[1] is not None
    return point[1]


# --- scales --------------------------------------------------------------------------------------------------------


def _step_scale(steps: Sequence[float]) -> Scale:
    low, high = (steps[0], steps[-1]) if steps else (0.0, 1.0)
    if 0 < low <= 0.1 * high:
        low = 0.0
    if low == high:
        low, high = low - 1, high + 1
    gap = max(1.0, round_up((high - low) / 8))
    ticks = [gap * i for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]
    return Scale(low, high, LEFT, RIGHT, tuple(ticks))


def _loss_scale(losses: Sequence[float]) -> Scale:
    """Ends on ticks; by logarithm where the values are positive and span more than a factor of 50."""
    bottom, top = LOSS[1], LOSS[0]
    low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
    if low > 0 and high / low > 50:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = math.ceil((last - first) / 6)
        last = first + stride * math.ceil((last - first) / stride)
        ticks = tuple(10.0**power for power in range(first, last + 1, stride))
        return Scale(ticks[0], ticks[-1], bottom, top, ticks, logarithmic=True)
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        pad = 0.1 * abs(high) or 0.5
        low, high = low - pad, high + pad
    gap = round_up((high - low) / 6)
    ticks = tuple(gap * i for i in range(math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9) + 1))
    return Scale(ticks[0], ticks[-1], bottom, top, ticks)


def _share_scale(values: Sequence[float], least: float) -> Scale:
    """From 0 to a round number, with a tick half-way, so that two such scales share their grid lines."""
    top = round_up(max([least, *values]), (1, 2, 4, 6, 8, 10))
    return Scale(0.0, top, RATE[1], RATE[0], (0.0, top / 2, top))


# --- marks ---------------------------------------------------------------------------------------------------------


def _loss_panel(losses: Sequence[Point], across: Scale) -> list[str]:
    scale = _loss_scale(_present(losses))
    gap = scale.ticks[1] - scale.ticks[0]
    parts = []
    for tick in scale.ticks:
        y = scale(tick)
        parts.append(rule("grid" if tick != scale.ticks[0] else "axis", LEFT, y, RIGHT, y))
        parts.append(words(LEFT - 10, y + 4, f"{tick:g}" if scale.logarithmic else _label(tick, gap), "y", "end"))
    parts.append(words(LEFT - 10, LOSS[0] - 16, "loss", "loss", "end"))
    parts += _line("loss", losses, across, scale)
    if segments := _segments(_strong(losses)):
        step, value = segments[-1][-1]
        label = f"{value:.3g}" if len(f"{value:.3g}") <= 6 else f"{value:.1e}"
        parts.append(words(across(step) + 8, scale(value) + 4, label, "loss"))
    if _is_smoothed(losses):
        for x, kind, label in ((RIGHT - 172, "loss raw", "each step"), (RIGHT - 82, "loss", "smoothed")):
            parts.append(rule(kind, x, LOSS[0] - 20, x + 18, LOSS[0] - 20))
            parts.append(words(x + 24, LOSS[0] - 16, label))
    return parts + _gap_marks(losses, across)


def _gap_marks(losses: Sequence[Point], across: Scale) -> list[str]:
    """A cross on the axis at each step whose loss is missing or not finite, a few where they are many."""
    gaps = [step for step, value in losses if value is None]
    if not gaps:
        return [] if losses else [words((LEFT + RIGHT) / 2, sum(LOSS) / 2, "no steps yet", anchor="middle")]
    y, stride = LOSS[1], math.ceil(len(gaps) / 40)
    crosses = "".join(f"M{across(s) - 4:.1f} {y - 4}l8 8m0 -8l-8 8" for s in gaps[::stride])
    more = f" and {len(gaps) - 1:,} more" if len(gaps) > 1 else ""
    note = f"no finite loss at step {gaps[0]:,.0f}{more}"
    return [f'<path class="bad" d="{crosses}"/>', words(LEFT + 4, LOSS[0] - 16, note, "bad")]


def _rate_panel(rates: Sequence[Point], shares: Sequence[Point], across: Scale) -> list[str]:
    rate, share = _share_scale(_present(rates), 1e-3), _share_scale(_present(shares), 1.0)
    if not _present(rates) and not _present(shares):
        return [rule("axis", LEFT, RATE[1], RIGHT, RATE[1])]
    parts = []
    for tick, other in zip(rate.ticks, share.ticks, strict=True):
        y = rate(tick)
        parts.append(rule("grid" if tick else "axis", LEFT, y, RIGHT, y))
        if _present(rates):
            parts.append(words(LEFT - 10, y + 4, si(tick), "y", "end"))
        if _present(shares):
            parts.append(words(RIGHT + 10, y + 4, f"{other:g} %"))
    if _present(rates):
        parts.append(words(LEFT, RATE[0] - 12, "tokens/s", "rate"))
        parts += _line("rate", rates, across, rate)
    if _present(shares):
        parts.append(words(RIGHT, RATE[0] - 12, "time waited, % of the step", "wait", "end"))
        parts += _line("wait", shares, across, share)
    return parts


def _step_ticks(across: Scale) -> list[str]:
    parts = []
    for tick in across.ticks:
        x = across(tick)
        for _, bottom in (LOSS, RATE):
            parts.append(rule("axis", x, bottom, x, bottom + 4))
        parts.append(words(x, RATE[1] + 20, f"{tick:,.0f}", "x", "middle"))
    return [*parts, words((LEFT + RIGHT) / 2, RATE[1] + 35, "step", anchor="middle")]


def _is_smoothed(points: Sequence[Point]) -> bool:
    return len(_present(points)) >= 8


def _strong(points: Sequence[Point]) -> Sequence[Point]:
    """The points of the strong line."""
    return _smooth(points) if _is_smoothed(points) else points


def _line(kind: str, points: Sequence[Point], across: Scale, scale: Scale) -> list[str]:
    """The values as a faint line and their mean as a strong one; few values as one strong line."""
    faint = _polylines(f"{kind} raw", points, across, scale) if _is_smoothed(points) else []
    return faint + _polylines(kind, _strong(points), across, scale)


def _polylines(kind: str, points: Sequence[Point], across: Scale, scale: Scale) -> list[str]:
    parts = []
    for segment in _segments(_thin(points, across)):
        pixels = [(across(step), scale(value)) for step, value in segment]
        if len(pixels) == 1:
            ((x, y),) = pixels
            parts.append(f'<circle class="{kind}" cx="{x:.2f}" cy="{y:.2f}" r="2"/>')
        else:
            parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.2f},{y:.2f}" for x, y in pixels)}"/>')
    return parts


def _summary(losses: Sequence[Point], rates: Sequence[Point], shares: Sequence[Point]) -> str:
    parts = []
    if losses:
        parts.append(f"step {losses[-1][0]:,.0f}")
    if found := _present(_strong(losses)):
        smoothed = " (smoothed)" if _is_smoothed(losses) else ""
        parts.append(f"loss {found[0]:.4g} to {found[-1]:.4g}{smoothed}" if len(found) > 1 else f"loss {found[0]:.4g}")
    if found := _present(rates):
        parts.append(f"median {si(statistics.median(found))} tokens/s")
    if found := _present(shares):
        parts.append(f"median {statistics.median(found):.3g} % waited")
    return " · ".join(parts)


def _label(value: float, gap: float) -> str:
    """A tick in as many decimals as its distance to the next needs."""
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
    if decimals > 5 or abs(value) >= 1e6:
        return f"{value:.6g}"
    return f"{value + 0.0:,.{decimals}f}"
