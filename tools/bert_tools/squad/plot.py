"""Two pictures of a comparison: throughput against efficiency, and the stages' time in an update.

No torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bert_tools.common.figures import new_figure
from bert_tools.squad.comparison import Comparison, Row, RunRecord, Value
from bert_tools.squad.table import published_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
_Known = tuple[int, Row, Value, Value]  # position; rate and efficiency

_COLOURS = ("#2f6db3", "#d9722e", "#2f7d4f", "#8a63b0", "#b8860b", "#8c564b", "#3a9c9c", "#555555")
_MARKERS = "osD^vPX*"
_GREY = "#9a9a9a"
_BUBBLE = "#e9e4da"
_KINDS = {
    "F": ("#2f6db3", "forward"),
    "B": ("#d9722e", "backward"),
    "W": ("#2f7d4f", "backward of weights"),
    "update": ("#8a63b0", "update"),
}
_NUM_CURVES = 6
_WIDEST_NUMBERED = 40  # microbatch spans per panel; more would overlap


def goodput_figure(comparison: Comparison) -> "Figure":
    """Throughput over efficiency with lines of equal goodput: this comparison and the study."""
    figure = new_figure(11, 5.6)
    left, right = figure.subplots(1, 2)
    _draw_rows(left, comparison.rows)
    left.set_title("This comparison", fontsize=10)
    left.set_xlabel(
        f"statistical efficiency (M0 = {comparison.conditions.initial_batch} samples); "
        "equal ones side by side"
    )
    left.set_ylabel("throughput, samples/s of training")
    _draw_study(right, published_study())
    right.set_title("The study, as published (4 A100; its rows differ in more)", fontsize=10)
    right.set_xlabel("statistical efficiency, logarithmic")
    right.set_ylabel("throughput, samples/s")
    figure.suptitle("Goodput = throughput x efficiency: equal along a dashed line", fontsize=11)
    return figure


def _draw_rows(axes: "Axes", rows: Sequence[Row]) -> None:
    known = [
        (number, row, rate, efficiency)
        for number, row in enumerate(rows)
        if (rate := row.values["samples_per_s"]) and (efficiency := row.values["efficiency"])
    ]
    if not known:
        axes.text(0.5, 0.5, "no efficiency is known", ha="center", transform=axes.transAxes)
        return
    low = min(efficiency.mean - (efficiency.half_width or 0) for *_, efficiency in known)
    left, right = max(0.0, low - max(0.15, 0.3 * (1 - low))), 1.15
    for number, row, rate, efficiency in known:
        colour = _COLOURS[number % len(_COLOURS)]
        goodput = row.values["goodput"]
        label = f"{row.label}: goodput {goodput.mean:.3g}" if goodput else row.label
        axes.errorbar(
            [efficiency.mean + _shift(number, known, right - left)],
            [rate.mean],
            xerr=None if not efficiency.half_width else [efficiency.half_width],
            yerr=None if not rate.half_width else [rate.half_width],
            fmt=_MARKERS[number % len(_MARKERS)],
            color=colour,
            mfc=colour if row.is_comparable else "white",
            ms=7,
            capsize=3,
            label=label if row.is_comparable else f"{label} (not comparable)",
            zorder=3,
        )
    axes.set_xlim(left, right)
    axes.set_ylim(0, 1.25 * max(rate.mean + (rate.half_width or 0) for _, _, rate, _ in known))
    _draw_goodput(axes, np.linspace(left, right, 100), axes.get_ylim()[1])
    axes.axvline(1.0, color=_GREY, lw=0.8)
    _finish(axes)


def _shift(number: int, known: Sequence[_Known], width: float) -> float:
    """Move engines of one efficiency side by side, so that none hides another."""
    own = next(efficiency.mean for place, _, _, efficiency in known if place == number)
    equal = [place for place, *_, efficiency in known if abs(efficiency.mean - own) < 1e-3]
    return 0.03 * width * (equal.index(number) - (len(equal) - 1) / 2)


def _draw_goodput(axes: "Axes", efficiencies: Floats, highest: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for goodput in MaxNLocator(_NUM_CURVES).tick_values(0, highest):
        if not 0 < goodput < highest:
            continue
        heights = goodput / np.maximum(efficiencies, 1e-9)
        axes.plot(efficiencies, heights, "--", color=_GREY, lw=0.7, zorder=1)
        end = float(efficiencies[-1])
        axes.text(end, goodput / end, f" {goodput:.3g}", fontsize=7, color=_GREY, va="center")


def _draw_study(axes: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for number, row in enumerate(rows):
        colour = _COLOURS[number]
        axes.plot(
            [row["efficiency"]],
            [row["samples_per_s"]],
            _MARKERS[number],
            color=colour,
            ms=7,
            label="{experiment}: {precision}, batch {global_batch}, goodput {goodput:g}".format(
                **row
            ),
        )
        least = row["least_efficiency_by_definition"]
        axes.hlines(row["samples_per_s"], least, 1, color=colour, lw=4, alpha=0.35)
    axes.plot([], [], color=_GREY, lw=4, alpha=0.35, label="what the definition allows (M0 >= 1)")
    axes.set_xlim(2e-5, 1.5)
    axes.set_ylim(7, 400)
    axes.set_yticks([10, 30, 100, 300])
    efficiencies = np.geomspace(2e-5, 1.5, 50)
    for goodput in (1e-3, 1e-2, 1e-1, 1, 10, 100):
        axes.plot(efficiencies, goodput / efficiencies, "--", color=_GREY, lw=0.7, zorder=1)
        at = goodput / 330
        if 3e-5 < at < 1:
            axes.text(at, 340, f"{goodput:g}", fontsize=7, color=_GREY, ha="left")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    _finish(axes)


def timeline_figure(runs: Sequence[RunRecord]) -> "Figure | None":
    """One update of each of these runs, a line per rank; None if none has a timeline."""
    shown = [run for run in runs if run.timeline]
    if not shown:
        return None
    heights = [0.5 + 0.45 * _num_ranks(run) for run in shown]
    figure = new_figure(11, 1.2 + sum(heights))
    from matplotlib.patches import Patch  # there, as new_figure found

    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, run in zip(panels, shown, strict=True):
        _draw_timeline(axes, run)
    kinds = {span.kind for run in shown for span in run.timeline}
    handles = [
        Patch(color=colour, label=name) for kind, (colour, name) in _KINDS.items() if kind in kinds
    ]
    handles.append(Patch(facecolor=_BUBBLE, label="bubble: the rank waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _num_ranks(run: RunRecord) -> int:
    return 1 + max(span.rank for span in run.timeline)


def _draw_timeline(axes: "Axes", run: RunRecord) -> None:
    spans = [span for span in run.timeline if span.kind in _KINDS]
    begin = min(span.begin_s for span in spans or run.timeline)
    end = max(begin + 1e-9, *(span.end_s for span in spans or run.timeline))
    ranks = _num_ranks(run)
    for rank in range(ranks):
        axes.broken_barh([(0, 1e3 * (end - begin))], (rank - 0.4, 0.8), facecolors=_BUBBLE)
    is_numbered = len(spans) <= _WIDEST_NUMBERED * ranks
    for span in spans:
        left, width = 1e3 * (span.begin_s - begin), 1e3 * (span.end_s - span.begin_s)
        axes.broken_barh(
            [(left, width)],
            (span.rank - 0.4, 0.8),
            facecolors=_KINDS[span.kind][0],
            edgecolor="white",
            lw=0.5,
        )
        if is_numbered and span.kind != "update" and width > 0.012 * 1e3 * (end - begin):
            axes.text(
                left + width / 2,
                span.rank,
                f"{span.microbatch + 1}",
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * (end - begin))
    axes.set_yticks(range(ranks), [_rank_name(run, rank) for rank in range(ranks)], fontsize=8)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title(_timeline_title(run), fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _rank_name(run: RunRecord, rank: int) -> str:
    stages = sorted({span.stage for span in run.timeline if span.rank == rank})
    name = f"rank {rank}"
    return f"{name}, stage {', '.join(str(each + 1) for each in stages)}" if stages else name


def _timeline_title(run: RunRecord) -> str:
    schedule = f", {run.schedule}" if run.schedule else ""
    words = f"{run.engine}{schedule}: one update"
    if run.values["bubble_measured"] is not None:
        words += f"; bubble {run.values['bubble_measured']:.1f}% measured"
    if run.values["bubble_formula"] is not None:
        words += f", {run.values['bubble_formula']:.1f}% by formula"
    if not run.is_comparable:
        words += f"; {run.ranks} ranks on {run.cores} cores: not comparable"
    return words


def _finish(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    place = (0.5, -0.13)  # where it hides nothing
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=place, ncols=2, frameon=False)
