"""The decoder: embedding, blocks, head.  One class for all models of the family; its switches are `ModelConfig`.

    x = embedding(tokens);  x = block(x, context) for each block;  logits = head(x)

    block:  x = x + dropout(attention(attention_norm(x)));  x = x + dropout(mlp_or_moe(norm(x)))

A stage of a pipeline is the same class with the parts of the other stages set to None: parameters keep their names,
`hidden` takes and gives hidden states where there is no embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interlace import random, spec
from interlace.config import ModelConfig
from interlace.errors import ConfigError
from interlace.models.attention import Attention, Pattern
from interlace.models.latent import LatentAttention
from interlace.models.layers import MLP, Context, Dropout, Embedding, Linear, norm, rotary_table
from interlace.models.moe import MoE
from interlace.models.vocabulary import IGNORED, SoftmaxRows, softmax_rows, vocabulary_loss


class Block(nn.Module):
    """One layer, pre-norm: x_BTD -> x_BTD."""

    def __init__(self, cfg: ModelConfig, layer: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.attention_norm = norm(cfg, device, dtype)
        kind: type[nn.Module] = LatentAttention if cfg.kv_rank else Attention
        self.attention = kind(cfg, layer, device, dtype)
        self.attention_dropout = Dropout(cfg.dropout, f"blocks.{layer}.attention")
        self.mlp_norm = norm(cfg, device, dtype)
        self.moe: nn.Module | None = MoE(cfg, layer, device, dtype) if cfg.has_experts(layer) else None
        self.mlp: nn.Module | None = None if cfg.has_experts(layer) else MLP(cfg, device, dtype)
        self.mlp_dropout = Dropout(cfg.dropout, f"blocks.{layer}.mlp")

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.attention_dropout(self.attention(self.attention_norm(x_BTD), context), context)
        feed_forward = self.mlp if self.moe is None else self.moe
        assert feed_forward is not None
        return x_BTD + self.mlp_dropout(feed_forward(self.mlp_norm(x_BTD), context), context)


class Vocabulary(nn.Module):
    """x_BTD -> logits_BTV by `output`, or with labels_BT the sum of losses; replaced where the vocabulary is split.

    `scratch` gives memory that is free while the loss runs, if there is any.
    """

    scratch: Callable[[], Tensor | None] = staticmethod(lambda: None)

    def forward(
        self, x_BTD: Tensor, output: nn.Linear, labels_BT: Tensor | None, context: Context | None, rows: SoftmaxRows
    ) -> Tensor:
        if labels_BT is None:
            return output(x_BTD)
        return vocabulary_loss(x_BTD.flatten(0, 1), output.weight, labels_BT.flatten(), rows, self.scratch())


class Head(nn.Module):
    """The last norm and the projection to the vocabulary: x_BTD -> logits_BTV, or with labels_BT the sum of losses."""

    softmax_rows: SoftmaxRows = staticmethod(softmax_rows)

    def __init__(self, cfg: ModelConfig, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.norm = norm(cfg, device, dtype)
        self.output = Linear(cfg.hidden_size, cfg.vocab_size, bias=False, device=device, dtype=dtype)
        self.vocabulary = Vocabulary()

    def forward(self, x_BTD: Tensor, labels_BT: Tensor | None = None, context: Context | None = None) -> Tensor:
        """context: that of the blocks; asked for only where the residual stream or the vocabulary is split."""
        return self.vocabulary(self.norm(x_BTD), self.output, labels_BT, context, self.softmax_rows)


class Decoder(nn.Module):
    """A decoder-only transformer on one device; its parameters are left as allocated (see `initialise`).

    Arguments shared by the calls below, B sequences of T positions:

        positions_BT   angle of the rotary positions, restarting per document; default 0 .. T-1
        documents_BT   a number per position: attention stays among equal numbers; default None, plain causal.
                       On a GPU it may stay in CPU memory; then preparing it does not stop the GPU.
        samples_B      global index of each sequence, and
        columns_T      place of each column in its sequence; they and `dropout_key` choose the dropout masks.
                       Default 0 .. B-1 and 0 .. T-1.

    `rows` is set where the residual stream is split: B T -> the range of those positions that is held here; between
    embedding and head x is then [1 rows D].

    `pattern` and `all_labels` are set where each sequence is split: tokens, labels, positions and columns are then
    those that are held here, documents those of the whole sequences.  `pattern` makes what the replaced cores of
    attention read, and `all_labels` gives the labels of each whole sequence from those held here.
    """

    rows: Callable[[int], tuple[int, int]] | None = None
    pattern: Callable[..., Any] = staticmethod(Pattern)
    all_labels: Callable[[Tensor], Tensor] = staticmethod(lambda counts_B: counts_B)

    def __init__(
        self, cfg: ModelConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.loads: dict[str, Tensor] = {}  # layer -> what `take_loads` gives
        self.replays = False  # whether its blocks are CUDA graphs
        self.embedding = Embedding(cfg.vocab_size, cfg.hidden_size, device=device, dtype=dtype)
        self.embedding_dropout = Dropout(cfg.dropout, "embedding")
        self.blocks = nn.ModuleList(Block(cfg, layer, device, dtype) for layer in range(cfg.num_layers))
        self.head = Head(cfg, device, dtype)
        if cfg.tie_embeddings:
            self.head.output.weight = self.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        samples_B: Tensor | None = None,
        dropout_key: int = 0,
        columns_T: Tensor | None = None,
    ) -> Tensor:
        """Logits [B T V] of the next token at every position, in the dtype of the weights."""
        x_BTD, context = self._hidden(tokens_BT, None, positions_BT, documents_BT, samples_B, dropout_key, columns_T)
        return self.head(x_BTD, None, context)

    def loss(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        samples_B: Tensor | None = None,
        dropout_key: int = 0,
        columns_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(sum of the cross-entropies of all labels that are not -100, their number): fp32 (fp64 of fp64) and int64.

        The sum, not a mean: add sums and numbers of all micro-batches and ranks, then divide once.  So that this one
        division serves a router's losses too, they come in as coefficient * sum over sequences of (labels of the
        sequence * balance loss of the sequence), and coefficient * sum over tokens of the z-loss, both summed over
        layers: means over labels, however the sequences are cut into micro-batches.  Routers count the tokens that
        have a label.
        """
        x_BTD, context = self._hidden(
            tokens_BT, labels_BT, positions_BT, documents_BT, samples_B, dropout_key, columns_T
        )
        counts_B = (labels_BT != IGNORED).sum(dim=1)
        return self.head(x_BTD, labels_BT, context) + self.router_loss(context, counts_B), counts_B.sum()

    def router_loss(self, context: Context, counts_B: Tensor) -> Tensor:
        """What the blocks that ran with this context add to the loss sum (see `loss`): an fp32 scalar.

        `counts_B` is the number of labels of each sequence.  0 without experts or without a coefficient.
        """
        return self.balance(self.count(context), counts_B)

    def count(self, context: Context) -> list[Tensor]:
        """Takes what routers tell out of a context: adds up their loads, and returns their losses [2 B], by layer."""
        routed = context.take_routed()
        for layer, told in routed.items() if torch.is_grad_enabled() else ():
            self.loads[layer] = self.loads[layer] + told.load_Y if layer in self.loads else told.load_Y
        return [told.losses_2B for told in routed.values() if told.losses_2B is not None]

    def balance(self, losses: list[Tensor], counts_B: Tensor) -> Tensor:
        """What losses [2 B] of several layers, in their order, add to the loss sum."""
        found = torch.zeros((), device=counts_B.device)
        if losses:
            balance_B, z_B = torch.stack(losses).sum(dim=0)
            if self.cfg.router_aux_loss:
                found = self.cfg.router_aux_loss * (balance_B * self.all_labels(counts_B)).sum()
            if self.cfg.router_z_loss:
                found = found + self.cfg.router_z_loss * z_B.sum()
        return found

    def take_loads(self) -> Tensor | None:
        """How often each expert of each layer of experts here was chosen, and how many of these choices were dropped,
        in the forward passes with gradients since the last call: int64 [L X+1].  None where there is no such layer.

        A training step adds them up over all ranks that have other tokens, and gives the sum to `steer`.
        """
        layers = [block.moe.layer for block in self.blocks if block is not None and isinstance(block.moe, MoE)]
        taken = dict(self.loads)
        self.loads.clear()
        if not layers:
            return None
        known = next(iter(taken.values()), torch.zeros(self.cfg.num_experts + 1, dtype=torch.int64))
        return torch.stack([taken.get(layer, torch.zeros_like(known)) for layer in layers])

    def steer(self, loads_LY: Tensor) -> None:
        """Moves the biases of the routers here as their loads ask for; once, after a step (`MoE.steer`)."""
        routers = [block.moe for block in self.blocks if block is not None and isinstance(block.moe, MoE)]
        for moe, load_Y in zip(routers, loads_LY, strict=True):
            moe.steer(load_Y[:-1])

    def hidden(self, x: Tensor, context: Context) -> Tensor:
        """Embedding (if it is here) and blocks (those that are here): tokens_BT or x_BTD -> x_BTD."""
        if self.embedding is not None:
            x = self.embedding_dropout(self.embedding(x), context)
        for pattern in context.patterns.values():
            pattern.prepare(x.dtype, self.cfg.head_dim, self.cfg.attention_sinks)
        for block in self.blocks:
            if block is not None:
                x = block(x, context)
        return x

    def context(
        self,
        shape_BT: tuple[int, int],
        device: torch.device,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        samples_B: Tensor | None = None,
        dropout_key: int = 0,
        columns_T: Tensor | None = None,
        labels_BT: Tensor | None = None,
    ) -> Context:
        """What the blocks need besides x for one micro-batch; made once, read by every layer.

        labels_BT: routers count the tokens that have a label; None = all.
        """
        batch, length = shape_BT
        if columns_T is None:
            columns_T = torch.arange(length, device=device)
        windows = {self.cfg.window(layer) for layer in range(self.cfg.num_layers)}
        return Context(
            samples_B=torch.arange(batch, device=device) if samples_B is None else samples_B.to(device),
            columns_T=columns_T,
            rotary=rotary_table(self.cfg, columns_T[None] if positions_BT is None else positions_BT),
            patterns={
                window: self.pattern(batch, length, device, documents_BT, window, self.cfg.sink_tokens)
                for window in windows
            },
            dropout_key=dropout_key,
            rows=None if self.rows is None else self.rows(batch * length),
            counted_BT=None if labels_BT is None or not self.cfg.num_experts else (labels_BT != IGNORED).float(),
        )

    def _hidden(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        samples_B: Tensor | None,
        dropout_key: int,
        columns_T: Tensor | None,
    ) -> tuple[Tensor, Context]:
        batch, length = tokens_BT.shape
        context = self.context(
            (batch, length), tokens_BT.device, positions_BT, documents_BT, samples_B, dropout_key, columns_T, labels_BT
        )
        return self.hidden(tokens_BT, context), context


# --- initial values ------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialise(module: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Fill every parameter of a Decoder, or of a stage of one, from random numbers keyed by (seed, parameter name), and
    every buffer (biases of routers) with zeros."""
    known = {parameter.name: parameter for parameter in spec.parameters(cfg)}
    for name, tensor in module.named_parameters():
        if name not in known or tuple(tensor.shape) != known[name].shape:
            raise ConfigError(
                f"{name} of shape {list(tensor.shape)} is no parameter of this model configuration: "
                "build the module from the same one"
            )
        values = initial_value(known[name], seed, 0, tensor.numel(), tensor.device, tensor.dtype)
        tensor.copy_(values.view(tensor.shape))
    for buffer in module.buffers():
        buffer.zero_()


def initial_value(
    parameter: spec.Parameter,
    seed: int,
    start: int,
    count: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Elements `start` .. of the flattened, unsharded parameter: [count].  Any cut of it gives the same values."""
    if parameter.init == "normal":
        return random.normal(random.key(seed, parameter.name), start, count, parameter.init_std, dtype, device)
    return torch.full((count,), {"ones": 1.0, "zeros": 0.0}[parameter.init], dtype=dtype, device=device)
