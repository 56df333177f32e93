"""Ranks say what they are about to do together, before the first byte of it travels.

Equals a barrier that names who is missing.  A call that every rank has to make, and rank 0 alone makes (a saved
`state_dict`, say), would otherwise meet whatever the others send next, of another size or, worse, of the same.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store  # torch.distributed's, but typed

from interlace.errors import ConfigError, Hang

POLL = 0.005  # seconds between two looks at the store
SHARE = 0.9  # of the limit of every wait: before the others give up their own, and break the connection

_NUMBERS = itertools.count()


class Meeting:
    """Made by every rank in the same order; `timeout` in seconds is the limit of every other wait."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._key = f"interlace/meeting/{next(_NUMBERS)}"
        self._count = 0

    def __call__(self, name: str) -> None:
        """Returns when every rank has come here for `name`."""
        self._count += 1
        self.store.set(f"{self._key}/{self.rank}", f"{self._count} {name}")
        deadline, left = time.monotonic() + SHARE * self.timeout, [r for r in range(self.size) if r != self.rank]
        while left := [rank for rank in left if not self._is_here(rank, name)]:
            if time.monotonic() > deadline:
                raise Hang(
                    f"{name} was called by rank {self.rank} and not by {', '.join(map(str, left))} within "
                    f"{SHARE * self.timeout:g} s; every rank calls it, not rank 0 alone."
                )
            time.sleep(POLL)

    def agree(self, name: str, lines: Sequence[str]) -> None:
        """Returns when every rank has come here with the same lines; else `ConfigError` with the first that differs."""
        own, key = hashlib.blake2b("\n".join(lines).encode()).hexdigest(), f"{self._key}/agree {self._count}"
        if self.rank == 0:
            self.store.set(f"{key}/lines", "\n".join(lines))
        self.store.set(f"{key}/{self.rank}", own)
        self(name)
        found = [self.store.get(f"{key}/{rank}").decode() for rank in range(self.size)]
        if own != found[0]:
            theirs = self.store.get(f"{key}/lines").decode().splitlines()
            pairs = itertools.zip_longest(lines, theirs, fillvalue="nothing more")
            mine, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"rank {self.rank} calls {name} with {mine}, and rank 0 with {other}; every rank gives the same module "
                "and arguments."
            )
        if other_ranks := [rank for rank, digest in enumerate(found) if digest != own]:
            raise ConfigError(
                f"rank {other_ranks[0]} calls {name} with another module or other arguments than rank 0, as it says "
                "itself; every rank gives the same."
            )

    def _is_here(self, rank: int, name: str) -> bool:
        if not self.store.check([key := f"{self._key}/{rank}"]):
            return False
        count, _, other = self.store.get(key).decode().partition(" ")
        if int(count) == self._count and other != name:
            raise ConfigError(
                f"rank {self.rank} called {name} while rank {rank} called {other}; every rank calls the same."
            )
        return int(count) >= self._count
