"""`plan law`: fits time = a * p^b over p accelerators to MLPerf results, and explains it. No torch.

Ordinary least squares on logarithms (`scipy.stats.linregress`). As time = samples / throughput,
the exponent of the time is that of the samples (the statistical part: larger batches need more of
them) less that of the throughput (the hardware's part). Intervals: Student's t.
"""

import argparse
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bert_tools.common.results import aligned, quantile_95
from bert_tools.plan.entries import Entry, chosen, published_entries, read_results
from mlperf_bert.errors import ConfigError, DataError, one_line

_STEEPEST = 10  # of an exponent, so that every value of the law is a number
_PUBLISHED = "published results"
_FEW = 8  # an interval of fewer entries says little
_HEADER = ("entry", "accelerators", "time, min", "samples, M", "seq/s", "over the law")


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """value = coefficient * p^exponent, through `count` entries.

    `half_width` is half of the exponent's 95 % interval by Student's t; None if two entries fix the
    line.
    """

    coefficient: float
    exponent: float
    half_width: float | None = None
    count: int = 0

    def at(self, accelerators: float) -> float:
        """The value at so many accelerators."""
        return float(self.coefficient * accelerators**self.exponent)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The exponent's 95 % interval; None if two entries fix the line."""
        if self.half_width is None:
            return None
        return self.exponent - self.half_width, self.exponent + self.half_width


# Cerebras' fit to MLPerf v0.7 (July 2020), p NVIDIA A100: minutes = 228.3 * p^-0.7392.
CEREBRAS = PowerLaw(coefficient=228.3, exponent=-0.7392)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLaw:
    """The fits over the entries; throughput and samples are None if too few entries have them."""

    entries: tuple[Entry, ...]
    time: PowerLaw
    throughput: PowerLaw | None
    samples: PowerLaw | None

    def residual(self, entry: Entry) -> float:
        """Ratio of the entry's time to the law's."""
        return (entry.time_min or math.nan) / self.time.at(entry.accelerators or math.nan)


def fit_law(entries: Sequence[Entry]) -> ScalingLaw:
    """Fit entries that all have accelerators and a time.

    Raises ConfigError for too few entries, and for sizes that differ so little that the line
    through them is no law.
    """
    time = _fit([(entry.accelerators, entry.time_min) for entry in entries])
    if time is None:
        problem = "no entry is left to fit"
        if len(entries) == 1:
            problem = f"one entry alone, {entries[0].name!r}, makes no law"
        elif entries:
            problem = f"all {len(entries)} entries have {entries[0].accelerators:,} accelerators"
        remedy = "give entries of two sizes at least, or filter less"
        raise ConfigError("plan law", problem, remedy)
    return ScalingLaw(
        entries=tuple(entries),
        time=time,
        throughput=_fit([(entry.accelerators, entry.seq_per_s) for entry in entries]),
        samples=_fit([(entry.accelerators, entry.samples) for entry in entries]),
    )


def _fit(points: Sequence[tuple[int | None, float | None]]) -> PowerLaw | None:
    """The line through the points that have a value; None if they are of one size."""
    from scipy.stats import linregress  # takes a second, and few answers need it

    known = [(float(size), float(value)) for size, value in points if size and value]
    if len({size for size, _ in known}) < 2:
        return None
    sizes, values = np.log(np.array(known)).T
    line = linregress(sizes, values)
    if abs(line.slope) > _STEEPEST:
        problem = f"the line through {len(known)} entries is p^{line.slope:.3g}"
        raise ConfigError("plan law", problem, "give entries whose sizes differ more")
    degrees = len(known) - 2
    return PowerLaw(
        coefficient=math.exp(line.intercept),
        exponent=float(line.slope),
        half_width=quantile_95(degrees) * float(line.stderr) if degrees else None,
        count=len(known),
    )


def answer(args: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """Fit the given results. Raises ConfigError or DataError for a user's mistake."""
    everything, skipped = published_entries(), list[DataError]()
    if args.directory is not None:
        if not os.path.isdir(args.directory):
            remedy = "give a directory with MLPerf logs, or none for published results"
            raise DataError(str(args.directory), "is not a directory", remedy)
        everything, skipped = read_results(args.directory)
    entries = chosen(everything, args.filter)
    try:
        law = fit_law([each for each in entries if each.time_min and each.accelerators])
    except ConfigError as error:
        if not skipped:  # which may be the cause
            raise
        where, problem, remedy = error.args
        name, reason, _ = skipped[-1].args
        problem += f"; {len(skipped)} skipped: {name} {reason}"
        raise ConfigError(where, problem, remedy) from None
    left_out = [each for each in entries if not (each.time_min and each.accelerators)]
    title = ", ".join([str(args.directory or _PUBLISHED), *args.filter])
    facts = {
        "source": str(args.directory or _PUBLISHED),
        "filters": args.filter,
        **_part("", law.time, "coefficient_minutes"),
        **_part("throughput_", law.throughput),
        **_part("samples_", law.samples),
        "entries": [asdict(each) | {"residual_factor": law.residual(each)} for each in law.entries],
        "left_out": [asdict(each) for each in left_out],
        "skipped": [{"name": each.args[0], "problem": each.args[1]} for each in skipped],
    }
    return facts, in_words(title, law, skipped, left_out)


def _part(name: str, part: PowerLaw | None, coefficient: str = "coefficient") -> dict[str, Any]:
    low, high = (part and part.interval) or (None, None)
    return {
        f"{name}exponent": part and part.exponent,
        f"{name}exponent_low": low,
        f"{name}exponent_high": high,
        f"{name}{coefficient}": part and part.coefficient,
    }


def in_words(
    title: str,
    law: ScalingLaw,
    skipped: Sequence[DataError],
    left_out: Sequence[Entry],
) -> Iterator[str]:
    """Lines for people; times in minutes."""
    sizes = [entry.accelerators or 0 for entry in law.entries]
    yield one_line(title)
    yield f"{law.time.count} entries, {min(sizes):,} to {max(sizes):,} accelerators"
    yield from ("", *_laws(law))
    yield (
        f"beside {law_in_words(CEREBRAS)} (Cerebras' note, MLPerf v0.7, A100): this law gives "
        f"{law.time.at(min(sizes)) / CEREBRAS.at(min(sizes)):.2f} times that at {min(sizes):,} "
        f"and {law.time.at(max(sizes)) / CEREBRAS.at(max(sizes)):.2f} times at {max(sizes):,} "
        "accelerators"
    )
    listed = sorted(law.entries, key=lambda entry: entry.accelerators or 0)
    rows = [_cells(entry, law.residual(entry)) for entry in listed]
    yield from ("", *aligned(_HEADER, rows, left="entry"))
    yield "a line through what others ran; of a config `plan cluster --config` makes the forecast"
    for entry in left_out:
        reason = "no time" if entry.accelerators else "no number of accelerators"
        yield f"left out: {one_line(entry.name)}: {reason} in its source"
    for name, problem, _ in (each.args for each in skipped):
        yield f"skipped: {one_line(name)}: {one_line(problem)}"


def law_in_words(law: PowerLaw, unit: str = "minutes") -> str:
    """The law in words, such as `59.72 minutes * p^-0.701`."""
    number = law.coefficient
    shown = f"{number:,.0f}" if 1000 <= number < 1e12 else f"{number:.4g}"
    return f"{shown} {unit} * p^{law.exponent:.4g}"


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
            "(samples to target, the statistical part) "
            f"- {law.throughput.exponent:.3f} (throughput, the hardware's part; 1 is ideal)"
        )
        yield f"  throughput = {law_in_words(law.throughput, 'sequences/s')}"
        yield f"    exponent {_interval(law.throughput)}"
        yield f"  samples = {law_in_words(law.samples, 'sequences')}"
        yield f"    exponent {_interval(law.samples)}"
    else:
        yield "  not split: samples of entries of two sizes at least are not in the source"
    if -1 < law.time.exponent < -0.1:
        more = 2 ** (-1 / law.time.exponent)
        yield (
            f"half the time takes {more:.1f} times the accelerators and {more / 2 - 1:.0%} more "
            "accelerator-minutes"
        )


def _interval(law: PowerLaw) -> str:
    if law.interval is None:
        return f"{law.exponent:.3f}; two entries fix a line, and leave no interval"
    low, high = law.interval
    few = f" (of {law.count} entries: it says little)" if law.count < _FEW else ""
    return f"{law.exponent:.3f}; 95 % by Student's t {low:.3f} to {high:.3f}{few}"


def _cells(entry: Entry, residual: float) -> tuple[str, ...]:
    return (
        entry.name,
        f"{entry.accelerators:,}",
        f"{entry.time_min:.3f}",
        "-" if entry.samples is None else f"{entry.samples / 1e6:.3f}",
        "-" if entry.seq_per_s is None else f"{entry.seq_per_s:,.0f}",
        f"x {residual:.2f}",
    )
