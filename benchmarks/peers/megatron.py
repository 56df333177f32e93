"""Megatron-core's tensor and sequence parallelism of the same decoder, from its own parts.

Its embedding, column and row products (asynchronous gathers and reductions in backward), layers, vocabulary loss,
gradient buffers and optimizer (bf16 weights, fp32 masters and gradients).  Its fused kernels come with Transformer
Engine and Apex; here stand in their place PyTorch's flash attention, RMSNorm, fused AdamW and norms of many tensors,
and its own compiled SwiGLU and cross-entropy.

The package is needed at run time: `pip install --no-deps megatron-core==0.19.2`.  It wants
CUDA_DEVICE_MAX_CONNECTIONS=1, which slows the others: measure it in a run of its own, `--variants megatron`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.models.decoder import Decoder
from interlace.train.data import Batch

Step = Callable[[Batch], tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """In the place of its unfused attention: PyTorch's kernels, [T B H E] -> [T B H*E]."""

    def __init__(self, **given: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **given: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return made.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.RMSNorm):
    """Over a slice of the sequence: its gradient is added up with the others that say `sequence_parallel`."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **given: Any) -> None:
        super().__init__(hidden_size, eps)
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel


def tensor(decoder: Decoder, device: torch.device, ranks: int, length: int, clip: float) -> Step:
    """A training step on the weights of `decoder`, split over all ranks."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    cfg, bf16 = decoder.cfg, device.type == "cuda"
    dtype = torch.bfloat16 if bf16 else torch.float32
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    if bf16:
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=cfg.num_layers,
        hidden_size=cfg.hidden_size,
        ffn_hidden_size=cfg.ffn_size,
        num_attention_heads=cfg.num_heads,
        num_query_groups=cfg.num_kv_heads,
        kv_channels=cfg.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=cfg.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=bf16,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        use_cpu_initialization=not bf16,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=bf16,
        cross_entropy_fusion_impl="native",
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = Attention
    block = TransformerBlockSubmodules(layer_specs=[layer] * cfg.num_layers, layer_norm=Norm)
    gpt = GPTModel(
        config,
        block,
        cfg.vocab_size,
        length,
        position_embedding_type="rope",
        rotary_base=int(cfg.rope_theta),
        share_embeddings_and_output_weights=False,
    )
    _fill(gpt, decoder, ranks, dist.get_rank())
    gpt = gpt.to(device)
    inner: Any = Float16Module(config, gpt) if bf16 else gpt
    model: Any = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), inner)
    with mock.patch("megatron.core.optimizer.Adam", functools.partial(torch.optim.AdamW, fused=True)):
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=3e-4, min_lr=3e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95,
                clip_grad=clip, bf16=bf16, params_dtype=dtype,
            ),
            [model],
        )  # fmt: skip

    clipping = {"l2_norm_impl": _norm, "multi_tensor_scale_impl": _scale}

    def step(batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, labels, positions, _, _ = batch.to(device)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, None, labels=labels).sum() / labels.numel()
        loss.backward()
        finalize_model_grads([model])
        with mock.patch.multiple("megatron.core.optimizer.clip_grads", **clipping):
            _, norm, _ = optimizer.step()
        return loss.detach(), torch.as_tensor(norm)

    return step


def _norm(size: int, full: Tensor, tensors: list[list[Tensor]], *rest: Any) -> tuple[Tensor, None]:
    """The norm over all tensors: Apex's kernel in PyTorch's."""
    return torch.stack(torch._foreach_norm(tensors[0])).norm()[None], None


def _scale(size: int, full: Tensor, tensors: list[list[Tensor]], scale: float) -> None:
    assert tensors[0] is tensors[1]
    torch._foreach_mul_(tensors[0], scale)


def _fill(gpt: nn.Module, decoder: Decoder, ranks: int, rank: int) -> None:
    """This rank's part of the decoder's weights; its products of q, k, v and of gate, up are one each."""
    cfg, theirs = decoder.cfg, dict(gpt.named_parameters())
    ours = {name: value.detach() for name, value in decoder.named_parameters()}

    def part(x: Tensor, dim: int = 0) -> Tensor:
        return x.chunk(ranks, dim)[rank]

    def put(name: str, value: Tensor) -> None:
        with torch.no_grad():
            theirs.pop(name).copy_(value)

    put("embedding.word_embeddings.weight", part(ours["embedding.weight"]))
    for number in range(cfg.num_layers):
        mine, its = f"blocks.{number}.", f"decoder.layers.{number}."
        shared, width = cfg.num_heads // cfg.num_kv_heads, cfg.head_dim
        q = ours[f"{mine}attention.q.weight"].view(cfg.num_kv_heads, shared * width, -1)
        k, v = (ours[f"{mine}attention.{name}.weight"].view(cfg.num_kv_heads, width, -1) for name in "kv")
        put(f"{its}self_attention.linear_qkv.weight", part(torch.cat([q, k, v], dim=1).flatten(0, 1)))
        put(f"{its}self_attention.linear_proj.weight", part(ours[f"{mine}attention.out.weight"], 1))
        gate, up = (part(ours[f"{mine}mlp.{name}.weight"]) for name in ("gate", "up"))
        put(f"{its}mlp.linear_fc1.weight", torch.cat([gate, up]))
        put(f"{its}mlp.linear_fc2.weight", part(ours[f"{mine}mlp.down.weight"], 1))
        put(f"{its}input_layernorm.weight", ours[f"{mine}attention_norm.weight"])
        put(f"{its}pre_mlp_layernorm.weight", ours[f"{mine}mlp_norm.weight"])
    put("decoder.final_layernorm.weight", ours["head.norm.weight"])
    put("output_layer.weight", part(ours["head.output.weight"]))
    assert not theirs, sorted(theirs)
