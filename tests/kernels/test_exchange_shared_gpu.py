"""The fused exchange of experts between two ranks that share one GPU: many experts, so that tiles look for their rows
while these arrive, and many calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from interlace.symmetric import SymmetricHeap

RANKS, TOKENS, D, F, EXPERTS, K, CALLS = 2, 4096, 1024, 512, 64, 8, 60


class Layer:
    """Numbers of all ranks, and what each should get, in fp32."""

    def __init__(self) -> None:
        made = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device="cuda")

        self.x, self.dy = ([random(TOKENS, D).bfloat16() for _ in range(RANKS)] for _ in range(2))
        routed = [random(TOKENS, EXPERTS).softmax(1).topk(K, 1) for _ in range(RANKS)]
        self.weights, self.chosen = [w.contiguous() for w, _ in routed], [e.contiguous() for _, e in routed]
        shapes = ((EXPERTS, F, D), (EXPERTS, F, D), (EXPERTS, D, F))
        self.factors = [(random(*shape) / shape[2] ** 0.5).bfloat16() for shape in shapes]
        self.expected = [self._expected(rank) for rank in range(RANKS)]
        torch.cuda.synchronize()

    def _expected(self, rank: int) -> tuple[torch.Tensor, ...]:
        x, weights = self.x[rank].float().requires_grad_(), self.weights[rank].clone().requires_grad_()
        y = torch.zeros(TOKENS, D, device="cuda")
        for expert, (gate, up, down) in enumerate(zip(*(each.float() for each in self.factors), strict=True)):
            token, choice = (self.chosen[rank] == expert).nonzero(as_tuple=True)
            rows = x[token]
            made = (torch.nn.functional.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
            y = y.index_add(0, token, made * weights[token, choice, None])
        return y.detach(), *torch.autograd.grad(y, (x, weights), self.dy[rank].float())

    def run(self, heap: SymmetricHeap) -> float:
        """The largest difference of any call, of the largest value."""
        from interlace.collectives import Group, Meter
        from interlace.kernels import workspace
        from interlace.kernels.expert_exchange import ExpertExchange

        rank, local = heap.rank, EXPERTS // RANKS
        group, worst = Group("ep", tuple(range(RANKS)), rank, heap.device, Meter(record=False)), 0.0
        with workspace.on(heap, group):
            exchange = ExpertExchange(group, [local] * RANKS)
            for _ in range(1 if heap.fabric.loading else CALLS):
                mine = [factor[rank * local : (rank + 1) * local] for factor in self.factors]
                leaves = [each.clone().requires_grad_() for each in (self.x[rank], self.weights[rank], *mine)]
                y = exchange(*leaves[:2], self.chosen[rank], *leaves[2:])
                found = y.detach(), *torch.autograd.grad(y, leaves, self.dy[rank])[:2]
                for got, wanted in zip(found, self.expected[rank], strict=True):
                    worst = max(worst, float((got.float() - wanted).abs().max() / wanted.abs().max()))
            heap.synchronize()
        return worst


@pytest.mark.gpu
@pytest.mark.timeout(200)
def test_many_experts_many_times() -> None:
    from interlace.symmetric.cuda import on_one_gpu

    assert max(on_one_gpu(Layer().run, RANKS, nbytes=1 << 30, timeout=20.0)) < 2e-2
