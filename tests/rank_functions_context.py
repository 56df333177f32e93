"""What the ranks of the tests of the context axis run: attention by every exchange, decoders, faults."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import rank_functions_train as train
from interlace.collectives import Group, Handle, Meter, between_all, make_groups, sum_scalars
from interlace.config import ModelConfig, loads
from interlace.mesh import Mesh
from interlace.models.attention import AttentionCore, Pattern, attention
from interlace.models.decoder import Decoder, initialise
from interlace.models.layers import Context
from interlace.parallel import blocks, circulate, sequence
from interlace.parallel.context import SplitCore, SplitPattern, split_sequences
from interlace.parallel.sequence import SequenceAxis
from interlace.plan import context as plan
from interlace.plan import share as shares
from interlace.plan.activations import block_activations
from interlace.train import session as sessions
from interlace.train import verify
from interlace.train.step import forward_backward
from interlace.world import World

CPU = torch.device("cpu")
EXCHANGES = ("ring", "gather", "ulysses")
HEADS = (8, 2, 2, 8)


def group_of(world: World) -> Group:
    mesh = Mesh((("cp", world.size), ("dp", 1)))
    return make_groups(mesh, world.rank, CPU, 60.0, Meter(world.waiting))["cp"]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_core(
    axis: SequenceAxis, whole: Pattern, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, sinks: Tensor | None = None
) -> list[Tensor]:
    """Output and gradients at the positions held here; the sinks' added up over ranks, as the engine does."""
    pattern = SplitPattern(axis, whole)
    pattern.prepare(q.dtype, q.shape[-1])
    core = SplitCore(AttentionCore(whole.window, 0.0, "core"), axis)
    at = axis.columns()
    none = torch.empty(0)
    given = Context(torch.arange(whole.batch), at, (none, none), {whole.window: pattern})  # type: ignore[dict-item]
    own = [x[:, at].clone().requires_grad_() for x in (q, k, v)]
    logits = None if sinks is None else sinks.clone().requires_grad_()
    out = core(*own, given, logits)
    out.backward(weight[:, at])
    found = [out.detach(), *(x.grad for x in own if x.grad is not None)]
    if logits is not None and logits.grad is not None:
        found.append(sum_scalars(logits.grad, [axis.group]))
    return found


def attend(world: World, cases: list[dict[str, Any]], copies: bool = False) -> None:
    """Every exchange against `attention` of the whole, forward and backward, in fp64; copies: by lines that copy."""
    group = group_of(world)
    boxes = between_all(group, 60.0) if copies else None
    for case in cases:
        length, window, documents = case["length"], case.get("window"), case.get("documents")
        heads, kv_heads = case.get("heads", (12, 12))
        documents_BT = None if documents is None else torch.tensor(documents)
        batch = 2 if documents is None else len(documents)
        whole = Pattern(batch, length, CPU, documents_BT, window, case.get("sink_tokens", 0))
        q, k, v = (seeded(batch, length, n, 3, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
        sinks = [seeded(heads, seed=8)] if case.get("sinks") else []
        weight = seeded(batch, length, heads, 3, seed=9)
        own = [x.clone().requires_grad_() for x in (q, k, v, *sinks)]
        out = attention(*own[:3], whole, sinks_H=own[3] if sinks else None)
        out.backward(weight)
        expected = [out.detach(), *(x.grad for x in own if x.grad is not None)]
        for exchange, fused in (*((name, False) for name in EXCHANGES), ("ring", True)):
            axis = SequenceAxis(group, length, exchange, boxes)
            group.meter.reset_counts()
            with mock.patch.object(circulate, "is_fused", lambda q, fused=fused: fused):  # triangles grow, as on a GPU
                found = run_core(axis, whole, q, k, v, weight, *sinks)
            for what, a, b in zip(("out", "q", "k", "v", "sinks")[: len(expected)], found, expected, strict=True):
                held = b if what == "sinks" else b[:, axis.columns()]
                apart = (a - held).abs().max() / b.abs().max().clamp(min=1.0)  # q's are 0, window 1
                assert apart <= 1e-12, (exchange, what, apart, case)
            assert ("send", "cp") not in group.meter.sent  # counted as the exchange that it is


class Behind(contextlib.nullcontext[None]):
    """As a side stream: what joins others' pieces to the own ones comes after all of a stage."""

    def begin(self) -> None:
        pass


def halves(world: World, cases: list[dict[str, Any]]) -> list[int]:
    """bf16, with tiles as kernels make them, in bf16: bit for bit what sums in fp32 give; bytes that ring sent."""
    group, sent = group_of(world), []

    def kernel(plain: Any, rounded: int) -> Any:
        def run(*arguments: Any) -> tuple[Tensor, ...]:
            made = plain(*(x.double() if isinstance(x, Tensor) else x for x in arguments))  # the same wherever it lies
            return *(x.to(torch.bfloat16) for x in made[:rounded]), *(x.float() for x in made[rounded:])

        return run

    class InFp32(blocks.Total):
        def __init__(self, like: Tensor, wide: torch.dtype, later: int) -> None:
            super().__init__(like, wide, 99)

    class JoinedInFp32(blocks.Joined):
        def __init__(self, q_BTHE: Tensor, later: int) -> None:
            super().__init__(q_BTHE, 99)

    behind = mock.patch.object(circulate.Blocks, "beside", return_value=Behind())
    for case in cases:
        length, documents = case["length"], case.get("documents")
        whole = Pattern(2, length, CPU, documents and torch.tensor(documents), case.get("window"))
        q, k, v, weight = (seeded(2, length, n, 8, seed=n).bfloat16() for n in (6, 2, 2, 6))
        made = []
        for others in ({}, {"Total": InFp32, "Joined": JoinedInFp32}):
            group.meter.reset_counts()
            with contextlib.ExitStack() as stack:
                if not others:
                    stack.enter_context(behind)
                patches = {"is_fused": lambda q: True, "forward": kernel(blocks.forward, 1)}
                patches["backward"] = kernel(blocks.backward, 3)
                stack.enter_context(mock.patch.multiple(circulate, **patches, **others))
                made.append(run_core(SequenceAxis(group, length, "ring"), whole, q, k, v, weight))
        sent.append(group.meter.sent["all_to_all", "cp"])
        for a, b in zip(*made, strict=True):
            assert torch.equal(a, b), (case, (a - b).abs().max())
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out = attention(*exact, whole)
        out.backward(weight.double())
        for a, b in zip(made[0], [out.detach(), *(x.grad for x in exact if x.grad is not None)], strict=True):
            apart = (a - b[:, SequenceAxis(group, length, "ring").columns()]).abs().max() / b.abs().max()
            assert apart < 2e-2, (case, apart)
    return sent


def chained(world: World, repeats: int) -> float:
    """On GPUs, bf16: layers one after another, their memory taken anew each time, by copy engines and by the library;
    the largest difference from attention of the whole, over the largest value."""
    device, worst, none = world.device, 0.0, torch.empty(0)
    group = make_groups(Mesh((("cp", world.size), ("dp", 1))), world.rank, device, 60.0, Meter(world.waiting))["cp"]
    boxes = between_all(group, 60.0)
    lengths: list[tuple[int, list[int] | None]] = [(1024, None), (2051, None), (2048, [300, 700, 48, 500, 500])]
    for (length, documents), exchange, lines in itertools.product(lengths, EXCHANGES, (boxes, None)):
        numbers = documents and torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        whole = Pattern(2, length, device, None if numbers is None else numbers[None].repeat(2, 1))
        axis = SequenceAxis(group, length, exchange, lines)
        pattern = SplitPattern(axis, whole)
        pattern.prepare(torch.bfloat16, 64)
        core, at = SplitCore(AttentionCore(None, 0.0, "core"), axis), axis.columns().to(device)
        given = Context(torch.zeros(2, dtype=torch.int64, device=device), at, (none, none), {None: pattern})
        layers, expected = [], []
        for layer in range(4):
            *inputs, weight = (seeded(2, length, n, 64, seed=10 * layer + n).to(device, torch.bfloat16) for n in HEADS)
            own = [x.clone().requires_grad_() for x in inputs]
            out = attention(*own, whole)
            out.backward(weight)
            layers.append((inputs, weight))
            expected.append([x[:, at] for x in (out.detach(), *(x.grad for x in own if x.grad is not None))])
        for _ in range(repeats):
            made = []
            for inputs, _ in layers:
                own = [x[:, at].contiguous().requires_grad_() for x in inputs]
                made.append((core(*own, given), own))
                torch.full((1 << 20,), float("nan"), device=device)
            for (out, _), (_, weight) in zip(reversed(made), reversed(layers), strict=True):
                out.backward(weight[:, at].contiguous())
                torch.full((1 << 20,), float("nan"), device=device)
            for (out, own), those in zip(made, expected, strict=True):
                for a, b in zip((out.detach(), *(x.grad for x in own)), those, strict=True):
                    assert a is not None
                    apart = (a.float() - b.float()).abs().max() / b.float().abs().max()
                    worst = max(worst, float("inf") if apart.isnan() else apart.item())
    boxes.check()
    return worst


def work(world: World, cases: list[dict[str, Any]]) -> list[list[tuple[int, int, int, int]]]:
    """(tiles, pairs that they see, pairs that they compute, bytes sent) by ring and gather, forward and backward."""
    group, found = group_of(world), []
    for case in cases:
        documents_BT = None if case["documents"] is None else torch.tensor([case["documents"]])
        whole = Pattern(1, case["length"], CPU, documents_BT, case["window"], case.get("sink_tokens", 0))
        q, k, v, weight = (seeded(1, case["length"], 2, 3, seed=i) for i in range(4))
        counts = []
        for exchange in ("ring", "gather"):
            seen: list[tuple[int, int]] = []
            plain = blocks.forward

            def counted(q: Tensor, k: Tensor, *rest: Any, seen: Any = seen, plain: Any = plain) -> Any:
                mask = rest[1].of(0, q.shape[1])
                pairs = q.shape[1] * k.shape[1]
                seen.append((pairs if mask is None else int(mask.sum()), pairs))
                return plain(q, k, *rest)

            group.meter.reset_counts()
            with mock.patch.object(circulate, "forward", counted):
                run_core(SequenceAxis(group, case["length"], exchange), whole, q, k, v, weight)
            sent = group.meter.sent["all_to_all", "cp"]
            counts.append((len(seen), sum(s for s, _ in seen), sum(p for _, p in seen), sent))
        found.append(counts)
    return found


def resident(world: World, length: int) -> dict[str, int]:
    """The most bytes of other ranks' keys and values that are here at a time, and bytes of one rank's."""
    group = group_of(world)
    axis = SequenceAxis(group, length, "ring")
    whole = Pattern(1, length, CPU)
    pattern = SplitPattern(axis, whole)
    pattern.prepare(torch.float32, 4)
    assert pattern.tiling is not None
    k, v = torch.zeros(2, 1, len(axis.columns()), 2, 4)
    alive: list[weakref.ref[Tensor]] = []
    most, plain = 0, sequence.all_to_all

    def all_to_all(*arguments: Any, **options: Any) -> Handle[Tensor]:
        moving = plain(*arguments, **options)
        arriving = sum(options["receive_sizes"]) * 4

        def wait() -> Tensor:
            made = moving.wait()
            alive.append(weakref.ref(made))
            note()
            return made

        note(arriving)
        return Handle(wait)

    def note(more: int = 0) -> None:
        nonlocal most
        most = max(most, more + sum(t.numel() * 4 for ref in alive if (t := ref()) is not None))

    with mock.patch.object(sequence, "all_to_all", all_to_all):
        circulate.Blocks(axis, pattern.tiling).circulate((k, v), lambda stage, arrived, behind: None)
    return {"most": most, "one": (k.numel() + v.numel()) * 4}


def waiting(world: World, cases: list[tuple[str, int, int]]) -> list[int]:
    """Query heads of others' tiles whose parts of q's gradient are here at a time, with what comes in a stage."""
    group, found = group_of(world), []
    for exchange, heads, kv_heads in cases:
        alive: list[weakref.ref[Tensor]] = []
        counts, plain = [0], circulate.backward

        def backward(*given: Any, alive: Any = alive, counts: Any = counts, plain: Any = plain) -> Any:
            made = plain(*given)
            alive.append(weakref.ref(made[0]))
            counts.append(sum(x.shape[1] * x.shape[2] for ref in alive[1:] if (x := ref()) is not None))
            return made

        whole, axis = Pattern(1, 16 * world.size, CPU), SequenceAxis(group, 16 * world.size, exchange)
        q, k, v, weight = (seeded(1, whole.length, n, 4) for n in (heads, kv_heads, kv_heads, heads))
        behind = mock.patch.object(circulate.Blocks, "beside", return_value=Behind())
        fused = mock.patch.object(circulate, "is_fused", return_value=True)  # one tile of own keys
        with behind, fused, mock.patch.object(circulate, "backward", backward):
            run_core(axis, whole, q, k, v, weight)
        found.append(max(counts) // 16)
    return found


def changed(world: World, cases: list[dict[str, Any]]) -> list[dict[str, list[list[int]]]]:
    """By exchange, positions at which logits change when token 0 does: (alone, split), each a list of positions."""
    group, found = group_of(world), []
    for case in cases:
        cfg = ModelConfig(
            vocab_size=17, hidden_size=8, num_layers=case.get("layers", 1), num_heads=4, num_kv_heads=2, head_dim=4,
            ffn_size=12, sliding_window=case.get("window"),
            window_layers=tuple(case["window_layers"]) if "window_layers" in case else None,
            sink_tokens=case.get("sink_tokens", 0), attention_sinks=case.get("sinks", False),
        )  # fmt: skip
        documents_BT = None if case["documents"] is None else torch.tensor([case["documents"]])
        length = case["length"]
        tokens = torch.arange(length)[None] * 5 % 17
        other = tokens.clone()
        other[0, 0] += 1
        positions = torch.arange(length)[None]
        if documents_BT is not None:
            starts = (documents_BT.diff(dim=1, prepend=documents_BT[:, :1] - 1) != 0) * positions
            positions = positions - starts.cummax(dim=1).values
        by_exchange = {}
        for exchange in EXCHANGES:
            decoder = Decoder(cfg, dtype=torch.float64)
            initialise(decoder, cfg, 0)
            with torch.no_grad():
                alone = [decoder(t, positions, documents_BT) for t in (tokens, other)]
                axis = SequenceAxis(group, length, exchange)
                split_sequences(decoder, axis)
                at = axis.columns()
                split = [decoder(t[:, at], positions[:, at], documents_BT, columns_T=at) for t in (tokens, other)]
            for a, b in zip(split, alone, strict=True):
                assert (a - b[:, at]).abs().max() <= 1e-12 * b.abs().max(), (exchange, case)
            apart = (split[0] - split[1]).abs().amax(dim=2)[0] > 0
            whole = torch.zeros(length, dtype=torch.int64)
            whole[at] = apart.long()
            everywhere = sum_scalars(whole, [group])
            by_exchange[exchange] = [
                ((alone[0] - alone[1]).abs().amax(dim=2)[0] > 0).nonzero().flatten().tolist(),
                everywhere.nonzero().flatten().tolist(),
            ]
        found.append(by_exchange)
    return found


def kept(world: World, length: int) -> list[tuple[int, int]]:
    """Bytes that autograd keeps of one block, by exchange, documents or not, sinks, and latent attention, beside those
    counted."""
    group, found = group_of(world), []
    base = ModelConfig(
        vocab_size=17, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=24
    )
    for exchange in EXCHANGES:
        narrow = {"num_kv_heads": 4, "kv_rank": 5, "rotary_dim": 2, "value_dim": 3}
        for separate, sunk, latent in ((False, False, {}), (True, False, {}), (True, True, {}), (False, False, narrow)):
            cfg = dataclasses.replace(base, attention_sinks=sunk, **latent)
            decoder = Decoder(cfg)
            initialise(decoder, cfg, 0)
            axis = SequenceAxis(group, length, exchange)
            split_sequences(decoder, axis)
            at = axis.columns()
            documents_BT = (torch.arange(length) // 5).expand(2, length) if separate else None
            given = decoder.context((2, len(at)), CPU, documents_BT=documents_BT, columns_T=at)
            for pattern in given.patterns.values():
                pattern.prepare(torch.float32, cfg.head_dim)
            shared = {t.untyped_storage().data_ptr() for t in [*decoder.parameters(), *given.rotary]}
            sizes: dict[int, Tensor] = {}

            def pack(tensor: Tensor, shared: set[int] = shared, sizes: dict[int, Tensor] = sizes) -> Tensor:
                if tensor.untyped_storage().data_ptr() not in shared:
                    sizes[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                decoder.blocks[0](torch.randn(2, len(at), 16, requires_grad=True), given)
            saved = sum(tensor.untyped_storage().nbytes() for tensor in sizes.values())
            more = {"documents": separate, "device": "cpu", "cp": world.size, "exchange": exchange}
            found.append((saved, block_activations(cfg, 2, len(at), 4, **more)))
    return found


# --- faults --------------------------------------------------------------------------------------------------------


def block_skipped(rank: int) -> Any:
    """Queries of the last piece do not see the keys of the first."""
    plain = blocks.Tiling.tiles

    def tiles(self: blocks.Tiling, a: int, b: int) -> list[blocks.Tile]:
        return [] if (a, b) == (len(self.cut) - 1, 0) else plain(self, a, b)

    return mock.patch.object(blocks.Tiling, "tiles", tiles)


def keys_paid_twice(rank: int) -> Any:
    """Gradients that come back to the owner of keys and values are added twice."""
    plain = circulate.Blocks.give_back

    def give_back(self: circulate.Blocks, *arguments: Any) -> Any:
        add = plain(self, *arguments)
        return lambda: (add(), add())

    return mock.patch.object(circulate.Blocks, "give_back", give_back)


def sink_twice(rank: int) -> Any:
    """A sink joins the result of the last rank's queries twice."""
    plain = circulate.sink

    def sink(*arguments: Any) -> None:
        for _ in range(1 + rank):
            plain(*arguments)

    return mock.patch.object(circulate, "sink", sink)


def sinks_of_the_first_heads(rank: int) -> Any:
    """Every rank attends to its heads with the sinks of the first ones."""
    plain = AttentionCore.forward

    def forward(self: AttentionCore, q: Tensor, k: Tensor, v: Tensor, given: Any, sinks: Tensor | None = None) -> Any:
        assert sinks is not None
        whole = sinks._base if sinks._base is not None else sinks
        return plain(self, q, k, v, given, whole[: len(sinks)])

    return mock.patch.object(AttentionCore, "forward", forward)


def _delta(factor: float) -> Any:
    """What softmax's backward takes away from every probability's gradient is not right on the first rank."""
    plain = circulate.backward

    def backward(*given: Any) -> Any:
        grad, q, k, v, out, logs, delta, *rest = given
        return plain(grad, q, k, v, out, logs, factor * delta, *rest)

    return mock.patch.object(circulate, "backward", backward)


def delta_forgotten(rank: int) -> Any:
    return _delta(0.0 if rank == 0 else 1.0)


def delta_a_little_off(rank: int) -> Any:
    return _delta(0.999 if rank == 0 else 1.0)


def gradient_of_own_sinks(rank: int) -> Any:
    """The sinks' gradient of the other rank's queries is lost."""
    plain = circulate.sink_gradient
    return mock.patch.object(circulate, "sink_gradient", lambda *given: plain(*given) * float(rank == 0))


def swapped_pieces(rank: int) -> Any:
    """A rank takes its two pieces in the wrong order."""
    plain = SequenceAxis.columns

    def columns(self: SequenceAxis, rank: int | None = None) -> Tensor:
        first, second = (torch.arange(*plan.pieces(self.length, self.group.size)[p]) for p in self.places)
        return torch.cat((second, first)) if rank is None else plain(self, rank)

    return mock.patch.object(SequenceAxis, "columns", columns)


def causal_alone(rank: int) -> Any:
    """Documents are forgotten."""
    plain = blocks.Tiling.__init__

    def __init__(self: blocks.Tiling, length: int, ways: int, pattern: Any) -> None:
        plain(self, length, ways, Pattern(pattern.batch, pattern.length, pattern.device, None, pattern.window))

    return mock.patch.object(blocks.Tiling, "__init__", __init__)


@contextlib.contextmanager
def needless_sends(rank: int) -> Iterator[None]:
    """Keys that nobody sees travel too: the numbers are right, the bytes are not."""

    def wanted(found: Any, ways: int, receiver: int, source: int) -> tuple[int, ...]:
        return plan.places(ways, source)

    with mock.patch.object(plan, "wanted", wanted):
        yield


_ALL = (block_skipped, keys_paid_twice, swapped_pieces, causal_alone, needless_sends)
_OF_SINKS = (sink_twice, sinks_of_the_first_heads, gradient_of_own_sinks)
FAULTS = {f.__name__: f for f in (*_ALL, *_OF_SINKS, delta_forgotten, delta_a_little_off)}


def verify_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`verify.under_plan` for each job in turn, with a fault of these or of `rank_functions_train`."""
    found = []
    for job in jobs:
        with (train.FAULTS | FAULTS)[job.pop("fault", "none")](world.rank):
            found.append(verify.under_plan(world, **job))
    return found


def moved_in_halves(world: World, configs: list[str]) -> list[tuple[int, int]]:
    """Of one step in bf16 each, bytes that this rank sent along cp by all-to-all, and those that its share says."""
    found = []
    for text in configs:
        cfg = loads(text)
        made = sessions.build(world, cfg)
        made.meter.reset_counts()
        forward_backward(made.model, made.batches(), made.groups.host, made.dropout_key(0), made.leaves)
        indices = made.dataset.indices(made.cursor, cfg.train.global_batch)
        rows = made.dataset.sequences(made.cursor.epoch, indices).documents_BT
        starts = [[0, *(row.diff().nonzero().flatten() + 1).tolist()] for row in rows]
        share = shares.share(cfg, world.rank, len(indices), starts if cfg.data.documents == "separate" else None)
        found.append((made.meter.sent["all_to_all", "cp"], share.along["cp"]["all_to_all"]))
    return found


def under_copying_lines(world: World, **argument: Any) -> dict[str, Any]:
    """`verify.under_plan`, whose ranks of cp exchange by lines that copy."""
    with mock.patch.object(sessions, "_lines", lambda cfg, ranks: between_all(ranks, 60.0)):
        return verify.under_plan(world, **argument)
