"""All facts that a report shows about one run, read from its files; missing files are named."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bert_tools.common.log_reader import read_foreign_log
from bert_tools.report.doctor import Diagnosis, diagnose
from bert_tools.report.run import Run, read_if_there, read_run, resumed_at
from bert_tools.report.run_files import RunFiles, read_environment, read_last_lines

State = Literal[
    "target reached",
    "target missed",
    "finished, no target",
    "ended, no target",
    "stopped",
    "no end recorded",
]

_BYTES_OF_A_RECORD = 100  # least size of a log's record
MAX_ATTEMPTS = 100  # most interrupted attempts that are read
_NO_CURVES = "loss, tokens/s, step times, imbalance, clipping, skipped steps and memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run of a report.

    `run.timing` is of the last attempt; `resumes` has the samples after which each attempt resumed;
    `attempts` counts those before the last. `last_written` is the time of the last write to a file
    of a run without an end, in seconds since the epoch. `absent` has sentences about missing files.
    """

    label: str
    run: Run
    state: State
    environment: Mapping[str, str]
    attempts: int
    resumes: tuple[int, ...]
    last_lines: tuple[str, ...]
    last_written: float | None
    absent: tuple[str, ...]
    diagnosis: Diagnosis

    @property
    def steps(self) -> int | None:
        """Updates so far, if known."""
        if self.run.outcome is not None:
            return self.run.outcome.steps
        return self.run.records[-1]["step"] if self.run.records else None

    @property
    def samples(self) -> int | None:
        """Sequences trained so far, if known."""
        run = self.run
        if run.outcome is not None:
            return run.outcome.samples
        known = [run.timing.train_samples] if run.timing else []
        known += [run.records[-1]["samples"]] if run.records else []
        known += [run.evaluations[-1].samples] if run.evaluations else []
        return next((each for each in known if each is not None), None)

    @property
    def samples_to_target(self) -> int | None:
        """Samples at the first evaluation that reached the target."""
        target = self.run.task.target_accuracy
        reached = (each for each in self.run.evaluations if each.accuracy >= (target or 0))
        return next((each.samples for each in reached), None) if target is not None else None


def read_facts(files: RunFiles) -> RunFacts:
    """Read a run. Raises DataError or ConfigError for a file that is wrong, not for one missing."""
    run = read_run(files)
    environment = read_if_there(files, "environment.json", read_environment) or {}
    earlier = _earlier_attempts(files.folder) if files.folder else []
    resumes = {*earlier, run.timing.resumed_at if run.timing else None}
    state = _state(run)
    return RunFacts(
        label=files.label,
        run=run,
        state=state,
        environment=environment,
        attempts=len(earlier),
        resumes=tuple(sorted(each for each in resumes if each is not None)),
        last_lines=read_if_there(files, "stdout.log", read_last_lines) or (),
        last_written=_last_written(files) if state == "no end recorded" else None,
        absent=_absent(files, run, environment),
        diagnosis=diagnose(run),
    )


def _state(run: Run) -> State:
    if run.ended is None:
        return "no end recorded"
    if not run.task.has_target:
        if run.outcome is None:  # a log alone says "aborted", finished or stopped
            return "ended, no target"
        return "finished, no target" if run.ended == "success" else "stopped"
    if run.ended == "success":
        return "target reached"
    return "stopped" if run.outcome is not None and run.outcome.stopped_by else "target missed"


def _absent(files: RunFiles, run: Run, environment: Mapping[str, str]) -> tuple[str, ...]:
    has_metrics = files.has("metrics.jsonl")
    missing = "metrics.jsonl holds no record yet" if has_metrics else "there is no metrics.jsonl"
    of_settings = "so of the settings only those of the log are known"
    sentences = {
        f"{missing}, so {_NO_CURVES} are not known": run.records,
        "there is no evaluation yet, so no accuracy": run.evaluations,
        "there is no MLPerf log, so time to train and start-up are not known": files.log,
        f"there is no config.toml, {of_settings}": run.config,
        "there is no environment.json, so hardware and commit are not known": environment,
    }
    return tuple(sentence for sentence, there in sentences.items() if not there)


def _earlier_attempts(folder: Path) -> list[int | None]:
    """The attempts before the last: the samples after which each resumed, if it did."""
    stem = folder.name.replace("run_", "result_")
    found: list[int | None] = []
    for number in range(MAX_ATTEMPTS):
        path = folder / "interrupted" / f"{stem}_{number}.txt"
        if not os.path.lexists(path):
            break
        if path.is_file() and path.stat().st_size < _BYTES_OF_A_RECORD:
            found.append(None)  # killed before its first record was complete
        else:
            found.append(resumed_at(read_foreign_log(path, str(path))))
    return found


def _last_written(files: RunFiles) -> float | None:
    paths = [files.folder / "metrics.jsonl"] if files.folder else []
    paths += [files.log] if files.log else []
    times = [path.stat().st_mtime for path in paths if path.exists()]
    return max(times, default=None)
