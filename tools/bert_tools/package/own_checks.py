"""Our own checks of a system's results, in both divisions; stricter than MLCommons' checkers.

MLCommons' accept any accuracy, any seed and an aborted run in the open division, and one log that
does not comply in both.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import read_log
from bert_tools.package.run_facts import RunFacts, read_facts
from bert_tools.package.system_description import read_description
from mlperf_bert.config.run_config import CLOSED_TARGET_ACCURACY, may_begin_with
from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief

RUNS = 10
LOG_NAMES = tuple(f"result_{number}.txt" for number in range(RUNS))

Problems = list[DataError]


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
