"""Packing: rows hold what they must, as tightly as best-fit decreasing says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.packing import best_fit_decreasing


def free_space(lengths: list[int], capacity: int) -> list[int]:
    """Space left in each row by best-fit decreasing as textbooks have it, sorted."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append(min(fitting, default=capacity) - length)
    return sorted(spaces)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), max_size=80), extra=st.integers(0, 60))
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], extra: int) -> None:
    capacity = max(lengths, default=1) + extra
    row = best_fit_decreasing(np.array(lengths, dtype=np.uint16), capacity)
    assert row.shape == (len(lengths),)
    used = np.bincount(row, weights=lengths).astype(int) if lengths else np.empty(0, dtype=int)
    assert (used > 0).all()  # rows are numbered without a gap
    assert sorted((capacity - used).tolist()) == free_space(lengths, capacity)


def test_too_long_a_sequence() -> None:
    with pytest.raises(DataError, match="65 is longer than a row of 64"):
        best_fit_decreasing(np.array([64, 65, 3]), 64)


@pytest.mark.parametrize(("window", "least"), [(448, 0.994), (896, 0.996)])
def test_efficiency_on_published_lengths(window: int, least: float) -> None:
    published = wikipedia_lengths()
    capacity = published.max_length
    share = published.counts / published.num_sequences
    generator = np.random.default_rng(window)
    efficiency = []
    for lengths in generator.choice(published.lengths, size=(100, window), p=share):
        num_rows = best_fit_decreasing(lengths, capacity).max() + 1
        efficiency.append(lengths.sum() / (num_rows * capacity))
    assert np.mean(efficiency) >= least
