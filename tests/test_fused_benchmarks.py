"""The benchmarks of fused products: their rows, their verdicts, and a run of each from end to end on CPU ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlace.kernels.table import Table, shape_class
from interlace.plan.fused import OPS

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import decoder_layer  # noqa: E402 - found through the line above
import fused_matmul  # noqa: E402
from fused import shapes, targets  # noqa: E402
from fused.targets import Figures, interval, verdicts  # noqa: E402


def record(op: str = "all_gather_matmul", M: int = 8192, wire: float = 50.0, **changes: Any) -> dict[str, Any]:
    """Of a row with 12 rounds; `samples` maps a column to its time or its times."""
    samples = {"gemm": 100.0, "serial default": 160.0, "serial window": 150.0, "own plain": 140.0, "own chunks": 101.0}
    samples |= changes.pop("samples", {})
    every = {name: times if isinstance(times, list) else [times] * 12 for name, times in samples.items()}
    made = {
        "key": f"{op} {M}", "op": op, "M": M, "N": 14336, "K": 8192, "world": 2,
        "kind": "bulk", "graph": False, "wire": wire, "samples": every,
        "wrong": {}, "missing": {}, "chosen": "chunks", "source": "table", "machine": "2 x GPU", "versions": "torch",
        "commit": "c", "date": "d",
    }  # fmt: skip
    return made | changes


def missed(*records: dict[str, Any]) -> list[str]:
    return [verdict.text[:1] + ": " + failure for verdict in verdicts(records) for failure in verdict.failures]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_the_products_of_the_models() -> None:
    rows = shapes.rows()
    found = {(row.op, row.M, row.N, row.K): row for row in rows}
    assert len(found) == len(rows)
    # The MLP of 70B at tp=8 and tp=2, its attention, the MLP of 405B and of Qwen3 at tp=8.
    for shape in ((7168, 8192), (28672, 8192), (1280, 8192), (13312, 16384), (6400, 5120)):
        assert ("all_gather_matmul", 2048, *shape) in found, shape
    row = found["matmul_all_reduce", 64, 8192, 3584]
    assert row.names == ("llama-70b tp=8 down",)
    assert (row.kind, row.tier) == ("decode", 0)
    assert {row.M for row in rows if row.kind != "held-out"} == set(shapes.ROWS)
    assert {row.kind for row in rows} == set(shapes.KINDS)
    assert [row.tier for row in rows] == sorted(row.tier for row in rows), "the most important first"


def test_rows_of_wider_groups() -> None:
    """Shares of eight and of the group itself, and what others have published; the wire binds more of the rows."""
    four, eight = shapes.rows(4), shapes.rows(8)
    assert {word for row in four for word in row.tags if word.startswith("tp=")} == {"tp=8", "tp=4"}
    assert {word for row in eight for word in row.tags if word.startswith("tp=")} == {"tp=8"}
    for rows in (four, eight):
        found = {(row.op, row.M, row.N, row.K): row for row in rows}
        assert all("published" in found[shape].tags for shape in shapes.PUBLISHED)
        assert len(found) == len(rows)
    assert not any("published" in row.tags for row in shapes.rows())
    wire = [sum(row.kind == "wire" and "tp=8" in row.tags for row in shapes.rows(ranks)) for ranks in (2, 4, 8)]
    assert wire == sorted(wire)
    assert wire[0] < wire[-1]


def test_published_ratios_stand_beside_rows_of_wide_groups_alone() -> None:
    shape = {"M": 8192, "N": 28672 // 8, "K": 8192}
    head, _, line = [x for x in targets.report([record(**shape, world=8)]) if x.startswith("|")]
    assert head.endswith("| plain / t | published, 8 x H800: Triton-distributed, FLUX |")
    assert line.endswith("| 1.49 | 1.59, 1.48 |")
    assert head.count("|") == line.count("|")
    assert not any("published" in line for line in targets.report([record(**shape, world=2)]))


def test_held_out_shapes_are_of_classes_that_no_row_has() -> None:
    rows = shapes.rows()
    classes = {(row.op, *shape_class(row.M, row.N, row.K)) for row in rows if row.kind != "held-out"}
    for op, *shape in shapes.HELD_OUT:
        assert (op, *shape_class(*shape)) not in classes, (op, shape)


def test_rows_are_selected_by_number_and_by_words() -> None:
    rows = shapes.rows()
    some = shapes.selected(rows, "10:20", "")
    assert [number for number, _ in some] == list(range(10, 20))
    assert all(rows[number] == row for number, row in some)
    few = shapes.selected(rows, ":", "decode,llama-70b,tp=8,M=64")
    assert {(row.N, row.K) for _, row in few} == {(8192, 1024), (8192, 3584)}
    assert shapes.selected(rows, "5:", "")[0][0] == 5
    assert shapes.selected(rows, ":", "no-such-word") == []


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_figures_of_a_row() -> None:
    row = Figures.of(record(samples={"own chunks": [90.0, 110.0] * 6}))
    assert (row.plain_name, row.plain, row.gemm, row.limit) == ("serial window", 150.0, 100.0, 100.0)
    assert row.time == 100.0
    assert row.hidden == 1.0
    picked = Figures.of(record(samples={"own chunks": [90.0, 110.0] * 6}, source="picked"))
    assert picked.time == 110.0, "what was picked from the even rounds is judged by the odd ones"
    assert picked.hidden == pytest.approx(1 - 10 / 50)
    assert math.isnan(Figures.of(record(samples={"gemm": 151.0})).hidden)


def test_an_interval_holds_the_median_and_grows_with_the_spread() -> None:
    assert interval([1.0] * 12) == (1.0, 1.0)
    low, high = interval([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.0])
    assert 0.95 < low <= 1.0 <= high < 1.05
    wide = interval([1.0, 2.0, 0.5, 1.5, 0.7, 1.2, 1.9, 0.6, 1.1, 0.8, 1.0, 1.3])
    assert wide[0] < low
    assert wide[1] > high
    assert interval([1.0, 2.0, 3.0]) == interval([1.0, 2.0, 3.0])


def test_a_row_that_meets_every_target() -> None:
    assert missed(record(), record("matmul_reduce_scatter"), record(wire=90.0, samples={"own chunks": 102.0})) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples": {"own chunks": 154.0}}, "1: all_gather_matmul 8192: own chunks takes 1.027 of serial window"),
        ({"samples": {"async-tp": 98.0}}, "1: all_gather_matmul 8192: own chunks takes 1.031 of async-tp"),
        ({"samples": {"own chunks": 113.0}}, "2: all_gather_matmul 8192: 13.0 us over the product, allowed 12.0"),
        ({"samples": {"serial window": 1000.0, "serial default": 1000.0, "own chunks": 137.0}}, "allowed 36.0"),
        ({"samples": {"own chunks": 103.0}}, "2: median E 0.940"),
        ({"wire": 120.0, "samples": {"own chunks": 142.0}}, "3: all_gather_matmul 8192: limit / t 0.845"),
        ({"kind": "held-out", "samples": {"own tiles": 96.0}}, "6: all_gather_matmul 8192: own chunks takes 1.052 of"),
    ],
)  # fmt: skip
def test_a_row_that_misses_one(changes: dict[str, Any], said: str) -> None:
    found = missed(record(**changes))
    assert any(said in each for each in found), found


def test_within_the_spread_nothing_is_slower() -> None:
    noisy = [100.0, 160.0, 170.0, 140.0, 170.0, 130.0, 158.0, 155.0, 149.0, 165.0, 158.0, 156.0]
    assert missed(record(samples={"own chunks": noisy}, M=1024)) == []
    assert Figures.of(record(samples={"own chunks": noisy})).ratio("serial window")[1] > targets.SLOWER


def test_targets_of_few_rows() -> None:
    def reduced(M: int, **samples: float) -> dict[str, Any]:
        times = {"gemm": 20.0, "serial default": 40.0, "serial window": 38.0, "own one-shot": 27.0, **samples}
        return record("matmul_all_reduce", M, 2.0, graph=True, chosen="one-shot", samples=times)

    torch_one_shot = {"one-shot torch": 27.0}
    assert missed(reduced(64, **torch_one_shot)) == []
    assert any("8.5 us over the product" in each for each in missed(reduced(64, **{"own one-shot": 28.5})))
    assert any("1.080 of torch's one-shot" in each for each in missed(reduced(16, **{"one-shot torch": 25.0})))
    assert any("torch's one-shot sum did not run" in each for each in missed(reduced(16)))
    slow = missed(reduced(256, **{"own one-shot": 30.0}))
    assert any("1.267 x plain, wanted 1.300" in each for each in slow)
    assert not any("over the product" in each for each in slow), "more than 64 rows"
    near = {"gemm": 36.0, "own one-shot": 40.0}
    assert any("0.950 x plain, wanted 0.897" in each for each in missed(reduced(256, **near))) is False
    assert verdicts([])[0].word == "no rows"
    eager = record("matmul_all_reduce", 64, 2.0, chosen="plain", samples={"gemm": 90.0})
    assert not any(each.startswith("4") for each in missed(eager)), "not in a graph"


def test_the_report_names_what_was_wrong_and_every_column() -> None:
    text = "\n".join(targets.report([record(wrong={"tiles": "off by 0.3"}), record(M=4096)]))
    assert "- WRONG: all_gather_matmul 8192: tiles: off by 0.3" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "| 150.0 | window |" in lines[-1]
    assert "| chunks (table) | 101.0 [101.0 101.0] | 0.980 | 0.990 |" in lines[-1]


# --- whole runs ------------------------------------------------------------------------------------------------------


def run(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


Here = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """`here(module, *words)`: what a benchmark says in this process, its ranks from the tests' own fork server."""
    for name, value in (("TRITON_INTERPRET", "1"), *((name, "1") for name in fused_matmul.NO_MULTICAST)):
        monkeypatch.setenv(name, value)  # as the benchmark would, and for the test only
    monkeypatch.chdir(tmp_path)

    def call(module: Any, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [module.__file__, *words])
        capfd.readouterr()
        module.main()
        return capfd.readouterr().out

    return call


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_rows_from_end_to_end(tmp_path: Path, here: Here) -> None:
    """The first call runs out of its budget, the second goes on; what is held out never joins the table."""
    words = ["--smoke", "--rounds", "2", "--table", "t.json", "--out", "r.json"]
    left = run(tmp_path, "fused_matmul.py", *words, "--budget", "0.001")
    assert "left: 4 rows, 0:4; go on with --rows 0:" in left
    said = here(fused_matmul, *words)
    assert "wrote t.json" in said
    assert "left" not in said
    held = Table.load(tmp_path / "t.json", "cpu")
    assert [entry.op for entry in held.entries.values()] == sorted(OPS)
    records = fused_matmul.read(tmp_path / "r.json")
    assert len(records) == 4
    for found in records.values():
        assert found["wrong"] == {}
        assert {"gemm", "serial default", "own plain", f"own {found['chosen']}"} <= set(found["samples"])
        assert all(len(times) == 2 and min(times) > 0 for times in found["samples"].values())
        assert found["source"] == ("model" if found["kind"] == "held-out" else "picked")
    assert {"own persistent", "own tiles", "own one-shot"} <= {name for r in records.values() for name in r["samples"]}
    shown = list(fused_matmul.show(tmp_path / "r.json"))
    assert shown[-1] == f"wrote {tmp_path / 'r.json'} and {tmp_path / 'r.md'}"
    assert (tmp_path / "r.md").read_text().count("\n| ") == 5


def test_numbers_as_spans() -> None:
    assert fused_matmul.spans([0, 1, 2, 5, 7, 8]) == "0:3 5:6 7:9"


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_layer_from_end_to_end(tmp_path: Path, here: Here) -> None:
    words = ["--smoke", "--rounds", "2", "--out", "l.json", "--sizes", "tp8", "--variants", "serial,auto,fused,torch"]
    said = here(decoder_layer, *words)
    assert "\n| torch | " in said
    assert "WRONG" not in said
    (found,) = json.loads((tmp_path / "l.json").read_text()).values()
    assert set(found["samples"]) == {"serial", "auto", "fused", "torch"}
    assert max(found["errors"].values()) < 1e-5
    assert found["table"] == "cpu none"
    assert (tmp_path / "l.md").read_text().count("| fused |") == 1


@pytest.mark.gpu2
@pytest.mark.timeout(600)
def test_rows_on_two_gpus(tmp_path: Path) -> None:
    """The peers run too: NCCL over a window, async-TP, the one-shot sum, in a CUDA graph where rows are few."""
    words = ["--rounds", "6", "--out", "r.json", "--table", "t.json", "--only", "llama-8b,tp=8"]
    for more in ("M=64,matmul_all_reduce,down", "M=4096,all_gather_matmul,up", "M=4096,matmul_reduce_scatter,down"):
        run(tmp_path, "fused_matmul.py", *words[:-1], f"{words[-1]},{more}")
    records = {found["op"]: found for found in fused_matmul.read(tmp_path / "r.json").values()}
    assert set(records) == set(OPS)
    for found in records.values():
        assert found["wrong"] == {}, found["key"]
        assert {"gemm", "serial default", "own plain"} <= set(found["samples"])
        assert 100e9 < found["rate"] < 900e9
    assert records["matmul_all_reduce"]["graph"]
    assert "one-shot torch" in records["matmul_all_reduce"]["samples"]
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert {"async-tp", "serial window"} <= set(records[op]["samples"]), records[op]["missing"]
