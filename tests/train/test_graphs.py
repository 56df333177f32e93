"""Compiled blocks replayed as CUDA graphs: when they are, when they are left out, and that no number changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import runs
from interlace.collectives import Meter
from interlace.errors import ConfigError
from interlace.launch import run_local
from interlace.models.decoder import Decoder
from interlace.train import recompute, session
from interlace.train.verify import checked

LATENT = ["model.num_kv_heads=4", "model.kv_rank=5", "model.rotary_dim=2"]
GRAPHS = ["train.compile=true", "train.graphs=true", "data.documents=joined"]
CUDA = torch.device("cuda")


def test_only_compiled_blocks_are_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.graphs=true replays compiled blocks, found train\.compile=false"):
        runs.config(tmp_path, "dp=1", ["train.graphs=true"])


@pytest.mark.parametrize(
    ("plan", "words", "reason"),
    [
        ("pp=2", [], "several micro-batches under way"),
        ("cp=2", [], "context axis"),
        ("dp=2", ["model.num_experts=4", "model.expert_ffn_size=12"], "rows go to each expert"),
        ("tp=2 recompute=full", [], "runs blocks again"),
        ("tp=2", LATENT, ""),
        ("dp=2", ["data.documents=separate"], "data.documents=joined joins them"),
        ("tp=2", [], ""),
        ("dp=2 zero=3", [], ""),
    ],
)
def test_what_is_left_out_says_why(tmp_path: Path, plan: str, words: list[str], reason: str) -> None:
    cfg = runs.config(tmp_path, plan, [*GRAPHS, *words])
    found = session._no_graphs(cfg, CUDA)
    assert reason in found
    assert bool(reason) == bool(found)
    assert session._no_graphs(cfg, torch.device("cpu")) == "there is no GPU"


def test_a_run_without_gpu_goes_on_with_a_note(tmp_path: Path) -> None:
    made = session.build(runs.alone(), runs.config(tmp_path, "dp=1", GRAPHS))
    assert made.notes == ["train.graphs is left out, since there is no GPU"]
    assert isinstance(made.model.module, Decoder)
    assert not made.model.module.replays


def test_verify_runs_eager_blocks(tmp_path: Path) -> None:
    assert not checked(runs.config(tmp_path, "dp=1", GRAPHS)).train.graphs


def test_a_pass_begins_only_where_blocks_are_replayed() -> None:
    module = torch.nn.Linear(1, 1)
    with mock.patch.object(torch.compiler, "cudagraph_mark_step_begin") as mark:
        recompute.begin_pass(module)
        assert not mark.called
        module.replays = True
        recompute.begin_pass(module)
        assert mark.called


def test_what_a_graph_captures_is_counted_without_moments() -> None:
    meter = Meter()
    capturing: Any = mock.patch.multiple(
        torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True
    )
    with capturing, meter.work("compute", "0F0", torch.device("cpu")):
        meter.count("all_gather", "tp", 8)
        meter.stalled("tp", "gather", 0.0, 1.0)
        meter.transferred("tp", "gather", 0.0, 1.0, 8)
    record = meter.cut()
    assert (record.stalls, record.transfers, record.work) == ((), (), ())
    assert meter.sent["all_gather", "tp"] == 8
    meter.stalled("tp", "gather", 0.0, 1.0)
    assert len(meter.cut().stalls) == 1


PLANS = [
    "tp=2",
    "tp=2 latent",
    "tp=2 overlap=fused",
    "tp=2 overlap=off sequence=off",
    "tp=2 recompute=selective micro_batches=2",
    "dp=2 zero=3",
    "dp=2 zero=1 micro_batches=2",
]


@pytest.mark.gpu2
@pytest.mark.parametrize("plan", PLANS)
def test_graphs_change_no_number_on_two_gpus(plan: str, tmp_path: Path) -> None:
    words = ["model.hidden_size=256", "model.head_dim=64", "model.num_layers=2", "data.sequence_length=127",
             "train.precision=bf16", "train.optimizer=sgd", "train.learning_rate=0.05", "train.warmup=0",
             "data.documents=joined", "train.compile=true"]  # fmt: skip
    if plan.endswith("latent"):
        plan, words = plan.removesuffix(" latent"), [*words, *LATENT, "model.rotary_dim=16", "model.kv_rank=64"]
    configs = [runs.config(tmp_path, plan, [*words, *more]).to_toml() for more in ([], ["train.graphs=true"])]
    argument = {"configs": configs, "count": 6}
    for plain, graphs in run_local("rank_functions_graphs:steps", 2, argument, device="cuda", timeout=120.0):
        assert plain["replayed"] == 0
        assert graphs["replayed"] >= 4, "two blocks forward and backward"
        for (loss, norm), (same_loss, same_norm) in zip(plain["rows"], graphs["rows"], strict=True):
            assert same_loss == pytest.approx(loss, rel=2e-3), (plain, graphs)
            assert same_norm == pytest.approx(norm, rel=2e-2), (plain, graphs)
