"""Rows sent to the ranks of their experts and back, beside all experts in one place; slices of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from interlace.config import ModelConfig, ParallelPlan
from interlace.mesh import Mesh
from interlace.plan import expert

Run = Callable[..., list[Any]]
CASES: list[dict[str, Any]] = [
    {"experts": 7, "k": 3, "tokens": 5, "kind": "any"},
    {"experts": 7, "k": 3, "tokens": 5, "kind": "any", "halves": True},
    {"experts": 4, "k": 2, "tokens": 3, "kind": "first two"},  # the last ranks get no row
    {"experts": 4, "k": 2, "tokens": 3, "kind": "first two", "recompute": True, "halves": True},
    {"experts": 4, "k": 2, "tokens": 4, "kind": "any", "idle": 1, "halves": True},  # a rank without tokens
    {"experts": 5, "k": 1, "tokens": 6, "kind": "one"},  # everything to the last expert
    {"experts": 6, "k": 2, "tokens": 6, "kind": "dropped", "halves": True},  # choices of no expert stay at home
    {"experts": 4, "k": 2, "tokens": 1, "kind": "any", "halves": True, "recompute": True},
]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_dispatch_equals_all_experts_in_one_place(run_ranks: Run, world: int) -> None:
    """NVIDIA-NeMo/Automodel PR#935, PR#3680; NVIDIA/Megatron-LM PR#4851: ranks and experts without tokens take part."""
    for rank in run_ranks("rank_functions_expert:dispatch", world, {"cases": CASES}):
        whole, halves = rank[0], rank[1]
        assert whole["log"] == [
            "dispatch starts", "meanwhile", "dispatch is waited for", "combine starts", "combine is waited for",
            "combine back starts", "combine is waited for", "dispatch back starts", "dispatch is waited for",
        ]  # fmt: skip
        assert halves["log"] == [
            "dispatch starts", "dispatch starts", "meanwhile",
            "dispatch is waited for", "combine starts", "dispatch is waited for", "combine starts",
            "combine is waited for", "combine is waited for",
            "combine back starts", "combine back starts",
            "combine is waited for", "dispatch back starts", "combine is waited for", "dispatch back starts",
            "dispatch is waited for", "dispatch is waited for",
        ]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "chosen"), [(2, (0, 3, 6)), (3, (0, 2, 4))])
def test_the_fused_exchange_equals_all_experts_in_one_place(
    run_ranks: Run, world: int, chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven and idle experts, a rank without tokens, dropped choices, recomputation; halves have no part in it.  All
    to one expert, which is more than there is room for at first."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the ranks
    beyond = {"experts": 4, "k": 1, "tokens": 60, "kind": "one", "room": 1.0}
    cases = [*(CASES[at] for at in chosen), beyond, {**beyond, "recompute": True}]
    run_ranks("rank_functions_expert:dispatch", world, {"cases": cases, "fused": True}, timeout=110.0)


@pytest.mark.ranks
def test_slices_of_experts_and_rows_in_bf16(run_ranks: Run) -> None:
    run_ranks("rank_functions_expert:parts", 4, {"num_experts": 5, "inner": 7})
    run_ranks("rank_functions_expert:bf16", 2, {"num_experts": 5})


CFG = ModelConfig(vocab_size=29, hidden_size=6, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=6, ffn_size=8,
                  num_experts=5, experts_per_token=2, expert_ffn_size=7)  # fmt: skip


def test_what_is_sent_by_hand() -> None:
    """Two ranks, experts 0-2 and 3-4; rank 0 has 4 choices of the others', rank 1 one."""
    visits = [[[[1, 1, 0, 3, 1]], [[1, 0, 0, 2, 3]]]]
    tokens = [[(0, 0, 3)], [(1, 0, 3)]]
    assert expert.rows(CFG, tokens, visits, 0) == [[2, 4], [1, 5]]
    plan = ParallelPlan(dp=2, ep=2)
    for rank, (here, numbers) in enumerate(((3, 2), (9, 3))):
        done = expert.work(CFG, plan, rank, tokens, visits, [0], 4)
        assert done.rows == {0: here}
        assert done.sent == 2 * (4 + 1) * 6 * 4 + numbers * 8
    again = ParallelPlan(dp=2, ep=2, recompute="full", expert_halves="on", micro_batches=3)
    assert expert.work(CFG, again, 0, tokens, visits, [0], 2).sent == 3 * (4 + 1) * 6 * 2 + 2 * 2 * 2 * 3 * 8


def test_the_ranks_that_share_experts() -> None:
    """Every third rank of six holds the same; of `shard` neighbours what remains shares a copy."""
    plan = ParallelPlan(dp=12, ep=3, zero=3)
    assert expert.as_data(plan) == ParallelPlan(dp=4, zero=3)
    sizes = {1: 0, 2: 0, 3: 0, 4: 0, 6: 2, 12: 4}
    for shard, inner in sizes.items():
        hybrid = ParallelPlan(dp=12, ep=3, zero=3, shard=shard)
        assert expert.inner(hybrid) == inner
        mesh = Mesh.of(ParallelPlan(dp=12, ep=3, shard=shard))
        for rank in range(12):
            ours, at = expert.place(hybrid, rank)
            assert ours.world == 4
            assert at == mesh.peers(rank, "edp").index(rank)
            if inner:  # they are neighbours in the group of `shard`
                first = at // inner * inner
                assert set(mesh.peers(rank, "edp")[first : first + inner]) <= set(mesh.peers(rank, "shard"))
