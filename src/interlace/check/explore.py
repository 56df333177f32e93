"""Runs one launch under many schedules and says what it found, and what it cannot see.

    verdict = explore(launch, ranks=(2, 3, 4), schedules=1000, seed=0)
    assert verdict.ok, verdict

`launch(heap)` is a rank's host program: it allocates from the heap it is given (`interlace.symmetric`), enqueues
kernels, copies and flags, and may return a function that raises AssertionError where the result is wrong.  The same
function runs between processes and on GPUs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import math
import os
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton

from interlace.check.fiber import Strategy
from interlace.check.host import Host, Operations
from interlace.check.machine import Grow, Machine
from interlace.check.memory import Found
from interlace.check.place import DEVICE, OWN
from interlace.check.report import Report, Step, explain
from interlace.check.schedules import NAMES, exhaustive, seeded
from interlace.errors import ConfigError, Hang, InterlaceError, nearest
from interlace.symmetric import heap as heap_module
from interlace.symmetric import recorded, shortcuts
from interlace.symmetric.fabric import Fabric
from interlace.symmetric.heap import SymmetricHeap
from interlace.symmetric.interpreter import watched
from interlace.symmetric.record import HEAD, Record

Launch = Callable[[SymmetricHeap], Callable[[], object] | None]
NEAR_WRAP = (1 << 31) - 2  # int32 words that begin here wrap after two signals

LIBRARY = sysconfig.get_path("stdlib") + os.sep  # Python's own; installed packages may lie below it
TRITON = os.path.join(os.path.dirname(triton.__file__), "")  # asserts what a kernel asks of the language
TORCH_CUDA = os.path.join(os.path.dirname(torch.__file__), "cuda", "")  # asserts that there is a GPU
GIVEN = (
    DEVICE,
    shortcuts.__file__,
    recorded.__file__,
)  # fail by what they are given: a primitive's arguments, a kernel's operands

LIMITS = (
    "not seen: faults of the compiler and the hardware; multimem, network cards and PCIe order; timing; two threads of "
    "one program (barriers inside it are taken as the only order between a block and a release); memory that torch "
    "functions reach through numpy; protocols that race on purpose are reported. Schedules not run may hold other "
    "faults: no report is no proof."
)


@dataclass(frozen=True)
class Verdict:
    """What was explored and what was found."""

    name: str
    ranks: tuple[int, ...]
    schedules: int
    events: int
    seconds: float
    reports: tuple[Report, ...]
    residency: tuple[str, ...] = ()
    explored: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reports

    def __str__(self) -> str:
        ranks = ", ".join(str(size) for size in self.ranks)
        head = f"{self.name}: {len(self.reports)} reports in {self.schedules} schedules of {ranks} ranks"
        rate = f"{self.events} memory events, {self.events / max(self.seconds, 1e-9):.0f} a second of one core"
        lines = [f"{head}; {rate}", *(str(report) for report in self.reports), *self.residency]
        return "\n".join([*lines, f"explored: {'; '.join(self.explored)}", LIMITS])


@dataclass
class _Run:
    """One schedule's settings."""

    ranks: int
    strategy: Strategy
    seed: int
    label: str
    resident: int | None = None
    origin: int = 0
    stop: tuple[int, int] | None = None
    exhaustive: bool = False


@dataclass
class Explorer:
    """Runs schedules of one launch; keeps what they share."""

    launch: Launch
    replays: int = 0
    barriers: bool = True
    nbytes: int = 1 << 20
    timeout: float = 10.0
    capacity: int = 3 * 64
    events: int = 0
    schedules: int = 0
    largest: int = 0  # programs of one rank in one kernel
    memory: torch.Tensor | None = None
    told: _Told = field(default_factory=lambda: _Told())

    @contextlib.contextmanager
    def open(self) -> Iterator[Explorer]:
        """Kernels and torch operations inside go to the schedule that runs."""
        with warnings.catch_warnings(), watched(self.told), _given_heaps(), _frozen():
            warnings.simplefilter("ignore")
            yield self

    def again(self, settings: _Run) -> str:
        """The options that run a schedule again."""
        words: list[object] = ["--exhaustive", "--schedules", settings.seed + 1]
        if not settings.exhaustive:
            words = ["--ranks", settings.ranks, "--seed", settings.seed, "--schedules", 1]
        words += [] if settings.resident is None else ["--resident", settings.resident]
        words += ["--replays", self.replays] if self.replays else []
        words += ["--stop"] if settings.stop else []
        words += [] if self.barriers else ["--loose"]
        return " ".join(str(word) for word in words)

    def run(self, settings: _Run) -> Report | None:
        """One schedule; None if nothing was found."""
        self.schedules += 1
        while True:
            torch.default_generator.manual_seed(0)
            np.random.seed(0)
            before = self.events
            try:
                return self._once(settings)
            except Grow:
                self.capacity *= 2
                self.events = before

    def _once(self, settings: _Run) -> Report | None:
        size = settings.ranks
        arenas = self._arenas(size)
        machine = Machine(
            size, settings.strategy, arenas, self.capacity, settings.resident, settings.stop, self.barriers,
            Operations(self.told.operation),
        )  # fmt: skip
        hosts = machine.hosts = [Host(machine, rank, settings.origin) for rank in range(size)]
        checks: dict[int, Callable[[], object]] = {}
        heaps: dict[int, SymmetricHeap] = {}
        nothing = np.zeros(self.capacity, np.int32)
        self.told.point(machine)
        try:
            for host in hosts:
                body = self._body(host, checks, heaps)
                host.fiber = machine.start(host.rank, "host", "host", body, nothing)
            machine.run()
            self._after(machine, heaps, checks)
        except Found as found:
            return self._say(machine, explain(machine, found), settings)
        finally:
            self.events += len(machine.events)
            launches = [item for fiber in machine.fibers if (item := fiber.item) is not None]
            self.largest = max([self.largest, *(len(item.bodies) for item in launches if item.launch)])
            machine.close()
        return None

    def _arenas(self, size: int) -> list[torch.Tensor]:
        """One allocation for all schedules; the heap poisons every tensor that it hands out."""
        if self.memory is None or self.memory.numel() < size * self.nbytes + 4096:
            self.memory = torch.empty(size * self.nbytes + 4096, dtype=torch.uint8)
        skip = -self.memory.data_ptr() % 4096
        return list(self.memory[skip : skip + size * self.nbytes].split(self.nbytes))

    def _body(self, host: Host, checks: dict[int, Any], heaps: dict[int, SymmetricHeap]) -> Callable[[], None]:
        def body() -> None:
            try:
                heap = heaps[host.rank] = SymmetricHeap(self.nbytes, timeout=self.timeout, fabric=host)
                check = self.launch(heap)
                for _ in range(self.replays):
                    for enqueue in list(host.recorded):
                        enqueue()
                if check is not None:
                    checks[host.rank] = _checked(check, getattr(self.launch, "__name__", "launch"))
            except Hang:
                if host.machine.dead is None:
                    raise

        return body

    def _after(self, machine: Machine, heaps: dict[int, SymmetricHeap], checks: dict[int, Any]) -> None:
        """What is judged when all has ended: records, memory nobody wrote, results."""
        records = {
            rank: record
            for rank in heaps
            if (record := Record.read(rank, bytes(machine.arenas[rank][:HEAD].tolist()))) is not None
        }
        if machine.dead is not None:
            for rank, record in records.items():
                others = records.keys() - {rank}  # who waits may itself be waited for
                if rank != machine.dead and record.peer != machine.dead and record.peer not in others:
                    raise Found(
                        "no exit",
                        sleepers=[],
                        message=f"rank {machine.dead} stopped, but rank {rank} names rank {record.peer}.",
                    )
            return
        if machine.unwritten:
            raise Found("unwritten")
        for rank, record in records.items():
            raise Found("error", message=record.sentence(heaps[rank].name_of(record.flag)))
        for rank, check in sorted(checks.items()):
            try:
                verdict = check()
            except AssertionError as error:
                text = " ".join(str(error).split())[:300].rstrip(".")
                raise Found("wrong result", message=f"rank {rank}: {text or 'its check failed'}.") from None
            if verdict is not None and not np.all(np.asarray(verdict)):  # False, also of torch or NumPy
                raise Found("wrong result", message=f"rank {rank}: its check returned {verdict}.")

    def _say(self, machine: Machine, report: Report, settings: _Run) -> Report:
        schedule = f"found by {settings.label}, event {len(machine.events)}; again with {self.again(settings)}"
        return replace(report, ranks=settings.ranks, seed=settings.seed, schedule=schedule)


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Inside, garbage is looked for only among what has come since: a look at all modules took a tenth of the time."""
    if gc.get_freeze_count():  # somebody's own
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _given_heaps() -> Iterator[None]:
    """Inside, a launch makes no heap of its own: that would be a world of one, in which everything seems right."""

    def refuse(nbytes: int, group: object, device: object) -> Fabric:
        raise ConfigError("launch(heap) made a SymmetricHeap of its own, which has one rank here; use the heap given.")

    before, heap_module._fabric = heap_module._fabric, refuse
    try:
        yield
    finally:
        heap_module._fabric = before


def _checked(check: Any, called: str) -> Callable[[], object]:
    """What a launch returned, a function of nothing."""
    try:
        inspect.signature(check).bind()
    except TypeError:
        what = f"the function {check.__name__} that takes arguments" if inspect.isfunction(check) else repr(check)[:80]
        raise ConfigError(
            f"{called} returned {what}; return a function without arguments that checks the result, or None."
        ) from None
    except ValueError:  # a callable that tells no signature
        pass
    return check


class _Told:
    """Passes what the interpreter and torch tell on to the machine that runs, launches to their rank."""

    def point(self, machine: Machine) -> None:
        self._machine = machine
        self.access, self.atomic, self.barrier = machine.access, machine.atomic, machine.barrier
        self.ptx, self.compared = machine.ptx, machine.compared

    def launch(self, kernel: Any) -> None:
        fiber = self._machine.current
        assert fiber is not None
        self._machine.hosts[fiber.rank].launch(kernel)

    def called(self, name: str) -> None:
        fiber = self._machine.current
        if fiber is not None and fiber.kind == "host":
            raise ConfigError(f"{name}(...) has no grid, so it launches nothing; write {name}[(programs,)](...).")

    def operation(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        fiber = self._machine.current
        if fiber is None:  # it is being ended
            return function(*args, **kwargs)
        return self._machine.hosts[fiber.rank].operation(name, function, args, kwargs)


def explore(
    launch: Launch,
    *,
    ranks: int | Sequence[int] = (2, 3, 4),
    schedules: int = 1000,
    seed: int = 0,
    resident: int | None = None,
    replays: int = 0,
    stop: bool = False,
    barriers: bool = True,
    nbytes: int = 1 << 20,
    most: int = 1,
    seconds: float = math.inf,
    residency: bool = True,
    name: str = "",
) -> Verdict:
    """Runs `launch` on each number of ranks under `schedules` schedules, seeds `seed`, `seed + 1`, ...

    A seed alone decides a schedule, so that calls over ranges of seeds explore what one call over all of them would.

    Args:
        resident: programs of a rank that run at once, at most; None: all of a launch.  Without it the verdict also
            says how few suffice, unless `residency` is False.
        replays: enqueues again, so many times, what each rank has enqueued since its last collective, with the same
            scalars, as a CUDA graph's replays do.
        stop: in every schedule one rank stops at some event, and every wait of the others must end.
        barriers: False takes a release as covering the whole program, with no `tl.debug_barrier` before it.
        most: reports after which exploring ends.
        seconds: of the wall's clock, after which no schedule begins.
    """
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not sizes or min(sizes) < 1 or schedules < 1 or (resident is not None and resident < 1):
        raise ConfigError(f"ranks {sizes}, schedules {schedules}, resident {resident}: all must be at least 1.")
    explorer = Explorer(launch, replays, barriers, nbytes)
    found: list[Report] = []
    begin, ends = time.process_time(), time.monotonic() + seconds
    notes: list[str] = []
    late = False
    with explorer.open():
        for size in sizes:
            for settings in _settings(explorer, size, schedules, seed, resident, stop):
                late = time.monotonic() >= ends
                if late:
                    break
                report = _guarded(explorer, settings)
                if report is not None and (report.kind, report.steps) not in [(r.kind, r.steps) for r in found]:
                    found.append(report)
                if len(found) >= most:
                    break
            if late or len(found) >= most:
                break
            if residency and resident is None and not stop and not found:
                notes += _residency(explorer, size, schedules, seed)
    explored = [
        *_seeds(range(seed, seed + schedules)),
        f"{resident or 'all'} programs of a rank at once",
        *([f"{replays} replays with the same scalars"] if replays else []),
        *(["one rank stops, after which only the ends of waits are judged"] if stop else []),
        *([] if barriers else ["a release taken as covering the whole program"]),
        *([f"not all of these: {seconds:g} seconds were over"] if late else []),
        *(["not all of these: a report ended it"] if len(found) >= most else []),
    ]
    spent = time.process_time() - begin
    called = name or getattr(launch, "__name__", "launch")
    if not found and not late:
        _refuse_nothing(explorer, called)
    return Verdict(
        called, sizes, explorer.schedules, explorer.events, spent, tuple(found), tuple(notes), tuple(explored)
    )


def _seeds(seeds: range) -> list[str]:
    """What schedules of these seeds are: ways to choose, and where signals begin."""
    names = dict.fromkeys(NAMES[number % len(NAMES)] for number in sorted(seeds[:5], key=lambda n: n % len(NAMES)))
    origins = [text for near, text in ((False, "0"), (True, "just below the wrap of 32 bits"))
               if any(_is_near_wrap(number) is near for number in seeds[:7])]  # fmt: skip
    which = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return [f"{which} as {', '.join(names)}", f"signals from {' and from '.join(origins)}"]


def _is_near_wrap(seed: int) -> bool:
    return seed % 7 == 3


def _refuse_nothing(explorer: Explorer, called: str) -> None:
    """No report of nothing would read as a proof."""
    if not explorer.events:
        raise ConfigError(
            f"{called} touched no memory in {explorer.schedules} schedules, so nothing was checked; launch the kernel "
            "inside it, as in kernel[(1,)](...), on every rank."
        )


def _settings(
    explorer: Explorer, size: int, schedules: int, seed: int, resident: int | None, stop: bool
) -> Iterator[_Run]:
    length = 0
    for number in range(seed, seed + schedules):
        strategy = seeded(number, size)
        origin = NEAR_WRAP if _is_near_wrap(number) else 0
        kind = NAMES[number % len(NAMES)]
        settings = _Run(size, strategy, number, f"seed {number} ({kind})", resident, origin)
        if stop:
            length = length or _length(explorer, size, resident)
            settings.stop = (strategy.rng.randrange(size), strategy.rng.randrange(1, max(2, length)))
        yield settings


def _length(explorer: Explorer, size: int, resident: int | None) -> int:
    """Events of the first of all schedules, in which nobody stops."""
    before = explorer.events
    _guarded(explorer, _Run(size, seeded(0, size), 0, "", resident))
    return explorer.events - before


def _guarded(explorer: Explorer, settings: _Run) -> Report | None:
    """A failure of the user's program is a report too; one of ours is raised."""
    try:
        return explorer.run(settings)
    except (Exception, SystemExit) as error:
        trace, steps = error.__traceback__, []
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            steps.append(Step("raised", "the program", file, trace.tb_lineno))
            trace = trace.tb_next
        known = isinstance(error, InterlaceError | AssertionError)
        mine = [each for each in steps if not each.file.startswith(OWN) and not _is_library(each.file)]
        last = steps[-1].file
        if not known and (not mine or (last.startswith(OWN[:2]) and last not in GIVEN)):
            raise
        compared = isinstance(error, AssertionError) and not last.startswith((TORCH_CUDA, TRITON))
        kind = "wrong result" if compared else "error"
        text = " ".join(str(error).split())[:300]
        name = type(error).__name__
        made = Report(kind, (text if known else f"{name}: {text}") if text else name, tuple(mine[-1:]))
        again = f"found by {settings.label}; again with {explorer.again(settings)}"
        return replace(made, ranks=settings.ranks, seed=settings.seed, schedule=again)


def _is_library(file: str) -> bool:
    return file.startswith((LIBRARY, "<")) and "-packages" not in file.removeprefix(LIBRARY)


def _residency(explorer: Explorer, size: int, schedules: int, seed: int) -> list[str]:
    """How few programs at once suffice, tried with a few schedules each."""
    for few in range(1, explorer.largest):
        tries = range(seed, seed + max(4, min(10, schedules // 20)))
        strategies = [seeded(number, size) for number in tries]
        strategies[0].blocks = "in order"
        if not any(
            explorer.run(_Run(size, each, number, f"seed {number}", few))
            for number, each in zip(tries, strategies, strict=True)
        ):
            text = f"{size} ranks: no report in {len(tries)} schedules with {few} of {explorer.largest} programs"
            return [f"{text} of a rank at once"]
    if explorer.largest > 1:
        needs = explorer.largest
        return [
            f"{size} ranks: needs all {needs} programs of a rank at once if these begin in any order; launch no more "
            "than the device holds"
        ]
    return []


def explore_all(
    launch: Launch, *, most_schedules: int = 2000, preemptions: int = 2, barriers: bool = True, name: str = ""
) -> Verdict:
    """All schedules of 2 ranks with at most so many preemptions, up to a number; for launches of 2 x 2 programs."""
    explorer = Explorer(launch, barriers=barriers)
    begin = time.process_time()
    found: list[Report] = []
    whole = True
    with explorer.open():
        for number, strategy in enumerate(exhaustive(preemptions)):
            if number >= most_schedules:
                whole = False
                break
            label = f"schedule {number} of the exhaustive search"
            report = _guarded(explorer, _Run(2, strategy, number, label, exhaustive=True))
            if report is not None:
                found.append(report)
                break
    if not found:
        _refuse_nothing(explorer, getattr(launch, "__name__", "launch"))
    what = f"{'all' if whole and not found else 'the first'} schedules with at most {preemptions} preemptions"
    what += "; signals from 0" + ("" if barriers else "; a release taken as covering the whole program")
    called, spent = name or getattr(launch, "__name__", "launch"), time.process_time() - begin
    return Verdict(called, (2,), explorer.schedules, explorer.events, spent, tuple(found), (), (what,))


def load(target: str) -> tuple[Launch, str]:
    """The function "FILE.py:NAME" names, and a name for messages.  The file is imported with its folder on the path."""
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise ConfigError(f'"{target}" names no function; write FILE.py:LAUNCH, as in kernel.py:launch.')
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such file; write FILE.py:LAUNCH with a file that is there.")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {path} raised {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = nearest(name, known)
        hint = f'did you mean "{close}"?' if close else "give a function launch(heap)."
        raise ConfigError(f"{path} has no function {name}; {hint}")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ConfigError(f"{name} of {path} cannot be called with a heap ({error}); write def {name}(heap).") from None
    except ValueError:  # a callable that tells no signature
        pass
    return found, f"{os.path.basename(path)}:{name}"


def numbers(text: str) -> tuple[int, ...]:
    """ "2,3,4" as integers from 1 to 16."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 <= number <= 16 for number in found):
        raise ConfigError(f'--ranks is "{text}"; write numbers from 1 to 16 with commas, as in 2,3,4.')
    return found


__all__ = ["Verdict", "explore", "explore_all", "load", "numbers"]
