"""The answer of `plan law` as text: the law, its two parts, every entry, what more would cost."""

from collections.abc import Iterator, Sequence

from bert_tools.plan.entries import Entry, Skipped
from bert_tools.plan.scaling_law import CEREBRAS, MarginalCost, PowerLaw, ScalingLaw
from mlperf_bert.common.errors import one_line

FEW = 8  # entries below which an interval by resampling them promises too much
_MOST_LISTED = 40
_LONGEST_NAME = 60
_MOST_WRITTEN_OUT = 1e12
_PLACES = 4  # of an exponent: what rounding of floats leaves of 0 is none


def in_words(
    title: str,
    law: ScalingLaw,
    costs: Sequence[MarginalCost],
    skipped: Sequence[Skipped],
    left_out: Sequence[Entry],
) -> str:
    """Lines for people; times in minutes, costs in accelerator-minutes of one run."""
    lines = [
        one_line(title),
        f"{law.time.count} entries, {_sizes(law)} accelerators",
        "",
        *_laws(law),
        *_divisions(law),
        *_cerebras(law),
        "",
        *_table(_ENTRY_HEADER, map(_entry_cells, _listed(law.entries), _residuals(law))),
        *_more(len(law.entries)),
        "",
        *_table(_COST_HEADER, map(_cost_cells, costs[:_MOST_LISTED])),
        *_more(len(costs)),
        "by the law; accelerator-minutes are of one run, from run start to stop",
    ]
    for entry in left_out[:_MOST_LISTED]:
        reason = "no time" if entry.accelerators else "no number of accelerators"
        lines.append(f"left out: {one_line(entry.name)}: {reason} in its source")
    lines += _more(len(left_out))
    lines += [f"skipped: {one_line(each.name)}: {one_line(each.problem)}" for each in skipped]
    return "\n".join(lines)


def law_in_words(law: PowerLaw, unit: str = "minutes") -> str:
    """As `59.72 minutes * p^-0.701`."""
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
    if law.count < FEW:
        text += f" (of {law.count} entries: neither means much)"
    return text


def _cerebras(law: ScalingLaw) -> Iterator[str]:
    sizes = [entry.accelerators or 1 for entry in law.entries]
    factors = [law.time.at(size) / CEREBRAS.at(size) for size in (min(sizes), max(sizes))]
    yield (
        f"beside {law_in_words(CEREBRAS)} (Cerebras' note, MLPerf v0.7, A100): this law gives "
        f"{factors[0]:.2f} times that at {min(sizes):,} and {factors[1]:.2f} times at "
        f"{max(sizes):,} accelerators"
    )


_ENTRY_HEADER = ("entry", "accelerators", "time, min", "samples, M", "seq/s", "over the law")
_COST_HEADER = (
    *("accelerators", "time, min", "accelerator-min", "for one more"),
    *("for half the time", "accelerator-min more"),
)


def _listed(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.accelerators or 0)[:_MOST_LISTED]


def _residuals(law: ScalingLaw) -> list[float]:
    return [law.residual(entry) for entry in _listed(law.entries)]


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


def _table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Aligned columns: the first to the left where it is a name, else to the right."""
    cells = [tuple(header), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        first = line[0].ljust(widths[0]) if header[0] == "entry" else line[0].rjust(widths[0])
        rest = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join([first, *rest])


def _more(count: int) -> list[str]:
    rest = count - _MOST_LISTED
    return [f"... and {rest:,} more; --json lists all"] if rest > 0 else []


def _sizes(law: ScalingLaw) -> str:
    sizes = [entry.accelerators or 0 for entry in law.entries]
    return f"{min(sizes):,} to {max(sizes):,}"
