"""The picture of a comparison: the time of each rank's stages in one update. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bert_tools.common.figures import new_figure
from bert_tools.squad.comparison import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BUBBLE = "#e9e4da"
_KINDS = {
    "F": ("#2f6db3", "forward"),
    "B": ("#d9722e", "backward"),
    "W": ("#2f7d4f", "backward of weights"),
}
_WIDEST_NUMBERED = 40  # microbatch spans per panel; more would overlap


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
    spans = run.timeline
    begin = min(span.begin_s for span in spans)
    end = max(begin + 1e-9, *(span.end_s for span in spans))
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
        if is_numbered and width > 0.012 * 1e3 * (end - begin):
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
    words = f"{run.engine}: one update"
    if run.values["bubble_measured"] is not None:
        words += f"; bubble {run.values['bubble_measured']:.1f}% measured"
    if run.values["bubble_formula"] is not None:
        words += f", {run.values['bubble_formula']:.1f}% by formula"
    if not run.is_comparable:
        words += f"; {run.ranks} ranks on {run.cores} cores: not comparable"
    return words
