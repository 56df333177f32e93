"""A rank's place in the world, joining it, and the mark of where it is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlace import launch, world
from interlace.errors import ConfigError, Hang, InterlaceError, ResourceError
from interlace.failure import Position
from rank_functions_launch import free_port, joined, told

FUNCTIONS = "rank_functions_launch"


def join_two(folder: Path, fault: str) -> list[dict[str, Any]]:
    import multiprocessing

    context, port = multiprocessing.get_context("forkserver"), free_port()
    processes = [context.Process(target=joined, args=(rank, 2, port, str(folder), fault)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        process.close()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_join_by_environment(tmp_path: Path) -> None:
    reports = join_two(tmp_path, "")
    for report in reports:
        assert "error" not in report
        assert report["result"]["sum"] == 1.0
        assert {*report["listening"]} == {"0100007F"}


@pytest.mark.ranks
def test_leaving_ends_the_threads_of_groups_that_are_still_held(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, report in enumerate(run_ranks(f"{FUNCTIONS}:left", 2)):
        said = "the process group of axis dp is gone: this process has left its world"
        assert report == {"gloo": [], "said": said, "rank": rank}


@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_joined_ranks_explain_each_other(tmp_path: Path) -> None:
    first, second = (report["error"] for report in join_two(tmp_path, "raise"))
    assert second["message"] == "rank 1 failed at step 3 during forward: ValueError: boom"
    assert first["message"] == f"stopped because {second['message']}"
    assert first["exit_code"] == second["exit_code"] == 3


@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_joined_ranks_report_a_hang(tmp_path: Path) -> None:
    first, second = (report["error"] for report in join_two(tmp_path, "other"))
    for error in (first, second):
        assert error["error"] == "Hang"
        operations = {row["operation"] for row in error["details"]["ranks"]}
        assert operations == {"all_reduce(gradients)", "broadcast(weights)"}


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "from interlace.launch import join, leave, under_launcher\n"
        f"from {FUNCTIONS} import total\n"
        "assert under_launcher()\n"
        "world = join(20, 'cpu')\n"
        "result = total(world, 10)\n"
        "with open(os.path.join(sys.argv[1], f'{world.rank}.json'), 'w') as file:\n"
        "    json.dump(result, file)\n"
        "leave()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text())["sum"] for rank in range(2)] == [21.0, 21.0]


@pytest.mark.ranks
@pytest.mark.timeout(40)
def test_a_rank_told_to_end_says_where_it_was_even_from_inside_a_wait(tmp_path: Path) -> None:
    """One line and an end of its own; nothing where the rank has begun to tell of a failure itself."""
    import multiprocessing

    context, ends = multiprocessing.get_context("forkserver"), dict[str, tuple[str, int | None]]()
    jobs = [("gone", 1), ("alive", 0), ("alive", 1), ("quiet", 0)]
    processes = [context.Process(target=told, args=(*job, str(tmp_path))) for job in jobs]
    for process in processes:
        process.start()
    for (case, local), process in zip(jobs, processes, strict=True):
        process.join()
        ends[f"{case} {local}"] = ((tmp_path / f"{case}-{local}").read_text(), process.exitcode)
        process.close()
    place = "interlace: rank 0 was told to end (SIGTERM) at step 7 during all_reduce(gradients); "
    line, code = ends["gone 1"]
    assert re.fullmatch(rf"{re.escape(place)}rank 1 \(pid \d+\) had ended before \[ILC-3001\]\n", line), line
    assert code == 143
    assert ends["alive 0"] == (f"{place}none of this machine had ended before [ILC-3001]\n", 143)
    assert ends["alive 1"] == ("", 143)
    assert ends["quiet 0"] == ("on its own\n", 0)


def test_a_process_that_is_gone_is_no_other_of_its_number() -> None:
    own = world.Process.own()
    assert own.lives()
    assert not world.Process(own.space, own.pid, "1").lives()
    assert world.Process("", own.pid, "1").lives()  # where nothing can be seen, nothing is said


def place(rank: int, host: str, port: int, local: int = 1) -> world.Place:
    return world.Place(rank, 2, rank if local == 2 else 0, local, host, port)


@pytest.mark.parametrize(
    ("rank", "host", "local", "found", "said"),
    [
        (1, "127.0.0.1", 1, None, "that host answers but nothing listens on the port; start rank 0 there, or set MAST"),
        (1, "far", 2, None, r"at 127\.0\.0\.1:\d+ for 0\.3 s, on this machine as all ranks are, and nothing listens"),
        (1, "no.such.host.", 1, socket.gaierror(-2, "Name or service not known"), "no host of that name is known; set"),
        (1, "10.1.2.3", 1, TimeoutError("timed out"), r"at 10\.1\.2\.3:\d+ .* no answer \(timed out\); set MASTER"),
        (1, "10.1.2.3", 1, OSError(113, "No route to host"), r"got no answer \(No route to host\); set MASTER_ADDR"),
        (0, "10.1.2.3", 1, ConnectionRefusedError(111, "Connection refused"), "that is another host; set MASTER_ADDR"),
    ],
)  # fmt: skip
def test_an_address_where_no_store_is(
    rank: int, host: str, local: int, found: OSError | None, said: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One sentence and not a word of C++: what was asked, what was found, what to change."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if found is not None:
        error = found

        def refuse(*args: object) -> None:
            raise error

        monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(Hang, match=said) as caught:
        world._open_store(place(rank, host, free_port(), local), 0.3)
    assert f"rank {rank} asked for the store of rank 0 at " in caught.value.message
    assert "\n" not in caught.value.message
    assert capfd.readouterr().err == ""


@pytest.mark.timeout(30)
def test_an_address_where_something_else_listens(capfd: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.1)
        port = other.getsockname()[1]

        def answer() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError), other.accept()[0] as one:
                    one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(Hang, match=rf"answered at 127\.0\.0\.1:{port}, but not by the ranks' store"):
                world._open_store(place(1, "127.0.0.1", port), 1.0)
        finally:
            over.set()
            thread.join()
    assert capfd.readouterr().err == ""
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


@pytest.mark.timeout(20)
def test_a_store_off_loopback_is_found_by_a_rank_that_comes_first() -> None:
    port, stores = free_port(), dict[int, Any]()
    threads = [
        threading.Thread(
            target=lambda rank=rank: stores.update({rank: world._open_store(place(rank, "localhost", port), 10)})
        )
        for rank in (1, 0)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    stores[0].set("said", "by rank 0")
    assert stores[1].get("said") == b"by rank 0"
    with pytest.raises(ResourceError, match=f"port {port} cannot be used .*; choose another MASTER_PORT"):
        world._open_store(place(0, "localhost", port), 1.0)


@pytest.mark.timeout(20)
def test_alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    assert not launch.under_launcher()
    alone = launch.join(5, "cpu")
    try:
        value = torch.ones(2)
        torch.distributed.all_reduce(value)
        alone.barrier("alone")
        assert value.tolist() == [1.0, 1.0]
        assert (alone.rank, alone.size, alone.local_rank) == (0, 1, 0)
    finally:
        launch.leave()
    launch.leave()
    assert not torch.distributed.is_initialized()


def sign_in(
    ranks: list[tuple[int, int]], limit: float, same: list[dict[str, str]] | None = None
) -> dict[int, InterlaceError | None]:
    """What `arrive` says to ranks given as (rank, world size), one thread each over one store."""
    import torch
    from torch.distributed import HashStore

    store, said = HashStore(), dict[int, InterlaceError | None]()

    def one(index: int, rank: int, size: int) -> None:
        try:
            alike = None if same is None else same[index]
            world.arrive(world.World(rank, size, rank, torch.device("cpu"), store, 5.0), limit, same=alike)
            said[index] = None
        except InterlaceError as error:
            said[index] = error

    threads = [threading.Thread(target=one, args=(index, *rank)) for index, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    return said


@pytest.mark.timeout(20)
def test_arrival_names_what_is_wrong() -> None:
    assert {*sign_in([(2, 3), (0, 3), (1, 3)], 5).values()} == {None}
    for error in sign_in([(0, 4), (1, 4), (3, 4)], 0.3).values():
        assert type(error) is Hang
        assert str(error) == "ranks missing: [2] of 4 did not arrive within 0.3 s"
    for error in sign_in([(0, 3), (1, 2)], 5).values():
        assert type(error) is ConfigError
        assert "WORLD_SIZE is 3 on rank 0 but 2 on rank 1" in str(error)
    assert {*sign_in([(1, 2), (0, 2)], 5, [{"a": "1"}, {"a": "1"}]).values()} == {None}
    for error in sign_in([(0, 3), (1, 3), (2, 3)], 5, [{"a": "1"}, {"a": "1"}, {"a": "2"}]).values():
        assert type(error) is ConfigError
        assert str(error) == "the ranks disagree: a is '1' on rank 0 but '2' on rank 2; start all of them alike"
    late = sign_in([(0, 2), (1, 2), (2, 3)], 5)
    assert (late[0], late[1]) == (None, None)
    assert "WORLD_SIZE is 2 on rank 0 but 3 on rank 2" in str(late[2])
    twice = [error for error in sign_in([(0, 2), (0, 2), (1, 2)], 5).values() if error is not None]
    assert len(twice) == 1
    assert f"rank 0 is already taken by pid {os.getpid()}" in str(twice[0])


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[003-007,12]", "gpu003"),
        ("a1,b2", "a1"),
        ("login", "login"),
        ("n[7,9]-ib", "n7-ib"),
        ("rack[1-2]node[03-04],x1", "rack1node03"),
    ],
)
def test_slurm_places(nodes: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2",
              "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_ID": "77",
              "SLURM_STEP_NODELIST": nodes}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    place = world.find_place()
    assert place == world.Place(5, 16, 1, 8, host, 20000 + (31 * 77 + 2))
    monkeypatch.delenv("SLURM_STEP_ID")  # a batch script is not a rank, whatever its SLURM_PROCID
    assert world.find_place() is None


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "n[1-3]"}  # fmt: skip


@pytest.mark.parametrize(
    ("node", "tasks", "count"), [("0", "3(x2),1", 3), ("2", "3(x2),1", 1), ("1", "2,4,1", 4), ("3", "2,4,1", 0)]
)
def test_tasks_of_a_slurm_node(node: str, tasks: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (STEP | {"SLURM_NODEID": node, "SLURM_TASKS_PER_NODE": tasks}).items():
        monkeypatch.setenv(name, value)
    place = world.find_place()
    assert place is not None
    assert place.local_size == count


def test_a_slurm_step_of_one_task_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).items():
        monkeypatch.setenv(name, value)
    assert world.find_place() is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST names no node; set MASTER_ADDR"),
        ({"SLURM_TASKS_PER_NODE": "two"}, 'numbers as in "8\\(x2\\),4", found "two"'),
        ({"SLURM_PROCID": "7"}, "rank 7 does not exist in a world of 7; check SLURM_PROCID and SLURM_STEP_NUM_TASKS"),
        ({"SLURM_LOCALID": "x"}, "no number in SLURM_LOCALID=x"),
    ],
)
def test_a_broken_step_of_slurm_is_explained(
    change: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (STEP | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        world.find_place()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_a_launcher_that_is_not_known_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes would start all ranks."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=rf"{name} is 4, .* start them with torchrun or srun"):
        world.find_place()
    monkeypatch.setenv(name, "1")
    assert world.find_place() is None


def test_a_broken_environment_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="RANK is set but WORLD_SIZE is not"):
        launch.under_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not"):
        launch.under_launcher()
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not"):
        launch.under_launcher()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "ten")
    with pytest.raises(ConfigError, match="no number in MASTER_PORT=ten"):
        launch.under_launcher()
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        launch.under_launcher()
    monkeypatch.setenv("MASTER_PORT", "10")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="rank 2 does not exist in a world of 2"):
        launch.under_launcher()
    monkeypatch.setenv("RANK", "1")
    for local_rank, local_size in ((3, 2), (2, 2), (-1, 2), (0, 3)):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
        with pytest.raises(ConfigError, match=f"rank {local_rank} of {local_size} on this machine.*check LOCAL_RANK"):
            launch.under_launcher()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launch.under_launcher()


def test_status_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_bytes(bytes(world.Status.SIZE))
    writer, reader = world.Status(str(path)), world.Status(str(path))
    assert reader.read() == Position()
    for at in (Position(0, "forward", 1.5, False, 0), Position(None, "ü" * 100, 2.5, True, 2**40)):
        writer.write(at)
        assert reader.read() == at
    writer.write(Position(1, "é" * 101 + "x"))
    assert reader.read().operation == "é" * 100


def test_status_is_never_read_half_written(tmp_path: Path) -> None:
    """Moments just below and above 8192 s differ in every byte; a mixture of the two is far from both."""
    path = tmp_path / "status"
    path.write_bytes(bytes(world.Status.SIZE))
    writer, reader = world.Status(str(path)), world.Status(str(path))
    moments = (8191.999999, 8192.000001)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for moment in moments:
                writer.write(Position(3, "op", moment, moment > 8192, 7))

    writer.write(Position(3, "op", moments[0], False, 7))
    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = {(at.since, at.waiting) for at in (reader.read() for _ in range(3000))}
    finally:
        stop.set()
        thread.join()
    assert seen <= {(moments[0], False), (moments[1], True)}


def test_waiting_marks_and_unmarks() -> None:
    import torch
    from torch.distributed import HashStore

    here = world.World(0, 1, 0, torch.device("cpu"), HashStore())
    here.status(4, "forward")
    with here.waiting("outer"), here.waiting("inner"):
        assert here.mark.read() == here.mark.last
        assert (here.mark.last.operation, here.mark.last.waiting, here.mark.last.waits) == ("inner", True, 2)
    assert (here.mark.last.step, here.mark.last.operation, here.mark.last.waiting) == (4, "forward", False)
    with pytest.raises(KeyError), here.waiting("all_gather(x)"):
        raise KeyError
    assert here.mark.last.where() == "at step 4 during all_gather(x)"
