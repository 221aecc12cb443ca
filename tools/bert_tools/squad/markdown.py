"""Tables in Markdown that read well as plain text."""

from collections.abc import Sequence

from mlperf_bert.common.errors import one_line


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with columns as wide as their widest cell; the first to the left, others right."""
    cells = [[one_line(cell).replace("|", "/") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in cells
    ]
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [lines[0], "|" + "|".join(rule) + "|", *lines[1:]]
