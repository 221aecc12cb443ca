"""Means of few measurements: MLPerf's, and how far one may be from the true one."""

import math
from collections.abc import Sequence


def olympic_mean(minutes: Sequence[float]) -> float:
    """MLPerf's: without the one fastest and the one slowest; at least three are needed.

    Source: training rules, section on scoring.
    """
    middle = sorted(minutes)[1:-1]
    return math.fsum(middle) / len(middle)


def quantile_95(degrees: int) -> float:
    """Student's two-sided 95 % quantile for that many degrees of freedom."""
    from scipy.special import stdtrit  # a fifth of a second that only some answers need

    return float(stdtrit(degrees, 0.975))


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """Their mean, and half of its 95 % interval; None of one value, which has none.

    For independent values of one normal distribution: t * s / sqrt(n).
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    deviation = math.sqrt(squares / (len(values) - 1))
    return mean, quantile_95(len(values) - 1) * deviation / math.sqrt(len(values))
