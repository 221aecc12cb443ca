"""Renders a report as one HTML page that loads no other files and needs no scripts.

The template is page.html. Every inserted value is escaped and reduced to one printable line,
because the files of a run may come from an untrusted source.
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
    SEED,
    Number,
    Row,
    differences,
    environment_rows,
    setting_rows,
)
from bert_tools.report.run import Run
from mlperf_bert.errors import one_line

COLOURS = 8  # the style sheet has --c0 to --c7
_POINTS_PER_CHART = 1600  # maximum for all curves of a chart together
_MIN_POINTS = 64  # a curve is not reduced to fewer points than this
_BYTES_PER_GIB = 2**30
_BOX = 1000  # width and height of a chart's curves in SVG units, before they are stretched
_MIN_CHANGE = 0.0005  # a smaller relative change would be written as 0.0%
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
        "fraction of the held-out set's masked tokens that are predicted correctly",
        has_dots=True,
    ),
    Chart(
        "loss",
        "Training loss",
        "",
        "mean over the steps of an interval, masked LM and next sentence together",
        floor=None,
    ),
    Chart("samples_per_s", "Throughput", "samples/s", "all ranks together, without evaluations"),
    Chart("tokens_per_s", "Token throughput", "tokens/s", "real tokens, without padding"),
    Chart("step_ms", "Time of a step", "ms", "the whole step, including its wait for data"),
    Chart(
        "imbalance_tokens",
        "Imbalance",
        "\N{MULTIPLICATION SIGN} mean rank",
        "tokens of the rank with the most, divided by the mean of all ranks",
        floor=1.0,
    ),
    Chart("grad_norm", "Gradient norm", "", "before clipping, at the last step of an interval"),
    Chart("learning_rate", "Learning rate", "", "at the last step of an interval"),
    Chart(
        "memory_bytes", "Peak memory", "GiB", "of rank 0, allocated on a GPU or resident on a CPU"
    ),
    Chart(
        "straggler_ratio",
        "Slowest rank",
        "\N{MULTIPLICATION SIGN} median rank",
        "step time of the slowest rank without its waits, divided by that of the median rank",
        floor=1.0,
    ),
)


def report_page(runs: Sequence[Run]) -> str:
    """Render the HTML page for one run, or for several runs side by side."""
    style = _text_of("page.css")
    different = differences(runs) if len(runs) > 1 else []
    return _template().render(
        runs=runs,
        drawn=[(each, each.sample_scale(), each.value_scale()) for each in charts_of(runs)],
        style=style,
        policy=_policy(style),
        path_of=path_of,
        box=_BOX,
        tiles=list(_tiles(runs[0])),
        measures=list(_measure_rows(runs)),
        differences=different,
        about_differences=_about_differences(runs, different),
        about_changes=(
            f"A change such as +5% is in percent of the first run's value ({runs[0].label}). "
            "A change such as 12 \N{MULTIPLICATION SIGN} means 12 times that value."
        ),
        not_known=[
            f"{run.label}: {each}" if len(runs) > 1 else each for run in runs for each in run.absent
        ],
        environment=environment_rows(runs),
        settings=setting_rows(runs),
    )


def _about_differences(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """Return a text about the settings and facts that are equal, and about those not compared."""
    is_known = all(each.config is not None and each.environment for each in runs)
    known = "" if is_known else ", as far as the files of the runs show"
    if any(each.attempts for each in runs):
        known += ". Only last attempts are compared here, and earlier ones may have run elsewhere"
    if not rows:
        equal = f"The runs have the same settings and the same machine{known}."
    elif [row.name for row in rows] == [SEED]:
        equal = f"Only the seed differs{known}."
    else:
        equal = f"All other settings and facts about the machine are the same{known}."
    return f"{equal} Start times are not compared."


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts for which these runs have values.

    The first chart is the accuracy, which also shows the targets.
    """
    targets = sorted({run.target for run in runs if run.target is not None})
    max_points = max(_MIN_POINTS, _POINTS_PER_CHART // len(runs))
    charts = []
    for chart in CHARTS:
        series = tuple(
            Series(
                run=number,
                label=run.label if len(runs) > 1 else "this run",
                points=thinned(_points(run, chart.key), max_points),
            )
            for number, run in enumerate(runs)
            if run.known(chart.key)
        )
        levels = [(each, f"target {each:g}") for each in targets if chart.key == "mlm_accuracy"]
        if any(each.values for each in series):
            charts.append(replace(chart, series=series, levels=tuple(levels)))
    return charts


def _points(run: Run, key: str) -> list[Point]:
    """Return the points of a run's curve of the metric `key`.

    A loss that is not finite becomes a gap.
    """
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
    """Convert a value of the template to one printable line before it is escaped."""
    if value is None or hasattr(value, "__html__"):  # the template's own markup has __html__
        return value or ""
    return one_line(str(value))


def _text_of(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _policy(style: str) -> str:
    """Return the page's content security policy.

    It allows the style sheet `style` and forbids everything else.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def run_class(run: int) -> str:
    """Return the CSS classes that set the colour and the dash pattern of a run's curve."""
    return f"r{run % COLOURS} dash{run // COLOURS}"


def percent(share: float) -> str:
    """Format a fraction as a percentage for SVG coordinates."""
    return f"{100 * share:.2f}%"


def path_of(series: Series, across: Scale, up: Scale) -> str:
    """Return the SVG path of a curve in a square with sides of `_BOX` units.

    A new segment starts after each gap.
    """
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
    """Return the CSS class and the symbol that show the state of a run."""
    return _STATE_SIGNS.get(run.state, _OTHER_SIGN)


def device_in_words(environment: Mapping[str, str]) -> str:
    """Describe a run's ranks and device, for example `2 ranks on cpu`.

    Facts that the environment does not contain are left out.
    """
    ranks, device = environment.get("world_size"), environment.get("device")
    if not ranks or not device:
        return device or ""
    return f"{ranks} rank{'' if ranks == '1' else 's'} on {device}"


def _state_in_words(run: Run) -> str:
    """Return a text that describes how a run ended, or when it last wrote its metrics."""
    words = run.state
    if words.startswith("stopped by"):
        words += ", can be resumed"
    if run.last_written is not None:
        written = time.gmtime(min(max(run.last_written, 0.0), 2.0**32))
        utc = time.strftime("%Y-%m-%d %H:%M:%SZ", written)
        words = f"still running, or ended by a fault (metrics last written {utc})"
    if run.attempts:
        words += f" ({run.attempts + 1} attempts)"
    return words


def _tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield the main numbers of a run, each as (short label, formatted number, unit)."""
    for measure in MEASURES:
        label = measure.label.partition(" (")[0].partition(",")[0]
        if label in _TILES and (value := measure.value(run)) is not None:
            yield label, measure.in_words(value).removesuffix(measure.unit), measure.unit


def _measure_rows(runs: Sequence[Run]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield one table row per summary number.

    Each run has a cell (change from the first run, formatted value), which is empty if the run does
    not have the number.
    """
    for measure in MEASURES:
        values = [measure.value(run) for run in runs]
        if any(value is not None for value in values):
            yield (
                measure.label,
                [
                    ("", "")
                    if value is None
                    else (_change(values[0], value) if number else "", measure.in_words(value))
                    for number, value in enumerate(values)
                ],
            )


def _change(first: Number | None, value: Number) -> str:
    """Format the relative change from the first run's value.

    The text is empty if the change is negligible or cannot be computed.
    """
    if not first or not value or abs(value) > 1e6 * abs(first):
        return ""
    ratio = value / first
    if abs(ratio - 1) < _MIN_CHANGE:
        return ""
    if 0.1 < ratio < 10:
        return f"{100 * (ratio - 1):+.1f}%".replace("-", "\N{MINUS SIGN}")
    return f"{significant(ratio, 2)} \N{MULTIPLICATION SIGN}"
