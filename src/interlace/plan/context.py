"""The context axis as integers: which pieces of a sequence a rank holds, sees and sends.  Exact.

A sequence of T positions is cut into 2w balanced pieces for w ranks; rank r holds pieces r and 2w-1-r, the layout
"T/cp~", so that causal attention is even.  A block is (piece of queries, piece of keys).  Run by the engine, priced by
the planner, and held against a running plan by `verify`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.layout import split
from interlace.plan.tensor import local_heads
from interlace.spec import units

Range = tuple[int, int]
# Of each sequence the first positions of its documents, in order; None: they may lie in any order.
Documents = Sequence[Sequence[int] | None]

EXCHANGES = ("ring", "gather", "ulysses")
# Positions of a rank from which ring was the quickest on GPUs: over two H200s 2.05 and 1.36 times as quick as ulysses
# at 2,048 and 8,192 of 32 heads with as many of keys, though it sends more; bytes and work grow alike with heads.
HIDES = 2048
GROUPS = 4  # of key-value heads, that gather fetches one after another


def as_data(plan: ParallelPlan) -> ParallelPlan:
    """The plan as the data axis's engine sees it: ranks of cp hold other positions, so they are further ranks of dp."""
    return replace(plan, dp=plan.dp * plan.cp, cp=1)


@lru_cache(maxsize=256)
def pieces(length: int, ways: int) -> tuple[Range, ...]:
    """[start, stop) of the 2 x ways pieces of `length` positions."""
    return tuple(split(length, 2 * ways, index) for index in range(2 * ways))


def places(ways: int, rank: int) -> tuple[int, int]:
    """The pieces that a rank holds, in the order in which it holds them."""
    return rank, 2 * ways - 1 - rank


def held(length: int, ways: int, rank: int) -> int:
    """Positions of each sequence that a rank holds."""
    if ways == 1:
        return length
    cut = pieces(length, ways)
    return sum(cut[place][1] - cut[place][0] for place in places(ways, rank))


def seen(
    length: int, ways: int, window: int | None, documents: Documents | None = None, sink_tokens: int = 0
) -> frozenset[Range]:
    """The blocks of which some sequence sees some pair: causal, in the same document, and within the window, or among
    the first `sink_tokens` positions of the document.

    Of two pieces the first query and the last key are nearest to each other: they see each other, or no pair does
    within the window; and the document that both lie in is the only one that the pieces share.
    """
    cut = pieces(length, ways)
    found = set()
    for a, (first, _) in enumerate(cut):
        for b in range(a + 1):
            last = cut[b][1] - 1
            near = window is None or first - last < window
            # the document has to begin after this, for some of its first positions to lie in piece b
            begins = -1 if near else cut[b][0] - sink_tokens
            if a == b or ((near or sink_tokens) and _is_joined(documents, last, first, begins)):
                found.add((a, b))
    return frozenset(found)


def _is_joined(documents: Documents | None, last: int, first: int, begins: int) -> bool:
    """Whether in some sequence the positions `last` < `first` may lie in one document that begins after `begins`."""
    if documents is None:
        return begins < 0
    for starts in documents:
        if starts is None:
            return True
        index = bisect_right(starts, last)
        if index == bisect_right(starts, first) and starts[index - 1] > begins:
            return True
    return False


def wanted(blocks: frozenset[Range], ways: int, receiver: int, source: int) -> tuple[int, ...]:
    """The pieces of `source` whose keys `receiver`'s queries see."""
    return tuple(b for b in places(ways, source) if any((a, b) in blocks for a in places(ways, receiver)))


def is_plain(length: int, window: int | None, has_documents: bool, drops: bool) -> bool:
    """Whether one tile makes all that a rank owes an owner in a stage: no window hides any of the `length` positions,
    no document ends, and dropout takes none."""
    return (window is None or window >= length) and not has_documents and not drops


def all_plain(config: Config) -> bool:
    """Whether that holds of every layer."""
    cfg, documents = config.model_config(), config.data.documents == "separate"
    windows = {cfg.window(layer) for layer in range(cfg.num_layers)}
    drops = cfg.attention_dropout > 0.0
    return all(is_plain(config.data.sequence_length, window, documents, drops) for window in windows)


def returned(itemsize: int, plain: bool) -> int:
    """Bytes of an element of the gradients of keys and values that go to their owner, where they are added in fp32.

    fp32, if tiles were added up before; what one tile made in half precision travels as it is.
    """
    return itemsize if plain else max(itemsize, 4)


@dataclass(frozen=True)
class Stage:
    """What travels at a time: own keys and values of `heads` to the ranks so many `distances` further on."""

    distances: tuple[int, ...]
    heads: Range


def stages(exchange: str, ways: int, kv_heads: int) -> tuple[Stage, ...]:
    """ring: one other rank at a time, all heads.  gather: all other ranks, a quarter of the heads at a time, or one."""
    if exchange == "ring":
        return tuple(Stage((distance,), (0, kv_heads)) for distance in range(1, ways))
    parts = min(kv_heads, GROUPS)
    return tuple(Stage(tuple(range(1, ways)), split(kv_heads, parts, part)) for part in range(parts))


def widest(exchange: str, ways: int, kv_heads: int) -> int:
    """Key-value heads of other ranks that come here in a stage, at most, counted for each of these ranks."""
    return max((stage.heads[1] - stage.heads[0]) * len(stage.distances) for stage in stages(exchange, ways, kv_heads))


def splits_heads(num_heads: int, kv_heads: int, ways: int) -> bool:
    """Whether query heads can be dealt out evenly, each with the key and value head that it reads."""
    return num_heads % ways == 0 and (kv_heads % ways == 0 or ways % kv_heads == 0)


def heads_of(num_heads: int, kv_heads: int, ways: int, rank: int) -> tuple[Range, Range]:
    """Query heads, and key and value heads, that `rank` attends with when heads are dealt out."""
    own, shared = num_heads // ways, num_heads // kv_heads
    first = rank * own
    return (first, first + own), (first // shared, (first + own - 1) // shared + 1)


def choose(config: Config, plan: ParallelPlan) -> str:
    """The exchange of a plan: as asked; ring, where a rank holds so many positions that its tiles hide what it sends;
    else the one whose busiest rank sends fewest bytes, of equals the first.

    Documents are not counted.  Heads that cannot be dealt out leave ring and gather, whose bytes are equal.
    """
    if plan.exchange != "auto":
        return plan.exchange
    if config.data.sequence_length // plan.cp >= HIDES:
        return "ring"
    itemsize = config.train.itemsize
    return _cheapest(config.model_config(), plan.tp, plan.cp, plan.recompute, config.data.sequence_length, itemsize)


@lru_cache(maxsize=1024)  # a search for the nearest plan asks for few of these very often
def _cheapest(cfg: ModelConfig, tp: int, cp: int, recompute: str, length: int, itemsize: int) -> str:
    known = EXCHANGES if splits_heads(*local_heads(cfg, tp), cp) else EXCHANGES[:2]
    plan = ParallelPlan(tp=tp, cp=cp, recompute=recompute)

    def busiest(exchange: str) -> int:
        ranks = (_sent(cfg, plan, exchange, length, rank, [1], [None], itemsize, [units(cfg)]) for rank in range(cp))
        return max(sum(found.values()) for found in ranks)

    return min(known, key=busiest)


def sent(
    config: Config,
    rank: int,
    micro_batches: Sequence[int],
    documents: Sequence[Documents | None],
    itemsize: int,
    stages_here: Sequence[Sequence[str]] | None = None,
) -> Counter[str]:
    """Bytes that `rank` of the axis sends in a step, by collective.

    stages_here: units of each stage of a pipeline that the rank has; None = all, without one.
    micro_batches: sequences of each; documents: theirs, None where attention passes over the documents' ends.
    itemsize: bytes of an element of q, k, v.
    """
    cfg, plan = config.model_config(), config.plan
    exchange, length = choose(config, plan), config.data.sequence_length
    return _sent(cfg, plan, exchange, length, rank, micro_batches, documents, itemsize, stages_here or [units(cfg)])


def _sent(
    cfg: ModelConfig,
    plan: ParallelPlan,
    exchange: str,
    length: int,
    rank: int,
    micro_batches: Sequence[int],
    documents: Sequence[Documents | None],
    itemsize: int,
    stages_here: Sequence[Sequence[str]],
) -> Counter[str]:
    ways, again = plan.cp, 1 if plan.recompute == "none" else 2
    found: Counter[str] = Counter()
    own = [[int(name[7:]) for name in part if name.startswith("blocks.")] for part in stages_here]
    layers = [layer for part in own for layer in part]
    routers = sum(cfg.has_experts(layer) for layer in layers)
    routed = sum(any(cfg.has_experts(layer) for layer in part) for part in own)  # stages
    for count, those in zip(micro_batches, documents, strict=True):
        for layer in layers:
            if exchange == "ulysses":
                found["all_to_all"] += count * _dealt(cfg, plan, rank, length, itemsize)
                continue
            blocks = seen(length, ways, cfg.window(layer), those, cfg.sink_tokens)
            row = count * 2 * local_heads(cfg, plan.tp)[1] * cfg.head_dim  # keys and values of a position
            given, taken = (sum(positions) for positions in zip(*_moved(blocks, length, ways, rank), strict=True))
            plain = is_plain(length, cfg.window(layer), those is not None, cfg.attention_dropout > 0.0)
            found["all_to_all"] += row * ((again + 1) * given * itemsize + taken * returned(itemsize, plain))
        if routers and cfg.router_aux_loss:  # choices of each expert, and labels, of the whole sequences
            again_all = 2 if plan.recompute == "full" else 1
            each = count * (again_all * routers * cfg.num_experts * 4 + 8 * routed)
            found["all_gather"] += each * (ways - 1)
        if routers and cfg.capacity_factor:  # choices of each expert in two pieces
            again_all = 2 if plan.recompute == "full" else 1
            found["all_gather"] += count * again_all * routers * 2 * cfg.num_experts * 4 * (ways - 1)
    return found


def largest(config: Config, plan: ParallelPlan, tokens: int, itemsize: int) -> int:
    """Bytes of the largest message between two ranks of the axis, for so many positions a rank."""
    cfg, exchange = config.model_config(), choose(config, plan)
    num_heads, kv_heads = local_heads(cfg, plan.tp)
    if exchange == "ulysses":  # queries, keys and values
        given = [heads_of(num_heads, kv_heads, plan.cp, rank) for rank in range(plan.cp)]
        heads = max(own[1] - own[0] + 2 * (shared[1] - shared[0]) for own, shared in given)
        return tokens * heads * cfg.head_dim * itemsize
    wide = returned(itemsize, all_plain(config))
    heads = max(stage.heads[1] - stage.heads[0] for stage in stages(exchange, plan.cp, kv_heads))
    return 2 * tokens * heads * cfg.head_dim * wide


def _moved(blocks: frozenset[Range], length: int, ways: int, rank: int) -> Iterator[Range]:
    """For every peer: positions whose keys `rank` gives to it, and takes from it."""
    cut = pieces(length, ways)

    def positions(receiver: int, source: int) -> int:
        return sum(cut[b][1] - cut[b][0] for b in wanted(blocks, ways, receiver, source))

    for peer in range(ways):
        if peer != rank:
            yield positions(peer, rank), positions(rank, peer)


def _dealt(cfg: ModelConfig, plan: ParallelPlan, rank: int, length: int, itemsize: int) -> int:
    """Bytes that `rank` sends for one sequence and layer when heads are dealt out, in both passes."""
    ways = plan.cp
    num_heads, kv_heads = local_heads(cfg, plan.tp)
    here = held(length, ways, rank)

    def heads(peer: int) -> tuple[int, int]:
        (low, high), (first, last) = heads_of(num_heads, kv_heads, ways, peer)
        return high - low, last - first

    own, own_kv = heads(rank)
    there = sum(here * (heads(peer)[0] + 2 * heads(peer)[1]) for peer in range(ways) if peer != rank)  # q, k, v
    away = length - here
    out = sum(here * heads(peer)[0] for peer in range(ways) if peer != rank)  # its gradient, in backward
    times = {"none": (1, 1), "selective": (2, 1), "full": (2, 2)}[plan.recompute]  # the core's run ends before the last
    forward = times[0] * there + times[1] * away * own
    backward = out + away * (own + 2 * own_kv)
    return (forward + backward) * cfg.head_dim * itemsize
