"""Functions with transfers as operators, so that a compiled block is one graph around them.

`Operator(...)(group, traced, *arguments)` equals `run(group, *arguments)`.  Where the compiler traces, it is a call of
an operator `interlace::NAME` instead, which stays in the graph as one opaque call: the compiler fuses what stands
between two of them, and the host calls a block once forward and once backward.  Without that every transfer ends a
graph, and each piece costs the host 150 to 250 us (docs/notes/0018-one-graph-per-block.md).

Graphs hold numbers and strings, no objects: a group stands there as its `key`.  Ranks must run their collectives in one
order, and operators in a graph keep only the order that data gives them.  So any two of one graph must hang on each
other, as those of a dense block do in both directions (each reads what the one before it has made), or stay out of it.

An operator has no gradient of its own.  What the tracer meets is an `entry`, whose kernel calls an autograd.Function,
the one that runs without a compiler too; its forward and backward call operators, and those alone end in the graph.

PyTorch keeps compiled graphs on disk and finds them again by what stands in them, which of an operator is its name.  So
the name tells the text that the operator is written in: with another version's, old gradients would come back.

Tried and dropped: `torch.library.custom_op`, whose call costs the host 46 us where one defined here costs 7 to 11
(torch 2.13, CPU, six arguments, two of them lists of three).
"""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch

from interlace import __version__
from interlace.collectives.groups import Group, by_key

LIBRARY = torch.library.Library("interlace", "FRAGMENT")


class Operator:
    """`run` as itself, or traced.

    schema: of PyTorch, without the group: "NAME(Tensor x, ...) -> Tensor".  run: (group, *arguments); its results share
    no memory with its arguments nor with each other.  like: the same with results that nobody fills; it is what the
    tracer believes of shapes, types and order in memory.
    """

    def __init__(self, schema: str, run: Callable[..., Any], like: Callable[..., Any]) -> None:
        self.run = run
        name, rest = _named(schema, run)
        LIBRARY.define(f"{name}(str group, {rest}")
        LIBRARY.impl(name, lambda key, *arguments: run(by_key(key), *arguments), "CompositeExplicitAutograd")
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(
            f"interlace::{name}", lambda key, *arguments: like(by_key(key), *arguments), lib=LIBRARY
        )
        self.operator = getattr(torch.ops.interlace, name).default

    def __call__(self, group: Group, traced: bool, *arguments: Any) -> Any:
        return self.operator(group.key, *arguments) if traced else self.run(group, *arguments)


def entry(schema: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What the tracer is given: an operator, (key of the group, *arguments), that is nothing but its `kernel`."""
    name, rest = _named(schema, kernel)
    LIBRARY.define(f"{name}(str group, {rest}")
    LIBRARY.impl(name, lambda key, *arguments: kernel(by_key(key), *arguments), "CompositeImplicitAutograd")
    made: Callable[..., Any] = getattr(torch.ops.interlace, name).default
    return made


def _named(schema: str, function: Callable[..., Any]) -> tuple[str, str]:
    """The name in a schema, with a sum over the text of the function's module, and what follows the bracket."""
    name, _, rest = schema.partition("(")
    try:
        text = inspect.getsource(sys.modules[function.__module__])
    except (OSError, TypeError):  # installed without sources
        text = __version__
    return f"{name}_{zlib.crc32(text.encode()):08x}", rest
