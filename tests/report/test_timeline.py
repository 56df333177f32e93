"""The timeline: marks stand where the events were, many events stay small, nothing comes from outside."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET

import pytest

from interlace.events import Event
from interlace.plan.simulate import Costs, simulate
from interlace.report.ledger import Ledger, ledgers
from interlace.report.timeline import LEFT, MOST_RANKS, RIGHT, Scene, held, timeline
from interlace.schedule import generate, validate

SVG = "{http://www.w3.org/2000/svg}"
WIDE = RIGHT - LEFT


def scene(events: list[Event], title: str = "run", **more: object) -> Scene:
    (ledger,) = ledgers(events)
    return Scene.of(title, events, ledger, **more)  # type: ignore[arg-type]


def schedule(ranks: int, micro_batches: int, forward: float = 1.0, backward: float = 2.0) -> list[Event]:
    """1F1B without transfers: rank r's forward pass of m begins once rank r - 1 has made it."""
    found = []
    ends: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * ranks
    order = {}
    for rank in range(ranks):
        warm = min(ranks - rank, micro_batches)
        row = [("F", m) for m in range(warm)]
        for m in range(micro_batches):
            row += [("B", m)] + ([("F", m + warm)] if m + warm < micro_batches else [])
        order[rank] = row
    at = [0] * ranks
    while any(at[rank] < len(order[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            if at[rank] == len(order[rank]):
                continue
            what, m = order[rank][at[rank]]
            need = ("F", rank - 1, m) if what == "F" else ("B", rank + 1, m)
            if 0 <= need[1] < ranks and need not in ends:
                continue
            begin = max(clock[rank], ends.get(need, 0.0))
            clock[rank] = ends[what, rank, m] = begin + (forward if what == "F" else backward)
            found.append(Event(rank, "compute", "compute", f"{rank}{what}{m}", begin, clock[rank]))
            at[rank] += 1
    return found


class Picture:
    def __init__(self, svg: str) -> None:
        self.root = ET.fromstring(svg)
        self.texts = [node.text or "" for node in self.root.iter(f"{SVG}text")]

    def boxes(self, kind: str) -> list[tuple[float, float, float, float]]:
        """x, y, width, height of the marks of a class, those of the keys and the ledger left out."""
        found = []
        for node in self.root.iter(f"{SVG}rect"):
            if node.get("class") == kind and float(node.get("height", "")) not in (12.0, 14.0):
                found.append(tuple(float(node.get(key, "")) for key in ("x", "y", "width", "height")))
        return found  # type: ignore[return-value]


def test_marks_stand_where_the_events_were() -> None:
    events = [
        Event(0, "compute", "compute", "0F0", 10.0, 12.0),
        Event(0, "compute", "compute", "0B0", 12.0, 16.0),
        Event(0, "compute", "wait", "gather", 13.0, 14.0),
        Event(0, "comm.dp", "comm", "gather", 11.0, 14.0, 77),
        Event(0, "compute", "optimizer", "update", 18.0, 20.0),
    ]
    picture = Picture(timeline([scene(events)], "a run"))
    pixel = WIDE / 10.0
    expected = {"F": (0, 2), "B": (2, 4), "wait": (3, 1), "dp": (1, 3), "optimizer": (8, 2)}
    for kind, (begin, long) in expected.items():
        ((x, _, wide, _),) = picture.boxes(kind)
        assert x == pytest.approx(LEFT + begin * pixel, abs=0.01), kind
        assert wide == pytest.approx(long * pixel - 0.4, abs=0.02), kind
    (_, work, _, high), (_, move, _, _) = picture.boxes("F")[0], picture.boxes("dp")[0]
    assert move >= work + high  # the transfer has its own lane, below
    hints = [node.text for node in picture.root.iter(f"{SVG}title")]
    assert "gather, 3 s, 77 bytes" in hints
    assert "waits for gather, 1 s" in hints
    assert {"a run", "rank 0", "dp", "forward", "backward", "optimizer", "transfer dp", "waiting"} <= set(picture.texts)


def test_the_ledger_is_drawn_to_the_same_scale() -> None:
    events = schedule(2, 3)
    picture = Picture(timeline([scene(events)]))
    bars = [node for node in picture.root.iter(f"{SVG}rect") if node.get("height") == "14"]
    compute = [float(node.get("width", "")) for node in bars if node.get("class") == "compute"]
    bubble = [float(node.get("width", "")) for node in bars if node.get("class") == "bubble"]
    end = max(event.end for event in events)
    assert compute == pytest.approx([9 / end * WIDE] * 2, abs=0.01)
    assert bubble == pytest.approx([(end - 9) / end * WIDE] * 2, abs=0.01)


def test_a_plan_and_a_run_share_their_scale() -> None:
    planned = schedule(2, 2)
    real = [Event(e.rank, e.lane, e.kind, e.name, 100 + 2 * e.begin, 100 + 2 * e.end) for e in planned]
    svg = timeline([scene(planned, "plan"), scene(real, "run")])
    backwards = Picture(svg).boxes("B")
    ends = [x + wide + 0.4 for x, _, wide, _ in backwards]
    by_scene = [max(ends[:4]), max(ends[4:])]
    assert by_scene == pytest.approx([LEFT + WIDE / 2, RIGHT], abs=0.05)
    assert min(x for x, *_ in Picture(svg).boxes("F")) == pytest.approx(LEFT)
    assert Picture(svg).texts.index("plan") < Picture(svg).texts.index("run")


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (3, 5), (8, 64)])
def test_every_action_of_a_schedule_is_drawn(ranks: int, micro_batches: int) -> None:
    svg = timeline([scene(schedule(ranks, micro_batches))])
    picture = Picture(svg)
    assert len(picture.boxes("F")) == len(picture.boxes("B")) == ranks * micro_batches
    numbers = [node.text for node in picture.root.iter(f"{SVG}text") if node.get("class") == "n"]
    shown = [text for text in numbers if text and text.isdigit()]
    if micro_batches < 64:
        assert sorted(map(int, shown)) == sorted(list(range(micro_batches)) * 2 * ranks)
    assert {"0"} <= set(shown) or micro_batches == 64
    assert len(svg) < 600_000


def test_a_second_chunk_is_paler() -> None:
    events = [Event(0, "compute", "compute", f"{stage}F0", at, at + 1) for at, stage in enumerate((0, 2, 4))]
    picture = Picture(timeline([scene([*events, Event(1, "compute", "compute", "1F0", 0, 1)])]))
    assert len(picture.boxes("F")) == 3
    ((x, *_),) = picture.boxes("F pale")
    assert x == pytest.approx(LEFT + WIDE / 3, abs=0.01)


def test_a_hundred_thousand_events_stay_small() -> None:
    chance = random.Random(3)
    events = []
    for rank in range(8):
        for lane, kind in (("stream 7", "compute"), ("comm.dp", "comm"), ("comm.tp", "comm")):
            at = 0.0
            for i in range(4200):
                long = chance.expovariate(1.0)
                events.append(Event(rank, lane, kind, f"k{i % 9}", at, at + long))
                at += long + chance.random()
    svg = timeline([Scene("many", events, 0.0, max(event.end for event in events))])
    assert len(events) > 100_000
    assert len(svg) < 1_500_000
    ET.fromstring(svg)


def test_fifty_thousand_events_that_could_each_be_seen_stay_small() -> None:
    events = [
        Event(rank, f"s{lane}", "compute", "k", i, i + 0.9)
        for rank in range(32)
        for lane in range(4)
        for i in range(400)
    ]
    assert len(timeline([Scene("many", events, 0.0, 400.0)])) < 1_500_000


def test_what_is_narrower_than_a_pixel_keeps_its_share() -> None:
    """A thousandth of a pixel each, half of the time: columns half as high."""
    events = [Event(0, "s", "compute", "k", i, i + 0.5) for i in range(20 * WIDE)]
    svg = timeline([Scene("many", events, 0.0, 20.0 * WIDE)])
    (path,) = [node.get("d", "") for node in ET.fromstring(svg).iter(f"{SVG}path")]
    runs = re.findall(r"M(\d+) \S+v(-[\d.]+)h(\d+)v", path)
    assert sum(int(wide) for _, _, wide in runs) == WIDE
    assert all(-float(high) / 20 == pytest.approx(0.5, abs=0.126) for _, high, _ in runs)


def test_many_ranks_and_streams_are_limited() -> None:
    events = [Event(rank, f"s{lane}", "compute", "k", 0, lane + 1) for rank in range(100) for lane in range(9)]
    picture = Picture(timeline([scene(events, "wide")]))
    assert "wide (the first 32 of 100 ranks)" in picture.texts
    assert sum(text.startswith("rank ") for text in picture.texts) == 2 * MOST_RANKS
    lanes = [node for node in picture.root.iter(f"{SVG}rect") if node.get("class") == "lane"]
    assert len(lanes) == 4 * MOST_RANKS


def test_memory_is_drawn_on_the_scale_of_time() -> None:
    events = [Event(0, "s", "compute", "k", 5.0, 15.0)]
    memory = {0: [(0.0, 9e9), (5.0, 0.0), (10.0, float(3 << 30)), (15.0, float(1 << 30)), (20.0, 9e9)]}
    picture = Picture(timeline([scene(events, memory=memory)]))
    (line,) = [node.get("points", "") for node in picture.root.iter(f"{SVG}polyline")]
    points = [tuple(map(float, pair.split(","))) for pair in line.split()]
    assert [x for x, _ in points] == pytest.approx([LEFT, LEFT + WIDE / 2, RIGHT], abs=0.1)
    low, high, end = (y for _, y in points)
    assert (low - end) / (low - high) == pytest.approx(1 / 3, abs=0.01)
    assert "3 GiB" in picture.texts


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "dualpipev"])
def test_micro_batches_held_are_those_that_the_table_says(name: str) -> None:
    """Over time, and at most as many as `validate` has said: for a simulated step, in micro-batches of all stages."""
    table = generate(name, 3, 5, 2 if name == "interleaved" else 1)
    chunks = table.stages // table.ranks
    events = simulate(table, Costs.even(table.stages, 1.0, 1.0, 1.0))
    for rank, most in enumerate(validate(table).ranks):
        points = held(event for event in events if event.rank == rank)
        assert max(count for _, count in points) == most / chunks
        assert points[-1][1] == 0
    picture = Picture(timeline([scene(events)]))
    lines = [node for node in picture.root.iter(f"{SVG}path") if node.get("class") == "memory"]
    assert len(lines) == table.ranks
    assert f"micro-batches, at most {', '.join(f'{n / chunks:.3g}' for n in validate(table).ranks)}" in picture.texts


def test_the_line_of_what_is_held_steps_where_the_events_do() -> None:
    """gpipe of two micro-batches: rank 1 begins at 1 of 8 seconds, holds 2 from 2 to 5, and none from 7 on."""
    events = simulate(generate("gpipe", 2, 2), Costs.even(2, 1.0, 1.0, 1.0))
    picture = Picture(timeline([scene(events)]))
    end = max(event.end for event in events)
    line = [node.get("d", "") for node in picture.root.iter(f"{SVG}path") if node.get("class") == "memory"][1]
    steps = re.findall(r"H(\d+)V([\d.]+)V([\d.]+)", line)
    low = float(line.partition("H")[0].split()[1])
    found = [(round((int(x) - LEFT) / WIDE * end, 1), round((low - float(y)) / 20)) for x, _, y in steps]
    assert found == [(1.0, 1), (2.0, 2), (5.0, 1), (7.0, 0)]


def test_without_a_pipeline_nothing_is_said_of_what_is_held() -> None:
    picture = Picture(timeline([scene(schedule(1, 4))]))
    assert "held" not in picture.texts
    measured = Picture(timeline([scene(schedule(2, 4), memory={0: [(0.0, 1e9), (1.0, 2e9)]})]))
    assert "memory" in measured.texts
    assert "held" not in measured.texts


def test_nothing_at_all() -> None:
    ET.fromstring(timeline([]))
    ET.fromstring(timeline([Scene("empty", [], 0.0, 0.0, Ledger("all", ()))]))
    ET.fromstring(timeline([scene([Event(0, "s", "compute", "k", 1.0, 1.0)])]))


def test_it_is_self_contained_escaped_and_knows_dark() -> None:
    svg = timeline([scene([Event(0, "comm.<b>", "comm", "a&b", 0, 1)], "<i>&")], 'x "<y>" \x00')
    assert "prefers-color-scheme:dark" in svg
    assert svg.count("http") == 1
    assert "href" not in svg
    assert "<script" not in svg
    assert {"<i>&", "<b>"} <= set(Picture(svg).texts)
