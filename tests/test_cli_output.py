"""The command line where its surroundings are awkward: folders that others use, streams that end, signals."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import runs
from interlace.cli import app, main

ROOT = Path(__file__).resolve().parent.parent


def command(folder: Path, *words: str, **where: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **where}
    return subprocess.Popen([sys.executable, "-m", "interlace", *words], cwd=folder, env=environment, **streams)  # type: ignore[call-overload, no-any-return]


class Beside:
    """The command as a process of its own, forked with torch imported; its ranks are the tests' fork server's too."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.said = folder / name
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=command_here, args=(str(folder), str(self.said), words))
        self.process.start()

    def wait(self, seconds: float) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode


def command_here(folder: str, said: str, words: tuple[str, ...]) -> None:
    os.chdir(folder)
    kept = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(kept, 1)
    os.dup2(kept, 2)
    sys.argv = ["interlace", *words]
    forkserver._forkserver.ensure_running = lambda: None  # this process comes from it
    main()


def here(*words: str) -> Result:
    """The command in this process, whose ranks come from the tests' own fork server: no start of Python and torch."""
    return CliRunner().invoke(app, list(words))


def write_run(folder: Path, out: bool) -> str:
    text = runs.toml(folder, "dp=2 zero=3")
    if not out:
        text = text[: text.index("[run]")]
    (folder / "run.toml").write_text(text)
    return "run.toml"


@pytest.mark.ranks
def test_two_runs_with_defaults_have_a_folder_each(tmp_path: Path) -> None:
    file = write_run(tmp_path, out=False)
    pair = [Beside(tmp_path, f"said-{seed}", "train", file, "--set", f"run.seed={seed}") for seed in (1, 2)]
    for one in pair:
        assert one.wait(90) == 0, one.said.read_text()
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert folders == ["demo", "demo-2"]
    seeds = {(tmp_path / "runs" / name / "run.toml").read_text().partition("seed = ")[2][0] for name in folders}
    assert seeds == {"1", "2"}
    assert "another run's folder" in "".join(one.said.read_text() for one in pair)


@pytest.mark.ranks
def test_a_run_that_never_began_does_not_keep_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path, out=False)
    for more, code in (["--set", "data.source=gone.txt"], 2), ([], 0):
        done = here("train", file, *more)
        assert done.exit_code == code, done.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]


@pytest.mark.ranks
def test_of_two_runs_in_one_folder_one_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    file = write_run(tmp_path, out=True)
    pair = [Beside(tmp_path, f"said-{seed}", "train", file, "--set", f"run.seed={seed}") for seed in (1, 2)]
    codes = {one.wait(90): seed for seed, one in enumerate(pair, start=1)}
    said = [one.said.read_text() for one in pair]
    assert 0 in codes, said
    assert set(codes) - {0} <= {2, 6}, said
    assert len(codes) == 2, said
    assert f"seed = {codes[0]}" in (tmp_path / "run" / "run.toml").read_text()


@pytest.mark.ranks
def test_the_verdict_of_verify_survives_a_reader_that_left(tmp_path: Path) -> None:
    program = "from interlace.train import difference as d; d.TOLERANCE = -1.0; from interlace.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    words = ["verify", write_run(tmp_path, out=True), "--parallel", "dp=1", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "-uc", program, *words], cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE,
        timeout=100,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 5, done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.ranks
def test_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    file = write_run(tmp_path, out=True)
    with open("/dev/full", "w") as full:
        process = command(tmp_path, "data", file, "--steps", "0:40", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert err.decode().splitlines()[-1].startswith("interlace: cannot write the output (No space left on device)")
    assert b"Traceback" not in err


def test_data_takes_a_plan_and_shows_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path, out=True)
    shown = [here("data", file, "--steps", "0:2", *more).stdout for more in ([], ["--parallel", "dp=4 zero=3"])]
    assert shown[0] == shown[1]
    assert shown[0].count("\n") == 16
    far = here("data", file, "--steps", f"{10**20}:{10**21}")
    assert "--steps is" in far.stderr
    assert far.exit_code == 2


@pytest.mark.ranks
def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    file = write_run(tmp_path, out=True)
    process = command(tmp_path, "train", file, "--set", "train.steps=100000", "--set", "run.save_every=2")
    until = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoints" / "step-2").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert err.decode().splitlines()[-1].endswith("run was stopped by SIGTERM; go on with --resume auto")


@pytest.mark.ranks
def test_the_run_folder_records_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path, out=True)
    with (tmp_path / "text.jsonl").open("a") as text:
        text.write("not json\n")
    done = here("train", file, "--set", "data.skip_bad_lines=true")
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "run" / "data.json").read_text())
    assert [Path(name).name for name in kept["files"]] == ["text.jsonl"]
    assert len(kept["skipped"]) == 1
    assert "not JSON" in kept["skipped"][0]
    changed = here("train", file, "--set", "data.skip_bad_lines=true", "--resume", "auto",
                   "--set", "train.steps=5", "--set", "data.documents=joined")  # fmt: skip
    assert changed.exit_code == 2
    assert "documents (separate, now joined)" in changed.stderr


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    file = write_run(tmp_path, out=True)
    refused = here("train", file, "--set", "run.out=file/run")
    assert refused.exit_code == 7
    assert refused.stderr.startswith("interlace: cannot write to file/run (Not a directory); choose another folder")


@pytest.mark.ranks
def test_resume_auto_goes_on_in_the_newest_of_the_unnamed_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path, out=False)
    for more in ([], [], ["--resume", "auto", "--set", "train.steps=5"]):
        done = here("train", file, *more)
        assert done.exit_code == 0, done.output
    assert "going on in runs/demo-2" in done.stderr
    kept = (tmp_path / "runs" / "demo-2" / "checkpoints").glob("step*")
    assert sorted(path.name for path in kept) == ["step-3", "step-5"]
    back = here("train", file, "--resume", "auto", "--set", "train.steps=2")
    assert back.exit_code == 2
    assert "has made 5 steps already, and the run asks for 2; ask for more, as with --set train.steps=10" in back.stderr


@pytest.mark.ranks
def test_a_folder_that_names_weights_must_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    folder.mkdir()
    sizes = {"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24, "hidden_act": "silu",
             "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    text = runs.toml(tmp_path, "dp=1")
    (tmp_path / "run.toml").write_text(f'[model]\nfrom = "{folder}"\n' + text[text.index("[parallel]") :])
    for name, code, said in (
        ("", 0, "no weights in"),
        ("model.safetensors.index.json", 6, "model.safetensors.index.json"),
        ("pytorch_model.bin", 8, "bin"),
    ):
        if name:
            (folder / name).write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
        done = here("train", "run.toml", "--set", f"run.out={tmp_path / (name or 'plain')}")
        assert done.exit_code == code, done.output
        assert said in done.stderr + capfd.readouterr().err  # of the command, of a rank
        if name:
            (folder / name).unlink()
