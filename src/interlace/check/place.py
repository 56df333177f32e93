"""Where in the user's program something happens: the innermost frame that is neither ours nor Triton's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

HERE = Path(__file__).parent
DEVICE = str(HERE.parent / "symmetric" / "device.py")
OWN = tuple(
    f"{folder}{os.sep}"
    for folder in (HERE, HERE.parent / "symmetric", *(Path(str(each.__file__)).parent for each in (triton, torch, np)))
)


def by_a_primitive() -> bool:
    """Whether the innermost kernel or device function is one of `interlace.symmetric.device`."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == DEVICE:
            return True
        if not file.startswith(OWN):
            return False
        frame = frame.f_back
    return False


def shown(file: str) -> str:
    """A file's name for messages: as the user may type it, where it lies below the working directory."""
    below = os.path.join(os.getcwd(), "")
    return file.removeprefix(below)


_own: dict[str, bool] = {}
_lines: dict[tuple[int, int], tuple[Any, tuple[str, int]]] = {}  # by code and instruction; the code, so that it stays


def line() -> tuple[str, int]:
    """File and line of the innermost frame that is the user's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        own = _own.get(file)
        if own is None:
            own = _own[file] = file.startswith(OWN)
        if not own:
            key = id(code), frame.f_lasti
            found = _lines.get(key)
            if found is None:
                found = _lines[key] = code, (file, frame.f_lineno)
            return found[1]
        frame = frame.f_back
    return "?", 0
