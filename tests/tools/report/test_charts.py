"""Numbers, axes and curves, against values worked out by hand."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.report.chart import Point, seconds, significant, thinned, tick_labels, ticks
from bert_tools.report.watch_files import MOST_POINTS, Averaged
from bert_tools.report.watch_frame import Cell, Characters, count, figure, plot, size
from bert_tools.report.watch_look import duration

DAY = 86_400
MINUS = "\N{MINUS SIGN}"


def test_numbers_are_written_with_few_digits() -> None:
    words = {0: "0", 0.27191318: "0.2719", 36272.4: "36,272", 1.0345: "1.034"}
    words |= {-2.5: f"{MINUS}2.500", 0.0000123: f"1.23e{MINUS}05"}
    assert {value: significant(value) for value in words} == words
    words = {9.53674: "9.537", 0.0123456: "0.01235", -12345.678: "-12,346", 0.00002: "2.00e-05"}
    words |= {0: "0", 1e299: "1.00e+299"}
    assert {value: figure(value) for value in words} == words and figure(None) == "-"
    assert (count(1234567), count(1e299)) == ("1,234,567", "1.00e+299")
    assert (size(512 * 2**20), size(1.5 * 2**30), size(None)) == ("512.0 MiB", "1.500 GiB", "-")


def test_times() -> None:
    words = {0.0306: "0.031 s", 95.24: "95.2 s", 242.4: "4 min 02 s"}
    words |= {3 * 3600 + 425: "3 h 07 min", 7199.9: "120 min 00 s"}
    assert {value: seconds(value) for value in words} == words
    words = {0: "0:00:00", 59.9: "0:00:59", 3 * 3600 + 4 * 60 + 5: "3:04:05", DAY - 1: "23:59:59"}
    words |= {DAY: "1 d 0 h", 1234 * DAY + 5 * 3600: "1,234 d 5 h", -math.inf: "0:00:00"}
    words |= dict.fromkeys((1e300, math.inf, math.nan), "over 9,999 d")
    assert {value: duration(value) for value in words} == words


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 56_000, ["0", "10 k", "20 k", "30 k", "40 k", "50 k"]),
        (0, 2_932_736, ["0", "0.5 M", "1.0 M", "1.5 M", "2.0 M", "2.5 M"]),
        (0, 0.27, ["0", "0.05", "0.10", "0.15", "0.20", "0.25"]),
        (4.7, 8.6, ["5", "6", "7", "8"]),
        (0, 1700, ["0", "500", "1,000", "1,500"]),
        (-3, 3, ["\N{MINUS SIGN}3", "\N{MINUS SIGN}2", "\N{MINUS SIGN}1", "0", "1", "2", "3"]),
    ],
)
def test_axes(low: float, high: float, labels: list[str]) -> None:
    assert tick_labels(ticks(low, high)) == labels


NUMBERS = st.floats(min_value=-1e300, max_value=1e300)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_any_range_has_a_few_ticks_with_labels_of_their_own(one: float, other: float) -> None:
    low, high = sorted((one, other))
    found = ticks(low, high)
    assert 1 <= len(found) <= 13 and found == sorted(found)
    assert all(math.isfinite(each) for each in found) and len(tick_labels(found)) == len(found)
    if high > low:
        assert all(low - (high - low) / 100 <= each <= high + (high - low) / 100 for each in found)


VALUES = st.one_of(st.none(), st.integers(-50, 50).map(float))


@settings(deadline=None)
@given(st.lists(VALUES, min_size=30, max_size=300), st.integers(8, 40))
def test_a_thinned_curve_keeps_its_ends_extremes_and_gaps(
    values: list[float | None], most: int
) -> None:
    points: list[Point] = list(enumerate(values))
    kept = thinned(points, most)
    assert len(kept) <= most + most // 2  # a gap may come to the lowest and the highest of a part
    assert list(kept) == sorted(set(kept), key=lambda point: point[0])
    assert set(kept) <= set(points) and kept[0] == points[0] and kept[-1] == points[-1]
    numbers, left = ([v for _, v in each if v is not None] for each in (points, kept))
    if numbers:
        assert (min(left), max(left)) == (min(numbers), max(numbers))
    assert (None in values) == any(value is None for _, value in kept)


def averaged(number: int) -> list[tuple[float, float]]:
    curve = Averaged()
    for x in range(number):
        curve.add(x, 2.0 * x)
    return curve.points


def test_few_points_are_kept_as_they_are() -> None:
    for most in (0, 1, 7, MOST_POINTS - 1):
        assert averaged(most) == [(x, 2.0 * x) for x in range(most)]


@pytest.mark.parametrize("number", [MOST_POINTS, 1500, 20_000, 200_000])
def test_many_points_are_averaged_evenly(number: int) -> None:
    points = averaged(number)
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS + 1
    assert all(math.isclose(y, 2 * x) for x, y in points)  # on the line that they came from
    steps = [after[0] - before[0] for before, after in pairwise(points[:-1])]
    assert max(steps) - min(steps) < 1e-6
    assert points[0][0] <= number / 500 and points[-1][0] >= number - 1 - number / 500


def test_huge_numbers_stay_finite() -> None:
    curve = Averaged()
    for number in range(3 * MOST_POINTS):
        curve.add(float(number), 1e300 if number % 2 else -1e300)
    assert all(math.isfinite(y) for _, y in curve.points)


def text_of(rows: list[list[Cell]]) -> list[str]:
    return ["".join(cell for cell, _ in row) for row in rows]


def test_ascii_by_hand() -> None:
    rows = plot([(0, 0), (4, 4)], 5, 5, (0, 4), (0, 4), target=3, characters="ascii")
    assert text_of(rows) == ["    *", "---*-", "  *  ", " *   ", "*    "]
    assert [mark for _, mark in rows[1]] == ["target", "target", "target", "curve", "target"]
    assert rows[0][0] == (" ", "empty")


def test_braille_by_hand() -> None:
    # A cell has 2 x 4 dots: the lowest left one is bit 0x40, the highest right one 0x08.
    assert text_of(plot([(0, 0)], 1, 1, (0, 1), (0, 1))) == [chr(0x2840)]
    assert text_of(plot([(1, 1)], 1, 1, (0, 1), (0, 1))) == [chr(0x2808)]
    # Four dots up, two to the right, from corner to corner.
    rows = plot([(0, 0), (1, 1)], 1, 1, (0, 1), (0, 1))
    assert bin(ord(rows[0][0][0]) - 0x2800).count("1") == 4


@pytest.mark.parametrize("characters", ["unicode", "ascii"])
def test_a_curve_has_no_gaps(characters: Characters) -> None:
    points = [(x, math.sin(x / 3) * 1e299) for x in range(60)]
    rows = plot(points, 30, 8, (0, 59), (-1e299, 1e299), characters=characters)
    assert [len(row) for row in rows] == [30] * 8
    assert all(any(row[column][1] == "curve" for row in rows) for column in range(30))


def test_equal_limits_and_points_outside() -> None:
    rows = plot([(5, 5), (9, 9)], 3, 3, (5, 5), (5, 5), characters="ascii")
    assert text_of(rows) == ["   ", " * ", "   "]
    rows = plot([(0, 9)], 3, 3, (0, 1), (0, 1), target=7, characters="ascii")
    assert text_of(rows) == ["   "] * 3
