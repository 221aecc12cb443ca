"""Charts, independent of how they are drawn: curves, scales, and short numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Point: TypeAlias = tuple[float, float | None]  # position and value; None is a gap

MINUS = "\N{MINUS SIGN}"
_MINUTE, _HOUR = 60.0, 3600.0
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_MOST_PLAIN = 1e15
_ROOM = 0.06  # above the highest value, and below the lowest unless a floor is given
MOST_DOTS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve: values by samples; `run` is the number of its run."""

    run: int
    label: str
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        """The values without gaps."""
        return [value for _, value in self.points if value is not None]


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis: its range, and its ticks with their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """The relative position of a value, 0 at the low end and 1 at the high one."""
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of a key of `metrics.jsonl` on one scale, over samples.

    The scale begins at `floor` or below; `levels` are horizontal lines (value, label); `has_dots`
    shows each value.
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
        """The scale from 0 to the last value."""
        ends = [x for series in self.series for x, _ in series.points]
        return _scale(0.0, max(ends, default=0.0) or 1.0)

    def value_scale(self) -> Scale:
        """The scale around all values and levels, from the floor if there is one."""
        values = [value for series in self.series for value in series.values]
        values += [value for value, _ in self.levels]
        low, high = min(values, default=0.0), max(values, default=1.0)
        if self.floor is not None:
            low = min(low, self.floor)
        if not high > low:
            room = abs(high) * _ROOM or 1.0
            return _scale(low if self.floor is not None else low - room, high + room)
        room = high * _ROOM - low * _ROOM
        return _scale(low if self.floor == low else low - room, high + room)

    def in_words(self) -> str:
        """The chart for readers who cannot see it."""
        curves = "; ".join(
            f"{each.label}, {len(each.values)} values, the last {significant(each.values[-1])}"
            for each in self.series
            if each.values
        )
        return f"{self.title} over samples: {curves}"

    def dots_of(self, series: Series) -> bool:
        """True if single values are shown as dots, as a lone value makes no line."""
        return len(series.values) <= (MOST_DOTS if self.has_dots else 1)


def _scale(low: float, high: float) -> Scale:
    places = ticks(low, high)
    return Scale(low, high, tuple(zip(places, tick_labels(places), strict=True)))


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most about `most` points, at least 8: the first and the last, and of each of equally many
    points in a row the lowest, the highest and a gap, where there is one.
    """
    if len(points) <= max(most, 8):
        return tuple(points)
    parts = max(1, (most - 2) // 2)
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
    """A number with significant digits, or all digits before the point, as 36,272 or 0.2719."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < _MOST_PLAIN:
        return f"{value:.{max(0, digits - 2)}e}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def seconds(value: float) -> str:
    """A time as `95.2 s`, `12 min 05 s` or `3 h 07 min`."""
    if value < 2 * _MINUTE:
        return f"{value:.1f} s" if value >= 1 or value == 0 else f"{value:.3f} s"
    if value < 2 * _HOUR:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    if value >= _MOST_PLAIN:
        return f"{value / _HOUR:.2e} h"
    hours, rest = divmod(round(value / _MINUTE), 60)
    return f"{hours:,} h {rest:02d} min"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Even values within low .. high, each a multiple of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw >= 1e-300 else 0.0
    if not power or not math.isfinite(power):
        return [low, high]
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last - first > 2 * most:  # a range below floating-point resolution
        return [low, high]
    return [number * step for number in range(first, last + 1)] or [low, high]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of a row of ticks: just enough decimals, and one prefix for all, as 40 k."""
    largest = max(map(abs, values), default=0.0)
    step = values[1] - values[0] if len(values) > 1 else largest
    if largest >= _MOST_PLAIN or 0 < step < 1e-4:
        return [f"{value:.1e}".replace("-", MINUS) if value else "0" for value in values]
    found = [pair for pair in _PREFIXES if largest >= max(1e4, pair[0])]
    factor, prefix = found[0] if found else (1.0, "")
    decimals = 0  # enough for the step
    while decimals < 6 and abs((step / factor * 10**decimals + 0.5) % 1 - 0.5) > 1e-6:
        decimals += 1
    return [
        f"{value / factor:,.{decimals}f} {prefix}".strip().replace("-", MINUS) if value else "0"
        for value in values
    ]
