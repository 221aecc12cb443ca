"""Runs of several engines and seeds become a comparison: means, intervals, differences.

No torch. Intervals are Student's, 95 %, over seeds; differences to the first engine are taken seed
by seed, because runs of one seed have the same data, order and weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bert_tools.common.student_t import mean_and_half_width
from bert_tools.squad.record import RunRecord, check_same
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.optim.noise_scale import efficiency

MIB = 2**20
NOT_COMPARABLE = "more ranks than cores: its times are not comparable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A mean over seeds, half of its 95 % interval (None of one seed), and of how many seeds."""

    mean: float
    half_width: float | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What measures need beside the records.

    `initial_batch` is M0 of the statistical efficiency; `peak_tflops` what one device (of CPUs: the
    whole machine) reaches in matrix products of the runs' precision, None where nobody knows.
    """

    initial_batch: int
    peak_tflops: float | None = None
    peak_means: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """A column: `of` a run, None where it is not known; `timed` means nothing without own cores."""

    key: str
    title: str
    of: Callable[[RunRecord, Conditions], float | None]
    kind: str = "plain"  # or "timed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An engine at one global batch: its measures, and their differences to the first row, in %.

    `loss_difference` is the largest of any update of any seed, absolute, to the first row of the
    same batch; None where there is none to compare with.
    """

    label: str
    engine: str
    schedule: str
    ranks: int
    global_batch: int
    seeds: tuple[int, ...]
    is_comparable: bool
    values: dict[str, Value | None]
    differences: dict[str, Value | None]
    loss_difference: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows, in the order of their engines; `runs` are what they were made of."""

    rows: tuple[Row, ...]
    runs: tuple[RunRecord, ...]
    conditions: Conditions

    def as_json(self) -> dict[str, Any]:
        """Plain values; times that mean nothing are marked by `comparable`."""
        first = self.runs[0]
        return {
            "engines": [
                asdict(row) | {"comparable": row.is_comparable, "why": _why(row)}
                for row in self.rows
            ],
            "units": {measure.key: measure.title for measure in MEASURES},
            "interval": "half of a 95 % interval by Student's t over seeds",
            "differences": "percent of the first engine, seed by seed",
            "initial_batch": self.conditions.initial_batch,
            "peak_tflops": self.conditions.peak_tflops,
            "peak_means": self.conditions.peak_means,
            "device": first.device,
            "processor": first.processor,
            "cores": first.cores,
            "same_in_all_runs": first.same,
        }


def _efficiency(run: RunRecord, conditions: Conditions) -> float | None:
    if run.global_batch == conditions.initial_batch:
        return 1.0  # whatever the noise, known or not
    if run.noise_scale is None:
        return None
    return efficiency(run.noise_scale, conditions.initial_batch, run.global_batch)


def _goodput(run: RunRecord, conditions: Conditions) -> float | None:
    value = _efficiency(run, conditions)
    return None if value is None else run.samples_per_s * value


def _mfu(run: RunRecord, conditions: Conditions) -> float | None:
    if run.model_flops_per_s is None or conditions.peak_tflops is None:
        return None
    devices = 1 if run.device == "cpu" else run.ranks
    return 100 * run.model_flops_per_s / (conditions.peak_tflops * 1e12 * devices)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


STUDY_MEASURES = (  # the study's columns, in its order
    Measure("runtime_s", "runtime, s", lambda run, _: run.train_s, "timed"),
    Measure("samples_per_s", "samples/s", lambda run, _: run.samples_per_s, "timed"),
    Measure("validation_loss", "validation loss", lambda run, _: run.validation_loss),
    Measure(
        "utilisation", "utilisation, %", lambda run, _: _percent(run.utilisation), kind="timed"
    ),
    Measure("efficiency", "stat. efficiency", _efficiency),
    Measure("goodput", "goodput, samples/s", _goodput, "timed"),
    Measure("updates", "updates", lambda run, _: float(run.updates)),
)
MORE_MEASURES = (
    Measure("end_to_end_s", "end to end, s", lambda run, _: run.end_to_end_s, "timed"),
    Measure(
        "end_to_end_samples_per_s",
        "samples/s end to end",
        lambda run, _: run.end_to_end_samples_per_s,
        kind="timed",
    ),
    Measure("exact_match", "exact match", lambda run, _: run.exact_match),
    Measure("f1", "F1", lambda run, _: run.f1),
    Measure("noise_scale", "noise scale, samples", lambda run, _: run.noise_scale),
    Measure(
        "bubble_measured",
        "bubble measured, %",
        lambda run, _: _percent(run.bubble_measured),
        kind="timed",
    ),
    Measure("bubble_formula", "by formula, %", lambda run, _: _percent(run.bubble_formula)),
    Measure("memory_mib", "peak memory, MiB a rank", lambda run, _: run.peak_memory_bytes / MIB),
    Measure("mfu", "MFU, %", _mfu, "timed"),
    Measure("cpu_ms", "CPU ms a sample", lambda run, _: 1e3 * run.cpu_s / run.samples),
)
MEASURES = STUDY_MEASURES + MORE_MEASURES


def compare_runs(runs: Sequence[RunRecord], conditions: Conditions) -> Comparison:
    """The comparison of runs; engines in the order in which they first occur.

    Raises:
        ConfigError: there are none.
        DataError: they do not share data, model, weights, precision and samples, or an engine has
            a seed twice.
    """
    if not runs:
        raise ConfigError("--engines", "no run has ended", "let one end")
    check_same(list(runs))
    groups: dict[tuple[str, str, int], dict[int, RunRecord]] = {}
    for run in runs:
        group = groups.setdefault((run.engine, run.schedule, run.global_batch), {})
        if run.seed in group:
            problem = f"has two runs with seed {run.seed}"
            raise DataError(run.engine, problem, "compare runs of one comparison only")
        group[run.seed] = run
    several_batches = len({run.global_batch for run in runs}) > 1
    first = next(iter(groups.values()))
    rows = []
    for group in groups.values():
        batch = next(iter(group.values())).global_batch
        of_batch = next(each for each in groups.values() if _batch_of(each) == batch)
        rows.append(_row(group, first, of_batch, conditions, several_batches))
    return Comparison(rows=tuple(rows), runs=tuple(runs), conditions=conditions)


def _batch_of(group: dict[int, RunRecord]) -> int:
    return next(iter(group.values())).global_batch


def _row(
    group: dict[int, RunRecord],
    first: dict[int, RunRecord],
    first_of_batch: dict[int, RunRecord],
    conditions: Conditions,
    several_batches: bool,
) -> Row:
    run = next(iter(group.values()))
    label = run.engine + (f"@{run.schedule}" if run.schedule not in ("", "1f1b") else "")
    comparable = all(each.is_comparable for each in [*group.values(), *first.values()])
    return Row(
        label=f"{label}, batch {run.global_batch}" if several_batches else label,
        engine=run.engine,
        schedule=run.schedule,
        ranks=run.ranks,
        global_batch=run.global_batch,
        seeds=tuple(sorted(group)),
        is_comparable=run.is_comparable,
        values={each.key: _value(each, group, conditions) for each in MEASURES},
        differences={
            each.key: (
                _difference(each, group, first, conditions)
                if group is not first and (comparable or each.kind != "timed")
                else None
            )
            for each in MEASURES
        },
        loss_difference=None
        if group is first_of_batch
        else _loss_difference(group, first_of_batch),
    )


def _value(measure: Measure, group: dict[int, RunRecord], conditions: Conditions) -> Value | None:
    known = [value for run in group.values() if (value := measure.of(run, conditions)) is not None]
    return _mean(known)


def _difference(
    measure: Measure,
    group: dict[int, RunRecord],
    first: dict[int, RunRecord],
    conditions: Conditions,
) -> Value | None:
    """In percent; None where no seed is in both, or the first engine's value is zero."""
    percents = []
    for seed in sorted(group.keys() & first.keys()):
        own, other = (measure.of(each[seed], conditions) for each in (group, first))
        if own is not None and other:
            percents.append(100 * (own / other - 1))
    return _mean(percents)


def _loss_difference(group: dict[int, RunRecord], first: dict[int, RunRecord]) -> float | None:
    found = [
        abs(own - other)
        for seed in group.keys() & first.keys()
        for own, other in zip(group[seed].losses, first[seed].losses, strict=False)
        if own is not None and other is not None
    ]
    return max(found, default=None)


def _mean(values: list[float]) -> Value | None:
    if not values:
        return None
    mean, half_width = mean_and_half_width(values)
    return Value(mean=mean, half_width=half_width, count=len(values))


def _why(row: Row) -> str | None:
    return None if row.is_comparable else f"{NOT_COMPARABLE} ({row.ranks} ranks)"
