"""What a product and its transfer take together, by how they are overlapped: arithmetic, no torch.

Priced from a topology's measured ceilings, for `tp`'s three products (M rows of all ranks together, N columns and K
inner elements of one rank's product, W ranks):

    all_gather_matmul       a rank fetches (W-1)/W of [M K], its product is [M N K]
    matmul_reduce_scatter   a rank sends (W-1)/W of [M N], its product is [M N K]
    matmul_all_reduce       both halves of the sum of [M N]

    product   launch + max(arithmetic in whole waves of tiles, each matrix once through memory)
    transfer  latency + bytes / bandwidth, or the library's measured line

A candidate is the walk of its parts along two lanes, compute and wire: a part of the product starts when its bytes are
there, a part of the transfer when its product is done.  What this cannot see (contention, clocks, a kernel's quality)
is a factor by candidate, which `kernels.tune` takes from the nearest measured shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from interlace.errors import ConfigError
from interlace.topology import ITEMSIZE, Link, Topology

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")

# Rows and columns of an output tile, and the share of the best rate that a product of such tiles reaches.
TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.85), (64, 64, 0.7))
SHORT = (
    1.13  # a product of a few waves over one under sustained load: the clocks of a cool card (H200: 790 over 692 TF)
)
SLICES = 4  # of K, or of the rows that a peer gets, where a candidate cuts its work


def product_seconds(
    topology: Topology, M: int, N: int, K: int, dtype: str = "bf16", multiprocessors: int = 132
) -> float:
    """One [M K] x [K N] product: `Topology.matmul_seconds`, with tiles in whole waves over the multiprocessors."""
    if 0 in (M, N, K):
        return 0.0
    rate = topology.flops_per_second(dtype) * topology.matmul_efficiency[dtype]

    def waves(rows: int, columns: int, share: float) -> float:
        count = math.ceil(math.ceil(M / rows) * math.ceil(N / columns) / multiprocessors)
        return count * multiprocessors * 2.0 * rows * columns * K / (rate * SHORT * share)

    quantised = min(waves(*tile) for tile in TILES)
    return max(topology.matmul_seconds(M, N, K, dtype), topology.kernel_latency + quantised)


def wire_bytes(op: str, M: int, N: int, K: int, itemsize: int, world: int) -> float:
    """Bytes that a rank must send (and fetch), the mean over ranks."""
    width = {"all_gather_matmul": K, "matmul_reduce_scatter": N, "matmul_all_reduce": 2 * N}
    if op not in width:
        raise ConfigError(f"there is no product {op!r}: use one of {', '.join(OPS)}")
    return (world - 1) / world * M * width[op] * itemsize


def predict(
    topology: Topology, op: str, M: int, N: int, K: int, dtype: str = "bf16", world: int = 2, multiprocessors: int = 132
) -> dict[str, float]:
    """Seconds by candidate.  Ranks are those of the topology's innermost link."""
    itemsize, link = ITEMSIZE[dtype], topology.link(range(world))

    def product(rows: float, inner: float = K) -> float:
        return product_seconds(topology, math.ceil(rows), N, math.ceil(inner), dtype, multiprocessors)

    whole = product(M)
    if world == 1:
        return {"plain": whole}
    share = wire_bytes(op, M, N, K, itemsize, world) / (world - 1)  # what one peer gives or gets
    if op == "all_gather_matmul":
        return _gathers(topology, link, product, M, N, K, share, world, itemsize)
    if op == "matmul_reduce_scatter":
        return _scatters(topology, link, product, M, share, world)
    return _reduces(topology, link, whole, share * (world - 1), world)


Product = Callable[..., float]


def _gathers(
    topology: Topology, link: Link, product: Product, M: int, N: int, K: int, share: float, world: int, itemsize: int
) -> dict[str, float]:
    own, whole, step = M / world, product(M), topology.kernel_latency

    def arrival(number: int, nbytes: float) -> float:
        """When copies 1 to `number` have landed: begun one after another, each by a command of its own."""
        return link.latency + (number - 1) * step + number * nbytes / link.bandwidth

    def as_they_land(part: float, parts: int) -> float:
        """Parts of the product, one a part of a peer's bytes, after the own rows."""
        at = part * parts
        for number in range(1, (world - 1) * parts + 1):
            at = max(at, arrival(number, share / parts)) + part
        return at

    sliced = 0.0
    for number in range(1, SLICES + 1):
        added = 2 * M * N * itemsize / topology.hbm_bandwidth if number > 1 else 0.0
        sliced = max(sliced, arrival(number, share * (world - 1) / SLICES)) + product(M, K / SLICES) + added
    return {
        "plain": max(product(own), link.phase_seconds(share * (world - 1))) + product(M - own) + step,
        "chunks": as_they_land(product(own), 1),
        "chained": sliced,
        "persistent": as_they_land(whole / world / SLICES, SLICES) + step,
        "push": whole + step + share * (world - 1) / link.bandwidth,
        "put": whole + 2 * step + share * (world - 1) / link.bandwidth,
    }


def _scatters(topology: Topology, link: Link, product: Product, M: int, share: float, world: int) -> dict[str, float]:
    own, whole, step = M / world, product(M), topology.kernel_latency
    added = (world + 1) * share / topology.hbm_bandwidth + step  # the sum of what came

    def sent(part: float, parts: int, seconds: Callable[[float], float]) -> tuple[float, float]:
        """The peers' rows are made and sent part by part: when the last product ends, and when the last byte lands."""
        made = landed = 0.0
        for _ in range((world - 1) * parts):
            made += part
            landed = max(made, landed) + seconds(share / parts)
        return made, landed

    made, landed = sent(product(own), 1, link.phase_seconds)
    plain = max(made + product(own), landed) + added
    made, landed = sent(product(own), 1, link.transfer_seconds)
    chunks = max(made + product(own), landed) + added
    half = product(own / 2)
    made, landed = sent(half, 2, link.transfer_seconds)
    chained = max(max(made, landed - share / 2 / link.bandwidth) + half, landed) + half
    part = whole / world / SLICES
    made, landed = sent(part, SLICES, lambda nbytes: nbytes / link.bandwidth)
    tiles = max(made + part * SLICES, landed + part) + 2 * step
    return {
        "plain": plain,
        "chunks": chunks,
        "chained": chained,
        "persistent": chained,  # one launch for both halves, against a product that is not the library's
        "tiles": tiles,
        "push": whole + 2 * step + share * (world - 1) / link.bandwidth,
        "put": whole + 2 * step + share * (world - 1) / link.bandwidth,
    }


def _reduces(topology: Topology, link: Link, whole: float, nbytes: float, world: int) -> dict[str, float]:
    """nbytes: of both halves, a rank; a one-shot sum sends the whole of [M N] to every peer, and so does "put"."""
    step = topology.kernel_latency
    return {
        "plain": whole + 2 * link.phase_seconds(nbytes / 2),
        "one-shot": whole + 2 * step + nbytes / 2 / link.bandwidth,
        "two-shot": whole + 4 * step + nbytes / 2 / link.bandwidth,
        "put": whole + 2 * step + world * nbytes / 2 / link.bandwidth,
    }
