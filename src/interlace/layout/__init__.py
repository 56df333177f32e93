"""Layouts: which slice of a tensor a rank holds, and which collective turns one layout into another, in bytes.

A layout is one entry per dimension, in order, and then what is still owed:

    "B T D"              every rank holds everything
    "B/dp T/cp D"        B is split over axis dp, T over cp, D is whole
    "T/cp/tp"            T is split over cp, and each of those slices over tp
    "T/cp~"              zigzag: T is cut in 2w pieces and rank r holds pieces r and 2w-1-r (even causal work)
    "K/tp*2"             every slice is held by 2 neighbours along tp (4 key-value heads on 8 ranks)
    "V/tp:64"            split in whole chunks of 64 elements; only the last chunk may be short
    "(N M)/dp"           N and M flattened, row-major, into one dimension, which is split
    "(N/tp M)/dp:4096"   the same, of the slice of N that tp left here: ZeRO inside tensor parallelism
    "(D N/tp:8)/dp:32"   the same of a slice of the second dimension, here whole heads of 8
    "(N M)/dp:4096@3/252"  this tensor begins at chunk 3 of a flat unit of 252 chunks, and the unit is what is split
    "T D +tp +cp"        every rank holds all of it, as a partial sum still owed over tp and over cp
    ""                   a scalar

Grammar (entries are separated by spaces; nothing inside an entry is):

    layout = { entry } { "+" axis }
    entry  = ( NAME | "(" part { part } ")" ) split [ "@" START "/" TOTAL ]
    part   = NAME split
    split  = { "/" axis [ "~" ] [ "*" COPIES ] } [ ":" CHUNK ]

NAME is a word or a number, and a label only.  An axis is one of the mesh's; it appears once in a layout.

Every split is balanced: of n things over w slices the first n mod w slices hold one more (`split`).  Nothing has to
divide, and a slice may be empty.  `Layout.local_ranges` alone says who holds what; local shapes, local bytes and the
bytes of every `transition` are derived from it.
"""

from interlace.layout.language import Entry, Layout, Range, Ranges, Split, split
from interlace.layout.transitions import Transfer, transition

__all__ = ["Entry", "Layout", "Range", "Ranges", "Split", "Transfer", "split", "transition"]
