"""The tensor axis of a user's own module, from a small table: name or pattern -> role.

Equals the module in one process.  The residual stream stays whole on every rank; a layer adds up once in forward (after
its row-split product) and once in backward (before its column-split ones):

    COLUMN  nn.Linear     rows of the weight split; input whole, output a slice
    ROW     nn.Linear     columns split; input a slice, output added up over ranks, then the bias
    VOCAB   nn.Embedding  rows split, output added up;  nn.Linear: rows split, output gathered
    SPLIT   any module    all that is computed inside is a part: gradients of the whole parameters inside are added up
                          over ranks, and of its inputs where a COLUMN product inside makes the parts

Columns that read the same tensor share one sum in backward.  SPLIT is for attention whose norms work on split heads
(Qwen3), or that hands a tensor made by a whole product to all heads, such as the rope key of latent attention
(DeepSeek-V2, arXiv 2405.04434): each rank sees the gradient of its own heads only.  What leaves such a module must come
out of a row-split product.  Every other parameter is whole, and has the same gradient on every rank.

Several products in one linear (gate and up, or query, key and value) can be split if their rows alternate, with as many
that stay together; one behind another they are refused (`parallel.partners`).
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from interlace.collectives import Group, broadcast
from interlace.collectives.autograd import columns, copy
from interlace.errors import ConfigError, nearest
from interlace.parallel import hooks, partners
from interlace.parallel.part import Part, replace_parameters
from interlace.parallel.tensor import Axis, Row, VocabularyEmbedding
from interlace.plan.tensor import slicing
from interlace.spec import Role

Roles = Mapping[str, Role | tuple[Role, int]]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
KINDS = {Role.COLUMN: (nn.Linear,), Role.ROW: (nn.Linear,), Role.VOCAB: (nn.Embedding, nn.Linear)}


def resolve(module: nn.Module, roles: Roles) -> dict[str, tuple[Role, int]]:
    """Name of a module or parameter -> its role and chunk; the first pattern that fits decides.

    Errors: `ConfigError` for a pattern that fits nothing.
    """
    names = [name for name, _ in module.named_modules(remove_duplicate=False)][1:]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    found: dict[str, tuple[Role, int]] = {}
    for pattern, value in roles.items():
        fitting = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            known = nearest(pattern, names)
            raise ConfigError(
                f'roles names "{pattern}", but the module has no module or parameter of that name'
                + (f'; did you mean "{known}"?' if known else ".")
            )
        role, chunk = value if isinstance(value, tuple) else (value, 1)
        for name in fitting:
            found.setdefault(name, (Role(role), chunk))
    return found


def split_module(
    module: nn.Module, roles: Mapping[str, tuple[Role, int]], axis: Axis, holders: Callable[[int], Group]
) -> dict[str, Part]:
    """Splits `module` in place and returns every parameter's part.  Collective: rank 0's values are everyone's.

    roles: what `resolve` gives; a chunk keeps as many rows (COLUMN) or columns (ROW) together, a head's.  Errors:
    `ConfigError` for a role that its module cannot have, and, when the module first runs, for products that belong
    together and have not both a role (`parallel.partners`); `PlanError` where heads do not divide.
    """
    assert not axis.sequence
    modules = dict(module.named_modules(remove_duplicate=False))
    splitting = {name: role for name, role in roles.items() if name in modules and role[0] in (*KINDS, Role.SPLIT)}
    _check(module, modules, roles, splitting)
    hooks.refuse_lost(module)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.detach().copy_(broadcast(tensor.detach().contiguous(), axis.group, name="initial values").wait())
    inside = [name for name, (role, _) in splitting.items() if role is Role.SPLIT]
    parts = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        role, chunk = splitting.get(owner, (Role.REPLICATED, 1))
        letters = " ".join(f"d{i}" for i in range(parameter.dim())) or "one"
        dim = {Role.COLUMN: 0, Role.VOCAB: 0, Role.ROW: 1}.get(role)
        if attribute == "bias" and role is Role.ROW:
            dim = None
        sliced = slicing(tuple(parameter.shape), letters, dim, axis.group.size, chunk, axis.group.axis, name)
        is_part = role is not Role.ROW and any(owner == at or owner.startswith(f"{at}.") for at in inside)
        alike = dim is None and not is_part
        parts[name] = Part(sliced, axis.group, holders(sliced.copies) if sliced.copies > 1 else None, alike)
    partners.check(splitting, parts)
    replace_parameters(module, parts)
    shared: dict[str, CopyOnce | None] = {}
    for name, (role, _) in splitting.items():
        owner, _, attribute = name.rpartition(".")
        if role is Role.SPLIT:
            if any(its is Role.COLUMN and other.startswith(f"{name}.") for other, (its, _) in splitting.items()):
                _enter(modules[name], axis.group)
            continue
        within = any(owner == at or owner.startswith(f"{at}.") for at in inside)
        entrance = None if within else shared.setdefault(owner, CopyOnce(axis.group))
        made = _replacement(modules[name], role, axis, parts[f"{name}.weight"], entrance)
        setattr(module.get_submodule(owner), attribute, made)
    partners.Watch(module, splitting, parts)
    return parts


def _check(
    module: nn.Module, modules: Mapping[str, Any], roles: Mapping[str, Any], splitting: Mapping[str, Any]
) -> None:
    for name, (role, _) in splitting.items():
        kinds = KINDS.get(role)
        if kinds is not None and not isinstance(modules[name], kinds):
            wanted = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
            raise ConfigError(
                f"roles makes {name} {role.name}, but it is a {type(modules[name]).__name__}; "
                f"give that role to {wanted}."
            )
        if kinds is not None and (own := _own_ways(modules[name])):
            raise ConfigError(
                f"roles makes {name} {role.name}, but it {own}, which its split form would not do; leave its role out, "
                "or do that outside of it."
            )
    for name, (role, _) in roles.items():
        if role is Role.EXPERT or (name not in modules and role in (*KINDS, Role.SPLIT)):
            raise ConfigError(
                f"roles makes {name} {role.name}, which an own module's parameter cannot be; name a module."
            )
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for tied in owners.values():
        given = {splitting[name][0] for name in tied if name in splitting}
        if given - {Role.SPLIT} and (len(given) > 1 or any(name not in splitting for name in tied)):
            raise ConfigError(f"{tied[0]} and {tied[1]} share a parameter but not a role; give both the same one.")
    for name, inner in modules.items():
        if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0:
            raise ConfigError(
                f"{name} drops with p={inner.p:g}, and its masks would differ between ranks that hold the same; set it "
                "to 0, or train without tp."
            )


def _own_ways(module: Any) -> str:
    """What a linear or embedding does beyond its kind, and its replacement would leave out; "" for none."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
    if "parametrizations" in module._modules:
        return "computes its weight from others (parametrizations)"
    if type(module).forward is not kind.forward or "forward" in vars(module):
        return f"is a {type(module).__name__} with a forward of its own"
    if any(getattr(module, name) for name in HOOKS):
        return "has hooks"
    if kind is nn.Embedding and module.scale_grad_by_freq:
        return "scales gradients by frequency (scale_grad_by_freq)"
    return ""


class CopyOnce:
    """`copy` of a tensor, one for all products that read the same tensor, so that their gradients are one sum."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._source: Callable[[], Tensor | None] = lambda: None
        self._made: Callable[[], Tensor | None] = lambda: None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not x.requires_grad:
            return x
        made = self._made() if self._source() is x else None
        if made is None:
            made = copy(x, self.group)
            self._source, self._made = weakref.ref(x), weakref.ref(made)
        return made


class Column(nn.Module):
    """A column-split linear: x_.M -> x_.N/tp, or with `gathers` all of N."""

    def __init__(self, linear: Any, axis: Axis, part: Part, entrance: CopyOnce | None, gathers: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.axis = axis
        self.size = part.shape[0]
        self.gathers = gathers
        self._entrance = entrance

    def forward(self, x: Tensor) -> Tensor:
        made = F.linear(x if self._entrance is None else self._entrance(x), self.weight, self.bias)
        return columns(made, self.axis.group, self.size) if self.gathers else made


def _replacement(module: Any, role: Role, axis: Axis, part: Part, entrance: CopyOnce | None) -> nn.Module:
    if role is Role.ROW:
        return Row(module, axis, part.shape[1])
    if isinstance(module, nn.Embedding):
        return VocabularyEmbedding(module, axis, part, looks=True)
    return Column(module, axis, part, entrance, gathers=role is Role.VOCAB)


def _enter(module: nn.Module, group: Group) -> None:
    """Adds up over ranks the gradients of what `module` is given."""

    def copied(value: Any) -> Any:
        is_part = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        return copy(value, group) if is_part else value

    module.register_forward_pre_hook(
        lambda module, args, kwargs: (tree_map(copied, args), tree_map(copied, kwargs)), with_kwargs=True, prepend=True
    )
