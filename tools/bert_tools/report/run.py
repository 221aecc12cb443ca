"""One run as its files tell it: its run directory, or an MLPerf log of anybody's."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import RunLog, is_number, read_foreign_log
from bert_tools.report.metrics_reader import read_metrics
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.run.outcome import Status, as_status, read_outcome

MLPERF_TARGET, MLPERF_LENGTH = 0.72, 512


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The accuracy after so many samples."""

    samples: int
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run as its files tell it; None, or empty, where they do not.

    `records` are those of `metrics.jsonl`, `throughputs` samples a second in the order of time;
    `is_reference` whether it may be BERT-large on MLPerf's target, whose results are published;
    `ended` is None for a run that is under way or was killed.
    """

    name: str
    config: RunConfig | None
    records: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Evaluation, ...]
    throughputs: tuple[float, ...]
    global_batch_size: int | None
    optimizer: str | None
    target_accuracy: float | None
    is_reference: bool
    initial_weights: str | None
    ended: Status | None

    @property
    def best_accuracy(self) -> float:
        """0 where there was no evaluation."""
        return max((each.accuracy for each in self.evaluations), default=0.0)


def read_run(path: Path) -> Run:
    """The run of a run directory, of its `run_<i>`, or of an MLPerf log of anybody's.

    Raises DataError or ConfigError naming the file that is missing or wrong.
    """
    if not path.exists():
        raise DataError(str(path), "does not exist", "give a run directory or an MLPerf log")
    if not path.is_dir():
        return run_of_log(read_foreign_log(path, str(path)))
    return _from_directory(_only_run_of(path))


def _only_run_of(directory: Path) -> Path:
    if (directory / "metrics.jsonl").exists():
        return directory
    runs = sorted(
        each.name
        for each in directory.iterdir()
        if re.fullmatch(r"run_\d{1,6}", each.name) and (each / "metrics.jsonl").exists()
    )
    if not runs:
        remedy = "give a run directory, which train makes below runs/, or an MLPerf log"
        raise DataError(str(directory), "holds no metrics.jsonl, nor a run_<i> with one", remedy)
    if len(runs) > 1:
        remedy = f"give one of them: {directory / runs[0]}"
        raise DataError(str(directory), f"holds {len(runs)} runs", remedy)
    return directory / runs[0]


def _from_directory(directory: Path) -> Run:
    config = load_config(directory / "config.toml")
    records = tuple(read_metrics(directory / "metrics.jsonl"))
    log_path = directory.parent / directory.name.replace("run_", "result_")
    log_path = log_path.with_suffix(".txt")
    # What is there and is no file is refused, links that lead nowhere too.
    log = read_foreign_log(log_path, str(log_path)) if os.path.lexists(log_path) else None
    outcome_path = directory / "outcome.json"
    ended = read_outcome(outcome_path).status if os.path.lexists(outcome_path) else None
    return run_of_parts(str(directory), config, records, log, ended)


def run_of_parts(
    name: str,
    config: RunConfig,
    records: tuple[Mapping[str, Any], ...],
    log: RunLog | None,
    ended: Status | None,
) -> Run:
    """The run that the files of its directory tell of. Raises DataError for a log that is wrong."""
    model = config.model
    return Run(
        name=name,
        config=config,
        records=records,
        evaluations=evaluations_of(records),
        throughputs=tuple(
            float(record["samples_per_s"]) for record in records if record.get("samples_per_s")
        ),
        global_batch_size=config.parallel.global_batch_size,
        optimizer=config.optim.name,
        target_accuracy=config.eval.target_accuracy,
        is_reference=_is_bert_large(model)
        and _is_reference_task(config.data.max_seq_length, config.eval.target_accuracy),
        initial_weights=log.last_text("initial_weights") if log else None,
        ended=ended or (_ended(log) if log else None),
    )


def evaluations_of(records: Iterable[Mapping[str, Any]]) -> tuple[Evaluation, ...]:
    """Those that are among the records of `metrics.jsonl`."""
    return tuple(
        Evaluation(record["samples"], float(record["mlm_accuracy"]))
        for record in records
        if record["mlm_accuracy"] is not None
    )


def run_of_log(log: RunLog) -> Run:
    """The run that a log alone tells of. Raises DataError where its evaluations are wrong."""
    batch = log.last_number("global_batch_size")
    length = int(log.last_number("max_sequence_length") or MLPERF_LENGTH)
    # Only logs of ours say it, and not the older ones.
    assumed = MLPERF_TARGET if length == MLPERF_LENGTH else None
    target = log.last_number("quality_target") or assumed
    return Run(
        name=log.name,
        config=None,
        records=(),
        evaluations=_evaluations(log),
        throughputs=_throughputs(log),
        global_batch_size=int(batch) if batch else None,
        optimizer=log.last_text("opt_name"),
        target_accuracy=target,
        is_reference=_is_reference_task(length, target),
        initial_weights=log.last_text("initial_weights"),
        ended=_ended(log),
    )


def is_reference_config(config: RunConfig) -> bool:
    """Whether it is of BERT-large on MLPerf's target, whose results are published."""
    return _is_bert_large(config.model) and _is_reference_task(
        config.data.max_seq_length, config.eval.target_accuracy
    )


def _is_bert_large(model: ModelSection) -> bool:
    return (model.num_layers, model.hidden_size) == (24, 1024)


def _is_reference_task(max_seq_length: int, target_accuracy: float | None) -> bool:
    return (max_seq_length, target_accuracy) == (MLPERF_LENGTH, MLPERF_TARGET)


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
    """In the order of the log; samples are where the writer has put them."""
    found: list[Evaluation] = []
    for record in log.named("eval_accuracy"):
        samples = record.metadata.get("samples_count") or record.metadata.get("epoch_num")
        is_right = is_number(record.value) and 0 <= record.value <= 1
        if type(samples) is not int or not 0 <= samples < 2**63 or not is_right:
            problem = f"has an eval_accuracy of {in_brief(record.value)} at {in_brief(samples)}"
            raise DataError(log.name, problem, "its epoch_num must say the samples trained by then")
        if found and samples <= found[-1].samples:
            problem = f"has an evaluation at {samples:,} samples after one at as many or more"
            raise DataError(log.name, problem, "give the log of one run, with samples as epoch_num")
        found.append(Evaluation(samples, float(record.value)))
    return tuple(found)


def _throughputs(log: RunLog) -> tuple[float, ...]:
    values = [record.value for record in log.named("tracked_stats")]
    rates = [value["throughput"] for value in values if _has_throughput(value)]
    return tuple(float(rate) for rate in rates)


def _has_throughput(value: object) -> bool:
    rate = value.get("throughput") if isinstance(value, dict) else None
    return isinstance(rate, int | float) and is_number(rate) and rate > 0
