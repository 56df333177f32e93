"""What the ranks of the tests of the tensor axis run: a user's own modules, split by a table of roles."""

from __future__ import annotations

import copy
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.errors import InterlaceError
from interlace.layout import split
from interlace.parallel import tensor
from interlace.parallel.tensor import Axis
from interlace.plan.tensor import slicing
from interlace.spec import Role
from interlace.world import World
from rank_functions_data import different, gradients
from rank_functions_tensor import close, seeded, tensor_group


class Biased(nn.Module):
    """A row product with a bias of tens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 6)
        nn.init.constant_(self.down.bias, 10.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def latent_net(latent: Any) -> nn.Module:
    return nn.Sequential(OrderedDict(norm=nn.RMSNorm(32), attention=latent.Attention(), end=nn.Linear(32, 32)))


def row_bias(world: World) -> None:
    """The bias is added once, its gradient is the single process's."""
    torch.manual_seed(0)
    plain = Biased().double()
    x = seeded(7, 5).requires_grad_()
    plain(x).square().sum().backward()
    group = tensor_group(world)
    low, high = split(7, world.size, world.rank)
    for sequence in (True, False):
        made = Biased().double()
        made.load_state_dict(plain.state_dict())
        down = tensor.Row(nn.Linear(8, 6).double(), Axis(group, sequence))
        sliced = slicing((6, 8), "N M", 1, world.size)
        a, b = sliced.bound(world.rank)
        down.weight = nn.Parameter(plain.down.weight.detach()[:, a:b].clone())
        down.bias = nn.Parameter(plain.down.bias.detach().clone())
        inner = torch.tanh(plain.up(x.detach())).detach()
        y = down(inner[:, a:b])
        expected = plain(x).detach()
        close(y.reshape(-1, 6), expected[low:high] if sequence else expected, "y")
        y.square().sum().backward()
        bias = down.bias.grad.clone()
        if sequence:
            dist.all_reduce(bias)
        close(bias, plain.down.bias.grad, "gradient of the bias")
        close(down.weight.grad, plain.down.weight.grad[:, a:b], "gradient of the weight")


class Padded(nn.Sequential):
    """A row of padding, on the second of two ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(11, 4, padding_idx=9), nn.Linear(4, 3))


def own_modules(world: World) -> dict[str, str]:
    """Modules split by tables of roles against themselves, whole; and what is said to wrong tables."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
    latent = importlib.import_module("tensor_latent")
    mlp = {"up": Role.COLUMN, "down": Role.ROW}
    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Tensor]] = {
        "latent": (lambda: latent_net(latent), latent.ROLES, seeded(2, 7, 32)),
        "biased": (Biased, mlp, seeded(4, 5)),
        "shared input": (Gated, {"[ab]": Role.COLUMN, "down": Role.ROW}, seeded(3, 5)),
        "a norm of heads": (
            NormedHeads,
            {"[qkv]": (Role.COLUMN, 2), "out": (Role.ROW, 2), "norm": Role.SPLIT},
            seeded(2, 5, 8),
        ),
        "padding": (Padded, {"0": Role.VOCAB}, torch.tensor([[1, 5, 9, 0, 5], [9, 2, 1, 5, 9]])),
        "vocabulary": (Words, {"words": Role.VOCAB, "head": Role.VOCAB}, torch.arange(13).view(1, 13) * 5 % 13),
    }
    for name, (make, roles, x) in cases.items():
        torch.manual_seed(0)
        plain = make().double()
        torch.manual_seed(world.rank)  # rank 0's values are everyone's
        own = make().double()
        if world.rank == 0:
            own.load_state_dict(plain.state_dict())
        model = interlace.parallelize(own, f"dp=1 tp={world.size}", roles)
        for step in range(2):
            plain.zero_grad()
            (expected := plain(x)).square().sum().backward()
            if step == 1 and len(x) > 1:  # in two micro-batches: what is owed is paid once, after the second
                with model.no_sync():
                    model(x[:1]).square().sum().backward()
                model(x[1:]).square().sum().backward()
            else:
                made = model(x)
                close(made.detach(), expected.detach(), f"{name}, step {step}")
                made.square().sum().backward()
            wrong = different(model.whole_gradients(), gradients(plain), 1e-6)
            assert not wrong, (name, wrong)
            norm = model.clip_grad_norm_(1e9)
            close(norm, torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]), f"norm of {name}")
            with torch.no_grad():
                for p in [*model.parameters(), *plain.parameters()]:
                    p.sub_(1e-3 * p.grad)
            for leaf in model.parameters():
                leaf.grad = None
        state = model.state_dict()
        assert not different(state.items(), dict(plain.state_dict()), 1e-9), name
        model.load_state_dict(plain.state_dict())
    return _said(world, latent, mlp)


def _said(world: World, latent: Any, mlp: dict[str, Any]) -> dict[str, str]:
    said: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            said[name] = "nothing"
        except InterlaceError as error:
            said[name] = f"{type(error).__name__}: {error}"

    def split_own(make: Callable[[], nn.Module], roles: dict[str, Any], mesh: str = f"tp={world.size}") -> Any:
        torch.manual_seed(0)
        return interlace.parallelize(make(), mesh, roles)

    def one_backward(model: Any, x: Tensor) -> None:
        model(x.float()).square().sum().backward()

    without = {name: role for name, role in latent.ROLES.items() if role is not Role.SPLIT}
    attempt("no split", lambda: one_backward(split_own(lambda: latent_net(latent), without), seeded(2, 7, 32)))
    attempt("kind", lambda: split_own(Words, {"norm": Role.COLUMN}))
    attempt("tied", lambda: split_own(Words, {"words": Role.VOCAB}))
    attempt("parameter", lambda: split_own(Biased, {"up.weight": Role.COLUMN}))
    attempt("nothing", lambda: split_own(Biased, {}))
    attempt("name", lambda: split_own(Biased, {"upp": Role.COLUMN}))
    attempt("dropout", lambda: split_own(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), {"0": Role.COLUMN}))
    for name, make in OWN_WAYS.items():
        attempt(name, lambda make=make: split_own(make, {"0": Role.VOCAB}))  # type: ignore[misc]
    attempt("no row", lambda: split_own(Gated, {"[ab]": Role.COLUMN})(seeded(3, 5).float()))
    attempt("no column", lambda: split_own(Gated, {"down": Role.ROW})(seeded(3, 5).float()))
    attempt("one of two", lambda: split_own(Gated, {"a": Role.COLUMN, "down": Role.ROW})(seeded(3, 5).float()))
    attempt("two columns", lambda: split_own(Biased, {"up": Role.COLUMN, "down": Role.COLUMN})(seeded(3, 5).float()))
    attempt("heads", lambda: split_own(Headed, {"q": (Role.COLUMN, 3), "out": (Role.ROW, 3)})(seeded(2, 5, 8).float()))
    attempt("whole to row", lambda: split_own(Gated, {"a": Role.ROW})(seeded(3, 5).float()))
    for name, way in {"leaves": lambda x: x, "leaves as a view": lambda x: {"logits": x.flatten()}}.items():
        attempt(name, lambda way=way: split_own(lambda: Ending(way), {"head": Role.COLUMN})(seeded(3, 5).float()))  # type: ignore[misc]
    for name, (way, kept) in FUSED.items():
        roles = {"fused": (Role.COLUMN, kept), "down": Role.ROW}
        attempt(name, lambda way=way, roles=roles: as_one_process(split_own, way, roles))  # type: ignore[misc]
    attempt(
        "fixed heads",
        lambda: split_own(FixedHeads, {"q": (Role.COLUMN, 2), "out": (Role.ROW, 2)})(seeded(3, 5).float()),
    )
    attempt("tokens", lambda: split_own(Words, VOCABULARY)(torch.tensor([[1, 13]])))
    attempt("a negative token", lambda: split_own(Words, VOCABULARY)(torch.tensor([[-1, 1]])))
    cut = {"[qkv]": (Role.COLUMN, 3), "out": Role.ROW}
    attempt("cuts", lambda: split_own(Headed, cut)(seeded(2, 5, 8).float()))
    three = {"0": Role.COLUMN, "1": Role.ROW}
    attempt("a square", lambda: split_own(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), three)(x56()))
    pair = {"up": Role.COLUMN, "down": Role.ROW}
    for name, between in MIXED.items():
        attempt(name, lambda between=between: split_own(lambda: Between(between), pair)(seeded(3, 5).float()))  # type: ignore[misc]
    attempt("a recomputed one", lambda: split_own(lambda: Between(recomputed), pair)(seeded(3, 5).float()))
    attempt("classes", lambda: split_own(Classes, {"head": Role.COLUMN})(seeded(3, 5).float()))
    heads = {"[qkv]": (Role.COLUMN, 2), "out": (Role.ROW, 2)}
    for name, way in SHARED.items():
        attempt(name, lambda way=way: split_own(lambda: Grouped(*way), heads)(seeded(2, 5, 8).float()))  # type: ignore[misc]
    attempt("another fault", lambda: other_fault(split_own(Gated, {"[ab]": Role.COLUMN, "down": Role.ROW})))
    return said


VOCABULARY = {"words": Role.VOCAB, "head": Role.VOCAB}
# How two products that are one are told apart, and how many rows the table says stay together.
FUSED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], int]] = {
    "one behind another": (lambda x: x.chunk(2, dim=-1), 1),
    "said to alternate": (lambda x: x.chunk(2, dim=-1), 2),
    "sliced": (lambda x: (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]), 2),
    "glu": (lambda x: (nn.functional.glu(x), torch.ones(())), 2),
    "alternating": (lambda x: (x[..., ::2], x[..., 1::2]), 2),
    "in pairs": (lambda x: tuple(x.unflatten(-1, (-1, 2)).unbind(-1)), 2),
    "cut by rows": (lambda x: (torch.cat([part[..., ::2] for part in x.split(2)]), x[..., 1::2]), 2),
}


class Fused(nn.Module):
    """A gate and what it lets pass from one product."""

    def __init__(self, way: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.fused, self.down, self.way = nn.Linear(5, 16), nn.Linear(8, 5), way

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.way(self.fused(x))
        return self.down(torch.tanh(gate) * up)


def as_one_process(split_own: Callable[..., Any], way: Callable[[Tensor], Any], roles: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, x = Fused(way).double(), seeded(3, 5)
    close(split_own(lambda: copy.deepcopy(plain), roles)(x).detach(), plain(x).detach(), "fused")


class FixedHeads(nn.Module):
    """Counts its heads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x).view(-1, 4, 2).tanh().flatten(1))


class Ending(nn.Module):
    """A product whose output leaves, in some way."""

    def __init__(self, way: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.head, self.way = nn.Linear(5, 7), way

    def forward(self, x: Tensor) -> Any:
        return self.way(self.head(x))


class ScaledWords(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3


def hooked() -> nn.Module:
    linear = nn.Linear(4, 6)
    linear.register_forward_hook(lambda module, args, output: output * 2)
    return linear


def watched() -> nn.Module:
    linear = nn.Linear(4, 6)
    linear.weight.register_hook(lambda gradient: gradient * 2)
    return linear


OWN_WAYS: dict[str, Callable[[], nn.Module]] = {
    "own forward": lambda: nn.Sequential(ScaledWords(6, 4)),
    "hooks": lambda: nn.Sequential(hooked()),
    "parametrized": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))),
    "by frequency": lambda: nn.Sequential(nn.Embedding(6, 4, scale_grad_by_freq=True)),
    "parameter hook": lambda: nn.Sequential(watched()),
    "max norm": lambda: nn.Sequential(nn.Embedding(6, 4, max_norm=1.0)),
}


def x56() -> Tensor:
    return seeded(5, 6).float()


def other_fault(model: Any) -> None:
    """What has nothing to do with roles is told as it is; and the watch goes when the module has run."""
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(seeded(3, 4).float())
    model(seeded(3, 5).float())
    assert "forward" not in vars(model.module)
    assert not any(inner._forward_pre_hooks for inner in model.module.modules() if isinstance(inner, nn.Linear))


class Between(nn.Module):
    """What stands between a column and a row."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(5, 8), nn.Linear(8, 5), between

    def forward(self, x: Tensor) -> Any:
        return self.between(self, x)


def recomputed(net: Between, x: Tensor) -> Tensor:
    """Checked by nobody, as a second backward pass would recompute it too early."""
    return checkpoint(lambda x: net.down(torch.tanh(net.up(x))), x, use_reentrant=False)  # type: ignore[no-any-return]


MIXED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a softmax": lambda net, x: net.down(net.up(x).softmax(dim=-1)),
    "a norm": lambda net, x: net.down(nn.functional.rms_norm(net.up(x), (net.down.weight.shape[1],))),
    "another order": lambda net, x: net.down(net.up(x).flip(-1)),
    "a sum so far": lambda net, x: net.down(net.up(x).cumsum(-1)),
    "a sum": lambda net, x: (net.down(net.up(x)), net.up(x).square().mean()),
    "a sum of weights": lambda net, x: net.down(net.up(x)).sum() + net.up.weight.square().sum(),
    "twice": lambda net, x: net.down(torch.tanh(net.up(net.down(torch.tanh(net.up(x)))))).sum(),
}


class Classes(nn.Module):
    """Its loss stands inside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), torch.tensor([1, 7, 0]))


class Grouped(nn.Module):
    """Heads of two features; several read the same keys and values, neighbours or not."""

    def __init__(self, heads: int, groups: int, neighbours: bool) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(8, heads * 2), nn.Linear(heads * 2, 8)
        self.k, self.v = nn.Linear(8, groups * 2, bias=False), nn.Linear(8, groups * 2)
        self.neighbours = neighbours

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        times = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(times, 1) if self.neighbours else t.repeat(1, times, 1, 1) for t in (k, v))
        return self.out(((q @ k.mT).softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


# Heads of queries, heads of keys, and whether neighbours read the same.
SHARED = {"two ranks, three keys": (6, 3, True), "shared by turns": (8, 4, False), "shared": (8, 4, True)}


class NormedHeads(Grouped):
    """A norm of every head, whose gain all of them share."""

    def __init__(self) -> None:
        super().__init__(4, 4, True)
        self.norm, self.end = nn.RMSNorm(2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q = self.norm(q)
        return self.end(self.out(((q @ k.mT).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)))


class Headed(nn.Module):
    """Three heads of three features."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (*(nn.Linear(8, 9) for _ in range(3)), nn.Linear(9, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 3)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.out(((q @ k.mT).softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Two columns that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * 1.0)
        return x + self.down(self.a(y) * self.b(y))


class Words(nn.Module):
    """A tied vocabulary of 13."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(13, 6), nn.LayerNorm(6), nn.Linear(6, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.words(tokens)))


def traced_words(world: World) -> None:
    """A module whose logits are gathered, compiled by its user, for sequences of several lengths."""
    torch.manual_seed(0)
    plain = Words().double()
    own = Words().double()
    own.load_state_dict(plain.state_dict())
    model = interlace.parallelize(own, f"tp={world.size}", {"words": Role.VOCAB, "head": Role.VOCAB})
    own.forward = torch.compile(own.forward)
    for length in (13, 7, 10):
        plain.zero_grad()
        tokens = (torch.arange(length) * 5 % 13).view(1, -1)
        (expected := plain(tokens)).square().sum().backward()
        made = model(tokens)
        close(made.detach(), expected.detach(), f"{length} words")
        made.square().sum().backward()
        wrong = different(model.whole_gradients(), gradients(plain), 1e-6)
        assert not wrong, (length, wrong)
        for leaf in model.parameters():
            leaf.grad = None


def sums_of_shared_columns(world: World) -> int:
    """All-reduces in the backward of a module whose two columns read one tensor."""
    group_meter = interlace.parallelize(Gated(), f"tp={world.size}", {"[ab]": Role.COLUMN, "down": Role.ROW})
    assert group_meter.tensor is not None
    x = seeded(3, 5).float().requires_grad_()
    made = group_meter(x)
    meter = group_meter.tensor.meter
    meter.record = True
    meter.cut()
    made.sum().backward()
    return sum(name == "reduce" for _, name, *_ in meter.cut().transfers) // 2
