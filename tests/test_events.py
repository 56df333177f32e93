"""Events: exact round trips through both files, and refusals that name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.errors import DataError
from interlace.events import KINDS, Event, from_chrome, read_chrome, read_jsonl, to_chrome, write_chrome, write_jsonl

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
seconds = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def events(draw: st.DrawFn) -> Event:
    begin, end = sorted((draw(seconds), draw(seconds)))
    big = st.integers(0, 2**70)
    kind = draw(st.sampled_from(KINDS))
    return Event(draw(st.integers(0, 9999)), draw(names), kind, draw(names), begin, end, draw(big), draw(big))


STEP = [
    Event(0, "compute", "compute", "blocks.0 forward", 0.1, 0.30000000000000004, flops=2**62 + 1),
    Event(0, "dp", "comm", "gather blocks.1", 0.1, 0.25, bytes=12_345),
    Event(1, "compute", "wait", "gather\nblocks.1 \u2028 ×", 1 / 3, 2 / 3),
]


@given(st.lists(events(), max_size=4))
def test_round_trips_are_exact(tmp_path_factory: pytest.TempPathFactory, some: list[Event]) -> None:
    folder = tmp_path_factory.mktemp("events")
    write_jsonl(folder / "events.jsonl", some)
    assert read_jsonl(folder / "events.jsonl") == some
    text = json.dumps(to_chrome(some))
    assert from_chrome(json.loads(text)) == some


def test_appending_and_one_event_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_jsonl(path, STEP[:1])
    write_jsonl(path, STEP[1:], append=True)
    assert len(path.read_bytes().splitlines()) == 3
    assert read_jsonl(path) == STEP
    write_jsonl(path, [])
    assert read_jsonl(path) == []


def test_chrome_file_is_what_viewers_draw(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome(path, STEP)
    assert read_chrome(path) == STEP
    trace = json.loads(path.read_text(encoding="utf-8"))
    names = [entry for entry in trace["traceEvents"] if entry["ph"] == "M"]
    drawn = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    processes = {entry["pid"]: entry["args"]["name"] for entry in names if entry["name"] == "process_name"}
    threads = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in names if entry["name"] == "thread_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert [threads[entry["pid"], entry["tid"]] for entry in drawn] == ["compute", "dp", "compute"]
    assert all(type(entry[key]) is int for entry in drawn for key in ("pid", "tid"))
    assert drawn[1]["cat"] == "comm"
    assert drawn[1]["ts"] == pytest.approx(1e5)
    assert drawn[1]["dur"] == pytest.approx(1.5e5)
    write_chrome(path, [])
    assert read_chrome(path) == []


GOOD = '{"rank": 0, "lane": "a", "kind": "comm", "name": "n", "begin": 1, "end": 2}'


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (GOOD[:-9], "not a JSON object .* cut off"),
        ("", "not a JSON object"),
        ("[1]", "found list, expected an object with rank, lane"),
        (GOOD.replace('"rank"', '"rnak"'), "has no 'rank'"),
        (GOOD.replace("{", '{"flop": 1, '), "unknown key 'flop' of an event: use flops"),
        (GOOD.replace("comm", "com"), "unknown kind 'com' of an event: use comm"),
        (GOOD.replace("0", "true"), "'rank' is True: expected a whole number"),
        (GOOD.replace("0", "-1"), "'rank' is -1"),
        (GOOD.replace('"n"', "3"), "'name' is 3: expected a string"),
        (GOOD.replace("1", "NaN"), "'begin' is nan: expected a finite number"),
        (GOOD.replace("1", "1" + "0" * 400), "'begin' is 1000"),
        (GOOD.replace("1", "3"), "ends at 2.0 before it begins at 3.0"),
        (GOOD.replace('"n"', '"\udcff"'), "can't decode byte"),
    ],
)
def test_malformed_lines_are_refused_by_file_and_line(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "events.jsonl"
    end = "" if line == GOOD[:-9] else "\n"
    path.write_bytes(f"{GOOD}\n{line}{end}".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=f"events.jsonl, line 2: .*{sentence}"):
        read_jsonl(path)


def test_defaults_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(GOOD + "\n")
    assert read_jsonl(path) == [Event(0, "a", "comm", "n", 1.0, 2.0)]


def test_damaged_and_foreign_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome(path, STEP)
    lines = path.read_text(encoding="utf-8").split("\n")
    path.write_text("\n".join([*lines[:3], lines[3][:-2], *lines[4:]]), encoding="utf-8")
    with pytest.raises(DataError, match=r"trace.json, line [45]: not JSON"):
        read_chrome(path)
    with pytest.raises(DataError, match=r"no list 'traceEvents'"):
        from_chrome([])
    with pytest.raises(DataError, match=r"trace, traceEvents\[0\]: not a complete event"):
        from_chrome({"traceEvents": [{"ph": "B", "pid": 0}]})
    foreign = {"ph": "X", "pid": 0, "tid": 7, "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "args": {}}
    with pytest.raises(DataError, match=r"traceEvents\[0\]: the event has no 'lane'"):
        from_chrome({"traceEvents": [foreign]})
    with pytest.raises(DataError, match=r"absent.json: cannot be read"):
        read_jsonl(tmp_path / "absent.json")


def test_an_event_of_our_own_is_checked_where_it_is_made() -> None:
    with pytest.raises(AssertionError):
        Event(0, "compute", "computing", "x", 0.0, 1.0)
    with pytest.raises(AssertionError):
        Event(0, "compute", "compute", "x", 1.0, 0.0)
    with pytest.raises(AssertionError):
        Event(0, "compute", "compute", "x", 0.0, float("nan"))
    assert Event(0, "compute", "compute", "x", 0.5, 2.0).seconds == 1.5
