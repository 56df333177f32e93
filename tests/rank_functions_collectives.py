"""What the ranks of tests/collectives run.

Every rank can make every other rank's data (`given`), so results are compared with some that no transfer took part in.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from interlace.collectives import (
    Group,
    Handle,
    Meter,
    add_parts,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    make_groups,
    reduce_scatter,
    sum_scalars,
    then,
)
from interlace.launch import World
from interlace.layout import Layout, transition
from interlace.mesh import Mesh

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def given(case: int, rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over many magnitudes, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def in_order(parts: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """The sum, one rank after another."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total * scale if scale != 1.0 else total


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def some_groups(world: World) -> list[Group]:
    """Those of the whole world, of ranks 1 and 3, of ranks 0 to 2, and of this rank alone, where it is a member."""
    cpu, found = torch.device("cpu"), []
    for ranks in ((0, 1, 2, 3), (1, 3), (0, 1, 2)):
        made = dist.new_group(list(ranks))  # every rank makes every group
        if world.rank in ranks:
            found.append(Group("dp", ranks, ranks.index(world.rank), cpu, Meter(), made))
    return [*found, Group("dp", (world.rank,), 0, cpu, Meter())]


def moves(world: World) -> int:
    """All-gather, all-to-all and broadcast; the number of comparisons."""
    checks = 0
    for group in some_groups(world):
        n, me = group.size, group.rank
        for case, dtype in enumerate(DTYPES):
            for sizes in ([5] * n, [3, 0, 4, 1][:n], [0] * (n - 1) + [5], [0] * n, [1] * n):
                parts = [given(case, rank, sizes[rank], dtype) for rank in range(n)]
                whole = torch.cat(parts)
                assert same(all_gather(parts[me], group, sizes=sizes).wait(), whole)
                out = torch.empty(sum(sizes), dtype=dtype)
                assert all_gather(parts[me], group, sizes=sizes, out=out).wait().data_ptr() == out.data_ptr()
                assert same(out, whole)
                out = torch.empty(sum(sizes), dtype=dtype)  # in place: the shard is its own part of the result
                own = out.split(sizes)[me]
                all_gather(own, group, sizes=sizes, out=out, source=parts[me]).wait()
                assert same(out, whole)
                checks += 3
            assert same(
                all_gather(given(case, me, 6, dtype), group).wait(),
                torch.cat([given(case, r, 6, dtype) for r in range(n)]),
            )
            for kind in range(4):
                # Kind 3: everything rank 0 sends and receives is equal, what the others exchange is not.
                table = [
                    [(4, (i + 2 * j) % 4, 3 * (i == j), 2 + 3 * (i > 0 and j > 0))[kind] for j in range(n)]
                    for i in range(n)
                ]
                flats = [given(10 + kind, rank, sum(table[rank]), dtype) for rank in range(n)]
                receive = [table[rank][me] for rank in range(n)]
                got = all_to_all(flats[me], group, send_sizes=table[me], receive_sizes=receive).wait()
                assert same(got, torch.cat([flats[rank].split(table[rank])[me] for rank in range(n)]))
                checks += 1
            for root in range(n):
                for shape in ((), (0,), (3,), (2, 5)):
                    values = [given(20, rank, 10, dtype)[: torch.Size(shape).numel()].view(shape) for rank in range(n)]
                    tensor = values[me].clone()
                    assert broadcast(tensor, group, root=root).wait() is tensor
                    assert same(tensor, values[root])
                    checks += 1
        one = given(2, me, 14).view(2, 7)[1:, 3]  # keeps the stride of what it was cut from
        assert one.is_contiguous()
        assert one.stride() == (7,)
        assert same(all_gather(one, group).wait(), torch.cat([given(2, rank, 14)[10:11] for rank in range(n)]))
        shard = torch.empty(5, dtype=torch.bfloat16)  # a source is cast on its way into the shard
        whole = all_gather(shard, group, source=given(1, me, 5)).wait()
        assert same(whole, torch.cat([given(1, rank, 5).bfloat16() for rank in range(n)]))
        world.barrier("next group") if group.size == 4 else None
    return checks


def sums(world: World) -> int:
    """Reduce-scatter, all-reduce and sums of scalars, bit by bit; the number of comparisons."""
    checks = 0
    for group in some_groups(world):
        n, me = group.size, group.rank
        for case, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
            for scale in (1.0, 1.0 / 3):
                for sizes in ([5] * n, [3, 0, 4, 1][:n], [0] * (n - 1) + [5], [0] * n):
                    for wire in (None, torch.bfloat16):
                        flats = [given(case, rank, sum(sizes), dtype) for rank in range(n)]
                        travelled = [flat.to(wire if wire and n > 1 else dtype).to(dtype) for flat in flats]
                        expected = in_order([flat.split(sizes)[me] for flat in travelled], scale)
                        mine = flats[me].clone()
                        got = reduce_scatter(mine, group, sizes=sizes, wire=wire, scale=scale).wait()
                        assert same(got, expected), (dtype, scale, sizes, wire, got, expected)
                        assert same(mine, flats[me])
                        own = mine.split(sizes)[me]  # in place
                        assert reduce_scatter(mine, group, sizes=sizes, out=own, wire=wire, scale=scale).wait() is own
                        assert same(own, expected)
                        checks += 2
                flats = [given(5 + case, rank, 60 * n, dtype) for rank in range(n)]
                whole = in_order(flats, scale)
                mine = flats[me].clone()
                assert same(all_reduce(mine, group, scale=scale).wait(), whole)
                assert same(mine, whole)
                for cuts in ([20 * n, 40 * n], [n, 2 * n, 57 * n], [59 * n, n]):  # the same bits however it is cut
                    sizes = [*cuts, 60 * n - sum(cuts)]
                    handles = [all_reduce(piece, group, scale=scale) for piece in flats[me].clone().split(sizes)]
                    assert same(torch.cat([handle.wait() for handle in handles]), whole)
                    checks += 1
                rounded = in_order([flat.bfloat16().to(dtype) for flat in flats] if n > 1 else flats, scale)
                assert same(all_reduce(flats[me].clone(), group, wire=torch.bfloat16, scale=scale).wait(), rounded)
                checks += 3
        counts = sum_scalars(torch.tensor([1, me, 2**53 + 1]), [group])
        assert counts.tolist() == [n, n * (n - 1) // 2, n * (2**53 + 1)]
        value = given(9, me, 7, torch.float64)
        assert same(sum_scalars(value, [group]), in_order([given(9, rank, 7, torch.float64) for rank in range(n)]))
        checks += 2
    groups = make_groups(Mesh.parse("tp=2 dp=2"), world.rank, torch.device("cpu"), 30.0)
    assert {group.axis: group.ranks for group in groups} == {
        axis: groups.mesh.peers(world.rank, axis) for axis in ("tp", "dp")
    }
    value = sum_scalars(given(3, world.rank, 5), [groups["tp"], groups["dp"]])
    everyone = all_gather(value, groups.host).wait().view(4, 5)
    assert all(same(everyone[0], other) for other in everyone)
    assert same(value, in_order([in_order([given(3, r, 5) for r in pair]) for pair in ((0, 1), (2, 3))]))
    return checks + 2


def rounds(world: World) -> int:
    """`add_parts` over 4, 2 and 3 ranks against one sum from left to right; idle ranks of the last round bring NaN."""
    checked = 0
    for group in some_groups(world):
        if group.process_group is None:
            continue
        for parts, slice_size, gathered in itertools.product((1, 2, 5, 7), (1, 3, 64), (False, True)):
            count = slice_size * group.size
            expected = in_order([given(number, 0, count) for number in range(parts)])
            accumulator, handles = torch.full((slice_size,), torch.nan), []
            group.meter.reset_counts()
            for start in range(0, parts, group.size):
                valid = min(group.size, parts - start)
                own = given(start + group.rank, 0, count) if group.rank < valid else torch.full((count,), torch.nan)
                handle = add_parts(own, accumulator, group, valid=valid, first=start == 0)
                if gathered and start + valid == parts:
                    handle = then(handle, group, functools.partial(all_gather, accumulator, group))
                handles.append(handle)
            for handle in handles:
                found = handle.wait()
            assert same(accumulator, expected.view(group.size, -1)[group.rank])
            assert same(found, expected) if gathered else found is accumulator
            assert group.meter.sent["reduce_scatter", "dp"] == len(handles) * 4 * (count - slice_size)
            checked += 1
    return checked


def several_in_flight(world: World) -> None:
    """Started in one order, awaited in another, and twice."""
    group = some_groups(world)[0]
    n, me = group.size, group.rank
    handles: list[Handle[torch.Tensor]] = []
    for case in range(6):
        handles.append(all_gather(given(case, me, 7), group))
        handles.append(reduce_scatter(given(case, me, 3 * n), group))
        handles.append(broadcast(given(case, me, 4), group, root=case % n))
    for number in (*reversed(range(len(handles))), *range(len(handles))):
        case, kind = divmod(number, 3)
        expected = (
            torch.cat([given(case, rank, 7) for rank in range(n)]),
            in_order([given(case, rank, 3 * n).split(3)[me] for rank in range(n)]),
            given(case, case % n, 4),
        )[kind]
        assert same(handles[number].wait(), expected)


def sent(world: World, mesh: str, steps: list[list[str]], shape: list[int]) -> list[list[int]]:
    """Bytes this rank's meter counted, and those that the layouts say, for each (from, to)."""
    groups = make_groups(Mesh.parse(mesh), world.rank, torch.device("cpu"), 30.0)
    group, found = groups["dp"], []
    for before, after in steps:
        a, b = Layout.parse(before), Layout.parse(after)
        held = [[lay.local_numel(shape, groups.mesh, rank) for rank in group.ranks] for lay in (a, b)]
        for itemsize, dtype in ((4, torch.float32), (2, torch.bfloat16)):
            (step,) = transition(a, b, shape, groups.mesh, itemsize)
            group.meter.reset_counts()
            mine = given(1, world.rank, held[0][group.rank], dtype)
            if step.collective == "all_gather":
                all_gather(mine, group, sizes=held[0]).wait()
            elif step.collective == "reduce_scatter":
                reduce_scatter(mine, group, sizes=held[1]).wait()
            elif step.collective == "all_reduce":
                all_reduce(mine, group).wait()
            else:
                boxes = [[lay.local_ranges(shape, groups.mesh, rank) for rank in group.ranks] for lay in (a, b)]
                send, receive = ([overlap(boxes[one][group.rank], other) for other in boxes[1 - one]] for one in (0, 1))
                all_to_all(mine, group, send_sizes=send, receive_sizes=receive).wait()
            found.append([sum(group.meter.sent.values()), step.bytes_by_rank[world.rank]])
    return found


def overlap(a: Any, b: Any) -> int:
    """Elements that two boxes of one range a dimension have in common."""
    total = 1
    for ((first, last),), ((start, stop),) in zip(a, b, strict=True):
        total *= max(0, min(last, stop) - max(first, start))
    return total


def late_peer(world: World) -> dict[str, Any]:
    """Rank 1 comes a third of a second late; what each rank's meter says of it."""
    names: list[str] = []
    entered: Counter[str] = Counter()

    class Waiting:
        def __init__(self, name: str, detail: str) -> None:
            names.append(name)
            self.name = name

        def __enter__(self) -> None:
            entered[self.name] += 1

        def __exit__(self, *_: object) -> None:
            entered[self.name] -= 1

    meter = Meter(Waiting)
    group = make_groups(Mesh.parse("dp=3"), world.rank, torch.device("cpu"), 30.0, meter)["dp"]
    all_reduce(torch.ones(3), group).wait()
    world.barrier("together")
    meter.cut()
    origin = time.perf_counter()
    if world.rank == 1:
        time.sleep(0.35)
    handle = all_gather(torch.ones(4), group, name="gather blocks.7")
    handle.wait()
    record = meter.cut()
    events = record.events(world.rank, origin, 100.0)
    assert meter.cut().waited() == {}
    assert set(entered.values()) == {0}
    quiet = Meter(record=False)
    silent = Group("dp", group.ranks, group.rank, group.device, quiet, group.process_group)
    all_gather(torch.ones(4), silent).wait()
    assert quiet.cut().transfers == ()
    assert quiet.sent == {("all_gather", "dp"): 32}
    return {
        "waited": record.waited(),
        "events": [[e.lane, e.kind, e.name, e.begin - 100.0, e.end - 100.0, e.bytes] for e in events],
        "last": names[-1],
    }


def pairs(world: World) -> int:
    """Sums of two ranks on GPUs, which the library makes: those of the parts in rank order, bit for bit."""
    group = make_groups(Mesh.parse("dp=2"), world.rank, world.device, 60.0)["dp"]
    seen = 0
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 7, 4096, 1 << 20):
            for scale in (1.0, 0.25):
                parts = [given(seen, rank, 2 * count, dtype).to(world.device) for rank in range(2)]
                mine, total = parts[world.rank], (parts[0] + parts[1]) * scale
                other = torch.full_like(mine, float("nan"))
                for transfers in (group, group.in_order()):
                    assert same(all_reduce(mine, transfers, out=other, scale=scale).wait(), total)
                    assert same(all_reduce(mine.clone(), transfers, scale=scale).wait(), total)
                    own = total[world.rank * count :][:count]
                    assert same(reduce_scatter(mine, transfers, scale=scale).wait(), own)
                    in_place = mine.clone()
                    place = in_place[world.rank * count :][:count]
                    assert same(reduce_scatter(in_place, transfers, out=place, scale=scale).wait(), own)
                    assert same(all_gather(own.clone(), transfers).wait(), total)
                seen += 1
    return seen
