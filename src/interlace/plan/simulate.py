"""A pipeline's table with the seconds of its parts -> the events of a step, as a run would record them.

A rank computes its row in order.  A transfer begins when it is posted on both sides and its line, one direction between
two ranks, is free; the computation that takes it in begins when it has arrived.  Gathers and reductions run beside
compute, one at a time on a rank; a stage's first computation waits for its gather, the end of the step for reductions.
What a rank stands still for is an event too: "bubble" while what it needs is not yet computed, or once it has nothing
left to do; "wait" while that, finished, is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from interlace.events import Event
from interlace.schedule import Action, Kind, Table, lower
from interlace.schedule.lower import receive_of
from interlace.schedule.table import RECEIVES, SENDS


@dataclass(frozen=True)
class Costs:
    """Seconds by stage: forward, the gradient of the input, that of the weights; `backward` is their sum if left out.

    transfer: seconds between two ranks, `nbytes` bytes of it; latency is in it.  unshard, reduce: by stage.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    backward: Sequence[float] | None = None
    transfer: float = 0.0
    nbytes: int = 0
    unshard: Sequence[float] | None = None
    reduce: Sequence[float] | None = None

    @classmethod
    def even(cls, stages: int, forward: float, input: float, weight: float, transfer: float = 0.0) -> Costs:
        """The same for every stage."""
        return cls([forward] * stages, [input] * stages, [weight] * stages, transfer=transfer)

    def seconds(self, action: Action) -> float:
        """What an action takes; 0 for one that takes none."""
        stage = action.stage
        if action.kind is Kind.BACKWARD and self.backward is None:
            return self.input[stage] + self.weight[stage]
        taken = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
            Kind.UNSHARD: self.unshard,
            Kind.REDUCE: self.reduce,
        }.get(action.kind)
        return taken[stage] if taken is not None else 0.0


def simulate(table: Table, costs: Costs) -> list[Event]:
    """Events of one step that begins at 0, by rank and in order of time.  The table is lowered if it is not.

    The table must be valid (`schedule.validate`).
    """
    table = table if table.is_lowered else lower(table)
    state = _State(table, costs)
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(table.rows):
            while state.at[rank] < len(row) and state.run(rank, row[state.at[rank]]):
                state.at[rank] += 1
                moving = True
    assert all(at == len(row) for at, row in zip(state.at, table.rows, strict=True)), "validate the table first"
    end = max([*state.clock, *state.beside])
    for rank in range(table.ranks):
        state.stand_still(rank, end, end if state.beside[rank] < end else state.clock[rank], "end of the step")
    return sorted(state.events, key=lambda event: (event.rank, event.begin, event.end))


def makespan(events: Iterable[Event]) -> float:
    """Seconds from the first begin to the last end."""
    events = list(events)
    return max(event.end for event in events) - min(event.begin for event in events)


def bubbles(events: Sequence[Event]) -> tuple[float, ...]:
    """Share of the step, by rank, in which it computed nothing: 1 - compute / makespan."""
    whole = makespan(events)
    busy = [0.0] * (1 + max(event.rank for event in events))
    for event in events:
        busy[event.rank] += event.seconds if event.kind == "compute" else 0.0
    return tuple(1.0 - seconds / whole for seconds in busy)


@dataclass
class _State:
    """Seconds: how far compute (`clock`) and gathers (`beside`) of each rank have come, and when things were there."""

    table: Table
    costs: Costs
    events: list[Event] = field(default_factory=list)
    done: dict[Action, float] = field(default_factory=dict)  # computed; a B counts as its I too
    posted: dict[Action, float] = field(default_factory=dict)
    arrived: dict[Action, float] = field(default_factory=dict)  # by receive
    whole: dict[int, float] = field(default_factory=dict)  # stage -> when its weights are
    lines: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = [0] * self.table.ranks
        self.clock = [0.0] * self.table.ranks
        self.beside = [0.0] * self.table.ranks

    def run(self, rank: int, action: Action) -> bool:
        """Takes the action if what it needs is known; False if its rank has to wait for another row first."""
        if action.kind in (*SENDS, *RECEIVES):
            self.posted[action] = self.clock[rank]
            if action.other in self.posted:
                self._transfer(action if action.kind in SENDS else action.other)
            return True
        if action.kind in (Kind.UNSHARD, Kind.REDUCE):
            begin = max(self.clock[rank], self.beside[rank])
            self.beside[rank] = begin + self.costs.seconds(action)
            if self.beside[rank] > begin:
                self.events.append(Event(rank, "comm.dp", "comm", str(action), begin, self.beside[rank]))
            if action.kind is Kind.UNSHARD:
                self.whole[action.stage] = self.beside[rank]
            return True
        return action.kind is Kind.RESHARD or self._compute(rank, action)

    def _compute(self, rank: int, action: Action) -> bool:
        receive = receive_of(action, self.table.stages - 1)
        ready = made = 0.0
        if receive is not None:
            source = receive.other.stage
            kind = Kind.FORWARD if action.kind is Kind.FORWARD else Kind.INPUT
            producer = Action(source, kind, action.micro_batch)
            if producer not in self.done:
                return False
            ready = made = self.done[producer]
            if self.table.placement[source] != rank:
                if receive not in self.arrived:
                    return False
                ready = self.arrived[receive]
        name = str(receive) if receive is not None and ready > self.clock[rank] else ""
        self.stand_still(rank, ready, made, name)
        self.stand_still(rank, self.whole.get(action.stage, 0.0), 0.0, f"{action.stage}UNSHARD")
        begin = self.clock[rank]
        self.clock[rank] = begin + self.costs.seconds(action)
        self.events.append(Event(rank, "compute", "compute", str(action), begin, self.clock[rank]))
        self.done[action] = self.clock[rank]
        if action.kind is Kind.BACKWARD:
            self.done[Action(action.stage, Kind.INPUT, action.micro_batch)] = self.clock[rank]
        return True

    def _transfer(self, send: Action) -> None:
        line = (self.table.placement[send.stage], self.table.placement[send.other.stage])
        begin = max(self.posted[send], self.posted[send.other], self.lines.get(line, 0.0))
        end = begin + self.costs.transfer
        self.arrived[send.other] = self.lines[line] = end
        if end > begin:
            self.events.append(Event(line[0], "comm.pp", "comm", str(send), begin, end, self.costs.nbytes))

    def stand_still(self, rank: int, until: float, made: float, name: str) -> None:
        """Moves the clock on: a bubble up to `made`, then a wait."""
        for kind, end in (("bubble", min(made, until)), ("wait", until)):
            if end > self.clock[rank]:
                self.events.append(Event(rank, "compute", kind, name, self.clock[rank], end))
                self.clock[rank] = end
