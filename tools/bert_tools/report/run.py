"""Finds runs in directories, and reads each run's folder `run_<i>` and the log next to it.

The reader skips damaged lines of metrics and reports missing files.
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

PHASES = "phases.json"  # written by the command `phases` into its run directory
MAX_RUNS = 32  # the page has no more combinations of colours and dashes
_RUN_FILES = ("metrics.jsonl", "config.toml", "environment.json", "outcome.json")
_RUN = re.compile(r"run_(\d{1,6})")
_NEEDED = frozenset(("step", "samples", "skipped_steps", "loss", "mlm_accuracy"))
_COUNTS = ("step", "samples", "skipped_steps")
_AS_WRITTEN = "use the file as the run wrote it"
_PASS_RUN = "pass a run directory, which training creates in runs/"
_MS_PER_S = 1e3

Record = Mapping[str, Any]
Contents = TypeVar("Contents")
Points = tuple[tuple[int, float], ...]  # numbers of samples trained so far, and values


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run as described by its files. Facts that the files do not contain are None or empty.

    `label` distinguishes the run from the report's other runs. `records` are the records of
    `metrics.jsonl`. `time_to_train_s` is MLPerf's time from `run_start` to `run_stop`. It is None
    for a resumed run, because each attempt has its own log. `init_s` is the time from `init_start`
    to `init_stop`. `attempts` counts the attempts before the last one. `last_written`
    is the time at which the metrics of a run without a recorded end were last written, in seconds
    since the epoch. `absent` has one sentence per missing file.
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
        """Return the target accuracy, or None if the run has no target or no config."""
        return self.config.eval.target if self.config else None

    @property
    def evaluations(self) -> Points:
        """Return (samples, held-out accuracy) for each evaluation."""
        return points_in(self.records, "mlm_accuracy")

    @property
    def state(self) -> str:
        """Return how the run ended, or `no end recorded` if it has no recorded outcome."""
        return ended_in_words(self.outcome, self.config) if self.outcome else "no end recorded"

    def known(self, key: str) -> list[Any]:
        """Return the numbers that the records contain for a key, in order."""
        return [value for _, value in points_in(self.records, key)]


def points_in(records: Sequence[Record], key: str) -> Points:
    """Return (samples, number) for each record that has a number for the key."""
    return tuple(
        (record["samples"], record[key]) for record in records if record.get(key) is not None
    )


def ended_in_words(outcome: RunOutcome, config: RunConfig | None) -> str:
    """Return a few words that describe how a run ended, for example `target reached`.

    If `config` is None, the run is assumed to have had a target.
    """
    has_target = config is None or config.eval.target is not None
    if outcome.status == "success":
        return "target reached" if has_target else "finished, no target"
    if outcome.stopped_by:
        return f"stopped by {outcome.stopped_by}"
    return "target missed" if has_target else "ended before its last step"


def read_run(folder: Path, label: str) -> Run:
    """Read a run's files from its folder.

    Raises DataError or ConfigError for a damaged file, but not for a missing one.
    """
    config = read_if_there(folder / "config.toml", load_config)
    records = tuple(read_if_there(folder / "metrics.jsonl", read_metrics) or ())
    outcome = read_if_there(folder / "outcome.json", read_outcome)
    environment = read_if_there(folder / "environment.json", read_environment)
    attempts = len(list(folder.glob("interrupted/result_*_*.txt")))
    absolute = folder.absolute()
    log_path = absolute.parent / f"{absolute.name.replace('run_', 'result_')}.txt"
    log = read_if_there(log_path, lambda path: read_foreign_log(path, str(path)))
    said = log.named("resumed") if log else []  # older logs do not have this record
    is_resumed = said[-1].value if said else bool(attempts)
    metrics = folder / "metrics.jsonl"
    is_known = {
        "metrics.jsonl has no record, so there are no curves": records,
        "there was no evaluation yet, so there is no accuracy": points_in(records, "mlm_accuracy"),
        "there is no MLPerf log, so the time to train and the start-up time are not known": log,
        "there is no config.toml, so the target and the settings are not known": config,
        "there is no environment.json, so the machine is not known": environment,
    }
    return Run(
        name=str(folder),
        label=label,
        config=config,
        records=records,
        outcome=outcome,
        time_to_train_s=None if is_resumed or not log else _between(log, "run_start", "run_stop"),
        init_s=_between(log, "init_start", "init_stop") if log else None,
        environment=environment or {},
        attempts=attempts,
        last_written=metrics.stat().st_mtime if outcome is None and metrics.exists() else None,
        absent=tuple(sentence for sentence, found in is_known.items() if not found),
    )


def read_if_there(path: Path, reader: Callable[[Path], Contents]) -> Contents | None:
    """Read a file with `reader`, or return None if the file does not exist."""
    return reader(path) if os.path.lexists(path) else None


def _between(log: RunLog, start: str, stop: str) -> float | None:
    """Return the time from the first record `start` to the first record `stop`, in seconds.

    Returns None if one of the records is missing.
    """
    found = [record.time_ms for key in (start, stop) for record in log.named(key)[:1]]
    return (found[1] - found[0]) / _MS_PER_S if len(found) == 2 else None


def find_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the folders of all runs in `paths` by label. Each folder occurs once.

    A path is a run directory or one of its folders `run_<i>`. Raises DataError if a path has no
    run, and ConfigError if there are more than MAX_RUNS.
    """
    by_real_path: dict[str, Path] = {}
    for path in paths:
        folders = _runs_of(path)
        if not folders:
            raise DataError(
                str(path), "contains no run (neither run_<i> nor metrics.jsonl)", _PASS_RUN
            )
        for folder in folders:
            by_real_path.setdefault(os.path.realpath(folder), folder)
    found = list(by_real_path.values())
    if len(found) > MAX_RUNS:
        problem = f"{len(found):,} runs are too many for one page"
        raise ConfigError("RUN", problem, f"pass at most {MAX_RUNS} runs")
    return dict(zip(_labels(found), found, strict=True))


def newest_run(path: Path) -> Path | None:
    """Return the newest run of a path: the path itself, or its `run_<i>` with the highest i.

    Returns None if the path has no run. Raises DataError if `path` is not a directory or cannot be
    read.
    """
    runs = _runs_of(path) if path.exists() else []
    return runs[-1] if runs else None


def _runs_of(path: Path) -> list[Path]:
    """Return the path itself if it is a run, otherwise the runs in it or in its directory `run`.

    The order is ascending. Raises DataError if the path is not a directory or cannot be read.
    """
    try:
        names = set(os.listdir(path))
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _PASS_RUN) from None
    runs = sorted(filter(_RUN.fullmatch, names), key=lambda name: (int(name[4:]), name))
    found = [path / name for name in runs if (path / name).is_dir()]
    if found and not _RUN.fullmatch(path.name):
        return found
    if _RUN.fullmatch(path.name) or names & {*_RUN_FILES}:
        return [path]
    own = path / "run"  # in the directory of a model that `pretrain` trains
    return _runs_of(own) if own.is_dir() else []


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return a short label for each run, for example `a` for `runs/a/run_0`.

    If two labels are equal, all labels use more components of their paths. If two of the longest
    labels are still equal, every label gets a number.
    """
    paths = [folder.absolute().parts for folder in folders]
    for labels in (
        [parts[-2] if parts[-1].startswith("run_") else parts[-1] for parts in paths],
        ["/".join(parts[-2:]) for parts in paths],
        ["/".join(parts[-3:]) for parts in paths],
    ):
        if len(set(labels)) == len(labels):
            return labels
    return [f"{number}. {label}" for number, label in enumerate(labels, 1)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a `metrics.jsonl` in ascending order of `step`.

    A record maps keys to finite numbers or None. It has at least the keys `step`, `samples`,
    `skipped_steps`, `loss` and `mlm_accuracy`. Values that are not numbers are left out. An
    incomplete last line is ignored, because the run may have been killed or may still be running.
    Other damaged lines are skipped and reported in one line on stderr.

    Raises DataError if the file is missing or cannot be read.
    """
    records, problem = metrics_in(path)
    if problem:
        say(f"{one_line(str(path))}: {problem}")
    return records


def metrics_in(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read the records of a `metrics.jsonl`, as `read_metrics` does, without printing.

    Returns the records and a printable text about the skipped lines, which is empty if there are
    none. Raises DataError, as `read_metrics` does.
    """
    lines = _contents(path).split(b"\n")[:-1]
    records: list[dict[str, Any]] = []
    skipped: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            record = _record_in(line)
        except (ValueError, RecursionError) as error:
            skipped.append(one_line(f"line {number}, which is not a record ({error})"))
            continue
        if records and record["step"] <= records[-1]["step"]:
            skipped.append(f"line {number}, which goes back to step {record['step']}")
            if len(records) > 1 and record["step"] <= records[-2]["step"]:
                continue
            records.pop()  # this record fits the earlier ones, so the one before it was wrong
        records.append(record)
    more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
    return records, f"skipped {skipped[0]}{more}" if skipped else ""


def _contents(path: Path) -> bytes:
    """Read a file of a run. Raises DataError if the file is missing or cannot be read."""
    try:
        with open_regular_file(path) as file:
            return file.readall()
    except FileNotFoundError:
        raise DataError(str(path), "is missing", _PASS_RUN) from None
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _AS_WRITTEN) from None


def _record_in(line: bytes) -> dict[str, Any]:
    """Parse a line of `metrics.jsonl`.

    Raises ValueError or RecursionError if the line is not a record.
    """
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    record = {key: value for key, value in found.items() if value is None or is_number(value)}
    if missing := _NEEDED - record.keys():
        raise ValueError(f"{min(missing)} is not a number")
    for key in _COUNTS:
        if not isinstance(record[key], int):
            raise ValueError(f"{key} is not an integer")
    return record


def read_environment(path: Path) -> dict[str, str]:
    """Read the facts of a run's `environment.json` as texts, in the order of the file.

    The key of a nested fact has the form `packages.torch`.

    Raises DataError if the file is missing or is not a JSON object.
    """
    try:
        found = json.loads(_contents(path))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(str(path), "is not a JSON object", f"{_AS_WRITTEN}, or remove it")
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
