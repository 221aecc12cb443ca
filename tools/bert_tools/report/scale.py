"""The ranges and ticks of a chart, the same for the page and for the pictures."""

from dataclasses import dataclass

from bert_tools.report.chart import Chart
from bert_tools.report.numbers import tick_labels, ticks

_ROOM = 0.06  # above the highest value, and below the lowest where nothing else is the floor


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis: its range, and its ticks with their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)


def sample_scale(chart: Chart) -> Scale:
    """From 0 to the last value or mark."""
    ends = [x for series in chart.series for x, _ in series.points]
    ends += [x for x, _, _ in chart.marks]
    return _scale(0.0, max(ends, default=0.0) or 1.0)


def value_scale(chart: Chart) -> Scale:
    """Around all values and levels, from the chart's floor where it has one."""
    values = [value for series in chart.series for value in series.values]
    values += [value for value, _ in chart.levels]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if chart.floor is not None:
        low = min(low, chart.floor)
    if not high > low:
        room = abs(high) * _ROOM or 1.0
        return _scale(low if chart.floor is not None else low - room, high + room)
    room = high * _ROOM - low * _ROOM
    return _scale(low if chart.floor == low else low - room, high + room)


def _scale(low: float, high: float) -> Scale:
    places = ticks(low, high)
    return Scale(low, high, tuple(zip(places, tick_labels(places), strict=True)))
