"""Which products `fused_matmul.py` measures, in the order of their importance.

Rows M of the whole batch by the four products of a layer of five models, as one rank of tp=8 has them and of a group
of as many ranks as there are; on fewer than eight GPUs a tp=8 row is one rank's share of eight, so that its product is
that of a wide group.  From four ranks on shapes of which others have published figures are measured too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from interlace.plan.fused import wire_bytes
from interlace.topology import Topology

ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REDUCED = 1024  # rows up to which the all-reduce is measured too: with more the sequence is split


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gates: int = 2  # products that read the MLP's input
    head: int = 128


MODELS = {
    "llama-70b": Model(8192, 64, 8, 28672),
    "llama-8b": Model(4096, 32, 8, 14336),
    "qwen3-32b": Model(5120, 64, 8, 25600),
    "llama-405b": Model(16384, 128, 8, 53248),
    "gpt3-175b": Model(12288, 96, 96, 49152, gates=1),
}
KINDS = ("bulk", "wire", "decode", "held-out", "middle", "small")

# Shapes whose classes no row above has: what is chosen for them comes from their neighbours.
HELD_OUT = (
    ("all_gather_matmul", 12288, 4608, 6144),
    ("all_gather_matmul", 6000, 9216, 3072),
    ("all_gather_matmul", 3000, 2304, 6144),
    ("all_gather_matmul", 6144, 1792, 12000),
    ("all_gather_matmul", 352, 2304, 3072),
    ("matmul_reduce_scatter", 12288, 6144, 2304),
    ("matmul_reduce_scatter", 6000, 3072, 9216),
    ("matmul_reduce_scatter", 3000, 6144, 2304),
    ("matmul_reduce_scatter", 6144, 12000, 1792),
    ("matmul_reduce_scatter", 352, 3072, 2304),
    ("matmul_all_reduce", 24, 6144, 2304),
    ("matmul_all_reduce", 90, 3072, 4608),
    ("matmul_all_reduce", 180, 12000, 1792),
)


# Times as quick as PyTorch's product and NCCL: Triton-distributed and FLUX, both read to about 0.02 off the charts in
# the README of Triton-distributed, on eight H800s, whose NVLink has half the rate of an H200; by op, M, a rank's N, K.
PUBLISHED = {
    ("all_gather_matmul", 8192, 11008 // 8, 4096): (1.32, 1.17),
    ("all_gather_matmul", 8192, 14336 // 8, 4096): (1.30, 1.14),
    ("all_gather_matmul", 8192, 28672 // 8, 8192): (1.59, 1.48),
    ("all_gather_matmul", 8192, 53248 // 8, 16384): (1.42, 1.43),
    ("all_gather_matmul", 8192, 29568 // 8, 8192): (1.65, 1.54),
    ("matmul_reduce_scatter", 8192, 4096, 11008 // 8): (1.06, 0.79),
    ("matmul_reduce_scatter", 8192, 4096, 14336 // 8): (1.10, 0.80),
    ("matmul_reduce_scatter", 8192, 3584, 14336 // 8): (1.06, 0.77),
    ("matmul_reduce_scatter", 8192, 4608, 36864 // 8): (1.42, 1.10),
    ("matmul_reduce_scatter", 8192, 8192, 28672 // 8): (1.55, 1.26),
    ("matmul_reduce_scatter", 8192, 8192, 29568 // 8): (1.59, 1.32),
}


@dataclass(frozen=True)
class Row:
    """kind: one of `KINDS`; tier: 0 is measured first; names: products that have this shape, "llama-70b tp=8 up"."""

    op: str
    M: int
    N: int
    K: int
    kind: str
    tier: int
    names: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.op} {self.M} x {self.N} x {self.K}"

    @property
    def tags(self) -> set[str]:
        return {self.kind, self.op, f"M={self.M}", *(word for name in self.names for word in name.split())}


def layer(model: Model, tp: int) -> Iterator[tuple[str, str, int, int]]:
    """(op, what, N, K) of a layer's products on one rank."""
    query, keys = model.heads * model.head, model.kv_heads * model.head
    yield "all_gather_matmul", "qkv", (query + 2 * keys) // tp, model.hidden
    yield "all_gather_matmul", "up", model.gates * model.ffn // tp, model.hidden
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        yield op, "out", model.hidden, query // tp
        yield op, "down", model.hidden, model.ffn // tp


def kind(op: str, M: int, N: int, K: int, ranks: int) -> str:
    """By rows, and by how long the transfer takes over the product on so many H200s."""
    h200 = Topology.load("h200")
    rate = h200.flops_per_second("bf16") * h200.matmul_efficiency["bf16"]
    ratio = wire_bytes(op, M, N, K, 2, ranks) / h200.links[0].bandwidth / (2.0 * M * N * K / rate)
    if op == "matmul_all_reduce":
        return "decode" if M <= 256 else "middle"
    if M >= 1024 and ratio > 0.8:
        return "wire"
    if M >= 4096:
        return "bulk"
    return "middle" if M >= 1024 else "small"


def rows(ranks: int = 2) -> list[Row]:
    """All, the most important first: by tier, then kind, then rows that cost least."""
    found: dict[tuple[str, int, int, int], Row] = {}
    for tp in (8, ranks) if ranks in (2, 4) else (8,):
        for name, model in MODELS.items():
            tier = (0 if name in ("llama-70b", "llama-8b") else 1) + (0 if tp == 8 else 2)
            for op, what, N, K in layer(model, tp):
                for M in ROWS:
                    if op == "matmul_all_reduce" and M > REDUCED:
                        continue
                    at, said = (op, M, N, K), f"{name} tp={tp} {what}"
                    old = found.get(at)
                    names, first = ((*old.names, said), min(old.tier, tier)) if old else ((said,), tier)
                    found[at] = Row(*at, kind(*at, ranks), first, names)
    for at in PUBLISHED if ranks >= 4 else ():
        names = found[at].names if at in found else ()
        found[at] = Row(*at, kind(*at, ranks), 0, (*names, "published tp=8"))
    every = [*found.values(), *(Row(*shape, "held-out", 0) for shape in HELD_OUT)]
    return sorted(every, key=lambda row: (row.tier, KINDS.index(row.kind), row.M * row.N * row.K, row.key))


def smoke() -> list[Row]:
    """Tiny rows of every op, odd ones and a held-out one among them."""
    shapes = (("all_gather_matmul", 7, 6, 8), ("matmul_reduce_scatter", 8, 5, 6), ("matmul_all_reduce", 3, 8, 4))
    return [
        *(Row(*shape, "bulk", 0, ("tiny tp=2 up",)) for shape in shapes),
        Row(*shapes[0][:1], 12, 9, 8, "held-out", 0),
    ]


def selected(every: Sequence[Row], span: str, only: str) -> list[tuple[int, Row]]:
    """(number, row) of those in A:B that have every word of `only` among their tags; numbers count all rows."""
    first, _, last = span.partition(":")
    wanted = range(int(first or 0), int(last) if last else len(every))
    words = {word for word in only.split(",") if word}
    return [(number, row) for number, row in enumerate(every) if number in wanted and words <= row.tags]
