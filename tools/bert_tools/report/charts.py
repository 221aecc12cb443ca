"""The charts of a report: their curves, levels and marks, for one run or several."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from bert_tools.report.chart import Chart, Point, Series, curve_label, thinned
from bert_tools.report.facts import RunFacts
from bert_tools.report.goodput import batch_charts
from bert_tools.report.published import Curve, convergence_point, curves_for

CONVERGENCE_POINT = "reference convergence point"
POINTS_OF_A_CHART = 1600  # over all curves from runs
_FEWEST_POINTS = 64  # per curve


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spec:
    """A chart of charts.toml."""

    title: str
    about: str
    unit: str = ""
    floor: float | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0
    quiet: float | None = None
    quietly: str = ""


def _specs() -> dict[str, _Spec]:
    text = resources.files(__package__).joinpath("charts.toml").read_text("utf-8")
    return {key: _Spec(**each) for key, each in tomllib.loads(text).items()}


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
    for key, spec in _specs().items():
        series = tuple(_series_of(spec.keys or {key: ""}, spec.scale, runs))
        values = [value for each in series for value in each.values]
        if values and spec.quiet is not None and all(value == spec.quiet for value in values):
            quiet.append(spec.quietly)
        elif values:
            chart = Chart(
                key=key,
                title=spec.title,
                unit=spec.unit,
                about=spec.about,
                series=series,
                floor=spec.floor,
                marks=marks,
            )
            charts.append(chart)
    return [*charts, *batch_charts(runs)], quiet


def _series_of(keys: Mapping[str, str], scale: float, runs: Sequence[RunFacts]) -> Iterable[Series]:
    most = max(_FEWEST_POINTS, POINTS_OF_A_CHART // (len(runs) * len(keys)))
    for number, facts in enumerate(runs):
        for place, (key, name) in enumerate(keys.items()):
            points = _points(facts, key, scale)
            if any(value is not None for _, value in points):
                yield Series(
                    run=number,
                    label=curve_label(facts.label, name, several=len(runs) > 1),
                    style="second" if place else "solid",
                    points=thinned(points, most),
                )


def _points(facts: RunFacts, key: str, scale: float) -> list[Point]:
    """Points from the metrics; a run without metrics has the log's throughput."""
    if key == "samples_per_s" and not facts.run.records and facts.run.timing:
        return [(samples, rate) for samples, rate in facts.run.timing.rates]
    points: list[Point] = []
    for record in facts.run.records:
        value = record.get(key)
        if value is not None or key == "loss":  # a loss that is not finite is shown as a gap
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
