"""What a table of roles gets wrong between two products, told by the names of both instead of by shapes.

A COLUMN product makes a slice of its features, and a ROW product takes one.  So a table that names one of two products
that belong together, or cuts them in different places, ends where a tensor of one size meets another.  Where two are
cut differently the sizes alone tell, before anything runs (`check`).  Which product feeds which only a run tells: until
the module has run once, `Watch` looks at what its products are given and make, then it is gone.

Products that were fused, one behind another in the rows of one COLUMN weight (gate and up, or query, key and value),
have shapes that fit however they are cut, but a slice of these rows is no slice of each product: that is refused too.

What fits in shape and is no part of what one process computes is refused as far as the graph of that run tells (none is
kept without gradients, nor inside of what is recomputed or compiled, and a rank with one head sees no other): a feature
or head that a ROW product is given and that depends on another one of a COLUMN product (a softmax or norm over split
features, heads in another order, keys of another group); and a number that leaves the module without having passed a
ROW product (a sum over features).
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from interlace.errors import ConfigError, PlanError
from interlace.parallel.part import Part
from interlace.plan.tensor import slicing
from interlace.spec import Role

Given = Mapping[str, tuple[Role, int]]
OWN_COUNT = (
    "let the module count heads from what it is given (-1 in a view), or set the numbers it keeps to those of one rank"
)
KEPT = (Role.COLUMN, Role.ROW)  # roles of weights of which a rank has a slice, whose products are no whole either
SEEDS = 6  # binary digits of a head's number by which dependences are looked at
CUTTING = (
    "chunk",
    "split",
    "split_with_sizes",
    "tensor_split",
    "narrow",
    "unsafe_chunk",
    "unsafe_split",
    "__getitem__",
)


def check(splitting: Given, parts: Mapping[str, Part]) -> None:
    """`ConfigError` for a ROW product cut elsewhere than every COLUMN product of its size in the nearest module around
    it that has one, and for a COLUMN product there with more rows that stay together than any ROW product takes."""
    for name, (role, chunk) in splitting.items():
        if role is not Role.ROW:
            continue
        row, scope = parts[f"{name}.weight"].slicing, name
        near: list[str] = []
        while scope and not near:
            scope = scope.rpartition(".")[0]
            inside = f"{scope}." if scope else ""
            near = [other for other, (its, _) in splitting.items() if its is Role.COLUMN and other.startswith(inside)]
        takers = [other for other, (its, _) in splitting.items() if its is Role.ROW and other.startswith(inside)]
        for other in near:
            _refuse_fused(other, takers, splitting, parts)
        equal = [other for other in near if parts[f"{other}.weight"].shape[0] == row.shape[1]]
        cuts = [parts[f"{other}.weight"].slicing for other in equal]
        if equal and all((cut.bounds, cut.copies) != (row.bounds, row.copies) for cut in cuts):
            kept = splitting[equal[0]][1]
            raise ConfigError(
                f"roles cuts the {row.shape[1]} features of {equal[0]} (COLUMN) at {_cuts(cuts[0].bounds)} and those "
                f"of {name} (ROW) at {_cuts(row.bounds)}, since {kept} and {chunk} stay together; give both the same."
            )
        for other in near:
            _refuse_apart(other, takers, splitting, parts)


def _refuse_fused(name: str, takers: Sequence[str], splitting: Given, parts: Mapping[str, Part]) -> None:
    """Heads, or features, of a COLUMN product are those of a ROW product that takes them, or several share one."""
    rows, chunk = parts[f"{name}.weight"].shape[0], splitting[name][1]
    taken = {other: parts[f"{other}.weight"].shape[1] // splitting[other][1] for other in takers}
    if any(count % (rows // chunk) == 0 for count in taken.values()):
        return
    other = takers[0]
    raise ConfigError(
        f"roles makes {name} COLUMN, whose {rows} rows are {rows // chunk} of {chunk} that stay together, and {other} "
        f"(ROW) takes {taken[other]}; if {name} is several products one behind another, give each a linear of its own, "
        "and if their rows alternate, give the number that belongs together."
    )


def _refuse_apart(name: str, takers: Sequence[str], splitting: Given, parts: Mapping[str, Part]) -> None:
    """Heads of a COLUMN product that several of a ROW product share are on the ranks of those."""
    part, chunk = parts[f"{name}.weight"], splitting[name][1]
    rows, ways, axis = part.shape[0], part.group.size, part.group.axis
    heads = rows // chunk

    def fits(other: str, ways: int) -> bool:
        features, kept = parts[f"{other}.weight"].shape[1], splitting[other][1]
        try:
            own = slicing((rows,), "N", 0, ways, chunk)
            its = slicing((features,), "M", 0, ways, kept)
        except PlanError:
            return False
        for rank in range(ways):
            (a, b), (c, d) = own.bound(rank), its.bound(rank)
            inside = a * features <= c * rows and d * rows <= b * features
            if not inside or (own.copies == its.copies and (b - a) * features != (d - c) * rows):
                return False
        return True

    takes = {other: parts[f"{other}.weight"].shape[1] // splitting[other][1] for other in takers}
    sharing = [other for other, count in takes.items() if count % heads == 0]
    if any(takes[other] == heads or fits(other, ways) for other in sharing):
        return
    other = sharing[0]
    known = [str(ways) for ways in range(1, takes[other] + 1) if fits(other, ways)]
    raise ConfigError(
        f"roles makes {name} COLUMN, whose {heads} heads serve the {takes[other]} that {other} (ROW) takes, and over "
        f"{axis}={ways} a rank has heads of {other} whose share of {name} is on another one; use {axis} = "
        f"{', '.join(known)}."
    )


def _cuts(bounds: tuple[int, ...]) -> str:
    return ", ".join(map(str, bounds[1:-1])) or "no place"


@dataclass(frozen=True)
class _Product:
    """A product that has run: its features here, and all of them.  role: None for one that stays whole; made: a COLUMN
    product's output, while it lives."""

    name: str
    role: Role | None
    here: int
    features: int
    chunk: int
    made: weakref.ref[Tensor] | None = None


class _Cuts(TorchFunctionMode):
    """Refuses to cut what a COLUMN product makes along its features: a piece of a slice is no slice of a piece."""

    def __init__(self, ran: Sequence[_Product]) -> None:
        super().__init__()
        self.ran = ran

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        whole = args[0] if args and isinstance(args[0], Tensor) else None
        name = func.__name__
        if whole is not None and (name in CUTTING or name == "glu"):
            for piece in result if isinstance(result, tuple | list) else [result]:
                along = piece.dim() == whole.dim() and piece.shape[-1] < whole.shape[-1]
                if along and (name == "glu" or piece.stride(-1) == whole.stride(-1)):
                    self._refuse(whole)
        return result

    def _refuse(self, whole: Tensor) -> None:
        for product in self.ran:
            if product.made is not None and product.made() is whole and product.here != product.features:
                raise ConfigError(
                    f"roles makes {product.name} COLUMN, and the module cuts its {product.here} of {product.features} "
                    "features on this rank into pieces; if it is several products one behind another, give each a "
                    "linear of its own."
                )


@dataclass(frozen=True)
class _Head:
    """Features that stay together: [start, stop) among those of this rank, and as fractions of all."""

    here: tuple[int, int]
    whole: tuple[Fraction, Fraction]

    def meets(self, other: _Head) -> bool:
        return self.whole[0] < other.whole[1] and other.whole[0] < self.whole[1]


def _heads(part: Part, features: int, chunk: int) -> list[_Head]:
    """Those of this rank."""
    start, stop = part.bound
    ends = [(at, min(at + chunk, stop)) for at in range(start, stop, chunk)]
    return [_Head((a - start, b - start), (Fraction(a, features), Fraction(b, features))) for a, b in ends]


def _seeds(count: int) -> Iterator[list[int]]:
    """Sets of numbers below `count` such that of any two (of up to 64) some set holds the first and not the second."""
    digits = (count - 1).bit_length()
    for digit in [*range(digits)][-SEEDS:]:
        for value in (0, 1):
            yield [number for number in range(count) if number >> digit & 1 == value]


def _above(given: Tensor, ends: Iterable[Any]) -> set[Any]:
    """The nodes of the graph that `given` comes from without passing one of `ends`, or what was compiled."""
    seen, found, waiting = set(ends), set(), [given.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(node)
        if not node.name().startswith("CompiledFunction"):
            waiting += [above for above, _ in node.next_functions]
    return found


def _is_compiled(module: nn.Module) -> bool:
    """Whether a part of it is, as a module or by its forward."""
    return any("forward" in vars(inner) or inner._compiled_call_impl is not None for inner in module.modules())


class Watch:
    """Stands around a module's forward until it has run once, and says `ConfigError` where products do not match."""

    def __init__(self, module: nn.Module, splitting: Given, parts: Mapping[str, Part]) -> None:
        self.ran: list[_Product] = []
        self._plain, self._module = module.forward, module
        self._hooks = []
        self._parts, self._given = parts, splitting
        self._sees = not _is_compiled(module)
        self._open: list[tuple[str, Tensor, Any]] = []  # what COLUMN products made, and nodes, before a ROW has it
        self._ends: list[Any] = []  # of the graph: where sums over ranks, or gathered features, begin
        for name, inner in module.named_modules():
            role, chunk = splitting.get(name, (None, 1))
            if role in (Role.ROW, Role.VOCAB):
                self._hooks.append(inner.register_forward_hook(self._end))
            if isinstance(inner, nn.Embedding) or not isinstance(getattr(inner, "weight", None), nn.Parameter):
                continue
            if isinstance(inner, nn.Linear) or role in (Role.COLUMN, Role.ROW):
                part = parts[f"{name}.weight"]
                self._hooks.append(inner.register_forward_pre_hook(self._before(name, role, part)))
                self._hooks.append(inner.register_forward_hook(self._behind(name, role, part, chunk)))
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran.clear()
        try:
            with _Cuts(self.ran):
                made = self._plain(*args, **kwargs)
            self._refuse_slices(made)
            self._refuse_sums(made)
        except (RuntimeError, IndexError) as error:
            told = self._told(error)
            if told is None:
                raise
            raise told from None
        finally:
            self._open, self._ends = [], []
        for hook in self._hooks:
            hook.remove()
        del self._module.forward
        return made

    def _refuse_slices(self, made: Any) -> None:
        """`ConfigError` where what a COLUMN product makes leaves the module: it would be taken for the whole."""
        leaving = [part for leaf in tree_leaves(made) if isinstance(leaf, Tensor) for part in (leaf, leaf._base)]
        for product in self.ran:
            output = None if product.made is None else product.made()
            if output is not None and any(output is part for part in leaving) and product.here != product.features:
                raise ConfigError(
                    f"roles makes {product.name} COLUMN, whose {product.here} of {product.features} features on this "
                    f"rank leave the module; give {product.name} no role, or VOCAB, which gathers them."
                )

    def _end(self, module: Any, args: Any, made: Any) -> None:
        if isinstance(made, Tensor) and made.grad_fn is not None:
            self._ends.append(made.grad_fn)

    def _refuse_sums(self, made: Any) -> None:
        """`ConfigError` where what leaves the module is computed from a slice, and has lost the size that tells it."""
        named = dict(self._module.named_parameters(remove_duplicate=False)) if self._sees else {}
        split = {id(named[f"{name}.weight"]): name for name, (role, _) in self._given.items() if role in KEPT and named}
        for leaf in tree_leaves(made):
            if not isinstance(leaf, Tensor) or leaf.dim() > 0:
                continue
            for node in _above(leaf, self._ends):
                if name := split.get(id(getattr(node, "variable", None))):
                    raise ConfigError(
                        f"a number that leaves the module is computed from {name}, of which this rank has a slice, and "
                        "was not added up over ranks; compute it from what a ROW product makes, or outside, from "
                        f"whole_parameters(), or give {name} no role."
                    )

    def _refuse_mixture(self, name: str, given: Tensor) -> None:
        """`ConfigError` where a head that a ROW product is given depends on another one than its own of a COLUMN
        product: what it depends on may be on another rank."""
        if not self._sees or torch.compiler.is_compiling() or not torch.is_grad_enabled() or given.grad_fn is None:
            return
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # recomputed, or moved elsewhere
            return
        above = _above(given, self._ends)
        columns = [(column, made) for column, made, node in self._open if node in above]
        self._open = [entry for entry in self._open if entry[2] not in above]
        row = self._parts[f"{name}.weight"]
        heads = _heads(row, row.shape[1], self._given[name][1])
        for seeds in _seeds(len(heads)):
            seed = torch.zeros_like(given)
            for number in seeds:
                seed[..., slice(*heads[number].here)].uniform_(1, 2)
            try:
                made = [tensor for _, tensor in columns]
                found = torch.autograd.grad(given, made, seed, retain_graph=True, allow_unused=True) if made else ()
            except RuntimeError:  # of a graph that cannot be run twice
                return
            for (column, _), gradient in zip(columns, found, strict=True):
                if gradient is None:
                    continue
                part = self._parts[f"{column}.weight"]
                for head in _heads(part, part.shape[0], self._given[column][1]):
                    own = any(heads[number].meets(head) for number in seeds)
                    if not own and gradient[..., slice(*head.here)].any():
                        raise ConfigError(
                            f"roles makes {column} COLUMN and {name} ROW, and between them a feature or head is "
                            "computed from another one (a norm or softmax over them, say, or another order), which may "
                            "be on another rank; give what belongs together as rows that stay together, or no role."
                        )

    def _before(self, name: str, role: Role | None, part: Part) -> Any:
        whole = part.shape[1]
        takes = part.bound[1] - part.bound[0] if role is Role.ROW else whole

        def look(module: Any, args: tuple[Any, ...]) -> None:
            if not args or not isinstance(args[0], Tensor):
                return
            if args[0].shape[-1] == takes:
                if role is Role.ROW:
                    self._refuse_mixture(name, args[0])
                return
            given = args[0].shape[-1]
            source = next((p for p in reversed(self.ran) if p.here == given), None)
            if role is Role.ROW and source is not None and source.role is not Role.COLUMN:
                raise ConfigError(
                    f"roles makes {name} ROW, so that it takes {takes} of {whole} features on this rank, and "
                    f"{source.name} gives it all {given}; give {source.name} the role COLUMN."
                )
            if role is Role.ROW and source is None and given == whole:
                raise ConfigError(
                    f"roles makes {name} ROW, so that it takes {takes} of {whole} features on this rank, and it is "
                    f"given all of them; give {name} no role, or feed it from a COLUMN product."
                )
            if source is not None and source.role is Role.COLUMN:
                own = "which has no role" if role is None else f"which is {role.name}"
                wanted = "give both as many rows that stay together" if role is Role.ROW else f"make {name} ROW"
                raise ConfigError(
                    f"roles makes {source.name} COLUMN, whose {given} of {source.features} features on this rank go to "
                    f"{name}, {own} and takes {takes}; {wanted}."
                )

        return look

    def _behind(self, name: str, role: Role | None, part: Part, chunk: int) -> Any:
        def note(module: Any, args: Any, made: Any) -> None:
            if isinstance(made, Tensor):
                kept = weakref.ref(made) if role is Role.COLUMN else None
                self.ran.append(_Product(name, role, made.shape[-1], part.shape[0], chunk, kept))
                if role is Role.COLUMN:
                    self._open.append((name, made, made.grad_fn))

        return note

    def _told(self, error: RuntimeError | IndexError) -> ConfigError | None:
        """Of a message that holds two sizes, in features or heads, that a column here and a whole product have, or of
        a shape that a column's slice does not fit."""
        text = str(error)
        columns = [p for p in reversed(self.ran) if p.role is Role.COLUMN and p.here != p.features]
        if re.fullmatch(r"Target \d+ is out of bounds\.", text) and columns and columns[0].name == self.ran[-1].name:
            return ConfigError(
                f"roles makes {columns[0].name} COLUMN, whose {columns[0].here} of {columns[0].features} features on "
                f"this rank are taken for all classes; make {columns[0].name} VOCAB, which gathers them."
            )
        if isinstance(error, IndexError):
            return None
        if shape := re.search(r"shape '(\[.*\])' is invalid for input of size (\d+)", text):
            column = next((p for p in columns if int(shape[2]) % p.here == 0), None)
            if column is None:
                return None
            return ConfigError(
                f"roles makes {column.name} COLUMN, whose {column.here} of {column.features} features on this rank do "
                f"not fit {shape[1]}, a shape of the module for all of them; {OWN_COUNT}."
            )
        numbers = set(map(int, re.findall(r"\d+", text)))
        for column in columns:
            sizes = {column.here, column.features}, {column.here // column.chunk, column.features // column.chunk}
            if not any(both <= numbers for both in sizes):
                continue
            whole = (p for p in reversed(self.ran) if p.role is None and p.here == column.features)
            partner = next(whole, None)
            if partner is None:
                return ConfigError(
                    f"roles makes {column.name} COLUMN, whose {column.here} of {column.features} features on this rank "
                    f"meet as many as all ranks have; {OWN_COUNT}."
                )
            return ConfigError(
                f"roles makes {column.name} COLUMN, whose {column.here} of {column.features} features on this rank "
                f"meet all {partner.here} of {partner.name}, which has no role; give {partner.name} the role "
                "COLUMN too."
            )
        return None
