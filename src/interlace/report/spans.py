"""Sets of moments as disjoint spans of whole numbers, in order: their union, intersection and difference."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Spans = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Disjoint and in order; touching ones are joined, empty ones left out."""
    joined: list[list[int]] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return [(begin, end) for begin, end in joined]


def common(few: Spans, many: Spans) -> Spans:
    """What lies in both; both are unions."""
    found = []
    for begin, end in few:
        i = bisect_right(many, begin, key=lambda span: span[1])  # the first that ends later
        while i < len(many) and many[i][0] < end:
            found.append((max(begin, many[i][0]), min(end, many[i][1])))
            i += 1
    return found


def minus(spans: Spans, taken: Spans) -> Spans:
    """What of `spans` is not in `taken`; both are unions."""
    found = []
    for begin, end in spans:
        for low, high in common([(begin, end)], taken):
            if begin < low:
                found.append((begin, low))
            begin = high
        if begin < end:
            found.append((begin, end))
    return found


def last(spans: Spans, ticks: int) -> Spans:
    """The last `ticks` of spans."""
    found: Spans = []
    for begin, end in reversed(spans):
        if ticks <= 0:
            break
        found.append((max(begin, end - ticks), end))
        ticks -= end - begin
    return found[::-1]


def length(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


def overlap(few: Spans, many: Spans) -> int:
    return length(common(few, many))
