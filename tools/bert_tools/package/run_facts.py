"""Facts of a run, read from its log, on which a submission depends.

A log is text, and nothing tells a forged one from a true one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert_tools.common.log_reader import AS_WRITTEN, RunLog, is_number
from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief

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
