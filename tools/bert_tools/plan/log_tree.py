"""Finds MLPerf logs below a directory, and makes one entry per system. No torch.

Source of a system's score: MLPerf's training rules, and `rcp_checker` and `package_checker` of
mlperf-logging: the mean without the fastest and the slowest run; one run may have failed and
then counts as the slowest.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import RunLog, is_number, read_foreign_log
from bert_tools.common.means import olympic_mean
from bert_tools.plan.entries import Entry, Skipped
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief, parse_json_object, read_regular_file

# A clone of a round has some ten thousand files; MLPerf's layout in it is six directories deep.
MOST_FILES, MOST_DEPTH = 500_000, 16
_LOG = re.compile(r"result_\d{1,5}\.txt", re.ASCII)
_BENCHMARK = "bert"
_FEWEST_FOR_A_SCORE = 3  # of the runs that an olympic mean takes
_MOST_FAILED = 1  # of them
_MAX_DESCRIPTION_BYTES = 2**20
_MOST_COUNT = 10**9
_MOST_SAMPLES = 10**12  # published runs have up to ten million
_ROUND = re.compile(r"(?:training_results_)?v(\d{1,2}\.\d{1,2})")
_REMEDY = "give the log of a run that ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class _LoggedRun:
    """The run of one log: minutes on the clock, infinite if it failed, and samples if logged."""

    minutes: float
    samples: int | None
    accelerators: int | None
    division: str
    submitter: str
    global_batch_size: int | None


def read_tree(root: Path) -> tuple[list[Entry], list[Skipped]]:
    """The entries below a directory, by path, and the sources that were left out.

    Every directory with `result_<n>.txt` in it is one system; links are not followed. In MLPerf's
    layout, results/<system>/<benchmark>/, only the benchmark bert is read. Logs of another
    benchmark and unreadable ones are left out and named. Raises DataError if there are no logs, or
    too many files to look through.
    """
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    found = False
    for directory, logs in _directories(root, skipped):
        found = True
        entry, problems = system_entry(directory, logs)
        skipped += problems
        if entry is not None:
            entries.append(entry)
    if not found:
        remedy = "give a directory with results/<system>/bert/result_<n>.txt below it"
        raise DataError(str(root), "holds no MLPerf log of bert", remedy)
    return entries, skipped


def _directories(root: Path, skipped: list[Skipped]) -> Iterator[tuple[Path, list[Path]]]:
    """Directories with logs, by path, each with its logs by number; `skipped` takes the rest."""
    waiting = [(root, 0)]
    seen = 0
    while waiting:
        directory, depth = waiting.pop()
        below, logs = [], []
        try:
            with os.scandir(directory) as listed:
                found = list(islice(listed, MOST_FILES + 1))
        except OSError as error:
            skipped.append(Skipped(str(directory), error.strerror or "cannot be read"))
            continue
        for each in found:
            seen += 1
            if seen > MOST_FILES:
                problem = f"holds more than {MOST_FILES:,} files"
                raise DataError(str(root), problem, "give a directory nearer to the logs")
            if _LOG.fullmatch(each.name):
                logs.append(Path(each.path))
            elif each.is_dir(follow_symlinks=False):
                below.append(Path(each.path))
        if logs and (_system(directory) is None or directory.name == _BENCHMARK):
            yield directory, sorted(logs, key=lambda path: (len(path.name), path.name))
        if depth < MOST_DEPTH:
            waiting += [(path, depth + 1) for path in sorted(below, reverse=True)]
        elif below:
            problem = f"has directories {MOST_DEPTH + 1} below {root}, which are not looked into"
            skipped.append(Skipped(str(directory), problem))


def system_entry(directory: Path, logs: Sequence[Path]) -> tuple[Entry | None, list[Skipped]]:
    """The entry made from one directory's logs, and the logs that could not be used.

    A log that cannot be read counts as a failed run. The entry is None if the logs make no score or
    do not give the number of accelerators; the second value then has the reason.
    """
    runs, skipped = [], []
    for path in logs:
        try:
            runs.append(_read_run(path, str(path)))
        except DataError as error:
            skipped.append(_skipped(error, str(path)))
    if not runs:
        return None, skipped
    description, problem = _description(directory)
    skipped += problem
    try:
        return _entry(directory, runs, len(logs) - len(runs), description), skipped
    except DataError as error:
        return None, [*skipped, _skipped(error, str(directory))]


def _read_run(path: Path, name: str) -> _LoggedRun:
    """Read the run of one log.

    Raises DataError if it is no log, is of another benchmark, or its run did not end.
    """
    log = read_foreign_log(path, name)
    benchmark = log.last_text("submission_benchmark")
    if benchmark is not None and _BENCHMARK not in benchmark.casefold():
        raise DataError(name, f"is of the benchmark {in_brief(benchmark)}", "give logs of bert")
    start, stop = log.named("run_start"), log.named("run_stop")
    if not start or not stop:
        missing = "run_stop" if start else "run_start"
        raise DataError(name, f"holds no {missing}", _REMEDY)
    milliseconds = stop[-1].time_ms - start[-1].time_ms
    if milliseconds <= 0:
        raise DataError(name, "ends before it starts", _REMEDY)
    succeeded = stop[-1].metadata.get("status") == "success"
    batch = log.last_number("global_batch_size")
    return _LoggedRun(
        minutes=milliseconds / 60_000 if succeeded else math.inf,
        samples=_samples(log),
        accelerators=_ranks(log),
        division=log.last_text("submission_division") or "",
        submitter=log.last_text("submission_org") or "",
        global_batch_size=int(batch) if batch and batch <= _MOST_COUNT else None,
    )


def _entry(
    directory: Path, runs: Sequence[_LoggedRun], unreadable: int, description: Mapping[str, Any]
) -> Entry:
    good = [run for run in runs if run.minutes < math.inf]
    failed = len(runs) - len(good) + unreadable
    rated = [run for run in good if run.samples is not None]
    return Entry(
        system=_system(directory) or directory.name,
        accelerators=_accelerators(directory, runs, description),
        time_min=_score(directory, runs, unreadable),
        samples=_mean([float(run.samples or 0) for run in rated]),
        seq_per_s=_mean([(run.samples or 0) / (60 * run.minutes) for run in rated]),
        round=_round(directory),
        submitter=_text(description, "submitter") or runs[0].submitter,
        division=runs[0].division or _text(description, "division"),
        accelerator=_text(description, "accelerator_model_name"),
        global_batch_size=runs[0].global_batch_size,
        failed_runs=failed,
        runs=len(runs) + unreadable,
    )


def _score(directory: Path, runs: Sequence[_LoggedRun], unreadable: int) -> float:
    """The olympic mean, or the plain mean of too few runs for it. Raises DataError."""
    minutes = [run.minutes for run in runs] + [math.inf] * unreadable
    failed = sum(each == math.inf for each in minutes)
    most = _MOST_FAILED if len(minutes) >= _FEWEST_FOR_A_SCORE else 0
    if failed > most:
        problem = f"{failed} of {len(minutes)} runs failed or cannot be read"
        raise DataError(str(directory), problem, f"a score may leave out {most} of so many")
    if len(minutes) < _FEWEST_FOR_A_SCORE:
        return math.fsum(minutes) / len(minutes)
    return olympic_mean(minutes)


def _samples(log: RunLog) -> int | None:
    """Sequences trained on: `train_samples`, else the count at the last evaluation.

    Raises DataError for an absurdly large count, so that everything computed from it is finite.
    """
    logged = log.last_number("train_samples")
    samples = _evaluated_samples(log) if logged is None else int(logged) or None
    if samples is not None and samples > _MOST_SAMPLES:
        problem = f"says more than {_MOST_SAMPLES:,} samples"
        raise DataError(log.name, problem, "use the log as the run wrote it")
    return samples


def _evaluated_samples(log: RunLog) -> int | None:
    for record in reversed(log.named("eval_accuracy")):
        for key in ("samples_count", "epoch_num"):
            value = record.metadata.get(key)
            if isinstance(value, int | float) and is_number(value) and value > 1:
                return int(value)  # 1 is an epoch number, which some logs have there
    return None


def _ranks(log: RunLog) -> int | None:
    """Number of accelerators by the log itself: our own records, or those of MLPerf HPC."""
    ranks = log.last_number("number_of_ranks")
    if ranks is None:
        nodes, each = log.last_number("number_of_nodes"), log.last_number("accelerators_per_node")
        ranks = None if nodes is None or each is None else nodes * each
    return int(ranks) if ranks is not None and 1 <= ranks <= _MOST_COUNT else None


def _accelerators(
    directory: Path, runs: Sequence[_LoggedRun], description: Mapping[str, Any]
) -> int:
    counts = {run.accelerators for run in runs if run.accelerators is not None}
    if len(counts) > 1:
        problem = f"holds runs on {' and '.join(f'{each:,}' for each in sorted(counts))} ranks"
        raise DataError(str(directory), problem, "put the logs of each size into a directory")
    if counts:
        return counts.pop()
    nodes, each = (
        _count(description.get(field)) for field in ("number_of_nodes", "accelerators_per_node")
    )
    if not nodes or not each:
        remedy = "put results/<system>/bert/ beside systems/<system>.json, which says it"
        raise DataError(str(directory), "does not say how many accelerators it is of", remedy)
    return nodes * each


def _description(directory: Path) -> tuple[Mapping[str, Any], list[Skipped]]:
    """systems/<system>.json for results/<system>/<benchmark>; empty if there is none."""
    system = _system(directory)
    path = directory.parents[2] / "systems" / f"{system}.json" if system else None
    if path is None or not os.path.lexists(path):
        return {}, []
    try:
        return parse_json_object(read_regular_file(path, _MAX_DESCRIPTION_BYTES)), []
    except OSError as error:
        return {}, [Skipped(str(path), error.strerror or "cannot be read")]
    except ValueError as error:
        return {}, [Skipped(str(path), f"is no system description ({error})")]


def _system(directory: Path) -> str | None:
    """The system's name if the directory is results/<system>/<benchmark>; else None."""
    parts = directory.parts
    return parts[-2] if len(parts) >= 3 and parts[-3] == "results" else None


def _round(directory: Path) -> str:
    """The round in a clone's path, such as training_results_v2.1; empty if none is named."""
    found = [match[1] for part in directory.parts if (match := _ROUND.fullmatch(part))]
    return found[-1] if found else ""


def _text(description: Mapping[str, Any], field: str) -> str:
    value = description.get(field)
    return in_brief(value)[1:-1] if isinstance(value, str) else ""


def _count(value: object) -> int:
    """A positive number in a description, where it is usually a string; else 0."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value, re.ASCII):
        return int(value)
    return value if type(value) is int and 0 < value <= _MOST_COUNT else 0


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _skipped(error: DataError, name: str) -> Skipped:
    where, problem, _ = error.args
    line = where.removeprefix(name).lstrip(", ")  # of a log's record
    return Skipped(name, f"{line} {problem}" if line else problem)
