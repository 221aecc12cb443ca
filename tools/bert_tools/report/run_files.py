"""Finding the files of runs, and reading them strictly as untrusted input."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import SEEK_END
from itertools import islice
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import is_number
from mlperf_bert.common.errors import ConfigError, DataError, one_line, say
from mlperf_bert.common.records import read_record
from mlperf_bert.common.untrusted import (
    in_brief,
    open_regular_file,
    parse_json_object,
    read_regular_file,
)

MAX_RUNS = 32
MAX_METRICS_BYTES_TOGETHER = 64 * 2**20  # over all runs
_MAX_ENTRIES = 100_000  # in a searched directory
_OF_A_RUN = ("metrics.jsonl", "config.toml", "environment.json", "outcome.json")
_RUN = re.compile(r"run_(\d{1,6})")

MAX_METRICS_BYTES = 32 * 2**20  # 50,000 records of ours
MAX_LINE_BYTES = 8 * 2**10  # a record of ours has 0.7 kB
MAX_RECORDS = 200_000
MAX_FACTS = 200  # in environment.json
_LONGEST_FACT = 300  # characters
_LARGEST = 1e300
_PART_BYTES, _LAST_LINES = 4096, 12  # of stdout.log
_GUESS = re.compile(r"context-free guess (0\.\d{1,9}) \(")
AS_WRITTEN = "use the file as the run wrote it"
_GIVE_RUN = "give a run directory, which train makes below runs/"


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
        """The name that a user would give."""
        return str(self.folder or self.log)

    def has(self, name: str) -> bool:
        """True if the folder has an entry of this name, a file or not."""
        return self.folder is not None and os.path.lexists(self.folder / name)


def find_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """All runs of run directories, their `run_<i>`, and MLPerf logs, without repetition.

    Raises DataError if a path has none, ConfigError if there are too many.
    """
    by_place: dict[str, RunFiles] = {}
    for run in (run for path in paths for run in _runs_of(path)):
        by_place.setdefault(os.path.realpath(run.name), run)
    found = list(by_place.values())
    if len(found) > MAX_RUNS:
        problem = f"are {len(found):,} runs"
        raise ConfigError("RUN", problem, f"name {MAX_RUNS} of them at most")
    metrics = [run.folder / "metrics.jsonl" for run in found if run.folder]
    num_bytes = sum(path.stat().st_size for path in metrics if path.is_file())
    if num_bytes > MAX_METRICS_BYTES_TOGETHER:
        problem = f"have {num_bytes / 2**20:,.0f} MiB of metrics together"
        remedy = f"name fewer: {MAX_METRICS_BYTES_TOGETHER // 2**20} MiB are read at most"
        raise ConfigError("RUN", problem, remedy)
    labels = _labels(found)
    return [replace(run, label=label) for run, label in zip(found, labels, strict=True)]


def only_run(path: Path) -> RunFiles:
    """The only run of a path with metrics. Raises DataError if there is none or several."""
    if path.exists() and not path.is_dir():
        return RunFiles(None, path)
    runs = [run for run in find_runs([path]) if run.has("metrics.jsonl")]
    if not runs:
        remedy = f"{_GIVE_RUN}, or an MLPerf log"
        raise DataError(str(path), "holds no metrics.jsonl, nor a run_<i> with one", remedy)
    if len(runs) > 1:
        raise DataError(str(path), f"holds {len(runs)} runs", f"give one of them: {runs[0].name}")
    return runs[0]


def newest_run(path: Path) -> Path | None:
    """The directory `run_<i>` that `path` is or contains, of the highest i; None if none exists.

    Raises DataError if `path` is no directory or cannot be read.
    """
    try:
        names = _names_in(path, _GIVE_RUN)
    except FileNotFoundError:
        return None
    runs = sorted(filter(_RUN.fullmatch, names), key=lambda name: (int(name[4:]), name))
    newest = next((path / name for name in reversed(runs) if os.path.isdir(path / name)), None)
    is_run = _RUN.fullmatch(path.name) or names & {*_OF_A_RUN}
    return newest or (path if is_run else None)


def _runs_of(path: Path) -> list[RunFiles]:
    if not path.exists():
        raise DataError(str(path), "does not exist", "give a run directory or an MLPerf log")
    if not path.is_dir():
        return [RunFiles(None, path)]
    if _RUN.fullmatch(path.name) or (path / "metrics.jsonl").exists():
        found = [RunFiles(path, _log_of(path))]
        found = [run for run in found if any(map(run.has, _OF_A_RUN))]
    else:
        names = _names_in(path, "give a directory that you can read")
        matches = (re.fullmatch(r"(?:run_(\d{1,6})|result_(\d{1,6})\.txt)", name) for name in names)
        found = []
        for index in sorted({match[1] or match[2] for match in matches if match}, key=int):
            folder, log = path / f"run_{index}", path / f"result_{index}.txt"
            has_log = log.name in names
            found.append(RunFiles(folder if folder.is_dir() else None, log if has_log else None))
        found = [run for run in found if run.folder or run.log]
    if not found:
        problem = "holds no run: no run_<i>, no result_<i>.txt"
        raise DataError(str(path), problem, f"{_GIVE_RUN}, or an MLPerf log")
    return found


def _names_in(directory: Path, remedy: str) -> set[str]:
    """Names in a directory. Raises FileNotFoundError, and DataError for other failures."""
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in islice(entries, _MAX_ENTRIES)}
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "is no name of a directory"
        raise DataError(str(directory), problem, remedy) from None


def _log_of(folder: Path) -> Path | None:
    folder = folder if folder.name else folder.absolute()
    if not folder.name.startswith("run_"):
        return None
    log = folder.parent / f"{folder.name.replace('run_', 'result_')}.txt"
    return log if os.path.lexists(log) else None


def _labels(runs: Sequence[RunFiles]) -> list[str]:
    """Labels of runs: the shortest of three kinds of name that is unique."""
    labels: list[str] = []
    for parts in (1, 2, 3):
        labels = [_label(run, parts) for run in runs]
        if max(Counter(labels).values(), default=0) == 1:
            return labels
    return [f"{number}. {label}" for number, label in enumerate(labels, 1)]


def _label(run: RunFiles, parts: int) -> str:
    """A label: for `runs/a/run_0` a, a/run_0, or runs/a/run_0; for a log its name, with folders."""
    path = Path(run.name).absolute()
    names = path.parts[1:]
    if run.folder is not None and parts == 1 and path.name.startswith("run_"):
        return names[-2] if len(names) > 1 else names[-1]
    return "/".join(names[-parts:])


def read_metrics(path: Path, *, skips: bool = False) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`: finite numbers or None by key, `step` ascending.

    An incomplete last line is left out: the run was killed, or is still running. With `skips`, a
    damaged line is left out too, and said in one line on stderr.

    Raises DataError naming the file and the line: too large, no record, a number that is none, or
    one of `step`, `samples`, `loss`, `mlm_accuracy` and `skipped_steps` missing or impossible.
    """
    try:
        contents = read_regular_file(path, MAX_METRICS_BYTES)
    except FileNotFoundError:
        raise DataError(str(path), "is missing", "give the directory of a run") from None
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", AS_WRITTEN) from None
    lines = contents.split(b"\n")[:-1]
    if len(lines) > MAX_RECORDS:
        raise DataError(str(path), f"has more than {MAX_RECORDS:,} lines", AS_WRITTEN)
    records: list[dict[str, Any]] = []
    skipped: list[DataError] = []
    for number, line in enumerate(lines, 1):
        last_step = records[-1]["step"] if records else None
        where = f"{path}, line {number}"
        try:
            record = read_metrics_record(line, where, None if skips else last_step)
        except DataError as error:
            if not skips:
                raise
            skipped.append(error)
            continue
        if last_step is not None and record["step"] <= last_step:
            skipped.append(DataError(where, f"goes back to step {record['step']}", AS_WRITTEN))
            if len(records) > 1 and record["step"] <= records[-2]["step"]:
                continue
            records.pop()  # it is the one before that does not fit
        records.append(record)
    if skipped:
        where, problem, _ = map(one_line, skipped[0].args)
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        say(f"{where}: {problem}; skipped{more}")
    return records


def read_metrics_record(line: bytes, where: str, last_step: int | None) -> dict[str, Any]:
    """Parse one line of a `metrics.jsonl`, without its line end; steps must ascend.

    Raises DataError, which begins with `where`.
    """
    if len(line) > MAX_LINE_BYTES:
        raise DataError(where, f"has more than {MAX_LINE_BYTES:,} bytes", AS_WRITTEN)
    try:
        record = parse_json_object(line)
    except ValueError as error:
        raise DataError(where, f"is no record ({error})", AS_WRITTEN) from None
    for key, value in record.items():
        if value is not None and not (is_number(value) and abs(value) < _LARGEST):
            raise DataError(where, f"{in_brief(key)} is {in_brief(value)}, no number", AS_WRITTEN)
    for key in ("step", "samples", "skipped_steps"):
        if type(record.get(key)) is not int or record[key] < 0:
            problem = f"{key} is {in_brief(record.get(key))}, no count"
            raise DataError(where, problem, AS_WRITTEN)
    if missing := {"loss", "mlm_accuracy"} - record.keys():
        raise DataError(where, f"{min(missing)} is missing", AS_WRITTEN)
    accuracy = record["mlm_accuracy"]
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise DataError(where, f"mlm_accuracy is {in_brief(accuracy)}, not in 0 .. 1", AS_WRITTEN)
    if last_step is not None and record["step"] <= last_step:
        raise DataError(where, f"goes back to step {record['step']}", AS_WRITTEN)
    return record


def read_environment(path: Path) -> dict[str, str]:
    """A run's environment as flat texts in order; `packages` are keyed like `packages.torch`.

    Raises DataError if it is missing, damaged, of another version or has a value that is no fact.
    """
    record = read_record(path, missing="is missing", remedy=f"{AS_WRITTEN}, or remove it")
    record.check_version(1, key="schema_version")
    found: dict[str, str] = {}
    for key, value in record.values.items():
        if key == "schema_version":
            continue
        of_key = (
            {f"{key}.{name}": fact for name, fact in value.items()}
            if type(value) is dict
            else {key: value}
        )
        for name, fact in of_key.items():
            if isinstance(fact, bool | int | float):
                fact = in_brief(fact)
            if not isinstance(fact, str | None):
                problem = f"holds {in_brief(fact)}, no text or number"
                raise record.error(in_brief(key), problem)
            found[name] = (fact or "")[:_LONGEST_FACT]
        if len(found) > MAX_FACTS:
            raise DataError(str(path), f"holds more than {MAX_FACTS} facts", record.remedy)
    return found


def device_in_words(environment: Mapping[str, str]) -> str:
    """The known part of `2 ranks on cpu`; empty if nothing is known."""
    ranks, device = environment.get("world_size"), environment.get("device")
    if not ranks or not device:
        return device or ""
    return f"{ranks} rank{'' if ranks == '1' else 's'} on {device}"


def read_guess(path: Path) -> float | None:
    """What `train` has said of a guess without context in `stdout.log`: its accuracy."""
    said = _GUESS.search(_part_of(path, 0))
    return float(said[1]) if said else None


def read_last_lines(path: Path) -> tuple[str, ...]:
    """The last lines of the run's output. Raises DataError if that is no regular file."""
    text = _part_of(path, -_PART_BYTES)
    return tuple(line for line in text.split("\n") if line.strip())[-_LAST_LINES:]


def _part_of(path: Path, start: int) -> str:
    try:
        with open_regular_file(path) as file:
            file.seek(start if start >= 0 else max(0, file.seek(0, SEEK_END) + start))
            return (file.read(_PART_BYTES) or b"").decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", AS_WRITTEN) from None
