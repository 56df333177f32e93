"""Backward in two parts: the gradient of a stage's input first, those of its weights later.

Equals the plain backward pass: the same products on the same operands, none twice.  In a stage whose backward is split,
the product y = x W^T computes only dx in backward and puts (x, dy) aside; `Tape.weights` makes dW = dy^T x of them.  So
once the input's gradient is on its way, everything else that forward saved is gone, and of each product only its input
and the gradient of its output stay (Qi et al., arXiv 2401.10241).  Gradients of biases, norms, embeddings and of the
vocabulary's projection, whose loss makes its own in forward, are small or made already: they stay in the first part.

It is done by instance: `nn.Linear` gets another `forward`, and a module that multiplies by parameters of its own, as a
mixture of experts does, runs under a mode that takes up its products.  A module with autograd functions of its own
keeps its whole backward in the first part, which is right, and defers nothing.

Tried by others and not taken: running autograd twice over the same graph, once for inputs and once for weights, keeps
the whole graph alive in between, and computes shared parts twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

# a weight, and what makes its gradient
Owed = tuple[Tensor, Callable[[], Tensor]]


class Tape:
    """Where products of a micro-batch put aside what their weights' gradients need.  `owed` is filled by backward."""

    def __init__(self) -> None:
        self.owed: list[Owed] = []
        self.held: list[Tensor] = []

    def keep(self, weight: Tensor, make: Callable[[], Tensor], *held: Tensor) -> None:
        self.owed.append((weight, make))
        self.held += held

    @property
    def nbytes(self) -> int:
        """Bytes kept between the two parts, each storage once."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self.held}
        return sum(storages.values())

    def weights(self) -> None:
        """The gradients of the weights, in the order in which backward came past; into `.grad`, hooks included."""
        views: list[tuple[Tensor, Tensor]] = []
        self.held.clear()
        owed, self.owed = self.owed, []
        owed.reverse()
        while owed:
            weight, make = owed.pop()
            gradient = make()
            del make
            if weight.is_leaf:
                _accumulate(weight, gradient)
            else:  # a view of a parameter: all parts of it at once, so that none makes zeros for the others
                views.append((weight, gradient))
        if views:
            torch.autograd.backward([weight for weight, _ in views], [gradient for _, gradient in views])


@torch.no_grad()
def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """As autograd does at a leaf, hooks included, but without the copy that it makes of a gradient it is handed."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


class Switch:
    """The tape that the products of a stage write to now; None: nothing is put aside.

    first_part: that of the micro-batch whose input's gradient alone is being made.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.first_part: Tape | None = None


def split(module: nn.Module, switch: Switch) -> None:
    """Lets the products in `module` defer their weights' gradients while `switch` holds a tape; in place."""
    for inner in list(module.modules()):
        if type(inner).forward is nn.Linear.forward:
            inner.forward = _linear_of(inner, switch)  # type: ignore[arg-type]
        elif _multiplies(inner):
            inner.forward = _under_mode(inner.forward, switch)


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has a forward of its own and reads matrices that belong to it, or to children without one."""
    if type(module).forward is nn.Module.forward or isinstance(module, nn.Linear | nn.Embedding):
        return False
    silent = [child for child in module.children() if type(child).forward is nn.Module.forward]
    owners = [module, *(child for child in silent if not isinstance(child, nn.ModuleList | nn.ModuleDict))]
    return any(parameter.dim() >= 2 for owner in owners for parameter in owner.parameters(recurse=False))


def _linear_of(module: nn.Linear, switch: Switch) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return linear(x, module.weight, module.bias, switch.tape)

    return forward


def _under_mode(forward: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if switch.tape is None:
            return forward(*args, **kwargs)
        with _Products(switch.tape):
            return forward(*args, **kwargs)

    return wrapped


class _Products(TorchFunctionMode):
    """Takes up `F.linear` and `F.grouped_mm` with weights that ask for a gradient."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if function is F.linear and not kwargs:
                return linear(args[0], args[1], args[2] if len(args) > 2 else None, self.tape)
            if function is F.grouped_mm and len(args) == 2 and set(kwargs) == {"offs"}:
                return grouped(args[0], args[1], kwargs["offs"], self.tape)
        return function(*args, **kwargs)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tape: Tape | None) -> Tensor:
    """`F.linear`, the gradient of whose weight is put on the tape; plain without a tape, or where nobody asks for both
    gradients."""
    if tape is None or not (torch.is_grad_enabled() and weight.requires_grad and x.requires_grad):
        return F.linear(x, weight, bias)
    dys: list[Tensor] = []

    def keep(x: Tensor) -> None:
        rows_KN, rows_KM = dys.pop().flatten(0, -2), x.flatten(0, -2)
        tape.keep(weight, lambda: rows_KN.t().mm(rows_KM), rows_KN, rows_KM)

    y = F.linear(_Kept.apply(x, keep), weight.detach(), bias)  # type: ignore[no-untyped-call]
    y.register_hook(dys.append)
    return y


def grouped(x_RM: Tensor, weight_XMN: Tensor, ends_X: Tensor, tape: Tape) -> Tensor:
    """`F.grouped_mm` of rows with a matrix for each group, likewise."""
    if not (weight_XMN.requires_grad and x_RM.requires_grad):
        return F.grouped_mm(x_RM, weight_XMN, offs=ends_X)
    dys: list[Tensor] = []

    def keep(x_RM: Tensor) -> None:
        dy_RN = dys.pop()
        tape.keep(weight_XMN, lambda: F.grouped_mm(x_RM.mT, dy_RN, offs=ends_X), x_RM, dy_RN)

    y_RN = F.grouped_mm(_Kept.apply(x_RM, keep), weight_XMN.detach(), offs=ends_X)  # type: ignore[no-untyped-call]
    y_RN.register_hook(dys.append)
    return y_RN


class _Kept(torch.autograd.Function):
    """x -> x;  dx -> dx, with keep(x) when backward comes past.

    It saves x before the product, not after, so that recomputation, which stops when it has everything that was saved,
    leaves out the last product of a block as it does without a split.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.keep = keep
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.keep(*ctx.saved_tensors)
        return dx, None
