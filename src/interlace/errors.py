"""Every failure a user can cause: one class each, a stable code, an exit code, and a message that says what to change.

The command line prints `str(error)` and nothing else, exits with `exit_code`, and writes `to_json()` as
`error.json` into the run folder.  Our own broken invariants are `assert`s, never one of these classes.

    InterlaceError
    +-- ConfigError      2  a key, value or size in the run file or on the command line
    |   +-- PlanError    2  a parallel plan that does not divide, or that nothing can run
    +-- DataError        2  text, tokens or a tokenizer; names file and line
    +-- PeerLost         3  a rank died or raised; names rank, step and operation
    +-- Hang             4  a wait reached its limit; names who is missing
    +-- NumericsError    5  not-a-number, or a comparison with the reference that does not hold
    +-- CheckpointError  6  a damaged, missing or foreign checkpoint file; names the file
    +-- ResourceError    7  memory, disk or a port
    +-- SecurityError    8  a path, address or file that is refused on principle
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class InterlaceError(Exception):
    """Base class.  `message` is one or two sentences: what was asked, what was found, what to change."""

    code = "ILC-0000"
    exit_code = 1

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))

    def to_json(self) -> dict[str, Any]:
        """The error as plain JSON values, for `error.json`."""
        return {
            "code": self.code,
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "message": self.message,
            "details": {key: _plain(value) for key, value in self.details.items()},
        }


class ConfigError(InterlaceError):
    code = "ILC-2001"
    exit_code = 2


class PlanError(ConfigError):
    code = "ILC-2101"


class DataError(InterlaceError):
    code = "ILC-2201"
    exit_code = 2


class PeerLost(InterlaceError):
    code = "ILC-3001"
    exit_code = 3


class Hang(InterlaceError):
    code = "ILC-4001"
    exit_code = 4


class NumericsError(InterlaceError):
    code = "ILC-5001"
    exit_code = 5


class CheckpointError(InterlaceError):
    code = "ILC-6001"
    exit_code = 6


class ResourceError(InterlaceError):
    code = "ILC-7001"
    exit_code = 7


class SecurityError(InterlaceError):
    code = "ILC-8001"
    exit_code = 8


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to a misspelt one, whatever its case, or None when nothing is close."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.5)
    return lower[close[0]] if close else None


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def _rebuild(cls: type[InterlaceError], message: str, details: dict[str, Any]) -> InterlaceError:
    return cls(message, **details)
