"""`interlace generate`: the same text on one process, over ranks, and under torchrun; refusals are one sentence."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import rank_functions_serve as shared
import runs
from interlace.models.decoder import Decoder, initialise
from test_cli import COMMAND, TORCHRUN, interlace, sentence, start

WORDS = ("--tokens", "24", "--seed", "5")
PROMPTS = ["amber", "", "a naïve reader waits, and so does the one behind it", "d"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run whose model is as it was drawn."""
    cfg = shared.run_config(init_std=0.3)
    model = Decoder(cfg.model_config())
    initialise(model, model.cfg, 1)
    folder = tmp_path_factory.mktemp("run")
    shared.save(folder, cfg, model)
    return str(folder)


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_the_text_is_the_same_however_it_is_written(run: str, tmp_path: Path) -> None:
    alone = []
    for prompt in PROMPTS:
        result = interlace("generate", run, "--prompt", prompt, *WORDS)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(prompt)
        alone.append(result.stdout.removeprefix(prompt).removesuffix("\n"))
    assert len(set(alone)) == len(PROMPTS)
    lines = [json.dumps({"prompt": prompt, "text": text}) for prompt, text in zip(PROMPTS, alone, strict=True)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    several = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    for words in (several, ["--prompts", str(file), "--batch", "3"]):
        assert interlace("generate", run, *words, *WORDS).stdout.splitlines() == lines
    for words, command in (
        (["--parallel", "tp=2", "--prompts", str(file), "--batch", "3"], COMMAND),
        (["--parallel", "pp=2", *several], TORCHRUN),
    ):
        assert output(start(tmp_path, "generate", run, *words, *WORDS, command=command)).splitlines() == lines
    one = start(tmp_path, "generate", run, "--parallel", "pp=2", "--prompt", PROMPTS[2], *WORDS)
    assert output(one) == f"{PROMPTS[2]}{alone[2]}\n"


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_run_saved_under_one_plan_writes_under_another(tmp_path: Path) -> None:
    """Saved in slices of columns, with ZeRO; read in other slices, by stages, and by one process."""
    (tmp_path / "run.toml").write_text(runs.toml(tmp_path, "tp=2 dp=2 zero=3"))
    trained = interlace("train", str(tmp_path / "run.toml"))
    assert trained.exit_code == 0, trained.output
    words = ("generate", str(tmp_path / "run"), "--prompt", "a rank", *WORDS)
    alone = interlace(*words).stdout
    assert len(set(alone)) > 12
    for plan in ("tp=4", "pp=2"):
        assert output(start(tmp_path, *words, "--parallel", plan)) == alone, plan


@pytest.mark.ranks
def test_ranks_whose_reader_leaves_end_quietly(run: str, tmp_path: Path) -> None:
    process = start(tmp_path, "generate", run, "--parallel", "tp=2", "--tokens", "40", "--top-k", "0")
    assert process.stdout is not None
    assert process.stdout.read(4) == "def "
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["-p", "dp=2"], 'the parallel plan "dp=2" asks for dp=2, .*: the nearest that works is "tp=2"', 2),
        (["-p", "tp=3"], "asks for tp=3, which does not divide the model's 4 heads: the nearest that works is", 2),
        (["-p", "tpp=2"], "unknown key tpp in the parallel plan .*: did you mean tp", 2),
        (["--prompts", "nowhere.jsonl"], "cannot read the prompts in nowhere.jsonl: no such file", 2),
        (["--prompts", "BAD"], r'bad.jsonl, line 2: must be {"prompt": "..."}, found {"text": "a"}', 2),
        (["--prompts", "EMPTY"], r'empty.jsonl holds no prompt; give a line of {"prompt": "..."} for each', 2),
        (["--prompts", "BAD", "--prompt", "a"], r"--prompt and --prompts .* were both given; leave one of them out", 2),
        (["--temperature", "inf"], "^interlace: --temperature is inf; write a finite number from 0 on", 2),
    ],
)
def test_one_sentence_names_what_to_change(
    words: list[str], said: str, code: int, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlace.launch.run_local", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    places = {"BAD": str(tmp_path / "bad.jsonl"), "EMPTY": str(tmp_path / "empty.jsonl")}
    line = sentence(interlace("generate", run, *(places.get(word, word) for word in words)), code)
    assert re.search(said, line), line


def test_no_checkpoint_is_said_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.launch.run_local", lambda *_, **__: pytest.fail("ranks were started"))
    line = sentence(interlace("generate", str(tmp_path), "--parallel", "tp=2"), 6)
    assert "holds no checkpoint: name a run folder" in line
