"""Facts of a run, read from its log, on which a submission depends.

Our loop writes times, evaluations and throughputs in one order (`mlperf_log.py`, `train.py`).
Another order means that records were moved, removed or added, and is refused here.
`plausibility.py` checks that they agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bert_tools.common.log_reader import AS_WRITTEN, Record, RunLog, is_number
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief

_FIRST = ("init_stop", "run_start", "epoch_start", "block_start")
_EVALUATION = ("eval_start", "eval_accuracy", "eval_stop")
_REPEATED = (*_EVALUATION, "tracked_stats")
_LAST = ("block_stop", "epoch_stop", "train_samples", "eval_samples", "run_stop")
# Records that stand once in a log of ours (mlperf_log.py): name among the facts (None: no fact),
# and type.
_SINGLE: Mapping[str, tuple[str | None, type]] = {
    "submission_benchmark": ("benchmark", str),
    "submission_division": ("division", str),
    "seed": ("seed", int),
    "global_batch_size": ("global_batch_size", int),
    "gradient_accumulation_steps": ("grad_accum_steps", int),
    "quality_target": ("quality_target", float),
    "rules_enforced": ("rules_enforced", bool),
    "resumed": ("resumed", bool),
    "initial_weights": ("initial_weights", str),
    "number_of_nodes": ("nodes", int),
    "number_of_ranks": ("ranks", int),
    "run_start": (None, type(None)),
    "run_stop": (None, type(None)),
}
_MAY_LACK = ("initial_weights",)  # not in older logs; the closed division asks for it
# Before `init_stop`: facts in which ten runs may differ, or which are checked for each alone.
_OF_ONE_RUN = (
    "cache_clear",
    "init_start",
    "initial_weights",
    "number_of_nodes",
    "resumed",
    "rules_enforced",
    "seed",
    "submission_benchmark",
    "submission_division",
    "weights_initialization",
)
_RUN_AGAIN = "run it again with this version"
_MS_PER_MINUTE = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The accuracy after `samples`; the loop used it after `known_at` samples."""

    samples: int
    known_at: int
    accuracy: float
    start_ms: int
    result_ms: int
    stop_ms: int
    line: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples per second of training, without evaluations, since the previous throughput."""

    samples: int
    per_s: float
    time_ms: int
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """A run from its log's first record, at `begin_ms`, to its last; at least one evaluation."""

    begin_ms: int
    start_ms: int
    stop_ms: int
    train_samples: int
    evaluations: tuple[Evaluation, ...]
    throughputs: tuple[Throughput, ...]

    @property
    def evaluates_in_turn(self) -> bool:
        """True if training paused for evaluations; else they may have run beside it."""
        return all(each.known_at == each.samples for each in self.evaluations)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run. `accuracy` is the last measured one, `minutes` the time on the clock.

    `initial_weights`: "checkpoint" or "random", None if the log does not have it. `settings`: facts
    that the runs of a system share, above all target and hyper-parameters.
    """

    name: str
    benchmark: str
    division: str
    seed: int
    global_batch_size: int
    grad_accum_steps: int
    quality_target: float
    rules_enforced: bool
    resumed: bool
    initial_weights: str | None
    nodes: int
    ranks: int
    cache_cleared: bool
    status: str
    accuracy: float
    minutes: float
    settings: Mapping[str, Any]
    course: Course


def read_facts(log: RunLog) -> RunFacts:
    """The facts of a log. Raises DataError if a record is missing, repeated or invalid."""
    if log.last_text("quality_target") == "none":
        problem = "is of a run without a target (eval.target_accuracy = 'none')"
        raise DataError(log.name, problem, "no result can be claimed: set a target, run again")
    values = _single_values(log)
    stop = log.records[-1]
    if stop.key != "run_stop":
        raise DataError(log.name, f"goes on after run_stop: {in_brief(stop.key)}", _RUN_AGAIN)
    course = read_course(log)
    caches = log.named("cache_clear")
    facts: dict[str, Any] = {name: values.get(key) for key, (name, _) in _SINGLE.items() if name}
    return RunFacts(
        name=log.name,
        **facts,
        cache_cleared=bool(caches) and all(record.value is True for record in caches),
        status=str(stop.metadata.get("status")),
        accuracy=course.evaluations[-1].accuracy,
        minutes=(course.stop_ms - course.start_ms) / _MS_PER_MINUTE,
        settings=_settings(log),
        course=course,
    )


def _single_values(log: RunLog) -> dict[str, Any]:
    found = {key: log.named(key) for key in _SINGLE}
    missing = [key for key, records in found.items() if not records and key not in _MAY_LACK]
    if missing:
        problem = f"holds no {', no '.join(missing)}"
        remedy = f"the run did not end, or an older version wrote the log: {_RUN_AGAIN}"
        raise DataError(log.name, problem, remedy)
    there = {key: records for key, records in found.items() if records}
    for key, records in there.items():
        value = records[0].value
        if len(records) > 1:
            raise DataError(log.name, f"holds {len(records)} records {key}", _RUN_AGAIN)
        if not _is_of(value, _SINGLE[key][1]):
            raise DataError(log.name, f"{key} is {in_brief(value)}", _RUN_AGAIN)
    return {key: records[0].value for key, records in there.items()}


def _settings(log: RunLog) -> dict[str, Any]:
    keys = [record.key for record in log.records]
    before = log.records[: keys.index("init_stop")]
    return {record.key: record.value for record in before if record.key not in _OF_ONE_RUN}


def _is_of(value: object, kind: type) -> bool:
    if kind in (int, float):
        return is_number(value) and (kind is float or type(value) is int)
    return type(value) is kind


def read_course(log: RunLog) -> Course:
    """The course of a run. Raises DataError if the log is not as our loop writes it.

    Args:
        log: holds one `run_start`, and `run_stop` as its last record.
    """
    for before, after in pairwise(log.records):
        if after.time_ms < before.time_ms:
            back_ms = before.time_ms - after.time_ms
            problem = f"time runs backwards, by {back_ms} ms at {in_brief(after.key)}"
            raise _problem(log, after, problem)
    start = next(place for place, each in enumerate(log.records) if each.key == "run_start")
    timed = log.records[max(0, start - 1) :]
    _check_order(log, timed)
    evaluations, throughputs = _read_results(log, timed[len(_FIRST) : -len(_LAST)])
    train_samples = timed[_LAST.index("train_samples") - len(_LAST)]
    if type(train_samples.value) is not int or not is_number(train_samples.value):
        raise _problem(log, train_samples, f"train_samples is {in_brief(train_samples.value)}")
    return Course(
        begin_ms=log.records[0].time_ms,
        start_ms=log.records[start].time_ms,
        stop_ms=log.records[-1].time_ms,
        train_samples=train_samples.value,
        evaluations=evaluations,
        throughputs=throughputs,
    )


def _check_order(log: RunLog, timed: Sequence[Record]) -> None:
    """Check that other records stand once, before or after all evaluations and throughputs."""
    repeated = [None] * (len(timed) - len(_FIRST) - len(_LAST))
    for record, wanted in zip(timed, (*_FIRST, *repeated, *_LAST), strict=False):
        if record.key == wanted or (wanted is None and record.key in _REPEATED):
            continue
        belongs = wanted or "an evaluation's record"
        raise _problem(log, record, f"{in_brief(record.key)} stands where {belongs} belongs")


def _read_results(
    log: RunLog, records: Sequence[Record]
) -> tuple[tuple[Evaluation, ...], tuple[Throughput, ...]]:
    """Read the evaluations in order; a throughput follows after one or more of them."""
    evaluations: list[Evaluation] = []
    throughputs: list[Throughput] = []
    open_records: list[Record] = []  # of the evaluation in progress
    ended: list[Sequence[Record]] = []  # evaluations not yet followed by a throughput
    for record in records:
        samples = _samples(log, record)
        if record.key == "tracked_stats":
            if not ended:
                raise _problem(log, record, "tracked_stats follows no evaluation")
            throughputs.append(_throughput(log, record, samples))
            evaluations += [_evaluation(log, each, samples) for each in ended]
            ended = []
            continue
        wanted = _EVALUATION[len(open_records)]
        if record.key != wanted or (open_records and samples != _samples(log, open_records[0])):
            problem = f"{record.key} at {samples} samples stands where {wanted} belongs"
            raise _problem(log, record, problem)
        open_records.append(record)
        if len(open_records) == len(_EVALUATION):
            ended.append(open_records)
            open_records = []
    if open_records or ended or not evaluations:
        raise DataError(
            log.name, "does not end with an evaluation and its tracked_stats", AS_WRITTEN
        )
    _check_rising(log, [(each.samples, each.line) for each in evaluations])
    _check_rising(log, [(each.samples, each.line) for each in throughputs])
    return tuple(evaluations), tuple(throughputs)


def _check_rising(log: RunLog, samples_and_lines: Sequence[tuple[int, int]]) -> None:
    for (before, _), (after, line) in pairwise(samples_and_lines):
        if after <= before:
            problem = f"{after} samples come after {before}"
            raise DataError(f"{log.name}, line {line}", problem, AS_WRITTEN)


def _samples(log: RunLog, record: Record) -> int:
    samples = record.metadata.get("samples_count")
    is_same = record.metadata.get("epoch_num") == samples
    if type(samples) is not int or not is_number(samples) or samples < 1 or not is_same:
        problem = f"{record.key} does not give one number as samples_count and epoch_num"
        raise _problem(log, record, problem)
    return samples


def _throughput(log: RunLog, record: Record, samples: int) -> Throughput:
    stats = record.value
    per_s = stats.get("throughput") if isinstance(stats, dict) else None
    if not (isinstance(per_s, int | float) and is_number(per_s) and per_s > 0):
        raise _problem(log, record, f"its throughput is {in_brief(per_s)}")
    return Throughput(samples, per_s, record.time_ms, record.line)


def _evaluation(log: RunLog, records: Sequence[Record], known_at: int) -> Evaluation:
    start, result, stop = records
    accuracy = result.value
    if not (isinstance(accuracy, int | float) and is_number(accuracy) and 0 <= accuracy <= 1):
        problem = f"eval_accuracy is {in_brief(accuracy)}, not a number within 0 .. 1"
        raise _problem(log, result, problem)
    return Evaluation(
        samples=_samples(log, start),
        known_at=known_at,
        accuracy=accuracy,
        start_ms=start.time_ms,
        result_ms=result.time_ms,
        stop_ms=stop.time_ms,
        line=result.line,
    )


def _problem(log: RunLog, record: Record, problem: str) -> DataError:
    return DataError(f"{log.name}, line {record.line}", problem, AS_WRITTEN)
