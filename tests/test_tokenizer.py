"""Tokenizers: the ids of texts and of packed documents, the end of a document, and text that grows id by id."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from interlace.errors import DataError
from interlace.tokenizer import stream, tokenizer
from tokenizer_files import byte_level, word_level

SAMPLE = "def naïve(€): 😀\n\treturn 日本"


def refusal(spec: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        tokenizer(str(spec))
    message = caught.value.message
    assert "\n" not in message
    assert message.endswith(".")
    return message


# --- bytes


def test_documents_of_bytes_are_packed_each_with_its_end() -> None:
    words = tokenizer("bytes")
    ids, lengths = words.pack(["ab", "", "é", "\0\xff"])
    assert ids == array("i", [97, 98, 256, 256, 0xC3, 0xA9, 256, 0, 0xC3, 0xBF, 256])
    assert lengths == [2, 0, 2, 3]
    assert words.pack([]) == (array("i"), [])
    assert (words.name, words.digest, words.end, words.end_name, words.size) == ("bytes", "bytes", 256, "id 256", 257)


def test_the_end_stands_for_no_text() -> None:
    words = tokenizer("bytes")
    assert words.decode([97, 256, 98]) == "ab"
    assert words.encode("é") == [0xC3, 0xA9]


def test_half_a_surrogate_pair_in_a_prompt_is_replaced(tmp_path: Path) -> None:
    for words in (tokenizer("bytes"), tokenizer(str(byte_level(tmp_path, ["</s>"])))):
        assert words.encode("a\udce9b") == words.encode("a?b")


@pytest.mark.parametrize("written", ["naïve €5 😀!", "plain", "", "日本"])
def test_a_character_comes_whole(written: str) -> None:
    pieces = list(stream(tokenizer("bytes"), list(written.encode())))
    assert pieces == list(written)


@pytest.mark.parametrize("raw", [b"a\xffb", b"ok\xe2\x82", b"\xe2\x82", b"\xf0\x9f\x98a\x80"])
def test_bytes_that_are_no_text_are_replaced(raw: bytes) -> None:
    assert "".join(stream(tokenizer("bytes"), list(raw))) == raw.decode(errors="replace")


# --- files


def test_the_stored_truncation_padding_and_template_are_not_applied(tmp_path: Path) -> None:
    words = tokenizer(str(word_level(tmp_path, cut=True)))
    assert words.pack(["the cat sat down", "", "sat"]) == (array("i", [3, 4, 5, 6, 2, 2, 5, 2]), [4, 0, 1])
    assert words.encode("the cat sat down") == [3, 4, 5, 6]
    assert (words.end, words.end_name, words.size) == (2, '"</s>" (id 2)', 7)
    assert tokenizer(str(tmp_path)).digest == words.digest  # the folder means the file in it


@pytest.mark.parametrize(
    ("stated", "end"), [(None, "<|endoftext|>"), ("<pad>", "<pad>"), ({"content": "</s>"}, "</s>")]
)
def test_a_text_of_several_ids_a_character_goes_both_ways(tmp_path: Path, stated: Any, end: str) -> None:
    spec = byte_level(tmp_path, ["<pad>", "</s>", "<|endoftext|>"])
    if stated is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
    words = tokenizer(str(spec))
    assert words.end_name == f'"{end}" (id {words.end})'
    ids, lengths = words.pack([SAMPLE])
    assert ids.tolist() == [*words.encode(SAMPLE), words.end]
    assert len(words.encode(SAMPLE)) == lengths[0] > 20
    assert words.decode(ids.tolist()) == SAMPLE
    assert "".join(stream(words, words.encode(SAMPLE))) == SAMPLE
    assert not any("\ufffd" in piece for piece in stream(words, words.encode(SAMPLE)))


def test_end_is_what_the_configuration_next_door_says(tmp_path: Path) -> None:
    spec = word_level(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    digests = set()
    for stated, end in (("<pad>", 1), ({"content": "<pad>"}, 1), (None, 2)):
        config.write_text(json.dumps({"eos_token": stated}))
        assert tokenizer(str(spec)).end == end
        digests.add(tokenizer(str(spec)).digest)
    assert len(digests) == 2  # the end is part of what the tokenizer does
    config.write_text(json.dumps({"eos_token": "<gone>"}))
    assert 'names the eos_token "<gone>"' in refusal(spec)


def test_tokenizer_without_an_end_gets_one_past_its_own_ids(tmp_path: Path) -> None:
    words = tokenizer(str(word_level(tmp_path, special=("<pad>",))))
    own = words.encode(SAMPLE)
    assert words.end == words.size - 1 > max(own)
    assert words.decode([*own, words.end]) == words.decode(own)
    assert "one past the tokenizer's own" in words.end_name
    packed, lengths = words.pack([SAMPLE])
    assert list(packed) == [*own, words.end]
    assert lengths == [len(own)]


def test_unusable_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    assert "is not a tokenizer.json" in refusal(tmp_path / "bad.json")
    assert "cannot be read" in refusal(tmp_path / "none.json")
    assert "cannot be read" in refusal(tmp_path)
    assert "cannot be read" in refusal("byte")
