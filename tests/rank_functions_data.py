"""What the ranks of tests/parallel run: a module split over them against the same module in one process.

Every rank trains the single-process reference itself, on the whole batch, and compares whole gradients and weights.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from interlace import spec
from interlace.collectives import Group, Meter, all_gather, sum_scalars
from interlace.config import ModelConfig
from interlace.launch import World
from interlace.layout import Layout
from interlace.mesh import Mesh
from interlace.parallel.data import DataParallel

V, D = 13, 17
CPU = torch.device("cpu")


class Block(nn.Module):
    """A pre-norm MLP with a tied pair, a 0-d gain, a parameter of one element, a frozen one, and an unused layer."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 3 * D)
        self.again = nn.Linear(D, 3 * D)
        self.again.weight = self.up.weight
        self.down = nn.Linear(3 * D, D, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.frozen = nn.Parameter(torch.randn(D), requires_grad=False)
        self.unused = nn.Linear(3, 2)
        self.branch = nn.Linear(D, D)
        self.recompute = recompute

    def inner(self, x: Tensor, first: bool) -> Tensor:
        h = self.norm(x) * self.frozen
        h = torch.relu(self.up(h)) + torch.tanh(self.again(h))
        x = x + self.gain * self.down(h) + self.shift * self.frozen
        return x + self.branch(x) if first else x

    def forward(self, x: Tensor, first: bool) -> Tensor:
        if self.recompute:
            return checkpoint(self.inner, x, first, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x, first)


class Odd(nn.Module):
    """Odd sizes throughout, fp64.  `first` takes branches, which tests do on rank 0 only."""

    def __init__(self, layers: int = 4, recompute: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([Block(recompute) for _ in range(layers)])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.unused = nn.Linear(D, D)
        self.branch = nn.Linear(D, D)
        self.frozen = nn.Parameter(torch.randn(D), requires_grad=False)
        self.register_buffer("scale", torch.rand(D) + 0.5)
        self.register_buffer("steps", torch.tensor(3), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor, first: bool = False) -> Tensor:
        x = self.embedding(tokens) * self.scale + self.frozen
        for block in self.blocks:
            x = block(x, first)
        if first:
            x = x + self.branch(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def group_of(world: World, size: int = 0) -> Group | None:
    """The first `size` ranks as a data axis (all of them by default); every rank calls it, those outside get None."""
    ranks = tuple(range(size or world.size))
    made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
    return (
        Group("dp", ranks, world.rank, CPU, Meter(world.waiting, record=False), made) if world.rank in ranks else None
    )


def whole_group(world: World) -> Group:
    group = group_of(world)
    assert group is not None
    return group


def batch(step: int, rank: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + part)
    tokens = torch.randint(0, V, (3, 8), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def seeded(seed: int, make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(seed)
    return make()


def different(
    found: Iterable[tuple[str, Tensor]], reference: dict[str, Tensor], tolerance: float | None = None
) -> list[str]:
    """Names whose largest difference exceeds `tolerance` (1e-5, or 1e-10 in fp64) times the largest reference value."""
    found = dict(found)
    assert found.keys() == reference.keys(), found.keys() ^ reference.keys()
    wrong = []
    for name, value in found.items():
        expected = reference[name]
        assert value.shape == expected.shape, name
        difference = (value - expected).abs().max().item() if value.numel() else 0.0
        allowed = tolerance if tolerance is not None else 1e-10 if expected.dtype == torch.float64 else 1e-5
        if value.numel() and not difference <= allowed * expected.abs().max().item():
            wrong.append(f"{name}: {difference:.3g} of {expected.abs().max().item():.3g}")
    return wrong


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def agreed(model: DataParallel) -> bool:
    """Whether all ranks have the same bits in every whole parameter."""
    own = digest(model.whole_parameters())
    number = torch.tensor([int(own[:15], 16)])
    return len(set(all_gather(number, model.group).wait().tolist())) == 1


def reference_step(module: nn.Module, step: int, ranks: int, parts: int) -> float:
    """Loss and gradients of the mean over ranks and parts, in one process; rank 0's parts take the branches."""
    total = 0.0
    for rank, part in itertools.product(range(ranks), range(parts)):
        tokens, labels = batch(step, rank, part)
        loss = mean_loss(module(tokens, rank == 0), labels) / ranks / parts
        loss.backward()
        total += loss.item()
    return total


def split_step(model: DataParallel, step: int, parts: int) -> float:
    """The same through the wrapper: this rank's parts, reduced with the last."""
    mine = 0.0
    for part in range(parts):
        tokens, labels = batch(step, model.group.rank, part)
        with model.no_sync() if part < parts - 1 else nullcontext():
            loss = mean_loss(model(tokens, model.group.rank == 0), labels) / parts
            loss.backward()
        mine += loss.item()
    return float(sum_scalars(torch.tensor([mine], dtype=torch.float64), [model.group])) / model.group.size


@dataclass
class Trajectory:
    """What one process computes in a few steps: losses and gradients of each, weights at the end."""

    parts: int
    make: Callable[[Any], Any]  # parameters -> optimizer
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Descent:
    """Plain gradient descent.  `torch.optim` imports a compiler at its first use, seconds in every process."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(self.lr * parameter.grad.to_dense())

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def trained(
    reference: nn.Module, ranks: int, steps: int = 3, parts: int = 1, make: Callable[[Any], Any] = Descent
) -> Trajectory:
    """Trains `reference` on the batches of all ranks."""
    found = Trajectory(parts, make)
    optimizer = make(reference.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        found.losses.append(reference_step(reference, step, ranks, parts))
        found.gradients.append(gradients(reference))
        optimizer.step()
    found.weights = weights(reference)
    return found


def compare_steps(model: DataParallel, expected: Trajectory) -> list[str]:
    """Trains the wrapper as the reference was; what differs in losses, gradients and final weights."""
    optimizer, wrong = expected.make(model.parameters()), []
    for step, wanted in enumerate(expected.losses):
        optimizer.zero_grad()
        loss = split_step(model, step, expected.parts)
        wrong += [f"step {step} loss {loss} {wanted}"] * (abs(loss - wanted) > 1e-5 * wanted)
        found = different(model.whole_gradients(), expected.gradients[step])
        wrong += [f"step {step} gradient {name}" for name in found]
        optimizer.step()
    return wrong + [f"weight {name}" for name in different(model.whole_parameters(), expected.weights)]


def check(wrong: list[str], *where: Any) -> None:
    assert not wrong, f"{where}: {'; '.join(wrong[:6])}"


# --- equal to one process -------------------------------------------------------------------------------------------


def user_module(world: World, recompute: bool) -> None:
    group = whole_group(world)
    for tied, parts, stages in ((True, 1, (0, 1, 2, 3)), (False, 2, (0, 3))):
        make = functools.partial(Odd, 3, recompute, tied)
        reference = seeded(0, make)
        expected = trained(reference, group.size, 3, parts)
        for zero in stages:
            units = ("embedding", "blocks.*") if zero % 2 else None
            module = seeded(world.rank, make)  # rank 0's values are everyone's
            model = DataParallel(module, group, zero=zero, units=units)
            check(compare_steps(model, expected), world.size, zero, tied, parts)
            assert agreed(model)
            assert torch.equal(model.module.scale, reference.scale)
            tokens, _ = batch(9, 0)
            with torch.no_grad():
                assert torch.allclose(model(tokens), reference(tokens), atol=1e-5)
            unused = {name: value for name, value in model.whole_gradients() if "unused" in name}
            assert len(unused) == 8
            assert not any(value.any() for value in unused.values())


def models() -> Any:
    """`interlace.models.decoder`, whose import loads a compiler, seconds in every process."""
    return importlib.import_module("interlace.models.decoder")


def tiny(tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=33, hidden_size=20, num_layers=3, num_heads=5, num_kv_heads=5, head_dim=4, ffn_size=28,
        max_positions=64, tie_embeddings=tied, init_std=0.2,
    )  # fmt: skip


def labelled(cfg: ModelConfig, counts: Sequence[int], length: int = 16) -> tuple[Tensor, Tensor]:
    """Sequences with so many labels each: tokens and labels [B T]."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, cfg.vocab_size, (len(counts), length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row, count in enumerate(counts):
        labels[row, count:] = -100
    return tokens[:, :-1], labels


def decoders(world: World) -> None:
    decoder(world)
    label_counts(world)


def decoder(world: World) -> None:
    """A meta-device decoder filled range by range, its loss a sum divided by the global count."""
    group = whole_group(world)
    counts = [15, 9, 3, 1, 16, 2, 0, 5][: 2 * world.size]
    own = slice(2 * group.rank, 2 * group.rank + 2)
    for tied in (True, False):
        cfg = tiny(tied)
        tokens, labels = labelled(cfg, counts)
        reference = models().Decoder(cfg)
        models().initialise(reference, cfg, seed=3)
        first = {name: p.detach().clone() for name, p in reference.named_parameters()}
        optimizer = Descent(reference.parameters(), lr=0.05)
        losses, grads = [], []
        for _ in range(3):
            optimizer.zero_grad()
            total, number = reference.loss(tokens, labels)
            assert number.item() == sum(counts)
            (total / number).backward()
            losses.append((total / number).item())
            grads.append(gradients(reference))
            optimizer.step()
        table, value = {p.name: p for p in spec.parameters(cfg)}, models().initial_value
        for zero in range(4):
            model = DataParallel(
                models().Decoder(cfg, device="meta"),
                group,
                zero=zero,
                units=("embedding", "blocks.*", "head"),
                gradients="sum",
                materialise=lambda name, start, stop, table=table, value=value: value(
                    table[name], 3, start, stop - start
                ),
                dims={name: p.dims for name, p in table.items()},
                decay={name: p.decay for name, p in table.items()},
            )
            assert not different(model.whole_parameters(), first, 0.0)
            optimizer = Descent(model.parameters(), lr=0.05)
            for expected, wanted in zip(losses, grads, strict=True):
                optimizer.zero_grad()
                loss, _ = model.run("loss", tokens[own], labels[own])
                (loss / sum(counts)).backward()
                everyone = sum_scalars(loss.detach().double().view(1), [group]).item() / sum(counts)
                assert abs(everyone - expected) <= 1e-5 * expected
                check(different(model.whole_gradients(), wanted), "gradient", zero, tied)
                optimizer.step()
            check(different(model.whole_parameters(), weights(reference)), "weight", zero, tied)
            check_placements(model, {name: p.dims for name, p in table.items()})


def check_placements(model: DataParallel, dims: dict[str, str]) -> None:
    """Placements say where each element is, and their layouts say the same."""
    mesh = Mesh((("dp", model.group.size),))
    wanted = dict(model.whole_parameters())
    counted = torch.zeros(1, dtype=torch.int64)
    for owned in (True, False):
        for place in model.placements(owned=owned):
            values = place.leaf.detach()[place.leaf_start : place.leaf_stop]
            assert torch.equal(values, wanted[place.name].flatten()[place.start : place.stop])
            assert place.leaf.decay == (len(place.shape) > 1)  # type: ignore[attr-defined]
            counted += values.numel() * owned
            layout = Layout.parse(place.layout)
            assert " ".join(layout.names) == dims[place.name]
            if model.sharded:
                ((start, stop),) = layout.local_ranges(place.shape, mesh, model.group.rank)[0]
                assert start <= place.start <= place.stop <= stop
    assert sum_scalars(counted, [model.group]).item() == sum(p.numel() for p in wanted.values())


def label_counts(world: World) -> None:
    """pytorch/torchtitan#1842: 15, 9, 3 and 1 labels; every way to split them gives sum / 28."""
    cfg = tiny(True)
    tokens, labels = labelled(cfg, (15, 9, 3, 1))
    reference = models().Decoder(cfg)
    models().initialise(reference, cfg, seed=1)
    total, number = reference.loss(tokens, labels)
    assert number.item() == 28
    fresh = copy.deepcopy(reference)
    (total / 28).backward()
    for ranks, parts in ((1, 1), (1, 4), (2, 1), (4, 1), (2, 2)):
        group = group_of(world, ranks)
        if group is None:
            continue
        for zero in range(4):
            model = DataParallel(copy.deepcopy(fresh), group, zero=zero, gradients="sum")
            share = 4 // ranks
            pieces = torch.arange(group.rank * share, (group.rank + 1) * share).chunk(parts)
            mine = torch.zeros(1, dtype=torch.float64)
            for number_of, piece in enumerate(pieces):
                with model.no_sync() if number_of < parts - 1 else nullcontext():
                    loss, _ = model.run("loss", tokens[piece], labels[piece])
                    (loss / 28).backward()
                mine += loss.detach()
            loss = sum_scalars(mine, [group]).item() / 28
            assert abs(loss - total.item() / 28) < 1e-5
            check(different(model.whole_gradients(), gradients(reference)), ranks, parts, zero)


def tied_stages(world: World) -> None:
    """deepspeedai/DeepSpeed#966: a tied embedding and a tied pair inside each MLP, Adam, five steps."""
    group = whole_group(world)
    expected = trained(seeded(0, Odd), group.size, 5, make=lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-3))
    for zero in range(4):
        model = DataParallel(seeded(0, Odd), group, zero=zero)
        check(compare_steps(model, expected), zero)
        state = model.state_dict()
        for one, other in (("head.weight", "embedding.weight"), ("blocks.2.up.weight", "blocks.2.again.weight")):
            assert state[one] is state[other]
        assert model.module.head.weight is model.module.embedding.weight


# --- reductions -----------------------------------------------------------------------------------------------------


def accumulation(world: World) -> list[Any]:
    """modelscope/FunASR#3472: local sums 4 and 7 give 5.5 on both; then one reduction a step, and equal bits."""
    group, found = whole_group(world), []
    for zero, whole in itertools.product(range(4), (True, False)):
        model = DataParallel(nn.Linear(1, 1, bias=False), group, zero=zero)
        inputs = [[1.0, 3.0], [2.0, 5.0]][group.rank]
        with model.no_sync():
            out = model(torch.tensor([[inputs[0]]]))
            if whole:
                out.sum().backward()
        with nullcontext() if whole else model.no_sync():
            if not whole:
                out.sum().backward()  # only backward lies inside
        model(torch.tensor([[inputs[1]]])).sum().backward()
        found.append(next(model.whole_gradients())[1].item())
    reductions = set()
    for zero in range(4):
        model = DataParallel(seeded(world.rank, lambda: Odd(2)), group, zero=zero)
        optimizer = Descent(model.parameters())
        for step in range(5):
            group.meter.reset_counts()
            split_step(model, step, 3)
            flats = sum(len(unit.trainable) for unit in [*model.units, model.root])
            reductions.add(group.meter.calls["reduce_scatter", "dp"] - flats)
            optimizer.step()
            optimizer.zero_grad()
        assert agreed(model)
    return [found, sorted(reductions)]


class Scalar(nn.Module):
    """Its weight's gradient is the input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def narrow(world: World) -> list[Any]:
    """pytorch/pytorch#106395: 256 and three times 1 in bf16 are 259 in the main gradient."""
    found = []
    for size in (1, 2):
        group = group_of(world, size)
        if group is None:
            continue
        own = torch.tensor([256.0, 1.0, 1.0, 1.0]).chunk(size)[group.rank]
        for zero, dtype, compute in itertools.product(
            range(4), (torch.bfloat16, torch.float32), (torch.bfloat16, None)
        ):
            if dtype == torch.float32 and compute is None:
                continue
            model = DataParallel(Scalar(dtype), group, zero=zero, gradients="sum", compute_dtype=compute)
            for number, value in enumerate(own):
                with model.no_sync() if number < len(own) - 1 else nullcontext():
                    model(value).backward()
            assert model.module.weight.dtype == torch.bfloat16
            (gradient,) = [g for _, g in model.whole_gradients()]
            (leaf,) = model.parameters() if model.group.rank == 0 or zero == 0 else [torch.empty(0)]
            found.append([gradient.item(), str(gradient.dtype), str(leaf.dtype)])
    return found


def mixed_precision(world: World) -> None:
    """compute_dtype=bf16: equal to rounding the fp32 weights before each step and summing gradients in fp32."""
    group = whole_group(world)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    for zero in range(4):
        how = {"zero": zero, "transport": "copy" if zero % 2 else "auto", "compute_dtype": torch.bfloat16}
        reference, model = seeded(0, Net), DataParallel(seeded(0, Net), group, **how)
        ours, theirs = (Descent(m.parameters(), lr=0.5) for m in (model, reference))
        for step in range(3):
            parts = []
            for rank in range(group.size):
                rounded = seeded(0, Net).bfloat16()
                rounded.load_state_dict(reference.state_dict())
                generator = torch.Generator().manual_seed(100 * step + rank)
                x = torch.randn(5, D, generator=generator).bfloat16()
                rounded(x).float().square().mean().backward()
                parts.append([p.grad.float() for p in rounded.parameters()])
                if rank == group.rank:
                    model(x).float().square().mean().backward()
            for p, *grads in zip(reference.parameters(), *parts, strict=True):
                p.grad = sum(grads) / group.size
            check(different(model.whole_gradients(), gradients(reference), 1e-6), zero, step)
            ours.step()
            theirs.step()
            ours.zero_grad()
        assert all(leaf.dtype == torch.float32 for leaf in model.parameters())
        check(different(model.whole_parameters(), weights(reference), 1e-6), zero)


def narrow_wire(world: World) -> list[list[int]]:
    """256 and 1, 1, ... of one pass on each rank: their sum in fp32 under every stage, and the bytes of reductions when
    the first of two passes is reduced with the second, then when one is reduced alone."""
    group, found = whole_group(world), []
    value = torch.tensor(256.0 if group.rank == 0 else 1.0)
    for zero in range(4):
        how = {"zero": zero, "transport": "copy" if zero > 1 else "auto", "compute_dtype": torch.bfloat16}
        model = DataParallel(Scalar(torch.float32), group, gradients="sum", **how)
        row = []
        for passes in (2, 1, 2):
            group.meter.reset_counts()
            for number in range(passes):
                with model.no_sync() if number < passes - 1 else nullcontext():
                    model(value).backward()
            row.append(group.meter.sent["reduce_scatter", "dp"])
            (gradient,) = [gradient for _, gradient in model.whole_gradients()]
            assert gradient.item() == passes * (256 + group.size - 1), (zero, passes, gradient)
            for leaf in model.leaves():
                leaf.grad = None
        found.append(row)
    return found


def wire(world: World) -> list[int]:
    """Gradients travel in bf16 only when asked: bytes sent in reductions, fp64 then bf16, and their values."""
    group, sent = whole_group(world), []
    for zero, dtype in itertools.product((0, 2), (None, torch.bfloat16)):
        model = DataParallel(seeded(0, lambda: Odd(2)), group, zero=zero, wire_dtype=dtype)
        group.meter.reset_counts()
        split_step(model, 0, 1)
        sent.append(group.meter.sent["reduce_scatter", "dp"])
        parts = []
        for rank in range(group.size):
            local = seeded(0, lambda: Odd(2))
            tokens, labels = batch(0, rank)
            mean_loss(local(tokens, rank == 0), labels).backward()
            parts.append(gradients(local))
        rounded = [{name: value.to(dtype or value.dtype).double() for name, value in part.items()} for part in parts]
        expected = {name: sum(part[name] for part in rounded) / group.size for name in parts[0]}
        check(different(model.whole_gradients(), expected), zero, dtype)
    return sent


def norms(world: World) -> list[list[float]]:
    """pytorch/pytorch#88955: every gradient 1, norm squared = number of distinct parameters; then clipping by it."""
    group, found = whole_group(world), []
    for zero in range(4):
        module = seeded(0, lambda: Odd(3))
        model = DataParallel(module, group, zero=zero)
        distinct = sum(p.numel() for p in seeded(0, lambda: Odd(3)).parameters() if p.requires_grad)
        ones(model).backward()
        assert all(g.eq(1).all() for _, g in model.whole_gradients())
        squares = sum(
            place.leaf.grad[place.leaf_start : place.leaf_stop].double().square().sum()  # type: ignore[index]
            for place in model.placements(owned=True)
        )
        total = sum_scalars(squares.view(1), [group]).item()  # type: ignore[union-attr]
        norm = model.clip_grad_norm_(2.0).item()
        found.append([distinct, total, norm])
        reference = seeded(0, lambda: Odd(3))
        model = DataParallel(seeded(0, lambda: Odd(3)), group, zero=zero)
        reference_step(reference, 0, group.size, 1)
        split_step(model, 0, 1)
        for limit in (1e3, 0.37):
            expected = nn.utils.clip_grad_norm_(reference.parameters(), limit)
            assert abs(model.clip_grad_norm_(limit).item() - expected.item()) <= 1e-6 * expected.item()
            check(different(model.whole_gradients(), gradients(reference)), zero, limit)
        for p in (1.0, 0.5, 3, math.inf):
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, p)
            assert abs(model.clip_grad_norm_(0.1, p).item() - expected.item()) <= 1e-6 * expected.item(), (zero, p)
            check(different(model.whole_gradients(), gradients(reference)), zero, p)
    return found


def early_squares(world: World) -> list[tuple[int, float, float, float]]:
    """By ZeRO stage: runs summed early; the sums of squares with that and without; and once a gradient is doubled."""
    group, found = whole_group(world), []
    for zero in range(4):
        model = DataParallel(seeded(0, lambda: Odd(3)), group, zero=zero)
        split_step(model, 0, 1)
        late = model.square_sum().item()
        nn.Module.zero_grad(model)
        model.early_squares = True
        split_step(model, 0, 1)
        known = len(model._squares)
        early = model.square_sum().item()
        nn.Module.zero_grad(model)
        split_step(model, 0, 1)
        for leaf in model.leaves():
            assert leaf.grad is not None
            leaf.grad.mul_(2)
        found.append((known, late, early, model.square_sum().item()))
    return found


def ones(model: DataParallel) -> Tensor:
    """Through the wrapper, an output whose gradient by every trainable parameter is 1; a unit reads its own."""

    def total(parameters: Iterable[nn.Parameter]) -> Tensor:
        return sum((p.sum() for p in parameters if p.requires_grad), torch.zeros(()))

    in_units = {id(p) for unit in model.units for p in unit.module.parameters()}
    rest = [p for p in model.module.parameters() if id(p) not in in_units]
    for unit in model.units:
        unit.module.forward = lambda module=unit.module: total(module.parameters())
    model.module.total = lambda: sum((unit.module() for unit in model.units), total(rest))
    result: Tensor = model.run("total")
    return result
