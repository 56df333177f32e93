"""Mesh: ranks, coordinates, peers and folds, against explicit tables and a walk over the world."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.errors import PlanError
from interlace.mesh import FOLDS, Mesh, overlap

sizes = st.integers(1, 4)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.permutations(["tp", "cp", "dp", "pp"]))[: draw(st.integers(0, 4))]
    axes = tuple((name, draw(sizes)) for name in names)
    by_name = dict(axes)
    folds = []
    for inner, (_, over) in FOLDS.items():
        whole = math.prod(by_name.get(name, 1) for name in over)
        part = draw(st.sampled_from([d for d in range(1, whole + 1) if whole % d == 0]))
        if draw(st.booleans()):
            folds.append((inner, part))
    return Mesh(axes, tuple(folds))


@dataclass
class Plan:
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    shard: int = 0


def test_axes_run_inner_to_outer() -> None:
    mesh = Mesh.parse("tp=2 dp=3")
    assert mesh.world == 6
    assert [mesh.coordinates(r) for r in (0, 1, 2, 4)] == [
        {"tp": 0, "dp": 0},
        {"tp": 1, "dp": 0},
        {"tp": 0, "dp": 1},
        {"tp": 0, "dp": 2},
    ]
    assert mesh.peers(3, "tp") == (2, 3)
    assert mesh.peers(3, "dp") == (1, 3, 5)
    assert mesh.groups("dp") == ((0, 2, 4), (1, 3, 5))
    assert mesh.groups(("dp", "tp")) == ((0, 1, 2, 3, 4, 5),)
    assert mesh.groups(("tp", "dp")) == ((0, 2, 4, 1, 3, 5),), "the first axis varies slowest"


def test_of_a_plan_puts_tp_innermost_and_pp_outermost() -> None:
    mesh = Mesh.of(Plan(tp=2, cp=2, dp=2, pp=3, ep=4, shard=2))
    assert str(mesh) == "tp=2 cp=2 dp=2 pp=3 ep=4 shard=2"
    assert mesh.rank(tp=1) == 1
    assert mesh.rank(cp=1) == 2
    assert mesh.rank(dp=1) == 4
    assert mesh.rank(pp=2, tp=1) == 17
    assert Mesh.of(Plan(dp=4)).folds == ()


def test_ep_folds_consecutive_ranks_of_cp_and_dp() -> None:
    mesh = Mesh.parse("tp=2 cp=2 dp=4 ep=4")
    assert mesh.size("ep") == 4
    assert mesh.size("edp") == 2
    assert mesh.peers(0, "ep") == (0, 2, 4, 6), "cp first, then dp"
    assert mesh.peers(0, "edp") == (0, 8)
    assert mesh.peers(13, "ep") == (9, 11, 13, 15)
    assert mesh.peers(0, ("ep", "dp")) == mesh.peers(0, ("dp", "cp")), "overlapping axes stand for what they fold"


def test_shard_folds_dp_and_unset_means_all_of_it() -> None:
    mesh = Mesh.parse("tp=2 dp=4 shard=2")
    assert mesh.peers(5, "shard") == (5, 7)
    assert mesh.peers(5, "replica") == (1, 5)
    plain = Mesh.parse("tp=2 dp=4")
    assert plain.peers(5, "shard") == plain.peers(5, "dp")
    assert plain.peers(5, "replica") == (5,)
    assert plain.size("ep") == 1
    assert plain.size("edp") == 4


def test_overlap_of_axis_names() -> None:
    assert overlap("dp", "ep")
    assert overlap("cp", "edp")
    assert overlap("shard", "ep")
    assert not overlap("ep", "edp")
    assert not overlap("shard", "replica")
    assert not overlap("cp", "shard")
    assert not overlap("tp", "ep")


@given(meshes())
def test_text_round_trip(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@given(meshes())
def test_ranks_and_coordinates_round_trip(mesh: Mesh) -> None:
    points = [mesh.coordinates(rank) for rank in range(mesh.world)]
    assert [mesh.rank(**point) for point in points] == list(range(mesh.world))
    assert len({tuple(point.items()) for point in points}) == mesh.world


@given(meshes(), st.sampled_from(["tp", "cp", "dp", "pp", "ep", "edp", "shard", "replica", "cp/tp", "dp/cp", "edp/tp"]))
def test_groups_partition_the_world_and_peers_are_in_axis_order(mesh: Mesh, name: str) -> None:
    axes = tuple(name.split("/"))
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        assert len(group) == mesh.size(axes)
        assert [mesh.index(rank, axes) for rank in group] == list(range(len(group)))
        assert all(mesh.peers(rank, axes) == group for rank in group)


@given(meshes())
def test_fold_pairs_meet_in_one_rank(mesh: Mesh) -> None:
    for inner, (outer, over) in FOLDS.items():
        for rank in range(mesh.world):
            assert set(mesh.peers(rank, inner)) & set(mesh.peers(rank, outer)) == {rank}
            assert set(mesh.peers(rank, (outer, inner))) == set(mesh.peers(rank, over))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tp", r"malformed at 'tp': expected axis=size"),
        ("tp=2 dp=x", r"malformed at 'dp=x'"),
        ("tp=-1", r"malformed at 'tp=-1'"),
        ("tp=0", r"'tp' has size 0"),
        ("tp=2 tp=2", r"'tp' is given 2 times"),
        ("t.p=2", r"'t.p' is no name"),
        ("dp=4 ep=3", r"ep=3 does not divide dp x cp = 4: use one of 1, 2, 4"),
        ("dp=6 shard=4", r"shard=4 does not divide dp = 6: use one of 1, 2, 3, 6"),
        ("edp=2", r"'edp' folds dp x cp"),
    ],
)
def test_malformed_meshes_are_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Mesh.parse(text)


def test_unknown_axes_and_ranks_are_refused() -> None:
    mesh = Mesh.parse("tp=2 stage=2")
    assert mesh.size("stage") == 2
    with pytest.raises(PlanError, match=r"no axis 'stagee': use stage"):
        mesh.size("stagee")
    with pytest.raises(PlanError, match=r"rank 4 is outside mesh 'tp=2 stage=2' of 4 ranks: use 0 to 3"):
        mesh.coordinates(4)
    with pytest.raises(PlanError, match=r"tp=2 is outside"):
        mesh.rank(tp=2)
    with pytest.raises(PlanError, match=r"'ep' is a fold"):
        mesh.rank(ep=0)
    with pytest.raises(PlanError, match=r"'tp' is no fold"):
        Mesh((("dp", 2),), (("tp", 2),))
