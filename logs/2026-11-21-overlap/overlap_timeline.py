"""A picture of one step of each mode: both ranks' backward, and every bucket's way over the link.

Part of measure_overlap.py.
"""

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

# Modes in the picture, top down, and what is written over each.
PANELS = {
    "none, alone": "nothing sent",
    "none": "none: torch's all-reduce, no clipping",
    "bucket_before_allreduce": "bucket_before_allreduce: each bucket clipped as it becomes ready",
    "whole_before_allreduce": "whole_before_allreduce: the norm of all gradients comes first",
    "after_allreduce": "after_allreduce: clipped when all have arrived",
    "sharded, bucket": "shard_world: each bucket clipped, reduce-scattered; weights gathered",
}
# Okabe and Ito's colours, which differ for colour-blind eyes too.
FORWARD, BACKWARD, WAITING, CLIPPING = "#BBBBBB", "#0072B2", "#F0E442", "#CC79A7"
OPTIMIZER, ALL_REDUCE, READY = "#009E73", "#D55E00", "#000000"

Drawn = dict[str, list[dict[str, Any]]]


def representative(
    ranks: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]],
    times_ms: Mapping[str, Sequence[float]],
) -> Drawn:
    """Of each drawn mode the step nearest its median: a row per rank, ms since the step began.

    It begins when the first rank does.
    """
    drawn = {}
    for mode in PANELS:
        median = statistics.median(times_ms[mode])
        number = min(
            range(len(times_ms[mode])), key=lambda step: abs(times_ms[mode][step] - median)
        )
        rows = [records[mode][number] for records in ranks]
        origin = min(row["start"] for row in rows)
        drawn[mode] = [{name: _in_ms(value, origin) for name, value in row.items()} for row in rows]
    return drawn


def _in_ms(value: Any, origin: float) -> Any:
    if isinstance(value, list):
        return [_in_ms(each, origin) for each in value]
    return 1e3 * (value - origin)


def spans(row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """What the rank's own thread does: colour, begin and length of each part, in ms.

    Backward ends when the last gradient is ready. What follows until the call returns is waiting
    for the link; with `whole_before_allreduce` the clipping comes first.
    """
    edges = [
        (FORWARD, row["start"], row["forward_end"]),
        (BACKWARD, row["forward_end"], row["ready"][-1]),
        (WAITING, row["ready"][-1], row["backward_end"]),
        (CLIPPING, row["backward_end"], row["optimizer_start"]),
        (OPTIMIZER, row["optimizer_start"], row["end"]),
    ]
    return [(colour, begin, end - begin) for colour, begin, end in edges]


def draw(drawn: Drawn) -> bytes:
    """The picture as a PNG: a panel for each mode, all over the same time."""
    mpl.use("Agg")
    figure, panels = plt.subplots(
        len(drawn), 1, figsize=(10, 2.1 * len(drawn)), sharex=True, layout="constrained"
    )
    for axes, (mode, rows) in zip(panels, drawn.items(), strict=True):
        for rank, row in enumerate(rows):
            _draw_rank(axes, row, top=-2.0 * rank)
        ends = [row["end"] for row in rows]
        axes.axvline(max(ends), color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks([-0.15, -2.15], ["rank 0", "rank 1"])
        axes.set_ylim(-3.7, 0.4)
        axes.set_title(f"{PANELS[mode]}: {max(ends):.0f} ms", fontsize=9, loc="left")
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("time since the step began (ms)")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
    plt.close(figure)
    return picture.getvalue()


def _draw_rank(axes: Axes, row: Mapping[str, Any], top: float) -> None:
    for colour, begin, length in spans(row):
        axes.broken_barh([(begin, length)], (top - 0.35, 0.45), facecolors=colour)
    axes.plot(row["ready"], [top + 0.2] * len(row["ready"]), "v", color=READY, markersize=4)
    count = max(1, len(row["sent"]))
    for bucket, (sent, done) in enumerate(zip(row["sent"], row["done"], strict=True)):
        below = top - 0.45 - (bucket + 1) * 1.1 / count
        axes.broken_barh([(sent, done - sent)], (below, 0.8 * 1.1 / count), facecolors=ALL_REDUCE)


def _legend() -> list[Any]:
    return [
        Patch(color=FORWARD, label="forward"),
        Patch(color=BACKWARD, label="backward, until the last gradient is ready"),
        Patch(color=WAITING, label="waiting for the link"),
        Patch(color=CLIPPING, label="norm of the averaged gradient, clipping"),
        Patch(color=OPTIMIZER, label="optimizer"),
        Patch(color=ALL_REDUCE, label="all-reduce of a bucket, from sent to done"),
        Line2D([], [], color=READY, marker="v", linestyle="", label="a bucket is ready"),
    ]
