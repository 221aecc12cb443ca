"""Means, tables and figures with which several tools summarize measurements."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlperf_bert.errors import one_line
from mlperf_bert.extras import require_packages

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def olympic_mean(minutes: Sequence[float]) -> float:
    """Return the mean of times without the fastest and the slowest one, as MLPerf scores results.

    There must be at least three times. Source: MLPerf training rules, section on scoring.
    """
    middle = sorted(minutes)[1:-1]
    return math.fsum(middle) / len(middle)


def quantile_95(degrees: int) -> float:
    """Return the t value of a two-sided 95% confidence interval (Student's t distribution).

    `degrees` is the number of degrees of freedom.
    """
    from scipy.special import stdtrit  # imported here because it takes 0.2 s

    return float(stdtrit(degrees, 0.975))


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the half-width of its 95% confidence interval.

    The half-width is t * s / sqrt(n), where s is the standard deviation of the n values. It assumes
    independent values from one normal distribution, and is None for a single value.
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    deviation = math.sqrt(squares / (len(values) - 1))
    return mean, quantile_95(len(values) - 1) * deviation / math.sqrt(len(values))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: str = "") -> list[str]:
    """Format a table as lines of text, with two spaces between columns.

    Args:
        header: names of the columns.
        rows: cells of each row, which are shown on one line and never truncated.
        left: names of the left-aligned columns, separated by commas. The others are right-aligned.
    """
    from rich.console import Console  # imported here because only tables need it
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
    """Format a Markdown table whose first column is left-aligned and the others right-aligned."""
    cells = [[one_line(cell).replace("|", "/") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in cells
    ]
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [lines[0], "|" + "|".join(rule) + "|", *lines[1:]]


def new_figure(width: float, height: float) -> "Figure":
    """Create an empty matplotlib figure with this width and height in inches.

    Raises ConfigError if matplotlib (extra `plots`) is not installed.
    """
    require_packages("picture", "plots", "matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: "Figure", dots_per_inch: int = 100) -> bytes:
    """Render a figure as a PNG file. The same figure always gives the same bytes."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return picture.getvalue()
