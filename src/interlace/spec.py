"""Every parameter and every product of a decoder, from its configuration alone: shapes, roles, totals, FLOPs.

`parameters(cfg)` equals the built model's `named_parameters()`: names, shapes and order.  Roles say how a parameter
may be split: `parallel` swaps modules by them, `plan` prices by them.

FLOPs count one multiply-add as 2.  Only matrix products count: norms, activations, rotary positions, softmax and the
embedding's look-up are none.  Attention is counted under a named convention, per query position of a document of
length L (sequence length T without documents), window w and n sink tokens, with m = min(L, w + n):

    full    4 H E m               every key of the window, future ones included
    causal  4 H E (m - m^2 / 2L)  half of it where m = L: the triangle's area, its diagonal counted half

so packed documents give 4 H E sum(L^2) / sum(L), and half of that; with values of V features, as in latent attention,
it is 2 H (E + V) for 4 H E.  A mixture of experts counts the experts that a token visits, the router, and the shared
expert with its gate; what a limit of the experts' room drops still counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from interlace.config import ModelConfig
from interlace.errors import ConfigError


class Role(StrEnum):
    """How a parameter meets the tensor and expert axes."""

    COLUMN = "column"  # output rows split: [N M] -> "N/tp M", its bias "N/tp"
    ROW = "row"  # input columns split: [N M] -> "N M/tp", output owed +tp
    VOCAB = "vocab"  # rows over the vocabulary: embedding and output head
    HEAD = "head"  # a number for each query head, split with them
    NORM = "norm"  # whole on every rank; used on split positions or heads, so its gradient is owed +tp
    BIAS = "bias"  # bias of a row-split product: whole, added once after the sum
    LATENT = "latent"  # whole on every rank, on its rows of the residual stream: before the heads of latent attention
    ROUTER = "router"  # whole on every rank; also the gate of a shared expert
    EXPERT = "expert"  # stacked experts: first dimension over ep, F over tp
    REPLICATED = "replicated"  # whole on every rank, for roles given to a user's own module
    SPLIT = "split"  # of a user's module: all inside works on split heads or features, whole parameters see a part


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor: its name in the built model, shape, and what each dimension is in the letters of layouts.

    unit: the module that is gathered with it ("embedding", "blocks.3", "head").  decay: weight decay applies.
    init: "normal" of `init_std`, "ones" or "zeros".  tied_to: a second name of the same tensor.  chunk: rows (of a
    column-split parameter) or columns (of a row-split one) that the tensor axis keeps together: a head.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    dims: str
    unit: str
    decay: bool
    init: str
    init_std: float = 0.0
    tied_to: str | None = None
    chunk: int = 1

    @property
    def numel(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class Operation:
    """A product in the forward pass: FLOPs per token under both conventions (equal for kind "matmul").

    kind: "matmul", shape (N, M) of the weight in y_N = W_NM x_M, times `copies` (experts that a token visits);
    or "attention", shape (H, E), scores and weighted sum together.
    """

    name: str
    unit: str
    kind: str
    shape: tuple[int, int]
    full: float
    causal: float
    copies: int = 1


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Model FLOPs per token: forward, and `total` = 3 x forward (backward counts twice the forward, no recompute)."""

    matmul: float
    attention: float
    convention: str

    @property
    def forward(self) -> float:
        return self.matmul + self.attention

    @property
    def total(self) -> float:
        return 3 * self.forward


def units(cfg: ModelConfig) -> tuple[str, ...]:
    """Modules that are gathered, released and placed on pipeline stages as a whole, in order of execution."""
    return ("embedding", *(f"blocks.{i}" for i in range(cfg.num_layers)), "head")


@functools.cache
def parameters(cfg: ModelConfig) -> tuple[Parameter, ...]:
    """All distinct parameters in the built model's order; a tied head is listed once, as "embedding.weight"."""
    V, D, tied = cfg.vocab_size, cfg.hidden_size, cfg.tie_embeddings
    found = [
        Parameter(
            "embedding.weight", (V, D), Role.VOCAB, "V D", "embedding", True, "normal", cfg.init_std,
            tied_to="head.output.weight" if tied else None,
        )
    ]  # fmt: skip
    for layer in range(cfg.num_layers):
        found += _block(cfg, layer)
    found += _norm("head.norm", D, "D", "head", bias=cfg.norm == "layernorm")
    if not tied:
        found += _matrix("head.output", (V, D), Role.VOCAB, "V D", "head", cfg.init_std)
    return tuple(found)


@functools.cache
def buffers(cfg: ModelConfig) -> tuple[Parameter, ...]:
    """The built model's `named_buffers()`, fp32, which no optimizer moves: the bias of every router that has one."""
    routers = [f"blocks.{layer}" for layer in cfg.expert_layers] if cfg.router_bias else []
    return tuple(
        Parameter(f"{unit}.moe.bias", (cfg.num_experts,), Role.ROUTER, "X", unit, False, "zeros") for unit in routers
    )


def _block(cfg: ModelConfig, layer: int) -> Iterator[Parameter]:
    unit = f"blocks.{layer}"
    D, F, X, S = cfg.hidden_size, cfg.ffn_size, cfg.num_experts, cfg.expert_ffn_size
    N, M = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    std, layernorm = cfg.init_std, cfg.norm == "layernorm"
    residual_std = std / (2 * cfg.num_layers) ** 0.5  # 2 L terms add up on the residual stream, GPT-2's rule

    yield from _norm(f"{unit}.attention_norm", D, "D", unit, bias=layernorm)
    if cfg.attention_sinks:
        yield Parameter(f"{unit}.attention.sinks", (cfg.num_heads,), Role.HEAD, "H", unit, False, "normal", std)
    if cfg.kv_rank:
        yield from _latent(cfg, f"{unit}.attention", unit)
    else:
        for name, rows in (("q", N), ("k", M), ("v", M)):
            module = f"{unit}.attention.{name}"
            yield from _matrix(module, (rows, D), Role.COLUMN, "N D", unit, std, cfg.qkv_bias, cfg.head_dim)
    if cfg.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield from _norm(f"{unit}.attention.{name}", cfg.head_dim, "E", unit)
    out, width = f"{unit}.attention.out", cfg.num_heads * cfg.value_size
    yield from _matrix(out, (D, width), Role.ROW, "D N", unit, residual_std, cfg.out_bias, cfg.value_size)

    yield from _norm(f"{unit}.mlp_norm", D, "D", unit, bias=layernorm)
    if cfg.has_experts(layer):
        yield from _matrix(f"{unit}.moe.router", (X, D), Role.ROUTER, "X D", unit, std)
        for name in ("gate", "up"):
            yield from _matrix(f"{unit}.moe.{name}", (X, S, D), Role.EXPERT, "X F D", unit, std)
        yield from _matrix(f"{unit}.moe.down", (X, D, S), Role.EXPERT, "X D F", unit, residual_std)
        if cfg.shared_ffn_size:
            yield from _mlp(cfg, f"{unit}.moe.shared", cfg.shared_ffn_size, unit)
        if cfg.shared_gate:
            yield from _matrix(f"{unit}.moe.shared_gate", (1, D), Role.ROUTER, "one D", unit, std)
        return
    yield from _mlp(cfg, f"{unit}.mlp", F, unit)


def _latent(cfg: ModelConfig, module: str, unit: str) -> Iterator[Parameter]:
    """What stands before the heads of latent attention."""
    D, H, R, std = cfg.hidden_size, cfg.num_heads, cfg.kv_rank, cfg.init_std
    if cfg.q_rank:
        yield from _matrix(f"{module}.q_a", (cfg.q_rank, D), Role.LATENT, "R D", unit, std)
        yield from _norm(f"{module}.q_a_norm", cfg.q_rank, "R", unit)
    rows, of_key = H * cfg.head_dim, cfg.head_dim - cfg.rotary_dim
    shape = rows, cfg.q_rank or D
    yield from _matrix(f"{module}.q", shape, Role.COLUMN, "N M", unit, std, chunk=cfg.head_dim)
    yield from _matrix(f"{module}.kv_a", (R + cfg.rotary_dim, D), Role.LATENT, "R D", unit, std)
    yield from _norm(f"{module}.kv_a_norm", R, "R", unit)
    head = of_key + cfg.value_size
    yield from _matrix(f"{module}.kv", (H * head, R), Role.COLUMN, "N M", unit, std, chunk=head)


def _mlp(cfg: ModelConfig, module: str, F: int, unit: str) -> Iterator[Parameter]:
    D, std = cfg.hidden_size, cfg.init_std
    residual_std = std / (2 * cfg.num_layers) ** 0.5
    for name in ("gate", "up") if cfg.activation == "swiglu" else ("up",):
        yield from _matrix(f"{module}.{name}", (F, D), Role.COLUMN, "F D", unit, std, cfg.mlp_bias)
    yield from _matrix(f"{module}.down", (D, F), Role.ROW, "D F", unit, residual_std, cfg.mlp_bias)


def _matrix(
    module: str,
    shape: tuple[int, ...],
    role: Role,
    dims: str,
    unit: str,
    std: float,
    bias: bool = False,
    chunk: int = 1,
) -> Iterator[Parameter]:
    yield Parameter(f"{module}.weight", shape, role, dims, unit, True, "normal", std, chunk=chunk)
    if bias:
        role, chunk = (Role.BIAS, 1) if role is Role.ROW else (role, chunk)
        yield Parameter(f"{module}.bias", shape[:1], role, dims.split()[0], unit, False, "zeros", chunk=chunk)


def _norm(module: str, size: int, dims: str, unit: str, bias: bool = False) -> Iterator[Parameter]:
    yield Parameter(f"{module}.weight", (size,), Role.NORM, dims, unit, False, "ones")
    if bias:
        yield Parameter(f"{module}.bias", (size,), Role.NORM, dims, unit, False, "zeros")


def total_parameters(cfg: ModelConfig) -> int:
    """Distinct parameters; a tied head counts once."""
    return sum(parameter.numel for parameter in parameters(cfg))


def active_parameters(cfg: ModelConfig) -> int:
    """Parameters that one token meets: of the experts only `experts_per_token`, everything else whole."""
    return sum(
        parameter.numel // cfg.num_experts * cfg.experts_per_token if parameter.role is Role.EXPERT else parameter.numel
        for parameter in parameters(cfg)
    )


def operations(
    cfg: ModelConfig, sequence_length: int, document_lengths: Sequence[int] | None = None
) -> tuple[Operation, ...]:
    """Every product of the forward pass in order of execution; FLOPs per token, means over the positions.

    document_lengths: lengths of the documents packed into the sequences, any number of them; attention then stays
    inside a document.  None = one document of `sequence_length`.
    """
    return _operations(cfg, tuple(_lengths(sequence_length, document_lengths)))


@functools.lru_cache(maxsize=64)
def _operations(cfg: ModelConfig, lengths: tuple[int, ...]) -> tuple[Operation, ...]:
    found = []
    for parameter in parameters(cfg):
        if len(parameter.shape) < 2 or parameter.unit == "embedding":
            continue
        name = parameter.name.removesuffix(".weight")
        if name.endswith(".attention.out"):
            found.append(_attention(cfg, parameter.unit, lengths))
        copies = cfg.experts_per_token if parameter.role is Role.EXPERT else 1
        found.append(_product(name, parameter.unit, parameter.shape[-2:], copies))
    if cfg.tie_embeddings:
        found.append(_product("head.output", "head", (cfg.vocab_size, cfg.hidden_size), 1))
    return tuple(found)


def _lengths(sequence_length: int, document_lengths: Sequence[int] | None) -> Sequence[int]:
    if sequence_length < 1:
        raise ConfigError(f"sequence_length must be at least 1, found {sequence_length}")
    if document_lengths is None:
        return (sequence_length,)
    if not document_lengths or not all(1 <= length <= sequence_length for length in document_lengths):
        raise ConfigError(
            f"document_lengths must hold lengths from 1 to sequence_length {sequence_length}, "
            f"found {list(document_lengths)[:8]}"
        )
    return document_lengths


def _product(name: str, unit: str, shape: tuple[int, ...], copies: int) -> Operation:
    rows, columns = shape
    flops = 2 * rows * columns * copies
    return Operation(name, unit, "matmul", (rows, columns), flops, flops, copies)


def _attention(cfg: ModelConfig, unit: str, lengths: Sequence[int]) -> Operation:
    window = cfg.window(int(unit.removeprefix("blocks.")))
    full = causal = 0.0  # keys per query, summed over the queries
    for length in lengths:
        seen = length if window is None else min(length, window + cfg.sink_tokens)
        full += length * seen
        causal += length * seen - seen * seen / 2
    per_key = 2 * cfg.num_heads * (cfg.head_dim + cfg.value_size) / sum(lengths)
    shape = (cfg.num_heads, cfg.head_dim)
    return Operation(f"{unit}.attention", unit, "attention", shape, per_key * full, per_key * causal)


def flops_per_token(
    cfg: ModelConfig,
    sequence_length: int,
    convention: str = "causal",
    document_lengths: Sequence[int] | None = None,
) -> FlopCount:
    """Model FLOPs per token (those of MFU): forward, and 3 x forward for a training step, recompute not counted."""
    if convention not in ("causal", "full"):
        raise ConfigError(f"the FLOP convention must be causal or full, found {convention}")
    flops = {"matmul": 0.0, "attention": 0.0}
    for operation in operations(cfg, sequence_length, document_lengths):
        flops[operation.kind] += operation.full if convention == "full" else operation.causal
    return FlopCount(flops["matmul"], flops["attention"], convention)


def executed_matmul_flops(
    cfg: ModelConfig,
    batch: int,
    sequence: int,
    recompute: str = "none",
    backward: bool = True,
    convention: str = "full",
    attention: str = "flash",
    early_stop: bool = True,
) -> dict[str, int]:
    """FLOPs of the products that a step runs on a rank holding `batch` sequences, as {"matmul", "attention"}.

    matmul: forward once; backward twice (gradient of the input, also of the first product since the embedding needs
    it, and of the weight); recompute "full" runs the blocks' products once more, the head's never.  With `early_stop`
    (torch's checkpoint ends once everything saved is back) the last product of a dense block without dropout is
    not among them: its inputs are saved, its output is not.

    attention: kernel "flash" runs 2.5 x the forward in its backward (scores again, four gradients), "math" 2 x on
    saved probabilities.  Recompute adds one forward; "selective" around a math kernel that ends early only the
    scores' half.  convention "full": all T x T pairs, as a masked kernel runs them whatever the window and as torch's
    FlopCounterMode counts them (it counts no SDPA on CPU); "causal": only visible pairs, as in `flops_per_token`.
    Values of fewer features than keys are multiplied with zeros behind them.
    """
    for name, asked, known in (
        ("recompute", recompute, ("none", "selective", "full")),
        ("convention", convention, ("full", "causal")),
        ("attention", attention, ("flash", "math")),
    ):
        if asked not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, found {asked}")

    matmul = core = 0.0
    for operation in operations(cfg, sequence):
        if operation.kind == "attention":
            every_pair = 4 * cfg.num_heads * cfg.head_dim * sequence
            padded = 2 * cfg.head_dim / (cfg.head_dim + cfg.value_size)
            forward = every_pair if convention == "full" else operation.causal * padded
            times = 1.0
            if backward:
                times += 2.5 if attention == "flash" else 2.0
                if recompute == "full":
                    times += 1.0
                elif recompute == "selective":
                    times += 0.5 if attention == "math" and early_stop else 1.0
            core += forward * times
            continue
        matmul += operation.full * passes(cfg, operation, recompute, backward, early_stop)
    tokens = batch * sequence
    return {"matmul": round(matmul * tokens), "attention": round(core * tokens)}


def passes(
    cfg: ModelConfig, operation: Operation, recompute: str, backward: bool = True, early_stop: bool = True
) -> int:
    """How often the product's FLOPs are spent in a step (see `executed_matmul_flops`)."""
    last_is_saved = early_stop and not cfg.dropout
    ends_block = operation.name.endswith(".mlp.down")
    if not backward:
        return 1
    again = recompute == "full" and operation.unit != "head" and not (ends_block and last_is_saved)
    return 4 if again else 3
