"""What rank processes run for tests/collectives/test_window.py."""

from __future__ import annotations

import os
import random
import time
from typing import Any
from unittest import mock

import torch

from interlace.collectives import Group, Meter, add_parts, all_gather, make_groups, make_windows, reach, reduce_scatter
from interlace.collectives import window as windows
from interlace.collectives.ordered import add_in_order
from interlace.errors import PeerLost, ResourceError
from interlace.mesh import Mesh
from interlace.world import World


def group_of(world: World) -> Group:
    made = make_groups(Mesh((("dp", world.size),)), world.rank, torch.device("cpu"), 30.0, Meter())["dp"]
    assert reach(made)
    return made


def exchanges(world: World) -> int:
    """Gathers and reduce-scatters of new values each time, two windows in turn, each rank at its own pace."""
    group = group_of(world)
    size, count, equal = group.size, 7, 0
    made = make_windows(group, [4 * count * size, 2 * count * size])
    wide, narrow = made[0].own.view(torch.float32), made[1].own.view(torch.bfloat16)
    pace = random.Random(world.rank)
    for step in range(20):
        values = [torch.randn(count * size, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(size)]
        shards = [value[:count] for value in values]
        time.sleep(pace.random() * 4e-3)
        own = wide[group.rank * count : (group.rank + 1) * count]
        gathering = all_gather(own, group, out=wide, source=shards[group.rank], window=made[0])
        time.sleep(pace.random() * 4e-3)
        equal += torch.equal(gathering.wait(), torch.cat(shards))
        made[1].claim()
        narrow.copy_(values[group.rank])
        out = torch.full((count,), torch.nan)
        summing = reduce_scatter(narrow, group, out=out, window=made[1])
        part = slice(group.rank * count, (group.rank + 1) * count)
        expected = values[0].bfloat16()[part].float()
        for value in values[1:]:
            expected = expected + value.bfloat16()[part].float()
        equal += torch.equal(summing.wait(), expected)
    return equal


def rounds(world: World) -> int:
    """`add_parts` out of a window, its sums by an `add` that has to take the own row from where it is: eight parts."""
    group = group_of(world)
    size, count, last = group.size, 7, 8
    (made,) = make_windows(group, [2 * count * size])
    sent, accumulator = made.own.view(torch.bfloat16), torch.full((count,), torch.nan)
    parts = [torch.randn(count * size, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(last)]

    def add(
        own: torch.Tensor, rows: torch.Tensor, rank: int, target: torch.Tensor, scale: float = 1.0, /, *,
        onto: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        rows = rows.clone()
        rows[rank : rank + 1] = own  # no row if this rank has none
        return add_in_order(rows, target, first=not onto)

    for start in range(0, last, size):
        valid = min(size, last - start)
        made.claim()
        sent.copy_(parts[start + group.rank]) if group.rank < valid else sent.fill_(torch.nan)
        add_parts(sent, accumulator, group, valid=valid, first=start == 0, window=made, add=add).wait()
    whole = [part.float().view(size, count)[group.rank] for part in parts]
    expected = whole[0]
    for part in whole[1:]:
        expected = expected + part
    return int(torch.equal(accumulator, expected))


def late_reader(world: World) -> list[float]:
    """What rank 1, late, reads of rank 0's first content when rank 0 writes its second with and without a claim."""
    group, found = group_of(world), []
    for claims in (True, False):
        (made,) = make_windows(group, [4])
        value, read = made.own.view(torch.float32), torch.full((1,), torch.nan)
        value.fill_(1.0)
        (reading,) = made.exchange([(read.view(torch.uint8), 1 - group.rank, 0)])
        if group.rank == 1:
            time.sleep(0.3)
            reading.wait()
        else:
            reading.wait()
            if claims:
                made.claim()
            value.fill_(2.0)
        world.barrier("read")
        found.append(read.item())
    return found if group.rank == 1 else [1.0, 1.0]


def wraps(world: World) -> int:
    """Exchanges around the largest number of a word."""
    group, equal = group_of(world), 0
    for before in ((1 << 31) - 2, (1 << 32) - 2):
        (made,) = make_windows(group, [4])
        made._epoch = before
        for word in range(4):
            made._memory.signal(group.rank, word, before)
        world.barrier("words are set")
        for number in range(3):
            made.claim()
            made.own.view(torch.float32).fill_(10.0 * number + group.rank)
            read = torch.zeros(1)
            for reading in made.exchange([(read.view(torch.uint8), 1 - group.rank, 0)]):
                reading.wait()
            equal += read.item() == 10.0 * number + 1 - group.rank
        world.barrier("next")
    return equal


def missing_peer(world: World) -> Any:
    group = group_of(world)
    (made,) = make_windows(group, [4], timeout=0.3)
    assert isinstance(made._memory, windows._Host)
    message = ""
    if group.rank == 0:
        try:
            for reading in made.exchange([(torch.zeros(4, dtype=torch.uint8), 1, 0)]):
                reading.wait()
        except PeerLost as error:
            message = error.message
    world.barrier("over")
    return message


def without_memory(world: World) -> list[Any]:
    """One rank has no room: what every rank is told."""
    group, said = group_of(world), []
    takes = windows._Host.take

    def take(memory: windows._Host) -> None:
        if group.rank == 1:
            raise OSError(28, "No space left on device")
        takes(memory)

    with mock.patch.object(windows._Host, "take", take):
        try:
            make_windows(group, [100])
        except ResourceError as error:
            said.append(error.message)
    world.barrier("refused")
    said.append(str(len(list(windows.SHARED.glob(f"interlace-{os.getpid()}-*")))))
    (made,) = make_windows(group, [4])  # and the next try has it
    made.own.fill_(group.rank)
    read = torch.zeros(4, dtype=torch.uint8)
    for reading in made.exchange([(read, 1 - group.rank, 0)]):
        reading.wait()
    return [*said, read.tolist()]
