"""What is written at the head of every rank's arena, and what a spinner that gave up leaves there.

    bytes 0..7    a clock: the newest time any spinner of the rank has read, nanoseconds
    bytes 8..11   0, or 1 when a wait of this rank has given up; later waits then leave at once
    bytes 12..15  0, or 1 when somebody else asks this rank's spinners to leave
    bytes 64..127 the record of the first wait that gave up: eight int64 words (`WORDS`)

The device side is `interlace.symmetric.device`; the host reads a record after the kernels have ended and raises `Hang`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

HEAD = 256  # bytes of an arena that belong to this module
CLOCK, GAVE_UP, ABORT, RECORD = 0, 8, 12, 64
WORDS = ("name", "name_end", "peer", "flag", "want", "have", "elapsed", "program")

# Words of the context a kernel is given, int64 each; the distances of all ranks' arenas, in bytes, follow.
CONTEXT = ("rank", "world", "limit", "record", "abort", "clock", "gave_up", "base")
DISTANCES = len(CONTEXT)


@dataclass(frozen=True)
class Record:
    """A wait that gave up: `peer` should have signalled.  `flag` is an offset in the arena, `elapsed` in seconds."""

    kernel: str
    rank: int
    program: int
    peer: int
    flag: int
    want: int
    have: int
    elapsed: float

    @classmethod
    def read(cls, rank: int, head: bytes) -> Record | None:
        """The record in the first `HEAD` bytes of a rank's arena, None when every wait ended well."""
        (gave_up,) = struct.unpack_from("<i", head, GAVE_UP)
        if not gave_up:
            return None
        words = struct.unpack_from(f"<{len(WORDS)}q", head, RECORD)
        name = struct.pack("<2q", *words[:2]).rstrip(b"\0").decode("ascii", "replace")
        peer, flag, want, have, elapsed, program = words[2:]
        return cls(name, rank, program, peer, flag, want, have, elapsed * 1e-9)

    def sentence(self, flag_name: str) -> str:
        return (
            f"rank {self.rank} waited {self.elapsed:.3f} s in {self.kernel or 'a kernel'}, program {self.program}, for "
            f"{flag_name} to reach {self.want}, found {self.have}: rank {self.peer} has not signalled; look at what "
            f"rank {self.peer} does, or raise the heap's timeout if it is only late."
        )


def name_word(name: str, half: int) -> int:
    """Characters 0-7 or 8-15 of a name as one int64."""
    piece = name.encode("ascii", "replace")[8 * half : 8 * half + 8]
    return int.from_bytes(piece.ljust(8, b"\0"), "little", signed=True)


def stream_record(peer: int, flag: int, want: int, have: int, elapsed: float) -> list[int]:
    """The words of a wait in a stream, outside of any kernel, that gave up; `elapsed` in seconds."""
    return [name_word("a stream", 0), 0, peer, flag, want, have, int(elapsed * 1e9), 0]
