"""What a schedule found, as sentences: the accesses with file and line, the cause, and the seed that repeats it."""

from __future__ import annotations

import itertools
import linecache
from dataclasses import dataclass, field, replace

from interlace.check.fiber import Fiber, Poll, Seen, reached
from interlace.check.machine import Machine
from interlace.check.memory import Found, Region, Signal
from interlace.check.order import BLOCK, LANE, PROXY, Conflict
from interlace.check.place import shown

KINDS = (
    "data race",
    "wrong order",
    "wrong scope",
    "missing barrier",
    "missing proxy fence",
    "deadlock",
    "lost signal",
    "reused signal",
    "buffer reused",
    "out of bounds",
    "read of unwritten memory",
    "wrong result",
    "no exit",
    "error",
)


FAR = 1 << 40  # bytes beyond which an address is no offset from the nearest tensor


@dataclass(frozen=True)
class Step:
    """One event: what, by whom, in which line of which file."""

    what: str
    by: str
    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.what} by {self.by}\n      {shown(self.file)}:{self.line}: {text}"


@dataclass(frozen=True)
class Report:
    """A fault.  `kind` is one of KINDS, `steps` its events, of a race the earlier access first."""

    kind: str
    message: str
    steps: tuple[Step, ...] = ()
    ranks: int = 0
    seed: int = 0
    schedule: str = ""
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}", *(f"  {step}" for step in self.steps)]
        lines += [f"  {note}" for note in self.notes]
        lines.append(f"  {self.schedule}")
        return "\n".join(lines)


Cause = tuple[str, str, tuple[Step, ...]]  # kind, sentence, further steps


def explain(machine: Machine, found: Found) -> Report:
    """The report of what ended a schedule."""
    facts = found.facts
    if found.kind == "race":
        return _race(machine, **facts)
    if found.kind == "deadlock":
        return _deadlock(machine, facts["sleepers"])
    if found.kind == "no exit":
        return _no_exit(machine, facts["sleepers"], facts.get("message", ""))
    if found.kind == "out of bounds":
        return _outside(machine, **facts)
    if found.kind == "unwritten":
        return unwritten(machine)
    if found.kind == "no end":
        return _no_end(machine, facts["how_many"], facts["place"])
    return Report(found.kind, facts["message"], tuple(facts.get("steps", ())))


def step(machine: Machine, event: int, of: str = "") -> Step:
    fiber, what, file, line = machine.events[event]
    launch = f", launch {fiber.item.number}" if fiber.item is not None and fiber.item.number > 1 else ""
    return Step(f"{what}{f' of {of}' if of else ''}", f"{fiber}{launch}", file, line)


# --- races -----------------------------------------------------------------------------------------------------------


def _race(
    machine: Machine, region: Region, index: int, conflict: Conflict, event: int, write: bool, strength: int
) -> Report:
    name = region.element(region.begin + index * region.size)
    steps = (step(machine, conflict.event, name), step(machine, event, name))
    earlier, later = machine.events[conflict.event][0], machine.events[event][0]
    if conflict.scopes:
        return Report(
            "wrong scope",
            f"{earlier} and {later} use {name} by atomics whose scopes do not include each other; "
            'use scope="sys" for words that several ranks use.',
            steps,
        )
    if conflict.proxy:
        return Report(
            "missing proxy fence",
            f"{later} reads {name} by a descriptor after a wait, but nothing orders descriptor loads after the wait; "
            "call admit_descriptors() between them.",
            steps,
        )
    wiped = _wiped(steps, conflict, strength, write)
    if wiped:
        return Report("lost signal", f"{name}: {wiped}", steps)
    mixed = _mixed(steps, conflict, strength, write)
    if mixed:
        return Report("wrong order", f"{name}: {mixed}", steps)
    before = _write_before(region, index, conflict)
    fault, cause, more = _cause(machine, earlier, later, conflict, event, write, before)
    reader = earlier if not conflict.earlier_is_write else later
    notes = (*(_waited(machine, reader) if fault == "data race" else ()), *_wraps(machine))
    return Report(fault, f"{name}: {cause}", (*steps, *more), notes=notes)


def _waited(machine: Machine, fiber: Fiber) -> tuple[str, ...]:
    """What a fiber has waited for, in case it was for something else."""
    notes = []
    for address, seen in list(fiber.waits.items())[-4:]:
        region = machine.find(address)
        if region is not None and seen.learned and seen.signal.fiber is not fiber:
            signal, read = step(machine, seen.signal.event), step(machine, seen.read)
            notes.append(
                f"{fiber} has waited for {region.element(address)} (line {read.line}), signalled by {signal.by} "
                f"(line {signal.line})"
            )
    return tuple(notes)


def _wraps(machine: Machine) -> list[str]:
    """Who has taken a word that wrapped for a small one, or one that will for a large one; where words are to wrap."""
    notes = []
    for fiber in machine.fibers if any(host.origin for host in machine.hosts) else ():
        if fiber.wrapped is not None:
            value, want, (file, line) = fiber.wrapped
            notes.append(
                f"{fiber} compared {value} with {want} as numbers that do not wrap ({shown(file)}:{line}); compare "
                "their difference with 0, as wait_until does"
            )
    return notes[:2]


def _write_before(region: Region, index: int, conflict: Conflict) -> int:
    """The event of the last write of an element, before that which conflicts if it is one; -1 if there is none."""
    shadow = region.shadow
    return (shadow.befores if conflict.earlier_is_write else shadow.writes.event).item(index)


def _wiped(steps: tuple[Step, Step], conflict: Conflict, strength: int, write: bool) -> str:
    """A word that the host program writes while a signal may be on its way."""
    plain = steps[0] if not conflict.earlier_kind else steps[1]
    is_write = conflict.earlier_is_write if not conflict.earlier_kind else write
    if bool(conflict.earlier_kind) == bool(strength) or not plain.what.startswith(("torch", "copy")) or not is_write:
        return ""
    return (
        f"the write at line {plain.line} may wipe a signal, since nothing orders it before the signal; zero words "
        "before anybody is given them, as heap.signals() and heap.zeros() do."
    )


def _mixed(steps: tuple[Step, Step], conflict: Conflict, kind: int, write: bool) -> str:
    """A single word used by an atomic or a volatile load on one side and plainly on the other."""
    if bool(conflict.earlier_kind) == bool(kind) or (conflict.component % 3 != LANE and not conflict.earlier_kind):
        return ""
    plain, is_write = (steps[0], conflict.earlier_is_write) if kind else (steps[1], write)
    if plain.what.startswith(("torch", "copy", "volatile")):
        return ""
    if is_write:
        return (
            f"the plain store at line {plain.line} is no signal: nothing comes before it for who polls the word; use "
            'tl.atomic_xchg(..., sem="release", scope="sys") after tl.debug_barrier().'
        )
    return (
        f"the plain load at line {plain.line} is no wait: it may be hoisted, and orders nothing; poll with "
        'tl.atomic_add(word, 0, sem="acquire", scope="sys").'
    )


def _cause(
    machine: Machine, earlier: Fiber, later: Fiber, conflict: Conflict, event: int, write: bool, before: int
) -> Cause:
    """Kind, sentence and further steps of a race.  `before`: as `_write_before` says."""
    seen = later.seen.get(earlier.number)
    component = (conflict.component - earlier.knows.first) % 3
    if seen is not None and not seen.learned and seen.why:
        return _unlearned(machine, seen)
    if seen is not None and seen.learned:
        signal = step(machine, seen.signal.event)
        if conflict.event > seen.signal.event and earlier.kind == "program":
            return _signalled_early(machine, earlier, later, conflict, seen, write, before)
        fence = seen.signal.fence
        if fence is not None and conflict.event >= fence[0]:
            done = "written" if conflict.earlier_is_write else "read"
            return (
                "wrong order",
                f"the relaxed signal at line {signal.line} covers only what came before the fence at line "
                f'{fence[1][1]}, and the element is {done} after that; call fence() after it, or use sem="release".',
                (signal, step(machine, seen.read)),
            )
        if component == PROXY:
            return (
                "missing proxy fence",
                f"{earlier} signals before its descriptor store is complete: a descriptor store is published only by "
                "flush_descriptors() before the signal.",
                (signal,),
            )
        if component == BLOCK:
            return (
                "missing barrier",
                f"the release at line {signal.line} is one thread's and does not cover what the program's other "
                "threads did before; put tl.debug_barrier() between the access and the release.",
                (signal,),
            )
    reused = _reused(machine, earlier, later)
    if reused is not None:
        return reused
    if conflict.earlier_is_write and not write and _came_late(earlier, later):
        return _overwritten(earlier, later)
    told = None if conflict.earlier_is_write else earlier.seen.get(later.number)
    if told is not None and told.learned and _is_first(machine, earlier, later, told, before):
        more = (step(machine, told.signal.event), step(machine, told.read))
        return "wrong order", f"{later} signals before the element is written; signal after it.", more
    if not conflict.earlier_is_write and write and _is_reuse(machine, earlier, later):
        return (
            "buffer reused",
            f"{later} overwrites the element while {earlier} may still read it; let the reader signal that it has, "
            "or write to another buffer in turn.",
            (),
        )
    if not conflict.earlier_is_write:
        reason = f"{earlier} reads it without waiting for {later}, who writes it"
    elif write:
        reason = f"{earlier} and {later} both write it, and nothing orders them"
    else:
        reason = f"{later} reads it without waiting for {earlier}, who writes it"
    return "data race", f"{reason}; signal after the first access, and wait for that signal before the second.", ()


def _overwritten(writer: Fiber, reader: Fiber) -> Cause:
    return (
        "buffer reused",
        f"{reader} was told by rank {writer.rank} that the element is there, but {writer} has overwritten it "
        "while it may still be read; let the reader signal that it has, or write to another buffer in turn.",
        (),
    )


def _signalled_early(
    machine: Machine, earlier: Fiber, later: Fiber, conflict: Conflict, seen: Seen, write: bool, before: int
) -> Cause:
    """The access comes after the signal that the other has seen: the signal is too early, or was for another access."""
    signal = seen.signal.event
    more = (step(machine, signal), step(machine, seen.read))
    if conflict.earlier_is_write:
        if not write and 0 <= before < signal and machine.events[before][0] is earlier:
            return _overwritten(earlier, later)
        return "wrong order", f"{earlier} signals before the element is written; signal after it.", more
    _, _, *place = machine.events[conflict.event]
    if any(each is earlier and where == place for each, _, *where in machine.events[:signal]):
        return (
            "buffer reused",
            f"{later} overwrites the element while {earlier} may still read it: what it has waited for was signalled "
            "before the element is read; wait for a signal that comes after that, or write to another buffer in turn.",
            more,
        )
    return "wrong order", f"{earlier} signals before the element is read; signal after it.", more


def _unlearned(machine: Machine, seen: Seen) -> Cause:
    signal, wait = step(machine, seen.signal.event), step(machine, seen.read)
    if seen.why == "scope":
        return (
            "wrong scope",
            f'the signal at line {signal.line} and the wait at line {wait.line} lack scope="sys" on one side, so a '
            "rank learns nothing from it.",
            (signal, wait),
        )
    side, line, word = (
        ("signal", signal.line, "release") if seen.why == "relaxed signal" else ("wait", wait.line, "acquire")
    )
    return (
        "wrong order",
        f'the {side} at line {line} has no {word} order, so seeing it orders nothing; use sem="{word}".',
        (signal, wait),
    )


def _reused(machine: Machine, earlier: Fiber, later: Fiber) -> Cause | None:
    """Whether one of the two passed a wait on a signal of another launch or another operation than the other's."""
    for waiter, other in ((later, earlier), (earlier, later)):
        if other.item is None or (waiter.rank == other.rank and waiter.kind != "program"):
            continue
        for seen in waiter.waits.values():
            by = seen.signal.fiber
            if by.rank != other.rank or by.item is None or by is other or by.kind != "program":
                continue
            own = waiter.item.number if waiter.item is not None and waiter.label == by.label else other.item.number
            old = by.label == other.label and by.item.number < min(own, other.item.number)
            foreign = by.label != other.label and by.item is not other.item and waiter.label == other.label
            if old or foreign:
                whose = (
                    f"launch {by.item.number} of {by.label}, not of launch {other.item.number}"
                    if old
                    else f"{by.label}, not of {other.label}"
                )
                advice = (
                    "let the value grow with every launch, from a word in memory that kernels advance (next_epoch), "
                    "and compare with >="
                    if old
                    else "give every operation, stream and group its own words"
                )
                return (
                    "reused signal",
                    f"{waiter} passed its wait on a stale flag, the signal of {whose}; {advice}.",
                    (step(machine, seen.signal.event), step(machine, seen.read)),
                )
    return None


def _came_late(writer: Fiber, reader: Fiber) -> bool:
    """Whether the reader has waited for the writer's rank, and the writer is later work of that rank."""
    return any(
        seen.learned
        and seen.signal.fiber.rank == writer.rank
        and seen.signal.fiber.item is not writer.item
        and seen.signal.fiber.number < writer.number
        for seen in reader.seen.values()
    )


def _is_first(machine: Machine, reader: Fiber, writer: Fiber, told: Seen, before: int) -> bool:
    """Whether a write after a read is the first of this program since before it told the reader of one."""
    if writer.kind != "program" or reader.item is None or writer.item is None:
        return False
    if (reader.label, reader.item.number) != (writer.label, writer.item.number):
        return False
    return not 0 <= before < told.signal.event or machine.events[before][0] is not writer


def _is_reuse(machine: Machine, reader: Fiber, writer: Fiber) -> bool:
    """A write after a read of what was there before: reuse, unless the reader should have had this very write."""
    if reader.item is None or writer.item is None:
        return True
    if reader.label == writer.label:
        if reader.item.number != writer.item.number:
            return reader.item.number < writer.item.number
        return bool(reader.seen.get(writer.number))
    return bool(reader.seen) or reader.item.number < writer.item.number


# --- waits that do not end -------------------------------------------------------------------------------------------


def _waiting(machine: Machine, fiber: Fiber) -> tuple[list[Step], list[str]]:
    steps, notes = [], []
    for poll in [each for each in fiber.polls if not each.is_met(each.value)][-2:] or fiber.polls[-2:]:
        name = poll.region.element(poll.address)
        steps.append(step(machine, poll.event, f"{name}, found {poll.value}{_wanted(poll)}"))
        notes.append(_who(machine, fiber, poll.address, name))
    return steps, notes


def _wanted(poll: Poll) -> str:
    if not poll.wanted:
        return ""
    how, want = poll.wanted
    if how in ("==", "!="):  # whichever way the loop asks, what it found is not what ends it
        return f", wanted {'other than ' if poll.value == want else ''}{want}"
    if how in (">", ">=") and poll.is_met(poll.value):  # `while word > want`
        return f", wanted at most {want - (how == '>=')}"
    return f", wanted at least {want + (how in ('<=', '>'))}"


def _who(machine: Machine, fiber: Fiber, address: int, name: str) -> str:
    """Who has written a word, and who still could."""
    word = machine.words.get(address)
    wrote = [
        f"{each.fiber} ({each.before} to {each.after}, {shown(step(machine, each.event).file)}:"
        f"{step(machine, each.event).line})"
        for each in (word.history[-3:] if word is not None else [])
    ]
    done = f"{name} was written by {', '.join(wrote)}" if wrote else f"{name} was never signalled"
    others = [
        str(each) for each in machine.fibers if machine.unfinished(each) and each is not fiber and each.kind != "host"
    ]
    left = f"unfinished and able to: {', '.join(others[:6])}" if others else "nobody is left who could"
    return f"{done}; {left}"


def _absent(machine: Machine) -> list[str]:
    """Programs that found no room."""
    return [
        f"rank {item.rank} {item.label} program {program}"
        for streams in machine.streams
        for stream in streams.values()
        for item in list(stream.items)[:1]
        if item.launch is not None and item.begun
        for program in item.pending
    ]


def _lost(machine: Machine, sleepers: list[Fiber]) -> Report | None:
    for fiber in sleepers:
        for poll in fiber.polls:
            word = machine.words.get(poll.address)
            if word is None or poll.wanted is None:
                continue
            name = poll.region.element(poll.address)
            passed = machine.passed.get((fiber.rank, fiber.label, fiber.program, poll.address), -1)
            pairs = [pair for pair in itertools.pairwise(word.history) if pair[1].event > passed]
            for old, new in pairs:
                if old.event > passed and poll.is_met(old.after) and not poll.is_met(new.after):
                    is_past = reached(new.after, old.after, "<=", poll.bits)
                    why = f"goes past the {old.after} it waits for" if is_past else "undoes the signal it waits for"
                    return _lost_report(machine, fiber, name, old, new, poll, why)
            for old, new in pairs:
                if old.fiber is new.fiber or new.operation == "add" or poll.is_met(new.after):
                    continue
                if new.before == new.after:
                    return _lost_report(machine, fiber, name, old, new, poll, "sets what an earlier signal has set")
                is_back = reached(new.before, new.after, "<=", poll.bits)
                has_taken = old.event <= passed and _same_program(new.fiber, fiber)  # what it had waited for
                if (is_back or not old.seen) and not has_taken:
                    return _lost_report(machine, fiber, name, old, new, poll, "replaces an earlier signal")
    return None


def _same_program(one: Fiber, other: Fiber) -> bool:
    """Of one launch or of several."""
    return (one.rank, one.label, one.program) == (other.rank, other.label, other.program)


def _replaced(machine: Machine, sleepers: list[Fiber]) -> list[str]:
    """Words that nobody waits for now, as counters, whose last signal nobody had read before it was set back."""
    notes = []
    waited = {poll.address for fiber in sleepers for poll in fiber.polls}
    for address, word in machine.words.items():
        region = machine.find(address)
        if region is None or address in waited:
            continue
        for old, new in itertools.pairwise(word.history):
            is_back = new.operation != "add" and not reached(new.after, old.after, "<", 8 * region.size)
            if is_back and not old.seen and old.fiber is not new.fiber:
                first, second = step(machine, old.event), step(machine, new.event)
                notes.append(
                    f"{region.element(address)}: the write at line {second.line} ({new.before} to {new.after}) "
                    f"replaces the signal of line {first.line} ({old.before} to {old.after}), which nobody has read"
                )
    return notes[-2:]


def _lost_report(machine: Machine, fiber: Fiber, name: str, old: Signal, new: Signal, poll: Poll, why: str) -> Report:
    steps = (step(machine, old.event, name), step(machine, new.event, name), step(machine, poll.event, name))
    return Report(
        "lost signal",
        f"{fiber} waits for {name} for ever: the write at line {steps[1].line} ({new.before} to {new.after}) {why} "
        f"(line {steps[0].line}, {old.before} to {old.after}); give every signaller a word of its own, or count with "
        "atomic_add, and zero words before anybody may signal.",
        steps,
    )


def _deadlock(machine: Machine, sleepers: list[Fiber]) -> Report:
    lost = _lost(machine, sleepers)
    if lost is not None:
        return lost
    if machine.unwritten and any(
        poll.region is region for fiber in sleepers for poll in fiber.polls for _, _, region, _ in machine.unwritten
    ):
        return unwritten(machine)
    steps: list[Step] = []
    notes: list[str] = []
    for fiber in sleepers[:8]:
        more, who = _waiting(machine, fiber)
        steps += more
        notes += who
    notes += [*_replaced(machine, sleepers), *_wraps(machine)]
    hosts = [fiber for fiber in machine.fibers if fiber.kind == "host" and fiber.blocked]
    notes += [f"{fiber} stands at {fiber.blocked}" for fiber in hosts]
    absent = _absent(machine)
    if absent:
        cause = (
            f"{len(absent)} programs are not resident and those that are wait: with {machine.resident} programs of a "
            "rank at once the launch cannot end; launch no more programs than are resident, producers first."
        )
        notes.append(f"not resident: {', '.join(absent[:8])}{' ...' if len(absent) > 8 else ''}")
    elif sleepers:
        cause = f"{', '.join(str(fiber) for fiber in sleepers[:4])} wait for signals that nobody will send."
    else:
        ended = [str(fiber) for fiber in machine.fibers if fiber.kind == "host" and fiber.run.dead]
        cause = f"host programs wait for each other, and {', '.join(ended) or 'nobody'} has already ended; every rank "
        cause += "must make the same collective calls of the heap."
    return Report("deadlock", cause, tuple(steps), notes=tuple(notes))


def _no_end(machine: Machine, how_many: str, place: tuple[str, int]) -> Report:
    fiber = machine.current
    steps = () if fiber is None else (Step("still running", str(fiber), *place),)
    return Report(
        "deadlock", f"{how_many} and no end: a loop that nothing ends; let it wait for a word, or bound it.", steps
    )


def _no_exit(machine: Machine, sleepers: list[Fiber], message: str) -> Report:
    if message:
        return Report("no exit", message)
    steps = [each for fiber in sleepers[:8] for each in _waiting(machine, fiber)[0]]
    who = ", ".join(str(fiber) for fiber in sleepers[:4])
    return Report(
        "no exit",
        f"rank {machine.dead} stopped in {machine.died_at}, and {who} never leave their wait, whatever time passes; "
        "use wait_until, or bound the loop and look at an abort word.",
        tuple(steps),
    )


# --- single accesses -------------------------------------------------------------------------------------------------


def _outside(machine: Machine, address: int, write: bool, place: tuple[str, int]) -> Report:
    """place: file and line of the access; by now the program has ended."""
    fiber = machine.current
    assert fiber is not None
    event = machine.event(fiber, "store" if write else "access")
    file, line = place
    grave = next((each for each in machine.graves if each.begin <= address < each.end), None)
    below = [region for region in machine.regions if region.end <= address and not region.quiet]
    above = [region for region in machine.regions if region.begin > address]
    if grave is not None:
        where = f"{grave.element(address)}, which was freed"
    elif not any(each.begin - FAR < address < each.end + FAR for each in (*below[-1:], *above[:1])):
        where = (
            f"address {address:#x}, far from every tensor, as after arithmetic on an empty tensor or a wrong pointer"
        )
    elif below and (not above or address - below[-1].end <= above[0].begin - address):
        region = below[-1]
        size = (region.end - region.begin) // region.size
        where = f"{region.element(address)}, behind the end of its {size} elements"
        if region.constant:
            where += ", so that its peer is no rank from 0 to world - 1"
    elif above:
        where = f"{above[0].begin - address} bytes before rank {above[0].rank} {above[0].name}[0]"
    else:
        where = f"address {address:#x}, where there is nothing"
    return Report(
        "out of bounds",
        f"{fiber} {'writes' if write else 'reads'} {where}; mask the access or correct the offset.",
        (replace(step(machine, event), file=file, line=line) if line else step(machine, event),),
    )


def unwritten(machine: Machine) -> Report:
    fiber, event, region, index = machine.unwritten[0]
    name = region.element(region.begin + index * region.size)
    return Report(
        "read of unwritten memory",
        f"{fiber} reads {name}, which nobody has written; write it first, or allocate it with zeros() or signals().",
        (step(machine, event, name),),
    )
