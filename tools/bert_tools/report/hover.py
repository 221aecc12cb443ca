"""The values that the page's script shows under the pointer, as JSON inside the page."""

import json
from collections.abc import Sequence
from typing import Any

from bert_tools.report.chart import Chart
from bert_tools.report.markup import Markup, element, raw
from bert_tools.report.scale import sample_scale
from bert_tools.report.svg import run_class
from mlperf_bert.common.errors import one_line

_DIGITS = 7  # significant
_MOST_EXACT = 2**53  # of JavaScript's numbers


def hover_data(charts: Sequence[Chart]) -> Markup:
    """A script element of data, which no browser runs."""
    text = json.dumps([_of_chart(chart) for chart in charts], separators=(",", ":"))
    for sign in "<>&":  # as no text from outside may end the element
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return element("script", raw(text), type="application/json", id="values")


def _of_chart(chart: Chart) -> dict[str, Any]:
    scale = sample_scale(chart)
    return {
        "unit": chart.unit,
        "across": chart.across,
        "low": scale.low,
        "high": scale.high,
        "series": [
            {
                "label": one_line(each.label),
                "class": f"{run_class(each.run)} {each.style}",
                "x": [_short(x) for x, value in each.points if value is not None],
                "y": [_short(value) for _, value in each.points if value is not None],
            }
            for each in chart.series
        ],
    }


def _short(value: float) -> int | float:
    if abs(value) < _MOST_EXACT and value == int(value):
        return int(value)
    return float(f"{value:.{_DIGITS}g}")
