"""The charts of a report as PNG pictures, for slides and papers; needs the extra `plots`."""

import math
import warnings
from typing import TYPE_CHECKING

from bert_tools.common.figures import new_figure, png
from bert_tools.report.chart import Chart, Series
from mlperf_bert.common.errors import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES, _DOTS_PER_INCH = (7.5, 4.2), 160
_MOST_AMONG_CURVES, _INCHES_OF_A_ROW = 6, 0.22
_LONGEST_LABEL = 40  # characters
# The page's own, in the light.
_COLOURS = ("#0067a8", "#c85200", "#00805c", "#a83f86", "#8a6a00", "#2f9fd0", "#4b4f9e", "#7a3b1d")
_PUBLISHED, _QUIET, _GRID = "#7b8594", "#5b6472", "#e9ecf0"
_DASHES = ("solid", (0, (8, 3)), (0, (3, 3)), (0, (10, 3, 2, 3)))


def chart_picture(chart: Chart) -> bytes:
    """A PNG of one chart. Raises ConfigError where matplotlib is not installed."""
    figure = new_figure(*_INCHES)
    axes = figure.subplots()
    for series in chart.series:
        _draw(axes, series, has_dots=chart.dots_of(series))
    points = "offset points"
    for value, label in chart.levels:
        axes.axhline(value, color=_QUIET, linestyle=(0, (2, 4)), linewidth=1)
        axes.annotate(_plain(label), (0.01, value), (0, 4), ("axes fraction", "data"), points)
    for x, label, run in chart.marks:
        colour, places = _colour(run), ("data", "axes fraction")
        axes.axvline(x, color=colour, linestyle=(0, (5, 4)), linewidth=1)
        axes.annotate(_plain(label), (x, 0.02), (4, 0), places, points, color=colour)
    _frame(axes, chart)
    with warnings.catch_warnings():  # a character that the font lacks is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return png(figure, _DOTS_PER_INCH)


def _draw(axes: "Axes", series: Series, *, has_dots: bool) -> None:
    is_published = series.style == "published"
    axes.plot(
        [x for x, _ in series.points],
        [float("nan") if value is None else value for _, value in series.points],
        color=_colour(series.run),
        linewidth=1.2 if is_published else 1.7,
        linestyle=(0, (5, 3)) if is_published else _dashes(series),
        marker="o" if has_dots else None,
        markersize=4,
        markerfacecolor="white",
        clip_on=False,
        zorder=1 if is_published else 2,
    )


def _dashes(series: Series) -> object:
    return (0, (1, 2)) if series.style == "second" else _DASHES[series.run // len(_COLOURS) % 4]


def _frame(axes: "Axes", chart: Chart) -> None:
    across, up = chart.sample_scale(), chart.value_scale()
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    axes.set_xticks([x for x, _ in across.ticks], [label for _, label in across.ticks])
    axes.set_yticks([y for y, _ in up.ticks], [label for _, label in up.ticks])
    axes.set_xlabel(_plain(chart.across), loc="right", color=_QUIET)
    axes.tick_params(colors=_QUIET, length=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    unit = f" ({chart.unit})" if chart.unit else ""
    axes.set_title(f"{chart.title}{unit}", loc="left", fontsize=12, fontweight="bold", pad=18)
    axes.annotate(
        chart.about, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=8.5, color=_QUIET
    )
    if len(chart.series) > 1:
        _legend(axes, chart)


def _legend(axes: "Axes", chart: Chart) -> None:
    """Draw the legend among the curves; below them if it is long, in a taller picture."""
    # matplotlib omits labels that begin with an underscore, unless set afterwards.
    lines = axes.get_lines()[: len(chart.series)]
    numbers = [str(number) for number in range(len(lines))]
    if len(lines) <= _MOST_AMONG_CURVES:
        legend = axes.legend(lines, numbers, frameon=False, fontsize=9, handlelength=3.5)
    else:
        figure = axes.get_figure(root=True)
        assert figure is not None
        width, height = _INCHES
        figure.set_size_inches(width, height + _INCHES_OF_A_ROW * math.ceil(len(lines) / 2))
        legend = figure.legend(
            lines,
            numbers,
            loc="outside lower left",
            ncols=2,
            frameon=False,
            fontsize=9,
            handlelength=3.5,
        )
    for text, series in zip(legend.get_texts(), chart.series, strict=True):
        label = one_line(series.label)
        if len(label) > _LONGEST_LABEL:
            half = _LONGEST_LABEL // 2
            label = f"{label[:half]}\N{HORIZONTAL ELLIPSIS}{label[-half:]}"
        text.set_text(_plain(label))


def _colour(run: int) -> str:
    return _PUBLISHED if run < 0 else _COLOURS[run % len(_COLOURS)]


def _plain(text: str) -> str:
    """Escape dollar signs, because matplotlib reads text between them as a formula."""
    return one_line(text).replace("$", r"\$")
