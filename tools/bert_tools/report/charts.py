"""What a report draws: for each chart its curves, levels and marks, for one run or several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bert_tools.report.chart import Chart, Point, Series, curve_label, thinned
from bert_tools.report.facts import RunFacts
from bert_tools.report.goodput import batch_charts
from bert_tools.report.published import Curve, convergence_point, curves_for

CONVERGENCE_POINT = "reference convergence point"
POINTS_OF_A_CHART = 1600  # of all curves together that runs bring
_FEWEST_POINTS = 64  # of a curve
_TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class _Spec:
    """A chart of keys of `metrics.jsonl`; not drawn where all values are `quiet`.

    `keys` are the curves' and what each is called; none where it has the chart's own key.
    """

    key: str
    title: str
    unit: str
    about: str
    floor: float | None = 0.0
    keys: tuple[tuple[str, str], ...] = ()
    scale: float = 1.0
    quiet: float | None = None
    quietly: str = ""


SPECS = (
    _Spec(
        "loss",
        "Training loss",
        "",
        "mean of an interval's steps; masked LM and next sentence together",
        floor=None,
    ),
    _Spec("samples_per_s", "Throughput", "samples/s", "all ranks together, evaluation left out"),
    _Spec(
        "tokens_per_s",
        "Token throughput",
        "tokens/s",
        "real tokens of all ranks together, no padding counted",
    ),
    _Spec(
        "step_ms",
        "Time of a step",
        "ms",
        "the whole step, and what of it the loop waited for data",
        keys=(("step_ms", "step"), ("wait_ms", "wait for data")),
    ),
    _Spec(
        "imbalance",
        "Imbalance",
        f"{_TIMES} mean",
        "work of the rank that has most over the mean of all: by tokens, by cost",
        keys=(("imbalance_tokens", "tokens"), ("imbalance_cost", "cost")),
        floor=1.0,
        quiet=1.0,
        quietly="imbalance: every rank had as much work as the others",
    ),
    _Spec(
        "idle_fraction",
        "Idle by imbalance",
        "%",
        "share of the ranks' time that waits for the one with most work, as planned",
        scale=100.0,
        quiet=0.0,
        quietly="idle by imbalance: 0 % all the time",
    ),
    _Spec(
        "clipped_fraction",
        "Clipped gradients",
        "%",
        "share of steps, or of buckets, whose gradient was longer than the limit",
        scale=100.0,
        quiet=0.0,
        quietly="clipped gradients: none",
    ),
    _Spec("grad_norm", "Gradient norm", "", "before clipping, of an interval's last step"),
    _Spec(
        "skipped_steps",
        "Skipped steps",
        "steps",
        "of an interval: steps without an update, because a gradient was not finite",
        quiet=0.0,
        quietly="skipped steps: none",
    ),
    _Spec("learning_rate", "Learning rate", "", "of an interval's last step"),
    _Spec(
        "noise_scale",
        "Gradient noise scale",
        "sequences",
        "batch at which noise and signal are equally strong, smoothed",
        keys=(
            ("noise_scale", "as the optimizer scales gradients"),
            ("noise_scale_plain", "plain gradients"),
        ),
    ),
    _Spec(
        "memory",
        "Peak memory",
        "GiB",
        "of rank 0 so far: allocated on a GPU, resident on a CPU",
        keys=(("memory_bytes", ""),),
        scale=2.0**-30,
    ),
    _Spec(
        "slowest_over_median",
        "Slowest rank",
        f"{_TIMES} median",
        "own work of the slowest rank over that of the median one, at evaluations",
        floor=1.0,
    ),
)


def charts_of(runs: Sequence[RunFacts]) -> tuple[list[Chart], list[str]]:
    """The charts that these runs have values for, the accuracy first; and in words what is left
    out because it never changes.
    """
    marks = tuple(
        (float(samples), "resumed", number)
        for number, facts in enumerate(runs)
        for samples in facts.resumes
    )
    charts = [_accuracy(runs, marks)] if any(each.run.evaluations for each in runs) else []
    quiet = []
    for spec in SPECS:
        series = tuple(_series_of(spec, runs))
        values = [value for each in series for value in each.values]
        if values and spec.quiet is not None and all(value == spec.quiet for value in values):
            quiet.append(spec.quietly)
        elif values:
            chart = Chart(
                key=spec.key,
                title=spec.title,
                unit=spec.unit,
                about=spec.about,
                series=series,
                floor=spec.floor,
                marks=marks,
            )
            charts.append(chart)
    return [*charts, *batch_charts(runs)], quiet


def _series_of(spec: _Spec, runs: Sequence[RunFacts]) -> Iterable[Series]:
    keys = spec.keys or ((spec.key, ""),)
    most = max(_FEWEST_POINTS, POINTS_OF_A_CHART // (len(runs) * len(keys)))
    for number, facts in enumerate(runs):
        for place, (key, name) in enumerate(keys):
            points = _points(facts, key, spec.scale)
            if any(value is not None for _, value in points):
                yield Series(
                    run=number,
                    label=curve_label(facts.label, name, several=len(runs) > 1),
                    style="second" if place else "solid",
                    points=thinned(points, most),
                )


def _points(facts: RunFacts, key: str, scale: float) -> list[Point]:
    """Of the metrics; the throughput of a run without them is the log's."""
    if key == "samples_per_s" and not facts.run.records and facts.run.timing:
        return [(samples, rate) for samples, rate in facts.run.timing.rates]
    points: list[Point] = []
    for record in facts.run.records:
        value = record.get(key)
        if value is not None or key == "loss":  # a loss that is no number is a gap to be seen
            points.append((record["samples"], None if value is None else value * scale))
    return points


def _accuracy(runs: Sequence[RunFacts], resumes: Sequence[tuple[float, str, int]]) -> Chart:
    tasks = [each.run.task for each in runs]
    curves: dict[str, Curve] = {each.name: each for task in tasks for each in curves_for(task)}
    series = [
        Series(run=-1, label=f"published {name}", style="published", points=curve.points)
        for name, curve in sorted(curves.items())
    ]
    most = max(_FEWEST_POINTS, POINTS_OF_A_CHART // len(runs))
    for number, facts in enumerate(runs):
        points: list[Point] = [(each.samples, each.accuracy) for each in facts.run.evaluations]
        if points:
            label = curve_label(facts.label, "", several=len(runs) > 1)
            series.append(Series(run=number, label=label, points=thinned(points, most)))
    expected = ((convergence_point(task), number) for number, task in enumerate(tasks))
    targets = {task.target_accuracy for task in tasks}
    return Chart(
        key="accuracy",
        title="Masked-LM accuracy",
        about="share of masked tokens of the held-out set that are predicted right",
        series=tuple(series),
        floor=0.0,
        levels=tuple((each, f"target {each:g}") for each in sorted(filter(None, targets))),
        marks=(*((x, CONVERGENCE_POINT, run) for x, run in expected if x is not None), *resumes),
        has_dots=True,
    )
