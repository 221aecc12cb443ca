"""Computes summary numbers of runs, and finds the settings in which runs differ."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeAlias

from bert_tools.report.chart import seconds, significant
from bert_tools.report.run import Run
from mlperf_bert.config.files import config_to_tables

Number: TypeAlias = int | float
SEED = "run.seed"
_NOT_COMPARED = ("utc", "seed")  # the start time always differs, and the seed is compared as SEED
_TIMES = "\N{MULTIPLICATION SIGN}"
_FORMS: dict[str, Callable[[Number], str]] = {
    "count": lambda value: f"{value:,}",
    "number": significant,
    "accuracy": lambda value: f"{value:.4f}",
    "percent": lambda value: f"{100 * value:.3g}%",
    "seconds": seconds,
}


@dataclass(frozen=True, slots=True)
class Measure:
    """A summary number that can be computed for any run.

    `value` computes the number, or returns None if the run's files do not contain it.
    """

    label: str
    form: str
    value: Callable[[Run], Number | None]
    unit: str = ""

    def in_words(self, value: Number) -> str:
        """Format a value of this measure with its unit, as a table shows it."""
        words = _FORMS[self.form](value)
        return f"{words} {self.unit}" if self.unit else words


@dataclass(frozen=True, slots=True)
class Row:
    """A setting's name and its value in each run.

    The value is None for a run that does not have the setting.
    """

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        """Return whether the runs have different values, or only some of them have a value."""
        return len(set(self.values)) > 1


def samples_to_target(run: Run) -> int | None:
    """Return the number of samples at the first evaluation that reached the target.

    Returns None if the target is not known or was not reached.
    """
    if run.target is None or run.state != "target reached":
        return None
    return next((samples for samples, each in run.evaluations if each >= run.target), None)


def _time_to_train_s(run: Run) -> float | None:
    """Return MLPerf's time to train in seconds, or None if the target was not reached."""
    return run.time_to_train_s if run.state == "target reached" else None


def _training_s(run: Run) -> float | None:
    """Return the training time of all attempts together in seconds, or None if it is not known."""
    return run.outcome.seconds if run.outcome else None


def _best_accuracy(run: Run) -> float | None:
    return max((accuracy for _, accuracy in run.evaluations), default=None)


def _last_of(key: str) -> Callable[[Run], Number | None]:
    return lambda run: run.records[-1][key] if run.records else None


def _median_of(key: str) -> Callable[[Run], Number | None]:
    return lambda run: median(run.known(key)) if run.known(key) else None


def _mean_of(key: str) -> Callable[[Run], Number | None]:
    """Return a function that averages a value over the steps of a run.

    The last interval before an evaluation or the end may have fewer steps than the others. The
    first record may be of a run that began at another run's checkpoint.
    """

    def mean(run: Run) -> Number | None:
        before, most = 0, run.config.run.log_interval_steps if run.config else math.inf
        values, steps = [], []
        for record in run.records:
            if record.get(key) is not None:
                values.append(record[key])
                steps.append(min(record["step"] - before, most))
            before = record["step"]
        return fmean(values, steps) if any(steps) else None

    return mean


def _skipped(run: Run) -> int | None:
    return sum(run.known("skipped_steps")) if run.records else None


def _eager_steps(run: Run) -> int | None:
    """Return the number of eager steps of a run whose steps should be captured.

    Returns None for a run that does not capture steps, and for one without this number on record.
    """
    is_captured = run.config is not None and run.config.run.step_mode == "captured"
    counts = run.known("eager_steps") if is_captured else []
    return sum(counts) if counts else None


def _memory_gib(run: Run) -> float | None:
    peak = max(run.known("memory_bytes"), default=None)
    return peak / 2**30 if peak is not None else None


MEASURES = (
    Measure("Time to train (run_start to run_stop)", "seconds", _time_to_train_s),
    Measure("Training, all attempts", "seconds", _training_s),
    Measure("Start-up (init_start to init_stop)", "seconds", lambda run: run.init_s),
    Measure("Target accuracy", "accuracy", lambda run: run.target),
    Measure("Best accuracy", "accuracy", _best_accuracy),
    Measure("Samples to target", "count", samples_to_target),
    Measure("Samples trained", "count", _last_of("samples")),
    Measure("Steps", "count", _last_of("step")),
    Measure("Throughput, median", "number", _median_of("samples_per_s"), "samples/s"),
    Measure("Token throughput, median", "number", _median_of("tokens_per_s"), "tokens/s"),
    Measure("Time of a step, median", "number", _median_of("step_ms"), "ms"),
    Measure("Wait for data per step, median", "number", _median_of("data_wait_ms"), "ms"),
    Measure("Most tokens, relative to mean rank", "number", _mean_of("imbalance_tokens"), _TIMES),
    Measure("Slowest rank, relative to median", "number", _median_of("straggler_ratio"), _TIMES),
    Measure("Last training loss", "number", _last_of("loss")),
    Measure("Clipped gradients or buckets", "percent", _mean_of("clipped_fraction")),
    Measure("Skipped steps", "count", _skipped),
    Measure("Eager steps (not captured)", "count", _eager_steps),
    Measure("Peak memory of rank 0", "number", _memory_gib, "GiB"),
)


def setting_rows(runs: Sequence[Run]) -> list[Row]:
    """Return all settings of the runs' configs as rows, named `section.field`."""
    return _rows([_settings(each) for each in runs])


def environment_rows(runs: Sequence[Run]) -> list[Row]:
    """Return all facts of the runs' `environment.json` as rows."""
    return _rows([each.environment for each in runs])


def differences(runs: Sequence[Run]) -> list[Row]:
    """Return the settings and the facts of the environment whose values differ between runs.

    The seeds are those that the runs used, even if their configs set none. Start times are not
    compared, because they always differ.
    """
    environment = [
        Row(f"environment: {row.name}", row.values)
        for row in environment_rows(runs)
        if row.name not in _NOT_COMPARED
    ]
    rows = [*_rows([_settings(each) | _seed(each) for each in runs]), *environment]
    return [row for row in rows if len({*row.values} - {None}) > 1]


def _seed(run: Run) -> dict[str, str]:
    """Return a dict with the seed that a run used, or an empty dict if the seed is not known."""
    return {SEED: run.environment["seed"]} if "seed" in run.environment else {}


def _settings(run: Run) -> dict[str, str]:
    """Return the settings of a run's config by name.

    The global batch size, which follows from the settings, is added.
    """
    if run.config is None:
        return {}
    found = {
        f"{section}.{field}": str(value)
        for section, table in config_to_tables(run.config).items()
        for field, value in table.items()
    }
    return found | {"parallel.global_batch_size": str(run.config.parallel.global_batch_size)}


def _rows(columns: Sequence[Mapping[str, str]]) -> list[Row]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, tuple(column.get(name) for column in columns)) for name in names]
