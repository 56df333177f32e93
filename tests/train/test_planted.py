"""Faults planted along every axis: `verify` catches each, and names the tensor, or account, that it makes wrong first.

docs/planted-faults.md is this list as a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_verify import explain, prove

import rank_functions_planted as functions
import runs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planted-faults.md"
SPLIT_BACKWARD = "pp=2 schedule=zb-h1 micro_batches=2"
TWO_LAYERS = ("model.num_layers=2",)
EXPERTS = (*TWO_LAYERS, "model.num_experts=4", "model.expert_ffn_size=8")
BALANCED = (*EXPERTS, "model.router_aux_loss=0.1")
BIASES = (*TWO_LAYERS, "model.mlp_bias=true")
TIED = (*TWO_LAYERS, "model.tie_embeddings=true")
DROPOUT = (*TWO_LAYERS, "model.dropout=0.1")
ONE_HEAD = (*TWO_LAYERS, "model.num_kv_heads=1")
CLIPPED = (*TWO_LAYERS, "model.init_std=0.5", "model.norm=layernorm", "train.clip=1.0")
UNEVEN = (*TWO_LAYERS, "train.global_batch=7")
LATENT = (*TWO_LAYERS, "model.num_kv_heads=4", "model.kv_rank=5", "model.rotary_dim=2")
WIDE = (*TWO_LAYERS, "model.init_std=0.3")  # with the usual one a layer says little at first
STRONG = (*EXPERTS, "model.init_std=0.3")


@dataclass(frozen=True)
class Planted:
    """A fault, the smallest plan that shows it, and what is wrong first."""

    axis: str
    fault: str
    plan: str
    first: str
    overrides: tuple[str, ...] = TWO_LAYERS


PLANTED = (
    Planted("dp", "mean_of_means", "dp=2", "loss of step 1", UNEVEN),
    Planted("dp", "left_out", "dp=2", "gradient of blocks.1.mlp.up.weight"),
    Planted("dp", "norm_of_every_copy", "dp=2", "loss of step 2", CLIPPED),
    Planted("dp", "second_pass_overwrites", "dp=2 micro_batches=2", "gradient of head.output.weight"),
    Planted("dp", "labels_of_every_pass", "dp=2 micro_batches=2", "loss of step 1", UNEVEN),
    Planted("zero", "stale_weights", "dp=2 zero=3", "loss of step 2"),
    Planted("zero", "own_buffers", "dp=2 zero=3", "bytes of copies", ("model.num_layers=4",)),
    Planted("tp", "unpaid", "tp=2", "gradient of head.norm.weight"),
    Planted("tp", "replicas_unpaid", "tp=2", "gradient of blocks.1.attention.v.weight", ONE_HEAD),
    Planted("tp", "bias_on_every_rank", "tp=2", "gradient of blocks.1.mlp.down.bias", BIASES),
    Planted("tp", "vocabulary_off_by_one", "tp=2", "loss of step 1", WIDE),
    Planted("tp", "router_not_summed", "tp=2", "gradient of blocks.1.moe.router.weight", EXPERTS),
    Planted("tp", "latents_not_summed", "tp=2", "gradient of blocks.1.attention.kv_a_norm.weight", LATENT),
    Planted("tp", "masks_of_the_first_rows", "tp=2", "loss of step 1", DROPOUT),
    Planted("tp", "norm_twice_over_tp", "tp=2", "loss of step 2", CLIPPED),
    Planted("cp", "pieces_half_off", "cp=2", "loss of step 1"),
    Planted("cp", "local_positions", "cp=2", "loss of step 1", WIDE),
    Planted("cp", "keys_paid_twice", "cp=2 exchange=ring", "gradient of blocks.1.attention.v.weight"),
    Planted("cp", "load_of_own_positions", "cp=2", "loss of step 1", BALANCED),
    Planted("cp", "needless_sends", "cp=2 exchange=ring", "bytes sent by all_to_all"),
    Planted("pp", "another_micro_batch", "pp=2 micro_batches=2", "loss of step 1"),
    Planted("pp", "tie_paid_twice", "pp=2", "gradient of embedding.weight", TIED),
    Planted("pp", "counted_by_every_stage", "pp=2", "loss of step 1"),
    Planted("pp", "last_products_forgotten", SPLIT_BACKWARD, "gradient of blocks.1.mlp.down.weight"),
    Planted("ep", "experts_averaged_over_ep", "dp=2 ep=2", "gradient of blocks.1.moe.down.weight", EXPERTS),
    Planted("ep", "combine_unsorted", "dp=2 ep=2", "loss of step 1", STRONG),
    Planted("ep", "rows_in_order_of_ranks", "dp=2 ep=2", "loss of step 1", STRONG),
    Planted("ep", "gradients_stay_with_the_experts", "dp=2 ep=2", "gradient of blocks.1.moe.down.weight", EXPERTS),
    Planted("ep", "rows_twice", "dp=2 ep=2", "bytes sent by all_to_all", EXPERTS),
    Planted("ep", "experts_not_summed", "dp=4 ep=2", "gradient of blocks.1.moe.down.weight", EXPERTS),
    Planted("shard", "replicas_apart", "dp=4 shard=2 zero=1", "gradient of head.output.weight"),
)  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_every_planted_fault_is_caught_and_named(
    run_ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr("test_verify.FUNCTIONS", "rank_functions_planted")
    every = [(planted, runs.config(tmp_path, planted.plan, planted.overrides)) for planted in PLANTED]
    chosen = [(planted, cfg) for planted, cfg in every if cfg.plan.world == world]
    reports = prove(run_ranks, [(cfg, planted.fault) for planted, cfg in chosen], tmp_path)
    wrong = []
    for (planted, _), report in zip(chosen, reports, strict=True):
        off = [account.what for account in report.accounts if not account.holds]
        first = report.first_beyond.name if report.first_beyond is not None else (off or ["nothing"])[0]
        if first != planted.first:
            wrong.append(f"{planted.fault}: {first}, not {planted.first}\n{explain(report)}")
    assert not wrong, "\n".join(wrong)


def test_the_page_is_this_list() -> None:
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `")]
    assert rows == [line(planted) for planted in PLANTED]
    assert {planted.axis for planted in PLANTED} == {"dp", "zero", "shard", "tp", "cp", "pp", "ep"}


def line(planted: Planted) -> str:
    """A row of the page."""
    return f"| `{planted.axis}` | {functions.said(planted.fault)} | `{planted.plan}` | {planted.first} |"
