"""The tables of a report's page, and the large numbers at its top."""

from collections.abc import Sequence

from bert_tools.report.facts import RunFacts
from bert_tools.report.markup import Content, Markup, element
from bert_tools.report.measures import MEASURES, Measure, Number, numbers_of
from bert_tools.report.numbers import significant
from bert_tools.report.settings import Row
from bert_tools.report.svg import run_class

_LEAST_CHANGE = 0.0005  # which is written as 0.1 %
_TILES = (
    *("time_to_train_s", "samples_to_target", "best_accuracy"),
    *("samples_per_s", "tokens_per_s", "memory_gib"),
)


def tiles(facts: RunFacts) -> Markup | None:
    """The numbers one asks for first, of a single run."""
    numbers = numbers_of(facts)
    shown = [
        element(
            "div",
            element("div", each.label.partition(" (")[0].partition(",")[0], class_="label"),
            element("div", *_number_and_unit(each, value), class_="number"),
            class_="tile",
        )
        for each in MEASURES
        if each.key in _TILES and (value := numbers[each.key]) is not None
    ]
    return element("div", *shown, class_="tiles") if shown else None


def _number_and_unit(measure: Measure, value: Number) -> tuple[Content, ...]:
    words = measure.in_words(value)
    unit = element("span", measure.unit, class_="unit") if measure.unit else None
    return words.removesuffix(measure.unit), unit


def measure_table(runs: Sequence[RunFacts]) -> Markup:
    """All single numbers, a column for each run; beside the first, how much others differ."""
    columns = [numbers_of(each) for each in runs]
    rows = []
    for measure in MEASURES:
        values = [column[measure.key] for column in columns]
        if all(value is None for value in values):
            continue
        cells = [
            element("td", _change(values[0], value, place), measure.in_words(value))
            if value is not None
            else element("td", "\N{EN DASH}", class_="none")
            for place, value in enumerate(values)
        ]
        rows.append(element("tr", element("th", measure.label, scope="row"), *cells))
    return table(runs, rows, "numbers")


def _change(first: Number | None, value: Number, place: int) -> Markup | None:
    if not place or not first or not value or abs(value) > 1e6 * abs(first):
        return None
    ratio = value / first
    if abs(ratio - 1) < _LEAST_CHANGE:
        return None
    if 0.1 < ratio < 10:
        words = f"{100 * (ratio - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
    else:
        words = f"{significant(ratio, 2)} \N{MULTIPLICATION SIGN}"
    return element("span", words, class_="change")


def table(runs: Sequence[RunFacts], rows: Sequence[Markup], kind: str) -> Markup:
    """A table with a column for each run, which scrolls by itself where it is too wide."""
    heads = [
        element(
            "th",
            element("span", class_="key"),
            element("span", each.label),
            scope="col",
            class_=run_class(number),
        )
        for number, each in enumerate(runs)
    ]
    top = [element("thead", element("tr", element("td"), *heads))] if len(runs) > 1 else []
    inner = element("table", *top, element("tbody", *rows), class_=kind)
    return element("div", inner, class_="scroll", tabindex="0")


def row_table(runs: Sequence[RunFacts], rows: Sequence[Row]) -> Markup:
    """Settings or surroundings; what differs is marked."""
    found = [
        element(
            "tr",
            element("th", row.name, scope="row"),
            *(
                element("td", "\N{EN DASH}" if value is None else value or "none")
                for value in row.values
            ),
            class_="differs" if row.differs else None,
        )
        for row in rows
    ]
    return table(runs, found, "texts")
