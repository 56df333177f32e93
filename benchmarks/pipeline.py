"""Forward and backward of a step through pipeline schedules, beside `torch.distributed.pipelining`.

    torchrun --nproc-per-node N benchmarks/pipeline.py [--model 1.2b] [--micro-batches 8] [--batch 1] [--length 4096]
        [--schedules gpipe,1f1b,...] [--rounds 5] [--peers] [--library] [--sleep 40] [--out FILE]

Both run the same stages, cut alike, in bf16 on a GPU and fp32 on a CPU, over the same random tokens; weights are
whole, gradients add up in `.grad`, no optimizer runs.  Loss and gradient norm of ours are compared with the peer's
before anything is timed; then both run in turn.  Ours is shown with the bubble that it had in its median round (1 -
computing / step, the mean over ranks) beside that of its table, twice: with the mean times of its F, B, I and W of each
stage, and with the time that each action took.  Where its schedule splits backward, the peer's loss takes whole logits.
Peaks are of one side, without the weights of the other.

--sleep MS: stages that sleep MS for F, I and W instead, without a model, against the table alone, and against the table
with the times that those sleeps took, since a machine with other work to do wakes sleepers late.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.collectives import Group, Groups, Line, Meter, all_gather, in_boxes, make_groups, make_lines
from interlace.collectives.handle import Record, between
from interlace.config import SCHEDULES, ModelConfig, load
from interlace.launch import join
from interlace.mesh import Mesh
from interlace.models.decoder import Decoder, initialise
from interlace.models.stage import keep, view
from interlace.parallel.pipeline import Pipeline, Stage, pairs_of
from interlace.parallel.split import Switch, split
from interlace.plan.simulate import Costs, bubbles, makespan, simulate
from interlace.plan.stages import stages_of
from interlace.schedule import Action, Table, generate, lower, validate
from interlace.world import World

sys.path.append(str(Path(__file__).parent))
import peers.torch_pipelining as native

Lines = Mapping[tuple[int, int], Line]


@dataclass(frozen=True)
class Size:
    cfg: ModelConfig
    micro_batches: int
    batch: int
    length: int


def chunks_for(name: str) -> int:
    return 2 if name == "interleaved" else 1


class Cut:
    """This rank's stages of a decoder, and tokens for them; `Stage`s and the peer's modules are made of it."""

    def __init__(self, size: Size, table: Table, rank: int, device: torch.device) -> None:
        self.size, self.device, self.last = size, device, table.stages - 1
        cut = stages_of(size.cfg, table.stages, size.length)
        self.own = table.stages_of(rank)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        decoder = Decoder(size.cfg, device="meta", dtype=dtype)
        keep(decoder, [name for stage in self.own for name in cut[stage]])
        self.decoder = decoder.to_empty(device=device)
        initialise(self.decoder, size.cfg, 0)
        if device.type == "cuda" and self.decoder.head is not None:
            from interlace.kernels.softmax_rows import softmax_rows

            self.decoder.head.softmax_rows = softmax_rows
        self.parts = {stage: view(self.decoder, cut[stage]) for stage in self.own}
        generator = torch.Generator().manual_seed(1)
        shape = (size.micro_batches, size.batch, size.length + 1)
        tokens = torch.randint(0, size.cfg.vocab_size, shape, generator=generator).to(device)
        self.tokens, self.labels = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        self.hidden = torch.zeros(size.batch, size.length, size.cfg.hidden_size, dtype=dtype, device=device)
        self.scale = 1.0 / self.labels.numel()

    def compute(
        self, stage: int, whole_logits: bool = False
    ) -> Callable[[int, Tensor | None], tuple[Tensor | None, Tensor | None]]:
        """whole_logits: the loss by PyTorch's own function."""
        part, cross_entropy = self.parts[stage], torch.nn.functional.cross_entropy

        def run(j: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            context = part.context((self.size.batch, self.size.length), self.device)
            output = part.hidden(self.tokens[j] if x is None else x, context)
            if stage < self.last:
                return output, None
            if whole_logits:
                logits_NV = part.head(output, None).flatten(0, -2).float()
                return None, cross_entropy(logits_NV, self.labels[j].flatten(), reduction="sum") * self.scale
            return None, part.head(output, self.labels[j]) * self.scale

        return run

    def norm(self) -> Tensor:
        """Sum of squares of the gradients here; they are dropped."""
        grads = [p.grad for p in self.decoder.parameters() if p.grad is not None]
        total = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        self.decoder.zero_grad(set_to_none=True)
        return total


class Ours:
    def __init__(self, size: Size, name: str, groups: Groups, lines: Lines, meter: Meter) -> None:
        table = lower(generate(name, groups["pp"].size, size.micro_batches, chunks_for(name)))
        group = groups["pp"]
        self.cut, self.meter, self.group, self.table = Cut(size, table, group.rank, group.device), meter, group, table
        switch = Switch() if table.splits_backward else None
        if switch is not None:
            split(self.cut.decoder, switch)
        self.works = {stage: Stage(self.cut.compute(stage), switch) for stage in self.cut.own}
        self.pipeline = Pipeline(table, group.rank, lines, group.device, meter)
        self.shapes = [tuple(self.cut.hidden.shape)] * size.micro_batches

    def step(self) -> list[Tensor]:
        self.pipeline.run(self.works, self.shapes, self.cut.hidden.dtype)
        return [loss for work in self.works.values() for loss in work.take_losses()]

    def bubbles(self, record: Record, seconds: float) -> tuple[float, float, float]:
        """The bubble that was, that of the table with mean times of its actions, and with the time of each; means over
        ranks, in percent."""
        taken: dict[tuple[int, str], list[float]] = defaultdict(list)
        for _, _, text, begin, end in record.work:
            action = Action.parse(text)
            taken[action.stage, action.kind.value].append(between(begin, end))
        busy = sum(map(sum, taken.values()))
        means = torch.zeros(self.table.stages, 4, dtype=torch.float64)
        for (stage, kind), times in taken.items():
            means[stage, "FBIW".index(kind)] = statistics.fmean(times)
        device = self.group.device
        everyone = all_gather(means.view(-1).to(device), self.group).wait().view(self.group.size, -1).sum(0)
        F, B, IN, W = everyone.view(self.table.stages, 4).T.tolist()
        real = all_gather(torch.tensor([1 - busy / seconds], dtype=torch.float64, device=device), self.group).wait()
        tables = (Costs(F, IN, W, B if any(B) else None), taken_by(self.table, record, self.group))
        of_means, of_each = (statistics.fmean(bubbles(simulate(self.table, costs))) for costs in tables)
        return 100 * real.mean().item(), 100 * of_means, 100 * of_each


class Theirs:
    def __init__(self, size: Size, name: str, groups: Groups) -> None:
        group = groups["pp"]
        table = generate(name, group.size, size.micro_batches, chunks_for(name))
        self.cut = Cut(size, table, group.rank, group.device)
        # PyTorch 2.11's split backward cannot run an autograd.Function, such as the loss that never holds the logits.
        whole = table.splits_backward
        parts = {s: native.Part(self.cut.parts[s], self.cut.compute(s, whole), s == 0) for s in self.cut.own}
        example = self.cut.tokens[0], self.cut.hidden.clone().requires_grad_()
        self.run = native.build(name, parts, table.stages, size.micro_batches, example, group.device)

    def step(self) -> list[Tensor]:
        return list(self.run(self.cut.tokens.flatten(0, 1)))


def figures(variant: Ours | Theirs, groups: Groups) -> tuple[float, float]:
    """Loss and gradient norm of a step, over all ranks."""
    losses = variant.step()
    device = groups["pp"].device
    loss = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64, device=device)
    own = torch.stack([loss.detach(), variant.cut.norm()])
    total = all_gather(own, groups["pp"]).wait().view(-1, 2).sum(0)
    return total[0].item(), total[1].sqrt().item()


@dataclass
class Timed:
    """Of each round: seconds, peak bytes; of ours also what was recorded."""

    seconds: list[float]
    peaks: list[int]
    records: list[Record]

    @property
    def median(self) -> int:
        """The round of median length."""
        return sorted(range(len(self.seconds)), key=self.seconds.__getitem__)[len(self.seconds) // 2]


def timed(variants: list[Ours | Theirs], world: World, rounds: int) -> list[Timed]:
    """Each in turn, `rounds` times."""
    cuda = world.device.type == "cuda"
    found = [Timed([], [], []) for _ in variants]
    weights = [sum(p.nbytes for p in variant.cut.decoder.parameters()) for variant in variants]
    gc.collect()
    gc.freeze()  # collections would pause one rank, and the others would wait for it
    for number in range(rounds + 1):
        for at, variant in enumerate(variants):
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            if isinstance(variant, Ours):
                variant.meter.cut()
            world.barrier("round")
            begin = time.perf_counter()
            variant.step()
            if cuda:
                torch.cuda.synchronize()
            world.barrier("end of the round")
            if number:
                found[at].seconds.append(time.perf_counter() - begin)
                peak = torch.cuda.max_memory_allocated() if cuda else 0
                found[at].peaks.append(peak - (sum(weights) - weights[at] if cuda else 0))
                if isinstance(variant, Ours):
                    found[at].records.append(variant.meter.cut())
            variant.cut.decoder.zero_grad(set_to_none=True)
    gc.unfreeze()
    return found


class Taken(Costs):
    """Seconds of each action, as they were."""

    def __init__(self, taken: Mapping[str, float]) -> None:
        super().__init__((), (), ())
        self.__dict__["taken"] = taken

    def seconds(self, action: Action) -> float:
        return self.__dict__["taken"].get(str(action), 0.0)  # type: ignore[no-any-return]


class Sleeping:
    """F, I and W take `seconds` each and compute nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.x = seconds, torch.zeros(1)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        time.sleep(self.seconds)
        return self.x

    def backward(self, micro_batch: int, gradient: Tensor | None, *, split: bool) -> Tensor:
        time.sleep(self.seconds * (1 if split else 2))
        return self.x

    def weights(self, micro_batch: int) -> None:
        time.sleep(self.seconds)


def taken_by(table: Table, record: Record, group: Group) -> Taken:
    """What each action of the table took, on the rank that ran it."""
    names = [str(action) for row in table.rows for action in row if action.is_compute]
    here = {text: between(begin, end) for _, _, text, begin, end in record.work}
    own = torch.tensor([here.get(name, 0.0) for name in names], dtype=torch.float64, device=group.device)
    return Taken(dict(zip(names, all_gather(own, group).wait().view(group.size, -1).sum(0).tolist(), strict=True)))


def sleep(world: World, name: str, micro_batches: int, seconds: float, lines: Lines, group: Group) -> str:
    meter = group.meter
    table = lower(generate(name, world.size, micro_batches, chunks_for(name)))
    pipeline = Pipeline(table, world.rank, lines, torch.device("cpu"), meter)
    works = {stage: Sleeping(seconds) for stage in table.stages_of(world.rank)}
    taken = []
    for _ in range(3):
        world.barrier("begin")
        begin = time.perf_counter()
        pipeline.run(works, [(1,)] * micro_batches, torch.float32)
        world.barrier("end")
        step = time.perf_counter() - begin
        taken.append((step, makespan(simulate(table, taken_by(table, meter.cut(), group)))))
        meter.cut()
    expected = makespan(simulate(table, Costs.even(table.stages, seconds, seconds, seconds)))
    most = max(validate(table).ranks) / len(table.stages_of(0))
    best, own = min(taken)
    over = f"{100 * (best / expected - 1):+.1f} % | {1e3 * own:.0f} | {100 * (best / own - 1):+.1f} %"
    return f"| {name} | {1e3 * expected:.0f} | {1e3 * best:.0f} | {over} | {most:g} |"


def row(name: str, size: Size, world: World, groups: Groups, meter: Meter, lines: Lines, args: Any) -> str:
    ours = Ours(size, name, groups, lines, meter)
    variants: list[Ours | Theirs] = [ours]
    loss, norm = figures(ours, groups)
    if args.peers and name in native.NAMES:
        variants.append(Theirs(size, name, groups))
        their_loss, their_norm = figures(variants[1], groups)
        allowed = 2e-2 if world.device.type == "cuda" else 1e-5
        apart = max(abs(loss / their_loss - 1), abs(norm / their_norm - 1))
        assert apart < allowed, f"{name}: loss {loss} and {their_loss}, norm {norm} and {their_norm}"
    found = timed(variants, world, args.rounds)
    own = found[0]
    shown = ours.bubbles(own.records[own.median], own.seconds[own.median])
    words = [name, _ms(own.seconds), f"{max(own.peaks) / 2**30:.1f}", *(f"{bubble:.1f}" for bubble in shown)]
    if len(found) == 2:
        theirs = found[1]
        ratio = statistics.median(theirs.seconds) / statistics.median(own.seconds)
        words += [_ms(theirs.seconds), f"{max(theirs.peaks) / 2**30:.1f}", f"{ratio:.3f}"]
    else:
        words += ["", "", ""]
    del ours, variants
    gc.collect()
    return "| " + " | ".join(words) + " |"


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f})"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model, 0 = its own")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--library", action="store_true", help="send by NCCL also where copy engines can")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    world = join(300.0)
    meter = Meter(world.waiting)
    mesh = Mesh((("pp", world.size),))
    groups = make_groups(mesh, world.rank, world.device, 300.0, meter)
    every = {pair for name in ("1f1b", "interleaved", "zbv") for pair in
             pairs_of(generate(name, world.size, 1, chunks_for(name)).placement)}  # fmt: skip
    device = torch.device("cpu") if args.sleep else world.device
    lines = make_lines(mesh, world.rank, "pp", every, device, 300.0, meter)
    carried = lines if args.library or args.sleep else in_boxes(groups["pp"], every, lines, 300.0)
    names = args.schedules.split(",")
    if args.sleep:
        head = [
            "| schedule | table ms | step ms | | table of its own sleeps ms | | micro-batches held |",
            "|---|---|---|---|---|---|---|",
        ]
        rows = (sleep(world, name, args.micro_batches, args.sleep / 1e3, lines, groups["pp"]) for name in names)
    else:
        words = [f"model.num_layers={args.layers}"] if args.layers else []
        cfg = load(None, preset=args.model, overrides=words).model_config()
        size = Size(cfg, args.micro_batches, args.batch, args.length)
        head = [
            "| schedule | ours ms (range) | GiB | bubble % | of its table, means % | each its own % "
            "| torch ms (range) | GiB | torch / ours |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        rows = (row(name, size, world, groups, meter, carried, args) for name in names)
    where = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    title = f"{datetime.date.today()}, {world.size} ranks, {where}, torch {torch.__version__}: {' '.join(sys.argv[1:])}"
    found = [title, "", *head]
    for line in found if world.rank == 0 else ():
        print(line, flush=True)
    for line in rows:
        found.append(line)
        if world.rank == 0:
            print(line, flush=True)
    if args.out and world.rank == 0:
        args.out.write_text("\n".join(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
