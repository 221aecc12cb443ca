"""How long a run may still take: to its last step, and to its target where that can be said.

A run like published ones is taken to need what these needed. Any other is gone on with by its own
last evaluations in two ways, one sooner and one later than curves mostly go; docs/watch.md says how
often the truth lay between, and where not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from bert_tools.report.curves import curves_for
from bert_tools.report.run import Evaluation
from mlperf_bert.evaluation.convergence import expected_samples

FITTED = 4  # evaluations
STANDARD_ERRORS = 2.0
WIDEST = 20.0  # longest over shortest time, above which it is nothing worth saying
PUBLISHED_SPREAD = 0.15  # single runs at a batch of 448 and 768 lie within this of the mean

Basis = Literal["published runs", "its curve"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Samples still to train until the target: at least, at most, and by what."""

    low_samples: float
    high_samples: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class Remaining:
    """Seconds; None where it cannot be said, for the reason in `why_not`."""

    to_last_step_s: float | None
    to_target_s: tuple[float, float] | None
    basis: Basis | None
    why_not: str


def by_published(
    samples: int, global_batch_size: int, optimizer: str, target: float
) -> Forecast | str:
    """For BERT-large on MLPerf's target; a text says why there is no forecast."""
    reached = [
        found
        for curve in curves_for(global_batch_size, optimizer)
        if (found := curve.samples_at(target)) is not None
    ]
    point = None if reached else expected_samples(global_batch_size)
    expected = reached or ([point.mean] if point else [])
    if not expected:
        return "nothing is published for this batch"
    low = min(expected) * (1 - PUBLISHED_SPREAD) - samples
    high = max(expected) * (1 + PUBLISHED_SPREAD) - samples
    if high <= 0:
        return "later than the published runs of this batch"
    return Forecast(max(0.0, low), high, "published runs")


def by_curve(evaluations: Sequence[Evaluation], target: float) -> Forecast | str:
    """By the last FITTED evaluations; a text says why there is no forecast.

    Sooner: on a straight line, as steep as the fitted one with twice its standard error, or as the
    steepest part. Later: on a logarithm of the samples, as flat as that fit less twice its standard
    error, or as the last part.
    """
    last = evaluations[-FITTED:]
    if len(last) < FITTED:
        return f"after {FITTED} evaluations"
    now = last[-1].samples
    gap = max(0.0, target - last[-1].accuracy)
    if last[0].samples <= 0 or any(b.samples <= a.samples for a, b in pairwise(last)):
        return "the samples of the evaluations do not ascend"
    shares = [each.samples / now for each in last]
    logs = [math.log(share) for share in shares]
    accuracies = [each.accuracy for each in last]
    slope, error = _slope(shares, accuracies)
    steepest = max(_slopes(shares, accuracies))
    log_slope, log_error = _slope(logs, accuracies)
    flattest = min(log_slope - STANDARD_ERRORS * log_error, _slopes(logs, accuracies)[-1])
    if flattest <= 0:
        return "the curve does not rise steadily"
    low = gap / max(slope + STANDARD_ERRORS * error, steepest)
    high = math.expm1(min(gap / flattest, math.log(1e6)))
    interval = (last[-1].samples - last[-2].samples) / now  # seen at an evaluation only
    high += interval
    if high > WIDEST * max(low, interval):
        return "the curve is too flat or uneven"
    return Forecast(low * now, high * now, "its curve")


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Of the straight line through points by least squares, and its standard error."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    if spread == 0:
        return 0.0, math.inf
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    off = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(off / (len(x) - 2) / spread)


def _slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """From each point to the next."""
    points = zip(x, y, strict=True)
    return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
