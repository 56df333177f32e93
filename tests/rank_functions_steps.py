"""What the ranks of tests/parallel run: optimizers' steps, overflow in float16, and calls that every rank makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

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


def wrapped(zero: int, timeout: float = 60.0) -> Any:
    """A matrix of two whole chunks, one for each of two ranks."""
    torch.manual_seed(0)
    return interlace.parallelize(nn.Linear(128, 64, bias=False), zero=zero, timeout=timeout)


def one_pass(model: Any, rank: int, scale: float = 1.0) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(rank))
    (model(x).square().mean() * scale).backward()


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
