"""Plain causal attention on GPUs whose gradients are the same bits each time: PyTorch's FlexAttention.

Equals `scaled_dot_product_attention(is_causal=True)`.  Its backward pass goes over keys for each block of queries, and
over queries for each block of keys, so nothing is added by whoever comes first, as in cuDNN's and flash attention's.
On an H200, forward and backward of 1 x 4096 tokens, 32 and 8 heads, bf16, in ms:

    head size                  64      128
    FlexAttention             1.11     1.73
    flash, deterministic      1.60     2.77
    cuDNN (bits vary)         0.71     1.06

cuDNN's backward also varies where PyTorch is asked for deterministic algorithms.  Larger or fewer blocks and warps than
FlexAttention takes by itself: no gain.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # queries and keys that a block of the mask has


def takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether it is wanted and can: gradients, deterministic algorithms, half precision on CUDA, a power of two."""
    if device.type != "cuda" or not (torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled()):
        return False
    return dtype in (torch.float16, torch.bfloat16) and head_dim in (16, 32, 64, 128, 256)


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, causal: BlockMask) -> Tensor:
    """softmax(q k^T / sqrt(E) + mask) v: [B T H E].  causal: `causal_blocks` of T."""
    q, k, v = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    grouped = k.shape[1] != q.shape[1]
    if torch.compiler.is_compiling():  # the block's own compiler makes the kernel
        out: Tensor = flex_attention(q, k, v, block_mask=causal, enable_gqa=grouped)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute")  # torch 2.11's compiler looks at it of any tensor
            out = _compiled()(q, k, v, block_mask=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


@functools.cache
def causal_blocks(length: int, device: torch.device) -> BlockMask:
    """Of each block of queries the blocks of keys that it sees in full, those before it, and in part, its own.

    A last block of fewer queries sees all in part.  `create_block_mask` finds the same from a mask of all pairs, which
    for long sequences does not fit.
    """
    count = -(-length // BLOCK)
    block = torch.arange(count, dtype=torch.int32, device=device)
    full, before = block.clone(), block.expand(count, count).contiguous()
    part, own = torch.ones_like(block), torch.zeros_like(before)
    own[:, 0] = block
    if length % BLOCK:
        part[-1], full[-1], own[-1] = count, 0, block
    return BlockMask.from_kv_blocks(
        part[None, None],
        own[None, None],
        full[None, None],
        before[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=_not_after,
        seq_lengths=(length, length),
    )


def _not_after(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@functools.cache
def _compiled() -> Any:
    """FlexAttention as a kernel.  One for each shape: which is made must not depend on the shapes before."""
    return torch.compile(flex_attention, dynamic=False)
