"""Checkpoints: equal values under any other split, and every damage, crash and hostile file refused by name."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import resource
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from interlace import checkpoint
from interlace.checkpoint import LOCK, MANIFEST, Piece, Reader, Writer, find
from interlace.errors import CheckpointError, ResourceError, SecurityError


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Odd sizes, every width, 0-d and empty."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "main/embedding.weight": torch.randn(257, 3, generator=draw),
        "main/blocks.0.mlp.up.weight": torch.randn(13, 7, generator=draw).bfloat16(),
        "exp_avg/blocks.0.mlp.up.weight": torch.randn(13, 7, generator=draw).double(),
        "scale": torch.randn((), generator=draw),
        "nothing": torch.empty(0, 5),
        "count": torch.randint(-(2**40), 2**40, (3,), generator=draw),
        "mask": torch.rand(11, generator=draw) < 0.5,
    }


def cuts(numel: int, world: int, seed: int) -> list[int]:
    """Uneven ranges, some of them empty: world + 1 bounds."""
    inner = random.Random(f"{numel} {world} {seed}")
    return [0, *sorted(inner.randint(0, numel) for _ in range(world - 1)), numel]


def pieces(values: dict[str, torch.Tensor], rank: int, world: int, seed: int = 0) -> Iterable[Piece]:
    for name, value in values.items():
        start, stop = cuts(value.numel(), world, seed)[rank : rank + 2]
        yield Piece(name, tuple(value.shape), "(N M)/dp", start, stop, value.reshape(-1)[start:stop])


def save(root: Path, step: int, world: int = 1, seed: int = 0, keep: int = 0) -> Path:
    """All ranks of one run, as threads; the values are those of `tensors(step + seed)`."""
    writers = [Writer(root, rank, world, 20, keep, token=f"run{step}_{seed}") for rank in range(world)]
    for rank, writer in enumerate(writers):
        writer.save(step, pieces(tensors(step + seed), rank, world), {"config": "abc", "step": step})
    for writer in writers:
        writer.close()
    return root / f"step-{step}"


def assert_holds(folder: Path, values: dict[str, torch.Tensor]) -> None:
    reader = Reader(folder)
    assert sorted(reader.names) == sorted(values)
    for name, value in values.items():
        read = reader.read(name)
        assert read.dtype == value.dtype == reader.dtype(name)
        assert reader.shape(name) == tuple(value.shape)
        assert torch.equal(bits(read), bits(value.reshape(-1))), name
    reader.verify()


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its exit status (0 well, 1 an exception, negative a signal)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reseal(body: dict[str, Any] | str) -> bytes:
    """A manifest whose own digest is right, whatever it says."""
    text = body if isinstance(body, str) else json.dumps(body)
    rest = b'",\n"body":' + text.encode() + b"}\n"
    return b'{"blake2b":"' + checkpoint._digest(rest) + rest


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_bytes())["body"])


# -- values


@pytest.mark.parametrize("world", [1, 4])
def test_saved_by_one_world_reads_under_any_other(tmp_path: Path, world: int) -> None:
    folder = save(tmp_path, 50, world)
    values = tensors(50)
    assert_holds(folder, values)
    for other in (1, 2, 3, 5):
        for rank in range(other):
            reader = Reader(folder)  # a rank's own: digests are verified piece by piece
            for name, value in values.items():
                start, stop = cuts(value.numel(), other, seed=9)[rank : rank + 2]
                assert torch.equal(bits(reader.read(name, start, stop)), bits(value.reshape(-1)[start:stop]))
    reader = Reader(folder)
    assert (reader.step, reader.meta, reader.strays) == (50, {"config": "abc", "step": 50}, ())
    assert reader.layout("scale") == "(N M)/dp"


def test_every_range_of_a_small_tensor(tmp_path: Path) -> None:
    value = save(tmp_path, 1, 4) and tensors(1)["main/blocks.0.mlp.up.weight"].reshape(-1)
    reader = Reader(tmp_path / "step-1")
    for start in range(0, 92, 3):
        for stop in range(start, 92):
            assert torch.equal(reader.read("main/blocks.0.mlp.up.weight", start, stop), value[start:stop])


def test_shards_are_plain_safetensors_and_bits_survive(tmp_path: Path) -> None:
    odd = torch.tensor([math.nan, -0.0, math.inf, 1e-45]).view(torch.int32)
    odd[0] |= 0x1234  # a payload in the not-a-number
    with_nan = odd.view(torch.float32)
    writer = Writer(tmp_path, 0, 1, 5)
    writer.save(0, [Piece("x", (2, 3), "N M", 0, 4, with_nan), Piece("x", (2, 3), "N M", 4, 6, torch.ones(2))], {})
    writer.finish()
    loaded = load_file(tmp_path / "step-0" / "rank-0.safetensors")
    assert sorted(loaded) == ["x@0", "x@4"]
    assert torch.equal(loaded["x@0"].view(torch.int32), odd)
    assert torch.equal(Reader(tmp_path / "step-0").read("x", 0, 4).view(torch.int32), odd)


def test_pieces_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK", 100)
    folder = save(tmp_path, 2)
    assert_holds(folder, tensors(2))
    value = tensors(2)["main/embedding.weight"].reshape(-1)
    assert torch.equal(Reader(folder).read("main/embedding.weight", 33, 700), value[33:700])


def test_save_copies_at_once_and_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda *a: gate.wait(10) and write(*a))
    value, writer = torch.ones(5), Writer(tmp_path, 0, 1, 5)
    writer.save(1, [Piece("x", (5,), "N", 0, 5, value)], {})  # returns while the disk stands still
    value.fill_(2.0)
    assert not (tmp_path / "step-1").exists()
    second = threading.Thread(target=lambda: writer.save(2, [Piece("x", (5,), "N", 0, 5, value)], {}))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "two checkpoints in memory at once"
    gate.set()
    second.join(10)
    writer.close()
    assert torch.equal(Reader(tmp_path / "step-1").read("x"), torch.ones(5))
    assert torch.equal(Reader(tmp_path / "step-2").read("x"), torch.full((5,), 2.0))


def test_strided_views_and_gradients_are_saved_by_value(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4).requires_grad_()
    writer = Writer(tmp_path, 0, 1, 5)
    writer.save(0, [Piece("column", (3,), "N", 0, 3, matrix[:, 1])], {})
    writer.close()
    assert Reader(tmp_path / "step-0").read("column").tolist() == [1.0, 5.0, 9.0]


# -- what save refuses


def test_pieces_must_tile_every_tensor_once(tmp_path: Path) -> None:
    def error(*ranks: list[tuple[int, int]], **other: Any) -> str:
        root = tmp_path / str(random.random())
        writers = [Writer(root, rank, len(ranks), 10, token="t") for rank in range(len(ranks))]
        for rank, (writer, ranges) in enumerate(zip(writers, ranks, strict=True)):
            layout = other.get("layouts", ["N"] * len(ranks))[rank]
            writer.save(3, [Piece("w", (10,), layout, a, b, torch.zeros(b - a)) for a, b in ranges], {})
        said = set()
        for writer in writers:
            with pytest.raises(CheckpointError) as caught:
                writer.finish()
            said.add(str(caught.value))
        assert find(root)[0] is None
        assert not list(root.glob("*/*.safetensors")), "nothing published, no space taken"
        assert len(said) == 1, "every rank says the same"
        return said.pop()

    assert "'w' has no elements [4, 5) of [0, 10)" in error([(0, 4)], [(5, 10)])
    assert "'w' has elements [3, 4) twice" in error([(0, 4)], [(3, 10)])
    assert "'w' has elements [0, 10) twice" in error([(0, 10)], [(0, 10)])  # a replica saved by both its holders
    assert "'w' has elements [0, 9) of [0, 10)" in error([(0, 4), (4, 9)])
    assert "rank 1 saves 'w' with layout 'N/tp', not 'N'" in error([(0, 5)], [(5, 10)], layouts=["N", "N/tp"])


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (Piece("w", (4,), "N", 0, 4, torch.zeros(3)), "must be 1-D, of that length"),
        (Piece("w", (2, 2), "N", 0, 4, torch.zeros(2, 2)), "must be 1-D"),
        (Piece("w", (4,), "N", 2, 6, torch.zeros(4)), "inside [0, 4)"),
        (Piece("w", (4,), "N", 0, 4, torch.zeros(4, dtype=torch.complex64)), "torch.complex64"),
        (Piece("a\nb", (1,), "N", 0, 1, torch.zeros(1)), "cannot name a tensor"),
    ],
)
def test_a_wrong_piece_is_refused_at_once(tmp_path: Path, piece: Piece, says: str) -> None:
    writer = Writer(tmp_path, 0, 1, 5)
    with pytest.raises(CheckpointError) as caught:
        writer.save(1, [piece], {})
    assert says in str(caught.value)


@pytest.mark.parametrize("meta", [{"loss": math.nan}, {"rng": torch.zeros(1)}, {"call": print}])
def test_meta_is_plain_json(tmp_path: Path, meta: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="meta of step 1 must be plain JSON"):
        Writer(tmp_path, 0, 1, 5).save(1, [], meta)


def test_several_ranks_need_a_run_token(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="token ''; give all ranks one word"):
        Writer(tmp_path, 0, 2, 5)


# -- several ranks


def test_only_rank_0_saving_names_the_missing_ranks(tmp_path: Path) -> None:
    """huggingface/transformers#48569: a save guarded by `if rank == 0` hung until the watchdog fired."""
    writer = Writer(tmp_path, 0, 4, 0.3, token="t")
    began = time.monotonic()
    writer.save(1, pieces(tensors(), 0, 4), {})
    with pytest.raises(CheckpointError, match=r"ranks \[1, 2, 3\] did not save within 0.3 s; every rank must call"):
        writer.finish()
    assert time.monotonic() - began < 5
    assert find(tmp_path)[0] is None
    late = Writer(tmp_path, 3, 4, 60, token="t")
    late.save(1, pieces(tensors(), 3, 4), {})
    with pytest.raises(CheckpointError, match=r"ranks \[1, 2, 3\] did not save"):
        late.finish()  # a rank that comes too late is told at once
    assert time.monotonic() - began < 5
    other = Writer(tmp_path, 2, 4, 0.3, token="another")
    other.save(1, pieces(tensors(), 2, 4), {})
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1, 3\] did not save"):
        other.finish()


def test_the_wait_uses_the_monotonic_clock_and_growth_extends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: random.choice([0.0, 1e12]))
    values = tensors()
    writers = [Writer(tmp_path, rank, 2, 0.5, token="t") for rank in range(2)]
    writers[0].save(1, pieces(values, 0, 2), {})
    tmp = tmp_path / "step-1.t-0.tmp"
    for count in range(7):  # rank 1 is slow but its file grows: 0.7 s in all
        time.sleep(0.1)
        (tmp / "growing").write_bytes(b"x" * count)
    (tmp / "growing").unlink()
    writers[1].save(1, pieces(values, 1, 2), {})
    for writer in writers:
        writer.close()
    assert_holds(tmp_path / "step-1", values)


def test_parts_of_another_run_or_attempt_are_not_taken_up(tmp_path: Path) -> None:
    dead = Writer(tmp_path, 1, 2, 0.2, token="dead")
    dead.save(5, pieces(tensors(99), 1, 2), {})
    with pytest.raises(CheckpointError):
        dead.finish()
    assert (tmp_path / "step-5.dead-0.tmp" / "part-1.json").exists()
    assert find(tmp_path) == (None, ("step-5.dead-0.tmp was never published; ignored",))
    writers = [Writer(tmp_path, rank, 2, 0.4, token="live") for rank in range(2)]
    assert not list(tmp_path.glob("*.tmp")), "rank 0 of the next run removes what a killed run left"
    writers[0].save(5, pieces(tensors(5), 0, 2), {})
    with pytest.raises(CheckpointError, match=r"ranks \[1\] did not save"):
        writers[0].finish()
    writers[1].save(5, pieces(tensors(99), 1, 2), {})  # late: belongs to the attempt that was given up
    with pytest.raises(CheckpointError):
        writers[1].finish()
    for rank, writer in enumerate(writers):
        writer.save(5, pieces(tensors(5), rank, 2), {})
    for writer in writers:
        writer.close()
    assert_holds(tmp_path / "step-5", tensors(5))


def test_a_rank_that_cannot_write_is_named_by_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 3)
    opened = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith("rank-2.safetensors"):
            raise OSError(28, "No space left on device", str(path))
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    writers = [Writer(tmp_path, rank, 3, 20, token="t") for rank in range(3)]
    for rank, writer in enumerate(writers):
        writer.save(2, pieces(tensors(2), rank, 3), {})
    for writer, kind in zip(writers, (CheckpointError, CheckpointError, ResourceError), strict=True):
        with pytest.raises(kind, match=r"rank 2 could not write step 2 .*No space left"):
            writer.finish()
    assert not list(tmp_path.glob("step-2*/*.safetensors"))
    monkeypatch.setattr(os, "open", opened)
    for rank, writer in enumerate(writers):
        writer.save(3, pieces(tensors(3), rank, 3), {})
    for writer in writers:
        writer.close()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-3"]
    assert_holds(tmp_path / "step-3", tensors(3))


# -- publishing


def test_keep_prunes_only_behind_the_new_one(tmp_path: Path) -> None:
    save(tmp_path, 90)  # of a later step: left alone
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-3", "step-4", "step-90"]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 7)
    save(tmp_path, 7, world=2, seed=3)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-7"]
    assert_holds(tmp_path / "step-7", tensors(10))


OPERATIONS = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir", "open")


def shim(on_call: Callable[[int, str, tuple[Any, ...]], None]) -> None:
    """From here on, in this process, every file operation is counted and announced before it happens."""
    lock, count = threading.Lock(), [0]

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with lock:
                count[0] += 1
                on_call(count[0], name, args)
                return real(*args, **named)

        return call

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))


def crash_at(k: int, torn: bool, work: Callable[[], None]) -> int:
    """Die at the k-th file operation, as by kill -9; `torn` writes half of what a write was given first."""
    write = os.write

    def on_call(count: int, name: str, args: tuple[Any, ...]) -> None:
        if count == k:
            if torn and name == "write":
                write(args[0], args[1][: len(args[1]) // 2])
            os._exit(9)

    def run() -> None:
        shim(on_call)
        work()

    return in_child(run)


@pytest.mark.parametrize(
    ("scene", "world", "torn"),
    [("first", 1, True), ("next", 1, False), ("next", 2, True), ("again", 1, True), ("pruned", 1, False)],
)
def test_killed_at_every_file_operation_leaves_the_old_or_the_new(
    tmp_path: Path, scene: str, world: int, torn: bool
) -> None:
    before = {"first": [], "next": [1], "again": [1, 2], "pruned": [0, 1]}[scene]
    states, k = set(), 0
    (tmp_path / "before").mkdir()
    for step in before:
        save(tmp_path / "before", step)
    while True:
        k += 1
        root = Path(shutil.copytree(tmp_path / "before", tmp_path / str(k)))
        status = crash_at(k, torn, lambda root=root: save(root, 2, world, seed=50, keep=int(scene == "pruned")))  # type: ignore[misc]
        assert status in (0, 9)
        found, _ = find(root, verify=True)
        if found is None:
            assert scene == "first"
            states.add("none")
        else:
            reader = Reader(found)
            new = reader.step == 2 and torch.equal(reader.read("scale")[0], tensors(52)["scale"])
            assert_holds(found, tensors(52) if new else tensors(before[-1]))
            assert found.name.removesuffix(".old") == f"step-{reader.step}"
            states.add("new" if new else "old")
        save(root, 3)  # whatever the crash left, the next run goes on: the dead owner's lock and files are no obstacle
        assert find(root)[0] == root / "step-3"
        assert not list(root.glob("*.tmp"))
        shutil.rmtree(root)
        if status == 0:
            break
    assert k > 20
    assert states == {"none" if scene == "first" else "old", "new"}


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_an_error_at_every_file_operation_is_reported_and_leaves_the_old(tmp_path: Path, failing: str) -> None:
    save(tmp_path, 1)
    for k in range(1, 100):

        def work(k: int = k) -> None:
            writer, seen = Writer(tmp_path, 0, 1, 5), [0]

            def on_call(_: int, name: str, __: tuple[Any, ...]) -> None:
                seen[0] += name == failing
                if name == failing and seen[0] == k:
                    raise OSError(5, "Input/output error")

            shim(on_call)
            writer.save(2, pieces(tensors(2), 0, 1), {})
            try:
                writer.finish()
            except ResourceError as error:
                os._exit(7 if "could not write step 2" in str(error) and "Input/output error" in str(error) else 1)

        status = in_child(work)
        assert status in (0, 7)
        found, notes = find(tmp_path, verify=True)
        assert found is not None
        assert not notes
        assert_holds(found, tensors(Reader(found).step))
        if status == 0:
            assert found.name == "step-2"
            break
        shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
    assert k > 2


def test_all_is_on_disk_before_the_name_is(tmp_path: Path) -> None:
    """What a power cut would show: every file and its folder synced before the rename, the parent after it."""

    def work() -> None:
        events: list[tuple[str, str]] = []

        def on_call(_: int, name: str, args: tuple[Any, ...]) -> None:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name in ("write", "fsync") else str(args[0])
            events.append((name, os.path.basename(path)))

        shim(on_call)
        save(tmp_path, 4)
        publish = next(i for i, (name, path) in enumerate(events) if name == "rename" and path.endswith(".tmp"))
        for path in ("rank-0.safetensors", "manifest.part"):
            last = max(i for i, event in enumerate(events) if event == ("write", path))
            assert ("fsync", path) in events[last:publish], path
        removed = max(i for i, (name, _) in enumerate(events[:publish]) if name == "unlink")
        assert ("fsync", events[publish][1]) in events[removed:publish]
        assert ("fsync", tmp_path.name) in events[publish:]

    assert in_child(work) == 0


def test_disk_full(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        writer = Writer(tmp_path, 0, 1, 5)
        writer.save(2, pieces(tensors(2), 0, 1), {})
        with pytest.raises(ResourceError, match=r"could not write step 2 .*File too large.*[0-9] bytes needed"):
            writer.finish()
        writer.save(3, [Piece("x", (2,), "N", 0, 2, torch.ones(2))], {})  # the run may go on
        writer.close()

    assert in_child(work) == 0
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-3"]
    assert_holds(tmp_path / "step-1", tensors(1))


def test_an_error_in_the_background_is_raised_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, 0, 1, 5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        writer.save(1, pieces(tensors(1), 0, 1), {})
        with pytest.raises(ResourceError, match="step 1"):
            writer.save(2, pieces(tensors(2), 0, 1), {})
    writer.save(2, pieces(tensors(2), 0, 1), {})
    writer.close()
    assert_holds(tmp_path / "step-2", tensors(2))


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
    source = Path(checkpoint.__file__).read_text()
    assert not [word for word in ("import pickle", "torch.load", "torch.save", "eval(") if word in source]


# -- the lock


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    first = Writer(tmp_path, 0, 1, 5)

    def second() -> None:
        with pytest.raises(CheckpointError, match=rf"written by process {os.getppid()} on {socket.gethostname()}"):
            Writer(tmp_path, 0, 1, 5)

    assert in_child(second) == 0
    first.save(1, pieces(tensors(1), 0, 1), {})  # the first is unaffected
    first.close()
    save(tmp_path, 2)  # and its lock is gone


def test_the_lock_of_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    def die() -> None:
        Writer(tmp_path, 0, 1, 5)
        os._exit(9)

    assert in_child(die) == 9
    save(tmp_path, 1)
    # A live process that only has the dead owner's number is not the owner.
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": "1", "token": "t"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    save(tmp_path, 2)
    # On another machine nothing can be known of it.
    (tmp_path / LOCK).write_text(json.dumps(owner | {"host": "elsewhere"}))
    with pytest.raises(CheckpointError, match=f"on elsewhere; .*delete .*{LOCK}"):
        save(tmp_path, 3)


def test_a_writer_that_is_dropped_or_forked_keeps_the_lock_right(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, 1, 5)
    assert in_child(writer.close) == 0  # a forked child must not give its parent's lock away
    with pytest.raises(CheckpointError, match="is being written"):
        Writer(tmp_path, 0, 1, 5)
    del writer
    save(tmp_path, 1)


def test_many_starting_at_once_have_one_winner(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"pid": 4194304999, "host": "%s", "started": "1"}' % socket.gethostname())  # noqa: UP031
    gates = [os.pipe() for _ in range(6)]
    start_read, start_write = os.pipe()

    def contend(done: int) -> None:
        os.read(start_read, 1)
        try:
            writer = Writer(tmp_path, 0, 1, 5)
            os.write(done, b"won")
            time.sleep(0.5)
            writer.close()
        except CheckpointError:
            os.write(done, b"refused")

    children = []
    for _, done in gates:
        child = os.fork()
        if child == 0:
            contend(done)
            os._exit(0)
        children.append(child)
    os.write(start_write, b"x" * len(children))
    said = sorted(os.read(gate, 10) for gate, _ in gates)
    for child in children:
        os.waitpid(child, 0)
    for descriptor in (start_read, start_write, *(end for gate in gates for end in gate)):
        os.close(descriptor)
    assert said == [b"refused"] * 5 + [b"won"]
