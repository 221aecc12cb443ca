"""Ways to forge a log: each changes its records in place, or gives others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from submissions import write_records
from support import mlperf_records

EVALUATION = ("eval_start", "eval_accuracy", "eval_stop", "tracked_stats")
Records = list[dict[str, Any]]
Forge = Callable[[Records], Records | None]


def rewrite(log: Path, forge: Forge) -> None:
    contents = mlperf_records(log)
    write_records(log, forge(contents) or contents)


def named(contents: Records, key: str) -> Records:
    return [record for record in contents if record["key"] == key]


def samples_of(record: dict[str, Any]) -> int:
    return int(record["metadata"].get("samples_count", 0))


def move_in_time(contents: Records, by_ms: int) -> None:
    for record in contents:
        record["time_ms"] += by_ms


def scale_times(contents: Records, divisor: int) -> None:
    first_ms = contents[0]["time_ms"]
    for record in contents:
        record["time_ms"] = first_ms + (record["time_ms"] - first_ms) // divisor


def scale_throughputs(contents: Records, factor: float) -> None:
    for record in named(contents, "tracked_stats"):
        record["value"]["throughput"] *= factor


def scale_samples(contents: Records, divisor: int) -> None:
    for record in contents:
        if samples_of(record):
            samples = record["metadata"]["samples_count"] // divisor
            record["metadata"].update(samples_count=samples, epoch_num=samples)
    named(contents, "train_samples")[0]["value"] //= divisor


def drop_evaluation(contents: Records, number: int) -> Records:
    samples = samples_of(named(contents, "eval_start")[number])
    return [record for record in contents if samples_of(record) != samples]


def insert_again(contents: Records, keys: tuple[str, ...]) -> Records:
    """The second evaluation's records of these keys stand there twice."""
    last = contents.index(named(contents, "tracked_stats")[1])
    again = [record for record in contents[last - 3 : last + 1] if record["key"] in keys]
    return [*contents[: last + 1], *(record | {} for record in again), *contents[last + 1 :]]


def evaluate_twice(contents: Records) -> Records:
    """The second evaluation stands there again, at the time when it ended."""
    twice = insert_again(contents, EVALUATION)
    last = twice.index(named(twice, "tracked_stats")[1])
    for record in twice[last + 1 : last + 5]:
        record["time_ms"] = twice[last]["time_ms"]
    return twice


def move(contents: Records, key: str, before: str) -> Records:
    """The last record of `key` gets in front of the last one of `before`, with its time."""
    moved, place = named(contents, key)[-1], named(contents, before)[-1]
    rest = [record for record in contents if record is not moved]
    at = next(number for number, record in enumerate(rest) if record is place)
    return [*rest[:at], moved | {"time_ms": place["time_ms"]}, *rest[at:]]


def early_last_evaluation(contents: Records) -> None:
    """The last evaluation and the stop follow the evaluation before at once."""
    samples = samples_of(named(contents, "eval_start")[-1])
    first = next(n for n, record in enumerate(contents) if samples_of(record) == samples)
    move_in_time(contents[first:], contents[first - 1]["time_ms"] - contents[first]["time_ms"])


def set_last(key: str, **members: Any) -> Forge:
    return lambda contents: named(contents, key)[-1].update(members)


def set_first(key: str, **members: Any) -> Forge:
    return lambda contents: named(contents, key)[0].update(members)


def later(key: str, by_ms: int) -> Forge:
    """A record of the end and all after it come later."""
    return lambda contents: move_in_time(contents[contents.index(named(contents, key)[0]) :], by_ms)


def set_metadata(key: str, **members: int) -> Forge:
    return lambda contents: named(contents, key)[1]["metadata"].update(members)


def late_start(contents: Records) -> None:
    for key in ("init_stop", "run_start", "epoch_start", "block_start"):
        named(contents, key)[0]["time_ms"] += 9000


def cut(contents: Records, samples: int) -> Records:
    """The run as if it had ended with the evaluation after so many samples."""
    end = 1 + max(n for n, each in enumerate(contents) if samples_of(each) == samples)
    tail = contents[-5:]
    move_in_time(tail, contents[end - 1]["time_ms"] - tail[0]["time_ms"])
    named(tail, "train_samples")[0]["value"] = samples
    return [*contents[:end], *tail]


def all_new_but_accuracies(contents: Records) -> None:
    scale_times(contents, 2)
    scale_throughputs(contents, 2.0)


def all_new_but_throughputs(contents: Records) -> None:
    for record in named(contents, "eval_accuracy"):
        record["value"] *= 1.0001


def free_evaluations(contents: Records) -> None:
    """Each evaluation begins earlier by its own length, as if training had gone on meanwhile."""
    for start, stop in zip(
        named(contents, "eval_start"), named(contents, "eval_stop"), strict=True
    ):
        move_in_time(contents[contents.index(start) :], start["time_ms"] - stop["time_ms"])


def beside_training(contents: Records) -> None:
    """The log of a run whose evaluations took none of its time; results came 51 steps later."""
    start_ms, per_s, later = named(contents, "run_start")[0]["time_ms"], 701.25, 51 * 32
    for record in contents:
        if record["key"] in ("eval_accuracy", "eval_stop", "tracked_stats"):
            record["time_ms"] = start_ms + round(1000 * (samples_of(record) + later) / per_s)
        elif record["key"] == "eval_start":
            record["time_ms"] = start_ms + round(1000 * samples_of(record) / per_s)
    for record in named(contents, "tracked_stats"):
        samples = samples_of(record) + later
        record["metadata"].update(samples_count=samples, epoch_num=samples)
        record["value"] = {"throughput": per_s}
    for record in contents[-5:]:
        record["time_ms"] = contents[-6]["time_ms"]
