"""What the ranks of tests/parallel run: optimizers' steps, overflow in float16, and calls that every rank makes."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.errors import InterlaceError
from interlace.launch import World
from interlace.spec import Role


class Said(dict[str, str]):
    """What each attempt said."""

    def attempt(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            self[name] = "nothing"
        except InterlaceError as error:
            self[name] = f"{type(error).__name__}: {error}"


def matrix() -> nn.Linear:
    """Of two whole chunks, one for each of two ranks."""
    torch.manual_seed(0)
    return nn.Linear(128, 64, bias=False)


def wrapped(zero: int, timeout: float = 60.0, gradients: str = "mean") -> Any:
    return interlace.parallelize(matrix(), zero=zero, timeout=timeout, gradients=gradients)


def loss_of(model: Any, rank: int) -> Tensor:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(rank))
    return model(x).square().mean()  # type: ignore[no-any-return]


def one_pass(model: Any, rank: int, scale: float = 1.0) -> None:
    (loss_of(model, rank) * scale).backward()


NORMS: dict[str, Callable[[Any], Any]] = {
    "imported before": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "by name": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm alone": lambda model: torch.nn.utils.get_total_norm([leaf.grad for leaf in model.parameters()]),
}


def refused(world: World) -> dict[str, str]:
    said = Said()
    for zero in (0, 1):
        model = wrapped(zero)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            one_pass(model, world.rank)
        said.attempt(f"unreduced step {zero}", optimizer.step)
        said.attempt(f"unreduced norm {zero}", lambda model=model: model.clip_grad_norm_(1.0))  # type: ignore[misc]
        one_pass(model, world.rank)
        optimizer.step()
    for zero in (0, 1, 3):
        model = wrapped(zero)
        one_pass(model, world.rank)
        for name, norm in NORMS.items():
            said.attempt(f"{name} {zero}", lambda norm=norm, model=model: norm(model))  # type: ignore[misc]
        clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)
        clip_grad_value_(model.parameters(), 1.0)
    for zero in (1, 2):
        model = wrapped(zero)
        one_pass(model, world.rank)
        said.attempt(f"own state of a module {zero}", model.module.state_dict)
        with torch.no_grad():
            model.module.weight.zero_()
        said.attempt(f"written {zero}", torch.optim.SGD(model.parameters(), lr=0.1).step)
    model = wrapped(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.AdamW(model.parameters())
    one_pass(model, world.rank, scaler.scale(torch.ones(())).item())
    said.attempt("scaler", lambda: scaler.step(optimizer))
    optimizer.step()
    everyone = [state_of(optimizer, rank) for rank in range(world.size)]
    for name, state in {"own state": everyone[world.rank], "state of rank 0": everyone[0]}.items():
        optimizer.load_state_dict(state)
        said.attempt(name, optimizer.step)
    optimizer.load_state_dict(everyone[world.rank])
    optimizer.state[model.leaves()[0]]["exp_avg"] = torch.zeros(7)
    said.attempt("state of another size", optimizer.step)
    return said


def rates(world: World) -> dict[str, str]:
    """A rate of its own for what takes no decay, which lies on rank 1, and for a name."""
    said = Said()
    model = interlace.parallelize(nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128)), zero=1)
    model(torch.ones(2, 128)).square().sum().backward()
    named = list(model.named_parameters())
    for name, chosen in {
        "by decay": [not p.decay for _, p in named],
        "by name": ["head" in n for n, _ in named],
    }.items():
        own, rest = (
            [p for (_, p), is_own in zip(named, chosen, strict=True) if is_own == kind] for kind in (True, False)
        )
        said.attempt(name, torch.optim.AdamW([{"params": own, "lr": 0.1}, {"params": rest}], lr=1e-3).step)
    return said


def state_of(optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """A rank's `state_dict`, as if it had come from a file."""
    box = [optimizer.state_dict()]
    torch.distributed.broadcast_object_list(box, rank)
    return copy.deepcopy(box[0])


class Two(nn.Module):
    """Two vectors, one on each rank under ZeRO; the second overflows in float16 where x is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4096)), nn.Parameter(torch.ones(4096))

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(1, 4096, dtype=self.a.dtype)
        return (nn.functional.linear(self.a[None], ones) * 1e-3 + nn.functional.linear(self.b[None], ones * x)).sum()


def overflow(world: World) -> list[list[list[float]]]:
    """The scale after each of four steps, two of which overflow, and both means at the end: by cast and by autocast."""
    found = []
    for dtype, zero in ((torch.float16, 1), (torch.float16, 3), (None, 2)):
        model = interlace.parallelize(Two(), zero=zero, compute_dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scales = []
        for x in (3.0, 3.0, 1e-4, 1e-4):
            with torch.autocast("cpu", torch.float16, enabled=dtype is None):
                loss = model(torch.tensor(x, dtype=dtype or torch.float32))
            scaler.scale(loss.float()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        found.append([scales, [value.mean().item() for value in model.state_dict().values()]])
    return found


class Writer(nn.Module):
    """Writes token after token, each by a pass through all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(7, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x @ self.words.weight.T

    def write(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[-1:].argmax(dim=-1)])
        return tokens


def written(world: World) -> bool:
    """The same as in one process, under ZeRO-3, between two steps."""
    torch.manual_seed(0)
    plain = Writer()
    model = interlace.parallelize(copy.deepcopy(plain), zero=3)
    start = torch.tensor([world.rank, 3])
    expected = [plain(start).sum(), plain.write(start, 9)]
    before = model(start).sum()
    with torch.no_grad():
        found = model.run("write", start, 9)
    before.backward()
    return torch.equal(found, expected[1]) and bool((before - expected[0]).abs() < 1e-5)


def given(world: World) -> dict[str, str]:
    """Modules and arguments that are another's on rank 1, which would send more, or less, or in another order."""
    said, other = Said(), world.rank == 1
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if other:
        tied[1].weight = tied[0].weight
    frozen = nn.Linear(3, 2).requires_grad_(not other)
    modules = {"larger": nn.Linear(3, 2 + other), "more": nn.Sequential(*[nn.Linear(3, 3)] * (1 + other))}
    for name, module in ({**modules, "frozen": frozen, "tied": tied}).items():
        said.attempt(name, lambda module=module: interlace.parallelize(module))  # type: ignore[misc]
    said.attempt("zero", lambda: interlace.parallelize(nn.Linear(3, 2), zero=2 * other))
    said.attempt("roles", lambda: interlace.parallelize(nn.Linear(3, 2), None, {"weight": Role.NORM} if other else {}))
    said.attempt("values", lambda: interlace.parallelize(nn.Linear(3, 2)))
    return said


def alone(world: World) -> dict[str, str]:
    """Calls of rank 0, while the others go on; then another one than theirs; then all is well."""
    said = Said()
    model, whole = wrapped(3, timeout=1.0), wrapped(0, timeout=1.0)
    if world.rank == 0:
        said.attempt("saves", model.state_dict)
        said.attempt("loads", lambda: whole.load_state_dict(nn.Linear(128, 64, bias=False).state_dict()))
        said.attempt("saves what it has", whole.state_dict)
    world.barrier("after rank 0")
    model, both = wrapped(1, timeout=20.0), list[Any]()
    said.attempt("another", model.digest if world.rank == 0 else model.state_dict)
    world.barrier("after another")
    model = wrapped(1)
    said.attempt("all", lambda: both.extend([model.state_dict(), model.load_state_dict(model.state_dict())]))
    return said


def waits(world: World) -> str:
    """Rank 0 alone runs a pass that gathers, while the world's own group would wait a minute."""
    model, said = interlace.parallelize(nn.Linear(128, 64, bias=False), zero=3, timeout=2.0), ""
    if world.rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out") as caught, torch.no_grad():
            model(torch.ones(1, 128))
        assert time.monotonic() - begin < 30, "the limit of the world's group"
        said = " ".join(caught.value.__notes__)
    world.barrier("after rank 0")
    return said


class Parts(nn.Module):
    """Matrices that tp splits, vectors without weight decay, a number, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(6), nn.Linear(10, 3)
        self.gain, self.fixed = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x)))) * self.gain * self.fixed
        return y


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True),
}


def parts() -> Parts:
    torch.manual_seed(0)
    return Parts()


def steps_of(model: Any, optimizer: torch.optim.Optimizer, numbers: range, part: slice = slice(None)) -> None:
    for number in numbers:
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
        model(x[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_decay(module: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices, rest = ([p for p in trained if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def moved(world: World, mesh: str, zero: int, kind: str, numbers: list[int], source: str, target: str) -> None:
    """Steps under a mesh, from what `source` holds, which is written to `target`."""
    roles = {"up": Role.COLUMN, "down": Role.ROW} if "tp" in mesh else None
    model = interlace.parallelize(parts(), mesh, roles, zero=zero)
    optimizer = OPTIMIZERS[kind](model.parameter_groups(0.1))
    if source:
        held = torch.load(source)
        model.load_state_dict(held["model"])
        model.load_optimizer_state_dict(optimizer, held["optimizer"])
    ways, own = model.group.size, model.group.rank
    steps_of(model, optimizer, range(*numbers), slice(own * 12 // ways, (own + 1) * 12 // ways))
    made = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    if world.rank == 0:
        torch.save(made, target)


def refusals(world: World, zero: int) -> dict[str, str]:
    """What is said of states that are not the module's, or not the same on every rank."""
    model = interlace.parallelize(parts(), f"dp={world.size}", zero=zero)
    optimizer = OPTIMIZERS["adamw"](model.parameter_groups(0.1))
    steps_of(model, optimizer, range(1), slice(world.rank, 12, world.size))
    held, whole = model.optimizer_state_dict(optimizer), model.state_dict()
    state, said = held["state"], Said()

    def without(entries: dict[str, Any], name: str) -> dict[str, Any]:
        return {key: entry for key, entry in entries.items() if key != name}

    one = next(iter(state))
    cases = {f"without {name}": without(state, name) for name in state}
    cases |= {f"another size of {name}": {**state, name: {**state[name], "exp_avg": torch.zeros(1)}} for name in state}
    cases |= {
        "on one rank none": {} if world.rank else state,
        "on one rank fewer": without(state, one) if world.rank else state,
    }
    for name, given in cases.items():
        said.attempt(name, functools.partial(model.load_optimizer_state_dict, optimizer, held | {"state": given}))
    for name, given in (("on one rank no weights", {}), ("on one rank fewer weights", without(whole, one))):
        said.attempt(name, functools.partial(model.load_state_dict, given if world.rank else whole))
    after = model.optimizer_state_dict(optimizer)["state"]
    assert all(torch.equal(after[name][key], value) for name in state for key, value in state[name].items())
    return dict(said)


def penalty(model: Any) -> Tensor:
    return 0.1 * sum(leaf.square().sum() for leaf in model.parameters() if leaf.requires_grad)  # type: ignore[return-value]


def penalised(model: Any, loss: Callable[[], Tensor], order: str) -> None:
    """A backward pass with a penalty that is computed before the loss, after it, or has a pass of its own."""
    if order == "apart":
        loss().backward()
        penalty(model).backward()
        return
    one, two = (make() for make in ((lambda: penalty(model)), loss)[:: 1 if order == "before" else -1])
    (one + two).backward()


def penalties(world: World) -> dict[str, str]:
    """Penalties on the flat weights themselves train as in one process."""
    said = Said()
    plain = matrix()

    def compare(model: Any, *label: Any) -> None:
        (found,) = dict(model.whole_gradients()).values()
        assert plain.weight.grad is not None
        assert torch.allclose(found, plain.weight.grad, atol=1e-6), label
        plain.zero_grad()
        model.zero_grad()

    def both(model: Any, order: str) -> None:
        penalised(plain, lambda: sum(loss_of(plain, rank) for rank in range(world.size)) * model._scale, order)
        penalised(model, lambda: loss_of(model, world.rank), order)

    for zero, gradients in itertools.product(range(4), ("mean", "sum")):
        model = wrapped(zero, gradients=gradients)
        for order, passes in itertools.product(("before", "after", "apart"), (1, 3)):
            for synced in (True, False):
                for number in range(passes):
                    with nullcontext() if synced or number == passes - 1 else model.no_sync():
                        both(model, order)
                compare(model, zero, gradients, order, passes, synced)
            with model.no_sync():  # a pass that is dropped
                penalised(model, lambda model=model: loss_of(model, world.rank), order)  # type: ignore[misc]
            model.zero_grad()
            both(model, order)
            compare(model, zero, gradients, order, "dropped")
        (sum(loss_of(plain, rank) for rank in range(world.size)) * model._scale).backward()
        with model.no_sync():
            one_pass(model, world.rank)
        torch.autograd.grad(penalty(model), model.leaves())  # adds to nothing
        both(model, "after")
        compare(model, zero, gradients, "looked at")
    for zero in (0, 1, 3):
        for name in ("zeroed", "both"):
            model = wrapped(zero)
            with model.no_sync():
                (loss_of(model, world.rank) + (penalty(model) if name == "both" else 0.0)).backward()
            model.zero_grad(set_to_none=False)
            said.attempt(f"{name} {zero}", lambda model=model: one_pass(model, world.rank))  # type: ignore[misc]
    said.attempt("split", _penalties_of_parts)
    return said


def _penalties_of_parts() -> None:
    """Of slices, and of what ranks of the tensor axis have alike and add up; then a step before they did."""
    plain = parts()
    model = interlace.parallelize(parts(), "tp=2", {"up": Role.COLUMN, "down": Role.ROW})
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    for order in ("before", "after", "apart"):
        for number in range(3):
            with model.no_sync() if number < 2 else nullcontext():
                for each in (plain, model):
                    penalised(each, lambda each=each: each(x).square().mean(), order)  # type: ignore[misc]
        found = dict(model.whole_gradients())
        for name, parameter in plain.named_parameters():
            assert not parameter.requires_grad or torch.allclose(found[name], parameter.grad, atol=1e-5), (order, name)
        plain.zero_grad()
        model.zero_grad()
    with model.no_sync():
        model(x).square().mean().backward()
    torch.optim.SGD(model.parameters()).step()


@functools.cache
def _doubled() -> Callable[[Tensor], Tensor]:
    """What a module calls that its user has compiled, in one graph."""
    return torch.compile(lambda x: torch.tanh(x) * 2, backend="eager", fullgraph=True)


class _Inside(torch.autograd.Function):
    """Runs a block without keeping anything, and again in backward; its node is made before the block runs."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.block, ctx.x = block, x.detach().requires_grad_()
        made: Tensor = block(x)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            made = ctx.block(ctx.x)
        return None, *torch.autograd.grad(made, [ctx.x, *ctx.block.parameters()], gradient)


class Borrowing(nn.Module):
    """Reads the last of its blocks before that runs, after it ran, or its shape alone; on every rank, or on rank 1."""

    def __init__(self, when: str, rank: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.when, self.rank = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), when, rank

    def forward(self, x: Tensor) -> Tensor:
        last = self.blocks[-1].weight
        if self.when == "early" or (self.when == "one rank" and self.rank == 1):
            x = x @ last
        x = x + last.new_zeros(last.shape[0])
        for number, block in enumerate(self.blocks):
            if self.when == "recomputed" and number < 2:
                x = checkpoint(block, x, use_reentrant=x.requires_grad)
            else:
                x = _Inside.apply(block, x, *block.parameters()) if self.when == "recomputed" else block(x)
        x = _doubled()(x)
        return x @ last if self.when == "late" else x


def borrowed(world: World) -> dict[str, str]:
    """Four steps of each, beside one process that has all rows."""
    said = Said()
    rows = [torch.randn(3, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]

    def arrived(model: Any) -> None:
        """A wait that a quick network hides."""
        slots = [flat.slot for unit in model._early for flat in unit.flats]
        assert all(slot is None or slot.arriving is None for slot in slots)

    def train(when: str, zero: int) -> None:
        plains = [Borrowing(when, rank) for rank in range(world.size)]
        model = interlace.parallelize(Borrowing(when, world.rank), zero=zero)
        model.module.register_forward_pre_hook(lambda *_: arrived(model))
        passes = 2 if when == "twice" else 1  # of one graph

        def loss(each: Any, x: Tensor) -> Tensor:
            for _ in range(passes):
                x = each(x)
            return x.square().mean()

        whole, own = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plains[0], model))
        for each in plains[1:]:
            each.blocks = plains[0].blocks
        for step in range(4):
            (sum(loss(p, x) for p, x in zip(plains, rows, strict=True)) / world.size).backward()  # type: ignore[union-attr]
            with torch.no_grad():  # looks at nothing
                model(rows[world.rank])
            loss(model, rows[world.rank]).backward()
            for optimizer in (whole, own):
                optimizer.step()
                optimizer.zero_grad()
            for name, value in model.state_dict().items():
                assert torch.allclose(value, plains[0].state_dict()[name], atol=1e-6), (when, zero, step, name)
        if zero in (1, 2):
            assert [unit.name for unit in model._early] == ([] if when in ("never", "twice") else ["blocks.2"])

    for when, zero in itertools.product(("early", "late", "never", "recomputed"), range(4)):
        said.attempt(f"{when} {zero}", lambda when=when, zero=zero: train(when, zero))  # type: ignore[misc]
    for when, zero in itertools.product(("one rank", "twice"), (1, 2)):
        said.attempt(f"{when} {zero}", lambda when=when, zero=zero: train(when, zero))  # type: ignore[misc]
    return said


class Old(Borrowing):
    """Reads the last of its blocks before that runs, without a gradient, once `on` is set."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.blocks[-1].weight.detach()[0] if self.on else x)


def copies(world: World) -> None:
    """Beside one process that has all rows: what reads or writes weights without torch's noticing, and compilers."""
    rows = [torch.randn(3, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    for zero, how in itertools.product(range(4), ("plain", "block", "all", "outside")):
        plain, own = Old("never"), Old("never")
        for module in {"block": own.blocks, "all": [own]}.get(how, []):
            module.compile(backend="aot_eager")
        model = interlace.parallelize(own, zero=zero)
        called = torch.compile(model, backend="aot_eager") if how == "outside" else model
        whole, part = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model))
        for step in range(3):
            for each in (plain, model):  # before the first pass, and around one that is looked at with gradients
                for scale in (0.9, 1 / 0.9 if step else 1.1):
                    for leaf in each.parameters():
                        leaf.data.mul_(scale)
                    if step:
                        each(rows[0])
            (sum(plain(x).square().mean() for x in rows) / world.size).backward()  # type: ignore[union-attr]
            called(rows[world.rank]).square().mean().backward()
            for optimizer in (whole, part):
                optimizer.step()
                optimizer.zero_grad()
            for name, value in model.state_dict().items():
                assert torch.allclose(value, plain.state_dict()[name], atol=1e-6), (how, zero, step, name)
            assert own.blocks[0].weight.isnan().all() == (zero > 0), (how, zero, step)
        if how == "plain":
            own.on = True
            with torch.no_grad():
                assert model(rows[0]).isnan().all() == (zero > 0), zero
