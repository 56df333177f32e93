"""PyTorch's ways to send rows to experts: NCCL's all-to-all, and symmetric memory's with sizes on the device.

Both sort tokens by expert first, as they need, and weigh and add up at the end; k rows a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Nccl:
    """`all_to_all_single`: the host waits for the numbers of rows."""

    def __init__(self, x_ND: torch.Tensor, experts: int) -> None:
        self.ranks, self.experts = dist.get_world_size(), experts

    def dispatch(self, x_ND: torch.Tensor, experts_Nk: torch.Tensor) -> torch.Tensor:
        chosen = experts_Nk.flatten()
        self.order = chosen.argsort(stable=True)
        ones = torch.ones_like(chosen)
        counts_X = ones.new_zeros(self.experts).scatter_add_(0, chosen, ones)
        given = counts_X.view(self.ranks, -1).sum(dim=1)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given)
        self.given, self.taken = torch.stack((given, taken)).tolist()
        rows = x_ND.index_select(0, self.order // experts_Nk.shape[1])
        self.rows = x_ND.new_empty(sum(self.taken), x_ND.shape[1])
        dist.all_to_all_single(self.rows, rows, self.taken, self.given)
        return self.rows

    def combine(self, weights_Nk: torch.Tensor) -> torch.Tensor:
        back = self.rows.new_empty(sum(self.given), self.rows.shape[1])
        dist.all_to_all_single(back, self.rows, self.given, self.taken)
        return _weigh(back, self.order, weights_Nk)


class OnDevice:
    """`symm_mem.all_to_all_vdev`: NVSHMEM, room for all rows that can come."""

    def __init__(self, x_ND: torch.Tensor, experts: int, k: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.ranks, self.experts = dist.get_world_size(), experts
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD.group_name
        rows, D = len(x_ND) * k, x_ND.shape[1]

        def shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            made: torch.Tensor = symm_mem.empty(shape, dtype=dtype, device=x_ND.device)
            symm_mem.rendezvous(made, group=self.group)
            return made

        self.sent, self.back = shared((rows, D), x_ND.dtype), shared((rows, D), x_ND.dtype)
        self.rows = shared((self.ranks * rows, D), x_ND.dtype)
        self.given, self.returned = shared((self.ranks,), torch.int64), shared((self.ranks,), torch.int64)
        self.taken, self.came = shared((2, self.ranks), torch.int64), shared((2, self.ranks), torch.int64)

    def dispatch(self, x_ND: torch.Tensor, experts_Nk: torch.Tensor) -> torch.Tensor:
        chosen = experts_Nk.flatten()
        self.order = chosen.argsort(stable=True)
        ones = torch.ones_like(chosen)
        counts_X = ones.new_zeros(self.experts).scatter_add_(0, chosen, ones)
        torch.sum(counts_X.view(self.ranks, -1), dim=1, out=self.given)
        torch.index_select(x_ND, 0, self.order // experts_Nk.shape[1], out=self.sent)
        torch.ops.symm_mem.all_to_all_vdev(self.sent, self.rows, self.given, self.taken, self.group)
        return self.rows

    def combine(self, weights_Nk: torch.Tensor) -> torch.Tensor:
        self.returned.copy_(self.taken[0])
        torch.ops.symm_mem.all_to_all_vdev(self.rows, self.back, self.returned, self.came, self.group)
        return _weigh(self.back, self.order, weights_Nk)


def why_not_on_device() -> str:
    """Why `OnDevice` cannot run in this process, "" if it can."""
    import torch.distributed._symmetric_memory as symm_mem

    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev"):
        return "this PyTorch has no symm_mem.all_to_all_vdev"
    available: Any = getattr(symm_mem, "is_nvshmem_available", lambda: False)
    if not available():
        return "NVSHMEM is not installed"
    symm_mem.set_backend("NVSHMEM")
    return ""


def _weigh(back: torch.Tensor, order: torch.Tensor, weights_Nk: torch.Tensor) -> torch.Tensor:
    made = back.index_select(0, order.argsort()).unflatten(0, weights_Nk.shape)
    return (made * weights_Nk[..., None]).sum(dim=1).to(back.dtype)
