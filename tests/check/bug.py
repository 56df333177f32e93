"""A fault of somebody's kernel, made again in a few lines, and what the checker must say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bug:
    public: str  # where it was reported
    kind: str | tuple[str, ...]  # of the checker's report
    words: str  # a regular expression the report's text must match
    options: dict[str, Any] = field(default_factory=dict)


BUGS: dict[str, tuple[Callable[..., Any], Bug]] = {}


def bug(public: str, kind: str | tuple[str, ...], words: str, **options: Any) -> Callable[[Any], Any]:
    """Registers a launch under the name of its function."""

    def register(launch: Any) -> Any:
        BUGS[launch.__name__] = (launch, Bug(public, kind, words, options))
        return launch

    return register
