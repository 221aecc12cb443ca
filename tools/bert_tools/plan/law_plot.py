"""The answer of `plan law` as a picture: time, throughput and samples over accelerators."""

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bert_tools.plan.entries import Entry
from bert_tools.plan.scaling_law import CEREBRAS, Floats, PowerLaw, ScalingLaw

_FIT, _IDEAL, _OTHER = "#2f7d4f", "#9a9a9a", "#d9722e"
_POINTS = (  # one for each round that BERT was part of
    *("#1f5f8b", "#b2478b", "#8a63b0", "#c9a227", "#3a9c9c"),
    *("#7a4b2a", "#555555", "#d62728", "#7fb3d8", "#111111"),
)
_LONGEST_TITLE = 110
_FEW_DECADES = 30  # a range that powers of ten alone would leave with one label or none


def law_picture(title: str, law: ScalingLaw) -> bytes:
    """A PNG of three panels, both axes logarithmic; a colour for each round."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    sizes = np.array([entry.accelerators or 0 for entry in law.entries], dtype=float)
    grid = np.geomspace(sizes.min(), sizes.max(), 60)
    _dots(left, law.entries, lambda entry: entry.time_min)
    _line(left, grid, law.time, "the law")
    ideal = law.time.at(grid[0]) * grid[0] / grid
    left.plot(grid, ideal, ":", color=_IDEAL, label="ideal: slope -1")
    cerebras = [CEREBRAS.at(size) for size in grid]
    left.plot(grid, cerebras, "--", color=_OTHER, label="228.3 * p^-0.7392 (v0.7 A100)")
    _finish(left, "minutes to the target")
    _panel(middle, grid, law.throughput, law.entries, lambda entry: entry.seq_per_s)
    if law.throughput:
        ideal = law.throughput.at(grid[0]) * grid / grid[0]
        middle.plot(grid, ideal, ":", color=_IDEAL, label="ideal: slope 1")
    _finish(middle, "sequences/s: the hardware's part")
    _panel(right, grid, law.samples, law.entries, _millions, scale=1e-6)
    _finish(right, "million samples to the target: the statistical part")
    short = title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE]}..."
    # What a path is called may look like the notation of formulas.
    figure.suptitle(ascii(short)[1:-1].replace("$", r"\$"), fontsize=10)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _panel(
    axes: Axes,
    grid: Floats,
    part: PowerLaw | None,
    entries: Sequence[Entry],
    value: Callable[[Entry], float | None],
    scale: float = 1.0,
) -> None:
    if part is None:
        axes.text(0.5, 0.5, "not in the source", ha="center", transform=axes.transAxes)
        return
    _dots(axes, entries, value)
    _line(axes, grid, part, "the law", scale)


def _dots(axes: Axes, entries: Sequence[Entry], value: Callable[[Entry], float | None]) -> None:
    rounds = sorted({entry.round for entry in entries})
    for number, name in enumerate(rounds):
        points = [(entry.accelerators, value(entry)) for entry in entries if entry.round == name]
        known = [(size, each) for size, each in points if each is not None]
        if known:
            colour = _POINTS[number % len(_POINTS)]
            label = f"v{name}" if name else None
            xs, ys = zip(*known, strict=True)
            axes.scatter(xs, ys, s=22, color=colour, label=label, zorder=3)


def _line(axes: Axes, grid: Floats, law: PowerLaw, name: str, scale: float = 1.0) -> None:
    label = f"{name}: exponent {law.exponent:.3f}"
    axes.plot(grid, [scale * law.at(size) for size in grid], color=_FIT, label=label)


def _millions(entry: Entry) -> float | None:
    return None if entry.samples is None else entry.samples / 1e6


def _finish(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
    low, high = axes.get_ylim()
    if high < _FEW_DECADES * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("accelerators")
    axes.set_title(label, fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)
