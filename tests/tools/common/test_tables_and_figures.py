"""Tables of any cells, and pictures where matplotlib is, or is not, installed."""

import sys
from pathlib import Path

import pytest

from bert_tools.common.figures import check_picture, new_figure, png
from bert_tools.common.tables import aligned
from mlperf_bert.errors import ConfigError


def test_columns_are_aligned_and_cells_never_cut() -> None:
    long = "[bold]" + "x" * 150
    lines = aligned(["name", "ms"], [["a", "1.5"], [long, "12.25"]], left="name")
    assert lines[0] == "name" + " " * (len(long) - 4) + "     ms"
    assert lines[1] == "a" + " " * (len(long) - 1) + "    1.5"
    assert lines[2] == long + "  12.25"
    assert aligned(["ms"], [["a\nb\x1b[2J"]])[1:] == [r"a\nb\x1b[2J"]


def test_a_picture_goes_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, problem in (
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "a.png", "does not exist"),
        (tmp_path / "a.svg", "does not end in .png"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_picture(path)
    assert check_picture(tmp_path / "a.png") == tmp_path / "a.png"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"run in the checkout: tools/venv\.sh plots"):
        check_picture(tmp_path / "a.png")


def test_the_same_figure_has_the_same_bytes() -> None:
    pictures = []
    for _ in range(2):
        figure = new_figure(2, 1)
        figure.subplots().plot([1, 2], [3, 4])
        pictures.append(png(figure))
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")
