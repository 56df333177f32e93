"""Transfers between ranks as values: each function starts one and hands back a `Handle`; only its `wait` blocks."""

from interlace.collectives.groups import Group, Groups, make_groups, neighbours
from interlace.collectives.handle import Handle, Meter, Record
from interlace.collectives.ops import all_gather, all_to_all, broadcast
from interlace.collectives.ordered import Add, add_parts, all_reduce, balanced, both, reduce_scatter, sum_scalars, then
from interlace.collectives.window import Window, make_windows, memory_of, reach

__all__ = [
    "Add",
    "Group",
    "Groups",
    "Handle",
    "Meter",
    "Record",
    "Window",
    "add_parts",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "balanced",
    "both",
    "broadcast",
    "make_groups",
    "make_windows",
    "memory_of",
    "neighbours",
    "reach",
    "reduce_scatter",
    "sum_scalars",
    "then",
]
