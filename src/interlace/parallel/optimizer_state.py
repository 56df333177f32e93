"""An optimizer's state as whole tensors under the names of the module's parameters, and back.

Equals what `torch.distributed.checkpoint.state_dict` gives and takes of the module before it was wrapped, with
`full_state_dict`: {"state": {name: {key: value}}, "param_groups": [{options, "params": names}]}.  So a state goes on
under every mesh and zero, and between a wrapped module, a plain one, and other programs that keep this form.

Leaves are runs of many parameters, cut over ranks: what has an element for each of theirs ("exp_avg") is gathered and
cut by name; a number of a leaf ("step") is that of every parameter in it.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from interlace.collectives import Group, gather_bytes
from interlace.errors import CheckpointError, ConfigError
from interlace.parallel.run import Member, Run, slice_of
from interlace.parallel.state import first_names

HOLDER = "holder"  # key of a parameter group: whose state this is


def whole_optimizer_state(runs: Sequence[Run], axes: Sequence[Group], optimizer: torch.optim.Optimizer) -> Any:
    """In CPU memory, the same on every rank.  Collective over `axes`."""
    trained = [run for run in runs if run.trainable]
    mine = {"kinds": _kinds(trained, optimizer), "numbers": _numbers(trained, optimizer)}
    here = _everyone(axes, mine | {"groups": _groups(trained, optimizer)})
    state: dict[str, dict[str, Any]] = {}
    for name, numbers in ((name, numbers) for each in here for name, numbers in each["numbers"].items()):
        state.setdefault(name, {}).update(copy.deepcopy(numbers))
    for run in trained:
        kinds = {key: dtype for each in here for key, dtype in each["kinds"].get(run.name, {}).items()}
        for key, dtype in sorted(kinds.items()):
            held = torch.zeros_like(run.main, dtype=dtype)
            for leaf, start in run.leaves_from:
                if key in (values := optimizer.state.get(leaf, {})):
                    held[start - run.held[0] :][: leaf.numel()] = values[key]
            for name, value in run.whole(held):
                if name in _trained(run):
                    state.setdefault(name, {})[key] = value.to("cpu", copy=True)
    order = {name: place for place, name in enumerate(name for run in trained for name in _trained(run))}
    groups: dict[tuple[str, int], dict[str, Any]] = {}  # a rank has none where it holds nothing of a group
    for each in here:
        seen: Counter[str] = Counter()
        for options, names in each["groups"]:
            text = repr(sorted(options.items()))
            found = groups.setdefault((text, seen[text]), {**options, "params": []})
            found["params"] = sorted({*found["params"], *names}, key=order.__getitem__)
            seen[text] += 1
    inside = sorted(
        (group for group in groups.values() if group["params"]), key=lambda group: order[group["params"][0]]
    )
    return {"state": {name: state[name] for name in order if name in state}, "param_groups": inside}


def load_optimizer_state(
    module: nn.Module, runs: Sequence[Run], optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """Takes what `whole_optimizer_state` returns.  Nothing is sent.

    Errors: `CheckpointError`, before anything changes and on every rank alike, for a name the module lacks, a parameter
    whose neighbours in a run have a state and it has none or another step, and other shapes; `ConfigError` for options
    that differ in one group.
    """
    first = first_names(module, runs)
    if unknown := [name for name in given["state"] if name not in first]:
        if isinstance(unknown[0], int):
            raise CheckpointError(
                "the optimizer's state has numbers for names, as an optimizer's own state_dict() does; give that of "
                "get_optimizer_state_dict in torch.distributed.checkpoint.state_dict, with full_state_dict."
            )
        raise CheckpointError(f'the optimizer\'s state has "{unknown[0]}", which the module lacks.')
    entries = {first[name]: entry for name, entry in given["state"].items()}
    for run in runs:
        if run.trainable:
            _refuse_apart(run, entries)
    options = {first[name]: group for group in given["param_groups"] for name in group["params"] if name in first}
    places = {id(leaf): (run, start) for run in runs for leaf, start in run.leaves_from}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        numbers, names = [], list[str]()
        for leaf in group["params"]:
            numbers.append(len(state))
            if id(leaf) not in places:  # another module's: stays
                state[len(state)] = optimizer.state.get(leaf, {})
                continue
            here = _held(*places[id(leaf)], leaf)
            state[len(state)] = _of_leaf(*places[id(leaf)], leaf, {name: entries.get(name, {}) for name in here})
            names += here
        groups.append({**_options(group, names, options), "params": numbers})
    optimizer.load_state_dict(
        {"state": {number: each for number, each in state.items() if each}, "param_groups": groups}
    )


# --- one leaf --------------------------------------------------------------------------------------------------------


def _trained(run: Run) -> list[str]:
    return [member.name for member in run.members if member.parameter.requires_grad]


def _held(run: Run, start: int, leaf: nn.Parameter) -> list[str]:
    """The parameters of which a leaf, the run's elements from `start` on, has elements."""
    stop = start + leaf.numel()
    reached = {member.name for member in run.members if max(member.offset, start) < min(member.end, stop)}
    return [name for name in _trained(run) if name in reached]


def _is_number(key: str, value: Any) -> bool:
    return key == "step" or not isinstance(value, torch.Tensor) or value.dim() == 0


def _states(runs: Iterable[Run], optimizer: torch.optim.Optimizer) -> Iterator[tuple[Run, int, nn.Parameter, Any]]:
    for run in runs:
        for leaf, start in run.leaves_from:
            yield run, start, leaf, optimizer.state.get(leaf, {})


def _kinds(runs: Sequence[Run], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.dtype]]:
    """Of each run the dtypes of what has an element for each of its elements."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for run, _, leaf, values in _states(runs, optimizer):
        for key, value in values.items():
            if _is_number(key, value):
                continue
            if value.shape != leaf.shape:
                label: str = leaf.label  # type: ignore[attr-defined]
                raise ConfigError(
                    f"the optimizer's {key} of {label} is {list(value.shape)} where {list(leaf.shape)} elements are; "
                    "only what belongs to elements can be told by parameter."
                )
            found.setdefault(run.name, {})[key] = value.dtype
    return found


def _numbers(runs: Sequence[Run], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Of each parameter held here the numbers of its leaf."""
    found: dict[str, dict[str, Any]] = {}
    for run, start, leaf, values in _states(runs, optimizer):
        numbers = {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
            if _is_number(key, value)
        }
        found |= {name: numbers for name in _held(run, start, leaf) if values}
    return found


def _groups(runs: Sequence[Run], optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[str]]]:
    """Options of each parameter group, and the parameters held here."""
    places = {id(leaf): (run, start) for run in runs for leaf, start in run.leaves_from}
    return [
        (
            {key: value for key, value in group.items() if key not in ("params", HOLDER)},
            [name for leaf in group["params"] if id(leaf) in places for name in _held(*places[id(leaf)], leaf)],
        )
        for group in optimizer.param_groups
    ]


def _refuse_apart(run: Run, given: Mapping[str, Mapping[str, Any]]) -> None:
    """States that cannot lie in one leaf, or are of other sizes; of the whole run, whatever a rank holds of it."""
    trained = set(_trained(run))
    for decay in (True, False):  # a leaf each
        members = [member for member in run.members if member.name in trained and member.decay is decay]
        entries = {member.name: given.get(member.name, {}) for member in members}
        for key in dict.fromkeys(key for entry in entries.values() for key in entry):
            lacking = [name for name, entry in entries.items() if key not in entry]
            one = next(name for name, entry in entries.items() if key in entry)
            if lacking:
                raise CheckpointError(f'the optimizer\'s state has no {key} of "{lacking[0]}", and "{one}" has one.')
            values = {name: entry[key] for name, entry in entries.items()}
            if _is_of_leaf(key, values[one], _shape(members[0])):
                if other := [name for name, each in values.items() if float(each) != float(values[one])]:
                    raise CheckpointError(
                        f'{key} of "{other[0]}" is {float(values[other[0]]):g} in the optimizer\'s state, of "{one}" '
                        f"{float(values[one]):g}; both lie in one run of elements, which takes steps together."
                    )
                continue
            for member in members:
                if (found := values[member.name].shape) != _shape(member):
                    raise CheckpointError(
                        f'{key} of "{member.name}" is {list(found)} in the optimizer\'s state and '
                        f"{list(_shape(member))} in the module; load the state of a module of the same sizes."
                    )


def _shape(member: Member) -> torch.Size:
    """Of the whole parameter."""
    return member.shape if member.part is None else torch.Size(member.part.shape)


def _is_of_leaf(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a value is one number of all parameters of a leaf, of which one has this shape."""
    return _is_number(key, value) and (key == "step" or bool(shape) or not isinstance(value, torch.Tensor))


def _of_leaf(run: Run, start: int, leaf: nn.Parameter, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a leaf from those of its parameters, which are alike (`_refuse_apart`); none if none has one."""
    made: dict[str, Any] = {}
    members = {member.name: member for member in run.members}
    one, sample = next(iter(entries.items()), ("", {}))
    for key, value in sample.items():
        if _is_of_leaf(key, value, _shape(members[one])):
            made[key] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        held = torch.zeros(run.main.shape, dtype=value.dtype, device=leaf.device)
        for name, entry in entries.items():
            run.fill_whole(members[name], slice_of(entry[key]), into=held)
        made[key] = held[start - run.held[0] :][: leaf.numel()]
    return made


def _options(group: Mapping[str, Any], names: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parameter group: those that its parameters had, or where it has none here, its own."""
    own = {key: value for key, value in group.items() if key != "params"}
    found = [{key: value for key, value in known[name].items() if key != "params"} for name in names if name in known]
    for name, other in zip(names, found, strict=False):
        if other != found[0]:
            raise ConfigError(
                f'options of "{name}" in the optimizer\'s state differ from those of "{names[0]}", and both are in one '
                "group here; make the optimizer with the groups that it was saved with."
            )
    return {**own, **(found[0] if found else {})}


def _everyone(axes: Sequence[Group], mine: Any) -> list[Any]:
    """What every rank has."""
    found = [mine]
    for group in axes:
        found = [each for part in gather_bytes(pickle.dumps(found), group) for each in pickle.loads(part)]
    return found
