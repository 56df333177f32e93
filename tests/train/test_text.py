"""Sources of text: what becomes a document, and which sentence refuses what does not."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from interlace.errors import DataError
from interlace.train import text as texts
from interlace.train.text import Text
from tokenizer_files import word_level

BIG = "x" * 5_000_000


def read(source: Path | str, *, field: str = "text", spec: str = "bytes", vocab: int = 257, skip: bool = False) -> Text:
    return texts.read(str(source), field, spec, vocab, skip)


def documents(text: Text) -> list[list[int]]:
    """The ids of each document without its end, which is checked to be there."""
    ids = text.tokens.to(torch.int64).tolist()
    bounds = text.starts.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(ids)
    found = [ids[a:b] for a, b in pairwise(bounds)]
    assert all(one[-1] == text.tokenizer.end for one in found)
    return [one[:-1] for one in found]


def strings(text: Text) -> list[str]:
    return [bytes(one).decode() for one in documents(text)]


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    message = caught.value.message
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


# ------------------------------------------------------------------------------------------------------ documents


def test_every_document_is_followed_by_one_end(tmp_path: Path) -> None:
    text = read(jsonl(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "é"}, {"text": "\0"}))
    assert text.tokens.dtype == torch.uint16
    assert text.tokens.to(torch.int64).tolist() == [97, 98, 256, 0xC3, 0xA9, 256, 0, 256]
    assert text.starts.tolist() == [0, 3, 6, 8]
    assert text.characters == 4


def test_text_file_is_one_document_kept_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo")
    assert strings(read(tmp_path / "a.txt")) == ["one\r\n\r\ntwo"]


def test_folder_is_recursive_and_sorted_by_relative_path(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "z.txt").write_text("last")
    (tmp_path / "b" / "deep" / "x.txt").write_text("second")
    jsonl(tmp_path / "a.jsonl", {"text": "first"}, {"text": "first again"})
    (tmp_path / "b" / "readme.md").write_text("not asked for")
    text = read(tmp_path)
    assert strings(text) == ["first", "first again", "second", "last"]
    assert text.files == tuple(str(tmp_path / name) for name in ("a.jsonl", "b/deep/x.txt", "z.txt"))


def test_glob_takes_any_suffix_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.md", "c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.md").mkdir()
    assert strings(read(tmp_path / "*.md")) == ["a.md", "b.md"]


def test_a_name_that_exists_is_not_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("literal")
    (tmp_path / "a1.txt").write_text("matched")
    assert strings(read(tmp_path / "a[1].txt")) == ["literal"]


def test_field_names_the_text(tmp_path: Path) -> None:
    assert strings(read(jsonl(tmp_path / "a.jsonl", {"body": "yes", "text": "no"}), field="body")) == ["yes"]


def test_digest_is_of_the_text_and_its_division(tmp_path: Path) -> None:
    one = read(jsonl(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "c"})).digest
    assert read(jsonl(tmp_path / "b.jsonl", {"text": "ab", "id": 1}, {"text": "c"})).digest == one
    assert read(jsonl(tmp_path / "c.jsonl", {"text": "a"}, {"text": "bc"})).digest != one
    assert read(jsonl(tmp_path / "d.jsonl", {"text": "c"}, {"text": "ab"})).digest != one


def test_reading_in_small_chunks_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"text": "x" * (n % 5)} for n in range(40)))
    whole = read(path, skip=True)
    monkeypatch.setattr(texts, "CHUNK", 100)
    parts = read(path, skip=True)
    assert torch.equal(parts.starts, whole.starts)
    assert parts.tokens.tolist() == whole.tokens.tolist()
    assert parts.skipped == whole.skipped
    assert parts.digest == whole.digest


# --------------------------------------------------------------------------------------------------------- corpus


def test_corpus_is_the_standard_library() -> None:
    text = read("corpus")
    assert {"ast.py", "json/decoder.py", "unittest/case.py"} <= set(text.files)
    assert list(text.files) == sorted(text.files)
    for name in text.files:
        assert not {"test", "tests", "idle_test", "site-packages"} & set(name.split("/")[:-1]), name
    assert text.starts.numel() - 1 + len(text.skipped) == len(text.files)
    assert 5_000_000 < text.tokens.numel() < 40_000_000
    assert text.name.startswith("corpus (standard library of Python 3.")
    assert any(name.endswith("__init__.py:1: an empty document") for name in text.skipped)


def test_corpus_counts_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "b.py": b"b = 1\n",
        "a/c.py": b"c = 1\n",
        "empty.py": b"",
        "latin.py": b"# ok\n# \xe9\n",
        "test/t.py": b"t",
        "a/tests/t.py": b"t",
        "site-packages/p.py": b"p",
        "_sysconfigdata__linux.py": b"here = 1",
        "config-3.11/python-config.py": b"here = 1",
        "note.txt": b"no source",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    text = read("corpus")
    assert strings(text) == ["c = 1\n", "b = 1\n"]
    assert text.files == ("a/c.py", "b.py", "empty.py", "gone.py", "latin.py")
    assert text.skipped == (
        "empty.py:1: an empty document",
        "gone.py: cannot be read (No such file or directory)",
        "latin.py:2: not UTF-8 (byte 0xe9)",
    )


# --------------------------------------------------------------------------------------------------------- faults


def ten_lines(path: Path) -> Path:
    """facebookresearch/metaseq#212, NVIDIA-NeMo/Automodel#1694: every way in which a line goes wrong, in one file."""
    path.write_bytes(
        b'{"text": "good"}\n'
        b"  \n"
        b'{"text": "trunca\n'
        b'["text", "array"]\n'
        b'{"body": "no such field"}\n'
        b'{"text": ""}\n'
        b'{"text": "' + BIG.encode() + b'"}\n'
        b'{"text": "\xff"}\n'
        b'{"text": "windows"}\r\n'
        b'{"text": "no newline"}'
    )
    return path


def test_first_bad_line_stops_with_its_physical_number(tmp_path: Path) -> None:
    path = ten_lines(tmp_path / "in.jsonl")
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}:3: not JSON (")
    assert isinstance(caught.value.__cause__, json.JSONDecodeError)
    assert caught.value.details == {"file": str(path), "line": 3}


def test_bad_lines_are_skipped_and_listed_when_asked(tmp_path: Path) -> None:
    path = ten_lines(tmp_path / "in.jsonl")
    text = read(path, skip=True)
    assert strings(text) == ["good", BIG, "windows", "no newline"]
    reasons = [one.removeprefix(f"{path}:") for one in text.skipped]
    assert [int(one.partition(":")[0]) for one in reasons] == [3, 4, 5, 6, 8]
    assert reasons[0].startswith("3: not JSON (")
    assert reasons[1:] == [
        '4: a JSON array where an object with the field "text" is expected',
        '5: no field "text" (data.field; the line has "body")',
        "6: an empty document",
        "8: not UTF-8 (byte 0xff at byte 11 of the line)",
    ]
    assert read(path, skip=True).digest == text.digest


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": 7}', 'the field "text" is a JSON number, not a string'),
        (b'{"text": true}', 'the field "text" is a JSON boolean, not a string'),
        (b'{"text": null}', 'the field "text" is a JSON null, not a string'),
        (b'{"text": {"a": 1}}', 'the field "text" is a JSON object, not a string'),
        (b'{"text": ""}', "an empty document"),
        (b"{}", 'no field "text" (data.field; the line has no field at all)'),
        (b'"text"', 'a JSON string where an object with the field "text" is expected'),
        (b'{"text": "a\xc3"}', "not UTF-8 (byte 0xc3 at byte 12 of the line)"),
        (b'{"text": "\\ud800"}', 'the field "text" holds half a surrogate pair (\\ud800)'),
        (b'{"text": "a"} {"text": "b"}', "not JSON (Extra data at column 15)"),
        (b'{"text": ' + b"9" * 5000 + b"}", "JSON that Python does not read (Exceeds the limit"),
        (b'{"text": ' + b"[" * 100_000, "JSON that Python does not read ("),
    ],
)
def test_each_fault_has_its_sentence(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n\r\n" + line + b"\n")
    assert refusal(lambda: read(path)).startswith(f"{path}:3: {fault}")


def test_json_is_not_read_as_plain_text(tmp_path: Path) -> None:
    """Its syntax would be trained on; lines are known by .jsonl, in whatever case, in a folder too."""
    jsonl(tmp_path / "a.json", {"text": "one"})
    fault = f"{tmp_path / 'a.json'}: JSON would be read as plain text (name it .jsonl if each line is an object)"
    assert refusal(lambda: read(tmp_path / "a.json")).startswith(fault)
    jsonl(tmp_path / "b.JSONL", {"text": "two"})
    assert strings(read(tmp_path / "b.JSONL")) == strings(read(tmp_path)) == ["two"]
    both = read(f"{tmp_path}/*", skip=True)
    assert (strings(both), both.skipped) == (["two"], (fault,))


def test_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert strings(read(tmp_path / "a.jsonl")) == ["a"]


def test_invalid_utf8_in_a_text_file_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr\xe9e\n")
    assert refusal(lambda: read(path)).startswith(f"{path}:3: not UTF-8 (byte 0xe9)")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    assert refusal(lambda: read(tmp_path)).startswith(f"{tmp_path / 'a.txt'}: cannot be read (")


def test_sources_without_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n\r\n")
    (tmp_path / "folder").mkdir()
    assert f"{tmp_path / 'empty.txt'}:1: an empty document" in refusal(lambda: read(tmp_path / "empty.txt"))
    assert "holds no tokens (1 skipped, the first: " in refusal(lambda: read(tmp_path / "empty.txt", skip=True))
    assert "holds no tokens;" in refusal(lambda: read(tmp_path / "blank.jsonl"))
    assert "holds no .txt or .jsonl file" in refusal(lambda: read(tmp_path / "folder"))
    assert "matches no file" in refusal(lambda: read(tmp_path / "*.csv"))


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    assert f'did you mean "{tmp_path / "train.jsonl"}"?' in refusal(lambda: read(tmp_path / "trian.jsonl"))
    assert 'did you mean "corpus"?' in refusal(lambda: read("corpsu"))
    assert "does not exist;" in refusal(lambda: read(tmp_path / "no" / "folder" / "here.txt"))
    assert "is neither a file nor a folder; write" in refusal(lambda: read("/dev/null"))


# ----------------------------------------------------------------------------------------------------- tokenizers


def test_tokenizer_file(tmp_path: Path) -> None:
    spec = word_level(tmp_path, cut=True)
    path = jsonl(tmp_path / "a.jsonl", {"text": "the cat sat down"}, {"text": "sat"})
    text = read(path, spec=str(spec), vocab=7)
    assert documents(text) == [[3, 4, 5, 6], [5]]  # the stored truncation, padding and template are not applied
    assert (text.tokenizer.end, text.tokenizer.end_name, text.tokenizer.size) == (2, '"</s>" (id 2)', 7)
    assert read(path, spec=str(tmp_path), vocab=100_000).tokens.dtype == torch.int32
    assert read(path).digest == text.digest  # of the text, whatever the tokenizer
    assert read(path).tokenizer.digest != text.tokenizer.digest


def test_an_end_spelt_in_the_text_ends_nothing(tmp_path: Path) -> None:
    spec = word_level(tmp_path)
    text = read(jsonl(tmp_path / "a.jsonl", {"text": "the </s> cat"}, {"text": "sat"}), spec=str(spec))
    assert documents(text) == [[3, 2, 4], [5]]


def test_document_that_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    library = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))  # whose [UNK] it does not hold
    library.add_special_tokens([AddedToken("</s>", special=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    path = jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"}, {"text": "a"})
    message = refusal(lambda: read(path, spec=str(tmp_path)))
    assert message.startswith(f"{path}:2: the tokenizer {tmp_path / 'tokenizer.json'} refuses the document")


def test_token_id_outside_the_vocabulary_names_id_and_place(tmp_path: Path) -> None:
    spec = str(word_level(tmp_path))
    path = jsonl(tmp_path / "a.jsonl", {"text": "the cat"}, {"text": ""}, {"text": "cat down sat"}, {"text": "down"})
    with pytest.raises(DataError) as caught:
        read(path, spec=spec, vocab=6, skip=True)
    message = f"{path}:3: the document that begins here holds token id 6, outside the model's vocabulary of 6 ids"
    assert caught.value.message.startswith(message)
    assert "at least 7" in caught.value.message
    assert caught.value.details == {"file": str(path), "line": 3, "token": 6, "vocab_size": 6}
    jsonl(path, *({"text": word} for word in ("the", "cat", "sat", "the", "down", "cat", "sat")))
    assert refusal(lambda: read(path, spec=spec, vocab=6)).startswith(f"{path}:5: the document that begins here")
    assert "end-of-document id 256" in refusal(lambda: read(path, vocab=256))


def test_text_that_gives_no_token_is_an_empty_document(tmp_path: Path) -> None:
    spec = str(word_level(tmp_path))
    path = jsonl(tmp_path / "a.jsonl", {"text": "the"}, {"text": "   "}, {"text": "cat"})
    assert refusal(lambda: read(path, spec=spec)).startswith(f"{path}:2: an empty document")
    text = read(path, spec=spec, skip=True)
    assert documents(text) == [[3], [4]]
    assert text.skipped == (f"{path}:2: an empty document",)
