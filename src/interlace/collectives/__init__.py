"""Transfers between ranks as values: each function starts one and hands back a `Handle`; only its `wait` blocks."""

from interlace.collectives.boxes import Box, Boxes, between_all, in_boxes
from interlace.collectives.groups import Group, Groups, make_groups, neighbours, strided
from interlace.collectives.handle import Handle, Meter, Record, Sending
from interlace.collectives.lines import Line, Lines, make_lines, receive, send
from interlace.collectives.ops import all_gather, all_to_all, broadcast, gather_bytes
from interlace.collectives.ordered import Add, add_parts, all_reduce, balanced, both, reduce_scatter, sum_scalars, then
from interlace.collectives.window import Window, make_windows, memory_of, reach

__all__ = [
    "Add",
    "Box",
    "Boxes",
    "Group",
    "Groups",
    "Handle",
    "Line",
    "Lines",
    "Meter",
    "Record",
    "Sending",
    "Window",
    "add_parts",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "balanced",
    "between_all",
    "both",
    "broadcast",
    "gather_bytes",
    "in_boxes",
    "make_groups",
    "make_lines",
    "make_windows",
    "memory_of",
    "neighbours",
    "reach",
    "receive",
    "reduce_scatter",
    "send",
    "strided",
    "sum_scalars",
    "then",
]
