"""`state.json`: what a checkpoint says of its run, beside the tensors. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mlperf_bert.checkpoint.manifest import (
    ELSE,
    MODEL,
    RANK_STATES,
    STATE,
    as_damage,
    read_manifest,
    step_of,
    verify_files,
)
from mlperf_bert.common.errors import CheckpointError, DataError
from mlperf_bert.common.records import Record, read_record, write_json
from mlperf_bert.common.untrusted import in_brief
from mlperf_bert.run.outcome import Status, as_status

_MOST_NUMBERS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """What a checkpoint says of its run.

    The position of the sampler is `step`, as its batches are a function of that and the seed.
    """

    step: int
    samples: int
    seed: int
    mlm_accuracy: float | None  # of these very weights, or not known
    vocabulary_sha256: str
    data_sha256: str = "unknown"  # of both sets
    world_size: int = 1
    ended: Status | None = None  # how, where the run is over
    seconds: float = 0.0  # of training, all parts of the run together
    skipped_in_a_row: int = 0  # steps up to this one
    best_mlm_accuracy: float | None = None  # of all weights that were evaluated
    health: Mapping[str, float] = field(default_factory=dict)  # of `health.Health`
    noise: Mapping[str, float] = field(default_factory=dict)  # of `noise_meter.NoiseRecord`

    def to_json(self) -> bytes:
        """The file's contents."""
        return write_json(asdict(self))


def read_state(directory: Path) -> CheckpointState:
    """Parse a checkpoint's state, and hold it against its manifest.

    Raises CheckpointError, UnreadableError.
    """
    manifest = read_manifest(directory)
    try:
        record = read_record(directory / STATE, missing="is missing", remedy=ELSE)
        state = _parse(record)
    except DataError as error:
        raise as_damage(error) from None
    same = (manifest.step, manifest.samples, manifest.vocabulary_sha256)
    named = step_of(directory)
    if (state.step, state.samples, state.vocabulary_sha256) != same or named not in (
        -1,
        state.step,
    ):
        raise CheckpointError(str(directory / STATE), "is of another checkpoint", ELSE)
    return state


def verify(directory: Path) -> CheckpointState:
    """Check every file of a checkpoint of a run; its state.

    Raises CheckpointError, UnreadableError.
    """
    manifest = read_manifest(directory)
    if manifest.is_converted:
        problem, remedy = "holds converted weights, no run to go on with", "use --init-checkpoint"
        raise CheckpointError(str(directory), problem, remedy)
    verify_files(directory, manifest, {STATE, MODEL, RANK_STATES, *manifest.files})
    return read_state(directory)


def _parse(record: Record) -> CheckpointState:
    ended = as_status(record.text("ended")) if record.has("ended") else None
    if ended is None and record.has("ended"):
        raise record.error("ended", f"is {in_brief(record.text('ended'))}")
    return CheckpointState(
        step=record.integer("step"),
        samples=record.integer("samples"),
        seed=record.integer("seed"),
        mlm_accuracy=_accuracy(record, "mlm_accuracy"),
        vocabulary_sha256=record.text("vocabulary_sha256"),
        data_sha256=record.text("data_sha256"),
        world_size=record.integer("world_size", low=1, high=10**6),
        ended=ended,
        seconds=record.number("seconds"),
        skipped_in_a_row=record.integer("skipped_in_a_row", high=10**6),
        best_mlm_accuracy=_accuracy(record, "best_mlm_accuracy"),
        health=_numbers(record, "health"),
        noise=_numbers(record, "noise") if record.has("noise") else {},  # None before 2026-11-22
    )


def _numbers(record: Record, key: str) -> dict[str, float]:
    numbers = record.record(key)
    if len(numbers.values) > _MOST_NUMBERS:
        raise record.error(key, f"has {len(numbers.values)} entries")
    return {name: numbers.number(name) for name in numbers.values}


def _accuracy(record: Record, key: str) -> float | None:
    if not record.has(key):
        return None
    value = record.number(key)
    if not 0 <= value <= 1:
        raise record.error(key, f"is {value}, not within 0 .. 1")
    return value
