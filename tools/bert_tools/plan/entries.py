"""MLPerf results as the scale-out law sees them: the published table, raw logs, and `--filter`.

Source of a system's score: MLPerf's training rules: the mean without the fastest and the slowest
run; one run may have failed and then counts as the slowest. No torch.
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
    "keep entries that meet it, such as round=2.1, submitter=NVIDIA, accelerator~A100 or "
    f"accelerators>=64; may be repeated, all must hold. KEY: {', '.join(KEYS)}; = compares (case "
    "is ignored), ~ looks for the text, >= and <= compare numbers, rounds too"
)
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(>=|<=|=|~)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
}
_BENCHMARK = "bert"
_MOST_SAMPLES = 10**12  # a run that says more is no run
_FEWEST_FOR_A_SCORE = 3  # of the runs that an olympic mean takes
_MAX_DESCRIPTION_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One system's result; None or empty text where its source does not give a value.

    `time_min` is the olympic mean of its runs in minutes, `samples` the mean number of sequences
    a run trained on, `seq_per_s` the mean of samples over time of a run, evaluation included.
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
        """The entry's name in tables and messages."""
        return " ".join(filter(None, (self.round, self.submitter, self.system)))


def published_entries() -> list[Entry]:
    """The shipped table: MLPerf Training BERT, v0.7 to v5.0, 348 entries."""
    text = resources.files(__package__).joinpath("published_results.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [_published(row) for row in csv.DictReader(lines)]


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
    """The entries that meet all conditions. Raises ConfigError for one that cannot be read."""
    tests = [_test(condition) for condition in conditions]
    return [entry for entry in entries if all(test(entry) for test in tests)]


def _test(condition: str) -> Callable[[Entry], bool]:
    match = _CONDITION.fullmatch(condition)
    if match is None or match[1] not in KEYS:
        remedy = f"write it as accelerator~A100, with one of {', '.join(KEYS)}"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)
    key, sign, wanted = match.groups()
    text, limit = wanted.casefold(), _number(wanted)
    if sign in (">=", "<=") and limit is None:
        remedy = f"give a number after {sign}, as {key}{sign}64"
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
    try:
        return float(text)
    except ValueError:
        return None


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
