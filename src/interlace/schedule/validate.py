"""Whether a table can run, before anything does: all of it once, in order, without deadlock; and what it holds at most.

A fault is a `PlanError` of one sentence that names the table, the rank and the actions, and for a table from a file the
line and column of the action, or the line of the rank that lacks it.  Sends and receives are taken
as they are posted: neither stops its rank; what a computation takes in must have been received before it in its row and
sent by a row that gets there; and in each direction between two ranks receives stand in the order of the sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from interlace.errors import PlanError
from interlace.schedule.lower import READS_WEIGHTS, receive_of, send_of
from interlace.schedule.table import RECEIVES, SENDS, ZERO, Action, Kind, Table

F, B, IN, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT


@dataclass(frozen=True)
class Peaks:
    """Micro-batches whose activations are held at the worst moment, by stage, and of all stages of a rank together.

    stages, ranks: from F to the end of B or W.  whole: of a rank, from F to the end of B or I, after which only the
    inputs of products and the gradients of their outputs stay.  unsharded: stages of a rank that are whole at a time.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    whole: tuple[int, ...]
    unsharded: tuple[int, ...]


def validate(table: Table) -> Peaks:
    """Peaks of a table, lowered or not; PlanError for one that cannot run."""
    _check_complete(table)
    for rank in range(table.ranks):
        _check_order(table, rank)
    kinds = {action.kind for row in table.rows for action in row}
    transfers = not kinds.isdisjoint((*SENDS, *RECEIVES))
    if transfers:
        _check_lines(table)
    if not kinds.isdisjoint(ZERO):
        for rank in range(table.ranks):
            _check_zero(table, rank)
    _check_progress(table, transfers)
    return _peaks(table)


def _check_complete(table: Table) -> None:
    """Every stage on one rank, every micro-batch through each stage once, forward and back."""
    if len(set(table.placement)) != table.ranks or set(table.placement) != set(range(table.ranks)):
        empty = min(set(range(table.ranks)) - set(table.placement), default=table.ranks)
        raise PlanError(f"{table.at(empty)}: rank {empty} of {table.ranks} has no stage; give it one, or leave it out")
    if not table.micro_batches:
        raise PlanError(
            f"{table.where} computes nothing; write a forward and a backward pass for each stage, as 0F0,0B0"
        )
    count: Counter[Action] = Counter()
    for rank, row in enumerate(table.rows):
        for action in row:
            count[action] += 1
            j = action.micro_batch
            if action.stage >= table.stages or (j is not None and j >= table.micro_batches):
                raise PlanError(
                    f"{table.at(rank, action)}: rank {rank} runs {action}, beyond {table.stages} stages and "
                    f"{table.micro_batches} micro-batches; remove it"
                )
            if table.placement[action.stage] != rank:
                raise PlanError(
                    f"{table.at(rank, action)}: rank {rank} runs {action}, but stage {action.stage} is on rank "
                    f"{table.placement[action.stage]}; move it there"
                )
            if count[action] > 1 and action.kind not in (Kind.UNSHARD, Kind.RESHARD):
                raise PlanError(f"{table.at(rank, action, 1)}: rank {rank} runs {action} twice; remove one")
    for stage in range(table.stages):
        for j in range(table.micro_batches):
            f, b, i, w = (count[Action(stage, kind, j)] for kind in (F, B, IN, W))
            if f and (b, i, w) in ((1, 0, 0), (0, 1, 1)):
                continue
            rank = table.placement[stage]
            if b and (i or w):
                part = Action(stage, IN if i else W, j)
                raise PlanError(f"{table.at(rank, part)}: rank {rank} has {stage}B{j} beside {part}; keep one form")
            lacking = f"{stage}F{j}" if not f else f"{stage}W{j}" if i else f"{stage}I{j}" if w else f"{stage}B{j}"
            raise PlanError(
                f"{table.at(rank)}: rank {rank} never runs {lacking}; add it, since every stage needs it once"
            )


def _check_order(table: Table, rank: int) -> None:
    """Forward before backward, the input's gradient before the weights', transfers where their values are there."""
    place = {action: number for number, action in enumerate(table.rows[rank])}
    for action, at in place.items():
        stage, j, last = action.stage, action.micro_batch, table.stages - 1
        first = None
        if action.kind in (B, IN):
            first = Action(stage, F, j)
        elif action.kind is W:
            first = Action(stage, IN, j)
        elif action.kind is Kind.SEND_F:
            first = Action(stage, F, j)
        elif action.kind is Kind.SEND_B:
            first = next(a for a in (Action(stage, B, j), Action(stage, IN, j)) if a in place)
        receive = receive_of(action, last) if action.is_compute else None
        for earlier in (first, receive):
            if earlier is not None and place.get(earlier, -1) > at:
                raise PlanError(
                    f"{table.at(rank, action)}: rank {rank} runs {action} before {_shown(table, earlier)}; swap them"
                )


def _shown(table: Table, action: Action) -> str:
    """An action and, where it is in a file, its place."""
    place = table.cell(action)
    return f"{action} ({place})" if place else str(action)


def _check_lines(table: Table) -> None:
    """Every value that another rank needs is sent and received once, and received in the order in which it is sent."""
    last, home = table.stages - 1, table.placement
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(table.rows):
        for action in row:
            if action.kind in (*SENDS, *RECEIVES):
                stage = action.other.stage
                if not 0 <= stage <= last:
                    raise PlanError(
                        f"{table.at(rank, action)}: rank {rank} runs {action}, and there is no stage {stage}; remove it"
                    )
                if home[stage] == rank:
                    raise PlanError(f"{table.at(rank, action)}: {action} goes from rank {rank} to itself; remove it")
                is_send = action.kind in SENDS
                line = (rank, home[stage]) if is_send else (home[stage], rank)
                (sent if is_send else received).setdefault(line, []).append(action if is_send else action.other)
    everything = {action for actions in sent.values() for action in actions}
    for rank, row in enumerate(table.rows):
        for action in row:
            made = send_of(action, last) if action.is_compute else None
            if made is not None and home[made.other.stage] != rank and made not in everything:
                raise PlanError(f"{table.at(rank, action)}: rank {rank} never runs {made}, behind {action}; add it")
    for line in sorted(sent.keys() | received.keys()):
        ours, theirs = sent.get(line, []), received.get(line, [])
        odd = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), None)
        if odd is not None:
            sent_there, runs = odd[0], odd[1].other
            raise PlanError(
                f"{table.at(line[1], runs)}: rank {line[0]} sends {sent_there} where rank {line[1]} runs {runs}; "
                "receive in the order of the sends"
            )
        if len(ours) != len(theirs):
            both = min(len(ours), len(theirs))
            lone, rank = (ours[both], line[0]) if len(ours) > both else (theirs[both].other, line[1])
            raise PlanError(f"{table.at(rank, lone)}: {lone} has no counterpart {lone.other}; add it")


def _check_zero(table: Table, rank: int) -> None:
    """Weights are whole while they are read, and gradients are reduced when all are there."""
    row = table.rows[rank]
    whole: set[int] = set()
    left = Counter(a.stage for a in row if a.kind in (B, W))
    made: set[tuple[int, int | None]] = set()
    times: Counter[Action] = Counter()
    for action in row:
        stage = action.stage
        at = table.at(rank, action, times[action])
        times[action] += 1
        if action.kind in READS_WEIGHTS and stage not in whole:
            raise PlanError(f"{at}: rank {rank} runs {action} while its weights are not whole; unshard first")
        if action.kind is Kind.UNSHARD:
            if stage in whole:
                raise PlanError(f"{at}: rank {rank} runs {action} twice in a row; remove one")
            whole.add(stage)
        elif action.kind is Kind.RESHARD:
            if stage not in whole:
                raise PlanError(f"{at}: rank {rank} runs {action}, and nothing is whole; remove it")
            whole.remove(stage)
        elif action.kind in (B, W):
            left[stage] -= 1
            made.add((stage, action.micro_batch))
        elif action.kind is Kind.REDUCE:
            early = action.micro_batch is None and left[stage]
            if early or (action.micro_batch is not None and (stage, action.micro_batch) not in made):
                raise PlanError(f"{at}: rank {rank} runs {action} before all its gradients are there; move it")
    for stage in table.stages_of(rank):
        reduced = [action for action in row if action.kind is Kind.REDUCE and action.stage == stage]
        if not reduced:
            raise PlanError(f"{table.at(rank)}: rank {rank} never runs {stage}REDUCE; add it behind the last backward")
        if [action.micro_batch for action in reduced] not in ([None], list(range(table.micro_batches))):
            raise PlanError(
                f"{table.at(rank, reduced[-1])}: rank {rank} runs {' '.join(map(str, reduced))}, found "
                f"{table.micro_batches} micro-batches; reduce once, {stage}REDUCE, or each of them in order"
            )


def _check_progress(table: Table, transfers: bool) -> None:
    """Runs the rows as far as they go; what is left waits for itself."""
    done: set[tuple[int, Kind, int | None]] = set()
    at = [0] * table.ranks
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(table.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                awaited = _awaited(table, action, transfers)
                if awaited is not None and awaited not in done:
                    break
                done.add((action.stage, IN if action.kind is B else action.kind, action.micro_batch))
                at[rank] += 1
                moving = True
    stuck = [rank for rank, row in enumerate(table.rows) if at[rank] < len(row)]
    if stuck:
        raise PlanError(_circle(table, at, stuck[0], transfers))


def _awaited(table: Table, action: Action, transfers: bool) -> tuple[int, Kind, int | None] | None:
    """What must have happened on another row or stage before a computation can begin; B counts as its I."""
    last, j = table.stages - 1, action.micro_batch
    receive = receive_of(action, last) if action.is_compute else None
    if receive is None:
        return None
    source = receive.other
    if transfers and table.placement[source.stage] != table.placement[action.stage]:
        return source.stage, source.kind, j
    return source.stage, F if action.kind is F else IN, j


def _circle(table: Table, at: list[int], rank: int, transfers: bool) -> str:
    """The ranks that wait for each other, as a sentence."""
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        awaited = _awaited(table, table.rows[rank][at[rank]], transfers)
        assert awaited is not None
        rank = table.placement[awaited[0]]
    words = []
    for member in seen[seen.index(rank) :]:
        action = table.rows[member][at[member]]
        awaited = _awaited(table, action, transfers)
        assert awaited is not None
        missing = Action(*awaited)
        kind = (
            "B" if Action(missing.stage, B, missing.micro_batch) in table.rows[table.placement[missing.stage]] else "I"
        )
        text = f"{missing.stage}{kind}{missing.micro_batch}" if missing.kind is IN else str(missing)
        words.append(
            f"rank {member} stands at {_shown(table, action)} until {text} of rank {table.placement[missing.stage]}"
        )
    return f"{table.where} never ends: {', '.join(words)}; move one of them forward"


def _peaks(table: Table) -> Peaks:
    stages = [0] * table.stages
    held: Counter[int] = Counter()

    def highest(row: tuple[Action, ...], ends: tuple[Kind, ...], note: Callable[[], None]) -> int:
        now = most = 0
        for action in row:
            if action.kind is F:
                held[action.stage] += 1
                now += 1
                note()
            most = max(most, now)
            if action.kind in ends:
                held[action.stage] -= 1
                now -= 1
        held.clear()
        return most

    def note() -> None:
        for stage, count in held.items():
            stages[stage] = max(stages[stage], count)

    ranks = tuple(highest(row, (B, W), note) for row in table.rows)
    whole = tuple(highest(row, (B, IN), lambda: None) for row in table.rows)
    return Peaks(tuple(stages), ranks, whole, tuple(_most_whole(row) for row in table.rows))


def _most_whole(row: tuple[Action, ...]) -> int:
    now = most = 0
    for action in row:
        now += (action.kind is Kind.UNSHARD) - (action.kind is Kind.RESHARD)
        most = max(most, now)
    return most
