"""Reading: every damage, wrong manifest and hostile file is refused by name, and an older checkpoint found."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import assert_holds, pieces, save, tensors
from interlace import checkpoint
from interlace.checkpoint import LOCK, MANIFEST, Piece, Reader, Writer, find
from interlace.checkpoint.manifest import blake2b
from interlace.errors import CheckpointError, SecurityError


def reseal(body: dict[str, Any] | str) -> bytes:
    """A manifest whose own digest is right, whatever it says."""
    text = body if isinstance(body, str) else json.dumps(body)
    rest = b'",\n"body":' + text.encode() + b"}\n"
    return b'{"blake2b":"' + blake2b(rest) + rest


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_bytes())["body"])


# -- damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    save(root, 40, 2)
    save(root, 50, 3)
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "checkpoints"))


def assert_falls_back(root: Path, names: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find(root, root / "step-50")
    assert names in str(caught.value)
    found, notes = find(root)
    assert found == root / "step-40"
    assert len(notes) == 1
    assert notes[0].startswith("step-50 passed over: ")
    assert names in notes[0]
    assert_holds(found, tensors(40))


@pytest.mark.parametrize("length", ["0", "1", "8", "header", "half", "-1", "+1"])
@pytest.mark.parametrize("name", ["rank-1.safetensors", MANIFEST])
def test_truncated_or_grown(root: Path, name: str, length: str) -> None:
    path = root / "step-50" / name
    size = path.stat().st_size
    wanted = {"header": 200, "half": size // 2, "-1": size - 1, "+1": size + 1}.get(length)
    os.truncate(path, int(length) if wanted is None else wanted)
    assert_falls_back(root, name)


def flip(path: Path, at: int) -> bytes:
    """Flip bit `at` of a file; -> what the file was."""
    data = path.read_bytes()
    path.write_bytes(data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :])
    return data


def read_all(folder: Path) -> None:
    reader = Reader(folder)
    for name in reader.names:
        reader.read(name)
    reader._check_header(0)  # a file without any elements is touched by verify alone


def test_any_flipped_bit_is_found(root: Path) -> None:
    draw = random.Random(5)
    folder = root / "step-50"
    for trial in range(60):
        path = draw.choice(sorted(folder.iterdir()))
        size = 8 * path.stat().st_size
        data = flip(path, draw.randrange(size if trial % 3 else min(size, 1000)))
        for check in (lambda: Reader(folder).verify(), lambda: read_all(folder)):
            with pytest.raises(CheckpointError, match=path.name):
                check()
        path.write_bytes(data)
    assert_holds(folder, tensors(50))


def test_a_bit_in_any_byte_is_found(tmp_path: Path) -> None:
    """Every byte once, empty pieces beside full ones: a digest of one must not stand for the other."""
    names = {"nothing", "scale", "mask", "main/blocks.0.mlp.up.weight"}
    values = {name: value for name, value in tensors().items() if name in names}
    writer = Writer(tmp_path, 0, 1, 5)
    writer.save(1, pieces(values, 0, 1), {})
    writer.close()
    draw, folder = random.Random(6), tmp_path / "step-1"
    for path in sorted(folder.iterdir()):
        for byte in range(path.stat().st_size):
            data = flip(path, 8 * byte + draw.randrange(8))
            with pytest.raises(CheckpointError, match=path.name):
                Reader(folder).verify()
            path.write_bytes(data)
    assert_holds(folder, values)


def test_a_flipped_bit_names_the_tensor_and_spares_the_others(root: Path) -> None:
    folder, name = root / "step-50", "main/embedding.weight"
    piece = next(piece for piece in manifest_of(folder)["tensors"][name]["pieces"] if piece[2] - piece[1] > 3)
    path = folder / f"rank-{piece[0]}.safetensors"
    data = bytearray(path.read_bytes())
    data[piece[3] + 5] ^= 16  # in element start + 1
    path.write_bytes(data)
    reader = Reader(folder)
    for start, stop in [(piece[1], piece[1] + 1), (piece[1], piece[2]), (0, 771)]:
        with pytest.raises(
            CheckpointError, match=rf"{path.name} is damaged or another file: '{name}' \[{piece[1]}, {piece[2]}\)"
        ):
            reader.read(name, start, stop)
    reader.read("exp_avg/blocks.0.mlp.up.weight")
    assert find(root, verify=True)[0] == root / "step-40"


def test_missing_renamed_swapped_and_extra_shards(root: Path, tmp_path: Path) -> None:
    folder = root / "step-50"
    (folder / "rank-1.safetensors").rename(folder / "rank-7.safetensors")
    assert_falls_back(root, "rank-1.safetensors is missing")
    (folder / "rank-7.safetensors").rename(folder / "rank-1.safetensors")
    (folder / "notes.txt").write_text("mine")
    assert Reader(folder).strays == ("notes.txt",)

    def half(rank: int) -> list[Piece]:
        return [Piece("w", (10,), "N/dp", 5 * rank, 5 * rank + 5, torch.full((5,), float(rank)))]

    writers = [Writer(tmp_path / "same-size", rank, 2, 5, token="t") for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.save(1, half(rank), {})
    for writer in writers:
        writer.close()
    folder = tmp_path / "same-size" / "step-1"
    one, two = folder / "rank-0.safetensors", folder / "rank-1.safetensors"
    assert one.stat().st_size == two.stat().st_size
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    with pytest.raises(CheckpointError, match=r"rank-0.safetensors is damaged or another file: its header"):
        Reader(folder).read("w")


def test_a_folder_under_another_step_is_not_the_newest(root: Path) -> None:
    (root / "step-40").rename(root / "step-60")
    found, notes = find(root)
    assert found == root / "step-50"
    assert "holds step 40: the folder was renamed" in notes[0]


def test_unknown_names_and_ranges(root: Path) -> None:
    reader = Reader(root / "step-50")
    with pytest.raises(CheckpointError, match=r"no tensor 'main/embeding.weight'; nearest: 'main/embedding.weight'"):
        reader.read("main/embeding.weight")
    with pytest.raises(CheckpointError, match=r"elements \[0, 2\) of 'scale' were asked for; it has \[0, 1\)"):
        reader.read("scale", 0, 2)


def test_nothing_to_find_and_nothing_valid(root: Path) -> None:
    assert find(root / "none") == (None, ())
    with pytest.raises(CheckpointError, match=r"step-9/manifest.json is missing"):
        find(root, root / "step-9")
    for folder in root.glob("step-*"):
        (folder / MANIFEST).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint under .* is valid .*step-50.*step-40"):
        find(root)


# -- hostile files


BODIES: dict[str, str | Callable[[dict[str, Any]], Any]] = {
    "not JSON": "{'a': 1}",
    "cut": '{"format": "interlace-checkpoint-1"',
    "duplicate key": '{"step": 1, "step": 2}',
    "NaN": '{"step": NaN}',
    "infinite": '{"meta": {"loss": 1e999}}',
    "huge number": '{"step": ' + "9" * 10000 + "}",
    "deep list": "[" * 200_000,
    "deep object": '{"meta":' * 100_000,
    "not an object": "[1, 2]",
    "null": "null",
    "other format": lambda m: m | {"format": "interlace-checkpoint-9"},
    "step a string": lambda m: m | {"step": "50"},
    "step true": lambda m: m | {"step": True},
    "step negative": lambda m: m | {"step": -1},
    "meta a list": lambda m: m | {"meta": []},
    "files an object": lambda m: m | {"files": {}},
    "file row short": lambda m: m | {"files": [row[:2] for row in m["files"]]},
    "file size a float": lambda m: m | {"files": [[n, float(s), h, d] for n, s, h, d in m["files"]]},
    "file listed twice": lambda m: m | {"files": [*m["files"], m["files"][0]]},
    "no files": lambda m: m | {"files": []},
    "tensors null": lambda m: m | {"tensors": None},
    "tensor a string": lambda m: m | {"tensors": {"w": "x"}},
    "no tensors": lambda m: m | {"tensors": {}},  # the files' bytes are then covered by nothing
    "dtype": lambda m: edit(m, dtype="F99"),
    "shape": lambda m: edit(m, shape=[2**70]),
    "shape of strings": lambda m: edit(m, shape=["1"]),
    "shape negative": lambda m: edit(m, shape=[-1, -771]),
    "shape too large": lambda m: edit(m, shape=[257, 4]),
    "pieces of strings": lambda m: edit(m, pieces=["abcde"]),
    "piece twice": lambda m: edit(m, pieces=m["tensors"]["main/embedding.weight"]["pieces"] * 2),
    "offset outside": lambda m: edit(m, pieces=[[0, 0, 771, 10**9, 0]]),
    "file outside": lambda m: edit(m, pieces=[[9, 0, 771, 1000, 0]]),
    "offset negative": lambda m: edit(m, pieces=[[0, 0, 771, -8, 0]]),
    "backwards": lambda m: edit(m, pieces=[[0, 771, 0, 1000, 0]]),
}


def edit(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    entry = manifest["tensors"]["main/embedding.weight"] | changes
    return manifest | {"tensors": manifest["tensors"] | {"main/embedding.weight": entry}}


@pytest.mark.parametrize("case", BODIES)
def test_a_wrong_manifest_is_refused(root: Path, case: str) -> None:
    path, body = root / "step-50" / MANIFEST, BODIES[case]
    path.write_bytes(reseal(body(manifest_of(path.parent)) if callable(body) else body))
    began = time.monotonic()
    assert_falls_back(root, "step-50/manifest.json")
    assert time.monotonic() - began < 2
    path.write_text(body if isinstance(body, str) else "{}")  # without its seal
    assert_falls_back(root, "step-50/manifest.json")


def test_an_intact_manifest_passes_when_sealed_again(root: Path) -> None:
    path = root / "step-50" / MANIFEST
    path.write_bytes(reseal(manifest_of(path.parent)))
    assert_holds(path.parent, tensors(50))


def test_a_manifest_of_100_mb_is_refused_unread(root: Path) -> None:
    path = root / "step-50" / MANIFEST
    os.truncate(path, 100 << 20)
    began = time.monotonic()
    assert_falls_back(root, "104,857,600 bytes")
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    "name",
    ["../step-40/rank-0.safetensors", "/etc/passwd", "..", ".", "", "sub/rank-0.safetensors", "rank-0.safetensors\0",
     "rank-0.safetensors\n", "data.pkl", "a" * 4096, "rank-00.safetensors", "rank-\u0661.safetensors"],
)  # fmt: skip
def test_a_file_name_that_leads_elsewhere_is_a_security_refusal(root: Path, name: str) -> None:
    path = root / "step-50" / MANIFEST
    manifest = manifest_of(path.parent)
    manifest["files"][0][0] = name
    path.write_bytes(reseal(manifest))
    for resume in ("auto", path.parent):
        with pytest.raises(SecurityError, match=r"only rank-N.safetensors"):
            find(root, resume)


@pytest.mark.parametrize("name", ["rank-1.safetensors", MANIFEST])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_links_and_pipes_are_not_opened(root: Path, name: str, kind: str) -> None:
    path = root / "step-50" / name
    kept = path.rename(root / "elsewhere")
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(SecurityError, match="link or no regular file"):
        find(root)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_in_the_folder_is_never_opened(root: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    pickle.loads(payload)  # it works
    canary.unlink()
    folder = root / "step-50"
    for name in (".metadata", "state.pt", "rank-9.safetensors", "part-0.json"):
        (folder / name).write_bytes(payload)
    assert Reader(folder).strays == (".metadata", "part-0.json", "rank-9.safetensors", "state.pt")
    assert_holds(folder, tensors(50))
    for name in (MANIFEST, "rank-0.safetensors"):
        (folder / name).write_bytes(payload)
        assert_falls_back(root, MANIFEST)
    (root / LOCK).write_bytes(payload)
    save(root, 70)
    assert not canary.exists()
    for path in Path(checkpoint.__file__).parent.glob("*.py"):
        source = path.read_text()
        assert not [word for word in ("import pickle", "torch.load", "torch.save", "eval(") if word in source]
