"""Layouts against dealt-out lists: who holds which element, and what every transition sends, element by element."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.errors import PlanError
from interlace.layout import Entry, Layout, Split, Transfer, split, transition
from interlace.mesh import Mesh, overlap

few = settings(max_examples=60, deadline=None)
MESH = Mesh.parse("tp=2 cp=2 dp=3")
AXES = ("tp", "cp", "dp", "ep", "edp", "shard", "replica")


# --- the reference: lists of elements, dealt out ---------------------------------------------------------------------


def dealt(items: list[list[int]], w: int) -> list[list[list[int]]]:
    """Consecutive parts of `items`, sized as if they were dealt out one by one to w players."""
    sizes = [len(items[player::w]) for player in range(w)]
    ends = list(itertools.accumulate(sizes))
    return [items[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def held_elements(entry: Entry, sizes: Sequence[int], mesh: Mesh, rank: int) -> list[int]:
    """Flat elements of one entry that `rank` holds, in local order."""
    if entry.group:
        rows = [held_elements(part, [n], mesh, rank) for part, n in zip(entry.group, sizes, strict=True)]
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        flat = [sum(i * s for i, s in zip(point, strides, strict=True)) for point in itertools.product(*rows)]
    else:
        flat = list(range(sizes[0]))
    items = [flat[i : i + entry.chunk] for i in range(0, len(flat), entry.chunk)]
    if entry.unit:
        start, total = entry.unit
        items = [[]] * start + items + [[]] * (total - start - len(items))
    for part in entry.splits:
        w, index = mesh.size(part.axis) // part.copies, mesh.index(rank, part.axis) // part.copies
        if part.zigzag:
            pieces = dealt(items, 2 * w)
            items = pieces[index] + pieces[2 * w - 1 - index]
        else:
            items = dealt(items, w)[index]
    return [element for item in items for element in item]


def elements(layout: Layout, shape: Sequence[int], mesh: Mesh, rank: int) -> list[tuple[int, ...]]:
    """Every element `rank` holds, by its index per dimension, from `local_ranges`."""
    per_entry: list[list[tuple[int, ...]]] = []
    sizes = iter(shape)
    for entry, ranges in zip(layout.entries, layout.local_ranges(shape, mesh, rank), strict=True):
        dims = [next(sizes) for _ in entry.names]
        points = list(itertools.product(*map(range, dims)))
        per_entry.append([points[i] for start, stop in ranges for i in range(start, stop)])
    return [sum(parts, ()) for parts in itertools.product(*per_entry)]


def sent_by_walking(a: Layout, b: Layout, shape: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Elements each rank sends when each rank fetches every element it lacks from a holder in its group."""
    sent = [0] * mesh.world
    has = [set(elements(a, shape, mesh, rank)) for rank in range(mesh.world)]
    for group in mesh.groups(axes):
        for j, rank in enumerate(group):
            for element in set(elements(b, shape, mesh, rank)) - has[rank]:
                holders = [peer for peer in group if element in has[peer]]
                sent[holders[j % len(holders)]] += 1
    return tuple(sent)


# --- random layouts --------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    axes = tuple((name, draw(st.integers(1, 3))) for name in ("tp", "cp", "dp"))
    dp, cp = axes[2][1], axes[1][1]
    ep = draw(st.sampled_from([d for d in range(1, dp * cp + 1) if dp * cp % d == 0]))
    return Mesh(axes, (("ep", ep), ("shard", draw(st.sampled_from(sorted({1, dp}))))))


@st.composite
def entries(
    draw: st.DrawFn, name: str, numel: int, mesh: Mesh, free: list[str], group: tuple[Entry, ...] = ()
) -> Entry:
    """One entry of `numel` elements, using up axes from `free`."""
    splits: list[Split] = []
    more = st.booleans()
    while len(free) > 0 and draw(more):
        axis = taken(draw, free)
        copies = draw(st.sampled_from([c for c in range(1, mesh.size(axis) + 1) if mesh.size(axis) % c == 0]))
        splits.append(Split(axis, draw(st.booleans()), copies))
    chunk, unit = draw(st.integers(1, 3)), None
    if draw(st.booleans()):
        start = draw(st.integers(0, 3))
        unit = (start, max(1, start - (-numel // chunk) + draw(st.integers(0, 3))))
    return Entry("" if group else name, tuple(splits), chunk, unit, group)


def taken(draw: st.DrawFn, free: list[str]) -> str:
    axis = draw(st.sampled_from(free))
    free[:] = [other for other in free if not overlap(axis, other)]
    return axis


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], grouped: tuple[bool, ...]) -> Layout:
    """A layout of dimensions A, B, ...; `grouped[i]` flattens dimension i with the next."""
    free = list(AXES)
    found: list[Entry] = []
    i = 0
    while i < len(shape):
        sizes = shape[i : i + 2] if grouped[i] else shape[i : i + 1]
        parts: tuple[Entry, ...] = ()
        for name, n in zip("ABC"[i:], sizes, strict=False) if grouped[i] else ():
            part = draw(entries(name, n, mesh, free))
            parts = (*parts, Entry(name, part.splits, part.chunk))
        found.append(draw(entries("ABC"[i], math.prod(sizes), mesh, free, parts)))
        i += len(sizes)
    owed = []
    while free and draw(st.integers(0, 3)) == 0:
        owed.append(taken(draw, free))
    return Layout(tuple(found), tuple(owed))


@st.composite
def cases(draw: st.DrawFn, how_many: int) -> tuple[Mesh, tuple[int, ...], list[Layout]]:
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    grouped = tuple(draw(st.booleans()) for _ in shape)
    return mesh, shape, [draw(layouts(mesh, shape, grouped)) for _ in range(how_many)]


# --- who holds what --------------------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(1, 12))
def test_split_is_balanced_and_the_first_hold_one_more(n: int, w: int) -> None:
    pieces = [split(n, w, index) for index in range(w)]
    assert [stop - start for start, stop in pieces] == [n // w + 1] * (n % w) + [n // w] * (w - n % w)
    assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), n]


@few
@given(cases(1))
def test_text_round_trip(case: tuple[Mesh, tuple[int, ...], list[Layout]]) -> None:
    layout = case[2][0]
    assert Layout.parse(str(layout)) == layout


@few
@given(cases(1))
def test_local_ranges_equal_dealt_out_lists(case: tuple[Mesh, tuple[int, ...], list[Layout]]) -> None:
    mesh, shape, [layout] = case
    for rank in range(mesh.world):
        sizes = iter(shape)
        found = layout.local_ranges(shape, mesh, rank)
        for entry, ranges in zip(layout.entries, found, strict=True):
            wanted = held_elements(entry, [next(sizes) for _ in entry.names], mesh, rank)
            assert [i for start, stop in ranges for i in range(start, stop)] == wanted
        assert layout.local_shape(shape, mesh, rank) == tuple(sum(b - a for a, b in ranges) for ranges in found)
        assert layout.local_bytes(shape, mesh, rank, 4) == 4 * len(elements(layout, shape, mesh, rank))


@few
@given(cases(1))
def test_ranks_tile_the_index_space_as_often_as_it_is_replicated(
    case: tuple[Mesh, tuple[int, ...], list[Layout]],
) -> None:
    mesh, shape, [layout] = case
    count = Counter(element for rank in range(mesh.world) for element in elements(layout, shape, mesh, rank))
    assert count == {element: layout.replicas(mesh) for element in itertools.product(*map(range, shape))}


@pytest.mark.parametrize(
    ("text", "shape", "ranges"),
    [
        ("T/dp", (7,), [((0, 3),), ((3, 5),), ((5, 7),)]),
        ("T/dp", (2,), [((0, 1),), ((1, 2),), ((2, 2),)]),
        ("T/dp~", (13,), [((0, 3), (11, 13)), ((3, 5), (9, 11)), ((5, 7), (7, 9))]),
        ("V/dp:4", (18,), [((0, 8),), ((8, 16),), ((16, 18),)]),
        ("(N M)/dp:4", (3, 6), [((0, 8),), ((8, 16),), ((16, 18),)]),
        ("(N M)/dp:4@2/9", (3, 6), [((0, 4),), ((4, 16),), ((16, 18),)]),
        ("(N M)/dp:4@6/12", (3, 6), [((0, 0),), ((0, 8),), ((8, 18),)]),
        ("(N M)", (3, 6), [((0, 18),)] * 3),
        ("T +dp", (7,), [((0, 7),)] * 3),
    ],
)
def test_ranges_by_hand(text: str, shape: tuple[int, ...], ranges: list[tuple[tuple[int, int], ...]]) -> None:
    mesh = Mesh.parse("dp=3")
    assert [Layout.parse(text).local_ranges(shape, mesh, rank)[0] for rank in range(3)] == ranges


def test_key_value_heads_are_held_by_neighbours() -> None:
    mesh = Mesh.parse("tp=8")
    layout = Layout.parse("K/tp*2 E")
    assert [layout.local_shape((4, 64), mesh, rank) for rank in range(8)] == [(1, 64)] * 8
    assert [layout.local_ranges((4, 64), mesh, rank)[0][0][0] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.replicas(mesh) == 2


def test_several_axes_nest_and_zigzag_halves_are_cut_across() -> None:
    mesh = Mesh.parse("tp=2 cp=2")
    shapes = [Layout.parse("B T/cp~/tp D").local_shape((2, 13, 5), mesh, rank) for rank in range(4)]
    assert shapes == [(2, 4, 5), (2, 3, 5), (2, 3, 5), (2, 3, 5)]
    # 13 in 4 pieces: 0-3 4-6 7-9 10-12; cp=0 holds pieces 0 and 3, cp=1 pieces 1 and 2
    ranges = [Layout.parse("T/cp~/tp").local_ranges((13,), mesh, rank)[0] for rank in range(4)]
    assert ranges == [((0, 4), (10, 10)), ((4, 4), (10, 13)), ((4, 7), (7, 7)), ((7, 7), (7, 10))]


def test_zero_units_inside_tensor_parallelism() -> None:
    mesh = Mesh.parse("tp=2 dp=2")
    row = Layout.parse("(N M/tp)/dp:2")
    # 3 x 4, columns 0-1 on tp=0: flat 0 1 4 5 8 9 there, chunks (0 1) (4 5) | (8 9)
    assert row.local_ranges((3, 4), mesh, 0) == (((0, 2), (4, 6)),)
    assert row.local_ranges((3, 4), mesh, 2) == (((8, 10),),)
    assert row.local_ranges((3, 4), mesh, 1) == (((2, 4), (6, 8)),)
    column = Layout.parse("(N/tp M)/dp")
    found = [column.local_ranges((3, 4), mesh, rank)[0] for rank in range(4)]
    assert found == [((0, 4),), ((8, 10),), ((4, 8),), ((10, 12),)]


def test_a_unit_is_split_as_one_and_its_tensors_tile_their_parts() -> None:
    """Three tensors of 10, 7 and 4 elements in one unit of chunks of 4: 3 + 2 + 1 = 6 chunks over 4 ranks."""
    mesh = Mesh.parse("dp=4")
    sizes, starts = (10, 7, 4), (0, 3, 5)
    per_rank = [
        [
            Layout.parse(f"N/dp:4@{start}/6").local_numel((n,), mesh, rank)
            for n, start in zip(sizes, starts, strict=True)
        ]
        for rank in range(4)
    ]
    assert per_rank == [[8, 0, 0], [2, 4, 0], [0, 3, 0], [0, 0, 4]]


def test_scalars() -> None:
    assert Layout.parse("").local_shape((), MESH, 0) == ()
    assert Layout.parse("+dp").local_bytes((), MESH, 0, 4) == 4
    # one element, owned by one of three: that rank sends two results, each other rank one term
    assert transition(Layout.parse("+dp"), Layout.parse(""), (), Mesh.parse("dp=3"), 4)[0].bytes_by_rank == (8, 4, 4)


# --- transitions -----------------------------------------------------------------------------------------------------


def moves(a: str, b: str, shape: Sequence[int], mesh: Mesh = MESH, itemsize: int = 1) -> tuple[Transfer, ...]:
    return transition(Layout.parse(a), Layout.parse(b), shape, mesh, itemsize)


@pytest.mark.parametrize(
    ("a", "b", "shape", "steps"),
    [
        ("T D", "T D", (7, 5), [("none", "")]),
        ("T D", "T/dp D", (7, 5), [("slice", "dp")]),
        ("T/dp D", "T D", (7, 5), [("all_gather", "dp")]),
        ("T/cp/tp D", "T D", (7, 5), [("all_gather", "tp"), ("all_gather", "cp")]),
        ("T D +tp", "T D", (7, 5), [("all_reduce", "tp")]),
        ("T D +tp", "T/tp D", (7, 5), [("reduce_scatter", "tp")]),
        ("T/cp D +tp", "T/cp/tp D", (7, 5), [("reduce_scatter", "tp")]),
        ("T D +tp +dp", "T/dp D", (7, 5), [("reduce_scatter", "dp"), ("all_reduce", "tp")]),
        ("T D +tp +dp", "T/dp D +tp", (7, 5), [("reduce_scatter", "dp")]),
        ("T D +tp", "T/dp D", (7, 5), [("slice", "dp"), ("all_reduce", "tp")]),
        ("T/tp D", "T D/tp", (7, 5), [("all_to_all", "tp")]),
        ("T/cp/tp H", "T/cp H/tp", (7, 5), [("all_to_all", "tp")]),
        ("T/cp~ D", "T/cp D", (7, 5), [("all_to_all", "cp")]),
        ("T/cp/tp D", "T/tp D", (7, 5), [("all_to_all", "cp/tp")]),
        ("T/cp/tp D", "T/tp/cp D", (7, 5), [("all_to_all", "cp/tp")]),
        ("N M +dp", "(N M)/dp:4@3/20", (7, 5), [("reduce_scatter", "dp")]),
        ("(N M)/dp:4@3/20", "N M", (7, 5), [("all_gather", "dp")]),
        ("N/tp M +dp", "(N/tp M)/dp:4@3/20", (7, 5), [("reduce_scatter", "dp")]),
        ("(N/tp M)/dp:4@3/20", "N M", (7, 5), [("all_gather", "dp"), ("all_gather", "tp")]),
        ("(N M)/dp:4", "(N M)/dp:5", (7, 5), [("all_to_all", "dp")]),
        ("(N M)/dp:4", "(N M)/dp:3", (7, 5), [("none", "")]),  # 12, 12, 11 elements either way
        ("(N M)/dp:4@3/20", "(N M)/dp:4@5/20", (7, 5), [("all_to_all", "dp")]),
        ("(N M/tp)/dp:4", "(N/tp M)/dp:3", (7, 5), [("all_to_all", "tp/dp")]),
        ("(N/tp M)/dp:4", "(N/tp M)/dp:3", (7, 5), [("all_to_all", "dp")]),
        ("K/tp*2", "K/tp", (4,), [("slice", "tp")]),
        ("X/dp F", "X/ep F", (7, 5), [("all_to_all", "dp/ep")]),
        ("X/ep F +edp", "X/ep F", (7, 5), [("all_reduce", "edp")]),
        ("T +tp +dp", "T +dp +tp", (7,), [("none", "")]),
        ("T +pp", "T", (7,), [("none", "")]),  # an axis of one rank owes nothing
    ],
)
def test_a_change_of_layout_is_a_collective(
    a: str, b: str, shape: tuple[int, ...], steps: list[tuple[str, str]]
) -> None:
    mesh = Mesh(MESH.axes, (("ep", 2),))
    transfers = moves(a, b, shape, mesh)
    assert [(step.collective, step.axis) for step in transfers] == steps
    assert all(len(step.bytes_by_rank) == mesh.world and step.bytes == max(step.bytes_by_rank) for step in transfers)
    assert all(step.bytes == 0 for step in transfers if step.collective in ("slice", "none"))


def test_bytes_by_hand() -> None:
    mesh = Mesh.parse("dp=3")
    # 7 rows of 5: 15, 10, 10 elements of 2 bytes
    assert moves("T/dp D", "T D", (7, 5), mesh, 2)[0] == Transfer("all_gather", "dp", 60, (60, 40, 40))
    assert moves("T D +dp", "T/dp D", (7, 5), mesh, 2)[0] == Transfer("reduce_scatter", "dp", 50, (40, 50, 50))
    # 35 elements flat: slices of 12, 12, 11; the scatter sends 23, 23, 24, the gather 24, 24, 22
    assert moves("T D +dp", "T D", (7, 5), mesh, 2)[0] == Transfer("all_reduce", "dp", 94, (94, 94, 92))
    # rows 3 2 2, columns 2 2 1
    assert moves("T/dp D", "T D/dp", (7, 5), mesh, 1)[0] == Transfer("all_to_all", "dp", 9, (9, 6, 8))
    # 4 slices on 8 ranks: each of a slice's two holders serves the three peers of its own parity
    kv = moves("K/tp*2 E", "K E", (4, 64), Mesh.parse("tp=8"), 2)[0]
    assert kv == Transfer("all_gather", "tp", 384, (384,) * 8)


def test_an_even_split_sends_what_rings_send() -> None:
    """n ranks, S bytes: S(n-1)/n for a gather or a scatter, twice that for an all-reduce."""
    mesh = Mesh.parse("tp=4 dp=2")
    gather, scatter, reduce = (
        moves(a, b, (1024, 64), mesh, 2)[0].bytes
        for a, b in (("T/tp D", "T D"), ("T D +tp", "T/tp D"), ("T D +tp", "T D"))
    )
    assert gather == scatter == reduce // 2 == 1024 * 64 * 2 * 3 // 4


def test_sums_over_dp_are_paid_to_hybrid_shards() -> None:
    mesh = Mesh.parse("dp=4 shard=2")
    steps = moves("N M +dp", "(N M)/shard", (6, 4), mesh)
    assert [(step.collective, step.axis, step.bytes) for step in steps] == [
        ("reduce_scatter", "shard", 12),
        ("all_reduce", "replica", 12),
    ]
    assert [step.axis for step in moves("N M +dp", "(N M)/shard +replica", (6, 4), mesh)] == ["shard"]


@few
@given(cases(1), st.data())
def test_gathers_and_slices_send_what_walking_the_elements_finds(
    case: tuple[Mesh, tuple[int, ...], list[Layout]], data: st.DataObject
) -> None:
    """Peel the last split of one entry: an all-gather that way, a slice the other, whatever the form of the rest."""
    mesh, shape, [layout] = case
    layout = Layout(layout.entries)
    options = [i for i, entry in enumerate(layout.entries) if entry.splits]
    if not options:
        return
    i = data.draw(st.sampled_from(options))
    entry = layout.entries[i]
    shorter = Entry(entry.name, entry.splits[:-1], entry.chunk, entry.unit, entry.group)
    whole = Layout((*layout.entries[:i], shorter, *layout.entries[i + 1 :]))
    axis = entry.splits[-1].axis
    gather = transition(layout, whole, shape, mesh, 3)
    back = transition(whole, layout, shape, mesh, 3)
    if mesh.size(axis) == 1:
        assert gather[0].collective == back[0].collective == "none"
        return
    wanted = sent_by_walking(layout, whole, shape, mesh, (axis,))
    assert [(step.collective, step.axis) for step in gather] == [("all_gather", axis)]
    assert gather[0].bytes_by_rank == tuple(3 * n for n in wanted)
    assert [(step.collective, step.bytes) for step in back] == [("slice", 0)]
    # the dual: the same slices, summed; every rank sends each peer the peer's slice
    scatter = transition(Layout(whole.entries, (axis,)), layout, shape, mesh, 3)
    assert [(step.collective, step.axis) for step in scatter] == [("reduce_scatter", axis)]
    for rank in range(mesh.world):
        peers = [peer for peer in mesh.peers(rank, axis) if peer != rank]
        assert scatter[0].bytes_by_rank[rank] == 3 * sum(len(elements(layout, shape, mesh, peer)) for peer in peers)


@few
@given(cases(2))
def test_any_rearrangement_ends_and_sends_at_least_what_is_lacked(
    case: tuple[Mesh, tuple[int, ...], list[Layout]],
) -> None:
    mesh, shape, [a, b] = case
    a, b = Layout(a.entries), Layout(b.entries)
    steps = transition(a, b, shape, mesh, 1)
    lacked = sum(
        len(set(elements(b, shape, mesh, rank)) - set(elements(a, shape, mesh, rank))) for rank in range(mesh.world)
    )
    assert sum(sum(step.bytes_by_rank) for step in steps) >= lacked
    if len(steps) == 1 and steps[0].axis:
        assert steps[0].bytes_by_rank == sent_by_walking(a, b, shape, mesh, steps[0].axis.split("/"))
    if not lacked and len(steps) == 1:
        assert steps[0].bytes == 0
    assert transition(a, a, shape, mesh, 1) == (Transfer("none", "", 0, (0,) * mesh.world),)


@few
@given(cases(2))
def test_what_is_owed_is_paid_once(case: tuple[Mesh, tuple[int, ...], list[Layout]]) -> None:
    mesh, shape, [a, b] = case
    steps = transition(a, Layout(b.entries), shape, mesh, 1)
    paid = [axis for step in steps if "reduce" in step.collective for axis in step.axis.split("/")]
    owed = {name for axis in a.owed for name in (("shard", "replica") if axis == "dp" else ("ep", "edp", axis))}
    assert len(paid) == len(set(paid))
    assert set(paid) <= owed | set(a.owed)
    assert {axis for axis in a.owed if mesh.size(axis) > 1} - set(paid) <= {"dp", "cp"}  # paid as what folds them


@pytest.mark.parametrize(
    ("a", "b"), [("T/tp D", "T D/tp"), ("T/cp~ D", "T/cp D"), ("T/cp/tp D", "T/tp D"), ("T D/dp", "T/dp:2 D")]
)
@pytest.mark.parametrize("shape", [(12, 6), (13, 5), (3, 3)])
def test_exchanges_send_what_walking_the_elements_finds(a: str, b: str, shape: tuple[int, int]) -> None:
    [step] = moves(a, b, shape)
    axes = step.axis.split("/")
    assert step.bytes_by_rank == sent_by_walking(Layout.parse(a), Layout.parse(b), shape, MESH, axes)


def test_large_worlds_are_counted_quickly() -> None:
    mesh = Mesh.parse("tp=8 dp=64 pp=4")
    shape = (14336, 4096)
    [step] = moves("(N/tp M)/dp:4096@7/2000", "N/tp M", shape, mesh, 2)
    assert sum(step.bytes_by_rank) == 4 * 63 * 14336 * 4096 * 2


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("B/", r"malformed at its end: expected a mesh axis after '/'"),
        ("B/dp/ T", r"malformed at ' T', character 6: expected a mesh axis"),
        ("B/dp T/cp~~ D", r"malformed at '~ D', character 11: expected a space after 'T/cp~'"),
        ("B /dp", r"malformed at '/dp', character 3: expected a dimension"),
        ("(N M", r"malformed at its end: expected '\)'"),
        ("()", r"malformed at '\)', character 2: expected a dimension inside"),
        ("((N M) K)", r"malformed at '\(N M\) K\)', character 2: expected a dimension or"),
        ("(N@1/2 M)", r"malformed at '@1/2 M\)', character 3"),
        ("B)", r"malformed at '\)', character 2"),
        ("K/tp*", r"malformed at its end: expected a number of copies"),
        ("K/tp*0", r"malformed at '0', character 6: expected a number of copies of 1 or more"),
        ("V/tp:0", r"malformed at '0', character 6: expected a chunk of 1 or more"),
        ("V/tp:4@3", r"malformed at its end: expected '/' and the unit's number of chunks"),
        ("V/tp@3/2", r"begins at chunk 3 of 2: begin at 0 to 2"),
        ("T D +", r"malformed at its end: expected the axis a sum is owed over"),
        ("T +tp D", r"malformed at 'D', character 7: expected only '\+axis'"),
        ("T+tp", r"malformed at '\+tp', character 2: expected a space after 'T'"),
        ("B/dp T/dp", r"uses axis 'dp' more than once"),
        ("B/dp T +dp", r"uses axis 'dp' more than once"),
        ("X/ep B/dp", r"uses 'ep' and 'dp', which share ranks"),
    ],
)
def test_malformed_layouts_are_refused_where_they_go_wrong(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as caught:
        Layout.parse(text)
    assert "\n" not in str(caught.value)
    assert text in str(caught.value) or "@" in text


def test_white_space_and_plain_forms_are_forgiven() -> None:
    assert str(Layout.parse("  B/dp   (N  M)/tp:1  K/cp*1 +pp ")) == "B/dp (N M)/tp K/cp +pp"
    assert Layout.parse("B T") == Layout.whole("BT")
    assert Layout.parse("B/dp T/cp~/tp").axes == ("dp", "cp", "tp")
    assert Layout.parse("(N/tp M)/dp K").names == ("N", "M", "K")


@pytest.mark.parametrize(
    ("text", "shape", "sentence"),
    [
        ("B T", (3,), r"has 2 dimensions and the shape \(3,\) has 1"),
        ("K/dp*2", (4,), r"holds every slice 2 times, which does not divide dp=3"),
        ("N/dp:4@3/5", (10,), r"puts 10 elements, 3 chunks of 4, at chunk 3 of a unit of 5 chunks: make the unit 6"),
        ("N/dpz", (10,), r"has no axis 'dpz': use dp"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(text: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Layout.parse(text).local_shape(shape, MESH, 0)


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ("T D", "T D +tp", r"'T D' cannot become 'T D \+tp': it owes no sum over tp"),
        ("T/tp D", "T D +tp", r"owes no sum over tp"),
        ("T D", "D T", r"name different dimensions"),
        ("T D", "T", r"name different dimensions"),
        ("(T D) K", "T (D K)", r"flatten different dimensions"),
        ("T D K/tp", "T D K/dp*2", r"does not divide dp=3"),
    ],
)
def test_nonsense_transitions_are_refused(a: str, b: str, sentence: str) -> None:
    shape = (7, 5, 3)[: len(Layout.parse(a).names)]
    with pytest.raises(PlanError, match=sentence):
        moves(a, b, shape)
