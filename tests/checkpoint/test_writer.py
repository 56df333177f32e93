"""Saving: equal values under any other split; the old checkpoint or the new one, whatever fails and whenever."""

from __future__ import annotations

import math
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import assert_holds, bits, cuts, in_child, pieces, save, tensors
from interlace.checkpoint import Piece, Reader, Writer, files, find
from interlace.errors import CheckpointError, ResourceError

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
    monkeypatch.setattr(files, "CHUNK", 100)
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
