"""Describes charts (curves, scales, tick labels) independently of how they are drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Point: TypeAlias = tuple[float, float | None]  # position and value, None for a gap

MINUS = "\N{MINUS SIGN}"
_MINUTE, _HOUR = 60.0, 3600.0
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_MAX_PLAIN = 1e15  # larger numbers are written with an exponent
# Fraction of the values' range that stays free above them, and below them if there is no floor.
_MARGIN = 0.06
MAX_DOTS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One run's curve of values over trained samples.

    `run` is the number of the run in the report. A value of None is a gap in the curve.
    """

    run: int
    label: str
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        """Return the curve's values without its gaps."""
        return [value for _, value in self.points if value is not None]


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of an axis: its range, and its ticks with their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Return the relative position of a value on the axis, from 0 (low end) to 1 (high end)."""
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one metric over samples, with one curve per run.

    `key` is the metric's key in `metrics.jsonl`. The vertical scale starts at `floor` or below.
    Each of `levels`, (value, label), becomes a horizontal line. If `has_dots` is true, dots mark
    the values of each curve that has at most MAX_DOTS of them.
    """

    key: str
    title: str
    unit: str
    about: str
    series: tuple[Series, ...] = ()
    floor: float | None = 0.0
    levels: tuple[tuple[float, str], ...] = ()
    has_dots: bool = False

    def sample_scale(self) -> Scale:
        """Return the horizontal scale, from 0 to the largest number of samples."""
        ends = [x for series in self.series for x, _ in series.points]
        return _scale(0.0, max(ends, default=0.0) or 1.0)

    def value_scale(self) -> Scale:
        """Return the vertical scale, which spans all values, all levels and the floor, if any."""
        values = [value for series in self.series for value in series.values]
        values += [value for value, _ in self.levels]
        low, high = min(values, default=0.0), max(values, default=1.0)
        if self.floor is not None:
            low = min(low, self.floor)
        if not high > low:
            margin = abs(high) * _MARGIN or 1.0
            return _scale(low if self.floor is not None else low - margin, high + margin)
        margin = high * _MARGIN - low * _MARGIN
        return _scale(low if self.floor == low else low - margin, high + margin)

    def in_words(self) -> str:
        """Return a description of the chart in one text, for readers who cannot see it."""
        curves = "; ".join(
            f"{each.label}, {len(each.values)} values, the last {significant(each.values[-1])}"
            for each in self.series
            if each.values
        )
        return f"{self.title} over samples: {curves}"

    def dots_of(self, series: Series) -> bool:
        """Return whether dots mark the values of a curve. A single value always has a dot."""
        return len(series.values) <= (MAX_DOTS if self.has_dots else 1)


def _scale(low: float, high: float) -> Scale:
    values = ticks(low, high)
    return Scale(low, high, tuple(zip(values, tick_labels(values), strict=True)))


def thinned(points: Sequence[Point], max_points: int) -> tuple[Point, ...]:
    """Reduce a curve to about `max_points` points, at least 8, so that its peaks stay visible.

    The first and the last point are kept. The points between them are split into equal parts. The
    lowest point, the highest point and the first gap, if any, of each part are kept.
    """
    if len(points) <= max(max_points, 8):
        return tuple(points)
    parts = max(1, (max_points - 2) // 2)
    inner = points[1:-1]
    kept: list[Point] = [points[0]]
    for part in range(parts):
        start, stop = part * len(inner) // parts, (part + 1) * len(inner) // parts
        values = {n: value for n in range(start, stop) if (value := inner[n][1]) is not None}
        chosen = {n for n in range(start, stop) if n not in values}
        chosen = {min(chosen)} if chosen else set()
        if values:
            chosen |= {min(values, key=values.__getitem__), max(values, key=values.__getitem__)}
        kept += [inner[n] for n in sorted(chosen)]
    return (*kept, points[-1])


def significant(value: float, digits: int = 4) -> str:
    """Format a number with significant digits, for example 36,272 or 0.2719.

    All digits before the decimal point are kept.
    """
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < _MAX_PLAIN:
        return f"{value:.{max(0, digits - 2)}e}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def seconds(value: float) -> str:
    """Format a time in seconds, for example `95.2 s`, `12 min 05 s` or `3 h 07 min`."""
    if value < 2 * _MINUTE:
        return f"{value:.1f} s" if value >= 1 or value == 0 else f"{value:.3f} s"
    if value < 2 * _HOUR:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    if value >= _MAX_PLAIN:
        return f"{value / _HOUR:.2e} h"
    hours, rest = divmod(round(value / _MINUTE), 60)
    return f"{hours:,} h {rest:02d} min"


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return about `wanted` evenly spaced values from low to high.

    The step between them is 1, 2 or 5 times a power of ten.
    """
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw)) if raw >= 1e-300 else 0.0
    if not power or not math.isfinite(power):
        return [low, high]
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last - first > 2 * wanted:  # the range is below floating-point resolution
        return [low, high]
    return [number * step for number in range(first, last + 1)] or [low, high]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return the labels for the ticks of one axis.

    The labels have few decimals and share one unit prefix, such as k.
    """
    largest = max(map(abs, values), default=0.0)
    step = values[1] - values[0] if len(values) > 1 else largest
    if largest >= _MAX_PLAIN or 0 < step < 1e-4:
        return [f"{value:.1e}".replace("-", MINUS) if value else "0" for value in values]
    found = [pair for pair in _PREFIXES if largest >= max(1e4, pair[0])]
    factor, prefix = found[0] if found else (1.0, "")
    decimals = 0  # as many as the step between two ticks needs
    while decimals < 6 and abs((step / factor * 10**decimals + 0.5) % 1 - 0.5) > 1e-6:
        decimals += 1
    return [
        f"{value / factor:,.{decimals}f} {prefix}".strip().replace("-", MINUS) if value else "0"
        for value in values
    ]
