"""What a user types and reads: every refusal is one sentence, every failure one message, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

import runs
from clock import limit
from interlace.cli import app
from interlace.cli.failures import said_once
from interlace.cli.train import alike
from interlace.config import ParallelPlan
from interlace.errors import ConfigError
from interlace.launch import run_local
from interlace.train import loop
from interlace.world import Place
from test_launch import alive, children, free_port, until

COMMAND = ("-m", "interlace")
WORDS = {"COLUMNS": "200", "TERM": "dumb"}


def interlace(*words: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, list(words), env=WORDS)


def start(folder: Path, *words: str, command: tuple[str, ...] = COMMAND) -> subprocess.Popen[str]:
    """The command as a process."""
    pipe, env = subprocess.PIPE, {**os.environ, **WORDS}
    return subprocess.Popen(
        [sys.executable, *command, *words], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True
    )


def sentence(result: Result, code: int) -> str:
    """The one line that a refused command says."""
    assert result.exit_code == code, (result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    return lines[0]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A run file for two ranks."""
    (tmp_path / "run.toml").write_text(runs.toml(tmp_path, "dp=2 zero=3"))
    return str(tmp_path / "run.toml")


# --- refused before any process starts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "train.stepz=5"], r"unknown key stepz in \[train\] of .*: did you mean steps\?"),
        (["--set", "trian.steps=5"], r"unknown section trian .*: did you mean train\?"),
        (["--set", "steps=5"], r"write SECTION.KEY=VALUE"),
        (["--set", "run.steps=5"], r"it belongs to \[train\]"),
        (["--set", f"run.out={'a' * 300}"], r"aaa\.\.\. \(\d+ characters\) is too long for the name of a file here"),
        (["--set", "train.steps=many"], r"train.steps must be .*, found .*many"),
        (["--set", "train.steps=0"], r"train.steps must be an integer of at least 1, found 0"),
        (["--set", "model.preset=tinny"], r"unknown preset tinny .*: did you mean tiny\?"),
        (["--set", "model.num_kv_heads=3"], r"model.num_kv_heads must divide num_heads 4, found 3: nearest is (2|4)"),
        (["--set", "data.sequence_length=4096"], r"above model.max_positions 2048: nearest is .*=2048"),
        (["--set", "run.reproducible=plan", "--parallel", "dp=2 micro_batches=2"], r"give that instead: .*\"dp=2\""),
        (["--set", "run.reproducible=plan", "--set", "train.reduce_dtype=bf16"], r"nearest is .*reduce_dtype=.fp32"),
        (["--parallel", "dp=2 zer=3"], r"unknown key zer in the parallel plan .*: did you mean zero\?"),
        (["--parallel", "dp=2 zero=4"], r"zero must be one of 0, 1, 2, 3, found 4"),
        (["--parallel", "dp=two"], r"dp must be .*, found .*two"),
        (["--parallel", "dp=2 ep=2"], r"asks for ep=2, and the model has no experts: the nearest that works is .dp=2"),
        (["--parallel", "tp=3"], r"tp=3, which does not divide the model's 4 heads \(tp is 1, 2 or 4\): .* .dp=3"),
        (["--parallel", "dp=4 shard=3"], r"shard=3, which does not divide dp=4: the nearest that works is \"dp=4\""),
        (["--parallel", "dp=2 micro_batches=5"], r"asks for 5 micro-batches, found 4 .*: the nearest that works is"),
        (["--set", "model.ffn_size=1000000000"], r"needs [\d.]+ GiB a rank .*found .*GiB"),
        (["--device", "gpu"], r"device 'gpu' is unknown; did you mean 'cpu'"),
        (["--resume", "nowhere"], r"--resume nowhere: no such folder"),
    ],
)  # fmt: skip
def test_one_sentence_names_what_to_change(words: list[str], said: str, file: str, tmp_path: Path) -> None:
    line = sentence(interlace("train", file, *words), 6 if "--resume" in words else 2)
    assert re.search(said, line), line
    assert re.search(r"\[ILC-\d{4}\]$", line)
    assert not (tmp_path / "run").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"cannot read run file .*run.toml: no such file"),
        ("[train]\nsteps = \n", r"run.toml, line 2"),
        ("[modle]\n", r"unknown section modle in .*run.toml: did you mean model\?"),
        ("[model]\n", r"\[model\] is empty"),
        ("[model]\nfrom = 'gone'\n", r"gone"),
        ('[model]\npreset = "tiny"\n[parallel]\ndp = 2\n', r'write plan = "dp=VALUE"'),
        ('[model]\npreset = "tiny"\n[data]\nsource = "gone.txt"\n', r"gone.txt"),
        ("\xff", r"UTF-8"),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify", "data"])
def test_a_run_file_that_cannot_be_read(text: str | None, said: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    if text and "source" in text and command != "data":
        return  # found by the ranks: test_a_failure_at_set_up
    assert re.search(said, sentence(interlace(command, str(path), "--set", f"run.out={tmp_path}/o"), 2))


def test_a_folder_with_checkpoints_is_not_written_over(file: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step-9", "step-10", "step-11.abc-0.tmp"):
        (checkpoints / name).mkdir(parents=True)
    line = sentence(interlace("train", file), 2)
    assert "run already holds checkpoints (step-10); go on with --resume auto, or " in line
    assert f"--set run.out={tmp_path}/run-2" in line
    assert "is valid" in sentence(interlace("train", file, "--resume", "auto"), 6)  # neither has a manifest
    assert "is missing" in sentence(interlace("train", file, "--resume", str(checkpoints / "step-9")), 6)


def test_a_resumed_run_does_not_mix_with_another(tmp_path: Path) -> None:
    for out in ("a", "b"):
        loop.run(runs.alone(), runs.config(tmp_path, out=out).to_toml())
    (tmp_path / "run.toml").write_text(runs.toml(tmp_path, out="a"))
    words = ["train", str(tmp_path / "run.toml"), "--set", "train.steps=9"]
    assert "a already holds checkpoints (step-3)" in sentence(interlace(*words, "--resume", f"{tmp_path}/b"), 2)
    different = [*words, "--set", "model.ffn_size=8", "--resume", "auto"]
    assert "holds another model: ffn_size (24 saved, 8 asked)" in sentence(interlace(*different), 6)
    assert not (tmp_path / "a" / "error.json").exists()


def test_usage_without_a_command_and_a_misspelt_one() -> None:
    assert "verify" in interlace("--help").stdout
    assert interlace("trian").exit_code == 2
    assert interlace("train", "--reusme", "auto").exit_code == 2


@pytest.mark.parametrize(("steps", "said"), [("3:3", "write A:B"), ("x", "write A:B"), ("-1:2", "write A:B")])
def test_steps_that_are_no_range(steps: str, said: str, file: str) -> None:
    assert said in sentence(interlace("data", file, f"--steps={steps}"), 2)


# --- interlace data --------------------------------------------------------------------------------------------------


def test_data_is_the_same_for_every_plan(tmp_path: Path) -> None:
    found = []
    for plan in ("dp=1", "dp=4 zero=3", "dp=3 micro_batches=2"):
        (tmp_path / "run.toml").write_text(runs.toml(tmp_path, plan))
        result = interlace("data", str(tmp_path / "run.toml"), "--steps", "1:3")
        assert result.exit_code == 0
        found.append(result.stdout)
    assert found[0] == found[1] == found[2]
    rows = [json.loads(line) for line in found[0].splitlines()]
    assert [(row["step"], row["index"]) for row in rows] == [(s, i) for s in (1, 2) for i in range(8)]
    for row in rows:
        assert list(row) == ["step", "index", "tokens", "labels", "positions", "documents"]
        for here, label, position in zip(row["tokens"][1:], row["labels"], row["positions"][1:], strict=False):
            assert label == (here if position else -100)  # the next token, unless a document begins there
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "bad", [b'{"text": "cut', b'["text"]', b'{"txt": "a"}', b'{"text": ""}', b'{"text": "\xff"}', b'{"text": 3}']
)
def test_a_bad_line_is_named_by_file_and_line(bad: bytes, file: str, tmp_path: Path) -> None:
    """facebookresearch/metaseq#212: blank lines count."""
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n\n' + bad + b"\n")
    source = ["--set", f"data.source={tmp_path}/bad.jsonl"]
    assert f"{tmp_path}/bad.jsonl:3: " in sentence(interlace("data", file, *source), 2)
    result = interlace("data", file, *source, "--set", "data.skip_bad_lines=true")
    assert result.exit_code == 0
    assert "1 skipped" in result.stderr


def test_a_closed_pipe_is_no_failure(file: str, tmp_path: Path) -> None:
    with start(tmp_path, "data", file, "--steps", "0:200") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, "Traceback" in said, "Broken" in said) == (0, False, False)


# --- runs ------------------------------------------------------------------------------------------------------------


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "interlace")


@pytest.mark.ranks
def test_runs_at_once_and_those_of_torchrun_give_the_same(file: str, tmp_path: Path) -> None:
    """meta-pytorch/torchtune#392: no default port to fight for."""
    starts = {"a": COMMAND, "b": TORCHRUN}
    processes = [
        start(tmp_path, "train", file, "--set", f"run.out={tmp_path}/{out}", command=command)
        for out, command in starts.items()
    ]
    for process in processes:
        out, err = process.communicate(timeout=110)
        assert process.returncode == 0, err
        assert (out, err.count("plan: dp=2 zero=3 on 2 ranks (cpu)\n"), err.count("step 3/3")) == ("", 1, 1)
    losses = [runs.losses(runs.config(tmp_path, out=out)) for out in starts]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


@pytest.mark.ranks
def test_of_torchruns_ranks_the_killed_one_is_named_by_those_left(file: str, tmp_path: Path) -> None:
    """In a line of ours, however soon torchrun ends them too; and the folder keeps it."""
    process = start(tmp_path, "train", file, "--set", "train.steps=100000", command=TORCHRUN)
    rows, pids = tmp_path / "run" / "metrics.jsonl", dict[str, int]()
    while process.poll() is None and not (rows.exists() and rows.stat().st_size and len(pids) == 2):
        time.sleep(0.05)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            held = dict(each.partition("=")[::2] for each in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            pids |= {held["RANK"]: int(pid)} if "RANK" in held else {}
    os.kill(pids["1"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines() if line.startswith("interlace: rank")]
    found = (
        rf"interlace: rank 1 \(pid {pids['1']}\) ended without a word, as rank 0 found at step \d+ during .+ILC-3001\]"
    )
    told = (
        rf"interlace: rank 0 was told to end .+ at step \d+.*; rank 1 \(pid {pids['1']}\) had ended before \[ILC-3001\]"
    )
    assert len(lines) == 1, err
    assert re.fullmatch(f"{found}|{told}", lines[0]), lines
    if "without a word" in lines[0]:
        kept = json.loads((tmp_path / "run" / "error.json").read_text())
        assert (kept["error"], kept["details"]["rank"]) == ("PeerLost", 1)


@pytest.mark.ranks
def test_more_ranks_than_memory_holds_processes(file: str) -> None:
    line = sentence(interlace("train", file, "--parallel", "dp=100000", "--set", "train.global_batch=100000"), 7)
    assert re.search(r"100000 ranks on this machine of [\d.]+ GiB free memory, .* use at most \d+ here", line)


def test_a_silent_rank_lets_the_first_one_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends all ranks as soon as it sees that one has ended."""
    waited: list[float] = []
    monkeypatch.setattr("interlace.cli.failures.time.sleep", waited.append)
    for rank in (0, 1):
        with pytest.raises((ConfigError, typer.Exit)) as caught, said_once(Place(rank, 2, rank, 2, "localhost", 1)):
            raise ConfigError("no such key")
        assert isinstance(caught.value, ConfigError) == (rank == 0)
    assert waited == [1.0]


def test_torchrun_says_a_refusal_once(file: str, tmp_path: Path) -> None:
    process = start(tmp_path, "train", file, "--parallel", "dp=3", command=TORCHRUN)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.count('interlace: the parallel plan "dp=3" needs 3 ranks, found 2') == 1


@pytest.mark.ranks
def test_ranks_of_other_run_files_are_refused(file: str, tmp_path: Path) -> None:
    """They trained on, each at its own rate."""
    script = tmp_path / "start.sh"
    other = "--set train.learning_rate=0.5"
    script.write_text(f'[ "$RANK" = 0 ] || set -- "$@" {other}\nexec {sys.executable} -m interlace "$@"\n')
    command = (*TORCHRUN[:-2], "--no-python", "sh", str(script))
    process = start(tmp_path, "train", file, "--set", "train.learning_rate=0.25", command=command)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    said = "the ranks disagree: train.learning_rate is '0.25' on rank 0 but '0.5' on rank 1; start all of them alike"
    assert f"interlace: {said} [ILC-2001]\n" in err


def test_every_key_of_a_run_is_compared_but_where_its_data_lie(tmp_path: Path) -> None:
    cfg = runs.config(tmp_path)
    keys = {name.partition(".")[0]: name for name in alike(cfg)}
    assert set(keys) == {"model", "data", "train", "run", "parallel"}
    assert alike(replace(cfg, data=replace(cfg.data, source="elsewhere"))) == alike(cfg)
    for section, change in (("train", {"clip": 0.5}), ("run", {"seed": 7}), ("data", {"shuffle": False}),
                            ("plan", {"zero": 2})):  # fmt: skip
        assert alike(replace(cfg, **{section: replace(getattr(cfg, section), **change)})) != alike(cfg)
    for name, content in (("a.csv", "0F0 0B0"), ("b.csv", "0F0 0B0"), ("c.csv", "0B0 0F0")):
        (tmp_path / name).write_text(content)
    first, same, other = (
        alike(replace(cfg, plan=ParallelPlan(pp=2, schedule=str(tmp_path / name))))
        for name in ("a.csv", "b.csv", "c.csv")
    )
    assert first == same != other


@pytest.mark.ranks
def test_a_port_that_is_taken_is_named(file: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = sentence(interlace("train", file, "--port", str(port)), 7)
        assert f"port {port} on 127.0.0.1 cannot be used" in line
    result = interlace("train", file, "--port", str(free_port()))
    assert result.exit_code == 0, result.output


@pytest.mark.ranks
def test_a_failure_at_set_up_is_said_once_and_kept(file: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    line = sentence(interlace("train", file, "--set", f"data.source={tmp_path}/bad.jsonl"), 2)
    assert "bad.jsonl:2: " in line
    kept = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (kept["error"], kept["exit_code"]) == ("DataError", 2)
    assert kept["message"] in line
    again = interlace("train", file)
    assert again.exit_code == 0, again.output
    assert not (tmp_path / "run" / "error.json").exists()


@pytest.mark.ranks
def test_numbers_that_are_none_end_a_run_with_5(file: str, tmp_path: Path) -> None:
    words = ["train.optimizer=sgd", "train.learning_rate=1e12", "train.weight_decay=1e12", "train.lr_schedule=constant"]
    result = interlace("train", file, *(word for each in words for word in ("--set", each)))
    assert result.exit_code == 5
    assert "interlace: step 2: the loss is" in result.stderr
    assert json.loads((tmp_path / "run" / "error.json").read_text())["code"] == "ILC-5001"


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Processes of the fork server below the command."""
    found = children(process.pid)
    server = [pid for pid in found if any(child in found for child in children(pid))]
    return [pid for pid in found if server and pid in children(server[0])]


def under_way(file: str, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A long run that has made some steps, and all processes below it."""
    process = start(folder, "train", file, "--set", "train.steps=100000", "--set", "run.save_every=3")
    metrics = folder / "run" / "metrics.jsonl"
    until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 4), 60)
    assert process.poll() is None, process.communicate()
    below = children(process.pid)
    assert len(ranks_of(process)) == 2
    return process, below


@pytest.mark.alone
@pytest.mark.ranks
def test_a_killed_rank_ends_the_run_within_two_seconds(file: str, tmp_path: Path) -> None:
    process, below = under_way(file, tmp_path)
    victim = ranks_of(process)[1]
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < limit(2.0)
    assert process.returncode == 3
    said = [line for line in err.splitlines() if line.startswith("interlace: ")]
    assert len(said) == 1, err
    assert re.search(rf"rank \d \(pid {victim}\) was killed by SIGKILL at step \d+ during .+, before the run", said[0])
    assert "Traceback" not in err
    until(lambda: not any(map(alive, below)), limit(2.0))
    kept: dict[str, Any] = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (kept["exit_code"], kept["error"]) == (3, "PeerLost")
    assert kept["details"].keys() >= {"rank", "step", "operation"}
    # What was saved before is a checkpoint to go on from.
    rows = runs.metrics(runs.config(tmp_path))
    more = ["--set", f"train.steps={rows[-1]['step'] + 2}", "--resume", "auto"]
    assert interlace("train", file, *more).exit_code == 0
    assert [row["step"] for row in runs.metrics(runs.config(tmp_path))] == list(range(1, rows[-1]["step"] + 3))


@pytest.mark.alone
@pytest.mark.ranks
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_command_leaves_no_orphans(
    number: signal.Signals, code: int, file: str, tmp_path: Path
) -> None:
    process, below = under_way(file, tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in err
    until(lambda: not any(map(alive, below)), limit(2.0))


@pytest.mark.ranks
def test_a_presets_name_is_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run file: the tiny preset on the default corpus, here on one rank."""
    monkeypatch.chdir(tmp_path)
    words = ["--parallel", "dp=1", "--set", "model.preset=tiny", "--set", "train.steps=2", "--set", "run.out=o"]
    result = interlace("train", *words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "o" / "checkpoints" / "step-2" / "manifest.json").exists()


def test_nothing_here_left_a_process_group_or_a_mode_behind() -> None:
    assert not torch.distributed.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()
    assert callable(run_local)
