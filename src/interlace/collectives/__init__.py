"""Transfers between ranks as values: each function starts one and hands back a `Handle`; only its `wait` blocks."""

from interlace.collectives.groups import Group, Groups, make_groups, neighbours
from interlace.collectives.handle import Handle, Meter, Record
from interlace.collectives.ops import all_gather, all_to_all, broadcast
from interlace.collectives.ordered import add_parts, all_reduce, balanced, both, reduce_scatter, sum_scalars, then

__all__ = [
    "Group",
    "Groups",
    "Handle",
    "Meter",
    "Record",
    "add_parts",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "balanced",
    "both",
    "broadcast",
    "make_groups",
    "neighbours",
    "reduce_scatter",
    "sum_scalars",
    "then",
]
