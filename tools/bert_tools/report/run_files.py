"""Finds the files of the runs that a report is asked for."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mlperf_bert.common.errors import ConfigError, DataError

MAX_RUNS = 32
MAX_METRICS_BYTES_TOGETHER = 64 * 2**20  # of all runs
_MAX_ENTRIES = 100_000  # of a directory that is looked through
_OF_A_RUN = ("metrics.jsonl", "config.toml", "environment.json", "outcome.json")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Where a run's files are: its folder `run_<i>`, its MLPerf log, or both; `label` tells it
    from the other runs of the report.
    """

    folder: Path | None
    log: Path | None
    label: str = ""

    @property
    def name(self) -> str:
        """As the user would name it."""
        return str(self.folder or self.log)


def find_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """All runs of run directories, their `run_<i>`, and MLPerf logs, each once however named.

    Raises DataError where there is none in a path, ConfigError where there are too many.
    """
    by_place: dict[str, RunFiles] = {}
    for run in (run for path in paths for run in _runs_of(path)):
        by_place.setdefault(os.path.realpath(run.name), run)
    found = list(by_place.values())
    if len(found) > MAX_RUNS:
        problem = f"are {len(found):,} runs"
        raise ConfigError("RUN", problem, f"name {MAX_RUNS} of them at most")
    num_bytes = sum(_metrics_bytes(run) for run in found)
    if num_bytes > MAX_METRICS_BYTES_TOGETHER:
        problem = f"have {num_bytes / 2**20:,.0f} MiB of metrics together"
        remedy = f"name fewer: {MAX_METRICS_BYTES_TOGETHER // 2**20} MiB are read at most"
        raise ConfigError("RUN", problem, remedy)
    return [
        RunFiles(run.folder, run.log, label)
        for run, label in zip(found, _labels(found), strict=True)
    ]


def _runs_of(path: Path) -> list[RunFiles]:
    if not path.exists():
        raise DataError(str(path), "does not exist", "give a run directory or an MLPerf log")
    if not path.is_dir():
        return [RunFiles(None, path)]
    if re.fullmatch(r"run_\d{1,6}", path.name) or (path / "metrics.jsonl").exists():
        if not any(os.path.lexists(path / name) for name in _OF_A_RUN):
            raise _no_run(path)
        return [RunFiles(path, _log_of(path))]
    names = _names_in(path)
    found = []
    for index in sorted(_indexes(names), key=int):
        folder, log = path / f"run_{index}", path / f"result_{index}.txt"
        folder_or_none = folder if folder.name in names and folder.is_dir() else None
        found.append(RunFiles(folder_or_none, log if log.name in names else None))
    found = [run for run in found if run.folder or run.log]
    if not found:
        raise _no_run(path)
    return found


def _names_in(directory: Path) -> set[str]:
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in islice(entries, _MAX_ENTRIES)}
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise DataError(str(directory), reason, "give a directory that you can read") from None


def _indexes(names: Iterable[str]) -> set[str]:
    matches = (re.fullmatch(r"(?:run_(\d{1,6})|result_(\d{1,6})\.txt)", name) for name in names)
    return {match[1] or match[2] for match in matches if match}


def _log_of(folder: Path) -> Path | None:
    folder = folder if folder.name else folder.absolute()
    if not folder.name.startswith("run_"):
        return None
    log = folder.parent / f"{folder.name.replace('run_', 'result_')}.txt"
    return log if os.path.lexists(log) else None


def _metrics_bytes(run: RunFiles) -> int:
    path = run.folder / "metrics.jsonl" if run.folder else None
    return path.stat().st_size if path and path.is_file() else 0


def _no_run(path: Path) -> DataError:
    remedy = "give a run directory, which train makes below runs/, or an MLPerf log"
    return DataError(str(path), "holds no run: no run_<i>, no result_<i>.txt", remedy)


def _labels(runs: Sequence[RunFiles]) -> list[str]:
    """The shortest of three kinds of name that tells all runs apart."""
    labels: list[str] = []
    for parts in (1, 2, 3):
        labels = [_label(run, parts) for run in runs]
        if max(Counter(labels).values(), default=0) == 1:
            return labels
    return [f"{number}. {label}" for number, label in enumerate(labels, 1)]


def _label(run: RunFiles, parts: int) -> str:
    """Of `runs/a/run_0` it is a, a/run_0, or runs/a/run_0; of a log its name, with its folders."""
    path = (run.folder or run.log or Path()).absolute()
    names = path.parts[1:]
    if run.folder is not None and parts == 1 and path.name.startswith("run_"):
        return names[-2] if len(names) > 1 else names[-1]
    return "/".join(names[-parts:])
