"""Fits time = a * p^b over p accelerators to MLPerf entries, and splits b in two. No torch.

Ordinary least squares on logarithms. As time = samples / throughput, the exponent of the time is
that of the samples (the statistical part: larger batches need more of them) less that of the
throughput (the hardware's part). Intervals: percentile bootstrap over entries (Efron, 1979), and
Student's t, which says more for few entries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bert_tools.common.means import quantile_95
from bert_tools.plan.entries import Entry
from mlperf_bert.common.errors import ConfigError

RESAMPLES, LEVEL = 4000, 0.95
_MOST_DRAWN = 10**6  # entries held at a time
_MOST_LOGARITHM = 460  # limit of a value's logarithm, about 1e200: products with it stay finite
_MOST_DOUBLINGS = 60  # most accelerators for half the time; more counts as never

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """value = coefficient * p^exponent, through `count` entries.

    `low` and `high` bound the exponent by bootstrap, `half_width` by Student's t; None if two
    entries fix the line. `coefficient_low` and `_high` go with the bootstrap; they are also None if
    no float holds them, as with sizes that hardly differ.
    """

    coefficient: float
    exponent: float
    low: float | None = None
    high: float | None = None
    coefficient_low: float | None = None
    coefficient_high: float | None = None
    half_width: float | None = None
    count: int = 0

    def at(self, accelerators: float) -> float:
        """The value at so many accelerators; infinite if no float holds it."""
        try:
            return float(self.coefficient * accelerators**self.exponent)
        except OverflowError:
            return math.inf


# Cerebras' fit to MLPerf v0.7 (July 2020), p NVIDIA A100: minutes = 228.3 * p^-0.7392.
CEREBRAS = PowerLaw(coefficient=228.3, exponent=-0.7392)


@dataclass(frozen=True, kw_only=True, slots=True)
class MarginalCost:
    """Cost of more accelerators at a size, in accelerator-minutes of one run.

    Each further accelerator costs `per_added` accelerator-minutes more. Half the time takes
    `for_half_time` accelerators and `half_time_costs` more; None if it is out of reach.
    """

    accelerators: float
    time_min: float
    accelerator_minutes: float
    per_added: float
    for_half_time: float | None
    half_time_costs: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLaw:
    """The fits over the entries; throughput and samples are None if too few entries have them."""

    entries: tuple[Entry, ...]
    time: PowerLaw
    throughput: PowerLaw | None
    samples: PowerLaw | None

    @property
    def split_remainder(self) -> float | None:
        """Exponent of the time less that of the split: the means of time and samples differ.

        Entries without samples, which only the time's fit uses, add to it.
        """
        if self.throughput is None or self.samples is None:
            return None
        return self.time.exponent - (self.samples.exponent - self.throughput.exponent)

    def residual(self, entry: Entry) -> float:
        """Ratio of the entry's time to the law's."""
        return _known(entry.time_min) / self.time.at(_known(entry.accelerators))


def fit_law(entries: Sequence[Entry], seed: int = 0) -> ScalingLaw:
    """Fit entries that all have accelerators and a time.

    Raises ConfigError for too few entries, and for sizes that differ so little that the line's
    coefficient is beyond floats.
    """
    sizes = {entry.accelerators for entry in entries}
    if len(sizes) < 2:
        problem = "no entry is left to fit"
        if len(entries) == 1:
            problem = f"one entry alone, {entries[0].name!r}, makes no law"
        elif entries:
            problem = f"all {len(entries)} entries have {_known(entries[0].accelerators):,.0f}"
            problem += " accelerators"
        remedy = "give entries of two sizes at least, or filter less"
        raise ConfigError("plan law", problem, remedy)
    return ScalingLaw(
        entries=tuple(entries),
        time=_fit([(entry.accelerators, entry.time_min) for entry in entries], seed),
        throughput=_fit_known([(each.accelerators, each.seq_per_s) for each in entries], seed),
        samples=_fit_known([(each.accelerators, each.samples) for each in entries], seed),
    )


def marginal_cost(law: PowerLaw, accelerators: float) -> MarginalCost:
    """The cost by the time's law, p * time = a * p^(1 + b), and its derivative.

    Raises ConfigError if the law's time is beyond floats.
    """
    logarithm = math.log(law.coefficient) + law.exponent * math.log(accelerators)
    if abs(logarithm) > _MOST_LOGARITHM:
        problem = f"the law's time on {accelerators:,.0f} accelerators is beyond numbers"
        raise ConfigError("plan law", problem, "give a size nearer to the entries")
    time = law.at(accelerators)
    cost = accelerators * time
    more: float | None = None
    if law.exponent < 0 and -1 / law.exponent <= _MOST_DOUBLINGS:
        more = 2 ** (-1 / law.exponent)
    return MarginalCost(
        accelerators=accelerators,
        time_min=time,
        accelerator_minutes=cost,
        per_added=(1 + law.exponent) * time,
        for_half_time=None if more is None else accelerators * more,
        half_time_costs=None if more is None else cost * (more / 2 - 1),
    )


def _fit_known(points: Sequence[tuple[int | None, float | None]], seed: int) -> PowerLaw | None:
    known = [(size, value) for size, value in points if value is not None]
    return _fit(known, seed) if len({size for size, _ in known}) >= 2 else None


def _fit(points: Sequence[tuple[int | None, float | None]], seed: int) -> PowerLaw:
    x = np.log(np.array([_known(size) for size, _ in points]))
    y = np.log(np.array([_known(value) for _, value in points]))
    slope, intercept = (float(each[0]) for each in _lines(x[None], y[None]))
    _check_line(x, slope, intercept)
    line = PowerLaw(coefficient=math.exp(intercept), exponent=slope, count=len(points))
    degrees = len(points) - 2
    if degrees == 0:
        return line
    spread = float(np.sum((x - x.mean()) ** 2))
    error = math.sqrt(float(np.sum((y - intercept - slope * x) ** 2)) / degrees / spread)
    shares = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    drawn_slopes, drawn_intercepts = _resampled(x, y, seed)
    low, high = np.quantile(drawn_slopes, shares).tolist()
    least, most = np.quantile(drawn_intercepts, shares).tolist()
    return replace(
        line,
        low=low,
        high=high,
        coefficient_low=math.exp(least) if abs(least) <= _MOST_LOGARITHM else None,
        coefficient_high=math.exp(most) if abs(most) <= _MOST_LOGARITHM else None,
        half_width=quantile_95(degrees) * error,
    )


def _check_line(x: Floats, slope: float, intercept: float) -> None:
    ends = (0.0, float(x.min()), float(x.max()))
    if max(abs(intercept + slope * end) for end in ends) <= _MOST_LOGARITHM:
        return
    least, most = (f"{math.exp(end):,.0f}" for end in ends[1:])
    problem = f"the line through {len(x)} entries of {least} to {most} accelerators is so steep"
    problem += f" (p^{slope:.3g}) that no number holds it"
    raise ConfigError("plan law", problem, "give entries whose sizes differ more")


def _resampled(x: Floats, y: Floats, seed: int) -> tuple[Floats, Floats]:
    """Slopes and intercepts of resampled entries; resamples of one size only are left out."""
    generator = np.random.default_rng(seed)
    found = []
    part = max(1, min(RESAMPLES, _MOST_DRAWN // len(x)))  # at a time
    for begun in range(0, RESAMPLES, part):
        drawn = generator.integers(len(x), size=(min(part, RESAMPLES - begun), len(x)))
        of_x, of_y = x[drawn], y[drawn]
        has_two_sizes = np.ptp(of_x, axis=1) > 0
        found.append(_lines(of_x[has_two_sizes], of_y[has_two_sizes]))
    slopes, intercepts = (np.concatenate(each) for each in zip(*found, strict=True))
    return slopes, intercepts


def _lines(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Slope and intercept of the least-squares line of each row."""
    mean_x, mean_y = x.mean(axis=1), y.mean(axis=1)
    of_x = x - mean_x[:, None]
    slopes = np.sum(of_x * (y - mean_y[:, None]), axis=1) / np.sum(of_x**2, axis=1)
    return slopes, mean_y - slopes * mean_x


def _known(value: float | None) -> float:
    assert value is not None, "entries without it were left out"
    return float(value)
