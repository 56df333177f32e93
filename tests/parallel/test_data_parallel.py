"""The data axis and ZeRO 0 to 3 against one process; every case runs all four stages."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., list[Any]]
RANKS = "rank_functions_data"


@pytest.mark.parametrize(("world", "recompute"), [(1, False), (2, True), (3, False), (4, False)])
def test_a_user_module_trains_as_in_one_process(run_ranks: Run, world: int, recompute: bool) -> None:
    """Also deepspeedai/DeepSpeed#777: a layer nobody uses and a branch of rank 0 alone neither hang nor differ."""
    run_ranks(f"{RANKS}:user_module", world, {"recompute": recompute})


def test_a_decoder_trains_as_in_one_process_however_its_labels_are_spread(run_ranks: Run) -> None:
    run_ranks(f"{RANKS}:decoders", 4)


def test_tied_weights_are_one_tensor_at_every_stage(run_ranks: Run) -> None:
    run_ranks(f"{RANKS}:tied_stages", 2)


def test_accumulated_gradients_are_reduced_once(run_ranks: Run) -> None:
    for values, reductions in run_ranks(f"{RANKS}:accumulation", 2):
        assert values == [5.5] * 8
        assert reductions == [0]


def test_bf16_gradients_add_up_in_fp32(run_ranks: Run) -> None:
    for rank, found in enumerate(run_ranks(f"{RANKS}:narrow", 2)):
        assert len(found) == (24 if rank == 0 else 12)
        assert all(gradient == 259.0 and dtype == "torch.float32" for gradient, dtype, _ in found)
        assert rank or {leaf for *_, leaf in found} == {"torch.float32"}


def test_bf16_compute_keeps_fp32_main_weights(run_ranks: Run) -> None:
    run_ranks(f"{RANKS}:mixed_precision", 2)


def test_gradients_travel_in_bf16_only_when_asked(run_ranks: Run) -> None:
    for plain, narrow, plain_2, narrow_2 in run_ranks(f"{RANKS}:wire", 3):
        assert plain == 4 * narrow > 0
        assert plain_2 == 4 * narrow_2 == plain


def test_bf16_gradients_of_one_pass_travel_as_they_are_and_add_up_in_fp32(run_ranks: Run) -> None:
    for found in run_ranks(f"{RANKS}:narrow_wire", 4):
        assert all(two == again == 2 * one > 0 for two, one, again in found)


def test_the_norm_counts_each_parameter_once(run_ranks: Run) -> None:
    stages = run_ranks(f"{RANKS}:norms", 3)
    assert stages[0] == stages[1] == stages[2]
    for distinct, squares, norm in stages[0]:
        assert squares == distinct
        assert norm == math.sqrt(distinct)


def test_squares_summed_while_gradients_travel_are_the_same(run_ranks: Run) -> None:
    for rank, stages in enumerate(run_ranks(f"{RANKS}:early_squares", 2)):
        for zero, (known, late, early, doubled) in enumerate(stages):
            assert (known > 0) == (zero > 0 or rank == 0), "what all hold is counted by the first"
            assert early == late
            assert doubled == 4 * late, "gradients that were written to since are summed anew"


def test_any_order_of_calls_gives_what_pytorch_gives(run_ranks: Run) -> None:
    run_ranks("rank_functions_passes:passes", 2)


def test_stock_optimizers_see_flat_leaves(run_ranks: Run) -> None:
    run_ranks("rank_functions_passes:optimizers", 2)


def test_modules_of_many_shapes(run_ranks: Run) -> None:
    run_ranks("rank_functions_modules:shapes", 2)


def test_wrong_use_is_refused_by_one_sentence(run_ranks: Run) -> None:
    first, second = run_ranks("rank_functions_modules:wrong_use", 2)
    assert first == second
    expected = {
        "stage": "ConfigError: zero=4 is not a ZeRO stage; choose 0, 1, 2 or 3.",
        "gradients": 'ConfigError: gradients="average" is neither "mean" nor "sum".',
        "pattern": 'ConfigError: units names "block.*", but the module has no submodule of that name; did you',
        "list": 'ConfigError: units names "blocks", a ModuleList, which is never called itself; name its children',
        "order": "ConfigError: blocks.2 ran after a unit that stands behind it in the list of units; list units in",
        "outside": "ConfigError: blocks.0 was called outside the wrapped module; call the object that parallelize",
        "two forwards": "ConfigError: the backward of blocks.4 began twice in one pass; run one forward per backward",
        "penalty": "ConfigError: blocks.4.linear.bias got a gradient after blocks.4 had been reduced; leave block",
        "graph of backward": "ConfigError: zero=3 cannot keep a graph of the backward pass (create_graph); use zero 0",
        "recomputed": "ConfigError: the wrapped module ran inside its own backward; recompute parts of it, not the wh",
        "half": "ConfigError: a wrapped module cannot be moved or cast; do it before parallelize, or give compute_",
        "meta": "ConfigError: the module is on the meta device; give materialise, or build it on a real device.",
        "mesh": "PlanError: the mesh dp=3 has 3 ranks, but 2 are running; use dp=2.",
        "axis": "PlanError: the mesh pp=2 splits over pp, which this release does not execute; use dp=2.",
        "stage in mesh": 'PlanError: the mesh "dp=2 zero=3" names zero, which is no axis; give it apart, zero=3.',
        "misspelt axis": 'PlanError: the mesh "tpp=2" names tpp, which is no axis; did you mean tp?',
        "number": 'PlanError: mesh=2 is no mesh; give a text such as "dp=2", or a Mesh.',
        "wrapped": "ConfigError: 0 is wrapped already; wrap the whole module once.",
        "nowhere": "ConfigError: weight is on the meta device; give it values before parallelize.",
        "role": 'ConfigError: roles names "wieght", but the module has no module or parameter of that name; did you',
        "missing": 'CheckpointError: the state lacks "head.bias", which the module has; give strict=False to keep it.',
        "unexpected": 'CheckpointError: the state has "tail.bias", which the module lacks; give strict=False to skip',
        "two values": 'CheckpointError: "head.weight" and "embedding.weight" differ in the state and are one parameter',
        "negative norm": "ConfigError: clip_grad_norm_ takes a max_norm of at least 0, found -1.",
        "norm type": "ConfigError: clip_grad_norm_ takes a norm_type above 0, or inf, found 0.",
        "shape": 'CheckpointError: "head.bias" is [1] in the state and [13] in the module; load the state of a module',
    }
    assert first.keys() == expected.keys()
    for name, sentence in expected.items():
        assert first[name].startswith(sentence), (name, first[name])


def test_gathers_are_those_of_the_plan(run_ranks: Run) -> None:
    for rank in run_ranks("rank_functions_modules:gathers", 2):
        assert [counted for counted, _ in rank] == [planned for _, planned in rank]


def test_each_stage_keeps_only_what_it_says(run_ranks: Run) -> None:
    for rank in run_ranks("rank_functions_modules:memory", 2):
        whole, frozen = rank["whole"], rank["frozen"]
        trained = whole - frozen
        assert rank["0"] == {"main": whole, "copies": 0, "gradients": trained}
        assert rank["1"] == {"main": trained // 2 + frozen, "copies": trained, "gradients": trained}
        assert rank["2"] == {"main": trained // 2 + frozen, "copies": trained, "gradients": trained // 2}
        assert rank["3"] == {"main": whole // 2, "copies": rank["two units"], "gradients": trained // 2}


def test_a_state_loads_at_every_other_stage(run_ranks: Run) -> None:
    run_ranks("rank_functions_modules:states", 3)


def test_a_wrong_factor_on_one_rank_is_found(run_ranks: Run) -> None:
    for rank in run_ranks("rank_functions_modules:planted", 2, {"fault": "scaled"}):
        for stage in "0123":
            assert any("gradient" in line for line in rank[stage])
            assert any("weight" in line for line in rank[stage])


def test_a_parameter_left_out_of_the_reduction_is_found(run_ranks: Run) -> None:
    for rank in run_ranks("rank_functions_modules:planted", 2, {"fault": "left out"}):
        for stage in "0123":
            assert len(rank[stage]) == 2
            assert all("blocks.1.down.weight" in line for line in rank[stage])
    for rank in run_ranks("rank_functions_modules:planted", 2, {"fault": "none"}):
        assert rank == {"0": [], "1": [], "2": [], "3": []}


def test_compiled_blocks_train_as_plain_ones(run_ranks: Run) -> None:
    run_ranks("rank_functions_modules:compiled", 2, {"backend": "inductor" if shutil.which("g++") else ""})
