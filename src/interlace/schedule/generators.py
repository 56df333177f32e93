"""Tables by name, for any number of ranks p, micro-batches m and, where a rank holds several, stages v a rank.

    name         stages     backward  idle, beyond m (F+B)     activations on the fullest rank   published
    gpipe        looped, 1  whole     (p-1) (F+B)              m                                 arXiv 1811.06965
    1f1b         looped, 1  whole     (p-1) (F+B)              min(m, p)                         arXiv 2006.09503
    interleaved  looped, v  whole     (p-1) (F+B) / v          p + (p-1)/v                       arXiv 2104.04473
    zb-h1        looped, 1  split     (p-1) (F+I-W)            p                                 arXiv 2401.10241
    zbv          folded, 2  split     (p-1) F / 2: the fill    p                                 arXiv 2401.10241
    v-half       folded, 2  split     (p-1) (F+B) / 2          p/2 + 1                           arXiv 2405.15362
    dualpipev    folded, 2  at ends   (p-1) F / 2              p + 1/2                           DeepSeek, DualPipe

F, I, W: a rank's time for a micro-batch forward, for the gradient of the input and for that of the weights, equal here;
B = I + W.  Activations in micro-batches of all stages of a rank.  With fewer micro-batches than ranks it idles more.

A V is made for 2 p micro-batches or more; of fewer, the surplus ones are left out of its table.  What is left stays in
a valid order, since no micro-batch needs another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from interlace.errors import PlanError, nearest
from interlace.schedule.table import Action, Kind, Table, folded, looped, table

F, B, IN, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
Row = list[Action]


def gpipe(ranks: int, micro_batches: int) -> Table:
    """All forward, then all backward."""
    rows = [[Action(r, kind, j) for kind in (F, B) for j in range(micro_batches)] for r in range(ranks)]
    return table(rows, looped(ranks, 1), micro_batches)


def one_f_one_b(ranks: int, micro_batches: int) -> Table:
    """Forward until the first gradient can arrive, then one forward and one backward in turn."""
    return interleaved(ranks, micro_batches, 1)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Table:
    """1f1b over v stages a rank; micro-batches pass them in groups of at least p, as equal as they can be."""
    groups = _groups(micro_batches, ranks)
    rows = []
    for rank in range(ranks):
        forward = [(c, j) for group in groups for c in range(chunks) for j in group]
        backward = [(c, j) for group in groups for c in reversed(range(chunks)) for j in group]
        ahead = ranks - rank - 1 if chunks == 1 else (chunks - 1) * len(groups[0]) + 2 * (ranks - rank - 1)
        row = [Action(c * ranks + rank, F, j) for c, j in forward]
        rows.append(_alternate(row, [Action(c * ranks + rank, B, j) for c, j in backward], ahead))
    return table(rows, looped(ranks, chunks), micro_batches)


def _groups(micro_batches: int, least: int) -> list[range]:
    """Micro-batches in groups of `least` or somewhat more; one group if there are fewer."""
    count = max(1, micro_batches // least)
    size, rest = divmod(micro_batches, count)
    ends = [number * size + min(number, rest) for number in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def _alternate(forward: Row, backward: Row, ahead: int) -> Row:
    """`ahead` of the forwards, then forward and backward in turn until both are used up."""
    row, rest = forward[:ahead], forward[ahead:]
    for number, action in enumerate(backward):
        row += [*rest[number : number + 1], action]
    return row + rest[len(backward) :]


def zb_h1(ranks: int, micro_batches: int) -> Table:
    """1f1b's order, weight gradients where it would stand still, and nowhere more in flight than on its first rank."""
    plain = one_f_one_b(ranks, micro_batches)
    rows = [[Action(a.stage, IN if a.kind is B else F, a.micro_batch) for a in row] for row in plain.rows]
    return table(fill(rows, plain.placement, ranks), plain.placement, micro_batches)


def zbv(ranks: int, micro_batches: int) -> Table:
    """A V, filled until the first gradient is back: from then on every rank always has something to do."""
    whole = max(micro_batches, 2 * ranks)
    rows = []
    for rank in range(ranks):
        words = (2 * (ranks - rank) - 1) * ["F0"] + rank * ["F1", "F0"] + (ranks - rank) * ["F1", "I1"]
        words += (whole - 2 * ranks + rank + 1) * ["F0", "I0", "F1", "I1"]
        words += (ranks - rank - 1) * ["I0", "F1", "I1"] + rank * ["I0", "I1"] + (ranks - rank) * ["I0"]
        spelled = _spelled(words, rank, ranks, micro_batches)
        rows.append([action for action in spelled if action.kind is not W])
    return table(fill(rows, folded(ranks), 2 * ranks), folded(ranks), micro_batches)


def v_half(ranks: int, micro_batches: int) -> Table:
    """A V whose micro-batches follow each other every 6 F times: down it a stage every 1, up a stage every 2, with
    gradients as with activations, so that one is in flight half as long as under 1f1b."""
    rows = []
    for rank in range(ranks):
        end, up = ranks - 1, 2 * (ranks - 1 - rank)
        passes = [
            (rank, Action(rank, F, 0)),
            (end + 1 + up, Action(2 * ranks - 1 - rank, F, 0)),
            (3 * end + 2 + rank, Action(2 * ranks - 1 - rank, IN, 0)),
            (4 * end + 4 + up, Action(rank, IN, 0)),
        ]
        timed = [(at + 6 * j, Action(a.stage, a.kind, j)) for at, a in passes for j in range(micro_batches)]
        rows.append([action for _, action in sorted(timed, key=lambda pair: pair[0])])
    return table(fill(rows, folded(ranks), ranks + 2), folded(ranks), micro_batches)


def dualpipev(ranks: int, micro_batches: int) -> Table:
    """A V in which every forward stands beside a whole backward of the other half, so that transfers of one can hide
    under the other; backward is split only where the pipeline fills and empties."""
    whole = max(micro_batches, 2 * ranks)
    rows = []
    for rank in range(ranks):
        below = ranks - 1 - rank
        words = 2 * below * ["F0"] + (rank + 1) * ["F0", "F1"] + below * ["I1", "W", "F1"]
        words += (whole - 2 * ranks + rank + 1) * ["F0", "B1", "F1", "B0"] + below * ["B1", "F1", "B0"]
        last = (rank + 1) * ["B1", "B0"]
        words += last[: rank + 1] + [word.replace("B", "I") for word in last[rank + 1 :]] + below * ["W", "I0"]
        rows.append(_spelled(words, rank, ranks, micro_batches))
    return table(rows, folded(ranks), micro_batches)


def _spelled(words: Iterable[str], rank: int, ranks: int, micro_batches: int) -> Row:
    """Actions of a rank of a V from words: F0 is the next forward of its first stage, B1 or I1 the next backward of its
    second, W the oldest weight gradient that is owed (nothing if none is); all that stay owed come at the end."""
    stages = (rank, 2 * ranks - 1 - rank)
    count = dict.fromkeys(("F0", "F1", "B0", "B1"), 0)
    row: Row = []
    owed: Row = []
    for word in words:
        if word == "W":
            row += owed[:1]
            owed = owed[1:]
            continue
        number = word.replace("I", "B")
        stage, micro_batch = stages[int(word[1])], count[number]
        count[number] += 1
        row.append(Action(stage, Kind(word[0]), micro_batch))
        if word[0] == "I":
            owed.append(Action(stage, W, micro_batch))
    return [action for action in row + owed if action.micro_batch is not None and action.micro_batch < micro_batches]


def fill(rows: Sequence[Row], placement: Sequence[int], most: int) -> list[Row]:
    """`rows` of F and I with every W put where its rank would stand still, or hold more than `most` activations.

    Stands still: with F, I and W of one time each.  An activation is held from F to W.
    """
    placed: list[Row] = [[] for _ in rows]
    owed: list[list[Action]] = [[] for _ in rows]
    held, at = [0] * len(rows), [0] * len(rows)
    done: set[Action] = set()
    last = len(placement) - 1
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        now: list[tuple[int, Action]] = []
        for rank, row in enumerate(rows):
            following = row[at[rank]] if at[rank] < len(row) else None
            full = held[rank] >= most and bool(owed[rank])
            if following and _needs(following, last) <= done and not (following.kind is F and full):
                now.append((rank, following))
            elif owed[rank]:
                now.append((rank, owed[rank][0]))
        assert now, "the rows wait for each other"
        for rank, action in now:
            placed[rank].append(action)
            done.add(action)
            if action.kind is W:
                owed[rank].pop(0)
                held[rank] -= 1
                continue
            at[rank] += 1
            if action.kind is F:
                held[rank] += 1
            else:
                owed[rank].append(Action(action.stage, W, action.micro_batch))
    return [out + rest for out, rest in zip(placed, owed, strict=True)]


def _needs(action: Action, last: int) -> set[Action]:
    """What must be done before a forward, or the input part of a backward, can begin."""
    stage, j = action.stage, action.micro_batch
    if action.kind is F:
        return {Action(stage - 1, F, j)} if stage else set()
    return {Action(stage, F, j)} | ({Action(stage + 1, IN, j)} if stage < last else set())


# --- by name -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a named schedule is made, and the stages a rank that it can have: None = any number."""

    make: Callable[..., Table]
    chunks: int | None = 1


FORMS = {
    "gpipe": Form(gpipe),
    "1f1b": Form(one_f_one_b),
    "interleaved": Form(interleaved, None),
    "zb-h1": Form(zb_h1),
    "zbv": Form(zbv, 2),
    "v-half": Form(v_half, 2),
    "dualpipev": Form(dualpipev, 2),
}


def chunks_of(name: str, chunks: int = 1) -> int:
    """Stages a rank under the named schedule: as asked, or what the schedule needs where 1, the default, was given.

    Errors: PlanError for a number that it cannot have.
    """
    form = _form(name)
    if form.chunks is None or chunks in (1, form.chunks):
        return form.chunks or chunks
    raise PlanError(f"schedule={name} has {form.chunks} stages a rank, found chunks={chunks}: use chunks={form.chunks}")


@functools.lru_cache(maxsize=64)
def generate(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """The table of a named schedule.  PlanError for an unknown name, or chunks that it cannot have."""
    chunks = chunks_of(name, chunks)
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches), ("chunks", chunks)):
        if number < 1:
            raise PlanError(f"schedule={name} needs 1 or more {what}, found {number}")
    form = _form(name)
    made = form.make(ranks, micro_batches, *((chunks,) if form.chunks is None else ()))
    return replace(made, where=f"schedule={name}")


def _form(name: str) -> Form:
    if name not in FORMS:
        near = nearest(name, FORMS) or "1f1b"
        raise PlanError(f"there is no schedule {name}; choose one of {', '.join(FORMS)}: nearest is {near}")
    return FORMS[name]
