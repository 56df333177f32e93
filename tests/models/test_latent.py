"""Latent attention: against its formula in plain operations, against masks, and what a configuration may not say."""

import dataclasses
import math

import pytest
import torch

from interlace.config import ModelConfig, RopeScaling
from interlace.errors import ConfigError
from interlace.models.decoder import Decoder, initialise
from interlace.models.layers import rotary_table

TINY = ModelConfig(
    vocab_size=37,
    hidden_size=20,
    num_layers=2,
    num_heads=3,
    num_kv_heads=3,
    head_dim=10,
    ffn_size=28,
    kv_rank=6,
    q_rank=7,
    rotary_dim=4,
    value_dim=5,
    init_std=0.3,
)
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=1.3)


def build(dtype=torch.float64, **changes):
    cfg = dataclasses.replace(TINY, **changes)
    decoder = Decoder(cfg, dtype=dtype)
    initialise(decoder, cfg, 0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:  # norms begin as ones
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=dtype, generator=generator))
    return decoder


def plainly(cfg, w, x_BTD, scale):
    """The published equations, head by head, pairs turned as complex numbers."""
    T = x_BTD.shape[1]
    E, R, V, C = cfg.head_dim, cfg.rotary_dim, cfg.value_size, cfg.kv_rank
    cosine, sine = rotary_table(cfg, torch.arange(T)[None])
    turn = torch.complex(cosine, sine)[0, :, 0]  # [T R/2], the factor of yarn in it

    def normed(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    def turned(x_BTR):
        z = torch.complex(x_BTR[..., : R // 2], x_BTR[..., R // 2 :]) * turn
        return torch.cat((z.real, z.imag), -1)

    narrow = normed(x_BTD @ w["q_a.weight"].T, "q_a_norm.weight") if cfg.q_rank else x_BTD
    both = x_BTD @ w["kv_a.weight"].T
    latent, shared = normed(both[..., :C], "kv_a_norm.weight"), turned(both[..., C:])
    outs = []
    for h in range(cfg.num_heads):
        q = narrow @ w["q.weight"][h * E : (h + 1) * E].T
        rows = w["kv.weight"][h * (E - R + V) : (h + 1) * (E - R + V)]
        k, v = latent @ rows[: E - R].T, latent @ rows[E - R :].T
        scores = turned(q[..., :R]) @ shared.mT + q[..., R:] @ k.mT
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if cfg.sliding_window:
            seen &= torch.ones(T, T, dtype=torch.bool).triu(1 - cfg.sliding_window)
        weights = (scores * scale * E**-0.5).masked_fill(~seen, -math.inf).softmax(-1)
        outs.append(weights @ v)
    return torch.cat(outs, -1) @ w["out.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_rank": 0, "value_dim": 0},
        {"rope_scaling": YARN},
        {"rope_scaling": dataclasses.replace(YARN, mscale_all_dim=None)},
        {"sliding_window": 3},
    ],
    ids=["plain", "whole queries and values", "mscale", "no mscale of all", "window"],
)
def test_values_and_gradients_equal_the_formula(changes):
    decoder = build(**changes)
    cfg, attention = decoder.cfg, decoder.blocks[1].attention
    x = torch.randn(2, 9, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    context = decoder.context((2, 9), x.device)
    scale = (0.1 * 1.3 * math.log(4.0) + 1.0) ** 2 if cfg.rope_scaling and cfg.rope_scaling.mscale_all_dim else 1.0
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in attention.named_parameters()}
    again = x.detach().clone().requires_grad_()
    found, expected = attention(x, context), plainly(cfg, weights, again, scale)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # the table of angles is fp32
    probe = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (found * probe).sum().backward()
    (expected * probe).sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=0, atol=1e-5)
    for name, parameter in attention.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=0, atol=1e-5, msg=name)


def test_packed_documents_stay_apart_and_begin_anew():
    decoder = build(sliding_window=4, attention_sinks=True)
    tokens = torch.randint(0, 37, (1, 11), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[0] * 5 + [1] * 6])
    positions = torch.cat((torch.arange(5), torch.arange(6)))[None]
    packed = decoder(tokens, positions, documents)
    apart = torch.cat((decoder(tokens[:, :5]), decoder(tokens[:, 5:])), dim=1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-9)
    assert not torch.allclose(decoder(tokens)[:, 5:], packed[:, 5:], atol=1e-3)


GPU = pytest.mark.gpu


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=GPU),
        pytest.param("cuda", torch.bfloat16, marks=GPU),
    ],
)
def test_every_kernel_takes_values_of_another_size(device, dtype, packed):
    """A head of 24 and 16 features, as flash attention wants them; documents and a window, or neither."""
    window = {"sliding_window": 20} if packed else {}
    wide = build(head_dim=24, rotary_dim=8, value_dim=16, **window)
    cfg, exact = wide.cfg, wide.blocks[0].attention
    tested = Decoder(cfg, device, dtype).blocks[0].attention
    with torch.no_grad():
        for there, here in zip(tested.parameters(), exact.parameters(), strict=True):
            there.copy_(here)
            here.copy_(there)  # rounded alike
    documents = (torch.arange(70) // 30).expand(2, 70) if packed else None
    x = torch.randn(2, 70, 20, dtype=dtype, generator=torch.Generator().manual_seed(1)).to(device)
    probe = torch.randn(2, 70, 20, generator=torch.Generator().manual_seed(2))
    made = []
    for attention, inputs in ((exact, x.double().cpu()), (tested, x.clone())):
        inputs.requires_grad_()
        context = wide.context((2, 70), inputs.device, documents_BT=documents)
        for pattern in context.patterns.values():
            pattern.prepare(inputs.dtype, cfg.head_dim)
        out = attention(inputs, context)
        grads = torch.autograd.grad((out * probe.to(out)).sum(), [inputs, *attention.parameters()])
        made.append([found.detach().double().cpu() for found in (out, *grads)])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for expected, found in zip(*made, strict=True):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.filterwarnings("ignore:attention dropout")
def test_dropped_probabilities_do_not_hang_on_the_batch():
    decoder = build(attention_dropout=0.4).train()
    tokens = torch.randint(0, 37, (3, 7), generator=torch.Generator().manual_seed(4))
    whole = decoder(tokens, dropout_key=9)
    last = decoder(tokens[2:], samples_B=torch.tensor([2]), dropout_key=9)
    torch.testing.assert_close(whole[2:], last, rtol=0, atol=1e-12)
    assert not torch.allclose(whole, decoder.eval()(tokens), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:TensorFloat32")  # said by the compiler
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_gpu_in_bf16(packed, compiled):
    """Heads as published: 192 features, 64 of them turned, values of 128."""
    sizes = {"head_dim": 192, "rotary_dim": 64, "value_dim": 128, "kv_rank": 48, "q_rank": 40, "num_kv_heads": 3}
    wide = build(hidden_size=64, init_std=0.1, **sizes)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.bfloat16())
    narrow = build(torch.bfloat16, hidden_size=64, init_std=0.1, **sizes).cuda()
    narrow.load_state_dict(wide.state_dict())
    tokens = torch.randint(0, 37, (2, 130), generator=torch.Generator().manual_seed(3))
    documents = (torch.arange(130) // 47).expand(2, -1) if packed else None
    positions = torch.arange(130) % 47 if packed else torch.arange(130)
    made = []
    for decoder, device in ((wide, "cpu"), (narrow, "cuda")):
        if compiled and device == "cuda":
            for block in decoder.blocks:
                block.compile()
        parts = (x.to(device) if x is not None else None for x in (tokens, positions.expand(2, -1), documents))
        out = decoder(*parts)
        out.float().square().mean().backward()
        made.append([out, *(parameter.grad for parameter in decoder.parameters())])
    for a, b in zip(*made, strict=True):
        assert (b.double().cpu() - a).abs().max() <= 6e-2 * a.abs().max()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_rank": 0, "q_rank": 7, "value_dim": 0}, "model.q_rank 7 needs model.kv_rank of at least 1, found 0"),
        ({"kv_rank": 0, "q_rank": 0}, "model.value_dim 5 needs model.kv_rank of at least 1, found 0"),
        (
            {"rotary_dim": 0},
            "model.kv_rank 6 needs model.rotary_dim, the features of a key that turn and that all heads share, from 2 "
            "to below head_dim 10, found 0",
        ),
        ({"value_dim": 11}, "model.value_dim must be at most head_dim 10 (0 = as many), found 11"),
        (
            {"num_kv_heads": 1},
            "model.kv_rank 6 makes a key and a value for each of num_heads 3, found num_kv_heads 1: set it to 3",
        ),
        (
            {"qk_norm": True},
            "model.qk_norm true with model.kv_rank 6: latent attention has norms of its own and no biases before its "
            "heads, so set qk_norm to false",
        ),
        (
            {"qkv_bias": True},
            "model.qkv_bias true with model.kv_rank 6: latent attention has norms of its own and no biases before its "
            "heads, so set qkv_bias to false",
        ),
    ],
)
def test_half_given_configurations_are_refused(changes, sentence):
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(TINY, **changes)
    assert str(refused.value) == sentence
