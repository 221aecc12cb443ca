"""Single numbers of runs, and the settings in which they differ, as tables, lines and JSON."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeAlias

from bert_tools.report.chart import seconds, significant
from bert_tools.report.facts import RunFacts
from mlperf_bert.common.errors import one_line
from mlperf_bert.config.files import config_to_tables

SCHEMA_VERSION = 1
Number: TypeAlias = int | float
_IN_A_LINE = ("time_to_train_s", "samples_to_target", "best_accuracy", "samples_per_s")
_OF_EACH_RUN = ("utc", "seed")  # facts of the environment that always differ
_TIMES = "\N{MULTIPLICATION SIGN}"
_FORMS: dict[str, Callable[[Number], str]] = {
    "count": lambda value: f"{value:,}",
    "number": significant,
    "accuracy": lambda value: f"{value:.4f}",
    "percent": lambda value: f"{100 * value:.3g}",
    "seconds": seconds,
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run: `value` of a run and the key is in `unit`, which `key` names too."""

    key: str
    label: str
    form: str
    value: Callable[[RunFacts, str], Number | None]
    unit: str = ""

    def in_words(self, value: Number) -> str:
        """The number as a table shows it, with its unit."""
        words = _FORMS[self.form](value)
        return f"{words} {self.unit}" if self.unit else words


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: its name, and its value in words for each run, None for a run without it."""

    name: str
    values: tuple[str | None, ...]

    @property
    def differs(self) -> bool:
        """True if runs have different values, or only some runs have one."""
        return len(set(self.values)) > 1


def time_split(facts: RunFacts) -> dict[str, float] | None:
    """Seconds of a whole run by activity; None for a resumed run, whose log has only a part.

    They run from start-up to the last known moment; `rest` belongs to no other part.
    """
    timing, steps = facts.run.timing, _step_seconds(facts, "step_ms")
    run_s = (timing.run_s or timing.seen_s) if timing else None
    if timing is None or run_s is None or steps is None or facts.resumes or facts.attempts:
        return None
    wait, evaluation = min(_step_seconds(facts, "wait_ms") or 0.0, steps), timing.evaluation_s or 0
    rest = max(0.0, run_s - steps - evaluation)
    split = {
        "init": timing.init_s or 0.0,
        "steps": steps - wait,
        "wait": wait,
        "evaluation": evaluation,
        "rest": rest,
    }
    return split if 0 < sum(split.values()) < math.inf else None


def numbers_of(facts: RunFacts) -> dict[str, Number | None]:
    """All measures of a run by their keys; None if its files do not say."""
    return {each.key: each.value(facts, each.key) for each in MEASURES}


def _told(path: str) -> Callable[[RunFacts, str], Any]:
    """A getter for a path of attributes; None if one of them is None."""

    def value(facts: RunFacts, _: str) -> Any:
        found: Any = facts
        for name in path.split("."):
            found = getattr(found, name, None)
        return found

    return value


def _time_to_train_s(facts: RunFacts, _: str) -> float | None:
    is_whole = facts.state == "target reached" and not facts.resumes
    return facts.run.timing.run_s if facts.run.timing and is_whole else None


def _best_accuracy(facts: RunFacts, _: str) -> float | None:
    return facts.run.best_accuracy if facts.run.evaluations else None


def _throughput(facts: RunFacts, _: str) -> float | None:
    return median(facts.run.throughputs) if facts.run.throughputs else None


def _with_steps(facts: RunFacts, key: str) -> Iterable[tuple[Number, int]]:
    """A key's numbers, each with its number of steps."""
    before = 0
    for record in facts.run.records:
        if record.get(key) is not None:
            yield record[key], record["step"] - before
        before = record["step"]


def _step_seconds(facts: RunFacts, key: str) -> float | None:
    found = [value * steps / 1e3 for value, steps in _with_steps(facts, key)]
    total = sum(found)
    return total if found and 0 <= total < math.inf else None


def _median(facts: RunFacts, key: str) -> float | None:
    found = facts.run.known(key)
    return median(found) if found else None


def _mean_by_steps(facts: RunFacts, key: str) -> float | None:
    found = list(_with_steps(facts, key))
    steps = sum(n for _, n in found)
    return math.fsum(each * (n / steps) for each, n in found) if steps else None


def _wait_share(facts: RunFacts, _: str) -> float | None:
    wait, steps = _step_seconds(facts, "wait_ms"), _step_seconds(facts, "step_ms")
    return wait / steps if wait is not None and steps else None


def _last_loss(facts: RunFacts, _: str) -> float | None:
    return facts.run.records[-1]["loss"] if facts.run.records else None


def _skipped(facts: RunFacts, key: str) -> int | None:
    return sum(facts.run.known(key)) if facts.run.records else None


def _memory_gib(facts: RunFacts, _: str) -> float | None:
    most = max(facts.run.known("memory_bytes"), default=None)
    return most / 2**30 if most is not None else None


MEASURES = (
    Measure(
        "time_to_train_s", "Time to train (run_start to run_stop)", "seconds", _time_to_train_s
    ),
    Measure("training_s", "Training, all parts", "seconds", _told("run.outcome.seconds")),
    Measure("init_s", "Start-up (init_start to init_stop)", "seconds", _told("run.timing.init_s")),
    Measure("evaluation_s", "Evaluations", "seconds", _told("run.timing.evaluation_s")),
    Measure("target_accuracy", "Target accuracy", "accuracy", _told("run.task.target_accuracy")),
    Measure("best_accuracy", "Best accuracy", "accuracy", _best_accuracy),
    Measure("samples_to_target", "Samples to target", "count", _told("samples_to_target")),
    Measure("samples", "Samples trained", "count", _told("samples")),
    Measure("steps", "Steps", "count", _told("steps")),
    Measure("samples_per_s", "Throughput, median", "number", _throughput, "samples/s"),
    Measure("tokens_per_s", "Token throughput, median", "number", _median, "tokens/s"),
    Measure("step_ms", "Time of a step, median", "number", _median, "ms"),
    Measure("wait_share", "Wait for data, share of all step time", "percent", _wait_share, "%"),
    Measure("imbalance_tokens", "Imbalance by tokens, mean", "number", _mean_by_steps, _TIMES),
    Measure(
        "slowest_over_median", "Slowest rank over median rank, median", "number", _median, _TIMES
    ),
    Measure("loss", "Last training loss", "number", _last_loss),
    Measure("clipped_fraction", "Clipped gradients, mean", "percent", _mean_by_steps, "%"),
    Measure("skipped_steps", "Skipped steps", "count", _skipped),
    Measure("memory_gib", "Peak memory of rank 0", "number", _memory_gib, "GiB"),
)


def setting_rows(runs: Sequence[RunFacts]) -> list[Row]:
    """All settings of the configs, as `section.field`; for a log the settings in it."""
    return _rows([_settings(each) for each in runs])


def environment_rows(runs: Sequence[RunFacts]) -> list[Row]:
    """All facts of `environment.json`."""
    return _rows([each.environment for each in runs])


def differences(runs: Sequence[RunFacts]) -> list[Row]:
    """Settings, and facts of the environment, that differ between the runs that have them."""
    told = [each.run.config is not None for each in runs]
    rows = [row for row in setting_rows(runs) if _is_told(row, told)]
    told = [bool(each.environment) for each in runs]
    rows += [
        Row(f"environment: {row.name}", row.values)
        for row in environment_rows(runs)
        if row.name not in _OF_EACH_RUN and _is_told(row, told)
    ]
    return rows


def _is_told(row: Row, is_there: Sequence[bool]) -> bool:
    """True if it differs among the runs whose files are there."""
    pairs = zip(row.values, is_there, strict=True)
    return len({value for value, there in pairs if there or value is not None}) > 1


def _settings(facts: RunFacts) -> dict[str, str]:
    task = facts.run.task
    if facts.run.config is None:
        known = {
            "parallel.global_batch_size": task.global_batch_size,
            "optim.name": task.optimizer,
            "eval.target_accuracy": task.target_accuracy,
        }
        return {name: str(value) for name, value in known.items() if value is not None}
    tables = config_to_tables(facts.run.config)
    found = {
        f"{section}.{field}": str(value)
        for section, table in tables.items()
        for field, value in table.items()
    }
    return found | {"parallel.global_batch_size": str(task.global_batch_size)}


def _rows(columns: Sequence[Mapping[str, str]]) -> list[Row]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, tuple(column.get(name) for column in columns)) for name in names]


def as_json(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """The object that `--json` prints; keys are only added."""
    found = differences(runs) if len(runs) > 1 else []
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": [_run_as_json(each) for each in runs],
        "differences": [{"name": row.name, "values": list(row.values)} for row in found],
    }


def _run_as_json(facts: RunFacts) -> dict[str, Any]:
    outcome = facts.run.outcome
    diagnosis = facts.diagnosis.as_json()
    return {
        "label": facts.label,
        "run": facts.run.name,
        "state": facts.state,
        "stopped_by": outcome.stopped_by if outcome else None,
        "attempts": facts.attempts + 1,
        "resumed_at_samples": list(facts.resumes),
        **numbers_of(facts),
        "time_s": time_split(facts),
        "evaluations": [asdict(each) for each in facts.run.evaluations],
        "environment": dict(facts.environment),
        **{key: diagnosis[key] for key in ("verdict", "why", "causes", "slowness")},
        "absent": list(facts.absent),
    }


def lines_of(runs: Sequence[RunFacts]) -> list[str]:
    """Two lines for each run: its outcome, and its main numbers."""
    lines = []
    for facts in runs:
        numbers = numbers_of(facts)
        words = [
            f"{each.label.partition(' (')[0].lower()} {each.in_words(value)}"
            for each in MEASURES
            if each.key in _IN_A_LINE and (value := numbers[each.key]) is not None
        ]
        lines.append(f"{facts.run.name}: {facts.state}, {facts.diagnosis.verdict.kind}")
        lines += [f"  {', '.join(words)}"] if words else []
    return [one_line(line) for line in lines]
