"""Reads `squad_result.json`, what a fine-tuning run says of itself; anybody may have written it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bert_tools.common.log_reader import is_number
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.records import Record, read_record

RESULT = "squad_result.json"
SCHEMA_VERSION = 1
REMEDY = "give the directory of a run that has ended, as `squad train` wrote it"

Device = Literal["cpu", "cuda"]
Kind = Literal["F", "B", "W", "update", "evaluate"]

_KINDS: tuple[Kind, ...] = ("F", "B", "W", "update", "evaluate")
_MOST_RANKS = 4096
_MOST_SPANS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What a stage did of one microbatch: forward, backward of inputs, of weights; in seconds."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run. Rates in windows a second; utilisation 0 .. 1; None is what nobody knows.

    `cpu_s` is of all ranks, in training, `core_wait_s` what their threads waited for a core
    meanwhile. `same` is what runs must have in common to be compared: processor, data, model,
    weights, precision.
    """

    engine: str
    schedule: str
    ranks: int
    stages: int
    seed: int
    device: Device
    processor: str
    cores: int
    precision: str
    same: dict[str, str | int | float | None]
    global_batch: int
    updates: int
    samples: int
    losses: tuple[float | None, ...]
    train_s: float
    end_to_end_s: float
    samples_per_s: float
    end_to_end_samples_per_s: float
    validation_loss: float
    exact_match: float
    f1: float
    utilisation: float | None
    utilisation_means: str
    noise_scale: float | None
    cpu_s: float
    core_wait_s: float | None
    peak_memory_bytes: int
    model_flops_per_s: float | None
    bubble_measured: float | None
    bubble_formula: float | None
    timeline: tuple[Span, ...]

    @property
    def is_comparable(self) -> bool:
        """Whether its times mean anything: on a CPU no more ranks than cores."""
        return self.device != "cpu" or self.ranks <= self.cores


def read_run(directory: Path) -> RunRecord:
    """The record of a run's directory. Raises DataError where it is missing or is none."""
    path = directory / RESULT
    record = read_record(path, missing="is missing: the run has not ended", remedy=REMEDY)
    record.check_version(SCHEMA_VERSION, "schema_version")
    settings, seconds = record.record("settings"), record.record("seconds")
    rates = record.record("samples_per_s")
    bubble = record.record("bubble") if record.has("bubble") else None
    utilisation = _numbers(record, "device_utilisation")
    return RunRecord(
        engine=record.text("engine"),
        schedule=record.text("schedule") if record.has("schedule") else "",
        ranks=record.integer("ranks", 1, _MOST_RANKS),
        stages=record.integer("stages", 1, _MOST_RANKS),
        seed=record.integer("seed"),
        device=_device(record),
        processor=record.text("processor"),
        cores=record.integer("cores", 1),
        precision=record.text("precision"),
        same=_same(record, settings),
        global_batch=settings.integer("global_batch", 1),
        updates=record.integer("updates", 1),
        samples=record.integer("samples", 1),
        losses=_losses(record),
        train_s=_above_zero(seconds, "train"),
        end_to_end_s=_above_zero(seconds, "end_to_end"),
        samples_per_s=_above_zero(rates, "train"),
        end_to_end_samples_per_s=_above_zero(rates, "end_to_end"),
        validation_loss=record.number("validation_loss"),
        exact_match=record.number("exact_match"),
        f1=record.number("f1"),
        utilisation=sum(utilisation) / len(utilisation) if utilisation else None,
        utilisation_means=record.text("device_utilisation_means"),
        noise_scale=_optional(record, "noise_scale"),
        cpu_s=sum(_numbers(record, "cpu_seconds")),
        core_wait_s=_core_wait(record),
        peak_memory_bytes=max(record.integers("peak_memory_bytes"), default=0),
        model_flops_per_s=_optional(record, "model_flops_per_s"),
        bubble_measured=_optional(bubble, "measured"),
        bubble_formula=_optional(bubble, "formula"),
        timeline=_timeline(record),
    )


def has_ended(directory: Path) -> bool:
    """Whether a run has left its record there, readable or not."""
    return os.path.lexists(directory / RESULT)


def _same(record: Record, settings: Record) -> dict[str, str | int | float | None]:
    """What must not differ: of the settings all but the batch and what follows from it."""
    model, data = record.record("model"), record.record("data")
    free = ("global_batch", "updates", "learning_rate", "noise_every", "capacity_tokens")
    found: dict[str, str | int | float | None] = {
        "device": record.text("device"),
        "processor": record.text("processor"),
        "precision": record.text("precision"),
        "samples": record.integer("samples"),
        "init": record.text("init"),
    }
    for name, part in (("model", model), ("data", data), ("settings", settings)):
        for key, value in part.values.items():
            if name == "settings" and key in free:
                continue
            if value is not None and not isinstance(value, str | int | float):
                raise part.error(key, "is no plain value")
            found[f"{name}.{key}"] = value
    return found


def _device(record: Record) -> Device:
    return "cuda" if record.text("device") == "cuda" else "cpu"


def _above_zero(record: Record, key: str) -> float:
    value = record.number(key)
    if value <= 0:
        raise record.error(key, f"is {value}, not above zero")
    return value


def _optional(record: Record | None, key: str) -> float | None:
    if record is None or not record.has(key):
        return None
    value = record.number(key)
    if value < 0:
        raise record.error(key, f"is {value}, below zero")
    return value


def _numbers(record: Record, key: str) -> list[float]:
    """A list of numbers; those that are null are left out."""
    values = record.values.get(key)
    if not isinstance(values, list) or len(values) > _MOST_RANKS:
        raise record.error(key, "is no list of numbers, one a rank")
    known = [value for value in values if value is not None]
    if not all(map(is_number, known)):
        raise record.error(key, "is no list of numbers, one a rank")
    return known


def _core_wait(record: Record) -> float | None:
    """Of all ranks; None where one does not tell, or the run was before the key was there."""
    if not record.has("core_wait_seconds"):
        return None
    known = _numbers(record, "core_wait_seconds")
    return sum(known) if len(known) == len(record.values["core_wait_seconds"]) else None


def _losses(record: Record) -> tuple[float | None, ...]:
    values = record.values.get("losses")
    if not isinstance(values, list) or not all(
        value is None or is_number(value) for value in values
    ):
        raise record.error("losses", "is no list of numbers, one an update")
    return tuple(values)


def _timeline(record: Record) -> tuple[Span, ...]:
    spans = record.records("timeline")
    if len(spans) > _MOST_SPANS:
        raise record.error("timeline", f"has {len(spans):,} parts, more than {_MOST_SPANS:,}")
    return tuple(_span(each) for each in spans)


def _span(record: Record) -> Span:
    begin, end = record.number("begin_s"), record.number("end_s")
    if end < begin:
        raise record.error("end_s", "is before begin_s")
    if not record.has("kind"):
        raise record.error("kind", "is missing")
    return Span(
        rank=record.integer("rank", 0, _MOST_RANKS),
        stage=record.integer("stage", 0, _MOST_RANKS),
        kind=record.choice("kind", _KINDS),
        microbatch=record.integer("microbatch", 0, _MOST_SPANS),
        begin_s=begin,
        end_s=end,
    )


def check_same(runs: list[RunRecord]) -> None:
    """Raise DataError where runs to compare differ in what they must share."""
    for run in runs[1:]:
        for key in sorted(run.same.keys() | runs[0].same.keys()):
            first, other = runs[0].same.get(key), run.same.get(key)
            if first != other:
                problem = f"{key} is {other!r} with seed {run.seed}, {first!r} of {runs[0].engine}"
                raise DataError(run.engine, problem, "compare runs of one comparison only")
