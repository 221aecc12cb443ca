"""Means of few measurements: MLPerf's, and Student's intervals."""

import math

import pytest

from bert_tools.common.means import mean_and_half_width, olympic_mean, quantile_95


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (30, 2.042), (40, 2.021), (60, 2.000), (120, 1.980)],
)
def test_quantiles_are_the_published_ones(degrees: int, quantile: float) -> None:
    assert quantile_95(degrees) == pytest.approx(quantile, abs=1e-3)


def test_interval_of_three_by_hand() -> None:
    # Deviations -1, 0, 1: variance 2 / 2 = 1, so t * 1 / sqrt(3) with t of 2 degrees.
    mean, half_width = mean_and_half_width([9.0, 10.0, 11.0])
    assert mean == 10.0
    assert half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert mean_and_half_width([7.0]) == (7.0, None)


def test_equal_values_have_one_of_no_width() -> None:
    assert mean_and_half_width([1.0, 1.0, 1.0]) == (1.0, 0.0)


def test_the_olympic_mean_leaves_out_fastest_and_slowest() -> None:
    assert olympic_mean([10.0, 19.0, 12.0, 14.0, 1.0]) == 12.0
    assert olympic_mean([3.0] * 10) == 3.0
