"""`bench scale` as a picture: rates by sequences, or by tokens of a forward."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def scale_picture(result: dict[str, Any], title: str) -> bytes:
    """A PNG of the rows that were measured."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    if "sweep" in result:
        _line(axes, result["sweep"], "tokens", "tokens_per_s", "tokens/s")
        axes.set_xlabel("tokens of a forward")
        axes.set_ylabel("tokens a second")
    else:
        for mode in dict.fromkeys(row["step_mode"] for row in result["rows"]):
            of_mode = [row for row in result["rows"] if row["step_mode"] == mode]
            _line(axes, of_mode, "batch", "samples_per_s", mode)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("sequences of a forward")
        axes.set_ylabel("sequences a second")
        axes.legend(frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _line(axes: Axes, rows: Sequence[dict[str, Any]], x: str, y: str, label: str) -> None:
    measured = [row for row in rows if row["samples_per_s"] is not None]
    axes.plot([row[x] for row in measured], [row[y] for row in measured], "o-", label=label)
