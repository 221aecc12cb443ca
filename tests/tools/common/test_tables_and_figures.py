"""Tables of any cells, and pictures where matplotlib is, or is not, installed."""

import sys

import pytest

from bert_tools.common.figures import new_figure, png
from bert_tools.common.tables import aligned
from mlperf_bert.errors import ConfigError


def test_columns_are_aligned_and_cells_never_cut() -> None:
    long = "[bold]" + "x" * 150
    lines = aligned(["name", "ms"], [["a", "1.5"], [long, "12.25"]], left="name")
    assert lines[0] == "name" + " " * (len(long) - 4) + "     ms"
    assert lines[1] == "a" + " " * (len(long) - 1) + "    1.5"
    assert lines[2] == long + "  12.25"
    assert aligned(["ms"], [["a\nb\x1b[2J"]])[1:] == [r"a\nb\x1b[2J"]


def test_without_matplotlib_a_picture_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"run in the checkout: tools/venv\.sh plots"):
        new_figure(2, 1)


def test_the_same_figure_has_the_same_bytes() -> None:
    pictures = []
    for _ in range(2):
        figure = new_figure(2, 1)
        figure.subplots().plot([1, 2], [3, 4])
        pictures.append(png(figure))
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")
