"""What ranks of the tests of `kernels.tune` run: candidates that are right, wrong in one way each, or refuse."""

from __future__ import annotations

import time
from typing import Any

import torch

from interlace.collectives import Group, make_groups
from interlace.collectives.autograd import start_gather, start_reduce, start_scatter
from interlace.errors import InterlaceError
from interlace.kernels import measure, tune
from interlace.kernels.candidate import OPS, Candidate, Options, Problem
from interlace.kernels.table import DTYPES
from interlace.mesh import Mesh
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
