"""The comparison in Markdown, beside the published study.

No torch.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_tools.common.tables import markdown
from bert_tools.squad.comparison import (
    MORE_MEASURES,
    STUDY_MEASURES,
    Comparison,
    Measure,
    Row,
    Value,
)
from mlperf_bert.common.errors import one_line

TITLE = "BERT-base on SQuAD v2, 4 NVIDIA A100 40 GB, as published"
MARK = "†"
_NOTHING = "-"
_PLACES = 4  # significant digits
_MOST_PLACES = 5  # digits after the point
_ROUNDING = 1e-9  # share of a mean; less is zero up to rounding
_LEAST_PERCENT = 0.001  # of a difference that is written out
_UNDISTURBED = 0.05  # share of a rank's time that it may wait for a core


_KINDS: dict[str, type] = dict.fromkeys(("experiment", "precision"), str) | dict.fromkeys(
    ("devices", "global_batch", "updates"), int
)
_PUBLISHED = (  # title, field, how it is shown
    ("runtime, s", "runtime_s", ",.2f"),
    ("samples/s", "samples_per_s", ",.2f"),
    ("validation loss", "validation_loss", ".4f"),
    ("utilisation, %", "utilisation_percent", "g"),
    ("stat. efficiency", "efficiency", ".5f"),
    ("goodput", "goodput", ".4f"),
    ("updates", "updates", ",.0f"),
)
_DERIVED = (  # title, field, how it is shown
    ("experiment", "experiment", "{}"),
    ("precision", "precision", "{}"),
    ("global batch", "global_batch", "{}"),
    ("samples (samples/s x runtime)", "samples", "{:,.0f}"),
    ("samples an update", "samples_per_update", "{:.1f}"),
    ("samples/s x efficiency", "samples_per_s_times_efficiency", "{:.5f}"),
    ("least efficiency by definition", "least_efficiency_by_definition", "{:.4f}"),
)


def in_words(comparison: Comparison) -> str:
    """All tables and their notes, for the terminal and for table.md."""
    lines = [
        *_heading(comparison),
        "",
        *_measures(comparison, STUDY_MEASURES),
        "",
        *_differences(comparison),
        "",
        *_measures(comparison, MORE_MEASURES),
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
    init = str(same.get("init"))
    init = "random weights" if init == "random" else f"the checkpoint {init[:12]}"
    where = f"{first.cores} {'cores' if first.device == 'cpu' else 'GPUs'}"
    yield one_line(
        f"{same.get('model.layers')} layers, hidden {same.get('model.hidden')}, "
        f"{_count(same.get('model.parameters'))} parameters, from {init}; "
        f"{_count(same.get('data.train_windows'))} windows of "
        f"{_count(same.get('data.train_questions'))} questions to train on, "
        f"{_count(same.get('data.dev_questions'))} to evaluate; {first.samples:,} samples, "
        f"{first.precision}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; "
        f"{first.device}, {where}, {first.processor}"
    )


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _measures(comparison: Comparison, measures: Sequence[Measure]) -> list[str]:
    """One line per engine: means with half of their intervals."""
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
    mark = f" {MARK}" if measure.timed and not row.is_comparable else ""
    return with_interval(value) + mark


def with_interval(value: Value, sign: str = "") -> str:
    """A mean such as `12.34 ± 0.41`; alone if it has no interval beyond rounding."""
    if not value.half_width or value.half_width < _ROUNDING * abs(value.mean):
        return _number(value.mean, sign)
    places = max(0, 1 - math.floor(math.log10(value.half_width)))  # two digits of half the interval
    if places > _MOST_PLACES:
        return f"{_number(value.mean, sign)} ± {_number(value.half_width)}"
    return f"{value.mean:{sign},.{places}f} ± {value.half_width:,.{places}f}"


def _number(value: float, sign: str = "") -> str:
    """A number with four significant digits, or all before the point; small ones as 1.2e-05."""
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
    rows = []
    for row in others:
        loss = _NOTHING if row.loss_difference is None else f"{row.loss_difference:.1e}"
        shown = [_difference(row, each) for each in STUDY_MEASURES]
        rows.append([_label(row), *shown, "0" if row.loss_difference == 0 else loss])
    yield from markdown(header, rows)


def _difference(row: Row, measure: Measure) -> str:
    value = row.differences[measure.key]
    if value is not None and 0 < abs(value.mean) + (value.half_width or 0) < _LEAST_PERCENT:
        return f"< {_LEAST_PERCENT:g} %"
    if value is not None:
        return f"{with_interval(value, '+')} %"
    if measure.timed and not row.is_comparable:
        return "not comparable"
    return _NOTHING


def _notes(comparison: Comparison) -> Iterator[str]:
    first, conditions = comparison.runs[0], comparison.conditions
    most = max(len(row.seeds) for row in comparison.rows)
    interval = "±: half of a 95 % interval by Student's t over the seeds."
    yield interval if most > 1 else "One seed: no intervals."
    for row in comparison.rows:
        if len(row.seeds) < most:
            yield f"{row.label}: {len(row.seeds)} of {most} seeds, as the others have not ended."
    marked = [row.label for row in comparison.rows if not row.is_comparable]
    if marked:
        yield (
            f"{MARK} not comparable: more ranks than the {first.cores} cores, so that ranks wait "
            "for each other's turn on a core. Its losses, scores and updates are as good as any."
        )
    if first.utilisation_means == "NVML utilisation":
        text = "NVML's, the share of time in which any kernel ran: it says nothing of how much."
    else:
        text = "CPU seconds of a rank over wall seconds and its threads, mean of the ranks."
    yield f"Utilisation: {text}"
    yield from _shared_machine(comparison)
    yield from _efficiency_notes(comparison)
    if conditions.peak_tflops is not None:
        yield (
            f"MFU: model FLOPs by the published count over {_number(conditions.peak_tflops)} "
            f"TFLOP/s, {one_line(conditions.peak_means)}."
        )
    yield (
        "Samples/s and runtime count the plain updates, not the first nor those that measure noise "
        "or bubbles: runtime is what all updates take at that pace. End to end counts every "
        "update, with start and evaluation; saving is left out."
    )


def _shared_machine(comparison: Comparison) -> Iterator[str]:
    """Note on waits for a core: ranks that fit the cores wait only for other threads."""
    shares = [
        run.core_wait
        for run in comparison.runs
        if run.is_comparable and run.device == "cpu" and run.core_wait is not None
    ]
    if shares and max(shares) > _UNDISTURBED:
        waited = 100 * min(1.0, max(shares))  # threads of a rank may wait at the same time
        yield (
            f"Ranks of comparable runs waited up to {waited:.0f} % of their time for a "
            "core: for other programs, or for threads of their own that carry messages; times and "
            "rates hold that wait. CPU time a sample, of all ranks, says more of the work alone."
        )


def _efficiency_notes(comparison: Comparison) -> Iterator[str]:
    initial = comparison.conditions.initial_batch
    batches = {row.global_batch for row in comparison.rows}
    yield (
        f"Statistical efficiency: (phi + M0) / (phi + M), M0 = {initial} samples, phi the noise "
        "scale of the gradient."
    )
    if batches == {initial}:
        yield (
            "All engines make the same updates of M = M0 samples, so it is 1 for each, whatever "
            "the noise: how the work is spread over ranks changes throughput alone."
        )
    if any(row.values["efficiency"] is None for row in comparison.rows):
        yield f"{_NOTHING}: phi is unknown: measure it with --noise-every, or for longer."


def published_study() -> list[dict[str, Any]]:
    """The rows of study.csv, the first is the baseline, each with what follows from its figures.

    Samples trained on are rate times runtime; those of an update are the global batch, if the
    figures agree. Goodput is defined as rate times efficiency. The least efficiency is the lower
    bound of (phi + M0) / (phi + M) over initial batches M0 >= 1: at phi = 0, M0 = 1.
    """
    text = Path(__file__).with_name("study.csv").read_text("utf-8")
    rows: list[dict[str, Any]] = []
    for cells in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        row: dict[str, Any] = {name: _KINDS.get(name, float)(cell) for name, cell in cells.items()}
        samples = row["samples_per_s"] * row["runtime_s"]
        row |= {
            "samples": samples,
            "samples_per_update": samples / row["updates"],
            "samples_per_s_times_efficiency": row["samples_per_s"] * row["efficiency"],
            "least_efficiency_by_definition": 1 / row["global_batch"],
        }
        rows.append(row)
    return rows


def study_in_words() -> list[str]:
    """Lines on the figures, their differences to the baseline, contradictions, and causes."""
    rows = published_study()
    header = ["experiment", *(title for title, _, _ in _PUBLISHED)]
    derived = [[shown.format(row[key]) for _, key, shown in _DERIVED] for row in rows]
    return [
        f"The study ({TITLE}):",
        "",
        *markdown(header, [_published(row, rows[0]) for row in rows]),
        "",
        "What its figures say of each other:",
        "",
        *markdown([title for title, _, _ in _DERIVED], derived),
        "",
        *_confounds(rows),
    ]


def _published(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    cells = [row["experiment"]]
    for _, key, form in _PUBLISHED:
        value, base = float(row[key]), float(first[key])
        shown = f"{value:{form}}" if value >= 1e-3 else f"{value:.4g}"
        cells.append(shown if row is first else f"{shown} ({100 * (value / base - 1):+.2f} %)")
    return cells


def _confounds(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Differences between rows beside the engine, and impossible figures."""
    per_update = " / ".join(f"{row['samples_per_update']:.1f}" for row in rows)
    samples = " / ".join(f"{row['samples'] / 1e3:,.0f}k" for row in rows)
    least = " / ".join(f"{row['least_efficiency_by_definition']:.3g}" for row in rows)
    initial = rows[0]["global_batch"]  # the baseline's, the natural initial batch
    below = [
        row["experiment"]
        for row in rows
        if row["efficiency"] < row["least_efficiency_by_definition"]
    ]
    # At M0 = 1 it is (phi + 1) / (phi + M); solved for phi.
    published = rows[0]["efficiency"]
    noise = (published * initial - 1) / (1 - published)
    # With the scale s = M * M0 in the place of M / M0 the efficiency is (phi + 1) / (phi + s), phi
    # in initial batches: at least 1 / s.
    wrong = " / ".join(f"{1 / (row['global_batch'] * initial):.2g}" for row in rows)
    needed = max(1 / (row["global_batch"] * row["efficiency"]) for row in rows)
    others, baseline = rows[1:], f"{rows[0]['samples_per_update']:.1f}"
    batches = " and ".join(str(row["global_batch"]) for row in others)
    yield (
        f"- Precision: {rows[0]['precision']} in the baseline, {others[0]['precision']} in the "
        "others: on these GPUs that alone makes training faster."
    )
    yield (
        f"- Global batch: {rows[0]['global_batch']} against {batches} samples, at whatever "
        "learning rate: validation loss and efficiency change with it, whatever the engine."
    )
    yield f"- Samples: {samples}: runtimes are of different amounts of work."
    yield (
        f"- Samples an update: {per_update}. In the last two rows that is 16 a device: data "
        "parallelism's batch. Hugging Face's Trainer has no pipeline stages of DeepSpeed "
        "(huggingface/transformers#37129), so these rows were most likely data parallelism too; "
        f"{baseline} in the baseline fit neither 16 a device, {initial}, nor 16 in all."
    )
    yield (
        f"- Efficiency: (phi + M0) / (phi + M) is at least M0 / M, so at least {least} for any "
        f"initial batch of a sample or more. {' and '.join(below).capitalize()} are below, so they "
        f"do not follow from the definition; the baseline's does for M0 = 1 and phi = {noise:.2g} "
        "samples, with which a second sample of a batch would say almost nothing new."
    )
    yield (
        "- A conjecture why: M taken times M0 in the place of divided by it, as one revision of "
        f"AdaptDL's goodput.py has it. With M0 = {initial} that gives at least {wrong}: the "
        f"baseline fits, the others do not (they would need M0 of {needed:,.0f} or more). So it "
        "explains small efficiencies, not these figures."
    )
    yield (
        "- Utilisation is NVML's: low where kernels wait for something. It is no property of "
        "pipelines: their bubbles are (s - 1) / (m + s - 1) of s stages and m microbatches."
    )
