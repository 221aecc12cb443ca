"""Everything that a report shows of one run, read from its files; what is not there is named."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import SEEK_END
from pathlib import Path
from typing import Any, Literal, TypeVar

from bert_tools.common.log_reader import RunLog, read_foreign_log
from bert_tools.report.doctor import Diagnosis, diagnose
from bert_tools.report.environment_reader import read_environment
from bert_tools.report.metrics_reader import read_metrics
from bert_tools.report.run import Run, evaluations_of, run_of_log, run_of_parts
from bert_tools.report.run_files import RunFiles
from bert_tools.report.timing import Timing, resumed_at, timing_of
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import open_regular_file
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.outcome import RunOutcome, read_outcome

Contents = TypeVar("Contents")
State = Literal["target reached", "target missed", "stopped", "no end recorded"]

_BYTES_OF_A_RECORD = 100  # of a log, at least
MAX_ATTEMPTS = 100  # interrupted ones, that are looked at
_LAST_BYTES, _LAST_LINES = 4096, 12  # of stdout.log
_NO_CURVES = "loss, tokens/s, step times, imbalance, clipping, skipped steps and memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run of a report.

    `timing` is of the last attempt; `resumes` says after how many samples each attempt went on;
    `attempts` counts those before the last. `last_written` is when a file of a run without an end
    was last written, in seconds since the epoch. `absent` are sentences for people.
    """

    label: str
    run: Run
    state: State
    outcome: RunOutcome | None
    environment: Mapping[str, str]
    timing: Timing | None
    attempts: int
    resumes: tuple[int, ...]
    last_lines: tuple[str, ...]
    last_written: float | None
    absent: tuple[str, ...]
    diagnosis: Diagnosis

    @property
    def steps(self) -> int | None:
        """Updates so far, where that is known."""
        if self.outcome is not None:
            return self.outcome.steps
        return self.run.records[-1]["step"] if self.run.records else None

    @property
    def samples(self) -> int | None:
        """Sequences trained so far, where that is known."""
        if self.outcome is not None:
            return self.outcome.samples
        known = [self.timing.train_samples] if self.timing else []
        known += [self.run.records[-1]["samples"]] if self.run.records else []
        known += [self.run.evaluations[-1].samples] if self.run.evaluations else []
        return next((each for each in known if each is not None), None)

    @property
    def samples_to_target(self) -> int | None:
        """Samples at the first evaluation that reached the target."""
        target = self.run.target_accuracy
        reached = (each for each in self.run.evaluations if each.accuracy >= (target or 0))
        return next((each.samples for each in reached), None) if target is not None else None


def read_facts(files: RunFiles) -> RunFacts:
    """Read a run. Raises DataError or ConfigError for a file that is wrong, not for one missing."""
    log = read_foreign_log(files.log, str(files.log)) if files.log else None
    config = _read(files, "config.toml", load_config)
    records = tuple(_read(files, "metrics.jsonl", read_metrics) or ())
    outcome = _read(files, "outcome.json", read_outcome)
    run = _run_of(files.name, config, records, log, outcome)
    environment = _read(files, "environment.json", read_environment) or {}
    earlier = _earlier_attempts(files.folder) if files.folder else []
    resumes = {*earlier, resumed_at(log) if log else None}
    state = _state(run, outcome)
    return RunFacts(
        label=files.label,
        run=run,
        state=state,
        outcome=outcome,
        environment=environment,
        timing=timing_of(log) if log else None,
        attempts=len(earlier),
        resumes=tuple(sorted(each for each in resumes if each is not None)),
        last_lines=_read(files, "stdout.log", _last_lines) or (),
        last_written=_last_written(files) if state == "no end recorded" else None,
        absent=_absent(files, run, environment),
        diagnosis=diagnose(run),
    )


def _read(files: RunFiles, name: str, reader: Callable[[Path], Contents]) -> Contents | None:
    """What the reader makes of a file; what is there and is no file is refused by it."""
    return reader(files.folder / name) if files.folder and _has(files, name) else None


def _has(files: RunFiles, name: str) -> bool:
    return files.folder is not None and os.path.lexists(files.folder / name)


def _run_of(
    name: str,
    config: RunConfig | None,
    records: tuple[Mapping[str, Any], ...],
    log: RunLog | None,
    outcome: RunOutcome | None,
) -> Run:
    ended = outcome.status if outcome else None
    by_log = run_of_log(log) if log else _nothing(name)
    if config is None:
        evaluations = evaluations_of(records) or by_log.evaluations
        ended = ended or by_log.ended
        return replace(by_log, name=name, records=records, evaluations=evaluations, ended=ended)
    run = run_of_parts(name, config, records, log, ended)
    if records:
        return run
    return replace(run, evaluations=by_log.evaluations, throughputs=by_log.throughputs)


def _nothing(name: str) -> Run:
    return Run(
        name=name,
        config=None,
        records=(),
        evaluations=(),
        throughputs=(),
        global_batch_size=None,
        optimizer=None,
        target_accuracy=None,
        is_reference=False,
        initial_weights=None,
        ended=None,
    )


def _state(run: Run, outcome: RunOutcome | None) -> State:
    if run.ended == "success":
        return "target reached"
    if run.ended is None:
        return "no end recorded"
    return "stopped" if outcome is not None and outcome.stopped_by else "target missed"


def _absent(files: RunFiles, run: Run, environment: Mapping[str, str]) -> tuple[str, ...]:
    found = []
    if not run.records:
        missing = "metrics.jsonl holds no record yet"
        if not _has(files, "metrics.jsonl"):
            missing = "there is no metrics.jsonl"
        found.append(f"{missing}, so {_NO_CURVES} are not known")
    if not run.evaluations:
        found.append("there is no evaluation yet, so no accuracy")
    if files.log is None:
        found.append("there is no MLPerf log, so time to train and start-up are not known")
    if run.config is None:
        found.append("there is no config.toml, so of the settings only those of the log are known")
    if not environment:
        found.append("there is no environment.json, so hardware and commit are not known")
    return tuple(found)


def _earlier_attempts(folder: Path) -> list[int | None]:
    """The attempts before the last: after how many samples each had gone on, if it had."""
    stem = folder.name.replace("run_", "result_")
    found: list[int | None] = []
    for number in range(MAX_ATTEMPTS):
        path = folder / "interrupted" / f"{stem}_{number}.txt"
        if not os.path.lexists(path):
            break
        if path.is_file() and path.stat().st_size < _BYTES_OF_A_RECORD:
            found.append(None)  # killed before its first record was whole
        else:
            found.append(resumed_at(read_foreign_log(path, str(path))))
    return found


def _last_lines(path: Path) -> tuple[str, ...]:
    """The end of what the run has printed. Raises DataError where that is no regular file."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, file.seek(0, SEEK_END) - _LAST_BYTES))
            text = (file.read(_LAST_BYTES) or b"").decode("utf-8", errors="replace")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise DataError(str(path), reason, "use the file as the run wrote it") from None
    return tuple(line for line in text.split("\n") if line.strip())[-_LAST_LINES:]


def _last_written(files: RunFiles) -> float | None:
    paths = [files.folder / "metrics.jsonl"] if files.folder else []
    paths += [files.log] if files.log else []
    times = [path.stat().st_mtime for path in paths if path.exists()]
    return max(times, default=None)
