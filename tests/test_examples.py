"""The examples and the README's blocks run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.config import load, loads

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, timeout: float = 100) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_layouts() -> None:
    lines = run("examples/layouts.py").splitlines()
    assert lines[0] == "rank 0 of tp=2 dp=3: shape (3, 5), ranges (((0, 3),), ((0, 5),))"
    assert lines[-1].startswith('"B/dp T" to "B T/dp": all_to_all over dp')


@pytest.mark.ranks
def test_own_module_learns_alone_and_under_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for command in (("examples/own_module.py",), (*launcher, "examples/own_module.py")):
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(*command))]
        assert len(losses) == 4
        assert losses[-1] < losses[0]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["tensor_llama", "tensor_latent"])
def test_a_module_split_by_roles_trains_as_alone(name: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    alone, split = (
        [[float(n) for n in re.findall(r"[\d.]+", line)] for line in run(*command).splitlines()]
        for command in ((f"examples/{name}.py",), (*launcher, f"examples/{name}.py"))
    )
    assert len(alone) == 5
    for row, expected in zip(split, alone, strict=True):
        assert row == pytest.approx(expected, abs=2e-5)


@pytest.mark.ranks
def test_run_file(tmp_path: Path) -> None:
    settings = ("--set", f"run.out={tmp_path / 'own'}", "--set", "train.steps=2")
    run("-m", "interlace", "train", "examples/run.toml", *settings)
    assert (tmp_path / "own" / "checkpoints" / "step-2" / "manifest.json").exists()


def test_run_files_of_the_documents_load() -> None:
    assert str(load(ROOT / "examples" / "run.toml").plan) == "dp=2 zero=2 micro_batches=2"
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert loads(block).run.out == "runs/mine"


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`interlace ([a-z]+)", text))
    known = set(re.findall(r"^  (\w+) ", run("-m", "interlace", "--help"), re.M))
    assert named
    assert named <= known
