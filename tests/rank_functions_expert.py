"""What the ranks of the tests of the expert axis run: rows sent to experts and back, slices of experts, faults."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rank_functions_train as train
from interlace.collectives import Groups, Meter, make_groups, sum_scalars
from interlace.collectives.autograd import Exchange
from interlace.config import ModelConfig, ParallelPlan, loads
from interlace.mesh import Mesh
from interlace.models.moe import experts, mix
from interlace.parallel.expert import ExpertAxis, SplitDispatch
from interlace.parallel.part import Part
from interlace.plan import exchange
from interlace.plan import expert as plan
from interlace.plan.tensor import slices
from interlace.spec import Parameter, Role
from interlace.train import session as sessions
from interlace.train import verify
from interlace.world import World

CPU = torch.device("cpu")


def groups_of(world: World, text: str) -> Groups:
    return make_groups(Mesh.parse(text), world.rank, CPU, 60.0, Meter(world.waiting))


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen(kind: str, count: int, k: int, num_experts: int, seed: int) -> Tensor:
    """The choices of `count` tokens: [N k]."""
    if kind == "one":
        return torch.full((count, 1), num_experts - 1)
    among = {"any": num_experts, "first two": 2, "dropped": num_experts}[kind]
    scores = torch.rand(count, among, generator=torch.Generator().manual_seed(seed))
    found = scores.argsort(dim=1)[:, :k]
    return found.masked_fill(scores[:, :k] < 0.4, num_experts) if kind == "dropped" else found


def by_hand(x: Tensor, weights: Tensor, chosen_Nk: Tensor, matrices: list[Tensor]) -> Tensor:
    """Token by token, choice by choice, those of no expert left out."""
    made = []
    for row, weight, choice in zip(x, weights, chosen_Nk, strict=True):
        total = row * 0.0
        for w, e in zip(weight, choice.tolist(), strict=True):
            if e < len(matrices[0]):
                gate, up, down = (matrix[e] for matrix in matrices)
                total = total + w * (down @ (nn.functional.silu(gate @ row) * (up @ row)))
        made.append(total)
    return torch.stack(made) if made else x + 0.0 * weights.sum()


def dispatch(world: World, cases: list[dict[str, Any]], fused: bool = False) -> list[dict[str, Any]]:
    """Output and gradients of every case beside those of all experts in one place; returns what was sent and when.

    fused: by the fused exchange, in fp32.
    """
    found = []
    dtype, limit = (torch.float32, 1e-5) if fused else (torch.float64, 1e-9)

    def compare(made: Tensor | None, expected: Tensor | None) -> None:
        assert made is not None
        assert expected is not None
        most = expected.abs().max().item() if fused and expected.numel() else 1.0
        torch.testing.assert_close(made.double(), expected, rtol=0, atol=limit * most)

    group = groups_of(world, f"dp={world.size} ep={world.size}")["ep"]
    for number, case in enumerate(cases):
        X, k, D, F = case["experts"], case["k"], 6, 5
        counts = [0 if rank == case.get("idle") else case["tokens"] + rank for rank in range(world.size)]
        shapes = [(X, F, D), (X, F, D), (X, D, F)]
        matrices = [seeded(*shape, seed=number + at).requires_grad_() for at, shape in enumerate(shapes)]
        everyone, loss = [], torch.zeros((), dtype=torch.float64)
        for rank, count in enumerate(counts):
            x = seeded(count, D, seed=100 + rank).requires_grad_()
            choice = chosen(case["kind"], count, k, X, 50 + rank)
            weights = seeded(count, choice.shape[1], seed=200 + rank).requires_grad_()
            y = by_hand(x, weights, choice, matrices)
            loss = loss + (y * seeded(count, D, seed=300 + rank)).sum()
            everyone.append((x, weights, choice, y))
        loss.backward()
        start, stop = plan.held(X, world.size, group.rank)
        own = [matrix.detach()[start:stop].to(dtype, copy=True).requires_grad_() for matrix in matrices]
        x, weights, choice, expected = everyone[world.rank]
        mine = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in (x, weights)]
        halves, room = case.get("halves", False), case.get("room")
        axis = ExpertAxis(group, experts, halves, "asked" if fused else "no", room, max(counts))
        module = SplitDispatch(axis, X, axis.fused(X))
        assert (module.fused is not None) == fused
        log: list[str] = []
        group.meter.reset_counts()
        saved: list[Tensor] = []
        with watched(log), nullcontext() if case.get("recompute") else keeping(saved):
            given = (mine[0], mine[1], choice, *own)

            def run(*given: Tensor, module: SplitDispatch = module, log: list[str] = log) -> Tensor:
                mixed = module(*given)
                log.append("meanwhile")
                made: Tensor = mixed()
                return made

            y = checkpoint(run, *given, use_reentrant=False) if case.get("recompute") else run(*given)
            (y * seeded(len(x), D, seed=300 + world.rank)).sum().backward()
        compare(y, expected)
        if fused and not case.get("recompute"):
            most, block = plan.held(X, world.size, 0)[1], 16  # of interpreted kernels
            slots = exchange.slots(max(counts) * choice.shape[1], world.size, most, X, block, room)
            if case["kind"] == "one":  # more come than there is room for
                assert slots < sum(counts)
                slots = -(-sum(counts) // block) * block
            kept = sum(tensor.nbytes for tensor in saved if len(tensor) == slots)
            assert kept == exchange.kept(slots, D, F, 4)
        for theirs, tensor in zip((x, weights), mine, strict=True):
            compare(tensor.grad, theirs.grad)
        for matrix, tensor in zip(matrices, own, strict=True):
            assert matrix.grad is not None
            assert tensor.grad is not None
            compare(tensor.grad, matrix.grad[start:stop])
            idle = matrix.grad[start:stop].flatten(1).abs().sum(dim=1) == 0
            assert not tensor.grad[idle].any(), "an idle expert's gradient is exactly zero"
        found.append({"sent": group.meter.sent["all_to_all", "ep"], "log": log})
    return found


def keeping(saved: list[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Writes down what autograd saves."""

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class watched:
    """Writes down when exchanges start and are waited for."""

    def __init__(self, log: list[str]) -> None:
        start, finish = Exchange.start, Exchange.finish

        def started(self: Exchange, x: Tensor, back: bool) -> None:
            log.append(f"{self.name} {'back ' if back else ''}starts")
            start(self, x, back)

        def finished(self: Exchange) -> Tensor:
            log.append(f"{self.name} is waited for")
            return finish(self)

        self.patches = [
            mock.patch.object(Exchange, "start", started),
            mock.patch.object(Exchange, "finish", finished),
        ]

    def __enter__(self) -> None:
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()


def bf16(world: World, num_experts: int) -> None:
    """Rows travel in bf16, contributions are weighted and added in fp32: the bits of one process."""
    group = groups_of(world, f"dp={world.size} ep={world.size}")["ep"]
    shapes = [(num_experts, 8, 16), (num_experts, 8, 16), (num_experts, 16, 8)]
    matrices = [seeded(*shape, seed=at).bfloat16() for at, shape in enumerate(shapes)]
    x = seeded(9, 16, seed=world.rank).bfloat16()
    choice = chosen("any", 9, 3, num_experts, world.rank)
    weights = seeded(9, 3, seed=7).float()
    own = [matrix[slice(*plan.held(num_experts, world.size, group.rank))] for matrix in matrices]
    made = SplitDispatch(ExpertAxis(group, experts), num_experts)(x, weights, choice, *own)()
    assert made.dtype == torch.bfloat16
    wide = mix(x.double(), weights.double(), choice, *[matrix.double() for matrix in matrices])
    assert (made.double() - wide).abs().max() < 0.02 * wide.abs().max()


def parts(world: World, num_experts: int, inner: int) -> None:
    """Slices over ep and tp: what each rank reads, where its elements count, and the whole from all of them."""
    groups = groups_of(world, "tp=2 dp=2 ep=2")
    for shape, dims in (((num_experts, inner, 3), "X F D"), ((num_experts, 3, inner), "X D F")):
        parameter = Parameter("blocks.0.moe.up.weight", shape, Role.EXPERT, dims, "blocks.0", True, "normal", 1.0)
        value = seeded(*shape, seed=1)
        for ways in (1, 2):
            group = groups["tp"] if ways == 2 else make_groups(Mesh.parse("dp=4"), world.rank, CPU, 60.0).by_axis["dp"]
            if ways == 1:
                group = type(group)("tp", (world.rank,), 0, CPU, group.meter)
            part = Part(slices(parameter, ways), group, experts=groups["ep"])
            assert part.dims == {("X F D", 1): "X/ep F D", ("X F D", 2): "X/ep F/tp D", ("X D F", 1): "X/ep D F",
                                 ("X D F", 2): "X/ep D F/tp"}[dims, ways]  # fmt: skip
            local = part.cut(nn.Parameter(value)).detach()
            flat = value.reshape(-1)
            read = part.reader(lambda start, stop, flat=flat: flat[start:stop])
            assert torch.equal(read(0, local.numel()), local.reshape(-1))
            middle = local.numel() // 2
            assert torch.equal(read(1, middle), local.reshape(-1)[1:middle])
            assert local.numel() <= part.largest
            counted = torch.cat([piece.reshape(-1) for piece in _slices(value, part)])
            assert torch.equal(counted[part.begin : part.begin + local.numel()], local.reshape(-1))
            assert torch.equal(part.whole(local), value)


def _slices(value: Tensor, part: Part) -> list[Tensor]:
    """The slices of the tensor axis, one after another."""
    dim, bounds = part.slicing.dim, part.slicing.bounds
    return [value.narrow(dim, low, high - low) for low, high in itertools.pairwise(bounds)]


def norms_of_squares(world: World, configs: list[str]) -> list[float]:
    """Gradients zero but for two experts, whose squares sum to 20 and 100: the norm of the whole."""
    found = []
    for config in configs:
        model = sessions.build(world, loads(config)).model
        for leaf in model.leaves():
            leaf.grad = torch.zeros_like(leaf)
        for place in model.placements(owned=False):
            if place.name == "blocks.1.moe.up.weight":
                each = place.shape[1] * place.shape[2]
                for expert, square in ((0, 20.0), (3, 100.0)):
                    at = expert * each + 5
                    if place.start <= at < place.stop:
                        assert place.leaf.grad is not None
                        place.leaf.grad[place.leaf_start + at - place.start] = square**0.5
        found.append(sum_scalars(model.square_sum(), model.axes)[0].sqrt().item())
    return found


# --- faults --------------------------------------------------------------------------------------------------------


def under_a_fused_plan(world: World, **argument: Any) -> dict[str, Any]:
    """`verify.under_plan`, of a plan whose rows went by the fused exchange."""
    found = verify.under_plan(world, **argument)
    assert found["fused"]
    return found


def notes(world: World, config: str) -> tuple[list[str], float | None]:
    """What a run says before its first step, and the room that its exchange has."""
    session = sessions.build(world, loads(config))
    found = [each.fused for each in session.model.module.modules() if isinstance(each, SplitDispatch)]
    return session.notes, getattr(found[0], "room", None)


def under_a_plan_on_gpus(world: World, **argument: Any) -> dict[str, Any]:
    """The same, of ranks that take themselves for GPUs and their numbers for bf16, without being asked to fuse."""

    def taken(cfg: ModelConfig, plan: ParallelPlan, itemsize: int, device: str) -> bool:
        assert (itemsize, device) == (4, "cpu")
        return real(cfg, plan, 2, "cuda")

    real = exchange.taken
    with mock.patch.object(exchange, "taken", taken):
        return under_a_fused_plan(world, **argument)


def under_a_plan_on_cpus(world: World, **argument: Any) -> dict[str, Any]:
    """The same, which fuses nothing by itself, and says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = verify.under_plan(world, **argument)
    assert not found["fused"]
    return found


def under_a_plan_that_falls_back(world: World, **argument: Any) -> dict[str, Any]:
    """The same, where the fused exchange does not run, which is said in one sentence."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = verify.under_plan(world, **argument)
    assert not found["fused"]
    expected = "rows to experts along ep: plain all-to-all, since its kernels run on GPUs, or with TRITON_INTERPRET=1"
    assert [str(each.message).startswith(expected) for each in said] == [True], [str(each.message) for each in said]
    return found


def verify_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return train.verify_all(world, jobs)
