"""How big a model is: the dimensions and switches that `spec` counts and `models` builds."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from interlace.errors import ConfigError
from interlace.forms import (
    Above0,
    Amount,
    Count,
    OneOf,
    Positive,
    Probability,
    Range,
    Section,
    closest,
    toml,
)


@dataclass(frozen=True)
class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the trained context, in the terms of Hugging Face `rope_scaling`.

    `llama3` uses factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; `linear` only factor;
    `yarn` factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor (None = derived from
    factor, or from mscale and mscale_all_dim where both are set) and truncate.
    """

    _place: ClassVar[str] = "model.rope_scaling"

    type: Annotated[str, OneOf(("llama3", "linear", "yarn"))]
    factor: Annotated[float, Range(low=1)]
    low_freq_factor: Above0 = 1.0
    high_freq_factor: Above0 = 4.0
    original_max_position_embeddings: Positive | None = None
    attention_factor: Above0 | None = None
    beta_fast: Above0 = 32.0
    beta_slow: Above0 = 1.0
    mscale: Amount | None = None
    mscale_all_dim: Amount | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            raise ConfigError(
                f"model.rope_scaling of type {self.type} needs original_max_position_embeddings, found none: "
                "give the context length that the weights were trained with"
            )
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope_scaling.high_freq_factor must be above low_freq_factor {self.low_freq_factor:g}, "
                f"found {self.high_freq_factor:g}"
            )
        if self.type == "yarn" and self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"model.rope_scaling.beta_fast must be at least beta_slow {self.beta_slow:g}, found {self.beta_fast:g}"
            )


# Keys that a model without experts may not set.
EXPERTS_ONLY = (
    "dense_layers",
    "router_z_loss",
    "router_scores",
    "router_bias",
    "router_groups",
    "router_top_groups",
    "router_scale",
    "router_fp32",
    "capacity_factor",
    "shared_ffn_size",
    "shared_gate",
)


@dataclass(frozen=True)
class ModelConfig(Section):
    """Dimensions of a decoder: everything that `spec` and `models` need, and nothing about a run.

    `kv_rank` > 0: latent attention (`models.latent`, arXiv 2405.04434), whose keys and values are made of `kv_rank`
    features of a position, queries of `q_rank` (0: of all).  Of a head's `head_dim` features of query and key the first
    `rotary_dim` turn, which in the key all heads share; its value has `value_dim` (0: as many).

    `num_experts` > 0 makes every layer's MLP a mixture of experts of `expert_ffn_size`, but for `dense_layers`, which
    have one of `ffn_size`; `window_layers` None means every layer once `sliding_window` (positions seen, itself
    included) is set.  `attention_sinks` gives each head a learned logit in its softmax's denominator; with
    `sink_tokens` the first so many positions of a document stay visible beyond the window.  `rotary_dim` > 0: only the
    first so many features of a head turn with its position.

    A router chooses by `router_scores` of its logits ("softmax" or "sigmoid"; `router_fp32`: a product in fp32), with
    `router_bias` plus a bias that moves by `router_bias_rate` a step towards even loads, inside the best
    `router_top_groups` of `router_groups` groups; `norm_topk` makes a token's weights sum to one, `router_scale`
    multiplies them.  `router_aux_loss` and `router_z_loss` are coefficients.  `capacity_factor` > 0 drops, in training,
    what an expert has no room for.  `shared_ffn_size` > 0 puts an MLP that every token visits beside the experts,
    `shared_gate` a sigmoid gate on it.
    """

    _place: ClassVar[str] = "model"

    vocab_size: Positive
    hidden_size: Positive
    num_layers: Annotated[int, Range(low=1, most=10_000)]
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    ffn_size: Positive
    norm: Annotated[str, OneOf(("rmsnorm", "layernorm"))] = "rmsnorm"
    norm_eps: Above0 = 1e-5
    activation: Annotated[str, OneOf(("swiglu", "gelu"))] = "swiglu"
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Above0 = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: Count = 0
    kv_rank: Count = 0
    q_rank: Count = 0
    value_dim: Count = 0
    max_positions: Positive = 2048
    sliding_window: Positive | None = None
    window_layers: tuple[Count, ...] | None = None
    attention_sinks: bool = False
    sink_tokens: Count = 0
    tie_embeddings: bool = False
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    num_experts: Count = 0
    dense_layers: tuple[Count, ...] = ()
    experts_per_token: Positive = 2
    expert_ffn_size: Count = 0
    norm_topk: bool = True
    router_aux_loss: Amount = 0.0
    router_z_loss: Amount = 0.0
    router_scores: Annotated[str, OneOf(("softmax", "sigmoid"))] = "softmax"
    router_bias: bool = False
    router_bias_rate: Amount = 0.001
    router_groups: Positive = 1
    router_top_groups: Positive = 1
    router_scale: Above0 = 1.0
    router_fp32: bool = False
    capacity_factor: Amount = 0.0
    shared_ffn_size: Count = 0
    shared_gate: bool = False
    init_std: Above0 = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"model.num_kv_heads must divide num_heads {self.num_heads}, found {self.num_kv_heads}: "
                f"nearest is {closest(self.num_kv_heads, divisors)}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim must be even for rotary positions, found {self.head_dim}: "
                f"nearest is {self.head_dim + 1}"
            )
        if self.rotary_dim % 2 or self.rotary_dim >= self.head_dim:
            raise ConfigError(
                f"model.rotary_dim must be even and below head_dim {self.head_dim} (0 = all of it), "
                f"found {self.rotary_dim}: nearest is {closest(self.rotary_dim, range(0, self.head_dim, 2))}"
            )
        self._check_latent()
        if self.num_experts:
            self._check_experts()
            self._check_groups()
        else:
            self._check_dense()
        if self.window_layers is not None:
            self._check_windows(self.window_layers)
        if self.sink_tokens and self.sliding_window is None:
            raise ConfigError(
                f"model.sink_tokens {self.sink_tokens} needs model.sliding_window, found none: without a window every "
                "position before a query is seen"
            )

    def _check_latent(self) -> None:
        if not self.kv_rank:
            for key in ("q_rank", "value_dim"):
                if found := getattr(self, key):
                    raise ConfigError(f"model.{key} {found} needs model.kv_rank of at least 1, found 0")
            return
        if not self.rotary_dim:
            raise ConfigError(
                f"model.kv_rank {self.kv_rank} needs model.rotary_dim, the features of a key that turn and that all "
                f"heads share, from 2 to below head_dim {self.head_dim}, found 0"
            )
        if self.value_dim > self.head_dim:
            raise ConfigError(
                f"model.value_dim must be at most head_dim {self.head_dim} (0 = as many), found {self.value_dim}"
            )
        if self.num_kv_heads != self.num_heads:
            raise ConfigError(
                f"model.kv_rank {self.kv_rank} makes a key and a value for each of num_heads {self.num_heads}, found "
                f"num_kv_heads {self.num_kv_heads}: set it to {self.num_heads}"
            )
        for key in ("qk_norm", "qkv_bias"):
            if getattr(self, key):
                raise ConfigError(
                    f"model.{key} true with model.kv_rank {self.kv_rank}: latent attention has norms of its own and no "
                    f"biases before its heads, so set {key} to false"
                )

    def _check_experts(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"model.experts_per_token must be at most num_experts {self.num_experts}, "
                f"found {self.experts_per_token}"
            )
        if not self.expert_ffn_size:
            raise ConfigError(f"model.expert_ffn_size must be at least 1 with num_experts {self.num_experts}, found 0")
        if self.activation != "swiglu" or self.mlp_bias:
            found = f'activation = "{self.activation}"' if self.activation != "swiglu" else "mlp_bias = true"
            raise ConfigError(
                f'model.num_experts {self.num_experts} needs activation = "swiglu" and mlp_bias = false, found {found}'
            )
        if self.shared_gate and not self.shared_ffn_size:
            raise ConfigError("model.shared_gate needs model.shared_ffn_size of at least 1, found 0")
        _check_layers("dense_layers", self.dense_layers, self.num_layers)
        if len(self.dense_layers) == self.num_layers:
            raise ConfigError(
                f"model.dense_layers leaves none of {self.num_layers} layers to model.num_experts {self.num_experts}: "
                "set num_experts to 0 for a model without experts"
            )

    def _check_groups(self) -> None:
        if self.num_experts % self.router_groups:
            divisors = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ConfigError(
                f"model.router_groups must divide num_experts {self.num_experts}, found {self.router_groups}: "
                f"nearest is {closest(self.router_groups, divisors)}"
            )
        if self.router_top_groups > self.router_groups:
            raise ConfigError(
                f"model.router_top_groups must be at most router_groups {self.router_groups}, "
                f"found {self.router_top_groups}"
            )
        size = self.num_experts // self.router_groups
        if self.experts_per_token > self.router_top_groups * size:
            raise ConfigError(
                f"model.router_top_groups {self.router_top_groups} opens {self.router_top_groups * size} experts to a "
                f"token, found experts_per_token {self.experts_per_token}: nearest is "
                f"router_top_groups {-(-self.experts_per_token // size)}"
            )

    def _check_dense(self) -> None:
        for key in EXPERTS_ONLY:
            found = getattr(self, key)
            if found != type(self).__dataclass_fields__[key].default:
                raise ConfigError(f"model.{key} {toml(found)} needs model.num_experts of at least 1, found 0")

    def _check_windows(self, layers: tuple[int, ...]) -> None:
        if self.sliding_window is None:
            raise ConfigError("model.window_layers needs model.sliding_window, found none")
        _check_layers("window_layers", layers, self.num_layers)

    @property
    def value_size(self) -> int:
        """Features of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def latent_width(self) -> int:
        """Features of a position that reach the heads of latent attention: of queries, of keys and values, and the part
        of the key that turns."""
        return (self.q_rank or self.hidden_size) + self.kv_rank + self.rotary_dim

    @property
    def has_router_losses(self) -> bool:
        """Whether routers add to the loss."""
        return self.router_aux_loss > 0.0 or self.router_z_loss > 0.0

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is a mixture of experts."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    @property
    def of_dense_layers(self) -> ModelConfig:
        """A model of the same sizes, all of whose layers are dense."""
        return _of_dense_layers(self)

    def window(self, layer: int) -> int | None:
        """Positions up to its own that a query of this layer sees, besides `sink_tokens`; None = all before it."""
        windowed = self.window_layers is None or layer in self.window_layers
        return self.sliding_window if windowed else None


@functools.lru_cache(maxsize=64)
def _of_dense_layers(cfg: ModelConfig) -> ModelConfig:
    unset: dict[str, Any] = {key: ModelConfig.__dataclass_fields__[key].default for key in EXPERTS_ONLY}
    return replace(cfg, num_experts=0, **unset)


def _check_layers(key: str, layers: tuple[int, ...], num_layers: int) -> None:
    if sorted(set(layers)) != list(layers) or (layers and layers[-1] >= num_layers):
        raise ConfigError(
            f"model.{key} must be rising layer numbers below num_layers {num_layers}, found {list(layers)}"
        )
