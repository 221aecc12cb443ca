"""Pictures of the simulator: a step's timeline, what techniques buy, the step over machine size."""

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bert_tools.plan.cluster.ablation import AblationRow
from bert_tools.plan.cluster.question import Answer
from bert_tools.plan.cluster.step import StepTiming
from bert_tools.plan.cluster.sweep import SweepRow

_FORWARD, _BACKWARD, _OPTIMIZER, _SENT = "#7fb3d8", "#2f6f9f", "#8a63b0", "#d9722e"
_HOST = "#9a9a9a"
_LANES = ("host", "compute", "communication")


def timeline_picture(found: Answer) -> bytes:
    """A PNG of one step: the slowest rank over the median one, three lanes each."""
    timing = found.timings[0]
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, rank, name in zip(
        panels,
        (timing.slowest_rank, timing.median_rank),
        ("slowest rank", "median rank"),
        strict=True,
    ):
        _draw_rank(axes, timing, rank)
        axes.set_title(f"{name} ({rank:,})", loc="left", fontsize=10)
    panels[1].set_xlabel("ms from the start of the step")
    panels[0].set_xlim(0, timing.step_ms)
    _legend(figure)
    question = found.question
    figure.suptitle(
        f"Simulated step, {timing.step_ms:.1f} ms: {question.world_size:,} {question.accelerator} "
        f"x {question.local_batch_size}, {question.program}, capture "
        f"{question.software.capture}, {question.clip}"
    )
    return as_png(figure)


def _draw_rank(axes: Axes, timing: StepTiming, rank: int) -> None:
    """Host launches, device work and buckets of one rank, a bar each."""
    starts, host_begin = timing.starts[:, rank], timing.input_ms
    # Communication and clipping beside backward put it back; drawn as spread over its phases.
    stretch = _stretch(timing, rank)
    for number, phase in enumerate(timing.phases):
        start, end = starts[number], starts[number] + phase.device_ms[rank]
        colour = _FORWARD if phase.direction == "forward" else _BACKWARD
        _bar(axes, "compute", stretch(start), stretch(end), colour)
        host_end = timing.host_ends[number, rank]
        _bar(axes, "host", host_begin, min(host_end, timing.reduced), _HOST)
        host_begin = host_end
    if timing.host_ends[-1, rank] <= timing.starts[0, rank]:
        axes.text(0.3, 2, "one replay of the captured step", va="center", fontsize=8)
    for start, end in timing.communication:
        _bar(axes, "communication", start, end, _SENT)
    update = timing.reduced + timing.clip_after_ms + timing.optimizer_wait_ms
    if timing.optimizer_wait_ms:
        _bar(axes, "host", timing.reduced, update + timing.optimizer_ms, _HOST)
    _bar(axes, "compute", update, update + timing.optimizer_ms, _OPTIMIZER)
    _bar(axes, "communication", timing.step_ms - timing.all_gather_ms, timing.step_ms, _SENT)
    axes.axvline(timing.backward_end[rank], color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks([0, 1, 2], _LANES[::-1])
    axes.set_ylim(-0.6, 2.6)
    axes.spines[["top", "right"]].set_visible(False)


def _stretch(timing: StepTiming, rank: int) -> Callable[[float], float]:
    """Device times of backward, put back evenly to where backward really ended."""
    first = next(i for i, phase in enumerate(timing.phases) if phase.direction == "backward")
    begin = float(timing.starts[first, rank])
    end = float(timing.ends[-1, rank])
    factor = (float(timing.backward_end[rank]) - begin) / max(end - begin, 1e-9)

    def moved(at: float) -> float:
        return at if at <= begin else begin + (at - begin) * factor

    return moved


def _bar(axes: Axes, lane: str, start: float, end: float, colour: str) -> None:
    if end > start:
        place = _LANES[::-1].index(lane)
        axes.barh(
            place,
            end - start,
            left=start,
            height=0.7,
            color=colour,
            edgecolor="white",
            linewidth=0.3,
        )


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    names = {
        "launches on the host": _HOST,
        "forward": _FORWARD,
        "backward": _BACKWARD,
        "optimizer": _OPTIMIZER,
        "buckets on the way": _SENT,
    }
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)


def ablation_picture(found: Answer, rows: Sequence[AblationRow]) -> bytes:
    """A PNG of bars: the step with one technique exchanged, in ms."""
    shown = [row for row in rows if row.step_ms is not None]
    figure = Figure(figsize=(10, 1.6 + 0.32 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(shown):
        step_ms, difference = row.step_ms or 0.0, row.difference_ms or 0.0
        colour = "#2f7d4f" if row.is_as_asked else "#7fb3d8"
        axes.barh(-number, step_ms, color=colour, height=0.75)
        text = f" {step_ms:.1f}" if row.is_as_asked else f" {step_ms:.1f}  ({difference:+.1f})"
        axes.text(step_ms, -number, text, va="center", fontsize=8)
    names = [f"{row.technique}: {row.setting}" for row in shown]
    axes.set_yticks([-number for number in range(len(shown))], names)
    axes.set_xlim(0, 1.18 * max(row.step_ms or 0.0 for row in shown))
    axes.set_xlabel("simulated step, ms (green: as asked; in brackets the difference to it)")
    axes.spines[["top", "right"]].set_visible(False)
    question = found.question
    figure.suptitle(
        f"What each technique buys: {question.world_size:,} {question.accelerator} x "
        f"{question.local_batch_size}, one exchanged at a time"
    )
    return as_png(figure)


def sweep_picture(series: dict[str, Sequence[SweepRow]]) -> bytes:
    """A PNG of two panels over accelerators: time to the target, and where a step goes."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, rows in series.items():
        ranks = [row.accelerators for row in rows]
        times = [row.time_s for row in rows]
        (line,) = left.plot(ranks, times, marker="o", markersize=3, label=name)
        unknown = [(row.accelerators, row.time_s) for row in rows if not row.in_range]
        if unknown:
            left.scatter(*zip(*unknown, strict=True), s=45, facecolors="white", zorder=3,
                         edgecolors=line.get_color())  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="accelerators", ylabel="time to the target, s")
    left.set_title("hollow: samples at this batch are not published", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    left.grid(alpha=0.3, which="both")
    _draw_parts(right, *next(iter(series.items())))
    return as_png(figure)


def _draw_parts(axes: Axes, name: str, rows: Sequence[SweepRow]) -> None:
    ranks = [row.accelerators for row in rows]
    parts = np.array([[row.compute_ms, row.waiting_ms, row.exposed_ms] for row in rows]).T
    labels = ("computing", "waiting: slower ranks, host", "waiting: communication")
    axes.stackplot(ranks, parts, labels=labels, colors=(_BACKWARD, _HOST, _SENT))
    axes.set(xscale="log", xlabel="accelerators", ylabel="a step of the mean rank, ms")
    axes.set_title(name, fontsize=9)
    axes.legend(framealpha=0.9, fontsize=8, loc="lower left")


def as_png(figure: Figure) -> bytes:
    """The picture as a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return picture.getvalue()
