"""The picture of a comparison: the time of each rank's stages in one update. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bert_tools.common.results import new_figure
from bert_tools.squad.comparison import Run, is_comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BUBBLE = "#e9e4da"
_KINDS = {
    "F": ("#2f6db3", "forward"),
    "B": ("#d9722e", "backward"),
    "W": ("#2f7d4f", "backward of weights"),
}


def timeline_figure(runs: Sequence[Run]) -> "Figure | None":
    """One update of each of these runs, a line per rank; None if none has a timeline."""
    shown = [run for run in runs if run["timeline"]]
    if not shown:
        return None
    heights = [0.5 + 0.45 * run["ranks"] for run in shown]
    figure = new_figure(11, 1.2 + sum(heights))
    from matplotlib.patches import Patch  # there, as new_figure found

    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, run in zip(panels, shown, strict=True):
        _draw_timeline(axes, run)
    kinds = {span["kind"] for run in shown for span in run["timeline"]}
    handles = [Patch(color=_KINDS[kind][0], label=_KINDS[kind][1]) for kind in sorted(kinds)]
    handles.append(Patch(facecolor=_BUBBLE, label="bubble: the rank waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _draw_timeline(axes: "Axes", run: Run) -> None:
    """Draw each rank's spans in ms from the first begin, over a bar of the whole update."""
    begin = min(span["begin_s"] for span in run["timeline"])
    whole = 1e3 * (max(span["end_s"] for span in run["timeline"]) - begin)
    for rank in range(run["ranks"]):
        axes.broken_barh([(0, whole)], (rank - 0.4, 0.8), facecolors=_BUBBLE)
    for span in run["timeline"]:
        left, width = 1e3 * (span["begin_s"] - begin), 1e3 * (span["end_s"] - span["begin_s"])
        axes.broken_barh(
            [(left, width)],
            (span["rank"] - 0.4, 0.8),
            facecolors=_KINDS[span["kind"]][0],
            edgecolor="white",
            lw=0.5,
        )
    names = []
    for rank in range(run["ranks"]):
        stages = sorted({1 + span["stage"] for span in run["timeline"] if span["rank"] == rank})
        names.append(f"rank {rank}, stage {', '.join(map(str, stages))}")
    axes.set_ylim(run["ranks"] - 0.5, -0.5)
    axes.set_xlim(0, whole)
    axes.set_yticks(range(run["ranks"]), names, fontsize=8)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)
    title = f"{run['engine']}: one update; bubble {run['bubble_measured']:.1f}% measured"
    if not is_comparable(run):
        title += f"; {run['ranks']} ranks on {run['cores']} cores: not comparable"
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
