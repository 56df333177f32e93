"""Actions, and the table of them that a pipeline runs: one row for each rank.

    0F3        stage 0 computes micro-batch 3 forward
    1B2        backward, whole; or in two parts:
    1I2 1W2    the gradient of its input, and of its weights
    0SEND_F3   stage 0 sends its output;  1RECV_F3  stage 1 takes it as its input
    1SEND_B3   stage 1 sends the gradient of its input;  0RECV_B3  stage 0 takes it
    2UNSHARD   the stage's weights become whole;  2RESHARD  only the rank's shard stays
    2REDUCE    its gradients are summed over data ranks;  2REDUCE3  those of micro-batch 3 alone

Stages are numbered in the order in which a micro-batch passes them; `placement` says which rank holds which.  A
table of F, B, I, W alone is what generators and files give; `lower` adds the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from interlace.errors import PlanError


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
ZERO = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)
SHOWN = 40  # characters of what is no action
_FORM = re.compile(r"([0-9]{1,6})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE)([0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does; `micro_batch` is None for those that concern none."""

    stage: int
    kind: Kind
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`; PlanError for anything else."""
        match = _FORM.fullmatch(text)
        kind = Kind(match[2]) if match else None
        counted = match is not None and match[3] is not None
        if match is None or kind is None or (not counted and kind not in ZERO) or (counted and kind in ZERO[:2]):
            shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
            apart = ", and commas between actions" if re.search(r"\d[;|\s]+\d", text) else ""
            raise PlanError(
                f'"{shown}" is no action: write stage, kind and micro-batch, as in 0F3, 1B2, 1I2, 1W2 or '
                f"0SEND_F3{apart}"
            )
        return cls(int(match[1]), kind, int(match[3]) if counted else None)

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def other(self) -> Action:
        """The receive that belongs to a send, and the send that belongs to a receive."""
        kind, step = _PAIRS[self.kind]
        return Action(self.stage + step, kind, self.micro_batch)


_PAIRS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


@dataclass(frozen=True)
class Source:
    """Where a table stands in its file: the line of every rank, and (line, column) of every action, as often as it is
    there.  A column is the number of the cell."""

    lines: tuple[int, ...]
    cells: Mapping[Action, Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Table:
    """`rows[rank]`: its actions in order; `placement[stage]`: its rank; `where`: name or file, and `source`: places in
    it, for messages."""

    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    micro_batches: int
    where: str = field(default="table", compare=False)
    source: Source | None = field(default=None, compare=False, repr=False)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, place in enumerate(self.placement) if place == rank)

    @property
    def is_lowered(self) -> bool:
        """Whether the table holds more than compute."""
        return any(not action.is_compute for row in self.rows for action in row)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind is Kind.WEIGHT for row in self.rows for action in row)

    def at(self, rank: int, action: Action | None = None, number: int = 0) -> str:
        """The table's name, with the place of an action of `rank` (or of its line) where the table is a file's.

        number: which of several times that the action is there.
        """
        if self.source is None:
            return self.where
        place = self.cell(action, number) if action is not None else ""
        return f"{self.where}, {place or f'line {self.source.lines[rank]}'}"

    def cell(self, action: Action, number: int = 0) -> str:
        """Line and column of an action in words; "" where it is in no file."""
        found = self.source.cells.get(action, ()) if self.source is not None else ()
        return "line {}, column {}".format(*found[number]) if number < len(found) else ""

    def first(self, micro_batches: int) -> Table:
        """The table of the first micro-batches alone: still valid, since no micro-batch needs another.

        Errors: PlanError if it has fewer.
        """
        if micro_batches > self.micro_batches:
            raise PlanError(
                f"{self.where} has {self.micro_batches} micro-batches, found {micro_batches} to run: give it more, or "
                f"use micro_batches={self.micro_batches}"
            )
        rows = tuple(
            tuple(action for action in row if action.micro_batch is None or action.micro_batch < micro_batches)
            for row in self.rows
        )
        return Table(rows, self.placement, micro_batches, self.where, self.source)

    def __str__(self) -> str:
        """One line a rank, actions apart by spaces."""
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows))

    def to_csv(self) -> str:
        """One line a rank, one cell an action; `read_csv` reads it."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def folded(ranks: int) -> tuple[int, ...]:
    """A V: stages 0 .. p-1 down the ranks, p .. 2p-1 up again, so that first and last share a rank."""
    return (*range(ranks), *reversed(range(ranks)))


def read_csv(path: str | Path) -> Table:
    """The table of a file: a line a rank, a cell an action, empty cells idle, lines that begin with # notes.

    Errors: PlanError with line and column (the number of the cell) of what is no action or stands on two ranks.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} must be UTF-8 text, found byte {error.object[error.start]:#x}") from None
    except OSError as error:
        raise PlanError(f"cannot read the schedule {path}: {(error.strerror or str(error)).lower()}") from None
    return parse_csv(text, str(path))


@functools.lru_cache(maxsize=16)
def parse_csv(text: str, where: str = "schedule") -> Table:
    """`read_csv` from the text; `where` names it in errors."""
    rows: list[tuple[Action, ...]] = []
    homes: dict[int, tuple[int, str]] = {}  # stage -> rank, where it was first seen
    lines: list[int] = []
    places: dict[Action, list[tuple[int, int]]] = {}
    for number, cells in _lines(text):
        row = []
        lines.append(number)
        for column, cell in enumerate(cells, 1):
            at = f"line {number}, column {column}"
            if not cell:
                continue
            try:
                action = Action.parse(cell)
            except PlanError as error:
                raise PlanError(f"{where}, {at}: {error}") from None
            rank, first = homes.setdefault(action.stage, (len(rows), at))
            if rank != len(rows):
                raise PlanError(
                    f"{where}, {at}: stage {action.stage} is on rank {rank} ({first}) and on rank {len(rows)}; keep "
                    "each stage on one line"
                )
            row.append(action)
            places.setdefault(action, []).append((number, column))
        rows.append(tuple(row))
    if not homes:
        raise PlanError(f"{where} holds no action; write a line for each rank, as in 0F0,0B0")
    missing = next((stage for stage in range(max(homes)) if stage not in homes), None)
    if missing is not None:
        raise PlanError(f"{where} has stage {max(homes)} but no stage {missing}; number stages from 0 without a gap")
    counts = [a.micro_batch for row in rows for a in row if a.micro_batch is not None]
    placement = tuple(homes[stage][0] for stage in range(len(homes)))
    return Table(tuple(rows), placement, max(counts, default=-1) + 1, where, Source(tuple(lines), places))


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of the lines that are a rank: notes and blank lines at the end are none."""
    lines = text.splitlines()
    while lines and not lines[-1].strip(", \t"):
        lines.pop()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("#"):
            yield number, [cell.strip(' \t"') for cell in line.split(",")]


def table(
    rows: Sequence[Iterable[Action]], placement: Sequence[int], micro_batches: int, where: str = "table"
) -> Table:
    """A table of rows that may still be lists."""
    return Table(tuple(tuple(row) for row in rows), tuple(placement), micro_batches, where)
