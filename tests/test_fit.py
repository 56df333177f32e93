"""Plans: the rules that refuse one, the nearest one that works, and memory against counted tensors."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.collectives import Group, Meter
from interlace.config import Config, ModelConfig, ParallelPlan, load
from interlace.errors import PlanError
from interlace.models.decoder import Decoder
from interlace.models.moe import experts
from interlace.models.vocabulary import vocabulary_loss
from interlace.parallel.expert import ExpertAxis, SplitDispatch
from interlace.plan.activations import block_activations
from interlace.plan.fit import check, nearest_plans
from interlace.plan.memory import apart, estimate, gib, micro_batching
from interlace.plan.stages import contradiction, table_of
from interlace.schedule import FORMS, generate, lower
from interlace.spec import total_parameters

GIB = 1 << 30


def tiny(plan: str = "dp=1", *overrides: str) -> Config:
    return load(None, overrides, parallel=plan, preset="tiny")


def eight_billion(plan: str, *overrides: str) -> Config:
    return load(None, ("train.global_batch=64", *overrides), parallel=plan, preset="8b")


def refusal(config: Config, world: int, memory: int | None = None, axes: Sequence[str] = ("dp",)) -> str:
    with pytest.raises(PlanError) as caught:
        check(config, world, memory, axes)
    message = caught.value.message
    assert "\n" not in message
    assert not message.endswith(".")
    return message


# --- what divides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=4 zero=3", "dp=3 zero=2", "dp=4 micro_batches=4", "dp=5 micro_batch_size=2"]
)
def test_plans_that_run(plan: str) -> None:
    config = tiny(plan)  # 16 sequences: 3 and 5 replicas are uneven, which is balanced
    check(config, config.plan.world)


@pytest.mark.parametrize(
    ("plan", "world", "found", "nearest"),
    [
        ("dp=4 zero=3", 8, "needs 4 ranks, found 8", '"dp=8 zero=3"'),
        ("dp=2 tp=2", 4, "splits over tp, which this release does not execute (it executes dp)", '"dp=4"'),
        ("ep=2 dp=2", 2, "splits over ep", '"dp=2"'),
        ("dp=4 shard=2", 4, "splits over shard", '"dp=4"'),
        ("dp=4 micro_batches=9", 4, "asks for 9 micro-batches, found 4 sequences a replica", '"dp=4 micro_batches=4"'),
        ("dp=3 micro_batches=6", 3, "asks for 6 micro-batches, found 5 sequences a replica", '"dp=3 micro_batches=5"'),
        ("micro_batch_size=99", 1, "asks for micro_batch_size=99, found 16 sequences a replica", '"dp=1"'),
        ("micro_batches=3 micro_batch_size=4", 1, "asks for 3 micro-batches of 4", '"micro_batches=3"'),
        ("chunks=2", 1, "asks for chunks=2 without a pipeline", '"dp=1"'),
    ],
)
def test_refusals_on_the_data_axis(plan: str, world: int, found: str, nearest: str) -> None:
    message = refusal(tiny(plan), world)
    assert message.startswith(f'the parallel plan "{ParallelPlan.parse(plan)}" {found}')
    assert message.endswith(f"the nearest that works is {nearest}")


@pytest.mark.parametrize(
    ("plan", "axes", "found", "nearest"),
    [
        ("tp=3", "tp", "asks for tp=3, which does not divide the model's 8 heads", '"dp=3"'),
        ("tp=8", "tp", "", ""),  # 4 kv heads, each held by two ranks
        ("pp=16", "pp", "asks for pp=16, found 8 layers for 16 stages", '"dp=2 pp=8"'),
        (
            "pp=4 schedule=interleaved chunks=3",
            "pp",
            "asks for pp=4 chunks=3, found 8 layers for 12 stages",
            '"pp=4 schedule=interleaved chunks=2"',
        ),
        (
            "pp=4 chunks=2",
            "pp",
            "asks for chunks=2, found schedule=1f1b, which has 1 stages a rank",
            '"pp=4 schedule=interleaved chunks=2"',
        ),
        (
            "pp=2 layers=3/6",
            "pp",
            "asks for layers=3/6, found 2 stages of a layer or more and 8 layers",
            '"pp=2"',
        ),
        ("dp=2 unsharded=1", "pp", "asks for unsharded=1 without a pipeline (pp=1)", '"dp=2"'),
        ("dp=2 pp=2 zero=2 unsharded=1", "pp", "asks for unsharded=1 without zero=3", '"dp=2 pp=2 zero=3 unsharded=1"'),
        ("pp=2 zero=3 unsharded=2", "pp", "asks for unsharded=2, found 1 stages a rank", '"pp=2 zero=3"'),
        ("dp=2 schedule=zbv", "pp", "asks for schedule=zbv without a pipeline (pp=1)", '"dp=2"'),
        ("dp=2 schedule=own.csv", "pp", "asks for schedule=own.csv without a pipeline (pp=1)", '"dp=2"'),
        ("pp=5 schedule=zbv", "pp", "asks for pp=5 chunks=2, found 8 layers for 10 stages", '"pp=5"'),
        ("cp=64", "cp", "asks for cp=64, found 64 positions for 128 slices", '"dp=2 cp=32"'),
        ("dp=2 ep=2", "ep", "asks for ep=2, and the model has no experts", '"dp=2"'),
        ("dp=4 shard=2 zero=3", "shard", "", ""),
        ("dp=4 shard=2", "shard", "asks for shard=2 with zero=0, which repeats everything", '"dp=4 zero=1 shard=2"'),
        ("dp=4 shard=3", "shard", "asks for shard=3, which does not divide dp=4", '"dp=4"'),
    ],
)
def test_axes_to_come_only_extend_the_tuple(plan: str, axes: str, found: str, nearest: str) -> None:
    config = tiny(plan)
    if not found:
        check(config, config.plan.world, available_axes=("dp", axes))
        return
    message = refusal(config, config.plan.world, axes=("dp", axes))
    assert found in message
    assert message.endswith(nearest)


def test_experts_are_dealt_out_unevenly_to_ranks_that_exist() -> None:
    experts = ("model.num_experts=6", "model.expert_ffn_size=32")
    for plan in ("dp=4 ep=2", "dp=4 ep=4"):  # 3 3, and 2 2 1 1
        check(tiny(plan, *experts), 4, available_axes=("dp", "ep"))
    assert "does not divide dp x cp = 4" in refusal(tiny("dp=4 ep=3", *experts), 4, axes=("dp", "ep"))
    message = refusal(tiny("dp=8 ep=8", *experts), 8, axes=("dp", "ep"))
    assert "asks for ep=8, found 6 experts" in message
    assert message.endswith('"dp=8 ep=4"')


def test_sizes_that_no_plan_mends() -> None:
    message = refusal(tiny("dp=1", "data.sequence_length=4096"), 1)
    assert message.endswith("above model.max_positions 2048: nearest is data.sequence_length=2048")
    message = refusal(tiny("dp=1", "model.vocab_size=256"), 1)
    assert message.endswith("nearest is model.vocab_size=257")
    check(tiny("dp=1", "model.vocab_size=256", "data.tokenizer=own.json"), 1)
    with pytest.raises(PlanError, match="a run needs at least 1 rank, found 0"):
        check(tiny(), 0)


def test_reproducible_sums_are_fixed_over_dp_and_pp_only() -> None:
    config = tiny("dp=2 tp=2", 'run.reproducible="plan"')
    message = refusal(config, 4, axes=("dp", "tp"))
    assert "splits over tp with run.reproducible" in message
    assert message.endswith('"dp=4"')


def test_fixed_micro_batches_are_sequences_not_a_number() -> None:
    fixed = 'run.reproducible="plan"'
    message = refusal(tiny("dp=2 micro_batches=4", fixed), 2)
    assert "follows from micro_batch_size" in message
    assert message.endswith('"dp=2"')
    message = refusal(tiny("dp=2 micro_batch_size=40", fixed, "train.global_batch=9"), 2)
    assert "asks for micro_batch_size=40, found train.global_batch 9" in message
    assert message.endswith('"dp=2 micro_batch_size=9"')
    check(tiny("dp=8 micro_batch_size=3", fixed, "train.global_batch=9"), 8)  # more ranks than micro-batches
    message = refusal(tiny("dp=2", fixed, "train.reduce_dtype=bf16"), 2)
    assert message.endswith('nearest is train.reduce_dtype="fp32"')


def test_memory_of_hybrid_sharding_is_that_of_its_inner_group() -> None:
    config = tiny("dp=2", "train.global_batch=16")
    for zero in (1, 2, 3):
        hybrid = estimate(config, ParallelPlan(dp=8, shard=2, zero=zero, micro_batch_size=2))
        inner = estimate(config, ParallelPlan(dp=2, zero=zero, micro_batch_size=2, micro_batches=4))
        for part in ("parameters", "optimizer", "gather"):
            assert getattr(hybrid, part) == pytest.approx(getattr(inner, part), rel=0.02), (zero, part)


def test_memory_of_a_fixed_order() -> None:
    for zero in range(4):
        words = (f"dp=2 zero={zero} micro_batch_size=4", "train.global_batch=16")
        plain = tiny(*words)
        fixed = tiny(*words, 'run.reproducible="plan"')
        assert micro_batching(fixed, fixed.plan) == (2, 4)
        needed = [estimate(config, config.plan).gradients for config in (fixed, plain)]
        assert needed[0] < needed[1]  # none are whole between rounds


@settings(max_examples=30)
@given(st.integers(1, 24), st.integers(1, 40), st.sampled_from([("dp",), ("dp", "tp", "pp", "cp")]))
def test_every_neighbour_passes_the_check(world: int, batch: int, axes: tuple[str, ...]) -> None:
    config = tiny("dp=2 zero=1 micro_batches=2", f"train.global_batch={batch}")
    found = nearest_plans(config, world, available_axes=axes, count=4)
    assert found
    for plan in found:
        check(Config(config.model, plan, config.data, config.train, config.run), world, available_axes=axes)


# --- what fits -----------------------------------------------------------------------------------------------------


def test_refusal_names_need_have_and_the_nearest_plan_that_fits() -> None:
    config = eight_billion("dp=8")
    message = refusal(config, 8, 80 * GIB)
    need = estimate(config, config.plan).total
    assert message.startswith(f'the parallel plan "dp=8" needs {gib(need)} a rank (activations')
    assert "found 80.0 GiB: the nearest that works is" in message
    (plan,) = nearest_plans(config, 8, 80 * GIB, count=1)
    assert message.endswith(f'"{plan}"')
    assert estimate(config, plan).total <= 80 * GIB
    check(eight_billion(str(plan)), 8, 80 * GIB)


def test_more_ranks_where_none_fits_and_an_end_where_nothing_helps() -> None:
    config = eight_billion("dp=2 zero=3", "data.sequence_length=512")
    message = refusal(config, 2, 24 * GIB)
    assert "none fits 2 ranks, the nearest that works is" in message
    ranks = int(message.rsplit(" on ", 1)[1])
    assert ranks > 2
    assert nearest_plans(config, ranks, 24 * GIB)
    assert not nearest_plans(config, ranks // 2, 24 * GIB)
    assert "none fits up to 256 ranks" in refusal(config, 2, GIB)


def test_model_states_by_zero_stage() -> None:
    """Bytes per parameter and rank in bf16: 4 main + 2 computing, 4 gradient, 8 AdamW, divided as the stage says."""
    total = total_parameters(eight_billion("dp=8").model_config())
    for zero, parameters, optimizer in ((0, 6, 8), (1, 4 / 8 + 2, 1), (2, 4 / 8 + 2, 1), (3, 4 / 8, 1)):
        config = eight_billion(f"dp=8 zero={zero}")
        memory = estimate(config, config.plan)
        assert memory.parameters == pytest.approx(parameters * total, rel=1e-3)
        assert memory.optimizer == pytest.approx(optimizer * total, rel=1e-3)
    fp32 = eight_billion("dp=8", 'train.precision="fp32"')
    assert estimate(fp32, fp32.plan).parameters == pytest.approx(4 * total, rel=1e-3)  # no second copy
    sgd = eight_billion("dp=8", "train.optimizer=sgd")
    assert estimate(sgd, sgd.plan).optimizer == 0


def test_biases_of_routers_are_kept_in_fp32_on_every_rank() -> None:
    for plan, layers in (("dp=4 zero=3", 8), ("pp=2", 4), ("tp=4", 8)):
        experts = ("model.num_experts=6", "model.expert_ffn_size=32", "parallel.plan=" + plan)
        plain, biased = (tiny(plan, *experts, f"model.router_bias={asked}") for asked in ("false", "true"))
        found = estimate(biased, biased.plan).parameters - estimate(plain, plain.plan).parameters
        assert found == 4 * 6 * layers, plan


def test_units_in_flight() -> None:
    V, D, block = 128256, 4096, 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    config = eight_billion("dp=8 zero=3")
    memory = estimate(config, config.plan)
    # embedding and head take turns in one buffer, the blocks in two
    assert memory.gather == pytest.approx(2 * (V * D + 2 * block), rel=1e-2)
    total = total_parameters(config.model_config())
    # in bf16: three units that peers read, or as they are made; and one gradient as autograd leaves it
    made = 2 * V * D
    assert memory.gradients == pytest.approx(2 * (V * D + 3 * block) + made, rel=1e-2)
    library = eight_billion("dp=8 zero=3 transport=library")
    assert estimate(library, library.plan).gradients == pytest.approx(2 * (V * D + 2 * block) + made, rel=1e-2)
    several = eight_billion("dp=8 zero=3 micro_batches=2")
    room = 2 * (V * D + 3 * block)  # is there, though they add up elsewhere, in fp32
    assert estimate(several, several.plan).gradients == pytest.approx(4 * total + room + made, rel=1e-2)
    alone = eight_billion("dp=1 zero=3")
    assert estimate(alone, alone.plan).gather == 0


def test_boxes_of_a_pipeline() -> None:
    """Slots for the messages of the lines that come to a rank: one line of two ranks, two lines of more."""
    words = ["train.global_batch=8", "data.sequence_length=4096", "train.precision=bf16"]
    for plan, lines, rows in (
        ("pp=2 micro_batches=4", 1, 2 * 4096),
        ("pp=4 schedule=zbv micro_batches=8", 2, 4096),
        ("pp=2 tp=2 micro_batches=4", 1, 4096),
        ("pp=2 tp=2 sequence=off micro_batches=4", 1, 2 * 4096),
    ):
        config = load(None, parallel=plan, preset="1.2b", overrides=words)
        D, slots = config.model_config().hidden_size, 3
        found = estimate(config, config.plan).symmetric
        assert found == pytest.approx(lines * slots * 2 * rows * D, abs=4 << 20), plan
        library = load(None, parallel=f"{plan} transport=library", preset="1.2b", overrides=words)
        for cfg, device in ((library, "cuda"), (config, "cpu")):
            assert estimate(cfg, cfg.plan, device).symmetric == 0


def test_tied_embedding_stays_whole() -> None:
    config = load(None, parallel="dp=4 zero=3", preset="qwen3-0.6b")
    memory = estimate(config, config.plan)
    tied = 151936 * 1024
    rest = total_parameters(config.model_config()) - tied
    assert memory.parameters == pytest.approx(4 * (tied + rest) / 4 + 2 * tied, rel=1e-2)
    assert memory.gather < 2 * rest / 4


def test_stages_that_take_turns_being_whole() -> None:
    """Copies in bf16 of some stages of a rank, or of all; where they do not fit, fewer are, before any recompute."""
    plain = "dp=2 pp=4 zero=3 schedule=interleaved chunks=4 micro_batches=8"
    words = ("train.precision=bf16", "train.global_batch=16")  # as many micro-batches as there are
    configs = [eight_billion(f"{plain} unsharded={number}", *words) for number in range(4)]
    for config in configs:
        check(config, 8, available_axes=("dp", "pp"))
    every, one, two, three = (estimate(config, config.plan) for config in configs)
    stage = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)  # elements: 8 layers a rank, 2 a stage
    assert every.parameters - three.parameters == pytest.approx(2 * stage, rel=1e-2)
    assert two.parameters - one.parameters == pytest.approx(2 * stage, rel=1e-2)
    near = nearest_plans(configs[0], 8, every.total - 1, ("dp", "pp"))[0]
    assert near == configs[1].plan


def test_every_cure_helps() -> None:
    def total(plan: str) -> int:
        config = eight_billion(plan)
        return estimate(config, config.plan).total

    falling = [f"dp=8 zero={zero}" for zero in range(4)]
    assert sorted(map(total, falling), reverse=True) == list(map(total, falling))
    policies = [f"dp=8 zero=3 recompute={policy}" for policy in ("none", "selective", "full")]
    assert sorted(map(total, policies), reverse=True) == list(map(total, policies))
    assert total("dp=16 zero=3") < total("dp=8 zero=3")
    assert total("dp=8 micro_batches=8") < total("dp=8")


def test_experts_are_divided_over_ep_not_only_tp() -> None:
    """NVIDIA-NeMo/Megatron-Bridge PR#3744: dense weights by tp, experts by ep and tp, norms and router by neither."""
    experts = ("model.num_experts=4", "model.expert_ffn_size=96", "model.num_layers=1")
    config = tiny("dp=4 ep=4 tp=2", *experts)
    cfg = config.model_config()
    D, V = 64, 257
    dense = (8 * 8 * D + 2 * 4 * 8 * D + D * 64) // 2 + (V + 1) // 2 * D * 2
    whole = 3 * D + 4 * D
    expert = 3 * 4 * 96 * D // (4 * 2)
    assert total_parameters(cfg) == (8 * 8 * D + 2 * 4 * 8 * D + D * 64) + 2 * V * D + whole + 3 * 4 * 96 * D
    assert estimate(config, config.plan).parameters == pytest.approx(4 * (dense + whole + expert), rel=5e-3)


def test_dense_layers_among_experts_count_as_themselves() -> None:
    """A layer of each kind needs what half of two models of one kind do."""
    sizes = ("model.num_layers=2", "model.ffn_size=300")
    experts = ("model.num_experts=4", "model.expert_ffn_size=512", "model.shared_ffn_size=64")
    for more in ("zero=3 dp=2", "recompute=full"):
        mixed, dense, routed = (
            estimate(config, config.plan, "cpu")
            for given in ([*experts, "model.dense_layers=[0]"], [], experts)
            for config in [tiny(more, *sizes, *given)]
        )
        assert 2 * mixed.optimizer == pytest.approx(dense.optimizer + routed.optimizer, rel=1e-3)
        if more == "recompute=full":  # of the block that backward runs again, the larger one is counted
            assert mixed.activations == routed.activations
        else:
            assert 2 * mixed.activations == dense.activations + routed.activations


def test_micro_batches_of_an_uneven_batch() -> None:
    config = tiny("dp=3", "train.global_batch=17")  # 6, 6, 5
    assert micro_batching(config, config.plan) == (1, 6)
    assert micro_batching(config, ParallelPlan(dp=3, micro_batches=4)) == (4, 2)
    assert micro_batching(config, ParallelPlan(dp=3, micro_batch_size=4)) == (2, 4)
    assert micro_batching(config, ParallelPlan(dp=32)) == (1, 1)


def test_sizes_read_well() -> None:
    assert [gib(n) for n in (512, 3 << 20, 5 * GIB // 2)] == ["0.5 KiB", "3.0 MiB", "2.5 GiB"]
    assert apart(2 * GIB, GIB) == ("2.0 GiB", "1.0 GiB")
    assert apart(2 * GIB + 5000, 2 * GIB) == ("2,147,488,648 bytes", "2,147,483,648 bytes")


# --- activations against autograd ----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 1,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 40,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "expert_ffn_size": 12, "experts_per_token": 2}
LATENT: dict[str, Any] = {"num_kv_heads": 6, "kv_rank": 10, "rotary_dim": 2}
NARROW = LATENT | {"q_rank": 7, "value_dim": 5}
DEEPSEEK: dict[str, Any] = {
    "router_scores": "sigmoid",
    "router_bias": True,
    "router_groups": 2,
    "router_top_groups": 1,
    "router_scale": 2.5,
    "router_fp32": True,
    "router_aux_loss": 0.1,
    "router_z_loss": 0.1,
    "shared_ffn_size": 20,
}


def saved_bytes(
    cfg: ModelConfig,
    batch: int,
    length: int,
    dtype: torch.dtype,
    documents: bool,
    compiled: bool = False,
    dispatch: torch.nn.Module | None = None,
) -> int:
    """Bytes of the distinct storages that autograd keeps for one block, weights and what layers share left out."""
    model = Decoder(cfg, dtype=dtype)
    if dispatch is not None:
        model.blocks[0].moe.dispatch = dispatch
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    numbers = (torch.arange(length) // 5).expand(batch, length) if documents else None
    context = model.context((batch, length), torch.device("cpu"), documents_BT=numbers)
    for pattern in context.patterns.values():
        pattern.prepare(dtype, cfg.head_dim)
    shared = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *context.rotary]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in shared:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(batch, length, cfg.hidden_size, dtype=dtype, requires_grad=True)
    block = torch.compile(model.blocks[0].forward) if compiled else model.blocks[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, context)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.filterwarnings("ignore:attention dropout")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"qk_norm": True},
        {"norm": "layernorm", "activation": "gelu"},
        {"sliding_window": 4},
        {"dropout": 0.1},
        {"attention_dropout": 0.1},
        EXPERTS,
        EXPERTS | {"norm_topk": False},
        EXPERTS | {"router_aux_loss": 0.1, "router_z_loss": 0.1},
        EXPERTS | {"router_fp32": True, "capacity_factor": 4.0},  # room for all
        EXPERTS | {"shared_ffn_size": 20, "shared_gate": True},
        EXPERTS | DEEPSEEK,
        LATENT,
        NARROW,
        NARROW | {"attention_dropout": 0.1},
        EXPERTS | DEEPSEEK | NARROW | {"value_dim": 0},
    ],
    ids=lambda change: "-".join(change)[:60] or "plain",
)
def test_a_block_keeps_what_is_counted(change: dict[str, Any], documents: bool, dtype: torch.dtype) -> None:
    cfg = ModelConfig(**(SMALL | change))
    asked = block_activations(cfg, 2, 13, dtype.itemsize, documents=documents, device="cpu")
    assert asked == saved_bytes(cfg, 2, 13, dtype, documents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", [False, True])
def test_a_block_whose_rows_go_to_their_experts_keeps_what_is_counted(halves: bool, dtype: torch.dtype) -> None:
    cfg = ModelConfig(**(SMALL | EXPERTS))
    alone = Group("ep", (0,), 0, torch.device("cpu"), Meter())
    dispatch = SplitDispatch(ExpertAxis(alone, experts, halves), cfg.num_experts)
    asked = block_activations(cfg, 2, 13, dtype.itemsize, device="cpu", ep=2)
    assert asked == saved_bytes(cfg, 2, 13, dtype, False, dispatch=dispatch)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.xdist_group("compiled blocks")  # the compiler is imported once
@pytest.mark.parametrize("change", [{}, {"qk_norm": True}, {"norm": "layernorm", "activation": "gelu"}, NARROW])
def test_a_compiled_block_keeps_what_is_counted(change: dict[str, Any]) -> None:
    cfg = ModelConfig(**(SMALL | change))
    asked = block_activations(cfg, 2, 13, 2, device="cpu", compiled=True)
    assert asked == saved_bytes(cfg, 2, 13, torch.bfloat16, False, compiled=True)


def test_recompute_keeps_less() -> None:
    cfg = ModelConfig(**SMALL)
    sizes = [block_activations(cfg, 2, 13, 2, policy) for policy in ("none", "selective", "full")]
    assert sizes[0] - sizes[1] == 2 * 13 * 6 * 4  # the log-sum per head
    assert sizes[2] == 2 * 13 * 24 * 2  # the block's input


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_keeps_gradients_and_no_logits(dtype: torch.dtype) -> None:
    """What is kept from forward to backward of the loss: the gradients of its two inputs."""
    x = torch.randn(26, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(61, 6, dtype=dtype, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        vocabulary_loss(x, weight, torch.zeros(26, dtype=torch.int64)).backward()
    assert sorted(tuple(t.shape) for t in kept) == [(26, 6), (61, 6)]
    assert {t.dtype for t in kept} == {dtype}


def test_fused_products_need_a_tensor_or_expert_axis() -> None:
    message = refusal(tiny("dp=2 overlap=fused"), 2, axes=("dp", "tp"))
    assert "asks for overlap=fused with tp=1 and ep=1, which leave no product" in message
    assert message.endswith('nearest that works is "dp=2"')
    experts = ("model.num_experts=4", "model.expert_ffn_size=8")
    for overlap in ("auto", "plain", "fused", "off"):
        check(tiny(f"tp=2 overlap={overlap}"), 2, None, ("dp", "tp"))
        check(tiny(f"dp=2 ep=2 overlap={overlap}", *experts), 2, None, ("dp", "ep"))
    uneven = refusal(tiny("dp=3 ep=2 overlap=fused", *experts), 3, axes=("dp", "ep"))
    assert uneven.endswith('nearest that works is "dp=3 ep=3 overlap=fused"')


def test_what_pipelines_refuse(tmp_path: Path) -> None:
    compiled = tiny("pp=2 schedule=zb-h1 micro_batches=4", "train.compile=true")
    message = refusal(compiled, 2, axes=("dp", "pp"))
    assert "schedule=zb-h1, which runs backward in two parts, with train.compile=true" in message
    assert message.endswith('"pp=2 micro_batches=4"')
    check(tiny("pp=2 micro_batches=4", "train.compile=true"), 2, available_axes=("dp", "pp"))
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    check(tiny(f"pp=2 micro_batches=2 schedule={file}"), 2, available_axes=("dp", "pp"))
    check(tiny(f"pp=2 micro_batches=2 schedule={file}", "train.compile=true"), 2, available_axes=("dp", "pp"))
    message = refusal(tiny(f"pp=2 micro_batches=3 schedule={file}"), 2, axes=("dp", "pp"))
    assert f"asks for micro_batches=3, found micro_batches=2 in {file}" in message
    assert f'"pp=2 schedule={file} micro_batches=2"' in message
    whole = tmp_path / "whole.csv"
    whole.write_text(lower(generate("zbv", 2, 2), 3, keep=1).to_csv())
    message = refusal(tiny(f"pp=2 zero=3 micro_batches=2 unsharded=1 schedule={whole}"), 2, axes=("dp", "pp"))
    assert f"asks for unsharded=1, found gathers in {whole}" in message
    assert message.endswith(f'"pp=2 zero=3 schedule={whole} micro_batches=2"')
    message = refusal(tiny(f"pp=2 chunks=2 micro_batches=2 schedule={file}"), 2, axes=("dp", "pp"))
    assert f"asks for chunks=2, found chunks=1 in {file}" in message
    message = refusal(tiny(f"pp=2 micro_batches=2 schedule={file}", "model.num_layers=1"), 2, axes=("dp", "pp"))
    assert message.endswith('"dp=2 micro_batches=2"')  # a schedule is a pipeline's
    file.write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    message = refusal(tiny(f"pp=2 micro_batches=4 schedule={file}"), 2, axes=("dp", "pp"))
    assert message.endswith(f'"pp=2 schedule={file} micro_batches=3"')
    message = refusal(tiny(f"pp=4 micro_batches=2 schedule={file}"), 4, axes=("dp", "pp"))
    assert f"asks for pp=4, found pp=2 in {file}" in message
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n")
    with pytest.raises(PlanError, match=r"own.csv, line 2: rank 1 never runs 1B1; add it"):
        check(tiny(f"pp=2 micro_batches=2 schedule={file}"), 2, available_axes=("dp", "pp"))


FIXED = "run.reproducible=plan"
ZEROED = "{0}UNSHARD,{0}F0,{0}F1,{0}B0,{0}B1,{0}REDUCE"


@pytest.mark.parametrize(
    ("row", "words", "fault"),
    [
        ("{0}F0,{0}F1,{0}B1,{0}B0", [FIXED], "runs 0B1 before 0B0, and run.reproducible"),
        ("{0}F0,{0}F1,{0}I1,{0}I0,{0}W0,{0}W1", [FIXED], "runs 0I1 before 0I0, and run.reproducible"),
        (ZEROED, [FIXED], 'runs 0REDUCE, and run.reproducible = "plan" reduces every micro-batch'),
        (ZEROED.replace("REDUCE", "REDUCE0,{0}REDUCE1"), [], "runs 0REDUCE0, and reduce=step reduces once a step"),
        (ZEROED, ["zero=3"], "leaves stage 0 whole with zero=3, without a RESHARD behind its last use"),
    ],
)
def test_a_schedule_file_that_contradicts_its_plan(tmp_path: Path, row: str, words: list[str], fault: str) -> None:
    file = tmp_path / "own.csv"
    file.write_text(f"{row.format(0)}\n{row.format(1)}\n")
    fixed = FIXED in words
    batches = "micro_batch_size=8" if fixed else f"micro_batches=2 {' '.join(words)}"
    cfg = tiny(f"dp=2 pp=2 schedule={file} {batches}", *([FIXED, "train.global_batch=32"] if fixed else []))
    message = refusal(cfg, 4, axes=("dp", "pp"))
    assert f"asks for schedule={file}, which {fault}" in message
    with pytest.raises(PlanError, match=r"own\.csv (runs|leaves)"):
        table_of(cfg.plan, 2, fixed)
    for name in FORMS:
        for ranks, count in ((2, 3), (3, 7), (4, 5)):
            for zero in range(4):
                table = lower(generate(name, ranks, count), zero, each=fixed)
                assert contradiction(table, ParallelPlan(zero=zero), fixed) is None, f"{name} {ranks} {count} {zero}"


def test_a_rank_of_a_pipeline_holds_what_its_table_says() -> None:
    """More micro-batches cost gpipe memory and 1f1b none; half of it is enough for v-half."""

    def activations(plan: str) -> int:
        return estimate(tiny(plan, "model.num_layers=16", "model.vocab_size=257", "train.global_batch=64"),
                        ParallelPlan.parse(plan)).activations  # fmt: skip

    def of(schedule: str, count: int) -> int:
        return activations(f"pp=8 schedule={schedule} micro_batches={count}") * count  # a micro-batch is 64 / count

    assert of("gpipe", 32) > 1.9 * of("gpipe", 16)
    assert of("1f1b", 32) == pytest.approx(of("1f1b", 16), rel=0.02)
    assert of("v-half", 32) == pytest.approx(of("1f1b", 32) * 10 / 16, rel=0.1)
