"""What one log says of its run, as far as a submission depends on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlperf_bert.errors import DataError
from mlperf_bert.log_reader import RunLog, is_number
from mlperf_bert.untrusted import in_brief

# Each stands once in a log of ours (mlperf_log.py).
_SINGLE: Mapping[str, type] = {
    "submission_benchmark": str,
    "submission_division": str,
    "seed": int,
    "global_batch_size": int,
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
_RUN_AGAIN = "run it again with this version"
_MS_PER_MINUTE = 60_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run. `accuracy` is the last one measured, `minutes` the time on the clock.

    `initial_weights`: "checkpoint" or "random", None where the log does not say.
    """

    name: str
    benchmark: str
    division: str
    seed: int
    global_batch_size: int
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


def read_facts(log: RunLog) -> RunFacts:
    """The facts of a log. Raises DataError where a record is missing, twice there or of no use."""
    values = _single_values(log)
    stop, accuracies = log.records[-1], log.named("eval_accuracy")
    if stop.key != "run_stop":
        raise DataError(log.name, f"goes on after run_stop: {in_brief(stop.key)}", _RUN_AGAIN)
    if not accuracies or not _is_fraction(accuracies[-1].value):
        raise DataError(log.name, "does not end with an accuracy within 0 .. 1", _RUN_AGAIN)
    (start,) = log.named("run_start")
    if stop.time_ms <= start.time_ms:
        raise DataError(log.name, "ends before it starts", _RUN_AGAIN)
    caches = log.named("cache_clear")
    return RunFacts(
        name=log.name,
        benchmark=values["submission_benchmark"],
        division=values["submission_division"],
        seed=values["seed"],
        global_batch_size=values["global_batch_size"],
        quality_target=values["quality_target"],
        rules_enforced=values["rules_enforced"],
        resumed=values["resumed"],
        initial_weights=values.get("initial_weights"),
        nodes=values["number_of_nodes"],
        ranks=values["number_of_ranks"],
        cache_cleared=bool(caches) and all(record.value is True for record in caches),
        status=str(stop.metadata.get("status")),
        accuracy=accuracies[-1].value,
        minutes=(stop.time_ms - start.time_ms) / _MS_PER_MINUTE,
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


def _is_fraction(value: object) -> bool:
    return isinstance(value, int | float) and is_number(value) and 0 <= value <= 1


def _is_of(value: object, kind: type) -> bool:
    if kind in (int, float):
        return is_number(value) and (kind is float or type(value) is int)
    return type(value) is kind
