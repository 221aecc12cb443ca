"""The chi-square test of counts against expected ones, without a statistics library."""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Pearson's statistic; both [K], of equal sums."""
    assert counts.sum() == np.round(expected.sum())
    return float(((counts - expected) ** 2 / expected).sum())


def critical_value(num_classes: int, level: float = 1e-3) -> float:
    """What the statistic of a true hypothesis exceeds with probability `level`.

    Wilson and Hilferty (PNAS 1931): the cube root of chi-square over its k degrees of freedom is
    nearly normal, with mean 1 - 2 / (9 k) and variance 2 / (9 k).
    """
    freedom = num_classes - 1
    variance = 2 / (9 * freedom)
    z = NormalDist().inv_cdf(1 - level)
    return float(freedom * (1 - variance + z * variance**0.5) ** 3)
