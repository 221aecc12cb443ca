"""Reads the MLPerf logs below a directory, and makes one entry per system. No torch.

Source of a system's score: MLPerf's training rules: the mean without the fastest and the slowest
run; one run may have failed and then counts as the slowest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import RunLog, is_number, read_foreign_log
from bert_tools.common.means import olympic_mean
from bert_tools.plan.entries import Entry
from mlperf_bert.errors import DataError
from mlperf_bert.files import parse_json_object, read_regular_file

_BENCHMARK = "bert"
_FEWEST_FOR_A_SCORE = 3  # of the runs that an olympic mean takes
_MOST_FAILED = 1  # of them
_MAX_DESCRIPTION_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Skipped:
    """A log or a system that could not be used, and why."""

    name: str
    problem: str


@dataclass(frozen=True, slots=True)
class _LoggedRun:
    """The run of one log: minutes on the clock, infinite if it failed, and samples if logged."""

    log: RunLog
    minutes: float
    samples: float | None


def read_results(root: Path) -> tuple[list[Entry], list[Skipped]]:
    """The entries below a directory, by path, and what was left out.

    Every directory with `result_<n>.txt` in it is one system. In MLPerf's layout,
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
        remedy = "give a directory with results/<system>/bert/result_<n>.txt below it"
        raise DataError(str(root), "holds no MLPerf log of bert", remedy)
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for directory, logs in systems.items():
        runs = []
        for path in logs:
            try:
                runs.append(_read_run(path))
            except DataError as error:
                skipped.append(_skipped(error))
        try:
            entries.append(_entry(directory, runs, len(logs) - len(runs)))
        except DataError as error:
            skipped.append(_skipped(error))
    return entries, skipped


def _read_run(path: Path) -> _LoggedRun:
    """Read the run of one log.

    Raises DataError if it is no log, is of another benchmark, or its run did not end.
    """
    log = read_foreign_log(path, str(path))
    benchmark = log.last_text("submission_benchmark") or _BENCHMARK
    if _BENCHMARK not in benchmark.casefold():
        raise DataError(log.name, f"is of the benchmark {benchmark!r}", "give logs of bert")
    start, stop = log.named("run_start"), log.named("run_stop")
    if not start or not stop or stop[-1].time_ms <= start[-1].time_ms:
        raise DataError(log.name, "holds no run that ended", "give the log of a whole run")
    succeeded = stop[-1].metadata.get("status") == "success"
    minutes = (stop[-1].time_ms - start[-1].time_ms) / 60_000 if succeeded else math.inf
    return _LoggedRun(log, minutes, log.last_number("train_samples") or _evaluated_samples(log))


def _evaluated_samples(log: RunLog) -> float | None:
    """Sequences trained on until the last evaluation, where the log counts them."""
    for record in reversed(log.named("eval_accuracy")):
        for key in ("samples_count", "epoch_num"):
            value = record.metadata.get(key)
            if isinstance(value, int | float) and is_number(value) and value > 1:
                return value  # 1 is an epoch number, which some logs have there
    return None


def _entry(directory: Path, runs: Sequence[_LoggedRun], unreadable: int) -> Entry:
    """The entry made from one directory's runs.

    Raises DataError if they make no score or do not say the number of accelerators.
    """
    time_min = _score(directory, [*(run.minutes for run in runs), *[math.inf] * unreadable])
    log = runs[0].log
    description = _description(directory)
    rated = [
        (run.samples, run.samples / (60 * run.minutes))
        for run in runs
        if run.samples is not None and run.minutes < math.inf
    ]
    samples, rates = zip(*rated, strict=True) if rated else ((), ())
    batch = log.last_number("global_batch_size")
    return Entry(
        system=directory.name if directory.name != _BENCHMARK else directory.parent.name,
        accelerators=_accelerators(directory, log, description),
        time_min=time_min,
        samples=_mean(samples),
        seq_per_s=_mean(rates),
        submitter=log.last_text("submission_org") or "",
        division=log.last_text("submission_division") or "",
        accelerator=str(description.get("accelerator_model_name", "")),
        global_batch_size=None if batch is None else int(batch),
    )


def _score(directory: Path, minutes: Sequence[float]) -> float:
    """The olympic mean, or the plain mean of too few runs for it. Raises DataError."""
    failed = sum(each == math.inf for each in minutes)
    most = _MOST_FAILED if len(minutes) >= _FEWEST_FOR_A_SCORE else 0
    if failed > most:
        problem = f"{failed} of {len(minutes)} runs failed or cannot be read"
        raise DataError(str(directory), problem, f"a score may leave out {most} of so many")
    if len(minutes) < _FEWEST_FOR_A_SCORE:
        return math.fsum(minutes) / len(minutes)
    return olympic_mean(minutes)


def _accelerators(directory: Path, log: RunLog, description: Mapping[str, Any]) -> int:
    """The log's own number of ranks, else nodes times accelerators of a node as described."""
    ranks = log.last_number("number_of_ranks")
    if ranks is not None:
        return int(ranks)
    counts = [description.get(key) for key in ("number_of_nodes", "accelerators_per_node")]
    try:
        nodes, each = (int(count) for count in counts)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        nodes = each = 0
    if nodes < 1 or each < 1:
        remedy = "put results/<system>/bert/ beside systems/<system>.json, which says it"
        raise DataError(str(directory), "does not say how many accelerators it is of", remedy)
    return nodes * each


def _description(directory: Path) -> Mapping[str, Any]:
    """systems/<system>.json for results/<system>/bert; empty if there is none. Raises DataError."""
    path = (directory / "../../../systems").resolve() / f"{directory.parent.name}.json"
    try:
        return parse_json_object(read_regular_file(path, _MAX_DESCRIPTION_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"is no system description ({error})", "mend it") from None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _skipped(error: DataError) -> Skipped:
    where, problem, _ = error.args
    return Skipped(where, problem)
