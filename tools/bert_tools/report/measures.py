"""What a run comes to in single numbers, each with its unit: the rows of a report's tables."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, TypeAlias

from bert_tools.report.facts import RunFacts
from bert_tools.report.numbers import seconds, significant

Number: TypeAlias = int | float
Form: TypeAlias = Literal["count", "number", "accuracy", "percent", "seconds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One number of a run: `value` is in `unit`, which `key` names too where there is one."""

    key: str
    label: str
    unit: str
    form: Form
    value: Callable[[RunFacts], Number | None]

    def in_words(self, value: Number) -> str:
        """The number as a table shows it, with its unit."""
        words = {
            "count": lambda: f"{value:,}",
            "number": lambda: significant(value),
            "accuracy": lambda: f"{value:.4f}",
            "percent": lambda: f"{100 * value:.3g}",
            "seconds": lambda: seconds(value),
        }[self.form]()
        return f"{words} {self.unit}" if self.unit else words


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of a run by what they went into; `rest` is what no part claims."""

    init: float
    steps: float
    wait: float
    evaluation: float
    rest: float

    @property
    def total(self) -> float:
        """From the beginning of start-up to the last that the files tell of."""
        return self.init + self.steps + self.wait + self.evaluation + self.rest


def time_split(facts: RunFacts) -> TimeSplit | None:
    """Where the time of a whole run went; None of a resumed one, whose log has a part only."""
    timing, run_s = facts.timing, _clock_s(facts)
    if timing is None or run_s is None or facts.resumes or facts.attempts:
        return None
    steps, wait = _step_seconds(facts, "step_ms"), _step_seconds(facts, "wait_ms") or 0.0
    if steps is None:
        return None
    wait, evaluation = min(wait, steps), timing.evaluation_s or 0.0
    rest = max(0.0, run_s - steps - evaluation)
    split = TimeSplit(timing.init_s or 0.0, steps - wait, wait, evaluation, rest)
    return split if 0 < split.total < math.inf else None


def numbers_of(facts: RunFacts) -> dict[str, Number | None]:
    """All measures of a run by their keys; None where its files do not tell."""
    return {each.key: each.value(facts) for each in MEASURES}


def _clock_s(facts: RunFacts) -> float | None:
    return (facts.timing.run_s or facts.timing.seen_s) if facts.timing else None


def _time_to_train_s(facts: RunFacts) -> float | None:
    is_whole = facts.state == "target reached" and not facts.resumes
    return facts.timing.run_s if facts.timing and is_whole else None


def _training_s(facts: RunFacts) -> float | None:
    return facts.outcome.seconds if facts.outcome else None


def _steps_of(facts: RunFacts) -> Iterable[tuple[dict[str, Any], int]]:
    """The records, and how many steps each is of."""
    before = 0
    for record in facts.run.records:
        yield dict(record), record["step"] - before
        before = record["step"]


def _step_seconds(facts: RunFacts, key: str) -> float | None:
    found = [record[key] * n / 1e3 for record, n in _steps_of(facts) if record.get(key) is not None]
    total = sum(found)
    return total if found and 0 <= total < math.inf else None


def _median(key: str, scale: float = 1.0) -> Callable[[RunFacts], float | None]:
    def value(facts: RunFacts) -> float | None:
        found = [record[key] for record in facts.run.records if record.get(key) is not None]
        return scale * median(found) if found else None

    return value


def _samples_per_s(facts: RunFacts) -> float | None:
    return median(facts.run.throughputs) if facts.run.throughputs else None


def _mean_by_steps(key: str) -> Callable[[RunFacts], float | None]:
    def value(facts: RunFacts) -> float | None:
        found = [(record[key], n) for record, n in _steps_of(facts) if record.get(key) is not None]
        steps = sum(n for _, n in found)
        return math.fsum(each * (n / steps) for each, n in found) if steps else None

    return value


def _wait_share(facts: RunFacts) -> float | None:
    wait, steps = _step_seconds(facts, "wait_ms"), _step_seconds(facts, "step_ms")
    return wait / steps if wait is not None and steps else None


def _skipped(facts: RunFacts) -> int | None:
    records = facts.run.records
    return sum(record["skipped_steps"] for record in records) if records else None


def _last_loss(facts: RunFacts) -> float | None:
    return facts.run.records[-1]["loss"] if facts.run.records else None


def _memory_gib(facts: RunFacts) -> float | None:
    found = [record.get("memory_bytes") for record in facts.run.records]
    known = [each for each in found if each is not None]
    return max(known) / 2**30 if known else None


def _best(facts: RunFacts) -> float | None:
    return facts.run.best_accuracy if facts.run.evaluations else None


MEASURES = (
    Measure(
        key="time_to_train_s",
        label="Time to train (run_start to run_stop)",
        unit="",
        form="seconds",
        value=_time_to_train_s,
    ),
    Measure(
        key="training_s", label="Training, all parts", unit="", form="seconds", value=_training_s
    ),
    Measure(
        key="init_s",
        label="Start-up (init_start to init_stop)",
        unit="",
        form="seconds",
        value=lambda facts: facts.timing.init_s if facts.timing else None,
    ),
    Measure(
        key="evaluation_s",
        label="Evaluations",
        unit="",
        form="seconds",
        value=lambda facts: facts.timing.evaluation_s if facts.timing else None,
    ),
    Measure(
        key="target_accuracy",
        label="Target accuracy",
        unit="",
        form="accuracy",
        value=lambda facts: facts.run.target_accuracy,
    ),
    Measure(key="best_accuracy", label="Best accuracy", unit="", form="accuracy", value=_best),
    Measure(
        key="samples_to_target",
        label="Samples to target",
        unit="",
        form="count",
        value=lambda facts: facts.samples_to_target,
    ),
    Measure(
        key="samples",
        label="Samples trained",
        unit="",
        form="count",
        value=lambda facts: facts.samples,
    ),
    Measure(key="steps", label="Steps", unit="", form="count", value=lambda facts: facts.steps),
    Measure(
        key="samples_per_s",
        label="Throughput, median",
        unit="samples/s",
        form="number",
        value=_samples_per_s,
    ),
    Measure(
        key="tokens_per_s",
        label="Token throughput, median",
        unit="tokens/s",
        form="number",
        value=_median("tokens_per_s"),
    ),
    Measure(
        key="step_ms",
        label="Time of a step, median",
        unit="ms",
        form="number",
        value=_median("step_ms"),
    ),
    Measure(
        key="wait_share",
        label="Wait for data, share of all step time",
        unit="%",
        form="percent",
        value=_wait_share,
    ),
    Measure(
        key="imbalance_tokens",
        label="Imbalance by tokens, mean",
        unit="\N{MULTIPLICATION SIGN}",
        form="number",
        value=_mean_by_steps("imbalance_tokens"),
    ),
    Measure(
        key="slowest_over_median",
        label="Slowest rank over median rank, median",
        unit="\N{MULTIPLICATION SIGN}",
        form="number",
        value=_median("slowest_over_median"),
    ),
    Measure(key="loss", label="Last training loss", unit="", form="number", value=_last_loss),
    Measure(
        key="clipped_fraction",
        label="Clipped gradients, mean",
        unit="%",
        form="percent",
        value=_mean_by_steps("clipped_fraction"),
    ),
    Measure(key="skipped_steps", label="Skipped steps", unit="", form="count", value=_skipped),
    Measure(
        key="memory_gib",
        label="Peak memory of rank 0",
        unit="GiB",
        form="number",
        value=_memory_gib,
    ),
)
