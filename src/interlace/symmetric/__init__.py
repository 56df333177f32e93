"""Memory that all ranks of a group address, and one-sided communication over it.

heap = SymmetricHeap(1 << 24)                 # collective; on GPUs with device="cuda"
x = heap.zeros((4, 8))                        # collective: x.local, x.peer(rank)
kernel[(grid,)](x.local, heap.context)        # primitives: interlace.symmetric.device
"""

from interlace.symmetric.fabric import Event, Fabric
from interlace.symmetric.heap import SymmetricHeap, SymmetricTensor
from interlace.symmetric.record import Record

__all__ = ["Event", "Fabric", "Record", "SymmetricHeap", "SymmetricTensor"]
