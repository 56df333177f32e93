"""The decoder against `spec`, against plain PyTorch where a formula exists, and against itself cut in pieces."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from interlace import spec
from interlace.config import ModelConfig
from interlace.errors import ConfigError
from interlace.models.decoder import Decoder, initial_value, initialise
from interlace.models.layers import Dropout

TINY = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, ffn_size=28, init_std=0.2
)
MOE = {"num_experts": 3, "experts_per_token": 2, "expert_ffn_size": 11, "router_aux_loss": 0.01}
LATENT = {"kv_rank": 5, "rotary_dim": 2, "num_kv_heads": 4}
SWITCHES = [
    {"norm": "layernorm"},
    {"activation": "gelu"},
    {"qk_norm": True},
    {"qkv_bias": True},
    {"out_bias": True},
    {"mlp_bias": True},
    {"tie_embeddings": True},
    {"num_kv_heads": 1},
    {"num_kv_heads": 4},
    {"sliding_window": 3, "window_layers": (1,)},
    {"num_layers": 1},
    MOE,
    MOE | {"dense_layers": (0,)},
    {"rotary_dim": 2},
    LATENT,
    LATENT | {"q_rank": 7, "value_dim": 3},
]


def build(dtype=torch.float64, seed=0, **changes):
    cfg = dataclasses.replace(TINY, **changes)
    decoder = Decoder(cfg, dtype=dtype)
    initialise(decoder, cfg, seed)
    return decoder


def batch(rows=4, length=9, vocab=37, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, length), generator=generator)
    labels = torch.randint(0, vocab, (rows, length), generator=generator)
    return tokens, labels


def combinations():
    """No switch, every switch, every pair of switches that the configuration allows."""
    for chosen in itertools.chain([()], ((one,) for one in SWITCHES), itertools.combinations(SWITCHES, 2)):
        merged = {key: value for changes in chosen for key, value in changes.items()}
        try:
            cfg = dataclasses.replace(TINY, **merged)
        except ConfigError:
            continue
        yield cfg


def test_spec_equals_the_built_model_for_every_pair_of_switches():
    count = 0
    for cfg in combinations():
        decoder = Decoder(cfg, device="meta")
        built = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
        assert built == [(parameter.name, parameter.shape) for parameter in spec.parameters(cfg)], cfg
        tied = [parameter.tied_to for parameter in spec.parameters(cfg) if parameter.tied_to]
        assert tied == (["head.output.weight"] if cfg.tie_embeddings else []), cfg
        assert (decoder.head.output.weight is decoder.embedding.weight) == cfg.tie_embeddings
        assert not list(decoder.buffers())
        count += 1
    assert count > 60


@pytest.mark.parametrize("changes", SWITCHES, ids=lambda changes: "-".join(changes))
def test_every_switch_changes_the_logits_and_every_parameter_gets_a_gradient(changes):
    decoder = build(**changes)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias"):  # they start as zeros
                parameter.copy_(torch.linspace(-1, 1, len(parameter)))
    tokens, labels = batch()
    assert not torch.equal(decoder(tokens), build()(tokens))
    decoder.loss(tokens, labels)[0].backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def plain_forward(decoder, tokens_BT):
    """A Llama block written in plain tensor operations, no module of ours: pairs turned as complex numbers."""
    cfg, weights = decoder.cfg, dict(decoder.named_parameters())
    B, T = tokens_BT.shape
    H, K, E = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    angles = torch.arange(T)[:, None] * cfg.rope_theta ** (-torch.arange(0, E, 2, dtype=torch.float64) / E)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def normed(x, name):
        return x / (x.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * weights[name]

    def rotated(x):
        z = torch.complex(x[..., : E // 2], x[..., E // 2 :]) * turn
        return torch.cat((z.real, z.imag), -1)

    x = weights["embedding.weight"][tokens_BT]
    for i in range(cfg.num_layers):
        w = {name.removeprefix(f"blocks.{i}."): value for name, value in weights.items()}
        y = normed(x, f"blocks.{i}.attention_norm.weight")
        q = rotated((y @ w["attention.q.weight"].T).view(B, T, H, E))
        k = rotated((y @ w["attention.k.weight"].T).view(B, T, K, E)).repeat_interleave(H // K, 2)
        v = (y @ w["attention.v.weight"].T).view(B, T, K, E).repeat_interleave(H // K, 2)
        scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(E)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        x = x + torch.einsum("bhts,bshe->bthe", scores, v).reshape(B, T, H * E) @ w["attention.out.weight"].T
        y = normed(x, f"blocks.{i}.mlp_norm.weight")
        x = x + (F.silu(y @ w["mlp.gate.weight"].T) * (y @ w["mlp.up.weight"].T)) @ w["mlp.down.weight"].T
    return normed(x, "head.norm.weight") @ weights["head.output.weight"].T


def test_logits_equal_plain_tensor_operations():
    decoder = build()
    tokens, _ = batch(rows=2)
    torch.testing.assert_close(decoder(tokens), plain_forward(decoder, tokens), rtol=0, atol=1e-5)  # fp32 angles


def test_gelu_layernorm_and_biases_equal_their_formulas():
    decoder = build(activation="gelu", norm="layernorm", mlp_bias=True, out_bias=True)
    block = decoder.blocks[0]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1)
    x = torch.randn(2, 5, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context = decoder.context((2, 5), x.device)
    norm = block.mlp_norm
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    inner = y @ block.mlp.up.weight.T + block.mlp.up.bias
    inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    expected = inner @ block.mlp.down.weight.T + block.mlp.down.bias
    torch.testing.assert_close(block.mlp(norm(x), context), expected, rtol=0, atol=1e-12)


def test_default_positions_documents_and_samples_are_what_they_say():
    decoder = build()
    tokens, _ = batch()
    positions = torch.arange(9).expand(4, 9)
    assert torch.equal(decoder(tokens), decoder(tokens, positions, samples_B=torch.arange(4)))
    one_document = torch.zeros(4, 9, dtype=torch.long)
    torch.testing.assert_close(decoder(tokens), decoder(tokens, positions, one_document), rtol=0, atol=1e-12)
    assert not torch.allclose(decoder(tokens), decoder(tokens, positions * 2))


# --- loss ----------------------------------------------------------------------------------------------------------


def test_loss_is_the_sum_over_valid_labels_and_their_number():
    decoder = build()
    tokens, labels = batch()
    labels[0, 3:] = labels[2] = -100
    loss, count = decoder.loss(tokens, labels)
    expected = F.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert (loss.dtype, count.dtype, count.item()) == (torch.float64, torch.int64, 21)


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 2), (1, 1, 1, 1)])
def test_sums_divided_once_do_not_depend_on_the_cut(cuts):
    """pytorch/torchtitan#1842: 15, 9, 3 and 1 labels; a mean of means is not the mean."""
    decoder = build()
    tokens, labels = batch(rows=4, length=15)
    for row, valid in enumerate((15, 9, 3, 1)):
        labels[row, valid:] = -100
    expected = F.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten()).item()
    parts = [decoder.loss(t, y) for t, y in zip(tokens.split(cuts), labels.split(cuts), strict=True)]
    assert sum(count.item() for _, count in parts) == 28
    assert sum(loss.item() for loss, _ in parts) / 28 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "moe"])
def test_no_label_gives_a_loss_of_zero_and_zero_gradients(changes):
    decoder = build(**changes)
    tokens, _ = batch()
    loss, count = decoder.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


# --- dropout -------------------------------------------------------------------------------------------------------


def test_dropout_drops_the_share_it_says_and_keeps_the_mean():
    layer = Dropout(0.25, "layer")
    context = build().context((8, 16), torch.device("cpu"), dropout_key=3)
    dropped = layer(torch.ones(8, 16, 64), context)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert dropped.mean().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(layer.eval()(torch.ones(8, 16, 64), context), torch.ones(8, 16, 64))


@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "moe"])
def test_dropout_does_not_depend_on_the_cut_into_micro_batches(changes):
    decoder = build(dropout=0.4, **changes)
    tokens, labels = batch()
    decoder.loss(tokens, labels, dropout_key=7)[0].backward()
    whole = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    for rows in ([2], [0, 3], [1]):
        decoder.loss(tokens[rows], labels[rows], samples_B=torch.tensor(rows), dropout_key=7)[0].backward()
    for parameter, gradient in zip(decoder.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())


def test_dropout_masks_follow_key_sample_column_and_layer_but_not_position():
    decoder = build(dropout=0.4)
    x = torch.ones(2, 6, 20, dtype=torch.float64)

    def masks(layer, **places):
        return layer(x, decoder.context((2, 6), x.device, **places))

    first, second = decoder.blocks[0].attention_dropout, decoder.blocks[1].attention_dropout
    base = masks(first)
    assert torch.equal(base, masks(first))
    assert not torch.equal(base, masks(second))
    assert not torch.equal(base, masks(decoder.blocks[0].mlp_dropout))
    assert not torch.equal(base, masks(first, dropout_key=1))
    shifted = masks(first, samples_B=torch.tensor([1, 2]), columns_T=torch.arange(2, 8))
    assert torch.equal(shifted[0, :4], base[1, 2:])
    # two documents of a packed row start at position 0 both; their masks are not the same
    packed = masks(first, positions_BT=torch.arange(3).repeat(2).expand(2, 6))
    assert torch.equal(packed, base)
    assert not torch.equal(packed[:, :3], packed[:, 3:])


def test_recompute_repeats_the_masks():
    decoder = build(dropout=0.4)
    tokens, labels = batch()
    decoder.loss(tokens, labels, dropout_key=2)[0].backward()
    expected = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    for block in decoder.blocks:
        plain = block.forward
        block.forward = lambda x, context, plain=plain: torch.utils.checkpoint.checkpoint(
            plain, x, context, use_reentrant=False, preserve_rng_state=False
        )
    decoder.loss(tokens, labels, dropout_key=2)[0].backward()
    for parameter, gradient in zip(decoder.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


# --- structure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["forward", "loss"])
def test_hooks_of_every_unit_fire_exactly_once(call):
    decoder = build()
    fired = []
    for unit in spec.units(decoder.cfg):
        module = decoder.get_submodule(unit)
        module.register_forward_pre_hook(lambda *_, unit=unit: fired.append(unit))
        module.register_forward_hook(
            lambda module, args, out, unit=unit: out.register_hook(lambda _: fired.append("backward " + unit)) and None
        )
    tokens, labels = batch()
    out = decoder(tokens).sum() if call == "forward" else decoder.loss(tokens, labels)[0]
    assert tuple(fired) == spec.units(decoder.cfg)
    out.backward()
    assert fired[5:] == ["backward " + unit for unit in reversed(spec.units(decoder.cfg))]


def test_stages_of_a_pipeline_are_the_decoder_without_the_other_parts():
    cfg = dataclasses.replace(TINY, dropout=0.2, **MOE)
    whole = build(dropout=0.2, **MOE)
    first, last = (Decoder(cfg, dtype=torch.float64) for _ in range(2))
    first.blocks[1] = first.blocks[2] = first.head = None
    last.embedding = last.blocks[0] = None
    for stage in (first, last):
        initialise(stage, cfg, seed=0)
    names = [name for stage in (first, last) for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    tokens, labels = batch()
    counts_B = (labels != -100).sum(1)
    contexts = [stage.context((4, 9), tokens.device, dropout_key=4) for stage in (first, last)]
    x = last.hidden(first.hidden(tokens, contexts[0]), contexts[1])
    loss = last.head(x, labels) + sum(
        stage.router_loss(context, counts_B) for stage, context in zip((first, last), contexts, strict=True)
    )
    torch.testing.assert_close(loss, whole.loss(tokens, labels, dropout_key=4)[0], rtol=1e-6, atol=0)


def test_heads_are_counted_from_the_projections():
    """A block that holds half of the heads gives half of the sum over heads."""
    decoder = build()
    attention = decoder.blocks[0].attention
    x = torch.randn(2, 5, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context = decoder.context((2, 5), x.device)
    whole = attention(x, context)
    halves = []
    for part in range(2):
        half = build().blocks[0].attention
        for name, dim in (("q", 0), ("k", 0), ("v", 0), ("out", 1)):
            linear = getattr(half, name)
            linear.weight = torch.nn.Parameter(getattr(attention, name).weight.chunk(2, dim)[part].detach())
        halves.append(half(x, context))
    torch.testing.assert_close(sum(halves), whole, rtol=0, atol=1e-12)


# --- initial values ------------------------------------------------------------------------------------------------


def test_initial_values_have_the_deviation_that_spec_names():
    cfg = dataclasses.replace(TINY, hidden_size=64, ffn_size=200, qkv_bias=True, norm="layernorm", init_std=0.02)
    decoder = Decoder(cfg)
    initialise(decoder, cfg, seed=5)
    values = dict(decoder.named_parameters())
    residual = 0.02 / math.sqrt(2 * cfg.num_layers)
    for name, std in (("embedding.weight", 0.02), ("blocks.1.mlp.gate.weight", 0.02), ("head.output.weight", 0.02)):
        assert values[name].std().item() == pytest.approx(std, rel=0.1), name
    for name in ("blocks.2.mlp.down.weight", "blocks.0.attention.out.weight"):
        assert values[name].std().item() == pytest.approx(residual, rel=0.1), name
    assert values["blocks.0.attention_norm.weight"].eq(1).all()
    assert values["blocks.0.attention_norm.bias"].eq(0).all()
    assert values["blocks.0.attention.q.bias"].eq(0).all()
    assert not torch.equal(values["blocks.0.mlp.up.weight"], values["blocks.1.mlp.up.weight"])


def test_a_shard_initialised_alone_holds_the_values_of_the_whole():
    decoder = build(dtype=torch.float32, seed=9)
    built = dict(decoder.named_parameters())
    for parameter in spec.parameters(decoder.cfg):
        whole = built[parameter.name].detach().flatten()
        cut = parameter.numel // 3
        shard = initial_value(parameter, 9, cut, parameter.numel - cut)
        assert torch.equal(shard, whole[cut:]), parameter.name
        assert initial_value(parameter, 9, cut, 0).shape == (0,)


def test_another_seed_gives_other_values_and_a_foreign_module_is_refused():
    assert not torch.equal(build(seed=0).head.output.weight, build(seed=1).head.output.weight)
    with pytest.raises(ConfigError, match=r"blocks\.0\.attention\.q_norm\.weight"):
        initialise(Decoder(dataclasses.replace(TINY, qk_norm=True)), TINY, seed=0)
