"""Proof that a plan computes the right numbers, and that its work is really split.

The same seed and data go through one process, which knows nothing of parallel code (`reference`), and through the plan
(`under_plan`).  Both step with plain SGD, eager, in fp32: AdamW would hide a constant factor and amplify rounding.
Compared are the loss of every step, every gradient of the first, and the final weights (`train.difference` says when
two tensors are equal).  Ranks that hold a tensor whole must hold the same bits.  And on every rank, resident bytes of
weights, gathered copies, gradients and optimizer, FLOPs of matrix products, and bytes sent by collective must lie
within 1 % of `plan.share`; a plan that secretly keeps everything fails there.  What fused products along tp send is
what the ways send that the plan chooses (`plan.overlap`), as every rank says; which those are is no part of the proof.

`exact` asks for more: the same bits.  Under `run.reproducible = "plan"` the steps as configured, AdamW included, run
under dp=1 and under the plan, and losses, norms and the digest of the weights must be equal.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from interlace import spec
from interlace.config import Config, ParallelPlan, loads
from interlace.errors import InterlaceError
from interlace.kernels.candidate import ways
from interlace.launch import run_local
from interlace.models.decoder import Decoder
from interlace.parallel.expert import is_fused
from interlace.plan.context import pieces, places
from interlace.plan.expert import Visits
from interlace.plan.overlap import Product, Way
from interlace.plan.share import overlapped, share
from interlace.train import optimizer as optimizers
from interlace.train import session as sessions
from interlace.train.data import IGNORED, Dataset
from interlace.train.difference import NUDGED, TOLERANCE, Difference, Truth, compare, relative
from interlace.train.step import forward_backward, steer, train_step, update
from interlace.world import World

RESIDENT_TOLERANCE = 0.01
LEARNING_RATE = 0.1
LOOKS = 20  # at the tensors in memory, a twentieth of a second apart
EPSILON = torch.finfo(torch.float32).eps
SLICE = 8  # sequences that the reference computes at a time
BITS = f"{__name__}:bits"
UNDER_PLAN = f"{__name__}:under_plan"  # what the plan's ranks run; a test of the proof itself sets a faulty one


@dataclass(frozen=True)
class Account:
    """A figure of a rank beside what layout and spec say."""

    rank: int
    what: str
    found: int
    expected: int

    @property
    def holds(self) -> bool:
        return abs(self.found - self.expected) <= RESIDENT_TOLERANCE * max(self.expected, 1)


@dataclass(frozen=True)
class Report:
    plan: ParallelPlan
    steps: int
    differences: tuple[Difference, ...]
    accounts: tuple[Account, ...]

    @property
    def passed(self) -> bool:
        return all(d.equal for d in self.differences) and all(a.holds for a in self.accounts)

    @property
    def largest(self) -> Difference:
        return max(self.differences, key=lambda d: math.inf if math.isnan(d.error) else d.error / d.allowed)

    @property
    def first_beyond(self) -> Difference | None:
        return next((d for d in self.differences if not d.equal), None)


def checked(cfg: Config) -> Config:
    """The configuration that `verify` runs: SGD at a constant rate, fp32, eager, the rest as given."""
    train = replace(
        cfg.train,
        optimizer="sgd",
        momentum=0.0,
        learning_rate=LEARNING_RATE,
        min_learning_rate=0.0,
        lr_schedule="constant",
        warmup=0,
        precision="fp32",
        reduce_dtype="fp32",
        compile=False,
        graphs=False,
    )
    return replace(cfg, train=train)


def verify(cfg: Config, steps: int, device: str = "cpu") -> Report:
    """Runs `steps` (at least 2) steps on one process and under `cfg.plan`, in processes of their own."""
    (report,) = sweep(cfg, [cfg.plan], steps, device)
    return report


def sweep(cfg: Config, plans: Sequence[ParallelPlan], steps: int, device: str = "cpu") -> Iterator[Report]:
    """`verify` of one configuration under several plans; the single process runs once."""
    cfg = checked(cfg)
    assert steps >= 2, steps
    one = replace(cfg, plan=ParallelPlan())
    with tempfile.TemporaryDirectory(prefix="interlace-verify-") as name:
        argument = {"steps": steps, "folder": name}
        run = functools.partial(run_local, device=device, timeout=cfg.run.timeout)
        alone = run(f"{__name__}:reference", 1, {"config": one.to_toml(), **argument})[0]

        @functools.cache
        def exactly() -> bool:
            try:
                run(f"{__name__}:truth", 1, {"config": one.to_toml(), **argument})
            except InterlaceError:  # no room for fp64: what differs differs
                return False
            return True

        for plan in plans:
            split = replace(cfg, plan=plan)
            for written in Path(name).glob("*-plan-*"):  # by a plan of more stages
                written.unlink()
            ranks = run(UNDER_PLAN, plan.world, {"config": split.to_toml(), **argument})
            yield judge(split, Path(name), alone, ranks, exactly)


def verdict(report: Report) -> str:
    """A report as one line."""
    largest, off = report.largest, [account for account in report.accounts if not account.holds]
    found = f"largest difference {largest.error:.1e}, in {largest.name}"
    if off:
        found += f"; rank {off[0].rank}: {off[0].what} {off[0].found:,}, expected {off[0].expected:,}"
    return f'{"equal" if report.passed else "WRONG"}  "{report.plan}"  {found}'


def judge(
    cfg: Config,
    folder: Path,
    alone: dict[str, Any],
    ranks: list[dict[str, Any]],
    exactly: Callable[[], bool] = lambda: False,
) -> Report:
    """Compares what `reference` and, by rank, `under_plan` returned and left in `folder`.

    exactly: runs the reference in fp64 into `folder`, once, and says whether it could; called when tensors differ.

    Differences stand in the order of the run: the first loss, gradients as backward comes past their parameters, the
    losses after it, weights.  So the first of them that is too large is nearest to where a plan goes wrong.
    """
    moved = cfg.train.learning_rate * len(alone["losses"])
    unit_of = {parameter.name: parameter.unit for parameter in spec.parameters(cfg.model_config())}
    truth = Truth(folder, exactly, unit_of, moved)
    losses = [
        Difference(f"loss of step {step + 1}", relative(abs(a - b), abs(b)))
        for step, (a, b) in enumerate(zip(ranks[0]["losses"], alone["losses"], strict=True))
    ]
    order = [parameter.name for parameter in reversed(spec.parameters(cfg.model_config()))]
    differences = losses[:1]
    for what in ("gradient", "weight"):
        differences += compare(sorted(folder.glob(f"{what}-plan*")), folder / f"{what}-reference", what, truth, order)
        size = len(ranks) // cfg.plan.pp
        differences += [
            Difference(f"{what}s on rank {rank}, beside rank {rank // size * size}'s", math.inf)
            for rank, found in enumerate(ranks)
            if found["digests"][what] != ranks[rank // size * size]["digests"][what]
        ]
        differences += losses[1:] if what == "gradient" else []
    visits = _visits(cfg, folder, alone["batch"]) if cfg.plan.ep > 1 else None
    accounts = [account for rank, found in enumerate(ranks) for account in _accounts(cfg, rank, found, alone, visits)]
    return Report(cfg.plan, len(alone["losses"]), tuple(differences), tuple(accounts))


def lines(report: Report) -> Iterator[str]:
    """The report as text; the last line is the verdict."""
    yield "both runs: fp32, eager, SGD at a constant rate, whatever the run file says of these"
    for account in report.accounts:
        mark = "" if account.holds else "   <- off by more than 1 %"
        yield f"rank {account.rank}  {account.what:<28}{account.found:>16,}   expected {account.expected:>16,}{mark}"
    largest, beyond = report.largest, report.first_beyond
    compared = f"{len(report.differences)} figures over {report.steps} steps"
    scale = "its layer's largest gradient" if largest.of_unit else "the tensor's largest value"
    yield f"largest difference: {largest.error:.2e} of {scale}, in {largest.name}"
    if noisy := [
        difference for difference in report.differences if TOLERANCE < difference.error <= difference.rounding
    ]:
        most = max(noisy, key=lambda difference: difference.error)
        yield (
            f"beyond {TOLERANCE:g}, but no more than rounding in one process may be ({most.rounding:.2e}): "
            f"{len(noisy)} figures, at most {most.error:.2e}, in {most.name}"
        )
    if beyond is not None:
        yield f"first beyond {beyond.allowed:.2g}: {beyond.name} ({beyond.error:.2e})"
    wrong = sum(not account.holds for account in report.accounts)
    if report.passed:
        yield f'verify: "{report.plan}" equals one process ({compared}), and its work is split as computed'
    elif beyond is not None:
        yield f'verify: "{report.plan}" does NOT equal one process ({compared})'
    else:
        yield f'verify: "{report.plan}" gives the right numbers but is not split as computed ({wrong} accounts are off)'


# --- the same bits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """What `bits` found under dp=1 and under the plan, there on the first rank that differs."""

    plan: ParallelPlan
    alone: dict[str, Any]
    split: dict[str, Any]

    @property
    def passed(self) -> bool:
        return bool(self.alone == self.split)

    @property
    def first_different(self) -> str:
        """In words; "" when all is equal."""
        for step, (a, b) in enumerate(zip(*(_figures(found) for found in (self.alone, self.split)), strict=True)):
            if a != b:
                return f"step {step + 1}"
        return "" if self.passed else "the weights"


def _figures(found: dict[str, Any]) -> list[tuple[str, str]]:
    return list(zip(found["losses"], found["norms"], strict=True))


def fixed(cfg: Config) -> Config:
    """The configuration that `exact` runs: as given, with the same bits for every plan."""
    return replace(cfg, run=replace(cfg.run, reproducible="plan"))


def exact(cfg: Config, steps: int, device: str = "cpu") -> Exact:
    """Runs `steps` steps under dp=1 and under `cfg.plan`, in processes of their own."""
    cfg = fixed(cfg)
    one = replace(cfg, plan=ParallelPlan(micro_batch_size=cfg.plan.micro_batch_size))
    run = functools.partial(run_local, BITS, device=device, timeout=cfg.run.timeout)
    (alone,), ranks = (run(c.plan.world, {"config": c.to_toml(), "steps": steps}) for c in (one, cfg))
    return Exact(cfg.plan, alone, next((found for found in ranks if found != alone), ranks[0]))


def exact_lines(report: Exact) -> Iterator[str]:
    """The report as text; the last line is the verdict."""
    yield f"{'':>6}  {'loss dp=1':<24}{'under the plan':<24}{'norm dp=1':<24}{'under the plan':<24}"
    pairs = zip(_figures(report.alone), _figures(report.split), strict=True)
    for step, ((loss, norm), (own_loss, own_norm)) in enumerate(pairs):
        figures = "".join(f"{float.fromhex(figure):<24.17g}" for figure in (loss, own_loss, norm, own_norm))
        yield f"{step + 1:>6}  {figures}".rstrip()
    yield f"digest dp=1            {report.alone['digest']}"
    yield f"digest under the plan  {report.split['digest']}"
    steps = len(report.alone["losses"])
    if report.passed:
        yield f'verify: "{report.plan}" gives the bits of dp=1 over {steps} steps'
    else:
        yield f'verify: "{report.plan}" does NOT give the bits of dp=1; they differ first in {report.first_different}'


# --- what the processes run ----------------------------------------------------------------------------------------


def truth(world: World, config: str, steps: int, folder: str) -> None:
    """`reference` in fp64, and in fp32 from weights that differ in their last bit: how far from fp64 fp32 may lie."""
    for name in ("exact", *NUDGED):
        reference(world, config, steps, folder, name)


def reference(world: World, config: str, steps: int, folder: str, name: str = "reference") -> dict[str, Any]:
    """The plain loop of one process: no engine, no collectives.  Writes gradients and weights to `folder`.

    name: "exact" is in fp64, from the same values; those of `NUDGED` are in fp32, from values one unit in the last
    place above or below.
    """
    cfg = loads(config)
    model_cfg = cfg.model_config()
    dataset = Dataset.open(cfg.data, model_cfg.vocab_size, cfg.run.seed)
    decoder = Decoder(model_cfg, device=world.device, dtype=torch.float64 if name == "exact" else torch.float32)
    values = sessions.initial_values(cfg, model_cfg, world.device)
    with torch.no_grad():
        for key, parameter in decoder.named_parameters():
            parameter.copy_(values(key, 0, parameter.numel()).view(parameter.shape))
    if name in NUDGED:
        nudge(decoder, NUDGED.index(name))
    sessions.fill_buffers(decoder, values, world.device)
    decays = {parameter.name: parameter.decay for parameter in spec.parameters(model_cfg)}
    named = dict(decoder.named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [p for n, p in named.items() if decays[n]], "weight_decay": cfg.train.weight_decay},
            {"params": [p for n, p in named.items() if not decays[n]], "weight_decay": 0.0},
        ],
        lr=cfg.train.learning_rate,
    )
    losses, batch, documents = [], 0, None
    chosen = _record_choices(decoder)
    cursor = dataset.cursor_at(0, cfg.train.global_batch)
    for step in range(steps):
        world.status(step=step, operation="reference step")
        indices = dataset.indices(cursor, cfg.train.global_batch)
        slices = [dataset.sequences(cursor.epoch, indices[i : i + SLICE]) for i in range(0, len(indices), SLICE)]
        labels = sum(int((part.labels_BT != IGNORED).sum()) for part in slices)
        loss = 0.0
        chosen.clear()
        for part in slices:
            total, _ = decoder.loss(*part.to(world.device), dropout_key=sessions.dropout_key(cfg, step))
            (total / max(labels, 1)).backward()
            loss += total.item() / max(labels, 1)
        losses.append(loss)
        if step == 0:
            _write(folder, f"gradient-{name}", {n: p.grad for n, p in named.items() if p.grad is not None})
        if step == 1:
            batch = len(indices)
            if model_cfg.num_experts:
                _write(folder, f"choices-{name}", {layer: torch.cat(parts) for layer, parts in chosen.items()})
            if dataset.separate:
                documents = _starts(dataset.sequences(cursor.epoch, indices).documents_BT)
        if cfg.train.clip > 0:
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), cfg.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loads_LY = decoder.take_loads()
        if loads_LY is not None:
            decoder.steer(loads_LY)
        cursor = dataset.advance(cursor, cfg.train.global_batch)
    _write(folder, f"weight-{name}", {n: p.detach() for n, p in named.items()} | dict(decoder.named_buffers()))
    return {"losses": losses, "batch": batch, "documents": documents}


def nudge(decoder: Decoder, seed: int) -> None:
    """Every weight to its neighbour in fp32 above or below, drawn at random; zeros stay."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            up = torch.randint(2, parameter.shape, generator=draw).to(parameter.device)
            parameter.mul_(1 + EPSILON * (2 * up - 1))


def _record_choices(decoder: Decoder) -> dict[str, list[torch.Tensor]]:
    """Filled by every forward pass: of each layer, by number, the experts chosen: [tokens k], one tensor a pass."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, module in decoder.named_modules():
        if name.endswith(".moe.dispatch"):
            layer = name.split(".")[1]
            module.register_forward_pre_hook(
                lambda module, args, layer=layer: found.setdefault(layer, []).append(args[2])
            )
    return found


def _starts(documents_BT: torch.Tensor) -> list[list[int]]:
    """Where documents begin in every sequence."""
    return [[t for t, number in enumerate(row) if t == 0 or number != row[t - 1]] for row in documents_BT.tolist()]


def under_plan(world: World, config: str, steps: int, folder: str) -> dict[str, Any]:
    """The same steps through the engine.  The second step, by when everything is in place, is accounted."""
    cfg = loads(config)
    gc.freeze()  # tensors that are there already are not this plan's
    session = sessions.build(world, cfg)
    model = session.model
    stage = (session.groups["pp"].rank, world.size // cfg.plan.pp)
    found: dict[str, Any] = {"losses": [], "digests": {}}
    for step in range(steps):
        world.status(step=step, operation="step under the plan")
        session.meter.reset_counts()
        if step == 1:
            session.meter.listen()
        counter = products(world.device)
        with counter if step == 1 else nullcontext():
            loss, _ = forward_backward(
                model, session.batches(), session.groups.host, session.dropout_key(step), session.leaves
            )
        if step == 0:
            found["digests"]["gradient"] = _collect(world, folder, "gradient-plan", model.whole_gradients(), stage)
        if step == 1:
            session.meter.settle()
            found["resident"] = _resident(session)
            found["flops"] = counter.flops + session.meter.flops
        total, _ = update(model, session.optimizer, loss, clip_norm=cfg.train.clip, leaves=session.leaves)
        steer(model)
        found["losses"].append(total.item())
        if step == 1:
            found["sent"] = {}
            for (collective, _), nbytes in session.meter.sent.items():
                found["sent"][collective] = found["sent"].get(collective, 0) + nbytes
            found["ways"] = _ways(session)
        session.advance()
    weights = itertools.chain(model.whole_parameters(), model.module.named_buffers())
    found["digests"]["weight"] = _collect(world, folder, "weight-plan", weights, stage)
    found["fused"] = is_fused(model.module)
    gc.unfreeze()
    return found


def _ways(session: sessions.Session) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """How each product of the step that may be fused runs on this rank: (`Product`, `Way`) as plain values."""
    cfg = session.cfg
    batch = len(session.dataset.indices(session.cursor, cfg.train.global_batch))
    products = overlapped(cfg, session.world.rank, batch)
    if not products:
        return []
    way = ways(session.groups["tp"], torch.float32, cfg.plan.overlap)
    return [(asdict(product), asdict(way(product, cfg.plan.tp))) for product in products]


def bits(world: World, config: str, steps: int) -> dict[str, Any]:
    """The steps as configured; losses and norms to the last bit, and the digest of the weights, on every rank."""
    session = sessions.build(world, loads(config))
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        world.status(step=step, operation="step for its bits")
        rate = optimizers.learning_rate(session.cfg.train, step, session.steps)
        optimizers.set_learning_rate(session.optimizer, rate)
        made = train_step(
            session.model,
            session.optimizer,
            session.batches(),
            session.groups.host,
            clip_norm=session.cfg.train.clip,
            dropout_key=session.dropout_key(step),
            leaves=session.leaves,
        )
        found["losses"].append(float(made.loss).hex())
        found["norms"].append(float(made.grad_norm).hex())
        session.advance()
    return found | {"digest": session.model.digest(everywhere=True)}


def _collect(
    world: World, folder: str, name: str, tensors: Iterator[tuple[str, torch.Tensor]], stage: tuple[int, int]
) -> int:
    """The first rank of every stage writes them; returns the digest of those on this rank.

    stage: its number, and the ranks of each.  Every rank takes part in the gathers.
    """
    writes = world.rank % stage[1] == 0
    kept, digest = {}, 0
    for key, tensor in tensors:
        values = tensor.detach().to("cpu", copy=True).contiguous()
        digest = zlib.crc32(values.view(-1).view(torch.uint8).numpy().data, digest)
        if writes:
            kept[key] = values
    if writes:
        _write(folder, f"{name}-{stage[0]}", kept)
    return digest


def _write(folder: str, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, f"{folder}/{name}")


def _resident(session: sessions.Session) -> dict[str, int]:
    """Bytes by kind, from the storages; "other" is every further tensor that was made since and lives on this rank.

    It leaves out what no plan splits: data and which positions of a sequence are here, biases and loads of routers, the
    words of windows and the gaps between them, and storages of a number a rank, or two: losses, norms, labels counted,
    and what stands for a weight that is away.

    gloo's threads let go of the last message's buffers a moment after the wait for it, hence several looks.
    """
    kinds: dict[str, list[torch.Tensor]] = session.model.resident_tensors()
    kinds["optimizer"] = [
        value
        for kept in session.optimizer.state.values()
        for value in kept.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    seen: set[int] = set()
    sizes = {}
    windows: Counter[int] = Counter()
    for window in session.model.own_windows():
        windows[window.untyped_storage().data_ptr()] += window.numel()
    for kind, tensors in kinds.items():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        storages |= {pointer: windows[pointer] for pointer in storages.keys() & windows.keys()}
        sizes[kind] = sum(nbytes for pointer, nbytes in storages.items() if pointer not in seen)
        seen |= storages.keys()
    elsewhere = [*session.dataset.tensors(), *session.model.peer_tensors(), *session.model.module.buffers()]
    elsewhere += [] if session.columns_T is None else [session.columns_T]
    if isinstance(session.model.module, Decoder):
        elsewhere += session.model.module.loads.values()
    if "interlace.kernels.workspace" in sys.modules:  # something fused has run
        workspace = sys.modules["interlace.kernels.workspace"]
        for axis in {"tp", "ep"} & session.groups.by_axis.keys():
            elsewhere += workspace.arenas(session.groups[axis]) + workspace.contexts(session.groups[axis])
    seen |= {t.untyped_storage().data_ptr() for t in elsewhere}
    known, numbers = sum(sizes.values()), 8 * max(session.world.size, 2)
    for _ in range(LOOKS):
        live = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
        sizes["other"] = sum(size for pointer, size in live.items() if pointer not in seen and size > numbers)
        if sizes["other"] <= RESIDENT_TOLERANCE * known:
            break
        time.sleep(0.05)
    return sizes


def _tensors() -> Iterator[torch.Tensor]:
    """Every tensor that the collector sees: not those frozen."""
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and not thing.is_meta:
            yield thing


class Products(TorchDispatchMode):
    """Counts FLOPs of the matrix products with weights; those of attention's core are counted by kernel, or not at all.

    As torch's FlopCounterMode would, which asks of every operation how it decomposes: with it a small step takes thrice
    the time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        first = FACTOR.get(func.overloadpacket)
        if first is not None:
            a, b = args[first : first + 2]
            self.flops += int(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return made


class ProductsOnCpu:
    """The same at the products' own kernels: a mode takes every operation through Python, a third of a small step."""

    def __init__(self) -> None:
        self.flops = 0

    def __enter__(self) -> ProductsOnCpu:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that these operations have kernels already
            for packet, first in FACTOR.items():
                for overload in (getattr(packet, name) for name in packet.overloads()):
                    if torch._C._dispatch_has_kernel_for_dispatch_key(overload._name, "CPU"):
                        counted = self._counted(torch.library.get_kernel(overload, "CPU"), first)
                        self._library.impl(overload, counted, "CPU", with_keyset=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._library._destroy()

    def _counted(self, kernel: Any, first: int) -> Callable[..., torch.Tensor]:
        def count(keys: Any, *args: Any, **options: Any) -> torch.Tensor:
            a, b = args[first : first + 2]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            return kernel.call_boxed(keys, *args, **options)

        return count


def products(device: torch.device) -> Products | ProductsOnCpu:
    """A counter of FLOPs: at kernels where PyTorch hands them out, and on a CPU, where a mode costs most."""
    return ProductsOnCpu() if device.type == "cpu" and hasattr(torch.library, "get_kernel") else Products()


# Of a product [N K] x [K M], that may be added to something: which argument is its first factor.
FACTOR = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.addmm_: 1}


# --- comparing -----------------------------------------------------------------------------------------------------


def _visits(cfg: Config, folder: Path, batch: int) -> Visits:
    """How often the tokens of each sequence and place along cp chose each expert in the accounted step."""
    num_experts, cut = cfg.model_config().num_experts, pieces(cfg.data.sequence_length, cfg.plan.cp)
    visits: list[list[list[list[int]]]] = []
    with safe_open(folder / "choices-reference", "pt") as file:
        for layer in range(cfg.model_config().num_layers):
            if not cfg.model_config().has_experts(layer):
                visits.append([])
                continue
            chosen_BTk = file.get_tensor(str(layer)).unflatten(0, (batch, -1))
            own = [[cut[piece] for piece in places(cfg.plan.cp, at)] for at in range(cfg.plan.cp)]
            each = [[torch.cat([row[a:b] for a, b in ranges]).flatten() for ranges in own] for row in chosen_BTk]
            visits.append(
                [[part.bincount(minlength=num_experts)[:num_experts].tolist() for part in row] for row in each]
            )
    return visits


def _accounts(
    cfg: Config, rank: int, found: dict[str, Any], alone: dict[str, Any], visits: Visits | None
) -> Iterator[Account]:
    given = cfg
    if cfg.plan.overlap in ("auto", "fused"):  # rows of experts go by all-to-all where peers are far
        given = replace(cfg, plan=replace(cfg.plan, overlap="fused" if found["fused"] else "auto"))
    chosen = {Product(**product): Way(**way) for product, way in found["ways"]}
    expected = share(given, rank, alone["batch"], alone["documents"], visits, chosen)
    resident = found["resident"]
    for kind in ("main", "copies", "gradients", "optimizer"):
        yield Account(rank, f"bytes of {kind}", resident[kind], getattr(expected, kind))
    known = expected.main + expected.copies + expected.gradients + expected.optimizer
    yield Account(rank, "bytes of all tensors", known + resident["other"], known)
    if visits is not None or not cfg.model_config().capacity_factor:  # what is dropped is not computed
        yield Account(rank, "FLOPs of products", found["flops"], expected.flops)
    for collective in sorted(expected.sent.keys() | found["sent"].keys()):
        yield Account(
            rank, f"bytes sent by {collective}", found["sent"].get(collective, 0), expected.sent.get(collective, 0)
        )
