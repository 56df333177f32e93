"""Symmetric memory between processes: memory, transports in stream order, waits that give up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from example_files import NAMES
from interlace.errors import ConfigError
from interlace.symmetric import SymmetricHeap

RANKS = "rank_functions_symmetric"


@pytest.mark.alone
def test_memory_of_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    for result in run_ranks(f"{RANKS}:memory", 3):
        assert result["fresh"]
        assert result["seen"] == [0.0, 15.0, 30.0]
        assert result["addresses"]
        assert result["reused"]
        assert result["zero"] == 0.0
        assert result["left"] == []
        said = result["said"]
        assert "allocating y: rank 1 asks for 16 bytes, rank 0 for 12;" in said["sizes"]
        assert "ConfigError: b: shape (2,) of torch.bool" in said["types"]
        assert said["full"].startswith("ResourceError: large needs 4194304 bytes, found ")
        assert "x.peer(3): the heap has 3 ranks" in said["peer"]
        assert "a flag is one int32 word" in said["flag"]
        assert "a copy engine moves bytes as they lie" in said["copy"]
        assert "x was freed" in said["freed"]


def test_copies_and_flags_on_streams(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, found in enumerate(run_ranks(f"{RANKS}:transports", 2)):
        after = (rank + 1) % 2
        assert found == [[10.0 * after + 1] * 6, [10.0 * after + 2] * 6]


def test_a_wait_that_gives_up_names_the_peer(run_ranks: Callable[..., list[Any]]) -> None:
    said = run_ranks(f"{RANKS}:late", 3)
    assert said[1] == ""
    for rank in (0, 2):
        waited = re.match(rf"Hang: rank {rank} waited ([\d.]+) s", said[rank])
        assert waited is not None
        assert float(waited[1]) >= 0.3
        assert "in late, program 0, for words[3] to reach 5, found 0: rank 1 has not signalled" in said[rank]
    for rank, text in enumerate(run_ranks(f"{RANKS}:late_stream", 2)):
        assert "in a stream, program 0, for words[2] to reach 7, found 0" in text
        assert f"rank {1 - rank} has not signalled" in text


@pytest.mark.ranks
def test_a_watchdog_ends_a_wait(run_ranks: Callable[..., list[Any]]) -> None:
    (said,) = run_ranks(f"{RANKS}:aborted", 1)
    assert re.match(r"Hang: rank 0 waited \d\.", said)


def test_one_process_without_groups() -> None:
    heap = SymmetricHeap(1 << 14)
    assert (heap.rank, heap.size) == (0, 1)
    x = heap.zeros(3, name="x")
    heap.copy(x.local, x.peer(0) + 1)
    assert x.local.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="x belongs to another heap"):
        SymmetricHeap(1 << 14).free(x)
    heap.close()
    with pytest.raises(ConfigError, match="x was freed"):
        _ = x.local
    with pytest.raises(ConfigError, match="the heap is closed"):
        heap.zeros(1)
    for options in ({"nbytes": 0}, {"timeout": 0.0}, {"device": "meta"}):
        with pytest.raises(ConfigError):
            SymmetricHeap(**options)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_examples_between_processes(ranks: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert len(NAMES) == 8
    assert run_ranks(f"{RANKS}:examples", ranks, {"names": NAMES}) == [8] * ranks


def test_a_subset_of_the_ranks_has_a_heap_of_its_own(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(f"{RANKS}:subgroup", 4) == [[], [0, 2], [], [1, 2]]


def test_a_kernel_on_a_side_stream_keeps_its_place(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(f"{RANKS}:kernel_on_a_side_stream", 1) == [[3.0, 3.0, 3.0, 3.0, 2.0]]


def test_kernels_in_the_interpreter_warn_of_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    """Runtime bounds of loops end with NumPy 2.4 in Triton 3.6 itself, and warn before."""
    assert run_ranks(f"{RANKS}:without_warnings", 1) == [True]
