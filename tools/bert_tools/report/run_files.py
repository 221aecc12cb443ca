"""Finding the files of runs, and reading those that hold numbers; damaged lines are left out."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import is_number
from mlperf_bert.errors import ConfigError, DataError, one_line, say
from mlperf_bert.files import open_regular_file

MAX_RUNS = 32  # as many as the page has colours and dashes
_OF_A_RUN = ("metrics.jsonl", "config.toml", "environment.json", "outcome.json")
_RUN = re.compile(r"run_(\d{1,6})")
_NEEDED = frozenset(("step", "samples", "skipped_steps", "loss", "mlm_accuracy"))
_COUNTS = ("step", "samples", "skipped_steps")
_AS_WRITTEN = "use the file as the run wrote it"
_GIVE_RUN = "give a run directory, which train makes below runs/"

Record = Mapping[str, Any]


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
    records, skipped = metrics_in(path)
    if skipped:
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        say(f"{one_line(str(path))}, {skipped[0]}; skipped{more}")
    return records


def metrics_in(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Records as in `read_metrics`, and what is wrong with each skipped line, as printable text.

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
    return records, skipped


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
