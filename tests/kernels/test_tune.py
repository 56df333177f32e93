"""Tables of measured products, what is chosen by them, and the measuring itself."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import runs
from interlace import launch
from interlace.errors import ConfigError, PlanError, ResourceError
from interlace.kernels import table, tune
from interlace.kernels.candidate import OPS, Candidate, Options, Problem, Tile
from interlace.kernels.table import Entry, Table, shape_class
from interlace.plan import fit
from interlace.plan.fused import predict
from interlace.plan.memory import estimate
from interlace.plan.overlap import PLAIN, Product, Way
from interlace.topology import Topology

H200 = "NVIDIA H200"
CUDA = torch.device("cuda", 0)
OP = "all_gather_matmul"


def problem(M: int = 8192, N: int = 7168, K: int = 8192, **changes: Any) -> Problem:
    return Problem(**{"op": OP, "M": M, "N": N, "K": K, "dtype": torch.bfloat16, "world": 2, **changes})


def entry(M: int = 8192, N: int = 7168, K: int = 8192, **changes: Any) -> Entry:
    values = {"op": OP, "dtype": "bf16", "world": 2, "seconds": {"plain": 2e-3, "chunks": 1e-3}, **changes}
    return Entry(M=M, N=N, K=K, **values)


def held(*entries: Entry) -> Table:
    return Table(H200).joined(entries)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A machine whose GPU is an H200, with four candidates; the dict says why one refuses."""
    refused: dict[str, str] = {}
    ways = {
        name: Candidate(name, OP, name == "persistent", lambda p, d, name=name: refused.get(name), lambda: None)  # type: ignore[misc]
        for name in ("plain", "chunks", "persistent", "push")
    }
    monkeypatch.setattr(tune, "candidates", lambda op: ways)
    monkeypatch.setattr(tune, "device_name", lambda device: H200 if device.type == "cuda" else "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    memories = (tune._choice, tune._say, tune.shipped)
    for memory in memories:
        memory.cache_clear()
    yield refused
    for memory in memories:
        memory.cache_clear()


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "powers"),
    [
        ((8192, 8192, 8192), (13, 13, 13)),
        ((8192, 7168, 8192), (13, 13, 13)),
        ((1, 3584, 1280), (0, 12, 10.5)),
        ((3000, 5793, 6000), (12, 12.5, 12.5)),
        ((23, 1, 14336), (5, 0, 14)),
    ],
)
def test_shape_classes(shape: tuple[int, int, int], powers: tuple[float, float, float]) -> None:
    assert shape_class(*shape) == powers


def test_a_table_survives_its_file_and_its_digest_tells_times_apart(tmp_path: Path) -> None:
    options = {"persistent": {"tile": {"block_m": 64, "block_n": 256, "stages": 4}, "chunks": 2}}
    entries = [
        entry(options=options, wrong={"push": "off by 0.1"}, seconds={"plain": 2e-3, "persistent": 1e-3}),
        entry(M=64),
        entry(world=8),
        entry(op="matmul_all_reduce", dtype="fp32"),
    ]
    made = table.store(tmp_path / "deep" / "t.json", H200, entries)
    read = Table.load(tmp_path / "deep" / "t.json", H200)
    assert read == made == held(*reversed(entries))
    assert read.digest == held(*reversed(entries)).digest
    found = read.find(problem())
    assert found is not None
    assert found.options_of("persistent") == Options(Tile(block_m=64, block_n=256, stages=4), 2)
    assert found.options_of("plain") == Options()
    assert table.options_from(table.options_to(found.options_of("persistent"))) == found.options_of("persistent")
    others = [entry(seconds={"plain": 2e-3, "chunks": 1.01e-3}), entry(world=4), entry(made="later")]
    assert len({held(each).digest for each in (entry(), *others)} | {Table(H200).digest}) == 5
    assert Table(H200).digest == "none"
    assert sorted(os.listdir(tmp_path / "deep")) == ["t.json"]


def test_measurements_are_joined_and_newer_ones_win(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    table.store(path, H200, [entry(), entry(M=64)])
    whole = table.store(path, H200, [entry(N=8192, seconds={"plain": 3e-3})])
    assert len(whole.entries) == 2
    assert whole.find(problem()) == entry(N=8192, seconds={"plain": 3e-3})


def test_a_table_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    table.store(path, H200, [entry()])
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ResourceError, match=r"cannot write .*t.json \(No space left on device\).*--table FILE"):
        table.store(path, H200, [entry(M=1)])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.json"]
    with pytest.raises(ResourceError, match="cannot write"):
        table.store(path / "under" / "a-file.json", H200, [entry()])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no table of measurements"),
        ("[]", "no table of measurements"),
        ('{"device": "NVIDIA H200", "entries": [{"op": "x"}]}', "no table of measurements"),
        ('{"device": "NVIDIA H100", "entries": []}', "holds measurements of NVIDIA H100, found NVIDIA H200"),
        (held(entry()).to_json().replace("0.002", "0.0"), "without times"),
        (held(entry()).to_json().replace('"bf16"', '"bf61"'), "dtype bf61"),
        (held(entry(options={"chunks": {"chunk": 2}})).to_json(), "unexpected keyword argument 'chunk'"),
    ],
)
def test_a_file_that_is_no_table(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Table.load(tmp_path / "t.json", H200)
    assert Table.load(tmp_path / "gone.json", H200) == Table(H200)


def test_tables_of_the_package_are_of_the_device_they_are_named_for() -> None:
    assert table.path_of("NVIDIA H200") == table.FOLDER / "nvidia-h200.json"
    assert table.path_of("NVIDIA A100-SXM4-80GB").name == "nvidia-a100-sxm4-80gb.json"
    for path in table.FOLDER.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert table.path_of(device) == path
        read = Table.load(path, device)
        assert read.to_json() == path.read_text()
        assert all(entry.op in OPS and "plain" in entry.seconds for entry in read.entries.values())


# --- choosing --------------------------------------------------------------------------------------------------------


def chosen(found: Table, asked: Problem | None = None, policy: str = "auto") -> tuple[str, str]:
    made = tune.choose_from(found, asked or problem(), CUDA, policy)
    return made.name, made.source


def test_the_quickest_of_the_table_is_chosen(h200: dict[str, str]) -> None:
    times = {"plain": 2e-3, "chunks": 1.5e-3, "persistent": 1.4e-3, "unheard-of": 1e-9}
    found = held(entry(seconds=times, options={"persistent": {"chunks": 4}}))
    assert chosen(found) == ("persistent", "table")
    assert tune.choose_from(found, problem(), CUDA).options == Options(chunks=4)
    assert chosen(found, problem(N=8000)) == ("persistent", "table"), "the same class"
    for policy in ("plain", "off"):
        assert chosen(found, policy=policy) == ("plain", "default")
    h200["persistent"] = "no descriptors here"
    assert chosen(found) == ("chunks", "table")
    assert tune.choose_from(found, problem(), CUDA).options == Options()
    for other in (problem(world=1), problem(M=0)):
        assert chosen(found, other) == ("plain", "default")
    with pytest.raises(ConfigError, match="overlap must be one of auto, plain, fused, off, found on"):
        chosen(found, policy="on")


def test_plain_wins_ties_and_fused_is_the_best_of_the_others(h200: dict[str, str]) -> None:
    found = held(entry(seconds={"plain": 1e-3, "chunks": 0.995e-3, "persistent": 2e-3}))
    assert chosen(found) == ("plain", "table")
    assert chosen(held(entry(seconds={"plain": 1e-3, "chunks": 0.98e-3}))) == ("chunks", "table")
    assert chosen(found, policy="fused") == ("chunks", "table")
    h200["chunks"] = "no peer memory"
    assert chosen(found, policy="fused") == ("persistent", "table")
    h200.update(persistent="none either", push="nor here")
    assert chosen(found, policy="fused") == ("plain", "default")


def test_of_a_tie_the_one_whose_kernels_do_not_wait_for_peers(h200: dict[str, str]) -> None:
    beside = problem(8192, 10240, 8192)
    for times, exact, near in (
        ({"plain": 1e-3, "chunks": 0.9e-3, "persistent": 0.7e-3}, "persistent", "persistent"),
        ({"plain": 1e-3, "chunks": 0.705e-3, "persistent": 0.7e-3}, "chunks", "chunks"),  # a tie
        ({"plain": 1e-3, "chunks": 1.1e-3, "persistent": 0.995e-3}, "plain", "plain"),
    ):
        found = held(entry(seconds=times))
        assert chosen(found) == (exact, "table")
        assert chosen(found, beside) == (near, "model")
    h200.update(chunks="no", push="no")
    assert chosen(found, beside, "fused") == ("persistent", "model"), "there is no other"


def test_nothing_measured_is_plain_and_fused_goes_by_the_model() -> None:
    assert chosen(Table(H200)) == ("plain", "default")
    for other in ({"world": 8}, {"dtype": torch.float16}, {"op": "matmul_all_reduce"}):
        assert chosen(held(entry()), problem(**other)) == ("plain", "default"), "no measurement speaks for it"
    for M in (16, 64, 8192):
        priced = predict(Topology.load("h200"), OP, M, 3584, 8192)
        best = min(("chunks", "persistent", "push"), key=priced.__getitem__)
        assert chosen(Table(H200), problem(M, 3584, 8192), policy="fused") == (best, "model")
    assert chosen(Table(H200), problem(dtype=torch.float64), policy="fused") == ("chunks", "model"), "any that runs"


def test_a_shape_beside_measured_ones_takes_over_what_the_model_was_off_by() -> None:
    """At a measured shape the estimate is the measurement; far from all, a mean of their factors."""
    priced = predict(Topology.load("h200"), OP, 8192, 7168, 8192)
    slow = {"plain": 1.1 * priced["plain"], "chunks": 0.9 * priced["chunks"], "persistent": 3 * priced["persistent"]}
    near = held(entry(seconds=slow)).around(problem())
    assert tune.estimates(near, problem(), CUDA) == pytest.approx(slow)
    other = problem(2048, 5120, 3000)
    there = predict(Topology.load("h200"), OP, 2048, 5120, 3000)
    found = tune.estimates(held(entry(seconds=slow)).around(other), other, CUDA)
    assert found == pytest.approx({name: there[name] * slow[name] / priced[name] for name in slow})
    assert chosen(held(entry(seconds=slow)), other) == ("chunks", "model")
    closer = held(
        entry(seconds=slow), entry(M=2048, N=4096, K=4096, seconds=predict(Topology.load("h200"), OP, 2048, 4096, 4096))
    )
    assert tune.estimates(closer.around(other), other, CUDA)["persistent"] < 1.5 * there["persistent"]


def test_far_measurements_count_less_and_those_in_graphs_least() -> None:
    found = held(entry(M=512), entry(M=128), entry(M=1024), entry(M=8192), entry(M=128, N=700))
    assert [each.M for _, each in found.around(problem(512))] == [512, 1024, 8192]
    assert [each.M for _, each in found.around(problem(256))] == [128, 128, 512]
    octaves = dict.fromkeys(e.M for _, e in found.around(problem(512))), [o for o, _ in found.around(problem(512))]
    assert octaves[1] == pytest.approx([0.0, 1.0, 4.0])


def test_a_device_without_a_topology_goes_by_its_own_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "device_name", lambda device: "NVIDIA GB10")
    found = Table("NVIDIA GB10").joined([entry()])
    half = tune.estimates(found.around(problem(M=4096)), problem(M=4096), CUDA)
    assert half == pytest.approx({"plain": 1e-3, "chunks": 0.5e-3})
    assert chosen(Table("NVIDIA GB10"), policy="fused") == ("chunks", "model")


def test_what_the_table_lacks_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "shipped", lambda name: held(entry()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tune.lookup(problem(), CUDA) == ("chunks", Options())
        assert not caught
        for M in (512, 1024, 2048):
            tune.lookup(problem(M), CUDA)
        for M in (512, 1024):
            assert tune.lookup(problem(M, world=8), CUDA)[0] == "plain"
            tune.lookup(problem(M, world=8), CUDA, "plain")
            tune.lookup(problem(M, world=8), torch.device("cpu"))
    said = [str(each.message) for each in caught]
    assert len(said) == 2
    assert "table of NVIDIA H200 lacks (all_gather_matmul, bf16, 2 ranks) are chosen by the cost model" in said[0]
    assert '8 ranks) run "plain"; interlace tune measures one' in said[1]


def test_the_identity_of_a_run_names_device_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "shipped", lambda name: Table(name))
    assert tune.identity(torch.device("cpu")) == "cpu none"
    monkeypatch.setattr(tune, "shipped", lambda name: held(entry()))
    assert tune.identity(CUDA) == f"NVIDIA H200 {held(entry()).digest}"


def test_the_planner_takes_what_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the device: the nearest measured shape decides; options go along; other numbers of ranks are plain."""
    tile = {"tile": {"block_m": 64, "block_n": 256}, "chunks": 4}
    table = held(
        entry(),
        entry(M=64, seconds={"plain": 1e-5, "push": 9e-6}, options={"push": tile}),
        entry(M=1024, seconds={"plain": 1e-5, "push": 1e-5}),
    )
    monkeypatch.setattr(tune, "shipped", lambda device: table if device == H200 else Table(device))
    way = tune.planned(H200, "bf16")
    assert way(Product(OP, 8192, 7168, 8192), 2) == way(Product(OP, 16384, 5000, 8192), 2) == Way("chunks")
    assert way(Product(OP, 60, 7168, 8192), 2) == Way("push", 64, 256, 4)
    assert way(Product(OP, 1000, 7168, 8192), 2) == PLAIN
    assert (
        way(Product(OP, 8192, 7168, 8192), 4)
        == tune.planned("another", "bf16")(Product(OP, 8192, 7168, 8192), 2)
        == PLAIN
    )
    assert tune.planned(H200, "fp32")(Product(OP, 8192, 7168, 8192), 2) == PLAIN

    sizes = [
        "hidden_size=8192",
        "head_dim=128",
        "num_heads=64",
        "num_kv_heads=8",
        "ffn_size=14336",
        "max_positions=8192",
    ]
    sizes += ["max_positions=8192"]
    more = [*(f"model.{size}" for size in sizes), "data.sequence_length=8192", "train.precision=bf16"]
    cfg = runs.config(tmp_path, "tp=2", [*more, "train.global_batch=1"])
    row = estimate(cfg, cfg.plan, "cuda", way).symmetric
    assert row == (8192 * 8192 * 2) + (2 << 20)  # half of the rows from the peer, twice; sums go plain
    room = estimate(cfg, cfg.plan).total
    fit.check(cfg, 2, room, ("tp",))
    with pytest.raises(PlanError, match="needs"):
        fit.check(cfg, 2, room, ("tp",), ways=way)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_references_are_the_product_of_one_process(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks("rank_functions_tune:references", 3):
        assert len(found) == 4
        assert max(found) < 1e-5


CASES = [
    {"op": "all_gather_matmul", "M": 7, "N": 5, "K": 9, "dtype": "fp32", "bias": True},
    {"op": "matmul_reduce_scatter", "M": 9, "N": 5, "K": 33, "dtype": "bf16", "bias": False},
    {"op": "matmul_all_reduce", "M": 3, "N": 16, "K": 8, "dtype": "fp16", "bias": True},
]


@pytest.mark.alone
@pytest.mark.parametrize("case", CASES, ids=[case["op"] for case in CASES])
def test_wrong_candidates_are_named_and_cannot_win(case: dict[str, Any], run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("rank_functions_tune:measured", 2, case)
    first = ranks[0]
    for found in ranks:
        assert found == first, "every rank has seen the same"
    assert set(first["seconds"]) == {"plain", "quick"}
    assert first["best"] == "quick"
    assert first["rounds"] == {"plain": 3, "quick": 3}
    assert first["seconds"]["plain"] > max(0.01, first["seconds"]["quick"])
    assert max(first["errors"].values()) < {"fp32": 1e-6, "fp16": 1.5e-3, "bf16": 1.2e-2}[case["dtype"]]
    assert first["refused"] == {"shy": "it wants 7 ranks"}
    wrong = first["wrong"]
    assert set(wrong) == {"off", "short", "stale", "fails"}
    assert wrong["fails"] == "rank 1: RuntimeError: no such kernel"
    assert wrong["short"].startswith("off by inf")
    assert all(wrong[name].startswith("off by ") for name in ("off", "stale"))
    assert first["lines"][0].startswith("quick ")
    assert first["lines"][0].endswith("<- chosen")
    assert "shy         cannot run this: it wants 7 ranks" in first["lines"]


def test_nothing_is_chosen_where_plain_is_wrong(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks("rank_functions_tune:measured", 2, {**CASES[0], "broken": "plain"}):
        assert found["error"].startswith('NumericsError: all_gather_matmul: "plain" failed (off by 0.01')


def test_each_candidate_stands_with_its_quickest_variant() -> None:
    way = Candidate("persistent", OP, True, lambda p, d: None, lambda: None)
    found = tune.variants(way, CUDA)
    assert found[0].options == Options()
    assert {each.options.chunks for each in found} == {None, *tune.CHUNKS}
    assert [each.options.tile for each in found if each.options.tile] == list(tune.TILES)
    assert len(tune.variants(way, torch.device("cpu"))) == 1 + len(tune.CHUNKS)
    flat = {f"persistent {number}": each for number, each in enumerate(found)}
    flat["plain 0"] = Candidate("plain", OP, False, lambda p, d: None, lambda: None)
    samples = {"plain 0": [3.0, 3.0, 3.0], "persistent 1": [2.0, 9.0, 2.0], "persistent 0": [2.5, 2.5, 2.5]}
    assert tune.quickest_variants({**samples, "persistent 0": [2.01] * 3}, flat)["persistent"] == "persistent 0", (
        "a tie"
    )
    errors, wrong = dict.fromkeys(samples, 1e-7), {"persistent 2": "off by 1", "persistent 3": "off by 2"}
    group: Any = SimpleNamespace(device=CUDA)
    made = tune._best_of_each(problem(), group, flat, samples, errors, wrong, {})
    assert made.seconds == {"persistent": 2.0, "plain": 3.0}
    assert made.options["persistent"] == found[1].options == Options(chunks=1)
    assert made.wrong == {"persistent (chunks=2)": "off by 1", "persistent (chunks=4)": "off by 2"}
    assert made.entry.options == {"persistent": {"chunks": 1}}
    assert tune.choose_from(held(made.entry), problem(), CUDA).options == Options(chunks=1)
    assert math.isclose(made.entry.seconds["persistent"], 2.0)


# --- in a layer ------------------------------------------------------------------------------------------------------


def test_policies_reach_the_products_of_a_layer(run_ranks: Callable[..., list[Any]]) -> None:
    """Also where slices differ over ranks: all run the same candidates, whatever their own sizes."""
    ranks = run_ranks("rank_functions_tune:policies", 2, timeout=110.0)
    for found in ranks:
        assert {policy: each["ran"] for policy, each in found.items()} == {
            policy: each["ran"] for policy, each in ranks[0].items()
        }
        assert max(each["off"] for each in found.values()) < 1e-5
    ran = {policy: set(each["ran"]) for policy, each in ranks[0].items()}
    assert ran["off"] == set()
    assert ran["plain"] <= {"plain"}
    assert ran["auto"] <= {"plain"}, "no table speaks for a CPU"
    assert "plain" not in ran["fused"]
    assert len(ranks[0]["fused"]["ran"]) == 6, "two products each way in, two out, two of gradients"
    assert ran["fused whole"] <= {"put", "one-shot", "two-shot"}
    assert len(ranks[0]["fused whole"]["ran"]) == 2


def test_ranks_with_other_tables_are_refused(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, said in enumerate(run_ranks("rank_functions_tune:unlike_tables", 3)):
        assert said.startswith("cpu none; rank 2 would choose products by another table than rank 0")
        assert f"(cpu {rank // 2} on rank {rank})" in said
        assert said.endswith("or use overlap=plain.")


# --- on GPUs ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu2
@pytest.mark.parametrize("M", [1, 64, 96, 2048])
def test_two_gpus_measure_every_candidate(M: int) -> None:
    """In graphs up to 256 rows; each candidate is right, or says why it cannot run."""
    argument = {"ops": list(OPS), "M": M, "N": 1024, "K": 1536, "dtype": "bf16", "bias": False}
    argument |= {"rounds": 5, "search": False}
    ranks = launch.run_local("interlace.kernels.tune:run", 2, argument, device="cuda", timeout=300.0)
    for found in zip(*ranks, strict=True):
        assert found[0] == found[1], "every rank has seen the same"
        measured = Entry(**found[0]["entry"])
        assert not measured.wrong, (measured.op, measured.wrong)
        assert measured.seconds["plain"] > 0
        assert len(measured.seconds) > 1, found[0]["lines"]
