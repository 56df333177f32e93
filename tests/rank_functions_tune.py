"""What ranks of the tests of `kernels.tune` run: candidates that are right, wrong in one way each, or refuse."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

import dataclasses
import time
from typing import Any

import torch

from interlace import spec
from interlace.collectives import Group, make_groups
from interlace.collectives.autograd import start_gather, start_reduce, start_scatter
from interlace.config import ModelConfig
from interlace.errors import ConfigError, InterlaceError
from interlace.kernels import candidate, measure, tune
from interlace.kernels.candidate import OPS, Candidate, Options, Problem
from interlace.kernels.table import DTYPES
from interlace.mesh import Mesh
from interlace.models.decoder import Decoder, initialise
from interlace.parallel.part import holding
from interlace.parallel.tensor import Axis, split_decoder
from interlace.train import session
from interlace.world import World


def gathered_product(x, weights, biases, group, count, out, gathered=None, options=Options()):  # noqa: B008
    whole = start_gather(x, group, count).wait()
    if gathered is not None:
        gathered.copy_(whole)
    for y, weight, bias in zip(out, weights, biases, strict=True):
        y.copy_(torch.nn.functional.linear(whole, weight, bias))


def scattered_product(x, weight, bias, group, out, options=Options()):  # noqa: B008
    made = start_scatter(x @ weight.t(), group).wait()
    out.copy_(made if bias is None else made + bias)


def reduced_product(x, weight, bias, group, out, options=Options()):  # noqa: B008
    made = start_reduce(x @ weight.t(), group).wait()
    out.copy_(made if bias is None else made + bias)


RIGHT = dict(zip(OPS, (gathered_product, scattered_product, reduced_product), strict=True))


def ways(op: str, broken: str = "") -> dict[str, Candidate]:
    """ "plain" sleeps, "quick" does not; each other one is wrong in its own way."""
    right = RIGHT[op]
    kept: list[torch.Tensor] = []

    def slow(*args: Any, **named: Any) -> None:
        time.sleep(0.01)
        right(*args, **named)
        if broken == "plain":
            result(args).mul_(1.01)

    def result(args: tuple[Any, ...]) -> torch.Tensor:
        return args[5][0] if op == "all_gather_matmul" else args[4]

    def off(*args: Any, **named: Any) -> None:
        """The last row of rank 1 is another's."""
        right(*args, **named)
        group: Group = args[3]
        if group.rank == 1:
            result(args)[-1:] = 1.0

    def short(*args: Any, **named: Any) -> None:
        """One element is not written."""
        out, spare = result(args), result(args).clone()
        right(*args[:5], [spare], *args[6:]) if op == "all_gather_matmul" else right(*args[:4], spare)
        out.view(-1)[1:] = spare.view(-1)[1:]

    def stale(*args: Any, **named: Any) -> None:
        """What the first call gave."""
        if not kept:
            right(*args, **named)
            kept.append(result(args).clone())
        result(args).copy_(kept[0])
        if op == "all_gather_matmul" and args[6] is not None:
            args[6].copy_(start_gather(args[0], args[3], args[4]).wait())

    def fails(*args: Any, **named: Any) -> None:
        if args[3].rank == 1:
            raise RuntimeError("no such kernel\nand more")

    made = {"plain": slow, "quick": right, "off": off, "short": short, "stale": stale, "fails": fails, "shy": right}
    reasons = {"shy": "it wants 7 ranks"}
    return {
        name: Candidate(name, op, name != "plain", lambda problem, device, name=name: reasons.get(name), run)  # type: ignore[misc]
        for name, run in made.items()
    }


def measured(world: World, broken: str = "", **given: Any) -> dict[str, Any]:
    """`tune` of one problem."""
    group = make_groups(Mesh((("tp", world.size),)), world.rank, world.device, world.timeout)["tp"]
    problem = Problem(
        given["op"], given["M"], given["N"], given["K"], DTYPES[given["dtype"]], world.size, given["bias"]
    )
    tune.candidates = lambda op: ways(op, broken)
    try:
        found = tune.tune(problem, group, rounds=3)
    except InterlaceError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "seconds": found.seconds,
        "best": found.best,
        "wrong": dict(found.wrong),
        "refused": dict(found.refused),
        "errors": dict(found.errors),
        "rounds": {name: len(values) for name, values in found.samples.items()},
        "lines": list(found.lines()),
    }


def references(world: World) -> list[float]:
    """How far `Operands.expected` is from a product of one process, fp64, for every op and odd sizes."""
    group = make_groups(Mesh((("tp", world.size),)), world.rank, world.device, world.timeout)["tp"]
    found = []
    for op in OPS:
        problem = Problem(op, 7, 5, 3, torch.float32, world.size, True)
        given = measure.Operands.random(problem, group, seed=3)
        every = [(x, weight, bias) for x, weight, bias in measure.everyone((given.x, given.weight, given.bias), group)]  # type: ignore[misc]
        if op == "all_gather_matmul":
            whole = torch.cat([x for x, _, _ in every]).double() @ given.weight.double().t()
        else:
            whole = sum(x.double() @ weight.double().t() for x, weight, _ in every)
        whole = whole + given.bias.double()
        if op == "matmul_reduce_scatter":
            sizes = [len(out) for out in measure.everyone(given.out, group)]  # type: ignore[arg-type]
            whole = whole.split(sizes)[group.rank]
        got, gathered = given.expected()
        found.append((got.double() - whole).abs().max().item())
        if gathered is not None:
            found.append(float(not torch.equal(gathered, torch.cat([x for x, _, _ in every]))))
    return found


UNEVEN = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 3, "num_kv_heads": 3, "head_dim": 2,
          "ffn_size": 7}  # fmt: skip


def policies(world: World) -> dict[str, Any]:
    """A layer of uneven slices under every policy: the candidates that ran, and how far results are from "off"."""
    groups = make_groups(Mesh((("tp", world.size),)), world.rank, world.device, world.timeout)
    ran: list[str] = []
    for op in OPS:
        for name, way in candidate.candidates(op).items():

            def run(*args: Any, name: str = name, run: Any = way.run, **named: Any) -> None:
                ran.append(name)
                run(*args, **named)

            candidate.CANDIDATES[op][name] = dataclasses.replace(way, run=run)
    cfg, found = ModelConfig(**UNEVEN), {}
    for sequence in (True, False):
        results = {}
        for policy in ("off", "plain", "auto", "fused"):
            decoder = Decoder(cfg)
            initialise(decoder, cfg, seed=0)
            axis = Axis(groups["tp"], sequence, policy)
            split_decoder(decoder, spec.parameters(cfg), axis, holding(groups, "tp", world.timeout))
            context = decoder.context((1, 5), world.device)
            whole = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
            first, last = axis.rows(5) if sequence else (0, 5)
            x = whole[:, first:last].requires_grad_()
            ran.clear()
            y = decoder.blocks[0](x, context)
            y.square().sum().backward()
            weights = [p.grad for p in decoder.blocks[0].parameters()]
            results[policy] = [y.detach(), x.grad, *weights]
            pairs = zip(results[policy], results["off"], strict=True)
            off = max(measure.difference(got, wanted) for got, wanted in pairs)
            found[f"{policy}{'' if sequence else ' whole'}"] = {"ran": list(ran), "off": off}
    return found


def unlike_tables(world: World) -> str:
    """What ranks say whose tables differ."""
    groups = make_groups(Mesh((("tp", world.size),)), world.rank, world.device, world.timeout)
    same = session._one_table(groups)
    tune.identity = lambda device: f"cpu {world.rank // 2}"
    try:
        session._one_table(groups)
    except ConfigError as error:
        return f"{same}; {error}"
    return same
