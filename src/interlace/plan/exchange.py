"""The fused exchange of rows with experts as integers: its slots, its memory, and what crosses the wire.  Exact.

Run by `kernels.expert_exchange`, priced by the planner, and held against a running plan by `verify`.
"""

from __future__ import annotations

NUMBER = 4  # bytes of a choice's number (int32), a weight or its gradient (fp32), and a count of rows (int32)
BLOCKS = {2: 128, 4: 64}  # slots that a GPU's products take at once, by bytes of an element

# Of two H200s, bf16, rounded: bytes a second of rows on the wire (271 to 303e9 were measured), operations a second that
# products are taken to make, and the share by which those take longer that wait for their rows and send what they made
# (the second layer below lost 0.11).
WIRE, PRODUCTS, LONGER = 2.8e11, 6e14, 0.1


def waits_pay(inner: int, ways: int, itemsize: int = 2) -> bool:
    """Whether the products of a layer hide more of its exchange than they lose by waiting for rows.

    inner: features between an expert's products.  Of 8,192 tokens over two H200s 128 experts of 768, eight a token,
    took 5.5 ms with waits and 6.1 without; 8 experts of 14,336, two a token, 30.3 and 28.2.
    """
    moved = 2 * itemsize * (ways - 1) / ways / WIRE  # a row there and back; both times are over its features
    multiplied = 3 * 2 * inner / PRODUCTS
    return moved > LONGER * multiplied


def slots(choices: int, ways: int, held: int, block: int, capacity: int | None = None) -> int:
    """Slots for rows on every rank, in whole blocks; every expert begins at one.

    choices: the most that any of the `ways` ranks brings, each may go anywhere; held: the most experts of a rank.
    capacity: room for fewer.
    """
    rows = ways * choices + held * (block - 1)
    rows = rows if capacity is None else min(rows, capacity)
    return max(1, -(-rows // block)) * block


def buffers(slots: int, choices: int, hidden: int, itemsize: int, num_experts: int, ways: int) -> dict[str, int]:
    """Bytes of the memory that peers write to, one for all layers: rows on their way there and back, and what tells
    whose they are."""
    rows = max(1, choices)
    return {
        "slots": slots * hidden * itemsize,
        "choices": slots * NUMBER,
        "factors": slots * NUMBER,
        "returned": rows * hidden * itemsize,
        "shares": rows * NUMBER,
        "counts": 2 * ways * num_experts * NUMBER,
        "arrivals": NUMBER,
    }


def kept(slots: int, hidden: int, inner: int, itemsize: int) -> int:
    """Bytes that a layer keeps for backward: the rows that came, and gate and up of each."""
    return slots * (hidden + 2 * inner) * itemsize


def sent(there: int, back: int, hidden: int, itemsize: int, backward: bool) -> int:
    """Bytes of so many rows that go to other ranks and, once multiplied, back to others.

    A row goes with the number of its choice; in backward also with the choice's weight, whose gradient comes back.
    """
    row, weight = hidden * itemsize, NUMBER if backward else 0
    return there * (row + NUMBER + weight) + back * (row + weight)


def counts(num_experts: int, ways: int) -> int:
    """Bytes of the numbers of rows that go ahead of a forward pass."""
    return num_experts * NUMBER * (ways - 1)
