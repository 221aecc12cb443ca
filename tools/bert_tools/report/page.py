"""The page of a report: one HTML file without network access, made from page.html.

It contains the values that its script shows under the pointer as JSON.
"""

import base64
import hashlib
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from bert_tools.report.chart import Chart, Scale, Series, seconds, significant
from bert_tools.report.charts import CONVERGENCE_POINT
from bert_tools.report.facts import RunFacts
from bert_tools.report.goodput import BATCH, batch_facts, batch_rows, in_words
from bert_tools.report.measures import (
    MEASURES,
    Number,
    differences,
    environment_rows,
    numbers_of,
    setting_rows,
    time_split,
)
from bert_tools.report.published import curves_for
from bert_tools.report.run_files import device_in_words
from mlperf_bert.common.errors import one_line

COLOURS = 8  # in the style sheet, from --c0
_BOX = 1000  # units of the stretched part of a chart, across and up
_LEAST_CHANGE = 0.0005  # written as 0.1 %
_DIGITS = 7  # significant
_MOST_EXACT = 2**53  # the largest exact integer of JavaScript
_TILES = (
    *("time_to_train_s", "samples_to_target", "best_accuracy"),
    *("samples_per_s", "tokens_per_s", "memory_gib"),
)
_STATE_SIGNS = {
    "target reached": ("good", "\N{CHECK MARK}"),
    "target missed": ("bad", "\N{MULTIPLICATION SIGN}"),
    "finished, no target": ("good", "\N{CHECK MARK}"),
    "ended, no target": ("plain", "\N{EM DASH}"),
    "stopped": ("warn", "\N{BLACK SQUARE}"),
    "no end recorded": ("warn", "\N{HORIZONTAL ELLIPSIS}"),
}
_VERDICT_SIGNS = {
    "on track": ("good", "\N{CHECK MARK}"),
    "behind": ("warn", "!"),
    "off": ("bad", "\N{MULTIPLICATION SIGN}"),
    "cannot be judged": ("plain", "?"),
}
_PARTS = {
    "init": "start-up",
    "steps": "steps",
    "wait": "wait for data",
    "evaluation": "evaluation",
    "rest": "rest",
}


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    filters = (percent, run_class, significant, seconds, device_in_words)
    environment.filters |= {each.__name__: each for each in filters}
    environment.filters |= {"state_in_words": _state_in_words, "said": _said}
    return environment.from_string(_text_of("page.html"))


def report_page(runs: Sequence[RunFacts], charts: Sequence[Chart], quiet: Sequence[str]) -> str:
    """The whole page for one run or several; `quiet` says in words what is not drawn."""
    style, script = _text_of("page.css"), _text_of("page.js")
    first = numbers_of(runs[0])
    drawn = [(chart, chart.sample_scale(), chart.value_scale()) for chart in charts]
    return _template().render(
        runs=runs,
        drawn=drawn,
        style=style,
        script=script,
        policy=_policy(style, script),
        values=[_hover_values(chart, across) for chart, across, _ in drawn],
        path_of=path_of,
        box=_BOX,
        batch=BATCH,
        state_signs=_STATE_SIGNS,
        verdict_signs=_VERDICT_SIGNS,
        parts=_PARTS.items(),
        tiles=[
            (each, value)
            for each in MEASURES
            if each.key in _TILES and (value := first[each.key]) is not None
        ],
        measures=list(_measure_rows(runs)),
        differences=differences(runs) if len(runs) > 1 else [],
        is_known=all(each.run.config is not None and each.environment for each in runs),
        has_published=any(curves_for(each.run.task) for each in runs),
        has_point=any(mark[1] == CONVERGENCE_POINT for chart in charts for mark in chart.marks),
        batches=[(each, in_words(each), batch_rows(each)) for each in batch_facts(runs)],
        time_bars=list(_time_bars(runs)),
        not_shown=_not_shown(runs, quiet),
        environment=environment_rows(runs),
        settings=setting_rows(runs),
    )


def _finalized(value: object) -> object:
    """A value as one printable line for the page, before it is escaped."""
    if value is None or hasattr(value, "__html__"):  # the template's own markup
        return value or ""
    return one_line(str(value))


def _text_of(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    """The content policy: nothing is loaded, and only this style sheet and this script apply."""
    digests = (hashlib.sha256(text.encode()).digest() for text in (style, script))
    of_style, of_script = (base64.b64encode(each).decode("ascii") for each in digests)
    return (
        f"default-src 'none'; style-src 'sha256-{of_style}'; script-src 'sha256-{of_script}'; "
        "base-uri 'none'; form-action 'none'"
    )


def run_class(run: int) -> str:
    """The style-sheet class of a run's colour and, beyond the eighth, of its dashes."""
    return "published" if run < 0 else f"r{run % COLOURS} dash{run // COLOURS}"


def percent(share: float) -> str:
    """A percentage for SVG."""
    return f"{100 * share:.2f}%"


def path_of(series: Series, across: Scale, up: Scale) -> str:
    """The curve in the stretched units; a gap starts a new segment."""
    words, pen = [], "M"
    for x, value in series.points:
        if value is None:
            pen = "M"
            continue
        left, top = across.share(x) * _BOX, (1 - up.share(value)) * _BOX
        words.append(f"{pen}{left:.1f} {top:.1f}")
        pen = "L"
    return "".join(words)


def _said(chart: Chart) -> str:
    """The chart in words, for readers who cannot see it."""
    curves = "; ".join(
        f"{each.label}, {len(each.values)} values, the last {significant(each.values[-1])}"
        for each in chart.series
        if each.values
    )
    return f"{chart.title} over {chart.across}: {curves}"


def _hover_values(chart: Chart, across: Scale) -> dict[str, Any]:
    return {
        "unit": chart.unit,
        "across": chart.across,
        "low": across.low,
        "high": across.high,
        "series": [
            {
                "label": one_line(each.label),
                "class": f"{run_class(each.run)} {each.style}",
                "x": [_short(x) for x, value in each.points if value is not None],
                "y": [_short(value) for value in each.values],
            }
            for each in chart.series
        ],
    }


def _short(value: float) -> int | float:
    if abs(value) < _MOST_EXACT and value == int(value):
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def _state_in_words(facts: RunFacts) -> str:
    words: str = facts.state
    if facts.run.outcome is not None and facts.run.outcome.stopped_by:
        words = f"stopped by {facts.run.outcome.stopped_by}, can be resumed"
    if facts.last_written is not None:
        written = time.gmtime(min(max(facts.last_written, 0.0), 2.0**32))
        utc = time.strftime("%Y-%m-%d %H:%M:%SZ", written)
        words = f"no end recorded: under way, or ended by a fault; last written {utc}"
    if facts.attempts:
        words += f"; {facts.attempts + 1} attempts"
    if facts.resumes:
        words += f"; resumed at {' and '.join(f'{each:,}' for each in facts.resumes)} samples"
    return words


def _measure_rows(runs: Sequence[RunFacts]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Rows of all single numbers: for each run its difference from the first, and the number."""
    columns = [numbers_of(each) for each in runs]
    for measure in MEASURES:
        values = [column[measure.key] for column in columns]
        if any(value is not None for value in values):
            yield (
                measure.label,
                [
                    ("", "")
                    if value is None
                    else (_change(values[0], value) if place else "", measure.in_words(value))
                    for place, value in enumerate(values)
                ],
            )


def _change(first: Number | None, value: Number) -> str:
    if not first or not value or abs(value) > 1e6 * abs(first):
        return ""
    ratio = value / first
    if abs(ratio - 1) < _LEAST_CHANGE:
        return ""
    if 0.1 < ratio < 10:
        return f"{100 * (ratio - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
    return f"{significant(ratio, 2)} \N{MULTIPLICATION SIGN}"


def _time_bars(runs: Sequence[RunFacts]) -> Iterator[tuple[object, ...]]:
    """For each run whose log is of all of it, what its time went into: its number, itself, the
    total, parts with where they begin and their share, and the same in words.
    """
    for number, facts in enumerate(runs):
        if (split := time_split(facts)) is None:
            continue
        total = sum(split.values())
        shares = [value / total for value in split.values()]
        said = ", ".join(
            f"{_PARTS[part]} {seconds(value)} ({100 * value / total:.1f} %)"
            for part, value in split.items()
            if value > 0
        )
        bars = list(zip(split, accumulate(shares, initial=0.0), shares, strict=False))
        yield number, facts, total, bars, said


def _not_shown(runs: Sequence[RunFacts], quiet: Sequence[str]) -> list[str]:
    """Sentences on missing files, and on charts that are left out because they never change."""
    words = [
        f"{facts.label}: {each}" if len(runs) > 1 else each
        for facts in runs
        for each in facts.absent
    ]
    words += [f"not drawn, {each}" for each in quiet]
    for facts in runs:
        records = facts.run.records
        missing = [record["step"] for record in records if record["loss"] is None]
        if missing:
            of = f"{len(missing):,} of {len(records):,} records, first at step {missing[0]:,}"
            words.append(f"{facts.label}: the loss is no number in {of}")
    return words
