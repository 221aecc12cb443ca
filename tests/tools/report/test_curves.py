"""Curves: kept in bounded memory, and drawn where they belong."""

import math
from itertools import pairwise

import pytest

from bert_tools.report.watch_files import MOST_POINTS, Averaged
from bert_tools.report.watch_frame import Cell, plot


def series_of(count: int) -> list[tuple[float, float]]:
    series = Averaged()
    for x in range(count):
        series.add(x, 2.0 * x)
    return series.points


@pytest.mark.parametrize("count", [0, 1, 7, MOST_POINTS - 1])
def test_few_points_are_kept_as_they_are(count: int) -> None:
    assert series_of(count) == [(x, 2.0 * x) for x in range(count)]


@pytest.mark.parametrize("count", [MOST_POINTS, 1500, 20_000, 200_000])
def test_many_points_are_averaged_evenly(count: int) -> None:
    points = series_of(count)
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS + 1
    assert all(math.isclose(y, 2 * x) for x, y in points)  # on the line that they came from
    steps = [after[0] - before[0] for before, after in pairwise(points[:-1])]
    assert max(steps) - min(steps) < 1e-6
    assert points[0][0] <= count / 500 and points[-1][0] >= count - 1 - count / 500


def test_huge_numbers_stay_finite() -> None:
    series = Averaged()
    for number in range(3 * MOST_POINTS):
        series.add(float(number), 1e300 if number % 2 else -1e300)
    assert all(math.isfinite(y) for _, y in series.points)


def text_of(rows: list[list[Cell]]) -> list[str]:
    return ["".join(cell for cell, _ in row) for row in rows]


def test_ascii_by_hand() -> None:
    rows = plot(
        [(0, 0), (4, 4)], 5, 5, x_range=(0, 4), y_range=(0, 4), target=3, characters="ascii"
    )
    assert text_of(rows) == ["    *", "---*-", "  *  ", " *   ", "*    "]
    assert [mark for _, mark in rows[1]] == ["target", "target", "target", "curve", "target"]
    assert rows[0][0] == (" ", "empty")


def test_braille_by_hand() -> None:
    # A cell has 2 x 4 dots: the lowest left one is bit 0x40, the highest right one 0x08.
    rows = plot([(0, 0)], 1, 1, x_range=(0, 1), y_range=(0, 1))
    assert text_of(rows) == [chr(0x2840)]
    rows = plot([(1, 1)], 1, 1, x_range=(0, 1), y_range=(0, 1))
    assert text_of(rows) == [chr(0x2808)]
    # Four dots up, two to the right, from corner to corner.
    rows = plot([(0, 0), (1, 1)], 1, 1, x_range=(0, 1), y_range=(0, 1))
    assert bin(ord(rows[0][0][0]) - 0x2800).count("1") == 4


@pytest.mark.parametrize("characters", ["unicode", "ascii"])
def test_a_curve_has_no_gaps(characters: str) -> None:
    points = [(x, math.sin(x / 3) * 1e299) for x in range(60)]
    ascii_or_not = "ascii" if characters == "ascii" else "unicode"
    rows = plot(points, 30, 8, x_range=(0, 59), y_range=(-1e299, 1e299), characters=ascii_or_not)
    assert [len(row) for row in rows] == [30] * 8
    assert all(any(row[column][1] == "curve" for row in rows) for column in range(30))


def test_equal_limits_and_points_outside() -> None:
    rows = plot([(5, 5), (9, 9)], 3, 3, x_range=(5, 5), y_range=(5, 5), characters="ascii")
    assert text_of(rows) == ["   ", " * ", "   "]
    rows = plot([(0, 9)], 3, 3, x_range=(0, 1), y_range=(0, 1), target=7, characters="ascii")
    assert text_of(rows) == ["   "] * 3
