"""Bytes that forward leaves for backward: the tensors that autograd saves, counted from sizes alone.

`block_activations` lists those of a block; `held` adds up what the stages of a rank keep at once, and what the backward
of one layer holds besides.  Over tp, heads and inner features are split, and with sequence=on the rows of the residual
stream, its norms and dropout; the inputs of products, which are gathered once for both passes, are whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from interlace.config import Config, ModelConfig, ParallelPlan
from interlace.plan import exchange as fused_exchange
from interlace.plan.context import all_plain, choose, returned, widest
from interlace.plan.expert import held as held_experts
from interlace.plan.tensor import local_heads

Stage = tuple[int, tuple[str, ...]]  # micro-batches whose activations it holds at most, and its units


def held(config: Config, plan: ParallelPlan, device: str, own: Sequence[Stage], sequences: int) -> int:
    """Of the stages of one rank, for so many sequences at a time.

    With overlap=auto of the way of experts that needs more: whether ranks reach each other is seen when they run.
    """
    cfg, compute = config.model_config(), config.train.itemsize
    fused = fused_exchange.taken(cfg, plan, compute, device)
    ways = (False, True) if fused and plan.overlap == "auto" else (fused,)
    length = math.ceil(config.data.sequence_length / plan.cp)
    tokens = sequences * length
    documents = config.data.documents == "separate"
    exchange = choose(config, plan) if plan.cp > 1 else ""
    routed = {f"blocks.{layer}" for layer in cfg.expert_layers}

    @functools.cache
    def saved(has_experts: bool, recompute: str, fused: bool) -> int:
        compiled, split_rows = config.train.compile, plan.sequence == "on"
        return block_activations(
            cfg if has_experts else cfg.of_dense_layers, sequences, length, compute, recompute, documents, device,
            compiled, plan.tp, split_rows, plan.cp, exchange, plan.ep, plan.expert_room if fused else None,
        )  # fmt: skip

    blocks = [(most, name in routed) for most, names in own for name in names if name.startswith("blocks")]

    def of_blocks(fused: bool) -> int:
        total = sum(most * saved(has_experts, plan.recompute, fused) for most, has_experts in blocks)
        if plan.recompute != "none":  # the block that backward has run again
            total += max(saved(kind, "none", fused) - saved(kind, plan.recompute, fused) for _, kind in blocks)
        if plan.ep > 1 and any(has_experts for _, has_experts in blocks):
            total += _moving(cfg, plan, tokens, compute, fused)
        return total

    total = max(of_blocks(way) for way in ways)
    if exchange in ("ring", "gather"):
        total += _exchanged(cfg, plan, exchange, tokens, compute, all_plain(config))
    first = next((most for most, names in own if "embedding" in names), 0)
    total += first * tokens * 8  # token numbers
    total += first * rows(tokens, plan) * (cfg.hidden_size if cfg.dropout else 0)  # a mask
    if any("head" in names for _, names in own):
        total += rows(tokens, plan) * (_norm_bytes(cfg, compute, device) + cfg.hidden_size * compute)
    return total


def _moving(cfg: ModelConfig, plan: ParallelPlan, tokens: int, compute: int, fused: bool) -> int:
    """What one layer of experts holds beside what it keeps: rows of all-to-all at both ends, or what peers write to and
    what backward makes of it slot by slot."""
    k, D = cfg.experts_per_token, cfg.hidden_size
    if not fused:
        return 2 * tokens * k * D * compute
    room = _slots(cfg, plan.ep, tokens, compute, plan.expert_room)
    memory = fused_exchange.buffers(room, tokens * k, D, compute, cfg.num_experts, plan.ep)
    return sum(memory.values()) + room * (D + 3 * math.ceil(cfg.expert_ffn_size / plan.tp)) * compute


def _slots(cfg: ModelConfig, ep: int, tokens: int, compute: int, room: float) -> int:
    """Of the fused exchange, for so many tokens a rank."""
    X, choices = cfg.num_experts, tokens * cfg.experts_per_token
    return fused_exchange.slots(choices, ep, held_experts(X, ep, 0)[1], X, fused_exchange.BLOCKS[compute], room)


def _exchanged(cfg: ModelConfig, plan: ParallelPlan, exchange: str, tokens: int, compute: int, plain: bool) -> int:
    """What one layer's backward holds while it runs block by block: keys and values of two stages and what leaves, the
    gradient of q and what the own tile, or those of a stage, make of it, those of own keys and values, and of one
    stage's three times: as a tile made them, leaving, and arriving."""
    heads, kv_heads = local_heads(cfg, plan.tp)
    own, moving = 2 * tokens * kv_heads * cfg.head_dim, widest(exchange, plan.cp, kv_heads)
    stage, parts = own // kv_heads * moving, max(heads, moving * heads // kv_heads)
    once = plain and plan.cp == 2  # one addition to what a kernel made
    of_q = compute if once and exchange == "ring" else max(compute, 4)
    of_own = compute if once else max(compute, 4)
    returned_stage = 3 * returned(compute, plain) * stage
    of_queries = (compute * parts + of_q * heads) * tokens * cfg.head_dim
    return 3 * compute * stage + of_queries + of_own * own + returned_stage


def rows(tokens: int, plan: ParallelPlan) -> int:
    """Rows of the residual stream on the rank that has most."""
    return math.ceil(tokens / plan.tp) if plan.sequence == "on" else tokens


@functools.lru_cache(maxsize=4096)
def block_activations(
    cfg: ModelConfig,
    sequences: int,
    length: int,
    compute: int,
    recompute: str = "none",
    documents: bool = False,
    device: str = "cuda",
    compiled: bool = False,
    tp: int = 1,
    split_rows: bool = True,
    cp: int = 1,
    exchange: str = "",
    ep: int = 1,
    room: float | None = None,
) -> int:
    """Bytes that one block keeps from forward to backward, for `sequences` x `length` tokens of `compute` bytes.

    length: that of one rank of cp.  exchange: that of attention, where cp > 1.  Over ep all experts are taken to be
    chosen alike: a rank whose experts are chosen more often keeps more.  room: of the fused exchange, whose slots hold
    so many times these rows, and more only if more come; None: rows go by all-to-all.

    full        the block's input
    none        both norms (`_norm_bytes`) and their outputs; q, k (before and after their norms) and v; attention's
                output and its log-sum per head; gate, up, silu(gate), their product (or up and gelu(up));
                dropout masks, a byte each; experts: the same four per chosen expert, its input, its output, routing,
                over ep both orders of the rows that came; and those of a shared expert, as many choices kept as a
                dropless router keeps
    selective   none, less what core attention keeps besides q, k, v and its output

    Latent attention keeps norms and outputs of what is before its heads, on own rows, and over tp what reached them.
    Its q, k and v, which has zeros behind it, are as wide as keys, the output beside the whole one as wide as values.

    A compiled dense block computes silu(gate) again, and keeps norms on a CPU as a GPU's fused ones do.
    """
    norms = "cuda" if compiled and cfg.norm == "rmsnorm" else device
    N, D, E, c = sequences * length, cfg.hidden_size, cfg.head_dim, compute
    rows = math.ceil(N / tp) if split_rows else N
    if recompute == "full":
        return rows * D * c
    cfg = _of_one_rank(cfg, tp)
    per_row = 2 * (_norm_bytes(cfg, c, norms) + (D if cfg.dropout else 0))
    per_token = (1 if cfg.num_experts else 2) * D * c  # a router reads its own rows, experts copies of the others
    if cfg.num_experts:
        of_row, of_token = _shared_bytes(cfg, c, split_rows and tp > 1)
        per_row, per_token = per_row + of_row, per_token + of_token
    if cfg.kv_rank:
        of_row, of_token = _latent_bytes(cfg, c, norms, tp > 1)
        per_row, per_token = per_row + of_row, per_token - D * c + of_token
    if cfg.qk_norm:
        heads = cfg.num_heads + cfg.num_kv_heads
        per_token += heads * ((E * 8 if device == "cpu" and not compiled else E * c) + 4)
    per_token += (
        _experts_bytes(cfg, c, tp, room is not None)
        if cfg.num_experts
        else cfg.ffn_size * c * (4 - compiled if cfg.activation == "swiglu" else 2)
    )
    is_cut = cfg.value_size < E
    per_token += 16 * cfg.experts_per_token if cfg.num_experts and ep > 1 and room is None else 0
    if exchange in ("ring", "gather"):  # no mask, no probabilities: a log-sum, fp32, whatever is seen
        core = N * 2 * (cfg.num_heads + cfg.num_kv_heads) * E * c
        core += 0 if recompute == "selective" else 4 * N * cfg.num_heads
    elif exchange == "ulysses":
        dealt = replace(cfg, num_heads=cfg.num_heads // cp, num_kv_heads=max(1, cfg.num_kv_heads // cp))
        core = _attention_bytes(dealt, sequences, length * cp, c, recompute, documents, device)
        core += 0 if is_cut else N * cfg.num_heads * E * c  # the output, back at its positions
    else:
        core = _attention_bytes(cfg, sequences, length, c, recompute, documents, device)
    if is_cut and (recompute == "selective" or (cfg.attention_dropout and exchange not in ("ring", "gather"))):
        core -= N * cfg.num_heads * E * c  # nobody reads the output before it is cut
    if cfg.num_experts and room is not None:
        core += fused_exchange.kept(_slots(cfg, ep, N, c, room), D, cfg.expert_ffn_size, c)
    return rows * per_row + N * per_token + core + _once_bytes(cfg, sequences, c)


def _of_one_rank(cfg: ModelConfig, tp: int) -> ModelConfig:
    """The heads and inner features of the rank that has most."""
    num_heads, num_kv_heads = local_heads(cfg, tp)
    return replace(
        cfg,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_size=math.ceil(cfg.ffn_size / tp),
        expert_ffn_size=math.ceil(cfg.expert_ffn_size / tp),
        shared_ffn_size=math.ceil(cfg.shared_ffn_size / tp),
    )


def _norm_bytes(cfg: ModelConfig, compute: int, device: str) -> int:
    """Per token: input and statistics; an RMSNorm in pieces, as on CPU, keeps fp32 input and normalised input."""
    if cfg.norm == "layernorm":
        return cfg.hidden_size * compute + 2 * (compute if device == "cpu" else 4)
    return cfg.hidden_size * (8 if device == "cpu" else compute) + 4


def _latent_bytes(cfg: ModelConfig, compute: int, device: str, gathered: bool) -> tuple[int, int]:
    """What stands before the heads of latent attention keeps, and its output's cut: per row of the residual stream, and
    per token.

    gathered: what reaches the heads is one run of memory, of the rows of all ranks.
    """

    def norm(size: int, width: int) -> int:  # of the first features of so many
        if device == "cpu":
            return (width + size) * 4 + 4 if compute == 4 else size * 8 + 4
        return width * compute + 4

    row = cfg.hidden_size * compute + norm(cfg.kv_rank, cfg.kv_rank + cfg.rotary_dim)
    row += norm(cfg.q_rank, cfg.q_rank) if cfg.q_rank else 0
    token = (cfg.latent_width if gathered else cfg.q_rank + cfg.kv_rank) * compute
    return row, token + (cfg.num_heads * cfg.value_size * compute if cfg.value_size < cfg.head_dim else 0)


def _experts_bytes(cfg: ModelConfig, compute: int, tp: int, fused: bool) -> int:
    """Per token: router scores, choice, weights and both orders, what its losses read; per chosen expert its rows.

    Over tp the balance loss has scores of its own.  Sigmoid scores are made to sum to one for it.  fused: rows are in
    slots, and the orders smaller."""
    k, X = cfg.experts_per_token, cfg.num_experts
    rows = 0 if fused else k * (2 * cfg.hidden_size + 4 * cfg.expert_ffn_size) * compute
    routing = (
        4 * X
        + k * (8 + 4 + (8 if fused else 16))
        + (4 * k + 4 if cfg.norm_topk else 0)
        + (2 * k if cfg.capacity_factor else 0)
    )
    if cfg.router_aux_loss:
        routing += (4 * X if tp > 1 else 0) + (4 if cfg.router_scores == "sigmoid" else 0)
    if cfg.router_z_loss:
        routing += 4 * X + 4  # logits, which softmax does not keep, and the logarithm
    return rows + routing


def _shared_bytes(cfg: ModelConfig, compute: int, gathered: bool) -> tuple[int, int]:
    """What router and shared expert keep: per row of the residual stream, and per token.

    gathered: the shared expert reads the rows of all ranks.
    """
    D, c = cfg.hidden_size, compute
    wide = cfg.router_fp32 and c < 4  # then the router keeps its own copy of x
    if not cfg.shared_ffn_size:
        return (D * 4 if wide else D * c), 0
    narrow_read = not wide or cfg.shared_gate or not gathered
    row = (D * 4 if wide else 0) + (D * c if narrow_read else 0) + (D * c + c if cfg.shared_gate else 0)
    return row, 4 * cfg.shared_ffn_size * c + (D * c if gathered else 0)


def _once_bytes(cfg: ModelConfig, sequences: int, compute: int) -> int:
    """Not per token: loads of the balance loss, and a router's weight in fp32."""
    if not cfg.num_experts:
        return 0
    loads = sequences * (4 * cfg.num_experts + 4) if cfg.router_aux_loss else 0
    return loads + (4 * cfg.num_experts * cfg.hidden_size if cfg.router_fp32 and compute < 4 else 0)


def _attention_bytes(
    cfg: ModelConfig, sequences: int, length: int, compute: int, recompute: str, documents: bool, device: str
) -> int:
    """q, k, v and the output; and what the kernel keeps: a log-sum, or mask and probabilities."""
    N, H, K, E, c = sequences * length, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, compute
    redone = recompute == "selective"
    is_masked = documents or cfg.sliding_window is not None
    half = c == 2 and device == "cuda" and not (cfg.sink_tokens and cfg.sliding_window is not None)
    if cfg.attention_dropout and not redone:  # written out: k and v repeated, fp32 and rounded probabilities, masks
        pairs = sequences * H * length * length
        return N * 4 * H * E * c + pairs * (4 + 1 + c) + (sequences if documents else 1) * length * length
    kept = N * 2 * (H + K) * E * c
    if redone:
        return kept
    if device == "cuda" and not half:
        kept += N * 2 * (H - K) * E * c  # fp32 kernels read k and v repeated for every query head
    if device == "cuda" and not half and cfg.attention_sinks:  # with eight features more, and the output without them
        kept += N * H * (4 * 8 + E) * c
    if is_masked and not half and not (device == "cpu" and cfg.attention_sinks):
        kept += (sequences if documents else 1) * length * length * c
    return kept + 4 * N * H
