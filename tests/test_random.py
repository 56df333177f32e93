"""Random numbers are functions of (key, index): known answers, any cut gives the same bits, moments of the laws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace import random

# Known answers of Random123's kat_vectors for philox4x32-10: key, counter (least significant word first), words.
KNOWN = [
    (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x299F31D0_A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_philox_gives_the_published_words(key, counter, words):
    found = random.philox(key, tuple(torch.tensor([word]) for word in counter))
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_flat_words_are_the_blocks_in_order():
    block_2, block_3 = (torch.stack(random.philox(5, (torch.tensor(n), 0, 0, 0))) for n in (2, 3))
    assert torch.equal(random.bits(5, 8, 8), torch.cat((block_2, block_3)))
    far = 4 * (2**32 + 7)  # the counter's second word
    assert torch.equal(random.bits(5, far, 4), torch.stack(random.philox(5, (torch.tensor(7), 1, 0, 0))))


@given(
    start=st.integers(0, 40), cuts=st.lists(st.integers(0, 23), max_size=5), draw=st.sampled_from(["normal", "bits"])
)
def test_any_cut_of_a_range_gives_the_same_values(start, cuts, draw):
    function = getattr(random, draw)
    pieces = [function(9, start + sum(cuts[:i]), count) for i, count in enumerate(cuts)]
    whole = function(9, start, sum(cuts))
    assert torch.equal(torch.cat([whole[:0], *pieces]), whole)


@pytest.mark.parametrize("draw", [random.bits, random.uniform, random.normal])
def test_pieces_worked_on_apart_join_without_a_seam(draw):
    seam = 4 << 14  # elements in one piece on the CPU
    assert torch.equal(draw(3, seam - 5, 11), draw(3, 0, seam + 6)[seam - 5 :])
    assert draw(3, 0, 0).shape == (0,)


def test_normal_has_the_moments_and_the_tail_of_the_normal_law():
    x = random.normal(random.key(1, "moments"), 0, 200_000, dtype=torch.float64)
    n = len(x)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean().item() - expected) < 5 * math.sqrt(variance / n), f"moment {power}"
    for bound in (1.0, 2.0, 3.0):
        expected = math.erfc(bound / math.sqrt(2))
        assert abs((x.abs() > bound).double().mean().item() - expected) < 5 * math.sqrt(expected / n)
    pairs = x.view(-1, 2)  # both numbers of a pair come from the same two words
    assert abs((pairs[:, 0] * pairs[:, 1]).mean().item()) < 5 / math.sqrt(n / 2)


def test_box_muller_agrees_with_library_functions():
    words = random.bits(2, 0, 2000)
    w0, w1 = words.view(-1, 2).unbind(-1)
    radius = torch.sqrt(-2 * torch.log((2 * w0 + 1).double() * 2.0**-33))
    angle = ((w1 & 0x3FFFFFFF).double() * 2.0**-30 - 0.5 + (w1 >> 30).double()) * (math.pi / 2)
    expected = torch.stack((torch.cos(angle) * radius, torch.sin(angle) * radius), -1).flatten()
    torch.testing.assert_close(random._box_muller(words), expected, rtol=0, atol=1e-10)
    extremes = random._box_muller(torch.tensor([0, 0, 2**32 - 1, 2**32 - 1]))
    assert extremes.isfinite().all()
    assert extremes.abs().max() < 6.9


def test_normal_scales_and_narrows():
    wide = random.normal(4, 3, 1001, std=0.02)
    assert wide.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(random.normal(4, 3, 1001, std=0.02, dtype=torch.bfloat16), wide.bfloat16())


def test_uniform_fills_the_unit_interval():
    x = random.uniform(8, 0, 50_000)
    assert 0 <= x.min() < 1e-3
    assert 1 - 1e-3 < x.max() < 1
    assert x.mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(12 * len(x)))


def test_keys_tell_names_seeds_and_types_apart_and_never_change():
    keys = [
        random.key(0),
        random.key(1),
        random.key(0, "a"),
        random.key(0, "a", "b"),
        random.key(0, "ab"),
        random.key(0, 1),
        random.key(0, "1"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert (
        random.key(7, "blocks.0.attention.q.weight", 3) == 0xC0A1C9126403C57A
    )  # a checkpoint's data order rests on it


def test_permutation_holds_each_number_once_and_depends_on_the_key():
    for n in (0, 1, 2, 17, 1000):
        assert torch.equal(random.permutation(6, n).sort().values, torch.arange(n))
    assert not torch.equal(random.permutation(6, 1000), random.permutation(7, 1000))
    firsts = torch.stack([random.permutation(random.key(0, i), 5) for i in range(500)])[:, 0]
    assert torch.bincount(firsts, minlength=5).sub(100).abs().max() < 45  # 5 deviations


@pytest.mark.parametrize("count", [1, 4, 7])
def test_dropout_mask_is_a_function_of_sample_row_and_element(count):
    sample, row = torch.arange(3)[:, None], torch.arange(5)[None, :]
    mask = random.dropout_mask(11, sample, row, count, 0.4)
    assert mask.shape == (3, 5, count)
    for b in range(3):
        for t in range(5):
            alone = random.dropout_mask(11, torch.tensor(b), torch.tensor(t), count, 0.4)
            assert torch.equal(alone, mask[b, t])
    for start in range(1, count):
        assert torch.equal(random.dropout_mask(11, sample, row, count - start, 0.4, start), mask[..., start:])
    longer = random.dropout_mask(11, sample, row, count + 9, 0.4)
    assert torch.equal(longer[..., :count], mask)


def test_dropout_masks_of_samples_rows_and_keys_are_unrelated():
    mask = random.dropout_mask(1, torch.arange(2)[:, None], torch.tensor([0, 1, 1 << 32]), 4096, 0.5)
    other = random.dropout_mask(2, torch.tensor([0]), torch.tensor([0]), 4096, 0.5)
    masks = [*mask.flatten(0, 1), other[0]]
    for i, a in enumerate(masks):
        assert abs(a.float().mean().item() - 0.5) < 5 * 0.5 / 64
        for b in masks[:i]:
            assert abs((a == b).float().mean().item() - 0.5) < 5 * 0.5 / 64
    kept = random.dropout_mask(1, torch.tensor(0), torch.tensor(0), 100_000, 0.1).float().mean().item()
    assert kept == pytest.approx(0.9, abs=5e-3)
    assert random.dropout_mask(1, torch.tensor(0), torch.tensor(0), 1000, 0.0).all()


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bits():
    for draw in (random.bits, random.uniform, random.normal):
        assert torch.equal(draw(3, 5, 300_001, device="cuda").cpu(), draw(3, 5, 300_001)), draw.__name__
