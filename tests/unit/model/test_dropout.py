"""Keyed dropout: its definition, rate, scale and gradient, and on what an element depends."""

from dataclasses import replace

import pytest
import torch

from dropout_cases import (
    DTYPES,
    SHAPES,
    check_dropout,
    is_kept,
    make_keys,
    plain_is_kept,
    plain_words,
    site_of,
)
from mlperf_bert.model.dropout import (
    attention_factors,
    attention_keep_bits,
    drop_by_bits,
    dropout,
    keep_bits,
)
from mlperf_bert.model.dropout_keys import make_site, philox, scale_of

ROWS, CHANNELS = 501, 333  # channels: no multiple of the eight of one counter
NUM_ELEMENTS = ROWS * CHANNELS

# Published with the authors' Random123 library, for seven rounds: counter, key, and the words.
KNOWN_ANSWERS = (
    ("00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
)


def kept_of_ones(site, dtype=torch.float32):
    return dropout(torch.ones((len(site.keys.positions), CHANNELS), dtype=dtype), site)


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_has_the_published_words(counter, key, answer):
    words, halves, expected = (
        [int(word, 16) for word in text.split()] for text in (counter, key, answer)
    )
    seed = halves[0] | halves[1] << 32
    assert plain_words(words, seed, rounds=7) == expected
    found = philox(tuple(torch.tensor([word]) for word in words), seed)
    assert [int(word) for word in found] == expected


def some_places(shape):
    return torch.cartesian_prod(*map(torch.arange, shape))[::37].tolist()


def test_bits_are_those_of_the_definition():
    for num_rows, channels in SHAPES:
        site = site_of(num_rows)
        found = is_kept(keep_bits(site, channels), channels)
        for row, channel in some_places(found.shape):
            assert bool(found[row, channel]) == plain_is_kept(site, row, channel)
    site = site_of(30)
    found = is_kept(attention_keep_bits(site, 4, torch.tensor([0, 30]), 30), 30)
    assert found.shape == (30, 4, 30)
    for row, head, key in some_places(found.shape):
        assert bool(found[row, head, key]) == plain_is_kept(site, row, key, head)


def test_a_gpu_drops_by_the_same_bits():
    check_dropout(drop_by_bits, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows, channels", [*SHAPES, (0, 5), (5, 0)])
def test_dropout_multiplies_by_its_bits(num_rows, channels, dtype):
    site = site_of(num_rows)
    scale = torch.tensor(scale_of(site.probability), dtype=dtype)
    expected = is_kept(keep_bits(site, channels), channels) * scale
    x = torch.randn(channels, num_rows).t().to(dtype).requires_grad_()
    output = dropout(x, site)
    assert torch.equal(output, x * expected)
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output))
    assert torch.equal(gradient, expected.to(dtype))
    deep = x.reshape(num_rows, channels, 1).expand(-1, -1, 3)
    flat = is_kept(keep_bits(site, 3 * channels), 3 * channels).view(deep.shape)
    assert torch.equal(dropout(deep, site), deep * (flat * scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_attention_has_the_same_elements(dtype):
    num_sequences, num_heads, num_queries, num_keys = shape = torch.Size((3, 4, 5, 19))
    site = site_of(num_sequences * num_queries)
    bits = attention_keep_bits(site, num_heads, torch.arange(4, dtype=torch.int32), num_keys)
    kept = is_kept(bits, num_keys).view(num_sequences, num_queries, num_heads, num_keys)
    scale = torch.tensor(scale_of(site.probability), dtype=dtype)
    expected = kept.transpose(1, 2) * scale
    assert torch.equal(attention_factors(site, shape, dtype), expected)


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_rate_and_mean(probability):
    output = kept_of_ones(site_of(ROWS, probability))
    expected = NUM_ELEMENTS * probability
    standard_error = (expected * (1 - probability)) ** 0.5
    assert abs(int((output == 0).sum()) - expected) < 5 * standard_error
    scale = output[output != 0].unique()
    assert scale.numel() == 1
    assert float(scale) == pytest.approx(1 / (1 - probability), rel=2**-16 / (1 - probability))


def test_order_and_cut_of_the_batch_change_nothing():
    site = site_of(ROWS)
    whole = kept_of_ones(site)
    for index in (torch.randperm(ROWS), torch.arange(200), torch.arange(200, ROWS)):
        part = replace(site, keys=site.keys.rows(index))
        assert torch.equal(kept_of_ones(part), whole[index])


def test_torchs_generator_is_not_touched_and_none_drops_nothing():
    x = torch.randn(5, 7)
    before = torch.get_rng_state()
    assert dropout(x, None) is x
    assert make_site(0.0, 1, make_keys(5)) is None
    assert make_site(0.1, 1, None) is None
    dropout(x, site_of(5))
    attention_factors(site_of(6), torch.Size((2, 1, 3, 4)), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
