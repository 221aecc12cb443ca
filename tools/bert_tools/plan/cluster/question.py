"""`plan cluster`: simulates the question, and shows the result as tables and pictures."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_tools.common.figures import check_picture, new_figure
from bert_tools.common.tables import aligned
from bert_tools.plan.answer import Answer, Pictures
from bert_tools.plan.cluster.simulation import (
    AblationRow,
    Question,
    Simulated,
    SweepRow,
    ablation,
    sweep,
    sweep_nodes,
)
from bert_tools.plan.cluster.step import StepTiming
from bert_tools.plan.forecast import Forecast, forecast, in_words, question_of, too_few_steps
from bert_tools.plan.sample_index import wikipedia_index
from mlperf_bert.common.atomic import make_directory
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOTE = "A simulation, not a measurement: its constants were fitted on published A100 runs."
_SIZES = ("nodes", "gpus_per_node", "local_batch_size")
_STEP_NAMES = ("a step of the mean rank", "time", "share")
_ABLATION_NAMES = ("one exchanged for another", "step", "difference", "exposed", "imbalance")
_SWEEP_NAMES = (
    *("nodes", "accelerators", "local", "global", "step", "exposed", "waiting"),
    *("sequences", "samples", "to target "),
)
_FORWARD, _BACKWARD, _OPTIMIZER, _SENT = "#7fb3d8", "#2f6f9f", "#8a63b0", "#d9722e"
_HOST = "#9a9a9a"
_KNOWN = ("published", "given")  # samples that are not marked
_LANES = ("communication", "compute", "host")  # from below


def answer(args: argparse.Namespace) -> Answer:
    """Simulate the question. Raises ConfigError or DataError for a user's mistake."""
    config = None if args.config is None else load_config(args.config, args.set)
    question = _asked(args, config)
    pictures = _asked_pictures(args)
    index = wikipedia_index()
    expected = forecast(question, index)
    found = expected.simulated
    ablated = ablation(found, index) if args.ablation else []
    swept: list[SweepRow] = []
    if args.sweep:
        swept = list(sweep(question, args.sweep, index))
        if not swept:
            problem = "no size of 1 node to 100,000 accelerators can deal this batch"
            remedy = "use the sampler 'quantile', which any batch can represent"
            raise ConfigError("--sweep", problem, remedy)
    run, timing = found.run, found.timings[0]
    facts = {
        "kind": "simulation",
        **asdict(question),
        "world_size": question.world_size,
        "global_batch_size": question.global_batch_size,
        "step_ms": run.step_ms,
        "parts_ms": found.parts_ms,
        "communication_ms": found.mean_ms("communication_ms"),
        "exposed_ms": found.mean_ms("exposed_ms"),
        "imbalance_tokens": found.imbalance_tokens,
        "padding_fraction": found.padding_fraction,
        "sequences_per_s": found.sequences_per_s,
        "slowest_rank": timing.slowest_rank,
        "median_rank": timing.median_rank,
        "run": asdict(run) | {"seconds": run.seconds, "steady_step_ms": run.steady_step_ms},
        "samples_to_target": asdict(found.estimate),
        "forecast": expected.facts,
        "ablation": [asdict(row) for row in ablated],
        "sweep": [asdict(row) for row in swept],
        **{name: None for name in ("timeline", "ablation_plot", "sweep_plot")},
        **{name: str(path) for name, path in pictures.items()},
    }
    lines = list(_in_words(expected, ablated, swept))
    if config is not None and (warning := too_few_steps(config, run.steps)):
        lines.append(f"warning: {warning}")
    return Answer(
        facts=facts,
        lines=lines,
        pictures=_drawn(pictures, args.sweep, found, ablated, swept),
        end=f"pictures: {args.out}" if args.out else "",
    )


def _asked(args: argparse.Namespace, config: RunConfig | None) -> Question:
    """The question: options override the config, which overrides defaults. Raises ConfigError."""
    asked: dict[str, Any] = {}
    if config is not None:
        asked = question_of(config, args.config.stem, args.accelerator)
    elif args.set:
        raise ConfigError("--set", "changes a config, and none is given", "add --config FILE")
    names = {each.name for each in fields(Question)}
    given = {name: value for name, value in vars(args).items() if name in names}
    asked |= {name: value for name, value in given.items() if value is not None}
    for name in _SIZES:
        if name not in asked:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, "is missing", "add it, or give a whole run by --config FILE")
    return Question(**asked)


def _asked_pictures(args: argparse.Namespace) -> dict[str, Path]:
    """Paths of the pictures, tried before minutes are spent. Raises ConfigError or DataError."""
    if args.out is None:
        return {}
    make_directory(args.out)
    asked = (("timeline", True), ("ablation_plot", args.ablation), ("sweep_plot", args.sweep))
    files = {
        name: args.out / f"{name.removesuffix('_plot')}.png" for name, wanted in asked if wanted
    }
    return {name: check_picture(path) for name, path in files.items()}


def _drawn(
    paths: Mapping[str, Path],
    sweep_of: str | None,
    found: Simulated,
    ablated: Sequence[AblationRow],
    swept: Sequence[SweepRow],
) -> Pictures:
    name = f"{found.question.local_batch_size} a rank"
    if sweep_of == "global":
        name = f"global batch {found.question.global_batch_size:,}"
    draws = {
        "timeline": partial(timeline_picture, found),
        "ablation_plot": partial(ablation_picture, found, ablated),
        "sweep_plot": partial(sweep_picture, {name: swept}),
    }
    return {path: draws[picture] for picture, path in paths.items()}


def _in_words(
    expected: Forecast, ablated: Sequence[AblationRow], swept: Sequence[SweepRow]
) -> Iterator[str]:
    """Lines on machine, step by parts, communication and run; then the tables asked for."""
    found = expected.simulated
    question, run = found.question, found.run
    batch, accumulated = question.global_batch_size, question.grad_accum_steps
    forwards = f" x {accumulated} forwards" if accumulated > 1 else ""
    parts = [
        (name, f"{value:.1f} ms", f"{value / run.step_ms:.1%}")
        for name, value in found.parts_ms.items()
    ]
    communication, exposed = found.mean_ms("communication_ms"), found.mean_ms("exposed_ms")
    yield (
        f"{question.nodes:,} nodes of {question.gpus_per_node} {question.accelerator}, "
        f"{question.local_batch_size} a rank{forwards}, global batch {batch:,}; "
        f"program {question.program}, {question.precision}, {question.sampler}, "
        f"{question.balance}, {question.clip}"
    )
    yield (
        f"tokens of the largest rank over the mean {found.imbalance_tokens:.4f}, "
        f"padding {found.padding_fraction:.2%}; {len(found.timings)} steps drawn"
    )
    rows = [*parts, ("", f"{run.step_ms:.1f} ms", "")]
    yield from ("", *aligned(_STEP_NAMES, rows, left=_STEP_NAMES[0]), "")
    yield (
        f"communication {communication:.1f} ms, of which {exposed:.1f} ms exposed and "
        f"{communication - exposed:.1f} ms beside computing"
    )
    yield (
        f"{found.sequences_per_s:,.0f} sequences/s while training, "
        f"{found.sequences_per_s / question.world_size:.1f} an accelerator"
    )
    yield from in_words(expected)
    yield _NOTE
    if ablated:
        yield from ("", *_ablation_in_words(ablated))
    if swept:
        yield from ("", *_sweep_in_words(swept, question.gpus_per_node))


def _ablation_in_words(rows: Sequence[AblationRow]) -> list[str]:
    """Table of steps with one technique exchanged at a time; the settings asked for are marked."""
    cells = []
    for row in rows:
        mark = " (as asked)" if row.is_as_asked else ""
        name = f"{row.technique}: {row.setting}{mark}"
        cells.append([name, "-", "-", "-", "-"])
        if row.difference_ms is not None:
            cells[-1][1:] = (
                f"{row.step_ms:.1f} ms",
                f"{row.difference_ms:+.1f} ms",
                f"{row.exposed_ms:.1f} ms",
                f"{row.imbalance_tokens:.4f}",
            )
    left_out = [f"left out: {row.setting} ({row.reason})" for row in rows if row.reason]
    return [*aligned(_ABLATION_NAMES, cells, left=_ABLATION_NAMES[0]), *left_out]


def _sweep_in_words(rows: Sequence[SweepRow], gpus_per_node: int) -> list[str]:
    """Table with a row per size; a time whose samples nobody published is marked."""
    cells = [
        (
            f"{row.nodes:,}",
            f"{row.accelerators:,}",
            f"{row.local_batch_size:,}",
            f"{row.global_batch_size:,}",
            f"{row.step_ms:.1f} ms",
            f"{row.exposed_ms:.1f} ms",
            f"{row.waiting_ms:.1f} ms",
            f"{row.sequences_per_s:,.0f}/s",
            f"{row.samples / 1e6:.2f} M",
            f"{row.time_s:,.1f} s" + (" " if row.basis in _KNOWN else "?"),
        )
        for row in rows
    ]
    lines = aligned(_SWEEP_NAMES, cells, left="nodes")
    shown = {row.nodes for row in rows}
    left_out = [f"{nodes:,}" for nodes in sweep_nodes(gpus_per_node) if nodes not in shown]
    if left_out:
        sizes = ", ".join(left_out)
        lines.append(f"left out, as ranks cannot be dealt the batch, or hold it: {sizes} nodes")
    return [*lines, "?: no published run tells the samples at this batch"]


def timeline_picture(found: Simulated) -> "Figure":
    """Picture of one step: the slowest rank above the median one, three lanes each."""
    from matplotlib.patches import Patch

    timing = replace(found.timings[0], earlier_ms=0.0)  # the last forward of the update
    figure = new_figure(12, 5.2)
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
    names = {
        "launches on the host": _HOST,
        "forward": _FORWARD,
        "backward": _BACKWARD,
        "optimizer": _OPTIMIZER,
        "buckets on the way": _SENT,
    }
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    question = found.question
    figure.suptitle(
        f"Simulated step, {timing.step_ms:.1f} ms: {question.world_size:,} {question.accelerator} "
        f"x {question.local_batch_size}, {question.program}, capture "
        f"{question.software.capture}, {question.clip}"
    )
    return figure


def _draw_rank(axes: "Axes", timing: StepTiming, rank: int) -> None:
    """Draw host launches, device work and buckets of one rank, a bar each."""
    starts, host_begin = timing.starts[:, rank], timing.input_ms
    # Communication and clipping slow backward down; the delay is spread over its phases.
    first = next(i for i, phase in enumerate(timing.phases) if phase.direction == "backward")
    begin, end = float(starts[first]), float(timing.ends[-1, rank])
    factor = (float(timing.backward_end[rank]) - begin) / max(end - begin, 1e-9)

    def stretch(at: float) -> float:
        return at if at <= begin else begin + (at - begin) * factor

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
    updated = update + timing.orthogonalising_ms + timing.optimizer_ms
    _bar(axes, "compute", update, updated, _OPTIMIZER)
    _bar(axes, "communication", timing.step_ms - timing.all_gather_ms, timing.step_ms, _SENT)
    axes.axvline(timing.backward_end[rank], color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks([0, 1, 2], _LANES)
    axes.set_ylim(-0.6, 2.6)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(axes: "Axes", lane: str, start: float, end: float, colour: str) -> None:
    if end > start:
        axes.barh(_LANES.index(lane), end - start, 0.7, start, color=colour, ec="white", lw=0.3)


def ablation_picture(found: Simulated, rows: Sequence[AblationRow]) -> "Figure":
    """Picture of bars: the step with one technique exchanged, in ms."""
    shown = [row for row in rows if row.step_ms is not None]
    figure = new_figure(10, 1.6 + 0.32 * len(shown))
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
    return figure


def sweep_picture(series: dict[str, Sequence[SweepRow]]) -> "Figure":
    """Picture of two panels over accelerators: time to the target, and the parts of a step."""
    figure = new_figure(12, 4.8)
    left, right = figure.subplots(1, 2)
    for name, rows in series.items():
        ranks = [row.accelerators for row in rows]
        times = [row.time_s for row in rows]
        (line,) = left.plot(ranks, times, marker="o", markersize=3, label=name)
        unknown = [(row.accelerators, row.time_s) for row in rows if row.basis not in _KNOWN]
        if unknown:
            left.scatter(*zip(*unknown, strict=True), s=45, facecolors="white", zorder=3,
                         edgecolors=line.get_color())  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="accelerators", ylabel="time to the target, s")
    left.set_title("hollow: samples at this batch are not published", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    left.grid(alpha=0.3, which="both")
    _draw_parts(right, *next(iter(series.items())))
    return figure


def _draw_parts(axes: "Axes", name: str, rows: Sequence[SweepRow]) -> None:
    ranks = [row.accelerators for row in rows]
    parts = np.array([[row.compute_ms, row.waiting_ms, row.exposed_ms] for row in rows]).T
    labels = ("computing", "waiting: slower ranks, host", "waiting: communication")
    axes.stackplot(ranks, parts, labels=labels, colors=(_BACKWARD, _HOST, _SENT))
    axes.set(xscale="log", xlabel="accelerators", ylabel="a step of the mean rank, ms")
    axes.set_title(name, fontsize=9)
    axes.legend(framealpha=0.9, fontsize=8, loc="lower left")
