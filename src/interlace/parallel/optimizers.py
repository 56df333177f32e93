"""What an optimizer of a wrapped module may be: refused when it steps, by name, where it would train other numbers.

An optimizer sees flat main weights, and of these the part that its rank holds.  So it must work element by element, its
state belongs to one rank, and the gradients it takes must have been added up over ranks.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from interlace.errors import ConfigError
from interlace.parallel.data import DataParallel
from interlace.parallel.optimizer_state import HOLDER
from interlace.parallel.state import guard

ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
OPTIONS = ("lr", "betas", "momentum", "eps")  # that a group may have for itself, beside weight decay
_in_parts = weakref.WeakSet[DataParallel]()  # wrapped modules of which ranks hold parts
_looks: weakref.WeakKeyDictionary[DataParallel, Callable[[torch.optim.Optimizer], None]] = weakref.WeakKeyDictionary()
FRAMES = 8  # between the step of a gradient scaler and the hooks of the optimizer's


def watch(model: DataParallel) -> None:
    """Looks at every optimizer's steps, and at calls for the module's own state, as long as the model lives."""
    own = {id(parameter): name for name, parameter in model.module.named_parameters()}
    leaves = {id(leaf) for leaf in model.leaves()}
    holder, known = _holder(model), weakref.WeakSet[torch.optim.Optimizer]()
    reference = weakref.ref(model)

    def look(optimizer: torch.optim.Optimizer) -> None:
        held = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        if name := next((own[id(leaf)] for leaf in held if id(leaf) in own), None):
            raise ConfigError(
                f"the optimizer holds {name} of the module itself, which gets no gradient; make it of the "
                "parameters() of what parallelize returned."
            )
        model = reference()
        if model is None or not any(id(leaf) in leaves for leaf in held):
            return
        model.refuse_unreduced("the optimizer's step")
        model.refuse_written()
        _refuse_scaler(model)
        _refuse_state(optimizer, held, holder)
        if optimizer not in known:
            model.refuse_changed()
            _refuse_groups(model, optimizer)
            _refuse_kind(optimizer, held[0].device, model.holds_part)
            known.add(optimizer)

    def serves() -> bool:
        model = reference()
        return model is None or model.tells_state or model.is_module_itself

    guard(model.module, serves)
    if model.holds_part:
        _in_parts.add(model)
        _watch_norms()
    _looks[model] = look
    _watch_steps()


def of_wrapped(parameters: Iterable[nn.Parameter]) -> set[int]:
    """The ids of those that belong to a wrapped module which is there."""
    ids = {id(parameter) for parameter in parameters}
    return {found for model in list(_looks) for found in model.parameter_ids & ids}


@functools.cache
def _watch_steps() -> None:
    """Once, and for good: PyTorch goes over its hooks while a collection of garbage might take one away."""
    register_optimizer_step_pre_hook(_look)
    register_optimizer_step_post_hook(_hide_old)


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for look in list(_looks.values()):
        look(optimizer)


def _hide_old(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    held = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
    for model in list(_looks):
        if any(id(leaf) in held for flat in model.flats for leaf in flat.leaves):
            model.hide_old()


def _watch_norms() -> None:
    """From here on PyTorch's norm of gradients refuses those of wrapped modules of which ranks hold parts.

    `clip_grad_norm_` goes through it, however it was imported, and would scale each rank's part by its own norm.
    """
    for home in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("get_total_norm", "_get_total_norm"):
            if name in vars(home) and not hasattr(vars(home)[name], "interlace"):
                setattr(home, name, _refusing(vars(home)[name]))


def _refusing(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(norm)
    def refuse_parts(tensors: Tensor | Iterable[Tensor], *args: Any, **options: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        leaves = (leaf for model in _in_parts for run in model.flats for leaf in run.leaves)
        gradients = {id(leaf.grad) for leaf in leaves if leaf.grad is not None}
        if any(id(tensor) in gradients for tensor in tensors):
            raise ConfigError(
                "torch.nn.utils takes the norm of this rank's part of the gradients alone; call clip_grad_norm_() of "
                "what parallelize returned, which is over all ranks."
            )
        return norm(tensors, *args, **options)

    refuse_parts.interlace = True  # type: ignore[attr-defined]
    return refuse_parts


def _holder(model: DataParallel) -> str:
    """Whose part of the optimizer's state is kept here."""
    if not model.holds_part:
        return "any rank"
    ranks = [f"rank {group.rank} of {group.axis}={group.size}" for group in model.axes]
    return " and ".join(ranks) + f" with zero={model.zero}"


def _refuse_scaler(model: DataParallel) -> None:
    """PyTorch's scaler looks for overflow in the gradients of its own rank; in float16 they agree, since the wrapped
    module tells all ranks (`DataParallel`)."""
    if not model.holds_part or model.shares_overflow:
        return
    frame, left = sys._getframe(), FRAMES
    while frame.f_back is not None and left:
        frame, left = frame.f_back, left - 1
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            raise ConfigError(
                "a GradScaler looks for overflow in this rank's part of the gradients alone, and nothing here is "
                "computed in float16; leave it out, or give enabled=False."
            )


def _refuse_state(optimizer: torch.optim.Optimizer, leaves: Sequence[nn.Parameter], holder: str) -> None:
    for group in optimizer.param_groups:
        found = group.setdefault(HOLDER, holder)
        if found != holder:
            raise ConfigError(
                f"the optimizer has the state of {found}, and this is {holder}; ranks hold different elements, so save "
                "and load by the model's optimizer_state_dict() and load_optimizer_state_dict()."
            )
    for leaf in leaves:
        for key in ELEMENTWISE:
            value = optimizer.state.get(leaf, {}).get(key)
            if isinstance(value, torch.Tensor) and value.shape != leaf.shape:
                raise ConfigError(
                    f"the optimizer's {key} has {value.numel():,} elements where this rank holds {leaf.numel():,}; "
                    "load a state that was saved with the same module, mesh and zero."
                )


def _refuse_groups(model: DataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Of parameters told apart by name or shape, to give some no weight decay or a rate of their own: flat ones are all
    alike in these, so that a group of some of them has none.

    Where other ranks hold all of a run that takes no decay, a group of just those is empty too: so rates are looked at
    on ranks that hold some of each kind, whatever the run has.
    """
    empty = [group for group in optimizer.param_groups if not group["params"]]
    rates = {bool(group.get("weight_decay")) for group in empty}
    filled = {id(place.leaf) for place in model.placements(owned=False)}
    trained = [flat for flat in model.flats if flat.trainable]
    has_both = all(len(flat.leaves) >= len({member.decay for member in flat.members}) for flat in trained)
    for group in optimizer.param_groups if empty else []:
        decays = bool(group.get("weight_decay"))
        other = next((key for key in OPTIONS if any(group.get(key) != each.get(key) for each in empty)), None)
        for leaf in group["params"]:
            if id(leaf) not in filled:
                continue
            if len(rates) == 1 and decays not in rates and leaf.decay != decays:
                found = f"{'' if decays else 'no '}weight decay"
                take = "take parameter_groups(weight_decay) of what parallelize returned"
            elif other is not None and has_both:
                found, take = (
                    f"another {other}",
                    "name what has its own in parallelize's units, and choose by that name",
                )
            else:
                continue
            raise ConfigError(
                f"a parameter group of the optimizer is empty, and another gives {found} to {leaf.label}; a wrapped "
                f"module's parameters are flat runs, without the names and shapes of single tensors, so {take}."
            )


def _refuse_kind(optimizer: torch.optim.Optimizer, device: torch.device, in_parts: bool) -> None:
    if not _is_elementwise(optimizer, device, in_parts):
        raise ConfigError(
            f"{type(optimizer).__name__} does not work element by element, and a wrapped module's parameters are flat "
            "runs of many tensors, cut over ranks; take one that does, such as AdamW or SGD."
        )


def _is_elementwise(optimizer: torch.optim.Optimizer, device: torch.device, in_parts: bool) -> bool:
    """Whether two steps on a matrix and a vector are those on one flat run of both, or on parts of it; true for an
    optimizer that cannot be tried."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 3), (5,)]
    values, first, second = (
        [torch.randn(size, generator=generator) * 10**place for place, size in enumerate(sizes)] for _ in range(3)
    )
    options = dict(optimizer.defaults) | ({"lr": 0.01} if "lr" in optimizer.defaults else {})

    def made(tensors: Sequence[torch.Tensor], *gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        parameters = [nn.Parameter(tensor.to(device, copy=True)) for tensor in tensors]
        own: Any = type(optimizer)(parameters, **options)
        for gradient in gradients:
            for parameter, each in zip(parameters, gradient, strict=True):
                parameter.grad = each.to(device, copy=True)
            own.step(lambda: 0.0)
        return torch.cat([parameter.detach().flatten().cpu() for parameter in parameters])

    def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    runs = [flat(values), flat(first), flat(second)]
    parts = [slice(0, 7), slice(7, None)] if in_parts else [slice(None)]
    try:
        whole = made(values, first, second)
        cut = torch.cat([made(*([run[part]] for run in runs)) for part in parts])
    except Exception:
        return True
    return bool((whole - cut).abs().max() <= 1e-5 * whole.abs().max())
