"""Attention against its formula in float64: every pattern, grouped heads, gradients, dropout."""

import dataclasses
import warnings

import pytest
import torch

from interlace.config import ModelConfig
from interlace.models import attention as subject
from interlace.models.attention import Pattern, attention
from interlace.models.decoder import Decoder, initialise

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2], [4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]])
CASES = {
    "causal": (None, None),
    "documents": (DOCUMENTS, None),
    "window": (None, 4),
    "documents and window": (DOCUMENTS, 3),
    "window of one": (None, 1),
    "window longer than the sequence": (None, 50),
    "documents in pieces": (torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 0, 2, 2]] * 2), None),
}


def sees(t, s, documents_T, window):
    """The definition, one pair at a time."""
    same = documents_T is None or documents_T[t] == documents_T[s]
    return s <= t and same and (window is None or t - s < window)


def formula(q, k, v, documents, window):
    """Attention one query at a time, float64: [B T H E]."""
    B, T, H, E = q.shape
    out = torch.zeros_like(q)
    for b in range(B):
        for t in range(T):
            seen = [s for s in range(T) if sees(t, s, None if documents is None else documents[b], window)]
            for h in range(H):
                kv = h // (H // k.shape[2])
                weights = (k[b, seen, kv] @ q[b, t, h] / E**0.5).softmax(0)
                out[b, t, h] = weights @ v[b, seen, kv]
    return out


def qkv(heads, kv_heads, head_dim=6, batch=2, length=13, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
def test_attention_equals_the_formula(name, heads, kv_heads):
    documents, window = CASES[name]
    q, k, v = qkv(heads, kv_heads)
    expected = formula(q, k, v, documents, window)
    found = attention(q, k, v, Pattern(2, 13, CPU, documents, window))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_written_out_path_that_keeps_everything_equals_the_fused_one(name):
    q, k, v = qkv(6, 2)
    pattern = Pattern(2, 13, CPU, *CASES[name])
    keep = torch.ones(2, 6, 13, 13, dtype=torch.bool)
    torch.testing.assert_close(attention(q, k, v, pattern, 0.0, keep), attention(q, k, v, pattern), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_runs_describe_the_mask(name):
    """The offsets given to varlen attention say the same as the mask, or there are none."""
    documents, window = CASES[name]
    pattern = Pattern(2, 13, CPU, documents, window)
    if name == "documents in pieces":
        assert pattern.runs is None
        return
    offsets, longest = pattern.runs
    assert offsets.dtype == torch.int32
    assert longest == offsets.diff().max()
    run = torch.bucketize(torch.arange(26), offsets[1:], right=True)
    column = torch.arange(26)
    seen = (run[:, None] == run[None]) & (column[:, None] >= column[None])
    if pattern.window is not None:
        seen &= column[:, None] - column[None] < pattern.window
    mask = torch.zeros(26, 26, dtype=torch.bool)
    for b in range(2):
        rows = slice(13 * b, 13 * b + 13)
        mask[rows, rows] = pattern.mask_B1TS.expand(2, 1, 13, 13)[b, 0]
    assert torch.equal(seen, mask)


def test_only_a_pattern_without_documents_and_window_is_plain():
    for name, (documents, window) in CASES.items():
        plain = Pattern(2, 13, CPU, documents, window).plain
        assert plain == (name in ("causal", "window longer than the sequence")), name


# --- through the model ---------------------------------------------------------------------------------------------

TINY = ModelConfig(
    vocab_size=31, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, ffn_size=20, init_std=0.3
)


def model(**changes):
    cfg = dataclasses.replace(TINY, **changes)
    built = Decoder(cfg, dtype=torch.float64)
    initialise(built, cfg, seed=1)
    return built


def test_documents_never_see_each_other():
    """huggingface/trl#6843: change a token of the first document, nothing of the second may move, and it equals the
    second document alone."""
    decoder = model()
    tokens = torch.arange(16)[None] % 31
    documents = torch.tensor([[0] * 8 + [1] * 8])
    positions = torch.arange(8).repeat(2)[None]
    before = decoder(tokens, positions, documents)
    changed = tokens.clone()
    changed[0, 2] = 30
    after = decoder(changed, positions, documents)
    assert torch.equal(before[:, 8:], after[:, 8:])
    assert not torch.equal(before[:, 2:8], after[:, 2:8])
    torch.testing.assert_close(before[:, 8:], decoder(tokens[:, 8:]), rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 8:], decoder(tokens)[:, 8:])  # joined is something else


@pytest.mark.parametrize(
    ("layers", "reach"), [((0, 1), 6), (None, 6), ((1,), 16), ((), 16)], ids=["both", "all", "second", "none"]
)
def test_a_window_reaches_as_far_as_its_layers_allow(layers, reach):
    """huggingface/accelerate#4177 (a window replaced by plain causal): two layers of window 4 pass on 2 * 3 columns."""
    decoder = model(sliding_window=4, window_layers=layers)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 0] = 30
    moved = (decoder(tokens) - decoder(changed)).abs().amax(-1)[0] > 0
    assert moved.nonzero().max().item() == min(reach, 15)


def test_attention_dropout_is_said_once_and_cut_independently():
    decoder = model(attention_dropout=0.3)
    tokens = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(0))
    subject.say_once.cache_clear()
    with pytest.warns(UserWarning, match="written out"):
        whole = decoder(tokens, dropout_key=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = [decoder(tokens[i : i + 1], samples_B=torch.tensor([i]), dropout_key=5) for i in range(4)]
        other = decoder(tokens, dropout_key=6)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)
    assert not torch.allclose(other, whole)
    assert torch.allclose(decoder.eval()(tokens), model()(tokens), rtol=0, atol=1e-6)


def test_attention_dropout_of_a_head_is_the_same_wherever_the_head_is():
    decoder = model(attention_dropout=0.5)
    core = decoder.blocks[0].attention.core
    context = decoder.context((2, 13), CPU, dropout_key=1)
    q, k, v = qkv(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = core(q, k, v, context)
        core.first_head = 2
        half = core(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], context)
    torch.testing.assert_close(half, whole[:, :, 2:], rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_every_path_equals_the_formula(name, dtype):
    documents, window = CASES[name]
    wide = qkv(6, 2, head_dim=16, dtype=torch.float32)
    with torch.no_grad():
        for x in wide:
            x.copy_(x.to(dtype))
    expected = formula(*(x.double() for x in wide), documents, window)
    expected_grads = torch.autograd.grad(expected.square().sum(), wide)
    q, k, v = (x.detach().to("cuda", dtype).requires_grad_() for x in wide)
    pattern = Pattern(2, 13, q.device, documents, window)
    pattern.prepare(dtype, 16)
    found = attention(q, k, v, pattern)
    grads = torch.autograd.grad(found.float().square().sum(), (q, k, v))
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for a, b in zip((found, *grads), (expected, *expected_grads), strict=True):
        difference = (a.double().cpu() - b.double()).abs().max() / b.abs().max().clamp(min=1)
        assert difference < tolerance, (name, difference)
    if dtype == torch.bfloat16 and not pattern.plain and name != "documents in pieces":
        assert "mask_B1TS" not in vars(pattern), "varlen attention was there and not taken"
