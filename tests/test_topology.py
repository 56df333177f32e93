"""Topology: shipped machines, their prices against measured times, and refusals of damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlace.errors import ConfigError
from interlace.topology import COLLECTIVES, Link, Topology

MiB = 1 << 20


def test_shipped_machines_load_and_round_trip(tmp_path: Path) -> None:
    assert Topology.names() == ("a100", "cpu", "h100", "h200")
    for name in Topology.names():
        machine = Topology.load(name)
        assert machine.name == name
        machine.save(tmp_path / "copy.json")
        assert Topology.load(tmp_path / "copy.json") == machine
        assert machine.links[-1].domain is None, "the last link joins everything"
        assert all(source for source in machine.sources.values())


def test_datasheet_numbers() -> None:
    h200, h100, a100 = (Topology.load(name) for name in ("h200", "h100", "a100"))
    assert h200.flops_per_second("bf16") == h100.flops_per_second("bf16") == 989e12
    assert a100.flops_per_second("bf16") == 312e12
    assert h200.memory_bytes == 139 * 2**30
    assert h200.links[0].bandwidth == 360 * 2**30
    assert (h200.hbm_bandwidth, h100.hbm_bandwidth, a100.hbm_bandwidth) == (4.8e12, 3.35e12, 2.039e12)


def test_device_names_match_exactly() -> None:
    def found(device: str) -> str | None:
        topology = Topology.from_device_name(device)
        return topology.name if topology else None

    assert found("NVIDIA H200") == "h200"
    assert found("nvidia h100 80gb hbm3 ") == "h100"
    assert found("NVIDIA A100-SXM4-80GB") == "a100"
    assert found("cpu") == "cpu"
    assert found("NVIDIA H100 PCIe") is None
    assert found("NVIDIA H200 MIG 1g.18gb") is None


@pytest.mark.parametrize(
    ("M", "N", "K", "milliseconds"),
    [
        (8192, 14336, 8192, 2.839),
        (8192, 7168, 8192, 1.390),
        (16384, 3584, 8192, 1.409),
        (8192, 3584, 8192, 0.695),
        (4096, 7168, 4096, 0.323),
        (2048, 3584, 8192, 0.175),
        (8192, 1280, 8192, 0.227),
        (8192, 1024, 8192, 0.178),
        (512, 3584, 8192, 0.045),
    ],
)
def test_matmul_price_against_cublas_on_h200(M: int, N: int, K: int, milliseconds: float) -> None:
    assert Topology.load("h200").matmul_seconds(M, N, K, "bf16") == pytest.approx(milliseconds / 1e3, rel=0.13)


def test_matmul_is_bound_by_memory_when_thin() -> None:
    h200 = Topology.load("h200")
    traffic = (8192 + 8192 * 8192 + 8192) * 2 / 4.8e12
    assert h200.matmul_seconds(1, 8192, 8192) == pytest.approx(2e-6 + traffic)
    assert h200.matmul_seconds(0, 8192, 8192) == 0.0
    with pytest.raises(ConfigError, match=r"'a100' knows no peak for dtype 'fp8': use one of bf16, fp16, tf32, fp32"):
        Topology.load("a100").matmul_seconds(8, 8, 8, "fp8")


@pytest.mark.parametrize(
    ("sent_mib", "milliseconds"),
    [(4, 0.041), (4, 0.037), (16, 0.109), (16, 0.107), (32, 0.168), (64, 0.329), (64, 0.302), (128, 0.625)],
)
def test_collective_price_against_nccl_on_h200(sent_mib: int, milliseconds: float) -> None:
    """Measured all-gathers and reduce-scatters on 2 GPUs; half the gathered array is sent."""
    seconds = Topology.load("h200").collective_seconds("all_gather", sent_mib * MiB, (0, 1))
    assert seconds == pytest.approx(milliseconds / 1e3, rel=0.13)


@pytest.mark.parametrize(("mib", "bus"), [(1, 20), (4, 77), (8, 109), (32, 164), (64, 203), (256, 217), (1024, 229)])
def test_all_reduce_price_against_measured_bus_bandwidth_on_8_a100(mib: int, bus: int) -> None:
    sent = 2 * mib * MiB * 7 / 8
    seconds = Topology.load("a100").collective_seconds("all_reduce", sent, range(8))
    assert sent / seconds == pytest.approx(bus * 1e9, rel=1e-3)


def test_tiers_are_chosen_by_domain() -> None:
    h100 = Topology.load("h100")
    inner, outer = h100.links
    assert h100.link((0, 7)) is inner
    assert h100.link((7, 8)) is outer
    assert h100.link(range(8, 16)) is inner
    assert h100.transfer_seconds(1e9, 0, 7) == pytest.approx(7e-6 + 1e9 / 371e9)
    assert h100.transfer_seconds(1e9, 0, 8) == pytest.approx(2e-5 + 1e9 / 45e9)
    assert h100.transfer_seconds(1e9, 3, 3) == 0.0
    assert h100.collective_seconds("all_gather", 1e9, (0, 8)) == pytest.approx(2e-5 + 1e9 / 45e9)
    assert h100.collective_seconds("all_reduce", 1e9, (0, 8)) == pytest.approx(4e-5 + 1e9 / 45e9)
    assert h100.collective_seconds("send", 1e9, (0, 1)) == h100.transfer_seconds(1e9, 0, 1)


def test_price_of_a_phase_between_and_beyond_measured_points() -> None:
    link = Link("x", None, 1e9, 1e-6, ((100, 1.0), (200, 2.0), (400, 3.0)))
    assert [link.phase_seconds(n) for n in (0, 100, 150, 300, 600)] == [1.0, 1.0, 1.5, 2.5, 4.0]
    assert Link("x", None, 100.0, 1e-6, ((100, 1.0),)).phase_seconds(300) == 3.0


@pytest.mark.parametrize("name", COLLECTIVES)
def test_no_collective_of_one_rank_costs_anything_and_none_gets_cheaper_with_size(name: str) -> None:
    for machine in map(Topology.load, Topology.names()):
        assert machine.collective_seconds(name, 1e9, (5,)) == 0.0
        costs = [machine.collective_seconds(name, 10.0**n, (0, 1)) for n in range(12)]
        assert costs == sorted(costs)
        assert (costs[-1] == 0.0) == (name in ("slice", "none"))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no topology or file 'h20': use h200"):
        Topology.load("h20")
    with pytest.raises(ConfigError, match=r"unknown collective 'allgather': use all_gather"):
        Topology.load("cpu").collective_seconds("allgather", 1, (0, 1))


def set_links(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: raw.update(links=value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda raw: raw.pop("memory_bytes"), "memory_bytes is nothing"),
        (lambda raw: raw.update(colour="red"), "colour is 'colour': expected only name"),
        (lambda raw: raw.update(hbm_bandwidth=4.8e12), 'hbm_bandwidth is 4.* an object {"value"'),
        (lambda raw: raw["hbm_bandwidth"].update(value=0), "hbm_bandwidth is 0: expected a number above 0"),
        (lambda raw: raw["hbm_bandwidth"].update(source=""), "hbm_bandwidth.source is ''"),
        (lambda raw: raw["hbm_bandwidth"].update(value=True), "hbm_bandwidth is True"),
        (lambda raw: raw["memory_bytes"].update(value=1.5), "memory_bytes is 1.5: expected a whole number"),
        (lambda raw: raw["matmul_efficiency"].pop("bf16"), r"matmul_efficiency.bf16 is nothing"),
        (lambda raw: raw["matmul_efficiency"]["bf16"].update(value=70), r"efficiency.bf16 is 70.0: .* 1 or less"),
        (lambda raw: raw["peak_flops"].update(int4=1), "peak_flops is 'int4'"),
        (lambda raw: raw.update(device_names="NVIDIA H200"), "device_names is"),
        (set_links([]), "links is"),
        (lambda raw: raw["links"][0].pop("latency"), r"links\[0\].latency is nothing"),
        (lambda raw: raw["links"][0]["collective"]["value"].reverse(), r"links\[0\].collective is .* both growing"),
        (lambda raw: raw["links"][0]["collective"].update(value=[[1]]), r"links\[0\].collective is \[1\]"),
    ],
)
def test_damaged_files_are_refused_by_file_and_key(
    tmp_path: Path, damage: Callable[[dict[str, Any]], Any], sentence: str
) -> None:
    raw = Topology.load("h200").to_json()
    damage(raw)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"machine.json: .*{sentence}"):
        Topology.load(path)


def test_files_that_are_no_json_and_links_that_join_too_few(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"machine.json is not JSON"):
        Topology.load(path)
    raw = Topology.load("h200").to_json()
    del raw["links"][1]
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"no link that joins ranks 0 to 8: give its last link the domain null"):
        Topology.load(path).transfer_seconds(1, 0, 8)
