"""From a table of compute to one that runs: sends and receives, and what ZeRO gathers, frees and reduces.

A send stands right behind what makes it, a receive `ahead` computations before what needs it, so that neither is waited
for by design.  Between two ranks, one direction is one line: what is sent first is received first, and receives stand
in the order of the sends.  Nothing is sent between two stages of one rank.

Weights of a stage are whole from its first forward to its last use: no gather repeats for a micro-batch.  Where memory
asks for it, a rank has only `keep` stages whole at a time, and the one that it needs again last goes first (Belady).
Weight gradients are reduced once, behind the last of the stage; `each`: behind each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from interlace.schedule.table import RECEIVES, SENDS, ZERO, Action, Kind, Table

READS_WEIGHTS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
MAKES_GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT)


def lower(table: Table, zero: int = 0, *, keep: int | None = None, each: bool = False, ahead: int = 1) -> Table:
    """The whole table.  Sends and receives, or ZeRO actions, that it has already stay as they are.

    zero: 3 frees weights, every stage makes them whole and reduces.  keep: stages of a rank that may be whole at a
    time under zero=3, None = all.  ahead: computations between a receive and its use.
    """
    assert keep is None or keep >= 1, keep
    kinds = {action.kind for row in table.rows for action in row}
    rows = [list(row) for row in table.rows]
    if kinds.isdisjoint((*SENDS, *RECEIVES)):
        rows = [_with_transfers(table, rank, ahead) for rank in range(table.ranks)]
    if kinds.isdisjoint(ZERO):
        rows = [_with_zero(row, keep if zero == 3 and keep else len(row), zero == 3, each) for row in rows]
    return replace(table, rows=tuple(map(tuple, rows)))


def input_of(action: Action, last: int) -> Action | None:
    """The computation on another stage whose result this one takes; None at either end.  Backward's is an I or a B."""
    stage, j = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return Action(stage - 1, Kind.FORWARD, j) if stage else None
    if action.kind in (Kind.BACKWARD, Kind.INPUT):
        return Action(stage + 1, action.kind, j) if stage < last else None
    return None


def send_of(action: Action, last: int) -> Action | None:
    """The send of what a computation makes for another stage; None at either end."""
    if action.kind is Kind.FORWARD and action.stage < last:
        return Action(action.stage, Kind.SEND_F, action.micro_batch)
    if action.kind in (Kind.BACKWARD, Kind.INPUT) and action.stage:
        return Action(action.stage, Kind.SEND_B, action.micro_batch)
    return None


def receive_of(action: Action, last: int) -> Action | None:
    """The receive that a computation waits for; None at either end."""
    source = input_of(action, last)
    sent = send_of(source, last) if source is not None else None
    return None if sent is None else sent.other


def _with_transfers(table: Table, rank: int, ahead: int) -> list[Action]:
    home, last = table.placement, table.stages - 1
    row = table.rows[rank]
    places: dict[Action, int] = {}  # receive -> the place in the row before which it is posted
    for place, action in enumerate(row):
        receive = receive_of(action, last)
        if receive is not None and home[receive.other.stage] != rank:
            places[receive] = max(0, place - ahead)
    posted: dict[int, list[Action]] = {}
    for source in sorted({home[receive.other.stage] for receive in places}):
        earliest = math.inf
        for receive in reversed([send.other for send in _sends(table, source, rank)]):
            earliest = min(earliest, places[receive])
            posted.setdefault(int(earliest), []).insert(0, receive)
    lowered: list[Action] = []
    for place, action in enumerate(row):
        lowered += [*posted.get(place, []), action]
        sent = send_of(action, last)
        if sent is not None and home[sent.other.stage] != rank:
            lowered.append(sent)
    return lowered


def _sends(table: Table, source: int, target: int) -> Iterator[Action]:
    """What `source` sends to `target`, in order."""
    for action in table.rows[source]:
        sent = send_of(action, table.stages - 1)
        if sent is not None and table.placement[sent.other.stage] == target:
            yield sent


def _with_zero(row: list[Action], keep: int, frees: bool, each: bool) -> list[Action]:
    """UNSHARD ahead of the computation before the first one that needs it, if there is room; else right before."""
    reads = [place for place, action in enumerate(row) if action.kind in READS_WEIGHTS]
    before: dict[int, list[Action]] = {}
    behind: dict[int, list[Action]] = {}
    whole: list[int] = []
    for number, place in enumerate(reads):
        stage = row[place].stage
        if stage not in whole:
            early = reads[number - 1] if number else 0
            if len(whole) >= keep or (len(whole) + 1 == keep and early in behind):
                early = place
            if len(whole) >= keep:
                following = {other: _next_read(row, reads[number:], other) for other in whole}
                going = max(whole, key=lambda other: following[other])
                whole.remove(going)
                before.setdefault(place, []).append(Action(going, Kind.RESHARD))
            before.setdefault(early, []).append(Action(stage, Kind.UNSHARD))
            whole.append(stage)
        if frees and stage in whole and _next_read(row, reads[number + 1 :], stage) == math.inf:
            whole.remove(stage)
            behind.setdefault(place, []).append(Action(stage, Kind.RESHARD))
    made = [place for place, action in enumerate(row) if action.kind in MAKES_GRADIENTS]
    final = {row[place].stage: place for place in made}
    for place in made:
        if each or final[row[place].stage] == place:
            micro_batch = row[place].micro_batch if each else None
            behind.setdefault(place, []).append(Action(row[place].stage, Kind.REDUCE, micro_batch))
    lowered: list[Action] = []
    owed: list[Action] = []
    for place, action in enumerate(row):
        if action.kind not in SENDS:  # what was made is sent first
            lowered += owed
            owed = []
        lowered += [*before.get(place, []), action]
        owed += behind.get(place, [])
    return lowered + owed


def _next_read(row: list[Action], places: list[int], stage: int) -> float:
    return next((place for place in places if row[place].stage == stage), math.inf)
