"""One writer to a checkpoints folder: who it is stands in the folder, and a dead owner's lock is taken over."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path

from interlace.errors import CheckpointError

LOCK = "writer.lock"


def lock(root: Path, token: str) -> None:
    """Take the folder for this process, or say who has it; a dead owner's lock is taken over."""
    me = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid()), "token": token}
    with open(root / LOCK, "a+", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o666)) as file:
        with contextlib.suppress(OSError):  # held only while this block reads and writes; some file systems have none
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            owner = json.loads(file.read(4096))
            pid, host, started = int(owner["pid"]), str(owner["host"]), owner["started"]
        except (ValueError, TypeError, KeyError):  # empty: free, or its owner died while writing it
            pid, host, started = 0, "", None
        if pid > 0 and (host != me["host"] or _started(pid) == started):
            raise CheckpointError(
                f"{root} is being written by process {pid} on {host}; give this run another [run] out, or, if that "
                f"process is gone, delete {root / LOCK}"
            )
        file.truncate(0)
        file.write(json.dumps(me))


def unlock(root: Path, pid: int, token: str) -> None:
    """Let go of the folder, if this process and run still have it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((root / LOCK).read_text())
        if os.getpid() == pid and (owner["pid"], owner["token"]) == (pid, token):
            os.truncate(root / LOCK, 0)


def _started(pid: int) -> str | None:
    """When a live process began ("?" where the system does not say); None for a dead one."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?"
    return None if fields[0] in "ZX" else fields[19]
