"""What the ranks of tests/parallel run: modules of many shapes, wrong use, gathers, memory, states, planted faults."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import interlace
from interlace import spec
from interlace.errors import InterlaceError
from interlace.launch import World
from interlace.mesh import Mesh
from interlace.parallel import flat as flat_module
from interlace.parallel.data import DataParallel
from interlace.plan import zero as plan_zero
from rank_functions_data import (
    D,
    Odd,
    V,
    batch,
    check,
    compare_steps,
    different,
    digest,
    gradients,
    mean_loss,
    reference_step,
    seeded,
    split_step,
    trained,
    weights,
    whole_group,
)  # fmt: skip

# --- modules of many shapes -----------------------------------------------------------------------------------------


class Stack(nn.Module):
    """`layers` linear layers, called by `call(layer, x)`."""

    def __init__(self, layers: list[nn.Module], call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(D, V)
        self.call = call or (lambda layer, x: layer(x))

    def forward(self, tokens: Tensor, first: bool = False) -> Any:
        x = self.embedding(tokens)
        for layer in self.blocks:
            x = self.call(layer, x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(x))


class Skipped(Layer):
    """Returns its input untouched on every rank but the first one of the group (layer drop)."""

    rank = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if Skipped.rank == 0 else x


class Scaled(nn.Embedding):
    """An embedding whose backward does need a weight."""

    def __init__(self) -> None:
        super().__init__(V, D)
        self.scale = nn.Parameter(torch.full((D,), 1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


@dataclass
class Output:
    logits: Tensor
    note: str = ""


class Wrapped(Stack):
    """Its output is a dataclass that pytree does not know, and its head's weight is needed in backward."""

    def forward(self, tokens: Tensor, first: bool = False) -> Output:
        return Output(super().forward(tokens))


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-any-return]


def again(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


class Pairs(Stack):
    """Two units in one recomputed region."""

    def forward(self, tokens: Tensor, first: bool = False) -> Any:
        x = self.embedding(tokens)
        for one, two in (
            itertools.batched(self.blocks, 2)
            if hasattr(itertools, "batched")
            else zip(self.blocks[::2], self.blocks[1::2], strict=True)
        ):
            x = checkpoint(lambda x, one=one, two=two: two(one(x)), x, use_reentrant=False)
        return self.head(x)


class Shared(Stack):
    """One inner module used by all layers, and one whole layer that runs twice."""

    def __init__(self) -> None:
        super().__init__([Layer() for _ in range(4)])
        for layer in self.blocks:
            layer.linear = self.blocks[0].linear
        self.blocks.append(self.blocks[1])


class Nested(Stack):
    """Lists in lists, and a list that is called by name."""

    def __init__(self) -> None:
        super().__init__([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer(), Layer()])])

    def forward(self, tokens: Tensor, first: bool = False) -> Any:
        x = self.embedding(tokens)
        for stage in self.blocks:
            for layer in stage:
                x = layer(x)
        return self.head(x)


class RankDependent(Stack):
    """Layer 2 is not even called, except on the first rank."""

    def forward(self, tokens: Tensor, first: bool = False) -> Any:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.blocks):
            if number != 2 or first:
                x = layer(x)
        return self.head(x)


class Empty(nn.Module):
    """A layer whose parameters have no elements, or are complex, or fp64, or integers."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.turn = nn.Parameter(torch.ones(D, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(5, dtype=torch.int32), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(D, 2).t())

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.wide.sum().float() / 3 + self.none.sum() + self.table.sum() / 10 + self.strided.sum(0)
        return (x * self.turn).real + (x * self.turn).imag


def shapes(world: World) -> None:
    """Modules that other engines get wrong, at every stage, against one process."""
    group = whole_group(world)
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...] | None]] = {
        "reentrant checkpoint around units": (lambda: Stack([Layer() for _ in range(5)], reentrant), None),
        "checkpoint around units": (lambda: Stack([Layer() for _ in range(5)], again), None),
        "checkpoint around pairs of units": (lambda: Pairs([Layer() for _ in range(6)]), None),
        "units that pass their input on": (lambda: Stack([Skipped() for _ in range(5)]), None),
        "a unit not called": (lambda: RankDependent([Layer() for _ in range(5)]), None),
        "shared modules": (Shared, None),
        "nested lists": (Nested, None),
        "no units": (lambda: Stack([Layer() for _ in range(2)]), ()),
        "one unit": (lambda: Stack([Layer()]), ("blocks.0",)),
        "everything a unit": (lambda: Stack([Layer() for _ in range(3)]), ("embedding", "blocks.*", "head")),
        "kinds of parameters": (lambda: Stack([Layer(), Empty(), Layer()]), None),
        "sparse gradients": (lambda: sparse(Stack([Layer()])), ("embedding", "blocks.*")),
    }
    Skipped.rank = group.rank
    for (name, (make, units)), zero in itertools.product(cases.items(), range(4)):
        reference, model = seeded(0, make), DataParallel(seeded(0, make), group, zero=zero, units=units)
        if name == "units that pass their input on":
            reference.call = lambda layer, x: layer(x) if Stack.first else x
        assert units is not None or len(model.units) > 1
        wrong = []
        for _ in range(2):
            reference.zero_grad()
            model.zero_grad()
            for rank in range(group.size):
                Skipped.rank = 0
                Stack.first = rank == 0
                tokens, labels = batch(0, rank)
                (mean_loss(reference(tokens, rank == 0), labels) / group.size).backward()
            Skipped.rank = group.rank
            split_step(model, 0, 1)
            dense = {name: g.to_dense() for name, g in gradients(reference).items()}
            wrong += different(model.whole_gradients(), dense)
            for m in (model, reference):
                with torch.no_grad():
                    for p in m.parameters():
                        if p.grad is not None:
                            p.sub_(p.grad.to_dense() * 0.1)
        wrong += different(model.whole_parameters(), weights(reference))
        check(wrong, name, zero)
    odd = trained(seeded(0, lambda: Odd(5)), group.size, 2)
    for zero in range(4):
        scaled = lambda: Wrapped([Layer() for _ in range(3)])  # noqa: E731
        model, reference = DataParallel(seeded(0, scaled), group, zero=zero), seeded(0, scaled)
        for rank in range(group.size):
            tokens, labels = batch(0, rank)
            (mean_loss(reference(tokens).logits, labels) / group.size).backward()
        tokens, labels = batch(0, group.rank)
        mean_loss(model(tokens).logits, labels).backward()
        check(different(model.whole_gradients(), gradients(reference)), "dataclass", zero)
        for ahead in (0, 2, 9):
            model = DataParallel(seeded(0, lambda: Odd(5)), group, zero=zero, ahead=ahead)
            check(compare_steps(model, odd), "ahead", ahead, zero)

        def with_scaled() -> nn.Module:
            made = Stack([Layer() for _ in range(3)])
            made.embedding = Scaled()
            return made

        reference = seeded(0, with_scaled)
        model = DataParallel(seeded(0, with_scaled), group, zero=zero, units=("embedding", "blocks.*"))
        check(compare_steps(model, trained(reference, group.size, 1)), "scaled embedding", zero)


def sparse(stack: Stack) -> Stack:
    stack.embedding.sparse = True
    return stack


def wrong_use(world: World) -> dict[str, str]:
    """What is said to a caller who does it wrong."""
    group, said = whole_group(world), {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            said[name] = "nothing"
        except InterlaceError as error:
            said[name] = f"{type(error).__name__}: {error}"

    def made(**options: Any) -> DataParallel:
        return DataParallel(Stack([Layer() for _ in range(5)]), group, **options)

    def step(model: DataParallel) -> None:
        tokens, labels = batch(0, group.rank)
        mean_loss(model(tokens), labels).backward()

    def both_at_once(model: DataParallel) -> None:
        tokens, labels = batch(0, group.rank)
        (mean_loss(model(tokens), labels) + mean_loss(model(tokens), labels)).backward()

    attempt("stage", lambda: made(zero=4))
    attempt("gradients", lambda: made(gradients="average"))
    attempt("pattern", lambda: made(units=("block.*",)))
    attempt("list", lambda: made(units=("blocks",)))
    attempt("order", lambda: step(made(zero=3, units=[f"blocks.{i}" for i in (4, 3, 2, 1, 0)])))
    attempt("outside", lambda: made(zero=3).module.blocks[0](torch.ones(D)))
    attempt("two forwards", lambda: both_at_once(made(zero=3)))

    def penalised(model: DataParallel) -> None:
        tokens, labels = batch(0, group.rank)
        penalty = sum(parameter.square().sum() for parameter in model.module.parameters())
        (penalty + mean_loss(model(tokens), labels)).backward()

    def graph_of_backward(model: DataParallel) -> None:
        tokens, labels = batch(0, group.rank)
        torch.autograd.backward(mean_loss(model(tokens), labels), create_graph=True)

    def recomputed(model: DataParallel) -> None:
        tokens, labels = batch(0, group.rank)
        mean_loss(checkpoint(model, tokens, use_reentrant=False), labels).backward()

    attempt("penalty", lambda: penalised(made(zero=3)))
    attempt("graph of backward", lambda: graph_of_backward(made(zero=3)))
    attempt("recomputed", lambda: recomputed(made(zero=1)))
    attempt("half", lambda: made(zero=1).half())
    attempt("meta", lambda: DataParallel(nn.Linear(2, 2, device="meta"), group))
    attempt("mesh", lambda: interlace.parallelize(nn.Linear(2, 2), f"dp={world.size + 1}"))
    attempt("axis", lambda: interlace.parallelize(nn.Linear(2, 2), f"pp={world.size}"))
    attempt("stage in mesh", lambda: interlace.parallelize(nn.Linear(2, 2), f"dp={world.size} zero=3"))
    attempt("misspelt axis", lambda: interlace.parallelize(nn.Linear(2, 2), f"tpp={world.size}"))
    attempt("number", lambda: interlace.parallelize(nn.Linear(2, 2), world.size))  # type: ignore[arg-type]
    attempt("wrapped", lambda: interlace.parallelize(nn.Sequential(made())))
    attempt("nowhere", lambda: interlace.parallelize(nn.Linear(2, 2, device="meta")))
    attempt("role", lambda: interlace.parallelize(nn.Linear(2, 2), roles={"wieght": spec.Role.NORM}))
    model = made(zero=3)
    state = model.state_dict()
    attempt("missing", lambda: model.load_state_dict({n: v for n, v in state.items() if n != "head.bias"}))
    attempt("unexpected", lambda: model.load_state_dict({**state, "tail.bias": torch.ones(1)}))
    attempt("negative norm", lambda: model.clip_grad_norm_(-1))
    attempt("norm type", lambda: model.clip_grad_norm_(1.0, norm_type=0))
    attempt("shape", lambda: model.load_state_dict({**state, "head.bias": torch.ones(1)}))
    assert not different(model.whole_parameters(), state, 0.0)
    assert model.to("cpu") is model
    tied = DataParallel(seeded(0, Odd), group, zero=3)
    two = tied.state_dict() | {"head.weight": torch.ones(V, D)}
    attempt("two values", lambda: tied.load_state_dict(two))
    tied.load_state_dict(two | {"embedding.weight": two["head.weight"].clone()})
    assert (tied.state_dict()["embedding.weight"] == 1).all()
    return said


# --- gathers, memory, what the module's own parameters show ---------------------------------------------------------


def gathers(world: World) -> list[list[int]]:
    """All-gathers of one step, counted and planned, for several numbers of units, of micro-batches, and ahead."""
    group, found = whole_group(world), []
    for layers, ahead, parts in itertools.product((1, 2, 5), (1, 2), (1, 3)):
        for embedding in (True, False):
            module = Stack([Layer() for _ in range(layers)])
            units = ("embedding", "blocks.*") if embedding else ("blocks.*",)
            model = DataParallel(module, group, zero=3, units=units, ahead=ahead)
            totals = [flat.numel for unit in model.units for flat in unit.flats]
            chosen = plan_zero.slots(totals, range(len(totals)), ahead + 1)
            regather = [not (embedding and position == 0) for position in range(len(totals))]
            planned = sum(plan_zero.gathers_per_step(chosen, regather, ahead, parts)) + 1  # and the root, once
            for step in range(2):
                group.meter.reset_counts()
                split_step(model, step, parts)
                found.append([group.meter.calls["all_gather", "dp"] - 1, planned])  # one is the loss of split_step
    return found


def memory(world: World) -> dict[str, Any]:
    """Bytes that stay between steps, by stage, and the parameters' own view under zero=3."""
    group, found = whole_group(world), {}
    for zero in range(4):
        model = DataParallel(seeded(0, lambda: Odd(6)), group, zero=zero)
        split_step(model, 0, 1)
        found[str(zero)] = {
            kind: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
            for kind, tensors in model.resident_tensors().items()
        }
        hidden = [p.isnan().all().item() for p in model.module.parameters()]
        assert all(hidden) if zero == 3 else not any(hidden)
        assert [p.shape for p in model.module.parameters()] == [p.shape for p in Odd(6).parameters()]
    totals = [flat.numel for flat in model.flats]
    found["whole"] = 8 * sum(totals)
    found["frozen"] = 8 * sum(flat.numel for flat in model.flats if not flat.trainable)
    blocks = model.units[0].flats
    found["two units"] = 2 * 8 * sum(flat.numel for flat in blocks) + 8 * sum(flat.numel for flat in model.root.flats)
    return found


def states(world: World) -> None:
    """A state saved at one stage loads at every other, into a plain module, and back; optimizers go on."""
    group = whole_group(world)
    for saved in range(4):
        reference = seeded(0, lambda: Odd(2))
        model = DataParallel(seeded(0, lambda: Odd(2)), group, zero=saved)
        check(compare_steps(model, trained(reference, group.size, 1)), saved)
        model.module.scale.mul_(2.0)
        reference.scale.mul_(2.0)
        state, expected = model.state_dict(), reference.state_dict()
        assert list(state) == list(expected)
        check(different(state.items(), expected), saved)
        plain = seeded(5, lambda: Odd(2))
        plain.load_state_dict(state)
        expected_next = trained(copy.deepcopy(plain), group.size, 1)
        for loaded in range(4):
            other = DataParallel(seeded(7 + world.rank, lambda: Odd(2)), group, zero=loaded)
            if loaded % 2:
                split_step(other, 3, 1)  # something is gathered, and out of date
                other.zero_grad()
            with torch.no_grad():
                other(batch(0, 0)[0])
            result = other.load_state_dict(state)
            assert result.missing_keys == []
            assert result.unexpected_keys == []
            assert digest(other.whole_parameters()) == digest(weights(plain).items())
            assert digest(other.state_dict().items()) == digest(state.items())
            with torch.no_grad():
                assert torch.allclose(other(batch(1, 0)[0], True), plain(batch(1, 0)[0], True), atol=1e-5)
            check(compare_steps(other, expected_next), saved, loaded)
        part = {"frozen": torch.full((D,), 2.0), "other": torch.ones(1)}
        result = model.load_state_dict(part, strict=False)
        assert result.unexpected_keys == ["other"]
        assert len(result.missing_keys) == len(state) - 1
        assert dict(model.whole_parameters())["frozen"].eq(2.0).all()
        outer = nn.ModuleDict({"inner": model}).state_dict()
        assert list(outer) == [f"inner.{name}" for name in state]


# --- faults that a comparison must show -----------------------------------------------------------------------------


def planted(world: World, fault: str) -> dict[str, list[str]]:
    """What the comparison says, by stage, when something is wrong on purpose."""
    group, found = whole_group(world), {}
    expected = trained(seeded(0, lambda: Odd(2)), group.size, 1)
    for zero in range(4):
        model = DataParallel(seeded(0, lambda: Odd(2)), group, zero=zero)
        with planting(fault, group.rank):
            found[str(zero)] = compare_steps(model, expected)
    return found


@contextmanager
def planting(fault: str, rank: int) -> Iterator[None]:
    reduce, accumulate = flat_module.Flat.reduce, flat_module.Flat.accumulate

    def scaled(self: Any, scale: float, wire: Any) -> Any:
        if rank == 1 and self.grad is not None:
            self.grad.mul_(1.001)
        return reduce(self, scale, wire)

    def left_out(self: Any, index: int) -> None:
        if self.members[index].name == "blocks.1.down.weight":
            self.members[index].parameter.grad = None
        else:
            accumulate(self, index)

    if fault == "scaled":
        flat_module.Flat.reduce = scaled  # type: ignore[method-assign]
    if fault == "left out":
        flat_module.Flat.accumulate = left_out  # type: ignore[method-assign]
    try:
        yield
    finally:
        flat_module.Flat.reduce, flat_module.Flat.accumulate = reduce, accumulate  # type: ignore[method-assign]


# --- parallelize ----------------------------------------------------------------------------------------------------


def own_loop(world: World) -> list[Any]:
    """A user's loop around `interlace.parallelize`, inside a process group that is there already."""
    expected = trained(seeded(0, lambda: Odd(2)), world.size, 2)
    roles = {"head.weight": spec.Role.NORM, "blocks.0.up.bias": spec.Role.COLUMN}
    for zero, mesh in ((0, None), (3, Mesh((("dp", world.size),))), (2, f"tp=1 dp={world.size}")):
        model = interlace.parallelize(seeded(world.rank, lambda: Odd(2)), mesh, roles, zero=zero)
        check(compare_steps(model, expected), zero)
        decayed = {place.name: place.leaf.decay for place in model.placements(owned=False)}  # type: ignore[attr-defined]
        assert decayed.get("blocks.0.up.bias", True)
        assert not decayed.get("blocks.1.up.bias", False)
        assert decayed.get("embedding.weight", True)
        frozen_later(world, zero)
    return [model.group.size, model.group.rank, str(model.group.device)]


def frozen_later(world: World, zero: int) -> None:
    """A whole unit, a matrix of another and the unused parameters: as in one process, step for step, clipping too."""
    reference = seeded(0, lambda: Odd(2))
    model = interlace.parallelize(seeded(world.rank, lambda: Odd(2)), zero=zero)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1) for m in (reference, model)]
    for step in range(3):
        for module in (reference, model.module):
            for name, parameter in module.named_parameters():
                later = name == "blocks.0.up.weight" or name.startswith("blocks.1.")
                parameter.requires_grad_("unused" not in name and "frozen" not in name and not (later and step > 0))
        reference_step(reference, step, world.size, 1)
        split_step(model, step, 1)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.37)
        assert abs(model.clip_grad_norm_(0.37).item() - norm.item()) <= 1e-9 * norm.item(), (zero, step)
        before = model.state_dict()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = model.state_dict()
        check(different(found.items(), reference.state_dict()), zero, step)
        same = {name for name, value in found.items() if torch.equal(value, before[name])}
        assert same >= {"unused.weight", "unused.bias"}, (zero, step)
        assert ("blocks.0.up.weight" in same) == ("blocks.1.up.bias" in same) == (step > 0), (zero, step)


def hybrid_loop(world: World) -> list[Any]:
    """The same under hybrid sharding: frozen and unused parameters, a branch of rank 0's, the norm, whole states."""
    expected = trained(seeded(0, lambda: Odd(2)), world.size, 2)
    reference = seeded(0, lambda: Odd(2))
    reference_step(reference, 0, world.size, 1)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.37)
    for zero in (1, 2, 3):
        model = interlace.parallelize(seeded(world.rank, lambda: Odd(2)), "dp=4 shard=2", zero=zero)
        check(compare_steps(model, expected), zero)
        model = interlace.parallelize(seeded(world.rank, lambda: Odd(2)), "dp=4 shard=2", zero=zero)
        split_step(model, 0, 1)
        assert abs(model.clip_grad_norm_(0.37).item() - norm.item()) <= 1e-9 * norm.item()
        check(different(model.whole_gradients(), gradients(reference)), zero, "clipped")
        owned = [(p.name, p.start, p.stop, torch.Size(p.shape).numel()) for p in model.placements(owned=True)]
        assert not different(model.state_dict().items(), seeded(0, lambda: Odd(2)).state_dict(), 0.0)
    try:
        interlace.parallelize(nn.Linear(2, 2), "dp=4 shard=2")
    except InterlaceError as error:
        return [str(error), owned]
    raise AssertionError("zero=0 was not refused")


def compiled(world: World, backend: str) -> None:
    """A block whose forward one rank compiles, below the hooks; without a compiler it is plain there too."""
    make = lambda: Stack([Layer() for _ in range(4)])  # noqa: E731
    reference, module = seeded(0, make), seeded(0, make)
    if backend and world.rank == 0:
        module.blocks[1].forward = torch.compile(module.blocks[1].forward, backend=backend)
    group = whole_group(world)
    check(compare_steps(DataParallel(module, group, zero=3), trained(reference, group.size, 2)))
