"""Starts the ranks of one machine and watches them, or joins the ranks that torchrun or SLURM started.

`run_local` equals calling one function in `world` fresh processes that share a torch.distributed group, with
four promises on top: the first *cause* of a failure is the one error raised, naming rank, step and operation; from
a death to that error it takes at most two seconds; nothing outlives the call, not even a launcher killed by
SIGKILL; nothing listens except on loopback (by default there is no port at all: ranks meet in a private file).

The engines are multiprocessing's forkserver (torch is imported once, a rank then starts in a tenth of a second),
torch.distributed with gloo or NCCL, and Linux's parent-death signal.  A rank tells where it is through a small
mapped file (`World.status`, `World.waiting`), which the supervisor can read even after SIGKILL.  Arguments,
results and errors travel as JSON; nothing a rank says is ever unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import glob
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing import connection, forkserver
from typing import Any

from torch._C._distributed_c10d import FileStore, Store, TCPStore  # torch.distributed's, but typed

from interlace.errors import ConfigError, InterlaceError, PeerLost, ResourceError
from interlace.failure import Failure, Position, aborted, compose, describe, hang
from interlace.world import (
    LINGER,
    LOOPBACK,
    Place,
    Status,
    World,
    choose_device,
    connect,
    join,
    leave,
    listen,
    set_threads,
    stay_on_loopback,
    under_launcher,
)

__all__ = ["World", "join", "leave", "run_local", "under_launcher"]

# What the fork server imports once, beside the first target's module: torch._dynamo is a second and a half that
# optimizers and checkpointing would cost every rank.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "interlace.launch")
START_LIMIT = 60.0  # seconds a local rank may take to import the target's module before it is called missing
SETTLE = 0.1  # seconds between a failure and its verdict: an earlier one may be on its way
KILL_GRACE = 0.3  # seconds between SIGTERM and SIGKILL after a failure
STOP_GRACE = 10.0  # the same after the launcher itself was asked to stop: ranks may want to save
TOLD = 0.3  # seconds between a rank's answer to SIGTERM and its end, under another launcher
POLL = 0.1  # seconds between two looks at the status files

_ORDER = {"cause": 0, "timeout": 1, "consequence": 2}
_lock = threading.Lock()  # starting a process polls every other one, which multiprocessing does not guard


# --- A local rank -----------------------------------------------------------------------------------------------


def _rank_main(pipe: Any, streams: list[Any], env: dict[str, str], folder: str, rank: int) -> None:
    """What a local rank's process runs.  It ends when the supervisor closes the pipe, or with the supervisor."""
    _die_with_parent()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
    for text in (sys.stdout, sys.stderr):
        if text is not None:
            text.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launcher decides
    os.environ.clear()
    os.environ.update(env)
    status = Status(f"{folder}/status-{rank}")
    try:
        with open(f"{folder}/task", encoding="utf-8") as file:
            said, kind = json.dumps(_work(json.load(file), folder, rank, status)), "result"
        status.write(replace(status.last, operation="nothing: finished", since=time.monotonic(), waiting=False))
    except Exception as error:
        said, kind = json.dumps(asdict(describe(error, rank, status.last)), default=str), "failure"
    with open(f"{folder}/{kind}-{rank}", "w", encoding="utf-8") as file:
        file.write(said)
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(kind.encode())
        pipe.recv_bytes()  # until the supervisor closes it: nobody leaves a group that others may still need
    leave()


def _work(task: dict[str, Any], folder: str, rank: int, status: Status) -> Any:
    size, timeout, port = task["world"], task["timeout"], task["port"]
    stay_on_loopback()
    set_threads(size)
    device = choose_device(task["device"], rank, size)
    status.write(Position(operation=f"import of {task['target']}", since=time.monotonic()))
    module, _, name = task["target"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if port is None:
        store: Store = FileStore(f"{folder}/store", size)
    else:
        store = TCPStore(LOOPBACK, port, None, False, timedelta(seconds=timeout), False)
    place = Place(rank, size, rank, size, LOOPBACK, 0)
    world = connect(store, place, device, max(timeout, START_LIMIT), timeout, status)
    world.status(operation=name)
    return function(world, **task["argument"])


def _die_with_parent() -> None:
    """Have the kernel kill this rank when the launcher or the forkserver ends, even while it is stopped or busy.

    The launcher holds one end of a pipe; as it dies, however it dies, the kernel signals the owner of the other.
    The second way: a rank's parent, the forkserver, lives until the last copy of its "alive" pipe is closed. Ranks
    get a copy; given up here, only the launcher's is left.
    """
    server: Any = forkserver._forkserver
    alive, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if alive is not None:
        os.close(alive)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([parent.sentinel], 0):
        os._exit(1)  # it died before the kernel was told


# --- A rank of another launcher ---------------------------------------------------------------------------------


@contextlib.contextmanager
def told_to_end(world: World) -> Iterator[Callable[[], None]]:
    """While inside, SIGTERM ends this process with one line: where it was, and which rank here had ended before.

    torchrun ends all others so when one is lost.  A thread of its own answers, for the main one may stand in a
    collective where Python handles no signals.  It waits a moment before it ends the process, so that those told at the
    same time do not take it for lost.  What is yielded is to be called when this rank fails by itself and is about to
    say so: SIGTERM is not answered from then on.  Main thread only; elsewhere nothing happens.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield lambda: None
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    quiet = threading.Event()

    def answer() -> None:
        while got := os.read(reading, 1):
            if got[0] == signal.SIGTERM and not quiet.is_set():
                gone = world.gone()
                if gone or world.local_rank == 0:
                    first = world.named(gone) if gone else "none of this machine"
                    told = f"interlace: rank {world.rank} was told to end (SIGTERM) {world.mark.last.where()}; {first} "
                    with contextlib.suppress(OSError):
                        os.write(2, f"{told}had ended before [{PeerLost.code}]\n".encode())
                time.sleep(TOLD)
                os._exit(128 + signal.SIGTERM)

    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    thread = threading.Thread(target=answer, name="told to end", daemon=True)
    thread.start()
    try:
        yield quiet.set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        thread.join()
        os.close(reading)


# --- Their supervisor -------------------------------------------------------------------------------------------


@dataclass
class _Rank:
    process: Any
    pipe: Any
    status: Status
    said: str = ""  # "result" or "failure": the name of the file it has written
    failure: Failure | None = None

    def exitcode(self) -> int | None:
        with _lock:
            code: int | None = self.process.exitcode
        return code


def run_local(
    target: str,
    world: int,
    argument: dict[str, Any],
    *,
    device: str = "cpu",
    timeout: float = 60.0,
    port: int | None = None,
    on_start: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Call `function(World, **argument)` in `world` processes of this machine and return the results by rank.

    `target` is "module:function", importable with this process's sys.path; `argument` and results are JSON values.
    `device`: "cpu" (gloo), "cuda" (a GPU per rank; NCCL, and gloo for CPU tensors) or "auto".  `timeout`: seconds a
    rank may wait for another.  `port`: meet on this loopback port instead of in a private file.  `on_start` gets
    the ranks' process ids.  The main module is not imported again, standard output and error pass through.

    Raises the first cause: an InterlaceError of a rank as its own class with rank, step and operation in `details`
    (and the traceback); PeerLost for any other exception, a killed rank or one that exits early; Hang with every
    rank's position; ResourceError for a taken port or too few GPUs.  SIGTERM and SIGINT (main thread) are passed
    on as SIGTERM; when the ranks have ended, SystemExit 143 or 130 follows.
    """
    module, _, name = target.partition(":")
    if not name.isidentifier() or module in ("", "__main__"):
        raise ConfigError(f"target {target!r} cannot be imported by a rank; write it as module:function")
    if world < 1 or timeout <= 0:
        raise ConfigError(f"world {world} and timeout {timeout:g} s must both be positive")
    choose_device(device, 0, world)
    task = {"target": target, "world": world, "argument": argument, "device": device, "timeout": timeout, "port": port}
    _plug_streams()
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(_signals())
        folder = stack.enter_context(_private_folder())
        if port is not None:
            listener = listen(port)
            server = TCPStore(LOOPBACK, port, None, True, timedelta(seconds=timeout), False, False, listener)
            stack.callback(lambda kept: None, server)  # it serves as long as the stack holds it
        with open(f"{folder}/task", "w", encoding="utf-8") as file:
            json.dump(task, file)
        ranks: list[_Rank] = []
        try:
            for index in range(world):
                ranks.append(_start(folder, index, module))
            if on_start is not None:
                on_start([rank.process.pid for rank in ranks])
            results = _watch(ranks, folder, timeout, received)
        except BaseException:
            _end(ranks, STOP_GRACE if received else KILL_GRACE, ask=True, received=received)
            raise
        _end(ranks, STOP_GRACE, ask=False, received=received)
    if received:
        raise SystemExit(128 + received[0])
    return results


def _start(folder: str, index: int, module: str) -> _Rank:
    """One more process from the forkserver, which is started at the first call and has torch imported."""
    context = multiprocessing.get_context("forkserver")
    path = f"{folder}/status-{index}"
    with open(path, "wb") as file:
        file.truncate(Status.SIZE)
    ours, theirs = context.Pipe()
    streams = [_stream(number) for number in (1, 2)]
    server: Any = forkserver._forkserver
    with _lock:
        arguments = (theirs, streams, dict(os.environ), folder, index)
        process = context.Process(target=_rank_main, args=arguments, name=f"rank {index}")
        if server._preload_modules == ["__main__"]:  # the default: the program has not chosen its own
            context.set_forkserver_preload([*PRELOADED, module])
            atexit.register(_end_server)
        with _quiet_server():
            process.start()
    for end in (theirs, *streams):
        end.close()
    return _Rank(process, ours, Status(path))


def _end_server() -> None:
    """Kills the fork server as this process ends: it has nothing to save, and its own way out takes a second."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)


@contextlib.contextmanager
def _quiet_server() -> Iterator[None]:
    """Hide the main module, which a new process would import again, and keep BLAS threads out of the forkserver."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    asked = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if asked is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = asked


def _stream(number: int) -> Any:
    """A copy of standard output (1) or error (2) in a form that multiprocessing hands to a rank."""
    closed = (sys.__stdout__, sys.__stderr__)[number - 1] is None  # whatever has this number now is something else
    copy = os.open(os.devnull, os.O_WRONLY) if closed else os.dup(number)
    return connection.Connection(copy, readable=False)


def _plug_streams() -> None:
    """Put the null device where a standard stream is closed: ranks must not get a pipe of ours under its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


def _watch(ranks: list[_Rank], folder: str, timeout: float, received: list[int]) -> list[Any]:
    """Return all results, or raise: a failure's first cause, a hang, or SystemExit after a signal."""
    late: set[tuple[int, int, float]] = set()  # the waits beyond the limit at the last look
    while True:
        talking = [rank.pipe for rank in ranks if not rank.said]
        connection.wait([*talking, *(rank.process.sentinel for rank in ranks if rank.failure is None)], POLL)
        for index, rank in enumerate(ranks):
            _look(rank, index, folder, timeout)
        now = time.monotonic()
        failures = [rank.failure for rank in ranks if rank.failure is not None]
        if failures:
            patience = LINGER if all(failure.kind == "consequence" for failure in failures) else SETTLE
            settled = now - min(failure.time for failure in failures) >= patience or len(failures) == len(ranks)
            if not settled:
                time.sleep(0.02)
                continue
        if received:
            raise SystemExit(128 + received[0])
        if failures:
            first = min(failures, key=lambda failure: (_ORDER[failure.kind], failure.time))
            if first.kind == "timeout":
                raise _hung(ranks, timeout, first)
            if ranks[first.rank].exitcode() == -signal.SIGABRT:
                raise aborted({index: rank.status.read() for index, rank in enumerate(ranks)}, first)
            raise compose(first)
        if all(rank.said for rank in ranks):
            return [_read(folder, "result", index) for index in range(len(ranks))]
        places = [rank.status.read() for rank in ranks]
        before, late = (
            late,
            {
                (index, at.waits, at.since)
                for index, at in enumerate(places)
                if at.waiting and now - at.since > timeout + 2 * POLL
            },
        )
        if before & late:  # the same wait, seen twice: what was read while its rank wrote cannot be
            raise _hung(ranks, timeout)


def _look(rank: _Rank, index: int, folder: str, timeout: float) -> None:
    """Take in what a rank has said, or that it is gone."""
    code = rank.exitcode()
    with contextlib.suppress(EOFError, OSError):
        if not rank.said and rank.pipe.poll():
            rank.said = rank.pipe.recv_bytes().decode()
            if rank.said == "failure":
                rank.failure = Failure(**_read(folder, "failure", index))
    if code is None or rank.failure is not None:
        return
    at, now = rank.status.read(), time.monotonic()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    message = f"rank {index} (pid {rank.process.pid}) {how} {at.where()}, before the run was done"
    if code == -signal.SIGKILL:
        message += "; if nobody sent that signal, the machine ran out of memory"
    watchdog = code == -signal.SIGABRT and at.waiting and now - at.since > 0.9 * timeout  # NCCL's way to time out
    kind = "timeout" if watchdog else "cause"
    rank.failure = Failure(index, kind, now, message, at.step, at.operation, at.since)


def _read(folder: str, kind: str, index: int) -> Any:
    with open(f"{folder}/{kind}-{index}", encoding="utf-8") as file:
        return json.load(file)


def _hung(ranks: list[_Rank], timeout: float, first: Failure | None = None) -> InterlaceError:
    places, stopped = {}, []
    for index, rank in enumerate(ranks):
        late = rank.failure is not None and rank.failure.kind == "timeout"
        at = rank.status.read()
        places[index] = replace(at, waiting=at.waiting or late)
        with contextlib.suppress(OSError), open(f"/proc/{rank.process.pid}/stat", encoding="latin-1") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                stopped.append(index)
    error = hang(places, timeout, stopped, first.message if first is not None and first.classes else "")
    if first is not None and first.traceback:
        error.details["traceback"] = first.traceback
    return error


def _end(ranks: list[_Rank], grace: float, ask: bool, received: list[int]) -> None:
    """Release the ranks, with SIGTERM if `ask`; SIGKILL for those left after `grace` seconds or a new signal."""
    for rank in ranks:
        rank.pipe.close()
        if ask and rank.exitcode() is None:
            rank.process.terminate()
    deadline, signals = time.monotonic() + grace, len(received)
    while alive := [rank for rank in ranks if rank.exitcode() is None]:
        if time.monotonic() > deadline or len(received) > signals:
            for rank in alive:
                rank.process.kill()
            deadline, signals = float("inf"), sys.maxsize  # nothing but the kernel can take longer now
        connection.wait([rank.process.sentinel for rank in alive], POLL)
    for rank in ranks:
        rank.process.close()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in a list instead of acting on them (main thread only, where Python allows it)."""
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda got, frame: received.append(got))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    """A folder only this user can read, locked while in use; those of launchers that were killed are removed."""
    try:
        _sweep(tempfile.gettempdir())
        temporary = tempfile.TemporaryDirectory(prefix="interlace-run-")
    except OSError as error:
        raise ResourceError(f"no private folder for the ranks can be made ({error}); set TMPDIR to another") from error
    with temporary as folder, open(f"{folder}/lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _sweep(place: str) -> None:
    for old in glob.glob(os.path.join(place, "interlace-run-*")):
        with contextlib.suppress(OSError):
            if os.stat(old).st_uid == os.getuid() and time.time() - os.stat(old).st_mtime > 60:
                with open(f"{old}/lock", "wb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)
