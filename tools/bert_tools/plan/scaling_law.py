"""Fits time = a * p^b over p accelerators to MLPerf entries, and splits b in two. No torch.

Ordinary least squares on logarithms (`scipy.stats.linregress`). As time = samples / throughput,
the exponent of the time is that of the samples (the statistical part: larger batches need more of
them) less that of the throughput (the hardware's part). Intervals: Student's t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_tools.common.means import quantile_95
from bert_tools.plan.entries import Entry
from mlperf_bert.errors import ConfigError

_STEEPEST = 10  # of an exponent, so that every value of the law is a number


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """value = coefficient * p^exponent, through `count` entries.

    `half_width` is half of the exponent's 95 % interval by Student's t; None if two entries fix the
    line.
    """

    coefficient: float
    exponent: float
    half_width: float | None = None
    count: int = 0

    def at(self, accelerators: float) -> float:
        """The value at so many accelerators."""
        return float(self.coefficient * accelerators**self.exponent)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The exponent's 95 % interval; None if two entries fix the line."""
        if self.half_width is None:
            return None
        return self.exponent - self.half_width, self.exponent + self.half_width


# Cerebras' fit to MLPerf v0.7 (July 2020), p NVIDIA A100: minutes = 228.3 * p^-0.7392.
CEREBRAS = PowerLaw(coefficient=228.3, exponent=-0.7392)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLaw:
    """The fits over the entries; throughput and samples are None if too few entries have them."""

    entries: tuple[Entry, ...]
    time: PowerLaw
    throughput: PowerLaw | None
    samples: PowerLaw | None

    def residual(self, entry: Entry) -> float:
        """Ratio of the entry's time to the law's."""
        return (entry.time_min or math.nan) / self.time.at(entry.accelerators or math.nan)


def fit_law(entries: Sequence[Entry]) -> ScalingLaw:
    """Fit entries that all have accelerators and a time.

    Raises ConfigError for too few entries, and for sizes that differ so little that the line
    through them is no law.
    """
    time = _fit([(entry.accelerators, entry.time_min) for entry in entries])
    if time is None:
        problem = "no entry is left to fit"
        if len(entries) == 1:
            problem = f"one entry alone, {entries[0].name!r}, makes no law"
        elif entries:
            problem = f"all {len(entries)} entries have {entries[0].accelerators:,} accelerators"
        remedy = "give entries of two sizes at least, or filter less"
        raise ConfigError("plan law", problem, remedy)
    return ScalingLaw(
        entries=tuple(entries),
        time=time,
        throughput=_fit([(entry.accelerators, entry.seq_per_s) for entry in entries]),
        samples=_fit([(entry.accelerators, entry.samples) for entry in entries]),
    )


def _fit(points: Sequence[tuple[int | None, float | None]]) -> PowerLaw | None:
    """The line through the points that have a value; None if they are of one size."""
    from scipy.stats import linregress  # takes a second, and few answers need it

    known = [(float(size), float(value)) for size, value in points if size and value]
    if len({size for size, _ in known}) < 2:
        return None
    sizes, values = np.log(np.array(known)).T
    line = linregress(sizes, values)
    if abs(line.slope) > _STEEPEST:
        problem = f"the line through {len(known)} entries is p^{line.slope:.3g}"
        raise ConfigError("plan law", problem, "give entries whose sizes differ more")
    degrees = len(known) - 2
    return PowerLaw(
        coefficient=math.exp(line.intercept),
        exponent=float(line.slope),
        half_width=quantile_95(degrees) * float(line.stderr) if degrees else None,
        count=len(known),
    )
