"""Limits in seconds on a machine that may be busy with other work."""

from __future__ import annotations

import os


def limit(seconds: float) -> float:
    """`seconds` on a machine with a core for everyone; longer by the load per core where there is more to do."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
