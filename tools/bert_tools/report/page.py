"""The page of a report: one HTML file that loads nothing and needs no script, from page.html.

Every value is made one printable line and escaped where it is put in, because anybody may have
written the files of a run.
"""

import base64
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template

from bert_tools.report.chart import Chart, Point, Scale, Series, seconds, significant, thinned
from bert_tools.report.measures import (
    MEASURES,
    Number,
    differences,
    environment_rows,
    setting_rows,
)
from bert_tools.report.run import Run
from mlperf_bert.errors import one_line

COLOURS = 8  # in the style sheet, from --c0
_POINTS_OF_A_CHART = 1600  # over all curves
_FEWEST_POINTS = 64  # per curve
_BYTES_PER_GIB = 2**30
_BOX = 1000  # units of the stretched part of a chart, across and up
_LEAST_CHANGE = 0.0005  # written as 0.1 %
_TILES = (
    *("Time to train", "Samples to target", "Best accuracy"),
    *("Throughput", "Token throughput", "Peak memory of rank 0"),
)
_STATE_SIGNS = {
    "target reached": ("good", "\N{CHECK MARK}"),
    "target missed": ("bad", "\N{MULTIPLICATION SIGN}"),
    "finished, no target": ("good", "\N{CHECK MARK}"),
    "no end recorded": ("warn", "\N{HORIZONTAL ELLIPSIS}"),
}
_OTHER_SIGN = ("warn", "\N{BLACK SQUARE}")

CHARTS = (
    Chart(
        "mlm_accuracy",
        "Masked-LM accuracy",
        "",
        "share of masked tokens of the held-out set that are predicted right",
        has_dots=True,
    ),
    Chart(
        "loss",
        "Training loss",
        "",
        "mean of an interval's steps; masked LM and next sentence together",
        floor=None,
    ),
    Chart("samples_per_s", "Throughput", "samples/s", "all ranks together, without evaluations"),
    Chart("tokens_per_s", "Token throughput", "tokens/s", "real tokens, no padding counted"),
    Chart("step_ms", "Time of a step", "ms", "the whole step, with its wait for data"),
    Chart(
        "imbalance_tokens",
        "Imbalance",
        "\N{MULTIPLICATION SIGN} mean",
        "tokens of the rank with the most over the mean of all ranks",
        floor=1.0,
    ),
    Chart("grad_norm", "Gradient norm", "", "before clipping, of an interval's last step"),
    Chart("learning_rate", "Learning rate", "", "of an interval's last step"),
    Chart("memory_bytes", "Peak memory", "GiB", "of rank 0: allocated on a GPU, resident on a CPU"),
    Chart(
        "straggler_ratio",
        "Slowest rank",
        "\N{MULTIPLICATION SIGN} median",
        "own work of the slowest rank over that of the median one",
        floor=1.0,
    ),
)


def report_page(runs: Sequence[Run]) -> str:
    """The whole page for one run or several."""
    style = _text_of("page.css")
    return _template().render(
        runs=runs,
        drawn=[(each, each.sample_scale(), each.value_scale()) for each in charts_of(runs)],
        style=style,
        policy=_policy(style),
        path_of=path_of,
        box=_BOX,
        tiles=list(_tiles(runs[0])),
        measures=list(_measure_rows(runs)),
        differences=differences(runs) if len(runs) > 1 else [],
        is_known=all(each.config is not None and each.environment for each in runs),
        not_known=[
            f"{run.label}: {each}" if len(runs) > 1 else each for run in runs for each in run.absent
        ],
        environment=environment_rows(runs),
        settings=setting_rows(runs),
    )


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts that these runs have values for, the accuracy with its targets first."""
    targets = sorted({run.target for run in runs if run.target is not None})
    most = max(_FEWEST_POINTS, _POINTS_OF_A_CHART // len(runs))
    charts = []
    for chart in CHARTS:
        series = tuple(
            Series(
                run=number,
                label=run.label if len(runs) > 1 else "this run",
                points=thinned(_points(run, chart.key), most),
            )
            for number, run in enumerate(runs)
            if run.known(chart.key)
        )
        levels = [(each, f"target {each:g}") for each in targets if chart.key == "mlm_accuracy"]
        if any(each.values for each in series):
            charts.append(replace(chart, series=series, levels=tuple(levels)))
    return charts


def _points(run: Run, key: str) -> list[Point]:
    """The points of a curve; a loss that is not finite is a gap."""
    scale = 1 / _BYTES_PER_GIB if key == "memory_bytes" else 1.0
    points: list[Point] = []
    for record in run.records:
        value = record.get(key)
        if value is not None:
            points.append((record["samples"], value * scale))
        elif key == "loss":
            points.append((record["samples"], None))
    return points


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (percent, run_class, significant, seconds, device_in_words, state_sign)
    environment.filters |= {each.__name__: each for each in filters}
    environment.filters |= {"state_in_words": _state_in_words}
    return environment.from_string(_text_of("page.html"))


def _finalized(value: object) -> object:
    """A value as one printable line for the page, before it is escaped."""
    if value is None or hasattr(value, "__html__"):  # the template's own markup
        return value or ""
    return one_line(str(value))


def _text_of(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _policy(style: str) -> str:
    """The content policy: nothing is loaded, no script runs, and only this style sheet applies."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def run_class(run: int) -> str:
    """The style-sheet classes of a run's colour and, beyond the eighth run, of its dashes."""
    return f"r{run % COLOURS} dash{run // COLOURS}"


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


def state_sign(run: Run) -> tuple[str, str]:
    """The style-sheet class and the sign of a run's state."""
    return _STATE_SIGNS.get(run.state, _OTHER_SIGN)


def device_in_words(environment: Mapping[str, str]) -> str:
    """The known part of `2 ranks on cpu`; empty if nothing is known."""
    ranks, device = environment.get("world_size"), environment.get("device")
    if not ranks or not device:
        return device or ""
    return f"{ranks} rank{'' if ranks == '1' else 's'} on {device}"


def _state_in_words(run: Run) -> str:
    words = run.state
    if words.startswith("stopped by"):
        words += ", can be resumed"
    if run.last_written is not None:
        written = time.gmtime(min(max(run.last_written, 0.0), 2.0**32))
        utc = time.strftime("%Y-%m-%d %H:%M:%SZ", written)
        words = f"no end recorded: under way, or ended by a fault; last written {utc}"
    if run.attempts:
        words += f"; {run.attempts + 1} attempts"
    return words


def _tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """The main numbers of a run: short label, number in words, unit."""
    for measure in MEASURES:
        label = measure.label.partition(" (")[0].partition(",")[0]
        if label in _TILES and (value := measure.value(run)) is not None:
            yield label, measure.in_words(value).removesuffix(measure.unit), measure.unit


def _measure_rows(runs: Sequence[Run]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Rows of all single numbers: for each run its difference from the first, and the number."""
    for measure in MEASURES:
        values = [measure.value(run) for run in runs]
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
    """The difference from the first run's number, in words; empty if there is none to speak of."""
    if not first or not value or abs(value) > 1e6 * abs(first):
        return ""
    ratio = value / first
    if abs(ratio - 1) < _LEAST_CHANGE:
        return ""
    if 0.1 < ratio < 10:
        return f"{100 * (ratio - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
    return f"{significant(ratio, 2)} \N{MULTIPLICATION SIGN}"
