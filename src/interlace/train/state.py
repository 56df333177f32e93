"""What of a run goes into a checkpoint, and back: main weights, optimizer state, step, data cursor, configuration.

Names are global: "main/blocks.0.mlp.up.weight", "exp_avg/...".  Each rank gives the ranges it owns and takes the ranges
it holds, so a checkpoint of any plan loads under any other with equal values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interlace.checkpoint import Piece, Reader, find
from interlace.config import Config, ModelConfig
from interlace.errors import CheckpointError
from interlace.train.data import Span
from interlace.train.optimizer import state_keys

if TYPE_CHECKING:
    from interlace.train.session import Session

EVALUATED_ALIKE = (
    "dropout",
    "attention_dropout",
    "capacity_factor",
    "router_bias_rate",
)  # sizes of a model that may change on resume


def checkpoints(cfg: Config) -> Path:
    return Path(cfg.run.out) / "checkpoints"


def find_checkpoint(cfg: Config, resume: str, thorough: bool = False) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` names, and notes on what was passed over; None: begin a new run.

    resume: "" for a new run; "auto" for the newest checkpoint of the run's own folder, a new run if it has none; else a
    run folder, its `checkpoints`, or one checkpoint.  thorough: of several, one whose bytes are all as they were
    written; else manifest and sizes decide.  Errors: `CheckpointError` when there is nothing valid, or a
    checkpoint of another model or optimizer.
    """
    if not resume:
        return None, []
    place = checkpoints(cfg) if resume == "auto" else Path(resume)
    if resume != "auto" and not place.is_dir():
        raise CheckpointError(f"--resume {resume}: no such folder; give a run folder, a step-N folder in it, or auto.")
    if (place / "checkpoints").is_dir():
        place = place / "checkpoints"
    several = place.name == "checkpoints" or any(place.glob("step-*"))
    folder, notes = find(place, verify=thorough) if several else find(place, place)
    if folder is None and resume != "auto":
        raise CheckpointError(f"--resume {resume}: {place} holds no finished checkpoint; give another folder.")
    if folder is not None:
        _check_meta(Reader(folder), cfg)
    return folder, list(notes)


def is_own(cfg: Config, folder: Path) -> bool:
    """Whether a checkpoint lies in this run's own folder."""
    return folder.resolve().parent == checkpoints(cfg).resolve()


def pieces(session: Session) -> Iterator[Piece]:
    """Every element that this rank owns, of the main weights and of the optimizer's state."""
    keys = state_keys(session.cfg.train)
    for place in session.model.placements(owned=True):
        kept = session.optimizer.state.get(place.leaf, {})
        tensors = {"main": place.leaf.detach(), **{key: kept[key] for key in keys if key in kept}}
        for kind, tensor in tensors.items():
            part = tensor[place.leaf_start : place.leaf_stop]
            yield Piece(f"{kind}/{place.name}", place.shape, place.layout, place.start, place.stop, part, place.cut)
    if session.model.group.rank == 0 and session.model.stands_first:  # of the ranks that hold the same
        for name, buffer in session.model.module.named_buffers():
            yield Piece(f"buffer/{name}", tuple(buffer.shape), "X", 0, buffer.numel(), buffer)


def meta(session: Session, step: int) -> dict[str, Any]:
    """What is not a tensor.  `step` steps have been made."""
    return {
        "config": session.cfg.to_toml(),
        "model": asdict(session.model_cfg),
        "optimizer": session.cfg.train.optimizer,
        "optimizer_step": step,
        "plan": str(session.cfg.plan),
        "table": session.table,
        "cursor": session.cursor.to_json(),
        "spans": [asdict(span) for span in session.spans],
    }


def restore(session: Session, folder: Path) -> int:
    """Loads a checkpoint into the session and returns its step.  Nothing changes unless names and shapes fit."""
    reader = Reader(folder)
    _check_meta(reader, session.cfg)
    _check_shapes(session, reader)
    kinds = [key for key in state_keys(session.cfg.train) if any(name.startswith(f"{key}/") for name in reader.names)]
    state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
    for leaf in session.model.leaves():
        state[leaf] = {key: torch.zeros_like(leaf, requires_grad=False) for key in kinds}
    for place in session.model.placements(owned=False):
        for kind in ["main", *kinds]:
            target = place.leaf.detach() if kind == "main" else state[place.leaf][kind]
            values = reader.read(f"{kind}/{place.name}", place.start, place.stop, place.cut)
            target[place.leaf_start : place.leaf_stop].copy_(values)
    for name, buffer in session.model.module.named_buffers():
        buffer.copy_(reader.read(f"buffer/{name}").view(buffer.shape))
    session.model.refresh()
    _load_optimizer(session, state, float(reader.meta["optimizer_step"]))
    session.cursor = session.dataset.resume(reader.meta["cursor"], session.cfg.train.global_batch)
    _take_spans(session, reader)
    saved = reader.meta.get("table", "")
    if saved and session.table and saved != session.table:
        session.notes.append(f"note: products were chosen by the table {saved} when {folder.name} was saved")
    return reader.step


def _take_spans(session: Session, reader: Reader) -> None:
    """Which batches led here.  Steps asked for as epochs are those made, and those that the epochs still have."""
    train, step, cursor = session.cfg.train, reader.step, session.cursor
    session.spans = [Span(**span) for span in reader.meta.get("spans", ())] or session.spans
    if (last := session.spans[-1].global_batch) != train.global_batch:
        session.spans = [span for span in session.spans if span.step < step]
        session.spans.append(Span(step, cursor.epoch, cursor.offset, train.global_batch))
        session.notes.append(f"note: a step has {train.global_batch} sequences from here on, and had {last} before")
    if train.epochs:
        session.steps = step + session.dataset.steps_until(cursor, train.epochs, train.global_batch)


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


def _check_meta(reader: Reader, cfg: Config) -> None:
    """Refuses a checkpoint of another model or optimizer; before any process starts, and again on every rank."""
    folder = reader.folder
    missing = [key for key in ("model", "optimizer", "optimizer_step", "cursor") if key not in reader.meta]
    kinds = {"model": dict, "optimizer": str, "optimizer_step": int, "cursor": dict}
    wrong = [key for key, kind in kinds.items() if key in reader.meta and not isinstance(reader.meta[key], kind)]
    if missing or wrong:
        raise CheckpointError(
            f"{folder} was not written by a training run (no {(missing + wrong)[0]}); resume another."
        )
    own = _plain(asdict(cfg.model_config()))
    defaults = {key: field.default for key, field in ModelConfig.__dataclass_fields__.items()}
    saved = _plain(defaults) | reader.meta["model"]
    different = [key for key in own if saved.get(key) != own[key] and key not in EVALUATED_ALIKE]
    if different:
        pairs = ", ".join(f"{key} ({saved.get(key)} saved, {own[key]} asked)" for key in different[:6])
        raise CheckpointError(f"{folder} holds another model: {pairs}; use its [model] section, or start a new run.")
    kind = reader.meta["optimizer"]
    if kind != cfg.train.optimizer:
        raise CheckpointError(
            f'{folder} holds the state of optimizer "{kind}", not of "{cfg.train.optimizer}"; set train.optimizer = '
            f'"{kind}".'
        )


def _check_shapes(session: Session, reader: Reader) -> None:
    for place in session.model.placements(owned=True):
        _check_shape(reader, f"main/{place.name}", place.shape)
    for name, buffer in session.model.module.named_buffers():
        _check_shape(reader, f"buffer/{name}", tuple(buffer.shape))


def _check_shape(reader: Reader, name: str, shape: tuple[int, ...]) -> None:
    if name not in reader.names or tuple(reader.shape(name)) != shape:
        found = f"has shape {list(reader.shape(name))}" if name in reader.names else "is missing"
        raise CheckpointError(f"{name} {found} in {reader.folder}; the model has it as {list(shape)}.")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back: tuples are lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
