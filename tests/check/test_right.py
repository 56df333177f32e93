"""Right kernels are not reported: other people's styles, and the library's own examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from right_kernels import RIGHT

from interlace.check import explore

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "symmetric").glob("*.py"))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_not_reported(name: str) -> None:
    verdict = explore(RIGHT[name], ranks=(2, 3), schedules=7, nbytes=1 << 16)
    assert verdict.ok, verdict
    assert verdict.schedules >= 14


def example(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.launch


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_is_not_reported(path: Path) -> None:
    verdict = explore(example(path), ranks=3, schedules=5, nbytes=1 << 16)
    assert verdict.ok, verdict
    replayed = explore(example(path), ranks=2, schedules=2, replays=2, nbytes=1 << 16)
    assert replayed.ok or path.stem == "ping_pong", replayed  # its turn is an argument, as a report of it says


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_wait_of_an_example_ends_when_a_rank_stops(path: Path) -> None:
    verdict = explore(example(path), ranks=3, schedules=5, stop=True, nbytes=1 << 16)
    assert verdict.ok, verdict
