"""`plan law`: fits the scale-out law to results, and shows it as text and as a picture."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_tools.common.figures import new_figure
from bert_tools.common.tables import aligned
from bert_tools.plan.answer import Answer, asked_picture
from bert_tools.plan.entries import (
    PUBLISHED,
    Entry,
    Skipped,
    chosen,
    published_entries,
    read_table,
)
from bert_tools.plan.log_tree import read_tree, system_entry
from bert_tools.plan.scaling_law import (
    CEREBRAS,
    LEVEL,
    RESAMPLES,
    MarginalCost,
    PowerLaw,
    ScalingLaw,
    fit_law,
    marginal_cost,
)
from mlperf_bert.common.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[Entry], float | None]

_MOST_SEED = 2**63 - 1
_MOST_NAMED = 4
_MOST_ACCELERATORS = 10**9
_FEW = 8  # with fewer entries a bootstrap interval is too narrow
_MOST_LISTED = 40
_LONGEST_NAME = 60
_MOST_WRITTEN_OUT = 1e12
_PLACES = 4  # a smaller exponent is 0 up to rounding
_ENTRY_HEADER = ("entry", "accelerators", "time, min", "samples, M", "seq/s", "over the law")
_COST_HEADER = (
    *("accelerators", "time, min", "accelerator-min", "for one more"),
    *("for half the time", "accelerator-min more"),
)
_FIT, _IDEAL, _OTHER = "#2f7d4f", "#9a9a9a", "#d9722e"
_POINTS = (  # one for each round with BERT
    *("#1f5f8b", "#b2478b", "#8a63b0", "#c9a227", "#3a9c9c"),
    *("#7a4b2a", "#555555", "#d62728", "#7fb3d8", "#111111"),
)
_LONGEST_TITLE = 110
_FEW_DECADES = 30  # in a shorter range powers of ten alone give one label or none


def answer(args: argparse.Namespace) -> Answer:
    """Fit the given results. Raises ConfigError or DataError for a user's mistake."""
    if not 0 <= args.seed <= _MOST_SEED:
        raise ConfigError("--seed", f"is {args.seed}", f"set it within 0 .. {_MOST_SEED}")
    for each in args.at:
        if not 1 <= each <= _MOST_ACCELERATORS:
            remedy = f"give 1 to {_MOST_ACCELERATORS:,} accelerators"
            raise ConfigError("--at", f"is {each}", remedy)
    picture, end = asked_picture(args)
    everything, skipped = _read(args.paths)
    entries = chosen(everything, args.filter)
    usable = [each for each in entries if each.time_min and each.accelerators]
    left_out = [each for each in entries if not (each.time_min and each.accelerators)]
    try:
        law = fit_law(usable, args.seed)
    except ConfigError as error:
        raise _with_skipped(error, skipped) from None
    sizes = sorted({each.accelerators or 0 for each in usable} | set(args.at))
    costs = [marginal_cost(law.time, size) for size in sizes]
    title = ", ".join(map(str, args.paths)) or PUBLISHED
    title += f": {', '.join(args.filter)}" if args.filter else ""
    facts = _facts(law, skipped, left_out, args) | {
        "marginal_cost": [asdict(cost) for cost in costs],
        "picture": picture and str(picture),
    }
    return Answer(
        facts=facts,
        lines=in_words(title, law, costs, skipped, left_out),
        pictures={picture: partial(_draw, title, law)} if picture else {},
        end=end,
    )


def _read(paths: list[Path]) -> tuple[list[Entry], list[Skipped]]:
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    single: dict[Path, list[Path]] = {}  # logs by directory; one directory is one system
    for path in paths or [Path(PUBLISHED)]:
        if str(path) == PUBLISHED:
            entries += published_entries()
        elif path.suffix == ".csv":
            entries += read_table(path)
        elif _is_directory(path):
            found, problems = read_tree(path.resolve())  # `.` and `..` are no names of systems
            entries += found
            skipped += problems
        else:
            directory = path.parent.resolve()
            single.setdefault(directory, []).append(directory / path.name)
    for directory, logs in single.items():
        entry, problems = system_entry(directory, list(dict.fromkeys(logs)))
        entries += [entry] if entry else []
        skipped += problems
    return entries, skipped


def _is_directory(path: Path) -> bool:
    try:
        return S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = "does not exist" if is_missing else error.strerror or "cannot be read"
        remedy = f"give MLPerf logs, a CSV file, or {PUBLISHED!r}"
        raise DataError(str(path), problem, remedy) from None


def _with_skipped(error: ConfigError, skipped: list[Skipped]) -> ConfigError:
    """The error, with the sources that could not be read, which may be its cause."""
    where, problem, remedy = error.args
    if not skipped:
        return error
    named = ", ".join(f"{each.name} ({each.problem})" for each in skipped[:_MOST_NAMED])
    more = f" and {len(skipped) - _MOST_NAMED} more" if len(skipped) > _MOST_NAMED else ""
    return ConfigError(where, f"{problem}; skipped: {named}{more}", remedy)


def _facts(
    law: ScalingLaw, skipped: list[Skipped], left_out: list[Entry], args: argparse.Namespace
) -> dict[str, Any]:
    time = law.time
    return {
        "sources": [str(path) for path in args.paths] or [PUBLISHED],
        "filters": args.filter,
        "exponent": time.exponent,
        "exponent_low": time.low,
        "exponent_high": time.high,
        "exponent_half_width_t": time.half_width,
        "coefficient_minutes": time.coefficient,
        "coefficient_minutes_low": time.coefficient_low,
        "coefficient_minutes_high": time.coefficient_high,
        **_part("throughput", law.throughput),
        **_part("samples", law.samples),
        "split_remainder": law.split_remainder,
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": args.seed,
        "reference": {
            "name": "Cerebras' note on MLPerf v0.7, A100",
            "exponent": CEREBRAS.exponent,
            "coefficient_minutes": CEREBRAS.coefficient,
        },
        "entries": [asdict(each) | {"residual_factor": law.residual(each)} for each in law.entries],
        "left_out": [asdict(each) for each in left_out],
        "skipped": [asdict(each) for each in skipped],
    }


def _part(name: str, part: PowerLaw | None) -> dict[str, float | None]:
    return {
        f"{name}_entries": part.count if part else 0,
        f"{name}_exponent": part.exponent if part else None,
        f"{name}_exponent_low": part.low if part else None,
        f"{name}_exponent_high": part.high if part else None,
        f"{name}_coefficient": part.coefficient if part else None,
    }


def in_words(
    title: str,
    law: ScalingLaw,
    costs: Sequence[MarginalCost],
    skipped: Sequence[Skipped],
    left_out: Sequence[Entry],
) -> Iterator[str]:
    """Lines for people; times in minutes, costs in accelerator-minutes of one run."""
    sizes = [entry.accelerators or 0 for entry in law.entries]
    listed = sorted(law.entries, key=lambda entry: entry.accelerators or 0)[:_MOST_LISTED]
    yield one_line(title)
    yield f"{law.time.count} entries, {min(sizes):,} to {max(sizes):,} accelerators"
    yield from ("", *_laws(law), *_divisions(law), _beside_cerebras(law, sizes), "")
    rows = [_entry_cells(entry, law.residual(entry)) for entry in listed]
    yield from (*aligned(_ENTRY_HEADER, rows, left="entry"), *_more(len(sizes)), "")
    yield from aligned(_COST_HEADER, [_cost_cells(cost) for cost in costs[:_MOST_LISTED]])
    yield from _more(len(costs))
    yield "by the law; accelerator-minutes are of one run, from run start to stop"
    yield "a line through what others ran; of a config `plan cluster --config` makes the forecast"
    for entry in left_out[:_MOST_LISTED]:
        reason = "no time" if entry.accelerators else "no number of accelerators"
        yield f"left out: {one_line(entry.name)}: {reason} in its source"
    yield from _more(len(left_out))
    yield from (f"skipped: {one_line(each.name)}: {one_line(each.problem)}" for each in skipped)


def law_in_words(law: PowerLaw, unit: str = "minutes") -> str:
    """The law in words, such as `59.72 minutes * p^-0.701`."""
    number = law.coefficient
    shown = f"{number:,.0f}" if 1000 <= number < _MOST_WRITTEN_OUT else f"{number:.4g}"
    exponent = round(law.exponent, _PLACES) + 0.0  # no -0
    return f"{shown} {unit} * p^{exponent:.4g}"


def _laws(law: ScalingLaw) -> Iterator[str]:
    yield f"time = {law_in_words(law.time)}"
    yield f"  exponent {_interval(law.time)}"
    if law.throughput and law.samples:
        is_whole = law.samples.count == law.throughput.count == law.time.count
        of_some = (
            f"of entries that say it (throughput {law.throughput.count}, "
            f"samples {law.samples.count} of {law.time.count}):"
        )
        yield (
            f"  {'=' if is_whole else of_some} {law.samples.exponent:+.3f} "
            "(samples to the target, the statistical part) "
            f"- {law.throughput.exponent:.3f} (throughput, the hardware's part; 1 is ideal)"
        )
        yield f"  throughput = {law_in_words(law.throughput, 'sequences/s')}"
        yield f"    exponent {_interval(law.throughput)}"
        yield f"  samples = {law_in_words(law.samples, 'sequences')}"
        yield f"    exponent {_interval(law.samples)}"
    else:
        yield "  not split: samples of entries of two sizes at least are not in the source"


def _divisions(law: ScalingLaw) -> Iterator[str]:
    divisions = [entry.division for entry in law.entries]
    if "open" in divisions and "closed" in divisions:
        yield (
            f"{divisions.count('open'):,} of {len(divisions):,} entries: the open division, where "
            "even the model is free; --filter division=closed leaves them out"
        )


def _interval(law: PowerLaw) -> str:
    if law.low is None or law.high is None or law.half_width is None:
        return f"{law.exponent:.3f}; two entries fix a line, and leave no interval"
    low, high = law.exponent - law.half_width, law.exponent + law.half_width
    text = (
        f"{law.exponent:.3f}; 95 % by bootstrap {law.low:.3f} to {law.high:.3f}, "
        f"by Student's t {low:.3f} to {high:.3f}"
    )
    if law.count < _FEW:
        text += f" (of {law.count} entries: neither means much)"
    return text


def _beside_cerebras(law: ScalingLaw, sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    factors = [law.time.at(size) / CEREBRAS.at(size) for size in (least, most)]
    return (
        f"beside {law_in_words(CEREBRAS)} (Cerebras' note, MLPerf v0.7, A100): this law gives "
        f"{factors[0]:.2f} times that at {least:,} and {factors[1]:.2f} times at "
        f"{most:,} accelerators"
    )


def _entry_cells(entry: Entry, residual: float) -> tuple[str, ...]:
    name = one_line(entry.name)
    return (
        name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}...",
        f"{entry.accelerators:,}",
        f"{entry.time_min:.3f}",
        "-" if entry.samples is None else f"{entry.samples / 1e6:.3f}",
        "-" if entry.seq_per_s is None else f"{entry.seq_per_s:,.0f}",
        f"x {residual:.2f}",
    )


def _cost_cells(cost: MarginalCost) -> tuple[str, ...]:
    return (
        f"{cost.accelerators:,.0f}",
        f"{cost.time_min:.3f}",
        f"{cost.accelerator_minutes:,.1f}",
        f"{cost.per_added:+.3f}",
        "-" if cost.for_half_time is None else f"{cost.for_half_time:,.0f}",
        "-" if cost.half_time_costs is None else f"{cost.half_time_costs:+,.1f}",
    )


def _more(count: int) -> list[str]:
    rest = count - _MOST_LISTED
    return [f"... and {rest:,} more; --json lists all"] if rest > 0 else []


def _draw(title: str, law: ScalingLaw) -> "Figure":
    """Three panels, both axes logarithmic; a colour for each round."""
    panels: tuple[tuple[str, PowerLaw | None, Value, float, int], ...] = (
        ("minutes to the target", law.time, lambda entry: entry.time_min, 1, -1),
        ("sequences/s: the hardware's part", law.throughput, lambda entry: entry.seq_per_s, 1, 1),
        (
            "million samples to the target: the statistical part",
            *(law.samples, lambda entry: entry.samples, 1e-6, 0),
        ),
    )
    figure = new_figure(13, 4.6)
    sizes = [entry.accelerators or 0 for entry in law.entries]
    grid = np.geomspace(min(sizes), max(sizes), 60)
    for axes, (name, part, value, scale, ideal) in zip(figure.subplots(1, 3), panels, strict=True):
        if part is None:
            axes.text(0.5, 0.5, "not in the source", ha="center", transform=axes.transAxes)
        else:
            _dots(axes, law.entries, value, scale)
            label = f"the law: exponent {part.exponent:.3f}"
            axes.plot(grid, [scale * part.at(size) for size in grid], color=_FIT, label=label)
            if ideal:
                line = part.at(grid[0]) * (grid / grid[0]) ** ideal
                axes.plot(grid, line, ":", color=_IDEAL, label=f"ideal: slope {ideal}")
        if part is law.time:
            cerebras = [CEREBRAS.at(size) for size in grid]
            axes.plot(grid, cerebras, "--", color=_OTHER, label="228.3 * p^-0.7392 (v0.7 A100)")
        _finish(axes, name)
    short = title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE]}..."
    # A path may look like the notation of formulas.
    figure.suptitle(ascii(short)[1:-1].replace("$", r"\$"), fontsize=10)
    return figure


def _dots(axes: "Axes", entries: Sequence[Entry], value: Value, scale: float) -> None:
    for number, name in enumerate(sorted({entry.round for entry in entries})):
        of_round = [entry for entry in entries if entry.round == name]
        known = [(each.accelerators, scale * v) for each in of_round if (v := value(each))]
        if known:
            colour = _POINTS[number % len(_POINTS)]
            label = f"v{name}" if name else None
            xs, ys = zip(*known, strict=True)
            axes.scatter(xs, ys, s=22, color=colour, label=label, zorder=3)


def _finish(axes: "Axes", label: str) -> None:
    from matplotlib.ticker import LogLocator

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
