"""Which activations are kept for backward and which are computed again, and whether blocks are compiled.

Equals the plain blocks.  "full" keeps only each block's input and runs the block again in backward (Chen et al.,
arXiv 1604.06174); "selective" runs only the core of attention again (Korthikanti et al., arXiv 2205.05198).  The
wrapping sits inside the block's `forward`, so the hooks around the block (gather, release) fire once, and the second
run finds the weights that backward gathered.  No random state is saved: dropout is counter-based.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from interlace.models.attention import AttentionCore
from interlace.models.decoder import Decoder
from interlace.models.layers import Dropout
from interlace.models.moe import MoE


def apply(decoder: Decoder, policy: str, compiled: bool = False) -> None:
    """Sets the policy ("none", "selective" or "full") on every block, and compiles blocks one by one if asked.

    Dropout masks stay outside of what is compiled: their key is another number in each step, which would compile
    again, and Inductor writes no C++ for their 64-bit products.  So does what hands on a router's load (`MoE.tell`).
    """
    for block in decoder.blocks:
        if block is None:  # another stage's
            continue
        if policy == "selective":
            _again(block.get_submodule("attention.core"))
        if compiled:
            for module in block.modules():
                if isinstance(module, Dropout | AttentionCore):
                    module.keep = torch.compiler.disable(module.keep)  # type: ignore[method-assign]
                if isinstance(module, MoE):
                    module.tell = torch.compiler.disable(module.tell)  # type: ignore[method-assign]
            block.forward = torch.compile(block.forward)
        if policy == "full":
            _again(block)


def _again(module: nn.Module) -> None:
    forward: Callable[..., Any] = module.forward
    module.forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
