"""The uniform sampler: each sample once an epoch, whatever the sizes; pure in (seed, step)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.data.permutation import permute
from mlperf_bert.data.sampler import UniformSampler


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(size), size, (seed, epoch))
    assert np.array_equal(np.sort(image), np.arange(size))


def test_permute_reaches_large_sets_without_memory() -> None:
    size = 156_726_829
    image = permute(np.arange(100_000), size, (1, 0))
    assert image.min() >= 0 and image.max() < size
    assert len(np.unique(image)) == 100_000
    assert image.mean() == pytest.approx(size / 2, rel=0.01)


@pytest.mark.parametrize(("num_samples", "global_batch_size"), [(100, 8), (97, 16), (5, 16)])
def test_every_sample_once_an_epoch(num_samples: int, global_batch_size: int) -> None:
    sampler = UniformSampler(num_samples, global_batch_size, seed=3)
    steps = range(1, 1 + 3 * num_samples)
    ids = np.concatenate([sampler.global_batch(step) for step in steps])
    epochs = ids[: len(ids) // num_samples * num_samples].reshape(-1, num_samples)
    assert len(epochs) >= 3
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))
    assert not np.array_equal(epochs[0], epochs[1])


def test_batches_depend_on_seed_and_step_only() -> None:
    first = UniformSampler(1000, 64, seed=5)
    for step in (7, 1, 7):
        assert np.array_equal(
            first.global_batch(step), UniformSampler(1000, 64, seed=5).global_batch(step)
        )
    assert not np.array_equal(first.global_batch(1), first.global_batch(2))
    other_seed = UniformSampler(1000, 64, seed=6).global_batch(1)
    assert not np.array_equal(first.global_batch(1), other_seed)


def test_draws_are_uniform_over_positions() -> None:
    counts = np.zeros((10, 10))
    for seed in range(2000):
        batch = UniformSampler(10, 10, seed).global_batch(1)
        counts[np.arange(10), batch] += 1
    assert np.abs(counts - 200).max() < 5 * 200**0.5
