"""The ranks of the context axis, which positions each holds, and what they exchange.

Equals an all-to-all of uneven parts (`exchange_parts`).  Over copy engines, where ranks address each other's memory, it
holds no multiprocessor, and begins although a kernel that was launched behind it has taken them all
(docs/notes/0024-context-axis-speed.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.collectives import Boxes, Group, Handle, all_to_all
from interlace.plan import context as plan


@dataclass(frozen=True, eq=False)
class SequenceAxis:
    """The context axis: its ranks, the length of every sequence, the exchange ("ring", "gather", "ulysses"), and lines
    over copy engines between every two ranks, where there are any."""

    group: Group
    length: int
    exchange: str
    boxes: Boxes | None = None

    @property
    def places(self) -> tuple[int, int]:
        """The pieces that this rank holds."""
        return plan.places(self.group.size, self.group.rank)

    def columns(self, rank: int | None = None) -> Tensor:
        """Positions that a rank (this one when None) holds, in the order in which it holds them: int64, on the CPU."""
        return torch.cat([torch.arange(*span) for span in self.spans(rank)])

    def spans(self, rank: int | None = None) -> list[plan.Range]:
        """The same as ranges; pieces side by side are one."""
        found = list[plan.Range]()
        for place in plan.places(self.group.size, self.group.rank if rank is None else rank):
            start, stop = plan.pieces(self.length, self.group.size)[place]
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return found

    def counts(self) -> list[int]:
        """Positions that each rank holds."""
        return [plan.held(self.length, self.group.size, rank) for rank in range(self.group.size)]

    def exchange_parts(
        self,
        leaving: Sequence[Sequence[Tensor]],
        arriving: Sequence[int],
        dtype: torch.dtype,
        *,
        most: int,
        name: str,
    ) -> Handle[list[Tensor]]:
        """An all-to-all: the result holds, of each rank, the elements that it sends here, 1-D.

        leaving: for each rank tensors of `dtype`, one after another.  arriving: elements from each.  most: bytes
        that no message of any rank exceeds in a step, the same on every rank.
        """
        group = self.group
        flats = [[part.reshape(-1) for part in parts] for parts in leaving]
        if self.boxes is not None:
            return self._through_boxes(self.boxes, flats, arriving, dtype, most, name)
        sizes = [sum(part.numel() for part in parts) for parts in flats]
        flat = _joined_parts(flats, dtype, group.device)
        moving = all_to_all(flat, group, send_sizes=sizes, receive_sizes=arriving, name=name)
        return Handle(lambda: list(moving.wait().split(list(arriving))))

    def _through_boxes(
        self,
        boxes: Boxes,
        flats: Sequence[Sequence[Tensor]],
        arriving: Sequence[int],
        dtype: torch.dtype,
        most: int,
        name: str,
    ) -> Handle[list[Tensor]]:
        group, own = self.group, self.group.rank
        boxes.require(most)
        others = [peer for peer in range(group.size) if peer != own]
        sends = [
            boxes[own, peer].send(*flats[peer], name=name, kind="all_to_all")
            for peer in others
            if sum(part.numel() for part in flats[peer])
        ]
        coming = {peer: boxes[peer, own].receive((arriving[peer],), dtype, name) for peer in others if arriving[peer]}

        def wait() -> list[Tensor]:
            found = {peer: each.wait() for peer, each in coming.items()}
            for each in sends:  # then what left may be written again
                each.wait()
            found[own] = _joined_parts([flats[own]], dtype, group.device)
            return [found.get(peer, found[own][:0]) for peer in range(group.size)]

        handle = Handle(wait)
        if group.meter.at_once:
            handle.wait()
        return handle


def _joined_parts(flats: Sequence[Sequence[Tensor]], dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [part for flat in flats for part in flat]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
