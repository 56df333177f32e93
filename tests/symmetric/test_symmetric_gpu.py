"""The same primitives and examples compiled: several ranks on one GPU, and a GPU a rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from example_files import LARGE, load
from interlace import launch
from interlace.errors import ConfigError, Hang
from interlace.symmetric import SymmetricHeap, device


def on_one_gpu(function: Any, ranks: int, **options: Any) -> list[Any]:
    from interlace.symmetric.cuda import on_one_gpu as run

    return run(function, ranks, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LARGE)
def test_an_example_on_one_gpu(name: str, ranks: int) -> None:
    module = load(name)

    def run(heap: SymmetricHeap) -> bool:
        check = module.launch(heap)
        heap.barrier()
        check()
        return True

    assert on_one_gpu(run, ranks, nbytes=1 << 20) == [True] * ranks


@pytest.mark.gpu
def test_a_wait_that_gives_up_names_the_peer() -> None:
    heap = SymmetricHeap(1 << 16, device="cuda", timeout=0.5)
    words = heap.signals(4, "words")
    device.await_flag[(1,)](words.local[3:], 5, 0, heap.context, VALUE_IN_MEMORY=False, KERNEL="late")
    with pytest.raises(Hang, match=r"rank 0 waited 0\.[5-9].* in late, program 0, for words\[3\] to reach 5, found 0"):
        heap.synchronize()


@pytest.mark.gpu
def test_a_watchdog_ends_a_wait() -> None:
    heap = SymmetricHeap(1 << 16, device="cuda", timeout=60.0)
    words = heap.signals(1, "words")
    device.await_flag[(1,)](words.local, 1, 0, heap.context, VALUE_IN_MEMORY=False, KERNEL="watched")
    timer = threading.Timer(0.3, heap.abort)
    timer.start()
    with pytest.raises(Hang, match=r"rank 0 waited [0-5]\."):
        heap.synchronize()
    timer.join()


@pytest.mark.gpu
def test_streams_write_and_await_flags_and_a_stream_that_waits_too_long_is_let_go() -> None:
    heap = SymmetricHeap(1 << 16, device="cuda", timeout=1.0)
    words = heap.signals(4, "words")
    x, y = heap.zeros(1000, name="x"), heap.zeros(1000, name="y")
    x.local.fill_(0.0)  # loads the kernel: while a stream waits, that could wait for the stream
    with heap.stream("side"):
        heap.wait(words.local[0], 3, 0)
        heap.copy(y.local, x.local)
        heap.write(words.local[1], 1)
    x.local.fill_(5.0)
    heap.write(words.local[0], 3)
    heap.wait(words.local[1], 1, 0)
    heap.synchronize()
    assert torch.equal(y.local, torch.full_like(y.local, 5.0))
    near = (1 << 31) - 1
    words.local.fill_(near)
    heap.write(words.local[0], near + 2 - (1 << 32))  # past the wrap
    heap.wait(words.local[0], near, 0)
    heap.synchronize()
    with heap.stream("side"):
        heap.wait(words.local[2], -near, 0)
    with pytest.raises(Hang, match=r"in a stream, program 0, for words\[2\] to reach"):
        heap.synchronize()


@pytest.mark.gpu
def test_a_thread_lets_go_what_nobody_watches() -> None:
    heap = SymmetricHeap(1 << 16, device="cuda", timeout=1.0)
    words = heap.signals(2, "words")
    heap.fabric.watch()
    heap.write(words.local[0], 1)
    heap.wait(words.local[0], 1, 0)  # came in time
    with heap.stream("side"):
        heap.wait(words.local[1], 4, 0)
        moment = heap.event()
    assert not moment.is_done
    torch.cuda.synchronize()
    assert moment.is_done
    late = heap.fabric.late
    assert late is not None
    assert (heap.name_of(late.flag), late.peer, late.want, late.have) == ("words[1]", 0, 4, 0)
    assert 1.0 <= late.elapsed < 5.0
    with pytest.raises(Hang, match=r"words\[1\] to reach 4, found 0"):
        heap.check()


@pytest.mark.gpu
def test_a_number_of_the_host_is_refused_inside_a_graph() -> None:
    heap = SymmetricHeap(1 << 16, device="cuda")
    words = heap.signals(2, "words")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words.local.add_(1)
        with pytest.raises(ConfigError, match="inside a graph"):
            heap.write(words.local[0], 3)


@pytest.mark.gpu
def test_words_safe_at_the_wrap_on_one_gpu() -> None:
    """Signals that begin just below the wrap of 32 bits."""

    module = load("ring_shift")

    def run(heap: SymmetricHeap) -> bool:
        heap.fabric.origin = (1 << 31) - 2
        check = module.launch(heap, rounds=5)
        heap.barrier()
        check()
        return True

    assert on_one_gpu(run, 2, nbytes=1 << 20) == [True, True]


def ranks(function: str, argument: dict[str, Any] | None = None) -> list[Any]:
    return launch.run_local(f"rank_functions_gpu:{function}", 2, argument or {}, device="cuda", timeout=100.0)


@pytest.mark.gpu2
@pytest.mark.parametrize("large", [False, True])
def test_the_examples_on_two_gpus(large: bool) -> None:
    assert ranks("examples", {"large": large}) == [list(LARGE)] * 2


@pytest.mark.gpu2
def test_memory_of_two_gpus() -> None:
    for rank, result in enumerate(ranks("memory")):
        assert result["seen"] == [15.0, 30.0]
        assert result["pushed"] == [7.0 + (1 - rank)]
        assert "allocating y: rank 1 asks for 16 bytes" in result["said"]


@pytest.mark.gpu2
def test_graphs_replay_with_new_input() -> None:
    for found in ranks("replays"):
        assert found == [0.0] * 5
    for found in ranks("graph_of_transports"):
        assert max(found) < 1e-4


@pytest.mark.gpu2
def test_a_late_gpu_is_named() -> None:
    said = ranks("late")
    assert said[1] == ""
    assert "in late, program 0, for words[3] to reach 5, found 0: rank 1 has not signalled" in said[0]
