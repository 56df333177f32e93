"""Events as a picture: ranks as rows, time to the right; simulated and real ones by the same function.

    timeline([Scene("plan", simulated, ...), Scene("run", events, ...)])     -> one SVG that needs no other file

Of each rank: its work (actions of a pipeline in the field's colours with the number of their micro-batch: forward
blue, backward green, its input part teal, its weight part lime; paler for a rank's second chunk of layers; waits red
within it), then a thin lane of transfers for each axis.  Below, if known, the memory of each rank; else, of a pipeline,
the micro-batches whose activations it holds, from F to B or W, in micro-batches of all its stages, as
`schedule.validate` counts them beforehand.  Then the ledger as bars.  All scenes have one scale, so that a plan above a
run can be compared by eye.

However many events there are the picture stays small: what is narrower than a pixel is drawn as a column a pixel wide,
as high as the share of it that was used; of more than 32 ranks the first 32 are drawn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from interlace.events import Event
from interlace.mesh import ORDER as AXES
from interlace.report.kernels import short_name
from interlace.report.ledger import ACTION, SECOND, STEP, Account, Ledger, axis_of
from interlace.report.svg import round_up, rule, text, words

WIDTH, LEFT, RIGHT = 1180, 96, 1160  # of the picture and of its lanes
MOST_RANKS = 32
MOST_LATE = 4  # waited for, apart, in a bar
MOST_STREAMS = 4  # of a rank's work; the rest share the last
MOST_LANES = 48  # with columns of one pixel
MOST_MARKS = 6000  # events with a mark of their own; the narrowest go into columns
MOST_HELD = 16  # ranks whose most micro-batches are said
MOST_HINTS = 2500  # marks that say what they are under the pointer
STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#59636e}
.title{font-size:16px;font-weight:600;fill:#1f2328}.head{font-weight:600;fill:#1f2328}.small{font-size:10px}.tiny{font-size:9px}
.n{font-size:10px;fill:#fff;text-anchor:middle;pointer-events:none}.dark{fill:#16202b}
.card{fill:#fff;stroke:#d1d9e0}.lane{fill:#f3f5f7}.grid{stroke:#d8dee4;stroke-width:1}
.F{fill:#3f7fd4}.B{fill:#2f9456}.I{fill:#1d9ba1}.W{fill:#8cb52d}.pale{opacity:.66}
.compute{fill:#7a94b8}.contention{fill:#c2557a}.optimizer{fill:#8f62cc}.data{fill:#b3895a}.save{fill:#8a7a66}
.fused{fill:#5d6fd6}.unknown{fill:#d63aa8}.other{fill:#9aa4af}.wait,.waiting{fill:#df4b41}.bubble{fill:#d9dfe5}
.host{fill:#eceff2;stroke:#c4ccd4;stroke-width:.5}
.tp{fill:#e0a11b}.cp{fill:#d97fb4}.dp{fill:#e2762b}.pp{fill:#a67fe0}.ep{fill:#2aa7bd}.axis{fill:#66788a}
.memory{fill:none;stroke:#3f7fd4;stroke-width:1.5;stroke-linejoin:round}
@media (prefers-color-scheme:dark){
text{fill:#9198a1}.title,.head{fill:#f0f6fc}.n{fill:#fff}.dark{fill:#10161d}
.card{fill:#0d1117;stroke:#30363d}.lane{fill:#161b22}.grid{stroke:#2a313a}
.F{fill:#4f8fe8}.B{fill:#37a862}.I{fill:#26aeb5}.W{fill:#9cc63a}.bubble{fill:#2f3742}.host{fill:#1c232c;stroke:#3d4550}
.memory{stroke:#58a6ff}}
"""


@dataclass(frozen=True)
class Scene:
    """Events from `begin` to `end` in seconds, under a title; the ledger of that time, memory by rank if known."""

    title: str
    events: Sequence[Event]
    begin: float
    end: float
    ledger: Ledger | None = None
    memory: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        title: str,
        events: Iterable[Event],
        ledger: Ledger,
        memory: Mapping[int, Sequence[tuple[float, float]]] | None = None,
    ) -> Scene:
        """The time of a ledger."""
        begin = min(account.begin for account in ledger.accounts)
        end = max(account.begin + account.span / SECOND for account in ledger.accounts)
        inside = [event for event in events if event.end > begin and event.begin < end and event.lane != STEP]
        return cls(title, inside, begin, end, ledger, memory or {})


def timeline(scenes: Sequence[Scene], title: str = "") -> str:
    """The picture, as the text of an SVG."""
    longest = max([scene.end - scene.begin for scene in scenes] or [0.0]) or 1e-9
    parts: list[str] = []
    y = 58.0 if title else 28.0
    for scene in scenes:
        across = _Across(scene.begin, longest)
        drawn, y = _scene(scene, across, y)
        parts += drawn
    keys, y = _keys(scenes, y)
    parts += keys
    with_ledger = [scene for scene in scenes if scene.ledger is not None]
    if with_ledger:
        bars, y = _bars(with_ledger, longest, y)
        parts += bars
    height = math.ceil(y + 8)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img">',
        f"<title>{text(title or 'timeline')}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
    ]
    if title:
        head.append(words(20, 32, title if len(title) <= 130 else title[:129] + "…", "title"))
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


# --- lanes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Across:
    """Seconds -> pixels from the left."""

    begin: float
    length: float

    def __call__(self, moment: float) -> float:
        return LEFT + min(max((moment - self.begin) / self.length, 0.0), 1.0) * (RIGHT - LEFT)


def _scene(scene: Scene, across: _Across, y: float) -> tuple[list[str], float]:
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in scene.events:
        by_rank[event.rank].append(event)
    if scene.ledger is not None:
        for account in scene.ledger.accounts:
            by_rank.setdefault(account.rank, [])
    ranks = sorted(by_rank)[:MOST_RANKS]
    more = f" (the first {len(ranks)} of {len(by_rank)} ranks)" if len(ranks) < len(by_rank) else ""
    parts = [words(20, y + 4, scene.title + more, "head")]
    y += 14
    top = y
    tall = 20 if len(ranks) <= 8 else 15 if len(ranks) <= 16 else 11
    marks = _Marks([event for rank in ranks for event in by_rank[rank]], across)
    lanes: list[str] = []
    for rank in ranks:
        lanes.append(words(20, y + tall * 0.5 + 4, f"rank {rank}"))
        for _, high, name, events in _lanes(by_rank[rank], tall):
            lanes.append(f'<rect class="lane" x="{LEFT}" y="{y:g}" width="{RIGHT - LEFT}" height="{high:g}"/>')
            if name:
                lanes.append(words(LEFT - 6, y + high - 1.5, name, "tiny", "end"))
            lanes += marks.draw(events, y, high)
            y += high + 1
        y += 4 if len(ranks) <= 16 else 2
    ticks, gap = _ticks(across.length)
    unit, size = _unit(across.length)
    grid = []
    for tick in ticks:
        x = across(across.begin + tick)
        grid.append(rule("grid", x, top, x, y))
        last = tick + gap > across.length
        label = f"{tick / size:g}{f' {unit}' if last else ''}"
        grid.append(words(x, y + 13, label, "small", "end" if x > RIGHT - 20 else "middle"))
    parts += [*grid, *lanes]
    y += 24
    if any(scene.memory.get(rank) for rank in ranks):
        drawn, y = _memory(scene, ranks, across, y)
        parts += drawn
    elif any(int(action[1]) for event in scene.events if (action := ACTION.fullmatch(event.name))):
        drawn, y = _held({rank: held(by_rank[rank]) for rank in ranks}, across, marks.column, y)
        parts += drawn
    return parts, y + 12


def _lanes(events: Sequence[Event], tall: float) -> list[tuple[int, float, str, list[Event]]]:
    """(order, height, label, events) of a rank's lanes: work, then transfers by axis from inner to outer."""
    work: dict[str, list[Event]] = defaultdict(list)
    moves: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        (moves[axis_of(event)] if event.kind == "comm" else work[event.lane]).append(event)
    busiest = sorted(work, key=lambda lane: (-sum(event.seconds for event in work[lane]), lane))
    for lane in busiest[MOST_STREAMS:]:
        work[busiest[MOST_STREAMS - 1]] += work.pop(lane)
    found = [(0, tall if i == 0 else tall * 0.7, "", work[lane]) for i, lane in enumerate(busiest[:MOST_STREAMS])]
    if not found:
        found = [(0, tall, "", [])]
    order = sorted(moves, key=lambda axis: (AXES.index(axis) if axis in AXES else len(AXES), axis))
    return found + [(1, 9.0, axis if len(axis) <= 9 else axis[:8] + "…", moves[axis]) for axis in order]


class _Marks:
    """What of some events is drawn one by one, and how."""

    def __init__(self, events: Sequence[Event], across: _Across) -> None:
        self.across = across
        self.pixels = (RIGHT - LEFT) / across.length
        widths = sorted((event.seconds * self.pixels for event in events), reverse=True)
        enough = widths[MOST_MARKS] if len(widths) > MOST_MARKS else 0.0
        lanes = len({(event.rank, event.lane) for event in events})
        self.column = 1 if lanes <= MOST_LANES else 2 if lanes <= 2 * MOST_LANES else 4  # pixels
        self.least = max(1.0, math.nextafter(enough, math.inf))
        stages = {
            (event.rank, int(action[1])) for event in events
            if event.kind == "compute" and (action := ACTION.fullmatch(event.name))
        }  # fmt: skip
        # A rank's second chunk of layers, and its fourth, are paler.
        self.pale = {(rank, stage) for rank, stage in stages if sum(r == rank and s < stage for r, s in stages) % 2}
        self.hints = sum(width >= self.least for width in widths) <= MOST_HINTS

    def draw(self, events: Sequence[Event], y: float, high: float) -> list[str]:
        wide = [event for event in events if event.seconds * self.pixels >= self.least]
        narrow = [event for event in events if 0 < event.seconds * self.pixels < self.least]
        wide.sort(key=lambda event: (event.kind == "wait", event.begin, -event.end))  # what lies within goes on top
        waits = [event for event in narrow if event.kind == "wait"]
        others = [event for event in narrow if event.kind != "wait"]
        return [
            *self._columns(others, y, high),
            *(self._mark(event, y, high) for event in wide),
            *self._columns(waits, y, high),
            *filter(None, (self._number(event, y, high) for event in wide)),
        ]

    def _mark(self, event: Event, y: float, high: float) -> str:
        x, end = self.across(event.begin), self.across(event.end)
        hint = ""
        if self.hints:
            size, unit = _unit(event.seconds)[::-1]
            what = "waits for " if event.kind == "wait" else ""
            moved = f", {event.bytes:,} bytes" if event.bytes else ""
            hint = f"<title>{text(what + short_name(event.name))}, {event.seconds / size:.4g} {unit}{moved}</title>"
        low = 0.0 if event.kind != "wait" else high * 0.25
        box = f'x="{x:.2f}" y="{y + low:g}" width="{max(end - x - 0.4, 0.4):.2f}" height="{high - low:g}"'
        return f'<rect class="{self._class(event)}" {box}{f">{hint}</rect>" if hint else "/>"}'

    def _number(self, event: Event, y: float, high: float) -> str:
        """The micro-batch of an action, where there is room for it."""
        action = ACTION.fullmatch(event.name) if event.kind == "compute" else None
        x, end = self.across(event.begin), self.across(event.end)
        if action is None or end - x < 6.2 * len(action[3]) + 1 or high < 11:
            return ""
        dark = " dark" if action[2] == "W" else ""
        return f'<text class="n{dark}" x="{(x + end) / 2:.1f}" y="{y + high / 2 + 3.5:g}">{action[3]}</text>'

    def _class(self, event: Event) -> str:
        kind = _class(event)
        if kind in "FBIW" and (action := ACTION.fullmatch(event.name)) and (event.rank, int(action[1])) in self.pale:
            return f"{kind} pale"
        return kind

    def _columns(self, events: Sequence[Event], y: float, high: float) -> list[str]:
        """A column for each pixel (of very many lanes, few pixels) that something fills, as high as its share, in the
        colour of most."""
        filled: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for event in events:
            begin, end = ((self.across(moment) - LEFT) / self.column for moment in (event.begin, event.end))
            kind = self._class(event)
            for column in range(int(begin), min(int(end), (RIGHT - LEFT) // self.column - 1) + 1):
                filled[column][kind] += max(0.0, min(end, column + 1) - max(begin, column))
        runs: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # kind -> first, one past the last, eighths
        for column in sorted(filled):
            shares = filled[column]
            kind = max(shares, key=lambda kind: (shares[kind], kind))
            eighths = min(8, math.ceil(8 * sum(shares.values())))
            if not eighths:
                continue
            ended = runs[kind][-1] if runs[kind] else (-1, -1, 0)
            if ended[1:] == (column, eighths):
                runs[kind][-1] = (ended[0], column + 1, eighths)
            else:
                runs[kind].append((column, column + 1, eighths))
        drawn = []
        for kind, some in runs.items():
            boxes = "".join(
                f"M{LEFT + first * self.column} {y + high:g}v{-high * n / 8:.3g}"
                f"h{(last - first) * self.column}v{high * n / 8:.3g}z"
                for first, last, n in some
            )
            drawn.append(f'<path class="{kind}" d="{boxes}"/>')
        return drawn


def _class(event: Event) -> str:
    if event.kind == "comm":
        axis = axis_of(event)
        known = {"shard": "dp", "replica": "dp", "edp": "dp"}.get(axis, axis)
        return known if known in ("tp", "cp", "dp", "pp", "ep") else "axis"
    if event.kind == "compute" and (action := ACTION.fullmatch(event.name)):
        return action[2]
    return event.kind


def _memory(scene: Scene, ranks: Sequence[int], across: _Across, y: float) -> tuple[list[str], float]:
    """Bytes of each rank over time, one line a rank, on one scale."""
    high = 64.0
    inside = {
        rank: [(at, n) for at, n in sorted(scene.memory.get(rank, ())) if scene.begin <= at <= scene.end]
        for rank in ranks
    }
    peak = max((n for points in inside.values() for _, n in points), default=0.0)
    if not peak:
        return [], y
    unit = 1 << 30 if peak >= 1 << 30 else 1 << 20
    top = round_up(peak / unit, (1, 1.5, 2, 3, 4, 5, 6, 8, 10)) * unit
    parts = [words(20, y + 10, "memory", "head"), words(LEFT - 6, y + 24, _gib(top), "small", "end")]
    parts += [rule("grid", LEFT, y + line, RIGHT, y + line) for line in (0, high / 2, high)]
    for rank, points in inside.items():
        slices: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for point in points:
            slices[int(across(point[0]))].append(point)
        thin = [p for some in slices.values() for p in sorted({some[0], max(some, key=lambda q: q[1]), some[-1]})]
        line = " ".join(f"{across(at):.1f},{y + high * (1 - n / top):.1f}" for at, n in thin)
        if line:
            parts.append(f'<polyline class="memory" points="{line}"><title>rank {rank}</title></polyline>')
    return parts, y + high + 14


def held(events: Iterable[Event]) -> list[tuple[float, float]]:
    """(seconds, micro-batches held from then on) of one rank: its activations from F to the end of B or W."""
    work = [(event, action) for event in events if event.kind == "compute" and (action := ACTION.fullmatch(event.name))]
    stages = len({action[1] for _, action in work})
    changes = [(event.begin, 1) for event, action in work if action[2] == "F"]
    changes += [(event.end, -1) for event, action in work if action[2] in "BW"]
    points, now = [], 0
    for at, change in sorted(changes):  # what ends where another begins is gone first
        now = max(0, now + change)
        points.append((at, now / stages))
    return points


def _held(
    curves: Mapping[int, Sequence[tuple[float, float]]], across: _Across, column: int, y: float
) -> tuple[list[str], float]:
    """Micro-batches held over time, a line a rank on one scale, and the most of each in words."""
    high = 40.0
    most = {rank: max(count for _, count in points) for rank, points in curves.items()}
    top = max(most.values(), default=0.0) or 1.0
    said = ", ".join(f"{count:g}" for count in list(most.values())[:MOST_HELD]) + (
        " …" if len(most) > MOST_HELD else ""
    )
    parts = [words(20, y + 10, "held", "head"), words(LEFT, y + 10, f"micro-batches, at most {said}", "small")]
    y += 16
    parts += [words(LEFT - 6, y + 8, f"{top:.3g}", "small", "end"), words(LEFT - 6, y + high, "0", "small", "end")]
    parts += [rule("grid", LEFT, y + line, RIGHT, y + line) for line in (0, high)]
    for number, (rank, points) in enumerate(curves.items()):
        columns: dict[int, list[float]] = defaultdict(list)
        for at, count in points:
            columns[int(across(at)) // column * column].append(count)
        line, last = f"M{LEFT} {y + high:g}", 0.0
        for x, counts in columns.items():
            if (max(counts), counts[-1]) != (last, last):
                line += f"H{x}" + "".join(f"V{y + high * (1 - n / top):.4g}" for n in (max(counts), counts[-1]))
                last = counts[-1]
        pale = 1 - 0.7 * number / max(1, len(curves) - 1)
        hint = f"<title>rank {rank}: at most {most[rank]:.3g} micro-batches</title>"
        parts.append(f'<path class="memory" stroke-opacity="{pale:.2f}" d="{line}">{hint}</path>')
    return parts, y + high + 14


# --- the ledger as bars ----------------------------------------------------------------------------------------------


def _bars(scenes: Sequence[Scene], longest: float, y: float) -> tuple[list[str], float]:
    """A bar for each rank's step, its rows side by side."""
    parts = [words(20, y + 4, "ledger: where each rank's step went", "head")]
    y += 16
    for scene in scenes:
        assert scene.ledger is not None
        accounts = scene.ledger.merged(MOST_LATE).accounts[:MOST_RANKS]
        high = 14 if len(accounts) <= 16 else 8
        if len(scenes) > 1:
            parts.append(words(20, y + 10, scene.title.split(":")[0], "small"))
            y += 14
        for account in accounts:
            parts.append(words(20, y + high - 3, f"rank {account.rank}", "small" if high < 12 else ""))
            parts += _bar(account, longest, y, high)
            y += high + 3
        y += 6
    return parts, y + 4


def _bar(account: Account, longest: float, y: float, high: float) -> list[str]:
    parts, x = [], float(LEFT)
    for row in sorted(account.rows, key=lambda row: row.order):
        seconds = account.rows[row] / SECOND
        wide = seconds / longest * (RIGHT - LEFT)
        unit, size = _unit(seconds)
        hint = f"<title>{text(row.label)}: {seconds / size:.4g} {unit}</title>"
        place = f'x="{x:.2f}" y="{y:g}" width="{wide:.2f}" height="{high}"'
        kind = row.kind
        if kind == "transfer":
            known = {"shard": "dp", "replica": "dp", "edp": "dp"}.get(row.axis, row.axis)
            kind = known if known in ("tp", "cp", "dp", "pp", "ep") else "axis"
        parts.append(f'<rect class="{kind}" {place}>{hint}</rect>')
        share = f"{100 * account.rows[row] / account.span:.0f} %" if account.span else ""
        if wide >= 34 and high >= 12:
            light = row.kind in ("bubble", "host")
            parts.append(
                f'<text class="{"small" if light else "n"}" x="{x + wide / 2:.1f}" y="{y + high - 3.5:g}" '
                f'text-anchor="middle">{share}</text>'
            )
        x += wide
    return parts


def _keys(scenes: Sequence[Scene], y: float) -> tuple[list[str], float]:
    """What the colours mean, of those that are there."""
    classes = {_class(event) for scene in scenes for event in scene.events}
    rows = {row for scene in scenes if scene.ledger for account in scene.ledger.accounts for row in account.rows}
    named = [("F", "forward"), ("B", "backward"), ("I", "backward, input"), ("W", "backward, weights")]
    shown = [(kind, label) for kind, label in named if kind in classes]
    if "compute" in classes or (rows and not shown):
        shown.append(("compute", "compute"))
    elif any(row.kind == "compute" for row in rows):
        shown.append(("compute", "compute (all)"))
    there = classes | {row.kind for row in rows}
    for kind, label in (
        ("contention", "slowed by contention"), ("fused", "fused"), ("optimizer", "optimizer"), ("data", "data"),
        ("save", "checkpoint"), ("other", "copies"), ("unknown", "unknown"), ("bubble", "bubble"), ("host", "host gap"),
    ):  # fmt: skip
        if kind in there:
            shown.append((kind, label))
    shown += [(axis, f"transfer {axis}") for axis in ("tp", "cp", "dp", "pp", "ep") if axis in classes]
    shown += [("axis", "transfer, other")] if "axis" in classes else []
    shown += [("wait", "waiting")] if "wait" in classes or any(row.kind == "waiting" for row in rows) else []
    parts, x = [], 20.0
    for kind, label in shown:
        wide = 22 + 6.4 * len(label) + 14
        if x + wide > RIGHT:
            x, y = 20.0, y + 18
        parts.append(f'<rect class="{kind}" x="{x:g}" y="{y - 8:g}" width="12" height="12" rx="2"/>')
        parts.append(words(x + 17, y + 2, label))
        x += wide
    return parts, y + 28


def _ticks(length: float) -> tuple[list[float], float]:
    gap = round_up(length / 10)
    return [gap * i for i in range(int(length / gap + 1e-9) + 1)], gap


def _unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return unit, size
    return "µs", 1e-6


def _gib(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.3g} MiB"
