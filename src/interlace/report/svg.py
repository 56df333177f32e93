"""Marks of an SVG as text, shared by the pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape


def round_up(size: float, factors: Sequence[float] = (1, 2, 5, 10)) -> float:
    """The smallest of the factors times a power of ten that is not below `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next((f * power for f in factors if f * power >= size * (1 - 1e-9)), 10 * power)


def rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def words(x: float, y: float, label: str, kind: str = "", anchor: str = "start") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.2f}" y="{y:.2f}"{attributes}>{text(label)}</text>'


def text(words: str) -> str:
    """Escaped, without the characters that XML does not allow."""
    return escape("".join(letter if letter.isprintable() else " " for letter in words))


def si(value: float) -> str:
    """Three digits and a prefix: 12.4k, 1.2M."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"
