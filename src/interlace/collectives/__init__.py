"""Transfers between ranks as values: each function starts one, hands back a `Handle`, and never blocks before `wait`."""

from interlace.collectives.groups import Group, Groups, make_groups
from interlace.collectives.handle import Handle, Meter
from interlace.collectives.ops import all_gather, all_to_all, broadcast
from interlace.collectives.ordered import all_reduce, reduce_scatter, sum_scalars

__all__ = [
    "Group",
    "Groups",
    "Handle",
    "Meter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "make_groups",
    "reduce_scatter",
    "sum_scalars",
]
