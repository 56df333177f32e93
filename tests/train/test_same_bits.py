"""`run.reproducible = "plan"`: losses, norms and weights have the same bits for every data plan, restart and resize."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import runs
from interlace.checkpoint import Reader
from interlace.cli import app
from interlace.config import Config
from interlace.errors import PeerLost
from interlace.train import verify

Run = Callable[..., list[Any]]
FUNCTIONS = "rank_functions_train"
STEPS = 12
FEW = 5  # of which two after the warm-up: other bits show in the loss one step after they arise
FIXED = [
    "run.reproducible=plan", f"train.steps={STEPS}", "train.global_batch=7", "train.warmup=3", "train.clip=0.5",
    "model.dropout=0.1", "data.documents=separate",
]  # fmt: skip
KINDS = {  # sequences in a micro-batch, and what else differs
    "tied fp32": (1, ["model.tie_embeddings=true"]),
    "untied bf16": (1, ["train.precision=bf16"]),
    "tied bf16, pairs": (2, ["train.precision=bf16", "model.tie_embeddings=true", "train.clip=0"]),
    "untied fp32, pairs": (2, ["model.attention_dropout=0.1", "data.documents=joined"]),
    "biases": (1, ["model.norm=layernorm", "model.activation=gelu", "model.qkv_bias=true", "model.mlp_bias=true",
                   "train.global_batch=5"]),
    "experts": (2, ["model.num_experts=4", "model.expert_ffn_size=8", "model.router_aux_loss=0.1"]),
}  # fmt: skip
PLANS = {  # ranks: the rest of two plans that the kinds take in turn, and how many kinds
    1: ("", "zero=3", 6),
    2: ("zero=3", "zero=1 transport=copy", 6),
    3: ("zero=1", "zero=2 recompute=full transport=copy", 4),
    4: ("zero=0", "zero=2 shard=2", 3),
    6: ("zero=3 shard=3 overlap=off", "zero=1", 2),
}


def config(folder: Path, plan: str, kind: str, *overrides: str, out: str = "run") -> Config:
    size, words = KINDS[kind]
    return runs.config(folder, f"{plan} micro_batch_size={size}", [*FIXED, *words, *overrides], out)


def job(cfg: Config, steps: int = FEW, fault: str = "none") -> dict[str, Any]:
    return {"config": cfg.to_toml(), "steps": steps, "fault": fault}


def bits(run: Run, dp: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What every rank found."""
    ranks = run(f"{FUNCTIONS}:bits_all", dp, {"jobs": jobs}, 90.0)
    assert all(found == ranks[0] for found in ranks)
    return list(ranks[0])


@pytest.mark.filterwarnings("ignore:attention dropout")
def test_every_data_plan_gives_one_digest(run_ranks: Run, tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for dp, (even, odd, count) in PLANS.items():
        names = [(kind, f"dp={dp} {odd if number % 2 else even}") for number, kind in enumerate([*KINDS][:count])]
        jobs = [job(config(tmp_path, plan, kind)) for kind, plan in names]
        for (kind, plan), made in zip(names, bits(run_ranks, dp, jobs), strict=True):
            found[kind][plan] = made
    for kind, plans in found.items():
        (one, reference), *others = plans.items()
        assert one.startswith("dp=1")
        assert others
        assert len(set(reference["losses"])) == FEW
        for plan, made in others:
            assert made == reference, f"{kind}: {plan}"
    assert len({plans[max(plans)]["digest"] for plans in found.values()}) == len(KINDS)


def test_planted_faults_change_the_digest(run_ranks: Run, tmp_path: Path) -> None:
    """So that the test above can fail; and what the plain order gives does not have these bits."""
    cfg = config(tmp_path, "dp=3 zero=2", "tied fp32")
    plain = config(tmp_path, "dp=3 zero=2", "tied fp32", "run.reproducible=none", "parallel.plan=dp=3 zero=2")
    jobs = [job(cfg), job(cfg, fault="rotated"), job(plain), job(cfg)]
    right, rotated, unfixed, again = bits(run_ranks, 3, jobs)
    assert again == right
    assert rotated["digest"] != right["digest"]
    assert unfixed["digest"] != right["digest"]
    assert float.fromhex(unfixed["losses"][0]) == pytest.approx(float.fromhex(right["losses"][0]), rel=1e-6)


def test_resumed_and_killed_runs_end_with_the_same_digest(run_ranks: Run, tmp_path: Path) -> None:
    def run(dp: int, out: str, rest: str, resume: str = "", function: str = "train_all") -> str:
        cfg = config(tmp_path, f"dp={dp} {rest}", "untied bf16", "run.save_every=4", out=out)
        argument: dict[str, Any] = {"config": cfg.to_toml(), "resume": resume}
        run_ranks(f"{FUNCTIONS}:{function}", dp, {"jobs": [argument]} if function == "train_all" else argument)
        rows = runs.metrics(cfg)
        assert [row["step"] for row in rows if "digest" in row] == [STEPS]
        return str(rows[-1]["digest"])

    whole = run(2, "whole", "zero=3")
    assert run(3, "other", "zero=1", resume=str(tmp_path / "whole" / "checkpoints" / "step-4")) == whole
    with pytest.raises(PeerLost, match=r"rank 1 .*killed by SIGKILL at step 7"):
        run(2, "killed", "zero=0", function="killed_at_step_7")
    assert run(4, "killed", "zero=2 shard=2", resume="auto") == whole
    hybrid = tmp_path / "killed" / "checkpoints" / "step-8"
    assert Reader(hybrid).layout("main/blocks.0.mlp.up.weight").startswith("(F D)/shard:")
    assert run(1, "alone", "zero=0", resume=str(hybrid)) == whole


@pytest.mark.ranks
def test_the_command_compares_bits_and_exits_with_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "BITS", f"{FUNCTIONS}:faulty_bits")
    (tmp_path / "run.toml").write_text(runs.toml(tmp_path, "dp=2 zero=2"))
    for fault, code in (("rotated", 5), ("none", 0)):
        monkeypatch.setenv("INTERLACE_FAULT", fault)
        done = CliRunner().invoke(app, ["verify", str(tmp_path / "run.toml"), "--steps", "3", "--exact"])
        assert done.exit_code == code, done.output
        *_, alone, split, verdict = done.stdout.splitlines()
        assert (alone.split()[-1] == split.split()[-1]) == (code == 0)
        assert len(alone.split()[-1]) == 32
        expected = "does NOT give the bits of dp=1; they differ first in step " if code else "gives the bits of dp=1"
        assert verdict.startswith(f'verify: "dp=2 zero=2" {expected}')


def test_windows_give_the_bits_of_the_library(run_ranks: Run, tmp_path: Path) -> None:
    """Gradients and weights that peers read from each other's memory, the logits in it meanwhile, against gloo's."""
    words = ["train.precision=bf16", "train.global_batch=6", "train.clip=0.5", "model.dropout=0", "train.warmup=0"]
    cfgs = [
        runs.config(tmp_path, f"dp=2 zero={zero} micro_batches={passes} transport={transport}", words, f"{zero}")
        for zero in (1, 2, 3) for passes in (1, 2) for transport in ("library", "copy")
    ]  # fmt: skip
    found = bits(run_ranks, 2, [job(cfg, 4) for cfg in cfgs])
    for number in range(0, len(found), 2):
        assert found[number] == found[number + 1], str(cfgs[number].plan)
