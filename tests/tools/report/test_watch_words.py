"""Numbers as a terminal shows them."""

import math

import pytest

from bert_tools.report.watch_frame import count, figure, size
from bert_tools.report.watch_look import duration

DAY = 86_400


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.9, "0:00:59"),
        (3 * 3600 + 4 * 60 + 5, "3:04:05"),
        (DAY - 1, "23:59:59"),
        (DAY, "1 d 0 h"),
        (1234 * DAY + 5 * 3600, "1,234 d 5 h"),
        (1e300, "over 9,999 d"),
        (math.inf, "over 9,999 d"),
        (math.nan, "over 9,999 d"),
        (-math.inf, "0:00:00"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (9.53674, "9.537"),
        (0.0123456, "0.01235"),
        (-12345.678, "-12,346"),
        (0.0002, "0.0002000"),
        (0.00002, "2.00e-05"),
        (1e299, "1.00e+299"),
    ],
)
def test_figures(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_counts_and_sizes() -> None:
    assert (count(1234567), count(1e299)) == ("1,234,567", "1.00e+299")
    assert (size(512 * 2**20), size(1.5 * 2**30), size(None)) == ("512.0 MiB", "1.500 GiB", "-")
