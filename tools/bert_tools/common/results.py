"""What several tools make of measurements: means, aligned and Markdown tables, and pictures."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlperf_bert.errors import one_line
from mlperf_bert.extras import require_packages

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def olympic_mean(minutes: Sequence[float]) -> float:
    """MLPerf's mean, without the fastest and the slowest; needs at least three values.

    Source: training rules, section on scoring.
    """
    middle = sorted(minutes)[1:-1]
    return math.fsum(middle) / len(middle)


def quantile_95(degrees: int) -> float:
    """Student's two-sided 95 % quantile for that many degrees of freedom."""
    from scipy.special import stdtrit  # takes 0.2 s, and few answers need it

    return float(stdtrit(degrees, 0.975))


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of values, and half of its 95 % interval; None for a single value.

    For independent values of one normal distribution: t * s / sqrt(n).
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    deviation = math.sqrt(squares / (len(values) - 1))
    return mean, quantile_95(len(values) - 1) * deviation / math.sqrt(len(values))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: str = "") -> list[str]:
    """Lines of a table, two spaces between its columns, without spaces at their ends.

    Args:
        header: names of the columns.
        rows: cells; each is shown on one line and never cut.
        left: names of the left-aligned columns; others are right-aligned.
    """
    from rich.console import Console  # a command that prints no table needs no rich
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        is_left = name in left.split(",")
        table.add_column(Text(name), justify="left" if is_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    page = io.StringIO()
    Console(file=page, width=100_000, color_system=None, force_terminal=False).print(table)
    return [line.rstrip() for line in page.getvalue().splitlines()]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with columns as wide as their widest cell; the first left-aligned, others right."""
    cells = [[one_line(cell).replace("|", "/") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in cells
    ]
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [lines[0], "|" + "|".join(rule) + "|", *lines[1:]]


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a width and height in inches.

    Raises ConfigError if matplotlib (extra `plots`) is not installed.
    """
    require_packages("picture", "plots", "matplotlib", may_ask=False)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: "Figure", dots_per_inch: int = 100) -> bytes:
    """The figure as a PNG: the same bytes for the same figure."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return picture.getvalue()
