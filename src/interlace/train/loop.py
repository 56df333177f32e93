"""The training loop: steps, numbers, checkpoints, and the run folder.

    run.toml          the whole configuration, as used; its first line names the table that products are chosen by
    schedule.csv      the table of the pipeline, where the plan names a file of one's own
    metrics.jsonl     a line a step: step, loss, grad_norm, learning_rate, tokens_per_s, mfu, memory, waited by axis;
                      with experts also `busiest` (the most chosen expert of any layer, in means of its layer), `idle`
                      (experts of all layers that no token chose) and `dropped` (share of choices without room);
                      with run.reproducible = "plan" the last one holds the digest of the weights
    events.jsonl      work, transfers and waits of the first steps and of every tenth one after, of the first 64 ranks,
                      on one clock; `interlace report` reads it
    data.json         the digest of the data, the files they are from, what was skipped, with the reason, and the sizes
                      of batches, where they changed on resume
    error.json        why the run failed, written by the command line
    checkpoints/      step-N/ as `interlace.checkpoint` writes it; aside-N/ holds those of later steps than the one from
                      which the run went on
    loss.svg          the loss curve

Numbers of a step are read from the device while the next step runs there, so that looking does not make it wait.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import os
import re
import resource
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from interlace import spec
from interlace.checkpoint import STEP, Writer
from interlace.collectives import Group, Record, all_gather, gather_bytes
from interlace.collectives.handle import Moment, between, now
from interlace.config import loads
from interlace.errors import ConfigError, NumericsError, ResourceError
from interlace.events import Event, to_jsonl
from interlace.models.decoder import Decoder
from interlace.report.draw import write_loss_curve
from interlace.schedule import FORMS
from interlace.streams import kept_by_graphs
from interlace.topology import Topology
from interlace.train import optimizer as optimizers
from interlace.train import session as sessions
from interlace.train import state
from interlace.train.contention import Contention
from interlace.train.progress import Progress
from interlace.train.session import Session
from interlace.train.step import StepResult, train_step
from interlace.world import World

EVENTS_EVERY = 10
SETTLED = 2  # steps after which what lives as long as the run is there: compiled blocks, states of the optimizer
EVENTS_FIRST = 10
EVENTS_RANKS = 64  # whose events are kept


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
    clock: tuple[torch.Tensor | None, torch.Tensor | None]  # notes at its begin and end
    digest: str = ""


def run(world: World, config: str, resume: str = "") -> dict[str, Any]:
    """Trains as the run file's text `config` says; what each rank calls.

    resume: see `state.find_checkpoint`.  Returns {"steps", "loss"} of the last step.
    """
    cfg = loads(config)
    world.status(operation="set-up")
    session = sessions.build(world, cfg)
    start, continues = _resume(session, resume)
    try:
        with _RunFolder(session, start, continues) as folder:
            return _train(session, folder, start)
    finally:
        gc.unfreeze()


def _train(session: Session, folder: _RunFolder, start: int) -> dict[str, Any]:
    cfg, world = session.cfg, session.world
    save_every = cfg.run.save_every or session.steps
    under_way: _Made | None = None
    for step in range(start, session.steps):
        if step == start + SETTLED:
            _settle()
        world.status(step=step + 1, operation="training step")
        session.meter.at_once = folder.contention.is_serial(step)
        made = _step(session, step, folder.tells_contention(step))
        if _replays(session):
            _look(session)
        if under_way is not None:
            folder.report(under_way)
        under_way = made
        saves = (step + 1) % save_every == 0 or step + 1 == session.steps
        if step + 1 == session.steps and session.is_fixed:
            made.digest = session.model.digest()
        if saves or world.device.type != "cuda":
            folder.report(made)
            under_way = None
        if saves:
            world.status(operation="saving")
            folder.save(step + 1)
    return {"steps": session.steps, "loss": folder.last_loss}


def _look(session: Session) -> None:
    """Raises Hang if a wait in what graphs replay gave up, a step or two later; nothing waits for it."""
    if session.groups["tp"].size > 1:
        from interlace.kernels import workspace  # needs Triton

        workspace.look(session.groups["tp"])


def _settle() -> None:
    """Takes all objects there are out of the garbage collector's sight, on every rank at the same step.

    A collection looks at all of them, 75 to 350 ms with PyTorch's compiler loaded, and ranks would collect at different
    moments, each while the others wait for it.  `run` gives them back, since its model holds itself.
    """
    gc.collect()
    gc.freeze()


def _step(session: Session, step: int, clocked: bool) -> _Made:
    device = session.world.device
    rate = optimizers.learning_rate(session.cfg.train, step, session.steps)
    optimizers.set_learning_rate(session.optimizer, rate)
    begin, noted = now(device), _clock(device) if clocked else None
    with session.meter.work("data", "next batch", device):
        batches = session.batches()
    result = train_step(
        session.model,
        session.optimizer,
        batches,
        session.groups.host,
        clip_norm=session.cfg.train.clip,
        dropout_key=session.dropout_key(step),
        leaves=session.leaves,
    )
    sequences = len(session.dataset.indices(session.cursor, session.cfg.train.global_batch))
    session.advance()
    tokens = sequences * session.cfg.data.sequence_length
    clocks = noted, _clock(device) if clocked else None
    return _Made(step, result, rate, tokens, begin, now(device), session.meter.cut(), clocks)


def _clock(device: torch.device) -> torch.Tensor | None:
    """Notes of the GPU's clock at this moment of the compute stream; None on a CPU."""
    if device.type != "cuda":
        return None
    from interlace.kernels import clock  # needs Triton

    return clock.read(device)


def _hertz(begin: torch.Tensor | None, end: torch.Tensor | None) -> float | None:
    if begin is None or end is None:
        return None
    from interlace.kernels import clock  # needs Triton

    return clock.hertz(begin, end)


def _resume(session: Session, resume: str) -> tuple[int, bool]:
    """The number of steps already made, and whether they were made in this run's folder."""
    if not resume:
        return 0, False
    folder, notes = _same_checkpoint(session, resume)
    session.notes += notes
    if folder is None:
        session.notes.append(f"no checkpoint in {state.checkpoints(session.cfg)}: a new run")
        return 0, False
    session.world.status(operation=f"reading {folder.name}")
    step = state.restore(session, folder)
    if step >= session.steps:
        more = f"epochs={session.cursor.epoch + 1}" if session.cfg.train.epochs else f"steps={2 * step}"
        raise ConfigError(
            f"{folder} has made {step} steps already, and the run asks for {session.steps}; ask for more, as with "
            f"--set train.{more}."
        )
    session.notes.append(f"resumed from {folder}")
    return step, state.is_own(session.cfg, folder)


def _same_checkpoint(session: Session, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from: rank 0 looks, the others are told, so that all read the same one."""
    world = session.world
    if world.rank > 0:
        with world.waiting("choice of the checkpoint"):
            name = world.store.get("interlace/resume").decode()
        return Path(name) if name else None, []
    folder, notes = state.find_checkpoint(session.cfg, resume, thorough=True)
    world.store.set("interlace/resume", str(folder) if folder else "")
    return folder, notes


class _RunFolder:
    """The run's files and its progress line; only rank 0 writes."""

    def __init__(self, session: Session, start: int, continues: bool) -> None:
        self.session = session
        self.start = start
        self.continues = continues
        self.out = Path(session.cfg.run.out)
        self.writes = session.world.rank == 0
        self.last_loss = math.nan
        self.flops_per_token = spec.flops_per_token(session.model_cfg, session.cfg.data.sequence_length).total
        self.peak, self.peak_source = peak_flops(session.world.device, session.cfg.train.precision)
        self.past = 0.0  # seconds of events before this run went on; rank 0 has read it
        self.contention = Contention(session.cfg.run.contention_every if _tells_contention(session) else 0)
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _RunFolder:
        session, cfg = self.session, self.session.cfg
        begun = _begun(session)
        self.writer = Writer(
            self.out / "checkpoints", session.world.rank, session.world.size, max(600.0, cfg.run.timeout), cfg.run.keep,
            f"{begun:x}",
        )  # fmt: skip
        self.origin, self.origin_at = _anchor(session.world.device, begun)
        if self.writes:
            self._refuse_another_run()
            with self._writing():
                self._leave_behind()
                self._open()
            self.board = _tensorboard(self.out) if cfg.run.tensorboard else None
            self.progress = Progress(session.steps, resumed_from=self.start)
            for note in _opening_lines(self):
                self.progress.note(note)
        past = all_gather(torch.tensor([self.past], dtype=torch.float64), session.groups.host, name="end of events")
        self.origin_at += past.wait()[0].item()
        self.stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = self._warned
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stack)
            if kind is None:
                self.session.world.status(operation="finishing the checkpoint")
                self.writer.close()
            elif kind is NumericsError:  # on every rank alike: the checkpoint before it is worth the wait
                self.writer.close()
        if self.writes:
            with contextlib.suppress(OSError, ValueError):
                write_loss_curve(self.out / "metrics.jsonl", self.out / "loss.svg")
            if self.board is not None:
                self.board.close()
            self.progress.finish(f"run folder {self.out}" if kind is None else "")

    def _refuse_another_run(self) -> None:
        """Again, now that the folder is locked: another run may have come and gone since the first look."""
        saved = sorted((self.out / "checkpoints").glob("step-*[0-9]"))
        if saved and not self.continues:
            raise ConfigError(
                f"{self.out} holds checkpoints of another run ({saved[-1].name}); go on with --resume auto, or choose "
                "another folder with --set run.out=FOLDER."
            )

    def _leave_behind(self) -> None:
        """Moves checkpoints of steps after the one that the run goes on from: they are of another continuation, and the
        next look for the newest one would take them."""
        root = self.out / "checkpoints"
        found = [(name, STEP.fullmatch(name)) for name in sorted(os.listdir(root))]
        later = [name for name, match in found if match and int(match[1]) > self.start]
        if later:
            aside = next(place for n in itertools.count(1) if not (place := root / f"aside-{n}").exists())
            aside.mkdir()
            for name in later:
                os.rename(root / name, aside / name)
            self.session.notes.append(f"note: saved after step {self.start}, now in {aside}: {', '.join(later)}")

    def _open(self) -> None:
        """Begins the files of rows anew; on resume, rows of the steps before stay, of those made again they go."""
        cfg, copy = self.session.cfg, self.out / "schedule.csv"
        if cfg.plan.pp > 1 and cfg.plan.schedule not in FORMS:
            copy.write_text(Path(cfg.plan.schedule).read_text(encoding="utf-8-sig"), encoding="utf-8")
            if not re.search(r"\s", str(copy)):  # the run goes on without the first file; plans are split at spaces
                cfg = replace(cfg, plan=replace(cfg.plan, schedule=str(copy)))
        table = f"# products chosen by the table {self.session.table}\n" if self.session.table else ""
        (self.out / "run.toml").write_text(table + cfg.to_toml(), encoding="utf-8")
        record = self.session.dataset.record() | {"spans": [asdict(span) for span in self.session.spans]}
        (self.out / "data.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        (self.out / "error.json").unlink(missing_ok=True)
        metrics, events = self.out / "metrics.jsonl", self.out / "events.jsonl"
        rows, past = [], []
        if self.continues:
            rows, past = _rows_until(metrics, self.start), _events_until(events, self.start)
        metrics.write_text("".join(rows), encoding="utf-8")
        events.write_text("".join(past), encoding="utf-8")
        self.past = max((json.loads(line)["end"] for line in past), default=0.0)
        self.metrics = self.stack.enter_context(metrics.open("a", encoding="utf-8"))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResourceError(
                f"cannot write to {self.out}: {error.strerror or error}; make room, or choose another run.out."
            ) from error

    def _warned(self, message: Warning | str, *where: Any, **more: Any) -> None:
        """A warning is one plain line, of rank 0."""
        if self.writes:
            self.progress.note(f"note: {message}")

    def save(self, step: int) -> None:
        self.writer.save(step, state.pieces(self.session), state.meta(self.session, step))

    def report(self, made: _Made) -> None:
        """Reads a step's numbers, refuses those that are not finite, and writes them down.  Collective."""
        session = self.session
        loss, norm = made.result.loss.item(), made.result.grad_norm.item()
        session.model.check_transfers()
        seconds = between(made.begin, made.end)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericsError(_not_finite(session, made, loss, norm), loss=loss, grad_norm=norm)
        self.last_loss = loss
        slowed = self._slowed(made, seconds)
        if (made.step + 1) % session.cfg.run.log_every and made.step + 1 < session.steps:
            return
        waited, slowest, experts = self._over_ranks(made.record, seconds, made.result.loads, slowed)
        events = b""
        if made.step - self.start < EVENTS_FIRST or made.step % EVENTS_EVERY == 0:
            events = self._events(made, seconds)
        if not self.writes:
            return
        rate = made.tokens / slowest
        row = (
            {
                "step": made.step + 1,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": made.rate,
                "labels": made.result.labels,
                "step_s": slowest,
                "tokens_per_s": rate,
                "mfu": rate * self.flops_per_token / (session.world.size * self.peak) if self.peak else None,
                "memory": _memory(session),
                "waited": waited,
            }
            | experts
            | ({"digest": made.digest} if made.digest else {})
        )
        with self._writing():
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
            if events:
                _append(self.out / "events.jsonl", events)
        if self.board is not None:
            for key in ("loss", "grad_norm", "learning_rate", "tokens_per_s"):
                self.board.add_scalar(key, row[key], made.step + 1)
        self.progress.step(row)
        if made.digest:
            self.progress.note(f"digest of the weights after step {made.step + 1}: {made.digest}")

    def _slowed(self, made: _Made, seconds: float) -> float | None:
        """This rank's contention in the step, if it is known and told."""
        if not self.tells_contention(made.step):
            return None
        return self.contention.note(made.step, seconds, sum(made.record.waited().values()), _hertz(*made.clock))

    def tells_contention(self, step: int) -> bool:
        """Whether a step's time is held against another's: a serial one, or one that is logged."""
        logged = (step + 1) % self.session.cfg.run.log_every == 0
        return self.contention.every > 0 and (self.contention.is_serial(step) or logged)

    def _over_ranks(
        self, record: Record, seconds: float, loads_LY: torch.Tensor | None, slowed: float | None
    ) -> tuple[dict[str, float], float, dict[str, float]]:
        """Seconds stood still in the step, by axis, averaged over the ranks; those of the slowest rank's step; and what
        the metrics tell of experts, of all layers, and of contention, the mean of the ranks."""
        own = record.waited()
        axes = [group.axis for group in self.session.groups if group.size > 1]
        load = []
        if self.session.model_cfg.num_experts:  # a stage of dense layers alone tells of none
            load = [0.0] * 4 if loads_LY is None else _load(loads_LY)
        stood = [own.get(axis, 0.0) for axis in axes]
        values = torch.tensor([seconds, *load, *stood, slowed or 0.0], dtype=torch.float64)
        everyone = values[None]
        if axes:
            everyone = all_gather(values, self.session.groups.host, name="waited").wait().view(-1, len(values))
        waited = everyone[:, 1 + len(load) : -1].mean(dim=0).tolist()
        experts: dict[str, float] = {}
        if slowed is not None:  # on all ranks alike
            experts = {"contention": max(0.0, everyone[:, -1].mean().item())}
        if load:
            busiest, idle, dropped, chosen = everyone[:, 1 : 1 + len(load)].unbind(dim=1)
            stages = self.session.cfg.plan.pp  # whose ranks have other layers; the others have all counted the same
            experts |= {"busiest": busiest.max().item(), "idle": round(stages * idle.mean().item())}
            if self.session.model_cfg.capacity_factor:
                experts["dropped"] = dropped.sum().item() / max(1.0, chosen.sum().item())
        return dict(zip(axes, waited, strict=True)), everyone[:, 0].max().item(), experts

    def _events(self, made: _Made, seconds: float) -> bytes:
        """The events of a step, as lines: of this rank, on rank 0 of all that are kept.  Collective."""
        world = self.session.world
        self.origin_at += between(self.origin, made.begin)  # in hops: a GPU's clock is exact over short times only
        self.origin = made.begin
        own = b""
        if world.rank < EVENTS_RANKS:
            at = self.origin_at
            flops = int(made.tokens * self.flops_per_token / world.size)
            whole = Event(world.rank, "step", "compute", f"step {made.step + 1}", at, at + seconds, 0, flops)
            own = to_jsonl([whole, *made.record.events(world.rank, made.begin, at)])
        return _brought_together(own, self.session.groups.host)


def _tells_contention(session: Session) -> bool:
    """A pipeline's ranks wait for each other's work; on a CPU transfers have no clock of their own; a graph replays its
    waits where they were when it was captured."""
    on_gpus = session.world.device.type == "cuda" and session.world.size > 1
    return on_gpus and session.cfg.plan.pp == 1 and not _replays(session)


def _replays(session: Session) -> bool:
    return isinstance(session.model.module, Decoder) and session.model.module.replays


def _load(loads_LY: torch.Tensor) -> list[float]:
    """The most loaded expert in mean loads of its layer, experts without a token, choices dropped, and all choices."""
    load_LX = loads_LY[:, :-1].double()
    mean_L = load_LX.mean(dim=1).clamp(min=1e-9)
    found = [
        (load_LX.amax(dim=1) / mean_L).max(),
        (load_LX == 0).sum().double(),
        loads_LY[:, -1].sum().double(),
        load_LX.sum(),
    ]
    values: list[float] = torch.stack(found).tolist()
    return values


def _opening_lines(folder: _RunFolder) -> Iterator[str]:
    session = folder.session
    cfg, model = session.cfg, session.model_cfg
    total = spec.total_parameters(model)
    yield f"model: {total:,} parameters, {model.num_layers} layers of {model.hidden_size}, {cfg.train.precision}"
    yield session.dataset.describe(cfg.train.global_batch)
    wire = "" if cfg.train.reduce_dtype == "fp32" else "; gradients travel in bf16 (train.reduce_dtype)"
    yield f"plan: {cfg.plan} on {session.world.size} ranks ({session.world.device.type}){wire}"
    if session.table:
        yield f"products of tp: overlap={cfg.plan.overlap}, by the table {session.table}"
    if folder.peak:
        yield f"MFU: causal model FLOPs over {folder.peak / 1e12:.3g} TFLOP/s per rank ({folder.peak_source})"
    if cfg.train.warmup >= session.steps:
        yield f"note: warmup takes {cfg.train.warmup} of {session.steps} steps, so the rate never reaches its peak"
    warmup, decay = cfg.train.warmup, optimizers.decay_steps(cfg.train, session.steps)
    if warmup < session.steps < warmup + decay:
        yield (
            f"note: warmup ({warmup}) and decay ({decay}) are more than the {session.steps} steps; the decay's rate "
            "counts once the warmup is over"
        )
    yield from session.notes


def _rows_until(path: Path, step: int) -> list[str]:
    """The whole lines of metrics of steps up to `step`."""
    return [line for line, row in _lines(path) if row.get("step", 0) <= step]


def _events_until(path: Path, step: int) -> list[str]:
    """The whole lines of events before those of a step beyond `step`; a step's own event comes first."""
    kept = []
    for line, event in _lines(path):
        if event.get("lane") == "step" and int(event["name"].split()[1]) > step:
            break
        kept.append(line)
    return kept


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines that hold a JSON object; a killed run may leave part of one."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        with contextlib.suppress(ValueError):
            if line.endswith("\n") and isinstance(row := json.loads(line), dict):
                yield line, row


def _append(path: Path, lines: bytes) -> None:
    with path.open("ab") as file:
        file.write(lines)


def _begun(session: Session) -> int:
    """When rank 0 began, in nanoseconds since 1970: known to all ranks, and the name of this run among others."""
    own = torch.tensor([time.time_ns() if session.world.rank == 0 else 0])
    return int(all_gather(own, session.groups.host, name="run token").wait().sum())


def _anchor(device: torch.device, begun: int) -> tuple[Moment, float]:
    """This moment, and how many seconds after `begun` it is by this host's calendar clock."""
    moment = now(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return moment, (time.time_ns() - begun) / 1e9


def _brought_together(own: bytes, host: Group) -> bytes:
    """What each rank gives, one after another."""
    packed = torch.frombuffer(bytearray(zlib.compress(own)), dtype=torch.uint8)
    count = torch.tensor([packed.numel()])
    sizes = all_gather(count, host, name="sizes of events").wait().tolist()
    everyone = all_gather(packed, host, sizes=sizes, name="events").wait().split(sizes)
    return b"".join(zlib.decompress(part.numpy().tobytes()) for part in everyone)


def _not_finite(session: Session, made: _Made, loss: float, norm: float) -> str:
    """The sentence about a step without numbers: whose loss it was, or which weights it has reached.  Collective."""
    own = torch.tensor([0 if math.isfinite(made.result.part.item()) else 1])
    flags = all_gather(own, session.groups.host, name="search for NaN").wait()
    ranks = ", ".join(map(str, flags.nonzero().flatten().tolist()))
    places = list(session.model.placements(owned=True))
    bad = [place.name for place in places if not place.leaf[place.leaf_start : place.leaf_stop].isfinite().all()]
    text = json.dumps([bad[:1], len(places) - len(bad)]).encode()
    found = [json.loads(part) for part in gather_bytes(text, session.groups.host, name="search for NaN in weights")]
    first = [name for names, _ in found for name in names]
    where = f", from the samples of rank {ranks}" if ranks else ""
    if not ranks and first and any(good for _, good in found):  # a step that was clipped has reached all
        where = f", in the gradient of {first[0]}"
    step = made.step
    return (
        f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}{where}; no checkpoint was written after "
        "it.  Resume from the last one, or begin again, with a lower learning rate; the data of this step are shown by "
        f"`interlace data {Path(session.cfg.run.out) / 'run.toml'} --steps {step}:{step + 1}`."
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


def _memory(session: Session) -> int:
    """Peak bytes of this rank: allocated on the GPU, resident in the process on a CPU."""
    device = session.world.device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + session.model.window_bytes + kept_by_graphs(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tensorboard(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("run.tensorboard = true needs TensorBoard; install interlace[tensorboard].") from None
    return SummaryWriter(str(out / "tensorboard"))
