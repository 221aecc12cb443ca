"""Records of fine-tuning runs, and their comparison: means and differences.

No torch. `squad_result.json` may be written by anybody. Intervals are Student's, 95 %, over seeds;
differences to the first engine are taken seed by seed, because runs of one seed have the same data,
order and weights.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bert_tools.common.log_reader import is_number
from bert_tools.common.means import mean_and_half_width
from bert_tools.squad.bubble import Kind, Span
from bert_tools.squad.noise_scale import efficiency
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import Record, read_record

RESULT = "squad_result.json"
NOISE = "plain_noise_scale"  # earlier records also have that of the gradient as Adam scales it
SCHEMA_VERSION = 1
MIB = 2**20
_WHY = "more ranks than cores: its times are not comparable"
_REMEDY = "give the directory of a run that has ended, as `squad train` wrote it"
_MOST_RANKS = 4096
_MOST_SPANS = 100_000
# Settings that may differ: the batch, those that follow from it, and what is measured on the way.
_MAY_DIFFER = (
    *("global_batch", "updates", "learning_rate", "noise_every", "evaluate_every"),
    "capacity_tokens",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run. `values` are those of MEASURES in its record; None is unknown.

    `core_wait` is the time that its ranks' threads waited for a core in training, as a share of the
    ranks' time. `same` holds what runs must share to be compared.
    """

    engine: str
    schedule: str
    ranks: int
    seed: int
    device: Literal["cpu", "cuda"]
    processor: str
    cores: int
    precision: str
    same: dict[str, str | int | float | None]
    global_batch: int
    samples: int
    losses: tuple[float | None, ...]
    values: dict[str, float | None]
    utilisation_means: str
    core_wait: float | None
    model_flops_per_s: float | None
    timeline: tuple[Span, ...]

    @property
    def is_comparable(self) -> bool:
        """True if its times mean anything: on a CPU no more ranks than cores."""
        return self.device != "cpu" or self.ranks <= self.cores


def read_run(directory: Path) -> RunRecord:
    """The record in a run's directory. Raises DataError if it is missing or invalid."""
    path = directory / RESULT
    record = read_record(path, missing="is missing: the run has not ended", remedy=_REMEDY)
    record.integer("schema_version", SCHEMA_VERSION, SCHEMA_VERSION)
    settings, ranks = record.record("settings"), record.integer("ranks", 1, _MOST_RANKS)
    # Runs before this key, and systems that do not count it, have none.
    waits = _numbers(record, "core_wait_seconds") if record.has("core_wait_seconds") else (None,)
    return RunRecord(
        engine=record.text("engine"),
        schedule=record.text("schedule") if record.has("schedule") else "",
        ranks=ranks,
        seed=record.integer("seed"),
        device="cuda" if record.text("device") == "cuda" else "cpu",
        processor=record.text("processor"),
        cores=record.integer("cores", 1),
        precision=record.text("precision"),
        same=_same(record, settings),
        global_batch=settings.integer("global_batch", 1),
        samples=record.integer("samples", 1),
        losses=_numbers(record, "losses", "one an update"),
        values={each.key: each.read(record) for each in MEASURES if each.read is not None},
        utilisation_means=record.text("device_utilisation_means"),
        core_wait=None
        if None in waits
        else sum(_known(waits)) / (_above_zero(record.record("seconds"), "train") * ranks),
        model_flops_per_s=_optional(record, "model_flops_per_s"),
        timeline=_timeline(record),
    )


def _same(record: Record, settings: Record) -> dict[str, str | int | float | None]:
    """Facts that must not differ: all settings but the batch and those that follow from it."""
    model, data = record.record("model"), record.record("data")
    found: dict[str, str | int | float | None] = {
        "device": record.text("device"),
        "processor": record.text("processor"),
        "precision": record.text("precision"),
        "samples": record.integer("samples"),
        "init": record.text("init"),
    }
    for name, part in (("model", model), ("data", data), ("settings", settings)):
        for key, value in part.values.items():
            if name == "settings" and key in _MAY_DIFFER:
                continue
            if value is not None and not isinstance(value, str | int | float):
                raise part.error(key, "is no plain value")
            found[f"{name}.{key}"] = value
    return found


def _above_zero(record: Record, key: str) -> float:
    value = record.number(key)
    if value <= 0:
        raise record.error(key, f"is {value}, not above zero")
    return value


def _optional(record: Record, key: str) -> float | None:
    if not record.has(key):
        return None
    value = record.number(key)
    if value < 0:
        raise record.error(key, f"is {value}, below zero")
    return value


def _numbers(record: Record, key: str, each: str = "one a rank") -> tuple[float | None, ...]:
    """A list of numbers, some of which may be null."""
    values: Any = record.values.get(key)
    is_list = isinstance(values, list) and all(one is None or is_number(one) for one in values)
    if not is_list or (each == "one a rank" and len(values) > _MOST_RANKS):
        raise record.error(key, f"is no list of numbers, {each}")
    return tuple(values)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _timeline(record: Record) -> tuple[Span, ...]:
    spans = record.records("timeline")
    if len(spans) > _MOST_SPANS:
        raise record.error("timeline", f"has {len(spans):,} parts, more than {_MOST_SPANS:,}")
    return tuple(_span(each) for each in spans)


def _span(record: Record) -> Span:
    begin, end = record.number("begin_s"), record.number("end_s")
    if end < begin:
        raise record.error("end_s", "is before begin_s")
    if not record.has("kind"):
        raise record.error("kind", "is missing")
    return Span(
        rank=record.integer("rank", 0, _MOST_RANKS),
        stage=record.integer("stage", 0, _MOST_RANKS),
        kind=record.choice("kind", get_args(Kind)),
        microbatch=record.integer("microbatch", 0, _MOST_SPANS),
        begin_s=begin,
        end_s=end,
    )


@dataclass(frozen=True, slots=True)
class Value:
    """A mean over seeds, half of its 95 % interval (None for one seed), and their number."""

    mean: float
    half_width: float | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Facts that measures need beside the records.

    `initial_batch` is M0 of the statistical efficiency; `peak_tflops` the peak of one device (for
    CPUs: the whole machine) in matrix products of the runs' precision, None if unknown.
    """

    initial_batch: int
    peak_tflops: float | None = None
    peak_means: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An engine at one global batch: its measures, and their differences to the first row, in %.

    `loss_difference` is the largest absolute one in any update of any seed, to the first row of the
    same batch; None if there is nothing to compare with.
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
    """All rows, in the order of their engines; `runs` are the records behind them."""

    rows: tuple[Row, ...]
    runs: tuple[RunRecord, ...]
    conditions: Conditions

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON; `comparable` is false for rows whose times mean nothing."""
        first = self.runs[0]
        return {
            "engines": [
                asdict(row)
                | {
                    "comparable": row.is_comparable,
                    "why": None if row.is_comparable else f"{_WHY} ({row.ranks} ranks)",
                }
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


@dataclass(frozen=True, slots=True)
class Measure:
    """A column: `read` from a record, or computed; `timed` ones need a core for each rank."""

    key: str
    title: str
    read: Callable[[Record], float | None] | None = None
    timed: bool = False


def _utilisation(record: Record) -> float | None:
    known = _known(_numbers(record, "device_utilisation"))
    return 100 * (sum(known) / len(known)) if known else None


def _bubble(record: Record, key: str) -> float | None:
    share = _optional(record.record("bubble"), key) if record.has("bubble") else None
    return None if share is None else 100 * share


def _cpu_ms(record: Record) -> float:
    cpu_s = sum(_known(_numbers(record, "cpu_seconds")))
    return 1e3 * cpu_s / record.integer("samples", 1)


def _above_zero_in(part: str, key: str) -> Callable[[Record], float]:
    return lambda record: _above_zero(record.record(part), key)


def _runtime_s(record: Record) -> float:
    """Seconds of all updates at the pace of the plain ones, as in `samples_per_s`."""
    return record.integer("samples", 1) / _above_zero(record.record("samples_per_s"), "train")


def _number(key: str) -> Callable[[Record], float]:
    return lambda record: record.number(key)


STUDY_MEASURES = (  # the study's columns, in its order
    Measure("runtime_s", "runtime, s", _runtime_s, timed=True),
    Measure("samples_per_s", "samples/s", _above_zero_in("samples_per_s", "train"), timed=True),
    Measure("validation_loss", "validation loss", _number("validation_loss")),
    Measure("utilisation", "utilisation, %", _utilisation, timed=True),
    Measure("efficiency", "stat. efficiency"),
    Measure("goodput", "goodput, samples/s", timed=True),
    Measure("updates", "updates", lambda record: float(record.integer("updates", 1))),
)
MORE_MEASURES = (
    Measure("end_to_end_s", "end to end, s", _above_zero_in("seconds", "end_to_end"), timed=True),
    Measure(
        "end_to_end_samples_per_s",
        "samples/s end to end",
        _above_zero_in("samples_per_s", "end_to_end"),
        timed=True,
    ),
    Measure("exact_match", "exact match", _number("exact_match")),
    Measure("f1", "F1", _number("f1")),
    Measure("noise_scale", "noise scale, samples", lambda run: _optional(run, NOISE)),
    Measure("bubble_measured", "bubble measured, %", lambda run: _bubble(run, "measured"), True),
    Measure("bubble_formula", "by formula, %", lambda run: _bubble(run, "formula")),
    Measure(
        "memory_mib",
        "peak memory, MiB a rank",
        lambda run: max(_known(_numbers(run, "peak_memory_bytes")), default=0) / MIB,
    ),
    Measure("mfu", "MFU, %", timed=True),
    Measure("cpu_ms", "CPU ms a sample", _cpu_ms),
)
MEASURES = STUDY_MEASURES + MORE_MEASURES


def _measured(run: RunRecord, conditions: Conditions) -> dict[str, float | None]:
    """The values of MEASURES: those read, and those computed with the conditions."""
    noise, rate, worth = run.values["noise_scale"], run.values["samples_per_s"], None
    if run.global_batch == conditions.initial_batch:
        worth = 1.0  # whatever the noise, known or not
    elif noise is not None:
        worth = efficiency(noise, conditions.initial_batch, run.global_batch)
    mfu = None
    if run.model_flops_per_s is not None and conditions.peak_tflops is not None:
        devices = 1 if run.device == "cpu" else run.ranks
        mfu = 100 * run.model_flops_per_s / (conditions.peak_tflops * 1e12 * devices)
    goodput = None if worth is None or rate is None else rate * worth
    found = run.values | {"efficiency": worth, "goodput": goodput, "mfu": mfu}
    return {each.key: found[each.key] for each in MEASURES}


_Group = dict[int, RunRecord]  # runs of one engine at one batch, by seed


def compare_runs(runs: Sequence[RunRecord], conditions: Conditions) -> Comparison:
    """The comparison of runs; engines in the order in which they first occur.

    Raises ConfigError if there are none; DataError if they do not share data, model, weights,
    precision and samples, or an engine has a seed twice.
    """
    if not runs:
        raise ConfigError("--engines", "no run has ended", "let one end")
    _check_same(runs)
    groups: dict[tuple[str, str, int], _Group] = {}
    for run in runs:
        group = groups.setdefault((run.engine, run.schedule, run.global_batch), {})
        if run.seed in group:
            problem = f"has two runs with seed {run.seed}"
            raise DataError(run.engine, problem, "compare runs of one comparison only")
        group[run.seed] = run
    first = next(iter(groups.values()))
    first_of_batch: dict[int, _Group] = {}
    for (_, _, batch), group in groups.items():
        first_of_batch.setdefault(batch, group)
    rows = [
        _row(group, first, first_of_batch[batch], conditions, len(first_of_batch) > 1)
        for (_, _, batch), group in groups.items()
    ]
    return Comparison(rows=tuple(rows), runs=tuple(runs), conditions=conditions)


def _check_same(runs: Sequence[RunRecord]) -> None:
    """Raise DataError if runs to compare differ in what they must share."""
    for run in runs[1:]:
        for key in sorted(run.same.keys() | runs[0].same.keys()):
            first, other = runs[0].same.get(key), run.same.get(key)
            if first != other:
                problem = f"{key} is {other!r} with seed {run.seed}, {first!r} of {runs[0].engine}"
                raise DataError(run.engine, problem, "compare runs of one comparison only")


def _row(
    group: _Group,
    first: _Group,
    first_of_batch: _Group,
    conditions: Conditions,
    several_batches: bool,
) -> Row:
    run = next(iter(group.values()))
    label = run.engine + (f"@{run.schedule}" if run.schedule not in ("", "1f1b") else "")
    comparable = all(each.is_comparable for each in [*group.values(), *first.values()])
    own = {seed: _measured(each, conditions) for seed, each in group.items()}
    theirs = {seed: _measured(each, conditions) for seed, each in first.items()}
    return Row(
        label=f"{label}, batch {run.global_batch}" if several_batches else label,
        engine=run.engine,
        schedule=run.schedule,
        ranks=run.ranks,
        global_batch=run.global_batch,
        seeds=tuple(sorted(group)),
        is_comparable=run.is_comparable,
        values={each.key: _mean(own[seed][each.key] for seed in group) for each in MEASURES},
        differences={
            each.key: (
                _mean(
                    _percent(own[seed][each.key], theirs[seed][each.key])
                    for seed in sorted(group.keys() & first.keys())
                )
                if group is not first and (comparable or not each.timed)
                else None
            )
            for each in MEASURES
        },
        loss_difference=_loss_difference(group, first_of_batch),
    )


def _percent(own: float | None, first: float | None) -> float | None:
    """Difference in percent; None if a value is unknown or the first engine's is zero."""
    return 100 * (own / first - 1) if own is not None and first else None


def _loss_difference(group: _Group, first: _Group) -> float | None:
    if group is first:
        return None
    found = [
        abs(own - other)
        for seed in group.keys() & first.keys()
        for own, other in zip(group[seed].losses, first[seed].losses, strict=False)
        if own is not None and other is not None
    ]
    return max(found, default=None)


def _mean(values: Iterable[float | None]) -> Value | None:
    known = _known(values)
    return Value(*mean_and_half_width(known), len(known)) if known else None
