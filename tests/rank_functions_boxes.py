"""What rank processes run for tests/collectives/test_boxes.py and for pipelines over boxes, on CPUs and GPUs."""

from __future__ import annotations

import itertools
import os
import random
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from interlace.collectives import Boxes, Line, Meter, make_groups, make_lines, receive, send
from interlace.errors import Hang
from interlace.mesh import Mesh
from interlace.parallel import pipeline as pipelines
from interlace.parallel.pipeline import Pipeline, Stage, pairs_of
from interlace.parallel.split import Switch, split
from interlace.schedule import Table, generate, lower
from interlace.train import stages, verify
from interlace.world import World
from rank_functions_pipeline import FEATURES, Part, Sleeping

Pair = tuple[int, int]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
SHAPES = ((3, 5), (0, 7), (1,), (), (129, 33), (2, 3, 5), (64,))
LARGEST = 8 * 129 * 33


def boxes_of(world: World, pairs: set[Pair], meter: Meter, slots: int = 3, timeout: float = 0.0) -> Boxes:
    mesh = Mesh((("pp", world.size),))
    limit = timeout or world.timeout
    group = make_groups(mesh, world.rank, world.device, world.timeout, meter)["pp"]
    lines = make_lines(mesh, world.rank, "pp", pairs, world.device, world.timeout, meter)
    return Boxes(group, pairs, lines, limit, slots)


def all_pairs(world: World) -> set[Pair]:
    return set(itertools.permutations(range(world.size), 2))


def message(pair: Pair, number: int) -> torch.Tensor:
    """Of every size and type in turn; no two lines send the same."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * pair[0] + pair[1])
    shape, dtype = SHAPES[number % len(SHAPES)], DTYPES[number % len(DTYPES)]
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


# --- messages --------------------------------------------------------------------------------------------------------


def messages(world: World, slots: int, count: int) -> int:
    """Every line at once, each rank at its own pace, receives posted early or late; how many came as they were sent."""
    boxes = boxes_of(world, all_pairs(world), Meter(), slots)
    boxes.require(LARGEST)
    warm(world)
    pace, equal = random.Random(world.rank), 0
    going, coming = [], []
    for number in range(count):
        for pair in boxes:
            if world.rank == pair[0]:
                going.append(send(message(pair, number).to(world.device), boxes[pair], name=f"send {number}"))
            else:
                expected = message(pair, number)
                handle = receive(expected.shape, expected.dtype, boxes[pair], name=f"receive {number}")
                coming.append((handle, expected))
            time.sleep(pace.random() * 2e-3)
        while coming and pace.random() < 0.6:
            handle, expected = coming.pop(0)
            equal += torch.equal(handle.wait().cpu(), expected)
        going = [sending for sending in going if not sending.is_done]
    equal += sum(torch.equal(handle.wait().cpu(), expected) for handle, expected in coming)
    for sending in going:
        sending.wait()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        assert all(sending.is_done for sending in going)
    boxes.close()
    return equal


def warm(world: World) -> None:
    """What fills fresh memory in tests is loaded before a stream waits."""
    for dtype in DTYPES:
        torch.empty(64, dtype=dtype, device=world.device)
    world.barrier("warm")


def bursts(world: World, slots: int) -> list[float]:
    """Both send more than there are slots before either receives; large ones, that are still copied when waited for."""
    boxes, size = boxes_of(world, all_pairs(world), Meter(), slots), 1 << 20
    boxes.require(4 * size)
    other = 1 - world.rank
    found = []
    early = [receive((size,), torch.float32, boxes[other, world.rank], name="first") for _ in range(2)]
    going = [send(torch.full((size,), float(n)), boxes[world.rank, other], name=str(n)) for n in range(7)]
    time.sleep(0.1)
    late = [receive((size,), torch.float32, boxes[other, world.rank], name="next") for _ in range(5)]
    for handle in (*early, *late):
        got = handle.wait()
        found.append(got[0].item() if bool((got == got[0]).all()) else -1.0)
    for sending in going:
        sending.wait()
    boxes.close()
    return found


def grows(world: World) -> list[bool]:
    """Small, large, small again: messages of a step before and after the memory has changed, and how much there is."""
    boxes, other, found = boxes_of(world, all_pairs(world), Meter(), 2), 1 - world.rank, []
    memory = []
    for step, size in enumerate((5, 3001, 17, 0, 3001)):
        boxes.require(4 * size)
        memory.append(boxes.nbytes)
        handles = [receive((size,), torch.float32, boxes[other, world.rank], name="x") for _ in range(4)]
        going = [
            send(torch.arange(size) * 10.0 + step + n + world.rank, boxes[world.rank, other], name="x")
            for n in range(4)
        ]
        for n, handle in enumerate(handles):
            found.append(torch.equal(handle.wait(), torch.arange(size) * 10.0 + step + n + other))
        for sending in going:
            sending.wait()
    boxes.close()
    return [*found, memory[0] < memory[1] == memory[2] == memory[4]]


def wraps(world: World) -> int:
    """Messages around the largest number of a word."""
    other, equal = 1 - world.rank, 0
    for before in ((1 << 31) - 3, (1 << 32) - 3):
        boxes = boxes_of(world, all_pairs(world), Meter(), 2)
        boxes.require(64)
        word = before - (1 << 32) if before >= 1 << 31 else before
        for (source, _), box in boxes.items():
            box._count = before
            (box._taken if source == world.rank else box._arrived).fill_(word)
        world.barrier("words are set")
        going = [send(torch.tensor([float(n)]), boxes[world.rank, other], name="x") for n in range(7)]
        for n in range(7):
            equal += receive((1,), torch.float32, boxes[other, world.rank], name="x").wait().item() == n
        for sending in going:
            sending.wait()
        boxes.close()
    return equal


def never_taken(world: World) -> str:
    """Rank 1 takes one message of four; what rank 0 is told."""
    boxes, said = boxes_of(world, all_pairs(world), Meter(), 2, timeout=0.5), ""
    boxes.require(64)
    if world.rank == 1:
        receive((3,), torch.float32, boxes[0, 1], name="first").wait()
    else:
        going = [send(torch.zeros(3), boxes[0, 1], name="x") for _ in range(4)]
        try:
            for sending in going:
                sending.wait()
        except Hang as error:
            said = error.message
        for use in (lambda: boxes.require(1), lambda: send(torch.zeros(3), boxes[0, 1], name="x")):
            try:
                use()
                said = "a box is used further"
            except Hang:
                pass
    world.barrier("over")
    return said


def a_gpu_that_stays_away(world: World) -> str:
    """Rank 1 never sends; rank 0, whose device waits, goes on in time and is told."""
    boxes, said = boxes_of(world, all_pairs(world), Meter(), 2, timeout=1.0), ""
    boxes.require(64)
    torch.zeros(3, device=world.device).sum().item()
    warm(world)
    if world.rank == 0:
        receive((3,), torch.float32, boxes[1, 0], name="nothing").wait().sum().item()
        try:
            boxes.check()
        except Hang as error:
            said = error.message
    world.barrier("over")
    return said


# --- pipelines -------------------------------------------------------------------------------------------------------


def serially(parts: list[Part], inputs: list[torch.Tensor]) -> float:
    total = 0.0
    for x_BTD in inputs:
        x_BTD = x_BTD.clone().requires_grad_()
        for part in parts:
            x_BTD = part(x_BTD)
        loss = x_BTD.square().sum()
        loss.backward()
        total += loss.item()
    return total


def inputs_of(shapes: list[Pair], seed: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, FEATURES, generator=generator).to(device) for shape in shapes]


def chains(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chain(world, **job) for job in jobs]


def chain(
    world: World, name: str, steps: list[list[Pair]], slots: int, chunks: int = 1, delay: float = 0.0, loads: int = 0
) -> dict[str, Any]:
    """Steps of these shapes through boxes (slots = 0: through the library's lines), and what differs from one process.

    delay: seconds that the last rank, each time up to, is late.  loads: so many steps go through the host, as the
    first do on a GPU.
    """
    device, meter = world.device, Meter()
    table = lower(generate(name, world.size, len(steps[0]), chunks))
    lines: Any
    if slots:
        lines = boxes_of(world, pairs_of(table.placement), meter, slots)
    else:
        mesh = Mesh((("pp", world.size),))
        lines = make_lines(mesh, world.rank, "pp", pairs_of(table.placement), device, world.timeout, meter)
    whole = [Part(stage).to(device) for stage in range(table.stages)]
    parts = {stage: Part(stage).to(device) for stage in table.stages_of(world.rank)}
    switch, pace, inputs = Switch(), random.Random(world.rank), list[torch.Tensor]()
    if table.splits_backward:
        for part in parts.values():
            split(part, switch)

    def work(stage: int) -> Stage:
        def compute(j: int, x: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            if world.rank == world.size - 1:
                dawdle(device, pace.random() * delay)
            y_BTD = parts[stage](inputs[j].clone().requires_grad_() if x is None else x)
            return (None, y_BTD.square().sum()) if stage == table.stages - 1 else (y_BTD, None)

        return Stage(compute, switch if table.splits_backward else None)

    works = {stage: work(stage) for stage in parts}
    made: dict[int, Pipeline] = {}
    error, apart = 0.0, 0.0
    for number, shapes in enumerate(steps):
        inputs[:] = inputs_of(shapes, number, device)
        if len(shapes) not in made:
            made[len(shapes)] = pipeline_of(world, generate(name, world.size, len(shapes), chunks), lines, meter)
        early = mock.patch.object(Pipeline, "_loads", return_value=True) if number < loads else nullcontext()
        with early:
            made[len(shapes)].run(works, [(*shape, FEATURES) for shape in shapes], torch.float32)
        loss = serially(whole, list(inputs))
        losses = [part.item() for work in works.values() for part in work.take_losses()]
        apart = max(apart, abs(sum(losses) / loss - 1)) if losses else apart
        for stage, part in parts.items():
            for ours, theirs in zip(part.parameters(), whole[stage].parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                error = max(error, ((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()).item())
            part.zero_grad()
        for part in whole:
            part.zero_grad()
    record = meter.cut()
    if slots:
        lines.close()
    return {
        "error": max(error, apart),
        "sent": meter.sent["send", "pp"],
        "calls": meter.calls["send", "pp"],
        "transfers": sorted((axis, name, nbytes) for axis, name, _, _, nbytes in record.transfers),
        "stalls": sorted((axis, name) for axis, name, *_ in record.stalls),
    }


def pipeline_of(world: World, table: Table, lines: dict[Pair, Line], meter: Meter) -> Pipeline:
    return Pipeline(lower(table), world.rank, lines, world.device, meter)


def dawdle(device: torch.device, seconds: float) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))
    else:
        time.sleep(seconds)


def one_fails(world: World, how: str) -> None:
    """Rank 1 never sends what rank 2 takes in, or is gone in the middle of a step."""
    table, meter = lower(generate("1f1b", world.size, 4)), Meter(world.waiting)
    boxes = boxes_of(world, pairs_of(table.placement), meter)
    pipeline = Pipeline(table, world.rank, boxes, world.device, meter)
    works = {world.rank: Sleeping(0.0, 0.0, 0.0)}
    world.status(step=3, operation="step")
    pipeline.run(works, [(1, 2, 3)] * 4, torch.float32)
    if world.rank == 1:
        fault = time.sleep if how == "sleeps" else lambda seconds: os._exit(7)
        with mock.patch.object(pipelines, "send", side_effect=lambda *args, **options: fault(60)):
            pipeline.run(works, [(1, 2, 3)] * 4, torch.float32)
    pipeline.run(works, [(1, 2, 3)] * 4, torch.float32)


def verify_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`verify.under_plan` for each job in turn, whose lines are boxes with `fault` slots."""
    found, made = [], list[Boxes]()
    for job in jobs:
        slots = int(job.pop("fault"))

        def in_boxes(group: Any, pairs: Any, lines: Any, timeout: float, slots: int = slots) -> Boxes:
            made.append(Boxes(group, pairs, lines, timeout, slots))
            return made[-1]

        with mock.patch.object(stages, "in_boxes", in_boxes):
            found.append(verify.under_plan(world, **job))
    assert len(made) == len(jobs)
    assert all(boxes.nbytes > 0 for boxes in made)
    return found
