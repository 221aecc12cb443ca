"""The charts of a report, for one run or several."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_tools.report.chart import Chart, Point, Series, thinned
from bert_tools.report.run import Run

POINTS_OF_A_CHART = 1600  # over all curves
_FEWEST_POINTS = 64  # per curve
_BYTES_PER_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Spec:
    """A chart of a key of `metrics.jsonl`; the axis begins at `floor` or below."""

    key: str
    title: str
    unit: str
    about: str
    floor: float | None = 0.0


_SPECS = (
    _Spec(
        "mlm_accuracy",
        "Masked-LM accuracy",
        "",
        "share of masked tokens of the held-out set that are predicted right",
    ),
    _Spec(
        "loss",
        "Training loss",
        "",
        "mean of an interval's steps; masked LM and next sentence together",
        floor=None,
    ),
    _Spec("samples_per_s", "Throughput", "samples/s", "all ranks together, without evaluations"),
    _Spec("tokens_per_s", "Token throughput", "tokens/s", "real tokens, no padding counted"),
    _Spec("step_ms", "Time of a step", "ms", "the whole step, with its wait for data"),
    _Spec(
        "imbalance_tokens",
        "Imbalance",
        "\N{MULTIPLICATION SIGN} mean",
        "tokens of the rank with the most over the mean of all ranks",
        floor=1.0,
    ),
    _Spec("grad_norm", "Gradient norm", "", "before clipping, of an interval's last step"),
    _Spec("learning_rate", "Learning rate", "", "of an interval's last step"),
    _Spec("memory_bytes", "Peak memory", "GiB", "of rank 0: allocated on a GPU, resident on a CPU"),
    _Spec(
        "slowest_over_median",
        "Slowest rank",
        "\N{MULTIPLICATION SIGN} median",
        "own work of the slowest rank over that of the median one",
        floor=1.0,
    ),
)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts that these runs have values for, the accuracy with its targets first."""
    charts = [_chart_of(spec, runs) for spec in _SPECS]
    return [chart for chart in charts if any(series.values for series in chart.series)]


def _chart_of(spec: _Spec, runs: Sequence[Run]) -> Chart:
    is_accuracy = spec.key == "mlm_accuracy"
    targets = {run.target for run in runs if run.target is not None} if is_accuracy else set()
    most = max(_FEWEST_POINTS, POINTS_OF_A_CHART // len(runs))
    return Chart(
        key=spec.key,
        title=spec.title,
        unit=spec.unit,
        about=spec.about,
        series=tuple(
            Series(
                run=number,
                label=run.label if len(runs) > 1 else "this run",
                points=thinned(_points(run, spec.key), most),
            )
            for number, run in enumerate(runs)
            if run.known(spec.key)
        ),
        floor=spec.floor,
        levels=tuple((each, f"target {each:g}") for each in sorted(targets)),
        has_dots=is_accuracy,
    )


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
