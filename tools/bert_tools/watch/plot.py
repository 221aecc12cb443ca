"""A curve as rows of characters: dots of braille, or stars where there is only ASCII."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Characters = Literal["unicode", "ascii"]
Mark = Literal["empty", "curve", "target"]
Cell = tuple[str, Mark]

_BRAILLE = 0x2800
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of rows, then columns, of a cell
_DOTS: dict[Characters, tuple[int, int]] = {"unicode": (2, 4), "ascii": (1, 1)}  # of a cell


def plot(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    *,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    target: float | None = None,
    characters: Characters = "unicode",
) -> list[list[Cell]]:
    """`height` rows of `width` cells, the top one first: the points joined by lines.

    Args:
        points: finite numbers, in the order they are joined; those outside the ranges are left out.
        width: cells of a row, at least 1.
        height: rows, at least 1.
        x_range: what the left and the right edge stand for.
        y_range: the same of the lower and the upper edge.
        target: a level across the whole width, behind the curve.
        characters: how dots are shown.
    """
    columns, rows = (
        size * dots for size, dots in zip((width, height), _DOTS[characters], strict=True)
    )
    places = [
        (_place(x, x_range, columns), rows - 1 - _place(y, y_range, rows))
        for x, y in points
        if x_range[0] <= x <= x_range[1] and y_range[0] <= y <= y_range[1]
    ]
    curve = set(places)
    for one, other in pairwise(places):
        curve.update(_line(one, other))
    level: set[tuple[int, int]] = set()
    if target is not None and y_range[0] <= target <= y_range[1]:
        row = rows - 1 - _place(target, y_range, rows)
        level = {(column, row) for column in range(0, columns, _DOTS[characters][0])}
    return [
        [_cell(column, row, curve, level, characters) for column in range(width)]
        for row in range(height)
    ]


def _place(value: float, limits: tuple[float, float], dots: int) -> int:
    """Which of `dots` between the limits; the middle one where these are equal."""
    low, high = limits
    share = (value - low) / (high - low) if high > low else 0.5
    return min(dots - 1, int(share * dots))


def _line(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots between two, a step at a time along the longer way."""
    steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]))
    return [
        (
            one[0] + round((other[0] - one[0]) * step / steps),
            one[1] + round((other[1] - one[1]) * step / steps),
        )
        for step in range(1, steps)
    ]


def _cell(
    column: int,
    row: int,
    curve: set[tuple[int, int]],
    level: set[tuple[int, int]],
    characters: Characters,
) -> Cell:
    layers: tuple[tuple[set[tuple[int, int]], Mark, str], ...] = (
        (curve, "curve", "*"),
        (level, "target", "-"),
    )
    for dots, mark, star in layers:
        if characters == "ascii":
            if (column, row) in dots:
                return star, mark
            continue
        bits = sum(
            bit
            for down, line in enumerate(_BITS)
            for right, bit in enumerate(line)
            if (2 * column + right, 4 * row + down) in dots
        )
        if bits:
            return chr(_BRAILLE + bits), mark
    return " ", "empty"
