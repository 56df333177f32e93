"""Packing, order, cursor and batches against a plain-Python reading of the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from interlace.config import DataSection
from interlace.errors import DataError
from interlace.train.data import IGNORED, Batch, Cursor, Dataset, Span, micro_batches, rows, shard

END = 256


def write(folder: Path, *documents: str) -> str:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return str(path)


def opened(source: str, length: int, seed: int = 0, **keys: Any) -> Dataset:
    return Dataset.open(DataSection(source=source, sequence_length=length, **keys), 257, seed)


def numbered(folder: Path, count: int, **keys: Any) -> Dataset:
    """`count` sequences of 8 tokens; the text of sequence k spells k."""
    return opened(write(folder, *(f"n{k:06d}" for k in range(count))), 8, **keys)


def number(dataset: Dataset, epoch: int, index: int) -> int:
    """The number spelt by a sequence."""
    tokens = dataset.sequences(epoch, [index]).tokens_BT[0].tolist()
    assert tokens[-1] == END
    return int(bytes(tokens[1:-1]))


# -------------------------------------------------------------------------------------------------------- packing


def reference(documents: list[bytes], length: int, separate: bool) -> list[dict[str, list[int]]]:
    """Token by token: a list of (id, document), cut into windows."""
    stream = [(token, n) for n, one in enumerate(documents) for token in [*one, END]]
    sequences = []
    for begin in range(0, len(stream) - 1, length):
        row: dict[str, list[int]] = {"tokens": [], "labels": [], "positions": [], "documents": []}
        for i in range(begin, begin + length):
            token, document = stream[i] if i < len(stream) else (END, len(documents))
            label = IGNORED
            if i + 1 < len(stream) and (not separate or stream[i + 1][1] == document):
                label = stream[i + 1][0]
            fresh = i == begin or (separate and document != row["documents"][-1])
            row["positions"].append(0 if fresh else row["positions"][-1] + 1)
            row["documents"].append(document if separate else 0)
            row["tokens"].append(token)
            row["labels"].append(label)
        sequences.append(row)
    return sequences


def as_rows(batch: Batch) -> list[dict[str, list[int]]]:
    return [
        {
            "tokens": batch.tokens_BT[i].tolist(),
            "labels": batch.labels_BT[i].tolist(),
            "positions": batch.positions_BT[i].tolist(),
            "documents": batch.documents_BT[i].tolist(),
        }
        for i in range(batch.samples_B.numel())
    ]


def test_packing_by_hand(tmp_path: Path) -> None:
    batch = opened(write(tmp_path, "abcde", "f"), 3).sequences(0, [0, 1, 2])
    assert batch.tokens_BT.tolist() == [[97, 98, 99], [100, 101, END], [102, END, END]]
    assert batch.labels_BT.tolist() == [[98, 99, 100], [101, END, IGNORED], [END, IGNORED, IGNORED]]
    assert batch.positions_BT.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 0]]
    assert batch.documents_BT.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 2]]
    assert batch.samples_B.tolist() == [0, 1, 2]
    assert all(one.dtype == torch.int64 for one in (batch.tokens_BT, batch.labels_BT, batch.samples_B))

    joined = opened(write(tmp_path, "abcde", "f"), 3, documents="joined").sequences(0, [0, 1, 2])
    assert joined.tokens_BT.tolist() == batch.tokens_BT.tolist()
    assert joined.labels_BT.tolist() == [[98, 99, 100], [101, END, 102], [END, IGNORED, IGNORED]]
    assert joined.positions_BT.tolist() == [[0, 1, 2]] * 3
    assert joined.documents_BT.tolist() == [[0, 0, 0]] * 3


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 100])
def test_packing_equals_the_reference(tmp_path: Path, length: int, separate: bool) -> None:
    draw = Random(length)
    texts = ["".join(draw.choices("abcdefé", k=draw.randint(1, 20))) for _ in range(23)]
    dataset = opened(write(tmp_path, *texts), length, documents="separate" if separate else "joined")
    expected = reference([one.encode() for one in texts], length, separate)
    assert dataset.num_sequences == len(expected)
    assert as_rows(dataset.sequences(0, range(len(expected)))) == expected
    backwards = list(range(len(expected)))[::-2]
    assert as_rows(dataset.sequences(0, backwards)) == [expected[k] for k in backwards]


@pytest.mark.parametrize(("tokens", "sequences"), [(2, 1), (8, 1), (9, 1), (10, 2), (17, 2), (18, 3)])
def test_every_token_is_predicted_once(tmp_path: Path, tokens: int, sequences: int) -> None:
    text = "".join(chr(97 + i) for i in range(tokens - 1))
    dataset = opened(write(tmp_path, text), 8, documents="joined")
    assert (dataset.num_tokens, dataset.num_sequences) == (tokens, sequences)
    batch = dataset.sequences(0, range(sequences))
    assert batch.labels_BT[batch.labels_BT != IGNORED].tolist() == [*text.encode()[1:], END]
    inputs = batch.tokens_BT.flatten()[: tokens - 1].tolist()
    assert inputs == [*text.encode()]


def test_a_share_of_nothing_is_an_empty_batch(tmp_path: Path) -> None:
    batch = numbered(tmp_path, 3).sequences(0, [])
    assert batch.tokens_BT.shape == batch.labels_BT.shape == batch.positions_BT.shape == (0, 8)
    assert batch.samples_B.shape == (0,)


# ---------------------------------------------------------------------------------------------------------- order


def test_order_is_a_new_permutation_each_epoch(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 101)
    orders = [dataset.indices(dataset.cursor_at(epoch, 101), 101) for epoch in range(3)]
    assert all(sorted(order) == list(range(101)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] != list(range(101))
    again = numbered(tmp_path, 101)
    assert again.indices(again.cursor_at(2, 101), 101) == orders[2]
    other = numbered(tmp_path, 101, seed=1)
    assert other.indices(other.cursor_at(0, 101), 101) != orders[0]


def test_source_order_without_shuffle(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 5, shuffle=False)
    batches = [dataset.indices(dataset.cursor_at(step, 2), 2) for step in range(5)]
    assert batches == [[0, 1], [2, 3], [4], [0, 1], [2, 3]]


def test_sample_numbers_are_unique_in_a_run(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 5)
    samples: list[int] = []
    for step in range(6):
        cursor = dataset.cursor_at(step, 2)
        samples += dataset.sequences(cursor.epoch, dataset.indices(cursor, 2)).samples_B.tolist()
    assert sorted(samples) == list(range(10))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("global_batch", [1, 3, 4, 5, 11])
def test_walking_equals_jumping(tmp_path: Path, global_batch: int, drop_last: bool) -> None:
    dataset = numbered(tmp_path, 11, drop_last=drop_last)
    steps = dataset.steps_per_epoch(global_batch)
    assert steps == (11 // global_batch if drop_last else -(-11 // global_batch))
    cursor = dataset.cursor_at(0, global_batch)
    for step in range(3 * steps + 1):
        assert cursor == dataset.cursor_at(step, global_batch)
        assert cursor.epoch == step // steps
        cursor = dataset.advance(cursor, global_batch)


# --------------------------------------------------------------------------------------------------------- resume


def walk(dataset: Dataset, cursor: Cursor, global_batch: int, last_epoch: int) -> list[list[list[int]]]:
    """Per step and data rank (2 of them) the numbers seen until the end of `last_epoch`."""
    seen = []
    while cursor.epoch <= last_epoch:
        indices = dataset.indices(cursor, global_batch)
        seen.append([[number(dataset, cursor.epoch, k) for k in shard(indices, 2, rank)] for rank in range(2)])
        cursor = dataset.advance(cursor, global_batch)
    return seen


def test_resume_continues_position_and_order(tmp_path: Path) -> None:
    """huggingface/accelerate#4195: 101 numbered samples, 3 epochs, stopped in the middle and at the ends of epochs."""
    dataset = numbered(tmp_path, 101)
    global_batch, steps = 8, 13
    whole = walk(dataset, dataset.cursor_at(0, global_batch), global_batch, 2)
    assert len(whole) == 3 * steps
    for epoch in range(3):
        numbers = [n for step in whole[epoch * steps : (epoch + 1) * steps] for rank in step for n in rank]
        assert sorted(numbers) == list(range(101))
    for stop in (1, 12, 13, 14, 20, 26, 27, 38):
        cursor = dataset.cursor_at(0, global_batch)
        for _ in range(stop):
            cursor = dataset.advance(cursor, global_batch)
        state = json.loads(json.dumps(cursor.to_json()))
        fresh = numbered(tmp_path, 101)
        assert walk(fresh, fresh.resume(state, global_batch), global_batch, 2) == whole[stop:], stop


def test_the_exact_end_of_an_epoch_is_the_next_ones_beginning(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 16)
    end = dataset.advance(dataset.advance(dataset.cursor_at(0, 8), 8), 8)
    assert (end.epoch, end.offset) == (1, 0)
    assert dataset.resume(Cursor(0, 16, dataset.digest).to_json(), 8) == end


@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_under_another_batch_size_goes_on_where_it_was(tmp_path: Path, drop_last: bool) -> None:
    dataset = numbered(tmp_path, 20, drop_last=drop_last)
    order = dataset.indices(dataset.cursor_at(0, 20), 20)
    state = dataset.cursor_at(3, 4).to_json()
    cursor = dataset.resume(state, 6)
    assert dataset.indices(cursor, 6) == order[12:18]
    cursor = dataset.advance(cursor, 6)
    assert (cursor.epoch, cursor.offset) == ((1, 0) if drop_last else (0, 18))
    if not drop_last:
        assert dataset.indices(cursor, 6) == order[18:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_whose_batches_change_is_followed_by_its_spans(tmp_path: Path, drop_last: bool) -> None:
    """20 sequences in batches of 6, from step 5 on of 3, from step 9 on of 8: place by place as a run walks."""
    dataset = numbered(tmp_path, 20, drop_last=drop_last)
    spans, step, cursor, places = [], 0, dataset.cursor_at(0, 6), []
    for steps, size in ((5, 6), (4, 3), (7, 8)):
        cursor = dataset.resume(cursor.to_json(), size)
        spans.append(Span(step, cursor.epoch, cursor.offset, size))
        for _ in range(steps):
            places.append((step, cursor, dataset.indices(cursor, size)))
            step, cursor = step + 1, dataset.advance(cursor, size)
    assert len({cursor.epoch for _, cursor, _ in places}) > 3
    for step, cursor, indices in places:
        assert dataset.cursor_in(spans, step) == cursor
        assert [row["step"] for row in rows(dataset, range(step, step + 1), 8, spans)] == [step] * len(indices)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [3, 6, 20, 50])
def test_steps_until_the_end_of_an_epoch_are_those_that_a_walk_makes(
    tmp_path: Path, size: int, drop_last: bool
) -> None:
    dataset = numbered(tmp_path, 20, drop_last=drop_last)
    if drop_last and size > 20:
        return
    for begin in (dataset.cursor_at(0, 6), dataset.cursor_at(2, 6), dataset.cursor_at(5, 6)):
        begin = cursor = dataset.resume(begin.to_json(), size)
        made = 0
        while cursor.epoch < 3:
            made, cursor = made + 1, dataset.advance(cursor, size)
        assert dataset.steps_until(begin, 3, size) == made


def test_other_data_are_refused_by_name(tmp_path: Path) -> None:
    saved = numbered(tmp_path, 20).cursor_at(1, 4).to_json()
    for other, part in (
        (numbered(tmp_path, 20, seed=1), "seed (0, now 1)"),
        (numbered(tmp_path, 20, shuffle=False), "shuffle (true, now false)"),
        (opened(str(tmp_path / "in.jsonl"), 4), "sequence_length (8, now 4)"),
        (numbered(tmp_path, 21), "source ("),
    ):
        with pytest.raises(DataError) as caught:
            other.resume(saved, 4)
        assert f"differ from the checkpoint's in {part}" in caught.value.message
        assert "), " not in caught.value.message.partition(";")[0]  # and in nothing else


@pytest.mark.parametrize(
    "change",
    [{"epoch": -1}, {"epoch": None}, {"offset": 1.0}, {"offset": True}, {"offset": 21}, {"digest": 5}],
)
def test_damaged_cursor_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    dataset = numbered(tmp_path, 20)
    with pytest.raises(DataError, match="is damaged"):
        dataset.resume(dataset.cursor_at(1, 4).to_json() | change, 4)
    with pytest.raises(DataError, match="is damaged"):
        dataset.resume({}, 4)


# -------------------------------------------------------------------------------------------------- ranks, batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_ten_samples_on_four_ranks(tmp_path: Path, drop_last: bool) -> None:
    """horovod/horovod#708, Lightning-AI/litData#233: all ranks end at one step; each sample once, or 8 and said."""
    dataset = numbered(tmp_path, 10, drop_last=drop_last)
    steps = dataset.steps_per_epoch(4)
    per_rank = []
    for rank in range(4):
        mine = numbered(tmp_path, 10, drop_last=drop_last)  # as in a process of its own
        cursors = [mine.cursor_at(step, 4) for step in range(steps)]
        per_rank.append([shard(mine.indices(cursor, 4), 4, rank) for cursor in cursors])
    used = [index for rank in per_rank for step in rank for index in step]
    assert all(len(rank) == steps for rank in per_rank)
    if drop_last:
        assert (steps, len(used), len(set(used))) == (2, 8, 8)
        assert "the last 2 sequences of each epoch dropped (drop_last)" in dataset.describe(4)
    else:
        assert steps == 3
        assert sorted(used) == list(range(10))
        assert [len(rank[2]) for rank in per_rank] == [1, 1, 0, 0]
        assert "the last batch of each epoch has 2 sequences" in dataset.describe(4)
    assert "last" not in dataset.describe(5)


def test_drop_last_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 10, drop_last=True)
    with pytest.raises(DataError, match=r"global_batch is 11 and the source has 10 sequences; use .* at most 10"):
        dataset.cursor_at(0, 11)
    assert numbered(tmp_path, 10).steps_per_epoch(11) == 1


@pytest.mark.parametrize(("count", "parts"), [(0, 3), (1, 3), (7, 3), (8, 4), (10, 4), (5, 1)])
def test_shards_and_micro_batches_are_contiguous_and_balanced(count: int, parts: int) -> None:
    indices = [3 * i + 1 for i in range(count)]
    shares = [shard(indices, parts, rank) for rank in range(parts)]
    assert [index for share in shares for index in share] == indices
    assert [len(share) for share in shares] == [count // parts + (rank < count % parts) for rank in range(parts)]
    assert micro_batches(indices, parts) == shares


def test_rows_show_what_the_model_sees(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 5)
    shown = list(rows(dataset, range(1, 4), 2))
    assert [(row["step"], row["index"]) for row in shown] == [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert list(shown[0]) == ["step", "index", "tokens", "labels", "positions", "documents"]
    place = iter(shown)
    for step in (1, 2, 3):
        cursor = dataset.cursor_at(step, 2)
        indices = dataset.indices(cursor, 2)
        whole = as_rows(dataset.sequences(cursor.epoch, indices))
        split = [row for rank in range(2) for row in as_rows(dataset.sequences(cursor.epoch, shard(indices, 2, rank)))]
        assert split == whole  # any division over data ranks is the same rows
        for expected in whole:
            row = next(place)
            assert {key: row[key] for key in expected} == expected
    json.dumps(shown)


def test_describe_and_records(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "abc"}\n{"text": ""}\n{"text": "d"}\n')
    dataset = opened(str(path), 4, skip_bad_lines=True)
    assert dataset.describe() == (
        f"data {path}: 1 file, 2 documents, 6 tokens (tokenizer bytes, a document ends with id 256), "
        f"2 sequences of 4, 1 skipped (first: {path}:2: an empty document)"
    )
    assert dataset.files == [str(path)]
    assert dataset.skipped == [f"{path}:2: an empty document"]
    assert dataset.digest.split()[1:] == [
        "tokenizer=bytes",
        "sequence_length=4",
        "seed=0",
        "shuffle=true",
        "documents=separate",
        "drop_last=false",
    ]
    assert opened(str(path), 4, skip_bad_lines=True).digest == dataset.digest


def test_ids_up_to_the_largest_vocabulary_survive_storage(tmp_path: Path) -> None:
    """Ids beyond 32767 (sign) and beyond 65535 (width)."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    for top in (40_000, 65_535, 200_000):
        library = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": top}, unk_token="</s>"))
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        library.add_special_tokens([AddedToken("</s>", special=True)])
        library.save(str(tmp_path / "tokenizer.json"))
        section = DataSection(
            source=write(tmp_path, "a b"), tokenizer=str(tmp_path / "tokenizer.json"), sequence_length=3
        )
        dataset = Dataset.open(section, top + 1, 0)
        assert dataset.sequences(0, [0]).labels_BT.tolist() == [[top, 0, IGNORED]]
        assert 'a document ends with "</s>" (id 0)' in dataset.describe()
