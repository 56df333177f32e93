"""What of a run goes into a checkpoint, and back: main weights, optimizer state, step, data cursor, configuration.

Names are global: "main/blocks.0.mlp.up.weight", "exp_avg/...".  Each rank gives the ranges it owns and takes the ranges
it holds, so a checkpoint of any plan loads under any other with equal values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from interlace.checkpoint import Piece, Reader
from interlace.errors import CheckpointError
from interlace.train.optimizer import STATE
from interlace.train.session import Session


def pieces(session: Session) -> Iterator[Piece]:
    """Every element that this rank owns, of the main weights and of the optimizer's state."""
    for place in session.model.placements(owned=True):
        kept = session.optimizer.state.get(place.leaf, {})
        tensors = {"main": place.leaf.detach(), **{key: kept[key] for key in _state_keys(session) if key in kept}}
        for kind, tensor in tensors.items():
            part = tensor[place.leaf_start : place.leaf_stop]
            yield Piece(f"{kind}/{place.name}", place.shape, place.layout, place.start, place.stop, part)


def meta(session: Session, step: int) -> dict[str, Any]:
    """What is not a tensor.  `step` steps have been made."""
    return {
        "config": session.cfg.to_toml(),
        "model": asdict(session.model_cfg),
        "optimizer": session.cfg.train.optimizer,
        "optimizer_step": step,
        "plan": str(session.cfg.plan),
        "cursor": session.cursor.to_json(),
    }


def restore(session: Session, folder: Path) -> int:
    """Loads a checkpoint into the session and returns its step.  Nothing is changed unless everything fits."""
    reader = Reader(folder)
    _check(session, reader, folder)
    state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
    kinds = [key for key in _state_keys(session) if any(name.startswith(f"{key}/") for name in reader.names)]
    for leaf in session.model.leaves():
        state[leaf] = {key: torch.zeros_like(leaf, requires_grad=False) for key in kinds}
    for place in session.model.placements(owned=False):
        for kind in ["main", *kinds]:
            target = place.leaf.detach() if kind == "main" else state[place.leaf][kind]
            values = reader.read(f"{kind}/{place.name}", place.start, place.stop)
            target[place.leaf_start : place.leaf_stop].copy_(values)
    session.model.refresh()
    _load_optimizer(session, state, float(reader.meta["optimizer_step"]))
    session.cursor = session.dataset.resume(reader.meta["cursor"], session.cfg.train.global_batch)
    return reader.step


def _load_optimizer(session: Session, state: dict[torch.nn.Parameter, dict[str, torch.Tensor]], step: float) -> None:
    optimizer = session.optimizer
    shell = optimizer.state_dict()
    numbers = {leaf: number for number, leaf in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    counted = session.cfg.train.optimizer == "adamw"
    shell["state"] = {
        numbers[leaf]: {**kept, **({"step": torch.tensor(step)} if counted else {})}
        for leaf, kept in state.items()
        if kept
    }
    optimizer.load_state_dict(shell)


def _check(session: Session, reader: Reader, folder: Path) -> None:
    saved, own = reader.meta["model"], _plain(asdict(session.model_cfg))
    different = [key for key in own if saved.get(key) != own[key] and key not in ("dropout", "attention_dropout")]
    if different:
        pairs = ", ".join(f"{key} ({saved.get(key)} saved, {own[key]} asked)" for key in different[:6])
        raise CheckpointError(f"{folder} holds another model: {pairs}; use its [model] section, or start a new run.")
    if reader.meta["optimizer"] != session.cfg.train.optimizer:
        raise CheckpointError(
            f'{folder} holds the state of optimizer "{reader.meta["optimizer"]}", not of '
            f'"{session.cfg.train.optimizer}"; set train.optimizer = "{reader.meta["optimizer"]}".'
        )
    for place in session.model.placements(owned=True):
        name = f"main/{place.name}"
        if name not in reader.names or tuple(reader.shape(name)) != place.shape:
            found = f"has shape {list(reader.shape(name))}" if name in reader.names else "is missing"
            raise CheckpointError(f"{name} {found} in {folder}; the model has it as {list(place.shape)}.")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back: tuples are lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _state_keys(session: Session) -> tuple[str, ...]:
    return STATE[session.cfg.train.optimizer]
