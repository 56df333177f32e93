"""Topologies: what a byte costs between two ranks, by size, and a FLOP on one, by shape.

A topology is a JSON file, one a machine; every number in it stands beside its source:

    "hbm_bandwidth": {"value": 4.8e12, "source": "NVIDIA H200 datasheet, SXM, dense"}

`Topology.load("h200")` reads one of those shipped (`Topology.names()`), `Topology.load("my/machine.json")` an own one;
a calibration run measures the machine at hand and writes the same form with `save`.

Links are tiers, inner to outer.  Ranks r and s share a tier of domain d when r // d == s // d; a tier without a domain
joins everything.  The cost is that of the innermost tier that joins all ranks concerned:

    transfer    latency + bytes / bandwidth
    collective  the same; or, where `collective` holds measured [bytes sent per rank, seconds], a line through them

A plan's prices are as good as these numbers: a few per cent where they were measured, a guess where the source says
"assumed".  Nothing here knows of contention between links, or between transfers and matmuls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError, nearest

ITEMSIZE = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
FREE = ("slice", "none")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", *FREE)
_FOLDER = Path(__file__).parent / "topologies"


@dataclass(frozen=True)
class Link:
    """One tier: `domain` consecutive ranks (None = all), bytes/s per direction and rank, seconds.

    collective: measured (bytes sent per rank, seconds) of one all-gather or reduce-scatter, by growing size.
    """

    name: str
    domain: int | None
    bandwidth: float
    latency: float
    collective: tuple[tuple[int, float], ...] = ()

    def joins(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` are in one domain of this tier."""
        return self.domain is None or len({rank // self.domain for rank in ranks}) <= 1

    def transfer_seconds(self, nbytes: float) -> float:
        """latency + bytes / bandwidth."""
        return self.latency + nbytes / self.bandwidth

    def phase_seconds(self, nbytes: float) -> float:
        """One all-gather or reduce-scatter in which every rank sends `nbytes`.

        Interpolated between measured points; the time of the first below it, the slope of the last two above.
        """
        if not self.collective:
            return self.transfer_seconds(nbytes)
        if nbytes <= self.collective[0][0]:
            return self.collective[0][1]
        if len(self.collective) == 1:
            return self.collective[0][1] + (nbytes - self.collective[0][0]) / self.bandwidth
        pairs = list(pairwise(self.collective))
        (x0, y0), (x1, y1) = next((pair for pair in pairs if nbytes <= pair[1][0]), pairs[-1])
        return y0 + (nbytes - x0) * (y1 - y0) / (x1 - x0)


@dataclass(frozen=True)
class Topology:
    """One machine.  Rates are per rank (one GPU, or one CPU process), in FLOP/s, bytes/s, bytes and seconds."""

    name: str
    device_names: tuple[str, ...]
    peak_flops: Mapping[str, float]
    matmul_efficiency: Mapping[str, float]
    kernel_latency: float
    memory_bytes: int
    hbm_bandwidth: float
    links: tuple[Link, ...]
    sources: Mapping[str, str]  # dotted key of a number -> where it comes from

    @staticmethod
    def names() -> tuple[str, ...]:
        """Machines that come with the package."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))

    @classmethod
    def load(cls, name_or_path: str | Path) -> Topology:
        """A shipped topology by name, or any by path; ConfigError names the file and the key at fault."""
        path = Path(name_or_path)
        if str(name_or_path) in cls.names():
            path = _FOLDER / f"{name_or_path}.json"
        elif not path.is_file():
            close = nearest(str(name_or_path), cls.names())
            raise ConfigError(
                f"there is no topology or file {str(name_or_path)!r}: "
                f"use {close or ', '.join(cls.names())}, or the path of a topology's JSON"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"topology {path} is not JSON ({error}): repair it or calibrate again") from None
        return _Reader(str(path)).topology(raw)

    @classmethod
    def from_device_name(cls, device_name: str) -> Topology | None:
        """The shipped topology of a device as its driver names it ("NVIDIA H200"), or None.

        Only exact names count: "NVIDIA H100 PCIe" is another machine than "NVIDIA H100 80GB HBM3".
        """
        for name in cls.names():
            topology = cls.load(name)
            if device_name.strip().lower() in (known.lower() for known in topology.device_names):
                return topology
        return None

    def save(self, path: str | Path) -> None:
        """Write the form that `load` reads."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """The topology as plain JSON values, every number beside its source."""

        def sourced(key: str, value: Any) -> dict[str, Any]:
            return {"value": value, "source": self.sources[key]}

        def table(key: str, values: Mapping[str, float]) -> dict[str, Any]:
            return {dtype: sourced(f"{key}.{dtype}", value) for dtype, value in values.items()}

        def tier(i: int, link: Link) -> dict[str, Any]:
            at = f"links[{i}]"
            plain: dict[str, Any] = {"name": link.name, "domain": None}
            if link.domain is not None:
                plain["domain"] = sourced(f"{at}.domain", link.domain)
            plain["bandwidth"] = sourced(f"{at}.bandwidth", link.bandwidth)
            plain["latency"] = sourced(f"{at}.latency", link.latency)
            if link.collective:
                plain["collective"] = sourced(f"{at}.collective", [list(point) for point in link.collective])
            return plain

        return {
            "name": self.name,
            "device_names": list(self.device_names),
            "peak_flops": table("peak_flops", self.peak_flops),
            "matmul_efficiency": table("matmul_efficiency", self.matmul_efficiency),
            "kernel_latency": sourced("kernel_latency", self.kernel_latency),
            "memory_bytes": sourced("memory_bytes", self.memory_bytes),
            "hbm_bandwidth": sourced("hbm_bandwidth", self.hbm_bandwidth),
            "links": [tier(i, link) for i, link in enumerate(self.links)],
        }

    def link(self, ranks: Sequence[int]) -> Link:
        """The innermost tier that joins all of `ranks`."""
        for link in self.links:
            if link.joins(ranks):
                return link
        raise ConfigError(
            f"topology {self.name!r} has no link that joins ranks {min(ranks)} to {max(ranks)}: "
            "give its last link the domain null"
        )

    def transfer_seconds(self, nbytes: float, src: int, dst: int) -> float:
        """One message of `nbytes` from rank to rank, alone on its link; 0 within a rank."""
        return 0.0 if src == dst else self.link((src, dst)).transfer_seconds(nbytes)

    def collective_seconds(self, name: str, nbytes_sent: float, ranks: Sequence[int]) -> float:
        """One collective over `ranks` in which the busiest rank sends `nbytes_sent` (`Transfer.bytes`).

        An all-reduce is two phases of half the bytes.  The number of ranks enters through the bytes only, and a group
        that spans domains is charged as if all its bytes crossed the outer link: an upper bound there, since a
        hierarchical algorithm sends fewer across.
        """
        if name not in COLLECTIVES:
            close = nearest(name, COLLECTIVES)
            raise ConfigError(f"unknown collective {name!r}: use {close or ', '.join(COLLECTIVES)}")
        if name in FREE or len(ranks) < 2:
            return 0.0
        link = self.link(ranks)
        if name == "send":
            return link.transfer_seconds(nbytes_sent)
        if name == "all_reduce":
            return 2 * link.phase_seconds(nbytes_sent / 2)
        return link.phase_seconds(nbytes_sent)

    def flops_per_second(self, dtype: str) -> float:
        """Peak of a dtype ("bf16", "fp32", ...); ConfigError when the topology does not list it."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ConfigError(f"topology {self.name!r} knows no peak for dtype {dtype!r}: use one of {known}")
        return self.peak_flops[dtype]

    def matmul_seconds(self, M: int, N: int, K: int, dtype: str = "bf16") -> float:
        """One [M K] x [K N] product: a launch, and the longer of arithmetic and memory traffic.

        Arithmetic is 2MNK at peak x one efficiency per dtype, traffic is each matrix once.  On an H200 that is within
        13 % of cuBLAS over the shapes of a layer (512 to 16384 rows); it sees neither tile nor wave quantisation, so
        badly aligned sizes cost more than it says.
        """
        peak = self.flops_per_second(dtype)
        if 0 in (M, N, K):
            return 0.0
        arithmetic = 2 * M * N * K / (peak * self.matmul_efficiency[dtype])
        traffic = (M * K + K * N + M * N) * ITEMSIZE[dtype] / self.hbm_bandwidth
        return self.kernel_latency + max(arithmetic, traffic)


class _Reader:
    """Checks a topology's JSON and collects the sources of its numbers."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.sources: dict[str, str] = {}

    def topology(self, raw: Any) -> Topology:
        keys = tuple(field.name for field in fields(Topology) if field.name != "sources")
        self.keys(raw, "", keys, keys)
        devices, links = raw["device_names"], raw["links"]
        if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
            raise self.error("device_names", "a list of strings", devices)
        if not isinstance(links, list) or not links:
            raise self.error("links", "a list of links, inner to outer", links)
        peaks = self.table(raw["peak_flops"], "peak_flops")
        efficiency = self.table(raw["matmul_efficiency"], "matmul_efficiency")
        for dtype in peaks:
            if dtype not in efficiency:
                raise self.error(f"matmul_efficiency.{dtype}", "a fraction of the peak", None)
        for dtype, fraction in efficiency.items():
            if fraction > 1:
                raise self.error(f"matmul_efficiency.{dtype}", "a fraction of the peak, 1 or less", fraction)
        return Topology(
            name=self.string(raw["name"], "name"),
            device_names=tuple(devices),
            peak_flops=peaks,
            matmul_efficiency=efficiency,
            kernel_latency=self.number(raw["kernel_latency"], "kernel_latency"),
            memory_bytes=self.integer(raw["memory_bytes"], "memory_bytes"),
            hbm_bandwidth=self.number(raw["hbm_bandwidth"], "hbm_bandwidth"),
            links=tuple(self.link(link, f"links[{i}]") for i, link in enumerate(links)),
            sources=self.sources,
        )

    def link(self, raw: Any, key: str) -> Link:
        needed = ("name", "domain", "bandwidth", "latency")
        self.keys(raw, key, needed, (*needed, "collective"))
        domain = None if raw["domain"] is None else self.integer(raw["domain"], f"{key}.domain")
        points = self.points(raw["collective"], f"{key}.collective") if "collective" in raw else ()
        bandwidth = self.number(raw["bandwidth"], f"{key}.bandwidth")
        latency = self.number(raw["latency"], f"{key}.latency")
        return Link(self.string(raw["name"], f"{key}.name"), domain, bandwidth, latency, points)

    def points(self, raw: Any, key: str) -> tuple[tuple[int, float], ...]:
        value = self.value(raw, key)
        wanted = "[bytes, seconds] pairs, both growing"
        if not isinstance(value, list) or not value:
            raise self.error(key, wanted, value)
        for point in value:
            if not (isinstance(point, list) and len(point) == 2 and _positive(point[0]) and _positive(point[1])):
                raise self.error(key, wanted, point)
        for left, right in pairwise(value):
            if left[0] >= right[0] or left[1] > right[1]:
                raise self.error(key, wanted, [left, right])
        return tuple((int(size), float(seconds)) for size, seconds in value)

    def table(self, raw: Any, key: str) -> dict[str, float]:
        if not isinstance(raw, dict):
            raise self.error(key, "an object of dtypes", raw)
        for dtype in raw:
            if dtype not in ITEMSIZE:
                raise self.error(key, f"dtypes among {', '.join(ITEMSIZE)}", dtype)
        return {dtype: self.number(value, f"{key}.{dtype}") for dtype, value in raw.items()}

    def integer(self, raw: Any, key: str) -> int:
        value = self.number(raw, key)
        if value != int(value):
            raise self.error(key, "a whole number", value)
        return int(value)

    def number(self, raw: Any, key: str) -> float:
        value = self.value(raw, key)
        if not _positive(value):
            raise self.error(key, "a number above 0", value)
        return float(value)

    def value(self, raw: Any, key: str) -> Any:
        if not isinstance(raw, dict) or set(raw) != {"value", "source"}:
            raise self.error(key, 'an object {"value": ..., "source": ...}', raw)
        self.sources[key] = self.string(raw["source"], f"{key}.source")
        return raw["value"]

    def string(self, raw: Any, key: str) -> str:
        if not isinstance(raw, str) or not raw:
            raise self.error(key, "a string that is not empty", raw)
        return raw

    def keys(self, raw: Any, key: str, needed: Sequence[str], known: Sequence[str]) -> None:
        if not isinstance(raw, dict):
            raise self.error(key or "the file", f"an object with {', '.join(needed)}", raw)
        for name in needed:
            if name not in raw:
                raise self.error(f"{key}.{name}".lstrip("."), "a value", None)
        for name in raw:
            if name not in known:
                raise self.error(f"{key}.{name}".lstrip("."), f"only {', '.join(known)}", name)

    def error(self, key: str, expected: str, found: Any) -> ConfigError:
        shown = "nothing" if found is None else repr(found)[:60]
        return ConfigError(f"topology {self.where}: {key} is {shown}: expected {expected}")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
