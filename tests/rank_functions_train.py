"""What the ranks of the tests of training run: several runs one after another, faults planted in our own code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import rank_functions_roles
from interlace.collectives import Handle, handle, ordered, sum_scalars
from interlace.config import loads
from interlace.errors import NumericsError
from interlace.layout import split
from interlace.models.decoder import Block
from interlace.parallel import flat, owed, stages, tensor, units
from interlace.parallel import norm as norms
from interlace.parallel.data import DataParallel
from interlace.plan import stages as stage_plans
from interlace.train import loop, step, verify
from interlace.train import session as sessions
from interlace.train import stages as staging
from interlace.world import World


def train_all(world: World, jobs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """`loop.run` for each job in turn."""
    return [loop.run(world, **job) for job in jobs]


def serial_steps(world: World, configs: list[str]) -> list[int]:
    """Runs that tell contention here too; of each, how many transfers were waited for as they began."""
    plain, found = Handle.wait, [0]

    def wait(self: Handle[Any]) -> Any:
        found[-1] += self._wait is not None and sys._getframe(1).f_code is handle.start.__code__
        return plain(self)

    told = mock.patch.object(loop, "_tells_contention", return_value=True)
    with told, mock.patch.object(Handle, "wait", wait):
        for config in configs:
            loop.run(world, config)
            found.append(0)
    return found[:-1]


def refused(world: World, config: str) -> str:
    """The sentence with which a run ends that has no numbers left."""
    with pytest.raises(NumericsError) as caught:
        loop.run(world, config)
    return str(caught.value)


def traced_all(world: World, jobs: list[dict[str, str]], words: bool) -> None:
    """`train_all`, and with `words` an own module, traced by torch.compile, forward and backward, and run as traced.

    Each begins with nothing compiled, since what has been compiled too often runs plainly.  No piece is a transfer's.
    """
    traced = functools.partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", traced):
        for job in jobs:
            train_all(world, [job])
            assert has_pieces(Block.forward)
            assert not transfers_with_pieces()
            torch.compiler.reset()
        if words:
            rank_functions_roles.traced_words(world)
            assert not transfers_with_pieces()


def has_pieces(function: Callable[..., Any]) -> bool:
    """Whether the tracer holds graphs that begin in this function."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # slow to import

    return bool(_debug_get_cache_entry_list(function.__code__))


def transfers_with_pieces() -> list[str]:
    """Functions around and under collectives in which the tracer went on by itself."""
    functions = {
        made
        for name, module in list(sys.modules.items())
        if name.startswith(("interlace.collectives", "interlace.kernels"))
        for owner in (module, *filter(inspect.isclass, vars(module).values()))
        for value in list(vars(owner).values())
        if inspect.isfunction(made := inspect.unwrap(getattr(value, "__func__", value)))
    }
    ours = [made for made in functions if made.__module__.startswith(("interlace.collectives", "interlace.kernels"))]
    return sorted(f"{made.__module__}.{made.__qualname__}" for made in ours if has_pieces(made))


def verify_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`verify.under_plan` for each job in turn, with its fault planted."""
    found = []
    for job in jobs:
        with FAULTS[job.pop("fault", "none")](world.rank):
            found.append(verify.under_plan(world, **job))
    return found


def bits_all(world: World, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`verify.bits` for each job in turn, with its fault planted."""
    found = []
    for job in jobs:
        with FAULTS[job.pop("fault", "none")](world.rank):
            found.append(verify.bits(world, **job))
    return found


def faulty_bits(world: World, config: str, steps: int) -> dict[str, Any]:
    """`verify.bits` with the fault that the environment names."""
    with FAULTS[os.environ["INTERLACE_FAULT"]](world.rank):
        return verify.bits(world, config, steps)


def killed_at_step_7(world: World, config: str, resume: str = "") -> Any:
    """A run whose rank 1 gets SIGKILL in step 7."""

    def train_step(*arguments: Any, **options: Any) -> Any:
        if world.rank == 1 and world.mark.last.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return step.train_step(*arguments, **options)

    with mock.patch.object(loop, "train_step", train_step):
        return loop.run(world, config, resume)


def faulty(world: World, config: str, steps: int, folder: str) -> dict[str, Any]:
    """`verify.under_plan` with the fault that the environment names."""
    with FAULTS[os.environ["INTERLACE_FAULT"]](world.rank):
        return verify.under_plan(world, config, steps, folder)


def norms_of_ones(world: World, configs: list[str]) -> list[list[float]]:
    """Every gradient element 1: the norm, and the largest element left after clipping to half of it."""
    found = []
    for config in configs:
        model = sessions.build(world, loads(config)).model
        for leaf in model.leaves():
            leaf.grad = torch.zeros_like(leaf)
        for place in model.placements(owned=False):
            assert place.leaf.grad is not None
            place.leaf.grad[place.leaf_start : place.leaf_stop] = 1.0
        norm = sum_scalars(model.square_sum(), model.axes)[0].sqrt()
        gradients = [leaf.grad for leaf in model.leaves() if leaf.grad is not None]
        norms.scale(gradients, norms.factor(norm, norm.item() / 2))
        found.append([norm.item(), max(leaf.grad.max().item() for leaf in model.leaves() if leaf.grad is not None)])
    return found


def reductions(world: World, configs: list[str]) -> list[int]:
    """Gradient reductions in one step."""
    counts = []
    for config in configs:
        session = sessions.build(world, loads(config))
        session.meter.reset_counts()
        step.train_step(session.model, session.optimizer, session.batches(), session.groups.host)
        counts.append(session.meter.calls["reduce_scatter", "dp"])
    return counts


def sent_by_axis(world: World, configs: list[str]) -> list[dict[str, int]]:
    """Bytes that this rank sends along each axis in the second step, whose weights the first has changed."""
    found = []
    for config in configs:
        session = sessions.build(world, loads(config))
        for _ in range(2):
            session.meter.reset_counts()
            batches, leaves = session.batches(), session.leaves
            step.train_step(session.model, session.optimizer, batches, session.groups.host, leaves=leaves)
        sent: dict[str, int] = {}
        for (_, axis), nbytes in session.meter.sent.items():
            sent[axis] = sent.get(axis, 0) + nbytes
        found.append(sent)
    return found


def dies_at_step_2(world: World, config: str, resume: str = "") -> Any:
    """A run whose rank 1 raises in its third step, while a checkpoint may be under way."""

    def train_step(*arguments: Any, **options: Any) -> Any:
        if world.rank == 1 and world.mark.last.step == 2:
            raise ValueError("boom")
        return step.train_step(*arguments, **options)

    with mock.patch.object(loop, "train_step", train_step):
        return loop.run(world, config, resume)


def late_data(world: World, jobs: list[dict[str, str]], seconds: float) -> None:
    """Runs for which rank 1 makes its batches late."""
    plain = sessions.Session.batches

    def batches(session: sessions.Session) -> Any:
        if world.rank == 1:
            time.sleep(seconds)
        return plain(session)

    with mock.patch.object(sessions.Session, "batches", batches):
        for job in jobs:
            loop.run(world, **job)


def nan_at_step_2(world: World, config: str, resume: str = "") -> Any:
    """A run in whose third step the loss of rank 1's samples is not a number."""
    plain = step.forward_backward

    def forward_backward(*arguments: Any, **options: Any) -> tuple[torch.Tensor, int]:
        loss, labels = plain(*arguments, **options)
        return (loss * torch.nan if world.rank == 1 and world.mark.last.step == 2 else loss), labels

    with mock.patch.object(step, "forward_backward", forward_backward):
        return loop.run(world, config, resume)


# --- faults --------------------------------------------------------------------------------------------------------


def scaled_on_one_rank(rank: int) -> Any:
    """(a) What a rank has reduced is off by a thousandth."""
    plain = flat.Flat.reduce

    def reduce(self: flat.Flat, *arguments: Any) -> Handle[torch.Tensor]:
        handle = plain(self, *arguments)
        return Handle(lambda: handle.wait().mul_(1.001)) if rank == 1 else handle

    return mock.patch.object(flat.Flat, "reduce", reduce)


def left_out(rank: int) -> Any:
    """(b) One parameter's gradient is rank 0's alone."""
    plain = flat.Flat.reduce

    def reduce(self: flat.Flat, *arguments: Any) -> Handle[torch.Tensor]:
        for member in self.members:
            if member.name == "blocks.1.mlp.up.weight" and rank > 0:
                assert self.grad is not None
                self.grad[member.offset : member.offset + member.numel].zero_()
        return plain(self, *arguments)

    return mock.patch.object(flat.Flat, "reduce", reduce)


def own_buffers(rank: int) -> Any:
    """(c) zero=3 keeps every unit, each in a buffer of its own."""

    plain = units.choose_slots
    return mock.patch.object(units, "choose_slots", lambda placed, distance: plain(placed, 0))


@contextlib.contextmanager
def hidden_clones(rank: int) -> Iterator[None]:
    """(c) zero=3 keeps a copy of every unit out of sight."""
    hidden: dict[str, torch.Tensor] = {}
    plain = flat.Flat.show

    def show(self: flat.Flat) -> None:
        plain(self)
        if self.slot is not None:
            hidden[self.name] = self.slot.reserve()[: self.numel].clone()

    with mock.patch.object(flat.Flat, "show", show):
        yield


def mean_of_means(rank: int) -> Any:
    """(d) A rank divides by its own number of labels."""

    def all_gather(values: torch.Tensor, group: Any, **options: Any) -> Handle[torch.Tensor]:
        return Handle.done(values.repeat(group.size))

    return mock.patch.object(step, "all_gather", all_gather)


def stale_weights(rank: int) -> Any:
    """(e) Weights are not gathered again after an update."""
    return mock.patch.object(flat.Flat, "forget")


def drifting_replica(rank: int) -> Any:
    """(f) One replica's last update is off, which no loss shows any more."""
    plain = verify._collect

    def collect(world: World, folder: str, name: str, tensors: Any, stage: tuple[int, int]) -> int:
        bump = 1e-6 if rank == 1 and name == "weight-plan" else 0.0
        return plain(world, folder, name, ((key, tensor + bump) for key, tensor in tensors), stage)

    return mock.patch.object(verify, "_collect", collect)


def rotated(rank: int) -> Any:
    """(g) The parts of a round are added as another order of arrival would have it."""
    plain = ordered.add_in_order

    def add_in_order(parts: Any, accumulator: torch.Tensor, first: bool) -> torch.Tensor:
        return plain(parts.roll(-1, 0), accumulator, first)

    return mock.patch.object(ordered, "add_in_order", add_in_order)


def replicas_apart(rank: int) -> Any:
    """(h) The groups of hybrid sharding do not add their gradients up."""
    return mock.patch.object(flat, "then", lambda first, *rest: first)


def unpaid(rank: int) -> Any:
    """(i) What is owed over the tensor axis is not added up."""
    return mock.patch.object(owed, "pay", lambda flat, reduced, apart=None: reduced)


def paid_twice(rank: int) -> Any:
    """(j) It is added up twice."""
    plain = owed.pay

    def pay(run: flat.Flat, reduced: Handle[torch.Tensor], apart: Any = None) -> Handle[torch.Tensor]:
        once = plain(run, reduced, apart)
        once.wait()
        return plain(run, once, apart)

    return mock.patch.object(owed, "pay", pay)


def replicas_unpaid(rank: int) -> Any:
    """(k) Ranks that hold the same key and value heads keep their own gradients."""
    plain = owed.owed

    def without(run: flat.Flat) -> Any:
        return (pair for pair in plain(run) if not any(".k." in m.name or ".v." in m.name for m in pair[0]))

    return mock.patch.object(owed, "owed", without)


def bias_on_every_rank(rank: int) -> Any:
    """(l) A row product's bias is in every rank's part of the sum."""
    plain = tensor.Row.forward

    def forward(self: tensor.Row, x: torch.Tensor) -> torch.Tensor:
        made = plain(self, x)
        return made if self.bias is None else made + (self.axis.group.size - 1) * self.bias

    return mock.patch.object(tensor.Row, "forward", forward)


def masks_of_the_first_rows(rank: int) -> Any:
    """(m) Every rank draws dropout masks as if its rows were the first."""

    def rows(self: tensor.Axis, count: int) -> tuple[int, int]:
        start, stop = split(count, self.group.size, self.group.rank)
        return 0, stop - start

    return mock.patch.object(tensor.Axis, "rows", rows)


def tie_left_out(rank: int) -> Any:
    """(n) The two stages that share a weight do not add their gradients up."""
    return mock.patch.object(stages, "all_reduce", lambda tensor, *rest, **options: Handle.done(tensor))


def never_freed(rank: int) -> Any:
    """(o) Stages stay whole under zero=3."""
    return mock.patch.object(stages.StagedParallel, "_free", return_value=None)


def counted_by_every_stage(rank: int) -> Any:
    """(p) Labels are counted once for each stage."""
    plain = staging.Staged.forward_backward

    def forward_backward(self: Any, batches: Any, host: Any, *rest: Any) -> Any:
        real, size = staging.all_gather, self.group.size
        with mock.patch.object(staging, "all_gather", lambda t, *a, **o: real(t * size, *a, **o)):
            return plain(self, batches, host, *rest)

    return mock.patch.object(staging.Staged, "forward_backward", forward_backward)


def one_stage_at_a_time(rank: int) -> Any:
    """No fault but in the accounts: a rank has one stage whole at a time, and gathers again."""
    plain = stage_plans.lower
    return mock.patch.object(stage_plans, "lower", lambda *args, **rest: plain(*args, **(rest | {"keep": 1})))


FAULTS = {
    function.__name__: function
    for function in (
        scaled_on_one_rank,
        left_out,
        own_buffers,
        hidden_clones,
        mean_of_means,
        stale_weights,
        drifting_replica,
        rotated,
        replicas_apart,
        unpaid,
        paid_twice,
        replicas_unpaid,
        bias_on_every_rank,
        masks_of_the_first_rows,
        tie_left_out,
        never_freed,
        counted_by_every_stage,
        one_stage_at_a_time,
    )
} | {"none": functools.partial(contextlib.nullcontext)}


def held_between_passes(world: World, configs: list[str]) -> list[list[int]]:
    """Of each configuration: bytes of the gradients that a rank holds when each backward pass of a step begins."""
    found: list[list[int]] = []
    plain = DataParallel._begin_backward

    def looked(model: DataParallel) -> None:
        begins = model._phase != "backward"
        plain(model)
        if begins:
            found[-1].append(sum(grad.nbytes for flat in model._trainable for grad in flat.gradients()))

    with mock.patch.object(DataParallel, "_begin_backward", looked):
        for text in configs:
            found.append([])
            session = sessions.build(world, loads(text))
            step.forward_backward(session.model, session.batches(), session.groups.host)
    return found
