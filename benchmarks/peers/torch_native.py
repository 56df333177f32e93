"""PyTorch's own data parallelism around the same decoder: DDP and FSDP2.

Both use the same vocabulary loss and row kernel, bf16 compute, fused AdamW and clipping as ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from interlace.models.decoder import Decoder


def fsdp2(decoder: Decoder, device: torch.device, ranks: int, reshard: bool, reduce_dtype: torch.dtype) -> nn.Module:
    """FSDP2: ZeRO-3 with `reshard`, ZeRO-2 without.  Blocks are units, embedding and head stay with the root."""
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    register_fsdp_forward_method(decoder, "loss")
    return decoder


class _Autocast(nn.Module):
    """The decoder's loss under autocast; its head multiplies in bf16, as autocast's own products do."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        head = decoder.head
        plain = head.forward

        def forward(x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            from interlace.models.vocabulary import vocabulary_loss

            if labels is None:
                return plain(x)
            x, weight = head.norm(x).bfloat16(), head.output.weight.bfloat16()
            return vocabulary_loss(x.flatten(0, 1), weight, labels.flatten(), head.softmax_rows)

        head.forward = forward

    def forward(self, *args: Any) -> Any:
        with torch.autocast(self.decoder.head.output.weight.device.type, torch.bfloat16):
            return self.decoder.loss(*args)


def ddp(decoder: Decoder, device: torch.device) -> nn.Module:
    """DDP with fp32 weights under autocast."""
    return DistributedDataParallel(
        _Autocast(decoder),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
    )
