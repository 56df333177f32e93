"""The events of a step as it is planned, in the form of a run's, so that `report` draws and holds them against one.

A step of `simulate`, whose computations end with the transfers that nothing hides in them, and behind it, on every
rank, what is exposed of the data axis, and the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interlace.events import Event
from interlace.plan.simulate import Costs, makespan, simulate
from interlace.schedule import Action, Kind, Table

# The part of a micro-batch's exposed transfers that its passes have: backward moves what forward moved, and gradients.
PARTS = {Kind.FORWARD: 1 / 3, Kind.BACKWARD: 2 / 3, Kind.INPUT: 2 / 3, Kind.WEIGHT: 0.0}


def with_transfers(
    parts: Sequence[tuple[float, float, float]], inside: float, share: float, transfer: float, nbytes: int
) -> Costs:
    """Costs of stages that compute for `parts` (F, I, W).

    inside: seconds of transfers in a micro-batch's passes on a rank, of which each of its stages has `share`.
    transfer, nbytes: of a message to the next stage.
    """
    own = inside * share
    forward = [f + PARTS[Kind.FORWARD] * own for f, _, _ in parts]
    given = [i + PARTS[Kind.INPUT] * own for _, i, _ in parts]
    return Costs(forward, given, [w for *_, w in parts], transfer=transfer, nbytes=nbytes)


def planned(
    table: Table, costs: Costs, inside: Mapping[str, float], share: float, weights: float, update: float
) -> list[Event]:
    """Events of a step that begins at 0, by rank.

    inside, share: as in `with_transfers`, by axis.  weights: seconds for which the step waits for the data axis.
    """
    events = simulate(table, costs)
    end, found = makespan(events), list(events)
    for event in events:
        if event.kind == "compute":
            at = event.end
            for axis, seconds in inside.items():
                length = seconds * share * PARTS[Action.parse(event.name).kind]
                found += _exposed(event.rank, axis, f"{event.name} over {axis}", at - length, at)
                at -= length
    for rank in range(table.ranks):
        found += _exposed(rank, "dp", "gradients and weights", end, end + weights)
        found.append(Event(rank, "compute", "optimizer", "update", end + weights, end + weights + update))
    return sorted(found, key=lambda event: (event.rank, event.begin, event.end))


def _exposed(rank: int, axis: str, name: str, begin: float, end: float) -> list[Event]:
    if end <= begin:
        return []
    return [
        Event(rank, f"comm.{axis}", "comm", name, begin, end),
        Event(rank, "compute", "wait", name, begin, end),
    ]
