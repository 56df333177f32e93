"""Is the waiting that a run reports what its transfers cost?  The same step with and without them, side by side.

    torchrun --nproc-per-node 2 benchmarks/exposed_audit.py --model 1.2b --zero 1,3

Each form of the step runs twice in every round: as it is, and with every exchange of bytes left out (casts, sums and
updates stay).  What a rank reports must equal the difference of its two times within one point of the step:

    on          as it trains: transfers on the side stream
    off         overlap=off, each transfer waited for at once
    one stream  every transfer on the compute stream itself

To the waiting comes what a run reports as contention: how much more a step computes than one that waits for each
transfer at once (`train/contention.py`).  A GPU at its limit of power runs quicker the more it pauses, so the
difference is taken at the step's own clock: without transfers, the same cycles at the clock that the step with them
had.  `recording` is the same step without the meter's records: what reporting costs.  `stood` is all the compute stream
waited for, own work on the side stream too; what is left of the step beyond the serialised form's, `slower than off`,
is how much slower products run beside transfers and that work.  What was waited for most goes to the standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from data_parallel import Variant, ours, random_batch, wait

from interlace.collectives import Groups, Meter, Window, make_groups, ops, ordered
from interlace.collectives.handle import between, now
from interlace.config import load
from interlace.kernels import clock
from interlace.mesh import Mesh
from interlace.model_config import ModelConfig
from interlace.train.data import Batch

FORMS = ("on", "off", "one stream")
SMALL = 4096  # elements: numbers such as norms, of which every rank then takes its own


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Exchanges move nothing; what would arrive is zero, or was there before."""

    def gathered(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        if out.numel() <= 8 * SMALL:
            out.view(-1, own.numel()).copy_(own.expand(out.numel() // own.numel(), -1))

    def exchanged(
        group: object, flat: torch.Tensor, received: torch.Tensor, *sizes: object, **options: object
    ) -> list[dist.Work]:
        received.zero_()
        return []

    def no_pair(*given: object) -> bool:  # a function, since a Mock would hold every tensor that it was called with
        return False

    def nothing(*given: object, **options: object) -> list[dist.Work]:
        return []

    with (
        mock.patch.object(ops, "_all_gather_single", gathered),
        mock.patch.object(ordered, "exchange_parts", exchanged),
        mock.patch.object(ordered, "_is_pair", no_pair),  # two ranks' sums go by way of an exchange too
        mock.patch.object(Window, "exchange", nothing),
    ):
        yield


def on_compute_stream(groups: Groups) -> Groups:
    """The same groups, whose side stream is the compute stream."""
    device = groups["dp"].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    by_axis = {group.axis: group.like(stream=stream) for group in groups}
    return dataclasses.replace(groups, by_axis=by_axis)


def variant(form: str, zero: str, cfg: ModelConfig, groups: Groups, device: torch.device) -> Variant:
    if form == "one stream":
        groups = on_compute_stream(groups)
    return ours(f"ours-zero{zero}" + ("-off" if form == "off" else ""), cfg, groups, device)


Figures = tuple[float, float, float, float]
Waits = Counter[str]  # ms by what was waited for


def run(made: Variant, batch: Batch, steps: int, meter: Meter, device: torch.device, waits: Waits) -> Figures:
    """ms a step of this rank, ms that it says it waited, ms its compute stream stood, for its own work too, and GHz.

    The clock is the mean; 1 where there is none.  waits: more of them are added.
    """
    gc.collect()
    gc.freeze()
    wait(device)
    dist.barrier()
    meter.cut()
    begin, noted = now(device), clock.read(device)
    waited = stood = 0.0
    records = []
    for _ in range(steps):
        made.step(batch)
        records.append(made.record)
    end, noted_after = now(device), clock.read(device)
    wait(device)
    for record in records:
        if record is not None:
            waited += sum(record.waited().values())
            for event in record.events(0, begin, 0.0):
                if event.kind == "wait":
                    waits[event.name] += 1e3 * (event.end - event.begin) / steps
            stood += sum(max(0.0, between(since, until)) for *_, since, until in record.stalls)
    hertz = clock.hertz(noted, noted_after) or 1e9
    return 1e3 * between(begin, end) / steps, 1e3 * waited / steps, 1e3 * stood / steps, hertz / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1.2b")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--zero", default="1,3")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--transport", default="auto", choices=["auto", "library"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    limit = datetime.timedelta(seconds=90)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, device_id=device if on_gpu else None, timeout=limit)
    cfg = load(None, [f"model.max_positions={max(given.length, 2048)}"], preset=given.model).model_config()
    meter = Meter()
    groups = make_groups(Mesh((("dp", ranks),)), rank, device, 90, meter)
    batch = random_batch(cfg, given.sequences, given.length, rank)
    rows = []
    for zero in given.zero.split(","):
        for form in given.forms.split(","):
            made = variant(form, zero + ("-nccl" if given.transport == "library" else ""), cfg, groups, device)
            for _ in range(3):
                made.step(batch)
            found: dict[str, list[Figures]]
            found = {"with": [], "without": [], "unrecorded": [], "serial": []}
            waits, others = Waits(), Waits()
            for _ in range(given.rounds):
                found["with"].append(run(made, batch, given.steps, meter, device, waits))
                with left_out():
                    found["without"].append(run(made, batch, given.steps, meter, device, others))
                meter.at_once = True
                found["serial"].append(run(made, batch, given.steps, meter, device, others))
                meter.at_once = False
                meter.record = False
                found["unrecorded"].append(run(made, batch, given.steps, meter, device, others))
                meter.record = True
            step, waited, stood, ghz = (statistics.median(column) for column in zip(*found["with"], strict=True))
            bare, _, _, bare_ghz = (statistics.median(column) for column in zip(*found["without"], strict=True))
            plain = statistics.median(ms for ms, *_ in found["unrecorded"])
            alone = statistics.median((ms - stands) * at / ghz for ms, stands, _, at in found["serial"])
            slowed = max(0.0, step - waited - alone)
            mine = torch.tensor([step, bare, waited, stood, plain, slowed, ghz, bare_ghz])
            everyone = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(everyone, mine)
            rows += [(f"zero{zero}", form, r, *figures.tolist()) for r, figures in enumerate(everyone)]
            most = [f"{name} {ms / given.rounds:.2f}" for name, ms in waits.most_common(5)]
            print(f"zero{zero} {form}, rank {rank}, mean ms of a step: {', '.join(most)}", file=sys.stderr, flush=True)
            if rank == 0:
                table(given, rows, ranks)
            del made
            gc.unfreeze()  # what `run` froze is this form's model, its cycles among it
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    if rank == 0:
        print(given.out.read_text(encoding="utf-8") if given.out else "", flush=True)
    dist.destroy_process_group()


def table(given: argparse.Namespace, rows: list[tuple[Any, ...]], ranks: int) -> None:
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"# Reported waiting beside what transfers cost, {given.model}, {datetime.date.today()}, {ranks} x {machine}",
        "",
        f"torch {torch.__version__}, {given.sequences} x {given.length} tokens a rank, {given.rounds} rounds of "
        f"{given.steps} steps, `{' '.join(sys.argv)}`",
        "",
        "| plan | form | rank | step ms | without transfers ms | GHz, with and without | difference at its clock "
        "| waited | contention | off by, % of step | step / without | recording costs % | stood | slower than off |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    alone = {(plan, r): step - stood for plan, form, r, step, _, _, stood, *_ in rows if form == "off"}
    for plan, form, r, step, bare, waited, stood, plain, slowed, ghz, bare_ghz in rows:
        slower = f"{step - stood - alone[plan, r]:+.2f}" if (plan, r) in alone else "-"
        difference = step - bare * bare_ghz / ghz
        lines.append(
            f"| {plan} | {form} | {r} | {step:.2f} | {bare:.2f} | {ghz:.3f}, {bare_ghz:.3f} | {difference:.2f} | "
            f"{waited:.2f} | {slowed:.2f} | {100 * (waited + slowed - difference) / step:+.2f} | {step / bare:.3f} | "
            f"{100 * (step / plain - 1):+.2f} | {stood:.2f} | {slower} |"
        )
    text = "\n".join(lines)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
