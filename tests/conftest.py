"""Shared by all tests: poisoned memory, one thread, the order of tests, the ranks they start, and what needs a GPU.

`./dev test` runs two tests at a time (pytest-xdist): those of ranks leave a quarter of two cores idle, the others one.
A test marked `alone` promises times, or looks at what the whole machine holds, and has no other beside it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from room import room

HERE = Path(__file__).resolve().parent
# Before torch is imported, and inherited by every process a test starts (their fork server must find preload.py).
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # ranks that share a GPU have many streams (`on_one_gpu`)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent / "src"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)

ROOM = pytest.StashKey[str]()
NEEDED = {"gpu": 1, "gpu2": 2, "gpu4": 4}  # CUDA devices
ORDER = ("one process", "ranks", *NEEDED)  # fast tests first


def pytest_configure(config: pytest.Config) -> None:
    try:
        from hypothesis import settings
    except ImportError:  # a GPU machine's own Python may lack it; tests that need it say so
        return
    # Reproducible, and no time limit per example: the machine may be busy.
    settings.register_profile("interlace", deadline=None, derandomize=True, max_examples=50, database=None)
    settings.load_profile("interlace")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Before a worker starts: where the tests of all workers meet (`room`)."""
    if ROOM not in node.config.stash:
        folder = tempfile.TemporaryDirectory(prefix="interlace-tests-")
        node.config.add_cleanup(folder.cleanup)
        node.config.stash[ROOM] = folder.name
    node.workerinput["room"] = node.config.stash[ROOM]


# After `-m` and `-k` have chosen: what those leave out must not cost an import of torch.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = devices_missing(items)
    dropped = [item for item in items if kind(item) in without]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        count = Counter(without[kind(item)] for item in dropped)
        config.stash[DROPPED] = [f"tests left out: {number}, {reason}" for reason, number in sorted(count.items())]
    items[:] = sorted((item for item in items if kind(item) not in without), key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if "run_ranks" in getattr(item, "fixturenames", ()):
        item.add_marker("ranks")


DROPPED = pytest.StashKey[list[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the one fork server that all ranks of this run come from, with torch imported and poisoned.

    interlace.launch takes its processes from the same server and would start it with its own preloads.
    """
    if not session.config.option.collectonly and any(kind(item) != "one process" for item in session.items):
        multiprocessing.get_context("forkserver").set_forkserver_preload(["preload"])
        forkserver.ensure_running()


def place(item: pytest.Item) -> tuple[int, bool]:
    """Those that must be alone come last of their kind: the load of the others, which `clock.limit` counts, is gone."""
    return ORDER.index(kind(item)), item.get_closest_marker("alone") is not None


def kind(item: pytest.Item) -> str:
    return next((mark for mark in (*NEEDED, "ranks") if item.get_closest_marker(mark)), "one process")


def devices_missing(items: list[pytest.Item]) -> dict[str, str]:
    """The marks that cannot run here, each with the reason; asks torch only if a test carries one."""
    if not any(kind(item) in NEEDED for item in items):
        return {}
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        mark: "no CUDA device here" if needed == 1 else f"{found} CUDA devices here, {needed} are needed"
        for mark, needed in NEEDED.items()
        if found < needed
    }


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it has left out: tests are chosen there."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["dropped"] = session.config.stash.get(DROPPED, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "dropped" in getattr(node, "workeroutput", {}):  # all workers have left out the same
        node.config.stash[DROPPED] = node.workeroutput["dropped"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash.get(DROPPED, []):
        terminalreporter.write_line(line)


# Before pytest-timeout, so that a wait for the others does not count.
@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with room(Path(item.config.workerinput["room"]), bool(item.get_closest_marker("alone"))):
        return (yield)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN during the test; tests that never import torch do not pay for it."""
    if "torch" in sys.modules:
        import poison

        for owner, name, function in poison.replacements():
            monkeypatch.setattr(owner, name, function)


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks("module:function", world, argument, timeout)`: function(world, **argument) in `world` processes.

    The module lies in tests/ or is importable; returned is the list of what each rank returned, by rank.  A rank that
    fails or is late makes the call raise the library's own PeerLost or Hang.
    """

    def run(target: str, world: int, argument: dict[str, Any] | None = None, timeout: float = 60.0) -> list[Any]:
        from interlace import launch

        return launch.run_local(target, world, argument or {}, timeout=timeout)

    return run
