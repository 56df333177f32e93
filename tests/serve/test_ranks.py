"""Generation over ranks and in batches: the ids of a plain loop over the model on one process, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rank_functions_serve as shared
from interlace import random
from interlace.errors import ConfigError, NumericsError, PeerLost, PlanError
from interlace.launch import run_local
from interlace.models.decoder import Decoder, initialise
from interlace.serve.generate import _choose, generate, load
from rank_functions_serve import CONTEXT, LINES

Run = Callable[..., list[Any]]
OURS = "rank_functions_serve"
PROMPTS = [list(LINES[line][:count].encode()) for line, count in ((0, 1), (38, 2), (13, 13), (27, 27), (6, 40))]
GREEDY = {"max_new": 32, "temperature": 0, "context": CONTEXT}


def plain(model: Decoder, prompt: list[int], options: dict[str, Any]) -> list[list[float]]:
    """Token and log-probability at every step, from the whole model and all logits."""
    tokens, found = list(prompt), []
    key, stop = random.key(options.get("seed", 0), "generate"), options.get("stop")
    for _ in range(options["max_new"]):
        with torch.no_grad():
            logits_V = model(torch.tensor([tokens[-options["context"] :]]))[0, -1].double()
        token = _choose(logits_V, options["temperature"], options.get("top_k", 0), key, len(tokens))
        if token == stop:
            break
        found.append([token, logits_V.log_softmax(0)[token].item()])
        tokens.append(token)
    return found


def same(found: list[list[list[float]]], expected: list[list[list[float]]], what: Any) -> None:
    for prompt, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert [step[0] for step in one] == [step[0] for step in other], (what, prompt)
        apart = [abs(a[1] - b[1]) for a, b in zip(one, other, strict=True)]
        assert max(apart, default=0.0) <= 1e-4, (what, prompt, max(apart))


def over_ranks(run_ranks: Run, ranks: int, jobs: list[dict[str, Any]], expected: list[list[list[list[float]]]]) -> None:
    """Every rank gives, by job and size of batch, what is expected of the job."""
    for rank, made in enumerate(run_ranks(f"{OURS}:write_all", ranks, {"jobs": jobs}, 60.0)):
        for job, by_batch, wanted in zip(jobs, made, expected, strict=True):
            for batch, found in zip(job["batches"], by_batch, strict=True):
                same(found, wanted, (job["plan"], job["run"], rank, batch))


# --- trained models


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """200 steps on a text of 40 lines, embedding and head tied and not."""
    runs = {}
    for name in ("untied", "tied"):
        cfg = shared.run_config(tie_embeddings=name == "tied")
        model = Decoder(cfg.model_config())
        initialise(model, model.cfg, 1)
        shared.learn(model, 200)
        runs[name] = shared.save(tmp_path_factory.mktemp(name), cfg, model)
    return runs


@pytest.mark.timeout(240)
def test_trained_models_write_what_one_process_writes(trained: dict[str, Path], run_ranks: Run) -> None:
    expected = {}
    for name, run in trained.items():
        model, _, _ = load(run, "cpu")
        expected[name] = [plain(model, prompt, GREEDY) for prompt in PROMPTS]
        for line, text in zip((13, 27, 6), expected[name][2:], strict=True):  # it has learned, not repeats one token
            count = {13: 13, 27: 27, 6: 40}[line]
            rest = [*LINES[line].encode(), 256][count : count + 32]
            assert [token for token, _ in text][: len(rest)] == rest, (name, LINES[line])
        assert all(len({token for token, _ in text}) > 5 for text in expected[name])
        for batch in (1, 5):
            same(shared.written(model, PROMPTS, batch, GREEDY), expected[name], (name, batch))
    for ranks, plans in {2: ("tp=2", "pp=2"), 4: ("tp=2 pp=2",)}.items():
        jobs = [
            {"run": str(run), "plan": plan, "prompts": PROMPTS, "batches": [1, 5], "options": GREEDY}
            for plan in plans
            for run in trained.values()
        ]
        over_ranks(run_ranks, ranks, jobs, [expected[name] for _ in plans for name in trained])


# --- models of every kind, drawn at random


EXPERTS = {"num_experts": 5, "expert_ffn_size": 12, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "one key head, tied": {"num_kv_heads": 1, "tie_embeddings": True},
    "three key heads": {"num_heads": 12, "num_kv_heads": 3, "hidden_size": 24},
    "window, biases": {"sliding_window": 5, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "window of some layers, with its first tokens": {"sliding_window": 3, "window_layers": [0, 2], "sink_tokens": 2},
    "sinks in a window, norms of heads": {"attention_sinks": True, "sliding_window": 4, "qk_norm": True},
    "latents": {"num_kv_heads": 4, "kv_rank": 7, "q_rank": 5, "rotary_dim": 2, "value_dim": 3},
    "experts, one of them shared": {**EXPERTS, "shared_ffn_size": 10, "shared_gate": True},
    "experts with biases and limits": {**EXPERTS, "router_bias": True, "router_scores": "sigmoid",
                                       "capacity_factor": 0.5},
}  # fmt: skip
SHORT = [[7, 8, 9], [3], list(range(40, 57)), [250, 249, 248, 2, 1, 0]]
DRAWN = {"max_new": 10, "temperature": 0.9, "top_k": 20, "seed": 3, "context": 12}


def drawn(folder: Path, **dims: Any) -> tuple[Path, Decoder]:
    """A model whose buffers and sinks are not zero either."""
    sizes = {"num_layers": 3, "init_std": 0.4, "dropout": 0.3, "hidden_size": 24, "head_dim": 4, "ffn_size": 22}
    cfg = shared.run_config(**sizes | dims)
    model = Decoder(cfg.model_config())
    initialise(model, model.cfg, 2)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("sinks", "bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    return shared.save(folder, cfg, model), model.eval()


@pytest.mark.timeout(240)
def test_models_of_every_kind_over_ranks(run_ranks: Run, tmp_path: Path) -> None:
    """Greedy and drawn; some rows end before others, and some go beyond the window of 12."""
    jobs, expected = [], []
    for number, (name, dims) in enumerate(MODELS.items()):
        run, model = drawn(tmp_path / str(number), **dims)
        greedy = {**DRAWN, "temperature": 0}
        stop = int(plain(model, SHORT[2], greedy)[4][0])
        for options in [{**greedy, "stop": stop}, *([DRAWN] if number in (0, 5) else [])]:
            jobs.append({"run": str(run), "prompts": SHORT, "batches": [4], "options": options})
            expected.append([plain(model, prompt, options) for prompt in SHORT])
            for batch in (1, 3, 4):
                same(shared.written(model, SHORT, batch, options), expected[-1], (name, batch))
            if options is not DRAWN:
                assert len(expected[-1][2]) <= 4 < max(map(len, expected[-1])), name
    for ranks, plans in {2: ("tp=2", "pp=2 layers=1/2"), 4: ("tp=4", "tp=2 pp=2")}.items():
        planned = [{**job, "plan": plan} for plan in plans for job in jobs]
        over_ranks(run_ranks, ranks, planned, [wanted for _ in plans for wanted in expected])


@pytest.mark.gpu2
@pytest.mark.timeout(240)
def test_two_gpus_write_what_a_cpu_writes(tmp_path: Path) -> None:
    jobs, expected = [], []
    for name in ("one key head, tied", "window, biases", "experts, one of them shared"):
        run, model = drawn(tmp_path / str(len(jobs)), **MODELS[name])
        jobs.append({"run": str(run), "prompts": SHORT, "batches": [1, 4], "options": {**DRAWN, "temperature": 0}})
        expected.append([plain(model, prompt, jobs[-1]["options"]) for prompt in SHORT])

    def on_gpus(target: str, world: int, argument: dict[str, Any], timeout: float) -> list[Any]:
        return run_local(target, world, argument, device="cuda", timeout=timeout)

    planned = [{**job, "plan": plan} for plan in ("tp=2", "pp=2") for job in jobs]
    over_ranks(on_gpus, 2, planned, [*expected, *expected])


def test_a_rank_reads_its_own_part_alone(run_ranks: Run, tmp_path: Path) -> None:
    run, model = drawn(tmp_path, num_layers=4, **EXPERTS)
    whole = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    alike = sum(
        tensor.numel() for name, tensor in model.named_parameters() if "norm" in name or name.endswith("router.weight")
    )
    for plan in ("tp=2 pp=2", "tp=4", "pp=4"):
        read = run_ranks(f"{OURS}:elements_read", 4, {"run": str(run), "plan": plan})
        assert max(read) < 0.45 * whole
        assert whole <= sum(read) <= whole + 3 * alike + model.cfg.hidden_size * 600, (plan, read, whole)


# --- what ends it


def test_ranks_that_differ_or_fail_end_with_one_sentence(run_ranks: Run, tmp_path: Path) -> None:
    run, model = drawn(tmp_path)
    job = {"run": str(run), "plan": "tp=2 pp=2", "prompts": SHORT, "batches": [4], "options": DRAWN}
    with pytest.raises(PeerLost, match=r"rank 1 .*was killed by SIGKILL"):
        run_ranks(f"{OURS}:write_and_die", 4, {"job": job, "rank": 1}, 20.0)
    with pytest.raises(ConfigError, match=r"rank 2 was given other prompts or options than rank 0; give every rank"):
        run_ranks(f"{OURS}:write_apart", 4, {"job": job, "rank": 2}, 20.0)
    with pytest.raises(PlanError, match='the parallel plan "tp=2" needs 2 ranks, found 4'):
        run_ranks(f"{OURS}:write_all", 4, {"jobs": [{**job, "plan": "tp=2"}]}, 20.0)
    with torch.no_grad():
        model.blocks[1].mlp_norm.weight[2] = float("nan")
    broken = shared.save(tmp_path / "broken", shared.run_config(**_dims(model)), model)
    with pytest.raises(NumericsError, match="logits are not finite; use a checkpoint from before"):
        run_ranks(f"{OURS}:write_all", 4, {"jobs": [{**job, "run": str(broken)}]}, 20.0)


def _dims(model: Decoder) -> dict[str, Any]:
    sizes = shared.run_config().model_config()
    pairs = dataclasses.asdict(model.cfg).items()
    return {name: value for name, value in pairs if value != getattr(sizes, name)}


def test_no_prompts_give_no_step() -> None:
    cfg = shared.run_config().model_config()
    model = Decoder(cfg)
    initialise(model, cfg, 1)
    assert shared.written(model, [], 1, DRAWN) == []
    assert list(generate(model, [1], 0, context=4)) == []
