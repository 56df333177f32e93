"""The parts of a decoder that are neither attention nor experts: norms, rotary positions, the MLP, dropout, and the
`Context` that every block is handed besides its input.

Parameters are left as allocated: `decoder.initialise` or a checkpoint fills them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace import random
from interlace.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    from interlace.models.attention import Pattern


@dataclass(frozen=True)
class Routed:
    """What a router tells of one micro-batch.  load_Y: how often each expert was chosen, then how many of these choices
    were dropped, int64 [X + 1]; losses_2B: balance loss and z-loss of each sequence, None where neither is asked for.
    Tokens that do not count are in none of them."""

    load_Y: Tensor
    losses_2B: Tensor | None


@dataclass
class Context:
    """What a block needs to know besides its input: made once per forward, shared by all layers, never differentiated.

    A block is called as `block(x, context)` and reads it, so calling it again (recompute) gives the same result.  The
    one thing blocks write is `routed`, and only until `take_routed` has been called: a block that runs again during
    backward leaves no second copy.
    """

    samples_B: Tensor  # global index of each sequence: keys dropout
    columns_T: Tensor  # where each local column stands in its sequence, whatever the documents: keys dropout
    rotary: tuple[Tensor, Tensor]  # cosine and sine of the features that turn, [B T 1 E/2] of all, fp32
    patterns: Mapping[int | None, Pattern]  # sliding window of a layer -> what its queries see
    dropout_key: int = 0
    routed: dict[str, Routed] | None = field(default_factory=dict)  # by layer, None once taken
    counted_BT: Tensor | None = None  # 1 for tokens that routers count, 0 for others (padding), fp32; None = all count
    rows: tuple[int, int] | None = None  # of the flattened B T, which the residual stream holds here; None = all

    @property
    def num_rows(self) -> int:
        """B T: positions of the micro-batch, wherever they are held."""
        return len(self.samples_B) * len(self.columns_T)

    @functools.cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Sample and column of every position of the residual stream, in shapes that broadcast to it."""
        samples_B1, columns_1T = self.samples_B[:, None], self.columns_T[None, :]
        if self.rows is None:
            return samples_B1, columns_1T
        piece = slice(*self.rows)
        both = torch.broadcast_tensors(samples_B1, columns_1T)
        return both[0].reshape(1, -1)[:, piece], both[1].reshape(1, -1)[:, piece]

    def add_routed(self, layer: str, load_Y: Tensor, losses_2B: Tensor | None) -> None:
        """Hand what the router of one layer tells (`Routed`) to whoever computes the loss."""
        if self.routed is not None:
            self.routed[layer] = Routed(load_Y, losses_2B)

    def take_routed(self) -> dict[str, Routed]:
        """All of it in layer order; afterwards the context holds, and takes, none."""
        found, self.routed = self.routed or {}, None
        return found


class Linear(nn.Linear):
    """`x_.M -> x_.N`, weight [N M]; its parameters are left as allocated."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """`tokens_BT -> x_BTD`, weight [V D]; left as allocated."""

    def reset_parameters(self) -> None:
        pass


class SharedInput(nn.Module):
    """Products that read the same input: x_BTD -> the output of each of `linears`.

    A module of its own so that it can be replaced where not every position of x is here.
    """

    def forward(self, x_BTD: Tensor, linears: Sequence[nn.Linear], context: Context) -> list[Tensor]:
        return [linear(x_BTD) for linear in linears]


def norm(cfg: ModelConfig, device: Any = None, dtype: Any = None) -> nn.Module:
    """The norm of a residual stream: weight [D], and bias [D] for a LayerNorm."""
    kind = nn.LayerNorm if cfg.norm == "layernorm" else nn.RMSNorm
    return kind(cfg.hidden_size, eps=cfg.norm_eps, device=device, dtype=dtype)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, or `down(gelu(up(x)))` with the exact (erf) gelu: x_BTD -> x_BTD."""

    def __init__(self, cfg: ModelConfig, device: Any = None, dtype: Any = None, size: int = 0) -> None:
        """size: inner features; 0 = ffn_size."""
        super().__init__()
        linear = functools.partial(Linear, bias=cfg.mlp_bias, device=device, dtype=dtype)
        size = size or cfg.ffn_size
        self.gate = linear(cfg.hidden_size, size) if cfg.activation == "swiglu" else None
        self.up = linear(cfg.hidden_size, size)
        self.down = linear(size, cfg.hidden_size)
        self.project = SharedInput()

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        if self.gate is None:
            (up,) = self.project(x_BTD, (self.up,), context)
            return self.down(F.gelu(up))
        gate, up = self.project(x_BTD, (self.gate, self.up), context)
        return self.down(F.silu(gate) * up)


class Dropout(nn.Module):
    """Dropout whose mask is a pure function of (dropout key, layer, sample, column, feature).

    So it does not depend on how a batch is cut into micro-batches or over ranks, and comes out again under recompute.
    x_BTD -> x_BTD; nothing happens in evaluation or with p = 0.
    """

    def __init__(self, p: float, layer: str) -> None:
        super().__init__()
        self.p = p
        self.layer = layer

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BTD
        return x_BTD * self.keep(context, x_BTD.shape[-1]) * (1.0 / (1.0 - self.p))

    def keep(self, context: Context, width: int) -> Tensor:
        """Which elements stay: bool [B T width]."""
        key = random.key(context.dropout_key, self.layer)
        return random.dropout_mask(key, *context.places, width, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer!r}"


# --- rotary positions ----------------------------------------------------------------------------------------------


def rotate(x_BTHE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn features (i, i + E/2) of each head by the angle of position and frequency i; in fp32, same dtype out.

    The two halves, not neighbours, form the pairs: the layout of Hugging Face weights.  Where the table is of fewer
    frequencies than E/2, E is the number of first features that turn, and the others stay as they are.
    """
    cosine, sine = rotary
    half = cosine.shape[-1]
    first, second = x_BTHE[..., :half], x_BTHE[..., half : 2 * half]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x_BTHE.dtype)
    return turned if 2 * half == x_BTHE.shape[-1] else torch.cat((turned, x_BTHE[..., 2 * half :]), dim=-1)


def rotary_table(cfg: ModelConfig, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency: two fp32 [B T 1 E/2], the scaling's factor multiplied in.

    E: the features of a head that turn.
    """
    frequencies, factor = frequencies_of(cfg, positions_BT.device)
    angles = positions_BT[..., None, None].to(torch.float32) * frequencies
    return angles.cos() * factor, angles.sin() * factor


@functools.lru_cache(maxsize=32)
def frequencies_of(cfg: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Rotary frequencies of the features that turn, fp32 [E/2], and the factor on cosine and sine.

    Plain: theta ** (-2i/E) (Su et al., arXiv 2104.09864), then as `rope_scaling` says.  The steps are rounded to fp32
    in the order that `transformers` uses, since one unit in the last place of a frequency is a visible angle at
    position 100000.
    """
    turning = cfg.rotary_dim or cfg.head_dim
    exponents = torch.arange(0, turning, 2, dtype=torch.float32) / turning
    periods = cfg.rope_theta**exponents  # in radians per position, inverted
    factor = 1.0
    scaling = cfg.rope_scaling
    if scaling is None:
        frequencies = 1.0 / periods
    elif scaling.type == "linear":  # position interpolation, Chen et al., arXiv 2306.15595
        frequencies = 1.0 / periods / scaling.factor
    elif scaling.type == "llama3":
        frequencies = _llama3(1.0 / periods, scaling)
    else:
        frequencies, factor = _yarn(periods, cfg.rope_theta, scaling), _yarn_factor(scaling)
    return frequencies.to(device), factor


def score_scale(cfg: ModelConfig) -> float:
    """What latent attention's scores are multiplied by besides E^-0.5: 1 but for yarn with `mscale_all_dim`."""
    scaling = cfg.rope_scaling
    if scaling is None or scaling.type != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return _grown(scaling.factor, scaling.mscale_all_dim) ** 2


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: divide slow frequencies by the factor, keep fast ones, blend in between.

    With r = trained length / wavelength: r < low is slow, r > high is fast, between them the share of the kept
    frequency rises linearly in r.
    """
    assert scaling.original_max_position_embeddings is not None
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = (1 - share) * frequencies / scaling.factor + share * frequencies
    slow = turns < scaling.low_freq_factor
    fast = turns > scaling.high_freq_factor
    return torch.where(slow, frequencies / scaling.factor, torch.where(fast, frequencies, blend))


def _yarn(periods: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al., arXiv 2309.00071), "NTK-by-parts": interpolate features that turn less than `beta_slow` times
    in the trained length, keep those that turn more than `beta_fast` times, a linear ramp over features in between."""
    assert scaling.original_max_position_embeddings is not None
    half = len(periods)

    def feature(turns: float) -> float:  # the (fractional) frequency index that turns so often in the trained length
        length = scaling.original_max_position_embeddings or 0
        return 2 * half * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = feature(scaling.beta_fast), feature(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (scaling.factor * periods)) * (1 - keep) + (1.0 / periods) * keep


def _yarn_factor(scaling: RopeScaling) -> float:
    """The factor on cosine and sine, whose square is the temperature of the attention scores."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _grown(scaling.factor, scaling.mscale) / _grown(scaling.factor, scaling.mscale_all_dim)
    return _grown(scaling.factor, 1.0)


def _grown(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0
