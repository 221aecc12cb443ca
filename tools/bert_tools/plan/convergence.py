"""Samples that a closed run is expected to need: MLPerf's reference convergence points (RCP).

`convergence_points.csv` holds the points of BERT in the rules 2.1 to 5.0, as mlperf-logging's
`rcp_checker` ships and trims them; between them it interpolates like that checker. No torch.
"""

import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Literal

# Critical value of a one-sided Student t-test at 5 % with 20 + 8 - 2 degrees of freedom: an
# interpolated point counts as 20 runs, and ten runs without the best and the worst are 8.
_T_95 = 1.7056179
_INTERPOLATED_RUNS, _SUBMITTED_RUNS = 20, 8


@dataclass(frozen=True, slots=True)
class ConvergencePoint:
    """A point of the table: samples to the target over reference runs at one batch."""

    global_batch_size: int
    runs: int
    mean_samples: float
    std_samples: float
    minimum_samples: float
    in_pruned_set: bool


@dataclass(frozen=True, slots=True)
class ExpectedSamples:
    """Samples to the target at a batch, and the lowest mean of ten runs that the checker passes.

    `kind` says where they come from: a `point` of the table, `between` two of them, or the
    `smallest` point, with which the checker compares smaller batches.
    """

    mean: float
    minimum: float
    kind: Literal["point", "between", "smallest"]


@cache
def convergence_points() -> tuple[ConvergencePoint, ...]:
    """The whole table, by batch; the checker prunes it to the hardest points."""
    name = "convergence_points.csv"
    with resources.files(__package__).joinpath(name).open(encoding="utf-8") as file:
        return tuple(
            ConvergencePoint(
                int(row["global_batch_size"]),
                int(row["runs"]),
                float(row["mean_samples"]),
                float(row["std_samples"]),
                float(row["minimum_samples"]),
                row["in_pruned_set"] == "yes",
            )
            for row in csv.DictReader(file)
        )


def expected_samples(global_batch_size: int) -> ExpectedSamples | None:
    """The samples that the checker of rules 2.1 to 5.0 expects of a closed run with this batch.

    None above the largest point, where the checker asks for a reference run first.
    """
    points = [point for point in convergence_points() if point.in_pruned_set]
    if global_batch_size > points[-1].global_batch_size:
        return None
    if global_batch_size < points[0].global_batch_size:
        return ExpectedSamples(points[0].mean_samples, points[0].minimum_samples, "smallest")
    for point in points:
        if global_batch_size == point.global_batch_size:
            return ExpectedSamples(point.mean_samples, point.minimum_samples, "point")
    low, high = next(
        pair for pair in pairwise(points) if global_batch_size < pair[1].global_batch_size
    )
    return _between(low, high, global_batch_size)


def _between(low: ConvergencePoint, high: ConvergencePoint, batch: int) -> ExpectedSamples:
    share = (batch - low.global_batch_size) / (high.global_batch_size - low.global_batch_size)
    mean = low.mean_samples + share * (high.mean_samples - low.mean_samples)
    std = low.std_samples + share * (high.std_samples - low.std_samples)
    least = mean - _T_95 * std * math.sqrt(1 / _INTERPOLATED_RUNS + 1 / _SUBMITTED_RUNS)
    return ExpectedSamples(mean, least, "between")
