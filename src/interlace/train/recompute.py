"""Which activations are kept for backward and which are computed again, whether blocks are compiled, and replayed.

Equals the plain blocks.  "full" keeps only each block's input and runs the block again in backward (Chen et al.,
arXiv 1604.06174); "selective" runs only the core of attention again (Korthikanti et al., arXiv 2205.05198).  The
wrapping sits inside the block's `forward`, so the hooks around the block (gather, release) fire once, and the second
run finds the weights that backward gathered.  No random state is saved: dropout is counter-based.

Replayed blocks are CUDA graphs of PyTorch's compiler (`torch._inductor.cudagraph_trees`), which own the memory of their
results and find, call by call, the graph that was captured after the same calls before it.  With tensor parallelism
they hold the transfers too: the host hands out a block in one call forward and one backward, where a dense block with
its eight transfers took 11 ms of a slow host before (docs/notes/0021-graphs-of-blocks.md).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from interlace.models.attention import AttentionCore
from interlace.models.decoder import Decoder
from interlace.models.layers import Dropout
from interlace.models.moe import MoE

OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def apply(decoder: Decoder, policy: str, compiled: bool = False, replayed: bool = False) -> None:
    """Sets the policy ("none", "selective" or "full") on every block, and compiles blocks one by one if asked.

    replayed: compiled blocks become CUDA graphs, whose callers say when a pass begins (`begin_pass`).

    Dropout masks stay outside of what is compiled: their key is another number in each step, which would compile
    again, and Inductor writes no C++ for their 64-bit products.  So does what hands on a router's load (`MoE.tell`).
    """
    decoder.replays = replayed
    options: dict[str, Any] | None = {"triton.cudagraphs": True} if replayed else None
    for block in decoder.blocks:
        if block is None:  # another stage's
            continue
        if policy == "selective":
            core = block.get_submodule("attention.core")
            kind: Any = type(core)
            core.__class__ = _run_again(kind)
        if compiled:
            for module in block.modules():
                if isinstance(module, Dropout | AttentionCore):
                    module.keep = torch.compiler.disable(module.keep)  # type: ignore[method-assign]
                if isinstance(module, MoE):
                    module.tell = torch.compiler.disable(module.tell)  # type: ignore[method-assign]
            block.forward = torch.compile(block.forward, options=options)
        if policy == "full":
            block.forward = functools.partial(checkpoint, block.forward, **OPTIONS)


def begin_pass(module: nn.Module) -> None:
    """A forward pass begins, and what blocks gave before is no longer read."""
    if getattr(module, "replays", False):
        torch.compiler.cudagraph_mark_step_begin()


@functools.cache
def _run_again(cls: Any) -> Any:
    """`cls` whose forward pass runs again in backward.

    A class, and no function of each module: the compiler would compile the block again for each layer, and give up
    after eight.
    """

    class RunAgain(cls):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            return checkpoint(super().forward, *args, **OPTIONS)

    return RunAgain
