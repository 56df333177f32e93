"""Experts against a loop over tokens; routing, the balance loss, idle experts."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from interlace.config import ModelConfig
from interlace.models.decoder import Decoder, initialise
from interlace.models.moe import mix
from interlace.models.router import Rule, balance_loss, load, route

CFG = ModelConfig(
    vocab_size=29,
    hidden_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    ffn_size=16,
    num_experts=5,
    experts_per_token=2,
    expert_ffn_size=7,
    router_aux_loss=0.1,
    init_std=0.3,
)


def build(**changes):
    cfg = dataclasses.replace(CFG, **changes)
    decoder = Decoder(cfg, dtype=torch.float64)
    initialise(decoder, cfg, seed=3)
    return decoder


def token_by_token(moe, x_BTD, k, normalise):
    """Every token through its experts, one at a time."""
    out = torch.zeros_like(x_BTD)
    for b, t in ((b, t) for b in range(x_BTD.shape[0]) for t in range(x_BTD.shape[1])):
        x = x_BTD[b, t]
        probabilities = (moe.router.weight @ x).softmax(0)
        chosen = probabilities.argsort(descending=True)[:k]
        share = probabilities[chosen].sum() if normalise else 1.0
        for e in chosen.tolist():
            gated = F.silu(moe.gate.weight[e] @ x) * (moe.up.weight[e] @ x)
            out[b, t] = out[b, t] + probabilities[e] / share * (moe.down.weight[e] @ gated)
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_experts_equal_a_loop_over_tokens(k, normalise):
    decoder = build(experts_per_token=k, norm_topk=normalise)
    moe = decoder.blocks[0].moe
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    found = moe(x, decoder.context((2, 5), x.device))
    expected = token_by_token(moe, x, k, normalise)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # routing is fp32 in both dtypes
    weight = torch.randn_like(x)
    inputs = (x, *moe.parameters())
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_idle_experts_get_zero_gradients():
    """NVIDIA-NeMo/Automodel#935: an expert without tokens must not lack a gradient."""
    torch.manual_seed(0)
    gate, up = (torch.randn(4, 6, 3, requires_grad=True) for _ in range(2))
    down = torch.randn(4, 3, 6, requires_grad=True)
    experts_Nk = torch.tensor([[0, 1], [1, 0], [0, 1]])
    mix(torch.randn(3, 3), torch.rand(3, 2), experts_Nk, gate, up, down).sum().backward()
    for weight in (gate, up, down):
        assert torch.equal(weight.grad[2:], torch.zeros_like(weight.grad[2:]))
        assert weight.grad[:2].abs().amin(dim=(1, 2)).max() > 0


def test_route_picks_the_largest():
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0]]])
    weights, experts, probabilities = route(logits, Rule(2))
    assert experts.tolist() == [[[1, 3]]]
    torch.testing.assert_close(weights, torch.tensor([3.0, 2.0]).softmax(0)[None, None])
    torch.testing.assert_close(probabilities, logits.softmax(-1))
    assert route(logits.bfloat16(), Rule(2))[0].dtype == torch.float32


def test_balance_loss_is_one_when_even_and_grows_with_the_tilt():
    even = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])[None]
    assert torch.equal(load(even, 4), torch.full((1, 4), 2.0))
    assert balance_loss(load(even, 4), torch.ones(1, 4), 2).tolist() == [1.0]
    tilted = torch.zeros(1, 4, 2, dtype=torch.long)
    tilted[..., 1] = 1
    mass = torch.tensor([[2.0, 2.0, 0.0, 0.0]])
    assert balance_loss(load(tilted, 4), mass, 2).tolist() == [2.0]


def router_gradient(decoder, parts):
    """d(balance part of the loss)/d(router): the main loss is left out, as with its weight set to zero."""
    decoder.zero_grad()
    total, count = 0.0, 0
    for tokens, labels in parts:
        context = decoder.context(tuple(tokens.shape), tokens.device, labels_BT=labels)
        decoder.hidden(tokens, context)
        counts_B = (labels != -100).sum(1)
        total = total + decoder.router_loss(context, counts_B)
        count += int(counts_B.sum())
    (total / count).backward()
    return [block.moe.router.weight.grad.clone() for block in decoder.blocks]


def test_balance_loss_does_not_depend_on_the_cut_into_micro_batches():
    """NVIDIA/Megatron-LM#3768: the router's gradient must not change with accumulation, label counts uneven."""
    decoder = build()
    torch.manual_seed(0)
    tokens = torch.randint(0, 29, (4, 6))
    labels = torch.randint(0, 29, (4, 6))
    for row, valid in enumerate((6, 5, 2, 0)):
        labels[row, valid:] = -100
    whole = router_gradient(decoder, [(tokens, labels)])
    assert all(gradient.abs().max() > 1e-4 for gradient in whole)
    for size in (1, 2, 3):
        cut = router_gradient(decoder, list(zip(tokens.split(size), labels.split(size), strict=True)))
        for a, b in zip(cut, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_loss_adds_coefficient_times_balance_times_labels():
    with_loss, without = build(router_aux_loss=0.1), build(router_aux_loss=0.0)
    tokens = torch.arange(12).view(2, 6)
    labels = tokens + 1
    labels[1, 2:] = -100
    context = with_loss.context((2, 6), tokens.device, labels_BT=labels)
    with_loss.hidden(tokens, context)
    losses_B = torch.stack([told.losses_2B[0] for told in context.take_routed().values()]).sum(0)
    assert len(losses_B) == 2
    expected = without.loss(tokens, labels)[0] + 0.1 * (losses_B[0] * 6 + losses_B[1] * 2)
    torch.testing.assert_close(with_loss.loss(tokens, labels)[0], expected, rtol=1e-6, atol=0)


def test_recompute_leaves_no_second_balance_loss():
    decoder = build()
    tokens = torch.arange(12).view(2, 6)
    (decoder.loss(tokens, tokens)[0]).backward()
    expected = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    for block in decoder.blocks:
        plain = block.forward
        block.forward = lambda x, context, plain=plain: torch.utils.checkpoint.checkpoint(
            plain, x, context, use_reentrant=False
        )
    (decoder.loss(tokens, tokens)[0]).backward()
    for parameter, gradient in zip(decoder.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:TensorFloat32")  # said by the compiler
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_compiled_experts_equal_plain_ones(k: int, drops: bool) -> None:
    """Numbers of rows that are no multiple of 8: the grouped product then wants those of an expert to lie together."""
    torch.manual_seed(k)
    x, gate, up = torch.randn(203, 64), torch.randn(11, 48, 64) / 8, torch.randn(11, 48, 64) / 8
    down, weights = torch.randn(11, 64, 48) / 7, torch.rand(203, k)
    experts_Nk = torch.rand(203, 11 + drops).argsort(dim=1)[:, :k].cuda()  # number 11 is dropped
    weights = weights.cuda().masked_fill(experts_Nk == 11, 0.0)
    made = []
    for run in (mix, torch.compile(mix, dynamic=False)):
        own = [t.bfloat16().cuda().requires_grad_() for t in (x, gate, up, down)]
        own.append(weights.clone().requires_grad_())
        found = run(own[0], own[4], experts_Nk, *own[1:4], drops)
        made.append((found, *torch.autograd.grad((found.float() ** 2).sum(), own)))
    for plain, compiled in zip(*made, strict=True):
        assert (plain.float() - compiled.float()).abs().max() <= 4e-2 * plain.float().abs().max()


@pytest.mark.gpu
def test_grouped_product_equals_a_product_per_expert():
    torch.manual_seed(0)
    x, gate, up = torch.randn(37, 16), torch.randn(5, 24, 16) / 4, torch.randn(5, 24, 16) / 4
    down, weights = torch.randn(5, 16, 24) / 5, torch.rand(37, 2)
    experts_Nk = torch.stack((torch.zeros(37, dtype=torch.long), torch.randint(2, 5, (37,))), 1)  # expert 1 idle
    narrow = [t.bfloat16().cuda().requires_grad_() for t in (x, gate, up, down)]
    wide = [t.detach().double().cpu().requires_grad_() for t in narrow]
    found = mix(narrow[0], weights.cuda(), experts_Nk.cuda(), *narrow[1:])
    expected = mix(wide[0], weights.double(), experts_Nk, *wide[1:])
    pairs = zip(
        (found, *torch.autograd.grad(found.sum(), narrow)),
        (expected, *torch.autograd.grad(expected.sum(), wide)),
        strict=True,
    )
    for a, b in pairs:
        assert (a.double().cpu() - b).abs().max() / b.abs().max() < 3e-2
