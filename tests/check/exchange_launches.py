"""The exchange of rows with experts as host programs for the checker; every wait and signal of it takes part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interlace.collectives import Group, Meter
from interlace.kernels import workspace
from interlace.kernels.candidate import Tile
from interlace.kernels.expert_exchange import ExpertExchange, Steps, Tuning
from interlace.symmetric import SymmetricHeap

TILE = Tile(4, 8, 8, 2, 4, 1, False)
TUNING = Tuning(4, 2, 2, 3, 2, 8, TILE, TILE, TILE, TILE, choices=2)
K = 2
SIZES = (5, 6)  # hidden, ffn; no rows of 16 bytes: products load by pointers


def numbers(rank: int, call: int, tokens: int, experts: int, D: int = SIZES[0]) -> tuple[torch.Tensor, ...]:
    """Tokens, weights, chosen experts (on call 0 not the last, on call 1 the first two) and dy of a rank."""
    made = torch.Generator().manual_seed(100 * call + rank)
    x, dy = torch.randn(tokens, D, generator=made), torch.randn(tokens, D, generator=made)
    weights = torch.rand(tokens, K, generator=made)
    among = (experts - 1, K)[call] if call < 2 else experts
    order = torch.rand(tokens, among, generator=made).argsort(dim=1)
    chosen = order[:, :K].contiguous()
    chosen[1:, 0] = experts  # dropped
    return x, weights, chosen, dy


def factors(experts: int, D: int, F: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    shapes = ((experts, F, D), (experts, F, D), (experts, D, F))
    gate, up, down = (torch.randn(shape, generator=made) / shape[2] ** 0.5 for shape in shapes)
    return gate, up, down


def _on(heap: SymmetricHeap, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(heap.device) for each in tensors)


def expected(
    rank: int, call: int, tokens: int, experts: int, D: int, F: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y and the gradients of x and of the weights, on one process."""
    x, weights, chosen, dy = numbers(rank, call, tokens, experts, D)
    x.requires_grad_()
    weights.requires_grad_()
    gate, up, down = factors(experts, D, F)
    h = torch.nn.functional.silu(torch.einsum("nd,efd->nef", x, gate)) * torch.einsum("nd,efd->nef", x, up)
    made = torch.einsum("nef,edf->ned", h, down)
    made = torch.cat([made, made.new_zeros(tokens, 1, D)], dim=1)
    y = (made.gather(1, chosen[..., None].expand(-1, -1, D)) * weights[..., None]).sum(dim=1)
    dx, dweights = torch.autograd.grad(y, (x, weights), dy)
    return y.detach(), dx, dweights


def forward_and_backward(
    heap: SymmetricHeap,
    layers: int = 2,
    sizes: tuple[int, int] = SIZES,
    tuning: Tuning | None = TUNING,
    again: bool = False,
) -> Callable[[], None]:
    """Rank r has 1 + r experts; ranks bring 0 to 2 tokens, to each layer another number.  Backward is in reverse.

    again: every layer finds no room at first, and goes again.
    """
    D, F = sizes
    owners = [1 + rank for rank in range(heap.size)]
    experts = sum(owners)
    group = Group("ep", tuple(range(heap.size)), heap.rank, heap.device, Meter())
    exchange = ExpertExchange(group, owners, most_tokens=2, tuning=tuning)
    mine = slice(exchange.first, exchange.first + exchange.local)
    gate, up, down = (each[mine].contiguous().to(heap.device) for each in factors(experts, D, F))
    tokens = [(1 + layer + heap.rank) % 3 for layer in range(layers)]
    given = [_on(heap, numbers(heap.rank, layer, tokens[layer], experts, D)) for layer in range(layers)]
    made: list[tuple[torch.Tensor, ...]] = []
    alive: list[object] = []
    vain: list[torch.Tensor] = []
    with workspace.on(heap, group):
        kept = []
        alive.append(Steps(exchange, given[0][0], len(given[0][0]), K))  # memory does not grow later on
        for x, weights, chosen, _ in given:
            for capacity in (0, None) if again else (None,):
                steps = Steps(exchange, x, len(x), K, capacity=capacity)
                call = steps.route(chosen)
                gates, ups, hidden = steps.open(x, call, gate, up, True)
                rows = steps.keep(call)
                left = steps.leave([(hidden, down)], False, call, None)
                y, _ = steps.sum(call, weights, shared=False)
                alive += [call, hidden, left, gates, ups, rows]
                if capacity is not None:
                    vain.append(y)
            kept.append((steps, call, gates, ups, rows, y))
        for (_, weights, _, dy), (steps, call, gates, ups, rows, y) in reversed(list(zip(given, kept, strict=True))):
            call = steps.again(call)
            dgates, dups, weighted, partial = steps.close(dy, weights, call, down, gates, ups)
            left = steps.leave([(dgates, gate), (dups, up)], True, call, partial)
            products = steps.weight(dgates, rows, call, gate), steps.weight(steps.slots, weighted, call, down)
            made.insert(0, (y, *steps.sum(call, None, shared=True)))
            alive += [call, dgates, dups, weighted, partial, left, products]
        alive += kept

    def check() -> None:
        assert alive
        assert all(y.isnan().all() for y in vain), "nobody may take what was not computed"
        for layer, found in enumerate(made):
            for ours, theirs in zip(found, expected(heap.rank, layer, tokens[layer], experts, D, F), strict=True):
                largest = theirs.abs().max().item() if theirs.numel() else 1.0
                torch.testing.assert_close(ours.cpu(), theirs, rtol=0.0, atol=1e-5 * max(largest, 1e-6))

    return check


def goes_again(heap: SymmetricHeap) -> Callable[[], None]:
    return forward_and_backward(heap, again=True)


def rows_alone(heap: SymmetricHeap, calls: int = 3) -> Callable[[], None]:
    """Dispatch and combine without products: what comes back is what was sent."""
    experts = 2 * heap.size
    group = Group("ep", tuple(range(heap.size)), heap.rank, heap.device, Meter())
    exchange = ExpertExchange(group, [2] * heap.size, most_tokens=2, tuning=TUNING)
    given = [numbers(heap.rank, call, (1 + call + heap.rank) % 3, experts) for call in range(calls)]
    made, alive = [], []
    with workspace.on(heap, group):
        for x, weights, chosen, _ in given:
            steps = Steps(exchange, x, len(x), K)
            call = steps.route(chosen)
            steps.give_back(steps.send(x, call), call)
            made.append(steps.sum(call, weights, shared=False)[0])
            alive.append(call)

    def check() -> None:
        for (x, weights, chosen, _), y in zip(given, made, strict=True):
            kept = (weights * (chosen < experts)).sum(dim=1, keepdim=True)
            torch.testing.assert_close(y, x * kept, rtol=1e-5, atol=1e-5)

    return check
