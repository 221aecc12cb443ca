"""Checks of a system's results that are stricter than those of MLCommons.

In the open division, MLCommons' checkers accept any accuracy, any seed and an aborted run. In both
divisions, they accept one log that does not comply. We accept one run that missed its target, whose
time counts as infinite, as MLPerf's rules say. This module checks the values of a system's
description by MLCommons' submission rules. Only MLCommons' checker requires all fields. A log is
plain text, so no check can tell a forged log from a genuine one.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import AS_WRITTEN, RunLog, is_number, read_log
from mlperf_bert.config.run_config import (
    CLOSED_EVAL_SAMPLES,
    CLOSED_TARGET_ACCURACY,
    may_begin_with,
)
from mlperf_bert.errors import DataError
from mlperf_bert.files import MAX_JSON_BYTES, in_brief, parse_json_object, read_regular_file

RUNS = 10
LOG_NAMES = tuple(f"result_{number}.txt" for number in range(RUNS))

Problems = list[DataError]
DIVISIONS = ("closed", "open")
# Part of a value that nobody has measured yet. The command `system` replaces such values.
UNKNOWN = "unknown until measured"

# Fields that are whole numbers written as strings, with their smallest values.
_COUNTS = {"number_of_nodes": 1, "host_processors_per_node": 1, "accelerators_per_node": 0}
_NEVER_EMPTY = ("submitter", "system_name", "framework")
_USED = ("division", *_COUNTS, *_NEVER_EMPTY)  # fields that our checks need
# Records that a log of ours (mlperf_log.py) has exactly once, each with the name of its field in
# RunFacts (None if it has no field) and its type.
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
    "eval_samples": ("eval_samples", int),
    "init_stop": (None, type(None)),
    "run_start": (None, type(None)),
    "run_stop": (None, type(None)),
}
# Records before `init_stop` that may differ among the ten runs, or that are checked run by run.
_OF_ONE_RUN = (
    "cache_clear",
    "init_start",
    "number_of_nodes",
    "resumed",
    "rules_enforced",
    "seed",
    "submission_benchmark",
    "submission_division",
)
_RERUN = "rerun it with this version"
_MS_PER_MINUTE = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts about one run, read from its log.

    `initial_weights` is "checkpoint" or "random". `accuracy` is the last measured accuracy.
    `minutes` is the time from `run_start` to `run_stop`, or infinity if the run missed its target.
    `first_evaluation` is the number of samples before the first evaluation. `settings` are the
    records that all runs of a system must share, for example the hyper-parameters.
    """

    name: str
    benchmark: str
    division: str
    seed: int
    quality_target: float
    rules_enforced: bool
    resumed: bool
    initial_weights: str
    nodes: int
    ranks: int
    eval_samples: int
    cache_cleared: bool
    status: str
    accuracy: float
    minutes: float
    first_evaluation: int | None
    settings: Mapping[str, Any]

    @property
    def missed(self) -> bool:
        """Return True if the run ended by itself without reaching its target."""
        return math.isinf(self.minutes)


@dataclass(frozen=True, slots=True)
class SystemResults:
    """The runs of a system whose logs can be read, in the order of their numbers."""

    name: str
    division: str
    runs: tuple[RunFacts, ...]


def check_systems(tree: Path, systems: Sequence[str]) -> tuple[list[SystemResults], Problems]:
    """Check systems/<system>.json and results/<system>/bert/ of an exported tree.

    Returns the runs of each system whose logs can be read, and all problems.
    """
    checked, problems = [], []
    for system in systems:
        results, found = _check_system(tree, system)
        checked.append(results)
        problems += found
    return checked, problems


def _check_system(tree: Path, system: str) -> tuple[SystemResults, Problems]:
    """Check the description and the logs of one system.

    Returns the runs whose logs can be read, and all problems.
    """
    path, name = tree / "systems" / f"{system}.json", f"systems/{system}.json"
    # `export` has already reported a missing description.
    description, problems = read_description(path, name) if path.exists() else ({}, [])
    if unknown := unknown_fields(description):
        problem = f"does not know {', '.join(unknown)}"
        remedy = (
            f"run `mlperf_bert system {system}` on this machine, and write the rest into the file"
        )
        problems.append(DataError(name, problem, remedy))
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
    """Return a problem unless the log files of a system are result_0.txt to result_9.txt."""
    if sorted(names) == sorted(LOG_NAMES):
        return []
    missing = ", ".join(name for name in LOG_NAMES if name not in names)
    surplus = ", ".join(name for name in names if name not in LOG_NAMES)
    problem = f"contains {len(names)} logs instead of {RUNS}"
    problem += f" (missing: {missing})" if missing else ""
    problem += f" (not expected: {surplus})" if surplus else ""
    remedy = f"provide the logs {LOG_NAMES[0]} to {LOG_NAMES[-1]} of {RUNS} runs (NEXP={RUNS})"
    return [DataError(where, problem, remedy)]


def _check_run(run: RunFacts) -> Iterator[DataError]:
    """Yield the problems of a single run.

    The run is not compared with other runs or with the description of its system.
    """
    if run.status != "success" and not run.missed:
        yield DataError(
            run.name,
            f"the status of the run is {in_brief(run.status)}",
            "use a run that ended with the status 'success'",
        )
    if run.benchmark != "bert":
        yield DataError(
            run.name,
            f"the benchmark is {in_brief(run.benchmark)}",
            "use a run of the benchmark 'bert'",
        )
    if run.accuracy < run.quality_target and not run.missed:
        problem = f"the last accuracy, {run.accuracy}, is below the target of {run.quality_target}"
        yield DataError(run.name, problem, "train until the target is reached")
    if run.division == "closed" and run.quality_target < CLOSED_TARGET_ACCURACY:
        problem = f"the target is {run.quality_target}"
        remedy = f"for the closed division, train to a target of at least {CLOSED_TARGET_ACCURACY}"
        yield DataError(run.name, problem, remedy)
    if run.division == "closed" and run.eval_samples != CLOSED_EVAL_SAMPLES:
        problem = f"the accuracy was measured on {run.eval_samples:,} samples"
        remedy = f"for the closed division, evaluate on all {CLOSED_EVAL_SAMPLES:,}"
        yield DataError(run.name, problem, remedy)
    if not may_begin_with(run.initial_weights, run.division):
        problem = f"the closed division forbids initial_weights {in_brief(run.initial_weights)}"
        remedy = (
            "rerun from MLPerf's checkpoint (INIT_CHECKPOINT, --init-checkpoint), or use the open "
            "division"
        )
        yield DataError(run.name, problem, remedy)
    if run.resumed:
        problem = "the run was resumed from a checkpoint, so its time does not count"
        yield DataError(run.name, problem, "use a run that was not interrupted")
    if not run.rules_enforced:
        problem = "the run was started with mlperf.enforce_rules = false"
        yield DataError(run.name, problem, "set mlperf.enforce_rules to true, and rerun")


def _check_against(
    run: RunFacts, description: Mapping[str, Any], where: str
) -> Iterator[DataError]:
    """Yield the contradictions between a run and its system's description, the file `where`."""
    division = description.get("division")
    if division != run.division:
        problem = f"the division is {in_brief(run.division)}, but {where} has {in_brief(division)}"
        yield DataError(run.name, problem, "correct the description, or rerun in that division")
    nodes, accelerators = (
        _count(description.get(field)) for field in ("number_of_nodes", "accelerators_per_node")
    )
    if nodes is not None and nodes != run.nodes:
        problem = f"the run used {run.nodes} nodes, but {where} describes {nodes}"
        yield DataError(run.name, problem, "move the log to the system that the run used")
    if nodes and accelerators and nodes * accelerators != run.ranks:
        problem = f"the run used {run.ranks} ranks, but {where} describes {nodes} x {accelerators}"
        remedy = "describe only the accelerators that the run used, which are one per rank"
        yield DataError(run.name, f"{problem} accelerators", remedy)


def _count(text: object) -> int | None:
    """Convert a description's text to an integer, or return None if the text is invalid.

    `check_description` reports invalid numbers.
    """
    is_count = isinstance(text, str) and len(text) < 10 and text.isascii() and text.isdecimal()
    return int(str(text)) if is_count else None


def _check_together(runs: Sequence[RunFacts], where: str) -> Iterator[DataError]:
    """Yield problems if runs of a system share a seed, or if other settings differ between runs."""
    seeds = Counter(run.seed for run in runs)
    for seed in (seed for seed, count in seeds.items() if count > 1):
        names = ", ".join(Path(run.name).name for run in runs if run.seed == seed)
        problem = f"{names} have the same seed {seed}"
        yield DataError(where, problem, "rerun them, each with its own seed")
    missed = [Path(run.name).name for run in runs if run.missed]
    if len(missed) > 1:
        problem = f"{', '.join(missed)} missed the target, and MLPerf accepts one such run"
        yield DataError(where, problem, f"train longer, and repeat all {RUNS} runs")
    facts = [
        {**run.settings, "samples before the first evaluation": run.first_evaluation}
        for run in runs
    ]
    for what in dict.fromkeys(key for each in facts for key in each):
        values = sorted({in_brief(each.get(what)) for each in facts})
        if len(values) > 1:
            problem = f"the runs have different values of {in_brief(what)} ({', '.join(values)})"
            yield DataError(where, problem, f"use the same config for all {RUNS} runs")


def read_description(path: Path, name: str) -> tuple[dict[str, Any], list[DataError]]:
    """Read a system's description and check it.

    Returns the description and its problems, whose messages use `name` for the file.
    """
    remedy = "correct it, or copy another description in systems/"
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
    """Return the problems of a system's description, one per string.

    This check is stricter than MLCommons' checker, which first accepts a value that is not a string
    and fails later because of it. Unknown fields are allowed.
    """
    problems = [f"{field} is missing" for field in _USED if field not in description]
    for field, value in description.items():
        if not isinstance(value, str):
            problems.append(f"{field} must be a string, not {in_brief(value)}")
        else:
            problems += _check_value(field, value)
    return problems


def unknown_fields(description: Mapping[str, object]) -> list[str]:
    """Return the fields of a description whose values contain UNKNOWN, in their order."""
    return [field for field, value in description.items() if UNKNOWN in str(value)]


def _check_value(field: str, value: str) -> list[str]:
    if (field, value) == ("host_processors_per_node", UNKNOWN):
        return []
    if field == "division" and value not in DIVISIONS:
        return [f"{field} must be one of {', '.join(map(repr, DIVISIONS))}, not {in_brief(value)}"]
    if field in _NEVER_EMPTY and not value.strip():
        return [f"{field} is empty"]
    least = _COUNTS.get(field)
    if least is not None and not (re.fullmatch(r"[0-9]{1,6}", value) and int(value) >= least):
        return [f"{field} must be a whole number of at least {least}, not {in_brief(value)}"]
    return []


def read_facts(log: RunLog) -> RunFacts:
    """Return the facts about the run of a log.

    Raises DataError if a record is missing, repeated or invalid.
    """
    if log.last_text("quality_target") == "none":
        problem = "the run had no target (eval.target_accuracy = 'none'), so it has no result"
        raise DataError(log.name, problem, "set eval.target_accuracy to a number, and rerun")
    values = _single_values(log)
    stop = log.records[-1]
    if stop.key != "run_stop":
        raise DataError(log.name, f"has the record {in_brief(stop.key)} after run_stop", _RERUN)
    evaluations = log.named("eval_accuracy")
    if not evaluations:
        raise DataError(log.name, "contains no record of eval_accuracy", _RERUN)
    accuracy = evaluations[-1].value
    if not (isinstance(accuracy, int | float) and is_number(accuracy) and 0 <= accuracy <= 1):
        problem = f"eval_accuracy must be a number from 0 to 1, not {in_brief(accuracy)}"
        raise DataError(f"{log.name}, line {evaluations[-1].line}", problem, AS_WRITTEN)
    (start,) = log.named("run_start")
    if stop.time_ms <= start.time_ms:
        raise DataError(log.name, "run_stop is not later than run_start", AS_WRITTEN)
    # A run that a signal stopped has trained on since its last evaluation.
    evaluated = evaluations[-1].metadata.get("samples_count")
    status = str(stop.metadata.get("status"))
    missed = status == "aborted" and accuracy < values["quality_target"]
    missed = missed and evaluated == log.last_number("train_samples")
    caches = log.named("cache_clear")
    facts: dict[str, Any] = {name: values.get(key) for key, (name, _) in _SINGLE.items() if name}
    return RunFacts(
        name=log.name,
        **facts,
        cache_cleared=bool(caches) and all(record.value is True for record in caches),
        status=status,
        accuracy=accuracy,
        minutes=math.inf if missed else (stop.time_ms - start.time_ms) / _MS_PER_MINUTE,
        first_evaluation=evaluations[0].metadata.get("samples_count"),
        settings=_settings(log),
    )


def _single_values(log: RunLog) -> dict[str, Any]:
    """Return the values of the log's records that must occur once (`_SINGLE`).

    Raises DataError, as `read_facts` does.
    """
    found = {key: log.named(key) for key in _SINGLE}
    missing = [key for key, records in found.items() if not records]
    if missing:
        problem = f"has no record of {', '.join(missing)}, so the run did not end or is too old"
        raise DataError(log.name, problem, _RERUN)
    for key, records in found.items():
        value, kind = records[0].value, _SINGLE[key][1]
        if len(records) > 1:
            raise DataError(log.name, f"has {len(records)} records of {key} instead of one", _RERUN)
        if not _has_type(value, kind):
            wanted = "null" if kind is type(None) else f"of type {kind.__name__}"
            raise DataError(log.name, f"{key} must be {wanted}, not {in_brief(value)}", _RERUN)
    return {key: records[0].value for key, records in found.items()}


def _settings(log: RunLog) -> dict[str, Any]:
    """Return the values, by key, in which the runs of a system must not differ.

    The log records them before `init_stop`. Of records without a value, such as one per initialized
    weight, the number must not differ.
    """
    keys = [record.key for record in log.records]
    before = log.records[: keys.index("init_stop")]
    return {
        record.key: keys.count(record.key) if record.value is None else record.value
        for record in before
        if record.key not in _OF_ONE_RUN
    }


def _has_type(value: object, kind: type) -> bool:
    """Return whether a JSON value has the type `kind`.

    Integers count as floats. Booleans count neither as integers nor as floats.
    """
    if kind in (int, float):
        return is_number(value) and (kind is float or type(value) is int)
    return type(value) is kind
