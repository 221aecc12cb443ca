"""The page of a report: one HTML file that asks nothing of any network.

The values that its script shows under the pointer stand in it as JSON.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from bert_tools.report.chart import Chart
from bert_tools.report.charts import CONVERGENCE_POINT, comparable_curves
from bert_tools.report.facts import RunFacts
from bert_tools.report.goodput import BATCH
from bert_tools.report.goodput_section import goodput_section
from bert_tools.report.markup import Markup, element, joined, raw
from bert_tools.report.scale import sample_scale
from bert_tools.report.sections import (
    absent_section,
    difference_section,
    header,
    section,
    surroundings_sections,
    time_section,
    verdict_section,
)
from bert_tools.report.svg import chart_card, run_class
from bert_tools.report.tables import measure_table, tiles
from mlperf_bert.common.errors import one_line

_PUBLISHED = (
    "Published curves: one typical run of each of Samsung's open submissions to MLPerf Training "
    "v1.1 and v2.0, named by round and number of GPUs."
)

_DIGITS = 7  # significant
_MOST_EXACT = 2**53  # of JavaScript's numbers


def report_page(runs: Sequence[RunFacts], charts: Sequence[Chart], quiet: Sequence[str]) -> str:
    """The whole page for one run or several."""
    style, script = _text_of("page.css"), _text_of("page.js")
    title = ", ".join(each.label for each in runs)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"Report: {title}"),
        element("style", raw(style)),
    )
    body = element(
        "body",
        element("main", *_parts(runs, charts, quiet)),
        hover_data(charts),
        element("script", raw(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _parts(
    runs: Sequence[RunFacts], charts: Sequence[Chart], quiet: Sequence[str]
) -> list[Markup | None]:
    is_one = len(runs) == 1
    cards = [chart_card(chart, number) for number, chart in enumerate(charts)]
    of_batch = [card for chart, card in zip(charts, cards, strict=True) if chart.across == BATCH]
    over_samples = cards[: len(cards) - len(of_batch)]  # those come first
    numbers = section("In numbers" if is_one else "Side by side", measure_table(runs))
    return [
        element("header", element("h1", "Training report"), header(runs)),
        tiles(runs[0])
        if is_one
        else element("div", numbers, difference_section(runs), class_="pair"),
        _curves(runs, charts, over_samples),
        goodput_section(runs, of_batch),
        time_section(runs),
        verdict_section(runs),
        numbers if is_one else None,
        absent_section(runs, quiet),
        *surroundings_sections(runs),
        element("footer", f"Made by mlperf_bert report of {_names(runs)}."),
    ]


def _names(runs: Sequence[RunFacts]) -> str:
    return ", ".join(each.run.name for each in runs)


def _curves(
    runs: Sequence[RunFacts], charts: Sequence[Chart], cards: Sequence[Markup]
) -> Markup | None:
    if not cards:
        return None
    has_published = any(comparable_curves(each) for each in runs)
    missing = "No curve is published for this model, target, batch and optimizer."
    if any(label == CONVERGENCE_POINT for chart in charts for _, label, _ in chart.marks):
        missing += " MLPerf's reference needs as many samples as the convergence point says."
    return section(
        "Curves",
        element("div", *cards, class_="cards"),
        element("p", _PUBLISHED if has_published else missing, class_="about"),
    )


def _policy(style: str, script: str) -> str:
    """Nothing is loaded, and only this style sheet and this script are obeyed."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    digest = hashlib.sha256(joined(raw(text)).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _text_of(name: str) -> str:
    return resources.files("bert_tools.report").joinpath(name).read_text("utf-8")


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
