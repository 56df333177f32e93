"""The loop through real processes: runs that stop and go on, odd batches, the run folder."""

from __future__ import annotations

import gc
import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import runs
from interlace import spec
from interlace.checkpoint import Reader, newest
from interlace.cli import app
from interlace.config import Config, loads
from interlace.errors import CheckpointError, ConfigError, DataError, NumericsError, PeerLost, ResourceError
from interlace.events import read_jsonl
from interlace.models.decoder import Decoder
from interlace.models.weights import SINGLE, load_hf
from interlace.report.ledger import SECOND, ledgers
from interlace.train import export, loop
from interlace.train.data import Cursor, Dataset
from tokenizer_files import word_level

STEPS, HALF = 8, 4
LONG = [f"train.steps={STEPS}", "train.lr_schedule=wsd", "train.warmup=2", "run.save_every=4"]
SGD = ["train.optimizer=sgd", "train.learning_rate=0.1", "train.lr_schedule=constant"]
UNLIKE = [*SGD, "train.global_batch=4", "train.clip=0", "run.seed=11"]  # 6, 15, 8 and 16 labels in the first step
together = pytest.mark.xdist_group("made")  # in the process that has made them
TEN = ["train.global_batch=4", "train.epochs=1", "data.documents=joined", *SGD]  # with a source of ten sequences


def train(cfg: Config, resume: str = "") -> list[dict[str, Any]]:
    """The rows of a run in this process."""
    loop.run(runs.alone(), cfg.to_toml(), resume)
    return runs.metrics(cfg)


def step_folder(cfg: Config, step: int) -> Path:
    return Path(cfg.run.out) / "checkpoints" / f"step-{step}"


def state(cfg: Config, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(step_folder(cfg, step))
    return {name: reader.read(name) for name in reader.names}


# --- several runs in one start of the ranks --------------------------------------------------------------------------


@dataclass
class Made:
    """What three starts of ranks (4, 3 and 2) have left, run by run."""

    runs: dict[str, Config]

    def rows(self, name: str) -> list[dict[str, Any]]:
        return runs.metrics(self.runs[name])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from interlace.launch import run_local

    folder = tmp_path_factory.mktemp("runs")
    ten = folder / "ten"
    ten.mkdir()
    (ten / "ten.txt").write_text("ten times sixteen tokens, so that four ranks cannot share them evenly." * 3)
    (ten / "ten.txt").write_text((ten / "ten.txt").read_text()[:160])
    all_runs: dict[str, Config] = {}

    def job(name: str, plan: str, overrides: list[str], resume: str = "") -> dict[str, str]:
        cfg = runs.config(folder, plan, overrides, out=name)
        all_runs[name] = cfg
        return {"config": cfg.to_toml(), "resume": resume}

    def start(world: int, *jobs: dict[str, str]) -> None:
        run_local("rank_functions_train:train_all", world, {"jobs": list(jobs)})

    ten_text = [f"data.source={ten}/ten.txt", *TEN]
    start(
        4,
        job("unbroken", "dp=4 zero=3", LONG),
        job("few", "dp=4 zero=1", [*SGD, "train.global_batch=3"]),
        job("labels-4", "dp=4", UNLIKE),
        job("ten", "dp=4 zero=2 micro_batch_size=1", ten_text),
        job("ten-dropped", "dp=4 micro_batch_size=1", [*ten_text, "data.drop_last=true"]),
    )
    half = str(step_folder(all_runs["unbroken"], HALF))
    start(
        3,
        job("resumed-3", "dp=3 zero=1", LONG, half),
        job("uneven", "dp=3 zero=3", [*SGD, "train.global_batch=7"]),
    )
    shutil.copytree(folder / "unbroken", folder / "same")
    shutil.rmtree(folder / "same" / "checkpoints" / f"step-{STEPS}")
    start(
        2,
        job("resumed-2", "dp=2 zero=2 micro_batches=2", LONG, half),
        job("labels-2", "dp=2", UNLIKE),
        job("labels-2x2", "dp=2 micro_batches=2", UNLIKE),
    )
    start(4, job("same", "dp=4 zero=3", LONG, "auto"))
    for name in ("few", "labels-4", "ten", "ten-dropped", "uneven"):
        cfg = all_runs[name]
        one = replace(cfg, plan=replace(cfg.plan, dp=1, zero=0), run=replace(cfg.run, out=str(folder / f"{name}-1")))
        all_runs[f"{name}-1"] = one
        train(one)
    job("resumed-1", "dp=1", LONG)
    train(all_runs["resumed-1"], half)
    job("unbroken-1", "dp=1", LONG)
    train(all_runs["unbroken-1"])
    return Made(all_runs)


def assert_close(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row["labels"] == other["labels"]
        assert row["learning_rate"] == other["learning_rate"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@together
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["resumed-1", "resumed-2", "resumed-3"])
def test_a_checkpoint_goes_on_under_another_plan(made: Made, name: str) -> None:
    """NVIDIA/Megatron-LM#1517: AdamW's moments must follow their weights."""
    assert_close(made.rows("unbroken"), made.rows("unbroken-1"))
    assert_close(made.rows(name), made.rows("unbroken")[HALF:])
    assert made.rows("unbroken")[-1]["loss"] < made.rows("unbroken")[0]["loss"] - 0.5


@together
@pytest.mark.ranks
def test_going_on_under_the_same_plan_gives_the_same_bits(made: Made) -> None:
    unbroken, same = made.runs["unbroken"], made.runs["same"]
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in made.rows("same")] == [
        (r["step"], r["loss"], r["grad_norm"]) for r in made.rows("unbroken")
    ]  # rows of steps made again stand there once
    first, second = state(unbroken, STEPS), state(same, STEPS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@together
@pytest.mark.ranks
def test_events_of_a_resumed_run_go_on_in_time(made: Made) -> None:
    for name in ("unbroken", "same"):
        events = list(read_jsonl(Path(made.runs[name].run.out) / "events.jsonl"))
        for rank in {event.rank for event in events}:
            steps = [event for event in events if event.lane == "step" and event.rank == rank]
            assert [event.name for event in steps] == [f"step {number}" for number in range(1, STEPS + 1)]
            assert all(a.end <= b.begin for a, b in itertools.pairwise(steps))
        assert {event.rank for event in events} == set(range(made.runs[name].plan.world))
        assert {"comm", "wait", "compute", "data", "optimizer"} <= {event.kind for event in events}
        assert sum(event.bytes for event in events) > 0


@together
@pytest.mark.ranks
def test_events_of_all_ranks_stand_on_one_clock(made: Made) -> None:
    """No rank's gather ends before the last rank has begun it, and every step's account adds up."""
    cfg = made.runs["unbroken"]
    events = read_jsonl(Path(cfg.run.out) / "events.jsonl")
    moves = {}
    for rank in range(cfg.plan.world):
        own = [event for event in events if event.rank == rank and event.kind == "comm"]
        moves[rank] = [(event.name, event.begin, event.end) for event in sorted(own, key=lambda event: event.begin)]
    names = [[name for name, _, _ in own] for own in moves.values()]
    assert all(own == names[0] and own for own in names)
    for same in zip(*moves.values(), strict=True):
        assert max(begin for _, begin, _ in same) <= min(end for _, _, end in same) + 1e-4
    assert {event.name for event in events if event.kind == "optimizer"} == {"update", "norm"}
    for ledger in ledgers(events):
        for account in ledger.accounts:
            assert sum(account.rows.values()) == account.span
            assert account.seconds("compute") > 0
            assert account.seconds("host") < 0.5 * account.span / SECOND


@together
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["few", "uneven", "ten", "ten-dropped", "labels-4"])
def test_odd_batches_equal_one_process(made: Made, name: str) -> None:
    assert_close(made.rows(name), made.rows(f"{name}-1"))


@together
@pytest.mark.ranks
def test_the_loss_does_not_depend_on_where_labels_lie(made: Made) -> None:
    """pytorch/torchtitan#1842, huggingface/transformers#34191: a mean of means is not the mean."""
    dataset = Dataset.open(made.runs["labels-4"].data, 257, 11)
    batch = dataset.sequences(0, dataset.indices(dataset.cursor_at(0, 4), 4))
    counts = [int((row != -100).sum()) for row in batch.labels_BT]
    assert counts == [6, 15, 8, 16]
    for name in ("labels-2", "labels-2x2", "labels-4"):
        assert_close(made.rows(name), made.rows("labels-4-1"))


@together
@pytest.mark.ranks
def test_ten_samples_on_four_ranks(made: Made) -> None:
    """horovod/horovod#708: the last, short batch is weighed by its labels, or dropped by all ranks."""
    assert [row["labels"] for row in made.rows("ten")] == [64, 64, 32]
    assert [row["labels"] for row in made.rows("ten-dropped")] == [64, 64]


@together
@pytest.mark.ranks
def test_the_run_folder(made: Made) -> None:
    cfg = made.runs["unbroken"]
    out = Path(cfg.run.out)
    assert loads((out / "run.toml").read_text()) == cfg
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "data.json", "events.jsonl", "loss.svg", "metrics.jsonl", "run.toml",
    ]  # fmt: skip
    assert sorted(path.name for path in (out / "checkpoints").glob("step*")) == ["step-4", "step-8"]
    for row in made.rows("unbroken"):
        assert row.keys() == {"step", "loss", "grad_norm", "learning_rate", "labels", "step_s", "tokens_per_s", "mfu",
                              "memory", "waited"}  # fmt: skip
        assert row["tokens_per_s"] == pytest.approx(8 * 16 / row["step_s"])
        assert 0 < row["waited"]["dp"] < row["step_s"]
        assert 0 < row["mfu"] < 1
        assert row["memory"] > 1 << 20
    assert (out / "loss.svg").read_text().startswith("<svg")


def test_one_reduction_a_step_whatever_the_micro_batches(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """karpathy/build-nanogpt#30: the reduction belongs to the last micro-batch."""
    cfgs = [
        runs.config(tmp_path, f"dp=2 zero={zero} micro_batches={m}").to_toml() for zero in (0, 2, 3) for m in (1, 3)
    ]
    found = run_ranks("rank_functions_train:reductions", 2, {"configs": cfgs})
    assert found == [[5] * 6] * 2  # embedding, three blocks, head


@pytest.mark.ranks
@pytest.mark.parametrize("limit", [2.0])
def test_a_rank_that_raises_ends_the_run_at_once(limit: float, run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    cfg = runs.config(tmp_path, "dp=2 zero=3", ["train.steps=50", "run.save_every=1"])
    with pytest.raises(PeerLost, match=r"rank 1 failed at step 2 during training step: ValueError: boom"):
        run_ranks("rank_functions_train:dies_at_step_2", 2, {"config": cfg.to_toml()})
    assert not step_folder(cfg, 3).exists()


# --- one process -----------------------------------------------------------------------------------------------------


def test_main_weights_in_bf16_runs_move_below_its_resolution(tmp_path: Path) -> None:
    """TensorAuto/OpenTau#185: main weights rebuilt from bf16 on resume lose every small update."""
    overrides = ["train.precision=bf16", "train.lr_schedule=constant", "train.learning_rate=5e-5", "run.save_every=5",
                 "train.global_batch=2", "model.num_layers=1"]  # fmt: skip
    unbroken = runs.config(tmp_path, "dp=1", [*overrides, "train.steps=20"], out="unbroken")
    rows = train(unbroken)
    for steps in (5, 10, 15, 20):
        broken = runs.config(tmp_path, "dp=1", [*overrides, f"train.steps={steps}"], out="broken")
        found = train(broken, "auto")
    assert [(r["step"], r["loss"]) for r in found] == [(r["step"], r["loss"]) for r in rows]
    first, second = state(unbroken, 20), state(broken, 20)
    assert all(torch.equal(first[name], second[name]) for name in first)
    ones = first["main/head.norm.weight"]
    assert ones.dtype == torch.float32
    assert (ones != 1.0).all()
    assert ((ones - 1.0).abs() < 2**-9).all()  # half a step of bf16 below 1: its own weights still read 1.0


@pytest.mark.parametrize(("clip", "where"), [("0", ", in the gradient of embedding.weight"), ("1.0", "")])
def test_a_norm_that_is_no_number_stops_the_run(clip: str, where: str, tmp_path: Path) -> None:
    overrides = [*SGD, "train.weight_decay=1e12", "train.learning_rate=1e12", f"train.clip={clip}", "run.save_every=1"]
    cfg = runs.config(tmp_path, "dp=1", overrides)
    with pytest.raises(NumericsError, match=rf"and the gradient norm nan{where}; no checkpoint") as caught:
        train(cfg)
    last = runs.metrics(cfg)[-1]["step"]
    assert f"step {last + 1}: " in str(caught.value)
    assert f"--steps {last}:{last + 1}" in str(caught.value)
    assert max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == last
    assert all(math.isfinite(row["loss"]) for row in runs.metrics(cfg))
    assert (tmp_path / "run" / "loss.svg").exists()


def test_a_hugging_face_folder_gives_weights_or_only_sizes(tmp_path: Path) -> None:
    cfg = runs.config(tmp_path, "dp=1", [*LONG, "train.precision=fp32"])
    losses = [row["loss"] for row in train(cfg)]
    export.export(cfg.run.out, tmp_path / "hf", "fp32")
    text = runs.toml(tmp_path, out="from").split("[parallel]")[1]
    again = loads(f'[model]\nfrom = "{tmp_path}/hf"\n[parallel]{text}')
    rows = train(again)

    model_cfg, tensors = load_hf(tmp_path / "hf")
    decoder = Decoder(model_cfg)
    decoder.load_state_dict(dict(tensors))
    dataset = Dataset.open(again.data, 257, 0)
    batch = dataset.sequences(0, dataset.indices(dataset.cursor_at(0, 8), 8))
    total, count = decoder.loss(*batch.to(torch.device("cpu")))
    assert rows[0]["loss"] == pytest.approx(total.item() / count.item(), rel=1e-5)
    assert rows[0]["loss"] < losses[0] - 0.5

    for file in (tmp_path / "hf").glob("*.safetensors*"):
        file.unlink()
    sizes = replace(again, run=replace(again.run, out=str(tmp_path / "sizes")))
    assert train(sizes)[0]["loss"] == pytest.approx(losses[0], rel=1e-5)


def test_another_tokenizer_than_that_of_the_weights_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(cfg := runs.config(tmp_path, "dp=1", ["train.steps=1", "run.save_every=0"]))
    export.export(cfg.run.out, tmp_path / "hf", "fp32")
    word_level(tmp_path / "hf")
    text = runs.toml(tmp_path, out="from").split("[parallel]")[1]
    again = loads(f'[model]\nfrom = "{tmp_path}/hf"\n[parallel]{text}', ["train.steps=1"])
    capfd.readouterr()
    for words, told in (("bytes", True), (str(tmp_path / "hf"), False)):
        data, run = (
            replace(again.data, tokenizer=words, skip_bad_lines=True),
            replace(again.run, out=str(tmp_path / f"from-{told}")),
        )
        train(replace(again, data=data, run=run))
        assert ("its weights know other ids" in "".join(capfd.readouterr())) == told


def test_no_run_starts_from_weights_that_are_not_finite(tmp_path: Path) -> None:
    """Where no token meets them, no loss would tell."""
    train(cfg := runs.config(tmp_path, "dp=1", ["train.steps=1"]))
    export.export(cfg.run.out, tmp_path / "hf", "fp32")
    tensors = load_file(tmp_path / "hf" / SINGLE)
    tensors["model.embed_tokens.weight"][255, 3:5] = math.nan  # of a byte that is in no text
    save_file(tensors, tmp_path / "hf" / SINGLE)
    text = runs.toml(tmp_path, out="from").split("[parallel]")[1]
    with pytest.raises(CheckpointError, match=r"elements of model\.embed_tokens\.weight, 2 are not finite \(2 NaN\)"):
        train(loads(f'[model]\nfrom = "{tmp_path}/hf"\n[parallel]{text}'))


def test_sizes_beside_a_folder_with_weights_are_refused(tmp_path: Path) -> None:
    train(cfg := runs.config(tmp_path))
    export.export(cfg.run.out, tmp_path / "hf", "fp32")
    text = runs.toml(tmp_path, out="from").split("[parallel]")[1]
    with pytest.raises(ConfigError, match=r"\[model\] changes sizes of .*hf"):
        train(loads(f'[model]\nfrom = "{tmp_path}/hf"\nnum_layers = 2\n[parallel]{text}'))


def test_rows_every_few_steps_and_checkpoints_kept(tmp_path: Path) -> None:
    overrides = ["train.steps=8", "run.log_every=3", "run.save_every=3", "run.keep=2"]
    cfg = runs.config(tmp_path, "dp=1", overrides)
    assert [row["step"] for row in train(cfg)] == [3, 6, 8]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == ["step-6", "step-8"]
    whole = runs.config(tmp_path, "dp=1", ["train.steps=8", "run.save_every=0"], out="whole")
    rows = train(whole)
    assert [path.name for path in (tmp_path / "whole" / "checkpoints").glob("step-*")] == ["step-8"]
    assert [rows[step - 1]["loss"] for step in (3, 6, 8)] == runs.losses(cfg)


def test_a_new_run_in_a_used_folder_leaves_no_old_rows(tmp_path: Path) -> None:
    """A run that died before its first checkpoint is begun again in the same folder."""
    cfg = runs.config(tmp_path, "dp=1", ["run.seed=1"])
    train(cfg)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "error.json").write_text("{}")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99')  # torn by the kill
    for resume in ("", "auto"):
        shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
        assert [row["step"] for row in train(cfg, resume)] == [1, 2, 3]
        steps = [event.name for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event.lane == "step"]
        assert steps == ["step 1", "step 2", "step 3"]
        assert not (tmp_path / "run" / "error.json").exists()


def test_going_on_in_another_folder_takes_the_rows_from_there_on(tmp_path: Path) -> None:
    first = runs.config(tmp_path, "dp=1", ["train.steps=2"], out="first")
    train(first)
    second = runs.config(tmp_path, "dp=1", ["train.steps=4"], out="second")
    assert [row["step"] for row in train(second, str(tmp_path / "first"))] == [3, 4]
    further = runs.config(tmp_path, "dp=1", ["train.steps=5"], out="second")
    assert [row["step"] for row in train(further, str(tmp_path / "second" / "checkpoints"))] == [3, 4, 5]


def test_torn_rows_go_and_a_checkpoint_damaged_since_is_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = runs.config(tmp_path, "dp=1", ["train.steps=3", "run.save_every=1"])
    rows = train(cfg)
    shard = step_folder(cfg, 3) / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = train(cfg, "auto")
    assert [(row["step"], row["loss"]) for row in again] == [(row["step"], row["loss"]) for row in rows]
    said = capfd.readouterr().err
    assert "step-3 passed over" in said
    assert f"resumed from {step_folder(cfg, 2)}" in said


@pytest.mark.parametrize(
    ("overrides", "error", "sentence"),
    [
        (["model.num_layers=2"], CheckpointError, r"holds another model: num_layers \(3 saved, 2 asked\)"),
        (["train.optimizer=sgd"], CheckpointError, r'holds the state of optimizer "adamw", not of "sgd"'),
        (
            ["data.sequence_length=8"],
            DataError,
            r"its data differ from the checkpoint's in sequence_length \(16, now 8\)",
        ),
        (["train.steps=3"], ConfigError, r"made 3 steps already, and the run asks for 3; ask .* --set train.steps=6"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(
    overrides: list[str], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    train(runs.config(tmp_path))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(error, match=sentence):
        train(runs.config(tmp_path, "dp=1", ["train.steps=9", *overrides]), "auto")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_epochs_end_where_they_do_under_another_batch_size(tmp_path: Path) -> None:
    """111 sequences: 2 steps of 40, then 8 of 4 (the last has 3) end the first epoch, and 28 are the second."""
    epochs = ["train.lr_schedule=constant", "run.save_every=50"]
    train(runs.config(tmp_path, "dp=1", [*epochs, "train.steps=2", "train.global_batch=40"]))
    cfg = runs.config(tmp_path, "dp=1", [*epochs, "train.epochs=2", "train.global_batch=4"])
    made = train(cfg, "auto")
    assert [row["step"] for row in made] == list(range(1, 2 + 8 + 28 + 1))
    cursor = Reader(step_folder(cfg, 38)).meta["cursor"]
    assert (cursor["epoch"], cursor["offset"]) == (2, 0)
    larger = runs.config(tmp_path, "dp=1", [*epochs, "train.epochs=2", "train.global_batch=111"])
    with pytest.raises(ConfigError, match=r"made 38 steps already, and the run asks for 38; .* --set train.epochs=3"):
        train(larger, "auto")


def test_a_run_folder_tells_what_each_step_saw_whatever_its_batch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also in another folder, where only the later steps were made."""
    train(runs.config(tmp_path, "dp=1", ["train.steps=2", "train.global_batch=40"]))
    half = str(tmp_path / "run" / "checkpoints" / "step-2")
    cfg = runs.config(tmp_path, "dp=1", ["train.steps=4", "train.global_batch=5"], out="again")
    made = train(cfg, half)
    assert "a step has 5 sequences from here on, and had 40 before" in capfd.readouterr().err
    file, told = str(tmp_path / "again" / "run.toml"), {}
    for step in range(4):
        shown = CliRunner().invoke(app, ["data", file, "--steps", f"{step}:{step + 1}"])
        told[step] = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [len(told[step]) for step in range(4)] == [40, 40, 5, 5]
    labels = [sum(label >= 0 for row in told[step] for label in row["labels"]) for step in (2, 3)]
    assert labels == [row["labels"] for row in made]
    dataset = Dataset.open(cfg.data, 257, cfg.run.seed)
    assert [row["tokens"] for row in told[2]] == dataset.sequences(
        0, dataset.indices(Cursor(0, 80, dataset.digest), 5)
    ).tokens_BT.tolist()


def test_a_run_that_goes_back_leaves_later_checkpoints_aside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Else the next look for the newest one would take them, of a continuation that the run has left."""
    every = ["run.save_every=2", "train.lr_schedule=constant"]
    train(cfg := runs.config(tmp_path, "dp=1", [*every, "train.steps=6"]))
    left = state(cfg, 6)
    back = str(step_folder(cfg, 2))
    train(cfg := runs.config(tmp_path, "dp=1", [*every, "train.steps=4", "train.learning_rate=1e-3"]), back)
    aside = tmp_path / "run" / "checkpoints" / "aside-1"
    assert f"note: saved after step 2, now in {aside}: step-4, step-6" in capfd.readouterr().err
    assert newest(tmp_path / "run") == step_folder(cfg, 4)
    own = state(cfg, 4)
    made = train(runs.config(tmp_path, "dp=1", [*every, "train.steps=5", "train.learning_rate=1e-3"]), "auto")
    assert [row["step"] for row in made] == [1, 2, 3, 4, 5]
    assert not torch.equal(own["main/head.output.weight"], Reader(aside / "step-4").read("main/head.output.weight"))
    kept = Reader(newest(aside))
    assert all(torch.equal(kept.read(name), value) for name, value in left.items())
    train(runs.config(tmp_path, "dp=1", [*every, "train.steps=3"]), back)
    assert sorted(path.name for path in aside.with_name("aside-2").iterdir()) == ["step-4", "step-5"]


def test_momentum_may_be_changed_on_resume(tmp_path: Path) -> None:
    sgd = ["train.optimizer=sgd"]
    train(runs.config(tmp_path, "dp=1", [*sgd, "train.steps=2", "train.momentum=0.9"]))
    train(cfg := runs.config(tmp_path, "dp=1", [*sgd, "train.steps=3"]), "auto")
    assert not [name for name in state(cfg, 3) if name.startswith("momentum")]
    train(cfg := runs.config(tmp_path, "dp=1", [*sgd, "train.steps=4", "train.momentum=0.9"]), "auto")
    assert len([name for name in state(cfg, 4) if name.startswith("momentum")]) == len(
        spec.parameters(cfg.model_config())
    )


@pytest.mark.parametrize(("decay", "said"), [(1, False), (2, True)])
def test_a_decay_that_begins_amid_the_warmup_is_told(
    decay: int, said: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wsd = ["train.lr_schedule=wsd", "train.warmup=2", f"train.decay={decay}"]
    rates = [row["learning_rate"] for row in train(runs.config(tmp_path, "dp=1", wsd))]
    assert rates == pytest.approx([0.005, 0.01, 0.01 if decay == 1 else 0.005])
    assert ("note: warmup (2) and decay (2) are more than the 3 steps" in capfd.readouterr().err) == said


def test_dropout_goes_on_with_the_same_masks(tmp_path: Path) -> None:
    overrides = ["model.dropout=0.2", "train.steps=4", "run.save_every=2"]
    rows = train(runs.config(tmp_path, "dp=1", overrides))
    cfg = runs.config(tmp_path, "dp=1", overrides, out="again")
    assert [r["loss"] for r in train(cfg, str(tmp_path / "run" / "checkpoints" / "step-2"))] == [
        r["loss"] for r in rows[2:]
    ]


def test_two_deterministic_runs_have_the_same_bits(tmp_path: Path) -> None:
    try:
        found = [train(runs.config(tmp_path, "dp=1", ["run.deterministic=true"], out=out)) for out in ("a", "b")]
    finally:
        torch.use_deterministic_algorithms(False)
    assert [row["loss"] for row in found[0]] == [row["loss"] for row in found[1]]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "_append", full)
    with pytest.raises(ResourceError, match=r"cannot write to .*run: No space left on device; make room"):
        train(runs.config(tmp_path))


@pytest.mark.filterwarnings("default:attention dropout")
def test_a_warning_is_a_plain_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from interlace.models import attention

    attention.say_once.cache_clear()
    train(runs.config(tmp_path, "dp=1", ["model.attention_dropout=0.1"]))
    said = capfd.readouterr().err
    assert said.count("\nnote: attention dropout: ") == 1
    assert "UserWarning" not in said


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_blocks_give_the_same_losses(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    jobs = []
    for compiled in ("false", "true"):
        overrides = ["model.num_layers=1", "train.steps=2", f"train.compile={compiled}"]
        overrides += ["model.dropout=0.3", "model.attention_dropout=0.2"]
        jobs.append({"config": runs.config(tmp_path, "dp=1", overrides, out=compiled).to_toml()})
    run_ranks("rank_functions_train:train_all", 1, {"jobs": jobs}, 110.0)
    first, second = (
        json.loads(line)["loss"] for line in (tmp_path / "true" / "metrics.jsonl").read_text().splitlines()
    )
    plain = runs.losses(runs.config(tmp_path, out="false"))
    assert [first, second] == pytest.approx(plain, rel=1e-5)


def test_a_model_goes_with_its_run(tmp_path: Path) -> None:
    """The loop takes what lives as long as the run out of the collector's sight, and gives it back."""
    train(runs.config(tmp_path, overrides=["model.num_layers=1"]))
    gc.collect()
    assert gc.get_freeze_count() == 0
    assert not [thing for thing in gc.get_objects() if type(thing) is Decoder and thing.cfg.num_layers == 1]
