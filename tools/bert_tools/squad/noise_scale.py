"""Gradient noise scale, and the efficiency of a batch size that follows from it; no torch.

With G the gradient of the loss and Sigma the covariance of one sample's gradient, the gradient of a
batch of B samples has E|g_B|^2 = |G|^2 + tr(Sigma) / B. The noise scale phi = tr(Sigma) / |G|^2, in
samples, is the batch at which noise and signal are equally strong.

Sources: McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162),
appendix A, for both estimates; Qiao et al., "Pollux" (arXiv 2008.12260), for efficiency and
goodput.
"""

import math
from collections.abc import Mapping, Sequence


def gradient_square(
    small_square: float, small_batch: float, big_square: float, big_batch: float
) -> float:
    """An unbiased estimate of |G|^2, which noise can make negative.

    Args:
        small_square: |g|^2 of a gradient of `small_batch` samples, or the mean of several.
        big_square: |g|^2 of a gradient of `big_batch` samples, more than `small_batch`.
    """
    return (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)


def covariance_trace(
    small_square: float, small_batch: float, big_square: float, big_batch: float
) -> float:
    """An unbiased estimate of tr(Sigma), of one sample; arguments as in `gradient_square`."""
    return (small_square - big_square) / (1 / small_batch - 1 / big_batch)


def noise_scale(noise: Sequence[Mapping[str, float]], decay: float = 0.95) -> float | None:
    """phi in samples, not below 0, from `gradient_square` and `trace` of some updates in order.

    Both are averaged separately, because the ratio of single noisy ones is biased; an estimate
    counts `decay` times as much as the next one. None without an estimate, and while the mean of
    |G|^2 is not above 0, as when noise hides it.
    """
    weights = [decay**number for number in reversed(range(len(noise)))]
    square, trace = (
        sum(weight * each[key] for weight, each in zip(weights, noise, strict=True))
        for key in ("gradient_square", "trace")
    )
    if not square > 0:
        return None
    value = max(trace, 0.0) / square
    return value if math.isfinite(value) else None


def efficiency(noise_scale: float, initial_batch: float, batch: float) -> float:
    """(phi + M0) / (phi + M): progress of a sample in a batch of M, relative to one of M0.

    It is 1 at M = M0 whatever the noise. All in samples; `initial_batch` and `batch` are above 0.
    """
    return (noise_scale + initial_batch) / (noise_scale + batch)
