"""The fused products of the tensor axis as integers: which a step has, what each way of them sends, and the symmetric
memory it holds.  Exact.

Told to the meter and asked of the heap by `kernels`, priced by the planner, and held against a running plan by
`verify`.  W ranks, M rows of all of them together, m of the own ones; what a rank sends, in elements:

    all_gather_matmul       every way          m K (W-1)                        all_gather
    matmul_reduce_scatter   plain, put,        (M - m) N                        reduce_scatter
                            chunks, chained,
                            persistent
                            tiles              whole tiles of the others        reduce_scatter
                            push               (M - m) N, fp32                  reduce_scatter
    matmul_all_reduce       plain              both halves of M N               reduce_scatter, all_gather
                            put                M N (W-1)                        all_gather
                            one-shot           M N (W-1), fp32                  all_gather
                            two-shot           whole tiles of the others,       reduce_scatter,
                                               and own ones (W-1) times         all_gather

A tile that a copy unit stores travels whole, with what lies beyond the last row and column.  Words that say so are not
counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from interlace.config import ModelConfig, ParallelPlan
from interlace.layout import split
from interlace.spec import Role, parameters, units

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FP32 = 4
FEW_ROWS = 1 << 24  # bytes of all rows, for which a kernel's own stores are considered
FEW_SUMS = 1 << 26  # bytes of fp32 sums, for which kernels that send them at once are considered
MOST_PUT = 1 << 26  # bytes that are put into a rank's memory by one call, for which "put" is considered
PROGRAMS = 128  # of its kernels; each counts its calls
JOINED_ROWS, JOINED_COLUMNS = 4096, 2560  # from which rows on, and up to how many columns, weights are joined
SLOT = 256  # rows; chunks lie at multiples, so that a tile's rows are of one chunk
ALIGNMENT = 256  # bytes, of each buffer
WORDS = 16  # for each peer, at least, so that a larger number of chunks rebuilds nothing
MOST_CHUNKS = 8  # of one rank's rows, in a scatter
CLAIMS = 16  # bytes of the counters of taken shares; a word a share lies behind them
RESERVE = 1024  # bytes that the head of an arena, a buffer or a set of words may cost beside its own
UNIT = 1 << 21  # bytes; arenas are multiples
LARGER = 1.5  # times what was there, at least, when memory grows
MULTIPROCESSORS = {"cuda": 132, "cpu": 2}  # places for programs; an interpreter's are two


@dataclass(frozen=True)
class Product:
    """M: rows of the whole product; N: columns of a rank; K: inner size on a rank; rounded up where ranks differ.

    terms: products whose sum it is, K being their inner sizes together; a sum travels by ways that move whole rows.
    """

    op: str
    M: int
    N: int
    K: int
    has_bias: bool = False
    terms: int = 1


@dataclass(frozen=True)
class Way:
    """How a product is run: a candidate's name, its tile, and in how many chunks rows travel; 0: its own choice."""

    name: str = "plain"
    block_m: int = 0
    block_n: int = 0
    chunks: int = 0


PLAIN = Way()
Ways = Mapping[Product, Way]
Chooser = Callable[[Product, int], Way]  # of a product over so many ranks
Needs = tuple[dict[str, int], dict[str, int]]  # bytes of buffers, and numbers of words, by name


# --- which there are -------------------------------------------------------------------------------------------------


def products(cfg: ModelConfig, plan: ParallelPlan, rows: int, held: Collection[str] | None = None) -> Counter[Product]:
    """The products of a micro-batch of `rows` positions whose transfers may be fused, and how often each runs, in the
    order in which they first do.

    held: the units that the rank has; None = all.  Blocks that are run again leave their exits plain.
    """
    found: Counter[Product] = Counter()
    if plan.tp == 1 or plan.overlap not in ("auto", "fused"):
        return found
    entrances, exits = _seams(cfg, frozenset(units(cfg) if held is None else held))
    D, again, splits = cfg.hidden_size, plan.recompute == "full", plan.sequence == "on"
    exits = () if again else exits
    for columns, _, has_bias in entrances if splits else ():
        found[Product(GATHER, rows, -(-columns // plan.tp), D, has_bias)] += 2 if again else 1
    for inner in exits:
        found[Product(SCATTER if splits else REDUCE, rows, D, -(-inner // plan.tp))] += 1
    for inner in exits if splits else ():
        found[Product(GATHER, rows, -(-inner // plan.tp), D)] += 1  # of the gradient
    for columns, weights, _ in entrances if splits else ():
        inner = -(-columns // plan.tp)
        found[Product(SCATTER, rows, D, inner, terms=1 if joins(rows, inner) else weights)] += 1
    return found


@lru_cache(maxsize=256)
def _seams(cfg: ModelConfig, held: frozenset[str]) -> tuple[tuple[tuple[int, int, bool], ...], tuple[int, ...]]:
    """Entrances: columns of all weights that read one input, how many weights, whether they have biases.  Exits: the
    inner sizes.  Of all ranks together.  What reaches the heads of latent attention travels by itself."""
    table = {parameter.name: parameter for parameter in parameters(cfg) if parameter.unit in held}
    entrances: dict[str, list[tuple[int, bool]]] = {}
    exits = []
    for name, parameter in table.items():
        module, _, what = name.rpartition(".")
        above = module.rpartition(".")[0]
        if what == "weight" and parameter.role is Role.COLUMN and f"{above}.kv_a.weight" not in table:
            entrances.setdefault(above, []).append((parameter.shape[0], f"{module}.bias" in table))
        elif what == "weight" and parameter.role is Role.ROW:
            exits.append(parameter.shape[1])
    return (
        tuple((sum(n for n, _ in group), len(group), any(bias for _, bias in group)) for group in entrances.values()),
        tuple(exits),
    )


def joins(M: int, N: int) -> bool:
    """Whether several weights that read the same M rows, N columns together, are multiplied as one.

    It costs copies of the weights and of the results, and spares products of a few columns, each in as many pieces as
    rows arrive in, and a transfer of gradients that nothing hides.
    """
    return M >= JOINED_ROWS and N <= JOINED_COLUMNS


# --- what is sent ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 12)
def sent(op: str, way: Way, M: int, N: int, K: int, itemsize: int, ways: int, rank: int) -> tuple[tuple[str, int], ...]:
    """(collective, bytes) that `rank` of `ways` sends in one product with elements of `itemsize` bytes."""
    own = _size(M, ways, rank)
    block = _blocks(way, M, N, itemsize)
    if op == GATHER:
        return (("all_gather", own * K * itemsize * (ways - 1)),)
    if op == SCATTER:
        nbytes = (M - own) * N * (FP32 if way.name == "push" else itemsize)
        if way.name == "tiles":
            others = sum(tiles_of_rows(M, N, block, ways, peer) for peer in range(ways) if peer != rank)
            nbytes = others * math.prod(block) * itemsize
        return (("reduce_scatter", nbytes),)
    if way.name in ("put", "one-shot"):
        return (("all_gather", M * N * (itemsize if way.name == "put" else FP32) * (ways - 1)),)
    if way.name == "two-shot":
        tiles, each = num_tiles(M, N, block), math.prod(block) * itemsize
        mine = _size(tiles, ways, rank)
        return ("reduce_scatter", (tiles - mine) * each), ("all_gather", mine * each * (ways - 1))
    mine = _size(M * N, ways, rank)
    return ("reduce_scatter", (M * N - mine) * itemsize), ("all_gather", mine * itemsize * (ways - 1))


def beyond(
    found: Mapping[Product, int], chosen: Ways, itemsize: int, ways: int, rank: int, counted: Counter[str]
) -> None:
    """Adds to `counted` what the chosen ways send more, or less, than the plain ones, of so many of each product."""
    for product, times in found.items():
        given = (product.M, product.N, product.K, itemsize, ways, rank)
        for collective, nbytes in sent(product.op, chosen[product], *given):
            counted[collective] += nbytes * times
        for collective, nbytes in sent(product.op, PLAIN, *given):
            counted[collective] -= nbytes * times


def default_blocks(M: int, N: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile for a shape that nobody has tuned: wide or square, whichever needs less of 132
    multiprocessors' rounds."""
    if itemsize == FP32:
        return 64, 64
    if M <= 64:
        return 16 if M <= 16 else 64, _columns(N)
    if M <= 128 or N <= 128:
        return 128, 64
    wide, square = 2 * _rounds(M, N, 128, 256), 1.08 * _rounds(M, N, 128, 128)
    return (128, 256) if wide <= square else (128, 128)


def _columns(N: int) -> int:
    """Of a tile of few rows, whose time is that of reading the weight: what lets no multiprocessor read much more than
    another, and the fewest tiles among those."""
    return min((128, 64, 32), key=lambda columns: columns * _rounds(1, N, 1, columns))


def _rounds(M: int, N: int, block_m: int, block_n: int) -> int:
    return -(-num_tiles(M, N, (block_m, block_n)) // MULTIPROCESSORS["cuda"])


def _blocks(way: Way, M: int, N: int, itemsize: int) -> tuple[int, int]:
    return (way.block_m, way.block_n) if way.block_m else default_blocks(M, N, itemsize)


def num_tiles(M: int, N: int, block: tuple[int, int]) -> int:
    """Of a product [M N]."""
    return -(-M // block[0]) * -(-N // block[1])


def tiles_of_rows(M: int, N: int, block: tuple[int, int], ways: int, rank: int) -> int:
    """Tiles of a rank's rows, which begin at its first one."""
    return num_tiles(_size(M, ways, rank), N, block)


def _size(count: int, ways: int, rank: int) -> int:
    start, stop = split(count, ways, rank)
    return stop - start


# --- what is held ----------------------------------------------------------------------------------------------------


def slot_rows(count: int, ways: int, chunks: int) -> int:
    """Rows of the slot in which a chunk of a peer's rows arrives."""
    most = -(-count // (ways * chunks))
    return max(SLOT, up(most, SLOT))


def slice_columns(K: int, slices: int, number: int) -> tuple[int, int]:
    """Columns of a slice of K; all but the last begin at multiples of 64."""
    first, last = split(-(-K // 64), slices, number)
    return min(K, 64 * first), min(K, 64 * last)


def slice_bytes(count: int, K: int, itemsize: int, slices: int, number: int) -> int:
    """Of the memory in which a slice of all rows lies."""
    first, last = slice_columns(K, slices, number)
    return up(count * (last - first) * itemsize, ALIGNMENT)


def arriving(nbytes: int, ways: int, pieces: int) -> Needs:
    """Rows that copy engines push: `nbytes` a call, in so many pieces from each rank."""
    return {"rows": 2 * up(nbytes, ALIGNMENT)}, {"arrived": ways * max(pieces, WORDS)}


def few_rows(count: int, K: int, itemsize: int, ways: int, programs: int) -> Needs:
    """Rows that a kernel stores to all ranks."""
    return {"few": 2 * up(count * K * itemsize, ALIGNMENT)}, {"counts": ways, "calls": programs}


def put_bytes(op: str, M: int, N: int, K: int, itemsize: int, ways: int) -> int:
    """What one call of "put" has room for in a rank's memory: all rows, or the parts that every rank puts there."""
    if op == GATHER:
        return up(M * K * itemsize, ALIGNMENT)
    rows = -(-M // ways) if op == SCATTER else M
    return ways * up(rows * N * itemsize, ALIGNMENT)


def put_rows(count: int, K: int, itemsize: int, ways: int) -> Needs:
    """Rows that programs put to all ranks, in two halves."""
    return _put(put_bytes(GATHER, count, 0, K, itemsize, ways), ways)


def put_sums(op: str, M: int, N: int, itemsize: int, ways: int) -> Needs:
    """Parts that programs put to the ranks that want their sum, in two halves."""
    return _put(put_bytes(op, M, N, 0, itemsize, ways), ways)


def _put(nbytes: int, ways: int) -> Needs:
    return {"put": 2 * nbytes}, {"arrived": ways * PROGRAMS, "epochs": PROGRAMS}


def whole_parts(M: int, N: int, itemsize: int, ways: int) -> Needs:
    """Whole rows of sums, from every rank for the one that has most."""
    return {"parts": 2 * ways * -(-M // ways) * N * itemsize}, {"arrived": ways * MOST_CHUNKS}


def tile_places(places: Mapping[str, tuple[int, int, int]], ways: int, programs: int) -> Needs:
    """Tiles that arrive: by name bytes of all tiles from one sender for one call, and how many; senders times calls."""
    buffers = {name: nbytes * times for name, (nbytes, _, times) in places.items()}
    words = {f"{name} arrived": ways * tiles for name, (_, tiles, _) in places.items()}
    return buffers | {"claims": CLAIMS + 4 * programs}, words | {"entered": ways, "epochs": programs}


def needs(product: Product, way: Way, itemsize: int, ways: int, programs: int) -> tuple[str, Needs] | None:
    """The workspace of a product run in some way, and what it asks of it; None of a plain one, which has none."""
    op, M, N, K = product.op, product.M, product.N, product.K
    block = _blocks(way, M, N, itemsize)
    if way.name == "plain":
        return None
    if way.name == "put":
        return f"{op}.put", _put(put_bytes(op, M, N, K, itemsize, ways), ways)
    if op == GATHER:
        if way.name == "push":
            return op, few_rows(M, K, itemsize, ways, programs)
        if way.name == "chained":
            pieces = way.chunks or 2
            nbytes = sum(slice_bytes(M, K, itemsize, pieces, number) for number in range(pieces))
        else:
            pieces = way.chunks or 1
            nbytes = (ways - 1) * pieces * slot_rows(M, ways, pieces) * K * itemsize
        return op, arriving(nbytes, ways, pieces)
    if op == SCATTER and way.name in ("chunks", "chained", "persistent"):
        return f"{op}.chunks", whole_parts(M, N, itemsize, ways)
    if op == SCATTER:
        wire, tiles = FP32 if way.name == "push" else itemsize, tiles_of_rows(M, N, block, ways, 0)
        places = {"parts": (tiles * math.prod(block) * wire, tiles, 2 * (ways - 1))}
    elif way.name == "one-shot":
        tiles = num_tiles(M, N, block)
        places = {"all": (tiles * math.prod(block) * FP32, tiles, 2 * ways)}
    else:
        tiles = -(-num_tiles(M, N, block) // ways)
        nbytes = tiles * math.prod(block) * itemsize
        places = {"parts": (nbytes, tiles, 2 * (ways - 1)), "sums": (nbytes, tiles, ways - 1)}
    return op, tile_places(places, ways, programs)


def grown(before: int, need: int) -> int:
    """Bytes of a buffer of `before` bytes that has to hold `need`."""
    return before if need <= before else up(max(need, int(LARGER * before)), ALIGNMENT)


def every_word(words: Mapping[str, int], ways: int) -> dict[str, int]:
    """With those that every workspace has."""
    return {"meet": ways, "epoch": 1, **words}


def arena(buffers: Mapping[str, int], words: Mapping[str, int]) -> int:
    """Bytes of the arena that holds a workspace's buffers, and two int32 for each of its words."""
    need = RESERVE + sum(nbytes + RESERVE for nbytes in buffers.values())
    return up(need + sum(8 * count + RESERVE for count in words.values()), UNIT)


def held(found: Iterable[tuple[Product, Way]], itemsize: int, ways: int, programs: int) -> int:
    """Bytes of the arenas of a rank once these products have run so, in this order."""
    buffers: dict[str, dict[str, int]] = {}
    words: dict[str, dict[str, int]] = {}
    for product, way in found:
        asked = needs(product, way, itemsize, ways, programs)
        if asked is not None:
            space, (sizes, counts) = asked
            has, says = buffers.setdefault(space, {}), words.setdefault(space, {})
            for name, nbytes in sizes.items():
                has[name] = grown(has.get(name, 0), nbytes)
            for name, count in every_word(counts, ways).items():
                says[name] = max(count, says.get(name, 0))
    return sum(arena(buffers[space], words[space]) for space in buffers)


WHOLE_ROWS = ("chunks", "chained", "persistent")  # of SCATTER: those whose rows may be sums of several products
WAYS = {
    GATHER: ("chunks", "chained", "push", "put"),  # "persistent" holds what "chunks" does
    SCATTER: ("chunks", "tiles", "push", "put"),  # "chained" and "persistent" likewise
    REDUCE: ("one-shot", "two-shot", "put"),
}


def roomiest(product: Product, itemsize: int, ways: int, programs: int) -> Way:
    """Of the ways that a product may be run, with their own choices, that which holds most memory."""

    def room(name: str) -> int:
        return held([(product, Way(name))], itemsize, ways, programs)

    names = WAYS[product.op] if product.terms == 1 else WHOLE_ROWS[:1]
    return Way(max((name for name in names if not _is_many(product, name, itemsize, ways)), key=room))


def _is_many(product: Product, name: str, itemsize: int, ways: int) -> bool:
    """Whether a way that sends all at once has too much for that."""
    if name == "put":
        return put_bytes(product.op, product.M, product.N, product.K, itemsize, ways) > MOST_PUT
    if product.op == GATHER:
        return name == "push" and product.M * product.K * itemsize > FEW_ROWS
    return name in ("push", "one-shot") and product.M * product.N * FP32 > FEW_SUMS


def up(number: int, unit: int) -> int:
    """The next multiple."""
    return -(-number // unit) * unit
