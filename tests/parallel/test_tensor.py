"""The tensor and sequence axis, each part against one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from interlace.collectives import Group, Meter
from interlace.collectives.groups import by_key
from interlace.errors import InterlaceError
from interlace.layout import split

Run = Callable[..., list[Any]]
OURS, ROLES = "rank_functions_tensor", "rank_functions_roles"


def test_every_collective_is_the_dual_of_another(run_ranks: Run) -> None:
    run_ranks(f"{OURS}:duals", 3)


def test_products_at_the_borders_of_a_layer(run_ranks: Run) -> None:
    run_ranks(f"{OURS}:products", 3)


def test_the_same_products_as_operators_of_a_graph(run_ranks: Run) -> None:
    run_ranks(f"{OURS}:products", 2, {"traced": True})


@pytest.mark.timeout(300)  # the first that a C++ compiler is asked for on a machine takes it minutes
def test_a_compiled_block_is_one_graph(run_ranks: Run) -> None:
    """Seven heads over two ranks that share their key head, biases everywhere, 23 features, 39 rows and then 18."""
    backend = "inductor" if shutil.which("g++") else "aot_eager"
    for rank in run_ranks(f"{OURS}:one_graph", 2, {"backend": backend}, 280.0):
        for plain, compiled in rank:
            assert plain == compiled
            assert plain["all_gather"] > 0


def test_a_graph_outlives_its_group() -> None:
    group = Group("tp", (0,), 0, torch.device("cpu"), Meter())
    key = group.key
    assert by_key(key) is group
    assert group.like(rank=0).key != key
    del group
    with pytest.raises(InterlaceError, match=r"a compiled graph transfers along tp 0 of 1, \d+, a group that is gone"):
        by_key(key)


def test_loss_of_a_split_vocabulary(run_ranks: Run) -> None:
    run_ranks(f"{OURS}:losses", 4)


@pytest.mark.parametrize("tp", [2, 4])
def test_65_words_and_13_positions_over_ranks_that_do_not_divide_them(run_ranks: Run, tp: int) -> None:
    run_ranks(f"{OURS}:vocabulary_of_65", tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_what_all_heads_of_latent_attention_share(run_ranks: Run, tp: int) -> None:
    """pytorch/torchtitan#1373: a rank's backward pass sees the shared key through its own heads alone."""
    run_ranks(f"{OURS}:shared_latents", tp)


def test_collectives_of_a_layer(run_ranks: Run) -> None:
    """Two gathers and two scatters each way where rows are split, two all-reduces each way where not."""
    for found in run_ranks(f"{OURS}:collectives_of_a_layer", 2):
        assert found == {"True": [[2, 2, 0], [2, 2, 0]], "False": [[0, 0, 2], [0, 0, 2]]}


def test_fewer_key_value_heads_than_ranks(run_ranks: Run) -> None:
    run_ranks(f"{OURS}:heads", 4)


def test_layouts_say_what_is_held_and_every_element_has_one_owner(run_ranks: Run) -> None:
    run_ranks(f"{OURS}:placements", 4)


@pytest.mark.filterwarnings("ignore:attention dropout")
def test_dropout_differs_where_tensors_are_split_and_agrees_where_not(run_ranks: Run) -> None:
    """Ranks 0 and 1 are a tensor group, 0 and 2 a data group."""
    found = run_ranks(f"{OURS}:masks", 4)

    def agreement(a: Any, b: Any) -> float:
        pairs = list(zip(_flat(a), _flat(b), strict=True))
        return sum(x == y for x, y in pairs) / len(pairs)

    for sequence in ("True", "False"):
        residual, attention = ([rank[sequence][kind] for rank in found] for kind in (0, 1))
        assert abs(agreement(residual[0], residual[2]) - 0.5) < 0.05
        assert abs(agreement(attention[0], attention[1]) - 0.5) < 0.05
        assert abs(agreement(attention[0], attention[2]) - 0.5) < 0.05
        if sequence == "True":
            assert abs(agreement(residual[0], residual[1]) - 0.5) < 0.05
        else:
            assert residual[0] == residual[1]


def _flat(value: Any) -> list[int]:
    return [x for inner in value for x in _flat(inner)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_row_bias_is_added_once(run_ranks: Run, tp: int) -> None:
    run_ranks(f"{ROLES}:row_bias", tp)


def test_own_modules_split_by_roles(run_ranks: Run) -> None:
    """A latent rope key that all heads share among them; and every wrong table is refused in one sentence."""
    for rank, said in enumerate(run_ranks(f"{ROLES}:own_modules", 2)):
        assert said["no split"].startswith("NumericsError: the gradient of attention.")
        assert "give the module around it the role SPLIT, or, if it is random" in said["no split"]
        assert said["kind"].endswith("it is a LayerNorm; give that role to nn.Linear.")
        assert "share a parameter but not a role" in said["tied"]
        assert said["parameter"].endswith("which an own module's parameter cannot be; name a module.")
        assert "roles names nothing to split" in said["nothing"]
        assert said["name"].endswith('of that name; did you mean "up"?')
        assert "1 drops with p=0.1" in said["dropout"]
        assert "is a ScaledWords with a forward of its own" in said["own forward"]
        assert "0 VOCAB, but it has hooks" in said["hooks"]
        assert "0.weight has a hook, which its slice under tp would not have" in said["parameter hook"]
        assert "computes its weight from others" in said["parametrized"]
        assert "(scale_grad_by_freq)" in said["by frequency"]
        assert "max_norm=1, with which each rank" in said["max norm"]
        for name in ("a softmax", "a norm", "another order", "a sum so far"):
            assert (
                "makes up COLUMN and down ROW, and between them a feature or head is computed from another"
                in said[name]
            )
        assert "makes k COLUMN and out ROW, and between them" in said["shared by turns"]
        for name in ("a sum", "a sum of weights"):
            assert "a number that leaves the module is computed from up, of which this rank has a slice" in said[name]
        assert "whose 4 of 8 features on this rank are taken for all classes; make head VOCAB" in said["classes"]
        assert said["two ranks, three keys"] == (
            "ConfigError: roles makes k COLUMN, whose 3 heads serve the 6 that out (ROW) takes, and over tp=2 a rank "
            "has heads of out whose share of k is on another one; use tp = 1, 3, 6."
        )
        right = ("a square", "another fault", "alternating", "in pairs", "cut by rows", "twice", "shared")
        for name in (*right, "a recomputed one"):
            assert said.pop(name) == "nothing", name
        assert "nothing" not in said.values()
        here = 4 - rank  # of two products that belong together both are named
        assert said["no row"] == (
            f"ConfigError: roles makes b COLUMN, whose {here} of 7 features on this rank go to down, which has no role "
            "and takes 7; make down ROW."
        )
        assert said["no column"] == (
            f"ConfigError: roles makes down ROW, so that it takes {here} of 7 features on this rank, and b gives it "
            "all 7; give b the role COLUMN."
        )
        assert said["one of two"] == (
            f"ConfigError: roles makes a COLUMN, whose {here} of 7 features on this rank meet all 7 of b, which has no "
            "role; give b the role COLUMN too."
        )
        assert said["whole to row"].endswith(
            "of 5 features on this rank, and it is given all of them; give a no role, or feed it from a COLUMN product."
        )
        leaves = (
            f"ConfigError: roles makes head COLUMN, whose {here} of 7 features on this rank leave the module; give "
            "head no role, or VOCAB, which gathers them."
        )
        assert said["leaves"] == said["leaves as a view"] == leaves
        assert said["two columns"].endswith("go to down, which is COLUMN and takes 8; make down ROW.")
        assert said["one behind another"] == (
            "ConfigError: roles makes fused COLUMN, whose 16 rows are 16 of 1 that stay together, and down (ROW) takes "
            "8; if fused is several products one behind another, give each a linear of its own, and if their rows "
            "alternate, give the number that belongs together."
        )
        for name in ("said to alternate", "sliced", "glu"):
            assert "makes fused COLUMN, and the module cuts its 8 of 16 features on this rank into pieces" in said[name]
        assert "makes q COLUMN, whose 4 of 8 features on this rank do not fit [-1, 4, 2]" in said["fixed heads"]
        assert said["tokens"].startswith("DataError: a token is 13, and the embedding has rows 0 to 12")
        assert said["a negative token"].startswith("DataError: a token is -1, and")
        assert "all 9" in said["heads"]  # of the second rank one head meets three, and nothing happens until out
        assert "give v the role COLUMN" in said["heads"]
        assert said["cuts"] == (
            "ConfigError: roles cuts the 9 features of q (COLUMN) at 6 and those of out (ROW) at 5, since 3 and 1 stay "
            "together; give both the same."
        )


def test_columns_that_read_one_tensor_share_one_sum(run_ranks: Run) -> None:
    assert run_ranks(f"{ROLES}:sums_of_shared_columns", 2) == [1, 1]


def test_a_split_block_keeps_what_is_counted(run_ranks: Run) -> None:
    for rank in run_ranks(f"{OURS}:kept_by_a_block", 2):
        for name, sequence, kept, counted in rank:
            assert kept == counted, (name, sequence)


def test_sizes_that_the_compiler_does_not_know_are_split() -> None:
    """The last batch of an epoch is smaller, and what is compiled then has symbols in place of numbers."""
    env = ShapeEnv()
    rows = env.create_symintnode(env.create_symbol(15, ConstantSource("rows"), DimDynamic.DYNAMIC), hint=15)
    for rank in range(4):
        start, stop = split(rows, 4, rank)
        assert (int(start), int(stop)) == split(15, 4, rank)
