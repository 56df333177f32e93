"""Tokens to the experts of other ranks, through them, and back, with the bytes under the products.

`ExpertExchange(group, owners)(x, weights, experts, gate, up, down)` equals `expert_plain.plain`, values and gradients:

    rows = all_to_all(x, k times, by expert);   made = down @ (silu(gate @ rows) * (up @ rows)), expert by expert
    y = sum over k, in order, of weights * all_to_all(made, back)

Quicker because the device waits for no host and no transfer is by itself.  Every rank writes its rows straight into
their owner's memory, where they stand by expert (`expert_route` says where), raises a flag a piece, and goes on to
multiply what has come; the last product's rows leave as its tiles are done (`expert_rows`, `expert_products`).  Six
launches forward, seven backward.  The dual exchanges are the same kernels: rows of dy, with their weights, go the way
of the rows of x, and the gradient of x comes back the way of y, added up without weights.  Nobody adds to what another
adds to, so a repeated call has the same bits.

Memory: slots, and for backward what stands beside them, for all rows that could come, or by need: with `room`, for so
many times the rows of an even choice.  All ranks learn all counts, so where one wants more, all find that out on the
device, send and multiply nothing, and go again with as many slots as that one wants; the bits are the same.  The host
looks when it has handed out the whole layer: it waits for the counts alone, and the device not at all.

A token is sent once for each of its choices, not once for each of its owners.  The latter, with even routing, would
save 25 % of the bytes at k = 2 over 2 ranks, 75 % at k = 8 over 2 and 34 % at k = 8 over 8.  It was not tried: the
products would have to gather their rows, which descriptors (TMA) on Hopper cannot, or a copy at the owner would have to
spread them, and a tile of any expert would wait for tokens of all places instead of for its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.collectives import Group
from interlace.errors import ConfigError
from interlace.kernels import expert_products, expert_route, expert_rows, workspace
from interlace.kernels.candidate import Tile
from interlace.kernels.expert_plain import plain
from interlace.kernels.tile import DTYPES, POINTERS, Operand, is_interpreted, operand, widens
from interlace.plan import exchange as plan

OPEN, CLOSE, WIDE = Tile(128, 128, 64, 8, 8, 4), Tile(128, 128, 64, 8, 8, 4), Tile(128, 256, 64, 8, 8, 3)


@dataclass(frozen=True)
class Tuning:
    """How the kernels are cut.  Tiles have `block` rows; their own `block_m` counts for weight gradients only.

    piece: slots under one flag.  movers: programs of a launch that move rows before, or instead of, multiplying.
    programs: of a launch; None: one a multiprocessor.  rows, columns: what a program moves at a time.
    descriptors: whether products read by TMA where they can.  choices: how many a program counts at once, at most.
    overlap: False lets rows travel by themselves, in launches of their own.
    """

    block: int = 128
    piece: int = 64
    movers: int = 32
    programs: int | None = None
    rows: int = 8
    columns: int = 1024
    open: Tile = OPEN
    close: Tile = CLOSE
    leave: Tile = WIDE
    weight: Tile = WIDE
    descriptors: bool = True
    choices: int = 1024
    overlap: bool = True


def default_tuning(dtype: torch.dtype, hidden: int) -> Tuning:
    """Not tuned: what fits a multiprocessor of Hopper; tiny where interpreted, and there one program moves all rows."""
    columns = min(1024, triton.next_power_of_2(hidden))
    if is_interpreted():
        tile = Tile(16, 32, 32, 2, 4, 1, False)
        return Tuning(16, 8, 1, 2, 8, columns, tile, tile, tile, Tile(32, 32, 16, 2, 4, 1, False), descriptors=False)
    if dtype == torch.float32:
        tile = Tile(64, 64, 32, 8, 4, 2, False)
        return Tuning(64, 32, 24, None, 8, columns, tile, tile, tile, tile)
    return Tuning(columns=columns)


@dataclass
class Call:
    """What one exchange of rows knows: where they are (`table`, `order`), and memory that its kernels work in."""

    tokens: int
    k: int
    order: Tensor
    table: Tensor
    words: Tensor
    keep: tuple[Tensor, ...] = ()


class ExpertExchange:
    """Experts of a group, and what is needed to reach them.  See the module.

    owners: how many experts each rank holds, in order; with none a rank only sends.  most_tokens: the most that any
    rank ever brings, the same number on every rank; None: all bring as many as this one.  room: slots at first, in
    times of the rows that the rank with most experts has if all are chosen alike; None: for all that can come, and the
    host never looks.  Every expert's rows are rounded up to `tuning.block` slots.  Every rank makes the same calls, on
    one stream or several.  Raises ConfigError for what does not fit together.
    """

    def __init__(
        self,
        group: Group,
        owners: Sequence[int],
        *,
        most_tokens: int | None = None,
        room: float | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        if len(owners) != group.size or min(owners) < 0 or sum(owners) < 1:
            raise ConfigError(
                f"experts {list(owners)} for {group.size} ranks; give the number of each rank, at least one in all."
            )
        if room is not None and not room >= 1:
            raise ConfigError(f"room for {room} times the even rows; give at least 1, or None for all that can come.")
        self.group, self.owners, self.experts = group, tuple(owners), sum(owners)
        self.first, self.local = sum(owners[: group.rank]), owners[group.rank]
        self.most_tokens, self.room, self.tuning = most_tokens, room, tuning
        self._maps = self._make_maps()

    def _make_maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each expert its owner and its owner's first; the order in which this rank sends to them."""
        ranks, me = self.group.size, self.group.rank
        firsts = [sum(self.owners[:rank]) for rank in range(ranks)]
        owner = [rank for rank, count in enumerate(self.owners) for _ in range(count)]
        turn = [(me + 1 + step) % ranks for step in range(ranks)]
        most = max(self.owners)
        sequence = [firsts[rank] + each for each in range(most) for rank in turn if each < self.owners[rank]]
        rows = (owner, [firsts[rank] for rank in owner], sequence)
        return tuple(torch.tensor(row, dtype=torch.int32, device=self.group.device) for row in rows)  # type: ignore[return-value]

    def __call__(
        self,
        x_ND: Tensor,
        weights_Nk: Tensor,
        experts_Nk: Tensor,
        gate_LFD: Tensor,
        up_LFD: Tensor,
        down_LDF: Tensor,
    ) -> Tensor:
        """y [N D]: tokens x with the weights and numbers of their experts; gate, up, down: of this rank's experts.

        Number X (of all experts) is no expert: such a choice, which a router has dropped, stays here and adds nothing.
        """
        self._refuse(x_ND, weights_Nk, experts_Nk, gate_LFD, up_LFD, down_LDF)
        if not self.is_fused:
            return plain(x_ND, weights_Nk, experts_Nk, gate_LFD, up_LFD, down_LDF, self.group, self.owners)
        made: Tensor = _Exchange.apply(self, x_ND, weights_Nk, experts_Nk, gate_LFD, up_LFD, down_LDF)  # type: ignore[no-untyped-call]
        return made

    @property
    def is_fused(self) -> bool:
        """Whether rows go by these kernels; else by collectives, as `plain`.  Collective at the group's first call."""
        return self.group.size > 1 and self.refuses() is None

    def refuses(self) -> str | None:
        """Why rows go by collectives, None if they do not.  Collective as `is_fused`."""
        if self.group.device.type != "cuda" and not is_interpreted():
            return "its kernels run on GPUs, or with TRITON_INTERPRET=1 on a CPU"
        return None if workspace.reachable(self.group) else "ranks cannot address each other's memory"

    # --- sizes -------------------------------------------------------------------------------------------------------

    def _refuse(self, x: Tensor, weights: Tensor, experts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
        D, F = x.shape[1], gate.shape[1]
        wanted = ((self.local, F, D), (self.local, F, D), (self.local, D, F))
        found = tuple(tuple(weight.shape) for weight in (gate, up, down))
        if found != wanted:
            raise ConfigError(f"experts of shapes {found}, this rank's {self.local} of hidden size {D} have {wanted}.")
        if experts.shape != weights.shape or len(experts) != len(x) or experts.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"weights {tuple(weights.shape)} and experts {tuple(experts.shape)} of {experts.dtype} for {len(x)} "
                "tokens; give both as [tokens, k], the experts as int32 or int64."
            )
        kinds = {each.dtype for each in (x, gate, up, down)}
        if len(kinds) > 1 or x.dtype not in DTYPES:
            names = ", ".join(sorted(str(kind) for kind in kinds))
            raise ConfigError(f"tokens and experts of {names}; give all in one of float32, float16, bfloat16.")
        if self.most_tokens is not None and len(x) > self.most_tokens:
            raise ConfigError(f"{len(x)} tokens where most_tokens is {self.most_tokens}; make it the most of any rank.")

    def sizes(self, tokens: int, k: int, tuning: Tuning) -> tuple[int, int, int]:
        """Most tokens of a rank, slots at first, and slots that no call wants more of: multiples of the block."""
        most = tokens if self.most_tokens is None else self.most_tokens
        sizes = most * k, self.group.size, max(self.owners), self.experts, tuning.block
        return most, plan.slots(*sizes, self.room), plan.slots(*sizes)

    def count(self, steps: Steps, call: Call, inner: int, products: int, backward: bool) -> None:
        """Tells the meter, if it listens, what the device knows: bytes of rows, and FLOPs of so many products a row."""
        self.group.meter.later(
            functools.partial(self._tell, call.table, steps.D, steps.dtype.itemsize, inner, products, backward)
        )

    def _tell(self, table: Tensor, hidden: int, itemsize: int, inner: int, products: int, backward: bool) -> None:
        rows = table[: expert_route.REGION.value * self.experts].view(-1, self.experts).tolist()
        own = slice(self.first, self.first + self.local)
        ends, starts = rows[expert_route.END.value], rows[expert_route.START.value]
        here, kept = sum(ends[own]) - sum(starts[own]), rows[expert_route.KEPT.value]
        there, back = sum(kept) - sum(kept[own]), here - sum(kept[own])
        nbytes = plan.sent(there, back, hidden, itemsize, backward)
        nbytes += 0 if backward else plan.counts(self.experts, self.group.size)
        self.group.meter.count("all_to_all", self.group.axis, nbytes)
        self.group.meter.flops += 2 * products * here * hidden * inner


class Steps:
    """The launches of one exchange over a group's workspace, in the order in which they are to be made."""

    def __init__(
        self, exchange: ExpertExchange, x: Tensor, tokens: int, k: int, inner: int = 1, capacity: int | None = None
    ) -> None:
        """inner: features between an expert's products; of rows that are only moved any will do.  capacity: slots, the
        same on every rank; None: as many as the exchange has at first."""
        self.exchange, self.k, self.D, self.dtype = exchange, k, x.shape[1], x.dtype
        group = exchange.group
        waits = plan.waits_pay(inner, group.size, x.element_size())
        self.tuning = tuning = exchange.tuning or replace(default_tuning(x.dtype, self.D), overlap=waits)
        self.most, first, self.enough = exchange.sizes(tokens, k, tuning)
        self.capacity = first if capacity is None else capacity
        X, W = exchange.experts, group.size
        self.space = space = workspace.of(group, "expert_exchange")
        item = x.dtype.itemsize
        space.require(
            plan.buffers(self.capacity, self.most * k, self.D, item, X, W),
            {"ready": W, "arrived": self.capacity // tuning.piece * W, "back": W, "due": W, "epochs": 1},
        )
        space.follow()
        self.slots = space.buffer("slots", None, (self.capacity, self.D), x.dtype)
        self.returned = space.buffer("returned", None, (max(1, self.most * k), self.D), x.dtype)
        self.choices = space.buffer("choices", None, (self.capacity,), torch.int32)
        self.factors = space.buffer("factors", None, (self.capacity,), torch.float32)
        self.shares = space.buffer("shares", None, (max(1, self.most * k),), torch.float32)
        self.word = {name: space.tensors[name].local for name in ("ready", "arrived", "back", "due", "epochs")}
        self.heap = space.heap.context
        self.owner, self.origin, self.sequence = exchange._maps
        self.sized = {
            "XP": max(2, triton.next_power_of_2(X)),
            "LP": max(2, triton.next_power_of_2(exchange.local)),
            "WP": triton.next_power_of_2(W),
        }
        self.moved = {"PIECE": tuning.piece, "ROWS": tuning.rows, "COLUMNS": tuning.columns}

    def programs(self) -> int:
        if self.tuning.programs is not None:
            return self.tuning.programs
        return self.space.places(1 << 10)

    def pairs(self) -> int:
        """Programs of a launch that only moves rows: two fit on a multiprocessor, and wait there together."""
        return self.tuning.programs or 2 * self.programs()

    def movers(self) -> int:
        if not self.tuning.overlap:
            return 0
        few = self.tuning.programs is None
        return min(self.tuning.movers, max(1, self.programs() // 4)) if few else self.tuning.movers

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.slots.device)

    def _place(self) -> tuple[int, int, int]:
        return self.exchange.experts, self.exchange.first, self.exchange.local

    # --- where rows go -----------------------------------------------------------------------------------------------

    def route(self, experts_Nk: Tensor) -> Call:
        """Counts, exchanges the counts, and makes the table."""
        X, XP, count = self.exchange.experts, self.sized["XP"], experts_Nk.numel()
        sub = min(self.tuning.choices, max(16, 8192 // XP))
        loops = max(1, triton.cdiv(count, 128 * sub))
        programs = max(1, triton.cdiv(count, loops * sub))
        integers = {"dtype": torch.int32}
        places, order = self._new(max(1, count), **integers), self._new(max(1, count), **integers)
        tallies, begins = self._new(programs, X, **integers), self._new(X, **integers)
        table = self._new(expert_route.table_words(X, self.exchange.group.size), **integers)
        call = Call(len(experts_Nk), self.k, order, table, self._words(), (experts_Nk, places, tallies, begins))
        counts = self.space.buffer("counts", None, (2 * self.exchange.group.size, X), torch.int32)
        arrivals = self.space.buffer("arrivals", None, (1,), torch.int32)
        word = self.word
        expert_route.count_choices[(programs,)](
            experts_Nk, places, tallies, begins, arrivals, counts, word["ready"], word["epochs"], count, loops, X,
            self.heap, SUB=sub, ROWS=max(1, min(64, 8192 // XP)), XP=XP, num_warps=8,
        )  # fmt: skip
        expert_route.place_choices[(1 + programs,)](
            experts_Nk, places, tallies, begins, order, table, call.words, counts, word["ready"], word["epochs"],
            word["due"], self.owner, self.origin, self.sequence, count, loops, X, self.capacity, self._blocks(),
            self.heap,
            SUB=sub, PIECE=self.tuning.piece, BLOCK=self.tuning.block, XP=XP, num_warps=8,
        )  # fmt: skip
        return call

    def again(self, call: Call) -> Call:
        """Comes to another exchange of the same rows."""
        words, word = self._words(), self.word
        expert_route.announce[(1,)](
            call.table, words, word["ready"], word["epochs"], word["due"], self.owner, self.exchange.experts,
            self._blocks(), self.heap, XP=self.sized["XP"], num_warps=4,
        )  # fmt: skip
        return Call(call.tokens, call.k, call.order, call.table, words, call.keep)

    def wanted(self, call: Call) -> Callable[[], int]:
        """How many slots a call wants, the same on every rank; waits, when asked, for the counts alone.  To be taken
        right behind them.  0 where there are enough in any case, without a look."""
        if self.capacity >= self.enough:
            return lambda: 0
        found = call.table[-1:]
        if not found.is_cuda:
            return lambda: int(found)
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"a graph of an exchange with room for {self.exchange.room} times the even rows, where the host looks "
                "whether rows found room; leave room out, so that all find it."
            )
        number = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(found, non_blocking=True)
        known = torch.cuda.Event()
        known.record()

        def look() -> int:
            known.synchronize()
            return int(number)

        return look

    def _blocks(self) -> int:
        return self.capacity // self.tuning.block

    def _words(self) -> Tensor:
        return self._new(self._blocks() + 3, dtype=torch.int32)

    # --- rows alone --------------------------------------------------------------------------------------------------

    def send(self, x_ND: Tensor, call: Call, weights_Nk: Tensor | None = None) -> Tensor:
        """The dispatch by itself, with weights if given: the slots, once all rows of this rank's experts are there."""
        word, weighted = self.word, weights_Nk is not None
        expert_rows.send_only[(1 if is_interpreted() and self.tuning.movers < 2 else self.pairs(),)](
            x_ND, x_ND if weights_Nk is None else weights_Nk, call.order, self.slots, self.choices, self.factors,
            word["arrived"], word["ready"], word["epochs"], call.table, self.owner, self.sequence, call.k, self.D,
            *self._place(), self.heap,
            WEIGHTED=weighted, CLEARED=weighted and self.tuning.descriptors, BLOCK=self.tuning.block,
            **self.moved, **self.sized, num_warps=8,
        )  # fmt: skip
        return self.slots

    def give_back(self, made_CD: Tensor, call: Call, partial: Tensor | None = None) -> None:
        """The combine's way back by itself: rows `made`, slot by slot, to where their tokens are."""
        expert_rows.return_only[(self.pairs(),)](
            made_CD, made_CD if partial is None else partial, self.returned, self.shares, self.choices, call.words[2:],
            self.word["back"], call.table, 0 if partial is None else len(partial), self.D, self._place()[0],
            self.capacity, *self._place()[1:], self.heap,
            SHARED=partial is not None, BLOCK=self.tuning.block, **self.moved, LP=self.sized["LP"], num_warps=8,
        )  # fmt: skip

    def sum(self, call: Call, weights_Nk: Tensor | None, shared: bool) -> tuple[Tensor, Tensor]:
        """y [N D] of the rows that come back, weighted if weights are given; [N k] of what came along if `shared`."""
        y_ND = self._new(call.tokens, self.D)
        shares_Nk = self._new(*((call.tokens, call.k) if shared else (1,)), dtype=torch.float32)
        if call.tokens:
            rows = 4
            expert_rows.sum_rows[(triton.cdiv(call.tokens, rows),)](
                self.returned, self.shares, y_ND if weights_Nk is None else weights_Nk, call.keep[0], y_ND, shares_Nk,
                self.word["due"], self.word["back"], call.table, call.tokens, call.k, self.D, self.exchange.experts,
                self.capacity, self.heap,
                WEIGHTED=weights_Nk is not None, SHARED=shared, ROWS=rows, COLUMNS=self.tuning.columns, num_warps=4,
            )  # fmt: skip
        return y_ND, shares_Nk

    def keep(self, call: Call) -> Tensor:
        """A copy of the slots in ordinary memory."""
        kept = self._new(self.capacity, self.D)
        expert_rows.keep_rows[(self.pairs(),)](
            self.slots, kept, call.table, self.D, *self._place(), self.heap,
            BLOCK=self.tuning.block, ROWS=self.tuning.rows, COLUMNS=self.tuning.columns, LP=self.sized["LP"],
            num_warps=8,
        )  # fmt: skip
        return kept

    # --- rows and products -------------------------------------------------------------------------------------------

    def _operand(self, matrix: Tensor, block: tuple[int, int], rows_only: bool = False) -> Operand:
        only = None if self.tuning.descriptors and not rows_only else POINTERS
        return operand(matrix, block, only)

    def _tile(self, tile: Tile) -> dict[str, Any]:
        return {
            "BM": self.tuning.block, "BN": tile.block_n, "BK": tile.block_k, "GROUP": tile.group,
            "WIDE": widens(self.dtype), "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip

    def open(self, x_ND: Tensor, call: Call, gate: Tensor, up: Tensor, kept: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Sends x; gates and ups (if kept) and what the last product reads, [slots F]."""
        if not self.tuning.overlap:
            self.send(x_ND, call)
        tile, F, D, word = self.tuning.open, gate.shape[1], self.D, self.word
        hidden = self._new(self.capacity, F)
        gates, ups = (self._new(self.capacity, F) if kept else hidden for _ in range(2))
        a = self._operand(self.slots, (self.tuning.block, tile.block_k))
        b, c = (self._operand(each.view(-1, D), (tile.block_n, tile.block_k)) for each in (gate, up))
        expert_products.send_and_open[(self.programs(),)](
            x_ND, call.order, self.slots, self.choices, word["arrived"], word["ready"], word["epochs"], call.table,
            self.owner, self.sequence, call.words, a.argument, b.argument, c.argument, gates, ups, hidden,
            call.k, D, F, *self._place(), self.heap,
            A=a.how, B=b.how, KEPT=kept, SENDERS=self.movers(), **self.moved, **self.sized, **self._tile(tile),
        )  # fmt: skip
        return gates, ups, hidden

    def leave(self, pairs: list[tuple[Tensor, Tensor]], turned: bool, call: Call, partial: Tensor | None) -> Tensor:
        """Sum of products of [slots K] with experts [L .., ..], sent back.

        turned: experts are [L K D], else [L D K].  partial: what comes along, [parts slots].
        """
        tile, D, K = self.tuning.leave, self.D, pairs[0][0].shape[1]
        made = self._new(self.capacity, D)
        blocks = (self.tuning.block, tile.block_k), (tile.block_n, tile.block_k)
        a = [self._operand(rows, blocks[0]) for rows, _ in pairs]
        flat = [experts.view(-1, experts.shape[2]) for _, experts in pairs]
        b = [self._operand(each.t() if turned else each, blocks[1]) for each in flat]
        programs = self.programs()
        expert_products.multiply_and_return[(programs,)](
            a[0].argument, b[0].argument, a[-1].argument, b[-1].argument, made, made if partial is None else partial,
            self.returned, self.shares, self.choices, call.words[3:], call.words[1:], call.words[2:], self.word["back"],
            call.table, K, D, self._place()[0], b[0].row, b[0].column, *((0, K) if turned else (D, 0)),
            0 if partial is None else len(partial), self.capacity, *self._place()[1:], self.heap,
            A=a[0].how, B=b[0].how, TWO=partial is not None, RETURNED=self.tuning.overlap,
            RETURNERS=min(self.movers(), programs - 1), **self.moved, LP=self.sized["LP"], **self._tile(tile),
        )  # fmt: skip
        if not self.tuning.overlap:
            self.give_back(made, call, partial)
        return made

    def close(
        self, dy_ND: Tensor, weights_Nk: Tensor, call: Call, down: Tensor, gates: Tensor, ups: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sends dy and weights; gradients of gates and ups, the weighted h, and parts of the weights' gradients."""
        if not self.tuning.overlap:
            self.send(dy_ND, call, weights_Nk)
        tile, F, D, word = self.tuning.close, gates.shape[1], self.D, self.word
        dgates, dups, weighted = (self._new(self.capacity, F) for _ in range(3))
        partial = self._new(triton.cdiv(F, tile.block_n), self.capacity, dtype=torch.float32)
        a = self._operand(self.slots, (self.tuning.block, tile.block_k))
        b = self._operand(down.view(-1, F).t(), (tile.block_n, tile.block_k))
        expert_products.send_and_close[(self.programs(),)](
            dy_ND, weights_Nk, call.order, self.slots, self.choices, self.factors, word["arrived"], word["ready"],
            word["epochs"], call.table, self.owner, self.sequence, call.words, a.argument, b.argument,
            gates, ups, dgates, dups, weighted, partial, call.k, D, F, self._place()[0], b.row, b.column, self.capacity,
            *self._place()[1:], self.heap,
            A=a.how, B=b.how, SENDERS=self.movers(), CLEARED=self.tuning.descriptors,
            **self.moved, **self.sized, **self._tile(tile),
        )  # fmt: skip
        return dgates, dups, weighted, partial

    def weight(self, a_CM: Tensor, b_CN: Tensor, call: Call, like: Tensor) -> Tensor:
        """Of each expert the sum over its rows of a.T @ b, [L M N]."""
        tile, M, N = self.tuning.weight, a_CM.shape[1], b_CN.shape[1]
        out = self._new(*like.shape)
        if out.numel() == 0:
            return out
        a = self._operand(a_CM.t(), (tile.block_m, tile.block_k))
        b = self._operand(b_CN.t(), (tile.block_n, tile.block_k))
        columns = triton.cdiv(N, tile.block_n)
        expert_products.weight_gradient[(triton.cdiv(M, tile.block_m) * columns, self.exchange.local)](
            a.argument, b.argument, out, call.table, M, N, a.column, b.column, *self._place()[:2], columns,
            A=a.how, B=b.how, BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP=tile.group,
            WIDE=widens(self.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out


def _forward(
    steps: Steps, x: Tensor, weights: Tensor, experts: Tensor, gate: Tensor, up: Tensor, down: Tensor, kept: bool
) -> tuple[Call, Tensor, tuple[Tensor, ...], Callable[[], int]]:
    """The call, y, what backward reads if it is kept, and slots wanted: if there are fewer, y is not a number."""
    call = steps.route(experts)
    wanted = steps.wanted(call)
    gates, ups, hidden = steps.open(x, call, gate, up, kept)
    rows = steps.keep(call) if kept else x
    steps.leave([(hidden, down)], False, call, None)
    y, _ = steps.sum(call, weights, shared=False)
    return call, y, (rows, gates, ups), wanted


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: ExpertExchange, x: Tensor, weights: Tensor, experts: Tensor, gate: Tensor, up: Tensor,
        down: Tensor,
    ) -> Tensor:  # fmt: skip
        kept = any(ctx.needs_input_grad)
        x, gate, up, down = (each.contiguous() for each in (x, gate, up, down))
        dtype, weights = weights.dtype, weights.float().contiguous()
        sizes = exchange, x, len(x), experts.shape[1], gate.shape[1]
        steps = Steps(*sizes)
        call, y, kept_rows, wanted = _forward(steps, x, weights, experts.contiguous(), gate, up, down, kept)
        if (slots := wanted()) > steps.capacity:
            steps.space.heap.synchronize()  # counts that never came are no reason to take memory
            del call, y, kept_rows
            steps = Steps(*sizes, slots)
            call, y, kept_rows, _ = _forward(steps, x, weights, experts.contiguous(), gate, up, down, kept)
        exchange.count(steps, call, gate.shape[1], 3, backward=False)
        ctx.exchange, ctx.call, ctx.capacity, ctx.dtype = exchange, call, steps.capacity, dtype
        if kept:
            ctx.save_for_backward(*kept_rows, weights, gate, up, down)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        exchange: ExpertExchange = ctx.exchange
        rows, gates, ups, weights, gate, up, down = ctx.saved_tensors
        dy = dy.contiguous()
        steps = Steps(exchange, dy, ctx.call.tokens, ctx.call.k, gate.shape[1], ctx.capacity)
        call = steps.again(ctx.call)
        dgates, dups, weighted, partial = steps.close(dy, weights, call, down, gates, ups)
        steps.leave([(dgates, gate), (dups, up)], True, call, partial)
        _, _, _, _, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        dgate = steps.weight(dgates, rows, call, gate) if wants_gate else None
        dup = steps.weight(dups, rows, call, up) if wants_up else None
        ddown = steps.weight(steps.slots, weighted, call, down) if wants_down else None
        dx, dweights = steps.sum(call, None, shared=True)
        products = 3 + wants_gate + wants_up + wants_down
        exchange.count(steps, call, gate.shape[1], products, backward=True)
        return None, dx, dweights.to(ctx.dtype), None, dgate, dup, ddown
