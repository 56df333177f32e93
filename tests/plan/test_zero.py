"""The integers of a ZeRO step: cuts, buffers, static lists and the number of gathers, without a process."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.layout import Layout
from interlace.mesh import Mesh
from interlace.plan.zero import (
    Item,
    backward_list,
    chunk_elements,
    cut,
    forward_list,
    gathers_per_step,
    member_layout,
    slot_sizes,
    slots,
)

sizes_lists = st.lists(st.integers(0, 70_000), min_size=0, max_size=6)
ranks = st.integers(1, 9)


def test_the_example_of_the_docstring() -> None:
    made = cut((4, 40, 1), ranks=2)
    assert (made.chunk, made.offsets, made.total) == (32, (0, 32, 96), 128)
    assert member_layout("N M", made, 1) == "(N M)/dp:32@1/4"


def test_a_chunk_is_about_a_4096th_within_32_and_4096() -> None:
    assert [chunk_elements(n) for n in (0, 1, 8 * 4096, 2**17, 2**18, 2**24, 2**24 - 1, 2**40)] == [
        32, 32, 32, 32, 64, 4096, 2048, 4096,
    ]  # fmt: skip


@given(sizes_lists, ranks)
def test_a_cut_holds_every_member_apart_on_chunk_borders_and_divides(sizes: list[int], ranks: int) -> None:
    made = cut(sizes, ranks)
    assert made.total > 0
    assert made.total % (made.chunk * ranks) == 0
    ends = [offset + size for offset, size in zip(made.offsets, sizes, strict=True)]
    assert all(offset % made.chunk == 0 for offset in made.offsets)
    assert all(end <= following for end, following in zip(ends, [*made.offsets[1:], made.total], strict=False))
    padding = made.total - sum(math.ceil(size / made.chunk) * made.chunk for size in sizes)
    assert padding < made.chunk * ranks or made.total == made.chunk * ranks
    assert made.chunk == cut(sizes, ranks + 1).chunk, "sums over chunks must not depend on the number of ranks"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), min_size=1, max_size=5), ranks)
def test_the_layouts_of_the_members_tile_each_parameter_exactly(shapes: list[tuple[int, int]], ranks: int) -> None:
    made = cut([n * m for n, m in shapes], ranks)
    mesh = Mesh((("dp", ranks),))
    share = made.total // ranks
    for index, shape in enumerate(shapes):
        layout = Layout.parse(member_layout("N M", made, index))
        end = 0
        for rank in range(ranks):
            ((start, stop),) = layout.local_ranges(shape, mesh, rank)[0]
            first, last = rank * share - made.offsets[index], (rank + 1) * share - made.offsets[index]
            numel = shape[0] * shape[1]
            held = (min(max(first, 0), numel), min(max(last, 0), numel))
            assert (start, stop) == held or (start == stop and held[0] == held[1])
            if start < stop:
                assert start == end
                end = stop
        assert end == shape[0] * shape[1]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5000)), min_size=1, max_size=12), st.integers(1, 4))
def test_no_buffer_serves_two_units_closer_than_the_distance(steps: list[tuple[int, int]], distance: int) -> None:
    positions, at = [], 0
    for step, _ in steps:
        at += step
        positions.append(at)
    totals = [total for _, total in steps]
    chosen = slots(totals, positions, distance)
    for i, slot in enumerate(chosen):
        for j in range(i):
            if chosen[j] == slot:
                assert positions[i] - positions[j] >= distance
                assert max(totals[i], totals[j]) < 2 * min(totals[i], totals[j])
    sizes = slot_sizes(totals, chosen)
    assert set(chosen) == set(range(len(sizes)))
    assert list(sizes) == [
        max(t for t, c in zip(totals, chosen, strict=True) if c == slot) for slot in range(len(sizes))
    ]


def test_equal_blocks_take_turns_in_two_buffers_beside_the_embedding() -> None:
    assert slots([100, 40, 40, 40, 40], range(5), 2) == (0, 1, 2, 1, 2)
    assert slots([40, 40, 40, 40], range(4), 3) == (0, 1, 2, 0)
    assert slots([], [], 2) == ()


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 4))
def test_a_backward_list_has_every_transfer_once_and_no_reduction_too_early(regather: list[bool], ahead: int) -> None:
    items = backward_list(regather, ahead)
    units = len(regather)
    gathers = [item.unit for item in items if item.kind == "gather"]
    reductions = [item.unit for item in items if item.kind == "reduce"]
    assert gathers == [unit for unit in reversed(range(units)) if regather[unit]]
    assert reductions == [*reversed(range(units)), units]
    place = {item: number for number, item in enumerate(items)}
    for unit in range(units):
        asked = [u for u in gathers if u >= unit - 1 - ahead]  # by the unit that runs next in backward
        if asked and unit > 0:
            assert place[Item("gather", asked[-1])] < place[Item("reduce", unit)]
    assert Counter(items).most_common(1)[0][1] == 1


def test_the_backward_list_written_out() -> None:
    text = [f"{item.kind[0]}{item.unit}" for item in backward_list([True] * 4, ahead=1)]
    assert text == ["g3", "g2", "g1", "r3", "g0", "r2", "r1", "r0", "r4"]
    text = [f"{item.kind[0]}{item.unit}" for item in backward_list([False, True, True, True], ahead=1)]
    assert text == ["g3", "g2", "g1", "r3", "r2", "r1", "r0", "r4"]
    assert backward_list([], 1) == (Item("reduce", 0),)


def test_a_forward_list_gathers_every_unit_in_order() -> None:
    assert forward_list(3) == (Item("gather", 0), Item("gather", 1), Item("gather", 2))


@pytest.mark.parametrize(
    ("chosen", "regather", "micro_batches", "expected"),
    [
        ((0, 1, 2, 3), [True] * 4, 3, (1, 1, 1, 1)),  # a buffer each: once a step
        ((0, 1, 0, 1), [True] * 4, 1, (2, 2, 1, 1)),  # the last two are still there when backward begins
        ((0, 1, 0, 1), [True] * 4, 2, (3, 3, 2, 2)),  # and the first two when the next micro-batch does
        ((0, 1, 0, 1, 0), [True] * 5, 1, (2, 2, 2, 1, 1)),
        ((0, 1, 2, 1, 2), [False, True, True, True, True], 1, (1, 2, 2, 1, 1)),
        ((0, 0, 0), [True] * 3, 1, (2, 2, 1)),
    ],
)
def test_gathers_of_a_step(
    chosen: tuple[int, ...], regather: list[bool], micro_batches: int, expected: tuple[int, ...]
) -> None:
    assert gathers_per_step(chosen, regather, 1, micro_batches) == expected


@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 3))
def test_a_step_gathers_a_unit_at_most_twice_a_micro_batch(units: int, ahead: int, micro_batches: int) -> None:
    chosen = slots([8] * units, range(units), ahead + 1)
    counts = gathers_per_step(chosen, [True] * units, ahead, micro_batches)
    assert all(1 <= count <= 2 * micro_batches for count in counts)
    resident = min(units, ahead + 1)
    assert sum(counts) == units + (units - resident) * (2 * micro_batches - 1)
