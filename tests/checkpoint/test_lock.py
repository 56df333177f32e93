"""The lock: one writer to a folder, whoever was killed, dropped or forked."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from checkpoints import in_child, pieces, save, tensors
from interlace.checkpoint import LOCK, Writer
from interlace.errors import CheckpointError


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
