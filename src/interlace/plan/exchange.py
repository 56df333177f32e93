"""The fused exchange of rows with experts as integers: when it is taken, its slots, its memory, and what crosses the
wire.  Exact.

Run by `kernels.expert_exchange`, priced by the planner, and held against a running plan by `verify`.
"""

from __future__ import annotations

import math

from interlace.config import ModelConfig, ParallelPlan

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


MEASURED = 2  # ranks of the largest group of GPUs that the exchange has run on


def pays(hidden: int, inner: int, ways: int, itemsize: int) -> bool:
    """Whether a layer on GPUs is known to be quicker than with the library's all-to-all.

    Both layers that were measured, over two GPUs in bf16, are: 3.16 and 1.16 times.  Of more ranks and in fp32 none
    was; and where rows of tokens or of experts' products are no whole 16 bytes, kernels do without descriptors and
    spill.
    """
    whole = hidden * itemsize % 16 == 0 and inner * itemsize % 16 == 0
    return ways <= MEASURED and itemsize == 2 and whole


def taken(cfg: ModelConfig, plan: ParallelPlan, itemsize: int, device: str) -> bool:
    """Whether rows of a plan's experts go by the fused exchange, given that ranks address each other's memory.

    Without being asked for only on GPUs, where it pays; and halves are of the all-to-all.
    """
    if plan.ep == 1 or plan.overlap != "auto":
        return plan.ep > 1 and plan.overlap == "fused"
    even = cfg.expert_ffn_size % plan.tp == 0
    quicker = even and pays(cfg.hidden_size, cfg.expert_ffn_size // plan.tp, plan.ep, itemsize)
    return device == "cuda" and plan.expert_halves == "off" and quicker


def slots(choices: int, ways: int, held: int, num_experts: int, block: int, room: float | None = None) -> int:
    """Slots for rows on every rank, in whole blocks; every expert begins at one.

    choices: the most that any of the `ways` ranks brings, each may go anywhere.  held: the most experts of a rank.
    room: times the rows of that rank if all experts are chosen alike.  None: for all that could come.
    """
    rows = ways * choices
    if room is not None:
        rows = math.ceil(min(rows, room * rows * held / num_experts))
    return max(1, -(-(rows + held * (block - 1)) // block)) * block


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
