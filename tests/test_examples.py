"""The examples and the README's blocks run as written."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli import app
from interlace.config import load, loads
from rank_functions_launch import free_port

ROOT = Path(__file__).resolve().parent.parent


def run(*commands: tuple[str, ...]) -> list[str]:
    """What each prints; they run at once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    pipe, said = subprocess.PIPE, []
    started = [
        subprocess.Popen([sys.executable, *command], stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT)
        for command in commands
    ]
    for process in started:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        said.append(out)
    return said


def run_ranks_of(example: str, size: int, folder: Path) -> str:
    """What the ranks print, started as torchrun would from the tests' own fork server: no imports of torch."""
    context, port, out = multiprocessing.get_context("forkserver"), free_port(), folder / f"of-{size}"
    ranks = [context.Process(target=as_rank, args=(rank, size, port, example, str(out))) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
        assert rank.exitcode == 0, out.read_text()
    return out.read_text()


def as_rank(rank: int, size: int, port: int, example: str, out: str) -> None:
    """A whole program in this process; alone it joins nothing."""
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    written = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    runpy.run_path(str(ROOT / example), run_name="__main__")
    sys.stdout.flush()


def test_layouts() -> None:
    (said,) = run(("examples/layouts.py",))
    lines = said.splitlines()
    assert lines[0] == "rank 0 of tp=2 dp=3: shape (3, 5), ranges (((0, 3),), ((0, 5),))"
    assert lines[-1].startswith('"B/dp T" to "B T/dp": all_to_all over dp')


@pytest.mark.ranks
def test_own_module_learns_alone_and_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    name = "examples/own_module.py"
    for said in (run_ranks_of(name, 1, tmp_path), *run((*launcher, name))):
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
        assert len(losses) == 4
        assert losses[-1] < losses[0]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["tensor_llama", "tensor_latent"])
def test_a_module_split_by_roles_trains_as_alone(name: str, tmp_path: Path) -> None:
    alone, split = (
        [[float(n) for n in re.findall(r"[\d.]+", line)] for line in said.splitlines()]
        for said in (run_ranks_of(f"examples/{name}.py", size, tmp_path) for size in (1, 2))
    )
    assert len(alone) == 5
    for row, expected in zip(split, alone, strict=True):
        assert row == pytest.approx(expected, abs=2e-5)


@pytest.mark.ranks
def test_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = ("--set", f"run.out={tmp_path / 'own'}", "--set", "train.steps=2")
    done = CliRunner().invoke(app, ["train", "examples/run.toml", *settings])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "own" / "checkpoints" / "step-2" / "manifest.json").exists()


def test_run_files_of_the_documents_load() -> None:
    assert str(load(ROOT / "examples" / "run.toml").plan) == "dp=2 zero=2 micro_batches=2"
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert loads(block).run.out == "runs/mine"


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`interlace ([a-z]+)", text))
    (said,) = run(("-m", "interlace", "--help"))
    known = set(re.findall(r"^  (\w+) ", said, re.M))
    assert named
    assert named <= known
