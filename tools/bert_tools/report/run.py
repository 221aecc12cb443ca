"""Runs: found below directories, and read from their folders `run_<i>` and the logs beside them.

Damaged lines of metrics are left out, and missing files are named.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bert_tools.common.log_reader import RunLog, is_number, read_foreign_log
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError, DataError, one_line, say
from mlperf_bert.files import open_regular_file
from mlperf_bert.run.outcome import RunOutcome, read_outcome

MAX_RUNS = 32  # as many as the page has colours and dashes
_OF_A_RUN = ("metrics.jsonl", "config.toml", "environment.json", "outcome.json")
_RUN = re.compile(r"run_(\d{1,6})")
_NEEDED = frozenset(("step", "samples", "skipped_steps", "loss", "mlm_accuracy"))
_COUNTS = ("step", "samples", "skipped_steps")
_AS_WRITTEN = "use the file as the run wrote it"
_GIVE_RUN = "give a run directory, which train makes below runs/"
_MS_PER_S = 1e3

Record = Mapping[str, Any]
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


def find_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """All runs of run directories and of their `run_<i>`, without repetition: folders by label.

    Raises DataError if a path has none, ConfigError if there are more than MAX_RUNS.
    """
    by_place: dict[str, Path] = {}
    for path in paths:
        folders = _runs_of(path)
        if not folders:
            raise DataError(str(path), "holds no run: no run_<i>, no metrics.jsonl", _GIVE_RUN)
        for folder in folders:
            by_place.setdefault(os.path.realpath(folder), folder)
    found = list(by_place.values())
    if len(found) > MAX_RUNS:
        problem = f"are {len(found):,} runs"
        raise ConfigError("RUN", problem, f"name {MAX_RUNS} of them at most")
    return dict(zip(_labels(found), found, strict=True))


def newest_run(path: Path) -> Path | None:
    """The directory `run_<i>` that `path` is or contains, of the highest i; None if none exists.

    Raises DataError if `path` is no directory or cannot be read.
    """
    runs = _runs_of(path) if path.exists() else []
    return runs[-1] if runs else None


def _runs_of(path: Path) -> list[Path]:
    """The runs that a path is or contains, in the order of their numbers.

    Raises DataError if it is no directory or cannot be read.
    """
    try:
        names = set(os.listdir(path))
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _GIVE_RUN) from None
    runs = sorted(filter(_RUN.fullmatch, names), key=lambda name: (int(name[4:]), name))
    found = [path / name for name in runs if (path / name).is_dir()]
    if found and not _RUN.fullmatch(path.name):
        return found
    return [path] if _RUN.fullmatch(path.name) or names & {*_OF_A_RUN} else []


def _labels(folders: Sequence[Path]) -> list[str]:
    """For `runs/a/run_0` a, or more of its path if two would be equal, at last with a number."""
    places = [folder.absolute().parts for folder in folders]
    for labels in (
        [parts[-2] if parts[-1].startswith("run_") else parts[-1] for parts in places],
        ["/".join(parts[-2:]) for parts in places],
        ["/".join(parts[-3:]) for parts in places],
    ):
        if len(set(labels)) == len(labels):
            return labels
    return [f"{number}. {label}" for number, label in enumerate(labels, 1)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`: finite numbers or None by key, `step` ascending.

    Each has `step`, `samples`, `skipped_steps`, `loss` and `mlm_accuracy`; values that are no
    numbers are left out. So is an incomplete last line: the run was killed, or is still running. A
    damaged line is skipped, which is said in one line on stderr.

    Raises DataError if the file is missing or cannot be read.
    """
    records, problem = metrics_in(path)
    if problem:
        say(f"{one_line(str(path))}, {problem}")
    return records


def metrics_in(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Records as in `read_metrics`, and what is wrong with skipped lines, as printable text.

    Raises like `read_metrics`.
    """
    lines = _contents(path).split(b"\n")[:-1]
    records: list[dict[str, Any]] = []
    skipped: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            record = _record_in(line)
        except (ValueError, RecursionError) as error:
            skipped.append(one_line(f"line {number}: is no record ({error})"))
            continue
        if records and record["step"] <= records[-1]["step"]:
            skipped.append(f"line {number}: goes back to step {record['step']}")
            if len(records) > 1 and record["step"] <= records[-2]["step"]:
                continue
            records.pop()  # it is the one before that does not fit
        records.append(record)
    more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
    return records, f"{skipped[0]}; skipped{more}" if skipped else ""


def _contents(path: Path) -> bytes:
    try:
        with open_regular_file(path) as file:
            return file.readall()
    except FileNotFoundError:
        raise DataError(str(path), "is missing", "give the directory of a run") from None
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _AS_WRITTEN) from None


def _record_in(line: bytes) -> dict[str, Any]:
    """The record on a line. Raises ValueError, RecursionError for anything else."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    record = {key: value for key, value in found.items() if value is None or is_number(value)}
    if missing := _NEEDED - record.keys():
        raise ValueError(f"{min(missing)} is no number")
    for key in _COUNTS:
        if not isinstance(record[key], int):
            raise ValueError(f"{key} is no count")
    return record


def read_environment(path: Path) -> dict[str, str]:
    """A run's environment as flat texts in order; `packages` are keyed like `packages.torch`.

    Raises DataError if it is missing or is no JSON object.
    """
    try:
        found = json.loads(_contents(path))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(str(path), "is not valid JSON", f"{_AS_WRITTEN}, or remove it")
    facts: dict[str, str] = {}
    for key, value in found.items():
        if key == "schema_version":
            continue
        if isinstance(value, dict):
            facts |= {f"{key}.{name}": _as_text(fact) for name, fact in value.items()}
        else:
            facts[key] = _as_text(value)
    return facts


def _as_text(fact: object) -> str:
    return "" if fact is None else str(fact)
