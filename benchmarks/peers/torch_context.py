"""PyTorch's own context parallelism (`torch.distributed.tensor.experimental.context_parallel`) around its attention.

Plain causal only, head-tail balanced; keys and values travel by all-gather or from rank to rank ("alltoall").  Inside
the block PyTorch takes every attention of this process for a part of such a ring, others' too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention as options
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@contextmanager
def attention(
    mesh: DeviceMesh, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, grad_BTHE: Tensor, rotate: str, kernel: str
) -> Iterator[Callable[[], None]]:
    """A function that runs forward and backward once on this rank's share of whole tensors.  kernel: "flash", "cudnn".

    Heads of keys and values are repeated before the clock starts, which spares it that work: its ring takes no fewer.
    """
    shared = q_BTHE.shape[2] // k_BTKE.shape[2]
    k, v = (x.repeat_interleave(shared, dim=2) for x in (k_BTKE, v_BTKE))
    buffers = [x.transpose(1, 2).contiguous() for x in (q_BTHE, k, v, grad_BTHE)]
    options.set_rotate_method(rotate)
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
        sdpa_kernel(KERNELS[kernel]),
    ):
        q, k, v = (x.requires_grad_() for x in buffers[:3])

        def run() -> None:
            q.grad = k.grad = v.grad = None
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(buffers[3])

        yield run
