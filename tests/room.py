"""Where the tests of several workers meet, so that one which promises times can be alone."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def room(folder: Path, alone: bool) -> Iterator[None]:
    """Held together with the tests of other workers, or alone; nobody overtakes one that waits to be alone."""
    with (folder / "door").open("w") as door, (folder / "inside").open("w") as inside:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(inside, fcntl.LOCK_UN)  # said, since processes that the test has left behind may hold it too
