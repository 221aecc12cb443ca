"""Reads the course of a run from its log: times, evaluations and throughputs.

Our loop writes them in one order (`mlperf_log.py`, `train.py`); records that stand in another were
moved, left out or put in, and are refused here. Whether they agree is asked in `plausibility.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bert_tools.common.log_reader import AS_WRITTEN, Record, RunLog, is_number
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief

_FIRST = ("init_stop", "run_start", "epoch_start", "block_start")
_EVALUATION = ("eval_start", "eval_accuracy", "eval_stop")
_REPEATED = (*_EVALUATION, "tracked_stats")
_LAST = ("block_stop", "epoch_stop", "train_samples", "eval_samples", "run_stop")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The accuracy after `samples`; the loop used it when `known_at` samples were trained."""

    samples: int
    known_at: int
    accuracy: float
    start_ms: int
    result_ms: int
    stop_ms: int
    line: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples per second of training, without evaluations, since the throughput before."""

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
        """Whether training stood still for evaluations; else they may have run beside it."""
        return all(each.known_at == each.samples for each in self.evaluations)


def read_course(log: RunLog) -> Course:
    """The course of a run. Raises DataError where the log is not as our loop writes it.

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
    """All but evaluations and throughputs stands once, before or after all of these."""
    repeated = [None] * (len(timed) - len(_FIRST) - len(_LAST))
    for record, wanted in zip(timed, (*_FIRST, *repeated, *_LAST), strict=False):
        if record.key == wanted or (wanted is None and record.key in _REPEATED):
            continue
        belongs = wanted or "an evaluation's record"
        raise _problem(log, record, f"{in_brief(record.key)} stands where {belongs} belongs")


def _read_results(
    log: RunLog, records: Sequence[Record]
) -> tuple[tuple[Evaluation, ...], tuple[Throughput, ...]]:
    """The evaluations in their order; after one or more of them comes a throughput."""
    evaluations: list[Evaluation] = []
    throughputs: list[Throughput] = []
    open_records: list[Record] = []  # of the evaluation that is going on
    ended: list[Sequence[Record]] = []  # evaluations that no throughput has followed yet
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
