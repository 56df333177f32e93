"""The examples over symmetric memory, loaded by name; sizes at which they also run on GPUs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "symmetric"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

# Odd sizes of a megabyte or so, several programs.
LARGE: dict[str, dict[str, int]] = {
    "all_gather": {"count": 100_003, "programs": 8, "block": 1024},
    "all_gather_matmul": {"M": 75, "N": 200, "K": 90},
    "all_to_all": {"count": 100_003, "block": 1024},
    "matmul_reduce_scatter": {"M": 75, "N": 200, "K": 90},
    "one_shot_all_reduce": {"count": 20_003, "block": 1024},
    "ping_pong": {"rounds": 1000},
    "ring_shift": {"count": 100_003, "programs": 8, "block": 1024, "rounds": 20},
    "two_shot_all_reduce": {"count": 20_003, "block": 1024},
}


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
