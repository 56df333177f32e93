"""Faults planted in tables: each is found before anything runs, in one sentence that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.errors import PlanError
from interlace.schedule import Action, Table, generate, lower, parse_csv, read_csv, validate

GOOD = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


COMPUTE = [
    ("0F0,0F1,0B0", "1F0,1B0,1F1,1B1", "rank 0 never runs 0B1"),
    ("0F0,0B0,0B1", "1F0,1B0,1F1,1B1", "rank 0 never runs 0F1"),
    ("0F0,0F1,0B0,0B1,0B1", "1F0,1B0,1F1,1B1", "rank 0 runs 0B1 twice"),
    ("0F0,0F1,0I0,0W0,0I1", "1F0,1B0,1F1,1B1", "rank 0 never runs 0W1"),
    ("0F0,0F1,0W0,0I1,0W1", "1F0,1B0,1F1,1B1", "rank 0 never runs 0I0"),
    ("0F0,0F1,0B0,0W0,0B1", "1F0,1B0,1F1,1B1", "has 0B0 beside 0W0"),
    ("0B0,0F0,0F1,0B1", "1F0,1B0,1F1,1B1", "rank 0 runs 0B0 before 0F0"),
    ("0F0,0F1,0W0,0I0,0B1", "1F0,1B0,1F1,1B1", "rank 0 runs 0W0 before 0I0"),
    ("0F0,0B0,0F1,0B1", "1F0,1F1,1B1,1B0",
     r"rank 0 stands at 0B0 \(line 1, column 2\) until 1B0 of rank 1, rank 1 stands at 1F1 \(line 2, column 2\) until "
     "0F1 of rank 0"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "fault"), COMPUTE)
def test_faults_of_computation(first: str, second: str, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        validate(parse_csv(f"{first}\n{second}\n"))


def test_a_good_table_is_valid() -> None:
    peaks = validate(parse_csv("\n".join(GOOD)))
    assert (peaks.stages, peaks.ranks, peaks.whole, peaks.unsharded) == ((2, 1), (2, 1), (2, 1), (0, 0))
    split = validate(parse_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1"))
    assert (split.ranks, split.whole) == ((2, 2), (2, 1))
    assert validate(parse_csv("0F0,0B0")).ranks == (1,)


LOWERED = str(lower(parse_csv("\n".join(GOOD)), 3)).replace("rank 0: ", "").replace("rank 1: ", "").replace(" ", ",")


@pytest.mark.parametrize(
    ("change", "by", "fault"),
    [
        ("0SEND_F0,", "", "rank 0 never runs 0SEND_F0, behind 0F0"),
        ("0RECV_B1,", "", "1SEND_B1 has no counterpart 0RECV_B1"),
        ("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0", "rank 0 sends 0SEND_F0 where rank 1 runs 1RECV_F1"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "rank 0 runs 0SEND_F0 before 0F0"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "rank 1 runs 1F0 before 1RECV_F0"),
        ("0UNSHARD,", "", "rank 0 runs 0F0 while its weights are not whole"),
        ("0UNSHARD", "0UNSHARD,0UNSHARD", "rank 0 runs 0UNSHARD twice in a row"),
        ("0RESHARD", "0RESHARD,0RESHARD", "rank 0 runs 0RESHARD, and nothing is whole"),
        (",0REDUCE", "", "rank 0 never runs 0REDUCE"),
        ("0B1,0RESHARD,0REDUCE", "0REDUCE,0B1,0RESHARD", "rank 0 runs 0REDUCE before all its gradients"),
        ("0B1,0RESHARD,0REDUCE", "0REDUCE1,0B1,0RESHARD", "rank 0 runs 0REDUCE1 before all its gradients"),
        ("0B1,0RESHARD,0REDUCE", "0B1,0RESHARD,0REDUCE0", "rank 0 runs 0REDUCE0, found 2 micro-batches; reduce once"),
        ("0B1,0RESHARD,0REDUCE", "0B1,0RESHARD,0REDUCE1,0REDUCE0", "rank 0 runs 0REDUCE1 0REDUCE0, found 2 micro-b"),
        ("0B1,0RESHARD,0REDUCE", "0B1,0RESHARD,0REDUCE,0REDUCE1", "rank 0 runs 0REDUCE 0REDUCE1, found 2 micro-bat"),
        ("0SEND_F0", "0SEND_B0", "rank 0 runs 0SEND_B0, and there is no stage -1|before"),
    ],
)
def test_faults_of_transfers_and_weights(change: str, by: str, fault: str) -> None:
    validate(parse_csv(LOWERED))
    assert LOWERED.count(change) == 1
    with pytest.raises(PlanError, match=fault):
        validate(parse_csv(LOWERED.replace(change, by)))


def test_a_send_within_a_rank_is_refused() -> None:
    table = lower(generate("zbv", 2, 2))
    text = table.to_csv().replace("1F0,", "1F0,1SEND_F0,", 1)
    with pytest.raises(PlanError, match="1SEND_F0 goes from rank 1 to itself"):
        validate(parse_csv(text))


def test_every_table_comes_back_from_its_file(tmp_path: Path) -> None:
    for name in ("interleaved", "zb-h1", "dualpipev"):
        table = lower(generate(name, 3, 4, 2 if name == "interleaved" else 1), 3)
        file = tmp_path / f"{name}.csv"
        file.write_text("# a note\n" + table.to_csv() + "\n,,\n")
        assert read_csv(file) == table
        for row in table.rows:
            assert [Action.parse(str(action)) for action in row] == list(row)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0,,1X0", r'own, line 2, column 3: "1X0" is no action: write stage, kind and micro-batch'),
        ("x" * 200_000, 'own, line 1, column 1: "x{40}..." is no action'),
        ('"0F0","0F1","0B0"', "own, line 1: rank 0 never runs 0B1"),
        ("0F0;0B0", r'own, line 1, column 1: "0F0;0B0" is no action: .* or 0SEND_F3, and commas between actions'),
        ("0F0\t0B0\n1F0 1B0", "or 0SEND_F3, and commas between actions"),
        ("0F0,0B0,0f1", "or 0SEND_F3$"),
        ("0F0,0B", 'own, line 1, column 2: "0B" is no action'),
        ("0F0,0B0,0RESHARD1", '"0RESHARD1" is no action'),
        ("0F0,0B0\n0F1,0B1", r"line 2, column 1: stage 0 is on rank 0 \(line 1, column 1\) and on rank 1"),
        ("0F0,0B0\n2F0,2B0", "has stage 2 but no stage 1"),
        ("\n,\n", "holds no action"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 of 3 has no stage"),
    ],
)
def test_errors_of_a_file(text: str, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        validate(parse_csv(text, "own"))


PLACES = [
    ("# notes count\n0F0,,0F1,0B0,0B1,0B1\n1F0,1B0,1F1,1B1", "own, line 2, column 6: rank 0 runs 0B1 twice"),
    ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1", "own, line 2: rank 1 never runs 1B0"),
    ("0F0,0F1,0B0,0W0,0B1\n1F0,1B0,1F1,1B1", "own, line 1, column 4: rank 0 has 0B0 beside 0W0"),
    (
        "0F0,0F1,0B0,0B1\n#\n1B0,1F0,1F1,1B1",
        "own, line 3, column 1: rank 1 runs 1B0 before 1F0 (line 3, column 2); swap",
    ),
    ("0F0,0B0\n#\n\n1F0,1B0", "own, line 3: rank 1 of 3 has no stage"),
    ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0", "own, line 2, column 3: rank 1 never runs 1SEND_B0, behind 1B0"),
    ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "own, line 2, column 4: 1SEND_B0 has no counterpart 0RECV_B0"),
    ("0UNSHARD,0F0,0UNSHARD,0B0,0REDUCE", "own, line 1, column 3: rank 0 runs 0UNSHARD twice in a row"),
    ("0UNSHARD,0F0,0RESHARD,0B0,0REDUCE", "own, line 1, column 4: rank 0 runs 0B0 while its weights are not whole"),
    ("0UNSHARD,0F0,0RESHARD,0RESHARD,0UNSHARD,0B0,0REDUCE", "own, line 1, column 4: rank 0 runs 0RESHARD, and nothing"),
    ("0UNSHARD,0F0,0B0,0REDUCE,0REDUCE0", "own, line 1, column 5: rank 0 runs 0REDUCE 0REDUCE0, found 1 micro-batches"),
]


@pytest.mark.parametrize(("text", "fault"), PLACES)
def test_faults_are_told_with_their_place_in_the_file(text: str, fault: str) -> None:
    """Lines count notes and blank lines, columns count idle cells; of the second of two equal actions, its own."""
    with pytest.raises(PlanError) as caught:
        validate(parse_csv(text, "own"))
    assert str(caught.value).startswith(fault)
    table = parse_csv(text, "own")
    with pytest.raises(PlanError) as caught:  # a table that is in no file names no line
        validate(Table(table.rows, table.placement, table.micro_batches, "made"))
    assert "line" not in str(caught.value)


def test_places_outlive_what_is_added_to_a_table() -> None:
    """What `first` leaves out and `lower` adds moves no action away from its cell."""
    table = parse_csv("0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1F1,1B1,1B0,1F2,1B2", "own")
    made = lower(table.first(2), 3)
    assert made.source is table.source
    assert made.at(1, Action.parse("1B1")) == "own, line 2, column 3"
    assert made.at(1, Action.parse("1RECV_F0")) == "own, line 2"
    with pytest.raises(PlanError, match=r"stands at 0B0 \(line 1, column 2\) until 1SEND_B0"):
        validate(made)


def test_a_text_is_read_once() -> None:
    """A refusal asks a thousand neighbours of a plan for the same table."""
    text = generate("zbv", 2, 3).to_csv()
    assert parse_csv(text, "own") is parse_csv(text, "own")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the schedule .*no such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_bytes(b"0F0,\xff")
    with pytest.raises(PlanError, match="must be UTF-8 text, found byte 0xff"):
        read_csv(tmp_path / "bad.csv")


def test_a_long_table_is_proved_in_work_that_grows_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, equal = [0], Action.__eq__

    def counted(one: Action, other: object) -> bool:
        compared[0] += 1
        return equal(one, other)

    def work(micro_batches: int) -> int:
        lowered = lower(generate("interleaved", 2, micro_batches, 3), 3, each=True)
        before = compared[0]
        validate(lowered)
        return compared[0] - before

    monkeypatch.setattr(Action, "__eq__", counted)
    assert work(200) < 12 * work(25)
