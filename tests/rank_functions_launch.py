"""What the ranks of test_launch.py and test_world.py run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore

import interlace
from interlace.collectives import Meter, all_gather, all_reduce, broadcast
from interlace.collectives.groups import make_groups
from interlace.errors import CheckpointError, DataError, InterlaceError
from interlace.launch import World, join, leave, told_to_end
from interlace.mesh import Mesh
from interlace.symmetric import SymmetricHeap
from interlace.world import Process, _born


def total(world: World, start: int = 0) -> dict[str, Any]:
    """The sum over ranks of start + rank, and what the rank sees of its surroundings."""
    value = torch.tensor([float(start + world.rank)])
    with world.waiting("all_reduce(total)"):
        dist.all_reduce(value)
    world.barrier("after")
    return {
        "sum": value.item(),
        "rank": world.rank,
        "size": world.size,
        "device": str(world.device),
        "threads": torch.get_num_threads(),
        "variable": os.environ.get("INTERLACE_TEST"),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "pid": os.getpid(),
    }


def steps(world: World, count: int, fault: str = "", at: int = 3, pause: float = 0.0, note: str = "") -> int:
    """`count` all-reduces; at step `at` rank 1 (or whichever rank the fault names) does something wrong."""
    for step in range(count):
        world.status(step, "forward")
        if note and step == at:
            with open(f"{note}-{world.rank}", "w") as file:
                file.write(str(os.getpid()))
        if fault and step == at and world.rank == 1:
            misbehave(fault, world)
        with world.waiting("all_reduce(gradients)"):
            dist.all_reduce(torch.ones(1000))
        time.sleep(pause)
    return count


def mismatched(world: World, fault: str) -> int:
    """Transfers along all ranks; in step 1 some rank does something else."""
    meter = Meter(world.waiting)
    whole = make_groups(Mesh.parse(f"dp={world.size}"), world.rank, world.device, 60.0, meter)["dp"]
    pairs = [dist.new_group([0, 1]) for _ in range(2)]
    for step in range(3):
        world.status(step, "forward")
        all_gather(torch.ones(4), whole, name="gather of weights").wait()
        if step == 1 and world.rank == 2 and fault in ("larger", "smaller", "another type"):
            given = {"larger": torch.ones(6), "smaller": torch.ones(2), "another type": torch.ones(4).double()}[fault]
            all_gather(given, whole, name="gather of sizes").wait()
        if step == 1 and fault == "another operation" and world.rank == 2:
            broadcast(torch.ones(2, 3).half(), whole, name="broadcast of weights").wait()
        if step == 1 and fault == "left out" and world.rank == 1:
            continue
        if step == 1 and fault == "asleep" and world.rank == 3:
            world.status(operation="a long thought")
            time.sleep(60)
        if step == 1 and fault == "opposite order" and world.rank < 2:
            for number in (0, 1) if world.rank == 0 else (1, 0):
                with world.waiting(f"sum in group {number}"):
                    dist.all_reduce(torch.ones(4), group=pairs[number])
        all_gather(torch.ones(4), whole, name="gather of sizes").wait()
    return step


def misbehave(fault: str, world: World) -> None:
    if fault == "raise":
        raise ValueError("boom")
    if fault == "checkpoint":
        raise CheckpointError("model.safetensors is cut off; load an older one", file="model.safetensors")
    if fault == "data":
        raise DataError("line 7 of a.jsonl is not JSON")
    if fault == "memory":
        raise MemoryError
    if fault == "exit":
        sys.exit(0)
    if fault == "leave":
        os._exit(0)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "absent":
        world.status(operation="a long thought")
        time.sleep(60)
    if fault == "other":
        with world.waiting("broadcast(weights)"):
            dist.broadcast(torch.ones(1000), 1)
            world.barrier("never")


def own_error(world: World) -> None:
    raise Special("only this module knows the class")


class Special(CheckpointError):
    """A class the parent need not know."""


def tensor(world: World) -> Any:
    return torch.ones(1)


def listening(world: World) -> list[str]:
    """Local addresses, in /proc/net's hexadecimal, on which a socket of this rank, or of its launcher, listens."""
    dist.all_reduce(torch.ones(1))
    dist.new_group([0])
    world.barrier("all open")
    return [address for pid in (os.getpid(), os.getppid()) for address in sockets(pid)]


def sockets(pid: int) -> list[str]:
    """The listening TCP sockets of a process of ours."""
    held = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            held.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            for line in file.readlines()[1:]:
                part = line.split()
                if part[3] == "0A" and f"socket:[{part[9]}]" in held:
                    found.append(part[1].partition(":")[0])
    return found


def speak(world: World) -> None:
    print(f"rank {world.rank} speaks")
    print(f"rank {world.rank} complains", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_stop(world: World, folder: str) -> None:
    """Runs until SIGTERM, then leaves a file and ends."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    with open(f"{folder}/ready-{world.rank}", "w") as file:
        file.write(str(os.getpid()))
    while not stopped:
        time.sleep(0.02)
    with open(f"{folder}/saved-{world.rank}", "w") as file:
        file.write("saved")


def joined(rank: int, size: int, port: int, folder: str, fault: str = "") -> None:
    """Not under run_local: joins by environment variables, as a process that torchrun started, and reports in JSON."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    report: dict[str, Any] = {}
    world = join(1.5, "cpu")
    try:
        report["result"] = total(world)
        report["listening"] = sockets(os.getpid())
        steps(world, 5, fault)
    except Exception as error:
        report["error"] = world.explain(error).to_json()
        time.sleep(1.0)  # as a rank whose launcher has not ended the others yet
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(report, file)
    leave()


def told(case: str, local_rank: int, folder: str) -> None:
    """Rank 0 of three, told to end while its main thread is where Python handles no signals; it speaks to a file.

    gone: rank 1, of this machine, has ended and nobody has noticed.  quiet: it has begun to tell of its own failure.
    """
    os.dup2(os.open(f"{folder}/{case}-{local_rank}", os.O_WRONLY | os.O_CREAT), 2)
    own, other = Process.own(), subprocess.Popen(["sleep", "30"])
    peers = (own, Process(own.space, other.pid, _born(other.pid)), Process("another machine", 1, "1"))
    world = World(0, 3, local_rank, torch.device("cpu"), HashStore(), peers=peers)
    assert world.gone() == []
    with told_to_end(world) as quiet:
        if case == "gone":
            other.kill()
            while not world.gone():
                time.sleep(0.01)
        if case == "quiet":
            quiet()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        world.status(7)
        with world.waiting("all_reduce(gradients)"), contextlib.suppress(RuntimeError):
            HashStore().wait(["never"], timedelta(seconds=0.5 if case == "quiet" else 20))
        os.write(2, b"on its own\n")
    other.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def left(world: World) -> dict[str, Any]:
    """The threads of a rank that has left while it still holds a model and a heap, and what its group says then."""
    model = interlace.parallelize(torch.nn.Linear(3, 3))
    heap = SymmetricHeap(1 << 12)
    group = make_groups(Mesh((("dp", world.size),)), world.rank, torch.device("cpu"), 30)["dp"]
    model(torch.ones(1, 3)).sum().backward()
    leave()
    threads = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    try:
        all_reduce(torch.ones(1), group)
    except InterlaceError as error:
        said = error.message
    return {"gloo": [name for name in threads if "gloo" in name], "said": said, "rank": heap.rank}
