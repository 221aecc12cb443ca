"""The chi-square test of counts against expected ones."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Pearson's statistic; both [K], of equal sums."""
    assert counts.sum() == np.round(expected.sum())
    return float(((counts - expected) ** 2 / expected).sum())


def critical_value(num_classes: int, level: float = 1e-3) -> float:
    """What the statistic of a true hypothesis exceeds with probability `level`."""
    return float(chdtri(num_classes - 1, level))
