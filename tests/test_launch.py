"""Starting, watching and ending ranks: real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
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

from clock import limit
from interlace import world
from interlace.errors import CheckpointError, ConfigError, DataError, Hang, InterlaceError, PeerLost, ResourceError
from interlace.failure import names
from interlace.launch import run_local
from rank_functions_launch import free_port

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
    except (FileNotFoundError, ProcessLookupError):  # it may go between opening and reading
        return False


def children(pid: int) -> list[int]:
    """All living descendants of a process."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


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


@pytest.mark.alone
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
    assert time.monotonic() - died[0] < limit(2.0)
    assert caught.value.details["rank"] == 2
    assert caught.value.details["step"] > 0
    assert not [pid for pid in ranks if alive(pid)]


@pytest.mark.alone
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
    assert took < 1.5 + 1.0 + 3.5  # limit, promise, start
    assert error.details["odd"] == [1]
    places = {"frozen": "forward", "absent": "a long thought", "other": "broadcast(weights)"}
    operations = [row["operation"] for row in error.details["ranks"]]
    assert operations == ["all_reduce(gradients)", places[fault], "all_reduce(gradients)"]
    assert all(row["step"] == 3 and 1.0 < row["seconds"] < 4.0 for row in error.details["ranks"])
    assert re.search(
        r"\n  rank 0: at step 3 during all_reduce\(gradients\) \(tests/rank_functions_launch.py:\d+\) for ", str(error)
    )


@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("fault", "odd", "places"),
    [
        ("another operation", [2], {2: "at step 1 during broadcast of weights"}),
        ("left out", [1], {1: "at step 2 during nothing: finished"}),  # one gather behind the others to the end
        ("asleep", [3], {3: "at step 1 during a long thought"}),
        ("opposite order", [0, 1], {0: "at step 1 during sum in group 0", 1: "at step 1 during sum in group 1"}),
    ],
)
def test_a_mismatch_names_the_ranks_and_where_each_is(fault: str, odd: list[int], places: dict[int, str]) -> None:
    with pytest.raises(Hang) as caught:
        run_local(f"{FUNCTIONS}:mismatched", 4, {"fault": fault}, timeout=1.5)
    assert caught.value.details["odd"] == odd
    assert caught.value.exit_code == 4
    head, *lines = str(caught.value).splitlines()
    assert head.startswith(f"{names(odd)} did not come where {names([r for r in range(4) if r not in odd])} waited")
    elsewhere = "at step 2 during gather of sizes" if fault == "left out" else "at step 1 during gather of sizes"
    number = 6 if fault == "left out" else 4
    given = {"another operation": f"broadcast {number} along dp, float16 [2, 3], ", "opposite order": ""}
    for rank, line in enumerate(lines):
        assert line.startswith(f"  rank {rank}: {places.get(rank, elsewhere)} "), line
        if rank not in odd or fault in given:  # the others do not wait
            what = given[fault] if rank in odd else f"all_gather {number} along dp, float32 [4], "
            assert re.search(rf" \({re.escape(what)}tests/rank_functions_launch\.py:\d+\) for ", line), line


@pytest.mark.ranks
@pytest.mark.timeout(30)
@pytest.mark.parametrize("fault", ["larger", "smaller", "another type"])
def test_ranks_that_give_different_things_to_a_transfer_are_told_apart(fault: str) -> None:
    """gloo aborts one of them by chance; where that is the odd one, it may be too early to say what it gave."""
    with pytest.raises(PeerLost) as caught:
        run_local(f"{FUNCTIONS}:mismatched", 4, {"fault": fault}, timeout=5.0)
    head, *lines = str(caught.value).splitlines()
    assert re.search(r"was killed by SIGABRT .* since ranks gave different things to one transfer", head)
    assert len(lines) == 4
    others = [line for line in lines if "(all_gather 4 along dp, float32 [4], tests/rank_functions_launch.py:" in line]
    assert len(others) >= 2
    given = {"larger": "float32 [6]", "smaller": "float32 [2]", "another type": "float64 [4]"}[fault]
    if f"(all_gather 4 along dp, {given}, " in lines[2] and len(others) == 3:
        assert head.endswith(", since ranks gave different things to one transfer: rank 2 not what ranks 0, 1, 3 gave")
        assert caught.value.details["odd"] == [2]
    else:
        assert "aborted" in str(lines)


@pytest.mark.alone
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert str(world.choose_device("auto", 1, 2)) == "cpu"  # ranks of its own, of which one has no GPU
    monkeypatch.setenv("LOCAL_RANK", "1")  # a launcher's, to which a script has shown one
    assert str(world.choose_device("auto", 1, 2)) == "cuda:0"
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert str(world.choose_device("cuda", 3, 4)) == "cuda:0"


@pytest.mark.alone
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
            assert took < limit(2.0), f"after {name} the ranks lived for {took:.1f} s"
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
