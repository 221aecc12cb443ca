"""What one log says of its run, as far as a submission depends on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert_tools.common.log_reader import RunLog, is_number
from bert_tools.package.course import Course, read_course
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief

# Each stands once in a log of ours (mlperf_log.py).
_SINGLE: Mapping[str, type] = {
    "submission_benchmark": str,
    "submission_division": str,
    "seed": int,
    "global_batch_size": int,
    "gradient_accumulation_steps": int,
    "quality_target": float,
    "rules_enforced": bool,
    "resumed": bool,
    "initial_weights": str,
    "number_of_nodes": int,
    "number_of_ranks": int,
    "run_start": type(None),
    "run_stop": type(None),
}
_MAY_LACK = ("initial_weights",)  # older logs do; the closed division asks for it (own_checks.py)
# Before `init_stop`: what ten runs need not have in common, or what is asked of each alone.
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
    """One run. `accuracy` is the last one measured, `minutes` the time on the clock.

    `initial_weights`: "checkpoint" or "random", None where the log does not say. `settings`: what
    the runs of a system have in common, target and hyper-parameters above all.
    """

    name: str
    benchmark: str
    division: str
    seed: int
    global_batch_size: int
    grad_accum_steps: int
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
    settings: Mapping[str, Any]
    course: Course


def read_facts(log: RunLog) -> RunFacts:
    """The facts of a log. Raises DataError where a record is missing, twice there or of no use."""
    values = _single_values(log)
    stop = log.records[-1]
    if stop.key != "run_stop":
        raise DataError(log.name, f"goes on after run_stop: {in_brief(stop.key)}", _RUN_AGAIN)
    course = read_course(log)
    caches = log.named("cache_clear")
    return RunFacts(
        name=log.name,
        benchmark=values["submission_benchmark"],
        division=values["submission_division"],
        seed=values["seed"],
        global_batch_size=values["global_batch_size"],
        grad_accum_steps=values["gradient_accumulation_steps"],
        quality_target=values["quality_target"],
        rules_enforced=values["rules_enforced"],
        resumed=values["resumed"],
        initial_weights=values.get("initial_weights"),
        nodes=values["number_of_nodes"],
        ranks=values["number_of_ranks"],
        cache_cleared=bool(caches) and all(record.value is True for record in caches),
        status=str(stop.metadata.get("status")),
        accuracy=course.evaluations[-1].accuracy,
        minutes=(course.stop_ms - course.start_ms) / _MS_PER_MINUTE,
        settings=_settings(log),
        course=course,
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
        if not _is_of(value, _SINGLE[key]):
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
