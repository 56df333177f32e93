"""Starting, watching and ending ranks: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
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
from interlace.errors import CheckpointError, ConfigError, DataError, Hang, InterlaceError, PeerLost, ResourceError
from interlace.failure import Failure, Position, compose, describe, hang
from interlace.launch import run_local

FUNCTIONS = "rank_functions_launch"
UNGUARDED = f"""
import json, sys
with open(sys.argv[1] + "/main", "a") as file:
    file.write("x")  # a rank that imported the main module again would leave a second letter and start ranks itself
from interlace.launch import run_local
result = run_local("{FUNCTIONS}:total", 2, {{}})
with open(sys.argv[1] + "/result", "w") as file:
    json.dump(result, file)
"""
SIGNALLED = f"""
import json, os, sys
from interlace.launch import run_local
for name in ("SIGTERM", "SIGINT", "SIGKILL"):
    folder = os.path.join(sys.argv[1], name)
    os.mkdir(folder)
    def note(pids):
        with open(folder + "/pids", "w") as file:
            json.dump(pids, file)
    try:
        run_local("{FUNCTIONS}:wait_for_stop", 2, {{"folder": folder}}, on_start=note)
    except SystemExit as end:
        with open(sys.argv[1] + "/codes", "a") as file:
            file.write(f"{{end.code}} ")
"""


def until(true: Callable[[], Any], seconds: float = 30.0) -> float:
    """Wait for a condition; how long that took."""
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < seconds, "it never came true"
        time.sleep(0.01)
    return time.monotonic() - begin


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """All living descendants of a process."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and alive(int(name)):
            with open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fails(fault: str, size: int = 3, timeout: float = 20.0) -> tuple[InterlaceError, float]:
    """The error of a run in which rank 1 does something wrong, and the seconds the whole run took."""
    pids: list[int] = []
    begin = time.monotonic()
    with pytest.raises(InterlaceError) as caught:
        run_local(f"{FUNCTIONS}:steps", size, {"count": 5, "fault": fault}, timeout=timeout, on_start=pids.extend)
    took = time.monotonic() - begin
    assert len(pids) == size
    assert not [pid for pid in pids if alive(pid)], "a rank has outlived its run"
    return caught.value, took


# --- what goes well ---------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_by_rank(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLACE_TEST", f"set after the fork server began, {size}")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    results = run_local(f"{FUNCTIONS}:total", size, {"start": 1})
    assert [result["rank"] for result in results] == list(range(size))
    for result in results:
        assert result["sum"] == sum(range(1, size + 1))
        assert result["size"] == size
        assert result["device"] == "cpu"
        assert result["threads"] == 3
        assert result["variable"] == os.environ["INTERLACE_TEST"]
        assert result["main"] is None
    assert not [result for result in results if alive(result["pid"])]


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_threads_share_the_cores_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert [result["threads"] for result in run_local(f"{FUNCTIONS}:total", 2, {})] == [max(1, cores // 2)] * 2


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_two_runs_at_once_do_not_mix() -> None:
    # pytorch/pytorch#126510: two runs on one machine met on one default port.
    results: dict[int, list[Any]] = {}
    port = free_port()

    def run(start: int, port: int | None = None) -> None:
        results[start] = run_local(f"{FUNCTIONS}:total", 2, {"start": start}, port=port)

    threads = [threading.Thread(target=run, args=arguments) for arguments in ((0,), (1000,), (5000, port))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums = {start: [result["sum"] for result in found] for start, found in results.items()}
    assert sums == {0: [1.0] * 2, 1000: [2001.0] * 2, 5000: [10001.0] * 2}
    run(7, port)  # the port is free again
    assert results[7][0]["sum"] == 15.0


@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize("with_port", [False, True])
def test_nothing_listens_off_loopback(with_port: bool) -> None:
    pids: list[int] = []
    found = run_local(f"{FUNCTIONS}:listening", 2, {}, port=free_port() if with_port else None, on_start=pids.extend)
    for addresses in found:
        assert addresses, "gloo itself listens, so an empty list means that the test looks in the wrong place"
        assert {*addresses} == {"0100007F"}  # 127.0.0.1


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_a_store_on_a_port_listens_on_loopback_in_the_launcher() -> None:
    from rank_functions_launch import sockets

    seen: list[str] = []
    run_local(
        f"{FUNCTIONS}:total", 1, {}, port=(port := free_port()), on_start=lambda _: seen.extend(sockets(os.getpid()))
    )
    assert seen == ["0100007F"]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, used = tmp_path / "interlace-run-old", tmp_path / "interlace-run-used"
    for folder in (old, used):  # one of a launcher that was killed, one of a launcher that still runs
        folder.mkdir()
        (folder / "lock").touch()
        os.utime(folder, (1, 1))
    import fcntl

    with open(used / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_local(f"{FUNCTIONS}:total", 2, {})
        with pytest.raises(PeerLost):
            run_local(f"{FUNCTIONS}:steps", 2, {"count": 1, "fault": "raise", "at": 0})
    assert list(tmp_path.iterdir()) == [used]


# --- what goes wrong in a rank ----------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_an_exception_names_rank_step_and_operation() -> None:
    error, _ = fails("raise")
    assert type(error) is PeerLost
    assert str(error) == "rank 1 failed at step 3 during forward: ValueError: boom"
    assert error.details["rank"] == 1
    assert error.details["step"] == 3
    assert error.details["operation"] == "forward"
    assert "in misbehave" in error.details["traceback"]
    assert "Traceback" not in str(error)


@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("fault", "cls", "sentence"),
    [
        (
            "checkpoint",
            CheckpointError,
            "model.safetensors is cut off; load an older one (rank 1 at step 3 during forward)",
        ),
        ("data", DataError, "line 7 of a.jsonl is not JSON"),
        (
            "memory",
            ResourceError,
            "out of memory; try a smaller micro-batch or more ranks (rank 1 at step 3 during forward)",
        ),
    ],
)
def test_our_error_classes_cross_the_boundary(fault: str, cls: type[InterlaceError], sentence: str) -> None:
    error, _ = fails(fault)
    assert type(error) is cls
    assert str(error) == sentence
    assert (error.details["rank"], error.details["step"]) == (1, 3)
    if fault == "checkpoint":
        assert error.details["file"] == "model.safetensors"


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_a_class_only_the_rank_knows_and_a_result_that_is_not_json() -> None:
    with pytest.raises(CheckpointError, match="only this module knows"):
        run_local(f"{FUNCTIONS}:own_error", 1, {})
    with pytest.raises(PeerLost, match=r"rank 0 failed .* Tensor is not JSON"):
        run_local(f"{FUNCTIONS}:tensor", 1, {})
    with pytest.raises(PeerLost, match="no attribute 'missing'"):
        run_local(f"{FUNCTIONS}:missing", 1, {})


@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize(("fault", "how"), [("exit", "exited with status 0"), ("leave", "exited with status 0"),
                                            ("killed", "was killed by SIGKILL")])  # fmt: skip
def test_a_rank_that_goes_early_is_lost(fault: str, how: str) -> None:
    error, _ = fails(fault)
    assert type(error) is PeerLost
    assert f"{how} at step 3 during forward" in str(error)
    assert str(error).startswith("rank 1 (pid ")


@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize("frozen", [False, True])
def test_killed_in_the_middle_of_an_all_reduce(frozen: bool) -> None:
    # The survivors' "Connection closed by peer" comes first and must not win; nor may a stopped rank outlive the run.
    died: list[float] = []
    ranks: list[int] = []

    def start(pids: list[int]) -> None:
        ranks.extend(pids)

        def kill() -> None:
            time.sleep(1.0)
            if frozen:
                os.kill(pids[0], signal.SIGSTOP)
            os.kill(pids[2], signal.SIGKILL)
            died.append(time.monotonic())

        threading.Thread(target=kill).start()

    with pytest.raises(PeerLost, match=r"rank 2 \(pid \d+\) was killed by SIGKILL at step \d+ during") as caught:
        run_local(f"{FUNCTIONS}:steps", 3, {"count": 10**6, "pause": 0.001}, on_start=start)
    assert time.monotonic() - died[0] < 2.0
    assert caught.value.details["rank"] == 2
    assert caught.value.details["step"] > 0
    assert not [pid for pid in ranks if alive(pid)]


@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("fault", "head"),
    [
        ("frozen", "rank 1 is stopped by a signal; ranks 0, 2 waited longer than 1.5 s"),
        ("absent", "rank 1 did not come where ranks 0, 2 waited longer than 1.5 s"),
        ("other", "rank 1 did not come where ranks 0, 2 waited longer than 1.5 s"),  # pytorch/pytorch#78022
    ],
)
def test_a_hang_names_the_odd_one_out(fault: str, head: str) -> None:
    error, took = fails(fault, timeout=1.5)
    assert type(error) is Hang
    assert str(error).splitlines()[0] == head
    assert took < 1.5 + 1.0 + 1.5  # limit, promise, start
    assert error.details["odd"] == [1]
    places = {"frozen": "forward", "absent": "a long thought", "other": "broadcast(weights)"}
    operations = [row["operation"] for row in error.details["ranks"]]
    assert operations == ["all_reduce(gradients)", places[fault], "all_reduce(gradients)"]
    assert all(row["step"] == 3 and 1.0 < row["seconds"] < 4.0 for row in error.details["ranks"])
    assert "  rank 0: at step 3 during all_reduce(gradients) for " in str(error)


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_a_freeze_shorter_than_the_limit_is_survived() -> None:
    def start(pids: list[int]) -> None:
        def freeze() -> None:
            time.sleep(0.4)
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(pids[1], signal.SIGCONT)

        threading.Thread(target=freeze).start()

    begin = time.monotonic()
    assert run_local(f"{FUNCTIONS}:steps", 2, {"count": 60, "pause": 0.01}, timeout=5, on_start=start) == [60, 60]
    assert time.monotonic() - begin > 1.2, "the freeze came too late to matter"


# --- what goes wrong around it ----------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on 127.0.0.1 cannot be used") as caught:
            run_local(f"{FUNCTIONS}:total", 2, {}, port=port)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 7


def test_refusals_come_before_any_process() -> None:
    def never(pids: list[int]) -> None:
        raise AssertionError("a process was started")

    for target in ("nothing", "__main__:f", ":f", "module:"):
        with pytest.raises(ConfigError, match="module:function"):
            run_local(target, 1, {}, on_start=never)
    with pytest.raises(ConfigError, match="positive"):
        run_local(f"{FUNCTIONS}:total", 0, {}, on_start=never)
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        run_local(f"{FUNCTIONS}:total", 1, {}, device="cudda", on_start=never)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ResourceError, match="3 ranks on this machine need as many GPUs, 2 found"):
        run_local(f"{FUNCTIONS}:total", 3, {}, device="cuda")
    assert str(world.choose_device("auto", 1, 2)) == "cuda:1"
    assert str(world.choose_device("auto", 1, 3)) == "cpu"
    assert str(world.choose_device("cpu", 1, 2)) == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert str(world.choose_device("cuda", 3, 4)) == "cuda:0"


@pytest.mark.ranks
@pytest.mark.timeout(40)
def test_signals_to_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)]) as process:
        for name in (
            "SIGTERM",
            "SIGINT",
            "SIGKILL",
        ):  # one run for each; ranks here live through SIGTERM until they saved
            folder = tmp_path / name
            until(lambda folder=folder: len(list(folder.glob("ready-*"))) == 2 or process.poll() is not None)
            pids = json.loads((folder / "pids").read_text())
            family = children(process.pid)
            assert {*pids} < {*family}
            process.send_signal(getattr(signal, name))
            took = until(lambda pids=pids: not any(map(alive, pids)), 10.0)
            assert took < 2.0, f"after {name} the ranks lived for {took:.1f} s"
            assert len(list(folder.glob("saved-*"))) == (0 if name == "SIGKILL" else 2)
        until(lambda: not any(map(alive, family)), 10.0)  # the fork server too
    assert (tmp_path / "codes").read_text().split() == ["143", "130"]


@pytest.mark.ranks
@pytest.mark.timeout(40)
def test_the_main_module_runs_once_even_without_standard_streams(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, str(script), str(tmp_path)],
        timeout=30,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "main").read_text() == "x"
    assert [result["sum"] for result in json.loads((tmp_path / "result").read_text())] == [1.0, 1.0]


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_output_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerLost):
        run_local(f"{FUNCTIONS}:speak", 1, {})
    out, err = capfd.readouterr()
    assert out == "rank 0 speaks\n"
    assert err == "rank 0 complains\n"


# --- joining ----------------------------------------------------------------------------------------------------


def join_two(folder: Path, fault: str) -> list[dict[str, Any]]:
    import multiprocessing

    from rank_functions_launch import joined

    context, port = multiprocessing.get_context("forkserver"), free_port()
    processes = [context.Process(target=joined, args=(rank, 2, port, str(folder), fault)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        process.close()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_join_by_environment(tmp_path: Path) -> None:
    reports = join_two(tmp_path, "")
    for report in reports:
        assert "error" not in report
        assert report["result"]["sum"] == 1.0
        assert {*report["listening"]} == {"0100007F"}


@pytest.mark.ranks
@pytest.mark.timeout(30)
def test_joined_ranks_explain_each_other(tmp_path: Path) -> None:
    first, second = (report["error"] for report in join_two(tmp_path, "raise"))
    assert second["message"] == "rank 1 failed at step 3 during forward: ValueError: boom"
    assert first["message"] == f"stopped because {second['message']}"
    assert first["exit_code"] == second["exit_code"] == 3


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


def sign_in(ranks: list[tuple[int, int]], limit: float) -> dict[int, InterlaceError | None]:
    """What `arrive` says to ranks given as (rank, world size), one thread each over one store."""
    import torch
    from torch.distributed import HashStore

    store, said = HashStore(), dict[int, InterlaceError | None]()

    def one(index: int, rank: int, size: int) -> None:
        try:
            world.arrive(world.World(rank, size, rank, torch.device("cpu"), store, 5.0), limit)
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
    late = sign_in([(0, 2), (1, 2), (2, 3)], 5)
    assert (late[0], late[1]) == (None, None)
    assert "WORLD_SIZE is 2 on rank 0 but 3 on rank 2" in str(late[2])
    twice = [error for error in sign_in([(0, 2), (0, 2), (1, 2)], 5).values() if error is not None]
    assert len(twice) == 1
    assert f"rank 0 is already taken by pid {os.getpid()}" in str(twice[0])


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[003-007,12]", "gpu003"), ("a1,b2", "a1"), ("login", "login"), ("n[7,9]-ib", "n7-ib")],
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


def test_a_broken_environment_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert not launch.under_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not"):
        launch.under_launcher()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "ten")
    with pytest.raises(ConfigError, match="'ten'"):
        launch.under_launcher()
    monkeypatch.setenv("MASTER_PORT", "10")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="rank 2 does not exist in a world of 2"):
        launch.under_launcher()


# --- words ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Connection closed by peer"), "cause"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"), "consequence"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "timeout"),
        (RuntimeError("my own request timed out"), "cause"),
        (RuntimeError("CUDA out of memory in NCCL"), "cause"),
        (ConnectionResetError(), "consequence"),
        (PeerLost("rank 3 is gone"), "consequence"),
        (Hang("nobody came"), "timeout"),
        (DataError("line 1"), "cause"),
    ],
)
def test_causes_and_consequences(error: Exception, kind: str) -> None:
    assert describe(error, 0, Position()).kind == kind
    outer, handled = KeyError("raised from it"), KeyError("raised while it was handled")
    outer.__cause__, handled.__context__ = error, error
    assert describe(outer, 0, Position()).kind == describe(handled, 0, Position()).kind == kind


def test_details_of_any_name_survive() -> None:
    given = ConfigError("no")
    given.details = {"message": "kept", "cls": [7]}
    failure = describe(given, 1, Position(2, "load"))
    error = compose(Failure(**json.loads(json.dumps(failure.__dict__))))
    assert type(error) is ConfigError
    assert error.details["message"] == "kept"
    assert error.details["step"] == 2


@pytest.mark.parametrize(
    ("places", "stopped", "odd", "head"),
    [
        ([("a", 1, True), ("a", 1, True), ("b", 1, True)], (), [2], "rank 2 did not come where ranks 0, 1 waited"),
        ([("a", 5, True), ("a", 4, True), ("a", 5, True)], (), [1], "rank 1 did not come where ranks 0, 2 waited"),
        ([("a", 1, True), ("b", 1, True)], (), [], "the ranks waited longer than 3 s for each other in different"),
        ([("a", 1, True), ("a", 1, True)], (), [], "every rank waited longer than 3 s in the same operation"),
        ([("a", 1, True), ("a", 1, True)], (1,), [1], "rank 1 is stopped by a signal; rank 0 waited"),
        ([("a", 1, True), ("a", 1, True)], (0, 1), [0, 1], "ranks 0, 1 are stopped by a signal for longer"),
        ([("a", 1, False), ("a", 1, True), ("c", 0, False)], (), [0, 2], "ranks 0, 2 did not come where rank 1"),
        ([("a", 1, False), ("a", 1, True), ("c", 0, False)], (2,), [2], "rank 2 is stopped by a signal; rank 1"),
    ],
)
def test_the_odd_one_out(
    places: list[tuple[str, int, bool]], stopped: tuple[int, ...], odd: list[int], head: str
) -> None:
    now = time.monotonic()
    at = {rank: Position(9, op, now - 3, waits, count) for rank, (op, count, waits) in enumerate(places)}
    error = hang(at, 3.0, stopped)
    assert error.details["odd"] == odd
    assert str(error).startswith(head)
    assert len(str(error).splitlines()) == 1 + len(places)
