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
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, its defaults would keep the group of the world alive
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed's, but typed

from interlace.errors import ConfigError, Hang, InterlaceError, PeerLost, ResourceError, nearest
from interlace.failure import Failure, Position, compose, describe, hang

LOOPBACK = "127.0.0.1"
GATHER = 0.2  # seconds ranks get to report their positions after a wait ended
LINGER = 1.0  # seconds the cause gets to appear after a connection broke

_STATUS = struct.Struct("=Qqd?Q200sQ")  # version, step, since, waiting, waits, operation, version again


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
        operation = at.operation.encode()[:200]
        _STATUS.pack_into(self._map, 0, self._version, step, at.since, at.waiting, at.waits, operation, self._version)

    def read(self) -> Position:
        """What its rank stored last.

        Its rank may be writing: the bytes count once two looks find the same and the two versions in them agree, which
        they never do again if the rank was killed just then.
        """
        found = self._map[:]
        for _ in range(20):
            before, found = found, self._map[:]
            head, step, since, waiting, waits, operation, tail = _STATUS.unpack(found)
            if head == tail and before == found:
                break
        text = operation.rstrip(b"\0").decode(errors="ignore")
        return Position(step - 1 if step else None, text, since, waiting, waits)


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
    def waiting(self, operation: str) -> Iterator[None]:
        """Around whatever blocks until a peer answers; beyond `timeout` the supervisor calls it a hang.

        Left by an exception the position stays: it is where the rank failed.
        """
        last = self.mark.last
        self.mark.write(Position(last.step, operation, time.monotonic(), True, last.waits + 1))
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
        there, so that each rank says "stopped because rank 1 failed: ..." or who stands where.
        """
        failure = describe(error, self.rank, self.mark.last)
        age = time.monotonic() - failure.since  # clocks differ between hosts
        record = json.dumps({**asdict(failure), "since": age}, default=str)
        with contextlib.suppress(RuntimeError):  # the store may be gone together with the rank that held it
            if failure.kind == "cause":
                self.store.compare_set("interlace/failure", "", record)
                return compose(failure)
            self.store.set(f"interlace/position/{self.rank}", record)
            deadline = time.monotonic() + (GATHER if failure.kind == "timeout" else LINGER)
            while time.monotonic() < deadline:
                if self.store.check(["interlace/failure"]):
                    first = compose(Failure(**json.loads(self.store.get("interlace/failure"))))
                    stopped = PeerLost(f"stopped because {first.message}")
                    stopped.details = {**first.details, "cause": first.to_json()}
                    return stopped
                time.sleep(0.02)
            if failure.kind == "timeout":
                return hang(self._reported(), self.timeout, reported=failure.message)
        return compose(failure)

    def _reported(self) -> dict[int, Position]:
        places = dict.fromkeys(range(self.size), Position(operation="something unknown (it has not reported)"))
        for rank in places:
            if self.store.check([key := f"interlace/position/{rank}"]):
                at = Failure(**json.loads(self.store.get(key)))
                places[rank] = Position(at.step, at.operation, time.monotonic() - at.since, True)
        return places


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
)


def find_place() -> Place | None:
    """This process's place as torchrun or SLURM's srun put it into the environment; None without either."""
    env = os.environ
    slurm = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env
    torchrun = "RANK" in env and "WORLD_SIZE" in env
    if not torchrun and not slurm:
        if "RANK" in env or "WORLD_SIZE" in env:
            there, gone = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
            raise ConfigError(f"{there} is set but {gone} is not; start through torchrun, or unset {there}")
        return None
    try:
        if torchrun:
            size = int(env["WORLD_SIZE"])
            local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "0"))
            place = Place(int(env["RANK"]), size, *local, env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        else:
            size, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_STEP_NUM_NODES", "1"))
            first = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", env.get("SLURM_STEP_NODELIST", LOOPBACK))
            host = env.get("MASTER_ADDR") or "".join(part or "" for part in (first.groups() if first else ()))
            number = 31 * int(env.get("SLURM_JOB_ID", "0")) + int(env["SLURM_STEP_ID"])
            port = int(env.get("MASTER_PORT", 20000 + number % 10000))  # below the ephemeral ports
            local_size = size if nodes == 1 else int(env.get("SLURM_TASKS_PER_NODE", "0").split("(")[0].split(",")[0])
            place = Place(int(env["SLURM_PROCID"]), size, int(env.get("SLURM_LOCALID", "0")), local_size, host, port)
    except KeyError as error:
        raise ConfigError(f"RANK and WORLD_SIZE are set but {error.args[0]} is not; start through torchrun") from error
    except ValueError as error:
        words = [f"{name}={env[name]}" for name in NUMBERS if not env.get(name, "0").lstrip("-").isdigit()]
        raise ConfigError(f"the launcher's environment holds no number in {', '.join(words) or error}") from error
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"rank {place.rank} does not exist in a world of {place.size}; check RANK and WORLD_SIZE")
    if torchrun and place.local_size and not 0 <= place.local_rank < place.local_size <= place.size:
        raise ConfigError(
            f"rank {place.local_rank} of {place.local_size} on this machine does not exist in a world of {place.size}; "
            "check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    if not 0 < place.port < 1 << 16:
        raise ConfigError(f"MASTER_PORT is {place.port}; a port is a number from 1 to 65535")
    return place


def under_launcher() -> bool:
    """Whether torchrun or SLURM's srun started this process as one of its ranks."""
    return find_place() is not None


def join(timeout: float, device: str = "auto") -> World:
    """Join the group this process was started for; without a launcher, a world of one.

    `timeout` (seconds) limits the wait for the other ranks and every later wait; `device` is "cpu", "cuda" or
    "auto" (CUDA when every rank of this machine gets its own GPU).
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
    return connect(store, place, here, timeout, timeout, Status())


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
    bound = count == 1 and "SLURM_PROCID" in os.environ  # srun shows a task only its own GPU
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


def listen(port: int) -> int:
    """File descriptor of a socket bound to loopback, handed to TCPStore, which by itself binds every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen(128)
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"port {port} on {LOOPBACK} cannot be used ({getattr(error, 'strerror', None) or error}); "
                "choose another, or none: ranks of one machine need no port",
                port=port,
            ) from error
        return listener.detach()


def _open_store(place: Place, timeout: float) -> Store:
    """torchrun's store, or one held by rank 0: on loopback when all ranks are on one host."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    one_host = place.local_size == place.size and not agent
    host, master = LOOPBACK if one_host else place.host, place.rank == 0 and not agent
    listener = listen(place.port) if master and one_host else None
    limit = timedelta(seconds=timeout)
    try:
        store = TCPStore(host, place.port, None, master, limit, False, False, listener)
    except RuntimeError as error:
        if master:
            raise ResourceError(f"port {place.port} cannot be opened: {error}", port=place.port) from error
        raise Hang(
            f"rank {place.rank} found no store at {host}:{place.port} within {timeout:g} s: is rank 0 there?",
            rank=place.rank,
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"interlace/attempt{attempt}", store)


def connect(store: Store, place: Place, device: torch.device, arrival: float, timeout: float, status: Status) -> World:
    """Wait until every rank is there (`arrival` seconds at most), then open the process group."""
    cuda = device.type == "cuda"
    if cuda:
        # Read when CUDA starts.  Streams beyond the queues share them, and one that waits holds up its neighbours.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(device)
    world = World(place.rank, place.size, place.local_rank, device, store, timeout, status)
    store.set_timeout(timedelta(seconds=timeout))
    world.status(operation="joining the other ranks")
    arrive(world, arrival)
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


def arrive(world: World, limit: float) -> None:
    """Every rank signs in once; rank 0 compares and publishes its verdict, which all ranks act on alike."""
    store, deadline = world.store, time.monotonic() + limit
    gpu = str(torch.cuda.get_device_properties(world.device).uuid) if world.device.type == "cuda" else ""
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
    mine = {"WORLD_SIZE": world.size, "job": job, "torch": torch.__version__}
    me = {"host": socket.gethostname(), "pid": os.getpid(), "gpu": gpu, "time": time.time_ns()}
    record = json.dumps({**mine, **me})
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
                    if other[name] != value:
                        return f"{name} is {value!r} on rank 0 but {other[name]!r} on rank {rank}"
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
        store.set("interlace/verdict", json.dumps({"size": world.size, "wrong": wrong, "missing": missing}))
    else:
        try:
            store.wait(["interlace/verdict"], timedelta(seconds=limit + 1))
        except RuntimeError as error:
            raise Hang(f"rank 0 did not arrive within {limit:g} s", rank=0) from error
    verdict = json.loads(store.get("interlace/verdict"))
    if world.rank >= verdict["size"] or world.size != verdict["size"]:
        verdict["wrong"] = f"WORLD_SIZE is {verdict['size']} on rank 0 but {world.size} on rank {world.rank}"
    if verdict["wrong"]:
        raise ConfigError(f"the ranks disagree: {verdict['wrong']}")
    if verdict["missing"]:
        raise Hang(
            f"ranks missing: {verdict['missing']} of {world.size} did not arrive within {limit:g} s",
            odd=verdict["missing"],
        )
