"""One run, read from its folder `run_<i>` and the log beside it; missing files are named."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bert_tools.common.log_reader import RunLog, read_foreign_log
from bert_tools.report.run_files import Record, read_environment, read_metrics
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.outcome import RunOutcome, read_outcome

_MS_PER_S = 1e3
Contents = TypeVar("Contents")
Points = tuple[tuple[int, float], ...]  # values by the samples trained until then


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run as described by its files; None or empty for missing facts.

    `label` tells it from the other runs of a report. `records` are those of `metrics.jsonl`.
    `time_to_train_s` is MLPerf's, from `run_start` to `run_stop`; None for a run that was resumed,
    because each attempt has a log of its own. `init_s` is the time before. `attempts` counts those
    before the last one. `last_written` is the time at which the metrics of a run without an end
    were last written, in seconds since the epoch. `absent` has sentences about missing files.
    """

    name: str
    label: str
    config: RunConfig | None
    records: tuple[Record, ...]
    outcome: RunOutcome | None
    time_to_train_s: float | None
    init_s: float | None
    environment: Mapping[str, str]
    attempts: int
    last_written: float | None
    absent: tuple[str, ...]

    @property
    def target(self) -> float | None:
        """The accuracy to be reached, if known and if there is one."""
        return self.config.eval.target if self.config else None

    @property
    def evaluations(self) -> Points:
        """The accuracies."""
        return points_in(self.records, "mlm_accuracy")

    @property
    def state(self) -> str:
        """How the run ended, in words; `no end recorded` for one without an end."""
        return ended_in_words(self.outcome, self.config) if self.outcome else "no end recorded"

    def known(self, key: str) -> list[Any]:
        """The numbers of a key in the records."""
        return [value for _, value in points_in(self.records, key)]


def points_in(records: Sequence[Record], key: str) -> Points:
    """The numbers of a key, with the samples of their records."""
    return tuple(
        (record["samples"], record[key]) for record in records if record.get(key) is not None
    )


def ended_in_words(outcome: RunOutcome, config: RunConfig | None) -> str:
    """How a run ended; without a config it is taken to have had a target."""
    has_target = config is None or config.eval.target is not None
    if outcome.status == "success":
        return "target reached" if has_target else "finished, no target"
    if outcome.stopped_by:
        return f"stopped by {outcome.stopped_by}"
    return "target missed" if has_target else "ended before its last step"


def read_run(folder: Path, label: str) -> Run:
    """Read a run. Raises DataError or ConfigError for a file that is wrong, not for one missing."""
    config = read_if_there(folder / "config.toml", load_config)
    records = tuple(read_if_there(folder / "metrics.jsonl", read_metrics) or ())
    outcome = read_if_there(folder / "outcome.json", read_outcome)
    environment = read_if_there(folder / "environment.json", read_environment)
    attempts = len(list(folder.glob("interrupted/result_*_*.txt")))
    place = folder.absolute()
    log_path = place.parent / f"{place.name.replace('run_', 'result_')}.txt"
    log = read_if_there(log_path, lambda path: read_foreign_log(path, str(path)))
    metrics = folder / "metrics.jsonl"
    is_known = {
        "there is no metrics.jsonl with a record, so there are no curves": records,
        "there is no evaluation yet, so no accuracy": points_in(records, "mlm_accuracy"),
        "there is no MLPerf log, so time to train and start-up are not known": log,
        "there is no config.toml, so target and settings are not known": config,
        "there is no environment.json, so the machine is not known": environment,
    }
    return Run(
        name=str(folder),
        label=label,
        config=config,
        records=records,
        outcome=outcome,
        time_to_train_s=_between(log, "run_start", "run_stop") if log and not attempts else None,
        init_s=_between(log, "init_start", "init_stop") if log else None,
        environment=environment or {},
        attempts=attempts,
        last_written=metrics.stat().st_mtime if outcome is None and metrics.exists() else None,
        absent=tuple(sentence for sentence, there in is_known.items() if not there),
    )


def read_if_there(path: Path, reader: Callable[[Path], Contents]) -> Contents | None:
    """The reader's result for a file, None if it is missing; the reader refuses other things."""
    return reader(path) if os.path.lexists(path) else None


def _between(log: RunLog, start: str, stop: str) -> float | None:
    """Seconds between the first records of two keys; None if one is missing."""
    found = [record.time_ms for key in (start, stop) for record in log.named(key)[:1]]
    return (found[1] - found[0]) / _MS_PER_S if len(found) == 2 else None
