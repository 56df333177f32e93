"""Routers against a loop over tokens: scores, bias, groups, losses, room; what does not count, what no cut changes."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch.utils.flop_counter

from interlace import spec
from interlace.config import ModelConfig
from interlace.errors import ConfigError
from interlace.models.decoder import Decoder, initialise
from interlace.models.moe import mix
from interlace.models.router import Room, Rule, choose, route, z_loss

SIZES = {
    "vocab_size": 29,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 6,
    "ffn_size": 16,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_ffn_size": 7,
    "init_std": 0.3,
}
DEEPSEEK = {
    "router_scores": "sigmoid",
    "router_bias": True,
    "router_groups": 3,
    "router_top_groups": 2,
    "router_scale": 2.5,
}
KINDS = {
    "softmax": {},
    "softmax with groups and bias": {"router_groups": 3, "router_top_groups": 1, "router_bias": True},
    "sigmoid": {"router_scores": "sigmoid", "norm_topk": False},
    "deepseek": DEEPSEEK,
    "deepseek, one of two": DEEPSEEK | {"router_groups": 2, "router_top_groups": 1, "experts_per_token": 3},
    "shared": {"shared_ffn_size": 9},
    "shared with a gate": {"shared_ffn_size": 5, "shared_gate": True, "router_fp32": True},
    "little room": {"capacity_factor": 0.7},
    "everything": DEEPSEEK | {"capacity_factor": 1.0, "shared_ffn_size": 9, "shared_gate": True, "router_fp32": True},
}
LOSSES = {"router_aux_loss": 0.1, "router_z_loss": 0.05}


def build(seed=3, **changes):
    cfg = ModelConfig(**(SIZES | changes))
    decoder = Decoder(cfg, dtype=torch.float64)
    initialise(decoder, cfg, seed)
    generator = torch.Generator().manual_seed(seed)
    for buffer in decoder.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)  # negative ones among them
    return decoder


def sequences(batch=4, length=6, seed=0):
    """Tokens and labels; sequences have unlike numbers of labels, the last none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, 29, (2, batch, length), generator=generator)
    for row in range(batch):
        labels[row, max(0, length - row * length // (batch - 1)) :] = -100
    return tokens, labels


def chosen_experts(scores, bias, cfg):
    """Of one token, in the order of the k largest."""
    biased = scores if bias is None else scores + bias
    size = cfg.num_experts // cfg.router_groups
    worth = []
    for group in range(cfg.router_groups):
        best = sorted(biased[group * size : (group + 1) * size].tolist(), reverse=True)
        worth.append(sum(best[:2]) if cfg.router_scores == "sigmoid" else best[0])
    opened = sorted(range(cfg.router_groups), key=lambda group: -worth[group])[: cfg.router_top_groups]
    candidates = [e for e in range(cfg.num_experts) if e // size in opened]
    return sorted(candidates, key=lambda e: -biased[e].item())[: cfg.experts_per_token]


def token_by_token(moe, cfg, x_BTD):
    """Every token through its experts, one at a time; the choices of each expert, and how many were dropped."""
    out = torch.zeros_like(x_BTD)
    load, dropped = [0] * cfg.num_experts, 0
    limit = math.inf
    if cfg.capacity_factor:
        limit = math.ceil(cfg.capacity_factor * x_BTD.shape[1] * cfg.experts_per_token / cfg.num_experts)
    for b in range(x_BTD.shape[0]):
        taken = [0] * cfg.num_experts
        for t in range(x_BTD.shape[1]):
            x = x_BTD[b, t]
            logits = moe.router.weight @ x
            scores = logits.sigmoid() if cfg.router_scores == "sigmoid" else logits.softmax(0)
            chosen = chosen_experts(scores, moe.bias, cfg)
            total = sum(scores[e] for e in chosen) if cfg.norm_topk else 1.0
            for e in chosen:
                load[e] += 1
                if taken[e] >= limit:
                    dropped += 1
                    continue
                taken[e] += 1
                gated = F.silu(moe.gate.weight[e] @ x) * (moe.up.weight[e] @ x)
                out[b, t] = out[b, t] + cfg.router_scale * scores[e] / total * (moe.down.weight[e] @ gated)
            if moe.shared is not None:
                made = moe.shared.down.weight @ (F.silu(moe.shared.gate.weight @ x) * (moe.shared.up.weight @ x))
                out[b, t] = out[b, t] + (
                    made if moe.shared_gate is None else (moe.shared_gate.weight @ x).sigmoid() * made
                )
    return out, load, dropped


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_a_loop_over_tokens(kind):
    decoder = build(**KINDS[kind])
    moe = decoder.blocks[0].moe
    torch.manual_seed(0)
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    context = decoder.context((2, 7), x.device)
    found = moe(x, context)
    expected, load, dropped = token_by_token(moe, decoder.cfg, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # routing is fp32 in both dtypes
    weight = torch.randn_like(x)
    inputs = (x, *moe.parameters())
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=6e-6)
    assert context.take_routed()["blocks.0.moe"].load_Y.tolist() == [*load, dropped]
    assert (dropped > 0) == (decoder.cfg.capacity_factor > 0)


# --- choosing ------------------------------------------------------------------------------------------------------


def test_the_bias_chooses_and_weighs_nothing():
    """arXiv 2412.19437, section 2.1.2: scores without the bias are the weights, and no gradient reaches it."""
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]], requires_grad=True)
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0], requires_grad=True)
    weights, experts, scores = route(logits, Rule(2, scores="sigmoid"), bias)
    assert experts.tolist() == [[[3, 1]]]
    expected = torch.tensor([-1.0, 1.0]).sigmoid()
    torch.testing.assert_close(weights[0, 0], expected / expected.sum())
    torch.testing.assert_close(scores, logits.sigmoid())
    weights[0, 0, 0].backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, [1, 3]].abs().min() > 0
    assert bias.grad is None


def test_a_closed_group_stays_closed_where_biased_scores_are_negative():
    """A closed expert at 0 would be chosen before open ones below 0 (as with `masked_fill(..., 0.0)`)."""
    scores = torch.tensor([[[0.5, 0.4, 0.1, 0.1]]])
    bias = torch.tensor([-1.0, -1.0, -2.0, -2.0])
    rule = Rule(2, scores="sigmoid", groups=2, top_groups=1)
    assert choose(scores, rule, bias).tolist() == [[[0, 1]]]


def test_groups_are_worth_two_sigmoid_scores_or_one_probability():
    scores = torch.tensor([[[0.9, 0.0, 0.6, 0.5, 0.1, 0.1]]])
    assert choose(scores, Rule(2, scores="sigmoid", groups=3, top_groups=1)).tolist() == [[[2, 3]]]
    assert choose(scores, Rule(2, scores="softmax", groups=3, top_groups=1)).tolist() == [[[0, 1]]]
    alone = Rule(1, scores="sigmoid", groups=6, top_groups=2)  # groups of one have no second score
    assert choose(scores, alone).tolist() == [[[0]]]


def test_scores_of_zero_give_weights_of_zero():
    weights, _, _ = route(torch.full((1, 1, 4), -200.0), Rule(2, scores="sigmoid"))
    assert weights.tolist() == [[[0.0, 0.0]]]


def test_a_router_in_fp32_multiplies_in_fp32():
    """Of bf16 weights and rows; the product in bf16 differs, and gradients stay bf16."""
    cfg = ModelConfig(**(SIZES | {"router_fp32": True, "hidden_size": 64}))
    decoder = Decoder(cfg, dtype=torch.bfloat16)
    initialise(decoder, cfg, 0)
    moe = decoder.blocks[0].moe
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ moe.router.weight.double().t()
    found = moe._logits(x)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-6 * exact.abs().max() < (moe.router(x) - exact).abs().max()
    found.sum().backward()
    assert moe.router.weight.grad.dtype == torch.bfloat16


# --- the bias, outside of the optimizer ----------------------------------------------------------------------------


def test_the_bias_moves_by_the_rate_towards_the_mean_load():
    decoder = build(router_bias=True, router_bias_rate=0.25)
    before = [block.moe.bias.clone() for block in decoder.blocks]
    decoder.steer(torch.tensor([[3, 0, 2, 1, 0, 0, 9], [2, 2, 2, 2, 2, 2, 0]]))  # the last is what was dropped
    moved = [block.moe.bias - was for block, was in zip(decoder.blocks, before, strict=True)]
    torch.testing.assert_close(moved[0], torch.tensor([-0.25, 0.25, -0.25, 0.0, 0.25, 0.25]))
    assert torch.equal(moved[1], torch.zeros(6))
    decoder.steer(torch.zeros(2, 7, dtype=torch.int64))  # a step without labels
    assert torch.equal(decoder.blocks[1].moe.bias, before[1])


def test_the_bias_is_a_buffer_that_no_optimizer_sees():
    decoder = build(router_bias=True)
    names = [f"blocks.{layer}.moe.bias" for layer in range(2)]
    assert [name for name, _ in decoder.named_buffers()] == names
    assert not set(names) & {name for name, _ in decoder.named_parameters()}
    assert set(names) < decoder.state_dict().keys()
    assert all(buffer.dtype == torch.float32 for buffer in Decoder(decoder.cfg, dtype=torch.bfloat16).buffers())


def test_uneven_loads_become_even():
    """40 steps of the bias alone: the most loaded expert falls from twice the mean load to near it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 64, 6, generator=generator) + torch.tensor([1.5, 1.0, 0.0, 0.0, -0.5, -1.5])
    moe = build(router_bias=True, router_scores="sigmoid", router_bias_rate=0.01).blocks[0].moe
    moe.bias.zero_()
    busiest = []
    for _ in range(40):
        load = torch.bincount(route(logits, moe.rule, moe.bias)[1].flatten(), minlength=6)
        busiest.append(load.max().item() / (8 * 64 * 2 / 6))
        moe.steer(load)
    assert busiest[0] > 1.8
    assert busiest[-1] < 1.15


def test_passes_without_gradients_are_not_counted_and_loads_are_taken_once():
    decoder = build(router_bias=True)
    tokens, labels = sequences()
    with torch.no_grad():
        decoder.loss(tokens, labels)
    assert decoder.take_loads().tolist() == [[0] * 7] * 2
    decoder.loss(tokens, labels)[0].backward()
    taken = decoder.take_loads()
    assert taken[:, :-1].sum(dim=1).tolist() == [2 * int((labels != -100).sum())] * 2
    assert decoder.take_loads().tolist() == [[0] * 7] * 2
    assert Decoder(ModelConfig(**(SIZES | {"num_experts": 0}))).take_loads() is None


# --- losses, and what counts -----------------------------------------------------------------------------------------


def test_z_loss_is_the_sum_of_squared_logarithms():
    """arXiv 2202.08906, eq. 5, as a sum over tokens."""
    logits = torch.tensor([[[0.0, 0.0], [1.0, 3.0]], [[-2.0, 0.5], [9.0, 9.0]]])
    expected = [[math.log(sum(map(math.exp, row))) ** 2 for row in part] for part in logits.tolist()]
    assert z_loss(logits).tolist() == pytest.approx([sum(part) for part in expected])
    assert z_loss(logits, torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == pytest.approx(
        [expected[0][0], expected[1][1]]
    )


def sums(decoder, parts):
    """The routers' part of the loss, with the main loss left out, its gradients, and the loads; summed over parts."""
    decoder.zero_grad()
    total, count = 0.0, 0
    for tokens, labels in parts:
        context = decoder.context(tuple(tokens.shape), tokens.device, labels_BT=labels)
        decoder.hidden(tokens, context)
        counts_B = (labels != -100).sum(1)
        total = total + decoder.router_loss(context, counts_B)
        count += int(counts_B.sum())
    (total / count).backward()
    return [block.moe.router.weight.grad.clone() for block in decoder.blocks], decoder.take_loads()


@pytest.mark.parametrize("losses", [LOSSES, {"router_aux_loss": 0.1}, {"router_z_loss": 0.1}], ids="+".join)
@pytest.mark.parametrize("kind", ["softmax", "deepseek", "little room"])
def test_no_cut_into_micro_batches_changes_losses_or_loads(kind, losses):
    """NVIDIA-NeMo/Automodel#3359, NVIDIA/Megatron-LM#3768, pytorch/torchtitan#3000: coefficients must not grow with
    accumulation; label counts uneven."""
    decoder = build(**(KINDS[kind] | losses))
    tokens, labels = sequences()
    whole, load = sums(decoder, [(tokens, labels)])
    assert all(gradient.abs().max() > 1e-4 for gradient in whole)
    for size in (1, 2, 3):
        cut, load_of_cut = sums(decoder, list(zip(tokens.split(size), labels.split(size), strict=True)))
        assert torch.equal(load_of_cut, load)
        for a, b in zip(cut, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * b.abs().max().item())


@pytest.mark.parametrize("kind", ["softmax", "deepseek", "little room"])
def test_padded_tokens_count_nowhere(kind):
    """NVIDIA/Megatron-LM#7452 (10), #7481: other tokens in the padding change neither losses nor loads; nor does more
    padding, as long as there is room for all."""
    decoder = build(**(KINDS[kind] | LOSSES))
    tokens, labels = sequences()
    expected, load = sums(decoder, [(tokens, labels)])
    assert load[:, :-1].sum() < 2 * tokens.numel() * 2
    other = torch.where(labels == -100, (tokens + 7) % 29, tokens)
    assert not torch.equal(other, tokens)
    found, load_of_other = sums(decoder, [(other, labels)])
    assert torch.equal(load_of_other, load)
    if not decoder.cfg.capacity_factor:
        longer, load_of_longer = sums(decoder, [(F.pad(tokens, (0, 3)), F.pad(labels, (0, 3), value=-100))])
        assert torch.equal(load_of_longer, load)
        found += longer
    for number, a in enumerate(found):
        torch.testing.assert_close(a, expected[number % 2], rtol=0, atol=1e-6 * expected[number % 2].abs().max().item())


def test_losses_come_in_with_their_coefficients():
    tokens, labels = sequences()
    both, none = build(**DEEPSEEK, **LOSSES), build(**DEEPSEEK)
    context = both.context(tuple(tokens.shape), tokens.device, labels_BT=labels)
    both.hidden(tokens, context)
    losses_2B = torch.stack([told.losses_2B for told in context.take_routed().values()]).sum(0)
    counts_B = (labels != -100).sum(1)
    expected = none.loss(tokens, labels)[0] + 0.1 * (losses_2B[0] * counts_B).sum() + 0.05 * losses_2B[1].sum()
    torch.testing.assert_close(both.loss(tokens, labels)[0], expected, rtol=1e-6, atol=0)
    assert losses_2B[:, -1].tolist() == [0.0, 0.0]  # the sequence without labels


def test_the_balance_loss_reads_the_choices_of_the_scores_alone():
    """arXiv 2412.19437, eq. 18: with a bias that turns every choice round, the loss stays."""
    tokens, labels = sequences()
    found = []
    for value in (0.0, 50.0):
        decoder = build(router_scores="sigmoid", router_bias=True, router_aux_loss=0.1, num_layers=1)
        for buffer in decoder.buffers():
            buffer.copy_(torch.linspace(-value, value, 6))
        context = decoder.context(tuple(tokens.shape), tokens.device, labels_BT=labels)
        decoder.hidden(tokens, context)
        found.append(context.take_routed()["blocks.0.moe"])
    assert torch.equal(found[0].losses_2B, found[1].losses_2B)
    assert not torch.equal(found[0].load_Y, found[1].load_Y)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_of_a_block_changes_nothing(kind):
    decoder = build(**(KINDS[kind] | LOSSES))
    tokens, labels = sequences()
    decoder.loss(tokens, labels)[0].backward()
    expected, loads = [parameter.grad.clone() for parameter in decoder.parameters()], decoder.take_loads()
    decoder.zero_grad()
    for block in decoder.blocks:
        plain = block.forward
        block.forward = lambda x, context, plain=plain: torch.utils.checkpoint.checkpoint(
            plain, x, context, use_reentrant=False
        )
    decoder.loss(tokens, labels)[0].backward()
    assert torch.equal(decoder.take_loads(), loads)
    for parameter, gradient in zip(decoder.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def test_idle_experts_get_zero_gradients_when_the_bias_empties_them():
    """NVIDIA-NeMo/Automodel#935, #3680: zeros, not none, whatever keeps tokens away."""
    decoder = build(router_scores="sigmoid", router_bias=True, **LOSSES)
    for buffer in decoder.buffers():
        buffer.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0, 0.0]))
    tokens, labels = sequences()
    decoder.loss(tokens, labels)[0].backward()
    assert decoder.take_loads()[:, 2:].sum() == 0
    for block in decoder.blocks:
        for weight in (block.moe.gate.weight, block.moe.up.weight, block.moe.down.weight):
            assert torch.equal(weight.grad[2:], torch.zeros_like(weight.grad[2:]))
            assert weight.grad[:2].abs().amax(dim=(1, 2)).min() > 0


# --- room ------------------------------------------------------------------------------------------------------------


def test_room_for_more_than_there_is_drops_nothing():
    """deepspeedai/DeepSpeed#8155: 2 experts, top-2, factor 2.0, 3 tokens."""
    sizes = {"num_experts": 2, "experts_per_token": 2}
    roomy, dropless = build(**sizes, capacity_factor=2.0), build(**sizes)
    x = torch.randn(1, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context = roomy.context((1, 3), x.device)
    assert torch.equal(roomy.blocks[0].moe(x, context), dropless.blocks[0].moe(x, context))
    for length in (1, 2, 3, 7):
        assert roomy.blocks[0].moe.room.limit(length) == 2 * length


@pytest.mark.parametrize(("factor", "length", "limit"), [(1.1, 10, 11), (1.0, 7, 7), (0.01, 7, 1), (1.25, 6, 8)])
def test_limits_round_up(factor, length, limit):
    assert Room(2, 2, factor).limit(length) == limit


def test_earlier_tokens_come_first_and_no_later_one_changes_them():
    experts = torch.tensor([[[0, 1], [0, 2], [0, 1], [1, 0]], [[2, 1], [2, 0], [2, 1], [2, 0]]])
    room = Room(2, 3, 0.75)
    assert room.limit(4) == 2
    assert room.turns(experts).tolist() == [
        [[0, 0], [1, 0], [2, 1], [2, 3]],
        [[0, 0], [1, 0], [2, 1], [3, 1]],
    ]
    kept = room(experts)
    assert kept.tolist() == [
        [[True, True], [True, True], [False, True], [False, False]],
        [[True, True], [True, True], [False, True], [False, True]],
    ]
    decoder = build(capacity_factor=0.7)
    tokens, _ = sequences()
    before = decoder(tokens)
    tokens[:, 4:] = (tokens[:, 4:] + 3) % 29
    after = decoder(tokens)
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=1e-12)
    assert (after[:, 4:] - before[:, 4:]).abs().max() > 1e-2


def test_nothing_is_dropped_in_evaluation():
    tokens, _ = sequences()
    narrow, dropless = build(capacity_factor=0.3), build()
    assert not torch.equal(narrow(tokens), dropless(tokens))
    assert torch.equal(narrow.eval()(tokens), dropless(tokens))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_dropped_choices_are_not_computed(share):
    """No row of theirs meets an expert, and nothing of what stands in their place gets out, forward or backward."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 3, generator=generator)
    experts_Nk = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    weights_Nk = torch.rand(9, 2, generator=generator)
    dropped = torch.rand(9, 2, generator=generator) < share
    gate, up = (torch.randn(4, 6, 3, generator=generator) for _ in range(2))
    down = torch.randn(4, 3, 6, generator=generator)
    results = []
    for drops in (False, True):
        inputs = [t.clone().requires_grad_() for t in (x, weights_Nk, gate, up, down)]
        weighed = inputs[1].masked_fill(dropped, 0.0)
        chosen = experts_Nk.masked_fill(dropped, 4) if drops else experts_Nk
        made = mix(inputs[0], weighed, chosen, *inputs[2:], drops=drops)
        made.square().sum().backward()
        results.append([made.detach(), *(t.grad for t in inputs)])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.gpu
def test_dropped_choices_on_a_gpu():
    """The grouped product leaves rows beyond its last end unwritten, in its output and in the gradient of its input."""
    generator = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(*shape, generator=generator) for shape in ((37, 16), (5, 24, 16), (5, 24, 16)))
    down, weights = torch.randn(5, 16, 24, generator=generator), torch.rand(37, 2, generator=generator)
    experts_Nk = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(37)])
    dropped = torch.rand(37, 2, generator=generator) < 0.4
    weights, experts_Nk = weights.masked_fill(dropped, 0.0), experts_Nk.masked_fill(dropped, 5)
    narrow = [t.bfloat16().cuda().requires_grad_() for t in (x, gate / 4, up / 4, down / 5)]
    wide = [t.detach().double().cpu().requires_grad_() for t in narrow]
    torch.full((1 << 20,), float("nan"), device="cuda")  # what freed memory holds
    found = mix(narrow[0], weights.cuda(), experts_Nk.cuda(), *narrow[1:], drops=True)
    expected = mix(wide[0], weights.double(), experts_Nk, *wide[1:], drops=True)
    pairs = zip(
        (found, *torch.autograd.grad(found.sum(), narrow)),
        (expected, *torch.autograd.grad(expected.sum(), wide)),
        strict=True,
    )
    for a, b in pairs:
        assert (a.double().cpu() - b).abs().max() / b.abs().max() < 3e-2


# --- configuration and counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_groups": 4}, "model.router_groups must divide num_experts 6, found 4: nearest is 3"),
        ({"router_top_groups": 2}, "model.router_top_groups must be at most router_groups 1, found 2"),
        (
            {"router_groups": 6, "router_top_groups": 1},
            "model.router_top_groups 1 opens 1 experts to a token, found experts_per_token 2: nearest is "
            "router_top_groups 2",
        ),
        ({"router_scores": "relu"}, 'model.router_scores must be one of softmax, sigmoid, found "relu"'),
        ({"shared_gate": True}, "model.shared_gate needs model.shared_ffn_size of at least 1, found 0"),
        (
            {"num_experts": 0, "router_bias": True},
            "model.router_bias true needs model.num_experts of at least 1, found 0",
        ),
        (
            {"num_experts": 0, "capacity_factor": 1.5},
            "model.capacity_factor 1.5 needs model.num_experts of at least 1, found 0",
        ),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**(SIZES | change))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_buffers_and_flops_are_those_of_the_module(kind):
    """NVIDIA-NeMo/Megatron-Bridge#3744, jranaraki/vllm-fit#27: counted from the configuration alone, exactly."""
    cfg = dataclasses.replace(ModelConfig(**(SIZES | KINDS[kind])), capacity_factor=0.0)
    decoder = Decoder(cfg)
    initialise(decoder, cfg, 0)
    for counted, built in (
        (spec.parameters(cfg), decoder.named_parameters()),
        (spec.buffers(cfg), decoder.named_buffers()),
    ):
        assert [(p.name, p.shape) for p in counted] == [(name, tuple(tensor.shape)) for name, tensor in built]
    shared = cfg.num_layers * (3 * 12 * cfg.shared_ffn_size + 12 * cfg.shared_gate)
    plain = spec.active_parameters(ModelConfig(**SIZES | {"experts_per_token": cfg.experts_per_token}))
    assert spec.active_parameters(cfg) == plain + shared
    tokens, _ = sequences()
    counter = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counter:
        decoder(tokens).sum().backward()
    found = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert found == spec.executed_matmul_flops(cfg, 4, 6)["matmul"]
