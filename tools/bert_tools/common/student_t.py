"""Student's t: how far a mean of few measurements may be from the true one. No numpy."""

import math
from collections.abc import Sequence

# Two-sided 95 % quantiles for 1 to 30 degrees of freedom.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_95 = 1.960


def quantile_95(degrees: int) -> float:
    """The two-sided quantile; beyond the table by its expansion (Abramowitz and Stegun, 26.7.5)."""
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    z = _NORMAL_95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


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
