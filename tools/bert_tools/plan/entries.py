"""Reads and filters MLPerf results for `plan law`, from the published table or from raw logs.

A system's score follows MLPerf's training rules. It is the olympic mean, which is the mean of the
runs' times without the fastest and the slowest run. At most one run may fail, and a failed run
counts as the slowest.
This module needs no torch.
"""

import csv
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import RunLog, is_number, read_foreign_log
from bert_tools.common.results import olympic_mean
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import parse_json_object, read_regular_file

KEYS = (
    *("round", "submitter", "division", "accelerator", "system"),
    *("accelerators", "global_batch_size", "time_min", "samples"),
)
FILTER_HELP = (
    "use only results that meet this condition, such as round=2.1, submitter=NVIDIA, "
    "accelerator~A100 or accelerators>=64. Can be repeated, and then all conditions must hold. "
    f"KEY is one of {', '.join(KEYS)}. = compares without case, ~ searches for text, and >= and <= "
    "compare numbers, rounds included"
)
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(>=|<=|=|~)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
}
_BENCHMARK = "bert"
_MAX_SAMPLES = 10**12  # a log that claims more is wrong
_MIN_RUNS_FOR_MEAN = 3  # an olympic mean needs this many runs
_MAX_DESCRIPTION_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One system's result. Values that the source does not contain are None or empty.

    `time_min` is the olympic mean of the runs' times in minutes. `samples` is the mean number of
    sequences that a run trained on. `seq_per_s` is the mean of samples divided by time, which
    includes evaluation.
    """

    system: str
    accelerators: int | None
    time_min: float | None
    samples: float | None
    seq_per_s: float | None
    round: str = ""
    submitter: str = ""
    division: str = ""
    accelerator: str = ""
    global_batch_size: int | None = None

    @property
    def name(self) -> str:
        """Return the round, submitter and system, which tables and messages show as the name."""
        return " ".join(filter(None, (self.round, self.submitter, self.system)))


def published_entries() -> list[Entry]:
    """Return the 348 published results of MLPerf Training BERT, v0.7 to v5.0."""
    text = resources.files(__package__).joinpath("published_results.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [_published(row) for row in csv.DictReader(lines)]


def published_minutes(accelerator: str, count: int) -> list[float]:
    """Return the published times to train in the closed division, in minutes, in ascending order.

    Args:
        accelerator: regular expression that finds the accelerator's name.
        count: number of accelerators.
    """
    return sorted(
        entry.time_min
        for entry in published_entries()
        if entry.time_min is not None
        and entry.division == "closed"
        and entry.accelerators == count
        and re.search(accelerator, entry.accelerator)
    )


def _published(row: Mapping[str, str]) -> Entry:
    millions = _number(row["samples_million"])
    return Entry(
        system=row["system"],
        accelerators=int(row["accelerators"]) if row["accelerators"] else None,
        time_min=_number(row["time_min"]),
        samples=None if millions is None else millions * 1e6,
        seq_per_s=_number(row["seq_per_s"]),
        round=row["round"],
        submitter=row["submitter"],
        division=row["division"],
        accelerator=row["accelerator"],
        global_batch_size=int(row["global_batch"]) if row["global_batch"] else None,
    )


def chosen(entries: Sequence[Entry], conditions: Sequence[str]) -> list[Entry]:
    """Return the entries that meet all conditions. Raises ConfigError for an invalid condition."""
    tests = [_test(condition) for condition in conditions]
    return [entry for entry in entries if all(test(entry) for test in tests)]


def _test(condition: str) -> Callable[[Entry], bool]:
    """Return a function that tests whether an entry meets a condition.

    Raises ConfigError if the condition is invalid.
    """
    match = _CONDITION.fullmatch(condition)
    if match is None or match[1] not in KEYS:
        remedy = f"write for example accelerator~A100, with one of the keys {', '.join(KEYS)}"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)
    key, sign, wanted = match.groups()
    text, limit = wanted.casefold(), _number(wanted)
    if sign in (">=", "<=") and limit is None:
        remedy = f"write a number after {sign}, such as {key}{sign}64"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)

    def meets(entry: Entry) -> bool:
        value = str(getattr(entry, key)).casefold()
        if sign == "~":
            return text in value
        number = _number(value)
        if number is None or limit is None:
            return sign == "=" and value == text
        return _COMPARE[sign](number, limit)

    return meets


def _number(text: str) -> float | None:
    """Parse a text as a number, or return None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def read_results(root: Path) -> tuple[list[Entry], list[DataError]]:
    """Read the MLPerf results of all systems in a directory.

    Returns the entries, sorted by path, and an error for each log or system that cannot be used.
    Every directory with `result_<n>.txt` is one system. In MLPerf's layout,
    results/<system>/<benchmark>/, only the benchmark bert is read, and systems/<system>.json
    describes the system. A log that cannot be read counts as a failed run. Raises DataError if
    there are no logs.
    """
    systems: dict[Path, list[Path]] = {}
    for path in sorted(root.resolve().rglob("result_*.txt")):
        in_layout = path.parts[-4:-3] == ("results",)
        if path.parent.name == _BENCHMARK or not in_layout:
            systems.setdefault(path.parent, []).append(path)
    if not systems:
        remedy = "pass a directory that contains results/<system>/bert/result_<n>.txt"
        raise DataError(str(root), "contains no MLPerf log of the benchmark bert", remedy)
    entries: list[Entry] = []
    skipped: list[DataError] = []
    for directory, paths in systems.items():
        logs = []
        for path in paths:
            try:
                logs.append(_read_log(path))
            except DataError as error:
                skipped.append(error)
        try:
            entries.append(_entry(directory, logs, len(paths) - len(logs)))
        except DataError as error:
            skipped.append(error)
    return entries, skipped


def _read_log(path: Path) -> RunLog:
    """Read one log.

    Raises DataError if the benchmark is not bert, or if the run did not end or was resumed.
    """
    log = read_foreign_log(path, str(path))
    benchmark = log.last_text("submission_benchmark") or _BENCHMARK
    if _BENCHMARK not in benchmark.casefold():
        raise DataError(log.name, f"the benchmark is {benchmark!r}", "pass MLPerf logs of bert")
    start, stop = log.named("run_start"), log.named("run_stop")
    if not start or not stop or stop[-1].time_ms <= start[-1].time_ms:
        problem = "the run did not end"
        raise DataError(log.name, problem, "pass the log of a complete run")
    if any(record.value is True for record in log.named("resumed")):
        problem = "the run was resumed, so this log has only the time of its last attempt"
        raise DataError(log.name, problem, "pass the log of a run that was not interrupted")
    return log


def _entry(directory: Path, logs: Sequence[RunLog], unreadable: int) -> Entry:
    """Return the entry of one system from the logs in its directory.

    `unreadable` is the number of further logs in the directory that cannot be read.

    Raises DataError if too many runs failed for a score, if their numbers of ranks differ, or if
    their number of accelerators is not known.
    """
    stated = (log.last_number("number_of_ranks") for log in logs)
    ranks = {each for each in stated if each is not None}
    if len(ranks) > 1:
        found = " and ".join(f"{each:.0f}" for each in sorted(ranks))
        problem = f"contains runs with different numbers of ranks, {found}"
        raise DataError(str(directory), problem, "pass one directory per system")
    minutes = [math.inf] * unreadable  # a failed run counts as infinitely slow
    samples, rates = [], []
    for log in logs:
        start, stop = log.named("run_start")[-1], log.named("run_stop")[-1]
        if stop.metadata.get("status") != "success":
            minutes.append(math.inf)
            continue
        minutes.append((stop.time_ms - start.time_ms) / 60_000)
        trained_on = log.last_number("train_samples") or _evaluated_samples(log)
        if trained_on is not None and trained_on > _MAX_SAMPLES:
            problem = f"reports more than {_MAX_SAMPLES:,} training samples, which is impossible"
            raise DataError(log.name, problem, "pass the unchanged log of the run")
        if trained_on is not None:
            samples.append(trained_on)
            rates.append(trained_on / (60 * minutes[-1]))
    failed = minutes.count(math.inf)
    max_failed = 1 if len(minutes) >= _MIN_RUNS_FOR_MEAN else 0
    if failed > max_failed:
        problem = f"{failed} of {len(minutes)} runs failed or have an unreadable log"
        remedy = f"add successful runs, because at most {max_failed} of a system's runs may fail"
        raise DataError(str(directory), problem, remedy)
    log, description = logs[0], _description(directory)
    batch = log.last_number("global_batch_size")
    published = re.search(r"training_results_v([\d.]+)", str(directory))
    return Entry(
        round=published[1] if published else "",
        system=directory.name if directory.name != _BENCHMARK else directory.parent.name,
        accelerators=_accelerators(directory, log, description),
        time_min=olympic_mean(minutes) if max_failed else math.fsum(minutes) / len(minutes),
        samples=math.fsum(samples) / len(samples) if samples else None,
        seq_per_s=math.fsum(rates) / len(rates) if rates else None,
        submitter=log.last_text("submission_org") or "",
        division=log.last_text("submission_division") or "",
        accelerator=str(description.get("accelerator_model_name", "")),
        global_batch_size=None if batch is None else int(batch),
    )


def _evaluated_samples(log: RunLog) -> float | None:
    """Return the number of sequences trained on until the last evaluation.

    Returns None if the log does not record it.
    """
    for record in reversed(log.named("eval_accuracy")):
        for key in ("samples_count", "epoch_num"):
            value = record.metadata.get(key)
            if isinstance(value, int | float) and is_number(value) and value > 1:
                return value  # unlike 1, which is an epoch number in some logs
    return None


def _description(directory: Path) -> Mapping[str, Any]:
    """Return the system description that belongs to the directory results/<system>/bert.

    This is the content of systems/<system>.json, or an empty mapping if the file does not exist.
    Raises DataError if the file cannot be read.
    """
    path = (directory / "../../../systems").resolve() / f"{directory.parent.name}.json"
    try:
        return parse_json_object(read_regular_file(path, _MAX_DESCRIPTION_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problem = f"is not a system description ({error})"
        raise DataError(str(path), problem, "fix or remove the file") from None


def _accelerators(directory: Path, log: RunLog, description: Mapping[str, Any]) -> int:
    """Return a system's number of accelerators. Raises DataError if it is not known.

    The number is that of the ranks if the log records it, otherwise that in the description.
    """
    ranks = log.last_number("number_of_ranks")
    if ranks is not None:
        return int(ranks)
    counts = [description.get(key) for key in ("number_of_nodes", "accelerators_per_node")]
    try:
        nodes, each = (int(count) for count in counts)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        nodes = each = 0
    if nodes < 1 or each < 1:
        remedy = "add the number to systems/<system>.json, next to the directory results/"
        raise DataError(str(directory), "the number of accelerators is not known", remedy)
    return nodes * each
