"""What a report draws: for each chart its curves, levels and marks, for one run or several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bert_tools.report.chart import Chart, Series
from bert_tools.report.curves import Curve, curves_for
from bert_tools.report.facts import RunFacts
from bert_tools.report.goodput import batch_charts
from bert_tools.report.series import Point, thinned
from mlperf_bert.evaluation.convergence import expected_samples

CONVERGENCE_POINT = "reference convergence point"
POINTS_OF_A_CHART = 1600  # of all curves together that runs bring
_FEWEST_POINTS = 64  # of a curve


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spec:
    """A chart of keys of `metrics.jsonl`; not drawn where all values are `quiet`."""

    key: str
    title: str
    unit: str
    about: str
    keys: tuple[tuple[str, str], ...]
    floor: float | None = None
    scale: float = 1.0
    quiet: float | None = None
    quietly: str = ""


SPECS = (
    _Spec(
        key="loss",
        title="Training loss",
        unit="",
        about="mean of an interval's steps; masked LM and next sentence together",
        keys=(("loss", ""),),
    ),
    _Spec(
        key="samples_per_s",
        title="Throughput",
        unit="samples/s",
        about="all ranks together, evaluation left out",
        keys=(("samples_per_s", ""),),
        floor=0.0,
    ),
    _Spec(
        key="tokens_per_s",
        title="Token throughput",
        unit="tokens/s",
        about="real tokens of all ranks together, no padding counted",
        keys=(("tokens_per_s", ""),),
        floor=0.0,
    ),
    _Spec(
        key="step_ms",
        title="Time of a step",
        unit="ms",
        about="the whole step, and what of it the loop waited for data",
        keys=(("step_ms", "step"), ("wait_ms", "wait for data")),
        floor=0.0,
    ),
    _Spec(
        key="imbalance",
        title="Imbalance",
        unit="\N{MULTIPLICATION SIGN} mean",
        about="work of the rank that has most over the mean of all: by tokens, by cost",
        keys=(("imbalance_tokens", "tokens"), ("imbalance_cost", "cost")),
        floor=1.0,
        quiet=1.0,
        quietly="imbalance: every rank had as much work as the others",
    ),
    _Spec(
        key="idle_fraction",
        title="Idle by imbalance",
        unit="%",
        about="share of the ranks' time that waits for the one with most work, as planned",
        keys=(("idle_fraction", ""),),
        floor=0.0,
        scale=100.0,
        quiet=0.0,
        quietly="idle by imbalance: 0 % all the time",
    ),
    _Spec(
        key="clipped_fraction",
        title="Clipped gradients",
        unit="%",
        about="share of steps, or of buckets, whose gradient was longer than the limit",
        keys=(("clipped_fraction", ""),),
        floor=0.0,
        scale=100.0,
        quiet=0.0,
        quietly="clipped gradients: none",
    ),
    _Spec(
        key="grad_norm",
        title="Gradient norm",
        unit="",
        about="before clipping, of an interval's last step",
        keys=(("grad_norm", ""),),
        floor=0.0,
    ),
    _Spec(
        key="skipped_steps",
        title="Skipped steps",
        unit="steps",
        about="of an interval: steps without an update, because a gradient was not finite",
        keys=(("skipped_steps", ""),),
        floor=0.0,
        quiet=0.0,
        quietly="skipped steps: none",
    ),
    _Spec(
        key="learning_rate",
        title="Learning rate",
        unit="",
        about="of an interval's last step",
        keys=(("learning_rate", ""),),
        floor=0.0,
    ),
    _Spec(
        key="noise_scale",
        title="Gradient noise scale",
        unit="sequences",
        about="batch at which noise and signal are equally strong, smoothed",
        keys=(
            ("noise_scale", "as the optimizer scales gradients"),
            ("noise_scale_plain", "plain gradients"),
        ),
        floor=0.0,
    ),
    _Spec(
        key="memory",
        title="Peak memory",
        unit="GiB",
        about="of rank 0 so far: allocated on a GPU, resident on a CPU",
        keys=(("memory_bytes", ""),),
        floor=0.0,
        scale=2.0**-30,
    ),
    _Spec(
        key="slowest_over_median",
        title="Slowest rank",
        unit="\N{MULTIPLICATION SIGN} median",
        about="own work of the slowest rank over that of the median one, at evaluations",
        keys=(("slowest_over_median", ""),),
        floor=1.0,
    ),
)


def charts_of(runs: Sequence[RunFacts]) -> tuple[list[Chart], list[str]]:
    """The charts that these runs have values for, the accuracy first; and in words what is left
    out because it never changes.
    """
    charts = [_accuracy(runs)] if any(each.run.evaluations for each in runs) else []
    quiet = []
    marks = tuple(_resume_marks(runs))
    for spec in SPECS:
        series = tuple(_series_of(spec, runs))
        values = [value for each in series for value in each.values]
        if not values:
            continue
        if spec.quiet is not None and all(value == spec.quiet for value in values):
            quiet.append(spec.quietly)
            continue
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
    most = max(_FEWEST_POINTS, POINTS_OF_A_CHART // (len(runs) * len(spec.keys)))
    for number, facts in enumerate(runs):
        for place, (key, name) in enumerate(spec.keys):
            points = _points(facts, key, spec.scale)
            if any(value is not None for _, value in points):
                words = (facts.label if len(runs) > 1 else "", name)
                yield Series(
                    run=number,
                    label=", ".join(filter(None, words)) or "this run",
                    style="second" if place else "solid",
                    points=thinned(points, most),
                )


def _points(facts: RunFacts, key: str, scale: float) -> list[Point]:
    """Of the metrics; the throughput of a run without them is the log's."""
    if key == "samples_per_s" and not facts.run.records and facts.timing:
        return [(samples, rate) for samples, rate in facts.timing.rates]
    points: list[Point] = []
    for record in facts.run.records:
        value = record.get(key)
        if value is not None or key == "loss":  # a loss that is no number is a gap to be seen
            points.append((record["samples"], None if value is None else value * scale))
    return points


def _accuracy(runs: Sequence[RunFacts]) -> Chart:
    series = list(_published(runs))
    for number, facts in enumerate(runs):
        points: list[Point] = [(each.samples, each.accuracy) for each in facts.run.evaluations]
        if points:
            label = facts.label if len(runs) > 1 else "this run"
            kept = thinned(points, max(_FEWEST_POINTS, POINTS_OF_A_CHART // len(runs)))
            series.append(Series(run=number, label=label, style="solid", points=kept))
    targets = {each.run.target_accuracy for each in runs} - {None}
    return Chart(
        key="accuracy",
        title="Masked-LM accuracy",
        unit="",
        about="share of masked tokens of the held-out set that are predicted right",
        series=tuple(series),
        floor=0.0,
        levels=tuple((each, f"target {each:g}") for each in sorted(filter(None, targets))),
        marks=(*_expected(runs), *_resume_marks(runs)),
        has_dots=True,
    )


def _published(runs: Sequence[RunFacts]) -> Iterable[Series]:
    """The published curves of the runs' batches and optimizers, each once."""
    curves = {curve.name: curve for facts in runs for curve in comparable_curves(facts)}
    for name, curve in sorted(curves.items()):
        points = tuple((float(samples), accuracy) for samples, accuracy in curve.points)
        yield Series(run=-1, label=f"published {name}", style="published", points=points)


def comparable_curves(facts: RunFacts) -> list[Curve]:
    """Published curves that the run may be laid beside."""
    batch = facts.run.global_batch_size
    if not facts.run.is_reference or batch is None:
        return []
    return curves_for(batch, facts.run.optimizer)


def _expected(runs: Sequence[RunFacts]) -> Iterable[tuple[float, str, int]]:
    """MLPerf's reference convergence points, where no curve is published."""
    for number, facts in enumerate(runs):
        batch = facts.run.global_batch_size
        if facts.run.is_reference and batch is not None and not comparable_curves(facts):
            point = expected_samples(batch)
            if point is not None:
                yield point.mean, CONVERGENCE_POINT, number


def _resume_marks(runs: Sequence[RunFacts]) -> Iterable[tuple[float, str, int]]:
    for number, facts in enumerate(runs):
        for samples in facts.resumes:
            yield float(samples), "resumed", number
