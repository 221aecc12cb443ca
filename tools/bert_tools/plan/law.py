"""Fits time = a * p^b over p accelerators to MLPerf results, for `plan law`.

The fit uses ordinary least squares on logarithms (`scipy.stats.linregress`). Because
time = samples / throughput, the exponent of the time is the exponent of the samples (larger batches
need more samples) minus the exponent of the throughput (the hardware's contribution). Confidence
intervals use Student's t. This module needs no torch.
"""

import argparse
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from bert_tools.common.results import aligned, quantile_95
from bert_tools.plan.entries import Entry, chosen, published_entries, read_results
from mlperf_bert.errors import ConfigError, DataError, one_line

_MAX_EXPONENT = 10  # so that every value of the law is a finite number
_PUBLISHED = "published results"
_FEW = 8  # with fewer entries, the printed line says that the interval is not reliable
_MAX_LISTED = 8  # with more sizes, exponents between neighbouring sizes are not printed
_HEADER = ("entry", "accelerators", "time, min", "samples, M", "seq/s", "time / law")


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """A law of the form value = coefficient * p^exponent, fitted to `count` entries.

    `half_width` is the half-width of the exponent's 95% confidence interval by Student's t, or None
    if there are only two entries.
    """

    coefficient: float
    exponent: float
    half_width: float | None = None
    count: int = 0

    def at(self, accelerators: float) -> float:
        """Return the law's value for a number of accelerators."""
        return float(self.coefficient * accelerators**self.exponent)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the exponent's 95% confidence interval, or None if there are only two entries."""
        if self.half_width is None:
            return None
        return self.exponent - self.half_width, self.exponent + self.half_width


# Cerebras' fit to MLPerf v0.7 (July 2020) for p NVIDIA A100: minutes = 228.3 * p^-0.7392.
CEREBRAS = PowerLaw(coefficient=228.3, exponent=-0.7392)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLaw:
    """Power laws of time, throughput and samples, fitted to the same entries.

    The laws of throughput and samples are None if too few entries have these values.
    """

    entries: tuple[Entry, ...]
    time: PowerLaw
    throughput: PowerLaw | None
    samples: PowerLaw | None

    def residual(self, entry: Entry) -> float:
        """Return an entry's time divided by the time that the law predicts."""
        return (entry.time_min or math.nan) / self.time.at(entry.accelerators or math.nan)


def fit_law(entries: Sequence[Entry]) -> ScalingLaw:
    """Fit power laws of time, throughput and samples to entries.

    Every entry must have a number of accelerators and a time.

    Raises ConfigError if there are too few entries, or if their sizes differ too little to fit a
    law.
    """
    time = _fit([(entry.accelerators, entry.time_min) for entry in entries])
    if time is None:
        problem = "there is no entry with a time and a number of accelerators"
        if len(entries) == 1:
            problem = f"a single entry, {entries[0].name!r}, is not enough to fit a law"
        elif entries:
            problem = f"all {len(entries)} entries have {entries[0].accelerators:,} accelerators"
        remedy = "pass entries with different numbers of accelerators, or remove a --filter"
        raise ConfigError("plan law", problem, remedy)
    return ScalingLaw(
        entries=tuple(entries),
        time=time,
        throughput=_fit([(entry.accelerators, entry.seq_per_s) for entry in entries]),
        samples=_fit([(entry.accelerators, entry.samples) for entry in entries]),
    )


def _fit(points: Sequence[tuple[int | None, float | None]]) -> PowerLaw | None:
    """Fit a power law to (accelerators, value) points, ignoring those without a value.

    Returns None if the points have fewer than two different numbers of accelerators.
    """
    from scipy.stats import linregress  # this import takes a second, and few answers need it

    known = [(float(size), float(value)) for size, value in points if size and value]
    if len({size for size, _ in known}) < 2:
        return None
    sizes, values = np.log(np.array(known)).T
    line = linregress(sizes, values)
    if abs(line.slope) > _MAX_EXPONENT:
        problem = f"the exponent fitted to {len(known)} entries, {line.slope:.3g}, is too large"
        raise ConfigError("plan law", problem, "pass results whose system sizes differ more")
    degrees = len(known) - 2
    return PowerLaw(
        coefficient=math.exp(line.intercept),
        exponent=float(line.slope),
        half_width=quantile_95(degrees) * float(line.stderr) if degrees else None,
        count=len(known),
    )


def local_exponents(points: Iterable[tuple[float, float]]) -> list[float]:
    """Return the exponents between neighbouring numbers of accelerators, the smallest ones first.

    `points` are (accelerators, time). Several times at one number count as their geometric mean. If
    the exponents differ much, one power law does not describe all points.
    """
    logs: dict[float, list[float]] = {}
    for size, value in sorted(points):
        logs.setdefault(math.log(size), []).append(math.log(value))
    means = [(size, fmean(values)) for size, values in logs.items()]
    return [(later - first) / (larger - size) for (size, first), (larger, later) in pairwise(means)]


def answer(args: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """Fit a scaling law to the results that the user chose.

    Returns the facts for `--json` and the lines for the terminal. Raises ConfigError or DataError
    for a user's mistake.
    """
    everything, skipped = published_entries(), list[DataError]()
    if args.directory is not None:
        if not os.path.isdir(args.directory):
            remedy = "pass a directory with MLPerf logs, or no directory to use published results"
            raise DataError(str(args.directory), "no such directory", remedy)
        everything, skipped = read_results(args.directory)
    entries = chosen(everything, args.filter)
    try:
        law = fit_law([each for each in entries if each.time_min and each.accelerators])
    except ConfigError as error:
        if not skipped:  # skipped entries may be the cause
            raise
        where, problem, remedy = error.args
        name, reason, _ = skipped[-1].args
        problem += f" ({len(skipped)} skipped, the last one is {name}: {reason})"
        raise ConfigError(where, problem, remedy) from None
    left_out = [each for each in entries if not (each.time_min and each.accelerators)]
    title = ", ".join([str(args.directory or _PUBLISHED), *args.filter])
    facts = {
        "source": str(args.directory or _PUBLISHED),
        "filters": args.filter,
        **_part("", law.time, "coefficient_minutes"),
        "local_exponents": local_exponents(_times(law)),
        **_part("throughput_", law.throughput),
        **_part("samples_", law.samples),
        "entries": [asdict(each) | {"residual_factor": law.residual(each)} for each in law.entries],
        "left_out": [asdict(each) for each in left_out],
        "skipped": [{"name": each.args[0], "problem": each.args[1]} for each in skipped],
    }
    return facts, in_words(title, law, skipped, left_out)


def _part(name: str, part: PowerLaw | None, coefficient: str = "coefficient") -> dict[str, Any]:
    """Return the values of one law for `--json`, with keys that begin with `name`."""
    low, high = (part and part.interval) or (None, None)
    return {
        f"{name}exponent": part and part.exponent,
        f"{name}exponent_low": low,
        f"{name}exponent_high": high,
        f"{name}{coefficient}": part and part.coefficient,
    }


def _times(law: ScalingLaw) -> list[tuple[float, float]]:
    return [(each.accelerators or math.nan, each.time_min or math.nan) for each in law.entries]


def in_words(
    title: str,
    law: ScalingLaw,
    skipped: Sequence[DataError],
    left_out: Sequence[Entry],
) -> Iterator[str]:
    """Yield the lines that describe a scaling law on the terminal. Times are in minutes."""
    sizes = [entry.accelerators or 0 for entry in law.entries]
    yield one_line(title)
    yield f"{law.time.count} entries, {min(sizes):,} to {max(sizes):,} accelerators"
    yield from ("", *_laws(law))
    yield (
        f"compared with {law_in_words(CEREBRAS)} (Cerebras' note, MLPerf v0.7, A100), this law "
        f"gives {law.time.at(min(sizes)) / CEREBRAS.at(min(sizes)):.2f} times the time on "
        f"{min(sizes):,} accelerators and "
        f"{law.time.at(max(sizes)) / CEREBRAS.at(max(sizes)):.2f} times the time on {max(sizes):,}"
    )
    listed = sorted(law.entries, key=lambda entry: entry.accelerators or 0)
    rows = [_cells(entry, law.residual(entry)) for entry in listed]
    yield from ("", *aligned(_HEADER, rows, left="entry"))
    yield "this law describes other programs; use `plan cluster --config FILE` to forecast a config"
    for entry in left_out:
        reason = "time" if entry.accelerators else "number of accelerators"
        yield f"left out {one_line(entry.name)}: its source has no {reason}"
    for name, problem, _ in (each.args for each in skipped):
        yield f"skipped {one_line(name)}: {one_line(problem)}"


def law_in_words(law: PowerLaw, unit: str = "minutes") -> str:
    """Format a law as text, for example `59.72 minutes * p^-0.701`."""
    number = law.coefficient
    shown = f"{number:,.0f}" if 1000 <= number < 1e12 else f"{number:.4g}"
    return f"{shown} {unit} * p^{law.exponent:.4g}"


def _laws(law: ScalingLaw) -> Iterator[str]:
    yield f"time = {law_in_words(law.time)}"
    yield f"  exponent {_interval(law.time)}"
    if law.throughput and law.samples:
        is_whole = law.samples.count == law.throughput.count == law.time.count
        of_some = (
            f"from the entries that have them (throughput {law.throughput.count}, "
            f"samples {law.samples.count} of {law.time.count}):"
        )
        yield (
            f"  {'=' if is_whole else of_some} {law.samples.exponent:+.3f} (samples to target) "
            f"- {law.throughput.exponent:.3f} (throughput, ideally 1)"
        )
        yield f"  throughput = {law_in_words(law.throughput, 'sequences/s')}"
        yield f"    exponent {_interval(law.throughput)}"
        yield f"  samples = {law_in_words(law.samples, 'sequences')}"
        yield f"    exponent {_interval(law.samples)}"
    else:
        yield "  not split into samples and throughput, because fewer than two sizes have samples"
    slopes = local_exponents(_times(law))
    if 1 < len(slopes) < _MAX_LISTED:
        shown = ", ".join(f"{slope:.2f}" for slope in slopes)
        yield f"exponents between neighbouring sizes, which one law assumes to be equal: {shown}"
    if -1 < law.time.exponent < -0.1:
        more = 2 ** (-1 / law.time.exponent)
        yield (
            f"half the time needs {more:.1f} times the accelerators and {more / 2 - 1:.0%} more "
            "accelerator-minutes"
        )


def _interval(law: PowerLaw) -> str:
    if law.interval is None:
        return f"{law.exponent:.3f} (two entries are too few for an interval)"
    low, high = law.interval
    few = f", which says little for {law.count} entries" if law.count < _FEW else ""
    return f"{law.exponent:.3f} (95% interval by Student's t: {low:.3f} to {high:.3f}{few})"


def _cells(entry: Entry, residual: float) -> tuple[str, ...]:
    return (
        entry.name,
        f"{entry.accelerators:,}",
        f"{entry.time_min:.3f}",
        "-" if entry.samples is None else f"{entry.samples / 1e6:.3f}",
        "-" if entry.seq_per_s is None else f"{entry.seq_per_s:,.0f}",
        f"x {residual:.2f}",
    )
