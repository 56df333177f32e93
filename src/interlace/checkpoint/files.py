"""Files and memory as bytes: written in full and synced, opened without following links, digested."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path

import torch

from interlace.errors import CheckpointError, SecurityError

CHUNK = 8 << 20  # bytes digested and written, or read, at once


def write(handle: int, data: memoryview) -> int:
    """Write all of it; -> its CRC-32."""
    digest = 0
    for at in range(0, len(data), CHUNK):
        rest = data[at : at + CHUNK]
        digest = zlib.crc32(rest, digest)
        while rest:
            rest = rest[os.write(handle, rest) :]
    return digest


def regular(path: Path) -> os.stat_result:
    """The status of a file that is there and no link, pipe or folder."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path} is missing ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is missing ({error})") from None
    if not stat.S_ISREG(status.st_mode):
        raise SecurityError(f"{path} is a link or no regular file; a checkpoint's files are never followed elsewhere")
    return status


def open_file(path: Path) -> int:
    """A descriptor to read from; a link is not followed."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        kind = SecurityError if error.errno == errno.ELOOP else CheckpointError
        raise kind(f"{path} cannot be opened: {error.strerror}") from error


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, in place."""
    return tensor.view(torch.uint8).numpy().data


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
