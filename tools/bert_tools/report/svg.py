"""A chart as inline SVG that stretches with the page while its texts and strokes do not."""

from collections.abc import Iterator, Sequence

from bert_tools.report.chart import Chart, Series
from bert_tools.report.markup import Markup, element, joined, raw
from bert_tools.report.numbers import significant
from bert_tools.report.scale import Scale, sample_scale, value_scale

COLOURS = 8  # of the style sheet, --c0 and on
_BOX = 1000  # units of the stretched part, across and up
_MOST_DOTS = 60
_MOST_MARK_LABELS = 3


def chart_card(chart: Chart, number: int) -> Markup:
    """The chart with its title, legend and axes; `number` is its place in the page's data."""
    across, up = sample_scale(chart), value_scale(chart)
    unit = element("span", f" {chart.unit}", class_="unit") if chart.unit else None
    return element(
        "figure",
        element("figcaption", element("h3", chart.title, unit), element("p", chart.about)),
        _legend(chart),
        element(
            "div",
            _value_axis(up),
            _plot(chart, across, up, number),
            _across_axis(chart.across, across),
            class_="chart",
        ),
        class_=f"card chart-{chart.key}",
    )


def run_class(run: int) -> str:
    """The style-sheet class of a run's colour and, beyond the eighth, of its dashes."""
    return "published" if run < 0 else f"r{run % COLOURS} dash{run // COLOURS}"


def _legend(chart: Chart) -> Markup:
    return element(
        "ul",
        *(
            element(
                "li",
                element("span", class_="key"),
                element("span", each.label, class_="name"),
                element("b", _last(each)),
                class_=f"{run_class(each.run)} {each.style}",
            )
            for each in chart.series
        ),
        class_="legend",
    )


def _last(series: Series) -> str | None:
    values = series.values
    return significant(values[-1]) if values and series.style != "published" else None


def _value_axis(up: Scale) -> Markup:
    texts = (
        element("text", label, x="100%", y=_percent(1 - up.share(value)), dy="0.32em")
        for value, label in up.ticks
    )
    return element("svg", *texts, class_="values", aria_hidden="true")


def _across_axis(what: str, across: Scale) -> Markup:
    texts = []
    for value, label in across.ticks:
        share = across.share(value)
        anchor = "start" if share < 0.02 else "end" if share > 0.97 else "middle"
        texts.append(element("text", label, x=_percent(share), y="16", text_anchor=anchor))
    name = element("text", what, x="100%", y="34", text_anchor="end", class_="axis")
    return element("svg", *texts, name, class_="samples", aria_hidden="true")


def _plot(chart: Chart, across: Scale, up: Scale, number: int) -> Markup:
    curves = (
        element(
            "path", d=raw(path_of(each, across, up)), class_=f"{run_class(each.run)} {each.style}"
        )
        for each in chart.series
    )
    stretched = element(
        "svg",
        *curves,
        viewBox=f"0 0 {_BOX} {_BOX}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
        class_="curves",
    )
    said = "; ".join(
        f"{each.label}, {len(each.values)} values, the last {significant(each.values[-1])}"
        for each in chart.series
        if each.values
    )
    return element(
        "svg",
        element("title", f"{chart.title} over {chart.across}: {said}"),
        *_grid(up),
        *_levels(chart, up),
        *_marks(chart, across),
        stretched,
        *_dots(chart, across, up),
        class_="plot",
        role="img",
        tabindex="0",
        data_chart=number,
    )


def path_of(series: Series, across: Scale, up: Scale) -> str:
    """The curve in the stretched units; a gap begins it anew."""
    words, pen = [], "M"
    for x, value in series.points:
        if value is None:
            pen = "M"
            continue
        left, top = across.share(x) * _BOX, (1 - up.share(value)) * _BOX
        words.append(f"{pen}{left:.1f} {top:.1f}")
        pen = "L"
    return "".join(words)


def _grid(up: Scale) -> Iterator[Markup]:
    for value, _ in up.ticks:
        y = _percent(1 - up.share(value))
        yield element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")


def _levels(chart: Chart, up: Scale) -> Iterator[Markup]:
    for value, label in chart.levels:
        y = _percent(1 - up.share(value))
        yield element("line", x1="0", x2="100%", y1=y, y2=y, class_="level")
        yield element("text", label, x="6", y=y, dy="-0.4em", class_="level")


def _marks(chart: Chart, across: Scale) -> Iterator[Markup]:
    for place, (x, label, run) in enumerate(chart.marks):
        share = across.share(x)
        at = _percent(share)
        yield element("line", x1=at, x2=at, y1="0", y2="100%", class_=f"mark {run_class(run)}")
        if place < _MOST_MARK_LABELS:
            anchor, shift = ("end", "-5") if share > 0.6 else ("start", "5")
            words = {"x": at, "dx": shift, "y": "96%", "text_anchor": anchor}
            yield element("text", label, class_=f"mark {run_class(run)}", **words)


def _dots(chart: Chart, across: Scale, up: Scale) -> Iterator[Markup]:
    for series in chart.series:
        shown = [(x, value) for x, value in series.points if value is not None]
        # A single value makes no line.
        if series.style == "published" or not _has_dots(chart, shown):
            continue
        for x, value in shown:
            cx, cy = _percent(across.share(x)), _percent(1 - up.share(value))
            yield element("circle", cx=cx, cy=cy, r="3.2", class_=f"dot {run_class(series.run)}")


def _has_dots(chart: Chart, shown: Sequence[object]) -> bool:
    return len(shown) == 1 or (chart.has_dots and len(shown) <= _MOST_DOTS)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def share_bar(shares: Sequence[tuple[str, float]], said: str) -> Markup:
    """A bar of parts one after the other: the class of each and its share of the whole."""
    parts, left = [], 0.0
    for name, share in shares:
        part = {"x": _percent(left), "y": "0", "width": _percent(share), "height": "100%"}
        parts.append(element("rect", class_=name, **part))
        left += share
    return element("svg", element("title", said), joined(*parts), class_="bar", role="img")
