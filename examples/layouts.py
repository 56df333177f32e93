"""How a tensor is split, as a string: local shapes, ranges, and what a change of layout moves.  No torch, no process.

python examples/layouts.py
"""

from interlace import Layout, Mesh
from interlace.layout import transition

mesh = Mesh.parse("tp=2 dp=3")
shape = (7, 10)  # B sequences, T positions: neither divides

split = Layout.parse("B/dp T/tp")
for rank in range(mesh.world):
    print(f"rank {rank} of {mesh}: shape {split.local_shape(shape, mesh, rank)}", end=", ")
    print(f"ranges {split.local_ranges(shape, mesh, rank)}")

for before, after in (("B/dp T/tp", "B/dp T"), ("B T +dp", "B/dp T"), ("B/dp T", "B T/dp")):
    moves = transition(Layout.parse(before), Layout.parse(after), shape, mesh, itemsize=2)
    names = " then ".join(f"{move.collective} over {move.axis}, {move.bytes} bytes a rank at most" for move in moves)
    print(f'"{before}" to "{after}": {names}')
