"""One run, read from its run directory or from anybody's MLPerf log."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bert_tools.common.log_reader import Record, RunLog, is_number, read_foreign_log
from bert_tools.report.run_files import RunFiles, read_guess, read_metrics
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import (
    CLOSED_TARGET_ACCURACY,
    RunConfig,
    has_bert_large_sizes,
)
from mlperf_bert.run.outcome import RunOutcome, Status, as_status, read_outcome

MLPERF_LENGTH = 512
_MS_PER_S = 1e3
Contents = TypeVar("Contents")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An accuracy after a number of samples."""

    samples: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Task:
    """A run's target, batch and optimizer; None if its files do not say.

    `has_target` is false if they say that there is none. `is_reference` if it may be BERT-large on
    MLPerf's target, whose results are published.
    """

    global_batch_size: int | None = None
    optimizer: str | None = None
    target_accuracy: float | None = None
    is_reference: bool = False
    has_target: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds from the log; None if it lacks an end of a phase.

    `run_s` is MLPerf's time to train, from `run_start` to `run_stop`; `evaluation_s` is the sum of
    all evaluations; `init_s` the time before. `train_samples` is the last one in the log, as in
    MLPerf's checkers. `seen_s` is from `run_start` to the last record of a run that has not
    stopped. `rates` are samples and samples per second at that point; `resumed_at` is the number of
    samples after which a resumed run continued, if the log says so.
    """

    init_s: float | None
    run_s: float | None
    seen_s: float | None
    evaluation_s: float | None
    train_samples: int | None
    rates: tuple[tuple[int, float], ...]
    resumed_at: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run as described by its files; None or empty for missing facts.

    `records` are those of `metrics.jsonl`, `throughputs` samples per second in order of time;
    `ended` is None for a run that is still running or was killed; `timing` is the log's.
    `guess` is the accuracy of a guess without context on the held-out set.
    """

    name: str
    config: RunConfig | None = None
    task: Task = Task()
    records: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    throughputs: tuple[float, ...] = ()
    initial_weights: str | None = None
    ended: Status | None = None
    outcome: RunOutcome | None = None
    timing: Timing | None = None
    guess: float | None = None

    @property
    def best_accuracy(self) -> float:
        """The best accuracy; 0 without evaluations."""
        return max((each.accuracy for each in self.evaluations), default=0.0)

    def known(self, key: str) -> list[Any]:
        """The numbers of a key in the records."""
        return [each[key] for each in self.records if each.get(key) is not None]


def read_run(files: RunFiles, *, needs_config: bool = False) -> Run:
    """Read a run. Raises DataError or ConfigError for a file that is wrong, not for one missing.

    With needs_config, a run directory without a config.toml is an error, too.
    """
    log = read_foreign_log(files.log, str(files.log)) if files.log else None
    by_log = replace(_run_of_log(log), name=files.name) if log else Run(name=files.name)
    if needs_config and files.folder and not files.has("config.toml"):
        load_config(files.folder / "config.toml")  # raises for a missing file
    config = read_if_there(files, "config.toml", load_config)
    skipping = partial(read_metrics, skips=True)
    records = tuple(read_if_there(files, "metrics.jsonl", skipping) or ())
    outcome = read_if_there(files, "outcome.json", read_outcome)
    run = replace(
        by_log,
        config=config,
        records=records,
        evaluations=_evaluations_in(records) or by_log.evaluations,
        outcome=outcome,
        guess=read_if_there(files, "stdout.log", read_guess),
        ended=outcome.status if outcome else by_log.ended,
    )
    if config is None:
        return run
    rates = tuple(map(float, filter(None, run.known("samples_per_s"))))
    return replace(run, task=task_of(config), throughputs=rates if records else run.throughputs)


def read_if_there(
    files: RunFiles, name: str, reader: Callable[[Path], Contents]
) -> Contents | None:
    """The reader's result for a file, None if it is missing; the reader refuses other things."""
    return reader(files.folder / name) if files.folder and files.has(name) else None


def task_of(config: RunConfig) -> Task:
    """The task of a config."""
    length, target = config.data.max_seq_length, config.eval.target
    return Task(
        config.parallel.global_batch_size,
        config.optim.name,
        target,
        has_bert_large_sizes(config.model) and _is_reference_task(length, target),
        has_target=target is not None,
    )


def _is_reference_task(max_seq_length: int, target_accuracy: float | None) -> bool:
    return (max_seq_length, target_accuracy) == (MLPERF_LENGTH, CLOSED_TARGET_ACCURACY)


def _evaluations_in(records: Iterable[Mapping[str, Any]]) -> tuple[Evaluation, ...]:
    return tuple(
        Evaluation(record["samples"], float(record["mlm_accuracy"]))
        for record in records
        if record["mlm_accuracy"] is not None
    )


def _run_of_log(log: RunLog) -> Run:
    """The run described by a log alone. Raises DataError if its evaluations are wrong."""
    batch = log.last_number("global_batch_size")
    length = int(log.last_number("max_sequence_length") or MLPERF_LENGTH)
    # Only our logs say it, and not the older ones.
    has_target = log.last_text("quality_target") != "none"
    assumed = CLOSED_TARGET_ACCURACY if has_target and length == MLPERF_LENGTH else None
    target = log.last_number("quality_target") or assumed
    is_reference = _is_reference_task(length, target)
    optimizer = log.last_text("opt_name")
    return Run(
        name=log.name,
        task=Task(int(batch) if batch else None, optimizer, target, is_reference, has_target),
        evaluations=_evaluations(log),
        throughputs=tuple(rate for _, rate in _told_rates(log)),
        initial_weights=log.last_text("initial_weights"),
        ended=_ended(log),
        timing=_timing_of(log),
    )


def _ended(log: RunLog) -> Status | None:
    stops = log.named("run_stop")
    if not stops:
        return None
    status = as_status(stops[-1].metadata.get("status"))
    if status is None:
        problem = f"says status {in_brief(stops[-1].metadata.get('status'))}"
        raise DataError(log.name, problem, "it is success or aborted")
    return status


def _evaluations(log: RunLog) -> tuple[Evaluation, ...]:
    """Evaluations in the order of the log, with samples from the field that its writer used."""
    found: list[Evaluation] = []
    for record in log.named("eval_accuracy"):
        samples = _count(told := _told_samples(record))
        if samples is None or not is_number(record.value) or not 0 <= record.value <= 1:
            problem = f"has an eval_accuracy of {in_brief(record.value)} at {in_brief(told)}"
            raise DataError(log.name, problem, "its epoch_num must say the samples trained by then")
        if found and samples <= found[-1].samples:
            problem = f"has an evaluation at {samples:,} samples after one at as many or more"
            raise DataError(log.name, problem, "give the log of one run, with samples as epoch_num")
        found.append(Evaluation(samples, float(record.value)))
    return tuple(found)


def _told_samples(record: Record) -> object:
    return record.metadata.get("samples_count") or record.metadata.get("epoch_num")


def _told_rates(log: RunLog) -> Iterator[tuple[int | None, float]]:
    for record in log.named("tracked_stats"):
        rate = record.value.get("throughput") if isinstance(record.value, dict) else None
        if isinstance(rate, int | float) and is_number(rate) and 0 < rate < 1e300:
            yield _count(_told_samples(record)), float(rate)


def _timing_of(log: RunLog) -> Timing:
    """Timing from a log; times that go backwards count as missing."""
    start, stop = _first(log, "run_start"), _first(log, "run_stop")
    samples = log.named("train_samples")
    rates: list[tuple[int, float]] = []
    for at, rate in _told_rates(log):
        if at is not None and (not rates or at > rates[-1][0]):
            rates.append((at, rate))
    return Timing(
        init_s=_between(_first(log, "init_start"), _first(log, "init_stop")),
        run_s=_between(start, stop),
        seen_s=_between(start, log.records[-1]) if log.records else None,
        evaluation_s=_evaluations_s(log),
        train_samples=_count(samples[-1].value) if samples else None,
        rates=tuple(rates),
        resumed_at=resumed_at(log),
    )


def resumed_at(log: RunLog) -> int | None:
    """Samples of the checkpoint that a log's run continued from; None for a fresh start."""
    record = _first(log, "resumed")
    if record is None or record.value is not True:
        return None
    return _count(record.metadata.get("samples"))


def _first(log: RunLog, key: str) -> Record | None:
    return next(iter(log.named(key)), None)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _between(start: Record | None, stop: Record | None) -> float | None:
    if start is None or stop is None or stop.time_ms < start.time_ms:
        return None
    return (stop.time_ms - start.time_ms) / _MS_PER_S


def _evaluations_s(log: RunLog) -> float | None:
    """Seconds of complete evaluations, which must follow one another."""
    total, began, count = 0.0, None, 0
    for record in log.records:
        if record.key == "eval_start":
            began = record
        elif record.key == "eval_stop" and began is not None:
            seconds, began = _between(began, record), None
            if seconds is None:
                return None
            total, count = total + seconds, count + 1
    return total if count else None
