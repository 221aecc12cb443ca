"""The comparison in words: Markdown tables that read well as plain text. No torch."""

import math
from collections.abc import Iterator, Sequence

from bert_tools.common.tables import markdown
from bert_tools.squad.comparison import (
    MORE_MEASURES,
    STUDY_MEASURES,
    Comparison,
    Measure,
    Row,
    Value,
)
from bert_tools.squad.study_text import study_in_words
from mlperf_bert.common.errors import one_line

MARK = "†"
_NOTHING = "-"
_PLACES = 4  # significant digits
_MOST_PLACES = 5  # after the point
_ROUNDING = 1e-9  # of a mean, and less: what sums of floats leave of zero
_LEAST_PERCENT = 0.001  # of a difference that is written out
_UNKNOWN_NOISE = "unknown"
_UNDISTURBED = 0.05  # of a rank's time that it may wait for a core


def in_words(comparison: Comparison) -> str:
    """All tables and what they say, for the terminal and for table.md."""
    lines = [
        *_heading(comparison),
        "",
        *measures_table(comparison, STUDY_MEASURES),
        "",
        *_differences(comparison),
        "",
        *measures_table(comparison, MORE_MEASURES),
        "",
        *_notes(comparison),
        "",
        *study_in_words(),
    ]
    return "\n".join(lines)


def _heading(comparison: Comparison) -> Iterator[str]:
    first = comparison.runs[0]
    same = first.same
    seeds = sorted({run.seed for run in comparison.runs})
    where = f"{first.cores} {'cores' if first.device == 'cpu' else 'GPUs'}"
    yield one_line(
        f"{same.get('model.layers')} layers, hidden {same.get('model.hidden')}, "
        f"{_count(same.get('model.parameters'))} parameters, from {_init(same.get('init'))}; "
        f"{_count(same.get('data.train_windows'))} windows of "
        f"{_count(same.get('data.train_questions'))} questions to train on, "
        f"{_count(same.get('data.dev_questions'))} to evaluate; {first.samples:,} samples, "
        f"{first.precision}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; "
        f"{first.device}, {where}, {first.processor}"
    )


def _init(digest: object) -> str:
    text = str(digest)
    return "random weights" if text == "random" else f"the checkpoint {text[:12]}"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def measures_table(comparison: Comparison, measures: Sequence[Measure]) -> list[str]:
    """One line an engine: means with half of their intervals."""
    header = ["engine", *(measure.title for measure in measures)]
    rows = [
        [_label(row), *(_cell(row, measure) for measure in measures)] for row in comparison.rows
    ]
    return markdown(header, rows)


def _label(row: Row) -> str:
    return row.label if row.is_comparable else f"{row.label} {MARK}"


def _cell(row: Row, measure: Measure) -> str:
    value = row.values[measure.key]
    if value is None:
        return _NOTHING
    mark = f" {MARK}" if measure.kind == "timed" and not row.is_comparable else ""
    return with_interval(value) + mark


def with_interval(value: Value, sign: str = "") -> str:
    """As `12.34 ± 0.41`; the mean alone where there is no interval, or none beyond rounding."""
    if not value.half_width or value.half_width < _ROUNDING * abs(value.mean):
        return number(value.mean, sign)
    places = max(0, 1 - math.floor(math.log10(value.half_width)))  # two digits of the half
    if places > _MOST_PLACES:
        return f"{number(value.mean, sign)} ± {number(value.half_width)}"
    return f"{value.mean:{sign},.{places}f} ± {value.half_width:,.{places}f}"


def number(value: float, sign: str = "") -> str:
    """With four significant digits, or all those before the point; small ones as 1.2e-05."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:{sign}.3g}"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    text = f"{value:{sign},.{max(0, _PLACES - whole)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _differences(comparison: Comparison) -> Iterator[str]:
    first = comparison.rows[0]
    others = comparison.rows[1:]
    if not others:
        return
    yield f"Differences to {first.label}, in percent, seed by seed:"
    yield ""
    header = ["engine", *(each.title.partition(",")[0] for each in STUDY_MEASURES)]
    header.append("any update's loss, at most")
    yield from markdown(
        header,
        [
            [_label(row), *(_difference(row, each) for each in STUDY_MEASURES), _loss(row)]
            for row in others
        ],
    )


def _difference(row: Row, measure: Measure) -> str:
    value = row.differences[measure.key]
    if value is not None and 0 < abs(value.mean) + (value.half_width or 0) < _LEAST_PERCENT:
        return f"< {_LEAST_PERCENT:g} %"
    if value is not None:
        return f"{with_interval(value, '+')} %"
    if measure.kind == "timed" and not row.is_comparable:
        return "not comparable"
    return _NOTHING


def _loss(row: Row) -> str:
    if row.loss_difference is None:
        return _NOTHING
    return f"{row.loss_difference:.1e}" if row.loss_difference else "0"


def _notes(comparison: Comparison) -> Iterator[str]:
    first, conditions = comparison.runs[0], comparison.conditions
    most = max(len(row.seeds) for row in comparison.rows)
    if most > 1:
        yield "±: half of a 95 % interval by Student's t over the seeds."
    else:
        yield "One seed: no intervals."
    for row in comparison.rows:
        if len(row.seeds) < most:
            yield f"{row.label}: {len(row.seeds)} of {most} seeds, as the others have not ended."
    marked = [row.label for row in comparison.rows if not row.is_comparable]
    if marked:
        yield (
            f"{MARK} not comparable: more ranks than the {first.cores} cores, so that ranks wait "
            "for each other's turn on a core. Its losses, scores and updates are as good as any."
        )
    yield f"Utilisation: {_utilisation(first.utilisation_means)}"
    yield from _shared_machine(comparison)
    yield from _efficiency_notes(comparison)
    if conditions.peak_tflops is not None:
        yield (
            f"MFU: model FLOPs by the published count over {number(conditions.peak_tflops)} "
            f"TFLOP/s, {one_line(conditions.peak_means)}."
        )
    yield "Runtime and samples/s are of training; end to end has start, evaluation and saving too."


def _shared_machine(comparison: Comparison) -> Iterator[str]:
    """Ranks that no more than fill the cores wait for one only where others have it."""
    shares = [
        run.core_wait_s / (run.train_s * run.ranks)
        for run in comparison.runs
        if run.is_comparable and run.device == "cpu" and run.core_wait_s is not None
    ]
    if shares and max(shares) > _UNDISTURBED:
        waited = 100 * min(1.0, max(shares))  # threads of a rank may wait side by side
        yield (
            f"Ranks of comparable runs waited up to {waited:.0f} % of their time for a "
            "core: for other programs, or for threads of their own that carry messages; times and "
            "rates hold that wait. CPU time a sample, of all ranks, says more of the work alone."
        )


def _utilisation(means: str) -> str:
    if means == "NVML utilisation":
        return "NVML's, the share of time in which any kernel ran: it says nothing of how much."
    return "CPU seconds of a rank over wall seconds and its threads, mean of the ranks."


def _efficiency_notes(comparison: Comparison) -> Iterator[str]:
    initial = comparison.conditions.initial_batch
    batches = {row.global_batch for row in comparison.rows}
    yield (
        f"Statistical efficiency: (phi + M0) / (phi + M), M0 = {initial} samples, phi the noise "
        "scale of the gradient as Adam scales it."
    )
    if batches == {initial}:
        yield (
            "All engines make the same updates of M = M0 samples, so it is 1 for each, whatever "
            "the noise: how the work is spread over ranks changes throughput alone."
        )
    if any(row.values["efficiency"] is None for row in comparison.rows):
        yield f"{_NOTHING}: phi is {_UNKNOWN_NOISE}: measure it with --noise-every, or for longer."
