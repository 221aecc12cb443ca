"""Tables: aligned for a terminal or a file, and in Markdown."""

import io
from collections.abc import Sequence

from mlperf_bert.errors import one_line


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
