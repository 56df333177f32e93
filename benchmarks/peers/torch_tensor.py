"""PyTorch's own tensor parallelism around the same decoder: DTensor plans as torchtitan has them, with and without
async-TP (products split to run beside their transfers, by Inductor, over symmetric memory).

Sequence parallel norms, column and row products, a split vocabulary with `loss_parallel`.  bf16 compute over fp32
weights by FSDP2's policy, on a data axis of one or of several (gathered again for backward); fused AdamW and clipping
as ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from interlace.models.decoder import Decoder


class SplitLogits(nn.Module):
    """In the place of `Vocabulary`: logits split over the vocabulary, all at once, and their loss."""

    def forward(self, x: Tensor, output: nn.Linear, labels: Tensor | None, context: Any, rows: Any) -> Tensor:
        logits = output(x).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def tensor(
    decoder: Decoder, device: torch.device, ranks: int, compiled: bool, asynchronous: bool, data: int = 1
) -> nn.Module:
    """The decoder split over groups of so many ranks, `data` of them."""
    mesh = init_device_mesh(device.type, (data, ranks), mesh_dim_names=("dp", "tp"))
    if asynchronous:
        _split_products(mesh["tp"])
    decoder.head.vocabulary = SplitLogits()
    _plan(decoder, mesh["tp"])
    # A compiled block takes a tensor that is still on its way as one without history, and the embedding learns nothing
    # (torch 2.13): a copy has arrived.
    decoder.embedding.register_forward_hook(lambda module, given, made: made.clone())
    for block in decoder.blocks:
        if compiled:
            block.forward = torch.compile(block.forward, dynamic=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=data > 1)
    fully_shard(decoder, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(decoder, "loss")
    return decoder


def layer(decoder: Decoder, device: torch.device, ranks: int, asynchronous: bool) -> None:
    """The first block split over all ranks by the same plan, compiled on a GPU, its weights in their own dtype."""
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    if asynchronous:
        _split_products(mesh)
    _plan(decoder, mesh)
    block = decoder.blocks[0]
    if device.type == "cuda":
        block.forward = torch.compile(block.forward, dynamic=False)


def losses_are_split() -> Any:
    """Around forward and backward."""
    return loss_parallel()


def _split_products(tp: DeviceMesh) -> None:
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(tp.get_group().group_name)


def _plan(decoder: Decoder, tp: DeviceMesh) -> None:
    rows = Shard(1)
    parallelize_module(
        decoder,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "head.norm": SequenceParallel(),
            "head.output": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in decoder.blocks:
        gathered = PrepareModuleInput(
            input_layouts=(rows, None), desired_input_layouts=(Replicate(), None), use_local_output=False
        )
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": gathered,
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.out": RowwiseParallel(output_layouts=rows),
                "mlp_norm": SequenceParallel(),
                "mlp": gathered,
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=rows),
            },
        )
