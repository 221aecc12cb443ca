"""Means of few measurements: MLPerf's, and their 95 % intervals."""

import math
from collections.abc import Sequence


def olympic_mean(minutes: Sequence[float]) -> float:
    """MLPerf's mean, without the fastest and the slowest; needs at least three values.

    Source: training rules, section on scoring.
    """
    middle = sorted(minutes)[1:-1]
    return math.fsum(middle) / len(middle)


def quantile_95(degrees: int) -> float:
    """Student's two-sided 95 % quantile for that many degrees of freedom."""
    from scipy.special import stdtrit  # takes 0.2 s, and few answers need it

    return float(stdtrit(degrees, 0.975))


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of values, and half of its 95 % interval; None for a single value.

    For independent values of one normal distribution: t * s / sqrt(n).
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    deviation = math.sqrt(squares / (len(values) - 1))
    return mean, quantile_95(len(values) - 1) * deviation / math.sqrt(len(values))
