"""Means of few measurements, tables of any cells, and pictures with and without matplotlib."""

import math

import pytest

from bert_tools.common.results import (
    aligned,
    mean_and_half_width,
    new_figure,
    olympic_mean,
    png,
    quantile_95,
)


def test_quantiles_and_intervals():
    published = {1: 12.706, 2: 4.303, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980}
    assert {each: quantile_95(each) for each in published} == pytest.approx(published, abs=1e-3)
    # Deviations -1, 0, 1: variance 2 / 2 = 1, so t * 1 / sqrt(3) with t of 2 degrees.
    mean, half_width = mean_and_half_width([9.0, 10.0, 11.0])
    assert mean == 10.0
    assert half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert mean_and_half_width([7.0]) == (7.0, None)
    assert mean_and_half_width([1.0, 1.0, 1.0]) == (1.0, 0.0)
    assert olympic_mean([10.0, 19.0, 12.0, 14.0, 1.0]) == 12.0  # without fastest and slowest


def test_columns_are_aligned_and_cells_never_cut():
    long = "[bold]" + "x" * 150
    lines = aligned(["name", "ms"], [["a", "1.5"], [long, "12.25"]], left="name")
    assert lines[0] == "name" + " " * (len(long) - 4) + "     ms"
    assert lines[1] == "a" + " " * (len(long) - 1) + "    1.5"
    assert lines[2] == long + "  12.25"
    assert aligned(["ms"], [["a\nb\x1b[2J"]])[1:] == [r"a\nb\x1b[2J"]


def test_the_same_figure_has_the_same_bytes():
    pictures = []
    for _ in range(2):
        figure = new_figure(2, 1)
        figure.subplots().plot([1, 2], [3, 4])
        pictures.append(png(figure))
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")
