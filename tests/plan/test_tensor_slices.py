"""How the tensor axis slices and what it sends, as integers."""

from __future__ import annotations

import pytest

from interlace import spec
from interlace.config import Config, loads
from interlace.errors import PlanError
from interlace.layout import Layout
from interlace.mesh import Mesh
from interlace.plan import tensor
from interlace.topology import Topology


def config(plan: str, *overrides: str) -> Config:
    return loads('[model]\npreset = "tiny"\n', overrides, plan)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_slices_are_what_their_layouts_say(tp: int) -> None:
    """Uneven vocabulary and features, heads that stay whole, fewer key-value heads than ranks, experts."""
    mesh = Mesh((("tp", tp),))
    for more in ([], ["model.num_experts=3", "model.expert_ffn_size=13"]):
        cfg = config("dp=1", "model.vocab_size=265", "model.ffn_size=23", "model.qkv_bias=true", *more).model_config()
        for parameter in spec.parameters(cfg):
            sliced = tensor.slices(parameter, tp)
            layout = Layout.parse(sliced.dims)
            for rank in range(tp):
                held = layout.local_ranges(parameter.shape, mesh, rank)
                assert held[sliced.dim] == (sliced.bound(rank),), (parameter.name, sliced.dims)
                assert sliced.numel(rank) == layout.local_numel(parameter.shape, mesh, rank) <= sliced.numel(0)
            assert layout.replicas(mesh) == sliced.copies
            if parameter.name.endswith(("q.weight", "k.weight", "out.weight")) and tp > 1:
                assert all(border % cfg.head_dim == 0 for border in sliced.bounds)


def test_key_value_heads_that_do_not_come_out_even_are_whole_on_every_rank() -> None:
    heads = ("model.num_heads=12", "model.num_kv_heads=6", "model.head_dim=4")
    cfg = config("dp=1", *heads).model_config()
    table = {p.name: p for p in spec.parameters(cfg)}
    for name in ("k", "v"):
        sliced = tensor.slices(table[f"blocks.0.attention.{name}.weight"], 4)
        assert (sliced.dims, sliced.copies, sliced.bound(3)) == ("N D", 4, (0, 24))
        assert tensor.kind(table[f"blocks.0.attention.{name}.weight"], 4, False) == (4, False)
    assert [tensor.local_heads(cfg, tp) for tp in (3, 4, 12)] == [(4, 2), (3, 3), (1, 1)]
    assert [tensor.reads(12, 6, 4, rank) for rank in range(4)] == [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]
    assert [tensor.reads(12, 6, tp, 1) for tp in (3, 12)] == [None, None]


def test_heads_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^k has 3 heads for tp=4; use a divisor or a multiple of 3\.$"):
        tensor.slicing((24, 5), "N D", 0, 4, chunk=8, name="k")


def test_whole_weights_are_alike_only_where_every_rank_sees_all() -> None:
    cfg = config("dp=1", "model.qk_norm=true").model_config()
    kinds = {p.name: (tensor.kind(p, 4, True), tensor.kind(p, 4, False)) for p in spec.parameters(cfg)}
    assert kinds["blocks.0.attention_norm.weight"] == ((4, False), (4, True))
    assert kinds["blocks.0.attention.q_norm.weight"] == ((4, False), (4, False))
    assert kinds["blocks.0.mlp.up.weight"] == ((1, False), (1, False))


def test_both_forms_send_the_same_bytes_for_a_layer() -> None:
    """An all-reduce is a reduce-scatter and an all-gather: of 4 sequences of 64, 4 of each in a layer and a step."""
    found = {}
    for layers in (1, 2):
        for sequence in ("on", "off"):
            cfg = config(f"tp=2 sequence={sequence}", f"model.num_layers={layers}")
            found[layers, sequence] = tensor.sent(cfg.model_config(), cfg.plan, 0, [4], 64, 4)
    for sequence in ("on", "off"):
        one, two = found[1, sequence], found[2, sequence]
        half = 4 * 64 * 64 * 4 // 2
        assert two - one == {"all_gather": 4 * half, "reduce_scatter": 4 * half}


def test_flops_over_the_ranks_are_those_of_one() -> None:
    for plan in ("tp=2", "tp=4 recompute=full"):
        cfg = config(plan, "model.ffn_size=23", "model.vocab_size=265")
        model = cfg.model_config()
        parts = [tensor.products(model, cfg.plan, rank, [3], 64) for rank in range(cfg.plan.tp)]
        whole = spec.executed_matmul_flops(model, 3, 64, cfg.plan.recompute)["matmul"]
        copies = 2 if cfg.plan.tp == 8 else 1  # key-value heads that two ranks hold
        assert sum(parts) == whole * copies


def test_a_plan_over_hosts_is_told_what_it_costs() -> None:
    cfg = loads('[model]\npreset = "8b"\n', ["train.precision=bf16", "train.global_batch=4"], "tp=4")
    h200 = Topology.load("h200")
    assert tensor.across_hosts(cfg, [4], [7, 7, 7, 7, 8, 8, 8, 8], h200) is None
    line = tensor.across_hosts(cfg, [4], [7, 7, 8, 8, 9, 9, 9, 9], h200)
    assert line is not None
    assert line.startswith("note: tp=4 spans 2 hosts: its transfers take about ")
    figures = [float(word) for word in line.split() if word.replace(".", "").replace("e+", "").isdigit()]
    outer, inner = figures[1], figures[2]
    rows = 4 * 4096 * 4096 * 2  # of the residual stream; 4 gathers and 4 scatters a layer, 3 / 4 of it from each rank
    at_least = 32 * 8 * (rows * 3 / 4) / 4.5e10 * 1e3
    assert at_least < outer < 1.2 * at_least
    assert 3 < outer / inner < 12
    assert "fast links" in str(tensor.across_hosts(cfg, [4], [0, 1, 0, 1], None))
