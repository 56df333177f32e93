"""A rank's view of its world, and how a process becomes a rank: alone, or started by torchrun or SLURM.

A rank tells where it is (step, operation, waiting for a peer or not) through a small mapped file that a supervisor
can read even after SIGKILL.  Nothing here listens except on loopback, unless the ranks are on several hosts.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, its defaults would keep the group of the world alive
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed's, but typed

from interlace.errors import ConfigError, Hang, InterlaceError, PeerLost, ResourceError, nearest
from interlace.failure import Failure, Position, compose, describe, hang

LOOPBACK = "127.0.0.1"
_BENEATH = (__file__, contextlib.__file__, str(Path(__file__).parent / "collectives"), str(Path(torch.__file__).parent))
GATHER = 0.2  # seconds ranks get to report their positions after a wait ended
LINGER = 1.0  # seconds the cause gets to appear after a connection broke
SELF = 10.0  # seconds rank 0 tries to reach its own store
TRY = 5.0  # seconds for one try to connect

_STATUS = struct.Struct("=Qqd?Q200s200sQ")  # version, step, since, waiting, waits, operation, detail, version again


class Status:
    """One `Position` in a mapped file: written by its rank in a microsecond, readable after the rank is gone."""

    SIZE = _STATUS.size

    def __init__(self, path: str | None = None) -> None:
        if path is None:
            self._map = mmap.mmap(-1, self.SIZE)
        else:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), self.SIZE)
        self._version = 0
        self.last = Position()

    def write(self, at: Position) -> None:
        """Store where this rank is."""
        self.last = at
        self._version += 1
        step = 0 if at.step is None else at.step + 1  # so that a file of zeros is Position()
        texts = at.operation.encode()[:200], at.detail.encode()[:200]
        _STATUS.pack_into(self._map, 0, self._version, step, at.since, at.waiting, at.waits, *texts, self._version)

    def read(self) -> Position:
        """What its rank stored last.

        Its rank may be writing: the bytes count once two looks find the same and the two versions in them agree, which
        they never do again if the rank was killed just then.
        """
        found = self._map[:]
        for _ in range(20):
            before, found = found, self._map[:]
            head, step, since, waiting, waits, *texts, tail = _STATUS.unpack(found)
            if head == tail and before == found:
                break
        operation, detail = (text.rstrip(b"\0").decode(errors="ignore") for text in texts)
        return Position(step - 1 if step else None, operation, since, waiting, waits, detail)


@dataclass(frozen=True)
class Process:
    """A rank's process: the machine and its space of process ids ("" where there is no /proc), and its birth there."""

    space: str
    pid: int
    born: str

    @classmethod
    def own(cls) -> Process:
        try:
            space = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            return cls("", os.getpid(), "")
        return cls(space, os.getpid(), _born(os.getpid()))

    def lives(self) -> bool:
        """Whether it still runs; of one without a space that cannot be told."""
        return not self.space or _born(self.pid) == self.born


def _born(pid: int) -> str:
    """When a process began, in ticks since the machine did; "" when it has ended, also if nobody has noticed yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZXx" else fields[19]


@dataclass
class World:
    """What a rank knows of its world.  `timeout` is the limit of every wait, in seconds."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: Store
    timeout: float = 60.0
    mark: Status = field(default_factory=Status, repr=False)
    peers: tuple[Process, ...] = field(default=(), repr=False)

    def gone(self) -> list[int]:
        """The ranks of this machine whose process has ended, as far as can be seen from here."""
        own = Process.own()
        here = ((rank, peer) for rank, peer in enumerate(self.peers) if peer.space == own.space)
        return [rank for rank, peer in here if not peer.lives()]

    def status(self, step: int | None = None, operation: str | None = None) -> None:
        """Say where this rank is now (None keeps the last value).  It is not waiting for a peer."""
        last = self.mark.last
        self.mark.write(
            Position(
                last.step if step is None else step,
                last.operation if operation is None else operation,
                time.monotonic(),
                False,
                last.waits,
            )
        )

    @contextlib.contextmanager
    def waiting(self, operation: str, detail: str = "") -> Iterator[None]:
        """Around whatever blocks until a peer answers; beyond `timeout` the supervisor calls it a hang.

        detail: what is known of the transfer; the line of the source from which it is waited for comes behind it.
        Left by an exception the position stays: it is where the rank failed.
        """
        last = self.mark.last
        detail = f"{detail}, {_caller()}" if detail else _caller()
        self.mark.write(Position(last.step, operation, time.monotonic(), True, last.waits + 1, detail))
        yield
        self.mark.write(replace(last, since=time.monotonic(), waits=self.mark.last.waits))

    def barrier(self, name: str) -> None:
        """Return when every rank has come here."""
        with self.waiting(f"barrier({name})"):
            if self.size > 1:
                dist.all_reduce(torch.zeros(1))

    def explain(self, error: Exception) -> InterlaceError:
        """The error to show for an exception of this rank when no supervisor of ours watches (torchrun, SLURM).

        An own failure is put into the store; after a broken or timed-out collective the others' are looked up
        there, so that each rank says "stopped because rank 1 failed: ...", which rank of this machine is gone, or who
        stands where.
        """
        failure = describe(error, self.rank, self.mark.last)
        age = time.monotonic() - failure.since  # clocks differ between hosts
        record = json.dumps({**asdict(failure), "since": age}, default=str)
        gone: list[int] = []
        with contextlib.suppress(RuntimeError):  # the store may be gone together with the rank that held it
            if failure.kind == "cause":
                self.store.compare_set("interlace/failure", "", record)
                return compose(failure)
            self.store.set(f"interlace/position/{self.rank}", record)
            deadline = time.monotonic() + (GATHER if failure.kind == "timeout" else LINGER)
            while time.monotonic() < deadline:
                gone = self.gone()  # before the looks at the store: they have left there what they had to say
                if self.store.check(["interlace/failure"]):
                    first = compose(Failure(**json.loads(self.store.get("interlace/failure"))))
                    stopped = PeerLost(f"stopped because {first.message}")
                    stopped.details = {**first.details, "cause": first.to_json()}
                    return stopped
                if gone := [rank for rank in gone if not self.store.check([f"interlace/position/{rank}"])]:
                    return self._lost(gone)
                time.sleep(0.02)
            if failure.kind == "timeout":
                return hang(self._reported(), self.timeout, reported=failure.message)
        gone = gone or ([] if failure.kind == "cause" else self.gone())
        return self._lost(gone) if gone else compose(failure)

    def _lost(self, gone: list[int]) -> PeerLost:
        """The error for ranks whose processes have ended without a word."""
        at = self.mark.last
        error = PeerLost(
            f"{self.named(gone)} ended without a word, as rank {self.rank} found {at.where()}; if nobody killed "
            f"{'it' if len(gone) == 1 else 'them'}, the machine ran out of memory"
        )
        place = {"step": at.step, "operation": at.operation}
        error.details = {"rank": gone[0] if len(gone) == 1 else None, "odd": gone, **place}
        return error

    def named(self, ranks: list[int]) -> str:
        """ "rank 1 (pid 4711)" or "ranks 1 (pid 4711), 2 (pid 4712)"."""
        words = ", ".join(f"{rank} (pid {self.peers[rank].pid})" for rank in ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {words}"

    def _reported(self) -> dict[int, Position]:
        places = dict.fromkeys(range(self.size), Position(operation="something unknown (it has not reported)"))
        for rank in places:
            if self.store.check([key := f"interlace/position/{rank}"]):
                at = Failure(**json.loads(self.store.get(key)))
                since = time.monotonic() - at.since
                places[rank] = Position(at.step, at.operation, since, True, detail=at.detail)
        return places


def _caller() -> str:
    """The innermost line of the source that waits: not of this file, of what transfers, or of the library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _BENEATH):
        frame = frame.f_back
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


@dataclass(frozen=True)
class Place:
    """Where a launcher has put this process: its rank here and in all, and the address of rank 0."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int


NUMBERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_ID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_JOB_ID",
)
SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # launchers that are not known


def find_place() -> Place | None:
    """This process's place as torchrun or SLURM's srun put it into the environment; None without either.

    A step of one task is none: an interactive shell of SLURM is one, in which a run starts its own ranks.
    """
    env = os.environ
    slurm = all(name in env for name in SLURM) and env["SLURM_STEP_NUM_TASKS"] != "1"
    torchrun = "RANK" in env and "WORLD_SIZE" in env
    if not torchrun and not slurm:
        if "RANK" in env or "WORLD_SIZE" in env:
            there, gone = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
            raise ConfigError(f"{there} is set but {gone} is not; start through torchrun, or unset {there}")
        if many := [name for name in MPI if env.get(name, "1") != "1"]:
            raise ConfigError(
                f"{many[0]} is {env[many[0]]}, so this is one of the processes of an MPI launcher, which is not known "
                f"here; start them with torchrun or srun, or unset {many[0]}"
            )
        return None
    try:
        place = _of_torchrun() if torchrun else _of_slurm()
    except ValueError as error:
        words = [f"{name}={env[name]}" for name in NUMBERS if not env.get(name, "0").strip().lstrip("-").isdigit()]
        raise ConfigError(f"the launcher's environment holds no number in {', '.join(words) or error}") from error
    names = ("RANK", "WORLD_SIZE") if torchrun else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"rank {place.rank} does not exist in a world of {place.size}; check {' and '.join(names)}")
    if torchrun and place.local_size and not 0 <= place.local_rank < place.local_size <= place.size:
        raise ConfigError(
            f"rank {place.local_rank} of {place.local_size} on this machine does not exist in a world of {place.size}; "
            "check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    if not 0 < place.port < 1 << 16:
        raise ConfigError(f"MASTER_PORT is {place.port}; a port is a number from 1 to 65535")
    return place


def _of_torchrun() -> Place:
    env = os.environ
    if gone := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]:
        raise ConfigError(f"RANK and WORLD_SIZE are set but {gone[0]} is not; start through torchrun")
    local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "0"))
    return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), *local, env["MASTER_ADDR"], int(env["MASTER_PORT"]))


def _of_slurm() -> Place:
    env = os.environ
    size, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_STEP_NUM_NODES", "1"))
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", env.get("SLURM_STEP_NODELIST", ""))  # up to a comma outside of brackets
    named = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""
    host = env.get("MASTER_ADDR") or named or (LOOPBACK if nodes == 1 else "")
    if not host:
        raise ConfigError(
            f"SLURM_STEP_NUM_NODES is {nodes} but SLURM_STEP_NODELIST names no node; set MASTER_ADDR to rank 0's host"
        )
    number = 31 * int(env.get("SLURM_JOB_ID", "0")) + int(env["SLURM_STEP_ID"])
    port = int(env.get("MASTER_PORT", 20000 + number % 10000))  # below the ephemeral ports
    local_size = size if nodes == 1 else _tasks_here()
    return Place(int(env["SLURM_PROCID"]), size, int(env.get("SLURM_LOCALID", "0")), local_size, host, port)


def _tasks_here() -> int:
    """SLURM's tasks on this node, from "8(x2),4": eight on each of the first two, four on the third; 0 if unknown."""
    env = os.environ
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "0"
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise ConfigError(f'SLURM_TASKS_PER_NODE must be numbers as in "8(x2),4", found "{text}"; start through srun')
    each = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    node = int(env.get("SLURM_NODEID", "0"))
    return each[node] if 0 <= node < len(each) else 0


def under_launcher() -> bool:
    """Whether torchrun or SLURM's srun started this process as one of its ranks."""
    return find_place() is not None


def join(timeout: float, device: str = "auto", same: Mapping[str, str] | None = None) -> World:
    """Join the group this process was started for; without a launcher, a world of one.

    `timeout` (seconds) limits the wait for the other ranks and every later wait; `device` is "cpu", "cuda" or
    "auto" (CUDA when every rank of this machine gets its own GPU).  same: what every rank must have alike, by name.
    Raises Hang naming missing ranks, ConfigError when ranks disagree or one was started twice, ResourceError.
    """
    found = find_place()
    place = found or Place(0, 1, 0, 1, LOOPBACK, 0)
    here = choose_device(device, place.local_rank, place.local_size)
    if place.local_size == place.size:
        stay_on_loopback()
    if found is None:
        store: Store = HashStore()
    else:
        set_threads(place.local_size)
        store = _open_store(place, timeout)
    return connect(store, place, here, timeout, timeout, Status(), same)


def leave() -> None:
    """Leave the process group quietly, whatever state it is in; its threads end here, for no `Group` keeps it."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int, local_size: int) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device {name!r} is unknown; did you mean {nearest(name, ('auto', 'cpu', 'cuda')) or 'auto'!r}?"
        )
    count = 0 if name == "cpu" else torch.cuda.device_count()
    alone = "SLURM_PROCID" in os.environ or ("LOCAL_RANK" in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ)
    bound = count == 1 and alone  # srun, or a script around each rank, shows it its own GPU; `arrive` compares them
    enough = count > 0 and (bound or count >= max(local_size, local_rank + 1))
    if name == "cpu" or (name == "auto" and not enough):
        return torch.device("cpu")
    if not enough:
        raise ResourceError(
            f"{max(local_size, local_rank + 1)} ranks on this machine need as many GPUs, {count} found; "
            "use fewer ranks or device cpu"
        )
    return torch.device("cuda", 0 if bound else local_rank)


def stay_on_loopback() -> None:
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def set_threads(local_size: int) -> None:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    asked = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, local_size))))
    first = asked.split(",")[0]
    torch.set_num_threads(int(first) if first.isdecimal() and int(first) else 1)


def listen(port: int, everywhere: bool = False) -> int:
    """File descriptor of a socket bound to loopback, or to every interface, that TCPStore is to serve."""
    both = everywhere and socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("" if everywhere else LOOPBACK, port))
            listener.listen(1024 if everywhere else 128)
        except (OSError, OverflowError) as error:
            place, more = (f"port {port}", "MASTER_PORT") if everywhere else (f"port {port} on {LOOPBACK}", "")
            raise ResourceError(
                f"{place} cannot be used ({getattr(error, 'strerror', None) or error}); "
                + (f"choose another {more}" if more else "choose another, or none: ranks of one machine need no port"),
                port=port,
            ) from error
        return listener.detach()


def _address(place: Place) -> tuple[str, bool]:
    """The host where the store is, and whether rank 0 holds it there; else torchrun's agent does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    one_host = place.local_size == place.size and not agent
    return LOOPBACK if one_host else place.host, not agent


def _open_store(place: Place, timeout: float) -> Store:
    """torchrun's store, or one held by rank 0: on loopback when all ranks are on one host."""
    host, held = _address(place)
    master = place.rank == 0 and held
    listener = listen(place.port, everywhere=host != LOOPBACK) if master else None
    try:
        _reach(place, host, min(timeout, SELF) if master else timeout)
    except Hang:
        if listener is not None:
            os.close(listener)
        raise
    try:
        with _quiet_if_it_fails():
            store = TCPStore(host, place.port, None, master, timedelta(seconds=timeout), False, False, listener)
    except RuntimeError as error:
        raise Hang(
            f"rank {place.rank} was answered at {host}:{place.port}, but not by the ranks' store, for {timeout:g} s; "
            "set MASTER_ADDR and MASTER_PORT to rank 0's host and a port of its own",
            rank=place.rank,
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"interlace/attempt{attempt}", store)


@contextlib.contextmanager
def _quiet_if_it_fails() -> Iterator[None]:
    """Keeps what is written to standard error meanwhile, and drops it after a RuntimeError: C++ tells it again in
    pages of stack."""
    try:
        before = os.dup(2)
    except OSError:  # closed
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        dropped = False
        try:
            yield
        except RuntimeError:
            dropped = True
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            if not dropped and (words := kept.read()):
                os.write(2, words)


def _reach(place: Place, host: str, limit: float) -> None:
    """Returns once something listens at the store's address; TCPStore says why it does not in pages of C++."""
    deadline, pause = time.monotonic() + limit, 0.02
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((host, place.port), min(left, TRY)).close()
            return
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise Hang(_unreached(place, host, limit, error), rank=place.rank, host=host, port=place.port) from None
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _unreached(place: Place, host: str, limit: float, error: OSError) -> str:
    """What was asked, what was found, what to change."""
    asked = f"rank {place.rank} asked for the store of rank 0 at {host}:{place.port} for {limit:g} s"
    if host == LOOPBACK and place.local_size == place.size:
        return (
            f"{asked}, on this machine as all ranks are, and nothing listens there; start rank 0 with this MASTER_PORT"
        )
    if place.rank == 0 and isinstance(error, ConnectionRefusedError):
        return f"{asked}, and that is another host; set MASTER_ADDR to a name or address of the host of rank 0"
    if isinstance(error, socket.gaierror):
        return f"{asked}, and no host of that name is known; set MASTER_ADDR to the name or address of rank 0's host"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{asked}, and that host answers but nothing listens on the port; start rank 0 there, or set MASTER_ADDR "
            "and MASTER_PORT to where it is"
        )
    reason = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return (
        f"{asked}, and got no answer ({reason}); set MASTER_ADDR to the name or address of rank 0's host, or open the "
        "port between the hosts"
    )


def connect(
    store: Store,
    place: Place,
    device: torch.device,
    arrival: float,
    timeout: float,
    status: Status,
    same: Mapping[str, str] | None = None,
) -> World:
    """Wait until every rank is there (`arrival` seconds at most), then open the process group."""
    cuda = device.type == "cuda"
    if cuda:
        # Read when CUDA starts.  Streams beyond the queues share them, and one that waits holds up its neighbours.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(device)
    world = World(place.rank, place.size, place.local_rank, device, store, timeout, status)
    store.set_timeout(timedelta(seconds=timeout))
    world.status(operation="joining the other ranks")
    arrive(world, arrival, f" at {_address(place)[0]}:{place.port}" if place.port else "", same)
    with world.waiting("opening the process group"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout),
            device_id=device if cuda else None,
        )
    return world


def arrive(world: World, limit: float, where: str = "", same: Mapping[str, str] | None = None) -> None:
    """Every rank signs in once; rank 0 compares and publishes its verdict, which all ranks act on alike.

    where: of the store, in words.  same: what every rank must have alike, by name.
    """
    store, deadline = world.store, time.monotonic() + limit
    gpu = str(torch.cuda.get_device_properties(world.device).uuid) if world.device.type == "cuda" else ""
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
    mine = {"WORLD_SIZE": world.size, "job": job, "torch": torch.__version__, **(same or {})}
    own = Process.own()
    me = {"host": socket.gethostname(), **asdict(own), "gpu": gpu, "time": time.time_ns()}
    record = json.dumps({"same": mine, **me})
    held = store.compare_set(f"interlace/here/{world.rank}", "", record).decode()
    if held != record:
        other = json.loads(held)
        raise ConfigError(
            f"rank {world.rank} is already taken by pid {other['pid']} on {other['host']}; "
            "was it started twice, or does another run use this address?"
        )
    arrived: dict[int, dict[str, Any]] = {}

    def differences() -> str:
        for rank in (rank for rank in range(world.size) if rank not in arrived):
            if store.check([key := f"interlace/here/{rank}"]):
                other = json.loads(store.get(key))
                for name, value in mine.items():
                    if other["same"].get(name) != value:
                        return f"{name} is {value!r} on rank 0 but {other['same'].get(name)!r} on rank {rank}"
                if other["gpu"] and other["gpu"] in {known["gpu"] for known in arrived.values()}:
                    return f"rank {rank} shares its GPU with another rank; give each its own"
                arrived[rank] = other
        return ""

    if world.rank == 0:
        pause = 0.005
        while not (wrong := differences()) and len(arrived) < world.size and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        missing = [] if wrong else [rank for rank in range(world.size) if rank not in arrived]
        peers = [[other[key] for key in asdict(own)] for _, other in sorted(arrived.items())]
        store.set(
            "interlace/verdict", json.dumps({"size": world.size, "wrong": wrong, "missing": missing, "peers": peers})
        )
    else:
        try:
            store.wait(["interlace/verdict"], timedelta(seconds=limit + 1))
        except RuntimeError as error:
            raise Hang(f"rank 0 did not arrive{where} within {limit:g} s", rank=0) from error
    verdict = json.loads(store.get("interlace/verdict"))
    if world.rank >= verdict["size"] or world.size != verdict["size"]:
        verdict["wrong"] = f"WORLD_SIZE is {verdict['size']} on rank 0 but {world.size} on rank {world.rank}"
    if verdict["wrong"]:
        raise ConfigError(f"the ranks disagree: {verdict['wrong']}; start all of them alike")
    if verdict["missing"]:
        raise Hang(
            f"ranks missing: {verdict['missing']} of {world.size} did not arrive{where} within {limit:g} s",
            odd=verdict["missing"],
        )
    world.peers = tuple(Process(*peer) for peer in verdict["peers"])
