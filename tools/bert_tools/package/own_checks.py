"""Our own checks of a system's results, in both divisions; stricter than MLCommons' checkers.

MLCommons' accept any accuracy, any seed and an aborted run in the open division, and one log that
does not comply in both. The system's description is checked by MLCommons' submission rules; that
every field is there is for their checker to say. A log is text, and nothing tells a forged one from
a true one.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import AS_WRITTEN, RunLog, is_number, read_log
from mlperf_bert.config.run_config import CLOSED_TARGET_ACCURACY, may_begin_with
from mlperf_bert.errors import DataError
from mlperf_bert.files import MAX_JSON_BYTES, in_brief, parse_json_object, read_regular_file

RUNS = 10
LOG_NAMES = tuple(f"result_{number}.txt" for number in range(RUNS))

Problems = list[DataError]
STATUSES = (
    "Available on-premise",
    "Available cloud",
    "Preview",
    "Research, Development, or Internal (RDI)",
)
DIVISIONS = ("closed", "open")

# Whole numbers, written as strings, and their least values.
_COUNTS = {"number_of_nodes": 1, "host_processors_per_node": 1, "accelerators_per_node": 0}
_NEVER_EMPTY = ("submitter", "system_name", "framework")
_USED = ("division", "status", *_COUNTS, *_NEVER_EMPTY)  # without which no check means anything
# Records that stand once in a log of ours (mlperf_log.py): name among the facts (None: no fact),
# and type.
_SINGLE: Mapping[str, tuple[str | None, type]] = {
    "submission_benchmark": ("benchmark", str),
    "submission_division": ("division", str),
    "seed": ("seed", int),
    "global_batch_size": (None, int),
    "gradient_accumulation_steps": (None, int),
    "quality_target": ("quality_target", float),
    "rules_enforced": ("rules_enforced", bool),
    "resumed": ("resumed", bool),
    "initial_weights": ("initial_weights", str),
    "number_of_nodes": ("nodes", int),
    "number_of_ranks": ("ranks", int),
    "init_stop": (None, type(None)),
    "run_start": (None, type(None)),
    "run_stop": (None, type(None)),
}
_MAY_LACK = ("initial_weights",)  # not in older logs; the closed division asks for it
# Before `init_stop`: facts in which ten runs may differ, or which are checked for each alone.
_OF_ONE_RUN = (
    "cache_clear",
    "init_start",
    "initial_weights",
    "number_of_nodes",
    "resumed",
    "rules_enforced",
    "seed",
    "submission_benchmark",
    "submission_division",
    "weights_initialization",
)
_RUN_AGAIN = "run it again with this version"
_MS_PER_MINUTE = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run. `accuracy` is the last measured one, `minutes` the time on the clock.

    `initial_weights`: "checkpoint" or "random", None if the log does not have it.
    `first_evaluation`: the samples before the first evaluation. `settings`: facts that the runs of
    a system share, above all target and hyper-parameters.
    """

    name: str
    benchmark: str
    division: str
    seed: int
    quality_target: float
    rules_enforced: bool
    resumed: bool
    initial_weights: str | None
    nodes: int
    ranks: int
    cache_cleared: bool
    status: str
    accuracy: float
    minutes: float
    first_evaluation: int | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SystemResults:
    """The readable runs of a system, in the order of their numbers."""

    name: str
    division: str
    runs: tuple[RunFacts, ...]


def check_systems(tree: Path, systems: Sequence[str]) -> tuple[list[SystemResults], Problems]:
    """Check systems/<system>.json and results/<system>/bert/ of an exported tree.

    It finds every problem, not only the first.
    """
    checked, problems = [], []
    for system in systems:
        results, found = _check_system(tree, system)
        checked.append(results)
        problems += found
    return checked, problems


def _check_system(tree: Path, system: str) -> tuple[SystemResults, Problems]:
    path, name = tree / "systems" / f"{system}.json", f"systems/{system}.json"
    # The export has found missing ones.
    description, problems = read_description(path, name) if path.exists() else ({}, [])
    directory = tree / "results" / system / "bert"
    logs = sorted(directory.glob("*"))
    problems += _check_names([log.name for log in logs], f"results/{system}/bert")
    runs = []
    for log in logs:
        try:
            runs.append(read_facts(read_log(log, f"results/{system}/bert/{log.name}")))
        except DataError as error:
            problems.append(error)
    for run in runs:
        problems += _check_run(run)
        problems += _check_against(run, description, name)
    problems += _check_together(runs, f"results/{system}/bert")
    division = str(description.get("division", ""))
    return SystemResults(system, division, tuple(runs)), problems


def _check_names(names: Sequence[str], where: str) -> Problems:
    if sorted(names) == sorted(LOG_NAMES):
        return []
    missing = ", ".join(name for name in LOG_NAMES if name not in names)
    surplus = ", ".join(name for name in names if name not in LOG_NAMES)
    problem = f"holds {len(names)} logs"
    problem += f", not {missing}" if missing else ""
    problem += f", but {surplus}" if surplus else ""
    remedy = f"put the logs of {RUNS} runs there as {LOG_NAMES[0]} .. {LOG_NAMES[-1]}"
    return [DataError(where, problem, remedy)]


def _check_run(run: RunFacts) -> Iterator[DataError]:
    if run.status != "success":
        yield DataError(
            run.name, f"the run's status is {in_brief(run.status)}", "use one with 'success'"
        )
    if run.benchmark != "bert":
        yield DataError(
            run.name, f"the benchmark is {in_brief(run.benchmark)}", "this package is of bert"
        )
    if run.accuracy < run.quality_target:
        problem = f"the accuracy ends at {run.accuracy}, below its target of {run.quality_target}"
        yield DataError(run.name, problem, "train until the target is reached")
    if run.division == "closed" and min(run.quality_target, run.accuracy) < CLOSED_TARGET_ACCURACY:
        problem = f"target {run.quality_target} and accuracy {run.accuracy} in the closed division"
        yield DataError(run.name, problem, f"both must be at least {CLOSED_TARGET_ACCURACY}")
    if not may_begin_with(run.initial_weights, run.division):
        problem = f"initial_weights is {in_brief(run.initial_weights)} in the closed division"
        if run.initial_weights is None:
            problem = "does not say which weights it started from (initial_weights)"
        remedy = (
            "run again from the given checkpoint (INIT_CHECKPOINT, --init-checkpoint), or go open"
        )
        yield DataError(run.name, problem, remedy)
    if run.resumed:
        yield DataError(run.name, "the run was resumed from a checkpoint", "use one that was not")
    if not run.rules_enforced:
        problem = "the run was made with mlperf.enforce_rules = false"
        yield DataError(run.name, problem, "run again with it true")


def _check_against(
    run: RunFacts, description: Mapping[str, Any], where: str
) -> Iterator[DataError]:
    division = description.get("division")
    if division != run.division:
        problem = f"the division is {in_brief(run.division)}, in {where} {in_brief(division)}"
        yield DataError(run.name, problem, "correct the description, or run in that division")
    nodes, accelerators = (
        _count(description.get(field)) for field in ("number_of_nodes", "accelerators_per_node")
    )
    if nodes is not None and nodes != run.nodes:
        problem = f"ran on {run.nodes} nodes, {where} has {nodes}"
        yield DataError(run.name, problem, "put it under the system that it ran on")
    if nodes and accelerators and nodes * accelerators != run.ranks:
        problem = f"has {run.ranks} ranks, {where} {nodes} x {accelerators} accelerators"
        yield DataError(run.name, problem, "describe what was used, one rank an accelerator")


def _count(text: object) -> int | None:
    """A number in a description; check_description has reported invalid ones."""
    is_count = isinstance(text, str) and len(text) < 10 and text.isascii() and text.isdecimal()
    return int(str(text)) if is_count else None


def _check_together(runs: Sequence[RunFacts], where: str) -> Iterator[DataError]:
    seeds = Counter(run.seed for run in runs)
    for seed in (seed for seed, count in seeds.items() if count > 1):
        names = ", ".join(Path(run.name).name for run in runs if run.seed == seed)
        yield DataError(where, f"seed {seed} in {names}", "run again with seeds of their own")
    facts = [
        {**run.settings, "samples before the first evaluation": run.first_evaluation}
        for run in runs
    ]
    for what in dict.fromkeys(key for each in facts for key in each):
        values = sorted({in_brief(each.get(what)) for each in facts})
        if len(values) > 1:
            problem = f"runs with different {in_brief(what)}: {', '.join(values)}"
            yield DataError(where, problem, "make all ten runs with one config")


def read_description(path: Path, name: str) -> tuple[dict[str, Any], list[DataError]]:
    """The description in a file, and its problems, which refer to it as `name`."""
    remedy = "mend it, or copy another of systems/"
    try:
        description = parse_json_object(read_regular_file(path, MAX_JSON_BYTES))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        return {}, [DataError(name, problem, remedy)]
    except ValueError as error:
        return {}, [DataError(name, f"cannot be read ({error})", remedy)]
    wrong = check_description(description)
    return description, [DataError(name, problem, remedy) for problem in wrong]


def check_description(description: Mapping[str, object]) -> list[str]:
    """Problems of a description, one per string; [] if it has none.

    Stricter than MLCommons' checker, which accepts a field that is no string and fails on it later.
    Any field is allowed.
    """
    problems = [f"{field} is missing" for field in _USED if field not in description]
    for field, value in description.items():
        if not isinstance(value, str):
            problems.append(f"{field} is {in_brief(value)}, and every value must be a string")
        else:
            problems += _check_value(field, value)
    return problems


def _check_value(field: str, value: str) -> list[str]:
    choices = {"division": DIVISIONS, "status": STATUSES}.get(field)
    if choices and value not in choices:
        return [
            f"{field} is {in_brief(value)}, which is not one of {', '.join(map(repr, choices))}"
        ]
    if field in _NEVER_EMPTY and not value.strip():
        return [f"{field} is empty"]
    least = _COUNTS.get(field)
    if least is not None and not (re.fullmatch(r"[0-9]{1,6}", value) and int(value) >= least):
        return [f"{field} is {in_brief(value)}, which is not a whole number of at least {least}"]
    return []


def read_facts(log: RunLog) -> RunFacts:
    """The facts of a log. Raises DataError if a record is missing, repeated or invalid."""
    if log.last_text("quality_target") == "none":
        problem = "is of a run without a target (eval.target_accuracy = 'none')"
        raise DataError(log.name, problem, "no result can be claimed: set a target, run again")
    values = _single_values(log)
    stop = log.records[-1]
    if stop.key != "run_stop":
        raise DataError(log.name, f"goes on after run_stop: {in_brief(stop.key)}", _RUN_AGAIN)
    evaluations = log.named("eval_accuracy")
    if not evaluations:
        raise DataError(log.name, "holds no eval_accuracy", _RUN_AGAIN)
    accuracy = evaluations[-1].value
    if not (isinstance(accuracy, int | float) and is_number(accuracy) and 0 <= accuracy <= 1):
        problem = f"eval_accuracy is {in_brief(accuracy)}, not a number within 0 .. 1"
        raise DataError(f"{log.name}, line {evaluations[-1].line}", problem, AS_WRITTEN)
    (start,) = log.named("run_start")
    if stop.time_ms <= start.time_ms:
        raise DataError(log.name, "stops before it starts (run_stop, run_start)", AS_WRITTEN)
    caches = log.named("cache_clear")
    facts: dict[str, Any] = {name: values.get(key) for key, (name, _) in _SINGLE.items() if name}
    return RunFacts(
        name=log.name,
        **facts,
        cache_cleared=bool(caches) and all(record.value is True for record in caches),
        status=str(stop.metadata.get("status")),
        accuracy=accuracy,
        minutes=(stop.time_ms - start.time_ms) / _MS_PER_MINUTE,
        first_evaluation=evaluations[0].metadata.get("samples_count"),
        settings=_settings(log),
    )


def _single_values(log: RunLog) -> dict[str, Any]:
    found = {key: log.named(key) for key in _SINGLE}
    missing = [key for key, records in found.items() if not records and key not in _MAY_LACK]
    if missing:
        problem = f"holds no {', no '.join(missing)}"
        remedy = f"the run did not end, or an older version wrote the log: {_RUN_AGAIN}"
        raise DataError(log.name, problem, remedy)
    there = {key: records for key, records in found.items() if records}
    for key, records in there.items():
        value = records[0].value
        if len(records) > 1:
            raise DataError(log.name, f"holds {len(records)} records {key}", _RUN_AGAIN)
        if not _is_of(value, _SINGLE[key][1]):
            raise DataError(log.name, f"{key} is {in_brief(value)}", _RUN_AGAIN)
    return {key: records[0].value for key, records in there.items()}


def _settings(log: RunLog) -> dict[str, Any]:
    keys = [record.key for record in log.records]
    before = log.records[: keys.index("init_stop")]
    return {record.key: record.value for record in before if record.key not in _OF_ONE_RUN}


def _is_of(value: object, kind: type) -> bool:
    if kind in (int, float):
        return is_number(value) and (kind is float or type(value) is int)
    return type(value) is kind
