"""What rank processes run for the tests of the exchange of rows with experts; on CPUs kernels are interpreted."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

import torch.distributed as dist

from interlace import errors
from interlace.collectives import Group, Meter
from interlace.kernels import workspace
from interlace.kernels.expert_exchange import ExpertExchange, Steps, default_tuning
from interlace.kernels.expert_plain import plain
from interlace.launch import World
from interlace.plan.exchange import slots

Tensors = tuple[torch.Tensor, ...]
NAMES = ("y", "x", "weights", "gate", "up", "down")


class Layer:
    """A mixture over a group, numbers from seeds, so that every rank knows everybody's."""

    def __init__(self, world: World, owners: list[int], k: int, D: int, F: int, dtype: torch.dtype, **options: Any):
        stream = torch.cuda.Stream() if world.device.type == "cuda" else None
        ranks = tuple(range(world.size))
        group = dist.group.WORLD
        self.group = Group("ep", ranks, world.rank, world.device, Meter(), group, stream)
        self.world, self.owners, self.k, self.D, self.dtype, self.X = world, owners, k, D, dtype, sum(owners)
        self.exchange = ExpertExchange(self.group, owners, **options)
        made = torch.Generator().manual_seed(5)
        shapes = ((self.X, F, D), (self.X, F, D), (self.X, D, F))
        self.factors = [torch.randn(shape, generator=made) / shape[2] ** 0.5 for shape in shapes]
        first = sum(owners[: world.rank])
        self.mine = slice(first, first + owners[world.rank])

    def given(self, rank: int, tokens: int, seed: int, most: int | None = None) -> Tensors:
        """x, weights, chosen experts (of the first `most`), dy of a rank."""
        made = torch.Generator().manual_seed(1000 * seed + rank)
        x, dy = (torch.randn(tokens, self.D, generator=made) for _ in range(2))
        weights = torch.rand(tokens, self.k, generator=made)
        chosen = torch.rand(tokens, most or self.X, generator=made).argsort(dim=1)[:, : self.k].contiguous()
        if seed % 2:
            chosen[::3, 0] = self.X  # dropped
        return x, weights, chosen, dy

    def leaves(self, x: torch.Tensor, weights: torch.Tensor, experts: list[torch.Tensor]) -> list[torch.Tensor]:
        device = self.world.device
        made = [x.to(device, self.dtype), weights.to(device), *(each.to(device, self.dtype) for each in experts)]
        return [each.clone().requires_grad_() for each in made]

    def start(self, given: Tensors, fused: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """y, with its graph, and the leaves."""
        x, weights, chosen, _ = given
        leaves = self.leaves(x, weights, [each[self.mine] for each in self.factors])
        chosen = chosen.to(self.world.device)
        if fused:
            assert self.exchange.is_fused
            return self.exchange(*leaves[:2], chosen, *leaves[2:]), leaves
        return plain(*leaves[:2], chosen, *leaves[2:], self.group, self.owners), leaves

    def end(self, given: Tensors, y: torch.Tensor, leaves: list[torch.Tensor]) -> Tensors:
        """y and all gradients."""
        grads = torch.autograd.grad(y, leaves, given[3].to(y))
        return y.detach(), *grads

    def run(self, given: Tensors, fused: bool = True) -> Tensors:
        return self.end(given, *self.start(given, fused))

    def alone(self, everyone: list[Tensors]) -> Tensors:
        """The same of this rank, made by one process out of everybody's tokens."""
        x, weights, chosen, dy = (torch.cat(parts) for parts in zip(*everyone, strict=True))
        leaves = [each.detach().clone().requires_grad_() for each in (x, weights, *self.factors)]
        x, weights, gate, up, down = leaves
        h = torch.nn.functional.silu(torch.einsum("nd,efd->nef", x, gate)) * torch.einsum("nd,efd->nef", x, up)
        made = torch.einsum("nef,edf->ned", h, down)
        made = torch.cat([made, made.new_zeros(len(made), 1, self.D)], dim=1).gather(
            1, chosen[..., None].expand(-1, -1, self.D)
        )
        y = (made * weights[..., None]).sum(dim=1)
        dx, dweights, *rest = torch.autograd.grad(y, leaves, dy)
        first = sum(len(each[0]) for each in everyone[: self.world.rank])
        own = slice(first, first + len(everyone[self.world.rank][0]))
        return y.detach()[own], dx[own], dweights[own], *(each[self.mine] for each in rest)


def compare(found: Tensors, expected: Tensors, limit: float, what: str) -> None:
    for name, ours, theirs in zip(NAMES, found, expected, strict=True):
        assert ours.shape == theirs.shape, (what, name)
        if theirs.numel():
            ours, theirs = ours.detach().float().cpu(), theirs.detach().float().cpu()
            difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
            assert difference <= limit * largest + (0.0 if largest else 1e-12), (what, name, difference, largest)


def against_one_process(world: World, owners: list[int], k: int, D: int, F: int, counts: list[list[int]]) -> list[str]:
    """Calls with changing numbers of tokens (counts[call][rank]); the last rank comes late to every one."""
    layer = Layer(world, owners, k, D, F, torch.float32, most_tokens=max(map(max, counts)))
    done = []
    for call, tokens in enumerate(counts):
        few = owners[0] if call == 1 and owners[0] >= k else None  # then all rows go to one rank
        everyone = [layer.given(rank, tokens[rank], call, few) for rank in range(world.size)]
        own = everyone[world.rank]
        if world.rank == world.size - 1:
            time.sleep(0.05)
        found = layer.run(own)
        compare(found, layer.alone(everyone), 1e-5, f"call {call} against one process")
        compare(layer.run(own, fused=False), layer.alone(everyone), 1e-5, f"plain, call {call}")
        if call == 0:
            for name, first, second in zip(NAMES, found, layer.run(own), strict=True):
                assert torch.equal(first, second), f"{name} of a repeated call"
        if call == len(counts) - 1:
            layer.exchange.tuning = replace(default_tuning(torch.float32, D), overlap=False)
            for name, first, second in zip(NAMES, found, layer.run(own), strict=True):
                assert torch.equal(first, second), f"{name} with rows that travel by themselves"
            layer.exchange.tuning = None
        done.append(f"{call}")
    with torch.no_grad():
        x, weights, chosen, _ = everyone[world.rank]
        experts = [each[layer.mine] for each in layer.factors]
        given = layer.leaves(x, weights, experts)
        y = layer.exchange(*given[:2], chosen.to(world.device), *given[2:])
    assert torch.equal(y, found[0])
    workspace.check(layer.group)
    workspace.release(layer.group)
    return done


def half_precision(world: World, D: int, F: int, tokens: int, owners: list[int], k: int) -> bool:
    """fp16 and bf16 beside the composition in fp32 of the same rounded numbers."""
    for dtype, limit in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        layer = Layer(world, owners, k, D, F, dtype)
        wide = Layer(world, owners, k, D, F, torch.float32)
        wide.factors = [each.to(dtype).float() for each in layer.factors]
        x, weights, chosen, dy = layer.given(world.rank, tokens, 3)
        given = x.to(dtype).float(), weights, chosen, dy.to(dtype).float()
        compare(layer.run(given), wide.run(given, fused=False), limit, str(dtype))
        workspace.release(layer.group)
    return True


def interleaved(world: World) -> bool:
    """Two groups, and two layers of each: forward, forward, backward, backward, in turn."""
    layers = [Layer(world, [1, 2, 1][: world.size], 2, 9, 5, torch.float32, most_tokens=4) for _ in range(2)]
    begun = []
    for number in range(4):
        layer = layers[number % 2]
        given = layer.given(world.rank, 4 - (world.rank + number) % 3, 10 + number)
        begun.append((layer, given, layer.start(given, True)))
    for number, (layer, given, (y, leaves)) in enumerate(reversed(begun)):
        compare(layer.end(given, y, leaves), layer.run(given, fused=False), 1e-5, f"interleaved {number}")
    for layer in layers:
        workspace.release(layer.group)
    return True


def beyond_its_room(world: World, owners: list[int], calls: list[tuple[str, list[int]]], block: int) -> list[bool]:
    """Calls that may want more slots than there are at first, backward only after the last forward: values of one
    process, the bits of an exchange that has room for all, and no more slots kept than asked for.  Which went again."""
    k, D, F, room = 1, 6, 5, 1.0
    most = max(max(counts) for _, counts in calls)
    tuning = replace(default_tuning(torch.float32, D), block=block, piece=block // 2)
    given: dict[str, Any] = {"most_tokens": most, "tuning": replace(tuning, rows=min(tuning.rows, block // 2))}
    layer = Layer(world, owners, k, D, F, torch.float32, room=room, **given)
    whole = Layer(world, owners, k, D, F, torch.float32, **given)
    first = slots(most * k, world.size, max(owners), sum(owners), block, room)
    begun, again, went = [], [], []
    for call, (kind, counts) in enumerate(calls):
        everyone = [layer.given(rank, counts[rank], 2 * call + (kind == "any")) for rank in range(world.size)]
        for _, _, chosen, _ in everyone:
            if kind != "any":
                chosen[:] = {"first": 0, "last": layer.X - 1}[kind]
        rows = torch.cat([chosen for _, _, chosen, _ in everyone]).flatten().bincount(minlength=layer.X)[: layer.X]
        wanted = max(sum(-(-count // block) * block for count in part.tolist()) for part in rows.split(owners))
        saved: list[torch.Tensor] = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda each, to=saved: to.append(each) or each, lambda each: each),
            mock.patch.object(Steps, "route", autospec=True, side_effect=Steps.route) as routed,
        ):
            made = layer.start(everyone[world.rank], True)
        again.append(wanted > first)
        went.append(routed.call_count == 2)
        kept = [len(each) for each in saved[:3]]
        assert kept == [max(wanted, first)] * 3, (call, kept, wanted, first)
        begun.append((everyone, made))
    for call, (everyone, made) in reversed(list(enumerate(begun))):
        own = everyone[world.rank]
        ours = layer.end(own, *made)
        compare(ours, layer.alone(everyone), 1e-5, f"call {call} against one process")
        for name, one, other in zip(NAMES, ours, whole.run(own), strict=True):
            assert torch.equal(one, other), f"{name} of call {call}, with room for all"
    for each in (layer, whole):
        workspace.check(each.group)
        workspace.release(each.group)
    assert went == again
    return went


def room_in_a_graph(world: World) -> bool:
    """The host looks, which a graph cannot have."""
    layer = Layer(world, [2, 2], 1, 16, 16, torch.bfloat16, room=1.0)
    given = layer.given(world.rank, 1000, 2)
    leaves = layer.leaves(*given[:2], [each[layer.mine] for each in layer.factors])
    chosen, said = given[2].to(world.device), ""
    with torch.no_grad():
        layer.exchange(*leaves[:2], chosen, *leaves[2:])
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                layer.exchange(*leaves[:2], chosen, *leaves[2:])
        except errors.ConfigError as error:
            said = str(error)
    workspace.release(layer.group)
    return said.startswith("a graph of an exchange with room for 1.0 times the even rows")


def graphs(world: World, D: int, F: int, owners: list[int], k: int, tokens: int) -> bool:
    """Forward and backward captured in a CUDA graph, replayed with other tokens and experts each time."""
    layer = Layer(world, owners, k, D, F, torch.float32)
    given = [layer.given(world.rank, tokens, seed, owners[0] if seed == 2 else None) for seed in range(4)]
    x, weights, chosen, dy = (each.to(world.device) for each in given[0])
    leaves = layer.leaves(x, weights, [each[layer.mine] for each in layer.factors])

    def step() -> Tensors:
        y = layer.exchange(*leaves[:2], chosen, *leaves[2:])
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = step()
    for number, each in enumerate(given[1:]):
        with torch.no_grad():
            for into, of in zip((leaves[0], leaves[1], chosen, dy), each, strict=True):
                into.copy_(of)
        graph.replay()
        compare(made, layer.run(each, fused=False), 1e-5, f"replay {number}")
    workspace.check(layer.group)
    del graph
    workspace.release(layer.group)
    return True
