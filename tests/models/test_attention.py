"""Attention against its formula in float64: every pattern, grouped heads, gradients, dropout."""

import dataclasses
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from interlace.config import ModelConfig
from interlace.errors import ConfigError
from interlace.models import attention as subject
from interlace.models import ordered, sinks
from interlace.models.attention import Pattern, attention
from interlace.models.decoder import Decoder, initialise

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2], [4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]])
IN_PIECES = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 0, 2, 2]] * 2)
CASES = {
    "causal": (None, None),
    "documents": (DOCUMENTS, None),
    "window": (None, 4),
    "documents and window": (DOCUMENTS, 3),
    "window of one": (None, 1),
    "window longer than the sequence": (None, 50),
    "documents in pieces": (IN_PIECES, None),
    "window and two sink tokens": (None, 4, 2),
    "documents, window and three sink tokens": (DOCUMENTS, 2, 3),
    "documents in pieces, window and a sink token": (IN_PIECES, 1, 1),
    "no window and sink tokens": (None, 50, 3),
}


def sees(t, s, documents_T, window, sink_tokens=0):
    """The definition, one pair at a time."""
    same = documents_T is None or documents_T[t] == documents_T[s]
    place = s if documents_T is None else (documents_T[:s] == documents_T[s]).sum()
    return s <= t and same and (window is None or t - s < window or place < sink_tokens)


def formula(q, k, v, documents, window, sink_tokens=0, sinks=None):
    """Attention one query at a time, float64: [B T H E]."""
    B, T, H, E = q.shape
    out = torch.zeros_like(q)
    for b in range(B):
        for t in range(T):
            seen = [s for s in range(T) if sees(t, s, None if documents is None else documents[b], window, sink_tokens)]
            for h in range(H):
                kv = h // (H // k.shape[2])
                scores = k[b, seen, kv] @ q[b, t, h] / E**0.5
                if sinks is not None:
                    scores = torch.cat((scores, sinks[h : h + 1]))
                out[b, t, h] = scores.softmax(0)[: len(seen)] @ v[b, seen, kv]
    return out


def qkv(heads, kv_heads, head_dim=6, batch=2, length=13, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
def test_attention_equals_the_formula(name, heads, kv_heads):
    q, k, v = qkv(heads, kv_heads)
    expected = formula(q, k, v, *CASES[name])
    found = attention(q, k, v, Pattern(2, 13, CPU, *CASES[name]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", ["fused", "null key", "written out"])
@pytest.mark.parametrize("name", CASES)
def test_a_sink_is_one_more_term_of_the_denominator(name, path):
    """Each way of computing it, with its gradients; a head whose sink takes all, and one whose takes nothing."""
    inputs = [*qkv(6, 2), torch.tensor([0.3, -1.0, 2.0, -40.0, 40.0, 0.0], dtype=torch.float64, requires_grad=True)]
    expected = formula(*inputs[:3], *CASES[name], sinks=inputs[3])
    pattern = Pattern(2, 13, CPU, *CASES[name])
    q, k, v, logits = inputs
    if path == "null key":
        k, v = (x.repeat_interleave(3, dim=2) for x in (k, v))
        found = sinks.with_null_key(q, k, v, logits, pattern.mask_B1TS)
    else:
        keep = torch.ones(2, 6, 13, 13, dtype=torch.bool) if path == "written out" else None
        found = attention(q, k, v, pattern, 0.0, keep, logits)
    tolerance = 1e-6 if path == "written out" else 1e-12  # its softmax is in fp32
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), inputs) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=10 * tolerance)


def test_sinks_are_those_of_gpt_oss():
    """`transformers`' own layer, whose weights ours takes over: the same output with a window and without."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    cfg = dataclasses.replace(
        TINY, attention_sinks=True, qkv_bias=True, out_bias=True, sliding_window=5, window_layers=(0,)
    )
    theirs = transformers.GptOssConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6, sliding_window=5, num_hidden_layers=2,
        attention_bias=True, attention_dropout=0.0,
    )  # fmt: skip
    theirs._attn_implementation = "eager"
    decoder = model(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)})
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    context = decoder.context((2, 13), CPU)
    cosine, sine = (x[:, :, 0].double().expand(2, -1, -1) for x in context.rotary)
    for layer in range(2):
        ours, peer = decoder.blocks[layer].attention, GptOssAttention(theirs, layer).double()
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
        values = ours.state_dict()
        peer.load_state_dict({
            ".".join([names.get(n.split(".")[0], n.split(".")[0]), *n.split(".")[1:]]): t for n, t in values.items()
        })  # fmt: skip
        mask = torch.zeros(13, 13, dtype=torch.float64)
        mask.masked_fill_(~context.patterns[cfg.window(layer)].mask_B1TS[0, 0], float("-inf"))
        expected, _ = peer(x, (cosine, sine), mask[None, None])
        torch.testing.assert_close(ours(x, context), expected, rtol=0, atol=1e-6)  # rotary angles are fp32


@pytest.mark.parametrize("name", CASES)
def test_the_written_out_path_that_keeps_everything_equals_the_fused_one(name):
    q, k, v = qkv(6, 2)
    pattern = Pattern(2, 13, CPU, *CASES[name])
    keep = torch.ones(2, 6, 13, 13, dtype=torch.bool)
    torch.testing.assert_close(attention(q, k, v, pattern, 0.0, keep), attention(q, k, v, pattern), rtol=0, atol=1e-6)
    q, k, v = (x.double() for x in (q, k, v))  # the exact run of a proof: nothing on the way is fp32
    torch.testing.assert_close(attention(q, k, v, pattern, 0.0, keep), attention(q, k, v, pattern), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_runs_describe_the_mask(name):
    """The offsets given to varlen attention say the same as the mask, or there are none."""
    pattern = Pattern(2, 13, CPU, *CASES[name])
    if name == "documents in pieces" or pattern.sink_tokens:
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
    for name, case in CASES.items():
        plain = Pattern(2, 13, CPU, *case).plain
        assert plain == (name in ("causal", "window longer than the sequence", "no window and sink tokens")), name


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


def test_a_window_with_sink_tokens_sees_the_first_of_its_document():
    decoder = model(sliding_window=3, num_layers=1, sink_tokens=2)
    tokens, documents = torch.arange(16)[None], torch.tensor([[0] * 4 + [1] * 12])
    for at, reached in ((0, {0, 1, 2, 3}), (4, {*range(4, 16)}), (5, {*range(5, 16)}), (6, {6, 7, 8})):
        changed = tokens.clone()
        changed[0, at] = 30
        moved = (decoder(tokens, None, documents) - decoder(changed, None, documents)).abs().amax(-1)[0] > 0
        assert set(moved.nonzero().flatten().tolist()) == reached, at


def test_sink_tokens_without_a_window_are_refused():
    with pytest.raises(ConfigError, match="sink_tokens 2 needs"):
        dataclasses.replace(TINY, sink_tokens=2)


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
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_every_path_equals_the_formula(name, sunk, dtype):
    wide = qkv(6, 2, head_dim=16, dtype=torch.float32)
    if sunk:
        wide.append(torch.linspace(-2.0, 2.0, 6).requires_grad_())
    with torch.no_grad():
        for x in wide:
            x.copy_(x.to(dtype))
    exact = [x.double() for x in wide]
    logits = {"sinks": exact[3]} if sunk else {}
    expected = formula(*exact[:3], *CASES[name], **logits)
    expected_grads = torch.autograd.grad(expected.square().sum(), wide)
    inputs = [x.detach().to("cuda", dtype).requires_grad_() for x in wide]
    pattern = Pattern(2, 13, inputs[0].device, *CASES[name])
    pattern.prepare(dtype, 16, sunk)
    found = attention(*inputs[:3], pattern, sinks_H=inputs[3] if sunk else None)
    grads = torch.autograd.grad(found.float().square().sum(), inputs)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for a, b in zip((found, *grads), (expected, *expected_grads), strict=True):
        difference = (a.double().cpu() - b.double()).abs().max() / b.abs().max().clamp(min=1)
        assert difference < tolerance, (name, difference)
    if dtype == torch.bfloat16 and not pattern.plain and pattern.runs is not None:
        assert "mask_B1TS" not in vars(pattern), "varlen attention was there and not taken"


@pytest.mark.parametrize("length", [1, 100, 128, 129, 300, 1000, 1024])
def test_causal_blocks_are_those_of_the_mask(length):
    made = ordered.causal_blocks(length, CPU)
    found = create_block_mask(lambda b, h, t, s: t >= s, None, None, length, length, device="cpu")
    assert made.shape == found.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(made, name), getattr(found, name)), name
    for name in ("kv", "full_kv", "q", "full_q"):  # of the indices only so many count
        counts = getattr(found, f"{name}_num_blocks")[..., None]
        counted = torch.arange(counts.shape[2]) < counts
        a, b = (getattr(mask, f"{name}_indices") for mask in (made, found))
        assert torch.equal(a.where(counted, 0), b.where(counted, 0)), name


def test_deterministic_gradients_are_asked_of_a_gpu_alone_and_only_where_there_are_any(deterministic):
    cuda = torch.device("cuda")
    assert ordered.takes(cuda, torch.bfloat16, 64)
    assert not ordered.takes(CPU, torch.bfloat16, 64)
    assert not ordered.takes(cuda, torch.float32, 64)
    assert not ordered.takes(cuda, torch.bfloat16, 96)
    with torch.no_grad():
        assert not ordered.takes(cuda, torch.bfloat16, 64)
    torch.use_deterministic_algorithms(False)
    assert not ordered.takes(cuda, torch.bfloat16, 64)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("length", [13, 128, 700])
def test_deterministic_attention_equals_the_formula_with_the_same_bits_each_time(length, compiled, deterministic):
    device = torch.device("cuda")
    wide = qkv(8, 2, head_dim=64, length=length, dtype=torch.float32)
    inputs = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in wide]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    pattern = Pattern(2, length, device)
    pattern.prepare(torch.bfloat16, 64)
    assert "causal" in vars(pattern)
    run = torch.compile(lambda *x: attention(*x, pattern) * 2.0, fullgraph=True) if compiled else None
    grad = torch.randn(2, length, 8, 64, device=device, generator=torch.Generator(device).manual_seed(1))

    def both():
        out = run(*inputs) if run is not None else attention(*inputs, pattern) * 2.0
        return out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))

    made = both()
    groups = [exact[0], *(x.repeat_interleave(4, dim=2) for x in exact[1:])]
    scores = torch.einsum("bthe,bshe->bhts", groups[0], groups[1]) / 8.0
    scores = scores.masked_fill(torch.ones(length, length, device=device).triu(1).bool(), float("-inf"))
    expected = 2.0 * torch.einsum("bhts,bshe->bthe", scores.softmax(-1), groups[2])
    for a, b in zip(made, (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert (a.double() - b).abs().max() / b.abs().max() < 2e-2
    for _ in range(20):
        for a, b in zip(both(), made, strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
