"""What the ranks of the tests of the tensor axis run: collectives with their duals, products, losses, decoders."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from interlace import random, spec
from interlace.collectives import Group, Groups, Meter, autograd, make_groups
from interlace.config import ModelConfig
from interlace.kernels.gather_matmul import gather_matmul
from interlace.kernels.matmul_scatter import matmul_reduce, matmul_scatter
from interlace.layout import Layout, split
from interlace.mesh import Mesh
from interlace.models.decoder import Decoder, initialise
from interlace.parallel import vocabulary
from interlace.parallel.data import DataParallel
from interlace.parallel.part import holding
from interlace.parallel.tensor import Axis, split_decoder
from interlace.plan.activations import block_activations
from interlace.world import World
from rank_functions_data import different, digest, gradients, weights


def groups_of(world: World, mesh: str) -> Groups:
    return make_groups(Mesh.parse(mesh), world.rank, torch.device("cpu"), 60.0, Meter(world.waiting))


def tensor_group(world: World) -> Group:
    return groups_of(world, f"tp={world.size}")["tp"]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    apart = (found - expected).abs().max().item() if found.numel() else 0.0
    assert apart <= 1e-10 * max(1e-30, expected.abs().max().item() if expected.numel() else 1.0), (what, apart)


# --- collectives and products ----------------------------------------------------------------------------------------


def duals(world: World) -> None:
    """Every function and its gradient against the sum over ranks that it stands for, in one process, odd sizes."""
    group = tensor_group(world)
    for count in (1, 5, 7, 12):
        low, high = split(count, world.size, world.rank)
        rows = [slice(*split(count, world.size, rank)) for rank in range(world.size)]
        pieces = [seeded(count, 3, seed=rank) for rank in range(world.size)]  # a different whole tensor on each rank
        weights_of = [seeded(count, 3, seed=10 + rank) for rank in range(world.size)]  # gradients differ by rank too
        own, weight = pieces[world.rank].clone().requires_grad_(), weights_of[world.rank]

        x = own[low:high].detach().clone().requires_grad_()
        made = autograd.gather(x, group, count)
        close(made, torch.cat([pieces[rank][rows[rank]] for rank in range(world.size)]), "gather")
        made.backward(weight)
        close(x.grad, sum(weights_of)[low:high], "gradient of gather")

        x.grad = None
        autograd.whole(x, group, count).backward(weights_of[0])
        close(x.grad, weights_of[0][low:high], "gradient of whole")

        made = autograd.scatter(own, group)
        close(made, sum(pieces)[low:high], "scatter")
        made.backward(weight[low:high])
        close(own.grad, torch.cat([weights_of[r][rows[r]] for r in range(world.size)]), "gradient of scatter")

        own.grad = None
        made = autograd.copy(own, group)
        close(made, pieces[world.rank], "copy")
        made.backward(weight)
        close(own.grad, sum(weights_of), "gradient of copy")

        own.grad = None
        made = autograd.reduce(own, group)
        close(made, sum(pieces), "reduce")
        made.backward(weights_of[0])
        close(own.grad, weights_of[0], "gradient of reduce")

        own.grad = None
        narrow = own[:, : world.rank + 1]  # not what `columns` is given: sizes must be balanced
        low_c, high_c = split(7, world.size, world.rank)
        columns = seeded(count, 7)[:, low_c:high_c].clone().requires_grad_()
        made = autograd.columns(columns, group, 7)
        close(made, seeded(count, 7), "columns")
        made.backward(seeded(count, 7, seed=1))
        close(columns.grad, seeded(count, 7, seed=1)[:, low_c:high_c], "gradient of columns")
        assert narrow.shape[1] == world.rank + 1

        agreed = autograd.agree(pieces[0] + 1e-9 * world.rank, group)
        assert len({tuple(t) for t in _everyone(world, agreed.flatten().tolist())}) == 1, "bits of agree"


def _everyone(world: World, value: Any) -> list[Any]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value)
    return found


def products(world: World, traced: bool = False) -> None:
    """Both seams against plain products, with biases, several weights, odd rows, rows kept or gathered again, overlap
    on and off, x or the weights without gradients; and the same as operators of a graph, in as many transfers."""
    group = tensor_group(world)
    call = _traced if traced else (lambda function, *arguments: function(*arguments))
    count, D, sizes = 7, 5, (6, 4, 9)
    low, high = split(count, world.size, world.rank)
    x = seeded(count, D).requires_grad_()
    whole_w = [seeded(n, D, seed=n).requires_grad_() for n in sizes]
    whole_b = [seeded(n, seed=20 + n).requires_grad_() if n != 4 else None for n in sizes]
    targets = [seeded(count, n, seed=30 + n) for n in sizes]
    sum((F.linear(x, w, b) * t).sum() for w, b, t in zip(whole_w, whole_b, targets, strict=True)).backward()
    places = [split(n, world.size, world.rank) for n in sizes]
    for overlap, rows, keep, wants_x, wants in (
        (True, count, True, True, True),
        (True, count, False, True, True),
        (True, count, True, False, True),
        (True, count, True, True, False),
        (True, None, True, True, True),
        (False, count, True, True, True),
        (False, count, False, True, False),
        (False, None, True, True, True),
    ):
        part = (x if rows is None else x[low:high]).detach().clone().requires_grad_(wants_x)
        w = [whole.detach()[a:b].clone().requires_grad_(wants) for whole, (a, b) in zip(whole_w, places, strict=True)]
        b = [None if bias is None else bias.detach()[c:d].clone().requires_grad_(wants)
             for bias, (c, d) in zip(whole_b, places, strict=True)]  # fmt: skip
        group.meter.reset_counts()
        made = call(gather_matmul, part, w, b, group, rows, overlap, keep)
        for y, whole, bias, (c, d) in zip(made, whole_w, whole_b, places, strict=True):
            close(y, F.linear(x, whole, bias)[:, c:d].detach(), "gather_matmul")
        sum((y * t[:, c:d]).sum() for y, t, (c, d) in zip(made, targets, places, strict=True)).backward()
        again = overlap and rows is not None and not keep and wants
        gathers, reduces = (0, 0) if rows is None else (1 + again, 0 + wants_x)
        calls = group.meter.calls
        assert calls["all_gather", "tp"] == gathers + (rows is None), (calls, overlap, rows, keep)
        assert calls["reduce_scatter", "tp"] == reduces + (rows is None), (calls, overlap, rows, keep)
        assert [each.grad is not None for each in (part, *w)] == [wants_x, *[wants] * len(w)]
        if wants_x:
            close(part.grad, x.grad if rows is None else x.grad[low:high], "gradient of x")
        if not wants:
            continue
        for own, whole, (c, d) in zip(w, whole_w, places, strict=True):
            close(own.grad, whole.grad[c:d], "gradient of a weight")
        for own, whole, (c, d) in zip(b, whole_b, places, strict=True):
            assert (own is None) == (whole is None)
            if own is not None and whole is not None:
                close(own.grad, whole.grad[c:d], "gradient of a bias")
    M = 9
    inner, weight = seeded(count, M).requires_grad_(), seeded(4, M, seed=1).requires_grad_()
    y = F.linear(inner, weight)
    (y * seeded(count, 4, seed=2)).sum().backward()
    c, d = split(M, world.size, world.rank)
    for function, overlap in (
        (matmul_scatter, False),
        (matmul_scatter, True),
        (matmul_reduce, False),
        (matmul_reduce, True),
    ):
        part, own = (t.detach()[:, c:d].clone().requires_grad_() for t in (inner, weight))
        made = call(function, part, own, group, overlap)
        rows = slice(None) if function is matmul_reduce else slice(low, high)
        close(made, y[rows].detach(), "matmul, then a sum")
        (made * seeded(count, 4, seed=2)[rows]).sum().backward()
        close(part.grad, inner.grad[:, c:d], "gradient of x")
        close(own.grad, weight.grad[:, c:d], "gradient of the weight")


def _traced(function: Any, *arguments: Any) -> Any:
    """The same in one graph of the compiler, without its slow back end."""
    torch._dynamo.reset()
    return torch.compile(lambda *given: function(*given), backend="aot_eager", fullgraph=True)(*arguments)


def losses(world: World) -> None:
    """The loss of a split vocabulary of 65 against torch's, with smoothing and z-loss, in pieces; NaN where logits are
    not."""
    group = tensor_group(world)
    V, D, N = 65, 6, 21
    low, high = split(V, world.size, world.rank)
    first, last = split(N, world.size, world.rank)
    labels = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(0))
    labels[:6] = torch.tensor([0, 32, 33, 64, -100, 17])
    for smoothing, z, piece in ((0.0, 0.0, 1 << 29), (0.1, 0.0, 7 * 17), (0.0, 1e-2, 1), (0.2, 1e-3, 4 * 33)):
        x, weight = (3 * seeded(N, D)).requires_grad_(), seeded(V, D, seed=1).requires_grad_()
        logits = x @ weight.T
        expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        expected = expected + z * (logits.logsumexp(1).square() * (labels != -100)).sum()
        (0.5 * expected).backward()
        for sequence in (False, True):
            own_x = (x[first:last] if sequence else x).detach().clone().requires_grad_()
            own_w = weight.detach()[low:high].clone().requires_grad_()
            with mock.patch.object(vocabulary, "PIECE", piece):
                loss = vocabulary.vocabulary_loss(
                    own_x, own_w, labels, group, V, sequence=sequence, label_smoothing=smoothing, z_loss=z
                )
            close(loss, expected.detach(), f"loss {smoothing} {z}")
            (0.5 * loss).backward()
            close(own_x.grad, x.grad[first:last] if sequence else x.grad, f"gradient of x {smoothing} {z}")
            close(own_w.grad, weight.grad[low:high], f"gradient of the weight {smoothing} {z}")
    group.meter.reset_counts()
    with torch.no_grad():
        vocabulary.vocabulary_loss(own_x, own_w, labels, group, V, sequence=True)
    expected = 8 * (world.size - 1) * (len(own_x) * D + 4 * N)
    assert group.meter.sent == {("all_gather", "tp"): expected}, "rows of x, and four numbers a row"


# --- a decoder -------------------------------------------------------------------------------------------------------


CFG: dict[str, Any] = {
    "vocab_size": 65, "hidden_size": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4,
    "ffn_size": 23,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_heads": 4, "num_kv_heads": 4, "head_dim": 12, "rotary_dim": 4, "q_rank": 16, "kv_rank": 8, "value_dim": 8,
}  # fmt: skip


def split_model(
    world: World, mesh: str, cfg: ModelConfig, sequence: bool, dtype: Any = torch.float64, **options: Any
) -> tuple[DataParallel, Groups]:
    groups = groups_of(world, mesh)
    decoder = Decoder(cfg, device="cpu", dtype=dtype)
    initialise(decoder, cfg, seed=0)
    axis = Axis(groups["tp"], sequence)
    parts = split_decoder(decoder, spec.parameters(cfg), axis, holding(groups, "tp", 60.0))
    units = ("embedding", "blocks.*", "head")
    model = DataParallel(
        decoder, groups["dp"], units=units, gradients="sum", parts=parts, tensor=groups["tp"], **options
    )
    return model, groups


def tokens_of(batch: int, length: int, vocab: int, step: int = 0) -> tuple[Tensor, Tensor]:
    found = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(step))
    found[0, :4] = torch.tensor([0, 32, 33, 64])
    return found[:, :-1], found[:, 1:]


def vocabulary_of_65(world: World) -> None:
    """Twenty steps of SGD on 65 words, labels 0, 32, 33 and 64 among them, 13 positions: neither divides."""
    cfg = ModelConfig(**{**CFG, "num_layers": 1})
    reference = Decoder(cfg, dtype=torch.float64)
    initialise(reference, cfg, seed=0)
    mesh = f"tp={world.size} dp=1"
    models = [split_model(world, mesh, cfg, sequence)[0] for sequence in (True, False)]
    for step in range(20):
        tokens, labels = tokens_of(3, 13, 65, step)
        plain = reference.loss(tokens, labels)[0] / labels.numel()
        plain.backward()
        for model in models:
            loss = model.run("loss", tokens, labels)[0] / labels.numel()
            loss.backward()
            close(loss.detach(), plain.detach(), f"loss of step {step}")
            if step == 0:
                wrong = different(model.whole_gradients(), gradients(reference))
                assert not wrong, wrong
        with torch.no_grad():
            for p in [*reference.parameters(), *(leaf for model in models for leaf in model.leaves())]:
                p.sub_(0.3 * p.grad)
                p.grad = None
    for model in models:
        wrong = different(model.whole_parameters(), weights(reference), 1e-9)
        assert not wrong, wrong
        logits = model(tokens)
        close(logits.detach(), reference(tokens).detach(), "logits, gathered for whoever asks")
        assert len(set(_everyone(world, digest(model.whole_parameters())))) == 1, "ranks hold the same bits"


def shared_latents(world: World) -> None:
    """Steps of SGD on latent attention, whose narrow projections and rotary key all heads share: gradients of one
    process, the same bits on all ranks."""
    cfg = ModelConfig(**{**CFG, **LATENT})
    reference = Decoder(cfg, dtype=torch.float64)
    initialise(reference, cfg, seed=0)
    models = [split_model(world, f"tp={world.size} dp=1", cfg, sequence)[0] for sequence in (True, False)]
    for step in range(5):
        tokens, labels = tokens_of(3, 13, 65, step)
        reference.loss(tokens, labels)[0].backward()
        for model in models:
            model.run("loss", tokens, labels)[0].backward()
            wrong = different(model.whole_gradients(), gradients(reference))
            assert not wrong, wrong
        with torch.no_grad():
            for p in [*reference.parameters(), *(leaf for model in models for leaf in model.leaves())]:
                p.sub_(0.01 * p.grad)
                p.grad = None
    for model in models:
        wrong = different(model.whole_parameters(), weights(reference), 1e-9)
        assert not wrong, wrong
        own = [(name, leaf) for name, leaf in model.module.named_parameters() if "_a" in name]
        assert len(own) == 8
        assert len(set(_everyone(world, digest(own)))) == 1, "ranks hold the same bits"


def collectives_of_a_layer(world: World) -> dict[str, list[list[int]]]:
    """[all-gathers, reduce-scatters, all-reduces] of forward and of backward, by form; of two layers more."""
    found: dict[str, list[list[int]]] = {}
    for sequence in (True, False):
        counts = []
        for layers in (1, 3):
            cfg = ModelConfig(**{**CFG, "num_layers": layers, "num_heads": 4})
            model, groups = split_model(world, f"tp={world.size} dp=1", cfg, sequence)
            meter = groups["tp"].meter
            for step in range(2):
                meter.cut()
                tokens, labels = tokens_of(2, 6, 65, step)
                loss = model.run("loss", tokens, labels)[0]
                forward = meter.cut().transfers
                loss.backward()
                backward = meter.cut().transfers
            counts.append([_kinds(forward), _kinds([t for t in backward if "pay" not in t[1]])])
        found[str(sequence)] = [
            [(b - a) // 2 for a, b in zip(one, three, strict=True)] for one, three in zip(*counts, strict=True)
        ]
    return found


def _kinds(transfers: Any) -> list[int]:
    names = [name for axis, name, *_ in transfers if axis == "tp"]
    gathers = sum(name.startswith("gather") for name in names)
    scatters = sum(name.startswith("scatter") for name in names)
    reduces = sum(name.startswith("reduce") for name in names)
    return [gathers, scatters, reduces // 2]  # an all-reduce is two transfers of one name


def one_graph(world: World, backend: str) -> list[list[dict[str, int]]]:
    """Compiled blocks without a break in their graph against plain ones: losses, gradients under SGD, bytes.

    backend: with which the first way is compiled; the others leave out the slow one.
    """
    odd = {"num_heads": 7, "num_kv_heads": 1, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    cfg = ModelConfig(**(CFG | odd | {"num_layers": 1}))
    told = []
    for sequence, overlap, by, lengths in (
        (True, "auto", backend, (13, 13)),
        (True, "off", "aot_eager", (13,)),
        (False, "auto", "aot_eager", (13, 6)),  # another length: sizes that are symbols
    ):
        pair = [_split_blocks(world, cfg, sequence, overlap) for _ in range(2)]
        torch._dynamo.reset()
        for block in pair[1][0].blocks:
            block.forward = torch.compile(block.forward, backend=by, fullgraph=True)
        for step, length in enumerate(lengths):
            tokens, labels = tokens_of(3, length, 65, step)
            losses, sent, gradients_of = [], [], []
            for decoder, group in pair:
                group.meter.reset_counts()
                loss, _ = decoder.loss(tokens, labels)
                loss.backward()
                losses.append(loss.item())
                sent.append({name: group.meter.sent[name, "tp"] for name in ("all_gather", "reduce_scatter")})
                gradients_of.append({name: own.grad.clone() for name, own in decoder.named_parameters()})
                with torch.no_grad():
                    for own in decoder.parameters():
                        own -= 1e-3 * own.grad
                        own.grad = None
            assert losses[1] == pytest.approx(losses[0], rel=1e-5), (sequence, overlap, step)
            wrong = different(gradients_of[1].items(), gradients_of[0])
            assert not wrong, (sequence, overlap, step, wrong)
            told.append(sent)
    _compiled_latents(world)
    return told


def _compiled_latents(world: World) -> None:
    """Blocks with latent attention, each one graph, beside plain ones."""
    for sequence in (True, False):
        pair = [_split_blocks(world, ModelConfig(**(CFG | LATENT)), sequence, "auto") for _ in range(2)]
        for block in pair[1][0].blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        sent = []
        for decoder, group in pair:
            group.meter.reset_counts()
            decoder.loss(*tokens_of(3, 13, 65))[0].backward()
            sent.append({name: group.meter.sent[name, "tp"] for name in ("all_gather", "reduce_scatter")})
        assert sent[0] == sent[1], sequence
        wrong = different(gradients(pair[1][0]).items(), gradients(pair[0][0]))
        assert not wrong, (sequence, wrong)


def _split_blocks(world: World, cfg: ModelConfig, sequence: bool, overlap: str) -> tuple[Decoder, Group]:
    groups = groups_of(world, f"tp={world.size}")
    decoder = Decoder(cfg, device="cpu", dtype=torch.float32)
    initialise(decoder, cfg, seed=0)
    axis = Axis(groups["tp"], sequence, overlap)
    split_decoder(decoder, spec.parameters(cfg), axis, holding(groups, "tp", 60.0))
    return decoder, axis.group


def heads(world: World) -> None:
    """8 query heads and 2 (or 1) key-value heads of 8 over 4 ranks, against one process; their layout."""
    for kv, sequence in ((2, True), (2, False), (1, True)):
        cfg = ModelConfig(**{**CFG, "num_kv_heads": kv, "head_dim": 8, "qkv_bias": True, "qk_norm": True})
        reference = Decoder(cfg, dtype=torch.float64)
        initialise(reference, cfg, seed=0)
        tokens, labels = tokens_of(2, 9, 65)
        reference.loss(tokens, labels)[0].backward()
        model, groups = split_model(world, "tp=4 dp=1", cfg, sequence, zero=1)
        model.run("loss", tokens, labels)[0].backward()
        wrong = different(model.whole_gradients(), gradients(reference))
        assert not wrong, wrong
        places = {place.name: place for place in model.placements(owned=False)}
        weight = places["blocks.0.attention.k.weight"]
        assert weight.layout == f"N/tp*{4 // kv}:8 D"
        _check_placements(model, groups)


def _check_placements(model: DataParallel, groups: Groups) -> None:
    """What the engine holds is what layouts say, and every element is owned once in the world."""
    owned: dict[str, list[tuple[int, int]]] = {}
    held = {True: list(model.placements(owned=True)), False: list(model.placements(owned=False))}
    for place in held[False]:
        layout = Layout.parse(place.layout)
        assert layout.local_numel(place.shape, groups.mesh, groups.rank) == sum(
            other.stop - other.start for other in held[False] if other.name == place.name
        ), (place.name, place.layout)
    pieces = [(place.name, place.start, place.stop, place.shape) for place in held[True]]
    everyone: list[Any] = [None] * groups.mesh.world
    dist.all_gather_object(everyone, pieces)
    for name, start, stop, _ in (piece for rank in everyone for piece in rank):
        owned.setdefault(name, []).append((start, stop))
    shapes = {name: shape for rank in everyone for name, _, _, shape in rank}
    for name, ranges in owned.items():
        end = 0
        for start, stop in sorted(ranges):
            assert start == end, (name, ranges)
            end = stop
        assert end == torch.Size(shapes[name]).numel(), name


def placements(world: World) -> None:
    """Rows, columns, experts and uneven slices under ZeRO: layouts and ownership."""
    cfg = ModelConfig(**{**CFG, "num_experts": 3, "expert_ffn_size": 5, "mlp_bias": False})
    for zero in (0, 1, 3):
        _check_placements(*split_model(world, "tp=2 dp=2", cfg, True, zero=zero))


def masks(world: World) -> dict[str, Any]:
    """The dropout masks of two ranks of tp and two of dp: in the residual stream, split and whole, and in
    attention; and again when recomputed."""
    cfg = ModelConfig(**{**CFG, "num_heads": 4, "dropout": 0.5, "attention_dropout": 0.5})
    found: dict[str, Any] = {}
    plain = random.dropout_mask
    for sequence in (True, False):
        made: list[Tensor] = []

        def recorded(*arguments: Any, made: list[Tensor] = made) -> Tensor:
            made.append(plain(*arguments))
            return made[-1]

        model, groups = split_model(world, "tp=2 dp=2", cfg, sequence, dtype=torch.float32)
        with mock.patch.object(random, "dropout_mask", recorded):
            tokens, labels = tokens_of(2, 32, 65)
            samples = torch.arange(2) + 2 * groups["dp"].rank
            model.run("loss", tokens, labels, samples_B=samples, dropout_key=7)
        whole = plain(random.key(7, "embedding"), samples[:, None], torch.arange(32)[None], 32, 0.5).flatten(0, 1)
        rows = slice(*split(64, 2, groups["tp"].rank)) if sequence else slice(None)
        assert torch.equal(made[0].flatten(0, -2), whole[rows]), "the mask of one process, its rows"
        attention = next(mask for mask in made if mask.dim() == 4)
        residual = made[0].flatten(0, -2)
        found[str(sequence)] = [residual.int().tolist(), attention.int().tolist()]
    return found


def kept_by_a_block(world: World) -> list[list[Any]]:
    """Bytes that autograd keeps for one split block, and those counted, by kind of model and form."""
    found = []
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "qk_norm": {"qk_norm": True}, "gelu": {"norm": "layernorm", "activation": "gelu"},
        "dropout": {"dropout": 0.1}, "experts": {"num_experts": 4, "expert_ffn_size": 6},
        "latent": LATENT, "latent, whole queries": LATENT | {"q_rank": 0, "value_dim": 0},
    }  # fmt: skip
    for (name, change), sequence in ((pair, form) for pair in kinds.items() for form in (True, False)):
        cfg = ModelConfig(**{**CFG, "num_layers": 1, "ffn_size": 22, **change})
        model, _ = split_model(world, f"tp={world.size} dp=1", cfg, sequence, dtype=torch.float32)
        decoder: Any = model.module
        context = decoder.context((2, 13), torch.device("cpu"))
        shared = {t.untyped_storage().data_ptr() for t in [*decoder.parameters(), *context.rotary]}
        shared |= {leaf.untyped_storage().data_ptr() for leaf in model.leaves()}
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor, kept: dict[int, Tensor] = kept, shared: set[int] = shared) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in shared:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        rows = 26 // world.size if sequence else 26
        x = torch.randn(1 if sequence else 2, rows if sequence else 13, 32, requires_grad=True)
        model._begin_forward()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            decoder.blocks[0](x, context)
        counted = block_activations(cfg, 2, 13, 4, device="cpu", tp=world.size, split_rows=sequence)
        found.append([name, sequence, sum(t.untyped_storage().nbytes() for t in kept.values()), counted])
        model._rest()
    return found
