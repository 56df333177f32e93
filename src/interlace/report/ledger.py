"""Events -> an account of each rank's step whose rows sum to the step exactly.

Equals a walk along a rank's step: at each moment it is in exactly one row, the first of this order that applies.

    waiting, transfer   the compute stream stands still at a wait point (events of kind "wait")
    compute             anything computes; `contention` is the part by which it was slowed
    optimizer, fused, unknown, data, save, bubble (where the schedule's own are recorded)
    transfer, waiting   a transfer is on its way and nothing else happens (where no wait points were recorded)
    other               copies to and from the host, fills
    bubble, host        nothing happens: in a schedule of several stages that was only computed its bubble, else the
                        host has not asked for anything

What lies within work on the same lane, such as an update within a forward pass, is cut out of it.  So streams that run
together count once, and a transfer under compute costs nothing.  Time is cut in picoseconds, in
whole numbers: a sum is exact, whatever the order.

Transfer and waiting.  The k-th transfer of a name on an axis is the same one on every rank of the group.  It cannot
have moved before the last rank came, so it took what it took on the rank where it was shortest; what it took longer on
the others is waiting for that rank, which is named.  Along `pp` such waiting is the pipeline's bubble, and it moved at
most while both its ends were under way: gloo says that a send is done only to who waits for it.

Contention.  Work that ran both alone and beside transfers (one name, one number of FLOPs, one rank) took the median of
its times alone; what it took longer beside a transfer, at most as long as they ran together, is contention.  Work whose
times alone differ is left out: the long ones meet more transfers, and would seem slowed by them.

Tried and dropped: the median of each row over steps, for rows of a median step that do not add up; the account shown
is that of a real step, the one of median length.
"""

from __future__ import annotations

import re
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from interlace.events import BESIDE, Event
from interlace.mesh import ORDER as AXES
from interlace.report.spans import Spans, common, last, length, minus, overlap, union

SECOND = 10**12  # picoseconds
STEP = "step"  # the lane of events around all others
ALL = "all"  # the name of the only step of events that have none
KINDS = (
    "compute", "contention", "fused", "transfer", "waiting", "bubble", "host", "optimizer", "data", "save", "other",
    "unknown",
)  # fmt: skip
WORDS = {
    "contention": "compute slowed by contention",
    "fused": "fused compute and transfer",
    "bubble": "pipeline bubble",
    "host": "host gap",
    "save": "checkpoint",
}
NOISE = 1.02  # work that takes less than this times its time alone is not slowed
STEADY = 1.1  # between the quarters of its times alone; of work that varies more nobody knows what it takes
OTHERS = -1  # as a late rank: several that are not named
Groups = Mapping[str, Sequence[Sequence[int]]]  # axis -> its groups of ranks

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # stage, what, micro-batch
END = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")  # one end of a transfer between stages
WORK = {"compute", "optimizer", "fused", "unknown", "data", "save", "other", "bubble"}  # kinds that are their own row


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of time; for a transfer its axis, for waiting also the rank that was late (None: not known, or OTHERS)."""

    kind: str
    axis: str = ""
    late: int | None = None

    @property
    def label(self) -> str:
        on = f" {self.axis}" if self.axis else ""
        if self.kind == "transfer":
            return f"exposed transfer{on}"
        if self.kind == "waiting":
            late = "" if self.late is None else " for others" if self.late == OTHERS else f" for rank {self.late}"
            return f"waiting{on}{late}"
        return WORDS.get(self.kind, self.kind)

    @property
    def order(self) -> tuple[int, tuple[int, str], int]:
        late = -1 if self.late is None else sys.maxsize if self.late == OTHERS else self.late
        return KINDS.index(self.kind), _axis_order(self.axis), late


What = tuple[int, int, Row, str]  # precedence (the lowest first), precedence within it, row, name of the event
Piece = tuple[int, int, What]  # begin and end in picoseconds


@dataclass(frozen=True)
class Account:
    """One rank's step.  `rows` in picoseconds, which sum to `span`; `begin` in seconds.

    Transfers, in picoseconds: `busy` while at least one was under way, `hidden` of that under other work, and `total`
    one after another.  `names`: seconds of unknown and of exposed time, by kind and name of the event.
    """

    rank: int
    begin: float
    span: int
    rows: Mapping[Row, int]
    busy: int = 0
    hidden: int = 0
    total: int = 0
    names: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def seconds(self, kind: str, axis: str | None = None) -> float:
        """Of all rows of a kind, or of one axis of it."""
        return sum(n for row, n in self.rows.items() if row.kind == kind and axis in (None, row.axis)) / SECOND


@dataclass(frozen=True)
class Ledger:
    """A step of all ranks."""

    step: str
    accounts: tuple[Account, ...]

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(account.span for account in self.accounts) / SECOND

    @property
    def rows(self) -> list[Row]:
        """Of any rank, in the order they are shown."""
        return sorted({row for account in self.accounts for row in account.rows}, key=lambda row: row.order)

    def mean(self, row: Row) -> float:
        """Seconds of a row, over ranks."""
        return sum(account.rows.get(row, 0) for account in self.accounts) / len(self.accounts) / SECOND

    def merged(self, most: int = 0) -> Ledger:
        """With at most so many late ranks by name on an axis, those waited for longest, the others taken together.

        With none, two ledgers of different ranks have their rows in common.
        """
        waited: Counter[Row] = Counter()
        for account in self.accounts:
            waited.update({row: n for row, n in account.rows.items() if row.late is not None})
        kept: dict[str, list[Row]] = defaultdict(list)
        for row, _ in waited.most_common():
            kept[row.axis].append(row)
        new = {
            row: Row(row.kind, row.axis, OTHERS if most else None)
            for rows in kept.values() if len(rows) > most for row in rows[max(most - 1, 0):]
        }  # fmt: skip
        return Ledger(self.step, tuple(_renamed(account, new) for account in self.accounts))


def ledgers(events: Iterable[Event], groups: Groups | None = None) -> list[Ledger]:
    """One ledger a step, in order.

    Steps are the events on the lane "step"; without any, all events are one, from the first to the last of any rank.
    `groups` says which ranks share a transfer; an axis that it leaves out joins all.
    """
    groups = groups or {}
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    windows = _windows(by_rank)
    stages = {match[1] for own in by_rank.values() for e in own if (match := ACTION.fullmatch(e.name))}
    ranks = {rank: _Rank(rank, own, len(stages) > 1) for rank, own in sorted(by_rank.items())}
    shares: dict[int, Share] = {}
    for spans in windows.values():
        shares |= shared({rank: ranks[rank].ended(*span) for rank, span in spans.items()}, groups)
    return [
        Ledger(step, tuple(ranks[rank].account(span, shares) for rank, span in sorted(spans.items())))
        for step, spans in windows.items()
    ]


def median(found: Sequence[Ledger]) -> Ledger:
    """The step of median length (of two in the middle the shorter)."""
    return sorted(found, key=lambda ledger: ledger.seconds)[(len(found) - 1) // 2]


def step_number(step: str) -> int | None:
    """The number in a step's name."""
    digits = re.findall(r"\d+", step)
    return int(digits[-1]) if digits else None


# --- transfers over ranks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """How a transfer's time divides: at its end `moving` picoseconds of transfer, before that waiting for `late`."""

    moving: int
    late: int | None


def axis_of(event: Event) -> str:
    """ "dp" of a transfer on the lane "comm.dp"; a lane of another name is the axis itself."""
    return event.lane.removeprefix("comm").removeprefix(".")


def matched(transfers: Mapping[int, Sequence[Event]], groups: Groups) -> list[dict[int, Event]]:
    """The same transfer as each rank saw it, for every one that at least two ranks saw.

    Of an axis, the k-th of one name within one group, in order of time.  "send X" and "recv X" are two ends of one, and
    so are "0SEND_F3" and "1RECV_F3", which the next stage receives.  A rank that recorded fewer is laid where the ends
    of its transfers fit best.
    """
    found: dict[tuple[str, Sequence[int], str], dict[int, list[Event]]] = defaultdict(dict)
    for rank, own in transfers.items():
        for event in sorted(own, key=lambda event: (event.begin, event.end)):
            axis = axis_of(event)
            group = next((tuple(group) for group in groups.get(axis, ()) if rank in group), ())
            found[axis, group, _same_at_both_ends(event.name)].setdefault(rank, []).append(event)
    same: list[dict[int, Event]] = []
    for by_rank in found.values():
        longest = max(by_rank.values(), key=len)
        each: list[dict[int, Event]] = [{} for _ in longest]
        for rank, own in by_rank.items():
            first = _place(own, longest)
            for i, event in enumerate(own):
                each[first + i][rank] = event
        same += each
    return [each for each in same if len(each) > 1]


def _place(few: Sequence[Event], many: Sequence[Event]) -> int:
    """Which of `many` is the first of `few`: there the distances between their ends vary least."""
    if len(few) == len(many):
        return 0
    chosen = range(0, len(few), max(1, len(few) // 64))

    def misfit(first: int) -> float:
        apart = [many[first + i].end - few[i].end for i in chosen]
        return max(apart) - min(apart) if len(apart) > 1 else abs(apart[0])

    return min(range(len(many) - len(few) + 1), key=misfit)


def _same_at_both_ends(name: str) -> str:
    if end := END.fullmatch(name):
        stage, verb, way, micro_batch = end.groups()
        sent = {"F": 1, "B": -1}[way] if verb == "SEND" else 0
        return f"{way}{micro_batch} to stage {int(stage) + sent}"
    return re.sub(r"^(i?send|i?recv|receive)\b ?", "", name, flags=re.IGNORECASE)


def shared(transfers: Mapping[int, Sequence[Event]], groups: Groups) -> dict[int, Share]:
    """By `id` of an event: how its time divides.  One that no other rank saw is all transfer.

    Along pp, where a rank sees only its own end, the shortest transfer of the same name and size tells what it takes.
    """
    shares: dict[int, Share] = {}
    for each in matched(transfers, groups):
        late = min(each, key=lambda rank: (_length(each[rank]), rank))
        moving = _length(each[late])
        if _is_pipe(each[late]):  # a send may end long after it arrived, and a receive begin long before it was sent
            begins, ends = zip(*map(_span, each.values()), strict=True)
            moving = max(0, min(moving, min(ends) - max(begins)))
        for event in each.values():
            shares[id(event)] = Share(min(moving, _length(event)), late)
    alone = [event for own in transfers.values() for event in own if id(event) not in shares and _is_pipe(event)]
    shortest: dict[tuple[str, int], int] = {}
    for event in alone:
        key = (_work(event), event.bytes)
        shortest[key] = min(shortest.get(key, _length(event)), _length(event))
    for event in alone:
        shares[id(event)] = Share(shortest[_work(event), event.bytes], None)
    return shares


def _work(event: Event) -> str:
    """Its name without the micro-batch."""
    return END.sub(r"\1\2_\3", ACTION.sub(r"\1\2", event.name))


def _is_pipe(event: Event) -> bool:
    return axis_of(event).startswith("pp")


# --- one rank --------------------------------------------------------------------------------------------------------


class _Rank:
    """What is known of a rank over all steps: how it records, and how long its work takes alone."""

    def __init__(self, rank: int, events: Sequence[Event], is_pipeline: bool) -> None:
        self.rank = rank
        inner = [event for event in events if event.lane != STEP]
        self.has_waits = any(event.kind == "wait" for event in inner)
        # A rank that records nothing but its waits: the rest of its step cannot be told apart.
        self.is_whole = (self.has_waits or not any(event.kind == "comm" for event in inner)) and not any(
            event.kind in WORK for event in inner
        )
        self.events = sorted((e for e in (events if self.is_whole else inner)), key=lambda e: (e.begin, e.end))
        self.idle = Row("bubble" if is_pipeline and not self.has_waits else "host")
        self.within_work = _within_work(self.events)
        self.slowed = _contention(self.events, self.within_work)
        self.longest = max((event.end - event.begin for event in self.events), default=0.0)
        self.begins = [event.begin for event in self.events]

    def within(self, begin: int, end: int) -> list[Event]:
        """Its events that touch a span; those without length are none."""
        first = bisect_left(self.begins, begin / SECOND - self.longest - 1e-9)
        last = bisect_right(self.begins, end / SECOND + 1e-9)
        return [
            event
            for event in self.events[first:last]
            if _ticks(event.begin) < end and _ticks(event.end) > begin and _length(event) > 0
        ]

    def ended(self, begin: int, end: int) -> list[Event]:
        """The transfers that ended in a span: ranks end one together, whenever each began it."""
        return [e for e in self.within(begin, end) if e.kind == "comm" and _ticks(e.end) <= end]

    def account(self, window: tuple[int, int], shares: Mapping[int, Share]) -> Account:
        begin, end = window
        events = self.within(begin, end)
        transfers = [event for event in events if event.kind == "comm"]
        by_name: dict[str, list[Event]] = defaultdict(list)
        for event in transfers:
            by_name[event.name].append(event)
        pieces: list[Piece] = []
        for event in events:
            if event.kind == "wait":
                pieces += _wait_pieces(event, _waited_for(event, by_name[event.name], transfers), shares)
            else:
                pieces += self._pieces(event, shares)
        rows: Counter[Row] = Counter()
        names: Counter[tuple[str, str]] = Counter()
        busy = union([(max(b, begin), min(e, end)) for b, e in map(_span, transfers)])
        exposed: Spans = []
        for low, high, (_, _, row, name) in _walk(pieces, begin, end, (9, 0, self.idle, "")):
            rows[row] += high - low
            if row.kind in ("transfer", "waiting", "unknown", "bubble") and name:
                names[row.kind, name] += high - low
                if row.kind != "unknown":
                    exposed.append((low, high))
        assert sum(rows.values()) == end - begin and all(n >= 0 for n in rows.values()), rows
        open_ = overlap(busy, union(exposed))
        total = sum(min(e, end) - max(b, begin) for b, e in map(_span, transfers))
        return Account(self.rank, begin / SECOND, end - begin, rows, length(busy), length(busy) - open_, total, names)

    def _pieces(self, event: Event, shares: Mapping[int, Share]) -> list[Piece]:
        """The parts of an event that is no wait."""
        begin, end = _span(event)
        if event.kind == "comm":
            if self.has_waits:
                return []
            share = shares.get(id(event), Share(end - begin, None))
            parts = [
                (begin, end - share.moving, _waiting(event, share.late)),
                (end - share.moving, end, Row("transfer", axis_of(event))),
            ]
            return [
                (b, e, (7, _axis_order(row.axis)[0] + 100 * (row.kind != "transfer"), row, event.name))
                for b, e, row in parts
                if b < e
            ]
        if event.kind == "compute" and event.name == BESIDE:
            return [(begin, end, (6, 0, Row("compute"), ""))]  # unless that work has an event of its own
        if event.kind == "compute":
            own = minus([(begin, end)], self.within_work[event.lane])
            slow = self.slowed.get(id(event), [])
            return [
                *((b, e, (2, 0, Row("compute"), "")) for b, e in own),
                *((b, e, (1, 0, Row("contention"), "")) for b, e in slow),
            ]
        place = {"optimizer": 3, "fused": 4, "unknown": 4, "data": 5, "save": 5, "bubble": 5, "other": 8}[event.kind]
        inner = KINDS.index(event.kind)
        return [(begin, end, (place, inner, Row(event.kind), event.name if event.kind == "unknown" else ""))]


def _waiting(event: Event, late: int | None) -> Row:
    return Row("bubble") if _is_pipe(event) else Row("waiting", axis_of(event), late)


def _waited_for(wait: Event, named: Sequence[Event], transfers: Sequence[Event]) -> Event | None:
    """The transfer of that name, else any under way, which ended with the wait."""
    same = [event for event in named if event.begin <= wait.end] or [
        event for event in transfers if event.begin < wait.end and event.end > wait.begin
    ]
    return min(same, key=lambda event: abs(event.end - wait.end), default=None)


def _wait_pieces(wait: Event, transfer: Event | None, shares: Mapping[int, Share]) -> list[Piece]:
    """A wait, in three parts: behind other transfers of its stream, for a late rank, and while the bytes moved."""
    begin, end = _span(wait)
    if transfer is None:  # of a receive the sender alone may hold the transfer
        row = Row("transfer", "pp") if END.fullmatch(wait.name) else Row("waiting", wait.lane.partition(".")[2])
        return [(begin, end, (0, 0, row, wait.name))]
    share = shares.get(id(transfer), Share(_length(transfer), None))
    starts, moves = _span(transfer)[0], _span(transfer)[1] - share.moving
    first, second = min(max(begin, starts), end), min(max(begin, starts, moves), end)
    moving = Row("transfer", axis_of(transfer))
    parts = [(begin, first, moving), (first, second, _waiting(transfer, share.late)), (second, end, moving)]
    return [(b, e, (0, 0, row, wait.name)) for b, e, row in parts if b < e]


def _within_work(events: Sequence[Event]) -> dict[str, Spans]:
    """By lane: what lies within its work and is none of it, such as a wait or an update in a forward pass."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event.kind not in ("compute", "comm") or event.name == BESIDE:
            found[event.lane].append(_span(event))
    return defaultdict(list, {lane: union(spans) for lane, spans in found.items()})


def _contention(events: Sequence[Event], within: Mapping[str, Spans]) -> dict[int, Spans]:
    """By `id` of an event of work: the part by which transfers beside it made it longer."""
    busy = union([_span(event) for event in events if event.kind == "comm"])
    alone: dict[tuple[str, int], list[int]] = defaultdict(list)
    beside: dict[tuple[str, int], list[tuple[Event, int, Spans]]] = defaultdict(list)
    for event in events if busy else ():
        if event.kind != "compute" or event.lane == STEP or event.name == BESIDE:
            continue
        key = (_work(event), event.flops)
        own = minus([_span(event)], within[event.lane])
        work, together = length(own), common(own, busy)
        if together:
            beside[key].append((event, work, together))
        elif work > 0:
            alone[key].append(work)
    slowed: dict[int, Spans] = {}
    for key, found in beside.items():
        times = sorted(alone[key])
        if not times or times[3 * len(times) // 4] > STEADY * times[len(times) // 4]:
            continue
        usual = statistics.median(times)
        if statistics.median(work for _, work, _ in found) > NOISE * usual:
            for event, work, together in found:
                slowed[id(event)] = last(together, int(work - usual))
    return slowed


def _walk(pieces: Sequence[Piece], begin: int, end: int, idle: What) -> Iterable[Piece]:
    """From begin to end without a gap: each stretch with what takes precedence there."""
    points: list[Piece] = []  # (moment, +1 or -1, what)
    for low, high, what in pieces:
        low, high = max(low, begin), min(high, end)
        if low < high:
            points += [(low, 1, what), (high, -1, what)]
    points.sort(key=lambda point: point[0])
    active: Counter[What] = Counter()
    at = begin
    for tick, change, what in points:
        if tick > at:
            yield at, tick, min(active, key=_precedence, default=idle)
            at = tick
        active[what] += change
        if not active[what]:
            del active[what]
    if at < end:
        yield at, end, idle


def _precedence(what: What) -> tuple[int, int, tuple[int, tuple[int, str], int], str]:
    place, inner, row, name = what
    return place, inner, row.order, name


def _windows(by_rank: Mapping[int, Sequence[Event]]) -> dict[str, dict[int, tuple[int, int]]]:
    """step -> rank -> (begin, end), steps in order of time."""
    windows: dict[str, dict[int, tuple[int, int]]] = {}
    steps = sorted((event for own in by_rank.values() for event in own if event.lane == STEP), key=lambda e: e.begin)
    for event in steps:
        windows.setdefault(event.name, {})[event.rank] = _span(event)  # a step made again counts as made last
    if not steps and by_rank:
        everything = [_span(event) for own in by_rank.values() for event in own]
        whole = (min(begin for begin, _ in everything), max(end for _, end in everything))
        windows[ALL] = dict.fromkeys(by_rank, whole)
    return windows


def _renamed(account: Account, new: Mapping[Row, Row]) -> Account:
    rows: Counter[Row] = Counter()
    for row, ticks in account.rows.items():
        rows[new.get(row, row)] += ticks
    return replace(account, rows=rows)


def _axis_order(axis: str) -> tuple[int, str]:
    return (AXES.index(axis) if axis in AXES else len(AXES)), axis


def _ticks(seconds: float) -> int:
    return round(seconds * SECOND)


def _span(event: Event) -> tuple[int, int]:
    return _ticks(event.begin), _ticks(event.end)


def _length(event: Event) -> int:
    return _ticks(event.end) - _ticks(event.begin)
