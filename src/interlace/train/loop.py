"""The training loop: steps, numbers, checkpoints, and the run folder.

    run.toml          the whole configuration, as used
    metrics.jsonl     a line a step: step, loss, grad_norm, learning_rate, tokens_per_s, mfu, memory, waited by axis
    events.jsonl      rank 0's transfers and waits of the first steps and of every tenth one after
    checkpoints/      step-N/ as `interlace.checkpoint` writes it
    loss.svg          the loss curve

Numbers of a step are read from the device while the next step runs there, so that looking does not make it wait.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from interlace import spec
from interlace.checkpoint import Writer, find
from interlace.collectives import Record, all_gather
from interlace.collectives.handle import Moment, between, now
from interlace.config import loads
from interlace.errors import CheckpointError, ConfigError, NumericsError
from interlace.events import Event, write_jsonl
from interlace.report.draw import write_loss_curve
from interlace.topology import Topology
from interlace.train import optimizer as optimizers
from interlace.train import session as sessions
from interlace.train import state
from interlace.train.progress import Progress
from interlace.train.session import Session
from interlace.train.step import StepResult, train_step
from interlace.world import World

EVENTS_EVERY = 10
EVENTS_FIRST = 10


@dataclass
class _Made:
    """A step that is under way or done: its results as moments and device tensors."""

    step: int
    result: StepResult
    rate: float
    tokens: int
    begin: Moment
    end: Moment
    record: Record


def run(world: World, config: str, resume: str = "") -> dict[str, Any]:
    """Trains as the run file's text `config` says; what each rank calls.

    resume: "" for a new run, "auto" for the newest checkpoint of the run's folder (a new run if there is none), or a
    checkpoint's path.  Returns {"steps", "loss"} of the last step.
    """
    cfg = loads(config)
    world.status(operation="set-up")
    session = sessions.build(world, cfg)
    start = _resume(session, resume)
    with _RunFolder(session, start) as folder:
        return _train(session, folder, start)


def _train(session: Session, folder: _RunFolder, start: int) -> dict[str, Any]:
    cfg, world = session.cfg, session.world
    save_every = cfg.run.save_every or session.steps
    under_way: _Made | None = None
    for step in range(start, session.steps):
        world.status(step=step, operation="training step")
        made = _step(session, step)
        if under_way is not None:
            folder.report(under_way)
        under_way = made
        saves = (step + 1) % save_every == 0 or step + 1 == session.steps
        if saves or world.device.type != "cuda":
            folder.report(made)
            under_way = None
        if saves:
            world.status(operation="saving")
            folder.save(step + 1)
    return {"steps": session.steps, "loss": folder.last_loss}


def _step(session: Session, step: int) -> _Made:
    device = session.world.device
    rate = optimizers.learning_rate(session.cfg.train, step, session.steps)
    optimizers.set_learning_rate(session.optimizer, rate)
    begin = now(device)
    batches = session.batches()
    result = train_step(
        session.model,
        session.optimizer,
        batches,
        session.groups.host,
        clip_norm=session.cfg.train.clip,
        dropout_key=session.dropout_key(step),
    )
    sequences = len(session.dataset.indices(session.cursor, session.cfg.train.global_batch))
    session.advance()
    tokens = sequences * session.cfg.data.sequence_length
    return _Made(step, result, rate, tokens, begin, now(device), session.meter.cut())


def _resume(session: Session, resume: str) -> int:
    """The number of steps already made."""
    if not resume:
        return 0
    root = sessions.checkpoints(session.cfg)
    folder, session.notes = _chosen(session.world, root, resume)
    if folder is None:
        session.notes.append(f"no checkpoint in {root}: a new run")
        return 0
    session.world.status(operation=f"reading {folder.name}")
    step = state.restore(session, folder)
    if step >= session.steps:
        raise ConfigError(
            f"{folder} has made all {session.steps} steps; ask for more with --set train.steps={session.steps * 2}."
        )
    session.notes.append(f"resumed from {folder}")
    return step


def _chosen(world: World, root: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from: rank 0 looks, the others are told, so that all read the same one."""
    if world.rank > 0:
        name, _ = json.loads(world.store.get("interlace/resume"))
        return Path(name) if name else None, []
    folder, notes = find(root) if resume == "auto" else _named(Path(resume))
    world.store.set("interlace/resume", json.dumps([str(folder) if folder else "", notes]))
    return folder, list(notes)


def _named(place: Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint that a path means: itself, or the newest of a run folder."""
    if not (place / "checkpoints").is_dir():
        return place, find(place, place)[1]
    folder, notes = find(place / "checkpoints")
    if folder is None:
        raise CheckpointError(f"{place} holds no checkpoint; give --resume another folder, or leave it out.")
    return folder, notes


class _RunFolder:
    """The run's files and its progress line; only rank 0 writes."""

    def __init__(self, session: Session, start: int) -> None:
        self.session = session
        self.start = start
        self.out = Path(session.cfg.run.out)
        self.writes = session.world.rank == 0
        self.last_loss = math.nan
        self.flops_per_token = spec.flops_per_token(session.model_cfg, session.cfg.data.sequence_length).total
        self.peak, self.peak_source = peak_flops(session.world.device, session.cfg.train.precision)
        self.origin: Moment | None = None
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _RunFolder:
        session, cfg = self.session, self.session.cfg
        self.writer = Writer(
            self.out / "checkpoints", session.world.rank, session.world.size, max(600.0, cfg.run.timeout), cfg.run.keep,
            _token(session),
        )  # fmt: skip
        if self.writes:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "run.toml").write_text(cfg.to_toml(), encoding="utf-8")
            (self.out / "error.json").unlink(missing_ok=True)
            self.metrics = self._open("metrics.jsonl")
            if not self.start:
                (self.out / "events.jsonl").unlink(missing_ok=True)
            self.board = _tensorboard(self.out) if cfg.run.tensorboard else None
            self.progress = Progress(session.steps, resumed_from=self.start)
            for note in _opening_lines(self):
                self.progress.note(note)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stack)
            if kind is None:
                self.session.world.status(operation="finishing the checkpoint")
                self.writer.finish()
            else:
                self.writer.close()
        if self.writes:
            with contextlib.suppress(OSError, ValueError):
                write_loss_curve(self.out / "metrics.jsonl", self.out / "loss.svg")
            if self.board is not None:
                self.board.close()
            self.progress.finish(f"run folder {self.out}" if kind is None else "")

    def _open(self, name: str) -> TextIO:
        """Opens a file of rows for appending; on resume, rows of steps that will be made again are dropped."""
        path = self.out / name
        kept = list(_rows_before(path, self.start)) if self.start else []
        path.write_text("".join(kept), encoding="utf-8")
        return self.stack.enter_context(open(path, "a", encoding="utf-8"))

    def save(self, step: int) -> None:
        self.writer.save(step, state.pieces(self.session), state.meta(self.session, step))

    def report(self, made: _Made) -> None:
        """Reads a step's numbers, refuses those that are not finite, and writes them down.  Collective."""
        session = self.session
        loss, norm = made.result.loss.item(), made.result.grad_norm.item()
        seconds = between(made.begin, made.end)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericsError(_not_finite(session, made.step, loss, norm), step=made.step, loss=loss, grad_norm=norm)
        self.last_loss = loss
        if (made.step + 1) % session.cfg.run.log_every and made.step + 1 < session.steps:
            return
        waited = self._mean_waited(made.record)
        if not self.writes:
            return
        rate = made.tokens / seconds
        row = {
            "step": made.step + 1,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": made.rate,
            "labels": made.result.labels,
            "step_s": seconds,
            "tokens_per_s": rate,
            "mfu": rate * self.flops_per_token / (session.world.size * self.peak) if self.peak else None,
            "memory": _memory(session.world.device),
            "waited": waited,
        }
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        if self.board is not None:
            for key in ("loss", "grad_norm", "learning_rate", "tokens_per_s"):
                self.board.add_scalar(key, row[key], made.step + 1)
        if made.step - self.start < EVENTS_FIRST or made.step % EVENTS_EVERY == 0:
            self._write_events(made, seconds)
        self.progress.step(row)

    def _mean_waited(self, record: Record) -> dict[str, float]:
        """Seconds stood still in the step, by axis, averaged over the ranks."""
        own = record.waited()
        axes = [axis for axis, size in self.session.mesh.axes if size > 1]
        if not axes:
            return {}
        values = torch.tensor([own.get(axis, 0.0) for axis in axes], dtype=torch.float64)
        everyone = all_gather(values, self.session.groups.host, name="waited").wait().view(-1, len(axes))
        return dict(zip(axes, everyone.mean(dim=0).tolist(), strict=True))

    def _write_events(self, made: _Made, seconds: float) -> None:
        self.origin = self.origin or made.begin
        at = between(self.origin, made.begin)
        flops = int(made.tokens * self.flops_per_token / self.session.world.size)
        whole = Event(0, "step", "compute", f"step {made.step + 1}", at, at + seconds, 0, flops)
        write_jsonl(self.out / "events.jsonl", [whole, *made.record.events(0, made.begin, at)], append=True)


def _opening_lines(folder: _RunFolder) -> Iterator[str]:
    session = folder.session
    cfg, model = session.cfg, session.model_cfg
    total = spec.total_parameters(model)
    yield f"model: {total:,} parameters, {model.num_layers} layers of {model.hidden_size}, {cfg.train.precision}"
    yield session.dataset.describe(cfg.train.global_batch)
    wire = "" if cfg.train.reduce_dtype == "fp32" else "; gradients travel in bf16 (train.reduce_dtype)"
    yield f"plan: {cfg.plan} on {session.world.size} ranks ({session.world.device.type}){wire}"
    if folder.peak:
        yield f"MFU: causal model FLOPs over {folder.peak / 1e12:.3g} TFLOP/s per rank ({folder.peak_source})"
    yield from session.notes


def _rows_before(path: Path, step: int) -> Iterator[str]:
    """The whole lines of rows up to `step`."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row.get("step", 0) <= step and line.endswith("\n"):
                yield line


def _token(session: Session) -> str:
    """A name for this run that all ranks share and no other run has."""
    own = torch.tensor([time.time_ns() if session.world.rank == 0 else 0])
    return f"{int(all_gather(own, session.groups.host, name='run token').wait().sum()):x}"


def _not_finite(session: Session, step: int, loss: float, norm: float) -> str:
    """Which rank and parameter went bad first, as far as this can still be seen."""
    bad = next(
        (
            place.name
            for place in session.model.placements(owned=True)
            if not bool(place.leaf.detach()[place.leaf_start : place.leaf_stop].isfinite().all())
        ),
        None,
    )
    found = torch.tensor([1 if bad else 0])
    ranks = all_gather(found, session.groups.host, name="search for NaN").wait().nonzero().flatten().tolist()
    where = f"; weights that are not finite now: {bad} on this rank, ranks {ranks}" if bad else ""
    return (
        f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}{where}; no checkpoint was written after "
        "it.  Resume from the one before with a lower learning rate, or look at the data of this step with "
        f"`interlace data --steps {step}:{step + 1}`."
    )


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """FLOP/s that count as 100 % MFU, and where the figure is from; measured with a product when not known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        topology = Topology.from_device_name(name)
        if topology is None:
            return 0.0, f"{name} is not in the table"
        return topology.flops_per_second(precision), name
    a = torch.randn(384, 384)
    a @ a
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2 * 384**3 / best, "measured here with a 384 x 384 x 384 product, all ranks at once"


def _memory(device: torch.device) -> int:
    """Peak bytes of this rank: allocated on the GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tensorboard(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("run.tensorboard = true needs TensorBoard; install interlace[tensorboard].") from None
    return SummaryWriter(str(out / "tensorboard"))
