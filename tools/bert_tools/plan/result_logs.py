"""Reads the MLPerf logs below a directory, and makes one entry per system. No torch.

Source of a system's score: MLPerf's training rules: the mean without the fastest and the slowest
run; one run may have failed and then counts as the slowest.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import RunLog, is_number, read_foreign_log
from bert_tools.common.means import olympic_mean
from bert_tools.plan.entries import Entry
from mlperf_bert.errors import DataError
from mlperf_bert.files import parse_json_object, read_regular_file

_BENCHMARK = "bert"
_MOST_SAMPLES = 10**12  # a run that says more is no run
_FEWEST_FOR_A_SCORE = 3  # of the runs that an olympic mean takes
_MAX_DESCRIPTION_BYTES = 2**20


def read_results(root: Path) -> tuple[list[Entry], list[DataError]]:
    """The entries below a directory, by path, and why a log or a system was left out.

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
    """Read one log. Raises DataError if it is of another benchmark, or its run did not end."""
    log = read_foreign_log(path, str(path))
    benchmark = log.last_text("submission_benchmark") or _BENCHMARK
    if _BENCHMARK not in benchmark.casefold():
        raise DataError(log.name, f"is of the benchmark {benchmark!r}", "give logs of bert")
    start, stop = log.named("run_start"), log.named("run_stop")
    if not start or not stop or stop[-1].time_ms <= start[-1].time_ms:
        raise DataError(log.name, "holds no run that ended", "give the log of a whole run")
    return log


def _entry(directory: Path, logs: Sequence[RunLog], unreadable: int) -> Entry:
    """The entry of one directory's runs, of which `unreadable` have no log that can be read.

    Raises DataError if they make no score, differ in their numbers of ranks, or do not say the
    number of accelerators.
    """
    stated = (log.last_number("number_of_ranks") for log in logs)
    ranks = {each for each in stated if each is not None}
    if len(ranks) > 1:
        problem = f"holds runs on {' and '.join(f'{each:.0f}' for each in sorted(ranks))} ranks"
        raise DataError(str(directory), problem, "give each system a directory of its own")
    minutes = [math.inf] * unreadable  # infinite for a run that failed
    samples, rates = [], []
    for log in logs:
        start, stop = log.named("run_start")[-1], log.named("run_stop")[-1]
        if stop.metadata.get("status") != "success":
            minutes.append(math.inf)
            continue
        minutes.append((stop.time_ms - start.time_ms) / 60_000)
        trained_on = log.last_number("train_samples") or _evaluated_samples(log)
        if trained_on is not None and trained_on > _MOST_SAMPLES:
            problem = f"says more than {_MOST_SAMPLES:,} samples"
            raise DataError(log.name, problem, "give the log of a real run")
        if trained_on is not None:
            samples.append(trained_on)
            rates.append(trained_on / (60 * minutes[-1]))
    failed = minutes.count(math.inf)
    most = 1 if len(minutes) >= _FEWEST_FOR_A_SCORE else 0
    if failed > most:
        problem = f"{failed} of {len(minutes)} runs failed or cannot be read"
        raise DataError(str(directory), problem, f"a score may leave out {most} of so many")
    log, description = logs[0], _description(directory)
    batch = log.last_number("global_batch_size")
    published = re.search(r"training_results_v([\d.]+)", str(directory))
    return Entry(
        round=published[1] if published else "",
        system=directory.name if directory.name != _BENCHMARK else directory.parent.name,
        accelerators=_accelerators(directory, log, description),
        time_min=olympic_mean(minutes) if most else math.fsum(minutes) / len(minutes),
        samples=math.fsum(samples) / len(samples) if samples else None,
        seq_per_s=math.fsum(rates) / len(rates) if rates else None,
        submitter=log.last_text("submission_org") or "",
        division=log.last_text("submission_division") or "",
        accelerator=str(description.get("accelerator_model_name", "")),
        global_batch_size=None if batch is None else int(batch),
    )


def _evaluated_samples(log: RunLog) -> float | None:
    """Sequences trained on until the last evaluation, where the log counts them."""
    for record in reversed(log.named("eval_accuracy")):
        for key in ("samples_count", "epoch_num"):
            value = record.metadata.get(key)
            if isinstance(value, int | float) and is_number(value) and value > 1:
                return value  # 1 is an epoch number, which some logs have there
    return None


def _description(directory: Path) -> Mapping[str, Any]:
    """systems/<system>.json for results/<system>/bert; empty if there is none. Raises DataError."""
    path = (directory / "../../../systems").resolve() / f"{directory.parent.name}.json"
    try:
        return parse_json_object(read_regular_file(path, _MAX_DESCRIPTION_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"is no system description ({error})", "mend it") from None


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
