"""The loss curve as a picture: lines hold the rows' values, axes are round, and nothing in a row breaks it."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from interlace.report.draw import loss_curve, write_loss_curve

SVG = "{http://www.w3.org/2000/svg}"
Pixels = list[tuple[float, float]]


def rows(losses: Sequence[Any], first: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": loss,
            "tokens_per_s": 12000.0 + 100 * (step % 7),
            "step_s": 0.25,
            "waited": {"dp": 0.02 + 0.001 * (step % 5), "tp": 0.01},
        }
        for step, loss in enumerate(losses, first)
    ]


class Picture:
    """A parsed SVG: lines in pixels, and the scales as its tick labels state them."""

    def __init__(self, svg: str) -> None:
        self.root = ET.fromstring(svg)
        self.texts = [node.text or "" for node in self.root.iter(f"{SVG}text")]
        labels = [
            (float(node.get("y", "")), node.text or "") for node in self.root.iter(f"{SVG}text") if _is(node, "y")
        ]
        middle = max(y for y, _ in labels) - 100
        self.loss_ticks = [(y - 4, float(text.replace(",", ""))) for y, text in labels if y < middle]
        self.step_ticks = [
            (float(node.get("x", "")), float((node.text or "").replace(",", "")))
            for node in self.root.iter(f"{SVG}text")
            if _is(node, "x")
        ]

    def lines(self, kind: str) -> list[Pixels]:
        """Polylines, and circles as lines of one point, of a class."""
        found = []
        for node in self.root.iter():
            if _is(node, kind) and node.tag == f"{SVG}polyline":
                found.append([tuple(map(float, pair.split(","))) for pair in node.get("points", "").split()])
            elif _is(node, kind) and node.tag == f"{SVG}circle":
                found.append([(float(node.get("cx", "")), float(node.get("cy", "")))])
        return found  # type: ignore[return-value]

    def step(self, x: float) -> float:
        (x0, first), (x1, last) = self.step_ticks[0], self.step_ticks[-1]
        return first + (x - x0) / (x1 - x0) * (last - first)

    def loss(self, y: float) -> float:
        (y0, first), (y1, last) = self.loss_ticks[0], self.loss_ticks[-1]
        return first + (y - y0) / (y1 - y0) * (last - first)


def _is(node: ET.Element, kind: str) -> bool:
    return node.get("class") == kind


def test_points_are_the_values() -> None:
    losses = [5.5 * math.exp(-step / 30) + 1.5 + 0.1 * math.sin(5 * step) for step in range(1, 121)]
    picture = Picture(loss_curve(rows(losses), "runs/a"))
    (raw,) = picture.lines("loss raw")
    assert [picture.step(x) for x, _ in raw] == pytest.approx(range(1, 121), abs=0.01)
    assert [picture.loss(y) for _, y in raw] == pytest.approx(losses, abs=0.001)
    (smooth,) = picture.lines("loss")
    mean = [losses[0]]
    mean.append(sum(losses[0:3]) / 3)
    mean += [sum(losses[i - 2 : i + 3]) / len(losses[i - 2 : i + 3]) for i in range(2, 120)]
    assert [picture.loss(y) for _, y in smooth] == pytest.approx(mean, abs=0.001)


@pytest.mark.parametrize(
    ("losses", "ticks"),
    [
        ([5.55, 3.0, 1.62], [1, 2, 3, 4, 5, 6]),
        ([0.52, 0.5, 0.41], [0.4, 0.42, 0.44, 0.46, 0.48, 0.5, 0.52]),
        ([2000.0, 350.0], [0, 500, 1000, 1500, 2000]),
        ([-3.0, 4.0], [-4, -2, 0, 2, 4]),
        ([2.0, 2.0], [1.8, 1.9, 2.0, 2.1, 2.2]),
        ([0.0, 0.0], [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]),
        ([5.0, 0.004], [0.001, 0.01, 0.1, 1, 10]),
    ],
)
def test_loss_ticks_are_round_and_hold_all_values(losses: list[float], ticks: list[float]) -> None:
    picture = Picture(loss_curve(rows(losses)))
    assert [value for _, value in picture.loss_ticks] == pytest.approx(ticks)
    distances = [b - a for (a, _), (b, _) in zip(picture.loss_ticks, picture.loss_ticks[1:], strict=False)]
    assert distances == pytest.approx([distances[0]] * len(distances), abs=0.02)
    low, high = picture.loss_ticks[0][0], picture.loss_ticks[-1][0]
    assert all(high - 0.01 <= y <= low + 0.01 for line in picture.lines("loss") for _, y in line)


def test_a_logarithmic_axis_holds_logarithms() -> None:
    losses = [5 * math.exp(-step / 20) for step in range(150)]
    picture = Picture(loss_curve(rows(losses)))
    (y0, first), (y1, last) = picture.loss_ticks[0], picture.loss_ticks[-1]
    (raw,) = picture.lines("loss raw")
    found = [math.log(first) + (y - y0) / (y1 - y0) * math.log(last / first) for _, y in raw]
    assert found == pytest.approx([math.log(loss) for loss in losses], abs=0.001)


@pytest.mark.parametrize(
    ("first", "count", "ticks"),
    [
        (1, 120, [0, 20, 40, 60, 80, 100, 120]),
        (1, 3, [1, 2, 3]),
        (1001, 40, [1005, 1010, 1015, 1020, 1025, 1030, 1035, 1040]),
        (1, 5000, [0, 1000, 2000, 3000, 4000, 5000]),
    ],
)
def test_step_ticks_are_round(first: int, count: int, ticks: list[int]) -> None:
    assert [
        step for _, step in Picture(loss_curve(rows([1.0 + n % 3 for n in range(count)], first))).step_ticks
    ] == ticks


def test_rates_and_shares_share_a_panel() -> None:
    picture = Picture(loss_curve(rows([2.0, 1.9, 1.8])))
    assert {"tokens/s", "time waited, % of the step", "0", "10k", "20k", "0 %", "10 %", "20 %"} <= set(picture.texts)
    (rate,), (wait,) = picture.lines("rate"), picture.lines("wait")
    bottom, top = 442.0, 380.0
    assert [(bottom - y) / (bottom - top) * 20000 for _, y in rate] == pytest.approx([12100, 12200, 12300], abs=4)
    assert [(bottom - y) / (bottom - top) * 20 for _, y in wait] == pytest.approx([12.4, 12.8, 13.2], abs=0.004)
    assert "step 3 · loss 2 to 1.8 · median 12.2k tokens/s · median 12.8 % waited" in picture.texts


def test_one_row() -> None:
    picture = Picture(loss_curve(rows([5.5])))
    ((point,),) = picture.lines("loss")
    assert (picture.step(point[0]), picture.loss(point[1])) == pytest.approx((1, 5.5), abs=0.01)
    assert "5.5" in picture.texts


def test_no_row() -> None:
    assert "no steps yet" in Picture(loss_curve([])).texts


def test_what_is_not_finite_is_a_gap_and_marked() -> None:
    losses = [3.0, 2.5, math.nan, 2.2, 2.1, None, "2", math.inf, 1e300, True, 2.0, 1.9]
    picture = Picture(loss_curve(rows(losses)))
    assert [len(line) for line in picture.lines("loss")] == [2, 2, 2]
    assert "no finite loss at step 3 and 5 more" in picture.texts
    (crosses,) = [node for node in picture.root.iter(f"{SVG}path") if _is(node, "bad")]
    begins = [float(mark.split(" ")[0]) + 4 for mark in (crosses.get("d") or "").split("M")[1:]]
    assert [picture.step(x) for x in begins] == pytest.approx([3, 6, 7, 8, 9, 10], abs=0.02)


def test_the_mean_passes_over_a_gap_without_a_jump() -> None:
    losses: list[float] = [2.0 + 0.5 * (-1) ** n for n in range(600)]
    losses[300] = math.nan
    smooth = [line for line in Picture(loss_curve(rows(losses))).lines("loss") if len(line) > 1]
    assert len(smooth) == 2
    (y0, _), *_ = Picture(loss_curve(rows(losses))).loss_ticks
    near = [y for _, y in (*smooth[0][-10:], *smooth[1][:10])]
    assert max(near) - min(near) < 0.15 * y0


def test_rows_may_lack_anything() -> None:
    bare = [
        {"loss": 3.0},
        {"step": 4},
        {"step": 2, "loss": 2.0, "waited": None},
        {"step": 3, "loss": 1.0, "waited": {}},
    ]
    picture = Picture(loss_curve(bare))
    (line,) = picture.lines("loss")
    assert [(picture.step(x), picture.loss(y)) for x, y in line] == [pytest.approx((2, 2)), pytest.approx((3, 1))]
    assert not picture.lines("rate")
    assert not picture.lines("wait")
    assert "tokens/s" not in picture.texts


def test_a_step_made_again_counts_once() -> None:
    made = [*rows([9.0, 9.0, 9.0]), *rows([2.0, 1.0], first=2)]
    picture = Picture(loss_curve(made))
    (line,) = picture.lines("loss")
    assert [picture.loss(y) for _, y in line] == pytest.approx([9, 2, 1], abs=0.02)


def test_five_thousand_rows_are_thinned_and_a_spike_stays() -> None:
    random.seed(3)
    losses = [3.0 + random.gauss(0, 0.1) for _ in range(5000)]
    losses[1234], losses[3456] = 8.0, 0.5
    svg = loss_curve(rows(losses))
    assert len(svg) < 100_000
    picture = Picture(svg)
    (raw,) = picture.lines("loss raw")
    assert len(raw) < 800
    drawn = {round(picture.step(x)): picture.loss(y) for x, y in raw}
    assert drawn[1235] == pytest.approx(8.0, abs=0.02)
    assert drawn[3457] == pytest.approx(0.5, abs=0.02)
    assert {1, 5000} <= set(drawn)
    assert [x for x, _ in raw] == sorted(x for x, _ in raw)


def test_every_second_value_missing_stays_small() -> None:
    assert len(loss_curve(rows([math.nan if n % 2 else 2.0 for n in range(5000)]))) < 200_000


def test_titles_are_escaped_and_cut() -> None:
    picture = Picture(loss_curve(rows([1.0]), 'a <b> & "c" \x00' + "x" * 200))
    (title,) = [node.text or "" for node in picture.root.iter(f"{SVG}text") if _is(node, "title")]
    assert title.startswith('a <b> & "c"')
    assert len(title) == 90
    assert title.endswith("…")


def test_it_is_self_contained_and_knows_dark() -> None:
    svg = loss_curve(rows([2.0, 1.0]))
    assert "prefers-color-scheme:dark" in svg
    assert svg.count("http") == 1  # the name space
    assert "href" not in svg
    assert "<script" not in svg


def test_files(tmp_path: Path) -> None:
    metrics, svg = tmp_path / "metrics.jsonl", tmp_path / "loss.svg"
    lines = [json.dumps(row) for row in rows([3.0, math.nan, 2.0])]
    metrics.write_text("\n".join([*lines, "[1]", '{"step": 4, "lo']))
    write_loss_curve(metrics, svg)
    picture = Picture(svg.read_text(encoding="utf-8"))
    assert tmp_path.name in picture.texts
    assert [len(line) for line in picture.lines("loss")] == [1, 1]
    with pytest.raises(FileNotFoundError):
        write_loss_curve(tmp_path / "none.jsonl", svg)
