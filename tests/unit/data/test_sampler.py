"""Samplers without strata: each sample once an epoch, whatever the sizes; pure in (seed, step)."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chi_square import chi_square, critical_value
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.sampler import (
    MOST_QUANTILES,
    Int64Array,
    QuantileSampler,
    Sampler,
    UniformSampler,
    default_quantiles,
    epochs_of,
)

NUM_SAMPLES = st.integers(1, 200)
BATCHES = st.integers(1, 50)
SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = 3


def shuffled(num_samples: int) -> Int64Array:
    """An order by length in which numbers and places differ."""
    return np.random.default_rng(num_samples).permutation(num_samples)


def assert_each_once_an_epoch(
    sampler: Sampler, num_samples: int, global_batch_size: int
) -> list[Int64Array]:
    """Batches laid end to end and cut every `num_samples`: each piece holds every sample once."""
    num_steps = -(-EPOCHS * num_samples // global_batch_size)
    batches = [sampler.global_batch(step) for step in range(1, num_steps + 1)]
    assert {batch.shape for batch in batches} == {(global_batch_size,)}
    epochs = np.concatenate(batches)[: EPOCHS * num_samples].reshape(EPOCHS, num_samples)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))
    return list(epochs)


@given(num_samples=NUM_SAMPLES, batch=BATCHES, seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_uniform_draws_each_sample_once_an_epoch(num_samples: int, batch: int, seed: int) -> None:
    assert_each_once_an_epoch(UniformSampler(num_samples, batch, seed), num_samples, batch)


@given(num_samples=NUM_SAMPLES, quantiles=st.integers(1, 40), rows=st.integers(1, 4), seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_quantile_draws_each_sample_once_an_epoch(
    num_samples: int, quantiles: int, rows: int, seed: int
) -> None:
    batch = quantiles * rows
    sampler = QuantileSampler(shuffled(num_samples), batch, quantiles, seed)
    assert_each_once_an_epoch(sampler, num_samples, batch)


def test_epochs_differ() -> None:
    for sampler in (UniformSampler(100, 8, 3), QuantileSampler(shuffled(100), 8, 4, 3)):
        epochs = assert_each_once_an_epoch(sampler, 100, 8)
        assert not any(np.array_equal(one, other) for one, other in pairwise(epochs))


@given(
    samples_a_quantile=st.integers(1, 30),
    quantiles=st.integers(1, 20),
    rows=st.integers(1, 4),
    step=st.integers(1, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_batch_has_equally_many_of_each_quantile(
    samples_a_quantile: int, quantiles: int, rows: int, step: int
) -> None:
    num_samples = samples_a_quantile * quantiles
    order = np.arange(num_samples)  # so that a sample's number tells its quantile
    batch = QuantileSampler(order, rows * quantiles, quantiles, seed=2).global_batch(step)
    counts = np.bincount(batch // samples_a_quantile, minlength=quantiles)
    assert counts.tolist() == [rows] * quantiles


def test_quantiles_that_do_not_divide_share_the_last_row() -> None:
    # 4 quantiles of 11 samples begin at 0, 11/4, 22/4, 33/4 rounded down: they hold 2, 3, 3, 3.
    # So rows 0 and 1 have one of each, and the last row one of each quantile but the first.
    sampler = QuantileSampler(np.arange(11), 4, 4, seed=5)
    epoch = np.concatenate([sampler.global_batch(step) for step in (1, 2, 3)])[:11]
    quantile = np.searchsorted([2, 5, 8], epoch, side="right")
    assert [sorted(quantile[start : start + 4]) for start in (0, 4, 8)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2, 3],
    ]


def test_neighbours_in_a_batch_come_from_quantiles_far_apart() -> None:
    batch = QuantileSampler(np.arange(1600), 64, 16, seed=1).global_batch(1)
    quarter = batch // 400
    # What a rank with a batch of 4 gets before balancing has one of each quarter of the lengths.
    assert np.array_equal(np.sort(quarter.reshape(-1, 4)), np.tile(np.arange(4), (16, 1)))


@given(batch=st.integers(1, 100_000))
@settings(deadline=None)
def test_default_quantiles_are_the_largest_allowed_divisor(batch: int) -> None:
    divisors = [q for q in range(1, MOST_QUANTILES + 1) if batch % q == 0]
    assert default_quantiles(batch) == max(divisors)


@pytest.mark.parametrize("quantiles", [-1, 0, 5, 49])
def test_quantiles_that_do_not_divide_the_batch_are_refused(quantiles: int) -> None:
    with pytest.raises(ConfigError, match=r"data\.quantiles: .*global batch of 48; use a divisor"):
        QuantileSampler(np.arange(100), 48, quantiles, seed=1)


@given(step=st.integers(1, 50), batch=BATCHES, num_samples=NUM_SAMPLES)
@settings(deadline=None)
def test_epochs_of_numbers_every_draw(step: int, batch: int, num_samples: int) -> None:
    parts = epochs_of(step, batch, num_samples)
    draws = np.concatenate([epoch * num_samples + offset for epoch, offset in parts])
    assert np.array_equal(draws, np.arange((step - 1) * batch, step * batch))
    assert all(((offset >= 0) & (offset < num_samples)).all() for _, offset in parts)
    assert len({epoch for epoch, _ in parts}) == len(parts)


@pytest.mark.parametrize("name", ["uniform", "quantile"])
def test_any_step_is_computed_directly(name: str) -> None:
    def sampler(seed: int) -> Sampler:
        if name == "uniform":
            return UniformSampler(1000, 64, seed)
        return QuantileSampler(shuffled(1000), 64, 16, seed)

    one = sampler(5)
    in_order = [one.global_batch(step) for step in range(1, 40)]
    for step in (37, 1, 16, 17):  # an epoch ends within step 16
        assert np.array_equal(sampler(5).global_batch(step), in_order[step - 1])
        assert np.array_equal(one.global_batch(step), in_order[step - 1])
        assert not np.array_equal(sampler(6).global_batch(step), in_order[step - 1])


def test_draws_are_uniform_over_places() -> None:
    counts = np.zeros((10, 10), dtype=np.int64)
    for seed in range(2000):
        batch = UniformSampler(10, 10, seed).global_batch(1)
        counts[np.arange(10), batch] += 1
    # 9 * 9 degrees of freedom, as each place and each sample is drawn 2,000 times; a table of
    # permutations has 10 / 9 times the statistic of a multinomial one.
    limit = critical_value(9 * 9 + 1) * 10 / 9
    assert chi_square(counts.ravel(), np.full(100, 200.0)) < limit


@pytest.mark.parametrize("quantiles", [16, 7])
def test_quantile_draws_have_the_lengths_of_the_data(quantiles: int) -> None:
    histogram = wikipedia_lengths()
    ends = np.cumsum(histogram.counts)
    order = np.arange(histogram.num_sequences, dtype=np.uint32)
    batch, steps = 1024 * quantiles, range(1, 13)
    sampler = QuantileSampler(order, batch, quantiles, seed=11)
    drawn = np.concatenate([sampler.global_batch(step) for step in steps])
    counts = np.bincount(np.searchsorted(ends, drawn, side="right"), minlength=len(ends))
    # Neighbouring lengths together, so that every class is expected at least five times.
    starts = np.arange(0, len(ends), 4)
    counts = np.add.reduceat(counts, starts)
    expected = np.add.reduceat(histogram.counts, starts) * len(drawn) / histogram.num_sequences
    assert expected.min() > 5
    assert chi_square(counts, expected) < critical_value(len(starts))
